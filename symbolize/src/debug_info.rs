//! The units of one `.debug_info`: of a file, of its supplementary file, or of a split unit.

use std::collections::HashMap;
use std::sync::Arc;

use gimli::{
    AttributeValue, DebugInfoOffset, DebugLineOffset, DwarfFileType, DwarfSections, Section, UnitOffset, UnitType,
};

use crate::Name;
use crate::dwarf_util::{DieRef, Fuel, GimliUnit, Slice, abbreviations_len, bare_unit};
use crate::elf::Elf;
use crate::functions::UnitFunctions;
use crate::{Error, ErrorKind};

/// Maximum number of references followed to a name (abstract origin, specification). Real chains have three.
const MAX_REFERENCES: usize = 16;

/// Maximum number of units read in a `.dwo` file: it has one, and perhaps some for types.
const MAX_SPLIT_UNITS: usize = 1000;
/// All DWARF of a file.
pub(crate) const MAX_DWARF: u64 = 4 << 30;

/// What is cached of one `.debug_info` between lookups; holds no references into the sections.
#[derive(Default)]
pub(crate) struct DebugInfo {
    pub units: Vec<CompilationUnit>,
    /// The skeleton in the executable, if this is a split unit's file.
    pub skeleton: Option<Skeleton>,
    abbreviations: HashMap<usize, Option<Arc<gimli::Abbreviations>>>,
    names: HashMap<usize, Option<Name>>,
}

/// What a split unit takes from its skeleton: everything the linker had to relocate.
#[derive(Clone, Copy)]
pub(crate) struct Skeleton {
    low_pc: u64,
    addr_base: gimli::DebugAddrBase,
    ranges_base: gimli::DebugRngListsBase,
}

pub(crate) struct CompilationUnit {
    /// Offset in .debug_info.
    pub offset: usize,
    root: Lazy<UnitRoot>,
    pub functions: Lazy<UnitFunctions>,
}

/// Not read, or read with this result.
type Lazy<T> = Option<Option<T>>;

/// The unit's own entry.
struct UnitRoot {
    abbreviations: Arc<gimli::Abbreviations>,
    low_pc: u64,
    str_offsets_base: gimli::DebugStrOffsetsBase,
    addr_base: gimli::DebugAddrBase,
    rnglists_base: gimli::DebugRngListsBase,
    line_offset: Option<DebugLineOffset>,
    /// Id of a skeleton and of a split unit.
    id: Option<u64>,
    split: Option<SplitName>,
}

/// File with a skeleton's entries.
pub(crate) struct SplitName {
    /// Relative to the compilation directory, if not absolute.
    pub file: String,
    pub directory: String,
    pub id: u64,
}

/// A name and its kind (linker, compiler or source name), and whether the chain of references continues in the
/// supplementary file.
#[derive(Default)]
struct UnitLookup {
    linkage: Option<String>,
    plain: Option<String>,
    continues_at: Option<usize>,
}

/// The sections of an ordinary file or of a `.dwo` file, and their total size in bytes: at most `max`.
pub(crate) fn load_sections(elf: &Elf, split: bool, max: u64) -> Result<(DwarfSections<Vec<u8>>, u64), Error> {
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
        let name = if split { id.dwo_name() } else { Some(id.name()) };
        let data = match name.filter(|_| wanted) {
            Some(name) => elf.debug_data(name)?,
            None => Vec::new(),
        };
        total += data.len() as u64;
        if total > max {
            return Err(Error::new(ErrorKind::Unsupported, "too much DWARF"));
        }
        Ok(data)
    })?;
    Ok((sections, total))
}

impl DebugInfo {
    /// Lists the units.
    pub fn new(dwarf: &gimli::Dwarf<Slice<'_>>, skeleton: Option<Skeleton>) -> DebugInfo {
        let mut info = DebugInfo {
            skeleton,
            ..DebugInfo::default()
        };
        let mut headers = dwarf.debug_info.units();
        while let Ok(Some(header)) = headers.next() {
            let offset = header.debug_info_offset().map_or(0, |o| o.0);
            info.units.push(CompilationUnit {
                offset,
                root: None,
                functions: None,
            });
        }
        info
    }

