//! The state of a recording: events in, stacks counted in the raw tree. Calls the stages in order; names are resolved
//! at the end.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::{Duration, SystemTime};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::capture::{Backend, SampleCounts};
use crate::cpython::code_object::CodeTable;
use crate::cpython::frame_groups;
use crate::cpython_layout::TargetLayout;
use crate::edges::EdgeJudge;
use crate::error::Result;
use crate::event::{Event, Pid, Tid};
use crate::frame::{EvalGroups, ModuleId, NativeFrame, RawFrame};
use crate::interleave::StackQuality;
use crate::process::modules::Modules;
use crate::process::system::System;
use crate::profile::count_tree::{FramePath, RawTimelineSample, RawTree};
use crate::profile::model::{Meta, Profile, Quality, StopSummary};
use crate::profile::values::GIL_HOLDERS;
use crate::profile::waits::RawWaits;
use crate::resolve::naming::NamingProcess;
use crate::resolve::{self, Fetch, OpenFiles, ResolveInput};
use crate::sys;
use crate::truncation::Truncation;
use crate::unwind::{StackCache, Unwinder};

mod asyncio_search;
mod await_kind;
mod await_stack;
mod await_times;
mod awaits;
mod code_copies;
mod eval_calls;
mod futexes;
mod jit;
mod lags;
mod open_intervals;
mod other_awaits;
mod other_tasks;
pub mod pump;
mod recent;
mod sample;
mod sockets;
mod spans;
mod states;
mod targets;
mod tasks;
mod thread_ids;
mod thread_names;
mod wakers;
mod workers;

use awaits::Awaits;
use futexes::Futexes;
use jit::{JitShared, function_start, jit_sources};
use lags::Lags;
use sockets::Sockets;
use spans::Spans;
pub use states::GilCounts;
use states::GilLocks;
use targets::{ModuleInfo, TargetProcess};
use tasks::SampleTasks;
pub use tasks::TaskCounts;
use thread_ids::ThreadIds;
use thread_names::ThreadNames;
use wakers::{PendingWaker, WakerOptions, Wakers};
use workers::Dispatchers;

/// Levels between the root and the frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grouping {
    pub processes: bool,
    pub threads: bool,
}

/// How a session processes samples.
#[derive(Clone, Copy, Debug)]
pub struct SessionOptions {
    pub grouping: Grouping,
    /// Unwind native stacks; without it only Python (and kernel) frames remain.
    pub native: bool,
    /// Show the tasks that run: of asyncio and trio, and greenlets.
    pub tasks: bool,
    /// The sampling period, ns, if samples represent different amounts of time because off-CPU time is sampled, too.
    pub weighted: Option<u64>,
    /// Label samples by the spans that are active in them.
    pub spans: bool,
    /// With `spans`: also by the OpenTelemetry context that threads publish.
    pub thread_context: bool,
    /// Only samples of threads that hold the lock of their interpreter.
    pub gil_only: bool,
    /// List the callbacks of asyncio that keep their event loop for so long, ns.
    pub lag: Option<u64>,
    /// Samples of native workers name the thread that they work for.
    pub workers: bool,
}

impl Default for SessionOptions {
    /// Python and native frames, and nothing that has to be requested.
    fn default() -> SessionOptions {
        SessionOptions {
            grouping: Grouping::default(),
            native: true,
            tasks: false,
            spans: false,
            thread_context: false,
            weighted: None,
            gil_only: false,
            lag: None,
            workers: false,
        }
    }
}

/// Number of samples by quality of their stacks.
#[derive(Clone, Debug, Default)]
pub struct QualityCounts {
    pub exact: u64,
    pub repaired: u64,
    pub partial: u64,
    pub reasons: BTreeMap<Truncation, u64>,
}

impl QualityCounts {
    pub fn taken(&self) -> u64 {
        self.exact + self.repaired + self.partial
    }

    fn add(&mut self, quality: StackQuality) {
        match quality {
            StackQuality::Exact => self.exact += 1,
            StackQuality::Repaired => self.repaired += 1,
            StackQuality::Partial(why) => {
                self.partial += 1;
                *self.reasons.entry(why).or_default() += 1;
            }
        }
    }
}

