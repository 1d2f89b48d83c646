//! Instructions of x86-64, decoded by iced-x86.

use std::cell::RefCell;

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction as Decoded, InstructionInfoFactory, Mnemonic, OpAccess,
    OpKind, Register,
};

use super::{Callee, Flow, Instruction, Registers, Value};

/// `mov $15,%eax; syscall` and `mov $15,%rax; syscall` (`rt_sigreturn`: arch/x86/entry/syscalls/syscall_64.tbl, Linux 6.18).
pub const SIGNAL_RETURNS: &[&[u8]] = &[b"\xb8\x0f\0\0\0\x0f\x05", b"\x48\xc7\xc0\x0f\0\0\0\x0f\x05"];

/// Bytes of call instructions, and of instructions that put a constant into a register.
const CALLS: std::ops::RangeInclusive<usize> = 2..=9;
const LOADS: std::ops::RangeInclusive<usize> = 5..=10;

thread_local! {
    static EFFECTS: RefCell<InstructionInfoFactory> = RefCell::new(InstructionInfoFactory::new());
}

fn decode_one(bytes: &[u8], address: u64) -> Decoded {
    Decoder::with_ip(64, bytes, address, DecoderOptions::NONE).decode()
}

/// The instruction of exactly so many bytes that ends with `bytes`, at `end`.
fn last(bytes: &[u8], length: usize, end: u64) -> Option<Decoded> {
    let start = bytes.len().checked_sub(length)?;
    let i = decode_one(&bytes[start..], end.wrapping_sub(length as u64));
    (!i.is_invalid() && i.len() == length).then_some(i)
}

/// The constant address of a memory operand.
fn constant_address(i: &Decoded) -> Option<u64> {
    let is_constant = matches!(i.memory_base(), Register::RIP | Register::None)
        && i.memory_index() == Register::None
        && matches!(i.segment_prefix(), Register::None | Register::DS | Register::CS);
    is_constant.then(|| i.memory_displacement64())
}

fn branch_target(i: &Decoded) -> Option<u64> {
    let is_near = |op| matches!(i.op_kind(op), OpKind::NearBranch32 | OpKind::NearBranch64);
    (0..i.op_count()).any(is_near).then(|| i.near_branch_target())
}

fn number(register: Register) -> usize {
    register.full_register().number()
}

/// Register and value, if the instruction puts a known one into a general register.
fn loaded(i: &Decoded) -> Option<(usize, Value)> {
    (i.op_count() == 2 && i.op0_kind() == OpKind::Register && i.op0_register().is_gpr()).then_some(())?;
    let register = i.op0_register();
    let value = match (i.mnemonic(), i.op1_kind()) {
        (Mnemonic::Mov, OpKind::Memory) if register.is_gpr64() => Value::Slot(constant_address(i)?),
        (Mnemonic::Mov, OpKind::Immediate64 | OpKind::Immediate32to64 | OpKind::Immediate32) => {
            Value::Constant(i.immediate(1))
        }
        (Mnemonic::Lea, OpKind::Memory) if register.is_gpr64() => Value::Constant(constant_address(i)?),
        _ => return None,
    };
    Some((number(register), value))
}

/// What the calls that may end with these bytes, at `end`, call.
pub fn calls_before(before: &[u8], end: u64) -> Vec<Callee> {
    let mut found = Vec::new();
    for length in CALLS {
        let Some(i) = last(before, length, end) else { continue };
        let callee = match i.flow_control() {
            FlowControl::Call => branch_target(&i).map(Callee::Direct),
            FlowControl::IndirectCall if i.is_call_near_indirect() => Some(match i.op0_kind() {
                OpKind::Register => {
                    let before = &before[..before.len() - length];
                    before_register_call(before, end.wrapping_sub(length as u64), number(i.op0_register()))
                }
                _ => constant_address(&i).map_or(Callee::Unknown, Callee::Slot),
            }),
            _ => None,
        };
        found.extend(callee.filter(|callee| !found.contains(callee)));
    }
    found
}

/// What a call of this register calls, if the instruction before it says so.
fn before_register_call(before: &[u8], end: u64, register: usize) -> Callee {
    let mut loads = LOADS.filter_map(|length| loaded(&last(before, length, end)?));
    // The longest: a shorter one may be a part of it.
    let value = loads.rfind(|(to, _)| *to == register);
    value.map_or(Callee::Unknown, |(_, value)| Callee::Register(value))
}

/// The instruction at `address`.
pub fn decode(bytes: &[u8], address: u64, registers: &mut Registers) -> Instruction {
    let i = decode_one(bytes, address);
    let pushed = registers.pushed;
    let is_push = i.mnemonic() == Mnemonic::Push && i.op0_kind() == OpKind::Register;
    let address = match registers.get(number(i.op0_register())) {
        Some(Value::Constant(address)) if is_push => Some(address),
        _ => None,
    };
    registers.pushed = i.mnemonic() == Mnemonic::Push
        || i.mnemonic() == Mnemonic::Mov
            && i.op0_kind() == OpKind::Memory
            && i.memory_base() == Register::RSP
            && i.memory_index() == Register::None
            && i.memory_displacement64() == 0;
    let flow = flow(&i, pushed, registers);
    match flow {
        Flow::Call(_) => *registers = Registers::default(),
        _ => update(&i, registers),
    }
    Instruction {
        length: i.len() as u64,
        flow,
        pushed: address,
    }
}

