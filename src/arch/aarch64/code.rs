//! Machine code of aarch64 (Arm Architecture Reference Manual DDI 0487, chapter C4, "A64 instruction set encoding"): what
//! instructions do to control flow, general registers and memory relative to them. Vector registers are left out.

use crate::arch::{Flow, Instruction};

/// What compilers and assemblers align functions to, bytes: at least to an instruction.
pub const FUNCTION_ALIGNMENT: u64 = 4;

/// `nop`, `bti`, `paciasp`, `autiasp` and their like: hints, which change no register that is followed here. (A signature
/// in a return address is not an effect: it is removed before the address is used.)
const HINT: (u32, u32) = (0xffff_f01f, 0xd503_201f);
pub const NOP: u32 = 0xd503_201f;
const BTI_C: u32 = 0xd503_245f;
const PACIASP: u32 = 0xd503_233f;
/// The number of `rt_sigreturn` (include/uapi/asm-generic/unistd.h) as it is loaded before the call: `mov x8, #139`.
const MOV_X8_SIGRETURN: u32 = 0xd280_1168;
const SVC: u32 = 0xd400_0001;
/// `mrs xN, tpidr_el0`: the thread pointer.
const MRS_TPIDR: (u32, u32) = (0xffff_ffe0, 0xd53b_d040);

fn is((mask, value): (u32, u32), word: u32) -> bool {
    word & mask == value
}

/// `word`, as a signed number of `bits` bits that begin at bit `low`.
fn signed(word: u32, low: u32, bits: u32) -> i64 {
    let shifted = (word << (32 - low - bits)) as i32;
    (shifted >> (32 - bits)).into()
}

/// The words of code that begins at `address`, which is aligned, with their addresses.
pub fn words(code: &[u8], address: u64) -> impl Iterator<Item = (u64, u32)> + '_ {
    let words = code.chunks_exact(4).enumerate();
    words.map(move |(i, w)| {
        let word = w.try_into().map_or(0, u32::from_le_bytes);
        (address.wrapping_add(4 * i as u64), word)
    })
}

/// The instructions of `code`, which begins at `address`. Ends before an instruction that is cut off.
pub fn instructions(code: &[u8], address: u64) -> impl Iterator<Item = Instruction> + '_ {
    words(code, address).map(|(address, word)| {
        let (flow, target) = flow(address, word);
        Instruction {
            address,
            length: 4,
            flow,
            target,
        }
    })
}

/// Where execution continues after an instruction, and the target of a direct jump or call.
pub fn flow(address: u64, word: u32) -> (Flow, Option<u64>) {
    let to = |offset: i64| Some(address.wrapping_add_signed(4 * offset));
    match word >> 26 {
        0b000101 => return (Flow::Jump, to(signed(word, 0, 26))),
        0b100101 => return (Flow::Call, to(signed(word, 0, 26))),
        _ => {}
    }
    // b.cond and bc.cond; cbz, cbnz; tbz, tbnz
    if is((0xff00_0000, 0x5400_0000), word) || is((0x7e00_0000, 0x3400_0000), word) {
        return (Flow::ConditionalJump, to(signed(word, 5, 19)));
    }
    if is((0x7e00_0000, 0x3600_0000), word) {
        return (Flow::ConditionalJump, to(signed(word, 5, 14)));
    }
    // br, blr, ret, and their forms that authenticate; eret
    if is((0xfe00_0000, 0xd600_0000), word) {
        return match word >> 21 & 7 {
            0 => (Flow::IndirectJump, None),
            1 => (Flow::Call, None),
            2 => (Flow::Return, None),
            _ => (Flow::Trap, None),
        };
    }
    // udf, brk, hlt
    let traps = [(0xffff_0000, 0), (0xffe0_001f, 0xd420_0000), (0xffe0_001f, 0xd440_0000)];
    if traps.into_iter().any(|t| is(t, word)) {
        return (Flow::Trap, None);
    }
    (Flow::Next, None)
}

