//! Callbacks and task steps that blocked an event loop for long.

use crate::model::{Pid, Tid};

/// A callback or a step of a task that blocked an event loop for long.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lag {
    /// The process of the event loop.
    pub pid: Pid,
    /// The thread of the event loop.
    pub tid: Tid,
    /// When it began: CLOCK_MONOTONIC of the machine that ran it, ns.
    pub start: u64,
    /// The same, ns since the start of the profile.
    pub time: u64,
    /// How long it took, ns.
    pub length: u64,
    /// Name of the task; empty for a callback without one.
    pub task: String,
    /// The stack in which it spent most of this time, outermost first, `name (file:line)`; empty if none is known.
    pub stack: Vec<String>,
    /// The innermost Python function in it.
    pub function: String,
}
