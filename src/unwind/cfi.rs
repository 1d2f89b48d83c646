//! Call frame tables of one file: `.eh_frame` (LSB 5.0 core, section 10.6) and `.debug_frame` (DWARF 5, section 6.4),
//! read with gimli and turned into [`Rule`](super::rule::Rule)s, one function at a time, when first needed.

use super::expr;
use super::rule::{CallerRegister, Cfa, FullRule, RuleId};
use super::rules::Rules;
use super::signature_marks;
use super::{CodeSection, Sections};
use crate::arch::{GPRS, LINK, RA, SP, TABLE_VENDOR};
use gimli::{
    BaseAddresses, CfaRule, CieOrFde, DebugFrame, EhFrame, EhFrameHdr, EndianSlice, FrameDescriptionEntry,
    LittleEndian, Pointer, Register, RegisterRule, UnwindContext, UnwindContextStorage, UnwindSection, UnwindTableRow,
    Vendor,
};
use rustc_hash::FxHashMap;
use std::ops::Range;

type SectionBytes<'a> = EndianSlice<'a, LittleEndian>;

/// Rows taken from one function's entry. CPython's evaluation loop has a few hundred.
const MAX_ROWS: usize = 1 << 16;
/// Rows cached for one file; past this they are evaluated again.
const MAX_CACHED: usize = 1 << 22;
/// Offsets are stored in 32 bits.
const MAX_BYTES: usize = u32::MAX as usize;

/// Storage for gimli while it runs a table: deeper than its default, since hand-written tables nest
/// `DW_CFA_remember_state`.
pub struct UnwindStorage;

impl UnwindContextStorage<usize> for UnwindStorage {
    type Rules = Box<[(Register, RegisterRule<usize>); 128]>;
    type Stack = Box<[UnwindTableRow<usize, Self>; 16]>;
}

pub type CfiContext = UnwindContext<usize, UnwindStorage>;

/// Rows of one function: each is valid from its start (relative to the function's) to the next one's.
#[derive(Clone, Debug, Default)]
pub struct FunctionRows {
    pub start: u64,
    pub end: u64,
    pub rows: Range<u32>,
}

/// The functions of one section, sorted: start, and offset of the entry in the section.
#[derive(Default)]
struct Index {
    starts: Vec<u64>,
    entries: Vec<u32>,
}

impl Index {
    fn from_pairs(mut pairs: Vec<(u64, u32)>) -> Index {
        if !pairs.is_sorted() {
            pairs.sort_unstable();
        }
        let (starts, entries) = pairs.into_iter().unzip();
        Index { starts, entries }
    }

    fn find(&self, svma: u64) -> Option<(u64, u32)> {
        let i = self.starts.partition_point(|&s| s <= svma).checked_sub(1)?;
        Some((self.starts[i], self.entries[i]))
    }
}

/// One table section and what was read from it.
#[derive(Default)]
struct CfiTable {
    section: CodeSection,
    index: Index,
    /// The index came from `.eh_frame_hdr` and has not been checked against the table itself.
    trusted: bool,
    done: FxHashMap<u32, FunctionRows>,
}

/// The call frame tables of one file.
#[derive(Default)]
pub struct FrameTables {
    opened: bool,
    eh: CfiTable,
    debug: Option<CfiTable>,
    hdr_svma: u64,
    /// Start relative to the function's, and the rule from there on.
    rows: Vec<(u32, RuleId)>,
}

impl FrameTables {
    /// The rule of the table that covers `svma`; `None` if none does.
    pub fn rule(
        &mut self,
        svma: u64,
        sections: &mut dyn Sections,
        rules: &mut Rules,
        context: &mut CfiContext,
    ) -> Option<RuleId> {
        self.open(sections);
        if self.rows.len() > MAX_CACHED {
            self.rows = Vec::new();
            self.eh.done.clear();
            if let Some(table) = &mut self.debug {
                table.done.clear();
            }
        }
        let bases = BaseAddresses::default()
            .set_eh_frame(self.eh.section.svma)
            .set_eh_frame_hdr(self.hdr_svma);
        let mut work = TableEvaluator {
            bases,
            rows: &mut self.rows,
            rules,
            context,
            unknown: false,
        };
        if let Some(id) = work.eh_rule(&mut self.eh, svma) {
            return Some(id);
        }
        let debug = self.debug.get_or_insert_with(|| open_debug(sections));
        if debug.section.bytes.is_empty() {
            None
        } else {
            work.debug_rule(debug, svma)
        }
    }

