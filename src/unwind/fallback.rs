//! Fallbacks for frames whose caller neither tables nor instructions give: each candidate is validated against the code
//! that a return address must follow.

use super::call_edges::CallEdge;
use super::rule::{Rule, RuleKind};
use super::rules::UnwindStep;
use super::stack_begin::ends_reliably;
use super::{CodeMap, UnwindState, Unwinder, code_address, locate};
use crate::arch::{self, CALLEE_SAVED, FP, LINK, RA, Regs, SP};
use crate::frame::{ModuleId, NativeFrame, UnwindMethod};
use crate::truncation::Truncation;

/// Words of the stack searched for a return address.
pub(super) const MAX_WORDS: u64 = 8192;
/// Return addresses tried in one search.
pub(super) const MAX_TRIES: usize = 64;

/// Words tried as frame pointer for one return address.
const MAX_POINTERS: usize = 8;

/// Result of a fallback.
pub enum FallbackResult {
    /// The frame was pushed; location of the caller's code.
    Next(Option<(ModuleId, u64)>),
    /// The frame and all its callers were pushed.
    End,
}

impl Unwinder {
    /// Tries to find the caller of a frame by other means, after `failed`; pushes the frame if it succeeds.
    pub(super) fn fallback(
        &mut self,
        state: &mut UnwindState,
        rule: &Rule,
        failed: Truncation,
        mut frame: NativeFrame,
        out: &mut Vec<NativeFrame>,
    ) -> Option<FallbackResult> {
        // If the stack copy is the reason, the rule was right and a fallback would only skip frames.
        if !matches!(
            failed,
            Truncation::NoUnwindInfo | Truncation::BadUnwindInfo | Truncation::ReturnAddressNotInCode
        ) {
            return None;
        }
        let step = match frame.location {
            None => self.return_path(state, &frame),
            Some((module, svma)) => {
                let no_table = rule.code || rule.kind == RuleKind::None;
                let by_instructions = self.instructions(state, &frame, module, svma);
                by_instructions.or_else(|| no_table.then(|| self.return_path(state, &frame))?)
            }
        };
        // Tables led from the thread's own registers to a call, and the table there fails: the stack is not the one
        // that the tables describe (it belongs to another one from here on), and anything found further out would be
        // made up.
        let all_tables = out
            .get(state.first..)
            .is_none_or(|inner| inner.iter().all(|f| f.method.is_exact()));
        let by_table =
            matches!(rule.kind, RuleKind::Frame | RuleKind::Deref | RuleKind::Full) && !rule.code && !state.interrupted;
        if by_table && all_tables && step.is_none() {
            return None;
        }
        let step = step
            .map(|regs| (regs, UnwindMethod::InstructionAnalysis))
            .filter(|(regs, _)| !self.crosses_anchor(frame.sp, regs.sp()));
        let step = step.or_else(|| self.plausible_caller(state, &frame, out.len()));
        if let Some((regs, method)) = step {
            state.regs = regs;
            state.interrupted = false;
            (frame.cfa, frame.method) = (regs.sp(), method);
            out.push(frame);
            return Some(FallbackResult::Next(locate(state.code, state.lookup())));
        }
        self.search(state, frame, out)
    }

    /// The caller by the frame pointer, or, in code that cannot be read, by where trampolines have the return address. `depth`:
    /// the frame's index in the output.
    fn plausible_caller(
        &mut self,
        state: &mut UnwindState,
        frame: &NativeFrame,
        depth: usize,
    ) -> Option<(Regs, UnwindMethod)> {
        let by_pointer = self.frame_pointer(state, frame);
        let by_pointer = by_pointer.filter(|(regs, _)| !self.crosses_anchor(frame.sp, regs.sp()));
        let (regs, edge, method) = match by_pointer {
            Some((regs, edge)) => (regs, edge, UnwindMethod::FramePointer),
            None if frame.location.is_none() => {
                let regs = self.anonymous_code(state, frame)?;
                (regs, CallEdge::Possible, UnwindMethod::InstructionAnalysis)
            }
            None => return None,
        };
        if edge != CallEdge::Proved {
            state.unproved.get_or_insert(depth);
        }
        (!self.crosses_anchor(frame.sp, regs.sp())).then_some((regs, method))
    }

