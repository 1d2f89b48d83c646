//! Finds the arenas of Python's allocator without symbols.
//!
//! The allocator keeps them in one array, whose address lies in the data of the interpreter's file: a variable of its
//! own up to
//! 3.11, inside of `_PyRuntime` in 3.12, in `obmalloc_state_main` from 3.13 on. Subinterpreters may have one each. Each
//! word there that could be this address is
//! tried. An array is right if the first pools of its arenas say, each in its own header, which entry they belong to.
//!
//! `struct arena_object`: Objects/obmalloc.c, v3.8.18 to v3.11.7; Include/internal/pycore_obmalloc.h, v3.12.1 to v3.15.0.

use std::ops::Range;

use rustc_hash::FxHashSet;

use super::pools::PoolHeader;
use crate::bytes::{u32_at, u64_at};
use crate::event::PAGE;
use crate::process::maps::Mapping;
use crate::process::memory::Memory;

/// Bytes of an entry.
const ENTRY: u64 = 48;
/// Entries of the array when it is made (`INITIAL_ARENA_OBJECTS`). It is doubled when it is full.
const FIRST_ENTRIES: u64 = 16;
/// Entries that are read at most, of all arrays together: 1 TiB in arenas of 1 MiB.
const MAX_ENTRIES: u64 = 1 << 20;
/// Arrays at most: one of each interpreter that is searched.
const MAX_ARRAYS: u32 = 80;
/// Places that are read with one call.
const BATCH: usize = 64;
/// Pools of an arena at most; there are 64, or 128 where arenas are as large as huge pages (v3.15.0).
const MAX_POOLS: u64 = 256;
/// Bytes of the interpreter's data that are searched at most. Debian's 3.11 has 2 MB.
const MAX_DATA: u64 = 64 << 20;
/// Bytes of the state of a subinterpreter that are searched at most. In 3.12 it has some 390 KiB, with the allocator's
/// state inside; from
/// 3.13 on it points to that.
const MAX_STATE: u64 = 512 << 10;
/// `mgmt.arenas` in `struct _obmalloc_state`, behind the table of pools.
const STATE_ARENAS: u64 = 512;
/// Words of it that are tried at most, and pools that are asked for all of them.
const MAX_CANDIDATES: usize = 1 << 17;
const MAX_ASKED: u32 = 1 << 17;

/// One arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arena {
    pub range: Range<u64>,
    pub first_pool: u64,
    /// Pools that have been handed out at some time; those behind them have no header yet.
    pub pools: u32,
    /// Pools that have blocks in use.
    pub in_use: u32,
}

/// The parts of the memory of a process that pointers may lead to, and that a file's data are in.
pub struct Areas<'a> {
    mappings: &'a [Mapping],
}

impl<'a> Areas<'a> {
    /// `mappings` in ascending order.
    pub fn new(mappings: &'a [Mapping]) -> Areas<'a> {
        Areas { mappings }
    }

    fn at(&self, avma: u64) -> Option<&'a Mapping> {
        let below = self.mappings.partition_point(|m| m.start <= avma);
        let found = self.mappings.get(below.checked_sub(1)?)?;
        (avma < found.end).then_some(found)
    }

    /// Whether allocated memory may begin here.
    pub fn is_heap(&self, avma: u64) -> bool {
        self.at(avma).is_some_and(|m| m.writable && m.inode == 0)
    }

    /// The writable mappings of the file that has a variable at this address, and the anonymous ones right behind them,
    /// where its
    /// variables are that are zero in the file.
    pub fn data_of(&self, variable: u64) -> Vec<Range<u64>> {
        let mut found: Vec<Range<u64>> = Vec::new();
        // The variable may itself be one of those that are zero in the file.
        let below = self.mappings.partition_point(|m| m.start <= variable);
        let upwards = self.mappings.get(..below).unwrap_or_default().iter().rev();
        let Some(file) = upwards.take(4).find(|m| m.inode != 0) else {
            return found;
        };
        let is_same = |m: &Mapping| m.inode == file.inode && m.device == file.device && m.path == file.path;
        let mut end = 0;
        let mut left = MAX_DATA;
        for m in self.mappings {
            let is_file = is_same(m);
            let is_zero = m.inode == 0 && m.start == end;
            if is_file || is_zero {
                end = m.end;
            }
            if m.writable && (is_file || is_zero) && (is_file || m.path.is_empty()) {
                let part = m.start..m.end.min(m.start.saturating_add(left));
                left -= part.end - part.start;
                found.push(part);
            }
        }
        found.retain(|part| !part.is_empty());
        found
    }
}

