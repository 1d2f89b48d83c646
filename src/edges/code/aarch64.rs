//! Instructions of aarch64 (Arm Architecture Reference Manual DDI 0487, chapter C4, "A64 instruction set encoding").

use super::{Callee, Flow, Instruction, Registers, Value};

/// `mov x8, #139; svc #0` (`rt_sigreturn`: include/uapi/asm-generic/unistd.h, Linux 6.18).
pub const SIGNAL_RETURNS: &[&[u8]] = &[b"\x68\x11\x80\xd2\x01\0\0\xd4"];

fn bits(word: u32, low: u32, count: u32) -> u32 {
    word >> low & ((1 << count) - 1)
}

/// A field as a signed number of words.
fn offset(word: u32, low: u32, count: u32) -> i64 {
    let shift = 64 - count;
    i64::from(bits(word, low, count)) << shift >> shift
}

fn target(address: u64, word: u32, low: u32, count: u32) -> u64 {
    address.wrapping_add_signed(4 * offset(word, low, count))
}

fn word_at(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().map(|word| u32::from_le_bytes(*word))
}

/// What the call at the end of these bytes, which is `end`, calls.
pub fn calls_before(before: &[u8], end: u64) -> Vec<Callee> {
    let count = before.len() / 4;
    let words = &before[before.len() - 4 * count..];
    let start = end.wrapping_sub(4 * count as u64);
    let (mut registers, mut last) = (Registers::default(), None);
    for (i, word) in words.chunks_exact(4).enumerate() {
        let before = registers.clone();
        let instruction = decode(word, start.wrapping_add(4 * i as u64), &mut registers);
        if !matches!(instruction.flow, Flow::Next) {
            registers = Registers::default();
        }
        last = word_at(word).map(|word| (word, instruction, before));
    }
    let Some((word, instruction, registers)) = last else {
        return Vec::new();
    };
    match instruction.flow {
        Flow::Call(Some(to)) => vec![Callee::Direct(to)],
        Flow::Call(None) => {
            let value = registers.get(bits(word, 5, 5) as usize);
            vec![value.map_or(Callee::Unknown, Callee::Register)]
        }
        _ => Vec::new(),
    }
}

/// The instruction at `address`.
pub fn decode(bytes: &[u8], address: u64, registers: &mut Registers) -> Instruction {
    let flow = match word_at(bytes) {
        Some(word) => {
            let flow = flow(address, word, registers);
            match flow {
                Flow::Call(_) => *registers = Registers::default(),
                _ => update(address, word, registers),
            }
            flow
        }
        None => Flow::End,
    };
    Instruction {
        length: 4,
        flow,
        pushed: None,
    }
}

fn flow(address: u64, word: u32, registers: &Registers) -> Flow {
    // b, bl
    match bits(word, 26, 6) {
        0b000101 => return Flow::Jump(target(address, word, 0, 26)),
        0b100101 => return Flow::Call(Some(target(address, word, 0, 26))),
        _ => {}
    }
    // b.cond, bc.cond; cbz, cbnz; tbz, tbnz
    match (bits(word, 24, 8), bits(word, 25, 6)) {
        (0x54, _) | (_, 0b011010) => return Flow::Branch(target(address, word, 5, 19)),
        (_, 0b011011) => return Flow::Branch(target(address, word, 5, 14)),
        _ => {}
    }
    // br, blr, ret, and their forms that check a signature; eret, drps
    if bits(word, 25, 7) == 0b1101011 {
        return match bits(word, 21, 4) {
            0b0000 | 0b1000 => Flow::JumpRegister(registers.get(bits(word, 5, 5) as usize)),
            0b0001 | 0b1001 => Flow::Call(None),
            // `ret` through another register than the link register is a jump.
            0b0010 if bits(word, 10, 2) == 0 && bits(word, 5, 5) != 30 => Flow::JumpRegister(None),
            0b0010 => Flow::Return,
            _ => Flow::End,
        };
    }
    // udf; brk, hlt
    let is_trap = word >> 16 == 0 || bits(word, 24, 8) == 0xd4 && matches!(bits(word, 21, 3), 1 | 2);
    if is_trap { Flow::End } else { Flow::Next }
}

