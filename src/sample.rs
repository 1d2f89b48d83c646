//! The vocabulary of the pipeline: what a backend delivers and what the stages hand on.
//! Plain data; knows no process, no file and no symbol.
//!
//! Address words used everywhere: an **avma** is an address as the running process sees it; an **svma** is
//! an address as the ELF file states it (what `objdump` and `addr2line` print); `avma - bias = svma`.

use crate::arch::Regs;

mod states;

pub use states::{Descriptor, ThreadState, TimeSpent, WaitKind};

mod copies;

pub use copies::{CodeCopy, Copies, Part};

pub type Pid = u32;
pub type Tid = u32;

/// Bytes of a page: the granularity at which a stack copy may have holes.
pub const PAGE: u64 = 4096;

/// A copy of one thread's stack, from its stack pointer upward, perhaps with unreadable pages in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StackBytes {
    /// avma of the first byte.
    pub base: u64,
    pub bytes: Vec<u8>,
    /// Bit `i` is set when the copy of page `base / PAGE + i` failed: it was not present.
    pub holes: Vec<u64>,
}

impl StackBytes {
    /// The word at `avma`, or `None` outside the copy and in a hole.
    #[inline]
    pub fn word(&self, avma: u64) -> Option<u64> {
        let at = usize::try_from(avma.checked_sub(self.base)?).ok()?;
        let word = self.bytes.get(at..)?.first_chunk()?;
        if !self.holes.is_empty() && (self.in_hole(avma) || self.in_hole(avma + 7)) {
            return None;
        }
        Some(u64::from_le_bytes(*word))
    }

    fn in_hole(&self, avma: u64) -> bool {
        let page = (avma / PAGE - self.base / PAGE) as usize;
        self.holes.get(page / 64).is_some_and(|w| w >> (page % 64) & 1 == 1)
    }

    /// Adds a copy that goes on where this one ends; one that does not is left out.
    pub fn append(&mut self, more: StackBytes) {
        if more.base != self.end() {
            return;
        }
        let first = more.base / PAGE - self.base / PAGE;
        for (i, word) in more.holes.iter().enumerate() {
            for bit in (0..64).filter(|bit| word >> bit & 1 == 1) {
                let page = (first + 64 * i as u64 + bit) as usize;
                if self.holes.len() <= page / 64 {
                    self.holes.resize(page / 64 + 1, 0);
                }
                self.holes[page / 64] |= 1 << (page % 64);
            }
        }
        self.bytes.extend(more.bytes);
    }

    /// avma just past the copy.
    pub fn end(&self) -> u64 {
        self.base.saturating_add(self.bytes.len() as u64)
    }
}

/// One entry of the interpreter's frame chain, as read at the sample instant, innermost first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PyRef {
    /// avma of the frame (for a boundary mark: of the mark itself).
    pub frame: u64,
    /// avma of the code object; 0 for a boundary mark.
    pub code: u64,
    /// `f_lasti` (CPython <= 3.10, as read) or the instruction pointer (avma).
    pub instr: u64,
    /// Hash of a few facts of the code object, so that a reused address is noticed; 0 if not taken.
    pub fingerprint: u32,
    /// `_PyInterpreterFrame.owner` where there is one.
    pub owner: u8,
    /// `_PyInterpreterFrame.is_entry` (3.11).
    pub entry: bool,
}

/// What became of the walk of the interpreter's frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PyWalk {
    /// No Python in this process (so far), or this thread has no thread state.
    #[default]
    NoPython,
    /// The chain was walked to its end.
    Complete,
    /// A read failed (page not present, or a wild pointer).
    Fault,
    /// More frames than the limit of the walk.
    TooDeep,
}

/// What a walk of a thread's interpreter frames must know of the thread, which stands still.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// The thread pointer, which is also `pthread_self()`.
    pub pointer: u64,
    /// General registers. One may hold the only link to a CFrame that is just being made.
    pub registers: [u64; 16],
}

/// What a walk of one thread's interpreter frames found. Made once and used again: a walk never lets it grow.
#[derive(Clone, Debug)]
pub struct Walked {
    /// Innermost first.
    pub python: Vec<PyRef>,
    /// As in [`Sample`].
    pub marks: Vec<PyRef>,
    pub walk: PyWalk,
    /// Of code objects that were not met before.
    pub codes: Copies,
}

/// Code objects copied in one walk, and bytes of them.
const COPIES: usize = 32;
const COPIED_BYTES: usize = 256 << 10;

impl Walked {
    /// Room for so many frames, and as many marks.
    pub fn with_room(frames: usize) -> Walked {
        Walked {
            python: Vec::with_capacity(frames),
            marks: Vec::with_capacity(frames),
            walk: PyWalk::NoPython,
            codes: Copies::with_room(COPIES, COPIED_BYTES),
        }
    }

