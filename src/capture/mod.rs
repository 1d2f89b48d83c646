//! Backends: each turns live threads into one closed stream of [`Event`]s.
//!
//! Independent of unwinding, names and trees. What a backend needs to walk Python frames is passed in as plain numbers
//! ([`TargetLayout`]).

use std::time::Duration;

use crate::cpython_layout::TargetLayout;
use crate::error::{Error, Result};
use crate::event::{
    CodeCopy, Event, Part, Pid, PythonWalk, RUNNING_TASK, RunningTask, Sample, StoppedThread, Suspension, Tid,
    TimeSpent,
};
use crate::process::memory::Memory;
use crate::profile::memory_over_time::MemoryOverTime;
use crate::profile::resident::ResidentMemory;

pub mod common;
pub mod ebpf;
pub mod ptrace;
pub mod signal;

/// What to sample and how often.
#[derive(Clone, Debug)]
pub struct SamplingOptions {
    /// Samples per second of each thread's CPU time (or events, for other events than the clock).
    pub rate: u64,
    pub event: EventKind,
    /// Record kernel return addresses too.
    pub kernel: bool,
    /// Also sample forked and exec'd children.
    pub children: bool,
    pub mode: Mode,
    pub off_cpu: OffCpuOptions,
    /// With [`Mode::Rss`]: bytes between two samples, on average.
    pub interval: u64,
    /// With [`Mode::Rss`]: the part of the target's CPU time that taking stacks may use.
    pub max_overhead: f64,
    /// Take the Python frames of the threads that native workers work for.
    pub workers: bool,
    /// Take which spans are active.
    pub spans: bool,
    /// Sample the processes that this admits, without [`Backend::attach`]; `children` has no effect then. Only by eBPF.
    pub host: Option<HostFilter>,
}

/// Which processes of a whole host are sampled: those that any of the lists admits, or all if the lists are empty. Threads of the
/// kernel never are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFilter {
    /// Cgroups with those below them: inodes of their directories in the hierarchy of version 2.
    pub cgroups: Vec<u64>,
    /// Names of threads, at most 15 bytes each; a process is sampled once a thread with such a name is.
    pub comms: Vec<Vec<u8>>,
    pub users: Vec<u32>,
    /// Processes, and those that they start from then on.
    pub processes: Vec<Pid>,
    /// Processes that are not sampled, and those that they start from then on: our own.
    pub excluded: Vec<Pid>,
}

/// What to sample of the time off the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffCpuOptions {
    /// Blocked intervals that are shorter are left out, ns.
    pub min_blocked: u64,
    /// Take the stacks of the threads that end blocked intervals.
    pub wakers: bool,
}

/// Which part of a thread's time is sampled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// While it is on a CPU.
    #[default]
    Cpu,
    /// While it is off the CPU: blocked, or runnable.
    OffCpu,
    /// Both.
    Wall,
    /// No time: changes of resident memory. Only by eBPF.
    Rss,
    /// No time: the allocations that processes sample themselves, and publish. Only by eBPF.
    Alloc,
}

impl Mode {
    /// Whether memory is sampled, and no time.
    pub fn is_of_memory(self) -> bool {
        matches!(self, Mode::Rss | Mode::Alloc)
    }
}

/// The event that triggers a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// Hardware cycles if there is a PMU, else the CPU clock.
    Auto,
    CpuClock,
    Cycles,
    PageFaults,
    ContextSwitches,
}

/// Names of the events as typed on the command line.
pub const EVENT_KINDS: &[(&str, EventKind)] = &[
    ("auto", EventKind::Auto),
    ("cpu-clock", EventKind::CpuClock),
    ("cycles", EventKind::Cycles),
    ("page-faults", EventKind::PageFaults),
    ("context-switches", EventKind::ContextSwitches),
];

/// Names of the modes as typed on the command line.
pub const MODES: &[(&str, Mode)] = &[
    ("cpu", Mode::Cpu),
    ("off-cpu", Mode::OffCpu),
    ("wall", Mode::Wall),
    ("rss", Mode::Rss),
    ("alloc", Mode::Alloc),
];

/// Counts kept by the kernel and the backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleCounts {
    /// ns of CPU time during which sampling was on, over all sampled threads; 0 for other events than clocks.
    pub cpu_time: u64,
    /// Samples delivered to the session.
    pub delivered: u64,
    /// Samples that fell due and were not delivered.
    pub lost: u64,
    /// Those of them that the kernel skipped, because another BPF program was running on that CPU.
    pub skipped: u64,
    /// How long threads were stopped; `None` where the backend stops none.
    pub stopped: Option<StopTimes>,
}

/// How long threads of the target were stopped for one sample each, ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopTimes {
    pub median: u64,
    pub longest: u64,
}

/// Walks the interpreter frames of a stopped thread, into the last argument, and copies the code objects that the
/// function calls new: `cpython::frame_walk::walk`, passed in because backends are independent of the interpreter.
pub type WalkFn = fn(&dyn Memory, &TargetLayout, &StoppedThread, &dyn Fn(u64, u32) -> bool, &mut PythonWalk);

/// Emits a sample, after the code objects that were copied with it.
fn push(mut sample: Sample, codes: Vec<CodeCopy>, out: &mut Vec<Event>) {
    let pid = sample.pid;
    for copy in take_tasks(codes, &mut sample) {
        let copy = Box::new(copy);
        out.push(Event::Code { pid, copy });
    }
    out.push(Event::Sample(Box::new(sample)));
}

