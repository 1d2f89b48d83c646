//! Address slots: the words in each module's data through which it calls functions of other modules. A hook is put into
//! the slots of all modules, also of those loaded later, and taken out again.
//!
//! A slot is changed only where it holds the function's own address or has not been bound yet, and restored only where
//! it still holds our hook. Slots that are read-only after relocation are made writable for the moment of the store.

use std::cell::UnsafeCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use crate::elf::{self, GotSlot, LoadedModule};
use crate::{mappings, native, page_size, thunk, wait};

/// The functions that are hooked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Which {
    Malloc,
    Calloc,
    Realloc,
    Free,
    PosixMemalign,
    AlignedAlloc,
    Memalign,
    Valloc,
    Pvalloc,
    Reallocarray,
    EpollWait,
    EpollPwait,
    EpollPwait2,
    Poll,
    Ppoll,
    Select,
    Pselect,
    PollChk,
    PpollChk,
    Mmap,
    Mmap64,
    Munmap,
    Mremap,
    Dlopen,
    Dlsym,
}

use Which::*;

/// In the order of [`Which`].
const ALL: [(Which, &CStr); 25] = [
    (Malloc, c"malloc"),
    (Calloc, c"calloc"),
    (Realloc, c"realloc"),
    (Free, c"free"),
    (PosixMemalign, c"posix_memalign"),
    (AlignedAlloc, c"aligned_alloc"),
    (Memalign, c"memalign"),
    (Valloc, c"valloc"),
    (Pvalloc, c"pvalloc"),
    (Reallocarray, c"reallocarray"),
    (EpollWait, c"epoll_wait"),
    (EpollPwait, c"epoll_pwait"),
    (EpollPwait2, c"epoll_pwait2"),
    (Poll, c"poll"),
    (Ppoll, c"ppoll"),
    (Select, c"select"),
    (Pselect, c"pselect"),
    (PollChk, c"__poll_chk"),
    (PpollChk, c"__ppoll_chk"),
    (Mmap, c"mmap"),
    (Mmap64, c"mmap64"),
    (Munmap, c"munmap"),
    (Mremap, c"mremap"),
    (Dlopen, c"dlopen"),
    (Dlsym, c"dlsym"),
];

/// What is hooked, or is to be.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct HookGroups {
    pub allocators: bool,
    pub waits: bool,
    pub mappings: bool,
}

impl HookGroups {
    fn has(&self, which: Which) -> bool {
        match which {
            Dlopen | Dlsym => *self != HookGroups::default(),
            _ if mappings::address(which).is_some() => self.mappings,
            _ if native::address(which).is_some() => self.allocators,
            _ => self.waits,
        }
    }
}

fn hook(which: Which) -> usize {
    let address = match which {
        Dlopen => Some(thunk::dlopen as *const c_void),
        Dlsym => Some(thunk::dlsym as *const c_void),
        _ => native::address(which)
            .or_else(|| wait::address(which))
            .or_else(|| mappings::address(which)),
    };
    address.map_or(0, |a| a as usize)
}

static REAL: [AtomicPtr<c_void>; ALL.len()] = [const { AtomicPtr::new(std::ptr::null_mut()) }; ALL.len()];

/// The function under the hook. Not null once a slot holds the hook.
#[inline(always)]
pub fn real(which: Which) -> *mut c_void {
    REAL[which as usize].load(Ordering::Relaxed)
}

#[derive(Default)]
struct GotState {
    groups: HookGroups,
    /// Modules without anything left to do, by two addresses that identify them.
    seen: HashSet<(usize, usize)>,
    /// What the slots that were changed held.
    old: HashMap<usize, usize>,
    /// Modules that were ever unloaded.
    unloaded: u64,
}

/// A pthread mutex, not `std`'s: it is held across `fork` by functions of the C library's choosing.
struct GotMutex {
    lock: UnsafeCell<libc::pthread_mutex_t>,
    state: UnsafeCell<Option<GotState>>,
}

// SAFETY: `state` is used with `lock` held, and `lock` is made for several threads.
unsafe impl Sync for GotMutex {}

static SHARED: GotMutex = GotMutex {
    lock: UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER),
    state: UnsafeCell::new(None),
};

