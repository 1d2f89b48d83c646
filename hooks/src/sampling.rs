//! Sampling of allocations by their bytes: the lean path, beside that of the handlers.
//!
//! Each thread counts down the bytes that it allocates, from a distance that is drawn from an exponential distribution. The
//! block in which the distance ends is sampled, so a block of `size` bytes with the probability `1 - exp(-size / mean)`,
//! whatever was allocated before it. Where no block is sampled, an allocation costs a subtraction from a word of the thread,
//! and a free the load of one byte: of a table of counts by the hash of the address, which is zero unless a sampled block
//! may lie there.

use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence};
use std::time::SystemTime;

use crate::{FORKS, INSIDE, Pointer, Refusal, SHARDS, got, mappings, probes, pymem, thread, while_busy};

/// A block that was sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampledBlock {
    /// Bytes requested.
    pub size: usize,
    /// Mean distance of samples that it was drawn with, bytes.
    pub mean: u64,
    /// It is anonymous memory that `mmap` has mapped: its end is reported by [`BlockSampler::on_resize`], in parts.
    pub is_mapping: bool,
}

/// A receiver of sampled blocks. The hooks call it on the thread that made the call, perhaps in a signal handler. It must
/// not wait for the program's other threads, panic, or touch Python objects, and what it allocates is not sampled.
pub trait BlockSampler: Send + Sync {
    /// Takes a block, and gives it a number by which [`BlockSampler::on_end`] knows it; `None`: its end is not wanted.
    fn on_block(&self, block: SampledBlock) -> Option<u32>;

    /// The block with this number is freed, or has become another one by `realloc`.
    fn on_end(&self, number: u32);

    /// The mapping with this number has become larger or smaller by so many bytes.
    fn on_resize(&self, number: u32, change: i64);

    /// There are too many sampled blocks: the end of the one with this number will not be reported.
    fn on_overflow(&self, number: u32);
}

/// Mean distance between samples where none was set, bytes.
pub const DEFAULT_MEAN: u64 = 512 << 10;

/// The sampler that is in place.
struct InPlace {
    sampler: Arc<dyn BlockSampler>,
    /// Number of its recording.
    recording: u32,
}

/// A sampled block as its sampler knows it. A thread may keep it during a call in which another sampler takes the place of
/// this one, for which the number means nothing.
#[derive(Clone, Copy)]
pub struct Known {
    number: u32,
    recording: u32,
}

impl Known {
    /// No sampler's block.
    pub const NOTHING: Known = Known {
        number: 0,
        recording: 0,
    };
}

static SAMPLER: AtomicPtr<InPlace> = AtomicPtr::new(std::ptr::null_mut());
/// Recordings of this process so far.
static RECORDINGS: AtomicU32 = AtomicU32::new(0);
static MEAN: AtomicU64 = AtomicU64::new(DEFAULT_MEAN);
/// Bytes after which a thread draws another distance, with the mean of that time.
const MAX_LEFT: u64 = 4 << 20;
/// Makes the random numbers of one run different from those of another.
static START: AtomicU64 = AtomicU64::new(0);
/// The largest block that is counted as Python's.
static PYTHON_LIMIT: AtomicUsize = AtomicUsize::new(0);

/// Bits of the hash of an address.
const HASH_BITS: u32 = 16;
/// Buckets of the table of sampled blocks, and blocks in a bucket: a cache line.
const BUCKETS: usize = 1 << 14;
const BUCKET: usize = 8;
/// Words of a bucket that hold no address.
const EMPTY: usize = 0;
const TAKEN: usize = 1;
/// A count that has been reached stays: how many more there were is not known.
const MOST: u8 = u8::MAX;

/// Sampled blocks by the hash of their address.
static COUNTS: [AtomicU8; 1 << HASH_BITS] = [const { AtomicU8::new(0) }; 1 << HASH_BITS];

#[repr(align(64))]
struct Bucket {
    addresses: [AtomicUsize; BUCKET],
    numbers: [AtomicU32; BUCKET],
}

static BLOCKS: [Bucket; BUCKETS] = [const {
    Bucket {
        addresses: [const { AtomicUsize::new(EMPTY) }; BUCKET],
        numbers: [const { AtomicU32::new(0) }; BUCKET],
    }
}; BUCKETS];

