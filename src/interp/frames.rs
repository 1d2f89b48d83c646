//! The raw frame chain of a sample to groups of Python frames, one group per native call of the bytecode loop.

use super::code::CodeTable;
use crate::arch::Regs;
use crate::layout::{Anchor, Layout, NONE, Position};
use crate::process::memory::Memory;
use crate::sample::{Groups, Pid, PyFrame, PyRef, Sample};

/// `owner` values from here on are entry frames (Include/internal/pycore_frame.h, v3.12: FRAME_OWNED_BY_CSTACK).
pub(super) const SHIM: u8 = 3;
/// FRAME_OWNED_BY_GENERATOR
const GENERATOR: u8 = 1;

/// The Python frames of a sample in groups, in place of what is in `groups`. Reads code objects that are new.
pub fn groups(sample: &Sample, layout: &Layout, codes: &mut CodeTable, memory: &dyn Memory, groups: &mut Groups) {
    groups.clear();
    in_chain_order(sample, layout, codes, memory, groups);
    // The chains of several thread states (subinterpreters) come one after the other; the stack tells their order.
    let list = &mut groups.list;
    if !list.is_sorted_by_key(|g| g.anchor) && list.iter().all(|g| g.anchor.is_some()) {
        list.sort_by_key(|g| g.anchor);
    }
}

/// Reads the code objects of a sample that are new, and nothing else.
pub fn see_codes(sample: &Sample, layout: &Layout, codes: &mut CodeTable, memory: &dyn Memory) {
    for f in sample.python.iter().filter(|f| f.owner < SHIM) {
        let _ = codes.see(sample.pid, memory, layout, f.code, f.fingerprint); // the merge will say what is missing
    }
}

fn in_chain_order(sample: &Sample, layout: &Layout, codes: &mut CodeTable, memory: &dyn Memory, groups: &mut Groups) {
    let mut name = |f: &PyRef| py_frame(sample.pid, f, layout, codes, memory);
    match layout.anchor {
        Anchor::EvalRange => {
            for f in &sample.python {
                groups.begin(None);
                groups.extend(name(f));
            }
        }
        Anchor::CFramePerFrame => {
            // The frame is linked a moment after its CFrame and unlinked a moment before it: count from the outermost.
            let extra = sample.marks.len().saturating_sub(sample.python.len());
            let mut marks = sample.marks.iter().map(|m| m.frame);
            // A call about to return has unlinked its CFrame and not yet its frame: it is the innermost native frame.
            let early = sample.python.len().saturating_sub(sample.marks.len());
            for m in marks.by_ref().take(extra) {
                groups.begin(Some(m));
            }
            for (i, f) in sample.python.iter().enumerate() {
                let anchor = if i < early {
                    sample.regs.as_ref().map(Regs::sp)
                } else {
                    marks.next()
                };
                groups.begin(anchor);
                groups.extend(name(f));
            }
        }
        Anchor::CFramePerEntry => {
            let mut frames = sample.python.iter().peekable();
            for (i, mark) in sample.marks.iter().enumerate() {
                groups.begin(Some(mark.frame));
                // A CFrame just made or about to go still shows its caller's frame: that call runs no Python.
                let outer = sample.marks.get(i + 1).map(|outer| outer.instr);
                if outer != Some(mark.instr) && frames.peek().is_some_and(|f| f.frame == mark.instr) {
                    // The frame of a call that has just begun may not be marked as its first yet.
                    while let Some(f) = frames.next_if(|f| Some(f.frame) != outer) {
                        groups.extend(name(f));
                        if f.entry {
                            break;
                        }
                    }
                }
            }
            let mut rest = frames.filter_map(name);
            if let Some(first) = rest.next() {
                groups.begin(None);
                groups.extend([first]);
                groups.extend(rest);
            }
        }
        Anchor::Shim => {
            // A group's frames come before its mark.
            let mut frames = sample.python.as_slice();
            while !frames.is_empty() {
                let shim = frames.iter().position(|f| f.owner >= SHIM);
                let (group, rest) = frames.split_at(shim.unwrap_or(frames.len()));
                let mut group = group.iter().filter_map(&mut name).peekable();
                if shim.is_some() || group.peek().is_some() {
                    groups.begin(rest.first().map(|f| f.frame));
                    groups.extend(group);
                }
                frames = rest.get(1..).unwrap_or_default();
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

    struct Nothing;

    impl Memory for Nothing {
        fn read(&self, _: u64, _: &mut [u8]) -> bool {
            false
        }
    }

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
        groups(&sample, layout, &mut CodeTable::default(), &Nothing, &mut got);
        let got: Vec<_> = got.list.iter().map(|g| (g.anchor, got.frames(g).len())).collect();
        assert_eq!(got, expected, "{frames:x?} {cframes:x?}");
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
