//! One sample on its way into the tree, stage by stage: group the Python frames, unwind the native ones, interleave the
//! two, count the stack, and update what is known of the target.

use std::cell::RefCell;

use super::code_copies::CodeCopies;
use super::states::TimePart;
use super::targets::{ForkMemory, PythonState, TargetProcess, is_process_entry};
use super::tasks::Runs;
use super::wakers::PendingWaker;
use super::workers::DispatcherFrames;
use super::{LastStack, MAX_LAST_STACKS, RESCAN_INTERVAL, Session, TargetUpdate, VisitedCode, name_bytes};
use crate::code_map::CodeMap;
use crate::cpython::frame_groups;
use crate::error::Result;
use crate::event::{Sample, ThreadState, WaitKind, WalkStatus};
use crate::frame::{ModuleId, NativeFrame, Origin, RawFrame, UnwindMethod};
use crate::interleave;
use crate::interleave::StackQuality;
use crate::process::AddressSpace;
use crate::process::system::ProcessMemory;
use crate::profile::count_tree::{FramePath, RawTimelineSample};
use crate::truncation::Truncation;
use crate::unwind::StackCache;

/// The code of a process at a sample, recording every lookup in files that succeeds if `visits` says so.
struct SampleCode<'a> {
    process: &'a AddressSpace,
    memory: ProcessMemory<'a>,
    copies: &'a CodeCopies,
    time: u64,
    visits: Option<RefCell<Vec<(ModuleId, u64)>>>,
}

impl CodeMap for SampleCode<'_> {
    fn find(&self, avma: u64) -> Option<(ModuleId, u64)> {
        let (module, bias) = self.process.find(avma)?;
        if let Some(visits) = &self.visits {
            visits.borrow_mut().push((module, avma.wrapping_sub(bias)));
        }
        Some((module, bias))
    }

    fn is_code(&self, avma: u64) -> bool {
        self.process.is_code(avma)
    }

    fn read(&self, avma: u64, out: &mut [u8]) -> usize {
        let end = self.process.anonymous_code_end(avma);
        let room = usize::try_from(end.saturating_sub(avma))
            .unwrap_or(usize::MAX)
            .min(out.len());
        self.copies.read(&self.memory, self.time, avma, &mut out[..room])
    }
}

/// Why a stack is incomplete; `None`: it is complete.
pub(super) type TruncationReason = Option<Truncation>;

impl Session {
    /// Adds a sample to the tree and the timeline.
    pub(super) fn sample(&mut self, s: &Sample, update: &mut TargetUpdate<'_>) -> Result<()> {
        if let Some(woken) = s.wake_up.wakes
            && self.foreign_waker(woken, s)
        {
            return Ok(());
        }
        self.ensure_target(s, update)?;
        self.read_thread_name(s);
        let has_new_locks = !s.python.is_empty() && self.find_gil_locks(s.pid, s.time);
        if self.leaves_out(s) {
            return match has_new_locks {
                true => self.notify_backend(s.pid, update),
                false => Ok(()),
            };
        }
        let parts = self.time_parts(s);
        let waker = self.waker(s, &parts);
        if s.wake_up.wakes.is_none() {
            self.sampled.insert((s.pid, s.tid));
        }
        let mut last = self.take_last_stack(s);
        let (quality, has_new_layout) = self.uncounted_stack(s, &mut last);
        let rows = self.timeline.len();
        let holder = self.count(s, &parts, quality, waker.as_ref(), &mut last.path);
        if s.dispatcher.is_none() {
            self.observe_lag(s, rows);
        }
        self.keep_last_stack(s, last);
        if let Some(holder) = holder {
            self.add_holders(s, holder);
        }
        let is_new =
            self.has_new_running_tasks(s.pid) | self.find_spans(s.pid, s.time) | self.find_inherited(s, quality);
        self.follow_up(s, quality, has_new_layout || has_new_locks || is_new, update)
    }

