//! What the minor versions of CPython differ in: a file for each, which says what it changed, and one list of them. No
//! other file compares versions; each reads a field of its process's row. (`tests/layers.rs` checks that.)
//!
//! Offsets are those of x86-64, and stable over the patch releases of a version for these fields. Debug builds from 3.8
//! on differ in none of them. Structures: Include/internal/pycore_runtime.h, pycore_interp.h, pycore_frame.h;
//! Include/cpython/pystate.h, code.h, frameobject.h, unicodeobject.h of the tag that each file names; before 3.8 the
//! same files without `pycore_` and `cpython/`. Those of objects and tasks: object_layout.rs, tasks/layout.rs.

use super::code_epoch::CodeNumbers;
use super::debug_offsets::OffsetPositions;
use super::heap_layout::HeapLayout;
use super::object_layout::ObjectLayout;
use super::tasks::layout::TaskLayout;
use crate::cpython_layout::Layout;

mod v3_10;
mod v3_11;
mod v3_12;
mod v3_13;
mod v3_14;
mod v3_15;
mod v3_6;
mod v3_7;
mod v3_8;
mod v3_9;

/// The known versions, oldest first.
pub const ALL: &[&VersionFacts] = &[
    &v3_6::VERSION,
    &v3_7::VERSION,
    &v3_8::VERSION,
    &v3_9::VERSION,
    &v3_10::VERSION,
    &v3_11::VERSION,
    &v3_12::VERSION,
    &v3_13::VERSION,
    &v3_14::VERSION,
    &v3_15::VERSION,
];

/// What is particular to a minor version.
#[derive(Debug, PartialEq, Eq)]
pub struct VersionFacts {
    /// The version is 3.`minor`.
    pub minor: u8,
    /// What the walk over frames reads, and how (line table, encoding of positions, anchors).
    pub layout: Layout,
    /// The same of free-threaded builds, where the version has them (3.13 and later): object headers are 16 bytes
    /// longer (Include/object.h, v3.13.0).
    pub free_threaded: Option<Layout>,
    /// Patch releases before this one have `gilstate` so many bytes lower in `_PyRuntime`.
    pub early_gilstate: (u8, u32),
    /// A file says its version in the text `PY_VERSION` only; from 3.11 on there is a variable `Py_Version`
    /// (Python/getversion.c).
    pub has_version_literal: bool,
    /// Where the offsets that the interpreter publishes lie in its table (`_Py_DebugOffsets`, 3.13 and later).
    pub debug_offsets: Option<OffsetPositions>,
    /// Where the offsets for requests to run a script lie in that table (PEP 768, 3.14 and later).
    pub script_requests: Option<usize>,
    /// Where the number of the next code object is, if code objects are numbered and their freeing is not counted (3.12
    /// and 3.13; Objects/codeobject.c).
    pub code_numbers: Option<CodeNumbers>,
    /// Offsets of objects, with headers of 16 bytes, and of the GIL.
    pub objects: ObjectLayout,
    /// Where objects lie in memory. `None`: not known (3.7 and earlier).
    pub heap: Option<HeapLayout>,
    /// Offsets of asyncio's tasks and of coroutines, with headers of 16 bytes. `None`: not known (3.6).
    pub tasks: Option<TaskLayout>,
    /// `_asyncio` publishes its offsets (`_Py_AsyncioModuleDebugOffsets`, Modules/_asynciomodule.c, 3.14 and later).
    pub publishes_tasks: bool,
    /// What the Python package relies on in an interpreter of this version.
    pub own: OwnInterpreter,
}

/// What is particular to the interpreter that the Python package runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnInterpreter {
    /// Code objects have `co_qualname` (Objects/codeobject.c, 3.11 and later).
    pub has_qualified_names: bool,
    /// `sys.monitoring` reports calls (3.12 and later). Before, profile hooks do, for which a generator that continues is
    /// called again.
    pub has_monitoring: bool,
    /// The bits of an object's first word that count its references: from 3.12 on the lower half; from 3.14 on there are
    /// flags above it (Include/refcount.h). In objects that never end the count is large.
    pub reference_bits: u64,
    /// The instruction that a generator begins with, where its argument says so (Include/opcode.h, 3.11), and nothing else
    /// does.
    pub resume: Option<u8>,
}

impl VersionFacts {
    /// The layout of a patch release and build. `None`: the version has no free-threaded builds.
    pub fn layout(&self, micro: u8, free_threaded: bool) -> Option<Layout> {
        let layout = if free_threaded {
            self.free_threaded?
        } else {
            self.layout
        };
        let (first, lower) = self.early_gilstate;
        let lower = if micro < first { lower } else { 0 };
        Some(Layout {
            runtime_key: layout.runtime_key - lower,
            runtime_current: layout.runtime_current - lower,
            ..layout
        })
    }
}

/// The row of a version, given as (major, minor, micro). `None`: the version is unknown.
pub fn find(version: (u8, u8, u8)) -> Option<&'static VersionFacts> {
    let is_it = |facts: &&&VersionFacts| (3, facts.minor) == (version.0, version.1);
    ALL.iter().find(is_it).copied()
}

/// The newest row.
pub fn newest() -> &'static VersionFacts {
    ALL[ALL.len() - 1]
}

/// Whether a version is newer than all rows.
pub fn is_newer(version: (u8, u8, u8)) -> bool {
    (version.0, version.1) > (3, newest().minor)
}

/// The row that a version is read with: its own, or the newest one for newer versions of CPython 3, which publish their
/// offsets.
pub fn nearest(version: (u8, u8, u8)) -> Option<&'static VersionFacts> {
    let is_like_newest = version.0 == 3 && is_newer(version);
    find(version).or_else(|| is_like_newest.then(newest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_by_version() {
        assert!(
            ALL.windows(2).all(|pair| pair[0].minor + 1 == pair[1].minor),
            "in order"
        );
        let minor = |facts: Option<&VersionFacts>| facts.map(|facts| facts.minor);
        let last = newest().minor;
        for (version, own, nearest_one) in [
            ((3, 6, 255), Some(6), Some(6)),
            ((3, last, 0), Some(last), Some(last)),
            ((3, last + 1, 0), None, Some(last)),
            ((3, 5, 9), None, None),
            ((2, 7, 18), None, None),
            ((4, 0, 0), None, None),
        ] {
            assert_eq!(minor(find(version)), own, "{version:?}");
            assert_eq!(minor(nearest(version)), nearest_one, "{version:?}");
        }
        assert!(is_newer((3, last + 1, 0)) && is_newer((4, 0, 0)) && !is_newer((3, last, 255)));
    }

    #[test]
    fn early_patch_releases_are_different() {
        let key = |micro| {
            find((3, 7, micro))
                .and_then(|facts| facts.layout(micro, false))
                .map(|l| l.runtime_key)
        };
        assert_eq!([key(3), key(4), key(255)], [Some(1420), Some(1508), Some(1508)]);
        assert_eq!(find((3, 12, 0)).and_then(|facts| facts.layout(0, true)), None);
    }
}
