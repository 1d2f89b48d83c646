//! From a raw sample to its stack, stage by stage: group the Python frames, unwind the native ones, interleave the two.

use std::cell::RefCell;

use rustc_hash::FxHashMap;

use super::code_copies::CodeCopies;
use super::files::Files;
use super::process::Process;
use super::{Grouping, SessionOptions};
use crate::code_map::CodeMap;
use crate::counts::FramePath;
use crate::cpython::frame_groups::{self, LastFrames};
use crate::edges::EdgeJudge;
use crate::event::{Pid, Sample, Tid, WalkStatus};
use crate::frame::{EvalGroups, ModuleId, NativeFrame, Origin, RawFrame, UnwindMethod};
use crate::interleave::{self, StackQuality};
use crate::process::AddressSpace;
use crate::process::system::ProcessMemory;
use crate::truncation::Truncation;
use crate::unwind::StackCache;

/// Maximum total size of the threads' last stacks, bytes: a thousand very deep ones would take gigabytes.
const MAX_LAST_STACKS: usize = 32 << 20;

/// Files and addresses (svma) on stacks; true if unwind tables alone were not enough.
pub type VisitedCode = FxHashMap<(ModuleId, u64), bool>;

/// Why a stack is incomplete; `None`: it is complete.
pub(super) type TruncationReason = Option<Truncation>;

/// A thread's last stack, as the stages cache it.
#[derive(Default)]
pub(super) struct LastStack {
    pub(super) python: LastFrames,
    pub(super) native: StackCache,
    pub(super) path: FramePath,
}

impl LastStack {
    /// Bytes on the heap.
    fn bytes(&self) -> usize {
        self.python.bytes() + self.native.bytes() + self.path.bytes()
    }
}

/// The stages that make a stack of a sample, and the stack in the making.
pub struct StackBuilder {
    /// Unwind native stacks.
    is_native: bool,
    own_code: Option<u64>,
    grouping: Grouping,
    /// Each thread's last stack, and the total size of all.
    last: FxHashMap<Tid, LastStack>,
    last_bytes: usize,
    /// If set: the places that the unwinder looked up, and whether the stack needed more than unwind tables.
    pub visited: Option<VisitedCode>,
    /// If set: judges the native stacks.
    pub edges: Option<EdgeJudge>,
    /// The Python frames, by the calls of the bytecode loop that they run in.
    pub(super) groups: EvalGroups,
    /// The native frames, innermost first.
    pub(super) native: Vec<NativeFrame>,
    /// Both in calling order, outermost frame first.
    pub(super) stack: Vec<RawFrame>,
}

/// The code of a process at a sample, recording every lookup in files that succeeds if `visits` says so.
struct SampleCode<'a> {
    space: &'a AddressSpace,
    memory: ProcessMemory<'a>,
    copies: &'a CodeCopies,
    time: u64,
    visits: Option<RefCell<Vec<(ModuleId, u64)>>>,
}

impl CodeMap for SampleCode<'_> {
    fn find(&self, avma: u64) -> Option<(ModuleId, u64)> {
        let (module, bias) = self.space.find(avma)?;
        if let Some(visits) = &self.visits {
            visits.borrow_mut().push((module, avma.wrapping_sub(bias)));
        }
        Some((module, bias))
    }

    fn is_code(&self, avma: u64) -> bool {
        self.space.is_code(avma)
    }

    fn read(&self, avma: u64, out: &mut [u8]) -> usize {
        let end = self.space.anonymous_code_end(avma);
        let room = usize::try_from(end.saturating_sub(avma))
            .unwrap_or(usize::MAX)
            .min(out.len());
        self.copies.read(&self.memory, self.time, avma, &mut out[..room])
    }
}

impl StackBuilder {
    pub(super) fn new(options: &SessionOptions) -> StackBuilder {
        StackBuilder {
            is_native: options.native,
            own_code: options.own_code,
            grouping: options.grouping,
            last: FxHashMap::default(),
            last_bytes: 0,
            visited: None,
            edges: None,
            groups: EvalGroups::default(),
            native: Vec::new(),
            stack: Vec::new(),
        }
    }