/// Addresses of code or data that this code loads into registers: by `adr`, or by `adrp` and an addition that follows.
pub fn loaded_addresses(code: &[u8], address: u64) -> Vec<u64> {
    let mut pages = [None; 32];
    let mut found = Vec::new();
    for (at, word) in words(code, address) {
        let to = word as usize % 32;
        let offset = signed(word, 5, 19) << 2 | i64::from(word >> 29 & 3);
        if is((0x9f00_0000, 0x1000_0000), word) {
            found.push(at.wrapping_add_signed(offset));
        } else if is((0x9f00_0000, 0x9000_0000), word) {
            pages[to] = Some((at & !0xfff).wrapping_add_signed(offset << 12));
        } else if is((0xff80_0000, 0x9100_0000), word)
            && let Some(page) = pages[word as usize >> 5 & 31]
        {
            found.push(page.wrapping_add(immediate12(word)));
        }
    }
    found
}

/// `None`: no instruction that user code may run stops the CPU.
pub fn extent_to_halt(_code: &[u8], _address: u64) -> Option<u64> {
    None
}

/// Places and targets of direct calls in `code`.
pub fn calls(code: &[u8], address: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
    instructions(code, address)
        .filter(|i| i.flow == Flow::Call)
        .filter_map(|i| Some((i.address, i.target?)))
}

/// None are searched for.
pub fn loaded_functions(_code: &[u8], _address: u64) -> impl Iterator<Item = (u64, u64)> {
    std::iter::empty()
}

/// Do these bytes end with a call instruction?
pub fn ends_with_call(bytes: &[u8]) -> bool {
    let last = bytes.last_chunk::<4>().map(|w| u32::from_le_bytes(*w));
    last.is_some_and(|word| flow(0, word).0 == Flow::Call)
}

/// Target of the call that these bytes end with, which end at `end`; `None`: it is computed.
pub fn calls_before(bytes: &[u8], end: u64) -> impl Iterator<Item = Option<u64>> {
    let last = bytes.last_chunk::<4>().map(|w| u32::from_le_bytes(*w));
    let last = last.map(|word| flow(end.wrapping_sub(4), word));
    last.into_iter()
        .filter(|(flow, _)| *flow == Flow::Call)
        .map(|(_, target)| target)
}

/// Does code that begins at a function's start begin like one that may be called through a pointer?
pub fn is_entry(word: u32) -> bool {
    matches!(word, BTI_C | PACIASP)
}

/// Does `code[at]`, where code begins that is aligned, belong to the code that signal handlers return to, or is it next
/// to it? `mov x8, #139; svc #0`, which a `nop` may precede: vdso, `__kernel_rt_sigreturn`
/// (arch/arm64/kernel/vdso/sigreturn.S), and musl.
pub fn is_signal_return(code: &[u8], at: usize) -> bool {
    let mut before = 0;
    let around = code.get((at & !3).saturating_sub(4)..).unwrap_or_default();
    words(around, 0).take(4).any(|(_, word)| {
        let found = before == MOV_X8_SIGRETURN && word == SVC;
        before = word;
        found
    })
}

/// Start of the code at `code[at]` that calls `rt_sigreturn`, if it does.
pub fn signal_return_start(code: &[u8], at: usize) -> Option<usize> {
    let at = at & !3;
    let is_there = |start: &usize| {
        let words: Vec<u32> = words(code.get(*start..).unwrap_or_default(), 0)
            .take(2)
            .map(|(_, word)| word)
            .collect();
        words == [MOV_X8_SIGRETURN, SVC]
    };
    [at.checked_sub(4), Some(at)].into_iter().flatten().find(is_there)
}

/// New threads have their creator's link register: what follows the system call is not known by a zero.
pub fn follows_thread_start(_code: &[u8], _at: usize) -> bool {
    false
}

/// Bytes from a thread's descriptor up to where the thread pointer points, from the code of `pthread_self`: `bti c; mrs x0,
/// tpidr_el0; sub x0, x0, #size; ret`.
pub fn descriptor_size(code: &[u8]) -> Option<u32> {
    let mut words = words(code, 0).map(|(_, word)| word).filter(|word| *word != BTI_C);
    let from = words.next().filter(|word| is(MRS_TPIDR, *word))? & 31;
    match operation(words.next()?) {
        Operation::Add { to: 0, from: base, by } if u32::from(base) == from => u32::try_from(-by).ok(),
        _ => None,
    }
}

