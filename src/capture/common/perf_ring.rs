//! Reader of a perf event's ring buffer: the only code that touches its shared memory.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sys;
use crate::sys::perf::perf;

/// A mapped ring buffer and the event it belongs to.
pub struct Ring {
    event: OwnedFd,
    page: *mut u8,
    data: usize,
    record: Vec<u8>,
}

// SAFETY: the mapping belongs to this value alone and stays in place when the value moves to another thread.
unsafe impl Send for Ring {}

impl Ring {
    /// Maps a ring of `pages` data pages (a power of two) for `event`.
    pub fn new(event: OwnedFd, pages: usize) -> io::Result<Ring> {
        let size = sys::memory::page_size();
        let page = sys::memory::map_shared(event.as_fd(), (pages + 1) * size)?;
        Ok(Ring {
            event,
            page,
            data: pages * size,
            record: Vec::new(),
        })
    }

    /// Becomes readable when a record is waiting.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn header(&self) -> (&AtomicU64, &AtomicU64) {
        let page = self.page.cast::<perf::perf_event_mmap_page>();
        // SAFETY: the first page of the mapping is this structure; head is written by the kernel, tail by us, both
        // are aligned words that live as long as the mapping.
        unsafe {
            (
                AtomicU64::from_ptr(&raw mut (*page).data_head),
                AtomicU64::from_ptr(&raw mut (*page).data_tail),
            )
        }
    }

    fn copy(&mut self, at: u64, len: usize) {
        let start = (at % self.data as u64) as usize;
        let first = len.min(self.data - start);
        self.record.clear();
        // SAFETY: data begins one page into the mapping and is `self.data` bytes long; both pieces lie within. The
        // kernel does not write between tail and head.
        unsafe {
            let data = self.page.add(sys::memory::page_size());
            self.record
                .extend_from_slice(std::slice::from_raw_parts(data.add(start), first));
            self.record
                .extend_from_slice(std::slice::from_raw_parts(data, len - first));
        }
    }

    /// Passes each waiting record (type, misc, body without header) to `sink`.
    pub fn drain(&mut self, mut sink: impl FnMut(u32, u16, &[u8])) {
        let head = self.header().0.load(Ordering::Acquire);
        let mut tail = self.header().1.load(Ordering::Relaxed);
        while head.wrapping_sub(tail) >= 8 {
            self.copy(tail, 8);
            let kind = u32::from_le_bytes(self.record[..4].try_into().expect("four bytes"));
            let len = usize::from(u16::from_le_bytes([self.record[6], self.record[7]]));
            if len < 8 || len as u64 > head.wrapping_sub(tail) {
                break; // cannot happen with a sane kernel; never loop on it
            }
            let misc = u16::from_le_bytes([self.record[4], self.record[5]]);
            self.copy(tail, len);
            sink(kind, misc, &self.record[8..]);
            tail = tail.wrapping_add(len as u64);
        }
        self.header().1.store(head, Ordering::Release);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly what `new` mapped; nothing borrows from it any more.
        unsafe { libc::munmap(self.page.cast(), self.data + sys::memory::page_size()) };
    }
}
