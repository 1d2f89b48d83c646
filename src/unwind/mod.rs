//! Native unwinding: registers and a stack copy in, frames with their stack intervals out.
//!
//! Independent of processes, files and symbols: sections come in through [`Sections`], the map of code through
//! [`CodeMap`]. Never panics and always ends, whatever the bytes are.
//!
//! A frame's caller is searched for in this order: call frame tables (`cfi`), analysis of the function's own
//! instructions (`code_rules`), and validated fallbacks (`fallback`); [`UnwindMethod`] says which.

mod call_edges;
mod cfi;
mod code_rules;
mod expr;
mod fallback;
mod function_extent;
mod go_frames;
mod handler_entry;
mod instruction_analysis;
mod module_rules;
mod registers;
mod return_paths;
mod rule;
mod rule_cache;
mod rules;
mod signature_marks;
mod stack_begin;
mod stack_cache;
mod stack_memory;
#[cfg(test)]
mod tests;

use crate::arch::{ADDRESS_BITS, Regs};
use crate::event::StackBytes;
use crate::frame::{ModuleId, NativeFrame, UnwindMethod};
use crate::truncation::Truncation;
use call_edges::{CallEdge, CallEdges};
use fallback::truncate_at_foreign_stack;
pub use function_extent::{FunctionExtent, FunctionExtents, MAX_FUNCTION};
use module_rules::ModuleRules;
use return_paths::ReturnPaths;
use rule::{Rule, RuleKind};
use rule_cache::RuleCache;
use rules::{Rules, UnwindStep};
pub use stack_cache::StackCache;
use stack_memory::StackMemory;

pub use crate::code_map::{CodeMap, CodeSection, Landmarks, Sections};

/// Native frames of one stack, at most.
pub const MAX_FRAMES: usize = 1 << 16;
/// Known files, at most.
const MAX_MODULES: usize = 1 << 20;
/// Signal frames may lead to another stack, also to a lower one: so often.
const MAX_SWITCHES: u32 = 64;

/// Unwinds stacks; caches the unwind rules of all files it has seen.
#[derive(Default)]
pub struct Unwinder {
    modules: Vec<Option<Box<ModuleRules>>>,
    rules: Rules,
    cache: RuleCache,
    edges: CallEdges,
    return_paths: ReturnPaths,
    /// Instructions that may still be followed for the current stack, without tables.
    work: usize,
    context: cfi::CfiContext,
    /// Addresses on the stack that lie in frames of code with tables, ascending.
    anchors: Vec<u64>,
    greenlets: bool,
    /// Calls of the eval function that the interpreter has records of.
    loops: Option<usize>,
}

/// File and svma of `avma`.
fn locate(code: &dyn CodeMap, avma: u64) -> Option<(ModuleId, u64)> {
    code.find(avma).map(|(module, bias)| (module, avma.wrapping_sub(bias)))
}

/// The address that a return address, as a register or the stack has it, represents: without signature and tag.
#[inline]
fn code_address(code: &dyn CodeMap, word: u64) -> u64 {
    let mut shorter = ADDRESS_BITS.iter().map(|bits| word & ((1 << bits) - 1));
    let found = shorter.find(|at| *at == 0 || code.is_code(at.wrapping_sub(1)));
    found.unwrap_or(word)
}

/// State of unwinding one stack.
struct UnwindState<'a> {
    code: &'a dyn CodeMap,
    memory: StackMemory<'a>,
    regs: Regs,
    /// `regs.ip` is an interrupted instruction, not a return address.
    interrupted: bool,
    switches: u32,
    /// Frames that may still be tried while scanning the stack.
    budget: usize,
    /// No scan while trying what a scan found.
    searching: bool,
    /// Index of the stack's first frame in the output.
    first: usize,
    /// Index in the output of the first frame whose caller nothing proves.
    unproved: Option<usize>,
}

impl<'a> UnwindState<'a> {
    fn new(code: &'a dyn CodeMap, regs: &Regs, stack: &'a StackBytes, first: usize) -> UnwindState<'a> {
        UnwindState {
            code,
            memory: StackMemory::new(stack),
            regs: *regs,
            interrupted: true,
            switches: 0,
            budget: 2 * MAX_FRAMES,
            searching: false,
            first,
            unproved: None,
        }
    }

    fn lookup(&self) -> u64 {
        self.regs.ip.wrapping_sub(u64::from(!self.interrupted))
    }
}