    /// Puts the stack of a sample into `self.stack`, outermost frame first. Returns its quality, and whether where the process's
    /// main stack ends has changed.
    pub(super) fn uncounted_stack(&mut self, s: &Sample, last: &mut LastStack) -> (StackQuality, bool) {
        self.group_python(s, &mut last.python);
        let dispatcher = self.take_dispatcher(s);
        let native_truncation = self.unwind_native(s, &mut last.native);
        let python_truncation = match s.dispatcher {
            None => self.end_of_python(s, &last.python),
            Some(_) => None,
        };
        let (native_truncation, has_new_layout) = self.end_of_native(s, native_truncation);
        let is_complete = native_truncation.or(python_truncation).is_none();
        let python_truncation = python_truncation.or(self.place_by_word(s, is_complete));
        let quality = self.interleave(s, native_truncation, python_truncation, dispatcher, &last.python);
        (quality, has_new_layout)
    }

    /// Makes the sample's process known, and checks a newly found interpreter once it runs Python code.
    fn ensure_target(&mut self, s: &Sample, update: &mut TargetUpdate<'_>) -> Result<()> {
        if !self.targets.contains_key(&s.pid) && self.open(s.pid, update).is_err() {
            // It has exited: without its mappings the stack is only addresses. Counted, with the reason.
            self.targets
                .insert(s.pid, TargetProcess::new(AddressSpace::exited(s.pid)));
        }
        if let Some(target) = self.targets.get_mut(&s.pid)
            && target.process.has_copies()
        {
            target.process.compare_copies(&*self.system, &self.modules);
        }
        let python = self.targets[&s.pid].python.as_ref();
        if !s.python.is_empty() && python.is_some_and(|p| p.unvalidated) {
            self.validate_python(s.pid);
            self.notify_backend(s.pid, update)?;
        }
        Ok(())
    }

    fn take_last_stack(&mut self, s: &Sample) -> LastStack {
        let last = std::mem::take(self.last_stacks.entry(s.tid).or_default());
        self.last_bytes -= last.bytes();
        last
    }

    fn keep_last_stack(&mut self, s: &Sample, last: LastStack) {
        self.last_bytes += last.bytes();
        self.last_stacks.insert(s.tid, last);
        if self.last_bytes > MAX_LAST_STACKS {
            self.forget_last_stacks();
        }
    }

    /// Puts the Python frames into `self.groups`.
    fn group_python(&mut self, s: &Sample, last: &mut frame_groups::LastFrames) {
        let target = &self.targets[&s.pid];
        match &target.python {
            Some(PythonState {
                interpreter: Some(i), ..
            }) => {
                let memory = ForkMemory {
                    system: &*self.system,
                    pid: s.pid,
                    parent: target.parent,
                };
                frame_groups::groups(s, &i.layout, &mut self.codes, &memory, last, &mut self.groups);
            }
            _ => self.groups.clear(),
        }
    }

    /// Puts the native frames into `self.native`.
    fn unwind_native(&mut self, s: &Sample, cache: &mut StackCache) -> TruncationReason {
        let groups = &self.groups.list;
        let is_complete = matches!(s.walk, WalkStatus::Complete | WalkStatus::Detached);
        let loops = (is_complete && s.dispatcher.is_none()).then_some(groups.len());
        self.unwinder.set_anchors(groups.iter().filter_map(|g| g.anchor), loops);
        self.native.clear();
        if !self.options.native {
            return None;
        }
        let Some(regs) = &s.regs else {
            return Some(Truncation::NoRegisters);
        };
        let target = &self.targets[&s.pid];
        let code = SampleCode {
            process: &target.process,
            memory: ProcessMemory(&*self.system, s.pid),
            copies: &target.code_copies,
            time: s.time,
            visits: self.visited.is_some().then(RefCell::default),
        };
        let (unwinder, native) = (&mut self.unwinder, &mut self.native);
        let unwound = match &mut self.visited {
            None => unwinder.unwind_incremental(cache, target.process.generation, &code, regs, &s.stack, native),
            Some(visited) => {
                let unwound = unwinder.unwind(&code, regs, &s.stack, native);
                record_visits(visited, code.visits.unwrap_or_default().into_inner(), native);
                unwound
            }
        };
        if let Some(edges) = &mut self.edges {
            edges.judge(&target.process, &self.modules, &*self.system, native);
        }
        self.jit.skip(&self.modules, &mut self.native);
        unwound.err()
    }

