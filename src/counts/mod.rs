//! What is counted while samples are taken: raw stacks as prefixes, and what is known of their waits. `resolve` makes a
//! profile of it.

use crate::event::{Pid, Tid};

mod tree;
mod waits;

pub use tree::{FramePath, RawNode, RawTimelineSample, RawTree, TreeShare};
pub use waits::{RawWaits, RawWaker};

/// What a sample of resident memory is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RawMemory {
    /// Memory that became resident, and whether it is resident in the end.
    Grown { is_resident: bool },
    /// Memory that was given back.
    Returned,
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
