//! How many samples a second a recording may take, so that nativeprof itself keeps to its share of a CPU.
//!
//! Each segment tells what it has used at its rate. The next one may use what the last ten minutes have left of the budget, and
//! gets the rate that uses so much: the cost of a recording is taken as a fixed part and a part for each sample per second, which
//! are fitted to the segments of these ten minutes.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

/// Time over which the budget is kept, seconds.
const WINDOW: f64 = 600.0;
/// Part of the budget that is aimed at: the rest is for what the estimate is wrong by.
const AIM: f64 = 0.97;
/// The most that a segment may use to make up for cheaper ones, in budgets.
const MAX_ALLOWANCE: f64 = 2.0;
/// Segments that are remembered: more than ten minutes have, unless they are very short.
const MAX_SEGMENTS: usize = 600;

/// What a segment has used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Used {
    /// Its length, seconds.
    pub elapsed: f64,
    /// CPU time of all parts of nativeprof, seconds.
    pub cpu: f64,
    /// Samples per second of CPU time.
    pub rate: u64,
}

/// The rate of the next segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextRate {
    /// Samples per second of CPU time.
    pub rate: u64,
    /// Whether the budget can be kept at this rate. Not if even the lowest rate costs more.
    pub is_kept: bool,
}

/// Keeps nativeprof to a share of a CPU.
#[derive(Debug)]
pub struct Budget {
    /// CPU seconds per second.
    limit: f64,
    rates: RangeInclusive<u64>,
    segments: VecDeque<Used>,
}

impl Budget {
    /// A budget of `limit` CPU seconds per second, kept by rates in this range.
    pub fn new(limit: f64, rates: RangeInclusive<u64>) -> Budget {
        Budget {
            limit,
            rates,
            segments: VecDeque::new(),
        }
    }

    /// The rate after a segment that has ended.
    pub fn next_rate(&mut self, used: Used) -> NextRate {
        self.segments.push_back(used);
        let mut elapsed: f64 = self.segments.iter().map(|segment| segment.elapsed).sum();
        // The next one is as long as the last, and belongs to the ten minutes.
        while self.segments.len() > MAX_SEGMENTS || elapsed + used.elapsed > WINDOW * 1.001 && self.segments.len() > 1 {
            elapsed -= self.segments.pop_front().map_or(0.0, |segment| segment.elapsed);
        }
        let cpu: f64 = self.segments.iter().map(|segment| segment.cpu).sum();
        let limit = self.limit * AIM;
        let left = limit * (elapsed + used.elapsed) - cpu;
        let allowed = (left / used.elapsed.max(1e-3)).clamp(0.0, limit * MAX_ALLOWANCE);
        let (fixed, per_rate) = self.cost();
        let (least, most) = (*self.rates.start(), *self.rates.end());
        let rate = if per_rate > 0.0 {
            (((allowed - fixed) / per_rate).floor().max(0.0) as u64).clamp(least, most)
        } else {
            most
        };
        NextRate {
            rate,
            is_kept: fixed + per_rate * least as f64 <= self.limit,
        }
    }

    /// CPU seconds per second at a rate of 0, and for each sample per second, by the method of least squares.
    fn cost(&self) -> (f64, f64) {
        let weight: f64 = self.segments.iter().map(|s| s.elapsed).sum();
        let mean = |of: &dyn Fn(&Used) -> f64| self.segments.iter().map(|s| of(s) * s.elapsed).sum::<f64>() / weight;
        let rate = mean(&|s| s.rate as f64);
        let cpu = mean(&share);
        let spread = mean(&|s| (s.rate as f64 - rate).powi(2));
        let common = mean(&|s| (s.rate as f64 - rate) * (share(s) - cpu));
        // Rates that hardly differ do not tell the parts apart: everything counts for the samples.
        let proportional = cpu / rate.max(1e-9);
        let per_rate = if spread > 0.02 * rate * rate {
            (common / spread).clamp(0.1 * proportional, proportional)
        } else {
            proportional
        };
        (cpu - per_rate * rate, per_rate)
    }
}

