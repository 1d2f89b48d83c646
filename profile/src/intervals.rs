//! How exact sampled amounts are: intervals of functions' shares.
//!
//! # Times
//!
//! The interval is that of a proportion (Wilson), with as many samples as independent ones would give as much
//! information. Samples of a program that does one thing for a while give less: the profile is divided into blocks of
//! equal length, and where the share varies more between them than that of independent samples would, by this factor.
//!
//! # Allocations
//!
//! A block is sampled with a probability `p`, whatever happens to others, and stands for `1 / p` blocks: the variance of an
//! estimated sum is that of its samples, `amount^2 (1 - p)` each (Horvitz, Thompson 1952). The interval is that of a number of
//! rare events (Poisson) which has the same ratio of variance and mean, since a sum may have few samples, or none.

use super::diff::quantile;
use super::model::Profile;
use super::stats::Stats;
use super::values::{Unit, ValueType};

/// Probability with which an interval has the true share in it.
pub const CONFIDENCE: f64 = 0.95;
/// Blocks of time: enough for a variance.
const MAX_BLOCKS: u64 = 64;
const MIN_BLOCKS: u64 = 4;
/// Samples in a block, at least, as long as that leaves some blocks.
const PER_BLOCK: u64 = 50;

/// By function, as [`Stats::new`] numbers them, the interval of its share of self samples: from 0 to 1. A profile
/// without a timeline has the intervals of independent samples.
pub fn self_shares(profile: &Profile) -> Vec<(f64, f64)> {
    let mut stats = Stats::new(profile);
    let all = stats.samples();
    let counts: Vec<u64> = stats.functions().iter().map(|counts| counts.self_count).collect();
    let blocks = (all / PER_BLOCK).clamp(MIN_BLOCKS, MAX_BLOCKS) as usize;
    let error = (1.0 - CONFIDENCE) / 2.0;
    let (freedom, is_timed) = if profile.is_timed() && all > 0 {
        (blocks as u32 - 1, true)
    } else {
        (quantile::NORMAL, false)
    };
    // Sums over the blocks, by function: squares of what its samples in a block differ from its share of them.
    let mut squares = vec![0.0; counts.len()];
    if is_timed {
        for self_counts in self_by_block(profile, blocks) {
            stats.select(self_counts);
            let in_block = stats.samples() as f64;
            for ((sum, here), count) in squares.iter_mut().zip(stats.functions()).zip(&counts) {
                let expected = *count as f64 / all as f64 * in_block;
                *sum += (here.self_count as f64 - expected).powi(2);
            }
        }
    }
    let z = quantile::student(error, freedom);
    let interval = |(count, squares): (&u64, f64)| {
        let (count, all) = (*count as f64, all as f64);
        let share = if all > 0.0 { count / all } else { 0.0 };
        let variance = squares * blocks as f64 / (blocks as f64 - 1.0);
        let of_independent = all * share * (1.0 - share);
        let factor = if of_independent > 0.0 {
            (variance / of_independent).max(1.0)
        } else {
            1.0
        };
        wilson(share, all / factor, z)
    };
    counts.iter().zip(squares).map(interval).collect()
}

/// How exact the amounts of sampled allocations are.
pub struct BlockIntervals {
    /// By function, as [`Stats::new`] numbers them, the interval of its self amount as a share of all: from 0 to 1.
    pub shares: Vec<(f64, f64)>,
    /// The interval of the sum of all.
    pub of_sum: (f64, f64),
}

