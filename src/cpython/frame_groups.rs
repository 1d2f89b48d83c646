//! Turns the raw frame chain of a sample into groups of Python frames, one group per native call of the bytecode loop.

pub mod by_word;

use super::code_object::CodeTable;
use crate::arch::Regs;
use crate::cpython_layout::{ABSENT, Anchor, InstructionEncoding, Layout};
use crate::event::{Pid, RawPyFrame, Sample, WalkStatus};
use crate::frame::{CodeId, EvalGroups, PyFrame};
use crate::limits::SHIM;
use crate::process::memory::Memory;
use crate::truncation::Truncation;

/// FRAME_OWNED_BY_GENERATOR, FRAME_OWNED_BY_FRAME_OBJECT
const GENERATOR: u8 = 1;
const FRAME_OBJECT: u8 = 2;
/// Where a frame of Nuitka's is all the time, bytes: at the first instruction of its code, or at the second one
/// (CompiledFrameType.c, 2.8 to 4.0). Frames of the interpreter that belong to generators are further on when they run.
const COMPILED_AT: i32 = 2;

/// A thread's Python frames in its last sample with the results of looking them up: deep stacks change at their inner
/// end only. Outermost first, so that unchanged frames keep their index.
#[derive(Default)]
pub struct LastFrames {
    pid: Pid,
    /// Of the code table.
    generation: u64,
    layout: Option<Layout>,
    frames: Vec<(RawPyFrame, Option<PyFrame>)>,
}

impl LastFrames {
    /// Bytes on the heap.
    pub fn bytes(&self) -> usize {
        size_of::<(RawPyFrame, Option<PyFrame>)>() * self.frames.capacity()
    }

    /// The frames of the last sample that are shown, outermost first, with what they are.
    pub fn shown(&self) -> impl Iterator<Item = (&RawPyFrame, PyFrame)> {
        let coded = |named: &Option<PyFrame>| named.filter(|f| matches!(f, PyFrame::Code { .. }));
        self.frames
            .iter()
            .filter_map(move |(f, named)| Some((f, coded(named)?)))
    }

    /// Number of frames at the outer end of a sample that are the same, including code objects, as in the last one.
    fn same(&self, sample: &Sample, layout: &Layout, codes: &CodeTable) -> usize {
        if (self.pid, self.generation) != (sample.pid, codes.generation()) || self.layout.as_ref() != Some(layout) {
            return 0;
        }
        // A code object that could not be read is tried again.
        let known = |named: &Option<PyFrame>| !matches!(named, Some(PyFrame::Lost(_)));
        let pairs = self.frames.iter().zip(sample.python.iter().rev());
        pairs.take_while(|((f, named), new)| f == *new && known(named)).count()
    }

    /// Replaces the stored frames with those of this sample.
    fn replace(&mut self, sample: &Sample, layout: &Layout, codes: &mut CodeTable, memory: &dyn Memory) {
        let same = self.same(sample, layout, codes);
        self.frames.truncate(same);
        for f in sample.python.iter().rev().skip(same) {
            let named = if f.owner < SHIM || layout.anchor != Anchor::Shim {
                py_frame(sample.pid, f, layout, codes, memory)
            } else {
                None
            };
            self.frames.push((*f, named));
        }
        (self.pid, self.generation, self.layout) = (sample.pid, codes.generation(), Some(*layout));
    }
}

/// Puts the Python frames of a sample into `groups`, which is cleared first; `last` belongs to the same thread. Reads
/// code objects that are new.
pub fn groups(
    sample: &Sample,
    layout: &Layout,
    codes: &mut CodeTable,
    memory: &dyn Memory,
    last: &mut LastFrames,
    groups: &mut EvalGroups,
) {
    groups.clear();
    last.replace(sample, layout, codes, memory);
    in_chain_order(sample, &sample.anchors, layout, &last.frames, groups);
    // The chains of several thread states (subinterpreters) follow one another; their anchors on the stack give the
    // order.
    let list = &mut groups.list;
    if !list.is_sorted_by_key(|g| g.anchor) && list.iter().all(|g| g.anchor.is_some()) {
        list.sort_by_key(|g| g.anchor);
    }
}

