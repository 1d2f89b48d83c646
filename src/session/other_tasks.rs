//! Tasks that are not asyncio's: greenlets, and tasks of trio. What says which of them a sample belongs to is in the sample itself,
//! on the stack or as a frame; what that refers to is read a little later, and checked.

use rustc_hash::FxHashMap;

use super::Session;
use super::tasks::{ProcessTasks, Runs};
use crate::cpython::frame_groups::LastFrames;
use crate::cpython::tasks::{
    self, OtherTasks, RawAwaitFrame, TrioFunction, TrioOffsets, TrioScheduler, TrioTask, is_greenlet_entry,
    is_hub_wait, trio_function,
};
use crate::cpython::thread_states::PyThreadState;
use crate::cpython_layout::Interpreter;
use crate::event::{Pid, Sample, Tid};
use crate::frame::{CodeId, Origin, PyFrame, RawFrame, TaskNameId, UnwindMethod};
use crate::process::memory::Pages;
use crate::process::system::ProcessMemory;
use crate::sys;

/// The frames at a greenlet's beginning that have its address: those of `g_initialstub` and `inner_bootstrap`, which keep it in a
/// register, and of what these call, where the register is saved. Words of them that are read at most.
const BEGINNING: usize = 4;
const MAX_WORDS: u64 = 512;
/// All tasks of trio are read again after so many times the time that it took the last time.
const PAUSE_FACTOR: u64 = 20;
/// Maximum number of code objects, and of tasks of trio, that are known of a process.
const MAX_KNOWN: usize = 1 << 16;
/// Maximum number of threads that run a scheduler of trio.
const MAX_THREADS: usize = 256;

/// What is known of trio in a process.
#[derive(Default)]
pub(super) struct TrioTasks {
    /// Whether code objects are those of its scheduler.
    schedulers: FxHashMap<CodeId, bool>,
    /// Those that run, by thread.
    running: FxHashMap<Tid, TrioScheduler>,
    /// With the avma of the code object that they belong to.
    offsets: Option<(u64, TrioOffsets)>,
    /// By the frame of the task's coroutine.
    names: FxHashMap<u64, (TrioTask, Vec<TaskNameId>)>,
    /// When all tasks may be read again, ns.
    next_scan: u64,
}

impl Session {
    /// What reads these tasks of a process. `None`: it runs no Python that is known.
    pub fn other_tasks(&self, pid: Pid) -> Option<OtherTasks> {
        let python = self.targets.get(&pid)?.python.as_ref()?;
        OtherTasks::new(
            &ProcessMemory(&*self.system, pid),
            &python.runtime,
            &python.interpreter?,
        )
    }

    /// The place of the coroutine of trio's running task among the shown Python frames, from the outermost one, its code object, and
    /// the names of the task and of those whose nurseries it is in.
    pub(super) fn find_trio_task(
        &mut self,
        s: &Sample,
        last: &LastFrames,
        process: &mut ProcessTasks,
    ) -> Option<(usize, CodeId, Vec<TaskNameId>)> {
        let known = &mut process.trio;
        if known.schedulers.len() >= MAX_KNOWN {
            known.schedulers.clear();
        }
        let mut shown = last.shown().enumerate();
        let (_, (scheduler, _)) = shown.find(|(_, (_, frame))| {
            let PyFrame::Code { code, .. } = frame else {
                return false;
            };
            *known.schedulers.entry(*code).or_insert_with(|| {
                let known = self.codes.get(*code);
                trio_function(&known.name, &known.filename) == Some(TrioFunction::Scheduler)
            })
        })?;
        let others = process.others.get_or_insert_with(|| self.other_tasks(s.pid)).as_ref()?;
        let live = ProcessMemory(&*self.system, s.pid);
        if known.running.len() >= MAX_THREADS {
            known.running.clear();
        }
        known.running.insert(
            s.tid,
            TrioScheduler {
                thread: 0,
                frame: scheduler.frame,
                code: scheduler.code,
            },
        );
        let offsets = match known.offsets {
            Some((code, offsets)) if code == scheduler.code => offsets,
            _ => {
                let offsets = others.trio_offsets(&Pages::new(&live), scheduler.frame, scheduler.code)?;
                known.offsets.insert((scheduler.code, offsets)).1
            }
        };
        // The scheduler calls the task's coroutine, and has gone on since then, but coroutines keep their frames.
        let (place, (root, frame)) = shown.next()?;
        let PyFrame::Code { code, .. } = frame else { return None };
        if known.names.len() >= MAX_KNOWN {
            known.names.clear();
        }
        let is_same = |(task, _): &(TrioTask, _)| others.still_is(&live, &offsets, (*task, root.frame));
        if !known.names.get(&root.frame).is_some_and(is_same) {
            let is_meant = |(_, coroutine): &(TrioTask, u64)| *coroutine == root.frame;
            let mut found = others.trio_task(&live, &offsets, scheduler.frame).filter(is_meant);
            if found.is_none() && s.time >= known.next_scan {
                let began = sys::clock::now();
                let all = others.all_trio_tasks(&live, &offsets, scheduler.frame);
                found = all.into_iter().find(is_meant);
                known.next_scan = s.time + PAUSE_FACTOR * sys::clock::now().saturating_sub(began);
            }
            let Some((task, _)) = found else {
                known.names.remove(&root.frame);
                if others.is_coroutine(&live, root.code) {
                    self.tasks.counts.without += 1;
                }
                return None;
            };
            let names = others.trio_names(&live, &offsets, &task);
            let names = names.iter().map(|name| self.tasks.names.id(name)).collect();
            known.names.insert(root.frame, (task, names));
        }
        self.tasks.counts.with += 1;
        Some((place, code, known.names.get(&root.frame)?.1.clone()))
    }

