//! Resident memory: the programs at changes of the kernel's counters, the account of each process, and which pages are there.
//!
//! How changes are found and sampled says sample/rss.h.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use aya::Ebpf;
use aya::maps::{Array, MapData, PerCpuArray, PerCpuValues};
use aya::programs::{PerfEvent, RawTracePoint, RawTracePointRunOptions, TestRun};
use rustc_hash::{FxHashMap, FxHashSet};

use super::errors::bpf_error;
use super::object;
use super::rss_budget::{Budget, BudgetTimes};
use super::sampling_events;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{PAGE, Pid};
use crate::profile::memory_over_time::{MemoryObserver, MemoryOverTime, ObservedMemory};
use crate::profile::resident::{MemoryChanges, MemoryPeak, ResidentMemory};
use crate::sys;
use crate::sys::perf::perf;
use crate::sys::procfs;

const LOAD: &str = "cannot load the BPF programs for resident memory";

/// `MAX_SPACES` of the program, ...
const MAX_SPACES: u32 = 256;
/// ... and those of one process, which may execute other programs: the last one is still there while the next one begins.
const SPACES_OF_ONE: u32 = 8;
/// `ENDED` of it.
const ENDED: u64 = 1;
/// `GAP_BITS` of it.
const GAP_BITS: u32 = 12;
/// Kinds of memory that the kernel counts: of files, anonymous, swap entries, shared.
const MEMBERS: usize = 4;
const FILE: usize = 0;
const ANONYMOUS: usize = 1;
const SHARED: usize = 3;

/// Entries of `LOST`.
const LOST_RANGES: u32 = 0;
const LOST_SPACES: u32 = 1;

/// Results of `begin_space`.
const BEGUN: u32 = 0;
const UNKNOWN_KERNEL: u32 = 1;
const NO_ROOM: u32 = 2;
const CHANGED: u32 = 3;
/// Shortest time between two observations of one process, and of several, ns: reading the counters of many takes a while.
const OBSERVATION_INTERVAL: u64 = 10_000_000;
const LONG_OBSERVATION_INTERVAL: u64 = 200_000_000;
const OBSERVED: [ObservedMemory; 3] = [ObservedMemory::Anonymous, ObservedMemory::File, ObservedMemory::Shared];
/// How often the counters of a process may be read, while they change.
const MAX_READS: usize = 100;

/// `struct space` as words: address, process, samples, heap, common counts, parts of counters, counts at the start;
/// when it began, all pages, the peak, its time, whether memory is growing since.
type Space = [u64; 4 + 3 * MEMBERS + 5];
const SPACE_PID: usize = 1;
const SPACE_START: usize = 4 + 2 * MEMBERS;
const SPACE_BEGAN: usize = SPACE_START + MEMBERS;
const SPACE_PEAK: usize = SPACE_BEGAN + 2;
const SPACE_PEAK_TIME: usize = SPACE_PEAK + 1;
const SPACE_IS_RISING: usize = SPACE_PEAK + 2;

/// `struct space_part` as words: distances and offset, four amounts of each member, parts of counters, the last range,
/// what is not posted, doublings.
type SpacePart = [u64; 3 + 4 * MEMBERS + MEMBERS / 2 + 8];
const GROWN: usize = 3;
const RETURNED: usize = GROWN + MEMBERS;
const OTHERS_GROWN: usize = RETURNED + MEMBERS;
const OTHERS_RETURNED: usize = OTHERS_GROWN + MEMBERS;

/// Programs and their events. An area that is filled at once may not be found.
const PROGRAMS: [(&str, &str); 2] = [("rss_changed", "rss_stat"), ("exec_rss", "sched_process_exec")];
const WITH_CHILDREN: (&str, &str) = ("fork_rss", "sched_process_fork");
const AREAS: (&str, &str) = ("area_found", "vm_unmapped_area");
/// The program that says whether page faults are to be noted, ...
const NOTES_FAULTS: &str = "notes_faults";
/// ... those that note them, and the one that does where the kernel has no such tracepoints.
const FAULTS: [(&str, &str); 2] = [("user_fault", "page_fault_user"), ("kernel_fault", "page_fault_kernel")];
const COUNTED_FAULTS: &str = "counted_fault";
const BEGIN: &str = "begin_rss";

