//! Chance, for times between ticks: what ticks in step with a program sees some of it only.

/// xorshift64 (Marsaglia, 2003)
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// Numbers that follow from `seed`.
    pub fn new(seed: u64) -> Random {
        Random(seed | 1) // zero would stay zero
    }

    /// A number from 0 on, below `end` (0 counts as 1).
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end.max(1)
    }

    /// Time from tick to tick: between three quarters of a period and five.
    pub fn between(&mut self, period: u64) -> u64 {
        period * 3 / 4 + self.below(period) / 2
    }

    /// Time to the first tick, as if the timer had always been running: then threads get their share of ticks however
    /// short they live. (The residual time of a renewal process with the times of [`Random::between`].)
    pub fn first(&mut self, period: u64) -> u64 {
        if self.below(4) > 0 {
            self.below(period) * 3 / 4
        } else {
            period * 3 / 4 + self.below(period).min(self.below(period)) / 2
        }
    }
}
