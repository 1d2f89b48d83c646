//! Prunes an ELF file to what a replay reads of it. What stays keeps its place in memory, so every address is valid;
//! the rest is zero. Symbols and strings keep their indices. Removed call frame entries leave an empty entry of the
//! same length, since readers stop at a zero length, and the search table is rebuilt for those that stay.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use gimli::{BaseAddresses, EhFrame, LittleEndian, UnwindSection};

use super::MAX_FILE;
use crate::arch;
use crate::bytes::{u16_at, u32_at, u64_at};
use crate::process::file_content::{Content, Sparse};
use crate::process::modules::FileAccessLog;

mod sparse_image;
mod symbols;

use sparse_image::SparseImage;

/// What was read of one file.
#[derive(Clone, Debug, Default)]
pub struct PruneRequest {
    /// Addresses (svma) that the unwinder looked up.
    pub svmas: BTreeSet<u64>,
    /// Those whose function's instructions may have been analyzed.
    pub analyzed: BTreeSet<u64>,
    /// Code that was read to judge edges: svma and length; and addresses whose functions were searched for then.
    pub code: BTreeSet<(u64, u64)>,
    pub functions: BTreeSet<u64>,
    /// Accesses that do not depend on addresses of stacks.
    pub accesses: FileAccessLog,
}

const MAX_SECTIONS: usize = 1 << 16;
/// Size limit of sections that are read completely.
const MAX_SECTION: u64 = 1 << 28;
/// Code kept of one function.
const MAX_CODE: u64 = 64 << 10;
/// Notes kept (the build id is one).
const MAX_NOTE: u64 = 4096;
/// Bytes of a section that is kept because it was read.
const MAX_TABLE: u64 = 4096;
/// Bytes of the longest call instruction.
const CALL: u64 = 7;
const PT_LOAD: u32 = 1;
const SHT_SYMTAB: u32 = 2;
const SHT_STRTAB: u32 = 3;
const SHT_RELA: u32 = 4;
const SHT_NOTE: u32 = 7;
const SHT_NOBITS: u32 = 8;
const SHT_DYNSYM: u32 = 11;
const SHF_ALLOC: u64 = 2;
const SHF_EXECINSTR: u64 = 4;

/// The pruned file; `None` if this is no 64-bit little-endian ELF file that we can read, or too long for a tape.
pub fn prune(content: &Content, request: &PruneRequest) -> Option<Sparse> {
    let mut p = Pruner::open(content)?;
    p.keep_notes();
    p.keep_tables(request);
    p.images(request);
    let entries = p.frames(request);
    p.code(request, &entries);
    p.symbols(request, &entries);
    p.finish().filter(|file| file.len() <= MAX_FILE)
}

#[derive(Clone, Debug, Default)]
struct ElfSection {
    name: Vec<u8>,
    header: Vec<u8>,
    kind: u32,
    flags: u64,
    addr: u64,
    offset: u64,
    size: u64,
    link: usize,
    /// Bytes that replace those of the file; only these are moved, or kept if the section is not loaded.
    new: Option<Vec<u8>>,
}

impl ElfSection {
    fn is_code(&self) -> bool {
        self.flags & SHF_EXECINSTR != 0 && self.kind != SHT_NOBITS
    }

    fn covers(&self, svma: u64) -> bool {
        svma >= self.addr && svma - self.addr < self.size
    }

    /// Offset in the file of an address in the section.
    fn file_offset(&self, svma: u64) -> u64 {
        self.offset + (svma - self.addr)
    }
}

/// A function's call frame entry.
struct FrameEntry {
    code: Range<u64>,
    bytes: Range<usize>,
    cie: usize,
}

struct Pruner<'a> {
    content: &'a Content,
    head: Vec<u8>,
    programs: Vec<u8>,
    sections: Vec<ElfSection>,
    names: usize,
    /// Ranges of the file that stay in place.
    kept_ranges: Vec<Range<u64>>,
}

fn put(b: &mut [u8], at: usize, value: &[u8]) -> Option<()> {
    b.get_mut(at..at.checked_add(value.len())?)?.copy_from_slice(value);
    Some(())
}

