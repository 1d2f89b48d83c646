//! A part of a profile's time, as a profile.

use rustc_hash::FxHashMap;

use super::select::of_samples;
use crate::lags::Lag;
use crate::model::{Meta, ModuleMeta, Pid, Profile, Quality, Tid};
use crate::values::Amounts;

/// The time that a sample stands for: from `start` to `end`, ns since the start of the profile; a point where its length is not
/// known.
#[derive(Clone, Copy)]
struct Stretch {
    start: u64,
    end: u64,
}

impl Stretch {
    /// What of an amount lies between two times. Over ranges that follow each other the parts add up to the amount.
    fn part(self, amount: u64, from: u64, to: Option<u64>) -> u64 {
        let length = u128::from(self.end - self.start);
        if length == 0 {
            return amount;
        }
        let until = |time: u64| {
            let time = time.clamp(self.start, self.end) - self.start;
            (u128::from(amount) * u128::from(time) / length) as u64
        };
        until(to.unwrap_or(u64::MAX)) - until(from)
    }

    /// Whether some of it lies between two times.
    fn is_within(self, from: u64, to: Option<u64>) -> bool {
        if self.start == self.end {
            return self.end >= from && to.is_none_or(|to| self.end < to);
        }
        self.end > from && to.is_none_or(|to| self.start < to)
    }
}

/// The samples of a profile from one time to another, both in ns since its start; `None`: to its end. Intervals off the
/// CPU that are only partly in this range count with that part. The profile begins at the first time and is as long as
/// the range. What is known of the whole recording only is left out: quality, overhead, and the samples of files and
/// instructions.
///
/// Samples without a time are in no part, so a profile that is not timed ([`Profile::is_timed`]) has more than its parts.
pub fn by_time(profile: &Profile, from: u64, to: Option<u64>) -> Profile {
    let to = to.map(|to| to.max(from));
    let stretches = stretches(profile);
    let samples: Vec<usize> = (0..profile.timeline.len())
        .filter(|at| stretches[*at].is_within(from, to))
        .collect();
    let mut moved = profile.clone();
    for at in &samples {
        let sample = &mut moved.timeline[*at];
        sample.time = to.map_or(sample.time, |to| sample.time.min(to)).saturating_sub(from);
        if let Some(length) = moved.waits.lengths.get_mut(*at) {
            *length = stretches[*at].part(*length, from, to);
        }
    }
    let part = |value: usize, at: usize| stretches[at].part(profile.sample_amount(value, at), from, to);
    let mut out = of_samples(&moved, &samples, &|value, at| match profile
        .value_types()
        .get(value)
        .map(|value| &value.amounts)
    {
        Some(Amounts::PerCount(per)) if value > 0 => part(0, at).saturating_mul(*per),
        _ => part(value, at),
    });
    out.meta = meta(&profile.meta, from, to.unwrap_or_else(|| profile.end()).max(from));
    out
}

fn meta(meta: &Meta, from: u64, to: u64) -> Meta {
    let is_within = |lag: &&Lag| lag.time >= from && lag.time < to;
    let moved = |lag: &Lag| Lag {
        time: lag.time - from,
        ..lag.clone()
    };
    let modules = meta.modules.iter().map(|module| ModuleMeta {
        frames: 0,
        unnamed: 0,
        samples: 0,
        instructions: Default::default(),
        ..module.clone()
    });
    Meta {
        start: if meta.start > 0.0 {
            meta.start + from as f64 / 1e9
        } else {
            0.0
        },
        duration: (to - from) as f64 / 1e9,
        lags: meta.lags.iter().filter(is_within).map(moved).collect(),
        memory: Vec::new(),
        memory_over_time: meta.memory_over_time.between(from, to),
        modules: modules.collect(),
        quality: Quality::default(),
        target_cpu: 0.0,
        profiler_cpu: 0.0,
        sampling_cpu: 0.0,
        stopped: None,
        merged_from: Vec::new(),
        ..meta.clone()
    }
}

