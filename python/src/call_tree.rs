//! Calls by chain of callers: the machines behind `nativeprof.Profiler(mode="calls")` and `mode="counts"`.

use std::collections::HashMap;

use nativeprof::profile::build::Builder;
use nativeprof::profile::model::{Frame as ProfileFrame, FrameKind, Meta, Profile};
use nativeprof::profile::values::ValueType;
use pyo3::prelude::*;

use crate::engine::stacks::OpenCallStacks;
use crate::engine::table::PairTable;
use crate::engine::{Callee, CurrentGreenlet, EventContext, EventOutcome, FunctionNumber, Machine, Moment, ThreadInfo};

/// Most chains of callers in one thread: about 100 MB.
const MAX_NODES: usize = 1 << 20;

/// Node of the thread itself.
const ROOT: u32 = 0;
/// Node for calls in chains beyond [`MAX_NODES`].
const OVERFLOW: u32 = 1;

struct CallNode {
    function: FunctionNumber,
    parent: u32,
    key: usize,
    calls: u64,
    /// Ticks in it alone.
    wall: i64,
    /// Nanoseconds of the thread's CPU time in it alone.
    cpu: i64,
    /// What it called last.
    last_key: usize,
    last_child: u32,
}

impl CallNode {
    fn new(function: FunctionNumber, parent: u32, key: usize) -> CallNode {
        CallNode {
            function,
            parent,
            key,
            calls: 0,
            wall: 0,
            cpu: 0,
            last_key: 0,
            last_child: 0,
        }
    }
}

/// An open call.
struct OpenTimedCall {
    key: usize,
    node: u32,
    begin: i64,
    below: i64,
    cpu_begin: i64,
    cpu_below: i64,
}

/// The chains of one thread, or of several that have ended.
struct CallChains {
    nodes: Vec<CallNode>,
    /// (parent, key) to `nodes`.
    index: PairTable,
}

impl CallChains {
    fn new() -> CallChains {
        CallChains {
            nodes: vec![
                CallNode::new(FunctionNumber::MAX, ROOT, 0),
                CallNode::new(FunctionNumber::MAX, ROOT, 0),
            ],
            index: PairTable::default(),
        }
    }

    /// The child of `parent` for a function, made if there is room.
    fn child(&mut self, parent: u32, key: usize, function: FunctionNumber) -> u32 {
        if parent == OVERFLOW {
            return OVERFLOW;
        }
        if let Some(node) = self.index.get(parent, key) {
            return node;
        }
        if self.nodes.len() >= MAX_NODES {
            return OVERFLOW;
        }
        let node = self.nodes.len() as u32;
        self.nodes.push(CallNode::new(function, parent, key));
        self.index.insert(parent, key, node);
        node
    }

    fn add(&mut self, other: &CallChains) {
        let mut places: Vec<u32> = Vec::with_capacity(other.nodes.len());
        for (at, node) in other.nodes.iter().enumerate() {
            let place = match at as u32 {
                ROOT => ROOT,
                OVERFLOW => OVERFLOW,
                _ => {
                    let parent = places.get(node.parent as usize).copied().unwrap_or(OVERFLOW);
                    self.child(parent, node.key, node.function)
                }
            };
            places.push(place);
            if let Some(sum) = self.nodes.get_mut(place as usize) {
                sum.calls += node.calls;
                sum.wall = sum.wall.wrapping_add(node.wall);
                sum.cpu = sum.cpu.wrapping_add(node.cpu);
            }
        }
    }
}

/// Settings, and the results of threads that have ended.
#[derive(Default)]
pub struct CallTreeShared {
    /// The CPU time of calls too: a system call per event.
    pub cpu: bool,
    /// Apart by thread.
    pub by_thread: bool,
    /// Threads have their numbers as names: those of the samples are put in their place.
    pub numbered: bool,
    /// If not empty: only threads with these idents.
    pub only: Vec<u64>,
    ended: HashMap<String, CallChains>,
}

/// The machine of one thread, with times.
pub struct CallTree {
    chains: CallChains,
    stack: OpenCallStacks<OpenTimedCall>,
    /// CPU time of the thread by which that of the stack in use is less, and the same of other stacks when they were left.
    cpu: CpuPauses,
}