/// The place of a block in its region of 1 MiB (blocks are aligned to 16 bytes), and the Fibonacci hash of the region. So what a
/// program frees in one place has its counts in one place: a table used at random would take the cache from the program.
#[inline(always)]
fn hash(block: Pointer) -> usize {
    let place = block as usize >> 4;
    let region = (place >> HASH_BITS) as u32;
    (place ^ (region.wrapping_mul(0x9e37_79b1) >> (32 - HASH_BITS)) as usize) & ((1 << HASH_BITS) - 1)
}

#[inline(always)]
fn bucket(hash: usize) -> &'static Bucket {
    &BLOCKS[hash % BUCKETS]
}

/// Adds a block that no other thread knows yet; false if there is no room.
fn insert(block: Pointer, number: u32) -> bool {
    let hash = hash(block);
    let Bucket { addresses, numbers } = bucket(hash);
    for (address, place) in addresses.iter().zip(numbers) {
        let claimed = address.compare_exchange(EMPTY, TAKEN, Ordering::Acquire, Ordering::Relaxed);
        if claimed.is_ok() {
            place.store(number, Ordering::Relaxed);
            // The thread that frees the block gets its address from this thread, and with it these stores.
            address.store(block as usize, Ordering::Release);
            let more = |count: u8| count.checked_add(1);
            let _ = COUNTS[hash].fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
            return true;
        }
    }
    false
}

/// The place of a block in its bucket.
fn find(block: Pointer) -> Option<(&'static AtomicUsize, &'static AtomicU32)> {
    if (block as usize) <= TAKEN || !is_suspect(block) {
        return None;
    }
    let Bucket { addresses, numbers } = bucket(hash(block));
    let mut places = addresses.iter().zip(numbers);
    places.find(|(address, _)| address.load(Ordering::Acquire) == block as usize)
}

/// Takes a block out that is about to be freed, and calls `call` with its sampler and its number.
fn take<T>(block: Pointer, call: impl FnOnce(&InPlace, u32) -> T) -> Option<T> {
    let (address, number) = find(block)?;
    // The table is not cleared meanwhile.
    let taken = with_sampler(|current| {
        // It may have been freed twice, or the table been cleared.
        address
            .compare_exchange(block as usize, TAKEN, Ordering::Acquire, Ordering::Relaxed)
            .ok()?;
        let number = number.load(Ordering::Relaxed);
        address.store(EMPTY, Ordering::Release);
        let less = |count: u8| if count == MOST { None } else { count.checked_sub(1) };
        let _ = COUNTS[hash(block)].fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        Some(call(current, number))
    });
    taken.flatten()
}

fn forget_all() {
    mappings::forget_all();
    for bucket in &BLOCKS {
        for address in &bucket.addresses {
            if address.load(Ordering::Relaxed) != EMPTY {
                address.store(EMPTY, Ordering::Relaxed);
            }
        }
    }
    for count in &COUNTS {
        if count.load(Ordering::Relaxed) != 0 {
            count.store(0, Ordering::Relaxed);
        }
    }
}

/// Counts the bytes of a block that is requested; true if those that were left have ended in them: then the block is due to
/// [`gives`] or [`moves`].
#[inline(always)]
pub fn count(size: usize) -> bool {
    let thread = thread::current();
    // SAFETY: this thread's own words, here and below.
    match unsafe { (*thread).left }.checked_sub(size as u64) {
        Some(left) => {
            // SAFETY: as above.
            unsafe { (*thread).left = left };
            false
        }
        None => true,
    }
}

/// Calls a function that gives a block of this size, or null. `is_due`: as [`count`] says.
pub fn gives(size: usize, is_due: bool, call: impl FnOnce() -> Pointer) -> Pointer {
    let sampled = if is_due { draw(size) } else { None };
    let block = call();
    if let Some(sampled) = sampled {
        report(block, sampled);
    }
    block
}

/// Calls a function that gives a block in the place of another one: a new block, and the end of the old one.
pub fn moves(old: Pointer, size: usize, is_due: bool, call: impl FnOnce() -> Pointer) -> Pointer {
    gives(size, is_due, || moves_suspect(old, size, call))
}

