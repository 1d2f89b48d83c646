//! Resident memory: which of the sampled memory is still there in the end.
//!
//! A sample of growth stands for the memory around one page. When the process gives a range back in which that page
//! lies, or another page comes to be at its place, that memory has gone; the rest is looked up in the end. By the
//! ranges alone a process that has ended is judged; by what is there in the end alone, memory would count twice whose
//! addresses are used again.

use std::collections::BTreeMap;
use std::ops::Range;

use rustc_hash::FxHashMap;

use super::segment::Segment;
use crate::counts::{FramePath, RawMemory, RawTimelineSample};
use crate::event::{MemoryChange, MemoryKind, MemoryRange, PAGE, Pid, RangeChange, Sample};
use crate::frame::{Origin, RawFrame};
use crate::interleave::StackQuality;
use crate::process::system::System;
use crate::profile::resident::ResidentMemory;
use crate::profile::values::Unit;

/// Samples by page.
type Pages = BTreeMap<u64, Vec<GrownSample>>;

/// A sample of growth.
#[derive(Clone, Copy)]
struct GrownSample {
    /// Of the timeline.
    row: u32,
    kind: MemoryKind,
    /// From when on its page is there unless it has gone, on the samples' clock, ns: a system call may still fill its
    /// range before.
    filled: u64,
}

/// Pages of one process that are looked up at once while it is recorded, at most.
const MAX_LOOKED_UP: usize = 4096;
/// How long the kernel may take to fill memory, ns: for each range, and for each byte of it.
const FILL_TIME: u64 = 10_000_000_000;
const FILL_TIME_OF_BYTE: u64 = 10;

/// Samples of growth whose memory may be resident, by process and page (avma).
#[derive(Default)]
pub(super) struct Resident {
    by_process: FxHashMap<Pid, Pages>,
    /// Where the last look at a process's pages ended.
    looked_up: FxHashMap<Pid, u64>,
    /// Bytes of growth that no page is known of.
    without_page: u64,
    /// Bytes of growth that have gone although no call gave them back.
    vanished: u64,
}

impl Resident {
    /// Takes note of a sample that is the row `row` of the segment.
    pub(super) fn add(&mut self, s: &Sample, change: &MemoryChange, row: usize, segment: &mut Segment) {
        if change.bytes < 0 {
            segment.memory.push(RawMemory::Returned);
            return;
        }
        segment.memory.push(RawMemory::NEW);
        let Some(page) = page_of(change, s.time ^ u64::from(s.tid) << 32) else {
            self.without_page += segment.timeline.get(row).map_or(0, |row| row.amount);
            return;
        };
        let pages = self.by_process.entry(s.pid).or_default();
        // Another page at this place: what was there before has gone.
        if change.length == 0 && !change.is_repeated {
            forget(pages, page..page + PAGE, s.time, segment);
        }
        pages.entry(page).or_default().push(GrownSample {
            row: row as u32,
            kind: change.kind,
            filled: match change.length {
                0 => s.time,
                length => s
                    .time
                    .saturating_add(FILL_TIME)
                    .saturating_add(length.saturating_mul(FILL_TIME_OF_BYTE)),
            },
        });
    }

    /// A process has given back a range, or moved it.
    pub(super) fn apply(&mut self, range: &MemoryRange, system: &dyn System, segment: &mut Segment) {
        let Some(pages) = self.by_process.get_mut(&range.pid) else {
            return;
        };
        // Whole pages: the kernel rounds as well.
        let (from, to) = (
            range.from & !(PAGE - 1),
            range.to.saturating_add(PAGE - 1) & !(PAGE - 1),
        );
        if to <= from {
            return;
        }
        match range.change {
            RangeChange::GivenBack => {
                forget(pages, from..to, range.time, segment);
            }
            RangeChange::OfFiles => {
                let found: Vec<u64> = pages.range(from..to).map(|(page, _)| *page).collect();
                for page in found {
                    forget_of_files(pages, page, range.time, segment);
                }
            }
            RangeChange::SomeOfFiles | RangeChange::SomeOfIt => {
                let is_meant = |sample: &GrownSample| {
                    range.change == RangeChange::SomeOfIt || sample.kind != MemoryKind::Anonymous
                };
                let meant = pages
                    .range(from..to)
                    .filter(|(_, samples)| samples.iter().any(is_meant));
                let meant = meant.map(|(page, _)| *page).collect();
                forget_absent(pages, range.pid, meant, range.time, system, segment);
            }
            RangeChange::MovedTo(at) => {
                let moved = take(pages, from..to);
                forget(pages, at..at.saturating_add(to - from), range.time, segment);
                for (page, rows) in moved {
                    pages.entry(at.saturating_add(page - from)).or_default().extend(rows);
                }
            }
        }
    }