/// Modules that were ever loaded, at the last scan.
static LOADED: AtomicUsize = AtomicUsize::new(0);
/// A library was loaded after which nothing could be done.
static IS_PENDING: AtomicBool = AtomicBool::new(false);
/// Attempts to get the lock on the path of `dlopen` and `dlsym`.
const ATTEMPTS: usize = 10_000;

/// The lock, released when this is dropped. Who holds it waits for nothing but the loader's list of modules.
pub struct LockGuard(());

impl Drop for LockGuard {
    fn drop(&mut self) {
        unlock_raw();
    }
}

/// Takes the lock of everything that is installed.
pub fn lock() -> LockGuard {
    lock_raw();
    LockGuard(())
}

pub fn lock_raw() {
    // SAFETY: a mutex that was initialized statically and is never moved.
    unsafe { libc::pthread_mutex_lock(SHARED.lock.get()) };
}

pub fn unlock_raw() {
    // SAFETY: as above; the caller holds it.
    unsafe { libc::pthread_mutex_unlock(SHARED.lock.get()) };
}

/// The lock if it can be had soon. A thread that is forking holds it, and may call the loader from other handlers.
fn try_lock() -> Option<LockGuard> {
    for _ in 0..ATTEMPTS {
        // SAFETY: as above.
        if unsafe { libc::pthread_mutex_trylock(SHARED.lock.get()) } == 0 {
            return Some(LockGuard(()));
        }
        std::thread::yield_now();
    }
    None
}

/// Makes the slots of all modules be as `groups` has it. The caller holds the lock.
pub fn update(groups: HookGroups) {
    // SAFETY: the lock is held, so there is no other reference.
    let state = unsafe { &mut *SHARED.state.get() }.get_or_insert_default();
    if state.groups != groups {
        state.groups = groups;
        state.seen.clear();
    }
    if groups == HookGroups::default() && state.old.is_empty() {
        return;
    }
    if real(Malloc).is_null() {
        find_functions();
    }
    scan(state);
}

/// Finds the functions themselves: the first definition in the order of the global search. (`dlsym` would do, but for
/// programs at fixed addresses, where it gives the program's own linkage table, which goes through a slot.)
fn find_functions() {
    elf::for_each_module(|module, _, _| {
        for (which, name) in ALL {
            let place = &REAL[which as usize];
            if place.load(Ordering::Relaxed).is_null()
                && let Some(address) = module.definition(name)
            {
                place.store(address as *mut c_void, Ordering::Release);
            }
        }
    });
}

/// The kernel's own module and the loader: hooks there would see the loader's work in the middle of it.
fn is_left_alone(module: &LoadedModule) -> bool {
    let here = hook as *const () as usize;
    // SAFETY: no preconditions.
    let parts = unsafe { [libc::getauxval(libc::AT_BASE), libc::getauxval(libc::AT_SYSINFO_EHDR)] };
    module.contains(here, 1) || parts.iter().any(|a| *a != 0 && module.contains(*a as usize, 1))
}

/// What is to be written into a slot that holds `value`, if anything.
fn wish(state: &GotState, module: &LoadedModule, slot: GotSlot, which: Which, value: usize) -> Option<usize> {
    let (hook, real) = (hook(which), real(which) as usize);
    if state.groups.has(which) {
        let is_unbound = slot.is_lazy && !slot.is_defined_here && module.has_code(value);
        (value == real || is_unbound).then_some(hook)
    } else {
        let old = state.old.get(&slot.address).copied();
        // Another module may lie where one was that has been unloaded.
        let old = old.filter(|old| *old == real || module.has_code(*old)).unwrap_or(real);
        (value == hook).then_some(old)
    }
}

