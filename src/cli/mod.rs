//! The command line: what was typed, what it means, what is said.

use std::process::ExitCode;

use clap::Parser;

use crate::error::{Error, Kind};
use crate::export::escape::line;

mod args;
mod completions;
mod debuginfod;
mod diff;
mod doctor;
mod dump;
mod export;
mod look;
mod merge;
mod open;
mod output;
mod place;
mod record;
mod replay;
mod report;
mod restrict;
mod rows;
mod selftest;
pub mod summary;
mod table;
mod top;

/// Runs the command line; the exit code is 0 good, 1 failed, 2 usage, 3 grown more than `diff --fail-above` allows.
pub fn main() -> ExitCode {
    let cli = args::Cli::parse(); // ends with code 2 on wrong words
    let done = match cli.command {
        args::Command::Record(r) => match r.pid {
            Some(pid) => record::record(record::Target::Pid(pid), &r.common),
            None => record::record(record::Target::Launch(r.command), &r.common),
        },
        args::Command::Replay(r) => replay::replay(&r),
        args::Command::Diff(d) => match diff::diff(&d) {
            Ok(false) => return ExitCode::from(3),
            done => done.map(drop),
        },
        args::Command::Selftest(s) => match selftest::selftest(&s) {
            Ok(false) => return ExitCode::FAILURE,
            done => done.map(drop),
        },
        args::Command::Completions(c) => completions::completions(c.shell),
        args::Command::Man(m) => completions::man(m.folder.as_deref()),
        args::Command::Report(r) => report::report(&r),
        args::Command::Export(e) => export::export(&e),
        args::Command::Merge(m) => merge::merge(&m),
        args::Command::Doctor(d) => match doctor::doctor(&d) {
            Ok(false) => return ExitCode::FAILURE,
            done => done.map(drop),
        },
        args::Command::Dump(d) => dump::dump(&d),
        args::Command::Top(t) => top::top(&t),
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

/// Text of an error, as it may be sent to a terminal: it may quote names of a target.
fn printable(e: &Error) -> Error {
    Error {
        kind: e.kind,
        what: line(&e.what).into_owned(),
        why: line(&e.why).into_owned(),
        hint: line(&e.hint).into_owned(),
    }
}

/// Says one line to the user, whatever names are in it.
fn say(text: &str) {
    eprintln!("nativeprof: {}", line(text));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_stay_three_lines() {
        let e = Error::new(Kind::Io, "a\x1b[2Jb").why("c\nd").hint("e\rf");
        assert_eq!(printable(&e).to_string(), "a\\x1b[2Jb\n  why: c\\x0ad\n  try: e\\x0df");
    }
}
