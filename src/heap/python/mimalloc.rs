//! The allocator of free-threaded builds: pages of blocks of one size, in segments that begin at multiples of 32 MiB.
//!
//! Which of Python's heaps a page belongs to is in its header, so objects and buffers need not be told apart by what
//! they hold.
//! Include/internal/mimalloc/mimalloc/types.h and Include/internal/pycore_mimalloc.h, v3.13.0 to v3.15.0.

use std::ops::Range;

use crate::bytes::{u16_at, u32_at, u64_at};
use crate::event::PAGE;
use crate::process::maps::Mapping;
use crate::process::memory::{Memory, in_pieces};

/// `MI_SEGMENT_SIZE`, `MI_SEGMENT_SLICE_SIZE`, `MI_SLICES_PER_SEGMENT`
const SEGMENT: u64 = 32 << 20;
const SLICE: u64 = 64 << 10;
const SLICES: u64 = 512;
/// Offsets in `mi_segment_t`.
const SEGMENT_SLICES: usize = 224;
const SLICE_ENTRIES: usize = 248;
const FIRST_SLICE: u64 = 264;
/// Bytes of `mi_page_t`, of which each slice has one.
const PAGE_HEADER: usize = 96;
/// Segments of one process, and addresses that are tried for them: 2 TiB.
const MAX_SEGMENTS: usize = 1 << 16;
/// Pages of one process at most.
const MAX_PAGES: usize = 1 << 22;
/// Slices of the largest segment: one block of 1 TiB.
const MAX_SLICES: u64 = 1 << 24;
/// Lists of free blocks have flags in their lowest bits.
const LIST_FLAGS: u64 = 3;

/// Memory that mimalloc has from the system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    pub range: Range<u64>,
    pub pages: Vec<MiPage>,
}

/// A page of blocks: avma of its header, and of its area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MiPage {
    pub header: u64,
    pub area: Range<u64>,
    /// Bytes of a block, when the segment was read.
    pub block: u64,
    pub is_object: bool,
}

/// Finds the segments of a process. `mappings` are in ascending order.
pub fn find(memory: &dyn Memory, mappings: &[Mapping]) -> Vec<Segment> {
    let mut found: Vec<Segment> = Vec::new();
    let (mut tried, mut pages, mut next) = (0, 0, 0);
    for m in mappings.iter().filter(|m| m.writable && m.inode == 0) {
        let mut at = m.start.max(next).next_multiple_of(SEGMENT);
        while at < m.end && tried < MAX_SEGMENTS && pages < MAX_PAGES {
            tried += 1;
            let segment = read_segment(memory, at);
            at = segment.as_ref().map_or(at + SEGMENT, |segment| segment.range.end);
            next = at;
            if let Some(segment) = segment {
                pages += segment.pages.len();
                found.push(segment);
            }
        }
    }
    found
}

fn read_segment(memory: &dyn Memory, at: u64) -> Option<Segment> {
    let mut head = [0; FIRST_SLICE as usize];
    memory.read(at, &mut head).then_some(())?;
    let (slices, own) = (u64_at(&head, SEGMENT_SLICES)?, u64_at(&head, SEGMENT_SLICES + 8)?);
    let (kind, entries) = (u32_at(&head, SEGMENT_SLICES + 16)?, u64_at(&head, SLICE_ENTRIES)?);
    let is_huge = kind == 1;
    let is_segment = kind <= 1
        && (1..=16).contains(&own)
        && (1..=SLICES).contains(&entries)
        && if is_huge {
            (entries..=MAX_SLICES).contains(&slices)
        } else {
            slices == SLICES && entries == SLICES
        };
    is_segment.then_some(())?;
    let end = at.checked_add((slices * SLICE).next_multiple_of(SEGMENT))?;
    let mut headers = vec![0; entries as usize * PAGE_HEADER];
    // Pages of headers that were never used are not in memory: only the first slice of each page has one, and the last
    // slice of what is free.
    in_pieces(at + FIRST_SLICE, &mut headers, PAGE, |page, skip, piece| {
        if !memory.read(page + skip as u64, piece) {
            piece.fill(0);
        }
        true
    });
    let mut pages = Vec::new();
    // The first page describes the segment itself.
    let mut index = own;
    while index < entries {
        let bytes = headers.get(index as usize * PAGE_HEADER..)?;
        let count = u64::from(u32_at(bytes, 0)?);
        let start = at + index * SLICE;
        let limit = if is_huge { slices } else { entries };
        if count == 0 || count > limit - index {
            return None;
        }
        if let Some(page) = PageHeader::parse(bytes).filter(PageHeader::is_in_use) {
            let area = start..start + count * SLICE;
            pages.push(MiPage {
                header: at + FIRST_SLICE + index * PAGE_HEADER as u64,
                block: page.block_size(&area),
                area,
                is_object: page.tag != 0,
            });
        }
        index += count;
    }
    Some(Segment { range: at..end, pages })
}

