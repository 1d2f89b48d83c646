//! System calls that are interrupted: which ones do part of their work then, and which one a thread was in.

use crate::arch::CutShort;

/// Bytes that a pipe takes as a whole (PIPE_BUF, include/uapi/linux/limits.h), and sockets in one piece.
const WHOLE: u64 = 4096;
/// Bytes that `getrandom` returns as a whole (getrandom(2)).
const WHOLE_RANDOM: u64 = 256;
/// include/linux/socket.h, Linux 6.18
const MSG_DONTWAIT: u64 = 0x40;
const MSG_WAITALL: u64 = 0x100;

/// Can a stop change what this system call returns (arch/x86/entry/syscalls/syscall_64.tbl, Linux 6.18)?
pub fn cut_short(call: u64, args: &[u64; 6]) -> Option<CutShort> {
    let [first, _, third, fourth, ..] = *args;
    match call {
        // read
        0 if third > WHOLE => Some(CutShort::Read(first)),
        // write, pwrite64; writev, pwritev, pwritev2, whose lengths are in memory
        1 | 18 if third > WHOLE => Some(CutShort::Write(first)),
        20 | 296 | 328 => Some(CutShort::Write(first)),
        // sendto, sendmsg, sendmmsg
        44 if third > WHOLE && fourth & MSG_DONTWAIT == 0 => Some(CutShort::Write(first)),
        46 if third & MSG_DONTWAIT == 0 => Some(CutShort::Write(first)),
        307 if fourth & MSG_DONTWAIT == 0 => Some(CutShort::Write(first)),
        // recvfrom, recvmsg, recvmmsg
        45 if fourth & MSG_WAITALL != 0 => Some(CutShort::Always),
        47 if third & MSG_WAITALL != 0 => Some(CutShort::Always),
        299 if fourth & MSG_DONTWAIT == 0 => Some(CutShort::Always),
        318 if args[1] > WHOLE_RANDOM => Some(CutShort::Always),
        // sendfile, splice, tee, vmsplice, copy_file_range
        40 | 275 | 276 | 278 | 326 => Some(CutShort::Always),
        _ => None,
    }
}

/// Bytes of code before a system call that are searched for its number, without the instruction of the call.
pub(super) const SEARCHED: usize = 40;

/// The number of a system call that is a constant of the code before it: `mov $NUMBER,%eax` or `xor %eax,%eax`, then
/// instructions that load other registers. `code` ends where the call's instruction begins. For signal handlers too.
pub(super) fn constant_number(code: &[u8]) -> Option<u64> {
    /// Larger than all numbers (syscall_64.tbl, Linux 6.18).
    const END: u32 = 1024;
    // The last one that fits. Bytes within another instruction could look like one, but then would have to be followed by
    // complete instructions of these few kinds up to the call.
    (2..=code.len()).find_map(|length| {
        let (number, mut loads) = match code[code.len() - length..] {
            [0xb8, a, b, c, d, ref loads @ ..] => (u32::from_le_bytes([a, b, c, d]), loads),
            [0x31 | 0x33, 0xc0, ref loads @ ..] => (0, loads),
            _ => return None,
        };
        while !loads.is_empty() {
            loads = loads.get(load_length(loads)?..)?;
        }
        (number < END).then_some(number.into())
    })
}

