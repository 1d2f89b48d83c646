//! Stacks of functions that jump into an exception handler: from some point on, what they saved is the handler's.

use super::*;

/// As GCC compiles `_Unwind_RaiseException`: 0x1100 to 0x1190 saves rbp, rax and rdx below CFA = rbp + 16; from 0x1180 on
/// CFA = rcx + 8. Elsewhere CFA = rsp + 8, and at 0x11f0 the return address is undefined. Calls end at 0x1015, 0x1025, ...
/// 0x1055, and in the function at 0x1135 (any), 0x1145 (overwrites what was saved) and 0x1155 (a hook).
fn file() -> File {
    let mut code = vec![0x90; 0x200];
    for at in (0x10..0x60).step_by(0x10).chain([0x130, 0x140, 0x150]) {
        code[at..at + 5].copy_from_slice(&[0xe8, 0, 0, 0, 0]);
    }
    code[0x160..0x162].copy_from_slice(&[0xeb, 0x08]); // jmp 0x116a, over a byte that would end it
    code[0x162] = 0xc3;
    code[0x180..0x184].copy_from_slice(&[0x48, 0x89, 0xcc, 0xc3]); // mov %rcx,%rsp; ret
    let instructions = [
        [0x03, 0x00, 0x01].as_slice(),             // advance to 0x1100
        &[0x0c, 6, 16, 0x86, 2, 0x80, 3, 0x81, 4], // CFA = rbp + 16; rbp at c-16, rax at c-24, rdx at c-32
        &[0x02, 0x80, 0x0c, 2, 8, 0xc6],           // advance to 0x1180; CFA = rcx + 8; rbp restored
        &[0x44, 0x0c, 7, 8, 0xc0, 0xc1],           // advance to 0x1184; CFA = rsp + 8; rax and rdx restored
        &[0x02, 0x6c, 0x07, 16],                   // advance to 0x11f0; return address undefined
    ];
    File {
        code,
        eh_frame: table("zR", 0x1000, 0x200, &instructions.concat()),
        ..File::default()
    }
}

const CALLEE: u64 = BIAS + 0x1010;
const THROWS: u64 = BIAS + 0x1025;
const CATCHES: u64 = BIAS + 0x1035;
const OTHER: u64 = BIAS + 0x1045;
const LANDING: u64 = BIAS + 0x1060;
const END: u64 = BIAS + 0x11f8;

fn walk(regs: &Regs, words: &[u64]) -> Vec<(u64, UnwindMethod)> {
    let (end, frames) = run(file(), regs, &stack(words));
    assert_eq!(end, Ok(()));
    let shown = |(i, f): (usize, &NativeFrame)| (f.lookup + u64::from(i > 0), f.method);
    frames.iter().enumerate().map(shown).collect()
}

/// The stack below a function that calls from `at`, with this return address in its frame.
fn called_from(at: u64, ra: u64) -> Vec<(u64, UnwindMethod)> {
    let words = [at, 0, 0, 0, 0, ra, CATCHES, OTHER, END];
    walk(&Regs::from_ip_sp_fp(CALLEE, STACK, STACK + 4 * 8), &words)
}

#[test]
fn what_was_saved_leads_to_the_thrower_until_it_is_overwritten() {
    use UnwindMethod::{Cfi, StackEnd, StackScan};
    let rest = |method| vec![(CATCHES, method), (OTHER, Cfi), (END, StackEnd)];
    for call in [0x1135, 0x1145].map(|at| BIAS + at) {
        let begin = vec![(CALLEE, Cfi), (call, Cfi), (THROWS, Cfi)];
        assert_eq!(called_from(call, THROWS), [begin, rest(Cfi)].concat(), "{call:#x}");
    }
    // Overwritten: the handler's frame begins behind its own return address.
    for call in [0x1145, 0x1155].map(|at| BIAS + at) {
        let begin = vec![(CALLEE, Cfi), (call, Cfi)];
        assert_eq!(called_from(call, CATCHES), [begin, rest(Cfi)].concat(), "{call:#x}");
    }
    // The same function once more, further out; what leads nowhere; and the handler's address instead of its own.
    let saved = [BIAS + 0x1155, 0, 0, 0, 0, CATCHES];
    for words in [
        [CATCHES, OTHER, CATCHES, END].as_slice(),
        &[CATCHES, 0x1234, CATCHES, OTHER, END],
        &[0, LANDING, OTHER, END],
    ] {
        let regs = Regs::from_ip_sp_fp(CALLEE, STACK, STACK + 4 * 8);
        let frames = walk(&regs, &[&saved, words].concat());
        assert_eq!(frames[..2], [(CALLEE, Cfi), (BIAS + 0x1155, StackScan)], "{words:x?}");
        assert_eq!(frames[2..4], [(CATCHES, Cfi), (OTHER, Cfi)], "{words:x?}");
        assert_eq!(frames.last(), Some(&(END, StackEnd)));
    }
}

#[test]
fn a_register_that_was_overwritten_leads_nowhere() {
    use UnwindMethod::{Cfi, StackEnd, StackScan};
    // The function that calls it is such a function, too, and its frame hangs on rbp, which is the handler's already.
    let call = BIAS + 0x1145;
    let words = [
        call,
        0,
        0,
        0,
        STACK + 8,
        BIAS + 0x1135,
        0,
        0,
        THROWS,
        CATCHES,
        OTHER,
        END,
    ];
    let regs = Regs::from_ip_sp_fp(CALLEE, STACK, STACK + 4 * 8);
    let begin = [(CALLEE, Cfi), (call, Cfi), (BIAS + 0x1135, StackScan), (THROWS, Cfi)];
    let rest = [(CATCHES, Cfi), (OTHER, Cfi), (END, StackEnd)];
    assert_eq!(walk(&regs, &words), [begin.as_slice(), &rest].concat());
}

#[test]
fn a_handler_that_is_jumped_to_was_not_called() {
    use UnwindMethod::{Cfi, StackEnd};
    let mut regs = Regs::from_ip_sp_fp(BIAS + 0x1180, STACK, 0);
    (regs.gpr[2], regs.known) = (STACK + 16, regs.known | 1 << 2);
    let (end, frames) = run(file(), &regs, &stack(&[0, 0, LANDING, OTHER, END]));
    assert_eq!(end, Ok(()));
    let shown: Vec<_> = frames.iter().map(|f| (f.lookup, f.method)).collect();
    assert_eq!(
        shown,
        [
            (BIAS + 0x1180, Cfi),
            (LANDING, Cfi),
            (OTHER - 1, Cfi),
            (END - 1, StackEnd)
        ]
    );
}
