//! Sampling with perf events and a BPF program: the default backend.
//!
//! One perf event per CPU makes the program run in the context of the thread that the tick meets, which takes the whole
//! snapshot (sample.bpf.c) if it is one of a process that is to be sampled: however many threads these have and however
//! short they live, each has its share. What is known of a process is handed to its forked children in the kernel.
//! Another event per CPU tells of mappings, forks, execs and exits. Samples and those tidings are put in order of time
//! here.
//!
//! Events of the threads themselves, inherited by new ones, would leave the rest of the machine alone (a tick that meets
//! another process costs it 1 us, on some virtual machines 20). But a new thread's timer would start with a whole period,
//! which many threads do not live to see; all would need one period forever, since a thread inherits that of its creator
//! and the kernel swaps the events of threads that inherited them (kernel/events/core.c, perf_event_context_sched_out),
//! and so ticks to choose from for each sample; and every thread that starts, ends or is switched to would cost more.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};
use std::{fs, io};

use aya::maps::{Array, HashMap as BpfHash, MapData, PerCpuArray, RingBuf};
use aya::programs::{PerfEvent, RawTracePoint};
use aya::{Ebpf, EbpfLoader};
use rustc_hash::{FxHashMap, FxHashSet};

use super::ring::Ring;
use super::ticks::period;
use super::tidings::{self, Tiding};
use super::{Counts, Mode, OpenInterval, Options, Source};
use crate::error::{Error, Kind, Result};
use crate::layout::Space;
use crate::process::rights;
use crate::process::sys::{self, perf};
use crate::sample::{Event, Pid, Sample, Tid};

mod events;
pub mod off_cpu;
// Public for fuzz/.
#[doc(hidden)]
pub mod record;
mod time;

use events::{Cost, CpuEvents};
use off_cpu::OffCpu;
use record::Record;
use time::Times;

const OBJECT: &[u8] = include_bytes!("sample.bpf.o");
/// Bytes of the sample ring: some 20 ms of the deepest stacks on two CPUs, minutes of ordinary ones.
const RING_BYTES: u32 = 32 << 20;
/// Pages of each CPU's ring of tidings.
const TIDINGS_PAGES: usize = 64;
/// Samples, and time, between two looks at the rings: to wake up costs as much as some samples do. The BPF program wakes us
/// where one must be seen at once. To set other distances between ticks we wake anyway: most looks need not be sooner.
const LOOK: u32 = 10;
const SHORTEST_LOOK: Duration = Duration::from_millis(25);
const LONGEST_LOOK: Duration = Duration::from_millis(100);
const WATCH: &str = "cannot watch mappings and forks";
const TELL: &str = "cannot tell the BPF program of a process";
/// Longest time that the kernel takes to clear up after a thread, ns, ...
const CLEARING_UP: u64 = 1_000_000_000;
/// ... and how many threads may have ended before it is looked which of them did so longer ago.
const MANY_ENDED: usize = 4096;
/// Samples handled between two looks at the tidings ...
const BATCH: usize = 256;
/// ... and bytes of them: no more than stay in the cache until they are looked at.
const BATCH_BYTES: usize = 1 << 20;

/// Takes what `struct kernel_facts` of the program holds.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Facts {
    fsbase: u32,
    stack: u32,
    ids: u32,
    want_kernel: u32,
    ticks: u32,
    off_cpu: u32,
    cpus: u32,
    pad: u32,
    period: u64,
}

// SAFETY: plain integers, no padding, any bit pattern is valid.
unsafe impl aya::Pod for Facts {}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct LayoutBytes([u8; record::LAYOUT_SIZE]);

// SAFETY: plain bytes.
unsafe impl aya::Pod for LayoutBytes {}

/// What the program knows of a process at first.
const NO_PYTHON: LayoutBytes = LayoutBytes([0; record::LAYOUT_SIZE]);

