//! Symbol tables of the pruned file: which entries and names stay.

use std::collections::{BTreeMap, BTreeSet};

use super::{FrameEntry, PruneRequest, Pruner, SHT_DYNSYM, SHT_RELA, SHT_STRTAB, SHT_SYMTAB};
use super::{put, read, string_at, u16_at, u32_at, u64_at};

/// Functions before an address that the unwinder checks.
const NEIGHBORS: usize = 8;

/// A defined symbol and its location in the table.
pub struct SymbolEntry {
    section: usize,
    index: usize,
    name: u32,
    pub addr: u64,
    pub size: u64,
}

impl Pruner<'_> {
    /// Defined symbols of both tables, by address.
    pub(super) fn all_symbols(&self) -> Vec<SymbolEntry> {
        let mut all = Vec::new();
        for (section, s) in self.sections.iter().enumerate() {
            if !matches!(s.kind, SHT_SYMTAB | SHT_DYNSYM) {
                continue;
            }
            let bytes = self.bytes(section).unwrap_or_default();
            for (index, e) in bytes.chunks_exact(24).enumerate() {
                if let (Some(name), Some(shndx), Some(addr), Some(size)) =
                    (u32_at(e, 0), u16_at(e, 6), u64_at(e, 8), u64_at(e, 16))
                    && shndx != 0
                {
                    all.push(SymbolEntry {
                        section,
                        index,
                        name,
                        addr,
                        size,
                    });
                }
            }
        }
        all.sort_by_key(|s| s.addr);
        all
    }

    /// Keeps the symbols of wanted functions, of their aliases and neighbors, those looked up by name, and the names of
    /// linkage stubs.
    pub(super) fn symbols(&mut self, request: &PruneRequest, entries: &[FrameEntry]) {
        let all = self.all_symbols();
        let mut starts: Vec<u64> = all
            .iter()
            .map(|s| s.addr)
            .filter(|a| self.sections.iter().any(|s| s.is_code() && s.covers(*a)))
            .collect();
        starts.dedup();
        let mut keep_at: BTreeSet<u64> = BTreeSet::new();
        for svma in request.svmas.iter().chain(&request.functions) {
            let table = entries.partition_point(|e| e.code.start <= *svma);
            let covered = table.checked_sub(1).is_some_and(|i| entries[i].code.contains(svma));
            let after = starts.partition_point(|s| s <= svma);
            let back = if covered { 1 } else { NEIGHBORS };
            keep_at.extend(&starts[after.saturating_sub(back)..(after + 1).min(starts.len())]);
        }
        let mut keep: BTreeSet<(usize, usize)> = BTreeSet::new();
        let mut strings: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
        for s in &all {
            let link = self.sections[s.section].link;
            let text = strings
                .entry(link)
                .or_insert_with(|| self.bytes(link).unwrap_or_default());
            let name = string_at(text, s.name as usize);
            let covers = [&request.svmas, &request.functions]
                .iter()
                .any(|wanted| wanted.range(s.addr..s.addr.saturating_add(s.size)).next().is_some());
            let by_name = std::str::from_utf8(name).is_ok_and(|n| request.accesses.names.contains(n));
            if covers || by_name || keep_at.contains(&s.addr) {
                keep.insert((s.section, s.index));
            }
        }
        if let Some(dynsym) = self.sections.iter().position(|s| s.kind == SHT_DYNSYM) {
            keep.extend(self.stubs(request).into_iter().map(|i| (dynsym, i)));
        }
        for section in 0..self.sections.len() {
            if !matches!(self.sections[section].kind, SHT_SYMTAB | SHT_DYNSYM) {
                continue;
            }
            let (Some(bytes), link) = (self.bytes(section), self.sections[section].link) else {
                continue;
            };
            let text = strings
                .entry(link)
                .or_insert_with(|| self.bytes(link).unwrap_or_default());
            let mut new_text = self.sections.get(link).and_then(|s| s.new.clone());
            let new_text = new_text.get_or_insert_with(|| vec![0; text.len()]);
            let mut new = vec![0; bytes.len()];
            for (_, index) in keep.range((section, 0)..(section + 1, 0)) {
                let Some(entry) = bytes.get(index * 24..index * 24 + 24) else {
                    continue;
                };
                let _ = put(&mut new, index * 24, entry);
                let name = u32_at(entry, 0).unwrap_or(0) as usize;
                let _ = put(new_text, name, string_at(text, name));
            }
            self.sections[section].new = Some(new);
            let new_text = std::mem::take(new_text);
            if let Some(s) = self.sections.get_mut(link).filter(|s| s.kind == SHT_STRTAB) {
                s.new = Some(new_text);
            }
        }
    }

    /// Keeps the relocations that name the wanted linkage stubs; returns their symbols. A stub jumps through a slot
    /// (`jmp *disp(%rip)`) or pushes the number of its relocation (x86-64 psABI, "Procedure Linkage Table").
    fn stubs(&mut self, request: &PruneRequest) -> Vec<usize> {
        let mut symbols = Vec::new();
        let (mut slots, mut pushed) = (BTreeSet::new(), BTreeSet::new());
        for s in self
            .sections
            .iter()
            .filter(|s| s.is_code() && s.name.starts_with(b".plt"))
        {
            for svma in request.svmas.iter().filter(|a| s.covers(**a)) {
                let start = s.addr + (svma - s.addr) / 16 * 16;
                let stub = read(self.content, s.file_offset(start), 16).unwrap_or_default();
                for at in 0..stub.len().saturating_sub(5) {
                    if stub[at..].starts_with(&[0xff, 0x25])
                        && let Some(by) = u32_at(&stub, at + 2)
                    {
                        slots.insert((start + at as u64 + 6).wrapping_add_signed((by as i32).into()));
                    } else if stub[at] == 0x68
                        && let Some(n) = u32_at(&stub, at + 1)
                    {
                        pushed.insert(n as usize);
                    }
                }
            }
        }
        for i in 0..self.sections.len() {
            if self.sections[i].kind != SHT_RELA || slots.is_empty() && pushed.is_empty() {
                continue;
            }
            let in_order = self.sections[i].name == b".rela.plt";
            let (bytes, start) = (self.bytes(i).unwrap_or_default(), self.sections[i].offset);
            for (n, rela) in bytes.chunks_exact(24).enumerate() {
                let named = u64_at(rela, 0).is_some_and(|slot| slots.contains(&slot));
                if named || in_order && pushed.contains(&n) {
                    self.kept_ranges.push(start + n as u64 * 24..start + n as u64 * 24 + 24);
                    symbols.extend(u32_at(rela, 12).map(|s| s as usize));
                }
            }
        }
        symbols
    }
}