/// Why the chain of Python frames is incomplete; `None` if it is complete. `in_greenlet`: the native stack ends where a
/// greenlet begins, so that calls of the bytecode loop without Python frames would be noticed; or native stacks are not
/// sampled, but the process may have greenlets.
pub fn truncation(sample: &Sample, layout: Option<&Layout>, in_greenlet: bool) -> Option<Truncation> {
    match sample.walk {
        WalkStatus::NoPython | WalkStatus::Complete | WalkStatus::Detached => None,
        // Where every chain ends at the thread state's base frame (3.15), that of a greenlet ends with the entry frame
        // of its first call, which has no previous frame (TPythonState.cpp, v3.5).
        WalkStatus::Fault
            if in_greenlet
                && layout.is_some_and(|l| l.tstate_base_frame != ABSENT)
                && sample.python.last().is_some_and(|f| f.owner >= SHIM) =>
        {
            None
        }
        WalkStatus::Fault => Some(Truncation::PythonFault),
        WalkStatus::TooDeep => Some(Truncation::PythonTooDeep),
    }
}

/// Rebuilds the groups of a greenlet's stack if they include an anchor too many. greenlet puts a CFrame of its own,
/// which no call of the bytecode loop uses, into the frame of its outermost function (`g_initialstub`,
/// TUserGreenlet.cpp, v3.0); `begin` is that frame's stack interval. Where each CFrame represents one Python frame, it
/// would be counted as the outermost one's.
pub fn begin_in(sample: &Sample, layout: &Layout, last: &LastFrames, (sp, cfa): (u64, u64), groups: &mut EvalGroups) {
    if let Some((own, anchors)) = sample.anchors.split_last()
        && layout.anchor == Anchor::CFramePerFrame
        && (sp..cfa).contains(&own.frame)
    {
        groups.clear();
        in_chain_order(sample, anchors, layout, &last.frames, groups);
    }
}

/// Addresses of the frames that [`groups`] returns, in the order of the chain.
pub fn shown(sample: &Sample, layout: &Layout, codes: &mut CodeTable, memory: &dyn Memory) -> Vec<u64> {
    let frames = sample.python.iter().filter(|f| f.owner < SHIM);
    frames
        .filter(|f| py_frame(sample.pid, f, layout, codes, memory).is_some())
        .map(|f| f.frame)
        .collect()
}

/// Reads the code objects of a sample that are new, and nothing else; `last` belongs to the same thread.
pub fn capture_code_objects(
    sample: &Sample,
    layout: &Layout,
    codes: &mut CodeTable,
    memory: &dyn Memory,
    last: Option<&LastFrames>,
) {
    let same = last.map_or(0, |last| last.same(sample, layout, codes));
    let new = &sample.python[..sample.python.len() - same];
    for f in new.iter().filter(|f| f.owner < SHIM) {
        // Interleaving reports what is missing.
        let _ = codes.observe(sample.pid, memory, layout, f.code, f.fingerprint);
    }
}

/// Does this look like a frame that compiled Python has linked into the chain, which no call of the bytecode loop runs? Up to
/// 3.10 a frame that has just begun looks the same.
fn is_compiled(f: &RawPyFrame, layout: &Layout) -> bool {
    let at = position(layout, f.code, f.instr);
    if layout.frame_owner == ABSENT {
        return at == -1;
    }
    f.owner == FRAME_OBJECT || f.owner == GENERATOR && !f.entry && (0..=COMPILED_AT).contains(&at)
}

/// Appends frames of one group, innermost first.
fn extend<'a>(
    groups: &mut EvalGroups,
    frames: impl IntoIterator<Item = &'a (RawPyFrame, Option<PyFrame>)>,
    layout: &Layout,
) {
    let mut compiled = true;
    for (f, named) in frames {
        compiled = compiled && is_compiled(f, layout);
        if compiled {
            groups.extend_compiled(*named)
        } else {
            groups.extend(*named)
        }
    }
}

