//! One run of a command, recorded or not.

use std::ffi::{OsStr, OsString};
use std::fs::{self, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::shell_words;
use crate::cli::args::{CompareCommand, CompareValue};
use crate::cli::quoted;
use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::privileges::phases;
use crate::process::rerun::{self, Finished, Watch};
use crate::sys::interrupts;

/// How long a recording that is no longer wanted may take to end its command and to remove its files.
const GRACE: Duration = Duration::from_secs(3);
/// Options of Python that have a value as the next word (`python3 --help`).
const PYTHON_WITH_VALUE: [&str; 3] = ["-W", "-X", "--check-hash-based-pycs"];

/// A command to run.
pub struct Subject {
    /// What it is called in messages: `A`.
    pub name: &'static str,
    text: String,
    words: Vec<String>,
    is_shell: bool,
}

impl Subject {
    /// # Errors
    /// `Usage`: there is nothing to run.
    pub fn new(name: &'static str, text: &str) -> Result<Subject> {
        if text.trim().is_empty() {
            return Err(Error::new(ErrorKind::Usage, format!("command {name} is empty"))
                .why("there is nothing to run")
                .hint("nativeprof compare 'python3 old.py' 'python3 new.py'"));
        }
        let (words, is_shell) = shell_words::command(text);
        let file = words
            .first()
            .map(Path::new)
            .filter(|_| !is_shell && words.len() == 1 && text.contains(['/', '.']));
        let is_executable = |found: Metadata| !found.is_file() || found.permissions().mode() & 0o111 != 0;
        if file.is_some_and(|file| fs::metadata(file).is_ok_and(|found| !is_executable(found))) {
            let what = format!("command {name} is a file that is not executable: {}", line(text));
            return Err(Error::new(ErrorKind::Usage, what)
                .why("compare runs commands")
                .hint("for a script: 'python3 FILE'; two profiles: nativeprof diff BEFORE AFTER"));
        }
        Ok(Subject {
            name,
            text: text.into(),
            words,
            is_shell,
        })
    }
}

/// What runs commands.
pub struct Runner<'a> {
    options: &'a CompareCommand,
    prepare: Option<Subject>,
}

impl Runner<'_> {
    /// Of calls, gives up the privileges that only sampling needs.
    ///
    /// # Errors
    /// `Usage`: calls of a command that is not Python's, or an empty command.
    pub fn new<'a>(options: &'a CompareCommand, subjects: &[Subject; 2]) -> Result<Runner<'a>> {
        if options.value == CompareValue::Calls {
            for subject in subjects {
                counted(subject, Path::new(""))?;
            }
            phases::switch_to_invoking_user()?;
        }
        let prepare = options.prepare.as_deref().map(|text| Subject::new("--prepare", text));
        Ok(Runner {
            options,
            prepare: prepare.transpose()?,
        })
    }

    /// Runs a command once, with its profile in `file`, if given.
    ///
    /// # Errors
    /// If the command fails, or its recording; `Killed` if this program was interrupted. `number` is that of the run in messages.
    pub fn run(&self, subject: &Subject, file: Option<&Path>, number: usize, watch: &Watch<'_>) -> Result<()> {
        if let Some(prepare) = &self.prepare {
            self.run_unprepared(prepare, None, number, watch)?;
        }
        self.run_unprepared(subject, file, number, watch)
    }

    fn run_unprepared(&self, subject: &Subject, file: Option<&Path>, number: usize, watch: &Watch<'_>) -> Result<()> {
        let mut command = match self.options.value {
            CompareValue::Cpu | CompareValue::Wall => self.recorded(subject, file),
            CompareValue::Calls => {
                let words = match file {
                    Some(file) => counted(subject, file)?,
                    None => subject.words.iter().map(OsString::from).collect(),
                };
                let (program, arguments) = words.split_first().expect("a command has a word");
                let mut command = Command::new(program);
                command.args(arguments).stdin(Stdio::null());
                command
            }
        };
        let output = if self.options.show_output {
            let ours = io::stderr().as_fd().try_clone_to_owned();
            Stdio::from(ours.map_err(|e| Error::io("cannot print what the commands print", e))?)
        } else {
            Stdio::null()
        };
        // Of a recording, that of the command is in its output already.
        let is_apart = self.options.value == CompareValue::Calls && self.options.show_output;
        let messages = if is_apart { Stdio::inherit() } else { Stdio::piped() };
        command.stdout(output).stderr(messages);
        let done = rerun::wait_for(&mut command, Duration::MAX, GRACE, watch);
        if interrupts::interrupted() {
            return Err(interrupted());
        }
        let done = done?;
        if done.code != Some(0) {
            return Err(self.failed(subject, number, &done));
        }
        if file.is_some() && done.starts_a_line("nativeprof: 0 samples ") {
            let what = format!("run {number} of {} has no samples", subject.name);
            return Err(Error::new(ErrorKind::Data, what)
                .why(format!(
                    "`{}` ended before it had used much CPU time",
                    line(&subject.text)
                ))
                .hint("give it more work, or take more samples: -r 4999"));
        }
        Ok(())
    }

    /// The command of this program that records it. Without a file it is run in the same way, as the user who is to run it.
    fn recorded(&self, subject: &Subject, file: Option<&Path>) -> Command {
        let options = self.options;
        let rate = if file.is_some() { options.rate } else { 1 };
        let mut words: Vec<String> = ["record", "--with-parent", "--rate"].map(String::from).into();
        words.push(rate.to_string());
        if options.value == CompareValue::Wall {
            words.extend(["--mode", "wall"].map(String::from));
        }
        if options.subprocesses || subject.is_shell {
            words.push("--subprocesses".into());
        }
        if options.show_output {
            words.push("--show-output".into());
        }
        let mut command = rerun::command(&words);
        match file {
            Some(file) => command.arg("-o").arg(file),
            None => command.args(["-f", "collapsed", "-o", "/dev/null"]),
        };
        // While the other end of its input is open, a recording goes on.
        command.arg("--").args(&subject.words).stdin(Stdio::piped());
        command
    }

    fn failed(&self, subject: &Subject, number: usize, done: &Finished) -> Error {
        let run = match subject.name {
            "--prepare" => format!("--prepare failed before run {number}"),
            name => format!("run {number} of {name} failed"),
        };
        // The codes of `record` for failures of its own; a command may end with them too.
        if let (Some(125..=127), Some(said)) = (done.code, done.said_error()) {
            return Error {
                what: format!("{run}: {}", said.what),
                ..said
            };
        }
        if done.has_line_with("No module named nativeprof") {
            return Error::new(
                ErrorKind::Data,
                format!("{run}: its Python does not have the package nativeprof"),
            )
            .why("calls are counted inside the process")
            .hint(format!("{} -m pip install nativeprof", quoted(&subject.words[0])));
        }
        let how = match done.code {
            // That of `record` for a command that a signal has ended.
            Some(code @ 129..=192) => format!("signal {} ended it", code - 128),
            Some(code) => format!("exit code {code}"),
            None => "a signal ended it".into(),
        };
        Error::new(ErrorKind::Data, format!("{run}: {how}"))
            .why(format!(
                "what a run of `{}` takes that fails is not that of its work; nothing is compared",
                line(&subject.text)
            ))
            .hint("see what it prints: --show-output")
    }
}

