//! Which machine handles the events of the thread that runs.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use pyo3::Python;

use super::session::{self, EngineSession};
use super::{CallEvent, CurrentGreenlet, EVENTS, EventContext, Machine, Moment, ThreadInfo, greenlets, release};

/// One thread in one session.
pub struct SessionThread<M: Machine> {
    pub machine: M,
    pub info: ThreadInfo,
    /// As soon as `threading` knows it.
    pub name: Option<String>,
    pub(crate) session: *mut EngineSession<M>,
    /// The user's timer is read before each event.
    pub(crate) is_timed_by_user: bool,
    pub(crate) splits_resumes: bool,
    /// Switches of greenlets are reported on it.
    pub(crate) follows_greenlets: bool,
    /// Ticks that tracing has cost this thread.
    pub(crate) cost: i64,
    /// What each event adds to that.
    pub(crate) costs: [i64; EVENTS],
    /// What an event adds that no machine sees.
    pub(crate) ignored: i64,
    /// Calls of C functions are events of it.
    pub(crate) wants_builtins: bool,
    /// Set when the thread has ended.
    pub(crate) ended: Arc<AtomicBool>,
}

impl<M: Machine> SessionThread<M> {
    /// The machine and the context of one event.
    #[inline(always)]
    pub(crate) fn event<'a>(
        &'a mut self,
        py: Python<'a>,
        event: CallEvent,
        given: Option<i64>,
    ) -> (&'a mut M, EventContext<'a, M::Shared>) {
        let moment = Moment {
            clock: self.clock(),
            given,
            cost: self.cost,
        };
        self.cost += self.costs[event as usize];
        // SAFETY: a session outlives its threads and does not move while it runs; the GIL is held and machines do not
        // give it up, so nothing else refers to it now. Its threads, of which this is one, are not reached through it.
        let session = unsafe { &mut *self.session };
        let context = EventContext {
            py,
            event,
            moment,
            functions: &mut session.functions,
            shared: &mut session.shared,
            info: &self.info,
            name: &mut self.name,
            follows_greenlets: &mut self.follows_greenlets,
        };
        (&mut self.machine, context)
    }

    /// The thread continues with this greenlet.
    pub(crate) fn switch(&mut self, to: CurrentGreenlet, given: Option<i64>) {
        let moment = Moment {
            clock: self.clock(),
            given,
            cost: self.cost,
        };
        // SAFETY: as in `event`.
        let session = unsafe { &mut *self.session };
        self.machine.switch(to, moment, &mut session.shared);
    }

    /// Lets switches of greenlets be reported on this thread, which is the one that runs.
    pub(crate) fn follow_greenlets(&mut self, py: Python<'_>) {
        if !self.follows_greenlets
            && let Some(current) = greenlets::follow(py)
        {
            self.follows_greenlets = true;
            self.switch(current, self.is_timed_by_user.then_some(0));
        }
    }

    #[inline(always)]
    fn clock(&self) -> super::Clock {
        // SAFETY: as above.
        unsafe { (*self.session).clock }
    }
}

/// The thread that had the last event: its thread pointer and its `SessionThread`, or null if it is not traced. Written by that
/// thread only, with the GIL; a thread that ends, which it does without the GIL, takes its own pointer out.
static LAST_POINTER: AtomicUsize = AtomicUsize::new(0);
static LAST_THREAD: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

struct SessionThreadSlot {
    /// Of the session that `thread` belongs to.
    session: Cell<u64>,
    thread: Cell<*mut c_void>,
    ended: RefCell<Option<Arc<AtomicBool>>>,
}

impl Drop for SessionThreadSlot {
    fn drop(&mut self) {
        let _ = LAST_POINTER.compare_exchange(thread_key(), 0, Ordering::AcqRel, Ordering::Relaxed);
        if let Some(ended) = self.ended.borrow_mut().take() {
            ended.store(true, Ordering::Release);
        }
    }
}

thread_local! {
    static SLOT: SessionThreadSlot = const { SessionThreadSlot { session: Cell::new(0), thread: Cell::new(null_mut()), ended: RefCell::new(None) } };
}

/// Differs between threads that live at one time; cheaper than any thread-local variable of a shared object.
#[inline(always)]
fn thread_key() -> usize {
    let pointer: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the ABI keeps the address of the thread's control block at offset 0 of FS.
    unsafe {
        core::arch::asm!("mov {}, fs:[0]", out(reg) pointer, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the register may be read by user code.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, preserves_flags, nomem));
    }
    pointer
}

/// The thread of the running session that runs now; null if it is not to be traced, or there is no session.
#[inline(always)]
fn current<M: Machine>(py: Python<'_>) -> *mut SessionThread<M> {
    if LAST_POINTER.load(Ordering::Acquire) == thread_key() {
        return LAST_THREAD.load(Ordering::Relaxed).cast();
    }
    find_current::<M>(py)
}

/// The same where nothing is borrowed, and Python code may run: code objects that have ended may be released first.
#[inline(always)]
fn current_after_release<M: Machine>(py: Python<'_>) -> *mut SessionThread<M> {
    if LAST_POINTER.load(Ordering::Acquire) == thread_key() {
        return LAST_THREAD.load(Ordering::Relaxed).cast();
    }
    release::release_ended::<M>(py);
    find_current::<M>(py)
}

#[cold]
fn find_current<M: Machine>(py: Python<'_>) -> *mut SessionThread<M> {
    let thread = find::<M>(py);
    // If it were remembered, the next event would not go by `release_ended`.
    if session::running::<M>(py).is_some_and(|s| s.functions.is_full()) {
        return thread;
    }
    remember(thread_key(), thread)
}

