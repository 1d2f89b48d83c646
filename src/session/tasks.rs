//! The asyncio tasks of a session's processes: which task a sample belongs to.
//!
//! A coroutine's frame keeps its address for as long as the coroutine lives, and a task keeps its coroutine alive. So the
//! frames of a sample, which are of its instant, say which task ran; only names are read a little later. What is known
//! of a task is compared with its memory at each sample, since another task may have taken its place.

use std::collections::HashMap;

use rustc_hash::FxHashMap;

use super::Session;
use super::other_tasks::TrioTasks;
use crate::cpython::frame_groups::LastFrames;
use crate::cpython::tasks::{DEBUG_SECTION, NoTasks, OtherTasks, TaskChain, TaskReader};
use crate::cpython_layout::RunningTasks;
use crate::event::{Part, Pid, Sample, Tid};
use crate::frame::{CodeId, PyFrame, RawFrame, TaskNameId};
use crate::limits::SHIM;
use crate::sys;
use crate::target::memory::Pages;
use crate::target::system::ProcessMemory;

/// Maximum number of different names of tasks, of their total length in bytes, and of coroutines known per process.
const MAX_NAMES: usize = 1 << 16;
const MAX_NAME_BYTES: usize = 8 << 20;
const MAX_KNOWN: usize = 1 << 16;
/// All tasks of a process are read again after so many times the time that it took the last time: that is a share of
/// 1/20 of our time.
const PAUSE_FACTOR: u64 = 20;
/// Tasks whose samples have not come yet, at most.
const MAX_WAITING: usize = 4096;
/// Time between two attempts to find asyncio in a process, ns.
const RETRY: u64 = 100_000_000;
/// Name of tasks for which there is no room.
const OTHER: &str = "(other)";
/// Name of a task that runs inside of another one and has ended before its name was read.
const ENDED: &str = "(ended)";

/// Samples with and without the task that they belong to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskCounts {
    pub with: u64,
    /// Of coroutines and greenlets whose task could not be determined.
    pub without: u64,
}

/// What is known of the tasks in samples.
#[derive(Default)]
pub(super) struct SampleTasks {
    pub(super) processes: FxHashMap<Pid, ProcessTasks>,
    /// By thread, the task that it ran at the time of a sample that has not come yet, and the object that is the task's name.
    at_samples: FxHashMap<(Pid, Tid), (u64, u64, Part)>,
    pub(super) names: TaskNames,
    pub(super) counts: TaskCounts,
    /// What the thread of the current sample runs.
    pub(super) runs: Runs,
}

/// What a thread runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Runs {
    #[default]
    Other,
    Task,
    /// The hub of greenlets.
    Hub,
}

/// Names of tasks, each once.
#[derive(Default)]
pub struct TaskNames {
    all: Vec<String>,
    /// Names come from the target: a hasher that resists collision attacks.
    ids: HashMap<String, TaskNameId>,
    bytes: usize,
}

impl TaskNames {
    pub(super) fn id(&mut self, name: &str) -> TaskNameId {
        if let Some(id) = self.ids.get(name) {
            return *id;
        }
        let is_full = self.all.len() >= MAX_NAMES || self.bytes + name.len() > MAX_NAME_BYTES;
        if is_full && name != OTHER {
            return self.id(OTHER);
        }
        let id = TaskNameId(self.all.len() as u32);
        self.bytes += name.len();
        self.all.push(name.to_string());
        self.ids.insert(name.to_string(), id);
        id
    }

    /// All names, in the order of their numbers.
    pub fn all(&self) -> &[String] {
        &self.all
    }
}

