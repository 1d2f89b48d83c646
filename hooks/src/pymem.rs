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

/// The allocators that our links are before. An entry is written before its link is in the chain and never again.
struct NextAllocators([[UnsafeCell<Option<Allocator>>; MAX_LINKS]; DOMAINS]);

// SAFETY: see above; writers hold the lock of `got.rs`.
unsafe impl Sync for NextAllocators {}

static BELOW: NextAllocators = NextAllocators([const { [const { UnsafeCell::new(None) }; MAX_LINKS] }; DOMAINS]);
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

fn update_domain<const D: usize>(wanted: bool) -> bool {
    let Some(now) = get(D) else { return false };
    let is_ours = now.malloc as usize == malloc::<D> as *const () as usize;
    if is_ours && !wanted {
        if let Some(below) = below::<D>(now.context) {
            set(D, *below);
        }
    } else if wanted && !is_ours {
        let Some(link) = link::<D>(now) else { return false };
        set(D, link);
    }
    // Else it is as it should be, or another tool is above.
    true
}

/// Our link before an allocator; None if there have been too many.
fn link<const D: usize>(before: Allocator) -> Option<Allocator> {
    let used = USED[D].load(Ordering::Acquire);
    // An entry in use is not changed: a thread without the interpreter's lock may be in it. But one that leads to the same
    // allocator will do.
    let index = (0..used).find(|i| entry(D, *i).is_some_and(|known| is_same(known, &before)));
    let index = match index {
        Some(index) => index,
        None if used < MAX_LINKS => {
            // SAFETY: no link leads to this entry yet, and the lock is held.
            unsafe { *BELOW.0[D][used].get() = Some(before) };
            USED[D].store(used + 1, Ordering::Release);
            used
        }
        None => return None,
    };
    Some(Allocator {
        context: BELOW.0[D][index].get().cast(),
        malloc: malloc::<D>,
        calloc: calloc::<D>,
        realloc: realloc::<D>,
        free: free::<D>,
    })
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
fn entry(domain: usize, index: usize) -> Option<&'static Allocator> {
    // SAFETY: written once, before the index was in use.
    unsafe { (*BELOW.0[domain][index].get()).as_ref() }
}

/// The allocator below the link with this context. Python replaces an allocator word by word, so that another thread
/// may call our function with the context of the one before: then the first will do, which every chain ends in.
#[inline(always)]
fn below<const D: usize>(context: Pointer) -> Option<&'static Allocator> {
    let first = BELOW.0[D][0].get();
    let offset = (context as usize).wrapping_sub(first as usize);
    let used = USED[D].load(Ordering::Acquire) * size_of::<UnsafeCell<Option<Allocator>>>();
    let entry = if offset < used { context.cast() } else { first };
    // SAFETY: what lies in the entries in use is the context of one of our links; they were written before they were in use.
    unsafe { (*entry).as_ref() }
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

/// A function that gives a block, or null. Where nothing is to be done it is only called: the path of most calls.
#[inline(always)]
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

unsafe extern "C" fn malloc<const D: usize>(context: Pointer, size: usize) -> Pointer {
    let Some(below) = below::<D>(context) else {
        return std::ptr::null_mut();
    };
    // SAFETY: the allocator that was there before ours, its own context and the caller's arguments; so below.
    let real = || unsafe { (below.malloc)(below.context, size) };
    gives::<D>(AllocatorCall::Malloc, size, real)
}

unsafe extern "C" fn calloc<const D: usize>(context: Pointer, count: usize, each: usize) -> Pointer {
    let Some(below) = below::<D>(context) else {
        return std::ptr::null_mut();
    };
    // SAFETY: as above.
    let real = || unsafe { (below.calloc)(below.context, count, each) };
    gives::<D>(AllocatorCall::Calloc, count.saturating_mul(each), real)
}

unsafe extern "C" fn realloc<const D: usize>(context: Pointer, old: Pointer, size: usize) -> Pointer {
    let Some(below) = below::<D>(context) else {
        return std::ptr::null_mut();
    };
    // SAFETY: as above.
    let real = || unsafe { (below.realloc)(below.context, old, size) };
    let before = sampling::position();
    let block = if !is_idle() || (D != RAW && sampling::is_suspect(old)) {
        moves::<D>(old, size, real)
    } else {
        real()
    };
    // A block of the C library stays there, however small it becomes: then its bytes have been counted there.
    let is_small = D != RAW && size <= sampling::python_limit();
    if is_small && sampling::position() == before && sampling::count(size) {
        sampling::given(block, size);
    }
    block
}

/// A function that gives a block in the place of another one.
#[cold]
#[inline(never)]
fn moves<const D: usize>(old: Pointer, size: usize, real: impl FnOnce() -> Pointer) -> Pointer {
    if D == RAW {
        moves_reported::<D>(old, size, real)
    } else {
        sampling::moves_suspect(old, size, || moves_reported::<D>(old, size, real))
    }
}

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

unsafe extern "C" fn free<const D: usize>(context: Pointer, block: Pointer) {
    let Some(below) = below::<D>(context) else { return };
    // SAFETY: as above.
    let real = || unsafe { (below.free)(below.context, block) };
    if !is_idle() || (D != RAW && sampling::is_suspect(block)) {
        ends::<D>(block, real);
    } else {
        real();
    }
}

/// Frees a block with a function.
#[cold]
#[inline(never)]
fn ends<const D: usize>(block: Pointer, real: impl FnOnce()) {
    if D != RAW {
        sampling::ends(block);
    }
    if is_idle() || block.is_null() {
        return real();
    }
    // SAFETY: this thread's own words.
    if unsafe { (*thread::current()).is_in_python | (*thread::current()).is_busy } == 0 {
        report::<D>(allocation(AllocatorCall::Free, block, 0, false));
    }
    outermost(real);
}
