//! What the engine reads of CPython's objects beyond the limited API, and functions that it finds by name.
//!
//! One wheel serves 3.9 and later, so nothing here depends on headers. Layouts are those of `PyCFunctionObject` and
//! `PyMethodDescrObject` (`Include/cpython/methodobject.h`, `descrobject.h`: unchanged from 3.9 to 3.15); [`check`]
//! compares their sizes and one known name before an engine starts.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi::{self, PyObject, PyTypeObject};
use pyo3::prelude::*;

use super::own;

/// A borrowed object.
pub type Object = *mut PyObject;

#[repr(C)]
struct ObjectHead {
    references: isize,
    kind: *mut PyTypeObject,
}

#[repr(C)]
struct CFunction {
    head: ObjectHead,
    method: *const ffi::PyMethodDef,
    owner: Object,
    module: Object,
    weak: Object,
    call: *const c_void,
}

#[repr(C)]
struct MethodDescriptor {
    head: ObjectHead,
    kind: *mut PyTypeObject,
    name: Object,
    qualified: Object,
    method: *const ffi::PyMethodDef,
    call: *const c_void,
}

/// `int (*)(PyObject *obj, PyFrameObject *frame, int what, PyObject *arg)`. It may unwind, like the callbacks of
/// [`super::monitoring`].
pub type TraceFunction = unsafe extern "C-unwind" fn(Object, Object, c_int, Object) -> c_int;

/// Functions of the interpreter that the limited API does not have.
pub struct InternalApi {
    /// `PyCMethod_Type`: functions that know their class (3.9).
    c_method: *mut PyTypeObject,
    type_lookup: unsafe extern "C" fn(*mut PyTypeObject, Object) -> Object,
    dictionary: unsafe extern "C" fn(Object, *mut c_void) -> Object,
    /// `PyObject_CallNoArgs`. Unwinds where the interpreter ends a daemon thread.
    pub call: unsafe extern "C-unwind" fn(Object) -> Object,
    /// `Py_DecRef`. Unwinds as `call` does.
    pub release: unsafe extern "C-unwind" fn(Object),
    /// `PyFrame_GetCode`: a new reference.
    pub frame_code: unsafe extern "C" fn(Object) -> Object,
    /// `PyFrame_GetLasti`, from 3.11 on: what the attribute `f_lasti` gives.
    frame_lasti: Option<unsafe extern "C" fn(Object) -> c_int>,
    /// `PyInterpreterState_ThreadHead`, `PyThreadState_Next`: the thread states of an interpreter, the newest first.
    pub first_thread: unsafe extern "C" fn(*mut ffi::PyInterpreterState) -> *mut ffi::PyThreadState,
    pub next_thread: unsafe extern "C" fn(*mut ffi::PyThreadState) -> *mut ffi::PyThreadState,
    /// `PyThreadState_GetID`: no two thread states of a process have the same.
    pub thread_number: unsafe extern "C" fn(*mut ffi::PyThreadState) -> u64,
    /// `_PyEval_SetProfile`: sets the profile hook of any thread; the caller holds the GIL.
    pub set_profile: unsafe extern "C" fn(*mut ffi::PyThreadState, Option<TraceFunction>, Object) -> c_int,
}

// SAFETY: addresses of code and of a static type, which never change.
unsafe impl Send for InternalApi {}
// SAFETY: as above.
unsafe impl Sync for InternalApi {}

static FUNCTIONS: OnceLock<InternalApi> = OnceLock::new();

fn symbol(name: &CStr) -> PyResult<*mut c_void> {
    // SAFETY: a name that ends in a zero byte.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    if address.is_null() {
        let text = name.to_string_lossy();
        return Err(PyRuntimeError::new_err(format!(
            "this interpreter does not export {text}: its calls cannot be traced"
        )));
    }
    Ok(address)
}