/// Number of address spaces that are observed at the same time.
pub fn spaces(children: bool) -> u32 {
    if children { MAX_SPACES } else { SPACES_OF_ONE }
}

/// The programs for resident memory.
pub struct Rss {
    spaces: Array<MapData, Space>,
    parts: PerCpuArray<MapData, SpacePart>,
    taken: Array<MapData, u64>,
    lost: PerCpuArray<MapData, u64>,
    doubled: Array<MapData, u32>,
    budget: Budget,
    /// `Rss` of `smaps_rollup` when a process began to be observed, bytes; `None`: it could not be read.
    measured: FxHashMap<Pid, Option<u64>>,
    /// Of address spaces that have gone.
    ended: Vec<ResidentMemory>,
    /// Processes that there was no room for when they were attached to.
    refused: u64,
    over_time: MemoryObserver<{ OBSERVED.len() }>,
    /// When memory is observed next, ns.
    next_observation: u64,
    is_stopped: bool,
    /// The events of page faults, which end with these; none where there are tracepoints.
    _faults: Vec<OwnedFd>,
}

impl Rss {
    /// Loads and attaches the programs; `interval` in bytes, `max_overhead`: the part of the processes' CPU time that
    /// taking stacks may use. Nothing is observed yet, but programs that processes execute from here on.
    ///
    /// # Errors
    /// The kernel refuses them, or counts in a way that is not known.
    pub fn attach(bpf: &mut Ebpf, interval: u64, max_overhead: f64, children: bool) -> Result<Rss> {
        let program: &mut RawTracePoint = object::program(bpf, BEGIN)?;
        program.load().map_err(|e| bpf_error(LOAD, e))?;
        let map_error = |e| bpf_error(LOAD, e);
        let mut gaps: Array<MapData, u64> = object::take_map(bpf, "GAPS")?.try_into().map_err(map_error)?;
        for (at, gap) in (0..).zip(gaps_between(interval)) {
            gaps.set(at, gap, 0).map_err(map_error)?;
        }
        let areas: &mut RawTracePoint = object::program(bpf, AREAS.0)?;
        areas.load().map_err(|e| bpf_error(LOAD, e))?;
        // Without it, what is still resident is not known of some memory.
        let _ = areas.attach(AREAS.1);
        let faults = note_faults(bpf)?;
        let with_children = children.then_some(WITH_CHILDREN);
        for (name, event) in PROGRAMS.into_iter().chain(with_children) {
            let program: &mut RawTracePoint = object::program(bpf, name)?;
            program.load().map_err(|e| bpf_error(LOAD, e))?;
            program.attach(event).map_err(|e| bpf_error(LOAD, e))?;
        }
        let mut rss = Rss {
            spaces: object::take_map(bpf, "SPACES")?.try_into().map_err(map_error)?,
            parts: object::take_map(bpf, "SPACE_PARTS")?.try_into().map_err(map_error)?,
            taken: object::take_map(bpf, "TAKEN")?.try_into().map_err(map_error)?,
            lost: object::take_map(bpf, "LOST")?.try_into().map_err(map_error)?,
            doubled: object::take_map(bpf, "DOUBLED")?.try_into().map_err(map_error)?,
            budget: Budget::new(interval, max_overhead),
            measured: FxHashMap::default(),
            ended: Vec::new(),
            refused: 0,
            over_time: MemoryObserver::new(OBSERVED),
            next_observation: 0,
            is_stopped: false,
            _faults: faults,
        };
        // Our own process: so a kernel that counts in another way is refused now.
        let own = std::process::id();
        rss.begin(bpf, own)?;
        rss.remove_process(own);
        rss.ended.clear();
        Ok(rss)
    }

