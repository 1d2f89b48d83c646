//! Where a stack begins: its outermost frame, known by tables, by landmarks, or by the code that starts threads and programs.
//!
//! A return address of zero alone proves nothing: zeros are found anywhere on a stack.

use super::rule::{Rule, RuleKind};
use super::rules::UnwindStep;
use super::{Landmarks, UnwindState, Unwinder};
use crate::arch;
use crate::frame::{ModuleId, NativeFrame, Origin, UnwindMethod};
use crate::truncation::Truncation;

/// Bytes between the end of a stack and its first frame, at most, if only a return address of 0 marks it as the first.
const MAX_TOP: u64 = 512;

impl UnwindState<'_> {
    /// Is this so close to the end of the stack that only what starts a thread or program can be beyond?
    pub(super) fn is_top(&self, cfa: u64) -> bool {
        self.memory.stack.end().saturating_sub(cfa) <= MAX_TOP
    }

    /// Is a return address of zero, in a frame up to `cfa`, that of the first function? A table must say where it is, and
    /// tables must have led there, or it must be where stacks begin. `out`: the frames further in.
    pub(super) fn begins_at_zero(&self, rule: &Rule, cfa: u64, out: &[NativeFrame]) -> bool {
        let inner = out.get(self.first..).unwrap_or_default();
        !rule.code && (inner.iter().all(|f| f.method.is_exact()) || self.is_top(cfa))
    }

    /// Removes the frames that are not certain from a stack that does not end where stacks begin: those beyond a frame whose
    /// caller is only possible, unless just the copy of the stack ends.
    pub(super) fn keep_proved(
        &self,
        done: Result<(), Truncation>,
        out: &mut Vec<NativeFrame>,
    ) -> Result<(), Truncation> {
        use Truncation::{BadUnwindInfo, NoUnwindInfo, ReturnAddressNotInCode};
        let (Err(BadUnwindInfo | NoUnwindInfo | ReturnAddressNotInCode), Some(last)) = (done, self.unproved) else {
            return done;
        };
        out.truncate(last + 1);
        if let Some(last) = out.last_mut() {
            last.method = UnwindMethod::Failed;
        }
        Err(NoUnwindInfo)
    }
}

impl Unwinder {
    /// Ends the stack at a landmark or at what enters a handler, or replaces `rule` by the function's real rule.
    pub(super) fn landmark(
        &mut self,
        state: &mut UnwindState,
        rule: &mut Rule,
        mut frame: NativeFrame,
        out: &mut Vec<NativeFrame>,
    ) -> Option<Result<(), Truncation>> {
        let (module, svma) = frame.location?;
        match rule.kind {
            RuleKind::Switch => {
                out.push(frame);
                Some(Err(Truncation::GreenletSwitch))
            }
            RuleKind::OtherStack => {
                out.push(frame);
                Some(Err(Truncation::ForeignStack))
            }
            // The code that is returned to was never called: the frame of its callee is the first one.
            RuleKind::First => {
                match out.get_mut(state.first..).and_then(<[NativeFrame]>::last_mut) {
                    Some(last) if !state.interrupted && last.method == UnwindMethod::Cfi => {
                        last.method = UnwindMethod::Begins(Origin::Context);
                    }
                    _ => {
                        frame.method = UnwindMethod::Begins(Origin::Context);
                        out.push(frame);
                    }
                }
                Some(Ok(()))
            }
            RuleKind::Stub => {
                let known = self.modules.get_mut(module.0 as usize)?.as_mut()?;
                let id = known.real_rule(svma, &mut self.rules, &mut self.context);
                *rule = self.rules.get(id);
                let step = self.rules.apply(rule, &mut { state.regs }, &mut state.memory);
                if let UnwindStep::Caller { cfa } = step {
                    frame.cfa = cfa.max(frame.sp);
                }
                if !self.begins_greenlet(out.get(state.first..)?, &frame, module) {
                    return None;
                }
                frame.method = UnwindMethod::Begins(Origin::Greenlet);
                out.push(frame);
                Some(Ok(()))
            }
            RuleKind::Full => self.handler_entry(state, rule, frame, out),
            _ => None,
        }
    }

    /// Is this frame of a greenlet's first function in the greenlet, not in the one that starts it? `inner` are the
    /// frames further in.
    fn begins_greenlet(&self, inner: &[NativeFrame], frame: &NativeFrame, module: ModuleId) -> bool {
        let landmarks = |id: ModuleId| Some(&self.modules.get(id.0 as usize)?.as_ref()?.landmarks);
        let is_in = |f: &NativeFrame, ranges: fn(&Landmarks) -> &Vec<(u64, u64)>| {
            f.location
                .and_then(|(id, svma)| Some(Landmarks::has(ranges(landmarks(id)?), svma)))
                .unwrap_or(false)
        };
        if inner.last().is_some_and(|f| is_in(f, |l| &l.bootstrap)) {
            return true;
        }
        // The greenlet's Python frames run further in; its starter has others further out.
        match (self.anchors.last(), self.loops) {
            (Some(last), _) => *last < frame.cfa,
            (None, Some(loops)) => loops <= inner.iter().filter(|f| is_in(f, |l| &l.eval)).count(),
            (None, None) => landmarks(module).is_some_and(|l| l.bootstrap.is_empty()),
        }
    }

    /// Is this the code where the kernel starts a program? Often it is assembler without a table to show it.
    #[cold]
    pub(super) fn is_entry(&self, frame: &NativeFrame) -> bool {
        let Some((module, svma)) = frame.location else {
            return false;
        };
        let known = self.modules.get(module.0 as usize).and_then(Option::as_ref);
        known.is_some_and(|known| Landmarks::has(&known.landmarks.entry, svma))
    }

    /// Has the interrupted thread just returned from a system call that starts one? It may be the new one, which nothing
    /// has called.
    #[cold]
    pub(super) fn may_begin_thread(&mut self, state: &UnwindState, frame: &NativeFrame) -> bool {
        let Some((module, svma)) = frame.location.filter(|_| state.interrupted) else {
            return false;
        };
        let known = self.modules.get_mut(module.0 as usize).and_then(Option::as_mut);
        let section = known.and_then(|known| known.code.section(svma, &mut *known.sections));
        section.is_some_and(|s| arch::follows_thread_start(&s.bytes, svma.wrapping_sub(s.svma) as usize))
    }
}

/// Is the outermost frame found by a scan certain to be the first one? Its table says so, or it lies at the end of the
/// stack. A zero that looks like the end of a stack may be found anywhere.
pub(super) fn ends_reliably(state: &UnwindState, last: Option<&NativeFrame>) -> bool {
    state.regs.ip != 0 || last.is_some_and(|f| state.is_top(f.cfa))
}