/// Counters of the program, and time in ns.
const COUNT_LOST: u32 = 0;
const COUNT_SAMPLES: u32 = 1;
const COUNT_TIME: u32 = 2;
/// `NESTED` of the program.
const NESTED: usize = 4;

/// Takes what `struct nested_key` of the program holds.
#[repr(C)]
#[derive(Clone, Copy)]
struct NestedKey {
    thread_pointer: u64,
    pid: u32,
    pad: u32,
}

// SAFETY: three plain integers, no padding, any bit pattern is valid.
unsafe impl aya::Pod for NestedKey {}

pub struct EbpfSource {
    _bpf: Ebpf,
    program: OwnedFd,
    events: CpuEvents,
    ring: RingBuf<MapData>,
    procs: BpfHash<MapData, u32, LayoutBytes>,
    nested: BpfHash<MapData, NestedKey, [u64; NESTED]>,
    nested_of: FxHashMap<Pid, Vec<NestedKey>>,
    facts: Array<MapData, Facts>,
    counts: PerCpuArray<MapData, u64>,
    options: Options,
    tidings: Vec<Ring>,
    pending: VecDeque<Tiding>,
    lost_tidings: u64,
    known: FxHashSet<Pid>,
    /// Threads that ended a short while ago, and when.
    ended: FxHashMap<Tid, u64>,
    times: Times,
    off_cpu: Option<OffCpu>,
    delivered: u64,
    /// It is about to run its program; what it does until then is not of interest.
    before_exec: Option<Pid>,
    joiner: record::Joiner,
    stopped: bool,
}

/// The kernel said no: the cause, as far as it can be told, and the remedy.
fn not_permitted(what: &str, e: &io::Error) -> Error {
    rights::refused(&rights::Facts::read(), e).error(what)
}

fn bpf_error(what: &str, e: impl std::error::Error + 'static) -> Error {
    let mut text = e.to_string();
    let mut refusal = None;
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(&e);
    while let Some(s) = source {
        if let Some(io) = s.downcast_ref::<io::Error>() {
            refusal = Some(io).filter(|io| io.kind() == io::ErrorKind::PermissionDenied);
        }
        source = s.source();
        text = source.map_or(text.clone(), |s| format!("{text}: {s}"));
    }
    if let Some(e) = refusal {
        return not_permitted(what, e);
    }
    let last: Vec<&str> = text.lines().rev().take(3).collect();
    Error::new(Kind::Unsupported, what.to_string())
        .why(last.into_iter().rev().collect::<Vec<_>>().join(" | "))
        .hint("nativeprof doctor   tells what this machine can do")
}

