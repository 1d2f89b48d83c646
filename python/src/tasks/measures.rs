//! What is measured in addition to time.

use std::cell::RefCell;

use pyo3::prelude::*;

use crate::engine::Clock;

/// Values of [`Measures::Usage`], in this order.
pub const USAGE: usize = 8;

/// The values that a bench class has in addition to time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measures {
    Time,
    /// The thread's resource usage: user time and system time (ns), minor and major page faults, blocks read and
    /// written, voluntary and involuntary context switches.
    Usage,
    /// So many of the user's own, read by [`MeasureReader`] before each event.
    Own(usize),
}

impl Measures {
    /// Number of values.
    pub fn count(self) -> usize {
        match self {
            Measures::Time => 0,
            Measures::Usage => USAGE,
            Measures::Own(count) => count,
        }
    }

    /// Writes the values of this thread to `to`, which has [`Measures::count`] places.
    #[inline(always)]
    pub fn read(self, to: &mut [f64]) {
        match self {
            Measures::Time => {}
            Measures::Usage => to.copy_from_slice(&usage()),
            Measures::Own(_) => read_own(to),
        }
    }
}

/// A system call.
pub fn usage() -> [f64; USAGE] {
    // SAFETY: plain integers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: a place to write to. It does not fail for this argument.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    let nanoseconds = |t: libc::timeval| t.tv_sec as f64 * 1e9 + t.tv_usec as f64 * 1e3;
    [
        nanoseconds(usage.ru_utime),
        nanoseconds(usage.ru_stime),
        usage.ru_minflt as f64,
        usage.ru_majflt as f64,
        usage.ru_inblock as f64,
        usage.ru_oublock as f64,
        usage.ru_nvcsw as f64,
        usage.ru_nivcsw as f64,
    ]
}

thread_local! {
    /// What [`MeasureReader`] has read last on this thread.
    static READING: RefCell<Vec<f64>> = const { RefCell::new(Vec::new()) };
}

fn read_own(to: &mut [f64]) {
    // Late in the thread's end there is no reading any more.
    let _ = READING.try_with(|reading| {
        for (to, value) in to.iter_mut().zip(reading.borrow().iter()) {
            *to = *value;
        }
    });
}

/// The session's timer where the user measures: reads the user's values, and then the time.
#[pyclass(frozen, module = "nativeprof._native")]
pub struct MeasureReader {
    measure: Py<PyAny>,
    count: usize,
    clock: Clock,
}

impl MeasureReader {
    /// `measure` returns a tuple of so many numbers.
    pub fn new(measure: Py<PyAny>, count: usize, clock: Clock) -> MeasureReader {
        MeasureReader { measure, count, clock }
    }
}

#[pymethods]
impl MeasureReader {
    fn __call__(&self, py: Python<'_>) -> i64 {
        let values = self.measure.bind(py).call0().and_then(|v| v.extract::<Vec<f64>>());
        let values = values.and_then(|values| {
            if values.len() == self.count {
                Ok(values)
            } else {
                Err(pyo3::exceptions::PyValueError::new_err(format!(
                    "measure() returned {} values, not the {} of its class",
                    values.len(),
                    self.count
                )))
            }
        });
        match values {
            Ok(values) => READING.with(|reading| *reading.borrow_mut() = values),
            // The earlier values are kept.
            Err(error) => error.write_unraisable(py, Some(self.measure.bind(py))),
        }
        self.clock.now()
    }

    fn __traverse__(&self, visit: pyo3::PyVisit<'_>) -> Result<(), pyo3::PyTraverseError> {
        visit.call(&self.measure)
    }
}
