//! Recordings of this process, and the profiles that they make.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use nativeprof::capture::signal::SamplingClock;
use nativeprof::error::{Error, ErrorKind};
use nativeprof::export;
use nativeprof::export::select;
use nativeprof::in_process;
use nativeprof::in_process::ProfilerConfig;
use nativeprof::process::machine;
use nativeprof::profile::model;
use nativeprof::profile::model::FrameKind;
use nativeprof::profile::stats::{FunctionId, Stats};
use nativeprof::profile::summary;
use nativeprof::profile::values::ValueType;
use nativeprof::profile::views::ViewOptions;
use nativeprof::profile::your_functions::function_name;
use pyo3::exceptions::{PyOSError, PyPermissionError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

pub fn exception(e: Error) -> PyErr {
    let text = e.to_string();
    match e.kind {
        ErrorKind::Usage | ErrorKind::Data => PyValueError::new_err(text),
        ErrorKind::NotPermitted => PyPermissionError::new_err(text),
        ErrorKind::Unsupported => PyRuntimeError::new_err(text),
        ErrorKind::NoSuchProcess
        | ErrorKind::NoSuchCommand
        | ErrorKind::NotExecutable
        | ErrorKind::Killed(_)
        | ErrorKind::Io => PyOSError::new_err(text),
    }
}

/// A recording of this process, made by a thread that Python does not know.
#[pyclass(frozen, module = "nativeprof._native")]
pub struct SampleRecorder(Mutex<Option<in_process::Recorder>>);

impl SampleRecorder {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Option<in_process::Recorder>) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        // Never waited for with the interpreter's lock: who holds this one may be waiting for that.
        py.detach(|| call(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner)))
            .map_err(exception)
    }
}

pub fn stopped() -> Error {
    Error::new(ErrorKind::Unsupported, "this recording has been stopped").hint("start another one")
}

#[pymethods]
impl SampleRecorder {
    /// Starts a recording: `rate` samples per second of each thread's CPU time, or with `wall` of wall-clock time; of
    /// the threads with these idents, or of all.
    #[new]
    fn new(
        py: Python<'_>,
        rate: u64,
        native: bool,
        wall: bool,
        threads: Option<Vec<u64>>,
        by_thread: bool,
    ) -> PyResult<SampleRecorder> {
        let config = ProfilerConfig {
            rate,
            clock: if wall { SamplingClock::Wall } else { SamplingClock::Cpu },
            threads,
            native,
            by_thread,
            allocations: None,
        };
        let started = py.detach(|| in_process::Recorder::start(config)).map_err(exception)?;
        Ok(SampleRecorder(Mutex::new(Some(started))))
    }

    /// What was gathered since the start or the last call; sampling continues.
    fn take(&self, py: Python<'_>) -> PyResult<Profile> {
        self.with(py, |recorder| recorder.as_ref().ok_or_else(stopped)?.take_profile())
            .map(Profile)
    }

    /// Ends the recording and gives what was gathered since the start or the last `take_profile`.
    fn stop(&self, py: Python<'_>) -> PyResult<Profile> {
        self.with(py, |recorder| recorder.take().ok_or_else(stopped)?.stop())
            .map(Profile)
    }

    /// Whether it was started in this process, not in one that this was forked from.
    fn is_current_process(&self) -> bool {
        // In a forked child the lock may be in any state.
        self.0
            .try_lock()
            .is_ok_and(|r| r.as_ref().is_some_and(in_process::Recorder::is_current_process))
    }

    /// Why fewer samples are taken than requested; None if there are not fewer.
    fn limitation(&self) -> Option<String> {
        let recorder = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Some(recorder.as_ref()?.limitation()?.to_string())
    }

    /// Number of the signal that interrupts threads; None if another handler has taken its place.
    fn signal(&self) -> Option<i32> {
        in_process::signal()
    }
}

/// A finished profile.
#[pyclass(frozen, module = "nativeprof._native")]
pub struct Profile(model::Profile);

impl Profile {
    pub fn new(profile: model::Profile) -> Profile {
        Profile(profile)
    }

    pub fn inner(&self) -> &model::Profile {
        &self.0
    }
}

/// Name, file, line (0: unknown), module, self samples, total samples.
type FunctionCountRow = (String, String, u32, String, u64, u64);