impl CallTree {
    #[cold]
    #[inline(never)]
    fn first_call(
        &mut self,
        parent: u32,
        callee: Callee,
        context: &mut EventContext<'_, CallTreeShared>,
    ) -> Option<u32> {
        let (function, is_excluded) = context.intern(callee);
        (!is_excluded).then(|| self.chains.child(parent, callee.key(), function))
    }

    #[inline(always)]
    fn end(&mut self, frame: &OpenTimedCall, now: i64, cpu: i64) {
        let total = now.wrapping_sub(frame.begin);
        let cpu_total = cpu.wrapping_sub(frame.cpu_begin);
        if let Some(outer) = self.stack.last_mut() {
            outer.below = outer.below.wrapping_add(total);
            outer.cpu_below = outer.cpu_below.wrapping_add(cpu_total);
        }
        if let Some(node) = self.chains.nodes.get_mut(frame.node as usize) {
            node.calls += 1;
            node.wall = node.wall.wrapping_add(total.wrapping_sub(frame.below));
            node.cpu = node.cpu.wrapping_add(cpu_total.wrapping_sub(frame.cpu_below));
        }
    }

    #[cold]
    #[inline(never)]
    fn leave_other(
        &mut self,
        key: usize,
        context: &EventContext<'_, CallTreeShared>,
        now: i64,
        cpu: i64,
    ) -> EventOutcome {
        if context.functions.is_excluded(key) {
            return EventOutcome::Excluded;
        }
        if let Some(at) = self.stack.iter().rposition(|f| f.key == key) {
            while self.stack.len() > at
                && let Some(frame) = self.stack.pop()
            {
                self.end(&frame, now, cpu);
            }
        }
        EventOutcome::Done
    }
}

/// The thread's CPU time in which each of its stacks was not in use; see [`OpenCallStacks::paused`].
#[derive(Default)]
struct CpuPauses {
    paused: i64,
    /// By greenlet: the same when it was left, and the thread's CPU time then.
    left: HashMap<usize, (i64, i64)>,
}

impl CpuPauses {
    fn switch(&mut self, from: usize, to: usize, now: i64) {
        self.left.insert(from, (self.paused, now));
        self.paused = match self.left.remove(&to) {
            Some((paused, since)) => paused.wrapping_add(now.wrapping_sub(since)),
            None => 0,
        };
    }
}

#[inline(always)]
fn cpu_time(wanted: bool) -> i64 {
    if wanted { crate::engine::clock::thread_cpu() } else { 0 }
}

impl Machine for CallTree {
    type SharedSession = CallTreeShared;

    fn new(_: &ThreadInfo, _: &mut CallTreeShared) -> CallTree {
        CallTree {
            chains: CallChains::new(),
            stack: OpenCallStacks::default(),
            cpu: CpuPauses::default(),
        }
    }

    #[inline(always)]
    fn enter(&mut self, callee: Callee, mut context: EventContext<'_, CallTreeShared>) -> EventOutcome {
        let key = callee.key();
        let parent = self.stack.last().map_or(ROOT, |f| f.node);
        let node = match self.chains.nodes.get(parent as usize) {
            Some(node) if node.last_key == key => node.last_child,
            _ => {
                let known = self.chains.index.get(parent, key);
                let Some(child) = known.or_else(|| self.first_call(parent, callee, &mut context)) else {
                    return EventOutcome::Excluded;
                };
                if let Some(node) = self.chains.nodes.get_mut(parent as usize) {
                    (node.last_key, node.last_child) = (key, child);
                }
                child
            }
        };
        let paused = self.stack.paused;
        self.stack.push(OpenTimedCall {
            key,
            node,
            below: 0,
            cpu_below: 0,
            cpu_begin: cpu_time(context.shared.cpu).wrapping_sub(self.cpu.paused),
            begin: context.moment.now().wrapping_sub(paused),
        });
        EventOutcome::Done
    }

    #[inline(always)]
    fn leave(&mut self, key: usize, context: EventContext<'_, CallTreeShared>) -> EventOutcome {
        let now = context.moment.now().wrapping_sub(self.stack.paused);
        let cpu = cpu_time(context.shared.cpu).wrapping_sub(self.cpu.paused);
        match self.stack.pop_if(|f| f.key == key) {
            Some(frame) => {
                self.end(&frame, now, cpu);
                EventOutcome::Done
            }
            None => self.leave_other(key, &context, now, cpu),
        }
    }

    #[inline(always)]
    fn is_innermost(&self, key: usize) -> bool {
        self.stack.last().is_some_and(|f| f.key == key)
    }

