//! A minor version that is newer than all we know is read like the newest one. Whether that was right shows at once: the
//! frames of its threads lead to code objects with names, or they do not.

use super::code;
use crate::layout::{Interpreter, NONE};
use crate::process::memory::Memory;

/// The process runs while it is looked at, so a chain may lead astray once.
const TRIES: usize = 8;
const MAX_STATES: usize = 16;
const MAX_FRAMES: usize = 256;
/// `owner` values from here on are entry frames (Include/internal/pycore_interpframe_structs.h, v3.15.0).
const SHIM: u8 = 3;

/// Do the offsets fit this process? `None`: it runs no Python code yet, so that nothing can be said.
pub fn fits(memory: &dyn Memory, python: &Interpreter) -> Option<bool> {
    let mut seen = None;
    for _ in 0..TRIES {
        match look(memory, python) {
            Look::Good => return Some(true),
            Look::Bad => seen = Some(false),
            Look::Nothing => {}
        }
    }
    seen
}

enum Look {
    Good,
    Bad,
    Nothing,
}

/// Walks the threads of the first interpreter.
fn look(memory: &dyn Memory, python: &Interpreter) -> Look {
    let l = &python.layout;
    let word = |at: u64, offset: u64| memory.u64(at.checked_add(offset)?);
    let Some(interp) = word(python.runtime, l.runtime_interpreters.into()) else {
        return Look::Bad;
    };
    if interp == 0 {
        return Look::Nothing;
    }
    let mut state = word(interp, l.interp_threads.into()).unwrap_or(0);
    let mut frames = 0;
    for _ in 0..MAX_STATES {
        if state == 0 {
            break;
        }
        if word(state, l.tstate_interp.into()) != Some(interp) {
            return Look::Bad;
        }
        match chain(memory, python, state) {
            Some(n) => frames += n,
            None => return Look::Bad,
        }
        state = word(state, l.tstate_next.into()).unwrap_or(0);
    }
    if frames > 0 { Look::Good } else { Look::Nothing }
}

/// Python frames of a thread state; `None` if something on the way cannot be one.
fn chain(memory: &dyn Memory, python: &Interpreter, state: u64) -> Option<usize> {
    let l = &python.layout;
    let word = |at: u64, offset: u16| memory.u64(at.checked_add(offset.into())?);
    let base = if l.tstate_base_frame == NONE {
        0
    } else {
        word(state, l.tstate_base_frame)?
    };
    let mut frame = word(state, l.tstate_first)?;
    let mut n = 0;
    for _ in 0..MAX_FRAMES {
        if frame == 0 || frame == base {
            return (frame == base || n == 0).then_some(n);
        }
        let mut owner = [0];
        memory
            .read(frame.checked_add(l.frame_owner.into())?, &mut owner)
            .then_some(())?;
        if owner[0] < SHIM {
            let code = word(frame, l.frame_code)? & !3;
            code::is_one(memory, l, code).then_some(())?;
            n += 1;
        }
        frame = word(frame, l.frame_previous)?;
    }
    Some(n)
}
