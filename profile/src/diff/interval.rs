//! Intervals of changes: those of sampling, and those of the spread between runs.
//!
//! - *Sampling.* The counts of each side have [limits]; the interval of the difference is made of those of both (the method of
//!   variance estimates recovery). It never ends outside of what the limits leave possible: a row cannot fall by more than it may
//!   have had.
//! - *Runs.* Student's interval of the mean difference, with the degrees of freedom of the runs: of pairs, if runs of both sides
//!   alternate, else as Welch has it. It is not narrower than that of sampling.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;

use super::limits::{Drawn, limits};
use super::quantile::{NORMAL, student};
use super::runs::RunCounts;

/// How the runs of both sides belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Whether the two recordings differ: the only error is that of sampling.
    Recordings,
    /// Whether two more runs would differ likewise: the error is the spread between runs.
    Runs {
        /// How many there are of each side.
        runs: [usize; 2],
        /// Runs of both sides alternate, and the intervals are those of the differences of pairs.
        paired: bool,
    },
    /// Whether the numbers differ: there is no error.
    Numbers,
}

impl fmt::Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Question::Recordings => {
                f.write_str("one run of each side: whether these two recordings differ, by the error of sampling alone")
            }
            Question::Runs {
                runs: [before, after],
                paired,
            } => write!(
                f,
                "{before} and {after} runs: whether more runs would differ likewise, by the spread between {}",
                if *paired {
                    "pairs of runs, which alternate"
                } else {
                    "runs"
                }
            ),
            Question::Numbers => f.write_str("exact numbers: any difference between these runs is real"),
        }
    }
}

/// How likely an interval misses.
pub(super) struct ErrorRate {
    /// The probability of both sides.
    error: f64,
    normal: f64,
    /// By degrees of freedom.
    quantiles: RefCell<HashMap<u32, f64>>,
}

impl ErrorRate {
    pub(super) fn new(error: f64) -> ErrorRate {
        ErrorRate {
            error,
            normal: student(error / 2.0, NORMAL),
            quantiles: RefCell::default(),
        }
    }

    fn student(&self, freedom: u32) -> f64 {
        let mut known = self.quantiles.borrow_mut();
        *known
            .entry(freedom)
            .or_insert_with(|| student(self.error / 2.0, freedom))
    }
}

/// The amounts of a row before and after, and the interval of their difference.
#[derive(Clone, Copy, Debug)]
pub(super) struct Estimate {
    pub(super) before: f64,
    pub(super) after: f64,
    pub(super) interval: (f64, f64),
}

/// A side's mean amount, with the limits that sampling sets for it.
#[derive(Clone, Copy)]
struct Limited {
    mean: f64,
    low: f64,
    high: f64,
}

/// The estimate for a row with these counts in the runs of both sides. `pairs`: runs of both sides that belong together;
/// `is_all`: the row is all of a run.
pub(super) fn estimate(
    runs: &[Vec<RunCounts<'_>>; 2],
    pairs: Option<&[[usize; 2]]>,
    counts: [&[Part]; 2],
    is_all: bool,
    rate: &ErrorRate,
) -> Estimate {
    let amounts = [0, 1].map(|i| {
        let parts = runs[i].iter().zip(counts[i]);
        parts.map(|(run, part)| part.amount(run)).collect::<Vec<f64>>()
    });
    let sides = [0, 1].map(|i| limited(&runs[i], counts[i], &amounts[i], is_all, rate));
    let [a, b] = sides;
    let change = b.mean - a.mean;
    let mut down = (b.mean - b.low).hypot(a.high - a.mean);
    let mut up = (b.high - b.mean).hypot(a.mean - a.low);
    if runs.iter().any(|runs| runs.len() > 1) {
        let half = match pairs {
            Some(pairs) => of_pairs(pairs, &amounts, rate),
            None => of_samples(&amounts, rate),
        };
        (down, up) = (down.max(half), up.max(half));
        // Of each side alone: no amount is below nothing.
        let highest =
            [0, 1].map(|i| sides[i].mean + spread_of_mean(&amounts[i], rate).max(sides[i].high - sides[i].mean));
        (down, up) = (down.min(change + highest[0]), up.min(highest[1] - change));
    }
    Estimate {
        before: a.mean,
        after: b.mean,
        interval: (change - down.max(0.0), change + up.max(0.0)),
    }
}

/// A count of a run, and what it is part of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) count: u64,
    /// `None`: a part of the run.
    pub(super) of: Option<u64>,
}