    /// The last frames of a thread.
    pub(super) fn last_python(&self, tid: Tid) -> Option<&LastFrames> {
        self.last.get(&tid).map(|last| &last.python)
    }

    pub(super) fn take_last(&mut self, tid: Tid) -> LastStack {
        let last = self.last.remove(&tid).unwrap_or_default();
        self.last_bytes -= last.bytes();
        last
    }

    pub(super) fn keep_last(&mut self, tid: Tid, last: LastStack) {
        self.last_bytes += last.bytes();
        self.last.insert(tid, last);
        if self.last_bytes > MAX_LAST_STACKS {
            self.forget_last();
        }
    }

    /// Drops the last stack of a thread that has exited.
    pub(super) fn forget_thread(&mut self, tid: Tid) {
        drop(self.take_last(tid));
    }

    /// Drops the last stacks of all threads.
    pub(super) fn forget_last(&mut self) {
        self.last.clear();
        self.last_bytes = 0;
    }

    /// Drops what the judge of edges has kept of processes: one has another program.
    pub(super) fn forget_judged(&mut self) {
        if let Some(edges) = &mut self.edges {
            edges.forget_processes();
        }
    }

    /// Groups the Python frames.
    pub(super) fn group_python(&mut self, s: &Sample, process: &Process, files: &mut Files, last: &mut LastFrames) {
        match process.interpreter() {
            Some(i) => {
                let memory = process.memory(&*files.system);
                frame_groups::groups(s, &i.layout, &mut files.codes, &memory, last, &mut self.groups);
            }
            None => self.groups.clear(),
        }
    }

    /// Unwinds the native frames. Returns why they are incomplete.
    pub(super) fn unwind(
        &mut self,
        s: &Sample,
        process: &Process,
        files: &mut Files,
        cache: &mut StackCache,
    ) -> TruncationReason {
        let groups = &self.groups.list;
        let is_complete = matches!(s.walk, WalkStatus::Complete | WalkStatus::Detached);
        let loops = (is_complete && s.dispatcher.is_none()).then_some(groups.len());
        files
            .unwinder
            .set_anchors(groups.iter().filter_map(|g| g.anchor), loops);
        self.native.clear();
        if !self.is_native {
            return None;
        }
        let Some(regs) = &s.regs else {
            return Some(Truncation::NoRegisters);
        };
        let code = SampleCode {
            space: &process.space,
            memory: process.live_memory(&*files.system),
            copies: &process.code_copies,
            time: s.time,
            visits: self.visited.is_some().then(RefCell::default),
        };
        let (unwinder, native) = (&mut files.unwinder, &mut self.native);
        let unwound = match &mut self.visited {
            None => unwinder.unwind_incremental(cache, process.space.generation, &code, regs, &s.stack, native),
            Some(visited) => {
                let unwound = unwinder.unwind(&code, regs, &s.stack, native);
                record_visits(visited, code.visits.unwrap_or_default().into_inner(), native);
                unwound
            }
        };
        if let Some(edges) = &mut self.edges {
            edges.judge(&process.space, &files.modules, &*files.system, native);
        }
        files.jit.skip(&files.modules, &mut self.native);
        self.skip_own(process);
        unwound.err()
    }

    /// Removes the frames that are in our own file, if they are to be left out.
    fn skip_own(&mut self, process: &Process) {
        let Some((own, _)) = self.own_code.and_then(|code| process.space.find(code)) else {
            return;
        };
        let is_own = |f: &NativeFrame| f.location.is_some_and(|(module, _)| module == own);
        self.native.retain(|f| !is_own(f));
    }

    /// Why the Python frames are incomplete. Removes the anchor that greenlet adds to the groups.
    pub(super) fn end_of_python(
        &mut self,
        s: &Sample,
        process: &Process,
        files: &Files,
        last: &LastFrames,
    ) -> TruncationReason {
        let python = process.python.as_ref();
        let layout = process.interpreter().map(|i| i.layout);
        let outermost = self.native.last();
        let greenlet = outermost.filter(|f| f.method == UnwindMethod::Begins(Origin::Greenlet));
        if let (Some(f), Some(layout)) = (greenlet, &layout) {
            frame_groups::begin_in(s, layout, last, (f.sp, f.cfa), &mut self.groups);
        }
        let in_greenlet = if self.is_native {
            greenlet.is_some() && python.is_some_and(|p| !p.runtime.eval.is_empty())
        } else {
            files.unwinder.has_greenlets()
        };
        frame_groups::truncation(s, layout.as_ref(), in_greenlet)
    }

