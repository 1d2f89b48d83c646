#![no_main]
//! Whatever the two sides are, nothing is left out and the order is kept.

use libfuzzer_sys::fuzz_target;
use nativeprof::interleave::{InterleaveInput, interleave, python_only};
use nativeprof::frame::{CodeId, UnwindMethod, ModuleId, NativeFrame, RawFrame};
use nativeprof::truncation::Truncation;
use nativeprof::frame::{EvalGroup, EvalGroups, PyFrame};
use nativeprof_fuzz::Bytes;

fuzz_target!(|data: &[u8]| {
    let mut b = Bytes(data);
    let flags = b.u8();
    let truncation = |bit: u8, why| (flags >> bit & 1 == 1).then_some(why);
    let (natives, groups) = (b.u8(), b.u8());
    let mut evals = Vec::new();
    let native: Vec<NativeFrame> = (0..natives)
        .map(|i| {
            let (kind, sp) = (b.u8(), u64::from(b.u8()));
            evals.push(kind & 1 == 1);
            NativeFrame {
                lookup: i.into(),
                sp,
                cfa: sp + u64::from(kind >> 3),
                location: (kind & 2 == 0).then_some((ModuleId(0), i.into())),
                method: if kind & 4 == 0 { UnwindMethod::Cfi } else { UnwindMethod::InstructionAnalysis },
            }
        })
        .collect();
    let mut ids = 0..;
    let count = groups;
    let mut groups = EvalGroups::default();
    for _ in 0..count {
        let (kind, anchor) = (b.u8(), u64::from(b.u8()));
        let frame = |i| {
            if kind >> 5 == i {
                PyFrame::Lost(Truncation::CodeObjectFreed)
            } else {
                PyFrame::Code {
                    code: CodeId(ids.next().expect("endless")),
                    instr: 0,
                }
            }
        };
        groups.begin((kind & 3 != 0 || flags & 8 != 0).then_some(anchor));
        groups.extend((0..kind >> 2 & 3).map(frame));
    }
    let is_eval = |f: &NativeFrame| (flags & 4 == 0).then(|| evals[f.lookup as usize]);
    let input = InterleaveInput {
        pid: 1,
        native: &native,
        native_truncation: truncation(0, Truncation::StackTooDeep),
        groups: &groups,
        python_truncation: truncation(1, Truncation::PythonFault),
        attached: flags >> 4 & 1 == 0,
        is_eval: &is_eval,
    };
    let mut out = vec![RawFrame::Process(1)];
    interleave(&input, &mut out);
    assert_eq!(out.remove(0), RawFrame::Process(1));
    out.reverse();

    let of_python = |f: &RawFrame| matches!(f, RawFrame::Python { .. } | RawFrame::Truncated(Truncation::CodeObjectFreed));
    let python: Vec<RawFrame> = out.iter().copied().filter(of_python).collect();
    let expected = groups.list.iter().flat_map(|g| groups.frames(g)).map(|f| match *f {
        PyFrame::Code { code, instr } => RawFrame::Python { code, instr },
        PyFrame::Lost(why) => RawFrame::Truncated(why),
    });
    assert!(expected.eq(python.iter().copied()), "Python frames");
    let mut alone = Vec::new();
    python_only(&groups, None, &mut alone);
    alone.reverse();
    assert_eq!(alone, python);

    // A native frame is missing only where Python frames represent it.
    let mut rest = out.iter().filter_map(|f| match f {
        RawFrame::Native { svma, .. } => Some(*svma),
        RawFrame::Anonymous { avma, .. } => Some(*avma),
        _ => None,
    });
    let mut there = rest.next();
    let mut replaced = 0;
    for f in &native {
        if there == Some(f.lookup) {
            there = rest.next();
            continue;
        }
        let holds = |g: &EvalGroup| !groups.frames(g).is_empty() && g.anchor.is_some_and(|a| f.sp <= a && a < f.cfa);
        assert!(
            is_eval(f) == Some(true) || groups.list.iter().any(holds),
            "native frame {}",
            f.lookup
        );
        replaced += 1;
    }
    assert_eq!(there, None, "native frames out of order");
    assert!(replaced <= groups.list.iter().filter(|g| !groups.frames(g).is_empty()).count());
});