    /// Forgets the last walk.
    pub fn clear(&mut self) {
        self.python.clear();
        self.marks.clear();
        self.walk = PyWalk::NoPython;
        self.codes.clear();
    }
}

/// Everything about one sampled thread at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    pub pid: Pid,
    pub tid: Tid,
    /// CLOCK_MONOTONIC, ns.
    pub time: u64,
    /// User registers; `None` when the kernel's frame could not be seen through.
    pub regs: Option<Regs>,
    pub stack: StackBytes,
    /// Kernel return addresses, innermost first.
    pub kernel: Vec<u64>,
    pub python: Vec<PyRef>,
    /// Addresses of the boundary marks that do not lie in the frame chain itself (CPython 3.10, 3.11: CFrames).
    pub marks: Vec<PyRef>,
    pub walk: PyWalk,
    pub time_spent: TimeSpent,
    /// Number of the system call that the thread is in; of samples with [`TimeSpent::blocked`].
    pub system_call: Option<u16>,
}

/// What a backend tells, in order of time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Sample(Box<Sample>),
    /// A code object that was not met before; its sample follows.
    Code {
        pid: Pid,
        copy: Box<CodeCopy>,
    },
    /// A file (or anonymous memory) was mapped executable.
    Mmap {
        pid: Pid,
        start: u64,
        end: u64,
        offset: u64,
        path: Vec<u8>,
    },
    Exec {
        pid: Pid,
        comm: Vec<u8>,
    },
    Fork {
        pid: Pid,
        parent: Pid,
    },
    Thread {
        pid: Pid,
        tid: Tid,
    },
    Comm {
        pid: Pid,
        tid: Tid,
        comm: Vec<u8>,
    },
    Exit {
        pid: Pid,
        tid: Tid,
    },
    /// Samples the kernel took and could not deliver.
    Lost(u64),
}

/// A file mapped by some process; index into the table of `process::modules`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModuleId(pub u32);

/// How a native frame's caller was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum How {
    /// DWARF call frame information.
    Cfi,
    /// Outermost frame: the tables say that nothing called it.
    End,
    /// Outermost frame of a stack that the thread was switched to: what lies outward of it belongs to others.
    Begins(Origin),
    /// The function's own instructions were followed: it has no call frame information.
    Code,
    /// Frame pointer chain, in code without call frame information.
    FramePointer,
    /// The stack was searched for a return address.
    Scan,
    /// The caller was not found: the stack is cut above this frame.
    Lost,
}

impl How {
    /// Do the tables of compilers, and known first functions of stacks, alone lead to the caller or to the end?
    pub fn is_exact(self) -> bool {
        matches!(self, How::Cfi | How::End | How::Begins(_))
    }
}

/// What a stack other than the thread's own belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Origin {
    /// A greenlet: it runs on the thread's stack, or on a copy of a part of it.
    Greenlet,
    /// A stack made by `makecontext` or boost.context.
    Context,
}

impl Origin {
    /// The frame that stands for it, outermost in its stacks.
    pub fn name(self) -> &'static str {
        match self {
            Origin::Greenlet => "[greenlet]",
            Origin::Context => "[context]",
        }
    }
}

/// One native frame, innermost first in a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NativeFrame {
    /// avma to look names up with: the interrupted instruction, or one byte before the return address.
    pub lookup: u64,
    /// Stack interval `[sp, cfa)` of this frame, in which its locals lie.
    pub sp: u64,
    pub cfa: u64,
    /// Where `lookup` lies: file and svma, if a file is mapped there.
    pub place: Option<(ModuleId, u64)>,
    pub how: How,
}

/// Why a stack is incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Cut {
    /// The thread's user registers could not be read.
    NoRegisters,
    /// A word that the unwinder needs lies on a stack page that was not present.
    StackHole,
    /// The stack is deeper than the copy.
    StackTooDeep,
    /// The next frame lies on some other stack (signal stack, coroutine).
    OtherStack,
    /// The stack of one greenlet is being exchanged for that of another.
    GreenletSwitch,
    /// The return address lies in no mapped code.
    NotCode,
    /// Code without unwind information through which no way was found.
    NoUnwindInfo,
    /// Unwind tables that are damaged or lead in a circle.
    BadUnwindInfo,
    /// More native frames than the limit.
    TooManyFrames,
    /// Memory of the interpreter's frames was unreadable.
    PythonFault,
    /// More Python frames than the limit.
    PythonTooDeep,
    /// The bytecode loop runs, but its Python frames are not to be had: a version that is not known, or a process that
    /// was sampled before its interpreter was found.
    PythonUnknown,
    /// Interpreter frames and native frames do not fit together.
    Unmerged,
    /// A code object died before its name was read.
    CodeGone,
    /// More code objects than are kept.
    TooMuchCode,
    /// More different stacks than are kept.
    TreeFull,
}