    /// Ends the account: looks up which of the sampled memory is resident, and counts what other tasks have done. `by_process`:
    /// stacks begin with their process.
    pub(super) fn finish(
        &mut self,
        accounts: &[ResidentMemory],
        by_process: bool,
        system: &dyn System,
        segment: &mut Segment,
    ) {
        let now = system.now();
        for (pid, pages) in &mut self.by_process {
            let all = pages.keys().copied().collect();
            self.vanished += forget_absent(pages, *pid, all, now, system, segment);
        }
        segment.note_peaks(&peaks(accounts));
        add_of_other_tasks(accounts, by_process, now, segment);
    }

    /// Looks up some of the sampled memory while it is recorded, other pages each time: what has gone without a call that gave it
    /// back is found within some looks.
    pub(super) fn look_up(&mut self, system: &dyn System, segment: &mut Segment) {
        let now = system.now();
        for (pid, pages) in &mut self.by_process {
            let first = self.looked_up.entry(*pid).or_default();
            let next = pages.range(*first..).chain(pages.range(..*first)).take(MAX_LOOKED_UP);
            let next: Vec<(u64, bool)> = next
                .map(|(page, samples)| (*page, samples.iter().all(|sample| sample.filled < now)))
                .collect();
            *first = next.last().map_or(0, |(page, _)| page.saturating_add(PAGE));
            let filled = next.into_iter().filter(|(_, is_filled)| *is_filled);
            forget_absent(
                pages,
                *pid,
                filled.map(|(page, _)| page).collect(),
                now,
                system,
                segment,
            );
        }
    }

    /// The rows of samples have other numbers: `numbers` by those before.
    pub(super) fn renumber(&mut self, numbers: &[u32]) {
        let samples = self.by_process.values_mut().flat_map(BTreeMap::values_mut).flatten();
        for sample in samples {
            sample.row = numbers.get(sample.row as usize).copied().unwrap_or(u32::MAX);
        }
    }

    /// Memory of which it is not known where it lies, or where it went, as text.
    pub(super) fn exceeded(&self) -> Vec<String> {
        let unknown = (self.without_page > 0).then(|| {
            let unknown = Unit::Bytes.show(self.without_page);
            format!("of {unknown} that grew, it is not known where they lie: they count as still resident")
        });
        let vanished = (self.vanished > 0).then(|| {
            let vanished = Unit::Bytes.show(self.vanished);
            format!(
                "{vanished} that grew were not there any more, although no call that was seen gave them back: swapped \
                 out, taken by the kernel, or moved to a chosen address; they do not count as resident"
            )
        });
        unknown.into_iter().chain(vanished).collect()
    }

    /// A process executes another program: all that it had has gone.
    pub(super) fn exec(&mut self, pid: Pid, time: u64, segment: &mut Segment) {
        self.looked_up.remove(&pid);
        if let Some(mut pages) = self.by_process.remove(&pid) {
            forget(&mut pages, 0..u64::MAX, time, segment);
        }
    }
}

/// Removes the samples of a range, whose memory has gone by a time; returns how much it was, bytes.
fn forget(pages: &mut Pages, range: Range<u64>, time: u64, segment: &mut Segment) -> u64 {
    let mut bytes: u64 = 0;
    for sample in take(pages, range).into_iter().flat_map(|(_, samples)| samples) {
        bytes = bytes.saturating_add(segment.has_gone(sample.row, time));
    }
    bytes
}

/// Removes the samples of a page that are of a file, which has gone by a time.
fn forget_of_files(pages: &mut Pages, page: u64, time: u64, segment: &mut Segment) {
    let Some(samples) = pages.get_mut(&page) else { return };
    samples.retain(|sample| {
        let is_kept = sample.kind == MemoryKind::Anonymous;
        if !is_kept {
            segment.has_gone(sample.row, time);
        }
        is_kept
    });
    if samples.is_empty() {
        pages.remove(&page);
    }
}

/// By process, when most of its memory was resident, and when the program began that it ran then.
fn peaks(accounts: &[ResidentMemory]) -> FxHashMap<Pid, (u64, u64)> {
    let mut highest: FxHashMap<Pid, (u64, (u64, u64))> = FxHashMap::default();
    for account in accounts {
        let Some(peak) = account.peak else { continue };
        let known = highest.entry(account.pid).or_default();
        if peak.bytes >= known.0 {
            *known = (peak.bytes, (account.began, peak.time));
        }
    }
    highest.into_iter().map(|(pid, (_, times))| (pid, times)).collect()
}

/// Removes the samples of those of the pages that are not resident at a time; returns how much memory it was, bytes.
fn forget_absent(
    pages: &mut Pages,
    pid: Pid,
    wanted: Vec<u64>,
    time: u64,
    system: &dyn System,
    segment: &mut Segment,
) -> u64 {
    let present = system.resident_pages(pid, &wanted).unwrap_or_default();
    let absent = wanted.iter().zip(present).filter(|(_, is_present)| !is_present);
    absent
        .map(|(page, _)| forget(pages, *page..page.saturating_add(PAGE), time, segment))
        .fold(0, u64::saturating_add)
}

