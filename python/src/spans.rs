//! `nativeprof.span`: marks what a program works on, for samples from within the process and from outside.
//!
//! The active span is the value of a context variable, so that it belongs to a task, a greenlet or a thread as the
//! interpreter itself switches contexts; entering and leaving a span sets the variable, and nothing else runs. The
//! value is a tuple of a record, which profilers read (`nativeprof::cpython::spans`), the value that it replaced, and
//! the span. Where the variable is found from a thread state is measured once, when the module is imported, and
//! published in [`PUBLISHED`]. What needs no measurement is assumed, checked by reading the variable as a profiler
//! does, and not published if that fails: spans do nothing then.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use nativeprof::cpython::spans::{self, WORDS};
use nativeprof::cpython_layout::SpanLocation;
use nativeprof::process::memory::Memory;
use nativeprof::process::system::{LiveSystem, ProcessMemory};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyString, PyTuple};

/// Bytes of a record, at most: profilers read no more.
const MAX_RECORD: usize = 0x1ff;

/// What profilers read, in a section of its own, by which they find it.
#[unsafe(link_section = ".nativeprof_spans")]
#[used]
static PUBLISHED: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

/// Functions of the interpreter that are not part of its stable interface, but the same in every version from 3.7.1 on.
struct Api {
    new_variable: NewVariable,
    get: Get,
    set: Set,
    new_context: NewContext,
    enter: Switch,
    exit: Switch,
}

// Include/cpython/context.h and Include/context.h, v3.9 to v3.15.
type NewVariable = unsafe extern "C" fn(*const c_char, *mut ffi::PyObject) -> *mut ffi::PyObject;
type Get = unsafe extern "C" fn(*mut ffi::PyObject, *mut ffi::PyObject, *mut *mut ffi::PyObject) -> c_int;
type Set = unsafe extern "C" fn(*mut ffi::PyObject, *mut ffi::PyObject) -> *mut ffi::PyObject;
type NewContext = unsafe extern "C" fn() -> *mut ffi::PyObject;
type Switch = unsafe extern "C" fn(*mut ffi::PyObject) -> c_int;

fn function(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a name that ends with a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

impl Api {
    fn find() -> Option<Api> {
        // SAFETY: the functions have these signatures.
        unsafe {
            Some(Api {
                new_variable: transmute::<*mut c_void, NewVariable>(function(c"PyContextVar_New")?),
                get: transmute::<*mut c_void, Get>(function(c"PyContextVar_Get")?),
                set: transmute::<*mut c_void, Set>(function(c"PyContextVar_Set")?),
                new_context: transmute::<*mut c_void, NewContext>(function(c"PyContext_New")?),
                enter: transmute::<*mut c_void, Switch>(function(c"PyContext_Enter")?),
                exit: transmute::<*mut c_void, Switch>(function(c"PyContext_Exit")?),
            })
        }
    }

    fn variable<'py>(&self, py: Python<'py>, name: &CStr) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: returns a new reference, or null with an exception.
        unsafe { Bound::from_owned_ptr_or_err(py, (self.new_variable)(name.as_ptr(), ptr::null_mut())) }
    }

    /// The variable's value in the current context.
    fn get<'py>(&self, variable: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let mut value = ptr::null_mut();
        // SAFETY: a context variable; the value is a new reference, or null.
        unsafe {
            match (self.get)(variable.as_ptr(), ptr::null_mut(), &raw mut value) {
                0 => Ok(Bound::from_owned_ptr_or_opt(variable.py(), value)),
                _ => Err(PyErr::fetch(variable.py())),
            }
        }
    }

    fn set(&self, variable: &Bound<'_, PyAny>, value: *mut ffi::PyObject) -> PyResult<()> {
        // SAFETY: a context variable, and an object; returns a new reference, or null with an exception.
        unsafe { Bound::from_owned_ptr_or_err(variable.py(), (self.set)(variable.as_ptr(), value)).map(drop) }
    }

    /// Calls a function in a new, empty context; with the context's address.
    fn in_context<T>(&self, py: Python<'_>, inner: impl FnOnce(u64) -> PyResult<T>) -> PyResult<T> {
        // SAFETY: returns a new reference, or null with an exception; a context that is entered is left again.
        unsafe {
            let context = Bound::from_owned_ptr_or_err(py, (self.new_context)())?;
            if (self.enter)(context.as_ptr()) != 0 {
                return Err(PyErr::fetch(py));
            }
            let result = inner(context.as_ptr() as u64);
            if (self.exit)(context.as_ptr()) != 0 {
                return Err(PyErr::fetch(py));
            }
            result
        }
    }
}

