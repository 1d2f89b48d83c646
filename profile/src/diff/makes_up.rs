//! Shares that changed only because others did.
//!
//! If one function gets faster, the shares of all others grow. Samples alone cannot always say which of both happened, but
//! a row only makes up for others if its part of what these leave is as before, and theirs of what it leaves is not. The row
//! that changed most is the first that others may make up for; more are found in what those before them leave.

use super::interval::{ErrorRate, Part, estimate};
use super::runs::{RunCounts, mean_amount};
use super::{Change, Metric};
use crate::stats::FunctionId;

/// Rows that others may make up for, at most.
const MAX_CAUSES: usize = 8;
/// Rows that are examined for making up for these, at most: each takes a walk through all runs.
const MAX_ROWS: usize = 200;

/// Marks rows, given with their numbers. What `runs` have selected afterwards is not defined.
pub(super) fn mark(
    rows: &mut [(usize, Change<'_>)],
    runs: &mut [Vec<RunCounts<'_>>; 2],
    pairs: Option<&[[usize; 2]]>,
    metric: Metric,
    rate: &ErrorRate,
) {
    let significant: Vec<usize> = (0..rows.len()).filter(|at| rows[*at].1.is_significant()).collect();
    let first = significant.iter().copied().max_by(|a, b| {
        let size = |at: &usize| rows[*at].1.change().abs();
        size(a).total_cmp(&size(b)).then_with(|| rows[*b].0.cmp(&rows[*a].0))
    });
    let Some(first) = first else { return };
    let mut causes = vec![first];
    let left = loop {
        let left = left_by(runs, rows, &causes, metric);
        let others = significant.iter().copied().filter(|at| !causes.contains(at));
        let changes = others.filter_map(|at| Some((at, change_in(&left, rows[at].0, runs, pairs, rate)?)));
        let Some((at, _)) = changes.max_by(|(_, a), (_, b)| a.abs().total_cmp(&b.abs())) else {
            break left;
        };
        if causes.len() == MAX_CAUSES {
            return;
        }
        causes.push(at);
    };
    let others = significant.iter().copied().filter(|at| !causes.contains(at));
    for at in others.take(MAX_ROWS).collect::<Vec<_>>() {
        let (unit, row) = rows[at];
        let share = |i: usize| mean_amount(&runs[i], left[i].iter().map(|left| left.count(unit)));
        // What of it is in samples without the causes.
        let apart = share(1) - share(0);
        if (row.change() - apart).abs() >= apart.abs() / 2.0 {
            continue;
        }
        let without = left_by(runs, rows, &[at], metric);
        let opposes = |cause: &usize| {
            let change = change_in(&without, rows[*cause].0, runs, pairs, rate);
            change.is_some_and(|change| change * row.change() < 0.0)
        };
        rows[at].1.makes_up = causes.iter().any(opposes);
    }
}

/// The change of a row's part of what is left, if that is significant.
fn change_in(
    left: &[Vec<Left>; 2],
    unit: usize,
    runs: &[Vec<RunCounts<'_>>; 2],
    pairs: Option<&[[usize; 2]]>,
    rate: &ErrorRate,
) -> Option<f64> {
    let parts = left.each_ref().map(|side| {
        let parts = side.iter().map(|run| Part {
            count: run.count(unit),
            of: Some(run.all),
        });
        parts.collect::<Vec<_>>()
    });
    let found = estimate(runs, pairs, [&parts[0], &parts[1]], false, rate);
    let (low, high) = found.interval;
    (low > 0.0 || high < 0.0).then_some(found.after - found.before)
}

/// What a run has besides some rows.
struct Left {
    counts: Vec<u64>,
    all: u64,
}

impl Left {
    fn count(&self, unit: usize) -> u64 {
        self.counts.get(unit).copied().unwrap_or(0)
    }
}

/// By side and run, the samples that are not in some of the rows; these stay selected.
fn left_by(
    runs: &mut [Vec<RunCounts<'_>>; 2],
    rows: &[(usize, Change<'_>)],
    out: &[usize],
    metric: Metric,
) -> [Vec<Left>; 2] {
    let groups = rows.iter().map(|(unit, _)| unit + 1).max().unwrap_or(0);
    let out: Vec<usize> = out.iter().map(|at| rows[*at].0).collect();
    runs.each_mut().map(|runs| {
        let left = runs.iter_mut().map(|run| {
            let row_of = &run.row_of;
            let is_left_out = |function: FunctionId| {
                let row = row_of.get(function as usize);
                row.is_some_and(|row| out.contains(&(*row as usize)))
            };
            run.stats.select_without(is_left_out, metric == Metric::Total);
            Left {
                counts: run.counts(groups, metric),
                all: run.stats.samples(),
            }
        });
        left.collect()
    })
}
