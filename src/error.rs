//! Errors that say what, why, and what to type.

use std::fmt;

pub type Result<T> = std::result::Result<T, Error>;

/// What kind of failure, for programs; people read the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The words of the command line are off.
    Usage,
    NoSuchProcess,
    NotPermitted,
    /// Something this system, CPU or target cannot do.
    Unsupported,
    Io,
    /// Bytes that do not mean what they should.
    Data,
}

/// One line what, one line why, one line what to type.
#[derive(Clone, Debug)]
pub struct Error {
    pub kind: Kind,
    pub what: String,
    pub why: String,
    pub hint: String,
}

impl Error {
    pub fn new(kind: Kind, what: impl Into<String>) -> Error {
        Error {
            kind,
            what: what.into(),
            why: String::new(),
            hint: String::new(),
        }
    }

    pub fn why(mut self, why: impl Into<String>) -> Error {
        self.why = why.into();
        self
    }

    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        self.hint = hint.into();
        self
    }

    /// An I/O failure with what was being done.
    pub fn io(what: impl Into<String>, e: std::io::Error) -> Error {
        let kind = if e.kind() == std::io::ErrorKind::PermissionDenied {
            Kind::NotPermitted
        } else {
            Kind::Io
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
