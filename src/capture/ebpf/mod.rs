//! Sampling with perf events and a BPF program: the default backend.
//!
//! One perf event per thread makes the program run in the context of that thread, which takes the whole snapshot
//! (sample.bpf.c). New threads inherit event and program; what is known of a process is handed to its forked children
//! in the kernel. Another event per CPU tells of mappings, forks, execs
//! and exits. Samples and those tidings are put in order of time here.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};
use std::{fs, io};

use aya::maps::{Array, HashMap as BpfHash, MapData, PerCpuArray, RingBuf};
use aya::programs::{PerfEvent, RawTracePoint};
use aya::{Ebpf, EbpfLoader};
use rustc_hash::{FxHashMap, FxHashSet};

use super::ring::Ring;
use super::tidings::{self, Tiding};
use super::{Clock, Counts, Options, Source};
use crate::error::{Error, Kind, Result};
use crate::layout::Space;
use crate::process;
use crate::process::rights;
use crate::process::sys::{self, perf};
use crate::sample::{Event, Pid, Tid};

// Public for fuzz/.
#[doc(hidden)]
pub mod record;

const OBJECT: &[u8] = include_bytes!("sample.bpf.o");
/// Bytes of the sample ring: some 20 ms of the deepest stacks on two CPUs, minutes of ordinary ones.
const RING_BYTES: u32 = 32 << 20;
/// Pages of each CPU's ring of tidings.
const TIDINGS_PAGES: usize = 64;
/// Longest time between two looks at the rings: bounds how old a code object may be when its name is read.
const LOOK: Duration = Duration::from_millis(10);
/// Of so many samples one is left out, at random, and the timer is that much faster (see sample.bpf.c).
const LEAVE_OUT: u32 = 27;

/// Ticks of the timer for one sample. A tick that is not taken costs the target 2 us on some machines, 13 us on others
/// (virtual ones, where the host sets the timer).
///
/// More are better: what a sample costs delays the program, and where part of a loop is dearer to sample than the rest,
/// what comes one tick after its begin is seen too often, and what comes after its end too seldom. Nor can the time between
/// ticks be another one for each thread: a new thread inherits that of its creator for life, and the kernel swaps the
/// events of threads that inherited them (kernel/events/core.c, perf_event_context_sched_out).
fn ticks(rate: u64) -> u32 {
    match rate {
        0..=2000 => 2,
        _ => 1, // where stacks are deep, a sample may take as long as two ticks would be apart
    }
}

/// Time between ticks, ns: so short that the rate is the one asked for when only some of the ticks are taken.
fn period(rate: u64) -> u64 {
    let (left, ticks) = (u64::from(LEAVE_OUT), u64::from(ticks(rate)));
    let period = 1_000_000_000 * (left - 1) / (left * ticks * rate.max(1));
    period.max(1)
}

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
    follow_forks: u32,
    ticks: u32,
    leave_out: u32,
}

// SAFETY: seven plain integers, no padding, any bit pattern is valid.
unsafe impl aya::Pod for Facts {}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct LayoutBytes([u8; record::LAYOUT_SIZE]);

// SAFETY: plain bytes.
unsafe impl aya::Pod for LayoutBytes {}

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

/// A thread's sampling event.
struct Attached {
    event: OwnedFd,
    time: u64,
}

