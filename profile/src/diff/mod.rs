//! Changes between two profiles, or between several runs of each side, and their statistical significance.
//!
//! There are two questions ([`Question`]):
//!
//! - With one run of each side: do these two recordings differ? The only error is that of sampling. Samples are taken as
//!   independent ones, which is a bound but for a program in step with the ticks: these keep their rate, so that a phase of
//!   the program has nearly the same number of samples in each run, however long it is. Where the CPU time of the target was
//!   measured by its own clock, `time` and `rate` have their scale from it, and all time is exact.
//! - With several runs of a side: would two more runs differ likewise? The error is the spread between runs.
//!
//! The intervals hold simultaneously with the requested confidence (Bonferroni: each gets its share of the error). A
//! row whose interval excludes zero has changed. This is the only test: tables, pages and gates have it from here.
//!
//! Interpreter-internal functions vary with the memory layout of each process (a third of the time of the interpreter's allocator
//! and number types, measured with equal runs of a loop over numbers). They are tested on request only; the Python functions that
//! call them always are.

use std::collections::HashSet;

use super::category::{START, THREAD_START};
use super::model::{Frame, FrameKind};
use super::stats::Stats;

mod both;
mod interval;
mod limits;
mod lines;
mod makes_up;
mod matching;
pub(super) mod quantile;
mod runs;
mod sequential;

pub use both::{WHOLE, both};
pub use interval::Question;
pub use limits::{Drawn, limits};
pub use lines::GrownLines;
pub use matching::RowMap;
pub use runs::{CpuClock, Run, Side, grain};
pub use sequential::Looks;

use interval::{ErrorRate, Part, estimate};
use runs::RunCounts;

#[cfg(test)]
mod coverage;
#[cfg(test)]
mod sequences;
#[cfg(test)]
mod tests;

/// Rows with fewer independent samples in all profiles together could hardly show any change, and are not tested.
const MIN_SAMPLES: f64 = 10.0;
/// The part of the error that the row of all time gets: it is what people look at first, and one row of many otherwise.
const ERROR_OF_ALL: f64 = 0.25;

/// How the profiles are normalized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Normalization {
    /// Parts of all samples. Where one part grows, others shrink.
    Share,
    /// CPU seconds for each second of the recording.
    Rate,
    /// CPU seconds: for runs that did the same work.
    Time,
    /// Numbers as they were counted, without any error: for calls.
    Number,
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
}

/// A row of both profiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change<'a> {
    /// A frame of the row (of the newer profile if it is there): a function, or one of the module.
    pub frame: &'a Frame,
    /// Samples of the older and of the newer side, in all runs.
    pub samples: (u64, u64),
    /// In the unit of [`Normalization`]: parts, seconds (per second), or a number; the mean of all runs.
    pub before: f64,
    /// The same of the newer side.
    pub after: f64,
    /// Interval of the change; `None` for a number, for a row with too few samples, and for an interpreter-internal function that
    /// is not tested.
    pub interval: Option<(f64, f64)>,
    /// Of a number, the lowest and the highest one of the older and of the newer runs.
    pub ranges: Option<[(u64, u64); 2]>,
    /// Interpreter-internal; not tested by default.
    pub interpreter_internal: bool,
    /// Of shares: it changed because others did. Its part of what these leave has not changed.
    pub makes_up: bool,
}

impl Change<'_> {
    /// The difference of both amounts, in the unit of [`Normalization`]; negative if it shrank.
    pub fn change(&self) -> f64 {
        self.after - self.before
    }

    /// The change as far as it is more than the difference of runs of one side: that of both amounts, or how far apart the ranges
    /// of a number are.
    pub fn proved(&self) -> f64 {
        match self.ranges {
            None => self.change(),
            Some([before, after]) if before.1 < after.0 => (after.0 - before.1) as f64,
            Some([before, after]) if after.1 < before.0 => -((before.0 - after.1) as f64),
            Some(_) => 0.0,
        }
    }

    /// Whether a number differs between runs of one side.
    pub fn varies(&self) -> bool {
        self.ranges
            .is_some_and(|ranges| ranges.iter().any(|(lowest, highest)| lowest != highest))
    }

    /// Whether it is statistically significant; of a number, whether no run of one side has one as in the other.
    pub fn is_significant(&self) -> bool {
        match self.ranges {
            Some(_) => self.proved() != 0.0,
            None => self.interval.is_some_and(|(low, high)| low > 0.0 || high < 0.0),
        }
    }

    /// Changes smaller than this may not be seen, in the unit of [`Normalization`]; `None` without an interval.
    pub fn detectable(&self) -> Option<f64> {
        let (low, high) = self.interval?;
        Some((high - self.change()).max(self.change() - low))
    }
}

