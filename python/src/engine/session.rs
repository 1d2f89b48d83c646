//! One run of the engine: options, threads, start and stop.

use std::any::TypeId;
use std::cell::{Cell, UnsafeCell};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use nativeprof::profile::summary::counted;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use super::threads::{self, SessionThread};
use super::{Clock, EVENTS, Filter, Machine, SessionFunctions, ThreadInfo, greenlets, hook, monitoring, objects, own};

/// A clock of the user's own.
pub struct UserTimer {
    /// Called without arguments for each event.
    pub callable: Py<PyAny>,
    /// Seconds per unit of the integers that it returns; 0: it returns seconds.
    pub unit: f64,
}

/// What a session is to see.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Calls of C functions too.
    pub builtins: bool,
    /// Returns, yields and resumes too. Without them (from 3.12 on) only the begin of each Python function is an event.
    pub returns: bool,
    /// Only the thread that starts the session.
    pub current_thread_only: bool,
    /// Before 3.12: distinguish [`super::CallEvent::Resume`] from [`super::CallEvent::Start`], at the cost of a look-up per call.
    pub splits_resumes: bool,
    /// Subtracted from times.
    pub costs: Costs,
}

/// What events cost, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    pub events: [i64; EVENTS],
    /// An event that no machine sees: of a call of a Python function from 3.12 on (`PY_START` reports the same), or of a C
    /// function that is not wanted before.
    pub ignored: i64,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            builtins: true,
            returns: true,
            splits_resumes: false,
            current_thread_only: false,
            costs: Costs::default(),
        }
    }
}

impl Costs {
    /// Ticks for a call and return of a Python function and of a C function, and for an ignored event.
    pub fn of_calls(python: i64, c: i64, ignored: i64) -> Costs {
        use super::CallEvent::{CCall, CRaise, CReturn};
        let mut events = [python / 2; EVENTS];
        for event in [CCall, CReturn, CRaise] {
            if let Some(cost) = events.get_mut(event as usize) {
                *cost = c / 2;
            }
        }
        Costs { events, ignored }
    }
}

/// See the module. Kept at one address while it runs.
pub struct EngineSession<M: Machine> {
    /// No other session of this process has it.
    pub number: u64,
    /// What error messages call it.
    pub name: &'static str,
    pub options: EngineOptions,
    pub timer: Option<UserTimer>,
    pub clock: Clock,
    pub functions: SessionFunctions,
    pub shared: M::Shared,
    pub(crate) threads: Vec<Box<SessionThread<M>>>,
    threads_seen: u32,
    /// [`threads::token`] of the thread that started it last.
    pub(crate) starter: u64,
    is_running: bool,
    /// The tool identifier of `sys.monitoring`, from 3.12 on.
    pub(crate) tool: u8,
    /// Before 3.12.
    pub(crate) hooked: hook::Hooked,
}

/// The session that runs on all threads; null: none. Its type is that of the callbacks that are installed.
static RUNNING: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static RUNNING_NAME: Mutex<String> = Mutex::new(String::new());

/// A session that runs on one thread.
#[derive(Clone, Copy)]
struct ThreadSession {
    /// [`threads::token`].
    thread: u64,
    /// The process in which it was started: its thread is not in a forked child, unless it is the one that forked.
    process: u32,
    session: *mut c_void,
    /// Of the machine: the callbacks that are installed are for one type.
    kind: TypeId,
    name: &'static str,
    tool: u8,
    builtins: bool,
}

/// Sessions that run on one thread each, while none runs on all. They are of one type, and share a tool of `sys.monitoring`.
struct ThreadSessions(UnsafeCell<Vec<ThreadSession>>);

// SAFETY: used with the GIL held only, which orders accesses.
unsafe impl Sync for ThreadSessions {}

static OF_THREADS: ThreadSessions = ThreadSessions(UnsafeCell::new(Vec::new()));

/// Not to be kept while Python code may run.
#[allow(clippy::mut_from_ref)]
fn of_threads(_: Python<'_>) -> &'static mut Vec<ThreadSession> {
    // SAFETY: the GIL is held; see above.
    unsafe { &mut *OF_THREADS.0.get() }
}

/// The session of the thread that runs.
#[inline]
fn of_this_thread(py: Python<'_>) -> *mut c_void {
    let own = threads::token();
    let all = of_threads(py);
    all.iter().find(|s| s.thread == own).map_or(null_mut(), |s| s.session)
}

/// Forgets sessions of threads that a fork has left in the parent, with their tool if no other session uses it.
fn forget_parent(py: Python<'_>) -> PyResult<()> {
    let (own, process) = (threads::token(), std::process::id());
    let all = of_threads(py);
    let tool = all.first().map(|s| s.tool);
    all.retain(|s| s.process == process || s.thread == own);
    match tool {
        Some(tool) if tool != 0 && all.is_empty() => monitoring::remove(py, tool),
        _ => Ok(()),
    }
}
static NUMBERS: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// Number of the session whose timer this thread is in; 0: none.
    static IN_TIMER: Cell<u64> = const { Cell::new(0) };
}

