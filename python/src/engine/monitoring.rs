//! Events from `sys.monitoring` (3.12 and later), by callables that the interpreter enters directly.
//!
//! The callables are objects of a type with a vectorcall slot, so an event reaches [`Machine`] without the dispatch of
//! Python's own built-in functions.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use super::objects::{Builtin, Object};
use super::session::{self, EngineSession};
use super::threads::{ignore, is_without_builtins, thread};
use super::{CallEvent, Callee, EventOutcome, Machine};

/// `vectorcallfunc`. It may unwind: the interpreter ends daemon threads by `pthread_exit` when they want the GIL, which
/// happens in a user's timer. (So nothing is alive in these frames then that would have to be dropped.)
type Vectorcall = unsafe extern "C-unwind" fn(Object, *const Object, usize, Object) -> Object;

/// Identifiers that are tried: that for profilers, and those without a purpose of their own.
const TOOLS: [u8; 3] = [2, 3, 4];

static MISSING: AtomicPtr<ffi::PyObject> = AtomicPtr::new(std::ptr::null_mut());
static DISABLE: AtomicPtr<ffi::PyObject> = AtomicPtr::new(std::ptr::null_mut());
/// Some place has been disabled since the last `restart_events`.
static HAS_DISABLED: AtomicBool = AtomicBool::new(false);
/// Several sessions use the callbacks, each for its own thread: no place can be disabled for one of them.
static IS_SHARED: AtomicBool = AtomicBool::new(false);
/// Not all sessions that have used the callbacks since they were installed want calls of C functions.
static IS_MIXED: AtomicBool = AtomicBool::new(false);

/// Whether several sessions use the callbacks now, and whether the one that starts differs in whether it wants calls of C
/// functions.
pub(crate) fn set_shared(is_shared: bool, is_mixed: bool) {
    IS_SHARED.store(is_shared, Ordering::Relaxed);
    IS_MIXED.fetch_or(is_mixed, Ordering::Relaxed);
}

/// None, which is immortal since 3.12.
#[inline(always)]
fn none() -> Object {
    // SAFETY: the address of a static object.
    unsafe { ffi::Py_None() }
}

/// Makes the interpreter not report this place again.
#[cold]
fn disable() -> Object {
    if IS_SHARED.load(Ordering::Relaxed) {
        return none();
    }
    let object = DISABLE.load(Ordering::Relaxed);
    HAS_DISABLED.store(true, Ordering::Relaxed);
    // SAFETY: set when the callbacks were installed, never freed.
    unsafe { ffi::Py_IncRef(object) };
    object
}

/// PY_START, PY_RESUME, PY_THROW: (code, offset[, exception]).
unsafe extern "C-unwind" fn enter<M: Machine, const EVENT: u8>(
    _: Object,
    arguments: *const Object,
    _: usize,
    _: Object,
) -> Object {
    // SAFETY: callbacks are called with the GIL held, and with at least two arguments; the first is a code object.
    let (py, code) = unsafe { (Python::assume_attached(), *arguments) };
    let event = event(EVENT);
    let Some((thread, given)) = thread::<M>(py, |_| true) else {
        return none();
    };
    let (machine, context) = thread.event(py, event, given);
    match machine.enter(Callee::Code(code), context) {
        EventOutcome::Excluded if event != CallEvent::Throw => disable(),
        _ => none(),
    }
}

/// PY_RETURN, PY_YIELD, PY_UNWIND: (code, offset, value or exception).
unsafe extern "C-unwind" fn leave<M: Machine, const EVENT: u8>(
    _: Object,
    arguments: *const Object,
    _: usize,
    _: Object,
) -> Object {
    // SAFETY: as in `enter`.
    let (py, code) = unsafe { (Python::assume_attached(), *arguments as usize) };
    let event = event(EVENT);
    let Some((thread, given)) = thread::<M>(py, |m| m.is_innermost(code)) else {
        return none();
    };
    let (machine, context) = thread.event(py, event, given);
    match machine.leave(code, context) {
        EventOutcome::Excluded if event != CallEvent::Unwind => disable(),
        _ => none(),
    }
}

/// CALL: (code, offset, callable, first argument or MISSING).
unsafe extern "C-unwind" fn call<M: Machine>(_: Object, arguments: *const Object, _: usize, _: Object) -> Object {
    // SAFETY: as in `enter`; this event has four arguments.
    let (py, code, callable, first) = unsafe {
        (
            Python::assume_attached(),
            *arguments as usize,
            *arguments.add(2),
            *arguments.add(3),
        )
    };
    let Some(builtin) = Builtin::of(callable, first, MISSING.load(Ordering::Relaxed)) else {
        ignore::<M>(py);
        // Calls of C functions are not wanted from there either: without this a program pays for what is left out.
        return match session::running::<M>(py) {
            Some(session) if session.functions.is_excluded(code) => disable(),
            _ => none(),
        };
    };
    if IS_MIXED.load(Ordering::Relaxed) && is_without_builtins::<M>(py) {
        ignore::<M>(py);
        return none();
    }
    let Some((thread, given)) = thread::<M>(py, |_| true) else {
        return none();
    };
    let (machine, context) = thread.event(py, CallEvent::CCall, given);
    if !machine.is_innermost(code) && context.functions.is_excluded(code) {
        return disable();
    }
    machine.enter(Callee::Builtin(builtin), context);
    none()
}

