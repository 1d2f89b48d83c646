//! Data objects (variables) of `.symtab` and `.dynsym`, found for a few addresses at a time: nothing is kept of the tables.

use std::collections::BTreeSet;

use crate::elf::{Elf, SHT_DYNSYM, SHT_NOBITS, SHT_SYMTAB, SectionHeader, cstr_at, u16_at, u32_at, u64_at};
use crate::symbols::MAX_NAME;
use crate::{DataObject, demangle};

const STT_NOTYPE: u8 = 0;
const STT_OBJECT: u8 = 1;
/// Bytes of names that are compared to choose between symbols of the same size.
const COMPARED: usize = 256;

/// A symbol that covers at least one of the addresses.
struct Candidate<'a> {
    start: u64,
    size: u64,
    /// GLOBAL before WEAK before LOCAL.
    rank: u8,
    /// The string table from the name on.
    name: &'a [u8],
}

impl Candidate<'_> {
    /// The beginning of the name: cheap for any length.
    fn compared_name(&self) -> &[u8] {
        let head = &self.name[..self.name.len().min(COMPARED)];
        head.split(|b| *b == 0).next().unwrap_or_default()
    }

    fn object(&self) -> Option<DataObject> {
        let raw = String::from_utf8_lossy(cstr_at(self.name, 0, MAX_NAME)?);
        Some(DataObject {
            name: demangle(&raw).into(),
            start: self.start,
            size: self.size,
        })
    }
}

/// The smallest object around each address: `.symtab` of `full`, which may be a debug file, and `.dynsym` of the file itself.
pub(crate) fn find(elf: &Elf, full: &Elf, svmas: &[u64]) -> Vec<Option<DataObject>> {
    let mut sorted: Vec<(u64, usize)> = svmas.iter().copied().zip(0..).collect();
    sorted.sort_unstable();
    let tables = [(full, SHT_SYMTAB), (elf, SHT_DYNSYM)];
    let tables: Vec<_> = tables.iter().filter_map(|(elf, kind)| read(elf, *kind)).collect();
    let mut candidates = Vec::new();
    for (elf, symbols, strings) in &tables {
        let symbols = symbols.chunks_exact(24);
        candidates.extend(symbols.filter_map(|entry| candidate(elf, entry, strings, &sorted)));
    }
    candidates.sort_by_key(|c| (c.size, c.rank));
    let mut out = vec![None; svmas.len()];
    // Each address is named once, so that symbols without end which cover all of them cost little.
    let mut unnamed: BTreeSet<usize> = (0..sorted.len()).collect();
    for group in candidates.chunk_by_mut(|a, b| (a.size, a.rank) == (b.size, b.rank)) {
        group.sort_by_cached_key(|c| {
            let name = c.compared_name();
            (
                name.iter().take_while(|b| **b == b'_').count(),
                name.len(),
                name.to_vec(),
            )
        });
        for candidate in group {
            let covered: Vec<usize> = unnamed.range(covered(&sorted, candidate)).copied().collect();
            if covered.is_empty() {
                continue;
            }
            let object = candidate.object();
            for at in covered {
                unnamed.remove(&at);
                out[sorted[at].1].clone_from(&object);
            }
        }
    }
    out
}

/// A symbol table and its strings.
fn read(elf: &Elf, kind: u32) -> Option<(&Elf, Vec<u8>, Vec<u8>)> {
    let table = elf.sections.iter().find(|s| s.kind == kind)?;
    let strings = elf.sections.get(table.link as usize).filter(|s| s.kind != SHT_NOBITS)?;
    Some((elf, elf.raw_data(table).ok()?, elf.raw_data(strings).ok()?))
}

/// Which of the addresses, by their index, a symbol covers.
fn covered(sorted: &[(u64, usize)], candidate: &Candidate<'_>) -> std::ops::Range<usize> {
    let end = candidate.start.saturating_add(candidate.size);
    let before = |limit: u64| sorted.partition_point(|(svma, _)| *svma < limit);
    before(candidate.start)..before(end)
}

/// One `Elf64_Sym` (gABI, "Symbol Table"), if it is a sized object in a section that is loaded and has no code, around any of
/// the addresses. (Variables of threads have offsets instead of addresses, and a type of their own.)
fn candidate<'a>(elf: &Elf, entry: &[u8], strings: &'a [u8], sorted: &[(u64, usize)]) -> Option<Candidate<'a>> {
    let info = *entry.get(4)?;
    if ![STT_NOTYPE, STT_OBJECT].contains(&(info & 15)) {
        return None;
    }
    let (name, start, size) = (u32_at(entry, 0)?, u64_at(entry, 8)?, u64_at(entry, 16)?);
    let candidate = Candidate {
        start,
        size,
        rank: match info >> 4 {
            1 | 10 => 0, // GLOBAL, GNU_UNIQUE
            2 => 1,      // WEAK
            _ => 2,
        },
        name: strings.get(name as usize..).filter(|name| name.first() != Some(&0))?,
    };
    if covered(sorted, &candidate).is_empty() {
        return None;
    }
    let section = elf.sections.get(usize::from(u16_at(entry, 6)?))?;
    let is_data = |s: &SectionHeader| s.is_loaded() && !s.is_code() && start >= s.addr && start < s.end();
    is_data(section).then_some(candidate)
}
