//! CPython 3.13, from the DWARF of v3.13.0; of free-threaded builds, from that of v3.13.15. It publishes its
//! offsets, and has no CFrames.

use super::{VersionFacts, v3_12};
use crate::cpython::code_epoch::CodeNumbers;
use crate::cpython::debug_offsets::{OffsetPositions, UNPUBLISHED};
use crate::cpython::object_layout::{GilLocation, InstanceDict, ObjectLayout};
use crate::cpython::tasks::layout::{FrameState, StateValues, TaskLayout};
use crate::cpython_layout::{ABSENT, Layout};

pub const VERSION: VersionFacts = VersionFacts {
    minor: 13,
    layout: LAYOUT,
    free_threaded: Some(FREE_THREADED),
    debug_offsets: Some(POSITIONS),
    code_numbers: Some(CodeNumbers::Field),
    objects: OBJECTS,
    tasks: Some(TASKS),
    ..v3_12::VERSION
};

pub(super) const LAYOUT: Layout = Layout {
    runtime_key: 2164,
    runtime_interpreters: 632,
    interp_next: 7264,
    interp_threads: 7344,
    interp_modules: 7656,
    tstate_thread_id: 152,
    tstate_first: 72,
    tstate_cframe: ABSENT,
    tstate_root_cframe: ABSENT,
    cframe_current_frame: ABSENT,
    cframe_previous: ABSENT,
    code_adaptive: 200,
    code_firsttraceable: 184,
    ..v3_12::LAYOUT
};

/// Of builds with `--disable-gil`.
pub(super) const FREE_THREADED: Layout = Layout {
    interp_modules: 7664,
    code_name: 136,
    code_qualname: 144,
    code_filename: 128,
    code_firstlineno: 84,
    code_linetable: 152,
    code_adaptive: 216,
    code_firsttraceable: 200,
    code_version: 108,
    str_length: 32,
    str_state: 48,
    str_ascii_data: 56,
    str_compact_data: 72,
    bytes_size: 32,
    bytes_data: 48,
    ..LAYOUT
};

pub(super) const POSITIONS: OffsetPositions = OffsetPositions {
    size: 584,
    interp_modules: 88,
    interp_generation: UNPUBLISHED,
    tstate_next: 168,
    tstate_interp: 176,
    tstate_first: 184,
    tstate_base_frame: UNPUBLISHED,
    tstate_thread_id: 192,
    frame_previous: 232,
    frame_code: 240,
    frame_instr: 248,
    frame_owner: 264,
    frame_copy: UNPUBLISHED,
    code_filename: 280,
    code_name: 288,
    code_qualname: 296,
    code_linetable: 304,
    code_firstlineno: 312,
    code_adaptive: 344,
    code_copies: UNPUBLISHED,
    bytes_size: 520,
    bytes_data: 528,
    str_state: 544,
    str_length: 552,
    str_ascii_data: 560,
    str_compact_data: UNPUBLISHED,
};

pub(super) const OBJECTS: ObjectLayout = ObjectLayout {
    lock: GilLocation::Interpreter {
        at: 16,
        free_threaded: false,
    },
    instance_dict: Some(InstanceDict::DictOrInline(24)),
    values_first: 8,
    ..v3_12::OBJECTS
};

pub(super) const TASKS: TaskLayout = TaskLayout {
    coro: 120,
    name: Some(128),
    waiter: 112,
    state: 96,
    frame_state: FrameState::InCoroutine(67, STATES),
    ..v3_12::TASKS
};

pub(super) const STATES: StateValues = StateValues {
    suspended: (-2, -1),
    executing: 0,
    created: -3,
};
