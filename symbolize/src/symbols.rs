//! Function symbols of `.symtab` and `.dynsym`, flattened into ranges that do not overlap.
//!
//! Which symbol an address gets, in this order:
//! 1. Only symbols inside a section with code count: FUNC and GNU_IFUNC ones, and NOTYPE ones (hand-written
//!    assembler often has no `.type`).
//! 2. A NOTYPE symbol without size inside a sized function is a label of that function, not a function.
//! 3. Of several symbols at one address the first wins by: FUNC over NOTYPE; GLOBAL over WEAK over LOCAL; a size over
//!    none; fewer leading underscores; shorter; alphabetical; `.symtab` over `.dynsym`.
//! 4. A symbol without size reaches to the next symbol, to the end of the call frame table that has its address, to the
//!    next function that has such a table, or to the end of its section, whichever comes first. A table that begins
//!    with the symbol states its size.
//! 5. Where sized symbols nest or overlap, the one that starts last wins.

use std::cmp::Ordering;

use crate::Error;
use crate::elf::{Elf, SHT_DYNSYM, SHT_NOBITS, SHT_SYMTAB, SectionHeader, cstr_at, u16_at, u32_at, u64_at};
use crate::frame_tables::FrameTables;

/// Maximum length of a name; longer ones are truncated: no compiler writes them, and finding their end costs time.
pub(crate) const MAX_NAME: usize = 16 << 10;

const STT_NOTYPE: u8 = 0;
const STT_FUNC: u8 = 2;
const STT_GNU_IFUNC: u8 = 10;

/// One function symbol.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sym {
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// Offset into the string table.
    name: u32,
    table: u8,
    /// Smaller is better; see the module's rule 3.
    rank: u8,
    /// Whether its end is stated: by the symbol, or by a call frame table.
    pub sized: bool,
}

impl Sym {
    fn is_notype(&self) -> bool {
        self.rank >= 8
    }
}

/// A range of addresses and the symbol it belongs to.
struct SymbolRange {
    start: u64,
    end: u64,
    sym: u32,
}

#[derive(Default)]
pub(crate) struct Symbols {
    /// Sorted by start, one per start.
    syms: Vec<Sym>,
    /// Sorted, without overlaps.
    ranges: Vec<SymbolRange>,
    strings: [Vec<u8>; 2],
    pub has_symtab: bool,
    pub has_dynsym: bool,
    /// Why a table could not be read, if so.
    pub error: Option<Error>,
}

impl Symbols {
    /// Reads both tables: `.symtab` of `full`, which may be a debug file, and `.dynsym` of the file itself. A table
    /// that cannot be read counts as absent and leaves its reason in `error`.
    pub fn load(elf: &Elf, full: &Elf) -> Symbols {
        let mut out = Symbols::default();
        for (table, kind, elf) in [(0u8, SHT_SYMTAB, full), (1, SHT_DYNSYM, elf)] {
            let Some(section) = elf.sections.iter().find(|s| s.kind == kind) else {
                continue;
            };
            let before = out.syms.len();
            if let Err(error) = out.read_table(elf, section, table) {
                out.error = Some(error);
            }
            let found = out.syms.len() > before;
            if table == 0 {
                out.has_symtab = found
            } else {
                out.has_dynsym = found
            }
        }
        out.choose_aliases();
        out.settle_ends(elf);
        out.flatten();
        out
    }

    fn read_table(&mut self, elf: &Elf, section: &SectionHeader, table: u8) -> Result<(), Error> {
        let strings = match elf.sections.get(section.link as usize) {
            Some(s) if s.kind != SHT_NOBITS => elf.raw_data(s)?,
            _ => return Ok(()),
        };
        let data = elf.raw_data(section)?;
        for entry in data.chunks_exact(24) {
            self.syms.extend(read_symbol(elf, entry, table));
        }
        self.strings[usize::from(table)] = strings;
        Ok(())
    }

    fn name_bytes(&self, sym: &Sym) -> &[u8] {
        let table = &self.strings[usize::from(sym.table)];
        cstr_at(table, sym.name as usize, MAX_NAME).unwrap_or_default()
    }

    /// At most `max` bytes of the name: enough for choosing between aliases, and cheap for any length.
    fn name_prefix(&self, sym: &Sym, max: usize) -> &[u8] {
        let rest = self.strings[usize::from(sym.table)]
            .get(sym.name as usize..)
            .unwrap_or_default();
        let head = &rest[..rest.len().min(max)];
        head.split(|&b| b == 0).next().unwrap_or_default()
    }

