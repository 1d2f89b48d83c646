//! `--fail-above`: whether something grew by more than a limit, or that this cannot be known.

use super::text::{DIFFERENT_MACHINES, Text};
use crate::cli::args::{DiffBy, DiffCommand as Options, Limit};
use crate::cli::output::table_rows::ReportRow;
use crate::error::{Error, ErrorKind, Result};
use crate::profile::diff::{Change, Normalization, Question};

const ONE_RUN: &str = "one run of each side cannot tell whether the next two would differ likewise";
const MORE_RUNS: &str =
    "give several of each, as --before A1 A2 A3 --after B1 B2 B3, or decide by these two alone with --single-run";

const SAME_MACHINE: &str =
    "compare shares or calls, record both sides on one machine, or judge the times all the same with --any-machine";

/// The answer of `--fail-above`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    Passed,
    /// Something grew by more.
    Grown,
    /// There are not enough runs, or samples, to know.
    Undecided,
}

impl Gate {
    /// What `--json` calls it.
    pub fn name(self) -> &'static str {
        match self {
            Gate::Passed => "passed",
            Gate::Grown => "grown",
            Gate::Undecided => "undecided",
        }
    }
}

/// # Errors
/// `Usage`: a limit in calls for something else.
pub fn check(options: &Options, normalization: Normalization) -> Result<()> {
    match options.fail_above {
        Some(Limit::Calls(calls)) if normalization != Normalization::Number => {
            let what = format!("--fail-above '{calls} calls' needs numbers of calls");
            Err(Error::new(ErrorKind::Usage, what)
                .why("something else is compared")
                .hint("--value calls of profiles that have them, or a limit in percent: --fail-above 5"))
        }
        _ => Ok(()),
    }
}

/// What `--fail-above` says of a comparison.
pub struct Verdict<'a> {
    pub limit: Limit,
    pub gate: Gate,
    /// What is judged: all time where that can differ, then the rows.
    pub rows: Vec<Judged<'a>>,
    /// Why these runs leave it undecided, and what it takes to know.
    pub undecided: Option<String>,
    /// Growth was seen when there were so many runs of each side, whatever all of them show.
    pub seen_after: Option<usize>,
}

impl Verdict<'_> {
    /// What is printed of it, line by line, the answer first.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        let is_shown = self.grown().next().is_some();
        let seen = self.seen_after.filter(|_| !is_shown).map(|runs| {
            let limit = self.limit;
            format!("growth by more than {limit} was seen after {runs} runs of each command")
        });
        let grown = self.grown().map(|(row, growth)| format!("{} {growth}", row.text()));
        let undecided = self.undecided.iter().map(|why| match self.gate {
            Gate::Grown => format!("all runs alone leave it undecided: {why}"),
            Gate::Passed | Gate::Undecided => format!("undecided: {why}"),
        });
        seen.into_iter().chain(grown).chain(undecided)
    }

    /// What grew by more than the limit, each with by how much: `grew by 7 %`.
    pub fn grown(&self) -> impl Iterator<Item = (&Judged<'_>, &str)> {
        self.rows.iter().filter_map(|row| match &row.ruling {
            Ruling::Grown(growth) => Some((row, &**growth)),
            _ => None,
        })
    }
}

/// A row, and what the limit means for it.
pub struct Judged<'a> {
    pub change: &'a Change<'a>,
    /// Its name and place; of all time together, only a name.
    pub row: ReportRow,
    pub ruling: Ruling,
}

impl Judged<'_> {
    /// Its name and place, not escaped.
    pub fn text(&self) -> String {
        self.row.text()
    }
}

pub enum Ruling {
    Passed,
    /// It grew by more than the limit; the text says by how much.
    Grown(String),
    /// It may have; the text says what could be seen.
    Undecided(String),
    /// It has no interval.
    NotTested,
}

