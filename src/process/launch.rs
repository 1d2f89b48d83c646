//! Starts a command, pauses it just before `exec`, and releases it when everything is ready.

use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;

use super::command;
use crate::error::{Error, ErrorKind, Result};
use crate::event::Pid;
use crate::privileges::credentials::User;
use crate::sys::interrupts;
use crate::sys::spawn;
use crate::sys::spawn::{GroupProbe, Streams, WaitingProcess};

/// A started command.
pub struct Launched {
    name: String,
    process: WaitingProcess,
    released: bool,
    /// It is terminated when nativeprof ends.
    detached: bool,
    /// Without it, signals of a terminal are distinguished only.
    _probe: Option<GroupProbe>,
}

impl Launched {
    /// Creates the process, which waits before `exec`. It ends if nativeprof ends first.
    ///
    /// Must be called before this process changes anything that a command inherits: signals, limits, capabilities.
    ///
    /// `user` is the user that nativeprof has switched to (see `privileges`): the command gets that user's home and
    /// names in its environment. The rest of the environment is unchanged.
    ///
    /// # Errors
    /// No such command, or the process could not be created.
    pub fn prepare(command: &[String], user: Option<&User>, streams: Streams) -> Result<Launched> {
        let name = command.first().cloned().unwrap_or_default();
        if !exists(&name) {
            let shown = if name.is_empty() { "''" } else { &name };
            return Err(
                Error::new(ErrorKind::NoSuchCommand, format!("no such command: {shown}"))
                    .why(if name.contains('/') {
                        "the file does not exist"
                    } else {
                        "not found in PATH"
                    })
                    .hint(how_to_run(&name).unwrap_or_else(|| "give its path, or check the spelling".into())),
            );
        }
        let environment: Vec<_> = user.iter().flat_map(|user| environment(user)).collect();
        let process = spawn::spawn(command, &environment, streams).map_err(|e| match e.kind() {
            io::ErrorKind::InvalidInput => Error::io("cannot start the command", e),
            _ => Error::not_started("cannot start the command", e),
        })?;
        Ok(Launched {
            name,
            process,
            released: false,
            detached: streams != Streams::Ours,
            _probe: GroupProbe::start().ok(),
        })
    }

    /// From now on signals that nativeprof receives are passed on to the command, see [`interrupts`].
    pub fn pass_on_signals(&self) {
        interrupts::pass_on_to(self.process.pid, self.detached);
    }

    pub fn pid(&self) -> Pid {
        self.process.pid
    }

    /// The file that it will run, if that can be known.
    pub fn program(&self) -> Option<PathBuf> {
        command::program(&self.name)
    }

    /// Lets the process execute the command.
    ///
    /// # Errors
    /// If the command cannot be executed.
    pub fn release(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.released, true) {
            return Ok(());
        }
        self.process.go.write_all(&[1]).map_err(|e| {
            // It waits with the actions for signals that a command finds: those that come during set-up end it.
            let signal = match e.kind() {
                io::ErrorKind::BrokenPipe => self.process.wait().ok().and_then(|status| status.signal()),
                _ => None,
            };
            let (kind, why) = match signal {
                Some(signal) => (ErrorKind::Killed(signal as u8), format!("signal {signal} ended it")),
                None => (ErrorKind::Io, e.to_string()),
            };
            Error::new(kind, "the command was killed before it started")
                .why(why)
                .hint("run it again; send signals only after sampling has started")
        })?;
        self.process.executed().map_err(|e| {
            Error::new(ErrorKind::NotExecutable, format!("cannot run {}", self.name))
                .why(e.to_string())
                .hint(how_to_run(&self.name).unwrap_or_else(|| "check that the file is executable".into()))
        })
    }

    /// Waits for the command to exit: its exit code, or 128 plus the number of the signal that killed it; and a line if
    /// it failed.
    ///
    /// # Errors
    /// None in practice.
    pub fn wait(self) -> Result<(u8, Option<String>)> {
        if !self.released {
            return Ok((0, None));
        }
        let status = self
            .process
            .wait()
            .map_err(|e| Error::io("cannot wait for the command", e))?;
        let code = match (status.code(), status.signal()) {
            (Some(code), _) => code,
            (None, signal) => 128 + signal.unwrap_or(0),
        };
        Ok((code as u8, how_it_ended(&self.name, status)))
    }
}

fn how_it_ended(name: &str, status: ExitStatus) -> Option<String> {
    match (status.code(), status.signal()) {
        (Some(0), _) => None,
        (Some(code), _) => Some(format!("{name} exited with code {code}")),
        (None, Some(signal)) => Some(format!("{name} was killed by signal {signal}")),
        (None, None) => Some(format!("{name} exited")),
    }
}

/// The variables that sudo has set to root's, with the user's values. Those the system does not know are left out.
fn environment(user: &User) -> impl Iterator<Item = (&'static str, &str)> {
    let all = [
        ("HOME", &user.home),
        ("SHELL", &user.shell),
        ("USER", &user.name),
        ("LOGNAME", &user.name),
    ];
    all.into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| (name, value.as_str()))
}

/// How to run a file that is not a command: a Python script, or a program in the current directory.
fn how_to_run(name: &str) -> Option<String> {
    let path = std::path::Path::new(name);
    if path.is_dir() {
        return Some("it is a directory: give the path of a program in it".into());
    }
    if path.extension().is_some_and(|e| e == "py") {
        return Some(format!("nativeprof record -- python3 {name}"));
    }
    (!name.contains('/') && path.is_file()).then(|| format!("nativeprof record -- ./{name}"))
}

fn exists(name: &str) -> bool {
    if name.contains('/') {
        // One that cannot be looked up may exist: what refuses to run it says why.
        return std::path::Path::new(name).try_exists().unwrap_or(true);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(name).is_file())
}
