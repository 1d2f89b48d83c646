//! One sample on its way into the segment, stage by stage: build its stack, find what ended its wait, count it, and
//! update what is known of its process.

use super::activities::Activities;
use super::files::Files;
use super::instances::{self, NO_ROOM};
use super::process::Process;
use super::process_tasks::Runs;
use super::processes::KnownProcess;
use super::segment::{Interval, Segment};
use super::stacks::LastStack;
use super::states::{TimePart, call_kind};
use super::task_source::TaskSample;
use super::wakers::{self, PendingWaker};
use super::workers::{self, Job};
use super::{RESCAN_INTERVAL, Session, TargetUpdate};
use crate::counts::RawTimelineSample;
use crate::cpython_layout::TargetLayout;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{HostSample, NewProcess, Pid, Sample, ThreadState, WaitKind};
use crate::frame::RawFrame;
use crate::interleave::StackQuality;
use crate::truncation::Truncation;

/// What the stages have found out about a sample.
pub(super) struct BuiltStack {
    pub(super) quality: StackQuality,
    /// What its thread runs.
    runs: Runs,
    /// Where the process's main stack ends was read again, and has changed.
    has_new_layout: bool,
}

impl Session {
    /// Adds a sample to the segment.
    pub(super) fn sample(&mut self, s: &Sample, update: &mut TargetUpdate<'_>) -> Result<()> {
        if let Some(woken) = s.wake_up.wakes {
            let is_sampled = self.processes.get(s.pid).is_some();
            let wakers = &mut self.activities.wakers;
            if wakers.add_foreign(woken, s, is_sampled, &*self.files.system, &mut self.names) {
                return Ok(());
            }
        }
        self.ensure_process(s, update)?;
        let without_python;
        let mut s = s;
        if let Some(new) = s.host.as_ref().and_then(|host| host.new.as_ref()) {
            let process = &self.processes.ensure(s.pid).process;
            let is_right = new.runtime == 0 || self.programs.is_right(new, process);
            self.add_copies(s.pid, is_right);
            self.describe_program(new, s.pid, update);
            if !is_right {
                without_python = s.without_python();
                s = &without_python;
            }
        }
        let has_new_locks = self.find_locks(s);
        let known = self.processes.ensure(s.pid);
        if self.activities.states.leaves_out(s, &known.process) {
            return if has_new_locks {
                self.notify_backend(s.pid, update)
            } else {
                Ok(())
            };
        }
        let process = &mut known.process;
        let parts = self.activities.states.time_parts(s, process, &self.files);
        let waker = match parts[3] {
            TimePart { time: 0, .. } | TimePart { state: None, .. } => None,
            TimePart { state: Some(state), .. } => self.activities.wakers.waker(s, state, process, &self.files),
        };
        if s.wake_up.wakes.is_none() {
            self.names.add_sampled(s.pid, s.tid);
        }
        if let Some(host) = &s.host {
            self.name_thread(s, host);
        }
        let mut last = self.stacks.take_last(s.tid);
        let built = self.build_stack(s, &mut last);
        let rows = self.segment.timeline.len();
        let holder = self.count(s, &parts, &built, waker.as_ref(), &mut last);
        self.stacks.keep_last(s.tid, last);
        if let Some(change) = &s.memory {
            self.activities.resident.add(s, change, rows, &mut self.segment);
        }
        if let Some(block) = &s.allocation {
            self.activities.allocations.add(s, block);
        }
        if let Some(host) = &s.host {
            let started = self.processes.get(s.pid).and_then(|process| process.started);
            let Segment {
                instances, timeline, ..
            } = &mut self.segment;
            let run = self.processes.run(s.pid);
            instances.add(s.pid, host, run, started, built.quality, timeline.len());
        }
        let (files, activities, segment) = (&self.files, &mut self.activities, &mut self.segment);
        let KnownProcess {
            process,
            activities: own,
            ..
        } = self.processes.ensure(s.pid);
        if s.dispatcher.is_none() {
            own.lags.observe(s, &self.stacks.stack, &files.codes, segment, rows);
        }
        if let Some(holder) = holder {
            wakers::add_holders(s, holder, process, files, segment);
        }
        let has_new_tasks = own.tasks.asyncio.take_new_running();
        let has_new_spans = activities.spans.find(&mut own.spans, process, files, s.time);
        let native = &self.stacks.native;
        let has_new_words = (activities.workers).find_inherited(&mut own.workers, s, built.quality, native);
        let is_new = built.has_new_layout || has_new_locks || has_new_tasks || has_new_spans || has_new_words;
        self.follow_up(s, built.quality, is_new, update)?;
        // Tried again at the next sample: what was not opened may run another program by then, or be another process.
        let is_open = self
            .processes
            .get(s.pid)
            .is_some_and(|process| process.started.is_some());
        if s.host.is_some() && !is_open {
            self.forget(s.pid);
        }
        Ok(())
    }

