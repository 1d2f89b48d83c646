//! The tracing thread: resumes stopped threads, and samples those for which a sample is due.

use std::collections::VecDeque;
use std::io;
use std::num::NonZero;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::{Builder, JoinHandle, available_parallelism};
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::run_state::RunState;
use super::stopped_reader::{StoppedReader, restart_interrupted_syscall};
use super::timer::{self, ThreadTimer, Tick, TimerEvents};
use super::{TracerCommand, TracerEvent, TracerShared, lock};
use crate::capture::common::jitter::period;
use crate::capture::common::rng::Rng;
use crate::capture::common::sideband::SidebandRecord;
use crate::capture::{WalkFn, push};
use crate::event::{CodeCopy, Event, Pid, Sample, Tid};
use crate::sys;
use crate::sys::procfs::TickSignal;
use crate::sys::ptrace;
use crate::sys::ptrace::{Epoll, Ready, StopReason, Stopped, SyscallSide, WaitEvent};

mod due;
pub(super) mod polled;
mod prewake;
mod sideband;
mod threads;

use polled::PolledThread;
use prewake::StopForecast;

/// Events queued for the session before samples are dropped.
const MAX_QUEUE: usize = 1 << 14;
/// How long shutdown waits for threads that were requested to stop, ns.
const SHUTDOWN_TIMEOUT: u64 = 100_000_000;
/// How long a process's handled signals are taken as known before they are read again, ns.
const SIGNAL_RECHECK_INTERVAL: u64 = 1_000_000_000;
/// Samples that a thread may owe; more count as lost.
const MAX_OWED: u64 = 100;
/// A thread that has ticked so often without a stop blocks the signal: it should have stopped at the first tick. One or two
/// more can come before that if the host takes the CPU in between.
const MISSED_STOPS: u64 = 8;
/// Longest wait, in case a signal that reports stops is lost.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const SHORT_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Timers started or stopped before stops are handled: with many threads the first ones have ticked, and are stopped,
/// before the last timer is started.
const BATCH_SIZE: usize = 8;

const CHILD_EVENTS: u64 = u64::MAX;
const COMMANDS: u64 = u64::MAX - 1;
const ALARM: u64 = u64::MAX - 2;
const PREWAKE: u64 = u64::MAX - 3;

pub struct TracerConfig {
    pub shared: Arc<TracerShared>,
    pub received: Receiver<TracerCommand>,
    pub waker: OwnedFd,
    pub children: OwnedFd,
    pub kind: timer::TimerKind,
    /// Samples per second of CPU time.
    pub rate: u64,
    /// Also trace forked children.
    pub follow: bool,
    pub walk: WalkFn,
}

/// A thread of the target.
struct TracedThread {
    pid: Pid,
    /// `None` once it cannot tick any more.
    timer: Option<ThreadTimer>,
    /// A stopped timer whose signal may still be pending.
    retired: Option<ThreadTimer>,
    running: Option<RunState>,
    /// Once known.
    thread_pointer: Option<u64>,
    /// Samples that fell due in the kernel and are taken as soon as the thread leaves it, or sleeps in the same call.
    owed: u64,
    /// `Some` if no tick stops it.
    polled: Option<PolledThread>,
    /// When it was requested to stop for a sample; `None` once it has.
    stop_requested: Option<u64>,
    /// Ticks that should stop it and have not yet.
    expected_stops: u64,
    forecast: StopForecast,
    /// Blocks that the last walk read.
    blocks: Vec<u64>,
}

/// Location of a thread that no tick stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThreadSlot {
    /// It has not stopped yet.
    Unknown,
    /// Outside of system calls: the next one stops it.
    User,
    /// In a system call: it stops when that returns.
    Call,
    /// Anywhere: its system calls do not stop it.
    Free,
}

/// A process of the target.
#[derive(Default)]
struct TracedProcess {
    /// It becomes the command when it executes; until then it is a copy of this process.
    at_exec: bool,
    /// When its mappings were last scanned.
    scanned: u64,
    /// The signal by which ticks stop its threads, and when it was determined; `None`: not yet.
    signal: Option<TickSignal>,
    signal_found: u64,
    /// Sideband records from timers, in chronological order.
    records: VecDeque<SidebandRecord>,
}

