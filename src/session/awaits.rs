//! What the suspended tasks of processes await, and for how long.
//!
//! All tasks of a process are read again and again at random times, without a stop, and each reading represents the time that is
//! nearer to it than to another one: for so long every task that is suspended has awaited what it awaits then. That is a value of
//! its own, since many tasks await at the same time. The wall time that the thread of their event loop waits in poll meanwhile is
//! shared among them.

use std::collections::VecDeque;
use std::time::Duration;

use rustc_hash::{FxHashMap, FxHashSet};

use super::asyncio::Asyncio;
use super::await_times::{Pauses, ReadingTimes};
use super::files::Files;
use super::greenlets::Greenlets;
use super::process::Process;
use super::process_tasks::ProcessTasks;
use super::segment::Segment;
use super::stacks::StackBuilder;
use super::task_source::{PythonThreads, TaskNames, TaskReading, TaskSource};
use super::trio::Trio;
use crate::capture::common::rng::Rng;
use crate::counts::{FramePath, RawNode, RawTimelineSample};
use crate::cpython::frame_groups;
use crate::cpython::tasks::{self, RawAwaitFrame};
use crate::event::{AwaitKind, Pid, Sample, Tid};
use crate::frame::RawFrame;
use crate::process::memory::Pages;

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

/// The readings of suspended tasks.
pub(super) struct Awaits {
    /// The sampling period, ns; `None`: suspended tasks are not read.
    period: Option<u64>,
    /// Time that is not in the segment yet.
    rows: FxHashMap<(Pid, Tid, RawNode), NodeTime>,
    /// Wall time in the segment that no sample counts, ns.
    uncounted: u64,
    /// When to add the rows; ns.
    next_addition: u64,
    rng: Rng,
}

/// Time at one node, ns.
#[derive(Clone, Copy, Default)]
struct NodeTime {
    wall: u64,
    awaited: u64,
}

/// Suspended tasks of one process.
#[derive(Default)]
pub(super) struct ProcessAwaits {
    /// When the tasks are read next, ns. 0: they were not read yet.
    due: u64,
    pauses: Pauses,
    /// `None`: no reading was due yet.
    times: Option<ReadingTimes>,
    /// What the last reading has found, by thread of the event loop.
    shown: Vec<(Tid, RawNode)>,
    nodes: KnownNodes,
    /// Pages that the last reading of asyncio's tasks needed: the next one reads them together.
    pages: Vec<u64>,
    threads: PythonThreads,
    readings: VecDeque<Reading>,
    /// Where the next wait's shares begin.
    cursor: usize,
}

/// The nodes of tasks that are shown as at the reading before, by kind and address.
#[derive(Default)]
struct KnownNodes {
    asyncio: TaskNodes<Asyncio>,
    greenlets: TaskNodes<Greenlets>,
    trio: TaskNodes<Trio>,
}

/// Suspended tasks of one kind, by address: the task as it was read, its thread, and how it is shown. `None`: it awaits nothing
/// itself.
struct TaskNodes<S: TaskSource>(FxHashMap<u64, (S::Suspended, Tid, Option<TaskNode>)>);

impl<S: TaskSource> Default for TaskNodes<S> {
    fn default() -> TaskNodes<S> {
        TaskNodes(FxHashMap::default())
    }
}

/// How a task is shown.
#[derive(Clone, Copy)]
struct TaskNode {
    node: RawNode,
    /// It does not await its event loop.
    waits: bool,
}

/// The tasks that waited at some time.
struct Reading {
    time: u64,
    /// By thread of the event loop.
    nodes: FxHashMap<Tid, Vec<RawNode>>,
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

    fn add(&mut self, tid: Tid, task: TaskNode) {
        self.shown.push((tid, task.node));
        if task.waits {
            self.nodes.entry(tid).or_default().push(task.node);
            self.tasks += 1;
        }
    }
}

impl ProcessAwaits {
    /// The nodes of the tree are about to be replaced.
    pub(super) fn forget_nodes(&mut self) {
        self.nodes = KnownNodes::default();
        self.readings.clear();
    }

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

/// What a reading of tasks takes part in: where stacks get their names and nodes.
pub(super) struct AwaitSinks<'a> {
    pub(super) names: &'a mut TaskNames,
    pub(super) stacks: &'a StackBuilder,
    pub(super) segment: &'a mut Segment,
}

