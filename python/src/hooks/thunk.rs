//! Hooks on the loader's own entry points. They must not be between the loader and its caller: `dlopen` searches the
//! caller's run path and `dlsym` its place in the order of modules, and both know the caller by the return address. So
//! these two save their arguments, find out where to continue, and jump there.

use std::arch::naked_asm;
use std::ffi::{c_char, c_int, c_void};

/// The hook on `dlopen`.
///
/// # Safety
/// As `dlopen`.
#[unsafe(naked)]
pub unsafe extern "C" fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void {
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
        sym super::got::before_dlopen,
    )
}

/// The hook on `dlsym`.
///
/// # Safety
/// As `dlsym`.
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
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
        sym super::got::before_dlsym,
    )
}
