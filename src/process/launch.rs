//! A command that is started, held just before it becomes itself, and let go when everything is ready.

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use super::credentials::User;
use super::spawn::{self, Waiting};
use crate::error::{Error, Kind, Result};
use crate::sample::Pid;

/// A started command.
pub struct Launched {
    name: String,
    process: Waiting,
    released: bool,
}

impl Launched {
    /// Makes the process; it waits before `exec`. If nativeprof ends first, so does it.
    ///
    /// To be called before anything of this process is changed that a command inherits: signals, limits, rights.
    ///
    /// `user` is whom nativeprof has become since it was called (see `privilege`): the command finds that user's home
    /// and names in its environment. Everything else there is as it was given.
    ///
    /// # Errors
    /// No such command, or no process could be made.
    pub fn prepare(command: &[String], user: Option<&User>) -> Result<Launched> {
        let failed = |e| Error::io("cannot start the command", e);
        let name = command.first().cloned().unwrap_or_default();
        if !exists(&name) {
            return Err(Error::new(Kind::Io, format!("no such command: {name}"))
                .why(if name.contains('/') {
                    "there is no such file"
                } else {
                    "it is in no folder of PATH"
                })
                .hint("give its path, or check the spelling"));
        }
        let environment: Vec<_> = user.iter().flat_map(|user| environment(user)).collect();
        let process = spawn::spawn(command, &environment).map_err(failed)?;
        Ok(Launched {
            name,
            process,
            released: false,
        })
    }

    pub fn pid(&self) -> Pid {
        self.process.pid
    }

    /// Lets the process become the command.
    ///
    /// # Errors
    /// If the command cannot be executed.
    pub fn release(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.released, true) {
            return Ok(());
        }
        self.process.go.write_all(&[1]).map_err(|e| {
            // It waits with the actions for signals that a command finds: Ctrl-C during set-up reaches it too.
            Error::io("the command was ended before it began", e).hint("start it again; Ctrl-C ends the sampling")
        })?;
        self.process
            .executed()
            .map_err(|e| Error::io(format!("cannot run {}", self.name), e).hint("check that the file may be executed"))
    }

    /// Waits for the command's end; says so in a line if it did not end well.
    ///
    /// # Errors
    /// None in practice.
    pub fn wait(self) -> Result<Option<String>> {
        if !self.released {
            return Ok(None);
        }
        let status = self
            .process
            .wait()
            .map_err(|e| Error::io("cannot wait for the command", e))?;
        Ok(how_it_ended(&self.name, status))
    }
}

fn how_it_ended(name: &str, status: ExitStatus) -> Option<String> {
    match (status.code(), status.signal()) {
        (Some(0), _) => None,
        (Some(code), _) => Some(format!("{name} ended with exit code {code}")),
        (None, Some(signal)) => Some(format!("{name} was ended by signal {signal}")),
        (None, None) => Some(format!("{name} ended")),
    }
}

/// What sudo has set to root's, as the user has it. What the system does not know stays.
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

fn exists(name: &str) -> bool {
    if name.contains('/') {
        return std::path::Path::new(name).exists();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
}