/// The complete comparison.
#[derive(Debug)]
pub struct Diff<'a> {
    /// What the intervals are about.
    pub question: Question,
    /// Significant changes first, then the others; each largest change first. Of total samples, what calls a function that has
    /// changed comes after it.
    pub rows: Vec<Change<'a>>,
    /// All together, where it can differ: not for [`Normalization::Share`].
    pub all: Option<Change<'a>>,
    /// Python files whose functions are in another file of the newer profile: both paths.
    pub renamed: Vec<(&'a str, &'a str)>,
}

/// Compares `b` with the older `a`.
pub fn diff<'a>(a: &Side<'a>, b: &Side<'a>, options: &DiffOptions) -> Diff<'a> {
    let stats = [Stats::new(a.sum), Stats::new(b.sum)];
    let units = match options.by {
        RowKind::Function => RowMap::of_functions(&stats[0], &stats[1]),
        RowKind::Module => RowMap::of_modules(&stats[0], &stats[1]),
    };
    let mut runs = runs::counted([a, b], &stats, &units, options.normalization);
    let counts = Counts::new(&runs, units.frames.len(), options.metric);
    let pairs = runs::pairs([a, b]);
    let question = match (options.normalization, runs.each_ref().map(Vec::len)) {
        (Normalization::Number, _) => Question::Numbers,
        (_, [..=1, ..=1]) => Question::Recordings,
        (_, runs) => Question::Runs {
            runs,
            paired: pairs.is_some(),
        },
    };

    // Which of two adjacent instructions is sampled varies between runs. For total samples, inlined functions need not
    // be distinguished from those around them.
    let inlined = |unit: usize| options.metric == Metric::Total && units.frames[unit].kind == FrameKind::Inlined;
    let shown = |unit: usize| counts.sum(unit) != (0, 0) && !(options.by == RowKind::Function && inlined(unit));
    let interpreters = match (options.by, options.interpreter) {
        (RowKind::Function, false) if options.normalization != Normalization::Number => interpreters([a, b]),
        _ => HashSet::new(),
    };
    let native = |frame: &Frame| matches!(frame.kind, FrameKind::Native | FrameKind::Inlined);
    let is_row = |frame: &Frame| frame.module.is_empty() && [START, THREAD_START].contains(&&*frame.name);
    let is_internal = |unit: usize| {
        let frame = units.frames[unit];
        let is_interpreter = |frame: &Frame| interpreters.contains(&*frame.module) || is_row(frame);
        !interpreters.is_empty() && native(frame) && is_interpreter(frame)
    };
    let is_exact = options.normalization == Normalization::Number;
    let sound = runs.iter().flatten().all(RunCounts::is_sound);
    let is_tested =
        |unit: usize| sound && !is_exact && !is_internal(unit) && counts.independent(unit, &runs) >= MIN_SAMPLES;
    let tested = (0..units.frames.len())
        .filter(|unit| shown(*unit) && is_tested(*unit))
        .count();
    let has_all = options.normalization != Normalization::Share;
    let error = 1.0 - options.confidence;
    let of_rows = if has_all { error * (1.0 - ERROR_OF_ALL) } else { error };
    let rate = ErrorRate::new(of_rows / tested.max(1) as f64);

    let mean = |i: usize, unit: usize| runs::mean_amount(&runs[i], counts.row(i, unit));
    let mut rows: Vec<(usize, Change<'a>)> = Vec::new();
    for (unit, frame) in units.frames.iter().enumerate().filter(|(unit, _)| shown(*unit)) {
        let interval = is_tested(unit).then(|| {
            let [before, after] = counts.parts(unit);
            estimate(&runs, pairs.as_deref(), [&before, &after], false, &rate).interval
        });
        rows.push((
            unit,
            Change {
                frame,
                samples: counts.sum(unit),
                before: mean(0, unit),
                after: mean(1, unit),
                interval,
                ranges: is_exact.then(|| counts.ranges(unit)),
                interpreter_internal: is_internal(unit),
                makes_up: false,
            },
        ));
    }
    let root = [b.sum, a.sum]
        .into_iter()
        .find_map(|p| p.frames.get(p.nodes.first()?.frame as usize));
    let all = root.filter(|_| has_all && (sound || is_exact)).map(|frame| {
        let rate = ErrorRate::new(error * ERROR_OF_ALL);
        let parts = counts
            .all
            .each_ref()
            .map(|all| all.iter().copied().map(Part::of_run).collect::<Vec<_>>());
        let of_all = estimate(&runs, pairs.as_deref(), [&parts[0], &parts[1]], true, &rate);
        Change {
            frame,
            samples: (sum(&counts.all[0]), sum(&counts.all[1])),
            before: of_all.before,
            after: of_all.after,
            interval: (!is_exact).then_some(of_all.interval),
            ranges: is_exact.then(|| counts.all.each_ref().map(|all| range(all.iter().copied()))),
            interpreter_internal: false,
            makes_up: false,
        }
    });
    if options.normalization == Normalization::Share {
        makes_up::mark(&mut rows, &mut runs, pairs.as_deref(), options.metric, &rate);
    }
    let mut rows: Vec<Change<'a>> = rows.into_iter().map(|(_, row)| row).collect();
    sort(&mut rows);
    if options.metric == Metric::Total {
        origin_first(&mut rows);
    }
    Diff {
        question,
        rows,
        all,
        renamed: units.renamed,
    }
}

/// Significant changes first, then the others; each largest change first.
fn sort(rows: &mut [Change<'_>]) {
    rows.sort_by(|a, b| {
        let order = |row: &Change<'_>| (row.is_significant(), row.interval.is_some());
        let size = |row: &Change<'_>| row.change().abs();
        order(b)
            .cmp(&order(a))
            .then(size(b).total_cmp(&size(a)))
            .then_with(|| a.frame.name.cmp(&b.frame.name))
    });
}

/// What calls a function changes as it does. Of the rows whose change cannot be told from the largest one, the smallest row is
/// first: it has the least that has not changed.
fn origin_first(rows: &mut [Change<'_>]) {
    let Some(largest) = rows.first().filter(|row| row.is_significant()).map(Change::change) else {
        return;
    };
    let is_same = |row: &Change<'_>| {
        let has = |(low, high): (f64, f64)| low <= largest && largest <= high;
        row.is_significant() && row.change() * largest.signum() >= largest.abs() / 2.0 && row.interval.is_some_and(has)
    };
    let amount = |row: &Change<'_>| row.before.max(row.after);
    // Of the others, none is before the last of these.
    rows.sort_by(|a, b| {
        let order = is_same(b).cmp(&is_same(a));
        order.then(if is_same(a) && is_same(b) {
            amount(a).total_cmp(&amount(b))
        } else {
            std::cmp::Ordering::Equal
        })
    });
}

/// The counts of all rows in all runs.
struct Counts {
    /// By side and run, the count of each row.
    of: [Vec<Vec<u64>>; 2],
    /// By side and run, the count of the run.
    all: [Vec<u64>; 2],
}

impl Counts {
    fn new(runs: &[Vec<RunCounts<'_>>; 2], rows: usize, metric: Metric) -> Counts {
        Counts {
            of: runs
                .each_ref()
                .map(|runs| runs.iter().map(|run| run.counts(rows, metric)).collect()),
            all: runs
                .each_ref()
                .map(|runs| runs.iter().map(|run| run.stats.samples()).collect()),
        }
    }

    fn row(&self, side: usize, unit: usize) -> impl Iterator<Item = u64> + Clone {
        self.of[side].iter().map(move |counts| counts[unit])
    }

    fn sum(&self, unit: usize) -> (u64, u64) {
        let sum = |side| self.row(side, unit).fold(0, u64::saturating_add);
        (sum(0), sum(1))
    }

    fn parts(&self, unit: usize) -> [Vec<Part>; 2] {
        [0, 1].map(|side| self.row(side, unit).map(Part::of_run).collect())
    }

    fn ranges(&self, unit: usize) -> [(u64, u64); 2] {
        [0, 1].map(|side| range(self.row(side, unit)))
    }

    /// Independent samples in all runs.
    fn independent(&self, unit: usize, runs: &[Vec<RunCounts<'_>>; 2]) -> f64 {
        let of = |side: usize| self.row(side, unit).zip(&runs[side]);
        of(0).chain(of(1)).map(|(count, run)| count as f64 / run.grain).sum()
    }
}

fn sum(counts: &[u64]) -> u64 {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}

fn range(counts: impl Iterator<Item = u64> + Clone) -> (u64, u64) {
    (counts.clone().min().unwrap_or(0), counts.max().unwrap_or(0))
}

/// Modules with an evaluation loop (by the names it has in CPython 3.6 to 3.15, Python/ceval.c). Sums have no frames that
/// are in no stack, as those of the loop where stacks are shown without the interpreter; runs have them.
fn interpreters<'a>(sides: [&Side<'a>; 2]) -> HashSet<&'a str> {
    let frames = sides
        .into_iter()
        .flat_map(|side| side.runs.iter().flat_map(|run| &run.profile.frames));
    let runs_bytecode = |f: &&Frame| f.kind == FrameKind::Native && f.name.starts_with("_PyEval_EvalFrameDefault");
    frames.filter(runs_bytecode).map(|f| &*f.module).collect()
}
