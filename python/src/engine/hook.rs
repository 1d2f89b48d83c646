//! Events from the C profile hook (before 3.12), set on every thread.
//!
//! New threads get theirs when the C function that made them returns, before they run: a new thread state is first in
//! the list. The hook's object is the profiler, so `sys.getprofile` gives that.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::objects::{self, Builtin, Object, ResumePlaces};
use super::session::{self, EngineSession};
use super::threads::{ignore, thread};
use super::{CallEvent, Callee, Machine};

/// `what` of the hook (`Include/cpython/pystate.h`).
const CALL: c_int = 0;
const RETURN: c_int = 3;
const C_CALL: c_int = 4;
const C_EXCEPTION: c_int = 5;
const C_RETURN: c_int = 6;

/// Number of the newest thread state when the list was last read.
static NEWEST: AtomicU64 = AtomicU64::new(0);

unsafe extern "C-unwind" fn hook<M: Machine>(_: Object, frame: Object, what: c_int, argument: Object) -> c_int {
    // SAFETY: the hook is called with the GIL held.
    let py = unsafe { Python::assume_attached() };
    match what {
        CALL | RETURN => {
            let Some(functions) = objects::functions() else {
                return 0;
            };
            // SAFETY: the frame of the event. It keeps its code object alive, so the new reference can go at once.
            let code = unsafe {
                let code = (functions.frame_code)(frame);
                ffi::Py_DECREF(code);
                code
            };
            if what == CALL {
                let Some((thread, given)) = thread::<M>(py, |_| true) else {
                    return 0;
                };
                let event = if thread.splits_resumes && is_at::<M>(py, code, frame, |p, at| !p.begins(at)) {
                    CallEvent::Resume
                } else {
                    CallEvent::Start
                };
                let (machine, context) = thread.event(py, event, given);
                machine.enter(Callee::Code(code), context);
            } else {
                let key = code as usize;
                let Some((thread, given)) = thread::<M>(py, |m| m.is_innermost(key)) else {
                    return 0;
                };
                let event = if thread.splits_resumes && (M::NEEDS_YIELDS || argument.is_null()) {
                    end::<M>(py, code, frame, argument)
                } else {
                    CallEvent::Return
                };
                let (machine, context) = thread.event(py, event, given);
                machine.leave(key, context);
            }
        }
        C_CALL | C_RETURN | C_EXCEPTION => c_event::<M>(py, what, argument),
        _ => {}
    }
    0
}

/// Whether the frame is one of a generator or a coroutine, and at a place of this kind.
fn is_at<M: Machine>(
    py: Python<'_>,
    code: Object,
    frame: Object,
    is_wanted: impl Fn(&ResumePlaces, i32) -> bool,
) -> bool {
    let Some(session) = session::running::<M>(py) else {
        return false;
    };
    let (id, _) = session.functions.intern(py, Callee::Code(code));
    let places = session.functions.get(id).and_then(|f| f.places.as_ref());
    places.is_some_and(|places| objects::last_instruction(py, frame).is_some_and(|at| is_wanted(places, at)))
}

/// What kind of end of a frame it is.
fn end<M: Machine>(py: Python<'_>, code: Object, frame: Object, value: Object) -> CallEvent {
    if value.is_null() {
        // An exception that was thrown into it was all that it has seen.
        return if is_at::<M>(py, code, frame, ResumePlaces::begins) {
            CallEvent::Throw
        } else {
            CallEvent::Return
        };
    }
    if is_at::<M>(py, code, frame, ResumePlaces::yields) {
        CallEvent::Yield
    } else {
        CallEvent::Return
    }
}

#[inline(always)]
fn c_event<M: Machine>(py: Python<'_>, what: c_int, argument: Object) {
    if what != C_CALL {
        find_threads::<M>(py);
    }
    let Some(builtin) = Builtin::of(argument, std::ptr::null_mut(), std::ptr::null_mut()) else {
        return;
    };
    let key = builtin.key();
    let wants_builtins = session::running::<M>(py).is_some_and(|s| s.options.builtins);
    if !wants_builtins {
        ignore::<M>(py);
        return;
    }
    if what == C_CALL {
        let Some((thread, given)) = thread::<M>(py, |_| true) else {
            return;
        };
        let (machine, context) = thread.event(py, CallEvent::CCall, given);
        machine.enter(Callee::Builtin(builtin), context);
    } else {
        let Some((thread, given)) = thread::<M>(py, |m| m.is_innermost(key)) else {
            return;
        };
        // A C function that was not entered has nothing to leave.
        if !thread.machine.is_innermost(key) {
            return;
        }
        let event = if what == C_RETURN {
            CallEvent::CReturn
        } else {
            CallEvent::CRaise
        };
        let (machine, context) = thread.event(py, event, given);
        machine.leave(key, context);
    }
}