/// What a page says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageHeader {
    /// The heap: 0 for buffers, others for objects.
    pub tag: u8,
    slices: u32,
    capacity: u16,
    /// Blocks that are in neither of the first two lists.
    used: u32,
    /// Bytes of a block; of a single block that is larger than this has bits, a large number.
    block: u32,
    /// Blocks that are free, that the owner has freed, and that other threads have.
    lists: [u64; 3],
}

impl PageHeader {
    pub const BYTES: usize = PAGE_HEADER;

    pub fn parse(bytes: &[u8]) -> Option<PageHeader> {
        Some(PageHeader {
            slices: u32_at(bytes, 0)?,
            tag: bytes.get(8)? >> 3 & 15,
            capacity: u16_at(bytes, 10)?,
            used: u32_at(bytes, 24)?,
            block: u32_at(bytes, 28)?,
            lists: [u64_at(bytes, 16)?, u64_at(bytes, 32)?, u64_at(bytes, 40)? & !LIST_FLAGS],
        })
    }

    /// Pages of segments that are not handed out have no blocks.
    pub fn is_in_use(&self) -> bool {
        self.slices > 0 && self.block >= 8 && self.used > 0 && self.capacity > 0
    }

    /// Bytes of a block in an area.
    pub fn block_size(&self, area: &Range<u64>) -> u64 {
        let bytes = area.end - area.start;
        let is_whole = self.capacity == 1 && u64::from(self.block) * 2 > bytes;
        // `mi_page_block_size`: the area of a huge page, whose size does not fit.
        if is_whole && self.block >= i32::MAX as u32 {
            bytes
        } else {
            self.block.into()
        }
    }

    /// Where the last block ends in an area. `None`: not in it.
    pub fn end(&self, area: &Range<u64>) -> Option<u64> {
        let blocks = u64::from(self.capacity).checked_mul(self.block_size(area))?;
        let end = blocks.checked_add(self.first())?;
        (end <= area.end - area.start).then_some(end)
    }

    /// Where the blocks begin in the area (`_mi_segment_page_start_from_slice`, Objects/mimalloc/segment.c).
    fn first(&self) -> u64 {
        let block = u64::from(self.block);
        match block {
            0..=64 => 3 * block,
            65..=512 => block,
            _ => 0,
        }
    }
}

/// The blocks of a page that are in use.
#[derive(Debug)]
pub struct LiveBlocks {
    free: Vec<bool>,
    first: u64,
    pub block: u64,
}

impl LiveBlocks {
    /// Follows the lists of free blocks. `word` reads a word at an offset of the area. `None`: they make no sense, or
    /// not with what
    /// the header says.
    pub fn of(header: &PageHeader, area: &Range<u64>, mut word: impl FnMut(u64) -> Option<u64>) -> Option<LiveBlocks> {
        let (block, first) = (header.block_size(area), header.first());
        header.end(area).filter(|_| header.is_in_use())?;
        let mut blocks = LiveBlocks {
            free: vec![false; usize::from(header.capacity)],
            first,
            block,
        };
        let mut listed = 0;
        for (list, head) in header.lists.into_iter().enumerate() {
            let mut next = head;
            while next != 0 {
                let offset = next.checked_sub(area.start)?;
                let place = offset.checked_sub(first)?;
                place.is_multiple_of(block).then_some(())?;
                // A block that was met before is in a cycle.
                let free = blocks.free.get_mut(usize::try_from(place / block).ok()?)?;
                (!*free).then_some(())?;
                *free = true;
                // What other threads have freed counts as used until the owner takes it.
                listed += u64::from(list < 2);
                next = word(offset)?;
            }
        }
        (listed + u64::from(header.used) == u64::from(header.capacity)).then_some(blocks)
    }