fn remember<M: Machine>(own: usize, thread: *mut SessionThread<M>) -> *mut SessionThread<M> {
    // Not the pair of two threads at any moment.
    LAST_POINTER.store(0, Ordering::Release);
    LAST_THREAD.store(thread.cast(), Ordering::Relaxed);
    LAST_POINTER.store(own, Ordering::Release);
    thread
}

/// The thread that runs, and the time by the user's clock if there is one and `wants_time` says that the event needs it.
#[inline(always)]
pub(crate) fn thread<M: Machine>(
    py: Python<'_>,
    wants_time: impl Fn(&M) -> bool,
) -> Option<(&mut SessionThread<M>, Option<i64>)> {
    // SAFETY: null, or a thread of the running session; the GIL is held and nothing else refers to it.
    let found = unsafe { current_after_release::<M>(py).as_mut()? };
    if !found.is_timed_by_user {
        return Some((found, None));
    }
    if !wants_time(&found.machine) {
        return Some((found, Some(0)));
    }
    let time = session::read_timer_of_running::<M>(py)?;
    // SAFETY: as above; found again because Python code has run.
    let found = unsafe { current::<M>(py).as_mut()? };
    Some((found, Some(time)))
}

#[cold]
fn find<M: Machine>(py: Python<'_>) -> *mut SessionThread<M> {
    let Some(session) = session::running::<M>(py) else {
        return null_mut();
    };
    SLOT.try_with(|slot| {
        if slot.session.get() == session.number {
            let thread: *mut SessionThread<M> = slot.thread.get().cast();
            // SAFETY: null, or a thread of the running session.
            if let Some(thread) = unsafe { thread.as_mut() } {
                thread.follow_greenlets(py);
            }
            return thread;
        }
        let thread = if session.options.current_thread_only && session.starter != token() {
            null_mut()
        } else {
            let ended = Arc::new(AtomicBool::new(false));
            session.add_thread(py, this_thread(), ended)
        };
        settle(slot, session.number, thread);
        // SAFETY: null, or just made, and owned by the session.
        if let Some(thread) = unsafe { thread.as_mut() } {
            thread.follow_greenlets(py);
        }
        thread
    })
    // Late in the thread's end.
    .unwrap_or(null_mut())
}

fn settle<M: Machine>(slot: &SessionThreadSlot, session: u64, thread: *mut SessionThread<M>) {
    slot.session.set(session);
    slot.thread.set(thread.cast());
    if !thread.is_null() {
        // SAFETY: just made, and owned by the session.
        let ended = unsafe { (*thread).ended.clone() };
        // A thread has one slot: what it had in an earlier session is over for it.
        if let Ok(mut place) = slot.ended.try_borrow_mut()
            && let Some(before) = place.replace(ended)
        {
            before.store(true, Ordering::Release);
        }
    }
}

/// Whether [`super::Costs::ignored`] of a running session is not 0.
static IS_IGNORED_CHARGED: AtomicBool = AtomicBool::new(false);

/// A session starts, as the first one or beside others.
pub(crate) fn charge_ignored(is_charged: bool, is_first: bool) {
    if is_charged || is_first {
        IS_IGNORED_CHARGED.store(is_charged, Ordering::Relaxed);
    }
}

/// Whether the thread that runs is traced, and without calls of C functions.
pub(crate) fn is_without_builtins<M: Machine>(py: Python<'_>) -> bool {
    // SAFETY: null, or a thread of the running session; the GIL is held and nothing else refers to it.
    unsafe { current::<M>(py).as_ref() }.is_some_and(|thread| !thread.wants_builtins)
}

/// An event that no machine sees has come.
#[inline(always)]
pub(crate) fn ignore<M: Machine>(py: Python<'_>) {
    if IS_IGNORED_CHARGED.load(Ordering::Relaxed) {
        // SAFETY: null, or a thread of the running session; the GIL is held and nothing else refers to it.
        if let Some(thread) = unsafe { current::<M>(py).as_mut() } {
            thread.cost += thread.ignored;
        }
    }
}

/// The session has changed: nothing that was remembered holds.
pub(crate) fn forget_last() {
    LAST_POINTER.store(0, Ordering::Release);
}

/// A number of the thread that runs, which no other thread of this process ever has.
pub(crate) fn token() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static TOKEN: Cell<u64> = const { Cell::new(0) };
    }
    TOKEN.with(|token| {
        if token.get() == 0 {
            token.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        token.get()
    })
}

/// `threading.get_ident()` of the thread that runs.
pub fn current_ident() -> u64 {
    // SAFETY: always succeeds.
    unsafe { libc::pthread_self() as u64 }
}

pub(crate) fn this_thread() -> ThreadInfo {
    ThreadInfo {
        number: 0,
        ident: current_ident(),
        native_id: nativeprof::sys::process::current_tid(),
    }
}

/// The machine of the thread that runs in the session with this number, for hooks outside the engine (on allocators,
/// say) that hold no GIL; null if that session is not running on this thread. A thread may use its own machine where it
/// is sure that the engine is not in the middle of an event of it.
#[allow(dead_code, reason = "for hooks outside the engine")]
pub fn current_machine<M: Machine>(session: u64) -> *mut M {
    SLOT.try_with(|slot| {
        if slot.session.get() != session || slot.thread.get().is_null() {
            return null_mut();
        }
        let thread: *mut SessionThread<M> = slot.thread.get().cast();
        // SAFETY: the session with this number runs, so its threads live.
        unsafe { &raw mut (*thread).machine }
    })
    .unwrap_or(null_mut())
}
