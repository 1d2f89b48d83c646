//! Machine code of x86-64, decoded by iced-x86.

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Mnemonic, OpKind, Register};

use crate::arch::{Flow, Instruction};

/// What compilers and assemblers align functions to, bytes.
pub const FUNCTION_ALIGNMENT: u64 = 16;

/// The instructions of `code`, which begins at `address`. Ends before an instruction that is cut off.
pub fn instructions(code: &[u8], address: u64) -> impl Iterator<Item = Instruction> + '_ {
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    std::iter::from_fn(move || {
        let i = decoder.can_decode().then(|| decoder.decode())?;
        Some(Instruction {
            address: i.ip(),
            length: i.len() as u8,
            flow: flow(&i),
            target: Some(i.near_branch_target()).filter(|_| is_direct(&i)),
        })
    })
}

fn is_direct(i: &iced_x86::Instruction) -> bool {
    (0..i.op_count()).any(|op| {
        matches!(
            i.op_kind(op),
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
        )
    })
}

/// Where execution continues after an instruction.
pub fn flow(i: &iced_x86::Instruction) -> Flow {
    // User code may not stop the CPU: it ends there.
    if matches!(i.mnemonic(), Mnemonic::Int3 | Mnemonic::Hlt) || i.code() == Code::INVALID {
        return Flow::Trap;
    }
    match i.flow_control() {
        FlowControl::Next | FlowControl::Interrupt => Flow::Next,
        FlowControl::ConditionalBranch | FlowControl::XbeginXabortXend => Flow::ConditionalJump,
        FlowControl::UnconditionalBranch => Flow::Jump,
        FlowControl::IndirectBranch => Flow::IndirectJump,
        FlowControl::Call | FlowControl::IndirectCall => Flow::Call,
        FlowControl::Return => Flow::Return,
        FlowControl::Exception => Flow::Trap,
    }
}

/// Addresses of code or data that this code loads into registers.
pub fn loaded_addresses(code: &[u8], address: u64) -> Vec<u64> {
    Decoder::with_ip(64, code, address, DecoderOptions::NONE)
        .into_iter()
        .filter(|i| i.mnemonic() == Mnemonic::Lea && i.memory_base() == Register::RIP)
        .map(|i| i.memory_displacement64())
        .collect()
}

/// Bytes from the start of `code` up to the `hlt` that ends code which never returns; `None` if it does return, or jumps.
pub fn extent_to_halt(code: &[u8], address: u64) -> Option<u64> {
    for i in &mut Decoder::with_ip(64, code, address, DecoderOptions::NONE) {
        if i.is_invalid() || matches!(i.mnemonic(), Mnemonic::Ret | Mnemonic::Jmp) {
            break;
        }
        if i.mnemonic() == Mnemonic::Hlt {
            return Some(i.next_ip() - address);
        }
    }
    None
}

/// Places and targets of what look like direct calls in `code`. Not every `E8` byte is a call: only the rare aligned target
/// counts.
pub fn calls(code: &[u8], address: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
    code.windows(5).enumerate().filter_map(move |(i, window)| {
        let &[0xe8, a, b, c, d] = window else { return None };
        let by = i32::from_le_bytes([a, b, c, d]);
        let site = address.wrapping_add(i as u64);
        let target = site.wrapping_add(5).wrapping_add(i64::from(by) as u64);
        target.is_multiple_of(FUNCTION_ALIGNMENT).then_some((site, target))
    })
}

/// Places and targets of what look like instructions that load the address of a function, `lea target(%rip)`, which is
/// then called through a pointer. Labels inside functions are loaded like that, too: only targets count that are
/// aligned and follow a return or padding.
pub fn loaded_functions(code: &[u8], address: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
    code.windows(7).enumerate().filter_map(move |(i, window)| {
        let &[0x48 | 0x4c, 0x8d, operands, a, b, c, d] = window else {
            return None;
        };
        let by = i32::from_le_bytes([a, b, c, d]);
        let site = address.wrapping_add(i as u64);
        let target = site.wrapping_add(7).wrapping_add(i64::from(by) as u64);
        let before = usize::try_from(target.wrapping_sub(address)).ok()?.checked_sub(1)?;
        // Nops of several bytes end with zeros.
        let ends = matches!(code.get(before).copied(), Some(0xc3 | 0xcc | NOP | 0));
        (operands & 0xc7 == 5 && target.is_multiple_of(FUNCTION_ALIGNMENT) && ends).then_some((site, target))
    })
}

