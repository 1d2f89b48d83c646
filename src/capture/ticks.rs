//! Ticks at random distances that keep to a rate.
//!
//! A timer of fixed period keeps step with a loop of that length and sees one point of it only; and where a sample
//! delays the program, the two settle into step by themselves. To set another distance costs an interrupt of the CPU
//! that the timer runs on, and the time since the last tick; so some ticks are made at one distance, and then some at
//! another one that makes up for what was missed or was too much.

use super::random::Random;

/// Ticks in a run at one distance.
pub const RUN: u32 = 8;

/// Time for which a sample stands, ns.
pub fn period(rate: u64) -> u64 {
    (1_000_000_000 / rate.max(1)).max(1)
}

/// The ticks of one timer, on a clock that goes with it: CPU time for a thread's. Times in ns.
#[derive(Debug, Default)]
pub struct Ticks {
    /// When the run began.
    begun: i64,
    distance: i64,
    /// What the distances should be on average.
    period: i64,
    /// Where the last tick before that would be, had all come one period after another.
    even: i64,
}

impl Ticks {
    /// Ticks from now on: the first after `first`, then one each period.
    pub fn begin(&mut self, now: u64, first: u64, period: u64) {
        self.begun = now as i64 + first as i64 - period as i64;
        (self.distance, self.period, self.even) = (period as i64, period as i64, self.begun);
    }

    /// Distance to set now, at any time, for ticks of this period: that to the first one of a new run, in which there will
    /// be about `run`, and between these; from half a period to two.
    pub fn distance(&self, now: u64, run: u32, period: u64, random: &mut Random) -> u64 {
        let (now, period) = (now as i64, period as i64);
        let behind = now - self.even - self.passed(now) * self.period;
        let distance = random.between(period as u64) as i64 - behind / i64::from(run.max(1));
        distance.clamp(period / 2, 2 * period).max(1) as u64
    }

    /// It was set at this time.
    pub fn set(&mut self, now: u64, distance: u64, period: u64) {
        self.even += self.passed(now as i64) * self.period;
        (self.begun, self.distance, self.period) = (now as i64, distance as i64, period as i64);
    }

    /// The distance that is set.
    pub fn current(&self) -> u64 {
        self.distance as u64
    }

    /// Ticks of this run until now.
    pub fn passed(&self, now: i64) -> i64 {
        (now - self.begun).max(0) / self.distance.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: u64 = 1_000_000;

    /// Ticks up to `end` of a timer that is set again every so many ns, or else at the last tick of each run.
    fn ticks(end: u64, every: Option<u64>, random: &mut Random) -> u64 {
        let (mut ticks, mut n, mut run) = (Ticks::default(), 0, 1);
        let mut next = random.first(PERIOD);
        ticks.begin(0, next, PERIOD);
        let (mut now, mut distance) = (0, PERIOD);
        while next < end {
            now = every.map_or(next + u64::from(run - 1) * distance, |every| now + every);
            while next <= now && next < end {
                n += 1;
                next += distance;
            }
            run = every.map_or((2 * run).min(RUN), |every| (every / PERIOD) as u32);
            distance = ticks.distance(now, run, PERIOD, random);
            ticks.set(now, distance, PERIOD);
            next = now + distance;
        }
        n
    }

    #[test]
    fn the_rate_is_kept_whenever_distances_are_set() {
        let mut random = Random::new(1);
        for every in [None, Some(PERIOD * 9 / 2), Some(10 * PERIOD), Some(77 * PERIOD)] {
            let got = ticks(2000 * PERIOD, every, &mut random) as f64;
            // What lies before the last run is made up for; in it, distances are a quarter of a period off at most.
            let slack = 4.0 + (every.unwrap_or(0) / PERIOD) as f64 / 4.0;
            assert!((got - 2000.0).abs() <= slack, "{every:?}: {got}");
        }
    }

    #[test]
    fn ticks_come_once_a_period_however_short_a_thread_lives() {
        let mut random = Random::new(0x9e37_79b9_7f4a_7c15);
        for life in [PERIOD / 10, PERIOD / 2, PERIOD, PERIOD * 7 / 5, 5 * PERIOD, 20 * PERIOD] {
            let threads = 100_000;
            let n: u64 = (0..threads).map(|_| ticks(life, None, &mut random)).sum();
            let (got, expected) = (n as f64 / threads as f64, life as f64 / PERIOD as f64);
            assert!(
                (got - expected).abs() < 0.01 * expected.max(1.0),
                "{life}: {got} for {expected}"
            );
        }
    }
}
