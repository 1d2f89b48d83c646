//! Tasks of trio in one process. The frames of a sample say that the scheduler runs, and which coroutine it runs; the task that
//! belongs to that is read a little later, and checked.

use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::await_kind::library_kind;
use super::process::Process;
use super::task_source::{
    RunningTask, RunningTasks, TaskDescription, TaskNames, TaskPlace, TaskReading, TaskSample, TaskSource,
};
use crate::cpython::tasks::{
    self, OtherTasks, RawAwaitFrame, SuspendedTrioTask, TrioFunction, TrioOffsets, TrioScheduler, TrioTask,
    is_trio_core, trio_function,
};
use crate::cpython::thread_states;
use crate::event::{AwaitKind, Tid};
use crate::frame::{CodeId, PyFrame, RawFrame, TaskNameId};
use crate::process::memory::Pages;

/// All tasks of trio are read again after so many times the time that it took the last time.
const PAUSE_FACTOR: u64 = 20;
/// Maximum number of code objects, and of tasks, that are known of a process.
const MAX_KNOWN: usize = 1 << 16;
/// Maximum number of threads that run a scheduler.
const MAX_THREADS: usize = 256;
/// Time between two searches for schedulers, ns.
const SEARCH: u64 = 1_000_000_000;

/// What is known of trio in a process.
#[derive(Default)]
pub(super) struct Trio {
    /// `None` inside: its offsets are not known.
    reader: Option<Option<Rc<OtherTasks>>>,
    /// Whether code objects are those of its scheduler.
    schedulers: FxHashMap<CodeId, bool>,
    /// Those that run, by thread.
    running: FxHashMap<Tid, TrioScheduler>,
    /// With the avma of the code object that they belong to.
    offsets: Option<(u64, TrioOffsets)>,
    /// By the frame of the task's coroutine.
    names: FxHashMap<u64, (TrioTask, Vec<TaskNameId>)>,
    /// When all tasks may be read again, ns.
    next_scan: u64,
    /// When schedulers were searched for, ns.
    searched: u64,
}

/// What reads the greenlets and the tasks of trio of a process. `None`: it runs no Python that is known.
pub(super) fn other_tasks(process: &Process) -> Option<OtherTasks> {
    let (runtime, interpreter) = process.runtime()?;
    OtherTasks::new(runtime, interpreter)
}

impl Trio {
    /// Finds the schedulers in a process whose samples have shown none, from time to time.
    fn search(&mut self, reader: &OtherTasks, reading: &mut TaskReading<'_>) {
        let (process, files) = (reading.process, &mut *reading.files);
        let system = files.system.clone();
        let live = process.live_memory(&*system);
        let is_live = |scheduler: &TrioScheduler| reader.still_schedules(&live, scheduler);
        if reading.time.saturating_sub(self.searched) < SEARCH || self.running.values().any(is_live) {
            return;
        }
        self.searched = reading.time;
        let Some(interpreter) = process.interpreter() else {
            return;
        };
        let states = thread_states::states(&live, interpreter);
        reading.threads.refresh(process, files, reading.time);
        let memory = Pages::new(&live);
        let mut function = |raw: &RawAwaitFrame| {
            let code = tasks::code_of(&mut files.codes, process.pid(), &memory, &interpreter.layout, raw).ok()?;
            let code = files.codes.get(code);
            trio_function(&code.name, &code.filename)
        };
        for found in reader.trio_schedulers(&memory, &states, &mut function) {
            let (Some(tid), Some(offsets)) = (
                reading.threads.get(found.thread),
                reader.trio_offsets(&memory, found.frame, found.code),
            ) else {
                continue;
            };
            self.offsets = Some((found.code, offsets));
            if self.running.len() < MAX_THREADS {
                self.running.insert(tid, found);
            }
        }
    }

    fn reader(&mut self, process: &Process) -> Option<Rc<OtherTasks>> {
        self.reader
            .get_or_insert_with(|| other_tasks(process).map(Rc::new))
            .clone()
    }
}

impl TaskSource for Trio {
    type Suspended = SuspendedTrioTask;

