//! What is observed of processes in addition to their stacks. Each activity has a struct for all processes and one for
//! each process; none knows another.

use super::SessionOptions;
use super::allocations::Allocations;
use super::awaits::{Awaits, ProcessAwaits};
use super::lags::{Lags, ProcessLags};
use super::open_intervals::SleepingThreads;
use super::process_tasks::ProcessTasks;
use super::resident::Resident;
use super::spans::{ProcessSpans, Spans};
use super::states::States;
use super::task_source::TaskNames;
use super::tasks::Tasks;
use super::wakers::Wakers;
use super::workers::{ProcessWorkers, Workers};

/// The activities of a session.
pub(super) struct Activities {
    pub(super) task_names: TaskNames,
    pub(super) tasks: Tasks,
    pub(super) allocations: Allocations,
    pub(super) awaits: Awaits,
    pub(super) lags: Lags,
    pub(super) resident: Resident,
    pub(super) spans: Spans,
    pub(super) states: States,
    pub(super) wakers: Wakers,
    pub(super) workers: Workers,
}

/// What the activities know of one process. It is dropped with the process.
#[derive(Default)]
pub(super) struct ProcessActivities {
    pub(super) tasks: ProcessTasks,
    pub(super) awaits: ProcessAwaits,
    pub(super) lags: ProcessLags,
    pub(super) spans: ProcessSpans,
    pub(super) sleeping: SleepingThreads,
    pub(super) workers: ProcessWorkers,
}

impl Activities {
    /// `now`: CLOCK_MONOTONIC, ns.
    pub(super) fn new(options: &SessionOptions, now: u64) -> Activities {
        Activities {
            task_names: TaskNames::default(),
            tasks: Tasks::new(options.tasks),
            allocations: Allocations::default(),
            awaits: Awaits::new(options.await_period(), now),
            lags: Lags::new(options.lag),
            resident: Resident::default(),
            spans: Spans::new(options),
            states: States::new(options.gil_only),
            wakers: Wakers::default(),
            workers: Workers::new(options.workers),
        }
    }
}