impl EbpfSource {
    /// Loads the program and opens what tells of processes; samples nothing yet.
    ///
    /// # Errors
    /// Missing rights (named), or a kernel that cannot run the program.
    pub fn new(options: &Options) -> Result<EbpfSource> {
        const LOAD: &str = "cannot load the BPF program";
        if let Some(lack) = rights::ebpf(&rights::Facts::read()).into_iter().next() {
            return Err(lack.error("sampling with eBPF is not permitted"));
        }
        let cpus = sys::cpu_count() as u32;
        let (mut slots, mut threads, mut prepared) = (cpus, 1, None);
        if options.mode != Mode::Cpu {
            (slots, threads) = (cpus + off_cpu::WORK_SLOTS, off_cpu::MAX_THREADS);
            prepared = Some(off_cpu::prepare(OBJECT)?);
        }
        let mut bpf = EbpfLoader::new()
            .map_max_entries("SCRATCH", slots)
            .map_max_entries("CACHE", slots)
            .map_max_entries("THREADS", threads)
            .map_max_entries("SAMPLES", RING_BYTES)
            .load(prepared.as_ref().map_or(OBJECT, |(object, _)| object))
            .map_err(|e| bpf_error(LOAD, e))?;
        for name in ["sample", "calibrate"] {
            let program: &mut PerfEvent = bpf
                .program_mut(name)
                .and_then(|p| p.try_into().ok())
                .ok_or_else(|| Error::new(Kind::Data, format!("the BPF object lacks the program {name}")))?;
            program.load().map_err(|e| bpf_error(LOAD, e))?;
        }
        let fd = |bpf: &Ebpf, name: &str| -> Result<OwnedFd> {
            let program: &PerfEvent = bpf.program(name).and_then(|p| p.try_into().ok()).expect("loaded above");
            let fd = program.fd().map_err(|e| bpf_error(LOAD, e))?;
            fd.as_fd().try_clone_to_owned().map_err(|e| Error::io(LOAD, e))
        };
        let (program, calibrator) = (fd(&bpf, "sample")?, fd(&bpf, "calibrate")?);
        let mut take = |name: &str| {
            bpf.take_map(name)
                .ok_or_else(|| Error::new(Kind::Data, format!("the BPF object lacks the map {name}")))
        };
        let map_error = |e| bpf_error(LOAD, e);
        let mut facts: Array<MapData, Facts> = take("FACTS")?.try_into().map_err(map_error)?;
        let mut own: Array<MapData, u64> = take("CALIBRATE")?.try_into().map_err(map_error)?;
        let ring = RingBuf::try_from(take("SAMPLES")?).map_err(map_error)?;
        let procs = take("PROCS")?.try_into().map_err(map_error)?;
        let nested = take("NESTED_STATES")?.try_into().map_err(map_error)?;
        let counts = take("COUNTS")?.try_into().map_err(map_error)?;
        // On a thread of its own: where thread and process have the same number, other fields hold the like.
        std::thread::scope(|s| {
            let found = s.spawn(|| calibrate(&calibrator, &mut own, &mut facts)).join();
            found.unwrap_or_else(|_| Err(Error::new(Kind::Data, "the calibrating thread failed")))
        })?;
        let mut f = facts.get(&0, 0).map_err(map_error)?;
        f.want_kernel = options.kernel.into();
        f.cpus = cpus;
        facts.set(0, f, 0).map_err(map_error)?;
        if options.children {
            let forked: &mut RawTracePoint = bpf
                .program_mut("forked")
                .and_then(|p| p.try_into().ok())
                .ok_or_else(|| Error::new(Kind::Data, "the BPF object lacks the program forked"))?;
            forked.load().map_err(|e| bpf_error(LOAD, e))?;
            forked
                .attach("sched_process_fork")
                .map_err(|e| bpf_error("cannot watch forks", e))?;
        }
        let events = CpuEvents::open(options, program.as_fd())?;
        let off_cpu = match &prepared {
            Some((_, btf)) => Some(OffCpu::attach(&mut bpf, btf)?),
            None => None,
        };
        let mut source = EbpfSource {
            _bpf: bpf,
            program,
            events,
            ring,
            procs,
            nested,
            nested_of: FxHashMap::default(),
            facts,
            counts,
            options: options.clone(),
            tidings: Vec::new(),
            pending: VecDeque::new(),
            lost_tidings: 0,
            known: FxHashSet::default(),
            ended: FxHashMap::default(),
            times: Times::new(period(options.rate)),
            off_cpu,
            delivered: 0,
            before_exec: None,
            joiner: record::Joiner::default(),
            stopped: false,
        };
        source.open_tidings()?;
        Ok(source)
    }

    /// Mappings, forks, execs and exits of the whole machine, from one event per CPU.
    fn open_tidings(&mut self) -> Result<()> {
        let mut attr = perf::perf_event_attr {
            type_: perf::PERF_TYPE_SOFTWARE,
            config: perf::PERF_COUNT_SW_DUMMY.into(),
            ..Default::default()
        };
        tidings::ask(&mut attr);
        // Whoever maps an interpreter must be known before it runs: wake at once.
        attr.set_watermark(1);
        attr.__bindgen_anon_2.wakeup_watermark = 1;
        for event in events::on_each_cpu(&mut attr, WATCH, WATCH)? {
            let ring = Ring::new(event, TIDINGS_PAGES).map_err(|e| match e.kind() {
                io::ErrorKind::PermissionDenied => not_permitted("cannot map the ring of mappings and forks", &e),
                _ => Error::io("cannot map the ring of mappings and forks", e),
            })?;
            self.tidings.push(ring);
        }
        Ok(())
    }

