//! The chunks of a heap, one after the other.
//!
//! A chunk has its size, with three flags, at its address + 8; the next chunk follows it, and the first flag there says
//! whether this one is in use. The walk reads large windows and only goes up, so it ends. The process runs meanwhile:
//! where a size makes no sense, the window is read again; if that does not help, the walk goes on where several chunks
//! in a row make sense.

use std::ops::Range;

use super::{Block, Target};
use crate::event::PAGE;

/// Bytes before the memory that the program gets: the sizes of the chunk before, if that is free, and of this one.
pub const HEADER: u64 = 16;
/// Size of the smallest chunk; all are multiples of [`HEADER`].
const MIN_CHUNK: u64 = 32;
/// Bytes of a free chunk that malloc_trim(3) keeps: `struct malloc_chunk`.
const FREE_HEADER: u64 = 48;
/// `PREV_INUSE`: the chunk before this one is in use.
const PREVIOUS_IN_USE: u64 = 1;
/// `IS_MMAPPED`: it has a mapping of its own.
const IS_MAPPED: u64 = 2;
const FLAGS: u64 = 7;

/// Bytes that are read at once: where chunks are large, only few are needed.
const MIN_WINDOW: u64 = 16 << 10;
const MAX_WINDOW: u64 = 1 << 20;
/// How often a place is read again.
const MAX_RETRIES: u32 = 3;
/// How many chunks in a row must make sense where the walk goes on.
const IN_A_ROW: u32 = 8;
/// How often a walk goes on, and how many bytes it skips each time at most.
const MAX_RESUMPTIONS: u32 = 64;
const MAX_SKIP: u64 = 4 << 20;
/// Bytes of a block that are read with it.
pub const HEAD: usize = 256;
/// Chunks, or places, between two looks at the clock.
const TURN: u64 = 1 << 14;

/// A part of an arena in one piece of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// With what is before the first chunk.
    pub range: Range<u64>,
    /// avma of the first chunk.
    pub first: u64,
    /// avma of the free chunk at its end, if it has that; `None` ends with two small ones.
    pub top: Option<u64>,
    /// Whether malloc_trim(3) gives pages of `top` back: those of the main arena only.
    pub is_main: bool,
}

/// Chunks, in bytes. The resident parts are those in pages that are in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chunks {
    pub used: u64,
    pub used_resident: u64,
    pub free: u64,
    pub free_resident: u64,
    /// Resident whole pages in free chunks.
    pub returnable: u64,
    /// What was not walked.
    pub lost: u64,
    pub lost_resident: u64,
}

impl Chunks {
    pub fn add(&mut self, other: &Chunks) {
        let add = |to: &mut u64, more: u64| *to = to.saturating_add(more);
        add(&mut self.used, other.used);
        add(&mut self.used_resident, other.used_resident);
        add(&mut self.free, other.free);
        add(&mut self.free_resident, other.free_resident);
        add(&mut self.returnable, other.returnable);
        add(&mut self.lost, other.lost);
        add(&mut self.lost_resident, other.lost_resident);
    }
}

/// A walk through a segment.
pub struct Walk<'a> {
    target: &'a Target<'a>,
    segment: &'a Segment,
    window: Vec<u8>,
    /// avma of its first byte.
    window_start: u64,
    /// Bytes to read next time.
    next_window: u64,
    /// Pages in memory around the last chunk.
    run: Range<u64>,
    /// The first bytes of the block whose chunk was read last.
    head: [u8; HEAD],
    head_length: usize,
    found: Chunks,
}

