//! Kinds of tasks: those of asyncio, greenlets, and tasks of trio, behind one trait.

use std::collections::HashMap;

use rustc_hash::{FxHashMap, FxHashSet};

use super::files::Files;
use super::process::Process;
use crate::cpython::frame_groups::LastFrames;
use crate::cpython::tasks::RawAwaitFrame;
use crate::event::{AwaitKind, Sample, Tid};
use crate::frame::{CodeId, NativeFrame, Origin, RawFrame, TaskNameId};
use crate::process::memory::Pages;

/// Maximum number of different names of tasks, and of their total length in bytes.
const MAX_NAMES: usize = 1 << 16;
const MAX_NAME_BYTES: usize = 8 << 20;
/// Name of tasks for which there is no room.
const OTHER: &str = "(other)";
/// How long the numbers of a process's threads are used, ns.
const THREADS_AGE: u64 = 1_000_000_000;

/// Names of tasks, each once.
#[derive(Default)]
pub struct TaskNames {
    all: Vec<String>,
    /// Names come from the target: a hasher that resists collision attacks.
    ids: HashMap<String, TaskNameId>,
    bytes: usize,
}

impl TaskNames {
    pub(super) fn id(&mut self, name: &str) -> TaskNameId {
        if let Some(id) = self.ids.get(name) {
            return *id;
        }
        let is_full = self.all.len() >= MAX_NAMES || self.bytes + name.len() > MAX_NAME_BYTES;
        if is_full && name != OTHER {
            return self.id(OTHER);
        }
        let id = TaskNameId(self.all.len() as u32);
        self.bytes += name.len();
        self.all.push(name.to_string());
        self.ids.insert(name.to_string(), id);
        id
    }

    /// All names, in the order of their numbers.
    pub fn all(&self) -> &[String] {
        &self.all
    }
}

/// A sample in which tasks may run.
pub(super) struct TaskSample<'a> {
    pub(super) sample: &'a Sample,
    /// Its Python frames.
    pub(super) last: &'a LastFrames,
    /// Its native frames, innermost first.
    pub(super) native: &'a [NativeFrame],
    /// Its stack, outermost frame first.
    pub(super) stack: &'a [RawFrame],
    pub(super) process: &'a Process,
    pub(super) files: &'a Files,
}

/// The tasks of one kind that run in a sample.
#[derive(Default)]
pub(super) struct RunningTasks {
    /// Outermost first.
    pub(super) tasks: Vec<RunningTask>,
    /// Which task the sample belongs to is known.
    pub(super) is_known: bool,
}

/// A task that runs in a sample.
pub(super) struct RunningTask {
    pub(super) place: TaskPlace,
    /// Names of the task and of those that await it.
    pub(super) names: Vec<TaskNameId>,
}

/// The place of a task in a stack.
pub(super) enum TaskPlace {
    /// Above its coroutine: the index of that frame among the shown Python frames, from the outermost one, and its code object.
    Coroutine(usize, CodeId),
    /// Where the frames of such an origin begin.
    Origin(Origin),
}

impl RunningTask {
    /// Inserts the frames of the task into the stack that begins at `start`.
    pub(super) fn insert(&self, stack: &mut Vec<RawFrame>, start: usize) {
        let at = match self.place {
            TaskPlace::Coroutine(place, code) => {
                let of_python = stack[start..].iter().enumerate();
                let mut python = of_python.filter_map(|(i, f)| match f {
                    RawFrame::Python { code, .. } => Some((start + i, *code)),
                    _ => None,
                });
                // Where subinterpreters' frames are mixed, the order is another one.
                python.nth(place).filter(|(_, found)| *found == code).map(|(at, _)| at)
            }
            TaskPlace::Origin(origin) => {
                let mut frames = stack[start..].iter();
                frames
                    .position(|f| *f == RawFrame::Origin(origin))
                    .map(|at| start + at + 1)
            }
        };
        if let Some(at) = at {
            let frames = self.names.iter().rev().map(|name| RawFrame::Task(*name));
            stack.splice(at..at, frames);
        }
    }
}

/// One reading of the suspended tasks of a process.
pub(super) struct TaskReading<'a> {
    pub(super) process: &'a Process,
    pub(super) files: &'a mut Files,
    /// The process's memory, each page read once for all tasks of the kind.
    pub(super) memory: &'a Pages<'a>,
    /// CLOCK_MONOTONIC, ns.
    pub(super) time: u64,
    /// The process's threads.
    pub(super) threads: &'a mut PythonThreads,
    /// Threads in which tasks of another kind were found to wait.
    pub(super) taken: &'a FxHashSet<Tid>,
}

