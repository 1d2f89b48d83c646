//! The signal handler: passes registers to the pool (slot_pool.rs) and restores the interrupted state.
//!
//! It preserves `errno`, blocks all other signals but those of faults while it runs, and runs on a stack of the slot, so
//! that small stacks (goroutines, alternative stacks) suffice for it.

#![allow(unsafe_code)]

use std::arch::asm;
use std::io;
use std::os::fd::BorrowedFd;

use super::slot_pool::SlotPool;
use super::tick_timer::EVENT_SIGNAL;
#[cfg(target_arch = "aarch64")]
use crate::arch::RA;
use crate::arch::{CALLEE_SAVED, Regs, SP, SignalRegs};
use crate::event::Pid;
use crate::sys;
use crate::sys::files::ClosedAtFork;
use crate::sys::threads;

/// Codes of signals of a descriptor: the next tick of a perf event, and the last one that was enabled
/// (include/uapi/asm-generic/siginfo.h, Linux 6.18).
const POLL_IN: i32 = 1;
const POLL_HUP: i32 = 6;

/// Runs `work` on another stack, which must be large enough for it: at least 16 KB.
pub fn on_stack(stack: &mut [u8], work: &mut dyn FnMut()) {
    extern "C" fn run(work: *mut libc::c_void) {
        // SAFETY: the argument of `call_on` below.
        unsafe { (*work.cast::<&mut dyn FnMut()>())() }
    }
    assert!(stack.len() >= 16 << 10);
    let (top, mut work) = (stack.as_mut_ptr_range().end, work);
    // SAFETY: the stack is borrowed for writing and of some length; `work` outlives the call and nothing else touches
    // it.
    unsafe { call_on(top, run, (&raw mut work).cast()) };
}

/// Calls a function on another stack, whose end is `top`.
///
/// # Safety
/// The stack must be large enough and not in use.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
// SAFETY: see above; the function keeps to the C calling convention, so r12 brings the stack pointer back.
unsafe fn call_on(top: *mut u8, f: extern "C" fn(*mut libc::c_void), argument: *mut libc::c_void) {
    // SAFETY: the stack is aligned as a call requires; all registers that a call may change are named.
    unsafe {
        asm!(
            "xchg rsp, r12",
            "call {f}",
            "mov rsp, r12",
            f = in(reg) f,
            inout("r12") top.map_addr(|at| at & !15) => _,
            in("rdi") argument,
            clobber_abi("C"),
        );
    }
}

/// Calls a function on another stack, whose end is `top`.
///
/// # Safety
/// The stack must be large enough and not in use.
#[cfg(target_arch = "aarch64")]
#[inline(never)]
// SAFETY: see above; the function keeps to the C calling convention, so x20 brings the stack pointer back.
unsafe fn call_on(top: *mut u8, f: extern "C" fn(*mut libc::c_void), argument: *mut libc::c_void) {
    // SAFETY: the stack is aligned as a call requires; all registers that a call may change are named.
    unsafe {
        asm!(
            "mov x20, sp",
            "mov sp, {top}",
            "blr {f}",
            "mov sp, x20",
            f = in(reg) f,
            top = in(reg) top.map_addr(|at| at & !15),
            out("x20") _,
            in("x0") argument,
            clobber_abi("C"),
        );
    }
}

/// Current registers of the calling function; those that a call need not preserve are not known.
#[cfg(target_arch = "x86_64")]
#[inline(always)] // else they would be those of a function that has returned
pub fn current_registers() -> Regs {
    let mut gpr = [0u64; 16];
    let ip: u64;
    // SAFETY: only stores registers, to our own memory, by their DWARF numbers.
    unsafe {
        asm!(
            "mov [{to} + 24], rbx",
            "mov [{to} + 48], rbp",
            "mov [{to} + 56], rsp",
            "mov [{to} + 96], r12",
            "mov [{to} + 104], r13",
            "mov [{to} + 112], r14",
            "mov [{to} + 120], r15",
            "lea {ip}, [rip]",
            to = in(reg) gpr.as_mut_ptr(),
            ip = out(reg) ip,
        );
    }
    let known = CALLEE_SAVED | 1 << SP;
    Regs { gpr, ip, known }
}

