//! Changes between two profiles, and their statistical significance.
//!
//! For each row (function, module) the interval of its change has the width of the wider of two estimates of the noise
//! within the recordings, and that of the noise between processes:
//!
//! - of sampling: counts as those of independent samples, with both profiles' pooled share (the score test of two
//!   proportions, or of two Poisson rates), which holds for small counts;
//! - of time: samples of a thread are autocorrelated, as a program does one thing for a while. Both recordings are
//!   divided into the same number of blocks of equal length; the differences between corresponding blocks have the
//!   variance within the runs, on any time scale. Phases that both runs have at the same times cancel out;
//! - between processes: the memory layout differs between processes and moves time between functions, for however long
//!   each is sampled. One recording of each side cannot measure that, so it is assumed: a process is worth at most
//!   `SAMPLES_PER_PROCESS` independent samples.
//!
//! For interpreter-internal functions that effect is far larger (a third of the time of its allocator and number types,
//! measured with equal runs of a loop over numbers). They are tested on request only; the Python functions that call
//! them always are.
//!
//! The intervals hold simultaneously with the requested confidence (Bonferroni: each gets its share of the error). A
//! row whose interval excludes zero has changed.

use std::collections::HashSet;

use super::category::{START, THREAD_START};
use super::model::{Frame, FrameKind, Profile};
use super::stats::{SelfTotal, Stats};
use super::values::Unit;

mod both;
mod matching;
pub(super) mod quantile;

pub use both::{Both, DiffSide, WHOLE, both};
pub use matching::RowMap;

#[cfg(test)]
mod tests;

/// Blocks of time: enough for a variance, few enough for long ones.
const MAX_BLOCKS: usize = 64;
const MIN_BLOCKS: usize = 4;
/// Samples in a block, at least, as long as that leaves some blocks.
const PER_BLOCK: u64 = 50;
/// Independent samples with as much information as one process sampled forever. Measured with 24 processes that looped
/// over and sorted numbers, by the variance of a function's share beyond that of sampling: worth 20,000 for the
/// function that reads the most memory and its key function, 100,000 and more for four others.
const SAMPLES_PER_PROCESS: f64 = 50_000.0;
/// Rows with fewer samples in both profiles together could not show any change, and are not tested.
const MIN_SAMPLES: f64 = 10.0;

/// How the profiles are normalized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Normalization {
    /// Parts of all samples. Where one part grows, others shrink.
    Share,
    /// CPU seconds for each second of the recording.
    Rate,
    /// CPU seconds: for runs that did the same work.
    Time,
}

/// What a row of a comparison stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// One function.
    Function,
    /// All functions of one module.
    Module,
}

/// What is counted of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Samples that ended in the row.
    SelfCount,
    /// Samples with the row anywhere on their stack.
    Total,
}

/// How two profiles are compared.
#[derive(Clone, Copy, Debug)]
pub struct DiffOptions {
    /// What the compared amounts are parts of.
    pub normalization: Normalization,
    /// What a row stands for.
    pub by: RowKind,
    /// What is counted of a row.
    pub metric: Metric,
    /// That no interval misses, between 0 and 1.
    pub confidence: f64,
    /// Also test interpreter-internal functions.
    pub interpreter: bool,
    /// How much of the compared value one independent sample represents, in each profile: 1 for samples, see [`grain`].
    pub grains: [f64; 2],
}

/// How much of a value (an index in [`Profile::value_types`]) one independent sample represents: of samples with
/// different weights, the sum of their squares by their sum; without a timeline, the mean for each count. At least 1.
pub fn grain(profile: &Profile, value: usize) -> f64 {
    let root = |value: usize| profile.amounts(value).first().copied().unwrap_or(0) as f64;
    let (mut sum, mut squares) = (0.0, 0.0);
    for sample in 0..profile.timeline.len() {
        let weight = profile.sample_amount(value, sample) as f64;
        sum += weight;
        squares += weight * weight;
    }
    let grain = if profile.is_timed() && sum > 0.0 {
        squares / sum
    } else {
        root(value) / root(0).max(1.0)
    };
    grain.max(1.0)
}

