//! Counting and timing calls: the machine behind `nativeprof.tracing`.
//!
//! Per thread one number for each function, and one node for each pair of caller and callee (or, as a tree, for each
//! chain of callers). Semantics of the figures are those of `Modules/_lsprof.c` (3.14): a call counts when it ends, each
//! run of a generator or coroutine is a call, cumulative time is that of outermost activations.

use std::collections::HashMap;

use crate::engine::stacks::OpenCallStacks;
use crate::engine::table::PairTable;
use crate::engine::{
    Callee, CurrentGreenlet, EndedFunctions, EventContext, EventOutcome, FunctionNumber, Machine, Moment, ThreadInfo,
};

/// What was measured of a function or of a pair.
#[derive(Clone, Copy, Default, Debug)]
pub struct Figures {
    pub calls: u64,
    /// Those that began while another one was open.
    pub recursive: u64,
    /// Ticks in it alone.
    pub self_ticks: i64,
    /// Ticks in it and all that it called, of outermost activations.
    pub cumulative: i64,
}

impl Figures {
    fn add(&mut self, other: &Figures) {
        self.calls += other.calls;
        self.recursive += other.recursive;
        self.self_ticks = self.self_ticks.wrapping_add(other.self_ticks);
        self.cumulative = self.cumulative.wrapping_add(other.cumulative);
    }
}

/// A callee of one caller.
struct PairNode {
    /// Index in `functions`.
    function: u32,
    /// Index of the caller in `functions`.
    caller: u32,
    /// Open calls.
    level: u32,
    figures: Figures,
}

/// A function in one thread. The first one represents "no caller".
struct ThreadFunction {
    /// In the session.
    id: FunctionNumber,
    level: u32,
    recursive: u64,
    cumulative: i64,
    /// The callee that it called last.
    last_key: usize,
    last_node: u32,
}

/// An open call.
struct OpenPairCall {
    key: usize,
    node: u32,
    function: u32,
    begin: i64,
    /// Ticks in what it called.
    below: i64,
}

/// Settings, and the results of threads that have ended.
#[derive(Default)]
pub struct CallPairsShared {
    /// Figures per caller and callee.
    pub subcalls: bool,
    /// By (caller, callee); the caller may be [`NO_CALLER`].
    pub ended: Totals,
}

/// Figures of functions, and of pairs of caller and callee, by their numbers in the session.
#[derive(Default, Clone)]
pub struct Totals {
    functions: Vec<Figures>,
    pairs: Vec<(FunctionNumber, FunctionNumber, Figures)>,
    index: HashMap<(FunctionNumber, FunctionNumber), usize>,
}

/// A function: its number and figures, and those of its callees.
pub type CallRow = (FunctionNumber, Figures, Vec<(FunctionNumber, Figures)>);

/// Stands for the caller of what was called from outside.
pub const NO_CALLER: FunctionNumber = FunctionNumber::MAX;

impl Totals {
    fn function(&mut self, id: FunctionNumber) -> Option<&mut Figures> {
        let at = id as usize;
        if self.functions.len() <= at {
            self.functions.resize(at + 1, Figures::default());
        }
        self.functions.get_mut(at)
    }

    fn pair(&mut self, caller: FunctionNumber, callee: FunctionNumber, figures: &Figures) {
        let at = *self.index.entry((caller, callee)).or_insert_with(|| {
            self.pairs.push((caller, callee, Figures::default()));
            self.pairs.len() - 1
        });
        if let Some((_, _, sum)) = self.pairs.get_mut(at) {
            sum.add(figures);
        }
    }

    pub fn add(&mut self, other: &Totals) {
        self.add_as(other, |id| id);
    }

    /// Adds the figures of each function to those of the one with the number that `number` gives for it.
    fn add_as(&mut self, other: &Totals, mut number: impl FnMut(FunctionNumber) -> FunctionNumber) {
        for (id, figures) in other.functions.iter().enumerate() {
            if figures.calls > 0
                && let Some(sum) = self.function(number(id as FunctionNumber))
            {
                sum.add(figures);
            }
        }
        for (caller, callee, figures) in &other.pairs {
            self.pair(number(*caller), number(*callee), figures);
        }
    }

    /// All functions.
    pub fn rows(&self) -> Vec<CallRow> {
        let mut rows: Vec<_> = self
            .functions
            .iter()
            .enumerate()
            .map(|(id, f)| (id as FunctionNumber, *f, Vec::new()))
            .collect();
        for (caller, callee, figures) in &self.pairs {
            if let Some((_, _, callees)) = rows.get_mut(*caller as usize) {
                callees.push((*callee, *figures));
            }
        }
        rows
    }
}

/// The machine of one thread.
pub struct CallPairs {
    functions: Vec<ThreadFunction>,
    /// Session numbers to `functions`.
    known: PairTable,
    nodes: Vec<PairNode>,
    /// (caller, key of the callee) to `nodes`.
    pairs: PairTable,
    stack: OpenCallStacks<OpenPairCall>,
}

/// Index of "no caller" in `functions`.
const OUTSIDE: u32 = 0;

