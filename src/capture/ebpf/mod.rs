//! Sampling with perf events and a BPF program: the default backend.
//!
//! One perf event per CPU runs the program in the context of whatever thread is running, which takes the complete
//! snapshot (sample.bpf.c) if its process is a target: threads are sampled fairly however many they are and however
//! short they live. A forked child inherits the data about its process in the kernel. Another event per CPU reports
//! mappings, forks, execs and exits. Samples and these sideband records are put in chronological order here.
//!
//! Events per thread, inherited by new threads, would leave the rest of the machine alone (a tick in another process
//! costs it 1 us, on some virtual machines 20). But a new thread's timer would start with a full period, which many
//! threads do not live to see; all would need one fixed period, since a thread inherits that of its creator and the
//! kernel swaps the events of threads that inherited them (kernel/events/core.c, perf_event_context_sched_out), and so
//! several ticks to choose from for each sample; and starting, ending and switching to a thread would cost more.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use aya::Ebpf;
use aya::maps::{Array, HashMap as BpfHash, MapData, MapError, PerCpuArray};
use rustc_hash::{FxHashMap, FxHashSet};

use super::common::jitter::period;
use super::common::sideband;
use super::common::sideband::SidebandRecord;
use super::{Backend, Buffering, Mode, OpenInterval, SampleCounts, SamplingOptions};
use crate::cpython_layout::TargetLayout;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Event, Pid, Sample, Tid};
use crate::profile::memory_over_time::MemoryOverTime;
use crate::profile::resident::ResidentMemory;
use crate::sys;

pub mod switch_in;
// Public for fuzz/.
#[doc(hidden)]
pub mod abi;
mod allocations;
mod cpu_time;
mod errors;
mod host_rules;
mod interpreter_locks;
mod load;
mod nested_states;
mod object;
#[cfg(test)]
mod object_types;
mod off_cpu;
mod program_map;
mod reassembler;
mod recent_programs;
mod rss;
mod rss_budget;
mod sample_ring;
mod sampling_events;
mod sideband_rings;
mod workers;

use abi::DecodedRecord;
use allocations::PublishedAllocations;
use cpu_time::CpuTimes;
use errors::bpf_error;
use host_rules::HostRules;
use interpreter_locks::InterpreterLockMap;
use nested_states::NestedStateMap;
use off_cpu::OffCpu;
use program_map::ProgramMap;
use reassembler::StackReassembler;
use recent_programs::RecentPrograms;
use rss::Rss;
use rss_budget::BudgetTimes;
use sample_ring::{Rings, SampleRing};
use sampling_events::{CpuEvents, SampleCost};
use sideband_rings::{SidebandRings, Subject};

/// Samples, and time, between two polls of the rings: waking up costs as much as some samples do. The BPF program wakes
/// us if one must be handled at once. Reprogramming the ticks wakes us anyway: most polls need not be more frequent.
const POLL_SAMPLES: u32 = 10;
const MIN_POLL: Duration = Duration::from_millis(25);
const MAX_POLL: Duration = Duration::from_millis(100);
const NOTIFY_FAILED: &str = "cannot register a process with the BPF program";
/// Longest time that the kernel takes to clear up after a thread, ns, ...
const TEARDOWN_WINDOW: u64 = 1_000_000_000;
/// ... and how many threads may have exited before those that did so longer ago are removed.
const MAX_EXITED: usize = 4096;
/// Samples handled between two reads of the sideband records ...
const BATCH: usize = 256;
/// ... and bytes of them: no more than stay in the cache until they are handled.
const BATCH_BYTES: usize = 1 << 20;

/// Mirrors `struct kernel_facts` of the program.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct KernelFacts {
    fsbase: u32,
    stack: u32,
    ids: u32,
    want_kernel: u32,
    ticks: u32,
    off_cpu: u32,
    cpus: u32,
    wakers: u32,
    period: u64,
    min_blocked: u64,
    leader: u32,
    comm: u32,
    counted: u32,
    pad: u32,
}