/// The session that runs on this thread. Callbacks call it with the type that they were installed for.
#[inline]
pub(crate) fn running<'a, M: Machine>(py: Python<'a>) -> Option<&'a mut EngineSession<M>> {
    let mut session = RUNNING.load(Ordering::Relaxed);
    if session.is_null() {
        session = of_this_thread(py);
    }
    // SAFETY: null, or a session of this type that runs, and does not move meanwhile; the GIL is held.
    unsafe { session.cast::<EngineSession<M>>().as_mut() }
}

/// Whether a session runs, on any thread.
pub fn is_busy(py: Python<'_>) -> bool {
    !RUNNING.load(Ordering::Relaxed).is_null() || !of_threads(py).is_empty()
}

/// Why a session cannot start now: another one runs that sees the same events.
fn conflict(py: Python<'_>, is_for_all: bool, kind: TypeId) -> Option<String> {
    if !RUNNING.load(Ordering::Relaxed).is_null() {
        let name = RUNNING_NAME.lock().unwrap_or_else(PoisonError::into_inner);
        return Some(format!("{name}. One at a time: stop it first."));
    }
    let all = of_threads(py);
    let own = threads::token();
    if let Some(other) = all.iter().find(|s| s.thread == own) {
        return Some(format!("{}, on this thread. One at a time: stop it first.", other.name));
    }
    let other = all.iter().find(|s| is_for_all || s.kind != kind)?;
    Some(format!(
        "{}, on {} (threads=\"current\"). Stop it there first, or trace only the current thread, too.",
        other.name,
        counted(all.len() as u64, "other threads"),
    ))
}

impl<M: Machine> EngineSession<M> {
    /// A session that does not run yet. `name` is for messages.
    pub fn new(name: &'static str, shared: M::Shared, filter: Filter) -> Box<EngineSession<M>> {
        let mut functions = SessionFunctions::default();
        functions.filter = filter;
        Box::new(EngineSession {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            name,
            options: EngineOptions::default(),
            timer: None,
            clock: Clock::best(),
            functions,
            shared,
            threads: Vec::new(),
            threads_seen: 0,
            starter: 0,
            is_running: false,
            tool: 0,
            hooked: hook::Hooked::default(),
        })
    }

    pub fn is_running(&self) -> bool {
        self.is_running
    }

    /// Starts, or continues after a stop. Threads that were traced before keep their machines.
    ///
    /// One that is for the current thread only can run beside others for their threads. `this` must stay where it is until
    /// [`EngineSession::stop`]. `owner` is the Python object that it belongs to: before 3.12
    /// `sys.getprofile` shows it, and threads keep it alive until the stop. Raises ValueError if another session or
    /// another tool is active, RuntimeError if the interpreter cannot be traced.
    pub fn start(this: &mut Box<EngineSession<M>>, owner: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = owner.py();
        if this.is_running {
            return Ok(());
        }
        forget_parent(py)?;
        let is_for_all = !this.options.current_thread_only;
        let kind = TypeId::of::<M>();
        if let Some(why) = conflict(py, is_for_all, kind) {
            return Err(PyValueError::new_err(format!(
                "Another profiling tool is already active: {why}"
            )));
        }
        objects::check(py)?;
        this.starter = threads::token();
        let costs = this.options.costs;
        for thread in &mut this.threads {
            thread.costs = costs.events;
            thread.ignored = costs.ignored;
            thread.wants_builtins = this.options.builtins;
            thread.splits_resumes = this.options.splits_resumes;
            thread.follows_greenlets = false;
            thread.is_timed_by_user = this.timer.is_some();
        }
        threads::forget_last();
        let session = (&raw mut **this).cast::<c_void>();
        let others = of_threads(py).clone();
        threads::charge_ignored(costs.ignored != 0, others.is_empty());
        if is_for_all {
            RUNNING.store(session, Ordering::Relaxed);
        } else {
            of_threads(py).push(ThreadSession {
                thread: this.starter,
                process: std::process::id(),
                session,
                kind,
                name: this.name,
                tool: others.first().map_or(0, |s| s.tool),
                builtins: this.options.builtins,
            });
        }
        greenlets::start::<M>(others.is_empty());
        this.is_running = true;
        let installed = if own::interpreter(py).has_monitoring {
            let builtins = this.options.builtins || others.iter().any(|s| s.builtins);
            // What one has switched on stays on until the last one stops.
            let is_mixed = others.iter().any(|s| s.builtins != this.options.builtins);
            monitoring::set_shared(!others.is_empty(), is_mixed);
            let tool = others.iter().map(|s| s.tool).find(|tool| *tool != 0);
            monitoring::install(py, this, tool, builtins)
        } else {
            hook::install(py, this, owner)
        };
        if let Some(entry) = of_threads(py).iter_mut().find(|s| s.session == session) {
            entry.tool = this.tool;
        }
        let name = match this.tool {
            0 => this.name.to_string(),
            tool => format!("{} (tool {tool} is already in use)", this.name),
        };
        *RUNNING_NAME.lock().unwrap_or_else(PoisonError::into_inner) = name;
        if installed.is_err() {
            this.is_running = false;
            this.unregister(py);
            threads::forget_last();
            greenlets::stop(py, others.is_empty());
        }
        installed
    }

