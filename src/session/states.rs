//! What threads do while they are off the CPU: the states under which their time is counted.

use std::ops::Range;

use rustc_hash::FxHashMap;

use super::Session;
use super::processes::{Family, Python};
use crate::arch;
use crate::interp::gil;
use crate::process::host::Host;
use crate::sample::{Descriptor, Pid, Sample, ThreadState, WaitKind};

/// Shortest time between two readings of where a process keeps its interpreter locks, ns of the samples' clock.
const READ_AGAIN: u64 = 50_000_000;

/// Addresses of the interpreter locks of each process.
#[derive(Default)]
pub(super) struct GilLocks {
    of: FxHashMap<Pid, Locks>,
}

struct Locks {
    ranges: Vec<Range<u64>>,
    read: u64,
}

impl GilLocks {
    /// Does this address lie in a lock of the process's interpreters?
    fn contain(&mut self, s: &Sample, address: u64, memory: &Family<'_>, python: Option<&Python>) -> bool {
        let Some((python, interpreter)) = python.and_then(|p| Some((p, p.interpreter?))) else {
            return false;
        };
        let locks = self.of.entry(s.pid).or_insert(Locks {
            ranges: Vec::new(),
            read: 0,
        });
        let within = |locks: &Locks| locks.ranges.iter().any(|r| r.contains(&address));
        if within(locks) {
            return true;
        }
        // The interpreter may have been starting, or there is a new subinterpreter.
        if locks.read != 0 && s.time.saturating_sub(locks.read) < READ_AGAIN {
            return false;
        }
        locks.read = s.time.max(1);
        locks.ranges = gil::locks(memory, &python.runtime, &interpreter);
        within(locks)
    }
}

impl Session {
    /// The parts of the time that a sample represents, ns, each with the state that it was spent in; `None`: running.
    pub(super) fn time_parts(&mut self, s: &Sample) -> [(Option<ThreadState>, u64); 3] {
        let t = &s.time_spent;
        let waiting = match t.blocked {
            0 => WaitKind::Futex, // not used
            _ => self.wait_kind(s),
        };
        [
            (None, t.cpu),
            (Some(ThreadState::Runnable), t.runnable),
            (Some(ThreadState::Waiting(waiting)), t.blocked),
        ]
    }

    fn wait_kind(&mut self, s: &Sample) -> WaitKind {
        let Some(number) = s.system_call else {
            return WaitKind::PageFault;
        };
        let Some(regs) = &s.regs else {
            return WaitKind::Other(number);
        };
        let kind = arch::wait_kind(number, regs);
        match (kind, regs.get(arch::FIRST_ARGUMENT)) {
            (WaitKind::Futex, Some(address)) => {
                let Some(m) = self.members.get(&s.pid) else { return kind };
                let memory = Family {
                    host: &*self.host,
                    pid: s.pid,
                    parent: m.parent,
                };
                match self.gil_locks.contain(s, address, &memory, m.python.as_ref()) {
                    true => WaitKind::Gil,
                    false => kind,
                }
            }
            (WaitKind::Read(_), Some(fd)) => WaitKind::Read(descriptor(&*self.host, s.pid, fd)),
            (WaitKind::Write(_), Some(fd)) => WaitKind::Write(descriptor(&*self.host, s.pid, fd)),
            _ => kind,
        }
    }
}

/// What a descriptor of a process refers to now.
fn descriptor(host: &dyn Host, pid: Pid, fd: u64) -> Descriptor {
    let Some(name) = host.descriptor(pid, fd as u32) else {
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
