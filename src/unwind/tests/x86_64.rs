//! Rules and stacks of x86-64.

use super::super::rule::{CallerRegister, Cfa, FullRule};
use super::*;
use crate::event::PAGE;

#[test]
fn prologues_and_epilogues() {
    // push %rbx; sub $0x10,%rsp; nop; add $0x10,%rsp; pop %rbx; ret; nop
    let code = [
        0x53, 0x48, 0x83, 0xec, 0x10, 0x90, 0x48, 0x83, 0xc4, 0x10, 0x5b, 0xc3, 0x90,
    ];
    check(&code, 0, "rsp+8 ra=c-8 code");
    check(&code, 1, "rsp+16 ra=c-8 code");
    check(&code, 5, "rsp+32 ra=c-8 code");
    check(&code, 10, "rsp+16 ra=c-8 code");
    check(&code, 11, "rsp+8 ra=c-8 code");
    check(&code, 12, "rsp+32 ra=c-8 code"); // after the return the frame is complete again
    // push %rbp; mov %rsp,%rbp; xor %ebp... is not touched; leave; ret
    let code = [0x55, 0x48, 0x89, 0xe5, 0xc9, 0xc3];
    check(&code, 1, "rsp+16 ra=c-8 code");
    check(&code, 4, "rsp+16 rbp=c-16 ra=c-8 code");
    check(&code, 5, "rsp+8 ra=c-8 code");
    // test %edi,%edi; je 1f; push %rbx; xor %ebx,%ebx; nop; pop %rbx; 1: ret -- paths that agree
    let code = [0x85, 0xff, 0x74, 0x05, 0x53, 0x31, 0xdb, 0x90, 0x5b, 0xc3];
    check(&code, 7, "rsp+16 rbx=c-16 ra=c-8 code");
    check(&code, 9, "rsp+8 ra=c-8 code");
}

#[test]
fn realigned_stacks() {
    // mov %rbp,-8(%rsp) (red zone); mov %rsp,%rbx after saving rbx; sub $0x40,%rsp; and $-64,%rsp; mov %rbx,%rsp; ret
    let code = [
        0x53, // push %rbx
        0x48, 0x89, 0xe3, // mov %rsp,%rbx
        0x48, 0x83, 0xec, 0x40, // sub $0x40,%rsp
        0x48, 0x83, 0xe4, 0xc0, // and $-64,%rsp
        0x48, 0x89, 0x6c, 0x24, 0x08, // mov %rbp,8(%rsp)
        0x31, 0xed, // xor %ebp,%ebp
        0x48, 0x8b, 0x6c, 0x24, 0x08, // mov 8(%rsp),%rbp
        0x48, 0x89, 0xdc, // mov %rbx,%rsp
        0x5b, 0xc3, // pop %rbx; ret
    ];
    check(&code, 8, "rsp+80 rbx=c-16 ra=c-8 code");
    check(&code, 12, "rbx+16 rbx=c-16 ra=c-8 code");
    check(&code, 19, "rbx+16 rbx=c-16 rbp=*(rsp+8) ra=c-8 code");
    check(&code, 24, "rbx+16 rbx=c-16 ra=c-8 code");
    check(&code, 27, "rsp+16 rbx=c-16 ra=c-8 code");
    check(&code, 28, "rsp+8 ra=c-8 code");
    // mov %rsp,%rax; and $-32,%rsp; mov %rax,(%rsp); xor %eax,%eax; mov (%rsp),%rsp; ret
    let code = [
        0x48, 0x89, 0xe0, 0x48, 0x83, 0xe4, 0xe0, 0x48, 0x89, 0x04, 0x24, 0x31, 0xc0, 0x48, 0x8b, 0x24, 0x24, 0xc3,
    ];
    check(&code, 7, "rax+8 ra=c-8 code");
    check(&code, 13, "*(rsp+0)+8 ra=c-8 code");
    check(&code, 17, "rsp+8 ra=c-8 code");
}

