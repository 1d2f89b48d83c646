//! A sampler that is installed in this program sees some of the blocks that a library allocates, and their ends.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nativeprof_hooks::{BlockSampler, Refusal, SampledBlock, Sampling, sample, set_mean};

/// Functions of the C library as another module calls them: this program's own calls are not hooked.
const LIBRARY: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <sys/mman.h>
void *call(int which, void *old, size_t size) {
    void *block = 0;
    switch (which) {
    case 0: return malloc(size);
    case 1: return calloc(1, size);
    case 2: return realloc(old, size);
    case 3: return reallocarray(old, 1, size);
    case 4: return aligned_alloc(64, size);
    case 5: return memalign(64, size);
    case 6: return valloc(size);
    case 7: return posix_memalign(&block, 64, size) ? 0 : block;
    default: free(old); return 0;
    }
}
int malloc_leaves_errno(size_t size) {
    errno = 77;
    free(malloc(size));
    return errno == 77;
}
void *map(int which, void *at, size_t length, size_t more) {
    int protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    switch (which) {
    case 0: return mmap(at, length, protection, flags, -1, 0);
    case 1: return mmap(at, length, PROT_NONE, flags, -1, 0);
    case 2: return mmap(at, length, protection, flags | MAP_FIXED, -1, 0);
    case 3: return mremap(at, length, more, MREMAP_MAYMOVE);
    default: return munmap(at, length) ? MAP_FAILED : 0;
    }
}
"#;

const MAP: i32 = 0;
const RESERVE: i32 = 1;
const MAP_OVER: i32 = 2;
const REMAP: i32 = 3;
const UNMAP: i32 = 4;

const PAGE: usize = 4096;
const MALLOC: i32 = 0;
const REALLOC: i32 = 2;
const GIVE: [i32; 8] = [0, 1, 2, 3, 4, 5, 6, 7];
const FREE: i32 = 8;

#[derive(Clone, Copy)]
struct Library {
    call: extern "C" fn(i32, *mut c_void, usize) -> *mut c_void,
    malloc_leaves_errno: extern "C" fn(usize) -> i32,
    map: extern "C" fn(i32, *mut c_void, usize, usize) -> *mut c_void,
}

impl Library {
    fn load() -> Library {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let (file, out) = (directory.join("sampled.c"), directory.join("libsampled.so"));
        std::fs::write(&file, LIBRARY).expect("the source is written");
        let mut compiler = Command::new("gcc");
        // Else the compiler removes pairs of calls.
        compiler
            .args(["-O1", "-fno-builtin", "-shared", "-fPIC", "-o"])
            .arg(&out)
            .arg(&file);
        assert!(compiler.status().expect("gcc").success());
        let path = CString::new(out.into_os_string().into_encoded_bytes()).expect("a path");
        // SAFETY: the library is our own and stays loaded; its functions have these types.
        unsafe {
            let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
            assert!(!library.is_null());
            let names = [c"call", c"malloc_leaves_errno", c"map"];
            let [call, errno, map] = names.map(|name| libc::dlsym(library, name.as_ptr()));
            assert!(!call.is_null() && !errno.is_null() && !map.is_null());
            Library {
                call: std::mem::transmute::<*mut c_void, extern "C" fn(i32, *mut c_void, usize) -> *mut c_void>(call),
                malloc_leaves_errno: std::mem::transmute::<*mut c_void, extern "C" fn(usize) -> i32>(errno),
                map: std::mem::transmute::<*mut c_void, extern "C" fn(i32, *mut c_void, usize, usize) -> *mut c_void>(
                    map,
                ),
            }
        }
    }

    fn give(self, which: i32, size: usize) -> usize {
        let block = (self.call)(which, std::ptr::null_mut(), size);
        assert!(!block.is_null());
        block as usize
    }

    fn free(self, block: usize) {
        (self.call)(FREE, block as *mut c_void, 0);
    }
}

/// Blocks that were sampled, each with whether it has ended.
#[derive(Default)]
struct Seen {
    blocks: Mutex<Vec<(SampledBlock, bool)>>,
    /// Bytes that are mapped, by the number of the mapping.
    mapped: Mutex<BTreeMap<u32, i64>>,
    overflows: AtomicU32,
}

impl BlockSampler for Seen {
    fn on_block(&self, block: SampledBlock) -> Option<u32> {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.push((block, false));
        let number = blocks.len() as u32 - 1;
        if block.is_mapping {
            self.mapped().insert(number, block.size as i64);
        }
        Some(number)
    }

    fn on_resize(&self, number: u32, change: i64) {
        *self.mapped().get_mut(&number).expect("a mapping") += change;
    }

    fn on_end(&self, number: u32) {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let block = &mut blocks[number as usize];
        assert!(!block.1, "ended twice");
        block.1 = true;
    }

