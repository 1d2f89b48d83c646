//! Tasks of asyncio, read from outside while the target runs: their names, what they await, which tasks await them, and
//! the frames of their coroutines.
//!
//! Nothing read is trusted: types are checked by name before their fields are used, and every list, set and chain is
//! bounded. What changes while it is read gives a partial result that says so ([`Gap`]).

use std::cell::RefCell;
use std::rc::Rc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::Runtime;
use super::code_object::{CodeTable, fingerprint_of};
use super::object_layout::ObjectLayout;
use super::strings;
use super::thread_states::{self, PyThreadState};
use crate::cpython_layout::{Interpreter, Layout};
use crate::event::Pid;
use crate::frame::CodeId;
use crate::process::memory::Memory;
use crate::truncation::Truncation;

mod awaiters;
mod chain;
mod greenlet_search;
mod greenlet_stack;
mod greenlets;
pub(super) mod layout;
mod lookup;
mod objects;
mod ready_queue;
mod registry;
mod suspended;
mod trio;

pub use chain::{AwaitChain, RawAwaitFrame};
pub use greenlet_search::GreenletSearch;
pub use greenlets::{
    Greenlet, GreenletState, ListedGreenlet, SuspendedGreenlet, is_greenlet_entry, is_greenlet_scheduler, is_hub_wait,
};
pub use layout::{DEBUG_SECTION, TaskLayout};
pub use lookup::{CopiedName, TaskChain, TaskFacts};
pub use registry::{MAX_TASKS, TaskRegistries};
pub use suspended::{Awaited, SuspendedTask};
pub use trio::{SuspendedTrioTask, TrioFunction, TrioOffsets, TrioScheduler, TrioTask, is_trio_core, trio_function};

use objects::{Kind, Objects, Types};
use registry::FoundTasks;
use suspended::Active;

/// Why tasks may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gap {
    /// More than [`MAX_TASKS`].
    TooMany,
    /// More memory than is searched for greenlets.
    TooLarge,
    /// A list of tasks changed while it was read.
    Changed,
    /// Memory that holds tasks could not be read.
    Unreadable,
}

impl Gap {
    pub fn reason(self) -> &'static str {
        match self {
            Gap::TooMany => "there are more than 100,000 tasks",
            Gap::TooLarge => "the process has more memory than is searched for greenlets",
            Gap::Changed => "a list of tasks changed while it was read",
            Gap::Unreadable => "memory could not be read",
        }
    }
}

/// Why no tasks can be read at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoTasks {
    /// Offsets of tasks in this version are not known.
    UnknownVersion,
    /// The process has not imported asyncio.
    NoAsyncio,
}

/// A task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// avma of the object.
    pub address: u64,
    pub name: String,
    /// avma of the loop that runs it.
    pub event_loop: u64,
    /// avma of the coroutine, and of its frame.
    pub coroutine: u64,
    pub chain: AwaitChain,
    /// Name of the type of what the innermost coroutine awaits; a future's type for `sleep`, locks and the like.
    pub awaited: Option<String>,
    /// Of the thread that runs it now: its `pthread_self`, and its frames from the innermost one to the task's
    /// coroutine.
    pub running: Option<(u64, Vec<RawAwaitFrame>)>,
    /// The tasks that await it: indices into the list of tasks.
    pub awaited_by: Vec<usize>,
}

/// The tasks of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskList {
    pub tasks: Vec<Task>,
    pub gaps: Vec<Gap>,
}

/// The qualified name of a coroutine's frame, as the coroutine has it: code objects have none before 3.11.
pub fn frame_name(memory: &dyn Memory, layout: &Layout, frame: &RawAwaitFrame) -> Option<String> {
    (frame.name != 0).then_some(())?;
    strings::read_str(memory, layout, frame.name)
}

/// The code object of a coroutine's frame, read now if it is new.
///
/// # Errors
/// As [`CodeTable::observe`].
pub fn code_of(
    codes: &mut CodeTable,
    pid: Pid,
    memory: &dyn Memory,
    layout: &Layout,
    frame: &RawAwaitFrame,
) -> Result<CodeId, Truncation> {
    let print = fingerprint_of(memory, layout, frame.code).unwrap_or(0);
    codes.observe(pid, memory, layout, frame.code, print)
}