/// Finds all arenas that the words of these parts of memory lead to, in ascending order: of the interpreter's data, and
/// of the states of
/// its subinterpreters. `pool`: bytes of a pool.
pub fn find(memory: &dyn Memory, areas: &Areas, data: &[Range<u64>], states: &[u64], pool: u32) -> Vec<Arena> {
    let mut search = Search {
        memory,
        areas,
        pool: pool.into(),
        tried: FxHashSet::default(),
        tried_states: FxHashSet::default(),
        arrays_left: MAX_ARRAYS,
        entries_left: MAX_ENTRIES,
        asked: 0,
        found: Vec::new(),
    };
    for part in data {
        search.each_page(part.clone(), Search::try_arrays);
    }
    for state in states {
        let part = *state..state.saturating_add(MAX_STATE);
        search.each_page(part.clone(), Search::try_arrays);
        search.each_page(part, Search::try_states);
    }
    let mut found = search.found;
    found.sort_by_key(|arena| arena.range.start);
    let mut end = 0;
    found.retain(|arena| {
        let is_apart = arena.range.start >= end;
        if is_apart {
            end = arena.range.end;
        }
        is_apart
    });
    found
}

struct Search<'a> {
    memory: &'a dyn Memory,
    areas: &'a Areas<'a>,
    pool: u64,
    tried: FxHashSet<u64>,
    tried_states: FxHashSet<u64>,
    arrays_left: u32,
    entries_left: u64,
    /// Pools that were asked so far whether an array has their arena.
    asked: u32,
    found: Vec<Arena>,
}

