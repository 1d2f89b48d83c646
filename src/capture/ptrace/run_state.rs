//! Whether a thread runs and where it sleeps, from /proc, without stopping it.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::event::{Pid, Tid};
use crate::sys::procfs;

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

    /// Where the thread sleeps, in user space: arguments of its system call, stack pointer and instruction pointer.
    /// `None`: it runs, sleeps outside of system calls, or has exited.
    pub fn asleep(&self) -> Option<([u64; 6], u64, u64)> {
        let (text, n) = self.text().filter(|_| self.is_call)?;
        let blocked = procfs::parse_blocked(std::str::from_utf8(&text[..n]).ok()?)?;
        Some((blocked.call?.1, blocked.sp, blocked.ip))
    }

    /// Is it running or runnable? A thread that has exited is not.
    pub fn is_running(&self) -> bool {
        let Some((text, n)) = self.text() else { return false };
        let text = &text[..n];
        if self.is_call {
            return text.starts_with(b"running"); // fs/proc/base.c, proc_pid_syscall
        }
        // The name before the state may contain anything.
        let after = text.iter().rposition(|c| *c == b')').map_or(n, |at| at + 2);
        text.get(after) == Some(&b'R')
    }
}