    fn on_overflow(&self, _: u32) {
        self.overflows.fetch_add(1, Ordering::Relaxed);
    }
}

impl Seen {
    fn mapped(&self) -> MutexGuard<'_, BTreeMap<u32, i64>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pages of the mappings that have any, in the order in which these were made.
    fn mapped_pages(&self) -> Vec<i64> {
        let mapped = self.mapped();
        let bytes = mapped.values().filter(|bytes| **bytes != 0);
        bytes.map(|bytes| bytes / PAGE as i64).collect()
    }

    /// Estimated bytes of all blocks and of those that live, and the standard deviation of the first.
    fn bytes(&self, of: impl Fn(usize) -> bool) -> (f64, f64, f64) {
        let blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut all, mut live, mut variance) = (0.0, 0.0, 0.0);
        for (block, has_ended) in blocks.iter().filter(|(block, _)| of(block.size)) {
            let (size, probability) = (block.size as f64, -(-(block.size as f64) / block.mean as f64).exp_m1());
            all += size / probability;
            live += if *has_ended { 0.0 } else { size / probability };
            variance += size * size * (1.0 - probability) / (probability * probability);
        }
        (all, live, variance.sqrt())
    }
}

/// There is one sampler at a time.
fn alone() -> (MutexGuard<'static, ()>, Library) {
    static ALONE: Mutex<()> = Mutex::new(());
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    (guard, Library::load())
}

fn sampled(mean: u64) -> (Arc<Seen>, Sampling) {
    let seen = Arc::new(Seen::default());
    let sampling = sample(seen.clone(), mean, false).expect("a sampler");
    (seen, sampling)
}

fn is_about(estimate: f64, truth: f64, deviation: f64) {
    assert!(
        (estimate - truth).abs() <= 5.0 * deviation + 1.0,
        "{estimate} of {truth}, +- {deviation}"
    );
}

#[test]
fn sums_of_all_functions_are_right_and_ends_are_seen() {
    let (_alone, library) = alone();
    let (seen, mut sampling) = sampled(1 << 14);
    // Sizes that nothing else requests; half of the blocks of each function are kept.
    for (at, which) in GIVE.into_iter().enumerate() {
        let size = 200 * (at + 1) * (at + 1) + 64;
        let blocks: Vec<usize> = (0..4000).map(|_| library.give(which, size)).collect();
        let (kept, freed) = blocks.split_at(2000);
        // By another thread than the one that allocated it.
        let freed = freed.to_vec();
        std::thread::spawn(move || freed.into_iter().for_each(|block| library.free(block)))
            .join()
            .expect("a thread");
        let (all, live, deviation) = seen.bytes(|s| s == size);
        is_about(all, 4000.0 * size as f64, deviation);
        is_about(live, 2000.0 * size as f64, deviation);
        kept.iter().for_each(|block| library.free(*block));
        assert_eq!(seen.bytes(|s| s == size).1, 0.0, "function {which}");
    }
    assert_eq!(seen.overflows.load(Ordering::Relaxed), 0);

    // With a mean of a byte every block is sampled.
    set_mean(1);
    library.free(library.give(MALLOC, 1 << 20));
    assert_eq!((library.malloc_leaves_errno)(123_457), 1);
    assert_eq!(seen.bytes(|s| s == 123_457).0, 123_457.0);

    assert!(sampling.remove() && !sampling.is_current());
    library.give(MALLOC, 123_458);
    assert_eq!(seen.bytes(|s| s == 123_458).0, 0.0);
}

#[test]
fn a_block_of_another_size_is_a_new_block() {
    let (_alone, library) = alone();
    let (seen, _sampling) = sampled(1);
    library.free(library.give(MALLOC, 1 << 20));
    let mut block = library.give(MALLOC, 10_001);
    for size in [20_001, 30_001, 5_001] {
        block = (library.call)(REALLOC, block as *mut c_void, size) as usize;
    }
    let live = |size| seen.bytes(|s| s == size).1;
    assert_eq!([10_001, 20_001, 30_001, 5_001].map(live), [0.0, 0.0, 0.0, 5_001.0]);
    // One that fails changes nothing.
    assert!((library.call)(REALLOC, block as *mut c_void, isize::MAX as usize).is_null());
    assert_eq!(live(5_001), 5_001.0);
    assert!((library.call)(REALLOC, block as *mut c_void, 0).is_null());
    assert_eq!(live(5_001), 0.0);
}

