//! Native unwinding: registers and a stack copy in, frames with their stack intervals out.
//!
//! Knows no process, no file and no symbol name: sections come in through [`Sections`], the map of code through
//! [`CodeMap`]. Never panics and always ends, whatever the bytes are.

use crate::arch::Regs;
use crate::sample::{Cut, ModuleId, NativeFrame, StackBytes};

/// A piece of an ELF file at its stated address.
#[derive(Clone, Debug, Default)]
pub struct Section {
    pub svma: u64,
    pub bytes: Vec<u8>,
}

/// What the unwinder may ask of one ELF file; every answer may be missing. Asked at most once each.
pub trait Sections {
    /// A section by name (`.eh_frame`, `.eh_frame_hdr`, `.debug_frame`), decompressed.
    fn section(&mut self, name: &str) -> Option<Section>;
    /// Start and size of the known functions, sorted by start.
    fn functions(&mut self) -> Vec<(u64, u64)>;
    /// The executable section that holds `svma`.
    fn code(&mut self, svma: u64) -> Option<Section>;
}

/// The code of one process at one instant.
pub trait CodeMap {
    /// File and load bias of executable memory at `avma`.
    fn find(&self, avma: u64) -> Option<(ModuleId, u64)>;
    /// Is `avma` executable memory at all (also without a file behind it)?
    fn is_code(&self, avma: u64) -> bool;
}

/// Unwinds stacks; keeps the unwind rules of all files it has seen.
#[derive(Default)]
pub struct Unwinder {}

impl Unwinder {
    /// Makes the rules of a file known. Nothing is parsed before a frame needs it.
    pub fn add(&mut self, _module: ModuleId, _sections: Box<dyn Sections>) {}

    /// Appends the frames of a stack to `out`, innermost first. `Err` says why it ends before the thread's first
    /// frame; the frames found so far stay.
    pub fn unwind(
        &mut self,
        _code: &dyn CodeMap,
        _regs: &Regs,
        _stack: &StackBytes,
        _out: &mut Vec<NativeFrame>,
    ) -> Result<(), Cut> {
        Err(Cut::NoUnwindInfo)
    }
}