// SAFETY: plain integers, no padding, any bit pattern is valid.
unsafe impl aya::Pod for KernelFacts {}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct LayoutBytes([u8; abi::LAYOUT_SIZE]);

// SAFETY: plain bytes.
unsafe impl aya::Pod for LayoutBytes {}

/// The program's data of a process before its interpreter is found.
const NO_PYTHON: LayoutBytes = LayoutBytes([0; abi::LAYOUT_SIZE]);

/// Counters of the program, and time in ns.
const COUNT_LOST: u32 = 0;
const COUNT_SAMPLES: u32 = 1;
const COUNT_TIME: u32 = 2;

pub struct EbpfBackend {
    bpf: Ebpf,
    /// Why the program is that for older kernels.
    refusal: Option<Error>,
    program: OwnedFd,
    events: CpuEvents,
    ring: SampleRing,
    procs: BpfHash<MapData, u32, LayoutBytes>,
    nested: NestedStateMap,
    running: BpfHash<MapData, u32, [u64; 5]>,
    spans: BpfHash<MapData, u32, [u64; 7]>,
    facts: Array<MapData, KernelFacts>,
    counts: PerCpuArray<MapData, u64>,
    options: SamplingOptions,
    sideband: SidebandRings,
    pending: VecDeque<SidebandRecord>,
    lost_sideband: u64,
    known: FxHashSet<Pid>,
    /// Processes that were removed last: if one executes a program, without a fork, it has not ended.
    removed: FxHashSet<Pid>,
    /// Threads that exited recently, and when.
    ended: FxHashMap<Tid, u64>,
    times: CpuTimes,
    off_cpu: Option<OffCpu>,
    rss: Option<Rss>,
    published: Option<PublishedAllocations>,
    locks: InterpreterLockMap,
    workers: Option<workers::WorkerMaps>,
    /// Of a whole host.
    rules: Option<HostRules>,
    programs: Option<ProgramMap>,
    recent: RecentPrograms,
    delivered: u64,
    /// About to exec its program; samples until then are dropped.
    before_exec: Option<Pid>,
    reassembler: StackReassembler,
    stopped: bool,
}

impl EbpfBackend {
    /// Why the program for older kernels is used; `None`: it is not.
    pub fn why_older_program(&self) -> Option<String> {
        self.refusal.as_ref().map(object::why_not_current)
    }

    /// What takes stacks of threads that were off the CPU, and why nothing better does; `None`: they are not taken.
    pub fn off_cpu_hook(&self) -> Option<(&switch_in::SwitchInHook, &[String])> {
        self.off_cpu.as_ref().map(|o| (&o.hook, o.missing.as_slice()))
    }

    /// Changes the intervals between ticks, when it is time.
    fn reprogram(&mut self) {
        if !self.events.is_due() {
            return;
        }
        let cost = SampleCost {
            samples: self.total(COUNT_SAMPLES),
            time: self.total(COUNT_TIME),
        };
        let ticks = self.events.reprogram(cost, self.delivered);
        if let Ok(facts) = self.facts.get(&0, 0)
            && facts.ticks != ticks
        {
            let _ = self.facts.set(0, KernelFacts { ticks, ..facts }, 0); // it was written before
        }
    }

    fn start_events(&mut self) -> Result<()> {
        if self.options.mode == Mode::OffCpu || self.options.mode.is_of_memory() {
            return Ok(());
        }
        self.events.start()
    }

    fn total(&self, which: u32) -> u64 {
        self.counts.get(&which, 0).map(|v| v.iter().sum()).unwrap_or(0)
    }

