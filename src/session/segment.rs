//! What has been counted since a time: stacks, the samples that have them, and what is known of their waits.

use std::collections::BTreeMap;
use std::ops::Range;

use rustc_hash::FxHashMap;

use super::instances::Instances;
use crate::capture::SampleCounts;
use crate::counts::{FramePath, RawNode, RawTimelineSample, RawTree, TreeShare};
use crate::counts::{RawLag, RawMemory};
use crate::counts::{RawWaits, RawWaker};
use crate::event::{Pid, Tid};
use crate::frame::RawFrame;
use crate::interleave::StackQuality;
use crate::profile::labels::LabelSets;
use crate::profile::model::Quality;
use crate::truncation::Truncation;

/// Size of the tree, in nodes, from which on nodes are dropped that no sample needs.
const PRUNE_NODES: usize = 1 << 17;
/// Distinct stacks of wakers that are kept.
const MAX_WAKERS: usize = 1 << 16;

/// Number of samples by quality of their stacks.
#[derive(Clone, Debug, Default)]
pub struct QualityCounts {
    pub exact: u64,
    pub repaired: u64,
    pub partial: u64,
    pub reasons: BTreeMap<Truncation, u64>,
}

impl QualityCounts {
    pub fn taken(&self) -> u64 {
        self.exact + self.repaired + self.partial
    }

    pub(super) fn add(&mut self, quality: StackQuality) {
        match quality {
            StackQuality::Exact => self.exact += 1,
            StackQuality::Repaired => self.repaired += 1,
            StackQuality::Partial(why) => {
                self.partial += 1;
                *self.reasons.entry(why).or_default() += 1;
            }
        }
    }

    /// The counts for a profile of which so many samples were `expected` and `lost`.
    pub fn quality(&self, expected: u64, lost: u64) -> Quality {
        Quality {
            expected,
            taken: self.taken(),
            exact: self.exact,
            repaired: self.repaired,
            partial: self.partial,
            lost,
            reasons: self
                .reasons
                .iter()
                .map(|(why, n)| (why.reason().to_string(), *n))
                .collect(),
        }
    }

    /// The same where `counts` are the backend's, taken at `rate` Hz, and every sample stands for one period of CPU time.
    pub fn quality_at_rate(&self, counts: &SampleCounts, rate: u64) -> Quality {
        let lost = counts.lost + unseen(counts.cpu_time, rate, self.taken() + counts.lost);
        self.quality(self.taken() + lost, lost)
    }
}

/// Samples that CPU time (ns) at a rate (Hz) requires beyond those that are `known`, taken or lost: lost too, although
/// nothing has counted them. When samples fall due is random, so few of them say nothing.
fn unseen(cpu_time: u64, rate: u64, known: u64) -> u64 {
    /// Standard deviations that are left to chance, samples, in case there are not enough for them to mean anything, and the part
    /// by which the clocks of CPU time and of sampling may differ.
    const DEVIATIONS: u64 = 4;
    const FEW: u64 = 10;
    const PART: u64 = 50;
    let due = (u128::from(cpu_time) * u128::from(rate) / 1_000_000_000) as u64;
    let missing = due.saturating_sub(known);
    if missing > DEVIATIONS * due.isqrt() + FEW + due / PART {
        missing
    } else {
        0
    }
}

/// Threads that ended waits, each with its stack once.
#[derive(Default)]
pub(super) struct WakerTable {
    known: FxHashMap<RawWaker, u32>,
    /// Their nodes are those of the segment's tree, where they count nothing.
    all: Vec<RawWaker>,
}

impl WakerTable {
    pub(super) fn all(&self) -> &[RawWaker] {
        &self.all
    }

    /// The number of a waker in [`WakerTable::all`] plus 1; 0 if there is no room for more.
    pub(super) fn number(&mut self, waker: RawWaker) -> u32 {
        if let Some(number) = self.known.get(&waker) {
            return *number;
        }
        if waker == RawWaker::default() || self.all.len() >= MAX_WAKERS {
            return 0;
        }
        self.add(waker)
    }

