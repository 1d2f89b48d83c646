//! Helpers for reading DWARF entries: limits, code ranges, references, bare units.

use std::sync::Arc;

use gimli::{AttributeValue, EndianSlice, LittleEndian};

pub(crate) type Slice<'a> = EndianSlice<'a, LittleEndian>;
pub(crate) type GimliUnit<'a> = gimli::Unit<Slice<'a>>;

/// Work that is still allowed. It grows with the file's size, and valid files need only a small part; files that refer
/// to the same bytes again and again use it up, and their remaining DWARF is ignored.
pub(crate) struct Fuel(pub u64);

/// Work allowed per byte. Valid DWARF needs less than two.
const WORK_PER_BYTE: u64 = 8;

impl Fuel {
    /// The work allowed for DWARF of this size.
    pub fn new(bytes: u64) -> Fuel {
        Fuel((8 << 20) + bytes.saturating_mul(WORK_PER_BYTE))
    }

    /// Uses up some work; `None` once nothing is left.
    pub fn spend(&mut self, amount: u64) -> Option<()> {
        self.0 = self.0.saturating_sub(amount);
        (self.0 > 0).then_some(())
    }

    /// Allows more work for additional bytes, unless the limit was reached already.
    pub fn grant(&mut self, bytes: u64) {
        if self.0 > 0 {
            self.0 = self.0.saturating_add(bytes.saturating_mul(WORK_PER_BYTE));
        }
    }

    /// `amount`, or what is left.
    pub fn at_most(&self, amount: usize) -> usize {
        usize::try_from(self.0).map_or(amount, |left| amount.min(left))
    }
}

/// A reference to an entry: in its own unit, anywhere in its file, or in the supplementary file.
#[derive(Debug, Clone, Copy)]
pub(crate) enum DieRef {
    Unit(usize),
    Info(usize),
    Sup(usize),
}

impl DieRef {
    pub fn of(value: AttributeValue<Slice<'_>>) -> Option<DieRef> {
        match value {
            AttributeValue::UnitRef(o) => Some(DieRef::Unit(o.0)),
            AttributeValue::DebugInfoRef(o) => Some(DieRef::Info(o.0)),
            AttributeValue::DebugInfoRefSup(o) => Some(DieRef::Sup(o.0)),
            _ => None, // type units are not read
        }
    }
}

/// A unit of which only the header is known. gimli's own constructor also parses the line table's header, with all
/// files: too slow for something done at every lookup.
pub(crate) fn bare_unit(
    header: gimli::UnitHeader<Slice<'_>>,
    abbreviations: Arc<gimli::Abbreviations>,
    file_type: gimli::DwarfFileType,
) -> GimliUnit<'_> {
    let encoding = header.encoding();
    gimli::Unit {
        header,
        abbreviations,
        name: None,
        comp_dir: None,
        low_pc: 0,
        str_offsets_base: gimli::DebugStrOffsetsBase::default_for_encoding_and_file(encoding, file_type),
        addr_base: gimli::DebugAddrBase(0),
        loclists_base: gimli::DebugLocListsBase(0),
        rnglists_base: gimli::DebugRngListsBase::default_for_encoding_and_file(encoding, file_type),
        line_program: None,
        dwo_id: None,
    }
}

/// A string attribute of the unit's own entry.
pub(crate) fn root_string<'a>(
    dwarf: &gimli::Dwarf<Slice<'a>>,
    unit: &GimliUnit<'a>,
    name: gimli::DwAt,
) -> Option<Slice<'a>> {
    let mut entries = unit.entries_raw(None).ok()?;
    for spec in entries.read_abbreviation().ok()??.attributes() {
        let attr = entries.read_attribute(*spec).ok()?;
        if attr.name() == name {
            return dwarf.attr_string(unit, attr.value()).ok();
        }
    }
    None
}

/// Size of one table of abbreviations; of all bytes if it does not end.
pub(crate) fn abbreviations_len(bytes: &[u8]) -> usize {
    end_of_abbreviations(bytes).unwrap_or(bytes.len())
}

/// The format is that of DWARF 5, section 7.5.3.
fn end_of_abbreviations(bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    let mut leb = |fixed: usize| -> Option<u64> {
        at += fixed;
        let (mut value, mut shift) = (0u64, 0u32);
        loop {
            let byte = *bytes.get(at)?;
            at += 1;
            value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            shift = shift.saturating_add(7);
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
    };
    loop {
        if leb(0)? == 0 {
            return Some(at);
        }
        leb(0)?; // tag
        let mut fixed = 1; // has children
        loop {
            let (name, form) = (leb(fixed)?, leb(0)?);
            fixed = 0;
            if form == u64::from(gimli::DW_FORM_implicit_const.0) {
                leb(0)?;
            }
            if name == 0 && form == 0 {
                break;
            }
        }
    }
}

/// The attributes with the code ranges of an entry.
#[derive(Default)]
pub(crate) struct Bounds<'a> {
    low: Option<AttributeValue<Slice<'a>>>,
    high: Option<AttributeValue<Slice<'a>>>,
    ranges: Option<AttributeValue<Slice<'a>>>,
}

impl<'a> Bounds<'a> {
    pub fn add_attribute(&mut self, attr: gimli::Attribute<Slice<'a>>) {
        match attr.name() {
            gimli::DW_AT_low_pc => self.low = Some(attr.value()),
            gimli::DW_AT_high_pc => self.high = Some(attr.value()),
            gimli::DW_AT_ranges => self.ranges = Some(attr.value()),
            _ => {}
        }
    }

    /// Calls `each(begin, end)` for every range of code. Each range costs fuel.
    pub fn each(
        &self,
        dwarf: &gimli::Dwarf<Slice<'a>>,
        unit: &GimliUnit<'a>,
        fuel: &mut Fuel,
        mut each: impl FnMut(u64, u64),
    ) -> Option<()> {
        if let Some(ranges) = self.ranges {
            let offset = dwarf.attr_ranges_offset(unit, ranges).ok()??;
            let mut list = dwarf.ranges(unit, offset).ok()?;
            while let Ok(Some(range)) = list.next() {
                fuel.spend(32)?;
                each(range.begin, range.end);
            }
            return Some(());
        }
        let low = dwarf.attr_address(unit, self.low?).ok()??;
        let high = match self.high? {
            AttributeValue::Udata(size) => low.checked_add(size)?,
            other => dwarf.attr_address(unit, other).ok()??,
        };
        fuel.spend(32)?;
        each(low, high);
        Some(())
    }
}
