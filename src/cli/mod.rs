//! The command line: what was typed, what it means, what is said.

use std::process::ExitCode;

use clap::Parser;

use crate::error::{Error, Kind};

mod args;
mod output;
mod place;
mod record;
mod replay;
mod summary;

/// Runs the command line; the exit code is 0 good, 1 failed, 2 usage.
pub fn main() -> ExitCode {
    let cli = args::Cli::parse(); // ends with code 2 on wrong words
    let done = match cli.command {
        args::Command::Record(r) => match r.pid {
            Some(pid) => record::record(record::Target::Pid(pid), &r.common),
            None => record::record(record::Target::Launch(r.command), &r.common),
        },
        args::Command::Replay(r) => replay::replay(&r),
        args::Command::Attach(a) => record::record(record::Target::Pid(a.pid), &a.common),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("nativeprof: {}", printable(&e));
            ExitCode::from(if e.kind == Kind::Usage { 2 } else { 1 })
        }
    }
}

/// Text of an error without control characters: it may quote names of a target.
fn printable(e: &Error) -> String {
    e.to_string()
        .chars()
        .map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c })
        .collect()
}