#[test]
fn linkage_stubs() {
    let mut code = vec![0xff, 0x35, 0, 1, 0, 0, 0xff, 0x25, 0, 1, 0, 0, 0x0f, 0x1f, 0x40, 0x00];
    for n in 0..3u8 {
        code.extend([0xff, 0x25, 0, 1, 0, 0, 0x68, n, 0, 0, 0, 0xe9]);
        code.extend((-(i32::from(n) + 2) * 16).to_le_bytes());
    }
    let mut unwinder = unwinder(File {
        code,
        ..File::default()
    });
    let mut at = |offset: u64| unwinder.explain(ModuleId(0), 0x1000 + offset).unwrap_or_default();
    assert_eq!(at(0), "rsp+16 ra=c-8 code");
    assert_eq!(at(6), "rsp+24 ra=c-8 code");
    for stub in [16u64, 32, 48] {
        assert_eq!(at(stub), "rsp+8 ra=c-8 code");
        assert_eq!(at(stub + 6), "rsp+8 ra=c-8 code");
        assert_eq!(at(stub + 11), "rsp+16 ra=c-8 code");
    }
}

#[test]
fn ends_and_truncations() {
    // 0x1000: CFA = rsp + 8. 0x1010: the return address is undefined.
    let with_end = || File {
        eh_frame: table("zR", 0x1000, 0x20, &[0x50, 0x07, 16]),
        ..File::default()
    };
    let regs = Regs::from_ip_sp_fp(BIAS + 0x1004, STACK, 0);
    let (end, frames) = run(with_end(), &regs, &stack(&[BIAS + 0x1015, 7]));
    assert_eq!(end, Ok(()));
    assert_eq!(
        frames
            .iter()
            .map(|f| (f.lookup, f.sp, f.cfa, f.method))
            .collect::<Vec<_>>(),
        [
            (BIAS + 0x1004, STACK, STACK + 8, UnwindMethod::Cfi),
            (BIAS + 0x1014, STACK + 8, STACK + 16, UnwindMethod::StackEnd),
        ]
    );
    assert_eq!(frames[0].location, Some((ModuleId(0), 0x1004)));
    assert_eq!(
        run(with_end(), &regs, &stack(&[0])).0,
        Ok(()),
        "a return address of 0 is an end"
    );
    let truncation = |words: &[u64]| run(with_end(), &regs, &stack(words)).0;
    assert_eq!(truncation(&[]), Err(Truncation::StackTooDeep));
    assert_eq!(truncation(&[BIAS + 0x1005]), Err(Truncation::StackTooDeep));
    assert_eq!(truncation(&[0x1234]), Err(Truncation::ReturnAddressNotInCode));
    let mut hole = stack(&vec![BIAS + 0x1005; 1024]);
    hole.holes = vec![0b10];
    let (end, frames) = run(with_end(), &regs, &hole);
    assert_eq!((end, frames.len() as u64), (Err(Truncation::StackHole), PAGE / 8 + 1));
    assert!(frames.iter().rev().skip(1).all(|f| f.method == UnwindMethod::Cfi));
    let elsewhere = StackBytes {
        base: STACK + (1 << 30),
        bytes: vec![0; 64],
        holes: vec![],
    };
    assert_eq!(run(with_end(), &regs, &elsewhere).0, Err(Truncation::ForeignStack));
    let (end, frames) = run(with_end(), &regs, &stack(&vec![BIAS + 0x1005; MAX_FRAMES + 9]));
    assert_eq!((end, frames.len()), (Err(Truncation::TooManyFrames), MAX_FRAMES + 1));
}

