//! The command line: arguments, commands and output.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;

use crate::error::{Error, ErrorKind};
use crate::escape::line;
use crate::privileges::checks;
use crate::privileges::checks::SystemFacts;
use crate::resolve::naming;
use crate::sys;
use crate::sys::spawn::Streams;
use live::LiveTarget;

mod args;
mod backend;
mod commands;
mod debuginfod;
mod discover;
mod history;
mod input;
mod live;
mod output;
mod suggest;

/// Exit codes of `record -- COMMAND` for failures that are not the command's, as `timeout` has them.
const FAILED: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Runs the command line; the exit code is 0 good, 1 failed, 2 usage, 3 grown more than `diff --fail-above` allows or
/// stacks that `replay --verify-edges` finds impossible, 4 if the former cannot be known. That of `record -- COMMAND`
/// is the command's own, 128 and a signal's number, or one of 125 to 127.
pub fn main() -> ExitCode {
    if sys::process::is_setuid() {
        print_error(&checks::setuid_refused(&SystemFacts::read()));
        return ExitCode::from(if runs_command() { FAILED } else { 1 });
    }
    if std::env::args_os().nth(1).is_some_and(|word| word == naming::ARGUMENT) {
        let memory = std::env::args().nth(2).and_then(|word| word.parse().ok());
        return naming::worker::main(memory);
    }
    let cli = match args::Cli::try_parse_from(words(std::env::args_os())) {
        Ok(cli) => cli,
        Err(e) => {
            match suggest::instead_of_command(&e).or_else(|| suggest::usage_error(&e)) {
                Some(ours) => print_error(&ours),
                None => drop(e.print()),
            }
            return if !e.use_stderr() {
                ExitCode::SUCCESS
            } else if runs_command() {
                ExitCode::from(FAILED)
            } else {
                ExitCode::from(2)
            };
        }
    };
    let done = match cli.command {
        args::Command::Record(r) => match r.pid {
            Some(pid) => suggest::check_no_command(pid, &r.command)
                .and_then(|()| commands::record::record(LiveTarget::Pid(pid), &r.common))
                .map(drop),
            None => match suggest::check_command(&r.command).and_then(|()| {
                let streams = match (r.common.with_parent, r.common.show_output) {
                    (false, _) => Streams::Ours,
                    (true, false) => Streams::None,
                    (true, true) => Streams::OnlyOutput,
                };
                commands::record::record(LiveTarget::Launch(r.command, streams), &r.common)
            }) {
                Ok(code) => return ExitCode::from(code),
                Err(e) => {
                    print_error(&e);
                    return ExitCode::from(match e.kind {
                        ErrorKind::NoSuchCommand => NOT_FOUND,
                        ErrorKind::NotExecutable => NOT_EXECUTABLE,
                        ErrorKind::Killed(signal) => 128 + signal,
                        _ => FAILED,
                    });
                }
            },
        },
        args::Command::Replay(r) => match commands::replay::replay(&r) {
            Ok(false) => return ExitCode::from(3),
            done => done.map(drop),
        },
        args::Command::Diff(d) => match commands::diff::diff(&d, None) {
            Ok(commands::diff::Gate::Grown) => return ExitCode::from(3),
            Ok(commands::diff::Gate::Undecided) => return ExitCode::from(4),
            done => done.map(drop),
        },
        args::Command::Compare(c) => match commands::compare::compare(&c) {
            Ok(commands::diff::Gate::Grown) => return ExitCode::from(3),
            Ok(commands::diff::Gate::Undecided) => return ExitCode::from(4),
            Err(e) if matches!(e.kind, ErrorKind::Killed(_)) => {
                print_error(&e);
                return ExitCode::from(128 + libc::SIGINT as u8);
            }
            done => done.map(drop),
        },
        args::Command::Selftest(s) => match commands::selftest::selftest(&s) {
            Ok(false) => return ExitCode::FAILURE,
            done => done.map(drop),
        },
        args::Command::Completions(c) => commands::completions::completions(c.shell),
        args::Command::Man(m) => commands::completions::man(m.directory.as_deref()),
        args::Command::Report(r) => commands::report::report(&r),
        args::Command::Export(e) => commands::export::export(&e),
        args::Command::Merge(m) => commands::merge::merge(&m),
        args::Command::Push(p) => match commands::push::push(&p) {
            Ok(false) => return ExitCode::FAILURE,
            done => done.map(drop),
        },
        args::Command::Doctor(d) => match commands::doctor::doctor(&d) {
            Ok(false) => return ExitCode::FAILURE,
            done => done.map(drop),
        },
        args::Command::Dump(d) => commands::dump::dump(&d),
        args::Command::Heap(h) => commands::heap::heap(&h),
        args::Command::Mcp(m) => commands::mcp::mcp(&m),
        args::Command::Host(h) => commands::host::host(&h),
        args::Command::Top(t) => commands::top::top(&t),
        args::Command::Attach(a) => discover::find(&a.target.process())
            .and_then(|pid| commands::record::record(LiveTarget::Pid(pid), &a.common))
            .map(drop),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            print_error(&e);
            ExitCode::from(if e.kind == ErrorKind::Usage { 2 } else { 1 })
        }
    }
}

