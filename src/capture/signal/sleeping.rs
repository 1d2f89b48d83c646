//! Threads that sleep in a system call are not interrupted: a signal would end the call, and programs notice
//! (epoll_wait and others return EINTR whatever the handler requests). The kernel exposes where such a thread's stack
//! begins; its stack does not change while it sleeps, so it is read from another thread, and discarded if the thread
//! has run since.

use std::fs::File;
use std::os::fd::AsFd;

use crate::arch::Regs;
use crate::event::Tid;
use crate::sys::files::are_scarce;
use crate::sys::procfs;
use crate::sys::procfs::{BlockedAt, SchedStat};

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
    pub arguments: [u64; 6],
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
    /// The registers of the thread that the kernel exposes, and that show what it waits for.
    pub fn regs(self) -> Regs {
        let mut regs = Regs::from_ip_sp(self.ip, self.sp);
        let [first, second, ..] = self.arguments;
        regs.set_arguments([first, second]);
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

    /// Whether the process needs the descriptors more.
    pub fn are_scarce(&self) -> bool {
        are_scarce(self.runs.as_fd())
    }

    pub fn activity(&self) -> ThreadActivity {
        procfs::read_blocked(&self.call).map_or(ThreadActivity::Ended, activity)
    }

    /// How often it has been scheduled on a CPU.
    pub fn runs(&self) -> Option<u64> {
        Some(SchedStat::read(&self.runs)?.runs)
    }
}

/// One that is blocked elsewhere than in a system call counts as running: it is not read in place.
fn activity(at: Option<BlockedAt>) -> ThreadActivity {
    let call = at.and_then(|at| {
        let (number, arguments) = at.call?;
        Some(SystemCall {
            number: u16::try_from(number).ok()?,
            arguments,
            ip: at.ip,
            sp: at.sp,
        })
    });
    call.map_or(ThreadActivity::Runs, ThreadActivity::Sleeps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_call_lines() {
        let asleep = ThreadActivity::Sleeps(SystemCall {
            number: 232,
            arguments: [4, 1, 0x400, u64::MAX, 0, 8],
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
            assert_eq!(activity(procfs::parse_blocked(text)), expected, "{text}");
        }
    }
}
