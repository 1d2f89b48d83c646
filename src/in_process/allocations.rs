//! Sampled allocations of this process: their stacks are samples of the recording, and this log has what is known of each
//! besides: its size, the probability that it was sampled with, and when it was freed.
//!
//! A block of `s` bytes is sampled with the probability `1 - exp(-s / mean)`, so one that was stands for
//! `1 / (1 - exp(-s / mean))` blocks of its size. The sums are unbiased, whatever the sizes are and however the mean changes.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::capture::signal;
use crate::counts::allocations::{Block, add_values};
use crate::event::Tid;
use crate::profile::model::Profile;
use crate::sys;

/// Rows that are allocated at a time, and how often: 60 MB in all.
const CHUNK: usize = 1 << 12;
const CHUNKS: usize = 1 << 8;
const ROWS: u32 = (CHUNK * CHUNKS) as u32;
/// Largest factor by which the mean distance of samples is raised.
const MAX_RAISE: u64 = 1 << 12;
/// Least CPU time of the process between two changes of the mean, ns.
const CONTROL_TIME: f64 = 20e6;
/// CPU time of taking and reading stacks after which the mean is changed earlier, ns.
const BURST: f64 = 1e6;
/// CPU time of the process after which what was before counts 1/e, ns.
const MEMORY: f64 = 1e8;
/// CPU time that the process counts as having used when the recording begins, ns.
const FIRST_CPU: f64 = 5e7;
/// CPU time of reading a stack, at most, and of a poll without one, ns. What takes longer is done once for each module: its
/// tables are read.
const MAX_READING: u64 = 50_000;

/// What is known of a sampled block. Written by the thread that allocates it, but for its end.
#[derive(Debug, Default)]
struct Row {
    /// When it was allocated, as the time of its sample, ns; 0: the row is free, or not complete.
    time: AtomicU64,
    /// When it was freed, ns; 0: it was not.
    end: AtomicU64,
    size: AtomicU64,
    /// Mean distance of samples that it was drawn with, bytes.
    mean: AtomicU64,
    /// 0: the row is free.
    tid: AtomicU32,
    /// Of a free row: one more than the number of the next free one; 0: there is none.
    next: AtomicU32,
    /// It is a mapping of anonymous memory; `size` is that of its beginning.
    is_mapping: AtomicBool,
    /// Bytes by which a mapping has grown since, less those that were unmapped.
    change: AtomicI64,
    /// Its end will not be reported.
    is_lost: AtomicBool,
    /// It is in a profile that was taken.
    is_taken: AtomicBool,
}

impl Row {
    /// Its end has been reported, or never will be.
    fn has_ended(&self) -> bool {
        let size = self.size.load(Ordering::Relaxed) as i64;
        let left = size.saturating_add(self.change.load(Ordering::Relaxed));
        self.end.load(Ordering::Relaxed) != 0
            || self.is_lost.load(Ordering::Relaxed)
            || self.is_mapping.load(Ordering::Relaxed) && left <= 0
    }

    /// The block, which was allocated at `time`, ns.
    fn block(&self, time: u64) -> Block {
        let (size, mean) = (self.size.load(Ordering::Relaxed), self.mean.load(Ordering::Relaxed));
        Block {
            tid: self.tid.load(Ordering::Relaxed),
            time,
            end: self.end.load(Ordering::Relaxed),
            size: size as f64,
            count: weight(size, mean),
            mapped: self.is_mapping.load(Ordering::Relaxed).then(|| {
                let change = self.change.load(Ordering::Relaxed);
                size.saturating_add_signed(change) as f64
            }),
        }
    }

    fn clear(&self) {
        self.time.store(0, Ordering::Relaxed);
        self.end.store(0, Ordering::Relaxed);
        self.change.store(0, Ordering::Relaxed);
        self.is_lost.store(false, Ordering::Relaxed);
        self.is_taken.store(false, Ordering::Relaxed);
        self.tid.store(0, Ordering::Relaxed);
    }
}