/// Tasks of one process.
#[derive(Default)]
pub(super) struct ProcessTasks {
    reader: Option<TaskReader>,
    /// Of what is not asyncio's; `None` inside: its offsets are not known.
    pub(super) others: Option<Option<OtherTasks>>,
    /// How far from the end of the stack's outermost frame the address of a greenlet was found, bytes.
    pub(super) greenlet_slot: Option<u64>,
    pub(super) trio: TrioTasks,
    /// Whether a hub of greenlets waits in code objects.
    pub(super) hubs: FxHashMap<CodeId, bool>,
    /// When to search for asyncio again, and to read all tasks again; ns.
    next_search: u64,
    next_scan: u64,
    /// Tasks by the address of their coroutine's frame, when all were read the last time.
    located: FxHashMap<u64, u64>,
    /// By the address of the coroutine's frame.
    known: FxHashMap<u64, TaskChain>,
    /// Where the backend reads which task runs; true if it is not notified yet.
    running: Option<(RunningTasks, bool)>,
    /// Whether code objects are those of coroutines.
    coroutines: FxHashMap<CodeId, bool>,
}

impl ProcessTasks {
    /// Makes the tasks among these, given as (task, frame), known if their frames are wanted.
    fn remember(&mut self, memory: &Pages<'_>, tasks: &[(u64, u64)], wanted: &dyn Fn(u64) -> bool) {
        let Some(reader) = &self.reader else { return };
        for (task, frame) in tasks.iter().filter(|(_, frame)| wanted(*frame)) {
            if self.known.len() >= MAX_KNOWN {
                self.known.clear();
            }
            if let Some(chain) = reader.chain(memory, *task) {
                self.known.insert(*frame, chain);
            }
        }
    }

    /// Makes the task with this frame known, if it still exists. Reads all tasks where that is due.
    fn locate(&mut self, memory: &Pages<'_>, time: u64, frame: u64) {
        let Some(reader) = &mut self.reader else { return };
        let mut task = self.located.get(&frame).copied();
        task = task.filter(|task| reader.frame(memory, *task) == Some(frame));
        if task.is_none() && time >= self.next_scan {
            let began = sys::clock::now();
            if let Ok(all) = reader.all(memory) {
                self.located = all.into_iter().map(|(task, frame)| (frame, task)).collect();
                task = self.located.get(&frame).copied();
            }
            let took = sys::clock::now().saturating_sub(began);
            self.next_scan = time + PAUSE_FACTOR * took;
        }
        if let Some(task) = task {
            self.remember(memory, &[(task, frame)], &|_| true);
        }
    }
}

impl Session {
    /// Samples of coroutines so far; `None` if no tasks are searched for.
    pub fn task_counts(&self) -> Option<TaskCounts> {
        self.options.tasks.then_some(self.tasks.counts)
    }

    /// The process has ended, or executes another program.
    pub(super) fn forget_tasks(&mut self, pid: Pid) {
        self.tasks.processes.remove(&pid);
        self.forget_awaits(pid);
        self.forget_lags(pid);
    }

    /// Where the backend is to read which task a thread runs.
    pub(super) fn running_tasks(&self, pid: Pid) -> Option<RunningTasks> {
        Some(self.tasks.processes.get(&pid)?.running?.0)
    }

    /// Whether the backend is to be notified of that.
    pub(super) fn has_new_running_tasks(&mut self, pid: Pid) -> bool {
        let process = self.tasks.processes.get_mut(&pid);
        let running = process.and_then(|process| process.running.as_mut());
        running.is_some_and(|(_, is_new)| std::mem::take(is_new))
    }

    /// The task that a thread ran at the time of a sample that follows.
    pub(super) fn observe_running_task(&mut self, (pid, tid, time): (Pid, Tid, u64), task: u64, name: Part) {
        let waiting = &mut self.tasks.at_samples;
        if waiting.len() >= MAX_WAITING {
            waiting.clear();
        }
        waiting.insert((pid, tid), (time, task, name));
    }

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

