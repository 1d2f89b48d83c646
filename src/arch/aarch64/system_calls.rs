//! System calls that do part of their work if they are interrupted, or fail.

use crate::arch::CutShort;

/// Bytes that a pipe takes as a whole (PIPE_BUF, include/uapi/linux/limits.h), and sockets in one piece.
const WHOLE: u64 = 4096;
/// Bytes that `getrandom` returns as a whole (getrandom(2)).
const WHOLE_RANDOM: u64 = 256;
/// include/linux/socket.h, Linux 6.18
const MSG_DONTWAIT: u64 = 0x40;
const MSG_WAITALL: u64 = 0x100;

/// Can a stop change what this system call returns (include/uapi/asm-generic/unistd.h, Linux 6.18)?
pub fn cut_short(call: u64, args: &[u64; 6]) -> Option<CutShort> {
    let [first, _, third, fourth, ..] = *args;
    match call {
        // read
        63 if third > WHOLE => Some(CutShort::Read(first)),
        // write, pwrite64; writev, pwritev, pwritev2, whose lengths are in memory
        64 | 68 if third > WHOLE => Some(CutShort::Write(first)),
        66 | 70 | 287 => Some(CutShort::Write(first)),
        // sendto, sendmsg, sendmmsg
        206 if third > WHOLE && fourth & MSG_DONTWAIT == 0 => Some(CutShort::Write(first)),
        211 if third & MSG_DONTWAIT == 0 => Some(CutShort::Write(first)),
        269 if fourth & MSG_DONTWAIT == 0 => Some(CutShort::Write(first)),
        // recvfrom, recvmsg, recvmmsg
        207 if fourth & MSG_WAITALL != 0 => Some(CutShort::Always),
        212 if third & MSG_WAITALL != 0 => Some(CutShort::Always),
        243 if fourth & MSG_DONTWAIT == 0 => Some(CutShort::Always),
        278 if args[1] > WHOLE_RANDOM => Some(CutShort::Always),
        // sendfile, vmsplice, splice, tee, copy_file_range
        71 | 75 | 76 | 77 | 285 => Some(CutShort::Always),
        // io_getevents, epoll_pwait, rt_sigtimedwait, semtimedop, semop, io_pgetevents, io_uring_enter, epoll_pwait2: they
        // fail with EINTR, and a tracer cannot restart them
        4 | 22 | 137 | 192 | 193 | 292 | 426 | 441 => Some(CutShort::Always),
        _ => None,
    }
}
