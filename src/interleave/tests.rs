use super::*;
use crate::frame::{CodeId, ModuleId, Origin};

const EVAL: u64 = 0xe;

/// A native stack, innermost first: `e` is the eval function, other letters are functions; frame i lies in `[100 i,
/// 100 i + 100)`. `!` at the end: truncated; `~`: the last frame was found by code analysis; `.`: a greenlet begins
/// there.
fn stack(text: &str) -> (Vec<NativeFrame>, Option<Truncation>) {
    let mut frames: Vec<NativeFrame> = Vec::new();
    let mut truncation = None;
    for c in text.chars() {
        match c {
            '!' => truncation = Some(Truncation::StackTooDeep),
            '~' => frames.last_mut().expect("a frame").method = UnwindMethod::InstructionAnalysis,
            '.' => frames.last_mut().expect("a frame").method = UnwindMethod::Begins(Origin::Greenlet),
            c => {
                let sp = 100 * frames.len() as u64;
                let svma = if c == 'e' { EVAL } else { u64::from(u32::from(c)) };
                let location = Some((ModuleId(0), svma));
                frames.push(NativeFrame {
                    lookup: svma,
                    sp,
                    cfa: sp + 100,
                    location,
                    method: UnwindMethod::Cfi,
                });
            }
        }
    }
    (frames, truncation)
}

/// Groups as `1,2@250 3@450`: Python frames and the address of the anchor; without `@` no anchor. `c4`: a frame that looks
/// like one of compiled Python.
fn groups(text: &str) -> EvalGroups {
    let mut groups = EvalGroups::default();
    for g in text.split_whitespace() {
        let (frames, anchor) = g.split_once('@').unwrap_or((g, ""));
        let frames = frames.split(',').filter(|f| !f.is_empty());
        let frame = |f: &str| match f {
            "gone" => PyFrame::Lost(Truncation::CodeObjectFreed),
            n => PyFrame::Code {
                code: CodeId(n.parse().expect("number")),
                instr: 0,
            },
        };
        groups.begin(anchor.parse().ok());
        for f in frames {
            match f.strip_prefix('c') {
                Some(f) => groups.extend_compiled(Some(frame(f))),
                None => groups.extend([frame(f)]),
            }
        }
    }
    groups
}

#[track_caller]
fn check(native: &str, python: &str, expected: &str, quality: StackQuality) {
    check_thread(native, python, true, expected, quality);
}

#[track_caller]
fn check_thread(native: &str, python: &str, attached: bool, expected: &str, quality: StackQuality) {
    let ((native, native_truncation), groups) = (stack(native), groups(python));
    let is_eval = |f: &NativeFrame| Some(f.lookup == EVAL);
    let input = InterleaveInput {
        pid: 1,
        native: &native,
        native_truncation,
        groups: &groups,
        python_truncation: None,
        attached,
        is_eval: &is_eval,
    };
    let mut out = Vec::new();
    let got_quality = interleave(&input, &mut out);
    let word = |f: &RawFrame| match f {
        RawFrame::Python { code, .. } => code.0.to_string(),
        RawFrame::Native { svma: EVAL, .. } => "e".into(),
        RawFrame::Native { svma, .. } => char::from_u32(*svma as u32).expect("letter").to_string(),
        RawFrame::Truncated(c) => format!("[{}]", c.reason()),
        RawFrame::Origin(o) => o.name().into(),
        other => format!("{other:?}"),
    };
    let got: Vec<_> = out.iter().map(word).collect();
    assert_eq!((got.join(" ").as_str(), got_quality), (expected, quality));
}

#[test]
fn by_address() {
    use StackQuality::*;
    check("abecd", "1@250", "d c 1 b a", Exact);
    check("ebec", "1,2@50 3@299", "c 3 b 2 1", Exact);
    // no name needed: a frame not known to be the eval function
    check("axbc", "1@150", "c b 1 a", Exact);
    // entering or leaving a call: one more eval frame at the leaf
    check("eec", "1@150", "c 1 e", Exact);
    check("eec", "@50 1@150", "c 1 e", Exact);
    check("ab~ec", "1@250", "c 1 b a", Repaired);
    // native part only
    check("abc", "", "c b a", Exact);
    check("", "", "", Exact);
}

#[test]
fn frames_of_other_interpreters_are_missed() {
    use StackQuality::*;
    let (mismatch, unknown) = (Truncation::InterleaveMismatch, Truncation::PythonUnknown);
    let detached = |native, python, expected: &str, why: Truncation| {
        let expected = expected.replace('!', &format!("[{}]", why.reason()));
        check_thread(native, python, false, &expected, Partial(why));
    };
    // A thread that does not run the interpreter whose frames are known, and is in no call that begins or ends.
    detached("abec", "", "c e ! b a", unknown);
    detached("ebec", "1@250", "c 1 b e !", mismatch);
    detached("abebec", "1@450", "c 1 b e ! b a", mismatch);
    detached("abebec", "1", "c 1 b e ! b a", mismatch);
    // It waits in C code that its frames have called.
    check_thread("abec", "1@250", false, "c 1 b a", Exact);
    check_thread("abec", "1", false, "c 1 b a", Exact);
    // By order, what is called after a frame was unlinked is near the leaf.
    check("abebec", "1", "c 1 b e b a", Exact);
    let seam = mismatch.reason();
    check("abcebec", "1", &format!("c 1 b e [{seam}] c b a"), Partial(mismatch));
}

