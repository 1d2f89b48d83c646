//! Threads that sleep and of which the backend takes no sample: when a recording ends, their last interval never ends in
//! it, so no switch takes one; and ptrace samples no thread that sleeps. They are read in place, without a stop, and their
//! time is counted like that of other samples.

use std::collections::BTreeMap;
use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::Session;
use super::targets::ForkMemory;
use crate::capture::ptrace::snapshot::{SnapshotTarget, Snapshotter};
use crate::capture::{Backend, OpenInterval};
use crate::cpython::{frame_walk, thread_states};
use crate::cpython_layout::TargetLayout;
use crate::error::Result;
use crate::event::{Event, Pid, PythonWalk, Sample, Tid};
use crate::sys;
use crate::sys::procfs;
use crate::target::maps;

/// Maximum number of threads and of processes of which something is kept.
const MAX_KEPT: usize = 4096;
/// How long what was read of a process to read its threads is used, ns: reading it takes longer than reading a thread, and
/// threads move on meanwhile.
const CONTEXT_AGE: u64 = 200_000_000;

/// What is kept to read sleeping threads again.
#[derive(Default)]
pub(super) struct SleepingSamples {
    /// The last sample of each thread that was read while it slept, and how often it had been scheduled then.
    samples: FxHashMap<(Pid, Tid), (u64, Box<Sample>)>,
    processes: FxHashMap<Pid, Rc<ProcessContext>>,
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
    fn last(&self, i: &OpenInterval) -> Option<Sample> {
        let last = self.samples.get(&(i.pid, i.tid));
        let same = last.filter(|(runs, _)| i.runs != 0 && *runs == i.runs);
        same.map(|(_, sample)| (**sample).clone())
    }

    fn keep(&mut self, i: &OpenInterval, sample: &Sample) {
        if i.runs != 0 {
            if self.samples.len() >= MAX_KEPT {
                self.samples.clear();
            }
            self.samples.insert((i.pid, i.tid), (i.runs, Box::new(sample.clone())));
        }
    }
}

impl Session {
    /// Counts the intervals that are still open now that `source` has stopped.
    ///
    /// # Errors
    /// As [`Session::event`].
    pub fn add_open_intervals(&mut self, source: &mut dyn Backend) -> Result<()> {
        self.add_intervals(source.open_intervals())?;
        self.finish_awaits();
        self.end_lags();
        Ok(())
    }

    /// Counts the threads that sleep, where `source` does not read their stacks.
    ///
    /// # Errors
    /// As [`Session::event`].
    pub fn add_sleeping(&mut self, source: &mut dyn Backend) -> Result<()> {
        match source.sleeping() {
            intervals if intervals.is_empty() => Ok(()),
            intervals => self.add_intervals(intervals),
        }
    }

    fn add_intervals(&mut self, intervals: Vec<OpenInterval>) -> Result<()> {
        let mut by_process: BTreeMap<Pid, Vec<OpenInterval>> = BTreeMap::new();
        for interval in intervals {
            by_process.entry(interval.pid).or_default().push(interval);
        }
        for (pid, intervals) in by_process {
            let moved = intervals.iter().filter(|i| self.sleeping.last(i).is_none());
            let moved: Vec<Tid> = moved.map(|i| i.tid).collect();
            let mut read = match moved.is_empty() {
                true => BTreeMap::new(),
                false => self.read_sleeping(pid, moved)?,
            };
            for interval in intervals {
                let new = read.remove(&interval.tid);
                if let Some(sample) = &new {
                    self.sleeping.keep(&interval, sample);
                }
                // One that has moved on since has its time, but no stack: the tree says so.
                let sample = new.or_else(|| self.sleeping.last(&interval)).unwrap_or_else(|| Sample {
                    pid,
                    tid: interval.tid,
                    system_call: interval.call,
                    ..Sample::default()
                });
                let sample = Sample {
                    time: interval.end,
                    time_spent: interval.time,
                    ..sample
                };
                self.event(Event::Sample(Box::new(sample)), &mut |_, _| Ok(()))?;
            }
        }
        Ok(())
    }

    /// What is needed to read the threads of a process, if necessary from its memory.
    fn process_context(&mut self, pid: Pid) -> Result<Rc<ProcessContext>> {
        let now = sys::clock::now();
        let known = self.sleeping.processes.get(&pid);
        if let Some(known) = known.filter(|known| now.saturating_sub(known.time) < CONTEXT_AGE) {
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
        let pointers =
            interpreter.map(|p| thread_states::thread_pointers(&memory, &p, &thread_states::states(&memory, &p)));
        let context = Rc::new(ProcessContext {
            time: now,
            layout,
            writable: maps.iter().filter(|m| m.writable).map(|m| (m.start, m.end)).collect(),
            thread_pointers: pointers.unwrap_or_default(),
        });
        if self.sleeping.processes.len() >= MAX_KEPT {
            self.sleeping.processes.clear();
        }
        self.sleeping.processes.insert(pid, context.clone());
        Ok(context)
    }

    /// Samples of those of the threads that sleep, their registers as far as the kernel shows them.
    pub(super) fn read_sleeping(&mut self, pid: Pid, tids: Vec<Tid>) -> Result<BTreeMap<Tid, Sample>> {
        let context = self.process_context(pid)?;
        let pointers = &context.thread_pointers;
        let targets: Vec<SnapshotTarget> = tids
            .into_iter()
            .map(|tid| SnapshotTarget {
                tid,
                thread_pointer: procfs::namespace_tid(pid, tid).and_then(|own| pointers.get(&own).copied()),
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
            .filter_map(|(tid, seen)| {
                let seen = seen.ok()?;
                let mut sample = seen.sample;
                let call = seen.blocked.and_then(|b| b.call);
                if let (Some((number, [first, second, ..])), Some(regs)) = (call, &mut sample.regs) {
                    sample.system_call = u16::try_from(number).ok();
                    regs.set_arguments([first, second]);
                }
                Some((tid, sample))
            })
            .collect())
    }
}
