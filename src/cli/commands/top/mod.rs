//! `top`: shows the hottest functions of a process, live, or of a host's history.

use std::io::{self, IsTerminal};
use std::path::Path;
use std::time::Duration;

use crate::capture::Mode;
use crate::cli::args::{ProcessRef, Top};
use crate::cli::backend::check_rate;
use crate::cli::commands::record::{print_exceeded, print_sampling};
use crate::cli::discover;
use crate::cli::live::{Invoker, LiveOptions, LiveRecording, LiveTarget, PreparedTarget};
use crate::cli::output::Output;
use crate::cli::{print_line, quoted_words};
use crate::error::{Error, ErrorKind, Result};
use crate::event::Tid;
use crate::privileges::credentials::Caps;
use crate::profile::model::{FrameKind, Meta, Profile, Quality};
use crate::profile::summary;
use crate::session::Grouping;
use crate::sys::spawn::Streams;
use crate::tui::{self, SINCE_START, Windows};

mod history;

/// Age from which samples are forgotten, s.
const MAX_AGE: u64 = 60;

/// Choices for the part that is shown of resident memory, s. What grew long ago and is still there is what matters most.
const MEMORY_WINDOWS: Windows = Windows {
    seconds: &[10, 60, 600, 3600, SINCE_START],
    first: SINCE_START,
};

/// Shows the process until the user quits.
///
/// # Errors
/// As `record`; `Usage` if the output is not a terminal.
pub fn top(options: &Top) -> Result<()> {
    let directory = match &options.process {
        Some(ProcessRef::Name(name)) => Some(Path::new(name)).filter(|path| path.is_dir()),
        _ => None,
    };
    if directory.is_none() {
        if options.pid.is_some() && options.process.is_some() {
            return Err(Error::new(ErrorKind::Usage, "two processes were given")
                .why("--pid is an alternative to PID or NAME")
                .hint("nativeprof top PID, or for a process of a history: nativeprof top DIR --pid PID"));
        }
        history::check_no_history_options(options)?;
    }
    let named = options.pid.map(ProcessRef::Pid).or(options.process.clone());
    let named = named.filter(|_| directory.is_none());
    let attached = named.map(|named| discover::find(&named)).transpose()?;
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Error::new(ErrorKind::Usage, "`top` needs a terminal")
            .why("its input or output is a file or a pipe")
            .hint(match (attached, directory) {
                (Some(pid), _) => format!("nativeprof record --pid {pid} -d 10 -o out.html"),
                (None, Some(directory)) => format!("nativeprof report {} --last 10m", directory.display()),
                (None, None) => format!("nativeprof record -o out.html -- {}", quoted_words(&options.command)),
            }));
    }
    if let Some(directory) = directory {
        return history::top(directory, options);
    }
    check_rate(options.rate)?;
    options.sampling.check()?;
    if options.sampling.mode == Mode::Alloc {
        return Err(Error::new(ErrorKind::Usage, "`top` has no --mode alloc")
            .why("which blocks are live is known at the end of a recording")
            .hint("nativeprof attach PID --mode alloc -d 30, or nativeprof top PID --mode rss"));
    }
    let invoker = Invoker::switch_to(false, Caps::NONE, options.names.debuginfod)?;
    let target = match attached {
        Some(pid) => LiveTarget::Pid(pid),
        None => LiveTarget::Launch(options.command.clone(), Streams::None),
    };
    let prepared = PreparedTarget::new(target, &invoker, false)?;
    let live = LiveOptions {
        rate: options.rate,
        sampling: &options.sampling,
        tasks: &options.tasks,
        grouping: Grouping::default(),
        spans: false,
        tape: None,
        kept: Caps::NONE,
    };
    let mut live = LiveRecording::open(prepared, invoker, &live)?;
    live.start()?;
    let windows = match options.sampling.mode {
        Mode::Rss => MEMORY_WINDOWS,
        Mode::Cpu | Mode::OffCpu | Mode::Wall | Mode::Alloc => Windows::default(),
    };
    let mut feed = TopFeed {
        live,
        windows,
        since: 0,
    };
    let done = tui::run(&mut feed, options.frames.view(false));
    let recording = &mut feed.live.recording;
    recording.stop();
    done?;
    let q = recording.quality();
    print_line(&format!(
        "nativeprof: {} in {:.1} s, {} lost; stacks: {}",
        summary::counted(q.taken, "samples"),
        recording.elapsed().as_secs_f64(),
        q.lost,
        summary::stacks(&q)
    ));
    let remarks = recording.remarks();
    print_sampling(&remarks);
    let memory = Meta {
        memory: recording.memory_accounts(),
        ..Meta::default()
    };
    if let Some(lines) = summary::memory(&memory) {
        print_line(&lines);
    }
    print_exceeded(&remarks);
    Ok(())
}

/// A process that is being sampled.
struct TopFeed {
    live: LiveRecording,
    windows: Windows,
    /// Since when samples were shown the last time, on the samples' clock, ns.
    since: u64,
}

impl tui::SampleFeed for TopFeed {
    fn windows(&self) -> Windows {
        self.windows
    }

    fn poll(&mut self, wait: Duration) -> Result<bool> {
        let more = self.live.poll(wait, None)?;
        Ok(more || !self.live.has_exited())
    }

    fn last(&mut self, seconds: u64, until: u64, thread: Option<Tid>) -> Option<Profile> {
        let (profile, since) = self.live.recording.window(seconds, MAX_AGE, until, thread);
        self.since = since;
        Some(profile)
    }

    fn gil_holders(&mut self) -> Vec<Tid> {
        self.live.recording.gil_holders()
    }

    fn save(&mut self, profile: &Profile, path: &str) -> Result<String> {
        let mut profile = profile.clone();
        profile.meta.quality = quality_of_shown(&profile);
        profile.meta.lags.retain(|lag| lag.start >= self.since);
        for lag in &mut profile.meta.lags {
            lag.time = lag.start.saturating_sub(self.since);
        }
        save(&profile, path)
    }
}

/// Writes what is shown; returns a text with the path.
///
/// # Errors
/// `Usage` for standard output; those of [`Output`].
fn save(profile: &Profile, path: &str) -> Result<String> {
    if path == "-" {
        return Err(Error::new(ErrorKind::Usage, "`-` cannot be saved to")
            .why("standard output is the terminal that `top` uses")
            .hint("type a file name, such as out.html"));
    }
    Output::new(Some(Path::new(path)), None, "nativeprof-top")?.write(profile)
}

/// Quality of the samples in the profile, where its `meta` has that of all samples since the start. Which stacks were
/// repaired is not known, so if any was, all complete ones count as repaired.
fn quality_of_shown(profile: &Profile) -> Quality {
    let all = &profile.meta.quality;
    let mut truncated: Vec<bool> = Vec::with_capacity(profile.nodes.len());
    for node in &profile.nodes {
        let above = truncated.get(node.parent as usize).copied().unwrap_or(false);
        let here = profile.frames.get(node.frame as usize);
        truncated.push(above || here.is_some_and(|f| f.kind == FrameKind::Truncated));
    }
    let mut q = Quality {
        taken: profile.timeline.len() as u64,
        ..Quality::default()
    };
    for sample in &profile.timeline {
        q.partial += u64::from(truncated.get(sample.node as usize).copied().unwrap_or(false));
    }
    let complete = q.taken - q.partial;
    (q.exact, q.repaired) = if all.repaired == 0 {
        (complete, 0)
    } else {
        (0, complete)
    };
    if q.partial > 0 {
        q.reasons.insert("see the nodes [truncated: ...]".into(), q.partial);
    }
    q
}
