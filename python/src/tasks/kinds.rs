//! Kinds of functions: which begin stacks, and which belong to an event loop.

use pyo3::prelude::*;

use crate::engine::objects;
use crate::engine::{FunctionInfo, FunctionNumber, FunctionObject, SessionFunctions};

/// A coroutine, or a generator that can be awaited.
pub const COROUTINE: u8 = 1;
/// Another generator.
pub const GENERATOR: u8 = 2;
/// Runs one turn of an event loop, or all of them.
pub const LOOP: u8 = 4;
/// Of the standard library, or of the package of an event loop.
pub const LIBRARY: u8 = 8;

/// Kinds of the functions of a session, as far as they have been asked for.
pub struct Kinds {
    /// Directory of the standard library.
    library: String,
    /// By number. None: not asked for; None in it: left out.
    list: Vec<Option<Option<u8>>>,
}

impl Kinds {
    pub fn new(library: String) -> Kinds {
        Kinds {
            library,
            list: Vec::new(),
        }
    }

    /// The kind of a function: a sum of the constants above; None: left out. Runs no Python code.
    pub fn get(&mut self, py: Python<'_>, id: FunctionNumber, functions: &SessionFunctions) -> Option<u8> {
        if let Some(Some(known)) = self.list.get(id as usize) {
            return *known;
        }
        let function = functions.get(id)?;
        let kind = objects::with_no_exception(py, || kind_of(py, function, &self.library));
        if self.list.len() <= id as usize {
            self.list.resize(id as usize + 1, None);
        }
        if let Some(place) = self.list.get_mut(id as usize) {
            *place = Some(kind);
        }
        kind
    }

    /// Numbers may be those of other functions from now on.
    pub fn forget(&mut self) {
        self.list.clear();
    }
}

fn kind_of(py: Python<'_>, function: &FunctionInfo, library: &str) -> Option<u8> {
    /// `CO_COROUTINE`, `CO_ITERABLE_COROUTINE`; `CO_GENERATOR`, `CO_ASYNC_GENERATOR`.
    const COROUTINES: u32 = 0x80 | 0x100;
    const GENERATORS: u32 = 0x20 | 0x200;
    let object = match &function.object {
        FunctionObject::Code(code) => code.bind(py),
        FunctionObject::Builtin(text) => {
            let text = text.bind(py).extract::<String>();
            let is_own = text.is_ok_and(|t| t.contains("'nativeprof._native."));
            return (!is_own).then_some(LIBRARY);
        }
        FunctionObject::Ended(_) => return None,
    };
    if function.is_excluded {
        return None;
    }
    let text = |name: &str| -> String { object.getattr(name).and_then(|v| v.extract()).unwrap_or_default() };
    let flags: u32 = object.getattr("co_flags").and_then(|v| v.extract()).unwrap_or(0);
    let (name, file) = (text("co_name"), text("co_filename"));
    let mut found = 0;
    if flags & COROUTINES != 0 {
        found |= COROUTINE;
    } else if flags & GENERATORS != 0 {
        found |= GENERATOR;
    }
    let loops = [("asyncio/base_events.py", "_run_once"), ("gevent/hub.py", "run")];
    if loops.iter().any(|(end, entry)| file.ends_with(end) && name == *entry) {
        found |= LOOP;
    }
    let is_standard = file.strip_prefix(library).is_some_and(|rest| rest.starts_with('/'))
        && !["/site-packages/", "/dist-packages/"].iter().any(|p| file.contains(p));
    if is_standard || file.starts_with("<frozen ") || ["/gevent/", "/uvloop/"].iter().any(|p| file.contains(p)) {
        found |= LIBRARY;
    }
    Some(found)
}
