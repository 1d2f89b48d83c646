//! `nativeprof.tasks`: time and other measures by task, with the event loop and its waits as entries of their own.
//!
//! [`machine`] follows the stacks of tasks on the engine's events, [`waits`] the waiting system calls through the hooks,
//! [`chains`] is what they are charged to, and [`results`] what is made of that.

mod asyncio;
mod chains;
mod kinds;
mod machine;
mod measures;
mod results;
mod waits;

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use nativeprof::profile::model::Meta;
use nativeprof::profile::values::{Unit, ValueType};
use nativeprof_hooks::{self as hooks, HookSet, Installed};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::call_frames;
use crate::engine::clock::monotonic;
use crate::engine::{EngineSession, Filter, FunctionObject, UserTimer};
use crate::profiler::Profile;
use chains::{MAIN_ID, TaskChains, WAIT_ID};
use machine::{TaskMachine, TaskMachineShared};
use measures::{MeasureReader, Measures};
use waits::WaitHandler;

struct TaskRecorderState {
    session: Box<EngineSession<TaskMachine>>,
    hooks: Option<Installed>,
    waits: Arc<WaitHandler>,
    measures: Measures,
    /// Waiting system calls are hooked.
    waits_are_seen: bool,
    /// As [`TaskRecorder::start`] was given them.
    costs: (f64, f64, f64),
    /// Of the values that come after time.
    types: Vec<ValueType>,
    /// Ticks at the start and, once it has stopped, the stop.
    begin: i64,
    end: Option<i64>,
    /// Nanoseconds per tick, once it has stopped: by then they are known best.
    scale: Option<f64>,
    /// Nanoseconds of `CLOCK_MONOTONIC` at the start.
    monotonic: i64,
    since: Instant,
    /// Seconds since the Unix epoch, and of the recording.
    start: f64,
    duration: f64,
}

/// A recording of all tasks of this process: the part of `nativeprof.tasks` that is not Python. It runs once.
#[pyclass(frozen, module = "nativeprof._native")]
pub struct TaskRecorder(UnsafeCell<TaskRecorderState>);

// SAFETY: used with the GIL held only, which orders accesses.
unsafe impl Send for TaskRecorder {}
// SAFETY: as above.
unsafe impl Sync for TaskRecorder {}

impl TaskRecorder {
    /// Not to be kept while Python code may run.
    #[allow(clippy::mut_from_ref)]
    fn state(&self, _: Python<'_>) -> &mut TaskRecorderState {
        // SAFETY: the GIL is held, and no caller keeps what it gets while Python code may run, other than for `start`
        // and `stop`, which allow for it.
        unsafe { &mut *self.0.get() }
    }
}

impl TaskRecorderState {
    /// What was charged so far, in all threads.
    fn chains(&self) -> TaskChains {
        let mut all = TaskChains::new(self.measures.count());
        all.add(&self.session.shared.ended);
        for thread in self.session.threads() {
            all.add(thread.machine.chains());
        }
        all
    }

    fn scale(&self) -> f64 {
        self.scale.unwrap_or_else(|| self.session.clock.nanoseconds())
    }

    fn nanoseconds(&self, ticks: i64) -> i64 {
        (ticks as f64 * self.scale()) as i64
    }
}

/// Number of a function in results: its own, or a negative one for what is not a function.
fn number(id: crate::engine::FunctionNumber) -> i64 {
    match id {
        MAIN_ID => -1,
        WAIT_ID => -2,
        id => i64::from(id),
    }
}

/// Number, key (an address; for code objects that have ended an odd number), code object or text for a C function,
/// whether it is a code object.
type TaskFunctionRow = (i64, usize, Py<PyAny>, bool);
/// Number of a function (`<main>`: -1, `<wait>`: -2), calls, suspended time, own and aggregate time (ns), own and
/// aggregate values.
type ChargeRow = (i64, u64, i64, i64, i64, Vec<f64>, Vec<f64>);
/// Numbers of caller and callee, and of calls.
type CallCountRow = (i64, i64, u64);