impl<S: TaskSource> TaskNodes<S> {
    /// Reads the suspended tasks of this kind into `found`.
    fn read(&mut self, source: &mut S, reading: &mut TaskReading<'_>, sinks: &mut AwaitSinks<'_>, found: &mut Reading) {
        let mut before = std::mem::take(&mut self.0);
        let mut path = FramePath::default();
        for (tid, task) in source.suspended(reading) {
            let address = S::address(&task);
            let known = before.remove(&address);
            let known = known.filter(|(old, of, _)| *of == tid && S::is_shown_as(&task, old));
            let shown = match known {
                Some((.., shown)) => shown,
                None => show(source, &task, tid, reading, sinks, &mut path),
            };
            if let Some(shown) = shown {
                found.add(tid, shown);
            }
            self.0.insert(address, (task, tid, shown));
        }
    }
}

/// Adds the stack of a suspended task to the segment.
fn show<S: TaskSource>(
    source: &S,
    task: &S::Suspended,
    tid: Tid,
    reading: &mut TaskReading<'_>,
    sinks: &mut AwaitSinks<'_>,
    path: &mut FramePath,
) -> Option<TaskNode> {
    let (frames, functions) = await_frames(reading, S::frames(task))?;
    let description = source.describe(task, &functions, reading, sinks.names)?;
    let kind = description.kind;
    let pid = reading.process.pid();
    let above = sinks.stacks.thread_frames(pid, tid).chain(description.above);
    let stack: Vec<RawFrame> = above.chain(frames).chain([RawFrame::Awaiting(kind)]).collect();
    let files = &*reading.files;
    let node = sinks.segment.node(path, &stack, &|f| files.name_bytes(f));
    Some(TaskNode {
        node,
        waits: kind != AwaitKind::Turn,
    })
}

/// Qualified name and file of a function.
type FunctionName = (String, String);

/// Suspended frames, and the names of their functions as far as these can be read.
fn await_frames(reading: &mut TaskReading<'_>, frames: &[RawAwaitFrame]) -> Option<(Vec<RawFrame>, Vec<FunctionName>)> {
    let (process, files) = (reading.process, &mut *reading.files);
    let layout = &process.interpreter()?.layout;
    let memory = reading.memory;
    let (mut stack, mut functions) = (Vec::new(), Vec::new());
    for raw in frames {
        stack.push(
            match tasks::code_of(&mut files.codes, process.pid(), memory, layout, raw) {
                Ok(id) => {
                    let code = files.codes.get(id);
                    let name = if code.qualname.is_empty() {
                        tasks::frame_name(memory, layout, raw).unwrap_or_else(|| code.name.clone())
                    } else {
                        code.qualname.clone()
                    };
                    functions.push((name, code.filename.clone()));
                    let instr = frame_groups::instruction(layout, raw.code, raw.instr);
                    RawFrame::Python { code: id, instr }
                }
                Err(why) => RawFrame::Truncated(why),
            },
        );
    }
    Some((stack, functions))
}

impl Awaits {
    /// `period`: of sampling, ns, where suspended tasks are to be read; `seed`: of the times of readings.
    pub(super) fn new(period: Option<u64>, seed: u64) -> Awaits {
        Awaits {
            period,
            rows: FxHashMap::default(),
            uncounted: 0,
            next_addition: 0,
            rng: Rng::new(seed),
        }
    }

    /// Whether suspended tasks are read.
    pub(super) fn are_read(&self) -> bool {
        self.period.is_some()
    }

    /// How long until the tasks of a process are to be read.
    pub(super) fn until_reading(&self, own: &ProcessAwaits, now: u64) -> Duration {
        if self.period.is_none() || own.times.is_none() {
            return Duration::MAX;
        }
        Duration::from_nanos(own.due.saturating_sub(now))
    }