/// Finds the functions and checks the layouts, once. To be called before anything else of this module.
///
/// Raises RuntimeError if this interpreter is not one that the layouts hold for.
pub fn check(py: Python<'_>) -> PyResult<&'static InternalApi> {
    if let Some(known) = FUNCTIONS.get() {
        return Ok(known);
    }
    let builtins = py.import("builtins")?;
    let (function, descriptor) = (builtins.getattr("len")?, builtins.getattr("list")?.getattr("append")?);
    for (object, size) in [
        (&function, size_of::<CFunction>()),
        (&descriptor, size_of::<MethodDescriptor>()),
    ] {
        let found: usize = object.get_type().getattr("__basicsize__")?.extract()?;
        if found != size {
            return Err(unknown_layout());
        }
    }
    // SAFETY: the sizes of both objects are those of the structures.
    let names = unsafe {
        let first = (*function.as_ptr().cast::<CFunction>()).method;
        let second = (*descriptor.as_ptr().cast::<MethodDescriptor>()).method;
        [CStr::from_ptr((*first).ml_name), CStr::from_ptr((*second).ml_name)]
    };
    if names != [c"len", c"append"] {
        return Err(unknown_layout());
    }
    // SAFETY: the types are those of CPython's headers for these names, from 3.9 to 3.15 (`set_profile`: to 3.11, the
    // only versions in which it is called).
    let functions = unsafe {
        InternalApi {
            c_method: symbol(c"PyCMethod_Type")?.cast(),
            type_lookup: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut PyTypeObject, Object) -> Object>(
                symbol(c"_PyType_Lookup")?,
            ),
            dictionary: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(Object, *mut c_void) -> Object>(
                symbol(c"PyObject_GenericGetDict")?,
            ),
            call: std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn(Object) -> Object>(symbol(
                c"PyObject_CallNoArgs",
            )?),
            release: std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn(Object)>(symbol(c"Py_DecRef")?),
            frame_code: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(Object) -> Object>(symbol(
                c"PyFrame_GetCode",
            )?),
            frame_lasti: symbol(c"PyFrame_GetLasti")
                .ok()
                .map(|f| std::mem::transmute::<*mut c_void, unsafe extern "C" fn(Object) -> c_int>(f)),
            first_thread: std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn(*mut ffi::PyInterpreterState) -> *mut ffi::PyThreadState,
            >(symbol(c"PyInterpreterState_ThreadHead")?),
            next_thread: std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn(*mut ffi::PyThreadState) -> *mut ffi::PyThreadState,
            >(symbol(c"PyThreadState_Next")?),
            thread_number: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut ffi::PyThreadState) -> u64>(
                symbol(c"PyThreadState_GetID")?,
            ),
            set_profile: std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn(*mut ffi::PyThreadState, Option<TraceFunction>, Object) -> c_int,
            >(symbol(c"_PyEval_SetProfile")?),
        }
    };
    Ok(FUNCTIONS.get_or_init(|| functions))
}

fn unknown_layout() -> PyErr {
    PyRuntimeError::new_err(
        "this interpreter lays out its function objects in an unknown way: its calls cannot be traced",
    )
}

/// The functions, once [`check`] has found them.
pub fn functions() -> Option<&'static InternalApi> {
    FUNCTIONS.get()
}

#[inline(always)]
pub fn kind(object: Object) -> *mut PyTypeObject {
    // SAFETY: a live object begins with its count and its type, in every build that has a GIL.
    unsafe { (*object.cast::<ObjectHead>()).kind }
}

/// A call of a function that is written in C.
#[derive(Clone, Copy)]
pub struct Builtin {
    method: *const ffi::PyMethodDef,
    /// What it is bound to, or null.
    owner: Object,
    module: Object,
}

impl Builtin {
    /// If `callable` is a C function or a method descriptor that is called with its object: what `cProfile` counts.
    /// `first` is the first argument; `missing` represents none.
    #[inline(always)]
    pub fn of(callable: Object, first: Object, missing: Object) -> Option<Builtin> {
        let kind = kind(callable);
        if kind == &raw mut ffi::PyCFunction_Type {
            return Some(Builtin::bound(callable));
        }
        if kind == &raw mut ffi::PyMethodDescr_Type {
            // SAFETY: the type says what the object is.
            let (expected, method) = unsafe {
                let descriptor = callable.cast::<MethodDescriptor>();
                ((*descriptor).kind, (*descriptor).method)
            };
            if first == missing || !is_instance(first, expected) {
                return None;
            }
            return Some(Builtin {
                method,
                owner: first,
                module: std::ptr::null_mut(),
            });
        }
        FUNCTIONS
            .get()
            .is_some_and(|f| kind == f.c_method)
            .then(|| Builtin::bound(callable))
    }

