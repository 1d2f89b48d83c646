//! Offsets of each CPython minor version on x86-64, read from the DWARF of the release named in each row, and stable
//! over the patch releases of each minor for these fields. Debug builds from 3.8 on differ in none of them. Structures:
//! Include/internal/pycore_runtime.h, pycore_interp.h, pycore_frame.h; Include/cpython/pystate.h, code.h,
//! frameobject.h, unicodeobject.h of the tag named in each row; before 3.8 the same files without `pycore_` and
//! `cpython/`.

use crate::cpython_layout::{ABSENT, Anchor, InstructionEncoding, Layout, LineTable};

/// (major, minor) -> layout.
pub const ROWS: &[((u8, u8), Layout)] = &[
    ((3, 6), V3_6),
    ((3, 7), V3_7),
    ((3, 8), V3_8),
    ((3, 9), V3_9),
    ((3, 10), V3_10),
    ((3, 11), V3_11),
    ((3, 12), V3_12),
    ((3, 13), V3_13),
    ((3, 14), V3_14),
    ((3, 15), V3_15),
];

/// The same for free-threaded builds: object headers are 16 bytes longer (Include/object.h, v3.13.0).
pub const FREE_THREADED: &[((u8, u8), Layout)] = &[((3, 13), V3_13T), ((3, 14), V3_14T), ((3, 15), V3_15T)];

/// v3.6.15. The later members of `_PyRuntime` are separate variables: their addresses come from each file's symbols.
const V3_6: Layout = Layout {
    runtime_key: 0,
    runtime_current: 0,
    runtime_interpreters: 0,
    interp_modules: 16,
    tstate_thread_id: 152,
    frame_size: 124,
    frame_instr: 120,
    ..V3_7
};

/// v3.7.16
const V3_7: Layout = Layout {
    runtime_key: 1508,
    runtime_current: 1480,
    runtime_interpreters: 24,
    interp_modules: 40,
    code_name: 104,
    code_filename: 96,
    code_firstlineno: 36,
    code_linetable: 112,
    ..V3_8
};

/// v3.8.18
const V3_8: Layout = Layout {
    line_table: LineTable::Lnotab,
    instruction_encoding: InstructionEncoding::Bytes,
    anchor: Anchor::EvalRange,
    runtime_key: 1396,
    runtime_current: 1368,
    runtime_interpreters: 32,
    runtime_generation: 0,
    interp_next: 0,
    interp_threads: 8,
    interp_modules: 56,
    interp_generation: 0,
    tstate_next: 8,
    tstate_interp: 16,
    tstate_thread_id: 176,
    tstate_first: 24,
    tstate_cframe: ABSENT,
    tstate_root_cframe: ABSENT,
    tstate_base_frame: ABSENT,
    cframe_current_frame: ABSENT,
    cframe_previous: ABSENT,
    frame_size: 108,
    frame_previous: 24,
    frame_code: 32,
    frame_instr: 104,
    frame_owner: ABSENT,
    frame_entry: ABSENT,
    frame_copy: ABSENT,
    code_name: 112,
    code_qualname: ABSENT,
    code_filename: 104,
    code_firstlineno: 40,
    code_linetable: 120,
    code_adaptive: ABSENT,
    code_firsttraceable: ABSENT,
    code_version: ABSENT,
    code_copies: ABSENT,
    str_length: 16,
    str_state: 32,
    str_kind_bit: 2,
    str_ascii_data: 48,
    str_compact_data: 72,
    bytes_size: 16,
    bytes_data: 32,
};

/// v3.9.18
const V3_9: Layout = Layout {
    runtime_key: 588,
    runtime_current: 568,
    interp_modules: 856,
    ..V3_8
};

/// v3.10.13
const V3_10: Layout = Layout {
    line_table: LineTable::Ranges,
    instruction_encoding: InstructionEncoding::Units,
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
    ..V3_10
};

/// v3.12.1
const V3_12: Layout = Layout {
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
    ..V3_11
};

/// v3.13.0
const V3_13: Layout = Layout {
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
    ..V3_12
};

/// v3.14.8
const V3_14: Layout = Layout {
    runtime_key: 2340,
    runtime_interpreters: 808,
    interp_next: 7272,
    interp_modules: 7688,
    interp_generation: 7992,
    frame_size: 75,
    frame_owner: 74,
    code_adaptive: 208,
    code_firsttraceable: 192,
    ..V3_13
};

/// v3.15.0
const V3_15: Layout = Layout {
    runtime_key: 0,
    runtime_interpreters: 936,
    interp_next: 7264,
    interp_threads: 7336,
    interp_modules: 7592,
    interp_generation: 7944,
    tstate_thread_id: 176,
    tstate_base_frame: 80,
    ..V3_14
};

/// v3.13.15, --disable-gil
const V3_13T: Layout = Layout {
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
    ..V3_13
};

/// v3.14.8, --disable-gil
const V3_14T: Layout = Layout {
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
    ..V3_13T
};

/// v3.15.0, --disable-gil
const V3_15T: Layout = Layout {
    runtime_key: 0,
    runtime_interpreters: 936,
    interp_next: 7264,
    interp_threads: 7336,
    interp_modules: 7592,
    interp_generation: 7952,
    tstate_thread_id: 176,
    tstate_base_frame: 80,
    ..V3_14T
};
