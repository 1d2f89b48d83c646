//! Threads that sleep and of which the backend takes no sample: when a recording ends, their last interval never ends in
//! it, so no switch takes one; and ptrace samples no thread that sleeps. They are read in place, without a stop, and their
//! time is counted like that of other samples.

use std::collections::BTreeMap;
use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::Session;
use super::targets::ForkMemory;
use crate::capture::ptrace::snapshot::{SnapshotError, SnapshotTarget, Snapshotter};
use crate::capture::{Backend, OpenInterval};
use crate::cpython::{frame_walk, thread_states};
use crate::cpython_layout::TargetLayout;
use crate::error::Result;
use crate::event::{Event, Pid, PythonWalk, Sample, Tid};
use crate::process::maps;
use crate::sys;

/// Maximum number of threads and of processes of which something is kept.
const MAX_KEPT: usize = 4096;
/// How long what was read of a process to read its threads is used, ns: reading it takes longer than reading a thread, and
/// threads move on meanwhile.
const CONTEXT_AGE: u64 = 200_000_000;

/// What is kept to read sleeping threads again.
#[derive(Default)]
pub(super) struct SleepingSamples {
    /// The last sample of each thread that was read while it slept.
    samples: FxHashMap<(Pid, Tid), KeptSample>,
    processes: FxHashMap<Pid, Rc<ProcessContext>>,
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
struct ProcessContext {
    /// When it was read, ns.
    time: u64,
    layout: TargetLayout,
    /// Memory that may hold stacks (start and end), ascending.
    writable: Vec<(u64, u64)>,
    /// By the thread's ID in its own PID namespace.
    thread_pointers: FxHashMap<Tid, u64>,
}

impl SleepingSamples {
    /// The last sample of a thread, if it has not been scheduled since.
    fn last(&self, i: &OpenInterval, interpreter: bool) -> Option<&Sample> {
        let kept = self.samples.get(&(i.pid, i.tid))?;
        let same = i.asleep && i.runs != 0 && kept.runs == i.runs && kept.interpreter == interpreter;
        same.then_some(&kept.sample)
    }

    fn keep(&mut self, i: &OpenInterval, sample: &Sample, interpreter: bool) {
        if i.runs != 0 {
            if self.samples.len() >= MAX_KEPT {
                self.samples.clear();
            }
            let kept = KeptSample {
                sample: Box::new(sample.clone()),
                runs: i.runs,
                interpreter,
            };
            self.samples.insert((i.pid, i.tid), kept);
        }
    }
}

impl Session {
    /// Counts the intervals that are still open now that `backend` has stopped.
    ///
    /// # Errors
    /// As [`Session::event`].
    pub fn add_open_intervals(&mut self, backend: &mut dyn Backend) -> Result<()> {
        self.add_intervals(backend.open_intervals(), |i, _| i.asleep)?;
        self.finish_awaits();
        self.end_lags();
        Ok(())
    }

    /// Counts the threads that sleep, where `backend` does not read their stacks.
    ///
    /// # Errors
    /// As [`Session::event`].
    pub fn add_sleeping(&mut self, backend: &mut dyn Backend) -> Result<()> {
        match backend.sleeping() {
            intervals if intervals.is_empty() => Ok(()),
            // Threads are in the state in which they were read: one that slept a little earlier and runs now does not count,
            // one that slept a little later does.
            intervals => self.add_intervals(intervals, |i, error| match error {
                Some(SnapshotError::KeptRunning) => false,
                Some(SnapshotError::MovedOn) => true,
                _ => i.asleep,
            }),
        }
    }

