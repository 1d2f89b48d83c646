//! The allocator of free-threaded builds: pages of blocks of one size, in segments that begin at multiples of 32 MiB.
//!
//! Which of Python's heaps a page belongs to is in its header, so objects and buffers need not be told apart by what they hold.
//! Include/internal/mimalloc/mimalloc/types.h and Include/internal/pycore_mimalloc.h, v3.13.0 to v3.15.0.

use std::ops::Range;

use crate::bytes::{u16_at, u32_at, u64_at};
use crate::process::maps::Mapping;
use crate::process::memory::Memory;

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
    memory.read(at + FIRST_SLICE, &mut headers).then_some(())?;
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
    /// Blocks that are not free, or freed and not yet in the first list.
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
    /// Follows the lists of free blocks. `word` reads a word at an offset of the area. `None`: they make no sense, or not with what
    /// the header says.
    pub fn of(header: &PageHeader, area: &Range<u64>, mut word: impl FnMut(u64) -> Option<u64>) -> Option<LiveBlocks> {
        let (block, first) = (header.block_size(area), header.first());
        header.end(area).filter(|_| header.is_in_use())?;
        let mut blocks = LiveBlocks {
            free: vec![false; usize::from(header.capacity)],
            first,
            block,
        };
        let mut in_first = 0;
        for (list, head) in header.lists.into_iter().enumerate() {
            let mut next = head;
            while next != 0 {
                let offset = next.checked_sub(area.start)?;
                let place = offset.checked_sub(first)?;
                (place % block == 0).then_some(())?;
                // A block that was met before is in a cycle.
                let free = blocks.free.get_mut(usize::try_from(place / block).ok()?)?;
                (!*free).then_some(())?;
                *free = true;
                in_first += u64::from(list == 0);
                next = word(offset)?;
            }
        }
        (in_first + u64::from(header.used) == u64::from(header.capacity)).then_some(blocks)
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
