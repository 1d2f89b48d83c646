//! Sampling threads of our own process, without any privileges.
//!
//! A running thread is interrupted by a signal (handler.rs): by a timer of its CPU time, or sent when a sample is due.
//! A sleeping thread is read in place (sleeping.rs). The signal is the highest unused real-time signal, normally
//! SIGRTMAX - 1; its handler stays installed until the process exits, because a signal may be late.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::common::jitter;
use super::common::mapping_tracker::MappingTracker;
use super::common::polled::polled;
use super::common::rng::Rng;
use super::{Backend, SampleCounts, WalkFn, push};
use crate::cpython_layout::TargetLayout;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Event, Pid, Sample, Tid};
use crate::process::maps;
use crate::sys;
use crate::sys::procfs;
use crate::sys::threads;

mod handler;
pub mod on_demand;
mod sampled_thread;
mod sleeping;
mod slot;
mod slot_pool;
mod tick_timer;

use sampled_thread::SampledThread;
use sleeping::{ThreadActivity, ThreadProcFiles};
use slot::CopyOptions;
use slot_pool::SlotPool;
pub use tick_timer::possible_rate;
use tick_timer::{EVENT_SIGNAL, TickEvent, TickTimer, events_work, needs_events};

/// Longest time between two polls of the samples: bounds how old a code object may be when its name is read.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The same for samples that threads take of themselves: these have copies of their code objects, and are fetched earlier where
/// there are many. Each poll costs 50 us.
const CALLS_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Longest time until a new thread is noticed.
const NEW_THREADS: Duration = Duration::from_millis(20);
/// The same for threads that take samples of themselves: the first sample of one is noticed, too.
const NEW_CALLING_THREADS: Duration = Duration::from_secs(1);
/// Time between two scans for mappings that are not libraries.
const MAPPINGS_INTERVAL: Duration = Duration::from_secs(1);
/// How long a thread may take to respond before it is signaled again.
const RETRY_AFTER: Duration = Duration::from_secs(2);
/// How often the threads that exist at the start are read before they are signaled, and the time in between.
const FIRST_READS: usize = 3;
const FIRST_READS_INTERVAL: Duration = Duration::from_millis(1);
/// How often a thread is read that sleeps and runs by turns.
const ATTEMPTS: usize = 3;

/// The clock that triggers samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplingClock {
    /// Each thread's CPU time. How often it can be sampled says [`possible_rate`].
    Cpu,
    /// Wall-clock time, also of sleeping threads.
    Wall,
    /// None: threads take samples of themselves, see [`sample_here`].
    Calls,
}

#[derive(Clone, Debug)]
pub struct SignalOptions {
    /// Samples per second of each thread.
    pub rate: u64,
    pub clock: SamplingClock,
    /// Thread pointers (`pthread_self`) of the only threads to sample; `None`: all.
    pub threads: Option<Vec<u64>>,
    /// Copy native stacks too.
    pub native: bool,
}

/// Samples this process, except the calling thread.
pub struct SignalBackend {
    options: SignalOptions,
    pool: &'static SlotPool,
    pid: Pid,
    current_tid: Tid,
    /// Number of the recording; 0 before the start and after the end.
    number: u64,
    began: u64,
    /// Perf events make the ticks of CPU time, for threads that can have one.
    with_events: bool,
    threads: FxHashMap<Tid, SampledThread>,
    mappings: MappingTracker,
    library_loads: u64,
    rescanned: Instant,
    scanned: Option<Instant>,
    /// When the next sample of all threads is due, and when its period ends.
    due: Instant,
    period_end: Instant,
    rng: Rng,
    /// Time of threads that have exited, ns, by the sampling clock.
    ended: u64,
    /// Samples on the CPU clock of threads that have exited which were due and have not arrived.
    ended_missing: u64,
    delivered: u64,
    lost: u64,
}