/// What is to be said of Ctrl-C.
pub fn interrupted() -> Error {
    Error::new(ErrorKind::Killed(libc::SIGINT as u8), "interrupted")
}

/// The words that run a Python program with its calls counted.
///
/// # Errors
/// `Usage`: it is none.
fn counted(subject: &Subject, file: &Path) -> Result<Vec<OsString>> {
    let program = subject.words.first().map(Path::new).and_then(Path::file_name);
    let is_python = |name: &OsStr| {
        let version = name.to_string_lossy().strip_prefix("python").map(str::to_string);
        version.is_some_and(|version| version.bytes().all(|c| c.is_ascii_digit() || c == b'.' || c == b't'))
    };
    if subject.is_shell || !program.is_some_and(is_python) {
        return Err(Error::new(ErrorKind::Usage, format!("calls of command {} cannot be counted", subject.name))
            .why("calls are counted inside Python, and it does not begin with python3")
            .hint(
                "run both as `python3 -m nativeprof --trace counts -o a.json SCRIPT`, then: nativeprof diff --value calls --fail-above \
                 '10 calls' a.json b.json",
            ));
    }
    let mut at = 1;
    while let Some(word) = subject.words.get(at) {
        let is_option = word.starts_with('-') && word != "-" && !["-m", "-c"].iter().any(|how| word.starts_with(how));
        if !is_option {
            break;
        }
        at += if PYTHON_WITH_VALUE.contains(&&**word) { 2 } else { 1 };
    }
    let (python, program) = subject.words.split_at(at.min(subject.words.len()));
    let ours = ["-m", "nativeprof", "--trace", "counts", "--quiet", "-o"].map(OsString::from);
    let theirs = |words: &[String]| words.iter().map(OsString::from).collect::<Vec<_>>();
    Ok([theirs(python), ours.into(), vec![file.into()], theirs(program)].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_in_python() {
        let words = |text: &str| {
            counted(&Subject::new("A", text).unwrap(), Path::new("x.json"))
                .map(|words| words.join(OsStr::new(" ")).into_string().unwrap())
        };
        let ours = "-m nativeprof --trace counts --quiet -o x.json";
        for (text, expected) in [
            ("python3 a.py -c 1", format!("python3 {ours} a.py -c 1")),
            (
                "/opt/python3.13t -X dev -u a.py",
                format!("/opt/python3.13t -X dev -u {ours} a.py"),
            ),
            (
                "python -W error -m pytest -x",
                format!("python -W error {ours} -m pytest -x"),
            ),
            ("python3 -c 'print(1)'", format!("python3 {ours} -c print(1)")),
            ("python3", format!("python3 {ours}")),
        ] {
            assert_eq!(words(text).unwrap(), expected);
        }
        for text in ["cd x && python3 a.py", "./a.out", "pypy3 a.py", "python3-config"] {
            assert!(words(text).unwrap_err().hint.contains("--trace counts"), "{text}");
        }
    }
}
