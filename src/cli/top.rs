//! `top`: samples a process and shows its last seconds.

use std::io::{self, IsTerminal};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use super::args::Top;
use super::output::Output;
use super::record::{Intake, TURN, check_rate, check_target, open_source, tell};
use super::{debuginfod, summary};
use crate::capture::Source;
use crate::error::{Error, Kind, Result};
use crate::process::credentials::{self, Caps};
use crate::process::host::Live;
use crate::process::{self, privilege, rights, sys, trace};
use crate::resolve::Names;
use crate::sample::{Pid, Tid};
use crate::session::{self, Grouping, Session};
use crate::tree::profile::{FrameKind, Meta, Profile, Quality};
use crate::tui;

/// Seconds of samples that are kept.
const KEPT: u64 = 60;

/// Shows the process until the user has seen enough.
///
/// # Errors
/// As `record`; an output that is no terminal.
pub fn top(options: &Top) -> Result<()> {
    let pid = options.whom.pid();
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Error::new(Kind::Usage, "`top` needs a terminal")
            .why("its input or output is a file or a pipe")
            .hint(format!("nativeprof record --pid {pid} -d 10 -o out.svg")));
    }
    check_rate(options.rate)?;
    let is_root = sys::effective_uid() == 0;
    let user = privilege::become_caller()?;
    let fetch = debuginfod::fetch(options.names.debuginfod, is_root, user.as_ref())?;
    check_target(pid)?;
    if let Some(lack) = rights::memory(pid) {
        return Err(lack.error(format!("sampling process {pid} is not permitted")));
    }
    trace::block_child_signals();
    privilege::for_setting_up(Caps::NONE)?;
    sys::raise_file_limit();
    sys::watch_interrupts();
    let sampling = &options.sampling;
    let mut source = open_source(sampling.backend, &sampling.capture(options.rate, false))?;
    let making = session::Options {
        grouping: Grouping::default(),
        native: !sampling.no_native,
        weighted: sampling.weighted(options.rate),
    };
    let mut session = Session::new(making, Box::new(Live));
    session.fetch = fetch;
    session.open(pid, &mut |pid, space| tell(&mut *source, pid, space))?;
    source.attach(pid)?;
    let (started, wall, began) = (Instant::now(), SystemTime::now(), sys::now());
    source.start()?;
    privilege::for_sampling(Caps::NONE)?;
    let mut feed = Sampled {
        pid,
        rate: options.rate,
        command: process::command_line(pid),
        watch: sys::pidfd_open(pid).ok(),
        source,
        session,
        names: Names::default(),
        started,
        wall,
        began,
        intake: Intake::default(),
    };
    let done = tui::run(&mut feed);
    feed.source.stop();
    done?;
    let q = feed.session.quality(&feed.source.counts(), feed.rate);
    eprintln!(
        "nativeprof: {} samples in {:.1} s, {} lost; stacks: {}",
        q.taken,
        started.elapsed().as_secs_f64(),
        q.lost,
        summary::stacks(&q)
    );
    Ok(())
}

/// A process that is being sampled.
struct Sampled {
    pid: Pid,
    rate: u64,
    command: String,
    /// Becomes readable when the process ends.
    watch: Option<OwnedFd>,
    source: Box<dyn Source>,
    session: Session,
    names: Names,
    started: Instant,
    wall: SystemTime,
    /// The same on the clock of samples.
    began: u64,
    intake: Intake,
}

impl tui::Feed for Sampled {
    fn take(&mut self, wait: Duration) -> Result<bool> {
        let wait = self.intake.wait(wait);
        let until = Instant::now() + wait + TURN;
        let more = self
            .intake
            .take(&mut *self.source, &mut self.session, None, wait, until)?;
        Ok(more || !self.watch.as_ref().is_some_and(sys::is_readable))
    }

    fn last(&mut self, seconds: u64, until: u64, thread: Option<Tid>) -> Profile {
        let before = |seconds: u64| until.saturating_sub(seconds * 1_000_000_000).max(self.began);
        let since = before(seconds);
        self.session.forget_before(before(KEPT));
        let counts = self.source.counts();
        let when = (self.wall, self.started.elapsed());
        let meta = Meta {
            command: self.command.clone(),
            ..self.session.meta(&*self.source, &counts, self.rate, self.pid, when)
        };
        self.session.open_for_names(self.pid);
        let (session, names) = (&mut self.session, &mut self.names);
        // Names come from foreign bytes: no right is in force while they are read.
        credentials::with_only(Caps::NONE, || session.window(names, since..until, thread, meta)).unwrap_or_default()
    }

    fn save(&mut self, profile: &Profile, path: &str) -> Result<String> {
        if path == "-" {
            return Err(Error::new(Kind::Usage, "standard output is this screen").why("type the name of a file"));
        }
        let output = Output::new(Some(Path::new(path)), None, "nativeprof-top")?;
        let mut profile = profile.clone();
        profile.meta.quality = quality_of_shown(&profile);
        output.write(&profile)
    }
}

/// How good the samples are that are in the profile, where its `meta` speaks of all that were ever taken. Claims no more
/// than is known: which stacks were repaired is not, so if any was, all whole ones count as such.
fn quality_of_shown(profile: &Profile) -> Quality {
    let all = &profile.meta.quality;
    let mut cut: Vec<bool> = Vec::with_capacity(profile.nodes.len());
    for node in &profile.nodes {
        let above = cut.get(node.parent as usize).copied().unwrap_or(false);
        let here = profile.frames.get(node.frame as usize);
        cut.push(above || here.is_some_and(|f| f.kind == FrameKind::Cut));
    }
    let mut q = Quality {
        taken: profile.timeline.len() as u64,
        ..Quality::default()
    };
    for tick in &profile.timeline {
        q.partial += u64::from(cut.get(tick.node as usize).copied().unwrap_or(false));
    }
    let whole = q.taken - q.partial;
    (q.exact, q.repaired) = if all.repaired == 0 { (whole, 0) } else { (0, whole) };
    if q.partial > 0 {
        q.reasons.insert("see the nodes [cut: ...]".into(), q.partial);
    }
    q
}