    fn running(&mut self, s: &TaskSample<'_>, names: &mut TaskNames) -> Option<RunningTasks> {
        if self.schedulers.len() >= MAX_KNOWN {
            self.schedulers.clear();
        }
        let codes = &s.files.codes;
        let mut shown = s.last.shown().enumerate();
        let (_, (scheduler, _)) = shown.find(|(_, (_, frame))| {
            let PyFrame::Code { code, .. } = frame else {
                return false;
            };
            *self.schedulers.entry(*code).or_insert_with(|| {
                let known = codes.get(*code);
                trio_function(&known.name, &known.filename) == Some(TrioFunction::Scheduler)
            })
        })?;
        let reader = self.reader(s.process)?;
        let live = s.process.live_memory(&*s.files.system);
        if self.running.len() >= MAX_THREADS {
            self.running.clear();
        }
        self.running.insert(
            s.sample.tid,
            TrioScheduler {
                thread: 0,
                frame: scheduler.frame,
                code: scheduler.code,
            },
        );
        let offsets = match self.offsets {
            Some((code, offsets)) if code == scheduler.code => offsets,
            _ => {
                let offsets = reader.trio_offsets(&Pages::new(&live), scheduler.frame, scheduler.code)?;
                self.offsets.insert((scheduler.code, offsets)).1
            }
        };
        // The scheduler calls the task's coroutine, and has gone on since then, but coroutines keep their frames.
        let (place, (root, frame)) = shown.next()?;
        let PyFrame::Code { code, .. } = frame else { return None };
        if self.names.len() >= MAX_KNOWN {
            self.names.clear();
        }
        let is_same = |(task, _): &(TrioTask, _)| reader.still_is(&live, &offsets, (*task, root.frame));
        if !self.names.get(&root.frame).is_some_and(is_same) {
            let is_meant = |(_, coroutine): &(TrioTask, u64)| *coroutine == root.frame;
            let mut found = reader.trio_task(&live, &offsets, scheduler.frame).filter(is_meant);
            if found.is_none() && s.sample.time >= self.next_scan {
                let began = s.files.system.now();
                let all = reader.all_trio_tasks(&live, &offsets, scheduler.frame);
                found = all.into_iter().find(is_meant);
                self.next_scan = s.sample.time + PAUSE_FACTOR * s.files.system.now().saturating_sub(began);
            }
            let Some((task, _)) = found else {
                self.names.remove(&root.frame);
                return reader.is_coroutine(&live, root.code).then(RunningTasks::default);
            };
            let chain = reader.trio_names(&live, &offsets, &task);
            let chain = chain.iter().map(|name| names.id(name)).collect();
            self.names.insert(root.frame, (task, chain));
        }
        let task = RunningTask {
            place: TaskPlace::Coroutine(place, code),
            names: self.names.get(&root.frame)?.1.clone(),
        };
        Some(RunningTasks {
            tasks: vec![task],
            is_known: true,
        })
    }

    fn suspended(&mut self, reading: &mut TaskReading<'_>) -> Vec<(Tid, SuspendedTrioTask)> {
        let Some(reader) = self.reader(reading.process) else {
            return Vec::new();
        };
        self.search(&reader, reading);
        let Some((_, offsets)) = self.offsets else {
            return Vec::new();
        };
        let live = reading.process.live_memory(&*reading.files.system);
        let mut found = Vec::new();
        for (tid, scheduler) in &self.running {
            if reader.still_schedules(&live, scheduler) {
                let tasks = reader.trio_chains(&live, &offsets, scheduler).into_iter();
                let suspended = tasks.filter(|task| !task.chain.is_running);
                found.extend(suspended.map(|task| (*tid, task)));
            }
        }
        found
    }

    fn address(task: &SuspendedTrioTask) -> u64 {
        task.task.address()
    }

    fn is_shown_as(task: &SuspendedTrioTask, before: &SuspendedTrioTask) -> bool {
        (task.task, task.is_ready) == (before.task, before.is_ready) && task.chain.frames == before.chain.frames
    }

    fn frames(task: &SuspendedTrioTask) -> &[RawAwaitFrame] {
        &task.chain.frames
    }

    fn describe(
        &self,
        task: &SuspendedTrioTask,
        functions: &[(String, String)],
        reading: &TaskReading<'_>,
        names: &mut TaskNames,
    ) -> Option<TaskDescription> {
        // Tasks that belong to its scheduler.
        if functions.iter().all(|(_, file)| is_trio_core(file)) {
            return None;
        }
        let (reader, (_, offsets)) = (self.reader.as_ref()?.as_ref()?, self.offsets?);
        let chain = reader.trio_names(reading.memory, &offsets, &task.task);
        let kind = if task.is_ready {
            AwaitKind::Turn
        } else {
            library_kind(functions.iter().rev().map(|(name, file)| (&**name, &**file)))
        };
        Some(TaskDescription {
            above: chain.iter().rev().map(|name| RawFrame::Task(names.id(name))).collect(),
            kind,
        })
    }
}
