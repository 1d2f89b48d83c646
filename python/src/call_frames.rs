//! Frames of a profile for the functions that a session of the engine has seen.

use nativeprof::profile::model::Frame as ProfileFrame;
use nativeprof::profile::pstats::BUILTIN;
use pyo3::prelude::*;

use crate::engine::{FunctionInfo, SessionFunctions, objects};

/// Frames of all functions, by their numbers.
pub fn frames(py: Python<'_>, functions: &SessionFunctions) -> Vec<ProfileFrame> {
    let text = |object: &Bound<'_, PyAny>, name: &str| -> String {
        object
            .getattr(name)
            .ok()
            .and_then(|v| objects::name(&v))
            .unwrap_or_default()
    };
    let frame = |function: &FunctionInfo| {
        let object = function.object.bind(py);
        if function.is_code {
            let line = object.getattr("co_firstlineno").and_then(|l| l.extract()).unwrap_or(0);
            let [name, qualified, file] = ["co_name", "co_qualname", "co_filename"].map(|n| text(object, n));
            ProfileFrame::python(name, qualified, file, line)
        } else {
            let text = objects::name(object).unwrap_or_default();
            // Where a method's name is that of a Python function, its text has an address, which another run has not.
            let name = match text.split_once(" at 0x") {
                Some((name, _)) if name.starts_with("<function ") => format!("{name}>"),
                _ => text,
            };
            ProfileFrame::native(name, BUILTIN, 0)
        }
    };
    functions.iter().map(frame).collect()
}
