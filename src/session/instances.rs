//! The processes that the samples of a segment are of, where a whole host is recorded.

use std::collections::BTreeMap;

use rustc_hash::{FxHashMap, FxHashSet};

use super::segment::QualityCounts;
use crate::error::ErrorKind;
use crate::event::{HostSample, Pid};
use crate::interleave::StackQuality;

/// Why a process is not known to the backend: that has no room for it.
pub(super) const NO_ROOM: &str = "no_room";

/// Why a process could not be opened.
pub(super) fn reason(error: ErrorKind) -> &'static str {
    match error {
        ErrorKind::NoSuchProcess => "exited",
        ErrorKind::NotPermitted => "not_permitted",
        _ => "unreadable",
    }
}

/// A process that has samples in a segment.
#[derive(Clone, Debug, Default)]
pub struct ProcessInstance {
    pub pid: Pid,
    /// Number of the run of its program: after it has executed another one, it is another process here. 0 if it could not be
    /// opened.
    pub run: u64,
    /// Clock ticks from the start of the system to its own (proc(5), `stat`); `None` if it had exited when its first sample was
    /// handled. Tells it from others that had the same number.
    pub started: Option<u64>,
    /// Number of its cgroup in the hierarchy of version 2, 0 if unknown.
    pub cgroup: u64,
    /// Its name when its first sample was taken: that of its first thread.
    pub comm: String,
    /// Samples by quality of their stacks.
    pub quality: QualityCounts,
}

/// The processes of a segment, and which of them each sample is of.
#[derive(Clone, Debug, Default)]
pub struct Instances {
    pub all: Vec<ProcessInstance>,
    /// By row of the timeline, index in `all`.
    pub of_sample: Vec<u32>,
    current: FxHashMap<(Pid, u64), u32>,
    /// Processes that could not be opened, by the reason.
    pub refused: BTreeMap<&'static str, u64>,
    refused_pids: FxHashSet<Pid>,
}

impl Instances {
    /// Counts a process that could not be opened, once.
    pub(super) fn refuse(&mut self, pid: Pid, reason: &'static str) {
        if self.refused_pids.insert(pid) {
            *self.refused.entry(reason).or_default() += 1;
        }
    }

    /// Takes note of a sample of a process that was added as the last rows of a timeline, which has `rows` now.
    pub(super) fn add(
        &mut self,
        pid: Pid,
        host: &HostSample,
        run: u64,
        started: Option<u64>,
        quality: StackQuality,
        rows: usize,
    ) {
        let all = &mut self.all;
        let at = *self.current.entry((pid, run)).or_insert_with(|| {
            all.push(ProcessInstance {
                pid,
                run,
                started,
                cgroup: host.cgroup,
                comm: String::from_utf8_lossy(host.name()).into_owned(),
                quality: QualityCounts::default(),
            });
            all.len() as u32 - 1
        });
        if let Some(instance) = self.all.get_mut(at as usize)
            && rows > self.of_sample.len()
        {
            instance.quality.add(quality);
        }
        self.of_sample.resize(rows, at);
    }
}
