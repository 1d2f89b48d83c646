//! System calls that do part of their work if they are interrupted.

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

#[cfg(test)]
mod tests {
    use super::*;

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