/// Sets the hook on threads that have come since the last time.
#[inline(always)]
fn find_threads<M: Machine>(py: Python<'_>) {
    let Some(functions) = objects::functions() else { return };
    // SAFETY: the GIL is held; the newest thread state of this interpreter, of which there is one.
    let newest = unsafe { (functions.thread_number)((functions.first_thread)(ffi::PyInterpreterState_Get())) };
    if newest != NEWEST.load(Ordering::Relaxed)
        && let Some(session) = session::running::<M>(py)
        && !session.options.current_thread_only
    {
        objects::with_no_exception(py, || {
            if let Err(error) = hook_all(py, session) {
                error.write_unraisable(py, None);
            }
        });
    }
}

/// The threads that have the hook.
#[derive(Default)]
pub(crate) struct Hooked {
    /// Numbers of their thread states.
    numbers: Vec<u64>,
    /// The hook's object: the profiler. The thread states own references to it.
    owner: usize,
    /// Where a thread state has that object, in words from its start.
    place: Option<usize>,
}

/// In which words of a thread state the hook's object is searched for: fewer than there are (0x100 bytes in 3.9 to 3.11).
const WORDS: usize = 32;

/// All thread states of this interpreter with their numbers.
fn states(_: Python<'_>) -> Vec<(u64, *mut ffi::PyThreadState)> {
    let mut all = Vec::new();
    let Some(functions) = objects::functions() else {
        return all;
    };
    // SAFETY: the GIL is held: thread states are destroyed with it only. One that is made meanwhile, which needs no GIL,
    // is before those that are read.
    unsafe {
        let mut state = (functions.first_thread)(ffi::PyInterpreterState_Get());
        while !state.is_null() {
            all.push(((functions.thread_number)(state), state));
            state = (functions.next_thread)(state);
        }
    }
    all
}

/// Sets the hook on all threads that do not have it, and forgets those that are gone.
#[cold]
fn hook_all<M: Machine>(py: Python<'_>, session: &mut EngineSession<M>) -> PyResult<()> {
    let all = states(py);
    NEWEST.store(all.first().map_or(0, |s| s.0), Ordering::Relaxed);
    session.hooked.numbers.retain(|n| all.iter().any(|s| s.0 == *n));
    for (number, state) in all {
        if !session.hooked.numbers.contains(&number) {
            hook_one(py, session, number, state)?;
        }
    }
    Ok(())
}

fn hook_one<M: Machine>(
    py: Python<'_>,
    session: &mut EngineSession<M>,
    number: u64,
    state: *mut ffi::PyThreadState,
) -> PyResult<()> {
    let functions = objects::check(py)?;
    let owner = session.hooked.owner as Object;
    // SAFETY: a thread state of this interpreter; the GIL is held. The thread that started the session has a reference to
    // the owner, which moreover is alive during `install`.
    if unsafe { (functions.set_profile)(state, Some(hook::<M>), owner) } != 0 {
        return Err(PyErr::fetch(py));
    }
    session.hooked.numbers.push(number);
    if session.hooked.place.is_none() {
        // SAFETY: so many words of a live thread state.
        session.hooked.place = (0..WORDS).find(|i| unsafe { *state.cast::<usize>().add(*i) } == owner as usize);
    }
    Ok(())
}

/// Sets the hook on this thread or on all.
pub(crate) fn install<M: Machine>(
    py: Python<'_>,
    session: &mut EngineSession<M>,
    owner: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let other = py.import("sys")?.call_method0("getprofile")?;
    if !other.is_none() {
        return Err(PyValueError::new_err(format!(
            "Another profiling tool is already active: this thread has a profile hook, {other}. Stop it first."
        )));
    }
    session.hooked = Hooked {
        owner: owner.as_ptr() as usize,
        ..Hooked::default()
    };
    let result = if session.options.current_thread_only {
        let functions = objects::check(py)?;
        // SAFETY: the GIL is held.
        let (number, state) = unsafe {
            let state = ffi::PyThreadState_Get();
            ((functions.thread_number)(state), state)
        };
        hook_one(py, session, number, state)
    } else {
        hook_all(py, session)
    };
    if result.is_err() {
        let _ = remove(py, &std::mem::take(&mut session.hooked));
    }
    result
}

/// Takes the hooks away, but for those that another tool has put in their place.
pub(crate) fn remove(py: Python<'_>, hooked: &Hooked) -> PyResult<()> {
    let functions = objects::check(py)?;
    for (number, state) in states(py) {
        if !hooked.numbers.contains(&number) {
            continue;
        }
        // SAFETY: as in `hook_one`.
        let is_ours = hooked
            .place
            .is_none_or(|i| unsafe { *state.cast::<usize>().add(i) } == hooked.owner);
        // SAFETY: as in `hook_one`.
        if is_ours && unsafe { (functions.set_profile)(state, None, std::ptr::null_mut()) } != 0 {
            return Err(PyErr::fetch(py));
        }
    }
    Ok(())
}
