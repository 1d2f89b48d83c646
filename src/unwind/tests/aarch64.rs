//! Rules and stacks of aarch64.

use super::*;
use crate::arch::{ALL, RA};

/// Where the outermost function calls, and its return address. Bits of a signature, above the address.
const CALL: u64 = BIAS + 0x1014;
const SIGNED: u64 = 0x002a << 48;

fn code(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// Registers of an interrupted thread: all of them are known.
fn interrupted(ip: u64, lr: u64, fp: u64) -> Regs {
    let mut regs = Regs::from_ip_sp_fp(ip, STACK, fp);
    regs.gpr[RA] = lr;
    regs.known = ALL;
    regs
}

/// Method and CFA, relative to the stack, of each frame.
fn frames(file: File, regs: &Regs, words: &[u64]) -> (Result<(), Truncation>, Vec<(u64, UnwindMethod, u64)>) {
    let (end, frames) = run(file, regs, &stack(words));
    let what = |f: &NativeFrame| (f.lookup - BIAS, f.method, f.cfa - STACK);
    (end, frames.iter().map(what).collect())
}

/// A table for 0x1000 to 0x1020: `instructions`, then, from 0x1010 on, no return address.
fn with_table(instructions: &[u8]) -> File {
    // remember_state; ...; advance_loc to 0x1010; def_cfa sp 0; undefined x30
    let end = [0x02, 16, 0x0c, 31, 0, 0x07, 30];
    File {
        eh_frame: table("zR", 0x1000, 0x20, &[instructions, &end].concat()),
        code: code(&[NOP; 4]).into_iter().chain(code(&[BL, NOP, NOP, NOP])).collect(),
        functions: vec![(0x1000, 0x20)],
    }
}

const NOP: u32 = 0xd503_201f;
const BL: u32 = 0x9400_0000;
const STP_FP_LR_32: u32 = 0xa9be_7bfd; // stp x29, x30, [sp, #-32]!
const MOV_FP_SP: u32 = 0x9100_03fd;
const LDP_FP_LR_32: u32 = 0xa8c2_7bfd; // ldp x29, x30, [sp], #32
const RET: u32 = 0xd65f_03c0;
const PACIASP: u32 = 0xd503_233f;
const AUTIASP: u32 = 0xd503_23bf;

#[test]
fn leaf_functions_return_by_the_link_register() {
    use UnwindMethod::{Cfi, StackEnd};
    let expected = |cfa| (Ok(()), vec![(0x1004, Cfi, cfa), (0x1013, StackEnd, cfa)]);
    assert_eq!(
        frames(with_table(&[]), &interrupted(BIAS + 0x1004, CALL, 0), &[]),
        expected(0)
    );
    // The same, signed; and with a tag in the uppermost byte.
    for bits in [SIGNED, 0xb4 << 56, 0x7f << 48, 0x003f << 39] {
        let regs = interrupted(BIAS + 0x1004, CALL | bits, 0);
        assert_eq!(frames(with_table(&[]), &regs, &[]), expected(0), "{bits:#x}");
    }
    // In a caller the link register is not known: a frame that does not say where it saved it is damaged.
    let regs = interrupted(BIAS + 0x1004, BIAS + 0x1008, 0);
    assert!(frames(with_table(&[]), &regs, &[0; 8]).0.is_err());
}

#[test]
fn signed_return_addresses_on_the_stack() {
    use UnwindMethod::{Cfi, StackEnd};
    // The sign state is negated (in both forms) at 0x1000; CFA = sp + 32; x29 at CFA - 32, x30 at CFA - 24.
    for mark in [0x2d, 0x2c] {
        let file = || with_table(&[mark, 0x0e, 32, 0x9d, 4, 0x9e, 3]);
        let regs = interrupted(BIAS + 0x1004, 0x1234, 0);
        let (end, found) = frames(file(), &regs, &[0, CALL | SIGNED, 0, 0]);
        assert_eq!(end, Ok(()), "{mark:#x}");
        assert_eq!(found, [(0x1004, Cfi, 32), (0x1013, StackEnd, 32)], "{mark:#x}");
    }
}

#[test]
fn rules_of_tables_as_text() {
    let mut unwinder = unwinder(with_table(&[0x44, 0x0e, 32, 0x9d, 4, 0x9e, 3, 0x44, 0x93, 2]));
    let mut at = |offset: u64| unwinder.explain(ModuleId(0), 0x1000 + offset).unwrap_or_default();
    assert_eq!(at(0), "sp+0 x30=s");
    assert_eq!(at(4), "sp+32 x29=c-32 x30=c-24");
    assert_eq!(at(8), "sp+32 x19=c-16 x29=c-32 x30=c-24");
}

#[test]
fn prologues_and_epilogues() {
    let body = code(&[PACIASP, STP_FP_LR_32, MOV_FP_SP, BL, LDP_FP_LR_32, AUTIASP, RET, NOP]);
    check(&body, 0, "sp+0 x30=s code");
    check(&body, 4, "sp+0 x30=s code");
    // Saved, but both registers still have their values.
    check(&body, 8, "sp+32 x30=s code");
    check(&body, 16, "sp+32 x29=c-32 x30=c-24 code");
    check(&body, 20, "sp+0 x30=s code");
    check(&body, 24, "sp+0 x30=s code");
    // After the return the frame is complete again.
    check(&body, 28, "sp+32 x29=c-32 x30=c-24 code");
    // sub sp, sp, #32; str x19, [sp, #8]; mov x9, x30; mov x30, xzr; ldr x19, [sp, #8]; add sp, sp, #32; ret x9
    let moved = code(&[
        0xd100_83ff,
        0xf900_07f3,
        0xaa1e_03e9,
        0xaa1f_03fe,
        0xf940_07f3,
        0x9100_83ff,
        0xd65f_0120,
    ]);
    check(&moved, 4, "sp+32 x30=s code");
    check(&moved, 8, "sp+32 x30=s code");
    check(&moved, 16, "sp+32 x30=x9 code");
    // mov x19, sp after saving x19; and sp, x9, #-64: found by the copy
    let aligned = code(&[0xf81f_0ff3, 0x9100_03f3, 0x927a_e53f, NOP]);
    check(&aligned, 12, "x19+16 x19=c-16 x30=s code");
}

#[test]
fn frame_records_without_tables() {
    use UnwindMethod::{FramePointer, StackEnd};
    // Anonymous code with a frame record somewhere in its frame: the caller's stack pointer is not known, but its frame
    // record gives it.
    let file = with_table(&[0x0e, 32, 0x9d, 4, 0x9e, 3]);
    let mut regs = Regs::from_ip_sp_fp(0x50_0010, STACK, STACK + 16);
    regs.gpr[RA] = 7;
    regs.known = ALL;
    // Its own record, of which the caller's is at 64; that one's return address ends the stack.
    let words = [0, 0, STACK + 64, (BIAS + 0x1008) | SIGNED, 0, 0, 0, 0, 0, CALL, 0, 0];
    let file = File {
        code: code(&[NOP, BL, NOP, NOP, BL, NOP, NOP, NOP]),
        ..file
    };
    let (end, found) = run(file, &regs, &stack(&words));
    let found: Vec<_> = found.iter().map(|f| (f.method, f.cfa - STACK)).collect();
    assert_eq!(end, Ok(()));
    assert_eq!(found[0], (FramePointer, 32));
    assert_eq!(found[1], (UnwindMethod::Cfi, 96));
    assert_eq!(found[2].0, StackEnd);
}

#[test]
fn signal_frames_restore_all_registers() {
    // mov x8, #139; svc #0 at 0x1000
    let file = File {
        code: code(&[0xd280_1168, 0xd400_0001, NOP, NOP, BL, NOP, NOP, NOP]),
        eh_frame: table("zR", 0x1010, 0x10, &[0x07, 30]),
        functions: vec![(0x1000, 8)],
    };
    let mut words = vec![0; 39];
    // x0 to x30, sp, pc: interrupted at the first instruction of the outermost function
    words.extend((0..31).map(|r| 1000 + r));
    words.extend([STACK + 0x2000, BIAS + 0x1010, 0]);
    let mut regs = Regs::from_ip_sp_fp(BIAS + 0x1004, STACK, 0);
    regs.known = ALL;
    let (end, found) = run(file, &regs, &stack(&words));
    assert_eq!(end, Ok(()));
    assert_eq!(
        (found[1].lookup, found[1].sp, found[1].method),
        (BIAS + 0x1010, STACK + 0x2000, UnwindMethod::StackEnd)
    );
}
