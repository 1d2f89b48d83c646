//! Offsets of CPython, compared with its own debug information: the rows of the table, and what newer versions publish.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use gimli::{
    AttributeValue, DW_AT_byte_size, DW_AT_data_member_location, DW_AT_declaration, DW_AT_name, DW_AT_type,
    DW_TAG_member, DW_TAG_structure_type, DW_TAG_typedef, Dwarf, EndianSlice, LittleEndian, Unit, UnitOffset,
};
use object::{Object, ObjectSection};

use nativeprof::cpython;
use nativeprof::cpython::versions;
use nativeprof::cpython_layout::{ABSENT, Layout};
use nativeprof::process::modules::Modules;
use nativeprof::process::system;

use common::Python;

mod common;

type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// Structures by name: the place of each definition.
struct Types<'a> {
    dwarf: Dwarf<Slice<'a>>,
    units: Vec<Unit<Slice<'a>>>,
    found: BTreeMap<String, (usize, UnitOffset)>,
}

const WANTED: &[&str] = &[
    "pyruntimestate",
    "_is",
    "_ts",
    "_frame",
    "_PyInterpreterFrame",
    "_PyCFrame",
    "_cframe",
    "PyCodeObject",
    "PyASCIIObject",
    "PyCompactUnicodeObject",
    "PyBytesObject",
];

