//! What commands read: a file, or a part of the history in a directory.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::mpsc::{self, Receiver};

use crate::cli::args::{HistoryArgs, TimePoint, TimeRangeArgs};
use crate::cli::input::{self, OpenInput};
use crate::cli::output::time_range;
use crate::cli::print_status;
use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::history::name::SegmentName;
use crate::history::{self, Directory, Entry, REFUSED_PROCESSES};
use crate::privileges::credentials::{self, Cap, Caps};
use crate::privileges::phases;
use crate::profile::import::{SegmentNames, Segments, Selection};
use crate::profile::model::Profile;

/// Names that are listed where another one is asked for.
const MAX_LISTED: usize = 8;
/// Segments that are decompressed ahead of those that are added up.
const AHEAD: usize = 4;
/// Segments from which on another thread helps, and threads at most: each has a sum of its own.
const MIN_PART: usize = 4;
const MAX_THREADS: usize = 4;
/// Messages about segments that are not read; more are only counted.
const MESSAGES: usize = 5;
/// ns in a ms and in a day.
const MILLISECOND: u64 = 1_000_000;
const DAY: u64 = 86_400_000 * MILLISECOND;

/// The selected part of a file, or of the history in a directory.
///
/// # Errors
/// As [`profiles`].
pub fn profile(path: &Path, range: TimeRangeArgs, selected: &HistoryArgs, kept: Caps) -> Result<Profile> {
    Ok(profiles(&[(path, 0)], range, selected, kept)?.remove(0))
}

/// The selected parts of files, or of the histories in directories. With each path: ns by which the selected time is moved
/// back. All are opened before all privileges but `kept` are dropped, and parsed after that.
///
/// # Errors
/// Those of [`input::profiles`] and [`time_range::select`]; `Usage` if an option does not fit the path; `Data` if no segment is
/// in the selected time.
pub fn profiles(
    sources: &[(&Path, u64)],
    range: TimeRangeArgs,
    selected: &HistoryArgs,
    kept: Caps,
) -> Result<Vec<Profile>> {
    let mut files = Vec::new();
    for (path, earlier) in sources.iter().filter(|(path, _)| !path.is_dir()) {
        if let Some(option) = selected.first_used().or((*earlier > 0).then_some("--against")) {
            let what = format!("{option} needs a history, and {} is a file", line(&input::shown(path)));
            return Err(Error::new(ErrorKind::Usage, what)
                .why("only the directory of a host's history has services, containers and times of day")
                .hint(format!("omit {option}, or give the directory")));
        }
        files.push(*path);
    }
    let mut opened = input::open(&files)?.into_iter();
    let histories = sources.iter().map(|(path, earlier)| {
        let is_history = path.is_dir();
        is_history.then(|| History::open(path, range, selected, *earlier))
    });
    let histories = histories.map(Option::transpose).collect::<Result<Vec<_>>>()?;
    phases::drop_for_symbolization(kept)?;
    let mut profiles = Vec::new();
    for ((path, _), history) in sources.iter().zip(histories) {
        profiles.extend(match history {
            Some(history) => Some(history.profile()?),
            None => {
                let read = opened.next().map(OpenInput::profile).transpose()?;
                read.map(|profile| time_range::select(profile, range, path))
                    .transpose()?
            }
        });
    }
    Ok(profiles)
}

/// The newest part of a history.
pub struct Newest {
    /// What could be read of it; no samples where none are selected.
    pub profile: Profile,
    /// When it ends, ns since the Unix epoch.
    pub end: u64,
    /// Its segments that are not in it, because they could not be read.
    pub skipped: u64,
}

/// The selected part of the history in a directory. Nothing is printed, and segments that cannot be read are left out. The
/// privileges are those that the directory is read with; nothing is parsed with them.
///
/// # Errors
/// As [`profiles`].
pub fn newest_part(path: &Path, range: TimeRangeArgs, selected: &HistoryArgs) -> Result<Newest> {
    let history = History::open(path, range, selected, 0)?;
    let (end, all) = (history.to, history.segments.len());
    let read = || sum(history.parts, &history.selection);
    let sum = credentials::with_only(Caps::NONE, read);
    let sum = sum.map_err(|e| Error::io("cannot drop privileges that are not needed", e))??;
    Ok(Newest {
        end,
        skipped: (all + sum.skipped.len()).saturating_sub(sum.received) as u64,
        profile: sum.segments.finish(),
    })
}

/// The selected part of a history, which is being read.
struct History {
    directory: Directory,
    /// ns since the Unix epoch, for messages.
    from: u64,
    to: u64,
    selection: Selection,
    segments: Vec<SegmentName>,
    /// The segments' messages, a part of them for each thread that adds up.
    parts: Vec<Receiver<Message>>,
}

