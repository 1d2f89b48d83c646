//! Event loops that are kept from running by one callback, or one step of a task.
//!
//! The queue of a loop's ready callbacks says how many the loop has begun. It is read every few milliseconds, without a stop:
//! while that number stays the same, and the thread does not wait for events, the loop is in the same callback. Samples of the
//! thread say in which stack, and make the times exact.

use std::collections::VecDeque;
use std::fs::File;
use std::time::Duration;

use rustc_hash::FxHashMap;
use syscalls::Sysno;

use super::{LastStack, Session};
use crate::cpython::tasks::TaskReader;
use crate::cpython_layout::Interpreter;
use crate::event::{Pid, Sample, Tid};
use crate::frame::RawFrame;
use crate::process::memory::Pages;
use crate::process::system::ProcessMemory;
use crate::profile::count_tree::RawNode;
use crate::profile::lags::RawLag;
use crate::sys;
use crate::sys::procfs;

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

/// The event loops that are watched.
#[derive(Default)]
pub(super) struct Lags {
    processes: FxHashMap<Pid, WatchedProcess>,
    /// Last samples by thread.
    samples: FxHashMap<(Pid, Tid), VecDeque<LoopSample>>,
    /// Callbacks that have ended, of which samples may still arrive.
    ended: VecDeque<Callback>,
    pub(super) done: Vec<RawLag>,
    /// When the queues are read next, ns.
    due: u64,
}

#[derive(Default)]
struct WatchedProcess {
    next_search: u64,
    /// Searches that found no loop, and the state of the mappings before them.
    vain: u64,
    generation: Option<u64>,
    loops: Vec<WatchedLoop>,
}

struct WatchedLoop {
    event_loop: u64,
    queue: u64,
    tid: Tid,
    /// `pthread_self` of that thread, if it can be read that it runs the loop.
    thread: Option<u64>,
    system_call: Option<File>,
    /// Callbacks begun when the queue was read the last time, and when that was.
    begun: u64,
    read: u64,
    current: Callback,
    /// The current callback has been examined, and is one.
    is_long: bool,
    /// Its thread sleeps in it, and its stack is not known.
    sleeps: bool,
}

impl WatchedProcess {
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

impl Lags {
    /// The nodes of the tree are about to be replaced: stacks of callbacks that are not complete are not known any more.
    pub(super) fn forget_nodes(&mut self) {
        self.samples.values_mut().for_each(VecDeque::clear);
        let watched = self.processes.values_mut().flat_map(|process| &mut process.loops);
        let current = watched.map(|watched| &mut watched.current);
        current.chain(&mut self.ended).for_each(|callback| callback.node = 0);
    }
}

impl Session {
    /// How long until queues are to be read.
    pub(super) fn until_lags(&self) -> Duration {
        match (self.options.lag, self.lags.due) {
            (None, _) => Duration::MAX,
            (_, due) => Duration::from_nanos(due.saturating_sub(sys::clock::now())),
        }
    }

    /// The process has ended, or executes another program.
    pub(super) fn forget_lags(&mut self, pid: Pid) {
        if let Some(mut process) = self.lags.processes.remove(&pid) {
            process.retain(sys::clock::now(), &mut self.lags.ended, |_| false);
        }
    }

    /// Callbacks that kept their loop for as long as the threshold.
    pub fn lags(&self) -> &[RawLag] {
        &self.lags.done
    }

    /// Reads the queues if that is due.
    pub(super) fn read_lags(&mut self) {
        let Some(threshold) = self.options.lag else { return };
        let now = sys::clock::now();
        if now < self.lags.due {
            return;
        }
        self.lags.due = now + (threshold / 10).clamp(MIN_INTERVAL, INTERVAL);
        let pids: Vec<Pid> = self.targets.keys().copied().collect();
        for pid in pids {
            let interpreter = self.python(pid).and_then(|(_, interpreter)| interpreter);
            if let Some(interpreter) = interpreter
                && let Some(mut reader) = self.take_reader(pid, now)
            {
                let mut process = self.lags.processes.remove(&pid).unwrap_or_default();
                self.find_loops(pid, &mut reader, &interpreter, &mut process, now);
                for watched in &mut process.loops {
                    self.read_loop(pid, &reader, watched, threshold);
                }
                self.put_reader(pid, reader);
                for watched in process.loops.iter_mut().filter(|watched| watched.sleeps) {
                    self.read_sleeping_loop(pid, watched);
                }
                self.lags.processes.insert(pid, process);
            }
        }
        self.finish_lags(now.saturating_sub(LATE), threshold);
    }

