//! CPython 3.10, from the DWARF of v3.10.13. New are a line table of ranges, positions in code units, and a CFrame
//! in the native frame of each call of the eval function.

use super::{VersionFacts, v3_8, v3_9};
use crate::cpython::heap_layout::HeapLayout;
use crate::cpython::object_layout::ObjectLayout;
use crate::cpython::tasks::layout::{FrameState, StackTop, TaskLayout};
use crate::cpython_layout::{Anchor, InstructionEncoding, Layout, LineTable};

pub const VERSION: VersionFacts = VersionFacts {
    minor: 10,
    layout: LAYOUT,
    objects: OBJECTS,
    heap: Some(HEAP),
    tasks: Some(TASKS),
    ..v3_9::VERSION
};

pub(super) const LAYOUT: Layout = Layout {
    line_table: LineTable::Ranges,
    instruction_encoding: InstructionEncoding::Units,
    anchor: Anchor::CFramePerFrame,
    tstate_cframe: 48,
    tstate_root_cframe: 264,
    cframe_previous: 8,
    frame_size: 100,
    frame_instr: 96,
    ..v3_9::LAYOUT
};

pub(super) const OBJECTS: ObjectLayout = ObjectLayout {
    frame_locals: 352,
    type_keys: 872,
    ..v3_9::OBJECTS
};

pub(super) const HEAP: HeapLayout = HeapLayout {
    pool: 16 << 10,
    ..v3_8::HEAP
};

pub(super) const TASKS: TaskLayout = TaskLayout {
    coro: 160,
    name: Some(168),
    waiter: 152,
    state: 88,
    frame_state: FrameState::InFrame(108),
    stack_top: StackTop::Depth(64, 80),
    coroutine_name: 48,
    function_name: 32,
    closure: 72,
    ..v3_9::TASKS
};
