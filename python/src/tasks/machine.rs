//! Follows the stacks of tasks, and charges what passes between two events to the innermost function.
//!
//! A task's stack begins where the event loop starts or resumes its coroutine: what the loop and its callers have on the
//! stack are no callers of it. Coroutines that it awaits are resumed and yield one within the other, so their frames come
//! and go with these events; a call is counted where a function starts. Time of the event loop between tasks is
//! [`MAIN`]'s. Greenlets have stacks of their own ([`OpenCallStacks`]).

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::prelude::*;

use super::asyncio;
use super::chains::{MAIN, ROOT, TaskChains};
use super::kinds::{self, Kinds};
use super::measures::Measures;
use super::waits::{ThreadWaits, WaitHandler, Waited};
use crate::engine::stacks::OpenCallStacks;
use crate::engine::{
    CallEvent, Callee, CurrentGreenlet, EndedFunctions, EventContext, EventOutcome, Machine, Moment, ThreadInfo,
    current_ident,
};

/// An open call.
#[derive(Clone, Copy)]
struct OpenTaskCall {
    key: usize,
    node: u32,
    /// What runs in it, outside of other frames, is the event loop.
    is_loop: bool,
    /// A task's stack, or that of a callback of the loop, begins with it.
    is_base: bool,
    /// Address of the task, of a base; 0: none.
    task: usize,
}

/// Settings, what is known of functions, and the results of threads that have ended.
pub struct TaskMachineShared {
    measures: Measures,
    waits: Arc<WaitHandler>,
    kinds: Kinds,
    pub ended: TaskChains,
}

impl TaskMachineShared {
    pub fn new(measures: Measures, waits: Arc<WaitHandler>, library: String) -> TaskMachineShared {
        TaskMachineShared {
            measures,
            waits,
            kinds: Kinds::new(library),
            ended: TaskChains::new(measures.count()),
        }
    }
}

/// The machine of one thread.
pub struct TaskMachine {
    chains: TaskChains,
    stack: OpenCallStacks<OpenTaskCall>,
    ident: u64,
    measures: Measures,
    /// Time of the last event, and values then; not known before the first.
    mark: Option<i64>,
    values: Vec<f64>,
    scratch: Vec<f64>,
    waits: Arc<ThreadWaits>,
    waited: Waited,
    /// What runs outside of all frames that are known is the event loop: of the thread's first stack, and of the one in use.
    is_first_loop: bool,
    is_outside_loop: bool,
    /// The coroutine that yielded first, of those that have since the last call.
    leaf: Option<u32>,
    /// By task: since when it is suspended, and in which function.
    suspended: HashMap<usize, (i64, u32)>,
}

impl TaskMachine {
    /// Charges what has passed since the last event.
    #[inline(always)]
    fn charge(&mut self, now: i64, measures: bool) {
        let Some(mark) = self.mark.replace(now) else {
            self.waited = self.waits.so_far(now, self.measures == Measures::Usage);
            if measures {
                self.measures.read(&mut self.values);
            }
            return;
        };
        let (target, is_known) = match self.stack.last() {
            Some(frame) if frame.is_loop => (MAIN, true),
            Some(frame) => (frame.node, true),
            None => (MAIN, self.is_outside_loop),
        };
        let waited = self.waits.so_far(now, self.measures == Measures::Usage);
        let count = waited.count - self.waited.count;
        let ticks = waited.ticks - self.waited.ticks;
        if is_known && let Some(node) = self.chains.nodes.get_mut(target as usize) {
            node.ticks = node.ticks.wrapping_add(now.wrapping_sub(mark).wrapping_sub(ticks));
        }
        if count != 0 || ticks != 0 || self.measures != Measures::Time {
            self.charge_more(target, is_known, measures, waited);
        }
    }

