//! All tasks that do not run, read again and again while the target runs: what each of them awaits.

use std::collections::BTreeMap;
use std::rc::Rc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::chain::RawAwaitFrame;
use super::lookup::TaskChain;
use super::objects::{Kind, Objects};
use super::{NoTasks, TaskReader};
use crate::cpython::thread_states;
use crate::process::memory::Memory;
use crate::process::snapshot::Snapshot;

/// Maximum number of frames read of all tasks together: some 100,000 tasks as they are, or fewer of a strange program.
const MAX_FRAMES: usize = 1 << 19;

/// Readings for which a task that has changed counts as active.
const ACTIVE_READINGS: u8 = 64;
/// Maximum number of active tasks: reading them takes longer.
const MAX_ACTIVE: usize = 64;
/// Attempts to read an active task while it does not change.
const TRIES: usize = 6;

/// Readings for which a piece of memory that an active task needed is read again.
const PIECE_READINGS: u8 = 32;
/// Maximum number of such pieces of one task.
const MAX_PIECES: usize = 512;

/// A task that has changed lately.
#[derive(Default)]
pub(super) struct Active {
    /// Readings for which it counts as active.
    remaining: u8,
    /// The pieces of memory that the last readings needed, in all states that the task had: for how many readings each of them
    /// is still read.
    pieces: BTreeMap<u64, u8>,
}

impl Active {
    /// A reading begins.
    fn age(&mut self) {
        self.pieces.retain(|_, remaining| {
            *remaining -= 1;
            *remaining > 0
        });
    }

    fn needs(&mut self, pieces: &[u64]) {
        for at in pieces {
            if self.pieces.len() < MAX_PIECES || self.pieces.contains_key(at) {
                self.pieces.insert(*at, PIECE_READINGS);
            }
        }
    }
}

/// Two snapshots, one after the other, of what is needed of all active tasks.
struct Together<'a>(Snapshot<'a>, Snapshot<'a>);

impl<'a> Together<'a> {
    fn read(live: &'a dyn Memory, active: &FxHashMap<u64, Active>) -> Together<'a> {
        let mut pieces: Vec<u64> = active
            .values()
            .flat_map(|active| active.pieces.keys())
            .copied()
            .collect();
        pieces.sort_unstable();
        pieces.dedup();
        Together(Snapshot::new(live, &pieces), Snapshot::new(live, &pieces))
    }
}

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
    /// All tasks that do not run. One that is as it was the last time is the same object. `memory` caches `live`.
    ///
    /// What is cached was read at different times. That does not matter for tasks that rarely change; active ones are read from
    /// `live` until two readings agree, else their stacks would often be of two different moments. Which tasks are active does
    /// not depend on what they do at this reading: those that run would count too seldom.
    ///
    /// # Errors
    /// `NoAsyncio`: not, or not yet.
    pub fn suspended(&mut self, live: &dyn Memory, memory: &dyn Memory) -> Result<Vec<Rc<SuspendedTask>>, NoTasks> {
        let states = thread_states::states(memory, &self.interpreter);
        self.find_registries(memory, &states)?;
        let mut known = std::mem::take(&mut self.suspended);
        let mut active = std::mem::take(&mut self.active);
        let objects = self.objects(memory);
        let mut found = self.find(&objects, &states);
        // What belongs to tasks that were created one after the other is next to each other.
        found.tasks.sort_unstable();
        let together = Together::read(live, &active);
        let running: FxHashSet<u64> = found.running.iter().copied().collect();
        let (mut left, mut tasks, mut still_active) = (MAX_FRAMES, Vec::new(), FxHashMap::default());
        for address in found.tasks {
            let before = known.remove(&address);
            let mut was_active = active.remove(&address);
            let task = match &mut was_active {
                Some(active) => self.active_task(&objects, (live, &together), (address, before.as_ref()), active),
                None if running.contains(&address) => None,
                None => self.suspended_task(&objects, address, before.as_ref()),
            };
            let is_same = |before| task.as_ref().is_some_and(|task| Rc::ptr_eq(task, before));
            let mut now_active = was_active.unwrap_or_default();
            now_active.remaining = match &before {
                Some(before) if !is_same(before) => ACTIVE_READINGS,
                _ => now_active.remaining.saturating_sub(1),
            };
            if now_active.remaining > 0 && still_active.len() < MAX_ACTIVE {
                still_active.insert(address, now_active);
            }
            if let Some(task) = task {
                left = left.saturating_sub(1 + task.frames.len());
                if left == 0 {
                    break;
                }
                tasks.push(task);
            }
        }
        self.active = still_active;
        self.suspended = tasks.iter().map(|task| (task.address(), task.clone())).collect();
        Ok(tasks)
    }

