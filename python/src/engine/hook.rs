//! Events from the C profile hook (before 3.12), set on every thread.
//!
//! The object that the interpreter passes to the hook belongs to one thread and leads to its machine. New threads get
//! theirs when the C function that made them returns, before they run: a new thread state stands first in the list.

use std::ffi::{CStr, c_int, c_uint};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::objects::{self, Builtin, Object};
use super::session::{self, Session};
use super::threads::{self, Thread};
use super::{Callee, Event, Machine, ThreadInfo};

/// `what` of the hook (`Include/cpython/pystate.h`).
const CALL: c_int = 0;
const RETURN: c_int = 3;
const C_CALL: c_int = 4;
const C_EXCEPTION: c_int = 5;
const C_RETURN: c_int = 6;

/// The newest thread state when the list was last read.
static NEWEST: AtomicUsize = AtomicUsize::new(0);

/// Belongs to the thread state of one thread.
#[repr(C)]
struct Holder {
    references: isize,
    kind: *mut ffi::PyTypeObject,
    /// The thread, or null when its session has stopped.
    thread: *mut std::ffi::c_void,
    /// Where the thread keeps the address of this.
    back: *mut usize,
    /// Set when the thread state is destroyed. Owned, as `Arc::into_raw` gives it.
    ended: *const AtomicBool,
}

unsafe extern "C" fn hook<M: Machine>(holder: Object, frame: Object, what: c_int, argument: Object) -> c_int {
    // SAFETY: the hook is called with the GIL held, and with the object that it was set with.
    let (py, found) = unsafe {
        (
            Python::assume_attached(),
            (*holder.cast::<Holder>()).thread.cast::<Thread<M>>(),
        )
    };
    if found.is_null() {
        return 0;
    }
    // SAFETY: threads live as long as a holder refers to them; nothing else refers to this one now.
    let thread = unsafe { &mut *found };
    if !thread.has_run {
        first_event(py, found);
    }
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
                let Some((thread, given)) = timed(py, thread, holder, |_| true) else {
                    return 0;
                };
                let (machine, context) = thread.event(py, Event::Start, given);
                machine.enter(Callee::Code(code), context);
            } else {
                let key = code as usize;
                let Some((thread, given)) = timed(py, thread, holder, |m| m.is_innermost(key)) else {
                    return 0;
                };
                let (machine, context) = thread.event(py, Event::Return, given);
                machine.leave(key, context);
            }
        }
        C_CALL | C_RETURN | C_EXCEPTION => c_event(py, thread, holder, what, argument),
        _ => {}
    }
    0
}

#[inline(always)]
fn c_event<M: Machine>(py: Python<'_>, thread: &mut Thread<M>, holder: Object, what: c_int, argument: Object) {
    if what != C_CALL {
        look_for_threads::<M>(py);
    }
    // SAFETY: a thread's session outlives it.
    if !unsafe { (*thread.session).options.builtins } {
        return;
    }
    let Some(builtin) = Builtin::of(argument, std::ptr::null_mut(), std::ptr::null_mut()) else {
        return;
    };
    let key = builtin.key();
    if what == C_CALL {
        let Some((thread, given)) = timed(py, thread, holder, |_| true) else {
            return;
        };
        let (machine, context) = thread.event(py, Event::CCall, given);
        machine.enter(Callee::Builtin(builtin), context);
    } else {
        if !thread.machine.is_innermost(key) {
            return;
        }
        let Some((thread, given)) = timed(py, thread, holder, |m| m.is_innermost(key)) else {
            return;
        };
        let event = if what == C_RETURN {
            Event::CReturn
        } else {
            Event::CRaise
        };
        let (machine, context) = thread.event(py, event, given);
        machine.leave(key, context);
    }
}