impl Text<'_> {
    /// Judges all rows. `seen_after`: growth was seen when there were so many runs of each side.
    pub fn verdict(&self, limit: Limit, seen_after: Option<usize>) -> Verdict<'_> {
        let all = self.found.all.iter().map(|change| {
            let name = ReportRow {
                name: self.name_of_all(),
                ..ReportRow::default()
            };
            (change, name)
        });
        let rows = self.found.rows.iter().map(|change| (change, self.row(change)));
        let judged = |(change, row)| Judged {
            change,
            row,
            ruling: self.ruling(change, limit),
        };
        let rows: Vec<Judged<'_>> = all.chain(rows).map(judged).collect();
        let has_grown = rows.iter().any(|row| matches!(row.ruling, Ruling::Grown(_)));
        let undecided = if !self.machines.is_empty() {
            Some(format!(
                "{DIFFERENT_MACHINES}: {}; {SAME_MACHINE}",
                self.machines.join("; ")
            ))
        } else if self.is_of_one_run() {
            Some(format!("{ONE_RUN}; {MORE_RUNS}"))
        } else if has_grown {
            None
        } else {
            self.undecided(limit, &rows)
        };
        Verdict {
            limit,
            gate: match undecided {
                _ if seen_after.is_some() => Gate::Grown,
                Some(_) => Gate::Undecided,
                None if has_grown => Gate::Grown,
                None => Gate::Passed,
            },
            rows,
            undecided,
            seen_after,
        }
    }

    /// Whether nothing can be decided: by one run of each side only if that is wanted.
    fn is_of_one_run(&self) -> bool {
        self.found.question == Question::Recordings && !self.options.single_run
    }

    fn ruling(&self, change: &Change<'_>, limit: Limit) -> Ruling {
        if change.interval.is_none() && change.ranges.is_none() {
            return Ruling::NotTested;
        }
        if !self.machines.is_empty() {
            return Ruling::Undecided(DIFFERENT_MACHINES.into());
        }
        if self.is_of_one_run() {
            return Ruling::Undecided(ONE_RUN.into());
        }
        let is_above = match limit {
            Limit::Percent(percent) => self
                .percent(change, change.proved())
                .is_some_and(|grown| grown > percent),
            Limit::Calls(calls) => change.proved() > calls as f64,
        };
        if is_above && change.is_significant() {
            return Ruling::Grown(format!("grew by {}", self.growth(change, limit)));
        }
        match self.unseen(change, limit) {
            Some((percent, seen)) => Ruling::Undecided(format!(
                "may have grown by more than {percent} %: only changes above {seen:.2} % can be detected"
            )),
            None => Ruling::Passed,
        }
    }

    /// The limit in percent, if growth by more than that may be hidden in the interval, and the growth in percent that can be
    /// seen. With a limit of 0, any growth that can be seen fails. Numbers leave nothing open.
    fn unseen(&self, change: &Change<'_>, limit: Limit) -> Option<(f64, f64)> {
        let Limit::Percent(limit) = limit else { return None };
        let (_, high) = change.interval.filter(|_| limit > 0.0)?;
        let seen = self.percent(change, change.detectable()?)?;
        (self.percent(change, high)? > limit && seen > limit).then_some((limit, seen))
    }

    /// A change of a row in percent of what limits are percent of; `None` for a label that is new.
    fn percent(&self, change: &Change<'_>, value: f64) -> Option<f64> {
        let total = match self.normalization {
            _ if self.options.by == DiffBy::Label => change.before,
            Normalization::Share => 1.0,
            _ => self.found.all.as_ref().map_or(1.0, |all| all.before),
        };
        (total > 0.0).then(|| value / total * 100.0)
    }

    fn name_of_all(&self) -> String {
        match self.normalization {
            Normalization::Number => format!("all {}", self.value()),
            _ => format!("all {} time", self.time()),
        }
    }

    fn growth(&self, change: &Change<'_>, limit: Limit) -> String {
        let of = match self.normalization {
            _ if self.options.by == DiffBy::Label => "its older amount".into(),
            Normalization::Share => format!("all {}", self.value()),
            Normalization::Number => format!("all {} of the older side", self.value()),
            _ => format!("all {} time in the older profile", self.time()),
        };
        match limit {
            Limit::Percent(limit) => format!(
                "{:.2} % of {of}, more than {limit} %",
                self.percent(change, change.proved()).unwrap_or(0.0)
            ),
            Limit::Calls(limit) => {
                let grown = change.proved();
                let calls = if grown == 1.0 { "call" } else { "calls" };
                format!("{grown} {calls}, more than {limit}")
            }
        }
    }

    /// Why nothing that grew by more than the limit may mean that it could not be seen.
    fn undecided(&self, limit: Limit, rows: &[Judged<'_>]) -> Option<String> {
        let unseen = rows
            .iter()
            .filter_map(|row| Some((row, self.unseen(row.change, limit)?)));
        let worst = unseen.max_by(|(_, (_, a)), (_, (_, b))| a.total_cmp(b));
        if let Some((row, (limit, seen))) = worst
            && let Ruling::Undecided(why) = &row.ruling
        {
            return Some(format!("{} {why}; {}", row.text(), self.enough(seen / limit)));
        }
        let is_of_samples =
            matches!(limit, Limit::Percent(percent) if percent > 0.0) && self.normalization != Normalization::Number;
        let is_none_tested = rows.iter().all(|row| matches!(row.ruling, Ruling::NotTested));
        (is_of_samples && is_none_tested).then(|| {
            if self.is_traced {
                "too few calls to compare anything; trace more work".into()
            } else {
                "too few samples to compare anything; record longer, or with a higher --rate".into()
            }
        })
    }

    /// What it takes to see changes that are smaller by this factor: noise falls with the square root of what is recorded.
    fn enough(&self, factor: f64) -> String {
        let more = factor * factor;
        if let Question::Runs {
            runs: [before, after], ..
        } = self.found.question
        {
            let runs = before.min(after) as f64;
            return format!(
                "make about {:.0} runs of each side instead of {before} and {after}",
                (runs * more).ceil()
            );
        }
        let seconds = self.sides.map(|side| side.sum.meta.duration);
        let seconds = seconds[0].min(seconds[1]);
        if seconds > 0.0 && seconds * more > 600.0 {
            format!(
                "make recordings of about {:.0} minutes instead of {seconds:.1} s",
                (seconds * more / 60.0).ceil()
            )
        } else if seconds > 0.0 {
            format!(
                "make recordings of about {:.0} s instead of {seconds:.1} s",
                (seconds * more).ceil()
            )
        } else {
            format!("record about {:.0} times as long", more.ceil())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answer comes first, also where it is that of an earlier look.
    #[test]
    fn growth_that_was_seen_before_is_the_answer() {
        let verdict = |gate, seen_after, undecided: &str| Verdict {
            limit: Limit::Percent(5.0),
            gate,
            rows: Vec::new(),
            undecided: Some(undecided.into()),
            seen_after,
        };
        let lines = |verdict: Verdict<'_>| verdict.lines().collect::<Vec<_>>();
        assert_eq!(
            lines(verdict(Gate::Grown, Some(7), "too few runs")),
            [
                "growth by more than 5 % was seen after 7 runs of each command",
                "all runs alone leave it undecided: too few runs"
            ]
        );
        assert_eq!(
            lines(verdict(Gate::Undecided, None, "too few runs")),
            ["undecided: too few runs"]
        );
    }
}
