//! Threads that do not run, for sampling by wall time: once in each period, at a random time, all threads are listed, and those
//! that sleep when they are read at once after that have a sample. Nothing is stopped, and threads that run are sampled by their
//! timers.

use std::collections::BTreeSet;
use std::fs::File;
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::capture::OpenInterval;
use crate::capture::common::jitter;
use crate::capture::common::rng::Rng;
use crate::capture::common::throttling::Throttling;
use crate::event::{Event, Pid, Suspension, Tid, TimeSpent};
use crate::sys;
use crate::sys::procfs;
use crate::sys::procfs::SchedStat;

/// Periods that one listing can represent if we did not get a CPU in time; more are lost.
const MAX_LATE: u64 = 100;

/// Time for which it stays known whether a process is stopped or frozen, ns.
const SUSPENDED_AGE: u64 = 20_000_000;

/// The threads of the sampled processes.
pub struct SleepingThreads {
    period: u64,
    processes: BTreeSet<Pid>,
    threads: FxHashMap<Tid, WatchedThread>,
    /// Whether each process is stopped or frozen, and when that was read.
    suspended: FxHashMap<Pid, (u64, Option<Suspension>)>,
    /// When all threads are examined next, and when that period ends; ns. 0: not started, or stopped.
    due: u64,
    period_end: u64,
    throttling: Throttling,
    rng: Rng,
    found: Vec<OpenInterval>,
}

/// A thread, with its files in /proc.
struct WatchedThread {
    system_call: File,
    schedstat: File,
    /// Time that it has waited for a CPU, ns.
    delayed: u64,
    /// The part of it that no sample has yet, and the part of this that was throttled.
    runnable: u64,
    throttled: u64,
    seen: bool,
}

impl WatchedThread {
    /// `None`: it has exited, or may not be read.
    fn open(pid: Pid, tid: Tid) -> Option<WatchedThread> {
        let open = |name: &str| File::open(format!("/proc/{pid}/task/{tid}/{name}")).ok();
        let mut thread = WatchedThread {
            system_call: open("syscall")?,
            schedstat: open("schedstat")?,
            delayed: 0,
            runnable: 0,
            throttled: 0,
            seen: true,
        };
        thread.delayed = SchedStat::read(&thread.schedstat)?.delayed;
        Some(thread)
    }
}

impl SleepingThreads {
    /// `rate`: samples per second of each thread.
    pub fn new(rate: u64) -> SleepingThreads {
        SleepingThreads {
            period: jitter::period(rate),
            processes: BTreeSet::new(),
            threads: FxHashMap::default(),
            suspended: FxHashMap::default(),
            due: 0,
            period_end: 0,
            throttling: Throttling::default(),
            rng: Rng::new(sys::clock::now()),
            found: Vec::new(),
        }
    }

    pub fn add_process(&mut self, pid: Pid) {
        self.processes.insert(pid);
    }

    pub fn remove_process(&mut self, pid: Pid) {
        self.processes.remove(&pid);
        self.throttling.remove_process(pid);
    }

    pub fn start(&mut self) {
        self.period_end = sys::clock::now();
        self.set_due();
    }

    pub fn stop(&mut self) {
        self.due = 0;
    }

    fn set_due(&mut self) {
        self.due = self.period_end + self.rng.below(self.period);
        self.period_end += self.period;
    }

    /// How long until threads are due to be read.
    pub fn wait(&self) -> Duration {
        match self.due {
            0 => Duration::MAX,
            due => Duration::from_nanos(due.saturating_sub(sys::clock::now())),
        }
    }

    /// Completes a sample of a running thread: the time that it represents. `runs`: whether its CPU time is wanted. False if
    /// no time is left.
    pub fn complete(&mut self, tid: Tid, time: &mut TimeSpent, runs: bool) -> bool {
        let thread = self.threads.get_mut(&tid);
        let (runnable, throttled) = thread.map_or((0, 0), |t| {
            let throttled = std::mem::take(&mut t.throttled);
            (std::mem::take(&mut t.runnable) - throttled, throttled)
        });
        *time = TimeSpent {
            cpu: if runs { self.period } else { 0 },
            runnable,
            throttled,
            ..TimeSpent::default()
        };
        time.cpu + time.runnable + time.throttled > 0
    }

    /// Follows the processes that begin to be sampled. `children`: forked ones too.
    pub fn observe(&mut self, event: &Event, children: bool) {
        match event {
            Event::Fork { pid, .. } if children => self.add_process(*pid),
            Event::Exec { pid, .. } => self.add_process(*pid),
            _ => {}
        }
    }

    /// Lists the threads, if that is due.
    pub fn rescan(&mut self) {
        let now = sys::clock::now();
        if self.due == 0 || now < self.due {
            return;
        }
        // Threads that sleep now mostly slept in the periods that we missed, too.
        let missed = now.saturating_sub(self.period_end) / self.period;
        self.period_end += missed * self.period;
        let periods = 1 + missed.min(MAX_LATE);
        for pid in &self.processes {
            let (read, suspended) = self.suspended.entry(*pid).or_default();
            if now.saturating_sub(*read) >= SUSPENDED_AGE {
                (*read, *suspended) = (now, sys::cgroup::suspension(*pid));
            }
            let mut delays = Vec::new();
            for tid in procfs::threads(*pid) {
                let thread = match self.threads.get_mut(&tid) {
                    Some(thread) => thread,
                    None => match WatchedThread::open(*pid, tid) {
                        Some(thread) => self.threads.entry(tid).or_insert(thread),
                        None => continue,
                    },
                };
                let Some(SchedStat { delayed, runs, .. }) = SchedStat::read(&thread.schedstat) else {
                    continue;
                };
                thread.seen = true;
                let waited = delayed.saturating_sub(std::mem::replace(&mut thread.delayed, delayed));
                if waited > 0 {
                    thread.runnable += waited;
                    delays.push((tid, waited));
                }
                let Ok(blocked) = procfs::read_blocked(&thread.system_call) else {
                    continue;
                };
                let call = blocked.as_ref().and_then(|b| b.call);
                self.found.push(OpenInterval {
                    pid: *pid,
                    tid,
                    end: now,
                    time: TimeSpent {
                        blocked: self.period * periods,
                        ..TimeSpent::default()
                    },
                    runs,
                    asleep: blocked.is_some(),
                    call: call.and_then(|(number, _)| u16::try_from(number).ok()),
                    suspended: *suspended,
                });
            }
            // A group's sums are read after the threads: what is over for these is over for the group.
            let read = sys::clock::now();
            self.throttling.read(*pid, read, read);
            for (tid, waited) in delays {
                if let Some(thread) = self.threads.get_mut(&tid) {
                    thread.throttled += self.throttling.part(*pid, waited, read);
                }
            }
        }
        self.threads.retain(|_, thread| std::mem::take(&mut thread.seen));
        self.set_due();
    }

    /// The threads listed since the last call.
    pub fn drain_intervals(&mut self) -> Vec<OpenInterval> {
        std::mem::take(&mut self.found)
    }
}
