//! Counts of heaps that were made by hand.

use super::super::arenas::Arena;
use super::super::fake::{ALLOCATED, ARENA, DICT, FLOAT, FakeMemory, LIST, POOL, STR, TYPE, heap, pool, with_types};
use super::*;

fn arena(at: u64, pools: u32) -> Arena {
    Arena {
        range: at..at + (1 << 20),
        first_pool: at,
        pools,
        in_use: pools,
    }
}

fn pool_at(number: u32) -> u64 {
    ARENA + u64::from(number * POOL)
}

fn block_at(number: u32, block: u32, index: u32) -> u64 {
    pool_at(number) + PoolHeader::BYTES as u64 + u64::from(block * index)
}

/// Two pools: four floats, of which one is freed and one is none; three lists, with items in an arena, in the C heap, and
/// large ones. A third pool has the items.
fn small_heap() -> FakeMemory {
    let mut memory = with_types();
    memory.write(pool_at(0), &pool(pool_at(0), 0, 32, 5, &[2]));
    for index in [0, 1, 3] {
        memory.words(block_at(0, 32, index), &[1, FLOAT, 7]);
    }
    memory.write(pool_at(1), &pool(pool_at(1), 0, 64, 4, &[]));
    let lists = [
        (block_at(2, 80, 0), 10),
        (ALLOCATED, 100),
        (ALLOCATED + 0x10_0000, 10_000),
        (0, 0),
    ];
    for (index, (items, allocated)) in (0..).zip(lists) {
        memory.words(block_at(1, 64, index), &[0, 0, 1, LIST, allocated, items, allocated]);
    }
    memory.write(pool_at(2), &pool(pool_at(2), 0, 80, 2, &[]));
    for page in 0..20 {
        memory.words(ALLOCATED + 0x10_0000 + 4096 * page, &[1]);
    }
    memory.words(ALLOCATED, &[1; 100]);
    memory
}

fn rows(census: &PythonCensus) -> Vec<(String, u64, u64)> {
    let row = |row: &TypeCensus| {
        let name = String::from_utf8_lossy(&row.name).into_owned();
        (name, row.count.value, row.bytes.value)
    };
    census.types.iter().map(row).collect()
}

#[test]
fn objects_and_what_they_own_are_counted_once() {
    let memory = small_heap();
    let heap = heap(12, vec![arena(ARENA, 3)]);
    let census = heap.census(&memory, &memory, None);
    let expected = [
        // Four blocks, the items in the arena and those in the C heap.
        ("list".into(), 4, 4 * 64 + 80 + 800),
        ("float".into(), 3, 96),
        ("blocks of 80 bytes".into(), 1, 80),
        ("blocks of 32 bytes".into(), 1, 32),
    ];
    assert_eq!(rows(&census), expected);
    assert_eq!(
        (census.pools, census.read, census.torn, census.is_full),
        (3, 3, 0, true)
    );
    assert!(!census.is_truncated);
    let large = LargeBuffer {
        address: ALLOCATED + 0x10_0000,
        bytes: 80_000,
        type_index: 0,
    };
    assert_eq!(census.large, [large]);
    let used = 4 * 32 + 4 * 64 + 2 * 80;
    assert_eq!(census.used, Estimate::exact(used));
    assert_eq!(census.free_blocks, Estimate::exact(3 * u64::from(POOL) - used));
    assert_eq!(census.free_pools, Estimate::exact(0));
    assert!(census.types[0].may_own_large && !census.types[1].may_own_large);
    assert!(census.types[0].is_object && !census.types[2].is_object);
}

#[test]
fn torn_free_and_missing_pools() {
    let mut memory = small_heap();
    // Its header makes no sense.
    memory.write(pool_at(0) + 44, &[1]);
    // It has no blocks in use.
    memory.write(pool_at(3), &pool(pool_at(3), 0, 64, 2, &[0, 1]));
    // It is not in memory. Of another one only the first page is.
    memory.write(pool_at(5), &pool(pool_at(5), 0, 512, 20, &[]));
    for page in 1..4 {
        memory.remove_page(pool_at(5) + 4096 * page);
    }
    let heap = heap(12, vec![arena(ARENA, 6)]);
    let census = heap.census(&memory, &memory, None);
    assert_eq!((census.read, census.torn, census.is_full), (3, 1, false));
    // Nothing is known of the pool that is torn: it is like the others.
    let lists = rows(&census).into_iter().find(|(name, ..)| name == "list");
    assert_eq!(lists.map(|(_, count, _)| count), Some(5));
    let used = 4 * 64 + 2 * 80 + 8 * 512;
    assert_eq!(census.used.value, used * 4 / 3);
    assert!(census.used.high > census.used.value);
}

