//! Greenlets: a thread that switches between them continues with another stack, without a call or a return.
//!
//! The package `greenlet` reports switches to a trace function of each thread (`greenlet.settrace`); ours informs the
//! thread's machine, and calls the one that was there before. It is set on the thread that starts a session, on others
//! with their first event, and if `greenlet` is imported later, with the next function that a thread has not had before.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::objects::{self, Object};
use super::threads::thread;
use super::{CurrentGreenlet, Machine};

/// What a switch is reported to while a session runs.
type OnSwitch = fn(Python<'_>, CurrentGreenlet);
static REPORT: Mutex<Option<OnSwitch>> = Mutex::new(None);
/// Counted up where a session starts and where it stops: trace functions of another number are left over.
static RUN: AtomicU64 = AtomicU64::new(0);

fn report() -> Option<OnSwitch> {
    *REPORT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn switched<M: Machine>(py: Python<'_>, to: CurrentGreenlet) {
    if let Some((thread, given)) = thread::<M>(py, |_| true) {
        thread.switch(to, given);
    }
}

/// A session starts on this thread. `is_first`: none runs on others.
pub(crate) fn start<M: Machine>(is_first: bool) {
    if is_first {
        *REPORT.lock().unwrap_or_else(PoisonError::into_inner) = Some(switched::<M>);
        RUN.fetch_add(1, Ordering::Relaxed);
    }
}

/// The session stops on this thread. If none runs on others, `is_last`, their trace functions go away with their next switch.
pub(crate) fn stop(py: Python<'_>, is_last: bool) {
    if is_last {
        *REPORT.lock().unwrap_or_else(PoisonError::into_inner) = None;
        RUN.fetch_add(1, Ordering::Relaxed);
    }
    if let Some(functions) = loaded(py) {
        let _ = objects::with_no_exception(py, || functions.take_away(py));
    }
}

/// Functions of the package.
struct GreenletPackage {
    settrace: Py<PyAny>,
    gettrace: Py<PyAny>,
    getcurrent: Py<PyAny>,
}

static PACKAGE: PyOnceLock<GreenletPackage> = PyOnceLock::new();

/// The package, if the program has imported it.
fn loaded(py: Python<'_>) -> Option<&'static GreenletPackage> {
    if let Some(known) = PACKAGE.get(py) {
        return Some(known);
    }
    let module = objects::module(py, c"greenlet._greenlet")?;
    let function = |name: &str| module.getattr(name).map(Bound::unbind);
    let package = objects::with_no_exception(py, || {
        PyResult::Ok(GreenletPackage {
            settrace: function("settrace")?,
            gettrace: function("gettrace")?,
            getcurrent: function("getcurrent")?,
        })
    });
    PACKAGE.set(py, package.ok()?).ok();
    PACKAGE.get(py)
}

impl GreenletPackage {
    /// Takes a trace function of ours away from this thread.
    fn take_away(&self, py: Python<'_>) -> PyResult<()> {
        let current = self.gettrace.bind(py).call0()?;
        if let Ok(tracer) = current.cast::<GreenletTracer>() {
            self.settrace.bind(py).call1((tracer.get().previous.bind(py),))?;
        }
        Ok(())
    }
}

/// Sets our trace function on this thread if `greenlet` has been imported, and gives the greenlet that runs. Runs no Python
/// code.
#[cold]
pub(crate) fn follow(py: Python<'_>) -> Option<CurrentGreenlet> {
    let package = loaded(py)?;
    let set = || -> PyResult<CurrentGreenlet> {
        let current = package.getcurrent.bind(py).call0()?;
        let mut first = current.clone();
        loop {
            let parent = first.getattr(pyo3::intern!(py, "parent"))?;
            if parent.is_none() {
                break;
            }
            first = parent;
        }
        let first = first.as_ptr() as usize;
        let previous = package.gettrace.bind(py).call0()?;
        let run = RUN.load(Ordering::Relaxed);
        let previous = match previous.cast::<GreenletTracer>() {
            Ok(tracer) if tracer.get().run == run => return Ok(greenlet(py, first, current.as_ptr())),
            Ok(left_over) => left_over.get().previous.clone_ref(py),
            Err(_) => previous.unbind(),
        };
        let tracer = GreenletTracer { run, first, previous };
        package.settrace.bind(py).call1((Bound::new(py, tracer)?,))?;
        Ok(greenlet(py, first, current.as_ptr()))
    };
    objects::with_no_exception(py, set).ok()
}

fn greenlet(py: Python<'_>, first: usize, object: Object) -> CurrentGreenlet {
    let key = object as usize;
    CurrentGreenlet {
        key: if key == first { 0 } else { key },
        is_hub: is_hub(py, object),
    }
}

/// Whether it is what runs gevent's event loop.
fn is_hub(py: Python<'_>, object: Object) -> bool {
    static HUB: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let hub = match HUB.get(py) {
        Some(hub) => hub,
        None => {
            let Some(hub) = objects::module(py, c"gevent.hub").and_then(|m| m.getattr("Hub").ok()) else {
                return false;
            };
            HUB.get_or_init(py, || hub.unbind())
        }
    };
    let own = objects::kind(object);
    // SAFETY: live types both: one of a live object, and a class.
    own.cast() == hub.as_ptr() || unsafe { ffi::PyType_IsSubtype(own, hub.as_ptr().cast()) != 0 }
}

/// The trace function of one thread.
#[pyclass(frozen, module = "nativeprof._native")]
struct GreenletTracer {
    run: u64,
    /// Address of the thread's first greenlet, which lives as long as the thread.
    first: usize,
    /// None, or the trace function that was there.
    previous: Py<PyAny>,
}

#[pymethods]
impl GreenletTracer {
    fn __call__(slf: &Bound<'_, Self>, event: &Bound<'_, PyAny>, greenlets: &Bound<'_, PyAny>) -> PyResult<()> {
        let (py, tracer) = (slf.py(), slf.get());
        match report().filter(|_| tracer.run == RUN.load(Ordering::Relaxed)) {
            Some(report) => {
                let target = greenlets.get_item(1)?;
                report(py, greenlet(py, tracer.first, target.as_ptr()));
            }
            None => {
                if let Some(package) = loaded(py)
                    && package.gettrace.bind(py).call0()?.is(slf)
                {
                    package.settrace.bind(py).call1((tracer.previous.bind(py),))?;
                }
            }
        }
        if !tracer.previous.is_none(py) {
            tracer.previous.bind(py).call1((event, greenlets))?;
        }
        Ok(())
    }
}
