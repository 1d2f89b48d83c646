//! Inlined functions, files and lines, from DWARF 2 to 5.
//!
//! The addr2line crate does the same, and the tests compare this module with it. It is not used here because it trusts
//! its input: nested `DW_TAG_inlined_subroutine`s recurse until the stack overflows (one byte per level), and many
//! entries that share one long range list or one long path multiply. Neither can be bounded from outside. Here
//! everything is iterative and paid for with [`Fuel`].
//!
//! What is parsed when: unit headers and address ranges at the first lookup; a unit's functions and lines when an
//! address falls into the unit; a function's inlined calls when an address falls into the function.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use gimli::{DwarfSections, EndianSlice, LittleEndian};

use crate::debug_info::{CompilationUnit, DebugInfo, MAX_DWARF, load_sections};
use crate::debugfile::{FileContext, Search};
use crate::dwarf_util::{Bounds, DieRef, Fuel, Slice, root_string};
use crate::elf::Elf;
use crate::functions::{Ranges, UnitFunctions};
use crate::lines::{Lines, Paths};
use crate::split_dwarf::Splits;
use crate::{Error, ErrorKind, Name};

/// One frame: an inlined function, or the real one.
pub(crate) struct DwarfFrame {
    pub name: Option<Name>,
    pub file: Option<Arc<str>>,
    pub line: Option<u32>,
}

/// The DWARF information about an address.
#[derive(Default)]
pub(crate) struct DwarfLookup {
    /// Innermost first; the last one is the real function. May be empty.
    pub frames: Vec<DwarfFrame>,
    /// The range of the real function that contains the address.
    pub range: Option<(u64, u64)>,
}

/// Other files that belong to the DWARF of a file.
#[derive(Default)]
pub(crate) struct DwarfContext<'a> {
    /// The supplementary file written by dwz.
    pub supplementary: Option<&'a Elf>,
    /// Where the file is, to find those next to it.
    pub file: Option<FileContext>,
    /// Paths where packages of split units may be.
    pub packages: Vec<PathBuf>,
}

pub(crate) struct Dwarf {
    sections: DwarfSections<Vec<u8>>,
    supplementary: Option<DwarfSections<Vec<u8>>>,
    state: DwarfCache,
}

/// Everything cached between lookups; holds no references into the sections.
struct DwarfCache {
    info: DebugInfo,
    /// Of the supplementary file.
    shared: Option<DebugInfo>,
    splits: Splits,
    /// (begin, end, index of unit).
    ranges: Ranges,
    lines: HashMap<usize, Option<Arc<Lines>>>,
    paths: Paths,
    fuel: Fuel,
}

impl Dwarf {
    /// Reads the sections and builds the index of units. `Ok(None)` if the file has no DWARF.
    pub fn load(elf: &Elf, context: DwarfContext<'_>) -> Result<Option<Dwarf>, Error> {
        if !elf.has_dwarf() {
            return Ok(None);
        }
        let (sections, mut total) = load_sections(elf, false, MAX_DWARF)?;
        let supplementary = match context.supplementary {
            Some(elf) => {
                let (sections, more) = load_sections(elf, false, MAX_DWARF)?;
                total += more;
                Some(sections)
            }
            None => None,
        };
        let main = view(&sections, supplementary.as_ref());
        let mut state = DwarfCache {
            info: DebugInfo::new(&main, None),
            shared: main.sup().map(|dwarf| DebugInfo::new(dwarf, None)),
            splits: Splits::new(context.file, context.packages),
            ranges: Ranges::default(),
            lines: HashMap::new(),
            paths: Paths::default(),
            fuel: Fuel::new(total),
        };
        state.index(&main);
        Ok(Some(Dwarf {
            sections,
            supplementary,
            state,
        }))
    }

    /// Everything known about an address. Searches for other files are recorded in `search`.
    pub fn find(&mut self, svma: u64, search: &mut Search) -> DwarfLookup {
        let dwarf = view(&self.sections, self.supplementary.as_ref());
        self.state.find(&dwarf, svma, search)
    }

    /// Set once the work allowed for the file is used up: what is not parsed yet stays unknown.
    pub fn error(&self) -> Option<Error> {
        let dry = self.state.fuel.0 == 0;
        dry.then(|| {
            Error::new(
                ErrorKind::Corrupt,
                "DWARF refers to the same bytes too often (work limit)",
            )
        })
    }

    /// Whether there is at least one unit.
    pub fn has_units(&self) -> bool {
        !self.state.info.units.is_empty()
    }

    /// Units whose entries are in other files: (found, not found) of those that were searched for.
    pub fn split_units(&self) -> (usize, usize) {
        self.state.splits.counts()
    }
}

fn view<'a>(
    sections: &'a DwarfSections<Vec<u8>>,
    supplementary: Option<&'a DwarfSections<Vec<u8>>>,
) -> gimli::Dwarf<Slice<'a>> {
    sections.borrow_with_sup(supplementary, |data| EndianSlice::new(data, LittleEndian))
}

