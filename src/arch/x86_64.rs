//! x86-64, System V ABI.

use super::ReadMemory;
use crate::event::{Descriptor, WaitKind};

mod code;
mod system_calls;
pub use code::*;
pub use system_calls::cut_short;
use system_calls::{SEARCHED, constant_number};

/// Number of general registers that the unwinder tracks.
pub const GPRS: usize = 16;
/// DWARF number of the frame pointer.
pub const FP: usize = 6;
/// DWARF number of the stack pointer.
pub const SP: usize = 7;
/// All registers, as a bit set by DWARF number.
pub const ALL: u32 = 0xffff;
/// DWARF number of the return address column (System V ABI AMD64 1.0, figure 3.36).
pub const RA: usize = 16;
/// Registers that a callee must preserve (rbx, rbp, r12-r15), as a bit set by DWARF number.
pub const CALLEE_SAVED: u32 = 1 << 3 | 1 << 6 | 0xf << 12;
/// The registers that a compact unwind rule can restore: those that a callee must preserve.
pub const CALLEE: [u8; 6] = [3, 6, 12, 13, 14, 15];
/// Index in [`CALLEE`] of the register that holds the return address when a function begins; `None`: a call pushes it.
pub const LINK: Option<usize> = None;
/// Where a call puts the return address, relative to the CFA; unused where there is a link register.
pub const PUSHED_RETURN: i64 = -8;
/// Names of the registers by DWARF number (System V ABI AMD64, figure 3.36).
pub const NAMES: [&str; 17] = [
    "rax", "rdx", "rcx", "rbx", "rsi", "rdi", "rbp", "rsp", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "ra",
];
/// Bytes below the stack pointer that a function may use (System V ABI AMD64 1.0, 3.2.2).
pub const RED_ZONE: u64 = 128;
/// End of the addresses that programs have (with page tables of four levels).
pub const USER_END: u64 = 1 << 47;
/// The highest addresses: no others than main threads' stacks are there (arch/x86/mm/mmap.c, Linux 6.18).
pub const MAIN_STACKS: u64 = 1 << 34;
/// Numbers of bits that a code address may have where others of its word are a signature; none: all are the address.
pub const ADDRESS_BITS: [u32; 0] = [];
/// Words of `struct pt_regs` (arch/x86/include/asm/ptrace.h, Linux 6.18).
pub const PT_REGS_WORDS: usize = 21;
/// Words of registers in a record of the BPF program: `struct pt_regs`.
pub const SAVED_REGS_WORDS: usize = PT_REGS_WORDS;
/// Index among them of the number of the system call, `orig_ax`.
pub const SYSTEM_CALL_WORD: usize = 15;

/// The system call that this word says; `None`: none.
pub fn system_call(word: u64) -> Option<u16> {
    u16::try_from(word).ok()
}

/// How tapes name this CPU.
pub const TAPE_CPU: u16 = 0;
/// Functions with which the kernel begins to handle an interrupt, as their names begin (arch/x86/entry/entry_64.S,
/// Linux 6.18).
pub const INTERRUPT_ENTRIES: &[&str] = &["asm_sysvec_", "asm_common_interrupt", "asm_exc_nmi"];
/// Whose extensions of call frame tables to read.
pub const TABLE_VENDOR: gimli::Vendor = gimli::Vendor::Default;

/// Registers of one frame, by DWARF number; a register whose bit in `known` is clear was lost during unwinding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regs {
    pub gpr: [u64; GPRS],
    /// Instruction pointer: the interrupted one in the innermost frame, a return address in its callers.
    pub ip: u64,
    pub known: u32,
}

impl Regs {
    /// All registers of an interrupted thread, from the kernel's `struct pt_regs`
    /// (r15 r14 r13 r12 bp bx r11 r10 r9 r8 ax cx dx si di orig_ax ip cs flags sp ss).
    pub fn from_pt_regs(w: &[u64; PT_REGS_WORDS]) -> Regs {
        let gpr = [
            w[10], w[12], w[11], w[5], w[13], w[14], w[4], w[19], w[9], w[8], w[7], w[6], w[3], w[2], w[1], w[0],
        ];
        Regs {
            gpr,
            ip: w[16],
            known: ALL,
        }
    }

