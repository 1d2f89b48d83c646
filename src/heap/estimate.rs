//! A quantity of which only a part was looked at.
//!
//! What is counted comes in runs: blocks of a type were often allocated one after the other, and lie in few places. So
//! it is not
//! the block that is sampled but a *unit* that has many of them, a pool or a window of memory, and the interval follows
//! from how
//! much units differ. It is that of Fay and Feuer (Confidence intervals for directly standardized rates, 1997), which
//! was made
//! for sums of few events with unequal weights: a gamma distribution with the variance of the estimate, whose upper
//! limit allows
//! for one more unit, here of twice the weight of the heaviest that was seen: tails are long. What was seen is certain:
//! of the rest only is anything estimated.

use std::iter::Sum;
use std::ops::Add;

use crate::profile::diff::{Drawn, limits};

/// The probability that a limit is missed: intervals hold in 99 of 100 cases.
const TAIL: f64 = 0.005;
/// Its quantile of the normal distribution.
const TAIL_QUANTILE: f64 = 2.575_829;
/// Sums up to here, in bytes or objects, are counted exactly in floating point.
const MAX_EXACT: f64 = (1_u64 << 53) as f64;

/// A number of bytes or objects, with an interval of 99 % confidence. Exact if all three are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    pub value: u64,
    pub low: u64,
    pub high: u64,
}

impl Estimate {
    /// What is known to be so.
    pub fn exact(value: u64) -> Estimate {
        Estimate {
            value,
            low: value,
            high: value,
        }
    }

    /// Whether all of it was looked at.
    pub fn is_exact(&self) -> bool {
        self.low == self.high
    }

    /// What is left of an exact total.
    #[must_use]
    pub fn rest_of(self, total: u64) -> Estimate {
        Estimate {
            value: total.saturating_sub(self.value),
            low: total.saturating_sub(self.high),
            high: total.saturating_sub(self.low),
        }
    }
}

/// The interval of a sum allows for both parts being off in the same direction.
impl Add for Estimate {
    type Output = Estimate;

    fn add(self, other: Estimate) -> Estimate {
        Estimate {
            value: self.value.saturating_add(other.value),
            low: self.low.saturating_add(other.low),
            high: self.high.saturating_add(other.high),
        }
    }
}

impl Sum for Estimate {
    fn sum<I: Iterator<Item = Estimate>>(parts: I) -> Estimate {
        parts.fold(Estimate::default(), Add::add)
    }
}

/// What the sampled units have of one quantity.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    sum: f64,
    squares: f64,
    largest: f64,
}

impl Tally {
    /// Adds what one unit has of it. Units that have none need not be added.
    pub fn add(&mut self, amount: f64) {
        self.sum += amount;
        self.squares += amount * amount;
        self.largest = self.largest.max(amount);
    }

    /// What was seen of it.
    pub fn seen(&self) -> u64 {
        self.sum.clamp(0.0, MAX_EXACT) as u64
    }

    /// What all units have, if `sampled` of `all` were drawn at random.
    pub fn of_units(&self, sampled: u64, all: u64) -> Estimate {
        let seen = self.seen();
        if sampled >= all || sampled == 0 {
            return Estimate::exact(seen);
        }
        let (n, rest) = (sampled as f64, (all - sampled) as f64);
        // Of the units that were not looked at.
        let scale = rest / n;
        let mean = self.sum / n;
        let spread = (self.squares / n - mean * mean).max(0.0) * n / (n - 1.0).max(1.0);
        let value = self.sum * scale;
        // That of the sum over the others, and of the estimate of their mean.
        let variance = rest * spread * (1.0 + scale);
        let heaviest = 2.0 * self.largest * scale.max(1.0);
        let (low, high) = weighted_limits(value, variance, heaviest);
        // Of few units that are left, there may be one less.
        let low = low - self.largest;
        let whole = |others: f64| seen.saturating_add(others.clamp(0.0, MAX_EXACT).round() as u64);
        Estimate {
            value: whole(value),
            low: whole(low),
            high: whole(high),
        }
    }
}

