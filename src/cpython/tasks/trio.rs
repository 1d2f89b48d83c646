//! The task of trio that runs, and all others. Its scheduler (`unrolled_run`, trio/_core/_run.py, 0.15 to 0.35) has it
//! in a local variable, and its frame is on the stack of every task. It is a generator: between its steps, `run` has it
//! in a local variable and waits for events. Tasks have slots for their attributes.

use super::chain::{AwaitChain, RawAwaitFrame};
use super::objects::{Kind, Objects};
use super::{MAX_TASKS, OtherTasks, lookup};
use crate::cpython::object_layout::LocalNames;
use crate::cpython::thread_states::PyThreadState;
use crate::process::memory::{Memory, Pages};

/// Maximum number of tasks in a chain of nurseries.
const MAX_NESTED: usize = 64;
/// Maximum number of frames read of all tasks together.
const MAX_FRAMES: usize = 1 << 19;

/// A function of trio that all its tasks are run by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrioFunction {
    /// A generator that runs the tasks that are ready.
    Scheduler,
    /// Calls that, and waits for events.
    Runner,
}

pub fn trio_function(function: &str, file: &str) -> Option<TrioFunction> {
    file.ends_with("trio/_core/_run.py").then_some(())?;
    match function {
        "unrolled_run" => Some(TrioFunction::Scheduler),
        "run" => Some(TrioFunction::Runner),
        _ => None,
    }
}

/// Whether a file has what trio itself runs as tasks.
pub fn is_trio_core(file: &str) -> bool {
    file.contains("/trio/_core/")
}

/// Where a scheduler has its task and all tasks, and a task its attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrioOffsets {
    /// In the frame.
    task: u64,
    runner: u64,
    /// `Runner.tasks`, a set.
    tasks: u16,
    /// The type of tasks.
    class: u64,
    coroutine: u16,
    nursery: u16,
    name: u16,
    /// What cancels its wait; None while it is ready.
    abort: u16,
}

/// A scheduler that runs in a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrioScheduler {
    /// `pthread_self`
    pub thread: u64,
    /// avma of the frame, and of its code object.
    pub frame: u64,
    pub code: u64,
}

/// A task with the frames of its coroutines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SuspendedTrioTask {
    pub task: TrioTask,
    pub chain: AwaitChain,
    /// It waits for the scheduler only.
    pub is_ready: bool,
}

impl TrioTask {
    /// avma of the object.
    pub fn address(&self) -> u64 {
        self.task
    }

    pub fn coroutine(&self) -> u64 {
        self.coroutine
    }
}

/// What identifies a task: while none of it changes, it has the same name and is in the same nurseries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrioTask {
    task: u64,
    coroutine: u64,
    nursery: u64,
    name: u64,
}

impl OtherTasks {
    /// Reads where things are from a scheduler that runs a task.
    pub fn trio_offsets(&self, memory: &dyn Memory, frame: u64, code: u64) -> Option<TrioOffsets> {
        let objects = self.objects(memory);
        let at = self.local(&objects, code, "task")?;
        let is_task = |task: &u64| objects.type_of(*task).is_some_and(|of| of.name == "Task");
        let runner_at = self.local(&objects, code, "runner")?;
        let runner = self.reference(memory, frame.checked_add(runner_at)?)?;
        let tasks = objects.member_offset(runner, "tasks")?;
        let current = self.reference(memory, frame.checked_add(at)?).filter(is_task);
        // While it waits for events, it has no current one.
        let any = || set_of_tasks(&objects, runner, tasks).into_iter().find(is_task);
        let task = current.or_else(any)?;
        let member = |name: &str| objects.member_offset(task, name);
        Some(TrioOffsets {
            task: at,
            runner: runner_at,
            tasks,
            class: objects.pointer(task, self.offsets.ob_type)?,
            coroutine: member("coro")?,
            nursery: member("_parent_nursery")?,
            name: member("name")?,
            abort: member("_abort_func")?,
        })
    }