    /// `function` is a `PyCFunction`.
    #[inline(always)]
    fn bound(function: Object) -> Builtin {
        // SAFETY: the caller has checked its type.
        let function = unsafe { &*function.cast::<CFunction>() };
        Builtin {
            method: function.method,
            owner: function.owner,
            module: function.module,
        }
    }

    /// The same for all objects that a method is bound to.
    #[inline(always)]
    pub fn key(&self) -> usize {
        self.method as usize
    }

    /// The text that `cProfile` shows: `<built-in method builtins.len>`, `<method 'append' of 'list' objects>`.
    /// (`normalizeUserObj` of `Modules/_lsprof.c`, 3.14.) Runs no Python code: objects of types that are written in
    /// Python are not called for their `repr`.
    pub fn label(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        // SAFETY: a method definition lives as long as a function made of it, and has a name.
        let name = unsafe { CStr::from_ptr((*self.method).ml_name) };
        let short = name.to_string_lossy();
        // SAFETY: null or a live object.
        let module = unsafe { Bound::from_borrowed_ptr_or_opt(py, self.module) };
        let text = if self.owner.is_null() {
            let module = module.and_then(|m| match m.cast::<pyo3::types::PyModule>() {
                Ok(m) => m.name().ok().map(|n| n.to_string()),
                Err(_) => m.extract::<String>().ok(),
            });
            match module {
                Some(m) if m != "builtins" => format!("<{m}.{short}>"),
                _ => format!("<{short}>"),
            }
        } else {
            if let Some(text) = self.attribute_text(py, name) {
                return Some(text);
            }
            match module.and_then(|m| m.extract::<String>().ok()) {
                Some(m) => format!("<built-in method {m}.{short}>"),
                None => format!("<built-in method {short}>"),
            }
        };
        Some(pyo3::types::PyString::new(py, &text).into_any().unbind())
    }

    /// `repr(getattr(type(owner), name))`.
    fn attribute_text(&self, py: Python<'_>, name: &CStr) -> Option<Py<PyAny>> {
        let functions = FUNCTIONS.get()?;
        let name = pyo3::types::PyString::new(py, name.to_str().ok()?);
        // SAFETY: a type and a string; the result is borrowed, or null without an error set.
        let attribute = unsafe { (functions.type_lookup)(kind(self.owner), name.as_ptr()) };
        if attribute.is_null() {
            return None;
        }
        let own = kind(attribute);
        let known = [
            &raw mut ffi::PyMethodDescr_Type,
            &raw mut ffi::PyClassMethodDescr_Type,
            &raw mut ffi::PyWrapperDescr_Type,
            &raw mut ffi::PyCFunction_Type,
        ];
        if !known.contains(&own) && own != function_type(py)? {
            return None;
        }
        // SAFETY: a live object; none of these types runs Python code for its text.
        unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyObject_Repr(attribute)) }
            .ok()
            .map(Bound::unbind)
    }
}

/// The type of functions that are written in Python.
fn function_type(py: Python<'_>) -> Option<*mut PyTypeObject> {
    static TYPE: OnceLock<usize> = OnceLock::new();
    if let Some(known) = TYPE.get() {
        return Some(*known as *mut PyTypeObject);
    }
    let kind = py.import("types").ok()?.getattr("FunctionType").ok()?.as_ptr();
    Some(*TYPE.get_or_init(|| kind as usize) as *mut PyTypeObject)
}

#[inline(always)]
fn is_instance(object: Object, expected: *mut PyTypeObject) -> bool {
    let own = kind(object);
    // SAFETY: both are live types.
    own == expected || unsafe { ffi::PyType_IsSubtype(own, expected) != 0 }
}

/// `__name__` of the globals of the frame that runs.
pub fn module_of_frame(py: Python<'_>) -> Option<String> {
    // SAFETY: borrowed references, used at once; neither call runs Python code.
    let name = unsafe {
        let globals = ffi::PyEval_GetGlobals();
        if globals.is_null() {
            return None;
        }
        Bound::from_borrowed_ptr_or_opt(py, ffi::PyDict_GetItemString(globals, c"__name__".as_ptr()))
    };
    name.and_then(|n| n.extract().ok())
}