    /// Sets other distances between ticks, once in a while.
    fn vary(&mut self) {
        if !self.events.is_time() {
            return;
        }
        let cost = Cost {
            samples: self.total(COUNT_SAMPLES),
            time: self.total(COUNT_TIME),
        };
        let ticks = self.events.vary(cost, self.delivered);
        if let Ok(facts) = self.facts.get(&0, 0)
            && facts.ticks != ticks
        {
            let _ = self.facts.set(0, Facts { ticks, ..facts }, 0); // it was written before
        }
    }

    fn start_events(&mut self) -> Result<()> {
        if self.options.mode == Mode::OffCpu {
            return Ok(());
        }
        self.events.start()
    }

    fn total(&self, which: u32) -> u64 {
        self.counts.get(&which, 0).map(|v| v.iter().sum()).unwrap_or(0)
    }

    /// Makes the program sample a process; it is told more in [`Source::learn`].
    fn admit(&mut self, pid: Pid, space: LayoutBytes) -> Result<()> {
        self.known.insert(pid);
        if self.procs.get(&pid, 0).is_ok() {
            return Ok(());
        }
        self.procs.insert(pid, space, 0).map_err(|e| bpf_error(TELL, e))?;
        if let Some(off_cpu) = &mut self.off_cpu {
            off_cpu.add_process(pid);
        }
        Ok(())
    }

    /// Starts or stops the account of off-CPU time.
    fn account_off_cpu(&mut self, on: bool) -> Result<()> {
        if self.off_cpu.is_none() {
            return Ok(());
        }
        let mut facts = self.facts.get(&0, 0).map_err(|e| bpf_error(TELL, e))?;
        facts.period = if on { period(self.options.rate) } else { 0 };
        facts.off_cpu = on.into();
        self.facts.set(0, facts, 0).map_err(|e| bpf_error(TELL, e))
    }

    fn forget_nested(&mut self, pid: Pid) {
        for key in self.nested_of.remove(&pid).into_iter().flatten() {
            let _ = self.nested.remove(&key); // absent: nothing to forget
        }
    }

    /// Moves what the kernel tells of known processes to the queue, in order of time.
    fn read_tidings(&mut self) {
        let mut batch = Vec::new();
        for ring in &mut self.tidings {
            ring.drain(|kind, misc, body| match tidings::decode(kind, misc, body) {
                Some(Ok(t)) => batch.push(t),
                Some(Err(n)) => self.lost_tidings += n,
                None => {}
            });
        }
        batch.sort_by_key(|t| t.time);
        for t in batch {
            match t.event {
                Event::Fork { pid, parent } => {
                    if !self.options.children || !self.known.contains(&parent) {
                        continue;
                    }
                    // The program has done so itself, if it knows where the kernel keeps the child's number.
                    let space = self.procs.get(&parent, 0).unwrap_or(NO_PYTHON);
                    if self.admit(pid, space).is_ok() {
                        self.times.begin_with_birth(pid);
                    }
                }
                Event::Mmap { pid, .. }
                | Event::Exec { pid, .. }
                | Event::Thread { pid, .. }
                | Event::Comm { pid, .. }
                | Event::Exit { pid, .. }
                    if !self.known.contains(&pid) =>
                {
                    continue;
                }
                _ => {}
            }
            self.pending.push_back(t);
        }
    }

    /// Hands the next tiding on.
    fn tell_next(&mut self, out: &mut Vec<Event>) {
        let Some(t) = self.pending.pop_front() else { return };
        match t.event {
            Event::Exec { pid, .. } if self.before_exec == Some(pid) => self.before_exec = None,
            Event::Thread { tid, .. } | Event::Fork { pid: tid, .. } => drop(self.ended.remove(&tid)),
            Event::Exit { tid, .. } => {
                if self.ended.len() >= MANY_ENDED {
                    self.ended.retain(|_, time| t.time.saturating_sub(*time) < CLEARING_UP);
                }
                self.ended.insert(tid, t.time);
            }
            _ => {}
        }
        out.push(t.event);
    }

