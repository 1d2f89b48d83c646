//! Where an interpreter keeps its tasks: asyncio's own sets, and the lists of the C implementation.

use rustc_hash::FxHashSet;

use super::Gap;
use super::layout::TaskLists;
use super::objects::{Kind, Objects};
use crate::cpython::thread_states::PyThreadState;

/// Maximum number of tasks read of a process.
pub const MAX_TASKS: usize = 100_000;

/// The objects of module `asyncio.tasks` that hold an interpreter's tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskRegistries {
    /// Weak references to tasks that were scheduled (`_all_tasks`, `_scheduled_tasks`); from 3.14 on only those of
    /// other implementations than `_asyncio`.
    scheduled: Option<u64>,
    /// Tasks in their eager first step (3.12 and later).
    eager: Option<u64>,
    /// Event loop -> task that runs (before 3.14, and tasks of other implementations).
    pub current: Option<u64>,
}

/// The registries of an interpreter. `None`: asyncio is not loaded, or not completely.
pub fn registries(objects: &Objects<'_>, interpreter: u64) -> Option<TaskRegistries> {
    let at = interpreter.checked_add(objects.layout.interp_modules.into())?;
    let modules = objects.memory.u64(at)?;
    let namespace_of = |name: &str| objects.first(objects.item(modules, name)?);
    // The package defines this last. Until then, `asyncio.tasks` may have objects that those of `_asyncio` replace.
    objects.item(namespace_of("asyncio")?, "__all__")?;
    let namespace = namespace_of("asyncio.tasks")?;
    let weak = |name: &str| {
        let set = objects.item(namespace, name)?;
        objects.attribute(set, "data")
    };
    Some(TaskRegistries {
        scheduled: weak("_scheduled_tasks").or_else(|| weak("_all_tasks")),
        eager: objects.item(namespace, "_eager_tasks"),
        current: objects.item(namespace, "_current_tasks"),
    })
}

/// Addresses of tasks, each once.
#[derive(Default)]
pub struct FoundTasks {
    pub tasks: Vec<u64>,
    /// Those that run now.
    pub running: Vec<u64>,
    seen: FxHashSet<u64>,
    pub gaps: Vec<Gap>,
}

impl FoundTasks {
    fn add(&mut self, task: u64) {
        if self.tasks.len() < MAX_TASKS {
            if self.seen.insert(task) {
                self.tasks.push(task);
            }
        } else if !self.seen.contains(&task) {
            self.gap(Gap::TooMany);
        }
    }

    pub fn gap(&mut self, gap: Gap) {
        if !self.gaps.contains(&gap) {
            self.gaps.push(gap);
        }
    }

    /// Adds the tasks of an interpreter.
    pub fn read_registries(&mut self, objects: &Objects<'_>, registries: &TaskRegistries) {
        let set = |at: Option<u64>| at.map(|at| objects.set(at, MAX_TASKS));
        match set(registries.scheduled) {
            Some(Some(mut references)) => {
                // By address, they and their tasks are next to each other.
                references.sort_unstable();
                for task in references.into_iter().filter_map(|r| objects.first(r)) {
                    // The reference to an object that is being destroyed refers to None.
                    if objects.type_of(task).is_some_and(|t| t.name != "NoneType") {
                        self.add(task);
                    }
                }
            }
            Some(None) => self.gap(Gap::Unreadable),
            None => {}
        }
        for task in set(registries.eager).flatten().unwrap_or_default() {
            self.add(task);
        }
        self.read_running(objects, registries);
        for at in 0..self.running.len() {
            self.add(self.running[at]);
        }
    }

    /// Adds the tasks that run to `running` only.
    pub fn read_running(&mut self, objects: &Objects<'_>, registries: &TaskRegistries) {
        let current = registries.current.and_then(|at| objects.dict(at));
        self.running
            .extend(current.unwrap_or_default().into_iter().map(|(_, task)| task));
    }

    /// Adds the tasks in the lists of the interpreters and threads (3.14 and later).
    pub fn read_lists(&mut self, objects: &Objects<'_>, lists: &TaskLists, states: &[PyThreadState]) {
        let mut interpreters = FxHashSet::default();
        for state in states {
            if interpreters.insert(state.interpreter) {
                let head = state.interpreter.checked_add(lists.interpreter_head.into());
                self.read_list(objects, lists, head);
            }
            self.read_list(objects, lists, state.state.checked_add(lists.thread_head.into()));
            if let Some(task) = objects.pointer(state.state, lists.thread_running) {
                self.add(task);
                self.running.push(task);
            }
        }
    }

    /// Follows one circular list. The target changes it meanwhile: what is not a task ends it.
    fn read_list(&mut self, objects: &Objects<'_>, lists: &TaskLists, head: Option<u64>) {
        let Some(head) = head else { return };
        let mut node = match objects.memory.u64(head) {
            Some(0) => return, // not initialized
            Some(first) => first,
            None => return self.gap(Gap::Unreadable),
        };
        let mut seen = FxHashSet::default();
        while node != head {
            let task = node.checked_sub(lists.node.into());
            let Some(task) = task.filter(|task| objects.kind(*task) == Some(Kind::Task)) else {
                return self.gap(Gap::Changed);
            };
            if !seen.insert(node) || seen.len() > MAX_TASKS {
                return self.gap(if seen.len() > MAX_TASKS {
                    Gap::TooMany
                } else {
                    Gap::Changed
                });
            }
            self.add(task);
            match objects.memory.u64(node) {
                Some(next) => node = next,
                None => return self.gap(Gap::Unreadable),
            }
        }
    }
}
