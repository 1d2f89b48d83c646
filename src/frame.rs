//! Frames before symbolization: native and Python ones, and those of a stack in calling order.

use crate::event::{AwaitKind, InterruptKind, Pid, ThreadState, Tid};
use crate::truncation::Truncation;

/// A file mapped by some process; index into the table of `process::modules`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModuleId(pub u32);

/// How a native frame's caller was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UnwindMethod {
    /// DWARF call frame information.
    Cfi,
    /// Outermost frame: the tables say that nothing called it.
    StackEnd,
    /// Outermost frame of a stack that the thread was switched to: frames further out belong to other stacks.
    Begins(Origin),
    /// Analysis of the function's instructions: it has no call frame information.
    InstructionAnalysis,
    /// Frame pointer chain, in code without call frame information.
    FramePointer,
    /// A scan of the stack for a return address.
    StackScan,
    /// The caller was not found: the stack is truncated above this frame.
    Failed,
}

impl UnwindMethod {
    /// Was the caller, or the end, found by unwind tables and known first functions of stacks alone?
    #[inline]
    pub fn is_exact(self) -> bool {
        matches!(
            self,
            UnwindMethod::Cfi | UnwindMethod::StackEnd | UnwindMethod::Begins(_)
        )
    }
}

/// What a stack other than the thread's own belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Origin {
    /// A greenlet: it runs on the thread's stack, or on a copy of a part of it.
    Greenlet,
    /// A stack made by `makecontext` or boost.context.
    Context,
    /// Another task, which changed the process's memory: it has no stack here.
    OtherTask,
}

impl Origin {
    /// The frame that represents it, outermost in its stacks.
    pub fn name(self) -> &'static str {
        match self {
            Origin::Greenlet => "[greenlet]",
            Origin::Context => "[context]",
            Origin::OtherTask => "[another task]",
        }
    }
}

/// One native frame, innermost first in a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NativeFrame {
    /// avma for symbolization: the interrupted instruction, or one byte before the return address.
    pub lookup: u64,
    /// Stack interval `[sp, cfa)` of this frame, which holds its locals.
    pub sp: u64,
    pub cfa: u64,
    /// File and svma of `lookup`, if a file is mapped there.
    pub location: Option<(ModuleId, u64)>,
    pub method: UnwindMethod,
}

/// A Python code object copied from some process; index into `cpython::code_object::CodeTable`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CodeId(pub u32);

/// The name of a task; index into `session`'s table of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskNameId(pub u32);

/// A Python frame of a sample with its code object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PyFrame {
    Code {
        code: CodeId,
        instr: i32,
    },
    /// Its code object was not read, for this reason.
    Lost(Truncation),
}

/// The Python frames that run in one native call of the eval function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvalGroup {
    /// avma of the anchor in that native frame; `None`: matched by order alone.
    pub anchor: Option<u64>,
    /// How many of the frames, from the innermost one on, no call of the eval function runs, as it seems: compiled Python
    /// (Nuitka) links frames of its own into the chain.
    pub compiled: usize,
    /// Range in [`EvalGroups::frames`].
    begin: usize,
    end: usize,
}

/// The Python frames of a stack in groups, innermost first. Allocated once and reused: a stack may have thousands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EvalGroups {
    /// In calling order.
    pub list: Vec<EvalGroup>,
    frames: Vec<PyFrame>,
}

impl EvalGroups {
    pub fn clear(&mut self) {
        self.list.clear();
        self.frames.clear();
    }

    /// Begins an empty group.
    #[inline]
    pub fn begin(&mut self, anchor: Option<u64>) {
        let at = self.frames.len();
        self.list.push(EvalGroup {
            anchor,
            compiled: 0,
            begin: at,
            end: at,
        });
    }

    /// Adds a frame to the last group that no call of the eval function runs; those that one runs follow.
    #[inline]
    pub fn extend_compiled(&mut self, frame: Option<PyFrame>) {
        self.extend(frame);
        if let Some(last) = self.list.last_mut() {
            last.compiled = last.end - last.begin;
        }
    }

    /// Adds frames to the last group.
    #[inline]
    pub fn extend(&mut self, frames: impl IntoIterator<Item = PyFrame>) {
        for frame in frames {
            self.frames.push(frame);
        }
        if let Some(last) = self.list.last_mut() {
            last.end = self.frames.len();
        }
    }

    /// The frames of one of these groups.
    #[inline]
    pub fn frames(&self, group: &EvalGroup) -> &[PyFrame] {
        &self.frames[group.begin..group.end]
    }
}

/// One frame of an interleaved stack before symbolization; the key of the count tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RawFrame {
    Process(Pid),
    Thread(Tid),
    /// `instr`: byte offset in the code, -1 before the first instruction.
    Python {
        code: CodeId,
        instr: i32,
    },
    /// `svma` is a lookup address: inside the call instruction for callers.
    Native {
        module: ModuleId,
        svma: u64,
    },
    /// Code without a file (JIT, trampolines), or an address that is not code.
    Anonymous {
        pid: Pid,
        avma: u64,
    },
    Kernel(u64),
    /// An asyncio task, above the frames of its coroutine.
    Task(TaskNameId),
    /// A native thread that works for the code above it; its own stack follows.
    Worker(Tid),
    /// Outermost frame of a stack that is not the thread's own.
    Origin(Origin),
    Truncated(Truncation),
    /// The state of a thread that was not running; always the innermost frame.
    State(ThreadState),
    /// What a suspended task awaits; always the innermost frame.
    Awaiting(AwaitKind),
    /// The thread that ended the wait above it; its stack follows.
    WokenBy(Pid, Tid),
    /// What ended the wait above it, where no thread did; the kernel's functions follow.
    Interrupt(InterruptKind),
}
