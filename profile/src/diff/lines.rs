//! Where in a function the growth is: the line of the newer program that grew most.
//!
//! Lines move when a program is changed, and profiles do not have its text. So the lines of both versions of a function are
//! matched in their order, with the least change of amounts in all: a line without a partner is new, or gone. That is likely, not
//! sure; of two equal lines next to each other either may be the new one, and the later one is taken.

use std::collections::BTreeMap;

use super::matching::RowMap;
use super::runs::{Side, per_unit};
use super::{DiffOptions, Metric};
use crate::model::Frame;
use crate::stats::Stats;

/// Pairs of lines of a function that are compared, at most.
const MAX_PAIRS: usize = 1 << 20;

/// The lines of all functions of both sides.
pub struct GrownLines<'a> {
    functions: RowMap<'a>,
    /// Of the older and of the newer side, by row and line, in the unit of the normalization.
    lines: [BTreeMap<u32, BTreeMap<u32, f64>>; 2],
    /// By the rows of caller and callee, by how much the newer side has more of this call. Of self samples, none.
    calls: BTreeMap<(u32, u32), f64>,
}

impl<'a> GrownLines<'a> {
    /// Of `b` compared with the older `a`, with functions as rows.
    pub fn new(a: &Side<'a>, b: &Side<'a>, options: &DiffOptions) -> GrownLines<'a> {
        let stats = [Stats::new(a.sum), Stats::new(b.sum)];
        let functions = RowMap::of_functions(&stats[0], &stats[1]);
        let per_unit = [a, b].map(|side| per_unit(side, options.normalization));
        let lines = [0, 1].map(|side| {
            let mut by_row: BTreeMap<u32, BTreeMap<u32, f64>> = BTreeMap::new();
            for line in stats[side].lines() {
                let count = match options.metric {
                    Metric::SelfCount => line.counts.self_count,
                    Metric::Total => line.counts.total,
                };
                if line.line > 0
                    && count > 0
                    && per_unit[side] > 0.0
                    && let Some(row) = functions.of[side].get(line.function as usize)
                {
                    let lines = by_row.entry(*row).or_default();
                    *lines.entry(line.line).or_default() += count as f64 / per_unit[side];
                }
            }
            by_row
        });
        let mut calls: BTreeMap<(u32, u32), f64> = BTreeMap::new();
        for (side, sign) in [(0, -1.0), (1, 1.0)] {
            let row = |function: u32| functions.of[side].get(function as usize).copied();
            for call in stats[side].calls() {
                if let (Some(caller), Some(callee)) = (call.caller.and_then(row), row(call.callee))
                    && caller != callee
                    && options.metric == Metric::Total
                    && per_unit[side] > 0.0
                {
                    *calls.entry((caller, callee)).or_default() += sign * call.counts.total as f64 / per_unit[side];
                }
            }
        }
        GrownLines {
            functions,
            lines,
            calls,
        }
    }

    /// The function from which a function is called that much more, and the line there that grew most. `None` if no line is
    /// known, or if that line may be one that calls something else, which grew even more.
    pub fn of_caller(&self, frame: &Frame) -> Option<(&'a Frame, u32)> {
        let row = self.row(frame)?;
        let callers = self.calls.iter().filter(|((_, callee), _)| *callee == row);
        let ((caller, _), growth) = callers.max_by(|(_, a), (_, b)| a.total_cmp(b))?;
        let is_most = self
            .calls
            .range((*caller, 0)..=(*caller, u32::MAX))
            .all(|(_, other)| other <= growth);
        let caller = *self.functions.frames.get(*caller as usize)?;
        (is_most && *growth > 0.0).then_some((caller, self.of(caller)?))
    }

    /// The line of a function's source file that grew most; `frame` is the one of [`super::Change`]. `None` if no line is known,
    /// or none grew.
    pub fn of(&self, frame: &Frame) -> Option<u32> {
        let row = self.row(frame)?;
        let [before, after] = self.lines.each_ref().map(|lines| {
            let lines = lines.get(&row).into_iter().flatten();
            lines.map(|(line, amount)| (*line, *amount)).collect::<Vec<_>>()
        });
        most_grown(&before, &after)
    }

    fn row(&self, frame: &Frame) -> Option<u32> {
        let mut frames = self.functions.frames.iter();
        frames
            .position(|other| std::ptr::eq(*other, frame))
            .map(|row| row as u32)
    }
}

/// How the last lines of two beginnings are matched.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Both,
    Gone,
    New,
}

