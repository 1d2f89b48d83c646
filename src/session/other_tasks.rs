//! Tasks that are not asyncio's: greenlets, and tasks of trio. What says which of them a sample belongs to is in the sample itself,
//! on the stack or as a frame; what that refers to is read a little later, and checked.

use rustc_hash::FxHashMap;

use super::Session;
use super::tasks::ProcessTasks;
use crate::cpython::frame_groups::LastFrames;
use crate::cpython::tasks::{OtherTasks, TrioOffsets, TrioTask, is_greenlet_entry, is_trio_scheduler};
use crate::event::{Pid, Sample};
use crate::frame::{CodeId, Origin, PyFrame, RawFrame, TaskNameId, UnwindMethod};
use crate::sys;
use crate::target::memory::Pages;
use crate::target::system::ProcessMemory;

/// The frames at a greenlet's beginning that have its address: those of `g_initialstub` and `inner_bootstrap`, which keep it in a
/// register, and of what these call, where the register is saved. Words of them that are read at most.
const BEGINNING: usize = 4;
const MAX_WORDS: u64 = 512;
/// All tasks of trio are read again after so many times the time that it took the last time.
const PAUSE_FACTOR: u64 = 20;
/// Maximum number of code objects, and of tasks of trio, that are known of a process.
const MAX_KNOWN: usize = 1 << 16;

/// What is known of trio in a process.
#[derive(Default)]
pub(super) struct TrioTasks {
    /// Whether code objects are those of its scheduler.
    schedulers: FxHashMap<CodeId, bool>,
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
                is_trio_scheduler(&known.name, &known.filename)
            })
        })?;
        let others = process.others.get_or_insert_with(|| self.other_tasks(s.pid)).as_ref()?;
        let live = ProcessMemory(&*self.system, s.pid);
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