impl<'a> Walk<'a> {
    pub fn new(target: &'a Target<'a>, segment: &'a Segment) -> Walk<'a> {
        Walk {
            target,
            segment,
            window: Vec::new(),
            window_start: 0,
            next_window: MIN_WINDOW,
            run: 0..0,
            head: [0; HEAD],
            head_length: 0,
            found: Chunks::default(),
        }
    }

    /// Walks all chunks. `visit` gets those in use.
    pub fn run(mut self, visit: &mut dyn FnMut(Block)) -> Chunks {
        let end = self.segment.range.end;
        let (mut at, mut pending) = (self.segment.first, None::<u64>);
        let (mut resumptions, mut steps) = (0, 0u64);
        while at < end {
            // An arena may have many segments.
            if steps.is_multiple_of(TURN) && self.target.is_over() {
                break;
            }
            steps += 1;
            let Some((size, flags)) = self.chunk(at) else {
                if self.is_end(at) {
                    if let Some(before) = pending.take() {
                        self.count(before..at, true, visit);
                    }
                    return self.found;
                }
                resumptions += 1;
                let lost_from = pending.take().unwrap_or(at);
                let resumed = if resumptions <= MAX_RESUMPTIONS {
                    self.resume(at)
                } else {
                    None
                };
                self.lose(lost_from..resumed.unwrap_or(end));
                match resumed {
                    Some(next) => at = next,
                    None => return self.found,
                }
                continue;
            };
            if let Some(before) = pending.replace(at) {
                self.count(before..at, flags & PREVIOUS_IN_USE != 0, visit);
            }
            if self.segment.top == Some(at) {
                self.count(at..at + size, false, visit);
                pending = None;
                at += size;
                break;
            }
            self.copy_head(at, size);
            at += size;
        }
        self.lose(pending.unwrap_or(at).min(end)..end);
        self.found
    }

    /// Size and flags of the chunk at an address, if they make sense.
    fn chunk(&mut self, at: u64) -> Option<(u64, u64)> {
        let mut retries = 0;
        loop {
            if let Some(word) = self.word(at.checked_add(8)?)
                && let Some(size) = self.size(at, word)
            {
                return Some((size, word & FLAGS));
            }
            // Nothing is gained by reading again what is at the end, or not in memory.
            if retries == MAX_RETRIES || self.is_end(at) || !self.target.present.has(at, HEADER) {
                return None;
            }
            retries += 1;
            self.window.clear();
        }
    }

    fn size(&self, at: u64, word: u64) -> Option<u64> {
        let size = word & !FLAGS;
        let is_top = self.segment.top == Some(at);
        let is_sound =
            size.is_multiple_of(HEADER) && (size >= MIN_CHUNK || is_top && size > 0) && word & IS_MAPPED == 0;
        // A chunk does not reach into the last one.
        let end = match self.segment.top {
            Some(top) if at < top => top,
            _ => self.segment.range.end,
        };
        (is_sound && size <= end.checked_sub(at)?).then_some(size)
    }

    /// Whether this is where a segment without a free chunk at its end has small ones of no use (`sysmalloc`).
    fn is_end(&mut self, at: u64) -> bool {
        self.segment.top.is_none()
            && self.segment.range.end.saturating_sub(at) <= 2 * HEADER
            && self
                .word(at.saturating_add(8))
                .is_some_and(|word| word & !FLAGS <= HEADER)
    }

    /// A word of the heap; `None` if it is not in memory.
    fn word(&mut self, at: u64) -> Option<u64> {
        let bytes = self.bytes(at, 8)?.first_chunk()?;
        Some(u64::from_le_bytes(*bytes))
    }

    /// Bytes of the heap from `at` on, as many of `length` as are in memory and in the segment.
    fn bytes(&mut self, at: u64, length: u64) -> Option<&[u8]> {
        let end = self.window_start + self.window.len() as u64;
        let has_all = self.window_start <= at && at.checked_add(length)? <= end;
        // At the end of what is in memory, the window cannot be larger.
        let has_rest =
            (self.window_start..end).contains(&at) && end.is_multiple_of(PAGE) && !self.target.present.has(end, 1);
        if !has_all && !has_rest {
            let follows = at.checked_sub(self.window_start) <= Some(self.window.len() as u64 + MIN_WINDOW);
            self.next_window = if follows && !self.window.is_empty() {
                (self.next_window * 2).min(MAX_WINDOW)
            } else {
                MIN_WINDOW
            };
            // The page that it begins in, and those that follow while they are in memory.
            let start = at - at % PAGE;
            let end = start.saturating_add(self.next_window).min(self.segment.range.end);
            self.window.clear();
            let present = self.target.present.within(start..end).next()?;
            if present.start > at {
                return None;
            }
            self.window_start = present.start;
            self.window.resize((present.end - present.start) as usize, 0);
            if !self.target.memory.read(self.window_start, &mut self.window) {
                self.window.clear();
                return None;
            }
        }
        let skip = at.checked_sub(self.window_start)? as usize;
        let rest = self.window.get(skip..)?;
        Some(&rest[..rest.len().min(length as usize)])
    }

    /// Keeps the first bytes of a block: its chunk is counted when the next one has been read.
    fn copy_head(&mut self, at: u64, size: u64) {
        let mut head = self.head;
        // The last word of a chunk is the next one's.
        let length = (size - HEADER + 8).min(HEAD as u64);
        let bytes = self.bytes(at + HEADER, length).unwrap_or_default();
        let copied = bytes.len();
        if let Some(to) = head.get_mut(..copied) {
            to.copy_from_slice(bytes);
        }
        (self.head, self.head_length) = (head, copied);
    }

    /// The next place from which several chunks in a row make sense.
    fn resume(&mut self, from: u64) -> Option<u64> {
        let end = from.saturating_add(MAX_SKIP).min(self.segment.range.end);
        let mut at = from.checked_next_multiple_of(HEADER)?;
        let mut steps = 0u64;
        while at < end {
            steps += 1;
            if steps.is_multiple_of(TURN) && self.target.is_over() {
                return None;
            }
            if !self.target.present.has(at, HEADER) {
                // To the next page that is in memory.
                at = self
                    .target
                    .present
                    .within(at..end)
                    .next()?
                    .start
                    .checked_next_multiple_of(HEADER)?;
                continue;
            }
            if at > from && self.is_row(at) {
                return Some(at);
            }
            at += HEADER;
        }
        None
    }

    /// Whether some chunks in a row make sense, the sizes before free ones included.
    fn is_row(&mut self, first: u64) -> bool {
        let (mut at, mut before) = (first, 0);
        for _ in 0..IN_A_ROW {
            let word = self.word(at.saturating_add(8));
            let Some((word, size)) = word.and_then(|word| Some((word, self.size(at, word)?))) else {
                return false;
            };
            let is_after_free = before > 0 && word & PREVIOUS_IN_USE == 0;
            if is_after_free && self.word(at) != Some(before) {
                return false;
            }
            if self.segment.top == Some(at) {
                return true;
            }
            (at, before) = (at + size, size);
        }
        true
    }

    fn count(&mut self, range: Range<u64>, is_used: bool, visit: &mut dyn FnMut(Block)) {
        let bytes = range.end - range.start;
        let resident = self.resident(&range);
        if is_used {
            self.found.used += bytes;
            self.found.used_resident += resident;
            visit(Block {
                address: range.start + HEADER,
                bytes,
                is_mapped: false,
                head: self.head.get(..self.head_length).unwrap_or_default(),
            });
            return;
        }
        self.found.free += bytes;
        self.found.free_resident += resident;
        let is_top = self.segment.top == Some(range.start);
        let pages = (range.start + FREE_HEADER).next_multiple_of(PAGE)..range.end - range.end % PAGE;
        if pages.start < pages.end && (!is_top || self.segment.is_main) {
            self.found.returnable += self.resident(&pages);
        }
    }

    fn lose(&mut self, range: Range<u64>) {
        if range.start < range.end {
            self.found.lost += range.end - range.start;
            self.found.lost_resident += self.resident(&range);
        }
    }

    fn resident(&mut self, range: &Range<u64>) -> u64 {
        if self.run.start > range.start || range.end > self.run.end {
            let present = self.target.present;
            let all = range.start..self.segment.range.end;
            match present.within(all).next() {
                Some(run) if run.start == range.start && range.end <= run.end => self.run = run,
                _ => return present.bytes_in(range.clone()),
            }
        }
        range.end - range.start
    }
}
