//! The pages of a process that are in memory, and memory of which only these are read: reading a page that was never written maps
//! one of zeros in the target, and one that was swapped out would come back.

use std::ops::Range;

use super::python::ResidentPages;
use crate::error::Result;
use crate::event::{Pid, Tid};
use crate::process::file_content::Content;
use crate::process::memory::Memory;
use crate::process::root::Root;
use crate::process::smaps::Smaps;
use crate::process::system::{FileKey, LiveSystem, System, maps_error};
use crate::sys::pagemap::PageMap;

/// Ranges that are kept. Where memory is more scattered, the rest counts as not in memory.
const MAX_RANGES: usize = 1 << 20;
/// Pages that are looked at one by one on kernels that list no ranges: 64 GiB, in about a second.
const MAX_ENTRIES: u64 = 1 << 24;

/// Ranges of pages that are in memory.
#[derive(Debug, Default)]
pub struct Present {
    /// In ascending order, not overlapping, not adjacent.
    ranges: Vec<Range<u64>>,
    /// False: there are more than were looked for.
    pub is_complete: bool,
}

impl Present {
    /// Looks up the pages of all mappings that have resident ones.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    pub fn of(pid: Pid, smaps: &Smaps) -> Result<Present> {
        let mut pages = PageMap::open(pid).map_err(|e| maps_error(pid, e))?;
        let mut present = Present {
            ranges: Vec::new(),
            is_complete: true,
        };
        let mut entries = MAX_ENTRIES;
        for area in smaps.areas.iter().filter(|area| area.usage.rss > 0) {
            let mut add = |range: Range<u64>| present.add(range);
            let is_whole = pages
                .present(area.start..area.end, &mut entries, &mut add)
                .map_err(|e| maps_error(pid, e))?;
            present.is_complete &= is_whole;
        }
        Ok(present)
    }

    /// Adds a range behind all others; false if there are too many.
    fn add(&mut self, range: Range<u64>) -> bool {
        let is_full = self.ranges.len() >= MAX_RANGES;
        match self.ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            Some(last) if last.end > range.start => {}
            _ if is_full => return false,
            _ => self.ranges.push(range),
        }
        true
    }

    /// The parts of a range that are in memory, in ascending order.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let first = self.ranges.partition_point(|r| r.end <= range.start);
        let rest = self.ranges.get(first..).unwrap_or_default();
        rest.iter()
            .take_while(move |r| r.start < range.end)
            .map(move |r| r.start.max(range.start)..r.end.min(range.end))
    }

    /// Bytes of a range that are in memory.
    pub fn bytes_in(&self, range: Range<u64>) -> u64 {
        self.within(range).map(|r| r.end - r.start).sum()
    }

    /// Whether all of a range is in memory.
    pub fn has(&self, avma: u64, length: u64) -> bool {
        let Some(end) = avma.checked_add(length) else {
            return false;
        };
        let first = self.ranges.partition_point(|r| r.end <= avma);
        self.ranges.get(first).is_some_and(|r| r.start <= avma && end <= r.end)
    }
}

impl ResidentPages for Present {
    fn bytes_in(&self, range: Range<u64>) -> u64 {
        Present::bytes_in(self, range)
    }
}

impl FromIterator<Range<u64>> for Present {
    /// In ascending order.
    fn from_iter<T: IntoIterator<Item = Range<u64>>>(ranges: T) -> Present {
        let mut present = Present {
            ranges: Vec::new(),
            is_complete: true,
        };
        for range in ranges {
            present.is_complete &= present.add(range);
        }
        present
    }
}

/// Memory of a process of which only pages are read that are in memory.
pub struct PresentMemory<'a> {
    pub memory: &'a dyn Memory,
    pub present: &'a Present,
}

impl Memory for PresentMemory<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        self.present.has(avma, buf.len() as u64) && self.memory.read(avma, buf)
    }

    fn read_pieces(&self, pieces: &[(u64, usize)], buf: &mut [u8]) -> usize {
        let has = |(at, length): &(u64, usize)| self.present.has(*at, *length as u64);
        let count = pieces.iter().take_while(|piece| has(piece)).count();
        self.memory.read_pieces(&pieces[..count], buf)
    }
}

/// This machine, of which the memory of one process is read as [`PresentMemory`] is.
pub struct PresentSystem<'a>(pub &'a Present);

impl System for PresentSystem<'_> {
    fn maps(&self, pid: Pid) -> Result<Vec<u8>> {
        LiveSystem.maps(pid)
    }

    fn stack_end(&self, pid: Pid) -> u64 {
        LiveSystem.stack_end(pid)
    }

    fn threads(&self, pid: Pid) -> Vec<Tid> {
        LiveSystem.threads(pid)
    }

    fn thread_name(&self, pid: Pid, tid: Tid) -> Option<String> {
        LiveSystem.thread_name(pid, tid)
    }

    fn open(&self, pid: Pid, start: u64, end: u64, path: &[u8], root: Option<&Root>) -> Option<(Content, FileKey)> {
        LiveSystem.open(pid, start, end, path, root)
    }

    fn read_memory(&self, pid: Pid, avma: u64, buf: &mut [u8]) -> usize {
        if self.0.has(avma, buf.len() as u64) {
            LiveSystem.read_memory(pid, avma, buf)
        } else {
            0
        }
    }

    fn root(&self, pid: Pid) -> Option<Root> {
        LiveSystem.root(pid)
    }

    fn kernel_symbols(&self) -> Option<String> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything can be read; each byte is 7.
    struct Sevens;

    impl Memory for Sevens {
        fn read(&self, _: u64, buf: &mut [u8]) -> bool {
            buf.fill(7);
            true
        }
    }

    #[test]
    fn only_present_pages_are_read() {
        let present: Present = [0x1000..0x2000, 0x2000..0x3000, 0x5000..0x6000].into_iter().collect();
        let memory = PresentMemory {
            memory: &Sevens,
            present: &present,
        };
        for (avma, length, expected) in [
            (0x1000, 0x2000, true),
            (0x1000, 0x2001, false),
            (0x0fff, 8, false),
            (0x2ffc, 8, false),
            (0x4000, 1, false),
            (0x5ff8, 8, true),
            (u64::MAX, 8, false),
        ] {
            let mut buf = vec![0; length];
            assert_eq!(memory.read(avma, &mut buf), expected, "{avma:x} {length}");
        }
        let mut buf = [0; 24];
        assert_eq!(
            memory.read_pieces(&[(0x1000, 8), (0x5000, 8), (0x3000, 8)], &mut buf),
            16
        );
        let within: Vec<_> = present.within(0x2800..0x5010).collect();
        assert_eq!(within, [0x2800..0x3000, 0x5000..0x5010]);
        assert_eq!(present.bytes_in(0x2800..0x5010), 0x810);
        assert_eq!(present.bytes_in(0x3000..0x5000), 0);
    }
}
