//! Waiting awake for stops that are about to come. A CPU that has gone idle takes longer to wake than a sample takes, and
//! works slowly at first; the thread stands still meanwhile.
//!
//! A timer counts the thread's CPU time, so that its next stop can be foretold as long as the thread does not leave its
//! CPU: where the last stop came as foretold, the tracer wakes a little before the next, and rehearses it. Threads that
//! come and go, many threads, and threads that need all CPUs themselves are not waited for in this way.

use std::os::fd::AsFd;
use std::time::Duration;

use super::{Tracer, lock};
use crate::process::{sys, trace};
use crate::sample::Tid;

/// How long before a stop the tracer wakes, as a part of the period and at most, ns. The longer a CPU has been idle, the
/// longer it takes.
const EARLY: u64 = 6;
const EARLIEST: u64 = 300_000;
/// There is time for a rehearsal before a stop, ns.
const REHEARSAL: u64 = 60_000;
/// How long after the foretold time it looks on, ns.
const LATE: u64 = 60_000;
/// Threads of the target, at most: each look costs more the more there are.
const MOST_THREADS: usize = 32;

/// When a thread will stop next.
#[derive(Default)]
pub(super) struct Forecast {
    next: u64,
    /// The last one was right.
    holds: bool,
}

impl Forecast {
    /// The thread stopped at this time, and the next stop is foretold for `next`.
    pub(super) fn stopped(&mut self, time: u64, next: u64) {
        self.holds = time.abs_diff(self.next) < LATE;
        self.next = next;
    }

    fn is_over(&self, now: u64) -> bool {
        now > self.next + LATE
    }
}

impl Tracer {
    /// Waits awake if a stop is about to come; if one comes later, sets an alarm for it.
    pub(super) fn look_out(&mut self) {
        while let Some((tid, next)) = self.next_stop() {
            let ahead = next.saturating_sub(sys::now());
            let early = (self.period() / EARLY).min(EARLIEST);
            if ahead > early {
                if self.looks_out_for != next {
                    self.looks_out_for = next;
                    trace::set_alarm(self.lookout.as_fd(), Duration::from_nanos(ahead - early));
                }
                return;
            }
            if ahead > REHEARSAL {
                self.rehearse(tid);
            }
            self.news();
        }
    }

    /// The thread that stops next of those that are worth waiting for, and when.
    fn next_stop(&self) -> Option<(Tid, u64)> {
        if !self.started || self.threads.len() > MOST_THREADS {
            return None;
        }
        let now = sys::now();
        let (mut running, mut first) = (0, None);
        for (tid, t) in self.threads.iter().filter(|(_, t)| !t.forecast.is_over(now)) {
            running += 1;
            if t.forecast.holds && first.is_none_or(|(_, next)| t.forecast.next < next) {
                first = Some((*tid, t.forecast.next));
            }
        }
        first.filter(|_| running < self.cpus)
    }

    fn rehearse(&mut self, tid: Tid) {
        let Some(t) = self.threads.get(&tid) else { return };
        let space = lock(&self.p.shared.spaces).get(&t.pid).cloned();
        self.holder.rehearse(tid, space.as_deref(), &t.blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forecast_holds_if_the_last_one_was_right() {
        let mut forecast = Forecast::default();
        let mut check = |stopped: u64, next: u64, holds: bool| {
            forecast.stopped(stopped, next);
            assert_eq!((forecast.holds, forecast.next), (holds, next), "{stopped}");
        };
        check(5_000_000, 6_000_000, false); // there was none
        check(6_000_000 + LATE, 7_500_000, false); // it slept
        check(7_480_000, 8_500_000, true);
        check(8_500_000 + LATE - 1, 9_500_000, true);
        check(9_500_000 - LATE, 10_500_000, false);
        assert!(!forecast.is_over(10_500_000 + LATE) && forecast.is_over(10_500_001 + LATE));
    }
}
