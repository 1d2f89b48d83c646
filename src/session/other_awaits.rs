//! What suspended greenlets and tasks of trio await: they are read as those of asyncio are (`awaits`), and share the time that
//! their hub or scheduler waits for events in the same way.

use std::ops::Range;

use rustc_hash::FxHashMap;

use super::await_kind::{compiled_kind, library_kind};
use super::awaits::{ProcessAwaits, Reading, TaskNode};
use super::{Session, name_bytes};
use crate::cpython::tasks::{
    GreenletSearch, OtherTasks, RawAwaitFrame, SuspendedGreenlet, SuspendedTrioTask, TrioScheduler, is_greenlet_entry,
    is_greenlet_scheduler, is_trio_core,
};
use crate::cpython::thread_states::{self, PyThreadState};
use crate::cpython_layout::Interpreter;
use crate::event::{AwaitKind, Pid, Tid};
use crate::frame::{Origin, RawFrame};
use crate::process::maps;
use crate::process::memory::{Memory, Pages};
use crate::process::system::ProcessMemory;
use crate::profile::count_tree::FramePath;

/// Memory that one reading searches for greenlets, bytes: until all has been searched once, and later, from time to time (ns).
const FIRST_PART: u64 = 64 << 20;
const PART: u64 = 1 << 20;
const PART_INTERVAL: u64 = 100_000_000;
/// How long threads keep their numbers, and time between two searches for schedulers of trio, ns.
const THREADS_AGE: u64 = 1_000_000_000;
const TRIO_SEARCH: u64 = 1_000_000_000;

/// What is known of the suspended tasks of one process that are not asyncio's.
#[derive(Default)]
pub(super) struct OtherAwaits {
    reader: Option<OtherTasks>,
    search: GreenletSearch,
    was_complete: bool,
    /// When the next part is searched, ns.
    next_part: u64,
    /// Whether the code of this generation has a file of greenlet.
    has_greenlets: Option<(u64, bool)>,
    /// By `pthread_self`, and when they were read.
    threads: FxHashMap<u64, Tid>,
    threads_read: u64,
    /// When schedulers of trio were searched for, ns.
    trio_searched: u64,
    /// By the task's address.
    nodes: FxHashMap<u64, KnownTask>,
}

/// A suspended task, and how it is shown. `None`: it awaits nothing itself.
struct KnownTask {
    suspended: Suspended,
    tid: Tid,
    shown: Option<TaskNode>,
}

enum Suspended {
    Greenlet(SuspendedGreenlet),
    Trio(SuspendedTrioTask),
}

impl Suspended {
    fn address(&self) -> u64 {
        match self {
            Suspended::Greenlet(g) => g.address,
            Suspended::Trio(t) => t.task.address(),
        }
    }

    /// Outermost first.
    fn frames(&self) -> &[RawAwaitFrame] {
        match self {
            Suspended::Greenlet(g) => &g.frames,
            Suspended::Trio(t) => &t.chain.frames,
        }
    }

    /// Whether it is shown as this one was that had the same address.
    fn is_shown_as(&self, before: &Suspended) -> bool {
        let has_same_name = match (self, before) {
            (Suspended::Greenlet(_), Suspended::Greenlet(_)) => true,
            (Suspended::Trio(now), Suspended::Trio(before)) => {
                (now.task, now.is_ready) == (before.task, before.is_ready)
            }
            _ => false,
        };
        has_same_name && self.frames() == before.frames()
    }
}

impl OtherAwaits {
    /// The nodes of the tree are about to be replaced.
    pub(super) fn forget_nodes(&mut self) {
        self.nodes.clear();
    }
}

impl Session {
    /// Reads the suspended tasks of one process that are not asyncio's.
    pub(super) fn read_other_awaits(
        &mut self,
        (pid, interpreter): (Pid, &Interpreter),
        process: &mut ProcessAwaits,
        reading: &mut Reading,
    ) {
        let mut other = std::mem::take(&mut process.other);
        if let Some(reader) = other.reader.take().or_else(|| self.other_tasks(pid)) {
            let mut found = self.suspended_greenlets((pid, interpreter), &reader, &mut other, reading);
            self.search_trio((pid, interpreter), &reader, &mut other, reading.time);
            found.extend(self.suspended_trio_tasks(pid, &reader));
            self.show_suspended((pid, interpreter), (&reader, &mut other), found, reading);
            other.reader = Some(reader);
        }
        process.other = other;
    }

