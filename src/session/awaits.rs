//! What the suspended tasks of a session's processes await, and for how long. (Those that are not asyncio's: `other_awaits`.)
//!
//! All tasks of a process are read again and again at random times, without a stop, and each reading represents the time that is
//! nearer to it than to another one: for so long every task that is suspended has awaited what it awaits then. That is a value of
//! its own, since many tasks await at the same time. The wall time that the thread of their event loop waits in poll meanwhile is
//! shared among them.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use rustc_hash::{FxHashMap, FxHashSet};

use super::await_kind::await_kind;
use super::await_times::{Pauses, ReadingTimes};
use super::other_awaits::OtherAwaits;
use super::{Session, name_bytes};
use crate::capture::common::rng::Rng;
use crate::cpython::tasks::{SuspendedTask, TaskReader};
use crate::cpython::thread_states;
use crate::cpython_layout::{Interpreter, Layout};
use crate::event::{AwaitKind, Pid, Sample, Tid};
use crate::frame::RawFrame;
use crate::process::memory::{Memory, Pages};
use crate::process::system::ProcessMemory;
use crate::profile::count_tree::{FramePath, RawNode, RawTimelineSample};
use crate::sys;

/// Tasks that one wait is shared among, at most; over several waits all have their turn.
const MAX_SHARERS: usize = 64;
/// Readings kept per process, and tasks in them.
const MAX_READINGS: usize = 64;
const MAX_READ: usize = 1 << 18;
/// A reading says nothing about waits that ended so long before or after it, ns.
const MAX_AGE: u64 = 5_000_000_000;
/// Shortest time between two additions to the timeline, ns, and the time for each row.
const ADDITION: u64 = 200_000_000;
const PER_ROW: u64 = 1_000_000;
/// How long the thread of an event loop is taken to be the same, ns.
const LOOP_AGE: u64 = 1_000_000_000;
/// Event loops known, over all processes.
const MAX_LOOPS: usize = 1024;

/// What is known of suspended tasks.
pub(super) struct Awaits {
    processes: FxHashMap<Pid, ProcessAwaits>,
    /// Threads in which a hub of greenlets was seen.
    pub(super) hubs: FxHashSet<(Pid, Tid)>,
    /// Event loop -> its thread, and when that was read.
    loops: FxHashMap<(Pid, u64), (Tid, u64)>,
    /// What is not in the timeline yet.
    pub(super) rows: FxHashMap<(Pid, Tid, RawNode), NodeTime>,
    /// Wall time in the timeline that no sample counts, ns.
    uncounted: u64,
    /// When to add it; ns.
    next_addition: u64,
    rng: Rng,
}

impl Default for Awaits {
    fn default() -> Awaits {
        Awaits {
            processes: FxHashMap::default(),
            hubs: FxHashSet::default(),
            loops: FxHashMap::default(),
            rows: FxHashMap::default(),
            uncounted: 0,
            next_addition: 0,
            rng: Rng::new(sys::clock::now()),
        }
    }
}

impl Awaits {
    /// A thread runs a task of this event loop.
    pub(super) fn observe_loop(&mut self, (pid, tid): (Pid, Tid), event_loop: u64, now: u64) {
        if self.loops.len() >= MAX_LOOPS {
            self.loops.clear();
        }
        self.loops.insert((pid, event_loop), (tid, now));
    }

    /// The thread that ran an event loop the last time.
    pub(super) fn thread_of_loop(&self, pid: Pid, event_loop: u64) -> Option<Tid> {
        self.loops.get(&(pid, event_loop)).map(|(tid, _)| *tid)
    }

    /// Adds the time that the last reading of a process represents.
    fn add_time(&mut self, pid: Pid, shown: &[(Tid, RawNode)], represented: u64) {
        if represented == 0 {
            return;
        }
        for (tid, node) in shown {
            self.rows.entry((pid, *tid, *node)).or_default().awaited += represented;
        }
    }

    /// There are no more readings of a process.
    fn end_readings(&mut self, pid: Pid, now: u64) {
        if let Some(process) = self.processes.get_mut(&pid) {
            let represented = process.times.end(now);
            let shown = std::mem::take(&mut process.shown);
            self.add_time(pid, &shown, represented);
        }
    }