impl Part {
    pub(super) fn of_run(count: u64) -> Part {
        Part { count, of: None }
    }

    fn amount(self, run: &RunCounts<'_>) -> f64 {
        match self.of {
            None => run.amount(self.count),
            Some(0) => 0.0,
            Some(all) => self.count as f64 / all as f64,
        }
    }

    /// The amount of one count.
    fn weight(self, run: &RunCounts<'_>) -> f64 {
        match self.of {
            None => run.per_unit.recip(),
            Some(all) => (all.max(1) as f64).recip(),
        }
    }
}

/// The mean amount of a side, whose runs have these counts and amounts.
fn limited(runs: &[RunCounts<'_>], parts: &[Part], amounts: &[f64], is_all: bool, rate: &ErrorRate) -> Limited {
    let number = runs.len().max(1) as f64;
    let mean = amounts.iter().sum::<f64>() / number;
    if is_all && let Some(error) = runs.iter().map(|run| run.clock_error).sum::<Option<f64>>() {
        let error = error / number;
        return Limited {
            mean,
            low: (mean - error).max(0.0),
            high: mean + error,
        };
    }
    // In equal independent samples, of all runs together.
    let (mut count, mut all, mut weight) = (0.0, Some(0.0), 0.0);
    for (run, part) in runs.iter().zip(parts) {
        count += part.count as f64 / run.grain;
        let whole = part.of.map(|all| all as f64).or(run.whole);
        all = all.zip(whole).map(|(all, whole)| all + whole / run.grain);
        weight += part.weight(run) * run.grain / number / number;
    }
    let drawn = all.map_or(Drawn::Freely, Drawn::Of);
    let (low, high) = limits(count, drawn, rate.error / 2.0, rate.normal);
    Limited {
        mean,
        low: (mean - (count - low) * weight).max(0.0),
        high: mean + (high - count).max(0.0) * weight,
    }
}

/// Student's half width for the mean of the differences of pairs.
fn of_pairs(pairs: &[[usize; 2]], amounts: &[Vec<f64>; 2], rate: &ErrorRate) -> f64 {
    let of = |[before, after]: &[usize; 2]| Some(amounts[1].get(*after)? - amounts[0].get(*before)?);
    let differences: Vec<f64> = pairs.iter().filter_map(of).collect();
    spread_of_mean(&differences, rate)
}

/// Student's half width for the mean of some values; without an end for a single one.
fn spread_of_mean(values: &[f64], rate: &ErrorRate) -> f64 {
    match values.len() {
        0 | 1 => f64::INFINITY,
        number => rate.student(number as u32 - 1) * error_of_mean(values),
    }
}

/// The standard error of the mean of two or more values.
fn error_of_mean(values: &[f64]) -> f64 {
    let number = values.len() as f64;
    let mean = values.iter().sum::<f64>() / number;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (number - 1.0) / number).sqrt()
}

/// Welch's half width for the difference of two means. A side of one run is taken to vary as the other one does.
fn of_samples(amounts: &[Vec<f64>; 2], rate: &ErrorRate) -> f64 {
    let numbers = amounts.each_ref().map(|values| values.len() as f64);
    match numbers {
        [a, b] if a >= 2.0 && b >= 2.0 => {
            let errors = amounts.each_ref().map(|values| error_of_mean(values).powi(2));
            let sum = errors[0] + errors[1];
            let parts = errors[0].powi(2) / (a - 1.0) + errors[1].powi(2) / (b - 1.0);
            let least = a.min(b) - 1.0;
            let freedom = if parts > 0.0 { sum * sum / parts } else { a + b - 2.0 };
            rate.student(freedom.clamp(least, a + b - 2.0) as u32) * sum.sqrt()
        }
        [a, b] if a.max(b) >= 2.0 => {
            let known = &amounts[usize::from(b > a)];
            let variance = error_of_mean(known).powi(2) * known.len() as f64;
            rate.student(known.len() as u32 - 1) * (variance * (a.recip() + b.recip())).sqrt()
        }
        _ => f64::INFINITY,
    }
}
