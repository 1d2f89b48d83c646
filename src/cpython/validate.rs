//! A minor version newer than all known ones is read like the newest of these. Whether that was right shows at once:
//! the frames of its threads lead to code objects with names, or they do not.

use super::code_object;
use crate::cpython_layout::{ABSENT, Interpreter};
use crate::limits::SHIM;
use crate::process::memory::Memory;

/// The process runs while it is read, so a chain may be inconsistent once.
const TRIES: usize = 8;
const MAX_STATES: usize = 16;
/// Maximum number of frames checked per thread state.
const MAX_CHECKED: usize = 256;

/// Whether the offsets fit this process. `None`: it runs no Python code yet, so nothing can be said.
pub fn validate(memory: &dyn Memory, python: &Interpreter) -> Option<bool> {
    let mut seen = None;
    for _ in 0..TRIES {
        match probe(memory, python) {
            ProbeResult::Good => return Some(true),
            ProbeResult::Bad => seen = Some(false),
            ProbeResult::Nothing => {}
        }
    }
    seen
}

enum ProbeResult {
    Good,
    Bad,
    Nothing,
}

/// Walks the threads of the first interpreter.
fn probe(memory: &dyn Memory, python: &Interpreter) -> ProbeResult {
    let l = &python.layout;
    let word = |at: u64, offset: u64| memory.u64(at.checked_add(offset)?);
    let Some(interp) = word(python.runtime, l.runtime_interpreters.into()) else {
        return ProbeResult::Bad;
    };
    if interp == 0 {
        return ProbeResult::Nothing;
    }
    let mut state = word(interp, l.interp_threads.into()).unwrap_or(0);
    let mut frames = 0;
    for _ in 0..MAX_STATES {
        if state == 0 {
            break;
        }
        if word(state, l.tstate_interp.into()) != Some(interp) {
            return ProbeResult::Bad;
        }
        match chain(memory, python, state) {
            Some(n) => frames += n,
            None => return ProbeResult::Bad,
        }
        state = word(state, l.tstate_next.into()).unwrap_or(0);
    }
    if frames > 0 {
        ProbeResult::Good
    } else {
        ProbeResult::Nothing
    }
}

/// Python frames of a thread state; `None` if something in the chain cannot be a frame.
fn chain(memory: &dyn Memory, python: &Interpreter, state: u64) -> Option<usize> {
    let l = &python.layout;
    let word = |at: u64, offset: u16| memory.u64(at.checked_add(offset.into())?);
    let base = if l.tstate_base_frame == ABSENT {
        0
    } else {
        word(state, l.tstate_base_frame)?
    };
    let mut frame = word(state, l.tstate_first)?;
    let mut n = 0;
    for _ in 0..MAX_CHECKED {
        if frame == 0 || frame == base {
            return (frame == base || n == 0).then_some(n);
        }
        let mut owner = [0];
        memory
            .read(frame.checked_add(l.frame_owner.into())?, &mut owner)
            .then_some(())?;
        if owner[0] < SHIM {
            let code = word(frame, l.frame_code)? & !3;
            code_object::looks_like_code_object(memory, l, code).then_some(())?;
            n += 1;
        }
        frame = word(frame, l.frame_previous)?;
    }
    Some(n)
}