#[test]
fn mappings_are_followed_in_parts() {
    let (_alone, library) = alone();
    let (seen, _sampling) = sampled(1);
    library.free(library.give(MALLOC, 1 << 20));
    let failed = libc::MAP_FAILED as usize;
    let call =
        |which, at: usize, pages, more| (library.map)(which, at as *mut c_void, pages * PAGE, more * PAGE) as usize;
    let unmap = |at: usize, pages| call(UNMAP, at, pages, 0);
    // With room around it.
    let place = call(RESERVE, 0, 100, 0);
    assert_eq!(seen.mapped_pages(), [], "address space without memory");
    let start = place + 10 * PAGE;
    assert_eq!(call(MAP_OVER, start, 10, 0), start);
    assert_eq!(seen.mapped_pages(), [10]);
    for (from, pages, left) in [(4, 2, 8), (0, 1, 7), (8, 5, 5), (4, 3, 4), (3, 0, 4)] {
        let done = unmap(start + from * PAGE, pages);
        assert_eq!(done, if pages == 0 { failed } else { 0 });
        assert_eq!(seen.mapped_pages(), [left], "after {pages} from {from}");
    }
    // One that fails changes nothing.
    assert_eq!(unmap(start + 1, 100), failed);
    assert_eq!(seen.mapped_pages(), [4]);
    // Pages 1, 2, 3 and 7 are left: a new mapping takes the place of the last two.
    assert_eq!(call(MAP_OVER, start + 3 * PAGE, 20, 0), start + 3 * PAGE);
    assert_eq!(seen.mapped_pages(), [2, 20]);
    assert_eq!(unmap(place, 100), 0);
    assert_eq!(seen.mapped_pages(), []);
    // A mapping that grows and moves keeps its number.
    let small = call(MAP, 0, 3, 0);
    let large = call(REMAP, small, 3, 2000);
    assert!(large != failed);
    assert_eq!(seen.mapped_pages(), [2000]);
    assert_eq!(unmap(large + PAGE, 1), 0);
    let smaller = call(REMAP, large + 2 * PAGE, 1998, 8);
    assert_eq!(seen.mapped_pages(), [9]);
    assert_eq!((unmap(large, 1), unmap(smaller, 8)), (0, 0));
    assert_eq!(seen.mapped_pages(), []);
    assert_eq!(seen.overflows.load(Ordering::Relaxed), 0);
}

#[test]
fn a_block_at_the_address_of_another_one_ends_that() {
    let (_alone, library) = alone();
    let (seen, _sampling) = sampled(1);
    library.free(library.give(MALLOC, 1 << 20));
    let block = library.give(MALLOC, 3_333);
    // This program's own call is not seen.
    // SAFETY: the block is not used any more.
    unsafe { libc::free(block as *mut c_void) };
    let again = library.give(MALLOC, 3_334);
    assert_eq!(again, block, "the C library gives the block that was freed last");
    let live = |size| seen.bytes(|s| s == size).1;
    assert_eq!((live(3_333), live(3_334)), (0.0, 3_334.0));
    library.free(again);
    assert_eq!(live(3_334), 0.0);
}

#[test]
fn a_second_sampler_is_refused_and_a_forked_child_has_none() {
    let (_alone, library) = alone();
    let (seen, sampling) = sampled(1);
    assert_eq!(sample(seen.clone(), 1, false).err(), Some(Refusal::AlreadySampling));
    library.free(library.give(MALLOC, 1 << 20));
    let block = library.give(MALLOC, 7_777);
    // SAFETY: the child allocates, which is allowed after `fork` with glibc, and ends without anything of the parent's.
    let child = unsafe { libc::fork() };
    if child == 0 {
        library.free(block);
        library.give(MALLOC, 7_777);
        let count = || {
            seen.blocks
                .lock()
                .map_or(0, |blocks| blocks.iter().filter(|b| b.0.size == 7_777).count())
        };
        let is_silent = count() == 1 && !sampling.is_current();
        let is_reusable = sample(seen.clone(), 1, false).is_ok_and(|again| {
            library.free(library.give(MALLOC, 1 << 20));
            library.give(MALLOC, 7_777);
            again.is_current() && count() == 2
        });
        // SAFETY: no preconditions.
        unsafe { libc::_exit(i32::from(!(is_silent && is_reusable))) };
    }
    let mut status = -1;
    // SAFETY: the status is written to.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(seen.bytes(|s| s == 7_777).1, 7_777.0);
    library.free(block);
    assert_eq!(seen.bytes(|s| s == 7_777).1, 0.0);
}

#[test]
fn threads_allocate_at_the_same_time() {
    let (_alone, library) = alone();
    let (seen, _sampling) = sampled(1 << 12);
    let threads = (0..4).map(|at| {
        std::thread::spawn(move || {
            for _ in 0..20_000 {
                library.free(library.give(MALLOC, 1_111 + at));
            }
        })
    });
    threads
        .collect::<Vec<_>>()
        .into_iter()
        .for_each(|t| t.join().expect("a thread"));
    let (all, live, deviation) = seen.bytes(|s| (1_111..1_115).contains(&s));
    is_about(all, (0..4).map(|at| 20_000.0 * (1_111 + at) as f64).sum(), deviation);
    assert_eq!(live, 0.0);
}
