//! CPython 3.9, from the DWARF of v3.9.18.

use super::{VersionFacts, v3_8};
use crate::cpython::object_layout::{GilLocation, ObjectLayout};
use crate::cpython::tasks::layout::TaskLayout;
use crate::cpython_layout::Layout;

pub const VERSION: VersionFacts = VersionFacts {
    minor: 9,
    layout: LAYOUT,
    objects: OBJECTS,
    tasks: Some(TASKS),
    ..v3_8::VERSION
};

pub(super) const LAYOUT: Layout = Layout {
    runtime_key: 588,
    runtime_current: 568,
    interp_modules: 856,
    ..v3_8::LAYOUT
};

pub(super) const OBJECTS: ObjectLayout = ObjectLayout {
    lock: GilLocation::Current { lock: Some(352) },
    type_keys: 864,
    ..v3_8::OBJECTS
};

pub(super) const TASKS: TaskLayout = TaskLayout {
    coro: 152,
    name: Some(160),
    waiter: 144,
    state: 80,
    ..v3_8::TASKS
};