impl SignalBackend {
    /// Installs the handler; samples nothing yet.
    ///
    /// # Errors
    /// `Unsupported`: no signal is free, or memory cannot be read the way it must be.
    pub fn new(options: SignalOptions, walk: WalkFn) -> Result<SignalBackend> {
        let pool = pool(walk)?;
        let now = Instant::now();
        let is_fast = options.clock == SamplingClock::Cpu && needs_events(options.rate);
        Ok(SignalBackend {
            with_events: is_fast && events_work().is_ok(),
            options,
            pool,
            pid: std::process::id(),
            current_tid: 0,
            number: 0,
            began: 0,
            threads: FxHashMap::default(),
            mappings: MappingTracker::default(),
            library_loads: threads::library_load_count(),
            rescanned: now,
            scanned: None,
            due: now,
            period_end: now,
            rng: Rng::new(sys::clock::now()),
            ended: 0,
            ended_missing: 0,
            delivered: 0,
            lost: 0,
        })
    }

    fn period(&self) -> u64 {
        jitter::period(self.options.rate)
    }

    /// Adds new threads, and removes those that have exited: `out` and `exited` get the events.
    fn scan(&mut self, out: &mut Vec<Event>, exited: &mut Vec<Event>) {
        let first = self.scanned.is_none();
        self.scanned = Some(Instant::now());
        let found: Vec<(Tid, Option<u64>)> = match &self.options.threads {
            Some(thread_pointers) => thread_pointers
                .iter()
                .filter_map(|p| Some((threads::tid_of(*p)?, Some(*p))))
                .collect(),
            None => procfs::threads(self.pid).into_iter().map(|tid| (tid, None)).collect(),
        };
        let mut new = Vec::new();
        for (tid, thread_pointer) in found {
            if tid == self.current_tid {
                continue;
            }
            if let Some(t) = self.threads.get_mut(&tid) {
                t.used = threads::cpu_time(tid).unwrap_or(t.used);
                t.seen = true;
            } else if let Some(used) = threads::cpu_time(tid) {
                new.push((tid, thread_pointer, used, SampledThread::default()));
            }
        }
        // One that is about to wait for all signals does not look as if it blocked them.
        for round in 0..if first { FIRST_READS } else { 1 } {
            if round > 0 {
                std::thread::sleep(FIRST_READS_INTERVAL);
            }
            for (tid, _, _, t) in &mut new {
                t.readiness(*tid, self.tick_signal());
            }
        }
        let pid = self.pid;
        for (tid, thread_pointer, used, t) in new {
            out.push(Event::Thread { pid, tid });
            self.add((tid, t), thread_pointer, used, first);
        }
        let (mut ended, mut missing, period) = (0, 0, self.period());
        self.threads.retain(|tid, t| {
            let seen = std::mem::take(&mut t.seen);
            if !seen {
                exited.push(Event::Exit { pid, tid: *tid });
                ended += t.used.saturating_sub(t.began);
                missing += t.missing(period);
            }
            seen
        });
        self.ended += ended;
        if self.options.clock == SamplingClock::Cpu {
            self.ended_missing += missing;
            self.check_timers();
        }
    }

    fn add(&mut self, (tid, thread): (Tid, SampledThread), thread_pointer: Option<u64>, used: u64, first: bool) {
        let mut t = SampledThread {
            thread_pointer,
            // CPU time used before the thread was noticed belongs to the recording, unless that has just begun.
            began: if first { used } else { 0 },
            used,
            seen: true,
            ..thread
        };
        if self.options.clock == SamplingClock::Cpu {
            let period = self.period();
            // One sample falls due in each period, at random in the first one.
            let due = t.began + self.rng.below(period);
            let first = due.saturating_sub(used).max(1);
            self.lost += used.saturating_sub(due) / period;
            (t.first_tick, t.arrived_at) = (used + first, used);
            if t.unblocked_reads.is_none() {
                t.close_files();
                t.timer = self.timer(tid);
            }
            match &t.timer {
                Some(timer) => timer.set(first, period),
                None if threads::cpu_time(tid).is_none() => return, // it has exited
                // It blocks our signal, or too many are queued (RLIMIT_SIGPENDING): its samples are lost until that ends.
                None => {}
            }
        }
        self.threads.insert(tid, t);
    }

    /// The signal that most threads get at the ticks of their CPU time.
    fn tick_signal(&self) -> i32 {
        if self.with_events {
            EVENT_SIGNAL
        } else {
            self.pool.signal()
        }
    }