    /// Shares the time that a thread waited in poll among the tasks that it waited for. False if there are none.
    pub(super) fn share_wait(&mut self, s: &Sample, time: u64, length: u64) -> bool {
        let Some(process) = self.processes.get_mut(&s.pid) else {
            return false;
        };
        let reading = process.reading(s.time.saturating_sub(length.max(time)), s.time);
        let Some(nodes) = reading.and_then(|r| r.nodes.get(&s.tid)) else {
            return false;
        };
        let sharers = nodes.len().min(MAX_SHARERS);
        let share = time / sharers as u64;
        let first = process.cursor % nodes.len();
        for at in 0..sharers {
            let node = nodes[(first + at) % nodes.len()];
            let row = self.rows.entry((s.pid, s.tid, node)).or_default();
            row.wall += if at == 0 {
                time - share * (sharers as u64 - 1)
            } else {
                share
            };
        }
        process.cursor = first + sharers;
        true
    }
}

/// Time at one node, ns.
#[derive(Clone, Copy, Default)]
pub(super) struct NodeTime {
    wall: u64,
    awaited: u64,
}

#[derive(Default)]
pub(super) struct ProcessAwaits {
    /// When the tasks are read next, ns. 0: they were not read yet.
    due: u64,
    pauses: Pauses,
    times: ReadingTimes,
    /// What the last reading has found, by thread of the event loop.
    shown: Vec<(Tid, RawNode)>,
    /// Pages that it needed.
    pages: Vec<u64>,
    /// By task, how it is shown.
    nodes: FxHashMap<u64, (Rc<SuspendedTask>, Tid, TaskNode)>,
    pub(super) other: OtherAwaits,
    readings: VecDeque<Reading>,
    /// Where the next wait's shares begin.
    cursor: usize,
}

#[derive(Clone, Copy)]
pub(super) struct TaskNode {
    pub(super) node: RawNode,
    /// It does not await its event loop.
    pub(super) waits: bool,
}

/// The tasks that waited at some time.
pub(super) struct Reading {
    pub(super) time: u64,
    /// By thread of the event loop.
    pub(super) nodes: FxHashMap<Tid, Vec<RawNode>>,
    tasks: usize,
    /// Those that await their event loop, too.
    shown: Vec<(Tid, RawNode)>,
}

impl Reading {
    fn new(time: u64) -> Reading {
        Reading {
            time,
            nodes: FxHashMap::default(),
            tasks: 0,
            shown: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, tid: Tid, task: TaskNode) {
        self.shown.push((tid, task.node));
        if task.waits {
            self.nodes.entry(tid).or_default().push(task.node);
            self.tasks += 1;
        }
    }
}

impl ProcessAwaits {
    /// The reading that says which tasks a thread that waited from `start` to `end` waited for.
    fn reading(&self, start: u64, end: u64) -> Option<&Reading> {
        let before = self.readings.iter().rfind(|r| r.time <= end);
        let near = before.or(self.readings.front())?;
        let range = start.saturating_sub(MAX_AGE)..=end.saturating_add(MAX_AGE);
        range.contains(&near.time).then_some(near)
    }

    fn keep(&mut self, reading: Reading) {
        self.readings.push_back(reading);
        let mut tasks: usize = self.readings.iter().map(|r| r.tasks).sum();
        while self.readings.len() > MAX_READINGS || tasks > MAX_READ && self.readings.len() > 1 {
            tasks -= self.readings.pop_front().map_or(0, |r| r.tasks);
        }
    }
}

impl Session {
    /// Whether suspended tasks are read.
    fn reads_awaits(&self) -> bool {
        self.options.tasks && self.options.weighted.is_some()
    }

    /// Whether it is of use to know which thread runs an event loop.
    pub(super) fn needs_loops(&self) -> bool {
        self.reads_awaits() || self.options.lag.is_some()
    }

    /// How long until tasks are to be read.
    pub(super) fn until_awaits(&self) -> Duration {
        let due = self.awaits.processes.values().map(|p| p.due).min();
        match due {
            Some(due) => Duration::from_nanos(due.saturating_sub(sys::clock::now())),
            None => Duration::MAX,
        }
    }

    /// The process has ended.
    pub(super) fn end_awaits(&mut self, pid: Pid) {
        self.awaits.end_readings(pid, sys::clock::now());
    }

    /// The process has ended, or executes another program.
    pub(super) fn forget_awaits(&mut self, pid: Pid) {
        self.end_awaits(pid);
        self.awaits.processes.remove(&pid);
        self.awaits.hubs.retain(|(of, _)| *of != pid);
    }

    /// The nodes of the tree are about to be replaced.
    pub(super) fn forget_await_nodes(&mut self) {
        self.end_all_readings();
        self.add_await_rows();
        for process in self.awaits.processes.values_mut() {
            process.nodes.clear();
            process.other.forget_nodes();
            process.readings.clear();
        }
    }