impl Unwinder {
    /// Adds the sections of a file. Nothing is parsed before a frame needs it.
    pub fn add(&mut self, module: ModuleId, sections: Box<dyn Sections>) {
        let index = module.0 as usize;
        if index >= MAX_MODULES {
            return;
        }
        if index >= self.modules.len() {
            self.modules.resize_with(index + 1, || None);
        }
        if self.modules[index].is_some() {
            self.cache = RuleCache::default();
            self.edges = CallEdges::default();
            self.return_paths = ReturnPaths::default();
        }
        self.modules[index] = Some(Box::new(ModuleRules::new(sections)));
    }

    /// Drops the rules of some files.
    pub fn remove(&mut self, modules: impl IntoIterator<Item = ModuleId>) {
        for module in modules {
            if let Some(known) = self.modules.get_mut(module.0 as usize) {
                *known = None;
            }
        }
        self.cache = RuleCache::default();
        self.edges = CallEdges::default();
        self.return_paths = ReturnPaths::default();
    }

    /// Whether so many different rules were found that there may soon be no room for more.
    pub fn is_nearly_full(&self) -> bool {
        self.rules.is_nearly_full()
    }

    /// Adds the landmarks of a file, after [`Unwinder::add`].
    pub fn add_landmarks(&mut self, module: ModuleId, landmarks: Landmarks) {
        if let Some(Some(known)) = self.modules.get_mut(module.0 as usize) {
            self.greenlets |= !landmarks.stub.is_empty();
            known.landmarks = landmarks;
            self.cache = RuleCache::default();
        }
    }

    /// Does one of the files contain greenlet's functions?
    pub fn has_greenlets(&self) -> bool {
        self.greenlets
    }

    /// Sets, for the stacks that follow, the anchors: addresses that are known to lie in frames of code with tables. A
    /// fallback that crosses one of them, or leaves one out, is wrong. `loops`: the calls of the eval function that the
    /// interpreter has records of, including those without anchors.
    pub fn set_anchors(&mut self, anchors: impl Iterator<Item = u64>, loops: Option<usize>) {
        self.loops = loops;
        self.anchors.clear();
        self.anchors.extend(anchors);
        self.anchors.sort_unstable();
    }

    /// Start (svma) of the function that contains `svma`, according to the unwind tables; needs no symbols.
    pub fn function_start(&mut self, module: ModuleId, svma: u64) -> Option<u64> {
        self.modules.get_mut(module.0 as usize)?.as_mut()?.start(svma)
    }

    /// Appends the frames of a stack to `out`, innermost first. `Err` says why it ends before the thread's first frame;
    /// the frames found so far stay, the last of them with [`UnwindMethod::Failed`].
    pub fn unwind(
        &mut self,
        code: &dyn CodeMap,
        regs: &Regs,
        stack: &StackBytes,
        out: &mut Vec<NativeFrame>,
    ) -> Result<(), Truncation> {
        let mut state = UnwindState::new(code, regs, stack, out.len());
        self.work = call_edges::MAX_WORK;
        let done = self.walk(&mut state, None, out);
        state.keep_proved(done, out)
    }

    /// The same, for consecutive stacks of one thread: what has not changed since the last one is not unwound again.
    /// `generation` must change whenever `code` does.
    pub fn unwind_incremental(
        &mut self,
        stack_cache: &mut StackCache,
        generation: u64,
        code: &dyn CodeMap,
        regs: &Regs,
        stack: &StackBytes,
        out: &mut Vec<NativeFrame>,
    ) -> Result<(), Truncation> {
        let mut state = UnwindState::new(code, regs, stack, out.len());
        self.work = call_edges::MAX_WORK;
        let first = out.len();
        stack_cache.begin(generation);
        let done = self.walk(&mut state, Some(stack_cache), out);
        let done = state.keep_proved(done, out);
        stack_cache.end(out.len() - first, done.is_ok());
        done
    }

    /// The unwind rule at `svma` as text, for tests and for people: `rsp+16 rbp=c-16 ra=c-8`. `None` if there is none.
    pub fn explain(&mut self, module: ModuleId, svma: u64) -> Option<String> {
        let rule = self.rule(module, svma);
        self.rules.describe(&rule)
    }