    fn add(&mut self, waker: RawWaker) -> u32 {
        self.all.push(waker);
        let number = self.all.len() as u32;
        self.known.insert(waker, number);
        number
    }

    /// The same wakers by the same numbers, with their stacks in another tree.
    fn moved(&self, from: &RawTree, to: &mut RawTree) -> WakerTable {
        let (mut table, mut path) = (WakerTable::default(), Vec::new());
        for waker in &self.all {
            stack(from, waker.node, &mut path);
            let (node, _) = to.add(&path, 0);
            table.add(RawWaker { node, ..*waker });
        }
        table
    }
}

/// The interval off the CPU that a sample stands for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Interval {
    /// ns; 0: of a running thread.
    pub(super) length: u64,
    /// As [`WakerTable::number`].
    pub(super) waker: u32,
    /// Whether the thread held the lock of its interpreter.
    pub(super) holds_lock: bool,
}

/// Samples that were counted since a time.
#[derive(Default)]
pub struct Segment {
    pub tree: RawTree,
    pub(super) timeline: Vec<RawTimelineSample>,
    /// Of the samples in the timeline; empty where no off-CPU time is sampled.
    pub(super) waits: RawWaits,
    pub(super) wakers: WakerTable,
    /// Of the samples in the timeline; empty where no resident memory is sampled.
    pub(super) memory: Vec<RawMemory>,
    pub(super) labels: LabelSets,
    /// Callbacks that kept their event loop for long.
    pub(super) lags: Vec<RawLag>,
    pub quality: QualityCounts,
    /// Of a whole host's samples.
    pub(super) instances: Instances,
    /// Of a whole host: what each process has of the tree.
    shares: Option<FxHashMap<Pid, TreeShare>>,
}

impl Segment {
    /// `is_of_host`: of many processes, each of which has a part of the tree.
    pub(super) fn new(is_of_host: bool) -> Segment {
        Segment {
            shares: is_of_host.then(FxHashMap::default),
            ..Segment::default()
        }
    }

    /// Counts a sample whose stack is `frames`, outermost first; `sample.node` is set. `name_bytes`: bytes of a frame's names.
    /// `interval`: where off-CPU time is sampled.
    pub(super) fn add(
        &mut self,
        path: &mut FramePath,
        frames: &[RawFrame],
        sample: RawTimelineSample,
        interval: Option<Interval>,
        quality: StackQuality,
        name_bytes: &dyn Fn(&RawFrame) -> usize,
    ) {
        let (node, is_complete) = match &mut self.shares {
            Some(shares) => {
                let share = shares.entry(sample.pid).or_default();
                self.tree.add_shared(share, path, frames, sample.count, name_bytes)
            }
            None => self.tree.add_incremental(path, frames, sample.count, name_bytes),
        };
        let quality = if is_complete {
            quality
        } else {
            StackQuality::Partial(Truncation::TreeLimit)
        };
        self.quality.add(quality);
        self.timeline.push(RawTimelineSample { node, ..sample });
        if let Some(interval) = interval {
            self.waits.push(interval.length, interval.waker, interval.holds_lock);
        }
    }

    /// Takes note that the memory of a row is not resident any more.
    /// `time`: when that was, on the samples' clock. Returns how much memory it is, bytes.
    pub(super) fn has_gone(&mut self, row: u32, time: u64) -> u64 {
        if let Some(memory) = self.memory.get_mut(row as usize) {
            *memory = RawMemory::Grown {
                until: time.min(u64::MAX - 1),
                at_peak: false,
            };
        }
        self.timeline.get(row as usize).map_or(0, |row| row.amount)
    }

