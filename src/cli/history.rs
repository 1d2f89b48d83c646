//! What commands read: a file, or a part of the history in a directory.

use std::path::Path;
use std::sync::mpsc;

use crate::cli::args::{HistoryArgs, TimePoint, TimeRangeArgs};
use crate::cli::output::time_range;
use crate::cli::{input, print_status};
use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::history::name::SegmentName;
use crate::history::{Directory, Entry};
use crate::privileges::credentials::Caps;
use crate::privileges::phases;
use crate::profile::import::{Segments, Selection};
use crate::profile::model::Profile;

/// Segments that are decompressed ahead of the one that is read.
const AHEAD: usize = 4;
/// Messages about segments that are not read; more are only counted.
const MESSAGES: usize = 5;
/// ns in a ms and in a day.
const MILLISECOND: u64 = 1_000_000;
const DAY: u64 = 86_400_000 * MILLISECOND;

/// The selected part of a file, or of the history in a directory. `earlier`: ns by which the selected time is moved back.
///
/// # Errors
/// Those of [`input::profile`] and [`time_range::select`]; `Usage` if an option does not fit the path; `Data` if no segment is in
/// the selected time.
pub fn profile(path: &Path, range: TimeRangeArgs, selected: &HistoryArgs, earlier: u64, kept: Caps) -> Result<Profile> {
    if !path.is_dir() {
        if let Some(option) = selected.first_used().or((earlier > 0).then_some("--against")) {
            let what = format!("{option} needs a history, and {} is a file", line(&input::shown(path)));
            return Err(Error::new(ErrorKind::Usage, what)
                .why("only the directory of a host's history has services, containers and times of day")
                .hint(format!("omit {option}, or give the directory")));
        }
        return time_range::select(input::profile(path, kept)?, range, path);
    }
    phases::drop_for_symbolization(kept)?;
    let directory = Directory::open(path)?;
    let (from, to) = times(&directory, range, selected.last)?;
    report_foreign(&directory);
    let (from, shown_to) = (from.saturating_sub(earlier), to.saturating_sub(earlier));
    // Names are in ms: the last segment may be a little longer.
    let to = if range.to.is_none() && earlier == 0 {
        u64::MAX
    } else {
        shown_to
    };
    let is_within = |entry: &&Entry| nanoseconds(entry.name.start) < to && from < nanoseconds(entry.name.end());
    let names: Vec<SegmentName> = directory
        .segments()
        .iter()
        .filter(is_within)
        .map(|entry| entry.name)
        .collect();
    let selection = Selection {
        from,
        to,
        container: selected.container.clone(),
        service: selected.service.clone(),
        comm: selected.comm.clone(),
        pid: selected.pid,
    };
    let (profile, skipped) = sum(&directory, &names, selection);
    if profile.nodes.first().is_none_or(|root| root.count == 0) {
        let what = format!(
            "{} has no such samples from {} to {}",
            path.display(),
            shown(from),
            shown(shown_to)
        );
        let why = match names.len() {
            0 => extent(&directory),
            all if all == skipped => format!("none of its {all} segments could be read"),
            all => format!(
                "its {} segments of that time have none of what is selected",
                all - skipped
            ),
        };
        return Err(Error::new(ErrorKind::Data, what).why(why).hint(
            "choose another time with --last, or --from and --to, or fewer of --service, --container, --comm, --pid",
        ));
    }
    print_status(&format!(
        "{} segments from {} to {}",
        names.len() - skipped,
        shown(from),
        shown(shown_to)
    ));
    Ok(profile)
}

/// The profile of some segments, and how many of them could not be read. They are decompressed in another thread.
fn sum(directory: &Directory, names: &[SegmentName], selection: Selection) -> (Profile, usize) {
    let mut segments = Segments::new(selection);
    let mut skipped = 0;
    std::thread::scope(|scope| {
        let (sender, receiver) = mpsc::sync_channel(AHEAD);
        scope.spawn(move || {
            for name in names {
                if sender.send((name, directory.read(name))).is_err() {
                    break;
                }
            }
        });
        for (name, message) in receiver {
            let added = match message {
                Ok(message) => segments.add(&message).map_err(|damage| damage.reason),
                Err(e) => Err(e.to_string()),
            };
            if let Err(reason) = added {
                skipped += 1;
                if skipped <= MESSAGES {
                    print_status(&format!("skipped: {name}: {}", line(&reason)));
                }
            }
        }
    });
    if skipped > MESSAGES {
        print_status(&format!("skipped: {} more segments", skipped - MESSAGES));
    }
    (segments.finish(), skipped)
}

fn report_foreign(directory: &Directory) {
    let (names, all) = directory.foreign();
    for name in names.iter().take(MESSAGES) {
        print_status(&format!(
            "skipped: {}: not the name of a segment",
            line(&name.to_string_lossy())
        ));
    }
    if all > MESSAGES {
        print_status(&format!("skipped: {} more files", all - MESSAGES));
    }
}

/// From when to when, ns since the Unix epoch.
fn times(directory: &Directory, range: TimeRangeArgs, last: Option<u64>) -> Result<(u64, u64)> {
    let end = directory.segments().iter().map(|entry| entry.name.end()).max();
    let Some(end) = end.map(nanoseconds) else {
        let what = format!("cannot read {}", directory.path().display());
        return Err(Error::new(ErrorKind::Data, what)
            .why("it is a directory without segments of a history")
            .hint("check the path"));
    };
    let point = |option: &str, point: TimePoint| match point {
        TimePoint::Clock(time) => Ok(time),
        // The last such time that the history has begun.
        TimePoint::OfDay(time) => {
            let today = end - end % DAY + time;
            Ok(if today < end { today } else { today.saturating_sub(DAY) })
        }
        TimePoint::SinceStart(_) => Err(Error::new(
            ErrorKind::Usage,
            format!("{option} of a history is a time of day"),
        )
        .why("its start moves when old segments are dropped")
        .hint(format!(
            "{option} 03:00, {option} 2026-11-28T03:00 (UTC), or --last 10m"
        ))),
    };
    let to = range.to.map(|to| point("--to", to)).transpose()?.unwrap_or(end);
    let from = match (range.from, last) {
        (Some(from), _) => point("--from", from)?,
        (None, Some(last)) => to.saturating_sub(last),
        (None, None) => 0,
    };
    if to <= from {
        let what = format!("no time is between {} and {}", shown(from), shown(to));
        return Err(Error::new(ErrorKind::Usage, what)
            .why("--to is not after --from; a time of day is the last one that the history has")
            .hint("state the date as well: --from 2026-11-28T03:00 --to 2026-11-28T03:10"));
    }
    Ok((from, to))
}

/// From when to when a directory has segments.
fn extent(directory: &Directory) -> String {
    let segments = directory.segments().iter();
    let start = segments.clone().map(|entry| entry.name.start).min().unwrap_or(0);
    let end = segments.map(|entry| entry.name.end()).max().unwrap_or(0);
    format!(
        "it has segments from {} to {}",
        shown(nanoseconds(start)),
        shown(nanoseconds(end))
    )
}

fn nanoseconds(milliseconds: u64) -> u64 {
    milliseconds.saturating_mul(MILLISECOND)
}

/// A time as `2026-11-28T03:14:00Z`; the epoch is the beginning of all.
fn shown(time: u64) -> String {
    if time == 0 {
        return "the beginning".into();
    }
    let (year, month, day) = crate::history::name::date(time / DAY);
    let seconds = time % DAY / (1000 * MILLISECOND);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}
