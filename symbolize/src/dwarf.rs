//! Inlined functions, files and lines, from DWARF 2 to 5.
//!
//! The addr2line crate does the same, and the tests hold this module against it. It is not used here because it
//! trusts its input: nested `DW_TAG_inlined_subroutine`s recurse until the stack is gone (one byte per level), and many
//! entries that share one long range list or one long path multiply. Neither can be bounded from outside. Here
//! everything is iterative and paid for with [`Fuel`].
//!
//! What is parsed when: unit headers and address ranges at the first lookup; a unit's functions and lines when an
//! address falls into the unit; a function's inlined calls when an address falls into the function.

use std::collections::HashMap;
use std::sync::Arc;

use gimli::{
    AttributeValue, DebugInfoOffset, DebugLineOffset, DwarfSections, EndianSlice, LittleEndian, Section, UnitOffset,
};

use crate::die::{Bounds, DieRef, Fuel, GimliUnit, Slice, abbreviations_len, bare_unit, root_string};
use crate::elf::Elf;
use crate::functions::{Functions, Ranges};
use crate::lines::{Lines, Paths};
use crate::{Error, ErrorKind, Name};

/// A name is reached over at most so many references (abstract origin, specification). Real chains have three.
const MAX_REFERENCES: usize = 16;

/// One frame: an inlined function, or the real one.
pub(crate) struct Frame {
    pub name: Option<Name>,
    pub file: Option<Arc<str>>,
    pub line: Option<u32>,
}

/// What DWARF says about an address.
#[derive(Default)]
pub(crate) struct Found {
    /// Innermost first; the last one is the real function. May be empty.
    pub frames: Vec<Frame>,
    /// The stretch of the real function that contains the address.
    pub range: Option<(u64, u64)>,
}

pub(crate) struct Dwarf {
    sections: DwarfSections<Vec<u8>>,
    state: State,
}

/// All that is remembered between lookups; holds no references into the sections.
struct State {
    units: Vec<Unit>,
    /// (begin, end, index of unit).
    ranges: Ranges,
    abbreviations: HashMap<usize, Option<Arc<gimli::Abbreviations>>>,
    lines: HashMap<usize, Option<Arc<Lines>>>,
    paths: Paths,
    names: HashMap<usize, Option<Name>>,
    fuel: Fuel,
}

struct Unit {
    /// In .debug_info.
    offset: usize,
    root: Lazy<Root>,
    functions: Lazy<Functions>,
}

/// Not looked at, or looked at with this result.
type Lazy<T> = Option<Option<T>>;

/// What the unit's own entry says.
struct Root {
    abbreviations: Arc<gimli::Abbreviations>,
    low_pc: u64,
    str_offsets_base: gimli::DebugStrOffsetsBase,
    addr_base: gimli::DebugAddrBase,
    rnglists_base: gimli::DebugRngListsBase,
    line_offset: Option<DebugLineOffset>,
}

impl Dwarf {
    /// Reads the sections and builds the index of units. `Ok(None)` if the file has no DWARF.
    pub fn load(elf: &Elf) -> Result<Option<Dwarf>, Error> {
        if elf
            .section(".debug_info")
            .or_else(|| elf.section(".zdebug_info"))
            .is_none()
        {
            return Ok(None);
        }
        let mut total = 0;
        let sections = DwarfSections::load(|id: gimli::SectionId| {
            use gimli::SectionId as S;
            let wanted = matches!(
                id,
                S::DebugAbbrev
                    | S::DebugAddr
                    | S::DebugAranges
                    | S::DebugInfo
                    | S::DebugLine
                    | S::DebugLineStr
                    | S::DebugRanges
                    | S::DebugRngLists
                    | S::DebugStr
                    | S::DebugStrOffsets
            );
            let data = if wanted { elf.debug_data(id.name())? } else { Vec::new() };
            total += data.len() as u64;
            Ok::<_, Error>(data)
        })?;
        if view(&sections).debug_info.reader().is_empty() {
            return Ok(None); // NOBITS: stripped into a debug file
        }
        let mut state = State {
            units: Vec::new(),
            ranges: Ranges::default(),
            abbreviations: HashMap::new(),
            lines: HashMap::new(),
            paths: Paths::default(),
            names: HashMap::new(),
            fuel: Fuel((8 << 20) + 8 * total),
        };
        state.index(&view(&sections));
        Ok(Some(Dwarf { sections, state }))
    }

    /// Everything known about an address.
    pub fn find(&mut self, svma: u64) -> Found {
        self.state.find(&view(&self.sections), svma)
    }

    /// Set once the file has used up the work it was granted: then what is not parsed yet stays unknown.
    pub fn error(&self) -> Option<Error> {
        let dry = self.state.fuel.0 == 0;
        dry.then(|| {
            Error::new(
                ErrorKind::Corrupt,
                "DWARF refers to the same bytes too often: too much work",
            )
        })
    }

    /// Whether there is at least one unit.
    pub fn has_units(&self) -> bool {
        !self.state.units.is_empty()
    }
}

fn view(sections: &DwarfSections<Vec<u8>>) -> gimli::Dwarf<Slice<'_>> {
    sections.borrow(|data| EndianSlice::new(data, LittleEndian))
}

