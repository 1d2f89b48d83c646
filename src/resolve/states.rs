//! Thread states as frames, and the time that was spent in them.

use super::{Frames, Gathered, frame};
use crate::sample::{RawFrame, ThreadState, WaitKind};
use crate::tree::profile::{Frame, FrameId, FrameKind, Node, NodeId, PlaceId};
use crate::tree::raw::RawTick;
use crate::tree::values::{Amounts, Value, ValueType};

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
/// Native frames that are looked at for the function that blocks.
const BLOCKING_FRAMES: usize = 16;

/// The states that a wait on a futex may turn out to be, by the functions that wait.
pub struct Waits {
    lock: FrameId,
    condition: FrameId,
}

impl Waits {
    pub fn new(frames: &mut Frames) -> Waits {
        let mut id = |kind| frames.id(frame(FrameKind::State, ThreadState::Waiting(kind).label()));
        Waits {
            lock: id(WaitKind::Lock),
            condition: id(WaitKind::Condition),
        }
    }

    /// The frame of a raw one below node `at`. `named`: the one that it has without regard to its place.
    pub fn refined(&self, raw: &RawFrame, frames: &[Frame], nodes: &[Node], at: NodeId, named: FrameId) -> FrameId {
        match raw {
            RawFrame::State(ThreadState::Waiting(WaitKind::Futex)) => self.of_futex(frames, nodes, at, named),
            _ => named,
        }
    }

    /// The frame for a wait on a futex below node `at`. `futex`: the one to use if no function tells more.
    fn of_futex(&self, frames: &[Frame], nodes: &[Node], at: NodeId, futex: FrameId) -> FrameId {
        let mut found = futex;
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
                _ => break,
            }
            // A lock may be made of a condition variable and a mutex (Python/thread_pthread.h): the outer one counts.
            if is(LOCKS) {
                found = self.lock;
            } else if is(CONDITIONS) {
                found = self.condition;
            }
            at = nodes[at as usize].parent;
        }
        found
    }
}

/// Samples, the wall time that they represent, and the parts of it on and off the CPU. `ends`: the node of each raw node,
/// and its place.
pub fn time_values(gathered: &Gathered<'_>, nodes: &[Node], ends: &[(NodeId, PlaceId)]) -> Vec<Value> {
    let raw = gathered.tree.nodes();
    let is_off_cpu = |t: &RawTick| matches!(raw[t.node as usize].1, Some(RawFrame::State(_)));
    let of = |kind: ValueType, amount: &dyn Fn(&RawTick) -> u64| {
        let ticks: Vec<u64> = gathered.timeline.iter().map(amount).collect();
        let mut sums = vec![0u64; nodes.len()];
        for (t, amount) in gathered.timeline.iter().zip(&ticks) {
            sums[ends[t.node as usize].0 as usize] += amount;
        }
        for at in (1..nodes.len()).rev() {
            sums[nodes[at].parent as usize] += sums[at];
        }
        let amounts = Amounts::Each { nodes: sums, ticks };
        Value { kind, amounts }
    };
    let counts = gathered.timeline.iter().map(|t| t.count.into()).collect();
    vec![
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
    ]
}