    /// Hands a sample on.
    fn take(&mut self, s: Box<Sample>, out: &mut Vec<Event>) {
        if self.before_exec == Some(s.pid) {
            return;
        }
        // The kernel is clearing up after this thread, which has neither a stack nor a program any more.
        if self.ended.contains_key(&s.tid) {
            self.times.leave_out(s.pid);
            return;
        }
        self.delivered += 1;
        self.times.sampled(s.pid);
        out.push(Event::Sample(s));
    }
}

/// Lets the program find fields of `task_struct`, by running it on a thread of ours whose values we know.
fn calibrate(program: &OwnedFd, own: &mut Array<MapData, u64>, facts: &mut Array<MapData, Facts>) -> Result<()> {
    const WHAT: &str = "cannot calibrate the BPF program";
    own.set(0, sys::own_thread_pointer(), 0)
        .map_err(|e| bpf_error(WHAT, e))?;
    let mut attr = perf::perf_event_attr {
        type_: perf::PERF_TYPE_SOFTWARE,
        config: perf::PERF_COUNT_SW_CPU_CLOCK.into(),
        ..Default::default()
    };
    attr.__bindgen_anon_1.sample_period = 50_000;
    attr.set_disabled(1);
    let event = sys::perf_event_open(&mut attr, sys::own_tid(), -1).map_err(|e| match e.kind() {
        io::ErrorKind::PermissionDenied => not_permitted(WHAT, &e),
        _ => Error::io(WHAT, e),
    })?;
    sys::perf_set_bpf(event.as_fd(), program.as_fd()).map_err(|e| Error::io(WHAT, e))?;
    sys::perf_enable(event.as_fd()).map_err(|e| Error::io(WHAT, e))?;
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(200) {
        for _ in 0..1000 {
            sys::spend_time_in_kernel();
        }
        let f = facts.get(&0, 0).map_err(|e| bpf_error(WHAT, e))?;
        if f.fsbase != 0 && f.stack != 0 {
            return Ok(());
        }
    }
    let f = facts.get(&0, 0).map_err(|e| bpf_error(WHAT, e))?;
    if f.fsbase == 0 {
        return Err(
            Error::new(Kind::Unsupported, WHAT).why("the thread pointer was not found in the kernel's task structure")
        );
    }
    Ok(()) // without the stack field the program looks for the user registers by itself
}

