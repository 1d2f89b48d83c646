//! What instructions of aarch64 do to registers and stack.

use super::{DataflowState, Entry, SymbolicValue, Unknown};
use crate::arch::{self, Flow, GPRS, NOP, Operation, SP};

/// Registers that a call may change (AAPCS64, 6.1.1), by DWARF number: x0 to x18 and the link register.
pub const SCRATCH: [usize; 20] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 30];

/// An instruction and its address.
#[derive(Clone, Copy)]
pub struct Instruction {
    address: u64,
    word: u32,
}

/// Nothing: an instruction itself says what it does.
#[derive(Default)]
pub struct Effects;

/// The instructions of `code`, at most `max`.
pub fn decode(code: &[u8], start: u64, max: usize) -> Vec<Instruction> {
    let words = arch::words(code, start).take(max);
    words.map(|(address, word)| Instruction { address, word }).collect()
}

pub fn address(i: &Instruction) -> u64 {
    i.address
}

/// Address of the instruction that follows in memory.
pub fn end(i: &Instruction) -> u64 {
    i.address.wrapping_add(4)
}

/// Where execution continues, and the target of a direct jump.
pub fn flow(i: &Instruction) -> (Flow, Option<u64>) {
    arch::flow(i.address, i.word)
}

/// Bytes that a return takes off the stack: none.
pub fn popped_by_return(_: &Instruction) -> i32 {
    0
}

/// Is it padding between functions? (Zeros are no instruction.)
pub fn is_padding(i: &Instruction) -> bool {
    matches!(i.word, NOP | 0)
}

/// The state at a function's start, recognized by an instruction that is only used there. Stubs of the procedure linkage
/// table need nothing special: they leave stack and link register alone, and the first one saves it.
pub(super) fn start_state(code: &[Instruction], n: usize) -> Option<DataflowState> {
    code.get(n)
        .filter(|i| arch::is_entry(i.word))
        .map(|_| DataflowState::entry())
}

/// `mov x8, #N` for the system calls that start a thread: clone, clone3 (include/uapi/asm-generic/unistd.h, Linux
/// 6.18).
const CLONE: [u32; 2] = [0xd280_1b88, 0xd280_3668];
const SVC: u32 = 0xd400_0001;
/// Instructions between the one that sets a system call's number and the call; from there to the jump of the new
/// thread; and of the code that it runs up to its end.
const SETUP: usize = 16;
const BRANCH: usize = 4;
const START: usize = 32;

/// Code that only a new thread runs, from `clone` to the system call that ends the thread: C libraries have it in
/// assembler (musl 1.2.3, src/thread/aarch64/clone.s), and not always with a table. What returns from there belongs to
/// a copy of the process, not to a new thread.
pub fn thread_starts(code: &[Instruction]) -> Vec<(u64, u64)> {
    let calls = (0..code.len()).filter(|n| code[*n].word == SVC);
    let clones = calls.filter(|n| {
        code[n.saturating_sub(SETUP)..*n]
            .iter()
            .any(|i| CLONE.contains(&i.word))
    });
    clones.filter_map(|n| thread_start(code, n + 1)).collect()
}

/// First and last address of what a new thread runs, from the instruction `n` after the system call on.
fn thread_start(code: &[Instruction], n: usize) -> Option<(u64, u64)> {
    let rest = code.get(n..)?;
    let jump = rest.iter().take(BRANCH).find(|i| flow(i).0 != Flow::Next)?;
    // `cbz x0` or `cbz w0`: the result is zero in the new thread.
    let target = flow(jump).1.filter(|_| jump.word & 0x7f00_001f == 0x3400_0000)?;
    let first = code.binary_search_by_key(&target, address).ok()?;
    let mut called = false;
    for i in code.iter().skip(first).take(START) {
        match flow(i).0 {
            Flow::Call => called = true,
            Flow::Next if called && i.word == SVC => return Some((target, i.address.wrapping_add(4))),
            Flow::Next => {}
            _ => return None,
        }
    }
    None
}

/// Effect of one instruction on the state. `base` names a stack pointer whose distance from the CFA becomes unknown.
pub(super) fn step(state: &mut DataflowState, i: &Instruction, base: u32, _effects: &mut Effects) {
    match arch::operation(i.word) {
        Operation::Nothing => {}
        Operation::Add { to, from, by } => {
            state.regs[usize::from(to) % GPRS] = state.regs[usize::from(from) % GPRS].plus(by);
        }
        Operation::Access(access) => {
            let register = usize::from(access.base) % GPRS;
            let pointer = state.regs[register];
            let at = |n: usize| pointer.plus(access.offset + n as i64 * i64::from(access.size));
            let values: [SymbolicValue; 2] = std::array::from_fn(|n| state.load(at(n)));
            state.regs[register] = pointer.plus(access.moves);
            for (n, which) in access.registers.into_iter().enumerate().take(access.count) {
                let which = which.map(|r| usize::from(r) % GPRS);
                match (access.is_load, which) {
                    (true, Some(r)) => state.regs[r] = if access.size == 8 { values[n] } else { Unknown },
                    (true, None) => {}
                    (false, r) => {
                        let value = r.map_or(Unknown, |r| state.regs[r]);
                        state.store(at(n), access.size.into(), value);
                    }
                }
            }
        }
        Operation::Sets(registers) => {
            for (r, value) in state.regs.iter_mut().enumerate() {
                if registers >> r & 1 == 1 {
                    *value = Unknown;
                }
            }
        }
        Operation::Call => state.call(),
    }
    // `and sp, x9, #-64`, `sub sp, sp, x0`: what is stored from here on can be found relative to the new value.
    if matches!(state.regs[SP], Unknown | Entry(_)) {
        state.rebase(SP, base);
    }
}
