//! Which Python frames run in which call of the bytecode loop where nothing but the words of the calls says so (up to CPython
//! 3.9), and their order is not that of one chain: a thread has frames of several interpreters, or some are missing.

use super::process::Process;
use super::stacks::StackBuilder;
use crate::cpython::frame_groups::by_word::{self, EvalCall, Placed};
use crate::cpython_layout::Anchor;
use crate::event::Sample;
use crate::frame::NativeFrame;
use crate::truncation::Truncation;
use crate::unwind::Unwinder;

/// Maximum number of words among a call's locals that are read.
const MAX_LOCALS: u64 = 128;

impl StackBuilder {
    /// Gives the groups of the sample's Python frames anchors if the calls of the bytecode loop are more than one chain of
    /// frames explains. Returns why the order of the frames is not known.
    pub(super) fn place_by_word(
        &mut self,
        s: &Sample,
        process: &mut Process,
        unwinder: &mut Unwinder,
        is_complete: bool,
    ) -> Option<Truncation> {
        let python = process.python.as_ref()?;
        let is_by_order = python.interpreter.is_some_and(|i| i.layout.anchor == Anchor::EvalRange);
        let is_by_order = is_by_order && !python.runtime.eval.is_empty();
        let regs = s.regs.as_ref().filter(|_| is_by_order && is_complete)?;
        let is_call = |f: &&NativeFrame| {
            let (module, svma) = f.location?;
            (module == python.module && python.runtime.is_eval(svma)).then_some(())
        };
        let calls: Vec<NativeFrame> = self.native.iter().filter(|f| is_call(f).is_some()).copied().collect();
        let has_several = process.has_several_interpreters();
        if s.dispatcher.is_some() || !has_several && calls.len() <= self.groups.list.len() {
            return None;
        }
        let kept = unwinder.kept_registers(&process.space, regs, &s.stack);
        let mut kept = kept.into_iter().peekable();
        let calls = calls.iter().map(|call| {
            // Both are in the order of the stack.
            while kept.next_if(|(sp, _)| *sp < call.sp).is_some() {}
            let registers = kept.next_if(|(sp, _)| *sp == call.sp).map(|(_, words)| words);
            let end = call.cfa.min(call.sp.saturating_add(8 * MAX_LOCALS));
            EvalCall {
                sp: call.sp,
                registers: registers.unwrap_or_default(),
                locals: (call.sp..end).step_by(8).filter_map(|at| s.stack.word(at)).collect(),
            }
        });
        let calls: Vec<EvalCall> = calls.collect();
        let placed = by_word::place(&s.python, &calls, &self.groups);
        let (groups, is_known) = match placed {
            Placed::All(groups) => (groups, true),
            Placed::Some(groups) => (groups, false),
        };
        if is_known || has_several {
            self.groups = groups;
        }
        let has_frame = |call: &&EvalCall| self.groups.list.iter().any(|g| g.anchor == Some(call.sp));
        let without_frame: Vec<&EvalCall> = calls.iter().filter(|call| !has_frame(call)).collect();
        for state in without_frame.iter().flat_map(|call| &call.registers) {
            if process.states.several.contains(state) {
                process.states.add_lent(*state);
            }
        }
        (!is_known && has_several).then_some(Truncation::InterleaveMismatch)
    }
}
