//! What threads do while they are off the CPU: the states under which their time is counted.

use rustc_hash::FxHashMap;
use syscalls::Sysno;

use super::targets::{ForkMemory, PythonState};
use super::{PendingWaker, Session, sockets};
use crate::arch::{self, Regs};
use crate::cpython::gil;
use crate::cpython_layout::InterpreterLocks;
use crate::event::{Descriptor, Pid, Sample, ThreadState, WaitKind, WakeUp};
use crate::profile::waits::RawWaker;

/// Shortest time between two readings of where a process keeps its interpreter locks, ns of the samples' clock.
const READ_AGAIN: u64 = 50_000_000;

/// Samples by whether their thread held the lock of its interpreter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GilCounts {
    pub holding: u64,
    pub not_holding: u64,
    /// Where the lock lies was not known: the program was starting, it does not run Python, or this version of CPython is not
    /// supported.
    pub unknown: u64,
}

/// Addresses of the interpreter locks of each process.
#[derive(Default)]
pub(super) struct GilLocks {
    of: FxHashMap<Pid, ProcessLocks>,
}

#[derive(Default)]
struct ProcessLocks {
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

    /// The process executes another program.
    pub(super) fn forget(&mut self, pid: Pid) {
        self.of.remove(&pid);
    }

    /// Reads them again, not too often: the interpreter may have been starting, or there is a new subinterpreter.
    fn read(&mut self, (pid, time): (Pid, u64), memory: &ForkMemory<'_>, python: Option<&PythonState>) {
        let Some((python, interpreter)) = python.and_then(|p| Some((p, p.interpreter?))) else {
            return;
        };
        let known = self.of.entry(pid).or_default();
        if known.read != 0 && time.saturating_sub(known.read) < READ_AGAIN {
            return;
        }
        known.read = time.max(1);
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
        self.read((s.pid, s.time), memory, python);
        contain(self)
    }
}

/// A part of the time that a sample represents: the state that it was spent in (`None`: running), the time, and the length of
/// the interval that was sampled, ns.
pub(super) type TimePart = (Option<ThreadState>, u64, u64);

/// What a thread waited for, where it may have a name.
enum WaitObject {
    /// By its inode.
    Socket(u64),
    /// By its avma.
    Futex(u64),
    Other,
}

impl Session {
    /// The parts of the time that a sample represents.
    pub(super) fn time_parts(&mut self, s: &Sample) -> [TimePart; 4] {
        let t = &s.time_spent;
        let waiting = match t.blocked {
            0 => ThreadState::Waiting(WaitKind::Futex), // not used
            _ => self.waiting(s),
        };
        [
            (None, t.cpu, 0),
            (Some(ThreadState::Runnable), t.runnable, t.runnable_length),
            (Some(ThreadState::Throttled), t.throttled, t.throttled_length),
            (Some(waiting), t.blocked, t.blocked_length),
        ]
    }

    /// Finds the interpreter locks of a process that runs Python, where they are wanted. True if the backend is to be notified
    /// of them. `time` is on the clock of samples.
    pub(super) fn find_gil_locks(&mut self, pid: Pid, time: u64) -> bool {
        if self.options.weighted.is_none() && !self.options.gil_only {
            return false;
        }
        let known = self.gil_locks.of.get(&pid);
        if known.is_none_or(|known| known.locks.at.is_empty())
            && let Some(m) = self.targets.get(&pid)
        {
            let memory = ForkMemory {
                system: &*self.system,
                pid,
                parent: m.parent,
            };
            self.gil_locks.read((pid, time), &memory, m.python.as_ref());
        }
        let known = self.gil_locks.of.get_mut(&pid);
        known.is_some_and(|known| std::mem::take(&mut known.changed))
    }

    /// Is a sample to be left out, because only holders of an interpreter lock are sampled? Wakers of threads that waited are
    /// kept. Counts.
    pub(super) fn leaves_out(&mut self, s: &Sample) -> bool {
        if !self.options.gil_only || s.wake_up.wakes.is_some() {
            return false;
        }
        let known = self.gil_locks.of.get(&s.pid);
        let counts = &mut self.gil_counts;
        match (s.holds_lock, known.is_some_and(|known| !known.locks.at.is_empty())) {
            (true, _) => counts.holding += 1,
            (false, true) => counts.not_holding += 1,
            (false, false) => counts.unknown += 1,
        }
        !s.holds_lock
    }

