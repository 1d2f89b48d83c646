//! Which part of the time that threads were ready to run their control group had used up its CPU time, where the kernel does not
//! show it thread by thread: from the sums that it keeps of each group.
//!
//! The kernel adds up for how long a group was throttled on each CPU, whenever that ends, and threads that wait there
//! begin to run only after that. So a thread that was ready to run for some time, until now, was throttled for no
//! longer than that, and for no longer than its group was meanwhile. On which CPU that was is not known.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::event::{Pid, TimeSpent};
use crate::sys::cgroup::CpuQuotas;

/// For how long the groups of a process, and their limits, are taken to be the same, ns.
const GROUPS_AGE: u64 = 1_000_000_000;
/// Times at which the sums were read that are kept of a process: some seconds.
const MAX_READS: usize = 256;

/// The groups of each process.
#[derive(Debug, Default)]
pub struct Throttling {
    processes: FxHashMap<Pid, Process>,
}

#[derive(Debug, Default)]
struct Process {
    quotas: CpuQuotas,
    /// When the groups were found, ns; 0: never.
    found: u64,
    sums: Sums,
}

/// For how long a process was throttled until each time that was read, the latest one last; ns.
#[derive(Debug, Default)]
struct Sums(VecDeque<(u64, u64)>);

impl Sums {
    fn add(&mut self, now: u64, time: u64) {
        let before = self.0.back().map_or(0, |(_, sum)| *sum);
        if self.0.len() >= MAX_READS {
            self.0.pop_front();
        }
        self.0.push_back((now, before.saturating_add(time)));
    }

    /// For how long it was throttled since `start`, and since the first time after it that was read.
    fn since(&self, start: u64) -> u64 {
        let first = self.0.partition_point(|(time, _)| *time < start);
        match (self.0.get(first), self.0.back()) {
            (Some((_, first)), Some((_, last))) => last - first,
            _ => 0,
        }
    }
}

impl Throttling {
    /// Removes a process that has exited.
    pub fn remove_process(&mut self, pid: Pid) {
        self.processes.remove(&pid);
    }

    /// Reads for how long the groups of a process were throttled, unless that was read after `end`. `now`: the present time, on
    /// the same clock; in ns.
    pub fn read(&mut self, pid: Pid, end: u64, now: u64) {
        let process = self.processes.entry(pid).or_default();
        if process.found == 0 || now.saturating_sub(process.found) >= GROUPS_AGE {
            process.found = now;
            process.quotas.find(pid);
        }
        if process.sums.0.back().is_none_or(|(read, _)| *read < end) {
            let time = process.quotas.read();
            process.sums.add(now, time);
        }
    }

    /// The part of `runnable` for which the process was throttled: the thread was ready to run for that long until
    /// `end`, before the last read.
    pub fn part(&self, pid: Pid, runnable: u64, end: u64) -> u64 {
        let process = self.processes.get(&pid);
        process.map_or(0, |process| {
            process.sums.since(end.saturating_sub(runnable)).min(runnable)
        })
    }

    /// Moves that part of a sample's runnable time, which was over at `end`.
    pub fn split(&mut self, pid: Pid, time: &mut TimeSpent, end: u64, now: u64) {
        if time.runnable == 0 {
            return;
        }
        self.read(pid, end, now);
        // The sample may represent other intervals, too.
        let length = self.part(pid, time.runnable_length, end);
        let part = u128::from(time.runnable) * u128::from(length) / u128::from(time.runnable_length.max(1));
        let part = u64::try_from(part).unwrap_or(0).min(time.runnable);
        (time.throttled, time.throttled_length) = (part, length);
        time.runnable -= part;
        time.runnable_length -= length;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn throttling(sums: &[(u64, u64)]) -> Throttling {
        let mut throttling = Throttling::default();
        let process = throttling.processes.entry(1).or_default();
        process.found = 1000;
        sums.iter().for_each(|(now, time)| process.sums.add(*now, *time));
        throttling
    }

    #[test]
    fn no_more_than_the_group_was_throttled_meanwhile() {
        let throttling = throttling(&[(1000, 500), (1100, 0), (1200, 90), (1300, 0), (1400, 100)]);
        for (pid, runnable, end, part) in [
            (1, 95, 1390, 95),
            (1, 120, 1390, 100),
            (1, 200, 1390, 100), // from 1190 on: what was read at 1200 may have been before
            (1, 300, 1390, 190),
            (1, 10_000, 1390, 190), // nothing is known of the time before 1000
            (1, 50, 1390, 0),       // not read between its begin and the end
            (1, 0, 1390, 0),
            (1, 10, 2000, 0),
            (2, 95, 1390, 0),
        ] {
            assert_eq!(throttling.part(pid, runnable, end), part, "{runnable} until {end}");
        }
        let mut sums = Sums::default();
        (0..1000).for_each(|i| sums.add(i, u64::MAX / 2));
        assert_eq!((sums.0.len(), sums.since(0)), (MAX_READS, 0));
    }

    #[test]
    fn parts_of_a_sample() {
        let mut throttling = throttling(&[(1000, 0), (1100, 0), (1200, 50)]);
        // (runnable and length, then throttled, runnable, and the lengths of both)
        for (time, length, expected) in [
            (200, 110, [90, 110, 50, 60]),
            (110, 110, [50, 60, 50, 60]),
            (40, 90, [0, 40, 0, 90]),
            (30, 0, [0, 30, 0, 0]),
            (0, 0, [0; 4]),
        ] {
            let mut spent = TimeSpent {
                runnable: time,
                runnable_length: length,
                ..TimeSpent::default()
            };
            throttling.split(1, &mut spent, 1195, 1201);
            let found = [
                spent.throttled,
                spent.runnable,
                spent.throttled_length,
                spent.runnable_length,
            ];
            assert_eq!(found, expected, "{time} {length}");
        }
    }

    #[test]
    fn a_process_that_is_not_there_has_no_groups() {
        let mut throttling = Throttling::default();
        throttling.read(0, 1, 2);
        throttling.read(0, 3, 4);
        assert_eq!(throttling.part(0, 1000, 3), 0);
    }
}
