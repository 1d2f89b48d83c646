//! Sums over the units that were drawn, by type or by size.

use crate::heap::estimate::{Estimate, Tally};

/// Where a unit was drawn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Pools,
    CHeap,
}

/// Units that were drawn, and how many there are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Drawn {
    pub(super) units: u64,
    pub(super) all: u64,
}

/// A quantity in units of both sources.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Quantity {
    /// In the unit that is being counted.
    pub(super) unit: u64,
    pub(super) pools: Tally,
    pub(super) c_heap: Tally,
    /// In blocks that were not drawn but are all known.
    pub(super) exact: u64,
}

impl Quantity {
    pub(super) fn end_unit(&mut self, source: Source) {
        let unit = std::mem::take(&mut self.unit) as f64;
        match source {
            Source::Pools => self.pools.add(unit),
            Source::CHeap => self.c_heap.add(unit),
        }
    }

    pub(super) fn estimate(&self, pools: Drawn, c_heap: Drawn) -> Estimate {
        self.pools.of_units(pools.units, pools.all)
            + self.c_heap.of_units(c_heap.units, c_heap.all)
            + Estimate::exact(self.exact)
    }
}

/// Objects of a type, or blocks of a size.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Row {
    pub(super) count: Quantity,
    pub(super) bytes: Quantity,
    /// Those of the bytes that are in the C heap, in blocks that are not large.
    pub(super) c_bytes: Quantity,
    /// The unit that is being counted has some.
    pub(super) is_touched: bool,
}

impl Row {
    pub(super) fn add(&mut self, count: u64, bytes: u64) {
        self.count.unit = self.count.unit.saturating_add(count);
        self.bytes.unit = self.bytes.unit.saturating_add(bytes);
    }

    pub(super) fn end_unit(&mut self, source: Source) {
        self.count.end_unit(source);
        self.bytes.end_unit(source);
        self.c_bytes.end_unit(source);
        self.is_touched = false;
    }
}

/// What is left of an estimate without another one.
pub(super) fn less(all: Estimate, part: Estimate) -> Estimate {
    Estimate {
        value: all.value.saturating_sub(part.value),
        low: all.low.saturating_sub(part.high),
        high: all.high.saturating_sub(part.low),
    }
}
