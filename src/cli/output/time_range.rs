//! A part of a recording's time, as `--from` and `--to` choose it.

use std::path::Path;

use crate::cli::args::{TimePoint, TimeRangeArgs};
use crate::cli::input;
use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::export::cut;
use crate::profile::model::Profile;
use crate::profile::summary;
use crate::profile::values::Unit;

/// How far after the end of a recording a time may be, ns: `report` shows its length in tenths of a second.
const ROUNDING: u64 = 100_000_000;

/// The samples of a profile in the time requested; `file` for errors.
///
/// # Errors
/// `Usage`: the time ends before it begins. `Data`: it is not within the recording, or samples of the profile have no times.
pub fn select(profile: Profile, range: TimeRangeArgs, file: &Path) -> Result<Profile> {
    let TimeRangeArgs { from, to } = range;
    if from.is_none() && to.is_none() {
        return Ok(profile);
    }
    let offset = |time: Option<TimePoint>| match time {
        Some(TimePoint::SinceStart(time)) => Ok(Some(time)),
        Some(_) => Err(Error::new(ErrorKind::Usage, "a time of day needs a history")
            .why(format!("{} is one recording", line(&input::shown(file))))
            .hint("--from 2s --to 5s, both since the start of the recording")),
        None => Ok(None),
    };
    let (from, to) = (offset(from)?.unwrap_or(0), offset(to)?);
    let show = |time: u64| Unit::Nanoseconds.show(time);
    if let Some(to) = to.filter(|to| *to <= from) {
        let what = format!("no time is between {} and {}", show(from), show(to));
        return Err(Error::new(ErrorKind::Usage, what)
            .why("--to is not after --from")
            .hint("--from 2s --to 5s, both since the start of the recording"));
    }
    let name = line(&input::shown(file)).into_owned();
    if profile.timeline.is_empty() || !profile.is_timed() {
        let why = match profile.timeline.len() {
            0 => "it has no timeline, as files of cProfile, of traced calls, and of Dask".to_string(),
            some => format!(
                "it has times for {} of {} only",
                some,
                line(&summary::amount(profile.count_type(), profile.total_amount(0)))
            ),
        };
        return Err(
            Error::new(ErrorKind::Data, format!("{name} has no times to choose from"))
                .why(why)
                .hint("omit --from and --to, or record samples: nativeprof record -o out.json ..."),
        );
    }
    let end = profile.end();
    let outside = |option: &str, time: u64| {
        Err(
            Error::new(ErrorKind::Data, format!("{option} {} is not within {name}", show(time)))
                .why(format!("its recording ends after {}", show(end)))
                .hint(format!("--from and --to up to {}", show(end))),
        )
    };
    if from >= end {
        return outside("--from", from);
    }
    match to {
        Some(to) if to > end.saturating_add(ROUNDING) => outside("--to", to),
        // All samples up to the end, also the one at that time.
        Some(to) => Ok(cut::by_time(&profile, from, Some(to).filter(|to| *to < end))),
        None => Ok(cut::by_time(&profile, from, None)),
    }
}
