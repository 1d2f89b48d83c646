//! `record` and `attach`: sample a process, then write the profile.

use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::capture::{self, Backend, SamplingOptions};
use crate::cli::args::RecordArgs;
use crate::cli::backend::{check_rate, open_backend, start_command};
use crate::cli::debuginfod;
use crate::cli::discover::{self, check_target};
use crate::cli::output::Output;
use crate::cli::output::atomic_file::{OutputFile, PRIVATE};
use crate::cli::{FAILED, print_error, print_line, print_status};
use crate::edges::EdgeJudge;
use crate::error::{Error, ErrorKind, Result};
use crate::escape;
use crate::event::{Event, Pid};
use crate::privileges::credentials::{Caps, User};
use crate::privileges::{checks, phases};
use crate::process::launch::Launched;
use crate::process::system::{LiveSystem, System};
use crate::profile::model::Meta;
use crate::profile::summary;
use crate::resolve::naming::NamingProcess;
use crate::session::pump::{EventPump, update_backend};
use crate::session::{self, Grouping, Session};
use crate::sys;
use crate::sys::procfs;
use crate::sys::ptrace;
use crate::tape;
use crate::tape::encode;
use crate::tape::recorder::{RecordingSystem, TapeRecorder};
use crate::tape_replay;

/// What to sample.
pub enum RecordTarget {
    Pid(Pid),
    Launch(Vec<String>),
}

/// Longest time before the clock, the target and signals are checked again.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The same with --tasks: the task of a sample may be gone soon.
const TASK_POLL: Duration = Duration::from_millis(5);

/// Maximum number of times that a tree of processes is read before sampling starts.
const MAX_SCANS: usize = 16;

/// Time allowed for samples that are still waiting at the end; the rest count as lost. Many threads on a busy machine leave a
/// backlog that takes far less; a target that makes each sample slow to read must not keep nativeprof for long.
const DRAIN_TIME: Duration = Duration::from_secs(5);

