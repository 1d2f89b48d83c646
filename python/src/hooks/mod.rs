//! Hooks on the memory allocators and on the waiting system calls of the process that we are in.
//!
//! | what | how | file |
//! |---|---|---|
//! | `malloc`, `calloc`, `realloc`, `free`, `posix_memalign`, ... of the C library | address slots of all loaded modules | `got.rs`, `native.rs` |
//! | Python's allocator domains raw, mem and obj | `PyMem_SetAllocator` | `pymem.rs` |
//! | `epoll_wait`, `poll`, `select` and their variants | as the C library's allocator | `wait.rs` |
//!
//! Put there by the first [`install`], taken away with the last [`Installed`]. Where another tool has put a hook above
//! ours meanwhile, ours stays and passes through.
//!
//! **Not seen**: `mmap` and `brk`; allocators linked into a module (jemalloc in some wheels), or reached by an address
//! that was looked up (`dlsym`, so `ctypes` too) or stored before; what the loader allocates for itself; calls between
//! functions of the C library, except `malloc`, `calloc`, `realloc` and `free` where it calls them through its own
//! slots, as glibc does; what a library allocates while it is loaded; modules in other link namespaces (`dlmopen`).
//!
//! **On the path of a call** no lock is taken, nothing is allocated and no Python object is touched: two atomic
//! additions to a counter shared by few threads, and the handlers. A handler is never called from within a handler on
//! the same thread; `errno` is preserved.
//!
//! **fork**: in the child all handlers are gone and the hooks pass through until it installs its own.

mod elf;
mod got;
mod native;
mod pymem;
pub mod thread;
mod thunk;
mod wait;

use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

pub use got::slots;
pub use thread::Cache;

/// A block of memory, or the context of an allocator.
type Pointer = *mut std::ffi::c_void;

/// Handlers at a time.
pub const MAX_HANDLERS: usize = 8;

/// The operation of an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocatorCall {
    /// Also `posix_memalign` and its like.
    Malloc,
    Calloc,
    /// The old block is gone; called after it succeeded.
    Realloc,
    /// Called before the block is freed, so that no other thread can have been given its address yet.
    Free,
}

/// Whose allocator. Numbers of Python's domains are those of `PyMemAllocatorDomain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Domain {
    Raw = 0,
    Mem = 1,
    Obj = 2,
    /// The C library.
    Native = 3,
}

/// One successful operation of an allocator, as the program requested it.
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    pub kind: AllocatorCall,
    pub domain: Domain,
    /// The block: new (malloc, calloc, realloc) or about to go (free). A `realloc` to nothing gives 0.
    pub address: usize,
    /// Bytes requested; 0 for free.
    pub size: usize,
    /// Realloc: the block that went, 0 if there was none.
    pub old_address: usize,
    /// Realloc: [`Handler::clock`] before the call; else 0. By then the old block was still there.
    pub before: u64,
    /// A call of Python's allocator that was passed on to the C library's. It is reported once, as Python's. Of a free
    /// it is not known yet: false.
    pub has_reached_native: bool,
}

/// A waiting system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    Enter,
    Leave,
}

/// What is called by the hooks, on the thread that made the call, with or without the interpreter's lock, perhaps in a
/// signal handler. It must not allocate, wait, or touch Python objects.
pub trait Handler: Send + Sync {
    /// An allocation or a free.
    fn on_allocation(&self, _: &mut Cache, _: &Allocation) {}

    /// A wait begins or has ended.
    fn on_wait(&self, _: &mut Cache, _: Wait) {}

    /// Time, in the handler's own unit, for [`Allocation::before`].
    fn clock(&self) -> u64 {
        0
    }
}

/// Which hooks a handler wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HookSet {
    pub native: bool,
    pub python: bool,
    pub waits: bool,
}

/// The handlers that want each kind of call, by bit.
#[derive(Default)]
struct Masks {
    native: AtomicU32,
    python: AtomicU32,
    waits: AtomicU32,
}

