//! Waits for futexes by the functions that wait: on locks and on condition variables, of what.

use super::FrameTable;
use super::variables::VariableText;
use crate::event::{ThreadState, WaitKind};
use crate::frame::RawFrame;
use crate::profile::model::{Frame, FrameId, FrameKind, Node, NodeId};

/// Functions that block on a lock, and on a condition variable, as names begin with them: of CPython, POSIX and the
/// C++ and Rust standard libraries.
const LOCKS: &[&str] = &[
    "PyThread_acquire_lock",
    "_PyMutex_Lock",
    "PyMutex_Lock",
    // what these are made of from 3.13 on, in files without other names (Python/parking_lot.c)
    "_PySemaphore_Wait",
    "_PyRWMutex_",
    "pthread_mutex_",
    "__pthread_mutex_",
    "___pthread_mutex_",
    "pthread_rwlock_",
    "__pthread_rwlock_",
    "___pthread_rwlock_",
    "__lll_lock_wait",
    "sem_wait",
    "sem_timedwait",
    "sem_clockwait",
    "__new_sem_wait",
    "___new_sem_wait",
    "__sem_timedwait",
    "___sem_timedwait",
    "std::sys::sync::mutex",
    "parking_lot::",
];
const CONDITIONS: &[&str] = &[
    "pthread_cond_",
    "__pthread_cond_",
    "___pthread_cond_",
    "std::condition_variable",
    "std::sys::sync::condvar",
];
/// Functions that say what a lock belongs to, as names begin with them. The outermost one on the stack counts.
const OWNERS: &[(&str, &str)] = &[
    ("lock_PyThread_acquire_lock", "threading.Lock"),
    ("lock_acquire", "threading.Lock"),
    ("rlock_acquire", "threading.RLock"),
    ("_queue_SimpleQueue_get", "queue.SimpleQueue"),
    ("ThreadHandle_join", THREAD_END),
    ("_PyMutex_Lock", "PyMutex"),
    ("PyMutex_Lock", "PyMutex"),
    ("_PyRWMutex_", "PyRWMutex"),
    // of free-threaded builds: locks of single objects, and pauses of all threads
    ("_PyCriticalSection", "critical section"),
    ("tstate_wait_attach", "stop-the-world"),
    ("stop_the_world", "stop-the-world"),
    ("_PyEval_StopTheWorld", "stop-the-world"),
    ("pthread_mutex_", "pthread_mutex"),
    ("__pthread_mutex_", "pthread_mutex"),
    ("___pthread_mutex_", "pthread_mutex"),
    ("pthread_rwlock_", "pthread_rwlock"),
    ("__pthread_rwlock_", "pthread_rwlock"),
    ("___pthread_rwlock_", "pthread_rwlock"),
    ("std::sys::sync::mutex", "std::sync::Mutex"),
];
/// The lock that a thread keeps until it ends.
const THREAD_END: &str = "Thread.join";
/// The Python function that waits for that in versions before 3.13.
const WAITS_FOR_THREAD: &str = "_wait_for_tstate_lock";
/// Native frames that are examined for the function that blocks.
const BLOCKING_FRAMES: usize = 16;
/// Python functions that call `Condition.wait`, by name and file, and what the condition belongs to.
const CONDITION_OWNERS: &[(&str, &str, &str)] = &[
    ("get", "/queue.py", "queue.Queue"),
    ("put", "/queue.py", "queue.Queue"),
    ("join", "/queue.py", "queue.Queue"),
    ("wait", THREADING, "threading.Event"),
    ("acquire", THREADING, "threading.Semaphore"),
    ("_wait", THREADING, "threading.Barrier"),
    ("_enter", THREADING, "threading.Barrier"),
    ("result", "/concurrent/futures/_base.py", "concurrent.futures.Future"),
    ("exception", "/concurrent/futures/_base.py", "concurrent.futures.Future"),
];
/// What it belongs to otherwise.
const CONDITION: &str = "threading.Condition";
const THREADING: &str = "/threading.py";
/// Frames above `Condition.wait` that are examined for its caller.
const CALLER_FRAMES: usize = 8;