    /// The schedulers of trio that run in a process, and where these have their tasks.
    pub(super) fn trio_schedulers_of(&self, pid: Pid) -> impl Iterator<Item = (&Tid, &TrioScheduler)> {
        let process = self.tasks.processes.get(&pid);
        process.into_iter().flat_map(|process| &process.trio.running)
    }

    pub(super) fn trio_offsets_of(&self, pid: Pid) -> Option<TrioOffsets> {
        let (_, offsets) = self.tasks.processes.get(&pid)?.trio.offsets?;
        Some(offsets)
    }

    /// Finds the schedulers of trio on the stacks of threads; `threads` has these by their `pthread_self`.
    pub(super) fn find_trio_schedulers(
        &mut self,
        (pid, interpreter): (Pid, &Interpreter),
        reader: &OtherTasks,
        states: &[PyThreadState],
        threads: &FxHashMap<u64, Tid>,
    ) {
        let live = ProcessMemory(&*self.system, pid);
        let memory = Pages::new(&live);
        let known = &mut self.tasks.processes.entry(pid).or_default().trio;
        let codes = &mut self.codes;
        let mut function = |raw: &RawAwaitFrame| {
            let code = tasks::code_of(codes, pid, &memory, &interpreter.layout, raw).ok()?;
            let code = codes.get(code);
            trio_function(&code.name, &code.filename)
        };
        for found in reader.trio_schedulers(&memory, states, &mut function) {
            let (Some(tid), Some(offsets)) = (
                threads.get(&found.thread),
                reader.trio_offsets(&memory, found.frame, found.code),
            ) else {
                continue;
            };
            known.offsets = Some((found.code, offsets));
            if known.running.len() < MAX_THREADS {
                known.running.insert(*tid, found);
            }
        }
    }

    /// Whether the thread of this sample is in the hub of its greenlets, and not in what that has called.
    pub(super) fn find_hub(&self, last: &LastFrames, process: &mut ProcessTasks) -> bool {
        if process.hubs.len() >= MAX_KNOWN {
            process.hubs.clear();
        }
        let Some((_, PyFrame::Code { code, .. })) = last.shown().last() else {
            return false;
        };
        *process.hubs.entry(code).or_insert_with(|| {
            let known = self.codes.get(code);
            is_hub_wait(&known.name, &known.filename)
        })
    }

    /// Whether the current sample's thread waits on behalf of its suspended tasks: not where a task itself waits, nor outside of
    /// the hub in a thread that has one.
    pub(super) fn waits_for_tasks(&mut self, thread: (Pid, Tid)) -> bool {
        match self.tasks.runs {
            Runs::Task => false,
            Runs::Other => !self.awaits.hubs.contains(&thread),
            Runs::Hub => {
                if self.awaits.hubs.len() >= MAX_KNOWN {
                    self.awaits.hubs.clear();
                }
                self.awaits.hubs.insert(thread);
                true
            }
        }
    }

    /// Inserts the frame of the greenlet that the stack belongs to.
    pub(super) fn add_greenlet(&mut self, s: &Sample, last: &LastFrames, start: usize, process: &mut ProcessTasks) {
        let Some(stub) = self.native.last() else { return };
        if stub.method != UnwindMethod::Begins(Origin::Greenlet) {
            return;
        }
        let Some(at) = self.stack[start..]
            .iter()
            .position(|f| *f == RawFrame::Origin(Origin::Greenlet))
        else {
            return;
        };
        let others = process.others.get_or_insert_with(|| self.other_tasks(s.pid)).as_ref();
        let inner = self.native.len().saturating_sub(BEGINNING);
        let low = self.native.get(inner).map_or(stub.sp, |f| f.sp);
        let (end, count) = (stub.cfa, (stub.cfa.saturating_sub(low) / 8).min(MAX_WORDS));
        // The place where it was the last time comes first.
        let known = process.greenlet_slot.into_iter();
        let distances: Vec<u64> = known.chain((1..=count).map(|n| 8 * n)).collect();
        let words = distances.iter().map(|distance| {
            let at = end.checked_sub(*distance);
            at.and_then(|at| s.stack.word(at)).unwrap_or(0)
        });
        let live = ProcessMemory(&*self.system, s.pid);
        let memory = Pages::new(&live);
        let found = others.and_then(|others| others.greenlet_of_stack(&memory, words, end));
        let Some((slot, greenlet)) = found else {
            self.tasks.counts.without += 1;
            return;
        };
        process.greenlet_slot = distances.get(slot).copied();
        self.tasks.counts.with += 1;
        let function = |frame: PyFrame| {
            let PyFrame::Code { code, .. } = frame else { return None };
            let code = self.codes.get(code);
            let name = if code.qualname.is_empty() {
                &code.name
            } else {
                &code.qualname
            };
            (!is_greenlet_entry(name, &code.filename)).then_some(&**name)
        };
        let function = last.shown().find_map(|(_, frame)| function(frame));
        let name = self.tasks.names.id(&greenlet.label(function));
        self.stack.insert(start + at + 1, RawFrame::Task(name));
    }
}