    /// Registers of which only these three are known.
    pub fn from_ip_sp_fp(ip: u64, sp: u64, fp: u64) -> Regs {
        let mut gpr = [0; GPRS];
        gpr[SP] = sp;
        gpr[FP] = fp;
        Regs {
            gpr,
            ip,
            known: 1 << SP | 1 << FP,
        }
    }

    /// Registers of which only these two are known.
    pub fn from_ip_sp(ip: u64, sp: u64) -> Regs {
        Regs {
            known: 1 << SP,
            ..Regs::from_ip_sp_fp(ip, sp, 0)
        }
    }

    /// Adds the first two arguments of the system call that the thread is in.
    pub fn set_arguments(&mut self, arguments: [u64; 2]) {
        for (register, value) in [FIRST_ARGUMENT, SECOND_ARGUMENT].into_iter().zip(arguments) {
            self.gpr[register] = value;
            self.known |= 1 << register;
        }
    }

    /// Value of a register by DWARF number; the return address column reads as the instruction pointer.
    #[inline]
    pub fn get(&self, dwarf: usize) -> Option<u64> {
        match dwarf {
            RA => Some(self.ip),
            r if r < GPRS && self.known & (1 << r) != 0 => Some(self.gpr[r]),
            _ => None,
        }
    }

    #[inline]
    pub fn sp(&self) -> u64 {
        self.gpr[SP]
    }
}

/// DWARF number of the register that holds the first argument of a system call (rdi).
pub const FIRST_ARGUMENT: usize = 5;

/// DWARF number of the register that holds the second one (rsi).
pub const SECOND_ARGUMENT: usize = 4;

/// `poll` and `ppoll`, which are given a list of descriptors; `select` and `pselect6`, which are given sets of them.
pub const POLLS: &[u64] = &[7, 271];
pub const SELECTS: &[u64] = &[23, 270];

/// What a thread waits for that is blocked in this system call (arch/x86/entry/syscalls/syscall_64.tbl, Linux 6.18).
pub fn wait_kind(system_call: u16, regs: &Regs) -> WaitKind {
    let none = |register| regs.get(register) == Some(0);
    match system_call {
        // Of no descriptors: a way to sleep (Python's time.sleep before 3.11).
        23 | 270 if none(FIRST_ARGUMENT) => WaitKind::Sleep,
        7 | 271 if none(SECOND_ARGUMENT) => WaitKind::Sleep,
        // futex, futex_waitv, futex_wait, futex_requeue
        202 | 449 | 455 => WaitKind::Futex,
        // nanosleep, clock_nanosleep
        35 | 230 => WaitKind::Sleep,
        // read, pread64, readv, recvfrom, recvmsg, preadv, recvmmsg, preadv2
        0 | 17 | 19 | 45 | 47 | 295 | 299 | 327 => WaitKind::Read(Descriptor::Unknown),
        // write, pwrite64, writev, sendto, sendmsg, pwritev, sendmmsg, pwritev2, sendfile
        1 | 18 | 20 | 44 | 46 | 296 | 307 | 328 | 40 => WaitKind::Write(Descriptor::Unknown),
        42 => WaitKind::Connect,
        // accept, accept4
        43 | 288 => WaitKind::Accept,
        // poll, select, epoll_wait, pselect6, ppoll, epoll_pwait, epoll_pwait2
        7 | 23 | 232 | 270 | 271 | 281 | 441 => WaitKind::Poll,
        // wait4, waitid
        61 | 247 => WaitKind::Child,
        // msync, fsync, fdatasync, sync, sync_file_range, syncfs
        26 | 74 | 75 | 162 | 277 | 306 => WaitKind::Disk,
        // pause, rt_sigtimedwait, rt_sigsuspend
        34 | 128 | 130 => WaitKind::Signal,
        other => WaitKind::Other(other),
    }
}

