//! Split DWARF: units whose entries the compiler put into `.dwo` files, or `dwp` packed into one `.dwp` file.
//!
//! DWARF 5, sections 7.3.2 and 7.3.5; for DWARF 4 the GNU extension it grew from
//! (<https://gcc.gnu.org/wiki/DebugFission>). The executable keeps a skeleton of each unit: its addresses, its line
//! table, the name and the id of the file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use gimli::{DebugCuIndex, DwarfSections, EndianSlice, IndexSectionId, LittleEndian, SectionId};

use crate::debug_info::{DebugInfo, Skeleton, SplitName, load_sections};
use crate::debugfile::{FileContext, Search};
use crate::dwarf_util::{Fuel, Slice};
use crate::elf::Elf;

/// Maximum number of bytes of split DWARF read for one file, all units together.
const MAX_SPLIT: u64 = 1 << 30;

/// The split units of a file that were needed so far.
pub(crate) struct Splits {
    context: Option<FileContext>,
    /// Paths of packages not tried yet.
    packages: Vec<PathBuf>,
    package: Option<DwarfPackage>,
    known: HashMap<usize, Option<Split>>,
    /// Bytes that may still be read.
    left: u64,
}

/// The sections of a `.dwp` file.
struct DwarfPackage {
    index: Vec<u8>,
    info: Vec<u8>,
    abbrev: Vec<u8>,
    strings: Vec<u8>,
    string_offsets: Vec<u8>,
    ranges: Vec<u8>,
}

/// The file of one unit, or its parts of the package.
struct Split {
    sections: DwarfSections<Vec<u8>>,
    /// Its strings are those of the package.
    packed: bool,
    info: DebugInfo,
    /// Index of the unit in `info`.
    unit: usize,
}

impl Splits {
    /// Without `context` no split unit is found.
    pub fn new(context: Option<FileContext>, packages: Vec<PathBuf>) -> Splits {
        Splits {
            context,
            packages,
            package: None,
            known: HashMap::new(),
            left: MAX_SPLIT,
        }
    }

    /// Units that were searched for: (found, not found).
    pub fn counts(&self) -> (usize, usize) {
        let found = self.known.values().flatten().count();
        (found, self.known.len() - found)
    }

