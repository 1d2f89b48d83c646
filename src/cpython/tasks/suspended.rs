//! All tasks that do not run, read again and again while the target runs: what each of them awaits.

use std::rc::Rc;

use rustc_hash::FxHashSet;

use super::chain::{AwaitChain, RawAwaitFrame};
use super::lookup::{TaskChain, TaskFacts};
use super::objects::{Kind, Objects};
use super::{NoTasks, TaskReader};
use crate::cpython::thread_states;
use crate::target::memory::Memory;

/// Maximum number of frames read of all tasks together: some 100,000 tasks as they are, or fewer of a strange program.
const MAX_FRAMES: usize = 1 << 19;

/// What a suspended task awaits, by the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// Nothing: it is ready, and its event loop has not come to it yet.
    Turn,
    Task,
    /// The future of `asyncio.gather`.
    Gather,
    Future,
    Other,
}

/// A task that does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SuspendedTask {
    /// avma of the loop that runs it.
    pub event_loop: u64,
    /// It, and those that await it.
    pub chain: TaskChain,
    /// Of its coroutine and of what that awaits, outermost first.
    pub frames: Vec<RawAwaitFrame>,
    pub awaited: Awaited,
}

impl TaskReader {
    /// All tasks that do not run. One that is as it was the last time is the same object.
    ///
    /// # Errors
    /// `NoAsyncio`: not, or not yet.
    pub fn suspended(&mut self, memory: &dyn Memory) -> Result<Vec<Rc<SuspendedTask>>, NoTasks> {
        let states = thread_states::states(memory, &self.interpreter);
        self.find_sources(memory, &states)?;
        let mut known = std::mem::take(&mut self.suspended);
        let objects = self.objects(memory);
        let mut found = self.find(&objects, &states);
        // What belongs to tasks that were created one after the other is next to each other.
        found.tasks.sort_unstable();
        let running: FxHashSet<u64> = found.running.iter().copied().collect();
        let waiting = found.tasks.iter().filter(|task| !running.contains(task));
        let read = waiting.filter_map(|task| self.suspended_task(&objects, *task, known.remove(task)));
        let mut left = MAX_FRAMES;
        let tasks: Vec<_> = read
            .take_while(|task| {
                left = left.saturating_sub(1 + task.frames.len());
                left > 0
            })
            .collect();
        self.suspended = tasks.iter().map(|task| (task.address(), task.clone())).collect();
        Ok(tasks)
    }

    /// `pthread_self` of the thread that runs an event loop, if that can be read.
    pub fn loop_thread(&self, memory: &dyn Memory, event_loop: u64) -> Option<u64> {
        let objects = self.objects(memory);
        if let Some(lists) = &self.layout.lists {
            let states = thread_states::states(memory, &self.interpreter);
            let runs = |state: u64| objects.pointer(state, lists.running_loop) == Some(event_loop);
            return Some(states.iter().find(|s| runs(s.state))?.thread);
        }
        // `BaseEventLoop.run_forever` (Lib/asyncio/base_events.py) sets it.
        objects.int(objects.attribute(event_loop, "_thread_id")?)
    }

    /// avma of the event loop of a task of the C implementation.
    pub fn event_loop(&self, memory: &dyn Memory, task: u64) -> Option<u64> {
        self.objects(memory).pointer(task, self.layout.head)
    }

    /// `None`: it runs, is done, or is not a task.
    fn suspended_task(
        &self,
        objects: &Objects<'_>,
        address: u64,
        known: Option<Rc<SuspendedTask>>,
    ) -> Option<Rc<SuspendedTask>> {
        if objects.kind(address) != Some(Kind::Task) {
            return self.python_task(objects, address).map(Rc::new);
        }
        let l = &self.layout;
        let is_pending = |future: u64| objects.byte(future, l.state) == Some(0);
        is_pending(address).then_some(())?;
        let mut chain = objects.await_chain(objects.pointer(address, l.coro)?);
        if chain.is_running {
            return None;
        }
        // What has not begun awaits nothing yet.
        if chain.is_new {
            chain.frames.pop();
        }
        let awaited = match objects.pointer(address, l.waiter) {
            None => Awaited::Turn,
            Some(waiter) => match (objects.kind(waiter), objects.type_of(waiter)) {
                (Some(Kind::Task | Kind::Future), _) if !is_pending(waiter) => Awaited::Turn,
                (Some(Kind::Task), _) => Awaited::Task,
                (_, Some(of)) if of.name == "_GatheringFuture" => Awaited::Gather,
                (Some(Kind::Future), _) => Awaited::Future,
                _ => Awaited::Other,
            },
        };
        if let Some(known) = known
            && known.frames == chain.frames
            && known.awaited == awaited
            && self.holds(objects, &known.chain)
        {
            return Some(known);
        }
        Some(Rc::new(SuspendedTask {
            event_loop: objects.pointer(address, l.head)?,
            chain: self.chain_of(objects, address)?,
            frames: chain.frames,
            awaited,
        }))
    }

    /// A task that is implemented in Python.
    fn python_task(&self, objects: &Objects<'_>, address: u64) -> Option<SuspendedTask> {
        let (task, waiter) = self.task(objects, address, false)?;
        let AwaitChain { frames, is_running, .. } = task.chain;
        let facts = TaskFacts::of_python(address, task.coroutine);
        (!is_running).then_some(SuspendedTask {
            event_loop: task.event_loop,
            chain: TaskChain {
                tasks: vec![(facts, task.name)],
            },
            frames,
            awaited: match waiter {
                Some(_) => Awaited::Other,
                None => Awaited::Turn,
            },
        })
    }
}

impl SuspendedTask {
    /// avma of the task.
    pub fn address(&self) -> u64 {
        self.chain.tasks.first().map_or(0, |(facts, _)| facts.address)
    }
}
