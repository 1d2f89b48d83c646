//! Sampling threads of our own process, without any rights.
//!
//! A thread that runs is interrupted by a signal (handler.rs): of a timer of its CPU time, or sent when the time has come. One
//! that sleeps is read as it lies (asleep.rs). The signal is the highest real-time signal without another use, normally
//! SIGRTMAX - 1; its handler stays installed until the process ends, because a signal may be late.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::mappings::Mappings;
use super::random::Random;
use super::ticks;
use super::{Counts, Source, Walk, push};
use crate::error::{Error, Kind, Result};
use crate::layout::Space;
use crate::process::{self, maps, own, sys};
use crate::sample::{Event, Pid, Sample, Tid};

pub mod ask;
mod asleep;
mod handler;
mod pool;
mod slot;

use asleep::{Doing, Files};
use pool::Pool;
use slot::Wants;

/// Longest time between two looks at the samples: bounds how old a code object may be when its name is read.
const LOOK: Duration = Duration::from_millis(10);
/// Longest time until a new thread is noticed.
const NEW_THREADS: Duration = Duration::from_millis(20);
/// Time between two looks at mappings that no library is behind.
const MAPPINGS: Duration = Duration::from_secs(1);
/// How long a thread may take to answer before it is asked again.
const PATIENCE: Duration = Duration::from_secs(2);

/// What makes a sample due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Each thread's CPU time. The kernel looks at it when its own clock ticks: some 250 times a second.
    Cpu,
    /// Time that goes by, also for threads that sleep.
    Wall,
}

#[derive(Clone, Debug)]
pub struct Options {
    /// Samples per second of each thread.
    pub rate: u64,
    pub clock: Clock,
    /// Pointers (`pthread_self`) of the only threads to sample; `None`: all.
    pub threads: Option<Vec<u64>>,
    /// Copy native stacks too.
    pub native: bool,
}

/// A thread that is sampled.
#[derive(Default)]
struct Sampled {
    pointer: Option<u64>,
    timer: Option<own::CpuTimer>,
    /// CPU time when sampling began, and as last seen.
    began: u64,
    used: u64,
    files: Option<Files>,
    /// How often it had run when it was last read asleep, and what was read.
    asleep: Option<(u64, Box<Sample>)>,
    /// When it was asked for a sample that has not come yet.
    asked: Option<Instant>,
    seen: bool,
}

/// Samples this process. The thread that calls it is left out.
pub struct SignalSource {
    options: Options,
    pool: &'static Pool,
    pid: Pid,
    own: Tid,
    /// Number of the recording; 0 before the start and after the end.
    number: u64,
    began: u64,
    threads: FxHashMap<Tid, Sampled>,
    mappings: Mappings,
    loads: u64,
    looked: Instant,
    scanned: Option<Instant>,
    /// When the next sample of all threads is due, and the end of its period.
    due: Instant,
    period_end: Instant,
    random: Random,
    /// Thread time of threads that have ended, ns.
    ended: u64,
    delivered: u64,
    lost: u64,
}

impl SignalSource {
    /// Installs the handler; samples nothing yet.
    ///
    /// # Errors
    /// `Unsupported`: no signal is free, or memory cannot be read the way it must be.
    pub fn new(options: Options, walk: Walk) -> Result<SignalSource> {
        let pool = pool(walk)?;
        let now = Instant::now();
        Ok(SignalSource {
            options,
            pool,
            pid: std::process::id(),
            own: 0,
            number: 0,
            began: 0,
            threads: FxHashMap::default(),
            mappings: Mappings::default(),
            loads: own::loads(),
            looked: now,
            scanned: None,
            due: now,
            period_end: now,
            random: Random::new(sys::now()),
            ended: 0,
            delivered: 0,
            lost: 0,
        })
    }

    fn period(&self) -> u64 {
        ticks::period(self.options.rate)
    }

    /// Takes threads in that are new, and lets go of those that have ended.
    fn scan(&mut self) {
        let first = self.scanned.is_none();
        self.scanned = Some(Instant::now());
        let found: Vec<(Tid, Option<u64>)> = match &self.options.threads {
            Some(pointers) => pointers
                .iter()
                .filter_map(|p| Some((own::tid_of(*p)?, Some(*p))))
                .collect(),
            None => process::threads(self.pid).into_iter().map(|tid| (tid, None)).collect(),
        };
        for (tid, pointer) in found {
            if tid == self.own {
                continue;
            }
            if let Some(t) = self.threads.get_mut(&tid) {
                t.used = own::cpu_time(tid).unwrap_or(t.used);
                t.seen = true;
            } else if let Some(used) = own::cpu_time(tid) {
                self.add(tid, pointer, used, first);
            }
        }
        let mut ended = 0;
        self.threads.retain(|_, t| {
            let seen = std::mem::take(&mut t.seen);
            ended += if seen { 0 } else { t.used.saturating_sub(t.began) };
            seen
        });
        self.ended += ended;
    }

