//! What /proc/TID/status tells of a thread, and why one may not be traced.

use std::fs;
use std::io;

use crate::error::{Error, Kind};
use crate::process::{rights, sys};
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

/// Signals that are ignored where a program handles them not, that none needs to be told of as they come, and that
/// wake nobody (SIGCONT would).
const TICKS: [i32; 3] = [libc::SIGURG, libc::SIGWINCH, libc::SIGCHLD];

/// The signal that may stop a thread at its ticks, if there is one: the process does not handle it, the thread does
/// not block it, and we may send it. The signals that a new thread blocks tell nothing: the C library has it begin with
/// all of them. `tid`: that thread, or the process for what is true of all its threads.
pub fn tick_signal(tid: Tid) -> Option<i32> {
    let text = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    choose(&text, (sys::real_uid(), sys::effective_uid()))
}

fn choose(status: &str, (real, effective): (u32, u32)) -> Option<i32> {
    let set = |word: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(word))?;
        u64::from_str_radix(line.trim(), 16).ok()
    };
    let uids = status.lines().find_map(|l| l.strip_prefix("Uid:"))?;
    let uids: Vec<u32> = uids.split_whitespace().filter_map(|n| n.parse().ok()).collect();
    let [its_real, _, its_saved, _] = uids[..] else {
        return None;
    };
    // fs/fcntl.c, sigio_perm
    let may_send = effective == 0 || [real, effective].iter().any(|uid| [its_real, its_saved].contains(uid));
    let taken = set("SigBlk:")? | set("SigCgt:")?;
    TICKS.into_iter().find(|s| may_send && taken & (1 << (s - 1)) == 0)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_take_a_signal_that_nobody_uses() {
        let check = |blocked: u64, handled: u64, us: (u32, u32), expected: Option<i32>| {
            let status = format!(
                "Name:\tx\nUid:\t1000\t1001\t1002\t1003\nSigPnd:\t0\nSigBlk:\t{blocked:016x}\nSigIgn:\t0\nSigCgt:\t{handled:016x}\n"
            );
            assert_eq!(choose(&status, us), expected, "{blocked:x} {handled:x} {us:?}");
        };
        let bit = |signal: i32| 1u64 << (signal - 1);
        check(0, 0, (0, 0), Some(libc::SIGURG));
        check(bit(libc::SIGINT), bit(libc::SIGTERM), (0, 0), Some(libc::SIGURG));
        check(0, bit(libc::SIGURG), (0, 0), Some(libc::SIGWINCH));
        check(bit(libc::SIGURG), bit(libc::SIGWINCH), (0, 0), Some(libc::SIGCHLD));
        check(u64::MAX, 0, (0, 0), None);
        check(0, u64::MAX, (0, 0), None);
        check(0, 0, (1000, 1000), Some(libc::SIGURG));
        check(0, 0, (7, 1002), Some(libc::SIGURG));
        check(0, 0, (7, 1001), None);
        assert_eq!(choose("Uid:\t0\nSigBlk:\tx\n", (0, 0)), None);
    }
}