/// A segment with its content, decompressed in another thread.
type Message = (SegmentName, io::Result<Vec<u8>>);
/// A sum of segments.
struct Sum {
    segments: Segments,
    /// Those that were there to be added.
    received: usize,
    /// Those of them that are not in it, with the reasons.
    skipped: Vec<(SegmentName, String)>,
}

impl Sum {
    fn new(selection: &Selection) -> Sum {
        Sum {
            segments: Segments::new(selection.clone()),
            received: 0,
            skipped: Vec::new(),
        }
    }
}

impl History {
    fn open(path: &Path, range: TimeRangeArgs, selected: &HistoryArgs, earlier: u64) -> Result<History> {
        let directory = Directory::open(path)?;
        let (from, to) = times(&directory, range, selected.last)?;
        let (from, shown_to) = (from.saturating_sub(earlier), to.saturating_sub(earlier));
        // Names are in ms: the last segment may be a little longer.
        let to = if range.to.is_none() && earlier == 0 {
            u64::MAX
        } else {
            shown_to
        };
        let is_within = |entry: &&Entry| nanoseconds(entry.name.start) < to && from < nanoseconds(entry.name.end());
        let newest = match selected.last {
            Some(last) if to == u64::MAX => newest(directory.segments(), last),
            _ => directory.segments(),
        };
        let within = newest.iter().filter(is_within);
        let names: Vec<SegmentName> = within.map(|entry| entry.name).collect();
        Ok(History {
            from,
            to: shown_to,
            selection: Selection {
                from,
                to,
                container: selected.processes.container.clone(),
                service: selected.processes.service.clone(),
                comm: selected.processes.comm.clone(),
                pid: selected.pid,
            },
            parts: read_ahead(&directory, names.clone())?,
            segments: names,
            directory,
        })
    }

    /// The sum of the segments.
    fn profile(self) -> Result<Profile> {
        report_foreign(&self.directory);
        let Sum {
            segments,
            received,
            skipped,
        } = sum(self.parts, &self.selection)?;
        for (name, reason) in skipped.iter().take(MESSAGES) {
            print_status(&format!("skipped: {name}: {}", line(reason)));
        }
        let mut skipped = skipped.len();
        if skipped > MESSAGES {
            print_status(&format!("skipped: {} more segments", skipped - MESSAGES));
        }
        // The thread that reads them has said why it ended early.
        skipped += self.segments.len().saturating_sub(received);
        let refused = refused(segments.counts());
        let profile = segments.finish();
        let (from, to) = (shown(self.from), shown(self.to));
        if profile.nodes.first().is_none_or(|root| root.count == 0) {
            let what = format!(
                "{} has no such samples from {from} to {to}",
                self.directory.path().display()
            );
            let why = match self.segments.len() {
                0 => extent(&self.directory),
                all if all == skipped => format!("none of its {all} segments could be read"),
                all => unknown_name(&self.directory, &self.segments, &self.selection).unwrap_or_else(|| {
                    format!(
                        "its {} segments of that time have none of what is selected",
                        all - skipped
                    )
                }),
            };
            return Err(Error::new(ErrorKind::Data, what).why(why).hint(
                "choose another time with --last, or --from and --to, or fewer of --service, --container, --comm, --pid",
            ));
        }
        print_status(&format!(
            "{} segments from {from} to {to}",
            self.segments.len() - skipped
        ));
        if !refused.is_empty() {
            print_status(&format!(
                "processes that could not be opened, in each segment: {refused}"
            ));
        }
        Ok(profile)
    }
}

/// The sum of all parts, each added up in a thread of its own.
///
/// # Errors
/// `Data`: each part is within the limits, and all together are not.
fn sum(parts: Vec<Receiver<Message>>, selection: &Selection) -> Result<Sum> {
    std::thread::scope(|scope| {
        let add = |part| scope.spawn(move || sum_of_part(part, selection));
        let running: Vec<_> = parts.into_iter().map(add).collect();
        let sums = running
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        let mut all: Option<Sum> = None;
        for part in sums {
            match &mut all {
                None => all = Some(part),
                Some(all) => {
                    all.segments.add_all(part.segments).map_err(|damage| {
                        Error::new(ErrorKind::Data, "there is too much in the history at that time")
                            .why(damage.reason)
                            .hint("choose a shorter time, or fewer services, containers or processes")
                    })?;
                    all.received += part.received;
                    all.skipped.extend(part.skipped);
                }
            }
        }
        Ok(all.unwrap_or_else(|| Sum::new(selection)))
    })
}

fn sum_of_part(part: Receiver<Message>, selection: &Selection) -> Sum {
    let mut sum = Sum::new(selection);
    for (name, message) in part {
        sum.received += 1;
        let added = match message {
            Ok(message) => sum.segments.add(&message).map_err(|damage| damage.reason),
            Err(e) => Err(e.to_string()),
        };
        if let Err(reason) = added {
            sum.skipped.push((name, reason));
        }
    }
    sum
}

