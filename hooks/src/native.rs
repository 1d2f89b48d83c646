//! Hooks on the C library's allocator.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use crate::got::{self, Which};
use crate::{Allocation, AllocatorCall, Domain, MASKS, Pointer, clock, count_skipped, notify, sampling, thread};

/// Calls `real` as the outermost entry point, and says whether it was: what it calls in turn is part of it, and what
/// Python's allocators call is reported as theirs.
#[inline(always)]
fn outermost<T>(real: impl FnOnce() -> T) -> (T, bool) {
    let thread = thread::current();
    // SAFETY: this thread's own words.
    unsafe {
        if (*thread).is_busy != 0 {
            count_skipped(thread);
            return (real(), false);
        }
        if (*thread).is_in_native != 0 {
            return (real(), false);
        }
        if (*thread).is_in_python != 0 {
            (*thread).has_reached_native = 1;
            return (real(), false);
        }
        (*thread).is_in_native = 1;
        let result = real();
        (*thread).is_in_native = 0;
        (result, true)
    }
}

/// No handler is installed.
#[inline(always)]
fn is_idle() -> bool {
    MASKS.native.load(Ordering::Relaxed) | MASKS.python.load(Ordering::Relaxed) == 0
}

fn report(kind: AllocatorCall, address: usize, size: usize, old_address: usize, before: u64) {
    let allocation = Allocation {
        kind,
        domain: Domain::Native,
        address,
        size,
        old_address,
        before,
        has_reached_native: true,
    };
    notify(&MASKS.native, |handler, cache| {
        handler.on_allocation(cache, &allocation)
    });
}

/// A function that gives a block, or null. Where nothing is to be done it is only called: the path of most calls.
#[inline(always)]
fn gives(kind: AllocatorCall, size: usize, real: impl FnOnce() -> Pointer) -> Pointer {
    let is_due = sampling::count(size);
    if is_due || !is_idle() {
        reported(kind, size, is_due, real)
    } else {
        real()
    }
}

#[cold]
#[inline(never)]
fn reported(kind: AllocatorCall, size: usize, is_due: bool, real: impl FnOnce() -> Pointer) -> Pointer {
    sampling::gives(size, is_due, || {
        if is_idle() {
            return real();
        }
        let (block, is_outermost) = outermost(real);
        if is_outermost && !block.is_null() {
            report(kind, block as usize, size, 0, 0);
        }
        block
    })
}

macro_rules! real {
    ($which:ident, fn($($type:ty),*) $(-> $result:ty)?) => {{
        let real = got::real(Which::$which);
        // SAFETY: the function of this name, as the loader found it.
        let real: unsafe extern "C" fn($($type),*) $(-> $result)? = unsafe { std::mem::transmute(real) };
        real
    }};
}

/// # Safety
/// As `malloc`, and so on for the others.
pub unsafe extern "C" fn malloc(size: usize) -> Pointer {
    let real = real!(Malloc, fn(usize) -> Pointer);
    // SAFETY: the caller's own arguments, here and below.
    gives(AllocatorCall::Malloc, size, move || unsafe { real(size) })
}

/// # Safety
/// As `calloc`.
pub unsafe extern "C" fn calloc(count: usize, each: usize) -> Pointer {
    let real = real!(Calloc, fn(usize, usize) -> Pointer);
    // SAFETY: as above.
    gives(AllocatorCall::Calloc, count.saturating_mul(each), move || unsafe {
        real(count, each)
    })
}

/// # Safety
/// As `memalign`.
pub unsafe extern "C" fn memalign(alignment: usize, size: usize) -> Pointer {
    let real = real!(Memalign, fn(usize, usize) -> Pointer);
    // SAFETY: as above.
    gives(AllocatorCall::Malloc, size, move || unsafe { real(alignment, size) })
}

/// # Safety
/// As `aligned_alloc`.
pub unsafe extern "C" fn aligned_alloc(alignment: usize, size: usize) -> Pointer {
    let real = real!(AlignedAlloc, fn(usize, usize) -> Pointer);
    // SAFETY: as above.
    gives(AllocatorCall::Malloc, size, move || unsafe { real(alignment, size) })
}

/// # Safety
/// As `valloc`.
pub unsafe extern "C" fn valloc(size: usize) -> Pointer {
    let real = real!(Valloc, fn(usize) -> Pointer);
    // SAFETY: as above.
    gives(AllocatorCall::Malloc, size, move || unsafe { real(size) })
}

/// # Safety
/// As `pvalloc`.
pub unsafe extern "C" fn pvalloc(size: usize) -> Pointer {
    let real = real!(Pvalloc, fn(usize) -> Pointer);
    // SAFETY: as above.
    gives(AllocatorCall::Malloc, size, move || unsafe { real(size) })
}

