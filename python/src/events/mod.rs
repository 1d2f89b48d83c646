//! `nativeprof.events`: the event timeline. Calls come from the engine, allocations from the hooks; both go into one
//! [`log::Log`] per profiler, and [`timeline`] puts them in order afterwards.

mod log;
mod mapping;
mod recorder;
mod timeline;

use std::collections::HashSet;
use std::ffi::c_int;
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nativeprof_hooks::{self as hooks, Allocation, AllocatorCall, Cache, Domain, Handler, HookSet, Installed, Wait};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::engine::{Clock, FunctionObject};
use log::{EventRow, Log};
use timeline::{Base, EndedKeys, Scale, code};

/// The log of one profiler, as the hooks call it.
pub(crate) struct Sink {
    log: Log,
    clock: Clock,
}

impl Sink {
    #[inline]
    fn append(&self, cache: &mut Cache, key: u64, event: u64, address: u64, size: i64, time: i64) {
        let row = EventRow {
            key,
            event,
            time,
            address,
            size,
        };
        self.log.append(&mut cache.word, row);
    }
}

impl Handler for Sink {
    fn on_allocation(&self, cache: &mut Cache, a: &Allocation) {
        let domain = match a.domain {
            Domain::Native => timeline::NATIVE,
            domain if a.has_reached_native => (domain as u64 + 1) | timeline::REACHED,
            domain => domain as u64 + 1,
        };
        let now = self.clock.now();
        let event = |code: u64| code | domain << timeline::DOMAIN_SHIFT;
        let (address, size) = (a.address as u64, i64::try_from(a.size).unwrap_or(i64::MAX));
        match a.kind {
            AllocatorCall::Malloc => self.append(cache, 0, event(code::MALLOC), address, size, now),
            AllocatorCall::Calloc => self.append(cache, 0, event(code::CALLOC), address, size, now),
            AllocatorCall::Free => self.append(cache, 0, event(code::FREE), address, 0, now),
            AllocatorCall::Realloc => {
                if a.old_address != 0 {
                    let before = if a.before == 0 { now } else { a.before as i64 };
                    self.append(cache, 0, event(code::REALLOC_FREE), a.old_address as u64, 0, before);
                }
                if a.address != 0 {
                    self.append(cache, 0, event(code::REALLOC), address, size, now);
                }
            }
        }
    }

    fn on_wait(&self, cache: &mut Cache, wait: Wait) {
        let event = match wait {
            Wait::Enter => code::WAIT,
            Wait::Leave => code::WAIT_END,
        };
        self.append(cache, 0, event, 0, 0, self.clock.now());
    }

    fn clock(&self) -> u64 {
        self.clock.now() as u64
    }
}

/// What has been recorded, and the recording while it runs.
struct EventLogState {
    /// Kept from run to run: rows accumulate.
    sink: Arc<Sink>,
    running: Option<Installed>,
    /// Functions by key. Code objects are kept alive so that no other takes its address.
    functions: Vec<(u64, FunctionObject)>,
    ended: EndedKeys,
    bases: Vec<Base>,
    /// Keys of functions that belong to the profiler.
    left_out: HashSet<u64>,
    scale: Scale,
}

/// The part of `nativeprof.events.EventProfiler` that is not Python.
#[pyclass(frozen, module = "nativeprof._native")]
pub struct EventLog {
    state: Mutex<EventLogState>,
    wanted: HookSet,
    pid: u32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Locked with the GIL held, and not while Python code runs: no thread waits for both.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Function's key, object (code object or text), whether it is a code object.
type EventFunctionRow = (u64, Py<PyAny>, bool);
/// Rows, their functions and callers, rows lost, and the functions.
type EventRows<'py> = (
    Bound<'py, PyByteArray>,
    Bound<'py, PyByteArray>,
    u64,
    Vec<EventFunctionRow>,
);

