//! Memory of a target, read while it runs.

use std::cell::RefCell;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::event::{PAGE, Pid};

/// Something with addresses and bytes: a live process or a tape.
pub trait Memory {
    /// Fills `buf` from `avma`; false if not all of it could be read.
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool;

    /// Copies pieces (address and length each) one after the other into `buf`, up to the first that cannot be read; returns the
    /// bytes copied.
    fn read_pieces(&self, pieces: &[(u64, usize)], buf: &mut [u8]) -> usize {
        let mut copied = 0;
        for (at, length) in pieces {
            let room = buf.get_mut(copied..copied + length);
            if !room.is_some_and(|room| self.read(*at, room)) {
                break;
            }
            copied += length;
        }
        copied
    }

    fn u64(&self, avma: u64) -> Option<u64> {
        read_array(self, avma).map(u64::from_le_bytes)
    }

    fn u32(&self, avma: u64) -> Option<u32> {
        read_array(self, avma).map(u32::from_le_bytes)
    }

    /// Where to note what of the memory is used, if that is wanted.
    fn use_log(&self) -> Option<UseLog<'_>> {
        None
    }
}

/// Which parts of memory were used that was read as whole pages.
#[derive(Default)]
pub struct UsedMemory {
    /// Process, address and length of these reads, and how many there were.
    whole: FxHashMap<(Pid, u64, usize), u32>,
    /// Process and address of used bytes, which are [`UsedMemory::LINE`] each.
    lines: FxHashSet<(Pid, u64)>,
}

impl UsedMemory {
    pub const LINE: u64 = 16;

    /// How often a range was read only because it has something that was needed.
    pub fn whole_reads(&self, pid: Pid, avma: u64, len: usize) -> u32 {
        self.whole.get(&(pid, avma, len)).copied().unwrap_or(0)
    }

    /// Clears what was not used of the bytes read at an address.
    pub fn clear_unused(&self, pid: Pid, avma: u64, bytes: &mut [u8]) {
        let is_unused = |line: u64| !self.lines.contains(&(pid, line));
        in_pieces(avma, bytes, UsedMemory::LINE, |line, _, piece| {
            if is_unused(line) {
                piece.fill(0);
            }
            true
        });
    }
}

/// The log of one process's memory.
#[derive(Clone, Copy)]
pub struct UseLog<'a> {
    pub log: &'a RefCell<UsedMemory>,
    pub pid: Pid,
}

impl UseLog<'_> {
    fn add_read(&self, avma: u64, len: usize) {
        *self.log.borrow_mut().whole.entry((self.pid, avma, len)).or_default() += 1;
    }

    fn add_use(&self, avma: u64, len: usize) {
        let end = avma.saturating_add(len as u64);
        let lines = (avma - avma % UsedMemory::LINE..end).step_by(UsedMemory::LINE as usize);
        self.log.borrow_mut().lines.extend(lines.map(|line| (self.pid, line)));
    }
}

fn read_array<const N: usize>(memory: &(impl Memory + ?Sized), avma: u64) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    memory.read(avma, &mut bytes).then_some(bytes)
}

/// The bytes from `avma` up to the first zero byte, and `max` of them if none is among these. `None`: they cannot be read.
pub fn read_to_zero(memory: &dyn Memory, avma: u64, max: usize) -> Option<Vec<u8>> {
    let (mut bytes, mut at) = (Vec::new(), avma);
    while bytes.len() < max {
        // Up to the end of a page at a time: the next one may not be readable.
        let from = bytes.len();
        let length = (PAGE - at % PAGE).min((max - from) as u64);
        bytes.resize(from + length as usize, 0);
        let piece = bytes.get_mut(from..)?;
        memory.read(at, piece).then_some(())?;
        if let Some(end) = piece.iter().position(|byte| *byte == 0) {
            bytes.truncate(from + end);
            break;
        }
        at = at.checked_add(length)?;
    }
    Some(bytes)
}

/// Memory of which nothing can be read.
#[cfg(test)]
pub struct NoMemory;

#[cfg(test)]
impl Memory for NoMemory {
    fn read(&self, _: u64, _: &mut [u8]) -> bool {
        false
    }
}

/// Bytes that are read at once where pages next to each other are needed.
const BLOCK: u64 = 16 * PAGE;
/// Pages that are read one by one before any block: who needs a few words must not copy much.
const MIN_PAGES: usize = 16;
/// Maximum number of cached bytes.
const MAX_BYTES: usize = 32 << 20;
/// Maximum number of pages that are read together because they will be needed.
const MAX_FIRST: usize = 128;

/// Caches memory that does not change meanwhile: a system call costs more than copying a page.
pub struct Pages<'a> {
    memory: &'a dyn Memory,
    log: Option<UseLog<'a>>,
    known: RefCell<KnownPages>,
}

