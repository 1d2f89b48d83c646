//! How often a comparison is right that goes on until it knows the answer: sequences drawn from recorded runs.
//!
//! `SEQUENCES=10000 cargo test -p nativeprof-profile sequences -- --nocapture` draws so many, and prints what came of them.

use super::sequential::Looks;
use super::tests::{BY_SHARE, Dice, profile};
use super::*;
use crate::model::Profile;

/// Growth that the gate allows, part of all CPU time.
const LIMIT: f64 = 0.05;
/// Time for all runs, s.
const MAX_TIME: f64 = 180.0;
/// Runs of each side before the first look.
const FIRST: usize = 5;
/// The function that gets slower, a sixth of all time, and what calls it.
const SLOW: &str = "parse@work.py";
const CALLERS: [&str; 4] = [
    "<module>@work.py",
    "main@work.py",
    "__libc_start_main@",
    "__libc_start_call_main@",
];

/// A run of a program.
#[derive(Clone)]
struct Recorded {
    /// CPU time, s.
    cpu: f64,
    /// From its start to that of the next one, s.
    seconds: f64,
    samples: u64,
    /// By row, samples with the row on their stack.
    counts: Vec<u64>,
}

/// The runs of one program, one after the other on a busy machine, and the names of their rows.
fn recorded() -> (Vec<String>, Vec<Recorded>) {
    let text = include_str!("../../../fixtures/runs_on_a_busy_machine.txt");
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let names: Vec<String> = lines.next().unwrap().split(' ').skip(1).map(String::from).collect();
    let run = |line: &str| {
        let mut words = line.split(' ');
        let mut number = || words.next().unwrap().parse::<f64>().unwrap();
        let (cpu, seconds, samples) = (number() / 1e3, number() / 1e3, number() as u64);
        let mut counts = vec![0; names.len()];
        for word in words {
            let (row, count) = word.split_once(':').unwrap();
            counts[row.parse::<usize>().unwrap()] = count.parse().unwrap();
        }
        Recorded {
            cpu,
            seconds,
            samples,
            counts,
        }
    };
    let runs = lines.map(run).collect();
    (names, runs)
}

/// What happens to a program.
#[derive(Clone, Copy, Debug)]
enum Growth {
    None,
    /// All takes so much longer.
    All(f64),
    /// A function takes so much longer, in parts of its own time.
    Function(f64),
}

impl Recorded {
    fn grown(&self, growth: Growth, slow: usize, callers: &[usize], dice: &mut Dice) -> Recorded {
        let mut more = |count: u64, part: f64| (0..count).filter(|_| dice.roll() < part).count() as u64;
        let mut run = self.clone();
        match growth {
            Growth::None => {}
            Growth::All(part) => {
                run.cpu *= 1.0 + part;
                run.seconds *= 1.0 + part;
                run.samples += more(self.samples, part);
                for count in &mut run.counts {
                    *count += more(*count, part);
                }
            }
            Growth::Function(part) => {
                let added = more(self.counts[slow], part);
                let longer = 1.0 + added as f64 / self.samples as f64;
                run.cpu *= longer;
                run.seconds *= longer;
                run.samples += added;
                callers.iter().chain([&slow]).for_each(|row| run.counts[*row] += added);
            }
        }
        run
    }

    fn profile(&self) -> Profile {
        let mut profile = profile(self.counts.len(), &[]);
        profile.nodes[0].count = self.samples;
        for (node, count) in profile.nodes.iter_mut().skip(1).zip(&self.counts) {
            node.count = *count;
        }
        profile.meta.duration = self.cpu;
        profile
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Passed,
    Grown,
    Undecided,
}

/// How a sequence ended.
struct End {
    gate: Gate,
    seconds: f64,
    pairs: usize,
    /// The row of the first significant change.
    first: Option<usize>,
}

/// What `diff --fail-above` answers to a comparison.
fn gate(found: &Diff<'_>, limit: f64) -> Gate {
    let all = found.all.as_ref().unwrap();
    let rows = || found.rows.iter().chain([all]);
    let part = |value: f64| value / all.before;
    if rows().any(|row| row.is_significant() && part(row.change()) > limit) {
        return Gate::Grown;
    }
    let is_open = |row: &Change<'_>| {
        let high = row.interval.map_or(0.0, |(_, high)| part(high));
        high > limit && row.detectable().is_some_and(|seen| part(seen) > limit)
    };
    if limit > 0.0 && !rows().any(is_open) {
        Gate::Passed
    } else {
        Gate::Undecided
    }
}

/// The runs of both sides, as profiles with their CPU times and lengths.
struct Drawn {
    sides: [Vec<(Profile, f64, f64)>; 2],
    sum: Profile,
}

impl Drawn {
    fn new(runs: &[Recorded], names: &[String], growth: Growth, dice: &mut Dice) -> Drawn {
        let row = |beginning: &str| names.iter().position(|name| name.starts_with(beginning)).unwrap();
        let callers = CALLERS.map(row);
        let sides = [Growth::None, growth].map(|growth| {
            let of = |run: &Recorded| {
                let run = run.grown(growth, row(SLOW), &callers, dice);
                (run.profile(), run.cpu, run.seconds)
            };
            runs.iter().map(of).collect::<Vec<_>>()
        });
        let mut sum = sides[0][0].0.clone();
        sum.nodes.iter_mut().for_each(|node| node.count += 1);
        Drawn { sides, sum }
    }