static MASKS: Masks = Masks {
    native: AtomicU32::new(0),
    python: AtomicU32::new(0),
    waits: AtomicU32::new(0),
};

/// A handler's place; the pointer is to its `Arc`, boxed because it is two words.
static HANDLERS: [AtomicPtr<Arc<dyn Handler>>; MAX_HANDLERS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_HANDLERS];
static GENERATIONS: [AtomicU64; MAX_HANDLERS] = [const { AtomicU64::new(0) }; MAX_HANDLERS];
static NEXT_GENERATION: AtomicU64 = AtomicU64::new(1);
/// Calls that a signal handler made while a handler ran.
static SKIPPED: AtomicU64 = AtomicU64::new(0);
/// Counted up in each forked child: what was installed before it is the parent's.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Threads that are in handlers, counted in several places so that they do not contend for one cache line.
#[repr(align(128))]
struct Shard(AtomicU32);
const SHARDS: usize = 64;
static INSIDE: [Shard; SHARDS] = [const { Shard(AtomicU32::new(0)) }; SHARDS];

/// How long an uninstallation waits for handlers that run.
const UNINSTALL_TIMEOUT: Duration = Duration::from_secs(5);

fn page_size() -> usize {
    // SAFETY: no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Calls `call` with each handler in the mask.
#[inline]
fn notify(mask: &AtomicU32, call: impl Fn(&dyn Handler, &mut Cache)) {
    let thread = thread::current();
    // SAFETY: this thread's own words, and the handlers' words are used by one handler at a time, since `is_busy` keeps
    // others off; errno is this thread's own too.
    unsafe {
        if (*thread).is_busy != 0 {
            count_skipped(thread);
            return;
        }
        (*thread).is_busy = thread::IN_HANDLER;
        compiler_fence(Ordering::SeqCst);
        // Thread blocks are far apart and aligned: the low bits say nothing.
        let shard = &INSIDE[(thread as usize >> 12) % SHARDS].0;
        // In one order with the store of the mask in `Installed::remove`, which then waits for this count.
        shard.fetch_add(1, Ordering::SeqCst);
        let errno = libc::__errno_location();
        let saved = *errno;
        let mut bits = mask.load(Ordering::SeqCst);
        while bits != 0 {
            let index = bits.trailing_zeros() as usize % MAX_HANDLERS;
            bits &= bits - 1;
            let handler = HANDLERS[index].load(Ordering::Acquire);
            if !handler.is_null() {
                let cache = &mut (*thread).caches[index];
                let generation = GENERATIONS[index].load(Ordering::Relaxed);
                if cache.generation != generation {
                    *cache = Cache { generation, word: 0 };
                }
                call(&**handler, cache);
            }
        }
        *errno = saved;
        shard.fetch_sub(1, Ordering::Release);
        compiler_fence(Ordering::SeqCst);
        (*thread).is_busy = 0;
    }
}

/// Counts a call that is not reported since this thread is busy: a signal handler has interrupted a handler.
#[cold]
fn count_skipped(thread: *const thread::HookThread) {
    // SAFETY: the calling thread's own words.
    if unsafe { (*thread).is_busy } == thread::IN_HANDLER {
        SKIPPED.fetch_add(1, Ordering::Relaxed);
    }
}

/// The time before a realloc, of the handler that wants it.
fn clock(mask: &AtomicU32, set: impl Fn(u64)) {
    notify(mask, |handler, _| set(handler.clock()));
}

/// Runs `call` while the hooks on this thread are silent; None if they are already, since a handler runs.
fn while_busy<T>(call: impl FnOnce(*mut thread::HookThread) -> T) -> Option<T> {
    let thread = thread::current();
    // SAFETY: this thread's own words.
    unsafe {
        if (*thread).is_busy != 0 {
            return None;
        }
        (*thread).is_busy = thread::IN_HANDLER;
        compiler_fence(Ordering::SeqCst);
        let result = call(thread);
        compiler_fence(Ordering::SeqCst);
        (*thread).is_busy = 0;
        Some(result)
    }
}

/// Runs `call`, whose allocations are not reported. It must not panic.
pub fn silently<T>(call: impl FnOnce() -> T) -> T {
    let thread = thread::current();
    // SAFETY: this thread's own words.
    let was = unsafe { std::mem::replace(&mut (*thread).is_busy, thread::SILENT) };
    compiler_fence(Ordering::SeqCst);
    let result = call();
    compiler_fence(Ordering::SeqCst);
    // SAFETY: as above.
    unsafe { (*thread).is_busy = was };
    result
}

/// Runs `call` with the word that this thread has for a handler, for another source of events that writes to the same
/// place. None if a handler runs on this thread, or the handler is not the one that was installed in this process.
///
/// The caller sees to it that the handler is not removed meanwhile (by holding the interpreter's lock, for one).
#[inline(always)]
pub fn with_cache<T>(ticket: Ticket, call: impl FnOnce(&mut Cache) -> T) -> Option<T> {
    if ticket.forks != FORKS.load(Ordering::Relaxed) {
        return None;
    }
    while_busy(|thread| {
        // SAFETY: this thread's own words, which nothing else uses while it is busy.
        let cache = unsafe { &mut (*thread).caches[ticket.index as usize % MAX_HANDLERS] };
        if cache.generation != ticket.generation {
            *cache = Cache {
                generation: ticket.generation,
                word: 0,
            };
        }
        call(cache)
    })
}

/// Names an installation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    index: u32,
    generation: u64,
    forks: u64,
}

