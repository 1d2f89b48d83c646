//! Thread states of a process, from the interpreter's own lists.

use std::collections::BTreeMap;

use crate::layout::Interpreter;
use crate::process::memory::Memory;

/// Interpreters and thread states that are looked at.
const MAX_INTERPRETERS: usize = 1024;
const MAX_STATES: usize = 65536;

/// `pthread_self` -> thread states, of threads that have more than one: each subinterpreter that a thread runs has a
/// state of its own there. The lists change while they are read; a state that does not name its interpreter ends its
/// list.
pub fn nested(memory: &dyn Memory, python: &Interpreter) -> Vec<(u64, Vec<u64>)> {
    let l = &python.layout;
    let mut by_thread: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    let mut left = MAX_STATES;
    let read = |at: u64, offset: u64| memory.u64(at.checked_add(offset)?);
    let mut interp = read(python.runtime, l.runtime_interpreters.into()).unwrap_or(0);
    for _ in 0..MAX_INTERPRETERS {
        if interp == 0 {
            break;
        }
        let mut state = read(interp, l.interp_threads.into()).unwrap_or(0);
        while state != 0 && left > 0 && read(state, l.tstate_interp.into()) == Some(interp) {
            left -= 1;
            if let Some(thread) = read(state, l.tstate_thread_id.into()) {
                by_thread.entry(thread).or_default().push(state);
            }
            state = read(state, l.tstate_next.into()).unwrap_or(0);
        }
        interp = read(interp, l.interp_next.into()).unwrap_or(0);
    }
    by_thread.into_iter().filter(|(_, states)| states.len() > 1).collect()
}