    /// Start of the first function with a table after `svma`, and end of the last one before: where code without
    /// tables may lie.
    pub fn gap(&mut self, svma: u64, sections: &mut dyn Sections) -> (Option<u64>, Option<u64>) {
        self.open(sections);
        let i = self.eh.index.starts.partition_point(|&s| s <= svma);
        let next = self.eh.index.starts.get(i).copied();
        let bases = BaseAddresses::default()
            .set_eh_frame(self.eh.section.svma)
            .set_eh_frame_hdr(self.hdr_svma);
        let section = eh_frame(&self.eh.section);
        let before = i
            .checked_sub(1)
            .and_then(|i| entry(&section, &bases, self.eh.index.entries[i]));
        (before.map(|fde| fde.end_address()), next)
    }

    /// Start of the function whose table covers `svma`.
    pub fn start(&mut self, svma: u64, sections: &mut dyn Sections) -> Option<u64> {
        let end = self.gap(svma, sections).0?;
        let i = self.eh.index.starts.partition_point(|&s| s <= svma);
        (svma < end).then(|| self.eh.index.starts[i - 1])
    }

    fn open(&mut self, sections: &mut dyn Sections) {
        if std::mem::replace(&mut self.opened, true) {
            return;
        }
        let Some(section) = sections.section(".eh_frame").filter(|s| s.bytes.len() < MAX_BYTES) else {
            return;
        };
        self.eh.section = section;
        let index = sections.section(".eh_frame_hdr").and_then(|hdr| {
            self.hdr_svma = hdr.svma;
            index_from_hdr(&hdr, &self.eh.section)
        });
        self.eh.trusted = index.is_some();
        self.eh.index = index.unwrap_or_else(|| index_of_eh(&self.eh.section, self.hdr_svma));
    }
}

fn index_of_eh(section: &CodeSection, hdr_svma: u64) -> Index {
    let bases = BaseAddresses::default()
        .set_eh_frame(section.svma)
        .set_eh_frame_hdr(hdr_svma);
    index_from_entries(&eh_frame(section), &bases)
}

fn open_debug(sections: &mut dyn Sections) -> CfiTable {
    let Some(section) = sections.section(".debug_frame").filter(|s| s.bytes.len() < MAX_BYTES) else {
        return CfiTable::default();
    };
    let index = index_from_entries(&debug_frame(&section), &BaseAddresses::default());
    CfiTable {
        section,
        index,
        ..CfiTable::default()
    }
}

fn eh_frame(section: &CodeSection) -> EhFrame<SectionBytes<'_>> {
    let mut frame = EhFrame::new(&section.bytes, LittleEndian);
    frame.set_vendor(TABLE_VENDOR);
    frame
}

fn debug_frame(section: &CodeSection) -> DebugFrame<SectionBytes<'_>> {
    let mut frame = DebugFrame::new(&section.bytes, LittleEndian);
    frame.set_address_size(8);
    frame.set_vendor(TABLE_VENDOR);
    frame
}

/// The binary search table, unless it is not of the form that linkers write.
fn index_from_hdr(hdr: &CodeSection, eh: &CodeSection) -> Option<Index> {
    let bases = BaseAddresses::default()
        .set_eh_frame(eh.svma)
        .set_eh_frame_hdr(hdr.svma);
    let parsed = EhFrameHdr::new(&hdr.bytes, LittleEndian).parse(&bases, 8).ok()?;
    if parsed.eh_frame_ptr() != Pointer::Direct(eh.svma) {
        return None;
    }
    let table = parsed.table()?;
    let mut iter = table.iter(&bases);
    let mut pairs = Vec::new();
    while let Some((start, entry)) = iter.next().ok()? {
        let (Pointer::Direct(start), Pointer::Direct(entry)) = (start, entry) else {
            return None;
        };
        let offset = entry.checked_sub(eh.svma).filter(|&o| o < eh.bytes.len() as u64)?;
        if pairs.last().is_some_and(|&(s, _)| s > start) {
            return None;
        }
        pairs.push((start, offset as u32));
    }
    Some(Index::from_pairs(pairs))
}