    /// A timer of a thread's CPU time. `None`: it has exited, or there are too many.
    fn timer(&self, tid: Tid) -> Option<TickTimer> {
        let event = if self.with_events {
            TickEvent::new(tid, self.period()).ok()
        } else {
            None
        };
        // Else it ticks more rarely, and the samples that it misses are counted.
        event
            .map(TickTimer::Event)
            .or_else(|| TickTimer::new(tid, self.pool.signal(), self.number).ok())
    }

    /// Samples all threads, on the wall clock.
    fn tick(&mut self, out: &mut Vec<Event>) {
        let stack = self.options.native;
        let copy = CopyOptions { stack, python: true };
        let (mut maps, period) = (None, self.period());
        for (tid, t) in &mut self.threads {
            self.ended += period;
            if t.pending.is_some_and(|pending| pending.elapsed() < RETRY_AFTER) {
                self.lost += 1;
                continue;
            }
            t.pending = None;
            if t.files.is_none() {
                t.files = ThreadProcFiles::new(*tid);
            }
            // A thread that has not run since has the same stack.
            let runs = t.files.as_ref().and_then(ThreadProcFiles::runs);
            if let Some((then, sample)) = &mut t.asleep
                && Some(*then) == runs
            {
                sample.time = sys::clock::now();
                out.push(Event::Sample(sample.clone()));
                self.delivered += 1;
                t.spare_descriptors();
                continue;
            }
            t.asleep = None;
            let mut sent = false;
            // It may begin to sleep after it was seen running: then it is read in place, too.
            for _ in 0..ATTEMPTS {
                let activity = t.files.as_ref().map_or(ThreadActivity::Runs, ThreadProcFiles::activity);
                if activity == ThreadActivity::Ended {
                    sent = true; // nothing is lost
                    break;
                }
                if let (ThreadActivity::Sleeps(call), Some(files)) = (activity, &t.files) {
                    let runs = files.runs();
                    let regs = call.regs();
                    let sp = regs.sp();
                    let thread_pointer = t
                        .thread_pointer
                        .or_else(|| find_thread_pointer(self.pool, *tid, sp, &mut maps));
                    t.thread_pointer = thread_pointer;
                    let unchanged = || runs.is_some() && files.runs() == runs;
                    if let Some(thread_pointer) = thread_pointer {
                        let memory = |at, out: &mut [u8]| sys::memory::read_memory(self.pid, at, out);
                        let polled = polled(call.number.into(), &call.arguments, memory);
                        let read = self.pool.read(regs, *tid, thread_pointer, copy, &unchanged);
                        let Some((mut sample, codes)) = read else { continue };
                        sample.system_call = Some(call.number);
                        sample.polled = polled;
                        sample.time_spent.blocked = period;
                        t.asleep = runs.map(|runs| (runs, Box::new(sample.clone())));
                        push(sample, codes, out);
                        self.delivered += 1;
                        sent = true;
                        break;
                    }
                    // Where its descriptor is, is not known before its first sample.
                }
                let readiness = t.readiness(*tid, self.pool.signal());
                if readiness.blocks {
                    break;
                }
                if activity == ThreadActivity::Runs && !readiness.runs {
                    continue;
                }
                sent = threads::send(self.pid, *tid, self.pool.signal(), self.number).is_ok();
                t.pending = sent.then(Instant::now);
                break;
            }
            self.lost += u64::from(!sent);
            t.spare_descriptors();
        }
    }

    /// Sets when the next sample of all threads is due: once in each period, at random.
    fn next_due(&mut self, now: Instant) {
        let period = Duration::from_nanos(self.period());
        if self.period_end + period < now {
            // We did not get a CPU in time: samples that fell due since are lost.
            let late = (now - self.period_end).as_nanos() as u64 / self.period();
            self.lost += late * self.threads.len() as u64;
            self.period_end += Duration::from_nanos(late * self.period());
        }
        self.due = self.period_end + Duration::from_nanos(self.rng.below(period.as_nanos() as u64));
        self.period_end += period;
    }

