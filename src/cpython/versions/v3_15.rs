//! CPython 3.15, from the DWARF of v3.15.0. A base frame ends each chain, and threads keep their state in a
//! thread-local variable only.

use super::{VersionFacts, v3_12, v3_14};
use crate::cpython::debug_offsets::OffsetPositions;
use crate::cpython::heap_layout::HeapLayout;
use crate::cpython::object_layout::ObjectLayout;
use crate::cpython::tasks::layout::{FrameState, StackTop, StateValues, TaskLayout};
use crate::cpython_layout::Layout;

pub const VERSION: VersionFacts = VersionFacts {
    minor: 15,
    layout: LAYOUT,
    free_threaded: Some(FREE_THREADED),
    debug_offsets: Some(POSITIONS),
    script_requests: Some(840),
    objects: OBJECTS,
    heap: Some(HEAP),
    tasks: Some(TASKS),
    ..v3_14::VERSION
};

pub(super) const LAYOUT: Layout = Layout {
    runtime_key: 0,
    runtime_interpreters: 936,
    interp_next: 7264,
    interp_threads: 7336,
    interp_modules: 7592,
    interp_generation: 7944,
    tstate_thread_id: 176,
    tstate_base_frame: 80,
    ..v3_14::LAYOUT
};

/// Of builds with `--disable-gil`.
pub(super) const FREE_THREADED: Layout = Layout {
    runtime_key: 0,
    runtime_interpreters: 936,
    interp_next: 7264,
    interp_threads: 7336,
    interp_modules: 7592,
    interp_generation: 7952,
    tstate_thread_id: 176,
    tstate_base_frame: 80,
    ..v3_14::FREE_THREADED
};

pub(super) const POSITIONS: OffsetPositions = OffsetPositions {
    size: 888,
    tstate_base_frame: 216,
    tstate_thread_id: 240,
    frame_previous: 320,
    frame_code: 328,
    frame_instr: 336,
    frame_owner: 352,
    frame_copy: 368,
    code_filename: 384,
    code_name: 392,
    code_qualname: 400,
    code_linetable: 408,
    code_firstlineno: 416,
    code_adaptive: 448,
    code_copies: 456,
    bytes_size: 696,
    bytes_data: 704,
    str_state: 720,
    str_length: 728,
    str_ascii_data: 736,
    str_compact_data: 744,
    ..v3_14::POSITIONS
};

pub(super) const OBJECTS: ObjectLayout = ObjectLayout {
    type_keys: 888,
    ..v3_14::OBJECTS
};

pub(super) const HEAP: HeapLayout = HeapLayout {
    bytearray_has_bytes: true,
    ..v3_12::HEAP
};

pub(super) const TASKS: TaskLayout = TaskLayout {
    frame_state: FrameState::InCoroutine(67, STATES),
    stack_top: StackTop::Below(64, 16),
    ..v3_14::TASKS
};

pub(super) const STATES: StateValues = StateValues {
    suspended: (1, 3),
    executing: 4,
    created: 0,
};
