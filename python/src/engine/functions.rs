//! The functions that a session has seen, and which of them it leaves out.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::prelude::*;

use super::facts::{CodeFacts, FunctionObject};
use super::objects::{self, Builtin, Object};
use super::release::EndedFunctions;
use super::table::PairTable;
use super::threads;

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
    /// As [`Callee::key`] gives it; of one that has ended an odd number, which no other function ever has.
    pub key: usize,
    pub object: FunctionObject,
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

/// Functions up to which none is looked at again.
const MIN_FULL: usize = 1024;
/// Entries of results for which another function may come before all are gone through.
const ENTRIES_PER_FUNCTION: usize = 8;
/// For functions that have ended. From 3 on: 1 is no address either, and has another use.
static NEXT_ENDED_KEY: AtomicUsize = AtomicUsize::new(3);

/// All functions of a session.
#[derive(Default)]
pub struct SessionFunctions {
    /// By number. None: the number is free.
    list: Vec<Option<FunctionInfo>>,
    free: Vec<FunctionNumber>,
    /// Without those that have ended.
    index: PairTable,
    ended: HashMap<Arc<CodeFacts>, FunctionNumber>,
    /// How many there may be before code objects that have ended are given up.
    limit: usize,
    pub filter: Filter,
}

impl SessionFunctions {
    pub fn get(&self, id: FunctionNumber) -> Option<&FunctionInfo> {
        self.list.get(id as usize)?.as_ref()
    }

    /// All, with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (FunctionNumber, &FunctionInfo)> {
        let all = self.list.iter().enumerate();
        all.filter_map(|(id, function)| Some((id as FunctionNumber, function.as_ref()?)))
    }

    /// All numbers are less.
    pub fn end_of_numbers(&self) -> usize {
        self.list.len()
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
            return (id, self.get(id).is_some_and(|f| f.is_excluded));
        }
        let function = objects::with_no_exception(py, || self.describe(py, callee));
        let is_excluded = function.is_excluded;
        let id = self.free.pop().unwrap_or_else(|| {
            self.list.push(None);
            (self.list.len() - 1) as FunctionNumber
        });
        if let Some(place) = self.list.get_mut(id as usize) {
            *place = Some(function);
        }
        self.index.insert(0, callee.key(), id);
        if self.is_full() {
            // So that the next event does what an ordinary one has no time for.
            threads::forget_last();
        }
        (id, is_excluded)
    }

    /// Whether there are so many that code objects should be looked for that have ended.
    pub(super) fn is_full(&self) -> bool {
        self.list.len() - self.free.len() >= self.limit.max(MIN_FULL)
    }

    /// Keys of code objects to which this session alone has a reference.
    pub(super) fn unreferenced(&self, py: Python<'_>) -> HashSet<usize> {
        let counts = objects::ReferenceCounts::new(py);
        let is_unreferenced = |function: &&FunctionInfo| match &function.object {
            FunctionObject::Code(code) => counts.is_only(code),
            _ => false,
        };
        self.list
            .iter()
            .flatten()
            .filter(is_unreferenced)
            .map(|f| f.key)
            .collect()
    }

    /// The functions with these keys have ended: gives their code objects, and what is to be called by another number
    /// from now on. [`SessionFunctions::settle`] comes next.
    pub(super) fn end(&mut self, py: Python<'_>, keys: &HashSet<usize>) -> (Vec<Py<PyAny>>, EndedFunctions) {
        let (mut objects, mut changes) = (Vec::with_capacity(keys.len()), EndedFunctions::default());
        changes.used = vec![false; self.list.len()];
        for (at, place) in self.list.iter_mut().enumerate() {
            let facts = match place {
                Some(function) if keys.contains(&function.key) => match &function.object {
                    FunctionObject::Code(code) => CodeFacts::of(code.bind(py)),
                    _ => None,
                },
                _ => None,
            };
            let Some(facts) = facts.map(Arc::new) else { continue };
            let Some(function) = place.take() else { continue };
            let number = at as FunctionNumber;
            let first = *self.ended.entry(facts.clone()).or_insert(number);
            changes.numbers.insert(number, first);
            // The number says which key all those with equal facts have.
            changes.keys.insert(function.key, first as usize);
            if first == number {
                *place = Some(FunctionInfo {
                    key: NEXT_ENDED_KEY.fetch_add(2, Ordering::Relaxed),
                    object: FunctionObject::Ended(facts),
                    is_excluded: function.is_excluded,
                    places: None,
                });
            }
            // Moved: a reference that is dropped within an event is released some time later.
            if let FunctionObject::Code(code) = function.object {
                objects.push(code);
            }
        }
        for key in changes.keys.values_mut() {
            *key = self.list.get(*key).and_then(Option::as_ref).map_or(0, |f| f.key);
        }
        (objects, changes)
    }

    /// Forgets functions that have ended and of which there is no result, and says when to look again. `is_changed`: some
    /// have ended, and results have been gone through.
    pub(super) fn settle(&mut self, changes: &EndedFunctions, is_changed: bool) {
        if is_changed {
            let is_unused = |id: FunctionNumber| !changes.used.get(id as usize).is_some_and(|used| *used);
            for (facts, id) in std::mem::take(&mut self.ended) {
                if !is_unused(id) {
                    self.ended.insert(facts, id);
                } else if let Some(place) = self.list.get_mut(id as usize) {
                    *place = None;
                }
            }
            while self.list.pop_if(|last| last.is_none()).is_some() {}
            self.free.clear();
            self.index = PairTable::default();
            for (at, function) in self.list.iter().enumerate() {
                match function {
                    None => self.free.push(at as FunctionNumber),
                    Some(function) if matches!(function.object, FunctionObject::Ended(_)) => {}
                    Some(function) => self.index.insert(0, function.key, at as FunctionNumber),
                }
            }
        }
        let count = self.list.len() - self.free.len();
        self.limit = count + count.max(changes.entries / ENTRIES_PER_FUNCTION);
    }

    fn describe(&self, py: Python<'_>, callee: Callee) -> FunctionInfo {
        match callee {
            Callee::Builtin(builtin) => FunctionInfo {
                key: callee.key(),
                object: FunctionObject::Builtin(builtin.label(py).unwrap_or_else(|| py.None())),
                is_excluded: false,
                places: None,
            },
            Callee::Code(code) => {
                // SAFETY: the event's own code object.
                let code = unsafe { Bound::from_borrowed_ptr(py, code) };
                let is_excluded = !self.filter.is_empty() && {
                    let names = [code.getattr("co_name").ok(), objects::qualified_name(&code)]
                        .map(|name| name.and_then(|n| objects::name(&n)).unwrap_or_default());
                    let module = objects::module_of_frame(py).unwrap_or_default();
                    self.filter.excludes(&module, &names)
                };
                let places = objects::ResumePlaces::of(&code);
                FunctionInfo {
                    key: callee.key(),
                    object: FunctionObject::Code(code.unbind()),
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
