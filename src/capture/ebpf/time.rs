//! CPU time of the sampled processes, read from their own clocks: what the samples are held against.

use rustc_hash::FxHashMap;

use crate::process::sys;
use crate::sample::Pid;

/// A process's clock is summed over its threads each time it is read: such a part of our time may go into that.
const PART: u64 = 5000;

/// Times in ns.
#[derive(Default)]
pub struct Times {
    of: FxHashMap<Pid, Used>,
    /// Of processes that have ended.
    ended: u64,
    period: u64,
    /// Until then the clocks are not read again.
    read: u64,
}

#[derive(Default)]
struct Used {
    /// Before sampling began.
    before: u64,
    last: u64,
    /// Samples since the clock was read last.
    samples: u64,
}

impl Times {
    /// `period`: CPU time for which one sample stands.
    pub fn new(period: u64) -> Times {
        Times {
            period,
            ..Times::default()
        }
    }

    /// From now on the time of this process counts.
    pub fn begin(&mut self, pid: Pid) {
        let now = sys::cpu_time_of(pid).unwrap_or(0);
        self.of.insert(
            pid,
            Used {
                before: now,
                last: now,
                samples: 0,
            },
        );
    }

    /// All its time counts: it is new.
    pub fn begin_with_birth(&mut self, pid: Pid) {
        self.of.insert(pid, Used::default());
    }

    pub fn sampled(&mut self, pid: Pid) {
        if let Some(used) = self.of.get_mut(&pid) {
            used.samples += 1;
        }
    }

    /// One period of its time is not to count.
    pub fn leave_out(&mut self, pid: Pid) {
        if let Some(used) = self.of.get_mut(&pid) {
            used.before += self.period;
        }
    }

    /// Reads the clocks of those that were sampled since the last reading, if that is long enough ago; `all`: all of them, now.
    pub fn read(&mut self, all: bool) {
        let began = sys::now();
        if began < self.read && !all {
            return;
        }
        for (pid, used) in self.of.iter_mut().filter(|(_, used)| all || used.samples > 0) {
            used.read(*pid);
        }
        let now = sys::now();
        self.read = now + (now - began) * PART;
    }

    /// It has ended. Its clock can be read until somebody has waited for it; what comes after the last reading is
    /// reckoned by its samples.
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

impl Used {
    fn read(&mut self, pid: Pid) {
        // Less than before: another process has this number by now.
        if let Some(now) = sys::cpu_time_of(pid).filter(|now| *now >= self.last) {
            (self.last, self.samples) = (now, 0);
        }
    }

    fn total(&self, period: u64) -> u64 {
        (self.last + self.samples * period).saturating_sub(self.before)
    }
}
