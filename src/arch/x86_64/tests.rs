use std::collections::HashMap;

use super::*;

#[test]
fn perf_regs_land_in_their_dwarf_slots() {
    let words: Vec<u8> = [2].into_iter().chain(100..117u64).flat_map(u64::to_le_bytes).collect();
    let regs = PerfRegs::parse(&words).unwrap();
    let r = regs.regs();
    // rax rdx rcx rbx rsi rdi rbp rsp r8 .. r15
    let expected = [
        100, 103, 102, 101, 104, 105, 106, 107, 109, 110, 111, 112, 113, 114, 115, 116,
    ];
    assert_eq!((r.gpr, r.ip), (expected, 108));
    assert_eq!(regs.arguments(), [105, 104, 103, 111, 109, 110]);
    let general = [
        116, 115, 114, 113, 106, 101, 112, 111, 110, 109, 100, 102, 103, 104, 105, 0,
    ];
    assert_eq!(regs.general(), general);
    assert_eq!(regs.call_returns_to(), None);
    let mut in_call = regs;
    in_call.0[2] = 108;
    assert_eq!(in_call.call_returns_to(), Some(108));
    assert_eq!(PerfRegs::parse(&words[..100]), None);
    assert_eq!(PerfRegs::parse(&[0; 8]), None);
}

#[test]
fn a_call_at_its_entry_is_postponed() {
    let mut regs = UserRegs([7; USER_REGS_WORDS]);
    (regs.0[ORIG_AX], regs.0[AX], regs.0[IP]) = (1, -38i64 as u64, 0x1002);
    regs.postpone_syscall();
    assert_eq!((regs.0[ORIG_AX], regs.0[AX], regs.0[IP]), (u64::MAX, 1, 0x1000));
}

#[test]
fn only_interrupted_calls_are_restarted() {
    let check = |call: i64, result: i64, expected: bool| {
        let mut regs = UserRegs([7; USER_REGS_WORDS]);
        (regs.0[ORIG_AX], regs.0[AX]) = (call as u64, result as u64);
        let before = regs;
        assert_eq!(regs.restart_syscall(), expected, "{call} {result}");
        let mut after = before;
        if expected {
            after.0[AX] = ERESTARTNOHAND;
        }
        assert_eq!(regs, after, "{call} {result}");
    };
    check(232, -4, true); // epoll_wait
    check(232, 3, false);
    check(232, -514, false); // left to the kernel
    check(3, -4, false); // close
    check(-1, -4, false); // not in a call
    check(202, -512, false); // futex
}

#[test]
fn interrupted_calls_are_restarted_if_the_code_identifies_them() {
    const IP: u64 = 0x1040;
    const CALLER: u64 = 0x2040;
    const STACK: u64 = 0x7000;
    // Code before the instruction pointer, code before the return address, a word of the stack at an offset.
    let check = |result: i64, code: &[u8], caller: &[u8], (offset, word): (u64, u64), expected: bool| {
        let mut regs = SignalRegs([7; SIGNAL_REGS_WORDS]);
        (regs.0[13], regs.0[16]) = (result as u64, IP);
        (regs.0[15], regs.0[10]) = (STACK, STACK + 0x30);
        let mut memory = HashMap::from([(STACK, CALLER.to_le_bytes()), (STACK + offset, word.to_le_bytes())]);
        for (end, bytes) in [(IP, code), (CALLER, caller)] {
            let padded = [&[0x90; 40], bytes].concat();
            for (i, part) in padded.rchunks_exact(8).enumerate() {
                memory.insert(end - 8 * (i as u64 + 1), part.try_into().unwrap());
            }
        }
        let read = |at: u64, into: &mut [u8]| {
            for (byte, at) in into.iter_mut().zip(at..) {
                match memory.get(&(at & !7)) {
                    Some(word) => *byte = word[at as usize % 8],
                    None => return false,
                }
            }
            true
        };
        assert_eq!(regs.restart_call(&read), expected, "{result} {code:x?} {caller:x?}");
        let after = if expected { (232, IP - 2) } else { (result as u64, IP) };
        assert_eq!((regs.0[13], regs.0[16]), after, "{result} {code:x?}");
    };
    let nothing = (0x100, 0);
    let epoll_wait = [0xb8, 232, 0, 0, 0, 0x0f, 0x05];
    check(-4, &epoll_wait, &[], nothing, true);
    check(3, &epoll_wait, &[], nothing, false);
    check(-4, &[0xb8, 3, 0, 0, 0, 0x0f, 0x05], &[], nothing, false); // close
    check(-4, &[0x48, 0x89, 0xf8, 0x0f, 0x05], &[], nothing, false); // mov %rdi,%rax
    check(-4, &epoll_wait[..5], &[], nothing, false); // no system call

    let from_sp = [0x48, 0x8b, 0x44, 0x24, 0x20, 0x0f, 0x05]; // mov 0x20(%rsp),%rax
    check(-4, &from_sp, &[], (0x20, 232), true);
    check(-4, &from_sp, &[], (0x20, 3), false);
    check(-4, &from_sp, &[], (0x28, 232), false); // not mapped
    let from_bp = [0x48, 0x8b, 0x45, 0x10, 0x0f, 0x05]; // mov 0x10(%rbp),%rax
    check(-4, &from_bp, &[], (0x40, 232), true);

    let cancel_arch = [0x4c, 0x89, 0x5c, 0x24, 8, 0x0f, 0x05]; // mov %r11,8(%rsp)
    // mov 0x30(%rsp),%rsi; mov %rax,%r8; mov %r10,%rdi; call (Debian's glibc 2.43)
    let caller = [
        0x48, 0x8b, 0x74, 0x24, 0x30, 0x49, 0x89, 0xc0, 0x4c, 0x89, 0xd7, 0xe8, 1, 2, 3, 4,
    ];
    check(-4, &cancel_arch, &caller, (0x38, 232), true);
    check(-4, &cancel_arch, &caller, (0x38, 3), false);
    check(-4, &cancel_arch, &caller, (0x30, 232), false);
    check(-4, &cancel_arch, &caller[..11], (0x38, 232), false); // no call
    check(-4, &cancel_arch, &caller[5..], (0x38, 232), false); // the load is not there
    let with_bp = [0x48, 0x8b, 0x75, 0x10, 0x4c, 0x89, 0xd7, 0xe8, 1, 2, 3, 4]; // mov 0x10(%rbp),%rsi
    check(-4, &cancel_arch, &with_bp, (0x40, 232), true);
}

#[test]
fn signal_regs_land_in_their_dwarf_slots() {
    let r = SignalRegs(std::array::from_fn(|i| i as u64)).regs();
    // rax rdx rcx rbx rsi rdi rbp rsp r8 .. r15
    assert_eq!(r.gpr, [13, 12, 14, 11, 9, 8, 10, 15, 0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(r.ip, 16);
}

#[test]
fn pt_regs_land_in_their_dwarf_slots() {
    let mut w = [0u64; PT_REGS_WORDS];
    for (i, v) in w.iter_mut().enumerate() {
        *v = 100 + i as u64;
    }
    let r = Regs::from_pt_regs(&w);
    // rax rdx rcx rbx rsi rdi rbp rsp r8 .. r15
    assert_eq!(
        r.gpr,
        [
            110, 112, 111, 105, 113, 114, 104, 119, 109, 108, 107, 106, 103, 102, 101, 100
        ]
    );
    assert_eq!((r.ip, r.sp()), (116, 119));
    assert_eq!(r.get(RA), Some(116));
}
