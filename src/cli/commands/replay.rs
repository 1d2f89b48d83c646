//! `replay`: the profile of a tape.

use std::fs::File;
use std::io::Read;
use std::rc::Rc;

use crate::cli::args;
use crate::cli::input;
use crate::cli::live::Invoker;
use crate::cli::output::Output;
use crate::cli::output::first_functions;
use crate::cli::output::style::TerminalStyle;
use crate::cli::print_line;
use crate::edges::CodePlace;
use crate::error::{Error, Result};
use crate::escape::line;
use crate::privileges::credentials::Caps;
use crate::privileges::phases;
use crate::privileges::phases::WRITING;
use crate::process::modules::Modules;
use crate::profile::summary;
use crate::resolve::naming::NamingProcess;
use crate::session::replay::Replay;
use crate::session::{Grouping, SessionOptions};
use crate::tape::encode;

/// Bytes of a packed tape that are read.
const MAX_PACKED: u64 = 512 << 20;

/// Replays a tape into a profile file. False if the machine code contradicts a stack.
pub fn replay(options: &args::Replay) -> Result<bool> {
    let invoker = Invoker::switch_to(false, Caps::NONE, options.names.debuginfod)?;
    let mut packed = Vec::new();
    File::open(&options.tape)
        .and_then(|f| f.take(MAX_PACKED).read_to_end(&mut packed))
        .map_err(|e| input::unreadable(&options.tape, e))?;
    // A tape is not trusted.
    phases::drop_for_symbolization(Caps::of(WRITING))?;
    let tape = encode::read(&packed).map_err(|e| Error {
        what: format!("{}: {}", options.tape.display(), e.what),
        ..e
    })?;
    let tape = Rc::new(tape);
    let output = Output::new(
        options.output.as_deref(),
        options.format.as_deref(),
        &format!("nativeprof-{}", tape.header.pid),
    )?
    .shown(&options.shown, false)?;
    output.check_inputs(std::slice::from_ref(&options.tape))?;
    phases::drop_for_symbolization(output.needs())?;
    let grouping = Grouping {
        processes: options.processes,
        threads: options.threads,
    };
    let native = !options.no_native;
    let session_options = SessionOptions {
        grouping,
        native,
        ..SessionOptions::default()
    };
    let mut replay = if options.verify_edges {
        Replay::with_edges(&tape, session_options)?
    } else {
        Replay::new(&tape, session_options)?
    };
    replay.name_apart(invoker.fetch, Some(NamingProcess::default()));
    let profile = replay.profile();
    let written = output.write(&profile)?;
    if let Some(text) = first_functions::text(&profile, &TerminalStyle::of_stderr()) {
        print_line(&text);
    }
    print_line(&summary::block(&profile.meta, &written, options.verbose));
    let mut is_possible = true;
    if let Some(edges) = replay.edges() {
        let text = edges.text(&|place| place_name(replay.modules(), place));
        text.lines().for_each(|text| print_line(&format!("  {}", line(text))));
        is_possible = edges.total().impossible == 0;
    }
    output.browse(false);
    output.check_written().map(|()| is_possible)
}

/// `libc.so.6+0x1234`: file and address in it.
fn place_name(modules: &Modules, place: CodePlace) -> String {
    match place {
        CodePlace::File(module, svma) => format!("{}+{svma:#x}", modules.get(module).name()),
        CodePlace::Memory(pid, avma) => format!("{avma:#x} in process {pid}"),
    }
}