pub struct EbpfSource {
    _bpf: Ebpf,
    program: OwnedFd,
    ring: RingBuf<MapData>,
    procs: BpfHash<MapData, u32, LayoutBytes>,
    nested: BpfHash<MapData, NestedKey, [u64; NESTED]>,
    nested_of: FxHashMap<Pid, Vec<NestedKey>>,
    counts: PerCpuArray<MapData, u64>,
    options: Options,
    attr: perf::perf_event_attr,
    clock_name: &'static str,
    is_clock: bool,
    tidings: Vec<Ring>,
    pending: VecDeque<Tiding>,
    lost_tidings: u64,
    known: FxHashSet<Pid>,
    attached: FxHashMap<Tid, Attached>,
    delivered: u64,
    on_exec: bool,
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
        let mut bpf = EbpfLoader::new()
            .map_max_entries("SCRATCH", sys::cpu_count() as u32)
            .map_max_entries("CACHE", sys::cpu_count() as u32)
            .map_max_entries("SAMPLES", RING_BYTES)
            .load(OBJECT)
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
        f.follow_forks = options.children.into();
        let (attr, clock_name, is_clock) = clock(options)?;
        (f.ticks, f.leave_out) = if is_clock {
            (ticks(options.rate), LEAVE_OUT)
        } else {
            (0, 0)
        };
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
        let mut source = EbpfSource {
            _bpf: bpf,
            program,
            ring,
            procs,
            nested,
            nested_of: FxHashMap::default(),
            counts,
            options: options.clone(),
            attr,
            clock_name,
            is_clock,
            tidings: Vec::new(),
            pending: VecDeque::new(),
            lost_tidings: 0,
            known: FxHashSet::default(),
            attached: FxHashMap::default(),
            delivered: 0,
            on_exec: false,
            joiner: record::Joiner::default(),
            stopped: false,
        };
        source.open_tidings()?;
        Ok(source)
    }

    /// Mappings, forks, execs and exits of the whole machine, from one event per CPU. (Per-thread events that are
    /// inherited cannot have a ring of their own.)
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
        for cpu in 0..sys::cpu_count() {
            let event = match sys::perf_event_open(&mut attr, -1, cpu as i32) {
                Ok(event) => event,
                Err(e) if e.raw_os_error() == Some(libc::ENODEV) => continue, // CPU is off
                Err(e) if e.raw_os_error() == Some(libc::EACCES) => {
                    return Err(not_permitted("cannot watch mappings and forks", &e));
                }
                Err(e) => return Err(Error::io("cannot watch mappings and forks", e)),
            };
            let ring = Ring::new(event, TIDINGS_PAGES).map_err(|e| match e.kind() {
                io::ErrorKind::PermissionDenied => not_permitted("cannot map the ring of mappings and forks", &e),
                _ => Error::io("cannot map the ring of mappings and forks", e),
            })?;
            self.tidings.push(ring);
        }
        Ok(())
    }

    fn inherits(&self, tid: Tid) -> bool {
        self.pending.iter().any(|t| {
            let made = match t.event {
                Event::Thread { tid: made, .. } => made == tid,
                Event::Fork { pid, .. } => pid == tid,
                _ => false,
            };
            made && self.attached.get(&t.maker).is_some_and(|a| a.time < t.time)
        })
    }

    fn attach_thread(&mut self, tid: Tid, on_exec: bool) -> Result<bool> {
        let mut attr = self.attr;
        attr.set_enable_on_exec(on_exec.into());
        let mut opened = sys::perf_event_open(&mut attr, tid as i32, -1);
        if matches!(&opened, Err(e) if e.raw_os_error() == Some(libc::EINVAL)) && attr.inherit_thread() != 0 {
            // Before Linux 5.13 children of a fork inherit too; the BPF program drops what it does not know.
            attr.set_inherit_thread(0);
            opened = sys::perf_event_open(&mut attr, tid as i32, -1);
        }
        let event = match opened {
            Ok(event) => event,
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Ok(false), // it has ended
            Err(e) if e.raw_os_error() == Some(libc::EACCES) || e.raw_os_error() == Some(libc::EPERM) => {
                return Err(not_permitted(&format!("cannot sample thread {tid}"), &e));
            }
            Err(e) if e.raw_os_error() == Some(libc::EMFILE) => {
                return Err(Error::io(format!("cannot sample thread {tid}"), e)
                    .hint("raise the limit of open files: ulimit -Hn 1048576"));
            }
            Err(e) => {
                return Err(Error::io(
                    format!("cannot sample thread {tid} with {}", self.clock_name),
                    e,
                ));
            }
        };
        sys::perf_set_bpf(event.as_fd(), self.program.as_fd())
            .map_err(|e| Error::io("cannot attach the BPF program", e))?;
        self.attached.insert(
            tid,
            Attached {
                event,
                time: sys::now(),
            },
        );
        Ok(true)
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
                    self.known.insert(pid);
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
}

/// The event that makes samples due, its name, and whether its count is CPU time in ns.
fn clock(options: &Options) -> Result<(perf::perf_event_attr, &'static str, bool)> {
    let mut attr = perf::perf_event_attr {
        clockid: libc::CLOCK_MONOTONIC,
        ..Default::default()
    };
    attr.set_disabled(1);
    attr.set_inherit(1);
    attr.set_inherit_thread((!options.children).into());
    let (kind, config, name) = match options.event {
        Clock::Cycles => (perf::PERF_TYPE_HARDWARE, perf::PERF_COUNT_HW_CPU_CYCLES, "cycles"),
        Clock::Auto if has_cycles() => (perf::PERF_TYPE_HARDWARE, perf::PERF_COUNT_HW_CPU_CYCLES, "cycles"),
        Clock::Auto | Clock::CpuClock => (perf::PERF_TYPE_SOFTWARE, perf::PERF_COUNT_SW_CPU_CLOCK, "cpu-clock"),
        Clock::PageFaults => (perf::PERF_TYPE_SOFTWARE, perf::PERF_COUNT_SW_PAGE_FAULTS, "page-faults"),
        Clock::ContextSwitches => (
            perf::PERF_TYPE_SOFTWARE,
            perf::PERF_COUNT_SW_CONTEXT_SWITCHES,
            "context-switches",
        ),
    };
    attr.type_ = kind;
    attr.config = config.into();
    if name == "cpu-clock" {
        attr.__bindgen_anon_1.sample_period = period(options.rate);
    } else {
        attr.set_freq(1);
        attr.__bindgen_anon_1.sample_freq = options.rate.max(1);
    }
    if options.event == Clock::Cycles && !has_cycles() {
        return Err(Error::new(Kind::Unsupported, "the event cycles cannot be counted here")
            .why("this machine (perhaps a virtual one) offers no hardware counters")
            .hint("leave --event out, or say --event cpu-clock"));
    }
    Ok((attr, name, name == "cpu-clock"))
}

