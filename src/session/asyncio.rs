//! asyncio in one process: the search for it, what reads its tasks, where the backend reads which of them run, and
//! which threads run its event loops.
//!
//! A coroutine's frame keeps its address for as long as the coroutine lives, and a task keeps its coroutine alive. But when a
//! sample is processed, the task may have ended, and another one have taken its place, down to the address of its name. So the
//! name comes from the sample, which has a copy of it, and the frame that the task begins with. What was read of a task at other
//! times adds the tasks that await it. Without a copy, it counts only if it was read before the sample and is the same after it.

use std::iter;
use std::rc::Rc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::await_kind::await_kind;
use super::files::Files;
use super::process::Process;
use super::task_source::{
    RunningTask, RunningTasks, TaskDescription, TaskNames, TaskPlace, TaskReading, TaskSample, TaskSource,
};
use crate::cpython::tasks::{CopiedName, DEBUG_SECTION, NoTasks, RawAwaitFrame, SuspendedTask, TaskChain, TaskReader};
use crate::cpython::thread_states;
use crate::cpython_layout::RunningTasks as RunningTaskLocation;
use crate::event::{self, Tid};
use crate::frame::{CodeId, PyFrame, RawFrame};
use crate::limits::SHIM;
use crate::process::memory::{Memory, Pages};
use crate::process::modules::Modules;

/// Time between the first attempts to find asyncio in a process after it has loaded a file, ns, and how many of them
/// are not to be late: it may be importing asyncio.
const RETRY: u64 = 5_000_000;
const URGENT: u64 = 20;
/// Time between two attempts as a multiple of the time that one takes.
const PAUSE_FACTOR: u64 = 20;
/// How long the thread of an event loop is taken to be the same, ns.
const LOOP_AGE: u64 = 1_000_000_000;
/// Event loops known of a process, and coroutines, at most.
const MAX_LOOPS: usize = 1024;
const MAX_KNOWN: usize = 1 << 16;
/// Name of a task that runs inside of another one and has ended before its name was read.
const ENDED: &str = "(ended)";

/// What is known of asyncio in a process.
#[derive(Default)]
pub(super) struct Asyncio {
    /// `None`: it is not there, or not yet.
    pub(super) reader: Option<TaskReader>,
    /// Where the backend reads which task runs; true if it is not notified yet.
    running: Option<(RunningTaskLocation, bool)>,
    pub(super) loops: EventLoops,
    tasks: CoroutineTasks,
    /// State of the mappings at the last attempt to find it, and attempts since they changed.
    generation: Option<u64>,
    attempts: u64,
    /// When to try again; ns.
    next: u64,
}

/// Tasks by their coroutines.
#[derive(Default)]
struct CoroutineTasks {
    /// When to read all tasks again; ns.
    next_scan: u64,
    /// Tasks by the address of their coroutine's frame, when all were read the last time.
    located: FxHashMap<u64, u64>,
    /// By the address of the coroutine's frame.
    known: FxHashMap<u64, KnownTask>,
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

/// The names of a task that ran at a sample and of those that awaited it. `copied` has, by their addresses, the task
/// first, those that were found at the sample. `known` is what was read of the task at other times, and whether it is
/// the same after the sample: the tasks that follow are taken from there if it was so before and after, or if the last
/// task that was copied is the same one without doubt.
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

impl CoroutineTasks {
    /// Makes the tasks among these, given as (task, frame), known if their frames are wanted; `clock`: CLOCK_MONOTONIC, ns.
    fn remember(
        &mut self,
        reader: &TaskReader,
        memory: &Pages<'_>,
        tasks: &[(u64, u64)],
        wanted: &dyn Fn(u64) -> bool,
        clock: &dyn Fn() -> u64,
    ) {
        for (task, frame) in tasks.iter().filter(|(_, frame)| wanted(*frame)) {
            if self.known.len() >= MAX_KNOWN {
                self.known.clear();
            }
            let read = clock();
            if let Some(chain) = reader.chain(memory, *task) {
                self.known.insert(*frame, KnownTask { chain, read });
            }
        }
    }