/// Do the tables of the code that signal handlers return to say where all registers are? Those of glibc do.
pub const SIGNAL_TABLES_COMPLETE: bool = true;

/// Where the kernel stores an interrupted register (by DWARF number; [`GPRS`]: the instruction pointer), from the stack
/// pointer of the code that a signal handler returns to, bytes: there `struct ucontext` begins, whose `struct
/// sigcontext` follows at 40 (arch/x86/include/uapi/asm/sigcontext.h, Linux 6.18; words as in [`SignalRegs`]).
pub fn signal_frame_slot(register: usize) -> i64 {
    const WORDS: [i64; GPRS + 1] = [13, 12, 14, 11, 9, 8, 10, 15, 0, 1, 2, 3, 4, 5, 6, 7, 16];
    40 + 8 * WORDS[register.min(GPRS)]
}

/// Words of `gregset_t` in a signal's `ucontext_t` (sys/ucontext.h, glibc 2.36; musl has the same).
pub const SIGNAL_REGS_WORDS: usize = 23;

/// Registers of a thread interrupted by a signal, as the handler gets them (r8 r9 r10 r11 r12 r13 r14 r15 di si bp bx
/// dx ax cx sp ip flags ...).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalRegs(pub [u64; SIGNAL_REGS_WORDS]);

const BP_IN_CONTEXT: usize = 10;
const AX_IN_CONTEXT: usize = 13;
const SP_IN_CONTEXT: usize = 15;
const IP_IN_CONTEXT: usize = 16;
/// The instruction.
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// System calls that return EINTR after a signal handler even with SA_RESTART, and have had no effect when they do
/// (signal(7), "Interruption of system calls"): poll, select, pause, nanosleep, semop, msgsnd, msgrcv, rt_sigtimedwait,
/// rt_sigsuspend, futex, io_getevents, semtimedop, clock_nanosleep, epoll_wait and their variants, io_uring_enter; and for
/// sockets with a time-out, devices and inotify: read, write, connect, accept, sendto, recvfrom and their variants.
const NEVER_RESTARTED: &[u64] = &[
    0, 1, 7, 19, 20, 23, 34, 35, 42, 43, 44, 45, 46, 47, 65, 69, 70, 128, 130, 202, 208, 220, 230, 232, 270, 271, 281,
    288, 295, 296, 299, 307, 327, 328, 333, 426, 441,
];

impl SignalRegs {
    pub fn from_context(context: &libc::mcontext_t) -> SignalRegs {
        SignalRegs(context.gregs.map(|r| r as u64))
    }

    pub fn store(&self, context: &mut libc::mcontext_t) {
        for (to, from) in context.gregs.iter_mut().zip(self.0) {
            *to = from as i64;
        }
    }