impl CallPairs {
    /// The node for this callee of `caller`; None if it is left out.
    #[cold]
    #[inline(never)]
    fn first_call(
        &mut self,
        caller: u32,
        callee: Callee,
        context: &mut EventContext<'_, CallPairsShared>,
    ) -> Option<u32> {
        let (id, is_excluded) = context.intern(callee);
        if is_excluded {
            return None;
        }
        // Any number but null is a key.
        let known = self.known.get(0, id as usize + 1);
        let function = known.unwrap_or_else(|| {
            let new = self.functions.len() as u32;
            self.functions.push(ThreadFunction::new(id));
            self.known.insert(0, id as usize + 1, new);
            new
        });
        let node = self.nodes.len() as u32;
        self.nodes.push(PairNode {
            function,
            caller,
            level: 0,
            figures: Figures::default(),
        });
        self.pairs.insert(caller, callee.key(), node);
        Some(node)
    }

    /// Ends the innermost call, whose frame is `frame`.
    #[inline(always)]
    fn end(&mut self, frame: &OpenPairCall, now: i64) {
        let total = now.wrapping_sub(frame.begin);
        if let Some(outer) = self.stack.last_mut() {
            outer.below = outer.below.wrapping_add(total);
        }
        if let Some(node) = self.nodes.get_mut(frame.node as usize) {
            node.figures.calls += 1;
            node.figures.self_ticks = node.figures.self_ticks.wrapping_add(total.wrapping_sub(frame.below));
            node.level -= 1;
            if node.level == 0 {
                node.figures.cumulative = node.figures.cumulative.wrapping_add(total);
            } else {
                node.figures.recursive += 1;
            }
        }
        if let Some(function) = self.functions.get_mut(frame.function as usize) {
            function.level -= 1;
            if function.level == 0 {
                function.cumulative = function.cumulative.wrapping_add(total);
            } else {
                function.recursive += 1;
            }
        }
    }

    /// A return that is not the innermost call's: of a frame that was open before the start, or that has lost what it
    /// called (as with greenlets that are never resumed).
    #[cold]
    #[inline(never)]
    fn leave_other(&mut self, key: usize, context: &EventContext<'_, CallPairsShared>) -> EventOutcome {
        if context.functions.is_excluded(key) {
            return EventOutcome::Excluded;
        }
        let Some(at) = self.stack.iter().rposition(|f| f.key == key) else {
            return EventOutcome::Done;
        };
        let now = context.moment.now().wrapping_sub(self.stack.paused);
        while let Some(frame) = self.stack.pop_above(at) {
            self.end(&frame, now);
        }
        EventOutcome::Done
    }

    /// Continues with another stack. Calls that are open on the one are not callers of those on the other: these are not
    /// recursive.
    fn use_stack(&mut self, key: usize, now: i64) {
        if key == self.stack.key() {
            return;
        }
        self.add_levels(u32::MAX);
        self.stack.switch(key, now);
        self.add_levels(1);
    }

    /// Adds to the levels of all calls that are open on the stack in use; `u32::MAX` represents -1.
    fn add_levels(&mut self, change: u32) {
        for frame in self.stack.iter() {
            if let Some(node) = self.nodes.get_mut(frame.node as usize) {
                node.level = node.level.wrapping_add(change);
            }
            if let Some(function) = self.functions.get_mut(frame.function as usize) {
                function.level = function.level.wrapping_add(change);
            }
        }
    }

    /// Makes functions, and pairs of them, one that are called the same from now on.
    fn merge(&mut self, ended: &mut EndedFunctions) {
        let outside = ThreadFunction::new(NO_CALLER);
        let old = std::mem::replace(&mut self.functions, vec![outside]);
        self.known = PairTable::default();
        let mut places = vec![OUTSIDE];
        for function in old.into_iter().skip(1) {
            let id = ended.number(function.id);
            let known = self.known.get(0, id as usize + 1);
            let place = known.unwrap_or_else(|| {
                self.functions.push(ThreadFunction::new(id));
                let new = self.functions.len() as u32 - 1;
                self.known.insert(0, id as usize + 1, new);
                new
            });
            places.push(place);
            if let Some(sum) = self.functions.get_mut(place as usize) {
                sum.level += function.level;
                sum.recursive += function.recursive;
                sum.cumulative = sum.cumulative.wrapping_add(function.cumulative);
            }
        }
        let place = |places: &[u32], old: u32| places.get(old as usize).copied().unwrap_or(OUTSIDE);
        let old = std::mem::take(&mut self.nodes);
        ended.add_entries(old.len());
        let mut known = HashMap::with_capacity(old.len());
        let mut node_places = Vec::with_capacity(old.len());
        for mut node in old {
            (node.caller, node.function) = (place(&places, node.caller), place(&places, node.function));
            let at = *known.entry((node.caller, node.function)).or_insert(self.nodes.len());
            node_places.push(at as u32);
            match self.nodes.get_mut(at) {
                Some(sum) => {
                    sum.level += node.level;
                    sum.figures.add(&node.figures);
                }
                None => self.nodes.push(node),
            }
        }
        // What has ended is called no more, and calls nothing.
        let old = std::mem::take(&mut self.pairs);
        for (caller, key, node) in old.iter().filter(|(_, key, _)| !ended.has_key(*key)) {
            let caller = place(&places, caller);
            if self.pairs.get(caller, key).is_none() {
                self.pairs.insert(caller, key, place(&node_places, node));
            }
        }
        for frame in self.stack.all_mut().flatten() {
            frame.node = place(&node_places, frame.node);
            frame.function = place(&places, frame.function);
        }
    }

