//! The vocabulary of the pipeline: what a backend delivers and what the stages pass on. Plain data, independent of
//! processes, files and symbols.
//!
//! Two kinds of addresses appear everywhere: an **avma** is an address as the running process sees it; an **svma** is
//! an address as stated in the ELF file (what `objdump` and `addr2line` print); `avma - bias = svma`.

use crate::arch::{GPRS, Regs};
use crate::limits::{MAX_CONTEXT, MAX_SPAN, MAX_STACK, MAX_STACKS};

mod code_copies;
pub mod probes;
mod states;

pub use code_copies::{CodeCopy, Copies, Part, RUNNING_TASK};
use probes::{FreedBlock, SampledBlock};
pub use states::{
    AwaitKind, Descriptor, FutexId, Holder, InterruptKind, Polled, SocketId, Suspension, ThreadState, TimeSpent,
    WaitKind, WakeUp,
};

pub use crate::profile::model::{Pid, Tid};

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

    /// Adds a copy that continues this one, perhaps after a hole; any other is dropped.
    pub fn append(&mut self, more: StackBytes) {
        let hole = more.base.checked_sub(self.end());
        let Some(hole) = hole.filter(|_| more.base - self.base <= MAX_STACKS * MAX_STACK) else {
            return;
        };
        let first = self.base / PAGE;
        if hole != 0 {
            for page in self.end() / PAGE..=(more.base - 1) / PAGE {
                self.add_hole(page - first);
            }
            self.bytes.resize(self.bytes.len() + hole as usize, 0);
        }
        for (i, word) in more.holes.iter().enumerate() {
            for bit in (0..64).filter(|bit| word >> bit & 1 == 1) {
                self.add_hole(more.base / PAGE - first + 64 * i as u64 + bit);
            }
        }
        self.bytes.extend(more.bytes);
    }

    fn add_hole(&mut self, page: u64) {
        let page = page as usize;
        if self.holes.len() <= page / 64 {
            self.holes.resize(page / 64 + 1, 0);
        }
        self.holes[page / 64] |= 1 << (page % 64);
    }

    /// avma just past the copy.
    pub fn end(&self) -> u64 {
        self.base.saturating_add(self.bytes.len() as u64)
    }
}

/// One entry of the interpreter's frame chain, as read at the sample instant, innermost first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawPyFrame {
    /// avma of the frame, or of the anchor.
    pub frame: u64,
    /// avma of the code object; 0 for an anchor.
    pub code: u64,
    /// `f_lasti` (CPython <= 3.10, as read) or the instruction pointer (avma).
    pub instr: u64,
    /// Hash of a few fields of the code object, so that a reused address is noticed; 0 if not taken.
    pub fingerprint: u32,
    /// `_PyInterpreterFrame.owner` where there is one.
    pub owner: u8,
    /// `_PyInterpreterFrame.is_entry` (3.11).
    pub entry: bool,
}

/// Outcome of the walk of the interpreter's frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WalkStatus {
    /// No Python in this process (so far), or this thread has no thread state.
    #[default]
    NoPython,
    /// The chain was walked to its end.
    Complete,
    /// A read failed (page not present, or a wild pointer).
    Fault,
    /// More frames than the limit of the walk.
    TooDeep,
    /// The chains were walked to their ends, but the thread state that is attached (up to CPython 3.11 it is the one that
    /// holds the GIL) is none of those that are known to be this thread's. Should the thread run the bytecode loop all the
    /// same, it does so in another state.
    Detached,
}

/// What a walk of a thread's interpreter frames needs from the thread, which is stopped.
#[derive(Clone, Copy, Debug)]
pub struct StoppedThread {
    /// Stack pointer; 0: not known.
    pub stack_pointer: u64,
    /// Address of its descriptor: `pthread_self()`. On x86-64 the thread pointer has it.
    pub thread_pointer: u64,
    /// General registers. One may hold the only link to a CFrame that is being created.
    pub registers: [u64; GPRS],
}

/// End of the stack that `sp` lies on: `argc` in the main thread (`main`), the thread descriptor in others (glibc and musl put it
/// above the stack). `None`: it is another stack (of signal handlers, of coroutines).
pub fn known_stack_end(sp: u64, thread_pointer: u64, main: u64) -> Option<u64> {
    if main >= sp && main - sp < 64 << 20 {
        return Some(main.saturating_add(8));
    }
    (thread_pointer > sp && thread_pointer - sp < 1 << 30).then_some(thread_pointer)
}

