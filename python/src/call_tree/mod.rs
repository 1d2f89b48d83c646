//! Calls by chain of callers: the machines behind `nativeprof.Profiler(mode="calls")` and `mode="counts"`.

use std::collections::HashMap;

use pyo3::prelude::*;

use crate::engine::stacks::OpenCallStacks;
use crate::engine::{
    Callee, CurrentGreenlet, EndedFunctions, EngineSession, EventContext, EventOutcome, FunctionNumber, Machine,
    Moment, ThreadInfo,
};

mod chains;
mod profile;

use chains::{CallChains, ROOT};
pub use profile::{ValueColumns, calls, profile};

/// An open call.
struct OpenTimedCall {
    key: usize,
    node: u32,
    begin: i64,
    below: i64,
    cpu_begin: i64,
    cpu_below: i64,
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
    /// What was gathered before the last [`lap`].
    lapped: HashMap<String, CallChains>,
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
            while let Some(frame) = self.stack.pop_above(at) {
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
    type Shared = CallTreeShared;

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

    fn open_keys(&self, see: &mut dyn FnMut(usize)) {
        self.stack.open().for_each(|frame| see(frame.key));
    }

    fn rename(&mut self, ended: &mut EndedFunctions) {
        let places = self.chains.rename(ended);
        for frame in self.stack.all_mut().flatten() {
            frame.node = places.get(frame.node as usize).copied().unwrap_or(ROOT);
        }
    }

    fn rename_shared(shared: &mut CallTreeShared, ended: &mut EndedFunctions) {
        rename_shared(shared, ended);
    }
}

fn rename_shared(shared: &mut CallTreeShared, ended: &mut EndedFunctions) {
    for chains in shared.ended.values_mut().chain(shared.lapped.values_mut()) {
        chains.rename(ended);
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
    type Shared = CallTreeShared;

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

    fn open_keys(&self, _: &mut dyn FnMut(usize)) {}

    fn rename(&mut self, ended: &mut EndedFunctions) {
        self.last_key = 0;
        self.chains.rename(ended);
    }

    fn rename_shared(shared: &mut CallTreeShared, ended: &mut EndedFunctions) {
        rename_shared(shared, ended);
    }
}

/// What the two machines have in common.
pub trait CountingMachine: Machine<Shared = CallTreeShared> {
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
pub fn take_chains<M: CountingMachine>(py: Python<'_>, session: &mut EngineSession<M>) -> Vec<(String, Taken)> {
    let mut all = since_last_lap(py, session);
    all.extend(
        session
            .shared
            .lapped
            .drain()
            .map(|(name, chains)| (name, Taken(chains))),
    );
    all
}

/// How often each function was called since the last lap, or since the recording began. [`take_chains`] still gives all.
pub fn lap<M: CountingMachine>(py: Python<'_>, session: &mut EngineSession<M>) -> HashMap<FunctionNumber, u64> {
    let mut calls = HashMap::new();
    for (name, Taken(chains)) in since_last_lap(py, session) {
        for node in chains.nodes.iter().filter(|node| node.calls > 0) {
            *calls.entry(node.function).or_insert(0) += node.calls;
        }
        let all = session.shared.lapped.entry(name).or_insert_with(CallChains::new);
        all.add(&chains);
    }
    calls
}

fn since_last_lap<M: CountingMachine>(py: Python<'_>, session: &mut EngineSession<M>) -> Vec<(String, Taken)> {
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