    /// Makes the sample's process known, checks a newly found interpreter once it runs Python code, and reads the thread's name.
    fn ensure_process(&mut self, s: &Sample, update: &mut TargetUpdate<'_>) -> Result<()> {
        let is_known = self.processes.get(s.pid).is_some();
        if !is_known || self.processes.is_other(&*self.files.system, s.pid) {
            // If it has exited, without its mappings the stack is only addresses: counted, with the reason.
            let opened = if self.has_changed_program(s) {
                Err(Error::no_process(s.pid))
            } else {
                self.open(s.pid, update)
            };
            if let Some(host) = &s.host {
                self.add_if_ended(s.pid, host, opened, update)?;
            }
        }
        let KnownProcess { process, .. } = self.processes.ensure(s.pid);
        if process.space.has_copies() {
            process.space.compare_copies(&*self.files.system, &self.files.modules);
        }
        let is_unvalidated = process.python.as_ref().is_some_and(|p| p.unvalidated);
        if is_unvalidated && !s.python.is_empty() {
            process.validate_python(&*self.files.system);
            self.names.set_interpreter(s.pid, process.python_text(&self.files));
            self.notify_backend(s.pid, update)?;
        }
        let KnownProcess { process, .. } = self.processes.ensure(s.pid);
        if let Some(name) = process.due_thread_name(&*self.files.system, s) {
            self.names.python_threads.insert((s.pid, s.tid), name);
        }
        Ok(())
    }

    /// Adds a process of a whole host that has exited, with what it had mapped as far as that is known. `opened`: what became of
    /// opening it.
    fn add_if_ended(
        &mut self,
        pid: Pid,
        host: &HostSample,
        opened: Result<()>,
        update: &mut TargetUpdate<'_>,
    ) -> Result<()> {
        let has_code = |known: &Process| !known.space.code().is_empty();
        if opened.is_ok() && self.processes.get(pid).is_some_and(has_code) {
            return Ok(());
        }
        if opened.is_ok() {
            // It waits for its parent, and maps nothing any more. No word of its end may follow.
            update(pid, None)?;
        }
        let mappings = host.new.as_ref().map_or(&[][..], |new| &new.mappings);
        if mappings.is_empty() {
            let kind = opened.err().map_or(ErrorKind::NoSuchProcess, |e| e.kind);
            self.segment.instances.refuse(pid, instances::reason(kind));
            return Ok(());
        }
        self.add_without_mappings(pid, None, None);
        let known = self.processes.ensure(pid);
        let Files { system, modules, .. } = &mut self.files;
        for mapped in mappings {
            known.process.space.map_ended(&**system, mapped, modules);
        }
        known.process.detect_python(&self.files);
        Ok(())
    }

    /// Gives a thread of a host its name: the sample has that of the first thread.
    fn name_thread(&mut self, s: &Sample, host: &HostSample) {
        if s.tid == s.pid {
            self.names.set_of_sample(s.pid, s.tid, host.name());
        } else if self.names.thread(s.pid, s.tid).is_none()
            && let Some(name) = self.files.system.thread_name(s.pid, s.tid)
        {
            self.names.rename(s.pid, s.tid, name.as_bytes());
        }
    }

    /// Takes in the code objects that came before the first sample of a process, if they are of its interpreter.
    fn add_copies(&mut self, pid: Pid, are_its_own: bool) {
        let process = &self.processes.ensure(pid).process;
        let copies = self.programs.take_copies(pid);
        let Some(interpreter) = process.interpreter().filter(|_| are_its_own) else {
            return;
        };
        let memory = process.memory(&*self.files.system);
        for copy in &copies {
            self.files.codes.update_process(pid, &memory, &interpreter.layout, copy);
        }
    }

