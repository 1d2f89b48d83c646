//! The asyncio tasks of a session's processes: which task a sample belongs to.
//!
//! A coroutine's frame keeps its address for as long as the coroutine lives, and a task keeps its coroutine alive. But when a
//! sample is processed, the task may have ended, and another one have taken its place, down to the address of its name. So the
//! name comes from the sample, which has a copy of it, and the frame that the task begins with. What was read of a task at other
//! times adds the tasks that await it. Without a copy, it counts only if it was read before the sample and is the same after it.

use std::collections::HashMap;
use std::iter;

use rustc_hash::FxHashMap;

use super::Session;
use super::asyncio_search::AsyncioSearch;
use super::other_tasks::TrioTasks;
use crate::cpython::frame_groups::LastFrames;
use crate::cpython::tasks::{CopiedName, OtherTasks, TaskChain, TaskReader};
use crate::cpython_layout::RunningTasks;
use crate::event::{Pid, RunningTask, Sample};
use crate::frame::{CodeId, PyFrame, RawFrame, TaskNameId};
use crate::limits::SHIM;
use crate::process::memory::Pages;
use crate::process::system::ProcessMemory;
use crate::sys;

/// Maximum number of different names of tasks, of their total length in bytes, and of coroutines known per process.
const MAX_NAMES: usize = 1 << 16;
const MAX_NAME_BYTES: usize = 8 << 20;
const MAX_KNOWN: usize = 1 << 16;
/// All tasks of a process are read again after so many times the time that it took the last time: that is a share of
/// 1/20 of our time.
pub(super) const PAUSE_FACTOR: u64 = 20;
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
    pub(super) reader: Option<TaskReader>,
    /// Of what is not asyncio's; `None` inside: its offsets are not known.
    pub(super) others: Option<Option<OtherTasks>>,
    /// How far from the end of the stack's outermost frame the address of a greenlet was found, bytes.
    pub(super) greenlet_slot: Option<u64>,
    pub(super) trio: TrioTasks,
    /// Whether a hub of greenlets waits in code objects.
    pub(super) hubs: FxHashMap<CodeId, bool>,
    pub(super) search: AsyncioSearch,
    /// When to read all tasks again; ns.
    next_scan: u64,
    /// Tasks by the address of their coroutine's frame, when all were read the last time.
    located: FxHashMap<u64, u64>,
    /// By the address of the coroutine's frame.
    known: FxHashMap<u64, KnownTask>,
    /// Where the backend reads which task runs; true if it is not notified yet.
    pub(super) running: Option<(RunningTasks, bool)>,
    /// Whether code objects are those of coroutines.
    coroutines: FxHashMap<CodeId, bool>,
}

/// A task as it was read.
struct KnownTask {
    chain: TaskChain,
    /// When the reading began, ns.
    read: u64,
}

impl KnownTask {
    fn names(&self) -> impl Iterator<Item = &String> {
        self.chain.tasks.iter().map(|(_, name)| name)
    }
}

/// The names of a task that ran at a sample and of those that awaited it. `copied` has, by their addresses, the task first, those that
/// were found at the sample. `known` is what was read of the task at other times, and whether it is the same after the sample: the
/// tasks that follow are taken from there if it was so before and after, or if the last task that was copied is the same one without
/// doubt.
fn names_at_sample(copied: Vec<(u64, CopiedName)>, time: u64, known: &[(&KnownTask, bool)]) -> Vec<String> {
    let Some((_, last)) = copied.last() else {
        return Vec::new();
    };
    let is_numbered = last.is_numbered();
    let fits = |known: &KnownTask| {
        let mut pairs = copied.iter().zip(&known.chain.tasks);
        known.chain.tasks.len() >= copied.len()
            && pairs.all(|((address, name), (facts, text))| facts.address == *address && name.fits(text))
    };
    let is_sure = |(known, is_same): &&(&KnownTask, bool)| {
        let adds_none = known.chain.tasks.len() == copied.len();
        fits(known) && (adds_none || is_numbered || *is_same && known.read <= time)
    };
    match known.iter().find(is_sure) {
        Some((known, _)) => known.names().cloned().collect(),
        None => copied.into_iter().map(|(_, name)| name.text()).collect(),
    }
}

