//! Event loops that are kept from running by one callback, or one step of a task.
//!
//! The queue of a loop's ready callbacks says how many the loop has begun. It is read every few milliseconds, without a stop:
//! while that number stays the same, and the thread does not wait for events, the loop is in the same callback. Samples of the
//! thread say in which stack, and make the times exact.

use std::collections::VecDeque;
use std::time::Duration;

use rustc_hash::FxHashMap;
use syscalls::Sysno;

use super::asyncio::{Asyncio, read_loop_thread};
use super::files::Files;
use super::process::Process;
use super::segment::Segment;
use crate::counts::RawLag;
use crate::counts::RawNode;
use crate::cpython::code_object::CodeTable;
use crate::cpython::tasks::TaskReader;
use crate::event::{Pid, Sample, Tid};
use crate::frame::RawFrame;
use crate::process::memory::Pages;

/// Time between two readings of a queue, ns, at most; a tenth of the threshold if that is less.
const INTERVAL: u64 = 4_000_000;
const MIN_INTERVAL: u64 = 500_000;
/// Time between two searches for event loops, ns, and as a multiple of the time that one takes. While none is known, they are the
/// more frequent the fewer there were since a file was loaded: the program may be about to run its first one.
const SEARCH: u64 = 500_000_000;
const FIRST_SEARCH: u64 = 5_000_000;
const PAUSE_FACTOR: u64 = 20;
/// Samples of a callback arrive at most so long after it, ns.
const LATE: u64 = 1_000_000_000;
/// Last samples kept of each thread.
const MAX_SAMPLES: usize = 1024;
/// Callbacks kept, and those that are not finished.
const MAX_LAGS: usize = 10_000;
const MAX_OPEN: usize = 1024;
/// Event loops of a process that are watched.
const MAX_LOOPS: usize = 64;

/// The search for callbacks that keep their event loops.
#[derive(Default)]
pub(super) struct Lags {
    /// Shortest time of a callback that is listed, ns; `None`: no event loops are watched.
    threshold: Option<u64>,
    /// Callbacks that have ended, of which samples may still arrive.
    ended: VecDeque<Callback>,
    /// When the queues are read next, ns.
    due: u64,
}

/// The event loops of one process that are watched.
#[derive(Default)]
pub(super) struct ProcessLags {
    next_search: u64,
    /// Searches that found no loop, and the state of the mappings before them.
    vain: u64,
    generation: Option<u64>,
    loops: Vec<WatchedLoop>,
    /// Last samples of their threads.
    samples: FxHashMap<Tid, VecDeque<LoopSample>>,
}

struct WatchedLoop {
    event_loop: u64,
    queue: u64,
    tid: Tid,
    /// `pthread_self` of that thread, if it can be read that it runs the loop.
    thread: Option<u64>,
    /// Callbacks begun when the queue was read the last time, and when that was.
    begun: u64,
    read: u64,
    current: Callback,
    /// The current callback has been examined, and is one.
    is_long: bool,
    /// Its thread sleeps in it, and its stack is not known.
    sleeps: bool,
}

impl ProcessLags {
    /// Continues with the loops that `stay`. A long callback of another one has ended, and is not to be lost.
    fn retain(&mut self, now: u64, ended: &mut VecDeque<Callback>, stay: impl Fn(&WatchedLoop) -> bool) {
        self.loops.retain(|known| {
            let stays = stay(known);
            // If it cannot be read whether a loop runs, perhaps it stopped before, and was in no callback.
            if !stays && known.thread.is_some() {
                ended.extend(known.unfinished(now));
            }
            stays
        });
    }
}

impl WatchedLoop {
    /// The callback that it is in, if that is long, as one that ended between the last reading and `now`.
    fn unfinished(&self, now: u64) -> Option<Callback> {
        self.is_long.then_some(Callback {
            ended: (self.read, now),
            ..self.current
        })
    }
}

/// A callback that a loop has begun. Times in ns.
#[derive(Clone, Copy, Default)]
struct Callback {
    pid: Pid,
    tid: Tid,
    /// It began, and it ended, after the first and not after the second.
    began: (u64, u64),
    ended: (u64, u64),
    /// The stack that was read while it slept.
    node: RawNode,
}