/// Samples the target until it exits, the duration is over or Ctrl-C, and writes the profile. The exit code is that of
/// a launched command, 128 plus the number of the signal that killed it, else 0.
pub fn record(target: RecordTarget, options: &RecordArgs) -> Result<u8> {
    check_rate(options.rate)?;
    if options.save_tape.is_some() {
        let (what, option) = match (options.sampling.mode, options.sampling.gil) {
            _ if options.spans => ("spans", "--spans"),
            _ if options.sampling.attribute_workers => ("what native workers work for", "--attribute-workers"),
            (capture::Mode::Cpu, false) => ("", ""),
            (capture::Mode::Cpu, true) => ("who holds the GIL", "--gil"),
            _ => ("off-CPU time", "--mode"),
        };
        if !what.is_empty() {
            return Err(Error::new(ErrorKind::Usage, format!("a tape cannot record {what}"))
                .why("tapes hold stacks of CPU time samples only")
                .hint(format!("omit --save-tape or {option}")));
        }
        if options.save_tape.as_deref() == Some(Path::new("-")) {
            return Err(
                Error::new(ErrorKind::Usage, "a tape cannot be written to standard output")
                    .why("--save-tape needs the name of a file")
                    .hint("--save-tape out.tape"),
            );
        }
        if options.save_tape == options.output {
            return Err(
                Error::new(ErrorKind::Usage, "profile and tape cannot have the same file name")
                    .why("the tape would replace the profile")
                    .hint("choose another file with --save-tape FILE"),
            );
        }
    }
    options.sampling.check()?;
    if options.shown.idle && options.sampling.mode == capture::Mode::Cpu {
        return Err(Error::new(ErrorKind::Usage, "--idle needs off-CPU time")
            .why("by default only CPU time is sampled, and idle threads use none")
            .hint("--mode wall --idle, or omit --idle"));
    }
    let is_root = sys::process::effective_uid() == 0;
    let user = if options.as_root {
        None
    } else {
        phases::switch_to_invoking_user()?
    };
    let fetch = debuginfod::fetch(options.names.debuginfod, is_root, user.as_ref())?;
    if let RecordTarget::Pid(pid) = target {
        check_target(pid)?;
        // With --subprocesses others may be readable.
        if let Some(missing) = checks::memory(pid).filter(|_| !options.subprocesses) {
            return Err(missing.error(format!("sampling process {pid} is not permitted")));
        }
    }
    let mut launched = None;
    let pid = match &target {
        RecordTarget::Pid(pid) => *pid,
        RecordTarget::Launch(command) => launched.insert(Launched::prepare(command, user.as_ref())?).pid(),
    };
    // After the command was forked, which must not inherit the mask; before other threads exist, which might receive
    // the signals that a backend waits for.
    ptrace::block_child_signals();
    let (output, tape) = output_files(options, pid).map_err(|e| explain_user(e, user.as_ref()))?;
    let kept = Caps(output.needs().0 | tape.as_ref().map_or(0, |place| place.needs().0));
    phases::restrict_to_setup(kept)?;
    sys::files::raise_file_limit();
    sys::memory::keep_freed_memory();
    if let Some(launched) = &launched {
        launched.pass_on_signals();
    }
    sys::interrupts::install_interrupt_handler();

    let sampling = &options.sampling;
    let capture = SamplingOptions {
        spans: options.spans,
        ..sampling.capture(options.rate, options.subprocesses)
    };
    let mut backend = open_backend(sampling.backend, &capture)?;
    let grouping = Grouping {
        processes: options.subprocesses,
        threads: options.threads,
    };
    let session_options = session::SessionOptions {
        grouping,
        native: !sampling.no_native,
        tasks: options.tasks.shows_tasks(),
        weighted: sampling.weighted(options.rate),
        gil_only: sampling.gil,
        lag: options.tasks.lag,
        workers: sampling.attribute_workers,
        spans: options.spans,
        thread_context: options.spans,
    };
    let recorder = options
        .save_tape
        .as_ref()
        .map(|_| TapeRecorder::new(options.tape_samples));
    let system: Box<dyn System> = match &recorder {
        Some(recorder) => Box::new(RecordingSystem(recorder.clone())),
        None => Box::new(LiveSystem),
    };
    let mut session = Session::new(session_options, system);
    session.naming.fetch = fetch;
    session.naming.process = Some(NamingProcess::default());
    // What it reads of the process gets onto the tape.
    session.stacks.edges = recorder.as_ref().map(|_| EdgeJudge::default());
    if sampling.wakers {
        session.show_wakers(sampling.kernel);
    }
    let command = match &target {
        RecordTarget::Pid(pid) => procfs::command_line(*pid),
        RecordTarget::Launch(command) => command.join(" "),
    };
    let watch = sys::process::ExitWatch::new(pid);
    match &mut launched {
        Some(launched) => start_command(launched, &mut *backend, &mut session)?,
        None if options.subprocesses => attach_family(&mut *backend, &mut session, pid)?,
        None => {
            session.open(pid, &mut |pid, layout| update_backend(&mut *backend, pid, layout))?;
            backend.attach(pid)?;
            if !session.has_python()
                && let Some(line) = discover::suggest_python_child(pid)
            {
                print_status(&line);
            }
        }
    }
    let family = discover::FamilyCpu::start(pid);
    let (began, began_wall, start) = (sys::clock::now(), SystemTime::now(), Instant::now());
    let startup_cpu = sys::clock::process_cpu_time();
    let started = backend.start().and_then(|()| phases::restrict_to_sampling(kept));
    if let Err(e) = started {
        return finish(launched, false, Err(e));
    }
    print_line(&format!(
        "nativeprof: sampling {} at {} Hz ({})",
        discover::pid_label(pid),
        options.rate,
        backend.name()
    ));

    let end = options.duration.map(Duration::from_secs_f64);
    let progress = progress();
    let (mut ended, mut pump) = (false, EventPump::default());
    let poll = if options.tasks.shows_tasks() {
        TASK_POLL
    } else {
        POLL_INTERVAL
    };
    let mut observe = |event: &Event| {
        if let Some(recorder) = &recorder {
            recorder.event(event);
        }
    };
    // What ends the recording early; what was sampled until then is written.
    let mut failure = None;
    while !ended && failure.is_none() && !sys::interrupts::interrupted() && end.is_none_or(|end| start.elapsed() < end)
    {
        let wait = end.map_or(poll, |end| end.saturating_sub(start.elapsed()).min(poll));
        ended = watch.has_exited();
        let wait = pump.wait(wait);
        let turn = Instant::now() + wait + POLL_INTERVAL;
        let until = Some(end.map_or(turn, |end| turn.min(start + end)));
        failure = pump.pump(&mut *backend, &mut session, &mut observe, wait, until).err();
        if recorder.as_ref().is_some_and(|recorder| recorder.is_full()) {
            session.stacks.edges = None;
        }
        if !progress.is_hidden() {
            progress.set_message(progress_text(&session, start.elapsed()));
            progress.tick();
        }
    }
    // Before the time that stopping takes: it reads all threads that wait.
    let duration = start.elapsed();
    backend.stop();
    if let Some(naming) = &mut session.naming.process {
        naming.prepare();
    }
    let children = if options.subprocesses {
        Duration::ZERO
    } else {
        family.used()
    };
    let until = Instant::now() + DRAIN_TIME;
    let mut drain = |session: &mut Session, backend: &mut dyn Backend| -> Result<()> {
        while pump.pump(backend, session, &mut observe, Duration::ZERO, Some(until))? && Instant::now() < until {}
        Ok(())
    };
    failure = failure.or(drain(&mut session, &mut *backend).err());
    failure = failure.or(session.add_open_intervals(&mut *backend).err());
    // Threads that have got a CPU meanwhile have handed in the samples of their last waits.
    failure = failure.or(drain(&mut session, &mut *backend).err());
    let discarded = pump.discard(&mut *backend);
    let left = *discarded.as_ref().unwrap_or(&0);
    failure = failure.or(discarded.err());
    progress.finish_and_clear();
    let sampling_cpu = sys::clock::process_cpu_time().saturating_sub(startup_cpu);

    let exceeded = backend.exceeded_limits();
    let mut counts = backend.counts();
    counts.lost += left;
    let meta = Meta {
        command,
        ..session.meta(&*backend, &counts, options.rate, pid, (began_wall, duration))
    };
    session.update_thread_names();
    session.open_symbol_sources(pid);
    let timer_remark = backend.timer_remark();
    drop(backend); // its descriptors are privileges too
    if let Err(e) = phases::drop_for_symbolization(kept) {
        return finish(launched, ended, Err(e));
    }
    let mut profile = session.resolve(began, meta);
    profile.meta.sampling_cpu = sampling_cpu as f64 * 1e-9;
    let naming_cpu = session.naming.process.take().map_or(0, |naming| naming.cpu_time());
    profile.meta.profiler_cpu = (sys::clock::process_cpu_time() + naming_cpu) as f64 * 1e-9;
    let written = match output.write(&profile) {
        Ok(written) => written,
        Err(e) => return finish(launched, ended, Err(e)),
    };
    print_line(&summary::block(&profile.meta, &written));
    if let Some(remark) = timer_remark {
        print_line(&format!("  timer:    {remark}"));
    }
    let is_cpu_time = sampling.mode == capture::Mode::Cpu;
    let advice = is_cpu_time.then(|| summary::advice(&profile.meta, children)).flatten();
    if let Some(line) = advice.or_else(|| summary::thread_states(&profile)) {
        print_line(&line);
    }
    for limit in exceeded {
        print_line(&format!("  limit:    {limit}"));
    }
    if let Some(line) = summary::cut_names(&profile) {
        print_line(&line);
    }
    if let Some(counts) = session.task_counts() {
        print_line(&summary::tasks(counts.with, counts.without));
    }
    if let Some(counts) = session.gil_counts() {
        let left_out = counts.not_holding + counts.unknown;
        print_line(&summary::gil(
            counts.holding,
            left_out,
            counts.unknown,
            &profile.meta.python,
        ));
    }
    if let Some(threshold) = options.tasks.lag {
        print_line(&summary::lags(&profile.meta.lags, threshold));
    }
    output.browse(true);
    let mut done = match (recorder, &tape) {
        (Some(recorder), Some(place)) => save_tape(&recorder, place, &profile.meta, began, launched.is_none()),
        _ => Ok(()),
    };
    if let Some(e) = failure {
        done = Err(Error {
            what: format!("the recording ended early: {}", e.what),
            ..e
        });
    }
    if launched.is_none() {
        done = done.and_then(|()| output.check_written());
    }
    finish(launched, ended, done)
}

