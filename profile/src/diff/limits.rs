//! Confidence limits of what a count estimates.
//!
//! They are exact ones for small counts, and never narrower than stated: those of Clopper and Pearson for a part of a known
//! number of samples, those of Garwood for samples of which the number is random too. Counts may be fractions: of samples with
//! different weights, the number of equal ones that say as much.

use std::f64::consts::PI;

/// What a count is drawn from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Drawn {
    /// So many samples, each of which may be in it.
    Of(f64),
    /// Events at random times (Poisson).
    Freely,
}

/// Counts from which on, and missing from all, the limits are those of an approximation.
const LARGE: f64 = 2000.0;
/// Halvings of the range of a limit.
const STEPS: usize = 34;
/// Terms of a continued fraction or series, at most.
const TERMS: usize = 500;

/// The lower and the upper limit of the expected count, each missed with a probability of at most `tail`, whose quantile of the
/// normal distribution is `z`.
pub fn limits(count: f64, drawn: Drawn, tail: f64, z: f64) -> (f64, f64) {
    let count = count.max(0.0);
    match drawn {
        Drawn::Of(all) if all <= 0.0 => (0.0, 0.0),
        Drawn::Of(all) => {
            let count = count.min(all);
            let others = all - count;
            if count > LARGE && others > LARGE {
                return (wilson(count - 0.5, all, -z), wilson(count + 0.5, all, z));
            }
            // The other outcome has the same limits, mirrored.
            if others < count {
                let (low, high) = of_part(others, all, tail);
                return (all - high, all - low);
            }
            of_part(count, all, tail)
        }
        Drawn::Freely if count > LARGE => (cubic(count, -z), cubic(count + 1.0, z)),
        Drawn::Freely => {
            let low = if count > 0.0 {
                solve(0.0, count, |mean| below_gamma(count, mean) < tail)
            } else {
                0.0
            };
            let end = (count + 1.0) + z * z + 2.0 * z * (count + 1.0).sqrt() + 10.0;
            let high = solve(count, end, |mean| 1.0 - below_gamma(count + 1.0, mean) > tail);
            (low, high)
        }
    }
}

/// The limits for a count of at most half of all.
fn of_part(count: f64, all: f64, tail: f64) -> (f64, f64) {
    let others = all - count;
    let low = if count > 0.0 {
        let log_beta = ln_beta(count, others + 1.0);
        solve(0.0, count / all, |p| {
            below_beta(p, count, others + 1.0, log_beta) < tail
        })
    } else {
        0.0
    };
    let high = if others > 0.0 {
        let log_beta = ln_beta(count + 1.0, others);
        solve(count / all, 1.0, |p| {
            1.0 - below_beta(p, count + 1.0, others, log_beta) > tail
        })
    } else {
        1.0
    };
    (low * all, high * all)
}