    /// Is the current frame, at `ip`, at an address that code returns to, but after no call? Then a stack was made by hand,
    /// with that address on top.
    pub(super) fn is_foreign_stack(&mut self, state: &UnwindState, ip: u64) -> bool {
        !state.interrupted && state.code.is_code(ip.wrapping_sub(1)) && self.follows_call(state.code, ip) == Some(false)
    }

    /// Does an anchor lie in this part of the stack? Then it cannot be a frame of code without tables.
    fn crosses_anchor(&self, sp: u64, cfa: u64) -> bool {
        let next = self.anchors.partition_point(|anchor| *anchor < sp);
        self.anchors.get(next).is_some_and(|anchor| *anchor < cfa)
    }

    /// Do all anchors from `sp` on lie in frames whose extent is known from tables?
    fn covers_anchors(&self, sp: u64, frames: &[NativeFrame]) -> bool {
        let next = self.anchors.partition_point(|anchor| *anchor < sp);
        let within = |anchor: &u64, f: &NativeFrame| (f.sp..f.cfa).contains(anchor) && f.method.is_exact();
        self.anchors[next..]
            .iter()
            .all(|anchor| frames.iter().any(|f| within(anchor, f)))
    }

    /// Analysis of the function's instructions, if its table fails (tables do not cover what inline assembler pushes)
    /// or if its start was assumed wrongly.
    fn instructions(
        &mut self,
        state: &mut UnwindState,
        frame: &NativeFrame,
        module: ModuleId,
        svma: u64,
    ) -> Option<Regs> {
        for joined in [false, true] {
            let known = self.modules.get_mut(module.0 as usize)?.as_mut()?;
            let code = &mut known.code;
            let id = code.rule(svma, joined, &mut *known.sections, &mut known.tables, &mut self.rules)?;
            let rule = self.rules.get(id);
            let (sp, mut regs) = (state.regs.sp(), state.regs);
            let step = self.rules.apply(&rule, &mut regs, &mut state.memory);
            regs.ip = code_address(state.code, regs.ip);
            let leaf = LINK.is_some() && state.interrupted;
            if matches!(step, UnwindStep::Caller { cfa } if cfa > sp || cfa == sp && leaf)
                && self.call_edge(state.code, regs.ip, frame.lookup) > CallEdge::Impossible
            {
                return Some(regs);
            }
        }
        None
    }

    /// Code without a file that cannot be read. CPython's perf trampolines (Python/asm_trampoline.S) are `sub $8,%rsp; call
    /// *%rcx; add $8,%rsp; ret`, from 3.14 on `push %rbp; mov %rsp,%rbp; call *%rcx; pop %rbp; ret`: in both the return
    /// address is the second word. A call through a wild pointer left it in the first. On aarch64 they begin and end with
    /// `stp x29, x30, [sp, -16]!` and `ldp x29, x30, [sp], 16`.
    fn anonymous_code(&mut self, state: &UnwindState, frame: &NativeFrame) -> Option<Regs> {
        let sp = state.regs.sp();
        let is_wild = state.interrupted && !state.code.is_code(state.regs.ip);
        // What can be read has been followed to its return.
        if !is_wild && state.code.read(frame.lookup, &mut [0]) == 1 {
            return None;
        }
        if LINK.is_some() {
            return self.anonymous_code_with_link(state, frame);
        }
        let first = if state.interrupted { 0 } else { 1 };
        let last = if is_wild { 0 } else { 1 };
        for slot in first..=last {
            let address = sp.checked_add(8 * slot)?;
            let ra = state.memory.word(address).ok()?;
            if self.call_edge(state.code, ra, frame.lookup) <= CallEdge::Pushed {
                continue;
            }
            let mut regs = state.regs;
            regs.known &= CALLEE_SAVED | 1 << SP;
            if slot == 1 && regs.get(FP) == Some(sp) {
                regs.gpr[FP] = state.memory.word(sp).ok()?;
            }
            regs.gpr[SP] = address.checked_add(8)?;
            regs.ip = ra;
            return Some(regs);
        }
        None
    }