fn has_cycles() -> bool {
    let mut attr = perf::perf_event_attr {
        type_: perf::PERF_TYPE_HARDWARE,
        config: perf::PERF_COUNT_HW_CPU_CYCLES.into(),
        ..Default::default()
    };
    attr.set_disabled(1);
    sys::perf_event_open(&mut attr, 0, -1).is_ok()
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
        self.clock_name
    }

    fn attach(&mut self, pid: Pid) -> Result<()> {
        self.known.insert(pid);
        // Threads may be made while we look. One made by a thread that is attached has its event from birth.
        for _ in 0..1000 {
            self.read_tidings();
            let mut new = false;
            for tid in process::threads(pid) {
                if self.attached.contains_key(&tid) || self.inherits(tid) {
                    continue;
                }
                new |= self.attach_thread(tid, false)?;
            }
            if !new {
                return Ok(());
            }
        }
        Ok(())
    }

    fn attach_at_exec(&mut self, pid: Pid) -> Result<()> {
        self.known.insert(pid);
        self.on_exec = true;
        self.attach_thread(pid, true).map(drop)
    }

    fn learn(&mut self, pid: Pid, space: &Space) -> Result<()> {
        const WHAT: &str = "cannot tell the BPF program of a process";
        self.known.insert(pid);
        self.procs
            .insert(pid, LayoutBytes(record::encode(space)), 0)
            .map_err(|e| bpf_error(WHAT, e))?;
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
            self.nested.insert(key, value, 0).map_err(|e| bpf_error(WHAT, e))?;
            self.nested_of.entry(pid).or_default().push(key);
        }
        Ok(())
    }

    fn forget(&mut self, pid: Pid) {
        self.known.remove(&pid);
        let _ = self.procs.remove(&pid); // absent: nothing to forget
        self.forget_nested(pid);
    }

    fn start(&mut self) -> Result<()> {
        if !self.on_exec {
            for a in self.attached.values() {
                sys::perf_enable(a.event.as_fd()).map_err(|e| Error::io("cannot start sampling", e))?;
            }
        }
        Ok(())
    }

    fn poll(&mut self, wait: Duration, out: &mut Vec<Event>) -> Result<bool> {
        let mut fds = vec![self.ring.as_fd()];
        fds.extend(self.tidings.iter().map(Ring::event));
        sys::poll(&fds, wait.min(LOOK)).map_err(|e| Error::io("cannot wait for samples", e))?;
        let mut samples = Vec::new();
        let (mut more, mut bytes) = (true, 0);
        while samples.len() < BATCH && bytes < BATCH_BYTES {
            let Some(item) = self.ring.next() else {
                more = false;
                break;
            };
            bytes += item.len();
            self.joiner.take(&item, &mut samples);
        }
        if self.stopped && !more {
            self.joiner.finish(&mut samples);
        }
        // Every tiding older than these samples is in its ring by now.
        self.read_tidings();
        self.delivered += samples.len() as u64;
        for s in samples {
            while self.pending.front().is_some_and(|t| t.time <= s.time) {
                out.extend(self.pending.pop_front().map(|t| t.event));
            }
            out.push(Event::Sample(Box::new(s)));
        }
        if !more {
            out.extend(self.pending.drain(..).map(|t| t.event));
        }
        Ok(more)
    }

    fn stop(&mut self) {
        self.stopped = true;
        for a in self.attached.values() {
            let _ = sys::perf_disable(a.event.as_fd()); // a thread that has ended needs no stopping
        }
    }

    fn counts(&self) -> Counts {
        let cpu_time = if self.is_clock {
            self.attached
                .values()
                .filter_map(|a| sys::read_count(a.event.as_fd()).ok())
                .sum()
        } else {
            0
        };
        let total = |i| self.counts.get(&i, 0).map(|v| v.iter().sum::<u64>()).unwrap_or(0);
        const LOST: u32 = 1;
        Counts {
            cpu_time,
            delivered: self.delivered,
            lost: total(LOST) + missed(&self.program),
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
