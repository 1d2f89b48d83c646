//! CPU time of the sampled processes, read from their clocks: to compare the number of samples with.

use rustc_hash::FxHashMap;

use crate::event::Pid;
use crate::sys;

/// A process's clock is summed over its threads at each read: at most one part in so many of our time goes into that.
const MAX_SHARE: u64 = 5000;

/// Times in ns.
#[derive(Default)]
pub struct CpuTimes {
    of: FxHashMap<Pid, CpuTime>,
    /// Of processes that have exited.
    ended: u64,
    period: u64,
    /// The clocks are not read again before this time.
    read: u64,
}

#[derive(Default)]
struct CpuTime {
    /// Before sampling began.
    before: u64,
    last: u64,
    /// Samples since the clock was last read.
    samples: u64,
}

impl CpuTimes {
    /// `period`: CPU time that one sample represents.
    pub fn new(period: u64) -> CpuTimes {
        CpuTimes {
            period,
            ..CpuTimes::default()
        }
    }

    /// The time of this process counts from now on.
    pub fn begin(&mut self, pid: Pid) {
        let now = sys::clock::cpu_time_of(pid).unwrap_or(0);
        self.of.insert(
            pid,
            CpuTime {
                before: now,
                last: now,
                samples: 0,
            },
        );
    }

    /// All time of this process counts: it is new.
    pub fn count_from_start(&mut self, pid: Pid) {
        self.of.insert(pid, CpuTime::default());
    }

    pub fn sampled(&mut self, pid: Pid) {
        if let Some(used) = self.of.get_mut(&pid) {
            used.samples += 1;
        }
    }

    /// Excludes one period of its time.
    pub fn exclude_one_period(&mut self, pid: Pid) {
        if let Some(used) = self.of.get_mut(&pid) {
            used.before += self.period;
        }
    }

    /// Reads the clocks of processes sampled since the last reading, if that is long enough ago; `all`: of all
    /// processes, now.
    pub fn read(&mut self, all: bool) {
        let began = sys::clock::now();
        if began < self.read && !all {
            return;
        }
        for (pid, used) in self.of.iter_mut().filter(|(_, used)| all || used.samples > 0) {
            used.read(*pid);
        }
        let now = sys::clock::now();
        self.read = now + (now - began) * MAX_SHARE;
    }

    /// The process has exited. Its clock can be read until its parent has waited for it; time after the last reading is
    /// estimated from its samples.
    pub fn end(&mut self, pid: Pid) {
        if let Some(mut used) = self.of.remove(&pid) {
            used.read(pid);
            self.ended += used.total(self.period);
        }
    }

    pub fn total(&self) -> u64 {
        self.ended + self.of.values().map(|used| used.total(self.period)).sum::<u64>()
    }
}

impl CpuTime {
    fn read(&mut self, pid: Pid) {
        // Less than before: the ID belongs to another process by now.
        if let Some(now) = sys::clock::cpu_time_of(pid).filter(|now| *now >= self.last) {
            (self.last, self.samples) = (now, 0);
        }
    }

    fn total(&self, period: u64) -> u64 {
        (self.last + self.samples * period).saturating_sub(self.before)
    }
}