    /// The thread that ended the wait of a sample, its last part, with its stack if that was captured.
    pub(super) fn waker(&mut self, s: &Sample, parts: &[TimePart]) -> Option<PendingWaker> {
        let gil = Some(ThreadState::Waiting(WaitKind::Gil));
        let (state, time, _) = *parts.last()?;
        if time == 0 {
            return None;
        }
        if let Some(waker) = self.wakers.take_waker(s) {
            return Some(waker);
        }
        // Without a stack, the thread: the one that released the lock, or had it last.
        let (pid, tid) = match &s.wake_up {
            WakeUp { holder, .. } if *holder != 0 => (s.pid, self.known_thread_of_state(s.pid, *holder)?),
            WakeUp { waker: Some(waker), .. } if state == gil => *waker,
            _ => return None,
        };
        Some(PendingWaker {
            waker: RawWaker { pid, tid, node: 0 },
            by: None,
            frames: Vec::new(),
        })
    }

    /// What a thread waited for.
    pub(super) fn waiting(&mut self, s: &Sample) -> ThreadState {
        if let Some(suspension) = s.suspended {
            return ThreadState::Suspended(suspension);
        }
        let (kind, object) = self.wait_kind(s);
        let named = match object {
            WaitObject::Socket(inode) => {
                let id = self.sockets.named(&*self.system, s.pid, kind, inode);
                id.map(|id| ThreadState::WaitingForSocket(kind, id))
            }
            WaitObject::Futex(address) => {
                let target = self.targets.get(&s.pid);
                let id = target.and_then(|m| self.futexes.at(&m.process, &self.modules, address));
                id.map(ThreadState::WaitingForFutex)
            }
            WaitObject::Other => None,
        };
        named.unwrap_or(ThreadState::Waiting(kind))
    }

    /// Its kind, and which object it was.
    fn wait_kind(&mut self, s: &Sample) -> (WaitKind, WaitObject) {
        let Some(number) = s.system_call else {
            return (WaitKind::PageFault, WaitObject::Other);
        };
        // Without registers, the arguments are not known.
        let regs = s.regs.unwrap_or(Regs::from_ip_sp(0, 0));
        let kind = arch::wait_kind(number, &regs);
        match (kind, regs.get(arch::FIRST_ARGUMENT)) {
            (WaitKind::Futex, Some(address)) => {
                let Some(m) = self.targets.get(&s.pid) else {
                    return (kind, WaitObject::Other);
                };
                let memory = ForkMemory {
                    system: &*self.system,
                    pid: s.pid,
                    parent: m.parent,
                };
                match self.gil_locks.contain(s, address, &memory, m.python.as_ref()) {
                    true => (WaitKind::Gil, WaitObject::Other),
                    // This one is given a list of futexes.
                    false if u32::from(number) == Sysno::futex_waitv as u32 => (kind, WaitObject::Other),
                    false => (kind, WaitObject::Futex(address)),
                }
            }
            (WaitKind::Read(_) | WaitKind::Write(_) | WaitKind::Connect | WaitKind::Accept, Some(fd)) => {
                let name = self.sockets.descriptor(&*self.system, s.pid, fd as u32);
                let name = name.unwrap_or_default();
                let kind = match kind {
                    WaitKind::Read(_) => WaitKind::Read(descriptor(&name)),
                    WaitKind::Write(_) => WaitKind::Write(descriptor(&name)),
                    other => other,
                };
                (
                    kind,
                    sockets::inode(&name).map_or(WaitObject::Other, WaitObject::Socket),
                )
            }
            _ => (kind, WaitObject::Other),
        }
    }
}

/// What a descriptor refers to.
fn descriptor(name: &str) -> Descriptor {
    match name {
        n if n.starts_with("pipe:") => Descriptor::Pipe,
        n if n.starts_with("socket:") => Descriptor::Socket,
        n if n.starts_with("/dev/pts/") || n.starts_with("/dev/tty") || n == "/dev/console" => Descriptor::Terminal,
        n if n.starts_with('/') => Descriptor::File,
        _ => Descriptor::Unknown,
    }
}