/// Removes the samples of a range, and returns them.
fn take(pages: &mut Pages, range: Range<u64>) -> Vec<(u64, Vec<GrownSample>)> {
    if range.is_empty() {
        return Vec::new();
    }
    let found: Vec<u64> = pages.range(range).map(|(page, _)| *page).collect();
    let taken = found.into_iter().filter_map(|page| pages.remove_entry(&page));
    taken.collect()
}

/// The page (avma) that a change stands for, any of those that it may be about; `None`: not known. `random` chooses.
fn page_of(change: &MemoryChange, random: u64) -> Option<u64> {
    let first = change.address & !(PAGE - 1);
    let chosen = |from: u64, pages: u64| {
        // (The multiplier is that of Knuth's linear congruential generator.)
        let mixed = random.wrapping_mul(6_364_136_223_846_793_005) >> 33;
        from.saturating_add(mixed % pages.max(1) * PAGE)
    };
    let pages = change.bytes.unsigned_abs() / PAGE;
    match (change.address, change.length) {
        (0, _) => None,
        (address, 1..) => {
            let end = address.saturating_add(change.length).saturating_add(PAGE - 1) & !(PAGE - 1);
            Some(chosen(first, end.saturating_sub(first) / PAGE))
        }
        // A large page lies at a multiple of its size.
        _ if change.kind == MemoryKind::Anonymous && pages.is_power_of_two() => {
            Some(chosen(first & !(pages.saturating_mul(PAGE) - 1), pages))
        }
        _ => Some(first),
    }
}

/// Memory that has gone at a time that is not known.
const GONE: RawMemory = RawMemory::Grown {
    until: 0,
    at_peak: false,
};

/// Counts what other tasks have done to the memory of processes. `by_process`: stacks begin with their process.
pub(super) fn add_of_other_tasks(accounts: &[ResidentMemory], by_process: bool, time: u64, segment: &mut Segment) {
    for account in accounts {
        let total = account.total();
        let left = total.grown_by_others.saturating_sub(total.returned_by_others);
        let gone = total.grown_by_others - left;
        for (memory, amount) in [
            (RawMemory::NEW, left),
            (GONE, gone),
            (RawMemory::Returned, total.returned_by_others),
        ] {
            if amount > 0 {
                add_of_other_task((account.pid, by_process), memory, amount, time, segment);
            }
        }
    }
}

