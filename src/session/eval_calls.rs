//! Which Python frames run in which call of the bytecode loop where nothing but the words of the calls says so (up to CPython
//! 3.9), and their order is not that of one chain: a thread has frames of several interpreters, or some are missing.

use super::Session;
use super::targets::TargetProcess;
use crate::cpython::frame_groups::by_word::{self, EvalCall, Placed};
use crate::cpython_layout::Anchor;
use crate::event::{Pid, Sample};
use crate::frame::NativeFrame;
use crate::limits::MAX_NESTED;
use crate::truncation::Truncation;

/// Maximum number of words among a call's locals that are read.
const MAX_LOCALS: u64 = 128;

/// Adds a thread state to those that have run in another thread than their own.
pub(super) fn add_lent(lent: &mut Vec<u64>, state: u64) {
    if lent.len() < MAX_NESTED && !lent.contains(&state) {
        lent.push(state);
    }
}

impl Session {
    /// Did the process have more than one interpreter when its thread states were read last?
    pub fn has_several_interpreters(&self, pid: Pid) -> bool {
        let target = self.targets.get(&pid);
        target.is_some_and(TargetProcess::has_several_interpreters)
    }

    /// Gives the groups of the sample's Python frames anchors if the calls of the bytecode loop are more than one chain of
    /// frames explains. Returns why the order of the frames is not known.
    pub(super) fn place_by_word(&mut self, s: &Sample, is_complete: bool) -> Option<Truncation> {
        let target = &self.targets[&s.pid];
        let python = target.python.as_ref()?;
        let is_by_order = python.interpreter.is_some_and(|i| i.layout.anchor == Anchor::EvalRange);
        let is_by_order = is_by_order && !python.runtime.eval.is_empty();
        let regs = s.regs.as_ref().filter(|_| is_by_order && is_complete)?;
        let is_call = |f: &&NativeFrame| {
            let (module, svma) = f.location?;
            (module == python.module && python.runtime.is_eval(svma)).then_some(())
        };
        let calls: Vec<NativeFrame> = self.native.iter().filter(|f| is_call(f).is_some()).copied().collect();
        let has_several = target.has_several_interpreters();
        if s.dispatcher.is_some() || !has_several && calls.len() <= self.groups.list.len() {
            return None;
        }
        let kept = self.unwinder.kept_registers(&target.process, regs, &s.stack);
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
        if let Some(target) = self.targets.get_mut(&s.pid) {
            let words = without_frame.iter().flat_map(|call| &call.registers);
            for state in words.filter(|word| target.states.contains(word)) {
                add_lent(&mut target.lent_states, *state);
            }
        }
        (!is_known && has_several).then_some(Truncation::InterleaveMismatch)
    }
}
