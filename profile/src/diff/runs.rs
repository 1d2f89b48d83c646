//! The runs of one side of a comparison, and what their counts amount to.

use std::collections::HashMap;

use super::{Metric, Normalization, RowMap};
use crate::model::Profile;
use crate::stats::{FunctionId, SelfTotal, Stats};
use crate::values::Unit;
use crate::view::identifier;

/// One recording.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// With the value to compare as its count.
    pub profile: &'a Profile,
    /// How much of the value one independent sample represents: 1 for samples, see [`grain`].
    pub grain: f64,
    /// `None`: time follows from the number of samples.
    pub clock: Option<CpuClock>,
}

/// The CPU time of a recording's target by its own clock, which all samples of the recording share. Neither is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CpuClock {
    /// CPU time while it was sampled, seconds.
    pub seconds: f64,
    /// The count of the whole recording, also where the profile is a part of it.
    pub count: u64,
}

/// The runs of the older or of the newer program.
#[derive(Clone, Debug)]
pub struct Side<'a> {
    /// The sum of all runs.
    pub sum: &'a Profile,
    /// At least one.
    pub runs: Vec<Run<'a>>,
}

impl<'a> Side<'a> {
    /// A single run.
    pub fn of_one(run: Run<'a>) -> Side<'a> {
        Side {
            sum: run.profile,
            runs: vec![run],
        }
    }
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

/// Runs of both sides that were made one after the other, if all were: the first ones of each side, the second ones, and so
/// on. `None`: they do not alternate, or it is not known when they began.
pub(super) fn pairs(sides: [&Side<'_>; 2]) -> Option<Vec<[usize; 2]>> {
    let starts = sides.map(|side| {
        let runs = side.runs.iter().enumerate();
        let mut starts: Vec<(f64, usize)> = runs.map(|(at, run)| (run.profile.meta.start, at)).collect();
        starts.sort_by(|a, b| a.0.total_cmp(&b.0));
        starts
    });
    let known = starts.iter().flatten().all(|(start, _)| *start > 0.0);
    if !known || starts[0].len() != starts[1].len() || starts[0].len() < 2 {
        return None;
    }
    // All of a pair is before all of the next one.
    let mut end = 0.0;
    let mut pairs = Vec::new();
    for ((before, a), (after, b)) in starts[0].iter().zip(&starts[1]) {
        if before.min(*after) <= end {
            return None;
        }
        end = before.max(*after);
        pairs.push([*a, *b]);
    }
    Some(pairs)
}

/// Samples that are worth one independent sample: ticks come in runs of equal intervals, so that of a program with a loop that
/// is as long as one of these all ticks of a run can fall on the same part of the loop. A compromise: the variance of such
/// samples is up to 2.3 times that of independent ones, and with 1.8 the joint intervals of `coverage.rs` hold in 99 %.
const IN_STEP: f64 = 1.8;

/// A run prepared for counting.
pub(super) struct RunCounts<'a> {
    pub(super) stats: Stats<'a>,
    /// By function of the run, its row.
    pub(super) row_of: Vec<u32>,
    /// Counts that make 1 of the normalization; 0: unknown.
    pub(super) per_unit: f64,
    /// The count that one independent sample represents.
    pub(super) grain: f64,
    /// The count that all samples are a part of; `None`: their number is random.
    pub(super) whole: Option<f64>,
    /// How exact the time of the whole run is, in the unit of the normalization; `None`: it is as random as samples are.
    pub(super) clock_error: Option<f64>,
}

/// Counts of a run that make 1 of the normalization; 0: not known.
fn per_unit_of(run: &Run<'_>, samples: u64, normalization: Normalization) -> f64 {
    let per_second = match (run.clock, run.profile.count_type().unit) {
        (Some(clock), _) => clock.count as f64 / clock.seconds,
        (None, Unit::Nanoseconds) => 1e9,
        (None, _) => run.profile.meta.rate as f64,
    };
    match normalization {
        Normalization::Number => 1.0,
        Normalization::Share => samples as f64,
        Normalization::Rate => per_second * run.profile.meta.duration,
        Normalization::Time => per_second,
    }
}

/// Counts of the sum of all runs that make 1 of the normalization, in the mean of the runs; 0: not known.
pub(super) fn per_unit(side: &Side<'_>, normalization: Normalization) -> f64 {
    let samples = |run: &Run<'_>| run.profile.nodes.first().map_or(0, |root| root.count);
    let (mut sum, mut amount) = (0.0, 0.0);
    for run in &side.runs {
        let samples = samples(run);
        sum += samples as f64;
        amount += samples as f64 / per_unit_of(run, samples, normalization);
    }
    let per_unit = sum / amount * side.runs.len() as f64;
    if per_unit.is_finite() { per_unit } else { 0.0 }
}

impl<'a> RunCounts<'a> {
    /// `stats` are those of the run.
    pub(super) fn new(
        run: &Run<'a>,
        stats: Stats<'a>,
        row_of: Vec<u32>,
        in_step: f64,
        normalization: Normalization,
    ) -> RunCounts<'a> {
        let samples = stats.samples();
        let clock = run.clock.filter(|_| normalization != Normalization::Share);
        let whole = match normalization {
            Normalization::Share => Some(samples as f64),
            _ => clock.map(|clock| clock.count as f64),
        };
        let seconds = match normalization {
            Normalization::Rate => run.profile.meta.duration,
            Normalization::Share | Normalization::Time | Normalization::Number => 1.0,
        };
        // Sampling begins and ends some time before or after the clock is read.
        let is_whole = |clock: &CpuClock| clock.count == samples;
        let clock_error = clock
            .filter(is_whole)
            .map(|clock| clock.seconds / clock.count as f64 / seconds.max(f64::MIN_POSITIVE));
        RunCounts {
            stats,
            row_of,
            per_unit: per_unit_of(run, samples, normalization),
            grain: run.grain.max(1.0) * in_step,
            whole,
            clock_error,
        }
    }

    /// What a count amounts to in the unit of the normalization.
    pub(super) fn amount(&self, count: u64) -> f64 {
        // A quotient, not a product: all of all is 1 whatever the count.
        if self.per_unit > 0.0 {
            count as f64 / self.per_unit
        } else {
            0.0
        }
    }

    /// By row, the counts of the selected samples.
    pub(super) fn counts(&self, rows: usize, metric: Metric) -> Vec<u64> {
        let counts = self.stats.group(rows, &self.row_of).into_iter();
        counts
            .map(|SelfTotal { self_count, total }| match metric {
                Metric::SelfCount => self_count,
                Metric::Total => total,
            })
            .collect()
    }

    pub(super) fn is_sound(&self) -> bool {
        self.per_unit.is_finite() && self.per_unit > 0.0
    }
}

/// The mean of what these counts, one for each run of a side, amount to in the unit of the normalization.
pub(super) fn mean_amount(runs: &[RunCounts<'_>], counts: impl Iterator<Item = u64>) -> f64 {
    let amounts = runs.iter().zip(counts).map(|(run, count)| run.amount(count));
    amounts.sum::<f64>() / runs.len().max(1) as f64
}

/// The runs of both sides, with the rows that `rows` has for the functions of their sums, which `sums` has.
pub(super) fn counted<'a>(
    sides: [&Side<'a>; 2],
    sums: &[Stats<'a>; 2],
    rows: &RowMap<'a>,
    normalization: Normalization,
) -> [Vec<RunCounts<'a>>; 2] {
    // The spread between several runs shows it.
    let is_single = sides.iter().all(|side| side.runs.len() <= 1);
    let in_step = if is_single { IN_STEP } else { 1.0 };
    [0, 1].map(|i| {
        let known = (sides[i].runs.len() > 1).then(|| {
            let frames = sides[i].sum.frames.iter().enumerate();
            let known = frames.filter_map(|(at, frame)| {
                let function = sums[i].function_of_frame(at as u32)?;
                Some((identifier(frame), rows.of[i].get(function as usize).copied()?))
            });
            known.collect::<HashMap<String, u32>>()
        });
        let runs = sides[i].runs.iter();
        runs.map(|run| {
            let stats = Stats::new(run.profile);
            let row_of = match &known {
                None => rows.of[i].clone(),
                Some(known) => {
                    let functions = 0..stats.len() as FunctionId;
                    let row = |function| known.get(&identifier(stats.frame(function))).copied();
                    functions.map(|function| row(function).unwrap_or(u32::MAX)).collect()
                }
            };
            RunCounts::new(run, stats, row_of, in_step, normalization)
        })
        .collect()
    })
}