/// Do these bytes end with a call instruction? `E8 rel32`, or `FF /2` with any operand (Intel SDM volume 2, CALL).
pub fn ends_with_call(bytes: &[u8]) -> bool {
    let n = bytes.len();
    let at = |back: usize| n.checked_sub(back).map(|i| bytes[i]);
    if at(5) == Some(0xe8) {
        return true;
    }
    (2..=7).any(|len| {
        let (Some(0xff), Some(modrm)) = (at(len), at(len - 1)) else {
            return false;
        };
        let sib = usize::from(modrm & 7 == 4);
        let operand = match modrm >> 6 {
            0 if modrm & 7 == 5 => 4,
            0 if sib == 1 && len >= 3 && at(len - 2).is_some_and(|s| s & 7 == 5) => 5,
            0 => sib,
            1 => 1 + sib,
            2 => 4 + sib,
            _ => 0,
        };
        modrm >> 3 & 7 == 2 && len == 2 + operand
    })
}

/// Targets of the calls that these bytes may end with, which end at `end`; `None`: one that is computed. The lengths of
/// instructions are only known forward, so that there may be two.
pub fn calls_before(bytes: &[u8], end: u64) -> impl Iterator<Item = Option<u64>> {
    let tail = |n: usize| bytes.len().checked_sub(n).and_then(|from| bytes.get(from..));
    let word = |b: &[u8]| b.first_chunk::<4>().map(|w| i64::from(i32::from_le_bytes(*w)));
    let direct = tail(5).filter(|call| call[0] == 0xe8).and_then(|call| word(&call[1..]));
    let direct = direct.map(|by| Some(end.wrapping_add_signed(by)));
    // The computed one: `FF /2`, which is no end of a direct call.
    let computed = direct.is_none_or(|_| tail(2).is_some_and(|call| call[0] == 0xff && call[1] >> 3 == 0b11010));
    let computed = (computed && ends_with_call(bytes)).then(|| loaded_before_call(bytes, end));
    direct.into_iter().chain(computed)
}

/// The constant that the instruction before a call loads into the register that the call is through: `mov $N,%r; call *%r`,
/// or `lea N(%rip),%r; call *%r`.
fn loaded_before_call(bytes: &[u8], end: u64) -> Option<u64> {
    let (rest, call) = bytes.split_at_checked(bytes.len().checked_sub(2)?)?;
    let register = call[1].checked_sub(0xd0).filter(|r| call[0] == 0xff && *r < 8)?;
    let (rest, high) = match rest.split_last() {
        Some((0x41, rest)) => (rest, 1),
        _ => (rest, 0),
    };
    let from = |n: usize| rest.len().checked_sub(n).and_then(|from| rest.get(from..));
    if let Some([rex, opcode, constant @ ..]) = from(10)
        && (*rex, *opcode) == (0x48 | high, 0xb8 | register)
    {
        return constant.first_chunk().map(|c| u64::from_le_bytes(*c));
    }
    let at = end.wrapping_sub(2 + u64::from(high));
    match from(7)? {
        [rex, 0x8d, modrm, by @ ..] if (*rex, *modrm) == (0x48 | high << 2, 5 | register << 3) => {
            let by = i32::from_le_bytes(*by.first_chunk()?);
            Some(at.wrapping_add_signed(by.into()))
        }
        _ => None,
    }
}

/// `mov $15,%eax; syscall` and `mov $15,%rax; syscall`: the call of `rt_sigreturn`, which returns nowhere.
const SIGNAL_RETURNS: [&[u8]; 2] = [b"\xb8\x0f\0\0\0\x0f\x05", b"\x48\xc7\xc0\x0f\0\0\0\x0f\x05"];
const NOP: u8 = 0x90;

/// Does `code[at]` belong to the code that signal handlers return to? A `nop` before it does (musl 1.2.3,
/// src/signal/x86_64/restore.s): return addresses are looked up one byte earlier.
pub fn is_signal_return(code: &[u8], at: usize) -> bool {
    SIGNAL_RETURNS.iter().any(|whole| {
        let first = (at + 1).saturating_sub(whole.len());
        (first..=at + 1).any(|start| {
            let found = code.get(start..).is_some_and(|rest| rest.starts_with(whole));
            found && (start <= at || code.get(at) == Some(&NOP))
        })
    })
}