    /// Makes the program sample a process; [`Backend::update_process`] adds its layout.
    fn add_process(&mut self, pid: Pid, layout: LayoutBytes) -> Result<()> {
        self.known.insert(pid);
        if self.procs.get(&pid, 0).is_ok() {
            return Ok(());
        }
        if let Some(off_cpu) = &mut self.off_cpu {
            off_cpu.watch(pid)?;
        }
        self.procs
            .insert(pid, layout, 0)
            .map_err(|e| bpf_error(NOTIFY_FAILED, e))?;
        if let Some(off_cpu) = &mut self.off_cpu {
            off_cpu.add_process(pid, sys::clock::now());
        }
        Ok(())
    }

    /// Starts or stops accounting for off-CPU time.
    fn account_off_cpu(&mut self, on: bool) -> Result<()> {
        if self.off_cpu.is_none() {
            return Ok(());
        }
        let mut facts = self.facts.get(&0, 0).map_err(|e| bpf_error(NOTIFY_FAILED, e))?;
        facts.period = if on { period(self.options.rate) } else { 0 };
        facts.off_cpu = on.into();
        self.facts.set(0, facts, 0).map_err(|e| bpf_error(NOTIFY_FAILED, e))
    }

    /// Moves the sideband records of known processes to the queue, in chronological order.
    fn read_sideband(&mut self) {
        let raw = self.sideband.take();
        if raw.lost > 0 {
            self.lost_sideband += raw.lost;
            // Among them may be the fork that used the number again.
            self.removed.clear();
        }
        if self.options.host.is_some() {
            raw.add_to(&mut self.recent, |pid| self.known.contains(&pid));
        }
        let mut batch = raw.decode(|subject| match subject {
            // The number of one whose end was not seen.
            Subject::Child(pid, _) if self.options.host.is_some() => self.known.contains(&pid),
            Subject::Child(pid, parent) => {
                self.removed.remove(&pid);
                self.options.children && self.known.contains(&parent) && self.add_child(pid, parent)
            }
            Subject::Executing(pid) if self.options.host.is_none() && self.removed.remove(&pid) => {
                let is_added = self.add_process(pid, NO_PYTHON).is_ok();
                self.times.begin(pid);
                is_added
            }
            Subject::FirstThreadEnds(pid) => {
                if let Some(rules) = &mut self.rules {
                    rules.end_process(pid);
                }
                self.known.contains(&pid)
            }
            Subject::Executing(pid) | Subject::Process(pid) => self.known.contains(&pid),
        });
        self.sideband.put_back(raw);
        sideband::remove_exits_by_exec(&mut batch);
        for t in &batch {
            if let Event::Exec { pid, .. } = t.event {
                self.sideband.begin_program(pid, t.time);
            }
        }
        self.pending.extend(batch);
    }

    /// Adds a process that a known one has forked. True: it is known even if the kernel refuses it, to be followed.
    fn add_child(&mut self, pid: Pid, parent: Pid) -> bool {
        // The program has done so itself, if it knows where the kernel keeps the child's ID.
        let layout = self.procs.get(&parent, 0).unwrap_or(NO_PYTHON);
        if self.add_process(pid, layout).is_ok() {
            self.times.count_from_start(pid);
        }
        true
    }

    /// Emits the next sideband record.
    fn emit_next(&mut self, out: &mut Vec<Event>) {
        let Some(t) = self.pending.pop_front() else { return };
        match t.event {
            Event::Exec { pid, .. } => {
                // The thread that executes a program has the number of the first one from then on.
                self.ended.remove(&pid);
                self.before_exec = self.before_exec.filter(|before| *before != pid);
                if let Some(rss) = &mut self.rss {
                    rss.begin_at_exec(pid);
                }
            }
            Event::Thread { tid, .. } | Event::Fork { pid: tid, .. } => drop(self.ended.remove(&tid)),
            Event::Exit { tid, .. } => {
                if self.ended.len() >= MAX_EXITED {
                    self.ended
                        .retain(|_, time| t.time.saturating_sub(*time) < TEARDOWN_WINDOW);
                }
                self.ended.insert(tid, t.time);
            }
            _ => {}
        }
        out.push(t.event);
    }