    /// The DWARF, the units, and among them the one that the skeleton `unit` represents.
    pub fn get<'a>(
        &'a mut self,
        unit: usize,
        (name, skeleton): (&SplitName, Skeleton),
        dwarf: &gimli::Dwarf<Slice<'a>>,
        fuel: &mut Fuel,
        search: &mut Search,
    ) -> Option<(gimli::Dwarf<Slice<'a>>, &'a mut DebugInfo, usize)> {
        if !self.known.contains_key(&unit) {
            let found = self.find(name, skeleton, dwarf, fuel, search);
            self.known.insert(unit, found);
        }
        let split = self.known.get_mut(&unit)?.as_mut()?;
        let view = view(&split.sections, self.package.as_ref().filter(|_| split.packed), dwarf);
        Some((view, &mut split.info, split.unit))
    }

    fn find(
        &mut self,
        name: &SplitName,
        skeleton: Skeleton,
        dwarf: &gimli::Dwarf<Slice<'_>>,
        fuel: &mut Fuel,
        search: &mut Search,
    ) -> Option<Split> {
        self.read_package(fuel, search);
        let (sections, packed) = match self.in_package(name.id) {
            Some(sections) => (sections, true),
            None => (self.in_file(name, fuel, search)?, false),
        };
        let view = view(&sections, self.package.as_ref().filter(|_| packed), dwarf);
        let mut info = DebugInfo::new(&view, Some(skeleton));
        let Some(unit) = info.find_split(&view, name.id, fuel) else {
            return search.refuse(format!("{}: it belongs to another build", name.file));
        };
        Some(Split {
            sections,
            packed,
            info,
            unit,
        })
    }

    fn read_package(&mut self, fuel: &mut Fuel, search: &mut Search) {
        let Some(context) = &self.context else { return };
        for path in std::mem::take(&mut self.packages) {
            let Some(elf) = open(&path, context, search) else {
                continue;
            };
            let mut total = 0;
            let mut section = |name| {
                let data = elf.debug_data(name).unwrap_or_default();
                total += data.len() as u64;
                data
            };
            let package = DwarfPackage {
                index: section(".debug_cu_index"),
                info: section(".debug_info.dwo"),
                abbrev: section(".debug_abbrev.dwo"),
                strings: section(".debug_str.dwo"),
                string_offsets: section(".debug_str_offsets.dwo"),
                ranges: section(".debug_rnglists.dwo"),
            };
            if total > self.left {
                search.refuse::<()>(format!("{}: too large", path.display()));
                continue;
            }
            self.left -= total;
            fuel.grant(total);
            self.package = Some(package);
            return;
        }
    }

    /// The parts of the package that belong to a unit, copied.
    fn in_package(&mut self, id: u64) -> Option<DwarfSections<Vec<u8>>> {
        let package = self.package.as_ref()?;
        let index = DebugCuIndex::new(&package.index, LittleEndian).index().ok()?;
        let parts: Vec<_> = index.sections(index.find(id)?).ok()?.collect();
        // Parts may overlap: copied bytes count as read.
        let left = &mut self.left;
        let mut part = |id, section: &[u8]| -> Option<Vec<u8>> {
            let part = parts.iter().find(|p| p.section == id)?;
            *left = left.checked_sub(part.size.into())?;
            Some(section.get(part.offset as usize..)?.get(..part.size as usize)?.to_vec())
        };
        let sections = DwarfSections::load(|id| {
            let found = match id {
                SectionId::DebugInfo => part(IndexSectionId::DebugInfo, &package.info),
                SectionId::DebugAbbrev => part(IndexSectionId::DebugAbbrev, &package.abbrev),
                SectionId::DebugStrOffsets => part(IndexSectionId::DebugStrOffsets, &package.string_offsets),
                SectionId::DebugRngLists => part(IndexSectionId::DebugRngLists, &package.ranges),
                _ => None,
            };
            Ok::<_, gimli::Error>(found.unwrap_or_default())
        });
        sections.ok()
    }

    fn in_file(&mut self, name: &SplitName, fuel: &mut Fuel, search: &mut Search) -> Option<DwarfSections<Vec<u8>>> {
        let context = self.context.as_ref()?;
        let file = Path::new(&name.file);
        let stated = Path::new(&name.directory).join(file);
        let adjacent = context.path.parent()?.join(file.file_name()?);
        let elf = [stated, adjacent]
            .iter()
            .filter(|path| path.is_absolute())
            .find_map(|path| open(path, context, search))?;
        match load_sections(&elf, true, self.left) {
            Ok((sections, total)) => {
                self.left -= total;
                fuel.grant(total);
                Some(sections)
            }
            Err(why) => search.refuse(format!("{}: {why}", name.file)),
        }
    }
}

fn open(path: &Path, context: &FileContext, search: &mut Search) -> Option<Elf> {
    let file = search.file(path, context)?;
    match Elf::from_debug_file(file) {
        Ok(elf) => Some(elf),
        Err(why) => search.refuse(format!("{}: {why}", path.display())),
    }
}

/// The sections of a split unit, with those that stay in the executable.
fn view<'a>(
    sections: &'a DwarfSections<Vec<u8>>,
    package: Option<&'a DwarfPackage>,
    dwarf: &gimli::Dwarf<Slice<'a>>,
) -> gimli::Dwarf<Slice<'a>> {
    let mut view = sections.borrow(|data| EndianSlice::new(data, LittleEndian));
    if let Some(package) = package {
        view.debug_str = gimli::DebugStr::new(&package.strings, LittleEndian);
    }
    view.make_dwo(dwarf);
    view
}