/// All data gathered by a recording.
pub struct Session {
    pub system: Rc<dyn System>,
    options: SessionOptions,
    targets: FxHashMap<Pid, TargetProcess>,
    pub modules: Modules,
    /// What each module contains of Python and of the C library.
    module_info: FxHashMap<ModuleId, ModuleInfo>,
    unwinder: Unwinder,
    pub codes: CodeTable,
    pub tree: RawTree,
    pub timeline: Vec<RawTimelineSample>,
    pub quality_counts: QualityCounts,
    /// Current names of threads, as the system has them.
    pub threads: BTreeMap<(Pid, Tid), String>,
    thread_ids: ThreadIds,
    thread_names: ThreadNames,
    /// Interpreters found, as text: `CPython 3.11.7 (libpython3.11.so.1.0)`.
    pub pythons: BTreeMap<Pid, String>,
    /// Threads that have samples.
    sampled: FxHashSet<(Pid, Tid)>,
    /// Processes whose samples contain code that is in no file.
    with_anonymous_code: FxHashSet<Pid>,
    gil_locks: GilLocks,
    sockets: Sockets,
    futexes: Futexes,
    gil_counts: GilCounts,
    sleeping: open_intervals::SleepingSamples,
    tasks: SampleTasks,
    spans: Spans,
    awaits: Awaits,
    lags: Lags,
    wakers: Wakers,
    shown_wakers: Option<WakerOptions>,
    dispatchers: Dispatchers,
    /// Of the samples in the timeline; empty where no off-CPU time is sampled.
    waits: RawWaits,
    /// Threads that exited recently, and processes whose first thread has exited while others still run.
    exited: FxHashSet<Tid>,
    leaderless: FxHashSet<Pid>,
    /// Processes that exited last, the latest one at the end.
    departed: VecDeque<Pid>,
    /// Each thread's last stack, and the total size of all.
    last_stacks: FxHashMap<Tid, LastStack>,
    last_bytes: usize,
    /// If set: the places that the unwinder looked up, and whether the stack needed more than unwind tables.
    pub visited: Option<VisitedCode>,
    /// If set: judges the native stacks.
    pub edges: Option<EdgeJudge>,
    open_files: OpenFiles,
    jit: JitShared,
    /// Downloads debug information that is not on this machine.
    pub fetch: Option<Fetch>,
    /// Reads the names in files. Without it, they are read in this process.
    pub naming: Option<NamingProcess>,
    groups: EvalGroups,
    native: Vec<NativeFrame>,
    stack: Vec<RawFrame>,
}

/// Maximum total size of the threads' last stacks, bytes: a thousand very deep ones would take gigabytes.
const MAX_LAST_STACKS: usize = 32 << 20;
/// Minimum time between two searches for subinterpreters, ns of the samples' clock.
const RESCAN_INTERVAL: u64 = 50_000_000;
/// Files and addresses (svma) on stacks; true if unwind tables alone were not enough.
pub type VisitedCode = FxHashMap<(ModuleId, u64), bool>;

/// A thread's last stack, as the stages cache it.
#[derive(Default)]
struct LastStack {
    python: frame_groups::LastFrames,
    native: StackCache,
    path: FramePath,
}

impl LastStack {
    /// Bytes on the heap.
    fn bytes(&self) -> usize {
        self.python.bytes() + self.native.bytes() + self.path.bytes()
    }
}

/// Notifies the backend of what an event has changed.
pub type TargetUpdate<'a> = dyn FnMut(Pid, Option<&TargetLayout>) -> Result<()> + 'a;

impl Session {
    pub fn new(options: SessionOptions, system: Box<dyn System>) -> Session {
        Session {
            system: Rc::from(system),
            options,
            targets: FxHashMap::default(),
            modules: Modules::default(),
            module_info: FxHashMap::default(),
            unwinder: Unwinder::default(),
            codes: CodeTable::default(),
            tree: RawTree::default(),
            timeline: Vec::new(),
            quality_counts: QualityCounts::default(),
            threads: BTreeMap::new(),
            thread_ids: ThreadIds::default(),
            thread_names: ThreadNames::default(),
            pythons: BTreeMap::new(),
            sampled: FxHashSet::default(),
            with_anonymous_code: FxHashSet::default(),
            gil_locks: GilLocks::default(),
            sockets: Sockets::default(),
            futexes: Futexes::default(),
            gil_counts: GilCounts::default(),
            sleeping: Default::default(),
            tasks: SampleTasks::default(),
            spans: Spans::default(),
            awaits: Awaits::default(),
            lags: Lags::default(),
            wakers: Wakers::default(),
            shown_wakers: None,
            dispatchers: Dispatchers::default(),
            waits: RawWaits::default(),
            exited: FxHashSet::default(),
            leaderless: FxHashSet::default(),
            departed: VecDeque::new(),
            last_stacks: FxHashMap::default(),
            last_bytes: 0,
            visited: None,
            edges: None,
            open_files: OpenFiles::default(),
            jit: JitShared::default(),
            fetch: None,
            naming: None,
            groups: EvalGroups::default(),
            native: Vec::new(),
            stack: Vec::new(),
        }
    }