/// Calls a function that gives a block in the place of another one, and reports the end of the old one.
pub fn moves_suspect(old: Pointer, size: usize, call: impl FnOnce() -> Pointer) -> Pointer {
    // Before the call: another thread may be given the address before it returns.
    let known = take(old, |current, number| {
        // (If the call fails, observers miss a block that is still live.)
        probes::freed(old);
        current.known(number)
    });
    let block = call();
    if let Some(known) = known {
        with_sampler_of(known, |current| {
            // Nothing has changed if it failed; null for a size of 0 means that the old block is gone.
            if block.is_null() && size != 0 {
                current.keep(old, known.number);
            } else {
                current.sampler.on_end(known.number);
            }
        });
    }
    block
}

/// A block has been given whose bytes have been counted just now, and were due.
#[cold]
#[inline(never)]
pub fn given(block: Pointer, size: usize) {
    if let Some(sampled) = draw(size) {
        report(block, sampled);
    }
}

/// Whether a block may have been sampled.
#[inline(always)]
pub fn is_suspect(block: Pointer) -> bool {
    COUNTS[hash(block)].load(Ordering::Relaxed) != 0
}

/// A block is about to be freed.
pub fn ends(block: Pointer) {
    take(block, |current, number| {
        probes::freed(block);
        current.sampler.on_end(number);
    });
}

/// The largest block that is counted as Python's.
#[inline(always)]
pub fn python_limit() -> usize {
    PYTHON_LIMIT.load(Ordering::Relaxed)
}

/// Where this thread is in its distances: bytes that it may still allocate until it looks again, and distances drawn so
/// far. It is another one if bytes were counted.
#[inline(always)]
pub fn position() -> (u64, u64) {
    let thread = thread::current();
    // SAFETY: this thread's own words.
    unsafe { ((*thread).left, (*thread).draws) }
}

/// Bytes that are counted on this thread while `call` runs; no block is sampled.
pub fn bytes_counted(call: impl FnOnce()) -> u64 {
    const PLENTY: u64 = 1 << 48;
    let thread = thread::current();
    // SAFETY: this thread's own words, here and below.
    let was = unsafe { std::mem::replace(&mut (*thread).left, PLENTY) };
    compiler_fence(Ordering::SeqCst);
    crate::silently(call);
    compiler_fence(Ordering::SeqCst);
    // SAFETY: as above.
    PLENTY.saturating_sub(unsafe { std::mem::replace(&mut (*thread).left, was) })
}

/// The bytes that were left have ended in a block of this size: draws the next distance. `None`: the block is not sampled.
///
/// What is left of an exponential distance is distributed as a new one. So a thread may draw a new one after any block that
/// was not chosen because of its place in the old one, and it does so now and then: else it would not notice for long that
/// the mean has become smaller.
fn draw(size: usize) -> Option<SampledBlock> {
    let thread = thread::current();
    // SAFETY: this thread's own words.
    unsafe {
        let next = MEAN.load(Ordering::Relaxed);
        if (*thread).mean == 0 {
            (*thread).mean = next;
            set_distance(thread, next);
        }
        let mean = std::mem::replace(&mut (*thread).mean, next);
        let is_due = size as u64 > (*thread).left.saturating_add((*thread).rest);
        (*thread).draws = (*thread).draws.wrapping_add(1);
        set_distance(thread, next);
        let is_wanted = is_due && (*thread).is_busy == 0 && !SAMPLER.load(Ordering::Relaxed).is_null();
        is_wanted.then_some(SampledBlock {
            size,
            mean,
            is_mapping: false,
        })
    }
}

/// Draws the distance to the next sampled block, in whole bytes: a block ends it if it is larger.
///
/// # Safety
/// The thread's own words.
unsafe fn set_distance(thread: *mut thread::HookThread, mean: u64) {
    // SAFETY: as the caller promises.
    unsafe {
        let distance = distance(thread, mean);
        (*thread).left = distance.min(MAX_LEFT);
        (*thread).rest = distance - (*thread).left;
    }
}

