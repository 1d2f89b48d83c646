//! Memory mappings of the log: rows, and a hold on its file.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::{NonNull, null_mut};

/// Bytes of a page; a late thread gets one.
pub const PAGE: usize = 4096;

/// Memory from the kernel: nothing in the program's heap is touched.
pub struct AnonymousMapping {
    pub start: NonNull<u8>,
    pub length: usize,
}

// SAFETY: plain memory; who uses which part of it is the log's business.
unsafe impl Send for AnonymousMapping {}
// SAFETY: as above.
unsafe impl Sync for AnonymousMapping {}

impl AnonymousMapping {
    /// `length` bytes, all zero; `None` if there is no memory for them.
    pub fn new(length: usize) -> Option<AnonymousMapping> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, wherever the kernel puts it.
        let start = unsafe { libc::mmap(null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        // Threads and large chunks would else be given 2 MiB at a time.
        // SAFETY: the mapping just made; a kernel that does not know the advice refuses it.
        unsafe { libc::madvise(start, length, libc::MADV_NOHUGEPAGE) };
        Some(AnonymousMapping {
            start: NonNull::new(start.cast())?,
            length,
        })
    }
}

impl AnonymousMapping {
    /// A page of a file that is never accessed. It keeps the file's inode, and so its number, in use when the program
    /// closes all descriptors: else the next file that it makes may get the same number.
    pub fn of_file(file: &File) -> Option<AnonymousMapping> {
        // SAFETY: a new mapping, wherever the kernel puts it.
        let start = unsafe {
            libc::mmap(
                null_mut(),
                PAGE,
                libc::PROT_NONE,
                libc::MAP_PRIVATE,
                file.as_raw_fd(),
                0,
            )
        };
        (start != libc::MAP_FAILED).then_some(())?;
        Some(AnonymousMapping {
            start: NonNull::new(start.cast())?,
            length: PAGE,
        })
    }
}

impl Drop for AnonymousMapping {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which nothing refers to any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}