    /// The task that the scheduler with this frame runs now, and the frame of the task's coroutine.
    pub fn trio_task(&self, memory: &dyn Memory, offsets: &TrioOffsets, frame: u64) -> Option<(TrioTask, u64)> {
        let task = self.reference(memory, frame.checked_add(offsets.task)?)?;
        self.trio_facts(&self.objects(memory), offsets, task)
    }

    /// Whether what is known of a task is unchanged.
    pub fn still_is(&self, memory: &dyn Memory, offsets: &TrioOffsets, known: (TrioTask, u64)) -> bool {
        self.trio_facts(&self.objects(memory), offsets, known.0.task) == Some(known)
    }

    /// All tasks, with the frames of their coroutines.
    pub fn all_trio_tasks(&self, live: &dyn Memory, offsets: &TrioOffsets, frame: u64) -> Vec<(TrioTask, u64)> {
        let memory = Pages::new(live);
        let objects = self.objects(&memory);
        let runner = frame.checked_add(offsets.runner);
        let runner = runner.and_then(|at| self.reference(&memory, at));
        let tasks = runner.map(|runner| set_of_tasks(&objects, runner, offsets.tasks));
        let facts = |task| self.trio_facts(&objects, offsets, task);
        tasks.unwrap_or_default().into_iter().filter_map(facts).collect()
    }

    /// The schedulers that run in threads. `function` says what a frame's function is.
    pub fn trio_schedulers(
        &self,
        memory: &dyn Memory,
        states: &[PyThreadState],
        function: &mut dyn FnMut(&RawAwaitFrame) -> Option<TrioFunction>,
    ) -> Vec<TrioScheduler> {
        let objects = self.objects(memory);
        let scheduler = |state: &PyThreadState| {
            let (frames, _) = objects.frames_from(objects.current_frame(state.state)?, 0);
            let mut found = frames.iter().filter_map(|raw| Some((*raw, function(raw)?)));
            let (mut raw, what) = found.next()?;
            if what == TrioFunction::Runner {
                let at = self.local(&objects, raw.code, "gen")?;
                let generator = self.reference(memory, raw.frame.checked_add(at)?)?;
                (objects.kind(generator)? == Kind::Generator).then_some(())?;
                raw = objects.raw_frame(objects.coroutine_frame(generator)?)?;
                (function(&raw)? == TrioFunction::Scheduler).then_some(())?;
            }
            Some(TrioScheduler {
                thread: state.thread,
                frame: raw.frame,
                code: raw.code,
            })
        };
        states.iter().filter_map(scheduler).collect()
    }

    /// Whether a scheduler's frame still is one.
    pub fn still_schedules(&self, memory: &dyn Memory, known: &TrioScheduler) -> bool {
        self.objects(memory)
            .word(known.frame, self.layout.frame_code)
            .map(|code| code & !3)
            == Some(known.code)
    }

    /// All tasks of a scheduler with the frames of their coroutines, by address. One whose task changes meanwhile is left out.
    pub fn trio_chains(
        &self,
        live: &dyn Memory,
        offsets: &TrioOffsets,
        scheduler: &TrioScheduler,
    ) -> Vec<SuspendedTrioTask> {
        let memory = Pages::new(live);
        let objects = self.objects(&memory);
        let mut all = self.all_trio_tasks(live, offsets, scheduler.frame);
        all.sort_unstable_by_key(|(task, _)| task.task);
        let mut left = MAX_FRAMES;
        let read = all.into_iter().map(|(task, _)| {
            let abort = objects.pointer(task.task, offsets.abort);
            let is_none = |object| objects.type_of(object).is_some_and(|of| of.name == "NoneType");
            let chain = objects.await_chain(task.coroutine);
            SuspendedTrioTask {
                task,
                is_ready: abort.is_none_or(is_none) || chain.is_new,
                chain,
            }
        });
        read.take_while(|read| {
            left = left.saturating_sub(1 + read.chain.frames.len());
            left > 0
        })
        .collect()
    }

