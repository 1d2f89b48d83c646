//! Hooks on the memory allocators and on the waiting system calls of the process that we are in.
//!
//! | what | how | file |
//! |---|---|---|
//! | `malloc`, `calloc`, `realloc`, `free`, `posix_memalign`, ... of the C library | address slots of all loaded modules | `got.rs`, `native.rs` |
//! | Python's allocator domains raw, mem and obj | `PyMem_SetAllocator` | `pymem.rs` |
//! | `mmap`, `munmap` and `mremap` of anonymous memory, sampled only | as the C library's allocator | `mappings.rs` |
//! | samples of these, by bytes, with the ends of sampled blocks | a countdown in each thread | `sampling.rs` |
//! | these blocks, published to observers outside of the process | probes (USDT) | `probes.rs` |
//! | `epoll_wait`, `poll`, `select` and their variants | as the C library's allocator | `wait.rs` |
//!
//! A [`Handler`] says what is to be done at a call, a [`HookSet`] which calls it wants. The first [`install`] puts the hooks
//! in place, the last [`Installed::remove`] takes them away. Where another tool has put a hook above ours meanwhile, ours
//! stays and passes through. The crate needs no Python to build, and looks Python's functions up when they are wanted: it
//! serves an extension module as well as an object that `LD_PRELOAD` loads (`examples/count_allocations.rs`).
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU64, Ordering};
//!
//! use nativeprof_hooks::{Allocation, Cache, Handler, HookSet, Refusal, install};
//!
//! #[derive(Default)]
//! struct Bytes(AtomicU64);
//!
//! impl Handler for Bytes {
//!     fn on_allocation(&self, _: &mut Cache, allocation: &Allocation) {
//!         self.0.fetch_add(allocation.size as u64, Ordering::Relaxed);
//!     }
//! }
//!
//! let bytes = Arc::new(Bytes::default());
//! let native = HookSet { native: true, ..HookSet::default() };
//! let mut installed = install(bytes.clone(), native)?;
//! // ... what the program does ...
//! installed.remove();
//! # Ok::<(), Refusal>(())
//! ```
//!
//! A [`BlockSampler`] gets some blocks only, at a small part of the cost, see [`sample`].
//!
//! **Refused** ([`Refusal`]): more handlers than [`MAX_HANDLERS`], Python's domains where no Python runs, and a process in
//! which the hooks cannot stay loaded.
//!
//! **Not seen**: calls of the module that this crate is linked into (a program that installs a handler for itself sees
//! the other modules' calls only); `brk`; `mmap`, but for samples; allocators linked into a module (jemalloc in some
//! wheels), or reached by an address that was looked up (`dlsym`, so `ctypes` too) or stored before, a slot that holds
//! another tool's hook among them; what the loader allocates for itself; calls between functions of the C library,
//! except `malloc`, `calloc`, `realloc` and `free` where it calls them through its own slots, as glibc does; what a
//! library allocates while it is loaded; modules in other link namespaces (`dlmopen`). Two objects that both contain
//! this crate are two tools: the second one finds the slots taken.
//!
//! **On the path of a call** no lock is taken, nothing is allocated and no Python object is touched: two atomic
//! additions to a counter shared by few threads, and the handlers. A handler is never called from within a handler on
//! the same thread; `errno` is preserved.
//!
//! **fork**: in the child all handlers are gone and the hooks pass through until it installs its own. It cannot if it was
//! forked while another thread was in the loader (in `dlopen`, or with an exception being thrown), whose lock it never gets
//! in glibc 2.36.
//!
//! Linux with glibc, x86-64 and aarch64.

mod elf;
mod got;
mod mappings;
mod native;
mod probes;
mod pymem;
mod sampling;
mod thread;
mod thunk;
mod wait;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence};
use std::time::{Duration, Instant};

pub use got::{Slot, slots};
pub use probes::PROBE_PROVIDER;
pub use sampling::{BlockSampler, DEFAULT_MEAN, SampledBlock, Sampling, sample, set_mean};
pub use thread::Cache;

/// A block of memory, or the context of an allocator.
type Pointer = *mut std::ffi::c_void;

/// The most handlers at a time.
pub const MAX_HANDLERS: usize = 8;

