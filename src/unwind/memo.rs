//! What the last unwinding of a thread read, so that the part of a deep stack that has not changed need not be unwound
//! again.
//!
//! The frames from some point outward follow from the registers there and from the stack words that were read on the
//! way, nothing else. If all of those are the same, so are the frames. Comparing the words costs about a fifth of
//! looking up and applying the rules.

use crate::arch::{CALLEE_SAVED, Regs, SP};
use crate::sample::{NativeFrame, StackBytes};

/// Stacks of fewer frames are unwound afresh: keeping their words would cost more than it saves.
const DEEP: usize = 64;
/// Words kept; a stack that reads more is not kept.
const MOST_READS: usize = 1 << 18;

/// Frames at the outer end that are never compared: the thread's first ones, whose rules are of another kind.
const OUTERMOST: usize = 4;

/// A frame of the last stack and what it took to find its caller.
#[derive(Clone, Copy)]
struct Kept {
    frame: NativeFrame,
    /// Registers in this frame.
    regs: Regs,
    interrupted: bool,
    /// Range of the words read; `None`: the caller was found in a way that is not kept.
    reads: Option<(u32, u32)>,
}

/// The last stack of one thread; outermost frame first, so that what stays the same stays in place.
#[derive(Default)]
pub struct Memo {
    kept: Vec<Kept>,
    /// (avma, value), those of the outermost frame first.
    reads: Vec<(u64, u64)>,
    /// Of the code map: other mappings, other rules.
    generation: u64,
    /// Frames of the stack under way, innermost first, until `end` moves them to `kept`.
    new: Vec<Kept>,
    new_reads: Vec<(u64, u64)>,
    /// Frames of `kept` that may still match; the innermost of them is the next candidate.
    cursor: usize,
    /// Frames of `kept` that were taken over, and to where.
    reused: Option<(usize, usize)>,
    /// Was the last stack deep enough to keep?
    on: bool,
}

impl Memo {
    /// Bytes on the heap.
    pub fn bytes(&self) -> usize {
        size_of::<Kept>() * (self.kept.capacity() + self.new.capacity())
            + size_of::<(u64, u64)>() * (self.reads.capacity() + self.new_reads.capacity())
    }

    /// Before a stack is unwound.
    pub(super) fn begin(&mut self, generation: u64) {
        if self.generation != generation || !self.on {
            self.kept.clear();
            self.reads.clear();
            self.generation = generation;
        }
        self.new.clear();
        self.new_reads.clear();
        self.cursor = self.kept.len();
        self.reused = None;
    }

    /// Is it worth asking and telling about the next frame?
    #[inline]
    pub(super) fn listens(&self) -> bool {
        self.on && self.reused.is_none()
    }

    /// Notes a frame and the words that led to its caller; without words it is a frame that is not compared.
    pub(super) fn note(&mut self, frame: NativeFrame, regs: Regs, interrupted: bool, reads: Option<&[(u64, u64)]>) {
        let reads = reads.map(|words| {
            let begin = self.new_reads.len() as u32;
            self.new_reads.extend(words);
            (begin, self.new_reads.len() as u32)
        });
        self.new.push(Kept {
            frame,
            regs,
            interrupted,
            reads,
        });
    }

    /// Takes over the frames that are the same as last time, from the one with these registers outward: appends them
    /// to `out`; gives the registers of the first frame that must be unwound afresh.
    pub(super) fn reuse(
        &mut self,
        regs: &Regs,
        interrupted: bool,
        stack: &StackBytes,
        out: &mut Vec<NativeFrame>,
    ) -> Option<(Regs, bool)> {
        while self.cursor > 0 && self.kept[self.cursor - 1].frame.sp < regs.sp() {
            self.cursor -= 1;
        }
        let from = self.cursor;
        let candidate = self.kept.get(from.checked_sub(1)?)?;
        if candidate.interrupted != interrupted || !equal(&candidate.regs, regs) {
            return None;
        }
        let same = |k: &Kept| {
            let words = k
                .reads
                .and_then(|(begin, end)| self.reads.get(begin as usize..end as usize));
            words.is_some_and(|w| w.iter().all(|(avma, value)| stack.word(*avma) == Some(*value)))
        };
        // Outward while the words are the same.
        let mut to = from;
        while to > 1 && same(&self.kept[to - 1]) {
            to -= 1;
        }
        if to == from {
            return None;
        }
        out.extend(self.kept[to..from].iter().rev().map(|k| k.frame));
        self.reused = Some((from, to));
        let next = &self.kept[to - 1];
        Some((next.regs, next.interrupted))
    }

    /// After a stack of `frames` frames was unwound, to its end if `complete`.
    pub(super) fn end(&mut self, frames: usize, complete: bool) {
        let keep = match self.reused {
            Some((from, to)) if to <= OUTERMOST => from,
            _ => 0,
        };
        let keep_reads = self.kept[..keep]
            .iter()
            .rev()
            .find_map(|k| k.reads)
            .map_or(0, |(_, end)| end as usize);
        self.kept.truncate(keep);
        self.reads.truncate(keep_reads);
        self.on = complete && frames >= DEEP && self.reads.len() + self.new_reads.len() < MOST_READS;
        // A change further out: the next stack is noted whole.
        if !self.on || keep == 0 && self.reused.is_some() {
            self.kept.clear();
            self.reads.clear();
            return;
        }
        while let Some(k) = self.new.pop() {
            let reads = k.reads.map(|(begin, end)| {
                let at = self.reads.len() as u32;
                self.reads.extend(&self.new_reads[begin as usize..end as usize]);
                (at, self.reads.len() as u32)
            });
            self.kept.push(Kept { reads, ..k });
        }
    }
}

/// Do both lead to the same callers? (Registers that a callee may change are as good as unknown to a caller.)
fn equal(a: &Regs, b: &Regs) -> bool {
    let known = a.known & (CALLEE_SAVED | 1 << SP);
    let same = |r: usize| known & (1 << r) == 0 || a.gpr[r] == b.gpr[r];
    a.ip == b.ip && known == b.known & (CALLEE_SAVED | 1 << SP) && (0..a.gpr.len()).all(same)
}