/// The line of `after` that grew most; both are in the order of lines.
fn most_grown(before: &[(u32, f64)], after: &[(u32, f64)]) -> Option<u32> {
    let width = after.len() + 1;
    if before.len().saturating_mul(width) > MAX_PAIRS {
        return None;
    }
    // By number of older lines: for each number of newer lines the least change so far, and the last step to it.
    let mut steps = vec![Step::New; width];
    let mut costs: Vec<f64> = Vec::with_capacity(width);
    costs.push(0.0);
    for (at, (_, amount)) in after.iter().enumerate() {
        costs.push(costs[at] + amount);
    }
    for (_, old) in before {
        let above = std::mem::take(&mut costs);
        costs.push(above[0] + old);
        steps.push(Step::Gone);
        for (at, (_, new)) in after.iter().enumerate() {
            let ways = [
                (costs[at] + new, Step::New),
                (above[at] + (new - old).abs(), Step::Both),
                (above[at + 1] + old, Step::Gone),
            ];
            let best = ways.into_iter().min_by(|(a, _), (b, _)| a.total_cmp(b));
            let (cost, step) = best.unwrap_or(ways[0]);
            costs.push(cost);
            steps.push(step);
        }
    }
    let mut most: Option<(u32, f64)> = None;
    let (mut old, mut new) = (before.len(), after.len());
    while new > 0 {
        let (line, amount) = after[new - 1];
        let grown = match steps[old * width + new] {
            Step::Gone => {
                old -= 1;
                continue;
            }
            Step::New => amount,
            Step::Both => {
                old -= 1;
                amount - before[old].1
            }
        };
        new -= 1;
        if grown > most.map_or(0.0, |(_, most)| most) {
            most = Some((line, grown));
        }
    }
    most.map(|(line, _)| line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::Builder;
    use crate::diff::{Normalization, RowKind, Run};
    use crate::model::{Meta, Profile};
    use crate::values::ValueType;

    /// Samples by the line of `main` and the function that it calls there.
    fn profile(samples: &[(u32, &str, u64)]) -> Profile {
        let mut builder = Builder::new(&[ValueType::SAMPLES]);
        let main = builder.frame(Frame::python("main", "", "app.py", 1));
        let mut time = 0;
        for (line, name, count) in samples {
            let function = builder.frame(Frame::python(*name, "", "app.py", 90));
            for _ in 0..*count {
                time += 1;
                builder.sample(time, (1, 1), &[(main, *line), (function, 91)], &[1]);
            }
        }
        builder.finish(Meta {
            rate: 100,
            ..Meta::default()
        })
    }

    #[test]
    fn a_new_call_is_found_in_the_caller() {
        let before = profile(&[(2, "stock", 30), (3, "price", 70)]);
        let options = DiffOptions {
            normalization: Normalization::Time,
            by: RowKind::Function,
            metric: Metric::Total,
            confidence: 0.99,
            interpreter: false,
        };
        for (after, of_stock) in [
            (&[(2, "stock", 30), (3, "price", 70), (4, "stock", 30)][..], Some(4)),
            // Other lines came before.
            (&[(12, "stock", 31), (13, "price", 68), (17, "stock", 29)], Some(17)),
            // Its line is not the one that grew most.
            (&[(2, "stock", 40), (3, "price", 170)], None),
            (&[(2, "stock", 20), (3, "price", 70)], None),
        ] {
            let after = profile(after);
            let [a, b] = [&before, &after].map(|profile| {
                Side::of_one(Run {
                    profile,
                    grain: 1.0,
                    clock: None,
                })
            });
            let lines = GrownLines::new(&a, &b, &options);
            let frame = |name: &str| after.frames.iter().find(|frame| frame.name == name).expect("a frame");
            let found = lines.of_caller(frame("stock"));
            assert_eq!(
                found.map(|(caller, line)| (&*caller.name, line)),
                of_stock.map(|line| ("main", line))
            );
            assert_eq!(lines.of_caller(frame("main")), None, "it has no caller");
        }
    }

    #[test]
    fn lines_are_matched_in_their_order() {
        for (before, after, expected) in [
            // The same lines.
            (&[(3, 1.0), (4, 5.0)][..], &[(3, 1.0), (4, 7.0)][..], Some(4)),
            // Moved down by two lines, with a new call.
            (&[(3, 1.0), (4, 5.0)], &[(5, 1.0), (6, 5.0), (7, 0.5)], Some(7)),
            (&[(3, 1.0), (4, 5.0)], &[(5, 1.0), (6, 0.5), (7, 5.1)], Some(6)),
            // The same call again.
            (&[(3, 5.0)], &[(3, 5.0), (4, 5.0)], Some(4)),
            // All new; nothing grew; nothing known.
            (&[], &[(3, 1.0), (4, 2.0)], Some(4)),
            (&[(3, 2.0), (4, 1.0)], &[(3, 2.0)], None),
            (&[(3, 2.0)], &[], None),
            (&[], &[], None),
        ] {
            assert_eq!(most_grown(before, after), expected, "{before:?} {after:?}");
        }
        let many: Vec<(u32, f64)> = (1..2000).map(|line| (line, 1.0)).collect();
        assert_eq!(most_grown(&many, &many), None, "too many to compare");
    }
}
