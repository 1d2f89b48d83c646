//! Frames as samples have them, and the groups that they make.

use super::*;
use crate::cpython::versions;
use crate::frame::CodeId;
use crate::process::memory::NoMemory;

/// Frames as (address, is_entry), CFrames as (address, frame), both innermost first; groups as (anchor, frames).
fn check(frames: &[(u64, bool)], cframes: &[(u64, u64)], expected: &[(Option<u64>, usize)]) {
    let layout = &versions::find((3, 11, 0)).expect("a row").layout;
    let python = frames.iter().map(|(frame, entry)| RawPyFrame {
        frame: *frame,
        entry: *entry,
        ..RawPyFrame::default()
    });
    let anchors = cframes.iter().map(|(frame, instr)| RawPyFrame {
        frame: *frame,
        instr: *instr,
        ..RawPyFrame::default()
    });
    let sample = Sample {
        python: python.collect(),
        anchors: anchors.collect(),
        ..Sample::default()
    };
    let mut got = EvalGroups::default();
    let (codes, last) = (&mut CodeTable::default(), &mut LastFrames::default());
    groups(&sample, layout, codes, &NoMemory, last, &mut got);
    let got: Vec<_> = got.list.iter().map(|g| (g.anchor, got.frames(g).len())).collect();
    assert_eq!(got, expected, "{frames:x?} {cframes:x?}");
}