/// Start of the code at `code[at]` that calls `rt_sigreturn`, if it does.
pub fn signal_return_start(code: &[u8], at: usize) -> Option<usize> {
    let is_there = |start: &usize| {
        let whole = SIGNAL_RETURNS.iter().find(|whole| code[*start..].starts_with(whole));
        whole.is_some_and(|whole| at < start + whole.len())
    };
    (at.saturating_sub(8)..=at.min(code.len())).find(is_there)
}

/// `mov $435,%eax; syscall` and the same with 56: clone3 and clone (arch/x86/entry/syscalls/syscall_64.tbl, Linux 6.18).
const THREAD_STARTS: [&[u8]; 2] = [b"\xb8\xb3\x01\0\0\x0f\x05", b"\xb8\x38\0\0\0\x0f\x05"];
/// Bytes from there to the branch that a new thread takes: glibc 2.36, sysdeps/unix/sysv/linux/x86_64/clone3.S.
const COMMON: usize = 7;

/// Is `code[at]` run by both threads after a system call that starts one? Neither its table nor its instructions say that
/// nothing has called it in the new one.
pub fn follows_thread_start(code: &[u8], at: usize) -> bool {
    (0..COMMON).any(|past| {
        let before = at.checked_sub(past).and_then(|end| code.get(..end)).unwrap_or_default();
        THREAD_STARTS.iter().any(|start| before.ends_with(start))
    })
}