/// The intervals of the profile's counts, which are amounts of sampled blocks. `None`: they are something else.
pub fn of_blocks(profile: &Profile) -> Option<BlockIntervals> {
    const OF_BLOCKS: [ValueType; 6] = [
        ValueType::ALLOC_BYTES,
        ValueType::ALLOCS,
        ValueType::LIVE_BYTES,
        ValueType::LIVE_ALLOCS,
        ValueType::PEAK_BYTES,
        ValueType::LEAKED_BYTES,
    ];
    if !OF_BLOCKS.contains(profile.count_type()) || !profile.is_timed() {
        return None;
    }
    let blocks = profile.find_value(&ValueType::ALLOCS.name)?;
    let allocated = match profile.count_type().unit {
        Unit::Bytes => profile.find_value(&ValueType::ALLOC_BYTES.name)?,
        _ => blocks,
    };
    let stats = Stats::new(profile);
    let counts: Vec<u64> = stats.functions().iter().map(|counts| counts.self_count).collect();
    let (mut variances, mut of_all) = (vec![0.0; counts.len()], 0.0);
    let (mut of_allocated, mut sum_of_allocated) = (0.0, 0.0);
    for (at, sample) in profile.timeline.iter().enumerate() {
        let variance_of = |value: usize| {
            let amount = profile.sample_amount(value, at) as f64;
            amount * amount * (1.0 - 1.0 / profile.sample_amount(blocks, at).max(1) as f64)
        };
        of_allocated += variance_of(allocated);
        sum_of_allocated += profile.sample_amount(allocated, at) as f64;
        let variance = variance_of(0);
        of_all += variance;
        let function = stats.function(sample.node);
        if let Some(sum) = function.and_then(|function| variances.get_mut(function as usize)) {
            *sum += variance;
        }
    }
    let z = quantile::student((1.0 - CONFIDENCE) / 2.0, quantile::NORMAL);
    let all = stats.samples() as f64;
    // What a sample stands for, where there is none.
    let of_one = of_allocated / f64::max(sum_of_allocated, 1.0);
    let interval = |(count, variance): (&u64, f64)| {
        let (low, high) = of_sampled(*count as f64, variance, of_one, z);
        ((low / all.max(1.0)).min(1.0), (high / all.max(1.0)).min(1.0))
    };
    Some(BlockIntervals {
        shares: counts.iter().zip(variances).map(interval).collect(),
        of_sum: of_sampled(all, of_all, of_one, z),
    })
}

/// The interval of a sum of samples with this variance. `of_one`: what a sample stands for, if there is none.
fn of_sampled(sum: f64, variance: f64, of_one: f64, z: f64) -> (f64, f64) {
    let each = match (sum > 0.0, variance > 0.0) {
        (false, _) => of_one,
        (true, true) => variance / sum,
        // All of it was sampled.
        (true, false) => return (sum, sum),
    };
    let (low, high) = poisson(if each > 0.0 { sum / each } else { 0.0 }, z);
    (low * each, high * each)
}

/// The interval of the mean of a number of rare events, of which so many have happened (Wilson, Hilferty 1931).
fn poisson(events: f64, z: f64) -> (f64, f64) {
    let root = |events: f64, z: f64| 1.0 - 1.0 / (9.0 * events) + z / (3.0 * events.sqrt());
    let low = if events > 0.0 {
        events * root(events, -z).max(0.0).powi(3)
    } else {
        0.0
    };
    (low, (events + 1.0) * root(events + 1.0, z).powi(3))
}

/// Samples that ended in each node, for each block of time.
fn self_by_block(profile: &Profile, blocks: usize) -> impl Iterator<Item = Vec<u64>> {
    let times = || profile.timeline.iter().map(|sample| sample.time);
    let (first, last) = (times().min().unwrap_or(0), times().max().unwrap_or(0));
    let span = u128::from(last - first) + 1;
    let block = move |time: u64| (u128::from(time - first) * blocks as u128 / span) as usize;
    let mut by_block: Vec<Vec<(u32, u64)>> = vec![Vec::new(); blocks];
    for (at, sample) in profile.timeline.iter().enumerate() {
        by_block[block(sample.time)].push((sample.node, profile.sample_amount(0, at)));
    }
    let nodes = profile.nodes.len();
    by_block.into_iter().map(move |samples| {
        let mut self_counts = vec![0u64; nodes];
        for (node, amount) in samples {
            if let Some(count) = self_counts.get_mut(node as usize) {
                *count = count.saturating_add(amount);
            }
        }
        self_counts
    })
}