    fn depth(&self) -> usize {
        self.stack.depth()
    }

    fn switch(&mut self, to: CurrentGreenlet, moment: Moment, shared: &mut CallTreeShared) {
        if to.key != self.stack.key() {
            if shared.cpu {
                self.cpu
                    .switch(self.stack.key(), to.key, crate::engine::clock::thread_cpu());
            }
            self.stack.switch(to.key, moment.now());
        }
    }

    fn close_innermost(&mut self, now: i64, _: &mut CallTreeShared) {
        if self.stack.is_empty()
            && let Some(key) = self.stack.any_parked()
        {
            self.stack.switch(key, now);
        }
        let now = now.wrapping_sub(self.stack.paused);
        if let Some(frame) = self.stack.pop() {
            // Another thread's CPU clock cannot be read by this one: its open call keeps what was known at its begin.
            let cpu = frame.cpu_begin.wrapping_add(frame.cpu_below);
            self.end(&frame, now, cpu);
        }
    }

    fn retire(&mut self, info: &ThreadInfo, name: Option<&str>, shared: &mut CallTreeShared) -> bool {
        retire(&self.chains, info, name, shared)
    }
}

fn retire(chains: &CallChains, info: &ThreadInfo, name: Option<&str>, shared: &mut CallTreeShared) -> bool {
    if shared.only.is_empty() || shared.only.contains(&info.ident) {
        let name = label((shared.by_thread, shared.numbered), info, name);
        shared.ended.entry(name).or_insert_with(CallChains::new).add(chains);
    }
    true
}

/// The name under which the thread's calls are collected; empty if that is the same for all threads.
fn label((by_thread, numbered): (bool, bool), info: &ThreadInfo, name: Option<&str>) -> String {
    match name.filter(|_| !numbered) {
        _ if !by_thread => String::new(),
        Some(name) => name.into(),
        None => format!("thread {}", info.native_id),
    }
}

/// The machine of one thread that only counts how often Python functions begin.
pub struct CallCounter {
    chains: CallChains,
    last_key: usize,
    last: u32,
}

impl Machine for CallCounter {
    type SharedSession = CallTreeShared;

    const NEEDS_YIELDS: bool = false;

    fn new(_: &ThreadInfo, _: &mut CallTreeShared) -> CallCounter {
        CallCounter {
            chains: CallChains::new(),
            last_key: 0,
            last: 0,
        }
    }

    #[inline(always)]
    fn enter(&mut self, callee: Callee, mut context: EventContext<'_, CallTreeShared>) -> EventOutcome {
        if context.event != crate::engine::CallEvent::Start {
            return EventOutcome::Done;
        }
        let key = callee.key();
        if self.last_key != key {
            self.last = match self.chains.index.get(ROOT, key) {
                Some(node) => node,
                None => {
                    let (function, is_excluded) = context.intern(callee);
                    if is_excluded {
                        return EventOutcome::Excluded;
                    }
                    self.chains.child(ROOT, key, function)
                }
            };
            self.last_key = key;
        }
        if let Some(node) = self.chains.nodes.get_mut(self.last as usize) {
            node.calls += 1;
        }
        EventOutcome::Done
    }

    fn leave(&mut self, key: usize, context: EventContext<'_, CallTreeShared>) -> EventOutcome {
        if context.event == crate::engine::CallEvent::Throw
            && let Some(node) = self.chains.index.get(ROOT, key)
            && let Some(node) = self.chains.nodes.get_mut(node as usize)
        {
            node.calls = node.calls.saturating_sub(1);
        }
        EventOutcome::Done
    }

    fn is_innermost(&self, _: usize) -> bool {
        false
    }

    fn depth(&self) -> usize {
        0
    }

    fn close_innermost(&mut self, _: i64, _: &mut CallTreeShared) {}

    fn retire(&mut self, info: &ThreadInfo, name: Option<&str>, shared: &mut CallTreeShared) -> bool {
        retire(&self.chains, info, name, shared)
    }
}

/// What the two machines have in common.
pub trait CountingMachine: Machine<SharedSession = CallTreeShared> {
    fn take_chains(&mut self) -> Taken;
}

/// The chains of a thread, taken out of its machine.
pub struct Taken(CallChains);