    /// Takes note of which memory was resident when most of a process's was. `peaks`: the time of that, and when the
    /// program began that was run then.
    pub(super) fn note_peaks(&mut self, peaks: &FxHashMap<Pid, (u64, u64)>) {
        for (row, memory) in self.timeline.iter().zip(&mut self.memory) {
            if let RawMemory::Grown { until, at_peak } = memory {
                let was_there = |(began, time): &(u64, u64)| (*began..=*time).contains(&row.time) && *until > *time;
                *at_peak = peaks.get(&row.pid).is_some_and(was_there);
            }
        }
    }

    /// The node where a stack ends that counts nothing itself.
    pub(super) fn node(
        &mut self,
        path: &mut FramePath,
        frames: &[RawFrame],
        name_bytes: &dyn Fn(&RawFrame) -> usize,
    ) -> RawNode {
        self.tree.add_incremental(path, frames, 0, name_bytes).0
    }

    /// Counts time of a suspended task: `awaited` ns of the task's own, and `sample.amount` of its thread's.
    pub(super) fn add_await(&mut self, sample: RawTimelineSample, awaited: u64) {
        self.tree.count(sample.node, sample.count);
        self.waits.push_await(awaited);
        self.timeline.push(sample);
    }

    /// Ends the segment and begins another one; returns what was counted.
    pub(super) fn close(&mut self) -> Segment {
        let next = Segment {
            tree: self.tree.successor(),
            ..Segment::new(self.shares.is_some())
        };
        std::mem::replace(self, next)
    }

    /// Drops samples before a time (of the samples' clock). True if enough stacks are without samples now that
    /// [`Segment::prune`] is worth its cost.
    pub(super) fn forget_before(&mut self, time: u64) -> bool {
        let first = self.timeline.partition_point(|t| t.time < time);
        self.timeline.drain(..first);
        self.waits.forget_first(first);
        self.lags.retain(|lag| lag.start >= time);
        self.tree.nodes().len() > PRUNE_NODES
    }

    /// Puts the oldest samples of memory that has gone, and of memory that was given back, together by stack and
    /// thread, once there are more than `most` of them: until half as many are left. Returns the number that each other
    /// row has then, by its number before; `None`: they have the same as before.
    pub(super) fn combine_gone(&mut self, most: usize) -> Option<Vec<u32>> {
        const GONE: RawMemory = RawMemory::Grown {
            until: 0,
            at_peak: false,
        };
        let has_gone = |memory: &RawMemory| !memory.is_resident();
        let gone = self.memory.iter().filter(|memory| has_gone(memory)).count();
        if gone <= most {
            return None;
        }
        let mut excess = gone - most / 2;
        let mut first: FxHashMap<(RawNode, Tid, RawMemory), usize> = FxHashMap::default();
        let mut numbers = Vec::with_capacity(self.timeline.len());
        let mut rows: Vec<RawTimelineSample> = Vec::new();
        let mut memory: Vec<RawMemory> = Vec::new();
        for (row, of_row) in self.timeline.iter().zip(&self.memory) {
            if excess > 0 && has_gone(of_row) {
                excess -= 1;
                let kind = match of_row {
                    RawMemory::Returned => RawMemory::Returned,
                    RawMemory::Grown { .. } => GONE,
                };
                let at = *first.entry((row.node, row.tid, kind)).or_insert(rows.len());
                if let Some(sum) = rows.get_mut(at) {
                    sum.count = sum.count.saturating_add(row.count);
                    sum.amount = sum.amount.saturating_add(row.amount);
                    numbers.push(at as u32);
                    continue;
                }
            }
            numbers.push(rows.len() as u32);
            rows.push(*row);
            memory.push(*of_row);
        }
        (self.timeline, self.memory) = (rows, memory);
        Some(numbers)
    }

    /// Drops the stacks that no sample needs. Nodes have other numbers after it.
    pub(super) fn prune(&mut self) {
        let mut tree = self.tree.successor();
        self.timeline = moved_samples(&self.tree, &mut tree, self.timeline.iter());
        self.lags = moved_lags(&self.tree, &mut tree, self.lags.iter());
        self.wakers = self.wakers.moved(&self.tree, &mut tree);
        self.tree = tree;
    }

