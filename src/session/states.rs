//! What threads do while they are off the CPU: the states under which their time is counted.

use rustc_hash::FxHashMap;

use super::targets::{ForkMemory, PythonState};
use super::{PendingWaker, Session};
use crate::arch::{self, Regs};
use crate::cpython::gil;
use crate::cpython_layout::InterpreterLocks;
use crate::event::{Descriptor, Pid, Sample, ThreadState, WaitKind, WakeUp};
use crate::profile::waits::RawWaker;
use crate::target::system::System;

/// Shortest time between two readings of where a process keeps its interpreter locks, ns of the samples' clock.
const READ_AGAIN: u64 = 50_000_000;

/// Addresses of the interpreter locks of each process.
#[derive(Default)]
pub(super) struct GilLocks {
    of: FxHashMap<Pid, Locks>,
}

#[derive(Default)]
struct Locks {
    locks: InterpreterLocks,
    /// Time of the last reading, 0: none.
    read: u64,
    /// The backend does not know them yet.
    changed: bool,
}

impl GilLocks {
    /// Those of a process that have been found so far.
    pub(super) fn of(&self, pid: Pid) -> InterpreterLocks {
        self.of.get(&pid).map(|locks| locks.locks.clone()).unwrap_or_default()
    }

    /// Reads them again, not too often: the interpreter may have been starting, or there is a new subinterpreter.
    fn read(&mut self, s: &Sample, memory: &ForkMemory<'_>, python: Option<&PythonState>) {
        let Some((python, interpreter)) = python.and_then(|p| Some((p, p.interpreter?))) else {
            return;
        };
        let known = self.of.entry(s.pid).or_default();
        if known.read != 0 && s.time.saturating_sub(known.read) < READ_AGAIN {
            return;
        }
        known.read = s.time.max(1);
        let locks = gil::locks(memory, &python.runtime, &interpreter);
        known.changed |= locks != known.locks;
        known.locks = locks;
    }

    /// Does this address lie in a lock of the process's interpreters?
    fn contain(&mut self, s: &Sample, address: u64, memory: &ForkMemory<'_>, python: Option<&PythonState>) -> bool {
        let contain = |locks: &GilLocks| locks.of.get(&s.pid).is_some_and(|known| known.locks.contain(address));
        if contain(self) {
            return true;
        }
        self.read(s, memory, python);
        contain(self)
    }
}

/// A part of the time that a sample represents: the state that it was spent in (`None`: running), the time, and the length of
/// the interval that was sampled, ns.
pub(super) type TimePart = (Option<ThreadState>, u64, u64);

impl Session {
    /// The parts of the time that a sample represents.
    pub(super) fn time_parts(&mut self, s: &Sample) -> [TimePart; 3] {
        let t = &s.time_spent;
        let waiting = match t.blocked {
            0 => WaitKind::Futex, // not used
            _ => self.wait_kind(s),
        };
        [
            (None, t.cpu, 0),
            (Some(ThreadState::Runnable), t.runnable, t.runnable_length),
            (Some(ThreadState::Waiting(waiting)), t.blocked, t.blocked_length),
        ]
    }

    /// Finds the interpreter locks of a process that runs Python, where off-CPU time is sampled. True if the backend is to be
    /// notified of them.
    pub(super) fn find_gil_locks(&mut self, s: &Sample) -> bool {
        if self.options.weighted.is_none() || s.python.is_empty() {
            return false;
        }
        if self
            .gil_locks
            .of
            .get(&s.pid)
            .is_none_or(|known| known.locks.at.is_empty())
            && let Some(m) = self.targets.get(&s.pid)
        {
            let memory = ForkMemory {
                system: &*self.system,
                pid: s.pid,
                parent: m.parent,
            };
            self.gil_locks.read(s, &memory, m.python.as_ref());
        }
        let known = self.gil_locks.of.get_mut(&s.pid);
        known.is_some_and(|known| std::mem::take(&mut known.changed))
    }

    /// The thread that ended the wait of a sample, with its stack if that was captured.
    pub(super) fn waker(&mut self, s: &Sample, parts: &[TimePart; 3]) -> Option<PendingWaker> {
        let gil = Some(ThreadState::Waiting(WaitKind::Gil));
        let (state, time, _) = parts[2];
        if time == 0 {
            return None;
        }
        if let Some(waker) = self.wakers.take(s) {
            return Some(waker);
        }
        // Without a stack, the thread: the one that released the lock, or had it last.
        let (pid, tid) = match &s.wake_up {
            WakeUp { holder, .. } if *holder != 0 => (s.pid, self.thread_of_state(s.pid, *holder)?),
            WakeUp { waker: Some(waker), .. } if state == gil => *waker,
            _ => return None,
        };
        Some(PendingWaker {
            waker: RawWaker { pid, tid, node: 0 },
            by: None,
            frames: Vec::new(),
        })
    }

    fn wait_kind(&mut self, s: &Sample) -> WaitKind {
        let Some(number) = s.system_call else {
            return WaitKind::PageFault;
        };
        // Without registers, the arguments are not known.
        let regs = s.regs.unwrap_or(Regs::from_ip_sp(0, 0));
        let kind = arch::wait_kind(number, &regs);
        match (kind, regs.get(arch::FIRST_ARGUMENT)) {
            (WaitKind::Futex, Some(address)) => {
                let Some(m) = self.targets.get(&s.pid) else { return kind };
                let memory = ForkMemory {
                    system: &*self.system,
                    pid: s.pid,
                    parent: m.parent,
                };
                match self.gil_locks.contain(s, address, &memory, m.python.as_ref()) {
                    true => WaitKind::Gil,
                    false => kind,
                }
            }
            (WaitKind::Read(_), Some(fd)) => WaitKind::Read(descriptor(&*self.system, s.pid, fd)),
            (WaitKind::Write(_), Some(fd)) => WaitKind::Write(descriptor(&*self.system, s.pid, fd)),
            _ => kind,
        }
    }
}

/// What a descriptor of a process refers to now.
fn descriptor(system: &dyn System, pid: Pid, fd: u64) -> Descriptor {
    let Some(name) = system.descriptor(pid, fd as u32) else {
        return Descriptor::Unknown;
    };
    match name {
        n if n.starts_with("pipe:") => Descriptor::Pipe,
        n if n.starts_with("socket:") => Descriptor::Socket,
        n if n.starts_with("/dev/pts/") || n.starts_with("/dev/tty") || n == "/dev/console" => Descriptor::Terminal,
        n if n.starts_with('/') => Descriptor::File,
        _ => Descriptor::Unknown,
    }
}
