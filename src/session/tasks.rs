//! The tasks that samples belong to, of any kind.

use super::process_tasks::{ProcessTasks, Runs};
use super::task_source::{RunningTask, TaskNames, TaskSample, TaskSource};
use crate::cpython::code_object::CodeTable;
use crate::cpython::frame_groups::LastFrames;
use crate::frame::RawFrame;

/// Samples with and without the task that they belong to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskCounts {
    pub with: u64,
    /// Of coroutines and greenlets whose task could not be determined.
    pub without: u64,
}

/// The tasks of samples.
#[derive(Default)]
pub(super) struct Tasks {
    /// Show them.
    is_enabled: bool,
    counts: TaskCounts,
}

impl Tasks {
    pub(super) fn new(is_enabled: bool) -> Tasks {
        Tasks {
            is_enabled,
            ..Tasks::default()
        }
    }

    /// Samples of coroutines and greenlets so far; `None` if no tasks are searched for.
    pub(super) fn counts(&self) -> Option<TaskCounts> {
        self.is_enabled.then_some(self.counts)
    }

    /// The tasks that run in a sample.
    pub(super) fn running(
        &mut self,
        own: &mut ProcessTasks,
        names: &mut TaskNames,
        s: &TaskSample<'_>,
    ) -> Vec<RunningTask> {
        if !self.is_enabled || s.sample.python.is_empty() {
            return Vec::new();
        }
        // A thread runs the tasks of one scheduler; greenlets may run below it.
        let of_scheduler = own.trio.running(s, names);
        let of_scheduler = of_scheduler.or_else(|| own.asyncio.running(s, names));
        let greenlet = own.greenlets.running(s, names);
        let mut tasks = Vec::new();
        for found in of_scheduler.into_iter().chain(greenlet) {
            if found.is_known {
                self.counts.with += 1;
            } else {
                self.counts.without += 1;
            }
            tasks.extend(found.tasks);
        }
        tasks
    }

    /// What a thread with this stack, whose Python frames `last` has, runs.
    pub(super) fn runs(
        &self,
        own: &mut ProcessTasks,
        last: &LastFrames,
        stack: &[RawFrame],
        codes: &CodeTable,
    ) -> Runs {
        if !self.is_enabled {
            Runs::Other
        } else if own.greenlets.is_in_hub(last, codes) {
            Runs::Hub
        } else if stack.iter().any(|f| matches!(f, RawFrame::Task(_))) {
            Runs::Task
        } else {
            Runs::Other
        }
    }
}