#[pymethods]
impl EventLog {
    /// A log of `size` rows in memory and `limit` bytes in the file with descriptor `file`, if there is one.
    #[new]
    fn new(
        size: usize,
        python: bool,
        native: bool,
        waits: bool,
        file: Option<c_int>,
        limit: u64,
    ) -> PyResult<EventLog> {
        if size == 0 || size > 1 << 40 {
            return Err(PyValueError::new_err(format!(
                "size must be a number of rows, got {size}"
            )));
        }
        let file = match file {
            Some(fd) if fd >= 0 => {
                // SAFETY: the caller's open file, which is copied at once.
                let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
                let owned: OwnedFd = borrowed.try_clone_to_owned()?;
                Some(File::from(owned))
            }
            _ => None,
        };
        let log =
            Log::new(size, file, limit).ok_or_else(|| PyMemoryError::new_err(format!("no memory for {size} rows")))?;
        let clock = Clock::best();
        Ok(EventLog {
            state: Mutex::new(EventLogState {
                sink: Arc::new(Sink { log, clock }),
                running: None,
                functions: Vec::new(),
                ended: EndedKeys::default(),
                bases: Vec::new(),
                left_out: HashSet::new(),
                scale: Scale::new(clock),
            }),
            wanted: HookSet { native, python, waits },
            pid: std::process::id(),
        })
    }

    /// Starts to record: allocations as wished for, calls if `calls`. `stacks`: of each thread its ident and the
    /// code objects on its stack, outermost first. `left_out`: code objects whose calls and returns are not shown.
    fn start(
        this: &Bound<'_, EventLog>,
        calls: bool,
        stacks: Vec<(u64, Vec<Py<PyAny>>)>,
        left_out: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let own = this.get();
        if own.pid != std::process::id() {
            return Err(PyRuntimeError::new_err(
                "this profiler belongs to the process that this one was forked from",
            ));
        }
        let mut state = lock(&own.state);
        if state.running.is_some() {
            return Err(PyRuntimeError::new_err("the profiler was already started"));
        }
        let mut base = Base::new(state.sink.clock.now());
        for (ident, frames) in stacks {
            let keys = frames.iter().map(|code| code.as_ptr() as u64).collect();
            base.stacks.insert(ident, keys);
            state.functions.extend(
                frames
                    .into_iter()
                    .map(|code| (code.as_ptr() as u64, FunctionObject::Code(code))),
            );
        }
        timeline::unique(&mut state.functions);
        state.left_out.extend(left_out.iter().map(|code| code.as_ptr() as u64));
        state.bases.push(base);
        let installed = hooks::install(state.sink.clone(), own.wanted).map_err(crate::refused)?;
        let sink = state.sink.clone();
        let ticket = installed.ticket();
        state.running = Some(installed);
        drop(state);
        if calls && let Err(error) = recorder::add(this.as_any(), sink.clone(), ticket) {
            let mut running = lock(&own.state).running.take();
            if let Some(installed) = &mut running {
                installed.remove();
            }
            return Err(error);
        }
        hooks::with_cache(ticket, |cache| {
            sink.append(cache, 0, code::PROFILER_START, 0, 0, sink.clock.now())
        });
        Ok(())
    }

