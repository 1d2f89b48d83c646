//! Opening the backend: loads the program, calibrates it for this kernel, and opens the events.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use aya::Ebpf;
use aya::maps::{Array, MapData, RingBuf};
use aya::programs::{PerfEvent, RawTracePoint};
use rustc_hash::{FxHashMap, FxHashSet};

use super::allocations::PublishedAllocations;
use super::cpu_time::CpuTimes;
use super::errors::{bpf_error, not_permitted};
use super::host_rules::HostRules;
use super::interpreter_locks::InterpreterLockMap;
use super::nested_states::NestedStateMap;
use super::object::{self, LOAD, MapSizes, Variant};
use super::off_cpu::{self, OffCpu};
use super::program_map::ProgramMap;
use super::recent_programs::RecentPrograms;
use super::rss::{self, Rss};
use super::sample_ring::SampleRing;
use super::sampling_events::CpuEvents;
use super::sideband_rings::SidebandRings;
use super::{EbpfBackend, KernelFacts, StackReassembler, host_rules, switch_in, workers};
use crate::capture::common::jitter::period;
use crate::capture::{EventKind, HostFilter, Mode, SamplingOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::privileges::checks;
use crate::sys;
use crate::sys::perf::perf;

const REPORT: &str = "use --backend ptrace, and please report this with the output of `nativeprof doctor`";

/// Name of the thread that calibrates: as long as names of threads can be, so that all bytes of it are known.
const CALIBRATOR: &str = "nativeprof-find";

impl EbpfBackend {
    /// Loads the program and opens the sideband events; samples nothing yet.
    ///
    /// # Errors
    /// Missing privileges (named), or a kernel that cannot run the program.
    pub fn new(options: &SamplingOptions) -> Result<EbpfBackend> {
        if let Some(missing) = checks::ebpf(&checks::SystemFacts::read()).into_iter().next() {
            return Err(missing.error("sampling with eBPF is not permitted"));
        }
        options.host.as_ref().map_or(Ok(()), host_rules::check_kernel)?;
        let cpus = sys::process::cpu_count() as u32;
        let variants = Variant::candidates()?;
        let mut sizes = MapSizes {
            slots: cpus,
            threads: 1,
            workers: if options.workers { workers::MAX_WORKERS } else { 0 },
            spans: options.spans,
            spaces: if options.mode == Mode::Rss {
                rss::spaces(options.children)
            } else {
                0
            },
            host_rules: options.host.as_ref().map_or(0, HostFilter::kinds),
        };
        let notes_forks = options.children || options.host.is_some();
        if options.mode == Mode::Alloc {
            sizes.slots += off_cpu::MAX_WORKS;
        }
        let is_of_time_off_cpu = matches!(options.mode, Mode::OffCpu | Mode::Wall);
        let (object::LoadedObject { mut bpf, refusal }, hook) = if !is_of_time_off_cpu {
            (object::load_first(variants, sizes, notes_forks)?, None)
        } else {
            sizes.slots += off_cpu::MAX_WORKS;
            sizes.threads = off_cpu::MAX_THREADS;
            let switch_in::LoadedSwitchIn { bpf, hook, missing } = switch_in::load_first(variants, sizes, notes_forks)?;
            (object::LoadedObject { bpf, refusal: None }, Some((hook, missing)))
        };
        let fd = |bpf: &Ebpf, name: &str| -> Result<OwnedFd> {
            let program: &PerfEvent = bpf.program(name).and_then(|p| p.try_into().ok()).expect("loaded above");
            let fd = program.fd().map_err(|e| bpf_error(LOAD, e))?;
            fd.as_fd().try_clone_to_owned().map_err(|e| Error::io(LOAD, e))
        };
        let (program, calibrator) = (fd(&bpf, "sample")?, fd(&bpf, "calibrate")?);
        let mut take = |name: &str| object::take_map(&mut bpf, name);
        let map_error = |e| bpf_error(LOAD, e);
        let mut facts: Array<MapData, KernelFacts> = take("FACTS")?.try_into().map_err(map_error)?;
        let mut known_pointer: Array<MapData, u64> = take("CALIBRATE")?.try_into().map_err(map_error)?;
        let ring = RingBuf::try_from(take("SAMPLES")?).map_err(map_error)?;
        let procs = take("PROCS")?.try_into().map_err(map_error)?;
        let nested = NestedStateMap::new(take("NESTED_STATES")?)?;
        let running = take("RUNNING_TASKS")?.try_into().map_err(map_error)?;
        let spans = take("SPANS")?.try_into().map_err(map_error)?;
        let counts = take("COUNTS")?.try_into().map_err(map_error)?;
        let rules = match &options.host {
            Some(filter) => Some(HostRules::new(take("RULES")?, filter)?),
            None => None,
        };
        let programs = match &options.host {
            Some(_) => Some(ProgramMap::new(take("PROGRAMS")?)?),
            None => None,
        };
        let locks = InterpreterLockMap::new(take("INTERPRETER_LOCKS")?)?;
        // On another thread than the main one: where process and thread ID are equal, other fields hold the same
        // values.
        std::thread::scope(|s| {
            let calibrating = std::thread::Builder::new()
                .name(CALIBRATOR.into())
                .spawn_scoped(s, || calibrate(&calibrator, &mut known_pointer, &mut facts))
                .map_err(|e| Error::not_started("cannot start the thread that calibrates eBPF", e))?;
            calibrating.join().unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::Data, "the thread that calibrates eBPF failed").hint(REPORT))
            })
        })?;
        let mut f = facts.get(&0, 0).map_err(map_error)?;
        let compares_names = options.host.as_ref().is_some_and(|filter| !filter.comms.is_empty());
        if compares_names && (f.leader == 0 || f.comm == 0) {
            return Err(Error::new(ErrorKind::Unsupported, "cannot compare the names of processes")
                .why("the first thread and its name were not found in the kernel's task structure")
                .hint("without --comm all processes are recorded: select with `report --comm`; or use --pid or --user"));
        }
        f.want_kernel = options.kernel.into();
        f.cpus = cpus;
        f.counted = matches!(options.event, EventKind::PageFaults | EventKind::ContextSwitches).into();
        f.wakers = options.off_cpu.wakers.into();
        f.min_blocked = options.off_cpu.min_blocked;
        facts.set(0, f, 0).map_err(map_error)?;
        let executed: &mut RawTracePoint = object::program(&mut bpf, "executed")?;
        executed
            .attach("sched_process_exec")
            .map_err(|e| bpf_error("cannot receive exec events", e))?;
        if notes_forks {
            let forked: &mut RawTracePoint = object::program(&mut bpf, "forked")?;
            forked
                .attach("sched_process_fork")
                .map_err(|e| bpf_error("cannot receive fork events", e))?;
        }
        let workers = if options.workers {
            Some(workers::attach(&mut bpf)?)
        } else {
            None
        };
        let events = CpuEvents::open(options, program.as_fd())?;
        let off_cpu = hook.map(|(hook, missing)| OffCpu::attach(&mut bpf, hook, missing));
        let off_cpu = off_cpu.transpose()?;
        let attach = || Rss::attach(&mut bpf, options.interval, options.max_overhead, options.children);
        let rss = (options.mode == Mode::Rss).then(attach);
        let rss = rss.transpose()?;
        let published = (options.mode == Mode::Alloc).then(|| PublishedAllocations::load(&mut bpf));
        let published = published.transpose()?;
        let sideband = SidebandRings::open()?;
        Ok(EbpfBackend {
            bpf,
            refusal,
            program,
            events,
            ring: SampleRing::new(ring),
            procs,
            nested,
            running,
            spans,
            facts,
            counts,
            options: options.clone(),
            sideband,
            pending: VecDeque::new(),
            lost_sideband: 0,
            known: FxHashSet::default(),
            removed: FxHashSet::default(),
            ended: FxHashMap::default(),
            // Samples of memory stand for no time.
            times: CpuTimes::new(if options.mode.is_of_memory() {
                0
            } else {
                period(options.rate)
            }),
            off_cpu,
            rss,
            published,
            locks,
            workers,
            rules,
            programs,
            recent: RecentPrograms::default(),
            delivered: 0,
            before_exec: None,
            reassembler: StackReassembler::default(),
            stopped: false,
        })
    }
}

