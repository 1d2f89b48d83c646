#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod debugfile;
#[cfg(feature = "debuginfod")]
mod debuginfod;
mod demangle;
mod die;
mod dwarf;
mod elf;
mod error;
mod functions;
mod info;
mod jit;
mod jit_object;
mod kernel;
mod lines;
mod module;
mod plt;
mod split;
mod symbols;

use std::sync::Arc;

pub use debugfile::Files;
#[cfg(feature = "debuginfod")]
pub use debuginfod::{Debuginfod, Limits};
pub use demangle::demangle;
pub use error::{Error, ErrorKind, Unknown};
pub use jit::JitCode;
pub use jit_object::JitObject;
pub use kernel::{Kernel, KernelError, KernelSymbol};
pub use module::{Function, Module, Sources};

/// One function at an address: the real one, or one that the compiler inlined into it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Symbol {
    /// For people: see [`demangle`].
    pub name: Arc<str>,
    /// As it stands in the file, with suffixes like `.cold`. For a PLT stub the same as `name`.
    pub raw: Arc<str>,
    /// Stated address of the first byte of the **real** function; the same for all functions inlined into it. A part that
    /// was split off (`.cold`) has its own start.
    pub start: u64,
    /// Bytes from `start` that belong to the real function.
    pub size: u64,
    /// Source file with its directory, as the compiler was told. For the innermost function the place of the address
    /// itself, for those around it the place of the call.
    pub file: Option<Arc<str>>,
    /// Line in `file`, from 1.
    pub line: Option<u32>,
    /// Whether this is an inlined function.
    pub inlined: bool,
}

/// A raw name and what people call it.
#[derive(Debug, Clone)]
pub(crate) struct Name {
    raw: Arc<str>,
    display: Arc<str>,
}

impl Name {
    fn new(raw: &str) -> Name {
        let display = demangle(raw);
        let raw: Arc<str> = raw.into();
        let display = if *display == *raw { raw.clone() } else { display.into() };
        Name { raw, display }
    }
}

#[cfg(test)]
mod tests {
    /// Symbols are resolved on a thread of their own.
    #[test]
    fn modules_can_be_sent() {
        fn is_send<T: Send>() {}
        is_send::<super::Module>();
        is_send::<super::Kernel>();
    }
}