#[test]
fn c_blocks_are_counted_in_units_of_their_own() {
    let memory = small_heap();
    let heap = heap(12, vec![arena(ARENA, 3)]);
    let mut counter = Counter::new(&heap, &memory, &memory);
    counter.count_pools(None);
    let float: Vec<u8> = [1, FLOAT, 0, 0]
        .iter()
        .flat_map(|word: &u64| word.to_le_bytes())
        .collect();
    assert!(counter.count_c_block(ALLOCATED, 1000, &float));
    assert!(!counter.count_c_block(ALLOCATED, 1000, &[0; 100]));
    counter.end_c_unit();
    counter.end_c_unit();
    counter.set_c_units(4);
    assert_eq!(
        counter.count_known_block(ALLOCATED, 70_000, &float),
        Some(&b"float"[..])
    );
    assert_eq!(counter.count_known_block(ALLOCATED, 70_000, &[0; 32]), None);
    let census = counter.finish();
    let (name, count, bytes) = rows(&census)[0].clone();
    // One of two units of four, three in pools, and one that is known.
    assert_eq!((name.as_str(), count, bytes), ("float", 6, 2 * 1000 + 96 + 70_000));
    assert!(!census.is_full && !census.types[0].count.is_exact());
}

#[test]
fn blocks_of_the_c_heap_that_were_not_read_may_be_objects() {
    let mut memory = small_heap();
    memory.write(pool_at(3), &pool(pool_at(3), 0, 64, 2, &[]));
    for index in 0..2 {
        memory.words(block_at(3, 64, index), &[1, STR, 3]);
    }
    let heap = heap(12, vec![arena(ARENA, 4)]);
    let mut counter = Counter::new(&heap, &memory, &memory);
    counter.count_pools(None);
    counter.miss_c_blocks(51_200);
    let census = counter.finish();
    let found = |name: &[u8]| {
        let row = census.types.iter().find(|row| row.name == name).expect("a row");
        ([row.count.low, row.count.high], [row.bytes.low, row.bytes.high])
    };
    assert_eq!(found(b"str"), ([2, 102], [128, 128 + 51_200]));
    assert_eq!(found(b"float"), ([3, 3], [96, 96]));
    assert!(!census.is_full);
}

/// All dicts, and their keys, are at one place, and each list claims to be large.
#[test]
fn forged_owners_are_bounded() {
    let mut memory = with_types();
    for number in 0..8 {
        memory.write(pool_at(number), &pool(pool_at(number), 0, 64, 255, &[]));
        for index in 0..255 {
            let kind = if index % 2 == 0 { DICT } else { LIST };
            let bad = u64::from(index) << 33;
            memory.words(block_at(number, 64, index), &[0, 0, 1, kind, bad, ALLOCATED, bad, 0]);
        }
    }
    memory.words(ALLOCATED, &[u64::MAX; 8]);
    let heap = heap(12, vec![arena(ARENA, 8)]);
    let census = heap.census(&memory, &memory, None);
    assert_eq!(census.read, 8);
    assert_eq!(census.large.iter().map(|buffer| buffer.bytes).sum::<u64>(), 4096);
    assert!(
        census.types.iter().all(|row| row.bytes.value < 8 * u64::from(POOL)),
        "{:?}",
        census.types
    );
    assert!(memory.reads.get() < 8 * 3000, "{}", memory.reads.get());
}

#[test]
fn counting_ends_when_the_time_is_over() {
    let mut memory = with_types();
    for number in 0..64 {
        memory.write(pool_at(number), &pool(pool_at(number), 0, 32, 100, &[]));
        for index in 0..100 {
            memory.words(block_at(number, 32, index), &[1, FLOAT, 7]);
        }
    }
    let heap = heap(12, vec![arena(ARENA, 64)]);
    let census = heap.census(&memory, &memory, Some(Duration::ZERO));
    assert_eq!((census.read, census.pools, census.is_full), (BATCH as u64, 64, false));
    assert_eq!((census.types[0].count.value, census.used.value), (6400, 64 * 3200));
}

/// Words of a heap that is all right, replaced at random.
#[test]
fn changed_heaps_are_counted_within_bounds() {
    let mut rng = Rng::new(11);
    let places = [pool_at(0), pool_at(1), pool_at(2), ALLOCATED, TYPE, LIST, FLOAT, DICT];
    for _ in 0..300 {
        let mut memory = small_heap();
        for _ in 0..1 + rng.below(4) {
            let place = places[rng.below(places.len() as u64) as usize] + 8 * rng.below(40);
            let near = places[rng.below(places.len() as u64) as usize] + 16 * rng.below(8);
            let values = [
                0,
                1,
                u64::MAX,
                1 << 47,
                near,
                near + 1,
                rng.below(u64::MAX),
                1 << rng.below(64),
            ];
            memory.words(place, &[values[rng.below(values.len() as u64) as usize]]);
        }
        let heap = heap(8 + rng.below(8) as u8, vec![arena(ARENA, 3)]);
        memory.reads.set(0);
        let census = heap.census(&memory, &memory, None);
        assert!(memory.reads.get() < 100, "{}", memory.reads.get());
        let bytes: u64 = census.types.iter().map(|row| row.bytes.value).sum();
        assert!(census.torn > 0 || bytes < 20 << 20, "{census:?}");
        assert!(census.large.iter().all(|large| large.bytes <= 20 * PAGE), "{census:?}");
        assert!(census.read + census.torn <= 3);
    }
}