    /// Processes one event.
    pub fn event(&mut self, event: Event, update: &mut TargetUpdate<'_>) -> Result<()> {
        match event {
            Event::Sample(s) => self.sample(&s, update)?,
            Event::Code { .. } => self.capture_code_objects(std::slice::from_ref(&event)),
            Event::Mmap {
                pid,
                start,
                end,
                offset,
                path,
            } => {
                let Some(m) = self.targets.get_mut(&pid) else {
                    return Ok(());
                };
                let mut new = Vec::new();
                let (system, modules) = (&*self.system, &mut self.modules);
                m.process
                    .map(system, start, end, offset, &path, modules, &mut |id| new.push(id));
                for id in new {
                    self.add_module(id);
                }
                if self.detect_python(pid) | self.find_spans(pid, sys::clock::now()) {
                    self.notify_backend(pid, update)?;
                }
            }
            Event::Exec { pid, comm } => {
                self.notice_exec(pid);
                self.codes.remove_process(pid);
                self.forget_tasks(pid);
                self.forget_spans(pid);
                self.forget_last_stacks();
                self.pythons.remove(&pid);
                self.thread_ids.forget_process(pid);
                self.thread_names.forget_process(pid, false);
                self.threads
                    .insert((pid, pid), String::from_utf8_lossy(&comm).into_owned());
                self.exec(pid, update);
            }
            Event::Fork { pid, parent } => self.fork(pid, parent, update)?,
            Event::Comm { pid, tid, comm } => {
                self.threads
                    .insert((pid, tid), String::from_utf8_lossy(&comm).into_owned());
            }
            Event::Thread { pid, tid } => {
                self.exited.remove(&tid);
                self.add_thread(pid, tid);
                let name = self.system.thread_name(pid, tid);
                self.threads.entry((pid, tid)).or_insert(name.unwrap_or_default());
            }
            Event::Exit { pid, tid } => {
                self.forget_worker(tid);
                self.exit(pid, tid, update)?;
            }
            Event::Lost(_) => {}
        }
        Ok(())
    }

    fn forget_last_stacks(&mut self) {
        self.last_stacks.clear();
        self.last_bytes = 0;
    }

    /// Drops the samples and keeps what is known of processes and files, for another profile.
    pub fn reset_profile(&mut self) {
        self.forget_last_stacks();
        self.forget_await_nodes();
        self.tree = RawTree::default();
        self.timeline = Vec::new();
        self.spans.forget_labels();
        self.waits = RawWaits::default();
        self.wakers = Wakers::default();
        self.quality_counts = QualityCounts::default();
        self.sampled.clear();
    }

    /// Quality of all samples. `counts` are the backend's, taken at `rate`.
    pub fn quality(&self, counts: &SampleCounts, rate: u64) -> Quality {
        let t = &self.quality_counts;
        // Off the CPU nothing is expected: intervals are taken by their lengths. Nor of one lock's holders.
        let is_counted = self.options.weighted.is_none() && !self.options.gil_only;
        let lost = match is_counted {
            true => counts.lost + unseen((counts.cpu_time, rate), t.taken() + counts.lost),
            false => counts.lost,
        };
        Quality {
            expected: if is_counted { t.taken() + lost } else { 0 },
            taken: t.taken(),
            exact: t.exact,
            repaired: t.repaired,
            partial: t.partial,
            lost,
            reasons: t
                .reasons
                .iter()
                .map(|(why, n)| (why.reason().to_string(), *n))
                .collect(),
        }
    }

    /// Samples by whether their thread held the interpreter lock, if only such threads are sampled.
    pub fn gil_counts(&self) -> Option<GilCounts> {
        self.options.gil_only.then_some(self.gil_counts)
    }

