//! Recordings of allocations: the hooks sample blocks, the recorder of this process takes their stacks.

use std::sync::{Arc, Mutex, PoisonError};

use nativeprof::capture::signal::SamplingClock;
use nativeprof::error::Error;
use nativeprof::event::probes::ALLOCATION_PROVIDER;
use nativeprof::in_process::allocations::{AllocationLog, AllocationOptions};
use nativeprof::in_process::{ProfilerConfig, Recorder};
use nativeprof_hooks::{self as hooks, BlockSampler, SampledBlock, Sampling};
use pyo3::prelude::*;

use crate::profiler::{Profile, exception, stopped};

// What the hooks publish is what recordings from outside read.
const _: () = assert!(is_same(hooks::PROBE_PROVIDER, ALLOCATION_PROVIDER));

const fn is_same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

/// What the hooks call.
struct Sampler(Arc<AllocationLog>);

impl BlockSampler for Sampler {
    fn on_block(&self, block: SampledBlock) -> Option<u32> {
        self.0.on_block(block.size, block.mean, block.is_mapping)
    }

    fn on_end(&self, number: u32) {
        self.0.on_end(number);
    }

    fn on_resize(&self, number: u32, change: i64) {
        self.0.on_resize(number, change);
    }

    fn on_overflow(&self, number: u32) {
        self.0.on_overflow(number);
    }
}

struct AllocationRecorderState {
    recorder: Recorder,
    sampling: Sampling,
}

/// A recording of the allocations of this process.
#[pyclass(frozen, module = "nativeprof._native")]
pub struct AllocationRecorder(Mutex<Option<AllocationRecorderState>>);

impl AllocationRecorder {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Option<AllocationRecorderState>) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        // Never waited for with the interpreter's lock: who holds this one may be waiting for that.
        py.detach(|| call(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner)))
            .map_err(exception)
    }
}

#[pymethods]
impl AllocationRecorder {
    /// Starts a recording: one sample in `interval` bytes on average, or fewer if these would take more than the part
    /// `max_overhead` of the CPU time.
    #[new]
    fn new(
        py: Python<'_>,
        interval: u64,
        max_overhead: f64,
        native: bool,
        by_thread: bool,
    ) -> PyResult<AllocationRecorder> {
        let log = Arc::new(AllocationLog::new(AllocationOptions {
            mean: interval,
            max_overhead,
            set_mean: hooks::set_mean,
        }));
        let config = ProfilerConfig {
            rate: 1, // of no effect
            clock: SamplingClock::Calls,
            threads: None,
            native,
            by_thread,
            allocations: Some(log.clone()),
        };
        // The hooks after the recorder, and away before it: what it allocates for itself is not the program's.
        let recorder = py.detach(|| Recorder::start(config)).map_err(exception)?;
        let sampling = hooks::sample(Arc::new(Sampler(log)), interval, true).map_err(crate::refused)?;
        Ok(AllocationRecorder(Mutex::new(Some(AllocationRecorderState {
            recorder,
            sampling,
        }))))
    }

    /// What was allocated since the start or the last call; sampling continues.
    fn take(&self, py: Python<'_>) -> PyResult<Profile> {
        self.with(py, |state| state.as_ref().ok_or_else(stopped)?.recorder.take_profile())
            .map(Profile::new)
    }

    /// What is not recorded because another tool's hooks were there before.
    fn limitation(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let other = self.with(py, |state| {
            Ok(state.as_ref().and_then(|state| state.sampling.other_malloc()))
        })?;
        Ok(other.map(|path| {
            format!(
                "calls of malloc get to {}, not to nativeprof's hooks: of what is allocated, only blocks of Python's own allocator (up to \
                 512 bytes) are recorded; end that tool before the recording, or record resident memory from outside \
                 (nativeprof attach PID --mode rss)",
                String::from_utf8_lossy(&path)
            )
        }))
    }

    /// Whether all hooks are still in place.
    fn are_hooks_in_place(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |state| {
            Ok(state.as_ref().is_none_or(|state| state.sampling.are_hooks_in_place()))
        })
    }

    /// Ends the recording and gives what was allocated since the start or the last `take`.
    fn stop(&self, py: Python<'_>) -> PyResult<Profile> {
        self.with(py, |state| {
            let mut state = state.take().ok_or_else(stopped)?;
            state.sampling.remove();
            state.recorder.stop()
        })
        .map(Profile::new)
    }

    /// Whether it was started in this process, not in one that this was forked from.
    fn is_current_process(&self) -> bool {
        // In a forked child the lock may be in any state.
        self.0
            .try_lock()
            .is_ok_and(|state| state.as_ref().is_some_and(|state| state.recorder.is_current_process()))
    }
}
