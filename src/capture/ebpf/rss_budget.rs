//! The budget of samples of resident memory: their interval is doubled while taking stacks uses more than a part of the
//! target's CPU time, and halved when it uses much less. Each sample has the interval that it was chosen at, so the
//! sums stay right on average.
//!
//! Counting is not in the budget: it is done at each change, so that the account is exact.

use super::abi::MAX_DOUBLED;
use crate::profile::values::Unit;

/// CPU time of the target between two decisions, ns.
const LEAST_CPU: u64 = 20_000_000;
/// CPU time of the target after which what was before counts 1/e, ns: a single stack may take long where the machine is busy.
const MEMORY: f64 = 5e8;
/// What counts as used by the target when the recording begins, ns.
const FIRST_CPU: f64 = 1e8;
/// How often the interval is doubled by one decision, at most.
const MAX_STEP: u32 = 4;
/// The interval is halved again when the stacks use less than this part of the budget.
const FEW: f64 = 0.25;
/// Longest interval, bytes.
const MAX_INTERVAL: u64 = 1 << 40;

/// Times that have been used so far, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BudgetTimes {
    /// By taking stacks.
    pub stacks: u64,
    /// By the target, on the CPU.
    pub target: u64,
}

/// How often the interval is doubled, and what that has left out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Budget {
    interval: u64,
    /// The part of the target's CPU time that stacks may use.
    max_overhead: f64,
    /// How often the interval is doubled now, and was at most.
    pub doubled: u32,
    most_doubled: u32,
    last: BudgetTimes,
    /// Times of late, ns; of stacks, what they would have been at the interval in force.
    recent_stacks: f64,
    recent_target: f64,
    /// Samples that were taken, and those that would have been at the first interval.
    taken: u64,
    due: u64,
}

impl Budget {
    /// `interval` in bytes.
    pub fn new(interval: u64, max_overhead: f64) -> Budget {
        Budget {
            interval,
            max_overhead,
            recent_target: FIRST_CPU,
            ..Budget::default()
        }
    }

    /// Decides how often the interval is to be doubled from now on; true if that has changed.
    pub fn adapt(&mut self, used: BudgetTimes) -> bool {
        let target = used.target.saturating_sub(self.last.target);
        if target < LEAST_CPU {
            return false;
        }
        let stacks = used.stacks.saturating_sub(self.last.stacks);
        self.last = used;
        let kept = (-(target as f64) / MEMORY).exp();
        self.recent_stacks = self.recent_stacks * kept + stacks as f64;
        self.recent_target = self.recent_target * kept + target as f64;
        let excess = self.recent_stacks / (self.recent_target * self.max_overhead);
        let before = self.doubled;
        if excess > 1.0 {
            let most = (MAX_INTERVAL / self.interval.max(1)).checked_ilog2().unwrap_or(0);
            let step = (excess.log2().ceil() as u32).min(MAX_STEP);
            self.doubled = (self.doubled + step).min(MAX_DOUBLED).min(most);
        } else if excess < FEW && used.stacks as f64 <= used.target as f64 * self.max_overhead {
            self.doubled = self.doubled.saturating_sub(1);
        }
        self.recent_stacks *= (f64::from(before) - f64::from(self.doubled)).exp2();
        self.most_doubled = self.most_doubled.max(self.doubled);
        self.doubled != before
    }

    /// Takes note of a sample that was chosen when the interval was doubled so many times.
    pub fn count(&mut self, doubled: u32) {
        self.taken += 1;
        self.due += 1 << doubled.min(MAX_DOUBLED);
    }

    /// Which share of the samples was taken, as text; `None`: all were.
    pub fn remark(&self) -> Option<String> {
        (self.due > self.taken).then(|| {
            format!(
                "{:.1} % of the samples were taken, the others would have used more than {} % of the CPU time \
                 (--max-overhead): one for {} to {} on average",
                100.0 * self.taken as f64 / self.due as f64,
                (1e5 * self.max_overhead).round() / 1e3, // without what binary fractions add
                Unit::Bytes.show(self.interval),
                Unit::Bytes.show(self.interval << self.most_doubled),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_follows_the_use() {
        const MS: u64 = 1_000_000;
        let mut budget = Budget::new(512 << 10, 0.01);
        let mut used = BudgetTimes::default();
        // By target's time and stacks' time, ms: how often the interval is doubled afterwards.
        for (target, stacks, expected) in [
            (10, 5, 0),  // too short
            (90, 0, 2),  // 5 ms of 182: 2.7 times too much
            (100, 1, 2), // less than is permitted
            (100, 0, 2), // little, but in all it is too much still
            (500, 0, 1),
            (100, 0, 0),
            (100, 50, 4),
            (20, 20_000, 8),
            (20, 20_000, 12),
            (20, 20_000, 16), // not without end
            (20, 20_000, 16),
        ] {
            used.target += target * MS;
            used.stacks += stacks * MS;
            budget.adapt(used);
            assert_eq!(budget.doubled, expected, "{target} {stacks}");
        }
        let mut wide = Budget::new(1 << 39, 0.01);
        wide.adapt(used);
        assert_eq!(wide.doubled, 1);
        let mut idle = Budget::default();
        assert!(!idle.adapt(BudgetTimes::default()));
    }

    #[test]
    fn a_remark_says_which_share_was_taken() {
        let mut budget = Budget::new(512 << 10, 0.01);
        (0..30).for_each(|_| budget.count(0));
        assert_eq!(budget.remark(), None);
        budget.doubled = 2;
        budget.most_doubled = 2;
        (0..10).for_each(|_| budget.count(2));
        assert_eq!(
            budget.remark().as_deref(),
            Some(
                "57.1 % of the samples were taken, the others would have used more than 1 % of the CPU time \
                 (--max-overhead): one for 512.0 KiB to 2.00 MiB on average"
            )
        );
    }
}