    /// What is known of the recording so far: of the backend, whose `counts` these are, and of the samples. `pid` is
    /// the first process; the caller fills in the command and our own CPU time.
    pub fn meta(
        &self,
        backend: &dyn Backend,
        counts: &SampleCounts,
        rate: u64,
        pid: Pid,
        (began, duration): (SystemTime, Duration),
    ) -> Meta {
        let since = began.duration_since(SystemTime::UNIX_EPOCH);
        Meta {
            version: env!("CARGO_PKG_VERSION").into(),
            rate,
            event: match self.options.gil_only {
                true => format!("{}{GIL_HOLDERS}", backend.event()),
                false => backend.event().into(),
            },
            backend: backend.backend().into(),
            start: since.map_or(0.0, |d| d.as_secs_f64()),
            duration: duration.as_secs_f64(),
            pid,
            stopped: counts.stopped.map(|h| StopSummary {
                median_us: h.median / 1000,
                max_us: h.longest / 1000,
            }),
            quality: self.quality(counts, rate),
            target_cpu: counts.cpu_time as f64 * 1e-9,
            ..Meta::default()
        }
    }

    /// Opens what symbolization reads, while there are privileges for it; `pid` is the first process. After this,
    /// `resolve` opens nothing except debug files below the root directory that is kept open.
    pub fn open_symbol_sources(&mut self, pid: Pid) {
        if self.open_files.root.is_none() {
            self.open_files.root = self.system.root(pid);
        }
        self.scan_all_jit_code();
        self.open_files.open(&*self.system, &self.codes, &self.tree);
    }

    /// Resolves the names of all data. `meta` is complete except for modules and threads; `start` is on the samples'
    /// clock.
    pub fn resolve(&mut self, start: u64, meta: Meta) -> Profile {
        self.open_symbol_sources(meta.pid);
        let (unwinder, targets) = (&mut self.unwinder, &self.targets);
        let input = ResolveInput {
            open_files: &self.open_files,
            modules: &self.modules,
            codes: &self.codes,
            task_names: self.tasks.names.all(),
            socket_names: self.sockets.names(),
            futexes: self.futexes.all(),
            tree: &self.tree,
            timeline: &self.timeline,
            label_sets: self.spans.label_sets(),
            weighted: self.options.weighted.is_some(),
            lags: &self.lags.done,
            waits: Some((&self.waits, &self.wakers.all)),
            threads: &self.threads,
            python_threads: &self.thread_names.names,
            pythons: &self.pythons,
            function_start: &mut |owner, at| function_start(unwinder, targets, owner, at),
            jit: &|pid| jit_sources(targets, pid),
            fetch: self.fetch.clone(),
            naming: self.naming.as_mut(),
        };
        resolve::resolve(input, start, meta)
    }
}

/// Samples that CPU time (ns) at a rate requires beyond those that are `known`, taken or lost: lost too, although nothing has
/// counted them. When samples fall due is random, so few of them say nothing.
fn unseen((cpu_time, rate): (u64, u64), known: u64) -> u64 {
    /// Standard deviations that are left to chance, samples, in case there are not enough for them to mean anything, and the part
    /// by which the clocks of CPU time and of sampling may differ.
    const DEVIATIONS: u64 = 4;
    const FEW: u64 = 10;
    const PART: u64 = 50;
    let due = (u128::from(cpu_time) * u128::from(rate) / 1_000_000_000) as u64;
    let missing = due.saturating_sub(known);
    if missing > DEVIATIONS * due.isqrt() + FEW + due / PART {
        missing
    } else {
        0
    }
}

/// Bytes of the names that a frame adds to the tree, if they are not in it yet.
fn name_bytes(codes: &CodeTable, frame: &RawFrame) -> usize {
    match frame {
        RawFrame::Python { code, .. } => codes.get(*code).written_bytes(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_beyond_chance_is_lost() {
        let check =
            |ms: u64, known, expected| assert_eq!(unseen((ms * 1_000_000, 100), known), expected, "{ms} {known}");
        check(0, 0, 0);
        check(300, 0, 0); // 30 are few
        check(410, 0, 41);
        check(1290, 30, 99);
        check(10_000, 1000, 0);
        check(10_000, 880, 0);
        check(10_000, 800, 200);
        check(10_000, 2000, 0);
    }
}
