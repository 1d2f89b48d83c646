//! How often intervals have what they are about: of programs whose times are known, sampled as the backends do it.

use super::tests::{BY_SHARE, Dice, one, profile, several};
use super::*;
use crate::model::{Meta, Node, Profile};

/// Ticks of a thread until a time, both in periods: in runs of one interval, each corrected by how far the ticks are behind (as
/// `src/capture/common/jitter.rs` in the profiler has it).
fn ticks(dice: &mut Dice, end: f64) -> Vec<f64> {
    const RUN: usize = 8;
    let (mut ticks, mut now, mut count) = (Vec::new(), dice.roll(), 0.0);
    loop {
        let interval = (0.75 + dice.roll() / 2.0 - (now - count) / RUN as f64).clamp(0.5, 2.0);
        for _ in 0..RUN {
            if now >= end {
                return ticks;
            }
            ticks.push(now);
            now += interval;
            count += 1.0;
        }
    }
}

/// What each thread of a program does: stretches of functions with their lengths in periods.
type Program = Vec<Vec<(usize, f64)>>;

/// CPU time of each function.
fn times(program: &Program, functions: usize) -> Vec<f64> {
    let mut times = vec![0.0; functions];
    for (function, length) in program.iter().flatten() {
        times[*function] += length;
    }
    times
}

/// The samples of a run, of which a part is lost.
fn sampled(dice: &mut Dice, program: &Program, lost: f64) -> Vec<usize> {
    let mut samples = Vec::new();
    for thread in program {
        let end = thread.iter().map(|(_, length)| length).sum();
        let (mut at, mut until) = (0, 0.0);
        for tick in ticks(dice, end) {
            while at < thread.len() && until + thread[at].1 <= tick {
                until += thread[at].1;
                at += 1;
            }
            if let Some((function, _)) = thread.get(at)
                && dice.roll() >= lost
            {
                samples.push(*function);
            }
        }
    }
    samples
}

/// Pairs of which all intervals have the true change, of so many. `make` has the programs before and after.
fn covered(
    pairs: u64,
    functions: usize,
    lost: f64,
    normalization: Normalization,
    make: &dyn Fn(&mut Dice) -> [Program; 2],
) -> u64 {
    let mut dice = Dice(pairs + functions as u64);
    let is_covered = |_: &u64| {
        let programs = make(&mut dice);
        let runs = programs
            .each_ref()
            .map(|program| profile(functions, &sampled(&mut dice, program, lost)));
        let times = programs.each_ref().map(|program| times(program, functions));
        let all = times.each_ref().map(|times| times.iter().sum::<f64>());
        let [a, b] = [0, 1].map(|i| {
            let mut side = one(&runs[i]);
            let count = runs[i].nodes[0].count;
            side.runs[0].clock = (lost > 0.0).then_some(CpuClock {
                seconds: all[i] / 1000.0,
                count,
            });
            side
        });
        let options = DiffOptions {
            normalization,
            ..BY_SHARE
        };
        let found = diff(&a, &b, &options);
        assert!(found.rows.iter().any(|row| row.interval.is_some()));
        let is_in = |row: &Change<'_>, [before, after]: [f64; 2]| {
            let (low, high) = row.interval.unwrap_or((f64::NEG_INFINITY, f64::INFINITY));
            let unit = if normalization == Normalization::Share {
                all
            } else {
                [1000.0; 2]
            };
            let change = after / unit[1] - before / unit[0];
            low <= change && change <= high
        };
        let of_row = |row: &Change<'_>| {
            let function = row.frame.first_line as usize;
            is_in(row, times.each_ref().map(|times| times[function]))
        };
        found.rows.iter().all(of_row) && found.all.as_ref().is_none_or(|row| is_in(row, all))
    };
    (0..pairs).filter(is_covered).count() as u64
}

/// A loop of this length, in which each function has a part.
fn periodic(period: f64, parts: &[f64], length: f64) -> Program {
    let turn = parts
        .iter()
        .enumerate()
        .map(|(function, part)| (function, part * period));
    let turns = (length / period) as usize;
    vec![(0..turns).flat_map(|_| turn.clone()).collect()]
}