struct Tracer {
    p: TracerConfig,
    epoll: Epoll,
    alarm: OwnedFd,
    /// Goes off before a stop, and the time it was last set for.
    prewake_alarm: OwnedFd,
    prewake_time: u64,
    /// CPUs that we may use.
    cpus: usize,
    threads: FxHashMap<Tid, TracedThread>,
    processes: FxHashMap<Pid, TracedProcess>,
    /// The command we started: others wait for its exit.
    command: Option<Pid>,
    started: bool,
    /// Threads requested to stop.
    stop_requests: Vec<Tid>,
    reader: StoppedReader,
    rng: Rng,
}

/// Starts the tracing thread.
///
/// # Errors
/// No thread or descriptor is left.
pub fn start(config: TracerConfig) -> io::Result<JoinHandle<()>> {
    let epoll = Epoll::new()?;
    let alarm = ptrace::alarm()?;
    epoll.add(config.children.as_fd(), CHILD_EVENTS)?;
    epoll.add(config.waker.as_fd(), COMMANDS)?;
    epoll.add(alarm.as_fd(), ALARM)?;
    let prewake_alarm = ptrace::alarm()?;
    epoll.add(prewake_alarm.as_fd(), PREWAKE)?;
    Builder::new().name("tracer".into()).spawn(move || {
        // Raise priority to shorten stops; ignored if not permitted.
        sys::process::raise_priority();
        let tracer = Tracer {
            reader: StoppedReader::new(config.walk, Arc::default()),
            p: config,
            epoll,
            alarm,
            prewake_alarm,
            prewake_time: 0,
            cpus: available_parallelism().map_or(1, NonZero::get),
            threads: FxHashMap::default(),
            processes: FxHashMap::default(),
            command: None,
            started: false,
            stop_requests: Vec::new(),
            rng: Rng::new(sys::clock::now()),
        };
        // When it ends, the kernel detaches it from all threads, without stopping them.
        tracer.run();
    })
}

impl Tracer {
    fn run(mut self) {
        let mut ready: Vec<Ready> = Vec::new();
        let mut stopping = None;
        while stopping
            .is_none_or(|since| !self.stop_requests.is_empty() && sys::clock::now() - since < SHUTDOWN_TIMEOUT)
        {
            self.prewake();
            let wait = if self.stop_requests.is_empty() {
                POLL_INTERVAL
            } else {
                SHORT_POLL_INTERVAL
            };
            self.epoll.wait(wait, &mut ready);
            let mut has_events = ready.is_empty();
            for r in &ready {
                match r.token {
                    CHILD_EVENTS => {
                        // A thread has stopped. Reap again after the signal was read, for stops in between.
                        self.reap_events();
                        ptrace::drain(self.p.children.as_fd());
                        has_events = true;
                    }
                    COMMANDS => {
                        ptrace::drain(self.p.waker.as_fd());
                        while let Ok(command) = self.p.received.try_recv() {
                            match command {
                                TracerCommand::Attach(pid, at_exec, reply) => {
                                    drop(reply.send(self.attach(pid, at_exec)))
                                }
                                TracerCommand::Start => self.start(),
                                TracerCommand::Stop => stopping = Some(self.stop()),
                            }
                        }
                    }
                    ALARM => {
                        ptrace::drain(self.alarm.as_fd());
                        self.poll_cpu_time();
                        // Alarms may leave no wait that is long enough to find that such a signal was lost.
                        has_events = true;
                    }
                    PREWAKE => ptrace::drain(self.prewake_alarm.as_fd()),
                    tid => self.tick(tid as Tid, r.hung_up),
                }
            }
            if has_events {
                self.reap_events();
            }
        }
        lock(&self.p.shared.stats).lost += self.threads.values().map(|t| t.owed).sum::<u64>();
    }

    fn period(&self) -> u64 {
        period(self.p.rate)
    }

    fn start(&mut self) {
        self.started = true;
        for some in self.tids().chunks(BATCH_SIZE) {
            for tid in some {
                if let Some(timer) = self.threads.get_mut(tid).and_then(|t| t.timer.as_mut()) {
                    timer.start();
                }
            }
            self.reap_events();
        }
        // Nothing reported what was mapped since the session's last scan.
        let pids: Vec<Pid> = self.processes.keys().copied().collect();
        for pid in pids {
            self.push(TracerEvent::Remapped(pid));
        }
        self.set_alarm();
    }

    /// Stops sampling; returns the time.
    fn stop(&mut self) -> u64 {
        self.started = false;
        let now = sys::clock::now();
        for some in self.tids().chunks(BATCH_SIZE) {
            self.reap_events();
            for tid in some {
                self.stop_timer(*tid, now);
            }
        }
        now
    }