    /// The registers that the unwinder uses.
    pub fn regs(&self) -> Regs {
        let w = &self.0;
        let gpr = [
            w[13], w[12], w[14], w[11], w[9], w[8], w[10], w[15], w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7],
        ];
        Regs {
            gpr,
            ip: w[16],
            known: ALL,
        }
    }

    /// May the signal have interrupted a system call, which then returned EINTR?
    pub fn interrupted_call(&self) -> bool {
        self.0[AX_IN_CONTEXT] == EINTR
    }

    /// Restarts that call when the handler returns, if the code before the instruction pointer identifies it and it may
    /// be restarted. Its time-out starts again.
    pub fn restart_call(&mut self, read: ReadMemory) -> bool {
        let Some(call) = self
            .interrupted_call()
            .then(|| self.call_number(read))
            .flatten()
            .filter(|call| NEVER_RESTARTED.contains(call))
        else {
            return false;
        };
        self.0[AX_IN_CONTEXT] = call;
        self.0[IP_IN_CONTEXT] -= SYSCALL.len() as u64;
        true
    }

    /// The number of the system call whose instruction is the last one before the instruction pointer. The kernel has
    /// replaced it by the result, so it is read from what the C library did before (glibc 2.26 to 2.43; of musl, calls
    /// that are no cancellation points).
    fn call_number(&self, read: ReadMemory) -> Option<u64> {
        let (ip, sp) = (self.0[IP_IN_CONTEXT], self.0[SP_IN_CONTEXT]);
        let mut code = [0; SEARCHED + SYSCALL.len()];
        // The page before may not be mapped.
        let length = [code.len(), 5 + SYSCALL.len()].into_iter().find(|length| {
            let start = ip.checked_sub(*length as u64);
            start.is_some_and(|start| read(start, &mut code[..*length]))
        })?;
        let before = code[..length].strip_suffix(&SYSCALL)?;
        if let Some(number) = constant_number(before) {
            return Some(number);
        }
        match *before.last_chunk::<5>()? {
            // mov OFFSET(%rsp),%rax: __syscall_cancel (nptl/cancellation.c, glibc 2.41) of a process with one thread, or of
            // a thread that cannot be cancelled
            [0x48, 0x8b, 0x44, 0x24, offset] => word(sp, offset, read),
            // mov OFFSET(%rbp),%rax: the same, compiled with frame pointers
            [_, 0x48, 0x8b, 0x45, offset] => word(self.0[BP_IN_CONTEXT], offset, read),
            // mov %r11,8(%rsp): __syscall_cancel_arch (sysdeps/unix/sysv/linux/x86_64/syscall_cancel.S, glibc 2.41)
            [0x4c, 0x89, 0x5c, 0x24, 8] => self.number_in_caller(read),
            _ => None,
        }
    }

    /// The number that the caller of `__syscall_cancel_arch` read from its stack for the second argument, %rsi: moves
    /// between registers and the call follow.
    fn number_in_caller(&self, read: ReadMemory) -> Option<u64> {
        let sp = self.0[SP_IN_CONTEXT];
        let returns_to = word(sp, 0, read)?;
        let mut code = [0; 32];
        if !read(returns_to.checked_sub(code.len() as u64)?, &mut code) {
            return None;
        }
        // call RELATIVE
        let (mut code, &[0xe8, ..]) = code.split_last_chunk::<5>()? else {
            return None;
        };
        while let Some((before, &[0x48 | 0x49 | 0x4c | 0x4d, 0x89, 0xc0..=0xff])) = code.split_last_chunk() {
            code = before;
        }
        match *code {
            [.., 0x48, 0x8b, 0x74, 0x24, offset] => word(sp.checked_add(8)?, offset, read),
            [.., 0x48, 0x8b, 0x75, offset] => word(self.0[BP_IN_CONTEXT], offset, read),
            _ => None,
        }
    }
}

/// The word at `base` plus a signed offset of one byte.
fn word(base: u64, offset: u8, read: ReadMemory) -> Option<u64> {
    let mut word = [0; 8];
    let at = base.wrapping_add_signed((offset as i8).into());
    read(at, &mut word).then(|| u64::from_le_bytes(word))
}

/// Words of `struct user_regs_struct` (arch/x86/include/asm/user_64.h, Linux 6.18): those of `pt_regs`, then
/// fs_base gs_base ds es fs gs.
pub const USER_REGS_WORDS: usize = 27;
const AX: usize = 10;
const ORIG_AX: usize = 15;
const IP: usize = 16;
const FS_BASE: usize = 21;

/// Sets of registers that ptrace reads: their number (include/uapi/linux/elf.h), and the words that they fill:
/// NT_PRSTATUS.
pub const REGISTER_SETS: [(usize, std::ops::Range<usize>); 1] = [(1, 0..USER_REGS_WORDS)];