/// What has been read, by address.
#[derive(Default)]
struct KnownPages {
    blocks: FxHashMap<u64, Block>,
    /// Whole blocks with their addresses, and which was used last.
    whole: Vec<(u64, Box<[u8]>)>,
    last: usize,
    /// Outside of whole blocks.
    pages: FxHashMap<u64, KnownPage>,
    /// What is in them.
    single: Vec<u8>,
    /// How many of them were read together.
    first: usize,
    bytes: usize,
}

struct KnownPage {
    /// Its place among the bytes of single pages; `None`: not readable.
    place: Option<usize>,
    is_used: bool,
}

enum Block {
    /// One of its pages, or several, are known.
    InPages,
    /// The same; not all of it can be read.
    WithHoles,
    /// Its index among the whole ones.
    Whole(usize),
}

impl<'a> Pages<'a> {
    pub fn new(memory: &'a dyn Memory) -> Pages<'a> {
        Pages {
            memory,
            log: memory.use_log(),
            known: RefCell::default(),
        }
    }

    /// The same, with these pages in ascending order, which are read together now: those that an earlier reading has
    /// [`used`](Pages::used).
    pub fn with_first(memory: &'a dyn Memory, starts: &[u64]) -> Pages<'a> {
        let mut known = KnownPages::default();
        known.read_together(memory, &starts[..starts.len().min(MAX_FIRST)]);
        Pages {
            memory,
            log: memory.use_log(),
            known: RefCell::new(known),
        }
    }

    /// Pages that were used so far and can be read, in ascending order; of many only some.
    pub fn used(&self) -> Vec<u64> {
        let known = self.known.borrow();
        let used = known
            .pages
            .iter()
            .filter(|(_, page)| page.is_used && page.place.is_some());
        let mut starts: Vec<u64> = used.map(|(start, _)| *start).collect();
        starts.sort_unstable();
        starts.truncate(MAX_FIRST);
        starts
    }
}

impl KnownPages {
    /// Copies a part of the page at `start`.
    fn copy(&mut self, memory: &dyn Memory, start: u64, skip: usize, piece: &mut [u8]) -> bool {
        let at = start - start % BLOCK;
        if let Some(block) = self.whole_block(at) {
            piece.copy_from_slice(&block[(start - at) as usize + skip..][..piece.len()]);
            return true;
        }
        if !self.pages.contains_key(&start) {
            if self.read_block(memory, at) {
                return self.copy(memory, start, skip, piece);
            }
            self.read_page(memory, start);
        }
        let Some(page) = self.pages.get_mut(&start) else {
            return false;
        };
        page.is_used = true;
        let Some(place) = page.place else { return false };
        piece.copy_from_slice(&self.single[place + skip..][..piece.len()]);
        true
    }

    fn read_page(&mut self, memory: &dyn Memory, start: u64) {
        self.reserve(PAGE as usize);
        let place = self.single.len();
        self.single.resize(place + PAGE as usize, 0);
        log_read(memory, start, PAGE as usize);
        let is_readable = memory.read(start, &mut self.single[place..]);
        let page = KnownPage {
            place: is_readable.then_some(place),
            is_used: false,
        };
        self.pages.insert(start, page);
    }

    /// Reads single pages with one call, up to the first that cannot be read.
    fn read_together(&mut self, memory: &dyn Memory, starts: &[u64]) {
        if starts.is_empty() {
            return;
        }
        self.bytes = starts.len() * PAGE as usize;
        self.single = vec![0; self.bytes];
        let pieces = ranges(starts, PAGE as usize);
        pieces.iter().for_each(|(at, length)| log_read(memory, *at, *length));
        let copied = memory.read_pieces(&pieces, &mut self.single);
        let places = (0..copied / PAGE as usize).map(|n| n * PAGE as usize);
        for (start, place) in starts.iter().zip(places) {
            let page = KnownPage {
                place: Some(place),
                is_used: false,
            };
            self.pages.insert(*start, page);
        }
        self.first = self.pages.len();
    }

    /// Bytes of the whole block that was used last.
    fn in_last<const N: usize>(&self, avma: u64) -> Option<[u8; N]> {
        let (at, bytes) = self.whole.get(self.last)?;
        let skip = usize::try_from(avma.checked_sub(*at)?).ok()?;
        bytes.get(skip..)?.first_chunk().copied()
    }

    fn whole_block(&mut self, at: u64) -> Option<&[u8]> {
        let is_last = self.whole.get(self.last).is_some_and(|(last, _)| *last == at);
        if !is_last {
            let Some(Block::Whole(index)) = self.blocks.get(&at) else {
                return None;
            };
            self.last = *index;
        }
        self.whole.get(self.last).map(|(_, bytes)| &**bytes)
    }

    /// Reads the block at `at` when a second page of it is needed. False: it is not whole.
    fn read_block(&mut self, memory: &dyn Memory, at: u64) -> bool {
        if self.pages.len() < self.first + MIN_PAGES {
            return false;
        }
        match self.blocks.get(&at) {
            Some(Block::InPages) => {}
            Some(_) => return false,
            None => {
                self.blocks.insert(at, Block::InPages);
                return false;
            }
        }
        let Some(mut bytes) = read(memory, at, BLOCK) else {
            self.blocks.insert(at, Block::WithHoles);
            return false;
        };
        // What has been read of it before remains as it was.
        for (start, bytes) in (at..).step_by(PAGE as usize).zip(bytes.chunks_mut(PAGE as usize)) {
            if let Some(place) = self.pages.get(&start).and_then(|page| page.place) {
                bytes.copy_from_slice(&self.single[place..][..PAGE as usize]);
            }
        }
        self.reserve(BLOCK as usize);
        self.blocks.insert(at, Block::Whole(self.whole.len()));
        self.whole.push((at, bytes));
        true
    }

    /// Makes room for so many bytes.
    fn reserve(&mut self, bytes: usize) {
        if self.bytes + bytes > MAX_BYTES {
            *self = KnownPages::default();
        }
        self.bytes += bytes;
    }
}

/// Pieces of one size, in ascending order, as address and length; those next to each other are one.
fn ranges(starts: &[u64], size: usize) -> Vec<(u64, usize)> {
    let mut ranges: Vec<(u64, usize)> = Vec::with_capacity(starts.len());
    for start in starts {
        match ranges.last_mut() {
            Some((at, length)) if at.checked_add(*length as u64) == Some(*start) => *length += size,
            _ => ranges.push((*start, size)),
        }
    }
    ranges
}

fn log_read(memory: &dyn Memory, start: u64, bytes: usize) {
    if let Some(log) = memory.use_log() {
        log.add_read(start, bytes);
    }
}

fn read(memory: &dyn Memory, start: u64, bytes: u64) -> Option<Box<[u8]>> {
    log_read(memory, start, bytes as usize);
    let mut read = vec![0; bytes as usize].into_boxed_slice();
    memory.read(start, &mut read).then_some(read)
}

impl Pages<'_> {
    #[inline]
    fn log_use(&self, avma: u64, len: usize) {
        if let Some(log) = self.log {
            log.add_use(avma, len);
        }
    }
}

impl Memory for Pages<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        self.log_use(avma, buf.len());
        let mut known = self.known.borrow_mut();
        in_pieces(avma, buf, PAGE, |start, skip, piece| {
            known.copy(self.memory, start, skip, piece)
        })
    }

    /// They are read as they are now, and not kept: pieces that are read together lie apart, each on a page of which
    /// nothing else is needed.
    fn read_pieces(&self, pieces: &[(u64, usize)], buf: &mut [u8]) -> usize {
        self.memory.read_pieces(pieces, buf)
    }

    // Most of what is read are words next to the last one.

    fn u64(&self, avma: u64) -> Option<u64> {
        self.log_use(avma, 8);
        let found = self.known.borrow().in_last(avma);
        found.or_else(|| read_array(self, avma)).map(u64::from_le_bytes)
    }

    fn u32(&self, avma: u64) -> Option<u32> {
        self.log_use(avma, 4);
        let found = self.known.borrow().in_last(avma);
        found.or_else(|| read_array(self, avma)).map(u32::from_le_bytes)
    }
}

