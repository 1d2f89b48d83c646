//! Runs this program again, as a command that prints JSON or records. Commands give up privileges for good before they read
//! what is not trusted, which a program that goes on to the next one cannot; and a process can be ended at any time.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::error::{Error, ErrorKind, Result};
use crate::sys;
use crate::sys::process::ExitWatch;

/// Bytes of output that are read, at most.
const MAX_OUTPUT: u64 = 64 << 20;
/// Bytes of messages that are read, at most.
const MAX_MESSAGES: u64 = 1 << 16;
/// How often it is checked whether the command is still wanted.
const POLL: Duration = Duration::from_millis(20);
/// Between two reports of progress.
const PROGRESS: Duration = Duration::from_secs(1);

/// How a command is watched.
pub struct Watch<'a> {
    /// Whether the command is no longer wanted.
    pub is_stopped: &'a dyn Fn() -> bool,
    /// Called each second with the time since the start.
    pub progress: &'a dyn Fn(Duration),
}

/// What a command left.
pub struct Finished {
    /// `None`: a signal ended it.
    pub code: Option<i32>,
    output: Vec<u8>,
    messages: String,
}

/// A running command; its process group ends with it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Once it has been waited for, its number may be another one's.
        if let Ok(None) = self.0.try_wait() {
            sys::process::kill_group(self.0.id());
            let _ = self.0.wait(); // it was killed
        }
    }
}

/// This program, whatever it was called when it was started.
const THIS: &str = "/proc/self/exe";

/// What a command runs, for messages.
fn name(command: &Command) -> String {
    match command.get_program() {
        program if program == THIS => "nativeprof".into(),
        program => program.to_string_lossy().into_owned(),
    }
}

/// This program with these words; its standard streams are for the caller to choose.
pub fn command(words: &[impl AsRef<OsStr>]) -> Command {
    let mut command = Command::new(THIS);
    command.args(words).env("NO_COLOR", "1");
    command
}

/// Runs a command of this program in a directory; it is ended after the time `limit`.
///
/// # Errors
/// `Io` if it cannot be started, was cancelled, or took too long.
pub fn run(words: &[impl AsRef<OsStr>], directory: &Path, limit: Duration, watch: &Watch<'_>) -> Result<Finished> {
    let mut command = command(words);
    command
        .current_dir(directory)
        // While the other end is open, a recording goes on.
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    wait_for(&mut command, limit, Duration::ZERO, watch)
}

/// Runs a command in a process group of its own; what it prints to pipes is read. It is ended after the time `limit`. One
/// that is no longer wanted has its input closed, and the time `grace` to end.
///
/// # Errors
/// `Io` if it cannot be started, was cancelled, or took too long.
pub fn wait_for(command: &mut Command, limit: Duration, grace: Duration, watch: &Watch<'_>) -> Result<Finished> {
    let child = command
        .process_group(0)
        .spawn()
        .map_err(|e| Error::not_started(format!("cannot start {}", name(command)), e))?;
    let mut running = Running(child);
    let output = reader(running.0.stdout.take(), MAX_OUTPUT);
    let messages = reader(running.0.stderr.take(), MAX_MESSAGES);
    let start = Instant::now();
    let mut next = PROGRESS;
    let exit = ExitWatch::new(running.0.id());
    while !exit.has_exited() {
        if (watch.is_stopped)() {
            drop(running.0.stdin.take());
            let end = Instant::now() + grace;
            while !exit.has_exited() && Instant::now() < end {
                thread::sleep(POLL);
            }
            // It has not been waited for. What it has started may go on without it.
            sys::process::kill_group(running.0.id());
            return Err(Error::new(ErrorKind::Io, "cancelled").why("the client asked for it, or is gone"));
        }
        let elapsed = start.elapsed();
        if elapsed > limit {
            return Err(Error::new(ErrorKind::Io, format!("ended after {} s", limit.as_secs()))
                .why("it took too long")
                .hint("ask for less: a smaller profile, a shorter recording"));
        }
        if elapsed >= next {
            next += PROGRESS;
            (watch.progress)(elapsed);
        }
        thread::sleep(POLL);
    }
    // What a recorded command has left behind.
    sys::process::kill_group(running.0.id());
    let status = running
        .0
        .wait()
        .map_err(|e| Error::io("cannot wait for nativeprof", e))?;
    Ok(Finished {
        code: status.code(),
        output: joined(output),
        messages: String::from_utf8_lossy(&joined(messages)).into_owned(),
    })
}

/// Reads in a thread, so that a command never waits for its reader.
fn reader(pipe: Option<impl Read + Send + 'static>, max: u64) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What was read until a failure is what there is.
            let _ = pipe.by_ref().take(max).read_to_end(&mut bytes);
            let _ = std::io::copy(&mut pipe, &mut std::io::sink());
        }
        bytes
    })
}

fn joined(reader: JoinHandle<Vec<u8>>) -> Vec<u8> {
    reader.join().unwrap_or_default()
}

impl Finished {
    /// The JSON that was printed.
    ///
    /// # Errors
    /// What the command said if it failed.
    pub fn json(&self) -> Result<Value> {
        match serde_json::from_slice(&self.output) {
            Ok(value) => Ok(value),
            Err(_) => Err(self.error()),
        }
    }

    /// Whether the command has printed this message.
    pub fn says(&self, message: &str) -> bool {
        let mut lines = self
            .messages
            .lines()
            .filter_map(|line| line.strip_prefix("nativeprof: "));
        lines.any(|line| line == message)
    }

    /// Whether a line of what it has printed begins with this.
    pub fn starts_a_line(&self, beginning: &str) -> bool {
        self.messages.lines().any(|line| line.starts_with(beginning))
    }

    /// Whether a line of what it has printed has this.
    pub fn has_line_with(&self, part: &str) -> bool {
        self.messages.lines().any(|line| line.contains(part))
    }

    /// The error that the command has printed last.
    pub fn error(&self) -> Error {
        self.said_error()
            .unwrap_or_else(|| Error::new(ErrorKind::Data, "nativeprof failed"))
    }

    /// The error that the command has printed last, if it has.
    pub fn said_error(&self) -> Option<Error> {
        let mut found = None;
        let mut lines = self.messages.lines().peekable();
        while let Some(line) = lines.next() {
            let Some(what) = line.strip_prefix("nativeprof: ") else {
                continue;
            };
            let mut after = |word: &str| {
                lines
                    .next_if(|line| line.starts_with(word))
                    .map(|line| line.get(word.len()..).unwrap_or_default())
            };
            let why = after("  why: ");
            let hint = after("  try: ");
            if why.is_some() || hint.is_some() {
                let error = Error::new(ErrorKind::Data, what);
                found = Some(error.why(why.unwrap_or_default()).hint(hint.unwrap_or_default()));
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_what_the_command_said() {
        let finished = Finished {
            code: Some(1),
            output: Vec::new(),
            messages: "nativeprof: sampling 12\nnativeprof: cannot read x\n  why: no such file\n  try: check the path\nnativeprof: end\n".into(),
        };
        let e = finished.json().unwrap_err();
        assert_eq!(
            (&*e.what, &*e.why, &*e.hint),
            ("cannot read x", "no such file", "check the path")
        );
    }
}
