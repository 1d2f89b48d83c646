//! `record` and `attach`: sample a process, then write the profile.

use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::time::{Duration, Instant, SystemTime};
use std::{slice, vec};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::args::{Backend, Common};
use super::debuginfod;
use super::look;
use super::output::Output;
use super::place::{PRIVATE, Place};
use super::summary;
use crate::capture::tape::record::{Recorded, Recorder};
use crate::capture::tape::{self, format};
use crate::capture::{self, Source, ebpf::EbpfSource, ptrace::PtraceSource};
use crate::error::{Error, Kind, Result};
use crate::export::escape;
use crate::interp;
use crate::process::credentials::{Caps, User};
use crate::process::host::{Host, Live};
use crate::process::launch::Launched;
use crate::process::{self, privilege, rights, sys, trace};
use crate::replay;
use crate::sample::{Event, Pid};
use crate::session::{self, Grouping, Session};
use crate::tree::profile::Meta;

/// Whom to sample.
pub enum Target {
    Pid(Pid),
    Launch(Vec<String>),
}

/// Longest time before the clock, the target and the signals are looked at again.
pub(super) const TURN: Duration = Duration::from_millis(100);

/// How long the samples that are waiting at the end may take; later ones count as lost.
const LEFT_OVER: Duration = Duration::from_millis(500);