    fn show_suspended(
        &mut self,
        (pid, interpreter): (Pid, &Interpreter),
        (reader, other): (&OtherTasks, &mut OtherAwaits),
        found: Vec<(Tid, Suspended)>,
        reading: &mut Reading,
    ) {
        let mut nodes = std::mem::take(&mut other.nodes);
        let mut path = FramePath::default();
        for (tid, suspended) in found {
            let known = nodes.remove(&suspended.address());
            let known = known.filter(|known| known.tid == tid && suspended.is_shown_as(&known.suspended));
            let shown = match &known {
                Some(known) => known.shown,
                None => self.show_one((pid, tid, interpreter), reader, &suspended, &mut path),
            };
            if let Some(shown) = shown {
                reading.add(tid, shown);
            }
            let address = suspended.address();
            other.nodes.insert(address, KnownTask { suspended, tid, shown });
        }
    }

    /// Adds the stack of a suspended task to the tree.
    fn show_one(
        &mut self,
        (pid, tid, interpreter): (Pid, Tid, &Interpreter),
        reader: &OtherTasks,
        suspended: &Suspended,
        path: &mut FramePath,
    ) -> Option<TaskNode> {
        let mut stack = self.thread_frames(pid, tid);
        let system = self.system.clone();
        let live = ProcessMemory(&*system, pid);
        let memory = Pages::new(&live);
        let (frames, functions) = self.await_frames(pid, (&memory, &interpreter.layout), suspended.frames());
        let mut kind = library_kind(functions.iter().rev().map(|(name, file)| (&**name, &**file)));
        match suspended {
            Suspended::Greenlet(g) => {
                let greenlet = reader.greenlet(&memory, g);
                if kind == AwaitKind::Other {
                    kind = self.compiled_wait(pid, &memory, g).unwrap_or(kind);
                }
                let mut ends = functions.first().into_iter().chain(functions.last());
                if greenlet.is_hub() || ends.any(|(name, file)| is_greenlet_scheduler(name, file)) {
                    return None;
                }
                let mut own = functions.iter().filter(|(name, file)| !is_greenlet_entry(name, file));
                let label = greenlet.label(own.next().map(|(name, _)| &**name));
                if !greenlet.is_main() {
                    stack.push(RawFrame::Origin(Origin::Greenlet));
                }
                stack.push(RawFrame::Task(self.tasks.names.id(&label)));
            }
            Suspended::Trio(t) => {
                // Tasks that belong to its scheduler.
                if functions.iter().all(|(_, file)| is_trio_core(file)) {
                    return None;
                }
                let offsets = self.trio_offsets_of(pid)?;
                for name in reader.trio_names(&memory, &offsets, &t.task).iter().rev() {
                    stack.push(RawFrame::Task(self.tasks.names.id(name)));
                }
                if t.is_ready {
                    kind = AwaitKind::Turn;
                }
            }
        }
        stack.extend(frames);
        stack.push(RawFrame::Awaiting(kind));
        let name_bytes = |f: &RawFrame| name_bytes(&self.codes, f);
        let (node, _) = self.tree.add_incremental(path, &stack, 0, &name_bytes);
        let waits = kind != AwaitKind::Turn;
        Some(TaskNode { node, waits })
    }

    /// What a greenlet awaits in a compiled function: the innermost one on its stack that says so.
    fn compiled_wait(&self, pid: Pid, memory: &dyn Memory, greenlet: &SuspendedGreenlet) -> Option<AwaitKind> {
        let code = self.targets.get(&pid)?.process.code().iter();
        let known = code.filter_map(|c| Some((c.start..c.end, compiled_kind(&self.modules.get(c.file?.0).name())?)));
        let known: Vec<(Range<u64>, AwaitKind)> = known.collect();
        if known.is_empty() {
            return None;
        }
        let kind = |word: u64| known.iter().find(|(place, _)| place.contains(&word));
        OtherTasks::stack_words(memory, greenlet)
            .find_map(kind)
            .map(|(_, kind)| *kind)
    }