/// CPU seconds per second.
fn share(used: &Used) -> f64 {
    used.cpu / used.elapsed.max(1e-3)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs segments of a minute that cost `cost(minute, rate)` CPU seconds per second. Returns the rates, and the largest share
    /// of any ten minutes in a row.
    fn run(limit: f64, minutes: usize, cost: impl Fn(usize, u64) -> f64) -> (Vec<u64>, f64, NextRate) {
        let mut budget = Budget::new(limit, 1..=20);
        let (mut rate, mut rates, mut used) = (20, Vec::new(), Vec::new());
        let mut last = NextRate { rate, is_kept: true };
        for minute in 0..minutes {
            let cpu = cost(minute, rate) * 60.0;
            rates.push(rate);
            used.push(cpu);
            last = budget.next_rate(Used {
                elapsed: 60.0,
                cpu,
                rate,
            });
            rate = last.rate;
        }
        let largest = used
            .windows(10)
            .map(|ten| ten.iter().sum::<f64>() / 600.0)
            .fold(0.0, f64::max);
        (rates, largest, last)
    }

    /// Numbers that look random, from 0 to 1.
    fn noise(at: usize) -> f64 {
        let x = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f64 / (1u64 << 24) as f64
    }

    #[test]
    fn what_is_cheap_is_sampled_at_the_highest_rate() {
        let (rates, _, last) = run(0.01, 30, |_, rate| 0.001 + 0.0002 * rate as f64);
        assert!(rates.iter().all(|rate| *rate == 20), "{rates:?}");
        assert!(last.is_kept);
    }

    #[test]
    fn ten_minutes_keep_to_the_budget() {
        for (limit, fixed, per_rate, spread) in [
            (0.002, 0.0005, 0.0003, 0.0),
            (0.002, 0.0005, 0.0003, 0.5),
            (0.002, 0.0012, 0.0002, 0.3),
            (0.002, 0.0, 0.0004, 0.5),
            (0.01, 0.002, 0.001, 0.5),
        ] {
            let cost = |minute, rate: u64| fixed + per_rate * rate as f64 * (1.0 + spread * (noise(minute) - 0.5));
            let (rates, largest, last) = run(limit, 120, cost);
            assert!(largest <= 1.1 * limit, "{largest} of {limit}: {rates:?}");
            // It is used, too.
            let rate = rates.iter().sum::<u64>() as f64 / rates.len() as f64;
            let best = ((limit - fixed) / per_rate).min(20.0);
            assert!(rate >= 0.75 * best, "{rate} of {best}: {rates:?}");
            assert!(last.is_kept);
        }
    }

    #[test]
    fn a_busier_machine_lowers_the_rate_and_an_idle_one_raises_it() {
        let busy = |minute: usize| (30..60).contains(&minute);
        let cost = |minute, rate: u64| 0.0004 + if busy(minute) { 0.0004 } else { 0.00002 } * rate as f64;
        let (rates, largest, _) = run(0.002, 100, cost);
        assert_eq!(rates[29], 20);
        assert!(rates[45] < 8, "{rates:?}");
        assert_eq!(rates[99], 20);
        // The minute in which it became busy costs what it costs.
        assert!(largest <= 0.0026, "{largest}");
    }

    #[test]
    fn what_cannot_be_kept_is_said() {
        let (rates, _, last) = run(0.002, 30, |_, rate| 0.003 + 0.0001 * rate as f64);
        assert_eq!(rates[29], 1);
        assert!(!last.is_kept);
    }

    #[test]
    fn times_of_nothing_are_no_rates() {
        let mut budget = Budget::new(0.01, 1..=20);
        for elapsed in [0.0, 1e-9, 60.0] {
            for cpu in [0.0, 1.0] {
                let next = budget.next_rate(Used { elapsed, cpu, rate: 20 });
                assert!((1..=20).contains(&next.rate));
            }
        }
    }
}
