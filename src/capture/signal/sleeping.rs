//! Threads that sleep in a system call are not interrupted: a signal would end the call, and programs notice
//! (epoll_wait and others return EINTR whatever the handler requests). The kernel exposes where such a thread's stack
//! begins; its stack does not change while it sleeps, so it is read from another thread, and discarded if the thread
//! has run since.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::arch::{self, Regs};
use crate::event::Tid;

/// Files in /proc about one thread of this process.
pub struct ThreadProcFiles {
    call: File,
    runs: File,
}

/// Whether a thread runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadActivity {
    /// Is running or runnable.
    Runs,
    /// Sleeps in a system call.
    Sleeps(SystemCall),
    Ended,
}

/// A system call in which a thread sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemCall {
    pub number: u16,
    /// The first two arguments.
    arguments: [u64; 2],
    ip: u64,
    sp: u64,
}

impl ThreadActivity {
    /// The registers of a sleeping thread that the kernel exposes.
    pub fn regs(self) -> Option<Regs> {
        match self {
            ThreadActivity::Sleeps(call) => Some(call.regs()),
            ThreadActivity::Runs | ThreadActivity::Ended => None,
        }
    }
}

impl SystemCall {
    /// The registers of the thread that the kernel exposes, and that tell what it waits for.
    pub fn regs(self) -> Regs {
        let mut regs = Regs::from_ip_sp(self.ip, self.sp);
        for (register, value) in [arch::FIRST_ARGUMENT, arch::SECOND_ARGUMENT]
            .into_iter()
            .zip(self.arguments)
        {
            regs.gpr[register] = value;
            regs.known |= 1 << register;
        }
        regs
    }
}

impl ThreadProcFiles {
    /// `None`: it has exited, or this kernel does not have the files.
    pub fn new(tid: Tid) -> Option<ThreadProcFiles> {
        let open = |name: &str| File::open(format!("/proc/self/task/{tid}/{name}")).ok();
        let files = ThreadProcFiles {
            call: open("syscall")?,
            runs: open("schedstat")?,
        };
        // Without this count (CONFIG_SCHED_INFO) it could not be verified that the thread has not run.
        files.runs().filter(|n| *n > 0).is_some().then_some(files)
    }

    pub fn activity(&self) -> ThreadActivity {
        let mut text = [0; 256];
        match self.call.read_at(&mut text, 0) {
            Ok(n) if n > 0 => parse(&text[..n]),
            _ => ThreadActivity::Ended,
        }
    }

    /// How often it has been scheduled on a CPU: the third number of schedstat.
    pub fn runs(&self) -> Option<u64> {
        let mut text = [0; 96];
        let n = self.runs.read_at(&mut text, 0).ok()?;
        let words = std::str::from_utf8(&text[..n]).ok()?;
        words.split_ascii_whitespace().nth(2)?.parse().ok()
    }
}

/// `running`, or the number of the call, six arguments, stack pointer and instruction pointer; -1 and the pointers if
/// it sleeps elsewhere (fs/proc/base.c, proc_pid_syscall).
fn parse(text: &[u8]) -> ThreadActivity {
    let words = std::str::from_utf8(text).unwrap_or_default().split_ascii_whitespace();
    let words: Vec<&str> = words.collect();
    let &[number, ref values @ ..] = &words[..] else {
        return ThreadActivity::Runs;
    };
    let hex = |word: &&str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    let values: Option<Vec<u64>> = values.iter().map(hex).collect();
    match (number.parse(), values.as_deref()) {
        (Ok(number), Some(&[first, second, _, _, _, _, sp, ip])) => ThreadActivity::Sleeps(SystemCall {
            number,
            arguments: [first, second],
            ip,
            sp,
        }),
        _ => ThreadActivity::Runs,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_call_lines() {
        let asleep = ThreadActivity::Sleeps(SystemCall {
            number: 232,
            arguments: [4, 1],
            ip: 0x7f01,
            sp: 0x7ffe,
        });
        for (text, expected) in [
            ("running\n", ThreadActivity::Runs),
            ("232 0x4 0x1 0x400 0xffffffffffffffff 0x0 0x8 0x7ffe 0x7f01\n", asleep),
            ("-1 0x7ffe 0x7f01\n", ThreadActivity::Runs),
            ("232 0x4 0x7ffe 0x7f01\n", ThreadActivity::Runs),
            ("", ThreadActivity::Runs),
        ] {
            assert_eq!(parse(text.as_bytes()), expected, "{text}");
        }
    }
}