    /// Reads the suspended tasks of the processes where that is due.
    pub(super) fn read_awaits(&mut self) {
        if !self.reads_awaits() {
            return;
        }
        let now = sys::clock::now();
        let pids: Vec<Pid> = self.targets.keys().copied().collect();
        for pid in pids {
            let known = self.awaits.processes.entry(pid).or_insert_with(|| ProcessAwaits {
                times: ReadingTimes::since(now),
                ..ProcessAwaits::default()
            });
            if known.due <= now {
                self.read_process_awaits(pid, now);
            }
        }
        if now >= self.awaits.next_addition {
            let rows = self.awaits.rows.len() as u64;
            self.add_await_rows();
            self.awaits.next_addition = now + ADDITION.max(PER_ROW * rows);
        }
    }

    /// There are no more readings.
    pub(super) fn finish_awaits(&mut self) {
        self.end_all_readings();
        self.add_await_rows();
    }

    fn end_all_readings(&mut self) {
        let now = sys::clock::now();
        let pids: Vec<Pid> = self.awaits.processes.keys().copied().collect();
        pids.into_iter().for_each(|pid| self.awaits.end_readings(pid, now));
    }

    /// Reads the suspended tasks of one process.
    fn read_process_awaits(&mut self, pid: Pid, now: u64) {
        let mut process = self.awaits.processes.remove(&pid).unwrap_or_default();
        let represented = process.times.read(now);
        self.awaits
            .add_time(pid, &std::mem::take(&mut process.shown), represented);
        let mut took = 0;
        let interpreter = self.python(pid).and_then(|(_, interpreter)| interpreter);
        if let Some(interpreter) = interpreter {
            let reader = self.take_reader(pid, now);
            let began = sys::clock::process_cpu_time();
            let mut reading = Reading::new(now);
            if let Some(mut reader) = reader {
                self.read_with(&mut reader, pid, &interpreter, &mut process, &mut reading);
                self.put_reader(pid, reader);
            }
            self.read_other_awaits((pid, &interpreter), &mut process, &mut reading);
            process.shown = std::mem::take(&mut reading.shown);
            process.keep(reading);
            // The first reading, which searches much memory, is not paid for by a pause: nothing would be known in it.
            if process.due != 0 {
                took = sys::clock::process_cpu_time().saturating_sub(began);
            }
        }
        let Awaits { rng, processes, .. } = &mut self.awaits;
        process.due = now + process.pauses.next(took, self.options.weighted.unwrap_or(0), rng);
        processes.insert(pid, process);
    }

    fn read_with(
        &mut self,
        reader: &mut TaskReader,
        pid: Pid,
        interpreter: &Interpreter,
        process: &mut ProcessAwaits,
        reading: &mut Reading,
    ) {
        let now = reading.time;
        let system = self.system.clone();
        let live = ProcessMemory(&*system, pid);
        let memory = Pages::with_first(&live, &process.pages);
        let Ok(tasks) = reader.suspended(&live, &memory) else {
            return;
        };
        let mut loops: FxHashMap<u64, Tid> = FxHashMap::default();
        for task in &tasks {
            let event_loop = task.event_loop;
            loops.entry(event_loop).or_insert_with(|| {
                let known = self.awaits.loops.get(&(pid, event_loop));
                if let Some((tid, read)) = known
                    && now.saturating_sub(*read) < LOOP_AGE
                {
                    return *tid;
                }
                let found = self.find_loop_thread(reader, &memory, (pid, interpreter), event_loop);
                // Of a loop whose thread is not known: the first one.
                found.or(known.map(|(tid, _)| *tid)).unwrap_or(pid)
            });
        }
        for (event_loop, tid) in &loops {
            let known = self.awaits.loops.get(&(pid, *event_loop));
            if known.is_none_or(|(of, read)| of != tid || now.saturating_sub(*read) >= LOOP_AGE) {
                self.awaits.observe_loop((pid, *tid), *event_loop, now);
            }
        }
        let mut nodes = std::mem::take(&mut process.nodes);
        let mut shown_now = FxHashMap::default();
        let mut path = FramePath::default();
        for task in tasks {
            let address = task.address();
            let tid = loops[&task.event_loop];
            let known = nodes.remove(&address);
            let known = known.filter(|(old, of, _)| Rc::ptr_eq(old, &task) && *of == tid);
            let shown = match known {
                Some((.., shown)) => shown,
                None => {
                    let (stack, kind) = self.await_stack((pid, tid), (&memory, &interpreter.layout), &task);
                    let name_bytes = |f: &RawFrame| name_bytes(&self.codes, f);
                    let (node, _) = self.tree.add_incremental(&mut path, &stack, 0, &name_bytes);
                    let waits = kind != AwaitKind::Turn;
                    TaskNode { node, waits }
                }
            };
            shown_now.insert(address, (task, tid, shown));
            reading.add(tid, shown);
        }
        process.nodes = shown_now;
        process.pages = memory.used();
    }

