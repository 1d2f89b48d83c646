//! Errors, and reasons for missing names.

use std::fmt;

/// Why a file cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

/// The kind of an [`Error`], for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The file could not be read.
    Io,
    /// It is not an ELF file.
    NotElf,
    /// An unsupported kind of ELF file: 32 bits, big endian, object file, core dump.
    Unsupported,
    /// It is shorter than its headers say.
    Truncated,
    /// It contradicts itself.
    Corrupt,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error {
            kind,
            message: message.into(),
        }
    }

    pub(crate) fn io(error: std::io::Error) -> Error {
        Error::new(ErrorKind::Io, format!("cannot read: {error}"))
    }

    /// The kind of error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// Why an address has no name. A value, not an error: profiles show it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The file has no function symbols and no DWARF.
    NoSymbols,
    /// It has some, but none covers the address.
    NotInAnyFunction,
    /// The address is not in a loaded segment.
    OutsideFile,
    /// Symbols or DWARF could not be read, so the address may have a name that is not known.
    Corrupt(Error),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::NoSymbols => f.write_str("the file has no symbols"),
            Reason::NotInAnyFunction => f.write_str("not in any known function"),
            Reason::OutsideFile => f.write_str("outside of the file"),
            Reason::Corrupt(error) => write!(f, "symbols cannot be read: {error}"),
        }
    }
}

impl std::error::Error for Reason {}