    /// Makes the task with this frame known, if it still exists. Reads all tasks where that is due.
    fn locate(&mut self, reader: &mut TaskReader, memory: &Pages<'_>, time: u64, frame: u64, clock: &dyn Fn() -> u64) {
        let mut task = self.located.get(&frame).copied();
        task = task.filter(|task| reader.frame(memory, *task) == Some(frame));
        if task.is_none() && time >= self.next_scan {
            let began = clock();
            if let Ok(all) = reader.all(memory) {
                self.located = all.into_iter().map(|(task, frame)| (frame, task)).collect();
                task = self.located.get(&frame).copied();
            }
            let took = clock().saturating_sub(began);
            self.next_scan = time + PAUSE_FACTOR * took;
        }
        if let Some(task) = task {
            self.remember(reader, memory, &[(task, frame)], &|_| true, clock);
        }
    }
}

/// Threads of event loops.
#[derive(Default)]
pub(super) struct EventLoops {
    /// By event loop, with the time at which the thread was read, ns.
    threads: FxHashMap<u64, (Tid, u64)>,
}

impl EventLoops {
    /// A thread runs a task of this event loop.
    pub(super) fn observe(&mut self, event_loop: u64, tid: Tid, now: u64) {
        if self.threads.len() >= MAX_LOOPS {
            self.threads.clear();
        }
        self.threads.insert(event_loop, (tid, now));
    }

    /// The thread that ran an event loop the last time.
    pub(super) fn last_thread(&self, event_loop: u64) -> Option<Tid> {
        self.threads.get(&event_loop).map(|(tid, _)| *tid)
    }

    /// The thread of an event loop, which is read again with `find` from time to time.
    pub(super) fn thread(&mut self, event_loop: u64, now: u64, find: impl FnOnce() -> Option<Tid>) -> Option<Tid> {
        let known = self.threads.get(&event_loop);
        if let Some((tid, read)) = known
            && now.saturating_sub(*read) < LOOP_AGE
        {
            return Some(*tid);
        }
        let tid = find().or(known.map(|(tid, _)| *tid))?;
        self.observe(event_loop, tid, now);
        Some(tid)
    }
}

impl Asyncio {
    /// Looks for asyncio if it is not known and that is due; `now`: CLOCK_MONOTONIC, ns.
    pub(super) fn search(&mut self, process: &Process, files: &Files, now: u64) {
        if self.running.is_some() || process.python.is_none() {
            return;
        }
        let generation = process.space.generation;
        if self.generation != Some(generation) {
            (self.attempts, self.next) = (0, 0);
            self.generation = Some(generation);
        }
        if now < self.next {
            return;
        }
        self.attempts += 1;
        let began = files.system.now();
        if self.reader.is_none() {
            self.reader = task_reader(process, files).ok();
        }
        if let Some(reader) = &mut self.reader {
            let live = process.live_memory(&*files.system);
            let found = reader.find_running_tasks(&Pages::new(&live));
            self.running = found.ok().map(|running| (running, true));
        }
        let took = files.system.now().saturating_sub(began);
        // The longer nothing comes, the less often it is searched for.
        self.next = now + (RETRY * self.attempts).max(PAUSE_FACTOR * took);
    }

    /// How long to wait at most until the process is to be searched again.
    pub(super) fn until_search(&self) -> Duration {
        if self.running.is_none() && self.attempts < URGENT {
            Duration::from_nanos(RETRY)
        } else {
            Duration::MAX
        }
    }

    /// Where the backend is to read which task a thread runs.
    pub(super) fn running_tasks(&self) -> Option<RunningTaskLocation> {
        self.running.map(|(running, _)| running)
    }

    /// Whether the backend is to be notified of that; it is taken to be.
    pub(super) fn take_new_running(&mut self) -> bool {
        let running = self.running.as_mut();
        running.is_some_and(|(_, is_new)| std::mem::take(is_new))
    }
}

impl TaskSource for Asyncio {
    type Suspended = Rc<SuspendedTask>;