    /// The thread that runs an event loop, if that can be read.
    pub(super) fn find_loop_thread(
        &self,
        reader: &TaskReader,
        memory: &dyn Memory,
        (pid, interpreter): (Pid, &Interpreter),
        event_loop: u64,
    ) -> Option<Tid> {
        let thread_pointer = reader.loop_thread(memory, event_loop)?;
        let inside = thread_states::thread_id(memory, interpreter, thread_pointer)?;
        self.thread_ids.host(&*self.system, pid, inside, sys::clock::now())
    }

    /// The frames of a suspended task, outermost first.
    fn await_stack(
        &mut self,
        (pid, tid): (Pid, Tid),
        memory: (&dyn Memory, &Layout),
        task: &SuspendedTask,
    ) -> (Vec<RawFrame>, AwaitKind) {
        let mut stack = self.thread_frames(pid, tid);
        for (_, name) in task.chain.tasks.iter().rev() {
            stack.push(RawFrame::Task(self.tasks.names.id(name)));
        }
        let (frames, functions) = self.await_frames(pid, memory, &task.frames);
        stack.extend(frames);
        let kind = await_kind(
            task.awaited,
            functions.iter().rev().map(|(name, file)| (&**name, &**file)),
        );
        stack.push(RawFrame::Awaiting(kind));
        (stack, kind)
    }

    /// Adds what has been counted since the last time to the tree and the timeline.
    fn add_await_rows(&mut self) {
        let period = self.options.weighted.unwrap_or(1).max(1);
        let time = match self.timeline.last() {
            Some(last) => last.time,
            None => sys::clock::now(),
        };
        let mut rows: Vec<_> = std::mem::take(&mut self.awaits.rows).into_iter().collect();
        rows.sort_unstable_by_key(|(key, _)| *key);
        for ((pid, tid, node), row) in rows {
            // Shares are shorter than a period: what is left over counts for the next one. A stack that no sample has would
            // not be shown.
            self.awaits.uncounted += row.wall;
            let is_new = self
                .tree
                .nodes()
                .get(node as usize)
                .is_some_and(|(.., count)| *count == 0);
            let count = u32::try_from(self.awaits.uncounted / period).unwrap_or(u32::MAX);
            self.awaits.uncounted -= period * u64::from(count);
            let count = count.max(u32::from(is_new));
            self.tree.count(node, count);
            self.waits.push_await(row.awaited);
            self.timeline.push(RawTimelineSample {
                time,
                pid,
                tid,
                node,
                count,
                time_spent: row.wall,
                labels: 0,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(time: u64, tasks: usize) -> Reading {
        Reading {
            tasks,
            ..Reading::new(time)
        }
    }

    #[test]
    fn waits_belong_to_the_reading_before_their_end() {
        let mut process = ProcessAwaits::default();
        let time = |p: &ProcessAwaits, start, end| p.reading(start, end).map(|r| r.time);
        assert_eq!(time(&process, 0, 10), None);
        for at in [10, 20, 30] {
            process.keep(reading(at * 1_000_000_000, 1));
        }
        let s = 1_000_000_000;
        for (start, end, expected) in [
            (12, 25, Some(20)),
            (20, 30, Some(30)),
            (4, 8, Some(10)),
            (1, 2, None),
            (31, 34, Some(30)),
            (36, 40, None),
            (12, 40, Some(30)),
        ] {
            assert_eq!(
                time(&process, start * s, end * s),
                expected.map(|t: u64| t * s),
                "{start} {end}"
            );
        }
    }

    #[test]
    fn readings_are_bounded() {
        let mut process = ProcessAwaits::default();
        for at in 0..1000 {
            process.keep(reading(at, 10));
        }
        assert_eq!(process.readings.len(), MAX_READINGS);
        process.keep(reading(1000, 2 * MAX_READ));
        assert_eq!(process.readings.len(), 1);
    }
}
