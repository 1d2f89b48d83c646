//! Sampling by stopping one thread at a time with ptrace, for tens of microseconds: needs only permission to trace the
//! process.
//!
//! A thread of ours is the tracer (tracer/mod.rs), since ptrace is bound to a thread and stops must not wait for the
//! session. Each target thread has a timer of its own CPU time (timer.rs); at a tick in user code the thread stops, its
//! registers, stack and interpreter frames are read, and it is resumed. System calls are never interrupted; sleeping
//! threads are never stopped.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::common::mapping_tracker::MappingTracker;
use super::{Backend, EventKind, Mode, OpenInterval, SampleCounts, SamplingOptions, StopTimes, WalkFn};
use crate::cpython_layout::TargetLayout;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Event, Pid};
use crate::sys::ptrace;

mod run_state;
mod sleeping_threads;
pub mod snapshot;
mod stopped_reader;
mod timer;
mod tracer;

use sleeping_threads::SleepingThreads;
pub use timer::TimerKind;
use tracer::polled::PollReason;

/// Longest time between two polls of the queue: bounds how old a code object may be when its name is read.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Events returned at once.
const BATCH: usize = 256;

/// Commands to the tracer.
enum TracerCommand {
    /// Trace a process; `true`: from its next exec on.
    Attach(Pid, bool, Sender<Result<()>>),
    Start,
    Stop,
}

/// State shared with the tracer.
#[derive(Default)]
struct TracerShared {
    queue: Mutex<VecDeque<TracerEvent>>,
    /// Notified when something in the queue is urgent.
    ready: Condvar,
    layouts: Mutex<FxHashMap<Pid, Arc<TargetLayout>>>,
    stats: Mutex<TracerStats>,
}

/// Output of the tracer.
enum TracerEvent {
    Event(Event),
    /// Mappings of this process may have changed without a record.
    Remapped(Pid),
}

/// Stops of up to so many microseconds are counted by length.
const MAX_COUNTED_US: usize = 1000;

#[derive(Clone)]
struct TracerStats {
    cpu_time: u64,
    delivered: u64,
    lost: u64,
    /// Threads whose CPU time is polled, by the reason for it.
    polled: BTreeMap<PollReason, u64>,
    /// Samples that are lost because a stop could have changed what a system call of their thread returned.
    avoided: u64,
    /// Number of stops by length in microseconds; the last one counts all longer ones.
    stop_times: Vec<u64>,
    longest: u64,
}

impl Default for TracerStats {
    fn default() -> TracerStats {
        TracerStats {
            cpu_time: 0,
            delivered: 0,
            lost: 0,
            polled: BTreeMap::new(),
            avoided: 0,
            stop_times: vec![0; MAX_COUNTED_US + 1],
            longest: 0,
        }
    }
}

impl TracerStats {
    /// How threads are sampled that no tick stops, and why; `None`: there are none.
    fn timer_remark(&self) -> Option<String> {
        let reasons: Vec<String> = self
            .polled
            .iter()
            .map(|(reason, threads)| match threads {
                1 => format!("1 thread: {}", reason.text()),
                threads => format!("{threads} threads, each: {}", reason.text()),
            })
            .collect();
        let lost = match self.avoided {
            0 => String::new(),
            avoided => format!("; {avoided} lost where a stop could have changed what a system call returns"),
        };
        (!reasons.is_empty()).then(|| format!("CPU time is polled, without ticks, for {}{lost}", reasons.join("; ")))
    }

    fn record_stop(&mut self, ns: u64) {
        let us = usize::try_from(ns / 1000).unwrap_or(MAX_COUNTED_US).min(MAX_COUNTED_US);
        self.stop_times[us] += 1;
        self.longest = self.longest.max(ns);
    }

