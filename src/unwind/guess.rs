//! What is left where neither tables nor instructions tell the caller: guesses, each checked against the code that a
//! return address must lie behind.

use super::rule::{Kind, Rule, Step};
use super::{CodeMap, code};
use super::{Unwinder, Walk, place};
use crate::arch::{CALLEE_SAVED, FP, Regs, SP};
use crate::sample::{Cut, How, ModuleId, NativeFrame};

/// Words of the stack searched for a return address.
const MOST_WORDS: u64 = 8192;
/// Return addresses tried in one search.
const MOST_TRIES: u32 = 64;

/// Words tried as frame pointer for one return address.
const MOST_POINTERS: usize = 8;

/// Where a guess led.
pub enum Found {
    /// The frame was pushed; the caller's code lies here.
    Next(Option<(ModuleId, u64)>),
    /// The frame and all its callers were pushed.
    End,
}

impl Unwinder {
    /// Tries to find the caller of a frame by other means, after `failed`; pushes the frame if it succeeds.
    pub(super) fn guess(
        &mut self,
        walk: &mut Walk,
        rule: &Rule,
        failed: Cut,
        mut frame: NativeFrame,
        out: &mut Vec<NativeFrame>,
    ) -> Option<Found> {
        // Where the stack copy is the reason, the rule was right and a guess would only skip frames.
        if !matches!(failed, Cut::NoUnwindInfo | Cut::BadUnwindInfo | Cut::NotCode) {
            return None;
        }
        let step = match frame.place {
            None => self.anonymous(walk),
            Some((module, svma)) => self.instructions(walk, module, svma),
        };
        let free = |regs: &Regs| !self.steps_over(frame.sp, regs.sp());
        // Tables led from the thread's own registers to a call, and its table does not lead on: the stack is not what the
        // tables are about (what lies there belongs to others), and anything found further out would be an invention.
        let all_tables = out
            .get(walk.first..)
            .is_none_or(|inner| inner.iter().all(|f| f.how.is_exact()));
        let told = matches!(rule.kind, Kind::Frame | Kind::Deref | Kind::General) && !rule.code && !walk.interrupted;
        if told && all_tables && step.is_none() {
            return None;
        }
        let step = step.filter(free).map(|regs| (regs, How::Code)).or_else(|| {
            let regs = self.frame_pointer(walk)?;
            let free = !self.steps_over(frame.sp, regs.sp());
            free.then_some((regs, How::FramePointer))
        });
        if let Some((regs, how)) = step {
            walk.regs = regs;
            walk.interrupted = false;
            (frame.cfa, frame.how) = (regs.sp(), how);
            out.push(frame);
            return Some(Found::Next(place(walk.code, walk.lookup())));
        }
        self.search(walk, frame, out)
    }

    /// Does the walk stand at an address that code returns to, but that nothing called? Then somebody made this stack by
    /// hand, and put the address on its top.
    pub(super) fn is_made_by_hand(&mut self, walk: &Walk) -> bool {
        !walk.interrupted && walk.code.is_code(walk.lookup()) && self.after_call(walk.code, walk.regs.ip) == Some(false)
    }

    /// Does a mark lie in this part of the stack? Then it is no frame of code without tables.
    fn steps_over(&self, sp: u64, cfa: u64) -> bool {
        let next = self.marks.partition_point(|mark| *mark < sp);
        self.marks.get(next).is_some_and(|mark| *mark < cfa)
    }

    /// Are all marks from `sp` on in frames whose extent tables tell?
    fn finds_marks(&self, sp: u64, frames: &[NativeFrame]) -> bool {
        let next = self.marks.partition_point(|mark| *mark < sp);
        let within = |mark: &u64, f: &NativeFrame| (f.sp..f.cfa).contains(mark) && f.how.is_exact();
        self.marks[next..]
            .iter()
            .all(|mark| frames.iter().any(|f| within(mark, f)))
    }

    /// The function's instructions, where its table led nowhere (tables know nothing of what inline assembler pushes) or
    /// where a function seemed to begin that does not.
    fn instructions(&mut self, walk: &mut Walk, module: ModuleId, svma: u64) -> Option<Regs> {
        for joined in [false, true] {
            let known = self.modules.get_mut(module.0 as usize)?.as_mut()?;
            let code = &mut known.code;
            let id = code.rule(svma, joined, &mut *known.sections, &mut known.tables, &mut self.rules)?;
            let rule = self.rules.get(id);
            let (sp, mut regs) = (walk.regs.sp(), walk.regs);
            let step = self.rules.apply(&rule, &mut regs, &mut walk.memory);
            if matches!(step, Step::Caller { cfa } if cfa > sp) && self.returns_to(walk.code, regs.ip) {
                return Some(regs);
            }
        }
        None
    }

    /// Code that no file backs. CPython's perf trampolines (Python/asm_trampoline.S) are
    /// `sub $8,%rsp; call *%rcx; add $8,%rsp; ret`, from 3.14 on `push %rbp; mov %rsp,%rbp; call *%rcx; pop %rbp; ret`:
    /// in both the return address is the second word. A call through a wild pointer left it in the first.
    fn anonymous(&mut self, walk: &Walk) -> Option<Regs> {
        let sp = walk.regs.sp();
        let first = if walk.interrupted { 0 } else { 1 };
        let last = if walk.interrupted && !walk.code.is_code(walk.regs.ip) {
            0
        } else {
            1
        };
        for slot in first..=last {
            let address = sp.checked_add(8 * slot)?;
            let ra = walk.memory.word(address).ok()?;
            if !self.returns_to(walk.code, ra) {
                continue;
            }
            let mut regs = walk.regs;
            regs.known &= CALLEE_SAVED | 1 << SP;
            if slot == 1 && regs.get(FP) == Some(sp) {
                regs.gpr[FP] = walk.memory.word(sp).ok()?;
            }
            regs.gpr[SP] = address.checked_add(8)?;
            regs.ip = ra;
            return Some(regs);
        }
        None
    }