/// Moves the copies of running tasks into the sample that they were made with. Returns the others.
pub fn take_tasks(copies: Vec<CodeCopy>, sample: &mut Sample) -> Vec<CodeCopy> {
    let (tasks, codes): (Vec<_>, Vec<_>) = copies.into_iter().partition(|copy| copy.fingerprint == RUNNING_TASK);
    sample.tasks.clear();
    for CodeCopy { code, parts, .. } in tasks {
        if let Ok([frame, name]) = <[Part; 2]>::try_from(parts) {
            RunningTask::add(&mut sample.tasks, code, frame.avma, name);
        }
    }
    codes
}

/// Events that wait in the kernel.
pub trait Buffering: Send {
    /// Moves them to memory, as far as their number is bounded. Needs no privileges.
    fn buffer(&mut self);
}

/// A backend. `update_process` may be called before and after `attach`.
pub trait Backend {
    /// Short name of the backend, as on the command line: `ebpf`.
    fn backend(&self) -> &'static str;

    /// Name of the sampling event, e.g. `cpu-clock`.
    fn event(&self) -> &str;

    /// Name for messages, e.g. `ebpf, cpu-clock`.
    fn name(&self) -> String {
        format!("{}, {}", self.backend(), self.event())
    }

    /// Samples a process once started: all its threads, and those they create.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    fn attach(&mut self, pid: Pid) -> Result<()>;

    /// Samples a process that is about to `exec`, from that moment on.
    ///
    /// # Errors
    /// As [`Backend::attach`].
    fn attach_at_exec(&mut self, pid: Pid) -> Result<()>;

    /// Sets where the end of the stack and the interpreter of a process are; called again when they change.
    fn update_process(&mut self, pid: Pid, layout: &TargetLayout) -> Result<()>;

    /// Removes a process that has exited.
    fn remove_process(&mut self, pid: Pid);

    /// Starts sampling.
    fn start(&mut self) -> Result<()>;

    /// Changes the number of samples per second. All samples with the old one have been taken when this returns. No effect where
    /// `options.host` is not set.
    fn set_rate(&mut self, _rate: u64) {}

    /// Waits up to `wait` for events and appends them in chronological order; not all of them, but some if there are any.
    /// True if more are waiting.
    fn poll(&mut self, wait: Duration, out: &mut Vec<Event>) -> Result<bool>;

    /// What keeps events that wait in the kernel, while it is not polled for long; `None` where they need no such care.
    fn buffering(&mut self) -> Option<Box<dyn Buffering + '_>> {
        None
    }

    /// Stops sampling; samples already taken are still returned by `poll`.
    fn stop(&mut self);

    fn counts(&self) -> SampleCounts;

    /// Time in the kernel that taking samples has used so far, ns, as far as it is known.
    fn kernel_time(&self) -> u64 {
        0
    }

    /// Limits that were exceeded, as text: what there were too many of, and what is missing therefore.
    fn exceeded_limits(&self) -> Vec<String> {
        Vec::new()
    }

    /// How threads are sampled that the usual timer cannot sample, and why, for the summary; `None`: there are none.
    fn timer_remark(&self) -> Option<String> {
        None
    }

    /// Which share of the samples was taken, and why not all, for the summary; `None`: all were.
    fn sampling_remark(&self) -> Option<String> {
        None
    }

    /// Why there can be no samples, where processes have to do something for them that none of those has which are sampled.
    fn missing_source(&self) -> Option<Error> {
        None
    }

    /// After [`Backend::stop`]: threads that were off the CPU then, and for how long, in modes that sample such time.
    fn open_intervals(&mut self) -> Vec<OpenInterval> {
        Vec::new()
    }

    /// After [`Backend::stop`]: what resident memory has become, by process, with [`Mode::Rss`].
    fn memory_accounts(&mut self) -> Vec<ResidentMemory> {
        Vec::new()
    }

    /// What resident memory has become so far, as [`Backend::memory_accounts`] returns it in the end.
    fn memory_accounts_so_far(&self) -> Vec<ResidentMemory> {
        Vec::new()
    }

    /// After [`Backend::stop`]: how much resident memory there was when, with [`Mode::Rss`]; times of CLOCK_MONOTONIC.
    fn memory_over_time(&mut self) -> MemoryOverTime {
        MemoryOverTime::default()
    }

    /// While sampling: threads that may sleep, listed since the last call, where the backend does not read their stacks. Their
    /// time counts if they sleep when they are read.
    fn sleeping(&mut self) -> Vec<OpenInterval> {
        Vec::new()
    }
}

/// A part of an off-CPU interval that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenInterval {
    pub pid: Pid,
    pub tid: Tid,
    /// When the part ended, CLOCK_MONOTONIC, ns.
    pub end: u64,
    pub time: TimeSpent,
    /// How often the thread had been scheduled; 0: not known. It has not moved while this number is the same.
    pub runs: u64,
    /// Whether it slept when it was listed.
    pub asleep: bool,
    /// The system call in which it sleeps, if known.
    pub call: Option<u16>,
    /// It does not sleep, but is stopped or frozen.
    pub suspended: Option<Suspension>,
}