/// A handler that is in place. Dropping it removes it.
pub struct Installed {
    ticket: Ticket,
    is_removed: bool,
}

/// Puts a handler in place, and with the first that wants them the hooks themselves. For any thread that holds the
/// interpreter's lock.
///
/// # Errors
/// `RuntimeError`: too many handlers, or Python's allocator functions are not to be found.
pub fn install(py: Python<'_>, handler: Arc<dyn Handler>, wanted: HookSet) -> PyResult<Installed> {
    prepare()?;
    pymem::prepare();
    if wanted.python && !pymem::is_available() {
        return Err(PyRuntimeError::new_err(
            "this interpreter does not export PyMem_SetAllocator: its allocations cannot be recorded",
        ));
    }
    let _held = got::lock();
    let free = (0..MAX_HANDLERS).find(|i| HANDLERS[*i].load(Ordering::Acquire).is_null());
    let Some(index) = free else {
        return Err(PyRuntimeError::new_err(format!(
            "{MAX_HANDLERS} profilers with hooks are already running; stop one first"
        )));
    };
    let generation = NEXT_GENERATION.fetch_add(1, Ordering::Relaxed);
    GENERATIONS[index].store(generation, Ordering::Release);
    HANDLERS[index].store(Box::into_raw(Box::new(handler)), Ordering::Release);
    let installed = Installed {
        ticket: Ticket {
            index: index as u32,
            generation,
            forks: FORKS.load(Ordering::Relaxed),
        },
        is_removed: false,
    };
    let bit = 1 << index;
    if wanted.native {
        MASKS.native.fetch_or(bit, Ordering::SeqCst);
    }
    if wanted.python {
        MASKS.python.fetch_or(bit, Ordering::SeqCst);
    }
    if wanted.waits {
        MASKS.waits.fetch_or(bit, Ordering::SeqCst);
    }
    got::update(groups());
    pymem::update(py, MASKS.python.load(Ordering::SeqCst) != 0);
    Ok(installed)
}

/// Groups of entry points that a handler wants.
fn groups() -> got::HookGroups {
    // What Python's allocators pass on must be known to be theirs, so its own calls are seen with either.
    let python = MASKS.python.load(Ordering::SeqCst);
    got::HookGroups {
        allocators: MASKS.native.load(Ordering::SeqCst) | python != 0,
        waits: MASKS.waits.load(Ordering::SeqCst) != 0,
    }
}

impl Installed {
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Whether it was installed in this process, not in one that this was forked from.
    pub fn is_current(&self) -> bool {
        !self.is_removed && self.ticket.forks == FORKS.load(Ordering::Relaxed)
    }

