//! Names that threads have in Python: read when a thread is first sampled in Python code, and again ever more rarely.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use super::Session;
use crate::cpython::thread_names::{NamedThreads, ThreadNameReader};
use crate::event::{Pid, Sample, Tid};
use crate::process::memory::Pages;
use crate::process::system::ProcessMemory;

/// Time until a name, or the list of a process's threads, is read again, ns of the samples' clock. It doubles each time
/// from the first to the last of these.
const FIRST_DELAY: u64 = 50_000_000;
const LAST_DELAY: u64 = 5_000_000_000;
/// Additional time until a known thread of a process that had not imported `threading` makes us look for that module
/// again, ns: nothing but the name `MainThread` is missing, and a search takes some 30 system calls.
const IMPORT_DELAY: u64 = 60_000_000_000;
/// Maximum number of threads and processes that are remembered; some programs create them by the million.
const MAX_THREADS: usize = 1 << 16;

/// When something is read again.
#[derive(Clone, Copy, Default)]
struct Schedule {
    next: u64,
    delay: u64,
}

impl Schedule {
    /// `additional`: time to wait beyond the planned one, ns.
    fn is_due(&self, time: u64, additional: u64) -> bool {
        time > self.next.saturating_add(additional)
    }

    fn was_read(&mut self, time: u64) {
        self.delay = (2 * self.delay).clamp(FIRST_DELAY, LAST_DELAY);
        self.next = time.saturating_add(self.delay);
    }
}

/// Where the names of a process's threads are.
#[derive(Default)]
struct ProcessThreads {
    threads: NamedThreads,
    schedule: Schedule,
    /// Pages that the last reading needed, in ascending order: the next one reads them together.
    pages: Vec<u64>,
}

impl ProcessThreads {
    /// Whether a sample of the thread at `time` makes us list the process's threads again.
    fn lists_again(&self, tid: Tid, time: u64) -> bool {
        match (self.threads.contain(tid), self.threads.have_names()) {
            (true, true) => false,
            (true, false) => self.schedule.is_due(time, IMPORT_DELAY),
            (false, _) => self.schedule.is_due(time, 0),
        }
    }
}

/// Names of Python threads, and when they are read again.
#[derive(Default)]
pub(super) struct ThreadNames {
    pub(super) names: BTreeMap<(Pid, Tid), String>,
    threads: FxHashMap<(Pid, Tid), Schedule>,
    processes: FxHashMap<Pid, ProcessThreads>,
}

impl ThreadNames {
    /// A process executes another program or has exited; `keep_names` for what has samples.
    pub(super) fn forget_process(&mut self, pid: Pid, keep_names: bool) {
        self.processes.remove(&pid);
        self.threads.retain(|(owner, _), _| *owner != pid);
        if !keep_names {
            self.names.retain(|(owner, _), _| *owner != pid);
        }
    }

    /// A thread has exited.
    pub(super) fn forget_thread(&mut self, pid: Pid, tid: Tid, keep_name: bool) {
        self.threads.remove(&(pid, tid));
        if !keep_name {
            self.names.remove(&(pid, tid));
        }
    }
}

impl Session {
    /// Reads the name of a sample's thread, if that is due and the thread runs Python code.
    pub(super) fn read_thread_name(&mut self, s: &Sample) {
        if s.python.is_empty() {
            return;
        }
        let names = &mut self.thread_names;
        if names.threads.len() >= MAX_THREADS {
            names.threads.clear();
            names.processes.clear();
        }
        let thread = names.threads.entry((s.pid, s.tid)).or_default();
        if !thread.is_due(s.time, 0) {
            return;
        }
        thread.was_read(s.time);
        self.update_thread_name(s.pid, s.tid, s.time);
    }

    /// Reads the names of all sampled threads that still run, at the end of a recording: they may have changed.
    pub fn update_thread_names(&mut self) {
        let threads: Vec<(Pid, Tid)> = self.thread_names.threads.keys().copied().collect();
        for (pid, tid) in threads {
            self.update_thread_name(pid, tid, u64::MAX);
        }
    }

    /// The name that a thread has in Python, read now. `None`: it has none, or it could not be read.
    pub fn current_thread_name(&mut self, pid: Pid, tid: Tid) -> Option<String> {
        self.update_thread_name(pid, tid, u64::MAX);
        self.thread_names.names.get(&(pid, tid)).cloned()
    }

    /// `time`: of a sample, so that the process's list of threads is not read too often.
    fn update_thread_name(&mut self, pid: Pid, tid: Tid, time: u64) {
        let python = self.targets.get(&pid).and_then(|target| target.python.as_ref());
        let Some((runtime, interpreter)) = python.and_then(|p| Some((&p.runtime, p.interpreter.as_ref()?))) else {
            return;
        };
        let memory = ProcessMemory(&*self.system, pid);
        let Some(namespace_tid) = self.thread_ids.inside(&*self.system, pid, tid) else {
            return;
        };
        let process = self.thread_names.processes.entry(pid).or_default();
        let lists_threads = process.lists_again(namespace_tid, time);
        if lists_threads {
            process.schedule.was_read(time);
        }
        if lists_threads && let Some(reader) = ThreadNameReader::new(&memory, runtime, interpreter) {
            process.threads = reader.threads();
        }
        if !process.threads.have_names() {
            return;
        }
        // A reading takes many words from few pages, and a system call costs more than a page.
        let mut read = || {
            let pages = Pages::with_first(&memory, &process.pages);
            let reader = ThreadNameReader::new(&pages, runtime, interpreter)?;
            let name = reader.name(&process.threads, namespace_tid);
            process.pages = pages.used();
            name
        };
        // Neither the thread nor its name has changed meanwhile.
        if let Some(name) = read()
            && read().as_ref() == Some(&name)
        {
            self.thread_names.names.insert((pid, tid), name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process with one thread that never imports `threading` costs a search a minute, however often it is sampled.
    #[test]
    fn threads_are_listed_when_one_is_unknown_and_else_rarely() {
        const SECOND: u64 = 1_000_000_000;
        let registry = Some(0x7000);
        for (threads, tid, seconds, expected) in [
            (NamedThreads::default(), 1, 1, true),
            (NamedThreads::example(&[1], None), 1, 30, false),
            (NamedThreads::example(&[1], None), 1, 61, true),
            (NamedThreads::example(&[1], None), 2, 1, true),
            (NamedThreads::example(&[1], registry), 1, 61, false),
            (NamedThreads::example(&[1], registry), 2, 1, true),
            (NamedThreads::example(&[1], registry), 2, 0, false),
        ] {
            let mut process = ProcessThreads::default();
            process.schedule.was_read(0);
            process.threads = threads.clone();
            assert_eq!(
                process.lists_again(tid, seconds * SECOND),
                expected,
                "{threads:?} {tid} {seconds}"
            );
        }
    }
}