/// The interval of a share that was found among so many independent samples.
fn wilson(share: f64, samples: f64, z: f64) -> (f64, f64) {
    if samples <= 0.0 {
        return (0.0, 1.0);
    }
    let z2 = z * z / samples;
    let middle = (share + z2 / 2.0) / (1.0 + z2);
    let half = z / (1.0 + z2) * (share * (1.0 - share) / samples + z2 / (4.0 * samples)).sqrt();
    ((middle - half).clamp(0.0, share), (middle + half).clamp(share, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::Builder;
    use crate::model::{Frame, Meta};
    use crate::values::ValueType;

    /// A program of two functions, sampled so often, that stays in one for a time of a mean length.
    fn profile(samples: u64, stay: u64, random: &mut u64) -> Profile {
        let mut builder = Builder::new(&[ValueType::SAMPLES]);
        let frames = ["f", "g"].map(|name| builder.frame(Frame::python(name, "", "a.py", 1)));
        let mut at = 0;
        for time in 0..samples {
            let mut below = |end: u64| {
                *random ^= *random << 13;
                *random ^= *random >> 7;
                *random ^= *random << 17;
                *random % end
            };
            if below(stay) == 0 {
                at = usize::from(below(10) < 3);
            }
            builder.sample(time, (1, 1), &[(frames[at], 1)], &[1]);
        }
        builder.finish(Meta::default())
    }

    #[test]
    fn intervals_have_the_true_share_as_often_as_they_state() {
        let mut random = 99;
        for stay in [1, 20] {
            let mut hits = 0;
            for _ in 0..400 {
                let profile = profile(4000, stay, &mut random);
                let of_g = Stats::new(&profile).functions().len() - 1;
                let (low, high) = self_shares(&profile)[of_g];
                hits += u32::from((low..=high).contains(&0.3));
            }
            // 380 are expected; the standard deviation is 4.4.
            assert!(hits >= 358, "{hits} of 400 with a mean stay of {stay}");
        }
    }

    #[test]
    fn intervals_of_allocations_have_the_truth_as_often_as_they_state() {
        // Blocks of 4,000 and 40,000 bytes, of which one in ten and 65 % are sampled.
        const KINDS: [(u64, f64); 2] = [(4000, 0.1), (40_000, 0.65)];
        const BLOCKS: u64 = 500;
        let mut random = 7u64;
        let (mut hits, mut sums) = (0, 0);
        for _ in 0..400 {
            let mut builder = Builder::new(&[ValueType::ALLOC_BYTES, ValueType::ALLOCS]);
            let frames = ["f", "g"].map(|name| builder.frame(Frame::python(name, "", "a.py", 1)));
            for time in 0..BLOCKS {
                for (frame, (size, p)) in frames.iter().zip(KINDS) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
                    if ((random >> 11) as f64 / (1u64 << 53) as f64) < p {
                        let amounts = [(size as f64 / p) as u64, (1.0 / p).round() as u64];
                        builder.sample(time, (1, 1), &[(*frame, 1)], &amounts);
                    }
                }
            }
            let profile = builder.finish(Meta::default());
            let found = of_blocks(&profile).expect("allocations");
            let all = Stats::new(&profile).samples() as f64;
            let (low, high) = *found.shares.last().expect("two functions");
            hits += u32::from((low * all..=high * all).contains(&((BLOCKS * KINDS[1].0) as f64)));
            let truth = (BLOCKS * (KINDS[0].0 + KINDS[1].0)) as f64;
            sums += u32::from((found.of_sum.0..=found.of_sum.1).contains(&truth));
        }
        // The probabilities are known as rounded numbers of blocks only.
        assert!(hits >= 358 && sums >= 358, "{hits} and {sums} of 400");
        let mut random = 5;
        assert!(of_blocks(&profile(100, 1, &mut random)).is_none());
    }

    /// Of blocks that are still there no sample is left.
    #[test]
    fn a_sum_without_samples_may_be_some() {
        let mut builder = Builder::new(&[ValueType::LIVE_BYTES, ValueType::ALLOC_BYTES, ValueType::ALLOCS]);
        let frame = builder.frame(Frame::python("f", "", "a.py", 1));
        for time in 0..10 {
            builder.sample(time, (1, 1), &[(frame, 1)], &[0, 1000, 1000]);
        }
        let found = of_blocks(&builder.finish(Meta::default())).expect("allocations");
        assert_eq!(found.of_sum.0, 0.0);
        assert!((3600.0..3700.0).contains(&found.of_sum.1), "{:?}", found.of_sum);
    }

    #[test]
    fn poisson_as_published() {
        for (events, (low, high)) in [
            (0.0, (0.0, 3.689)),
            (1.0, (0.025, 5.572)),
            (5.0, (1.623, 11.668)),
            (100.0, (81.364, 121.627)),
        ] {
            let found = poisson(events, 1.96);
            assert!(
                (found.0 - low).abs() < 0.05 && (found.1 - high).abs() < 0.05,
                "{found:?}"
            );
        }
    }

    #[test]
    fn wilson_as_published() {
        for (share, samples, (low, high)) in [
            (0.0, 10.0, (0.0, 0.2775)),
            (0.5, 10.0, (0.2366, 0.7634)),
            (1.0, 10.0, (0.7225, 1.0)),
            (0.1, 100.0, (0.0552, 0.1744)),
        ] {
            let found = wilson(share, samples, 1.96);
            assert!(
                (found.0 - low).abs() < 1e-4 && (found.1 - high).abs() < 1e-4,
                "{found:?}"
            );
        }
        assert_eq!(wilson(0.0, 0.0, 1.96), (0.0, 1.0));
    }
}
