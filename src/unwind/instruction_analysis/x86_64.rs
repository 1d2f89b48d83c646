//! What instructions of x86-64 do to registers and stack, decoded by iced-x86.

use iced_x86::{Code, Decoder, DecoderOptions, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register};

use super::{DataflowState, Stack, SymbolicValue, Unknown};
use crate::arch::{self, FP, FUNCTION_ALIGNMENT, Flow, SP};

pub use iced_x86::Instruction;

/// Registers that a call may change (System V ABI AMD64, figure 3.4), by DWARF number.
pub const SCRATCH: [usize; 9] = [0, 1, 2, 4, 5, 8, 9, 10, 11];

/// What finding out what instructions do needs.
pub struct Effects(InstructionInfoFactory);

impl Default for Effects {
    fn default() -> Effects {
        Effects(InstructionInfoFactory::new())
    }
}

/// The instructions of `code`, at most `max`.
pub fn decode(code: &[u8], start: u64, max: usize) -> Vec<Instruction> {
    let mut decoder = Decoder::with_ip(64, code, start, DecoderOptions::NONE);
    let next = || decoder.can_decode().then(|| decoder.decode());
    std::iter::from_fn(next).take(max).collect()
}

pub fn address(i: &Instruction) -> u64 {
    i.ip()
}

/// Address of the instruction that follows in memory.
pub fn end(i: &Instruction) -> u64 {
    i.next_ip()
}

/// Where execution continues, and the target of a direct jump.
pub fn flow(i: &Instruction) -> (Flow, Option<u64>) {
    (arch::flow(i), Some(i.near_branch_target()))
}

/// Bytes of arguments that a return takes off the stack, besides the return address.
pub fn popped_by_return(i: &Instruction) -> i32 {
    if i.op_count() == 1 {
        i.immediate(0) as u16 as i32
    } else {
        0
    }
}

/// Is it padding between functions?
pub fn is_padding(i: &Instruction) -> bool {
    matches!(i.mnemonic(), Mnemonic::Nop | Mnemonic::Int3)
}

/// The state at the start of a procedure linkage table or of one of its stubs, recognized by their instructions (System V
/// ABI AMD64, figure 5.2): linkers emit no symbols for them, and some no table.
pub(super) fn start_state(code: &[Instruction], n: usize) -> Option<DataflowState> {
    let stub =
        |n: usize, kind: Code| (code.get(n)).is_some_and(|i| i.code() == kind && i.memory_base() == Register::RIP);
    let first = code.get(n).filter(|i| i.ip() % FUNCTION_ALIGNMENT == 0)?;
    let mut state = DataflowState::entry();
    if stub(n, Code::Push_rm64) && stub(n + 1, Code::Jmp_rm64) {
        // The other stubs jump to the first one, after the return address and their number were pushed.
        state.regs[SP] = Stack(0, -16);
        return Some(state);
    }
    (stub(n, Code::Jmp_rm64) || first.code() == Code::Endbr64).then_some(state)
}

/// Numbers of the system calls that start a thread: clone, clone3 (arch/x86/entry/syscalls/syscall_64.tbl, Linux 6.18).
const CLONE: [u64; 2] = [56, 435];
/// Instructions between the one that sets a system call's number and the call; from there to the jump of the new
/// thread; and of the code that it runs up to its end.
const SETUP: usize = 16;
const BRANCH: usize = 4;
const START: usize = 32;

/// Code that only a new thread runs, from `clone` to the system call that ends the thread: C libraries have it in
/// assembler (musl 1.2.3, src/thread/x86_64/clone.s), and not always with a table. What returns from there belongs to a
/// copy of the process, not to a new thread.
pub fn thread_starts(code: &[Instruction]) -> Vec<(u64, u64)> {
    let calls = (0..code.len()).filter(|n| code[*n].mnemonic() == Mnemonic::Syscall);
    let clones = calls.filter(|n| {
        let before = code[n.saturating_sub(SETUP)..*n].iter().rev();
        let mut sets = before.filter(|i| i.op_count() > 0 && i.op0_kind() == OpKind::Register);
        let last = sets.find(|i| i.op0_register().full_register() == Register::RAX);
        last.is_some_and(|i| i.mnemonic() == Mnemonic::Mov && is_number(i))
    });
    clones.filter_map(|n| thread_start(code, n + 1)).collect()
}

/// Does the instruction load the number of such a call?
fn is_number(i: &Instruction) -> bool {
    use OpKind::{Immediate8, Immediate32, Immediate32to64, Immediate64};
    matches!(i.op1_kind(), Immediate8 | Immediate32 | Immediate32to64 | Immediate64) && CLONE.contains(&i.immediate(1))
}

