//! The rings of sideband records, one for each CPU: of all processes of the machine, since a perf event cannot be
//! limited to some. So they wake us only when a ring is half full. What has to be known sooner is when a program of the
//! target begins: the BPF program wakes us at its exec, and until its interpreter is found the rings are read often.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::errors::not_permitted;
use super::recent_programs::RecentPrograms;
use super::sampling_events;
use crate::bytes::{u32_at, u64_at};
use crate::capture::common::perf_ring::Ring;
use crate::capture::common::sideband::{self, SidebandRecord};
use crate::error::{Error, Result};
use crate::event::Pid;
use crate::sys;
use crate::sys::perf::perf;

/// Pages of each CPU's ring: filled by some thousand execs.
const PAGES: usize = 64;
const FAILED: &str = "cannot receive mmap and fork events";
/// Maximum number of bytes that are moved to memory before they are handled. More stay in the rings.
const MAX_BYTES: usize = 4 << 20;
/// Longest time in which a program that begins maps its interpreter, ns, ...
const START: u64 = 250_000_000;
/// ... and time between two reads of the rings meanwhile: the interpreter needs longer before it runs code.
const START_POLL: Duration = Duration::from_millis(2);

/// The rings, and the processes that begin a program.
pub struct SidebandRings {
    rings: Vec<Ring>,
    /// What was moved from the rings, and not taken yet; kept because it is allocated.
    records: RawRecords,
    starting: FxHashMap<Pid, u64>,
}

/// Records that are not decoded yet: most are of processes that are not sampled.
#[derive(Default)]
pub struct RawRecords {
    bytes: Vec<u8>,
    records: Vec<RawRecord>,
    /// Records that the kernel had no room for.
    pub lost: u64,
}

struct RawRecord {
    time: u64,
    kind: u32,
    misc: u16,
    body: Range<usize>,
}

/// The process that a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// One that has begun, and its parent.
    Child(Pid, Pid),
    /// One that executes a program.
    Executing(Pid),
    /// One whose first thread exits: it ends, unless another thread executes a program or goes on.
    FirstThreadEnds(Pid),
    Process(Pid),
}

impl SidebandRings {
    /// Opens the events.
    ///
    /// # Errors
    /// Not permitted.
    pub fn open() -> Result<SidebandRings> {
        let mut attr = perf::perf_event_attr {
            type_: perf::PERF_TYPE_SOFTWARE,
            config: perf::PERF_COUNT_SW_DUMMY.into(),
            ..Default::default()
        };
        sideband::request_sideband(&mut attr);
        attr.set_watermark(1);
        attr.__bindgen_anon_2.wakeup_watermark = (PAGES * sys::memory::page_size() / 2) as u32;
        let events = sampling_events::on_each_cpu(&mut attr, FAILED, FAILED)?;
        let ring = |event| {
            Ring::new(event, PAGES).map_err(|e| match e.kind() {
                io::ErrorKind::PermissionDenied => {
                    not_permitted("cannot map the ring buffer of mmap and fork events", &e)
                }
                _ => Error::io("cannot map the ring buffer of mmap and fork events", e),
            })
        };
        Ok(SidebandRings {
            rings: events.into_iter().map(ring).collect::<Result<_>>()?,
            records: RawRecords::default(),
            starting: FxHashMap::default(),
        })
    }

    /// Become readable when a ring is half full.
    pub fn events(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rings.iter().map(Ring::event)
    }

    /// A process executes a program, at this time.
    pub fn begin_program(&mut self, pid: Pid, time: u64) {
        self.starting.insert(pid, time.saturating_add(START));
    }

    /// The interpreter of a process is known, or it has ended.
    pub fn end_start(&mut self, pid: Pid) {
        self.starting.remove(&pid);
    }

    /// How long the rings may be left unread.
    pub fn time_left(&mut self) -> Duration {
        if self.starting.is_empty() {
            return Duration::MAX;
        }
        let now = sys::clock::now();
        self.starting.retain(|_, until| *until > now);
        if self.starting.is_empty() {
            Duration::MAX
        } else {
            START_POLL
        }
    }

    /// Moves what is in the rings to memory.
    pub fn move_to_memory(&mut self) {
        if self.records.bytes.len() < MAX_BYTES {
            self.read();
        }
    }

    fn read(&mut self) {
        for ring in &mut self.rings {
            ring.drain(|kind, misc, body| self.records.add(kind, misc, body));
        }
    }