#[test]
fn greenlets_get_their_own_root() {
    use StackQuality::*;
    check("aebs.", "1@150", "[greenlet] s b 1 a", Exact);
    check("a~ebs.", "1@150", "[greenlet] s b 1 a", Repaired);
    // With an anchor in the stub, which runs no Python.
    check("aes.", "1@150 @250", "[greenlet] s 1 a", Exact);
    // By order.
    check("aeebs.", "1 2", "[greenlet] s b 2 1 a", Exact);
    // A frame of another stack.
    let mismatch = Truncation::InterleaveMismatch;
    let seam = mismatch.reason();
    check(
        "aes.",
        "1@150 2@950",
        &format!("[greenlet] 2 [{seam}] s 1 a"),
        Partial(mismatch),
    );
}

#[test]
fn by_order() {
    use StackQuality::*;
    check("aeebec", "1 2 3", "c 3 b 2 1 a", Exact);
    check("eaec", "1", "c 1 a e", Exact);
    check(
        "eaee!",
        "1 2 3",
        "[stack deeper than the copy] 3 2 a 1",
        Partial(Truncation::StackTooDeep),
    );
}

#[test]
fn compiled_python_is_left_out_unless_its_place_is_certain() {
    let why = Truncation::CompiledPython.reason();
    let partial = StackQuality::Partial(Truncation::CompiledPython);
    // Called by the interpreted frame 2, in a, b or both.
    check("abec", "c1,2@250", &format!("c 2 [{why}] b a"), partial);
    check("abec", "c4,c1,2@250", &format!("c 2 [{why}] b a"), partial);
    // In between two calls of the interpreter, and outside of all.
    check("aebec", "1@150 c2,3@350", &format!("c 3 [{why}] b 1 a"), partial);
    check("aebc", "1@150 c2", &format!("c b [{why}] 1 a"), partial);
    check("abc", "c1,c2", &format!("[{why}] c b a"), partial);
    // No native function that they could belong to: it only looks so.
    check("ebc", "c1,2@50", "c b 2 1", StackQuality::Exact);
    check("aeec", "1@150 c2,3@250", "c 3 2 1 a", StackQuality::Exact);
    check("aebc", "c1@150", "c b 1 a", StackQuality::Exact);
    // By order.
    check("aebec", "1 c2 3", &format!("c 3 [{why}] b 1 a"), partial);
    check("abec", "c1 2", &format!("c 2 [{why}] b a"), partial);
    check("aebc", "1 c2 c3", &format!("c b [{why}] 1 a"), partial);
    check("abc", "c1", &format!("[{why}] c b a"), partial);
    // It has just begun.
    check("eec", "c1 2", "c 2 1", StackQuality::Exact);
    let mismatch = Truncation::InterleaveMismatch;
    check(
        "aebec",
        "1 2 c3 c4 5",
        &format!("c 5 b 4 a 3 2 1 [{}]", mismatch.reason()),
        StackQuality::Partial(mismatch),
    );
}

#[test]
fn mismatches_keep_both_sides() {
    let truncation = StackQuality::Partial(Truncation::StackTooDeep);
    check(
        "aeb!",
        "1@150 2@950",
        "2 [stack deeper than the copy] b 1 a",
        truncation,
    );
    check("aeb!", "1@150", "[stack deeper than the copy] b 1 a", truncation);
    let mismatch = StackQuality::Partial(Truncation::InterleaveMismatch);
    let seam = Truncation::InterleaveMismatch.reason();
    check("aeb", "1@150 2@950", &format!("2 [{seam}] b 1 a"), mismatch);
    check("aebc", "1 2", &format!("c b 2 a 1 [{seam}]"), mismatch);
    // Python frames missing for an eval frame further out, or for all of them
    check("aebec", "1@150", &format!("c e [{seam}] b 1 a"), mismatch);
    check("eebec", "1@350", &format!("c 1 b e [{seam}] e"), mismatch);
    let unknown = Truncation::PythonUnknown;
    check(
        "aeb",
        "",
        &format!("b e [{}] a", unknown.reason()),
        StackQuality::Partial(unknown),
    );
    check("eab", "", "b a e", StackQuality::Exact);
    check(
        "aeb",
        "gone@150",
        "b [code object freed] a",
        StackQuality::Partial(Truncation::CodeObjectFreed),
    );
    check(
        "aebec",
        "1,gone,gone,gone@150 2,gone,gone@350",
        "c [code object freed] 2 b [code object freed] 1 a",
        StackQuality::Partial(Truncation::CodeObjectFreed),
    );
}
