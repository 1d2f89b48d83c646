//! Greenlets of one process. Which one a sample belongs to is on the native stack: its address is among the words of
//! the frames that begin the greenlet; what that refers to is read a little later, and checked.

use std::ops::Range;
use std::rc::Rc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::await_kind::{compiled_kind, library_kind};
use super::files::Files;
use super::process::Process;
use super::task_source::{
    RunningTask, RunningTasks, TaskDescription, TaskNames, TaskPlace, TaskReading, TaskSample, TaskSource,
};
use super::trio::other_tasks;
use crate::cpython::code_object::CodeTable;
use crate::cpython::frame_groups::LastFrames;
use crate::cpython::tasks::{
    GreenletSearch, OtherTasks, RawAwaitFrame, SuspendedGreenlet, is_greenlet_entry, is_greenlet_scheduler, is_hub_wait,
};
use crate::cpython::thread_states;
use crate::event::{AwaitKind, Tid};
use crate::frame::{CodeId, Origin, PyFrame, RawFrame, UnwindMethod};
use crate::process::maps;
use crate::process::memory::{Memory, Pages};

/// The frames at a greenlet's beginning that have its address: those of `g_initialstub` and `inner_bootstrap`, which keep it in a
/// register, and of what these call, where the register is saved. Words of them that are read at most.
const BEGINNING: usize = 4;
const MAX_WORDS: u64 = 512;
/// Maximum number of code objects, and of threads with a hub, that are known of a process.
const MAX_KNOWN: usize = 1 << 16;
/// Memory that one reading searches for greenlets, bytes: until all has been searched once, and later, from time to time (ns).
const FIRST_PART: u64 = 64 << 20;
const PART: u64 = 1 << 20;
const PART_INTERVAL: u64 = 100_000_000;

/// What is known of greenlets in a process.
#[derive(Default)]
pub(super) struct Greenlets {
    /// `None` inside: its offsets are not known.
    reader: Option<Option<Rc<OtherTasks>>>,
    /// How far from the end of the stack's outermost frame the address of a greenlet was found, bytes.
    slot: Option<u64>,
    /// Whether a hub of greenlets waits in code objects, and the threads in which one was seen.
    hubs: FxHashMap<CodeId, bool>,
    hub_threads: FxHashSet<Tid>,
    search: GreenletSearch,
    was_complete: bool,
    /// When the next part is searched, ns.
    next_part: u64,
    /// Whether the code of this generation has a file of greenlet.
    is_mapped: Option<(u64, bool)>,
}

impl Greenlets {
    fn reader(&mut self, process: &Process) -> Option<Rc<OtherTasks>> {
        self.reader
            .get_or_insert_with(|| other_tasks(process).map(Rc::new))
            .clone()
    }

    /// Whether a thread with these Python frames is in the hub of its greenlets, and not in what that has called.
    pub(super) fn is_in_hub(&mut self, last: &LastFrames, codes: &CodeTable) -> bool {
        if self.hubs.len() >= MAX_KNOWN {
            self.hubs.clear();
        }
        let Some((_, PyFrame::Code { code, .. })) = last.shown().last() else {
            return false;
        };
        *self.hubs.entry(code).or_insert_with(|| {
            let known = codes.get(code);
            is_hub_wait(&known.name, &known.filename)
        })
    }

    /// A thread is in a hub.
    pub(super) fn observe_hub(&mut self, tid: Tid) {
        if self.hub_threads.len() >= MAX_KNOWN {
            self.hub_threads.clear();
        }
        self.hub_threads.insert(tid);
    }

    /// Whether a hub was seen in the thread.
    pub(super) fn has_hub(&self, tid: Tid) -> bool {
        self.hub_threads.contains(&tid)
    }

    fn are_mapped(&mut self, process: &Process, files: &Files) -> bool {
        let generation = process.space.generation;
        match self.is_mapped {
            Some((of, has)) if of == generation => has,
            _ => {
                let mut mapped = process.space.code().iter().filter_map(|c| c.file);
                let has = mapped.any(|(id, _)| files.modules.get(id).name().starts_with("_greenlet."));
                self.is_mapped.insert((generation, has)).1
            }
        }
    }

    /// Searches a part of the process's memory.
    fn search(&mut self, reader: &OtherTasks, process: &Process, files: &Files, now: u64) {
        let live = process.live_memory(&*files.system);
        if self.was_complete {
            reader.refresh_greenlets(&live, &mut self.search);
        }
        if now < self.next_part {
            return;
        }
        if self.search.is_complete() {
            let text = files.system.maps(process.pid()).unwrap_or_default();
            self.search.begin(maps::parse(&text));
        }
        let part = if self.was_complete { PART } else { FIRST_PART };
        reader.find_greenlets(&live, &mut self.search, part);
        self.was_complete |= self.search.is_complete();
        if self.was_complete {
            self.next_part = now + PART_INTERVAL;
        }
    }
}