/// How often allocations are sampled.
#[derive(Clone, Copy, Debug)]
pub struct AllocationOptions {
    /// Mean distance between samples, bytes.
    pub mean: u64,
    /// Largest part of the process's CPU time that taking and reading stacks may use: the mean is raised where they would use
    /// more.
    pub max_overhead: f64,
    /// Changes the mean of the hooks.
    pub set_mean: fn(u64),
}

/// Sampled blocks. Nothing on the path of an allocation waits for a lock or allocates.
#[derive(Debug)]
pub struct AllocationLog {
    options: AllocationOptions,
    /// Mean distance of samples now, bytes.
    mean: AtomicU64,
    chunks: Vec<OnceLock<Box<[Row]>>>,
    /// Rows that were ever in use.
    used: AtomicU32,
    /// Those of them that are free: in the low half one more than the number of the first, 0: there is none; in the high half the
    /// number of changes, so that a thread that was interrupted notices them.
    free: AtomicU64,
    free_rows: AtomicU32,
    /// Stacks that were taken, and the CPU time of taking and reading them, ns.
    stacks: AtomicU64,
    spent: AtomicU64,
    /// Samples for which there was no room here, or not where their ends are noticed.
    lost: AtomicU64,
    /// The thread that processes samples: what it allocates is not the program's.
    own_thread: AtomicU32,
    reader: Mutex<Reader>,
}

/// State of the thread that reads the log.
#[derive(Debug, Default)]
struct Reader {
    /// As of the last decision about the mean: CPU time of the process, and of taking and reading stacks, ns.
    process_cpu: u64,
    spent: u64,
    /// Times of late, ns; of stacks, what they would have been with the mean in force.
    recent_cpu: f64,
    recent_spent: f64,
    /// Stacks that were read.
    stacks: u64,
}

impl AllocationLog {
    /// An empty log.
    pub fn new(options: AllocationOptions) -> AllocationLog {
        let log = AllocationLog {
            options,
            mean: AtomicU64::new(options.mean.max(1)),
            chunks: (0..CHUNKS).map(|_| OnceLock::new()).collect(),
            used: AtomicU32::new(0),
            free: AtomicU64::new(0),
            free_rows: AtomicU32::new(0),
            stacks: AtomicU64::new(0),
            spent: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            own_thread: AtomicU32::new(0),
            reader: Mutex::new(Reader {
                process_cpu: sys::clock::process_cpu_time(),
                recent_cpu: FIRST_CPU,
                ..Reader::default()
            }),
        };
        log.make_room();
        log
    }

    fn row(&self, number: u32) -> Option<&Row> {
        let number = number as usize;
        self.chunks.get(number / CHUNK)?.get()?.get(number % CHUNK)
    }

    /// Takes the stack of a block that the calling thread allocates, or of memory that it maps; its number in the log. `None`:
    /// there is no room.
    pub fn on_block(&self, size: usize, mean: u64, is_mapping: bool) -> Option<u32> {
        let thread_cpu = || sys::clock::read_clock(libc::CLOCK_THREAD_CPUTIME_ID).unwrap_or(0);
        let (began, tid) = (thread_cpu(), sys::process::current_tid() as Tid);
        if tid == self.own_thread.load(Ordering::Relaxed) {
            return None;
        }
        let claimed = self.claim_freed().or_else(|| self.claim_new());
        let Some((number, row)) = claimed.and_then(|number| Some((number, self.row(number)?))) else {
            self.lost.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        row.tid.store(tid, Ordering::Relaxed);
        let time = signal::sample_here().unwrap_or_else(|| {
            // There are more than can be processed. Without a stack it still counts in the sums.
            self.change_mean(2.0);
            sys::clock::now()
        });
        row.size.store(size as u64, Ordering::Relaxed);
        row.mean.store(mean, Ordering::Relaxed);
        row.is_mapping.store(is_mapping, Ordering::Relaxed);
        row.time.store(time, Ordering::Release);
        self.stacks.fetch_add(1, Ordering::Relaxed);
        self.spent
            .fetch_add(thread_cpu().saturating_sub(began), Ordering::Relaxed);
        Some(number)
    }

    /// The number of a row that was in use before, which is the caller's now.
    fn claim_freed(&self) -> Option<u32> {
        let next = |head: u64| {
            let row = self.row((head as u32).checked_sub(1)?)?;
            Some(after(head) | u64::from(row.next.load(Ordering::Relaxed)))
        };
        let head = self.free.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).ok()?;
        self.free_rows.fetch_sub(1, Ordering::Relaxed);
        Some(head as u32 - 1)
    }