    /// Ends the recording. In a forked child: forgets it.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        let (sink, installed) = {
            let mut state = lock(&self.state);
            (state.sink.clone(), state.running.take())
        };
        let Some(mut installed) = installed else {
            return Err(PyRuntimeError::new_err("the profiler was not started"));
        };
        let ticket = installed.ticket();
        hooks::with_cache(ticket, |cache| {
            sink.append(cache, 0, code::PROFILER_STOP, 0, 0, sink.clock.now())
        });
        let seen = recorder::remove(py, ticket);
        installed.remove();
        let mut state = lock(&self.state);
        state.scale.settle();
        let seen = seen?;
        state.left_out.extend(own_keys(py, &seen.functions));
        state.functions.extend(seen.functions);
        state.ended.add_all(&seen.ended);
        timeline::unique(&mut state.functions);
        Ok(())
    }

    /// Whether it records, in this process.
    fn is_running(&self) -> bool {
        self.pid == std::process::id() && lock(&self.state).running.as_ref().is_some_and(Installed::is_current)
    }

    /// Adds one row.
    fn append(&self, key: u64, event: u64) {
        let state = lock(&self.state);
        let sink = &state.sink;
        if let Some(installed) = &state.running {
            hooks::with_cache(installed.ticket(), |cache| {
                sink.append(cache, key, event, 0, 0, sink.clock.now())
            });
        }
    }

    /// All rows so far, in chronological order: eight columns of 64-bit integers (frame, arg, event, time in ns, value1,
    /// value2, thread, domain), and as many times two: the function that made the row, and its caller. Then rows lost, and the
    /// functions that the rows name.
    fn rows<'py>(&self, py: Python<'py>) -> PyResult<EventRows<'py>> {
        let state = lock(&self.state);
        let read = || state.sink.log.contents();
        let contents = match &state.running {
            Some(installed) => installed.while_silent(read),
            None => Some(read()),
        };
        let Some(contents) = contents else {
            return Err(PyRuntimeError::new_err(
                "a thread is stuck in a hook: the rows cannot be read",
            ));
        };
        let (mut left_out, mut ended) = (state.left_out.clone(), state.ended.clone());
        let mut functions: Vec<_> = state.functions.iter().map(|(key, f)| (*key, f.clone_ref(py))).collect();
        if state.running.is_some() {
            let seen = recorder::seen(py);
            left_out.extend(own_keys(py, &seen.functions));
            functions.extend(seen.functions);
            ended.add_all(&seen.ended);
        }
        let lost = contents.dropped;
        let (rows, callers) = timeline::arrange(contents, &state.bases, state.scale, &ended, &left_out);
        drop(state);
        // What the copies for Python take is not the program's.
        let copy = |bytes: &[u8]| hooks::silently(|| PyByteArray::new(py, bytes));
        let row = |(key, object): (u64, FunctionObject)| {
            let is_code = object.is_code();
            Ok((key, object.into_object(py)?, is_code))
        };
        let functions: PyResult<Vec<EventFunctionRow>> = hooks::silently(|| functions.into_iter().map(row).collect());
        Ok((copy(&rows), copy(&callers), lost, functions?))
    }

    /// Rows that could not be kept, bytes in the file, and calls that signal handlers made while a hook ran (of all
    /// profilers of this process).
    fn counts(&self) -> (u64, u64, u64) {
        let (dropped, spilled) = lock(&self.state).sink.log.counts();
        (dropped, spilled, hooks::skipped())
    }
}

/// Keys of C functions of this module.
fn own_keys(py: Python<'_>, functions: &[(u64, FunctionObject)]) -> Vec<u64> {
    let is_own = |function: &FunctionObject| match function {
        FunctionObject::Builtin(text) => {
            let text = text.bind(py).extract::<String>();
            text.is_ok_and(|text| text.contains("nativeprof._native."))
        }
        _ => false,
    };
    let own = functions.iter().filter(|(_, function)| is_own(function));
    own.map(|(key, _)| *key).collect()
}

/// Every address slot of the functions that are hooked: module, function, address, content.
#[pyfunction]
pub fn hook_slots() -> Vec<(String, &'static str, usize, usize)> {
    let slots = hooks::slots().into_iter();
    let row = |slot: hooks::Slot| {
        let module = String::from_utf8_lossy(&slot.module).into_owned();
        (module, slot.function, slot.address, slot.value)
    };
    slots.map(row).collect()
}

/// In a forked child: ends what the parent's profilers started.
#[pyfunction]
pub fn events_after_fork(py: Python<'_>) {
    recorder::forget_parent(py);
}
