//! Heaps that were made by hand: sound ones, and those of a hostile target.

use std::collections::BTreeMap;

use super::*;
use crate::capture::common::rng::Rng;
use crate::heap::present::Present;
use crate::process::memory::NoMemory;

const PAGE: u64 = 4096;
const DATA: u64 = 0x7f00_0000_0000;
const MAIN: u64 = DATA + 0x40;
const HEAP: u64 = 0x5555_0000_0000;
const THREAD_HEAP: u64 = 0x7e00_0000_0000;
const THREAD_ARENA: u64 = THREAD_HEAP + 48;

/// Words by address; what is not set is zero.
#[derive(Clone, Default)]
struct Words(BTreeMap<u64, u64>);

impl Words {
    fn set(&mut self, at: u64, word: u64) {
        self.0.insert(at, word);
    }

    /// A chunk in use, or one that the next one says is free.
    fn chunk(&mut self, at: u64, size: u64, flags: u64) -> u64 {
        self.set(at + 8, size | flags);
        at + size
    }

    /// An arena of which the bins are at this offset.
    fn arena(&mut self, at: u64, bins: u64, top: u64, system: u64, next: u64) {
        for bin in 0..127 {
            let place = at + bins + 16 * bin;
            self.set(place, place - 16);
            self.set(place + 8, place - 16);
        }
        self.set(at + bins - 16, top);
        self.set(at + bins + 2048, next);
        self.set(at + bins + 2072, system);
        self.set(at + bins + 2080, system);
    }
}

impl Memory for Words {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        buf.fill(0);
        let end = avma + buf.len() as u64;
        for (at, word) in self.0.range(avma.saturating_sub(7)..end) {
            for (i, byte) in word.to_le_bytes().into_iter().enumerate() {
                let place = (at + i as u64).checked_sub(avma).map(|n| n as usize);
                if let Some(to) = place.and_then(|place| buf.get_mut(place)) {
                    *to = byte;
                }
            }
        }
        true
    }
}

const HEAP_SIZE: u64 = 0x21000;
const THREAD_SIZE: u64 = 0x30000;

/// A mapping as the kernel writes it, all of it resident.
fn area(start: u64, size: u64, rest: &str) -> String {
    format!("{start:x}-{:x} rw-p 0 {rest}\nRss: {} kB\n", start + size, size / 1024)
}

fn smaps() -> Smaps {
    let text = [
        area(HEAP, HEAP_SIZE, "00:00 0 [heap]"),
        area(THREAD_HEAP, THREAD_SIZE, "00:00 0"),
        area(0x7e80_0000_0000, 0x50_0000, "00:00 0"),
        area(DATA, 2 * PAGE, "fd:01 7 /lib/libc.so.6"),
    ];
    Smaps::read(text.concat().as_bytes()).expect("text")
}

/// A main arena with two chunks in use, a free one between them and one in a fastbin; and one of a thread.
fn sound() -> Words {
    let mut words = sound_of(BINS_2_36);
    let quick = HEAP + 0x100 + 0x5000 + 0x12000;
    words.set(quick + 16, (quick + 16) >> 12);
    words.set(MAIN + 16 + 8, quick);
    words
}

const BINS_2_36: u64 = 112;
const BINS_2_43: u64 = 24;

/// The same without fastbins, of the version that has its bins there.
fn sound_of(bins: u64) -> Words {
    let mut words = Words::default();
    let free = words.chunk(HEAP, 0x100, 1);
    let used = words.chunk(free, 0x5000, 1);
    words.set(used, 0x5000);
    let quick = words.chunk(used, 0x12000, 0);
    let last = words.chunk(quick, 0x30, 1);
    let top = words.chunk(last, 0x40, 1);
    words.chunk(top, HEAP + HEAP_SIZE - top, 1);
    words.arena(MAIN, bins, top, HEAP_SIZE, THREAD_ARENA);
    // `heap_info`: arena, heap before, size.
    words.set(THREAD_HEAP, THREAD_ARENA);
    words.set(THREAD_HEAP + 16, THREAD_SIZE);
    let top = words.chunk(THREAD_HEAP + 48 + (bins + 2088).next_multiple_of(16), 0x1000, 5);
    words.chunk(top, THREAD_HEAP + THREAD_SIZE - top, 1);
    words.arena(THREAD_ARENA, bins, top, THREAD_SIZE, MAIN);
    // Two chunks with mappings of their own, with a gap.
    let left_out = if bins == BINS_2_36 { 0 } else { 16 };
    words.set(0x7e80_0000_0008, 0x10_0002 - left_out);
    words.set(0x7e80_0020_0008, 0x20_1002 - left_out);
    words
}