    /// The number of a row that has not been in use, which is the caller's now.
    fn claim_new(&self) -> Option<u32> {
        let next = |number| self.row(number).map(|_| number + 1);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()
    }

    /// Frees a row that no thread writes to any more.
    fn release(&self, number: u32, row: &Row) {
        row.clear();
        // Before it is in the list: it may be claimed at once.
        self.free_rows.fetch_add(1, Ordering::Relaxed);
        let insert = |head: u64| {
            row.next.store(head as u32, Ordering::Relaxed);
            Some(after(head) | u64::from(number + 1))
        };
        let _ = self.free.fetch_update(Ordering::AcqRel, Ordering::Acquire, insert);
    }

    /// The block with this number is freed.
    pub fn on_end(&self, number: u32) {
        if let Some(row) = self.row(number) {
            row.end.store(sys::clock::now(), Ordering::Relaxed);
        }
    }

    /// The mapping with this number has become larger or smaller by so many bytes.
    pub fn on_resize(&self, number: u32, change: i64) {
        if let Some(row) = self.row(number) {
            row.change.fetch_add(change, Ordering::Relaxed);
        }
    }

    /// The end of the block with this number will not be known: it counts as lost, and as live.
    pub fn on_overflow(&self, number: u32) {
        self.lost.fetch_add(1, Ordering::Relaxed);
        if let Some(row) = self.row(number) {
            row.is_lost.store(true, Ordering::Relaxed);
        }
    }

    /// Names the calling thread as the one that processes samples.
    pub(super) fn set_own_thread(&self) {
        let tid = sys::process::current_tid() as Tid;
        self.own_thread.store(tid, Ordering::Relaxed);
    }

    fn reader(&self) -> std::sync::MutexGuard<'_, Reader> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for the next rows.
    fn make_room(&self) {
        let next = self.used.load(Ordering::Relaxed) as usize / CHUNK;
        for chunk in self.chunks.iter().skip(next).take(2) {
            chunk.get_or_init(|| (0..CHUNK).map(|_| Row::default()).collect());
        }
    }

    /// Does what is to be done now and then: makes room, and keeps taking and reading stacks within their part of the CPU time.
    /// `reading`: CPU time of reading stacks since the last call, ns.
    pub(super) fn control(&self, reading: u64) {
        self.make_room();
        let mut reader = self.reader();
        let stacks = self.stacks.load(Ordering::Relaxed);
        let most = (stacks - reader.stacks + 1).saturating_mul(MAX_READING);
        reader.stacks = stacks;
        self.spent.fetch_add(reading.min(most), Ordering::Relaxed);
        self.adapt(&mut reader, sys::clock::process_cpu_time());
    }

    /// Keeps taking and reading stacks within their part of the CPU time. `process_cpu`: CPU time of the process so far, ns.
    fn adapt(&self, reader: &mut Reader, process_cpu: u64) {
        let spent = self.spent.load(Ordering::Relaxed);
        let new = spent.saturating_sub(reader.spent) as f64;
        let passed = process_cpu.saturating_sub(reader.process_cpu) as f64;
        if passed < CONTROL_TIME && new < BURST {
            return;
        }
        (reader.process_cpu, reader.spent) = (process_cpu, spent);
        let kept = (-passed / MEMORY).exp();
        reader.recent_cpu = reader.recent_cpu * kept + passed;
        reader.recent_spent = reader.recent_spent * kept + new;
        let share = reader.recent_spent / reader.recent_cpu.max(1.0);
        let before = self.mean.load(Ordering::Relaxed);
        self.change_mean((share / self.options.max_overhead.max(1e-6)).clamp(0.5, 8.0));
        reader.recent_spent *= before as f64 / self.mean.load(Ordering::Relaxed) as f64;
    }