impl State {
    fn index(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>) {
        let mut headers = dwarf.debug_info.units();
        while let Ok(Some(header)) = headers.next() {
            let offset = header.debug_info_offset().map_or(0, |o| o.0);
            self.units.push(Unit {
                offset,
                root: None,
                functions: None,
            });
        }
        // GCC lists the ranges of its units in .debug_aranges: cheap. For other compilers' units their entry is read.
        let mut listed = vec![false; self.units.len()];
        let mut tables = dwarf.debug_aranges.headers();
        while let Ok(Some(table)) = tables.next() {
            let offset = table.debug_info_offset().0;
            let Ok(unit) = self.units.binary_search_by_key(&offset, |u| u.offset) else {
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

    /// Adds the ranges stated by the unit's own entry.
    fn unit_ranges(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>, i: usize) -> Option<()> {
        let unit = self.open(dwarf, i)?;
        let mut entries = unit.entries_raw(None).ok()?;
        let abbrev = entries.read_abbreviation().ok()??;
        let mut bounds = Bounds::default();
        for spec in abbrev.attributes() {
            bounds.take(entries.read_attribute(*spec).ok()?);
        }
        let (ranges, fuel) = (&mut self.ranges, &mut self.fuel);
        bounds.each(dwarf, &unit, fuel, |begin, end| {
            ranges.push(begin, end, i);
        })
    }

    /// The unit, ready for reading entries.
    fn open<'a>(&mut self, dwarf: &gimli::Dwarf<Slice<'a>>, i: usize) -> Option<GimliUnit<'a>> {
        let offset = self.units.get(i)?.offset;
        let header = dwarf.debug_info.header_from_offset(DebugInfoOffset(offset)).ok()?;
        if self.units[i].root.is_none() {
            let root = self.read_root(dwarf, &header);
            self.units[i].root = Some(root);
        }
        let root = self.units[i].root.as_ref()?.as_ref()?;
        let mut unit = bare_unit(header, root.abbreviations.clone());
        unit.low_pc = root.low_pc;
        unit.str_offsets_base = root.str_offsets_base;
        unit.addr_base = root.addr_base;
        unit.rnglists_base = root.rnglists_base;
        Some(unit)
    }

    fn read_root(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>, header: &gimli::UnitHeader<Slice<'_>>) -> Option<Root> {
        let abbreviations = self.abbreviations(dwarf, header.debug_abbrev_offset().0)?;
        let mut unit = bare_unit(*header, abbreviations.clone());
        let mut low_pc = None;
        let mut line_offset = None;
        {
            let unit_entries = bare_unit(*header, abbreviations.clone());
            let mut entries = unit_entries.entries_raw(None).ok()?;
            let abbrev = entries.read_abbreviation().ok()??;
            self.fuel.spend(abbrev.attributes().len() as u64)?;
            for spec in abbrev.attributes() {
                let attr = entries.read_attribute(*spec).ok()?;
                match (attr.name(), attr.value()) {
                    (gimli::DW_AT_low_pc, value) => low_pc = Some(value),
                    (gimli::DW_AT_stmt_list, AttributeValue::DebugLineRef(o)) => line_offset = Some(o),
                    (gimli::DW_AT_str_offsets_base, AttributeValue::DebugStrOffsetsBase(o)) => {
                        unit.str_offsets_base = o
                    }
                    (gimli::DW_AT_addr_base | gimli::DW_AT_GNU_addr_base, AttributeValue::DebugAddrBase(o)) => {
                        unit.addr_base = o;
                    }
                    (gimli::DW_AT_rnglists_base, AttributeValue::DebugRngListsBase(o)) => unit.rnglists_base = o,
                    _ => {}
                }
            }
        }
        // An indexed low_pc needs the base, which may come after it.
        let low_pc = low_pc.and_then(|v| dwarf.attr_address(&unit, v).ok()?).unwrap_or(0);
        Some(Root {
            abbreviations,
            low_pc,
            str_offsets_base: unit.str_offsets_base,
            addr_base: unit.addr_base,
            rnglists_base: unit.rnglists_base,
            line_offset,
        })
    }

    fn abbreviations(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>, at: usize) -> Option<Arc<gimli::Abbreviations>> {
        if let Some(known) = self.abbreviations.get(&at) {
            return known.clone();
        }
        // Tables may overlap, each tail of the section is one: what this one costs must be known before it is parsed.
        let rest = dwarf.debug_abbrev.reader().slice().get(at..)?;
        self.fuel
            .spend(abbreviations_len(&rest[..self.fuel.most(rest.len())]) as u64)?;
        let parsed = dwarf
            .debug_abbrev
            .abbreviations(gimli::DebugAbbrevOffset(at))
            .ok()
            .map(Arc::new);
        self.abbreviations.insert(at, parsed.clone());
        parsed
    }

    fn lines(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>, i: usize) -> Option<Arc<Lines>> {
        let offset = self.units.get(i)?.root.as_ref()?.as_ref()?.line_offset?;
        if let Some(known) = self.lines.get(&offset.0) {
            return known.clone();
        }
        let mut unit = self.open(dwarf, i)?;
        unit.comp_dir = root_string(dwarf, &unit, gimli::DW_AT_comp_dir);
        let lines = Lines::parse(dwarf, &unit, offset, &mut self.paths, &mut self.fuel).map(Arc::new);
        self.lines.insert(offset.0, lines.clone());
        lines
    }

    fn find(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>, svma: u64) -> Found {
        let mut best = Found::default();
        for i in self.ranges.containing(svma) {
            let Some(found) = self.find_in_unit(dwarf, i, svma) else {
                continue;
            };
            if found.range.is_some() {
                return found;
            }
            // Only a line: assembler, or a range that the unit states without meaning it. Look on.
            if best.frames.is_empty() {
                best = found;
            }
        }
        best
    }

    fn find_in_unit(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>, i: usize, svma: u64) -> Option<Found> {
        let unit = self.open(dwarf, i)?;
        if self.units[i].functions.is_none() {
            let functions = Functions::parse(dwarf, &unit, &mut self.fuel);
            self.units[i].functions = Some(functions);
        }
        let lines = self.lines(dwarf, i);
        let (file, line) = lines.as_ref().and_then(|l| l.find(svma)).unwrap_or_default();
        let offset = self.units[i].offset;
        let functions = self.units[i].functions.as_mut().and_then(Option::as_mut);
        let inlined = functions.and_then(|f| f.find(dwarf, &unit, svma, &mut self.fuel));
        let mut found = Found::default();
        let mut here = Frame { name: None, file, line };
        if let Some(inlined) = inlined {
            found.range = Some(inlined.range);
            for call in inlined.calls.iter().rev() {
                here.name = self.name(dwarf, offset, call.name_at);
                let file = call.file.and_then(|f| lines.as_ref()?.file(f));
                let caller = Frame {
                    name: None,
                    file,
                    line: call.line,
                };
                found.frames.push(std::mem::replace(&mut here, caller));
            }
            here.name = self.name(dwarf, offset, DieRef::Unit(inlined.die));
        }
        if found.range.is_some() || here.file.is_some() || here.line.is_some() {
            found.frames.push(here);
        }
        Some(found)
    }

    /// The name of the function described by an entry, over its abstract origin and specification. The linkage name
    /// wins over the plain name, wherever on the way it stands.
    fn name(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>, unit: usize, at: DieRef) -> Option<Name> {
        let start = at.global(unit)?;
        if let Some(known) = self.names.get(&start) {
            return known.clone();
        }
        let name = self.read_name(dwarf, start).map(|raw| Name::new(&raw));
        self.names.insert(start, name.clone());
        name
    }

    fn read_name(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>, start: usize) -> Option<String> {
        let mut plain = None;
        let mut next = Some(start);
        for _ in 0..MAX_REFERENCES {
            let Some(at) = next.take() else { break };
            let i = self.units.partition_point(|u| u.offset <= at).checked_sub(1)?;
            let Some(unit) = self.open(dwarf, i) else { break };
            let base = self.units[i].offset;
            let Ok(mut entries) = unit.entries_raw(Some(UnitOffset(at - base))) else {
                break;
            };
            let Ok(Some(abbrev)) = entries.read_abbreviation() else {
                break;
            };
            self.fuel.spend(1 + abbrev.attributes().len() as u64)?;
            for spec in abbrev.attributes() {
                let Ok(attr) = entries.read_attribute(*spec) else { break };
                match attr.name() {
                    gimli::DW_AT_linkage_name | gimli::DW_AT_MIPS_linkage_name => {
                        if let Some(name) = self.string(dwarf, &unit, attr.value()) {
                            return Some(name);
                        }
                    }
                    gimli::DW_AT_name if plain.is_none() => plain = self.string(dwarf, &unit, attr.value()),
                    gimli::DW_AT_abstract_origin | gimli::DW_AT_specification => {
                        next = DieRef::of(attr.value()).and_then(|r| r.global(base));
                    }
                    _ => {}
                }
            }
        }
        plain
    }

    fn string(
        &mut self,
        dwarf: &gimli::Dwarf<Slice<'_>>,
        unit: &GimliUnit<'_>,
        value: AttributeValue<Slice<'_>>,
    ) -> Option<String> {
        // Lifetimes of unit and value are those of the sections; only the bytes are taken along.
        let text = match value {
            AttributeValue::String(s) => s,
            AttributeValue::DebugStrRef(o) => dwarf.debug_str.get_str(o).ok()?,
            AttributeValue::DebugLineStrRef(o) => dwarf.debug_line_str.get_str(o).ok()?,
            AttributeValue::DebugStrOffsetsIndex(index) => {
                let format = unit.header.format();
                let offset = dwarf
                    .debug_str_offsets
                    .get_str_offset(format, unit.str_offsets_base, index)
                    .ok()?;
                dwarf.debug_str.get_str(offset).ok()?
            }
            _ => return None,
        };
        self.fuel.spend(text.len() as u64)?;
        (!text.is_empty() && text.len() <= crate::symbols::MAX_NAME).then(|| text.to_string_lossy().into_owned())
    }
}