    /// Emits a sample.
    fn emit_sample(&mut self, mut s: Box<Sample>, out: &mut Vec<Event>) {
        if self.before_exec == Some(s.pid) {
            return;
        }
        // The kernel is tearing down this thread, which has neither a stack nor a program any more.
        if self.ended.contains_key(&s.tid) {
            self.times.exclude_one_period(s.pid);
            return;
        }
        if let Some(off_cpu) = &mut self.off_cpu {
            off_cpu.complete(&mut s);
        }
        if let (Some(rss), Some(change)) = (&mut self.rss, &s.memory) {
            rss.count_sample(change.doubled);
        }
        let (pid, time) = (s.pid, s.time);
        if let Some(new) = s.host.as_mut().and_then(|host| host.new.as_mut()) {
            new.mappings = self.recent.mappings(pid, time);
        }
        if s.wake_up.wakes.is_none() {
            self.delivered += 1;
            self.times.sampled(s.pid);
        }
        out.push(Event::Sample(s));
    }
}

impl Backend for EbpfBackend {
    fn backend(&self) -> &'static str {
        "ebpf"
    }

    fn event(&self) -> &str {
        match self.options.mode {
            Mode::Cpu => self.events.name,
            Mode::OffCpu => "off-cpu",
            Mode::Wall => "wall-clock",
            Mode::Rss => "rss",
            Mode::Alloc => "alloc",
        }
    }

    fn attach(&mut self, pid: Pid) -> Result<()> {
        self.add_process(pid, NO_PYTHON)?;
        self.times.begin(pid);
        Ok(())
    }

    fn attach_at_exec(&mut self, pid: Pid) -> Result<()> {
        self.account_off_cpu(true)?;
        self.add_process(pid, NO_PYTHON)?;
        self.before_exec = Some(pid);
        if let Some(published) = &mut self.published {
            published.start();
        }
        self.sideband.begin_program(pid, sys::clock::now());
        // Now, not when the record of the exec is read: that may be much later, and samples count from the exec on. The
        // CPU time until then is a fraction of a millisecond.
        self.times.begin(pid);
        self.start_events()
    }

    fn update_process(&mut self, pid: Pid, layout: &TargetLayout) -> Result<()> {
        self.known.insert(pid);
        if layout.python.is_some() {
            self.sideband.end_start(pid);
        }
        if let Some(off_cpu) = &mut self.off_cpu {
            off_cpu.watch(pid)?;
        }
        self.procs
            .insert(pid, LayoutBytes(abi::encode(layout)), 0)
            .map_err(|e| bpf_error(NOTIFY_FAILED, e))?;
        self.locks.set(pid, &layout.locks)?;
        if let Some(workers) = &mut self.workers {
            workers.add(pid, layout);
        }
        // What is not there may have been, in a program that the process ran before.
        let removed = |result: std::result::Result<(), MapError>| result.or(Ok(()));
        match &layout.running_tasks {
            Some(running) => self.running.insert(pid, abi::encode_running(running), 0),
            None => removed(self.running.remove(&pid)),
        }
        .map_err(|e| bpf_error(NOTIFY_FAILED, e))?;
        let (spans, context) = (layout.spans.as_ref(), layout.thread_context.as_ref());
        if spans.is_some() || context.is_some() {
            self.spans.insert(pid, abi::encode_spans(spans, context), 0)
        } else {
            removed(self.spans.remove(&pid))
        }
        .map_err(|e| bpf_error(NOTIFY_FAILED, e))?;
        if let Some(published) = &mut self.published {
            published.update(pid, &layout.allocation_probes);
        }
        self.nested.set(pid, layout);
        self.programs.as_mut().map_or(Ok(()), |programs| programs.set(layout))
    }

    fn remove_process(&mut self, pid: Pid) {
        self.nested.remove(pid);
        self.sideband.end_start(pid);
        if self.known.remove(&pid) {
            if self.removed.len() >= MAX_EXITED {
                self.removed.clear();
            }
            self.removed.insert(pid);
        }
        let _ = self.procs.remove(&pid); // absent: nothing to remove
        self.locks.remove(pid);
        if let Some(off_cpu) = &mut self.off_cpu {
            off_cpu.remove_process(pid);
        }
        if let Some(rss) = &mut self.rss {
            rss.remove_process(pid);
        }
        if let Some(published) = &mut self.published {
            published.remove_process(pid);
        }
        let _ = self.running.remove(&pid);
        let _ = self.spans.remove(&pid);
        self.times.end(pid);
    }

    fn start(&mut self) -> Result<()> {
        if self.events.is_running() {
            return Ok(()); // already since `attach_at_exec`
        }
        for pid in &self.known {
            self.times.begin(*pid);
        }
        self.account_off_cpu(true)?;
        let began = sys::clock::now();
        if let Some(off_cpu) = &mut self.off_cpu {
            self.known.iter().for_each(|pid| off_cpu.add_process(*pid, began));
        }
        if let Some(rss) = &mut self.rss {
            for pid in &self.known {
                match rss.begin(&self.bpf, *pid) {
                    // It has ended since it was found.
                    Err(e) if e.kind == ErrorKind::NoSuchProcess => {}
                    begun => begun?,
                }
            }
            rss.observe(began);
        }
        if let Some(published) = &mut self.published {
            published.start();
        }
        self.start_events()
    }

    fn set_rate(&mut self, rate: u64) {
        if self.options.host.is_none() {
            return;
        }
        self.options.rate = rate;
        self.events.set_rate(rate);
        let _ = self.account_off_cpu(!self.stopped); // it was written before
    }

    fn poll(&mut self, wait: Duration, out: &mut Vec<Event>) -> Result<bool> {
        let sideband_time = self.sideband.time_left();
        let mut fds = vec![self.ring.event()];
        fds.extend(self.sideband.events());
        let max_wait = Duration::from_nanos(period(self.options.rate)) * POLL_SAMPLES;
        let max_wait = max_wait.clamp(MIN_POLL, MAX_POLL).min(self.events.time_left());
        let max_wait = if self.ring.has_moved() {
            Duration::ZERO
        } else {
            max_wait.min(sideband_time)
        };
        sys::files::poll(&fds, wait.min(max_wait)).map_err(|e| Error::io("cannot wait for samples", e))?;
        if let Some(off_cpu) = &mut self.off_cpu {
            off_cpu.examine();
        }
        if let Some(rss) = &mut self.rss {
            rss.observe(sys::clock::now());
        }
        // What is newer than this may have older samples that were not in the ring yet when it was read.
        let known_until = if self.stopped { u64::MAX } else { sys::clock::now() };
        let mut records = Vec::new();
        let (mut more, mut bytes) = (true, 0);
        while records.len() < BATCH && bytes < BATCH_BYTES {
            let reassembler = &mut self.reassembler;
            let Some(len) = self.ring.next(|entry| reassembler.add_entry(entry, &mut records)) else {
                more = false;
                break;
            };
            bytes += len;
        }
        if self.stopped && !more {
            self.reassembler.finish(&mut records);
        }
        // Every sideband record older than these samples is in its ring by now.
        self.read_sideband();
        for record in records {
            let time = match &record {
                DecodedRecord::Sample(s) => s.time,
                DecodedRecord::Code(_, time, _) => *time,
                DecodedRecord::Range(range) => range.time,
                DecodedRecord::Free(freed) => freed.time,
            };
            while self.pending.front().is_some_and(|t| t.time <= time) {
                self.emit_next(out);
            }
            match record {
                DecodedRecord::Sample(s) => self.emit_sample(s, out),
                DecodedRecord::Range(range) => out.push(Event::MemoryRange(range)),
                DecodedRecord::Free(freed) => out.push(Event::Free(freed)),
                DecodedRecord::Code(pid, _, copy) => out.push(Event::Code {
                    pid,
                    copy: Box::new(copy),
                }),
            }
        }
        if !more {
            while self.pending.front().is_some_and(|t| t.time <= known_until) {
                self.emit_next(out);
            }
            self.times.read(false);
        }
        self.reprogram();
        if self.rss.is_some() {
            self.times.read(false);
            let used = BudgetTimes {
                stacks: self.total(COUNT_TIME),
                target: self.times.total(),
            };
            self.rss.iter_mut().for_each(|rss| rss.keep_budget(used));
        }
        Ok(more || !self.pending.is_empty())
    }

    fn buffering(&mut self) -> Option<Box<dyn Buffering + '_>> {
        Some(Box::new(Rings {
            samples: &mut self.ring,
            sideband: &mut self.sideband,
        }))
    }

    fn stop(&mut self) {
        self.stopped = true;
        let end = sys::clock::now();
        // First, so that the threads stay as they are while they are read; it was written before.
        let _ = self.account_off_cpu(false);
        if let Some(off_cpu) = &mut self.off_cpu {
            off_cpu.end(end, period(self.options.rate), self.options.off_cpu.min_blocked);
        }
        if let Some(rss) = &mut self.rss {
            rss.stop(end);
        }
        if let Some(published) = &mut self.published {
            published.stop();
        }
        self.events.stop();
        self.times.read(true);
    }

    fn missing_source(&self) -> Option<Error> {
        self.published.as_ref().and_then(PublishedAllocations::missing_source)
    }

    fn open_intervals(&mut self) -> Vec<OpenInterval> {
        let open = self.off_cpu.as_mut().map(|off_cpu| std::mem::take(&mut off_cpu.open));
        open.unwrap_or_default()
    }

    fn memory_accounts(&mut self) -> Vec<ResidentMemory> {
        self.rss.as_mut().map_or(Vec::new(), Rss::accounts)
    }

    fn sampling_remark(&self) -> Option<String> {
        self.rss.as_ref().and_then(Rss::sampling_remark)
    }

    fn memory_accounts_so_far(&self) -> Vec<ResidentMemory> {
        self.rss.as_ref().map_or(Vec::new(), Rss::accounts_so_far)
    }

    fn memory_over_time(&mut self) -> MemoryOverTime {
        self.rss
            .as_mut()
            .map_or_else(MemoryOverTime::default, Rss::take_over_time)
    }

    fn exceeded_limits(&self) -> Vec<String> {
        let records = self.lost_sideband;
        let sideband = (records > 0).then(|| {
            format!(
                "{records} records of mappings, forks and exits were lost: names of what they were about may be missing"
            )
        });
        let all = [self.nested.exceeded(), self.locks.exceeded(), sideband];
        let of_memory = self.rss.as_ref().map_or(Vec::new(), Rss::exceeded);
        let of_published = self
            .published
            .as_ref()
            .map_or(Vec::new(), PublishedAllocations::exceeded);
        all.into_iter().flatten().chain(of_memory).chain(of_published).collect()
    }

    fn kernel_time(&self) -> u64 {
        self.total(COUNT_TIME)
    }

    fn counts(&self) -> SampleCounts {
        let skipped = missed(&self.program);
        let lost_blocks = self.published.as_ref().map_or(0, PublishedAllocations::lost_blocks);
        SampleCounts {
            cpu_time: if self.events.is_clock() && !self.options.mode.is_of_memory() {
                self.times.total()
            } else {
                0
            },
            delivered: self.delivered,
            lost: self.total(COUNT_LOST) + skipped + lost_blocks,
            skipped,
            stopped: None,
        }
    }
}

/// Runs of the program that the kernel skipped because another BPF program was running on that CPU.
fn missed(program: &OwnedFd) -> u64 {
    let info = sys::procfs::read_text(format!("/proc/self/fdinfo/{}", program.as_raw_fd())).unwrap_or_default();
    info.lines()
        .find_map(|l| l.strip_prefix("recursion_misses:")?.trim().parse().ok())
        .unwrap_or(0)
}