/// Keeps the constants that an instruction puts into registers, and forgets those in others that it may write.
fn update(address: u64, word: u32, registers: &mut Registers) {
    let (to, from) = (bits(word, 0, 5) as usize, bits(word, 5, 5) as usize);
    let page_offset = offset(bits(word, 5, 19) << 2 | bits(word, 29, 2), 0, 21);
    let constant = |register: usize| match registers.get(register) {
        Some(Value::Constant(value)) => Some(value),
        _ => None,
    };
    let value = if bits(word, 24, 5) == 0b10000 {
        // adr, adrp
        Some(Value::Constant(match word >> 31 {
            0 => address.wrapping_add_signed(page_offset),
            _ => (address & !0xfff).wrapping_add_signed(page_offset << 12),
        }))
    } else if bits(word, 23, 9) == 0b1_0010_0010 {
        // add (immediate)
        let immediate = u64::from(bits(word, 10, 12)) << (12 * bits(word, 22, 1));
        constant(from).map(|value| Value::Constant(value.wrapping_add(immediate)))
    } else if bits(word, 22, 10) == 0b11_1110_0101 {
        // ldr (immediate, unsigned offset, 64 bits)
        constant(from).map(|value| Value::Slot(value.wrapping_add(8 * u64::from(bits(word, 10, 12)))))
    } else if bits(word, 24, 8) == 0b0101_1000 {
        // ldr (literal, 64 bits)
        Some(Value::Slot(target(address, word, 5, 19)))
    } else if bits(word, 23, 6) == 0b100101 && word >> 31 == 1 {
        // movz, movk, movn
        let shift = 16 * bits(word, 21, 2);
        let immediate = u64::from(bits(word, 5, 16)) << shift;
        match bits(word, 29, 2) {
            0b10 => Some(Value::Constant(immediate)),
            0b00 => Some(Value::Constant(!immediate)),
            0b11 => constant(to).map(|value| Value::Constant(value & !(0xffff << shift) | immediate)),
            _ => None,
        }
    } else {
        None
    };
    // A field at bit 0 is nearly always what is written. Loads of pairs and exclusive stores write another register, too, and
    // loads and stores may change the register of their address.
    registers.set(to, value);
    if bits(word, 27, 3) == 0b101 {
        registers.set(bits(word, 10, 5) as usize, None);
    }
    if bits(word, 24, 6) == 0b001000 {
        registers.set(bits(word, 16, 5) as usize, None);
    }
    let is_memory = bits(word, 27, 1) == 1 && bits(word, 25, 1) == 0;
    let has_unsigned_offset = matches!(bits(word, 24, 6), 0b111001 | 0b111101);
    if is_memory && !has_unsigned_offset {
        registers.set(from, None);
    }
    // Register 31 is the stack pointer or zero.
    registers.set(31, None);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn calls_are_found_before_return_addresses() {
        let check = |words: &[u32], expected: &[Callee]| {
            let end = 0x1000 + 4 * words.len() as u64;
            assert_eq!(calls_before(&code(words), end), expected, "{words:x?}");
        };
        use Callee::{Direct, Register, Unknown};
        use Value::{Constant, Slot};
        check(&[0xd503_201f, 0x9400_0004], &[Direct(0x1014)]); // nop; bl
        check(&[0x97ff_ffff], &[Direct(0xffc)]);
        check(&[0xd63f_0100], &[Unknown]); // blr x8
        check(&[0xd73f_0809], &[Unknown]); // blraa x0, x9
        check(&[0xb000_0008, 0x9100_4108, 0xd63f_0100], &[Register(Constant(0x2010))]); // adrp, add, blr
        check(&[0xb000_0008, 0xf940_0908, 0xd63f_0100], &[Register(Slot(0x2010))]); // adrp, ldr, blr
        check(
            &[0xd282_4688, 0xf2a0_0028, 0xd63f_0100],
            &[Register(Constant(0x1_1234))],
        ); // movz, movk, blr
        check(&[0xb000_0008, 0x9400_0004, 0xd63f_0100], &[Unknown]); // a call in between
        check(&[0xb000_0008, 0xaa01_03e8, 0xd63f_0100], &[Unknown]); // mov x8, x1 in between
        check(&[0xd65f_03c0], &[]);
        check(&[0x1400_0004], &[]);
        check(&[], &[]);
    }

    #[test]
    fn flow_of_instructions() {
        let check = |words: &[u32], flow: Flow| {
            let (mut registers, mut last) = (Registers::default(), None);
            for (i, word) in words.iter().enumerate() {
                last = Some(decode(&word.to_le_bytes(), 0x1000 + 4 * i as u64, &mut registers).flow);
            }
            assert_eq!(last, Some(flow), "{words:x?}");
        };
        check(&[0xd503_245f], Flow::Next); // bti c
        check(&[0xd503_233f], Flow::Next); // paciasp
        check(&[0x17ff_ffff], Flow::Jump(0xffc));
        check(&[0x5400_0040], Flow::Branch(0x1008)); // b.eq
        check(&[0xb500_0041], Flow::Branch(0x1008)); // cbnz x1
        check(&[0x3608_0040], Flow::Branch(0x1008)); // tbz
        check(&[0x9400_0002], Flow::Call(Some(0x1008)));
        check(&[0xd61f_0220], Flow::JumpRegister(None)); // br x17
        // A stub of the procedure linkage table: adrp x16; ldr x17, [x16, #16]; add x16, x16, #16; br x17
        let slot = Flow::JumpRegister(Some(Value::Slot(0x2010)));
        check(&[0xb000_0010, 0xf940_0a11, 0x9100_4210, 0xd61f_0220], slot);
        check(&[0xd65f_03c0], Flow::Return);
        check(&[0xd65f_0bff], Flow::Return); // retaa
        check(&[0xd65f_0220], Flow::JumpRegister(None)); // ret x17
        check(&[0xd420_0000], Flow::End); // brk
        check(&[0], Flow::End);
        check(&[0xd400_0001], Flow::Next); // svc
    }
}
