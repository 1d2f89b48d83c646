//! Random numbers for sampling periods: a sampler in step with the program sees only part of it.

/// xorshift64 (Marsaglia, 2003)
#[derive(Debug)]
pub struct Rng(u64);

impl Rng {
    /// Numbers determined by `seed`.
    pub fn new(seed: u64) -> Rng {
        Rng(seed | 1) // zero would stay zero
    }

    /// A number from 0 to below `end` (0 counts as 1).
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end.max(1)
    }

    /// Interval between two ticks: between three and five quarters of a period.
    pub fn between(&mut self, period: u64) -> u64 {
        period * 3 / 4 + self.below(period) / 2
    }

    /// Time to the first tick, as if the timer had always been running: so that even short-lived threads are sampled
    /// fairly. (The residual time of a renewal process with the intervals of [`Rng::between`].)
    pub fn first(&mut self, period: u64) -> u64 {
        if self.below(4) > 0 {
            self.below(period) * 3 / 4
        } else {
            period * 3 / 4 + self.below(period).min(self.below(period)) / 2
        }
    }
}
