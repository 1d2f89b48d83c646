//! Handlers that are installed in this program see what the C library does for it. (Calls of this program's own module
//! are not hooked.)

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nativeprof_hooks::{
    Allocation, AllocatorCall, Cache, Domain, Handler, HookSet, Installed, MAX_HANDLERS, Refusal, install, silently,
    slots, with_cache,
};

const NATIVE: HookSet = HookSet {
    native: true,
    python: false,
    waits: false,
};

/// Remembers the last block of a size that nothing else requests.
#[derive(Default)]
struct Seen {
    blocks: AtomicUsize,
    last: AtomicUsize,
    calls_of_thread: AtomicU64,
}

/// `strdup` of this many bytes and a zero.
const SIZE: usize = 4241;

impl Handler for Seen {
    fn on_allocation(&self, cache: &mut Cache, allocation: &Allocation) {
        if allocation.kind == AllocatorCall::Malloc && allocation.size == SIZE + 1 {
            assert_eq!(allocation.domain, Domain::Native);
            cache.word += 1;
            self.blocks.fetch_add(1, Ordering::Relaxed);
            self.last.store(allocation.address, Ordering::Relaxed);
            self.calls_of_thread.store(cache.word, Ordering::Relaxed);
        }
    }
}

/// The tests count what is installed in the process, so one runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets the C library allocate a block of `SIZE + 1` bytes, and gives its address.
fn allocate() -> usize {
    let text = [[b'x'; SIZE].as_slice(), &[0]].concat();
    // SAFETY: the text ends with a zero; the block is the C library's, and is given back to it.
    unsafe {
        // Else the compiler takes away the pair of calls, which it knows.
        let block = std::hint::black_box(libc::strdup(text.as_ptr().cast()));
        libc::free(block.cast());
        block as usize
    }
}

fn installed(wanted: HookSet) -> (Arc<Seen>, Result<Installed, Refusal>) {
    let seen = Arc::new(Seen::default());
    let installed = install(seen.clone(), wanted);
    (seen, installed)
}

/// Address slots of the C library's own calls of `malloc`.
fn hooked() -> Vec<usize> {
    let of_malloc = slots().into_iter().filter(|slot| slot.function == "malloc");
    of_malloc.map(|slot| slot.value).collect()
}

#[test]
fn a_handler_sees_calls_until_it_is_removed() {
    let _alone = alone();
    let before = hooked();
    let (seen, installed) = installed(NATIVE);
    let mut installed = installed.expect("a handler");
    assert_ne!(hooked(), before);
    let address = allocate();
    let count = || seen.blocks.load(Ordering::Relaxed);
    assert_eq!((count(), seen.last.load(Ordering::Relaxed)), (1, address));

    // The word is the thread's own.
    std::thread::spawn(allocate).join().expect("a thread");
    assert_eq!((count(), seen.calls_of_thread.load(Ordering::Relaxed)), (2, 1));
    assert_eq!(with_cache(installed.ticket(), |cache| cache.word), Some(1));

    silently(allocate);
    assert_eq!(installed.while_silent(allocate).map(|_| count()), Some(2));
    allocate();
    assert_eq!(count(), 3);

    assert!(installed.remove() && !installed.is_current());
    allocate();
    assert_eq!(count(), 3);
    assert_eq!(hooked(), before);
    assert!(installed.remove(), "again");
}

#[test]
fn what_cannot_be_hooked_is_refused() {
    let _alone = alone();
    let before = hooked();
    let all = HookSet { python: true, ..NATIVE };
    assert_eq!(installed(all).1.err(), Some(Refusal::NoPythonAllocator));
    let full: Vec<_> = (0..MAX_HANDLERS)
        .map(|_| installed(NATIVE).1.expect("a handler"))
        .collect();
    assert_eq!(installed(NATIVE).1.err(), Some(Refusal::TooManyHandlers));
    drop(full);
    assert_eq!(hooked(), before);
}

#[test]
fn a_forked_child_has_no_handlers() {
    let _alone = alone();
    let (seen, installed) = installed(NATIVE);
    let installed = installed.expect("a handler");
    allocate();
    // SAFETY: the child allocates, which is allowed after `fork` with glibc, and ends without anything of the parent's.
    let child = unsafe { libc::fork() };
    if child == 0 {
        allocate();
        let is_silent = seen.blocks.load(Ordering::Relaxed) == 1 && !installed.is_current();
        let is_reusable = install(seen.clone(), NATIVE).is_ok_and(|again| {
            allocate();
            again.is_current() && seen.blocks.load(Ordering::Relaxed) == 2
        });
        // SAFETY: no preconditions.
        unsafe { libc::_exit(i32::from(!(is_silent && is_reusable))) };
    }
    let mut status = -1;
    // SAFETY: the status is written to.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    allocate();
    assert_eq!(seen.blocks.load(Ordering::Relaxed), 2);
}
