//! Where the functions, linkage stubs and linkage tables of a file are, by its call frame tables, symbols and sections.

use std::ops::Range;

use gimli::{BaseAddresses, CieOrFde, EhFrame, LittleEndian, UnwindSection};
use object::{Object, ObjectSection, ObjectSymbol, SymbolKind};

use crate::process::modules::Module;

/// Functions of a file, entries of its tables, and sections, at most.
const MAX_FUNCTIONS: usize = 8 << 20;
const MAX_SECTIONS: usize = 1 << 16;
/// Symbols before an address that may still contain it.
const MAX_OVERLAPS: usize = 16;

/// Addresses are those of the file (svma).
#[derive(Debug, Default)]
pub struct Functions {
    /// By call frame tables, and by symbols with a size; each sorted.
    tables: Vec<Range<u64>>,
    symbols: Vec<Range<u64>>,
    /// Sections of linkage stubs, with whether only the stubs of another one are bound when they are first called.
    stubs: Vec<(Range<u64>, bool)>,
    /// Sections with the addresses that linkage stubs jump to.
    slots: Vec<Range<u64>>,
}

impl Functions {
    pub fn read(module: &Module) -> Functions {
        let mut functions = Functions::default();
        if let Some(section) = module.section_untracked(".eh_frame") {
            functions.tables = tables(section.svma, &section.bytes);
        }
        module.elf(|e| {
            for section in e.sections().take(MAX_SECTIONS) {
                let range = section.address()..section.address().saturating_add(section.size());
                match section.name_bytes().unwrap_or_default() {
                    name if name.starts_with(b".plt") => functions.stubs.push((range, name == b".plt.sec")),
                    name if name.starts_with(b".got") => functions.slots.push(range),
                    _ => {}
                }
            }
            let symbols = e.symbols().chain(e.dynamic_symbols()).take(MAX_FUNCTIONS);
            let sized = symbols.filter(|s| s.kind() == SymbolKind::Text && s.is_definition() && s.size() > 0);
            functions.symbols = sized
                .map(|s| s.address()..s.address().saturating_add(s.size()))
                .collect();
        });
        for ranges in [&mut functions.tables, &mut functions.symbols] {
            ranges.sort_unstable_by_key(|f| (f.start, f.end));
            ranges.dedup();
        }
        functions
    }

    /// The function that contains the address. Linkage stubs are none.
    pub fn at(&self, svma: u64) -> Option<Range<u64>> {
        if self.stub(svma).is_some() {
            return None;
        }
        containing(&self.tables, svma)
            .next()
            .or_else(|| containing(&self.symbols, svma).next())
            .cloned()
    }

    /// Does one function contain both addresses?
    pub fn is_same(&self, a: u64, b: u64) -> bool {
        let both = |ranges: &[Range<u64>]| containing(ranges, a).any(|f| f.contains(&b));
        self.stub(a).is_none() && (both(&self.tables) || both(&self.symbols))
    }

    /// Does a function, or a linkage stub, begin at this address?
    pub fn is_entry(&self, svma: u64) -> bool {
        self.stub(svma)
            .is_some_and(|(section, _)| (svma - section.start).is_multiple_of(8))
            || self.at(svma).is_some_and(|f| f.start == svma)
    }

    /// The section of linkage stubs that contains the address.
    fn stub(&self, svma: u64) -> Option<&(Range<u64>, bool)> {
        self.stubs.iter().find(|(section, _)| section.contains(&svma))
    }

    /// Where a linkage stub's jump, which ends at `next`, leads as long as its function has not been searched for;
    /// `None` if it is no jump of a linkage stub. x86-64: to the next instruction, or from `.plt.sec` to the stub in
    /// `.plt` with the same number, after its first one (x86-64 psABI, "Procedure Linkage Table"). aarch64: to the
    /// start of the section.
    pub fn unbound(&self, jump: u64, next: u64) -> Option<u64> {
        /// Bytes of a stub.
        const STUB: u64 = 16;
        let (section, is_second) = self.stub(jump)?;
        if cfg!(target_arch = "aarch64") {
            return Some(section.start);
        }
        if !is_second {
            return Some(next);
        }
        let first = self
            .stubs
            .iter()
            .filter(|(_, second)| !second)
            .map(|(s, _)| s.start)
            .min()?;
        let number = (jump - section.start) / STUB;
        first.checked_add(number.checked_add(1)?.checked_mul(STUB)?)
    }

    /// Does only the dynamic linker write the word at this address?
    pub fn is_linkage_slot(&self, svma: u64) -> bool {
        self.slots.iter().any(|section| section.contains(&svma))
    }
}

/// The ranges that contain an address, the last one first.
fn containing(ranges: &[Range<u64>], svma: u64) -> impl Iterator<Item = &Range<u64>> {
    let after = ranges.partition_point(|f| f.start <= svma);
    let before = ranges[..after].iter().rev().take(MAX_OVERLAPS);
    before.filter(move |f| f.contains(&svma))
}

/// Functions by call frame tables.
fn tables(svma: u64, bytes: &[u8]) -> Vec<Range<u64>> {
    let bases = BaseAddresses::default().set_eh_frame(svma);
    let section = EhFrame::new(bytes, LittleEndian);
    let mut entries = section.entries(&bases);
    let mut found = Vec::new();
    while let Ok(Some(entry)) = entries.next() {
        if found.len() >= MAX_FUNCTIONS {
            break;
        }
        if let CieOrFde::Fde(entry) = entry
            && let Ok(fde) = entry.parse(EhFrame::cie_from_offset)
            && fde.initial_address() < fde.end_address()
        {
            found.push(fde.initial_address()..fde.end_address());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_and_linkage_stubs() {
        let functions = Functions {
            tables: vec![0x1000..0x1100, 0x1100..0x1180, 0x5000..0x5040],
            symbols: vec![0x1100..0x1300, 0x2000..0x2010],
            stubs: vec![(0x5000..0x5040, false), (0x6000..0x6030, true)],
            slots: std::iter::once(0x9000..0x9100).collect(),
        };
        assert_eq!(functions.at(0x10ff), Some(0x1000..0x1100));
        assert_eq!(functions.at(0x1200), Some(0x1100..0x1300));
        assert_eq!(functions.at(0x5010), None); // one table covers all stubs
        assert_eq!(functions.at(0x3000), None);
        for (a, b, same) in [
            (0x1000, 0x10ff, true),
            (0x10ff, 0x1100, false),
            (0x1100, 0x1200, true),
            (0x2000, 0x2010, false),
            (0x5000, 0x5010, false),
        ] {
            assert_eq!(functions.is_same(a, b), same, "{a:#x} {b:#x}");
        }
        assert!(functions.is_entry(0x1100) && functions.is_entry(0x5010));
        assert!(!functions.is_entry(0x1101) && !functions.is_entry(0x3000));
        assert!(functions.is_linkage_slot(0x90ff) && !functions.is_linkage_slot(0x9100));
        assert_eq!(functions.unbound(0x1000, 0x1006), None);
        let [first, second] = [(0x5010, 0x5016), (0x6014, 0x601b)].map(|(at, next)| functions.unbound(at, next));
        let expected = if cfg!(target_arch = "aarch64") {
            [0x5000, 0x6000]
        } else {
            [0x5016, 0x5020]
        };
        assert_eq!([first, second], expected.map(Some));
    }
}