/// Current registers of the calling function; those that a call need not preserve are not known, except the link register:
/// before its first call, the function may keep its return address there.
#[cfg(target_arch = "aarch64")]
#[inline(always)] // else they would be those of a function that has returned
pub fn current_registers() -> Regs {
    let mut gpr = [0u64; 32];
    let ip: u64;
    // SAFETY: only stores registers, to our own memory, by their DWARF numbers.
    unsafe {
        asm!(
            "stp x19, x20, [{to}, #152]",
            "stp x21, x22, [{to}, #168]",
            "stp x23, x24, [{to}, #184]",
            "stp x25, x26, [{to}, #200]",
            "stp x27, x28, [{to}, #216]",
            "stp x29, x30, [{to}, #232]",
            "mov {ip}, sp",
            "str {ip}, [{to}, #248]",
            "adr {ip}, .",
            to = in(reg) gpr.as_mut_ptr(),
            ip = out(reg) ip,
        );
    }
    let known = CALLEE_SAVED | 1 << RA | 1 << SP;
    Regs { gpr, ip, known }
}

/// Handles a signal in any thread.
extern "C" fn on_signal(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a `siginfo_t` and an `ucontext_t` that live as long as the handler; the pool is never
    // freed; errno is the thread's own.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let pool = SlotPool::current();
        let info = *info.cast::<threads::SigInfo>();
        // What is to be sampled, and how many ticks were not delivered.
        let ours = pool.and_then(|pool| match info.code {
            libc::SI_TIMER => Some((pool, info.value, info.uid.into())),
            libc::SI_QUEUE => (info.pid as Pid == pool.pid()).then_some((pool, info.value, 0)),
            POLL_IN | POLL_HUP => {
                let fd = info.value as i32;
                let is_tick = signal == EVENT_SIGNAL && ClosedAtFork::is(fd);
                if is_tick && info.code == POLL_HUP {
                    // It is open, or the calls fail.
                    pool.tick_on(BorrowedFd::borrow_raw(fd));
                }
                is_tick.then(|| (pool, pool.recording(), 0))
            }
            _ => None,
        });
        if let Some((pool, value, overrun)) = ours {
            let context = &mut *context.cast::<libc::ucontext_t>();
            let mut regs = SignalRegs::from_context(&context.uc_mcontext);
            pool.handle(value, overrun, regs.regs());
            // The program must not notice that it is sampled: a system call that we have interrupted is restarted,
            // unless another signal is involved.
            let read = |at: u64, into: &mut [u8]| sys::memory::read_memory(pool.pid(), at, into) == into.len();
            if regs.interrupted_call() && !threads::other_signal_waits(signal) && regs.restart_call(&read) {
                regs.store(&mut context.uc_mcontext);
            }
        }
        *errno = before;
    }
}

/// Installs the handler for the highest unused real-time signal and returns its number; in a process forked from one
/// with the handler, that signal's.
///
/// # Errors
/// All have handlers.
pub fn install() -> io::Result<i32> {
    // The last one is what debuggers and other programs use first.
    let mut signals = (libc::SIGRTMIN()..libc::SIGRTMAX()).rev();
    let free = signals.find(|signal| install_for(*signal).is_ok());
    free.ok_or_else(|| io::ErrorKind::AddrInUse.into())
}

/// Installs the handler for a signal, unless it is installed.
///
/// # Errors
/// It has another handler, or is ignored.
pub fn install_for(signal: i32) -> io::Result<()> {
    // SAFETY: the structures are zeroed before they are filled and live as long as the calls; the handler stays for as long as
    // the process does.
    unsafe {
        let mut old: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut old);
        if old.sa_sigaction == on_signal as *const () as usize {
            return Ok(());
        }
        if old.sa_sigaction != libc::SIG_DFL {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
        action.sa_mask = threads::all_but_faults();
        match libc::sigaction(signal, &action, std::ptr::null_mut()) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Discards what is pending of the signal in all threads, blocked or not: setting a signal to be ignored does that
/// (sigaction(2)). Ticks that come in between are lost.
pub fn discard_pending(signal: i32) {
    if !is_installed(signal) {
        return;
    }
    // SAFETY: the structures are zeroed before they are filled and live as long as the calls; the handler is put back.
    unsafe {
        let (mut ignore, mut ours): (libc::sigaction, libc::sigaction) = (std::mem::zeroed(), std::mem::zeroed());
        ignore.sa_sigaction = libc::SIG_IGN;
        libc::sigaction(signal, &ignore, &mut ours);
        libc::sigaction(signal, &ours, std::ptr::null_mut());
    }
}

/// Is the handler still installed? Another one may have replaced it.
pub fn is_installed(signal: i32) -> bool {
    // SAFETY: the structure is zeroed before it is filled and lives as long as the call.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut now);
        now.sa_sigaction == on_signal as *const () as usize
    }
}
