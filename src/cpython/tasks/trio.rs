//! The task of trio that runs. Its scheduler (`unrolled_run`, trio/_core/_run.py, 0.15 to 0.35) has it in a local variable, and its
//! frame is on the stack of every task. Tasks have slots for their attributes.

use super::objects::{Kind, Objects};
use super::{MAX_TASKS, OtherTasks, lookup};
use crate::cpython::object_layout::LocalNames;
use crate::target::memory::{Memory, Pages};

/// Maximum number of tasks in a chain of nurseries.
const MAX_NESTED: usize = 64;

/// Is this the function of trio that runs tasks?
pub fn is_trio_scheduler(function: &str, file: &str) -> bool {
    function == "unrolled_run" && file.ends_with("trio/_core/_run.py")
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
        let task = self.reference(memory, frame.checked_add(at)?)?;
        (objects.type_of(task)?.name == "Task").then_some(())?;
        let member = |name: &str| objects.member_offset(task, name);
        let runner_at = self.local(&objects, code, "runner")?;
        let runner = self.reference(memory, frame.checked_add(runner_at)?)?;
        Some(TrioOffsets {
            task: at,
            runner: runner_at,
            tasks: objects.member_offset(runner, "tasks")?,
            class: objects.pointer(task, self.offsets.ob_type)?,
            coroutine: member("coro")?,
            nursery: member("_parent_nursery")?,
            name: member("name")?,
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
        let tasks = runner.and_then(|runner| objects.pointer(runner, offsets.tasks));
        let tasks = tasks.filter(|tasks| objects.type_of(*tasks).is_some_and(|t| t.name == "set"));
        let tasks = tasks
            .and_then(|tasks| objects.set(tasks, MAX_TASKS))
            .unwrap_or_default();
        let facts = |task| self.trio_facts(&objects, offsets, task);
        tasks.into_iter().filter_map(facts).collect()
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

    /// The names of a task, of the task whose nursery that one is in, and so on. The outermost one, in which trio itself begins, is
    /// left out.
    pub fn trio_names(&self, live: &dyn Memory, offsets: &TrioOffsets, task: &TrioTask) -> Vec<String> {
        let memory = Pages::new(live);
        let objects = self.objects(&memory);
        let parent = |task: u64| {
            let nursery = objects.pointer(task, offsets.nursery)?;
            (objects.type_of(nursery)?.name == "Nursery").then_some(())?;
            let parent = objects.member(nursery, "_parent_task");
            let parent = parent.or_else(|| objects.attribute(nursery, "_parent_task"))?;
            (objects.pointer(parent, self.offsets.ob_type)? == offsets.class).then_some(parent)
        };
        let (mut names, mut next) = (Vec::new(), Some(task.task));
        while let (Some(task), true) = (next, names.len() < MAX_NESTED) {
            next = parent(task);
            if next.is_some() || names.is_empty() {
                let name = objects.pointer(task, offsets.name);
                let name = name.filter(|name| objects.kind(*name) == Some(Kind::Str));
                let name = name.and_then(|name| objects.text(name));
                names.push(name.unwrap_or_else(|| format!("Task at {task:#x}")));
            }
        }
        names
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