/// Samples the target until it ends, the time is up or Ctrl-C, and writes the profile.
pub fn record(target: Target, options: &Common) -> Result<()> {
    check_rate(options.rate)?;
    if options.save_tape.is_some() && options.sampling.mode != capture::Mode::Cpu {
        return Err(Error::new(Kind::Usage, "a tape cannot hold off-CPU time")
            .hint("leave --save-tape out, or leave --mode out"));
    }
    let is_root = sys::effective_uid() == 0;
    let user = if options.as_root {
        None
    } else {
        privilege::become_caller()?
    };
    let fetch = debuginfod::fetch(options.names.debuginfod, is_root, user.as_ref())?;
    if let Target::Pid(pid) = target {
        check_target(pid)?;
        if let Some(lack) = rights::memory(pid) {
            return Err(lack.error(format!("sampling process {pid} is not permitted")));
        }
    }
    let mut launched = None;
    let pid = match &target {
        Target::Pid(pid) => *pid,
        Target::Launch(command) => launched.insert(Launched::prepare(command, user.as_ref())?).pid(),
    };
    // After the command was made, which must not inherit it; before there is another thread, which might take the signals
    // that a backend waits for.
    trace::block_child_signals();
    let (output, tape) = places(options, pid).map_err(|e| as_user(e, user.as_ref()))?;
    let kept = Caps(output.needs().0 | tape.as_ref().map_or(0, |place| place.needs().0));
    privilege::for_setting_up(kept)?;
    sys::raise_file_limit();
    sys::keep_freed_memory();
    sys::watch_interrupts();

    let sampling = &options.sampling;
    let capture = sampling.capture(options.rate, options.subprocesses);
    let mut source = open_source(sampling.backend, &capture)?;
    let grouping = Grouping {
        processes: options.subprocesses,
        threads: options.threads,
    };
    let making = session::Options {
        grouping,
        native: !sampling.no_native,
        weighted: sampling.weighted(options.rate),
    };
    let recorder = options.save_tape.as_ref().map(|_| Recorder::new(options.tape_samples));
    let host: Box<dyn Host> = match &recorder {
        Some(recorder) => Box::new(Recorded(recorder.clone())),
        None => Box::new(Live),
    };
    let mut session = Session::new(making, host);
    session.fetch = fetch;
    let command = match &target {
        Target::Pid(pid) => process::command_line(*pid),
        Target::Launch(command) => command.join(" "),
    };
    let watch = sys::pidfd_open(pid).ok();
    match &mut launched {
        Some(launched) => {
            // The mappings of the new program come as events; until then it is still us.
            session.expect(pid);
            source.learn(pid, &Default::default())?;
            source.attach_at_exec(pid)?;
            launched.release()?;
        }
        None => {
            session.open(pid, &mut |pid, space| tell(&mut *source, pid, space))?;
            source.attach(pid)?;
            if options.subprocesses {
                attach_family(&mut *source, &mut session, pid)?;
            } else if session.pythons.is_empty()
                && let Some(line) = look::offer(pid)
            {
                super::say(&line);
            }
        }
    }
    let (began, began_wall, start) = (sys::now(), SystemTime::now(), Instant::now());
    source.start()?;
    privilege::for_sampling(kept)?;
    eprintln!(
        "nativeprof: sampling {} at {} Hz ({})",
        look::numbers(pid),
        options.rate,
        source.name()
    );

    let end = options.duration.map(Duration::from_secs_f64);
    let progress = progress();
    let (mut ended, mut intake) = (false, Intake::default());
    while !ended && !sys::interrupted() && end.is_none_or(|end| start.elapsed() < end) {
        let wait = end.map_or(TURN, |end| end.saturating_sub(start.elapsed()).min(TURN));
        ended = watch.as_ref().is_some_and(sys::is_readable);
        let wait = intake.wait(wait);
        let turn = Instant::now() + wait + TURN;
        let until = end.map_or(turn, |end| turn.min(start + end));
        intake.take(&mut *source, &mut session, recorder.as_deref(), wait, until)?;
        if !progress.is_hidden() {
            progress.set_message(progress_text(&session, start.elapsed()));
            progress.tick();
        }
    }
    source.stop();
    let duration = start.elapsed();
    let until = Instant::now() + LEFT_OVER;
    while intake.take(&mut *source, &mut session, recorder.as_deref(), Duration::ZERO, until)? && Instant::now() < until
    {
    }
    session.add_open_intervals(&mut *source)?;
    let left = intake.leave(&mut *source)?;
    progress.finish_and_clear();

    let mut counts = source.counts();
    counts.lost += left;
    let meta = Meta {
        command,
        ..session.meta(&*source, &counts, options.rate, pid, (began_wall, duration))
    };
    session.open_for_names(pid);
    drop(source); // its descriptors are rights too
    privilege::for_naming(kept)?;
    let mut profile = session.resolve(began, meta);
    profile.meta.own_cpu = sys::own_cpu() as f64 * 1e-9;
    let written = output.write(&profile)?;
    eprintln!("{}", summary::block(&profile.meta, &written));
    if let Some(line) = summary::thread_states(&profile) {
        eprintln!("{line}");
    }
    if let (Some(recorder), Some(place)) = (recorder, &tape) {
        save_tape(&recorder, place, &profile.meta, began, launched.is_none())?;
    }
    if let Some(launched) = launched {
        sys::leave_interrupts();
        if !ended {
            eprintln!("nativeprof: the command goes on; waiting for its end (Ctrl-C to wait no longer)");
        }
        if let Some(line) = launched.wait()? {
            super::say(&line);
        }
    }
    Ok(())
}

pub(super) fn open_source(backend: Backend, options: &capture::Options) -> Result<Box<dyn Source>> {
    let ptrace = || -> Result<Box<dyn Source>> {
        let source = PtraceSource::new(options, interp::walk::walk)?;
        if options.kernel {
            eprintln!("nativeprof: ptrace sees no kernel frames: they are left out");
        }
        Ok(Box::new(source))
    };
    let off_cpu = options.mode != capture::Mode::Cpu;
    match backend {
        Backend::Ptrace if off_cpu => Err(Error::new(
            Kind::Unsupported,
            "off-CPU time cannot be sampled with the ptrace backend",
        )
        .why("ptrace sees threads only while they run")
        .hint("leave --backend out, or leave --mode out to sample CPU time")),
        Backend::Auto if off_cpu => Ok(Box::new(EbpfSource::new(options)?)),
        Backend::Ptrace => ptrace(),
        Backend::Ebpf => Ok(Box::new(EbpfSource::new(options)?)),
        Backend::Auto => match EbpfSource::new(options) {
            Ok(source) => Ok(Box::new(source)),
            Err(e) => {
                // If that cannot do it either, what the better one lacks is the thing to know.
                let source = ptrace().map_err(|_| e.clone())?;
                eprintln!(
                    "nativeprof: {}: using ptrace, which holds one thread at a time for tens of us",
                    why_not(&e)
                );
                Ok(source)
            }
        },
    }
}