impl DwarfCache {
    fn index(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>) {
        // GCC lists the ranges of its units in .debug_aranges: cheap. For other compilers, the unit's entry is read.
        let mut listed = vec![false; self.info.units.len()];
        let mut tables = dwarf.debug_aranges.headers();
        while let Ok(Some(table)) = tables.next() {
            let offset = table.debug_info_offset().0;
            let Ok(unit) = self.info.units.binary_search_by_key(&offset, |u| u.offset) else {
                continue;
            };
            let mut entries = table.entries();
            while let Ok(Some(entry)) = entries.next() {
                let range = entry.range();
                listed[unit] |= self.ranges.push(range.begin, range.end, unit);
            }
        }
        for (i, listed) in listed.iter().enumerate() {
            if !listed {
                let _ = self.unit_ranges(dwarf, i);
            }
        }
        self.ranges.sort();
    }

    /// Adds the ranges in the unit's own entry.
    fn unit_ranges(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>, i: usize) -> Option<()> {
        let unit = self.info.open(dwarf, i, &mut self.fuel)?;
        let mut entries = unit.entries_raw(None).ok()?;
        let abbrev = entries.read_abbreviation().ok()??;
        let mut bounds = Bounds::default();
        for spec in abbrev.attributes() {
            bounds.add_attribute(entries.read_attribute(*spec).ok()?);
        }
        let (ranges, fuel) = (&mut self.ranges, &mut self.fuel);
        bounds.each(dwarf, &unit, fuel, |begin, end| {
            ranges.push(begin, end, i);
        })
    }

    /// The line table of a unit that was opened.
    fn lines(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>, i: usize) -> Option<Arc<Lines>> {
        let offset = self.info.line_offset(i)?;
        if let Some(known) = self.lines.get(&offset.0) {
            return known.clone();
        }
        let mut unit = self.info.open(dwarf, i, &mut self.fuel)?;
        unit.comp_dir = root_string(dwarf, &unit, gimli::DW_AT_comp_dir);
        let lines = Lines::parse(dwarf, &unit, offset, &mut self.paths, &mut self.fuel).map(Arc::new);
        self.lines.insert(offset.0, lines.clone());
        lines
    }

    fn find(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>, svma: u64, search: &mut Search) -> DwarfLookup {
        let mut best = DwarfLookup::default();
        for i in self.ranges.containing(svma) {
            let Some(found) = self.find_in_unit(dwarf, i, svma, search) else {
                continue;
            };
            if found.range.is_some() {
                return found;
            }
            // Only a line: assembler, or a range that the unit states by mistake. Continue.
            if best.frames.is_empty() {
                best = found;
            }
        }
        best
    }

    fn find_in_unit(
        &mut self,
        dwarf: &gimli::Dwarf<Slice<'_>>,
        i: usize,
        svma: u64,
        search: &mut Search,
    ) -> Option<DwarfLookup> {
        self.info.open(dwarf, i, &mut self.fuel)?;
        let lines = self.lines(dwarf, i);
        let DwarfCache {
            info,
            shared,
            splits,
            fuel,
            ..
        } = self;
        let split = info
            .split(i)
            .and_then(|skeleton| splits.get(i, skeleton, dwarf, fuel, search));
        match split {
            Some((dwarf, info, i)) => function_at(info, shared.as_mut(), &dwarf, i, svma, lines, fuel),
            None => function_at(info, shared.as_mut(), dwarf, i, svma, lines, fuel),
        }
    }
}

/// The functions and lines at an address that lies in unit `i`.
fn function_at(
    info: &mut DebugInfo,
    mut shared: Option<&mut DebugInfo>,
    dwarf: &gimli::Dwarf<Slice<'_>>,
    i: usize,
    svma: u64,
    lines: Option<Arc<Lines>>,
    fuel: &mut Fuel,
) -> Option<DwarfLookup> {
    let unit = info.open(dwarf, i, fuel)?;
    let CompilationUnit { offset, functions, .. } = &mut info.units[i];
    let offset = *offset;
    let functions = functions.get_or_insert_with(|| UnitFunctions::parse(dwarf, &unit, fuel));
    let (file, line) = lines.as_ref().and_then(|l| l.find(svma)).unwrap_or_default();
    let inlined = functions.as_mut().and_then(|f| f.find(dwarf, &unit, svma, fuel));
    let mut found = DwarfLookup::default();
    let mut here = DwarfFrame { name: None, file, line };
    if let Some(inlined) = inlined {
        found.range = Some(inlined.range);
        for call in inlined.calls.iter().rev() {
            here.name = info.name(shared.as_deref_mut(), dwarf, offset, call.name_at, fuel);
            let file = call.file.and_then(|f| lines.as_ref()?.file(f));
            let caller = DwarfFrame {
                name: None,
                file,
                line: call.line,
            };
            found.frames.push(std::mem::replace(&mut here, caller));
        }
        here.name = info.name(shared, dwarf, offset, DieRef::Unit(inlined.die), fuel);
    }
    if found.range.is_some() || here.file.is_some() || here.line.is_some() {
        found.frames.push(here);
    }
    Some(found)
}
