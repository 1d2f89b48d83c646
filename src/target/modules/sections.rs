//! Sections of a file, for unwinding.

use std::sync::Arc;

use object::{Object, ObjectSection, ObjectSymbol, SectionKind, SymbolKind};

use super::{MAX_SECTION, MAX_SYMBOLS, Module};
use crate::code_map::{CodeSection, Sections};

/// What the unwinder reads of a file.
pub struct ModuleSections(pub Arc<Module>);

impl Sections for ModuleSections {
    fn section(&mut self, name: &str) -> Option<CodeSection> {
        self.0.section(name)
    }

    fn functions(&mut self) -> Vec<(u64, u64)> {
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
    }
}