/// Why there is no eBPF, in half a line.
fn why_not(e: &Error) -> String {
    let why = e.why.lines().next().unwrap_or(&e.what);
    match e.kind {
        Kind::NotPermitted => format!("eBPF is not permitted here ({why})"),
        _ => format!("eBPF cannot be used here ({why})"),
    }
}

/// Where profile and tape go.
fn places(options: &Common, pid: Pid) -> Result<(Output, Option<Place>)> {
    let output = Output::new(
        options.output.as_deref(),
        options.format.as_deref(),
        &format!("nativeprof-{pid}"),
    )?
    .shown(&options.shown)?;
    let tape = options.save_tape.as_ref().map(|path| Place::new(path, PRIVATE));
    Ok((output, tape.transpose()?))
}

/// Says whose rights did not suffice, where one may have meant root's.
fn as_user(mut e: Error, user: Option<&User>) -> Error {
    if let (Kind::NotPermitted, Some(user)) = (e.kind, user) {
        e.why = format!("{} (files are written as {}, who called for root)", e.why, user.name);
        e.hint += ", or stay root with --as-root";
    }
    e
}

/// Writes what the recorder kept.
fn save_tape(recorder: &Recorder, place: &Place, meta: &Meta, began: u64, attached: bool) -> Result<()> {
    let head = tape::Head {
        pid: meta.pid,
        attached,
        rate: meta.rate,
        clock: meta.event.clone(),
        backend: meta.backend.clone(),
        began,
        start: meta.start,
        duration: meta.duration,
        command: meta.command.clone(),
    };
    let (tape, same) = replay::finish(recorder.finish(head))?;
    let (bytes, name) = (format::write(&tape), place.path().display().to_string());
    place
        .write(&|out| out.write_all(&bytes))
        .map_err(|e| Error::io(format!("cannot write the tape {name}"), e).hint("choose another place"))?;
    let counts = tape::TapeSource::new(tape.into()).counts();
    eprintln!(
        "  tape:     {} ({} samples, {} KB)",
        escape::line(&name),
        counts.delivered,
        bytes.len().div_ceil(1000)
    );
    eprintln!("            it holds the raw stacks of these samples: mind what your program keeps there");
    if !same {
        eprintln!("            its replay differs from this recording: parts of a file that it needs are missing");
    }
    Ok(())
}

/// Takes in the children that a process has already, and theirs. Those that are forked from now on come as events.
fn attach_family(source: &mut dyn Source, session: &mut Session, pid: Pid) -> Result<()> {
    let mut known = BTreeSet::from([pid]);
    loop {
        let before = known.len();
        for child in look::descendants(pid) {
            if !known.insert(child) {
                continue;
            }
            let opened = session.open(child, &mut |pid, space| tell(source, pid, space));
            match opened.and_then(|()| source.attach(child)) {
                Err(e) if e.kind == Kind::NotPermitted => super::say(&format!("{}: {}; it is left out", e.what, e.why)),
                Err(e) if e.kind != Kind::NoSuchProcess => return Err(e),
                _ => {}
            }
        }
        if known.len() == before {
            return Ok(());
        }
    }
}

pub(super) fn tell(source: &mut dyn Source, pid: Pid, space: Option<&crate::layout::Space>) -> Result<()> {
    match space {
        Some(space) => source.learn(pid, space),
        None => {
            source.forget(pid);
            Ok(())
        }
    }
}

/// Events on their way from a source to a session.
#[derive(Default)]
pub(super) struct Intake {
    /// Heard, not yet taken in.
    waiting: vec::IntoIter<Event>,
    more: bool,
}

impl Intake {
    /// How long to wait for more, where `most` is the longest: not at all while something is waiting.
    pub(super) fn wait(&self, most: Duration) -> Duration {
        if self.is_waiting() { Duration::ZERO } else { most }
    }

