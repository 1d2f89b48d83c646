//! Hooks on Python's three allocator domains. Python's functions are found by name: the process may have none, and those of
//! the allocators are not part of the limited API.
//!
//! A hook is a link in a chain: it knows the allocator that was there before it. If another tool has put a link above
//! ours when we leave, ours stays and passes through, and is used again when we come back.

use std::cell::{Cell, UnsafeCell};
use std::ffi::{CStr, c_int, c_void};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::{Allocation, AllocatorCall, Domain, MASKS, Pointer, Refusal, clock, notify, sampling, thread};

/// `PyMemAllocatorEx` of `Include/cpython/pymem.h`, CPython 3.5 to 3.15.
#[repr(C)]
#[derive(Clone, Copy)]
struct Allocator {
    context: Pointer,
    malloc: unsafe extern "C" fn(Pointer, usize) -> Pointer,
    calloc: unsafe extern "C" fn(Pointer, usize, usize) -> Pointer,
    realloc: unsafe extern "C" fn(Pointer, Pointer, usize) -> Pointer,
    free: unsafe extern "C" fn(Pointer, Pointer),
}

type Exchange = unsafe extern "C" fn(c_int, *mut Allocator);

static GET: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static SET: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Links that one domain can have: one more for each time that another tool was above and still is.
const MAX_LINKS: usize = 16;
const DOMAINS: usize = 3;
/// Index of the raw domain and of that of objects.
const RAW: usize = 0;
const OBJECTS: usize = 2;

/// Calls for blocks smaller than this are only counted: they are Python's own, and no handler wants them. One word to read on
/// the path of most calls.
static LEAN_END: AtomicUsize = AtomicUsize::new(0);

/// What an entry holds that is not in use: an allocator without memory.
const NO_ALLOCATOR: Allocator = Allocator {
    context: std::ptr::null_mut(),
    malloc: no_malloc,
    calloc: no_calloc,
    realloc: no_realloc,
    free: no_free,
};

unsafe extern "C" fn no_malloc(_: Pointer, _: usize) -> Pointer {
    std::ptr::null_mut()
}

unsafe extern "C" fn no_calloc(_: Pointer, _: usize, _: usize) -> Pointer {
    std::ptr::null_mut()
}

unsafe extern "C" fn no_realloc(_: Pointer, _: Pointer, _: usize) -> Pointer {
    std::ptr::null_mut()
}

unsafe extern "C" fn no_free(_: Pointer, _: Pointer) {}

/// The allocators that our links are before. An entry is written before its link is in the chain and never again.
struct NextAllocators([[UnsafeCell<Allocator>; MAX_LINKS]; DOMAINS]);

// SAFETY: see above; writers hold the lock of `got.rs`.
unsafe impl Sync for NextAllocators {}

static BELOW: NextAllocators =
    NextAllocators([const { [const { UnsafeCell::new(NO_ALLOCATOR) }; MAX_LINKS] }; DOMAINS]);
/// Entries of [`BELOW`] in use.
static USED: [AtomicUsize; DOMAINS] = [const { AtomicUsize::new(0) }; DOMAINS];