/// Waits for the command, if there is one that has not ended. The exit code is that of the command, or [`FAILED`] if the
/// recording failed, which is then reported before the wait.
fn finish(launched: Option<Launched>, ended: bool, done: Result<()>) -> Result<u8> {
    let Some(launched) = launched else {
        return done.map(|()| 0);
    };
    if let Err(e) = &done {
        print_error(e);
    }
    sys::interrupts::wait_for_command();
    if !ended {
        print_line("nativeprof: waiting for the command to exit (Ctrl-C to stop waiting)");
    }
    let (code, line) = launched.wait()?;
    if let Some(line) = line {
        print_status(&line);
    }
    Ok(if done.is_ok() { code } else { FAILED })
}

/// Checks the output files of profile and tape.
fn output_files(options: &RecordArgs, pid: Pid) -> Result<(Output, Option<OutputFile>)> {
    let output = Output::new(
        options.output.as_deref(),
        options.format.as_deref(),
        &format!("nativeprof-{pid}"),
    )?
    .shown(&options.shown, false)?;
    let tape = options.save_tape.as_ref().map(|path| {
        OutputFile::new(path, PRIVATE).map_err(|e| Error {
            hint: "choose another file with --save-tape FILE".into(),
            ..e
        })
    });
    Ok((output, tape.transpose()?))
}