/// The states that a wait on a futex may turn out to be, by the functions that wait.
pub struct FutexWaits {
    lock: FrameId,
    condition: FrameId,
    /// Locks and conditions by their owner.
    owned: Vec<(WaitKind, &'static str, FrameId)>,
    /// By the number of the futex.
    variables: Vec<VariableFrames>,
}

/// Waits for a variable, by what it turns out to be.
struct VariableFrames {
    lock: FrameId,
    condition: FrameId,
    futex: FrameId,
}

impl FutexWaits {
    /// `variables`: the texts of futexes by their number.
    pub fn new(frames: &mut FrameTable, variables: &[VariableText]) -> FutexWaits {
        let mut id = |kind: WaitKind, of: &str| {
            let kind = kind.label();
            let label = format!("[waiting: {kind}{}{of}]", if of.is_empty() { "" } else { " " });
            frames.id(Frame::new(FrameKind::State, label))
        };
        let locks = OWNERS.iter().map(|(_, owner)| (WaitKind::Lock, *owner));
        let conditions = CONDITION_OWNERS.iter().map(|(.., owner)| *owner).chain([CONDITION]);
        let mut owned: Vec<(WaitKind, &str, FrameId)> = Vec::new();
        for (kind, owner) in locks.chain(conditions.map(|owner| (WaitKind::Condition, owner))) {
            if owned.iter().all(|known| (known.0, known.1) != (kind, owner)) {
                owned.push((kind, owner, id(kind, owner)));
            }
        }
        let of_variable = |text: &VariableText| VariableFrames {
            lock: id(WaitKind::Lock, &text.lock),
            condition: id(WaitKind::Condition, &text.condition),
            futex: id(WaitKind::Futex, &text.lock),
        };
        FutexWaits {
            variables: variables.iter().map(of_variable).collect(),
            lock: id(WaitKind::Lock, ""),
            condition: id(WaitKind::Condition, ""),
            owned,
        }
    }

    /// The frame of a raw one below node `at`. `named`: the one that it has without regard to its place.
    pub fn refined(&self, raw: &RawFrame, frames: &[Frame], nodes: &[Node], at: NodeId, named: FrameId) -> FrameId {
        let variable = match raw {
            RawFrame::State(ThreadState::Waiting(WaitKind::Futex)) => None,
            RawFrame::State(ThreadState::WaitingForFutex(id)) => self.variables.get(usize::from(id.0)),
            _ => return named,
        };
        let (kind, owner) = use_of_futex(frames, nodes, at);
        match (kind, variable) {
            (WaitKind::Lock, Some(variable)) => variable.lock,
            (WaitKind::Condition, Some(variable)) => variable.condition,
            (_, Some(variable)) => variable.futex,
            (WaitKind::Lock, None) => self.owned(kind, owner).unwrap_or(self.lock),
            (WaitKind::Condition, None) => self.owned(kind, owner).unwrap_or(self.condition),
            (_, None) => named,
        }
    }

    fn owned(&self, kind: WaitKind, owner: Option<&str>) -> Option<FrameId> {
        let known = self
            .owned
            .iter()
            .find(|known| (known.0, Some(known.1)) == (kind, owner));
        known.map(|(.., frame)| *frame)
    }
}

/// What a futex is used for, by the frames from node `at` on outwards: a lock, a condition variable, or neither is known
/// (`Futex`); and what it belongs to.
fn use_of_futex(frames: &[Frame], nodes: &[Node], at: NodeId) -> (WaitKind, Option<&'static str>) {
    let mut found = WaitKind::Futex;
    let mut owner = None;
    let mut at = at;
    for _ in 0..BLOCKING_FRAMES {
        let node = &nodes[at as usize];
        let f = &frames[node.frame as usize];
        let is = |names: &[&str]| names.iter().any(|name| f.name.starts_with(name));
        match f.kind {
            FrameKind::Native | FrameKind::Inlined | FrameKind::Unknown | FrameKind::Kernel => {}
            // `Condition.wait` and what is built on it wait on a lock of their own.
            FrameKind::Python if f.name == "wait" && f.filename.ends_with(THREADING) => {
                return (WaitKind::Condition, Some(condition_owner(frames, nodes, node.parent)));
            }
            FrameKind::Python if f.name == WAITS_FOR_THREAD && f.filename.ends_with(THREADING) => {
                return (WaitKind::Lock, Some(THREAD_END));
            }
            _ => break,
        }
        // A lock may be made of a condition variable and a mutex (Python/thread_pthread.h): the outer one counts.
        if is(LOCKS) {
            found = WaitKind::Lock;
        } else if is(CONDITIONS) {
            found = WaitKind::Condition;
        }
        if let Some((_, known)) = OWNERS.iter().find(|(begin, _)| f.name.starts_with(begin)) {
            owner = Some(*known);
        }
        at = node.parent;
    }
    match (found, owner) {
        // A semaphore alone does not say what it is used for.
        (WaitKind::Lock | WaitKind::Futex, Some(_)) => (WaitKind::Lock, owner),
        _ => (found, None),
    }
}

/// What the condition belongs to that a thread waits for, by the caller of `Condition.wait` at node `at`.
fn condition_owner(frames: &[Frame], nodes: &[Node], at: NodeId) -> &'static str {
    let mut at = at;
    for _ in 0..CALLER_FRAMES {
        let node = &nodes[at as usize];
        let f = &frames[node.frame as usize];
        match f.kind {
            FrameKind::Native | FrameKind::Inlined | FrameKind::Unknown => {}
            FrameKind::Python if f.name == "wait_for" && f.filename.ends_with(THREADING) => {}
            FrameKind::Python => {
                let is = |(name, file, _): &&(&str, &str, &str)| f.name == *name && f.filename.ends_with(file);
                return CONDITION_OWNERS.iter().find(is).map_or(CONDITION, |(.., owner)| owner);
            }
            _ => break,
        }
        at = node.parent;
    }
    CONDITION
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::FutexId;