    /// Has the backend know where the program of a process has its interpreter, if that is new.
    fn describe_program(&mut self, new: &NewProcess, pid: Pid, update: &mut TargetUpdate<'_>) {
        let process = &self.processes.ensure(pid).process;
        if let Some(program) = self.programs.find_new(new, process, &self.files)
            && let Some(layout) = self.read_layout(pid)
        {
            let layout = TargetLayout {
                program: Some(program),
                ..layout
            };
            if update(pid, Some(&layout)).is_err() {
                self.programs.forget(new.program);
                self.segment.instances.refuse(pid, NO_ROOM);
            }
        }
    }

    /// Whether a process of a whole host has executed another program since its sample was taken: that has other mappings.
    fn has_changed_program(&self, s: &Sample) -> bool {
        let Some(host) = &s.host else { return false };
        let then = String::from_utf8_lossy(host.name());
        let other = Some(s.tid).filter(|tid| *tid != s.pid);
        let threads = std::iter::once(s.pid).chain(other);
        let mut now = threads.filter_map(|tid| self.files.system.thread_name(s.pid, tid));
        now.next().is_some_and(|name| name != then) && now.all(|name| name != then)
    }

    /// Finds the interpreter locks of a process that runs Python, where they are wanted. True if the backend is to be notified of
    /// them.
    fn find_locks(&mut self, s: &Sample) -> bool {
        let process = &mut self.processes.ensure(s.pid).process;
        if self.options.needs_locks() && !s.python.is_empty() {
            process.find_locks(&*self.files.system, s.time);
            return process.locks.take_changed();
        }
        false
    }

    /// Puts the stack of a sample into `self.stacks.stack`, outermost frame first.
    pub(super) fn build_stack(&mut self, s: &Sample, last: &mut LastStack) -> BuiltStack {
        let (files, stacks, activities) = (&mut self.files, &mut self.stacks, &mut self.activities);
        let KnownProcess {
            process,
            activities: own,
            ..
        } = self.processes.ensure(s.pid);
        stacks.group_python(s, process, files, &mut last.python);
        let dispatcher = workers::take_dispatcher(&own.workers, s, &mut stacks.groups);
        let native_truncation = stacks.unwind(s, process, files, &mut last.native);
        let python_truncation = match s.dispatcher {
            None => stacks.end_of_python(s, process, files, &last.python),
            Some(_) => None,
        };
        let (native_truncation, has_new_layout) = stacks.end_of_native(process, files, native_truncation);
        let is_complete = native_truncation.or(python_truncation).is_none();
        let by_word = stacks.place_by_word(s, process, &mut files.unwinder, is_complete);
        let python_truncation = python_truncation.or(by_word);
        let job = dispatcher.and_then(|dispatcher| {
            let (native, modules) = (&stacks.native, &files.modules);
            activities
                .workers
                .find_job(&mut own.workers, s, dispatcher, native, modules)
        });

        // The stack of a waker is below the thread that it woke.
        let is_waker = s.wake_up.wakes.is_some();
        stacks.begin(s, job.as_ref().map(|job| job.dispatcher), !is_waker);
        let first = stacks.stack.len();
        if let Some(job) = &job {
            stacks.stack.extend(&job.frames);
            stacks.stack.push(RawFrame::Worker(s.tid));
        }
        let quality = stacks.interleave(s, process, native_truncation, python_truncation);
        let mut runs = Runs::Other;
        if !is_waker {
            let stack = &stacks.stack[first..];
            activities
                .workers
                .remember_dispatcher(&mut own.workers, s, stack, quality);
            let sample = TaskSample {
                sample: s,
                last: &last.python,
                native: &stacks.native,
                stack,
                process,
                files,
            };
            let tasks = activities
                .tasks
                .running(&mut own.tasks, &mut activities.task_names, &sample);
            for task in tasks {
                task.insert(&mut stacks.stack, first);
            }
            if !s.python.is_empty() {
                let (stack, codes) = (&stacks.stack[first..], &files.codes);
                runs = activities.tasks.runs(&mut own.tasks, &last.python, stack, codes);
            }
        }
        if !is_waker || activities.wakers.have_kernel_frames() {
            stacks.add_kernel(s);
        }
        BuiltStack {
            quality: with_job(quality, job),
            runs,
            has_new_layout,
        }
    }

