//! Polls for stops that are about to come. An idle CPU takes longer to wake than a sample takes, and is slow at first;
//! the thread is stopped meanwhile.
//!
//! A timer counts the thread's CPU time, so its next stop can be forecast as long as the thread does not leave its CPU:
//! if the last forecast was right, the tracer wakes shortly before the next stop and warms its caches. It does not do
//! so for threads that sleep often, for many threads, and for threads that need all CPUs themselves.

use std::os::fd::AsFd;
use std::time::Duration;

use super::{Tracer, lock};
use crate::event::Tid;
use crate::sys;
use crate::sys::ptrace;

/// How long before a stop the tracer wakes: a fraction of the period, and a maximum in ns. The longer a CPU has been
/// idle, the longer it takes to wake.
const EARLY_SHARE: u64 = 6;
const MAX_EARLY: u64 = 300_000;
/// There is time to warm the caches so long before a stop, ns.
const WARM_UP_TIME: u64 = 60_000;
/// How long after the forecast time to keep polling, ns.
const MAX_ERROR: u64 = 60_000;
/// Threads of the target, at most: each poll costs more with more threads.
const MAX_THREADS: usize = 32;

/// Forecast of a thread's next stop.
#[derive(Default)]
pub(super) struct StopForecast {
    next: u64,
    /// The last forecast was right.
    reliable: bool,
}

impl StopForecast {
    /// The thread stopped at this time; forecasts the next stop for `next`.
    pub(super) fn stopped(&mut self, time: u64, next: u64) {
        self.reliable = time.abs_diff(self.next) < MAX_ERROR;
        self.next = next;
    }

    fn is_over(&self, now: u64) -> bool {
        now > self.next + MAX_ERROR
    }
}

impl Tracer {
    /// Polls if a stop is about to come; if one comes later, sets an alarm for it.
    pub(super) fn prewake(&mut self) {
        while let Some((tid, next)) = self.next_stop() {
            let remaining = next.saturating_sub(sys::clock::now());
            let early = (self.period() / EARLY_SHARE).min(MAX_EARLY);
            if remaining > early {
                if self.prewake_time != next {
                    self.prewake_time = next;
                    ptrace::set_alarm(self.prewake_alarm.as_fd(), Duration::from_nanos(remaining - early));
                }
                return;
            }
            if remaining > WARM_UP_TIME {
                self.warm_up(tid);
            }
            self.reap_events();
        }
    }

    /// The thread that is forecast to stop next, of those worth polling for, and when.
    fn next_stop(&self) -> Option<(Tid, u64)> {
        if !self.started || self.threads.len() > MAX_THREADS {
            return None;
        }
        let now = sys::clock::now();
        let (mut running, mut first) = (0, None);
        for (tid, t) in self.threads.iter().filter(|(_, t)| !t.forecast.is_over(now)) {
            running += 1;
            if t.forecast.reliable && first.is_none_or(|(_, next)| t.forecast.next < next) {
                first = Some((*tid, t.forecast.next));
            }
        }
        first.filter(|_| running < self.cpus)
    }

    fn warm_up(&mut self, tid: Tid) {
        let Some(t) = self.threads.get(&tid) else { return };
        let layout = lock(&self.p.shared.layouts).get(&t.pid).cloned();
        self.reader.warm_up(tid, layout.as_deref(), &t.blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forecast_is_reliable_if_the_last_one_was_right() {
        let mut forecast = StopForecast::default();
        let mut check = |stopped: u64, next: u64, reliable: bool| {
            forecast.stopped(stopped, next);
            assert_eq!((forecast.reliable, forecast.next), (reliable, next), "{stopped}");
        };
        check(5_000_000, 6_000_000, false); // no forecast yet
        check(6_000_000 + MAX_ERROR, 7_500_000, false); // it slept
        check(7_480_000, 8_500_000, true);
        check(8_500_000 + MAX_ERROR - 1, 9_500_000, true);
        check(9_500_000 - MAX_ERROR, 10_500_000, false);
        assert!(!forecast.is_over(10_500_000 + MAX_ERROR) && forecast.is_over(10_500_001 + MAX_ERROR));
    }
}