fn all(smaps: &Smaps) -> Present {
    smaps.areas.iter().map(|area| area.start..area.end).collect()
}

fn read_with(words: &Words, present: &Present) -> (Result<Glibc, String>, Vec<Claim>) {
    read_in(&smaps(), words, present)
}

fn read_in(smaps: &Smaps, words: &Words, present: &Present) -> (Result<Glibc, String>, Vec<Claim>) {
    let mut claims = Vec::new();
    let target = Target {
        smaps,
        present,
        memory: words,
        deadline: Deadline::after(Duration::from_secs(5)),
    };
    let glibc = find(&target).map(|arenas| read(&target, &arenas, &mut claims, &mut |_| {}));
    (glibc, claims)
}

fn read_all(words: &Words) -> (Result<Glibc, String>, Vec<Claim>) {
    read_with(words, &all(&smaps()))
}

#[test]
fn a_sound_heap() {
    let (glibc, claims) = read_all(&sound());
    let glibc = glibc.expect("it is sound");
    let top = HEAP_SIZE - 0x100 - 0x5000 - 0x12000 - 0x30 - 0x40;
    let main = ArenaUse {
        address: MAIN,
        is_main: true,
        system: HEAP_SIZE,
        in_use: 0x100 + 0x12000 + 0x40,
        free: 0x5000 + 0x30 + top,
        free_resident: 0x5000 + 0x30 + top,
        // In the free chunk the pages from 0x1000 to 0x5000, in the last one those from 0x18000 on.
        returnable: 0x4000 + HEAP_SIZE - 0x18000,
        lost: 0,
    };
    assert_eq!(glibc.arenas[0], main);
    let thread = &glibc.arenas[1];
    assert_eq!(
        (thread.in_use, thread.free),
        (48 + 2208 + 0x1000, THREAD_SIZE - 48 - 2208 - 0x1000)
    );
    assert_eq!(
        (thread.returnable, thread.lost),
        (0, 0),
        "malloc_trim leaves the end of such arenas"
    );
    assert_eq!(glibc.mapped, 0x10_0000 + 0x20_1000);
    let large: Vec<_> = glibc
        .large
        .iter()
        .map(|block| (block.address, block.bytes, block.is_mapped))
        .collect();
    let expected = [
        (HEAP + 0x5110, 0x12000, false),
        (0x7e80_0000_0010, 0x10_0000, true),
        (0x7e80_0020_0010, 0x20_1000, true),
    ];
    assert_eq!(large, expected);
    assert!(glibc.is_complete);
    let smaps = smaps();
    let account = crate::heap::mappings::divide(&smaps, &all(&smaps), claims);
    let part = |part: Part| account.parts.get(&part).copied().unwrap_or(0);
    assert_eq!(part(Part::CFree), main.free + thread.free);
    assert_eq!(part(Part::CInUse), main.in_use + thread.in_use);
    assert_eq!(
        (part(Part::CLarge), part(Part::CHeap), part(Part::Unknown)),
        (glibc.mapped, 0, 0)
    );
}

#[test]
fn a_sound_heap_without_fastbins() {
    let (glibc, _) = read_all(&sound_of(BINS_2_43));
    let glibc = glibc.expect("it is sound");
    let (main, thread) = (&glibc.arenas[0], &glibc.arenas[1]);
    assert_eq!((main.in_use, main.lost), (0x100 + 0x12000 + 0x30 + 0x40, 0));
    assert_eq!((thread.in_use, thread.lost), (48 + 2112 + 0x1000, 0));
    assert_eq!(glibc.mapped, 0x10_0000 + 0x20_1000);
}

/// Advice on a part of a mapping divides it (`madvise`), and the heap with it. NumPy gives some on large arrays.
#[test]
fn mappings_that_are_divided() {
    let parts = |start: u64, sizes: &[u64], rest: &str| {
        let mut at = start;
        let each = |size: &u64| {
            let text = area(at, *size, rest);
            at += size;
            text
        };
        sizes.iter().map(each).collect::<String>()
    };
    let text = [
        parts(HEAP, &[0x6000, 0x10000, HEAP_SIZE - 0x16000], "00:00 0 [heap]"),
        parts(THREAD_HEAP, &[PAGE, THREAD_SIZE - PAGE], "00:00 0"),
        parts(
            0x7e80_0000_0000,
            &[PAGE, 0xf_f000, 0x10_1000, 0x30_0000 - PAGE],
            "00:00 0",
        ),
        area(DATA, 2 * PAGE, "fd:01 7 /lib/libc.so.6"),
    ];
    let divided = Smaps::read(text.concat().as_bytes()).expect("text");
    let (found, claims) = read_in(&divided, &sound(), &all(&divided));
    assert_eq!(found, read_all(&sound()).0);
    let account = |smaps: &Smaps, claims: Vec<Claim>| crate::heap::mappings::divide(smaps, &all(smaps), claims).parts;
    let whole = account(&smaps(), read_all(&sound()).1);
    assert_eq!(account(&divided, claims), whole);
}