#[pymethods]
impl TaskRecorder {
    /// A recording that does not run yet. `measure`: `time`, `rusage`, or a function that returns a tuple of numbers,
    /// one for each of `values`: names and units (`count`, `nanoseconds`, `bytes`). `builtins`: functions that are
    /// written in C too. `skip`: modules to leave out. `library`: directory of the standard library. `hooks`: see waits.
    #[new]
    fn new(
        py: Python<'_>,
        measure: Bound<'_, PyAny>,
        values: Vec<(String, String)>,
        builtins: bool,
        skip: Vec<String>,
        library: String,
        hooks: bool,
    ) -> PyResult<TaskRecorder> {
        let kind = measure.extract::<String>().ok();
        let measures = match kind.as_deref() {
            Some("time") => Measures::Time,
            Some("rusage") => Measures::Usage,
            Some(other) => {
                return Err(PyValueError::new_err(format!(
                    "measure must be time or rusage, got {other:?}"
                )));
            }
            None => Measures::Own(values.len()),
        };
        if measures.count() != values.len() {
            return Err(PyValueError::new_err(format!(
                "this measure has {} values, not {}",
                measures.count(),
                values.len()
            )));
        }
        let mut types = Vec::with_capacity(values.len());
        for (name, unit) in values {
            let known = Unit::by_name(&unit).ok_or_else(|| {
                PyValueError::new_err(format!("unit must be count, nanoseconds or bytes, got {unit:?}"))
            })?;
            types.push(ValueType::new(name, known));
        }
        let waits = Arc::new(WaitHandler::new(measures));
        let shared = TaskMachineShared::new(measures, waits.clone(), library);
        let filter = Filter { only: Vec::new(), skip };
        let mut session = EngineSession::new("nativeprof.tasks", shared, filter);
        session.options.builtins = builtins;
        session.options.splits_resumes = true;
        if let Measures::Own(count) = measures {
            let reader = MeasureReader::new(measure.unbind(), count, session.clock);
            session.timer = Some(UserTimer {
                callable: Bound::new(py, reader)?.into_any().unbind(),
                unit: 1.0,
            });
        }
        Ok(TaskRecorder(UnsafeCell::new(TaskRecorderState {
            session,
            hooks: None,
            waits,
            measures,
            waits_are_seen: hooks,
            costs: (0.0, 0.0, 0.0),
            types,
            begin: 0,
            end: None,
            scale: None,
            monotonic: 0,
            since: Instant::now(),
            start: 0.0,
            duration: 0.0,
        })))
    }

