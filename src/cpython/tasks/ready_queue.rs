//! Event loops, and how many callbacks each has begun: read from the queue of callbacks that are ready.

use rustc_hash::FxHashSet;

use super::objects::Objects;
use super::{NoTasks, TaskReader};
use crate::bytes::u64_at;
use crate::cpython::thread_states;
use crate::process::memory::Memory;

/// Maximum number of event loops of a process.
const MAX_LOOPS: usize = 64;
const QUEUE: &str = "collections.deque";

impl TaskReader {
    /// avmas of the event loops that have tasks.
    ///
    /// # Errors
    /// `NoAsyncio`: not, or not yet.
    pub fn event_loops(&mut self, memory: &dyn Memory) -> Result<Vec<u64>, NoTasks> {
        let states = thread_states::states(memory, &self.interpreter);
        self.find_registries(memory, &states)?;
        let objects = self.objects(memory);
        let found = self.find(&objects, &states);
        let mut loops = FxHashSet::default();
        for task in found.tasks {
            let event_loop = objects.event_loop(task);
            if loops.len() < MAX_LOOPS {
                loops.extend(event_loop);
            }
        }
        Ok(loops.into_iter().collect())
    }

    /// avma of the queue of an event loop's callbacks that are ready.
    pub fn ready_queue(&self, memory: &dyn Memory, event_loop: u64) -> Option<u64> {
        let objects = self.objects(memory);
        let is_queue = |at: &u64| objects.type_of(*at).is_some_and(|t| t.name == QUEUE);
        let own = objects.attribute(event_loop, "_ready").filter(is_queue);
        // uvloop has it in a field.
        own.or_else(|| objects.field(event_loop, &is_queue))
    }

    /// The number of callbacks that were taken from a queue, up to a constant. The queue counts what is added and what is
    /// removed together (`dequeobject.state`, Modules/_collectionsmodule.c, v3.7 to v3.15), and its length is the difference.
    pub fn callbacks_begun(&self, memory: &dyn Memory, queue: u64) -> Option<u64> {
        let mut raw = [0; 48];
        let at = queue.checked_add(self.layout.head.into())?;
        memory.read(at, &mut raw).then_some(())?;
        let (length, changes) = (u64_at(&raw, 0)?, u64_at(&raw, 40)?);
        Some(changes.wrapping_sub(length) / 2)
    }
}

impl Objects<'_> {
    /// The first word in an object, after its header, for which `is` is true.
    pub(super) fn field(&self, object: u64, is: &dyn Fn(&u64) -> bool) -> Option<u64> {
        let size = self.size_of(object)?;
        let offsets = (self.tasks.head..size).step_by(8);
        offsets.filter_map(|at| self.pointer(object, at)).find(is)
    }
}
