//! Threads of a process by the ID that they have in its own PID namespace, which is what its memory holds.

use std::cell::RefCell;

use rustc_hash::FxHashMap;

use crate::event::{Pid, Tid};
use crate::process::system::System;

/// Maximum number of threads that are remembered.
const MAX_THREADS: usize = 1 << 16;
/// Shortest time between two readings of all threads of a process, ns.
const LIST_INTERVAL: u64 = 50_000_000;

/// IDs of the threads of one process, each read once.
#[derive(Default)]
pub(super) struct ThreadIds {
    known: RefCell<KnownIds>,
}

#[derive(Default)]
struct KnownIds {
    /// By the ID inside of the namespace.
    hosts: FxHashMap<Tid, Tid>,
    /// By ours.
    insides: FxHashMap<Tid, Tid>,
    /// When all threads were read the last time, for a process in another namespace.
    listed: Option<u64>,
}

impl KnownIds {
    fn add(&mut self, tid: Tid, inside: Tid) {
        if self.insides.len() >= MAX_THREADS {
            *self = KnownIds::default();
        }
        self.insides.insert(tid, inside);
        self.hosts.insert(inside, tid);
    }
}

impl ThreadIds {
    /// The ID of a thread in its process's namespace. `None`: it has exited.
    pub(super) fn inside(&self, system: &dyn System, pid: Pid, tid: Tid) -> Option<Tid> {
        if let Some(inside) = self.known.borrow().insides.get(&tid) {
            return Some(*inside);
        }
        let inside = system.namespace_tid(pid, tid)?;
        self.known.borrow_mut().add(tid, inside);
        Some(inside)
    }

    /// The thread of a process that has this ID in the process's namespace. `None`: it has exited, or started less than
    /// [`LIST_INTERVAL`] before `now` (CLOCK_MONOTONIC, ns) in another namespace than ours.
    pub(super) fn host(&self, system: &dyn System, pid: Pid, inside: Tid, now: u64) -> Option<Tid> {
        if let Some(tid) = self.known.borrow().hosts.get(&inside) {
            return Some(*tid);
        }
        // The same in our namespace, which costs one reading, however many threads there are.
        if self.inside(system, pid, inside) == Some(inside) {
            return Some(inside);
        }
        if self.inside(system, pid, pid) == Some(pid) {
            return None;
        }
        let listed = self.known.borrow().listed;
        if listed.is_some_and(|listed| now.saturating_sub(listed) < LIST_INTERVAL) {
            return None;
        }
        self.known.borrow_mut().listed = Some(now);
        for tid in system.threads(pid) {
            self.inside(system, pid, tid);
        }
        self.known.borrow().hosts.get(&inside).copied()
    }

    /// A thread has exited: its ID may be used again.
    pub(super) fn forget_thread(&mut self, tid: Tid) {
        let known = self.known.get_mut();
        if let Some(inside) = known.insides.remove(&tid) {
            known.hosts.remove(&inside);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::error::Result;
    use crate::process::file_content::Content;
    use crate::process::root::Root;
    use crate::process::system::FileKey;

    const PID: Pid = 100;

    /// A process with the threads 100 to 499; how often the ID of one of them was read.
    struct Threads {
        /// What the IDs in their namespace are below ours.
        below: Cell<u32>,
        reads: Cell<u32>,
    }

    impl System for Threads {
        fn threads(&self, pid: Pid) -> Vec<Tid> {
            (pid..500).collect()
        }

        fn namespace_tid(&self, pid: Pid, tid: Tid) -> Option<Tid> {
            self.reads.set(self.reads.get() + 1);
            (pid..500).contains(&tid).then(|| tid - self.below.get())
        }

        fn maps(&self, _: Pid) -> Result<Vec<u8>> {
            Ok(Vec::new())
        }

        fn stack_end(&self, _: Pid) -> u64 {
            0
        }

        fn thread_name(&self, _: Pid, _: Tid) -> Option<String> {
            None
        }

        fn open(&self, _: Pid, _: u64, _: u64, _: &[u8], _: Option<&Root>) -> Option<(Content, FileKey)> {
            None
        }

        fn read_memory(&self, _: Pid, _: u64, _: &mut [u8]) -> usize {
            0
        }

        fn root(&self, _: Pid) -> Option<Root> {
            None
        }

        fn kernel_symbols(&self) -> Option<String> {
            None
        }
    }

    #[test]
    fn ids_are_read_once() {
        let mut now = 0;
        for below in [0, 99] {
            let system = Threads {
                below: below.into(),
                reads: 0.into(),
            };
            let mut ids = ThreadIds::default();
            let reads = || system.reads.replace(0);
            // (inside, expected, most reads)
            let check = |ids: &ThreadIds, inside: Tid, expected: Option<Tid>, most: u32, now: u64| {
                assert_eq!(ids.host(&system, PID, inside, now), expected, "{inside} {below}");
                let reads = reads();
                assert!(reads <= most, "{inside} {below}: {reads} reads");
            };
            now += LIST_INTERVAL;
            // In another namespace all of them are read for the first one.
            let first = if below == 0 { 1 } else { 402 };
            check(&ids, 300 - below, Some(300), first, now);
            check(&ids, 300 - below, Some(300), 0, now);
            check(&ids, 301 - below, Some(301), if below == 0 { 1 } else { 0 }, now);
            check(&ids, 700, None, 2, now);
            assert_eq!(ids.inside(&system, PID, 300), Some(300 - below));
            assert_eq!(reads(), 0);
            ids.forget_thread(300);
            check(&ids, 301 - below, Some(301), 0, now);
            now += LIST_INTERVAL;
            check(&ids, 300 - below, Some(300), 3, now);
        }
    }
}
