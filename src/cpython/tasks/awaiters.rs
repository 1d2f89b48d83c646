//! Which task awaits which. CPython 3.14 and later record it in the awaited task. Before, it follows from the callbacks
//! of the awaited task: they refer to the task that awaits it, or to a future which that task awaits (`gather`, `wait`,
//! `wait_for`, `shield`), or to the task group that the task belongs to.

use rustc_hash::FxHashMap;

use super::objects::{Kind, Objects};

/// Maximum number of tasks that await one task.
const MAX_AWAITERS: usize = 1024;
/// Maximum number of objects that a callback is followed through.
const MAX_STEPS: u32 = 4;

/// Tasks by their address, and by the future that they await.
pub struct Index {
    pub by_address: FxHashMap<u64, usize>,
    pub by_waiter: FxHashMap<u64, Vec<usize>>,
}

impl Objects<'_> {
    /// The tasks that await a task.
    pub fn awaiters(&self, task: u64, is_c: bool, index: &Index) -> Vec<usize> {
        let mut found = Vec::new();
        match self.tasks.lists {
            Some(lists) if is_c => {
                let (at, is_set) = lists.awaited_by;
                let awaiters = match (self.pointer(task, at), self.byte(task, is_set)) {
                    (Some(one), Some(0)) => vec![one],
                    (Some(set), Some(_)) => self.set(set, MAX_AWAITERS).unwrap_or_default(),
                    _ => Vec::new(),
                };
                found.extend(awaiters.iter().filter_map(|a| index.by_address.get(a)));
            }
            _ => {
                for callback in self.callbacks(task, is_c) {
                    self.follow(callback, index, MAX_STEPS, &mut found);
                }
            }
        }
        found.sort_unstable();
        found.dedup();
        found.truncate(MAX_AWAITERS);
        found
    }

    /// The callbacks of a task or other future.
    fn callbacks(&self, future: u64, is_c: bool) -> Vec<u64> {
        let (first, list) = if is_c {
            let at = self.tasks.callback;
            (self.pointer(future, at), self.pointer(future, at + 16))
        } else {
            (None, self.attribute(future, "_callbacks"))
        };
        let pairs = list.and_then(|list| self.list(list)).unwrap_or_default();
        let more = pairs.into_iter().filter_map(|pair| self.tuple(pair)?.first().copied());
        first.into_iter().chain(more).collect()
    }

    /// Adds the tasks that a callback leads to.
    fn follow(&self, object: u64, index: &Index, steps: u32, found: &mut Vec<usize>) {
        if let Some(task) = index.by_address.get(&object) {
            return found.push(*task);
        }
        if let Some(tasks) = index.by_waiter.get(&object) {
            return found.extend(tasks);
        }
        if steps == 0 || found.len() >= MAX_AWAITERS {
            return;
        }
        let mut next = |object: Option<u64>| {
            if let Some(object) = object {
                self.follow(object, index, steps - 1, found);
            }
        };
        match self.kind(object) {
            Some(Kind::Wakeup) => next(self.first(object)),
            Some(Kind::BuiltinMethod | Kind::Method) => next(self.second(object)),
            Some(Kind::Partial) => {
                next(self.first(object));
                for argument in self.second(object).and_then(|a| self.tuple(a)).unwrap_or_default() {
                    next(Some(argument));
                }
            }
            Some(Kind::Function) => {
                for content in self.closure(object) {
                    next(Some(content));
                }
            }
            // The future that `gather` or `shield` returned to a task that awaits it inside of another one.
            Some(Kind::Future) => {
                for callback in self.callbacks(object, true) {
                    next(Some(callback));
                }
            }
            // asyncio.TaskGroup
            Some(Kind::Other) if self.type_of(object).is_some_and(|t| t.name == "TaskGroup") => {
                next(self.attribute(object, "_parent_task"));
            }
            _ => {}
        }
    }
}
