//! aarch64, procedure call standard AAPCS64 (IHI 0055), little-endian.

use super::ReadMemory;
use crate::event::{Descriptor, WaitKind};

mod code;
mod system_calls;
pub use code::*;
pub use system_calls::cut_short;

/// Number of general registers that the unwinder tracks: x0 to x30, and the stack pointer.
pub const GPRS: usize = 32;
/// DWARF number of the frame pointer.
pub const FP: usize = 29;
/// DWARF number of the stack pointer.
pub const SP: usize = 31;
/// DWARF number of the return address column: the link register (DWARF for the Arm 64-bit Architecture, AADWARF64).
pub const RA: usize = 30;
/// All registers, as a bit set by DWARF number.
pub const ALL: u32 = u32::MAX;
/// Registers that a callee must preserve (x19 to x29), as a bit set by DWARF number.
pub const CALLEE_SAVED: u32 = 0x7ff << 19;
/// The registers that a compact unwind rule can restore: those that a callee must preserve, and the link register.
pub const CALLEE: [u8; 12] = [19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30];
/// Index in [`CALLEE`] of the register that holds the return address when a function begins; `None`: a call pushes it.
pub const LINK: Option<usize> = Some(11);
/// Where a call puts the return address, relative to the CFA; unused where there is a link register.
pub const PUSHED_RETURN: i64 = 0;
/// Names of the registers by DWARF number.
pub const NAMES: [&str; 32] = [
    "x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17",
    "x18", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x29", "x30", "sp",
];
/// Bytes below the stack pointer that a function may use: none (AAPCS64, 6.4.5.1).
pub const RED_ZONE: u64 = 0;
/// End of the addresses that programs have (with 48 bits).
pub const USER_END: u64 = 1 << 48;
/// The highest addresses: no others than main threads' stacks are there (mm/util.c, Linux 6.18).
pub const MAIN_STACKS: u64 = 1 << 30;
/// Numbers of bits that a code address may have where others of its word are a signature (pointer authentication) or a
/// tag: the sizes of address spaces that kernels are built with (arch/arm64/Kconfig, ARM64_VA_BITS, Linux 6.18), greatest
/// first. The signature begins just above the address, and both end below 2^56.
pub const ADDRESS_BITS: [u32; 6] = [52, 48, 47, 42, 39, 36];
/// Words of `struct user_pt_regs` (arch/arm64/include/uapi/asm/ptrace.h, Linux 6.18): x0 to x30, sp, pc, pstate.
pub const PT_REGS_WORDS: usize = 34;
/// Words of registers in a record of the BPF program: the beginning of `struct pt_regs` (arch/arm64/include/asm/ptrace.h,
/// Linux 6.18).
pub const SAVED_REGS_WORDS: usize = PT_REGS_WORDS + 2;
/// Index among them of the number of the system call, `syscallno`, 32 bits.
pub const SYSTEM_CALL_WORD: usize = 35;

/// The system call that this word says; `None`: none.
pub fn system_call(word: u64) -> Option<u16> {
    u16::try_from(word as u32).ok()
}

/// How tapes name this CPU: as ELF files do, EM_AARCH64.
pub const TAPE_CPU: u16 = 183;
/// Functions with which the kernel begins to handle an interrupt, as their names begin (arch/arm64/kernel/entry.S,
/// Linux 6.18; `el1_` and `el0_`: before 5.14). `call_on_irq_stack` is none: a thread that sends packets to its own
/// machine delivers them in it.
pub const INTERRUPT_ENTRIES: &[&str] = &[
    "el1h_64_irq",
    "el1h_64_fiq",
    "el0t_64_irq",
    "el0t_64_fiq",
    "el0t_32_irq",
    "el0t_32_fiq",
    "el1_irq",
    "el1_fiq",
    "el0_irq",
    "el0_fiq",
];
/// Whose extensions of call frame tables to read: `DW_CFA_AARCH64_negate_ra_state`.
pub const TABLE_VENDOR: gimli::Vendor = gimli::Vendor::AArch64;
const SP_WORD: usize = 31;
const PC: usize = 32;

