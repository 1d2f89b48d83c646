//! Parses `/proc/PID/smaps`: mappings, and what of each is resident (proc_pid_smaps(5)). The text is read line by line, since
//! that of a large process has many megabytes; names of files are any bytes.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

use rustc_hash::FxHashMap;

use super::maps;
use super::system::maps_error;
use crate::error::Result;
use crate::event::Pid;

/// Mappings that are kept one by one. The kernel's own limit is 65,530 by default (`vm.max_map_count`).
const MAX_AREAS: usize = 1 << 18;
/// Bytes of names that are kept.
const MAX_NAMES: usize = 8 << 20;
/// Longest line that is read; a path has up to 4096 bytes, of which the kernel writes some as four.
const MAX_LINE: u64 = 32 << 10;

/// Memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Resident, without huge pages of hugetlbfs.
    pub rss: u64,
    /// The part of it that is in no file.
    pub anonymous: u64,
    /// The part of it that no other process has.
    pub private: u64,
    pub swap: u64,
    /// Huge pages of hugetlbfs, which do not count as resident.
    pub hugetlb: u64,
}

impl Usage {
    fn add(&mut self, other: &Usage) {
        let add = |to: &mut u64, more: u64| *to = to.saturating_add(more);
        add(&mut self.rss, other.rss);
        add(&mut self.anonymous, other.anonymous);
        add(&mut self.private, other.private);
        add(&mut self.swap, other.swap);
        add(&mut self.hugetlb, other.hugetlb);
    }

    /// Takes in a line such as `Rss:   12 kB`; others are of no interest.
    fn take(&mut self, line: &[u8]) {
        let Some((name, value)) = line.iter().position(|c| *c == b':').map(|n| line.split_at(n)) else {
            return;
        };
        let to = match name {
            b"Rss" => &mut self.rss,
            b"Anonymous" => &mut self.anonymous,
            b"Private_Clean" | b"Private_Dirty" => &mut self.private,
            b"Swap" => &mut self.swap,
            b"Private_Hugetlb" | b"Shared_Hugetlb" => &mut self.hugetlb,
            _ => return,
        };
        let value = value[1..].trim_ascii();
        let digits = value.iter().take_while(|c| c.is_ascii_digit());
        let kib = digits.fold(0u64, |n, c| n.saturating_mul(10).saturating_add(u64::from(c - b'0')));
        *to = to.saturating_add(kib.saturating_mul(1024));
    }
}

/// A mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    pub start: u64,
    pub end: u64,
    pub is_readable: bool,
    pub is_writable: bool,
    /// What is written is seen by all that map it.
    pub is_shared: bool,
    /// Of a file; else the name is empty or one that the kernel gives (`[heap]`).
    pub is_file: bool,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Its name's place in [`Smaps::names`].
    name: u32,
    pub usage: Usage,
}

/// What a process has mapped.
#[derive(Debug, Default)]
pub struct Smaps {
    /// In ascending order, not overlapping.
    pub areas: Vec<Area>,
    /// Sum of all areas, and of those that are not kept.
    pub total: Usage,
    /// The part of it that is in no area, because there are too many.
    pub uncounted: Usage,
    names: Vec<Vec<u8>>,
}