/// The operation of an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocatorCall {
    /// A new block, also of `posix_memalign` and its like.
    Malloc,
    /// A new block that is filled with zeros.
    Calloc,
    /// A block in the place of another; the handler is called after it succeeded, when the old block is gone.
    Realloc,
    /// The end of a block; the handler is called before the block is freed, so that no other thread can have been given
    /// its address yet.
    Free,
}

/// The owner of an allocator. Python's domains have the numbers of `PyMemAllocatorDomain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Domain {
    /// Python's domain for memory that is used without the interpreter's lock.
    Raw = 0,
    /// Python's domain for buffers.
    Mem = 1,
    /// Python's domain for objects.
    Obj = 2,
    /// The C library.
    Native = 3,
}

/// One successful operation of an allocator, as the program requested it.
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    /// The operation.
    pub kind: AllocatorCall,
    /// The allocator that the program called.
    pub domain: Domain,
    /// Address of the block: new (malloc, calloc, realloc) or about to go (free). A `realloc` to nothing gives 0.
    pub address: usize,
    /// Bytes requested; 0 for free.
    pub size: usize,
    /// Address of the block that a realloc replaced, 0 if there was none.
    pub old_address: usize,
    /// [`Handler::clock`] before a realloc, when the old block was still there; else 0.
    pub before: u64,
    /// Whether a call of Python's allocator was passed on to the C library's. It is reported once, as Python's. It is not
    /// yet known of a free: false.
    pub has_reached_native: bool,
}

/// The two ends of a waiting system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It is about to be made.
    Enter,
    /// It has returned, or its thread is cancelled in it.
    Leave,
}

/// A receiver of calls. The hooks call it on the thread that made the call, with or without the interpreter's lock, perhaps
/// in a signal handler. It must not allocate, wait, panic, or touch Python objects.
pub trait Handler: Send + Sync {
    /// Takes an allocation or a free.
    fn on_allocation(&self, _: &mut Cache, _: &Allocation) {}

    /// Takes the beginning or the end of a wait.
    fn on_wait(&self, _: &mut Cache, _: Wait) {}

    /// Gives the time, in the handler's own unit, for [`Allocation::before`].
    fn clock(&self) -> u64 {
        0
    }
}

/// The calls that a handler wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HookSet {
    /// Calls of the C library's allocator.
    pub native: bool,
    /// Calls of Python's allocator domains.
    pub python: bool,
    /// Waiting system calls.
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

/// The name of an installation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    index: u32,
    generation: u64,
    forks: u64,
}

/// A handler that is in place. Dropping it removes it.
pub struct Installed {
    ticket: Ticket,
    wants_python: bool,
    is_removed: bool,
}

/// The reason why a handler was not installed. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// [`MAX_HANDLERS`] are installed.
    TooManyHandlers,
    /// A [`BlockSampler`] is in place.
    AlreadySampling,
    /// Python's domains are wanted, but its functions are not exported in this process.
    NoPythonAllocator,
    /// Python's domains are wanted, but Python is not yet initialized, or no longer: its start would undo the hooks.
    PythonNotRunning,
    /// Other tools have put their own hooks above ours so many times that there is no place for another.
    TooManyLinks,
    /// The module of the hooks cannot be kept loaded, for this reason.
    NotPinned(&'static str),
    /// The handlers of `fork` could not be registered.
    NoForkHandlers,
    /// This process was forked from one that was just preparing its first hook.
    ForkedWhilePreparing,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::TooManyHandlers => {
                write!(
                    f,
                    "{MAX_HANDLERS} profilers with hooks are already running; stop one first"
                )
            }
            Refusal::AlreadySampling => f.write_str("allocations are already being sampled; stop that first"),
            Refusal::NoPythonAllocator => {
                f.write_str("this interpreter does not export PyMem_SetAllocator: its allocations cannot be recorded")
            }
            Refusal::PythonNotRunning => f.write_str("Python is not running: its allocations cannot be recorded"),
            Refusal::TooManyLinks => f.write_str("other tools have replaced the allocator's hooks too many times"),
            Refusal::NotPinned(reason) => f.write_str(reason),
            Refusal::NoForkHandlers => f.write_str("pthread_atfork: no memory"),
            Refusal::ForkedWhilePreparing => {
                f.write_str("this process was forked while its parent prepared the hooks: they cannot be used in it")
            }
        }
    }
}

impl std::error::Error for Refusal {}

