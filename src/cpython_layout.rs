//! Layout of one build of CPython: offsets in bytes and a few shape tags. Plain data, no logic, no version tests;
//! `cpython` fills it in, the frame walkers (in the kernel and here) use it.

use crate::event::ProgramId;
use crate::event::probes::AllocationProbe;

/// "This interpreter has no such field."
pub const ABSENT: u16 = u16::MAX;

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

/// Encoding of a frame's current position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionEncoding {
    /// `f_lasti` counts bytes; -1: not started.
    Bytes,
    /// `f_lasti` counts 2-byte code units; -1: not started.
    Units,
    /// Address of a code unit.
    Pointer,
}

/// How Python frames are matched with native ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// One native call of the eval function per Python frame; recognized by the function's address range.
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
    pub instruction_encoding: InstructionEncoding,
    pub anchor: Anchor,

    // _PyRuntimeState
    /// Index of the pthread key that holds the thread's current thread state, 0 if there is none.
    pub runtime_key: u32,
    /// Attached thread state (`gilstate.tstate_current`), 0 if there is none.
    pub runtime_current: u32,
    pub runtime_interpreters: u32,
    /// Number of the next code object (u32), relative to `_PyRuntime`; 0 if not known. Of the main interpreter or of
    /// all.
    pub runtime_generation: i32,
    // PyInterpreterState
    pub interp_next: u32,
    pub interp_threads: u32,
    /// `sys.modules`.
    pub interp_modules: u32,
    /// Number of code objects freed (u64, 3.14 and later), 0 if there is none.
    pub interp_generation: u32,
    // PyThreadState
    pub tstate_next: u16,
    pub tstate_interp: u16,
    pub tstate_thread_id: u16,
    /// Innermost frame, or the CFrame that points to it.
    pub tstate_first: u16,
    pub tstate_cframe: u16,
    pub tstate_root_cframe: u16,
    /// Pointer to the frame that ends every chain (3.15).
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
    /// Which copy of the bytecode runs, 0: the code object's own (free-threaded builds, 3.14).
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
    /// Version of the code object, never reused (`co_version`, 3.12 and later); 0: none was left.
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
    /// Size of the prefix of a code object that holds all fields that are read, bytes.
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
        let last = fields.into_iter().filter(|at| *at != ABSENT).max();
        last.unwrap_or(0).saturating_add(8)
    }
}

/// How a C library finds `pthread_getspecific` values from a thread's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    /// Offset of `struct pthread.specific` (glibc, nptl/descr.h).
    Glibc(u32),
    /// Offset of `struct pthread.tsd` (musl, src/internal/pthread_impl.h).
    Musl(u32),
}

/// What a C library has for each thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadDescriptor {
    pub tls: Tls,
    /// Bytes from the descriptor, which `pthread_self` returns, up to where the thread pointer points; 0 on x86-64.
    pub size: u32,
}

/// Where a thread keeps the address of its current thread state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadStateLocation {
    /// In a pthread key, whose index lies at `Layout::runtime_key`.
    Key,
    /// In a thread-local variable of the executable, so many bytes from the thread pointer.
    Offset(i32),
    /// In a thread-local variable of a shared library, at `offset` in its block. The C library's number of that block
    /// is stored `id` bytes from `_PyRuntime`.
    Block { id: i32, offset: u32 },
    /// In no known location: taken from the interpreter's list.
    InterpreterList,
}

/// All that a backend needs to walk the Python frames of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interpreter {
    /// avma of `_PyRuntime`; before 3.7, of the first of the variables that were merged into it.
    pub runtime: u64,
    pub layout: Layout,
    pub thread_state: ThreadStateLocation,
    pub descriptor: ThreadDescriptor,
}

