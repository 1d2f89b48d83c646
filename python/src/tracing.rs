//! `nativeprof.tracing`: the part of its `Profile` that `cProfile` has in C.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::CStr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::calls::{CallPairs, CallPairsShared, Figures, Totals};
use crate::engine::{Clock, Costs, EVENTS, EngineSession, Filter, FunctionNumber, FunctionObject, UserTimer};

/// A deterministic profiler of all calls; `nativeprof.tracing.Profile` is its subclass.
///
/// Reports have a row for its `disable`. This name is as long as `_lsprof.Profiler`: columns are as wide as cProfile's.
#[pyclass(subclass, frozen, name = "Profiler", module = "_native")]
pub struct CallTracer(UnsafeCell<Box<EngineSession<CallPairs>>>);

// SAFETY: used with the GIL held only, which orders accesses.
unsafe impl Send for CallTracer {}
// SAFETY: as above.
unsafe impl Sync for CallTracer {}

impl CallTracer {
    /// Not to be kept while Python code may run.
    #[allow(clippy::mut_from_ref)]
    fn session(&self, _: Python<'_>) -> &mut Box<EngineSession<CallPairs>> {
        // SAFETY: the GIL is held, and no caller keeps what it gets while Python code may run, other than for `start`
        // and `stop`, which allow for it.
        unsafe { &mut *self.0.get() }
    }
}

#[pymethods]
impl CallTracer {
    #[new]
    #[pyo3(signature = (*_args, **_kwargs))]
    fn new(_args: &Bound<'_, pyo3::types::PyTuple>, _kwargs: Option<&Bound<'_, pyo3::types::PyDict>>) -> CallTracer {
        let shared = CallPairsShared {
            subcalls: true,
            ..CallPairsShared::default()
        };
        CallTracer(UnsafeCell::new(EngineSession::new(
            "nativeprof.tracing.Profile",
            shared,
            Filter::default(),
        )))
    }

    #[pyo3(signature = (timer=None, timeunit=0.0, subcalls=true, builtins=true, *, threads="all", only=Vec::new(), skip=Vec::new()))]
    #[allow(clippy::too_many_arguments)]
    fn __init__(
        &self,
        py: Python<'_>,
        timer: Option<Py<PyAny>>,
        timeunit: f64,
        subcalls: bool,
        builtins: bool,
        threads: &str,
        only: Vec<String>,
        skip: Vec<String>,
    ) -> PyResult<()> {
        let current_thread_only = match threads {
            "all" => false,
            "current" => true,
            _ => {
                return Err(pyo3::exceptions::PyValueError::new_err(format!(
                    "threads must be \"all\" or \"current\", got {threads:?}"
                )));
            }
        };
        self.session(py).not_in_timer("initialize")?;
        self.session(py).stop(py)?;
        let session = self.session(py);
        session.timer = timer.map(|callable| UserTimer {
            callable,
            unit: timeunit,
        });
        session.options.builtins = builtins;
        session.options.current_thread_only = current_thread_only;
        session.shared.subcalls = subcalls;
        session.functions.filter = Filter { only, skip };
        Ok(())
    }

    /// enable(subcalls=True, builtins=True)
    ///
    /// Start collecting profiling information. `subcalls`: figures for each pair of caller and callee. `builtins`:
    /// functions written in C too.
    #[pyo3(signature = (subcalls=None, builtins=None))]
    fn enable(slf: &Bound<'_, Self>, subcalls: Option<bool>, builtins: Option<bool>) -> PyResult<()> {
        let session = slf.get().session(slf.py());
        session.shared.subcalls = subcalls.unwrap_or(session.shared.subcalls);
        session.options.builtins = builtins.unwrap_or(session.options.builtins);
        let seconds = seconds_per_tick(session);
        let builtins = session.options.builtins;
        let costs = costs_of(slf.as_any(), builtins, seconds)?;
        let session = slf.get().session(slf.py());
        session.options.costs = costs;
        EngineSession::start(session, slf.as_any())
    }

    /// disable()
    ///
    /// Stop collecting profiling information; open calls end now.
    fn disable(&self, py: Python<'_>) -> PyResult<()> {
        self.session(py).stop(py)
    }

    /// clear()
    ///
    /// Clear all profiling information collected so far.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        let session = self.session(py);
        session.not_in_timer("clear")?;
        session.shared.ended = Totals::default();
        session.clear()
    }

    /// getstats() -> list of profiler_entry objects
    ///
    /// Each has the attributes code (a code object, or the text for a C function; for code objects that have ended meanwhile, one
    /// object for all that had the same file, first line and name), callcount, reccallcount, totaltime,
    /// inlinetime and calls: None, or a list of profiler_subentry objects, which have the same attributes but calls.
    fn getstats(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let session = self.session(py);
        let mut totals = session.shared.ended.clone();
        for thread in session.threads() {
            totals.add(&thread.machine.totals());
        }
        let seconds = seconds_per_tick(session);
        let functions = session.functions.iter();
        let functions: Vec<(FunctionNumber, FunctionObject)> =
            functions.map(|(id, f)| (id, f.object.clone_ref(py))).collect();
        // Only now: Python code may run, and events come in.
        let mut objects = HashMap::with_capacity(functions.len());
        for (id, object) in functions {
            objects.insert(id, object.into_object(py)?);
        }
        let object = |id| {
            objects
                .get(&id)
                .map_or_else(|| py.None(), |object| object.clone_ref(py))
        };
        let (entry, subentry) = types(py)?;
        let mut entries = Vec::new();
        for (id, figures, callees) in totals.rows() {
            if figures.calls == 0 {
                continue;
            }
            let code = object(id);
            let mut calls = Vec::with_capacity(callees.len());
            for (id, figures) in callees {
                calls.push(row(py, subentry, object(id), &figures, seconds, None)?);
            }
            let calls = if calls.is_empty() {
                py.None()
            } else {
                calls.into_pyobject(py)?.unbind()
            };
            entries.push(row(py, entry, code, &figures, seconds, Some(calls))?);
        }
        Ok(entries)
    }

    fn __traverse__(&self, visit: pyo3::PyVisit<'_>) -> Result<(), pyo3::PyTraverseError> {
        // SAFETY: the collector runs with the GIL held; nothing is changed.
        let session = unsafe { &*self.0.get() };
        match &session.timer {
            Some(timer) => visit.call(&timer.callable),
            None => Ok(()),
        }
    }
}