    fn running(&mut self, s: &TaskSample<'_>, task_names: &mut TaskNames) -> Option<RunningTasks> {
        let steps = task_steps(s.stack, &s.files.modules);
        let live = s.process.live_memory(&*s.files.system);
        // Each sample sees memory as it is now.
        let memory = Pages::new(&live);
        self.search(s.process, s.files, s.sample.time);
        let (reader, own, loops) = (self.reader.as_mut()?, &mut self.tasks, &mut self.loops);
        let copy_of = |frame: u64| s.sample.tasks.iter().find(|task| task.frame == frame);
        // (place, address, code) of coroutines
        let mut frames: Vec<(usize, u64, CodeId)> = Vec::new();
        for (place, (raw, code)) in s.last.shown().enumerate() {
            let PyFrame::Code { code, .. } = code else { continue };
            let mut is_coroutine = || {
                let known = own.coroutines.entry(code);
                *known.or_insert_with(|| reader.is_coroutine(&memory, raw.code, raw.owner))
            };
            if raw.owner < SHIM && (copy_of(raw.frame).is_some() || is_coroutine()) {
                frames.push((place, raw.frame, code));
            }
        }
        let (_, outermost, _) = frames.first().copied()?;
        // What was known and is not so any more.
        let mut before: FxHashMap<u64, KnownTask> = FxHashMap::default();
        for (_, frame, _) in &frames {
            if let Some(known) = own.known.remove(frame) {
                if reader.still_holds(&memory, &known.chain) {
                    own.known.insert(*frame, known)
                } else {
                    before.insert(*frame, known)
                };
            }
        }
        let is_there = |task: &&event::RunningTask| reader.frame(&memory, task.task) == Some(task.frame);
        let mut copied = frames.iter().filter_map(|(_, frame, _)| copy_of(*frame));
        let copied: Vec<(u64, u64)> = copied
            .by_ref()
            .filter(|task| !own.known.contains_key(&task.frame))
            .filter(is_there)
            .map(|task| (task.task, task.frame))
            .collect();
        let clock = || s.files.system.now();
        own.remember(reader, &memory, &copied, &|_| true, &clock);
        let unknown: Vec<u64> = frames
            .iter()
            .map(|(_, frame, _)| *frame)
            .filter(|frame| copy_of(*frame).is_none() && !own.known.contains_key(frame))
            .collect();
        // An eager task may run inside of another one, so inner coroutines matter, too.
        if !unknown.is_empty() && s.sample.tasks.is_empty() {
            match reader.running(&memory) {
                Ok(running) => own.remember(reader, &memory, &running, &|frame| unknown.contains(&frame), &clock),
                Err(_) => return None, // asyncio is not loaded: coroutines of something else
            }
        }
        if copy_of(outermost).is_none() && !own.known.contains_key(&outermost) {
            own.locate(reader, &memory, s.sample.time, outermost, &clock);
        }
        if let Some(known) = own.known.get(&outermost)
            && let Some((facts, _)) = known.chain.tasks.first()
            && let Some(event_loop) = reader.event_loop(&memory, facts.address)
        {
            loops.observe(event_loop, s.sample.tid, s.sample.time);
        }
        // The names of the task that begins with a frame.
        let names = |frame: u64| {
            let known = own.known.get(&frame);
            if let Some(task) = copy_of(frame) {
                let copied =
                    iter::once((task.task, &task.name)).chain(task.awaiters.iter().map(|(at, name)| (*at, name)));
                let copied = copied.map_while(|(at, name)| Some((at, reader.copied_name(&memory, name)?)));
                let now = known.map(|known| (known, true));
                let before = before.get(&frame).map(|known| (known, false));
                let known: Vec<_> = now.into_iter().chain(before).collect();
                let names = names_at_sample(copied.collect(), s.sample.time, &known);
                return (!names.is_empty()).then_some(names);
            }
            let known = known.filter(|known| known.read <= s.sample.time)?;
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
                found.push(RunningTask {
                    place: TaskPlace::Coroutine(*place, *code),
                    names: names.iter().map(|name| task_names.id(name)).collect(),
                });
            }
        }
        Some(RunningTasks {
            tasks: found,
            is_known: has_all,
        })
    }