    /// Ends all callbacks that have not ended.
    pub(super) fn end_lags(&mut self) {
        let Some(threshold) = self.options.lag else { return };
        let now = sys::clock::now();
        for process in self.lags.processes.values() {
            let unfinished = process.loops.iter().filter_map(|watched| watched.unfinished(now));
            self.lags.ended.extend(unfinished);
        }
        self.finish_lags(u64::MAX, threshold);
    }

    /// Takes the callbacks that ended before a time as complete.
    fn finish_lags(&mut self, before: u64, threshold: u64) {
        let lags = &mut self.lags;
        while lags.ended.front().is_some_and(|c| c.ended.1 < before) || lags.ended.len() > MAX_OPEN {
            let Some(callback) = lags.ended.pop_front() else { break };
            let samples = lags.samples.get(&(callback.pid, callback.tid));
            let lag = callback.finish(samples.into_iter().flatten());
            if lag.length >= threshold && lags.done.len() < MAX_LAGS {
                lags.done.push(lag);
            }
        }
    }

    /// Finds the event loops of a process, from time to time.
    fn find_loops(
        &mut self,
        pid: Pid,
        reader: &mut TaskReader,
        interpreter: &Interpreter,
        process: &mut WatchedProcess,
        now: u64,
    ) {
        let generation = self.targets.get(&pid).map(|target| target.process.generation);
        if generation != process.generation && process.loops.is_empty() {
            (process.vain, process.generation, process.next_search) = (0, generation, 0);
        }
        if now < process.next_search {
            return;
        }
        let began = sys::clock::process_cpu_time();
        let live = ProcessMemory(&*self.system, pid);
        let memory = Pages::new(&live);
        let found = reader.event_loops(&memory);
        // A search that fails says nothing about the loops that are known.
        if let Ok(loops) = &found {
            process.retain(now, &mut self.lags.ended, |known| {
                // While a callback of a timer or protocol runs, its loop may have no task.
                let runs = known.thread.is_some() && reader.loop_thread(&memory, known.event_loop) == known.thread;
                let is_used = runs || loops.contains(&known.event_loop);
                // Another loop may have taken its place.
                is_used && reader.ready_queue(&memory, known.event_loop) == Some(known.queue)
            });
        }
        for event_loop in found.unwrap_or_default() {
            if process.loops.len() >= MAX_LOOPS {
                break;
            }
            if process.loops.iter().any(|known| known.event_loop == event_loop) {
                continue;
            }
            let known = self.awaits.thread_of_loop(pid, event_loop);
            let tid = self.find_loop_thread(reader, &memory, (pid, interpreter), event_loop);
            let thread = tid.and_then(|_| reader.loop_thread(&memory, event_loop));
            let (Some(tid), Some(queue)) = (tid.or(known), reader.ready_queue(&memory, event_loop)) else {
                continue;
            };
            self.lags.samples.entry((pid, tid)).or_default();
            process.loops.push(WatchedLoop {
                event_loop,
                queue,
                tid,
                thread,
                system_call: File::open(format!("/proc/{pid}/task/{tid}/syscall")).ok(),
                begun: 0,
                read: 0,
                current: Callback::default(),
                is_long: false,
                sleeps: false,
            });
        }
        let took = sys::clock::process_cpu_time().saturating_sub(began);
        let mut pause = SEARCH;
        if process.loops.is_empty() {
            process.vain += 1;
            pause = pause.min(FIRST_SEARCH * process.vain);
        }
        process.next_search = now + pause.max(PAUSE_FACTOR * took);
    }