/// A sample of a loop's thread.
#[derive(Clone, Copy)]
struct LoopSample {
    /// The interval off the CPU that it ends; else both are the same.
    from: u64,
    to: u64,
    /// `None`: the loop waited for events.
    node: Option<RawNode>,
}

impl Callback {
    /// Narrows the times by samples of the thread, and takes the stack that has most of the time.
    fn finish<'a>(mut self, samples: impl Iterator<Item = &'a LoopSample>) -> RawLag {
        let mut by_node: FxHashMap<RawNode, u64> = FxHashMap::default();
        for s in samples {
            let Some(node) = s.node else {
                if s.to > self.began.0 && s.to <= self.began.1 {
                    self.began.0 = s.to;
                }
                if s.from >= self.ended.0 && s.from < self.ended.1 {
                    self.ended.1 = s.from;
                }
                continue;
            };
            // An interval that overlaps what is certain belongs to the callback as a whole.
            if s.from < self.ended.0 && s.to > self.began.1 {
                self.began.1 = self.began.1.min(s.from.max(self.began.0));
                self.ended.0 = self.ended.0.max(s.to.min(self.ended.1));
                *by_node.entry(node).or_default() += (s.to - s.from).max(1_000_000);
            }
        }
        let most = by_node.into_iter().max_by_key(|(node, time)| (*time, *node));
        let middle = |(from, to): (u64, u64)| from + to.saturating_sub(from) / 2;
        RawLag {
            pid: self.pid,
            tid: self.tid,
            start: middle(self.began),
            length: middle(self.ended).saturating_sub(middle(self.began)),
            node: most.map_or(self.node, |(node, _)| node),
        }
    }
}

impl ProcessLags {
    /// The nodes of the tree are about to be replaced: stacks of callbacks that are not complete are not known any more.
    pub(super) fn forget_nodes(&mut self) {
        self.samples.values_mut().for_each(VecDeque::clear);
        for watched in &mut self.loops {
            watched.current.node = 0;
        }
    }

    /// Finds the event loops of the process, from time to time; `now`: CLOCK_MONOTONIC, ns. Callbacks of loops that have gone are
    /// added to `ended`.
    fn find_loops(
        &mut self,
        ended: &mut VecDeque<Callback>,
        asyncio: &mut Asyncio,
        process: &Process,
        files: &Files,
        now: u64,
    ) {
        let Asyncio {
            reader: Some(reader),
            loops: threads,
            ..
        } = asyncio
        else {
            return;
        };
        let generation = Some(process.space.generation);
        if generation != self.generation && self.loops.is_empty() {
            (self.vain, self.generation, self.next_search) = (0, generation, 0);
        }
        if now < self.next_search {
            return;
        }
        let began = files.system.own_cpu_time();
        let live = process.live_memory(&*files.system);
        let memory = Pages::new(&live);
        let found = reader.event_loops(&memory);
        // A search that fails says nothing about the loops that are known.
        if let Ok(loops) = &found {
            self.retain(now, ended, |known| {
                // While a callback of a timer or protocol runs, its loop may have no task.
                let runs = known.thread.is_some() && reader.loop_thread(&memory, known.event_loop) == known.thread;
                let is_used = runs || loops.contains(&known.event_loop);
                // Another loop may have taken its place.
                is_used && reader.ready_queue(&memory, known.event_loop) == Some(known.queue)
            });
        }
        for event_loop in found.unwrap_or_default() {
            if self.loops.len() >= MAX_LOOPS {
                break;
            }
            if self.loops.iter().any(|known| known.event_loop == event_loop) {
                continue;
            }
            let known = threads.last_thread(event_loop);
            let tid = read_loop_thread(process, files, reader, &memory, event_loop);
            let thread = tid.and_then(|_| reader.loop_thread(&memory, event_loop));
            let (Some(tid), Some(queue)) = (tid.or(known), reader.ready_queue(&memory, event_loop)) else {
                continue;
            };
            self.samples.entry(tid).or_default();
            self.loops.push(WatchedLoop {
                event_loop,
                queue,
                tid,
                thread,
                begun: 0,
                read: 0,
                current: Callback::default(),
                is_long: false,
                sleeps: false,
            });
        }
        let took = files.system.own_cpu_time().saturating_sub(began);
        let mut pause = SEARCH;
        if self.loops.is_empty() {
            self.vain += 1;
            pause = pause.min(FIRST_SEARCH * self.vain);
        }
        self.next_search = now + pause.max(PAUSE_FACTOR * took);
    }