/// The limits of a sum of weights whose variance is known, with one more weight above: `heaviest`.
fn weighted_limits(value: f64, variance: f64, heaviest: f64) -> (f64, f64) {
    if variance <= 0.0 || value <= 0.0 {
        return (value, value);
    }
    let of_gamma = |count: f64| limits(count.max(0.0), Drawn::Freely, TAIL, TAIL_QUANTILE);
    let low = of_gamma(value * value / variance).0 * variance / value;
    let (wider, weight) = (value + heaviest, variance + heaviest * heaviest);
    // The upper limit of a count is that of a gamma distribution whose shape is one larger.
    let high = of_gamma(wider * wider / weight - 1.0).1 * weight / wider;
    (low.min(value), high.max(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::common::rng::Rng;

    #[test]
    fn what_was_read_in_full_is_exact() {
        let mut tally = Tally::default();
        [3.0, 0.0, 4.0].into_iter().for_each(|amount| tally.add(amount));
        assert_eq!(tally.of_units(3, 3), Estimate::exact(7));
        assert_eq!(Tally::default().of_units(3, 1000), Estimate::exact(0));
        assert_eq!(tally.of_units(0, 0), Estimate::exact(7));
        let part = tally.of_units(3, 30);
        assert!(part.low >= 7 && part.value == 70 && part.high > 100, "{part:?}");
    }

    #[test]
    fn sums_and_rests_keep_their_order() {
        let part = Estimate {
            value: 5,
            low: 3,
            high: 9,
        };
        let expected = Estimate {
            value: 10,
            low: 6,
            high: 18,
        };
        assert_eq!([part, part].into_iter().sum::<Estimate>(), expected);
        let rest = Estimate {
            value: 2,
            low: 0,
            high: 4,
        };
        assert_eq!(part.rest_of(7), rest);
        assert!(!part.is_exact() && Estimate::exact(1).is_exact());
    }

    /// Populations of units, each drawn from often: how many intervals hold the truth. In the last one a few units have
    /// much of it,
    /// and some samples of one in twenty have none of these. Of what no unit in a sample has, nothing can be said.
    #[test]
    fn intervals_hold_as_often_as_they_say() {
        const UNITS: usize = 1000;
        const RUNS: u32 = 200;
        let mut rng = Rng::new(7);
        let runs_of = |every: usize, amount: f64| {
            move |unit: usize, _: &mut Rng| if unit.is_multiple_of(every) { amount } else { 0.0 }
        };
        type Population = Box<dyn Fn(usize, &mut Rng) -> f64>;
        let populations: [(&str, Population, u32); 4] = [
            ("in all", Box::new(|_, rng| 100.0 + rng.below(50) as f64), 98),
            ("in few", Box::new(runs_of(40, 100.0)), 98),
            ("in very few", Box::new(runs_of(200, 100.0)), 96),
            ("uneven", Box::new(|unit, _| 1e4 / (1.0 + (unit % 500) as f64)), 93),
        ];
        for (name, population, least) in populations {
            let amounts: Vec<f64> = (0..UNITS).map(|unit| population(unit, &mut rng)).collect();
            let truth: f64 = amounts.iter().sum();
            for share in [0.05, 0.3, 0.9] {
                let mut held = 0;
                for _ in 0..RUNS {
                    let mut order: Vec<usize> = (0..UNITS).collect();
                    let sampled = (UNITS as f64 * share) as usize;
                    let mut tally = Tally::default();
                    for at in 0..sampled {
                        let other = at + rng.below((UNITS - at) as u64) as usize;
                        order.swap(at, other);
                        tally.add(amounts[order[at]]);
                    }
                    let found = tally.of_units(sampled as u64, UNITS as u64);
                    let unseen = found.value == 0;
                    held += u32::from(unseen || (found.low..=found.high).contains(&(truth.round() as u64)));
                }
                assert!(held * 100 >= least * RUNS, "{name}, {share}: {held} of {RUNS}");
            }
        }
    }
}