/// System calls that the kernel ends with EINTR when a tracer stops the thread, and that have had no effect when they
/// do (signal(7), "Interruption of system calls"): read write readv writev, sockets with a time-out, semaphores,
/// rt_sigtimedwait, io_getevents, epoll_wait, io_uring_enter and their variants. Others either restart by themselves or
/// must not be restarted (`close`).
const RESTARTABLE: &[u64] = &[
    0, 1, 19, 20, 43, 44, 45, 46, 47, 65, 128, 208, 220, 232, 281, 288, 299, 307, 333, 426, 441,
];
/// System calls that resume by themselves after a tracer's stop, with the time-out that they were given (signal(7)):
/// poll select pause nanosleep wait4 flock rt_sigsuspend futex clock_nanosleep waitid pselect6 ppoll, and futex_waitv.
const RESUMED_BY_KERNEL: &[u64] = &[7, 23, 34, 35, 61, 73, 130, 202, 230, 247, 270, 271, 449];
const EPOLL_WAIT: &[u64] = &[232, 281];
const EINTR: u64 = -4i64 as u64;
/// The kernel's internal "restart, unless a handler runs" (include/linux/errno.h).
const ERESTARTNOHAND: u64 = -514i64 as u64;

/// Can a thread that sleeps in this system call be stopped and resumed without its program noticing?
pub fn resumes_unnoticed(call: u64, args: &[u64; 6]) -> bool {
    // Without a time-out there is none to start again (see `restart_syscall`).
    RESUMED_BY_KERNEL.contains(&call) || EPOLL_WAIT.contains(&call) && args[3] as i32 == -1
}

/// Registers of a stopped thread, as read by ptrace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserRegs(pub [u64; USER_REGS_WORDS]);

impl UserRegs {
    /// The registers that the unwinder uses.
    pub fn regs(&self) -> Regs {
        let mut w = [0; PT_REGS_WORDS];
        w.copy_from_slice(&self.0[..PT_REGS_WORDS]);
        Regs::from_pt_regs(&w)
    }

    /// General registers, in the kernel's order.
    pub fn general(&self) -> [u64; GPRS] {
        std::array::from_fn(|i| self.0[i])
    }

    pub fn thread_pointer(&self) -> u64 {
        self.0[FS_BASE]
    }

    /// Number and arguments of the system call in which a stopped thread is; `None`: in none.
    pub fn system_call(&self) -> Option<(u64, [u64; 6])> {
        let (call, w) = (self.0[ORIG_AX], &self.0);
        (call <= u64::from(u16::MAX)).then_some((call, [w[14], w[13], w[12], w[7], w[9], w[8]]))
    }

    /// Sets of registers to write: their number, first word and size in bytes.
    pub fn written_sets(&self) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        std::iter::once((1, 0, 8 * USER_REGS_WORDS))
    }

    /// At the entry of a system call: moves the thread back before the instruction, so that it makes the call after it
    /// is resumed. The call it has entered becomes number -1, for which the kernel does nothing
    /// (arch/x86/entry/syscall_64.c).
    pub fn postpone_syscall(&mut self) {
        self.0[AX] = self.0[ORIG_AX];
        self.0[ORIG_AX] = u64::MAX;
        self.0[IP] = self.0[IP].wrapping_sub(2);
    }

    /// If the stop has ended a system call with EINTR, restarts it when the thread is resumed; true if so.
    ///
    /// The kernel decides, as for all other calls: if a signal handler runs first, the program still gets its EINTR. A
    /// time-out given to the call starts again.
    pub fn restart_syscall(&mut self) -> bool {
        // Negative if the thread was not in a system call.
        let interrupted = self.0[AX] == EINTR && RESTARTABLE.contains(&self.0[ORIG_AX]);
        if interrupted {
            self.0[AX] = ERESTARTNOHAND;
        }
        interrupted
    }
}

/// The user registers that a perf event records, by their numbers in arch/x86/include/uapi/asm/perf_regs.h: ax bx cx dx
/// si di bp sp ip, r8 to r15.
pub const PERF_REGS: u64 = 0xff_01ff;
const PERF_WORDS: usize = PERF_REGS.count_ones() as usize;

/// Registers recorded by a perf event (`PERF_SAMPLE_REGS_USER` with [`PERF_REGS`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerfRegs(pub [u64; PERF_WORDS]);

