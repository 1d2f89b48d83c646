//! Quantiles of Student's t distribution.

use std::f64::consts::FRAC_PI_2;

/// Degrees of freedom from which the distribution is the normal one, for our purposes.
pub const NORMAL: u32 = 4000;

/// The value that a t-distributed variable exceeds with probability `upper` (above 0, at most a half).
pub fn student(upper: f64, freedom: u32) -> f64 {
    let freedom = freedom.clamp(1, NORMAL);
    // With t = sqrt(n) tan(u) the density becomes cos(u)^(n-1): a smooth function on a finite range.
    let density = |u: f64| u.cos().powi(freedom as i32 - 1);
    let half = half_integral(freedom - 1);
    // It falls off within some 1 / sqrt(n); beyond twelve of these nothing is left in double precision.
    let end = (12.0 / f64::from(freedom).sqrt()).min(FRAC_PI_2);
    let above = |from: f64| simpson(&density, from, end) / (2.0 * half);
    let (mut low, mut high) = (0.0, end);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if above(middle) > upper {
            low = middle
        } else {
            high = middle
        }
    }
    f64::from(freedom).sqrt() * high.tan()
}

/// Integral of `cos(u)^n` from 0 to a right angle (Wallis).
fn half_integral(n: u32) -> f64 {
    let (first, start) = if n.is_multiple_of(2) { (2, FRAC_PI_2) } else { (3, 1.0) };
    (first..=n)
        .step_by(2)
        .fold(start, |product, k| product * (f64::from(k) - 1.0) / f64::from(k))
}

fn simpson(f: &dyn Fn(f64) -> f64, from: f64, to: f64) -> f64 {
    const STEPS: u32 = 400;
    let h = (to - from) / f64::from(STEPS);
    let weight = |i| match i {
        0 | STEPS => 1.0,
        i if i % 2 == 1 => 4.0,
        _ => 2.0,
    };
    (0..=STEPS).map(|i| weight(i) * f(from + h * f64::from(i))).sum::<f64>() * h / 3.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against the usual printed tables, and R's `qt` and `qnorm` for the far tail.
    #[test]
    fn quantiles_of_the_tables() {
        for (upper, freedom, expected) in [
            (0.25, 1, 1.0),
            (0.025, 1, 12.7062),
            (0.025, 4, 2.77645),
            (0.025, 10, 2.228139),
            (0.005, 30, 2.749996),
            (0.0005, 63, 3.4515),
            (0.025, NORMAL, 1.95996),
            (0.0001, NORMAL, 3.71902),
            (0.000001, NORMAL, 4.75342),
        ] {
            let found = student(upper, freedom);
            assert!(
                (found / expected - 1.0).abs() < 0.002,
                "{upper} {freedom}: {found}, not {expected}"
            );
        }
        assert!(student(0.5, 7).abs() < 1e-6);
    }
}
