//! What is counted while samples are taken: raw stacks as prefixes, and what is known of their waits. `resolve` makes a
//! profile of it.

use crate::event::{Pid, Tid};

pub mod allocations;
mod tree;
mod waits;

pub use tree::{FramePath, RawNode, RawTimelineSample, RawTree, TreeShare};
pub use waits::{RawWaits, RawWaker};

/// What a sample of resident memory is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RawMemory {
    /// Memory that became resident.
    Grown {
        /// When it was found to have gone, on the samples' clock, ns; `u64::MAX`: it is resident in the end.
        until: u64,
        /// Whether it was resident when most of its process's memory was.
        at_peak: bool,
    },
    /// Memory that was given back.
    Returned,
}

impl RawMemory {
    /// Memory that has become resident now, as far as is known.
    pub const NEW: RawMemory = RawMemory::Grown {
        until: u64::MAX,
        at_peak: false,
    };

    /// Whether it is memory that grew and is resident in the end.
    pub fn is_resident(self) -> bool {
        matches!(self, RawMemory::Grown { until: u64::MAX, .. })
    }

    /// Whether it is memory that grew and was resident when most was.
    pub fn was_at_peak(self) -> bool {
        matches!(self, RawMemory::Grown { at_peak: true, .. })
    }
}

/// A callback that kept its event loop for long, or a step of a task, before its stack is named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawLag {
    pub pid: Pid,
    pub tid: Tid,
    /// CLOCK_MONOTONIC, ns.
    pub start: u64,
    /// ns.
    pub length: u64,
    /// Where its stack ends; 0 if none is known.
    pub node: RawNode,
}