/// C_RETURN, C_RAISE: as CALL.
unsafe extern "C-unwind" fn called<M: Machine, const EVENT: u8>(
    _: Object,
    arguments: *const Object,
    _: usize,
    _: Object,
) -> Object {
    // SAFETY: as in `call`.
    let (py, callable, first) = unsafe { (Python::assume_attached(), *arguments.add(2), *arguments.add(3)) };
    let Some(builtin) = Builtin::of(callable, first, MISSING.load(Ordering::Relaxed)) else {
        ignore::<M>(py);
        return none();
    };
    let key = builtin.key();
    let Some((thread, given)) = thread::<M>(py, |m| m.is_innermost(key)) else {
        return none();
    };
    // A C function that was not entered has nothing to leave, and Python frames do not lie above one that was.
    if !thread.machine.is_innermost(key) {
        return none();
    }
    let (machine, context) = thread.event(py, event(EVENT), given);
    machine.leave(key, context);
    none()
}

#[inline(always)]
const fn event(number: u8) -> CallEvent {
    const ALL: [CallEvent; super::EVENTS] = [
        CallEvent::Start,
        CallEvent::Resume,
        CallEvent::Throw,
        CallEvent::Return,
        CallEvent::Yield,
        CallEvent::Unwind,
        CallEvent::CCall,
        CallEvent::CReturn,
        CallEvent::CRaise,
    ];
    ALL[number as usize]
}

