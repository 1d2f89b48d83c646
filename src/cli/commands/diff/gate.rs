//! `--fail-above`: whether something grew by more than a limit, or that this cannot be known.

use super::text::Text;
use crate::cli::args::{DiffBy, DiffCommand as Options, Limit};
use crate::cli::print_status;
use crate::error::{Error, ErrorKind, Result};
use crate::profile::diff::{Change, Normalization, Question};

/// The answer of `--fail-above`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    Passed,
    /// Something grew by more.
    Grown,
    /// There are not enough runs, or samples, to know.
    Undecided,
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

impl Text<'_> {
    /// Whether something grew by more than the limit; prints what did, or why that cannot be known.
    pub fn gate(&self, limit: Limit) -> Gate {
        if self.found.question == Question::Recordings && !self.options.single_run {
            print_status(
                "undecided: one run of each side cannot tell whether the next two would differ likewise; give several of each, as \
                 --before A1 A2 A3 --after B1 B2 B3, or decide by these two alone with --single-run",
            );
            return Gate::Undecided;
        }
        let all = self.found.all.iter().map(|change| (self.name_of_all(), change));
        let rows = self.found.rows.iter().map(|change| (self.row(change).text(), change));
        let rows: Vec<_> = all.chain(rows).collect();
        let mut gate = Gate::Passed;
        for (name, change) in &rows {
            let grown = self.percent(change, change.proved());
            let is_above = match limit {
                Limit::Percent(percent) => grown.is_some_and(|grown| grown > percent),
                Limit::Calls(calls) => change.proved() > calls as f64,
            };
            if is_above && change.is_significant() {
                print_status(&format!("{name} grew by {}", self.growth(change, limit)));
                gate = Gate::Grown;
            }
        }
        match limit {
            // With a limit of 0, any growth that can be seen fails. Numbers leave nothing open.
            Limit::Percent(percent)
                if gate == Gate::Passed && percent > 0.0 && self.normalization != Normalization::Number =>
            {
                self.undecided(percent, &rows)
            }
            _ => gate,
        }
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
            Limit::Calls(limit) => format!("{} calls, more than {limit}", change.proved()),
        }
    }

    /// Whether growth of `limit` percent may be hidden in an interval.
    fn undecided(&self, limit: f64, rows: &[(String, &Change<'_>)]) -> Gate {
        // Changes that can be seen, in percent.
        let undecided = |change: &Change<'_>| {
            let (_, high) = change.interval?;
            let seen = self.percent(change, change.detectable()?)?;
            (self.percent(change, high)? > limit && seen > limit).then_some(seen)
        };
        let unseen = rows
            .iter()
            .filter_map(|(name, change)| Some((name, undecided(change)?)));
        let worst = unseen.max_by(|(_, a), (_, b)| a.total_cmp(b));
        match worst {
            Some((name, seen)) => print_status(&format!(
                "undecided: {name} may have grown by more than {limit} %: only changes above {seen:.2} % can be detected; {}",
                self.enough(seen / limit),
            )),
            None if rows.iter().all(|(_, change)| change.interval.is_none()) => {
                print_status(if self.is_traced {
                    "undecided: too few calls to compare anything; trace more work"
                } else {
                    "undecided: too few samples to compare anything; record longer, or with a higher --rate"
                });
            }
            None => return Gate::Passed,
        }
        Gate::Undecided
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
