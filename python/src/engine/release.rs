//! Giving up code objects that have ended, so that a program which makes them for ever (`exec`, templates) can be traced
//! for ever.
//!
//! A code object has ended if nothing but the session refers to it, and no call of it is open. Its facts are copied, and a
//! new code object at its address is another function. What was measured stays: results of ended functions with equal
//! facts are added up, so that they take bounded memory too. All functions are gone through when their number has
//! doubled, or has grown by an eighth of what the results have of entries: the cost per new function is constant.

use std::collections::HashMap;
use std::mem::ManuallyDrop;

use pyo3::prelude::*;

use super::objects::{self, Object};
use super::session::{self, EngineSession};
use super::{FunctionNumber, Machine};

/// How deep functions are defined in others, at most, of which all are given up at one time: the code object of the outer
/// function refers to that of the inner one.
const MAX_DEPTH: usize = 8;

/// Keys and numbers of functions whose code objects have ended, for those who have results by them.
#[derive(Default)]
pub struct EndedFunctions {
    /// Their keys from now on, by those that they had: addresses.
    pub(super) keys: HashMap<usize, usize>,
    /// Their numbers from now on.
    pub(super) numbers: HashMap<FunctionNumber, FunctionNumber>,
    /// By number: results refer to it.
    pub(super) used: Vec<bool>,
    /// Entries of results that were gone through.
    pub(super) entries: usize,
}

impl EndedFunctions {
    /// The key from now on. That of a function that has ended is odd, as no address of an object is.
    pub fn key(&self, key: usize) -> usize {
        self.keys.get(&key).copied().unwrap_or(key)
    }

    /// The keys that they had, and those from now on.
    pub fn keys(&self) -> impl Iterator<Item = (usize, usize)> {
        self.keys.iter().map(|(before, now)| (*before, *now))
    }

    /// Whether the function with this key has ended since the last time.
    pub fn has_key(&self, key: usize) -> bool {
        self.keys.contains_key(&key)
    }

    /// The number from now on. To be called for each entry of results that refers to a function: the number of an ended
    /// function for which it is not called is given to another one.
    pub fn number(&mut self, number: FunctionNumber) -> FunctionNumber {
        let now = self.numbers.get(&number).copied().unwrap_or(number);
        if let Some(used) = self.used.get_mut(now as usize) {
            *used = true;
        }
        self.entries += 1;
        now
    }

    /// All functions that have ended have results.
    pub fn use_all(&mut self) {
        self.used.fill(true);
    }

    /// Entries of results were gone through which do not have a number of their own.
    pub fn add_entries(&mut self, count: usize) {
        self.entries += count;
    }
}

impl<M: Machine> EngineSession<M> {
    /// Makes functions ended whose code objects have. Gives these, to be released when nothing is borrowed.
    fn end_functions(&mut self, py: Python<'_>) -> Vec<Py<PyAny>> {
        let mut keys = self.functions.unreferenced(py);
        for thread in &self.threads {
            thread.machine.open_keys(&mut |key| {
                keys.remove(&key);
            });
        }
        let (objects, mut ended) = self.functions.end(py, &keys);
        if !objects.is_empty() {
            for thread in &mut self.threads {
                thread.machine.rename(&mut ended);
            }
            M::rename_shared(&mut self.shared, &mut ended);
        }
        self.functions.settle(&ended, !objects.is_empty());
        objects
    }
}

/// Gives up code objects that have ended, if there may be enough of them; see [`release_all`].
#[cold]
pub(crate) fn release_ended<M: Machine>(py: Python<'_>) {
    if session::running::<M>(py).is_some_and(|s| s.functions.is_full()) {
        release_all::<M>(py);
    }
}

/// Gives up all code objects that have ended, of the session that runs, which is one of this type. The end of an object
/// may run Python code (by weak references, say), which may stop the session: nothing of it may be borrowed.
pub fn release_all<M: Machine>(py: Python<'_>) {
    for _ in 0..MAX_DEPTH {
        // Found again each time: Python code has run.
        let Some(session) = session::running::<M>(py) else {
            return;
        };
        let objects = objects::with_no_exception(py, || M::aside(|| session.end_functions(py)));
        if objects.is_empty() {
            return;
        }
        objects::with_no_exception(py, || release(objects));
    }
}

fn release(objects: Vec<Py<PyAny>>) {
    let Some(functions) = objects::functions() else { return };
    // The interpreter may end this thread while Python code runs: then nothing may have to be dropped here.
    let all: ManuallyDrop<Vec<Object>> = ManuallyDrop::new(objects.into_iter().map(Py::into_ptr).collect());
    for object in all.iter() {
        // SAFETY: a reference that is owned here.
        unsafe { (functions.release)(*object) };
    }
    drop(ManuallyDrop::into_inner(all));
}
