//! Recordings: events in, stacks counted in a segment, a profile out. This module calls the stages in order; names are
//! resolved at the end.
//!
//! A session is run by a [`Recording`] (live), a [`replay::Replay`] (of a tape) or an [`Inspection`] (of one process,
//! once); nothing else knows it. `Process` owns what is known of a process, `Files` what is known of files,
//! `StackBuilder` makes a stack of a sample, `Activities` observe what else happens, and `Segment` has what was
//! counted.

use std::ops::Range;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use crate::cpython_layout::TargetLayout;
use crate::error::Result;
use crate::event::{Event, Pid, Tid};
use crate::frame::RawFrame;
use crate::process::AddressSpace;
use crate::process::root::Root;
use crate::process::system::System;
use crate::profile::measure::Measure;
use crate::profile::model::{Meta, Profile};
use crate::profile::resident::ResidentMemory;
use crate::resolve::naming::NamingProcess;
use crate::resolve::{self, Fetch, NameCache, ResolveInput};

mod activities;
mod allocations;
mod asyncio;
mod await_kind;
mod await_times;
mod awaits;
mod code_copies;
mod eval_calls;
mod files;
mod futexes;
mod greenlets;
mod inspection;
mod instances;
mod jit;
mod lags;
mod long_term;
mod names;
mod open_intervals;
mod process;
mod process_tasks;
mod processes;
mod programs;
mod pump;
mod recording;
pub mod replay;
mod resident;
mod sample;
mod segment;
mod sockets;
mod spans;
mod stacks;
mod states;
mod task_source;
mod tasks;
mod thread_ids;
mod thread_names;
mod trio;
mod wakers;
mod workers;

use activities::Activities;
use files::Files;
pub use inspection::Inspection;
use instances::NO_ROOM;
pub use instances::ProcessInstance;
pub use long_term::SegmentEnd;
use names::Names;
use process::Process;
use processes::{KnownProcess, Processes};
use programs::Programs;
pub use recording::{FinishedRecording, HostSegment, Recording, SamplingRemarks};
pub use segment::QualityCounts;
use segment::Segment;
use stacks::StackBuilder;
pub use states::GilCounts;
pub use tasks::TaskCounts;

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
    pub measure: Measure,
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
    /// Read the allocations that processes sample themselves.
    pub allocations: bool,
    /// Record a whole host, for months: what is known of processes is dropped when it is not used, and one process has a part
    /// of each bounded table. Names of threads are read when they are sampled.
    pub host: bool,
    /// avma of code in our own process, which takes samples where it is called: frames in its file are left out, and no sample
    /// is due at any time.
    pub own_code: Option<u64>,
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
            measure: Measure::default(),
            gil_only: false,
            lag: None,
            workers: false,
            allocations: false,
            host: false,
            own_code: None,
        }
    }
}

impl SessionOptions {
    /// The sampling period, ns, where suspended tasks are read.
    fn await_period(&self) -> Option<u64> {
        match self.measure {
            Measure::Time(period) if self.tasks => Some(period),
            _ => None,
        }
    }

    /// Whether it is of use to know where interpreters keep their locks.
    fn needs_locks(&self) -> bool {
        self.measure.is_time() || self.gil_only
    }

    /// Whether processes are searched for asyncio.
    fn needs_asyncio(&self) -> bool {
        self.tasks || self.lag.is_some()
    }
}

/// All data gathered by a recording.
struct Session {
    options: SessionOptions,
    files: Files,
    processes: Processes,
    programs: Programs,
    names: Names,
    stacks: StackBuilder,
    activities: Activities,
    segment: Segment,
    naming: Naming,
    /// Segments of a host so far.
    period: u32,
}

/// What names the frames of profiles.
#[derive(Default)]
struct Naming {
    /// Downloads debug information that is not on this machine.
    fetch: Option<Fetch>,
    /// Reads the names in files. Without it, they are read in this process.
    process: Option<NamingProcess>,
    /// Names of frames that were resolved before.
    cache: NameCache,
}

impl Naming {
    /// Another process reads the names; `fetch` downloads debug files.
    fn apart(fetch: Option<Fetch>) -> Naming {
        Naming {
            fetch,
            process: Some(NamingProcess::default()),
            ..Naming::default()
        }
    }
}

