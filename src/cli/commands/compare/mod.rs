//! `compare`: runs two commands by turns, records each run, and compares until the answer is known.

use std::ffi::OsString;
use std::hash::{BuildHasher, RandomState};
use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Parser;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;

use crate::cli::args::{Cli, Command, CompareCommand, CompareValue, DiffBy, Limit, RunNumber};
use crate::cli::backend::check_rate;
use crate::cli::commands::diff::{self, Gate};
use crate::cli::print_status;
use crate::error::{Error, ErrorKind, Result};
use crate::privileges::phases;
use crate::process::rerun::{self, Watch};
use crate::profile::diff::Looks;
use crate::profile::summary::counted;
use crate::sys::interrupts;

mod directory;
mod runner;
mod shell_words;

use directory::RunDirectory;
use runner::{Runner, Subject, interrupted};

/// Time for all runs by default, s.
const MAX_TIME: f64 = 180.0;
/// Runs of each command before the first look at their times. Of fewer, intervals are too wide to say anything.
const FIRST_LOOK: usize = 5;
/// Runs of each command whose calls are counted: enough to see which functions are not called equally often each time.
const RUNS_OF_CALLS: usize = 2;

/// So many times the runs after which growth was seen are made to find which function it is.
const RUNS_TO_NAME: usize = 3;
/// What has less of all than this is a part of the program and not the whole.
const PART: f64 = 0.9;

/// What a look at the runs has shown.
enum Look {
    /// The answer of the gate is known.
    Decided,
    /// Something grew by more than the limit, but no part of the program can be named yet.
    Unnamed,
    Open,
}

/// How making runs has ended.
struct Ended {
    stop: Stop,
    /// Of the last look, between 0 and 1.
    confidence: f64,
    looks: u32,
    /// Growth was seen in a look, after so many runs.
    grown_at: Option<usize>,
}

/// Why no more runs are made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stop {
    Decided,
    Time,
    Runs,
}

/// Runs both commands until the gate is decided, and prints the comparison. What was recorded of complete pairs is kept if
/// that is wanted, whatever happens.
///
/// # Errors
/// `Usage`; a run that fails; `Killed` if a signal has ended it; those of `diff`.
pub fn compare(options: &CompareCommand) -> Result<Gate> {
    check_rate(options.rate)?;
    let subjects = [Subject::new("A", &options.before)?, Subject::new("B", &options.after)?];
    check_limit(options)?;
    // What cannot be written is found out before the commands are run.
    options.junit.as_deref().map(diff::results_file).transpose()?;
    let user = phases::invoking_user();
    let runner = Runner::new(options, &subjects)?;
    interrupts::install_interrupt_handler();
    let mut directory = RunDirectory::new(options.output.as_deref(), user.as_ref())?;
    let mut comparison = Comparison {
        options,
        subjects,
        runner,
        progress: progress(),
        start: Instant::now(),
        longest: Duration::ZERO,
    };
    let stopped = comparison.run(&mut directory);
    comparison.progress.finish_and_clear();
    if stopped.is_err() && directory.kept().is_none() && directory.pairs() > 0 {
        print_status("nothing is kept; -o DIR keeps the runs");
    }
    if let Some(path) = directory.kept() {
        print_status(&format!(
            "{} of runs kept in {}; to compare them again: nativeprof diff {}{}",
            counted(directory.pairs() as u64, "pairs"),
            path.display(),
            comparison.normalize(),
            directory.arguments(),
        ));
    }
    let Ended {
        stop,
        confidence,
        looks,
        grown_at,
    } = stopped?;
    let seconds = comparison.start.elapsed().as_secs_f64();
    let pairs = directory.pairs();
    let why = match stop {
        Stop::Decided => "the answer is known".into(),
        Stop::Time => format!(
            "the time is over (more: --max-time {:.0})",
            (2.0 * comparison.max_time()).ceil()
        ),
        Stop::Runs => format!("these are all (--runs {pairs})"),
    };
    let runs = counted(pairs as u64, "runs");
    print_status(&format!("{runs} of each command in {seconds:.1} s; {why}"));
    if looks > 1 {
        print_status(&format!(
            "the runs were looked at {looks} times: the intervals of all looks together hold with {} % confidence",
            options.confidence
        ));
    }
    let words = comparison.diff_words(&directory, confidence);
    let parsed = Cli::try_parse_from(&words).map(|cli| cli.command);
    let Ok(Command::Diff(mut diff_options)) = parsed else {
        let what = "the runs cannot be compared";
        return Err(Error::new(ErrorKind::Usage, what).why("an option is not one of nativeprof diff"));
    };
    diff_options.all = options.all;
    diff_options.json = options.json;
    diff_options.markdown = options.markdown;
    diff_options.junit.clone_from(&options.junit);
    diff_options.github = options.github;
    diff_options.color = options.color;
    diff::diff(&diff_options, grown_at)
}