fn find(name: &CStr) -> Pointer {
    // SAFETY: the name ends with a zero.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}

/// The interpreter's lock, which the calling thread has until this is dropped.
pub struct Attached {
    release: unsafe extern "C" fn(c_int),
    state: c_int,
    /// It belongs to the thread that took it.
    _thread: PhantomData<*const ()>,
}

impl Drop for Attached {
    fn drop(&mut self) {
        // SAFETY: gives back what `attach` took, on the same thread.
        unsafe { (self.release)(self.state) };
    }
}

/// Finds Python's functions and takes the interpreter's lock. Not with the lock of `got.rs` held: who waits for the
/// interpreter's may have that one.
pub fn attach() -> Result<Attached, Refusal> {
    if GET.load(Ordering::Acquire).is_null() {
        SET.store(find(c"PyMem_SetAllocator"), Ordering::Release);
        GET.store(find(c"PyMem_GetAllocator"), Ordering::Release);
    }
    let functions = [c"Py_IsInitialized", c"PyGILState_Ensure", c"PyGILState_Release"].map(find);
    let allocators = [&GET, &SET].map(|function| function.load(Ordering::Acquire));
    if functions.iter().chain(&allocators).any(|function| function.is_null()) {
        return Err(Refusal::NoPythonAllocator);
    }
    let [is_initialized, ensure, release] = functions;
    // SAFETY: Python's functions of these names, of the stable ABI, and not null. The first may be called at any time, the
    // second once Python is initialized.
    unsafe {
        if std::mem::transmute::<Pointer, unsafe extern "C" fn() -> c_int>(is_initialized)() == 0 {
            return Err(Refusal::PythonNotRunning);
        }
        Ok(Attached {
            state: std::mem::transmute::<Pointer, unsafe extern "C" fn() -> c_int>(ensure)(),
            release: std::mem::transmute::<Pointer, unsafe extern "C" fn(c_int)>(release),
            _thread: PhantomData,
        })
    }
}

fn get(domain: usize) -> Option<Allocator> {
    let function = GET.load(Ordering::Acquire);
    if function.is_null() {
        return None;
    }
    let mut allocator = std::mem::MaybeUninit::<Allocator>::uninit();
    // SAFETY: Python's function of this name, which fills the structure for a known domain.
    unsafe {
        std::mem::transmute::<Pointer, Exchange>(function)(domain as c_int, allocator.as_mut_ptr());
        Some(allocator.assume_init())
    }
}

fn set(domain: usize, mut allocator: Allocator) {
    let function = SET.load(Ordering::Acquire);
    if !function.is_null() {
        // SAFETY: Python's function of this name, which copies the structure.
        unsafe { std::mem::transmute::<Pointer, Exchange>(function)(domain as c_int, &mut allocator) };
    }
}

/// Hooks the domains that are wanted, and no others; false if one of them could not be. The caller holds the
/// lock of `got.rs`.
pub fn update(_: &Attached) -> bool {
    let all = MASKS.python.load(Ordering::SeqCst) != 0;
    // What the raw domain requests is sampled as the C library's.
    let objects = all || sampling::python_limit() > 0;
    let raw = update_domain::<RAW>(all);
    let mem = update_domain::<1>(objects);
    let obj = update_domain::<OBJECTS>(objects);
    raw && mem && obj
}

/// The largest block that Python's allocator of objects takes from memory of its own: larger ones are requested of the C
/// library. 0: all are; `usize::MAX`: none are, as in free-threaded builds. Tried out, so that it holds for every version,
/// build and `PYTHONMALLOC`. The hooks on the C library are in place.
pub fn own_limit(_: &Attached) -> usize {
    /// pymalloc's limit is 512, less what debug builds add to a block (Objects/obmalloc.c, CPython 3.8 to 3.15).
    const SIZES: std::ops::RangeInclusive<usize> = 32..=64;
    const STEP: usize = 8;
    const LARGE: usize = 1 << 20;
    let Some(objects) = get(OBJECTS) else { return 0 };
    // Another tool's hook may request memory for itself now and then.
    let is_own = |size: usize| {
        (0..4).any(|_| {
            sampling::bytes_counted(|| {
                // SAFETY: the allocator's own functions and context; the lock of the interpreter is held.
                unsafe {
                    let block = (objects.malloc)(objects.context, size);
                    (objects.free)(objects.context, block);
                }
            }) < size as u64
        })
    };
    if is_own(LARGE) {
        return usize::MAX;
    }
    SIZES
        .rev()
        .map(|step| step * STEP)
        .find(|size| is_own(*size))
        .unwrap_or(0)
}

/// Whether calls of the domains of which Python's own allocator is counted get to our links: another tool may have taken them
/// away with its own.
pub fn is_reached(_: &Attached) -> bool {
    const SMALL: usize = 32;
    [1, OBJECTS].into_iter().filter_map(get).all(|domain| {
        // Another tool's hook may request memory for itself now and then.
        (0..4).all(|_| {
            sampling::bytes_counted(|| {
                // SAFETY: the allocator's own functions and context; the lock of the interpreter is held.
                unsafe {
                    let block = (domain.malloc)(domain.context, SMALL);
                    (domain.free)(domain.context, block);
                }
            }) >= SMALL as u64
        })
    })
}

fn update_domain<const D: usize>(wanted: bool) -> bool {
    let Some(now) = get(D) else { return false };
    match (index_of_link::<D>(&now), wanted) {
        (Some(index), false) => set(D, *entry(D, index)),
        (None, true) => {
            let Some(link) = link::<D>(now) else { return false };
            set(D, link);
        }
        // It is as it should be, or another tool is above.
        _ => {}
    }
    true
}

/// Our link before an allocator; None if there have been too many.
fn link<const D: usize>(before: Allocator) -> Option<Allocator> {
    let used = USED[D].load(Ordering::Acquire);
    // An entry in use is not changed: a thread without the interpreter's lock may be in it. But one that leads to the same
    // allocator will do.
    let index = (0..used).find(|i| is_same(entry(D, *i), &before));
    let index = match index {
        Some(index) => index,
        None if used < MAX_LINKS => {
            // SAFETY: no link leads to this entry yet, and the lock is held.
            unsafe { *BELOW.0[D][used].get() = before };
            USED[D].store(used + 1, Ordering::Release);
            used
        }
        None => return None,
    };
    links::<D>().get(index).map(|link| link())
}

/// Our link with these functions; `None`: they are another tool's.
fn index_of_link<const D: usize>(allocator: &Allocator) -> Option<usize> {
    let is_malloc = |link: &fn() -> Allocator| link().malloc as usize == allocator.malloc as usize;
    links::<D>().iter().position(is_malloc)
}

/// Makes each link of a domain. Each has functions of its own, which know where the allocator below is: Python replaces an
/// allocator word by word, so that a thread without the interpreter's lock may call a function with another one's context.
fn links<const D: usize>() -> [fn() -> Allocator; MAX_LINKS] {
    macro_rules! links {
        ($($index:literal)*) => { [$(the_link::<D, $index>),*] };
    }
    links!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
}

fn the_link<const D: usize, const I: usize>() -> Allocator {
    Allocator {
        // What another tool's function makes of it, called with the wrong context, is to call the allocator below.
        context: BELOW.0[D][I].get().cast(),
        malloc: malloc::<D, I>,
        calloc: calloc::<D, I>,
        realloc: realloc::<D, I>,
        free: free::<D, I>,
    }
}

fn is_same(a: &Allocator, b: &Allocator) -> bool {
    let words = |x: &Allocator| {
        let functions = [
            x.malloc as usize,
            x.calloc as usize,
            x.realloc as usize,
            x.free as usize,
        ];
        (x.context, functions)
    };
    words(a) == words(b)
}

/// An entry in use.
#[inline(always)]
fn entry(domain: usize, index: usize) -> &'static Allocator {
    // SAFETY: written once, before the index was in use.
    unsafe { &*BELOW.0[domain][index].get() }
}

