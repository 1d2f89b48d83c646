//! Shared by the unwinder's tests: ELF files in the form that the unwinder reads.

#![allow(dead_code)] // Each test file uses its part.

use nativeprof::frame::ModuleId;
use nativeprof::unwind::{CodeMap, CodeSection, Sections};
use object::{Object, ObjectSection, ObjectSegment, ObjectSymbol, SectionKind, SymbolKind};
use std::path::Path;

/// One ELF file, read completely.
#[derive(Clone)]
pub struct Elf {
    pub data: &'static [u8],
    /// Hide the symbols.
    pub stripped: bool,
}

impl Elf {
    pub fn open(path: &Path) -> Elf {
        let data = std::fs::read(path).unwrap_or_else(|e| panic!("this test needs {}: {e}", path.display()));
        Elf {
            data: data.leak(),
            stripped: false,
        }
    }

    pub fn file(&self) -> object::File<'static> {
        object::File::parse(self.data).expect("an ELF file")
    }

    /// Executable segments: file offset, svma, size.
    pub fn executable(&self) -> Vec<(u64, u64, u64)> {
        let flags = |s: &object::Segment| match s.flags() {
            object::SegmentFlags::Elf { p_flags, .. } => p_flags.0 & 1 != 0,
            _ => false,
        };
        let all = self.file();
        all.segments()
            .filter(flags)
            .map(|s| (s.file_range().0, s.address(), s.size()))
            .collect()
    }

    pub fn symbol(&self, name: &str) -> u64 {
        let file = self.file();
        let found = file
            .symbols()
            .chain(file.dynamic_symbols())
            .find(|s| s.name() == Ok(name));
        found.unwrap_or_else(|| panic!("symbol {name}")).address()
    }
}

impl Sections for Elf {
    fn section(&mut self, name: &str) -> Option<CodeSection> {
        let file = self.file();
        let section = file.section_by_name(name)?;
        Some(CodeSection {
            svma: section.address(),
            bytes: section.uncompressed_data().ok()?.into_owned(),
        })
    }

    fn functions(&mut self) -> Vec<(u64, u64)> {
        if self.stripped {
            return Vec::new();
        }
        let file = self.file();
        let mut all: Vec<_> = (file.symbols().chain(file.dynamic_symbols()))
            .filter(|s| s.kind() == SymbolKind::Text && s.is_definition())
            .map(|s| (s.address(), s.size()))
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    fn code(&mut self, svma: u64) -> Option<CodeSection> {
        let file = self.file();
        let section = file
            .sections()
            .find(|s| s.kind() == SectionKind::Text && svma.wrapping_sub(s.address()) < s.size())?;
        Some(CodeSection {
            svma: section.address(),
            bytes: section.data().ok()?.to_vec(),
        })
    }
}

/// An executable mapping: start, end, and file with bias.
pub type Mapping = (u64, u64, Option<(ModuleId, u64)>);

/// Executable mappings, and the bytes of those without a file, with their addresses.
#[derive(Default)]
pub struct Maps(pub Vec<Mapping>, pub Vec<(u64, Vec<u8>)>);

impl CodeMap for Maps {
    fn find(&self, avma: u64) -> Option<(ModuleId, u64)> {
        self.0.iter().find(|m| avma >= m.0 && avma < m.1)?.2
    }

    fn is_code(&self, avma: u64) -> bool {
        self.0.iter().any(|m| avma >= m.0 && avma < m.1)
    }

    fn read(&self, avma: u64, out: &mut [u8]) -> usize {
        let from = |(start, bytes): &'_ (u64, Vec<u8>)| {
            let at = usize::try_from(avma.checked_sub(*start)?).ok()?;
            bytes.get(at..).map(<[u8]>::to_vec)
        };
        let bytes = self.1.iter().find_map(from).unwrap_or_default();
        let len = bytes.len().min(out.len());
        out[..len].copy_from_slice(&bytes[..len]);
        len
    }
}

/// xorshift64*: the same numbers every time.
pub struct Rng(pub u64);

impl Rng {
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 8
    }
}
