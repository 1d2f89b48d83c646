//! Names of processes and threads for profiles. Those of what has samples outlive it.

use std::collections::BTreeMap;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::event::{Pid, Tid};

/// Names in Python of threads without samples that are kept.
const MAX_PYTHON_THREADS: usize = 1 << 14;

/// Names of threads, and the interpreters of processes.
#[derive(Default)]
pub(super) struct Names {
    /// Current names of threads, as the system has them.
    pub(super) threads: BTreeMap<(Pid, Tid), String>,
    /// Names that threads have in Python, as far as known.
    pub(super) python_threads: BTreeMap<(Pid, Tid), String>,
    /// Interpreters found, as text: `CPython 3.11.7 (libpython3.11.so.1.0)`.
    pub(super) interpreters: BTreeMap<Pid, String>,
    /// Threads that have exited and have samples.
    ended: Vec<(Pid, Tid)>,
    /// Threads that have samples.
    sampled: FxHashMap<Pid, FxHashSet<Tid>>,
}

impl Names {
    pub(super) fn add_sampled(&mut self, pid: Pid, tid: Tid) {
        self.sampled.entry(pid).or_default().insert(tid);
    }

    fn is_sampled(&self, pid: Pid, tid: Tid) -> bool {
        self.sampled.get(&pid).is_some_and(|threads| threads.contains(&tid))
    }

    /// Whether any thread of the process has samples.
    pub(super) fn has_samples(&self, pid: Pid) -> bool {
        self.sampled.contains_key(&pid)
    }

    /// The interpreter of a process as text.
    pub(super) fn interpreter(&self, pid: Pid) -> Option<&str> {
        self.interpreters.get(&pid).map(|text| &**text)
    }

    /// The name of a thread, as the system has it.
    pub(super) fn thread(&self, pid: Pid, tid: Tid) -> Option<&str> {
        self.threads.get(&(pid, tid)).map(|name| &**name)
    }

    /// Takes note of the interpreter of a process, if it has one.
    pub(super) fn set_interpreter(&mut self, pid: Pid, text: Option<String>) {
        if let Some(text) = text {
            self.interpreters.insert(pid, text);
        }
    }

    /// A process was forked: it begins with the names of its parent.
    pub(super) fn fork(&mut self, pid: Pid, parent: Pid) {
        if let Some(python) = self.interpreters.get(&parent).cloned() {
            self.interpreters.insert(pid, python);
        }
        let name = self.threads.get(&(parent, parent)).cloned().unwrap_or_default();
        self.threads.insert((pid, pid), name);
    }

    /// A process executes a program: what it was called before belongs to the old one.
    pub(super) fn exec(&mut self, pid: Pid, comm: &[u8]) {
        self.interpreters.remove(&pid);
        let threads = self.python_threads.range((pid, 0)..=(pid, Tid::MAX));
        let threads: Vec<(Pid, Tid)> = threads.map(|(thread, _)| *thread).collect();
        for thread in threads {
            self.python_threads.remove(&thread);
        }
        self.rename(pid, pid, comm);
    }

    pub(super) fn rename(&mut self, pid: Pid, tid: Tid, comm: &[u8]) {
        self.threads
            .insert((pid, tid), String::from_utf8_lossy(comm).into_owned());
    }

    /// Takes note of the name that a thread had in a sample.
    pub(super) fn set_of_sample(&mut self, pid: Pid, tid: Tid, comm: &[u8]) {
        if self.thread(pid, tid).is_none_or(|known| known.as_bytes() != comm) {
            self.rename(pid, tid, comm);
        }
    }

    /// A thread has exited: its names are kept only if it has samples, since some programs create threads by the million.
    pub(super) fn end_thread(&mut self, pid: Pid, tid: Tid) {
        if self.is_sampled(pid, tid) {
            self.ended.push((pid, tid));
        } else {
            self.threads.remove(&(pid, tid));
            self.python_threads.remove(&(pid, tid));
        }
    }

    /// A process is forgotten.
    pub(super) fn end_process(&mut self, pid: Pid) {
        if !self.has_samples(pid) {
            self.interpreters.remove(&pid);
        }
    }

    /// Keeps the names of threads that have samples: others get them with their next one. A name in Python is read again
    /// only after a while, so those of all threads are kept, up to a limit.
    pub(super) fn retain_sampled(&mut self) {
        let Names {
            threads,
            python_threads,
            sampled,
            ..
        } = self;
        let is_sampled = |(pid, tid): &(Pid, Tid)| sampled.get(pid).is_some_and(|threads| threads.contains(tid));
        threads.retain(|thread, _| is_sampled(thread));
        if python_threads.len() > MAX_PYTHON_THREADS {
            python_threads.retain(|thread, _| is_sampled(thread));
        }
    }

    /// There are no samples any more. Those of `known` processes are kept, as far as their threads run.
    pub(super) fn forget_samples(&mut self, known: &dyn Fn(Pid) -> bool) {
        self.sampled.clear();
        for thread in std::mem::take(&mut self.ended) {
            self.threads.remove(&thread);
            self.python_threads.remove(&thread);
        }
        self.threads.retain(|(pid, _), _| known(*pid));
        self.python_threads.retain(|(pid, _), _| known(*pid));
        self.interpreters.retain(|pid, _| known(*pid));
    }
}
