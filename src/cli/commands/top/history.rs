//! `top DIR`: the newest part of a host's history, read again when a segment was added.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use super::save;
use crate::cli::args::{HistoryArgs, TimePoint, TimeRangeArgs, Top};
use crate::cli::history::{self, Newest};
use crate::error::{Error, ErrorKind, Result};
use crate::event::Tid;
use crate::privileges::credentials::{Cap, Caps};
use crate::privileges::phases;
use crate::profile::model::Profile;
use crate::profile::summary;
use crate::tui::{self, Windows};

/// Choices for the part that is shown, s: a segment is usually a minute.
const WINDOWS: Windows = Windows {
    seconds: &[60, 300, 600, 1800, 3600, 6 * 3600, 24 * 3600],
    first: 600,
};

/// Shows the newest part of a history until the user quits.
///
/// # Errors
/// `Usage` for options of live processes; those of [`history::profile`].
pub fn top(directory: &Path, options: &Top) -> Result<()> {
    phases::switch_to_invoking_user()?;
    let selected = HistoryArgs {
        last: Some(WINDOWS.first * 1_000_000_000),
        processes: options.of_history.clone(),
        pid: options.pid,
    };
    // The directory is read again and again, and is usually closed to others.
    let kept = Caps::of(&[Cap::DacReadSearch]);
    // What cannot be read, and names that there are not, are reported before the screen is taken.
    history::profile(directory, TimeRangeArgs::default(), &selected, kept)?;
    let mut feed = HistoryFeed {
        directory: directory.to_path_buf(),
        selected,
        shown: None,
        failed: None,
    };
    tui::run(&mut feed, options.frames.view(false))
}

/// Which part of the history was read last.
struct Shown {
    seconds: u64,
    /// When it was asked for: the same time again means the same part.
    until: u64,
    /// When the directory was changed last.
    changed: Option<SystemTime>,
    /// When it ends, ns since the Unix epoch.
    end: u64,
}

struct HistoryFeed {
    directory: PathBuf,
    selected: HistoryArgs,
    shown: Option<Shown>,
    failed: Option<Error>,
}

impl HistoryFeed {
    /// The part that is to be shown; `None`: it is the one that was read last.
    fn read(&mut self, seconds: u64, until: u64) -> Result<Option<Profile>> {
        // A segment that is written after this is another change.
        let changed = self
            .directory
            .metadata()
            .and_then(|directory| directory.modified())
            .ok();
        let mut range = TimeRangeArgs::default();
        if let Some(shown) = &mut self.shown {
            let is_frozen = shown.until == until;
            if shown.seconds == seconds && (is_frozen || changed.is_some() && shown.changed == changed) {
                shown.until = until;
                return Ok(None);
            }
            range.to = is_frozen.then_some(TimePoint::Clock(shown.end));
        }
        self.selected.last = Some(seconds * 1_000_000_000);
        let Newest {
            mut profile,
            end,
            skipped,
        } = history::newest_part(&self.directory, range, &self.selected)?;
        let directory = self.directory.display();
        profile.meta.command = match skipped {
            0 => directory.to_string(),
            skipped => format!(
                "{directory}, {} could not be read",
                summary::counted(skipped, "segments")
            ),
        };
        self.shown = Some(Shown {
            seconds,
            until,
            changed,
            end,
        });
        Ok(Some(profile))
    }
}

impl tui::SampleFeed for HistoryFeed {
    fn windows(&self) -> Windows {
        WINDOWS
    }

    fn poll(&mut self, wait: Duration) -> Result<bool> {
        match self.failed.take() {
            Some(failed) => Err(failed),
            None => {
                thread::sleep(wait);
                Ok(true)
            }
        }
    }

    /// Samples of a history are of processes, not of threads.
    fn last(&mut self, seconds: u64, until: u64, _thread: Option<Tid>) -> Option<Profile> {
        self.read(seconds, until).unwrap_or_else(|failed| {
            self.failed = Some(failed);
            None
        })
    }

    fn gil_holders(&mut self) -> Vec<Tid> {
        Vec::new()
    }

    fn save(&mut self, profile: &Profile, path: &str) -> Result<String> {
        save(profile, path)
    }
}

/// Of a live process there are no parts of a history to choose.
///
/// # Errors
/// `Usage` if an option does.
pub fn check_no_history_options(options: &Top) -> Result<()> {
    let Some(option) = options.of_history.first_used() else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::Usage, format!("{option} needs a history"))
        .why("only the directory of a host's history has services and containers")
        .hint(format!(
            "omit {option}, or give the directory: nativeprof top DIR {option} NAME"
        )))
}