    /// The same for waits and values.
    #[cold]
    fn charge_more(&mut self, target: u32, is_known: bool, measures: bool, waited: Waited) {
        let count = waited.count - self.waited.count;
        let ticks = waited.ticks - self.waited.ticks;
        let wait = (count != 0 || ticks != 0).then(|| self.chains.wait_in(target));
        if let Some(node) = wait.and_then(|w| self.chains.nodes.get_mut(w as usize)) {
            node.calls += count.max(0) as u64;
            node.ticks += ticks;
        }
        if measures {
            self.measures.read(&mut self.scratch);
            std::mem::swap(&mut self.values, &mut self.scratch);
            for i in 0..self.values.len() {
                let (Some(new), Some(old)) = (self.values.get(i), self.scratch.get(i)) else {
                    break;
                };
                let passed = new - old;
                // The user's own values are read at events only: those of a wait begin and end with them.
                let in_wait = match (self.measures, wait) {
                    (_, None) => 0.0,
                    (Measures::Own(_), Some(_)) => passed,
                    (_, Some(_)) => waited.usage.get(i).unwrap_or(&0.0) - self.waited.usage.get(i).unwrap_or(&0.0),
                };
                if let Some(sum) = wait.and_then(|w| self.chains.values_of(w).get_mut(i)) {
                    *sum += in_wait;
                }
                if is_known && let Some(sum) = self.chains.values_of(target).get_mut(i) {
                    *sum += passed - in_wait;
                }
            }
        }
        self.waited = waited;
    }

    /// The task whose stack we are in; 0: none.
    fn innermost_task(&self) -> usize {
        self.stack.iter().rev().find(|f| f.is_base).map_or(0, |f| f.task)
    }

    /// Whether what runs is the event loop.
    #[inline(always)]
    fn is_in_loop(&mut self, py: Python<'_>) -> bool {
        self.stack.last().map_or(self.is_outside_loop, |f| f.is_loop) && !self.has_unseen_ended(py)
    }

    /// A loop without Python functions may have ended. Then its caller continues, or has since the last event.
    #[cold]
    #[inline(never)]
    fn has_unseen_ended(&mut self, py: Python<'_>) -> bool {
        let is_seen = self.stack.last().is_some_and(|f| f.node == MAIN);
        if is_seen || self.stack.key() != 0 || asyncio::is_loop_running(py) {
            return false;
        }
        match self.stack.last_mut() {
            Some(frame) => frame.is_loop = false,
            None => (self.is_first_loop, self.is_outside_loop) = (false, false),
        }
        true
    }

    /// The node of a function that begins a stack or is called in `parent`.
    #[inline(always)]
    fn node(
        &mut self,
        parent: u32,
        callee: Callee,
        context: &mut EventContext<'_, TaskMachineShared>,
    ) -> Result<u32, EventOutcome> {
        self.chains.child(parent, callee.key(), || {
            let (id, _) = context.intern(callee);
            let kind = context.shared.kinds.get(context.py, id, context.functions)?;
            Some((id, kind))
        })
    }

    fn kind(&self, node: u32) -> u8 {
        self.chains.nodes.get(node as usize).map_or(0, |n| n.kind)
    }

    #[inline(always)]
    fn push(&mut self, key: usize, node: u32, event: CallEvent) {
        if matches!(event, CallEvent::Start | CallEvent::CCall)
            && let Some(node) = self.chains.nodes.get_mut(node as usize)
        {
            node.calls += 1;
        }
        self.stack.push(OpenTaskCall {
            key,
            node,
            is_loop: false,
            is_base: false,
            task: 0,
        });
    }

    fn push_loop(&mut self, key: usize) {
        self.stack.push(OpenTaskCall {
            key,
            node: MAIN,
            is_loop: true,
            is_base: false,
            task: 0,
        });
    }

    /// Begins the stack of a task, or of a callback.
    fn push_base(
        &mut self,
        callee: Callee,
        task: usize,
        now: i64,
        mut context: EventContext<'_, TaskMachineShared>,
    ) -> EventOutcome {
        let node = match self.node(ROOT, callee, &mut context) {
            Ok(node) => node,
            Err(verdict) => return verdict,
        };
        self.push(callee.key(), node, context.event);
        if let Some(frame) = self.stack.last_mut() {
            (frame.is_base, frame.task) = (true, task);
        }
        if task != 0
            && let Some((since, in_node)) = self.suspended.remove(&task)
            && context.event != CallEvent::Start
            && let Some(node) = self.chains.nodes.get_mut(in_node as usize)
        {
            node.suspended = node.suspended.wrapping_add(now.wrapping_sub(since));
        }
        EventOutcome::Done
    }