/// Registers of one frame, by DWARF number; a register whose bit in `known` is clear was lost during unwinding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regs {
    pub gpr: [u64; GPRS],
    /// Instruction pointer: the interrupted one in the innermost frame, a return address in its callers.
    pub ip: u64,
    pub known: u32,
}

impl Regs {
    /// All registers of an interrupted thread, from the kernel's `struct user_pt_regs`.
    pub fn from_pt_regs(w: &[u64; PT_REGS_WORDS]) -> Regs {
        Regs {
            gpr: std::array::from_fn(|r| w[r]),
            ip: w[PC],
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

    /// Value of a register by DWARF number. The link register is known in frames that were interrupted.
    #[inline]
    pub fn get(&self, dwarf: usize) -> Option<u64> {
        (dwarf < GPRS && self.known & (1 << dwarf) != 0).then(|| self.gpr[dwarf])
    }

    #[inline]
    pub fn sp(&self) -> u64 {
        self.gpr[SP]
    }
}

/// DWARF number of the register that holds the first argument of a system call.
pub const FIRST_ARGUMENT: usize = 0;

/// DWARF number of the register that holds the second one.
pub const SECOND_ARGUMENT: usize = 1;

/// `ppoll`, which is given a list of descriptors; `pselect6`, which is given sets of them.
pub const POLLS: &[u64] = &[73];
pub const SELECTS: &[u64] = &[72];

/// What a thread waits for that is blocked in this system call (include/uapi/asm-generic/unistd.h, Linux 6.18).
pub fn wait_kind(system_call: u16, regs: &Regs) -> WaitKind {
    let none = |register| regs.get(register) == Some(0);
    match system_call {
        // pselect6, ppoll of no descriptors: a way to sleep (Python's time.sleep before 3.11).
        72 if none(FIRST_ARGUMENT) => WaitKind::Sleep,
        73 if none(SECOND_ARGUMENT) => WaitKind::Sleep,
        // futex, futex_waitv, futex_wait
        98 | 449 | 455 => WaitKind::Futex,
        // nanosleep, clock_nanosleep
        101 | 115 => WaitKind::Sleep,
        // read, readv, pread64, preadv, recvfrom, recvmsg, recvmmsg, preadv2
        63 | 65 | 67 | 69 | 207 | 212 | 243 | 286 => WaitKind::Read(Descriptor::Unknown),
        // write, writev, pwrite64, pwritev, sendto, sendmsg, sendmmsg, pwritev2, sendfile
        64 | 66 | 68 | 70 | 206 | 211 | 269 | 287 | 71 => WaitKind::Write(Descriptor::Unknown),
        203 => WaitKind::Connect,
        // accept, accept4
        202 | 242 => WaitKind::Accept,
        // epoll_pwait, pselect6, ppoll, epoll_pwait2
        22 | 72 | 73 | 441 => WaitKind::Poll,
        // waitid, wait4
        95 | 260 => WaitKind::Child,
        // sync, fsync, fdatasync, sync_file_range, msync, syncfs
        81 | 82 | 83 | 84 | 227 | 267 => WaitKind::Disk,
        // rt_sigsuspend, rt_sigtimedwait
        133 | 137 => WaitKind::Signal,
        other => WaitKind::Other(other),
    }
}

/// Do the tables of the code that signal handlers return to say where all registers are?
pub const SIGNAL_TABLES_COMPLETE: bool = false;

/// Where the kernel stores an interrupted register (by DWARF number; [`GPRS`]: the instruction pointer), from the stack
/// pointer of the code that a signal handler returns to, bytes: `struct rt_sigframe` (arch/arm64/kernel/signal.c, Linux
/// 6.18) is a `siginfo_t` of 128 bytes and a `ucontext_t`, whose `struct sigcontext` is at 176 and has x0 to x30, sp,
/// pc after one word.
pub fn signal_frame_slot(register: usize) -> i64 {
    128 + 176 + 8 + 8 * register.min(GPRS) as i64
}

/// Words of registers in a signal's `mcontext_t` after the fault address: x0 to x30, sp, pc, pstate.
pub const SIGNAL_REGS_WORDS: usize = PT_REGS_WORDS;

/// Registers of a thread interrupted by a signal, as the handler gets them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalRegs(pub [u64; SIGNAL_REGS_WORDS]);

impl SignalRegs {
    pub fn from_context(context: &libc::mcontext_t) -> SignalRegs {
        let mut words = [0; SIGNAL_REGS_WORDS];
        words[..31].copy_from_slice(&context.regs);
        (words[SP_WORD], words[PC]) = (context.sp, context.pc);
        SignalRegs(words)
    }

    /// Changes nothing: see [`SignalRegs::interrupted_call`].
    pub fn store(&self, _context: &mut libc::mcontext_t) {}

    /// The registers that the unwinder uses.
    pub fn regs(&self) -> Regs {
        Regs::from_pt_regs(&self.0)
    }

    /// May the signal have interrupted a system call, which then returned EINTR, and which can be restarted? No: its result
    /// took the place of its first argument, which is nowhere else.
    pub fn interrupted_call(&self) -> bool {
        false
    }

    /// Restarts that call when the handler returns.
    pub fn restart_call(&mut self, _read: ReadMemory) -> bool {
        false
    }
}

/// Words of [`UserRegs`]: `struct user_pt_regs`, the thread pointer, and a system call's number to be set.
pub const USER_REGS_WORDS: usize = PT_REGS_WORDS + 2;
const THREAD_POINTER: usize = PT_REGS_WORDS;
const NEW_CALL: usize = PT_REGS_WORDS + 1;

/// Sets of registers that ptrace reads: their number (include/uapi/linux/elf.h), and the words that they fill: NT_PRSTATUS,
/// NT_ARM_TLS.
pub const REGISTER_SETS: [(usize, std::ops::Range<usize>); 2] =
    [(1, 0..PT_REGS_WORDS), (0x401, THREAD_POINTER..THREAD_POINTER + 1)];
/// NT_ARM_SYSTEM_CALL: four bytes.
const SYSTEM_CALL_SET: usize = 0x404;

/// System calls that resume by themselves after a tracer's stop, with the time-out that they were given (signal(7)):
/// pselect6 ppoll nanosleep flock rt_sigsuspend futex clock_nanosleep waitid wait4, and futex_waitv.
const RESUMED_BY_KERNEL: &[u64] = &[72, 73, 101, 32, 133, 98, 115, 95, 260, 449];

/// Can a thread that sleeps in this system call be stopped and resumed without its program noticing?
pub fn resumes_unnoticed(call: u64, _args: &[u64; 6]) -> bool {
    RESUMED_BY_KERNEL.contains(&call)
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
        self.0[THREAD_POINTER]
    }

    /// Number and arguments of the system call in which a stopped thread is. The registers do not say whether it is in one.
    pub fn system_call(&self) -> Option<(u64, [u64; 6])> {
        None
    }

    /// Sets of registers to write: their number, first word and size in bytes.
    pub fn written_sets(&self) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        let call = (self.0[NEW_CALL] != 0).then_some((SYSTEM_CALL_SET, NEW_CALL, 4));
        [(1, 0, 8 * PT_REGS_WORDS)].into_iter().chain(call)
    }