/// Everything a backend needs to know about a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetLayout {
    /// avma just past the main thread's frames (of `argc`); 0 if unknown.
    pub stack_end: u64,
    pub python: Option<Interpreter>,
    /// (`pthread_self`, thread states) of threads that have several: they run subinterpreters. Of all threads with
    /// [`ThreadStateLocation::InterpreterList`].
    pub states_by_thread: Vec<(u64, Vec<u64>)>,
    /// Thread states that have been seen to run code in another thread than the one that they name. With any,
    /// `states_by_thread` has all threads.
    pub lent_states: Vec<u64>,
    pub locks: InterpreterLocks,
    /// Set if the tasks of samples are wanted, and the process has asyncio.
    pub running_tasks: Option<RunningTasks>,
    /// Set if spans are wanted, and the process has published where they are.
    pub spans: Option<SpanLocation>,
    /// The same of the OpenTelemetry context of threads.
    pub thread_context: Option<ThreadContext>,
    /// Threads that have a thread state, as (number, `pthread_self`), if the dispatchers of native workers are wanted.
    pub python_threads: Vec<(u32, u64)>,
    /// Registers that native workers started with, as far as they are on their stacks: pointers into the stack of the thread that
    /// created the worker say nothing of its work.
    pub inherited: Vec<(u32, Vec<u64>)>,
    /// Where each process that runs the same program has the interpreter, if that is of use.
    pub program: Option<(ProgramId, InterpreterPlace)>,
    /// Where it publishes the allocations that it samples, if that is wanted.
    pub allocation_probes: Vec<AllocationProbe>,
}

/// Where a program has its interpreter, relative to what is known of a process before its mappings are. Distances in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterpreterPlace {
    /// From the start of the program's code to `_PyRuntime`.
    Program { runtime: u64 },
    /// In a library: from its base address to `_PyRuntime` and to its dynamic section; and from the start of the program's
    /// code to the address of the loader's list of libraries.
    Library { runtime: u64, dynamic: u64, list: u64 },
}

/// Where a process keeps which asyncio tasks run. Offsets in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningTasks {
    /// avma of the dictionary event loop -> task; 0: thread states have the task.
    pub current: u64,
    /// From a dictionary to its keys, and from there to the first entry of a small one.
    pub keys: u16,
    pub entries: u16,
    /// From a thread state to the task.
    pub task: u16,
    /// From a task to its coroutine, and from there to the coroutine's frame, or to a pointer to it.
    pub coroutine: u16,
    pub frame: u16,
    pub frame_is_pointer: bool,
    /// From a task to its name; before 3.8 from its coroutine to the coroutine's.
    pub name: u16,
    pub coroutine_has_name: bool,
    /// From a task, or other future, to its first callback, and from a task to the future that it awaits.
    pub callback: u16,
    pub waiter: u16,
    /// From a function to its closure, from a tuple to its items, and from any object to what follows its header.
    pub closure: u16,
    pub items: u16,
    pub head: u16,
    /// From a task to the one that awaits it, and to the byte that says whether it is a set of them; 0 before 3.14.
    pub awaited_by: u16,
    pub awaited_by_is_set: u16,
}

/// Where a process keeps which span is active in a thread: in a context variable. Offsets in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanLocation {
    /// avma of the context variable, and its hash as the mapping has it.
    pub variable: u64,
    pub hash: u32,
    /// avma of the types of a mapping's nodes.
    pub bitmap_node: u64,
    pub array_node: u64,
    /// From a thread state to its context.
    pub context: u16,
    /// Bytes of a `PyObject`: where the fields of objects begin.
    pub header: u16,
    /// From the variable's value, a tuple, to its first item, and from there, a bytes object, to its bytes.
    pub item: u16,
    pub data: u16,
}

/// Where the threads of a process keep the pointer to their OpenTelemetry context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadContext {
    /// From a thread's vector of thread-local blocks to the address of the block, bytes; 0: it is next to the thread pointer.
    pub block: u32,
    /// From the block, or the thread pointer, to the pointer.
    pub offset: u64,
}

/// Where the global locks (GIL) of a process's interpreters lie. Without any where that is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InterpreterLocks {
    /// avma of each `struct _gil_runtime_state`.
    pub at: Vec<u64>,
    /// Bytes of each, up to the last futex in it.
    pub len: u32,
    /// Offset of the thread state that took it last; whether it is held follows.
    pub last_holder: u32,
    /// Offset in an interpreter of the pointer to its lock; 0: all have the first one.
    pub in_interpreter: u32,
}

impl InterpreterLocks {
    /// Does this address lie in one of them?
    pub fn contain(&self, avma: u64) -> bool {
        self.at.iter().any(|at| avma.wrapping_sub(*at) < self.len.into())
    }
}