    /// A call where the event loop runs.
    #[cold]
    #[inline(never)]
    fn enter_in_loop(
        &mut self,
        callee: Callee,
        now: i64,
        mut context: EventContext<'_, TaskMachineShared>,
    ) -> EventOutcome {
        let Callee::Code(_) = callee else {
            self.push_loop(callee.key());
            return EventOutcome::Done;
        };
        let known = context.functions.find(callee.key());
        let id = known.unwrap_or_else(|| context.intern(callee).0);
        let Some(kind) = context.shared.kinds.get(context.py, id, context.functions) else {
            return EventOutcome::Excluded;
        };
        if kind & kinds::COROUTINE != 0 {
            return self.push_base(callee, asyncio::current_task(context.py), now, context);
        }
        if kind & (kinds::LIBRARY | kinds::LOOP) != 0 {
            self.push_loop(callee.key());
            return EventOutcome::Done;
        }
        self.push_base(callee, 0, now, context)
    }

    #[inline(always)]
    fn enter_in_function(
        &mut self,
        callee: Callee,
        now: i64,
        mut context: EventContext<'_, TaskMachineShared>,
    ) -> EventOutcome {
        let parent = self.stack.last().map_or(ROOT, |f| f.node);
        let node = match self.node(parent, callee, &mut context) {
            Ok(node) => node,
            Err(verdict) => return verdict,
        };
        if self.kind(node) & (kinds::COROUTINE | kinds::LOOP) != 0 {
            return self.enter_special(callee, node, now, context);
        }
        self.push(callee.key(), node, context.event);
        EventOutcome::Done
    }

    /// A coroutine, or a function that runs an event loop.
    #[cold]
    #[inline(never)]
    fn enter_special(
        &mut self,
        callee: Callee,
        node: u32,
        now: i64,
        context: EventContext<'_, TaskMachineShared>,
    ) -> EventOutcome {
        if self.kind(node) & kinds::LOOP != 0 {
            self.push_loop(callee.key());
            return EventOutcome::Done;
        }
        let caller = self.stack.last().map_or(0, |f| self.kind(f.node));
        if caller & (kinds::COROUTINE | kinds::GENERATOR) == 0 {
            let (task, outer) = (asyncio::current_task(context.py), self.innermost_task());
            if task != 0 && task != outer {
                // What has called it drives a loop that we do not see, unless a task has started another one at once.
                if outer == 0 && self.stack.key() == 0 {
                    match self.stack.last_mut() {
                        Some(frame) => frame.is_loop = true,
                        None => (self.is_first_loop, self.is_outside_loop) = (true, true),
                    }
                }
                return self.push_base(callee, task, now, context);
            }
        }
        self.push(callee.key(), node, context.event);
        EventOutcome::Done
    }

    /// What becomes of a frame that has been taken off the stack.
    #[inline(always)]
    fn end(&mut self, frame: &OpenTaskCall, now: i64, may_go_on: bool) {
        if frame.is_loop {
            return;
        }
        if !may_go_on {
            self.leaf = None;
            return;
        }
        let leaf = *self.leaf.get_or_insert(frame.node);
        if frame.task != 0 {
            self.suspended.insert(frame.task, (now, leaf));
        }
    }

    #[cold]
    #[inline(never)]
    fn leave_other(
        &mut self,
        key: usize,
        now: i64,
        may_go_on: bool,
        context: &EventContext<'_, TaskMachineShared>,
    ) -> EventOutcome {
        if context.functions.is_excluded(key) {
            return EventOutcome::Excluded;
        }
        if let Some(at) = self.stack.iter().rposition(|f| f.key == key) {
            while let Some(frame) = self.stack.pop_above(at) {
                self.end(&frame, now, may_go_on);
            }
        }
        EventOutcome::Done
    }

    fn use_stack(&mut self, to: CurrentGreenlet, now: i64) {
        if to.key == self.stack.key() {
            return;
        }
        let away = self.stack.switch(to.key, now);
        self.is_outside_loop = to.is_hub || (to.key == 0 && self.is_first_loop);
        self.leaf = None;
        let node = self.stack.last().filter(|f| !f.is_loop).map(|f| f.node);
        if let Some(node) = node.and_then(|n| self.chains.nodes.get_mut(n as usize)) {
            node.suspended = node.suspended.wrapping_add(away);
        }
    }

    /// The session has stopped at `now`: charges what has passed since the last event.
    pub fn finish(&mut self, now: i64) {
        // Another thread's values cannot be read by this one.
        let is_own = self.ident == current_ident();
        self.charge(self.mark.map_or(now, |mark| mark.max(now)), is_own);
    }