fn string_at(table: &[u8], at: usize) -> &[u8] {
    let rest = table.get(at..).unwrap_or_default();
    &rest[..rest.iter().position(|c| *c == 0).unwrap_or(rest.len())]
}

/// Whether so many bytes are in the file, and not too many to be read.
fn is_readable(content: &Content, at: u64, len: u64) -> bool {
    len <= MAX_SECTION && at.checked_add(len).is_some_and(|end| end <= content.len())
}

fn read(content: &Content, at: u64, len: u64) -> Option<Vec<u8>> {
    is_readable(content, at, len).then_some(())?;
    let mut bytes = vec![0; len as usize];
    let mut got = 0;
    while got < bytes.len() {
        match content.read_at(at + got as u64, &mut bytes[got..]).ok()? {
            0 => return None,
            n => got += n,
        }
    }
    Some(bytes)
}

impl<'a> Pruner<'a> {
    fn open(content: &'a Content) -> Option<Pruner<'a>> {
        let head = read(content, 0, 64)?;
        // 64 bits, little-endian
        head.starts_with(b"\x7fELF\x02\x01").then_some(())?;
        let programs = usize::from(u16_at(&head, 56)?) * 56;
        let programs = read(content, u64_at(&head, 32)?, programs as u64)?;
        let count = usize::from(u16_at(&head, 60)?).min(MAX_SECTIONS);
        let table = read(content, u64_at(&head, 40)?, count as u64 * 64)?;
        let section = |header: &[u8]| {
            Some(ElfSection {
                header: header.to_vec(),
                kind: u32_at(header, 4)?,
                flags: u64_at(header, 8)?,
                addr: u64_at(header, 16)?,
                offset: u64_at(header, 24)?,
                size: u64_at(header, 32)?,
                link: u32_at(header, 40)? as usize,
                ..ElfSection::default()
            })
        };
        let mut sections = table.chunks_exact(64).map(section).collect::<Option<Vec<_>>>()?;
        let names = usize::from(u16_at(&head, 62)?);
        if let Some(table) = sections.get(names) {
            let text = read(content, table.offset, table.size)?;
            for s in &mut sections {
                s.name = string_at(&text, u32_at(&s.header, 0)? as usize).to_vec();
            }
        }
        let mut p = Pruner {
            content,
            head,
            programs,
            sections,
            names,
            kept_ranges: Vec::new(),
        };
        p.sections.iter_mut().for_each(|s| {
            if s.offset.checked_add(s.size).is_none() || s.addr.checked_add(s.size).is_none() {
                (s.kind, s.size) = (SHT_NOBITS, 0);
            }
        });
        Some(p)
    }

    fn named(&self, name: &[u8]) -> Option<usize> {
        self.sections.iter().position(|s| s.name == name)
    }

    fn bytes(&self, section: usize) -> Option<Vec<u8>> {
        let s = self.sections.get(section).filter(|s| s.kind != SHT_NOBITS)?;
        read(self.content, s.offset, s.size)
    }

    /// Keeps the short sections that were read, in which programs publish what is in their memory.
    fn keep_tables(&mut self, request: &PruneRequest) {
        let is_read = |s: &&ElfSection| request.accesses.sections.contains(&*String::from_utf8_lossy(&s.name));
        let tables = self.sections.iter().filter(is_read);
        let tables = tables.filter(|s| s.flags & SHF_ALLOC != 0 && !s.is_code() && s.kind != SHT_NOBITS);
        let tables = tables.filter(|s| s.size <= MAX_TABLE && !s.name.starts_with(b".eh_frame"));
        self.kept_ranges.extend(tables.map(|s| s.offset..s.offset + s.size));
    }

    fn keep_notes(&mut self) {
        let notes = self
            .sections
            .iter()
            .filter(|s| s.kind == SHT_NOTE && s.size <= MAX_NOTE);
        self.kept_ranges.extend(notes.map(|s| s.offset..s.offset + s.size));
    }

    /// Keeps the data of the image that was read, and the version string that identifies older interpreters.
    fn images(&mut self, request: &PruneRequest) {
        for (svma, len) in &request.accesses.images {
            for p in self.programs.chunks_exact(56) {
                let word = |at| u64_at(p, at).unwrap_or(0);
                let (offset, addr, size) = (word(8), word(16), word(32));
                if u32_at(p, 0) == Some(PT_LOAD) && *svma >= addr && svma - addr < size {
                    let from = offset.saturating_add(svma - addr);
                    self.kept_ranges
                        .push(from..from.saturating_add((*len as u64).min(size - (svma - addr))));
                }
            }
        }
        let Some(rodata) = self
            .named(b".rodata")
            .filter(|_| request.accesses.sections.contains(".rodata"))
        else {
            return;
        };
        let (Some(bytes), start) = (self.bytes(rodata), self.sections[rodata].offset) else {
            return;
        };
        let mut at = start;
        for text in bytes.split(|c| *c == 0) {
            if text.len() < 16 && text.starts_with(b"3.") {
                self.kept_ranges.push(at..at + text.len() as u64);
            }
            at += text.len() as u64 + 1;
        }
    }

    /// Keeps the call frame entries around the wanted addresses; returns all entries of functions, by address.
    fn frames(&mut self, request: &PruneRequest) -> Vec<FrameEntry> {
        let none = Vec::new();
        let Some(eh) = self.named(b".eh_frame") else {
            return none;
        };
        let Some(bytes) = self.bytes(eh) else { return none };
        let hdr = self.named(b".eh_frame_hdr");
        let (eh_svma, hdr_svma) = (self.sections[eh].addr, hdr.map_or(0, |h| self.sections[h].addr));
        let bases = BaseAddresses::default()
            .set_eh_frame(eh_svma)
            .set_eh_frame_hdr(hdr_svma);
        let section = EhFrame::new(&bytes, LittleEndian);
        let mut entries = Vec::new();
        let mut all = Vec::new();
        let mut at = 0;
        while let (Some(len), Some(id)) = (u32_at(&bytes, at), u32_at(&bytes, at + 4)) {
            let end = at + 4 + len as usize;
            if len < 4 || end > bytes.len() {
                break; // the end, or the 64-bit form, which no linker writes
            }
            let cie = (at + 4).checked_sub(id as usize);
            if let Some(cie) = cie.filter(|_| id != 0)
                && let Ok(fde) = section.fde_from_offset(&bases, gimli::EhFrameOffset(at), EhFrame::cie_from_offset)
                && fde.initial_address() != 0
            {
                entries.push(FrameEntry {
                    code: fde.initial_address()..fde.end_address(),
                    bytes: at..end,
                    cie,
                });
            }
            all.push(at..end);
            at = end;
        }
        entries.sort_by_key(|e| e.code.start);
        let mut keep = BTreeSet::new();
        let mut table = BTreeMap::new();
        for svma in request.svmas.iter().chain(&request.functions) {
            let after = entries.partition_point(|e| e.code.start <= *svma);
            let covered = after.checked_sub(1).is_some_and(|i| entries[i].code.contains(svma));
            // Around code without an entry its neighbors determine where it begins and ends.
            let last = if covered { after } else { after + 1 };
            for e in &entries[after.saturating_sub(1)..last.min(entries.len())] {
                keep.extend([e.cie, e.bytes.start]);
                table.insert(e.code.start, e.bytes.start);
            }
        }
        let mut new = vec![0; bytes.len()];
        let first = all.first().map_or(0, |r| r.start);
        let mut gap: Option<usize> = None;
        for entry in all.iter().cloned().chain(std::iter::once(at..at)) {
            let stays = keep.contains(&entry.start) || entry.start == first || entry.is_empty();
            if let Some(from) = gap.filter(|_| stays) {
                // An empty function, described by the first CIE.
                let filler = ((entry.start - from - 4) as u32, (from + 4 - first) as u32);
                let _ = put(&mut new, from, &filler.0.to_le_bytes());
                let _ = put(&mut new, from + 4, &filler.1.to_le_bytes());
            }
            if stays {
                gap = None;
                new[entry.clone()].copy_from_slice(&bytes[entry]);
            } else {
                gap.get_or_insert(entry.start);
            }
        }
        self.sections[eh].new = Some(new);
        // Readers do without a table whose header claims more than the file has.
        let hdr = hdr.filter(|hdr| {
            let s = &self.sections[*hdr];
            is_readable(self.content, s.offset, s.size)
        });
        if let Some(hdr) = hdr {
            let relative = |to: u64, from: u64| (to.wrapping_sub(from) as i32).to_le_bytes();
            // version 1; pcrel sdata4, udata4, datarel sdata4 (LSB 5.0 core, section 10.6.2)
            let mut new = vec![1, 0x1b, 0x03, 0x3b];
            new.extend(relative(eh_svma, hdr_svma.wrapping_add(4)));
            new.extend((table.len() as u32).to_le_bytes());
            for (code, entry) in table {
                new.extend(relative(code, hdr_svma));
                new.extend(relative(eh_svma.wrapping_add(entry as u64), hdr_svma));
            }
            // Too long only if the linker's own was shorter than it had to be: then readers do without.
            let size = self.sections[hdr].size as usize;
            new.resize(new.len().max(size), 0);
            new.truncate(size);
            self.sections[hdr].new = Some(new);
        }
        entries
    }

    fn code(&mut self, request: &PruneRequest, entries: &[FrameEntry]) {
        let covering = |svma: u64| {
            let after = entries.partition_point(|e| e.code.start <= svma);
            let e = after.checked_sub(1).map(|i| &entries[i])?;
            e.code.contains(&svma).then(|| e.code.clone())
        };
        let symbols = self.all_symbols();
        let mut calls = BTreeMap::new();
        let mut kept_ranges = Vec::new();
        for svma in &request.svmas {
            let Some(i) = self.sections.iter().position(|s| s.is_code() && s.covers(*svma)) else {
                continue;
            };
            let s = self.sections[i].clone();
            let mut keep = |from: u64, to: u64| {
                let (from, to) = (from.max(s.addr), to.min(s.addr + s.size));
                if from < to {
                    kept_ranges.push(s.file_offset(from)..s.file_offset(from) + (to - from));
                }
            };
            // A call may have to end here.
            keep(svma.saturating_sub(CALL), svma.saturating_add(1));
            let table = covering(*svma);
            if s.name.starts_with(b".plt") {
                // Stubs are identified by their instructions; their size by the first one of the section.
                keep(s.addr, s.addr + 16);
                keep(
                    s.addr + (svma - s.addr) / 16 * 16,
                    s.addr + (svma - s.addr) / 16 * 16 + 16,
                );
            }
            if table.is_some() && !request.analyzed.contains(svma) {
                continue;
            }
            let symbol = symbols.iter().find(|f| *svma >= f.addr && svma - f.addr < f.size);
            let symbol = symbol.map(|f| f.addr..f.addr.saturating_add(f.size));
            let around = table.or(symbol).unwrap_or_else(|| {
                let bytes = calls.entry(i).or_insert_with(|| self.call_targets(i));
                let before = bytes.range(..=*svma).next_back();
                let after = bytes.range(*svma + 1..).next();
                for (_, site) in before.iter().chain(&after) {
                    keep(**site, **site + CALL);
                }
                let from = before.map_or(s.addr, |(target, _)| *target);
                from.max(svma.saturating_sub(MAX_CODE))..after.map_or(u64::MAX, |(target, _)| *target)
            });
            keep(around.start, around.end.min(svma.saturating_add(MAX_CODE)));
        }
        for (svma, length) in &request.code {
            if let Some(s) = self.sections.iter().find(|s| s.is_code() && s.covers(*svma)) {
                let at = s.file_offset(*svma);
                kept_ranges.push(at..at + (*length).min(s.addr + s.size - svma));
            }
        }
        self.kept_ranges.extend(kept_ranges);
    }

    /// Targets of what look like direct calls and addresses of functions in a section, and one place of each.
    fn call_targets(&self, section: usize) -> BTreeMap<u64, u64> {
        let bytes = self.bytes(section).unwrap_or_default();
        let s = &self.sections[section];
        let mut targets = BTreeMap::new();
        let calls = arch::calls(&bytes, s.addr).chain(arch::loaded_functions(&bytes, s.addr));
        for (site, target) in calls.filter(|(_, target)| s.covers(*target)) {
            targets.insert(target, site);
        }
        targets
    }

    /// Assembles the file: what is loaded stays in place, other sections follow it, then the section headers.
    fn finish(mut self) -> Option<Sparse> {
        let loaded = |s: &ElfSection| s.flags & SHF_ALLOC != 0;
        let ends = self
            .sections
            .iter()
            .filter(|s| loaded(s) && s.kind != SHT_NOBITS)
            .map(|s| s.offset + s.size);
        let programs = u64_at(&self.head, 32)?;
        let mut end = ends.max().unwrap_or(0);
        end = end
            .max(programs.checked_add(self.programs.len() as u64)?)
            .max(64)
            .min(self.content.len());
        let mut image = SparseImage::default();
        self.kept_ranges.sort_by_key(|r| r.start);
        let mut done = 0;
        // What is not loaded moves: nothing may be left there.
        for r in &self.kept_ranges {
            let (from, to) = (r.start.max(done), r.end.min(end));
            if from < to {
                image.put(from, &read(self.content, from, to - from)?);
                done = to;
            }
        }
        if let Some(text) = self.bytes(self.names) {
            let mut new = vec![0; text.len()];
            for s in self
                .sections
                .iter()
                .filter(|s| loaded(s) || s.new.is_some() || s.kind == SHT_STRTAB)
            {
                let _ = put(&mut new, u32_at(&s.header, 0)? as usize, &s.name);
            }
            self.sections.get_mut(self.names)?.new = Some(new);
        }
        let mut headers = Vec::new();
        for s in &mut self.sections {
            match &s.new {
                Some(bytes) if loaded(s) => image.put(s.offset, bytes),
                Some(bytes) => {
                    end = end.next_multiple_of(8);
                    image.put(end, bytes);
                    put(&mut s.header, 24, &end.to_le_bytes())?;
                    end += bytes.len() as u64;
                }
                None if loaded(s) => {}
                None => s.header.fill(0),
            }
            headers.extend_from_slice(&s.header);
        }
        end = end.next_multiple_of(8);
        put(&mut self.head, 40, &end.to_le_bytes())?;
        image.put(programs, &self.programs);
        image.put(end, &headers);
        image.put(0, &self.head);
        Sparse::new(end + headers.len() as u64, image.pieces())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// A file with an empty `.eh_frame`, and an `.eh_frame_hdr` at 72 whose header claims this size.
    fn elf(hdr_size: u64) -> Content {
        let names = b"\0.eh_frame\0.eh_frame_hdr\0.shstrtab\0";
        // Name and kind, flags, address, offset, size.
        let sections = [
            [0, 0, 0, 0, 0],
            [1 | 1 << 32, SHF_ALLOC, 0x1040, 64, 8],
            [11 | 1 << 32, SHF_ALLOC, 0x1048, 72, hdr_size],
            [25 | u64::from(SHT_STRTAB) << 32, 0, 0, 84, names.len() as u64],
        ];
        let mut file = b"\x7fELF\x02\x01".to_vec();
        file.resize(84, 0);
        file.extend(names);
        file.resize(120, 0);
        for (at, value) in [(40, 120u16), (60, sections.len() as u16), (62, 3)] {
            file[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        for section in sections {
            file.extend(section.iter().flat_map(|word| word.to_le_bytes()));
            file.resize(file.len() + 24, 0);
        }
        Content::Bytes(Arc::new(file.into()))
    }

    #[test]
    fn sizes_of_headers_are_not_believed() {
        let pruned = |hdr_size| prune(&elf(hdr_size), &PruneRequest::default()).expect("an ELF file");
        assert_eq!(pruned(12).to_vec()[72..76], [1, 0x1b, 0x03, 0x3b]);
        let rest = elf(12).len() - 72;
        for size in [rest + 1, MAX_SECTION, MAX_SECTION + 1, 1 << 40, 1 << 62] {
            let file = pruned(size);
            assert!(file.len() < 1024, "{size}: {} bytes", file.len());
            assert_eq!(file.to_vec()[72..76], [0; 4], "{size}");
        }
    }
}