    /// Whether a code object is that of a coroutine.
    pub fn is_coroutine(&self, memory: &dyn Memory, code: u64) -> bool {
        lookup::is_coroutine(memory, &self.tasks, code)
    }

    fn trio_facts(&self, objects: &Objects<'_>, offsets: &TrioOffsets, task: u64) -> Option<(TrioTask, u64)> {
        (objects.pointer(task, self.offsets.ob_type)? == offsets.class).then_some(())?;
        let coroutine = objects.pointer(task, offsets.coroutine)?;
        let task = TrioTask {
            task,
            coroutine,
            nursery: objects.pointer(task, offsets.nursery)?,
            name: objects.pointer(task, offsets.name)?,
        };
        Some((task, objects.coroutine_frame(coroutine)?))
    }

    /// The names of a task, of the task whose nursery that one is in, and so on. The outermost one, in which trio
    /// itself begins, is left out.
    pub fn trio_names(&self, live: &dyn Memory, offsets: &TrioOffsets, task: &TrioTask) -> Vec<String> {
        let memory = Pages::new(live);
        let objects = self.objects(&memory);
        let (mut names, mut next) = (Vec::new(), Some(task.task));
        while let (Some(task), true) = (next, names.len() < MAX_NESTED) {
            next = self.parent(&objects, offsets, task);
            if next.is_some() || names.is_empty() {
                let name = objects.pointer(task, offsets.name);
                let name = name.filter(|name| objects.kind(*name) == Some(Kind::Str));
                let name = name.and_then(|name| objects.text(name));
                names.push(name.unwrap_or_else(|| format!("Task at {task:#x}")));
            }
        }
        names
    }

    /// avma of the task whose nursery a task is in.
    pub fn trio_parent(&self, memory: &dyn Memory, offsets: &TrioOffsets, task: &TrioTask) -> Option<u64> {
        self.parent(&self.objects(memory), offsets, task.task)
    }

    fn parent(&self, objects: &Objects<'_>, offsets: &TrioOffsets, task: u64) -> Option<u64> {
        let nursery = objects.pointer(task, offsets.nursery)?;
        (objects.type_of(nursery)?.name == "Nursery").then_some(())?;
        let parent = objects.member(nursery, "_parent_task");
        let parent = parent.or_else(|| objects.attribute(nursery, "_parent_task"))?;
        (objects.pointer(parent, self.offsets.ob_type)? == offsets.class).then_some(parent)
    }

    /// Where a frame has a local variable.
    fn local(&self, objects: &Objects<'_>, code: u64, name: &str) -> Option<u64> {
        let (LocalNames::One(at) | LocalNames::Three(at, ..)) = self.offsets.names;
        let names = objects.tuple(objects.pointer(code, at)?)?;
        let is_it =
            |known: &u64| objects.kind(*known) == Some(Kind::Str) && objects.text(*known).as_deref() == Some(name);
        let slot = names.iter().position(is_it)?;
        Some(u64::from(self.offsets.frame_locals) + 8 * slot as u64)
    }

    /// What a variable of a frame refers to.
    fn reference(&self, memory: &dyn Memory, at: u64) -> Option<u64> {
        let value = memory.u64(at)?;
        let tag = if self.offsets.tagged { 3 } else { 0 };
        Some(value & !tag).filter(|value| *value != 0)
    }
}

/// The tasks of a runner.
fn set_of_tasks(objects: &Objects<'_>, runner: u64, at: u16) -> Vec<u64> {
    let tasks = objects.pointer(runner, at);
    let tasks = tasks.filter(|tasks| objects.type_of(*tasks).is_some_and(|of| of.name == "set"));
    tasks
        .and_then(|tasks| objects.set(tasks, MAX_TASKS))
        .unwrap_or_default()
}
