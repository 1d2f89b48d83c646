//! Which task of asyncio runs on this thread.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

use crate::engine::objects::{self, module};

/// Parts of the module `_asyncio`, which event loops of all kinds notify of what they do (`Lib/asyncio/tasks.py`, 3.9 to 3.14).
struct AsyncioModule {
    get_running_loop: Py<PyAny>,
    /// Loop -> task that runs (to 3.13).
    tasks: Option<Py<PyDict>>,
    /// From 3.14 on.
    current_task: Option<Py<PyAny>>,
}

static MODULE: PyOnceLock<AsyncioModule> = PyOnceLock::new();

/// None until the program has imported asyncio.
fn loaded(py: Python<'_>) -> Option<&'static AsyncioModule> {
    if let Some(known) = MODULE.get(py) {
        return Some(known);
    }
    let module = module(py, c"_asyncio")?;
    let attribute = |name: &str| module.getattr(name).ok();
    let found = objects::with_no_exception(py, || {
        Some(AsyncioModule {
            get_running_loop: attribute("_get_running_loop")?.unbind(),
            tasks: attribute("_current_tasks").and_then(|d| d.cast_into_exact().ok().map(Bound::unbind)),
            current_task: attribute("current_task").map(Bound::unbind),
        })
    });
    MODULE.set(py, found?).ok();
    MODULE.get(py)
}

/// The event loop that runs on this thread.
fn running_loop<'py>(py: Python<'py>, module: &AsyncioModule) -> Option<Bound<'py, PyAny>> {
    let running = objects::with_no_exception(py, || module.get_running_loop.bind(py).call0().ok());
    running.filter(|l| !l.is_none())
}

/// Whether an event loop runs on this thread. Runs no Python code.
pub fn is_loop_running(py: Python<'_>) -> bool {
    loaded(py).is_some_and(|module| running_loop(py, module).is_some())
}

/// Address of the task that runs on this thread; 0: none does. Runs no Python code.
pub fn current_task(py: Python<'_>) -> usize {
    let Some(module) = loaded(py) else { return 0 };
    let Some(running) = running_loop(py, module) else {
        return 0;
    };
    if let Some(tasks) = &module.tasks {
        return task_of_loop(tasks, &running);
    }
    let Some(function) = &module.current_task else { return 0 };
    let task = objects::with_no_exception(py, || function.bind(py).call0().ok());
    if let Some(task) = task.filter(|t| !t.is_none()) {
        return task.as_ptr() as usize;
    }
    python_tasks(py).map_or(0, |tasks| task_of_loop(tasks, &running))
}

/// The dictionary event loop -> task that runs, for tasks that are implemented in Python (from 3.14 on).
fn python_tasks(py: Python<'_>) -> Option<&'static Py<PyDict>> {
    static TASKS: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    if TASKS.get(py).is_none() {
        let module = module(py, c"asyncio.tasks")?;
        let found = objects::with_no_exception(py, || module.getattr("_current_tasks").ok());
        TASKS.set(py, found?.cast_into_exact().ok()?.unbind()).ok();
    }
    TASKS.get(py)
}

/// Address of the task that an event loop runs; 0: none. Not looked up: the hash of a loop may be written in Python.
fn task_of_loop(tasks: &Py<PyDict>, event_loop: &Bound<'_, PyAny>) -> usize {
    let (mut at, mut key, mut value) = (0, std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: a live dictionary, which no other thread changes meanwhile; the references are borrowed and only compared.
    while unsafe { ffi::PyDict_Next(tasks.as_ptr(), &mut at, &mut key, &mut value) } != 0 {
        if key == event_loop.as_ptr() {
            return value as usize;
        }
    }
    0
}