/// # Errors
/// `Usage`: a limit in calls for times.
fn check_limit(options: &CompareCommand) -> Result<()> {
    match options.fail_above {
        Limit::Calls(calls) if options.value != CompareValue::Calls => Err(Error::new(
            ErrorKind::Usage,
            format!("--fail-above '{calls} calls' needs numbers of calls"),
        )
        .why("time is compared")
        .hint("--value calls, or a limit in percent: --fail-above 5%")),
        _ => Ok(()),
    }
}

struct Comparison<'a> {
    options: &'a CompareCommand,
    subjects: [Subject; 2],
    runner: Runner<'a>,
    progress: ProgressBar,
    start: Instant,
    /// Of the pairs until now.
    longest: Duration,
}

impl Comparison<'_> {
    /// Makes pairs of runs, and looks at them in between.
    ///
    /// # Errors
    /// A run that fails, or an interruption.
    fn run(&mut self, directory: &mut RunDirectory) -> Result<Ended> {
        let runs = self.runs();
        for number in 1..=self.options.warmup as usize {
            for side in 0..2 {
                self.run_once(side, None, number, "warm-up")?;
            }
        }
        self.start = Instant::now();
        let mut looks = Looks::new(self.options.confidence / 100.0, runs.min);
        let mut grown_at = None;
        loop {
            let began = Instant::now();
            // Neither command always runs after the other one.
            let first = (RandomState::new().hash_one(directory.pairs()) & 1) as usize;
            for side in [first, 1 - first] {
                let (file, number) = (directory.next_file(side), directory.pairs() + 1);
                self.run_once(side, Some(&file), number, "run")?;
            }
            directory.add_pair();
            self.longest = self.longest.max(began.elapsed());
            let (pairs, stop) = (directory.pairs(), self.is_last(directory.pairs()));
            let time = if stop.is_some() { 1.0 } else { self.part(pairs) };
            let Some(confidence) = looks.due(pairs, time) else {
                continue;
            };
            let stop = match stop {
                Some(stop) => Some(stop),
                None => match self.look(directory, confidence)? {
                    Look::Decided => Some(Stop::Decided),
                    Look::Unnamed => {
                        grown_at.get_or_insert(pairs);
                        None
                    }
                    Look::Open => None,
                },
            };
            let is_enough = grown_at.is_some_and(|runs| pairs >= RUNS_TO_NAME * runs);
            if let Some(stop) = stop.or(is_enough.then_some(Stop::Decided)) {
                return Ok(Ended {
                    stop,
                    confidence,
                    looks: looks.count(),
                    grown_at,
                });
            }
        }
    }

    fn runs(&self) -> RunNumber {
        match (self.options.runs, self.options.value) {
            (Some(runs), _) => runs,
            (None, CompareValue::Calls) => RunNumber {
                min: RUNS_OF_CALLS,
                max: RUNS_OF_CALLS,
            },
            (None, _) => RunNumber {
                min: FIRST_LOOK,
                max: RunNumber::MAX,
            },
        }
    }

    /// Seconds that all pairs may take.
    fn max_time(&self) -> f64 {
        let runs = self.runs();
        let without = if runs.min == runs.max { f64::INFINITY } else { MAX_TIME };
        self.options.max_time.unwrap_or(without)
    }

    /// Which part is over of the time or of the runs.
    fn part(&self, pairs: usize) -> f64 {
        let time = self.start.elapsed().as_secs_f64() / self.max_time();
        time.max(pairs as f64 / self.runs().max as f64).min(1.0)
    }

    /// Whether no pair is to follow, and why.
    fn is_last(&self, pairs: usize) -> Option<Stop> {
        if pairs >= self.runs().max {
            return Some(Stop::Runs);
        }
        let next = self.start.elapsed() + self.longest;
        (next.as_secs_f64() > self.max_time()).then_some(Stop::Time)
    }

    fn run_once(&self, side: usize, file: Option<&Path>, number: usize, kind: &str) -> Result<()> {
        let subject = &self.subjects[side];
        let show = || {
            if !self.progress.is_hidden() {
                let (seconds, limit) = (self.start.elapsed().as_secs_f64(), self.max_time());
                let of = if limit.is_finite() {
                    format!(" of {limit:.0}")
                } else {
                    String::new()
                };
                self.progress.set_message(format!(
                    "{kind} {number} of {}   {seconds:.0}{of} s   Ctrl-C stops",
                    subject.name
                ));
                self.progress.tick();
            }
        };
        show();
        let watch = Watch {
            is_stopped: &interrupts::interrupted,
            progress: &|_| show(),
        };
        self.runner.run(subject, file, number, &watch)
    }

    /// What `diff` knows with this confidence.
    ///
    /// # Errors
    /// What `diff` says if it fails; an interruption.
    fn look(&self, directory: &RunDirectory, confidence: f64) -> Result<Look> {
        let mut words = self.diff_words(directory, confidence);
        words.remove(0);
        words.extend(["--json", "--limit", "1"].map(OsString::from));
        let watch = Watch {
            is_stopped: &interrupts::interrupted,
            progress: &|_| self.progress.tick(),
        };
        let done = rerun::run(&words, Path::new("."), Duration::MAX, &watch);
        if interrupts::interrupted() {
            return Err(interrupted());
        }
        let done = done?;
        match done.code {
            // With a limit of 0 growth can always be found later.
            Some(0) if self.options.fail_above == Limit::Percent(0.0) => Ok(Look::Open),
            Some(0) => Ok(Look::Decided),
            Some(3) if names_a_part(&done.json()?) => Ok(Look::Decided),
            Some(3) => Ok(Look::Unnamed),
            Some(4) => Ok(Look::Open),
            _ => Err(done.error()),
        }
    }

    /// The option of `diff` for these runs, with a space after it.
    fn normalize(&self) -> &'static str {
        match self.options.value {
            CompareValue::Calls => "--value calls ",
            CompareValue::Cpu | CompareValue::Wall => "--normalize time ",
        }
    }

    /// The command line of `diff` for the complete pairs.
    fn diff_words(&self, directory: &RunDirectory, confidence: f64) -> Vec<OsString> {
        let options = self.options;
        let mut words: Vec<OsString> = ["nativeprof", "diff", "--value"].map(OsString::from).into();
        words.push(
            match options.value {
                CompareValue::Cpu => "cpu",
                CompareValue::Wall => "wall",
                CompareValue::Calls => "calls",
            }
            .into(),
        );
        if options.value != CompareValue::Calls {
            words.extend(["--normalize", "time"].map(OsString::from));
        }
        let by = match options.by {
            DiffBy::Function => "function",
            DiffBy::Module => "module",
            DiffBy::Label => "label",
        };
        let limit = match options.fail_above {
            Limit::Percent(percent) => percent.to_string(),
            Limit::Calls(calls) => format!("{calls} calls"),
        };
        let confidence = format!("{:.6}", confidence * 100.0);
        words.extend(["--by", by, "--fail-above", &limit, "--confidence", &confidence].map(OsString::from));
        for (is_wanted, word) in [
            (options.no_native, "--no-native"),
            (options.self_count, "--self"),
            (options.interpreter, "--interpreter"),
        ] {
            words.extend(is_wanted.then(|| word.into()));
        }
        for (side, option) in ["--before", "--after"].into_iter().enumerate() {
            words.push(option.into());
            words.extend(directory.files(side).into_iter().map(OsString::from));
        }
        words
    }
}

/// Whether the first row of a comparison is a part of the program that grew.
fn names_a_part(found: &Value) -> bool {
    let (all, row) = (&found["all"], &found["rows"][0]);
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap_or(0.0);
    let is_part = number(row, "after") < PART * number(all, "after");
    row["significant"] == Value::Bool(true) && number(row, "change") > 0.0 && is_part
}

fn progress() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(4));
    bar.set_style(ProgressStyle::with_template("{spinner} {msg}").expect("a fixed template"));
    bar
}