    /// Why the native frames are incomplete, in view of where the process's main stack ends; true if that was read
    /// again and has changed.
    pub(super) fn end_of_native(
        &mut self,
        process: &mut Process,
        files: &Files,
        truncation: TruncationReason,
    ) -> (TruncationReason, bool) {
        if truncation.is_none() {
            return (None, false);
        }
        let outermost = self.native.last();
        let has_changed =
            outermost.is_some_and(|outermost| process.space.refresh_stack_end(&*files.system, outermost.sp));
        let truncation = truncation.filter(|_| !is_process_entry(&mut self.native, process.space.stack_end));
        (truncation, has_changed)
    }

    /// The frames that group the stacks of a thread.
    pub(super) fn thread_frames(&self, pid: Pid, tid: Tid) -> impl Iterator<Item = RawFrame> + use<> {
        let process = self.grouping.processes.then_some(RawFrame::Process(pid));
        let thread = self.grouping.threads.then_some(RawFrame::Thread(tid));
        process.into_iter().chain(thread)
    }

    /// Begins the stack of a sample; `dispatcher`: the thread that it is counted below if that is another one.
    /// `is_grouped`: with the frames that group stacks by process and thread.
    pub(super) fn begin(&mut self, s: &Sample, dispatcher: Option<Tid>, is_grouped: bool) {
        self.stack.clear();
        if is_grouped {
            let frames = self.thread_frames(s.pid, dispatcher.unwrap_or(s.tid));
            self.stack.extend(frames);
        }
    }

    /// Appends the interleaved frames to the stack.
    pub(super) fn interleave(
        &mut self,
        s: &Sample,
        process: &Process,
        native_truncation: TruncationReason,
        python_truncation: TruncationReason,
    ) -> StackQuality {
        if !self.is_native {
            return interleave::python_only(&self.groups, python_truncation, &mut self.stack);
        }
        let python = process.python.as_ref().filter(|p| !p.runtime.eval.is_empty());
        let is_eval = |f: &NativeFrame| {
            let p = python?;
            Some(
                f.location
                    .is_some_and(|(module, svma)| module == p.module && p.runtime.is_eval(svma)),
            )
        };
        let input = interleave::InterleaveInput {
            pid: s.pid,
            native: &self.native,
            native_truncation,
            groups: &self.groups,
            python_truncation,
            // (The chain of a greenlet may have no end that is known, CPython 3.15.)
            attached: !matches!(s.walk, WalkStatus::NoPython | WalkStatus::Detached),
            is_eval: &is_eval,
        };
        interleave::interleave(&input, &mut self.stack)
    }

    /// Appends the kernel's frames.
    pub(super) fn add_kernel(&mut self, s: &Sample) {
        self.stack.extend(s.kernel.iter().rev().map(|a| RawFrame::Kernel(*a)));
    }

    /// Whether the stack contains code that is in no file.
    pub(super) fn has_anonymous_code(&self) -> bool {
        self.native.iter().any(|f| f.location.is_none())
    }
}

/// Adds the places that unwinding a stack looked up; true for those of a stack that needed more than unwind tables.
fn record_visits(visited: &mut VisitedCode, places: Vec<(ModuleId, u64)>, native: &[NativeFrame]) {
    let is_exact = native.iter().all(|f| f.method.is_exact());
    for place in places {
        *visited.entry(place).or_default() |= !is_exact;
    }
}

/// Whether the outermost frame is where the kernel started the program, by its place on the stack; marks it as the end if so.
fn is_process_entry(native: &mut [NativeFrame], stack_end: u64) -> bool {
    let Some(last) = native.last_mut() else { return false };
    let begins = stack_end != 0 && last.sp == stack_end;
    if begins {
        last.method = UnwindMethod::StackEnd;
    }
    begins
}
