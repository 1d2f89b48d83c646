//! The objects of Python, counted by type from outside.
//!
//! ```text
//! find ─► arenas ─► pools, drawn at random ─► blocks ─► types, and what objects own ─► PythonCensus
//!                   blocks of the C heap ─────┘
//! ```
//!
//! - `arenas` finds Python's allocator without symbols, `pools` its blocks in use; `mimalloc` is the same for
//!   free-threaded builds.
//! - `types` says which blocks are objects, `owned` what objects own besides.
//! - `counter` draws pools and adds all of it up; `instances` draws some objects of a type, and
//!   `owners` searches for those that own large blocks.
//!
//! Nothing here stops the target or writes to it. All that is read is hostile: each walk has a limit, and what makes no
//! sense is
//! counted as torn.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use crate::cpython::Runtime;
use crate::cpython::heap_layout::HeapLayout;
use crate::cpython::object_layout::ObjectLayout;
use crate::cpython::thread_states;
use crate::cpython_layout::Interpreter;
use crate::heap::estimate::Estimate;
use crate::process::maps::Mapping;
use crate::process::memory::Memory;

mod arenas;
mod counter;
#[cfg(test)]
mod fake;
mod instances;
mod mimalloc;
mod owned;
mod owners;
mod pools;
mod types;

use arenas::{Areas, Arena};
pub use counter::Counter;
pub use instances::Instances;
use mimalloc::MiPage;
pub use owners::Owners;
use types::Placement;

/// Owned buffers of so many bytes or more are listed one by one, and not estimated: few of them may have most of the memory.
pub const LARGE: u64 = 64 << 10;

/// Interpreters of one process whose arenas are searched for at most.
const MAX_INTERPRETERS: usize = 64;

/// Which pages of a process are in memory.
pub trait ResidentPages {
    /// Bytes of a range whose pages are in memory.
    fn bytes_in(&self, range: Range<u64>) -> u64;
}

/// Why the objects of a process are not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotFound {
    /// No facts are known of this version.
    UnknownVersion,
    /// The data of the interpreter lead to no arenas.
    NoArenas,
}

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NotFound::UnknownVersion => "this version of CPython keeps its objects in a way that is not known",
            NotFound::NoArenas => {
                "the interpreter has no arenas of its own allocator: PYTHONMALLOC, or how it was built, has another one"
            }
        })
    }
}

/// Where the objects of a process are.
#[derive(Clone, Debug)]
pub struct PythonHeap {
    /// Memory of Python's allocator, in ascending order.
    pub arenas: Vec<Range<u64>>,
    allocator: Allocator,
    layout: HeapLayout,
    objects: ObjectLayout,
    placement: Placement,
}

/// How the memory is divided.
#[derive(Clone, Debug)]
enum Allocator {
    Pools(Vec<Arena>),
    /// mimalloc.
    Pages(Vec<MiPage>),
}

/// Finds Python's allocator. `memory` should read only pages that are in memory; `mappings` are those of the process in
/// ascending
/// order.
///
/// # Errors
/// Why nothing was found.
pub fn find(
    memory: &dyn Memory,
    mappings: &[Mapping],
    runtime: &Runtime,
    interpreter: &Interpreter,
) -> Result<PythonHeap, NotFound> {
    let layout = runtime
        .facts
        .and_then(|facts| facts.heap)
        .ok_or(NotFound::UnknownVersion)?;
    let objects = ObjectLayout::of(runtime, &interpreter.layout).ok_or(NotFound::UnknownVersion)?;
    let (arenas, allocator) = if runtime.free_threaded {
        let segments = mimalloc::find(memory, mappings);
        let arenas: Vec<Range<u64>> = segments.iter().map(|segment| segment.range.clone()).collect();
        let pages = segments.into_iter().flat_map(|segment| segment.pages).collect();
        (arenas, Allocator::Pages(pages))
    } else {
        let areas = Areas::new(mappings);
        let data = areas.data_of(interpreter.runtime);
        let interpreters: Vec<u64> = thread_states::interpreters(memory, interpreter)
            .take(MAX_INTERPRETERS)
            .collect();
        // The only one has its arenas in the interpreter's data.
        let states = if interpreters.len() > 1 { &interpreters[..] } else { &[] };
        let pools = arenas::find(memory, &areas, &data, states, layout.pool);
        let arenas = pools.iter().map(|arena| arena.range.clone()).collect();
        (arenas, Allocator::Pools(pools))
    };
    if arenas.is_empty() {
        return Err(NotFound::NoArenas);
    }
    Ok(PythonHeap {
        arenas,
        allocator,
        layout,
        objects,
        placement: Placement::new(&objects, &interpreter.layout, layout.pre_header, runtime.free_threaded),
    })
}

