//! What the last unwinding of a thread read, so that the unchanged part of a deep stack need not be unwound again.
//!
//! The frames from some point outward depend on the registers there and on the stack words read on the way, on nothing
//! else. If all of those are the same, so are the frames. Comparing the words costs about a fifth of looking up and
//! applying the rules.

use crate::arch::{CALLEE_SAVED, Regs, SP};
use crate::event::StackBytes;
use crate::frame::NativeFrame;

/// Stacks of fewer frames are unwound again: caching their words would cost more than it saves.
const DEEP: usize = 64;
/// Cached words; a stack that reads more is not cached.
const MAX_READS: usize = 1 << 18;

/// Frames at the outer end that are never compared: the thread's first ones, whose rules are of another kind.
const OUTERMOST: usize = 4;

/// A frame of the last stack, and what was read to find its caller.
#[derive(Clone, Copy)]
struct CachedFrame {
    frame: NativeFrame,
    /// Registers in this frame.
    regs: Regs,
    interrupted: bool,
    /// Range of the words read; `None`: the caller was found in a way that is not cached.
    reads: Option<(u32, u32)>,
}

/// The last stack of one thread; outermost frame first, so that unchanged entries stay in place.
#[derive(Default)]
pub struct StackCache {
    frames: Vec<CachedFrame>,
    /// (avma, value), those of the outermost frame first.
    reads: Vec<(u64, u64)>,
    /// Of the code map: other mappings mean other rules.
    generation: u64,
    /// Frames of the current stack, innermost first, until `end` moves them to `frames`.
    new: Vec<CachedFrame>,
    new_reads: Vec<(u64, u64)>,
    /// Number of `frames` that may still match; the innermost of them is the next candidate.
    cursor: usize,
    /// Range of `frames` that was reused: from, to.
    reused: Option<(usize, usize)>,
    /// Was the last stack deep enough to cache?
    on: bool,
}

impl StackCache {
    /// Bytes on the heap.
    pub fn bytes(&self) -> usize {
        size_of::<CachedFrame>() * (self.frames.capacity() + self.new.capacity())
            + size_of::<(u64, u64)>() * (self.reads.capacity() + self.new_reads.capacity())
    }

    /// Before a stack is unwound.
    pub(super) fn begin(&mut self, generation: u64) {
        if self.generation != generation || !self.on {
            self.frames.clear();
            self.reads.clear();
            self.generation = generation;
        }
        self.new.clear();
        self.new_reads.clear();
        self.cursor = self.frames.len();
        self.reused = None;
    }

    /// A cache without a last stack, which records the next one.
    pub(super) fn recording() -> StackCache {
        StackCache {
            on: true,
            ..StackCache::default()
        }
    }

    /// The frames recorded since `begin`, innermost first, and the registers in each of them.
    pub(super) fn recorded(&self) -> impl Iterator<Item = (&NativeFrame, &Regs)> {
        self.new.iter().map(|k| (&k.frame, &k.regs))
    }

    /// Should `reuse` and `record` be called for the next frame?
    #[inline]
    pub(super) fn is_active(&self) -> bool {
        self.on && self.reused.is_none()
    }

    /// Records a frame and the words that led to its caller; a frame without words is not compared.
    pub(super) fn record(&mut self, frame: NativeFrame, regs: Regs, interrupted: bool, reads: Option<&[(u64, u64)]>) {
        let reads = reads.map(|words| {
            let begin = self.new_reads.len() as u32;
            self.new_reads.extend(words);
            (begin, self.new_reads.len() as u32)
        });
        self.new.push(CachedFrame {
            frame,
            regs,
            interrupted,
            reads,
        });
    }

    /// Reuses the frames that are unchanged, from the one with these registers outward: appends them to `out`; returns
    /// the registers of the first frame that must be unwound again.
    pub(super) fn reuse(
        &mut self,
        regs: &Regs,
        interrupted: bool,
        stack: &StackBytes,
        out: &mut Vec<NativeFrame>,
    ) -> Option<(Regs, bool)> {
        while self.cursor > 0 && self.frames[self.cursor - 1].frame.sp < regs.sp() {
            self.cursor -= 1;
        }
        let from = self.cursor;
        let candidate = self.frames.get(from.checked_sub(1)?)?;
        if candidate.interrupted != interrupted || !equal(&candidate.regs, regs) {
            return None;
        }
        let same = |frame: &CachedFrame| {
            let words = frame
                .reads
                .and_then(|(begin, end)| self.reads.get(begin as usize..end as usize));
            words.is_some_and(|w| w.iter().all(|(avma, value)| stack.word(*avma) == Some(*value)))
        };
        // Outward as long as the words are the same.
        let mut to = from;
        while to > 1 && same(&self.frames[to - 1]) {
            to -= 1;
        }
        if to == from {
            return None;
        }
        out.extend(self.frames[to..from].iter().rev().map(|k| k.frame));
        self.reused = Some((from, to));
        let next = &self.frames[to - 1];
        Some((next.regs, next.interrupted))
    }

    /// After a stack of `frame_count` frames was unwound, to its end if `complete`.
    pub(super) fn end(&mut self, frame_count: usize, complete: bool) {
        let keep = match self.reused {
            Some((from, to)) if to <= OUTERMOST => from,
            _ => 0,
        };
        let keep_reads = self.frames[..keep]
            .iter()
            .rev()
            .find_map(|k| k.reads)
            .map_or(0, |(_, end)| end as usize);
        self.frames.truncate(keep);
        self.reads.truncate(keep_reads);
        self.on = complete && frame_count >= DEEP && self.reads.len() + self.new_reads.len() < MAX_READS;
        // A change further out: the next stack is recorded completely.
        if !self.on || keep == 0 && self.reused.is_some() {
            self.frames.clear();
            self.reads.clear();
            return;
        }
        while let Some(k) = self.new.pop() {
            let reads = k.reads.map(|(begin, end)| {
                let at = self.reads.len() as u32;
                self.reads.extend(&self.new_reads[begin as usize..end as usize]);
                (at, self.reads.len() as u32)
            });
            self.frames.push(CachedFrame { reads, ..k });
        }
    }
}

/// Do both lead to the same callers? (Registers that a callee may change are as good as unknown to a caller.)
fn equal(a: &Regs, b: &Regs) -> bool {
    let known = a.known & (CALLEE_SAVED | 1 << SP);
    let same = |r: usize| known & (1 << r) == 0 || a.gpr[r] == b.gpr[r];
    a.ip == b.ip && known == b.known & (CALLEE_SAVED | 1 << SP) && (0..a.gpr.len()).all(same)
}
