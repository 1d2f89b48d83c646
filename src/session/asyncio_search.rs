//! The search for asyncio in a session's processes: what reads its tasks, and where the backend reads which of them run.

use std::time::Duration;

use super::Session;
use super::tasks::{PAUSE_FACTOR, ProcessTasks};
use crate::cpython::tasks::{DEBUG_SECTION, NoTasks, TaskReader};
use crate::event::Pid;
use crate::process::memory::Pages;
use crate::process::system::ProcessMemory;
use crate::sys;

/// Time between the first attempts to find asyncio in a process after it has loaded a file, ns, and how many of them are not to be
/// late: it may be importing asyncio.
const RETRY: u64 = 5_000_000;
const URGENT: u64 = 20;

/// The search for asyncio in a process.
#[derive(Default)]
pub(super) struct AsyncioSearch {
    /// State of the mappings at the last attempt, and attempts since they changed.
    generation: Option<u64>,
    attempts: u64,
    /// When to try again; ns.
    next: u64,
}

impl Session {
    /// What reads the tasks of a process, for [`Session::put_reader`] to return. `None`: it has none, or not yet.
    pub(super) fn take_reader(&mut self, pid: Pid, now: u64) -> Option<TaskReader> {
        let mut process = self.tasks.processes.remove(&pid).unwrap_or_default();
        self.find_reader(pid, now, &mut process);
        let reader = process.reader.take();
        self.tasks.processes.insert(pid, process);
        reader
    }

    pub(super) fn put_reader(&mut self, pid: Pid, reader: TaskReader) {
        self.tasks.processes.entry(pid).or_default().reader = Some(reader);
    }

    pub(super) fn find_reader(&self, pid: Pid, now: u64, process: &mut ProcessTasks) {
        if process.running.is_some() {
            return;
        }
        let Some(target) = self.targets.get(&pid).filter(|target| target.python.is_some()) else {
            return;
        };
        let search = &mut process.search;
        if search.generation != Some(target.process.generation) {
            *search = AsyncioSearch::default();
            search.generation = Some(target.process.generation);
        }
        if now < search.next {
            return;
        }
        search.attempts += 1;
        let began = sys::clock::now();
        if process.reader.is_none() {
            process.reader = self.task_reader(pid).ok();
        }
        if let Some(reader) = &mut process.reader {
            let live = ProcessMemory(&*self.system, pid);
            let found = reader.find_running_tasks(&Pages::new(&live));
            process.running = found.ok().map(|running| (running, true));
        }
        let took = sys::clock::now().saturating_sub(began);
        // The longer nothing comes, the less often it is searched for.
        search.next = now + (RETRY * search.attempts).max(PAUSE_FACTOR * took);
    }

    /// How long to wait at most until processes are to be searched for asyncio again.
    pub(super) fn until_asyncio(&self) -> Duration {
        let waits = |process: &ProcessTasks| process.running.is_none() && process.search.attempts < URGENT;
        match self.searches_asyncio() && self.tasks.processes.values().any(waits) {
            true => Duration::from_nanos(RETRY),
            false => Duration::MAX,
        }
    }

    fn searches_asyncio(&self) -> bool {
        self.options.tasks || self.options.lag.is_some()
    }

    /// Searches processes for asyncio, before samples come that need it. Returns those where it was found now.
    pub(super) fn search_asyncio(&mut self, now: u64) -> Vec<Pid> {
        if !self.searches_asyncio() {
            return Vec::new();
        }
        let pids: Vec<Pid> = self.targets.keys().copied().collect();
        pids.iter().for_each(|pid| self.search_asyncio_in(*pid, now));
        pids.into_iter()
            .filter(|pid| self.has_new_running_tasks(*pid))
            .collect()
    }

    /// The same in one process; the backend has to be notified if it is found.
    pub(super) fn search_asyncio_in(&mut self, pid: Pid, now: u64) {
        if self.searches_asyncio() {
            let mut process = self.tasks.processes.remove(&pid).unwrap_or_default();
            self.find_reader(pid, now, &mut process);
            self.tasks.processes.insert(pid, process);
        }
    }

    /// Reads the tasks of a process that runs Python.
    ///
    /// # Errors
    /// Why they cannot be read; `UnknownVersion` also for a process without Python.
    pub fn task_reader(&self, pid: Pid) -> Result<TaskReader, NoTasks> {
        let target = self.targets.get(&pid).ok_or(NoTasks::UnknownVersion)?;
        let python = target.python.as_ref().ok_or(NoTasks::UnknownVersion)?;
        let interpreter = python.interpreter.ok_or(NoTasks::UnknownVersion)?;
        let files = target.process.code().iter().filter_map(|c| c.file);
        // The module is a file of its own, or built into the interpreter.
        let may_hold = |name: &str| name.starts_with("_asyncio") || name.contains("python");
        let published = files.map(|(id, _)| self.modules.get(id)).find_map(|module| {
            may_hold(&module.name()).then_some(())?;
            module.section(DEBUG_SECTION)
        });
        let memory = ProcessMemory(&*self.system, pid);
        let published = published.as_ref().map(|s| &*s.bytes);
        TaskReader::new(&memory, &python.runtime, &interpreter, published)
    }

    /// Whether the backend is to be notified of that.
    pub(super) fn has_new_running_tasks(&mut self, pid: Pid) -> bool {
        let process = self.tasks.processes.get_mut(&pid);
        let running = process.and_then(|process| process.running.as_mut());
        running.is_some_and(|(_, is_new)| std::mem::take(is_new))
    }
}
