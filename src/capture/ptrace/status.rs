//! What /proc/TID/status tells of a thread, and why one may not be traced.

use std::fs;
use std::io;

use crate::error::{Error, Kind};
use crate::process::rights;
use crate::sample::{Pid, Tid};

/// A number after a word.
fn number(text: &str, word: &str) -> Option<u32> {
    text.lines().find_map(|l| l.strip_prefix(word)?.trim().parse().ok())
}

/// Process and parent process of a thread.
pub fn ids(tid: Tid) -> Option<(Pid, Pid)> {
    let text = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    Some((number(&text, "Tgid:")?, number(&text, "PPid:")?))
}

/// Who traces a thread.
pub fn tracer_of(tid: Tid) -> Option<Tid> {
    let text = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    number(&text, "TracerPid:").filter(|pid| *pid != 0)
}

/// The error for a process that the kernel does not let us trace.
pub fn refused(pid: Pid, e: &io::Error) -> Error {
    let what = format!("cannot trace process {pid}");
    match rights::ptrace(pid) {
        Some(lack) => lack.error(what),
        None => Error::new(Kind::NotPermitted, what)
            .why(format!("{e}: a security module or a sandbox may forbid it"))
            .hint("nativeprof doctor   tells what this machine can do"),
    }
}