#[test]
fn signal_frames_restore_everything_and_may_leave_the_stack() {
    // DW_CFA_expression for rsp, rip and rbx relative to rsp; DW_CFA_def_cfa_expression (rsp + 0, deref).
    let instructions = [
        0x10, 7, 2, 0x77, 0, 0x10, 16, 2, 0x77, 8, 0x10, 3, 2, 0x77, 16, 0x0f, 3, 0x77, 0, 0x06, 0x50, 0x0c, 7, 8,
        0x07, 16,
    ];
    let file = File {
        eh_frame: table("zRS", 0x1000, 0x20, &instructions),
        ..File::default()
    };
    let regs = Regs::from_ip_sp_fp(BIAS + 0x1004, STACK, 0);
    // The interrupted instruction is the first of the outermost function: one byte earlier is the signal frame itself.
    let (end, frames) = run(file, &regs, &stack(&[STACK - 0x5000, BIAS + 0x1010, 77]));
    assert_eq!(end, Ok(()));
    assert_eq!(
        (frames[1].lookup, frames[1].sp, frames[1].method),
        (BIAS + 0x1010, STACK - 0x5000, UnwindMethod::StackEnd)
    );
    assert_eq!(
        (frames[0].sp, frames[0].cfa),
        (STACK, STACK),
        "the interval is empty when the stack is another"
    );
    // Inside sigreturn the thread is after the last byte of the restorer, whose code gives no usable rule.
    let file = File {
        code: b"\x48\xc7\xc0\x0f\0\0\0\x0f\x05\x0f\x1f\x80\0\0\0\0\xc3".to_vec(),
        functions: vec![(0x1000, 17)],
        eh_frame: table("zRS", 0x1000, 9, &instructions[..instructions.len() - 6]),
    };
    let regs = Regs::from_ip_sp_fp(BIAS + 0x1009, STACK, 0);
    let (end, frames) = run(file, &regs, &stack(&[STACK - 0x5000, BIAS + 0x4000, 77]));
    assert_eq!(
        (end, frames[0].method),
        (Err(Truncation::NoUnwindInfo), UnwindMethod::Cfi),
        "the interrupted code has no table"
    );
    assert_eq!((frames[1].lookup, frames[1].sp), (BIAS + 0x4000, STACK - 0x5000));
}

/// OCaml marks what switches stacks as a signal frame, but calls it.
#[test]
fn called_functions_may_be_marked_as_signal_frames() {
    // call 0x1010 at 0x1000, a jump at 0x1005; at 0x1010 the marked function, which calls 0x1020 at 0x1011.
    let mut code = vec![0x90; 0x40];
    code[..7].copy_from_slice(b"\xe8\x0b\0\0\0\xeb\xfe");
    code[0x11..0x16].copy_from_slice(b"\xe8\x0a\0\0\0");
    let file = |instructions: &[u8]| File {
        code: code.clone(),
        functions: vec![(0x1000, 16), (0x1010, 16), (0x1020, 32)],
        eh_frame: table("zRS", 0x1010, 0x10, instructions),
    };
    let frame: &[u8] = &[0x0c, 7, 8, 0x90, 1];
    let regs = Regs::from_ip_sp_fp(BIAS + 0x1012, STACK, 0);
    let (_, frames) = run(file(frame), &regs, &stack(&[BIAS + 0x1005]));
    assert_eq!((frames[0].lookup, frames[1].lookup), (BIAS + 0x1012, BIAS + 0x1004));
    // Its frame is on a stack that was not copied: DW_CFA_def_cfa_expression (rsp + 8, deref).
    let switched: &[u8] = &[0x0f, 3, 0x77, 8, 0x06, 0x90, 1];
    let (end, _) = run(file(switched), &regs, &stack(&[0, STACK - 0x5000]));
    assert_eq!(end, Err(Truncation::ForeignStack));
}

#[test]
fn full_rules() {
    let mut rules = Rules::default();
    let full = FullRule {
        cfa: Cfa::Deref(6, -8, 0),
        ra: CallerRegister::AtCfa(-8),
        regs: vec![
            (3, CallerRegister::AtReg(6, 0)),
            (6, CallerRegister::Reg(12)),
            (12, CallerRegister::Undefined),
            (13, CallerRegister::Cfa(-64)),
        ],
        signal: false,
        code: false,
    };
    let id = rules.intern_full(full.clone());
    assert_eq!(id, rules.intern_full(full), "equal rules are kept once");
    let words = stack(&[STACK + 48, 33, 0, 0, 0, 0x77]);
    let mut regs = Regs {
        gpr: [5; 16],
        ip: 1,
        known: 0xffff,
    };
    (regs.gpr[7], regs.gpr[6]) = (STACK, STACK + 8);
    let step = rules.apply(&rules.get(id), &mut regs, &mut StackMemory::new(&words));
    assert_eq!(step, UnwindStep::Caller { cfa: STACK + 48 });
    assert_eq!(
        (regs.ip, regs.sp(), regs.get(3), regs.get(6)),
        (0x77, STACK + 48, Some(33), Some(5))
    );
    assert_eq!(
        (regs.get(12), regs.get(13), regs.get(0)),
        (None, Some(STACK - 16), None)
    );
}