/// Changes smaller than this may be noise; in the unit of [`Normalization`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DetectionLimit {
    /// The limit of these two recordings.
    pub now: f64,
    /// For recordings of any length: the noise between processes.
    pub of_processes: f64,
}

/// A row of both profiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change<'a> {
    /// A frame of the row (of the newer profile if it is there): a function, or one of the module.
    pub frame: &'a Frame,
    /// Samples of the older and of the newer profile.
    pub samples: (u64, u64),
    /// In the unit of [`Normalization`]: parts, or seconds (per second).
    pub before: f64,
    /// The same of the newer profile.
    pub after: f64,
    /// Interval of the change; `None` for a row with too few samples, and for an interpreter-internal function that is
    /// not tested.
    pub interval: Option<(f64, f64)>,
    /// Of a row with an interval.
    pub limit: Option<DetectionLimit>,
    /// Interpreter-internal; not tested by default.
    pub interpreter_internal: bool,
}

impl Change<'_> {
    /// The difference of both amounts, in the unit of [`Normalization`]; negative if it shrank.
    pub fn change(&self) -> f64 {
        self.after - self.before
    }

    /// Whether it is statistically significant.
    pub fn is_significant(&self) -> bool {
        self.interval.is_some_and(|(low, high)| low > 0.0 || high < 0.0)
    }
}

/// The complete comparison.
#[derive(Debug)]
pub struct Diff<'a> {
    /// Significant changes first, then the others; each largest change first.
    pub rows: Vec<Change<'a>>,
    /// CPU time altogether, for [`Normalization::Rate`] and [`Normalization::Time`].
    pub all: Option<Change<'a>>,
    /// Blocks of time; `None` if a profile has no timeline; samples are then assumed independent.
    pub blocks: Option<usize>,
    /// Python files whose functions are in another file of the newer profile: both paths.
    pub renamed: Vec<(&'a str, &'a str)>,
}