    /// Reads a task that changes often: twice together with others, then for itself until it does not change meanwhile.
    /// `None`: as [`TaskReader::suspended_task`].
    ///
    /// The first two readings nearly always decide, because they have what the task needs in each of its states. If one state
    /// were read again more often than another (a suspended task needs more pieces than one that runs), those that it is followed
    /// by would be seen too often.
    fn active_task(
        &self,
        objects: &Objects<'_>,
        (live, together): (&dyn Memory, &Together<'_>),
        (address, known): (u64, Option<&Rc<SuspendedTask>>),
        active: &mut Active,
    ) -> Option<Rc<SuspendedTask>> {
        active.age();
        let read = |memory: &Snapshot<'_>, active: &mut Active| {
            let task = self.suspended_task(&objects.with_memory(memory), address, known);
            let used = memory.take_used();
            active.needs(&used.starts);
            (task, used.together)
        };
        let (first, _) = read(&together.0, active);
        let (mut last, is_of_one_time) = read(&together.1, active);
        // Where it needs what was not needed before, both have parts of a later time, when the task may have gone on.
        let mut is_steady = first == last && is_of_one_time;
        for _ in 1..TRIES {
            if is_steady {
                break;
            }
            let pieces: Vec<u64> = active.pieces.keys().copied().collect();
            let (task, is_of_one_time) = read(&Snapshot::new(live, &pieces), active);
            is_steady = task == last && is_of_one_time;
            last = task;
        }
        last
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
        if let Some(thread) = objects.attribute(event_loop, "_thread_id") {
            return objects.int(thread);
        }
        // uvloop has it in a field (`Loop._thread_id`, uvloop/loop.pxd, 0.11 to 0.23), which is 0 while the loop does not run.
        let states = thread_states::states(memory, &self.interpreter);
        let is_thread = |word: &u64| states.iter().any(|state| state.thread == *word);
        objects.field(event_loop, &is_thread)
    }

    /// avma of the event loop of a task.
    pub fn event_loop(&self, memory: &dyn Memory, task: u64) -> Option<u64> {
        self.objects(memory).event_loop(task)
    }

    /// `None`: it runs, is done, or is not a task.
    fn suspended_task(
        &self,
        objects: &Objects<'_>,
        address: u64,
        known: Option<&Rc<SuspendedTask>>,
    ) -> Option<Rc<SuspendedTask>> {
        let l = &self.layout;
        let (coroutine, waiter) = match objects.kind(address)? {
            Kind::Task => (objects.pointer(address, l.coro)?, objects.pointer(address, l.waiter)),
            // It is implemented in Python.
            _ => (
                objects.attribute(address, "_coro")?,
                objects.attribute(address, "_fut_waiter"),
            ),
        };
        objects.is_pending(address).then_some(())?;
        let mut chain = objects.await_chain(coroutine);
        if chain.is_running {
            return None;
        }
        // What has not begun awaits nothing yet.
        if chain.is_new {
            chain.frames.pop();
        }
        let awaited = match waiter.and_then(|waiter| Some((waiter, objects.type_of(waiter)?))) {
            None => Awaited::Turn,
            Some((waiter, of)) => {
                let is_python_task = || of.kind == Kind::Other && objects.attribute(waiter, "_coro").is_some();
                let is_task = of.kind == Kind::Task || is_python_task();
                let is_future = objects.is_future(waiter);
                match (is_task, is_future) {
                    (true, _) | (_, true) if !objects.is_pending(waiter) => Awaited::Turn,
                    // An attribute of a task that awaits nothing is None.
                    _ if of.name == "NoneType" => Awaited::Turn,
                    (true, _) => Awaited::Task,
                    _ if of.name == "_GatheringFuture" => Awaited::Gather,
                    (_, true) => Awaited::Future,
                    _ => Awaited::Other,
                }
            }
        };
        let known = known.filter(|known| self.holds(objects, &known.chain));
        if let Some(known) = known
            && known.frames == chain.frames
            && known.awaited == awaited
        {
            return Some(known.clone());
        }
        Some(Rc::new(SuspendedTask {
            event_loop: objects.event_loop(address)?,
            chain: match known {
                Some(known) => known.chain.clone(),
                None => self.chain_of(objects, address)?,
            },
            frames: chain.frames,
            awaited,
        }))
    }
}

impl SuspendedTask {
    /// avma of the task.
    pub fn address(&self) -> u64 {
        self.chain.tasks.first().map_or(0, |(facts, _)| facts.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_all_states_are_read_for_some_readings() {
        let mut active = Active::default();
        active.needs(&[1, 2]);
        for _ in 1..PIECE_READINGS {
            active.age();
            active.needs(&[2, 3]);
        }
        let pieces = |active: &Active| active.pieces.keys().copied().collect::<Vec<u64>>();
        assert_eq!(pieces(&active), [1, 2, 3]);
        active.age();
        assert_eq!(pieces(&active), [2, 3]);
    }
}
