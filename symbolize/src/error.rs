//! What can go wrong, and what can remain unknown.

use std::fmt;

/// Why a file cannot be used at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

/// For programs: what sort of [`Error`] it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The file could not be read.
    Io,
    /// It is no ELF file.
    NotElf,
    /// It is an ELF file of a sort that is not read: 32 bits, big endian, object file, core dump.
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

    /// What sort of error it is.
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

/// Why an address has no name. A value, not a failure: profiles show it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unknown {
    /// The file has no function symbols and no DWARF.
    NoSymbols,
    /// It has some, but none covers the address.
    NotInAnyFunction,
    /// Nothing of the file is loaded at the address.
    OutsideFile,
    /// Symbols or DWARF could not be read, so that the address may well have a name.
    Corrupt(Error),
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unknown::NoSymbols => f.write_str("the file has no symbols"),
            Unknown::NotInAnyFunction => f.write_str("in no known function"),
            Unknown::OutsideFile => f.write_str("outside of the file"),
            Unknown::Corrupt(error) => write!(f, "symbols cannot be read: {error}"),
        }
    }
}

impl std::error::Error for Unknown {}