/// `known`: the sample's frames and what they are, outermost first; `anchors`: its anchors that belong to the bytecode
/// loop.
fn in_chain_order(
    sample: &Sample,
    anchors: &[RawPyFrame],
    layout: &Layout,
    known: &[(RawPyFrame, Option<PyFrame>)],
    groups: &mut EvalGroups,
) {
    match layout.anchor {
        Anchor::EvalRange => {
            for frame in known.iter().rev() {
                groups.begin(None);
                extend(groups, [frame], layout);
            }
        }
        Anchor::CFramePerFrame => {
            // A frame is linked shortly after its CFrame and unlinked shortly before it: count from the outermost.
            let extra = anchors.len().saturating_sub(sample.python.len());
            // A call about to return has unlinked its CFrame but not yet its frame: it is the innermost native frame.
            let early = sample.python.len().saturating_sub(anchors.len());
            let compiled = known.iter().filter(|(f, _)| is_compiled(f, layout)).count();
            let has_compiled = early > 0 && compiled == early;
            let mut anchors = anchors.iter().map(|m| m.frame);
            for m in anchors.by_ref().take(extra) {
                groups.begin(Some(m));
            }
            for (i, frame) in known.iter().rev().enumerate() {
                if has_compiled && is_compiled(&frame.0, layout) {
                    groups.begin(None);
                    groups.extend_compiled(frame.1);
                    continue;
                }
                let anchor = if i < early && !has_compiled {
                    sample.regs.as_ref().map(Regs::sp)
                } else {
                    anchors.next()
                };
                groups.begin(anchor);
                groups.extend(frame.1);
            }
        }
        Anchor::CFramePerEntry => {
            let mut frames = known.iter().rev().peekable();
            for (i, anchor) in anchors.iter().enumerate() {
                groups.begin(Some(anchor.frame));
                // A CFrame just created or about to be removed still has its caller's frame: that call runs no Python
                // code.
                let outer = anchors.get(i + 1).map(|outer| outer.instr);
                if outer != Some(anchor.instr) && frames.peek().is_some_and(|(f, _)| f.frame == anchor.instr) {
                    // The frame of a call that has just begun may not have its entry flag yet.
                    let mut has_entry = false;
                    let of_call = std::iter::from_fn(|| {
                        let frame = frames.next_if(|(f, _)| !has_entry && Some(f.frame) != outer)?;
                        has_entry = frame.0.entry;
                        Some(frame)
                    });
                    extend(groups, of_call, layout);
                }
            }
            let mut rest = frames.filter(|(_, named)| named.is_some()).peekable();
            if rest.peek().is_some() {
                groups.begin(None);
                extend(groups, rest, layout);
            }
        }
        Anchor::Shim => {
            // A group's frames come before its entry frame.
            let mut frames = known;
            while !frames.is_empty() {
                let shim = frames.iter().rposition(|(f, _)| f.owner >= SHIM);
                let (rest, group) = frames.split_at(shim.map_or(0, |at| at + 1));
                if shim.is_some() || group.iter().any(|(_, named)| named.is_some()) {
                    groups.begin(rest.last().map(|(f, _)| f.frame));
                    extend(groups, group.iter().rev(), layout);
                }
                frames = &rest[..rest.len().saturating_sub(1)];
            }
        }
    }
}

/// A position that is not in the frame's code.
const OUTSIDE: i32 = i32::MIN;

/// Byte offset in the code of a frame's `instr`; -1: not started, [`OUTSIDE`]: elsewhere.
fn position(layout: &Layout, code: u64, instr: u64) -> i32 {
    match layout.instruction_encoding {
        InstructionEncoding::Bytes => instr as i32,
        InstructionEncoding::Units => (instr as i32).saturating_mul(2).max(-1),
        InstructionEncoding::Pointer => {
            let first = code.wrapping_add(layout.code_adaptive.into());
            // one unit before the first instruction (-2) means not started
            i32::try_from(instr.wrapping_sub(first) as i64).map_or(OUTSIDE, |at| at.max(-1))
        }
    }
}

/// Byte offset in its code of the instruction of a frame; -1: none.
pub fn instruction(layout: &Layout, code: u64, instr: u64) -> i32 {
    position(layout, code, instr).max(-1)
}

/// The line of a frame whose code object is known; 0 if it has none, or it is not known.
pub fn line(codes: &CodeTable, id: CodeId, layout: &Layout, code: u64, instr: u64) -> u32 {
    let at = instruction(layout, code, instr);
    codes.get(id).line(at).unwrap_or(0)
}

/// `None` for a frame that CPython does not show either: pushed, but not started.
fn py_frame(pid: Pid, f: &RawPyFrame, layout: &Layout, codes: &mut CodeTable, memory: &dyn Memory) -> Option<PyFrame> {
    let code = match codes.observe(pid, memory, layout, f.code, f.fingerprint) {
        Ok(code) => code,
        Err(why) => return Some(PyFrame::Lost(why)),
    };
    let offset = position(layout, f.code, f.instr);
    // A position outside the code gives no line, but the frame is still valid.
    if offset == OUTSIDE {
        return Some(PyFrame::Code { code, instr: -1 });
    }
    let started = layout.code_firsttraceable == ABSENT || f.owner == GENERATOR;
    (started || offset >= codes.get(code).first_traceable).then_some(PyFrame::Code { code, instr: offset })
}

#[cfg(test)]
mod tests;