fn update(i: &Decoded, registers: &mut Registers) {
    let value = loaded(i);
    EFFECTS.with_borrow_mut(|effects| {
        for used in effects.info(i).used_registers() {
            let is_read = matches!(
                used.access(),
                OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess
            );
            if !is_read && used.register().is_gpr() {
                registers.set(number(used.register()), None);
            }
        }
    });
    if let Some((register, value)) = value {
        registers.set(register, Some(value));
    }
}

fn flow(i: &Decoded, pushed: bool, registers: &Registers) -> Flow {
    // User code may not stop the CPU: it ends there.
    if i.code() == Code::INVALID || matches!(i.mnemonic(), Mnemonic::Hlt | Mnemonic::Int3) {
        return Flow::End;
    }
    match (i.flow_control(), branch_target(i)) {
        (FlowControl::Next | FlowControl::Interrupt, _) => Flow::Next,
        (FlowControl::ConditionalBranch | FlowControl::XbeginXabortXend, Some(to)) => Flow::Branch(to),
        (FlowControl::XbeginXabortXend, None) => Flow::Next,
        (FlowControl::UnconditionalBranch, Some(to)) => Flow::Jump(to),
        (FlowControl::IndirectBranch, _) => match i.op0_kind() {
            OpKind::Register => Flow::JumpRegister(registers.get(number(i.op0_register()))),
            _ => constant_address(i).map_or(Flow::JumpRegister(None), Flow::JumpSlot),
        },
        (FlowControl::Call | FlowControl::IndirectCall, to) => Flow::Call(to),
        // Retpolines and context switches return to an address that they have put on the stack.
        (FlowControl::Return, _) if pushed => Flow::JumpRegister(None),
        (FlowControl::Return, _) => Flow::Return,
        _ => Flow::End,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_found_before_return_addresses() {
        let check = |code: &[u8], expected: &[Callee]| {
            let end = 0x1000 + code.len() as u64;
            let found = calls_before(code, end);
            assert_eq!(found, expected, "{code:x?}");
        };
        use Callee::{Direct, Register, Slot, Unknown};
        use Value::Constant;
        check(b"\x90\x90\xe8\x10\0\0\0", &[Direct(0x1017)]);
        check(b"\x90\xff\xd0", &[Unknown]);
        check(b"\x90\x41\xff\xd4", &[Unknown]);
        check(b"\x90\xff\x50\x18", &[Unknown]);
        check(b"\xff\x15\x10\0\0\0", &[Slot(0x1016)]);
        check(b"\x64\xff\x14\x25\x10\0\0\0", &[Slot(0x10), Unknown]); // without its prefix, another call
        check(b"\x48\x8d\x05\x10\0\0\0\xff\xd0", &[Register(Constant(0x1017))]);
        check(
            b"\x49\xbb\x88\x77\x66\x55\0\0\0\0\x41\xff\xd3",
            &[Unknown, Register(Constant(0x5566_7788))],
        );
        check(b"\x48\x8b\x05\x10\0\0\0\xff\xd0", &[Register(Value::Slot(0x1017))]);
        check(b"\x48\x8d\x05\x10\0\0\0\xff\xd1", &[Unknown]); // another register
        for other in [
            &b"\x90\x90\x90\x90\x90\x90\x90"[..],
            b"\xff\xe0",
            b"\xff\x25\x10\0\0\0",
            b"\xe9\0\0\0\0",
            b"",
            b"\xd0",
        ] {
            check(other, &[]);
        }
    }

    #[test]
    fn flow_of_instructions() {
        let flows = |code: &[u8]| {
            let (mut registers, mut at, mut flows) = (Registers::default(), 0, Vec::new());
            while at < code.len() {
                let i = decode(&code[at..], 0x1000 + at as u64, &mut registers);
                flows.push(i.flow);
                at += i.length as usize;
            }
            flows
        };
        use Flow::{Branch, Call, End, Jump, JumpRegister, JumpSlot, Next, Return};
        assert_eq!(
            flows(b"\xf3\x0f\x1e\xfa\xf2\xff\x25\x10\0\0\0"),
            [Next, JumpSlot(0x101b)]
        ); // endbr64; bnd jmp
        assert_eq!(flows(b"\x74\x02\xeb\xfe"), [Branch(0x1004), Jump(0x1002)]);
        assert_eq!(flows(b"\xe8\0\0\0\0\xff\xd0"), [Call(Some(0x1005)), Call(None)]);
        let constant = JumpRegister(Some(Value::Constant(0x1017)));
        assert_eq!(flows(b"\x48\x8d\x05\x10\0\0\0\xff\xe0"), [Next, constant]);
        // Changed in between: xor %eax,%eax
        assert_eq!(
            flows(b"\x48\x8d\x05\x10\0\0\0\x31\xc0\xff\xe0"),
            [Next, Next, JumpRegister(None)]
        );
        let slot = JumpRegister(Some(Value::Slot(0x1017)));
        assert_eq!(flows(b"\x48\x8b\x05\x10\0\0\0\x3e\xff\xe0"), [Next, slot]); // notrack jmp
        assert_eq!(flows(b"\xc3"), [Return]);
        assert_eq!(flows(b"\x48\x89\x04\x24\xc3"), [Next, JumpRegister(None)]); // mov %rax,(%rsp); ret
        assert_eq!(flows(b"\x50\xc3"), [Next, JumpRegister(None)]);
        assert_eq!(flows(b"\x0f\x0b\xf4\xcc"), [End; 3]);
    }
}
