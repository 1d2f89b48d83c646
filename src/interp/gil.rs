//! Who holds the lock of the interpreter.

use super::objects::{Lock, Objects};
use super::threads::State;
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