    /// The threads of loops that sleep in a callback whose stack is not known, each asked for once.
    pub(super) fn take_sleeping(&mut self) -> Vec<Tid> {
        let sleeping = self.loops.iter_mut().filter(|watched| watched.sleeps);
        sleeping
            .map(|watched| {
                watched.sleeps = false;
                watched.tid
            })
            .collect()
    }

    /// Takes in the stack of such a thread; `in_callback`: it is in a callback, and not in another way to wait for events.
    pub(super) fn add_sleeping(&mut self, tid: Tid, node: RawNode, in_callback: bool, now: u64) {
        for watched in self.loops.iter_mut().filter(|watched| watched.tid == tid) {
            if in_callback {
                watched.current.node = node;
            } else {
                watched.is_long = false;
                watched.current.began = (watched.read, now);
            }
        }
    }

    /// Remembers a sample with this stack that was just counted, in the rows of the segment's timeline from `rows` on.
    pub(super) fn observe(
        &mut self,
        s: &Sample,
        stack: &[RawFrame],
        codes: &CodeTable,
        segment: &Segment,
        rows: usize,
    ) {
        let Some(samples) = self.samples.get_mut(&s.tid).filter(|_| s.wake_up.wakes.is_none()) else {
            return;
        };
        let waits = s.time_spent.blocked > 0 && s.system_call.is_some_and(|call| waits_for_events(call.into()));
        let counted = segment.timeline.get(rows..).unwrap_or_default();
        let node = counted.iter().max_by_key(|row| row.amount).map(|row| row.node);
        let node = node.filter(|_| !waits);
        if node.is_none() && !waits || node.is_some() && !is_in_callback(stack, codes) {
            return;
        }
        if samples.len() >= MAX_SAMPLES {
            samples.pop_front();
        }
        let t = &s.time_spent;
        let parts = [
            (t.blocked, t.blocked_length),
            (t.throttled, t.throttled_length),
            (t.runnable, t.runnable_length),
        ];
        let length: u64 = parts
            .iter()
            .filter(|(time, _)| *time > 0)
            .map(|(_, length)| length)
            .sum();
        samples.push_back(LoopSample {
            from: s.time.saturating_sub(length),
            to: s.time,
            node,
        });
    }
}

/// Whether a stack is that of a callback, and not of the event loop itself.
pub(super) fn is_in_callback(stack: &[RawFrame], codes: &CodeTable) -> bool {
    let (mut in_loop, mut in_callback) = (false, false);
    for frame in stack {
        let RawFrame::Python { code, .. } = frame else { continue };
        let code = codes.get(*code);
        let is = |name: &str, file: &str| code.name == name && code.filename.ends_with(file);
        if is("_run_once", "asyncio/base_events.py") {
            (in_loop, in_callback) = (true, false);
        } else if is("_run", "asyncio/events.py") {
            in_callback = true;
        }
    }
    in_callback || !in_loop
}

impl Lags {
    /// `threshold`: shortest time of a callback that is listed, ns.
    pub(super) fn new(threshold: Option<u64>) -> Lags {
        Lags {
            threshold,
            ..Lags::default()
        }
    }

    /// How long until queues are to be read.
    pub(super) fn until_reading(&self, now: u64) -> Duration {
        match self.threshold {
            None => Duration::MAX,
            Some(_) => Duration::from_nanos(self.due.saturating_sub(now)),
        }
    }

    /// Whether the queues of all processes are to be read now; `now`: CLOCK_MONOTONIC, ns.
    pub(super) fn begin_reading(&mut self, now: u64) -> bool {
        let Some(threshold) = self.threshold.filter(|_| now >= self.due) else {
            return false;
        };
        self.due = now + (threshold / 10).clamp(MIN_INTERVAL, INTERVAL);
        true
    }

    /// Reads the queues of a process.
    pub(super) fn read(
        &mut self,
        own: &mut ProcessLags,
        asyncio: &mut Asyncio,
        process: &Process,
        files: &Files,
        now: u64,
    ) {
        let Some(threshold) = self.threshold else { return };
        asyncio.search(process, files, now);
        own.find_loops(&mut self.ended, asyncio, process, files, now);
        if let Some(reader) = &asyncio.reader {
            for watched in &mut own.loops {
                self.read_loop(process, files, reader, watched, threshold);
            }
        }
    }