    fn read_loop(&mut self, pid: Pid, reader: &TaskReader, watched: &mut WatchedLoop, threshold: u64) {
        let live = ProcessMemory(&*self.system, pid);
        // What is read is of a time in between.
        let earliest = sys::clock::now();
        let begun = reader.callbacks_begun(&live, watched.queue);
        let now = sys::clock::now();
        let Some(begun) = begun else { return };
        let before = std::mem::replace(&mut watched.read, earliest);
        let mut ends = |watched: &mut WatchedLoop| {
            if std::mem::take(&mut watched.is_long) {
                self.lags.ended.push_back(Callback {
                    ended: (before, now),
                    ..watched.current
                });
            }
            watched.current = Callback {
                pid,
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
        let blocked = watched.system_call.as_ref().map(procfs::read_blocked);
        let call = match blocked {
            Some(Ok(Some(blocked))) => Some(blocked.call.map_or(u64::MAX, |(call, _)| call)),
            _ => None,
        };
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

    /// Reads the stack of a loop's thread that sleeps.
    fn read_sleeping_loop(&mut self, pid: Pid, watched: &mut WatchedLoop) {
        watched.sleeps = false;
        match self.sleeping_stack(pid, watched.tid) {
            Some((node, true)) => watched.current.node = node,
            // Another way to wait for events.
            Some((_, false)) => {
                watched.is_long = false;
                watched.current.began = (watched.read, sys::clock::now());
            }
            None => {}
        }
    }

    /// The stack of a thread that sleeps, and whether it is in a callback.
    fn sleeping_stack(&mut self, pid: Pid, tid: Tid) -> Option<(RawNode, bool)> {
        let s = self.read_sleeping(pid, vec![tid]).ok()?.remove(&tid)?.ok()?;
        let mut last = LastStack::default();
        self.uncounted_stack(&s, &mut last);
        let in_callback = self.is_in_callback();
        let waiting = self.waiting(&s);
        self.stack.push(RawFrame::State(waiting));
        Some((self.tree.add(&self.stack, 0).0, in_callback))
    }

    /// Whether `self.stack` is that of a callback, and not of the event loop itself.
    fn is_in_callback(&self) -> bool {
        let (mut in_loop, mut in_callback) = (false, false);
        for frame in &self.stack {
            let RawFrame::Python { code, .. } = frame else { continue };
            let code = self.codes.get(*code);
            let is = |name: &str, file: &str| code.name == name && code.filename.ends_with(file);
            if is("_run_once", "asyncio/base_events.py") {
                (in_loop, in_callback) = (true, false);
            } else if is("_run", "asyncio/events.py") {
                in_callback = true;
            }
        }
        in_callback || !in_loop
    }

    /// Remembers a sample that was just counted, its stack in `self.stack`; `rows`: length of the timeline before.
    pub(super) fn observe_lag(&mut self, s: &Sample, rows: usize) {
        if self.options.lag.is_none() || s.wake_up.wakes.is_some() {
            return;
        }
        let waits = s.time_spent.blocked > 0 && s.system_call.is_some_and(|call| waits_for_events(call.into()));
        let counted = self.timeline.get(rows..).unwrap_or_default();
        let node = counted.iter().max_by_key(|row| row.time_spent).map(|row| row.node);
        let node = node.filter(|_| !waits);
        if node.is_none() && !waits || node.is_some() && !self.is_in_callback() {
            return;
        }
        let Some(samples) = self.lags.samples.get_mut(&(s.pid, s.tid)) else {
            return;
        };
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

/// Whether an event loop waits for events in this system call. (`poll` and `select` are also used by blocking sockets.)
fn waits_for_events(call: u64) -> bool {
    let name = usize::try_from(call).ok().and_then(Sysno::new).map(|call| call.name());
    name.is_some_and(|name| name.starts_with("epoll") || name.starts_with("io_uring"))
}

#[cfg(test)]
mod tests;
