//! Thread states as frames, and the time that was spent in them.

use rustc_hash::FxHashMap;

use super::{FrameTable, ResolveInput, ResolvedFrame};
use crate::event::{ThreadState, WaitKind};
use crate::frame::RawFrame;
use crate::profile::count_tree::{RawNode, RawTimelineSample, RawTree};
use crate::profile::lags::{Lag, RawLag};
use crate::profile::model::{Frame, FrameId, FrameKind, Node, NodeId, PlaceId};

use crate::profile::values::{Amounts, Value, ValueType};
use crate::profile::view::frame_text_at;
use crate::profile::waits;
use crate::profile::waits::{RawWaits, RawWaker, Waker};

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

/// The states that a wait on a futex may turn out to be, by the functions that wait.
pub struct FutexWaits {
    lock: FrameId,
    condition: FrameId,
    /// The lock by its owner, as in [`OWNERS`].
    owned: Vec<(&'static str, FrameId)>,
}

impl FutexWaits {
    pub fn new(frames: &mut FrameTable) -> FutexWaits {
        let mut id = |kind: WaitKind, owner: &str| {
            let kind = kind.label();
            let label = format!("[waiting: {kind}{}{owner}]", if owner.is_empty() { "" } else { " " });
            frames.id(Frame::new(FrameKind::State, label))
        };
        let mut owned: Vec<(&str, FrameId)> = Vec::new();
        for (_, owner) in OWNERS {
            if owned.iter().all(|(known, _)| known != owner) {
                owned.push((*owner, id(WaitKind::Lock, owner)));
            }
        }
        FutexWaits {
            lock: id(WaitKind::Lock, ""),
            condition: id(WaitKind::Condition, ""),
            owned,
        }
    }

    /// The frame for a wait on a lock of this owner.
    fn lock_of(&self, owner: Option<&str>) -> FrameId {
        let known = self.owned.iter().find(|(known, _)| Some(*known) == owner);
        known.map_or(self.lock, |(_, frame)| *frame)
    }

    /// The frame of a raw one below node `at`. `named`: the one that it has without regard to its place.
    pub fn refined(&self, raw: &RawFrame, frames: &[Frame], nodes: &[Node], at: NodeId, named: FrameId) -> FrameId {
        match raw {
            RawFrame::State(ThreadState::Waiting(WaitKind::Futex)) => self.of_futex(frames, nodes, at, named),
            _ => named,
        }
    }

