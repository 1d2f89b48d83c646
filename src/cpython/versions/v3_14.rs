//! CPython 3.14, from the DWARF of v3.14.8. References in frames have tags, code objects that are freed are
//! counted, asyncio publishes its offsets, and free-threaded builds copy bytecode.

use super::{VersionFacts, v3_13};
use crate::cpython::debug_offsets::OffsetPositions;
use crate::cpython::object_layout::ObjectLayout;
use crate::cpython::tasks::layout::{StackTop, TaskLayout};
use crate::cpython_layout::Layout;

pub const VERSION: VersionFacts = VersionFacts {
    minor: 14,
    layout: LAYOUT,
    free_threaded: Some(FREE_THREADED),
    debug_offsets: Some(POSITIONS),
    script_requests: Some(712),
    code_numbers: None,
    objects: OBJECTS,
    tasks: Some(TASKS),
    publishes_tasks: true,
    ..v3_13::VERSION
};

pub(super) const LAYOUT: Layout = Layout {
    runtime_key: 2340,
    runtime_interpreters: 808,
    interp_next: 7272,
    interp_modules: 7688,
    interp_generation: 7992,
    frame_size: 75,
    frame_owner: 74,
    code_adaptive: 208,
    code_firsttraceable: 192,
    ..v3_13::LAYOUT
};

/// Of builds with `--disable-gil`.
pub(super) const FREE_THREADED: Layout = Layout {
    runtime_key: 2340,
    runtime_interpreters: 808,
    interp_next: 7272,
    interp_modules: 7712,
    interp_generation: 8024,
    frame_size: 79,
    frame_owner: 78,
    frame_copy: 72,
    code_adaptive: 232,
    code_firsttraceable: 208,
    code_copies: 224,
    // Include/cpython/unicodeobject.h: `interned` is a full byte there
    str_kind_bit: 8,
    ..v3_13::FREE_THREADED
};

pub(super) const POSITIONS: OffsetPositions = OffsetPositions {
    size: 760,
    interp_modules: 96,
    interp_generation: 160,
    tstate_next: 192,
    tstate_interp: 200,
    tstate_first: 208,
    tstate_thread_id: 216,
    frame_previous: 256,
    frame_code: 264,
    frame_instr: 272,
    frame_owner: 288,
    frame_copy: 304,
    code_filename: 320,
    code_name: 328,
    code_qualname: 336,
    code_linetable: 344,
    code_firstlineno: 352,
    code_adaptive: 384,
    code_copies: 392,
    bytes_size: 600,
    bytes_data: 608,
    str_state: 624,
    str_length: 632,
    str_ascii_data: 640,
    ..v3_13::POSITIONS
};

pub(super) const OBJECTS: ObjectLayout = ObjectLayout {
    frame_locals: 80,
    tagged: true,
    tuple_items: 32,
    ..v3_13::OBJECTS
};

pub(super) const TASKS: TaskLayout = TaskLayout {
    coro: 128,
    name: Some(136),
    waiter: 120,
    state: 104,
    stack_top: StackTop::Below(64, 8),
    ..v3_13::TASKS
};