/// Length of an instruction that sets a general register other than rax: a move, the load of an address, or a clearing.
fn load_length(code: &[u8]) -> Option<usize> {
    const REX: std::ops::RangeInclusive<u8> = 0x40..=0x4f;
    let (rex, rest) = match code {
        [rex, rest @ ..] if REX.contains(rex) => (*rex, rest),
        _ => (0, code),
    };
    let prefix = code.len() - rest.len();
    let (high_reg, high_rm) = (rex & 4 != 0, rex & 1 != 0);
    match *rest {
        // mov $NUMBER,%reg
        [op @ 0xb8..=0xbf, ..] if rex & 8 == 0 && (high_rm || op != 0xb8) => Some(prefix + 5),
        [op @ (0x8b | 0x8d | 0x89 | 0x31 | 0x33), modrm, ..] => {
            let (mode, reg, rm) = (modrm >> 6, modrm >> 3 & 7, modrm & 7);
            // The destination: the second operand of mov and xor with these opcodes, which here must be a register.
            let sets_rax = match op {
                0x89 | 0x31 if mode != 3 => return None,
                0x89 | 0x31 => rm == 0 && !high_rm,
                _ => reg == 0 && !high_reg,
            };
            let sib = usize::from(mode != 3 && rm == 4);
            let base = if sib == 1 { *rest.get(2)? & 7 } else { rm };
            let displacement = match mode {
                0 if base == 5 => 4,
                1 => 1,
                2 => 4,
                _ => 0,
            };
            (!sets_rax).then_some(prefix + 2 + sib + displacement)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_constants_of_the_code() {
        let check = |code: &[u8], expected| assert_eq!(constant_number(code), expected, "{code:x?}");
        check(&[0xb8, 232, 0, 0, 0], Some(232));
        // pselect of glibc 2.36: mov $270,%eax; mov 0x1c(%rsp),%edi
        check(&[0xb8, 0x0e, 1, 0, 0, 0x8b, 0x7c, 0x24, 0x1c], Some(270));
        // recvfrom: mov $45,%eax; mov 0x10(%rsp),%rdx; mov 0x8(%rsp),%rsi
        let recvfrom = [
            0xb8, 0x2d, 0, 0, 0, 0x48, 0x8b, 0x54, 0x24, 0x10, 0x48, 0x8b, 0x74, 0x24, 8,
        ];
        check(&recvfrom, Some(45));
        check(&[&[0x0f, 0x1f, 0x40, 0][..], &recvfrom].concat(), Some(45));
        // xor %r9d,%r9d; mov %r15,%rdx; mov $8,%r10d; lea 0x40(%rsp),%r9
        let loads = [
            0x45, 0x31, 0xc9, 0x4c, 0x89, 0xfa, 0x41, 0xba, 8, 0, 0, 0, 0x4c, 0x8d, 0x4c, 0x24, 0x40,
        ];
        check(&[&[0xb8, 7, 0, 0, 0][..], &loads].concat(), Some(7));
        check(&loads, None);
        // read: xor %eax,%eax; mov 8(%rsp),%rsi
        check(&[0x31, 0xc0, 0x48, 0x8b, 0x74, 0x24, 8], Some(0));
        check(&[0xb8, 7, 0, 0, 0, 0x31, 0xff], Some(7)); // xor %edi,%edi
        check(&[0x41, 0x31, 0xc0, 0x0f, 0x1f, 0], None); // xor %eax,%r8d; nop
        check(&[0xb8, 7, 0, 0, 0, 0x89, 0xf8], None); // mov %edi,%eax
        check(&[0xb8, 7, 0, 0, 0, 0x8b, 0x04, 0x24], None); // mov (%rsp),%eax
        check(&[0xb8, 7, 0, 0, 0, 0xff, 0xd0], None); // call *%rax
        check(&[0xb8, 7, 0, 0, 0, 0x8b], None);
        check(&[0xb8, 7, 0, 0, 1], None);
        check(&[], None);
    }

    #[test]
    fn calls_that_end_early() {
        let check = |call, args, expected| assert_eq!(cut_short(call, &args), expected, "{call} {args:?}");
        check(1, [5, 0, 4096, 0, 0, 0], None);
        check(1, [5, 0, 4097, 0, 0, 0], Some(CutShort::Write(5)));
        check(44, [5, 0, 1 << 20, 0, 0, 0], Some(CutShort::Write(5)));
        check(44, [5, 0, 1 << 20, MSG_DONTWAIT, 0, 0], None);
        check(45, [5, 0, 10, 0, 0, 0], None);
        check(45, [5, 0, 10, MSG_WAITALL, 0, 0], Some(CutShort::Always));
        check(0, [7, 0, 1 << 20, 0, 0, 0], Some(CutShort::Read(7)));
        check(318, [0, 16, 0, 0, 0, 0], None);
        check(318, [0, 1 << 17, 0, 0, 0, 0], Some(CutShort::Always));
        check(202, [0; 6], None);
    }
}