impl Search<'_> {
    /// Calls `attempt` with the words of each page that can be read.
    fn each_page(&mut self, part: Range<u64>, attempt: fn(&mut Self, &[u64])) {
        let mut bytes = vec![0; PAGE as usize];
        let mut at = part.start;
        while at < part.end {
            let length = (part.end - at).min(PAGE - at % PAGE) as usize;
            let Some(page) = bytes.get_mut(..length) else { return };
            if self.memory.read(at, page) {
                let words = page.chunks_exact(8).filter_map(|word| u64_at(word, 0));
                attempt(self, &words.collect::<Vec<u64>>());
            }
            at = at.saturating_add(length as u64);
        }
    }

    /// Takes the arenas of the allocators' states at some addresses, where there is one.
    fn try_states(&mut self, places: &[u64]) {
        for at in places {
            if !at.is_multiple_of(16) || self.tried_states.len() >= MAX_CANDIDATES || !self.areas.is_heap(*at) {
                continue;
            }
            if self.tried_states.insert(*at)
                && let Some(array) = at.checked_add(STATE_ARENAS).and_then(|at| self.memory.u64(at))
            {
                self.try_arrays(&[array]);
            }
        }
    }

    /// Takes the arenas of the arrays at some addresses, where there is one.
    fn try_arrays(&mut self, places: &[u64]) {
        let mut arrays = Vec::new();
        for at in places {
            // It is allocated memory.
            let may_be =
                *at != 0 && at.is_multiple_of(16) && self.tried.len() < MAX_CANDIDATES && self.areas.is_heap(*at);
            if may_be && self.tried.insert(*at) {
                arrays.push(*at);
            }
        }
        let length = (FIRST_ENTRIES * ENTRY) as usize;
        let mut first: Vec<(u64, Vec<(u64, Arena)>)> = Vec::new();
        each_of(self.memory, &arrays, length, |at, bytes| {
            first.extend(bytes.and_then(|bytes| Some((at, self.parse(at, 0..FIRST_ENTRIES, bytes)?))));
        });
        for (at, arenas) in first {
            self.try_array(at, arenas);
        }
    }

    /// Takes the arenas of an array, if it is one; `arenas` are those of its first entries.
    fn try_array(&mut self, at: u64, mut arenas: Vec<(u64, Arena)>) {
        if !self.is_confirmed(&arenas) {
            return;
        }
        let Some(left) = self.arrays_left.checked_sub(1) else {
            return;
        };
        self.arrays_left = left;
        let mut count = FIRST_ENTRIES;
        while count <= self.entries_left
            && let Some(more) = self.entries(at, count..count * 2)
        {
            arenas.extend(more);
            self.entries_left -= count;
            count *= 2;
        }
        self.drop_wrong(&mut arenas);
        self.found.extend(arenas.into_iter().map(|(_, arena)| arena));
    }

    /// The arenas of some entries of an array, each with its index. `None`: they are no entries.
    fn entries(&self, array: u64, indices: Range<u64>) -> Option<Vec<(u64, Arena)>> {
        let start = array.checked_add(indices.start * ENTRY)?;
        let mut bytes = vec![0; usize::try_from((indices.end - indices.start) * ENTRY).ok()?];
        self.memory.read(start, &mut bytes).then_some(())?;
        self.parse(array, indices, &bytes)
    }

    /// The same of entries whose bytes are these.
    fn parse(&self, array: u64, indices: Range<u64>, bytes: &[u8]) -> Option<Vec<(u64, Arena)>> {
        let mut arenas = Vec::new();
        for (index, entry) in indices.zip(bytes.chunks_exact(ENTRY as usize)) {
            match u64_at(entry, 0)? {
                0 => {
                    let next = u64_at(entry, 32)?;
                    let is_inside =
                        next >= array && (next - array).is_multiple_of(ENTRY) && (next - array) / ENTRY < MAX_ENTRIES;
                    (next == 0 || is_inside).then_some(())?;
                }
                address => arenas.push((index, self.arena(address, entry)?)),
            }
        }
        Some(arenas)
    }

    fn arena(&self, address: u64, entry: &[u8]) -> Option<Arena> {
        let first_pool = address.checked_add(self.pool - 1)? / self.pool * self.pool;
        let next_pool = u64_at(entry, 8)?;
        let (free, total) = (u64::from(u32_at(entry, 16)?), u64::from(u32_at(entry, 20)?));
        let pools = next_pool.checked_sub(first_pool)?;
        let in_use = total.checked_sub(free)?;
        let is_one = address.is_multiple_of(PAGE)
            && (1..=MAX_POOLS).contains(&total)
            && pools.is_multiple_of(self.pool)
            && pools / self.pool <= total
            && self.areas.is_heap(address);
        // An arena that does not begin at a pool has room for one pool less.
        let end = address.checked_add(total.next_power_of_two() * self.pool)?;
        is_one.then_some(Arena {
            range: address..end,
            first_pool,
            pools: (pools / self.pool) as u32,
            in_use: in_use as u32,
        })
    }

    /// Whether the first pool of each arena says that it belongs to this entry. `None`: it has none, or it is not in memory.
    fn answers(&self, arenas: &[(u64, Arena)]) -> Vec<Option<bool>> {
        let mut entries = arenas.iter().filter(|(_, arena)| arena.pools > 0);
        let pools: Vec<u64> = entries.clone().map(|(_, arena)| arena.first_pool).collect();
        let mut said = Vec::new();
        each_of(self.memory, &pools, PoolHeader::BYTES, |at, bytes| {
            let header = bytes.and_then(PoolHeader::parse);
            let index = entries.next().map(|(index, _)| *index);
            said.push(
                header
                    .map(|header| header.is_plausible(at, self.pool as u32) && Some(u64::from(header.arena)) == index),
            );
        });
        let mut said = said.into_iter();
        let answers = arenas
            .iter()
            .map(|(_, arena)| if arena.pools > 0 { said.next()? } else { None });
        answers.collect()
    }

    fn is_confirmed(&mut self, arenas: &[(u64, Arena)]) -> bool {
        if self.asked >= MAX_ASKED {
            return false;
        }
        self.asked += arenas.len() as u32;
        let (mut right, mut asked) = (0, 0);
        for agrees in self.answers(arenas).into_iter().flatten() {
            asked += 1;
            right += u32::from(agrees);
        }
        // The target runs meanwhile.
        right > 0 && right * 4 >= asked * 3
    }

    /// Drops arenas whose pools belong to another entry: they were freed meanwhile, or never were any.
    fn drop_wrong(&self, arenas: &mut Vec<(u64, Arena)>) {
        let mut answers = self.answers(arenas).into_iter();
        arenas.retain(|_| answers.next().flatten().unwrap_or(true));
    }
}

