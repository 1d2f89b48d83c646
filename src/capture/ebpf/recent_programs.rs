//! What programs that began last have mapped. On a whole host a process is opened at its first sample; short ones have exited by
//! then.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::bytes::{u32_at, u64_at};
use crate::capture::common::sideband;
use crate::event::{Event, MappedFile, Pid};
use crate::sys::perf::perf;

/// Maximum number of programs that are remembered.
const MAX_PROGRAMS: usize = 1024;
/// Executable mappings that are remembered of one, at most.
const MAX_MAPPINGS: usize = 64;

/// Offsets in the body of `PERF_RECORD_MMAP2`: device, two times 32 bits, and inode (include/uapi/linux/perf_event.h, v6.18).
const DEVICE: usize = 32;
const INODE: usize = 40;

/// Programs by process, as the records of their mappings: few of them are ever read.
#[derive(Default)]
pub struct RecentPrograms {
    by_process: FxHashMap<Pid, Program>,
    /// In the order in which they were added, the latest one at the end.
    order: VecDeque<Pid>,
}

#[derive(Default)]
struct Program {
    /// CLOCK_MONOTONIC, ns.
    began: u64,
    mappings: Vec<Box<[u8]>>,
}

impl RecentPrograms {
    /// A process executes a program.
    pub fn begin(&mut self, pid: Pid, time: u64) {
        let program = Program {
            began: time,
            mappings: Vec::new(),
        };
        if self.by_process.insert(pid, program).is_none() {
            self.order.push_back(pid);
        }
        if self.order.len() > MAX_PROGRAMS
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_process.remove(&oldest);
        }
    }

    /// A process has begun that has executed no program: what is known is of an earlier one with its number.
    pub fn clear(&mut self, pid: Pid) {
        if let Some(program) = self.by_process.get_mut(&pid) {
            (program.began, program.mappings) = (u64::MAX, Vec::new());
        }
    }

    /// A process has mapped executable memory; `record`: the body of the record.
    pub fn map(&mut self, pid: Pid, record: &[u8]) {
        if let Some(program) = self.by_process.get_mut(&pid)
            && program.mappings.len() < MAX_MAPPINGS
        {
            program.mappings.push(record.into());
        }
    }

    /// What a process had mapped by its last program, if that had begun by this time.
    pub fn mappings(&self, pid: Pid, time: u64) -> Vec<MappedFile> {
        let program = self.by_process.get(&pid).filter(|program| program.began <= time);
        let records = program.map_or(&[][..], |program| &program.mappings);
        records.iter().filter_map(|record| mapped_file(record)).collect()
    }
}

fn mapped_file(record: &[u8]) -> Option<MappedFile> {
    let decoded = sideband::decode(perf::PERF_RECORD_MMAP2, 0, record)?.ok()?;
    let Event::Mmap {
        start,
        end,
        offset,
        path,
        ..
    } = decoded.event
    else {
        return None;
    };
    Some(MappedFile {
        start,
        end,
        offset,
        path,
        device: (u32_at(record, DEVICE)?, u32_at(record, DEVICE + 4)?),
        inode: u64_at(record, INODE)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(pid: u32, start: u64) -> Vec<u8> {
        let mut body: Vec<u8> = [pid, pid].iter().flat_map(|n| n.to_le_bytes()).collect();
        body.extend([start, 0x1000, 0x2000].iter().flat_map(|n| n.to_le_bytes()));
        body.extend([8u32, 1].iter().flat_map(|n| n.to_le_bytes()));
        body.extend([42u64, 7].iter().flat_map(|n| n.to_le_bytes()));
        body.extend([5u32, 2].iter().flat_map(|n| n.to_le_bytes()));
        body.extend(b"/bin/a\0\0");
        body.extend([0; 16]);
        body
    }

    #[test]
    fn mappings_are_those_of_the_last_program() {
        let mut recent = RecentPrograms::default();
        recent.map(7, &record(7, 0x1000)); // one that began before
        recent.begin(7, 10);
        recent.map(7, &record(7, 0x3000));
        recent.map(7, &[0; 12]);
        let expected = MappedFile {
            start: 0x3000,
            end: 0x4000,
            offset: 0x2000,
            path: b"/bin/a".to_vec(),
            device: (8, 1),
            inode: 42,
        };
        assert_eq!(recent.mappings(7, 10), [expected]);
        assert!(recent.mappings(7, 9).is_empty() && recent.mappings(8, 20).is_empty());
        recent.clear(7);
        assert!(recent.mappings(7, u64::MAX - 1).is_empty());
        recent.begin(7, 20);
        assert!(recent.mappings(7, 20).is_empty());
    }

    #[test]
    fn memory_is_bounded() {
        let mut recent = RecentPrograms::default();
        for pid in 0..3 * MAX_PROGRAMS as u32 {
            recent.begin(pid, 1);
            (0..2 * MAX_MAPPINGS).for_each(|_| recent.map(pid, &record(pid, 0x1000)));
        }
        assert_eq!(recent.by_process.len(), MAX_PROGRAMS);
        assert_eq!(recent.mappings(3 * MAX_PROGRAMS as u32 - 1, 1).len(), MAX_MAPPINGS);
        assert!(recent.mappings(0, 1).is_empty());
    }
}