    /// Begins to observe a process that runs.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`; `Unsupported`: the kernel counts in a way that is not known.
    pub fn begin(&mut self, bpf: &Ebpf, pid: Pid) -> Result<()> {
        const WHAT: &str = "cannot observe resident memory";
        let pagemap = File::open(format!("/proc/{pid}/pagemap")).map_err(|e| match e.raw_os_error() {
            // ESRCH: it has no memory any more, but its parent has not waited for it yet.
            Some(libc::ENOENT | libc::ESRCH) => Error::no_process(pid),
            _ => Error::io(WHAT, e),
        })?;
        let program: &RawTracePoint = bpf
            .program(BEGIN)
            .and_then(|program| program.try_into().ok())
            .ok_or_else(|| Error::new(ErrorKind::Data, WHAT))?;
        let mut result = CHANGED;
        for _ in 0..MAX_READS {
            let mut options = RawTracePointRunOptions::new();
            options.args[0] = pagemap.as_raw_fd() as u64;
            options.args[1] = pid.into();
            result = program.test_run(options).map_err(|e| bpf_error(WHAT, e))?.return_value;
            if result != CHANGED {
                break;
            }
        }
        match result {
            BEGUN => {}
            NO_ROOM => self.refused += 1,
            UNKNOWN_KERNEL => {
                return Err(Error::new(ErrorKind::Unsupported, WHAT)
                    .why("this kernel counts resident memory in a way that is not known")
                    .hint(
                        "omit --mode to sample CPU time, and please report this with the output of `nativeprof doctor`",
                    ));
            }
            _ if matches!(procfs::stat_state(pid), None | Some('Z' | 'X')) => return Err(Error::no_process(pid)),
            _ => {
                return Err(Error::new(ErrorKind::Unsupported, WHAT)
                    .why("the counters of the process were not found in the kernel")
                    .hint(
                        "omit --mode to sample CPU time, and please report this with the output of `nativeprof doctor`",
                    ));
            }
        }
        self.measured.insert(pid, procfs::rss(pid));
        Ok(())
    }

    /// Keeps the budget; `used`: the time that taking stacks has used so far, and the processes' CPU time, ns.
    pub fn keep_budget(&mut self, used: BudgetTimes) {
        if self.budget.adapt(used) {
            let _ = self.doubled.set(0, self.budget.doubled, 0); // it is there
        }
    }

    /// Takes note of a sample; `doubled`: how often the interval was doubled that it was chosen at.
    pub fn count_sample(&mut self, doubled: u32) {
        self.budget.count(doubled);
    }

    /// Which share of the samples was taken, as text; `None`: all were.
    pub fn sampling_remark(&self) -> Option<String> {
        self.budget.remark()
    }

    /// A process that executes a program: its counters begin at the programs of the kernel.
    pub fn begin_at_exec(&mut self, pid: Pid) {
        self.measured.remove(&pid);
        // Its place is needed: a process may execute programs again and again.
        let accounts = self.take_accounts(|space| space[SPACE_PID] == u64::from(pid) && space[0] == ENDED);
        self.ended.extend(accounts);
    }

    /// Takes the account of a process that has ended.
    pub fn remove_process(&mut self, pid: Pid) {
        let accounts = self.take_accounts(|space| space[SPACE_PID] == u64::from(pid));
        self.ended.extend(accounts);
        self.measured.remove(&pid);
    }

    /// Observes how much memory there is now (ns), if it is time.
    pub fn observe(&mut self, now: u64) {
        if self.is_stopped || now < self.next_observation {
            return;
        }
        let interval = if self.spaces.len() > SPACES_OF_ONE {
            LONG_OBSERVATION_INTERVAL
        } else {
            OBSERVATION_INTERVAL
        };
        // Of a long recording, few points are kept.
        self.next_observation = now + interval.max(self.over_time.step() / 8);
        let mut sums = None;
        for at in 0..self.spaces.len() {
            let Ok(space) = self.spaces.get(&at, 0) else { continue };
            if space[0] <= ENDED {
                continue;
            }
            let Ok(parts) = self.parts.get(&at, 0) else { continue };
            let account = account(&space, &parts);
            let amounts = [account.anonymous.end(), account.file.end(), account.shared.end()];
            let sums = sums.get_or_insert([0u64; OBSERVED.len()]);
            for (sum, amount) in sums.iter_mut().zip(amounts) {
                *sum = sum.saturating_add(amount);
            }
        }
        // Where no process is left, there is nothing to observe.
        if let Some(sums) = sums {
            self.over_time.add(now, sums);
        }
    }

    /// What was observed; once.
    pub fn take_over_time(&mut self) -> MemoryOverTime {
        std::mem::replace(&mut self.over_time, MemoryObserver::new(OBSERVED)).finish()
    }