/// Compares `b` with the older `a`.
pub fn diff<'a>(a: &'a Profile, b: &'a Profile, options: &DiffOptions) -> Diff<'a> {
    let mut stats = [Stats::new(a), Stats::new(b)];
    let units = match options.by {
        RowKind::Function => RowMap::of_functions(&stats[0], &stats[1]),
        RowKind::Module => RowMap::of_modules(&stats[0], &stats[1]),
    };
    let count = |counts: SelfTotal| match options.metric {
        Metric::SelfCount => counts.self_count,
        Metric::Total => counts.total,
    };
    let samples = [stats[0].samples(), stats[1].samples()];
    let counts = |i: usize| stats[i].group(units.frames.len(), &units.of[i]).into_iter().map(count);
    let counts: Vec<(u64, u64)> = counts(0).zip(counts(1)).collect();
    // Which of two adjacent instructions is sampled varies between runs. For total samples, inlined functions need not
    // be distinguished from those around them.
    let inlined = |unit: usize| options.metric == Metric::Total && units.frames[unit].kind == FrameKind::Inlined;
    let shown = |unit: usize| counts[unit] != (0, 0) && !(options.by == RowKind::Function && inlined(unit));
    let interpreters = match (options.by, options.interpreter) {
        (RowKind::Function, false) => interpreters([a, b]),
        _ => HashSet::new(),
    };
    let native = |frame: &Frame| matches!(frame.kind, FrameKind::Native | FrameKind::Inlined);
    let is_row = |frame: &Frame| frame.module.is_empty() && [START, THREAD_START].contains(&&*frame.name);
    let is_internal = |unit: usize| {
        let frame = units.frames[unit];
        let is_interpreter = |frame: &Frame| interpreters.contains(&*frame.module) || is_row(frame);
        !interpreters.is_empty() && native(frame) && is_interpreter(frame)
    };
    let grains = options.grains;
    let least = |unit: usize| counts[unit].0 as f64 / grains[0] + counts[unit].1 as f64 / grains[1] >= MIN_SAMPLES;
    let tested: Vec<usize> = (0..counts.len())
        .filter(|i| shown(*i) && !is_internal(*i) && least(*i))
        .collect();

    let profiles = [a, b];
    let timed = (0..2).all(|i| profiles[i].is_timed() && samples[i] > 0);
    let independent = [0, 1].map(|i| (samples[i] as f64 / grains[i]) as u64);
    let blocks = (independent[0].min(independent[1]) / PER_BLOCK).clamp(MIN_BLOCKS as u64, MAX_BLOCKS as u64) as usize;
    // By block, the samples of each tested row and of all.
    let mut in_blocks: [Vec<(Vec<u64>, u64)>; 2] = Default::default();
    if timed {
        for i in 0..2 {
            for self_count in self_by_block(profiles[i], blocks) {
                stats[i].select(self_count);
                let all = stats[i].group(units.frames.len(), &units.of[i]);
                let rows = tested.iter().map(|row| count(all[*row])).collect();
                in_blocks[i].push((rows, stats[i].samples()));
            }
        }
    }

    let totals = [0, 1].map(|i| total(profiles[i], samples[i], options.normalization));
    let scales = totals.map(|total| 1.0 / total);
    let error = (1.0 - options.confidence) / (tested.len().max(1) as f64) / 2.0;
    let z = quantile::student(error, quantile::NORMAL);
    let t = quantile::student(error, blocks as u32 - 1);
    let test = |x: (u64, u64), in_block: &dyn Fn(usize, usize) -> (u64, u64)| {
        // Quotients, not products: all of all is 1 whatever the count.
        let [before, after] = [x.0 as f64 / totals[0], x.1 as f64 / totals[1]];
        let pooled = (x.0 as f64 + x.1 as f64) / (totals[0] + totals[1]);
        let of_share = if options.normalization == Normalization::Share {
            (1.0 - pooled).max(0.0)
        } else {
            1.0
        };
        let spread = |one: [f64; 2]| z * (pooled * (one[0] + one[1]) * of_share).sqrt();
        let between = spread([0, 1].map(|i| scales[i] * samples[i] as f64 / SAMPLES_PER_PROCESS));
        let mut half = spread([0, 1].map(|i| scales[i] * grains[i]));
        if timed {
            // A block's part of the change, with the expected share of its samples taken off where shares are compared.
            let part = |i: usize, k: usize, total: u64| {
                let (here, all) = in_block(i, k);
                let expected = match options.normalization {
                    Normalization::Share => total as f64 / samples[i].max(1) as f64 * all as f64,
                    Normalization::Rate | Normalization::Time => 0.0,
                };
                scales[i] * (here as f64 - expected)
            };
            let parts: Vec<f64> = (0..blocks).map(|k| part(1, k, x.1) - part(0, k, x.0)).collect();
            let mean = parts.iter().sum::<f64>() / blocks as f64;
            let squares: f64 = parts.iter().map(|part| (part - mean).powi(2)).sum();
            half = half.max(t * (squares * blocks as f64 / (blocks as f64 - 1.0)).sqrt());
        }
        half = half.hypot(between);
        let (mut low, mut high) = (after - before - half, after - before + half);
        if options.normalization == Normalization::Share {
            // A share is a part of 1.
            (low, high) = (low.max(-1.0), high.min(1.0));
        }
        let limit = DetectionLimit {
            now: half,
            of_processes: between,
        };
        (before, after, (low, high), limit)
    };
    let sound = totals.iter().all(|total| total.is_finite() && *total > 0.0);
    let mut rows: Vec<Change<'a>> = Vec::new();
    let mut next = 0;
    for (unit, frame) in units.frames.iter().enumerate() {
        let x = counts[unit];
        if !shown(unit) {
            continue;
        }
        let of = |x: u64, total: f64| if total > 0.0 { x as f64 / total } else { 0.0 };
        let mut row = Change {
            frame,
            samples: x,
            before: of(x.0, totals[0]),
            after: of(x.1, totals[1]),
            interval: None,
            limit: None,
            interpreter_internal: is_internal(unit),
        };
        if tested.get(next) == Some(&unit) {
            if sound {
                let at = next;
                let (_, _, interval, limit) = test(x, &|i, k| (in_blocks[i][k].0[at], in_blocks[i][k].1));
                (row.interval, row.limit) = (Some(interval), Some(limit));
            }
            next += 1;
        }
        rows.push(row);
    }
    rows.sort_by(|a, b| {
        let order = |row: &Change<'_>| (row.is_significant(), row.interval.is_some());
        let size = |row: &Change<'_>| row.change().abs();
        order(b)
            .cmp(&order(a))
            .then(size(b).total_cmp(&size(a)))
            .then_with(|| a.frame.name.cmp(&b.frame.name))
    });
    let root = [b, a]
        .into_iter()
        .find_map(|p| p.frames.get(p.nodes.first()?.frame as usize));
    let all = root
        .filter(|_| sound && options.normalization != Normalization::Share)
        .map(|frame| {
            let x = (samples[0], samples[1]);
            let (before, after, interval, limit) = test(x, &|i, k| (in_blocks[i][k].1, in_blocks[i][k].1));
            Change {
                frame,
                samples: x,
                before,
                after,
                interval: Some(interval),
                limit: Some(limit),
                interpreter_internal: false,
            }
        });
    Diff {
        rows,
        all,
        blocks: timed.then_some(blocks),
        renamed: units.renamed,
    }
}

