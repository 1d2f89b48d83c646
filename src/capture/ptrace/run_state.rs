//! Whether a thread runs and where it sleeps, from /proc, without stopping it.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::event::{Pid, Tid};
use crate::sys::procfs;
use crate::sys::procfs::BlockedAt;

/// Whether a thread runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadRuns {
    /// It is running or runnable.
    Running,
    Asleep(BlockedAt),
    /// It has exited, or sleeps where the kernel does not say.
    Unknown,
}

/// Reads whether a thread runs, without stopping it.
pub struct RunState {
    file: File,
    is_call: bool,
}

impl RunState {
    /// `None`: the thread has exited.
    pub fn new(pid: Pid, tid: Tid) -> Option<RunState> {
        let open = |name: &str| File::open(format!("/proc/{pid}/task/{tid}/{name}"));
        let mut state = match open("syscall") {
            Ok(file) => RunState { file, is_call: true },
            Err(_) => RunState {
                file: open("stat").ok()?,
                is_call: false,
            },
        };
        if state.is_call && state.text().is_none() {
            // A kernel may let us open the file but refuse to read it.
            state = RunState {
                file: open("stat").ok()?,
                is_call: false,
            };
        }
        Some(state)
    }

    fn text(&self) -> Option<([u8; 256], usize)> {
        let mut text = [0; 256];
        let n = self.file.read_at(&mut text, 0).ok().filter(|n| *n > 0)?;
        Some((text, n))
    }

    /// Where the thread sleeps in a system call. `None`: it runs, sleeps outside of system calls, or has exited.
    pub fn asleep(&self) -> Option<BlockedAt> {
        match self.read() {
            ThreadRuns::Asleep(at) if at.call.is_some() => Some(at),
            _ => None,
        }
    }

    /// Whether it runs, and where it sleeps.
    pub fn read(&self) -> ThreadRuns {
        let Some((text, n)) = self.text() else {
            return ThreadRuns::Unknown;
        };
        let text = &text[..n];
        if self.is_call {
            if text.starts_with(b"running") {
                return ThreadRuns::Running; // fs/proc/base.c, proc_pid_syscall
            }
            let blocked = std::str::from_utf8(text).ok().and_then(procfs::parse_blocked);
            return blocked.map_or(ThreadRuns::Unknown, ThreadRuns::Asleep);
        }
        // The name before the state may contain anything.
        let after = text.iter().rposition(|c| *c == b')').map_or(n, |at| at + 2);
        match text.get(after) {
            Some(b'R') => ThreadRuns::Running,
            _ => ThreadRuns::Unknown,
        }
    }
}
