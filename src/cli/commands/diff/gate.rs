//! `--fail-above`: whether something grew by more than a limit, or that this cannot be known.

use super::Text;
use crate::cli::print_status;
use crate::profile::diff::{Change, Normalization};

/// The answer of `--fail-above`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    Passed,
    /// Something grew by more.
    Grown,
    /// The profiles have too few samples to know.
    Undecided,
}

impl Text<'_> {
    /// Whether something grew by more than `limit` percent of the older total; prints what did, or why that cannot be
    /// known.
    pub fn gate(&self, limit: f64) -> Gate {
        let total = match self.normalization {
            Normalization::Share => 1.0,
            _ => self.found.all.as_ref().map_or(1.0, |all| all.before),
        };
        let percent = |value: f64| value / total * 100.0;
        let all = self
            .found
            .all
            .iter()
            .map(|change| (format!("all {} time", self.time()), change));
        let rows = self.found.rows.iter().map(|change| (self.row(change).text(), change));
        let rows: Vec<_> = all.chain(rows).collect();
        let grew = |change: &Change<'_>| change.is_significant() && percent(change.change()) > limit;
        let mut gate = Gate::Passed;
        for (name, change) in rows.iter().filter(|(_, change)| grew(change)) {
            let before = match self.normalization {
                Normalization::Share => format!("all {}", self.value()),
                _ => format!("all {} time in the older profile", self.time()),
            };
            print_status(&format!(
                "{name} grew by {:.2} % of {before}, more than {limit} %",
                percent(change.change())
            ));
            gate = Gate::Grown;
        }
        // With a limit of 0, any growth that can be seen fails.
        if gate == Gate::Grown || limit == 0.0 {
            return gate;
        }
        let undecided = |change: &Change<'_>| {
            let (_, high) = change.interval?;
            let seen = change.limit.filter(|seen| percent(seen.now) > limit)?;
            (percent(high) > limit).then_some(seen)
        };
        let unseen = rows
            .iter()
            .filter_map(|(name, change)| Some((name, undecided(change)?)));
        let worst = unseen.max_by(|(_, a), (_, b)| a.now.total_cmp(&b.now));
        match worst {
            Some((name, seen)) => print_status(&format!(
                "undecided: {name} may have grown by more than {limit} %: only changes above {:.2} % can be detected; {}",
                percent(seen.now),
                self.enough(limit, percent(seen.now), percent(seen.of_processes)),
            )),
            None if rows.iter().all(|(_, change)| change.interval.is_none()) => {
                print_status(if self.is_traced {
                    "undecided: too few calls to compare anything; trace more work"
                } else {
                    "undecided: too few samples to compare anything; record longer, or with a higher --rate"
                });
            }
            None => return gate,
        }
        Gate::Undecided
    }

    /// What it takes to see a change of `limit`; all in percent: the smallest change that is seen now, and that of
    /// recordings of any length.
    fn enough(&self, limit: f64, now: f64, of_processes: f64) -> String {
        if limit <= of_processes {
            return format!("two runs of the same program differ by up to {of_processes:.2} %: use a higher limit");
        }
        // Noise within recordings falls with the square root of their length.
        let factor = (now.powi(2) - of_processes.powi(2)) / (limit.powi(2) - of_processes.powi(2));
        let seconds = self.profiles.map(|profile| profile.meta.duration);
        let seconds = seconds[0].min(seconds[1]);
        if seconds > 0.0 && seconds * factor > 600.0 {
            format!(
                "make recordings of about {:.0} minutes instead of {seconds:.1} s",
                (seconds * factor / 60.0).ceil()
            )
        } else if seconds > 0.0 {
            format!(
                "make recordings of about {:.0} s instead of {seconds:.1} s",
                (seconds * factor).ceil()
            )
        } else {
            format!("record about {:.0} times as long", factor.ceil())
        }
    }
}
