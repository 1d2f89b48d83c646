//! `heap`: what the memory of a process is made of.

mod json;
mod text;

use std::time::Duration;

use crate::cli::args::{ColorWhen, HeapCommand, HeapFormat};
use crate::cli::discover;
use crate::cli::live::check_readable;
use crate::cli::output::style::TerminalStyle;
use crate::cli::output::table;
use crate::error::{Error, Result};
use crate::event::Pid;
use crate::heap::census::{Census, CensusOptions};
use crate::privileges::credentials::Caps;
use crate::privileges::phases;
use crate::session::Inspection;
use crate::sys::procfs;

/// A census, and of what.
struct Report {
    pid: Pid,
    command: String,
    /// The interpreter as text; empty: there is none.
    python: String,
    census: Census,
}

/// Writes the account of a process's memory to standard output.
///
/// # Errors
/// `NoSuchProcess`, `NotPermitted`, `Unsupported`.
pub fn heap(options: &HeapCommand) -> Result<()> {
    let pid = discover::find(&options.target.process())?;
    phases::switch_to_invoking_user()?;
    check_readable(pid, "reading the memory of")?;
    phases::restrict_to_setup(Caps::NONE)?;
    let what = CensusOptions {
        budget: (!options.all).then(|| Duration::from_secs_f64(options.budget)),
    };
    let (inspection, _) = Inspection::open(pid, false)?;
    let python = inspection.python();
    let python = python
        .as_ref()
        .and_then(|(runtime, interpreter)| Some((&**runtime, interpreter.as_ref()?)));
    let report = Report {
        pid,
        command: procfs::command_line(pid),
        python: inspection.python_text().unwrap_or_default().into(),
        census: Census::take(pid, python, &what)?,
    };
    phases::drop_all()?;
    let text = match options.format {
        HeapFormat::Text => text::text(&report, &TerminalStyle::of_stdout(ColorWhen::Auto)),
        HeapFormat::Json => format!("{:#}\n", json::json(&report)),
    };
    table::print(&text).map_err(|e| Error::io("cannot write to standard output", e))
}