    fn stop_times(&self) -> Option<StopTimes> {
        let all: u64 = self.stop_times.iter().sum();
        let mut below = 0;
        let median = self.stop_times.iter().position(|n| {
            below += n;
            below * 2 >= all
        });
        (all > 0).then_some(StopTimes {
            median: median.unwrap_or(MAX_COUNTED_US) as u64 * 1000,
            longest: self.longest,
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No invariant spans two fields of what these mutexes protect.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub struct PtraceBackend {
    shared: Arc<TracerShared>,
    commands: Sender<TracerCommand>,
    waker: OwnedFd,
    tracer: Option<JoinHandle<()>>,
    kind: TimerKind,
    mappings: MappingTracker,
    mode: Mode,
    children: bool,
    /// Where time off the CPU is sampled, too.
    sleeping: Option<SleepingThreads>,
}

impl PtraceBackend {
    /// Starts the tracer; traces nothing yet. SIGCHLD is blocked from now on in this thread and those it creates.
    ///
    /// # Errors
    /// An event that ptrace cannot sample, or no descriptors left.
    pub fn new(options: &SamplingOptions, walk: WalkFn) -> Result<PtraceBackend> {
        PtraceBackend::with_timer(options, walk, TimerKind::probe())
    }

    /// The same with timers of a kind that may not be the best one here.
    ///
    /// # Errors
    /// As [`PtraceBackend::new`].
    pub fn with_timer(options: &SamplingOptions, walk: WalkFn, kind: TimerKind) -> Result<PtraceBackend> {
        if !matches!(options.event, EventKind::Auto | EventKind::CpuClock) {
            return Err(
                Error::new(ErrorKind::Unsupported, "the ptrace backend cannot sample this event")
                    .why("ptrace stops a thread some time after the event, when its stack has changed")
                    .hint("omit --event, or use --backend ebpf"),
            );
        }
        let off_cpu = &options.off_cpu;
        if off_cpu.wakers || off_cpu.min_blocked > 0 {
            let word = if off_cpu.wakers { "--wakers" } else { "--min-blocked" };
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("the ptrace backend does not support {word}"),
            )
            .why("it sees that a thread sleeps, but not for how long, nor what wakes it")
            .hint(format!("omit {word}, or use --backend ebpf")));
        }
        if options.workers {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the ptrace backend does not support --attribute-workers",
            )
            .why("it reads one thread at a time, so a worker and the thread it works for are not seen at the same instant")
            .hint("omit --attribute-workers, or use --backend ebpf"));
        }
        let failed = |e| Error::io("cannot set up tracing", e);
        let shared = Arc::new(TracerShared::default());
        let (commands, received) = channel();
        let waker = ptrace::waker().map_err(failed)?;
        let children = ptrace::child_signals().map_err(failed)?;
        let config = tracer::TracerConfig {
            shared: shared.clone(),
            received,
            waker: waker.try_clone().map_err(failed)?,
            children,
            kind,
            rate: options.rate,
            follow: options.children,
            walk,
        };
        let tracer = tracer::start(config).map_err(|e| Error::not_started("cannot start the thread that traces", e))?;
        Ok(PtraceBackend {
            shared,
            commands,
            waker,
            tracer: Some(tracer),
            kind,
            mappings: MappingTracker::default(),
            mode: options.mode,
            children: options.children,
            sleeping: (options.mode != Mode::Cpu).then(|| SleepingThreads::new(options.rate)),
        })
    }

    fn notify(&self, command: TracerCommand) {
        // The tracer ends only after `Stop`; later commands have no receiver.
        let _ = self.commands.send(command);
        ptrace::wake(self.waker.as_fd());
    }

    /// Adds the time that a sample represents, where that differs. False if it is not to be counted.
    fn complete(&mut self, event: &mut Event) -> bool {
        let Some(sleeping) = &mut self.sleeping else {
            return true;
        };
        sleeping.observe(event, self.children);
        match event {
            Event::Sample(sample) => sleeping.complete(sample.tid, &mut sample.time_spent, self.mode == Mode::Wall),
            _ => true,
        }
    }

    fn request_attach(&mut self, pid: Pid, at_exec: bool) -> Result<()> {
        let (reply, response) = channel();
        self.notify(TracerCommand::Attach(pid, at_exec, reply));
        let gone = || {
            Error::new(ErrorKind::Io, format!("cannot trace process {pid}"))
                .why("the tracer thread has exited")
                .hint("run it again; if it recurs, please report it with the output of `nativeprof doctor`")
        };
        response.recv().unwrap_or_else(|_| Err(gone()))
    }
}

