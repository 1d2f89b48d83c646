//! Recordings of all calls of this process, for `nativeprof.Profiler`.

use std::cell::UnsafeCell;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use nativeprof::profile::model::{self, FrameKind, Meta};
use nativeprof::profile::your_functions::function_name;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::call_frames;
use crate::call_tree::{self, CallCounter, CallTree, CallTreeShared, CountingMachine, ValueColumns};
use crate::engine::{Costs, EngineSession, Filter};
use crate::profiler::Profile;

enum ActiveRecording {
    Times(Box<EngineSession<CallTree>>),
    Counts(Box<EngineSession<CallCounter>>),
}

struct CallRecorderState {
    recording: ActiveRecording,
    process: u32,
    since: Instant,
    start: f64,
    /// As [`CallRecorder::start`] was given them.
    costs: (f64, f64, f64),
    subtract: bool,
    with_samples: bool,
}

/// A recording of all calls of this process.
#[pyclass(frozen, module = "nativeprof._native")]
pub struct CallRecorder(UnsafeCell<CallRecorderState>);

// SAFETY: used with the GIL held only, which orders accesses.
unsafe impl Send for CallRecorder {}
// SAFETY: as above.
unsafe impl Sync for CallRecorder {}

impl CallRecorder {
    /// Not to be kept while Python code may run.
    #[allow(clippy::mut_from_ref)]
    fn state(&self, _: Python<'_>) -> &mut CallRecorderState {
        // SAFETY: the GIL is held, and no caller keeps what it gets while Python code may run, other than for `start`
        // and `stop`, which allow for it.
        unsafe { &mut *self.0.get() }
    }
}

fn seconds() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |d| d.as_secs_f64())
}

#[pymethods]
impl CallRecorder {
    /// A recording that does not run yet. `mode`: `times`, `counts`, or `counts with samples`: for [`combine`].
    /// `threads`: idents, or None for all.
    #[new]
    #[allow(clippy::too_many_arguments)]
    fn new(
        mode: &str,
        builtins: bool,
        cpu: bool,
        threads: Option<Vec<u64>>,
        by_thread: bool,
        only: Vec<String>,
        skip: Vec<String>,
    ) -> PyResult<CallRecorder> {
        let mut shared = CallTreeShared::default();
        shared.numbered = mode == "counts with samples";
        (shared.cpu, shared.by_thread, shared.only) = (cpu, by_thread, threads.unwrap_or_default());
        let (name, filter) = ("nativeprof.Profiler", Filter { only, skip });
        let recording = match mode {
            "times" => {
                let mut session = EngineSession::new(name, shared, filter);
                session.options.builtins = builtins;
                ActiveRecording::Times(session)
            }
            "counts" | "counts with samples" => {
                let mut session = EngineSession::new(name, shared, filter);
                session.options.builtins = false;
                session.options.returns = false;
                session.options.splits_resumes = true;
                ActiveRecording::Counts(session)
            }
            _ => {
                return Err(PyValueError::new_err(format!(
                    "mode must be times or counts, got {mode:?}"
                )));
            }
        };
        Ok(CallRecorder(UnsafeCell::new(CallRecorderState {
            recording,
            process: std::process::id(),
            since: Instant::now(),
            start: seconds(),
            costs: (0.0, 0.0, 0.0),
            subtract: false,
            with_samples: mode == "counts with samples",
        })))
    }

    /// Begins to record. `costs`: seconds for a call of a Python function, of a C function, and for an event that is
    /// ignored; `subtract` takes them out of the times.
    fn start(slf: &Bound<'_, Self>, costs: (f64, f64, f64), subtract: bool) -> PyResult<()> {
        let state = slf.get().state(slf.py());
        (state.since, state.start) = (Instant::now(), seconds());
        (state.costs, state.subtract) = (costs, subtract);
        if let (ActiveRecording::Times(session), true) = (&mut state.recording, subtract) {
            let ticks = |cost: f64| (cost * 1e9 / session.clock.nanoseconds()).round() as i64;
            session.options.costs = Costs::of_calls(ticks(costs.0), ticks(costs.1), ticks(costs.2));
        }
        match &mut state.recording {
            ActiveRecording::Times(session) => EngineSession::start(session, slf.as_any()),
            ActiveRecording::Counts(session) => EngineSession::start(session, slf.as_any()),
        }
    }