/// By index in the timeline, the time that each sample stands for. A wait and the time without a CPU after it are two
/// samples of one time, the wait last: it ends where the other one begins.
fn stretches(profile: &Profile) -> Vec<Stretch> {
    // Where all samples amount to the same, none of them has a part.
    let is_weighted = !profile.value_types()[0].is_per_count();
    let length = |at: usize| match profile.waits.lengths.get(at) {
        Some(length) if is_weighted => *length,
        _ => 0,
    };
    // By thread, the time of its last sample, and where in it the next one ends.
    let mut last: FxHashMap<(Pid, Tid), (u64, u64)> = FxHashMap::default();
    let samples = profile.timeline.iter().enumerate();
    let stretches = samples.map(|(at, sample)| {
        let (time, next_end) = last
            .entry((sample.pid, sample.tid))
            .or_insert((sample.time, sample.time));
        if *time != sample.time || length(at) == 0 {
            (*time, *next_end) = (sample.time, sample.time);
        }
        let end = *next_end;
        // It may have begun before the recording.
        *next_end = end.saturating_sub(length(at));
        Stretch { start: *next_end, end }
    });
    stretches.collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::build::Builder;
    use crate::model::{Frame, FrameKind};
    use crate::values::{Value, ValueType};
    use crate::waits::Waits;

    const MS: u64 = 1_000_000;

    /// Self amounts by stack and value.
    fn amounts(profile: &Profile) -> BTreeMap<(Vec<&str>, usize), u64> {
        let mut stacks: Vec<Vec<&str>> = Vec::new();
        for (at, node) in profile.nodes.iter().enumerate() {
            let mut stack = if at > 0 {
                stacks[node.parent as usize].clone()
            } else {
                Vec::new()
            };
            stack.push(&profile.frames[node.frame as usize].name);
            stacks.push(stack);
        }
        let mut sums = BTreeMap::new();
        for value in 0..profile.value_types().len() {
            for (stack, amount) in stacks.iter().zip(profile.self_amounts(value)) {
                if amount > 0 {
                    sums.insert((stack.clone(), value), amount);
                }
            }
        }
        sums
    }

    fn lines(profile: &Profile) -> BTreeMap<(String, u32), u64> {
        let mut sums = BTreeMap::new();
        for node in &profile.nodes {
            for (line, amount) in &node.lines {
                *sums
                    .entry((profile.frames[node.frame as usize].name.clone(), *line))
                    .or_default() += amount;
            }
        }
        sums
    }

    /// A thread that runs, waits from 10 to 90 ms, and has a CPU again from 100 ms on.
    fn waiting() -> Profile {
        let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL]);
        let f = builder.frame(Frame::python("f", "f", "a.py", 1));
        let runnable = builder.frame(Frame::new(FrameKind::State, "[runnable]"));
        let waiting = builder.frame(Frame::new(FrameKind::State, "[waiting: sleep]"));
        for (time, stack, counts, wall) in [
            (10, &[(f, 2)][..], 1, 10),
            (100, &[(f, 3), (runnable, 0)], 1, 10),
            (100, &[(f, 3), (waiting, 0)], 8, 80),
            (110, &[(f, 4)], 1, 10),
        ] {
            builder.sample(time * MS, (1, 1), stack, &[counts, wall * MS]);
        }
        let mut profile = builder.finish(Meta {
            start: 1000.0,
            duration: 0.12,
            quality: Quality {
                taken: 4,
                ..Quality::default()
            },
            ..Meta::default()
        });
        profile.waits.lengths = vec![0, 10 * MS, 80 * MS, 0];
        profile
    }

    #[test]
    fn a_wait_is_in_a_range_with_its_part() {
        let all = waiting();
        for (from, to, expected) in [
            (0, 10, &[][..]),
            (0, 20, &[("f", 10), ("[waiting: sleep]", 10)][..]),
            (30, 50, &[("[waiting: sleep]", 20)]),
            (80, 95, &[("[waiting: sleep]", 10), ("[runnable]", 5)]),
            (95, 105, &[("[runnable]", 5)]),
            (105, 200, &[("f", 10)]),
        ] {
            let part = by_time(&all, from * MS, Some(to * MS));
            let mut found: Vec<(&str, u64)> = amounts(&part)
                .iter()
                .filter(|((_, value), _)| *value == 1)
                .map(|((stack, _), amount)| (stack[stack.len() - 1], amount / MS))
                .collect();
            let mut expected = expected.to_vec();
            found.sort_unstable();
            expected.sort_unstable();
            assert_eq!(found, expected, "{from} to {to}");
            assert!(part.is_timed());
            assert_eq!(part.meta.duration, (to - from) as f64 / 1e3);
            assert_eq!(part.meta.start, 1000.0 + from as f64 / 1e3);
            assert_eq!(part.meta.quality, Quality::default());
        }
        // A part of a part is the same as that part of the whole.
        let part = by_time(&by_time(&all, 20 * MS, Some(97 * MS)), 60 * MS, Some(75 * MS));
        assert_eq!(amounts(&part), amounts(&by_time(&all, 80 * MS, Some(95 * MS))));
        assert_eq!(part.waits.lengths, [5 * MS, 10 * MS]);
    }

    #[test]
    fn plain_samples_are_in_one_part() {
        let mut all = waiting();
        all.values = vec![
            Value::per_count(ValueType::SAMPLES, 1),
            Value::per_count(ValueType::CPU, MS),
        ];
        all.nodes.iter_mut().for_each(|node| node.count = 0);
        all.nodes[0].count = 4;
        let counts = |from: u64, to| by_time(&all, from * MS, to).nodes[0].count;
        assert_eq!(
            [counts(0, Some(10 * MS)), counts(10, Some(100 * MS)), counts(100, None)],
            [0, 1, 3]
        );
        assert_eq!(
            counts(7, Some(3 * MS)),
            0,
            "a range that ends before it begins is empty"
        );
        assert_eq!(by_time(&all, 10 * MS, None).total_amount(1), 4 * MS);
        assert_eq!(by_time(&Profile::default(), 3, None).end(), 0);
    }

    #[test]
    fn lags_are_in_the_part_that_they_begin_in() {
        let mut all = waiting();
        all.meta.lags = [5, 20, 60]
            .map(|time| Lag {
                time: time * MS,
                length: 30 * MS,
                ..Lag::default()
            })
            .to_vec();
        let part = by_time(&all, 10 * MS, Some(60 * MS));
        let found: Vec<_> = part
            .meta
            .lags
            .iter()
            .map(|lag| (lag.time / MS, lag.length / MS))
            .collect();
        assert_eq!(found, [(10, 30)]);
    }

    /// xorshift64*
    fn random(state: &mut u64) -> u64 {
        *state ^= *state >> 12;
        *state ^= *state << 25;
        *state ^= *state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }

    /// Samples of several threads with intervals of any length, also longer than the time before them.
    fn any(state: &mut u64) -> Profile {
        let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL, ValueType::OFF_CPU]);
        let frames: Vec<u32> = (0..5)
            .map(|at| builder.frame(Frame::python(format!("f{at}"), "", "a.py", 1)))
            .collect();
        let (mut time, mut lengths) = (0, Vec::new());
        for _ in 0..random(state) % 60 {
            // Some at the same time.
            time += (random(state) % 4) * (random(state) % 1000);
            let depth = random(state) % 4;
            let stack: Vec<(u32, u32)> = (0..depth)
                .map(|_| (frames[(random(state) % 5) as usize], (random(state) % 3) as u32))
                .collect();
            let amounts = [random(state) % 9, random(state) % 5000, random(state) % 7];
            builder.sample(time, (1, (random(state) % 3) as u32), &stack, &amounts);
            lengths.push((random(state) % 2) * (random(state) % 3000));
        }
        let mut profile = builder.finish(Meta::default());
        profile.waits = Waits {
            lengths,
            ..Waits::default()
        };
        profile
    }

    #[test]
    fn parts_add_up_to_the_whole() {
        let mut state = 7;
        for _ in 0..300 {
            let all = any(&mut state);
            let mut cuts: Vec<u64> = (0..random(&mut state) % 6)
                .map(|_| random(&mut state) % (all.end() + 2))
                .collect();
            cuts.sort_unstable();
            let begins = [0].into_iter().chain(cuts.clone());
            let ends = cuts.iter().map(|cut| Some(*cut)).chain([None]);
            let (mut sums, mut of_lines, mut duration) = (BTreeMap::new(), BTreeMap::new(), 0.0);
            for (from, to) in begins.zip(ends) {
                let part = by_time(&all, from, to);
                assert!(part.is_timed());
                duration += part.meta.duration;
                for ((stack, value), amount) in amounts(&part) {
                    let key = (stack.into_iter().map(String::from).collect::<Vec<_>>(), value);
                    *sums.entry(key).or_insert(0) += amount;
                }
                for (key, amount) in lines(&part) {
                    *of_lines.entry(key).or_insert(0) += amount;
                }
            }
            let whole = amounts(&all).into_iter();
            let whole: BTreeMap<_, u64> = whole
                .map(|((stack, value), amount)| ((stack.into_iter().map(String::from).collect(), value), amount))
                .collect();
            assert_eq!(sums, whole);
            assert_eq!(of_lines, lines(&all));
            assert!((duration - all.end().max(*cuts.last().unwrap_or(&0)) as f64 / 1e9).abs() < 1e-12);
        }
    }
}