    fn add(&mut self, tid: Tid, pointer: Option<u64>, used: u64, first: bool) {
        let mut t = Sampled {
            pointer,
            // What it used before it was noticed belongs to the recording, unless that has just begun.
            began: if first { used } else { 0 },
            used,
            seen: true,
            ..Sampled::default()
        };
        if self.options.clock == Clock::Cpu {
            let period = self.period();
            // A sample falls due once in each period, in the first one at random.
            let due = t.began + self.random.below(period);
            let first = due.saturating_sub(used).max(1);
            self.lost += used.saturating_sub(due) / period;
            t.timer = own::CpuTimer::new(tid, self.pool.signal(), self.number).ok();
            match &t.timer {
                Some(timer) => timer.set(first, period),
                None => return, // it has ended
            }
        }
        self.threads.insert(tid, t);
    }

    /// Samples all threads, as the wall clock says.
    fn tick(&mut self, out: &mut Vec<Event>) {
        let stack = self.options.native;
        let wants = Wants { stack, python: true };
        let (mut maps, period) = (None, self.period());
        for (tid, t) in &mut self.threads {
            self.ended += period;
            if t.asked.is_some_and(|asked| asked.elapsed() < PATIENCE) {
                self.lost += 1;
                continue;
            }
            t.asked = None;
            if t.files.is_none() {
                t.files = Files::new(*tid);
            }
            // A thread that has not run since is where it was.
            let runs = t.files.as_ref().and_then(Files::runs);
            if let Some((then, sample)) = &mut t.asleep
                && Some(*then) == runs
            {
                sample.time = sys::now();
                out.push(Event::Sample(sample.clone()));
                self.delivered += 1;
                continue;
            }
            t.asleep = None;
            let doing = t.files.as_ref().map_or(Doing::Runs, Files::doing);
            if let (Some(regs), Some(files)) = (doing.regs(), &t.files) {
                let sp = regs.sp();
                let pointer = t.pointer.or_else(|| find_pointer(self.pool, *tid, sp, &mut maps));
                t.pointer = pointer;
                let unchanged = || runs.is_some() && files.runs() == runs;
                if let Some(pointer) = pointer
                    && let Some((sample, codes)) = self.pool.read(regs, *tid, pointer, wants, &unchanged)
                {
                    t.asleep = runs.map(|runs| (runs, Box::new(sample.clone())));
                    push(sample, codes, out);
                    self.delivered += 1;
                    continue;
                }
            }
            match own::send(self.pid, *tid, self.pool.signal(), self.number) {
                Ok(()) => t.asked = Some(Instant::now()),
                Err(_) => self.lost += u64::from(doing != Doing::Ended),
            }
        }
    }

    /// Sets when the next sample of all threads is due: once in each period, at random.
    fn next_due(&mut self, now: Instant) {
        let period = Duration::from_nanos(self.period());
        if self.period_end + period < now {
            // We were not let run: what fell due since is lost.
            let late = (now - self.period_end).as_nanos() as u64 / self.period();
            self.lost += late * self.threads.len() as u64;
            self.period_end += Duration::from_nanos(late * self.period());
        }
        self.due = self.period_end + Duration::from_nanos(self.random.below(period.as_nanos() as u64));
        self.period_end += period;
    }

    /// Tells of code that was mapped since the last call.
    fn look_at_mappings(&mut self, out: &mut Vec<Event>) {
        let loads = own::loads();
        if loads != self.loads || self.looked.elapsed() > MAPPINGS {
            (self.loads, self.looked) = (loads, Instant::now());
            self.mappings.look(self.pid, out);
        }
    }

    fn drain(&mut self, out: &mut Vec<Event>) {
        let mut samples = Vec::new();
        self.pool.drain(&mut samples);
        if !samples.is_empty() {
            self.look_at_mappings(out);
        }
        for (sample, codes) in samples {
            // One of an earlier recording may have been late.
            if sample.time < self.began {
                continue;
            }
            if let Some(t) = self.threads.get_mut(&sample.tid) {
                t.asked = None;
            }
            self.delivered += 1;
            push(sample, codes, out);
        }
    }
}