    fn stop_timer(&mut self, tid: Tid, now: u64) {
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let Some(mut timer) = t.timer.take() else { return };
        timer.stop();
        let mut events = TimerEvents::default();
        timer.drain_events(&mut events);
        lock(&self.p.shared.stats).cpu_time += timer.count();
        // Its last tick leads to a stop.
        t.owed += u64::from(t.expected_stops + events.stops > 0);
        if t.owed > 0 && t.stop_requested.is_none() {
            t.stop_requested = Some(now);
            self.stop_requests.push(tid);
        }
        t.retired = Some(timer);
    }

    fn tids(&self) -> Vec<Tid> {
        self.threads.keys().copied().collect()
    }

    /// Resumes all threads that have stopped, and handles those that have exited.
    fn reap_events(&mut self) {
        // First those that stop at our request.
        for tid in self.stop_requests.clone() {
            self.handle_event(ptrace::next_wait_event(Some(tid)));
        }
        // There cannot be more events than this at once: do not loop if something is wrong.
        for _ in 0..2 * self.threads.len() + 64 {
            match ptrace::next_wait_event(None) {
                // Stays in the queue, ahead of all others, until its parent waits for it.
                Some(WaitEvent::Ended(tid)) if self.command == Some(tid) => {
                    for tid in self.tids() {
                        self.handle_event(ptrace::next_wait_event(Some(tid)));
                    }
                    return;
                }
                None => return,
                event => self.handle_event(event),
            }
        }
    }

    fn handle_event(&mut self, event: Option<WaitEvent>) {
        match event {
            None => {}
            Some(WaitEvent::Stopped(stop)) => self.handle(stop),
            Some(WaitEvent::Ended(tid)) => self.on_exit(tid),
        }
    }

    fn handle(&mut self, mut stop: Stopped) {
        let tid = stop.tid;
        let mut timer_tick = false;
        if let StopReason::Signal(_) = stop.reason
            && let Some(t) = self.threads.get(&tid)
            && let Some(descriptor) = stop.ready_descriptor()
            && let Some(timer) = [&t.timer, &t.retired]
                .into_iter()
                .flatten()
                .find(|t| t.owns_descriptor(descriptor))
        {
            timer_tick = timer.is_tick(descriptor) && t.timer.as_ref().is_some_and(|t| t.owns_descriptor(descriptor));
            stop.suppress_signal();
        }
        let side = self.follow(&mut stop);
        let t = self.threads.get(&tid);
        let (stop_requested, owed) = t.map_or((None, 0), |t| (t.stop_requested, t.owed));
        match (stop.reason, stop_requested) {
            (StopReason::Exec, _) => {
                self.on_exec(tid);
                self.follow(&mut stop);
            }
            // While job control stops the process, no sample is taken.
            (StopReason::GroupStop, _) => self.forget_stop_request(tid),
            // In the middle of a system call; the sample falls due again.
            (StopReason::Cloned, _) => self.forget_stop_request(tid),
            (StopReason::Call, None) if side != Some(SyscallSide::Exit) => {}
            // Any stop replaces the requested one (kernel/signal.c, ptrace_stop): no other follows.
            (_, Some(since)) => {
                self.forget_stop_request(tid);
                if matches!(side, Some(SyscallSide::Entry(..))) {
                    // Unless it stopped here before the request: the next stop must not come in the middle of this
                    // call.
                    self.postpone_syscall(&stop);
                }
                self.sample(stop, Some(since), timer_tick);
            }
            (StopReason::Trap, None) if t.is_none() => self.on_clone(stop),
            (StopReason::TimerSignal, None) if timer_tick => self.sample(stop, None, true),
            (_, None) if owed > 0 => self.sample(stop, None, false),
            (StopReason::TimerSignal, None) => self.clear_owed(tid),
            (StopReason::Call, None) => {}
            (StopReason::Signal(_) | StopReason::Trap, None) => drop(restart_interrupted_syscall(&stop)),
        }
    }

    fn forget_stop_request(&mut self, tid: Tid) {
        if let Some(t) = self.threads.get_mut(&tid) {
            t.stop_requested = None;
        }
        self.stop_requests.retain(|requested| *requested != tid);
    }

    /// A timer has ticked, or cannot tick any more.
    fn tick(&mut self, tid: Tid, hung_up: bool) {
        let mut events = TimerEvents::default();
        let Some(t) = self.threads.get_mut(&tid) else { return };
        if let Some(timer) = &mut t.timer {
            timer.drain_events(&mut events);
        }
        let pid = t.pid;
        self.ticked(tid, events.stops, events.ticks, events.regs.take());
        self.drain_events(pid, events);
        if hung_up && let Some(t) = self.threads.get_mut(&tid) {
            count_time(&self.p.shared, t);
            (t.timer, t.retired) = (None, None);
        }
    }

