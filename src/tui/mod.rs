//! `top`: the last seconds of a process, or minutes of a history, on a terminal.
//!
//! Independent of processes and backends: samples come through [`SampleFeed`]. `rows` makes tables of a profile, `app`
//! has the state and handles keys, `draw` draws.

use std::io;
use std::os::fd::AsFd;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event};

use crate::error::{Error, Result};
use crate::event::Tid;
use crate::profile::model::Profile;
use crate::sys;

mod app;
mod draw;
mod rows;

use crate::profile::views::ViewOptions;
use app::{Action, App};

/// A length of time, s: all that was sampled.
pub const SINCE_START: u64 = u64::MAX;

/// Choices for the length of time that is shown.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Ascending, s; at least one.
    pub seconds: &'static [u64],
    /// The one at the start, s.
    pub first: u64,
}

impl Default for Windows {
    fn default() -> Windows {
        Windows {
            seconds: &[1, 2, 5, 10, 30, 60],
            first: 5,
        }
    }
}

/// Where the samples come from.
pub trait SampleFeed {
    /// The lengths of time that can be shown.
    fn windows(&self) -> Windows {
        Windows::default()
    }

    /// Processes available samples, waiting at most `wait`. False once the process has exited.
    ///
    /// # Errors
    /// The backend's.
    fn poll(&mut self, wait: Duration) -> Result<bool>;

    /// The samples of the last seconds before a time (CLOCK_MONOTONIC, ns), of all threads or one; `meta` covers all
    /// samples since the start. `None`: they are those of the last call.
    fn last(&mut self, seconds: u64, until: u64, thread: Option<Tid>) -> Option<Profile>;

    /// Threads that hold the global interpreter lock (GIL) now.
    fn gil_holders(&mut self) -> Vec<Tid>;

    /// Writes a profile; returns a text with the path.
    ///
    /// # Errors
    /// An invalid path or format.
    fn save(&mut self, profile: &Profile, path: &str) -> Result<String>;
}

/// Longest wait for samples before keys are read.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time between updates without a key press.
const REFRESH: Duration = Duration::from_secs(1);

/// Restores the terminal, also after an error.
struct TerminalGuard;

impl Drop for TerminalGuard {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Keys and changes of the terminal's size, read in a thread of its own: a closed terminal is always readable, at end of file,
/// and crossterm (0.29, src/event/source/unix/mio.rs) then reads it in an endless loop.
///
/// # Errors
/// No thread can be started.
fn read_events() -> Result<Receiver<io::Result<Event>>> {
    let (sender, receiver) = mpsc::channel();
    let reader = thread::Builder::new().name("keys".into()).spawn(move || {
        loop {
            let event = event::read();
            let failed = event.is_err();
            if sender.send(event).is_err() || failed {
                return;
            }
        }
    });
    match reader {
        Ok(_) => Ok(receiver),
        Err(e) => Err(Error::not_started("cannot start the thread that reads keys", e)),
    }
}

/// Shows the feed until `q` or Ctrl-C.
///
/// # Errors
/// A terminal that cannot be used; errors of the feed.
pub fn run(feed: &mut dyn SampleFeed, view: ViewOptions) -> Result<()> {
    let failed = |e: io::Error| Error::io("cannot use this terminal", e).hint("nativeprof record -o out.svg --pid PID");
    let mut terminal = ratatui::try_init().map_err(failed)?; // also restores it on a panic
    let _restored = TerminalGuard;
    let events = read_events()?;
    let mut app = App::new(view, feed.windows());
    let (mut alive, mut refreshed) = (true, None::<Instant>);
    // The time that the screen shows while it is frozen.
    let mut still = None;
    while !sys::interrupts::interrupted() {
        if alive {
            alive = feed.poll(POLL_INTERVAL)?;
        } else {
            app.ended = true;
            thread::sleep(POLL_INTERVAL);
        }
        if sys::files::is_hung_up(io::stdout().as_fd()) {
            return Ok(());
        }
        let mut changed = false;
        while let Ok(event) = events.try_recv() {
            if let Event::Key(key) = event.map_err(failed)? {
                match app.key(key) {
                    Action::Quit => return Ok(()),
                    Action::Save(path) => {
                        app.message = match feed.save(app.profile(), &path) {
                            Ok(place) => format!("written: {place}"),
                            Err(e) => format!("not written: {}: {}", e.what, e.why),
                        }
                    }
                    Action::Refresh => refreshed = None,
                    Action::Nothing => {}
                }
            }
            changed = true; // or resized
        }
        let is_still = app.frozen || app.ended;
        if refreshed.is_none_or(|at| at.elapsed() >= REFRESH && still.is_none()) {
            still = still.filter(|_| is_still).or_else(|| is_still.then(sys::clock::now));
            if still.is_none() {
                app.gil_holders = feed.gil_holders();
            }
            let until = still.unwrap_or_else(sys::clock::now);
            if let Some(profile) = feed.last(app.seconds, until, app.wanted_thread()) {
                app.show(profile);
            }
            refreshed = Some(Instant::now());
            changed = true;
        }
        if changed {
            terminal.draw(|screen| draw::draw(screen, &mut app)).map_err(failed)?;
        }
    }
    Ok(())
}