    fn suspended(&mut self, reading: &mut TaskReading<'_>) -> Vec<(Tid, Rc<SuspendedTask>)> {
        let (process, files, now) = (reading.process, &*reading.files, reading.time);
        self.search(process, files, now);
        let Some(reader) = &mut self.reader else {
            return Vec::new();
        };
        let live = process.live_memory(&*files.system);
        let memory = reading.memory;
        let Ok(tasks) = reader.suspended(&live, memory) else {
            return Vec::new();
        };
        let mut threads: FxHashMap<u64, Tid> = FxHashMap::default();
        let found = tasks.into_iter().map(|task| {
            let event_loop = task.event_loop;
            let tid = *threads.entry(event_loop).or_insert_with(|| {
                let find = || read_loop_thread(process, files, reader, memory, event_loop);
                // Of a loop whose thread is not known: the first one.
                self.loops.thread(event_loop, now, find).unwrap_or(process.pid())
            });
            (tid, task)
        });
        found.collect()
    }

    fn address(task: &Rc<SuspendedTask>) -> u64 {
        task.address()
    }

    fn is_shown_as(task: &Rc<SuspendedTask>, before: &Rc<SuspendedTask>) -> bool {
        Rc::ptr_eq(task, before)
    }

    fn frames(task: &Rc<SuspendedTask>) -> &[RawAwaitFrame] {
        &task.frames
    }

    fn describe(
        &self,
        task: &Rc<SuspendedTask>,
        functions: &[(String, String)],
        _: &TaskReading<'_>,
        names: &mut TaskNames,
    ) -> Option<TaskDescription> {
        let chain = task.chain.tasks.iter().rev();
        let innermost_first = functions.iter().rev().map(|(name, file)| (&**name, &**file));
        Some(TaskDescription {
            above: chain.map(|(_, name)| RawFrame::Task(names.id(name))).collect(),
            kind: await_kind(task.awaited, innermost_first),
        })
    }
}

/// Reads the tasks of a process that runs Python.
///
/// # Errors
/// Why they cannot be read; `UnknownVersion` also for a process without Python.
pub(super) fn task_reader(process: &Process, files: &Files) -> Result<TaskReader, NoTasks> {
    let (runtime, interpreter) = process.runtime().ok_or(NoTasks::UnknownVersion)?;
    let mapped = process.space.code().iter().filter_map(|c| c.file);
    // The module is a file of its own, or built into the interpreter.
    let may_hold = |name: &str| name.starts_with("_asyncio") || name.contains("python");
    let published = mapped
        .map(|(id, _)| files.modules.get(id))
        .filter(|module| may_hold(&module.name()))
        .find_map(|module| module.section(DEBUG_SECTION));
    let published = published.as_ref().map(|s| &*s.bytes);
    TaskReader::new(runtime, interpreter, published)
}

/// The thread that runs an event loop, if that can be read.
pub(super) fn read_loop_thread(
    process: &Process,
    files: &Files,
    reader: &TaskReader,
    memory: &dyn Memory,
    event_loop: u64,
) -> Option<Tid> {
    let thread_pointer = reader.loop_thread(memory, event_loop)?;
    let inside = thread_states::thread_id(memory, process.interpreter()?, thread_pointer)?;
    process.host_thread(&*files.system, inside)
}

/// The Python frames that a function of `_asyncio` called, as their index from the outermost one: where a task's
/// coroutine begins. None where `_asyncio` is built into the interpreter.
fn task_steps(stack: &[RawFrame], modules: &Modules) -> Vec<usize> {
    let (mut steps, mut place, mut is_step) = (Vec::new(), 0, false);
    for frame in stack {
        match frame {
            RawFrame::Native { module, .. } => {
                is_step |= modules.get(*module).name().starts_with("_asyncio.");
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
}