    /// Makes pairs of runs that followed each other, in a random order, until the gate is decided or the time is over.
    fn sequence(&self, limit: f64, dice: &mut Dice) -> End {
        let mut looks = Looks::new(0.99, FIRST);
        let mut runs: [Vec<(Profile, CpuClock)>; 2] = Default::default();
        let (mut seconds, mut longest) = (0.0, 0.0_f64);
        loop {
            let at = (dice.roll() * (self.sides[0].len() - 1) as f64) as usize;
            let first = usize::from(dice.roll() < 0.5);
            let began = seconds;
            for (side, at) in [(first, at), (1 - first, at + 1)] {
                let (profile, cpu, length) = &self.sides[side][at];
                let mut profile = profile.clone();
                profile.meta.start = 1.0 + seconds;
                seconds += length;
                let count = profile.nodes[0].count;
                runs[side].push((profile, CpuClock { seconds: *cpu, count }));
            }
            longest = longest.max(seconds - began);
            let (pairs, is_last) = (runs[0].len(), seconds + longest > MAX_TIME);
            let time = if is_last { 1.0 } else { seconds / MAX_TIME };
            let Some(confidence) = looks.due(pairs, time) else {
                continue;
            };
            let sides = runs.each_ref().map(|runs| Side {
                sum: &self.sum,
                runs: runs
                    .iter()
                    .map(|(profile, clock)| Run {
                        profile,
                        grain: 1.0,
                        clock: Some(*clock),
                    })
                    .collect(),
            });
            let options = DiffOptions {
                normalization: Normalization::Time,
                metric: Metric::Total,
                confidence,
                ..BY_SHARE
            };
            let found = diff(&sides[0], &sides[1], &options);
            let gate = gate(&found, limit);
            if gate != Gate::Undecided || is_last {
                let first = found.rows.first().filter(|row| row.is_significant());
                return End {
                    gate,
                    seconds,
                    pairs,
                    first: first.map(|row| row.frame.first_line as usize),
                };
            }
        }
    }
}

/// Ends of so many sequences.
fn ends(sequences: usize, growth: Growth, limit: f64) -> Vec<End> {
    let (names, runs) = recorded();
    let mut dice = Dice(7);
    let drawn = Drawn::new(&runs, &names, growth, &mut dice);
    let ends: Vec<End> = (0..sequences).map(|_| drawn.sequence(limit, &mut dice)).collect();
    let part = |of: &dyn Fn(&End) -> bool| ends.iter().filter(|end| of(end)).count() as f64 / sequences as f64 * 100.0;
    let slow = names.iter().position(|name| name.starts_with(SLOW));
    let mut seconds: Vec<f64> = ends.iter().map(|end| end.seconds).collect();
    seconds.sort_by(f64::total_cmp);
    let (median, late) = (seconds[sequences / 2], seconds[sequences * 95 / 100]);
    println!(
        "{growth:?}, limit {limit}: {sequences} sequences, grown {:.2} %, passed {:.2} %, undecided {:.2} %; grown within 60 s {:.2} %, \
         with a significant change {:.2} %, the slower function first {:.2} %; {median:.0} s in the median, 95 % within {late:.0} s, \
         {:.1} pairs",
        part(&|end| end.gate == Gate::Grown),
        part(&|end| end.gate == Gate::Passed),
        part(&|end| end.gate == Gate::Undecided),
        part(&|end| end.gate == Gate::Grown && end.seconds <= 60.0),
        part(&|end| end.first.is_some()),
        part(&|end| end.first.is_some() && end.first == slow),
        ends.iter().map(|end| end.pairs as f64).sum::<f64>() / sequences as f64,
    );
    ends
}

fn sequences(default: usize) -> usize {
    let wanted = std::env::var("SEQUENCES").ok().and_then(|text| text.parse().ok());
    wanted.unwrap_or(default)
}

#[test]
fn equal_programs_pass_and_slower_ones_are_found() {
    let share =
        |ends: &[End], of: &dyn Fn(&End) -> bool| ends.iter().filter(|end| of(end)).count() as f64 / ends.len() as f64;
    let equal = ends(sequences(40), Growth::None, LIMIT);
    assert!(share(&equal, &|end| end.gate == Gate::Grown) <= 0.01);
    let any = ends(sequences(8), Growth::None, 0.0);
    assert!(share(&any, &|end| end.gate == Gate::Grown) <= 0.01);
    let slower = ends(sequences(40), Growth::All(0.1), LIMIT);
    assert!(share(&slower, &|end| end.gate == Gate::Grown && end.seconds <= 60.0) >= 0.95);
    // A tenth of all time more, in one function.
    let function = ends(sequences(40), Growth::Function(0.6), LIMIT);
    assert!(
        share(&function, &|end| end.gate == Gate::Grown
            && end.first == function[0].first)
            >= 0.9
    );
    // A tenth more of a sixth of all time.
    let little = ends(sequences(8), Growth::Function(0.1), 0.0);
    assert!(share(&little, &|end| end.gate == Gate::Grown) >= 0.9);
}