/// Calls `each` with some bytes from each of these places. `None`: they could not be read.
fn each_of(memory: &dyn Memory, places: &[u64], length: usize, mut each: impl FnMut(u64, Option<&[u8]>)) {
    let mut buffer = vec![0; length * BATCH.min(places.len())];
    let mut rest = places;
    while !rest.is_empty() {
        let pieces: Vec<(u64, usize)> = rest.iter().take(BATCH).map(|at| (*at, length)).collect();
        let copied = memory.read_pieces(&pieces, &mut buffer);
        let whole = buffer.get(..copied).unwrap_or_default().chunks_exact(length);
        let done = whole.len();
        rest.iter().zip(whole).for_each(|(at, bytes)| each(*at, Some(bytes)));
        // The one that ended the reading.
        if let Some(at) = rest.get(done).filter(|_| done < pieces.len()) {
            each(*at, None);
        }
        rest = rest.get(pieces.len().min(done + 1)..).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{ALLOCATED, ARENA, DATA, FakeMemory, POOL, entries, mapping, pool};
    use super::*;

    const SIZE: u64 = 1 << 20;

    fn at(index: u64) -> u64 {
        ARENA + index * SIZE
    }

    fn mappings() -> Vec<Mapping> {
        vec![
            mapping(DATA..DATA + 0x2000, true, 7, "/lib/libpython3.so"),
            mapping(DATA + 0x2000..DATA + 0x4000, true, 0, ""),
            mapping(ALLOCATED..ALLOCATED + SIZE, true, 0, "[heap]"),
            mapping(ARENA..ARENA + 40 * SIZE, true, 0, ""),
        ]
    }

    /// Arenas with two pools each, and an array of them.
    fn memory(arenas: &[u64], length: usize) -> FakeMemory {
        let mut memory = FakeMemory::default();
        let mut array: Vec<(u64, u64)> = arenas.iter().map(|arena| (*arena, 2)).collect();
        array.resize(length, (0, 0));
        memory.words(ALLOCATED + 64, &entries(&array));
        for (index, arena) in (0..).zip(arenas.iter().filter(|arena| **arena != 0)) {
            memory.write(*arena, &pool(*arena, index, 64, 8, &[]));
        }
        // Words that are not the address of the array: none, an entry, a pool, no multiple of 16.
        memory.words(DATA, &[0, ALLOCATED + 64 + 48, ARENA, ALLOCATED + 72, u64::MAX, DATA]);
        memory.words(DATA + 0x3008, &[ALLOCATED + 64]);
        memory
    }

    fn found(memory: &FakeMemory) -> Vec<u64> {
        let mappings = mappings();
        let areas = Areas::new(&mappings);
        let data = areas.data_of(DATA + 8);
        find(memory, &areas, &data, &[], POOL)
            .iter()
            .map(|arena| arena.range.start)
            .collect()
    }

    #[test]
    fn arrays_are_found_by_what_their_pools_say() {
        let many: Vec<u64> = (0..20).map(at).collect();
        for (arenas, length) in [(&many[..1], 16), (&many[..3], 16), (&many[..], 32)] {
            assert_eq!(found(&memory(arenas, length)), arenas, "{length}");
        }
    }

    #[test]
    fn arenas_are_described() {
        let mappings = mappings();
        let areas = Areas::new(&mappings);
        // It does not begin at a pool, and has one less.
        let mut memory = memory(&[at(1)], 16);
        let start = at(1) + PAGE;
        let first = at(1) + u64::from(POOL);
        memory.words(ALLOCATED + 64, &[start, first + 3 * u64::from(POOL), 63 << 32 | 61]);
        memory.write(first, &pool(first, 0, 64, 8, &[]));
        let expected = Arena {
            range: start..start + SIZE,
            first_pool: first,
            pools: 3,
            in_use: 2,
        };
        assert_eq!(
            find(&memory, &areas, &areas.data_of(DATA + 0x2008), &[], POOL),
            [expected]
        );
    }

    #[test]
    fn forged_arrays_are_refused() {
        let entry = |n: u64, word: u64| ALLOCATED + 64 + n * ENTRY + word * 8;
        for (name, place, word) in [
            ("an arena between pages", entry(1, 0), at(1) + 8),
            ("an arena outside of memory", entry(1, 0), 0x1000),
            ("an arena at the end of addresses", entry(1, 0), u64::MAX - 4095),
            ("pools below the arena", entry(1, 1), at(1) - u64::from(POOL)),
            ("pools beyond the arena", entry(1, 1), at(1) + 2 * SIZE),
            ("between pools", entry(1, 1), at(1) + 16),
            ("more free pools than there are", entry(1, 2), 64 << 32 | 65),
            ("no pools", entry(1, 2), 0),
            ("too many pools", entry(1, 2), u64::MAX),
            ("an unused entry that leads elsewhere", entry(4, 4), 0x1234),
        ] {
            let mut memory = memory(&[at(0), at(1), at(2)], 16);
            memory.words(place, &[word]);
            assert!(found(&memory).is_empty(), "{name}");
        }
    }

    #[test]
    fn wrong_arenas_of_an_array_are_dropped() {
        let arenas: Vec<u64> = (0..8).map(at).collect();
        let mut memory = memory(&arenas, 16);
        memory.write(at(3), &pool(at(3), 9, 64, 8, &[]));
        memory.write(at(5), &[0xff; 48]);
        let expected: Vec<u64> = [0, 1, 2, 4, 6, 7].map(at).to_vec();
        assert_eq!(found(&memory), expected);
        // An array that most pools do not know is none.
        memory.write(at(1), &pool(at(1), 9, 64, 8, &[]));
        assert_eq!(found(&memory), [] as [u64; 0]);
        // One that repeats an arena.
        let twice = self::memory(&[at(0), at(0), at(1)], 16);
        assert!(found(&twice).len() <= 2);
        // The arrays of two interpreters may not overlap.
        let mut memory = self::memory(&[at(0)], 16);
        memory.words(ALLOCATED + 0x8000, &entries(&[(at(0), 2), (at(4), 2)]));
        memory.words(ALLOCATED + 0x8000 + 96, &[0; 100]);
        memory.write(at(4), &pool(at(4), 1, 64, 8, &[]));
        memory.words(DATA + 0x100, &[ALLOCATED + 0x8000]);
        assert_eq!(found(&memory), [at(0), at(4)]);
    }

    #[test]
    fn searching_is_bounded() {
        let mut memory = FakeMemory::default();
        let words: Vec<u64> = (0..0x800).map(|n| ALLOCATED + 16 * n).collect();
        memory.words(DATA, &words);
        memory.words(ALLOCATED, &[0; 0x3000]);
        assert!(found(&memory).is_empty());
        assert!(memory.reads.get() < 3 * words.len(), "{}", memory.reads.get());
    }

    /// The second interpreter has an allocator's state inside of its own, the third one points to it.
    #[test]
    fn subinterpreters_have_arenas_of_their_own() {
        let mappings = mappings();
        let areas = Areas::new(&mappings);
        let mut memory = memory(&[at(0)], 16);
        for (number, arena) in [(1, at(4)), (2, at(6))] {
            let array = ALLOCATED + 0x8000 * number;
            memory.words(array, &entries(&[(arena, 2)]));
            memory.words(array + 48, &[0; 100]);
            memory.write(arena, &pool(arena, 0, 64, 8, &[]));
        }
        let (inside, apart) = (ALLOCATED + 0x2_0000, ALLOCATED + 0x4_0000);
        memory.words(inside + 0x1008, &[ALLOCATED + 0x8000]);
        memory.words(apart + 0x2000, &[apart + 0x3000]);
        memory.words(apart + 0x3000 + STATE_ARENAS, &[ALLOCATED + 0x1_0000]);
        let data = areas.data_of(DATA);
        let found = find(&memory, &areas, &data, &[inside, apart, u64::MAX - 100], POOL);
        let starts: Vec<u64> = found.iter().map(|arena| arena.range.start).collect();
        assert_eq!(starts, [at(0), at(4), at(6)]);
    }
}