fn scan(state: &mut GotState) {
    let names = ALL.map(|(_, name)| name);
    let writable = writable_ranges();
    elf::for_each_module(|module, _, (loaded, unloaded)| {
        LOADED.store(loaded as usize, Ordering::Relaxed);
        if state.unloaded != unloaded {
            state.unloaded = unloaded;
            state.seen.clear();
        }
        let key = (module.base, module.segments.first().map_or(0, |s| s.start));
        if state.seen.contains(&key) || is_left_alone(module) {
            return;
        }
        let mut is_complete = true;
        module.slots(&names, |slot, index| {
            let which = ALL[index].0;
            if REAL[index].load(Ordering::Relaxed).is_null() {
                return;
            }
            // SAFETY: an aligned word in a writable segment of a loaded module; others write it atomically too.
            let word = unsafe { AtomicUsize::from_ptr(slot.address as *mut usize) };
            let value = word.load(Ordering::Relaxed);
            let Some(new) = wish(state, module, slot, which, value) else {
                return;
            };
            if !module.relro.contains(&slot.address) {
                word.store(new, Ordering::Release);
            } else if writable.iter().any(|r| r.contains(&slot.address)) {
                // Another thread is loading it. It is examined again when that is done.
                is_complete = false;
                return;
            } else if !store_read_only(slot.address, word, new) {
                return;
            }
            if new == hook(which) {
                state.old.insert(slot.address, value);
            } else {
                state.old.remove(&slot.address);
            }
        });
        if is_complete {
            state.seen.insert(key);
        }
    });
    if state.groups == HookGroups::default() {
        *state = GotState::default();
    }
}

/// Stores into a page that is read-only. False if it cannot be made writable.
fn store_read_only(address: usize, word: &AtomicUsize, value: usize) -> bool {
    let size = page_size();
    let page = (address & !(size - 1)) as *mut c_void;
    // SAFETY: a page of a loaded module's data; it is given back the protection that it had, and its contents are
    // ordinary memory of the process meanwhile.
    unsafe {
        if libc::mprotect(page, size, libc::PROT_READ | libc::PROT_WRITE) != 0 {
            return false;
        }
        word.store(value, Ordering::Release);
        libc::mprotect(page, size, libc::PROT_READ);
    }
    true
}

/// Writable stretches of this process's memory. Empty if they are not to be found out: then what is to be read-only is
/// taken to be.
fn writable_ranges() -> Vec<std::ops::Range<usize>> {
    let text = std::fs::read("/proc/self/maps").unwrap_or_default();
    let range = |line: &[u8]| {
        let line = std::str::from_utf8(line.get(..line.len().min(64))?).ok()?;
        let (addresses, rest) = line.split_once(' ')?;
        let (start, end) = addresses.split_once('-')?;
        let number = |digits| usize::from_str_radix(digits, 16).ok();
        rest.as_bytes().get(1).filter(|b| **b == b'w')?;
        Some(number(start)?..number(end)?)
    };
    text.split(|b| *b == b'\n').filter_map(range).collect()
}

/// Hooks the modules that were loaded since the last scan.
fn rescan() {
    let Some(_held) = try_lock() else {
        IS_PENDING.store(true, Ordering::Release);
        return;
    };
    // SAFETY: the lock is held.
    if let Some(state) = unsafe { &mut *SHARED.state.get() }
        && state.groups != HookGroups::default()
    {
        IS_PENDING.store(false, Ordering::Release);
        scan(state);
    }
}

/// Where the hook on `dlopen` continues.
///
/// # Safety
/// `name` is null or ends with a zero.
pub unsafe extern "C" fn before_dlopen(name: *const c_char, _: c_int) -> *const c_void {
    if !name.is_null() {
        // SAFETY: as the caller of `dlopen` promises.
        let name = unsafe { CStr::from_ptr(name) }.to_bytes();
        // Who calls it matters where the name is searched for, or has the caller's place in it.
        if name.contains(&b'/') && !name.contains(&b'$') {
            return open_and_scan as *const c_void;
        }
        IS_PENDING.store(true, Ordering::Release);
    }
    real(Dlopen)
}

unsafe extern "C-unwind" fn open_and_scan(name: *const c_char, flags: c_int) -> *mut c_void {
    // SAFETY: the function of this name, as the loader found it.
    let real: unsafe extern "C-unwind" fn(*const c_char, c_int) -> *mut c_void =
        unsafe { std::mem::transmute(real(Dlopen)) };
    // SAFETY: the caller's own arguments.
    let handle = unsafe { real(name, flags) };
    if !handle.is_null() {
        rescan();
    }
    handle
}

/// Where the hook on `dlsym` continues: code that loads a library by a searched name then requests its functions.
pub extern "C" fn before_dlsym() -> *const c_void {
    if IS_PENDING.load(Ordering::Acquire) {
        let mut now = 0;
        elf::for_each_module(|_, _, (loaded, _)| now = loaded as usize);
        if now != LOADED.load(Ordering::Relaxed) {
            rescan();
        }
    }
    real(Dlsym)
}