    /// Samples a thread and resumes it. `stop_requested`: when it was requested to stop, if it was. `timer_tick`: it
    /// stopped at a tick. One stop yields all samples that are owed.
    fn sample(&mut self, stop: Stopped, stop_requested: Option<u64>, timer_tick: bool) {
        let tid = stop.tid;
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let pid = t.pid;
        let layout = lock(&self.p.shared.layouts).get(&pid).cloned();
        let owed = std::mem::take(&mut t.owed);
        let polls_cpu_time = t.timer.as_ref().is_some_and(|t| t.event().is_none());
        let tick = if timer_tick {
            Some(Tick::Stop)
        } else {
            (polls_cpu_time && stop_requested.is_some()).then_some(Tick::Notified)
        };
        if owed > 0 {
            for timer in [&t.timer, &t.retired].into_iter().flatten() {
                timer.cancel_stop();
            }
        }
        let taken = self
            .reader
            .take_sample(stop, pid, layout.as_deref(), &t.blocks, &mut t.timer, tick);
        let Ok((mut sample, thread_pointer, mut past)) = taken else {
            lock(&self.p.shared.stats).lost += owed;
            return; // killed while it was stopped
        };
        t.thread_pointer = Some(thread_pointer);
        let resumed = sys::clock::now();
        let mut events = TimerEvents::default();
        if let Some(timer) = &mut t.timer {
            timer.drain_events(&mut events);
            if let Some(tick) = tick {
                timer.handled(tick);
            }
            timer.resumed(resumed);
        }
        let mut since = stop_requested.unwrap_or(sample.time);
        let mut count = owed;
        if timer_tick {
            if events.stops > 0 {
                since = events.stop_time;
            }
            let all = std::mem::take(&mut t.expected_stops) + std::mem::take(&mut events.stops);
            past += all.saturating_sub(1);
            count += 1;
            if let Some(interval) = t.timer.as_ref().and_then(ThreadTimer::next_period) {
                t.forecast.stopped(since, resumed + interval);
            }
        } else if polls_cpu_time && stop_requested.is_some() {
            count += 1;
        }
        let stop_time = resumed.saturating_sub(since);
        let time = sample.time;
        let (mut codes, mut missed) = (Vec::new(), false);
        if layout.is_some() {
            self.reader.finish(&mut sample, &mut t.blocks);
            missed = self.reader.missed_code();
            codes = self.reader.codes();
        }
        self.ticked(tid, events.stops, events.ticks, events.regs.take());
        self.drain_events(pid, events);
        self.emit_mappings(pid, time);
        self.find_signal(pid, time);
        let mut stats = lock(&self.p.shared.stats);
        stats.record_stop(stop_time);
        stats.lost += past;
        drop(stats);
        self.deliver(sample, count, codes, missed);
    }

    /// Emits a sample that represents `count` samples, with its code objects. `missed`: some of them were not copied.
    fn deliver(&self, sample: Sample, count: u64, codes: Vec<CodeCopy>, missed: bool) {
        let mut stats = lock(&self.p.shared.stats);
        let mut queue = lock(&self.p.shared.queue);
        let mut codes = codes;
        for _ in 0..count {
            if queue.len() < MAX_QUEUE {
                stats.delivered += 1;
                let mut events = Vec::with_capacity(1 + codes.len());
                push(sample.clone(), std::mem::take(&mut codes), &mut events);
                queue.extend(events.into_iter().map(TracerEvent::Event));
            } else {
                stats.lost += 1;
            }
        }
        // A code object that was not copied may be freed before the session's next poll.
        if missed || queue.len() > MAX_QUEUE / 4 {
            self.p.shared.ready.notify_one();
        }
    }

    fn push(&self, event: TracerEvent) {
        // New mappings are read soon: one may be an interpreter.
        let urgent = matches!(event, TracerEvent::Event(Event::Mmap { .. } | Event::Exec { .. }));
        lock(&self.p.shared.queue).push_back(event);
        if urgent {
            self.p.shared.ready.notify_one();
        }
    }
}

fn count_time(shared: &TracerShared, t: &TracedThread) {
    if let Some(timer) = &t.timer {
        lock(&shared.stats).cpu_time += timer.count();
    }
}