    /// At the entry of a system call: moves the thread back before the instruction, so that it makes the call after it
    /// is resumed. The call it has entered becomes number -1, for which the kernel does nothing
    /// (arch/arm64/kernel/syscall.c).
    pub fn postpone_syscall(&mut self) {
        self.0[NEW_CALL] = u64::MAX;
        self.0[PC] = self.0[PC].wrapping_sub(4);
    }

    /// If the stop has ended a system call with EINTR, restarts it when the thread is resumed; true if so. Never: the result
    /// took the place of the call's first argument, which a tracer cannot read. So threads in calls that do not resume
    /// by themselves are not stopped: [`resumes_unnoticed`].
    pub fn restart_syscall(&mut self) -> bool {
        false
    }
}

/// The user registers that a perf event records, by their numbers in arch/arm64/include/uapi/asm/perf_regs.h: x0 to x29, lr,
/// sp, pc.
pub const PERF_REGS: u64 = 0x1_ffff_ffff;
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
        Regs {
            gpr: self.general(),
            ip: self.0[PC],
            known: ALL,
        }
    }

    /// General registers, in the kernel's order, as in [`UserRegs::general`].
    pub fn general(&self) -> [u64; GPRS] {
        std::array::from_fn(|i| self.0[i])
    }

    /// Return address of the system call in which these registers were recorded. `None`: the registers do not say whether it
    /// was a call or a page fault.
    pub fn call_returns_to(&self) -> Option<u64> {
        None
    }

    /// Arguments of the system call in which these registers were recorded.
    pub fn arguments(&self) -> [u64; 6] {
        std::array::from_fn(|i| self.0[i])
    }
}