/// Reads what of one process are tasks, but not those of asyncio: greenlets, tasks of trio.
pub struct OtherTasks {
    layout: Layout,
    offsets: ObjectLayout,
    tasks: TaskLayout,
    types: Rc<RefCell<Types>>,
}

impl OtherTasks {
    /// `None` for a version whose offsets are not known.
    pub fn new(runtime: &Runtime, interpreter: &Interpreter) -> Option<OtherTasks> {
        Some(OtherTasks {
            layout: interpreter.layout,
            offsets: ObjectLayout::of(runtime, &interpreter.layout)?,
            tasks: TaskLayout::of(runtime, &interpreter.layout, None)?,
            types: Rc::default(),
        })
    }

    fn objects<'a>(&'a self, memory: &'a dyn Memory) -> Objects<'a> {
        Objects::new(memory, &self.layout, &self.offsets, &self.tasks, self.types.clone())
    }
}

/// Reads the tasks of one process, again and again.
pub struct TaskReader {
    interpreter: Interpreter,
    objects: ObjectLayout,
    layout: TaskLayout,
    /// By interpreter.
    registries: FxHashMap<u64, TaskRegistries>,
    types: Rc<RefCell<Types>>,
    /// By address, the tasks that did not run when all were read the last time.
    suspended: FxHashMap<u64, Rc<SuspendedTask>>,
    /// Those that have changed lately.
    active: FxHashMap<u64, Active>,
}

impl TaskReader {
    /// `published`: the section [`DEBUG_SECTION`] of the file with the `_asyncio` module.
    ///
    /// # Errors
    /// `UnknownVersion`; `NoAsyncio` where only a loaded `_asyncio` can say where its tasks are.
    pub fn new(runtime: &Runtime, interpreter: &Interpreter, published: Option<&[u8]>) -> Result<TaskReader, NoTasks> {
        let must_be_published = match runtime.facts {
            Some(facts) => facts.publishes_tasks,
            None => runtime.newer_than_known,
        };
        if published.is_none() && must_be_published {
            return Err(NoTasks::NoAsyncio);
        }
        let layout = TaskLayout::of(runtime, &interpreter.layout, published).ok_or(NoTasks::UnknownVersion)?;
        Ok(TaskReader {
            interpreter: *interpreter,
            objects: ObjectLayout::of(runtime, &interpreter.layout).ok_or(NoTasks::UnknownVersion)?,
            layout,
            registries: FxHashMap::default(),
            types: Rc::default(),
            suspended: FxHashMap::default(),
            active: FxHashMap::default(),
        })
    }

    /// All tasks that are not done.
    ///
    /// # Errors
    /// `NoAsyncio`.
    pub fn read(&mut self, memory: &dyn Memory) -> Result<TaskList, NoTasks> {
        let states = thread_states::states(memory, &self.interpreter);
        self.find_registries(memory, &states)?;
        let objects = self.objects(memory);
        let found = self.find(&objects, &states);
        Ok(self.describe(&objects, &states, found))
    }

    /// Finds where the interpreters keep their tasks, unless that is known.
    fn find_registries(&mut self, memory: &dyn Memory, states: &[PyThreadState]) -> Result<(), NoTasks> {
        let types = self.types.clone();
        let objects = Objects::new(memory, &self.interpreter.layout, &self.objects, &self.layout, types);
        let interpreters: FxHashSet<u64> = states.iter().map(|s| s.interpreter).collect();
        for interpreter in interpreters {
            if !self.registries.contains_key(&interpreter)
                && let Some(registries) = registry::registries(&objects, interpreter)
            {
                self.registries.insert(interpreter, registries);
            }
        }
        if self.registries.is_empty() {
            return Err(NoTasks::NoAsyncio);
        }
        Ok(())
    }