    /// The unit, ready for reading entries.
    pub fn open<'a>(&mut self, dwarf: &gimli::Dwarf<Slice<'a>>, i: usize, fuel: &mut Fuel) -> Option<GimliUnit<'a>> {
        let offset = self.units.get(i)?.offset;
        let header = dwarf.debug_info.header_from_offset(DebugInfoOffset(offset)).ok()?;
        if self.units[i].root.is_none() {
            let root = self.read_root(dwarf, &header, fuel);
            self.units[i].root = Some(root);
        }
        let root = self.root(i)?;
        let mut unit = bare_unit(header, root.abbreviations.clone(), dwarf.file_type);
        unit.low_pc = root.low_pc;
        unit.str_offsets_base = root.str_offsets_base;
        unit.addr_base = root.addr_base;
        unit.rnglists_base = root.rnglists_base;
        Some(unit)
    }

    fn root(&self, i: usize) -> Option<&UnitRoot> {
        self.units.get(i)?.root.as_ref()?.as_ref()
    }

    /// Offset of the line table of a unit. Known once it was opened.
    pub fn line_offset(&self, i: usize) -> Option<DebugLineOffset> {
        self.root(i)?.line_offset
    }

    /// The file with the entries of a skeleton unit, and what the skeleton provides for them. Known once it was opened.
    pub fn split(&self, i: usize) -> Option<(&SplitName, Skeleton)> {
        let root = self.root(i)?;
        let skeleton = Skeleton {
            low_pc: root.low_pc,
            addr_base: root.addr_base,
            ranges_base: root.rnglists_base,
        };
        Some((root.split.as_ref()?, skeleton))
    }

    /// The split unit with this id: `DW_AT_GNU_dwo_id` in DWARF 4, part of the header in DWARF 5.
    pub fn find_split(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>, id: u64, fuel: &mut Fuel) -> Option<usize> {
        (0..self.units.len().min(MAX_SPLIT_UNITS)).find(|&i| {
            let Some(unit) = self.open(dwarf, i, fuel) else {
                return false;
            };
            match unit.header.type_() {
                UnitType::SplitCompilation(found) => found.0 == id,
                UnitType::Compilation => self.root(i).is_some_and(|r| r.id == Some(id)),
                _ => false,
            }
        })
    }

    fn read_root(
        &mut self,
        dwarf: &gimli::Dwarf<Slice<'_>>,
        header: &gimli::UnitHeader<Slice<'_>>,
        fuel: &mut Fuel,
    ) -> Option<UnitRoot> {
        let abbreviations = self.abbreviations(dwarf, header.debug_abbrev_offset().0, fuel)?;
        let mut unit = bare_unit(*header, abbreviations.clone(), dwarf.file_type);
        let mut low_pc = None;
        let mut line_offset = None;
        let (mut file, mut directory, mut id) = (None, None, None);
        if let UnitType::Skeleton(found) = header.type_() {
            id = Some(found.0);
        }
        {
            let unit_entries = bare_unit(*header, abbreviations.clone(), dwarf.file_type);
            let mut entries = unit_entries.entries_raw(None).ok()?;
            let abbrev = entries.read_abbreviation().ok()??;
            fuel.spend(abbrev.attributes().len() as u64)?;
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
                    (
                        gimli::DW_AT_rnglists_base | gimli::DW_AT_GNU_ranges_base,
                        AttributeValue::DebugRngListsBase(o),
                    ) => unit.rnglists_base = o,
                    (gimli::DW_AT_dwo_name | gimli::DW_AT_GNU_dwo_name, value) => file = Some(value),
                    (gimli::DW_AT_comp_dir, value) => directory = Some(value),
                    (gimli::DW_AT_GNU_dwo_id, AttributeValue::DwoId(found)) => id = Some(found.0),
                    _ => {}
                }
            }
        }
        if let Some(skeleton) = &self.skeleton {
            unit.addr_base = skeleton.addr_base;
            if header.version() < 5 {
                unit.rnglists_base = skeleton.ranges_base;
            }
        }
        // An indexed low_pc needs the base, which may follow it.
        let low_pc = low_pc.and_then(|v| dwarf.attr_address(&unit, v).ok()?);
        let low_pc = low_pc.or(self.skeleton.map(|s| s.low_pc)).unwrap_or(0);
        let mut text = |value: Option<AttributeValue<Slice<'_>>>| string(dwarf, &unit, value?, fuel);
        let split = match (text(file), id) {
            (Some(file), Some(id)) if dwarf.file_type == DwarfFileType::Main => Some(SplitName {
                file,
                directory: text(directory).unwrap_or_default(),
                id,
            }),
            _ => None,
        };
        Some(UnitRoot {
            abbreviations,
            low_pc,
            str_offsets_base: unit.str_offsets_base,
            addr_base: unit.addr_base,
            rnglists_base: unit.rnglists_base,
            line_offset,
            id,
            split,
        })
    }

    fn abbreviations(
        &mut self,
        dwarf: &gimli::Dwarf<Slice<'_>>,
        at: usize,
        fuel: &mut Fuel,
    ) -> Option<Arc<gimli::Abbreviations>> {
        if let Some(known) = self.abbreviations.get(&at) {
            return known.clone();
        }
        // Tables may overlap (each tail of the section is one): the cost of this one must be known before parsing it.
        let rest = dwarf.debug_abbrev.reader().slice().get(at..)?;
        fuel.spend(abbreviations_len(&rest[..fuel.at_most(rest.len())]) as u64)?;
        let parsed = dwarf
            .debug_abbrev
            .abbreviations(gimli::DebugAbbrevOffset(at))
            .ok()
            .map(Arc::new);
        self.abbreviations.insert(at, parsed.clone());
        parsed
    }

    /// The name of the function described by an entry, following its abstract origin and specification. A linkage name
    /// is preferred to a plain name, wherever in the chain it is; the chain may continue in the supplementary file
    /// `sup`.
    pub fn name(
        &mut self,
        sup: Option<&mut DebugInfo>,
        dwarf: &gimli::Dwarf<Slice<'_>>,
        unit: usize,
        at: DieRef,
        fuel: &mut Fuel,
    ) -> Option<Name> {
        let start = match at {
            DieRef::Sup(at) => return sup?.name(None, dwarf.sup()?, 0, DieRef::Info(at), fuel),
            DieRef::Unit(at) => unit.checked_add(at)?,
            DieRef::Info(at) => at,
        };
        if let Some(known) = self.names.get(&start) {
            return known.clone();
        }
        let mut found = self.read_name(dwarf, start, fuel).unwrap_or_default();
        if let (None, Some(at), Some(sup)) = (&found.linkage, found.continues_at, sup) {
            let there = dwarf
                .sup()
                .and_then(|dwarf| sup.read_name(dwarf, at, fuel))
                .unwrap_or_default();
            found.linkage = there.linkage;
            found.plain = found.plain.or(there.plain);
        }
        let name = found.linkage.or(found.plain).map(|raw| Name::new(&raw));
        self.names.insert(start, name.clone());
        name
    }

    fn read_name(&mut self, dwarf: &gimli::Dwarf<Slice<'_>>, start: usize, fuel: &mut Fuel) -> Option<UnitLookup> {
        let mut found = UnitLookup::default();
        let mut next = Some(start);
        for _ in 0..MAX_REFERENCES {
            let Some(at) = next.take() else { break };
            let i = self.units.partition_point(|u| u.offset <= at).checked_sub(1)?;
            let Some(unit) = self.open(dwarf, i, fuel) else { break };
            let base = self.units[i].offset;
            let Ok(mut entries) = unit.entries_raw(Some(UnitOffset(at - base))) else {
                break;
            };
            let Ok(Some(abbrev)) = entries.read_abbreviation() else {
                break;
            };
            fuel.spend(1 + abbrev.attributes().len() as u64)?;
            for spec in abbrev.attributes() {
                let Ok(attr) = entries.read_attribute(*spec) else { break };
                match attr.name() {
                    gimli::DW_AT_linkage_name | gimli::DW_AT_MIPS_linkage_name => {
                        found.linkage = string(dwarf, &unit, attr.value(), fuel);
                        if found.linkage.is_some() {
                            return Some(found);
                        }
                    }
                    gimli::DW_AT_name if found.plain.is_none() => {
                        found.plain = string(dwarf, &unit, attr.value(), fuel);
                    }
                    gimli::DW_AT_abstract_origin | gimli::DW_AT_specification => match DieRef::of(attr.value()) {
                        Some(DieRef::Unit(o)) => next = base.checked_add(o),
                        Some(DieRef::Info(o)) => next = Some(o),
                        Some(DieRef::Sup(o)) => found.continues_at = Some(o),
                        None => {}
                    },
                    _ => {}
                }
            }
        }
        Some(found)
    }
}

/// The text of a string attribute; `None` if it is empty or too long.
fn string(
    dwarf: &gimli::Dwarf<Slice<'_>>,
    unit: &GimliUnit<'_>,
    value: AttributeValue<Slice<'_>>,
    fuel: &mut Fuel,
) -> Option<String> {
    // The lifetimes of unit and value are those of the sections; only the bytes are kept.
    let text = match value {
        AttributeValue::String(s) => s,
        AttributeValue::DebugStrRef(o) => dwarf.debug_str.get_str(o).ok()?,
        AttributeValue::DebugStrRefSup(o) => dwarf.sup()?.debug_str.get_str(o).ok()?,
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
    fuel.spend(text.len() as u64)?;
    (!text.is_empty() && text.len() <= crate::symbols::MAX_NAME).then(|| text.to_string_lossy().into_owned())
}
