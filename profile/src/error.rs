//! Errors that say what failed, why, and what to type.

use std::fmt;

/// A result with an [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// The kind of a failure, for callers; users read the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// Invalid arguments.
    Usage,
    /// No such process, or it has exited.
    NoSuchProcess,
    /// The command to run does not exist.
    NoSuchCommand,
    /// The command to run exists and cannot be executed.
    NotExecutable,
    /// A signal of this number ended the command before it started.
    Killed(u8),
    /// The user does not have a permission that is needed.
    NotPermitted,
    /// Not supported by this system, CPU or target.
    Unsupported,
    /// An operation of input or output failed.
    Io,
    /// Invalid data.
    Data,
}

/// One line each: what, why, and what to type.
#[derive(Clone, Debug)]
pub struct Error {
    /// The kind, for callers.
    pub kind: ErrorKind,
    /// What failed.
    pub what: String,
    /// Why it failed; empty if it is not known.
    pub why: String,
    /// What the user can do; empty if nothing is known to help.
    pub hint: String,
}

impl Error {
    /// An error without a reason and a hint.
    pub fn new(kind: ErrorKind, what: impl Into<String>) -> Error {
        Error {
            kind,
            what: what.into(),
            why: String::new(),
            hint: String::new(),
        }
    }

    /// The error with this reason.
    pub fn why(mut self, why: impl Into<String>) -> Error {
        self.why = why.into();
        self
    }

    /// The error with this hint.
    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        self.hint = hint.into();
        self
    }

    /// A PID that no process has.
    pub fn no_process(pid: u32) -> Error {
        Error::new(ErrorKind::NoSuchProcess, format!("no process {pid}"))
            .why("it has exited, or the PID is from another PID namespace (a container)")
            .hint("list Python processes with `pgrep -af python`")
    }

    /// A thread or process that could not be started.
    pub fn not_started(what: impl Into<String>, e: std::io::Error) -> Error {
        let is_limit = e.kind() == std::io::ErrorKind::WouldBlock; // EAGAIN, see clone(2)
        let error = Error::io(what, e);
        if is_limit {
            Error {
                why: "no more threads or processes are permitted: a limit of this user (ulimit -u), or of the container or service, \
                      is reached"
                    .into(),
                ..error
            }
            .hint("end other processes, or raise the limit: `ulimit -u`, `docker run --pids-limit`, `TasksMax=` of systemd")
        } else {
            error.hint("run `nativeprof doctor` to see what works on this machine")
        }
    }

    /// An I/O error, with the operation that failed.
    pub fn io(what: impl Into<String>, e: std::io::Error) -> Error {
        let kind = if e.kind() == std::io::ErrorKind::PermissionDenied {
            ErrorKind::NotPermitted
        } else {
            ErrorKind::Io
        };
        Error::new(kind, what).why(e.to_string())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if !self.why.is_empty() {
            write!(f, "\n  why: {}", self.why)?;
        }
        if !self.hint.is_empty() {
            write!(f, "\n  try: {}", self.hint)?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}