/// The module with this name if it has been imported. Runs no Python code; late in the interpreter's end there is none.
pub fn module<'py>(py: Python<'py>, name: &CStr) -> Option<Bound<'py, PyAny>> {
    // SAFETY: borrowed references, used at once; string keys of an exact dictionary run no Python code.
    unsafe {
        // Not `PyImport_GetModuleDict`, which ends the process where the dictionary is gone.
        let modules = ffi::PySys_GetObject(c"modules".as_ptr());
        if modules.is_null() || ffi::PyDict_CheckExact(modules) == 0 {
            return None;
        }
        let module = ffi::PyDict_GetItemString(modules, name.as_ptr());
        Bound::from_borrowed_ptr_or_opt(py, module).filter(|m| ffi::PyModule_Check(m.as_ptr()) != 0)
    }
}

/// `threading.Thread.name` of the thread with this ident; None if it is not known (yet). Runs no Python code.
pub fn thread_name(py: Python<'_>, ident: u64) -> Option<String> {
    let functions = FUNCTIONS.get()?;
    let text = |name: &CStr| name.as_ptr() as *const c_char;
    let module = module(py, c"threading")?;
    // SAFETY: all references are borrowed and used at once, but for the dictionary of a thread, which is owned. Exact
    // dictionaries with string and integer keys run no Python code.
    unsafe {
        let active = ffi::PyDict_GetItemString(ffi::PyModule_GetDict(module.as_ptr()), text(c"_active"));
        if active.is_null() || ffi::PyDict_CheckExact(active) == 0 {
            return None;
        }
        let ident = ident.into_pyobject(py).ok()?;
        let thread = ffi::PyDict_GetItem(active, ident.as_ptr());
        if thread.is_null() {
            return None;
        }
        let dictionary = (functions.dictionary)(thread, std::ptr::null_mut());
        if dictionary.is_null() {
            ffi::PyErr_Clear();
            return None;
        }
        let dictionary = Bound::from_owned_ptr(py, dictionary);
        if ffi::PyDict_CheckExact(dictionary.as_ptr()) == 0 {
            return None;
        }
        let name = ffi::PyDict_GetItemString(dictionary.as_ptr(), text(c"_name"));
        self::name(&Bound::from_borrowed_ptr_or_opt(py, name)?)
    }
}

/// A text of Python as a name of a profile: lone surrogates, which the names of files that are not UTF-8 have, are spelled as
/// everywhere else. `None` if it is no `str`. Runs no Python code.
pub fn name(text: &Bound<'_, PyAny>) -> Option<String> {
    let text = text.cast::<pyo3::types::PyString>().ok()?;
    if let Ok(plain) = text.to_cow() {
        return Some(nativeprof::escape::name(plain.chars().map(u32::from)));
    }
    Some(nativeprof::escape::name_of_utf8(&utf8(text)?))
}

/// A text of Python in UTF-8 in which lone surrogates are encoded like all other characters. `None` if it is no `str`. Runs
/// no Python code.
pub fn utf8(text: &Bound<'_, PyAny>) -> Option<Vec<u8>> {
    let text = text.cast::<pyo3::types::PyString>().ok()?;
    if let Ok(plain) = text.to_cow() {
        return Some(plain.as_bytes().to_vec());
    }
    // SAFETY: a live `str`, a codec and an error handler of the interpreter; the result is a new reference or null.
    let bytes = unsafe {
        let bytes = ffi::PyUnicode_AsEncodedString(text.as_ptr(), c"utf-8".as_ptr(), c"surrogatepass".as_ptr());
        Bound::from_owned_ptr_or_err(text.py(), bytes).ok()?
    };
    let bytes = bytes.cast::<pyo3::types::PyBytes>().ok()?;
    Some(bytes.as_bytes().to_vec())
}

/// `co_qualname`; `None` before 3.11. Not to be tried there: the error refers to the code object (3.10), and what is dropped
/// within an event keeps its references for some time.
pub fn qualified_name<'py>(code: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    let is_there = own::interpreter(code.py()).has_qualified_names;
    is_there.then(|| code.getattr("co_qualname").ok()).flatten()
}