    /// All figures so far; open calls are not in them.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        let id = |function: u32| self.functions.get(function as usize).map_or(NO_CALLER, |f| f.id);
        for node in &self.nodes {
            let callee = id(node.function);
            if let Some(sum) = totals.function(callee) {
                sum.calls += node.figures.calls;
                sum.self_ticks = sum.self_ticks.wrapping_add(node.figures.self_ticks);
            }
            if node.caller != OUTSIDE {
                totals.pair(id(node.caller), callee, &node.figures);
            }
        }
        for function in self.functions.iter().skip(1) {
            if let Some(sum) = totals.function(function.id) {
                sum.recursive += function.recursive;
                sum.cumulative = sum.cumulative.wrapping_add(function.cumulative);
            }
        }
        totals
    }
}

impl ThreadFunction {
    fn new(id: FunctionNumber) -> ThreadFunction {
        ThreadFunction {
            id,
            level: 0,
            recursive: 0,
            cumulative: 0,
            last_key: 0,
            last_node: 0,
        }
    }
}

impl Machine for CallPairs {
    type Shared = CallPairsShared;

    fn new(_: &ThreadInfo, _: &mut CallPairsShared) -> CallPairs {
        CallPairs {
            functions: vec![ThreadFunction::new(NO_CALLER)],
            known: PairTable::default(),
            nodes: Vec::new(),
            pairs: PairTable::default(),
            stack: OpenCallStacks::default(),
        }
    }

    #[inline(always)]
    fn enter(&mut self, callee: Callee, mut context: EventContext<'_, CallPairsShared>) -> EventOutcome {
        let key = callee.key();
        let caller = match self.stack.last() {
            Some(frame) if context.shared.subcalls => frame.function,
            _ => OUTSIDE,
        };
        let node = match self.functions.get(caller as usize) {
            Some(function) if function.last_key == key => function.last_node,
            _ => {
                let known = self.pairs.get(caller, key);
                let Some(node) = known.or_else(|| self.first_call(caller, callee, &mut context)) else {
                    return EventOutcome::Excluded;
                };
                if let Some(function) = self.functions.get_mut(caller as usize) {
                    (function.last_key, function.last_node) = (key, node);
                }
                node
            }
        };
        let Some(found) = self.nodes.get_mut(node as usize) else {
            return EventOutcome::Done;
        };
        found.level += 1;
        let function = found.function;
        if let Some(function) = self.functions.get_mut(function as usize) {
            function.level += 1;
        }
        let paused = self.stack.paused;
        self.stack.push(OpenPairCall {
            key,
            node,
            function,
            below: 0,
            begin: context.moment.now().wrapping_sub(paused),
        });
        EventOutcome::Done
    }

    #[inline(always)]
    fn leave(&mut self, key: usize, context: EventContext<'_, CallPairsShared>) -> EventOutcome {
        let now = context.moment.now().wrapping_sub(self.stack.paused);
        match self.stack.pop_if(|f| f.key == key) {
            Some(frame) => {
                self.end(&frame, now);
                EventOutcome::Done
            }
            None => self.leave_other(key, &context),
        }
    }

    #[inline(always)]
    fn is_innermost(&self, key: usize) -> bool {
        self.stack.last().is_some_and(|f| f.key == key)
    }

    fn depth(&self) -> usize {
        self.stack.depth()
    }

    fn switch(&mut self, to: CurrentGreenlet, moment: Moment, _: &mut CallPairsShared) {
        self.use_stack(to.key, moment.now());
    }

    fn close_innermost(&mut self, now: i64, _: &mut CallPairsShared) {
        if self.stack.is_empty()
            && let Some(key) = self.stack.any_parked()
        {
            self.use_stack(key, now);
        }
        if let Some(frame) = self.stack.pop() {
            self.end(&frame, now.wrapping_sub(self.stack.paused));
        }
    }

    fn retire(&mut self, _: &ThreadInfo, _: Option<&str>, shared: &mut CallPairsShared) -> bool {
        shared.ended.add(&self.totals());
        true
    }

    fn open_keys(&self, see: &mut dyn FnMut(usize)) {
        self.stack.open().for_each(|frame| see(frame.key));
    }

    fn rename(&mut self, ended: &mut EndedFunctions) {
        self.merge(ended);
    }

    fn rename_shared(shared: &mut CallPairsShared, ended: &mut EndedFunctions) {
        let old = std::mem::take(&mut shared.ended);
        shared.ended.add_as(&old, |id| ended.number(id));
    }
}
