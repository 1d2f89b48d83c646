//! Pools of Python's allocator: the blocks of one size in them, and which of these are in use.
//!
//! `struct pool_header`: Objects/obmalloc.c, v3.8.18 to v3.11.7; Include/internal/pycore_obmalloc.h, v3.12.1 to v3.15.0.

use crate::bytes::{u32_at, u64_at};

/// Bytes of the smallest block, and of the steps between sizes.
pub const ALIGNMENT: u32 = 16;
/// Number of sizes.
pub const SIZES: usize = 32;
/// The largest block that pools have, bytes.
pub const MAX_BLOCK: u64 = ALIGNMENT as u64 * SIZES as u64;
/// Blocks of the largest pool.
const MAX_BLOCKS: usize = 1024;

/// What a pool says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolHeader {
    /// Blocks in use.
    pub count: u32,
    /// avma of the first free block that was in use before; 0: there is none.
    pub free_block: u64,
    /// The entry of the arena that it is in.
    pub arena: u32,
    /// Blocks have 16 bytes more than 16 times this.
    pub size_index: u32,
    /// Where the blocks begin that were never used.
    pub next_offset: u32,
    pub max_next_offset: u32,
}

impl PoolHeader {
    /// Its bytes; the first block follows.
    pub const BYTES: usize = 48;

    pub fn parse(bytes: &[u8]) -> Option<PoolHeader> {
        Some(PoolHeader {
            count: u32_at(bytes, 0)?,
            free_block: u64_at(bytes, 8)?,
            arena: u32_at(bytes, 32)?,
            size_index: u32_at(bytes, 36)?,
            next_offset: u32_at(bytes, 40)?,
            max_next_offset: u32_at(bytes, 44)?,
        })
    }

    /// Bytes of a block.
    pub fn block(&self) -> u32 {
        self.size_index.saturating_add(1).saturating_mul(ALIGNMENT)
    }

    /// Whether these are the words of a pool of so many bytes at this address.
    pub fn is_plausible(&self, at: u64, pool: u32) -> bool {
        let head = PoolHeader::BYTES as u32;
        if self.size_index as usize >= SIZES {
            return false;
        }
        let block = self.block();
        let used = self.next_offset.wrapping_sub(head);
        let inside = self.free_block.checked_sub(at);
        pool.checked_sub(block) == Some(self.max_next_offset)
            && self.next_offset >= head + block
            && self.next_offset <= pool
            && used.is_multiple_of(block)
            && self.count <= used / block
            && (self.free_block == 0
                || inside.is_some_and(|offset| offset >= head.into() && offset < self.next_offset.into()))
    }
}

/// The blocks of one pool that are in use.
#[derive(Debug)]
pub struct LiveBlocks {
    /// A bit for each block: it is free.
    free: [u64; MAX_BLOCKS / 64],
    /// Bytes of a block.
    pub block: u32,
    /// Blocks that have been used at some time.
    used: u32,
}

impl LiveBlocks {
    /// Follows the list of free blocks in the bytes of the pool at an address. `None`: they make no sense, or not with
    /// what the
    /// header says; the target may have changed them meanwhile.
    pub fn of(bytes: &[u8], at: u64) -> Option<LiveBlocks> {
        let header = PoolHeader::parse(bytes)?;
        let pool = u32::try_from(bytes.len()).ok()?;
        header.is_plausible(at, pool).then_some(())?;
        let block = header.block();
        let used = (header.next_offset - PoolHeader::BYTES as u32) / block;
        let mut blocks = LiveBlocks {
            free: [0; MAX_BLOCKS / 64],
            block,
            used,
        };
        let mut next = header.free_block;
        for _ in header.count..used {
            let offset = u32::try_from(next.checked_sub(at)?).ok()?;
            let index = offset.checked_sub(PoolHeader::BYTES as u32)?;
            (index.is_multiple_of(block) && index / block < used).then_some(())?;
            blocks.mark_free(index / block)?;
            next = u64_at(bytes, offset as usize)?;
        }
        (next == 0).then_some(blocks)
    }

    /// `None`: it was marked before, so the list has a cycle.
    fn mark_free(&mut self, index: u32) -> Option<()> {
        let word = self.free.get_mut(index as usize / 64)?;
        let bit = 1 << (index % 64);
        (*word & bit == 0).then_some(())?;
        *word |= bit;
        Some(())
    }

    /// Where blocks in use begin in the pool.
    pub fn offsets(&self) -> impl Iterator<Item = usize> {
        let is_free = |index: u32| {
            self.free
                .get(index as usize / 64)
                .is_none_or(|word| word >> (index % 64) & 1 == 1)
        };
        let at = |index: u32| PoolHeader::BYTES + index as usize * self.block as usize;
        (0..self.used).filter(move |index| !is_free(*index)).map(at)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{ARENA, POOL, pool};
    use super::*;

    #[test]
    fn blocks_in_use_are_those_off_the_free_list() {
        for (block, used, free, expected) in [
            (64, 4, &[][..], &[48, 112, 176, 240][..]),
            (64, 4, &[2, 0], &[112, 240]),
            (512, 2, &[1], &[48]),
            (16, 1021, &[], &[48]),
        ] {
            let blocks = LiveBlocks::of(&pool(ARENA, 0, block, used, free), ARENA).expect("a pool");
            let found: Vec<usize> = blocks.offsets().take(expected.len()).collect();
            assert_eq!(found, expected, "{block}");
            assert_eq!(blocks.offsets().count(), used as usize - free.len());
        }
    }

    #[test]
    fn forged_pools_are_torn() {
        let good = pool(ARENA, 3, 64, 8, &[1, 5, 2]);
        let free_block = |index: usize| PoolHeader::BYTES + 64 * index;
        let at = |offset: usize| (ARENA + offset as u64).to_le_bytes().to_vec();
        for (name, offset, value) in [
            ("the count is too small", 0, vec![4]),
            ("the count is too large", 0, vec![6]),
            ("more blocks than there are", 0, vec![0xff; 4]),
            ("no such size", 36, vec![32]),
            ("another size", 36, vec![4]),
            ("all ones", 36, vec![0xff; 4]),
            ("the next block is outside", 40, (POOL + 64).to_le_bytes().to_vec()),
            ("the next block is between blocks", 40, vec![49]),
            ("the last block is elsewhere", 44, vec![0]),
            ("the free list begins outside", 8, at(POOL as usize)),
            ("the free list begins in the header", 8, at(16)),
            ("the free list begins below", 8, vec![0; 7]),
            ("the free list leaves the pool", free_block(1), vec![0xff; 8]),
            (
                "the free list leads between blocks",
                free_block(1),
                at(free_block(5) + 8),
            ),
            (
                "the free list leads to a block that was never used",
                free_block(1),
                at(free_block(8)),
            ),
            ("the free list has a cycle", free_block(5), at(free_block(1))),
            ("the free list leads to itself", free_block(1), at(free_block(1))),
            ("the free list is too long", free_block(2), at(free_block(0))),
            ("the free list is too short", free_block(1), vec![0; 8]),
        ] {
            let mut bytes = good.clone();
            bytes[offset..offset + value.len()].copy_from_slice(&value);
            assert!(LiveBlocks::of(&bytes, ARENA).is_none(), "{name}");
        }
        assert!(LiveBlocks::of(&good, ARENA).is_some());
        assert!(LiveBlocks::of(&good, u64::MAX - 15).is_none(), "an address at the end");
        for length in [0, 47, 48, 100, 4096, good.len() - 1] {
            assert!(LiveBlocks::of(&good[..length], ARENA).is_none(), "{length}");
        }
    }
}
