#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use nativeprof::heap::blocks::BlockCounter;
use nativeprof::heap::glibc::{Arena, Block, Deadline, PLACES, Segment, Target, Walk, find, read};
use nativeprof::heap::mappings::divide;
use nativeprof::heap::present::Present;
use nativeprof::process::memory::Memory;
use nativeprof::process::smaps::Smaps;

const HEAP: u64 = 0x5555_0000_0000;
const DATA: u64 = 0x7f00_0000_0000;
const PAGE: u64 = 4096;
const LIMIT: Duration = Duration::from_secs(1);

/// A heap, and the data of a C library.
struct Halves<'a>(&'a [u8], &'a [u8]);

impl Memory for Halves<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        for (i, byte) in buf.iter_mut().enumerate() {
            let at = avma.wrapping_add(i as u64);
            let (half, start) = if at >= DATA { (self.1, DATA) } else { (self.0, HEAP) };
            let place = at.wrapping_sub(start) as usize;
            *byte = half.get(place).copied().unwrap_or(0);
        }
        true
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((head, bytes)) = input.split_first_chunk::<8>() else {
        return;
    };
    let (heap, data) = bytes.split_at(bytes.len() / 2);
    let size = |half: &[u8]| (half.len() as u64).next_multiple_of(PAGE).max(PAGE);
    let (heap_end, data_end) = (HEAP + size(heap), DATA + size(data));
    let text = format!(
        "{HEAP:x}-{heap_end:x} rw-p 0 00:00 0 [heap]\nRss: {} kB\n{DATA:x}-{data_end:x} rw-p 0 fd:01 7 /lib/libc.so.6\nRss: {} kB\n",
        size(heap) / 1024,
        size(data) / 1024
    );
    let smaps = Smaps::read(text.as_bytes()).expect("text");
    // Some pages of the heap are not in memory.
    let pages = (HEAP..heap_end).step_by(PAGE as usize);
    let pages = pages.zip(0..).filter(|(_, n)| head[0] >> (n % 8) & 1 == 0);
    let ranges = pages.map(|(at, _)| at..at + PAGE).chain([DATA..data_end]);
    let present: Present = ranges.collect();
    let memory = Halves(heap, data);
    let target = Target {
        smaps: &smaps,
        present: &present,
        memory: &memory,
        deadline: Deadline::after(LIMIT),
    };
    let mut counter = BlockCounter::new(&memory, &smaps);
    let (mut count, mut bytes) = (0, 0);
    let mut blocks = |block: Block| {
        assert!(block.head.len() as u64 <= block.bytes);
        counter.count(&block);
        (count, bytes) = (count + 1, block.bytes + bytes);
    };
    let word = |at: usize| u64::from(head[at]) << 8 | u64::from(head[at + 1]);
    let segment = Segment {
        range: HEAP..heap_end,
        first: HEAP + word(2) % size(heap) / 16 * 16,
        top: (head[1] & 1 == 1).then_some(HEAP + word(4)),
        is_main: head[1] & 2 == 0,
    };
    let found = Walk::new(&target, &segment).run(&mut blocks);
    assert!(found.used + found.free + found.lost <= heap_end - HEAP);
    assert!(found.used_resident <= found.used && found.free_resident <= found.free && found.returnable <= found.free);
    let arenas = find(&target).unwrap_or_else(|_| {
        vec![Arena {
            address: DATA,
            is_main: segment.is_main,
            system: size(heap),
            segments: vec![segment],
            missing: 0,
            places: PLACES[usize::from(head[1] >> 2 & 1)],
        }]
    });
    let mut claims = Vec::new();
    read(&target, &arenas, &mut claims, &mut blocks);
    let rows = counter.finish();
    assert_eq!(rows.iter().map(|row| row.count).sum::<u64>(), count);
    assert_eq!(rows.iter().map(|row| row.bytes).sum::<u64>(), bytes);
    let account = divide(&smaps, &present, claims);
    assert_eq!(account.parts.values().sum::<u64>(), account.rss);
});
