//! The event engine: every call and return of this interpreter's threads, seen in process.
//!
//! From 3.12 on the events come from `sys.monitoring`, before that from the C profile hook of each thread. A [`Machine`]
//! says what one thread does with its events; an [`EngineSession`] is one run of such machines, one per thread, and what they
//! share. One session runs at a time for all threads, or any number for one thread each.
//!
//! Everything here runs with the GIL held, which is what orders accesses; no method of a machine runs Python code or
//! gives the GIL up, so that nothing is ever entered twice. (The wheel is for builds with a GIL only.)

pub mod clock;
pub mod facts;
pub mod functions;
mod greenlets;
mod hook;
mod monitoring;
pub mod objects;
pub mod own;
pub mod release;
mod session;
pub mod stacks;
pub mod table;
mod threads;

pub use clock::Clock;
pub use facts::FunctionObject;
pub use functions::{Callee, Filter, FunctionInfo, FunctionNumber, SessionFunctions};
pub use release::{EndedFunctions, release_all};
pub use session::{Costs, EngineSession, UserTimer, is_busy};
#[allow(unused_imports, reason = "for hooks outside the engine")]
pub use threads::{SessionThread, current_ident, current_machine};

use pyo3::Python;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CallEvent {
    /// A Python function begins. Before 3.12 also where a generator or a coroutine continues, unless
    /// [`session::EngineOptions::splits_resumes`].
    Start,
    /// A generator or a coroutine continues.
    Resume,
    /// The same, with an exception thrown into it. Before 3.12 this is an end: that of a generator or a coroutine which was
    /// never begun, but appeared so.
    Throw,
    Return,
    Yield,
    /// A frame ends by an exception. Before 3.12 this is a `Return`.
    Unwind,
    /// A C function is called.
    CCall,
    CReturn,
    CRaise,
}

/// Number of different events.
pub const EVENTS: usize = 9;

/// What became of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventOutcome {
    Done,
    /// The function is left out by the filter: no event of this place is wanted again.
    Excluded,
}

/// The moment of an event.
#[derive(Clone, Copy)]
pub struct Moment {
    pub(crate) clock: Clock,
    /// What the user's timer said before the event was handled, if there is one.
    pub(crate) given: Option<i64>,
    /// Ticks to subtract: what tracing has cost this thread so far.
    pub(crate) cost: i64,
}

impl Moment {
    /// Ticks now. To be called last when something begins, and first when it ends.
    #[inline(always)]
    pub fn now(&self) -> i64 {
        match self.given {
            None => self.clock.now() - self.cost,
            Some(given) => given.wrapping_sub(self.cost),
        }
    }
}

/// What a machine is given with each event.
pub struct EventContext<'a, S> {
    pub py: Python<'a>,
    pub event: CallEvent,
    pub moment: Moment,
    pub functions: &'a mut SessionFunctions,
    pub shared: &'a mut S,
    info: &'a ThreadInfo,
    name: &'a mut Option<String>,
    follows_greenlets: &'a mut bool,
}

impl<S> EventContext<'_, S> {
    /// The number of a function, and whether the filter leaves it out. For a machine's first sight of it: looks up the
    /// thread's name too, which `threading` knows some calls after the thread's begin only, and whether the program has
    /// imported `greenlet` by now.
    #[cold]
    pub fn intern(&mut self, callee: Callee) -> (FunctionNumber, bool) {
        // Before 3.12 every call of a function that is left out comes here.
        if self.functions.is_excluded(callee.key())
            && let Some(id) = self.functions.find(callee.key())
        {
            return (id, true);
        }
        if self.name.is_none() {
            *self.name = objects::with_no_exception(self.py, || objects::thread_name(self.py, self.info.ident));
        }
        if !*self.follows_greenlets {
            *self.follows_greenlets = greenlets::follow(self.py).is_some();
        }
        self.functions.intern(self.py, callee)
    }
}

/// A greenlet: a stack that its thread continues with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurrentGreenlet {
    /// Different for all that live at one time; 0: the thread's first one.
    pub key: usize,
    /// It runs gevent's event loop.
    pub is_hub: bool,
}

/// Facts of a thread, known when it is first seen.
#[derive(Clone, Debug, Default)]
pub struct ThreadInfo {
    /// Number of the thread in its session, from 0, in the order of first events.
    pub number: u32,
    /// `threading.get_ident()`.
    pub ident: u64,
    /// `threading.get_native_id()`.
    pub native_id: i32,
}

/// What one thread does with its events.
///
/// No method may run Python code, give up the GIL, or panic.
pub trait Machine: Sized + 'static {
    /// What all threads of a session share.
    type Shared;

    /// Whether [`CallEvent::Yield`] must be distinguished from [`CallEvent::Return`] where that costs a lookup, which
    /// is before 3.12.
    const NEEDS_YIELDS: bool = true;

    fn new(info: &ThreadInfo, shared: &mut Self::Shared) -> Self;

    /// A function begins or continues.
    fn enter(&mut self, callee: Callee, context: EventContext<'_, Self::Shared>) -> EventOutcome;

    /// The function with this key ends, for good or for now. It need not have been entered: the session may have been
    /// started inside it.
    fn leave(&mut self, key: usize, context: EventContext<'_, Self::Shared>) -> EventOutcome;

    /// The thread continues with another stack, that of this greenlet.
    fn switch(&mut self, _to: CurrentGreenlet, _moment: Moment, _shared: &mut Self::Shared) {}

    /// Whether a call of the function with this key is open, and the innermost.
    fn is_innermost(&self, key: usize) -> bool;

    /// Number of open calls, on all stacks of the thread.
    fn depth(&self) -> usize;

    /// The session stops: the innermost open call ends as if it had returned now. Called until there is none.
    fn close_innermost(&mut self, now: i64, shared: &mut Self::Shared);

    /// This thread will have no more events, and no open calls: its results may move to `shared`. `name` is the
    /// thread's name, if known. Returns whether the machine can be dropped.
    fn retire(&mut self, _info: &ThreadInfo, _name: Option<&str>, _shared: &mut Self::Shared) -> bool {
        false
    }

    /// Gives the keys of all open calls, on all stacks of the thread.
    fn open_keys(&self, see: &mut dyn FnMut(usize));

    /// Functions have ended: replaces keys and numbers of functions in all that the machine holds, and forgets what it
    /// remembers by key.
    fn rename(&mut self, ended: &mut EndedFunctions);

    /// The same for what all threads share.
    fn rename_shared(shared: &mut Self::Shared, ended: &mut EndedFunctions);

    /// Runs what the engine does for itself and what an observer of allocations should not take for the program's.
    fn aside<T>(work: impl FnOnce() -> T) -> T {
        work()
    }
}
