//! `record` and `attach`: sample a process, then write the profile.

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::capture::{self, Backend};
use crate::cli::args::{DEFAULT_RATE, RecordArgs, ResidentAt};
use crate::cli::backend::check_rate;
use crate::cli::commands::allocations;
use crate::cli::discover;
use crate::cli::live::{Invoker, LiveOptions, LiveRecording, LiveTarget, PreparedTarget};
use crate::cli::output::Output;
use crate::cli::output::atomic_file::{OutputFile, PRIVATE};
use crate::cli::output::first_functions;
use crate::cli::output::style::TerminalStyle;
use crate::cli::{FAILED, print_error, print_line, print_status};
use crate::error::{Error, ErrorKind, Result};
use crate::escape;
use crate::event::Pid;
use crate::mcp;
use crate::privileges::credentials::{Caps, User};
use crate::process::launch::Launched;
use crate::profile::model::{Meta, Profile};
use crate::profile::resident::ResidentMemory;
use crate::profile::summary;
use crate::session::{FinishedRecording, Grouping, QualityCounts, SamplingRemarks, replay};
use crate::sys;
use crate::tape;
use crate::tape::encode;
use crate::tape::recorder::TapeRecorder;

/// Longest time before the clock, the target and signals are checked again.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The same with --tasks: the task of a sample may be gone soon.
const TASK_POLL: Duration = Duration::from_millis(5);

