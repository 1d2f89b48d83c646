//! CPython 3.6, from the DWARF of v3.6.15. The later members of `_PyRuntime` are separate variables: their
//! addresses come from each file's symbols.

use super::{VersionFacts, v3_7};
use crate::cpython::object_layout::{GilLocation, ObjectLayout};
use crate::cpython_layout::Layout;

pub const VERSION: VersionFacts = VersionFacts {
    minor: 6,
    layout: LAYOUT,
    early_gilstate: (0, 0),
    objects: OBJECTS,
    tasks: None,
    ..v3_7::VERSION
};

pub(super) const LAYOUT: Layout = Layout {
    runtime_key: 0,
    runtime_current: 0,
    runtime_interpreters: 0,
    interp_modules: 16,
    tstate_thread_id: 152,
    frame_size: 124,
    frame_instr: 120,
    ..v3_7::LAYOUT
};

pub(super) const OBJECTS: ObjectLayout = ObjectLayout {
    lock: GilLocation::Current { lock: None },
    frame_locals: 376,
    ..v3_7::OBJECTS
};