    /// Emits the code that was mapped since the last call.
    fn rescan_mappings(&mut self, out: &mut Vec<Event>) {
        let loads = threads::library_load_count();
        if loads != self.library_loads || self.rescanned.elapsed() > MAPPINGS_INTERVAL {
            (self.library_loads, self.rescanned) = (loads, Instant::now());
            self.mappings.rescan(self.pid, out);
        }
    }

    fn drain(&mut self, out: &mut Vec<Event>, exited: &mut Vec<Event>) {
        let mut samples = Vec::new();
        self.pool.drain(&mut samples);
        if !samples.is_empty() {
            self.rescan_mappings(out);
        }
        let is_new = |sample: &Sample| !self.threads.contains_key(&sample.tid);
        if self.options.clock == SamplingClock::Calls && samples.iter().any(|(sample, _)| is_new(sample)) {
            self.scan(out, exited);
        }
        let running = match self.options.clock {
            SamplingClock::Cpu | SamplingClock::Calls => 0, // all samples represent the same
            SamplingClock::Wall => self.period(),
        };
        for (mut sample, codes) in samples {
            sample.time_spent.cpu = running;
            // A sample of an earlier recording may arrive late.
            if sample.time < self.began {
                continue;
            }
            if let Some(t) = self.threads.get_mut(&sample.tid) {
                t.pending = None;
                (t.arrived, t.arrived_at) = (t.arrived + 1, t.used);
            }
            self.delivered += 1;
            push(sample, codes, out);
        }
    }
}

/// # Errors
/// `Unsupported`: no signal is free, or memory cannot be read the way it must be.
fn pool(walk: WalkFn) -> Result<&'static SlotPool> {
    let unsupported = || Error::new(ErrorKind::Unsupported, "this process cannot profile itself");
    let (probe, mut copy) = ([7u8; 8], [0; 8]);
    if sys::memory::read_memory(std::process::id(), probe.as_ptr() as u64, &mut copy) != copy.len() {
        return Err(unsupported()
            .why("the system call process_vm_readv (used to read memory safely) is not permitted")
            .hint("allow it in the container's seccomp profile (Docker's default profile does since Linux 4.8)"));
    }
    SlotPool::get(walk).map_err(|_| {
        unsupported()
            .why("every real-time signal already has a handler")
            .hint("leave one real-time signal free, such as SIGRTMAX - 1")
    })
}

/// Takes a sample of the calling thread for the recording of this process, whose clock is [`SamplingClock::Calls`]. Returns its
/// time, which no other sample of the thread has. `None`: there is no recording, or no room.
pub fn sample_here() -> Option<u64> {
    SlotPool::current()
        .filter(|pool| pool.is_current_process())?
        .sample_here()
}

/// Ends a wait for samples of this process.
pub fn wake() {
    if let Some(pool) = SlotPool::current() {
        pool.publish();
    }
}

/// Number of the signal that interrupts threads; `None` if another handler has replaced ours.
pub fn number(walk: WalkFn) -> Option<i32> {
    let signal = SlotPool::get(walk).ok()?.signal();
    handler::is_installed(signal).then_some(signal)
}

/// Thread pointer of the thread that uses the stack at `sp`; `maps` caches the memory map between calls.
fn find_thread_pointer(pool: &SlotPool, tid: Tid, sp: u64, maps: &mut Option<Vec<maps::Mapping>>) -> Option<u64> {
    if tid == pool.pid() {
        // The main thread's descriptor is not on its stack. Until it is known, the thread is signaled.
        return pool.main_thread_pointer();
    }
    let maps = maps.get_or_insert_with(|| maps::parse(&std::fs::read("/proc/self/maps").unwrap_or_default()));
    let stack = maps
        .get(maps.partition_point(|m| m.end <= sp))
        .filter(|m| m.start <= sp)?;
    threads::thread_pointer_on_stack(tid, stack.end)
}

