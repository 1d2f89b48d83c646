//! What is kept of a code object that has ended.

use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString};

use super::{objects, own};

/// The facts by which functions are told apart in results. Texts are UTF-8 in which lone surrogates are encoded like all
/// other characters (`surrogatepass`).
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct CodeFacts {
    pub file: Box<[u8]>,
    pub name: Box<[u8]>,
    /// Empty before 3.11.
    pub qualified: Box<[u8]>,
    pub line: i32,
}

impl CodeFacts {
    /// None if it has none of these. Runs no Python code.
    pub fn of(code: &Bound<'_, PyAny>) -> Option<CodeFacts> {
        let text = |name: &str| objects::utf8(&code.getattr(name).ok()?);
        let qualified = objects::qualified_name(code).and_then(|name| objects::utf8(&name));
        Some(CodeFacts {
            file: text("co_filename")?.into(),
            name: text("co_name")?.into(),
            qualified: qualified.unwrap_or_default().into(),
            line: code.getattr("co_firstlineno").ok()?.extract().ok()?,
        })
    }

    /// A code object with these facts, which does nothing. Python code may run.
    fn code<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        static EMPTY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let empty = EMPTY.get_or_try_init(py, || -> PyResult<_> {
            let compile = py.import("builtins")?.getattr("compile")?;
            Ok(compile.call1(("", "", "exec"))?.unbind())
        })?;
        let values = PyDict::new(py);
        values.set_item("co_filename", text(py, &self.file)?)?;
        values.set_item("co_name", text(py, &self.name)?)?;
        values.set_item("co_firstlineno", self.line)?;
        if own::interpreter(py).has_qualified_names {
            values.set_item("co_qualname", text(py, &self.qualified)?)?;
        }
        empty.bind(py).call_method("replace", (), Some(&values))
    }
}

fn text<'py>(py: Python<'py>, utf8: &[u8]) -> PyResult<Bound<'py, PyString>> {
    let size = ffi::Py_ssize_t::try_from(utf8.len())?;
    // SAFETY: so many bytes, and an error handler of the interpreter; the result is a new `str`, or null with an exception.
    unsafe {
        let text = ffi::PyUnicode_DecodeUTF8(utf8.as_ptr().cast(), size, c"surrogatepass".as_ptr());
        Ok(Bound::from_owned_ptr_or_err(py, text)?.cast_into_unchecked())
    }
}

/// What a function is known by.
pub enum FunctionObject {
    /// The code object, kept alive so that no other one takes its address.
    Code(Py<PyAny>),
    /// Nothing but the session had the code object, so it was given up; several with equal facts are one function.
    Ended(Arc<CodeFacts>),
    /// The text for a C function.
    Builtin(Py<PyAny>),
}

impl FunctionObject {
    pub fn is_code(&self) -> bool {
        !matches!(self, FunctionObject::Builtin(_))
    }

    pub fn clone_ref(&self, py: Python<'_>) -> FunctionObject {
        match self {
            FunctionObject::Code(code) => FunctionObject::Code(code.clone_ref(py)),
            FunctionObject::Ended(facts) => FunctionObject::Ended(facts.clone()),
            FunctionObject::Builtin(text) => FunctionObject::Builtin(text.clone_ref(py)),
        }
    }

    /// The code object or the text; for one that has ended, a code object that has its facts only. Python code may run.
    pub fn into_object(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self {
            FunctionObject::Code(object) | FunctionObject::Builtin(object) => Ok(object),
            FunctionObject::Ended(facts) => facts.code(py).map(Bound::unbind),
        }
    }
}
