//! Comparisons while runs are made: when to look at them, and how sure to be at each look.
//!
//! Who looks again and again, and stops at the first difference, finds one in equal programs sooner or later. So each look
//! has a part of the permitted error (alpha spending: K. K. G. Lan and D. L. DeMets, "Discrete sequential boundaries for
//! clinical trials", Biometrika 70, 1983). After a part t of the time, their function that resembles Pocock's boundary has
//! spent ln(1 + (e - 1) t) of it. Neither the number of looks nor their times need to be known before; they must not follow
//! from what the looks have shown.
//!
//! The error of a look is what was spent since the last one. That the sum of all is a bound (Bonferroni) needs no
//! assumption on how the looks depend on each other, nor on the distribution of a look's statistic: with few runs it is not
//! the normal one.

use std::f64::consts::E;

/// A look needs so many times the runs of the last one, for it costs a part of the error and shows little new.
const MORE_RUNS: f64 = 4.0 / 3.0;
/// Part of the time between two looks, at least.
const MORE_TIME: f64 = 0.02;

/// The looks at the runs of a comparison.
#[derive(Clone, Debug)]
pub struct Looks {
    /// Of all looks together.
    error: f64,
    /// Runs of each side at the next look, at least.
    next: usize,
    /// Part of the time at the last look.
    last: f64,
    looks: u32,
}

impl Looks {
    /// `confidence` that no interval misses in any look, between 0 and 1; the first look is at `first` runs of each side.
    pub fn new(confidence: f64, first: usize) -> Looks {
        Looks {
            error: 1.0 - confidence,
            next: first,
            last: 0.0,
            looks: 0,
        }
    }

    /// The confidence that no interval misses in a look now, between 0 and 1; `None`: it is too early for one. There are
    /// `runs` of each side, which took the part `time` of what they may take. The last look, at 1, is always due.
    pub fn due(&mut self, runs: usize, time: f64) -> Option<f64> {
        let time = time.clamp(0.0, 1.0);
        if time < 1.0 && (runs < self.next || time < self.last + MORE_TIME) {
            return None;
        }
        let error = self.error * (spent(time) - spent(self.last));
        self.last = time;
        self.next = (runs as f64 * MORE_RUNS).ceil() as usize;
        self.looks += 1;
        Some(1.0 - error)
    }

    /// How many there were.
    pub fn count(&self) -> u32 {
        self.looks
    }
}

/// The part of the error that was spent after a part of the time.
fn spent(time: f64) -> f64 {
    (1.0 + (E - 1.0) * time).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_share_the_error() {
        for length in [0.5, 3.0, 7.0, 40.0] {
            let mut looks = Looks::new(0.99, 4);
            let (mut error, mut at) = (0.0, Vec::new());
            for runs in 1.. {
                let time = f64::from(runs) * length / 180.0;
                if let Some(confidence) = looks.due(runs as usize, time) {
                    error += 1.0 - confidence;
                    at.push(runs);
                }
                if time >= 1.0 {
                    break;
                }
            }
            assert!((error - 0.01).abs() < 1e-9, "{length}: {error}");
            assert!(at.len() > 1 && at.len() < 20 && at[0] >= 4, "{length}: {at:?}");
            assert_eq!(looks.count() as usize, at.len());
        }
    }

    #[test]
    fn a_single_look_has_all_of_it() {
        let mut looks = Looks::new(0.99, 8);
        assert_eq!(looks.due(7, 0.9), None);
        assert!((looks.due(8, 1.0).unwrap() - 0.99).abs() < 1e-12);
    }
}