/// Reads segments in a thread of its own: consecutive ones are for one part, and each part gets one in turn. It may open what
/// the user may not, as the directory was opened: the recorder's is usually closed to others. Nothing is parsed with that
/// capability.
fn read_ahead(directory: &Directory, names: Vec<SegmentName>) -> Result<Vec<Receiver<Message>>> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (names.len() / MIN_PART).clamp(1, cpus.min(MAX_THREADS));
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..threads).map(|_| mpsc::sync_channel(AHEAD)).unzip();
    let directory = directory.path().to_path_buf();
    let read = move || {
        let length = names.len().div_ceil(threads).max(1);
        for at in 0..length {
            for (part, sender) in names.chunks(length).zip(&senders) {
                let Some(name) = part.get(at) else { continue };
                let opened = history::open_segment(&directory, name);
                let content = |file| credentials::with_only(Caps::NONE, || history::decompress(file))?;
                if sender.send((*name, opened.and_then(content))).is_err() {
                    return;
                }
            }
        }
    };
    let reader = move || match credentials::keep(Caps::of(&[Cap::DacReadSearch])) {
        Ok(()) => read(),
        Err(e) => print_status(&format!("the history is not read: privileges cannot be dropped: {e}")),
    };
    std::thread::Builder::new()
        .name("segments".into())
        .spawn(reader)
        .map_err(|e| Error::not_started("cannot start the thread that reads segments", e))?;
    Ok(receivers)
}

/// The numbers of processes that could not be opened, by the reason, as text.
fn refused(counts: &BTreeMap<String, u64>) -> String {
    let of_processes = counts.iter().filter_map(|(name, number)| {
        let reason = name.strip_prefix(REFUSED_PROCESSES)?;
        Some(format!("{number} {}", line(&reason.replace('_', " "))))
    });
    let texts: Vec<String> = of_processes.take(MESSAGES).collect();
    texts.join(", ")
}

/// Which of the names that are selected the segments do not have, and which they have.
fn unknown_name(directory: &Directory, segments: &[SegmentName], selected: &Selection) -> Option<String> {
    let mut names = SegmentNames::default();
    // What is damaged has been reported. Without the privileges that they were opened with, none may be readable.
    let mut messages = segments.iter().filter_map(|name| directory.read(name).ok()).peekable();
    messages.peek()?;
    for message in messages {
        let _ = names.add(&message);
    }
    let pids = names.pids.iter().map(u32::to_string).collect();
    let pid = selected.pid.map(|pid| pid.to_string());
    let kinds = [
        ("--service", &selected.service, &names.services),
        ("--container", &selected.container, &names.containers),
        ("--comm", &selected.comm, &names.comms),
        ("--pid", &pid, &pids),
    ];
    kinds.into_iter().find_map(|(option, wanted, there)| {
        let wanted = wanted.as_ref()?;
        let is_it = |name: &String| match option {
            "--container" => name.starts_with(wanted),
            _ => name == wanted,
        };
        let is_unknown = !there.iter().any(is_it);
        is_unknown.then(|| format!("no process has {option} {}; {}", line(wanted), listed(there, wanted)))
    })
}

/// Some of the names that there are, those that have to do with the wanted one first.
fn listed(names: &BTreeSet<String>, wanted: &str) -> String {
    if names.is_empty() {
        return "there are none".into();
    }
    let wanted = wanted.to_lowercase();
    let is_other = |name: &&String| {
        let name = name.to_lowercase();
        name.is_empty() || !(name.contains(&wanted) || wanted.contains(&name))
    };
    let mut names: Vec<&String> = names.iter().collect();
    names.sort_by_key(is_other);
    let shown: Vec<_> = names.iter().take(MAX_LISTED).map(|name| line(name)).collect();
    let more = match names.len().saturating_sub(MAX_LISTED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("there are {}{more}", shown.join(", "))
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

/// The segments of the last so many ns in which segments were written. Where the clock was stepped back, older ones have the same
/// times again, and are not among them.
fn newest(segments: &[Entry], last: u64) -> &[Entry] {
    let (mut elapsed, mut next) = (0u64, None);
    let older = segments.iter().rposition(|entry| {
        let name = &entry.name;
        let gap = next.map_or(0, |start: u64| start.saturating_sub(name.end()));
        elapsed = elapsed.saturating_add(nanoseconds(gap));
        let is_older = elapsed >= last;
        elapsed = elapsed.saturating_add(nanoseconds(name.duration));
        next = Some(name.start);
        is_older
    });
    segments.get(older.map_or(0, |at| at + 1)..).unwrap_or_default()
}

/// From when to when, ns since the Unix epoch.
fn times(directory: &Directory, range: TimeRangeArgs, last: Option<u64>) -> Result<(u64, u64)> {
    // Of the last one: the clock may have been stepped back since others were written.
    let end = directory.segments().last().map(|entry| entry.name.end());
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