/// Samples per unit of the comparison; 0 if unknown.
fn total(profile: &Profile, samples: u64, normalization: Normalization) -> f64 {
    // Amounts of time have a unit; samples need their rate.
    let rate = match profile.count_type().unit {
        Unit::Nanoseconds => 1e9,
        _ => profile.meta.rate as f64,
    };
    match normalization {
        Normalization::Share => samples as f64,
        Normalization::Rate => rate * profile.meta.duration,
        Normalization::Time => rate,
    }
}

/// Modules with an evaluation loop (by the names it has in CPython 3.6 to 3.15, Python/ceval.c).
fn interpreters(profiles: [&Profile; 2]) -> HashSet<&str> {
    let frames = profiles.into_iter().flat_map(|p| &p.frames);
    let runs_bytecode = |f: &&Frame| f.kind == FrameKind::Native && f.name.starts_with("_PyEval_EvalFrameDefault");
    frames.filter(runs_bytecode).map(|f| &*f.module).collect()
}

/// Samples that ended in each node, for each block of time.
pub(super) fn self_by_block(profile: &Profile, blocks: usize) -> impl Iterator<Item = Vec<u64>> {
    let times = || profile.timeline.iter().map(|sample| sample.time);
    let (first, last) = (times().min().unwrap_or(0), times().max().unwrap_or(0));
    let span = u128::from(last - first) + 1;
    let block = move |time: u64| (u128::from(time - first) * blocks as u128 / span) as usize;
    let mut by_block: Vec<Vec<(u32, u64)>> = vec![Vec::new(); blocks];
    for (at, sample) in profile.timeline.iter().enumerate() {
        by_block[block(sample.time)].push((sample.node, profile.sample_amount(0, at)));
    }
    let nodes = profile.nodes.len();
    by_block.into_iter().map(move |samples| {
        let mut self_counts = vec![0u64; nodes];
        for (node, amount) in samples {
            if let Some(count) = self_counts.get_mut(node as usize) {
                *count = count.saturating_add(amount);
            }
        }
        self_counts
    })
}