#[test]
fn expressions() {
    // The linkage table's: rsp + 8 + ((rip & 15) >= 11) << 3 (glibc, sysdeps/x86_64/dl-trampoline.h).
    let plt = [0x77, 8, 0x80, 0, 0x3f, 0x1a, 0x3b, 0x2a, 0x33, 0x24, 0x22];
    let empty = StackBytes::default();
    for (ip, expected) in [(0x1000, 108), (0x100a, 108), (0x100b, 116), (0x100f, 116)] {
        let mut regs = Regs::from_ip_sp_fp(ip, 100, 0);
        assert_eq!(
            expr::evaluate(&plt, None, &regs, &StackMemory::new(&empty)),
            Ok(expected)
        );
        regs.known = 0;
        assert_eq!(
            expr::evaluate(&plt, None, &regs, &StackMemory::new(&empty)),
            Err(Truncation::BadUnwindInfo)
        );
    }
    let regs = Regs::from_ip_sp_fp(0, 0, 0);
    let value = |bytes: &[u8]| expr::evaluate(bytes, Some(6), &regs, &StackMemory::new(&empty));
    assert_eq!(value(&[]), Ok(6));
    assert_eq!(value(&[0x12, 0x1e]), Ok(36), "dup, mul");
    assert_eq!(
        value(&[0x2f, 0xfd, 0xff]),
        Err(Truncation::BadUnwindInfo),
        "an endless loop ends"
    );
    assert_eq!(value(&[0x30, 0x1b]), Err(Truncation::BadUnwindInfo), "division by zero");
    assert_eq!(value(&[0x06]), Err(Truncation::StackTooDeep), "unreadable memory");
}

#[test]
fn trampolines_frame_pointers_and_searches() {
    let call = BIAS + 0x1015; // After a call instruction, in the code of the outermost function.
    let mut code = vec![0x90; 0x100];
    code[0x10..0x15].copy_from_slice(&[0xe8, 0, 0, 0, 0]);
    let file = || File {
        code: code.clone(),
        eh_frame: table("zR", 0x1000, 0x20, &[0x07, 16]),
        ..File::default()
    };
    let hows = |regs: &Regs, words: &[u64]| {
        let (end, frames) = run(file(), regs, &stack(words));
        (
            end,
            frames.iter().map(|f| (f.method, f.cfa - STACK)).collect::<Vec<_>>(),
        )
    };
    // A call through a null pointer; CPython's perf trampoline, just entered and inside.
    let null = Regs::from_ip_sp_fp(0, STACK, 0);
    assert_eq!(
        hows(&null, &[call]),
        (
            Ok(()),
            vec![(UnwindMethod::InstructionAnalysis, 8), (UnwindMethod::StackEnd, 16)]
        )
    );
    let stub = Regs::from_ip_sp_fp(0x50_0006, STACK, 0);
    assert_eq!(
        hows(&stub, &[0, call]),
        (
            Ok(()),
            vec![(UnwindMethod::InstructionAnalysis, 16), (UnwindMethod::StackEnd, 24)]
        )
    );
    // Anonymous code with a frame pointer, and with nothing.
    let framed = Regs::from_ip_sp_fp(0x50_0006, STACK, STACK + 16);
    assert_eq!(
        hows(&framed, &[0, 0, 0, call]),
        (
            Ok(()),
            vec![(UnwindMethod::FramePointer, 32), (UnwindMethod::StackEnd, 40)]
        )
    );
    let bare = Regs::from_ip_sp_fp(0x50_0006, STACK, 3);
    let words = [0, 0, BIAS + 0x1014, 0, call, 0];
    let failed = (Err(Truncation::NoUnwindInfo), vec![(UnwindMethod::Failed, 0)]);
    assert_eq!(hows(&bare, &[0, 0, 0]), failed);
    assert_eq!(hows(&bare, &words), failed, "nothing says that this call led here");
    // An anchor lies in code with tables: neither a frame pointer nor a scan may cross it.
    let with_anchor = |regs: &Regs, words: &[u64], anchor: u64| {
        let mut unwinder = unwinder(file());
        unwinder.set_anchors([STACK + anchor].into_iter(), None);
        let mut frames = Vec::new();
        let end = unwinder.unwind(&Map, regs, &stack(words), &mut frames);
        (end, frames.iter().map(|f| f.method).collect::<Vec<_>>())
    };
    for (regs, words, method, above) in [
        (framed, &[0, 0, 0, call, 0][..], UnwindMethod::FramePointer, 32),
        (bare, &words[..], UnwindMethod::StackScan, 40),
    ] {
        assert_eq!(
            with_anchor(&regs, words, above),
            (Ok(()), vec![method, UnwindMethod::StackEnd])
        );
        assert_eq!(
            with_anchor(&regs, words, 8),
            (Err(Truncation::NoUnwindInfo), vec![UnwindMethod::Failed])
        );
    }
}