/// Fills `buf` from `avma` in pieces that do not cross a multiple of `size` (bytes). `fill` gets the multiple, the
/// offset of the piece above it, and the piece. False, as from `fill`: it could not be read.
#[inline]
pub fn in_pieces(avma: u64, buf: &mut [u8], size: u64, mut fill: impl FnMut(u64, usize, &mut [u8]) -> bool) -> bool {
    let (mut at, mut rest) = (avma, buf);
    while !rest.is_empty() {
        let skip = at % size;
        let n = rest.len().min((size - skip) as usize);
        let (piece, tail) = rest.split_at_mut(n);
        if !fill(at - skip, skip as usize, piece) {
            return false;
        }
        rest = tail;
        match at.checked_add(n as u64) {
            Some(next) => at = next,
            None => return rest.is_empty(),
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Readable below 3 pages; each byte is the number of its page.
    struct Three(RefCell<u32>);

    impl Memory for Three {
        fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
            *self.0.borrow_mut() += 1;
            for (i, b) in buf.iter_mut().enumerate() {
                *b = (avma.wrapping_add(i as u64) / PAGE) as u8;
            }
            avma.checked_add(buf.len() as u64).is_some_and(|end| end <= 3 * PAGE)
        }
    }

    #[test]
    fn text_ends_at_a_zero_byte_or_where_it_is_too_long() {
        let memory = Three(RefCell::default());
        for (avma, max, expected) in [
            (PAGE - 1, 4, Some(&[][..])),
            (2 * PAGE - 2, 4, Some(&[1, 1, 2, 2])),
            (3 * PAGE - 2, 2, Some(&[2, 2])),
            (3 * PAGE - 2, 3, None),
            (u64::MAX, 4, None),
        ] {
            assert_eq!(read_to_zero(&memory, avma, max).as_deref(), expected, "{avma:x} {max}");
        }
    }

    /// Readable everywhere, with a log.
    struct Logged(RefCell<UsedMemory>);

    impl Memory for Logged {
        fn read(&self, _: u64, buf: &mut [u8]) -> bool {
            buf.fill(1);
            true
        }

        fn use_log(&self) -> Option<UseLog<'_>> {
            Some(UseLog { log: &self.0, pid: 1 })
        }
    }

    #[test]
    fn what_is_not_used_of_a_page_is_cleared() {
        let memory = Logged(RefCell::default());
        let pages = Pages::new(&memory);
        assert!(pages.u64(PAGE + 24).is_some() && pages.u32(PAGE + 62).is_some());
        let used = memory.0.borrow();
        assert_eq!(used.whole_reads(1, PAGE, PAGE as usize), 1);
        assert_eq!(used.whole_reads(2, PAGE, PAGE as usize), 0);
        let mut bytes = vec![1; PAGE as usize];
        used.clear_unused(1, PAGE, &mut bytes);
        let left: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at] == 1).collect();
        assert_eq!(left, (16..32).chain(48..80).collect::<Vec<_>>());
    }

    /// Readable except for its page 70; each page has the number of the reads until it was read. The lengths of all reads.
    #[derive(Default)]
    struct Counted(RefCell<Vec<u64>>);

    impl Memory for Counted {
        fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
            let mut reads = self.0.borrow_mut();
            reads.push(buf.len() as u64);
            buf.fill(reads.len() as u8);
            !(avma..avma + buf.len() as u64).contains(&(70 * PAGE))
        }
    }

    #[test]
    fn pages_next_to_each_other_are_read_together() {
        let memory = Counted::default();
        let pages = Pages::new(&memory);
        let byte = |page: u64| {
            let mut b = [0];
            pages.read(page * PAGE + 8, &mut b).then_some(b[0])
        };
        let reads = || std::mem::take(&mut *memory.0.borrow_mut());
        for page in 0..MIN_PAGES as u64 {
            byte(page);
        }
        assert_eq!(reads(), [PAGE; MIN_PAGES], "few pages");
        assert_eq!(byte(40), Some(1));
        assert_eq!(reads(), [PAGE], "the first one of its block");
        assert_eq!((byte(47), byte(32), byte(40)), (Some(1), Some(1), Some(1)));
        assert_eq!(reads(), [BLOCK]);
        assert_eq!((byte(40), byte(47)), (Some(1), Some(1)), "as it was read first");
        let at = |at: u64| (pages.u32(at), pages.u64(at - 4));
        assert_eq!(at(47 * PAGE), (Some(0x0101_0101), Some(0x0101_0101_0101_0101)));
        assert!(reads().is_empty());
        for page in [64, 79, 70, 71, 70] {
            assert_eq!(byte(page).is_none(), page == 70);
        }
        assert_eq!(reads(), [PAGE, BLOCK, PAGE, PAGE, PAGE], "a block with a hole");
    }

    #[test]
    fn cached_memory_is_bounded() {
        let memory = Counted::default();
        let pages = Pages::new(&memory);
        for page in 0..3 * MAX_BYTES as u64 / PAGE {
            pages.u32(page * PAGE);
            let known = pages.known.borrow();
            let whole: usize = known.whole.iter().map(|(_, bytes)| bytes.len()).sum();
            assert!(whole + known.pages.len() * PAGE as usize <= MAX_BYTES);
        }
    }

    #[test]
    fn pages_are_read_once() {
        let memory = Three(RefCell::default());
        let pages = Pages::new(&memory);
        for _ in 0..3 {
            let mut b = [0; 4];
            assert!(pages.read(2 * PAGE - 2, &mut b));
            assert_eq!(b, [1, 1, 2, 2]);
            assert!(!pages.read(3 * PAGE - 2, &mut b), "the last two bytes are unmapped");
            assert!(!pages.read(u64::MAX - 1, &mut b));
        }
        assert_eq!(*memory.0.borrow(), 4);
    }
}
