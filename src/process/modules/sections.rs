//! Sections of a file, for unwinding.

use std::sync::Arc;

use object::{Object, ObjectSection, ObjectSymbol, SectionKind, SymbolKind};
use symbolize::{SegmentSection, segment_sections};

use super::{MAX_SECTION, MAX_SYMBOLS, Module};
use crate::code_map::{CodeSection, Sections};

/// What the unwinder reads of a file.
pub struct ModuleSections(pub Arc<Module>);

impl Module {
    /// Whether it has no section headers, but code.
    fn is_headerless(&self) -> bool {
        !self.segments.is_empty() && self.elf(|e| e.sections().next().is_none()) == Some(true)
    }

    /// The first section that the program headers show and `is_wanted`, in a file without section headers.
    pub(super) fn segment_section(&self, is_wanted: impl Fn(&SegmentSection) -> bool) -> Option<CodeSection> {
        self.is_headerless().then_some(())?;
        let read = |offset, size| {
            let mut bytes = vec![0; usize::try_from(size).ok().filter(|_| size <= MAX_SECTION)?];
            (self.content.read_at(offset, &mut bytes).ok()? == bytes.len()).then_some(bytes)
        };
        let all = segment_sections(&read);
        let s = all.iter().find(|s| is_wanted(s))?;
        Some(CodeSection {
            svma: s.addr,
            bytes: read(s.offset, s.size)?,
        })
    }

    /// The functions that the dynamic symbols of a file without section headers name: they refer to sections that are
    /// not there.
    fn exported_functions(&self) -> Vec<(u64, u64)> {
        let is_code = |at: u64| self.segments.iter().any(|s| at >= s.svma && at - s.svma < s.size);
        let names = self.names(".dynsym", ".dynstr");
        let functions = names.iter().filter(|(_, at, _)| is_code(*at));
        functions.map(|(_, at, size)| (at, size)).collect()
    }
}

impl Sections for ModuleSections {
    fn section(&mut self, name: &str) -> Option<CodeSection> {
        self.0.section(name)
    }

    fn functions(&mut self) -> Vec<(u64, u64)> {
        let exported = if self.0.is_headerless() {
            self.0.exported_functions()
        } else {
            Vec::new()
        };
        self.0
            .elf(|e| {
                let code: Vec<_> = e
                    .sections()
                    .filter(|s| s.kind() == SectionKind::Text)
                    .map(|s| s.address()..s.address().saturating_add(s.size()))
                    .collect();
                let mut all: Vec<(u64, u64)> = e
                    .symbols()
                    .chain(e.dynamic_symbols())
                    .take(MAX_SYMBOLS)
                    // hand-written assembler often leaves the type out
                    .filter(|s| matches!(s.kind(), SymbolKind::Text | SymbolKind::Unknown) && s.is_definition())
                    .filter(|s| code.iter().any(|c| c.contains(&s.address())))
                    .map(|s| (s.address(), s.size()))
                    .chain(exported)
                    .collect();
                all.sort();
                // of several symbols at one address, the one with the largest size
                all.reverse();
                all.dedup_by_key(|s| s.0);
                all.reverse();
                all
            })
            .unwrap_or_default()
    }

    fn code(&mut self, svma: u64) -> Option<CodeSection> {
        self.0
            .elf(|e| {
                let s = e
                    .sections()
                    .find(|s| s.kind() == SectionKind::Text && svma >= s.address() && svma - s.address() < s.size())?;
                (s.size() <= MAX_SECTION).then_some(())?;
                Some(CodeSection {
                    svma: s.address(),
                    bytes: s.data().ok()?.to_vec(),
                })
            })
            .flatten()
            .or_else(|| {
                let has_it = |s: &SegmentSection| s.name == ".text" && svma >= s.addr && svma - s.addr < s.size;
                self.0.segment_section(has_it)
            })
    }
}
