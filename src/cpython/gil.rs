//! Which thread holds the global interpreter lock (GIL).

use std::collections::BTreeSet;

use super::Runtime;
use super::object_layout::{GilLocation, ObjectLayout};
use super::thread_states::{PyThreadState, states};
use crate::bytes::{u32_at, u64_at};
use crate::cpython_layout::{Interpreter, InterpreterLocks, Layout};
use crate::process::memory::Memory;

/// The lock from a thread's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gil {
    /// The lock, by its avma; 0 where all interpreters have the same one.
    Held(u64),
    NotHeld,
    /// This interpreter runs without a lock.
    None,
}

/// Bytes of `struct _gil_runtime_state` (Include/internal/pycore_gil.h, v3.7 to v3.15, x86-64): up to the last of its two
/// pairs of mutex and condition variable. Threads that wait for the lock wait on one of these.
const LOCK_BYTES: u32 = 208;
/// `last_holder` in it, followed by `locked`.
const LAST_HOLDER: u32 = 8;

/// Where the locks of a process's interpreters lie. None for versions in which that is not known (3.6 and earlier).
pub fn locks(memory: &dyn Memory, runtime: &Runtime, python: &Interpreter) -> InterpreterLocks {
    let (at, free_threaded) = match ObjectLayout::of(runtime, &python.layout).map(|o| o.lock) {
        Some(GilLocation::Interpreter { at, free_threaded }) => (at, free_threaded),
        Some(GilLocation::Current { lock: Some(at) }) => {
            return InterpreterLocks {
                at: vec![python.runtime.saturating_add(at.into())],
                len: LOCK_BYTES,
                last_holder: LAST_HOLDER,
                in_interpreter: 0,
            };
        }
        Some(GilLocation::Current { lock: None }) | None => return InterpreterLocks::default(),
    };
    // In free-threaded builds a field precedes the others.
    let before = if free_threaded { 8 } else { 0 };
    let interpreters: BTreeSet<u64> = states(memory, python).iter().map(|s| s.interpreter).collect();
    let locks: BTreeSet<u64> = interpreters
        .into_iter()
        .filter_map(|interpreter| memory.u64(interpreter.checked_add(at.into())?))
        .filter(|at| *at != 0)
        .collect();
    InterpreterLocks {
        at: locks.into_iter().collect(),
        len: LOCK_BYTES + before,
        last_holder: LAST_HOLDER + before,
        in_interpreter: at.into(),
    }
}

/// Thread states that hold a lock now: one for each interpreter with a lock of its own, if any thread holds it.
pub fn holders(memory: &dyn Memory, runtime: &Runtime, python: &Interpreter) -> Vec<u64> {
    let locks = locks(memory, runtime, python);
    if locks.at.is_empty() && python.layout.runtime_current != 0 {
        let current = python.runtime.checked_add(python.layout.runtime_current.into());
        return current
            .and_then(|at| memory.u64(at))
            .filter(|state| *state != 0)
            .into_iter()
            .collect();
    }
    current_holders(memory, &locks).collect()
}

/// Does one of these thread states hold the lock of its interpreter? Without locks, no.
pub fn is_held_by(memory: &dyn Memory, locks: &InterpreterLocks, layout: &Layout, states: &[u64]) -> bool {
    let holds = |state: &u64| {
        // With one lock only it is not searched for.
        let lock = match locks.at.as_slice() {
            [] => None,
            [only] => Some(*only),
            [first, ..] if locks.in_interpreter == 0 => Some(*first),
            _ => {
                let interpreter = memory.u64(state.checked_add(layout.tstate_interp.into())?)?;
                memory.u64(interpreter.checked_add(locks.in_interpreter.into())?)
            }
        };
        (holder(memory, locks, lock?)? == *state).then_some(())
    };
    states.iter().any(|state| holds(state).is_some())
}

/// The thread state that holds a lock now.
fn holder(memory: &dyn Memory, locks: &InterpreterLocks, lock: u64) -> Option<u64> {
    let mut words = [0; 16];
    memory
        .read(lock.checked_add(locks.last_holder.into())?, &mut words)
        .then_some(())?;
    // The holder is still set after the lock is released.
    (u32_at(&words, 8)? == 1).then(|| u64_at(&words, 0)).flatten()
}

fn current_holders(memory: &dyn Memory, locks: &InterpreterLocks) -> impl Iterator<Item = u64> {
    let all = locks.at.iter().filter_map(move |lock| holder(memory, locks, *lock));
    all.filter(|state| *state != 0)
}

/// Whether the thread with this `pthread_self` holds the lock of its interpreter, or of one of them. `None`: unknown.
pub fn of_thread(
    memory: &dyn Memory,
    python: &Interpreter,
    objects: &ObjectLayout,
    states: &[PyThreadState],
    thread_pointer: u64,
) -> Option<Gil> {
    let own = || states.iter().filter(|s| s.thread == thread_pointer);
    let is_own = |state: u64| own().any(|s| s.state == state);
    match objects.lock {
        GilLocation::Current { .. } => {
            let at = python.layout.runtime_current;
            (at != 0).then_some(())?;
            let current = memory.u64(python.runtime.checked_add(at.into())?)?;
            // A thread state created since the list was read names its thread itself.
            let thread = current.checked_add(python.layout.tstate_thread_id.into());
            let holds = current != 0 && memory.u64(thread?)? == thread_pointer;
            Some(if holds { Gil::Held(0) } else { Gil::NotHeld })
        }
        GilLocation::Interpreter { at, free_threaded } => {
            let mut seen = None;
            for state in own() {
                let lock = memory.u64(state.interpreter.checked_add(at.into())?)?;
                // The first field says whether the lock of a free-threaded build is in use; the other fields are 8
                // bytes further.
                let word = |offset: u64| lock.checked_add(offset + if free_threaded { 8 } else { 0 });
                if free_threaded && memory.u32(lock)? == 0 {
                    seen = seen.or(Some(Gil::None));
                    continue;
                }
                // `last_holder` is still set after the lock is released.
                let holder = memory.u64(word(8)?)?;
                if memory.u32(word(16)?)? == 1 && is_own(holder) {
                    return Some(Gil::Held(lock));
                }
                seen = Some(Gil::NotHeld);
            }
            seen
        }
    }
}