    /// The same where calls leave the return address in the link register.
    fn anonymous_code_with_link(&mut self, state: &UnwindState, frame: &NativeFrame) -> Option<Regs> {
        let mut regs = state.regs;
        regs.known &= CALLEE_SAVED | 1 << SP;
        let sp = state.regs.sp();
        if let Some(ra) = state
            .regs
            .get(RA)
            .filter(|_| state.interrupted && !state.code.is_code(state.regs.ip))
        {
            regs.ip = code_address(state.code, ra);
        } else {
            if state.regs.get(FP) != Some(sp) {
                return None;
            }
            regs.gpr[FP] = state.memory.word(sp).ok()?;
            regs.ip = code_address(state.code, state.memory.word(sp.checked_add(8)?).ok()?);
            regs.gpr[SP] = sp.checked_add(16)?;
        }
        (self.call_edge(state.code, regs.ip, frame.lookup) > CallEdge::Pushed).then_some(regs)
    }

    /// The frame pointer chain: rbp points to the caller's rbp, the return address is above it. On aarch64 x29 does, but the
    /// two words may lie anywhere in the frame, so that only a lower bound of the caller's stack pointer is known.
    fn frame_pointer(&mut self, state: &UnwindState, frame: &NativeFrame) -> Option<(Regs, CallEdge)> {
        let fp = state.regs.get(FP)?;
        let stack = state.memory.stack;
        if fp % 8 != 0 || fp < state.regs.sp() || fp < stack.base {
            return None;
        }
        let (next, ra) = (stack.word(fp)?, stack.word(fp.checked_add(8)?)?);
        let ra = code_address(state.code, ra);
        let edge = self.call_edge(state.code, ra, frame.lookup);
        // The chain goes on as long as it is needed. (Compiled code uses the register for other things, too.)
        let needed = locate(state.code, ra.wrapping_sub(1)).is_none();
        let goes_on = next % 8 == 0 && next > fp && next < stack.end();
        if edge == CallEdge::Impossible || needed && next != 0 && !goes_on {
            return None;
        }
        let mut regs = Regs::from_ip_sp_fp(ra, fp.checked_add(16)?, next);
        regs.known = if LINK.is_some() { 1 << FP } else { 1 << SP | 1 << FP };
        Some((regs, edge))
    }

    /// Scans the stack upward for a return address from which the tables lead to the stack's end.
    pub(super) fn search(
        &mut self,
        state: &mut UnwindState,
        frame: NativeFrame,
        out: &mut Vec<NativeFrame>,
    ) -> Option<FallbackResult> {
        if state.searching {
            return None;
        }
        let from = state.regs.sp().checked_add(7)? & !7;
        let before = state.regs;
        let mut tries = 0;
        for i in 0..MAX_WORDS {
            let address = from.checked_add(8 * i)?;
            if address >= state.memory.stack.end() || tries >= MAX_TRIES || state.budget == 0 {
                break;
            }
            if self.crosses_anchor(before.sp(), address.checked_add(8)?) {
                break;
            }
            let Some(ra) = state.memory.stack.word(address) else {
                continue;
            };
            let ra = code_address(state.code, ra);
            if !self.is_after_call(state.code, ra) {
                continue;
            }
            tries += 1;
            // What an earlier call has left on the stack leads to the end as well: without anchors only the call itself is
            // a proof.
            let confirmed = self.anchors.last().is_some_and(|anchor| *anchor > address);
            let size = address.checked_add(8)?.wrapping_sub(frame.sp);
            match self.call_edge_over(state.code, ra, frame.lookup, size) {
                CallEdge::Proved => {}
                CallEdge::Possible if confirmed => {}
                _ => continue,
            }
            // The code in between may have preserved the callee-saved registers, or not, or have saved the frame
            // pointer before it used rbp for other things (CPython's compiled traces).
            let unsaved = [before.known & CALLEE_SAVED | 1 << SP, 1 << SP].map(|known| (known, before.gpr[FP]));
            let saved = self.saved_frame_pointers(state, &before, address, out);
            let saved = saved.into_iter().map(|fp| (1 << SP | 1 << FP, fp));
            for (known, fp) in unsaved.into_iter().chain(saved) {
                let mut regs = Regs {
                    ip: ra,
                    known,
                    ..before
                };
                (regs.gpr[SP], regs.gpr[FP]) = (address.checked_add(8)?, fp);
                if self.leads_to_end(state, regs, frame, out) {
                    return Some(FallbackResult::End);
                }
            }
        }
        state.regs = before;
        None
    }

