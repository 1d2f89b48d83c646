//! The code of files and processes, as traits for the unwinder.

use crate::frame::ModuleId;

/// A section of an ELF file, with its address.
#[derive(Clone, Debug, Default)]
pub struct CodeSection {
    pub svma: u64,
    pub bytes: Vec<u8>,
}

impl CodeSection {
    pub(crate) fn contains(&self, svma: u64) -> bool {
        svma.checked_sub(self.svma)
            .is_some_and(|at| at < self.bytes.len() as u64)
    }

    pub(crate) fn end(&self) -> u64 {
        self.svma.saturating_add(self.bytes.len() as u64)
    }

    /// The bytes from `svma` on.
    pub(crate) fn from(&self, svma: u64) -> Option<&[u8]> {
        self.bytes.get(usize::try_from(svma.checked_sub(self.svma)?).ok()?..)
    }
}

/// Functions of one file at which other stacks than the thread's begin, or stacks are swapped. Ranges of svma.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Landmarks {
    /// The interpreter's eval function.
    pub eval: Vec<(u64, u64)>,
    /// Outermost function of each greenlet (`g_initialstub`), which its starter runs too, up to the switch.
    pub stub: Vec<(u64, u64)>,
    /// The function that it calls in the greenlet and only there (`inner_bootstrap`, greenlet 2.0 and later).
    pub bootstrap: Vec<(u64, u64)>,
    /// The swap of stacks: during it, stack and interpreter state may belong to different greenlets.
    pub switch: Vec<(u64, u64)>,
    /// Code to which the first function of a hand-made stack returns, from one byte before it.
    pub first: Vec<(u64, u64)>,
    /// The code at the file's entry point up to its call: the kernel starts a program, or its loader, there.
    pub entry: Vec<(u64, u64)>,
}

impl Landmarks {
    /// Is the address in one of these ranges?
    pub fn has(ranges: &[(u64, u64)], svma: u64) -> bool {
        ranges.iter().any(|(start, end)| (*start..*end).contains(&svma))
    }
}

/// Access to one ELF file for the unwinder; every result may be missing.
pub trait Sections: Send {
    /// A section by name (`.eh_frame`, `.eh_frame_hdr`, `.debug_frame`), decompressed.
    fn section(&mut self, name: &str) -> Option<CodeSection>;
    /// Start and size of the known functions, sorted by start.
    fn functions(&mut self) -> Vec<(u64, u64)>;
    /// The executable section that holds `svma`.
    fn code(&mut self, svma: u64) -> Option<CodeSection>;
}

/// The code of one process at one instant.
pub trait CodeMap {
    /// File and load bias of executable memory at `avma`.
    fn find(&self, avma: u64) -> Option<(ModuleId, u64)>;
    /// Is `avma` executable memory (possibly without a file)?
    fn is_code(&self, avma: u64) -> bool;
    /// Copies executable memory without a file, as much as is readable from `avma` on; returns the bytes copied. It is read
    /// later than the stack, and may have changed.
    fn read(&self, _avma: u64, _out: &mut [u8]) -> usize {
        0
    }
}
