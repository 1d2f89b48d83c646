//! Who holds the lock of the interpreter.

use std::collections::BTreeSet;
use std::ops::Range;

use super::Runtime;
use super::objects::{Lock, Objects};
use super::threads::{State, states};
use crate::layout::Interpreter;
use crate::process::memory::Memory;

/// The lock as a thread sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gil {
    Held,
    NotHeld,
    /// This interpreter runs without one.
    None,
}

/// Bytes of `struct _gil_runtime_state` (Include/internal/pycore_gil.h, v3.7 to v3.15, x86-64): up to the last of its two
/// pairs of mutex and condition variable. Threads that wait for the lock wait on one of these.
const LOCK_BYTES: u64 = 208;
/// In free-threaded builds a field precedes the others.
const LOCK_BYTES_FREE_THREADED: u64 = LOCK_BYTES + 8;

/// Where the locks of a process's interpreters lie. Empty for versions in which that is not known (3.6 and earlier).
pub fn locks(memory: &dyn Memory, runtime: &Runtime, python: &Interpreter) -> Vec<Range<u64>> {
    let range = |at: u64, len: u64| at..at.saturating_add(len);
    // `_PyRuntime.ceval.gil` (Include/internal/pycore_runtime.h, from the DWARF of the releases in tables.rs)
    let in_runtime: u64 = match runtime.version {
        (3, 7, _) => 1264,
        (3, 8, _) => 1152,
        (3, 9 | 10, _) => 352,
        (3, 11, _) => 360,
        _ => 0,
    };
    if in_runtime != 0 {
        return vec![range(python.runtime.saturating_add(in_runtime), LOCK_BYTES)];
    }
    let Some(Lock::Interpreter { at, free_threaded }) = Objects::of(runtime, &python.layout).map(|o| o.lock) else {
        return Vec::new();
    };
    let len = if free_threaded {
        LOCK_BYTES_FREE_THREADED
    } else {
        LOCK_BYTES
    };
    let interpreters: BTreeSet<u64> = states(memory, python).iter().map(|s| s.interpreter).collect();
    let locks = interpreters
        .into_iter()
        .filter_map(|interpreter| memory.u64(interpreter.checked_add(at.into())?));
    locks.filter(|at| *at != 0).map(|at| range(at, len)).collect()
}

/// Does the thread with this pointer hold the lock of its interpreter, or of one of them? `None`: not known.
pub fn of_thread(
    memory: &dyn Memory,
    python: &Interpreter,
    objects: &Objects,
    states: &[State],
    pointer: u64,
) -> Option<Gil> {
    let own = || states.iter().filter(|s| s.thread == pointer);
    let is_own = |state: u64| own().any(|s| s.state == state);
    match objects.lock {
        Lock::Current => {
            let at = python.layout.runtime_current;
            (at != 0).then_some(())?;
            let current = memory.u64(python.runtime.checked_add(at.into())?)?;
            // One that was made since the list was read tells its thread itself.
            let thread = current.checked_add(python.layout.tstate_thread_id.into());
            let holds = current != 0 && memory.u64(thread?)? == pointer;
            Some(if holds { Gil::Held } else { Gil::NotHeld })
        }
        Lock::Interpreter { at, free_threaded } => {
            let mut seen = None;
            for state in own() {
                let lock = memory.u64(state.interpreter.checked_add(at.into())?)?;
                // The first field says whether the lock of a free-threaded build is in use; the others follow, 8 later.
                let word = |offset: u64| lock.checked_add(offset + if free_threaded { 8 } else { 0 });
                if free_threaded && memory.u32(lock)? == 0 {
                    seen = seen.or(Some(Gil::None));
                    continue;
                }
                // `last_holder` stays when it lets go.
                let holder = memory.u64(word(8)?)?;
                if memory.u32(word(16)?)? == 1 && is_own(holder) {
                    return Some(Gil::Held);
                }
                seen = Some(Gil::NotHeld);
            }
            seen
        }
    }
}