/// Threads of a process by their `pthread_self`.
#[derive(Default)]
pub(super) struct PythonThreads {
    by_pointer: FxHashMap<u64, Tid>,
    /// ns.
    read: u64,
}

impl PythonThreads {
    /// Reads the threads again if what is known is old; `now`: CLOCK_MONOTONIC, ns.
    pub(super) fn refresh(&mut self, process: &Process, files: &Files, now: u64) {
        if now.saturating_sub(self.read) >= THREADS_AGE {
            self.read = now;
            let threads = process.python_threads(&*files.system).into_iter();
            self.by_pointer = threads.map(|(tid, pointer)| (pointer, tid)).collect();
        }
    }

    pub(super) fn get(&self, pointer: u64) -> Option<Tid> {
        self.by_pointer.get(&pointer).copied()
    }
}

/// How a suspended task is shown.
pub(super) struct TaskDescription {
    /// Frames above its own: its origin, and the names of it and those that await it, the outermost first.
    pub(super) above: Vec<RawFrame>,
    pub(super) kind: AwaitKind,
}

/// A kind of tasks, in one process.
pub(super) trait TaskSource {
    /// A suspended task as it was read.
    type Suspended;

    /// The tasks that run in a sample. `None`: the sample has nothing of this kind.
    fn running(&mut self, s: &TaskSample<'_>, names: &mut TaskNames) -> Option<RunningTasks>;

    /// Reads all suspended tasks, each with the thread in which it will go on.
    fn suspended(&mut self, reading: &mut TaskReading<'_>) -> Vec<(Tid, Self::Suspended)>;

    /// The address that a task has as long as it lives.
    fn address(task: &Self::Suspended) -> u64;

    /// Whether a task is shown as the one was that had the same address.
    fn is_shown_as(task: &Self::Suspended, before: &Self::Suspended) -> bool;

    /// The suspended frames, outermost first.
    fn frames(task: &Self::Suspended) -> &[RawAwaitFrame];

    /// How to show a task; `functions`: qualified names and files of its frames' functions, outermost first, as far as
    /// these can be read. `None`: it awaits nothing itself.
    fn describe(
        &self,
        task: &Self::Suspended,
        functions: &[(String, String)],
        reading: &TaskReading<'_>,
        names: &mut TaskNames,
    ) -> Option<TaskDescription>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded() {
        let mut names = TaskNames::default();
        assert_eq!(
            (names.id("a"), names.id("b"), names.id("a")),
            (TaskNameId(0), TaskNameId(1), TaskNameId(0))
        );
        let long = "x".repeat(MAX_NAME_BYTES);
        let other = names.id(&long);
        assert_eq!(names.all()[other.0 as usize], OTHER);
        assert_eq!(names.id("b"), TaskNameId(1));
        for i in 0..2 * MAX_NAMES {
            names.id(&i.to_string());
        }
        assert!(names.all().len() <= MAX_NAMES + 1);
    }

    #[test]
    fn tasks_are_inserted_above_their_coroutine() {
        let python = |code| RawFrame::Python {
            code: CodeId(code),
            instr: 0,
        };
        let greenlet = RawFrame::Origin(Origin::Greenlet);
        let (a, b) = (RawFrame::Task(TaskNameId(0)), RawFrame::Task(TaskNameId(1)));
        let stack = [RawFrame::Process(1), python(1), greenlet, python(2), python(3)];
        let check = |place, expected: &[RawFrame]| {
            let names = vec![TaskNameId(0), TaskNameId(1)];
            let mut with = stack.to_vec();
            RunningTask { place, names }.insert(&mut with, 1);
            assert_eq!(with, expected);
        };
        let at = |at: usize| [&stack[..at], &[b, a], &stack[at..]].concat();
        check(TaskPlace::Coroutine(1, CodeId(2)), &at(3));
        check(TaskPlace::Coroutine(0, CodeId(1)), &at(1));
        // In an order that is not known.
        check(TaskPlace::Coroutine(1, CodeId(3)), &stack);
        check(TaskPlace::Coroutine(7, CodeId(3)), &stack);
        check(TaskPlace::Origin(Origin::Greenlet), &at(3));
    }
}
