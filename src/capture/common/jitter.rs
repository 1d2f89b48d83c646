//! Ticks at random intervals that keep a rate.
//!
//! A timer of fixed period stays in step with a loop of that length and samples one point of it only; and where a
//! sample delays the program, the two lock into step by themselves. Setting another interval costs an interrupt of the
//! CPU that the timer runs on, and loses the time since the last tick; so ticks come in runs of one interval, and the
//! next run's interval corrects the accumulated error.

use super::rng::Rng;

/// Ticks in a run of one interval.
pub const RUN: u32 = 8;

/// Time that a sample represents, ns.
pub fn period(rate: u64) -> u64 {
    (1_000_000_000 / rate.max(1)).max(1)
}

/// The ticks of one timer, on a clock that advances with it: CPU time for a thread's. Times in ns.
#[derive(Debug, Default)]
pub struct TickSchedule {
    /// When the run began.
    run_start: i64,
    interval: i64,
    /// What the intervals should be on average.
    period: i64,
    /// Time of the last tick before the run, had all come exactly one period apart.
    nominal: i64,
}

impl TickSchedule {
    /// Ticks from now on: the first after `first`, then one each period.
    pub fn begin(&mut self, now: u64, first: u64, period: u64) {
        self.run_start = now as i64 + first as i64 - period as i64;
        (self.interval, self.period, self.nominal) = (period as i64, period as i64, self.run_start);
    }

    /// The interval to set now, at any time, for ticks of this period: both to the first tick of a new run, of about
    /// `run` ticks, and between them; from half a period to two.
    pub fn next_period(&self, now: u64, run: u32, period: u64, rng: &mut Rng) -> u64 {
        let (now, period) = (now as i64, period as i64);
        let behind = now - self.nominal - self.passed(now) * self.period;
        let interval = rng.between(period as u64) as i64 - behind / i64::from(run.max(1));
        interval.clamp(period / 2, 2 * period).max(1) as u64
    }

    /// The interval was set at this time.
    pub fn set(&mut self, now: u64, interval: u64, period: u64) {
        self.nominal += self.passed(now as i64) * self.period;
        (self.run_start, self.interval, self.period) = (now as i64, interval as i64, period as i64);
    }

    /// The interval in use.
    pub fn current(&self) -> u64 {
        self.interval as u64
    }

    /// Ticks of this run until now.
    pub fn passed(&self, now: i64) -> i64 {
        (now - self.run_start).max(0) / self.interval.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: u64 = 1_000_000;

    /// Number of ticks up to `end` of a timer that is reprogrammed every so many ns, or else at the last tick of each
    /// run.
    fn ticks(end: u64, every: Option<u64>, rng: &mut Rng) -> u64 {
        let (mut ticks, mut n, mut run) = (TickSchedule::default(), 0, 1);
        let mut next = rng.first(PERIOD);
        ticks.begin(0, next, PERIOD);
        let (mut now, mut interval) = (0, PERIOD);
        while next < end {
            now = every.map_or(next + u64::from(run - 1) * interval, |every| now + every);
            while next <= now && next < end {
                n += 1;
                next += interval;
            }
            run = every.map_or((2 * run).min(RUN), |every| (every / PERIOD) as u32);
            interval = ticks.next_period(now, run, PERIOD, rng);
            ticks.set(now, interval, PERIOD);
            next = now + interval;
        }
        n
    }

    #[test]
    fn the_rate_is_kept_whenever_intervals_are_set() {
        let mut rng = Rng::new(1);
        for every in [None, Some(PERIOD * 9 / 2), Some(10 * PERIOD), Some(77 * PERIOD)] {
            let got = ticks(2000 * PERIOD, every, &mut rng) as f64;
            // Errors before the last run are corrected; in it, intervals are off by a quarter of a period at most.
            let slack = 4.0 + (every.unwrap_or(0) / PERIOD) as f64 / 4.0;
            assert!((got - 2000.0).abs() <= slack, "{every:?}: {got}");
        }
    }

    #[test]
    fn short_lived_threads_get_one_tick_per_period_on_average() {
        let mut rng = Rng::new(0x9e37_79b9_7f4a_7c15);
        for life in [PERIOD / 10, PERIOD / 2, PERIOD, PERIOD * 7 / 5, 5 * PERIOD, 20 * PERIOD] {
            let threads = 100_000;
            let n: u64 = (0..threads).map(|_| ticks(life, None, &mut rng)).sum();
            let (got, expected) = (n as f64 / threads as f64, life as f64 / PERIOD as f64);
            assert!(
                (got - expected).abs() < 0.01 * expected.max(1.0),
                "{life}: {got} for {expected}"
            );
        }
    }
}