/// Lets the program find fields of `task_struct`, by running it on a thread of ours whose values are known.
fn calibrate(
    program: &OwnedFd,
    known_pointer: &mut Array<MapData, u64>,
    facts: &mut Array<MapData, KernelFacts>,
) -> Result<()> {
    const WHAT: &str = "cannot calibrate the BPF program";
    known_pointer
        .set(0, sys::process::current_thread_pointer(), 0)
        .map_err(|e| bpf_error(WHAT, e))?;
    let mut attr = perf::perf_event_attr {
        type_: perf::PERF_TYPE_SOFTWARE,
        config: perf::PERF_COUNT_SW_CPU_CLOCK.into(),
        ..Default::default()
    };
    attr.__bindgen_anon_1.sample_period = 50_000;
    attr.set_disabled(1);
    let event = sys::perf::perf_event_open(&mut attr, sys::process::current_tid(), -1).map_err(|e| match e.kind() {
        io::ErrorKind::PermissionDenied => not_permitted(WHAT, &e),
        _ => Error::io(WHAT, e),
    })?;
    sys::perf::perf_set_bpf(event.as_fd(), program.as_fd()).map_err(|e| Error::io(WHAT, e))?;
    sys::perf::perf_enable(event.as_fd()).map_err(|e| Error::io(WHAT, e))?;
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(200) {
        for _ in 0..1000 {
            sys::process::enter_kernel();
        }
        let f = facts.get(&0, 0).map_err(|e| bpf_error(WHAT, e))?;
        if f.fsbase != 0 && f.stack != 0 {
            return Ok(());
        }
    }
    let f = facts.get(&0, 0).map_err(|e| bpf_error(WHAT, e))?;
    if f.fsbase == 0 {
        return Err(Error::new(ErrorKind::Unsupported, WHAT)
            .why("the thread pointer was not found in the kernel's task structure")
            .hint(REPORT));
    }
    Ok(()) // without the stack field the program searches for the user registers itself
}