impl Backend for SignalBackend {
    fn backend(&self) -> &'static str {
        "signal"
    }

    fn event(&self) -> &str {
        match self.options.clock {
            SamplingClock::Cpu if self.with_events => "task-clock",
            SamplingClock::Cpu => "cpu-time",
            SamplingClock::Wall => "wall-clock",
            SamplingClock::Calls => "allocations",
        }
    }

    fn attach(&mut self, pid: Pid) -> Result<()> {
        if pid == self.pid {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Usage,
            format!("process {pid} cannot be sampled from within this process"),
        )
        .why("signals can only sample threads of the same process")
        .hint(format!("nativeprof attach {pid}")))
    }

    fn attach_at_exec(&mut self, pid: Pid) -> Result<()> {
        self.attach(pid)
    }

    fn update_process(&mut self, pid: Pid, layout: &TargetLayout) -> Result<()> {
        if pid == self.pid {
            self.pool.update_process(Some(layout.clone()));
        }
        Ok(())
    }

    fn remove_process(&mut self, _: Pid) {}

    fn start(&mut self) -> Result<()> {
        self.current_tid = sys::process::current_tid() as Tid;
        self.number = self.pool.begin(self.options.native, self.period()).ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "this process is already being sampled")
                .why("only one recording at a time is possible in a process")
                .hint("stop the other recording first")
        })?;
        self.began = sys::clock::now();
        self.period_end = Instant::now();
        // The session has listed the threads itself.
        self.scan(&mut Vec::new(), &mut Vec::new());
        self.next_due(Instant::now());
        Ok(())
    }

    fn poll(&mut self, wait: Duration, out: &mut Vec<Event>) -> Result<bool> {
        let mut exited = Vec::new();
        let (longest, new_threads) = match self.options.clock {
            SamplingClock::Calls => (CALLS_POLL_INTERVAL, NEW_CALLING_THREADS),
            SamplingClock::Cpu | SamplingClock::Wall => (POLL_INTERVAL, NEW_THREADS),
        };
        if self.number != 0 && self.scanned.is_none_or(|at| at.elapsed() > new_threads) {
            self.scan(out, &mut exited);
        }
        let ready = self.pool.ready.load(std::sync::atomic::Ordering::Acquire);
        self.drain(out, &mut exited);
        // After their last samples.
        out.append(&mut exited);
        if !out.is_empty() {
            return Ok(false);
        }
        let mut wait = wait.min(longest);
        if self.number != 0 && self.options.clock == SamplingClock::Wall {
            wait = wait.min(self.due.saturating_duration_since(Instant::now()));
        }
        if !wait.is_zero() {
            threads::wait_while(&self.pool.ready, ready, wait);
            self.drain(out, &mut exited);
            out.append(&mut exited);
        }
        let now = Instant::now();
        if self.number != 0 && self.options.clock == SamplingClock::Wall && now >= self.due {
            self.rescan_mappings(out);
            self.tick(out);
            self.next_due(now);
        }
        Ok(false)
    }

    fn stop(&mut self) {
        if self.number == 0 {
            return;
        }
        for t in self.threads.values_mut() {
            t.timer = None;
        }
        // The last readings: CPU time of the threads.
        self.scanned = Some(Instant::now());
        for (tid, t) in &mut self.threads {
            t.used = threads::cpu_time(*tid).unwrap_or(t.used);
        }
        self.pool.end();
        self.number = 0;
    }

    fn counts(&self) -> SampleCounts {
        let used = |t: &SampledThread| t.used.saturating_sub(t.began);
        let (period, threads) = (self.period(), || self.threads.values());
        let (running, missing): (u64, u64) = match self.options.clock {
            SamplingClock::Cpu => (threads().map(used).sum(), threads().map(|t| t.missing(period)).sum()),
            SamplingClock::Calls => (threads().map(used).sum(), 0),
            SamplingClock::Wall => (0, 0),
        };
        SampleCounts {
            cpu_time: self.ended + running,
            delivered: self.delivered,
            // Those that the handler has counted are missing, too.
            lost: self.lost + self.pool.lost().max(self.ended_missing + missing),
            skipped: 0,
            stopped: None,
        }
    }
}

impl Drop for SignalBackend {
    fn drop(&mut self) {
        if self.pool.is_current_process() {
            self.stop();
            self.pool.update_process(None);
        }
    }
}