/// The unsigned 12-bit immediate of an addition, with its shift.
fn immediate12(word: u32) -> u64 {
    let value = u64::from(word >> 10 & 0xfff);
    if word >> 22 & 1 == 1 { value << 12 } else { value }
}

/// What an instruction does to general registers and memory. Registers by DWARF number: 31 is the stack pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// None of them is changed.
    Nothing,
    /// Adds a constant.
    Add {
        to: u8,
        from: u8,
        by: i64,
    },
    /// Loads or stores registers, one after the other, at base + offset.
    Access(MemoryAccess),
    /// Sets registers, a bit set, to something else.
    Sets(u32),
    Call,
}

/// An access to memory at an address that is a register plus a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryAccess {
    pub is_load: bool,
    /// `None`: the zero register or a vector register.
    pub registers: [Option<u8>; 2],
    /// Of how many registers, and bytes of each.
    pub count: usize,
    pub size: u8,
    pub base: u8,
    /// From the base as it was before.
    pub offset: i64,
    /// Added to the base.
    pub moves: i64,
}

/// A general register; `None` for the zero register.
fn general(number: u32) -> Option<u8> {
    Some((number & 31) as u8).filter(|r| *r != 31)
}

fn set(number: Option<u8>) -> Operation {
    number.map_or(Operation::Nothing, |r| Operation::Sets(1 << r))
}

/// What an instruction does.
pub fn operation(word: u32) -> Operation {
    let (to, from) = ((word & 31) as u8, (word >> 5 & 31) as u8);
    if is(HINT, word) {
        return Operation::Nothing;
    }
    match flow(0, word).0 {
        Flow::Next => {}
        Flow::Call => return Operation::Call,
        _ => return Operation::Nothing,
    }
    // add, sub with an immediate, of 64 bits: register 31 is the stack pointer
    if is((0xbf80_0000, 0x9100_0000), word) || is((0xff80_0000, 0xd100_0000), word) {
        let by = immediate12(word) as i64;
        let by = if word >> 30 & 1 == 1 { -by } else { by };
        return Operation::Add { to, from, by };
    }
    // mov of 64 bits between registers (orr with the zero register)
    if is((0xffe0_ffe0, 0xaa00_03e0), word) {
        return match (general(word), general(word >> 16)) {
            (Some(to), Some(from)) => Operation::Add { to, from, by: 0 },
            (to, _) => set(to),
        };
    }
    match word >> 25 & 0xf {
        0b0100 | 0b0110 | 0b1100 | 0b1110 => memory(word),
        // Data processing with an immediate: logical ones set the stack pointer, adr, moves and others do not.
        0b1000 | 0b1001 => match word >> 23 & 7 {
            // and, orr, eor; not ands
            0b100 if word >> 29 & 3 != 3 => Operation::Sets(1 << to),
            // 32-bit and tagged additions; those that set flags use the zero register
            0b010 | 0b011 if word >> 29 & 1 == 0 => Operation::Sets(1 << to),
            _ => set(general(word)),
        },
        // ... with registers: only additions of an extended register set the stack pointer.
        0b0101 | 0b1101 => {
            // ccmp, ccmn, and the flag instructions set flags only.
            if is((0x1fe0_0000, 0x1a40_0000), word) || is((0x1fe0_7c00, 0x1a00_0400), word) {
                return Operation::Nothing;
            }
            if is((0x3fe0_0000, 0x0b20_0000), word) {
                return Operation::Sets(1 << to);
            }
            set(general(word))
        }
        // Vector instructions with a general register as result: conversions, fmov, umov, smov.
        0b0111 | 0b1111 => {
            let converts = is((0x7f20_fc00, 0x1e20_0000), word) || is((0x7f20_0000, 0x1e00_0000), word);
            let is_result = converts && matches!(word >> 16 & 7, 0 | 1 | 4 | 5 | 6);
            let moves = is((0xbfe0_fc00, 0x0e00_3c00), word) || is((0xbfe0_fc00, 0x0e00_2c00), word);
            if is_result || moves {
                set(general(word))
            } else {
                Operation::Nothing
            }
        }
        // Scalable vectors: addvl, addpl may set the stack pointer; counts set other registers.
        0b0010 if is((0xffa0_f800, 0x0420_5000), word) => Operation::Sets(1 << to),
        0b0010 if is((0xff20_f000, 0x0420_e000), word) => set(general(word)),
        // System instructions: svc returns in x0; mrs
        0b1010 | 0b1011 if is((0xffe0_001f, 0xd400_0001), word) => Operation::Sets(1),
        0b1010 | 0b1011 if is((0xffe0_0000, 0xd520_0000), word) => set(general(word)),
        _ => Operation::Nothing,
    }
}