    /// Takes the callbacks that ended so long ago that no samples of them are to come as complete.
    pub(super) fn finish_late<'a>(
        &mut self,
        now: u64,
        segment: &mut Segment,
        own: impl Fn(Pid) -> Option<&'a ProcessLags>,
    ) {
        self.finish(now.saturating_sub(LATE), segment, own);
    }

    /// The nodes of the tree are about to be replaced.
    pub(super) fn forget_nodes(&mut self) {
        self.ended.iter_mut().for_each(|callback| callback.node = 0);
    }

    /// Ends the callbacks of a process that has ended or executes another program.
    pub(super) fn end_process(&mut self, own: &mut ProcessLags, pid: Pid, segment: &mut Segment, now: u64) {
        own.retain(now, &mut self.ended, |_| false);
        let (ended, others) = self.ended.drain(..).partition(|callback| callback.pid == pid);
        self.ended = ended;
        self.finish(u64::MAX, segment, |_| Some(own));
        self.ended = others;
    }

    /// Ends the callbacks of a process that have not ended.
    pub(super) fn end_unfinished(&mut self, own: &ProcessLags, now: u64) {
        let unfinished = own.loops.iter().filter_map(|watched| watched.unfinished(now));
        self.ended.extend(unfinished);
    }

    /// Takes the callbacks that ended before a time as complete; `own`: what is known of the process with a number.
    pub(super) fn finish<'a>(
        &mut self,
        before: u64,
        segment: &mut Segment,
        own: impl Fn(Pid) -> Option<&'a ProcessLags>,
    ) {
        let Some(threshold) = self.threshold else { return };
        while self.ended.front().is_some_and(|c| c.ended.1 < before) || self.ended.len() > MAX_OPEN {
            let Some(callback) = self.ended.pop_front() else { break };
            let samples = own(callback.pid).and_then(|own| own.samples.get(&callback.tid));
            let lag = callback.finish(samples.into_iter().flatten());
            if lag.length >= threshold && segment.lags.len() < MAX_LAGS {
                segment.lags.push(lag);
            }
        }
    }

    fn read_loop(
        &mut self,
        process: &Process,
        files: &Files,
        reader: &TaskReader,
        watched: &mut WatchedLoop,
        threshold: u64,
    ) {
        let live = process.live_memory(&*files.system);
        // What is read is of a time in between.
        let earliest = files.system.now();
        let begun = reader.callbacks_begun(&live, watched.queue);
        let now = files.system.now();
        let Some(begun) = begun else { return };
        let before = std::mem::replace(&mut watched.read, earliest);
        let mut ends = |watched: &mut WatchedLoop| {
            if std::mem::take(&mut watched.is_long) {
                self.ended.push_back(Callback {
                    ended: (before, now),
                    ..watched.current
                });
            }
            watched.current = Callback {
                pid: process.pid(),
                tid: watched.tid,
                began: (if before == 0 { now } else { before }, now),
                ..Callback::default()
            };
        };
        if begun != watched.begun || before == 0 {
            watched.begun = begun;
            return ends(watched);
        }
        if !watched.is_long && now.saturating_sub(watched.current.began.1) < threshold / 2 {
            return;
        }
        let call = files.system.blocked_call(process.pid(), watched.tid);
        if call.is_some_and(waits_for_events) {
            // Its next callback begins after this.
            return ends(watched);
        }
        // The queue of a loop that has stopped does not change any more, whatever its thread does.
        let (thread, is_new) = (watched.thread, !watched.is_long);
        if is_new && thread.is_some() && reader.loop_thread(&live, watched.event_loop) != thread {
            return;
        }
        watched.sleeps = call.is_some() && watched.current.node == 0;
        watched.is_long = true;
    }
}

/// Whether an event loop waits for events in this system call. (`poll` and `select` are also used by blocking sockets.)
fn waits_for_events(call: u64) -> bool {
    let name = usize::try_from(call).ok().and_then(Sysno::new).map(|call| call.name());
    name.is_some_and(|name| name.starts_with("epoll") || name.starts_with("io_uring"))
}

#[cfg(test)]
mod tests;
