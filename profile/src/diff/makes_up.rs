//! Shares that changed only because others did.
//!
//! If one function gets faster, the shares of all others grow. Of samples alone nobody can say which of both happened; but where one
//! row changed by more than any other, and the others' parts of what it leaves are as before, these only make up for it. Several rows
//! may have changed by themselves: each is found in what those before it leave.

use super::interval::{ErrorRate, Part, estimate};
use super::runs::RunCounts;
use super::{Change, Metric};
use crate::stats::FunctionId;

/// Rows that others may make up for, at most.
const MAX_CAUSES: usize = 8;

/// Marks rows, given with their numbers.
pub(super) fn mark(
    rows: &mut [(usize, Change<'_>)],
    runs: &mut [Vec<RunCounts<'_>>; 2],
    pairs: Option<&[[usize; 2]]>,
    metric: Metric,
    rate: &ErrorRate,
) {
    let groups = rows.iter().map(|(unit, _)| unit + 1).max().unwrap_or(0);
    let significant: Vec<usize> = (0..rows.len()).filter(|at| rows[*at].1.is_significant()).collect();
    let first = significant.iter().copied().max_by(|a, b| {
        let size = |at: &usize| rows[*at].1.change().abs();
        size(a).total_cmp(&size(b)).then_with(|| rows[*b].0.cmp(&rows[*a].0))
    });
    let Some(first) = first else { return };
    let mut causes = vec![first];
    loop {
        let is_cause: Vec<bool> = (0..groups)
            .map(|unit| causes.iter().any(|at| rows[*at].0 == unit))
            .collect();
        let left = left_by(runs, &is_cause, groups, metric);
        let of = |at: usize| {
            let parts = [0, 1].map(|i| left[i].iter().map(|run| run.part(rows[at].0)).collect::<Vec<_>>());
            estimate(runs, pairs, [&parts[0], &parts[1]], false, rate)
        };
        let others = significant.iter().copied().filter(|at| !causes.contains(at));
        let estimates: Vec<_> = others.map(|at| (at, of(at))).collect();
        let changed = estimates
            .iter()
            .filter(|(_, of)| of.interval.0 > 0.0 || of.interval.1 < 0.0);
        let largest =
            changed.max_by(|(_, a), (_, b)| (a.after - a.before).abs().total_cmp(&(b.after - b.before).abs()));
        if let Some((at, _)) = largest {
            if causes.len() == MAX_CAUSES {
                return;
            }
            causes.push(*at);
            continue;
        }
        for (at, _) in estimates {
            let share = |i: usize| {
                let counts = left[i].iter().zip(&runs[i]);
                let shares = counts.map(|(left, run)| run.amount(left.counts[rows[at].0]));
                shares.sum::<f64>() / runs[i].len().max(1) as f64
            };
            let row = rows[at].1;
            // What of it is in samples without the causes.
            let apart = share(1) - share(0);
            let is_apart = (row.change() - apart).abs() < apart.abs() / 2.0;
            let of_causes = causes.iter().map(|at| &rows[*at].1);
            let others = of_causes.filter(|cause| cause.change() * row.change() < 0.0);
            let is_smaller = greatest(&row) < others.map(least).sum();
            rows[at].1.makes_up = is_apart && is_smaller;
        }
        return;
    }
}

/// The least size of a significant change.
fn least(row: &Change<'_>) -> f64 {
    row.interval.map_or(0.0, |(low, high)| low.abs().min(high.abs()))
}

/// The greatest size of a change.
fn greatest(row: &Change<'_>) -> f64 {
    row.interval.map_or(0.0, |(low, high)| low.abs().max(high.abs()))
}

/// What a run has besides the causes.
struct Left {
    counts: Vec<u64>,
    all: u64,
}

impl Left {
    fn part(&self, unit: usize) -> Part {
        Part {
            count: self.counts[unit],
            of: Some(self.all),
        }
    }
}

/// By side and run, the samples that are not in a cause.
fn left_by(runs: &mut [Vec<RunCounts<'_>>; 2], is_cause: &[bool], groups: usize, metric: Metric) -> [Vec<Left>; 2] {
    runs.each_mut().map(|runs| {
        let left = runs.iter_mut().map(|run| {
            let row_of = &run.row_of;
            let is_left_out = |function: FunctionId| {
                let row = row_of.get(function as usize).map(|row| *row as usize);
                row.is_some_and(|row| is_cause.get(row).copied().unwrap_or(false))
            };
            run.stats.deselect(is_left_out, metric == Metric::Total);
            let left = Left {
                counts: run.counts(groups, metric),
                all: run.stats.samples(),
            };
            run.stats.select_all();
            left
        });
        left.collect()
    })
}
