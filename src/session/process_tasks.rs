//! The tasks of one process, by their kinds.

use super::asyncio::Asyncio;
use super::greenlets::Greenlets;
use super::trio::Trio;
use crate::event::Tid;

/// What is known of the tasks of a process.
#[derive(Default)]
pub(super) struct ProcessTasks {
    pub(super) asyncio: Asyncio,
    pub(super) greenlets: Greenlets,
    pub(super) trio: Trio,
}

/// What a thread runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Runs {
    #[default]
    Other,
    Task,
    /// The hub of greenlets.
    Hub,
}

impl ProcessTasks {
    /// Whether a thread that waits for events does so on behalf of its suspended tasks: not where a task itself waits,
    /// nor outside of the hub in a thread that has one.
    pub(super) fn waits_for_tasks(&mut self, tid: Tid, runs: Runs) -> bool {
        match runs {
            Runs::Task => false,
            Runs::Other => !self.greenlets.has_hub(tid),
            Runs::Hub => {
                self.greenlets.observe_hub(tid);
                true
            }
        }
    }
}