    /// The chain of frame pointers: rbp points to the caller's rbp, the return address lies above.
    fn frame_pointer(&mut self, walk: &Walk) -> Option<Regs> {
        let fp = walk.regs.get(FP)?;
        let stack = walk.memory.stack;
        if fp % 8 != 0 || fp < walk.regs.sp() || fp < stack.base {
            return None;
        }
        let (next, ra) = (stack.word(fp)?, stack.word(fp.checked_add(8)?)?);
        if !self.returns_to(walk.code, ra) {
            return None;
        }
        let mut regs = Regs::from_ip_sp_fp(ra, fp.checked_add(16)?, next);
        regs.known |= 1 << FP;
        Some(regs)
    }

    /// Searches the stack upward for a return address from which the tables lead to the stack's end.
    fn search(&mut self, walk: &mut Walk, mut frame: NativeFrame, out: &mut Vec<NativeFrame>) -> Option<Found> {
        if walk.searching {
            return None;
        }
        let (from, mark) = (walk.regs.sp().checked_add(7)? & !7, out.len());
        let before = walk.regs;
        let mut tries = 0;
        for i in 0..MOST_WORDS {
            let address = from.checked_add(8 * i)?;
            if address >= walk.memory.stack.end() || tries >= MOST_TRIES || walk.budget == 0 {
                break;
            }
            if self.steps_over(before.sp(), address.checked_add(8)?) {
                break;
            }
            let Some(ra) = walk.memory.stack.word(address) else {
                continue;
            };
            if !walk.code.is_code(ra.wrapping_sub(1)) || self.after_call(walk.code, ra) != Some(true) {
                continue;
            }
            tries += 1;
            // The code in between may have left the callee-saved registers alone, or not, or have saved the frame
            // pointer before it used rbp for other things (CPython's compiled traces).
            let own = [before.known & CALLEE_SAVED | 1 << SP, 1 << SP].map(|known| (known, before.gpr[FP]));
            let saved = self.saved_frame_pointers(walk, &before, address, out);
            let saved = saved.into_iter().map(|fp| (1 << SP | 1 << FP, fp));
            for (known, fp) in own.into_iter().chain(saved) {
                walk.regs = Regs {
                    ip: ra,
                    known,
                    ..before
                };
                (walk.regs.gpr[SP], walk.regs.gpr[FP]) = (address.checked_add(8)?, fp);
                (walk.interrupted, walk.searching) = (false, true);
                (frame.cfa, frame.how) = (walk.regs.sp(), How::Scan);
                out.push(frame);
                let ended = self.walk(walk, None, out).is_ok()
                    && self.finds_marks(before.sp(), &out[mark..])
                    && ends_well(walk, out.last());
                walk.searching = false;
                if ended {
                    return Some(Found::End);
                }
                walk.budget = walk.budget.saturating_sub(out.len() - mark);
                out.truncate(mark);
            }
        }
        walk.regs = before;
        None
    }

    /// Words that the anonymous code on top of `address` has put on the stack and that may be its caller's frame pointer.
    /// None without marks: only they can tell a wrong one.
    fn saved_frame_pointers(&self, walk: &Walk, regs: &Regs, address: u64, out: &[NativeFrame]) -> Vec<u64> {
        let stack = walk.memory.stack;
        if self.marks.last().is_none_or(|mark| *mark < address) {
            return Vec::new();
        }
        let anonymous = out.iter().rev().take_while(|f| f.place.is_none()).last();
        let from = anonymous
            .map_or(regs.sp(), |f| f.sp)
            .checked_add(7)
            .map_or(address, |sp| sp & !7);
        let words = (from..address).step_by(8).filter_map(|at| stack.word(at));
        let mut found: Vec<u64> = words
            .filter(|w| w % 8 == 0 && *w > address && *w < stack.end())
            .take(MOST_POINTERS)
            .collect();
        found.dedup();
        found
    }

    fn returns_to(&mut self, code: &dyn CodeMap, ra: u64) -> bool {
        code.is_code(ra.wrapping_sub(1)) && self.after_call(code, ra) != Some(false)
    }

    /// Does a call instruction end at `ra`? `None` where the code cannot be read.
    pub(super) fn after_call(&mut self, map: &dyn CodeMap, ra: u64) -> Option<bool> {
        let (module, svma) = place(map, ra.wrapping_sub(1))?;
        let known = self.modules.get_mut(module.0 as usize)?.as_mut()?;
        let section = known.code.section(svma, &mut *known.sections)?;
        let end = usize::try_from(svma.checked_sub(section.svma)?.checked_add(1)?).ok()?;
        if code::ends_with_call(section.bytes.get(..end)?) {
            return Some(true);
        }
        // A signal handler returns to a trampoline that nothing called.
        Some(self.rule(module, svma).signal || self.rule(module, svma.wrapping_add(1)).signal)
    }
}

/// Bytes between the end of a stack and its first frame, at most, where only a return address of 0 says that this is the
/// first one.
const MAX_TOP: u64 = 512;

/// Is the outermost frame, which a search led to, surely the first one? Its table says so, or it lies at the end of the
/// stack. A zero that looks like the end of a stack is found anywhere.
fn ends_well(walk: &Walk, last: Option<&NativeFrame>) -> bool {
    walk.regs.ip != 0 || last.is_some_and(|f| walk.memory.stack.end().saturating_sub(f.cfa) <= MAX_TOP)
}
