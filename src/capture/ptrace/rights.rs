//! Who may trace whom, and who does: from /proc/TID/status.

use std::fs;
use std::io;

use crate::error::{Error, Kind};
use crate::process::{self, sys};
use crate::sample::{Pid, Tid};

/// A number after a word in /proc/TID/status.
fn status_number(text: &str, word: &str) -> Option<u32> {
    text.lines().find_map(|l| l.strip_prefix(word)?.trim().parse().ok())
}

/// Process and parent process of a thread.
pub fn ids(tid: Tid) -> Option<(Pid, Pid)> {
    let text = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    Some((status_number(&text, "Tgid:")?, status_number(&text, "PPid:")?))
}

/// Who traces a thread.
pub fn tracer_of(tid: Tid) -> Option<Tid> {
    let text = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    status_number(&text, "TracerPid:").filter(|pid| *pid != 0)
}

/// The error for a thread that may not be traced.
pub fn refused(pid: Pid, tid: Tid, e: &io::Error) -> Error {
    const YAMA: &str = "/proc/sys/kernel/yama/ptrace_scope";
    let scope = fs::read_to_string(YAMA).ok().and_then(|t| t.trim().parse::<u32>().ok());
    let error = Error::new(Kind::NotPermitted, format!("cannot trace process {pid}"));
    match (tracer_of(tid), scope) {
        (Some(other), _) => {
            let name = process::thread_name(other, other).unwrap_or_default();
            error
                .why(format!("process {other} ({name}) traces it already"))
                .hint("end the debugger or tracer first, or use --backend ebpf")
        }
        (None, Some(scope @ 1..)) if sys::effective_uid() != 0 => error
            .why(format!("kernel.yama.ptrace_scope is {scope}: {e}"))
            .hint("run it with sudo, or start the program under it: nativeprof record -- COMMAND"),
        _ => error
            .why(format!("{e}: it belongs to somebody else or is protected"))
            .hint("run it with sudo, as root on the host"),
    }
}