/// `__clone` (musl 1.2.3, src/thread/x86_64/clone.s): the new thread goes on at 0x29.
const CLONE: [u8; 0x39] = [
    0x31, 0xc0, 0xb0, 0x38, // xor %eax,%eax; mov $56,%al
    0x49, 0x89, 0xfb, 0x48, 0x89, 0xd7, 0x4c, 0x89, 0xc2, 0x4d, 0x89, 0xc8, 0x4c, 0x8b, 0x54, 0x24, 0x08, // moves
    0x4d, 0x89, 0xd9, 0x48, 0x83, 0xe6, 0xf0, 0x48, 0x83, 0xee, 0x08, 0x48, 0x89,
    0x0e, // argument on the new stack
    0x0f, 0x05, 0x85, 0xc0, 0x75, 0x0f, // syscall; test %eax,%eax; jne 1f
    0x31, 0xed, 0x5f, 0x41, 0xff, 0xd1, // xor %ebp,%ebp; pop %rdi; call *%r9
    0x89, 0xc7, 0x31, 0xc0, 0xb0, 0x3c, 0x0f, 0x05, 0xf4, // mov %eax,%edi; mov $60,%al; syscall; hlt
    0xc3, // 1: ret
];

#[test]
fn threads_begin_after_clone() {
    for (at, expected) in [
        (0, "rsp+8 ra=c-8 code"),
        (0x27, "rsp+8 ra=c-8 code"),
        (0x29, "rsp+0 ra=u code"),
        (0x2e, "rsp+0 ra=u code"), // where the call returns to, less one
        (0x37, "rsp+0 ra=u code"),
        (0x38, "rsp+8 ra=c-8 code"),
    ] {
        check(&CLONE, at, expected);
    }
    // je to the new thread's part, which comes last; mov $435,%eax
    let mut other = vec![0xb8, 0xb3, 0x01, 0, 0, 0x0f, 0x05, 0x85, 0xc0, 0x74, 0x01, 0xc3];
    other.extend(&CLONE[0x29..0x38]);
    check(&other, 12, "rsp+0 ra=u code");
    check(&other, 11, "rsp+8 ra=c-8 code");
    // A copy of the process returns: 2 bytes of the call are `nop; ret`.
    let mut copy = CLONE;
    copy[0x2c..0x2f].copy_from_slice(&[0x90, 0x90, 0xc3]);
    check(&copy, 0x29, "rsp+8 ra=c-8 code");
    // Another system call: getpid.
    let mut other = CLONE;
    other[3] = 39;
    check(&other, 0x29, "rsp+8 ra=c-8 code");

    let mut code = CLONE.to_vec();
    code.resize(0x40, 0x90);
    code.extend([0x90, 0xc3]);
    let file = File {
        code,
        functions: vec![(0x1000, 0x39), (0x1040, 2)],
        ..File::default()
    };
    let regs = Regs::from_ip_sp_fp(BIAS + 0x1040, STACK, 0);
    let (end, frames) = run(file, &regs, &stack(&[vec![BIAS + 0x102f], vec![7; 200]].concat()));
    assert_eq!(end, Ok(()));
    let methods: Vec<_> = frames.iter().map(|f| (f.lookup - BIAS, f.method)).collect();
    let expected = [
        (0x1040, UnwindMethod::InstructionAnalysis),
        (0x102e, UnwindMethod::StackEnd),
    ];
    assert_eq!(methods, expected);
}