#[test]
fn intervals_of_two_recordings_have_the_true_change() {
    let independent = |dice: &mut Dice| {
        [0, 1].map(|slow| {
            let stretch = |_| {
                let function = (dice.roll().powi(3) * 20.0) as usize;
                (function, 0.05 + dice.roll() * if function == slow { 0.5 } else { 0.4 })
            };
            vec![(0..12_000).map(stretch).collect()]
        })
    };
    let phases = |dice: &mut Dice| {
        let start = 100.0 * dice.roll();
        [700.0, 80.0].map(|fast| {
            vec![vec![
                (0, start),
                (1, 1000.0),
                (2, fast),
                (3, 900.0),
                (1, 300.0),
                (4, 20.0),
            ]]
        })
    };
    // In step with the ticks, as far as that goes.
    let in_step = |period: f64| {
        move |dice: &mut Dice| {
            let drift = 1.0 + 0.001 * dice.roll();
            [0.5, 0.45].map(|half| periodic(period * drift, &[half, 0.2, 0.8 - half], 2000.0))
        }
    };
    let threads = |dice: &mut Dice| {
        [1.0, 1.2].map(|slow| {
            let thread = |i: usize| {
                let work = (i % 5, (0.2 + 20.0 * dice.roll()) * slow);
                vec![(5, 0.5), work, (6, dice.roll())]
            };
            (0..150).map(thread).collect()
        })
    };
    type Make<'a> = &'a dyn Fn(&mut Dice) -> [Program; 2];
    let steps = [0.5, 1.0, 2.0, 8.0, 30.0].map(in_step);
    let periodic = steps.iter().map(|make| ("periodic", make as Make<'_>, 3));
    let cases = [
        ("independent", &independent as Make<'_>, 20),
        ("phases", &phases, 5),
        ("threads", &threads, 7),
    ];
    for (name, make, functions) in cases.into_iter().chain(periodic) {
        for (normalization, lost) in [(Normalization::Share, 0.0), (Normalization::Time, 0.5)] {
            let hits = covered(200, functions, lost, normalization, make);
            assert!(hits >= 198, "{name} {normalization:?} {lost}: {hits} of 200");
        }
    }
}

/// A number of a normal distribution with mean 0 and variance 1.
fn normal(dice: &mut Dice) -> f64 {
    (0..12).map(|_| dice.roll()).sum::<f64>() - 6.0
}

/// A run with this CPU time of each function, ms, sampled once in each; `start` in seconds.
fn run(dice: &mut Dice, times: &[f64], start: f64) -> Profile {
    let mut out = profile(times.len(), &[]);
    for (node, time) in out.nodes.iter_mut().skip(1).zip(times) {
        node.count = (time + normal(dice) * time.sqrt()).round().max(0.0) as u64;
    }
    let all = out.nodes.iter().map(|node: &Node| node.count).sum();
    out.nodes[0].count = all;
    out.meta = Meta {
        start,
        rate: 1000,
        duration: 1.0,
        ..Meta::default()
    };
    out
}

/// Eight runs of each side, whose times vary from run to run: in 99 % of all pairs every interval has the true change, that of
/// all time too, which is little wider than it would be alone.
#[test]
fn intervals_of_runs_have_the_true_change() {
    const FUNCTIONS: usize = 12;
    let times: Vec<f64> = (0..FUNCTIONS).map(|i| 400.0 / (i + 1) as f64).collect();
    let mut dice = Dice(41);
    for (paired, pairs, expected) in [(true, 1000, 983..=997), (false, 300, 294..=300)] {
        let mut hits = 0;
        for _ in 0..pairs {
            let sides = [1.0, 1.1].map(|slow| {
                let runs = (0..8).map(|at| {
                    let times = times.iter().enumerate().map(|(function, time)| {
                        let slow = if function == 1 { slow } else { 1.0 };
                        time * slow * (1.0 + 0.1 * normal(&mut dice))
                    });
                    let times: Vec<f64> = times.collect();
                    // After the other side's run of this number, or after all of its runs.
                    let start = if paired {
                        10.0 * f64::from(at) + slow
                    } else {
                        1000.0 * slow + f64::from(at)
                    };
                    run(&mut dice, &times, start)
                });
                runs.collect::<Vec<Profile>>()
            });
            let sums = sides.each_ref().map(|runs| summed(runs));
            let [a, b] = [0, 1].map(|i| several(&sides[i], &sums[i]));
            let options = DiffOptions {
                normalization: Normalization::Time,
                ..BY_SHARE
            };
            let found = diff(&a, &b, &options);
            assert_eq!(found.question, Question::Runs { runs: [8, 8], paired });
            let is_in =
                |row: &Change<'_>, change: f64| row.interval.is_none_or(|(low, high)| low <= change && change <= high);
            let true_change = |function: usize| if function == 1 { times[1] * 0.1 / 1000.0 } else { 0.0 };
            let rows = found
                .rows
                .iter()
                .all(|row| is_in(row, true_change(row.frame.first_line as usize)));
            hits += u32::from(rows && found.all.as_ref().is_some_and(|row| is_in(row, true_change(1))));
            if paired {
                // The reference: Student's interval of the pairs alone, with the same confidence.
                let of_pair =
                    |(a, b): (&Profile, &Profile)| (b.nodes[0].count as f64 - a.nodes[0].count as f64) / 1000.0;
                let differences: Vec<f64> = sides[0].iter().zip(&sides[1]).map(of_pair).collect();
                let mean = differences.iter().sum::<f64>() / 8.0;
                let squares: f64 = differences.iter().map(|d| (d - mean).powi(2)).sum();
                let alone = quantile::student(0.005, 7) * (squares / 7.0 / 8.0).sqrt();
                let (low, high) = found.all.as_ref().and_then(|all| all.interval).unwrap();
                let half = (high - low) / 2.0;
                // Not narrower than that of sampling.
                assert!(half <= (1.5 * alone).max(0.08), "{half} {alone}");
            }
        }
        assert!(expected.contains(&hits), "paired: {paired}, {hits} of {pairs}");
    }
}

/// The sum of runs that have the same functions.
fn summed(runs: &[Profile]) -> Profile {
    let mut sum = runs[0].clone();
    for run in &runs[1..] {
        for (into, node) in sum.nodes.iter_mut().zip(&run.nodes) {
            into.count += node.count;
        }
    }
    sum
}