impl PerfRegs {
    /// From what the kernel writes: the ABI of the program (2: 64 bits), and the words. `None`: another ABI, or none
    /// recorded.
    pub fn parse(bytes: &[u8]) -> Option<PerfRegs> {
        let mut words = bytes
            .chunks_exact(8)
            .map(|w| w.try_into().map_or(0, u64::from_le_bytes));
        if words.next() != Some(2) {
            return None;
        }
        let mut regs = [0; PERF_WORDS];
        for reg in &mut regs {
            *reg = words.next()?;
        }
        Some(PerfRegs(regs))
    }

    /// The registers that the unwinder uses.
    pub fn regs(&self) -> Regs {
        let [ax, bx, cx, dx, si, di, bp, sp, ip, r8, r9, r10, r11, r12, r13, r14, r15] = self.0;
        Regs {
            gpr: [ax, dx, cx, bx, si, di, bp, sp, r8, r9, r10, r11, r12, r13, r14, r15],
            ip,
            known: ALL,
        }
    }

    /// General registers, in the kernel's order, as in [`UserRegs::general`]; the last one is not recorded.
    pub fn general(&self) -> [u64; GPRS] {
        let [ax, bx, cx, dx, si, di, bp, _, _, r8, r9, r10, r11, r12, r13, r14, r15] = self.0;
        [r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di, 0]
    }

    /// Return address of the system call in which these registers were recorded; `None`: in none, but in a page fault
    /// for example. The instruction leaves that address in rcx (Intel SDM, "SYSCALL").
    pub fn call_returns_to(&self) -> Option<u64> {
        let [_, _, cx, _, _, _, _, _, ip, ..] = self.0;
        (cx == ip).then_some(ip)
    }

    /// Arguments of the system call in which these registers were recorded.
    pub fn arguments(&self) -> [u64; 6] {
        let [_, _, _, dx, si, di, _, _, _, r8, r9, r10, ..] = self.0;
        [di, si, dx, r10, r8, r9]
    }
}

/// `AUDIT_ARCH_X86_64` (include/uapi/linux/audit.h).
pub const AUDIT_ARCH: u32 = 0xc000_003e;
/// System calls of another ABI have a number from here on: x32 (arch/x86/include/uapi/asm/unistd.h).
pub const FOREIGN_CALLS: Option<u32> = Some(0x4000_0000);
/// Offset of the thread's vector of thread-local blocks in what the thread pointer points to (System V ABI for
/// thread-local storage, 3.4.6).
pub const TLS_VECTOR: u64 = 8;
/// Whether thread-local blocks lie below the thread pointer (variant II there).
pub const TLS_BELOW_POINTER: bool = true;
/// Address of Go's `g`, the goroutine that the thread runs: just below the thread pointer (runtime/asm_amd64.s, Go 1.24).
pub fn goroutine(_: &Regs, thread_pointer: u64, word: impl Fn(u64) -> Option<u64>) -> Option<u64> {
    word(thread_pointer.checked_sub(8)?)
}

/// Offset of the thread's number in `struct pthread`: glibc 2.36 and 2.43 (nptl/descr.h), musl 1.2.3
/// (src/internal/pthread_impl.h).
pub const PTHREAD_TID: [u64; 2] = [720, 48];
/// Does a thread's descriptor (`pthread_self`) begin with its own address (glibc: tcbhead_t.tcb; musl: pthread.self)?
pub const DESCRIPTOR_BEGINS_WITH_ADDRESS: bool = true;
/// Offset of `specific` in `struct pthread` of glibc 2.36, and of `tsd` in that of musl 1.2.3.
pub const PTHREAD_SPECIFIC: [u32; 2] = [1296, 128];
/// Bytes from a thread's descriptor up to where the thread pointer points, in glibc and in musl.
pub const DESCRIPTOR_SIZE: [u32; 2] = [0, 0];

#[cfg(test)]
mod tests;
