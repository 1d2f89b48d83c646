//! Copies of machine code that is in no file, such as that of JIT compilers, for the unwinder.

use std::cell::RefCell;

use rustc_hash::FxHashMap;

use crate::event::PAGE;
use crate::process::memory::Memory;

/// How long a copy is used, ns of the samples' clock: compilers add code to a page, and replace code.
const MAX_AGE: u64 = 100_000_000;
/// Pages copied per process; past this they are copied again.
const MAX_PAGES: usize = 4096;

/// A page, or as much of it as was readable.
struct Page {
    bytes: Vec<u8>,
    time: u64,
}

/// Pages of code of one process.
#[derive(Default)]
pub(super) struct CodeCopies(RefCell<FxHashMap<u64, Page>>);

impl CodeCopies {
    /// Drops the pages: they are copied again.
    pub(super) fn clear(&mut self) {
        *self.0.get_mut() = FxHashMap::default();
    }

    /// Copies code at the time of a sample, as much as is readable from `avma` on; returns the bytes copied.
    pub(super) fn read(&self, memory: &dyn Memory, time: u64, avma: u64, out: &mut [u8]) -> usize {
        let mut pages = self.0.borrow_mut();
        let mut copied = 0;
        while copied < out.len() {
            let Some(at) = avma.checked_add(copied as u64) else {
                break;
            };
            let start = at - at % PAGE;
            if pages
                .get(&start)
                .is_none_or(|page| time.saturating_sub(page.time) > MAX_AGE)
            {
                if pages.len() >= MAX_PAGES {
                    pages.clear();
                }
                let mut bytes = vec![0; PAGE as usize];
                if !memory.read(start, &mut bytes) {
                    bytes.clear();
                }
                pages.insert(start, Page { bytes, time });
            }
            let page = pages
                .get(&start)
                .and_then(|page| page.bytes.get((at - start) as usize..));
            let bytes = page.unwrap_or_default();
            let len = bytes.len().min(out.len() - copied);
            out[copied..copied + len].copy_from_slice(&bytes[..len]);
            copied += len;
            if len == 0 {
                break;
            }
        }
        copied
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Pages 16 and 17, full of a byte that can be changed.
    struct Code(Cell<u8>);

    impl Memory for Code {
        fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
            buf.fill(self.0.get());
            (16 * PAGE..18 * PAGE).contains(&avma)
        }
    }

    #[test]
    fn copies_are_used_for_a_while() {
        let (code, copies) = (Code(Cell::new(1)), CodeCopies::default());
        let read = |time: u64, avma: u64| {
            let mut out = [0; 8];
            let len = copies.read(&code, time, avma, &mut out);
            (len, out)
        };
        let start = 1 << 40;
        assert_eq!(read(start, 17 * PAGE - 4), (8, [1; 8]), "over two pages");
        assert_eq!(read(start, 18 * PAGE - 3), (3, [1, 1, 1, 0, 0, 0, 0, 0]));
        assert_eq!(read(start, 18 * PAGE).0, 0);
        assert_eq!(read(start, u64::MAX - 2).0, 0);
        code.0.set(2);
        assert_eq!(read(start + MAX_AGE, 16 * PAGE), (8, [1; 8]));
        assert_eq!(read(start + MAX_AGE + 1, 16 * PAGE), (8, [2; 8]));
    }
}
