//! What threads do while they are off the CPU: the states under which their time is counted.

use syscalls::Sysno;

use super::files::Files;
use super::futexes::Futexes;
use super::process::Process;
use super::sockets::{self, SocketNames};
use crate::arch::{self, Regs};
use crate::event::{Descriptor, Sample, ThreadState, WaitKind};

/// Samples by whether their thread held the lock of its interpreter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GilCounts {
    pub holding: u64,
    pub not_holding: u64,
    /// Where the lock lies was not known: the program was starting, it does not run Python, or this version of CPython is not
    /// supported.
    pub unknown: u64,
}

/// A part of the time that a sample represents.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimePart {
    /// The state that it was spent in; `None`: running.
    pub(super) state: Option<ThreadState>,
    /// ns.
    pub(super) time: u64,
    /// Length of the interval that was sampled, ns.
    pub(super) length: u64,
}

/// The states of threads off the CPU.
#[derive(Default)]
pub(super) struct States {
    pub(super) sockets: SocketNames,
    pub(super) futexes: Futexes,
    /// Samples by whether their thread held the lock, if only such threads are sampled.
    pub(super) gil: Option<GilCounts>,
}

/// What a thread waited for, where it may have a name.
enum WaitObject {
    /// By its inode.
    Socket(u64),
    /// By its avma.
    Futex(u64),
    Other,
}

impl States {
    /// `gil_only`: only threads are sampled that hold the lock of their interpreter.
    pub(super) fn new(gil_only: bool) -> States {
        States {
            gil: gil_only.then(GilCounts::default),
            ..States::default()
        }
    }

    /// The parts of the time that a sample represents; the wait is the last one.
    pub(super) fn time_parts(&mut self, s: &Sample, process: &mut Process, files: &Files) -> [TimePart; 4] {
        let t = &s.time_spent;
        let waiting = if t.blocked == 0 {
            ThreadState::Waiting(WaitKind::Futex) // not used
        } else {
            self.waiting(s, process, files)
        };
        let part = |state, time, length| TimePart { state, time, length };
        [
            part(None, t.cpu, 0),
            part(Some(ThreadState::Runnable), t.runnable, t.runnable_length),
            part(Some(ThreadState::Throttled), t.throttled, t.throttled_length),
            part(Some(waiting), t.blocked, t.blocked_length),
        ]
    }

    /// Whether a sample is to be left out, because only holders of an interpreter lock are sampled. Wakers of threads that waited
    /// are kept. Counts.
    pub(super) fn leaves_out(&mut self, s: &Sample, process: &Process) -> bool {
        let Some(counts) = self.gil.as_mut().filter(|_| s.wake_up.wakes.is_none()) else {
            return false;
        };
        match (s.holds_lock, !process.locks.found.at.is_empty()) {
            (true, _) => counts.holding += 1,
            (false, true) => counts.not_holding += 1,
            (false, false) => counts.unknown += 1,
        }
        !s.holds_lock
    }

    /// What a thread waited for.
    pub(super) fn waiting(&mut self, s: &Sample, process: &mut Process, files: &Files) -> ThreadState {
        if let Some(suspension) = s.suspended {
            return ThreadState::Suspended(suspension);
        }
        let (kind, object) = wait_kind(s, process, files);
        let named = match object {
            WaitObject::Socket(inode) => {
                let names = &mut self.sockets;
                let named = process.sockets.named(names, &*files.system, s.pid, kind, inode);
                named.map(|(kind, id)| ThreadState::WaitingForSocket(kind, id))
            }
            WaitObject::Futex(address) => {
                let id = self.futexes.at(&process.space, &files.modules, address);
                id.map(ThreadState::WaitingForFutex)
            }
            WaitObject::Other => None,
        };
        named.unwrap_or(ThreadState::Waiting(kind))
    }
}

/// The kind of a wait by the system call alone.
pub(super) fn call_kind(s: &Sample) -> WaitKind {
    // Without registers, the arguments are not known.
    let regs = s.regs.unwrap_or(Regs::from_ip_sp(0, 0));
    s.system_call
        .map_or(WaitKind::PageFault, |number| arch::wait_kind(number, &regs))
}

/// The kind of a wait, and which object it was for.
fn wait_kind(s: &Sample, process: &mut Process, files: &Files) -> (WaitKind, WaitObject) {
    let kind = call_kind(s);
    let argument = s.regs.and_then(|regs| regs.get(arch::FIRST_ARGUMENT));
    let mut descriptor = |fd| {
        let name = process
            .sockets
            .descriptor(&*files.system, s.pid, fd)
            .unwrap_or_default();
        let object = sockets::inode(&name).map_or(WaitObject::Other, WaitObject::Socket);
        (self::descriptor(&name), object)
    };
    match (kind, argument) {
        (WaitKind::Futex, Some(address)) => {
            if process.is_in_lock(&*files.system, s.time, address) {
                (WaitKind::Gil, WaitObject::Other)
            } else if s.system_call.map(u32::from) == Some(Sysno::futex_waitv as u32) {
                // This one is given a list of futexes.
                (kind, WaitObject::Other)
            } else {
                (kind, WaitObject::Futex(address))
            }
        }
        (WaitKind::Read(_) | WaitKind::Write(_) | WaitKind::Connect | WaitKind::Accept, Some(fd)) => {
            let (of, object) = descriptor(fd as u32);
            let kind = match kind {
                WaitKind::Read(_) => WaitKind::Read(of),
                WaitKind::Write(_) => WaitKind::Write(of),
                other => other,
            };
            (kind, object)
        }
        (WaitKind::Poll, _) => {
            let polled = s.polled.and_then(|polled| {
                let (of, object) = descriptor(polled.descriptor);
                Some((polled.wait_kind(of)?, object))
            });
            polled.unwrap_or((kind, WaitObject::Other))
        }
        _ => (kind, WaitObject::Other),
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