    /// Where blocks in use begin in the area.
    pub fn offsets(&self) -> impl Iterator<Item = u64> {
        let at = |index: usize| self.first + index as u64 * self.block;
        self.free
            .iter()
            .enumerate()
            .filter(|(_, is_free)| !**is_free)
            .map(move |(index, _)| at(index))
    }
}

/// Bytes of the block that a buffer has (`_mi_bin`, Objects/mimalloc/page-queue.c): four sizes for each power of two.
pub fn block_size(bytes: u64) -> u64 {
    let words = bytes.div_ceil(8).max(1);
    if words <= 8 {
        return words.next_multiple_of(2) * 8;
    }
    let last = words - 1;
    let step = 1 << (last.ilog2() - 2);
    (last / step + 1).saturating_mul(step).saturating_mul(8)
}

#[cfg(test)]
mod tests {
    use super::super::fake::{FakeMemory, mapping};
    use super::*;

    const AT: u64 = 0x20_0000_0000;

    /// What a page says: slices, heap, blocks handed out, blocks in use, bytes of a block, and where its free blocks begin.
    fn header(slices: u32, tag: u8, capacity: u16, used: u32, block: u32, lists: [u64; 3]) -> Vec<u8> {
        let mut bytes = vec![0; PAGE_HEADER];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &slices.to_le_bytes());
        put(8, &[tag << 3 | 1]);
        put(10, &capacity.to_le_bytes());
        put(24, &used.to_le_bytes());
        put(28, &block.to_le_bytes());
        for (at, list) in [16, 32, 40].into_iter().zip(lists) {
            put(at, &list.to_le_bytes());
        }
        bytes
    }

    fn put_page(memory: &mut FakeMemory, slice: u64, header: &[u8]) {
        memory.write(AT + FIRST_SLICE + slice * PAGE_HEADER as u64, header);
    }

    /// A segment with two pages of objects and one free one.
    fn segment() -> FakeMemory {
        let mut memory = FakeMemory::default();
        memory.words(AT, &[0; 50 << 10 >> 3]);
        memory.words(AT + SEGMENT_SLICES as u64, &[SLICES, 1, 0, SLICES]);
        put_page(&mut memory, 1, &header(1, 2, 100, 50, 64, [0; 3]));
        put_page(&mut memory, 2, &header(8, 0, 3, 3, 100_000, [0; 3]));
        put_page(&mut memory, 10, &header(502, 0, 0, 0, 0, [0; 3]));
        memory
    }

    fn found(memory: &FakeMemory) -> Vec<Segment> {
        let mappings = [
            mapping(AT - PAGE..AT + SEGMENT, true, 0, ""),
            mapping(AT + SEGMENT..AT + 3 * SEGMENT, true, 0, ""),
        ];
        find(memory, &mappings)
    }

    #[test]
    fn segments_are_found_by_their_shape() {
        let slice = |n: u64| AT + n * SLICE;
        let page = |n: u64, slices: u64, block: u64, is_object: bool| MiPage {
            header: AT + FIRST_SLICE + n * PAGE_HEADER as u64,
            area: slice(n)..slice(n + slices),
            block,
            is_object,
        };
        let expected = Segment {
            range: AT..AT + SEGMENT,
            pages: vec![page(1, 1, 64, true), page(2, 8, 100_000, false)],
        };
        assert_eq!(found(&segment()), [expected]);
        // One block of more than a segment.
        let mut memory = segment();
        memory.words(AT + SEGMENT_SLICES as u64, &[700, 1, 1, 512]);
        put_page(&mut memory, 1, &header(699, 0, 1, 1, i32::MAX as u32, [0; 3]));
        let huge = &found(&memory)[0];
        assert_eq!(huge.range, AT..AT + 2 * SEGMENT);
        assert_eq!(huge.pages, [page(1, 699, 699 * SLICE, false)]);
    }

    /// The kernel gives pages of headers when they are first written.
    #[test]
    fn segments_are_found_where_some_of_their_headers_are_not_in_memory() {
        let mut memory = segment();
        for page in 1..12 {
            memory.remove_page(AT + page * PAGE);
        }
        assert_eq!(found(&memory), found(&segment()));
    }

    #[test]
    fn forged_segments_are_refused() {
        let word = |n: u64| AT + SEGMENT_SLICES as u64 + 8 * n;
        for (name, at, value) in [
            ("slices", word(0), SLICES + 1),
            ("all slices", word(0), u64::MAX),
            ("no slices of its own", word(1), 0),
            ("all slices of its own", word(1), u64::MAX),
            ("no such kind", word(2), 2),
            ("entries", word(3), SLICES - 1),
            ("no entries", word(3), 0),
            ("a page without slices", AT + FIRST_SLICE + PAGE_HEADER as u64, 0),
            (
                "a page beyond the segment",
                AT + FIRST_SLICE + PAGE_HEADER as u64,
                SLICES,
            ),
        ] {
            let mut memory = segment();
            memory.words(at, &[value]);
            assert!(found(&memory).is_empty(), "{name}");
        }
        let mut huge = segment();
        huge.words(word(0), &[u64::MAX, 1, 1, 512]);
        assert!(found(&huge).is_empty());
    }

    #[test]
    fn blocks_in_use_are_off_the_lists() {
        let area = AT..AT + SLICE;
        // Blocks of 64 bytes begin at the third.
        let at = |index: u64| AT + 192 + 64 * index;
        let live = |lists: [u64; 3], links: &[(u64, u64)], used: u32| {
            let page = PageHeader::parse(&header(1, 2, 6, used, 64, lists)).expect("a header");
            let word = |offset: u64| {
                let link = links.iter().find(|(from, _)| *from == AT + offset);
                Some(link.map_or(0, |(_, to)| *to))
            };
            let blocks = LiveBlocks::of(&page, &area, word)?;
            Some(blocks.offsets().map(|offset| (offset - 192) / 64).collect::<Vec<u64>>())
        };
        let lists = [at(5), at(1), at(2) | 1];
        for (name, lists, links, used, expected) in [
            (
                "one list",
                [at(5), 0, 0],
                vec![(at(5), at(0))],
                4,
                Some(vec![1, 2, 3, 4]),
            ),
            ("three lists", lists, vec![(at(5), at(0))], 3, Some(vec![3, 4])),
            ("more in use than there are", lists, vec![], 5, None),
            ("less in use than there are", lists, vec![], 3, None),
            ("a cycle", lists, vec![(at(5), at(0)), (at(0), at(5))], 3, None),
            ("a block in two lists", [at(5), at(5), 0], vec![], 5, None),
            ("between blocks", [at(5) + 8, 0, 0], vec![], 5, None),
            ("ahead of the blocks", [AT + 64, 0, 0], vec![], 5, None),
            ("beyond the blocks", [at(6), 0, 0], vec![], 5, None),
            ("outside", [64, 0, 0], vec![], 5, None),
        ] {
            assert_eq!(live(lists, &links, used), expected, "{name}");
        }
        // More blocks than the area has room for.
        let page = PageHeader::parse(&header(1, 2, 2000, 2000, 64, [0; 3])).expect("a header");
        assert!(LiveBlocks::of(&page, &area, |_| Some(0)).is_none());
    }

    #[test]
    fn sizes_of_blocks() {
        for (bytes, expected) in [
            (1, 16),
            (16, 16),
            (17, 32),
            (64, 64),
            (65, 80),
            (81, 96),
            (129, 160),
            (1025, 1280),
        ] {
            assert_eq!(block_size(bytes), expected, "{bytes}");
        }
        assert!(block_size(u64::MAX) > 1 << 60);
    }
}
