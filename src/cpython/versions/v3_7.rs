//! CPython 3.7, from the DWARF of v3.7.16. `_PyRuntime` is new (Include/internal/pystate.h).

use super::{VersionFacts, v3_8};
use crate::cpython::object_layout::{GilLocation, LocalNames, ObjectLayout};
use crate::cpython::tasks::layout::TaskLayout;
use crate::cpython_layout::Layout;

pub const VERSION: VersionFacts = VersionFacts {
    minor: 7,
    layout: LAYOUT,
    // Tables of py-spy 0.4.2; no such release was tested.
    early_gilstate: (4, 88),
    objects: OBJECTS,
    heap: None,
    tasks: Some(TASKS),
    ..v3_8::VERSION
};

pub(super) const LAYOUT: Layout = Layout {
    runtime_key: 1508,
    runtime_current: 1480,
    runtime_interpreters: 24,
    interp_modules: 40,
    code_name: 104,
    code_filename: 96,
    code_firstlineno: 36,
    code_linetable: 112,
    ..v3_8::LAYOUT
};

pub(super) const OBJECTS: ObjectLayout = ObjectLayout {
    lock: GilLocation::Current { lock: Some(1264) },
    names: LocalNames::Three(64, 80, 72),
    type_keys: 856,
    ..v3_8::OBJECTS
};

pub(super) const TASKS: TaskLayout = TaskLayout {
    name: None,
    state: 72,
    code_flags: 32,
    ..v3_8::TASKS
};