/// What a load or store does.
fn memory(word: u32) -> Operation {
    let is_vector = word >> 26 & 1 == 1;
    let (first, base) = (word, (word >> 5 & 31) as u8);
    let register = |number: u32| general(number).filter(|_| !is_vector);
    // Pairs.
    if is((0x3a00_0000, 0x2800_0000), word) {
        let size = match (is_vector, word >> 30) {
            (false, 0b10) | (true, 0b01) => 8,
            (true, 0b10) => 16,
            _ => 4,
        };
        let by = signed(word, 15, 7) * i64::from(size);
        let (offset, moves) = match word >> 23 & 3 {
            0b01 => (0, by),
            0b11 => (by, by),
            _ => (by, 0),
        };
        return Operation::Access(MemoryAccess {
            is_load: word >> 22 & 1 == 1,
            registers: [register(first), register(word >> 10)],
            count: 2,
            size,
            base,
            offset,
            moves,
        });
    }
    let is_load = match (is_vector, word >> 22 & 3) {
        (true, opcode) => opcode & 1 == 1,
        (false, opcode) => opcode != 0,
    };
    let size = match (is_vector, word >> 30, word >> 23 & 1) {
        (true, _, 1) => 16,
        (_, size, _) => 1 << size,
    };
    let single = |offset: i64, moves: i64| MemoryAccess {
        is_load,
        registers: [register(first), None],
        count: 1,
        size,
        base,
        offset,
        moves,
    };
    // prfm loads nothing.
    let is_hint = !is_vector && word >> 30 == 3 && word >> 22 & 3 == 2;
    if is((0x3b00_0000, 0x3900_0000), word) {
        if is_hint {
            return Operation::Nothing;
        }
        return Operation::Access(single(i64::from(word >> 10 & 0xfff) * i64::from(size), 0));
    }
    if is((0x3b20_0000, 0x3800_0000), word) {
        let offset = signed(word, 12, 9);
        return match word >> 10 & 3 {
            0b01 => Operation::Access(single(0, offset)),
            0b11 => Operation::Access(single(offset, offset)),
            _ if is_hint => Operation::Nothing,
            _ => Operation::Access(single(offset, 0)),
        };
    }
    let all = |numbers: [u32; 3]| {
        let bits = numbers.into_iter().filter_map(general).fold(0, |set, r| set | 1 << r);
        Operation::Sets(bits)
    };
    // Literals, and register offsets: the address of a store is not known, and not on the frame.
    if is((0x3b00_0000, 0x1800_0000), word) || is((0x3b20_0c00, 0x3820_0800), word) {
        return if is_load && !is_vector || is((0x3f00_0000, 0x1800_0000), word) {
            set(general(first))
        } else {
            Operation::Nothing
        };
    }
    // Vectors of several registers, which may move their base.
    if is((0xbe00_0000, 0x0c00_0000), word) {
        return if word >> 23 & 1 == 1 {
            Operation::Sets(1 << base)
        } else {
            Operation::Nothing
        };
    }
    // Exclusive, atomic and authenticated accesses, and copies of memory: all registers that any of them sets.
    if is_vector {
        Operation::Nothing
    } else {
        all([first, word >> 16, word >> 10])
    }
}

#[cfg(test)]
mod tests;
