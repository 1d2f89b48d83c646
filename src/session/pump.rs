//! Moves events from a backend to a session, and what the session learns about processes back to the backend.

use std::time::{Duration, Instant};
use std::{slice, vec};

use super::Session;
use crate::capture::Backend;
use crate::cpython_layout::TargetLayout;
use crate::error::Result;
use crate::event::{Event, Pid};
use crate::sys;

/// Events on their way from a backend to a session. Every recording, live or replayed, runs through one.
#[derive(Default)]
pub struct EventPump {
    /// Read from the backend, not yet passed to the session.
    waiting: vec::IntoIter<Event>,
    /// The backend has more.
    more: bool,
}

impl EventPump {
    /// How long to wait for events: not at all while some are waiting, else at most `max`.
    pub fn wait(&self, max: Duration) -> Duration {
        if self.is_waiting() { Duration::ZERO } else { max }
    }

    fn is_waiting(&self) -> bool {
        self.more || self.waiting.len() > 0
    }

    /// Passes available events to the session, each to `observe` first; true if more are waiting. Waits up to `wait` for
    /// the first event. Returns soon after `until`, if given: a target can make each sample slow to read.
    ///
    /// # Errors
    /// Those of the backend, and of the session on an event.
    pub fn pump(
        &mut self,
        backend: &mut dyn Backend,
        session: &mut Session,
        observe: &mut dyn FnMut(&Event),
        wait: Duration,
        until: Option<Instant>,
    ) -> Result<bool> {
        let wait = wait
            .min(session.until_awaits())
            .min(session.until_lags())
            .min(session.until_asyncio())
            .min(session.until_spans());
        let in_time = || until.is_none_or(|until| Instant::now() < until);
        if self.waiting.len() == 0 {
            let mut events = Vec::new();
            self.more = backend.poll(wait, &mut events)?;
            session.open_files(&events);
            for event in events.iter().take_while(|_| in_time()) {
                session.capture_code_objects(slice::from_ref(event));
            }
            self.waiting = events.into_iter();
        }
        for event in self.waiting.by_ref() {
            observe(&event);
            session.event(event, &mut |pid, layout| update_backend(backend, pid, layout))?;
            if !in_time() {
                break;
            }
        }
        let now = sys::clock::now();
        for pid in [session.read_spans(now), session.search_asyncio(now)].concat() {
            session.notify_backend(pid, &mut |pid, layout| update_backend(backend, pid, layout))?;
        }
        session.add_sleeping(backend)?;
        session.read_awaits();
        session.read_lags();
        Ok(self.is_waiting())
    }

    /// Drops the events that are still waiting; the number of samples among them.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn discard(mut self, backend: &mut dyn Backend) -> Result<u64> {
        let samples =
            |events: &mut dyn Iterator<Item = Event>| events.filter(|e| matches!(e, Event::Sample(_))).count();
        let (mut events, mut left, mut more) = (Vec::new(), samples(&mut self.waiting), true);
        while more {
            more = backend.poll(Duration::ZERO, &mut events)?;
            left += samples(&mut events.drain(..));
        }
        Ok(left as u64)
    }
}

/// Passes the backend the state of a process: its layout, or that it has exited (`None`).
///
/// # Errors
/// Those of [`Backend::update_process`].
pub fn update_backend(backend: &mut dyn Backend, pid: Pid, layout: Option<&TargetLayout>) -> Result<()> {
    match layout {
        Some(layout) => backend.update_process(pid, layout),
        None => {
            backend.remove_process(pid);
            Ok(())
        }
    }
}
