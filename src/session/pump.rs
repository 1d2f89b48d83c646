//! Moves events from a backend to a session, and what the session learns about processes back to the backend.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use std::vec;

use super::Session;
use super::awaits::AwaitSinks;
use super::lags::is_in_callback;
use super::open_intervals::read_sleeping;
use super::processes::KnownProcess;
use super::stacks::LastStack;
use crate::capture::ptrace::snapshot::SnapshotError;
use crate::capture::{Backend, OpenInterval};
use crate::counts::FramePath;
use crate::cpython_layout::TargetLayout;
use crate::error::Result;
use crate::event::{Event, Pid, Sample, Tid};
use crate::frame::RawFrame;

/// Events on their way from a backend to a session. Every recording, live or replayed, runs through one.
#[derive(Default)]
pub(super) struct EventPump {
    /// Read from the backend, not yet passed to the session.
    waiting: vec::IntoIter<Event>,
    /// The backend has more.
    more: bool,
}

/// Where a turn of the pump ends, though events are waiting.
#[derive(Clone, Copy, Default)]
pub(super) struct PumpEnd {
    /// Soon after this time: a target can make each sample slow to read.
    pub(super) until: Option<Instant>,
    /// Before the first sample that was taken at this time or later, ns.
    pub(super) before: Option<u64>,
}

impl PumpEnd {
    fn is_before(&self, next: &Event) -> bool {
        match (next, self.before) {
            (Event::Sample(s), Some(before)) => s.time < before,
            _ => true,
        }
    }
}

impl EventPump {
    /// How long to wait for events: not at all while some are waiting, else at most `max`.
    pub(super) fn wait(&self, max: Duration) -> Duration {
        if self.is_waiting() { Duration::ZERO } else { max }
    }

    fn is_waiting(&self) -> bool {
        self.more || self.waiting.len() > 0
    }

    /// Passes available events to the session, each to `observe` first; true if more are waiting. Waits up to `wait` for
    /// the first event.
    ///
    /// # Errors
    /// Those of the backend, and of the session on an event.
    pub(super) fn pump(
        &mut self,
        backend: &mut dyn Backend,
        session: &mut Session,
        observe: &mut dyn FnMut(&Event),
        wait: Duration,
        end: PumpEnd,
    ) -> Result<bool> {
        let wait = wait.min(session.until_reading());
        let in_time = || end.until.is_none_or(|until| Instant::now() < until);
        if self.waiting.len() == 0 {
            let mut events = Vec::new();
            self.more = backend.poll(wait, &mut events)?;
            session.open_mapped_files(&events);
            for event in events.iter().take_while(|_| in_time()) {
                session.capture_code_objects(event);
            }
            self.waiting = events.into_iter();
        }
        while self.waiting.as_slice().first().is_some_and(|next| end.is_before(next))
            && let Some(event) = self.waiting.next()
        {
            observe(&event);
            session.event(event, &mut |pid, layout| update_backend(backend, pid, layout))?;
            if !in_time() {
                break;
            }
        }
        session.add_sleeping(backend)?;
        let now = session.files.system.now();
        for pid in session.search(now) {
            session.notify_backend(pid, &mut |pid, layout| update_backend(backend, pid, layout))?;
        }
        session.read_awaits();
        session.read_lags();
        session.files.system.end_turn();
        Ok(match self.waiting.as_slice().first() {
            Some(next) => end.is_before(next),
            None => self.more,
        })
    }