    /// The samples of a time range, of all threads or one, with what kept event loops also before; without labels and wakers.
    pub(super) fn window(&self, span: &Range<u64>, only: Option<Tid>) -> Segment {
        let wanted = |t: &RawTimelineSample| span.contains(&t.time) && only.is_none_or(|tid| t.tid == tid);
        let rows: Vec<usize> = (0..self.timeline.len())
            .filter(|row| wanted(&self.timeline[*row]))
            .collect();
        let mut tree = RawTree::default();
        let timeline = moved_samples(&self.tree, &mut tree, rows.iter().map(|row| &self.timeline[*row]));
        let shown = |lag: &&RawLag| lag.start < span.end && only.is_none_or(|tid| lag.tid == tid);
        let lags = moved_lags(&self.tree, &mut tree, self.lags.iter().filter(shown));
        Segment {
            timeline,
            waits: self.waits.lengths_of(&rows),
            memory: rows.iter().filter_map(|row| self.memory.get(*row).copied()).collect(),
            lags,
            tree,
            ..Segment::default()
        }
    }
}

/// The same samples, with their stacks in another tree.
fn moved_samples<'a>(
    from: &RawTree,
    to: &mut RawTree,
    samples: impl Iterator<Item = &'a RawTimelineSample>,
) -> Vec<RawTimelineSample> {
    let mut path = Vec::new();
    let samples = samples.map(|sample| {
        stack(from, sample.node, &mut path);
        RawTimelineSample {
            node: to.add(&path, sample.count).0,
            ..*sample
        }
    });
    samples.collect()
}

/// The same callbacks, with their stacks in another tree.
fn moved_lags<'a>(from: &RawTree, to: &mut RawTree, lags: impl Iterator<Item = &'a RawLag>) -> Vec<RawLag> {
    let mut path = Vec::new();
    let lags = lags.map(|lag| {
        stack(from, lag.node, &mut path);
        RawLag {
            node: to.add(&path, 0).0,
            ..*lag
        }
    });
    lags.collect()
}