#[test]
fn pages_that_are_not_in_memory_are_not_read() {
    let mut present: Vec<Range<u64>> = smaps().areas.iter().map(|area| area.start..area.end).collect();
    // In the free chunk: nothing is lost.
    present.splice(..1, [HEAP..HEAP + 0x2000, HEAP + 0x4000..HEAP + HEAP_SIZE]);
    let (glibc, _) = read_with(&sound(), &present.iter().cloned().collect());
    let main = &glibc.expect("it is sound").arenas[0];
    let (_, whole) = (0, read_all(&sound()).0.expect("it is sound").arenas[0].clone());
    assert_eq!((main.in_use, main.free), (whole.in_use, whole.free));
    assert_eq!(
        (main.free_resident, main.returnable),
        (whole.free_resident - 0x2000, whole.returnable - 0x2000)
    );
    // Where the second chunk in use begins: what is before the next one that makes sense cannot be told.
    present.splice(..2, [HEAP..HEAP + 0x5000, HEAP + 0x6000..HEAP + HEAP_SIZE]);
    let (glibc, claims) = read_with(&sound(), &present.into_iter().collect());
    let main = &glibc.expect("it is sound").arenas[0];
    assert_eq!(main.lost, 0x5000 + 0x12000);
    let unknown = claims[0].amounts.iter().find(|(part, _)| *part == Part::Unknown);
    assert_eq!(unknown, Some(&(Part::Unknown, main.lost - 0x1000)));
}

#[test]
fn another_layout_is_refused() {
    let shifted = |words: &Words, by: u64| Words(words.0.iter().map(|(at, word)| (at + by, *word)).collect());
    type Change = Box<dyn Fn(&mut Words)>;
    let cases: [(&str, Change); 8] = [
        ("a bin that is no list", Box::new(|words| words.set(MAIN + 112 + 16, 7))),
        ("no next arena", Box::new(|words| words.set(MAIN + 2160, 0))),
        ("a top in no memory", Box::new(|words| words.set(MAIN + 96, 0x1000))),
        ("more memory than ever", Box::new(|words| words.set(MAIN + 2192, 0))),
        ("an arena in no heap", Box::new(|words| words.set(THREAD_HEAP, MAIN))),
        (
            "a list that does not come back",
            Box::new(|words| words.set(THREAD_ARENA + 2160, THREAD_ARENA)),
        ),
        (
            "a heap that is too large",
            Box::new(|words| words.set(THREAD_HEAP + 16, u64::MAX)),
        ),
        ("words elsewhere", Box::new(move |words| *words = shifted(words, 8))),
    ];
    for (case, change) in cases {
        let mut words = sound();
        change(&mut words);
        assert!(read_all(&words).0.is_err(), "{case}");
    }
    let (glibc, claims) = read_all(&Words::default());
    assert!(glibc.is_err() && claims.is_empty());
}

/// A thread may change its arena each time that it is read: the others are read.
#[test]
fn one_of_many_arenas_makes_no_sense() {
    let mut words = sound();
    let places = [1, 2].map(|n| THREAD_ARENA + n * (64 << 20));
    for (arena, next) in [(THREAD_ARENA, places[0]), (places[0], places[1]), (places[1], MAIN)] {
        let heap = arena - 48;
        words.set(heap, arena);
        words.set(heap + 16, THREAD_SIZE);
        let top = words.chunk(heap + 48 + (BINS_2_36 + 2088).next_multiple_of(16), 0x1000, 5);
        words.chunk(top, heap + THREAD_SIZE - top, 1);
        words.arena(arena, BINS_2_36, top, THREAD_SIZE, next);
    }
    // A larger top than there is room for.
    words.set(places[0] - 48 + 16, THREAD_SIZE - PAGE);
    let heaps = places.map(|arena| area(arena - 48, THREAD_SIZE, "00:00 0"));
    let text = [
        area(HEAP, HEAP_SIZE, "00:00 0 [heap]"),
        area(THREAD_HEAP, THREAD_SIZE, "00:00 0"),
        heaps.concat(),
        area(DATA, 2 * PAGE, "fd:01 7 /lib/libc.so.6"),
    ];
    let smaps = Smaps::read(text.concat().as_bytes()).expect("text");
    let (found, claims) = read_in(&smaps, &words, &all(&smaps));
    let arenas = found.expect("most are sound").arenas;
    let lost: Vec<u64> = arenas.iter().map(|arena| arena.lost).collect();
    assert_eq!(lost, [0, 0, THREAD_SIZE, 0]);
    assert_eq!(claims.len(), 3);
}

