//! Backends: each turns live threads into one closed stream of [`Event`]s.
//!
//! Knows nothing of unwinding, names or trees. What a backend must be told to walk Python frames comes in as plain
//! numbers ([`Space`]).

use std::time::Duration;

use crate::error::Result;
use crate::layout::Space;
use crate::process::memory::Memory;
use crate::sample::{CodeCopy, Event, Pid, Sample, Standing, Tid, TimeSpent, Walked};

mod blocks;
pub mod ebpf;
mod mappings;
pub mod met;
pub mod ptrace;
mod random;
mod ring;
pub mod signal;
mod stack;
pub mod tape;
mod ticks;
mod tidings;

/// What to sample and how often.
#[derive(Clone, Debug)]
pub struct Options {
    /// Samples per second of each thread's CPU time (or events, for other events than the clock).
    pub rate: u64,
    pub event: Clock,
    /// Take kernel return addresses too.
    pub kernel: bool,
    /// Follow forked and exec'd children.
    pub children: bool,
    pub mode: Mode,
}

/// Which part of a thread's time is sampled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// While it runs.
    #[default]
    Cpu,
    /// While it waits: blocked, or runnable and without a CPU.
    OffCpu,
    /// All of it.
    Wall,
}

/// What makes a sample due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Hardware cycles where there is a PMU, else the CPU clock.
    Auto,
    CpuClock,
    Cycles,
    PageFaults,
    ContextSwitches,
}

/// Names of the events as typed on the command line.
pub const CLOCKS: &[(&str, Clock)] = &[
    ("auto", Clock::Auto),
    ("cpu-clock", Clock::CpuClock),
    ("cycles", Clock::Cycles),
    ("page-faults", Clock::PageFaults),
    ("context-switches", Clock::ContextSwitches),
];

/// Names of the modes as typed on the command line.
pub const MODES: &[(&str, Mode)] = &[("cpu", Mode::Cpu), ("off-cpu", Mode::OffCpu), ("wall", Mode::Wall)];

/// Counts kept by the kernel and the backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// ns of CPU time during which sampling was on, over all sampled threads; 0 for other events than clocks.
    pub cpu_time: u64,
    /// Samples delivered to us.
    pub delivered: u64,
    /// Samples that fell due and never reached us.
    pub lost: u64,
    /// How long threads were held; `None` where the backend holds none.
    pub held: Option<Held>,
}

/// How long threads of the target were held for one sample each, ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub median: u64,
    pub longest: u64,
}

/// Walks the interpreter frames of a thread that stands still, into the last argument, and copies the code objects of
/// which the function says that they are new: `interp::walk::walk`, handed in because backends know no interpreter.
pub type Walk = fn(&dyn Memory, &Space, &Standing, &dyn Fn(u64, u32) -> bool, &mut Walked);

/// Hands on a sample, after the code objects that were copied with it.
fn push(sample: Sample, codes: Vec<CodeCopy>, out: &mut Vec<Event>) {
    let pid = sample.pid;
    out.extend(codes.into_iter().map(|copy| Event::Code {
        pid,
        copy: Box::new(copy),
    }));
    out.push(Event::Sample(Box::new(sample)));
}

/// A backend. `learn` may come before and after `attach`.
pub trait Source {
    /// Short name of the backend, as on the command line: `ebpf`.
    fn backend(&self) -> &'static str;

    /// Name of the event that makes samples due, e.g. `cpu-clock`.
    fn event(&self) -> &str;

    /// Name for messages, e.g. `ebpf, cpu-clock`.
    fn name(&self) -> String {
        format!("{}, {}", self.backend(), self.event())
    }

    /// Samples a process once started: all its threads, and those they will make.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    fn attach(&mut self, pid: Pid) -> Result<()>;

    /// Samples a process that is about to `exec`, from that moment on.
    ///
    /// # Errors
    /// As [`Source::attach`].
    fn attach_at_exec(&mut self, pid: Pid) -> Result<()>;

    /// Tells where a process keeps its stack end and its interpreter; again when it changes.
    fn learn(&mut self, pid: Pid, space: &Space) -> Result<()>;

    /// Forgets a process that has ended.
    fn forget(&mut self, pid: Pid);

    /// Starts sampling.
    fn start(&mut self) -> Result<()>;

    /// Waits up to `wait` for events and appends them in order of time; not all that there are, but some if there are
    /// any. True if more are waiting already.
    fn poll(&mut self, wait: Duration, out: &mut Vec<Event>) -> Result<bool>;

    /// Stops sampling; what is already taken still comes out of `poll`.
    fn stop(&mut self);

    fn counts(&self) -> Counts;

    /// After [`Source::stop`]: threads that were off the CPU then, and for how long, where such time is sampled.
    fn open_intervals(&mut self) -> Vec<OpenInterval> {
        Vec::new()
    }
}

/// An interval off the CPU that had not ended when sampling did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenInterval {
    pub pid: Pid,
    pub tid: Tid,
    /// When sampling ended, CLOCK_MONOTONIC, ns.
    pub end: u64,
    pub time: TimeSpent,
}
