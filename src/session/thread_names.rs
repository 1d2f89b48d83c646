//! Names that threads have in Python: read when a thread is first sampled in Python code, and again ever more rarely.

use std::ops::RangeInclusive;

use rustc_hash::FxHashMap;

use super::process::Process;
use crate::cpython::thread_names::{NamedThreads, ThreadNameReader};
use crate::event::{Sample, Tid};
use crate::process::memory::Pages;
use crate::process::system::System;

/// Time until a name, or the list of a process's threads, is read again, ns of the samples' clock. It doubles each time
/// from the first to the last of these.
const FIRST_DELAY: u64 = 50_000_000;
const LAST_DELAY: u64 = 5_000_000_000;
/// The same in a recording of a whole host, and the time until a name that was found is read again.
const LAST_HOST_DELAY: u64 = 60_000_000_000;
/// Additional time until a known thread of a process that had not imported `threading` makes us look for that module
/// again, ns: nothing but the name `MainThread` is missing, and a search takes some 30 system calls.
const IMPORT_DELAY: u64 = 60_000_000_000;
/// Maximum number of threads of a process that are remembered; some programs create them by the million.
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

    fn was_read(&mut self, time: u64, delays: RangeInclusive<u64>) {
        self.delay = (2 * self.delay).clamp(*delays.start(), *delays.end());
        self.next = time.saturating_add(self.delay);
    }
}

/// When the names of a process's threads are read, and where they are.
#[derive(Default)]
pub(super) struct ThreadNameSchedule {
    threads: NamedThreads,
    schedule: Schedule,
    /// Pages that the last reading needed, in ascending order: the next one reads them together.
    pages: Vec<u64>,
    sampled: FxHashMap<Tid, Schedule>,
}

impl ThreadNameSchedule {
    /// Whether a sample of the thread at `time` makes us list the process's threads again.
    fn lists_again(&self, tid: Tid, time: u64) -> bool {
        match (self.threads.contain(tid), self.threads.have_names()) {
            (true, true) => false,
            (true, false) => self.schedule.is_due(time, IMPORT_DELAY),
            (false, _) => self.schedule.is_due(time, 0),
        }
    }

    /// A thread has exited.
    pub(super) fn forget_thread(&mut self, tid: Tid) {
        self.sampled.remove(&tid);
    }

    /// Threads that have been sampled in Python code.
    pub(super) fn sampled(&self) -> Vec<Tid> {
        self.sampled.keys().copied().collect()
    }
}

impl Process {
    /// The name that the thread of a sample has in Python, if it runs Python code and reading the name is due.
    pub(super) fn due_thread_name(&mut self, system: &dyn System, s: &Sample) -> Option<String> {
        if s.python.is_empty() {
            return None;
        }
        let sampled = &mut self.thread_names.sampled;
        if sampled.len() >= MAX_THREADS {
            sampled.clear();
        }
        let thread = sampled.entry(s.tid).or_default();
        if !thread.is_due(s.time, 0) {
            return None;
        }
        let (tid, time) = (s.tid, s.time);
        let name = self.read_thread_name(system, tid, time);
        let delays = match (&s.host, &name) {
            (None, _) => FIRST_DELAY..=LAST_DELAY,
            (Some(_), None) => FIRST_DELAY..=LAST_HOST_DELAY,
            (Some(_), Some(_)) => LAST_HOST_DELAY..=LAST_HOST_DELAY,
        };
        if let Some(thread) = self.thread_names.sampled.get_mut(&tid) {
            thread.was_read(time, delays);
        }
        name
    }

    /// The name that a thread has in Python, read now. `None`: it has none, or it could not be read. `time`: of a sample, so that
    /// the process's threads are not listed too often.
    pub(super) fn read_thread_name(&mut self, system: &dyn System, tid: Tid, time: u64) -> Option<String> {
        let python = self.python.as_ref()?;
        let (runtime, interpreter) = (&python.runtime, python.interpreter.as_ref()?);
        let memory = self.live_memory(system);
        let namespace_tid = self.thread_ids.inside(system, self.space.pid, tid)?;
        let known = &mut self.thread_names;
        let lists_threads = known.lists_again(namespace_tid, time);
        if lists_threads {
            known.schedule.was_read(time, FIRST_DELAY..=LAST_DELAY);
        }
        if lists_threads && let Some(reader) = ThreadNameReader::new(&memory, runtime, interpreter) {
            known.threads = reader.threads();
        }
        if !known.threads.have_names() {
            return None;
        }
        // A reading takes many words from few pages, and a system call costs more than a page.
        let mut read = || {
            let pages = Pages::with_first(&memory, &known.pages);
            let reader = ThreadNameReader::new(&pages, runtime, interpreter)?;
            let name = reader.name(&known.threads, namespace_tid);
            known.pages = pages.used();
            name
        };
        // Neither the thread nor its name has changed meanwhile.
        let name = read()?;
        (read().as_ref() == Some(&name)).then_some(name)
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
            let mut process = ThreadNameSchedule::default();
            process.schedule.was_read(0, FIRST_DELAY..=LAST_DELAY);
            process.threads = threads.clone();
            assert_eq!(
                process.lists_again(tid, seconds * SECOND),
                expected,
                "{threads:?} {tid} {seconds}"
            );
        }
    }
}