    /// What was gathered since the start or the last call; recording continues. Calls that are open are in the profile in
    /// which they end.
    fn take(&self, py: Python<'_>) -> PyResult<Profile> {
        let state = self.state(py);
        let (since, start) = (state.since, state.start);
        (state.since, state.start) = (Instant::now(), seconds());
        let meta = Meta {
            version: env!("CARGO_PKG_VERSION").to_string(),
            event: "calls".to_string(),
            backend: "events".to_string(),
            start,
            duration: since.elapsed().as_secs_f64(),
            pid: std::process::id(),
            python: format!(
                "CPython {}",
                Python::version_str().split(' ').next().unwrap_or_default()
            ),
            ..Meta::default()
        };
        let costs = state.costs;
        match &mut state.recording {
            ActiveRecording::Times(session) => {
                let columns = ValueColumns {
                    wall: true,
                    cpu: session.shared.cpu,
                    with_samples: false,
                };
                made(py, session, columns, costs, meta)
            }
            ActiveRecording::Counts(session) => {
                let columns = ValueColumns {
                    wall: false,
                    cpu: false,
                    with_samples: state.with_samples,
                };
                made(py, session, columns, costs, meta)
            }
        }
    }

    /// How often each function was called since the last lap or the start: its file, first line and qualified name, and calls.
    /// [`CallRecorder::take`] still has them.
    fn lap(&self, py: Python<'_>) -> Vec<(String, u32, String, u64)> {
        match &mut self.state(py).recording {
            ActiveRecording::Times(session) => calls_of_lap(py, session),
            ActiveRecording::Counts(session) => calls_of_lap(py, session),
        }
    }

    /// Ends the recording and gives what was gathered since the start or the last `take_chains`.
    fn stop(&self, py: Python<'_>) -> PyResult<Profile> {
        let is_running = match &self.state(py).recording {
            ActiveRecording::Times(session) => session.is_running(),
            ActiveRecording::Counts(session) => session.is_running(),
        };
        if !is_running {
            return Err(PyRuntimeError::new_err(
                "this recording has been stopped; start another one",
            ));
        }
        match &mut self.state(py).recording {
            ActiveRecording::Times(session) => session.stop(py)?,
            ActiveRecording::Counts(session) => session.stop(py)?,
        }
        self.take(py)
    }

    /// Whether it was made in this process, not in one that this was forked from.
    fn is_current_process(&self, py: Python<'_>) -> bool {
        self.state(py).process == std::process::id()
    }
}

fn calls_of_lap<M: CountingMachine>(py: Python<'_>, session: &mut EngineSession<M>) -> Vec<(String, u32, String, u64)> {
    let calls = call_tree::lap(py, session);
    let called = calls
        .into_iter()
        .filter_map(|(number, calls)| Some((session.functions.get(number)?, calls)));
    called
        .map(|(function, calls)| {
            let frame = call_frames::frame(py, function);
            let name = function_name(&frame).into_owned();
            (frame.filename, frame.first_line, name, calls)
        })
        .collect()
}

fn made<M: CountingMachine>(
    py: Python<'_>,
    session: &mut EngineSession<M>,
    columns: ValueColumns,
    (python, c, ignored): (f64, f64, f64),
    mut meta: Meta,
) -> PyResult<Profile> {
    let taken = call_tree::take_chains(py, session);
    let frames = call_frames::frames(py, &session.functions);
    let nanoseconds = session.clock.nanoseconds();
    let profile = py.detach(|| {
        let (of_python, of_c) = call_tree::calls(&taken, &frames);
        meta.profiler_cpu = of_python as f64 * (python + ignored) + of_c as f64 * c;
        call_tree::profile(&taken, &frames, columns, nanoseconds, meta)
    });
    Ok(Profile::new(profile))
}

/// A sampled profile, and in it the calls that a recording of `counts with samples` has counted at the same time: as
/// a value type of its own, exact for each function; its node with the calls is below the root.
#[pyfunction]
pub fn combine(py: Python<'_>, samples: &Profile, counts: &Profile) -> Profile {
    py.detach(|| {
        let (samples, mut counts) = (samples.inner().clone(), counts.inner().clone());
        counts.meta = Meta::default();
        name_threads_as(&samples, &mut counts);
        let meta = samples.meta.clone();
        let mut sum = nativeprof::profile::merge::combine(&[(String::new(), samples), (String::new(), counts)]);
        sum.meta = meta;
        Profile::new(sum)
    })
}

/// Gives the threads of calls that were counted together with samples the names that the samples have for them: their
/// number, and then the name.
fn name_threads_as(samples: &model::Profile, counts: &mut model::Profile) {
    let threads = |profile: &model::Profile| {
        let frames = profile.frames.iter().enumerate();
        let threads = frames.filter(|(_, frame)| frame.kind == FrameKind::Thread);
        threads.map(|(at, frame)| (at, frame.name.clone())).collect::<Vec<_>>()
    };
    let known = threads(samples);
    for (at, name) in threads(counts) {
        let is_same = |other: &str| {
            other
                .strip_prefix(&name)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(" ("))
        };
        if let Some((_, other)) = known.iter().find(|(_, other)| is_same(other)) {
            counts.frames[at].name.clone_from(other);
        }
    }
}