impl PythonHeap {
    /// Whether its memory is divided into pools, as it is in all but free-threaded builds.
    pub fn has_pools(&self) -> bool {
        matches!(self.allocator, Allocator::Pools(_))
    }

    /// Whether an address is in Python's own memory.
    fn has(&self, avma: u64) -> bool {
        is_in(&self.arenas, avma)
    }

    /// Counts the objects in Python's own memory within so much CPU time; `None`: all of them. To count what is in the
    /// C heap as well,
    /// use a [`Counter`].
    pub fn census(&self, memory: &dyn Memory, resident: &dyn ResidentPages, budget: Option<Duration>) -> PythonCensus {
        let mut counter = Counter::new(self, memory, resident);
        counter.count_pools(budget);
        counter.finish()
    }
}

/// Whether one of these ranges, which are in ascending order, has an address.
fn is_in(ranges: &[Range<u64>], avma: u64) -> bool {
    let below = ranges.partition_point(|range| range.start <= avma);
    let found = below.checked_sub(1).and_then(|index| ranges.get(index));
    found.is_some_and(|range| avma < range.end)
}

/// What is known of the objects of Python in a process.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PythonCensus {
    /// Resident bytes of Python's own arenas, in three parts that sum to all of them (but for rounding): blocks in use;
    /// free blocks,
    /// headers and ends of pools that have blocks in use; pools without blocks in use, and what was never used.
    pub used: Estimate,
    pub free_blocks: Estimate,
    pub free_pools: Estimate,
    /// Pools that have blocks in use. mimalloc: its pages.
    pub pools: u64,
    /// Pools of these that were read.
    pub read: u64,
    /// Pools that made no sense: they changed while they were read.
    pub torn: u64,
    pub types: Vec<TypeCensus>,
    /// Owned buffers of [`LARGE`] bytes and more that were met. Those in memory of mimalloc are not in this list: they
    /// are among the
    /// bytes of their owners, or, if none was met, blocks without an owner.
    pub large: Vec<LargeBuffer>,
    /// Everything was read: there is no error of sampling.
    pub is_full: bool,
    /// There were more types or large buffers than are kept: some are missing.
    pub is_truncated: bool,
}

/// The objects of one type, or blocks of one size that are no objects and that no object seen owns.
#[derive(Clone, Debug, PartialEq)]
pub struct TypeCensus {
    pub name: Vec<u8>,
    pub count: Estimate,
    /// Bytes of the blocks of the objects, and of the buffers below [`LARGE`] that they own.
    pub bytes: Estimate,
    /// Those of the bytes that are in the C heap, as far as is known.
    pub c_bytes: u64,
    /// Whether such objects may own large buffers: some of those whose owner was not met may be theirs.
    pub may_own_large: bool,
    /// Whether these are objects.
    pub is_object: bool,
}

/// A buffer that an object owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LargeBuffer {
    /// avma of the buffer, as the object has it.
    pub address: u64,
    pub bytes: u64,
    /// The owner's type: an index into [`PythonCensus::types`].
    pub type_index: usize,
}