    /// Drops the events that are still waiting; the number of samples among them.
    ///
    /// # Errors
    /// Those of the backend.
    pub(super) fn discard(mut self, backend: &mut dyn Backend) -> Result<u64> {
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
pub(super) fn update_backend(backend: &mut dyn Backend, pid: Pid, layout: Option<&TargetLayout>) -> Result<()> {
    match layout {
        Some(layout) => backend.update_process(pid, layout),
        None => {
            backend.remove_process(pid);
            Ok(())
        }
    }
}

impl Session {
    /// How long until something of the processes is to be read or searched.
    fn until_reading(&self) -> Duration {
        let activities = &self.activities;
        let now = self.files.system.now();
        let mut until = activities.lags.until_reading(now);
        for KnownProcess { activities: own, .. } in self.processes.iter() {
            until = until.min(activities.awaits.until_reading(&own.awaits, now));
            until = until.min(own.spans.until_search());
            if self.options.needs_asyncio() {
                until = until.min(own.tasks.asyncio.until_search());
            }
        }
        until
    }

    /// Opens the files that these events name, before anything slower is done: the processes may be about to exit.
    fn open_mapped_files(&mut self, events: &[Event]) {
        self.processes.open_mapped_files(&mut self.files, events);
    }

    /// Copies the code objects that an event names, before anything slower is done: they may be about to be freed.
    fn capture_code_objects(&mut self, event: &Event) {
        let last = match event {
            Event::Sample(s) => self.stacks.last_python(s.tid),
            _ => None,
        };
        self.processes.capture_code_objects(&mut self.files, event, last);
    }

    /// Searches processes for spans and asyncio, before samples come that need it. Returns those where something was found now.
    fn search(&mut self, now: u64) -> Vec<Pid> {
        let (needs_asyncio, spans) = (self.options.needs_asyncio(), &mut self.activities.spans);
        let mut found = Vec::new();
        for KnownProcess {
            process,
            activities: own,
            ..
        } in self.processes.iter_mut()
        {
            let has_spans = own.spans.is_waiting() && spans.find(&mut own.spans, process, &self.files, now);
            if needs_asyncio {
                own.tasks.asyncio.search(process, &self.files, now);
            }
            if has_spans | own.tasks.asyncio.take_new_running() {
                found.push(process.pid());
            }
        }
        found
    }

    /// Reads the suspended tasks of the processes where that is due.
    fn read_awaits(&mut self) {
        let now = self.files.system.now();
        let (activities, files) = (&mut self.activities, &mut self.files);
        if !activities.awaits.are_read() {
            return;
        }
        let mut sinks = AwaitSinks {
            names: &mut activities.task_names,
            stacks: &self.stacks,
            segment: &mut self.segment,
        };
        for KnownProcess {
            process,
            activities: own,
            ..
        } in self.processes.iter_mut()
        {
            let (awaits, tasks) = (&mut own.awaits, &mut own.tasks);
            activities.awaits.read(awaits, tasks, process, files, &mut sinks, now);
        }
        activities.awaits.add_due_rows(&mut self.segment, now);
    }

    /// Reads the queues of event loops if that is due, and the stacks of callbacks that sleep.
    fn read_lags(&mut self) {
        let now = self.files.system.now();
        if !self.activities.lags.begin_reading(now) {
            return;
        }
        let mut sleeping: Vec<(Pid, Tid)> = Vec::new();
        for KnownProcess {
            process,
            activities: own,
            ..
        } in self.processes.iter_mut()
        {
            let (lags, asyncio) = (&mut own.lags, &mut own.tasks.asyncio);
            self.activities.lags.read(lags, asyncio, process, &self.files, now);
            sleeping.extend(lags.take_sleeping().into_iter().map(|tid| (process.pid(), tid)));
        }
        for (pid, tid) in sleeping {
            let system = self.files.system.clone();
            let mut read = || self.read_sleeping(pid, vec![tid]).remove(&tid)?.ok();
            if let Some(s) = system.sleeping_thread(pid, tid, &mut read) {
                self.add_sleeping_callback(&s);
            }
        }
        let processes = &self.processes;
        let own = |pid| Some(&processes.activities(pid)?.lags);
        self.activities.lags.finish_late(now, &mut self.segment, own);
    }

    /// Takes in the stack of an event loop's thread that sleeps.
    fn add_sleeping_callback(&mut self, s: &Sample) {
        self.build_stack(s, &mut LastStack::default());
        let (files, stack) = (&self.files, &mut self.stacks.stack);
        let KnownProcess {
            process,
            activities: own,
            ..
        } = self.processes.ensure(s.pid);
        let in_callback = is_in_callback(stack, &files.codes);
        stack.push(RawFrame::State(self.activities.states.waiting(s, process, files)));
        let node = self
            .segment
            .node(&mut FramePath::default(), stack, &|f| files.name_bytes(f));
        own.lags.add_sleeping(s.tid, node, in_callback, files.system.now());
    }

    /// Counts the intervals that are still open now that `backend` has stopped, and ends what is observed.
    ///
    /// # Errors
    /// As [`Session::event`].
    pub(super) fn add_open_intervals(&mut self, backend: &mut dyn Backend) -> Result<()> {
        self.add_intervals(backend.open_intervals(), |i, _| i.asleep)?;
        self.files.system.end_sampling();
        let now = self.files.system.now();
        let activities = &mut self.activities;
        for known in self.processes.iter_mut() {
            let pid = known.process.pid();
            activities.awaits.end_readings(&mut known.activities.awaits, pid, now);
            activities.lags.end_unfinished(&known.activities.lags, now);
        }
        activities.awaits.add_rows(&mut self.segment, now);
        let processes = &self.processes;
        let own = |pid| Some(&processes.activities(pid)?.lags);
        activities.lags.finish(u64::MAX, &mut self.segment, own);
        Ok(())
    }

    /// Counts the threads that sleep, where `backend` does not read their stacks.
    fn add_sleeping(&mut self, backend: &mut dyn Backend) -> Result<()> {
        let intervals = backend.sleeping();
        // Threads are in the state in which they were read: one that slept a little earlier and runs now does not count,
        // one that slept a little later does.
        self.add_intervals(intervals, |i, error| match error {
            Some(SnapshotError::KeptRunning) => false,
            Some(SnapshotError::MovedOn) => true,
            _ => i.asleep,
        })
    }

    /// `counts`: whether an interval counts whose thread could not be read, and why it could not.
    fn add_intervals(
        &mut self,
        intervals: Vec<OpenInterval>,
        counts: impl Fn(&OpenInterval, Option<SnapshotError>) -> bool,
    ) -> Result<()> {
        let mut by_process: BTreeMap<Pid, Vec<OpenInterval>> = BTreeMap::new();
        for interval in intervals {
            by_process.entry(interval.pid).or_default().push(interval);
        }
        for (pid, intervals) in by_process {
            if self.processes.get(pid).is_none() {
                // If it has exited, its samples say so.
                let _ = self.open(pid, &mut |_, _| Ok(()));
            }
            let known = self.processes.ensure(pid);
            let interpreter = known.process.interpreter().is_some();
            let sleeping = &known.activities.sleeping;
            let moved = intervals.iter().filter(|i| sleeping.last(i, interpreter).is_none());
            let moved: Vec<Tid> = moved.map(|i| i.tid).collect();
            let mut read = if moved.is_empty() {
                BTreeMap::new()
            } else {
                self.read_sleeping(pid, moved)
            };
            for interval in intervals {
                let sleeping = &mut self.processes.ensure(pid).activities.sleeping;
                let last = sleeping.last(&interval, interpreter).cloned();
                let sample = match (read.remove(&interval.tid).transpose(), last) {
                    (Ok(Some(sample)), _) => {
                        sleeping.keep(&interval, &sample, interpreter);
                        sample
                    }
                    (_, Some(last)) => last,
                    (result, None) if counts(&interval, result.as_ref().err().copied()) => Sample {
                        // One that has moved on since has its time, but no stack: the tree says so.
                        pid,
                        tid: interval.tid,
                        system_call: interval.call,
                        suspended: interval.suspended,
                        ..Sample::default()
                    },
                    _ => continue,
                };
                let sample = Sample {
                    suspended: interval.suspended,
                    time: interval.end,
                    time_spent: interval.time,
                    ..sample
                };
                self.files.system.notify_sample(&sample);
                self.event(Event::Sample(Box::new(sample)), &mut |_, _| Ok(()))?;
            }
        }
        Ok(())
    }

    /// Samples of those of the threads that sleep, and why others have none.
    fn read_sleeping(&mut self, pid: Pid, tids: Vec<Tid>) -> BTreeMap<Tid, std::result::Result<Sample, SnapshotError>> {
        let known = self.processes.ensure(pid);
        let has_interpreter = known.process.interpreter().is_some();
        let now = self.files.system.now();
        let context = match known.activities.sleeping.context(now, has_interpreter) {
            Some(context) => context,
            None => {
                let layout = self.read_layout(pid).unwrap_or_default();
                let known = self.processes.ensure(pid);
                let sleeping = &mut known.activities.sleeping;
                sleeping.read_context(&known.process, &self.files, layout)
            }
        };
        let process = &self.processes.ensure(pid).process;
        read_sleeping(process, &self.files, &context, tids)
    }
}
