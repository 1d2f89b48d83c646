//! The functions that a session has seen, and which of them it leaves out.

use pyo3::prelude::*;

use super::objects::{self, Builtin, Object};
use super::table::PairTable;

/// A function as an event names it.
#[derive(Clone, Copy)]
pub enum Callee {
    /// A code object.
    Code(Object),
    Builtin(Builtin),
}

impl Callee {
    /// Address of the code object or of the C function's definition: the same for all calls of it.
    #[inline(always)]
    pub fn key(&self) -> usize {
        match self {
            Callee::Code(code) => *code as usize,
            Callee::Builtin(builtin) => builtin.key(),
        }
    }
}

/// Number of a function in its session.
pub type FunctionNumber = u32;

pub struct FunctionInfo {
    /// As [`Callee::key`] gives it.
    pub key: usize,
    /// The code object, kept alive so that no other one takes its address, or the text for a C function.
    pub object: Py<PyAny>,
    pub is_code: bool,
    /// Left out by the filter.
    pub is_excluded: bool,
    /// Of a generator or a coroutine, before 3.12.
    pub places: Option<objects::ResumePlaces>,
}

/// Functions by module: `json` represents `json` and all `json.*`, `json.decoder:scan_once` for one function, by its
/// name or qualified name.
#[derive(Clone, Default)]
pub struct Filter {
    /// If not empty: all others are left out.
    pub only: Vec<String>,
    pub skip: Vec<String>,
}

impl Filter {
    pub fn is_empty(&self) -> bool {
        self.only.is_empty() && self.skip.is_empty()
    }

    fn excludes(&self, module: &str, names: &[String]) -> bool {
        let matches = |pattern: &String| {
            let (wanted, name) = pattern.split_once(':').unwrap_or((pattern, ""));
            let below = module
                .strip_prefix(wanted)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
            below && (name.is_empty() || names.iter().any(|n| n == name))
        };
        (!self.only.is_empty() && !self.only.iter().any(matches)) || self.skip.iter().any(matches)
    }
}

/// All functions of a session.
#[derive(Default)]
pub struct SessionFunctions {
    list: Vec<FunctionInfo>,
    index: PairTable,
    pub filter: Filter,
}

impl SessionFunctions {
    pub fn get(&self, id: FunctionNumber) -> Option<&FunctionInfo> {
        self.list.get(id as usize)
    }

    /// All, by their numbers.
    pub fn iter(&self) -> impl Iterator<Item = &FunctionInfo> {
        self.list.iter()
    }

    /// The number of a function that has been seen.
    #[inline(always)]
    pub fn find(&self, key: usize) -> Option<FunctionNumber> {
        self.index.get(0, key)
    }

    /// The number of the function, and whether it is left out. At first sight the function's own frame runs, if it is
    /// Python. Runs no Python code.
    #[cold]
    pub fn intern(&mut self, py: Python<'_>, callee: Callee) -> (FunctionNumber, bool) {
        if let Some(id) = self.find(callee.key()) {
            return (id, self.list.get(id as usize).is_some_and(|f| f.is_excluded));
        }
        let function = objects::with_no_exception(py, || self.describe(py, callee));
        let (id, is_excluded) = (self.list.len() as FunctionNumber, function.is_excluded);
        self.list.push(function);
        self.index.insert(0, callee.key(), id);
        (id, is_excluded)
    }

    fn describe(&self, py: Python<'_>, callee: Callee) -> FunctionInfo {
        match callee {
            Callee::Builtin(builtin) => FunctionInfo {
                key: callee.key(),
                object: builtin.label(py).unwrap_or_else(|| py.None()),
                is_code: false,
                is_excluded: false,
                places: None,
            },
            Callee::Code(code) => {
                // SAFETY: the event's own code object.
                let code = unsafe { Bound::from_borrowed_ptr(py, code) };
                let is_excluded = !self.filter.is_empty() && {
                    let names = ["co_name", "co_qualname"]
                        .map(|n| code.getattr(n).ok().and_then(|n| objects::name(&n)).unwrap_or_default());
                    let module = objects::module_of_frame(py).unwrap_or_default();
                    self.filter.excludes(&module, &names)
                };
                let places = objects::ResumePlaces::of(&code);
                FunctionInfo {
                    key: callee.key(),
                    object: code.unbind(),
                    is_code: true,
                    is_excluded,
                    places,
                }
            }
        }
    }

    /// The number of a code object that is known to be left out.
    #[inline(always)]
    pub fn is_excluded(&self, key: usize) -> bool {
        !self.filter.is_empty()
            && self
                .find(key)
                .and_then(|id| self.get(id))
                .is_some_and(|f| f.is_excluded)
    }
}
