//! The account of a process's resident memory while it was recorded.

use crate::model::Pid;

/// What a process's resident memory was, and how it changed. Amounts in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidentMemory {
    /// The process.
    pub pid: Pid,
    /// `Rss` of `smaps_rollup` when the recording began, and when it ended; `None` where it could not be read, at the end also of
    /// a process that had ended.
    pub measured: Option<(u64, u64)>,
    /// Memory that belongs to no file.
    pub anonymous: MemoryChanges,
    /// Pages of files.
    pub file: MemoryChanges,
    /// Shared memory: without a file, or of a file in memory.
    pub shared: MemoryChanges,
    /// When the account began, ns since the start of the recording: later for a child, and for a program that the
    /// process executed.
    pub began: u64,
    /// The most that was resident; `None` where that is not known.
    pub peak: Option<MemoryPeak>,
}

/// The most memory of a process that was resident at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPeak {
    /// How much it was: of all kinds together.
    pub bytes: u64,
    /// When it was, ns since the start of the recording: the last time before less was.
    pub time: u64,
}

/// How one kind of resident memory changed, by the kernel's counters. Amounts in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryChanges {
    /// When the recording began, or the process.
    pub start: u64,
    /// What the process's own threads have made resident.
    pub grown: u64,
    /// What they have given back.
    pub returned: u64,
    /// What other tasks have made resident: the kernel's own, or a tracer.
    pub grown_by_others: u64,
    /// What other tasks have taken, when memory was short.
    pub returned_by_others: u64,
}

impl MemoryChanges {
    /// All growth.
    pub fn all_grown(&self) -> u64 {
        self.grown.saturating_add(self.grown_by_others)
    }

    /// All that was given back or taken.
    pub fn all_returned(&self) -> u64 {
        self.returned.saturating_add(self.returned_by_others)
    }

    /// What there was in the end.
    pub fn end(&self) -> u64 {
        self.start
            .saturating_add(self.all_grown())
            .saturating_sub(self.all_returned())
    }
}

impl ResidentMemory {
    /// The kinds together.
    pub fn total(&self) -> MemoryChanges {
        let mut sum = MemoryChanges::default();
        for part in [self.anonymous, self.file, self.shared] {
            for (sum, more) in [
                (&mut sum.start, part.start),
                (&mut sum.grown, part.grown),
                (&mut sum.returned, part.returned),
                (&mut sum.grown_by_others, part.grown_by_others),
                (&mut sum.returned_by_others, part.returned_by_others),
            ] {
                *sum = sum.saturating_add(more);
            }
        }
        sum
    }
}