/// Brings up to date which calls are only counted, after a change of the handlers or the sampler.
pub fn update_lean() {
    let end = if is_idle() {
        sampling::python_limit().saturating_add(1)
    } else {
        0
    };
    LEAN_END.store(if end > 1 { end } else { 0 }, Ordering::SeqCst);
}

/// Counts the bytes of a call that needs nothing else; false if it needs more.
#[inline(always)]
fn is_lean<const D: usize>(size: usize) -> bool {
    D != RAW && size < LEAN_END.load(Ordering::Relaxed) && !sampling::count(size)
}

/// Whether a block may be given back without more: no handler wants to know, and it was not sampled.
#[inline(always)]
fn is_lean_end<const D: usize>(block: Pointer) -> bool {
    D != RAW && LEAN_END.load(Ordering::Relaxed) != 0 && !sampling::is_suspect(block)
}

/// Calls the allocator below, and says whether the call was the outermost one and reached the C library's allocator.
#[inline(always)]
fn outermost<T>(real: impl FnOnce() -> T) -> (T, Option<bool>) {
    let thread = thread::current();
    // SAFETY: this thread's own words.
    unsafe {
        if ((*thread).is_in_python | (*thread).is_busy) != 0 {
            return (real(), None);
        }
        (*thread).is_in_python = 1;
        (*thread).has_reached_native = 0;
        let result = real();
        (*thread).is_in_python = 0;
        (result, Some((*thread).has_reached_native != 0))
    }
}

#[inline(always)]
fn is_idle() -> bool {
    MASKS.python.load(Ordering::Relaxed) == 0
}

fn report<const D: usize>(allocation: Allocation) {
    let domain = [Domain::Raw, Domain::Mem, Domain::Obj][D];
    let allocation = Allocation { domain, ..allocation };
    notify(&MASKS.python, |handler, cache| {
        handler.on_allocation(cache, &allocation)
    });
}

fn allocation(kind: AllocatorCall, address: Pointer, size: usize, has_reached_native: bool) -> Allocation {
    Allocation {
        kind,
        domain: Domain::Raw,
        address: address as usize,
        size,
        old_address: 0,
        before: 0,
        has_reached_native,
    }
}

/// A function that gives a block, or null.
fn gives<const D: usize>(kind: AllocatorCall, size: usize, real: impl FnOnce() -> Pointer) -> Pointer {
    let is_due = D != RAW && size <= sampling::python_limit() && sampling::count(size);
    if is_due || !is_idle() {
        reported::<D>(kind, size, is_due, real)
    } else {
        real()
    }
}