fn index_from_entries<'a, S: UnwindSection<SectionBytes<'a>>>(section: &S, bases: &BaseAddresses) -> Index
where
    S::Offset: std::hash::Hash,
{
    let mut pairs = Vec::new();
    let mut cies = FxHashMap::default();
    let mut entries = section.entries(bases);
    while let Ok(Some(entry)) = entries.next() {
        let CieOrFde::Fde(partial) = entry else { continue };
        let fde = partial.parse(|section, bases, offset| match cies.get(&offset) {
            Some(cie) => Result::clone(cie),
            None => {
                let cie = section.cie_from_offset(bases, offset);
                cies.insert(offset, cie.clone());
                cie
            }
        });
        // Entries of functions that the linker dropped start at 0.
        if let Ok(fde) = fde
            && fde.initial_address() != 0
            && fde.len() != 0
        {
            pairs.push((fde.initial_address(), fde.offset() as u32));
        }
    }
    Index::from_pairs(pairs)
}

fn entry<'a, S: UnwindSection<SectionBytes<'a>>>(
    section: &S,
    bases: &BaseAddresses,
    offset: u32,
) -> Option<FrameDescriptionEntry<SectionBytes<'a>>> {
    section
        .fde_from_offset(bases, S::Offset::from(offset as usize), S::cie_from_offset)
        .ok()
}

/// What evaluating a table needs in addition to the table.
struct TableEvaluator<'a> {
    bases: BaseAddresses,
    rows: &'a mut Vec<(u32, RuleId)>,
    rules: &'a mut Rules,
    context: &'a mut CfiContext,
    /// An instruction was met that gimli does not know.
    unknown: bool,
}

impl TableEvaluator<'_> {
    fn eh_rule(&mut self, table: &mut CfiTable, svma: u64) -> Option<RuleId> {
        let (mut start, mut offset) = table.index.find(svma)?;
        if table.trusted {
            let section = eh_frame(&table.section);
            let known = table.done.contains_key(&offset);
            if !known && entry(&section, &self.bases, offset).is_none_or(|fde| fde.initial_address() != start) {
                // The search table is wrong: do without it.
                table.trusted = false;
                table.index = index_from_entries(&section, &self.bases);
                (start, offset) = table.index.find(svma)?;
            }
        }
        let section = eh_frame(&table.section);
        let known = table.done.contains_key(&offset);
        let id = self.rule_of(&section, &mut table.done, offset, start, svma);
        if TABLE_VENDOR == Vendor::AArch64
            && !known
            && std::mem::take(&mut self.unknown)
            && signature_marks::remove(&mut table.section.bytes, offset as usize)
        {
            table.done.remove(&offset);
            return self.rule_of(&eh_frame(&table.section), &mut table.done, offset, start, svma);
        }
        id
    }

    fn debug_rule(&mut self, table: &mut CfiTable, svma: u64) -> Option<RuleId> {
        let (start, offset) = table.index.find(svma)?;
        self.rule_of(&debug_frame(&table.section), &mut table.done, offset, start, svma)
    }

    fn rule_of<'a, S: UnwindSection<SectionBytes<'a>>>(
        &mut self,
        section: &S,
        done: &mut FxHashMap<u32, FunctionRows>,
        offset: u32,
        start: u64,
        svma: u64,
    ) -> Option<RuleId> {
        let rows = match done.get(&offset) {
            Some(rows) => rows.clone(),
            None => {
                let rows = self.evaluate(section, offset).unwrap_or(FunctionRows {
                    start,
                    end: start,
                    rows: 0..0,
                });
                done.insert(offset, rows.clone());
                rows
            }
        };
        if svma < rows.start || svma >= rows.end {
            return None;
        }
        let slice = &self.rows[rows.rows.start as usize..rows.rows.end as usize];
        let i = slice.partition_point(|&(at, _)| u64::from(at) <= svma - rows.start);
        Some(i.checked_sub(1).map_or(Rules::BAD, |i| slice[i].1))
    }

    /// All rows of one entry.
    fn evaluate<'a, S: UnwindSection<SectionBytes<'a>>>(&mut self, section: &S, offset: u32) -> Option<FunctionRows> {
        let fde = entry(section, &self.bases, offset)?;
        let (start, end) = (fde.initial_address(), fde.end_address());
        if end <= start {
            return None;
        }
        let first = self.rows.len() as u32;
        let ra = fde.cie().return_address_register();
        let signal = fde.is_signal_trampoline();
        let rows = fde.rows(section, &self.bases, self.context);
        let Ok(mut table) = rows.inspect_err(|_| self.unknown = true) else {
            self.rows.push((0, Rules::BAD));
            return Some(FunctionRows {
                start,
                end,
                rows: first..first + 1,
            });
        };
        for count in 0..=MAX_ROWS {
            let (at, id) = match table.next_row() {
                Ok(Some(row)) => {
                    let id = convert(row, section, ra, signal).map_or(Rules::BAD, |g| self.rules.intern_full(g));
                    (row.start_address(), id)
                }
                Ok(None) => break,
                // The rows before the damage are good; where the damage begins is not known.
                Err(e) => {
                    self.unknown |= matches!(e, gimli::Error::UnknownCallFrameInstruction(_));
                    break;
                }
            };
            let Ok(at) = u32::try_from(at.wrapping_sub(start)) else {
                break;
            };
            self.rows.push((at, if count < MAX_ROWS { id } else { Rules::BAD }));
        }
        Some(FunctionRows {
            start,
            end,
            rows: first..self.rows.len() as u32,
        })
    }
}

