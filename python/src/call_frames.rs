//! Frames of a profile for the functions that a session of the engine has seen.

use nativeprof::escape::name_of_utf8;
use nativeprof::profile::model::{Frame as ProfileFrame, FrameKind};
use nativeprof::profile::pstats::BUILTIN;
use pyo3::prelude::*;

use crate::engine::{FunctionInfo, FunctionObject, SessionFunctions, objects};

/// Frames of all functions, by their numbers.
pub fn frames(py: Python<'_>, functions: &SessionFunctions) -> Vec<ProfileFrame> {
    let unused = ProfileFrame::new(FrameKind::Unknown, "[unknown]");
    let mut frames = vec![unused; functions.end_of_numbers()];
    for (id, function) in functions.iter() {
        if let Some(place) = frames.get_mut(id as usize) {
            *place = frame(py, function);
        }
    }
    frames
}

/// The frame of a function.
pub fn frame(py: Python<'_>, function: &FunctionInfo) -> ProfileFrame {
    let text = |object: &Bound<'_, PyAny>, name: &str| -> String {
        object
            .getattr(name)
            .ok()
            .and_then(|v| objects::name(&v))
            .unwrap_or_default()
    };
    match &function.object {
        FunctionObject::Code(code) => {
            let code = code.bind(py);
            let line = code.getattr("co_firstlineno").and_then(|l| l.extract()).unwrap_or(0);
            let [name, qualified, file] = ["co_name", "co_qualname", "co_filename"].map(|n| text(code, n));
            ProfileFrame::python(name, qualified, file, line)
        }
        FunctionObject::Ended(facts) => {
            let [name, qualified, file] = [&facts.name, &facts.qualified, &facts.file].map(|t| name_of_utf8(t));
            ProfileFrame::python(name, qualified, file, u32::try_from(facts.line).unwrap_or(0))
        }
        FunctionObject::Builtin(text) => {
            let text = objects::name(text.bind(py)).unwrap_or_default();
            // Where a method's name is that of a Python function, its text has an address, which another run has not.
            let name = match text.split_once(" at 0x") {
                Some((name, _)) if name.starts_with("<function ") => format!("{name}>"),
                _ => text,
            };
            ProfileFrame::native(name, BUILTIN, 0)
        }
    }
}