    /// Shares the time that a thread waited among the tasks that it waited for; `time` and `length` of the interval in
    /// ns. False if there are none.
    pub(super) fn share_wait(&mut self, own: &mut ProcessAwaits, s: &Sample, time: u64, length: u64) -> bool {
        let reading = own.reading(s.time.saturating_sub(length.max(time)), s.time);
        let Some(nodes) = reading.and_then(|r| r.nodes.get(&s.tid)) else {
            return false;
        };
        let sharers = nodes.len().min(MAX_SHARERS);
        let share = time / sharers as u64;
        let first = own.cursor % nodes.len();
        for at in 0..sharers {
            let node = nodes[(first + at) % nodes.len()];
            let row = self.rows.entry((s.pid, s.tid, node)).or_default();
            row.wall += if at == 0 {
                time - share * (sharers as u64 - 1)
            } else {
                share
            };
        }
        own.cursor = first + sharers;
        true
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

    /// Takes note that there are no more readings of a process.
    pub(super) fn end_readings(&mut self, own: &mut ProcessAwaits, pid: Pid, now: u64) {
        if let Some(times) = &mut own.times {
            let represented = times.end(now);
            let shown = std::mem::take(&mut own.shown);
            self.add_time(pid, &shown, represented);
        }
    }

    /// Reads the suspended tasks of a process if that is due; `now`: CLOCK_MONOTONIC, ns.
    pub(super) fn read(
        &mut self,
        own: &mut ProcessAwaits,
        own_tasks: &mut ProcessTasks,
        process: &Process,
        files: &mut Files,
        sinks: &mut AwaitSinks<'_>,
        now: u64,
    ) {
        let Some(period) = self.period else { return };
        let times = own.times.get_or_insert_with(|| ReadingTimes::since(now));
        if own.due > now {
            return;
        }
        let represented = times.read(now);
        self.add_time(process.pid(), &std::mem::take(&mut own.shown), represented);
        let mut took = 0;
        if process.interpreter().is_some() {
            let began = files.system.own_cpu_time();
            let mut found = Reading::new(now);
            let ProcessTasks {
                asyncio,
                greenlets,
                trio,
            } = own_tasks;
            let system = files.system.clone();
            let live = process.live_memory(&*system);
            let memory = Pages::with_first(&live, &own.pages);
            let mut reading = TaskReading {
                process,
                files,
                memory: &memory,
                time: now,
                threads: &mut own.threads,
                taken: &FxHashSet::default(),
            };
            own.nodes.asyncio.read(asyncio, &mut reading, sinks, &mut found);
            own.pages = memory.used();
            let taken = found.nodes.keys().copied().collect();
            let memory = Pages::new(&live);
            (reading.taken, reading.memory) = (&taken, &memory);
            own.nodes.greenlets.read(greenlets, &mut reading, sinks, &mut found);
            own.nodes.trio.read(trio, &mut reading, sinks, &mut found);
            own.shown = std::mem::take(&mut found.shown);
            own.keep(found);
            // The first reading, which searches much memory, is not paid for by a pause: nothing would be known in it.
            if own.due != 0 {
                took = system.own_cpu_time().saturating_sub(began);
            }
        }
        own.due = now + own.pauses.next(took, period, &mut self.rng);
    }

    /// Adds what has been counted to the segment, from time to time; `now`: CLOCK_MONOTONIC, ns.
    pub(super) fn add_due_rows(&mut self, segment: &mut Segment, now: u64) {
        if now >= self.next_addition {
            let rows = self.rows.len() as u64;
            self.add_rows(segment, now);
            self.next_addition = now + ADDITION.max(PER_ROW * rows);
        }
    }

    /// Adds what has been counted since the last time to the segment.
    pub(super) fn add_rows(&mut self, segment: &mut Segment, now: u64) {
        let period = self.period.unwrap_or(1).max(1);
        let time = match segment.timeline.last() {
            Some(last) => last.time,
            None => now,
        };
        let mut rows: Vec<_> = std::mem::take(&mut self.rows).into_iter().collect();
        rows.sort_unstable_by_key(|(key, _)| *key);
        for ((pid, tid, node), row) in rows {
            // Shares are shorter than a period: what is left over counts for the next one. A stack that no sample has would
            // not be shown.
            self.uncounted += row.wall;
            let nodes = segment.tree.nodes();
            let is_new = nodes.get(node as usize).is_some_and(|(.., count)| *count == 0);
            let count = u32::try_from(self.uncounted / period).unwrap_or(u32::MAX);
            self.uncounted -= period * u64::from(count);
            let sample = RawTimelineSample {
                time,
                pid,
                tid,
                node,
                count: count.max(u32::from(is_new)),
                amount: row.wall,
                labels: 0,
            };
            segment.add_await(sample, row.awaited);
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
