//! `nativeprof._native`: what the Python package takes from the library.

use nativeprof_hooks::Refusal;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

mod allocations;
mod call_frames;
mod call_recorder;
mod call_tree;
mod calls;
mod count;
mod engine;
mod events;
mod notebook;
mod profiler;
mod program_end;
mod spans;
mod stacks;
mod tasks;
mod tracing;
mod tree;

/// The exception for hooks that were not put in place.
fn refused(refusal: Refusal) -> PyErr {
    PyRuntimeError::new_err(refusal.to_string())
}

#[pymodule]
mod _native {
    use super::*;

    /// Shows an exception as Python does one that nothing has caught: it sets `sys.last_value` and its like, and calls
    /// `sys.excepthook`.
    #[pyfunction]
    fn print_uncaught(error: Bound<'_, PyAny>) {
        let py = error.py();
        PyErr::from_value(error).print_and_set_sys_last_vars(py);
    }

    #[pymodule_export]
    use super::allocations::AllocationRecorder;
    #[pymodule_export]
    use super::call_recorder::{CallRecorder, combine};
    #[pymodule_export]
    use super::count::{llprocess, process};
    #[pymodule_export]
    use super::events::{EventLog, events_after_fork, hook_slots};
    #[pymodule_export]
    use super::notebook::{cell_files, notebook_view};
    #[pymodule_export]
    use super::profiler::{Profile, SampleRecorder, format_of, formats, read, this_machine};
    #[pymodule_export]
    use super::program_end::{announcing_exit, before_end_by_signal, release_end};
    #[pymodule_export]
    use super::spans::{Span, current_labels, spans_are_published};
    #[pymodule_export]
    use super::stacks::thread_stack;
    #[pymodule_export]
    use super::tasks::TaskRecorder;
    #[pymodule_export]
    use super::tracing::{CallTracer, clock, is_tracing};
    #[pymodule_export]
    use super::tree::{create, get_profile, merge, plot_data};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        spans::publish(module.py())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