    fn find_reader(&self, pid: Pid, now: u64, process: &mut ProcessTasks) {
        if process.reader.is_none() && now >= process.next_search {
            process.next_search = now + RETRY;
            process.reader = self.task_reader(pid).ok();
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

    /// Adds frames for the tasks that run in this sample, whose Python frames `last` has, to `self.stack` from `start`
    /// on.
    pub(super) fn add_tasks(&mut self, s: &Sample, last: &LastFrames, start: usize) {
        self.tasks.runs = Runs::Other;
        if !self.options.tasks || s.python.is_empty() {
            return;
        }
        let mut process = self.tasks.processes.remove(&s.pid).unwrap_or_default();
        let steps = self.task_steps(start);
        let found = match self.find_trio_task(s, last, &mut process) {
            Some(found) => vec![found],
            None => self.find_tasks(s, last, &steps, &mut process),
        };
        for (place, code, chain) in &found {
            self.insert_task(start, *place, *code, chain);
        }
        self.add_greenlet(s, last, start, &mut process);
        let runs_task = self.stack[start..].iter().any(|f| matches!(f, RawFrame::Task(_)));
        self.tasks.runs = match self.find_hub(last, &mut process) {
            true => Runs::Hub,
            false if runs_task => Runs::Task,
            false => Runs::Other,
        };
        self.tasks.processes.insert(s.pid, process);
    }

    /// The Python frames that a function of `_asyncio` called, as their index from the outermost one: where a task's
    /// coroutine begins. None where `_asyncio` is built into the interpreter.
    fn task_steps(&self, start: usize) -> Vec<usize> {
        let (mut steps, mut place, mut is_step) = (Vec::new(), 0, false);
        for frame in &self.stack[start..] {
            match frame {
                RawFrame::Native { module, .. } => {
                    is_step |= self.modules.get(*module).name().starts_with("_asyncio.");
                }
                RawFrame::Python { .. } => {
                    if is_step {
                        steps.push(place);
                    }
                    (place, is_step) = (place + 1, false);
                }
                _ => {}
            }
        }
        steps
    }

    /// The tasks of a sample, outermost first: the index of the coroutine's frame among the shown Python frames, from
    /// the outermost one, its code object, and the names of the task and of those that await it.
    fn find_tasks(
        &mut self,
        s: &Sample,
        last: &LastFrames,
        steps: &[usize],
        process: &mut ProcessTasks,
    ) -> Vec<(usize, CodeId, Vec<TaskNameId>)> {
        let live = ProcessMemory(&*self.system, s.pid);
        // Each sample sees memory as it is now.
        let memory = Pages::new(&live);
        self.find_reader(s.pid, s.time, process);
        let Some(reader) = &process.reader else {
            return Vec::new();
        };
        // (place, address, code) of coroutines
        let mut frames: Vec<(usize, u64, CodeId)> = Vec::new();
        for (place, (raw, code)) in last.shown().enumerate() {
            let PyFrame::Code { code, .. } = code else { continue };
            let is_coroutine = *process
                .coroutines
                .entry(code)
                .or_insert_with(|| reader.is_coroutine(&memory, raw.code, raw.owner));
            if is_coroutine && raw.owner < SHIM {
                frames.push((place, raw.frame, code));
            }
        }
        let Some((_, outermost, _)) = frames.first().copied() else {
            return Vec::new();
        };
        for (_, frame, _) in &frames {
            if process
                .known
                .get(frame)
                .is_some_and(|chain| !reader.still_holds(&memory, chain))
            {
                process.known.remove(frame);
            }
        }
        let wanted: Vec<u64> = frames
            .iter()
            .map(|(_, frame, _)| *frame)
            .filter(|frame| !process.known.contains_key(frame))
            .collect();
        let is_wanted = |frame: u64| wanted.contains(&frame);
        // An eager task may run inside of another one, so inner coroutines matter, too.
        if !wanted.is_empty() {
            let running = process.reader.as_mut().map(|reader| reader.running(&memory));
            match running {
                Some(Ok(running)) => process.remember(&memory, &running, &is_wanted),
                _ => return Vec::new(), // asyncio is not loaded: coroutines of something else
            }
        }
        if !process.known.contains_key(&outermost) {
            process.locate(&memory, s.time, outermost);
        }
        if process.running.is_none() {
            let running = process.reader.as_ref().and_then(TaskReader::running_tasks);
            process.running = running.map(|running| (running, true));
        }
        // The task that ran when the sample was taken, in case that it has ended.
        let at_sample = self.tasks.at_samples.remove(&(s.pid, s.tid));
        let at_sample = at_sample.filter(|(time, ..)| *time == s.time);
        let at_sample = at_sample.and_then(|(_, task, name)| {
            let is_known = |chain: &TaskChain| chain.tasks.first().is_some_and(|(facts, _)| facts.address == task);
            let mut shown = frames.iter().filter_map(|(_, frame, _)| process.known.get(frame));
            if shown.any(is_known) {
                return None;
            }
            process.reader.as_ref()?.copied_name(&memory, &name)
        });
        let is_known = |frame: u64| process.known.contains_key(&frame);
        let has_ended = |place: usize, frame: u64| frame != outermost && !is_known(frame) && steps.contains(&place);
        let is_ended = |(place, frame, _): &(usize, u64, CodeId)| has_ended(*place, *frame);
        let mut ended: Vec<usize> = (0..frames.len()).filter(|at| is_ended(&frames[*at])).collect();
        // Where no frames of `_asyncio` are recognized: another task ran inside of the outermost one, and native code has
        // called its coroutine. There is no doubt which one it is if only one was called in this way.
        if ended.is_empty() && at_sample.is_some() && is_known(outermost) {
            let entered = last.entered();
            let is_entered = |at: &usize| !is_known(frames[*at].1) && entered.contains(&frames[*at].0);
            let mut inner = (1..frames.len()).filter(is_entered);
            if let (Some(only), None) = (inner.next(), inner.next()) {
                ended.push(only);
            }
        }
        let unknown = ended.last().copied().or((!is_known(outermost)).then_some(0));
        let named = unknown.filter(|_| at_sample.is_some());
        let all_ended = ended.iter().all(|at| named == Some(*at));
        if all_ended && (is_known(outermost) || named == Some(0)) {
            self.tasks.counts.with += 1;
        } else {
            self.tasks.counts.without += 1;
        }
        if self.needs_loops()
            && let (Some(chain), Some(reader)) = (process.known.get(&outermost), &process.reader)
            && let Some((facts, _)) = chain.tasks.first()
            && let Some(event_loop) = reader.event_loop(&memory, facts.address)
        {
            self.awaits.observe_loop((s.pid, s.tid), event_loop, s.time);
        }
        let names = &mut self.tasks.names;
        let found = (0..).zip(&frames).filter_map(|(at, (place, frame, code))| {
            if let Some(name) = at_sample.as_ref().filter(|_| named == Some(at)) {
                return Some((*place, *code, vec![names.id(name)]));
            }
            if ended.contains(&at) {
                return Some((*place, *code, vec![names.id(ENDED)]));
            }
            let chain = process.known.get(frame)?;
            Some((
                *place,
                *code,
                chain.tasks.iter().map(|(_, name)| names.id(name)).collect(),
            ))
        });
        found.collect()
    }

    /// Inserts the frames of a task above its coroutine.
    fn insert_task(&mut self, start: usize, place: usize, code: CodeId, chain: &[TaskNameId]) {
        let of_python = self.stack[start..].iter().enumerate();
        let mut python = of_python.filter_map(|(i, f)| match f {
            RawFrame::Python { code, .. } => Some((start + i, *code)),
            _ => None,
        });
        // Where subinterpreters' frames are mixed, the order is another one.
        if let Some((at, found)) = python.nth(place)
            && found == code
        {
            let frames = chain.iter().rev().map(|name| RawFrame::Task(*name));
            self.stack.splice(at..at, frames);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded() {
        let mut names = TaskNames::default();
        assert_eq!(
            (names.id("a"), names.id("b"), names.id("a")),
            (TaskNameId(0), TaskNameId(1), TaskNameId(0))
        );
        let long = "x".repeat(MAX_NAME_BYTES);
        let other = names.id(&long);
        assert_eq!(names.all()[other.0 as usize], OTHER);
        assert_eq!(names.id("b"), TaskNameId(1));
        for i in 0..2 * MAX_NAMES {
            names.id(&i.to_string());
        }
        assert!(names.all().len() <= MAX_NAMES + 1);
    }
}
