//! What a hook remembers about the thread that it runs on.
//!
//! The words lie in *initial-exec* thread-local storage: at a fixed distance from the thread pointer, part of every
//! thread's block from its birth to its end. So reading them never allocates, as the usual storage of a module that is
//! loaded late does on a thread's first access, and has no destructor that a `free` at the thread's end could come after.
//! Stable Rust offers no such storage, hence the few lines of assembly, the only ones that depend on the CPU here
//! together with `thunk.rs`.
//!
//! musl has no such storage for modules that are loaded late. But it gives every thread the usual one when it loads a
//! module or starts a thread (ldso/dynlink.c of 1.2), so that there the usual one will do.

#[cfg(target_env = "musl")]
use std::cell::UnsafeCell;

use crate::MAX_HANDLERS;

/// A handler's own word for a thread.
#[repr(C)]
pub struct Cache {
    /// The installation of a handler that `word` belongs to. Another value means that this handler has not been called on
    /// this thread.
    pub(crate) generation: u64,
    /// The word; 0 when the handler is first called on the thread.
    pub word: u64,
}

/// Values of [`HookThread::is_busy`]: a handler runs; what is allocated is not the program's.
pub const IN_HANDLER: u32 = 1;
pub const SILENT: u32 = 2;

/// Zero at the thread's birth.
#[repr(C)]
pub struct HookThread {
    /// Bytes that may still be allocated until the thread looks whether a block is to be sampled.
    pub left: u64,
    /// Bytes after these until a block is sampled.
    pub rest: u64,
    /// Mean of the distance that both were drawn with, bytes; 0: none was drawn yet.
    pub mean: u64,
    /// Distances that were drawn so far.
    pub draws: u64,
    /// State of the random numbers.
    pub random: u64,
    /// Not zero: what this thread, or a signal handler that interrupts it, allocates is not reported.
    pub is_busy: u32,
    /// An entry point of the C library's allocator is being called: others that it calls in turn are part of it.
    pub is_in_native: u32,
    /// An allocator domain of Python is being called: what it requests from other ones is part of it.
    pub is_in_python: u32,
    /// The call of Python's domain reached the C library's allocator.
    pub has_reached_native: u32,
    pub caches: [Cache; MAX_HANDLERS],
}

// The symbol is hidden: the linker resolves it within this module, to an offset from the thread pointer that the loader
// writes once.
#[cfg(not(target_env = "musl"))]
std::arch::global_asm!(
    ".pushsection .tbss.nativeprof_hook_thread,\"awT\",@nobits",
    ".hidden nativeprof_hook_thread",
    ".globl nativeprof_hook_thread",
    ".type nativeprof_hook_thread,@object",
    ".size nativeprof_hook_thread, {size}",
    ".balign 16",
    "nativeprof_hook_thread:",
    ".zero {size}",
    ".popsection",
    size = const size_of::<HookThread>(),
);

/// The calling thread's words. Valid for as long as the thread runs; to be used by this thread only, and through the
/// pointer: a signal handler may change them between two accesses.
#[cfg(target_env = "musl")]
pub fn current() -> *mut HookThread {
    thread_local! {
        static THREAD: UnsafeCell<HookThread> = const {
            UnsafeCell::new(HookThread {
                left: 0,
                rest: 0,
                mean: 0,
                draws: 0,
                random: 0,
                is_busy: 0,
                is_in_native: 0,
                is_in_python: 0,
                has_reached_native: 0,
                caches: [const { Cache { generation: 0, word: 0 } }; MAX_HANDLERS],
            })
        };
    }
    THREAD.with(UnsafeCell::get)
}

/// The calling thread's words. Valid for as long as the thread runs; to be used by this thread only, and through the
/// pointer: a signal handler may change them between two accesses.
#[cfg(not(target_env = "musl"))]
#[inline(always)]
pub fn current() -> *mut HookThread {
    let thread: *mut HookThread;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: reads the thread pointer (its own address is its first word, as the ABI has it) and the offset that the
    // loader wrote into this module's table.
    unsafe {
        std::arch::asm!(
            "mov {0}, qword ptr fs:[0]",
            "add {0}, qword ptr [rip + nativeprof_hook_thread@GOTTPOFF]",
            out(reg) thread,
            options(pure, readonly, nostack),
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above; there the thread pointer is a register.
    unsafe {
        std::arch::asm!(
            "mrs {0}, tpidr_el0",
            "adrp {1}, :gottprel:nativeprof_hook_thread",
            "ldr {1}, [{1}, :gottprel_lo12:nativeprof_hook_thread]",
            "add {0}, {0}, {1}",
            out(reg) thread,
            out(reg) _,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    thread
}
