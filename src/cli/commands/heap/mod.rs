//! `heap`: what the memory of a process is made of.

mod json;
mod output;
pub mod saved;
mod text;

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::cli::args::{ColorWhen, HeapCommand, HeapFormat};
use crate::cli::discover;
use crate::cli::live::check_readable;
use crate::cli::output::style::TerminalStyle;
use crate::cli::output::table;
use crate::error::{Error, ErrorKind, Result};
use crate::event::Pid;
use crate::heap::census::{Census, CensusOptions};
use crate::privileges::credentials::Caps;
use crate::privileges::phases;
use crate::sys::process::ExitWatch;
use crate::sys::{files, interrupts, procfs};
use output::CensusOutput;
pub use output::export;

/// What the JSON says that it is.
pub const KIND: &str = "census";
/// Rows of its lists of blocks, files and anonymous mappings, at most.
pub const MAX_LISTED: usize = 1000;
/// Time between two looks at signals and at the process, while the next census is awaited.
const TURN: Duration = Duration::from_millis(100);

/// A census, and of what.
struct Report {
    pid: Pid,
    command: String,
    /// When it was taken.
    time: SystemTime,
    census: Census,
}

impl Report {
    /// Milliseconds since the Unix epoch.
    fn time_ms(&self) -> u64 {
        let since = self.time.duration_since(UNIX_EPOCH).unwrap_or_default();
        since.as_millis().try_into().unwrap_or(u64::MAX)
    }
}

/// Writes the account of a process's memory to standard output, or to a file; with `--every` again and again, until the process
/// exits, a signal ends it, or its output is no longer read.
///
/// # Errors
/// `NoSuchProcess`, `NotPermitted`, `Unsupported`.
pub fn heap(options: &HeapCommand) -> Result<()> {
    let pid = discover::find(&options.target.process())?;
    phases::switch_to_invoking_user()?;
    let output = CensusOutput::new(options.output.as_deref(), options.format)?;
    if options.every.is_some() && output.format == HeapFormat::Html {
        return Err(
            Error::new(ErrorKind::Usage, "--every cannot be used with --format html")
                .why("a page shows one census")
                .hint("nativeprof heap PID --every 60 --format json > series.json"),
        );
    }
    check_readable(pid, "reading the memory of")?;
    phases::restrict_to_setup(output.needs())?;
    let watch = ExitWatch::new(pid);
    let what = CensusOptions {
        budget: (!options.all).then(|| Duration::from_secs_f64(options.budget)),
        sample: options.sample.clone(),
        owners: options.owners,
    };
    let take = || {
        Ok(Report {
            pid,
            command: procfs::command_line(pid),
            time: SystemTime::now(),
            census: Census::take(pid, &what)?,
        })
    };
    let first = take()?;
    let Some(interval) = options.every.map(Duration::from_secs_f64) else {
        output.drop_privileges()?;
        return output.write(&first);
    };
    phases::restrict_to_sampling(Caps::NONE)?;
    interrupts::install_interrupt_handler();
    print(&first, output.format)?;
    let mut next = Instant::now() + interval;
    loop {
        while Instant::now() < next {
            if interrupts::interrupted() || watch.has_exited() || files::is_hung_up(io::stdout().as_fd()) {
                return Ok(());
            }
            std::thread::sleep(TURN.min(next.saturating_duration_since(Instant::now())));
        }
        match take() {
            Ok(report) => print(&report, output.format)?,
            Err(e) if e.kind == ErrorKind::NoSuchProcess => return Ok(()),
            Err(e) => return Err(e),
        }
        // One that took too long is not made up for.
        next = (next + interval).max(Instant::now());
    }
}

/// Prints a census of a series: as JSON, each is a line.
fn print(report: &Report, format: HeapFormat) -> Result<()> {
    let text = match format {
        HeapFormat::Json => format!("{}\n", json::json(report)),
        _ => format!("{}\n", text::text(report, &TerminalStyle::of_stdout(ColorWhen::Auto))),
    };
    table::print(&text).map_err(|e| Error::io("cannot write to standard output", e))
}