#[cold]
#[inline(never)]
fn reported<const D: usize>(kind: AllocatorCall, size: usize, is_due: bool, real: impl FnOnce() -> Pointer) -> Pointer {
    sampling::gives(size, is_due, || {
        if is_idle() {
            return real();
        }
        let (block, reached) = outermost(real);
        if let (Some(reached), false) = (reached, block.is_null()) {
            report::<D>(allocation(kind, block, size, reached));
        }
        block
    })
}

unsafe extern "C" fn malloc<const D: usize, const I: usize>(_: Pointer, size: usize) -> Pointer {
    let below = entry(D, I);
    if !is_lean::<D>(size) {
        return malloc_watched::<D>(below, size);
    }
    // SAFETY: the allocator that was there before ours, its own context and the caller's arguments; so below.
    unsafe { (below.malloc)(below.context, size) }
}

#[inline(never)]
extern "C" fn malloc_watched<const D: usize>(below: &'static Allocator, size: usize) -> Pointer {
    // SAFETY: as above.
    let real = || unsafe { (below.malloc)(below.context, size) };
    gives::<D>(AllocatorCall::Malloc, size, real)
}

unsafe extern "C" fn calloc<const D: usize, const I: usize>(_: Pointer, count: usize, each: usize) -> Pointer {
    let below = entry(D, I);
    if !is_lean::<D>(count.saturating_mul(each)) {
        return calloc_watched::<D>(below, count, each);
    }
    // SAFETY: as above.
    unsafe { (below.calloc)(below.context, count, each) }
}

#[inline(never)]
extern "C" fn calloc_watched<const D: usize>(below: &'static Allocator, count: usize, each: usize) -> Pointer {
    // SAFETY: as above.
    let real = || unsafe { (below.calloc)(below.context, count, each) };
    gives::<D>(AllocatorCall::Calloc, count.saturating_mul(each), real)
}

unsafe extern "C" fn realloc<const D: usize, const I: usize>(_: Pointer, old: Pointer, size: usize) -> Pointer {
    let below = entry(D, I);
    let before = sampling::position();
    let block = if is_lean_end::<D>(old) {
        // SAFETY: as above.
        unsafe { (below.realloc)(below.context, old, size) }
    } else {
        realloc_watched::<D>(below, old, size)
    };
    // A block of the C library stays there, however small it becomes: then its bytes have been counted there.
    let is_small = D != RAW && size <= sampling::python_limit();
    if is_small && sampling::position() == before && sampling::count(size) {
        sampling::given(block, size);
    }
    block
}

#[inline(never)]
extern "C" fn realloc_watched<const D: usize>(below: &'static Allocator, old: Pointer, size: usize) -> Pointer {
    // SAFETY: as above.
    let real = || unsafe { (below.realloc)(below.context, old, size) };
    if D == RAW {
        moves_reported::<D>(old, size, real)
    } else {
        sampling::moves_suspect(old, size, || moves_reported::<D>(old, size, real))
    }
}

/// A function that gives a block in the place of another one.
fn moves_reported<const D: usize>(old: Pointer, size: usize, real: impl FnOnce() -> Pointer) -> Pointer {
    if is_idle() {
        return real();
    }
    let before = Cell::new(0);
    // SAFETY: this thread's own words.
    let is_plain = unsafe { (*thread::current()).is_in_python | (*thread::current()).is_busy } == 0;
    if is_plain && !old.is_null() {
        clock(&MASKS.python, |now| before.set(now));
    }
    let (block, reached) = outermost(real);
    if let (Some(reached), false) = (reached, block.is_null()) {
        report::<D>(Allocation {
            old_address: old as usize,
            before: before.get(),
            ..allocation(AllocatorCall::Realloc, block, size, reached)
        });
    }
    block
}

unsafe extern "C" fn free<const D: usize, const I: usize>(_: Pointer, block: Pointer) {
    let below = entry(D, I);
    if !is_lean_end::<D>(block) {
        return free_watched::<D>(below, block);
    }
    // SAFETY: as above.
    unsafe { (below.free)(below.context, block) }
}

#[inline(never)]
extern "C" fn free_watched<const D: usize>(below: &'static Allocator, block: Pointer) {
    if D != RAW {
        sampling::ends(block);
    }
    // SAFETY: as above.
    let real = || unsafe { (below.free)(below.context, block) };
    if is_idle() || block.is_null() {
        return real();
    }
    // SAFETY: this thread's own words.
    if unsafe { (*thread::current()).is_in_python | (*thread::current()).is_busy } == 0 {
        report::<D>(allocation(AllocatorCall::Free, block, 0, false));
    }
    outermost(real);
}