    /// Why the Python frames are incomplete. Removes the anchor that greenlet adds to the groups.
    fn end_of_python(&mut self, s: &Sample, last: &frame_groups::LastFrames) -> TruncationReason {
        let python = self.targets[&s.pid].python.as_ref();
        let layout = python.and_then(|p| Some(p.interpreter?.layout));
        let outermost = self.native.last();
        let greenlet = outermost.filter(|f| f.method == UnwindMethod::Begins(Origin::Greenlet));
        if let (Some(f), Some(layout)) = (greenlet, &layout) {
            frame_groups::begin_in(s, layout, last, (f.sp, f.cfa), &mut self.groups);
        }
        let in_greenlet = if self.options.native {
            greenlet.is_some() && python.is_some_and(|p| !p.runtime.eval.is_empty())
        } else {
            self.unwinder.has_greenlets()
        };
        frame_groups::truncation(s, layout.as_ref(), in_greenlet)
    }

    /// Why the native frames are incomplete, in view of where the process's main stack ends; true if that was read
    /// again and has changed.
    fn end_of_native(&mut self, s: &Sample, truncation: TruncationReason) -> (TruncationReason, bool) {
        if truncation.is_none() {
            return (None, false);
        }
        let mut has_changed = false;
        if let (Some(outermost), Some(target)) = (self.native.last(), self.targets.get_mut(&s.pid)) {
            has_changed = target.process.refresh_stack_end(&*self.system, outermost.sp);
        }
        let stack_end = self.targets[&s.pid].process.stack_end;
        let truncation = truncation.filter(|_| !is_process_entry(&mut self.native, stack_end));
        (truncation, has_changed)
    }

    /// Puts the stack into `self.stack`, outermost frame first.
    fn interleave(
        &mut self,
        s: &Sample,
        native_truncation: TruncationReason,
        python_truncation: TruncationReason,
        dispatcher: Option<DispatcherFrames>,
        last: &frame_groups::LastFrames,
    ) -> StackQuality {
        self.stack.clear();
        let job = dispatcher.and_then(|dispatcher| self.find_job(s, dispatcher));
        // The stack of a waker is below the thread that it woke.
        let is_waker = s.wake_up.wakes.is_some();
        if self.options.grouping.processes && !is_waker {
            self.stack.push(RawFrame::Process(s.pid));
        }
        if self.options.grouping.threads && !is_waker {
            let thread = job.as_ref().map_or(s.tid, |job| job.dispatcher);
            self.stack.push(RawFrame::Thread(thread));
        }
        let first = self.stack.len();
        if let Some(job) = &job {
            self.stack.extend(&job.frames);
            self.stack.push(RawFrame::Worker(s.tid));
        }
        let python = self.targets[&s.pid].python.as_ref();
        let python = python.filter(|p| !p.runtime.eval.is_empty());
        let is_eval = |f: &NativeFrame| {
            let p = python?;
            Some(
                f.location
                    .is_some_and(|(module, svma)| module == p.module && p.runtime.is_eval(svma)),
            )
        };
        let quality = if self.options.native {
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
        } else {
            interleave::python_only(&self.groups, python_truncation, &mut self.stack)
        };
        if !is_waker {
            self.remember_dispatcher(s, first, quality);
            self.add_tasks(s, last, first);
        }
        if !is_waker || self.shown_wakers.as_ref().is_some_and(|shown| shown.kernel) {
            self.stack.extend(s.kernel.iter().rev().map(|a| RawFrame::Kernel(*a)));
        }
        match (quality, job.and_then(|job| job.truncation)) {
            (StackQuality::Exact | StackQuality::Repaired, Some(why)) => StackQuality::Partial(why),
            _ => quality,
        }
    }