impl Smaps {
    /// Reads the file of a process.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    pub fn of(pid: Pid) -> Result<Smaps> {
        let read = File::open(format!("/proc/{pid}/smaps")).and_then(|file| Smaps::read(BufReader::new(file)));
        read.map_err(|e| maps_error(pid, e))
    }

    /// Reads the text of such a file.
    ///
    /// # Errors
    /// Those of the reader.
    pub fn read(mut text: impl BufRead) -> io::Result<Smaps> {
        let mut found = Smaps::default();
        let mut known: FxHashMap<Vec<u8>, u32> = FxHashMap::default();
        let mut bytes = 0;
        let mut line = Vec::new();
        let mut current: Option<Area> = None;
        loop {
            line.clear();
            let length = text.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)?;
            let line = line.trim_ascii_end();
            // Fields begin with a capital letter, addresses with a digit or a small one.
            if length > 0 && line.first().is_none_or(u8::is_ascii_uppercase) {
                if let Some(area) = &mut current {
                    area.usage.take(line);
                }
                continue;
            }
            if let Some(area) = current.take() {
                found.push(area);
            }
            if length == 0 {
                return Ok(found);
            }
            let Some(mapping) = maps::line(line) else { continue };
            let mut name = mapping.path;
            if !known.contains_key(&name) && bytes + name.len() > MAX_NAMES {
                name = b"(other files)".to_vec();
            }
            let name = *known.entry(name).or_insert_with_key(|name| {
                bytes += name.len();
                found.names.push(name.clone());
                (found.names.len() - 1) as u32
            });
            current = Some(Area {
                start: mapping.start,
                end: mapping.end,
                is_readable: mapping.readable,
                is_writable: mapping.writable,
                is_shared: mapping.shared,
                is_file: mapping.inode != 0,
                offset: mapping.offset,
                name,
                usage: Usage::default(),
            });
        }
    }

    fn push(&mut self, area: Area) {
        self.total.add(&area.usage);
        let follows = self.areas.last().is_none_or(|last| last.end <= area.start);
        if follows && self.areas.len() < MAX_AREAS {
            self.areas.push(area);
        } else {
            self.uncounted.add(&area.usage);
        }
    }

    /// Path of the file, or the name that the kernel gives; empty for other anonymous memory.
    pub fn name(&self, area: &Area) -> &[u8] {
        self.names.get(area.name as usize).map_or(&[], Vec::as_slice)
    }

    /// Index of the area that has this address.
    pub fn index_of(&self, avma: u64) -> Option<usize> {
        let index = self.areas.partition_point(|area| area.end <= avma);
        (self.areas.get(index)?.start <= avma).then_some(index)
    }

    /// The area of a file that this one lies directly behind and may continue, as variables without an initial value do; `None`
    /// if this one is not private, or has a name.
    pub fn file_before(&self, index: usize) -> Option<&Area> {
        let area = self.areas.get(index)?;
        let before = self.areas.get(index.checked_sub(1)?)?;
        let is_anonymous = !area.is_file && !area.is_shared && self.name(area).is_empty();
        (is_anonymous && before.is_file && before.end == area.start).then_some(before)
    }

    /// The area that has this address.
    pub fn area_of(&self, avma: u64) -> Option<&Area> {
        self.areas.get(self.index_of(avma)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_and_their_usage() {
        let text = b"1000-3000 rw-p 00000000 00:00 0          [heap]\nSize: 8 kB\nRss:   8 kB\nAnonymous: 4 kB\n\
            Private_Dirty: 3 kB\nPrivate_Clean: 1 kB\nSwap: 5 kB\nVmFlags: rd wr\n\
            3000-4000 r--s 00005000 fd:01 42   /a\\012Rss: 7 kB\nRss: 4 kB\nShared_Hugetlb: 2048 kB\n\
            nonsense\nRss: 100 kB\n\
            8000-9000 ---p 0 00:00 0\n\
            2000-3000 rw-p 0 00:00 0 \nRss: 12 kB\n7fff-8000 rw-p 0 00:00 0\nRss: 4 kB";
        let smaps = Smaps::read(&text[..]).expect("bytes");
        let shown: Vec<_> = smaps.areas.iter().map(|a| (a.start, a.end, smaps.name(a))).collect();
        let expected: [(u64, u64, &[u8]); 3] = [
            (0x1000, 0x3000, b"[heap]"),
            (0x3000, 0x4000, b"/a\nRss: 7 kB"),
            (0x8000, 0x9000, b""),
        ];
        assert_eq!(shown, expected);
        let heap = Usage {
            rss: 8 << 10,
            anonymous: 4 << 10,
            private: 4 << 10,
            swap: 5 << 10,
            hugetlb: 0,
        };
        assert_eq!(smaps.areas[0].usage, heap);
        assert!(smaps.areas[1].is_file && smaps.areas[1].is_shared && !smaps.areas[1].is_writable);
        assert_eq!(smaps.areas[1].offset, 0x5000);
        assert_eq!(
            (smaps.areas[1].usage.rss, smaps.areas[1].usage.hugetlb),
            (4 << 10, 2 << 20)
        );
        assert!(!smaps.areas[2].is_readable);
        // Out of order: counted, and in no area.
        assert_eq!(smaps.uncounted.rss, 16 << 10);
        assert_eq!(smaps.total.rss, smaps.uncounted.rss + (12 << 10));
        for (avma, expected) in [
            (0x0fff, None),
            (0x1000, Some(0)),
            (0x2fff, Some(0)),
            (0x4000, None),
            (0x8fff, Some(2)),
        ] {
            assert_eq!(smaps.index_of(avma), expected, "{avma:x}");
        }
    }

    #[test]
    fn what_lies_behind_a_file() {
        let text = b"1000-2000 rw-p 0 fd:01 7 /a\n2000-3000 rw-p 0 00:00 0\n3000-4000 rw-p 0 00:00 0\n\
            5000-6000 r--p 0 fd:01 7 /a\n6000-7000 rw-s 0 00:00 0\n\
            8000-9000 rw-p 0 fd:01 7 /a\n9000-a000 rw-p 0 00:00 0 [heap]\n\
            b000-c000 rw-p 0 fd:01 7 /a\nd000-e000 rw-p 0 00:00 0\n";
        let smaps = Smaps::read(&text[..]).expect("bytes");
        let behind: Vec<u64> = (0..=smaps.areas.len())
            .filter(|index| smaps.file_before(*index).is_some())
            .map(|index| smaps.areas[index].start)
            .collect();
        assert_eq!(behind, [0x2000]);
    }
}