    fn walk(
        &mut self,
        state: &mut UnwindState,
        mut stack_cache: Option<&mut StackCache>,
        out: &mut Vec<NativeFrame>,
    ) -> Result<(), Truncation> {
        let first = out.len();
        let mut at = locate(state.code, state.lookup());
        loop {
            if let Some(stack_cache) = stack_cache.as_deref_mut().filter(|m| m.is_active())
                && let Some((regs, interrupted)) =
                    stack_cache.reuse(&state.regs, state.interrupted, state.memory.stack, out)
            {
                (state.regs, state.interrupted) = (regs, interrupted);
                at = locate(state.code, state.lookup());
            }
            let (lookup, sp) = (state.lookup(), state.regs.sp());
            let mut frame = NativeFrame {
                lookup,
                sp,
                cfa: sp,
                location: at,
                method: UnwindMethod::Failed,
            };
            if out.len() - first >= MAX_FRAMES {
                out.push(frame);
                return Err(Truncation::TooManyFrames);
            }
            let mut rule = at.map_or(Rule::NONE, |(module, svma)| self.rule(module, svma));
            // A thread interrupted in sigreturn is just after that system call, where the restorer's table has ended.
            if state.interrupted
                && (rule.code || matches!(rule.kind, RuleKind::None))
                && let Some((module, svma)) = locate(state.code, lookup.wrapping_sub(1))
            {
                let before = self.rule(module, svma);
                if before.signal {
                    rule = before;
                }
            }
            if !rule.signal || !self.is_called(state) {
                (frame.lookup, frame.location) = state.place(&rule, at);
            }
            // The common case; the rest of the loop handles all others.
            if let Some((cfa, ra)) = self.rules.plain(&rule, &state.regs, &state.memory)
                && cfa > sp
                && let ra = code_address(state.code, ra)
                && ra != 0
                && let Some(next) = locate(state.code, ra.wrapping_sub(1))
            {
                (frame.cfa, frame.method) = (cfa, UnwindMethod::Cfi);
                out.push(frame);
                if let Some(stack_cache) = stack_cache.as_deref_mut().filter(|m| m.is_active()) {
                    let mut words = [(0, 0); rule::MAX_WORDS];
                    let n = rule.words(cfa, state.memory.stack, &mut words);
                    stack_cache.record(frame, state.regs, state.interrupted, n.map(|n| &words[..n]));
                }
                Rules::restore(&rule, &mut state.regs, &mut state.memory, cfa, ra);
                (at, state.interrupted) = (Some(next), false);
                continue;
            }
            if let Some(done) = self.landmark(state, &mut rule, frame, out) {
                return done;
            }
            let before = state.regs;
            if let Some(stack_cache) = stack_cache.as_deref_mut().filter(|m| m.is_active()) {
                stack_cache.record(frame, before, state.interrupted, None);
            }
            let no_table = rule.code || matches!(rule.kind, RuleKind::None);
            if no_table && self.is_foreign_stack(state, before.ip) {
                return Err(truncate_at_foreign_stack(state.first, frame, out));
            }
            let step = self.rules.apply(&rule, &mut state.regs, &mut state.memory);
            let failed = match step {
                UnwindStep::End { cfa } => {
                    frame.cfa = cfa.unwrap_or(sp).max(sp);
                    frame.method = UnwindMethod::StackEnd;
                    out.push(frame);
                    return Ok(());
                }
                UnwindStep::Fail { truncation, cfa } => {
                    frame.cfa = cfa.unwrap_or(sp).max(sp);
                    // A frame that is not above its own stack pointer is the rule's fault, not the stack copy's, unless the
                    // rule leads to another stack.
                    if cfa.is_some_and(|cfa| cfa <= sp) && !rule.may_switch() {
                        Truncation::BadUnwindInfo
                    } else {
                        truncation
                    }
                }
                UnwindStep::Caller { cfa } => match self.caller(state, &rule, &frame, cfa, out) {
                    Ok(next) => {
                        frame.cfa = cfa.max(sp);
                        frame.method = if rule.code {
                            UnwindMethod::InstructionAnalysis
                        } else {
                            UnwindMethod::Cfi
                        };
                        at = next;
                        if state.regs.ip == 0 {
                            // While code switches stacks, the words read as a return address and a zero may be others.
                            if !no_table && self.is_foreign_stack(state, before.ip) {
                                return Err(truncate_at_foreign_stack(state.first, frame, out));
                            }
                            frame.method = UnwindMethod::StackEnd;
                            out.push(frame);
                            return Ok(());
                        }
                        out.push(frame);
                        continue;
                    }
                    Err(_) if state.regs.ip == 0 && self.may_begin_thread(state, &frame) => {
                        frame.cfa = cfa.max(sp);
                        frame.method = UnwindMethod::StackEnd;
                        out.push(frame);
                        return Ok(());
                    }
                    Err(truncation) => truncation,
                },
            };
            state.regs = before;
            if !no_table && self.is_foreign_stack(state, before.ip) {
                return Err(truncate_at_foreign_stack(state.first, frame, out));
            }
            if self.is_entry(&frame) {
                frame.method = UnwindMethod::StackEnd;
                out.push(frame);
                return Ok(());
            }
            match self.fallback(state, &rule, failed, frame, out) {
                Some(fallback::FallbackResult::Next(next)) => at = next,
                Some(fallback::FallbackResult::End) => return Ok(()),
                None => {
                    out.push(frame);
                    return Err(failed);
                }
            }
        }
    }