/// Frames from the root to a node.
fn stack(tree: &RawTree, node: RawNode, path: &mut Vec<RawFrame>) {
    path.clear();
    let mut at = node;
    while let (parent, Some(frame), _) = tree.nodes()[at as usize] {
        path.push(frame);
        at = parent;
    }
    path.reverse();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(i: usize, node: RawNode) -> RawTimelineSample {
        RawTimelineSample {
            time: i as u64,
            pid: 1,
            tid: 1 + i as u32 % 2,
            node,
            count: 1,
            amount: 0,
            labels: 0,
        }
    }

    /// Four samples at the times 0 to 3, of the threads 1 and 2 in turn.
    fn segment() -> Segment {
        let k = RawFrame::Kernel;
        let (mut segment, mut path) = (Segment::default(), FramePath::default());
        for (i, frames) in [&[k(1), k(2)][..], &[k(1), k(3)], &[k(1), k(2)], &[]]
            .iter()
            .enumerate()
        {
            segment.add(&mut path, frames, sample(i, 0), None, StackQuality::Exact, &|_| 0);
        }
        segment
    }

    fn stacks(segment: &Segment) -> Vec<(u64, Vec<RawFrame>)> {
        let mut path = Vec::new();
        let of = |row: &RawTimelineSample| {
            stack(&segment.tree, row.node, &mut path);
            (row.time, path.clone())
        };
        segment.timeline.iter().map(of).collect()
    }

    #[test]
    fn windows_have_the_stacks_of_their_samples() {
        let (k, segment) = (RawFrame::Kernel, segment());
        let check = |span: Range<u64>, only, nodes, expected: &[(u64, &[RawFrame])]| {
            let window = segment.window(&span, only);
            let expected: Vec<_> = expected.iter().map(|(time, frames)| (*time, frames.to_vec())).collect();
            assert_eq!(
                (stacks(&window), window.tree.nodes().len()),
                (expected, nodes),
                "{span:?} {only:?}"
            );
        };
        check(2..9, None, 3, &[(2, &[k(1), k(2)]), (3, &[])]);
        check(0..9, Some(2), 3, &[(1, &[k(1), k(3)]), (3, &[])]);
        check(4..9, None, 1, &[]);
    }

    #[test]
    fn old_samples_and_their_stacks_are_dropped() {
        let mut segment = segment();
        segment.lags.push(RawLag {
            start: 3,
            node: segment.timeline[1].node,
            ..RawLag::default()
        });
        let waker = |segment: &Segment, row: usize| RawWaker {
            pid: 1,
            tid: 9,
            node: segment.timeline[row].node,
        };
        let known = waker(&segment, 2);
        assert_eq!((segment.wakers.number(known), segment.wakers.number(known)), (1, 1));
        let before = stacks(&segment);
        assert!(!segment.forget_before(2));
        segment.prune();
        assert_eq!(segment.wakers.all(), [waker(&segment, 0)]);
        assert_eq!(stacks(&segment), before[2..]);
        let mut path = Vec::new();
        stack(&segment.tree, segment.lags[0].node, &mut path);
        assert_eq!((path.as_slice(), segment.tree.nodes().len()), (&before[1].1[..], 4));
    }

    /// A path of the segment before leads to no node of the next one.
    #[test]
    fn segments_begin_empty() {
        let k = RawFrame::Kernel;
        let (mut segment, mut path) = (segment(), FramePath::default());
        segment.node(&mut path, &[k(1), k(3)], &|_| 0);
        let closed = segment.close();
        assert_eq!((closed.timeline.len(), closed.quality.taken()), (4, 4));
        assert_eq!((segment.timeline.len(), segment.quality.taken()), (0, 0));
        segment.add(
            &mut path,
            &[k(1), k(3)],
            sample(7, 0),
            None,
            StackQuality::Exact,
            &|_| 0,
        );
        assert_eq!(stacks(&segment), [(7, vec![k(1), k(3)])]);
        assert_eq!(segment.tree.nodes().len(), 3);
    }

    #[test]
    fn memory_that_has_gone_is_combined_by_stack() {
        let resident = RawMemory::NEW;
        let gone = RawMemory::Grown {
            until: 9,
            at_peak: false,
        };
        let mut segment = Segment::default();
        let rows = [
            (1, gone),
            (1, resident),
            (2, gone),
            (1, gone),
            (1, RawMemory::Returned),
            (1, gone),
            (2, gone),
        ];
        for (time, (node, memory)) in (0..).zip(rows) {
            let row = RawTimelineSample {
                tid: 1,
                amount: 10,
                ..sample(time, node)
            };
            segment.timeline.push(row);
            segment.memory.push(memory);
        }
        assert_eq!(segment.combine_gone(6), None);
        let numbers = segment.combine_gone(5).expect("more than are kept");
        let left: Vec<_> = segment
            .timeline
            .iter()
            .map(|row| (row.time, row.node, row.count, row.amount))
            .collect();
        assert_eq!(numbers, [0, 1, 2, 0, 3, 4, 5]);
        assert_eq!(
            left,
            [
                (0, 1, 2, 20),
                (1, 1, 1, 10),
                (2, 2, 1, 10),
                (4, 1, 1, 10),
                (5, 1, 1, 10),
                (6, 2, 1, 10)
            ]
        );
        assert_eq!(segment.memory, [gone, resident, gone, RawMemory::Returned, gone, gone]);
    }

    #[test]
    fn what_is_missing_beyond_chance_is_lost() {
        let check = |ms: u64, known, expected| assert_eq!(unseen(ms * 1_000_000, 100, known), expected, "{ms} {known}");
        check(0, 0, 0);
        check(300, 0, 0); // 30 are few
        check(410, 0, 41);
        check(1290, 30, 99);
        check(10_000, 1000, 0);
        check(10_000, 880, 0);
        check(10_000, 800, 200);
        check(10_000, 2000, 0);
    }
}