/// How to read the number of references to an object.
#[derive(Clone, Copy)]
pub struct ReferenceCounts {
    /// Bits of the first word that are the count.
    mask: usize,
}

impl ReferenceCounts {
    pub fn new(py: Python<'_>) -> ReferenceCounts {
        ReferenceCounts {
            mask: own::interpreter(py).reference_bits as usize,
        }
    }

    /// Whether `object`, to which the caller has a reference, has no other.
    pub fn is_only(self, object: &Py<PyAny>) -> bool {
        // SAFETY: a live object begins with its count, in every build that has a GIL.
        let word = unsafe { (*object.as_ptr().cast::<ObjectHead>()).references };
        word as usize & self.mask == 1
    }
}

/// Runs `call` with the exception that is set put aside: a generator that is thrown into begins with one.
pub fn with_no_exception<T>(_: Python<'_>, call: impl FnOnce() -> T) -> T {
    let null = std::ptr::null_mut();
    let (mut kind, mut value, mut trace) = (null, null, null);
    // SAFETY: three places to write to.
    unsafe { ffi::PyErr_Fetch(&mut kind, &mut value, &mut trace) };
    let result = call();
    // SAFETY: what was fetched above is given back; null represents none.
    unsafe { ffi::PyErr_Restore(kind, value, trace) };
    result
}

/// Places in the code of a generator or a coroutine, as `f_lasti` gives them: which of its events before 3.12 are starts
/// and which are yields. From 3.12 on events say it.
pub struct ResumePlaces {
    begins_at: i32,
    code: Vec<u8>,
}

impl ResumePlaces {
    /// None for other code, and from 3.12 on.
    pub fn of(code: &Bound<'_, PyAny>) -> Option<ResumePlaces> {
        /// `CO_GENERATOR`, `CO_COROUTINE`, `CO_ASYNC_GENERATOR`.
        const GENERATORS: u32 = 0x20 | 0x80 | 0x200;
        let own = own::interpreter(code.py());
        let flags: u32 = code.getattr("co_flags").ok()?.extract().ok()?;
        if own.has_monitoring || flags & GENERATORS == 0 {
            return None;
        }
        let bytes = code.getattr("co_code").ok()?;
        let code = bytes.cast::<pyo3::types::PyBytes>().ok()?.as_bytes().to_vec();
        let Some(resume) = own.resume else {
            return Some(ResumePlaces { begins_at: -1, code });
        };
        // The first one with 0 is the begin; those after a yield have other arguments.
        let at = code.chunks_exact(2).position(|unit| unit == [resume, 0])?;
        let begins_at = i32::try_from(at * 2).ok()?;
        Some(ResumePlaces { begins_at, code })
    }

    pub fn begins(&self, at: i32) -> bool {
        at == self.begins_at
    }

    /// Whether a frame that ends here without an exception continues later.
    pub fn yields(&self, at: i32) -> bool {
        /// Of `Include/opcode.h`, 3.9 to 3.11, and to 3.10.
        const YIELD_VALUE: u8 = 86;
        const YIELD_FROM: u8 = 72;
        let Ok(at) = usize::try_from(at) else { return false };
        // A frame in YIELD_FROM has been put back by one instruction, to come to it again.
        let is_from = self.begins_at < 0 && self.code.get(at + 2) == Some(&YIELD_FROM);
        is_from || self.code.get(at) == Some(&YIELD_VALUE)
    }
}

/// `f_lasti`. Before 3.11 it makes an integer: for frames of generators only.
pub fn last_instruction(py: Python<'_>, frame: Object) -> Option<i32> {
    if let Some(lasti) = functions().and_then(|f| f.frame_lasti) {
        // SAFETY: a live frame object.
        return Some(unsafe { lasti(frame) });
    }
    with_no_exception(py, || {
        // SAFETY: a live frame object; reading this attribute runs no Python code.
        let frame = unsafe { Bound::from_borrowed_ptr(py, frame) };
        frame.getattr(pyo3::intern!(py, "f_lasti")).ok()?.extract().ok()
    })
}
