//! Offsets of each CPython minor version, x86-64 release builds: read from the DWARF of 3.8.18, 3.9.18, 3.10.13,
//! 3.11.7, 3.12.1 and 3.13.0, and stable over the patch releases of each minor for these fields. Structures:
//! Include/internal/pycore_runtime.h, pycore_interp.h, pycore_frame.h; Include/cpython/pystate.h, code.h,
//! frameobject.h, unicodeobject.h of the tag named in each row.

use crate::layout::{Anchor, Layout, LineTable, NONE, Position};

/// (major, minor) -> layout.
pub const ROWS: &[((u8, u8), Layout)] = &[
    ((3, 8), V3_8),
    ((3, 9), V3_9),
    ((3, 10), V3_10),
    ((3, 11), V3_11),
    ((3, 12), V3_12),
    ((3, 13), V3_13),
];

/// v3.8.18
const V3_8: Layout = Layout {
    line_table: LineTable::Lnotab,
    position: Position::Bytes,
    anchor: Anchor::EvalRange,
    runtime_key: 1396,
    runtime_current: 1368,
    runtime_interpreters: 32,
    interp_next: 0,
    interp_threads: 8,
    tstate_next: 8,
    tstate_interp: 16,
    tstate_thread_id: 176,
    tstate_first: 24,
    tstate_cframe: NONE,
    tstate_root_cframe: NONE,
    cframe_current_frame: NONE,
    cframe_previous: NONE,
    frame_size: 108,
    frame_previous: 24,
    frame_code: 32,
    frame_instr: 104,
    frame_owner: NONE,
    frame_entry: NONE,
    code_name: 112,
    code_qualname: NONE,
    code_filename: 104,
    code_firstlineno: 40,
    code_linetable: 120,
    code_adaptive: NONE,
    code_firsttraceable: NONE,
    code_version: NONE,
    str_length: 16,
    str_state: 32,
    str_ascii_data: 48,
    str_compact_data: 72,
    bytes_size: 16,
    bytes_data: 32,
};

/// v3.9.18
const V3_9: Layout = Layout {
    runtime_key: 588,
    runtime_current: 568,
    ..V3_8
};

/// v3.10.13
const V3_10: Layout = Layout {
    line_table: LineTable::Ranges,
    position: Position::Units,
    anchor: Anchor::CFramePerFrame,
    tstate_cframe: 48,
    tstate_root_cframe: 264,
    cframe_previous: 8,
    frame_size: 100,
    frame_instr: 96,
    ..V3_9
};

/// v3.11.7
const V3_11: Layout = Layout {
    line_table: LineTable::Locations,
    position: Position::Pointer,
    anchor: Anchor::CFramePerEntry,
    runtime_key: 596,
    runtime_current: 576,
    runtime_interpreters: 40,
    interp_next: 0,
    interp_threads: 16,
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
    ..V3_10
};

/// v3.12.1
const V3_12: Layout = Layout {
    anchor: Anchor::Shim,
    runtime_key: 1548,
    runtime_current: 0,
    interp_threads: 72,
    tstate_thread_id: 136,
    tstate_root_cframe: 272,
    cframe_current_frame: 0,
    cframe_previous: 8,
    frame_previous: 8,
    frame_code: 0,
    frame_owner: 70,
    frame_entry: NONE,
    code_firstlineno: 68,
    code_adaptive: 192,
    code_firsttraceable: 176,
    code_version: 92,
    str_ascii_data: 40,
    str_compact_data: 56,
    ..V3_11
};

/// v3.13.0
const V3_13: Layout = Layout {
    runtime_key: 2164,
    runtime_interpreters: 632,
    interp_next: 7264,
    interp_threads: 7344,
    tstate_thread_id: 152,
    tstate_first: 72,
    tstate_cframe: NONE,
    tstate_root_cframe: NONE,
    cframe_current_frame: NONE,
    cframe_previous: NONE,
    code_adaptive: 200,
    code_firsttraceable: 184,
    ..V3_12
};