    /// Changes the mean distance of samples by this factor, within its bounds.
    fn change_mean(&self, factor: f64) {
        // Twice as much whenever half of the rows that were left are in use: there will be some left, however long it runs.
        let used = self.used.load(Ordering::Relaxed);
        let left = ROWS
            - used
                .saturating_sub(self.free_rows.load(Ordering::Relaxed))
                .min(ROWS - 1);
        let least = self
            .options
            .mean
            .max(1)
            .saturating_mul(u64::from(ROWS / left).next_power_of_two());
        let mean = (self.mean.load(Ordering::Relaxed) as f64 * factor) as u64;
        let mean = mean.clamp(least, least.saturating_mul(MAX_RAISE));
        self.mean.store(mean, Ordering::Relaxed);
        (self.options.set_mean)(mean);
    }

    /// The blocks since the last call. `is_last`: no thread is at one any more, so that one that is not complete never will be: a
    /// signal handler has left it by a jump, for one.
    fn take(&self, is_last: bool) -> Vec<Block> {
        let mut blocks = Vec::new();
        for number in 0..self.used.load(Ordering::Relaxed) {
            let Some(row) = self.row(number) else { break };
            let time = row.time.load(Ordering::Acquire);
            if time == 0 {
                // Free, or a thread is at it.
                let is_abandoned = is_last && row.tid.load(Ordering::Relaxed) != 0;
                self.lost.fetch_add(u64::from(is_abandoned), Ordering::Relaxed);
                continue;
            }
            // First, so that an end is not missed that comes meanwhile.
            let has_ended = row.has_ended();
            if !row.is_taken.swap(true, Ordering::Relaxed) {
                blocks.push(row.block(time));
            }
            if has_ended {
                self.release(number, row);
            }
        }
        blocks.sort_by_key(|block| block.time);
        blocks
    }

    /// Adds to a profile, whose first sample was taken at `start` or later (ns), the values of the blocks since the last call.
    /// `is_last`: nothing is sampled any more.
    pub(super) fn add_values(&self, profile: &mut Profile, start: u64, is_last: bool) {
        add_values(profile, start, &self.take(is_last), true);
        profile.meta.quality.lost += self.lost.swap(0, Ordering::Relaxed);
        profile.meta.rate = 0;
    }
}

/// The high half of the head of the list of free rows after a change.
fn after(head: u64) -> u64 {
    (head >> 32).wrapping_add(1) << 32
}

/// Blocks that one stands for which was sampled.
fn weight(size: u64, mean: u64) -> f64 {
    1.0 / -(-(size.max(1) as f64) / mean.max(1) as f64).exp_m1()
}

#[cfg(test)]
mod tests {
    use super::*;
    /// A log with a mean distance of 1,000 bytes.
    fn log() -> AllocationLog {
        AllocationLog::new(AllocationOptions {
            mean: 1000,
            max_overhead: 0.01,
            set_mean: |_| {},
        })
    }

    #[test]
    fn a_sampled_block_stands_for_as_many_as_its_probability_says() {
        for (size, mean, count) in [
            (1, 1 << 19, 524_288.5),
            (0, 1 << 19, 524_288.5),
            (1 << 19, 1 << 19, 1.581_977),
            (1 << 30, 1 << 19, 1.0),
            (5, 0, 1.006_783),
        ] {
            assert!(
                (weight(size, mean) / count - 1.0).abs() < 1e-6,
                "{size} {mean}: {}",
                weight(size, mean)
            );
        }
    }