impl ProcessTasks {
    /// Makes the tasks among these, given as (task, frame), known if their frames are wanted.
    fn remember(&mut self, memory: &Pages<'_>, tasks: &[(u64, u64)], wanted: &dyn Fn(u64) -> bool) {
        let Some(reader) = &self.reader else { return };
        for (task, frame) in tasks.iter().filter(|(_, frame)| wanted(*frame)) {
            if self.known.len() >= MAX_KNOWN {
                self.known.clear();
            }
            let read = sys::clock::now();
            if let Some(chain) = reader.chain(memory, *task) {
                self.known.insert(*frame, KnownTask { chain, read });
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
        let copy_of = |frame: u64| s.tasks.iter().find(|task| task.frame == frame);
        // (place, address, code) of coroutines
        let mut frames: Vec<(usize, u64, CodeId)> = Vec::new();
        for (place, (raw, code)) in last.shown().enumerate() {
            let PyFrame::Code { code, .. } = code else { continue };
            let mut is_coroutine = || {
                let known = process.coroutines.entry(code);
                *known.or_insert_with(|| reader.is_coroutine(&memory, raw.code, raw.owner))
            };
            if raw.owner < SHIM && (copy_of(raw.frame).is_some() || is_coroutine()) {
                frames.push((place, raw.frame, code));
            }
        }
        let Some((_, outermost, _)) = frames.first().copied() else {
            return Vec::new();
        };
        // What was known and is not so any more.
        let mut before: FxHashMap<u64, KnownTask> = FxHashMap::default();
        for (_, frame, _) in &frames {
            if let Some(known) = process.known.remove(frame) {
                match reader.still_holds(&memory, &known.chain) {
                    true => process.known.insert(*frame, known),
                    false => before.insert(*frame, known),
                };
            }
        }
        let is_there = |task: &&RunningTask| reader.frame(&memory, task.task) == Some(task.frame);
        let mut copied = frames.iter().filter_map(|(_, frame, _)| copy_of(*frame));
        let copied: Vec<(u64, u64)> = copied
            .by_ref()
            .filter(|task| !process.known.contains_key(&task.frame))
            .filter(is_there)
            .map(|task| (task.task, task.frame))
            .collect();
        process.remember(&memory, &copied, &|_| true);
        let unknown: Vec<u64> = frames
            .iter()
            .map(|(_, frame, _)| *frame)
            .filter(|frame| copy_of(*frame).is_none() && !process.known.contains_key(frame))
            .collect();
        // An eager task may run inside of another one, so inner coroutines matter, too.
        if !unknown.is_empty() && s.tasks.is_empty() {
            let running = process.reader.as_mut().map(|reader| reader.running(&memory));
            match running {
                Some(Ok(running)) => process.remember(&memory, &running, &|frame| unknown.contains(&frame)),
                _ => return Vec::new(), // asyncio is not loaded: coroutines of something else
            }
        }
        if copy_of(outermost).is_none() && !process.known.contains_key(&outermost) {
            process.locate(&memory, s.time, outermost);
        }
        let Some(reader) = &process.reader else {
            return Vec::new();
        };
        if self.needs_loops()
            && let Some(known) = process.known.get(&outermost)
            && let Some((facts, _)) = known.chain.tasks.first()
            && let Some(event_loop) = reader.event_loop(&memory, facts.address)
        {
            self.awaits.observe_loop((s.pid, s.tid), event_loop, s.time);
        }
        // The names of the task that begins with a frame.
        let names = |frame: u64| {
            let known = process.known.get(&frame);
            if let Some(task) = copy_of(frame) {
                let copied =
                    iter::once((task.task, &task.name)).chain(task.awaiters.iter().map(|(at, name)| (*at, name)));
                let copied = copied.map_while(|(at, name)| Some((at, reader.copied_name(&memory, name)?)));
                let now = known.map(|known| (known, true));
                let before = before.get(&frame).map(|known| (known, false));
                let known: Vec<_> = now.into_iter().chain(before).collect();
                let names = names_at_sample(copied.collect(), s.time, &known);
                return (!names.is_empty()).then_some(names);
            }
            let known = known.filter(|known| known.read <= s.time)?;
            Some(known.names().cloned().collect())
        };
        let (mut found, mut has_all) = (Vec::new(), true);
        for (place, frame, code) in &frames {
            let names = names(*frame);
            let is_outermost = *frame == outermost;
            // What `_asyncio` has called is a task, too: one that runs inside of another one, and has ended.
            let is_ended = names.is_none() && !is_outermost && steps.contains(place);
            has_all &= !is_ended && (names.is_some() || !is_outermost);
            let names = names.or(is_ended.then(|| vec![ENDED.to_string()]));
            if let Some(names) = names {
                let ids = names.iter().map(|name| self.tasks.names.id(name)).collect();
                found.push((*place, *code, ids));
            }
        }
        match has_all {
            true => self.tasks.counts.with += 1,
            false => self.tasks.counts.without += 1,
        }
        found
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
    use crate::cpython::tasks::TaskFacts;

    /// Tasks as `ADDRESS NAME`, each awaited by the next one.
    fn chain(tasks: &[(u64, &str)], read: u64) -> KnownTask {
        let facts = |address| TaskFacts {
            address,
            ..TaskFacts::default()
        };
        let task = |(at, name): &(u64, &str)| (facts(*at), name.to_string());
        let chain = TaskChain {
            tasks: tasks.iter().map(task).collect(),
        };
        KnownTask { chain, read }
    }

    #[test]
    fn names_come_from_the_sample() {
        const SAMPLE: u64 = 50;
        fn check(copied: &[(u64, &str)], known: &[(&KnownTask, bool)], expected: &[&str]) {
            let copied = copied
                .iter()
                .map(|(at, name)| (*at, CopiedName::Whole(name.to_string())));
            assert_eq!(
                names_at_sample(copied.collect(), SAMPLE, known),
                expected,
                "{expected:?}"
            );
        }
        let child = [(1, "child")];
        let (old, late) = (
            chain(&[(1, "child"), (2, "a")], 40),
            chain(&[(1, "child"), (2, "b")], 60),
        );
        check(&child, &[], &["child"]);
        // It was so before the sample and is so after it.
        check(&child, &[(&old, true)], &["child", "a"]);
        // Another task may have had this place and name at the sample.
        check(&child, &[(&late, true)], &["child"]);
        check(&child, &[(&late, true), (&old, false)], &["child"]);
        // What the sample itself has needs nothing else.
        check(
            &[(1, "child"), (2, "c")],
            &[(&late, true), (&old, false)],
            &["child", "c"],
        );
        // No two tasks have the same number.
        let numbered = chain(&[(1, "Task-7"), (2, "main")], 60);
        check(&[(1, "Task-7")], &[(&numbered, true)], &["Task-7", "main"]);
        check(&[(1, "Task-8")], &[(&numbered, true)], &["Task-8"]);
        check(&[(3, "Task-7")], &[(&numbered, true)], &["Task-7"]);
    }

    #[test]
    fn the_beginning_of_a_name() {
        let copied = || vec![(1, CopiedName::Beginning("a long n".into()))];
        let known = chain(&[(1, "a long name")], 60);
        assert_eq!(names_at_sample(copied(), 50, &[(&known, true)]), ["a long name"]);
        assert_eq!(names_at_sample(copied(), 50, &[]), ["a long n..."]);
    }

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
