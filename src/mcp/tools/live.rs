//! `record` and `attach`: the tools that record.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use super::profiles::new_file;
use super::reports::{FUNCTION, ReportOptions, report};
use super::{AnswerText, Call, Surroundings, Tool, command_line, count, whole, with_rows};
use crate::error::{Error, ErrorKind, Result};
use crate::mcp::ENDED_WITH_RECORDING;
use crate::mcp::answer::data;
use crate::mcp::arguments::{Arguments, Wanted};
use crate::mcp::permission::{Permission, ProcessId};
use crate::process::rerun::{self, Watch};

/// Length of a recording, s.
const DEFAULT_SECONDS: u64 = 30;
const MAX_SECONDS: u64 = 3600;
const DEFAULT_RATE: u64 = 99;
const MAX_RATE: u64 = 1000;
/// Bytes of the names of fields that the answer has besides those of a report, and of its note.
const NAMES: usize = 160;
/// Time to start, and to write the profile.
const MORE: Duration = Duration::from_secs(120);

pub const RECORD: Tool = Tool {
    name: "record",
    description: "Runs a command (a list of words, no shell) in the root directory, samples it, and reports its functions. Its output \
                  is dropped; it is ended with the recording. Only commands that the user has allowed.",
    is_read_only: false,
    arguments: || {
        let mut all = options();
        all["command"] = json!({"type": "array", "items": {"type": "string"}});
        (all, &["command"])
    },
    answer: ANSWER,
    run: |arguments, surroundings| {
        let command = arguments.texts("command")?;
        let options = RecordingOptions::of(arguments)?;
        surroundings.permission.command(&command)?;
        call(surroundings, options, What::Command(command))
    },
};

pub const ATTACH: Tool = Tool {
    name: "attach",
    description: "Samples a running process, and reports its functions.",
    is_read_only: false,
    arguments: || {
        let mut all = options();
        all["pid"] = whole();
        (all, &["pid"])
    },
    answer: ANSWER,
    run: |arguments, surroundings| {
        let pid = arguments.needed_pid()?;
        let options = RecordingOptions::of(arguments)?;
        let process = surroundings.permission.process(pid)?;
        call(surroundings, options, What::Process(process))
    },
};

fn options() -> Value {
    with_rows(json!({
        "seconds": {"type": "integer", "default": DEFAULT_SECONDS},
        "rate": {"type": "integer", "description": "Hz"},
        "mode": {"enum": MODES},
        "subprocesses": {"type": "boolean"},
    }))
}

/// What is sampled: time on the CPU, or also waiting.
const MODES: &[&str] = &["cpu", "wall", "off-cpu"];

const ANSWER: AnswerText = AnswerText {
    keys: &["value", "profile", "note"],
    rows: FUNCTION,
};

struct RecordingOptions {
    seconds: u64,
    rate: u64,
    mode: &'static str,
    subprocesses: bool,
    wanted: Wanted,
}

enum What {
    Command(Vec<String>),
    Process(ProcessId),
}

impl RecordingOptions {
    fn of(arguments: &mut Arguments) -> Result<RecordingOptions> {
        Ok(RecordingOptions {
            seconds: arguments.number("seconds", 1, MAX_SECONDS)?.unwrap_or(DEFAULT_SECONDS),
            rate: arguments.number("rate", 1, MAX_RATE)?.unwrap_or(DEFAULT_RATE),
            mode: arguments.word("mode", MODES)?.unwrap_or("cpu"),
            subprocesses: arguments.flag("subprocesses")?,
            wanted: arguments.wanted()?,
        })
    }
}

fn call(surroundings: &Surroundings<'_>, options: RecordingOptions, what: What) -> Result<Call> {
    if surroundings.is_recording.load(Ordering::SeqCst) {
        return Err(Error::new(ErrorKind::Usage, "a recording is running")
            .why("one at a time disturbs the others least")
            .hint("wait for its answer, or cancel it"));
    }
    Ok(Box::new(move |permission, watch| {
        run(permission, watch, &options, &what)
    }))
}

/// Records, then reports.
fn run(permission: &Permission, watch: &Watch<'_>, options: &RecordingOptions, what: &What) -> Result<Value> {
    let path = new_file(
        permission,
        &match what {
            What::Command(words) => words.first().cloned().unwrap_or_default(),
            What::Process(process) => format!("pid{}", process.pid),
        },
    )?;
    let place = format!("./{}", path.to_string_lossy());
    let (seconds, rate) = (options.seconds.to_string(), options.rate.to_string());
    let mut words = super::words([
        "record",
        "-d",
        &seconds,
        "-r",
        &rate,
        "--mode",
        options.mode,
        "-o",
        &place,
    ]);
    words.extend(options.subprocesses.then(|| "--subprocesses".into()));
    match what {
        What::Command(command) => {
            words.push("--".into());
            words.extend(command.iter().cloned());
        }
        What::Process(process) => words.extend(super::words(["--pid", &process.pid.to_string()])),
    }
    let mut unfinished = Unfinished(Some(permission.root().join(&path)));
    let mut ours = words.clone();
    ours.insert(1, "--with-parent".into());
    let limit = Duration::from_secs(options.seconds) + MORE;
    let finished = rerun::run(&ours, permission.root(), limit, watch)?;
    if fs::symlink_metadata(permission.root().join(&path)).is_err() {
        return Err(finished.error());
    }
    // The number may have become another process's before sampling began.
    if let What::Process(process) = what
        && ProcessId::of(process.pid).is_some_and(|now| now != *process)
    {
        return Err(Error::no_process(process.pid));
    }
    unfinished.0 = None;
    let command = data(&command_line(&words));
    let mut answer = report(
        permission,
        watch,
        &ReportOptions {
            file: place,
            by: None,
            value: None,
            filter: None,
            wanted: Wanted {
                max_bytes: options
                    .wanted
                    .max_bytes
                    .saturating_sub(path.to_string_lossy().len() + command.len() + NAMES),
                ..options.wanted
            },
        },
    )?;
    if count(&answer, "total") == 0 {
        answer["note"] = "no samples: it used no CPU time; mode wall shows what it waits for".into();
    }
    answer["profile"] = data(&path.to_string_lossy()).into();
    answer["command"] = command.into();
    if let What::Command(_) = what {
        if finished.says(ENDED_WITH_RECORDING) {
            answer["note"] = ENDED_WITH_RECORDING.into();
        } else if let Some(code) = finished.code {
            answer["exit_code"] = code.into();
        }
    }
    Ok(answer)
}

/// The file of a recording that has not succeeded: it is removed, also what is half written of it.
struct Unfinished(Option<PathBuf>);

impl Drop for Unfinished {
    fn drop(&mut self) {
        let Some(path) = &self.0 else { return };
        let _ = fs::remove_file(path); // it may not be there
        let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
            return;
        };
        let half = format!(".{}.", name.to_string_lossy());
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&half)) {
            let _ = fs::remove_file(entry.path()); // nothing more can be done
        }
    }
}