    /// Counts the stack once for each part of the time that the sample represents. Returns the number of the waker if it ended a
    /// wait for the GIL.
    fn count(
        &mut self,
        s: &Sample,
        parts: &[TimePart],
        built: &BuiltStack,
        waker: Option<&PendingWaker>,
        last: &mut LastStack,
    ) -> Option<u32> {
        let (files, segment) = (&self.files, &mut self.segment);
        let (stack, activities) = (&mut self.stacks.stack, &mut self.activities);
        let KnownProcess {
            process,
            activities: own,
            ..
        } = self.processes.ensure(s.pid);
        let Activities {
            spans, awaits, wakers, ..
        } = activities;
        let labels = spans.label_set(&mut own.spans, &mut segment.labels, s, process, files);
        let name_bytes = |f: &RawFrame| files.name_bytes(f);
        if let Some(woken) = s.wake_up.wakes {
            let node = segment.node(&mut last.path, stack, &name_bytes);
            wakers.add(woken, s, node, stack);
        }
        let thread = stack.len();
        let mut holder = None;
        for part in parts {
            let Some(count) = self.options.measure.count(part.state.is_none(), part.time) else {
                continue;
            };
            let call = match part.state {
                Some(ThreadState::Waiting(_) | ThreadState::WaitingForSocket(..)) => Some(call_kind(s)),
                _ => None,
            };
            let is_shared = match call {
                Some(WaitKind::Poll) => own.tasks.waits_for_tasks(s.tid, built.runs),
                // eventlet's hub sleeps where there is no file to wait for.
                Some(WaitKind::Sleep) => built.runs == Runs::Hub,
                _ => false,
            };
            if is_shared && awaits.share_wait(&mut own.awaits, s, part.time, part.length) {
                segment.quality.add(built.quality);
                continue;
            }
            stack.truncate(thread);
            stack.extend(part.state.map(RawFrame::State));
            let mut number = 0;
            if let Some(waker) = waker.filter(|_| part.state.is_some_and(ThreadState::waits)) {
                number = segment.wakers.number(waker.waker);
                if wakers.are_shown() {
                    stack.extend(waker.by);
                    stack.extend(&waker.frames);
                }
            }
            let sample = RawTimelineSample {
                time: s.time,
                pid: s.pid,
                tid: s.tid,
                node: 0,
                count,
                amount: s.memory.map_or(part.time, |m| {
                    let measure = self.options.measure.doubled(m.doubled);
                    measure.bytes(m.bytes.unsigned_abs())
                }),
                labels,
            };
            let interval = self.options.measure.is_time().then_some(Interval {
                length: part.length,
                waker: number,
                holds_lock: s.holds_lock,
            });
            segment.add(&mut last.path, stack, sample, interval, built.quality, &name_bytes);
            if interval.is_some() && part.state == Some(ThreadState::Waiting(WaitKind::Gil)) {
                holder = Some(number);
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
        if self.stacks.has_anonymous_code() {
            let process = &mut self.processes.ensure(s.pid).process;
            process.jit.is_sampled = true;
            process.scan_jit_code(&mut self.files, Some(s.time));
        }
        Ok(())
    }

    /// Whether to read the thread states of the sample's process again. Perhaps the thread has begun to run a
    /// subinterpreter, whose frames are on another chain. Or it is new, and threads of this interpreter are found in
    /// its list only.
    fn is_rescan_due(&mut self, s: &Sample) -> bool {
        let process = &mut self.processes.ensure(s.pid).process;
        let states = &mut process.states;
        let is_due = process.python.is_some() && s.time.saturating_sub(states.searched) > RESCAN_INTERVAL;
        if is_due {
            states.searched = s.time;
        }
        is_due
    }
}

/// The quality of a stack that begins with that of a job's dispatcher.
fn with_job(quality: StackQuality, job: Option<Job>) -> StackQuality {
    match (quality, job.and_then(|job| job.truncation)) {
        (StackQuality::Exact | StackQuality::Repaired, Some(why)) => StackQuality::Partial(why),
        _ => quality,
    }
}