/// The words of the command line for clap. Its `help` has no `--help`, which would print the same.
fn words(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.collect();
    if words.get(1).is_some_and(|word| word == "help") {
        words.retain(|word| word != "--help" && word != "-h");
    }
    words
}

/// Whether the words, which clap has refused, are those of `record -- COMMAND`.
fn runs_command() -> bool {
    let mut words = std::env::args_os().skip(1);
    words.next().is_some_and(|word| word == "record") && words.any(|word| word == "--")
}

/// Advice to run nativeprof as root, with the words of this command line instead of an example.
fn with_words(hint: &str, words: &[String]) -> String {
    let (example, others) = hint
        .split_once("   or")
        .map_or((hint, ""), |(first, _)| (first, &hint[first.len()..]));
    match example.split(' ').collect::<Vec<_>>()[..] {
        ["sudo", program, "..."] | ["sudo", program, "attach", _] if !words.is_empty() => {
            format!("sudo {program} {}{others}", quoted_words(words))
        }
        _ => hint.to_string(),
    }
}

/// Words as a shell reads them.
fn quoted_words(words: &[String]) -> String {
    words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_string()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// Text of an error, as it may be sent to a terminal: it may quote names of a target.
fn printable(e: &Error) -> Error {
    let words = std::env::args_os()
        .skip(1)
        .map(OsString::into_string)
        .collect::<Result<Vec<_>, _>>();
    let hint = with_words(&e.hint, &words.unwrap_or_default());
    Error {
        kind: e.kind,
        what: line(&e.what).into_owned(),
        why: line(&e.why).into_owned(),
        hint: line(&hint).into_owned(),
    }
}

fn print_error(e: &Error) {
    print_line(&format!("nativeprof: {}", printable(e)));
}

/// Prints one line to standard error; names in it are escaped.
fn print_status(text: &str) {
    print_line(&format!("nativeprof: {}", line(text)));
}

/// Prints to standard error. If nothing reads it any more (`2>&1 | head`), the recording still continues and is written.
fn print_line(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_has_the_words_of_the_command_line() {
        let words = ["attach", "-o", "it's a file", "12"].map(String::from);
        for (hint, expected) in [
            ("sudo np attach 12", "sudo np attach -o 'it'\\''s a file' 12"),
            (
                "sudo np attach 12   or, for all processes: sudo sysctl x=0",
                "sudo np attach -o 'it'\\''s a file' 12   or, for all processes: sudo sysctl x=0",
            ),
            (
                "sudo np ...   or, permanently: x",
                "sudo np attach -o 'it'\\''s a file' 12   or, permanently: x",
            ),
            (
                "sudo sysctl kernel.kptr_restrict=1",
                "sudo sysctl kernel.kptr_restrict=1",
            ),
            ("sudo podman run --cap-add=BPF ...", "sudo podman run --cap-add=BPF ..."),
        ] {
            assert_eq!(with_words(hint, &words), expected);
            assert_eq!(with_words(hint, &[]), hint);
        }
    }

    #[test]
    fn errors_stay_three_lines() {
        let e = Error::new(ErrorKind::Io, "a\x1b[2Jb").why("c\nd").hint("e\rf");
        assert_eq!(printable(&e).to_string(), "a\\x1b[2Jb\n  why: c\\x0ad\n  try: e\\x0df");
    }
}