impl CountingMachine for CallTree {
    fn take_chains(&mut self) -> Taken {
        let mut fresh = CallChains::new();
        // Open calls continue in the new chains.
        for stack in self.stack.all_mut() {
            let mut parent = ROOT;
            for frame in stack {
                let node = self.chains.nodes.get(frame.node as usize);
                parent = fresh.child(parent, frame.key, node.map_or(FunctionNumber::MAX, |n| n.function));
                frame.node = parent;
            }
        }
        Taken(std::mem::replace(&mut self.chains, fresh))
    }
}

impl CountingMachine for CallCounter {
    fn take_chains(&mut self) -> Taken {
        self.last_key = 0;
        Taken(std::mem::replace(&mut self.chains, CallChains::new()))
    }
}

/// All that was gathered in a session, taken out of it: (thread's name or empty, chains).
pub fn take_chains<M: CountingMachine>(
    py: Python<'_>,
    session: &mut crate::engine::EngineSession<M>,
) -> Vec<(String, Taken)> {
    session.name_threads(py);
    let labels = (session.shared.by_thread, session.shared.numbered);
    let only = session.shared.only.clone();
    let mut all: Vec<(String, Taken)> = session.shared.ended.drain().map(|(n, c)| (n, Taken(c))).collect();
    for thread in session.threads_mut() {
        let chains = thread.machine.take_chains();
        if only.is_empty() || only.contains(&thread.info.ident) {
            let name = label(labels, &thread.info, thread.name.as_deref());
            all.push((name, chains));
        }
    }
    all
}

/// How many calls there were of Python functions, and of C functions.
pub fn calls(taken: &[(String, Taken)], frames: &[ProfileFrame]) -> (u64, u64) {
    let mut sums = (0, 0);
    for node in taken.iter().flat_map(|(_, Taken(chains))| &chains.nodes) {
        match frames.get(node.function as usize) {
            Some(frame) if frame.kind != FrameKind::Python => sums.1 += node.calls,
            _ => sums.0 += node.calls,
        }
    }
    sums
}

/// Which value types a profile has.
#[derive(Clone, Copy)]
pub struct ValueColumns {
    pub wall: bool,
    pub cpu: bool,
    /// The profile counts samples, of which it has none, and calls are a value: to be combined with a sampled profile.
    pub with_samples: bool,
}

/// The profile of what [`take_chains`] gave. `nanoseconds` per tick.
pub fn profile(
    taken: &[(String, Taken)],
    frames: &[ProfileFrame],
    columns: ValueColumns,
    nanoseconds: f64,
    meta: Meta,
) -> Profile {
    let wanted = [
        (columns.with_samples, ValueType::SAMPLES),
        (true, ValueType::CALLS),
        (columns.wall, ValueType::WALL),
        (columns.cpu, ValueType::CPU),
    ];
    let types: Vec<ValueType> = wanted
        .into_iter()
        .filter_map(|(is_wanted, kind)| is_wanted.then_some(kind))
        .collect();
    let mut builder = Builder::new(&types);
    for (name, Taken(chains)) in taken {
        let top = if name.is_empty() {
            Builder::ROOT
        } else {
            let frame = builder.frame(ProfileFrame::new(FrameKind::Thread, name.clone()));
            builder.child(Builder::ROOT, frame, 0)
        };
        let mut places = Vec::with_capacity(chains.nodes.len());
        for (at, node) in chains.nodes.iter().enumerate() {
            let place = match at as u32 {
                ROOT => top,
                OVERFLOW if node.calls == 0 => top,
                OVERFLOW => {
                    let frame = builder.frame(ProfileFrame::new(
                        FrameKind::Truncated,
                        "[truncated: too many chains of callers]",
                    ));
                    builder.child(top, frame, 0)
                }
                _ => {
                    let parent = places.get(node.parent as usize).copied().unwrap_or(top);
                    let unknown = || ProfileFrame::new(FrameKind::Unknown, "[unknown]");
                    let frame = frames.get(node.function as usize).cloned().unwrap_or_else(unknown);
                    let frame = builder.frame(frame);
                    builder.child(parent, frame, 0)
                }
            };
            places.push(place);
            let wall = (node.wall.max(0) as f64 * nanoseconds) as u64;
            let mut amounts = Vec::with_capacity(types.len());
            amounts.extend(columns.with_samples.then_some(0));
            amounts.push(node.calls);
            amounts.extend(columns.wall.then_some(wall));
            amounts.extend(columns.cpu.then_some(node.cpu.max(0) as u64));
            builder.add_at(place, &amounts);
        }
    }
    builder.finish(meta)
}
