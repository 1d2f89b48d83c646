//! Where one build of CPython keeps things: offsets in bytes and a few shape tags. Plain data, no logic, no version
//! tests; `interp` fills it, the walkers (in the kernel and here) follow it.

/// "This interpreter has no such field."
pub const NONE: u16 = u16::MAX;

/// Format of a code object's line table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LineTable {
    /// `co_lnotab` with signed line deltas (Objects/lnotab_notes.txt, 3.6 to 3.9).
    Lnotab,
    /// `co_linetable` of 3.10 (Objects/lnotab_notes.txt, 3.10).
    Ranges,
    /// Location table of 3.11 and later (Objects/locations.md, 3.11).
    Locations,
}

/// What the frame holds as its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// `f_lasti` counts bytes; -1: not started.
    Bytes,
    /// `f_lasti` counts 2-byte code units; -1: not started.
    Units,
    /// Address of a code unit.
    Pointer,
}

/// How Python frames find their places between the native ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// One native call of the eval function per Python frame; told by the function's address range.
    EvalRange,
    /// A CFrame in the native frame of each call of the eval function, one per Python frame (3.10).
    CFramePerFrame,
    /// A CFrame in the native frame of each call; the group's outermost Python frame has `is_entry` set (3.11).
    CFramePerEntry,
    /// An entry ("shim") frame in the native frame of each call, linked into the frame chain (3.12 and later).
    Shim,
}

/// Offsets of one CPython build; 16 bits where the structure is small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub line_table: LineTable,
    pub position: Position,
    pub anchor: Anchor,

    // _PyRuntimeState
    /// Index of the pthread key that holds a thread's own thread state, 0 where there is none.
    pub runtime_key: u32,
    /// Attached thread state (`gilstate.tstate_current`), 0 where there is none.
    pub runtime_current: u32,
    pub runtime_interpreters: u32,
    /// Number that the next code object gets (u32), from `_PyRuntime` on; 0 where it is not known. Of the main interpreter
    /// or of all.
    pub runtime_generation: i32,
    // PyInterpreterState
    pub interp_next: u32,
    pub interp_threads: u32,
    /// How many code objects were freed (u64, 3.14 and later), 0 where that is not told.
    pub interp_generation: u32,
    // PyThreadState
    pub tstate_next: u16,
    pub tstate_interp: u16,
    pub tstate_thread_id: u16,
    /// Innermost frame, or the CFrame that points to it.
    pub tstate_first: u16,
    pub tstate_cframe: u16,
    pub tstate_root_cframe: u16,
    /// Pointer to the frame that every chain ends at (3.15).
    pub tstate_base_frame: u16,
    // CFrame
    pub cframe_current_frame: u16,
    pub cframe_previous: u16,
    // PyFrameObject or _PyInterpreterFrame
    pub frame_size: u16,
    pub frame_previous: u16,
    pub frame_code: u16,
    pub frame_instr: u16,
    pub frame_owner: u16,
    pub frame_entry: u16,
    /// Which copy of the bytecode runs, 0 the code object's own (free-threaded builds, 3.14).
    pub frame_copy: u16,
    // PyCodeObject
    pub code_name: u16,
    pub code_qualname: u16,
    pub code_filename: u16,
    pub code_firstlineno: u16,
    pub code_linetable: u16,
    /// First code unit, inside the object.
    pub code_adaptive: u16,
    pub code_firsttraceable: u16,
    /// Number of the code object, never given twice (`co_version`, 3.12 and later); 0: none was left.
    pub code_version: u16,
    /// Pointer to an array: its length, then the address of each copy of the bytecode.
    pub code_copies: u16,
    // PyUnicodeObject, PyBytesObject
    pub str_length: u16,
    pub str_state: u16,
    /// Lowest bit of `state.kind`; `compact` and `ascii` follow.
    pub str_kind_bit: u16,
    pub str_ascii_data: u16,
    pub str_compact_data: u16,
    pub bytes_size: u16,
    pub bytes_data: u16,
}

impl Layout {
    /// Bytes of a code object that hold all its fields that are read.
    pub fn code_copied(&self) -> u16 {
        let fields = [
            self.code_name,
            self.code_qualname,
            self.code_filename,
            self.code_firstlineno,
            self.code_linetable,
            self.code_firsttraceable,
            self.code_version,
        ];
        let last = fields.into_iter().filter(|at| *at != NONE).max();
        last.unwrap_or(0).saturating_add(8)
    }
}

/// How a C library finds `pthread_getspecific` values from the thread pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    /// Offset of `struct pthread.specific` (glibc, nptl/descr.h).
    Glibc(u32),
    /// Offset of `struct pthread.tsd` (musl, src/internal/pthread_impl.h).
    Musl(u32),
}

/// Where a thread keeps the address of its own thread state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// In a pthread key, whose index lies at `Layout::runtime_key`.
    Key,
    /// In a thread-local variable of the executable, so many bytes from the thread pointer.
    Offset(i32),
    /// In a thread-local variable of a shared library, so far into its block. The number by which the C library knows
    /// that block lies `id` bytes from `_PyRuntime`.
    Block { id: i32, offset: u32 },
    /// In no place that we know: the interpreter's list has to tell.
    Listed,
}

/// All that a backend needs to walk the Python frames of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interpreter {
    /// avma of `_PyRuntime`; before 3.7, of the first of the variables that it holds since.
    pub runtime: u64,
    pub layout: Layout,
    pub own: Own,
    pub tls: Tls,
}

/// What a backend is told of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// avma just past the main thread's frames (where `argc` lies); 0 if unknown.
    pub stack_end: u64,
    pub python: Option<Interpreter>,
    /// (`pthread_self`, thread states) of threads that have several: they run subinterpreters. Of all threads where
    /// they do not tell themselves ([`Own::Listed`]).
    pub nested: Vec<(u64, Vec<u64>)>,
}