    /// Counts the stack once for each part of the time that the sample represents: state, ns, length of the interval.
    /// Returns the number of the waker if it ended a wait for the GIL.
    fn count(
        &mut self,
        s: &Sample,
        parts: &[TimePart],
        quality: StackQuality,
        waker: Option<&PendingWaker>,
        path: &mut FramePath,
    ) -> Option<u32> {
        let labels = self.label_set(s);
        let polls = |part: &TimePart| part.0 == Some(ThreadState::Waiting(WaitKind::Poll));
        let waits_for_tasks = parts.iter().any(polls) && self.waits_for_tasks((s.pid, s.tid));
        // eventlet's hub sleeps where there is no file to wait for.
        let in_hub = self.tasks.runs == Runs::Hub;
        let sleeps = |part: &TimePart| part.0 == Some(ThreadState::Waiting(WaitKind::Sleep));
        let name_bytes = |f: &RawFrame| name_bytes(&self.codes, f);
        if let Some(woken) = s.wake_up.wakes {
            let (node, _) = self.tree.add_incremental(path, &self.stack, 0, &name_bytes);
            self.wakers.add(woken, s, node, &self.stack);
        }
        let thread = self.stack.len();
        let mut holder = None;
        for part in parts {
            let (state, time, length) = part;
            let count = match self.options.weighted {
                None if state.is_some() => continue,
                None => 1,
                Some(_) if *time == 0 => continue,
                Some(period) => u32::try_from((time + period / 2) / period.max(1))
                    .unwrap_or(u32::MAX)
                    .max(1),
            };
            let is_shared = polls(part) && waits_for_tasks || sleeps(part) && in_hub;
            if is_shared && self.awaits.share_wait(s, *time, *length) {
                self.quality_counts.add(quality);
                continue;
            }
            self.stack.truncate(thread);
            self.stack.extend(state.map(RawFrame::State));
            let mut number = 0;
            let waited = state.is_some_and(ThreadState::waits);
            if let (true, Some(waker)) = (waited, waker) {
                number = self.wakers.number(waker.waker);
                if self.shown_wakers.is_some() {
                    self.stack.extend(waker.by);
                    self.stack.extend(&waker.frames);
                }
            }
            let (node, is_complete) = self.tree.add_incremental(path, &self.stack, count, &name_bytes);
            self.quality_counts.add(match is_complete {
                true => quality,
                false => StackQuality::Partial(Truncation::TreeLimit),
            });
            self.timeline.push(RawTimelineSample {
                time: s.time,
                pid: s.pid,
                tid: s.tid,
                node,
                count,
                time_spent: *time,
                labels,
            });
            if self.options.weighted.is_some() {
                self.waits.push(*length, number, s.holds_lock);
                if *state == Some(ThreadState::Waiting(WaitKind::Gil)) {
                    holder = Some(number);
                }
            }
        }
        holder
    }

    /// Updates what is known of the process where the stack shows that something is missing: a subinterpreter, or the
    /// names of JIT code.
    fn follow_up(
        &mut self,
        s: &Sample,
        quality: StackQuality,
        has_new_layout: bool,
        update: &mut TargetUpdate<'_>,
    ) -> Result<()> {
        let no_frames = [Truncation::InterleaveMismatch, Truncation::PythonUnknown].map(StackQuality::Partial);
        let rescan = no_frames.contains(&quality) && self.is_rescan_due(s);
        if has_new_layout || rescan {
            self.notify_backend(s.pid, update)?;
        }
        if self.native.iter().any(|f| f.location.is_none()) {
            self.with_anonymous_code.insert(s.pid);
            self.scan_jit_code(s.pid, Some(s.time));
        }
        Ok(())
    }

    /// Whether to read the thread states of the sample's process again. Perhaps the thread has begun to run a
    /// subinterpreter, whose frames are on another chain. Or it is new, and threads of this interpreter are found in
    /// its list only.
    fn is_rescan_due(&mut self, s: &Sample) -> bool {
        let target = self.targets.get_mut(&s.pid);
        let python = target.filter(|t| t.python.is_some());
        let due = python.filter(|t| s.time.saturating_sub(t.rescanned) > RESCAN_INTERVAL);
        due.is_some_and(|t| {
            t.rescanned = s.time;
            true
        })
    }
}

/// Adds the places that unwinding a stack looked up; true for those of a stack that needed more than unwind tables.
fn record_visits(visited: &mut VisitedCode, places: Vec<(ModuleId, u64)>, native: &[NativeFrame]) {
    let is_exact = native.iter().all(|f| f.method.is_exact());
    for place in places {
        *visited.entry(place).or_default() |= !is_exact;
    }
}