/// The kind of what a greenlet awaits in a compiled function: the innermost one on its stack that says so.
fn compiled_wait(
    process: &Process,
    files: &Files,
    memory: &dyn Memory,
    greenlet: &SuspendedGreenlet,
) -> Option<AwaitKind> {
    let code = process.space.code().iter();
    let known = code.filter_map(|c| Some((c.start..c.end, compiled_kind(&files.modules.get(c.file?.0).name())?)));
    let known: Vec<(Range<u64>, AwaitKind)> = known.collect();
    if known.is_empty() {
        return None;
    }
    let kind = |word: u64| known.iter().find(|(place, _)| place.contains(&word));
    OtherTasks::stack_words(memory, greenlet)
        .find_map(kind)
        .map(|(_, kind)| *kind)
}

impl TaskSource for Greenlets {
    type Suspended = SuspendedGreenlet;

    fn running(&mut self, s: &TaskSample<'_>, names: &mut TaskNames) -> Option<RunningTasks> {
        let stub = s.native.last()?;
        let origin = RawFrame::Origin(Origin::Greenlet);
        if stub.method != UnwindMethod::Begins(Origin::Greenlet) || !s.stack.contains(&origin) {
            return None;
        }
        let inner = s.native.len().saturating_sub(BEGINNING);
        let low = s.native.get(inner).map_or(stub.sp, |f| f.sp);
        let (end, count) = (stub.cfa, (stub.cfa.saturating_sub(low) / 8).min(MAX_WORDS));
        // The place where it was the last time comes first.
        let known = self.slot.into_iter();
        let distances: Vec<u64> = known.chain((1..=count).map(|n| 8 * n)).collect();
        let words = distances.iter().map(|distance| {
            let at = end.checked_sub(*distance);
            at.and_then(|at| s.sample.stack.word(at)).unwrap_or(0)
        });
        let live = s.process.live_memory(&*s.files.system);
        let memory = Pages::new(&live);
        let reader = self.reader(s.process);
        let found = reader.and_then(|reader| reader.greenlet_of_stack(&memory, words, end));
        let Some((slot, greenlet)) = found else {
            return Some(RunningTasks::default());
        };
        self.slot = distances.get(slot).copied();
        let function = |frame: PyFrame| {
            let PyFrame::Code { code, .. } = frame else { return None };
            let code = s.files.codes.get(code);
            let name = if code.qualname.is_empty() {
                &code.name
            } else {
                &code.qualname
            };
            (!is_greenlet_entry(name, &code.filename)).then_some(&**name)
        };
        let function = s.last.shown().find_map(|(_, frame)| function(frame));
        let task = RunningTask {
            place: TaskPlace::Origin(Origin::Greenlet),
            names: vec![names.id(&greenlet.label(function))],
        };
        Some(RunningTasks {
            tasks: vec![task],
            is_known: true,
        })
    }

    /// Only greenlets in threads without tasks of another kind: where there are some, the thread waits for these.
    fn suspended(&mut self, reading: &mut TaskReading<'_>) -> Vec<(Tid, SuspendedGreenlet)> {
        let (process, files) = (reading.process, &*reading.files);
        if !self.are_mapped(process, files) {
            return Vec::new();
        }
        let (Some(reader), Some(interpreter)) = (self.reader(process), process.interpreter()) else {
            return Vec::new();
        };
        self.search(&reader, process, files, reading.time);
        let live = process.live_memory(&*files.system);
        let memory = Pages::new(&live);
        let states = thread_states::states(&memory, interpreter);
        reading.threads.refresh(process, files, reading.time);
        let found = reader.suspended_greenlets(&live, &self.search, &states).into_iter();
        found
            .filter_map(|greenlet| Some((reading.threads.get(greenlet.thread)?, greenlet)))
            .filter(|(tid, _)| !reading.taken.contains(tid))
            .collect()
    }

    fn address(task: &SuspendedGreenlet) -> u64 {
        task.address
    }

    fn is_shown_as(task: &SuspendedGreenlet, before: &SuspendedGreenlet) -> bool {
        task.frames == before.frames
    }

    fn frames(task: &SuspendedGreenlet) -> &[RawAwaitFrame] {
        &task.frames
    }

    fn describe(
        &self,
        task: &SuspendedGreenlet,
        functions: &[(String, String)],
        reading: &TaskReading<'_>,
        names: &mut TaskNames,
    ) -> Option<TaskDescription> {
        let memory = reading.memory;
        let greenlet = self.reader.as_ref()?.as_ref()?.greenlet(memory, task);
        let mut kind = library_kind(functions.iter().rev().map(|(name, file)| (&**name, &**file)));
        if kind == AwaitKind::Other {
            kind = compiled_wait(reading.process, reading.files, memory, task).unwrap_or(kind);
        }
        let mut ends = functions.first().into_iter().chain(functions.last());
        if greenlet.is_hub() || ends.any(|(name, file)| is_greenlet_scheduler(name, file)) {
            return None;
        }
        let mut own = functions.iter().filter(|(name, file)| !is_greenlet_entry(name, file));
        let label = greenlet.label(own.next().map(|(name, _)| &**name));
        let origin = (!greenlet.is_main()).then_some(RawFrame::Origin(Origin::Greenlet));
        let name = RawFrame::Task(names.id(&label));
        Some(TaskDescription {
            above: origin.into_iter().chain([name]).collect(),
            kind,
        })
    }
}
