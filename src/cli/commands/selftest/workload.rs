//! The workload and the sampler, each as a separate process.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

use crate::cli::args::Selftest;
use crate::error::{Error, ErrorKind, Result};
use crate::event::Pid;
use crate::privileges::{credentials, phases};
use crate::profile::json;
use crate::profile::model::Profile;
use crate::sys;

const SOURCE: &str = include_str!("workload.py");
/// Seconds that a sampler continues after its window.
const AFTER_WINDOW: f64 = 0.1;

/// What the workload did in one window.
pub struct RunWindow {
    pub rounds: f64,
    /// Seconds.
    pub wall: f64,
    pub cpu: f64,
    /// CPU seconds of each part.
    pub parts: BTreeMap<String, f64>,
}

/// The running workload; it exits when its standard input is closed.
pub struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    pub version: String,
    pub path: String,
}

impl Program {
    /// # Errors
    /// `Io` if that Python cannot be started.
    pub fn start(python: &Path) -> Result<Program> {
        let failed = |why: String| {
            Error::new(ErrorKind::Io, format!("cannot run {}", python.display()))
                .why(why)
                .hint("choose a CPython with --python PATH")
        };
        let mut command = Command::new(python);
        command.args(["-I", "-S", "-c", SOURCE]);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let variable = |name: &str| std::env::var(name).ok();
        // Under sudo the workload runs as the invoking user, as with `record`.
        if let Some(user) = phases::caller(sys::process::effective_uid(), &variable, &credentials::find_user) {
            command.uid(user.uid).gid(user.gid);
        }
        let mut child = command.spawn().map_err(|e| failed(e.to_string()))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed("it has no standard input or output".into()));
        };
        let mut program = Program {
            child,
            input,
            output: BufReader::new(output),
            version: String::new(),
            path: String::new(),
        };
        let ready = program.read_response().map_err(|e| failed(e.why))?;
        let text = |key: &str| ready[key].as_str().unwrap_or_default().to_string();
        (program.version, program.path) = (text("python"), text("program"));
        Ok(program)
    }

    pub fn pid(&self) -> Pid {
        self.child.id()
    }

    /// Runs the workload for some seconds.
    ///
    /// # Errors
    /// `Io` if it crashes.
    pub fn work(&mut self, seconds: f64) -> Result<RunWindow> {
        // A missing response gives a better error than a failed request.
        let _ = writeln!(self.input, "{seconds}").and_then(|()| self.input.flush());
        let done = self.read_response()?;
        let number = |key: &str| done[key].as_f64().unwrap_or(0.0);
        let parts = done["parts"].as_object().into_iter().flatten();
        Ok(RunWindow {
            rounds: number("rounds").max(1.0),
            wall: number("wall"),
            cpu: number("cpu"),
            parts: parts
                .filter_map(|(name, time)| Some((name.clone(), time.as_f64()?)))
                .collect(),
        })
    }

    fn read_response(&mut self) -> Result<Value> {
        let mut line = String::new();
        let read = self.output.read_line(&mut line);
        if let (Ok(1..), Ok(value)) = (read, serde_json::from_str(&line)) {
            return Ok(value);
        }
        let mut said = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            let _ = stderr.take(10_000).read_to_string(&mut said); // what there is
        }
        let first_words = SOURCE.trim_start_matches('"').split(':').next().unwrap_or_default();
        let why = match said.lines().last() {
            None => "it exited silently".into(),
            // Another program repeats the script that it was given, perhaps with other quotes.
            Some(last) if last.contains(first_words) => "it is not a Python interpreter".into(),
            Some(last) => last.chars().take(200).collect::<String>(),
        };
        Err(Error::new(ErrorKind::Io, "the workload crashed")
            .why(why)
            .hint("choose another Python with --python PATH"))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have exited
        let _ = self.child.wait();
    }
}

/// `nativeprof attach` on the workload.
pub struct Sampler {
    child: Child,
    output: ChildStdout,
    said: BufReader<ChildStderr>,
}

impl Sampler {
    /// Starts sampling and waits until it has started; the inner error says why this backend is not available.
    ///
    /// # Errors
    /// `Io` if we cannot be started again.
    pub fn start(pid: Pid, backend: &str, options: &Selftest) -> Result<std::result::Result<Sampler, String>> {
        let failed = |e| Error::io("cannot start the sampler", e).hint("check that /proc is mounted");
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.args([
            "attach",
            &pid.to_string(),
            "--backend",
            backend,
            "-f",
            "json",
            "-o",
            "-",
        ]);
        command.args([
            "-r",
            &options.rate.to_string(),
            "-d",
            &format!("{}", options.window + AFTER_WINDOW),
        ]);
        command.args(["--debuginfod=off"]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let (Some(output), Some(said)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(Error::new(ErrorKind::Io, "the sampler has no output").hint("try again"));
        };
        let mut sampler = Sampler {
            child,
            output,
            said: BufReader::new(said),
        };
        let (mut all, mut line) = (String::new(), String::new());
        while sampler.said.read_line(&mut line).is_ok_and(|length| length > 0) {
            if line.contains(": sampling ") && line.contains(" Hz (") {
                return Ok(Ok(sampler));
            }
            all.push_str(&line);
            line.clear();
        }
        let _ = sampler.child.wait();
        // Without what to type: that is about the sampler's own arguments.
        let why = all.split("\n  try:").next().unwrap_or_default();
        let why = why.trim().trim_start_matches("nativeprof: ");
        Ok(Err(if why.is_empty() { "it exited silently" } else { why }.into()))
    }

    /// The profile.
    ///
    /// # Errors
    /// `Io` or `Data` if it crashed.
    pub fn finish(mut self) -> Result<Profile> {
        let mut bytes = Vec::new();
        let read = self.output.read_to_end(&mut bytes);
        let mut said = String::new();
        let _ = self.said.read_to_string(&mut said); // for the error alone
        let done = self.child.wait();
        if read.is_ok()
            && done.is_ok_and(|status| status.success())
            && let Ok(profile) = json::read(&bytes)
        {
            return Ok(profile);
        }
        Err(Error::new(ErrorKind::Data, "the sampler crashed")
            .why(said.trim())
            .hint("check permissions with `nativeprof doctor`"))
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it has ended, unless something failed
        let _ = self.child.wait();
    }
}
