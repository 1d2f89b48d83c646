//! The raw frame chain of a sample to groups of Python frames, one group per native call of the bytecode loop.

use super::code::CodeTable;
use crate::arch::Regs;
use crate::layout::{Anchor, Layout, NONE, Position};
use crate::process::memory::Memory;
use crate::sample::{Cut, Groups, Pid, PyFrame, PyRef, PyWalk, Sample};

/// `owner` values from here on are entry frames (Include/internal/pycore_frame.h, v3.12: FRAME_OWNED_BY_CSTACK).
pub(super) const SHIM: u8 = 3;
/// FRAME_OWNED_BY_GENERATOR
const GENERATOR: u8 = 1;

/// A thread's Python frames in its last sample, and what they were found to be: deep stacks change at their inner end
/// only. Outermost first, so that what stays the same stays in place.
#[derive(Default)]
pub struct Last {
    pid: Pid,
    /// Of the code table.
    generation: u64,
    layout: Option<Layout>,
    frames: Vec<(PyRef, Option<PyFrame>)>,
}

impl Last {
    /// Bytes on the heap.
    pub fn bytes(&self) -> usize {
        size_of::<(PyRef, Option<PyFrame>)>() * self.frames.capacity()
    }

    /// Frames at the outer end of a sample that are the same, code objects included, as they were in the last one.
    fn same(&self, sample: &Sample, layout: &Layout, codes: &CodeTable) -> usize {
        if (self.pid, self.generation) != (sample.pid, codes.generation()) || self.layout.as_ref() != Some(layout) {
            return 0;
        }
        // A code object that could not be had is asked for again.
        let known = |named: &Option<PyFrame>| !matches!(named, Some(PyFrame::Lost(_)));
        let pairs = self.frames.iter().zip(sample.python.iter().rev());
        pairs.take_while(|((f, named), new)| f == *new && known(named)).count()
    }