impl Backend for PtraceBackend {
    fn backend(&self) -> &'static str {
        "ptrace"
    }

    fn event(&self) -> &str {
        match self.mode {
            Mode::Cpu => self.kind.name(),
            Mode::OffCpu => "off-cpu",
            Mode::Wall => "wall-clock",
            Mode::Rss => "rss",
            Mode::Alloc => "alloc",
        }
    }

    fn attach(&mut self, pid: Pid) -> Result<()> {
        self.request_attach(pid, false)?;
        if let Some(sleeping) = &mut self.sleeping {
            sleeping.add_process(pid);
        }
        Ok(())
    }

    fn attach_at_exec(&mut self, pid: Pid) -> Result<()> {
        self.request_attach(pid, true)
    }

    fn update_process(&mut self, pid: Pid, layout: &TargetLayout) -> Result<()> {
        lock(&self.shared.layouts).insert(pid, Arc::new(layout.clone()));
        Ok(())
    }

    fn remove_process(&mut self, pid: Pid) {
        lock(&self.shared.layouts).remove(&pid);
        self.mappings.remove_process(pid);
        if let Some(sleeping) = &mut self.sleeping {
            sleeping.remove_process(pid);
        }
    }

    fn start(&mut self) -> Result<()> {
        self.notify(TracerCommand::Start);
        if let Some(sleeping) = &mut self.sleeping {
            sleeping.start();
        }
        Ok(())
    }

    fn poll(&mut self, wait: Duration, out: &mut Vec<Event>) -> Result<bool> {
        let wait = self
            .sleeping
            .as_ref()
            .map_or(wait, |sleeping| wait.min(sleeping.wait()));
        let mut queue = lock(&self.shared.queue);
        if queue.is_empty() && !wait.is_zero() {
            let waited = self.shared.ready.wait_timeout(queue, wait.min(POLL_INTERVAL));
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let n = queue.len().min(BATCH);
        let events: Vec<TracerEvent> = queue.drain(..n).collect();
        let more = !queue.is_empty();
        drop(queue);
        for event in events {
            match event {
                TracerEvent::Event(mut event) => {
                    self.mappings.observe(&event);
                    if self.complete(&mut event) {
                        out.push(event);
                    }
                }
                TracerEvent::Remapped(pid) => self.mappings.rescan(pid, out),
            }
        }
        if let Some(sleeping) = &mut self.sleeping {
            sleeping.rescan();
        }
        Ok(more)
    }

    fn sleeping(&mut self) -> Vec<OpenInterval> {
        self.sleeping
            .as_mut()
            .map_or_else(Vec::new, SleepingThreads::drain_intervals)
    }

    fn stop(&mut self) {
        if let Some(sleeping) = &mut self.sleeping {
            sleeping.stop();
        }
        self.notify(TracerCommand::Stop);
        if let Some(tracer) = self.tracer.take() {
            let _ = tracer.join(); // it has detached from all threads by now, however it ended
        }
    }

    fn counts(&self) -> SampleCounts {
        let stats = lock(&self.shared.stats);
        SampleCounts {
            cpu_time: stats.cpu_time,
            delivered: stats.delivered,
            lost: stats.lost,
            skipped: 0,
            stopped: stats.stop_times(),
        }
    }

    fn timer_remark(&self) -> Option<String> {
        lock(&self.shared.stats).timer_remark()
    }
}

impl Drop for PtraceBackend {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_longest_stop() {
        let mut stats = TracerStats::default();
        assert_eq!(stats.stop_times(), None);
        for us in [30, 31, 32, 40, 5000] {
            stats.record_stop(us * 1000 + 999);
        }
        let stop_times = StopTimes {
            median: 32_000,
            longest: 5_000_999,
        };
        assert_eq!(stats.stop_times(), Some(stop_times));
    }
}