/// `None`: the thread pointer points to the descriptor.
pub fn descriptor_size(_code: &[u8]) -> Option<u32> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_recognized_by_their_bytes() {
        let calls: [&[u8]; 8] = [
            &[0xe8, 1, 2, 3, 4],
            &[0xff, 0xd0],
            &[0x41, 0xff, 0xd4],
            &[0xff, 0x14, 0xc5, 0, 0, 0, 0],
            &[0xff, 0x50, 0x18],
            &[0xff, 0x54, 0x24, 8],
            &[0xff, 0x15, 0, 0, 0, 0],
            &[0x42, 0xff, 0x94, 0xf8, 0, 1, 0, 0],
        ];
        for call in calls {
            assert!(ends_with_call(call), "{call:x?}");
        }
        for other in [
            &[0x90, 0x90, 0x90][..],
            &[0xff, 0xe0],
            &[0xff, 0x25, 0, 0, 0, 0],
            &[],
            &[0xd0],
            &[0xe8, 0, 0, 0],
        ] {
            assert!(!ends_with_call(other), "{other:x?}");
        }
    }

    #[test]
    fn targets_of_calls_before_an_address() {
        let check = |bytes: &[u8], expected: &[Option<u64>]| {
            let found: Vec<_> = calls_before(bytes, 0x2000).collect();
            assert_eq!(found, expected, "{bytes:x?}");
        };
        check(&[0xe8, 0, 1, 0, 0], &[Some(0x2100)]);
        check(&[0x90, 0xe8, 0, 0xff, 0xff, 0xff], &[Some(0x1f00)]);
        check(&[0xff, 0xd0], &[None]);
        check(&[0xff, 0x15, 0, 0, 0, 0], &[None]);
        check(
            &[0xe8, 1, 0, 0xff, 0xd0],
            &[Some(0x2000_u64.wrapping_sub(0x2f00_ffff)), None],
        ); // either of two
        // mov $0x1122334455,%rax; call *%rax, and the same with %r11 and with another register
        let constant = [0x55, 0x44, 0x33, 0x22, 0x11, 0, 0, 0];
        let with = |mov: &[u8], call: &[u8]| [mov, &constant, call].concat();
        check(&with(&[0x48, 0xb8], &[0xff, 0xd0]), &[Some(0x11_2233_4455)]);
        check(&with(&[0x49, 0xbb], &[0x41, 0xff, 0xd3]), &[Some(0x11_2233_4455)]);
        check(&with(&[0x48, 0xb8], &[0xff, 0xd1]), &[None]);
        check(&with(&[0x49, 0xb8], &[0xff, 0xd0]), &[None]);
        // lea 16(%rip),%rcx; call *%rcx, and with %r9
        check(&[0x48, 0x8d, 0x0d, 16, 0, 0, 0, 0xff, 0xd1], &[Some(0x200e)]);
        check(&[0x4c, 0x8d, 0x0d, 16, 0, 0, 0, 0x41, 0xff, 0xd1], &[Some(0x200d)]);
        for other in [&[0x90, 0x90][..], &[0xff, 0xe0], &[0xd0], &[]] {
            check(other, &[]);
        }
    }

    #[test]
    fn loaded_functions_follow_the_end_of_others() {
        let found = |before: u8, displacement: u8, operands: u8| {
            let mut code = vec![0x90; 0x30];
            code[..7].copy_from_slice(&[0x48, 0x8d, operands, displacement, 0, 0, 0]);
            code[0x0f] = before;
            loaded_functions(&code, 0x1000).collect::<Vec<_>>()
        };
        assert_eq!(found(0xc3, 9, 0x3d), [(0x1000, 0x1010)]);
        assert_eq!(found(0x90, 9, 0x05), [(0x1000, 0x1010)]);
        assert_eq!(found(0x50, 9, 0x3d), []); // in the middle of code
        assert_eq!(found(0xc3, 10, 0x3d), []); // not aligned
        assert_eq!(found(0xc3, 9, 0x3c), []); // not relative
        assert_eq!(found(0xc3, 0x79, 0x3d), []); // not in this code
    }

    #[test]
    fn signal_returns_are_recognized_by_their_bytes() {
        let check = |code: &[u8], expected: &[usize]| {
            let found: Vec<usize> = (0..code.len()).filter(|at| is_signal_return(code, *at)).collect();
            assert_eq!(found, expected, "{code:x?}");
        };
        check(b"\xc3\x90\xb8\x0f\0\0\0\x0f\x05\x90", &[1, 2, 3, 4, 5, 6, 7, 8]);
        check(b"\xc3\x48\xc7\xc0\x0f\0\0\0\x0f\x05", &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let long = b"\xc3\x48\xc7\xc0\x0f\0\0\0\x0f\x05\x90";
        let starts: Vec<_> = (0..12).map(|at| signal_return_start(long, at)).collect();
        assert_eq!(starts[..1], [None]);
        assert_eq!(starts[1..10], [Some(1); 9]);
        assert_eq!(starts[10..], [None; 2]);
        check(b"\x90\xb8\x0e\0\0\0\x0f\x05", &[]); // another system call
        check(b"\x90\xb8\x0f\0\0\0\x0f", &[]);
        check(b"", &[]);
    }

    #[test]
    fn what_follows_the_start_of_a_thread_is_recognized_by_its_bytes() {
        let check = |number: u8, expected: &[usize]| {
            // mov; syscall; test %rax,%rax; jl; je; ret
            let code = [
                0xb8, number, 1, 0, 0, 0x0f, 5, 0x48, 0x85, 0xc0, 0x7c, 0x18, 0x74, 1, 0xc3,
            ];
            let found: Vec<usize> = (0..code.len()).filter(|at| follows_thread_start(&code, *at)).collect();
            assert_eq!(found, expected, "{number:x}");
        };
        check(0xb3, &[7, 8, 9, 10, 11, 12, 13]);
        check(0xb4, &[]);
    }

    #[test]
    fn flow_of_instructions() {
        let check = |code: &[u8], flow: Flow, target: Option<u64>| {
            let i = instructions(code, 0x1000).next().expect("an instruction");
            assert_eq!((i.flow, i.target), (flow, target), "{code:x?}");
            assert_eq!(i.next(), 0x1000 + code.len() as u64);
        };
        check(b"\x90", Flow::Next, None);
        check(b"\xeb\xfe", Flow::Jump, Some(0x1000));
        check(b"\x74\0", Flow::ConditionalJump, Some(0x1002));
        check(b"\xff\xe0", Flow::IndirectJump, None);
        check(b"\xe8\0\x01\0\0", Flow::Call, Some(0x1105));
        check(b"\xff\xd0", Flow::Call, None);
        check(b"\xc3", Flow::Return, None);
        check(b"\xcc", Flow::Trap, None);
        check(b"\xf4", Flow::Trap, None);
        assert_eq!(instructions(b"", 0).next(), None);
    }
}