    /// Takes it out of what runs. Returns whether no other session runs now.
    fn unregister(&mut self, py: Python<'_>) -> bool {
        if !self.options.current_thread_only {
            RUNNING.store(null_mut(), Ordering::Relaxed);
            return true;
        }
        let own = (&raw mut *self).cast::<c_void>();
        let all = of_threads(py);
        all.retain(|s| s.session != own);
        monitoring::set_shared(all.len() > 1, false);
        all.is_empty()
    }

    /// Stops, and closes open calls as if they returned now. A session that does not run: nothing.
    ///
    /// Raises RuntimeError if it is called from the user's timer.
    pub fn stop(&mut self, py: Python<'_>) -> PyResult<()> {
        if !self.is_running {
            return Ok(());
        }
        self.not_in_timer("disable")?;
        let now = self.clock.now();
        self.is_running = false;
        let is_last = self.unregister(py);
        threads::forget_last();
        greenlets::stop(py, is_last);
        let removed = if own::interpreter(py).has_monitoring {
            if is_last {
                monitoring::remove(py, self.tool)
            } else {
                Ok(())
            }
        } else {
            hook::remove(py, &std::mem::take(&mut self.hooked))
        };
        for i in 0..self.threads.len() {
            // The user's timer may run Python code, but the session does not run: nothing else touches its threads.
            while self.threads.get(i).is_some_and(|t| t.machine.depth() > 0) {
                let now = match &self.timer {
                    Some(timer) => {
                        let callable = timer.callable.clone_ref(py);
                        // SAFETY: the reference keeps it alive.
                        unsafe { read_timer(py, self.number, callable.as_ptr(), timer.unit) }
                    }
                    None => now,
                };
                let now = now.wrapping_sub(self.threads.get(i).map_or(0, |t| t.cost));
                if let Some(thread) = self.threads.get_mut(i) {
                    thread.machine.close_innermost(now, &mut self.shared);
                }
            }
        }
        self.retire_ended(py);
        removed
    }

    /// Raises RuntimeError if this thread is in the user's timer.
    pub fn not_in_timer(&self, what: &str) -> PyResult<()> {
        if IN_TIMER.with(|number| number.get() == self.number) {
            return Err(PyRuntimeError::new_err(format!(
                "cannot {what} profiler in external timer"
            )));
        }
        Ok(())
    }

    /// Drops all machines, with what they hold, and all functions; continues if it runs.
    pub fn clear(&mut self) -> PyResult<()> {
        self.not_in_timer("clear")?;
        let filter = std::mem::take(&mut self.functions.filter);
        let old = std::mem::take(&mut self.functions);
        self.functions.filter = filter;
        self.threads.clear();
        self.number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        threads::forget_last();
        // Last: the end of an object may run Python code.
        drop(old);
        Ok(())
    }

    /// All threads, in the order of their first events.
    pub fn threads(&self) -> impl Iterator<Item = &SessionThread<M>> {
        self.threads.iter().map(|t| &**t)
    }

    pub fn threads_mut(&mut self) -> impl Iterator<Item = &mut SessionThread<M>> {
        self.threads.iter_mut().map(|t| &mut **t)
    }