/// # Errors
/// `Unsupported`: no signal is free, or memory cannot be read the way it must be.
fn pool(walk: Walk) -> Result<&'static Pool> {
    let unsupported = || Error::new(Kind::Unsupported, "this process cannot sample itself");
    let (probe, mut copy) = ([7u8; 8], [0; 8]);
    if sys::read_memory(std::process::id(), probe.as_ptr() as u64, &mut copy) != copy.len() {
        return Err(unsupported()
            .why("process_vm_readv, with which memory is read without risk, is not permitted here")
            .hint("allow it in the container's seccomp profile (Docker's own does since Linux 4.8)"));
    }
    Pool::get(walk).map_err(|_| {
        unsupported()
            .why("all real-time signals have handlers already")
            .hint("leave one of them to nativeprof, such as SIGRTMAX - 1")
    })
}

/// Number of the signal that interrupts threads; `None` if another handler has taken its place.
pub fn number(walk: Walk) -> Option<i32> {
    let signal = Pool::get(walk).ok()?.signal();
    handler::is_installed(signal).then_some(signal)
}

/// Pointer of the thread that uses the stack at `sp`; `maps` keeps the memory map between calls.
fn find_pointer(pool: &Pool, tid: Tid, sp: u64, maps: &mut Option<Vec<maps::Mapping>>) -> Option<u64> {
    if tid == pool.pid() {
        // Its descriptor does not lie on its stack. Until it is known, it is asked.
        return pool.main_pointer();
    }
    let maps = maps.get_or_insert_with(|| maps::parse(&std::fs::read("/proc/self/maps").unwrap_or_default()));
    let stack = maps
        .get(maps.partition_point(|m| m.end <= sp))
        .filter(|m| m.start <= sp)?;
    own::pointer_on_stack(tid, stack.end)
}

impl Source for SignalSource {
    fn backend(&self) -> &'static str {
        "signal"
    }

    fn event(&self) -> &str {
        match self.options.clock {
            Clock::Cpu => "cpu-time",
            Clock::Wall => "wall-clock",
        }
    }

    fn attach(&mut self, pid: Pid) -> Result<()> {
        if pid == self.pid {
            return Ok(());
        }
        Err(Error::new(
            Kind::Usage,
            format!("process {pid} cannot be sampled from inside this one"),
        )
        .why("signals of this kind reach threads of their own process only")
        .hint(format!("nativeprof attach {pid}")))
    }

    fn attach_at_exec(&mut self, pid: Pid) -> Result<()> {
        self.attach(pid)
    }

    fn learn(&mut self, pid: Pid, space: &Space) -> Result<()> {
        if pid == self.pid {
            self.pool.learn(Some(space.clone()));
        }
        Ok(())
    }

    fn forget(&mut self, _: Pid) {}

    fn start(&mut self) -> Result<()> {
        self.own = sys::own_tid() as Tid;
        self.number = self.pool.begin(self.options.native).ok_or_else(|| {
            Error::new(Kind::Unsupported, "this process is being sampled already")
                .why("one recording at a time: its signals would interrupt the other's")
                .hint("stop the other one first")
        })?;
        self.began = sys::now();
        self.period_end = Instant::now();
        self.scan();
        self.next_due(Instant::now());
        Ok(())
    }

    fn poll(&mut self, wait: Duration, out: &mut Vec<Event>) -> Result<bool> {
        if self.number != 0 && self.scanned.is_none_or(|at| at.elapsed() > NEW_THREADS) {
            self.scan();
        }
        let ready = self.pool.ready.load(std::sync::atomic::Ordering::Acquire);
        self.drain(out);
        if !out.is_empty() {
            return Ok(false);
        }
        let mut wait = wait.min(LOOK);
        if self.number != 0 && self.options.clock == Clock::Wall {
            wait = wait.min(self.due.saturating_duration_since(Instant::now()));
        }
        if !wait.is_zero() {
            own::wait_while(&self.pool.ready, ready, wait);
            self.drain(out);
        }
        let now = Instant::now();
        if self.number != 0 && self.options.clock == Clock::Wall && now >= self.due {
            self.look_at_mappings(out);
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
        // The last looks: what threads have used, and who has ended.
        self.scanned = Some(Instant::now());
        for (tid, t) in &mut self.threads {
            t.used = own::cpu_time(*tid).unwrap_or(t.used);
        }
        self.pool.end();
        self.number = 0;
    }

    fn counts(&self) -> Counts {
        let used = |t: &Sampled| t.used.saturating_sub(t.began);
        let running: u64 = match self.options.clock {
            Clock::Cpu => self.threads.values().map(used).sum(),
            Clock::Wall => 0,
        };
        Counts {
            cpu_time: self.ended + running,
            delivered: self.delivered,
            lost: self.lost + self.pool.lost(),
            held: None,
        }
    }
}

impl Drop for SignalSource {
    fn drop(&mut self) {
        if self.pool.is_own() {
            self.stop();
            self.pool.learn(None);
        }
    }
}