/// Result of a walk of one thread's interpreter frames. Allocated once and reused: a walk never grows it.
#[derive(Clone, Debug)]
pub struct PythonWalk {
    /// Innermost first.
    pub python: Vec<RawPyFrame>,
    /// As in [`Sample`].
    pub anchors: Vec<RawPyFrame>,
    pub walk: WalkStatus,
    /// As in [`Sample`].
    pub holds_lock: bool,
    /// As in [`Sample`].
    pub spans: SpanRecords,
    /// Copies of new code objects.
    pub codes: Copies,
}

/// Code objects copied in one walk, and their total size in bytes.
const COPIES: usize = 32;
const COPIED_BYTES: usize = 256 << 10;

impl PythonWalk {
    /// Capacity for so many frames, and as many anchors.
    pub fn with_capacity(frames: usize) -> PythonWalk {
        PythonWalk {
            python: Vec::with_capacity(frames),
            anchors: Vec::with_capacity(frames),
            walk: WalkStatus::NoPython,
            holds_lock: false,
            spans: SpanRecords {
                package: Vec::with_capacity(MAX_SPAN),
                context: Vec::with_capacity(MAX_CONTEXT),
            },
            codes: Copies::with_capacity(COPIES, COPIED_BYTES),
        }
    }

    /// Removes the last walk.
    pub fn clear(&mut self) {
        self.python.clear();
        self.anchors.clear();
        self.walk = WalkStatus::NoPython;
        self.holds_lock = false;
        self.spans.package.clear();
        self.spans.context.clear();
        self.codes.clear();
    }
}

/// The thread that a native worker works for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dispatcher {
    pub tid: Tid,
    /// It has not gone on in its Python code since it last woke the worker.
    pub is_unchanged: bool,
}

/// Everything about one sampled thread at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    pub pid: Pid,
    pub tid: Tid,
    /// CLOCK_MONOTONIC, ns.
    pub time: u64,
    /// User registers; `None` if the kernel stack did not lead to them.
    pub regs: Option<Regs>,
    pub stack: StackBytes,
    /// Kernel return addresses, innermost first.
    pub kernel: Vec<u64>,
    pub python: Vec<RawPyFrame>,
    /// Anchors that are not in the frame chain itself (CPython 3.10, 3.11: CFrames).
    pub anchors: Vec<RawPyFrame>,
    pub walk: WalkStatus,
    pub time_spent: TimeSpent,
    pub wake_up: WakeUp,
    /// The thread runs no Python itself and works for this one, whose Python frames these are.
    pub dispatcher: Option<Dispatcher>,
    /// The thread held the global lock of its interpreter. Known where [`TargetLayout`](crate::cpython_layout::TargetLayout)
    /// has the locks.
    pub holds_lock: bool,
    /// Number of the system call that the thread is in; in samples with [`TimeSpent::blocked`].
    pub system_call: Option<u16>,
    /// What it polls there, if that is one descriptor.
    pub polled: Option<Polled>,
    /// The thread was stopped or frozen; in samples with [`TimeSpent::blocked`].
    pub suspended: Option<Suspension>,
    /// Which spans are active in the thread.
    pub spans: SpanRecords,
    /// The asyncio tasks that run: the thread's own, and those of other threads with an event loop. Empty where they
    /// are not read.
    pub tasks: Vec<RunningTask>,
    /// The change of the process's resident memory that the sample was taken for.
    pub memory: Option<MemoryChange>,
    /// The block that the sample was taken for, where the process samples its allocations itself.
    pub allocation: Option<SampledBlock>,
    /// Of a recording of a whole host.
    pub host: Option<HostSample>,
}

/// A change of a process's resident memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryChange {
    /// Bytes; negative if memory was given back.
    pub bytes: i64,
    pub kind: MemoryKind,
    /// avma of the page fault, or where the memory begins that a system call fills; 0: not known.
    pub address: u64,
    /// Of what the system call fills, bytes; 0: a page fault. 1: faults of which this is the last one, whose page may not be
    /// there yet.
    pub length: u64,
    /// There is a sample of the same page fault already, which has made other pages resident.
    pub is_repeated: bool,
    /// How often the interval between samples was doubled when this one was chosen.
    pub doubled: u32,
}

/// What resident memory is: what the kernel counts apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    File,
    Anonymous,
    Shared,
}

/// What is taken of a thread whose process may not be known, and may have exited before anything of it can be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSample {
    /// Number of its cgroup in the hierarchy of version 2: the inode of its directory.
    pub cgroup: u64,
    /// Name of the process, that of its first thread, ended by a zero. The thread's own where the kernel does not say more.
    pub comm: [u8; 16],
    /// Set where the backend knew nothing of the process.
    pub new: Option<NewProcess>,
}

/// What a backend takes a process for that it does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewProcess {
    pub program: ProgramId,
    /// avma of `_PyRuntime` in the interpreter whose frames were read; 0: none were.
    pub runtime: u64,
    /// Executable memory that its program has mapped since it began; empty if it began before the recording did.
    pub mappings: Vec<MappedFile>,
}

