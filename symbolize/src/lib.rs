#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod cython;
mod data_objects;
mod debug_info;
mod debugfile;
#[cfg(feature = "debuginfod")]
mod debuginfod;
mod demangle;
mod dwarf;
mod dwarf_util;
mod elf;
mod error;
mod frame_tables;
mod functions;
mod go_table;
mod itanium;
mod jit;
mod jit_object;
mod kernel;
mod lines;
mod module;
mod plt;
mod segments;
mod split_dwarf;
mod symbols;

use std::sync::Arc;

pub use debugfile::Files;
#[cfg(feature = "debuginfod")]
pub use debuginfod::{Debuginfod, Limits};
pub use demangle::demangle;
pub use error::{Error, ErrorKind, Reason};
pub use go_table::{GO_TABLE_SECTIONS, GoFrame, GoFunction, GoSections, GoTable};
pub use jit::JitCode;
pub use jit_object::JitObject;
pub use kernel::{Kernel, KernelError, KernelSymbol};
pub use module::{Function, Module, SymbolSources};
pub use segments::{SegmentSection, segment_sections};

/// One function at an address: the real one, or one that the compiler inlined into it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Symbol {
    /// Display name: see [`demangle`].
    pub name: Arc<str>,
    /// Name in the file, with suffixes like `.cold`. For a PLT stub the same as `name`.
    pub raw: Arc<str>,
    /// Stated address of the first byte of the **real** function; the same for all functions inlined into it. A part
    /// that was split off (`.cold`) has its own start.
    pub start: u64,
    /// Bytes from `start` that belong to the real function.
    pub size: u64,
    /// Source file with its directory, as passed to the compiler. For the innermost function the location of the
    /// address itself, for the outer ones the location of the call.
    pub file: Option<Arc<str>>,
    /// Line in `file`, from 1.
    pub line: Option<u32>,
    /// Whether this is an inlined function.
    pub inlined: bool,
}

/// A variable with a fixed address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataObject {
    /// Display name: see [`demangle`].
    pub name: Arc<str>,
    /// Stated address of the first byte.
    pub start: u64,
    /// Bytes.
    pub size: u64,
}

/// A raw name and its display name.
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
    /// Modules can be sent to the thread that symbolizes.
    #[test]
    fn modules_can_be_sent() {
        fn is_send<T: Send>() {}
        is_send::<super::Module>();
        is_send::<super::Kernel>();
    }
}
