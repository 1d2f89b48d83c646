//! Memory of a stopped thread. Consecutive samples read the same addresses, so the blocks that the last one touched are
//! fetched in one system call, which costs more than the bytes do.
//!
//! Allocates only when created, so it can be used in a signal handler.

use std::cell::RefCell;

use crate::event::Tid;
use crate::process::memory::{Memory, in_pieces};
use crate::sys;

/// Bytes fetched at once; divides a page, so that a block is either readable or not.
const BLOCK: u64 = 256;
/// Blocks that are cached; others are read each time.
const MAX_BLOCKS: usize = 4096;
/// Blocks prefetched, at most.
pub const MAX_PREFETCH: usize = 1024;
const SLOTS: usize = 2 * MAX_BLOCKS;

/// Blocks of one thread's memory, read since [`BlockCache::begin`].
pub struct BlockCache(RefCell<BlockState>);

struct BlockState {
    tid: Tid,
    /// Hash table: addresses of blocks, the rounds in which they were entered, and their positions in `touched`. Zeros
    /// take no memory until they are written to.
    index: Vec<u64>,
    rounds: Vec<u32>,
    positions: Vec<u32>,
    round: u32,
    data: Vec<u8>,
    /// Addresses of the blocks in `data`, and whether they were used.
    touched: Vec<(u64, bool)>,
    pieces: Vec<(u64, usize)>,
}

impl Default for BlockCache {
    fn default() -> BlockCache {
        BlockCache(RefCell::new(BlockState {
            tid: 0,
            index: vec![0; SLOTS],
            rounds: vec![0; SLOTS],
            positions: vec![0; SLOTS],
            round: 0,
            data: vec![0; MAX_BLOCKS * BLOCK as usize],
            touched: Vec::with_capacity(MAX_BLOCKS),
            pieces: Vec::with_capacity(MAX_PREFETCH),
        }))
    }
}

impl BlockCache {
    /// Clears the cache and fetches these blocks of a thread's memory (sorted addresses, from [`BlockCache::touched`]).
    pub fn begin(&mut self, tid: Tid, prefetch: &[u64]) {
        let s = self.0.get_mut();
        s.tid = tid;
        s.round = s.round.wrapping_add(1);
        if s.round == 0 {
            s.rounds.fill(0);
            s.round = 1;
        }
        s.touched.clear();
        s.pieces.clear();
        let prefetch = &prefetch[..prefetch.len().min(MAX_PREFETCH)];
        for at in prefetch {
            match s.pieces.last_mut() {
                Some((start, len)) if *start + *len as u64 == *at => *len += BLOCK as usize,
                _ => s.pieces.push((*at, BLOCK as usize)),
            }
        }
        let size = prefetch.len() * BLOCK as usize;
        let n_read = sys::memory::read_memory_pieces(tid, &s.pieces, &mut s.data[..size]);
        for at in prefetch.iter().take(n_read / BLOCK as usize) {
            s.insert(*at, false);
        }
    }

    /// The blocks used since, for the next [`BlockCache::begin`]; as many as `out` takes without growing.
    pub fn touched(&mut self, out: &mut Vec<u64>) {
        out.clear();
        let used = self.0.get_mut().touched.iter().filter(|(_, used)| *used);
        let capacity = out.capacity();
        out.extend(used.map(|(at, _)| *at).take(capacity));
        out.sort_unstable();
    }
}

impl BlockState {
    fn slot(&self, at: u64) -> usize {
        let mut slot = ((at / BLOCK).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize % SLOTS;
        // At most half of the slots are in use.
        while self.rounds[slot] == self.round && self.index[slot] != at {
            slot = (slot + 1) % SLOTS;
        }
        slot
    }

    fn insert(&mut self, at: u64, used: bool) {
        let slot = self.slot(at);
        (self.index[slot], self.rounds[slot]) = (at, self.round);
        self.positions[slot] = self.touched.len() as u32;
        self.touched.push((at, used));
    }

    /// Offset in `data` of the block at this address; `Some(None)`: the cache is full.
    fn block(&mut self, at: u64) -> Option<Option<usize>> {
        let slot = self.slot(at);
        if self.rounds[slot] == self.round {
            let i = self.positions[slot] as usize;
            self.touched[i].1 = true;
            return Some(Some(i * BLOCK as usize));
        }
        if self.touched.len() == MAX_BLOCKS {
            return Some(None);
        }
        let offset = self.touched.len() * BLOCK as usize;
        let n_read = sys::memory::read_memory(self.tid, at, &mut self.data[offset..offset + BLOCK as usize]);
        (n_read == BLOCK as usize).then_some(())?;
        self.insert(at, true);
        Some(Some(offset))
    }
}

impl Memory for BlockCache {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        let mut s = self.0.borrow_mut();
        in_pieces(avma, buf, BLOCK, |start, skip, piece| match s.block(start) {
            None => false,
            Some(Some(offset)) => {
                piece.copy_from_slice(&s.data[offset + skip..][..piece.len()]);
                true
            }
            Some(None) => sys::memory::read_memory(s.tid, start + skip as u64, piece) == piece.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_match_the_memory() {
        let memory: Vec<u8> = (0..5000u32).map(|i| (i * 7) as u8).collect();
        let (base, mut block_cache, mut prefetch) = (
            memory.as_ptr() as u64,
            BlockCache::default(),
            Vec::with_capacity(MAX_PREFETCH),
        );
        for round in 0..2 {
            block_cache.begin(std::process::id(), &prefetch);
            for (from, len) in [(0, 8), (1, 700), (255, 2), (4000, 1000), (0, 5000)] {
                let mut buf = vec![0; len];
                assert!(block_cache.read(base + from as u64, &mut buf), "{from} {len} {round}");
                assert_eq!(buf, memory[from..from + len], "{from} {len} {round}");
            }
            assert!(!block_cache.read(8, &mut [0; 8]), "an unmapped page");
            assert!(!block_cache.read(u64::MAX - 3, &mut [0; 8]), "past the last address");
            block_cache.touched(&mut prefetch);
            assert!(prefetch.is_sorted() && prefetch.len() >= 20, "{}", prefetch.len());
        }
    }

    #[test]
    fn reads_beyond_the_capacity_succeed() {
        let memory: Vec<u8> = (0..2 * MAX_BLOCKS as u32 * BLOCK as u32)
            .map(|i| (i / 5) as u8)
            .collect();
        let (mut block_cache, mut buf) = (BlockCache::default(), vec![0; memory.len()]);
        block_cache.begin(std::process::id(), &[]);
        assert!(block_cache.read(memory.as_ptr() as u64, &mut buf));
        assert!(buf == memory);
        let mut few = Vec::with_capacity(3);
        block_cache.touched(&mut few);
        assert_eq!(few.len(), 3);
    }
}