    fn find(&self, objects: &Objects<'_>, states: &[PyThreadState]) -> FoundTasks {
        let mut found = FoundTasks::default();
        for registries in self.registries.values() {
            found.read_registries(objects, registries);
        }
        if let Some(lists) = &self.layout.lists {
            found.read_lists(objects, lists, states);
        }
        found
    }

    fn describe(&self, objects: &Objects<'_>, states: &[PyThreadState], found: FoundTasks) -> TaskList {
        let mut list = TaskList::default();
        let mut waiters = Vec::new();
        let mut kinds = Vec::new();
        for address in &found.tasks {
            let is_c = objects.kind(*address) == Some(Kind::Task);
            let Some((task, waiter)) = self.task(objects, *address, is_c) else {
                continue; // done, or not a task
            };
            waiters.push(waiter);
            kinds.push(is_c);
            list.tasks.push(task);
        }
        let mut by_address: FxHashMap<u64, usize> = FxHashMap::default();
        let mut by_waiter: FxHashMap<u64, Vec<u64>> = FxHashMap::default();
        for (i, (task, waiter)) in list.tasks.iter().zip(waiters).enumerate() {
            by_address.insert(task.address, i);
            if let Some(waiter) = waiter {
                by_waiter.entry(waiter).or_default().push(task.address);
            }
        }
        let waiters = |future: u64| by_waiter.get(&future).cloned().unwrap_or_default();
        let running: FxHashSet<u64> = found.running.iter().copied().collect();
        for (i, task) in list.tasks.iter_mut().enumerate() {
            let by = objects.awaiters(task.address, kinds[i], &waiters);
            task.awaited_by = by.iter().filter_map(|by| by_address.get(by).copied()).collect();
            if running.contains(&task.address) || task.chain.is_running {
                task.running = objects.coroutine_frame(task.coroutine).and_then(|end| {
                    let frames = |s: &PyThreadState| Some((s.thread, objects.frames_down_to(s.state, end)?));
                    states.iter().find_map(frames)
                });
            }
        }
        list.gaps = found.gaps;
        list
    }

    /// A task without its relations, and the future that it awaits. `None` if it is done, or not a task.
    fn task(&self, objects: &Objects<'_>, address: u64, is_c: bool) -> Option<(Task, Option<u64>)> {
        let l = &self.layout;
        let head = l.head;
        let (coroutine, waiter, name, event_loop) = if is_c {
            // PENDING; a running task is pending, too.
            let state = objects.memory.u32(address.checked_add(l.state.into())?)?;
            (state == 0).then_some(())?;
            let name = l.name.and_then(|at| objects.pointer(address, at));
            (
                objects.pointer(address, l.coro)?,
                objects.pointer(address, l.waiter),
                name,
                objects.word(address, head)?,
            )
        } else {
            objects.is_pending(address).then_some(())?;
            (
                objects.attribute(address, "_coro")?,
                objects.attribute(address, "_fut_waiter"),
                objects.attribute(address, "_name"),
                objects.attribute(address, "_loop")?,
            )
        };
        let chain = objects.await_chain(coroutine);
        let awaited = chain.awaited.and_then(|at| Some(objects.type_of(at)?.name.clone()));
        let task = Task {
            address,
            name: self.name(objects, address, coroutine, name),
            event_loop,
            coroutine,
            chain,
            awaited,
            running: None,
            awaited_by: Vec::new(),
        };
        Some((task, waiter))
    }

    /// A task's name; for tasks without one (3.7) that of its coroutine.
    fn name(&self, objects: &Objects<'_>, address: u64, coroutine: u64, name: Option<u64>) -> String {
        let own = name.and_then(|at| match objects.kind(at)? {
            Kind::Int => Some(format!("Task-{}", objects.int(at)?)),
            Kind::Str => objects.text(at),
            _ => None,
        });
        let of_coroutine = || match objects.kind(coroutine)? {
            Kind::Coroutine | Kind::Generator => objects.text(objects.word(coroutine, self.layout.coroutine_name)?),
            _ => None,
        };
        own.or_else(of_coroutine)
            .unwrap_or_else(|| format!("Task-{address:#x}"))
    }
}

#[cfg(test)]
mod tests;