fn seconds_per_tick(session: &EngineSession<CallPairs>) -> f64 {
    match &session.timer {
        None => session.clock.nanoseconds() / 1e9,
        Some(timer) if timer.unit > 0.0 => timer.unit,
        Some(_) => 1e-9,
    }
}

/// What events cost by the attributes of the profiler: `bias`, seconds for each event, or if that is 0 `_costs(builtins)`:
/// seconds for the call of a Python function, of a C function, and for an event that is ignored; None: nothing is
/// subtracted.
fn costs_of(profiler: &Bound<'_, PyAny>, builtins: bool, seconds: f64) -> PyResult<Costs> {
    let ticks = |cost: f64| (cost / seconds).round() as i64;
    let bias: f64 = match profiler.getattr_opt("bias")? {
        Some(bias) => bias.extract()?,
        None => 0.0,
    };
    if bias != 0.0 {
        return Ok(Costs {
            events: [ticks(bias); EVENTS],
            ignored: 0,
        });
    }
    let measured: Option<(f64, f64, f64)> = match profiler.getattr_opt("_costs")? {
        Some(costs) => costs.call1((builtins,))?.extract()?,
        None => None,
    };
    let Some((python, c, ignored)) = measured else {
        return Ok(Costs::default());
    };
    Ok(Costs::of_calls(ticks(python), ticks(c), ticks(ignored)))
}

/// The types `profiler_entry` and `profiler_subentry`.
fn types(py: Python<'_>) -> PyResult<(&Py<PyAny>, &Py<PyAny>)> {
    static TYPES: PyOnceLock<(Py<PyAny>, Py<PyAny>)> = PyOnceLock::new();
    let made = TYPES.get_or_try_init(py, || -> PyResult<_> {
        Ok((
            sequence_type(py, c"nativeprof.tracing.profiler_entry", 6)?,
            sequence_type(py, c"nativeprof.tracing.profiler_subentry", 5)?,
        ))
    })?;
    Ok((&made.0, &made.1))
}

fn sequence_type(py: Python<'_>, name: &'static CStr, fields: usize) -> PyResult<Py<PyAny>> {
    let field = |name: &'static CStr, doc: &'static CStr| ffi::PyStructSequence_Field {
        name: name.as_ptr(),
        doc: doc.as_ptr(),
    };
    let end = ffi::PyStructSequence_Field {
        name: std::ptr::null(),
        doc: std::ptr::null(),
    };
    let mut all = vec![
        field(c"code", c"code object or built-in function name"),
        field(c"callcount", c"how many times this was called"),
        field(c"reccallcount", c"how many of these calls were recursive"),
        field(c"totaltime", c"seconds in it and in what it called"),
        field(c"inlinetime", c"seconds in it alone"),
        field(c"calls", c"what it called"),
    ];
    all.truncate(fields);
    all.push(end);
    // The type keeps pointers into it.
    let all = Box::leak(all.into_boxed_slice());
    let mut description = ffi::PyStructSequence_Desc {
        name: name.as_ptr(),
        doc: std::ptr::null(),
        fields: all.as_mut_ptr(),
        n_in_sequence: fields as i32,
    };
    // SAFETY: the description is valid, and its names are never freed.
    unsafe {
        Bound::from_owned_ptr_or_err(py, ffi::PyStructSequence_NewType(&mut description).cast()).map(Bound::unbind)
    }
}

fn row(
    py: Python<'_>,
    kind: &Py<PyAny>,
    code: Py<PyAny>,
    figures: &Figures,
    seconds: f64,
    calls: Option<Py<PyAny>>,
) -> PyResult<Py<PyAny>> {
    let mut values = vec![
        code,
        figures.calls.into_pyobject(py)?.into_any().unbind(),
        figures.recursive.into_pyobject(py)?.into_any().unbind(),
        (figures.cumulative as f64 * seconds)
            .into_pyobject(py)?
            .into_any()
            .unbind(),
        (figures.self_ticks as f64 * seconds)
            .into_pyobject(py)?
            .into_any()
            .unbind(),
    ];
    values.extend(calls);
    let tuple = pyo3::types::PyTuple::new(py, values)?;
    kind.bind(py).call1((tuple,)).map(Bound::unbind)
}

/// Seconds per tick, and the name of the clock.
#[pyfunction]
pub fn clock() -> (&'static str, f64) {
    let clock = Clock::best();
    let name = match clock {
        Clock::Counter => "time stamp counter",
        Clock::Monotonic => "CLOCK_MONOTONIC",
    };
    (name, clock.nanoseconds() / 1e9)
}

/// Whether a session of the event engine runs.
#[pyfunction]
pub fn is_tracing(py: Python<'_>) -> bool {
    crate::engine::is_busy(py)
}