#[test]
fn forged_chunks_are_lost_and_the_walk_ends() {
    let used = HEAP + 0x5100;
    for (case, at, word) in [
        ("too large", used, 0x7fff_ffff_fff1),
        ("no size", used, 1),
        ("not aligned", used, 0x12008 | 1),
        ("a mapping of its own", used, 0x12003),
        ("past the last one", used, 0x1c001),
        ("all bits", used, u64::MAX),
    ] {
        let mut words = sound();
        words.set(at + 8, word);
        let glibc = read_all(&words).0.expect("arenas are sound");
        let main = &glibc.arenas[0];
        assert_eq!(main.lost, 0x5000 + 0x12000, "{case}");
        assert_eq!(main.in_use + main.free + main.lost, HEAP_SIZE, "{case}");
    }
    // A fastbin that leads in a circle.
    let mut words = sound();
    let quick = HEAP + 0x17100;
    words.set(quick + 16, (quick + 16) >> 12 ^ quick);
    let glibc = read_all(&words).0.expect("arenas are sound");
    assert!(glibc.arenas[0].free <= HEAP_SIZE && glibc.arenas[0].in_use <= HEAP_SIZE);
}

#[test]
fn nothing_is_known_of_no_memory() {
    let smaps = smaps();
    let present = all(&smaps);
    let target = Target {
        smaps: &smaps,
        present: &present,
        memory: &NoMemory,
        deadline: Deadline::after(Duration::from_secs(5)),
    };
    assert!(find(&target).is_err());
}

#[test]
fn whatever_words_there_are_the_walk_ends_and_sums_hold() {
    let mut rng = Rng::new(5);
    let words = sound();
    let places: Vec<u64> = words.0.keys().copied().collect();
    for _ in 0..300 {
        let mut forged = words.clone();
        for _ in 0..=rng.below(3) {
            let at = places[rng.below(places.len() as u64) as usize];
            let old = forged.0.get(&at).copied().unwrap_or(0);
            let word = match rng.below(6) {
                0 => 0,
                1 => u64::MAX,
                2 => places[rng.below(places.len() as u64) as usize],
                3 => old ^ 1 << rng.below(64),
                4 => old.wrapping_add(16 * rng.below(1 << 16)),
                _ => rng.below(1 << 20),
            };
            forged.set(at, word);
        }
        let (glibc, claims) = read_all(&forged);
        let smaps = smaps();
        let account = crate::heap::mappings::divide(&smaps, &all(&smaps), claims);
        assert_eq!(account.parts.values().sum::<u64>(), account.rss);
        for arena in glibc.iter().flat_map(|glibc| &glibc.arenas) {
            assert!(
                arena.in_use <= arena.system && arena.returnable <= arena.free_resident,
                "{arena:?}"
            );
            assert!(arena.free_resident <= arena.free, "{arena:?}");
        }
    }
}

/// A statically linked program takes memory for the variables of its main thread before the first block.
#[test]
fn what_is_before_the_first_block_is_left_out() {
    let mut words = sound();
    let (expected, _) = read_all(&words);
    words.set(HEAP - PAGE + 8, 0x123_4567);
    words.set(HEAP - 8, 0x51);
    let text = [
        area(HEAP - PAGE, HEAP_SIZE + PAGE, "00:00 0 [heap]"),
        area(THREAD_HEAP, THREAD_SIZE, "00:00 0"),
        area(0x7e80_0000_0000, 0x50_0000, "00:00 0"),
        area(DATA, 2 * PAGE, "fd:01 7 /lib/libc.so.6"),
    ];
    let smaps = Smaps::read(text.concat().as_bytes()).expect("text");
    let (found, _) = read_in(&smaps, &words, &all(&smaps));
    assert_eq!(found, expected);
    assert!(found.is_ok_and(|glibc| glibc.arenas[0].lost == 0));
}
