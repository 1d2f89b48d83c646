//! Threads that sleep and of which the backend takes no sample: when a recording ends, their last interval never ends in
//! it, so no switch takes one; and ptrace samples no thread that sleeps. They are read in place, without a stop, and their
//! time is counted like that of other samples.

use std::collections::BTreeMap;
use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::files::Files;
use super::process::Process;
use crate::capture::OpenInterval;
use crate::capture::ptrace::snapshot::{SnapshotError, SnapshotTarget, Snapshotter};
use crate::cpython::{frame_walk, thread_states};
use crate::cpython_layout::TargetLayout;
use crate::event::{PythonWalk, Sample, Tid};
use crate::process::maps;

/// Maximum number of threads of a process of which a sample is kept.
const MAX_KEPT: usize = 4096;
/// How long what was read of a process to read its threads is used, ns: reading it takes longer than reading a thread, and
/// threads move on meanwhile.
const CONTEXT_AGE: u64 = 200_000_000;

/// Threads of one process that were read while they slept.
#[derive(Default)]
pub(super) struct SleepingThreads {
    /// The last sample of each.
    samples: FxHashMap<Tid, KeptSample>,
    context: Option<Rc<ProcessContext>>,
}

/// A sample of a thread that slept, and under which conditions it still holds.
struct KeptSample {
    sample: Box<Sample>,
    /// How often the thread had been scheduled.
    runs: u64,
    /// Whether the interpreter of its process was known: without it, Python frames were not read.
    interpreter: bool,
}

/// What is needed to read the threads of a process.
pub(super) struct ProcessContext {
    /// When it was read, ns.
    time: u64,
    layout: TargetLayout,
    /// Memory that may hold stacks (start and end), ascending.
    writable: Vec<(u64, u64)>,
    /// By the thread's ID in its own PID namespace.
    thread_pointers: FxHashMap<Tid, u64>,
}

impl SleepingThreads {
    /// The last sample of a thread, if it has not been scheduled since. `interpreter`: whether that of the process is known.
    pub(super) fn last(&self, i: &OpenInterval, interpreter: bool) -> Option<&Sample> {
        let kept = self.samples.get(&i.tid)?;
        let same = i.asleep && i.runs != 0 && kept.runs == i.runs && kept.interpreter == interpreter;
        same.then_some(&kept.sample)
    }

    pub(super) fn keep(&mut self, i: &OpenInterval, sample: &Sample, interpreter: bool) {
        if i.runs != 0 {
            if self.samples.len() >= MAX_KEPT {
                self.samples.clear();
            }
            let kept = KeptSample {
                sample: Box::new(sample.clone()),
                runs: i.runs,
                interpreter,
            };
            self.samples.insert(i.tid, kept);
        }
    }

    /// What was read of the process a short time before `now`, if its interpreter was as well known as now.
    pub(super) fn context(&self, now: u64, has_interpreter: bool) -> Option<Rc<ProcessContext>> {
        let fits = |known: &&Rc<ProcessContext>| {
            now.saturating_sub(known.time) < CONTEXT_AGE && known.layout.python.is_some() == has_interpreter
        };
        self.context.as_ref().filter(fits).cloned()
    }

    /// Reads what is needed to read the threads of the process; `layout`: what a backend needs of it.
    pub(super) fn read_context(
        &mut self,
        process: &Process,
        files: &Files,
        layout: TargetLayout,
    ) -> Rc<ProcessContext> {
        let maps = maps::parse(&files.system.maps(process.pid()).unwrap_or_default());
        let memory = process.live_memory(&*files.system);
        let thread_pointers = process
            .interpreter()
            .map(|p| thread_states::thread_pointers(&memory, p, &thread_states::states(&memory, p)));
        let context = Rc::new(ProcessContext {
            time: files.system.now(),
            layout,
            writable: maps.iter().filter(|m| m.writable).map(|m| (m.start, m.end)).collect(),
            thread_pointers: thread_pointers.unwrap_or_default(),
        });
        self.context.insert(context).clone()
    }
}

/// Samples of those of the threads that sleep, their registers as far as the kernel shows them, and why others have none.
pub(super) fn read_sleeping(
    process: &Process,
    files: &Files,
    context: &ProcessContext,
    tids: Vec<Tid>,
) -> BTreeMap<Tid, Result<Sample, SnapshotError>> {
    let (pid, thread_pointers) = (process.pid(), &context.thread_pointers);
    let targets: Vec<SnapshotTarget> = tids
        .into_iter()
        .map(|tid| SnapshotTarget {
            tid,
            thread_pointer: (process.thread_ids.inside(&*files.system, pid, tid))
                .and_then(|inside| thread_pointers.get(&inside).copied()),
            stop_sleeping: false,
        })
        .collect();
    let once = Snapshotter {
        pid,
        layout: &context.layout,
        walk: frame_walk::walk,
        writable: &context.writable,
        kernel: false,
        never_stop: true,
        seen_code: Default::default(),
        during: &|_: &PythonWalk, _, _| (),
    };
    let seen = once.inspect(&targets).into_iter();
    seen.map(|(tid, seen)| {
        let sample = seen.map(|seen| {
            let mut sample = seen.sample;
            let call = seen.blocked.and_then(|b| b.call);
            if let (Some((number, [first, second, ..])), Some(regs)) = (call, &mut sample.regs) {
                sample.system_call = u16::try_from(number).ok();
                regs.set_arguments([first, second]);
            }
            sample
        });
        (tid, sample)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::TimeSpent;

    #[test]
    fn a_sample_is_used_again_while_it_holds() {
        let listed = |runs, asleep| OpenInterval {
            pid: 1,
            tid: 2,
            end: 0,
            time: TimeSpent::default(),
            runs,
            asleep,
            call: None,
            suspended: None,
        };
        let mut sleeping = SleepingThreads::default();
        sleeping.keep(&listed(5, true), &Sample::default(), false);
        for (runs, asleep, interpreter, expected) in [
            (5, true, false, true),
            (5, false, false, false), // it was woken and waits for a CPU
            (6, true, false, false),  // it has run since
            (5, true, true, false),   // it has no Python frames, which can be read now
            (0, true, false, false),
        ] {
            let found = sleeping.last(&listed(runs, asleep), interpreter).is_some();
            assert_eq!(found, expected, "{runs} {asleep} {interpreter}");
        }
    }
}