    /// Stops now (ns): what changes from here on is not counted.
    pub fn stop(&mut self, now: u64) {
        self.next_observation = 0;
        self.observe(now);
        self.is_stopped = true;
        let mut observed: FxHashSet<Pid> = (0..self.spaces.len())
            .filter_map(|at| self.spaces.get(&at, 0).ok())
            .filter(|space| space[0] > ENDED)
            .map(|space| space[SPACE_PID] as Pid)
            .collect();
        let mut ended = std::mem::take(&mut self.ended);
        ended.extend(self.take_accounts(|_| true));
        // Of several programs of one process, the last one is what was measured.
        for account in ended.iter_mut().rev() {
            if !observed.remove(&account.pid) {
                continue;
            }
            // By its counters, where the process has executed its program since the recording began.
            let start = self.measured.get(&account.pid).copied();
            let start = start.unwrap_or(Some(account.total().start));
            account.measured = start.zip(procfs::rss(account.pid));
        }
        self.ended = ended;
    }

    /// The accounts, by process and program.
    pub fn accounts(&mut self) -> Vec<ResidentMemory> {
        std::mem::take(&mut self.ended)
    }

    /// The accounts while memory still changes: of address spaces that have gone, and then of those that are observed.
    pub fn accounts_so_far(&self) -> Vec<ResidentMemory> {
        let observed = (0..self.spaces.len()).filter_map(|at| {
            let (space, parts) = (self.spaces.get(&at, 0).ok()?, self.parts.get(&at, 0).ok()?);
            (space[0] != 0).then(|| account(&space, &parts))
        });
        self.ended.iter().copied().chain(observed).collect()
    }

    /// Limits that were exceeded, as text.
    pub fn exceeded(&self) -> Vec<String> {
        let lost = |what: u32| self.lost.get(&what, 0).map_or(0, |lost| lost.iter().sum::<u64>());
        let ranges = lost(LOST_RANGES);
        let ranges = (ranges > 0).then(|| {
            format!("{ranges} ranges of memory that was given back were lost: less may be resident than rss_bytes says")
        });
        let refused = self.refused + lost(LOST_SPACES);
        let refused = (refused > 0).then(|| {
            let room = self.spaces.len();
            format!(
                "resident memory of {refused} processes was not observed: there is room for {room} at the same time"
            )
        });
        ranges.into_iter().chain(refused).collect()
    }

    /// Removes the address spaces that are meant, and returns their accounts: those that have ended first.
    fn take_accounts(&mut self, is_meant: impl Fn(&Space) -> bool) -> Vec<ResidentMemory> {
        let (mut ended, mut observed) = (Vec::new(), Vec::new());
        for at in 0..self.spaces.len() {
            let Ok(space) = self.spaces.get(&at, 0) else { continue };
            if space[0] == 0 || !is_meant(&space) {
                continue;
            }
            // First, so that nothing more is counted; its place is free in the end, when nothing of it is left.
            let _ = self.spaces.set(at, [0; size_of::<Space>() / 8], 0); // it is there
            let Ok(parts) = self.parts.get(&at, 0) else { continue };
            let accounts = if space[0] == ENDED { &mut ended } else { &mut observed };
            accounts.push(account(&space, &parts));
            let zero = PerCpuValues::try_from(vec![[0; size_of::<SpacePart>() / 8]; parts.len()]);
            let _ = zero.map(|zero| self.parts.set(at, zero, 0)); // as many as there were
            let _ = self.taken.set(at, 0, 0); // it is there
        }
        ended.append(&mut observed);
        ended
    }
}

/// Has each page fault of the machine noted, if this kernel needs it; returns the events.
fn note_faults(bpf: &mut Ebpf) -> Result<Vec<OwnedFd>> {
    let program: &mut RawTracePoint = object::program(bpf, NOTES_FAULTS)?;
    program.load().map_err(|e| bpf_error(LOAD, e))?;
    let options = RawTracePointRunOptions::new();
    let is_needed = program.test_run(options).map_err(|e| bpf_error(LOAD, e))?.return_value;
    if is_needed == 0 {
        return Ok(Vec::new());
    }
    for (name, event) in FAULTS {
        let program: &mut RawTracePoint = object::program(bpf, name)?;
        program.load().map_err(|e| bpf_error(LOAD, e))?;
        if program.attach(event).is_err() {
            return counted_faults(bpf);
        }
    }
    Ok(Vec::new())
}

