//! The engine's events, written into the logs of all profilers that run: the engine has one session at a time, which they
//! share.

use std::cell::UnsafeCell;
use std::sync::Arc;

use nativeprof_hooks::{self as hooks, Ticket};
use pyo3::prelude::*;

use super::Sink;
use super::timeline::{EndedKeys, code};
use crate::engine::stacks::OpenCallStacks;
use crate::engine::{
    self, CallEvent, Callee, Clock, CurrentGreenlet, EndedFunctions, EngineSession, EventContext, EventOutcome, Filter,
    FunctionObject, Machine, Moment, ThreadInfo, own,
};

/// The machine of one thread: only what the engine wants to know of it.
struct EventMachine {
    stack: OpenCallStacks<usize>,
    /// Heights of the stack above functions that are left out: what these call is left out too, if it is written in C.
    /// Before 3.12 only; later there are no events inside of such functions.
    left_out: OpenCallStacks<usize>,
    /// Looked up last in the session's table of functions.
    last: usize,
}

/// The logs that events go to.
#[derive(Default)]
struct Logs {
    all: Vec<(Ticket, Arc<Sink>)>,
    ended: EndedKeys,
    /// Events come from the profile hook.
    has_hook: bool,
}

impl EventMachine {
    #[cold]
    #[inline(never)]
    fn first_sight(&mut self, callee: Callee, context: &mut EventContext<'_, Logs>) -> EventOutcome {
        // What is allocated for the function's name is not the program's.
        let (_, is_excluded) = hooks::silently(|| context.intern(callee));
        if is_excluded {
            EventOutcome::Excluded
        } else {
            self.last = callee.key();
            EventOutcome::Done
        }
    }

    #[cold]
    fn enter_left_out(&mut self, key: usize, context: &EventContext<'_, Logs>) -> EventOutcome {
        if context.shared.has_hook {
            self.stack.push(key);
            self.left_out.push(self.stack.len());
        }
        EventOutcome::Excluded
    }
}

#[inline(always)]
fn write(context: &EventContext<'_, Logs>, key: usize) {
    let event = match context.event {
        CallEvent::Start | CallEvent::Resume | CallEvent::Throw => code::CALL,
        CallEvent::Return | CallEvent::Yield | CallEvent::Unwind => code::RETURN,
        CallEvent::CCall => code::C_CALL,
        CallEvent::CReturn => code::C_RETURN,
        CallEvent::CRaise => code::C_EXCEPTION,
    };
    for (ticket, sink) in &context.shared.all {
        hooks::with_cache(*ticket, |cache| {
            sink.append(cache, key as u64, event, 0, 0, sink.clock.now());
        });
    }
}

impl Machine for EventMachine {
    type Shared = Logs;

    fn new(_: &ThreadInfo, _: &mut Logs) -> EventMachine {
        EventMachine {
            stack: OpenCallStacks::default(),
            left_out: OpenCallStacks::default(),
            last: 0,
        }
    }

    #[inline(always)]
    fn enter(&mut self, callee: Callee, mut context: EventContext<'_, Logs>) -> EventOutcome {
        let key = callee.key();
        if key != self.last {
            // Excluded functions are known too.
            let known = context.functions.find(key).and_then(|id| context.functions.get(id));
            match known {
                Some(function) if function.is_excluded => return self.enter_left_out(key, &context),
                Some(_) => self.last = key,
                None => {
                    if self.first_sight(callee, &mut context) == EventOutcome::Excluded {
                        return self.enter_left_out(key, &context);
                    }
                }
            }
        }
        if context.event == CallEvent::CCall && self.left_out.last() == Some(&self.stack.len()) {
            return EventOutcome::Done;
        }
        self.stack.push(key);
        write(&context, key);
        EventOutcome::Done
    }

    #[inline(always)]
    fn leave(&mut self, key: usize, context: EventContext<'_, Logs>) -> EventOutcome {
        // Frames in between were lost, if it is not the innermost; if it is not there at all it was open at the start.
        if let Some(at) = self.stack.iter().rposition(|k| *k == key) {
            self.stack.truncate(at);
            while self.left_out.pop_if(|height| *height > at).is_some() {}
        }
        if context.functions.is_excluded(key) {
            return EventOutcome::Excluded;
        }
        write(&context, key);
        EventOutcome::Done
    }

    #[inline(always)]
    fn is_innermost(&self, key: usize) -> bool {
        self.stack.last() == Some(&key)
    }

    fn depth(&self) -> usize {
        self.stack.depth()
    }

    fn switch(&mut self, to: CurrentGreenlet, _: Moment, shared: &mut Logs) {
        let from = self.stack.key();
        if to.key == from {
            return;
        }
        self.stack.switch(to.key, 0);
        self.left_out.switch(to.key, 0);
        for (ticket, sink) in &shared.all {
            hooks::with_cache(*ticket, |cache| {
                sink.append(cache, to.key as u64, code::SWITCH, from as u64, 0, sink.clock.now());
            });
        }
    }

