//! Decoded instructions against their encodings.

use super::*;

fn access(word: u32) -> (bool, [Option<u8>; 2], u8, u8, i64, i64) {
    match operation(word) {
        Operation::Access(a) => (a.is_load, a.registers, a.size, a.base, a.offset, a.moves),
        other => panic!("{word:#x}: {other:?}"),
    }
}

#[test]
fn accesses_of_prologues_and_epilogues() {
    // stp x29, x30, [sp, #-32]!
    assert_eq!(access(0xa9be_7bfd), (false, [Some(29), Some(30)], 8, 31, -32, -32));
    // stp x19, x20, [sp, #16]
    assert_eq!(access(0xa901_53f3), (false, [Some(19), Some(20)], 8, 31, 16, 0));
    // ldp x29, x30, [sp], #32
    assert_eq!(access(0xa8c2_7bfd), (true, [Some(29), Some(30)], 8, 31, 0, 32));
    // str x30, [sp, #-16]!
    assert_eq!(access(0xf81f_0ffe), (false, [Some(30), None], 8, 31, -16, -16));
    // ldr x30, [sp], #16
    assert_eq!(access(0xf841_07fe), (true, [Some(30), None], 8, 31, 0, 16));
    // ldr x0, [x1, #8]
    assert_eq!(access(0xf940_0420), (true, [Some(0), None], 8, 1, 8, 0));
    // stp d8, d9, [sp, #-64]!
    assert_eq!(access(0x6dbc_27e8), (false, [None, None], 8, 31, -64, -64));
    // str q0, [sp, #32]
    assert_eq!(access(0x3d80_0be0), (false, [None, None], 16, 31, 32, 0));
    // strb w0, [sp, #1]
    assert_eq!(access(0x3900_07e0), (false, [Some(0), None], 1, 31, 1, 0));
}

#[test]
fn the_size_of_a_descriptor_is_in_pthread_self() {
    let size = |words: &[u32]| descriptor_size(&words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>());
    // glibc 2.31 and 2.41
    assert_eq!(size(&[0xd53b_d040, 0xd11c_0000, 0xd65f_03c0, NOP]), Some(0x700));
    assert_eq!(size(&[BTI_C, 0xd53b_d040, 0xd11c_8000, 0xd65f_03c0]), Some(0x720));
    // Another base; no subtraction.
    assert_eq!(size(&[0xd53b_d041, 0xd11c_0000]), None);
    assert_eq!(size(&[0xd53b_d040, 0xd65f_03c0]), None);
}

#[test]
fn other_operations() {
    let check = |word: u32, expected: Operation| assert_eq!(operation(word), expected, "{word:#x}");
    check(
        0x9100_03fd,
        Operation::Add {
            to: 29,
            from: 31,
            by: 0,
        },
    ); // mov x29, sp
    check(
        0xd100_83ff,
        Operation::Add {
            to: 31,
            from: 31,
            by: -32,
        },
    ); // sub sp, sp, #32
    check(
        0x9140_07ff,
        Operation::Add {
            to: 31,
            from: 31,
            by: 4096,
        },
    ); // add sp, sp, #1, lsl #12
    check(0xaa1e_03e9, Operation::Add { to: 9, from: 30, by: 0 }); // mov x9, x30
    check(0xaa1f_03e3, Operation::Sets(1 << 3)); // mov x3, xzr
    check(0x927a_e53f, Operation::Sets(1 << 31)); // and sp, x9, #-64
    check(0xcb2c_63ff, Operation::Sets(1 << 31)); // sub sp, sp, x12
    check(0xf100_001f, Operation::Nothing); // cmp x0, #0
    check(0xeb01_001f, Operation::Nothing); // cmp x0, x1
    check(0x8b01_0000, Operation::Sets(1)); // add x0, x0, x1
    check(0xd503_233f, Operation::Nothing); // paciasp
    check(0xd503_23bf, Operation::Nothing); // autiasp
    check(0x4e61_d400, Operation::Nothing); // fadd v0.2d, v0.2d, v1.2d
    check(0x1e61_2800, Operation::Nothing); // fadd d0, d0, d1
    check(0x9e66_0013, Operation::Sets(1 << 19)); // fmov x19, d0
    check(0x9e67_0013, Operation::Nothing); // fmov d19, x0
    check(0x4cdf_2020, Operation::Sets(1 << 1)); // ld1 {v0.16b-v3.16b}, [x1], #64
    check(0x9400_0001, Operation::Call); // bl
    check(0xd63f_0000, Operation::Call); // blr x0
}

#[test]
fn flow_of_instructions() {
    let check = |word: u32, expected: (Flow, Option<u64>)| assert_eq!(flow(0x1000, word), expected, "{word:#x}");
    check(0x1400_0002, (Flow::Jump, Some(0x1008)));
    check(0x97ff_ffff, (Flow::Call, Some(0xffc)));
    check(0x5400_0040, (Flow::ConditionalJump, Some(0x1008)));
    check(0xb4ff_ffe0, (Flow::ConditionalJump, Some(0xffc))); // cbz x0
    check(0x3600_0040, (Flow::ConditionalJump, Some(0x1008))); // tbz w0, #0
    check(0xd61f_0220, (Flow::IndirectJump, None)); // br x17
    check(0xd65f_03c0, (Flow::Return, None));
    check(0xd65f_0bff, (Flow::Return, None)); // retaa
    check(0xd73f_0801, (Flow::Call, None)); // blraa x0, x1
    check(0, (Flow::Trap, None));
    check(0xd420_0000, (Flow::Trap, None)); // brk
    check(NOP, (Flow::Next, None));
    assert!(ends_with_call(&0x9400_0001u32.to_le_bytes()));
    assert!(!ends_with_call(&NOP.to_le_bytes()) && !ends_with_call(&[0x94]));
}

#[test]
fn addresses_and_signal_returns() {
    let code = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    // adr x0, .+8; adrp x1, .+0x2000; add x1, x1, #0x10
    let loads = code(&[0x1000_0040, 0xd000_0001, 0x9100_4021]);
    assert_eq!(loaded_addresses(&loads, 0x1000), [0x1008, 0x3010]);
    assert!(is_signal_return(&code(&[NOP, NOP, MOV_X8_SIGRETURN, SVC]), 4));
    assert!(is_signal_return(&code(&[MOV_X8_SIGRETURN, SVC]), 0));
    assert!(!is_signal_return(&code(&[NOP, MOV_X8_SIGRETURN]), 4));
    let starts = [0, 4, 8, 12].map(|at| signal_return_start(&code(&[NOP, MOV_X8_SIGRETURN, SVC, NOP]), at));
    assert_eq!(starts, [None, Some(4), Some(4), None]);
}
