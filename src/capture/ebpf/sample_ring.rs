//! The ring of samples. They can be moved to memory while the session is busy: the ring is small.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};

use aya::maps::{MapData, RingBuf};

use super::sideband_rings::SidebandRings;
use crate::capture::Buffering;

/// Maximum number of bytes in memory: a thousand samples. More stay in the ring.
const MAX_BYTES: usize = 16 << 20;

/// Entries of the program, in their order.
pub struct SampleRing {
    ring: RingBuf<MapData>,
    /// Moved from the ring.
    moved: VecDeque<Box<[u8]>>,
    /// Bytes of them.
    bytes: usize,
}

impl SampleRing {
    pub fn new(ring: RingBuf<MapData>) -> SampleRing {
        SampleRing {
            ring,
            moved: VecDeque::new(),
            bytes: 0,
        }
    }

    /// Becomes readable when an entry is to be handled at once.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// Whether entries are in memory.
    pub fn has_moved(&self) -> bool {
        !self.moved.is_empty()
    }

    /// Passes the next entry, and returns its bytes; `None`: there is none.
    pub fn next(&mut self, take: impl FnOnce(&[u8])) -> Option<usize> {
        if let Some(entry) = self.moved.pop_front() {
            self.bytes -= entry.len();
            take(&entry);
            return Some(entry.len());
        }
        let entry = self.ring.next()?;
        take(&entry);
        Some(entry.len())
    }

    fn move_to_memory(&mut self) {
        while self.bytes < MAX_BYTES
            && let Some(entry) = self.ring.next()
        {
            self.bytes += entry.len();
            self.moved.push_back(entry.to_vec().into());
        }
    }
}

/// The rings of samples and of sideband records.
pub struct Rings<'a> {
    pub samples: &'a mut SampleRing,
    pub sideband: &'a mut SidebandRings,
}

impl Buffering for Rings<'_> {
    fn buffer(&mut self) {
        self.samples.move_to_memory();
        self.sideband.move_to_memory();
    }
}
