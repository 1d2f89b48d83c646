//! Anonymous memory that is mapped by `mmap`: sampled as blocks are, and followed until it is unmapped.
//!
//! Mappings are unmapped in parts, and by other calls than those that made them: so a sampled one is known by its range. There
//! are few of these calls, and they cost microseconds: a short table behind a lock will do.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::got::{self, Which};
use crate::sampling::Known;
use crate::{Pointer, page_size, sampling, while_busy};

/// Ranges of sampled mappings that are known at a time.
const MAX_RANGES: usize = 4096;
/// Attempts to get the lock, which is kept for microseconds. A thread that is stopped with it must not stop the others.
const ATTEMPTS: usize = 10_000;
/// Parts of sampled mappings that one call can remove and, if it fails, give back.
const MAX_PARTS: usize = 16;

/// A range of a sampled mapping.
#[derive(Clone, Copy)]
struct MappedRange {
    start: usize,
    end: usize,
    of: Known,
}

const NOTHING: MappedRange = MappedRange {
    start: 0,
    end: 0,
    of: Known::NOTHING,
};

struct Table {
    is_locked: AtomicBool,
    ranges: UnsafeCell<[MappedRange; MAX_RANGES]>,
    /// Ranges in use, the first ones.
    used: AtomicUsize,
}

// SAFETY: `ranges` is used with `is_locked` set by the same thread only.
unsafe impl Sync for Table {}

static TABLE: Table = Table {
    is_locked: AtomicBool::new(false),
    ranges: UnsafeCell::new([NOTHING; MAX_RANGES]),
    used: AtomicUsize::new(0),
};

/// The ranges of the table, with the lock.
struct Ranges<'a>(&'a mut [MappedRange; MAX_RANGES]);

impl Ranges<'_> {
    fn used(&self) -> usize {
        TABLE.used.load(Ordering::Relaxed).min(MAX_RANGES)
    }

    /// Adds a range; false if there is no room.
    fn add(&mut self, range: MappedRange) -> bool {
        let used = self.used();
        let Some(place) = self.0.get_mut(used) else {
            return false;
        };
        *place = range;
        TABLE.used.store(used + 1, Ordering::Relaxed);
        true
    }

    /// Takes out what lies in `gone`, and calls `taken` with each part.
    fn take(&mut self, gone: &Range<usize>, mut taken: impl FnMut(MappedRange)) {
        let mut at = 0;
        while at < self.used() {
            let found = self.0[at];
            let part = found.start.max(gone.start)..found.end.min(gone.end);
            if part.is_empty() {
                at += 1;
                continue;
            }
            taken(MappedRange {
                start: part.start,
                end: part.end,
                ..found
            });
            let rest = [found.start..part.start, part.end..found.end];
            let mut rest = rest
                .into_iter()
                .filter(|rest| !rest.is_empty())
                .map(|rest| MappedRange {
                    start: rest.start,
                    end: rest.end,
                    ..found
                });
            match rest.next() {
                Some(first) => {
                    self.0[at] = first;
                    if let Some(second) = rest.next().filter(|second| !self.add(*second)) {
                        sampling::not_followed(second.of);
                    }
                    at += 1;
                }
                None => {
                    let last = self.used() - 1;
                    self.0[at] = self.0[last];
                    TABLE.used.store(last, Ordering::Relaxed);
                }
            }
        }
    }
}

