//! One process, looked at once.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Grouping, Naming, Session, SessionOptions, asyncio, trio};
use crate::cpython::Runtime;
use crate::cpython::code_object::CodeTable;
use crate::cpython::tasks::{NoTasks, OtherTasks, TaskReader};
use crate::cpython_layout::{Interpreter, TargetLayout};
use crate::error::Result;
use crate::event::{CodeCopy, Event, Pid, Sample, Tid};
use crate::interleave::StackQuality;
use crate::process::system::LiveSystem;
use crate::profile::model::{Meta, Profile};
use crate::resolve::Fetch;
use crate::truncation::Truncation;

/// What is read of a process once, by `dump`.
pub struct Inspection {
    session: Session,
    pid: Pid,
    /// What the session has found out of the process since it was opened.
    newer: Option<TargetLayout>,
}

impl Inspection {
    /// Reads what a process maps, and whether it runs Python; also returns what a backend needs to know of it. `native`: with
    /// native frames.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    pub fn open(pid: Pid, native: bool) -> Result<(Inspection, TargetLayout)> {
        let options = SessionOptions {
            grouping: Grouping {
                processes: false,
                threads: true,
            },
            native,
            ..SessionOptions::default()
        };
        let mut session = Session::new(options, Box::new(LiveSystem));
        let mut layout = TargetLayout::default();
        session.open(pid, &mut |_, found| {
            layout = found.cloned().unwrap_or_default();
            Ok(())
        })?;
        let inspection = Inspection {
            session,
            pid,
            newer: None,
        };
        Ok((inspection, layout))
    }

    /// Has names read by another process, and debug files downloaded by `fetch`.
    pub fn name_apart(&mut self, fetch: Option<Fetch>) {
        self.session.naming = Naming::apart(fetch);
    }

    /// Reads the mappings again, where libraries may have been loaded since. False if the process has exited.
    pub fn reopen(&mut self) -> bool {
        self.session.open(self.pid, &mut |_, _| Ok(())).is_ok()
    }

    /// Takes in the stack of a thread, with the code objects that were copied with it. Returns its quality; `None`: it is
    /// not known why it is incomplete.
    ///
    /// # Errors
    /// Those of the session on an event.
    pub fn add(&mut self, sample: &Sample, codes: &[CodeCopy]) -> Result<Option<StackQuality>> {
        let before = self.session.segment.quality.clone();
        let pid = sample.pid;
        for copy in codes {
            let copy = Box::new(copy.clone());
            self.session.event(Event::Code { pid, copy }, &mut |_, _| Ok(()))?;
        }
        let newer = &mut self.newer;
        let sample = Event::Sample(Box::new(sample.clone()));
        self.session.event(sample, &mut |_, found| {
            *newer = found.cloned();
            Ok(())
        })?;
        let after = &self.session.segment.quality;
        let more = |(why, n): &(&Truncation, &u64)| before.reasons.get(*why).is_none_or(|had| had < *n);
        Ok(if after.exact > before.exact {
            Some(StackQuality::Exact)
        } else if after.repaired > before.repaired {
            Some(StackQuality::Repaired)
        } else {
            let reason = after.reasons.iter().find(more);
            reason.map(|(why, _)| StackQuality::Partial(*why))
        })
    }

    /// What a backend needs to know of the process, if that has changed since the last call.
    pub fn take_newer_layout(&mut self) -> Option<TargetLayout> {
        self.newer.take()
    }

    /// The interpreter: what its file says, and where it is if its version is supported.
    pub fn python(&self) -> Option<(Arc<Runtime>, Option<Interpreter>)> {
        let python = self.session.processes.get(self.pid)?.python.as_ref()?;
        Some((python.runtime.clone(), python.interpreter))
    }

    /// Whether the process publishes allocations that it samples.
    pub fn publishes_allocations(&self) -> bool {
        let process = self.session.processes.get(self.pid);
        process.is_some_and(|process| !process.allocation_probes(&self.session.files).is_empty())
    }

    /// The interpreter as text: `CPython 3.11.7 (libpython3.11.so.1.0)`.
    pub fn python_text(&self) -> Option<&str> {
        self.session.names.interpreter(self.pid)
    }

    /// Whether the process had more than one interpreter when its thread states were read last.
    pub fn has_several_interpreters(&self) -> bool {
        let process = self.session.processes.get(self.pid);
        process.is_some_and(|process| process.has_several_interpreters())
    }

    /// The name of a thread, as the system has it.
    pub fn thread_name(&self, tid: Tid) -> Option<&str> {
        self.session.names.thread(self.pid, tid)
    }

    /// The name that a thread has in Python, read now. `None`: it has none, or it could not be read.
    fn current_thread_name(&mut self, tid: Tid) -> Option<String> {
        let (pid, session) = (self.pid, &mut self.session);
        let known = session.processes.get_mut(pid)?;
        let name = known.process.read_thread_name(&*session.files.system, tid, u64::MAX);
        if let Some(name) = &name {
            session.names.python_threads.insert((pid, tid), name.clone());
        }
        name.or_else(|| session.names.python_threads.get(&(pid, tid)).cloned())
    }

    /// Names of threads in Python, of those that have one.
    pub fn current_thread_names(&mut self, tids: &[Tid]) -> BTreeMap<Tid, String> {
        let named = |tid: &Tid| Some((*tid, self.current_thread_name(*tid)?));
        tids.iter().filter_map(named).collect()
    }

    /// Reads the tasks of the process.
    ///
    /// # Errors
    /// Why they cannot be read; `UnknownVersion` also for a process without Python.
    pub fn task_reader(&self) -> std::result::Result<TaskReader, NoTasks> {
        let process = self.session.processes.get(self.pid).ok_or(NoTasks::UnknownVersion)?;
        asyncio::task_reader(process, &self.session.files)
    }

    /// What reads the greenlets and the tasks of trio. `None`: the process runs no Python that is known.
    pub fn other_tasks(&self) -> Option<OtherTasks> {
        trio::other_tasks(self.session.processes.get(self.pid)?)
    }

    /// The code objects of the process.
    pub fn codes(&mut self) -> &mut CodeTable {
        &mut self.session.files.codes
    }

    /// Opens what symbolization reads, while there are privileges for it.
    pub fn open_symbol_sources(&mut self) {
        self.session.open_symbol_sources(self.pid);
    }

    /// The stacks of all threads, with the names of their frames.
    pub fn resolve(&mut self) -> Profile {
        let meta = Meta {
            pid: self.pid,
            ..Meta::default()
        };
        self.session.resolve(0, meta)
    }
}