/// A random distance, in whole bytes: a block ends it if it is larger.
///
/// # Safety
/// The thread's own words.
unsafe fn distance(thread: *mut thread::HookThread, mean: u64) -> u64 {
    /// Threads of the process so far. A new thread may have the address of one that has ended.
    static SEEDS: AtomicU64 = AtomicU64::new(0);
    // SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let mixed = |state: u64| {
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    // SAFETY: as the caller promises.
    let random = unsafe { &mut (*thread).random };
    if *random == 0 {
        *random = mixed(SEEDS.fetch_add(STEP, Ordering::Relaxed) ^ START.load(Ordering::Relaxed)) | 1;
    }
    *random = random.wrapping_add(STEP);
    // In (0, 1].
    let uniform = ((mixed(*random) >> 11) + 1) as f64 / (1u64 << 53) as f64;
    (-uniform.ln() * mean as f64) as u64
}

/// Reports a sampled block, and has its end known.
fn report(block: Pointer, sampled: SampledBlock) {
    if block.is_null() {
        return;
    }
    // One that is still known at this address was freed without a call that is seen.
    ends(block);
    with_sampler(|current| {
        if let Some(number) = current.number_of(sampled) {
            current.keep(block, number);
            probes::allocated(block, sampled);
        }
    });
}

/// Memory of this size has been mapped, and its bytes, which have been counted just now, were due. `None`: it is not sampled, or
/// its end is not wanted.
#[cold]
#[inline(never)]
pub fn mapped(size: usize) -> Option<Known> {
    let sampled = draw(size)?;
    let known = with_sampler(|current| {
        let number = current.number_of(SampledBlock {
            is_mapping: true,
            ..sampled
        })?;
        Some(current.known(number))
    });
    known.flatten()
}

/// This mapping has become larger or smaller by so many bytes.
pub fn resized(mapping: Known, change: i64) {
    with_sampler_of(mapping, |current| current.sampler.on_resize(mapping.number, change));
}

/// The end of this mapping will not be known.
pub fn not_followed(mapping: Known) {
    with_sampler_of(mapping, |current| current.sampler.on_overflow(mapping.number));
}

impl InPlace {
    fn known(&self, number: u32) -> Known {
        Known {
            number,
            recording: self.recording,
        }
    }

    /// Gives a sampled block to the sampler. Its number, if its end is wanted.
    fn number_of(&self, sampled: SampledBlock) -> Option<u32> {
        let number = while_busy(|_| {
            // SAFETY: the address of this thread's errno, which stays there.
            let errno = unsafe { libc::__errno_location() };
            // SAFETY: as above.
            let saved = unsafe { *errno };
            let number = self.sampler.on_block(sampled);
            // SAFETY: as above.
            unsafe { *errno = saved };
            number
        });
        number.flatten()
    }

    /// Has the end of a block known that is the caller's.
    fn keep(&self, block: Pointer, number: u32) {
        if !insert(block, number) {
            self.sampler.on_overflow(number);
        }
    }
}

/// Calls `call` with the sampler, if there is one: it stays in place meanwhile, and the table its own.
fn with_sampler<T>(call: impl FnOnce(&InPlace) -> T) -> Option<T> {
    // As in `notify`.
    let shard = &INSIDE[(thread::current() as usize >> 12) % SHARDS].0;
    shard.fetch_add(1, Ordering::SeqCst);
    // SAFETY: null, or made by `sample`; it is freed when no thread is inside that may have seen it.
    let result = unsafe { SAMPLER.load(Ordering::SeqCst).as_ref() }.map(call);
    shard.fetch_sub(1, Ordering::Release);
    result
}

/// Calls `call` with the sampler of this block, if it is still in place.
fn with_sampler_of(block: Known, call: impl FnOnce(&InPlace)) {
    with_sampler(|current| {
        if current.recording == block.recording {
            call(current);
        }
    });
}

/// A sampler that is in place. Dropping it removes it.
pub struct Sampling {
    forks: u64,
    has_python: bool,
    is_removed: bool,
}

/// Whether a sampler is in place.
pub fn is_active() -> bool {
    !SAMPLER.load(Ordering::SeqCst).is_null()
}

