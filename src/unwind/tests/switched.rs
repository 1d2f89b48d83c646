//! Stacks that are not entirely the thread's own: greenlets, contexts, and what a scan must not make of them.

use super::*;
use crate::frame::Origin;

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
        ..Landmarks::default()
    }
}

/// Unwinds from `ip` over these words; returns the frames' return addresses (of the innermost: its instruction) and
/// methods.
fn walk(
    landmarks: Landmarks,
    ip: u64,
    words: &[u64],
    (anchors, loops): (&[u64], Option<usize>),
) -> (Result<(), Truncation>, Vec<(u64, UnwindMethod)>) {
    let mut unwinder = unwinder(file());
    unwinder.add_landmarks(ModuleId(0), landmarks);
    unwinder.set_anchors(anchors.iter().map(|at| STACK + at), loops);
    let mut frames = Vec::new();
    let regs = Regs::from_ip_sp_fp(ip, STACK, 0);
    let end = unwinder.unwind(&Map, &regs, &stack(words), &mut frames);
    let shown = |(i, f): (usize, &NativeFrame)| (f.lookup + u64::from(i > 0), f.method);
    (end, frames.iter().enumerate().map(shown).collect())
}

const GREENLET: UnwindMethod = UnwindMethod::Begins(Origin::Greenlet);

#[test]
fn a_greenlet_begins_at_its_stub() {
    // The words further out belong to another stack: here they would lead to an end.
    let words = [BOOTSTRAP, STUB, OTHER, END];
    let (end, frames) = walk(landmarks(true), EVAL, &words, (&[], Some(1)));
    assert_eq!(end, Ok(()));
    assert_eq!(
        frames,
        [
            (EVAL, UnwindMethod::Cfi),
            (BOOTSTRAP, UnwindMethod::Cfi),
            (STUB, GREENLET)
        ]
    );
    // Its starter runs the same function, before the switch: anchors, or calls of the eval function that are not
    // further in.
    let words = [STUB, OTHER, EVAL, END];
    let complete = [OTHER, STUB, OTHER, EVAL, END];
    for expected in [(&[20][..], Some(1)), (&[], Some(1))] {
        let (end, frames) = walk(landmarks(true), OTHER, &words, expected);
        assert_eq!((end, frames.len()), (Ok(()), complete.len()), "{expected:?}");
        assert!(frames.iter().zip(complete).all(|((at, _), expected)| *at == expected));
    }
}

#[test]
fn a_stub_alone_ends_a_stack_only_in_the_greenlet() {
    let words = [EVAL, STUB, OTHER, EVAL, END];
    let ends = |anchors: &[u64], loops| {
        let (end, frames) = walk(landmarks(false), OTHER, &words, (anchors, loops));
        assert_eq!(end, Ok(()));
        frames.last().map(|(_, method)| *method)
    };
    assert_eq!(ends(&[8], Some(1)), Some(GREENLET), "the only mark lies further in");
    assert_eq!(ends(&[8, 16], Some(2)), Some(GREENLET), "one of the stub's own");
    assert_eq!(
        ends(&[8, 32], Some(2)),
        Some(UnwindMethod::StackEnd),
        "another lies outward"
    );
    assert_eq!(
        ends(&[], Some(1)),
        Some(GREENLET),
        "all calls of the loop are further in"
    );
    assert_eq!(ends(&[], Some(2)), Some(UnwindMethod::StackEnd), "one is not");
    assert_eq!(ends(&[], None), Some(GREENLET), "nothing is known");
}

#[test]
fn the_exchange_of_stacks_is_no_part_of_any() {
    let words = [SWITCH, OTHER, END];
    let (end, frames) = walk(landmarks(true), OTHER, &words, (&[], None));
    assert_eq!(end, Err(Truncation::GreenletSwitch));
    assert_eq!(frames, [(OTHER, UnwindMethod::Cfi), (SWITCH, UnwindMethod::Failed)]);
}

#[test]
fn what_returns_to_code_that_calls_nothing_is_first() {
    let words = [EVAL, FIRST, OTHER, END];
    let (end, frames) = walk(landmarks(true), OTHER, &words, (&[], None));
    assert_eq!(end, Ok(()));
    assert_eq!(
        frames,
        [
            (OTHER, UnwindMethod::Cfi),
            (EVAL, UnwindMethod::Begins(Origin::Context))
        ]
    );
    // The code itself.
    let (end, frames) = walk(landmarks(true), FIRST + 4, &words, (&[], None));
    assert_eq!(
        (end, frames),
        (Ok(()), vec![(FIRST + 4, UnwindMethod::Begins(Origin::Context))])
    );
}

#[test]
fn foreign_stacks_are_not_searched() {
    // 0x1140: no table, and no call before it. The words after it would satisfy a scan.
    let hand = BIAS + 0x1140;
    let (end, frames) = walk(Landmarks::default(), OTHER, &[EVAL, hand, OTHER, END], (&[], None));
    assert_eq!(end, Err(Truncation::ForeignStack));
    assert_eq!(frames, [(OTHER, UnwindMethod::Cfi), (EVAL, UnwindMethod::Failed)]);
}

#[test]
fn a_zero_ends_a_stack_only_after_calls() {
    // 0x10d0: a table, and no call before it.
    for (ra, expected) in [(EVAL, Ok(())), (BIAS + 0x10d0, Err(Truncation::ForeignStack))] {
        let (end, _) = walk(Landmarks::default(), OTHER, &[ra, 0], (&[], None));
        assert_eq!(end, expected, "{ra:#x}");
    }
}

#[test]
fn no_search_where_tables_lead_out_of_code() {
    let (end, frames) = walk(Landmarks::default(), OTHER, &[EVAL, 0x1234, OTHER, END], (&[], None));
    assert_eq!(end, Err(Truncation::ReturnAddressNotInCode));
    assert_eq!(frames, [(OTHER, UnwindMethod::Cfi), (EVAL, UnwindMethod::Failed)]);
    // In the interrupted function, the table of hand-written code may be wrong.
    let (end, frames) = walk(Landmarks::default(), OTHER, &[0x1234, EVAL, END], (&[], None));
    assert_eq!(end, Ok(()));
    assert_eq!(
        frames,
        [
            (OTHER, UnwindMethod::StackScan),
            (EVAL, UnwindMethod::Cfi),
            (END, UnwindMethod::StackEnd)
        ]
    );
}

#[test]
fn a_zero_ends_a_search_only_at_the_end_of_the_stack() {
    let mut words = vec![0x1234, EVAL, 0];
    let near = walk(Landmarks::default(), OTHER, &words, (&[], None));
    assert_eq!(
        near,
        (
            Ok(()),
            vec![(OTHER, UnwindMethod::StackScan), (EVAL, UnwindMethod::StackEnd)]
        )
    );
    words.resize(100, 0);
    let (end, _) = walk(Landmarks::default(), OTHER, &words, (&[], None));
    assert_eq!(end, Err(Truncation::ReturnAddressNotInCode));
}
