//! Who owns large blocks: a search through all pools for their addresses, where objects that lead to them were not drawn.

use rustc_hash::FxHashMap;

use super::pools::LiveBlocks;
use super::types::Types;
use super::{Allocator, PythonHeap, ResidentPages};
use crate::process::memory::Memory;

/// Pools that are read with one call.
const BATCH: usize = 64;
/// Types whose objects own nothing: a number in them may look like an address.
const LEAVES: [&[u8]; 5] = [b"int", b"float", b"complex", b"str", b"bytes"];

/// What a search for owners has found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Owners {
    /// The names of the types of owners, by block.
    pub names: FxHashMap<u64, Vec<u8>>,
    /// False: not all pools were searched.
    pub is_complete: bool,
}

impl PythonHeap {
    /// Finds objects of Python's own memory that have the address of one of these blocks (ascending) in them. Of several
    /// objects the first one counts. mimalloc's pages are not searched. `is_over` ends it.
    pub fn owners(
        &self,
        memory: &dyn Memory,
        resident: &dyn ResidentPages,
        blocks: &[u64],
        is_over: &dyn Fn() -> bool,
    ) -> Owners {
        let mut owners = Owners::default();
        let Allocator::Pools(arenas) = &self.allocator else {
            return owners;
        };
        let (Some(first), Some(last)) = (blocks.first(), blocks.last()) else {
            owners.is_complete = true;
            return owners;
        };
        let mut types = Types::new(memory, self.objects, self.placement, self.arenas.clone());
        let size = u64::from(self.layout.pool);
        let pools = arenas.iter().flat_map(|arena| {
            let slots = 0..u64::from(arena.pools);
            slots.filter_map(|slot| arena.first_pool.checked_add(slot.checked_mul(size)?))
        });
        let mut pools = pools.filter(|at| resident.bytes_in(*at..at.saturating_add(size)) == size);
        let mut buffer = vec![0; self.layout.pool as usize * BATCH];
        let range = *first..=*last;
        let mut batch: Vec<u64> = Vec::new();
        loop {
            batch.extend(pools.by_ref().take(BATCH - batch.len()));
            owners.is_complete = batch.is_empty();
            if batch.is_empty() || is_over() {
                return owners;
            }
            let pieces: Vec<(u64, usize)> = batch.iter().map(|at| (*at, self.layout.pool as usize)).collect();
            let copied = memory.read_pieces(&pieces, &mut buffer);
            let whole = buffer.get(..copied).unwrap_or_default();
            let whole = whole.chunks_exact(self.layout.pool as usize);
            // The one that could not be read has gone.
            let rest = batch.split_off(batch.len().min(whole.len() + 1));
            for (at, pool) in batch.iter().zip(whole) {
                let mut live = None;
                for (place, word) in pool.chunks_exact(8).enumerate() {
                    let word = word.try_into().map_or(0, u64::from_le_bytes);
                    let is_wanted = range.contains(&word) && blocks.binary_search(&word).is_ok();
                    if !is_wanted || owners.names.contains_key(&word) {
                        continue;
                    }
                    let live = live.get_or_insert_with(|| LiveBlocks::of(pool, *at)).as_ref();
                    let name = live.and_then(|live| object_with(&mut types, live, pool, 8 * place));
                    if let Some(name) = name {
                        owners.names.insert(word, name);
                    }
                }
            }
            batch = rest;
        }
    }
}

/// The type of the object in use that has a place of the pool, if such objects can own something.
fn object_with(types: &mut Types, live: &LiveBlocks, pool: &[u8], place: usize) -> Option<Vec<u8>> {
    let size = live.block as usize;
    let start = live.offsets().find(|start| (*start..start + size).contains(&place))?;
    let block = pool.get(start..start.checked_add(size)?)?;
    let (index, _) = types.classify(block, size as u64)?;
    let info = types.get(index)?;
    (!LEAVES.contains(&info.name.as_slice())).then(|| info.full_name.clone())
}

#[cfg(test)]
mod tests {
    use super::super::arenas::Arena;
    use super::super::fake::{ALLOCATED, ARENA, FLOAT, LIST, heap, pool, with_types};
    use super::*;

    #[test]
    fn objects_with_the_address_own_the_block() {
        let mut memory = with_types();
        let blocks = [ALLOCATED, ALLOCATED + 0x1_0000, ALLOCATED + 0x2_0000];
        // The last list is free.
        memory.write(ARENA, &pool(ARENA, 0, 64, 3, &[2]));
        let at = |index: u64| ARENA + 48 + 64 * index;
        memory.words(at(0), &[0, 0, 1, LIST, 3, blocks[0], 8]);
        memory.words(at(1), &[1, FLOAT, blocks[1]]);
        memory.words(at(2) + 8, &[0, 1, LIST, 3, blocks[2], 8]);
        let heap = heap(
            12,
            vec![Arena {
                range: ARENA..ARENA + (1 << 20),
                first_pool: ARENA,
                pools: 2,
                in_use: 1,
            }],
        );
        let owners = |blocks: &[u64], over: bool| heap.owners(&memory, &memory, blocks, &|| over);
        let found = |names: &[(u64, Vec<u8>)], is_complete: bool| Owners {
            names: names.iter().cloned().collect(),
            is_complete,
        };
        assert_eq!(owners(&blocks, false), found(&[(blocks[0], b"list".to_vec())], true));
        assert_eq!(owners(&[], false), found(&[], true));
        assert_eq!(owners(&blocks, true), found(&[], false));
    }

    /// Pools that are gone when they are read, of some that were in memory.
    #[test]
    fn pools_behind_one_that_has_gone_are_searched() {
        let mut memory = with_types();
        let arena = |at: u64| Arena {
            range: at..at + (1 << 20),
            first_pool: at,
            pools: 1,
            in_use: 1,
        };
        let starts = [ARENA, ARENA + (1 << 20), ARENA + (2 << 20)];
        let last = starts[2];
        memory.write(last, &pool(last, 0, 64, 1, &[]));
        memory.words(last + 48, &[0, 0, 1, LIST, 3, ALLOCATED, 8]);
        struct All;
        impl ResidentPages for All {
            fn bytes_in(&self, range: std::ops::Range<u64>) -> u64 {
                range.end - range.start
            }
        }
        let heap = heap(12, starts.map(arena).to_vec());
        let owners = heap.owners(&memory, &All, &[ALLOCATED], &|| false);
        assert_eq!(owners.names.get(&ALLOCATED), Some(&b"list".to_vec()));
    }
}