/// Executable memory of a process, and the file that it is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedFile {
    pub start: u64,
    pub end: u64,
    /// In the file, bytes.
    pub offset: u64,
    pub path: Vec<u8>,
    /// Of the file, as `/proc/PID/maps` has them: major and minor number, and inode.
    pub device: (u32, u32),
    pub inode: u64,
}

/// The file of a program, as the kernel numbers it inside; all 0 if it is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ProgramId {
    pub inode: u64,
    pub device: u64,
}

impl Sample {
    /// The same sample without the frames that were read of an interpreter.
    pub fn without_python(&self) -> Sample {
        Sample {
            python: Vec::new(),
            anchors: Vec::new(),
            walk: WalkStatus::NoPython,
            ..self.clone()
        }
    }
}

impl HostSample {
    /// Name of the process.
    pub fn name(&self) -> &[u8] {
        self.comm.split(|byte| *byte == 0).next().unwrap_or_default()
    }
}

/// An asyncio task as it was at the instant of a sample: it may have ended before the sample is processed, and another one may
/// have taken its place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunningTask {
    /// avma of the task.
    pub task: u64,
    /// avma of the frame of its coroutine.
    pub frame: u64,
    /// The beginning of the object that is its name.
    pub name: Part,
    /// The task that awaits it, the one that awaits that one, and so on, as far as they could be found: avma and name.
    pub awaiters: Vec<(u64, Part)>,
}

impl RunningTask {
    /// Adds a task to a list: one that runs, or, with `frame` 0, one that awaits the last task.
    pub fn add(tasks: &mut Vec<RunningTask>, task: u64, frame: u64, name: Part) {
        match tasks.last_mut() {
            Some(last) if frame == 0 => last.awaiters.push((task, name)),
            None if frame == 0 => {}
            _ => tasks.push(RunningTask {
                task,
                frame,
                name,
                awaiters: Vec::new(),
            }),
        }
    }
}

/// What says which spans are active in a thread. Allocated once and reused: a walk never grows it. Empty: there are none, or they
/// are not read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct SpanRecords {
    /// Of our Python package, in the format of `cpython/spans.rs`.
    pub package: Vec<u8>,
    /// Of OpenTelemetry, in the format of `process/thread_context.rs`.
    pub context: Vec<u8>,
}

impl SpanRecords {
    pub fn is_empty(&self) -> bool {
        self.package.is_empty() && self.context.is_empty()
    }

    /// Replaces a record; `fill` writes its bytes. It stays empty if it is longer than the capacity, or `fill` returns false.
    pub fn set(record: &mut Vec<u8>, len: usize, fill: impl FnOnce(&mut [u8]) -> bool) {
        record.clear();
        if len <= record.capacity() {
            record.resize(len, 0);
            if !fill(record) {
                record.clear();
            }
        }
    }
}

/// Memory that a process has given back or moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    pub pid: Pid,
    /// On the samples' clock, ns.
    pub time: u64,
    /// avma of the first byte, and past the last one.
    pub from: u64,
    pub to: u64,
    pub change: RangeChange,
}

/// What has become of a range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeChange {
    GivenBack,
    /// It begins at this avma now.
    MovedTo(u64),
    /// Pages of files in it have gone, but not which ones is known.
    SomeOfFiles,
    /// Pages in it have gone, but not which ones is known.
    SomeOfIt,
    /// Its pages of files have gone: there are copies in their places.
    OfFiles,
}

/// Output of a backend, in chronological order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Sample(Box<Sample>),
    /// A new code object; its sample follows.
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
    /// Memory of a process was given back, or moved. Only where changes of resident memory are sampled.
    MemoryRange(MemoryRange),
    /// A process has freed a block that it had sampled. Only where its allocations are read.
    Free(FreedBlock),
    /// Samples that the kernel took and could not deliver.
    Lost(u64),
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
        stack.append(part(0x1000_2000, 3, &[])); // does not follow
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
    fn a_copy_may_go_on_after_a_hole() {
        let part = |base, len: usize| StackBytes {
            base,
            bytes: vec![7; len],
            holes: vec![],
        };
        let mut stack = part(0x1000_0800, 0x800);
        stack.append(part(0x1008_0000, 16));
        stack.append(part(0x1008_0010, 0));
        stack.append(part(0x2000_0000, 16)); // too far away
        assert_eq!(stack.end(), 0x1008_0010);
        for (avma, expected) in [
            (0x1000_0ff8, true),
            (0x1000_1000, false),
            (0x1007_fff8, false),
            (0x1008_0000, true),
        ] {
            assert_eq!(stack.word(avma).is_some(), expected, "{avma:x}");
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