    /// `counts`: whether an interval counts whose thread could not be read, and why it could not.
    fn add_intervals(
        &mut self,
        intervals: Vec<OpenInterval>,
        counts: impl Fn(&OpenInterval, Option<SnapshotError>) -> bool,
    ) -> Result<()> {
        let mut by_process: BTreeMap<Pid, Vec<OpenInterval>> = BTreeMap::new();
        for interval in intervals {
            by_process.entry(interval.pid).or_default().push(interval);
        }
        for (pid, intervals) in by_process {
            let interpreter = self.knows_interpreter(pid);
            let moved = intervals
                .iter()
                .filter(|i| self.sleeping.last(i, interpreter).is_none());
            let moved: Vec<Tid> = moved.map(|i| i.tid).collect();
            let mut read = match moved.is_empty() {
                true => BTreeMap::new(),
                false => self.read_sleeping(pid, moved)?,
            };
            for interval in intervals {
                let last = self.sleeping.last(&interval, interpreter).cloned();
                let sample = match (read.remove(&interval.tid).transpose(), last) {
                    (Ok(Some(sample)), _) => {
                        self.sleeping.keep(&interval, &sample, interpreter);
                        sample
                    }
                    (_, Some(last)) => last,
                    (result, None) if counts(&interval, result.as_ref().err().copied()) => Sample {
                        // One that has moved on since has its time, but no stack: the tree says so.
                        pid,
                        tid: interval.tid,
                        system_call: interval.call,
                        suspended: interval.suspended,
                        ..Sample::default()
                    },
                    _ => continue,
                };
                let sample = Sample {
                    suspended: interval.suspended,
                    time: interval.end,
                    time_spent: interval.time,
                    ..sample
                };
                self.event(Event::Sample(Box::new(sample)), &mut |_, _| Ok(()))?;
            }
        }
        Ok(())
    }

    fn knows_interpreter(&self, pid: Pid) -> bool {
        self.python(pid).is_some_and(|(_, interpreter)| interpreter.is_some())
    }

    /// What is needed to read the threads of a process, if necessary from its memory.
    fn process_context(&mut self, pid: Pid) -> Result<Rc<ProcessContext>> {
        let now = sys::clock::now();
        let interpreter = self.knows_interpreter(pid);
        let known = self.sleeping.processes.get(&pid);
        let fits = |known: &&Rc<ProcessContext>| {
            now.saturating_sub(known.time) < CONTEXT_AGE && known.layout.python.is_some() == interpreter
        };
        if let Some(known) = known.filter(fits) {
            return Ok(known.clone());
        }
        let mut layout = TargetLayout::default();
        self.notify_backend(pid, &mut |_, known| {
            layout = known.cloned().unwrap_or_default();
            Ok(())
        })?;
        let maps = maps::parse(&self.system.maps(pid).unwrap_or_default());
        let interpreter = self.python(pid).and_then(|(_, interpreter)| interpreter);
        let memory = ForkMemory {
            system: &*self.system,
            pid,
            parent: None,
        };
        let thread_pointers =
            interpreter.map(|p| thread_states::thread_pointers(&memory, &p, &thread_states::states(&memory, &p)));
        let context = Rc::new(ProcessContext {
            time: now,
            layout,
            writable: maps.iter().filter(|m| m.writable).map(|m| (m.start, m.end)).collect(),
            thread_pointers: thread_pointers.unwrap_or_default(),
        });
        if self.sleeping.processes.len() >= MAX_KEPT {
            self.sleeping.processes.clear();
        }
        self.sleeping.processes.insert(pid, context.clone());
        Ok(context)
    }

    /// Samples of those of the threads that sleep, their registers as far as the kernel shows them, and why others have none.
    pub(super) fn read_sleeping(
        &mut self,
        pid: Pid,
        tids: Vec<Tid>,
    ) -> Result<BTreeMap<Tid, std::result::Result<Sample, SnapshotError>>> {
        let context = self.process_context(pid)?;
        let thread_pointers = &context.thread_pointers;
        let targets: Vec<SnapshotTarget> = tids
            .into_iter()
            .map(|tid| SnapshotTarget {
                tid,
                thread_pointer: (self.thread_ids.inside(&*self.system, pid, tid))
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
        Ok(seen
            .map(|(tid, seen)| {
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
            .collect())
    }
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
        let mut sleeping = SleepingSamples::default();
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