    /// Begins to record. `costs`: seconds for an event and its end of a Python function, of a C function, and for an event
    /// that is ignored.
    fn start(slf: &Bound<'_, Self>, costs: (f64, f64, f64)) -> PyResult<()> {
        let py = slf.py();
        let state = slf.get().state(py);
        if state.session.is_running() || state.end.is_some() {
            return Err(PyRuntimeError::new_err(
                "this recording has been started before; create another one",
            ));
        }
        let wanted = HookSet {
            waits: true,
            ..HookSet::default()
        };
        if state.waits_are_seen {
            let installed = hooks::install(state.waits.clone(), wanted).map_err(crate::refused)?;
            state.waits.installed(installed.ticket());
            state.hooks = Some(installed);
        }
        state.costs = costs;
        state.start = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0.0, |d| d.as_secs_f64());
        let started = EngineSession::start(&mut state.session, slf.as_any());
        let state = slf.get().state(py);
        state.since = Instant::now();
        (state.begin, state.monotonic) = (state.session.clock.now(), monotonic());
        if started.is_err()
            && let Some(mut installed) = state.hooks.take()
        {
            installed.remove();
        }
        started
    }

    /// Ends the recording, and all open calls. Nothing if it does not run.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        let state = self.state(py);
        if !state.session.is_running() {
            return Ok(());
        }
        state.session.not_in_timer("stop")?;
        let now = state.session.clock.now();
        state.duration = state.since.elapsed().as_secs_f64();
        // First: then no thread writes to what is read below.
        if let Some(mut installed) = state.hooks.take() {
            installed.remove();
        }
        let stopped = state.session.stop(py);
        for thread in state.session.threads_mut() {
            thread.machine.finish(now);
        }
        (state.end, state.scale) = (Some(now), Some(state.session.clock.nanoseconds()));
        stopped
    }

    fn is_running(&self, py: Python<'_>) -> bool {
        self.state(py).session.is_running()
    }

    /// Nanoseconds from the start until now, or until the stop.
    fn total(&self, py: Python<'_>) -> i64 {
        let state = self.state(py);
        let end = state.end.unwrap_or_else(|| state.session.clock.now());
        state.nanoseconds(end.wrapping_sub(state.begin))
    }

    /// `CLOCK_MONOTONIC` at the start (ns).
    fn start_ticks(&self, py: Python<'_>) -> i64 {
        self.state(py).monotonic
    }

    /// All functions seen, and what was charged to them so far: to calls that are open too, once it has stopped.
    fn charges(&self, py: Python<'_>) -> PyResult<(Vec<TaskFunctionRow>, Vec<ChargeRow>)> {
        let state = self.state(py);
        let charges = results::charges(&state.chains(), state.measures.count());
        let row = |(id, c): (_, results::Charge)| {
            let time = |ticks| state.nanoseconds(ticks);
            let (own, aggregate) = (time(c.own), time(c.aggregate));
            let suspended = time(c.suspended);
            (
                number(id),
                c.calls,
                suspended,
                own,
                aggregate,
                c.own_values,
                c.aggregate_values,
            )
        };
        let charges = charges.into_iter().map(row).collect();
        Ok((self.functions(py)?, charges))
    }

    /// All functions seen; and caller, callee, calls.
    fn calls(&self, py: Python<'_>) -> PyResult<(Vec<TaskFunctionRow>, Vec<CallCountRow>)> {
        let calls = results::calls(&self.state(py).chains());
        let calls = calls.into_iter().map(|(a, b, n)| (number(a), number(b), n)).collect();
        Ok((self.functions(py)?, calls))
    }

    /// All functions seen. Their numbers may be those of others later.
    fn functions(&self, py: Python<'_>) -> PyResult<Vec<TaskFunctionRow>> {
        let functions = self.state(py).session.functions.iter();
        let all: Vec<_> = functions.map(|(id, f)| (id, f.key, f.object.clone_ref(py))).collect();
        // Only now: Python code may run.
        let row = |(id, key, object): (_, _, FunctionObject)| {
            let is_code = object.is_code();
            Ok((number(id), key, object.into_object(py)?, is_code))
        };
        all.into_iter().map(row).collect()
    }

    /// What was charged so far, as a profile.
    fn profile(&self, py: Python<'_>) -> Profile {
        let state = self.state(py);
        let frames = call_frames::frames(py, &state.session.functions);
        let chains = state.chains();
        let ([entered, called], (python, c, ignored)) = (chains.entered, state.costs);
        let meta = Meta {
            profiler_cpu: entered as f64 * (python + ignored) + called as f64 * c,
            version: env!("CARGO_PKG_VERSION").to_string(),
            event: "calls".to_string(),
            backend: "events".to_string(),
            start: state.start,
            duration: match state.end {
                Some(_) => state.duration,
                None => state.since.elapsed().as_secs_f64(),
            },
            pid: std::process::id(),
            python: format!(
                "CPython {}",
                Python::version_str().split(' ').next().unwrap_or_default()
            ),
            ..Meta::default()
        };
        let nanoseconds = state.scale();
        Profile::new(results::profile(
            &chains,
            &frames,
            state.measures,
            &state.types,
            nanoseconds,
            meta,
        ))
    }

    fn __traverse__(&self, visit: pyo3::PyVisit<'_>) -> Result<(), pyo3::PyTraverseError> {
        // SAFETY: the collector runs with the GIL held; nothing is changed.
        let state = unsafe { &*self.0.get() };
        match &state.session.timer {
            Some(timer) => visit.call(&timer.callable),
            None => Ok(()),
        }
    }
}
