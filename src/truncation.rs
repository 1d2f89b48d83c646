//! Why a stack is incomplete.

/// Why a stack is incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Truncation {
    /// The thread's user registers could not be read.
    NoRegisters,
    /// A word that the unwinder needs lies on a stack page that was not present.
    StackHole,
    /// The stack is deeper than the copy.
    StackTooDeep,
    /// The next frame lies on another stack (signal stack, coroutine).
    ForeignStack,
    /// The stack of one greenlet is being swapped for that of another.
    GreenletSwitch,
    /// The return address lies in no mapped code.
    ReturnAddressNotInCode,
    /// Code without unwind information, and no fallback found the caller.
    NoUnwindInfo,
    /// Unwind tables that are damaged or lead in a circle.
    BadUnwindInfo,
    /// More native frames than the limit.
    TooManyFrames,
    /// Memory of the interpreter's frames was unreadable.
    PythonFault,
    /// More Python frames than the limit.
    PythonTooDeep,
    /// The eval function runs, but its Python frames are not available: an unknown version, or the process was sampled
    /// before its interpreter was found.
    PythonUnknown,
    /// Interpreter frames and native frames do not match.
    InterleaveMismatch,
    /// Frames of compiled Python are left out: nothing says which native function each one belongs to.
    CompiledPython,
    /// A code object was freed before its name was read.
    CodeObjectFreed,
    /// More code objects than the limit.
    CodeObjectLimit,
    /// More different stacks than the limit.
    TreeLimit,
}

impl Truncation {
    /// The reason in words, as it is in the tree: `[truncated: REASON]`.
    pub fn reason(self) -> &'static str {
        match self {
            Truncation::NoRegisters => "no user registers",
            Truncation::StackHole => "stack page not present",
            Truncation::StackTooDeep => "stack deeper than the copy",
            Truncation::ForeignStack => "continues on another stack",
            Truncation::GreenletSwitch => "greenlet switch",
            Truncation::ReturnAddressNotInCode => "return address outside code",
            Truncation::NoUnwindInfo => "no unwind information",
            Truncation::BadUnwindInfo => "damaged unwind information",
            Truncation::TooManyFrames => "too many native frames",
            Truncation::PythonFault => "Python frame unreadable",
            Truncation::PythonTooDeep => "too many Python frames",
            Truncation::PythonUnknown => "unknown interpreter",
            Truncation::InterleaveMismatch => "frames do not match",
            Truncation::CompiledPython => "place of compiled Python unknown",
            Truncation::CodeObjectFreed => "code object freed",
            Truncation::CodeObjectLimit => "too many different code objects",
            Truncation::TreeLimit => "too many different stacks",
        }
    }
}