/// Puts a handler in place, and with the first that wants them the hooks themselves.
///
/// If Python's domains are wanted it takes the interpreter's lock, unless the calling thread has it. So does
/// [`Installed::remove`] of such a handler.
///
/// # Errors
/// The reason why it is refused.
pub fn install(handler: Arc<dyn Handler>, wanted: HookSet) -> Result<Installed, Refusal> {
    prepare()?;
    let attached = if wanted.python { Some(pymem::attach()?) } else { None };
    let held = got::lock();
    let free = (0..MAX_HANDLERS).find(|i| HANDLERS[*i].load(Ordering::Acquire).is_null());
    let index = free.ok_or(Refusal::TooManyHandlers)?;
    let generation = NEXT_GENERATION.fetch_add(1, Ordering::Relaxed);
    GENERATIONS[index].store(generation, Ordering::Release);
    HANDLERS[index].store(Box::into_raw(Box::new(handler)), Ordering::Release);
    let installed = Installed {
        ticket: Ticket {
            index: index as u32,
            generation,
            forks: FORKS.load(Ordering::Relaxed),
        },
        wants_python: wanted.python,
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
    pymem::update_lean();
    got::update(groups());
    if let Some(attached) = &attached
        && !pymem::update(attached)
    {
        // Removing it takes the lock.
        drop(held);
        drop(installed);
        return Err(Refusal::TooManyLinks);
    }
    Ok(installed)
}

/// Groups of entry points that a handler wants.
fn groups() -> got::HookGroups {
    // What Python's allocators pass on must be known to be theirs, so its own calls are seen with either.
    let python = MASKS.python.load(Ordering::SeqCst);
    got::HookGroups {
        allocators: MASKS.native.load(Ordering::SeqCst) | python != 0 || sampling::is_active(),
        waits: MASKS.waits.load(Ordering::SeqCst) != 0,
        mappings: sampling::is_active(),
    }
}

impl Installed {
    /// Its name, for [`with_cache`].
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Whether it was installed in this process, not in one that this was forked from.
    pub fn is_current(&self) -> bool {
        !self.is_removed && self.ticket.forks == FORKS.load(Ordering::Relaxed)
    }

    /// Takes the handler away; after it has returned the handler is not running on any thread, and never will. With the
    /// last one the hooks go too. The flag is false if a thread was stuck in it; then it is kept for good.
    pub fn remove(&mut self) -> bool {
        if !self.is_current() {
            self.is_removed = true;
            return true;
        }
        self.is_removed = true;
        // Where Python has ended its allocators are left alone: our link stays and passes through.
        let attached = self.wants_python.then(pymem::attach).and_then(Result::ok);
        let _held = got::lock();
        let bit = !(1 << self.ticket.index);
        for mask in [&MASKS.native, &MASKS.python, &MASKS.waits] {
            mask.fetch_and(bit, Ordering::SeqCst);
        }
        pymem::update_lean();
        got::update(groups());
        if let Some(attached) = &attached {
            pymem::update(attached);
        }
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
            self.remove();
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

/// Number of calls that were not reported, since a signal handler made them while a handler ran.
pub fn skipped() -> u64 {
    SKIPPED.load(Ordering::Relaxed)
}

/// Does what must be in place before anything is hooked, once for the process.
fn prepare() -> Result<(), Refusal> {
    const NOT_YET: i64 = 0;
    const DONE: i64 = -1;
    /// Else the process in which a thread is at it. No lock: a child that was forked meanwhile could never take it.
    static STATE: AtomicI64 = AtomicI64::new(NOT_YET);
    let process = i64::from(std::process::id());
    loop {
        match STATE.compare_exchange(NOT_YET, process, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => break,
            Err(DONE) => return Ok(()),
            Err(other) if other == process => std::thread::yield_now(),
            // Whether the fork handlers are registered cannot be known, and twice would not do.
            Err(_) => return Err(Refusal::ForkedWhilePreparing),
        }
    }
    let result = got::pin_this_module().map_err(Refusal::NotPinned).and_then(|()| {
        // SAFETY: the three functions may run in any process at any time.
        match unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) } {
            0 => Ok(()),
            _ => Err(Refusal::NoForkHandlers),
        }
    });
    STATE.store(if result.is_ok() { DONE } else { NOT_YET }, Ordering::Release);
    result
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
    sampling::forget();
    for shard in &INSIDE {
        shard.0.store(0, Ordering::SeqCst);
    }
    FORKS.fetch_add(1, Ordering::SeqCst);
    got::unlock_raw();
}
