//! A command whose allocations are recorded: Python runs the package, which runs the program.

use std::fs::{self, DirBuilder};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Seek};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{MAX_PROFILE, from_outside, output, shown, write};
use crate::cli::args::RecordArgs;
use crate::cli::live::Invoker;
use crate::cli::{FAILED, print_error, print_line, print_status, quoted_words};
use crate::error::{Error, ErrorKind, Result};
use crate::privileges::credentials::{Caps, User};
use crate::privileges::phases;
use crate::process::launch::Launched;
use crate::process::python_command::{NoPythonCommand, PythonCommand};
use crate::profile::values::Unit;
use crate::sys;
use crate::sys::spawn::Streams;

/// A program that says whether the package can be used, behind a word by which its answer is found among what else is printed.
/// In words that any version of Python reads.
const TRIAL: &str = "\
try:
    from nativeprof import _native
    _native.AllocationRecorder
    answer = 'ready'
except BaseException as error:
    answer = '%s: %s' % (type(error).__name__, error)
print('nativeprof-answer: ' + answer)
";
const ANSWER: &str = "nativeprof-answer: ";
/// Time for the trial: Python starts within a second even on a slow machine.
const TRIAL_TIME: Duration = Duration::from_secs(60);
/// Time between two looks at it.
const TURN: Duration = Duration::from_millis(5);
/// Bytes of its output that are read.
const MAX_ANSWER: u64 = 1 << 16;

/// Runs the command, and writes the profile when it has ended. The exit code is that of the command.
pub fn record(words: &[String], streams: Streams, options: &RecordArgs) -> Result<u8> {
    if options.duration.is_some() {
        return Err(
            Error::new(ErrorKind::Usage, "--duration cannot be used with --alloc and a command")
                .why("the allocations of a command are recorded from its start to its end")
                .hint("omit --duration, or start the command and attach to it: nativeprof attach PID --alloc -d 10"),
        );
    }
    let invoker = Invoker::switch_to(options.as_root, Caps::NONE, options.names.debuginfod)?;
    let user = invoker.user.as_ref();
    let python = PythonCommand::new(words).map_err(|why| refused(words, user, why))?;
    try_package(&python, words, user)?;
    let directory = PrivateDirectory::new()?;
    let file = directory.0.join("profile.json");
    let own = python.run_by("nativeprof", &arguments(options, &file));
    let launched = Launched::prepare(&own, user, streams)?;
    let output = output(options, launched.pid())?;
    phases::drop_for_symbolization(output.needs())?;
    launched.pass_on_signals();
    sys::interrupts::install_interrupt_handler();
    let (code, ended) = run(launched, options)?;
    let profile = read(&file).and_then(|profile| write(&profile, words.join(" "), &output, options));
    if let Err(e) = &profile {
        print_error(e);
    }
    if let Some(line) = ended {
        print_status(&line);
    }
    Ok(if profile.is_ok() { code } else { FAILED })
}

/// Lets the command run, and waits until it ends.
fn run(mut launched: Launched, options: &RecordArgs) -> Result<(u8, Option<String>)> {
    launched.release()?;
    print_line(&format!(
        "nativeprof: sampling the allocations of {} every {} (by the package nativeprof in it)",
        launched.pid(),
        Unit::Bytes.show(options.sampling.interval()),
    ));
    launched.wait()
}

/// Arguments of the package.
fn arguments(options: &RecordArgs, file: &Path) -> Vec<String> {
    let interval = options.sampling.interval().to_string();
    let overhead = format!("{}%", 100.0 * options.sampling.max_overhead());
    let file = file.to_string_lossy();
    let mut words = vec!["--alloc", "-q", "-f", "json", "-o", &file];
    words.extend(["--interval", &interval, "--max-overhead", &overhead]);
    words.extend(options.sampling.no_native.then_some("--no-native"));
    words.extend(options.threads.then_some("--threads"));
    words.into_iter().map(String::from).collect()
}

/// The error for a command that is none of Python's.
fn refused(words: &[String], user: Option<&User>, why: NoPythonCommand) -> Error {
    // One that does not exist is refused as without --alloc.
    if let Err(e) = Launched::prepare(words, user, Streams::None) {
        return e;
    }
    let line = quoted_words(words);
    let name = words.first().map_or("", String::as_str);
    let (what, why) = match why {
        NoPythonCommand::NotPython => (
            format!("--alloc cannot be used with {name}"),
            "allocations are recorded by the Python package inside the program, and the command is neither a Python \
             interpreter nor a script that names one in its first line",
        ),
        NoPythonCommand::NoProgram => (
            format!("--alloc needs a program that {name} runs"),
            "the command names no script, module or text",
        ),
        NoPythonCommand::SkipsLine => (
            "--alloc cannot be used with Python's option -x".into(),
            "the package reads the script, and it does not skip the first line",
        ),
    };
    Error::new(ErrorKind::Usage, what).why(why).hint(format!(
        "nativeprof record --alloc -- python3 SCRIPT ..., or {}",
        from_outside(&format!("record --mode rss -- {line}"))
    ))
}