/// Adds to a refusal which user writes the files, since that is not root under sudo.
fn explain_user(mut e: Error, user: Option<&User>) -> Error {
    if let (ErrorKind::NotPermitted, Some(user)) = (e.kind, user) {
        e.why = format!("{} (files are written as {}, the user who ran sudo)", e.why, user.name);
        e.hint += ", or write as root with --as-root";
    }
    e
}

/// Writes the tape.
fn save_tape(recorder: &TapeRecorder, output: &OutputFile, meta: &Meta, began: u64, attached: bool) -> Result<()> {
    let header = tape::TapeHeader {
        pid: meta.pid,
        attached,
        rate: meta.rate,
        event: meta.event.clone(),
        backend: meta.backend.clone(),
        began,
        start: meta.start,
        duration: meta.duration,
        command: meta.command.clone(),
    };
    let (tape, same) = tape_replay::finish(recorder.finish(header))?;
    let (bytes, name) = (encode::write(&tape), output.path().display().to_string());
    output.write(&|out| out.write_all(&bytes)).map_err(|e| {
        Error::io(format!("cannot write the tape {name}"), e).hint("choose another file with --save-tape FILE")
    })?;
    let counts = tape::TapeBackend::new(tape.into()).counts();
    print_line(&format!(
        "  tape:     {} ({}, {} KB)",
        escape::line(&name),
        summary::counted(counts.delivered, "samples"),
        bytes.len().div_ceil(1000)
    ));
    print_line("            the tape contains raw stack memory; it may include secrets");
    if !same {
        print_line(
            "            its replay differs from this recording: parts of a mapped file are missing; with a bug report, send the profile too",
        );
    }
    Ok(())
}

/// Attaches to a process and its existing descendants. Later forks come as events. One message counts those that cannot
/// be sampled.
///
/// # Errors
/// If none can be sampled, that of the process itself.
fn attach_family(backend: &mut dyn Backend, session: &mut Session, pid: Pid) -> Result<()> {
    let (mut known, mut refused, mut is_attached) = (BTreeSet::new(), Vec::new(), false);
    // Those that appear meanwhile; their parents pass on forks from then on.
    for _ in 0..MAX_SCANS {
        let before = known.len();
        for process in std::iter::once(pid).chain(discover::descendants(pid)) {
            if !known.insert(process) {
                continue;
            }
            let opened = session.open(process, &mut |pid, layout| update_backend(backend, pid, layout));
            match opened.and_then(|()| backend.attach(process)) {
                Ok(()) => is_attached = true,
                Err(e) if e.kind == ErrorKind::NoSuchProcess && process != pid => {}
                Err(e) => refused.push((process, e)),
            }
        }
        if known.len() == before {
            break;
        }
    }
    let Some((first, e)) = refused.first() else {
        return Ok(());
    };
    if !is_attached {
        return Err(e.clone());
    }
    let which = match refused.len() {
        1 => format!("process {first} is"),
        n => format!("{n} processes, the first of which is {first}, are"),
    };
    print_status(&format!("{which} not sampled: {} ({})", e.what, e.why));
    Ok(())
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
    let t = &session.segment.quality;
    let seconds = elapsed.as_secs_f64();
    format!(
        "{seconds:5.1} s   {}   {:.0}/s   exact {}   Ctrl-C stops",
        summary::counted(t.taken(), "samples"),
        t.taken() as f64 / seconds.max(0.1),
        summary::percent(t.exact, t.taken())
    )
}
