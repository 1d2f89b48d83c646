//! The objects of Python, counted by type from outside.
//!
//! ```text
//! find ─► arenas ─► pools, drawn at random ─► blocks ─► types, and what objects own ─► PythonCensus
//!                   blocks of the C heap ─────┘
//! ```
//!
//! Nothing here needs symbols of the interpreter, and nothing stops the target or writes to it. All that is read is hostile: each
//! walk has a limit, and what does not fit is counted as torn.

use std::ops::Range;

use crate::heap::estimate::Estimate;

/// Owned buffers of so many bytes or more are listed one by one, and not estimated: few of them may have most of the memory.
pub const LARGE: u64 = 64 << 10;

/// Which pages of a process are in memory.
pub trait ResidentPages {
    /// Bytes of a range whose pages are in memory.
    fn bytes_in(&self, range: Range<u64>) -> u64;
}

/// What is known of the objects of Python in a process.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PythonCensus {
    /// Resident bytes of Python's own arenas, in three parts that sum to all of them (but for rounding): blocks in use; free blocks,
    /// headers and ends of pools that have blocks in use; pools without blocks in use, and what was never used.
    pub used: Estimate,
    pub free_blocks: Estimate,
    pub free_pools: Estimate,
    /// Pools in the arenas, in use or not. mimalloc: its pages.
    pub pools: u64,
    /// Pools that were read.
    pub read: u64,
    /// Pools of these that made no sense: they changed while they were read.
    pub torn: u64,
    pub types: Vec<TypeCensus>,
    /// Owned buffers of [`LARGE`] bytes and more that were met.
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