/// Keeps this module loaded for good: a slot, or a copy of what it held, may lead here at any time.
pub fn pin_this_module() -> Result<(), &'static str> {
    let mut main = None;
    elf::for_each_module(|module, _, _| {
        main.get_or_insert_with(|| module.contains(hook as *const () as usize, 1));
    });
    if main == Some(true) {
        return Ok(());
    }
    // SAFETY: `info` is plain data that `dladdr` fills; the name that it gives lives as long as the module.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(hook as *const c_void, &mut info) == 0 || info.dli_fname.is_null() {
            return Err("the loader does not know this module");
        }
        let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
        if libc::dlopen(info.dli_fname, flags).is_null() {
            Err("this module cannot be kept loaded")
        } else {
            Ok(())
        }
    }
}

/// Whether each slot that was changed still holds our hook: another tool may have put its own or the real function there. The
/// caller holds the lock.
pub fn are_hooks_in_place() -> bool {
    // SAFETY: the lock is held.
    let Some(state) = (unsafe { &*SHARED.state.get() }) else {
        return true;
    };
    let names = ALL.map(|(_, name)| name);
    let mut are_in_place = true;
    elf::for_each_module(|module, _, (_, unloaded)| {
        // Where modules have been unloaded since the last scan another one may lie in the place of one of them.
        if state.unloaded != unloaded || is_left_alone(module) {
            return;
        }
        module.slots(&names, |slot, index| {
            // SAFETY: as in `scan`.
            let value = unsafe { AtomicUsize::from_ptr(slot.address as *mut usize) }.load(Ordering::Relaxed);
            let is_hooked = state.old.contains_key(&slot.address) && !slot.is_variable;
            are_in_place &= value == hook(ALL[index].0) || !is_hooked;
        });
    });
    are_in_place
}

/// Path of a module whose function the slots of `malloc` in other modules hold in place of the hook: that of another tool, or an
/// allocator that is searched before the C library's. The caller holds the lock.
pub fn other_malloc() -> Option<Vec<u8>> {
    let mut held = HashSet::new();
    elf::for_each_module(|module, _, _| {
        if is_left_alone(module) {
            return;
        }
        module.slots(&[ALL[Malloc as usize].1], |slot, _| {
            // SAFETY: as in `scan`.
            let value = unsafe { AtomicUsize::from_ptr(slot.address as *mut usize) }.load(Ordering::Relaxed);
            let is_of_others = value != hook(Malloc) && value != real(Malloc) as usize;
            // In the module itself: a function of its own, or the stub of a call that was not made so far.
            if is_of_others && !slot.is_variable && !module.has_code(value) {
                held.insert(value);
            }
        });
    });
    let mut found = None;
    elf::for_each_module(|module, path, _| {
        // A program at a fixed address (its path is empty) takes the place of each function whose address it uses. What
        // gets there goes through its slot.
        if found.is_none() && !path.is_empty() && held.iter().any(|value| module.has_code(*value)) {
            found = Some(path.to_bytes().to_vec());
        }
    });
    found
}

/// A word through which a module calls one of the hooked functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Path of the module, as the loader has it: empty for the program.
    pub module: Vec<u8>,
    /// Name of the function.
    pub function: &'static str,
    /// Address of the slot.
    pub address: usize,
    /// Address that the slot holds.
    pub value: usize,
}

/// Every slot of the hooked functions in all modules but this one, for tests and for what is to show where hooks are.
pub fn slots() -> Vec<Slot> {
    let names = ALL.map(|(_, name)| name);
    let mut all = Vec::new();
    elf::for_each_module(|module, path, _| {
        if is_left_alone(module) {
            return;
        }
        module.slots(&names, |slot, index| {
            all.push(Slot {
                module: path.to_bytes().to_vec(),
                function: ALL[index].1.to_str().unwrap_or_default(),
                address: slot.address,
                // SAFETY: as in `scan`.
                value: unsafe { AtomicUsize::from_ptr(slot.address as *mut usize) }.load(Ordering::Relaxed),
            });
        });
    });
    all
}