/// Minimum time between two searches for subinterpreters, or for JIT code, ns of the samples' clock.
const RESCAN_INTERVAL: u64 = 50_000_000;
/// Samples of memory that is not resident any more, and of memory that was given back, that are kept one by one where a recording
/// may last for days.
const MAX_GONE: usize = 1 << 18;
/// Maximum number of cached names of frames.
const MAX_NAMES: usize = 1 << 18;

/// Notifies the backend of what an event has changed.
type TargetUpdate<'a> = dyn FnMut(Pid, Option<&TargetLayout>) -> Result<()> + 'a;

impl Session {
    fn new(options: SessionOptions, system: Box<dyn System>) -> Session {
        Session {
            activities: Activities::new(&options, system.now()),
            files: Files::new(Rc::from(system), options.host),
            processes: Processes::default(),
            programs: Programs::default(),
            names: Names::default(),
            stacks: StackBuilder::new(&options),
            segment: Segment::new(options.host),
            naming: Naming::default(),
            period: 0,
            options,
        }
    }

    /// Processes one event.
    fn event(&mut self, event: Event, update: &mut TargetUpdate<'_>) -> Result<()> {
        match event {
            Event::Sample(s) => self.sample(&s, update)?,
            Event::Code { pid, copy } if self.processes.get(pid).is_none() => self.programs.keep_copy(pid, copy),
            Event::Code { .. } => self.processes.capture_code_objects(&mut self.files, &event, None),
            Event::Mmap {
                pid,
                start,
                end,
                offset,
                path,
            } => {
                let Some(known) = self.processes.get_mut(pid) else {
                    return Ok(());
                };
                let mut new = Vec::new();
                let Files { system, modules, .. } = &mut self.files;
                let space = &mut known.process.space;
                space.map(&**system, start, end, offset, &path, modules, &mut |id| new.push(id));
                for id in new {
                    self.files.add(id);
                }
                let KnownProcess {
                    process, activities, ..
                } = known;
                let has_python = process.detect_python(&self.files);
                let spans = &mut self.activities.spans;
                let has_spans = spans.find(&mut activities.spans, process, &self.files, self.files.system.now());
                if has_python {
                    self.names.set_interpreter(pid, process.python_text(&self.files));
                }
                let has_probes = self.options.allocations && process.has_allocation_probes(&self.files, start);
                if has_python || has_spans || has_probes {
                    self.notify_backend(pid, update)?;
                }
            }
            Event::Exec { pid, comm } => self.exec(pid, &comm, update),
            Event::Fork { pid, parent } => self.fork(pid, parent, update)?,
            Event::Comm { pid, tid, comm } if !self.options.host => self.names.rename(pid, tid, &comm),
            Event::Thread { pid, tid } => {
                self.processes.begin_thread(tid);
                if let Some(known) = self.processes.get_mut(pid) {
                    self.activities.workers.add_thread(&mut known.activities.workers, tid);
                }
                if !self.options.host {
                    let name = self.files.system.thread_name(pid, tid);
                    let names = &mut self.names.threads;
                    names.entry((pid, tid)).or_insert(name.unwrap_or_default());
                }
            }
            Event::Exit { pid, tid } => self.exit(pid, tid, update)?,
            Event::MemoryRange(range) => {
                let resident = &mut self.activities.resident;
                resident.apply(&range, &*self.files.system, &mut self.segment);
            }
            Event::Free(freed) => self.activities.allocations.free(&freed),
            Event::Lost(_) | Event::Comm { .. } => {}
        }
        Ok(())
    }