    /// What was charged so far.
    pub fn chains(&self) -> &TaskChains {
        &self.chains
    }
}

impl Machine for TaskMachine {
    type Shared = TaskMachineShared;

    fn new(info: &ThreadInfo, shared: &mut TaskMachineShared) -> TaskMachine {
        let width = shared.measures.count();
        TaskMachine {
            chains: TaskChains::new(width),
            stack: OpenCallStacks::default(),
            ident: info.ident,
            measures: shared.measures,
            mark: None,
            values: vec![0.0; width],
            scratch: vec![0.0; width],
            waits: shared.waits.record(),
            waited: Waited::default(),
            is_first_loop: false,
            is_outside_loop: false,
            leaf: None,
            suspended: HashMap::new(),
        }
    }

    #[inline(always)]
    fn enter(&mut self, callee: Callee, context: EventContext<'_, TaskMachineShared>) -> EventOutcome {
        let is_in_loop = self.is_in_loop(context.py);
        let now = context.moment.now();
        self.charge(now, true);
        self.leaf = None;
        let [python, c] = &mut self.chains.entered;
        match callee {
            Callee::Code(_) => *python += 1,
            Callee::Builtin(_) => *c += 1,
        }
        if is_in_loop {
            return self.enter_in_loop(callee, now, context);
        }
        self.enter_in_function(callee, now, context)
    }

    #[inline(always)]
    fn leave(&mut self, key: usize, context: EventContext<'_, TaskMachineShared>) -> EventOutcome {
        self.is_in_loop(context.py);
        let now = context.moment.now();
        let may_go_on = context.event == CallEvent::Yield;
        match self.stack.last() {
            Some(frame) if frame.key == key => {
                self.charge(now, true);
                if let Some(frame) = self.stack.pop() {
                    self.end(&frame, now, may_go_on);
                    if context.event == CallEvent::Throw
                        && let Some(node) = self.chains.nodes.get_mut(frame.node as usize)
                    {
                        node.calls = node.calls.saturating_sub(1);
                    }
                }
                EventOutcome::Done
            }
            // The user's clock was not read.
            _ if matches!(self.measures, Measures::Own(_)) => {
                self.leave_other(key, self.mark.unwrap_or(0), may_go_on, &context)
            }
            _ => {
                self.charge(now, true);
                self.leave_other(key, now, may_go_on, &context)
            }
        }
    }

    fn switch(&mut self, to: CurrentGreenlet, moment: Moment, _: &mut TaskMachineShared) {
        if to.key == self.stack.key() {
            return;
        }
        let now = moment.now();
        if self.mark.is_some() {
            self.charge(now, true);
        }
        self.use_stack(to, now);
    }

    #[inline(always)]
    fn is_innermost(&self, key: usize) -> bool {
        self.stack.last().is_some_and(|f| f.key == key)
    }

    fn depth(&self) -> usize {
        self.stack.depth()
    }

    fn close_innermost(&mut self, now: i64, _: &mut TaskMachineShared) {
        self.finish(now);
        if self.stack.is_empty()
            && let Some(key) = self.stack.any_parked()
        {
            self.use_stack(CurrentGreenlet { key, is_hub: false }, now);
        }
        self.stack.pop();
    }

    fn retire(&mut self, _: &ThreadInfo, _: Option<&str>, shared: &mut TaskMachineShared) -> bool {
        shared.ended.add(&self.chains);
        shared.waits.return_record(self.waits.clone());
        true
    }

    fn open_keys(&self, see: &mut dyn FnMut(usize)) {
        self.stack.open().for_each(|frame| see(frame.key));
    }

    fn rename(&mut self, ended: &mut EndedFunctions) {
        let places = self.chains.rename(ended);
        let suspended = self.suspended.values_mut().map(|(_, node)| node);
        let open = self.stack.all_mut().flatten().map(|frame| &mut frame.node);
        for node in open.chain(suspended).chain(&mut self.leaf) {
            *node = places.get(*node as usize).copied().unwrap_or(ROOT);
        }
    }

    fn rename_shared(shared: &mut TaskMachineShared, ended: &mut EndedFunctions) {
        shared.kinds.forget();
        shared.ended.rename(ended);
    }
}