/// Names of the events in `sys.monitoring.events`, what is called for them, and when they are wanted.
fn callbacks<M: Machine>(builtins: bool, returns: bool) -> Vec<(&'static str, Vectorcall)> {
    const START: u8 = CallEvent::Start as u8;
    const RESUME: u8 = CallEvent::Resume as u8;
    const THROW: u8 = CallEvent::Throw as u8;
    const RETURN: u8 = CallEvent::Return as u8;
    const YIELD: u8 = CallEvent::Yield as u8;
    const UNWIND: u8 = CallEvent::Unwind as u8;
    const C_RETURN: u8 = CallEvent::CReturn as u8;
    const C_RAISE: u8 = CallEvent::CRaise as u8;
    let mut all: Vec<(&'static str, Vectorcall)> = vec![("PY_START", enter::<M, START>)];
    if returns {
        all.extend([
            ("PY_RESUME", enter::<M, RESUME> as Vectorcall),
            ("PY_THROW", enter::<M, THROW>),
            ("PY_RETURN", leave::<M, RETURN>),
            ("PY_YIELD", leave::<M, YIELD>),
            ("PY_UNWIND", leave::<M, UNWIND>),
        ]);
    }
    if builtins {
        all.extend([
            ("CALL", call::<M> as Vectorcall),
            ("C_RETURN", called::<M, C_RETURN>),
            ("C_RAISE", called::<M, C_RAISE>),
        ]);
    }
    all
}

/// Takes a tool identifier and registers the callbacks. `shared`: the identifier that sessions of other threads use. `builtins`:
/// one of them or this one wants calls of C functions.
pub(crate) fn install<M: Machine>(
    py: Python<'_>,
    session: &mut EngineSession<M>,
    shared: Option<u8>,
    builtins: bool,
) -> PyResult<()> {
    let monitoring = py.import("sys")?.getattr("monitoring")?;
    if let Some(tool) = shared {
        session.tool = tool;
        return register(py, &monitoring, session, builtins);
    }
    MISSING.store(monitoring.getattr("MISSING")?.into_ptr(), Ordering::Relaxed);
    DISABLE.store(monitoring.getattr("DISABLE")?.into_ptr(), Ordering::Relaxed);
    IS_MIXED.store(false, Ordering::Relaxed);
    let mut taken = Vec::new();
    let mut tool = None;
    for id in TOOLS {
        if monitoring.call_method1("use_tool_id", (id, "nativeprof")).is_ok() {
            tool = Some(id);
            break;
        }
        let name = monitoring.call_method1("get_tool", (id,))?;
        taken.push(format!("{} by {name}", id));
    }
    let Some(tool) = tool else {
        return Err(PyValueError::new_err(format!(
            "Another profiling tool is already active: all identifiers for profilers in sys.monitoring are taken ({}). \
             Stop one of them first.",
            taken.join(", ")
        )));
    };
    session.tool = tool;
    let result = register(py, &monitoring, session, builtins);
    if result.is_err() {
        let _ = remove(py, tool);
    }
    result
}

fn register<M: Machine>(
    py: Python<'_>,
    monitoring: &Bound<'_, PyAny>,
    session: &EngineSession<M>,
    builtins: bool,
) -> PyResult<()> {
    let events = monitoring.getattr("events")?;
    let mut wanted = 0u32;
    for (name, call) in callbacks::<M>(builtins, session.options.returns) {
        let event: u32 = events.getattr(name)?.extract()?;
        monitoring.call_method1("register_callback", (session.tool, event, callable(py, call)?))?;
        wanted |= event;
    }
    if HAS_DISABLED.swap(false, Ordering::Relaxed) {
        monitoring.call_method0("restart_events")?;
    }
    monitoring.call_method1("set_events", (session.tool, wanted))?;
    Ok(())
}

/// Takes the callbacks away and gives the identifier back. Late in the interpreter's end there may be nothing to undo.
pub(crate) fn remove(py: Python<'_>, tool: u8) -> PyResult<()> {
    let monitoring = py.import("sys")?.getattr("monitoring")?;
    monitoring.call_method1("set_events", (tool, 0))?;
    let events = monitoring.getattr("events")?;
    for name in [
        "PY_START",
        "PY_RESUME",
        "PY_THROW",
        "PY_RETURN",
        "PY_YIELD",
        "PY_UNWIND",
        "CALL",
        "C_RETURN",
        "C_RAISE",
    ] {
        monitoring.call_method1("register_callback", (tool, events.getattr(name)?, py.None()))?;
    }
    monitoring.call_method1("free_tool_id", (tool,))?;
    Ok(())
}

#[repr(C)]
struct Callable {
    references: isize,
    kind: *mut ffi::PyTypeObject,
    call: Vectorcall,
}

/// An object that calls `call`.
fn callable(py: Python<'_>, call: Vectorcall) -> PyResult<Bound<'_, PyAny>> {
    let kind = callable_type(py)?;
    // SAFETY: a type whose instances are as large as `Callable`, and whose third word is read as its function.
    unsafe {
        let object = Bound::from_owned_ptr_or_err(py, ffi::PyType_GenericAlloc(kind.as_ptr().cast(), 0))?;
        (*object.as_ptr().cast::<Callable>()).call = call;
        Ok(object)
    }
}

/// The type of these objects, made once.
fn callable_type(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    static TYPE: pyo3::sync::PyOnceLock<Py<PyAny>> = pyo3::sync::PyOnceLock::new();
    const NAME: &CStr = c"nativeprof._native.EventCallback";
    /// Flags of `Include/object.h`, 3.12: they are not in the limited API of earlier versions.
    const HAVE_VECTORCALL: c_uint = 1 << 11;
    const DISALLOW_INSTANTIATION: c_uint = 1 << 7;
    const IMMUTABLE: c_uint = 1 << 8;
    const DEFAULT: c_uint = 0;
    /// `T_PYSSIZET` and `READONLY` of `structmember.h`.
    const SIZE: c_int = 19;
    const READ_ONLY: c_int = 1;
    TYPE.get_or_try_init(py, || {
        // SAFETY: the specification and all that it refers to is valid during the call, which copies it.
        unsafe {
            let vectorcall = libc::dlsym(libc::RTLD_DEFAULT, c"PyVectorcall_Call".as_ptr());
            if vectorcall.is_null() {
                return Err(PyRuntimeError::new_err(
                    "this interpreter does not export PyVectorcall_Call",
                ));
            }
            let mut members: [ffi::PyMemberDef; 2] = std::mem::zeroed();
            members[0].name = c"__vectorcalloffset__".as_ptr();
            members[0].type_code = SIZE;
            members[0].offset = std::mem::offset_of!(Callable, call) as ffi::Py_ssize_t;
            members[0].flags = READ_ONLY;
            let mut slots = [
                ffi::PyType_Slot {
                    slot: ffi::Py_tp_call,
                    pfunc: vectorcall,
                },
                ffi::PyType_Slot {
                    slot: ffi::Py_tp_members,
                    pfunc: members.as_mut_ptr().cast::<c_void>(),
                },
                ffi::PyType_Slot {
                    slot: 0,
                    pfunc: std::ptr::null_mut(),
                },
            ];
            let mut spec = ffi::PyType_Spec {
                name: NAME.as_ptr(),
                basicsize: size_of::<Callable>() as c_int,
                itemsize: 0,
                flags: DEFAULT | HAVE_VECTORCALL | DISALLOW_INSTANTIATION | IMMUTABLE,
                slots: slots.as_mut_ptr(),
            };
            Bound::from_owned_ptr_or_err(py, ffi::PyType_FromSpec(&mut spec)).map(Bound::unbind)
        }
    })
    .map(|kind| kind.bind(py).clone())
}