    #[test]
    fn the_mean_follows_the_use_without_going_too_far() {
        const MS: u64 = 1_000_000;
        let log = log();
        let mut reader = Reader {
            recent_cpu: FIRST_CPU,
            ..Reader::default()
        };
        let mut cpu = 0;
        // Stacks use 40 % of the time at the first mean, and less as it is raised.
        let (mut means, mut used) = (Vec::new(), 0);
        for _ in 0..200 {
            cpu += 20 * MS;
            let spent = 8 * MS * 1000 / log.mean.load(Ordering::Relaxed);
            used += spent;
            log.spent.fetch_add(spent, Ordering::Relaxed);
            log.adapt(&mut reader, cpu);
            means.push(log.mean.load(Ordering::Relaxed));
        }
        assert!(means.iter().all(|mean| *mean < 60_000), "{means:?}");
        assert!(means[100..].iter().all(|mean| *mean > 30_000), "{means:?}");
        assert!(used < cpu / 100 + 13 * MS, "{used} of {cpu}");
        // Then they use nothing.
        for _ in 0..100 {
            cpu += 20 * MS;
            log.adapt(&mut reader, cpu);
        }
        assert_eq!(log.mean.load(Ordering::Relaxed), 1000);
        // A burst is noticed before the time is over.
        log.spent.fetch_add(100 * MS, Ordering::Relaxed);
        log.adapt(&mut reader, cpu + 1);
        assert_eq!(log.mean.load(Ordering::Relaxed), 8000);
    }

    #[test]
    fn rows_are_read_once_complete() {
        let log = log();
        // No recording runs: blocks have no stacks.
        let first = log.on_block(64, 1000, false).expect("room");
        log.on_end(first);
        log.on_end(u32::MAX);
        let mapping = log.on_block(128, 2000, true).expect("room");
        log.on_resize(mapping, -100);
        log.on_resize(mapping, 4);
        // One that another thread has begun with.
        log.used.fetch_add(1, Ordering::Relaxed);
        log.row(2).expect("room").tid.store(7, Ordering::Relaxed);
        let blocks = log.take(false);
        assert_eq!(
            (blocks.len(), blocks[0].mapped, blocks[1].mapped),
            (2, None, Some(32.0))
        );
        assert!(blocks[0].end >= blocks[0].time && blocks[1].end == 0);
        assert_eq!(blocks[0].tid, sys::process::current_tid() as Tid);
        assert_eq!((log.take(false), log.lost.load(Ordering::Relaxed)), (vec![], 0));
        assert_eq!((log.take(true).len(), log.lost.load(Ordering::Relaxed)), (0, 1));
    }

    #[test]
    fn rows_of_blocks_that_have_ended_are_used_again() {
        let log = log();
        let block = || log.on_block(64, 1000, false).expect("room");
        let (ended, lives, lost, mapping) = (block(), block(), block(), log.on_block(100, 1000, true).expect("room"));
        log.on_end(ended);
        log.on_overflow(lost);
        assert_eq!(log.take(false).len(), 4);
        log.on_resize(mapping, -100);
        let again = [block(), block()];
        assert!(again.contains(&ended) && again.contains(&lost), "{again:?}");
        assert_eq!(block(), 4, "the others are still in use");
        assert_eq!(log.take(false).len(), 3);
        log.on_end(lives);
        assert_eq!(log.take(false).len(), 0);
        let again = [block(), block()];
        assert!(again.contains(&lives) && again.contains(&mapping), "{again:?}");
        let blocks = log.take(false);
        assert!(blocks.iter().all(|block| block.end == 0 && block.mapped.is_none()));
        // However many, if profiles are taken.
        for _ in 0..3 * CHUNK {
            log.on_end(block());
            log.take(false);
        }
        assert_eq!(log.used.load(Ordering::Relaxed), 6);
    }

    #[test]
    fn the_mean_is_larger_where_few_rows_are_left() {
        let log = log();
        for (used, free, mean) in [
            (0, 0, 1000),
            (ROWS / 2 - 1, 0, 1000),
            (ROWS / 2, 0, 2000),
            (ROWS / 2, 1000, 1000),
            (ROWS / 4 * 3, 0, 4000),
            (ROWS, 0, 1000 * u64::from(ROWS)),
        ] {
            log.used.store(used, Ordering::Relaxed);
            log.free_rows.store(free, Ordering::Relaxed);
            log.change_mean(0.5);
            assert_eq!(log.mean.load(Ordering::Relaxed), mean, "{used} {free}");
        }
    }
}
