//! An object for `LD_PRELOAD`: counts the blocks that a program requests of the C library's allocator, and says how many at
//! its end.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nativeprof_hooks::{Allocation, AllocatorCall, Cache, Handler, HookSet, Refusal, install};

static BLOCKS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);
static STARTED_IN: AtomicU64 = AtomicU64::new(0);

struct Counter;

impl Handler for Counter {
    fn on_allocation(&self, _: &mut Cache, allocation: &Allocation) {
        if allocation.kind != AllocatorCall::Free {
            BLOCKS.fetch_add(1, Ordering::Relaxed);
            BYTES.fetch_add(allocation.size as u64, Ordering::Relaxed);
        }
    }
}

fn start() -> Result<(), Refusal> {
    let native = HookSet {
        native: true,
        ..HookSet::default()
    };
    // It stays until the process ends.
    std::mem::forget(install(Arc::new(Counter), native)?);
    Ok(())
}

extern "C" fn on_load() {
    STARTED_IN.store(std::process::id().into(), Ordering::Relaxed);
    if let Err(refusal) = start() {
        let _ = writeln!(std::io::stderr(), "count_allocations: {refusal}");
    }
}

extern "C" fn on_unload() {
    // Not in a forked child, which has a copy of the counts.
    if STARTED_IN.load(Ordering::Relaxed) == u64::from(std::process::id()) {
        let (blocks, bytes) = (BLOCKS.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
        let _ = writeln!(std::io::stderr(), "count_allocations: {blocks} blocks, {bytes} bytes");
    }
}

// SAFETY: the loader calls these functions without arguments that they need, once, after the libraries that this object
// depends on were initialized, and before they end.
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

// SAFETY: as above.
#[used]
#[unsafe(link_section = ".fini_array")]
static ON_UNLOAD: extern "C" fn() = on_unload;