/// Runs the program at each page fault of the machine; returns the events.
fn counted_faults(bpf: &mut Ebpf) -> Result<Vec<OwnedFd>> {
    const FAILED: &str = "cannot observe page faults";
    let program: &mut PerfEvent = object::program(bpf, COUNTED_FAULTS)?;
    program.load().map_err(|e| bpf_error(LOAD, e))?;
    let mut attr = perf::perf_event_attr {
        type_: perf::PERF_TYPE_SOFTWARE,
        config: perf::PERF_COUNT_SW_PAGE_FAULTS.into(),
        ..Default::default()
    };
    attr.__bindgen_anon_1.sample_period = 1;
    attr.set_disabled(1);
    let events = sampling_events::on_each_cpu(&mut attr, FAILED, FAILED)?;
    let program = program.fd().map_err(|e| bpf_error(LOAD, e))?;
    for event in &events {
        sys::perf::perf_set_bpf(event.as_fd(), program.as_fd()).map_err(|e| Error::io(FAILED, e))?;
        sys::perf::perf_enable(event.as_fd()).map_err(|e| Error::io(FAILED, e))?;
    }
    Ok(events)
}

/// The account of an address space, in bytes.
fn account(space: &Space, parts: &PerCpuValues<SpacePart>) -> ResidentMemory {
    let bytes = |pages: u64| (pages as i64).max(0) as u64 * PAGE;
    let sum = |at: usize| bytes(parts.iter().fold(0, |sum: u64, part| sum.wrapping_add(part[at])));
    let changes = |member: usize| MemoryChanges {
        start: bytes(space[SPACE_START + member]),
        grown: sum(GROWN + member),
        returned: sum(RETURNED + member),
        grown_by_others: sum(OTHERS_GROWN + member),
        returned_by_others: sum(OTHERS_RETURNED + member),
    };
    let memory = ResidentMemory {
        pid: space[SPACE_PID] as Pid,
        measured: None,
        anonymous: changes(ANONYMOUS),
        file: changes(FILE),
        shared: changes(SHARED),
        began: space[SPACE_BEGAN],
        peak: None,
    };
    // What is not posted is missing in the peak: it is not less than what there is now.
    let (now, total) = (sys::clock::now(), memory.total());
    let noted = bytes(space[SPACE_PEAK]);
    let peak = match space[SPACE_IS_RISING] {
        0 if noted >= total.end() || space[0] == ENDED => MemoryPeak {
            bytes: noted.max(total.start),
            time: space[SPACE_PEAK_TIME],
        },
        _ => MemoryPeak {
            bytes: noted.max(total.end()).max(total.start),
            time: now,
        },
    };
    ResidentMemory {
        peak: Some(peak),
        ..memory
    }
}

/// The table `GAPS`: quantiles of the exponential distribution with the mean `interval`, bytes; the last entry stands for the
/// tail.
fn gaps_between(interval: u64) -> Vec<u64> {
    let cells = 1u32 << GAP_BITS;
    let mean = interval as f64;
    let quantile = |at: u32| -mean * (1.0 - f64::from(at) / f64::from(cells)).ln();
    // What is beyond the last quantile is as long again on average.
    let tail = quantile(cells - 1) + 2.0 * mean;
    (0..cells).map(quantile).chain([tail]).map(|gap| gap as u64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_exponential() {
        let interval = 1 << 19;
        let gaps = gaps_between(interval);
        assert_eq!((gaps.len(), gaps[0]), (1 + (1 << GAP_BITS), 0));
        assert!(gaps.is_sorted());
        // Between two entries, all distances are as likely.
        let middles = gaps.windows(2).map(|pair| (pair[0] + pair[1]) as f64 / 2.0);
        let mean = middles.sum::<f64>() / f64::from(1 << GAP_BITS);
        assert!((mean / interval as f64 - 1.0).abs() < 1e-3, "{mean}");
        // The probability that a page has a point of the clock.
        let below = gaps.iter().position(|gap| *gap > PAGE).expect("longer gaps");
        let expected = -(-(PAGE as f64) / interval as f64).exp_m1();
        assert!((below as f64 / f64::from(1 << GAP_BITS) - expected).abs() < 1.0 / f64::from(1 << GAP_BITS));
    }
}