impl Source for EbpfSource {
    fn backend(&self) -> &'static str {
        "ebpf"
    }

    fn event(&self) -> &str {
        match self.options.mode {
            Mode::Cpu => self.events.name,
            Mode::OffCpu => "off-cpu",
            Mode::Wall => "wall-clock",
        }
    }

    fn attach(&mut self, pid: Pid) -> Result<()> {
        self.admit(pid, NO_PYTHON)?;
        self.times.begin(pid);
        Ok(())
    }

    fn attach_at_exec(&mut self, pid: Pid) -> Result<()> {
        self.account_off_cpu(true)?;
        self.admit(pid, NO_PYTHON)?;
        self.before_exec = Some(pid);
        // Now, not when we come to read of the exec: that may be much later, and samples count from the exec on. What it
        // takes until then is a fraction of a millisecond.
        self.times.begin(pid);
        self.start_events()
    }

    fn learn(&mut self, pid: Pid, space: &Space) -> Result<()> {
        self.known.insert(pid);
        self.procs
            .insert(pid, LayoutBytes(record::encode(space)), 0)
            .map_err(|e| bpf_error(TELL, e))?;
        self.forget_nested(pid);
        for (thread_pointer, states) in &space.nested {
            let key = NestedKey {
                thread_pointer: *thread_pointer,
                pid,
                pad: 0,
            };
            // The thread's own state is among them; the program leaves it out.
            let mut value = [0; NESTED];
            value.iter_mut().zip(states).for_each(|(v, s)| *v = *s);
            self.nested.insert(key, value, 0).map_err(|e| bpf_error(TELL, e))?;
            self.nested_of.entry(pid).or_default().push(key);
        }
        Ok(())
    }

    fn forget(&mut self, pid: Pid) {
        self.forget_nested(pid);
        self.known.remove(&pid);
        let _ = self.procs.remove(&pid); // absent: nothing to forget
        self.times.end(pid);
    }

    fn start(&mut self) -> Result<()> {
        if self.events.is_running() {
            return Ok(()); // since the program to launch was made ready
        }
        for pid in &self.known {
            self.times.begin(*pid);
        }
        self.account_off_cpu(true)?;
        if let Some(off_cpu) = &mut self.off_cpu {
            self.known.iter().for_each(|pid| off_cpu.add_process(*pid));
        }
        self.start_events()
    }

    fn poll(&mut self, wait: Duration, out: &mut Vec<Event>) -> Result<bool> {
        let mut fds = vec![self.ring.as_fd()];
        fds.extend(self.tidings.iter().map(Ring::event));
        let look = Duration::from_nanos(period(self.options.rate)) * LOOK;
        let look = look.clamp(SHORTEST_LOOK, LONGEST_LOOK).min(self.events.lap_left());
        sys::poll(&fds, wait.min(look)).map_err(|e| Error::io("cannot wait for samples", e))?;
        // A process or program that ends later than this may have samples that are not in the ring yet.
        let looked = if self.stopped { u64::MAX } else { sys::now() };
        let mut records = Vec::new();
        let (mut more, mut bytes) = (true, 0);
        while records.len() < BATCH && bytes < BATCH_BYTES {
            let Some(item) = self.ring.next() else {
                more = false;
                break;
            };
            bytes += item.len();
            self.joiner.take(&item, &mut records);
        }
        if self.stopped && !more {
            self.joiner.finish(&mut records);
        }
        // Every tiding older than these samples is in its ring by now.
        self.read_tidings();
        for record in records {
            let time = match &record {
                Record::Sample(s) => s.time,
                Record::Code(_, time, _) => *time,
            };
            while self.pending.front().is_some_and(|t| t.time <= time) {
                self.tell_next(out);
            }
            match record {
                Record::Sample(s) => self.take(s, out),
                Record::Code(pid, _, copy) => out.push(Event::Code {
                    pid,
                    copy: Box::new(copy),
                }),
            }
        }
        if !more {
            while self.pending.front().is_some_and(|t| !tidings::waits(t, looked)) {
                self.tell_next(out);
            }
            self.times.read(false);
        }
        self.vary();
        Ok(more)
    }

    fn stop(&mut self) {
        self.stopped = true;
        if let Some(off_cpu) = &mut self.off_cpu {
            off_cpu.end(period(self.options.rate));
        }
        let _ = self.account_off_cpu(false); // it was written before
        self.events.stop();
        self.times.read(true);
    }

    fn open_intervals(&mut self) -> Vec<OpenInterval> {
        let open = self.off_cpu.as_mut().map(|off_cpu| std::mem::take(&mut off_cpu.open));
        open.unwrap_or_default()
    }

    fn counts(&self) -> Counts {
        Counts {
            cpu_time: if self.events.is_clock() { self.times.total() } else { 0 },
            delivered: self.delivered,
            lost: self.total(COUNT_LOST) + missed(&self.program),
            held: None,
        }
    }
}

/// Runs of the program that the kernel left out because another BPF program was running on that CPU.
fn missed(program: &OwnedFd) -> u64 {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", program.as_raw_fd())).unwrap_or_default();
    info.lines()
        .find_map(|l| l.strip_prefix("recursion_misses:")?.trim().parse().ok())
        .unwrap_or(0)
}
