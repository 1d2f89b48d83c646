//! `replay`: the profile of a tape.

use std::fs::File;
use std::io::Read;
use std::rc::Rc;

use super::args::Replay;
use super::debuginfod;
use super::output::Output;
use super::summary;
use crate::capture::tape::format;
use crate::error::{Error, Result};
use crate::process::credentials::Caps;
use crate::process::privilege::{self, WRITING};
use crate::process::sys;
use crate::replay;
use crate::session::{Grouping, Options};

/// Bytes of a packed tape that are read.
const MOST_PACKED: u64 = 512 << 20;

/// Replays a tape into a profile file.
pub fn replay(options: &Replay) -> Result<()> {
    let is_root = sys::effective_uid() == 0;
    let user = privilege::become_caller()?;
    let fetch = debuginfod::fetch(options.names.debuginfod, is_root, user.as_ref())?;
    let mut packed = Vec::new();
    File::open(&options.tape)
        .and_then(|f| f.take(MOST_PACKED).read_to_end(&mut packed))
        .map_err(|e| Error::io(format!("cannot read {}", options.tape.display()), e).hint("check the path"))?;
    // A tape may come from anybody.
    privilege::for_naming(Caps::of(WRITING))?;
    let tape = Rc::new(format::read(&packed)?);
    let output = Output::new(
        options.output.as_deref(),
        options.format.as_deref(),
        &format!("nativeprof-{}", tape.head.pid),
    )?
    .shown(&options.shown)?;
    privilege::for_naming(output.needs())?;
    let grouping = Grouping {
        processes: options.subprocesses,
        threads: options.threads,
    };
    let native = !options.no_native;
    let profile = replay::profile_with(
        &tape,
        Options {
            grouping,
            native,
            weighted: None,
        },
        fetch,
    )?;
    let written = output.write(&profile)?;
    eprintln!("{}", summary::block(&profile.meta, &written));
    Ok(())
}
