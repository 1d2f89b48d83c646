//! Hooks on the loader's own entry points. They must not be between the loader and its caller: `dlopen` searches the
//! caller's run path and `dlsym` its place in the order of modules, and both know the caller by the return address. So
//! these two save their arguments, find out where to continue, and jump there.

use std::arch::naked_asm;
use std::ffi::{c_char, c_int, c_void};

/// Calls a function with these arguments, and jumps to the address that it returns.
#[cfg(target_arch = "x86_64")]
macro_rules! checks_and_jumps {
    ($function:path) => {
        naked_asm!(
            "endbr64",
            "push rdi",
            "push rsi",
            "sub rsp, 8",
            "call {}",
            "add rsp, 8",
            "pop rsi",
            "pop rdi",
            "jmp rax",
            sym $function,
        )
    };
}

/// The same. `hint 34` is `bti c`.
#[cfg(target_arch = "aarch64")]
macro_rules! checks_and_jumps {
    ($function:path) => {
        naked_asm!(
            "hint 34",
            "stp x29, x30, [sp, -32]!",
            "mov x29, sp",
            "stp x0, x1, [sp, 16]",
            "bl {}",
            "mov x16, x0",
            "ldp x0, x1, [sp, 16]",
            "ldp x29, x30, [sp], 32",
            "br x16",
            sym $function,
        )
    };
}

/// The hook on `dlopen`.
///
/// # Safety
/// As `dlopen`.
#[unsafe(naked)]
pub unsafe extern "C" fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void {
    checks_and_jumps!(crate::got::before_dlopen)
}

/// The hook on `dlsym`.
///
/// # Safety
/// As `dlsym`.
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    checks_and_jumps!(crate::got::before_dlsym)
}