/// Samples the target until it exits, the duration is over or Ctrl-C, and writes the profile. The exit code is that of
/// a launched command, 128 plus the number of the signal that killed it, else 0.
pub fn record(target: LiveTarget, options: &RecordArgs) -> Result<u8> {
    if options.alloc {
        return allocations::record(target, options);
    }
    check_rate(options.rate)?;
    if options.save_tape.is_some() {
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
    if options.sampling.mode.is_of_memory() && options.save_tape.is_some() {
        return Err(
            Error::new(ErrorKind::Usage, "--save-tape cannot be used with --mode rss or alloc")
                .why("a tape does not have what of the memory is still there in the end")
                .hint("omit --save-tape, or --mode"),
        );
    }
    if options.at.is_some() && options.sampling.mode != capture::Mode::Rss {
        return Err(Error::new(ErrorKind::Usage, "--at needs --mode rss")
            .why("it is about resident memory, which other modes do not sample")
            .hint("--mode rss --at peak, or omit --at"));
    }
    if options.shown.frames.idle
        && (options.sampling.mode == capture::Mode::Cpu || options.sampling.mode.is_of_memory())
    {
        return Err(Error::new(ErrorKind::Usage, "--idle needs off-CPU time")
            .why("by default only CPU time is sampled, and idle threads use none")
            .hint("--mode wall --idle, or omit --idle"));
    }
    let invoker = Invoker::switch_to(options.as_root, options.sampling.needs(), options.names.debuginfod)?;
    let prepared = PreparedTarget::new(target, &invoker, options.subprocesses)?;
    let pid = prepared.pid;
    let (output, tape) = output_files(options, pid).map_err(|e| explain_user(e, invoker.user.as_ref()))?;
    let recorder = options
        .save_tape
        .as_ref()
        .map(|_| TapeRecorder::new(options.tape_samples));
    let live = LiveOptions {
        rate: options.rate,
        sampling: &options.sampling,
        tasks: &options.tasks,
        grouping: Grouping {
            processes: options.subprocesses,
            threads: options.threads,
        },
        spans: options.spans,
        tape: recorder.clone(),
        kept: Caps(output.needs().0 | tape.as_ref().map_or(0, |place| place.needs().0)),
    };
    let recorded = live.on_tape();
    let mut live = LiveRecording::open(prepared, invoker, &live)?;
    let is_attached = live.launched.is_none();
    if let Some(line) = live.suggestion().filter(|_| !options.subprocesses) {
        print_status(&line);
    }
    let family = discover::FamilyCpu::start(pid);
    if let Err(e) = live.start() {
        return finish(live.launched, false, Err(e));
    }
    if is_attached && let Some(e) = live.recording.missing_source() {
        return finish(live.launched, false, Err(e));
    }
    print_line(&format!(
        "nativeprof: sampling {} {} ({})",
        discover::pid_label(pid),
        options.sampling.frequency(options.rate),
        live.recording.backend_name()
    ));
    if options.sampling.mode.is_of_memory() && options.rate != DEFAULT_RATE {
        print_line("nativeprof: --rate has no effect: samples of memory are not taken by time");
    }
    let (ended, failure) = sample(&mut live, options);
    if is_left_alone(options) {
        return Err(Error::new(ErrorKind::Io, "the recording was given up")
            .why("the program that started it has closed its input")
            .hint("run it without --with-parent"));
    }
    if let Some(e) = live.recording.missing_source() {
        return finish(live.launched, ended, Err(e));
    }
    let children = if options.subprocesses {
        Duration::ZERO
    } else {
        family.used()
    };
    let (finished, launched) = live.finish(failure);
    let written = finished.and_then(|mut finished| {
        let mut profile = finished.resolve();
        if options.at == Some(ResidentAt::Peak) {
            profile.show_peak();
        }
        let written = output.write(&profile)?;
        print_finished(&profile, &written, options.verbose);
        print_remarks(options, &finished, &profile, children);
        output.browse(true);
        Ok((finished, profile))
    });
    let (finished, profile) = match written {
        Ok(written) => written,
        Err(e) => return finish(launched, ended, Err(e)),
    };
    let mut done = match (recorder, &tape) {
        (Some(recorder), Some(place)) => {
            save_tape(&recorder, place, &profile.meta, finished.began(), is_attached, recorded)
        }
        _ => Ok(()),
    };
    if let Some(e) = finished.failure {
        done = Err(Error {
            what: format!("the recording ended early: {}", e.what),
            ..e
        });
    }
    if is_attached || options.with_parent {
        done = done.and_then(|()| output.check_written());
    }
    if options.with_parent && !ended {
        print_status(mcp::ENDED_WITH_RECORDING);
        return done.map(|()| 0);
    }
    finish(launched, ended, done)
}

/// Samples until the target exits, the duration is over, or Ctrl-C. Returns whether the target has exited, and what
/// else ended the recording: what was sampled until then is written.
fn sample(live: &mut LiveRecording, options: &RecordArgs) -> (bool, Option<Error>) {
    let start = Instant::now();
    let end = options
        .duration
        .map(|duration| start + Duration::from_secs_f64(duration));
    let poll = if options.tasks.shows_tasks() {
        TASK_POLL
    } else {
        POLL_INTERVAL
    };
    let progress = progress();
    let (mut ended, mut failure) = (false, None);
    let is_over =
        || sys::interrupts::interrupted() || is_left_alone(options) || end.is_some_and(|end| Instant::now() >= end);
    while !ended && failure.is_none() && !is_over() {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        ended = live.has_exited();
        failure = live.poll(left.map_or(poll, |left| left.min(poll)), end).err();
        if !progress.is_hidden() {
            progress.set_message(progress_text(live.recording.quality_counts(), start.elapsed()));
            progress.tick();
        }
    }
    progress.finish_and_clear();
    (ended, failure)
}

/// Whether the program that started this one is gone, or wants no profile any more.
fn is_left_alone(options: &RecordArgs) -> bool {
    options.with_parent && sys::files::is_hung_up(std::io::stdin().as_fd())
}

/// Prints the first functions of a profile, and its summary.
pub(super) fn print_finished(profile: &Profile, written: &str, is_verbose: bool) {
    if let Some(text) = first_functions::text(profile, &TerminalStyle::of_stderr()) {
        print_line(&text);
    }
    print_line(&summary::block(&profile.meta, written, is_verbose));
}

/// Prints which samples were taken in another way than the usual one, or not taken.
pub(super) fn print_sampling(remarks: &SamplingRemarks) {
    if let Some(remark) = &remarks.timer {
        print_line(&format!("  timer:    {remark}"));
    }
    if let Some(remark) = &remarks.budget {
        print_line(&format!("  budget:   {remark}"));
    }
}

/// Prints the limits that were exceeded.
pub(super) fn print_exceeded(remarks: &SamplingRemarks) {
    for limit in &remarks.exceeded {
        print_line(&format!("  limit:    {limit}"));
    }
}

/// Prints what a user may want to know of the profile besides the summary's block.
fn print_remarks(options: &RecordArgs, finished: &FinishedRecording, profile: &Profile, children: Duration) {
    print_sampling(&finished.remarks);
    if let Some(lines) = summary::memory(&profile.meta) {
        print_line(&lines);
        // A program that has ended has given back most of its memory.
        let had_more = |memory: &ResidentMemory| {
            let peak = memory.peak.map_or(0, |peak| peak.bytes);
            peak > memory.total().end().saturating_mul(11) / 10
        };
        if options.at.is_none() && profile.meta.memory.iter().any(had_more) {
            print_line(
                "            which code had touched it at the peak: report --value rss_peak_bytes, or record --at peak",
            );
        }
    }
    if let Some(lines) = summary::allocations(profile) {
        print_line(&lines);
    }
    let is_cpu_time = options.sampling.measure(options.rate).is_cpu_time() && !options.sampling.gil;
    let advice = is_cpu_time.then(|| summary::advice(&profile.meta, children)).flatten();
    if let Some(line) = advice.or_else(|| summary::thread_states(profile, options.shown.frames.idle)) {
        print_line(&line);
    }
    print_exceeded(&finished.remarks);
    if let Some(line) = summary::cut_names(profile) {
        print_line(&line);
    }
    if let Some(counts) = finished.task_counts() {
        print_line(&summary::tasks(counts.with, counts.without));
    }
    if let Some(counts) = finished.gil_counts() {
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
fn save_tape(
    recorder: &TapeRecorder,
    output: &OutputFile,
    meta: &Meta,
    began: u64,
    attached: bool,
    recorded: tape::TapeOptions,
) -> Result<()> {
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
        options: recorded,
    };
    let (tape, same) = replay::finish(recorder.finish(header))?;
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

fn progress() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(4));
    bar.set_style(ProgressStyle::with_template("{spinner} {msg}").expect("a fixed template"));
    bar
}

fn progress_text(t: &QualityCounts, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64();
    format!(
        "{seconds:5.1} s   {}   {:.0}/s   exact {}   Ctrl-C stops",
        summary::counted(t.taken(), "samples"),
        t.taken() as f64 / seconds.max(0.1),
        summary::percent(t.exact, t.taken())
    )
}