    /// The frame for a wait on a futex below node `at`. `futex`: the one to use if no function says more.
    fn of_futex(&self, frames: &[Frame], nodes: &[Node], at: NodeId, futex: FrameId) -> FrameId {
        let mut found = futex;
        let mut owner = None;
        let mut at = at;
        for _ in 0..BLOCKING_FRAMES {
            let f = &frames[nodes[at as usize].frame as usize];
            let is = |names: &[&str]| names.iter().any(|name| f.name.starts_with(name));
            match f.kind {
                FrameKind::Native | FrameKind::Inlined | FrameKind::Unknown | FrameKind::Kernel => {}
                // `Condition.wait` and what is built on it (Lib/threading.py) wait on a lock of their own.
                FrameKind::Python if f.name == "wait" && f.filename.ends_with("/threading.py") => {
                    return self.condition;
                }
                FrameKind::Python if f.name == WAITS_FOR_THREAD && f.filename.ends_with("/threading.py") => {
                    return self.lock_of(Some(THREAD_END));
                }
                _ => break,
            }
            // A lock may be made of a condition variable and a mutex (Python/thread_pthread.h): the outer one counts.
            if is(LOCKS) {
                found = self.lock;
            } else if is(CONDITIONS) {
                found = self.condition;
            }
            if let Some((_, known)) = OWNERS.iter().find(|(begin, _)| f.name.starts_with(begin)) {
                owner = Some(*known);
            }
            at = nodes[at as usize].parent;
        }
        match (found, owner) {
            // A semaphore alone does not say what it is used for.
            (found, Some(_)) if found == self.lock || found == futex => self.lock_of(owner),
            (found, _) => found,
        }
    }
}

/// Samples, the wall time that they represent, the parts of it on and off the CPU, and for how long suspended tasks awaited
/// something. `ends`: the node of each raw node,
/// and its place.
pub fn time_values(input: &ResolveInput<'_>, nodes: &[Node], ends: &[(NodeId, PlaceId)]) -> Vec<Value> {
    let raw = input.tree.nodes();
    // Stacks of wakers are below states.
    let mut off_cpu: Vec<bool> = Vec::with_capacity(raw.len());
    for (parent, frame, _) in raw {
        let above = off_cpu.get(*parent as usize).copied().unwrap_or(false);
        off_cpu.push(above || matches!(frame, Some(RawFrame::State(_) | RawFrame::Awaiting(_))));
    }
    let is_off_cpu = |t: &RawTimelineSample| off_cpu[t.node as usize];
    let of_ticks = |kind: ValueType, ticks: Vec<u64>| {
        let mut sums = vec![0u64; nodes.len()];
        for (t, amount) in input.timeline.iter().zip(&ticks) {
            sums[ends[t.node as usize].0 as usize] += amount;
        }
        for at in (1..nodes.len()).rev() {
            sums[nodes[at].parent as usize] += sums[at];
        }
        let amounts = Amounts::Each { nodes: sums, ticks };
        Value { kind, amounts }
    };
    let of = |kind: ValueType, amount: &dyn Fn(&RawTimelineSample) -> u64| {
        of_ticks(kind, input.timeline.iter().map(amount).collect())
    };
    let counts = input.timeline.iter().map(|t| t.count.into()).collect();
    let mut values = vec![
        Value {
            kind: ValueType::SAMPLES,
            amounts: Amounts::Each {
                nodes: Vec::new(),
                ticks: counts,
            },
        },
        of(ValueType::WALL, &|t| t.time_spent),
        of(ValueType::CPU, &|t| if is_off_cpu(t) { 0 } else { t.time_spent }),
        of(ValueType::OFF_CPU, &|t| if is_off_cpu(t) { t.time_spent } else { 0 }),
    ];
    if let Some((waits, _)) = input.waits
        && !waits.awaits.is_empty()
    {
        let mut ticks = vec![0; input.timeline.len()];
        for (row, time) in &waits.awaits {
            if let Some(tick) = ticks.get_mut(*row as usize) {
                *tick = *time;
            }
        }
        values.push(of_ticks(ValueType::AWAIT, ticks));
    }
    values
}

/// A stack with names.
#[derive(Default)]
struct NamedStack {
    /// Outermost first, `name (file:line)`.
    frames: Vec<String>,
    /// The innermost Python function, as it is in `frames`, and the name of the innermost task.
    function: Option<String>,
    task: Option<String>,
}

/// The stack that ends at a node.
fn named_stack(
    node: RawNode,
    tree: &RawTree,
    named: &FxHashMap<RawFrame, Vec<ResolvedFrame>>,
    frames: &[Frame],
) -> NamedStack {
    let mut stack = NamedStack::default();
    let mut at = node;
    while let (parent, Some(raw), _) = &tree.nodes()[at as usize] {
        for (frame, line) in named.get(raw).map_or(&[][..], Vec::as_slice).iter().rev() {
            let frame = &frames[*frame as usize];
            let text = frame_text_at(frame, *line);
            if frame.kind == FrameKind::Python && stack.function.is_none() {
                stack.function = Some(text.clone());
            }
            if frame.kind == FrameKind::Task && stack.task.is_none() {
                let name = frame
                    .name
                    .strip_prefix("[task: ")
                    .and_then(|name| name.strip_suffix(']'));
                stack.task = name.map(String::from);
            }
            stack.frames.push(text);
        }
        at = *parent;
    }
    stack.frames.reverse();
    stack
}

/// What kept event loops for long, in the order of time; `start` of the profile on the samples' clock.
pub fn lags(
    raw: &[RawLag],
    tree: &RawTree,
    named: &FxHashMap<RawFrame, Vec<ResolvedFrame>>,
    frames: &[Frame],
    start: u64,
) -> Vec<Lag> {
    let lag = |lag: &RawLag| {
        let stack = named_stack(lag.node, tree, named, frames);
        Lag {
            pid: lag.pid,
            tid: lag.tid,
            start: lag.start,
            time: lag.start.saturating_sub(start),
            length: lag.length,
            task: stack.task.unwrap_or_default(),
            function: stack.function.unwrap_or_default(),
            stack: stack.frames,
        }
    };
    let mut lags: Vec<Lag> = raw.iter().map(lag).collect();
    lags.sort_by_key(|lag| (lag.start, lag.tid));
    lags
}

/// Intervals off the CPU, with the stacks of wakers named.
pub fn waits(
    raw: &RawWaits,
    wakers: &[RawWaker],
    tree: &RawTree,
    named: &FxHashMap<RawFrame, Vec<ResolvedFrame>>,
    frames: &[Frame],
) -> waits::Waits {
    let waker = |w: &RawWaker| {
        let stack = named_stack(w.node, tree, named, frames);
        Waker {
            pid: w.pid,
            tid: w.tid,
            function: stack.function.unwrap_or_default(),
            stack: stack.frames,
        }
    };
    waits::Waits {
        lengths: raw.lengths.clone(),
        wakers: raw.wakers.clone(),
        holding: raw.holding.clone(),
        shares: raw.shares.clone(),
        known: wakers.iter().map(waker).collect(),
    }
}