    fn close_innermost(&mut self, _: i64, _: &mut Logs) {
        if self.stack.is_empty()
            && let Some(key) = self.stack.any_parked()
        {
            self.stack.switch(key, 0);
        }
        self.stack.pop();
    }

    fn retire(&mut self, _: &ThreadInfo, _: Option<&str>, _: &mut Logs) -> bool {
        true
    }

    fn open_keys(&self, see: &mut dyn FnMut(usize)) {
        self.stack.open().for_each(|key| see(*key));
    }

    fn rename(&mut self, _: &mut EndedFunctions) {
        self.last = 0;
    }

    /// Rows keep the address: it is the time of a row that says which function had it.
    fn rename_shared(shared: &mut Logs, ended: &mut EndedFunctions) {
        let now = Clock::best().now();
        for (address, key) in ended.keys() {
            shared.ended.add(address as u64, now, key as u64);
        }
        ended.use_all();
    }

    fn aside<T>(work: impl FnOnce() -> T) -> T {
        hooks::silently(work)
    }
}

/// The session that profilers share, and the process that it belongs to.
struct SharedSession(UnsafeCell<Option<(Box<EngineSession<EventMachine>>, u32)>>);

// SAFETY: used with the GIL held only, which orders accesses.
unsafe impl Sync for SharedSession {}

static SESSION: SharedSession = SharedSession(UnsafeCell::new(None));

/// Not to be kept while Python code may run, other than for the session's start and stop, which allow for it.
#[allow(clippy::mut_from_ref)]
fn session(_: Python<'_>) -> &'static mut Option<(Box<EngineSession<EventMachine>>, u32)> {
    // SAFETY: the GIL is held; see above.
    unsafe { &mut *SESSION.0.get() }
}

/// Lets a log take part, and starts the session with the first one, whose owner `sys.getprofile` then gives before 3.12.
pub fn add(owner: &Bound<'_, PyAny>, sink: Arc<Sink>, ticket: Ticket) -> PyResult<()> {
    let py = owner.py();
    let place = session(py);
    if let Some((running, pid)) = place {
        if *pid == std::process::id() {
            running.shared.all.push((ticket, sink));
            return Ok(());
        }
        // A forked child continues tracing for its parent's profiler until it wants its own.
        running.shared.all.clear();
        running.stop(py)?;
        *session(py) = None;
    }
    let filter = Filter {
        only: Vec::new(),
        skip: vec!["nativeprof.events".to_string()],
    };
    let logs = Logs {
        all: vec![(ticket, sink)],
        ended: EndedKeys::default(),
        has_hook: !own::interpreter(py).has_monitoring,
    };
    let place = session(py);
    let (started, _) = place.insert((
        EngineSession::new("nativeprof.events", logs, filter),
        std::process::id(),
    ));
    // What it takes to start is not the program's.
    let result = hooks::silently(|| EngineSession::start(started, owner));
    if result.is_err() {
        *session(py) = None;
    }
    result
}

/// Ends a log's part; with the last one the session. Gives what was seen so far.
pub fn remove(py: Python<'_>, ticket: Ticket) -> PyResult<Seen> {
    // The log keeps the code objects that it is given. (Without calls no session of this type may run.)
    if session(py).as_ref().is_some_and(|(session, _)| session.is_running()) {
        engine::release_all::<EventMachine>(py);
    }
    let seen = seen(py);
    let Some((running, _)) = session(py) else {
        return Ok(seen);
    };
    running.shared.all.retain(|(t, _)| *t != ticket);
    if !running.shared.all.is_empty() {
        return Ok(seen);
    }
    let stopped = hooks::silently(|| {
        let stopped = running.stop(py);
        let last = session(py).take();
        drop(last);
        stopped
    });
    stopped.map(|()| seen)
}

/// Ends the session of the process that this one was forked from.
pub fn forget_parent(py: Python<'_>) {
    if let Some((running, pid)) = session(py)
        && *pid != std::process::id()
    {
        running.shared.all.clear();
        let _ = running.stop(py);
        let last = session(py).take();
        drop(last);
    }
}

/// What a session has seen.
#[derive(Default)]
pub struct Seen {
    /// By key.
    pub functions: Vec<(u64, FunctionObject)>,
    pub ended: EndedKeys,
}

/// What the session that runs has seen.
pub fn seen(py: Python<'_>) -> Seen {
    let Some((running, _)) = session(py) else {
        return Seen::default();
    };
    let functions = running.functions.iter();
    Seen {
        functions: functions.map(|(_, f)| (f.key as u64, f.object.clone_ref(py))).collect(),
        ended: running.shared.ended.clone(),
    }
}
