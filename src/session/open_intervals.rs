//! Threads that are off the CPU when a recording ends: their last interval never ends in it, so no switch takes a sample.
//! They are read in place, without a stop, and their time is counted like that of other samples.

use std::collections::BTreeMap;

use super::Session;
use super::processes::Family;
use crate::arch;
use crate::capture::ptrace::once::{Once, Target};
use crate::capture::{OpenInterval, Source};
use crate::error::Result;
use crate::interp::{threads, walk};
use crate::layout::Space;
use crate::process::{maps, task};
use crate::sample::{Event, Pid, Sample, Tid, Walked};

impl Session {
    /// Counts the intervals that are still open now that `source` has stopped.
    ///
    /// # Errors
    /// As [`Session::event`].
    pub fn add_open_intervals(&mut self, source: &mut dyn Source) -> Result<()> {
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
        let mut space = Space::default();
        self.tell(pid, &mut |_, known| {
            space = known.cloned().unwrap_or_default();
            Ok(())
        })?;
        let maps = maps::parse(&self.host.maps(pid).unwrap_or_default());
        let writable: Vec<(u64, u64)> = maps.iter().filter(|m| m.writable).map(|m| (m.start, m.end)).collect();
        let interpreter = self.python(pid).and_then(|(_, interpreter)| interpreter);
        let memory = Family {
            host: &*self.host,
            pid,
            parent: None,
        };
        let pointers = interpreter.map(|p| threads::pointers(&memory, &p, &threads::states(&memory, &p)));
        let pointers = pointers.unwrap_or_default();
        let targets: Vec<Target> = tids
            .map(|tid| Target {
                tid,
                pointer: task::own_number(pid, tid).and_then(|own| pointers.get(&own).copied()),
                hold: false,
            })
            .collect();
        let once = Once {
            pid,
            space: &space,
            walk: walk::walk,
            writable: &writable,
            kernel: false,
            never_stop: true,
            met: Default::default(),
            during: &|_: &Walked, _, _| (),
        };
        let seen = once.look(&targets).into_iter();
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