/// # Safety
/// As `posix_memalign`.
pub unsafe extern "C" fn posix_memalign(place: *mut Pointer, alignment: usize, size: usize) -> c_int {
    let real = real!(PosixMemalign, fn(*mut Pointer, usize, usize) -> c_int);
    let mut error = 0;
    gives(AllocatorCall::Malloc, size, || {
        // SAFETY: as above; if it succeeds, it has written the block's address there.
        unsafe {
            error = real(place, alignment, size);
            if error == 0 { *place } else { std::ptr::null_mut() }
        }
    });
    error
}

/// A function that gives a block in the place of another one.
#[cold]
#[inline(never)]
fn moves(old: Pointer, size: usize, real: impl FnOnce() -> Pointer) -> Pointer {
    if is_idle() {
        return real();
    }
    let before = Cell::new(0);
    let thread = thread::current();
    // SAFETY: this thread's own words.
    let is_plain = unsafe { (*thread).is_in_native | (*thread).is_in_python | (*thread).is_busy } == 0;
    if is_plain && !old.is_null() {
        clock(&MASKS.native, |now| before.set(now));
    }
    let (block, is_outermost) = outermost(real);
    // A null block means that it failed, or that the call was to free.
    if is_outermost && (!block.is_null() || (size == 0 && !old.is_null())) {
        report(AllocatorCall::Realloc, block as usize, size, old as usize, before.get());
    }
    block
}

#[inline(never)]
fn moves_followed(old: Pointer, size: usize, is_due: bool, real: impl FnOnce() -> Pointer) -> Pointer {
    sampling::moves(old, size, is_due, || moves(old, size, real))
}

/// # Safety
/// As `realloc`.
pub unsafe extern "C" fn realloc(old: Pointer, size: usize) -> Pointer {
    let real = real!(Realloc, fn(Pointer, usize) -> Pointer);
    let is_due = sampling::count(size);
    // SAFETY: as above.
    let real = move || unsafe { real(old, size) };
    if is_due || sampling::is_suspect(old) || !is_idle() {
        return moves_followed(old, size, is_due, real);
    }
    real()
}

/// # Safety
/// As `reallocarray`.
pub unsafe extern "C" fn reallocarray(old: Pointer, count: usize, each: usize) -> Pointer {
    let real = real!(Reallocarray, fn(Pointer, usize, usize) -> Pointer);
    let size = count.saturating_mul(each);
    let before = sampling::position();
    // SAFETY: as above.
    let real = || moves(old, size, move || unsafe { real(old, count, each) });
    let block = if sampling::is_suspect(old) {
        sampling::moves_suspect(old, size, real)
    } else {
        real()
    };
    // Where the C library calls `realloc` through a slot (malloc/reallocarray.c of glibc 2.36) its bytes have been counted.
    if sampling::position() == before && sampling::count(size) {
        sampling::given(block, size);
    }
    block
}

/// # Safety
/// As `free`.
pub unsafe extern "C" fn free(block: Pointer) {
    let real = real!(Free, fn(Pointer));
    if sampling::is_suspect(block) || !is_idle() {
        return free_followed(block, real);
    }
    // SAFETY: as above.
    unsafe { real(block) }
}

#[cold]
#[inline(never)]
extern "C" fn free_followed(block: Pointer, real: unsafe extern "C" fn(Pointer)) {
    ends(block);
    // SAFETY: the caller's own argument.
    unsafe { real(block) }
}

/// A block is about to be freed.
fn ends(block: Pointer) {
    sampling::ends(block);
    if is_idle() || block.is_null() {
        return;
    }
    let thread = thread::current();
    // SAFETY: this thread's own words.
    unsafe {
        if (*thread).is_in_python != 0 {
            (*thread).has_reached_native = 1;
        } else if (*thread).is_in_native == 0 && (*thread).is_busy == 0 {
            report(AllocatorCall::Free, block as usize, 0, 0, 0);
        }
    }
}

/// The hooks' addresses, for the table in `got.rs`.
pub fn address(which: Which) -> Option<*const c_void> {
    Some(match which {
        Which::Malloc => malloc as *const c_void,
        Which::Calloc => calloc as *const c_void,
        Which::Realloc => realloc as *const c_void,
        Which::Free => free as *const c_void,
        Which::PosixMemalign => posix_memalign as *const c_void,
        Which::AlignedAlloc => aligned_alloc as *const c_void,
        Which::Memalign => memalign as *const c_void,
        Which::Valloc => valloc as *const c_void,
        Which::Pvalloc => pvalloc as *const c_void,
        Which::Reallocarray => reallocarray as *const c_void,
        _ => return None,
    })
}
