//! Functions that jump into an exception handler: `_Unwind_RaiseException`, `_Unwind_Resume` and their like in libgcc.
//!
//! At their end they overwrite what they saved, first the registers and last the return address, with what the handler's
//! function shall find (GCC, `uw_install_context_1` of libgcc/unwind-dw2.c). From then on their own table leads to that
//! function, but at a wrong place of the stack.

use super::fallback::{MAX_TRIES, MAX_WORDS};
use super::rule::Rule;
use super::rules::UnwindStep;
use super::{UnwindState, Unwinder, locate};
use crate::arch::{self, Flow, Regs, SP};
use crate::frame::{NativeFrame, UnwindMethod};
use crate::truncation::Truncation;

/// Bytes of code between the call that overwrites the registers and the jump. GCC makes about 130.
const MAX_BYTES: usize = 512;
/// Calls between them: a hook for debuggers.
const MAX_CALLS: usize = 1;

/// How far a row of such a function is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandlerRow {
    /// The registers are saved in the frame: the function's own, or already those for the handler.
    Saved,
    /// The registers are the handler's, but for the stack pointer.
    Loaded,
}

impl Unwinder {
    /// Unwinds from a frame that is about to jump into a handler, to the end of the stack. `None` if it is not.
    pub(super) fn handler_entry(
        &mut self,
        state: &mut UnwindState,
        rule: &Rule,
        frame: NativeFrame,
        out: &mut Vec<NativeFrame>,
    ) -> Option<Result<(), Truncation>> {
        let row = self.rules.handler_row(rule)?;
        if row == HandlerRow::Loaded && state.interrupted {
            return self.loaded_handler(state, rule, frame, out);
        }
        if state.searching {
            return None;
        }
        let calls = self.calls_before_jump(state)?;
        let (before, interrupted, mut regs) = (state.regs, state.interrupted, state.regs);
        let UnwindStep::Caller { cfa } = self.rules.apply(rule, &mut regs, &mut state.memory) else {
            return None;
        };
        // The return address was copied from where it is on the handler's stack, just below its frame. There the
        // handler's own address takes its place at last.
        let (ra, stack) = (regs.ip, state.memory.stack);
        let places = || {
            let all = (0..MAX_WORDS).map_while(|i| cfa.checked_add(8 * i));
            all.take_while(|at| *at < stack.end())
        };
        let copies = || places().filter(|at| stack.word(*at) == Some(ra));
        let mut slots: Vec<u64> = copies().take(MAX_TRIES).collect();
        if slots.is_empty() && calls == 0 {
            slots.extend(
                places()
                    .filter(|at| self.is_handler(state, ra, stack.word(*at)))
                    .take(MAX_TRIES),
            );
        }
        if slots.is_empty() && calls == MAX_CALLS {
            return self.thrower(state, regs, NativeFrame { cfa, ..frame }, out);
        }
        let mark = out.len();
        for slot in slots {
            regs.gpr[SP] = slot.checked_add(8)?;
            let ended = self.leads_to_end(state, regs, frame, out);
            (state.regs, state.interrupted) = (before, interrupted);
            if !ended {
                continue;
            }
            // Where no other call of this stack returns there, this is the one.
            let end = out.last().map_or(0, |f| f.cfa);
            if copies().take_while(|at| *at < end).eq([slot]) {
                out[mark].method = UnwindMethod::Cfi;
            }
            return Some(Ok(()));
        }
        None
    }

    /// Unwinds from a function that overwrites its saved registers just now, but not yet its return address: `regs` are the
    /// caller's, or already the handler's.
    fn thrower(
        &mut self,
        state: &mut UnwindState,
        mut regs: Regs,
        mut frame: NativeFrame,
        out: &mut Vec<NativeFrame>,
    ) -> Option<Result<(), Truncation>> {
        let (before, interrupted, known, mark) = (state.regs, state.interrupted, regs.known, out.len());
        for (known, method) in [(1 << SP, UnwindMethod::Cfi), (known, UnwindMethod::StackScan)] {
            regs.known = known;
            if self.leads_to_end(state, regs, frame, out) {
                out[mark].method = method;
                return Some(Ok(()));
            }
        }
        // The caller itself is known, but not its frame.
        (frame.method, regs.known) = (UnwindMethod::Cfi, 1 << SP);
        out.push(frame);
        let caller = NativeFrame {
            lookup: regs.ip.wrapping_sub(1),
            sp: frame.cfa,
            location: locate(state.code, regs.ip.wrapping_sub(1)),
            ..frame
        };
        (state.regs, state.interrupted) = (regs, false);
        if self.search(state, caller, out).is_some() {
            return Some(Ok(()));
        }
        out.truncate(mark);
        (state.regs, state.interrupted) = (before, interrupted);
        None
    }

    /// Is this word the address of a handler in the function that `ra` returns to, or in a part split off it?
    fn is_handler(&mut self, state: &UnwindState, ra: u64, word: Option<u64>) -> bool {
        let Some(word) = word else { return false };
        let places = (locate(state.code, word), locate(state.code, ra.wrapping_sub(1)));
        let (Some((module, handler)), Some((other, caller))) = places else {
            return false;
        };
        module == other
            && (self.function_start(module, handler) == self.function_start(module, caller)
                || self.follows_call(state.code, word) == Some(false))
    }

    /// The last instructions: all registers have their values, the handler's address is on the stack or in one of them.
    fn loaded_handler(
        &mut self,
        state: &mut UnwindState,
        rule: &Rule,
        mut frame: NativeFrame,
        out: &mut Vec<NativeFrame>,
    ) -> Option<Result<(), Truncation>> {
        let mut regs = state.regs;
        let step = self.rules.apply(rule, &mut regs, &mut state.memory);
        let UnwindStep::Caller { cfa } = step else { return None };
        // Nothing called the handler: its first instruction is the next one.
        locate(state.code, regs.ip)?;
        if cfa < frame.sp || state.switches >= super::MAX_SWITCHES {
            return None;
        }
        state.switches += 1;
        (state.regs.ip, state.regs.gpr[SP]) = (regs.ip, cfa);
        (frame.cfa, frame.method) = (cfa, UnwindMethod::Cfi);
        out.push(frame);
        Some(self.walk(state, None, out))
    }

    /// Calls between here and the jump, if the instructions lead straight there with no other than the last one: the one
    /// that overwrites the saved registers has returned then or is under way.
    fn calls_before_jump(&mut self, state: &UnwindState) -> Option<usize> {
        let (module, svma) = locate(state.code, state.regs.ip)?;
        let known = self.modules.get_mut(module.0 as usize)?.as_mut()?;
        let bytes = known.code.section(svma, &mut *known.sections)?.from(svma)?;
        let bytes = bytes[..bytes.len().min(MAX_BYTES)].to_vec();
        let (mut calls, mut from) = (0, svma);
        'run: loop {
            let code = usize::try_from(from.checked_sub(svma)?)
                .ok()
                .and_then(|at| bytes.get(at..))?;
            for i in arch::instructions(code, from) {
                match i.flow {
                    Flow::Next | Flow::ConditionalJump => {}
                    Flow::Call if calls < MAX_CALLS => calls += 1,
                    // Into a loop, at its condition.
                    Flow::Jump if i.target.is_some_and(|to| to > i.address) => {
                        from = i.target?;
                        continue 'run;
                    }
                    _ => return None,
                }
                let rule = self.rule(module, i.address);
                if self.rules.handler_row(&rule) == Some(HandlerRow::Loaded) {
                    return Some(calls);
                }
            }
            return None;
        }
    }
}