/// The thread again, and the time by the user's clock if there is one and `wants_time` says that the event needs it.
#[inline(always)]
fn timed<'a, M: Machine>(
    py: Python<'_>,
    thread: &'a mut Thread<M>,
    holder: Object,
    wants_time: impl Fn(&M) -> bool,
) -> Option<(&'a mut Thread<M>, Option<i64>)> {
    if !thread.is_timed_by_user {
        return Some((thread, None));
    }
    if !wants_time(&thread.machine) {
        return Some((thread, Some(0)));
    }
    // The hook may be taken away while the timer runs, and its object with it.
    // SAFETY: a live object.
    unsafe { ffi::Py_IncRef(holder) };
    let time = session::read_timer_of_running::<M>(py);
    // SAFETY: as above; the reference was taken above.
    let found = unsafe {
        let found = (*holder.cast::<Holder>()).thread.cast::<Thread<M>>();
        ffi::Py_DecRef(holder);
        found.as_mut()
    };
    Some((found?, Some(time?)))
}

#[cold]
fn first_event<M: Machine>(py: Python<'_>, thread: *mut Thread<M>) {
    if let Some(session) = session::running::<M>(py) {
        threads::adopt(thread, session.number);
    }
}

/// Sets the hook on threads that have come since the last time.
#[inline(always)]
fn look_for_threads<M: Machine>(py: Python<'_>) {
    let Some(functions) = objects::functions() else { return };
    // SAFETY: the GIL is held; the newest thread state of this interpreter.
    let newest = unsafe { (functions.first_thread)(ffi::PyInterpreterState_Get()) as usize };
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

/// All thread states of this interpreter.
fn states(_: Python<'_>) -> Vec<*mut ffi::PyThreadState> {
    let mut all = Vec::new();
    let Some(functions) = objects::functions() else {
        return all;
    };
    // SAFETY: the GIL is held: thread states are destroyed with it only. One that is made meanwhile, which needs no GIL,
    // stands before those that are read.
    unsafe {
        let mut state = (functions.first_thread)(ffi::PyInterpreterState_Get());
        while !state.is_null() {
            all.push(state);
            state = (functions.next_thread)(state);
        }
    }
    all
}

/// Sets the hook on all threads that do not have it.
#[cold]
fn hook_all<M: Machine>(py: Python<'_>, session: &mut Session<M>) -> PyResult<()> {
    let all = states(py);
    NEWEST.store(all.first().map_or(0, |s| *s as usize), Ordering::Relaxed);
    all.into_iter().try_for_each(|state| hook_one(py, session, state))
}

fn hook_one<M: Machine>(py: Python<'_>, session: &mut Session<M>, state: *mut ffi::PyThreadState) -> PyResult<()> {
    let functions = objects::check(py)?;
    // SAFETY: a thread state of this interpreter; the GIL is held. No two ever have the same number.
    let number = unsafe { (functions.thread_number)(state) };
    let known = session
        .threads
        .iter_mut()
        .find(|t| t.state == number && !t.ended.load(Ordering::Acquire));
    let thread = match known {
        Some(thread) if thread.holder != 0 => return Ok(()),
        Some(thread) => &raw mut **thread,
        None => {
            let thread = session.add_thread(py, ThreadInfo::default(), Arc::new(AtomicBool::new(false)));
            // SAFETY: just added.
            unsafe {
                (*thread).state = number;
                (*thread).has_run = false;
            }
            thread
        }
    };
    let holder = holder(py, thread)?;
    // SAFETY: as above. The interpreter keeps a reference to the holder.
    if unsafe { (functions.set_profile)(state, Some(hook::<M>), holder.as_ptr()) } != 0 {
        return Err(PyErr::fetch(py));
    }
    Ok(())
}

/// Sets the hook on this thread or on all.
pub(crate) fn install<M: Machine>(py: Python<'_>, session: &mut Session<M>) -> PyResult<()> {
    let other = py.import("sys")?.call_method0("getprofile")?;
    if !other.is_none() {
        return Err(PyValueError::new_err(format!(
            "Another profiling tool is already active: this thread has a profile hook, {other}. Stop it first."
        )));
    }
    NEWEST.store(0, Ordering::Relaxed);
    let result = if session.options.current_thread_only {
        // SAFETY: the GIL is held.
        hook_one(py, session, unsafe { ffi::PyThreadState_Get() })
    } else {
        hook_all(py, session)
    };
    if result.is_err() {
        let _ = remove(py, session);
    }
    result
}

/// Takes the hooks away.
pub(crate) fn remove<M: Machine>(py: Python<'_>, session: &mut Session<M>) -> PyResult<()> {
    let functions = objects::check(py)?;
    let mut hooked = Vec::new();
    for thread in &mut session.threads {
        // SAFETY: the holder lives: it takes its address away when it ends.
        if let Some(holder) = unsafe { (thread.holder as *mut Holder).as_mut() } {
            release(holder);
            hooked.push(thread.state);
        }
    }
    for state in states(py) {
        // SAFETY: as in `hook_one`.
        let failed = unsafe {
            hooked.contains(&(functions.thread_number)(state))
                && (functions.set_profile)(state, None, std::ptr::null_mut()) != 0
        };
        if failed {
            return Err(PyErr::fetch(py));
        }
    }
    Ok(())
}

/// Parts a holder from its thread, which goes on living.
fn release(holder: &mut Holder) {
    holder.thread = std::ptr::null_mut();
    // SAFETY: both are valid as long as the holder has a thread.
    unsafe {
        *holder.back = 0;
        drop(Arc::from_raw(holder.ended));
    }
    holder.ended = std::ptr::null();
}

unsafe extern "C" fn destroy(object: Object) {
    // SAFETY: a holder that nothing refers to any more; its type is referred to by each instance.
    unsafe {
        let holder = object.cast::<Holder>();
        if !(*holder).thread.is_null() {
            // The thread state is being destroyed, or another tool has set its own hook.
            (*(*holder).ended).store(true, Ordering::Release);
            release(&mut *holder);
        }
        // Another thread state may take the address of this one.
        NEWEST.store(0, Ordering::Relaxed);
        let kind = (*holder).kind;
        ffi::PyObject_Free(object.cast());
        ffi::Py_DecRef(kind.cast());
    }
}

fn holder<M: Machine>(py: Python<'_>, thread: *mut Thread<M>) -> PyResult<Bound<'_, PyAny>> {
    static TYPE: pyo3::sync::PyOnceLock<Py<PyAny>> = pyo3::sync::PyOnceLock::new();
    const NAME: &CStr = c"nativeprof._native.ThreadHook";
    const DEFAULT: c_uint = 1 << 18; // Py_TPFLAGS_HAVE_VERSION_TAG, all that 3.9's default has
    let kind = TYPE.get_or_try_init(py, || {
        let mut slots = [
            ffi::PyType_Slot {
                slot: ffi::Py_tp_dealloc,
                pfunc: destroy as unsafe extern "C" fn(Object) as *mut std::ffi::c_void,
            },
            ffi::PyType_Slot {
                slot: 0,
                pfunc: std::ptr::null_mut(),
            },
        ];
        let mut spec = ffi::PyType_Spec {
            name: NAME.as_ptr(),
            basicsize: size_of::<Holder>() as c_int,
            itemsize: 0,
            flags: DEFAULT,
            slots: slots.as_mut_ptr(),
        };
        // SAFETY: the specification is valid during the call, which copies it.
        unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyType_FromSpec(&mut spec)).map(Bound::unbind) }
    })?;
    // SAFETY: instances are as large as `Holder`. The thread outlives it, or parts from it first.
    unsafe {
        let object = Bound::from_owned_ptr_or_err(py, ffi::PyType_GenericAlloc(kind.as_ptr().cast(), 0))?;
        let place = object.as_ptr().cast::<Holder>();
        (*place).thread = thread.cast();
        (*place).back = &raw mut (*thread).holder;
        (*place).ended = Arc::into_raw((*thread).ended.clone());
        (*thread).holder = place as usize;
        Ok(object)
    }
}
