//! CPython 3.11, from the DWARF of v3.11.7. Frames are no objects any more (`_PyInterpreterFrame`), and one call of
//! the eval function runs several; coroutines contain their frames. New is the table of locations.

use super::{OwnInterpreter, VersionFacts, v3_10};
use crate::cpython::heap_layout::{HeapLayout, MANAGED_DICT};
use crate::cpython::object_layout::{GilLocation, InstanceDict, LocalNames, ObjectLayout};
use crate::cpython::tasks::layout::{CoroutineFrame, FrameState, StackTop, StateValues, TaskLayout};
use crate::cpython_layout::{Anchor, InstructionEncoding, Layout, LineTable};

pub const VERSION: VersionFacts = VersionFacts {
    minor: 11,
    layout: LAYOUT,
    has_version_literal: false,
    objects: OBJECTS,
    heap: Some(HEAP),
    tasks: Some(TASKS),
    own: OwnInterpreter {
        has_qualified_names: true,
        resume: Some(151),
        ..v3_10::VERSION.own
    },
    ..v3_10::VERSION
};

pub(super) const LAYOUT: Layout = Layout {
    line_table: LineTable::Locations,
    instruction_encoding: InstructionEncoding::Pointer,
    anchor: Anchor::CFramePerEntry,
    runtime_key: 596,
    runtime_current: 576,
    runtime_interpreters: 40,
    interp_next: 0,
    interp_threads: 16,
    interp_modules: 888,
    tstate_thread_id: 152,
    tstate_first: 56,
    tstate_cframe: 56,
    tstate_root_cframe: 336,
    cframe_current_frame: 8,
    cframe_previous: 16,
    frame_size: 72,
    frame_previous: 48,
    frame_code: 32,
    frame_instr: 56,
    frame_owner: 69,
    frame_entry: 68,
    code_name: 120,
    code_qualname: 128,
    code_filename: 112,
    code_firstlineno: 72,
    code_linetable: 136,
    code_adaptive: 184,
    code_firsttraceable: 168,
    ..v3_10::LAYOUT
};

pub(super) const OBJECTS: ObjectLayout = ObjectLayout {
    lock: GilLocation::Current { lock: Some(360) },
    names: LocalNames::One(96),
    frame_locals: 72,
    instance_dict: Some(InstanceDict::ValuesAndDict { values: 32, dict: 24 }),
    dict_kinds: true,
    ..v3_10::OBJECTS
};

pub(super) const HEAP: HeapLayout = HeapLayout {
    pre_header: MANAGED_DICT,
    ..v3_10::HEAP
};

pub(super) const TASKS: TaskLayout = TaskLayout {
    coro: 136,
    name: Some(144),
    waiter: 128,
    coroutine_frame: CoroutineFrame::Inline(80),
    frame_state: FrameState::InCoroutine(75, STATES),
    stack_top: StackTop::Count(64, 72),
    coroutine_name: 40,
    code_flags: 48,
    frame_object_frame: Some(24),
    greenlet_stack: 56,
    ..v3_10::TASKS
};

pub(super) const STATES: StateValues = StateValues {
    suspended: (-1, -1),
    executing: 0,
    created: -2,
};