    fn suspended_trio_tasks(&self, pid: Pid, reader: &OtherTasks) -> Vec<(Tid, Suspended)> {
        let live = ProcessMemory(&*self.system, pid);
        let Some(offsets) = self.trio_offsets_of(pid) else {
            return Vec::new();
        };
        let mut found = Vec::new();
        for (tid, scheduler) in self.trio_schedulers_of(pid) {
            if reader.still_schedules(&live, scheduler) {
                let tasks = reader.trio_chains(&live, &offsets, scheduler).into_iter();
                let suspended = tasks.filter(|task| !task.chain.is_running);
                found.extend(suspended.map(|task| (*tid, Suspended::Trio(task))));
            }
        }
        found
    }

    /// Greenlets in threads without an event loop of asyncio: where there is one, they wait for its tasks.
    fn suspended_greenlets(
        &self,
        (pid, interpreter): (Pid, &Interpreter),
        reader: &OtherTasks,
        other: &mut OtherAwaits,
        reading: &Reading,
    ) -> Vec<(Tid, Suspended)> {
        if !self.maps_greenlet(pid, other) {
            return Vec::new();
        }
        let live = ProcessMemory(&*self.system, pid);
        self.search_greenlets(pid, reader, other, reading.time);
        let memory = Pages::new(&live);
        let states = thread_states::states(&memory, interpreter);
        self.read_threads((pid, interpreter), other, &states, reading.time);
        let found = reader.suspended_greenlets(&live, &other.search, &states).into_iter();
        found
            .filter_map(|greenlet| Some((*other.threads.get(&greenlet.thread)?, Suspended::Greenlet(greenlet))))
            .filter(|(tid, _)| !reading.nodes.contains_key(tid))
            .collect()
    }

    fn maps_greenlet(&self, pid: Pid, other: &mut OtherAwaits) -> bool {
        let Some(target) = self.targets.get(&pid) else {
            return false;
        };
        let generation = target.process.generation;
        match other.has_greenlets {
            Some((of, has)) if of == generation => has,
            _ => {
                let mut files = target.process.code().iter().filter_map(|c| c.file);
                let has = files.any(|(id, _)| self.modules.get(id).name().starts_with("_greenlet."));
                other.has_greenlets.insert((generation, has)).1
            }
        }
    }

    fn search_greenlets(&self, pid: Pid, reader: &OtherTasks, other: &mut OtherAwaits, now: u64) {
        let live = ProcessMemory(&*self.system, pid);
        let search = &mut other.search;
        if other.was_complete {
            reader.refresh_greenlets(&live, search);
        }
        if now < other.next_part {
            return;
        }
        if search.is_complete() {
            let text = self.system.maps(pid).unwrap_or_default();
            search.begin(maps::parse(&text));
        }
        let part = if other.was_complete { PART } else { FIRST_PART };
        reader.find_greenlets(&live, search, part);
        other.was_complete |= search.is_complete();
        if other.was_complete {
            other.next_part = now + PART_INTERVAL;
        }
    }

    fn read_threads(
        &self,
        (pid, interpreter): (Pid, &Interpreter),
        other: &mut OtherAwaits,
        states: &[PyThreadState],
        now: u64,
    ) {
        if now.saturating_sub(other.threads_read) < THREADS_AGE {
            return;
        }
        other.threads_read = now;
        let live = ProcessMemory(&*self.system, pid);
        let inside = thread_states::thread_pointers(&live, interpreter, states);
        let threads = self.system.threads(pid).into_iter();
        other.threads = threads
            .filter_map(|tid| Some((*inside.get(&self.thread_ids.inside(&*self.system, pid, tid)?)?, tid)))
            .collect();
    }

    /// Finds the schedulers of trio in a process whose samples have shown none, from time to time.
    fn search_trio(
        &mut self,
        (pid, interpreter): (Pid, &Interpreter),
        reader: &OtherTasks,
        other: &mut OtherAwaits,
        now: u64,
    ) {
        let live = ProcessMemory(&*self.system, pid);
        let is_live = |scheduler: &TrioScheduler| reader.still_schedules(&live, scheduler);
        if now.saturating_sub(other.trio_searched) < TRIO_SEARCH
            || self.trio_schedulers_of(pid).any(|(_, scheduler)| is_live(scheduler))
        {
            return;
        }
        other.trio_searched = now;
        let states = thread_states::states(&live, interpreter);
        self.read_threads((pid, interpreter), other, &states, now);
        self.find_trio_schedulers((pid, interpreter), reader, &states, &other.threads);
    }
}
