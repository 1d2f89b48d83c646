//! Memory of a target, read while it runs.

use std::cell::RefCell;

use rustc_hash::FxHashMap;

use crate::event::PAGE;

/// Something with addresses and bytes: a live process or a tape.
pub trait Memory {
    /// Fills `buf` from `avma`; false if not all of it could be read.
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool;

    fn u64(&self, avma: u64) -> Option<u64> {
        let mut b = [0; 8];
        self.read(avma, &mut b).then(|| u64::from_le_bytes(b))
    }

    fn u32(&self, avma: u64) -> Option<u32> {
        let mut b = [0; 4];
        self.read(avma, &mut b).then(|| u32::from_le_bytes(b))
    }
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

/// Maximum number of cached pages.
const MAX_PAGES: usize = 1024;

/// Caches memory that does not change meanwhile: a system call costs more than copying a page.
pub struct Pages<'a> {
    memory: &'a dyn Memory,
    /// By address; `None`: not readable.
    known: RefCell<FxHashMap<u64, Option<Box<[u8]>>>>,
}

impl<'a> Pages<'a> {
    pub fn new(memory: &'a dyn Memory) -> Pages<'a> {
        Pages {
            memory,
            known: RefCell::default(),
        }
    }
}

impl Memory for Pages<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        let mut known = self.known.borrow_mut();
        in_pieces(avma, buf, PAGE, |start, skip, piece| {
            if known.len() >= MAX_PAGES {
                known.clear();
            }
            let page = known.entry(start).or_insert_with(|| {
                let mut page = vec![0; PAGE as usize].into_boxed_slice();
                self.memory.read(start, &mut page).then_some(page)
            });
            let Some(page) = page else { return false };
            piece.copy_from_slice(&page[skip..][..piece.len()]);
            true
        })
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