    /// The state of a thread with these frames, outermost first: Python functions with a file, others without.
    fn state(stack: &[(&str, &str)], raw: ThreadState) -> String {
        let variables = [VariableText {
            lock: "table_lock (t.so)".into(),
            condition: "ready (t.so)".into(),
        }];
        let mut table = FrameTable::default();
        table.id(Frame::new(FrameKind::Root, "root"));
        let mut nodes = vec![Node::new(0, 0)];
        for (name, file) in stack {
            let kind = if file.is_empty() {
                FrameKind::Native
            } else {
                FrameKind::Python
            };
            let frame = table.id(Frame {
                filename: (*file).into(),
                ..Frame::new(kind, *name)
            });
            nodes.push(Node::new(frame, nodes.len() as NodeId - 1));
        }
        let named = table.id(Frame::new(FrameKind::State, raw.label(&[])));
        let waits = FutexWaits::new(&mut table, &variables);
        let raw = RawFrame::State(raw);
        let frame = waits.refined(&raw, &table.all, &nodes, nodes.len() as NodeId - 1, named);
        table.all[frame as usize].name.clone()
    }

    #[test]
    fn futexes_are_named_by_what_waits() {
        let threading = "/usr/lib/python3.12/threading.py";
        let wait = ("wait", threading);
        let semaphore = ("sem_wait", "");
        for (stack, of_heap, of_variable) in [
            (&[][..], "futex", "futex table_lock (t.so)"),
            (&[("do_wait", "")], "futex", "futex table_lock (t.so)"),
            (
                &[("pthread_mutex_lock", ""), ("__lll_lock_wait", "")],
                "lock pthread_mutex",
                "lock table_lock (t.so)",
            ),
            (&[("sem_wait", "")], "lock", "lock table_lock (t.so)"),
            (&[("pthread_cond_wait", "")], "condition", "condition ready (t.so)"),
            (
                &[("f", "/app.py"), wait, semaphore],
                "condition threading.Condition",
                "condition ready (t.so)",
            ),
            (
                &[
                    ("get", "/usr/lib/python3.12/queue.py"),
                    wait,
                    ("lock_acquire", ""),
                    semaphore,
                ],
                "condition queue.Queue",
                "condition ready (t.so)",
            ),
            (
                &[
                    ("get", "/app/queue.py"),
                    ("wait", threading),
                    ("method", ""),
                    wait,
                    semaphore,
                ],
                "condition threading.Event",
                "condition ready (t.so)",
            ),
            (
                &[("_wait", threading), ("wait_for", threading), wait, semaphore],
                "condition threading.Barrier",
                "condition ready (t.so)",
            ),
            (
                &[("use", "/app.py"), ("wait_for", threading), wait, semaphore],
                "condition threading.Condition",
                "condition ready (t.so)",
            ),
            (
                &[("_wait_for_tstate_lock", threading), semaphore],
                "lock Thread.join",
                "lock table_lock (t.so)",
            ),
        ] {
            let heap = state(stack, ThreadState::Waiting(WaitKind::Futex));
            assert_eq!(heap, format!("[waiting: {of_heap}]"), "{stack:?}");
            let variable = state(stack, ThreadState::WaitingForFutex(FutexId(0)));
            assert_eq!(variable, format!("[waiting: {of_variable}]"), "{stack:?}");
            // A number that is not known.
            let unknown = state(stack, ThreadState::WaitingForFutex(FutexId(1)));
            assert_eq!(unknown, heap, "{stack:?}");
        }
        let runnable = state(&[("pthread_mutex_lock", "")], ThreadState::Runnable);
        assert_eq!(runnable, "[runnable]");
    }
}