    pub(crate) fn add_thread(
        &mut self,
        py: Python<'_>,
        mut info: ThreadInfo,
        ended: Arc<AtomicBool>,
    ) -> *mut SessionThread<M> {
        self.retire_ended(py);
        info.number = self.threads_seen;
        self.threads_seen += 1;
        let machine = M::new(&info, &mut self.shared);
        let thread = Box::new(SessionThread {
            machine,
            info,
            name: None,
            session: &raw mut *self,
            is_timed_by_user: self.timer.is_some(),
            splits_resumes: self.options.splits_resumes,
            follows_greenlets: false,
            cost: 0,
            costs: self.options.costs.events,
            ignored: self.options.costs.ignored,
            wants_builtins: self.options.builtins,
            ended,
        });
        self.threads.push(thread);
        self.threads.last_mut().map_or(null_mut(), |t| &raw mut **t)
    }

    /// Looks up the names of threads that have none yet.
    pub fn name_threads(&mut self, py: Python<'_>) {
        for thread in &mut self.threads {
            if thread.name.is_none() && !thread.ended.load(Ordering::Acquire) {
                thread.name = objects::thread_name(py, thread.info.ident);
            }
        }
    }

    /// Lets machines of threads that have ended give up what they hold.
    fn retire_ended(&mut self, _: Python<'_>) {
        let shared = &mut self.shared;
        self.threads.retain_mut(|thread| {
            let is_over = thread.ended.load(Ordering::Acquire) && thread.machine.depth() == 0;
            !(is_over && thread.machine.retire(&thread.info, thread.name.as_deref(), shared))
        });
    }
}

impl<M: Machine> Drop for EngineSession<M> {
    fn drop(&mut self) {
        if self.is_running {
            // Nothing reads what open calls would be given, and the collector may have emptied the timer already.
            let timer = self.timer.take();
            // If this happens in that timer, the event that it was read for ends with nothing.
            self.number = NUMBERS.fetch_add(1, Ordering::Relaxed);
            Python::attach(|py| {
                let _ = self.stop(py);
                drop(timer);
            });
        }
    }
}

/// Ticks of the user's clock: nanoseconds, or its own integers if it has a unit. What it raises, or returns other than
/// numbers, is reported as unraisable, and the time is 0.
///
/// # Safety
/// `callable` stays alive during the call.
unsafe fn read_timer(py: Python<'_>, session: u64, callable: objects::Object, unit: f64) -> i64 {
    let Some(functions) = objects::functions() else {
        return 0;
    };
    let outer = IN_TIMER.with(|number| number.replace(session));
    let time = objects::with_no_exception(py, || {
        // SAFETY: a live object. Nothing that has to be dropped is alive here: this may be the thread's end.
        let value = unsafe { (functions.call)(callable) };
        // SAFETY: the result of a call: a new reference, or null with an exception set.
        let value = unsafe { Bound::from_owned_ptr_or_err(py, value) };
        value.and_then(|v| ticks(&v, unit)).unwrap_or_else(|error| {
            // SAFETY: as above.
            let callable = unsafe { Bound::from_borrowed_ptr(py, callable) };
            error.write_unraisable(py, Some(&callable));
            0
        })
    });
    IN_TIMER.with(|number| number.set(outer));
    time
}

fn ticks(value: &Bound<'_, PyAny>, unit: f64) -> PyResult<i64> {
    if unit > 0.0 {
        return value.extract();
    }
    let nanoseconds = (value.extract::<f64>()? * 1e9).floor();
    if !nanoseconds.is_finite() || nanoseconds.abs() > i64::MAX as f64 / 2.0 {
        return Err(pyo3::exceptions::PyOverflowError::new_err("timestamp out of range"));
    }
    Ok(nanoseconds as i64)
}

/// Reads the user's timer for an event of the running session. Python code runs meanwhile: nothing of the session may be
/// borrowed. None if the session has ended.
#[cold]
pub(crate) fn read_timer_of_running<M: Machine>(py: Python<'_>) -> Option<i64> {
    let session = running::<M>(py)?;
    let number = session.number;
    let (callable, unit) = session.timer.as_ref().map(|t| (t.callable.as_ptr(), t.unit))?;
    // SAFETY: the reference taken here keeps it alive during the call, and is given back after it.
    let time = unsafe {
        pyo3::ffi::Py_IncRef(callable);
        let time = read_timer(py, number, callable, unit);
        pyo3::ffi::Py_DecRef(callable);
        time
    };
    // Another thread may have stopped the session meanwhile.
    running::<M>(py).filter(|s| s.number == number)?;
    Some(time)
}