    /// Validates the caller that a rule led to; returns the location of its code, if in a file. `out`: the frames
    /// further in.
    #[inline]
    fn caller(
        &mut self,
        state: &mut UnwindState,
        rule: &Rule,
        frame: &NativeFrame,
        cfa: u64,
        out: &[NativeFrame],
    ) -> Result<Option<(ModuleId, u64)>, Truncation> {
        // Every call takes stack. Only the kernel moves from one stack to another, also to a lower one, when it
        // interrupts; and a function that has popped its return address (vfork) has no stack of its own left.
        let grows = cfa.min(state.regs.sp()) > frame.sp || cfa == frame.sp && state.interrupted;
        if rule.signal {
            state.switches += 1;
        }
        if !grows && !rule.signal || state.switches > MAX_SWITCHES {
            return Err(Truncation::BadUnwindInfo);
        }
        if !rule.signal {
            state.regs.ip = code_address(state.code, state.regs.ip);
        }
        let ip = state.regs.ip;
        if ip == 0 {
            return if state.begins_at_zero(rule, cfa, out) {
                Ok(None)
            } else {
                Err(Truncation::NoUnwindInfo)
            };
        }
        let interrupts = rule.signal && self.call_edge(state.code, ip, frame.lookup) != CallEdge::Proved;
        let lookup = ip.wrapping_sub(u64::from(!interrupts));
        let at = locate(state.code, lookup);
        if at.is_none() && !rule.signal && !state.code.is_code(lookup) {
            return Err(Truncation::ReturnAddressNotInCode);
        }
        if rule.code && !rule.signal && self.call_edge(state.code, ip, frame.lookup) <= CallEdge::Pushed {
            return Err(Truncation::NoUnwindInfo);
        }
        state.interrupted = interrupts;
        Ok(at)
    }

    /// Whether the current frame, whose table says that it is one of the kernel, is that of a function which was
    /// called: OCaml marks so what switches stacks (runtime/amd64.S of 5.0 and later), since the next frame may be at a
    /// lower address.
    fn is_called(&mut self, state: &UnwindState) -> bool {
        let ip = state.regs.ip;
        let is_return = |(module, svma): (ModuleId, u64)| {
            let known = self.modules.get_mut(module.0 as usize).and_then(Option::as_mut);
            known.is_some_and(|known| known.is_signal_return(svma))
        };
        !state.interrupted && !locate(state.code, ip).is_some_and(is_return) && self.is_after_call(state.code, ip)
    }

    #[inline]
    fn rule(&mut self, module: ModuleId, svma: u64) -> Rule {
        let slot = RuleCache::slot(module, svma);
        if let Some(id) = self.cache.get(slot, module, svma) {
            return self.rules.get(id);
        }
        let Some(Some(known)) = self.modules.get_mut(module.0 as usize) else {
            return Rule::NONE;
        };
        let rule = known.rule(svma, &mut self.rules, &mut self.context);
        self.cache.put(slot, module, svma, rule);
        self.rules.get(rule)
    }
}
