//! How many samples a second a recording may take, so that nativeprof itself keeps to its share of a CPU.
//!
//! Each segment tells what it has used at its rate. Where that is more or less than its part of the budget, the next segment has
//! a rate that is lower or higher by as much. What costs the same at any rate makes the next step too small, and more steps are
//! taken: a model of the parts would be fitted to noise, and one wrong step up costs ten minutes of low rates. What the last ten
//! minutes have used too much is saved by the next ones; what they have used too little is not made up for, since rates would
//! rise and fall with what leaves the ten minutes.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

/// Time over which the budget is kept, seconds.
const WINDOW: f64 = 600.0;
/// Part of the budget that is aimed at: the rest is for what the next segment may cost more.
const AIM: f64 = 0.97;
/// Segments in which names of all that runs are read for the first time. They are not counted: at no rate would they keep to a
/// small budget, and they say nothing of what comes after them.
pub const START_UP: u32 = 2;
/// In so many segments, what was used too much is saved ...
const SAVING: f64 = 5.0;
/// ... but each of them may use at least this part of its own.
const MIN_PART: f64 = 0.2;
/// The largest step up.
const MAX_RISE: f64 = 1.25;
/// After so many segments that cost too much at the lowest rate, the budget cannot be kept.
const MAX_ABOVE: u32 = 3;
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
    /// Segments of the start-up so far.
    started: u32,
    /// Those of the last ten minutes after it.
    segments: VecDeque<Used>,
    /// The rate that is wanted, with the part that a whole number does not have; `None` before the first one.
    wanted: Option<f64>,
    /// Segments in a row that cost too much at the lowest rate.
    above: u32,
}

impl Budget {
    /// A budget of `limit` CPU seconds per second, kept by rates in this range.
    pub fn new(limit: f64, rates: RangeInclusive<u64>) -> Budget {
        Budget {
            limit,
            rates,
            started: 0,
            segments: VecDeque::new(),
            wanted: None,
            above: 0,
        }
    }

    /// The rate after a segment that has ended.
    pub fn next_rate(&mut self, used: Used) -> NextRate {
        if self.started < START_UP {
            self.started += 1;
            return NextRate {
                rate: used.rate,
                is_kept: true,
            };
        }
        self.segments.push_back(used);
        let mut elapsed: f64 = self.segments.iter().map(|segment| segment.elapsed).sum();
        // The next one is as long as the last, and belongs to the ten minutes.
        while self.segments.len() > MAX_SEGMENTS || elapsed + used.elapsed > WINDOW * 1.001 && self.segments.len() > 1 {
            elapsed -= self.segments.pop_front().map_or(0.0, |segment| segment.elapsed);
        }
        let cpu: f64 = self.segments.iter().map(|segment| segment.cpu).sum();
        let limit = self.limit * AIM;
        let too_much = (cpu - limit * elapsed).max(0.0);
        let allowed = (limit - too_much / (SAVING * used.elapsed.max(1e-3))).max(MIN_PART * limit);
        let share = used.cpu / used.elapsed.max(1e-3);
        let factor = (allowed / share.max(1e-9)).min(MAX_RISE);
        // The whole number below the rate that was wanted is what was paid for.
        let taken = used.rate as f64;
        let from = match self.wanted {
            Some(wanted) if factor > 1.0 => wanted.clamp(taken, taken + 1.0),
            _ => taken,
        };
        let (least, most) = (*self.rates.start(), *self.rates.end());
        let wanted = (from * factor).clamp(least as f64, most as f64);
        self.wanted = Some(wanted);
        self.above = if used.rate == least && share > self.limit {
            self.above + 1
        } else {
            0
        };
        NextRate {
            rate: (wanted as u64).clamp(least, most),
            is_kept: self.above < MAX_ABOVE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs segments of a minute that cost `cost(minute, rate)` CPU seconds per second, half of it when the next one is recorded.
    /// Returns the rates, and the largest share of any ten minutes in a row after the start-up, which costs ten times as much.
    fn run(limit: f64, minutes: usize, cost: impl Fn(usize, u64) -> f64) -> (Vec<u64>, f64, NextRate) {
        let mut budget = Budget::new(limit, 1..=20);
        let (mut rate, mut rates, mut used) = (20, Vec::new(), Vec::new());
        let mut last = NextRate { rate, is_kept: true };
        let mut writing = 0.0;
        for minute in 0..minutes {
            let half = cost(minute, rate) * 30.0;
            let cpu = half + writing + if minute < START_UP as usize { 20.0 * half } else { 0.0 };
            writing = half;
            rates.push(rate);
            used.push(cpu);
            last = budget.next_rate(Used {
                elapsed: 60.0,
                cpu,
                rate,
            });
            rate = last.rate;
        }
        let largest = used[START_UP as usize..]
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
            // It does not rise and fall by itself: by 1 between two whole numbers, and by what segments differ.
            let (low, high) = rates[20..]
                .iter()
                .fold((20, 1), |(low, high), rate| (low.min(*rate), high.max(*rate)));
            let swing = 1.0 + 2.0 * spread * best;
            assert!((high - low) as f64 <= swing, "{low} to {high}: {rates:?}");
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