    /// The raw name. Bytes that are not UTF-8 are replaced.
    pub fn name(&self, sym: &Sym) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(self.name_bytes(sym))
    }

    /// Sorts, and keeps the best symbol of each address.
    fn choose_aliases(&mut self) {
        let mut syms = std::mem::take(&mut self.syms);
        syms.retain(|s| is_function_name(self.name_prefix(s, 2)));
        syms.sort_unstable_by_key(|s| s.start);
        for group in syms.chunk_by(|a, b| a.start == b.start) {
            // Only the names of aliases of one address are compared; most symbols have none. Names are truncated for
            // this, so that many aliases with huge names cost little.
            let key = |s: &Sym| {
                let name = self.name_prefix(s, 256);
                let underscores = name.iter().take_while(|&&b| b == b'_').count();
                (s.rank, !s.sized, underscores, name.len(), name, s.table)
            };
            let better = |a: &&Sym, b: &&Sym| -> Ordering { key(a).cmp(&key(b)) };
            self.syms.extend(group.iter().min_by(better));
        }
    }

    /// Applies rules 2 and 4. `elf` has the call frame tables.
    fn settle_ends(&mut self, elf: &Elf) {
        // Rule 2. `covered` is how far the sized functions seen so far reach.
        let mut covered = 0;
        self.syms.retain(|s| {
            if s.sized {
                covered = covered.max(s.end);
            }
            s.sized || !s.is_notype() || s.start >= covered
        });
        // Rule 4. Without a size, `end` is the section's end up to here.
        let mut next = u64::MAX;
        let mut tables = None;
        for sym in self.syms.iter_mut().rev() {
            if !sym.sized {
                sym.end = sym.end.min(next);
                let tables = tables.get_or_insert_with(|| FrameTables::load(elf));
                match tables.function(sym.start) {
                    Some((start, end)) => {
                        sym.sized = start == sym.start && end <= sym.end;
                        sym.end = sym.end.min(end);
                    }
                    None => sym.end = tables.next(sym.start).map_or(sym.end, |next| sym.end.min(next)),
                }
            }
            next = sym.start;
        }
    }

    /// Rule 5: turns symbols into ranges, with a stack of those that are still open.
    fn flatten(&mut self) {
        let mut open: Vec<u32> = Vec::new();
        let mut at = 0;
        let mut ranges = Vec::with_capacity(self.syms.len());
        let mut emit = |start: u64, end: u64, sym: u32| {
            if start < end {
                ranges.push(SymbolRange { start, end, sym });
            }
        };
        let syms = &self.syms;
        for (i, sym) in syms.iter().enumerate() {
            while let Some(&top) = open.last() {
                let end = syms[top as usize].end;
                emit(at, end.min(sym.start), top);
                at = at.max(end.min(sym.start));
                if end > sym.start {
                    break;
                }
                open.pop();
            }
            at = sym.start;
            open.push(i as u32);
        }
        while let Some(top) = open.pop() {
            let end = syms[top as usize].end;
            emit(at, end, top);
            at = at.max(end);
        }
        self.ranges = ranges;
    }

    /// The symbol that covers an address.
    pub fn find(&self, svma: u64) -> Option<&Sym> {
        let after = self.ranges.partition_point(|r| r.start <= svma);
        let range = self.ranges.get(after.checked_sub(1)?)?;
        if svma >= range.end {
            return None;
        }
        self.syms.get(range.sym as usize)
    }

    /// All of them, by address.
    pub fn iter(&self) -> impl Iterator<Item = &Sym> {
        self.syms.iter()
    }

    pub fn is_empty(&self) -> bool {
        self.syms.is_empty()
    }
}

/// Finds a symbol of any kind in code by its exact name, including aliases: reads the tables again, since aliases that
/// were not chosen are dropped.
pub(crate) fn find_named(elf: &Elf, name: &str) -> Option<(u64, u64)> {
    for kind in [SHT_SYMTAB, SHT_DYNSYM] {
        let Some(section) = elf.sections.iter().find(|s| s.kind == kind) else {
            continue;
        };
        let Some(strings) = elf.sections.get(section.link as usize) else {
            continue;
        };
        let (Ok(data), Ok(strings)) = (elf.raw_data(section), elf.raw_data(strings)) else {
            continue;
        };
        let wanted = |sym: &Sym| {
            let rest = strings.get(sym.name as usize..).unwrap_or_default();
            rest.starts_with(name.as_bytes()) && rest.get(name.len()) == Some(&0)
        };
        let found = data
            .chunks_exact(24)
            .filter_map(|e| read_symbol(elf, e, 0))
            .filter(wanted);
        if let Some(sym) = found.min_by_key(|s| (s.rank, s.start)) {
            return Some((sym.start, if sym.sized { sym.end - sym.start } else { 0 }));
        }
    }
    None
}

/// One `Elf64_Sym` (gABI, "Symbol Table"), if it is a function by rule 1. `end` is the section's end if it has no size.
fn read_symbol(elf: &Elf, entry: &[u8], table: u8) -> Option<Sym> {
    let info = *entry.get(4)?;
    let notype = match info & 15 {
        STT_FUNC | STT_GNU_IFUNC => 0,
        STT_NOTYPE => 8,
        _ => return None,
    };
    // Undefined, absolute and common symbols have indices of no section with code. SHN_XINDEX (0xffff, more than 65,000
    // sections) does not occur in linked files.
    let (name, start, size) = (u32_at(entry, 0)?, u64_at(entry, 8)?, u64_at(entry, 16)?);
    let section = elf.code_of_symbol(u16_at(entry, 6)?, start)?;
    if name == 0 || start < section.addr || start >= section.end() {
        return None;
    }
    let binding = match info >> 4 {
        1 | 10 => 0, // GLOBAL, GNU_UNIQUE
        2 => 1,      // WEAK
        _ => 2,
    };
    let end = if size == 0 {
        section.end()
    } else {
        start.saturating_add(size).min(section.end())
    };
    Some(Sym {
        start,
        end,
        name,
        table,
        rank: notype + binding,
        sized: size != 0,
    })
}

/// Assemblers' local labels and mapping symbols (`$x`, ARM ELF) are not functions.
fn is_function_name(name: &[u8]) -> bool {
    !name.is_empty() && !name.starts_with(b".L") && !name.starts_with(b"$")
}