/// Samples what is allocated from now on, on average once in `mean` bytes: of the C library's allocator and, with `python`, of
/// Python's domains for buffers and objects. What those request of the C library is sampled there.
///
/// If Python's domains are wanted it takes the interpreter's lock, unless the calling thread has it. So does
/// [`Sampling::remove`] then.
///
/// # Errors
/// The reason why it is refused.
pub fn sample(sampler: Arc<dyn BlockSampler>, mean: u64, python: bool) -> Result<Sampling, Refusal> {
    crate::prepare()?;
    let attached = if python { Some(pymem::attach()?) } else { None };
    let held = got::lock();
    if is_active() {
        return Err(Refusal::AlreadySampling);
    }
    forget_all();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    START.store(now.map_or(0, |time| time.as_nanos() as u64), Ordering::Relaxed);
    MEAN.store(mean.max(1), Ordering::Relaxed);
    let thread = thread::current();
    // Other threads notice the new mean some megabytes later.
    // SAFETY: this thread's own words.
    unsafe { ((*thread).left, (*thread).rest, (*thread).mean) = (0, 0, 0) };
    let recording = RECORDINGS.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
    SAMPLER.store(
        Box::into_raw(Box::new(InPlace { sampler, recording })),
        Ordering::SeqCst,
    );
    let mut sampling = Sampling {
        forks: FORKS.load(Ordering::Relaxed),
        has_python: false,
        is_removed: false,
    };
    got::update(crate::groups());
    if let Some(attached) = &attached {
        let limit = pymem::own_limit(attached);
        PYTHON_LIMIT.store(limit, Ordering::Relaxed);
        pymem::update_lean();
        sampling.has_python = limit > 0;
        if limit > 0 && !pymem::update(attached) {
            // Removing it takes the lock.
            drop(held);
            drop(sampling);
            return Err(Refusal::TooManyLinks);
        }
    }
    Ok(sampling)
}

impl Sampling {
    /// Whether it was installed in this process, not in one that this was forked from.
    pub fn is_current(&self) -> bool {
        !self.is_removed && self.forks == FORKS.load(Ordering::Relaxed)
    }

    /// Whether all hooks are where they were put, now. Another tool may have taken them away: then blocks are missing, and ends
    /// of others.
    ///
    /// It takes the interpreter's lock as [`sample`] does.
    pub fn are_hooks_in_place(&self) -> bool {
        if !self.is_current() {
            return true;
        }
        let attached = self.has_python.then(pymem::attach).and_then(Result::ok);
        let _held = got::lock();
        got::are_hooks_in_place() && attached.as_ref().is_none_or(pymem::is_reached)
    }

    /// Path of a module that calls of `malloc` get to in place of the hook, if there is one: what these calls allocate is
    /// not sampled.
    pub fn other_malloc(&self) -> Option<Vec<u8>> {
        let _held = self.is_current().then(got::lock)?;
        got::other_malloc()
    }

    /// Takes the sampler away; after it has returned the sampler is not running on any thread, and never will. The flag is
    /// false if a thread was stuck in it; then it is kept for good.
    pub fn remove(&mut self) -> bool {
        if !self.is_current() {
            self.is_removed = true;
            return true;
        }
        self.is_removed = true;
        let attached = self.has_python.then(pymem::attach).and_then(Result::ok);
        let _held = got::lock();
        let sampler = SAMPLER.swap(std::ptr::null_mut(), Ordering::SeqCst);
        PYTHON_LIMIT.store(0, Ordering::Relaxed);
        pymem::update_lean();
        got::update(crate::groups());
        if let Some(attached) = &attached {
            pymem::update(attached);
        }
        let is_quiet = crate::wait_for_handlers();
        if is_quiet && !sampler.is_null() {
            // SAFETY: made by `Box::into_raw` in `sample`; it is out of reach, and no thread is inside.
            drop(unsafe { Box::from_raw(sampler) });
        }
        is_quiet
    }
}

impl Drop for Sampling {
    fn drop(&mut self) {
        if !self.is_removed {
            self.remove();
        }
    }
}

/// Changes the mean distance of samples, bytes: a thread draws with it from its next sample on, or some megabytes later.
pub fn set_mean(mean: u64) {
    MEAN.store(mean.max(1), Ordering::Relaxed);
}

/// In a forked child: the sampler is its parent's.
pub fn forget() {
    SAMPLER.store(std::ptr::null_mut(), Ordering::SeqCst);
    PYTHON_LIMIT.store(0, Ordering::Relaxed);
    pymem::update_lean();
    mappings::forget_in_child();
}