/// Counts what another task has done to the memory of a process, in one row.
fn add_of_other_task(
    (pid, has_process): (Pid, bool),
    memory: RawMemory,
    amount: u64,
    time: u64,
    segment: &mut Segment,
) {
    let process = has_process.then_some(RawFrame::Process(pid));
    let stack: Vec<RawFrame> = process
        .into_iter()
        .chain([RawFrame::Origin(Origin::OtherTask)])
        .collect();
    let sample = RawTimelineSample {
        time,
        pid,
        tid: pid,
        node: 0,
        count: 1,
        amount,
        labels: 0,
    };
    let mut path = FramePath::default();
    segment.add(&mut path, &stack, sample, None, StackQuality::Exact, &|_| 0);
    segment.memory.push(memory);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::system::LiveSystem;
    use crate::profile::resident::MemoryPeak;

    fn grown(address: u64, length: u64, pages: i64) -> MemoryChange {
        MemoryChange {
            bytes: pages * PAGE as i64,
            kind: MemoryKind::Anonymous,
            address,
            length,
            is_repeated: false,
            doubled: 0,
        }
    }

    fn add(resident: &mut Resident, segment: &mut Segment, change: MemoryChange) {
        let sample = Sample {
            pid: 7,
            time: segment.memory.len() as u64,
            ..Sample::default()
        };
        resident.add(&sample, &change, segment.memory.len(), segment);
    }

    fn rows(segment: &Segment) -> Vec<bool> {
        segment.memory.iter().map(|memory| memory.is_resident()).collect()
    }

    #[test]
    fn ranges_take_out_what_grew_before() {
        let (mut resident, mut segment) = (Resident::default(), Segment::default());
        let range = |from, to, change| MemoryRange {
            pid: 7,
            time: 50,
            from,
            to,
            change,
        };
        use RangeChange::{GivenBack, MovedTo};
        add(&mut resident, &mut segment, grown(0x10_0123, 0, 1));
        add(&mut resident, &mut segment, grown(0x20_0000, 0, 1));
        add(&mut resident, &mut segment, grown(0, 0, 1)); // not known where
        assert_eq!(rows(&segment), [true, true, true]);
        resident.apply(&range(0x10_0000, 0x10_0001, GivenBack), &LiveSystem, &mut segment);
        assert_eq!(rows(&segment), [false, true, true]);
        // The same page again; moved, then given back where it was before, and where it is.
        add(&mut resident, &mut segment, grown(0x10_0000, 0, 1));
        resident.apply(
            &range(0x10_0000, 0x10_2000, MovedTo(0x90_0000)),
            &LiveSystem,
            &mut segment,
        );
        resident.apply(&range(0x10_0000, 0x10_2000, GivenBack), &LiveSystem, &mut segment);
        assert_eq!(rows(&segment), [false, true, true, true]);
        resident.apply(&range(0x90_0000, 0x90_1000, GivenBack), &LiveSystem, &mut segment);
        assert_eq!(rows(&segment), [false, true, true, false]);
        // Another page at the place of one that was taken unseen.
        add(&mut resident, &mut segment, grown(0x20_0000, 0, 1));
        assert_eq!(rows(&segment), [false, false, true, false, true]);
        resident.exec(7, 60, &mut segment);
        assert_eq!(rows(&segment), [false, false, true, false, false]);
        // Copies in the place of pages of files: what is anonymous stays.
        let of_file = MemoryChange {
            kind: MemoryKind::File,
            ..grown(0x30_0000, 0, 1)
        };
        let here = MemoryChange {
            length: 1,
            ..grown(0x30_0000, 0, 1)
        };
        add(&mut resident, &mut segment, of_file);
        add(&mut resident, &mut segment, here);
        resident.apply(
            &range(0x2f_0000, 0x30_1000, RangeChange::OfFiles),
            &LiveSystem,
            &mut segment,
        );
        assert_eq!(rows(&segment)[5..], [false, true]);
        // Of hostile sizes.
        for (from, to, change) in [
            (u64::MAX, u64::MAX, GivenBack),
            (9, 3, GivenBack),
            (0, u64::MAX, MovedTo(u64::MAX)),
        ] {
            add(&mut resident, &mut segment, grown(0x20_0000, 0, 1));
            resident.apply(&range(from, to, change), &LiveSystem, &mut segment);
        }
    }

    #[test]
    fn memory_was_resident_at_the_peak_of_its_program() {
        let (mut resident, mut segment) = (Resident::default(), Segment::default());
        let grow = |resident: &mut Resident, segment: &mut Segment, time: u64, address: u64| {
            let row = segment.memory.len();
            segment.timeline.push(RawTimelineSample {
                time,
                pid: 7,
                tid: 7,
                node: 0,
                count: 1,
                amount: 1,
                labels: 0,
            });
            let sample = Sample {
                pid: 7,
                time,
                ..Sample::default()
            };
            resident.add(&sample, &grown(address, 0, 1), row, segment);
        };
        grow(&mut resident, &mut segment, 1, 0x1000);
        grow(&mut resident, &mut segment, 2, 0x2000);
        let given_back = MemoryRange {
            pid: 7,
            time: 5,
            from: 0x2000,
            to: 0x3000,
            change: RangeChange::GivenBack,
        };
        resident.apply(&given_back, &LiveSystem, &mut segment);
        grow(&mut resident, &mut segment, 6, 0x3000);
        let account = |began, bytes, time| ResidentMemory {
            pid: 7,
            began,
            peak: Some(MemoryPeak { bytes, time }),
            ..ResidentMemory::default()
        };
        for (accounts, expected) in [
            (vec![account(0, 9, 4)], [true, true, false]),
            (vec![account(0, 9, 5)], [true, false, false]),
            (vec![account(0, 9, 7)], [true, false, true]),
            (
                vec![account(0, 3, 4), account(6, 9, 8), account(9, 1, 9)],
                [false, false, true],
            ),
            (vec![], [false, false, false]),
        ] {
            segment.note_peaks(&peaks(&accounts));
            let at_peak: Vec<bool> = segment.memory.iter().map(|memory| memory.was_at_peak()).collect();
            assert_eq!(at_peak, expected, "{accounts:?}");
        }
    }

    #[test]
    fn a_change_stands_for_one_of_its_pages() {
        for random in 0..2000 {
            let huge = page_of(&grown(0x20_1000, 0, 512), random).expect("a page");
            assert!(
                (0x20_0000..0x40_0000).contains(&huge) && huge.is_multiple_of(PAGE),
                "{huge:x}"
            );
            let filled = page_of(&grown(0x7000, 0x2001, 1), random).expect("a page");
            assert!((0x7000..0xa000).contains(&filled), "{filled:x}");
            assert_eq!(page_of(&grown(0x7fff, 0, 1), random), Some(0x7000));
            assert_eq!(page_of(&grown(0, 0, 1), random), None);
            assert!(page_of(&grown(u64::MAX, u64::MAX, i64::MIN / PAGE as i64), random).is_some());
        }
    }
}
