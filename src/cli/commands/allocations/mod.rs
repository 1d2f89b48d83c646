//! `--alloc`: samples what a Python program allocates, by the package `nativeprof` inside of it. A command is run by the
//! package; a running process is made to import it.

use std::path::Path;

use super::record::print_finished;
use crate::cli::args::RecordArgs;
use crate::cli::live::LiveTarget;
use crate::cli::output::Output;
use crate::cli::print_line;
use crate::error::{Error, ErrorKind, Result};
use crate::profile::{json, summary};

mod attach;
mod command;

/// Maximum size of a profile that a program hands over, in bytes.
const MAX_PROFILE: u64 = 2 << 30;

/// Records the allocations of a command or a process, and writes the profile. The exit code is that of a command, else 0.
///
/// # Errors
/// Why allocations cannot be recorded there; those of the output.
pub fn record(target: LiveTarget, options: &RecordArgs) -> Result<u8> {
    match target {
        LiveTarget::Launch(words, streams) => command::record(&words, streams, options),
        LiveTarget::Pid(pid) => attach::record(pid, options).map(|()| 0),
    }
}

/// Writes the profile that a program has handed over, as JSON, and prints its summary. `command`: the command line of the
/// program.
fn write(bytes: &[u8], command: String, output: &Output, options: &RecordArgs) -> Result<()> {
    let mut profile = json::read(bytes).map_err(|e| {
        Error::new(ErrorKind::Data, "the program handed over something that is no profile")
            .why(e.to_string())
            .hint("install the same version of the package `nativeprof` there: pip install --upgrade nativeprof")
    })?;
    profile.meta.command = command;
    let written = output.write(&profile)?;
    print_finished(&profile, &written, options.verbose);
    if let Some(lines) = summary::allocations(&profile) {
        print_line(&lines);
    }
    output.browse(true);
    Ok(())
}

/// The default name of a profile, of the process with this number.
fn output(options: &RecordArgs, pid: u32) -> Result<Output> {
    Output::new(
        options.output.as_deref(),
        options.format.as_deref(),
        &format!("nativeprof-{pid}"),
    )?
    .shown(&options.shown, false)
}

/// A suggestion for what cannot be recorded from inside.
fn from_outside(words: &str) -> String {
    format!("from outside, which needs nothing in the program: nativeprof {words}")
}

/// A file for messages.
fn shown(path: &Path) -> String {
    path.display().to_string()
}