#[pymethods]
impl Profile {
    /// The profile in a format by its name.
    fn render<'py>(&self, py: Python<'py>, format: &str) -> PyResult<Bound<'py, PyBytes>> {
        let format = export::by_name(format).map_err(|e| PyValueError::new_err(e.to_string()))?;
        let mut bytes = Vec::new();
        py.detach(|| format.write_default(&self.0, &mut bytes))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// The count tree in JSON, with every node and a plain timeline.
    fn tree<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let mut bytes = Vec::new();
        py.detach(|| nativeprof::profile::json::write_expanded(&self.0, &mut bytes))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Functions by their own amounts of a value (by default that which the profile shows), most first; before them the
    /// key of the value and its amount in the whole profile.
    fn top(&self, py: Python<'_>, most: usize, value: Option<&str>) -> PyResult<(String, u64, Vec<FunctionCountRow>)> {
        let value = match value {
            None => self.0.default_value(),
            Some(name) => self.0.find_value(name).ok_or_else(|| {
                let known: Vec<&str> = self.0.value_types().iter().map(|value| &*value.kind.name).collect();
                PyValueError::new_err(format!(
                    "the profile has no value {name:?}; it has {}",
                    known.join(", ")
                ))
            })?,
        };
        let rows = py.detach(|| {
            let profile = ViewOptions::default().folded(select::by_value(self.0.clone(), value));
            let stats = Stats::new(&profile);
            let counts = stats.functions();
            let mut hottest: Vec<(u64, u32)> = vec![(0, 0); counts.len()];
            for line in stats.lines().into_iter().filter(|line| line.line > 0) {
                let most = &mut hottest[line.function as usize];
                *most = (*most).max((line.counts.self_count.max(1), line.line));
            }
            let mut order: Vec<usize> = (0..counts.len()).filter(|i| counts[*i].total > 0).collect();
            order.sort_by_key(|i| std::cmp::Reverse((counts[*i].self_count, counts[*i].total)));
            let row = |i: usize| {
                let f = stats.frame(i as FunctionId);
                let is_python = f.kind == FrameKind::Python;
                let (file, line) = match (is_python, f.source.is_empty()) {
                    (true, _) => (&f.filename, f.first_line),
                    (false, true) => (&f.filename, 0),
                    (false, false) => (&f.source, hottest[i].1),
                };
                (
                    function_name(f).into_owned(),
                    file.clone(),
                    line,
                    f.module.clone(),
                    counts[i].self_count,
                    counts[i].total,
                )
            };
            order.into_iter().take(most).map(row).collect()
        });
        Ok((self.0.value_types()[value].kind.key(), self.0.total_amount(value), rows))
    }

    /// Figures of the recording, with the keys of the class `Stats` in `profiler.py`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (m, stats) = (&self.0.meta, PyDict::new(py));
        let q = &m.quality;
        stats.set_item("rate", m.rate)?;
        stats.set_item("event", &m.event)?;
        stats.set_item("duration", m.duration)?;
        stats.set_item("profiler_cpu", m.profiler_cpu)?;
        for (name, value) in [
            ("expected", q.expected),
            ("taken", q.taken),
            ("exact", q.exact),
            ("repaired", q.repaired),
            ("partial", q.partial),
            ("lost", q.lost),
        ] {
            stats.set_item(name, value)?;
        }
        stats.set_item("reasons", q.reasons.clone())?;
        let count = self.0.count_type().name.to_string();
        let total = self.0.nodes.first().map_or(0, |root| root.count);
        stats.set_item("counts", count)?;
        stats.set_item("total", total)?;
        Ok(stats)
    }

    /// The block of text on the quality of the profile; `written` says where it went.
    fn summary(&self, written: &str) -> String {
        if self.0.count_type() == &ValueType::CALLS {
            let (calls, meta) = (self.0.nodes.first().map_or(0, |root| root.count), &self.0.meta);
            return format!(
                "nativeprof: {} in {:.1} s\n  python:   {}\n  overhead: {:.2} s ({:.0} ns per call)\n  \
                 written:  {written}",
                summary::counted(calls, "calls"),
                meta.duration,
                meta.python,
                meta.profiler_cpu,
                meta.profiler_cpu * 1e9 / calls.max(1) as f64,
            );
        }
        let block = summary::block(&self.0.meta, written, true);
        match summary::allocations(&self.0) {
            Some(lines) => format!("{block}\n{lines}"),
            None => block,
        }
    }
}

/// What is known of this machine, with the keys of files.
#[pyfunction]
pub fn this_machine(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let (machine, found) = (machine::this_machine(), PyDict::new(py));
    found.set_item("cpu", machine.cpu)?;
    found.set_item("cores", machine::allowed_cpus(std::process::id()))?;
    found.set_item("kernel", machine.kernel)?;
    found.set_item("governor", machine.governor)?;
    Ok(found)
}

/// Name of the format of a file's extension.
#[pyfunction]
pub fn format_of(path: PathBuf) -> PyResult<&'static str> {
    export::by_path(&path)
        .map(|f| f.name)
        .map_err(|e| PyValueError::new_err(e.to_string()))
}

/// Names of all formats.
#[pyfunction]
pub fn formats() -> Vec<&'static str> {
    export::FORMATS.iter().map(|f| f.name).collect()
}

/// The profile that a file in the format `json` holds.
#[pyfunction]
pub fn read(py: Python<'_>, content: &[u8]) -> PyResult<Profile> {
    py.detach(|| nativeprof::profile::json::read(content))
        .map(Profile)
        .map_err(|e| PyValueError::new_err(e.to_string()))
}
