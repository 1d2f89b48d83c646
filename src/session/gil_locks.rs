//! Addresses of the interpreter locks of a process.

use super::process::Process;
use crate::cpython::gil;
use crate::cpython_layout::InterpreterLocks;
use crate::process::system::System;

/// Shortest time between two readings of where a process keeps its interpreter locks, ns of the samples' clock.
const READ_AGAIN: u64 = 50_000_000;

/// The locks of one process that have been found so far.
#[derive(Default)]
pub(super) struct ProcessLocks {
    pub(super) found: InterpreterLocks,
    /// Time of the last reading, 0: none.
    read: u64,
    /// The backend does not know them yet.
    changed: bool,
}

impl ProcessLocks {
    /// Whether the backend is to be notified of them; it is taken to be.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }
}

impl Process {
    /// Reads where the locks are if that is not known; `time`: of a sample, ns.
    pub(super) fn find_locks(&mut self, system: &dyn System, time: u64) {
        if self.locks.found.at.is_empty() {
            self.read_locks(system, time);
        }
    }

    /// Whether an address lies in a lock of the process's interpreters; `time`: of the sample that asks, ns.
    pub(super) fn is_in_lock(&mut self, system: &dyn System, time: u64, address: u64) -> bool {
        if !self.locks.found.contain(address) {
            self.read_locks(system, time);
        }
        self.locks.found.contain(address)
    }

    /// Reads the locks again, not too often: the interpreter may have been starting, or there is a new subinterpreter.
    fn read_locks(&mut self, system: &dyn System, time: u64) {
        let is_recent = self.locks.read != 0 && time.saturating_sub(self.locks.read) < READ_AGAIN;
        let Some((runtime, interpreter)) = self.runtime().filter(|_| !is_recent) else {
            return;
        };
        let found = gil::locks(&self.memory(system), runtime, interpreter);
        let known = &mut self.locks;
        known.read = time.max(1);
        known.changed |= found != known.found;
        known.found = found;
    }
}