/// `clone3` (glibc 2.36, sysdeps/unix/sysv/linux/x86_64/clone3.S), from where its first table ends, with what comes before.
#[test]
fn new_threads_have_no_return_address_yet() {
    const CODE: [u8; 15] = [
        0xb8, 0xb3, 0x01, 0, 0, 0x0f, 0x05, // mov $435,%eax; syscall
        0x48, 0x85, 0xc0, 0x7c, 0x18, 0x74, 0x01, 0xc3, // test %rax,%rax; jl; je; ret
    ];
    for (at, word, expected) in [
        (7, 0, Ok(())),
        (10, 0, Ok(())),
        (12, 0, Ok(())),
        (14, 0, Err(Truncation::NoUnwindInfo)),
        (7, 3, Err(Truncation::ReturnAddressNotInCode)),
    ] {
        let file = File {
            code: CODE.to_vec(),
            functions: vec![(0x1000, 15)],
            ..File::default()
        };
        let regs = Regs::from_ip_sp_fp(BIAS + 0x1000 + at, STACK, 0);
        let (end, frames) = run(file, &regs, &stack(&[word; 200]));
        assert_eq!((end, frames.len()), (expected, 1), "{at:#x} {word}");
    }
}

#[test]
fn handlers_return_without_a_table() {
    // A handler, what it returns to (musl 1.2.3, src/signal/x86_64/restore.s), and what was interrupted, without
    // tables.
    let mut code = vec![0x90, 0xc3];
    code.resize(0x10, 0x90);
    code.extend([0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05]);
    code.resize(0x20, 0x90);
    code.extend([0x53, 0x90, 0x5b, 0xc3]); // push %rbx; nop; pop %rbx; ret
    let file = File {
        code,
        functions: vec![(0x1000, 2), (0x1010, 9), (0x1020, 4)],
        ..File::default()
    };
    // `struct ucontext` follows the return address: 5 words, then the registers.
    let mut words = vec![BIAS + 0x1010, 0, 0, 0, 0, 0];
    let interrupted_at = words.len() + 23;
    words.extend([0; 23]);
    words[6 + 15] = STACK + 8 * interrupted_at as u64;
    words[6 + 16] = BIAS + 0x1021;
    words.extend([0xb, 0]); // rbx, and the stack's end
    let regs = Regs::from_ip_sp_fp(BIAS + 0x1000, STACK, 0);
    let (end, frames) = run(file, &regs, &stack(&words));
    assert_eq!(end, Err(Truncation::NoUnwindInfo), "a zero is no end");
    let lookups: Vec<_> = frames.iter().map(|f| f.lookup - BIAS).collect();
    assert_eq!(lookups, [0x1000, 0x1010, 0x1021]); // nothing called what a handler returns to
}

#[test]
fn a_zero_is_no_end_without_a_table() {
    for words in [1, 8, 1000] {
        let file = File {
            code: vec![0x90, 0xc3],
            functions: vec![(0x1000, 2)],
            ..File::default()
        };
        let regs = Regs::from_ip_sp_fp(BIAS + 0x1000, STACK, 0);
        let end = run(file, &regs, &stack(&vec![0; words])).0;
        assert_eq!(end, Err(Truncation::NoUnwindInfo), "{words}");
    }
}

#[test]
fn programs_begin_at_their_entry() {
    // call 0x1010; hlt, and at 0x1010: nop; ret. Above is the number of arguments.
    let mut code = vec![0xe8, 0x0b, 0, 0, 0, 0xf4];
    code.resize(0x10, 0x90);
    code.extend([0x90, 0xc3]);
    let ends = |entry: Vec<(u64, u64)>| {
        let mut unwinder = unwinder(File {
            code: code.clone(),
            functions: vec![(0x1000, 6), (0x1010, 2)],
            ..File::default()
        });
        let landmarks = Landmarks {
            entry,
            ..Landmarks::default()
        };
        unwinder.add_landmarks(ModuleId(0), landmarks);
        let regs = Regs::from_ip_sp_fp(BIAS + 0x1010, STACK, 0);
        let mut frames = Vec::new();
        let end = unwinder.unwind(&Map, &regs, &stack(&[BIAS + 0x1005, 1, 0x77, 0]), &mut frames);
        (end, frames.last().map(|f| f.method))
    };
    assert_eq!(ends(vec![(0x1000, 0x1040)]), (Ok(()), Some(UnwindMethod::StackEnd)));
    assert_eq!(ends(vec![]).0, Err(Truncation::ReturnAddressNotInCode));
}
