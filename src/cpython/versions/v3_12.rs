//! CPython 3.12, from the DWARF of v3.12.1. New are entry frames in the calls of the eval function, numbers of code
//! objects, a GIL for each interpreter, and the sign of integers in their lowest bits.

use super::{OwnInterpreter, VersionFacts, v3_11};
use crate::cpython::code_epoch::CodeNumbers;
use crate::cpython::heap_layout::{HeapLayout, MANAGED_DICT, MANAGED_WEAKREF};
use crate::cpython::object_layout::{GilLocation, InstanceDict, ObjectLayout};
use crate::cpython::tasks::layout::{CoroutineFrame, FrameState, TaskLayout};
use crate::cpython_layout::{ABSENT, Anchor, Layout};

pub const VERSION: VersionFacts = VersionFacts {
    minor: 12,
    layout: LAYOUT,
    code_numbers: Some(CodeNumbers::Variable),
    objects: OBJECTS,
    heap: Some(HEAP),
    tasks: Some(TASKS),
    own: OwnInterpreter {
        has_monitoring: true,
        reference_bits: 0xffff_ffff,
        resume: None,
        ..v3_11::VERSION.own
    },
    ..v3_11::VERSION
};

pub(super) const LAYOUT: Layout = Layout {
    anchor: Anchor::Shim,
    runtime_key: 1548,
    runtime_current: 0,
    interp_threads: 72,
    interp_modules: 944,
    tstate_thread_id: 136,
    tstate_root_cframe: 272,
    cframe_current_frame: 0,
    cframe_previous: 8,
    frame_previous: 8,
    frame_code: 0,
    frame_owner: 70,
    frame_entry: ABSENT,
    code_firstlineno: 68,
    code_adaptive: 192,
    code_firsttraceable: 176,
    code_version: 92,
    str_ascii_data: 40,
    str_compact_data: 56,
    ..v3_11::LAYOUT
};

pub(super) const OBJECTS: ObjectLayout = ObjectLayout {
    lock: GilLocation::Interpreter {
        at: 384,
        free_threaded: false,
    },
    type_keys: 880,
    instance_dict: Some(InstanceDict::ValuesOrDict(24)),
    tagged_int: true,
    ..v3_11::OBJECTS
};

pub(super) const HEAP: HeapLayout = HeapLayout {
    pre_header: MANAGED_DICT | MANAGED_WEAKREF,
    ..v3_11::HEAP
};

pub(super) const TASKS: TaskLayout = TaskLayout {
    coroutine_frame: CoroutineFrame::Inline(72),
    frame_state: FrameState::InCoroutine(67, v3_11::STATES),
    coroutine_name: 32,
    ..v3_11::TASKS
};
