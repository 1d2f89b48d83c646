//! Allocations that processes sample themselves: which of the sampled blocks have been freed.

use rustc_hash::FxHashMap;

use crate::counts::allocations::{Block, add_values};
use crate::event::probes::{FreedBlock, SampledBlock};
use crate::event::{Pid, Sample};
use crate::profile::model::Profile;

/// Blocks whose ends are noticed, at most: as many as are live at the same time.
const MAX_LIVE: usize = 1 << 20;

/// Sampled blocks.
#[derive(Default)]
pub(super) struct Allocations {
    blocks: Vec<Block>,
    /// Of those that are live, index in `blocks` by process and address (avma).
    live: FxHashMap<Pid, FxHashMap<u64, u32>>,
    /// How many these are.
    live_blocks: usize,
    /// Blocks whose ends are not noticed.
    not_followed: u64,
}

impl Allocations {
    /// Takes in the block of a sample.
    pub(super) fn add(&mut self, s: &Sample, block: &SampledBlock) {
        // Its free was lost.
        self.free(&FreedBlock {
            pid: s.pid,
            time: s.time,
            address: block.address,
        });
        let size = block.size.max(1) as f64;
        let index = self.blocks.len() as u32;
        self.blocks.push(Block {
            tid: s.tid,
            time: s.time,
            end: 0,
            size,
            count: block.bytes as f64 / size,
            mapped: None,
        });
        if self.live_blocks >= MAX_LIVE {
            self.not_followed += 1;
            return;
        }
        self.live.entry(s.pid).or_default().insert(block.address, index);
        self.live_blocks += 1;
    }

    /// A block was freed; no effect if it was sampled before the recording.
    pub(super) fn free(&mut self, freed: &FreedBlock) {
        let live = self.live.get_mut(&freed.pid);
        let Some(index) = live.and_then(|live| live.remove(&freed.address)) else {
            return;
        };
        self.live_blocks -= 1;
        if let Some(block) = self.blocks.get_mut(index as usize) {
            block.end = freed.time.max(1);
        }
    }

    /// A process executes another program: all that it had has gone.
    pub(super) fn exec(&mut self, pid: Pid, time: u64) {
        let gone = self.live.remove(&pid).unwrap_or_default();
        self.live_blocks -= gone.len();
        for index in gone.into_values() {
            if let Some(block) = self.blocks.get_mut(index as usize) {
                block.end = time.max(1);
            }
        }
    }

    /// A process has ended. What it had not freed by then counts as live.
    pub(super) fn end_process(&mut self, pid: Pid) {
        let ended = self.live.remove(&pid).unwrap_or_default();
        self.live_blocks -= ended.len();
    }

    /// Adds the values of the blocks to a profile that has their samples, and that began at `start`, ns.
    pub(super) fn add_values(&self, profile: &mut Profile, start: u64) {
        add_values(profile, start, &self.blocks, false);
        profile.meta.rate = 0;
    }

    /// Limits that were exceeded, as text.
    pub(super) fn exceeded(&self) -> Option<String> {
        let count = self.not_followed;
        (count > 0).then(|| {
            format!("the ends of {count} sampled blocks were not noticed, as too many were live: they count as live")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_end_once() {
        let mut all = Allocations::default();
        let add = |all: &mut Allocations, pid, time, address| {
            let sample = Sample {
                pid,
                time,
                ..Sample::default()
            };
            let block = SampledBlock {
                address,
                size: 100,
                bytes: 1000,
            };
            all.add(&sample, &block);
        };
        let free = |all: &mut Allocations, pid, time, address| all.free(&FreedBlock { pid, time, address });
        add(&mut all, 1, 10, 0xa);
        add(&mut all, 2, 11, 0xa); // another process
        free(&mut all, 1, 12, 0xb); // not sampled
        free(&mut all, 1, 13, 0xa);
        free(&mut all, 1, 14, 0xa); // twice
        add(&mut all, 1, 15, 0xa);
        add(&mut all, 1, 16, 0xa); // its free was lost
        add(&mut all, 2, 17, 0xc);
        all.end_process(1);
        free(&mut all, 1, 18, 0xa); // of another process with this number
        all.exec(2, 19);
        let ends: Vec<u64> = all.blocks.iter().map(|block| block.end).collect();
        assert_eq!((ends, all.live_blocks), (vec![13, 19, 16, 0, 19], 0));
        assert!(all.blocks.iter().all(|block| block.count == 10.0));
    }
}
