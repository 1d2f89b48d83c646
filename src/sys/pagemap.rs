//! Which pages of a process are in memory: `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst, Linux 6.18).

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use super::memory::page_size;

/// Entries that are read at once where the kernel cannot list ranges.
const ENTRIES: usize = 16 << 10;
/// Ranges that the kernel lists at once.
const REGIONS: usize = 4 << 10;
/// The bit of an entry that says that the page is in memory.
const PRESENT: u64 = 1 << 63;

/// The ioctl that lists ranges of pages, since Linux 6.7 (include/uapi/linux/fs.h, Linux 6.18: `PAGEMAP_SCAN`).
const SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;
/// Categories of pages there: in memory; the page of zeros, which is read where nothing was written and is not counted
/// as resident.
const IS_PRESENT: u64 = 1 << 3;
const IS_ZERO: u64 = 1 << 5;

/// `struct pm_scan_arg`
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_length: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_any_mask: u64,
    return_mask: u64,
}

/// `struct page_region`
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// The page map of a process.
pub struct PageMap {
    file: File,
    /// The kernel can list ranges.
    can_scan: bool,
    regions: Vec<Region>,
    entries: Vec<u8>,
}

impl PageMap {
    /// # Errors
    /// Those of opening the file.
    pub fn open(pid: u32) -> io::Result<PageMap> {
        Ok(PageMap {
            file: File::open(format!("/proc/{pid}/pagemap"))?,
            can_scan: true,
            regions: Vec::new(),
            entries: Vec::new(),
        })
    }

    /// Calls `found` with the ranges of `range` (whole pages) that are in memory, in ascending order; adjacent ones may
    /// come apart. It returns false to stop. `max_entries` is how many pages are looked at, in memory or not, where the
    /// kernel cannot list ranges; those that were are taken off. False: it was stopped, or there are more pages.
    ///
    /// # Errors
    /// The process has exited.
    pub fn present(
        &mut self,
        range: Range<u64>,
        max_entries: &mut u64,
        found: &mut dyn FnMut(Range<u64>) -> bool,
    ) -> io::Result<bool> {
        if self.can_scan {
            match self.scan(range.clone(), found) {
                // ENOTTY before Linux 6.7; EINVAL where it has other structures.
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => self.can_scan = false,
                done => return done,
            }
        }
        self.read(range, max_entries, found)
    }

    fn scan(&mut self, range: Range<u64>, found: &mut dyn FnMut(Range<u64>) -> bool) -> io::Result<bool> {
        self.regions.resize(REGIONS, Region::default());
        let mut at = range.start;
        while at < range.end {
            let mut argument = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                start: at,
                end: range.end,
                regions: self.regions.as_mut_ptr() as u64,
                regions_length: REGIONS as u64,
                category_inverted: IS_ZERO,
                category_mask: IS_PRESENT | IS_ZERO,
                return_mask: IS_PRESENT,
                ..ScanArgument::default()
            };
            // SAFETY: the argument has its own size and describes the vector, which lives longer than the call.
            let count = unsafe { libc::ioctl(self.file.as_raw_fd(), SCAN, &raw mut argument) };
            let count = super::check(count.into())? as usize;
            if !self
                .regions
                .iter()
                .take(count)
                .all(|region| found(region.start..region.end))
            {
                return Ok(false);
            }
            if argument.walk_end <= at {
                return Ok(false);
            }
            at = argument.walk_end;
        }
        Ok(true)
    }

    fn read(
        &mut self,
        range: Range<u64>,
        max_entries: &mut u64,
        found: &mut dyn FnMut(Range<u64>) -> bool,
    ) -> io::Result<bool> {
        let page = page_size() as u64;
        let (mut at, end) = (range.start / page, range.end / page);
        while at < end {
            let wanted = (end - at).min(*max_entries).min(ENTRIES as u64);
            if wanted == 0 {
                return Ok(false);
            }
            self.entries.resize(wanted as usize * 8, 0);
            let length = self.file.read_at(&mut self.entries, at * 8)?;
            let entries = self.entries[..length].chunks_exact(8);
            if entries.len() == 0 {
                return Ok(false);
            }
            *max_entries -= entries.len() as u64;
            let mut start = None;
            for entry in entries {
                let is_present = entry.try_into().is_ok_and(|e| u64::from_le_bytes(e) & PRESENT != 0);
                if is_present {
                    start = start.or(Some(at));
                } else if let Some(start) = start.take()
                    && !found(start * page..at * page)
                {
                    return Ok(false);
                }
                at += 1;
            }
            if start.is_some_and(|start| !found(start * page..at * page)) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_were_written_are_in_memory() {
        let page = page_size() as u64;
        // So large that it is fresh memory, and a huge page at its beginning does not reach to its middle.
        let mut bytes = std::hint::black_box(vec![0u8; 64 << 20]);
        let start = (bytes.as_ptr() as u64).next_multiple_of(page);
        let first = (start - bytes.as_ptr() as u64) as usize;
        let written = [0, 1, 2, 40];
        for at in written {
            bytes[first + at * page as usize] = 1;
        }
        for can_scan in [true, false] {
            let mut pages = PageMap::open(std::process::id()).expect("our own");
            pages.can_scan = can_scan;
            let mut seen = |from: u64| {
                let mut ranges = Vec::new();
                let mut add = |range: Range<u64>| {
                    ranges.push((range.start - start) / page..(range.end - start) / page);
                    true
                };
                let range = start + from * page..start + (from + 60) * page;
                assert!(pages.present(range, &mut 60, &mut add).expect("we run"));
                ranges
            };
            let ranges = seen(0);
            let has = |at: &usize| ranges.iter().any(|range| range.contains(&(*at as u64)));
            assert!(
                written.iter().all(has) && ranges.is_sorted_by(|a, b| a.end <= b.start),
                "{ranges:?}"
            );
            assert_eq!(seen((32 << 20) / page), []);
            let range = start..start + 60 * page;
            assert!(!pages.present(range.clone(), &mut 60, &mut |_| false).expect("we run"));
            pages.can_scan = false;
            assert!(!pages.present(range, &mut 59, &mut |_| true).expect("we run"));
        }
        drop(bytes);
    }
}