/// Calls `call` with the table; `None` if this thread uses it already, or another one keeps it.
fn with_ranges<T>(call: impl FnOnce(&mut Ranges<'_>) -> T) -> Option<T> {
    let is_ours = || {
        let claimed = TABLE
            .is_locked
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        if claimed.is_err() {
            std::thread::yield_now();
        }
        claimed.is_ok()
    };
    // A signal handler that interrupts this thread finds it busy, and keeps off.
    let result = while_busy(|_| {
        (0..ATTEMPTS).any(|_| is_ours()).then(|| {
            // SAFETY: the lock is ours, and no signal handler comes here.
            let result = call(&mut Ranges(unsafe { &mut *TABLE.ranges.get() }));
            TABLE.is_locked.store(false, Ordering::Release);
            result
        })
    });
    result.flatten()
}

/// Forgets all mappings, before a recording.
pub fn forget_all() {
    with_ranges(|_| TABLE.used.store(0, Ordering::Relaxed));
}

/// In a forked child: the mappings are its parent's, of which another thread may have had the lock.
pub fn forget_in_child() {
    TABLE.used.store(0, Ordering::Relaxed);
    TABLE.is_locked.store(false, Ordering::Release);
}

/// The pages that a call is about. None if the arguments are out of range: the call fails.
fn pages(start: Pointer, length: usize) -> Option<Range<usize>> {
    let length = length.checked_next_multiple_of(page_size())?;
    let start = start as usize;
    Some(start..start.checked_add(length)?)
}

/// Parts of sampled mappings that a call removes.
struct Removed {
    parts: [MappedRange; MAX_PARTS],
    count: usize,
}

/// Takes what lies in a range out of the table: before the call, after which another thread may have been given the range.
fn remove(range: Option<Range<usize>>) -> Removed {
    let mut removed = Removed {
        parts: [NOTHING; MAX_PARTS],
        count: 0,
    };
    let Some(range) = range.filter(|_| TABLE.used.load(Ordering::Relaxed) != 0) else {
        return removed;
    };
    with_ranges(|ranges| {
        ranges.take(&range, |part| match removed.parts.get_mut(removed.count) {
            Some(place) => {
                *place = part;
                removed.count += 1;
            }
            None => sampling::resized(part.of, -change(part.end - part.start)),
        })
    });
    removed
}

impl Removed {
    fn parts(&self) -> &[MappedRange] {
        self.parts.get(..self.count).unwrap_or_default()
    }

    /// The call has succeeded.
    fn report(&self) {
        for part in self.parts() {
            sampling::resized(part.of, -change(part.end - part.start));
        }
    }

    /// The call has failed, and nothing has changed.
    fn give_back(&self) {
        for part in self.parts() {
            follow(*part);
        }
    }
}

/// Adds a range to the table.
fn follow(range: MappedRange) {
    if with_ranges(|ranges| ranges.add(range)) != Some(true) {
        sampling::not_followed(range.of);
    }
}

fn change(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Samples a range that has been mapped. Address space that is only reserved is no memory.
fn mapped(range: Range<usize>, protection: c_int, flags: c_int) {
    if flags & libc::MAP_ANONYMOUS == 0 || protection == libc::PROT_NONE || !sampling::count(range.len()) {
        return;
    }
    if let Some(of) = sampling::mapped(range.len()) {
        follow(MappedRange {
            start: range.start,
            end: range.end,
            of,
        });
    }
}

macro_rules! real {
    ($which:ident, fn($($type:ty),*) -> $result:ty) => {{
        let real = got::real(Which::$which);
        // SAFETY: the function of this name, as the loader found it.
        let real: unsafe extern "C" fn($($type),*) -> $result = unsafe { std::mem::transmute(real) };
        real
    }};
}

macro_rules! map {
    ($($hook:ident is $which:ident;)*) => {$(
        /// # Safety
        /// As `mmap`.
        pub unsafe extern "C" fn $hook(
            at: Pointer,
            length: usize,
            protection: c_int,
            flags: c_int,
            file: c_int,
            offset: libc::off64_t,
        ) -> Pointer {
            let real = real!($which, fn(Pointer, usize, c_int, c_int, c_int, libc::off64_t) -> Pointer);
            // What was mapped there before.
            let removed = (flags & libc::MAP_FIXED != 0).then(|| remove(pages(at, length)));
            // SAFETY: the caller's own arguments.
            let given = unsafe { real(at, length, protection, flags, file, offset) };
            if given == libc::MAP_FAILED {
                if let Some(removed) = &removed {
                    removed.give_back();
                }
                return given;
            }
            if let Some(removed) = &removed {
                removed.report();
            }
            if let Some(range) = pages(given, length) {
                mapped(range, protection, flags);
            }
            given
        }
    )*};
}

map! {
    mmap is Mmap;
    mmap64 is Mmap64;
}

/// # Safety
/// As `munmap`.
pub unsafe extern "C" fn munmap(at: Pointer, length: usize) -> c_int {
    let real = real!(Munmap, fn(Pointer, usize) -> c_int);
    let removed = remove(pages(at, length));
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(at, length) };
    if result == 0 {
        removed.report();
    } else {
        removed.give_back();
    }
    result
}

/// The C library's function has a variable number of arguments: the last one is passed on as it is, used or not.
///
/// # Safety
/// As `mremap`.
pub unsafe extern "C" fn mremap(
    old: Pointer,
    old_length: usize,
    length: usize,
    flags: c_int,
    new_address: Pointer,
) -> Pointer {
    let real = real!(Mremap, fn(Pointer, usize, usize, c_int, Pointer) -> Pointer);
    let replaced = (flags & libc::MREMAP_FIXED != 0).then(|| remove(pages(new_address, length)));
    let removed = remove(pages(old, old_length));
    // SAFETY: the caller's own arguments.
    let given = unsafe { real(old, old_length, length, flags, new_address) };
    if given == libc::MAP_FAILED {
        removed.give_back();
        replaced.iter().for_each(Removed::give_back);
        return given;
    }
    replaced.iter().for_each(Removed::report);
    let (old, new) = (pages(old, old_length), pages(given, length));
    let (Some(old), Some(new)) = (old, new) else {
        removed.report();
        return given;
    };
    for part in removed.parts() {
        // It keeps its place in the mapping, whose end moves.
        let moved = part.start - old.start..if part.end == old.end {
            new.len()
        } else {
            part.end - old.start
        };
        let moved = moved.start.min(new.len())..moved.end.min(new.len());
        sampling::resized(part.of, change(moved.len()) - change(part.end - part.start));
        if !moved.is_empty() {
            follow(MappedRange {
                start: new.start + moved.start,
                end: new.start + moved.end,
                of: part.of,
            });
        }
    }
    given
}

/// The hooks' addresses, for the table in `got.rs`.
pub fn address(which: Which) -> Option<*const c_void> {
    Some(match which {
        Which::Mmap => mmap as *const c_void,
        Which::Mmap64 => mmap64 as *const c_void,
        Which::Munmap => munmap as *const c_void,
        Which::Mremap => mremap as *const c_void,
        _ => return None,
    })
}
