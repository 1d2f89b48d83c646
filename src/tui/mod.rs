//! `top`: the last seconds of a process on a terminal.
//!
//! Knows no process and no backend: what is shown comes in through [`Feed`]. `rows` makes tables of a profile, `app` knows
//! what is being looked at and takes keys, `draw` puts it on the screen.

use std::io;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event};

use crate::error::{Error, Result};
use crate::process::sys;
use crate::sample::Tid;
use crate::tree::profile::Profile;

mod app;
mod draw;
mod rows;

use app::{Act, App};

/// Where the samples come from.
pub trait Feed {
    /// Waits so long at most, and takes in what there is. False once the process has ended.
    ///
    /// # Errors
    /// The backend's.
    fn take(&mut self, wait: Duration) -> Result<bool>;

    /// The samples of the last seconds before a time (CLOCK_MONOTONIC, ns), of all threads or one; `meta` tells of the
    /// whole time.
    fn last(&mut self, seconds: u64, until: u64, thread: Option<Tid>) -> Profile;

    /// Writes a profile; says in words where it is.
    ///
    /// # Errors
    /// A place or a format that will not do.
    fn save(&mut self, profile: &Profile, path: &str) -> Result<String>;
}

/// Longest wait for samples before keys are looked at.
const TURN: Duration = Duration::from_millis(50);
/// Time between two pictures while nobody touches a key.
const REFRESH: Duration = Duration::from_secs(1);

/// The terminal as it was before, however this ends.
struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Shows the feed until `q` or Ctrl-C.
///
/// # Errors
/// A terminal that cannot be had; the feed's.
pub fn run(feed: &mut dyn Feed) -> Result<()> {
    let failed = |e: io::Error| Error::io("cannot use this terminal", e).hint("nativeprof record -o out.svg --pid PID");
    let mut terminal = ratatui::try_init().map_err(failed)?; // also restores it on a panic
    let _restored = Restored;
    let mut app = App::default();
    let (mut alive, mut looked) = (true, None::<Instant>);
    // The time that the picture is of, while it stands still.
    let mut still = None;
    while !sys::interrupted() {
        if alive {
            alive = feed.take(TURN)?;
        } else {
            app.ended = true;
            thread::sleep(TURN);
        }
        // One that has gone always has something to read, which is nothing: the reader of keys would never come back.
        if sys::is_hung_up(io::stdout().as_fd()) {
            return Ok(());
        }
        let mut changed = false;
        while event::poll(Duration::ZERO).map_err(failed)? {
            if let Event::Key(key) = event::read().map_err(failed)? {
                match app.key(key) {
                    Act::Quit => return Ok(()),
                    Act::Save(path) => {
                        app.message = match feed.save(app.profile(), &path) {
                            Ok(place) => format!("written: {place}"),
                            Err(e) => format!("not written: {}: {}", e.what, e.why),
                        }
                    }
                    Act::Look => looked = None,
                    Act::Nothing => {}
                }
            }
            changed = true; // or resized
        }
        let stands = app.frozen || app.ended;
        if looked.is_none_or(|at| at.elapsed() >= REFRESH && still.is_none()) {
            still = still.filter(|_| stands).or_else(|| stands.then(sys::now));
            app.show(feed.last(app.seconds, still.unwrap_or_else(sys::now), app.wanted_thread()));
            looked = Some(Instant::now());
            changed = true;
        }
        if changed {
            terminal.draw(|screen| draw::draw(screen, &mut app)).map_err(failed)?;
        }
    }
    Ok(())
}