#[test]
fn frames_unchanged_since_the_last_sample() {
    let layout = &versions::find((3, 11, 0)).expect("a row").layout;
    let other = &versions::find((3, 12, 0)).expect("a row").layout;
    let frame = |frame| RawPyFrame {
        frame,
        code: 10 * frame,
        fingerprint: 7,
        ..RawPyFrame::default()
    };
    let named = Some(PyFrame::Code {
        code: CodeId(0),
        instr: 0,
    });
    // outermost first
    let last = |lost: u64| LastFrames {
        pid: 1,
        generation: 0,
        layout: Some(*layout),
        frames: (1..=4)
            .map(|n| {
                (
                    frame(n),
                    if n == lost {
                        Some(PyFrame::Lost(Truncation::CodeObjectFreed))
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
    // the same address, another code object
    check(2, 0, layout, codes, &|s| s.python[1].fingerprint = 8);
    check(2, 0, layout, codes, &|s| s.python[1].instr = 2);
    check(1, 2, layout, codes, &|_| {});
    check(0, 0, layout, codes, &|s| s.pid = 2);
    check(0, 0, other, codes, &|_| {});
    codes.remove_process(1); // it executes another program
    check(0, 0, layout, codes, &|_| {});
}

#[test]
fn the_cframe_that_greenlet_adds_is_left_out() {
    let layout = &versions::find((3, 10, 0)).expect("a row").layout;
    let at = |frame| RawPyFrame {
        frame,
        ..RawPyFrame::default()
    };
    let sample = Sample {
        python: vec![at(2), at(1)],
        anchors: vec![at(0x70), at(0x80), at(0x90)],
        ..Sample::default()
    };
    let (codes, last) = (&mut CodeTable::default(), &mut LastFrames::default());
    let mut got = EvalGroups::default();
    groups(&sample, layout, codes, &NoMemory, last, &mut got);
    let anchors = |got: &EvalGroups| got.list.iter().map(|g| g.anchor).collect::<Vec<_>>();
    assert_eq!(anchors(&got), [Some(0x70), Some(0x80), Some(0x90)], "one just made");
    begin_in(&sample, layout, last, (0xa0, 0xb0), &mut got);
    assert_eq!(anchors(&got), [Some(0x70), Some(0x80), Some(0x90)]);
    begin_in(&sample, layout, last, (0x88, 0xb0), &mut got);
    assert_eq!(anchors(&got), [Some(0x70), Some(0x80)]);
    assert!(got.list.iter().all(|g| got.frames(g).len() == 1));
}

#[test]
fn chains_of_greenlets_end_without_the_base_frame() {
    let layout = &versions::find((3, 15, 0)).expect("a row").layout;
    let before = &versions::find((3, 14, 0)).expect("a row").layout;
    let sample = |owner| Sample {
        python: vec![RawPyFrame {
            frame: 1,
            owner,
            ..RawPyFrame::default()
        }],
        walk: WalkStatus::Fault,
        ..Sample::default()
    };
    let fault = Some(Truncation::PythonFault);
    assert_eq!(truncation(&sample(SHIM), Some(layout), true), None);
    assert_eq!(truncation(&sample(SHIM), Some(layout), false), fault, "no greenlet");
    assert_eq!(
        truncation(&sample(0), Some(layout), true),
        fault,
        "in the middle of a call"
    );
    assert_eq!(truncation(&sample(SHIM), Some(before), true), fault, "no base frame");
    assert_eq!(truncation(&sample(SHIM), None, true), fault);
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
    // just created, or about to be removed: it has its caller's frame
    check(
        &[(2, no), (1, yes)],
        &[(0x70, 2), (0x80, 2)],
        &[(Some(0x70), 0), (Some(0x80), 2)],
    );
    // its frame is linked, but has no entry flag yet
    check(
        &[(3, no), (2, no), (1, yes)],
        &[(0x70, 3), (0x80, 2)],
        &[(Some(0x70), 1), (Some(0x80), 2)],
    );
}

/// Frames as letters for `entry` (e), owner generator (g) or frame object (o) and entry frame (s), with the byte offset of the
/// instruction; anchors as (address, frame); innermost first. Groups as (frames, those of compiled Python).
#[track_caller]
fn check_compiled(minor: u8, frames: &[(&str, i64)], anchors: &[(u64, u64)], expected: &[(usize, usize)]) {
    let layout = &versions::find((3, minor, 0)).expect("a row").layout;
    let python = frames.iter().zip(1..).map(|((kind, at), frame)| {
        let code = 0x1000 * frame;
        let instr = match layout.instruction_encoding {
            InstructionEncoding::Bytes => *at as u64,
            InstructionEncoding::Units => at.div_euclid(2) as u64,
            InstructionEncoding::Pointer => (code + u64::from(layout.code_adaptive)).wrapping_add(*at as u64),
        };
        RawPyFrame {
            frame,
            code,
            instr,
            entry: kind.contains('e'),
            owner: match kind {
                k if k.contains('g') => GENERATOR,
                k if k.contains('o') => FRAME_OBJECT,
                k if k.contains('s') => SHIM,
                _ => 0,
            },
            ..RawPyFrame::default()
        }
    });
    let anchors = anchors.iter().map(|(frame, instr)| RawPyFrame {
        frame: *frame,
        instr: *instr,
        ..RawPyFrame::default()
    });
    let sample = Sample {
        python: python.collect(),
        anchors: anchors.collect(),
        ..Sample::default()
    };
    let mut got = EvalGroups::default();
    let (codes, last) = (&mut CodeTable::default(), &mut LastFrames::default());
    groups(&sample, layout, codes, &NoMemory, last, &mut got);
    let got: Vec<_> = got.list.iter().map(|g| (got.frames(g).len(), g.compiled)).collect();
    assert_eq!(got, expected, "3.{minor}: {frames:?}");
}

#[test]
fn frames_of_compiled_python() {
    // What Nuitka 2.8 to 4.0 pushes: one that never started, in a chain of those that did.
    for minor in [6, 9] {
        check_compiled(minor, &[("", 40), ("", -1), ("", 20)], &[], &[(1, 0), (1, 1), (1, 0)]);
    }
    // It has no CFrame.
    let cframes = [(0x70, 0), (0x80, 0)];
    check_compiled(10, &[("", 40), ("", -1), ("", 20)], &cframes, &[(1, 0), (1, 1), (1, 0)]);
    check_compiled(10, &[("", -1), ("", 20)], &cframes, &[(1, 0), (1, 0)]);
    // From 3.11 on it belongs to a generator and stays at the code's start, where a generator never runs.
    let compiled = ("g", 0);
    check_compiled(11, &[compiled, compiled, ("e", 20)], &[(0x80, 1)], &[(3, 2)]);
    check_compiled(
        11,
        &[("e", 20), compiled, ("e", 20)],
        &[(0x70, 1), (0x80, 2)],
        &[(1, 0), (2, 1)],
    );
    check_compiled(11, &[("e", 20), compiled], &[(0x80, 1)], &[(1, 0), (1, 1)]);
    check_compiled(11, &[("ge", 0), ("e", 20)], &[(0x70, 1), (0x80, 2)], &[(1, 0), (1, 0)]);
    for (minor, at) in [(12, 0), (13, 2), (14, 2)] {
        let compiled = ("g", at);
        check_compiled(minor, &[compiled, ("", 20), ("s", 0)], &[], &[(2, 1)]);
        check_compiled(
            minor,
            &[("", 8), ("s", 0), compiled, ("", 20), ("s", 0)],
            &[],
            &[(1, 0), (2, 1)],
        );
        check_compiled(minor, &[("", 8), ("s", 0), compiled], &[], &[(1, 0), (1, 1)]);
        check_compiled(minor, &[("o", 20), ("", 20), ("s", 0)], &[], &[(2, 1)]);
        // A generator, inlined into the call of its caller.
        check_compiled(minor, &[("g", 8), ("", 20), ("s", 0)], &[], &[(2, 0)]);
    }
}
