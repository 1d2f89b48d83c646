//! Threads that are off the CPU when a recording ends: their last interval never ends in it, so no switch takes a sample.
//! They are read in place, without a stop, and their time is counted like that of other samples.

use std::collections::BTreeMap;

use super::Session;
use super::targets::ForkMemory;
use crate::arch;
use crate::capture::ptrace::snapshot::{SnapshotTarget, Snapshotter};
use crate::capture::{Backend, OpenInterval};
use crate::cpython::{frame_walk, thread_states};
use crate::cpython_layout::TargetLayout;
use crate::error::Result;
use crate::event::{Event, Pid, PythonWalk, Sample, Tid};
use crate::sys::procfs;
use crate::target::maps;

impl Session {
    /// Counts the intervals that are still open now that `source` has stopped.
    ///
    /// # Errors
    /// As [`Session::event`].
    pub fn add_open_intervals(&mut self, source: &mut dyn Backend) -> Result<()> {
        let mut by_process: BTreeMap<Pid, Vec<OpenInterval>> = BTreeMap::new();
        for interval in source.open_intervals() {
            by_process.entry(interval.pid).or_default().push(interval);
        }
        for (pid, intervals) in by_process {
            let mut read = self.read_sleeping(pid, intervals.iter().map(|i| i.tid))?;
            for interval in intervals {
                // One that has moved on since the end has its time, but no stack: the tree says so.
                let sample = read.remove(&interval.tid).unwrap_or_else(|| Sample {
                    pid,
                    tid: interval.tid,
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

    /// Samples of those of the threads that sleep, their registers as far as the kernel shows them.
    fn read_sleeping(&mut self, pid: Pid, tids: impl Iterator<Item = Tid>) -> Result<BTreeMap<Tid, Sample>> {
        let mut space = TargetLayout::default();
        self.notify_backend(pid, &mut |_, known| {
            space = known.cloned().unwrap_or_default();
            Ok(())
        })?;
        let maps = maps::parse(&self.system.maps(pid).unwrap_or_default());
        let writable: Vec<(u64, u64)> = maps.iter().filter(|m| m.writable).map(|m| (m.start, m.end)).collect();
        let interpreter = self.python(pid).and_then(|(_, interpreter)| interpreter);
        let memory = ForkMemory {
            system: &*self.system,
            pid,
            parent: None,
        };
        let pointers =
            interpreter.map(|p| thread_states::thread_pointers(&memory, &p, &thread_states::states(&memory, &p)));
        let pointers = pointers.unwrap_or_default();
        let targets: Vec<SnapshotTarget> = tids
            .map(|tid| SnapshotTarget {
                tid,
                thread_pointer: procfs::namespace_tid(pid, tid).and_then(|own| pointers.get(&own).copied()),
                stop_sleeping: false,
            })
            .collect();
        let once = Snapshotter {
            pid,
            layout: &space,
            walk: frame_walk::walk,
            writable: &writable,
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
                if let (Some((number, arguments)), Some(regs)) =
                    (seen.blocked.and_then(|b| b.call), sample.regs.as_mut())
                {
                    sample.system_call = u16::try_from(number).ok();
                    for (register, value) in [arch::FIRST_ARGUMENT, arch::SECOND_ARGUMENT].into_iter().zip(arguments) {
                        regs.gpr[register] = value;
                        regs.known |= 1 << register;
                    }
                }
                Some((tid, sample))
            })
            .collect())
    }
}