impl<'a> Types<'a> {
    fn new(dwarf: Dwarf<Slice<'a>>) -> Types<'a> {
        let mut types = Types {
            dwarf,
            units: Vec::new(),
            found: BTreeMap::new(),
        };
        let mut headers = types.dwarf.units();
        while let Some(header) = headers.next().expect("a unit") {
            types.units.push(types.dwarf.unit(header).expect("a unit"));
        }
        for index in 0..types.units.len() {
            let unit = &types.units[index];
            let mut entries = unit.entries();
            while let Some(entry) = entries.next_dfs().expect("an entry") {
                let tag = entry.tag();
                if (tag != DW_TAG_structure_type && tag != DW_TAG_typedef) || entry.attr(DW_AT_declaration).is_some() {
                    continue;
                }
                let Some(name) = entry.attr_value(DW_AT_name) else {
                    continue;
                };
                let name = types.dwarf.attr_string(unit, name).expect("a name").to_string_lossy();
                if !WANTED.contains(&&*name) || types.found.contains_key(&*name) {
                    continue;
                }
                // A typedef of a type that is only declared here is useless.
                if let Some(at) = types.structure(index, entry.offset()) {
                    types.found.insert(name.into_owned(), at);
                }
            }
        }
        types
    }

    /// The structure behind typedefs and qualifiers.
    fn structure(&self, unit: usize, offset: UnitOffset) -> Option<(usize, UnitOffset)> {
        let (mut unit, mut offset) = (unit, offset);
        for _ in 0..8 {
            let entry = self.units[unit].entry(offset).ok()?;
            if entry.attr(DW_AT_byte_size).is_some() {
                return Some((unit, offset));
            }
            (unit, offset) = match entry.attr_value(DW_AT_type)? {
                AttributeValue::UnitRef(at) => (unit, at),
                AttributeValue::DebugInfoRef(at) => {
                    let of = |u: &Unit<Slice<'a>>| at.to_unit_offset(&u.header);
                    self.units.iter().enumerate().find_map(|(i, u)| Some((i, of(u)?)))?
                }
                _ => return None,
            };
        }
        None
    }

    fn size(&self, name: &str) -> Option<u64> {
        let (unit, offset) = *self.found.get(name)?;
        let entry = self.units[unit].entry(offset).ok()?;
        entry.attr_value(DW_AT_byte_size)?.udata_value()
    }

    /// Offset of a member, as `interpreters.head`.
    fn offset(&self, name: &str, path: &str) -> Option<u64> {
        let (mut at, mut offset) = (*self.found.get(name)?, 0);
        for field in path.split('.') {
            let (more, next) = self.member(at, field)?;
            offset += more;
            at = next;
        }
        Some(offset)
    }

    fn member(&self, (unit, offset): (usize, UnitOffset), wanted: &str) -> Option<(u64, (usize, UnitOffset))> {
        let own_unit = &self.units[unit];
        let mut tree = own_unit.entries_tree(Some(offset)).ok()?;
        let mut children = tree.root().ok()?.children();
        while let Some(child) = children.next().ok()? {
            let entry = child.entry();
            if entry.tag() != DW_TAG_member {
                continue;
            }
            let place = entry.attr_value(DW_AT_data_member_location);
            let place = place.and_then(|v| v.udata_value()).unwrap_or(0);
            let name = entry.attr_value(DW_AT_name);
            let Some(name) = name.and_then(|name| self.dwarf.attr_string(own_unit, name).ok()) else {
                // an anonymous structure or union: its members count as ours
                if let Some(inner) = self.structure(unit, entry.offset())
                    && let Some((more, at)) = self.member(inner, wanted)
                {
                    return Some((place + more, at));
                }
                continue;
            };
            if name.slice() == wanted.as_bytes() {
                let inner = self.structure(unit, entry.offset()).unwrap_or((unit, entry.offset()));
                return Some((place, inner));
            }
        }
        None
    }
}

/// Each offset of the layout and that of the debug information; for names that changed, one after the other.
fn compare(types: &Types<'_>, l: &Layout, case: &str, runtime: bool) {
    let of = |u: u16| if u == ABSENT { None } else { Some(u64::from(u)) };
    let frame = if types.found.contains_key("_PyInterpreterFrame") {
        "_PyInterpreterFrame"
    } else {
        "_frame"
    };
    let cframe = if types.found.contains_key("_PyCFrame") {
        "_PyCFrame"
    } else {
        "_cframe"
    };
    let some = |v: u32| (v != 0).then_some(u64::from(v));
    let mut table: Vec<(&str, Option<u64>, &str, &[&str])> = vec![
        (
            "interp_threads",
            Some(l.interp_threads.into()),
            "_is",
            &["tstate_head", "threads.head"],
        ),
        (
            "interp_modules",
            Some(l.interp_modules.into()),
            "_is",
            &["modules", "imports.modules"],
        ),
        ("interp_next", Some(l.interp_next.into()), "_is", &["next"]),
        (
            "interp_generation",
            some(l.interp_generation),
            "_is",
            &["_code_object_generation"],
        ),
        ("tstate_next", of(l.tstate_next), "_ts", &["next"]),
        ("tstate_interp", of(l.tstate_interp), "_ts", &["interp"]),
        ("tstate_thread_id", of(l.tstate_thread_id), "_ts", &["thread_id"]),
        (
            "tstate_first",
            of(l.tstate_first),
            "_ts",
            if l.tstate_first == l.tstate_cframe {
                &["cframe"]
            } else {
                &["current_frame", "frame"]
            },
        ),
        ("tstate_cframe", of(l.tstate_cframe), "_ts", &["cframe"]),
        ("tstate_root_cframe", of(l.tstate_root_cframe), "_ts", &["root_cframe"]),
        ("tstate_base_frame", of(l.tstate_base_frame), "_ts", &["base_frame"]),
        (
            "cframe_current_frame",
            of(l.cframe_current_frame),
            cframe,
            &["current_frame"],
        ),
        ("cframe_previous", of(l.cframe_previous), cframe, &["previous"]),
        ("frame_previous", of(l.frame_previous), frame, &["previous", "f_back"]),
        ("frame_code", of(l.frame_code), frame, &["f_executable", "f_code"]),
        (
            "frame_instr",
            of(l.frame_instr),
            frame,
            &["instr_ptr", "prev_instr", "f_lasti"],
        ),
        ("frame_owner", of(l.frame_owner), frame, &["owner"]),
        ("frame_entry", of(l.frame_entry), frame, &["is_entry"]),
        ("frame_copy", of(l.frame_copy), frame, &["tlbc_index"]),
        ("code_name", of(l.code_name), "PyCodeObject", &["co_name"]),
        ("code_qualname", of(l.code_qualname), "PyCodeObject", &["co_qualname"]),
        ("code_filename", of(l.code_filename), "PyCodeObject", &["co_filename"]),
        (
            "code_firstlineno",
            of(l.code_firstlineno),
            "PyCodeObject",
            &["co_firstlineno"],
        ),
        (
            "code_linetable",
            of(l.code_linetable),
            "PyCodeObject",
            &["co_linetable", "co_lnotab"],
        ),
        (
            "code_adaptive",
            of(l.code_adaptive),
            "PyCodeObject",
            &["co_code_adaptive"],
        ),
        (
            "code_firsttraceable",
            of(l.code_firsttraceable),
            "PyCodeObject",
            &["_co_firsttraceable"],
        ),
        ("code_copies", of(l.code_copies), "PyCodeObject", &["co_tlbc"]),
        ("code_version", of(l.code_version), "PyCodeObject", &["co_version"]),
        ("str_length", of(l.str_length), "PyASCIIObject", &["length"]),
        ("str_state", of(l.str_state), "PyASCIIObject", &["state"]),
        ("bytes_size", of(l.bytes_size), "PyBytesObject", &["ob_base.ob_size"]),
        ("bytes_data", of(l.bytes_data), "PyBytesObject", &["ob_sval"]),
    ];
    if runtime {
        table.push((
            "runtime_interpreters",
            some(l.runtime_interpreters),
            "pyruntimestate",
            &["interpreters.head"],
        ));
        table.push((
            "main interpreter",
            some(l.runtime_interpreters).map(|list| list + 8),
            "pyruntimestate",
            &["interpreters.main"],
        ));
        table.push((
            "runtime_current",
            some(l.runtime_current),
            "pyruntimestate",
            &["gilstate.tstate_current"],
        ));
        table.push((
            "runtime_key",
            some(l.runtime_key),
            "pyruntimestate",
            &["autoTSSkey._key", "gilstate.autoTSSkey._key"],
        ));
    }
    for (label, ours, name, paths) in table {
        let Some(ours) = ours else { continue };
        let theirs = paths.iter().find_map(|path| types.offset(name, path));
        assert_eq!(Some(ours), theirs, "{case}: {label} ({name}: {paths:?})");
    }
    assert_eq!(Some(l.str_ascii_data.into()), types.size("PyASCIIObject"), "{case}");
    assert_eq!(
        Some(l.str_compact_data.into()),
        types.size("PyCompactUnicodeObject"),
        "{case}"
    );
}

/// The ELF file of an interpreter.
fn file(python: &Python) -> PathBuf {
    let program = python.program();
    let exe = if program.exists() { program } else { python.exe.clone() };
    let file = python.library().filter(|_| !python.is_unpacked()).unwrap_or(exe);
    file.canonicalize().expect("the interpreter's file")
}

#[test]
fn rows_match_the_debug_information() {
    let compared = AtomicUsize::new(0);
    common::pythons::each_of(common::pythons(), |python| {
        let path = file(python);
        let mut modules = Modules::default();
        let (id, _) = modules.open(
            &system::LiveSystem,
            std::process::id(),
            0,
            0,
            path.as_os_str().as_encoded_bytes(),
            None,
        );
        let module = modules.get(id);
        let runtime = cpython::find_runtime(module).unwrap_or_else(|| panic!("{}: no interpreter", path.display()));
        assert_eq!(runtime.version.1, python.minor as u8, "{}", python.name);
        let layout = runtime.layout.expect("a version that we know");
        // The counters of code objects, in each version that has them.
        let found = [layout.runtime_generation != 0, layout.interp_generation != 0];
        let has_names = !module
            .symbols_named(&|name| name == b"_Py_next_func_version")
            .is_empty();
        let expected = match python.minor {
            12 => [has_names, false],
            13 => [true, false],
            14.. => [false, true],
            _ => [false, false],
        };
        assert_eq!(found, expected, "{}: numbers of code objects", python.name);
        let facts = versions::find((3, python.minor as u8, 255)).expect("a row");
        let row = facts
            .layout(255, python.is_free_threaded())
            .expect("a row of this build");
        assert!(!runtime.eval.is_empty(), "{}: no evaluation loop", python.name);
        if python.minor >= 13 {
            let mut published = Layout {
                frame_size: row.frame_size,
                runtime_generation: row.runtime_generation,
                ..layout
            };
            // It moved after the last release candidate of 3.15; the rows are those of releases.
            if python.name.contains("rc") {
                published.interp_generation = row.interp_generation;
            }
            assert_eq!(published, row, "{}: what is published, and the row", python.name);
        }
        let hex: String = module.build_id.iter().map(|b| format!("{b:02x}")).collect();
        let (first, rest) = hex.split_at(hex.len().min(2));
        let apart = format!("lib/debug/.build-id/{first}/{rest}.debug");
        for candidate in [path.clone(), python.prefix.join(&apart)] {
            let Ok(bytes) = fs::read(&candidate) else { continue };
            let object = object::File::parse(&*bytes).expect("an ELF file");
            if object.section_by_name(".debug_info").is_none() {
                continue;
            }
            let mut sections: BTreeMap<&str, Vec<u8>> = BTreeMap::new();
            for name in [
                ".debug_abbrev",
                ".debug_addr",
                ".debug_info",
                ".debug_line",
                ".debug_line_str",
                ".debug_rnglists",
                ".debug_str",
                ".debug_str_offsets",
            ] {
                if let Some(s) = object.section_by_name(name) {
                    let data = s.uncompressed_data().expect("a readable section");
                    sections.insert(name, data.into_owned());
                }
            }
            let load = |id: gimli::SectionId| -> Result<Slice<'_>, gimli::Error> {
                let data = sections.get(id.name()).map_or(&[][..], Vec::as_slice);
                Ok(EndianSlice::new(data, LittleEndian))
            };
            let types = Types::new(Dwarf::load(load).expect("sections"));
            compare(&types, &layout, &python.name, python.minor >= 7);
            if python.minor == 13 {
                let field = types.offset("pyruntimestate", "_main_interpreter.func_state.next_version");
                let ours = u64::try_from(layout.runtime_generation).ok();
                assert_eq!(ours, field, "{}: runtime_generation", python.name);
            }
            compared.fetch_add(1, Relaxed);
            return;
        }
        eprintln!("NOTE: {} has no debug information to compare with", python.name);
    });
    assert!(
        compared.into_inner() > 0,
        "no interpreter here has debug information: nothing was compared"
    );
}
