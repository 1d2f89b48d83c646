//! `top`: shows the hottest functions of a process, live.

use std::io::{self, IsTerminal};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use crate::capture::Backend;
use crate::cli::args::{ProcessRef, Top};
use crate::cli::backend::{check_rate, open_backend, start_command};
use crate::cli::debuginfod;
use crate::cli::discover::{self, check_target};
use crate::cli::output::Output;
use crate::cli::print_line;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Pid, Tid};
use crate::privileges::credentials;
use crate::privileges::credentials::Caps;
use crate::privileges::{checks, phases};
use crate::process::launch::Launched;
use crate::process::system::LiveSystem;
use crate::profile::model::{FrameKind, Meta, Profile, Quality};
use crate::profile::summary;
use crate::resolve::naming::NamingProcess;
use crate::session::pump::{EventPump, update_backend};
use crate::session::{self, Session};
use crate::sys;
use crate::sys::procfs;
use crate::sys::ptrace;
use crate::tui;

/// Longest time that samples are processed before keys and the target are checked again.
const MAX_PUMP_TIME: Duration = Duration::from_millis(100);
/// Age from which samples are forgotten, s.
const MAX_AGE: u64 = 60;

/// Shows the process until the user quits.
///
/// # Errors
/// As `record`; `Usage` if the output is not a terminal.
pub fn top(options: &Top) -> Result<()> {
    let named = options.pid.map(ProcessRef::Pid).or(options.process.clone());
    let attached = named.map(|named| discover::find(&named)).transpose()?;
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Error::new(ErrorKind::Usage, "`top` needs a terminal")
            .why("its input or output is a file or a pipe")
            .hint(match attached {
                Some(pid) => format!("nativeprof record --pid {pid} -d 10 -o out.html"),
                None => format!("nativeprof record -o out.html -- {}", options.command.join(" ")),
            }));
    }
    check_rate(options.rate)?;
    options.sampling.check()?;
    let is_root = sys::process::effective_uid() == 0;
    let user = phases::switch_to_invoking_user()?;
    let fetch = debuginfod::fetch(options.names.debuginfod, is_root, user.as_ref())?;
    if let Some(pid) = attached {
        check_target(pid)?;
        if let Some(missing) = checks::memory(pid) {
            return Err(missing.error(format!("sampling process {pid} is not permitted")));
        }
    }
    let mut launched = None;
    let pid = match attached {
        Some(pid) => pid,
        None => launched
            .insert(Launched::prepare_detached(&options.command, user.as_ref())?)
            .pid(),
    };
    ptrace::block_child_signals();
    phases::restrict_to_setup(Caps::NONE)?;
    sys::files::raise_file_limit();
    if let Some(launched) = &launched {
        launched.pass_on_signals();
    }
    sys::interrupts::install_interrupt_handler();
    let sampling = &options.sampling;
    let mut backend = open_backend(sampling.backend, &sampling.capture(options.rate, false))?;
    let session_options = session::SessionOptions {
        native: !sampling.no_native,
        tasks: options.tasks.shows_tasks(),
        lag: options.tasks.lag,
        weighted: sampling.weighted(options.rate),
        gil_only: sampling.gil,
        workers: sampling.attribute_workers,
        ..Default::default()
    };
    let mut session = Session::new(session_options, Box::new(LiveSystem));
    session.naming.fetch = fetch;
    session.naming.process = Some(NamingProcess::default());
    if sampling.wakers {
        session.show_wakers(sampling.kernel);
    }
    let watch = sys::process::ExitWatch::new(pid);
    let mut command = options.command.join(" ");
    match &mut launched {
        Some(launched) => start_command(launched, &mut *backend, &mut session)?,
        None => {
            command = procfs::command_line(pid);
            session.open(pid, &mut |pid, layout| update_backend(&mut *backend, pid, layout))?;
            backend.attach(pid)?;
        }
    }
    let (started, wall, began) = (Instant::now(), SystemTime::now(), sys::clock::now());
    backend.start()?;
    phases::restrict_to_sampling(Caps::NONE)?;
    let mut feed = TopFeed {
        pid,
        rate: options.rate,
        command,
        watch,
        backend,
        session,
        started,
        wall,
        began,
        since: began,
        pump: EventPump::default(),
    };
    let done = tui::run(&mut feed, options.frames.view(false));
    feed.backend.stop();
    done?;
    let q = feed.session.quality(&feed.backend.counts(), feed.rate);
    print_line(&format!(
        "nativeprof: {} in {:.1} s, {} lost; stacks: {}",
        summary::counted(q.taken, "samples"),
        started.elapsed().as_secs_f64(),
        q.lost,
        summary::stacks(&q)
    ));
    Ok(())
}

/// A process that is being sampled.
struct TopFeed {
    pid: Pid,
    rate: u64,
    command: String,
    /// Becomes readable when the process ends.
    watch: sys::process::ExitWatch,
    backend: Box<dyn Backend>,
    session: Session,
    started: Instant,
    wall: SystemTime,
    /// The same on the clock of samples, and since when samples were shown the last time.
    began: u64,
    since: u64,
    pump: EventPump,
}

impl tui::SampleFeed for TopFeed {
    fn poll(&mut self, wait: Duration) -> Result<bool> {
        let wait = self.pump.wait(wait);
        let until = Some(Instant::now() + wait + MAX_PUMP_TIME);
        let more = (self.pump).pump(&mut *self.backend, &mut self.session, &mut |_| {}, wait, until)?;
        Ok(more || !self.watch.has_exited())
    }

    fn last(&mut self, seconds: u64, until: u64, thread: Option<Tid>) -> Profile {
        let before = |seconds: u64| until.saturating_sub(seconds * 1_000_000_000).max(self.began);
        let since = before(seconds);
        self.session.forget_before(before(MAX_AGE));
        let counts = self.backend.counts();
        let when = (self.wall, self.started.elapsed());
        let meta = Meta {
            command: self.command.clone(),
            ..self.session.meta(&*self.backend, &counts, self.rate, self.pid, when)
        };
        self.session.open_symbol_sources(self.pid);
        let session = &mut self.session;
        // Symbol files are not trusted: no capability is effective while they are parsed.
        let mut profile =
            credentials::with_only(Caps::NONE, || session.window(since..until, thread, meta)).unwrap_or_default();
        self.since = since;
        for lag in &mut profile.meta.lags {
            lag.time = lag.start.saturating_sub(self.began);
        }
        profile
    }

    fn gil_holders(&mut self) -> Vec<Tid> {
        self.session.gil_holders(self.pid)
    }

    fn save(&mut self, profile: &Profile, path: &str) -> Result<String> {
        if path == "-" {
            return Err(Error::new(ErrorKind::Usage, "`-` cannot be saved to")
                .why("standard output is the terminal that `top` uses")
                .hint("type a file name, such as out.html"));
        }
        let output = Output::new(Some(Path::new(path)), None, "nativeprof-top")?;
        let mut profile = profile.clone();
        profile.meta.quality = quality_of_shown(&profile);
        profile.meta.lags.retain(|lag| lag.start >= self.since);
        for lag in &mut profile.meta.lags {
            lag.time = lag.start.saturating_sub(self.since);
        }
        output.write(&profile)
    }
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