    /// Makes this sample the last one.
    fn take(&mut self, sample: &Sample, layout: &Layout, codes: &mut CodeTable, memory: &dyn Memory) {
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

/// The Python frames of a sample in groups, in place of what is in `groups`; `last` is of the same thread. Reads code
/// objects that are new.
pub fn groups(
    sample: &Sample,
    layout: &Layout,
    codes: &mut CodeTable,
    memory: &dyn Memory,
    last: &mut Last,
    groups: &mut Groups,
) {
    groups.clear();
    last.take(sample, layout, codes, memory);
    in_chain_order(sample, &sample.marks, layout, &last.frames, groups);
    // The chains of several thread states (subinterpreters) come one after the other; the stack tells their order.
    let list = &mut groups.list;
    if !list.is_sorted_by_key(|g| g.anchor) && list.iter().all(|g| g.anchor.is_some()) {
        list.sort_by_key(|g| g.anchor);
    }
}

/// Why the chain of Python frames is incomplete. `in_greenlet`: the native stack ends where a greenlet begins, and calls
/// of the bytecode loop without Python frames would be noticed; or nothing is known of native stacks, but that some may.
pub fn cut(sample: &Sample, layout: Option<&Layout>, in_greenlet: bool) -> Option<Cut> {
    match sample.walk {
        PyWalk::NoPython | PyWalk::Complete => None,
        // Where every chain ends at the thread state's base frame (3.15), that of a greenlet ends with the entry frame
        // of its first call, which has no frame before it (TPythonState.cpp, v3.5).
        PyWalk::Fault
            if in_greenlet
                && layout.is_some_and(|l| l.tstate_base_frame != NONE)
                && sample.python.last().is_some_and(|f| f.owner >= SHIM) =>
        {
            None
        }
        PyWalk::Fault => Some(Cut::PythonFault),
        PyWalk::TooDeep => Some(Cut::PythonTooDeep),
    }
}

/// Makes the groups of a greenlet's stack again, if they were made of a mark too many. greenlet puts a CFrame of its own,
/// which no call of the bytecode loop uses, into the frame of its outermost function (`g_initialstub`,
/// TUserGreenlet.cpp, v3.0); `begin` is that frame's stack interval. Where each CFrame stands for one Python frame, it
/// would be counted as the outermost one's.
pub fn begin_in(sample: &Sample, layout: &Layout, last: &Last, (sp, cfa): (u64, u64), groups: &mut Groups) {
    if let Some((own, marks)) = sample.marks.split_last()
        && layout.anchor == Anchor::CFramePerFrame
        && (sp..cfa).contains(&own.frame)
    {
        groups.clear();
        in_chain_order(sample, marks, layout, &last.frames, groups);
    }
}

/// Addresses of the frames that [`groups`] shows, in the order of the chain.
pub fn shown(sample: &Sample, layout: &Layout, codes: &mut CodeTable, memory: &dyn Memory) -> Vec<u64> {
    let frames = sample.python.iter().filter(|f| f.owner < SHIM);
    frames
        .filter(|f| py_frame(sample.pid, f, layout, codes, memory).is_some())
        .map(|f| f.frame)
        .collect()
}

/// Reads the code objects of a sample that are new, and nothing else; `last` is of the same thread.
pub fn see_codes(sample: &Sample, layout: &Layout, codes: &mut CodeTable, memory: &dyn Memory, last: Option<&Last>) {
    let same = last.map_or(0, |last| last.same(sample, layout, codes));
    let new = &sample.python[..sample.python.len() - same];
    for f in new.iter().filter(|f| f.owner < SHIM) {
        let _ = codes.see(sample.pid, memory, layout, f.code, f.fingerprint); // the merge will say what is missing
    }
}

/// `known`: the sample's frames and what they are, outermost first; `marks`: those of its marks that are the loop's.
fn in_chain_order(
    sample: &Sample,
    marks: &[PyRef],
    layout: &Layout,
    known: &[(PyRef, Option<PyFrame>)],
    groups: &mut Groups,
) {
    match layout.anchor {
        Anchor::EvalRange => {
            for (_, named) in known.iter().rev() {
                groups.begin(None);
                groups.extend(*named);
            }
        }
        Anchor::CFramePerFrame => {
            // The frame is linked a moment after its CFrame and unlinked a moment before it: count from the outermost.
            let extra = marks.len().saturating_sub(sample.python.len());
            // A call about to return has unlinked its CFrame and not yet its frame: it is the innermost native frame.
            let early = sample.python.len().saturating_sub(marks.len());
            let mut marks = marks.iter().map(|m| m.frame);
            for m in marks.by_ref().take(extra) {
                groups.begin(Some(m));
            }
            for (i, (_, named)) in known.iter().rev().enumerate() {
                let anchor = if i < early {
                    sample.regs.as_ref().map(Regs::sp)
                } else {
                    marks.next()
                };
                groups.begin(anchor);
                groups.extend(*named);
            }
        }
        Anchor::CFramePerEntry => {
            let mut frames = known.iter().rev().peekable();
            for (i, mark) in marks.iter().enumerate() {
                groups.begin(Some(mark.frame));
                // A CFrame just made or about to go still shows its caller's frame: that call runs no Python.
                let outer = marks.get(i + 1).map(|outer| outer.instr);
                if outer != Some(mark.instr) && frames.peek().is_some_and(|(f, _)| f.frame == mark.instr) {
                    // The frame of a call that has just begun may not be marked as its first yet.
                    while let Some((f, named)) = frames.next_if(|(f, _)| Some(f.frame) != outer) {
                        groups.extend(*named);
                        if f.entry {
                            break;
                        }
                    }
                }
            }
            let mut rest = frames.filter_map(|(_, named)| *named);
            if let Some(first) = rest.next() {
                groups.begin(None);
                groups.extend([first]);
                groups.extend(rest);
            }
        }
        Anchor::Shim => {
            // A group's frames come before its mark.
            let mut frames = known;
            while !frames.is_empty() {
                let shim = frames.iter().rposition(|(f, _)| f.owner >= SHIM);
                let (rest, group) = frames.split_at(shim.map_or(0, |at| at + 1));
                let mut group = group.iter().rev().filter_map(|(_, named)| *named).peekable();
                if shim.is_some() || group.peek().is_some() {
                    groups.begin(rest.last().map(|(f, _)| f.frame));
                    groups.extend(group);
                }
                frames = &rest[..rest.len().saturating_sub(1)];
            }
        }
    }
}

/// Stands for a position that is not in the frame's code.
const OUTSIDE: i32 = i32::MIN;

/// `None` for a frame that CPython itself does not show: pushed, but not started.
fn py_frame(pid: Pid, f: &PyRef, layout: &Layout, codes: &mut CodeTable, memory: &dyn Memory) -> Option<PyFrame> {
    let code = match codes.see(pid, memory, layout, f.code, f.fingerprint) {
        Ok(code) => code,
        Err(why) => return Some(PyFrame::Lost(why)),
    };
    let offset = match layout.position {
        Position::Bytes => f.instr as i32,
        Position::Units => (f.instr as i32).saturating_mul(2).max(-1),
        Position::Pointer => {
            let first = f.code.wrapping_add(layout.code_adaptive.into());
            // one unit before the first instruction (-2) means not started
            i32::try_from(f.instr.wrapping_sub(first) as i64).map_or(OUTSIDE, |at| at.max(-1))
        }
    };
    // A position outside the code says nothing of the line, and nothing against the frame.
    if offset == OUTSIDE {
        return Some(PyFrame::Code { code, instr: -1 });
    }
    let started = layout.code_firsttraceable == NONE || f.owner == GENERATOR;
    (started || offset >= codes.get(code).first_traceable).then_some(PyFrame::Code { code, instr: offset })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interp::tables;
    use crate::process::memory::Nothing;
    use crate::sample::CodeId;

    /// Frames as (address, is_entry), CFrames as (address, frame), both innermost first; groups as (anchor, frames).
    fn check(frames: &[(u64, bool)], cframes: &[(u64, u64)], expected: &[(Option<u64>, usize)]) {
        let (_, layout) = tables::ROWS.iter().find(|(v, _)| *v == (3, 11)).expect("a row");
        let python = frames.iter().map(|(frame, entry)| PyRef {
            frame: *frame,
            entry: *entry,
            ..PyRef::default()
        });
        let marks = cframes.iter().map(|(frame, instr)| PyRef {
            frame: *frame,
            instr: *instr,
            ..PyRef::default()
        });
        let sample = Sample {
            python: python.collect(),
            marks: marks.collect(),
            ..Sample::default()
        };
        let mut got = Groups::default();
        let (codes, last) = (&mut CodeTable::default(), &mut Last::default());
        groups(&sample, layout, codes, &Nothing, last, &mut got);
        let got: Vec<_> = got.list.iter().map(|g| (g.anchor, got.frames(g).len())).collect();
        assert_eq!(got, expected, "{frames:x?} {cframes:x?}");
    }

    #[test]
    fn what_is_the_same_as_last_time() {
        let (_, layout) = tables::ROWS.iter().find(|(v, _)| *v == (3, 11)).expect("a row");
        let (_, other) = tables::ROWS.iter().find(|(v, _)| *v == (3, 12)).expect("a row");
        let frame = |frame| PyRef {
            frame,
            code: 10 * frame,
            fingerprint: 7,
            ..PyRef::default()
        };
        let named = Some(PyFrame::Code {
            code: CodeId(0),
            instr: 0,
        });
        // outermost first
        let last = |lost: u64| Last {
            pid: 1,
            generation: 0,
            layout: Some(*layout),
            frames: (1..=4)
                .map(|n| {
                    (
                        frame(n),
                        if n == lost {
                            Some(PyFrame::Lost(Cut::CodeGone))
                        } else {
                            named
                        },
                    )
                })
                .collect(),
        };
        let check = |expected: usize, lost: u64, layout: &Layout, codes: &CodeTable, change: &dyn Fn(&mut Sample)| {
            let mut sample = Sample {
                pid: 1,
                python: (1..=4).rev().map(frame).collect(),
                ..Sample::default()
            };
            change(&mut sample);
            assert_eq!(last(lost).same(&sample, layout, codes), expected);
        };
        let codes = &mut CodeTable::default();
        check(4, 0, layout, codes, &|_| {});
        check(4, 0, layout, codes, &|s| s.python.insert(0, frame(5)));
        check(2, 0, layout, codes, &|s| drop(s.python.drain(..2)));
        check(0, 0, layout, codes, &|s| s.python.clear());
        // the same place, another code object
        check(2, 0, layout, codes, &|s| s.python[1].fingerprint = 8);
        check(2, 0, layout, codes, &|s| s.python[1].instr = 2);
        check(1, 2, layout, codes, &|_| {});
        check(0, 0, layout, codes, &|s| s.pid = 2);
        check(0, 0, other, codes, &|_| {});
        codes.forget(1); // it runs another program
        check(0, 0, layout, codes, &|_| {});
    }

    #[test]
    fn greenlets_add_a_cframe_of_their_own() {
        let (_, layout) = tables::ROWS.iter().find(|(v, _)| *v == (3, 10)).expect("a row");
        let at = |frame| PyRef {
            frame,
            ..PyRef::default()
        };
        let sample = Sample {
            python: vec![at(2), at(1)],
            marks: vec![at(0x70), at(0x80), at(0x90)],
            ..Sample::default()
        };
        let (codes, last) = (&mut CodeTable::default(), &mut Last::default());
        let mut got = Groups::default();
        groups(&sample, layout, codes, &Nothing, last, &mut got);
        let anchors = |got: &Groups| got.list.iter().map(|g| g.anchor).collect::<Vec<_>>();
        assert_eq!(anchors(&got), [Some(0x70), Some(0x80), Some(0x90)], "one just made");
        begin_in(&sample, layout, last, (0xa0, 0xb0), &mut got);
        assert_eq!(anchors(&got), [Some(0x70), Some(0x80), Some(0x90)]);
        begin_in(&sample, layout, last, (0x88, 0xb0), &mut got);
        assert_eq!(anchors(&got), [Some(0x70), Some(0x80)]);
        assert!(got.list.iter().all(|g| got.frames(g).len() == 1));
    }

    #[test]
    fn chains_of_greenlets_end_without_the_base_frame() {
        let (_, layout) = tables::ROWS.iter().find(|(v, _)| *v == (3, 15)).expect("a row");
        let (_, before) = tables::ROWS.iter().find(|(v, _)| *v == (3, 14)).expect("a row");
        let sample = |owner| Sample {
            python: vec![PyRef {
                frame: 1,
                owner,
                ..PyRef::default()
            }],
            walk: PyWalk::Fault,
            ..Sample::default()
        };
        let fault = Some(Cut::PythonFault);
        assert_eq!(cut(&sample(SHIM), Some(layout), true), None);
        assert_eq!(cut(&sample(SHIM), Some(layout), false), fault, "no greenlet");
        assert_eq!(cut(&sample(0), Some(layout), true), fault, "amid the frames of a call");
        assert_eq!(cut(&sample(SHIM), Some(before), true), fault, "no base frame");
        assert_eq!(cut(&sample(SHIM), None, true), fault);
    }

    #[test]
    fn groups_of_cframes() {
        let (yes, no) = (true, false);
        check(&[], &[], &[]);
        check(&[(3, no), (2, yes)], &[(0x80, 3)], &[(Some(0x80), 2)]);
        check(
            &[(3, yes), (2, no), (1, yes)],
            &[(0x70, 3), (0x80, 2)],
            &[(Some(0x70), 1), (Some(0x80), 2)],
        );
        // just made, or about to go: it shows its caller's frame
        check(
            &[(2, no), (1, yes)],
            &[(0x70, 2), (0x80, 2)],
            &[(Some(0x70), 0), (Some(0x80), 2)],
        );
        // its frame is linked and not marked as the first one yet
        check(
            &[(3, no), (2, no), (1, yes)],
            &[(0x70, 3), (0x80, 2)],
            &[(Some(0x70), 1), (Some(0x80), 2)],
        );
    }
}
