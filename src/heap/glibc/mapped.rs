//! Chunks with a mapping of their own (`sysmalloc_mmap`): the kernel joins them with their neighbours, so one mapping
//! may have many, and arenas of others in between; and it divides them where the program has given advice on a part, as NumPy
//! does for large arrays. Each begins with its page: no chunk before it, and a size with one flag. The size is of whole pages;
//! in glibc 2.43 it leaves out the header.

use std::ops::Range;

use super::Target;
use crate::event::PAGE;
use crate::process::memory::Memory;
use crate::process::smaps::Area;

/// Pages that are looked at, at most.
const MAX_PROBES: u64 = 1 << 16;
/// Chunks that are found, at most.
const MAX_CHUNKS: usize = 1 << 18;
/// `IS_MMAPPED`, alone.
const FLAG: u64 = 2;

/// Finds them outside of what is `taken`, which is in ascending order. `left_out`: bytes of each that are not in its
/// size. False: some may be missing.
pub fn find(target: &Target, taken: &[Range<u64>], left_out: u64) -> (Vec<Range<u64>>, bool) {
    let (mut chunks, mut probes) = (Vec::new(), MAX_PROBES);
    let areas: Vec<&Area> = target
        .smaps
        .areas
        .iter()
        .filter(|area| may_have(target, area))
        .collect();
    for adjacent in areas.chunk_by(|a, b| a.end == b.start) {
        let (Some(first), Some(last)) = (adjacent.first(), adjacent.last()) else {
            continue;
        };
        let range = first.start..last.end;
        if !find_in(target, range, taken, left_out, &mut chunks, &mut probes) {
            return (chunks, false);
        }
    }
    (chunks, true)
}

fn may_have(target: &Target, area: &Area) -> bool {
    let is_named = target.smaps.name(area).starts_with(b"[") && !target.smaps.name(area).starts_with(b"[anon");
    area.is_writable && !area.is_shared && !area.is_file && !is_named
}

fn find_in(
    target: &Target,
    range: Range<u64>,
    taken: &[Range<u64>],
    left_out: u64,
    chunks: &mut Vec<Range<u64>>,
    probes: &mut u64,
) -> bool {
    let memory = target.memory();
    let mut next = taken.partition_point(|taken| taken.end <= range.start);
    let mut at = range.start;
    while at < range.end {
        if let Some(taken) = taken.get(next).filter(|taken| taken.start < at.saturating_add(PAGE)) {
            at = at.max(taken.end.next_multiple_of(PAGE));
            next += 1;
            continue;
        }
        let end = taken.get(next).map_or(range.end, |taken| taken.start.min(range.end));
        let Some(present) = target.present.within(at..end).next() else {
            at = end;
            continue;
        };
        at = present.start;
        if *probes == 0 || chunks.len() >= MAX_CHUNKS || (*probes).is_multiple_of(1 << 10) && target.is_over() {
            return false;
        }
        *probes -= 1;
        let mut head = [0; 16];
        let size = memory
            .read(at, &mut head)
            .then(|| size(&head, left_out, end - at))
            .flatten();
        if let Some(size) = size {
            chunks.push(at..at + size);
        }
        at += size.unwrap_or(PAGE);
    }
    true
}

/// Bytes of the chunk with this header, if it is one that fits in so many bytes.
fn size(head: &[u8; 16], left_out: u64, room: u64) -> Option<u64> {
    let word = |at: usize| Some(u64::from_le_bytes(*head.get(at..)?.first_chunk()?));
    let size = (word(8)? & !7).checked_add(left_out)?;
    let is_chunk = word(0)? == 0 && word(8)? & 7 == FLAG && size > 0 && size.is_multiple_of(PAGE) && size <= room;
    is_chunk.then_some(size)
}