fn convert<'a, S: UnwindSection<SectionBytes<'a>>>(
    row: &UnwindTableRow<usize, UnwindStorage>,
    section: &S,
    ra: Register,
    signal: bool,
) -> Option<FullRule> {
    let bytes =
        |e: &gimli::UnwindExpression<usize>| -> Option<Box<[u8]>> { Some(e.get(section).ok()?.0.slice().into()) };
    let cfa = match row.cfa() {
        CfaRule::RegisterAndOffset { register, offset } => Cfa::Reg(u8::try_from(register.0).ok()?, *offset),
        CfaRule::Expression(e) => {
            let e = bytes(e)?;
            match (expr::register_offset(&e), expr::deref_register_offset(&e)) {
                (Some((r, n)), _) => Cfa::Reg(r, n),
                (_, Some((r, n))) => Cfa::Deref(r, n, 0),
                _ => Cfa::Is(e),
            }
        }
    };
    let location = |rule: &RegisterRule<usize>| -> Option<CallerRegister> {
        Some(match rule {
            RegisterRule::Undefined => CallerRegister::Undefined,
            RegisterRule::SameValue => CallerRegister::Same,
            RegisterRule::Offset(n) => CallerRegister::AtCfa(*n),
            RegisterRule::ValOffset(n) => CallerRegister::Cfa(*n),
            RegisterRule::Register(r) => CallerRegister::Reg(u8::try_from(r.0).ok()?),
            RegisterRule::Expression(e) => {
                let e = bytes(e)?;
                match expr::register_offset(&e) {
                    Some((r, n)) => CallerRegister::AtReg(r, n),
                    None => CallerRegister::At(e),
                }
            }
            RegisterRule::ValExpression(e) => CallerRegister::Is(bytes(e)?),
            _ => return None,
        })
    };
    let mut full = FullRule {
        cfa,
        // Unless said otherwise, nothing called this code, or the link register has the return address.
        ra: LINK.map_or(CallerRegister::Undefined, |_| CallerRegister::Same),
        regs: Vec::new(),
        signal,
        code: false,
    };
    for (register, rule) in row.registers() {
        let number = usize::from(register.0);
        if *register == ra {
            full.ra = location(rule)?;
        } else if number < GPRS && number != RA {
            let location = location(rule)?;
            // The caller's stack pointer is the CFA (System V ABI AMD64, section 3.2.2) unless said otherwise.
            if number != SP
                || !matches!(
                    location,
                    CallerRegister::Same | CallerRegister::Cfa(0) | CallerRegister::Undefined
                )
            {
                full.regs.push((number as u8, location));
            }
        }
    }
    full.regs.sort_unstable_by_key(|(r, _)| *r);
    // Without a link register a return address that "keeps its value" would lead in a circle.
    (full.ra != CallerRegister::Same || LINK.is_some()).then_some(full)
}