    /// Takes the handler away; after it has returned the handler is not running on any thread, and never will. With the
    /// last one the hooks go too. The flag is false if a thread was stuck in it; then it is kept for good.
    pub fn remove(&mut self, py: Python<'_>) -> bool {
        if !self.is_current() {
            self.is_removed = true;
            return true;
        }
        self.is_removed = true;
        let _held = got::lock();
        let bit = !(1 << self.ticket.index);
        for mask in [&MASKS.native, &MASKS.python, &MASKS.waits] {
            mask.fetch_and(bit, Ordering::SeqCst);
        }
        got::update(groups());
        pymem::update(py, MASKS.python.load(Ordering::SeqCst) != 0);
        let is_quiet = wait_for_handlers();
        let handler = HANDLERS[self.ticket.index as usize].load(Ordering::Acquire);
        if is_quiet {
            HANDLERS[self.ticket.index as usize].store(std::ptr::null_mut(), Ordering::Release);
            // SAFETY: made by `Box::into_raw` in `install`; no mask names it any more, and no thread is in a handler.
            drop(unsafe { Box::from_raw(handler) });
        }
        is_quiet
    }

    /// Keeps the handler from being called while `call` runs: it reads what the handler writes. Calls made meanwhile are
    /// not reported. None if a thread was stuck in the handler.
    pub fn while_silent<T>(&self, call: impl FnOnce() -> T) -> Option<T> {
        if !self.is_current() {
            return Some(call());
        }
        let _held = got::lock();
        let bit = 1 << self.ticket.index;
        let masks = [&MASKS.native, &MASKS.python, &MASKS.waits];
        let was = masks.map(|mask| mask.fetch_and(!bit, Ordering::SeqCst) & bit);
        let result = wait_for_handlers().then(call);
        for (mask, was) in masks.into_iter().zip(was) {
            mask.fetch_or(was, Ordering::SeqCst);
        }
        result
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        if !self.is_removed {
            Python::attach(|py| self.remove(py));
        }
    }
}

/// Waits until no thread is in a handler; false after [`UNINSTALL_TIMEOUT`].
fn wait_for_handlers() -> bool {
    let end = Instant::now() + UNINSTALL_TIMEOUT;
    INSIDE.iter().all(|shard| {
        while shard.0.load(Ordering::Acquire) != 0 {
            if Instant::now() > end {
                return false;
            }
            std::thread::yield_now();
        }
        true
    })
}

/// Calls that were not reported, since a signal handler made them while a handler ran.
pub fn skipped() -> u64 {
    SKIPPED.load(Ordering::Relaxed)
}

/// What must be in place before anything is hooked, once for the process.
fn prepare() -> PyResult<()> {
    static DONE: std::sync::Mutex<bool> = std::sync::Mutex::new(false);
    // Only ever held by a thread that holds the interpreter's lock throughout, so no child is forked meanwhile.
    let mut done = DONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if *done {
        return Ok(());
    }
    got::pin_this_module().map_err(PyRuntimeError::new_err)?;
    // SAFETY: the three functions may run in any process at any time.
    let failed = unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) };
    if failed != 0 {
        return Err(PyRuntimeError::new_err("pthread_atfork: no memory"));
    }
    *done = true;
    Ok(())
}

extern "C" fn before_fork() {
    got::lock_raw();
}

extern "C" fn after_fork() {
    got::unlock_raw();
}

/// The child has this thread only. Its handlers' memory is a copy: nothing would read what they write.
extern "C" fn in_child() {
    for mask in [&MASKS.native, &MASKS.python, &MASKS.waits] {
        mask.store(0, Ordering::SeqCst);
    }
    for handler in &HANDLERS {
        handler.store(std::ptr::null_mut(), Ordering::SeqCst);
    }
    for shard in &INSIDE {
        shard.0.store(0, Ordering::SeqCst);
    }
    FORKS.fetch_add(1, Ordering::SeqCst);
    got::unlock_raw();
}
