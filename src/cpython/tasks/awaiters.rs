//! Which task awaits which. CPython 3.14 and later record it in the awaited task. Before, it follows from the callbacks
//! of the awaited task: they refer to the task that awaits it, or to a future which that task awaits (`gather`, `wait`,
//! `wait_for`, `shield`), or to the task group that the task belongs to.

use super::objects::{Kind, Objects};

/// Maximum number of tasks that await one task.
const MAX_AWAITERS: usize = 1024;
/// Maximum number of objects that a callback is followed through.
const MAX_STEPS: u32 = 4;

/// The tasks that are known to await a future, by the future's address.
pub type Waiters<'a> = dyn Fn(u64) -> Vec<u64> + 'a;

impl Objects<'_> {
    /// Addresses of the tasks that await a task. `waiters` may be incomplete.
    pub fn awaiters(&self, task: u64, is_c: bool, waiters: &Waiters<'_>) -> Vec<u64> {
        let mut found = Vec::new();
        match self.tasks.lists {
            Some(lists) if is_c => {
                let (at, is_set) = lists.awaited_by;
                match (self.pointer(task, at), self.byte(task, is_set)) {
                    (Some(one), Some(0)) => found.push(one),
                    (Some(set), Some(_)) => found = self.set(set, MAX_AWAITERS).unwrap_or_default(),
                    _ => {}
                }
            }
            _ => {
                for callback in self.callbacks(task, is_c) {
                    self.follow(callback, waiters, MAX_STEPS, &mut found);
                }
            }
        }
        found.retain(|by| *by != task);
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

    /// Adds the tasks that a callback, or a future that it refers to, leads to.
    fn follow(&self, object: u64, waiters: &Waiters<'_>, steps: u32, found: &mut Vec<u64>) {
        if steps == 0 || found.len() >= MAX_AWAITERS {
            return;
        }
        match self.kind(object) {
            Some(Kind::Wakeup) => found.extend(self.first(object)),
            Some(Kind::BuiltinMethod) if self.is_wakeup(object) => found.extend(self.second(object)),
            Some(Kind::Method) => {
                let Some(of) = self.second(object) else { return };
                match self.type_of(of) {
                    Some(t) if t.name == "TaskGroup" => found.extend(self.attribute(of, "_parent_task")),
                    // `_PyTask.__wakeup`
                    Some(t) if t.kind == Kind::Other && self.function_name(object).as_deref() == Some("__wakeup") => {
                        found.push(of);
                    }
                    _ => {}
                }
            }
            Some(Kind::Partial) => {
                for argument in self.second(object).and_then(|a| self.tuple(a)).unwrap_or_default() {
                    self.follow_future(argument, waiters, steps, found);
                }
            }
            Some(Kind::Function) => {
                for content in self.closure(object) {
                    self.follow_future(content, waiters, steps, found);
                    found.extend(self.host_task(content));
                }
            }
            _ => {}
        }
    }

    /// Adds the tasks that await a future, if it is one.
    fn follow_future(&self, object: u64, waiters: &Waiters<'_>, steps: u32, found: &mut Vec<u64>) {
        if !self.is_future(object) {
            return;
        }
        found.extend(waiters(object));
        for callback in self.callbacks(object, self.kind(object) == Some(Kind::Future)) {
            self.follow(callback, waiters, steps - 1, found);
        }
    }

    /// Whether an object is a future, and no task; perhaps one that is implemented in Python.
    pub fn is_future(&self, object: u64) -> bool {
        match self.kind(object) {
            Some(Kind::Future) => true,
            Some(Kind::Other) => {
                let has = |name| self.attribute(object, name).is_some();
                has("_callbacks") && has("_loop") && !has("_coro")
            }
            _ => false,
        }
    }

    /// Whether a task or other future is not done.
    pub fn is_pending(&self, future: u64) -> bool {
        if matches!(self.kind(future), Some(Kind::Task | Kind::Future)) {
            return self.byte(future, self.tasks.state) == Some(0);
        }
        // Until it is done, only the class has one.
        let is_pending = |state| self.text(state).as_deref() == Some("PENDING");
        self.attribute(future, "_state").is_none_or(is_pending)
    }

    /// avma of the event loop of a task.
    pub fn event_loop(&self, task: u64) -> Option<u64> {
        match self.kind(task)? {
            Kind::Task => self.pointer(task, self.tasks.head),
            _ => self.attribute(task, "_loop"),
        }
    }

    /// The task that waits for a task group of anyio, whose callbacks have the group in their closure (`TaskGroup._spawn`,
    /// anyio/_backends/_asyncio.py, 3.0 to 4.16).
    fn host_task(&self, object: u64) -> Option<u64> {
        (self.type_of(object)?.name == "TaskGroup").then_some(())?;
        let scope = self.attribute(object, "cancel_scope")?;
        // Later ones have slots.
        let host = self.member(scope, "_host_task");
        let host = host.or_else(|| self.attribute(scope, "_host_task"))?;
        (self.kind(host) == Some(Kind::Task)).then_some(host)
    }

    /// Whether a built-in method is `task_wakeup` (`ml_name` of its definition).
    fn is_wakeup(&self, method: u64) -> bool {
        const NAME: &[u8] = b"task_wakeup\0";
        let mut raw = [0; NAME.len()];
        let name = self.first(method).and_then(|definition| self.word(definition, 0));
        name.is_some_and(|name| self.memory.read(name, &mut raw)) && raw == NAME
    }
}
