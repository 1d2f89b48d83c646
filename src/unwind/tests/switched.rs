//! Stacks that are not the thread's own from end to end: greenlets, contexts, and what a search must not make of them.

use super::*;

/// Code at 0x1000 to 0x1100 whose tables say CFA = rsp + 8; at 0x10f0 the return address is undefined. Calls end at
/// 0x1015, 0x1025, ... 0x1095; nothing is called before 0x10a0.
fn file() -> File {
    let mut code = vec![0x90; 0x200];
    for at in (0x10..0xa0).step_by(0x10) {
        code[at..at + 5].copy_from_slice(&[0xe8, 0, 0, 0, 0]);
    }
    File {
        code,
        eh_frame: table("zR", 0x1000, 0x100, &[0x02, 0xf0, 0x07, 16]),
        ..File::default()
    }
}

const STUB: u64 = BIAS + 0x1015;
const BOOTSTRAP: u64 = BIAS + 0x1025;
const EVAL: u64 = BIAS + 0x1035;
const OTHER: u64 = BIAS + 0x1045;
const SWITCH: u64 = BIAS + 0x1055;
const FIRST: u64 = BIAS + 0x10a0;
const END: u64 = BIAS + 0x10f8;

fn landmarks(bootstrap: bool) -> Landmarks {
    let around = |ra: u64| vec![(ra - BIAS - 5, ra - BIAS + 3)];
    Landmarks {
        eval: around(EVAL),
        stub: around(STUB),
        bootstrap: if bootstrap { around(BOOTSTRAP) } else { vec![] },
        switch: around(SWITCH),
        first: vec![(FIRST - BIAS - 1, FIRST - BIAS + 8)],
    }
}

/// Unwinds from `ip` over these words; the frames' return addresses (that of the innermost: its instruction) and how.
fn walk(
    landmarks: Landmarks,
    ip: u64,
    words: &[u64],
    (marks, loops): (&[u64], Option<usize>),
) -> (Result<(), Cut>, Vec<(u64, How)>) {
    let mut unwinder = unwinder(file());
    unwinder.add_landmarks(ModuleId(0), landmarks);
    unwinder.expect(marks.iter().map(|at| STACK + at), loops);
    let mut frames = Vec::new();
    let regs = Regs::from_ip_sp_fp(ip, STACK, 0);
    let end = unwinder.unwind(&Map, &regs, &stack(words), &mut frames);
    let shown = |(i, f): (usize, &NativeFrame)| (f.lookup + u64::from(i > 0), f.how);
    (end, frames.iter().enumerate().map(shown).collect())
}

const GREENLET: How = How::Begins(Origin::Greenlet);

#[test]
fn a_greenlet_begins_at_its_stub() {
    // What lies outward is another's: here it would lead to an end.
    let words = [BOOTSTRAP, STUB, OTHER, END];
    let (end, frames) = walk(landmarks(true), EVAL, &words, (&[], Some(1)));
    assert_eq!(end, Ok(()));
    assert_eq!(frames, [(EVAL, How::Cfi), (BOOTSTRAP, How::Cfi), (STUB, GREENLET)]);
    // Its starter runs the same function, before the switch: marks, or calls of the loop that are not further in.
    let words = [STUB, OTHER, EVAL, END];
    let whole = [OTHER, STUB, OTHER, EVAL, END];
    for expected in [(&[20][..], Some(1)), (&[], Some(1))] {
        let (end, frames) = walk(landmarks(true), OTHER, &words, expected);
        assert_eq!((end, frames.len()), (Ok(()), whole.len()), "{expected:?}");
        assert!(frames.iter().zip(whole).all(|((at, _), expected)| *at == expected));
    }
}

#[test]
fn a_stub_alone_ends_a_stack_only_in_the_greenlet() {
    let words = [EVAL, STUB, OTHER, EVAL, END];
    let ends = |marks: &[u64], loops| {
        let (end, frames) = walk(landmarks(false), OTHER, &words, (marks, loops));
        assert_eq!(end, Ok(()));
        frames.last().map(|(_, how)| *how)
    };
    assert_eq!(ends(&[8], Some(1)), Some(GREENLET), "the only mark lies further in");
    assert_eq!(ends(&[8, 16], Some(2)), Some(GREENLET), "one of the stub's own");
    assert_eq!(ends(&[8, 32], Some(2)), Some(How::End), "another lies outward");
    assert_eq!(
        ends(&[], Some(1)),
        Some(GREENLET),
        "all calls of the loop are further in"
    );
    assert_eq!(ends(&[], Some(2)), Some(How::End), "one is not");
    assert_eq!(ends(&[], None), Some(GREENLET), "nothing is known");
}

#[test]
fn the_exchange_of_stacks_is_no_part_of_any() {
    let words = [SWITCH, OTHER, END];
    let (end, frames) = walk(landmarks(true), OTHER, &words, (&[], None));
    assert_eq!(end, Err(Cut::GreenletSwitch));
    assert_eq!(frames, [(OTHER, How::Cfi), (SWITCH, How::Lost)]);
}

#[test]
fn what_returns_to_code_that_calls_nothing_is_first() {
    let words = [EVAL, FIRST, OTHER, END];
    let (end, frames) = walk(landmarks(true), OTHER, &words, (&[], None));
    assert_eq!(end, Ok(()));
    assert_eq!(frames, [(OTHER, How::Cfi), (EVAL, How::Begins(Origin::Context))]);
    // The code itself.
    let (end, frames) = walk(landmarks(true), FIRST + 4, &words, (&[], None));
    assert_eq!((end, frames), (Ok(()), vec![(FIRST + 4, How::Begins(Origin::Context))]));
}

#[test]
fn nothing_is_looked_for_beyond_a_stack_that_was_made_by_hand() {
    // 0x1140: no table, and nothing called before. The words behind would do for a search.
    let hand = BIAS + 0x1140;
    let (end, frames) = walk(Landmarks::default(), OTHER, &[EVAL, hand, OTHER, END], (&[], None));
    assert_eq!(end, Err(Cut::OtherStack));
    assert_eq!(frames, [(OTHER, How::Cfi), (EVAL, How::Lost)]);
}

#[test]
fn nothing_is_looked_for_where_tables_lead_out_of_code() {
    let (end, frames) = walk(Landmarks::default(), OTHER, &[EVAL, 0x1234, OTHER, END], (&[], None));
    assert_eq!(end, Err(Cut::NotCode));
    assert_eq!(frames, [(OTHER, How::Cfi), (EVAL, How::Lost)]);
    // In the interrupted function, the table of hand-written code may be wrong.
    let (end, frames) = walk(Landmarks::default(), OTHER, &[0x1234, EVAL, END], (&[], None));
    assert_eq!(end, Ok(()));
    assert_eq!(frames, [(OTHER, How::Scan), (EVAL, How::Cfi), (END, How::End)]);
}

#[test]
fn a_zero_ends_a_search_only_at_the_end_of_the_stack() {
    let mut words = vec![0x1234, EVAL, 0];
    let near = walk(Landmarks::default(), OTHER, &words, (&[], None));
    assert_eq!(near, (Ok(()), vec![(OTHER, How::Scan), (EVAL, How::End)]));
    words.resize(100, 0);
    let (end, _) = walk(Landmarks::default(), OTHER, &words, (&[], None));
    assert_eq!(end, Err(Cut::NotCode));
}