impl Cut {
    /// The reason in words, as it stands in the tree: `[cut: REASON]`.
    pub fn reason(self) -> &'static str {
        match self {
            Cut::NoRegisters => "no user registers",
            Cut::StackHole => "stack page not present",
            Cut::StackTooDeep => "stack deeper than the copy",
            Cut::OtherStack => "continues on another stack",
            Cut::GreenletSwitch => "greenlet switch",
            Cut::NotCode => "return address outside code",
            Cut::NoUnwindInfo => "no unwind information",
            Cut::BadUnwindInfo => "damaged unwind information",
            Cut::TooManyFrames => "too many native frames",
            Cut::PythonFault => "Python frame unreadable",
            Cut::PythonTooDeep => "too many Python frames",
            Cut::PythonUnknown => "Python frames not known",
            Cut::Unmerged => "Python and native frames do not fit",
            Cut::CodeGone => "code object gone",
            Cut::TooMuchCode => "too many different code objects",
            Cut::TreeFull => "too many different stacks",
        }
    }
}

/// A Python code object copied from some process; index into `interp::code::CodeTable`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CodeId(pub u32);

/// A Python frame of a sample, its code object known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PyFrame {
    Code {
        code: CodeId,
        instr: i32,
    },
    /// Its code object was not read, for this reason.
    Lost(Cut),
}

/// The Python frames that one native call of the bytecode loop runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// avma of the mark in that native frame; `None`: told by order alone.
    pub anchor: Option<u64>,
    /// Where they are among [`Groups::frames`].
    begin: usize,
    end: usize,
}

/// The Python frames of a stack in groups, innermost first. Made once and used again: a stack may have thousands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    /// In calling order.
    pub list: Vec<Group>,
    frames: Vec<PyFrame>,
}

impl Groups {
    pub fn clear(&mut self) {
        self.list.clear();
        self.frames.clear();
    }

    /// Begins a group, with no frames yet.
    pub fn begin(&mut self, anchor: Option<u64>) {
        let at = self.frames.len();
        self.list.push(Group {
            anchor,
            begin: at,
            end: at,
        });
    }

    /// Adds frames to the group begun last.
    pub fn extend(&mut self, frames: impl IntoIterator<Item = PyFrame>) {
        self.frames.extend(frames);
        if let Some(last) = self.list.last_mut() {
            last.end = self.frames.len();
        }
    }

    /// The frames of a group of these.
    pub fn frames(&self, group: &Group) -> &[PyFrame] {
        &self.frames[group.begin..group.end]
    }
}

/// One frame of a merged stack before names are known; the key of the raw tree.
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
    /// Code that no file backs (JIT, trampolines), or an address that is not code at all.
    Anonymous {
        pid: Pid,
        avma: u64,
    },
    Kernel(u64),
    /// Outermost frame of a stack that is not the thread's own.
    Origin(Origin),
    Cut(Cut),
    /// What the thread did instead of running; always the innermost frame.
    State(ThreadState),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_joined() {
        let part = |base: u64, fill: u8, holes: &[u64]| StackBytes {
            base,
            bytes: vec![fill; PAGE as usize],
            holes: holes.to_vec(),
        };
        let mut stack = part(0x1000_0800, 1, &[]);
        stack.append(part(0x1000_1800, 2, &[0b10]));
        stack.append(part(0x1000_2000, 3, &[])); // does not fit
        assert_eq!(stack.bytes.len() as u64, 2 * PAGE);
        let word = |avma| stack.word(avma).map(|w| w & 0xff);
        for (avma, expected) in [
            (0x1000_17f8, Some(1)),
            (0x1000_1800, Some(2)),
            (0x1000_1ff8, Some(2)),
            (0x1000_2000, None),
            (0x1000_27f8, None),
            (0x1000_2800, None),
        ] {
            assert_eq!(word(avma), expected, "{avma:x}");
        }
    }

    #[test]
    fn words_are_not_read_from_holes() {
        let base = 0x7000_0ff0;
        let stack = StackBytes {
            base,
            bytes: (0..0x2010u32).map(|i| i as u8).collect(),
            holes: vec![0b10],
        };
        assert_eq!(stack.word(base), Some(0x0706050403020100));
        assert_eq!(stack.word(0x7000_0ff8), Some(0x0f0e0d0c0b0a0908));
        assert_eq!(stack.word(0x7000_0ffc), None, "straddles the hole");
        assert_eq!(stack.word(0x7000_1000), None);
        assert_eq!(stack.word(0x7000_1fff), None);
        assert!(stack.word(0x7000_2000).is_some());
        assert_eq!(stack.word(stack.end() - 7), None, "past the end");
        assert_eq!(stack.word(base - 8), None);
        assert_eq!(stack.word(u64::MAX), None);
    }
}