    /// Do these registers of the caller of `frame` lead to the end of the stack, as tables and anchors have it? Pushes the
    /// frames if so.
    pub(super) fn leads_to_end(
        &mut self,
        state: &mut UnwindState,
        regs: Regs,
        mut frame: NativeFrame,
        out: &mut Vec<NativeFrame>,
    ) -> bool {
        let (depth, unproved) = (out.len(), state.unproved);
        (state.regs, state.interrupted, state.searching) = (regs, false, true);
        (frame.cfa, frame.method) = (regs.sp(), UnwindMethod::StackScan);
        out.push(frame);
        let ended = self.walk(state, None, out).is_ok()
            && self.covers_anchors(frame.sp, &out[depth..])
            && ends_reliably(state, out.last());
        state.searching = false;
        if !ended {
            state.budget = state.budget.saturating_sub(out.len() - depth);
            out.truncate(depth);
            state.unproved = unproved;
        }
        ended
    }

    /// Words below `address`, put there by anonymous code, that may be its caller's frame pointer.
    /// None without anchors: only they can expose a wrong one.
    fn saved_frame_pointers(&self, state: &UnwindState, regs: &Regs, address: u64, out: &[NativeFrame]) -> Vec<u64> {
        let stack = state.memory.stack;
        if self.anchors.last().is_none_or(|anchor| *anchor < address) {
            return Vec::new();
        }
        let anonymous = out.iter().rev().take_while(|f| f.location.is_none()).last();
        let from = anonymous
            .map_or(regs.sp(), |f| f.sp)
            .checked_add(7)
            .map_or(address, |sp| sp & !7);
        let words = (from..address).step_by(8).filter_map(|at| stack.word(at));
        let mut found: Vec<u64> = words
            .filter(|w| w % 8 == 0 && *w > address && *w < stack.end())
            .take(MAX_POINTERS)
            .collect();
        found.dedup();
        found
    }

    /// Does a call instruction end at `ra`? `None` where the code cannot be read.
    pub(super) fn follows_call(&mut self, map: &dyn CodeMap, ra: u64) -> Option<bool> {
        let (module, svma) = locate(map, ra.wrapping_sub(1))?;
        let known = self.modules.get_mut(module.0 as usize)?.as_mut()?;
        let section = known.code.section(svma, &mut *known.sections)?;
        let end = usize::try_from(svma.checked_sub(section.svma)?.checked_add(1)?).ok()?;
        if arch::ends_with_call(section.bytes.get(..end)?) {
            return Some(true);
        }
        // A signal handler returns to a trampoline that nothing called.
        Some(self.rule(module, svma).signal || self.rule(module, svma.wrapping_add(1)).signal)
    }
}

/// Truncates a stack before `frame`, which is no frame: its code was never called.
pub(super) fn truncate_at_foreign_stack(first: usize, frame: NativeFrame, out: &mut Vec<NativeFrame>) -> Truncation {
    match out.get_mut(first..).and_then(<[NativeFrame]>::last_mut) {
        Some(last) => last.method = UnwindMethod::Failed,
        None => out.push(frame),
    }
    Truncation::ForeignStack
}
