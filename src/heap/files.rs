//! Bytes of mapped files, for pages that a process does not have in memory. After `fork` a child has none of the pages that can
//! be read from a file again (`vma_needs_copy`, mm/memory.c, Linux 6.18), such as the names of built-in types; and the kernel
//! takes them back when memory is short.

use std::cell::{Cell, RefCell};

use rustc_hash::FxHashMap;

use crate::event::PAGE;
use crate::process::file_content::Content;
use crate::process::memory::{Memory, in_pieces};
use crate::process::smaps::{Area, Smaps};

/// Pages that are read: 32 MiB.
const MAX_PAGES: usize = 1 << 13;
/// Mappings of which the files are open: a process may open 1024 by default.
const MAX_FILES: usize = 512;

/// What a process has in memory, and for the rest what it would read from its files. Nothing is brought into the target.
///
/// A page that the process writes while it is read may be seen as it was before.
pub struct FileBackedMemory<'a> {
    memory: &'a dyn Memory,
    smaps: &'a Smaps,
    open: &'a dyn Fn(&Area) -> Content,
    /// By the start of their mapping.
    files: RefCell<FxHashMap<u64, Content>>,
    /// By address; `None`: it cannot be read.
    pages: RefCell<FxHashMap<u64, Option<Box<[u8]>>>>,
    is_exceeded: Cell<bool>,
}

impl<'a> FileBackedMemory<'a> {
    /// `memory` is read first. `smaps` are the mappings of the process; `open` opens the file of one.
    pub fn new(memory: &'a dyn Memory, smaps: &'a Smaps, open: &'a dyn Fn(&Area) -> Content) -> FileBackedMemory<'a> {
        FileBackedMemory {
            memory,
            smaps,
            open,
            files: RefCell::default(),
            pages: RefCell::default(),
            is_exceeded: Cell::new(false),
        }
    }

    /// Whether there were more pages to read from files than are read.
    pub fn is_exceeded(&self) -> bool {
        self.is_exceeded.get()
    }

    /// The mapping at an address if what it has not in memory is in its file. Pages that were written may be swapped out.
    fn area_of(&self, avma: u64) -> Option<&Area> {
        let area = self.smaps.area_of(avma)?;
        (area.is_file && area.is_readable && !area.is_shared && area.usage.swap == 0).then_some(area)
    }

    /// Reads a page of an area from its file.
    fn read_page(&self, area: &Area, page: u64) -> Option<Box<[u8]>> {
        let mut files = self.files.borrow_mut();
        if files.len() >= MAX_FILES && !files.contains_key(&area.start) {
            self.is_exceeded.set(true);
            return None;
        }
        let file = files.entry(area.start).or_insert_with(|| (self.open)(area));
        let mut bytes = vec![0; PAGE as usize];
        let at = area.offset.checked_add(page.checked_sub(area.start)?)?;
        let length = file.read_at(at, &mut bytes).ok()?;
        // Behind the end of the file the last page has zeros.
        (length > 0).then(|| bytes.into_boxed_slice())
    }

    /// Fills `buf` from a place within a page.
    fn read_file(&self, page: u64, skip: usize, buf: &mut [u8]) -> bool {
        let Some(area) = self.area_of(page) else { return false };
        let mut pages = self.pages.borrow_mut();
        if pages.len() >= MAX_PAGES && !pages.contains_key(&page) {
            self.is_exceeded.set(true);
            return false;
        }
        let bytes = pages.entry(page).or_insert_with(|| self.read_page(area, page));
        let piece = bytes.as_ref().and_then(|bytes| bytes.get(skip..skip + buf.len()));
        piece.map(|piece| buf.copy_from_slice(piece)).is_some()
    }
}

impl Memory for FileBackedMemory<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        self.memory.read(avma, buf)
            || in_pieces(avma, buf, PAGE, |page, skip, piece| {
                self.memory.read(page + skip as u64, piece) || self.read_file(page, skip, piece)
            })
    }

    /// Pieces are parts of the heap, which is in no file.
    fn read_pieces(&self, pieces: &[(u64, usize)], buf: &mut [u8]) -> usize {
        self.memory.read_pieces(pieces, buf)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// One page is in memory; each byte is 7.
    struct Seven(u64);

    impl Memory for Seven {
        fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
            buf.fill(7);
            avma >= self.0 && avma.saturating_add(buf.len() as u64) <= self.0 + PAGE
        }
    }

    #[test]
    fn what_is_not_in_memory_is_read_from_files() {
        let text = b"10000-14000 r--p 00001000 fd:01 42 /a\nRss: 4 kB\n\
            20000-21000 rw-s 00000000 fd:01 42 /a\nRss: 0 kB\n\
            30000-31000 rw-p 00000000 fd:01 42 /a\nRss: 0 kB\nSwap: 4 kB\n\
            40000-41000 ---p 00000000 fd:01 42 /a\n50000-51000 rw-p 00000000 00:00 0\n";
        let smaps = Smaps::read(&text[..]).expect("bytes");
        let mut bytes = vec![1; 4096];
        bytes.extend([2; 4096]);
        bytes.extend([3; 4096]);
        bytes.extend([4; 100]);
        let opened = Cell::new(0);
        let open = |_: &Area| {
            opened.set(opened.get() + 1);
            Content::Bytes(Arc::new(bytes.clone().into()))
        };
        let memory = FileBackedMemory::new(&Seven(0x11000), &smaps, &open);
        for (avma, expected) in [
            (0x10000, Some([2; 4])),
            (0x10ffe, Some([2, 2, 7, 7])),
            (0x11ffc, Some([7; 4])),
            (0x11ffd, Some([7, 7, 7, 4])),
            (0x12062, Some([4, 4, 0, 0])),
            (0x13000, None), // behind the end of the file
            (0x0fffe, None),
            (0x20000, None), // another process may have written it
            (0x30000, None), // it may be swapped out
            (0x40000, None),
            (0x50000, None),
            (u64::MAX - 1, None),
        ] {
            let mut found = [0; 4];
            let is_read = memory.read(avma, &mut found);
            assert_eq!(is_read.then_some(found), expected, "{avma:x}");
        }
        assert_eq!(opened.get(), 1);
        assert!(!memory.is_exceeded());
    }
}