    /// Adds a process: reads what it maps, and whether it runs Python. What was known of one with this number is forgotten.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    fn open(&mut self, pid: Pid, update: &mut TargetUpdate<'_>) -> Result<()> {
        let started = self.files.system.start_time(pid);
        let space = self.files.open_space(pid)?;
        self.forget(pid);
        if let Some(root) = space.root.as_ref().filter(|_| !space.regions().is_empty()) {
            self.files.open.open_perf_map(pid, root);
        }
        self.add_root(pid, space.root.clone());
        let known = self.processes.add(Process::new(space, started));
        known.process.detect_python(&self.files);
        self.names.set_interpreter(pid, known.process.python_text(&self.files));
        let threads = if self.options.host {
            Vec::new()
        } else {
            self.files.system.threads(pid)
        };
        for tid in threads {
            if let Some(name) = self.files.system.thread_name(pid, tid) {
                self.names.threads.insert((pid, tid), name);
            }
        }
        self.notify_backend(pid, update)
    }

    /// Takes note of the root directory of a process, for its source files. That of the first one may be ours, if its own is not
    /// available.
    fn add_root(&mut self, pid: Pid, root: Option<Arc<Root>>) {
        let sources = &mut self.files.open.sources;
        let is_missing = root.is_none() && sources.is_first(pid) && !sources.has_root(pid);
        let of_first = || self.files.system.root(pid).map(Arc::new);
        let root = if is_missing { of_first() } else { root };
        if let Some(root) = root {
            sources.add_root(pid, root);
        }
    }

    /// Adds a process that is about to execute its program. If it has exited by the time its mappings are handled, its
    /// files are still found.
    fn add_before_exec(&mut self, pid: Pid) {
        let root = self.files.modules.root(&*self.files.system, pid);
        let started = self.files.system.start_time(pid);
        self.add_without_mappings(pid, root, started);
    }

    /// Adds a process whose mappings follow as events.
    fn add_without_mappings(&mut self, pid: Pid, root: Option<Arc<Root>>, started: Option<u64>) {
        let mut space = AddressSpace::exited(pid);
        space.root = root;
        self.processes.add(Process::new(space, started));
    }

    /// Reads the files of an interpreter that a process is about to run.
    fn prepare(&mut self, pid: Pid, program: PathBuf) {
        self.files.prepare(pid, program);
    }

    /// A process executes another program, by one of its threads, which has the number of the first one from then on. That one
    /// has exited, but its process has not.
    fn exec(&mut self, pid: Pid, comm: &[u8], update: &mut TargetUpdate<'_>) {
        self.processes.begin_thread(pid);
        let before = self.processes.get(pid);
        let before = before.map(|process| (process.space.root.clone(), process.started));
        self.names.exec(pid, comm);
        self.stacks.forget_last();
        let now = self.files.system.now();
        self.activities.resident.exec(pid, now, &mut self.segment);
        self.activities.allocations.exec(pid, now);
        self.forget(pid);
        // Mappings of the new program follow as separate events, except for the vDSO.
        if self.open(pid, update).is_err()
            && let Some((root, started)) = before
        {
            // It has exited already.
            self.add_without_mappings(pid, root, started);
        }
    }

    /// A process has forked. The number of the new one may have been that of a process which has exited.
    fn fork(&mut self, pid: Pid, parent: Pid, update: &mut TargetUpdate<'_>) -> Result<()> {
        self.processes.begin_thread(pid);
        self.forget(pid);
        let Some(of_parent) = self.processes.get(parent) else {
            return Ok(());
        };
        let mut space = of_parent.space.clone_for_child(pid);
        // The same files, but another number; if the child has exited already, its parent's.
        space.root = self.files.modules.root(&*self.files.system, pid).or(space.root);
        let root = space.root.clone();
        let child = of_parent.fork(space, self.files.system.start_time(pid));
        self.processes.add(child);
        self.add_root(pid, root);
        self.files.codes.on_fork(pid, parent);
        self.names.fork(pid, parent);
        self.notify_backend(pid, update)
    }

    /// Keeps of an exited thread or process only what its samples need: some programs create them by the million.
    fn exit(&mut self, pid: Pid, tid: Tid, update: &mut TargetUpdate<'_>) -> Result<()> {
        self.stacks.forget_thread(tid);
        self.names.end_thread(pid, tid);
        if let Some(known) = self.processes.get_mut(pid) {
            known.activities.workers.forget_thread(tid);
        }
        if !self.processes.end_thread(&*self.files.system, pid, tid) {
            return Ok(());
        }
        update(pid, None)?;
        self.activities.allocations.end_process(pid);
        if let Some(KnownProcess {
            process, activities, ..
        }) = self.processes.get_mut(pid)
        {
            if process.jit.is_sampled {
                process.scan_jit_code(&mut self.files, None);
            }
            let now = self.files.system.now();
            self.activities.awaits.end_readings(&mut activities.awaits, pid, now);
        }
        if let Some(oldest) = self.processes.depart(pid) {
            self.forget(oldest);
        }
        Ok(())
    }

    /// Drops what is known of a process that has exited, or executes another program.
    fn forget(&mut self, pid: Pid) {
        let Some((mut own, has_code)) = self.processes.forget(pid) else {
            return;
        };
        let now = self.files.system.now();
        self.activities.awaits.end_readings(&mut own.awaits, pid, now);
        self.activities
            .lags
            .end_process(&mut own.lags, pid, &mut self.segment, now);
        self.files.codes.remove_process(pid);
        if !has_code {
            self.files.open.perf_maps.remove(&pid);
        }
        if !self.names.has_samples(pid) {
            self.files.open.sources.forget_root(pid);
        }
        self.names.end_process(pid);
        self.stacks.forget_judged();
        if self.files.are_many_new() {
            self.close_unused_files();
        }
    }

    /// Closes files that no known process has mapped and no sample has on its stack. Not where a tape is made, which needs
    /// them.
    fn close_unused_files(&mut self) {
        if self.stacks.visited.is_some() || self.stacks.edges.is_some() {
            return;
        }
        let of_stacks = self
            .segment
            .tree
            .nodes()
            .iter()
            .filter_map(|(_, frame, _)| match frame {
                Some(RawFrame::Native { module, .. }) => Some(*module),
                _ => None,
            });
        let futexes = self.activities.states.futexes.all().iter().map(|(id, _)| *id);
        let used = of_stacks.chain(futexes).chain(self.processes.files()).collect();
        self.files.close_unused(&used);
    }

    /// Reads what a backend needs to know of a process.
    fn read_layout(&mut self, pid: Pid) -> Option<TargetLayout> {
        let now = self.files.system.now();
        let (files, activities) = (&self.files, &mut self.activities);
        let KnownProcess {
            process,
            activities: own,
            ..
        } = self.processes.get_mut(pid)?;
        if self.options.needs_locks() {
            process.find_locks(&*files.system, now);
        }
        if self.options.needs_asyncio() {
            own.tasks.asyncio.search(process, files, now);
        }
        let states_by_thread = process.read_states(&*files.system);
        let python_threads = if activities.workers.are_attributed() {
            process.python_threads(&*files.system)
        } else {
            Vec::new()
        };
        let allocation_probes = if self.options.allocations {
            process.allocation_probes(files)
        } else {
            Vec::new()
        };
        Some(TargetLayout {
            stack_end: process.space.stack_end,
            python: process.interpreter().copied(),
            locks: process.locks.found.clone(),
            states_by_thread,
            lent_states: process.states.lent.clone(),
            running_tasks: own.tasks.asyncio.running_tasks(),
            spans: own.spans.location,
            thread_context: own.spans.context,
            python_threads,
            inherited: own.workers.inherited(),
            program: None,
            allocation_probes,
        })
    }

    fn notify_backend(&mut self, pid: Pid, update: &mut TargetUpdate<'_>) -> Result<()> {
        if self.processes.has_exited(pid) {
            return Ok(());
        }
        let Some(layout) = self.read_layout(pid) else {
            return Ok(());
        };
        match update(pid, Some(&layout)) {
            // It is sampled all the same, without its Python functions.
            Err(_) if self.options.host => self.segment.instances.refuse(pid, NO_ROOM),
            result => result?,
        }
        if let Some(known) = self.processes.get_mut(pid) {
            known.process.locks.take_changed();
            known.activities.workers.inherited_known(self.files.system.now());
        }
        Ok(())
    }

    /// Puts the stacks of wakers below the waits that they ended; `kernel`: with the kernel's functions.
    fn show_wakers(&mut self, kernel: bool) {
        self.activities.wakers.show(&*self.files.system, kernel);
    }

    /// Ends the segment: drops the samples and keeps what is known of processes and files, for another profile.
    fn close_segment(&mut self) -> Segment {
        self.forget_nodes();
        self.activities.spans.forget_labels();
        let processes = &self.processes;
        self.names.forget_samples(&|pid| processes.get(pid).is_some());
        self.segment.close()
    }

    /// Drops samples before a time (of the samples' clock), and eventually the stacks that only they had.
    fn forget_before(&mut self, time: u64) {
        if matches!(self.options.measure, Measure::Bytes(_)) {
            // What grew long ago may still be resident.
            if let Some(numbers) = self.segment.combine_gone(MAX_GONE) {
                self.activities.resident.renumber(&numbers);
            }
            return;
        }
        if self.segment.forget_before(time) {
            self.forget_nodes();
            self.segment.prune();
        }
    }

    /// Looks up some of the memory that grew: whether it is still resident.
    fn look_up_memory(&mut self) {
        let (system, segment) = (&*self.files.system, &mut self.segment);
        self.activities.resident.look_up(system, segment);
    }

    /// Lets go of the nodes of the segment's tree, which is about to be replaced.
    fn forget_nodes(&mut self) {
        let now = self.files.system.now();
        let Activities {
            awaits, lags, wakers, ..
        } = &mut self.activities;
        for known in self.processes.iter_mut() {
            awaits.end_readings(&mut known.activities.awaits, known.process.pid(), now);
            known.activities.awaits.forget_nodes();
            known.activities.lags.forget_nodes();
        }
        awaits.add_rows(&mut self.segment, now);
        lags.forget_nodes();
        wakers.forget_nodes();
    }

    /// Opens what symbolization reads, while there are privileges for it; `pid` is the first process. After this,
    /// `resolve` opens nothing except debug files below the root directory that is kept open.
    fn open_symbol_sources(&mut self, pid: Pid) {
        self.processes.scan_all_jit_code(&mut self.files);
        if self.options.host {
            // No source files are read.
            self.files.open.open_kernel(&*self.files.system, &self.segment.tree);
            return;
        }
        self.add_root(pid, None);
        let Files {
            system, codes, open, ..
        } = &mut self.files;
        open.open(&**system, codes, &self.segment.tree);
    }

    /// Resolves the names of all data. `meta` is complete except for modules and threads; `start` is on the samples'
    /// clock.
    fn resolve(&mut self, start: u64, meta: Meta) -> Profile {
        self.open_symbol_sources(meta.pid);
        self.name(None, |input, _| resolve::resolve(input, start, meta))
    }

    /// Resolves the names of a segment of a recording of months, as [`Session::resolve`]: only those that are new are read.
    fn resolve_new(&mut self, start: u64, meta: Meta) -> Profile {
        self.name(None, |input, names| {
            if names.len() > MAX_NAMES {
                names.clear();
            }
            resolve::resolve_incremental(names, input, start, meta)
        })
    }

    /// The samples of a time range, of all threads or one, as a profile; with what kept event loops also before, and
    /// with what `others` have done to resident memory. Resolves names that are new, which needs no privileges except
    /// for opening debug files.
    fn window(&mut self, span: Range<u64>, only: Option<Tid>, others: &[ResidentMemory], meta: Meta) -> Profile {
        let mut window = self.segment.window(&span, only);
        resident::add_of_other_tasks(others, self.options.grouping.processes, span.end, &mut window);
        self.name(Some(window), |input, names| {
            if names.len() > MAX_NAMES {
                names.clear();
            }
            resolve::resolve_incremental(names, input, span.start, meta)
        })
    }

    /// Passes all that naming needs to `resolve`, for a segment or that of the session.
    fn name(
        &mut self,
        segment: Option<Segment>,
        resolve: impl FnOnce(ResolveInput<'_>, &mut NameCache) -> Profile,
    ) -> Profile {
        let Files {
            modules,
            codes,
            open,
            unwinder,
            ..
        } = &mut self.files;
        let (processes, segment) = (&self.processes, segment.as_ref().unwrap_or(&self.segment));
        let states = &self.activities.states;
        let mut function_start = |owner, at| {
            let (module, svma, bias) = processes.place_of_code(owner, at)?;
            Some(unwinder.function_start(module, svma)?.wrapping_add(bias))
        };
        let input = ResolveInput {
            open_files: open,
            modules,
            codes,
            task_names: self.activities.task_names.all(),
            socket_names: states.sockets.all(),
            futexes: states.futexes.all(),
            tree: &segment.tree,
            timeline: &segment.timeline,
            label_sets: &segment.labels.all,
            measure: self.options.measure,
            lags: &segment.lags,
            waits: Some((&segment.waits, segment.wakers.all())),
            memory: &segment.memory,
            threads: &self.names.threads,
            python_threads: &self.names.python_threads,
            pythons: &self.names.interpreters,
            function_start: &mut function_start,
            jit: &|pid| processes.jit_sources(pid),
            fetch: self.naming.fetch.clone(),
            naming: self.naming.process.as_mut(),
        };
        resolve(input, &mut self.naming.cache)
    }

    /// Reads the names of all sampled threads that still run, at the end of a recording: they may have changed.
    fn update_thread_names(&mut self) {
        for known in self.processes.iter_mut() {
            let pid = known.process.pid();
            for tid in known.process.thread_names.sampled() {
                if let Some(name) = known.process.read_thread_name(&*self.files.system, tid, u64::MAX) {
                    self.names.python_threads.insert((pid, tid), name);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