/// First and last address of what a new thread runs, from the instruction `n` after the system call on.
fn thread_start(code: &[Instruction], n: usize) -> Option<(u64, u64)> {
    let rest = code.get(n..)?;
    let (at, jump) = rest.iter().enumerate().take(BRANCH).find(|(_, i)| {
        matches!(i.mnemonic(), Mnemonic::Je | Mnemonic::Jne)
            || !matches!(arch::flow(i), Flow::Next | Flow::ConditionalJump)
    })?;
    // The result is zero in the new thread.
    let first = match jump.mnemonic() {
        Mnemonic::Jne => n + at + 1,
        Mnemonic::Je => code
            .binary_search_by_key(&jump.near_branch_target(), Instruction::ip)
            .ok()?,
        _ => return None,
    };
    let mut called = false;
    for (at, i) in code.iter().enumerate().skip(first).take(START) {
        match arch::flow(i) {
            _ if called && i.mnemonic() == Mnemonic::Syscall => {
                let halt = code.get(at + 1).filter(|next| next.mnemonic() == Mnemonic::Hlt);
                return Some((code[first].ip(), halt.unwrap_or(i).next_ip()));
            }
            Flow::Call => called |= i.mnemonic() == Mnemonic::Call,
            Flow::Next => {}
            _ => return None,
        }
    }
    None
}

/// DWARF number of a 64-bit register.
fn number(register: Register) -> Option<usize> {
    use Register::*;
    let all = [
        RAX, RDX, RCX, RBX, RSI, RDI, RBP, RSP, R8, R9, R10, R11, R12, R13, R14, R15,
    ];
    (register as u32).checked_sub(RAX as u32).filter(|&i| i < 16)?;
    all.iter().position(|&r| r == register)
}

/// The address of a memory operand, if it is a register plus a constant.
fn operand(state: &DataflowState, i: &Instruction) -> SymbolicValue {
    let plain = i.memory_index() == Register::None && i.segment_prefix() == Register::None;
    match number(i.memory_base()) {
        Some(base) if plain => state.regs[base].plus(i.memory_displacement64() as i64),
        _ => Unknown,
    }
}

/// Effect of one instruction on the state. `base` names a stack pointer whose distance from the CFA becomes unknown.
pub(super) fn step(state: &mut DataflowState, i: &Instruction, base: u32, effects: &mut Effects) {
    use OpKind::{Immediate8to64, Immediate32to64, Memory};
    let register = |op: u32| {
        (i.op_kind(op) == OpKind::Register)
            .then(|| number(i.op_register(op)))
            .flatten()
    };
    let constant = || matches!(i.op1_kind(), Immediate8to64 | Immediate32to64).then(|| i.immediate(1) as i64);
    let target = if i.op_count() > 0 { register(0) } else { None };
    match i.mnemonic() {
        Mnemonic::Push if i.stack_pointer_increment() == -8 => {
            let value = register(0).map_or(Unknown, |r| state.regs[r]);
            state.regs[SP] = state.regs[SP].plus(-8);
            state.store(state.regs[SP], 8, value);
        }
        Mnemonic::Pop if i.stack_pointer_increment() == 8 => {
            let value = state.load(state.regs[SP]);
            state.regs[SP] = state.regs[SP].plus(8);
            match target {
                Some(r) => state.regs[r] = value,
                None => state.store(operand(state, i), 8, Unknown),
            }
        }
        Mnemonic::Leave => {
            state.regs[SP] = state.regs[FP];
            state.regs[FP] = state.load(state.regs[SP]);
            state.regs[SP] = state.regs[SP].plus(8);
        }
        Mnemonic::Mov if target.is_some() && register(1).is_some() => {
            if let (Some(to), Some(from)) = (target, register(1)) {
                state.regs[to] = state.regs[from];
            }
        }
        Mnemonic::Mov if target.is_some() && i.op1_kind() == Memory => {
            if let Some(to) = target {
                state.regs[to] = state.load(operand(state, i));
            }
        }
        Mnemonic::Mov if i.op0_kind() == Memory => {
            let value = register(1).map_or(Unknown, |r| state.regs[r]);
            state.store(operand(state, i), i.memory_size().size(), value);
        }
        Mnemonic::Lea if target.is_some() => {
            if let Some(to) = target {
                state.regs[to] = operand(state, i);
            }
        }
        Mnemonic::Add | Mnemonic::Sub if target.is_some() && constant().is_some() => {
            if let (Some(r), Some(n)) = (target, constant()) {
                state.regs[r] = state.regs[r].plus(if i.mnemonic() == Mnemonic::Sub {
                    n.wrapping_neg()
                } else {
                    n
                });
            }
        }
        Mnemonic::Call => state.call(),
        Mnemonic::Ret => {} // What follows in memory is entered in another way.
        _ => {
            let used = effects.0.info(i);
            for u in used.used_memory() {
                if writes(u.access()) && u.index() == Register::None {
                    let at = number(u.base()).map_or(Unknown, |b| state.regs[b].plus(u.displacement() as i64));
                    state.store(at, u.memory_size().size(), Unknown);
                }
            }
            for u in used.used_registers() {
                if writes(u.access())
                    && let Some(r) = number(u.register().full_register())
                {
                    state.regs[r] = Unknown;
                }
            }
        }
    }
    // `and $-32,%rsp`, `sub %rax,%rsp`: what is stored from here on can be found relative to the new value.
    if state.regs[SP] == Unknown {
        state.rebase(SP, base);
    }
}

fn writes(access: OpAccess) -> bool {
    !matches!(
        access,
        OpAccess::None | OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess
    )
}