struct ContextVariable {
    api: Api,
    object: Py<PyAny>,
}

static VARIABLE: PyOnceLock<Option<ContextVariable>> = PyOnceLock::new();

fn variable(py: Python<'_>) -> PyResult<Option<&'static ContextVariable>> {
    let made = VARIABLE.get_or_try_init(py, || {
        let Some(api) = Api::find() else { return Ok(None) };
        let object = api.variable(py, c"nativeprof.span")?.unbind();
        Ok::<_, PyErr>(Some(ContextVariable { api, object }))
    });
    made.map(Option::as_ref)
}

/// Words of a thread state that are searched for its context.
const STATE_WORDS: u16 = 256;
/// Variables in a context whose mapping has an array node at its root, which begins at 17.
const LARGE_CONTEXT: usize = 40;

/// Publishes where the variable is found. Called when the module is imported.
pub fn publish(py: Python<'_>) -> PyResult<()> {
    let Some(known) = variable(py)? else { return Ok(()) };
    let memory = ProcessMemory(&LiveSystem, std::process::id());
    if let Some(location) = measure(py, known, &memory)? {
        let words = spans::publication(&location);
        for at in (0..WORDS).filter(|at| *at != 1) {
            PUBLISHED[at].store(words[at], Ordering::Relaxed);
        }
        fence(Ordering::Release);
        PUBLISHED[1].store(words[1], Ordering::Release);
    }
    Ok(())
}

fn measure(py: Python<'_>, known: &ContextVariable, memory: &dyn Memory) -> PyResult<Option<SpanLocation>> {
    let ContextVariable { api, object } = known;
    let variable = object.bind(py);
    let header = py.get_type::<PyAny>().getattr("__basicsize__")?.extract::<u16>()?;
    let record = PyBytes::new(py, &[0, 1, b'x']);
    let value = PyTuple::new(py, [record.as_any(), py.None().bind(py), py.None().bind(py)])?;
    // SAFETY: this thread has a thread state.
    let state = unsafe { ffi::PyThreadState_Get() } as u64;
    let word_with = |object: u64, word: u64, from: u16, count: u16| {
        let at = (0..count).map(|at| from + 8 * at);
        let mut at = at.filter(|at| memory.u64(object.saturating_add(u64::from(*at))) == Some(word));
        at.next()
    };
    let context = |py| api.in_context(py, |context| Ok(word_with(state, context, 0, STATE_WORDS)));
    let (Some(context), true) = (context(py)?, context(py)? == context(py)?) else {
        return Ok(None);
    };
    let root_type = |count: usize| {
        api.in_context(py, |context| {
            for _ in 0..count {
                api.set(&api.variable(py, c"x")?, value.as_ptr())?;
            }
            Ok(spans::root(memory, context, header).and_then(|root| spans::type_of(memory, root, header)))
        })
    };
    let data = record.as_bytes().as_ptr() as u64;
    let (Some(bitmap_node), Some(array_node), Some(item)) = (
        root_type(1)?,
        root_type(LARGE_CONTEXT)?,
        word_with(value.as_ptr() as u64, record.as_ptr() as u64, header, 4),
    ) else {
        return Ok(None);
    };
    let location = SpanLocation {
        variable: variable.as_ptr() as u64,
        hash: folded(variable.hash()?),
        bitmap_node,
        array_node,
        context,
        header,
        item,
        data: u16::try_from(data.wrapping_sub(record.as_ptr() as u64)).unwrap_or(0),
    };
    // As a profiler reads it: in a small context, and in a large one.
    for count in [0, LARGE_CONTEXT] {
        let read = api.in_context(py, |_| {
            for _ in 0..count {
                api.set(&api.variable(py, c"x")?, value.as_ptr())?;
            }
            let before = spans::active(memory, &location, state);
            api.set(variable, value.as_ptr())?;
            Ok((before, spans::active(memory, &location, state)))
        })?;
        if read != (None, Some((data, 3))) {
            return Ok(None);
        }
    }
    Ok(Some(location))
}

/// The hash of an object as mappings of contexts have it (`hamt_hash`, Python/hamt.c, v3.9 to v3.15).
fn folded(hash: isize) -> u32 {
    match hash as u32 ^ (hash as u64 >> 32) as u32 {
        u32::MAX => u32::MAX - 1,
        hash => hash,
    }
}

/// What samples are labeled with while it is active.
#[pyclass(name = "span", module = "nativeprof", frozen)]
pub struct Span {
    name: Py<PyString>,
    /// Its own part of a record.
    record: Vec<u8>,
}

#[pymethods]
impl Span {
    #[new]
    #[pyo3(signature = (name, /, **labels))]
    fn new(name: Bound<'_, PyString>, labels: Option<&Bound<'_, PyDict>>) -> PyResult<Span> {
        let mut record = Vec::new();
        spans::write_label(spans::NAME, &name.to_cow()?, &mut record);
        for (key, value) in labels.into_iter().flatten() {
            let key = key.cast::<PyString>()?.to_cow()?;
            if key == spans::NAME {
                return Err(PyTypeError::new_err(
                    "the label `span` is the name of the span: span(NAME, KEY=VALUE)",
                ));
            }
            spans::write_label(&key, &value.str()?.to_cow()?, &mut record);
        }
        record.truncate(spans::labels_within(&record, MAX_RECORD));
        Ok(Span {
            name: name.unbind(),
            record,
        })
    }

    fn __enter__<'py>(slf: Bound<'py, Self>) -> PyResult<Bound<'py, Self>> {
        let py = slf.py();
        let Some(ContextVariable { api, object }) = variable(py)? else {
            return Ok(slf);
        };
        let variable = object.bind(py);
        let outer = api.get(variable)?;
        let outer = outer.filter(|outer| !outer.is_none());
        let own = &slf.get().record;
        let record = match outer.as_ref().map(|outer| span_parts(outer)).transpose()? {
            None => PyBytes::new(py, own),
            Some((record, ..)) => {
                let record = record.cast::<PyBytes>()?.as_bytes();
                // What does not fit is of the outermost spans.
                let fit = spans::labels_within(record, MAX_RECORD - own.len());
                PyBytes::new_with(py, own.len() + fit, |to| {
                    to[..own.len()].copy_from_slice(own);
                    to[own.len()..].copy_from_slice(&record[..fit]);
                    Ok(())
                })?
            }
        };
        let outer = outer.unwrap_or_else(|| py.None().into_bound(py));
        let value = PyTuple::new(py, [record.as_any(), &outer, slf.as_any()])?;
        api.set(variable, value.as_ptr())?;
        Ok(slf)
    }

    /// Leaves the span: the one around it is active again. Left in another context than it was entered in, such as that of a task
    /// that closes a generator, it changes nothing.
    #[pyo3(signature = (*_exception))]
    fn __exit__(slf: &Bound<'_, Self>, _exception: &Bound<'_, PyTuple>) -> PyResult<bool> {
        let py = slf.py();
        let Some(ContextVariable { api, object }) = variable(py)? else {
            return Ok(false);
        };
        let variable = object.bind(py);
        let mut value = api.get(variable)?;
        while let Some(active) = value.filter(|value| !value.is_none()) {
            let (_, outer, span) = span_parts(&active)?;
            if span.is(slf) {
                api.set(variable, outer.as_ptr())?;
                break;
            }
            value = Some(outer);
        }
        Ok(false)
    }

    fn __call__(slf: Bound<'_, Self>, function: Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let decorate = slf.py().import("nativeprof._spans")?.getattr("decorate")?;
        Ok(decorate.call1((slf, function))?.unbind())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("<nativeprof.span {}>", self.name.bind(py).repr()?))
    }
}

type SpanParts<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Record, the value that it replaced, and the span.
fn span_parts<'py>(value: &Bound<'py, PyAny>) -> PyResult<SpanParts<'py>> {
    let value = value.cast::<PyTuple>()?;
    Ok((value.get_item(0)?, value.get_item(1)?, value.get_item(2)?))
}

/// The labels that samples of this thread have now, outermost first: for tests and for log messages.
#[pyfunction]
pub fn current_labels(py: Python<'_>) -> PyResult<Vec<(String, String)>> {
    let Some(ContextVariable { api, object }) = variable(py)? else {
        return Ok(Vec::new());
    };
    match api.get(object.bind(py))?.filter(|value| !value.is_none()) {
        Some(value) => Ok(spans::labels(span_parts(&value)?.0.cast::<PyBytes>()?.as_bytes())),
        None => Ok(Vec::new()),
    }
}

/// Whether profilers can read the spans of this process.
#[pyfunction]
pub fn spans_are_published() -> bool {
    PUBLISHED[1].load(Ordering::Acquire) == 1
}