/// Where a condition that is true up to some point ends.
fn solve(mut low: f64, mut high: f64, is_before: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..STEPS {
        let middle = f64::midpoint(low, high);
        if is_before(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    f64::midpoint(low, high)
}

/// Wilson's limit of a part; `z` has its direction.
fn wilson(count: f64, all: f64, z: f64) -> f64 {
    let share = (count / all).clamp(0.0, 1.0);
    let z2 = z * z / all;
    let half = z * (share * (1.0 - share) / all + z2 / (4.0 * all)).sqrt();
    ((share + z2 / 2.0 + half) / (1.0 + z2)).clamp(0.0, 1.0) * all
}

/// Wilson's and Hilferty's approximation of the limit of a Poisson variable's mean.
fn cubic(count: f64, z: f64) -> f64 {
    count * (1.0 - 1.0 / (9.0 * count) + z / (3.0 * count.sqrt())).max(0.0).powi(3)
}

/// The logarithm of the gamma function of a positive number (Lanczos, with the coefficients for g = 7).
fn ln_gamma(x: f64) -> f64 {
    const COEFFICIENTS: [f64; 9] = [
        0.999_999_999_999_809_9,
        676.520_368_121_885_1,
        -1_259.139_216_722_402_8,
        771.323_428_777_653_1,
        -176.615_029_162_140_6,
        12.507_343_278_686_905,
        -0.138_571_095_265_720_12,
        9.984_369_578_019_572e-6,
        1.505_632_735_149_311_6e-7,
    ];
    if x < 0.5 {
        return (PI / (PI * x).sin()).ln() - ln_gamma(1.0 - x);
    }
    let x = x - 1.0;
    let [first, rest @ ..] = COEFFICIENTS;
    let sum = rest
        .iter()
        .zip(1..)
        .fold(first, |sum, (coefficient, i)| sum + coefficient / (x + f64::from(i)));
    let t = x + 7.5;
    0.5 * (2.0 * PI).ln() + (x + 0.5) * t.ln() - t + sum.ln()
}

fn ln_beta(a: f64, b: f64) -> f64 {
    ln_gamma(a) + ln_gamma(b) - ln_gamma(a + b)
}

/// The probability that a beta-distributed variable is below `x`; `log_beta` is that of [`ln_beta`].
fn below_beta(x: f64, a: f64, b: f64, log_beta: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return if x <= 0.0 { 0.0 } else { 1.0 };
    }
    let front = a * x.ln() + b * (-x).ln_1p() - log_beta;
    if x < (a + 1.0) / (a + b + 2.0) {
        front.exp() * fraction_of_beta(x, a, b) / a
    } else {
        1.0 - front.exp() * fraction_of_beta(1.0 - x, b, a) / b
    }
}

/// The continued fraction of the incomplete beta function, by the method of Lentz.
fn fraction_of_beta(x: f64, a: f64, b: f64) -> f64 {
    let (mut c, mut d) = (1.0, not_zero(1.0 - (a + b) * x / (a + 1.0)).recip());
    let mut value = d;
    for term in 1..TERMS {
        let m = term as f64;
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        let mut factor = 1.0;
        for part in [even, odd] {
            d = not_zero(1.0 + part * d).recip();
            c = not_zero(1.0 + part / c);
            factor = c * d;
            value *= factor;
        }
        if (factor - 1.0).abs() < 1e-12 {
            break;
        }
    }
    value
}

/// The probability that a gamma-distributed variable of shape `a` is below `x`.
fn below_gamma(a: f64, x: f64) -> f64 {
    if x <= 0.0 {
        return 0.0;
    }
    let front = (a * x.ln() - x - ln_gamma(a)).exp();
    if x < a + 1.0 {
        let (mut term, mut sum) = (1.0 / a, 1.0 / a);
        for n in 1..TERMS {
            term *= x / (a + n as f64);
            sum += term;
            if term < sum * 1e-14 {
                break;
            }
        }
        return (front * sum).min(1.0);
    }
    let mut b = x + 1.0 - a;
    let (mut c, mut d) = (1e300, not_zero(b).recip());
    let mut value = d;
    for n in 1..TERMS {
        let part = n as f64 * (a - n as f64);
        b += 2.0;
        d = not_zero(part * d + b).recip();
        c = not_zero(b + part / c);
        value *= c * d;
        if (c * d - 1.0).abs() < 1e-12 {
            break;
        }
    }
    (1.0 - front * value).max(0.0)
}

fn not_zero(x: f64) -> f64 {
    if x.abs() < 1e-300 { 1e-300 } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diff::quantile::{NORMAL, student};

    fn of(count: f64, drawn: Drawn, tail: f64) -> (f64, f64) {
        limits(count, drawn, tail, student(tail, NORMAL))
    }

    /// Against R's `qbeta` and `qgamma`, as printed tables of both kinds of limits have them.
    #[test]
    fn limits_of_the_tables() {
        for (count, drawn, expected) in [
            (0.0, Drawn::Of(10.0), (0.0, 3.0850)),
            (5.0, Drawn::Of(10.0), (1.8709, 8.1291)),
            (10.0, Drawn::Of(10.0), (6.9150, 10.0)),
            (10.0, Drawn::Of(100.0), (4.9005, 17.6223)),
            (0.0, Drawn::Freely, (0.0, 3.6889)),
            (1.0, Drawn::Freely, (0.025_318, 5.5716)),
            (10.0, Drawn::Freely, (4.7954, 18.3904)),
            (100.0, Drawn::Freely, (81.3640, 121.6272)),
        ] {
            let (low, high) = of(count, drawn, 0.025);
            assert!(
                (low - expected.0).abs() < 2e-3 && (high - expected.1).abs() < 2e-3,
                "{count} {drawn:?}: {low} to {high}"
            );
        }
    }

    #[test]
    fn large_counts_continue_small_ones() {
        for tail in [0.005, 1e-5] {
            for drawn in [Drawn::Freely, Drawn::Of(4010.0), Drawn::Of(1e6)] {
                let near = [LARGE, LARGE + 1.0].map(|count| of(count, drawn, tail));
                let step = |side: fn(&(f64, f64)) -> f64| side(&near[1]) - side(&near[0]);
                for step in [step(|of| of.0), step(|of| of.1)] {
                    assert!((-1.0..5.0).contains(&step), "{drawn:?} {tail}: {near:?}");
                }
            }
        }
    }

    #[test]
    fn limits_are_within_what_is_possible() {
        for all in [0.0, 0.3, 1.0, 7.0, 1e4, 1e9] {
            for part in [0.0, 0.5, 1.0, 3.7, all / 2.0, all - 1.0, all, all + 1.0] {
                for tail in [0.4, 0.005, 1e-9] {
                    let (low, high) = of(part, Drawn::Of(all), tail);
                    assert!(
                        0.0 <= low && low <= high && high <= all,
                        "{part} of {all}: {low} {high}"
                    );
                    let (low, high) = of(part, Drawn::Freely, tail);
                    let part = part.max(0.0);
                    assert!(0.0 <= low && low <= part && part <= high, "{part}: {low} {high}");
                    assert!(high.is_finite());
                }
            }
        }
    }
}
