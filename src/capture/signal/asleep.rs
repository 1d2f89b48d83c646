//! Threads that sleep in a system call are not disturbed: a signal would end the call, and programs notice (epoll_wait
//! and others return EINTR whatever the handler asks for). The kernel tells where such a thread's stack begins; while it
//! sleeps nothing there changes, so that the stack is read from outside, and thrown away if the thread has run since.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::arch::Regs;
use crate::sample::Tid;

/// What tells of one thread of this process.
pub struct Files {
    call: File,
    runs: File,
}

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// Runs, or waits for a CPU.
    Runs,
    /// Sleeps in a system call.
    Sleeps {
        ip: u64,
        sp: u64,
    },
    Ended,
}

impl Doing {
    /// The registers of a thread that sleeps. The kernel tells no others.
    pub fn regs(self) -> Option<Regs> {
        let Doing::Sleeps { ip, sp } = self else { return None };
        let mut regs = Regs::from_ip_sp_fp(ip, sp, 0);
        regs.known = 1 << crate::arch::SP;
        Some(regs)
    }
}

impl Files {
    /// `None`: it has ended, or this kernel does not tell.
    pub fn new(tid: Tid) -> Option<Files> {
        let open = |name: &str| File::open(format!("/proc/self/task/{tid}/{name}")).ok();
        let files = Files {
            call: open("syscall")?,
            runs: open("schedstat")?,
        };
        // Without this count (CONFIG_SCHED_INFO) it would not be known whether it has run.
        files.runs().filter(|n| *n > 0).is_some().then_some(files)
    }

    pub fn doing(&self) -> Doing {
        let mut text = [0; 256];
        match self.call.read_at(&mut text, 0) {
            Ok(n) if n > 0 => parse(&text[..n]),
            _ => Doing::Ended,
        }
    }

    /// How often it has been given a CPU: the third number of schedstat.
    pub fn runs(&self) -> Option<u64> {
        let mut text = [0; 96];
        let n = self.runs.read_at(&mut text, 0).ok()?;
        let words = std::str::from_utf8(&text[..n]).ok()?;
        words.split_ascii_whitespace().nth(2)?.parse().ok()
    }
}

/// `running`, or the number of the call, six arguments, stack pointer and instruction pointer; -1 and the pointers where
/// it is stopped elsewhere (fs/proc/base.c, proc_pid_syscall).
fn parse(text: &[u8]) -> Doing {
    let words = std::str::from_utf8(text).unwrap_or_default().split_ascii_whitespace();
    let mut words: Vec<&str> = words.collect();
    let mut hex = || u64::from_str_radix(words.pop()?.strip_prefix("0x")?, 16).ok();
    let (Some(ip), Some(sp)) = (hex(), hex()) else {
        return Doing::Runs;
    };
    if words.len() == 7 && words[0].parse::<u32>().is_ok() {
        Doing::Sleeps { ip, sp }
    } else {
        Doing::Runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says() {
        let asleep = Doing::Sleeps { ip: 0x7f01, sp: 0x7ffe };
        for (text, expected) in [
            ("running\n", Doing::Runs),
            ("232 0x4 0x1 0x400 0xffffffffffffffff 0x0 0x8 0x7ffe 0x7f01\n", asleep),
            ("-1 0x7ffe 0x7f01\n", Doing::Runs),
            ("232 0x4 0x7ffe 0x7f01\n", Doing::Runs),
            ("", Doing::Runs),
        ] {
            assert_eq!(parse(text.as_bytes()), expected, "{text}");
        }
    }
}