/// `AUDIT_ARCH_AARCH64` (include/uapi/linux/audit.h).
pub const AUDIT_ARCH: u32 = 0xc000_00b7;
/// System calls of another ABI have a number from here on; `None`: there are none.
pub const FOREIGN_CALLS: Option<u32> = None;
/// Offset of the thread's vector of thread-local blocks in what the thread pointer points to (ELF for the Arm 64-bit
/// Architecture, "Thread Local Storage", variant 1).
pub const TLS_VECTOR: u64 = 0;
/// Whether thread-local blocks lie below the thread pointer (variant 2 there).
pub const TLS_BELOW_POINTER: bool = false;
/// Address of Go's `g`, the goroutine that the thread runs: in a register (runtime/asm_arm64.s, Go 1.24).
pub fn goroutine(regs: &Regs, _: u64, _: impl Fn(u64) -> Option<u64>) -> Option<u64> {
    regs.get(28)
}

/// Offset of the thread's number in `struct pthread`: glibc 2.36 (nptl/descr.h), musl 1.2.3 (src/internal/pthread_impl.h).
pub const PTHREAD_TID: [u64; 2] = [208, 32];
/// Does a thread's descriptor (`pthread_self`) begin with its own address? Otherwise it lies below the thread pointer.
pub const DESCRIPTOR_BEGINS_WITH_ADDRESS: bool = false;
/// Offset of `specific` in `struct pthread` of glibc 2.36, and of `tsd` in that of musl 1.2.3.
pub const PTHREAD_SPECIFIC: [u32; 2] = [784, 112];
/// Bytes from a thread's descriptor up to where the thread pointer points, in glibc 2.36 and in musl 1.2.3: all of it.
pub const DESCRIPTOR_SIZE: [u32; 2] = [1856, 200];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_land_in_their_dwarf_slots() {
        let regs = Regs::from_pt_regs(&std::array::from_fn(|i| 100 + i as u64));
        assert_eq!(
            (regs.get(0), regs.get(29), regs.get(RA)),
            (Some(100), Some(129), Some(130))
        );
        assert_eq!((regs.sp(), regs.ip, regs.get(32)), (131, 132, None));
        let words: Vec<u8> = [2].into_iter().chain(100..133u64).flat_map(u64::to_le_bytes).collect();
        let perf = PerfRegs::parse(&words).expect("registers");
        assert_eq!(perf.regs(), regs);
        assert_eq!(perf.arguments(), [100, 101, 102, 103, 104, 105]);
        assert_eq!(PerfRegs::parse(&words[..100]), None);
        let mut user = UserRegs(std::array::from_fn(|i| if i == NEW_CALL { 0 } else { 100 + i as u64 }));
        assert_eq!((user.regs(), user.thread_pointer()), (regs, 134));
        assert_eq!(user.written_sets().count(), 1);
        user.postpone_syscall();
        assert_eq!((user.0[PC], user.written_sets().count()), (128, 2));
    }
}