    fn is_waiting(&self) -> bool {
        self.more || self.waiting.len() > 0
    }

    /// Moves some of what is there to the session; true if there is more. Not much longer than `until`: a target can
    /// make each sample slow to read.
    pub(super) fn take(
        &mut self,
        source: &mut dyn Source,
        session: &mut Session,
        recorder: Option<&Recorder>,
        wait: Duration,
        until: Instant,
    ) -> Result<bool> {
        let in_time = || Instant::now() < until;
        if self.waiting.len() == 0 {
            let mut events = Vec::new();
            self.more = source.poll(wait, &mut events)?;
            session.open_files(&events);
            for event in events.iter().take_while(|_| in_time()) {
                session.see_codes(slice::from_ref(event));
            }
            self.waiting = events.into_iter();
        }
        for event in self.waiting.by_ref() {
            if let Some(recorder) = recorder {
                recorder.event(&event);
            }
            session.event(event, &mut |pid, space| tell(source, pid, space))?;
            if !in_time() {
                break;
            }
        }
        Ok(self.is_waiting())
    }

    /// Lets go what is still waiting; the samples among it.
    fn leave(mut self, source: &mut dyn Source) -> Result<u64> {
        let samples =
            |events: &mut dyn Iterator<Item = Event>| events.filter(|e| matches!(e, Event::Sample(_))).count();
        let (mut events, mut left, mut more) = (Vec::new(), samples(&mut self.waiting), true);
        while more {
            more = source.poll(Duration::ZERO, &mut events)?;
            left += samples(&mut events.drain(..));
        }
        Ok(left as u64)
    }
}

fn progress() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(4));
    bar.set_style(ProgressStyle::with_template("{spinner} {msg}").expect("a fixed template"));
    bar
}

fn progress_text(session: &Session, elapsed: Duration) -> String {
    let t = &session.tally;
    let seconds = elapsed.as_secs_f64();
    format!(
        "{seconds:5.1} s   {} samples   {:.0}/s   exact {}   Ctrl-C ends",
        t.taken(),
        t.taken() as f64 / seconds.max(0.1),
        summary::percent(t.exact, t.taken())
    )
}

pub(super) fn check_rate(rate: u64) -> Result<()> {
    const LIMIT: &str = "/proc/sys/kernel/perf_event_max_sample_rate";
    let limit = std::fs::read_to_string(LIMIT)
        .ok()
        .and_then(|t| t.trim().parse::<u64>().ok())
        .unwrap_or(u64::MAX);
    if rate <= limit {
        return Ok(());
    }
    Err(
        Error::new(Kind::Usage, format!("a rate of {rate} Hz is above this kernel's limit"))
            .why(format!("kernel.perf_event_max_sample_rate is {limit}"))
            .hint(format!("-r {}", limit.min(1000))),
    )
}

/// Refuses what cannot be sampled before anything is set up.
pub(super) fn check_target(pid: Pid) -> Result<()> {
    if process::threads(pid).is_empty() {
        return Err(Error::new(Kind::NoSuchProcess, format!("no process {pid}"))
            .why("no process has this id now")
            .hint("pgrep -af python   lists the ids of Python processes"));
    }
    let state = process::stat_state(pid);
    if state == Some('Z') {
        return Err(Error::new(Kind::NoSuchProcess, format!("process {pid} has ended"))
            .why("only its exit status is left (a zombie)")
            .hint("choose a running process"));
    }
    if process::is_of_kernel(pid) {
        return Err(
            Error::new(Kind::Unsupported, format!("{pid} is a thread of the kernel"))
                .why("it has no memory of its own, and no stack but the kernel's")
                .hint("choose a process, and --kernel to see what the kernel does for it"),
        );
    }
    if process::elf_class(pid) == Some(1) {
        return Err(
            Error::new(Kind::Unsupported, format!("process {pid} is a 32-bit program"))
                .why("only 64-bit programs can be unwound")
                .hint("choose a 64-bit process"),
        );
    }
    Ok(())
}