/// Checks that the interpreter can use the package.
fn try_package(python: &PythonCommand, words: &[String], user: Option<&User>) -> Result<()> {
    let own = python.run_text(TRIAL);
    let name = &python.interpreter;
    let (what, advice) = (
        format!("{name} cannot use the package nativeprof"),
        format!(
            "{name} -m pip install --upgrade nativeprof, or {}",
            from_outside(&format!("record --mode rss -- {}", quoted_words(words)))
        ),
    );
    let unusable = |why: String| Err(Error::new(ErrorKind::Unsupported, &what).why(why).hint(&advice));
    let output = sys::files::memory_file().map_err(|e| Error::io("cannot make a file in memory", e))?;
    let copy = || {
        output
            .try_clone()
            .map_err(|e| Error::io("cannot make a file in memory", e))
    };
    let started = Command::new(&own[0])
        .args(&own[1..])
        .stdin(Stdio::null())
        .stdout(copy()?)
        .stderr(copy()?)
        .spawn();
    let child = match started {
        Ok(child) => child,
        // As without --alloc.
        Err(e) => {
            return match Launched::prepare(words, user, Streams::None) {
                Err(refused) => Err(refused),
                Ok(_) => Err(Error::new(ErrorKind::NotExecutable, format!("cannot run {name}")).why(e.to_string())),
            };
        }
    };
    if !ends_in_time(child) {
        return unusable(format!("it did not answer within {} s", TRIAL_TIME.as_secs()));
    }
    let mut printed = Vec::new();
    let mut output = output;
    output
        .rewind()
        .and_then(|()| output.take(MAX_ANSWER).read_to_end(&mut printed))
        .map_err(|e| Error::io("cannot read a file in memory", e))?;
    let printed = String::from_utf8_lossy(&printed);
    match printed.lines().find_map(|line| line.split_once(ANSWER)) {
        Some((_, "ready")) => Ok(()),
        Some((_, why)) => unusable(why.to_string()),
        None => unusable(match printed.lines().rfind(|line| !line.trim().is_empty()) {
            Some(last) => format!("it failed: {}", last.trim()),
            None => "it failed and printed nothing".into(),
        }),
    }
}

/// Waits for a child; one that does not end in time is killed.
fn ends_in_time(mut child: Child) -> bool {
    let end = Instant::now() + TRIAL_TIME;
    while Instant::now() < end {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(TURN),
            done => return done.is_ok(),
        }
    }
    // It is not reaped yet, so that the number is its own.
    let _ = child.kill();
    let _ = child.wait();
    false
}

/// A directory for this user only, removed with its content when this is dropped.
struct PrivateDirectory(PathBuf);

impl PrivateDirectory {
    fn new() -> Result<PrivateDirectory> {
        let path = std::env::temp_dir().join(format!("nativeprof-{:016x}", RandomState::new().hash_one(0)));
        DirBuilder::new().mode(0o700).create(&path).map_err(|e| {
            Error::io(format!("cannot create {}", shown(&path)), e).hint("name another directory in TMPDIR")
        })?;
        Ok(PrivateDirectory(path))
    }
}

impl Drop for PrivateDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0); // nothing can be done
    }
}

/// The profile that the program has written.
fn read(file: &Path) -> Result<Vec<u8>> {
    let opened = sys::files::open_plain(file).map_err(|e| {
        if e.kind() != io::ErrorKind::NotFound {
            return Error::io(format!("cannot read {}", shown(file)), e);
        }
        Error::new(ErrorKind::Io, "the command left no profile")
            .why(
                "it did not start, or ended in a way that runs none of Python's exit functions: by SIGKILL, a crash, os._exit, or \
                 as another user who may not write the file",
            )
            .hint("end it by sys.exit or SIGTERM")
    })?;
    let mut bytes = Vec::new();
    opened
        .take(MAX_PROFILE)
        .read_to_end(&mut bytes)
        .map_err(|e| Error::io(format!("cannot read {}", shown(file)), e))?;
    Ok(bytes)
}