    /// Takes what is in the rings, to be returned by [`SidebandRings::put_back`].
    pub fn take(&mut self) -> RawRecords {
        self.read();
        let mut all = std::mem::take(&mut self.records);
        all.records.sort_by_key(|r| r.time);
        all
    }

    pub fn put_back(&mut self, mut records: RawRecords) {
        records.bytes.clear();
        records.records.clear();
        records.lost = 0;
        self.records = records;
    }
}

impl RawRecord {
    fn subject(&self, body: &[u8]) -> Option<Subject> {
        let (pid, parent) = (u32_at(body, 0)?, u32_at(body, 4)?);
        Some(match self.kind {
            perf::PERF_RECORD_FORK if pid != parent => Subject::Child(pid, parent),
            perf::PERF_RECORD_COMM if u32::from(self.misc) & perf::PERF_RECORD_MISC_COMM_EXEC != 0 => {
                Subject::Executing(pid)
            }
            perf::PERF_RECORD_EXIT if u32_at(body, 8) == Some(pid) => Subject::FirstThreadEnds(pid),
            _ => Subject::Process(pid),
        })
    }
}

impl RawRecords {
    fn add(&mut self, kind: u32, misc: u16, body: &[u8]) {
        if kind == perf::PERF_RECORD_LOST {
            self.lost += u64_at(body, 8).unwrap_or(0);
            return;
        }
        // With sample_id_all every record ends in its time.
        let Some(time) = body.len().checked_sub(8).and_then(|at| u64_at(body, at)) else {
            return;
        };
        let start = self.bytes.len();
        self.bytes.extend_from_slice(body);
        self.records.push(RawRecord {
            time,
            kind,
            misc,
            body: start..self.bytes.len(),
        });
    }

    /// Takes note of the programs that begin, and of what they map, in processes that `is_known` does not accept.
    pub fn add_to(&self, recent: &mut RecentPrograms, is_known: impl Fn(Pid) -> bool) {
        for r in &self.records {
            let body = &self.bytes[r.body.clone()];
            match r.subject(body) {
                Some(Subject::Executing(pid)) => recent.begin(pid, r.time),
                Some(Subject::Child(pid, _)) => recent.clear(pid),
                Some(Subject::Process(pid)) if r.kind == perf::PERF_RECORD_MMAP2 && !is_known(pid) => {
                    recent.map(pid, body);
                }
                _ => {}
            }
        }
    }

    /// Decodes, in chronological order, those whose subject `wants` accepts.
    pub fn decode(&self, mut wants: impl FnMut(Subject) -> bool) -> Vec<SidebandRecord> {
        let decoded = self.records.iter().filter_map(|r| {
            let body = &self.bytes[r.body.clone()];
            wants(r.subject(body)?)
                .then(|| sideband::decode(r.kind, r.misc, body))??
                .ok()
        });
        decoded.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_of_records() {
        let mut records = RawRecords::default();
        let numbers = |numbers: [u32; 4], time: u64| {
            let mut body: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
            body.extend(8u64.to_le_bytes()); // time, or process and thread
            body.extend(0u64.to_le_bytes());
            body.extend(time.to_le_bytes());
            body
        };
        let exec = perf::PERF_RECORD_MISC_COMM_EXEC as u16;
        records.add(perf::PERF_RECORD_EXIT, 0, &numbers([7, 1, 7, 1], 40));
        records.add(perf::PERF_RECORD_FORK, 0, &numbers([7, 1, 7, 1], 10));
        records.add(perf::PERF_RECORD_FORK, 0, &numbers([7, 7, 8, 7], 30));
        records.add(perf::PERF_RECORD_COMM, exec, &numbers([7, 7, 65, 0], 20));
        records.add(perf::PERF_RECORD_LOST, 0, &[0; 16]);
        records.add(perf::PERF_RECORD_EXIT, 0, &[0; 4]);
        records.records.sort_by_key(|r| r.time);
        let mut subjects = Vec::new();
        let none = records.decode(|subject| {
            subjects.push(subject);
            false
        });
        assert!(none.is_empty());
        assert_eq!(
            subjects,
            [
                Subject::Child(7, 1),
                Subject::Executing(7),
                Subject::Process(7),
                Subject::FirstThreadEnds(7)
            ]
        );
        let times: Vec<u64> = records.decode(|_| true).iter().map(|r| r.time).collect();
        assert_eq!(times, [10, 20, 30, 40]);
    }
}
