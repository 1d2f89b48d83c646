//! How often a comparison is right that goes on until it knows the answer: sequences drawn from recorded runs.
//!
//! `SEQUENCES=10000 cargo test -p nativeprof-profile sequences -- --nocapture` draws so many, fewer of those that never end
//! before the time is over, and prints what came of them.

use super::sequential::Looks;
use super::tests::{BY_SHARE, Dice, profile};
use super::*;
use crate::model::{Node, Profile};

/// Growth that the gate allows, part of all CPU time.
const LIMIT: f64 = 0.05;
/// Time for all runs, s.
const MAX_TIME: f64 = 180.0;
/// Runs of each side before the first look.
const FIRST: usize = 5;
/// Sequences by default.
const SEQUENCES: usize = 20;
/// As `compare` has them: so many times the runs after which growth was seen are made to find a part that has less of all.
const RUNS_TO_NAME: usize = 3;
const PART: f64 = 0.9;
/// The function that gets slower, a sixth of all time.
const SLOW: &str = "parse@same_work.py";

/// The tree of the functions of a program.
struct Tree {
    /// Names of functions.
    names: Vec<String>,
    /// By node after the root, its function and the node that calls it.
    nodes: Vec<(usize, usize)>,
}

impl Tree {
    /// The function that gets slower.
    fn slow(&self) -> usize {
        self.names.iter().position(|name| name.starts_with(SLOW)).unwrap()
    }
}

/// A run of a program.
#[derive(Clone)]
struct Recorded {
    /// CPU time, s.
    cpu: f64,
    /// From its start to that of the next one, s.
    seconds: f64,
    /// By node, the samples that ended in it.
    counts: Vec<u64>,
}

/// The runs of one program, one after the other on a busy machine.
fn recorded() -> (Tree, Vec<Recorded>) {
    let text = include_str!("../../../fixtures/runs_on_a_busy_machine.txt");
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let (mut names, mut nodes) = (Vec::<String>::new(), Vec::new());
    for word in lines.next().unwrap().split(' ').skip(1) {
        let (name, caller) = word.rsplit_once('^').unwrap();
        let known = names.iter().position(|known| known == name);
        let function = known.unwrap_or_else(|| {
            names.push(name.into());
            names.len() - 1
        });
        nodes.push((function, caller.parse().unwrap()));
    }
    let run = |line: &str| {
        let mut words = line.split(' ');
        let mut number = || words.next().unwrap().parse::<f64>().unwrap();
        let (cpu, seconds) = (number() / 1e3, number() / 1e3);
        let mut counts = vec![0; nodes.len() + 1];
        for word in words {
            let (node, count) = word.split_once(':').unwrap();
            counts[node.parse::<usize>().unwrap()] = count.parse().unwrap();
        }
        Recorded { cpu, seconds, counts }
    };
    let runs = lines.map(run).collect();
    (Tree { names, nodes }, runs)
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
    fn grown(&self, growth: Growth, tree: &Tree, dice: &mut Dice) -> Recorded {
        let (slow, mut run) = (tree.slow(), self.clone());
        let (part, is_grown): (f64, &dyn Fn(usize) -> bool) = match growth {
            Growth::None => return run,
            Growth::All(part) => (part, &|_| true),
            Growth::Function(part) => (part, &|node| node > 0 && tree.nodes[node - 1].0 == slow),
        };
        let all: u64 = self.counts.iter().sum();
        let mut added = 0;
        for (_, count) in run.counts.iter_mut().enumerate().filter(|(node, _)| is_grown(*node)) {
            // A sample more with a probability of `part`, for parts above 1 too.
            let whole = part.floor() as u64 * *count;
            let more = whole + (0..*count).filter(|_| dice.roll() < part.fract()).count() as u64;
            *count += more;
            added += more;
        }
        let longer = match growth {
            Growth::All(part) => 1.0 + part,
            _ => 1.0 + added as f64 / all as f64,
        };
        run.cpu *= longer;
        run.seconds *= longer;
        run
    }

    fn profile(&self, tree: &Tree) -> Profile {
        let mut profile = profile(tree.names.len(), &[]);
        profile.nodes.truncate(1);
        let nodes = tree.nodes.iter();
        profile
            .nodes
            .extend(nodes.map(|(function, caller)| Node::new(*function as u32 + 1, *caller as u32)));
        let mut totals = self.counts.clone();
        for at in (1..totals.len()).rev() {
            totals[tree.nodes[at - 1].1] += totals[at];
        }
        profile
            .nodes
            .iter_mut()
            .zip(totals)
            .for_each(|(node, count)| node.count = count);
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
    /// When growth was seen first, s.
    seen: Option<f64>,
    pairs: usize,
    /// The row of the first significant change.
    first: Option<usize>,
}

impl End {
    fn is_seen_soon(&self) -> bool {
        self.seen.is_some_and(|seconds| seconds <= 60.0)
    }

    /// Whether the function that got slower is the first one named.
    fn names_first(&self, tree: &Tree) -> bool {
        self.first == Some(tree.slow())
    }
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
    fn new(runs: &[Recorded], tree: &Tree, growth: Growth, dice: &mut Dice) -> Drawn {
        let sides = [Growth::None, growth].map(|growth| {
            let of = |run: &Recorded| {
                let run = run.grown(growth, tree, dice);
                (run.profile(tree), run.cpu, run.seconds)
            };
            runs.iter().map(of).collect::<Vec<_>>()
        });
        // Only its functions matter.
        let sum = sides[0][0].0.clone();
        Drawn { sides, sum }
    }

    /// Makes pairs of runs that followed each other, in a random order, until the gate is decided or the time is over.
    fn sequence(&self, limit: f64, dice: &mut Dice) -> End {
        let mut looks = Looks::new(0.99, FIRST);
        let mut runs: [Vec<(Profile, CpuClock)>; 2] = Default::default();
        let (mut seconds, mut longest, mut seen) = (0.0, 0.0_f64, None);
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
            let first = found.rows.first().filter(|row| row.is_significant());
            let all = found.all.as_ref().map_or(0.0, |all| all.after);
            let is_named = first.is_some_and(|row| row.change() > 0.0 && row.after < PART * all);
            if gate == Gate::Grown {
                seen.get_or_insert((seconds, pairs));
            }
            let is_decided = gate == Gate::Passed || gate == Gate::Grown && is_named;
            let is_enough = seen.is_some_and(|(_, runs)| pairs >= RUNS_TO_NAME * runs);
            if is_decided || is_enough || is_last {
                return End {
                    gate: if seen.is_some() { Gate::Grown } else { gate },
                    seconds,
                    seen: seen.map(|(seconds, _)| seconds),
                    pairs,
                    first: first.map(|row| row.frame.first_line as usize),
                };
            }
        }
    }
}

/// Ends of so many sequences.
fn ends(sequences: usize, growth: Growth, limit: f64) -> Vec<End> {
    let (tree, runs) = recorded();
    let mut dice = Dice(7);
    let drawn = Drawn::new(&runs, &tree, growth, &mut dice);
    let ends: Vec<End> = (0..sequences).map(|_| drawn.sequence(limit, &mut dice)).collect();
    let part = |of: &dyn Fn(&End) -> bool| ends.iter().filter(|end| of(end)).count() as f64 / sequences as f64 * 100.0;
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
        part(&End::is_seen_soon),
        part(&|end| end.first.is_some()),
        part(&|end| end.names_first(&tree)),
        ends.iter().map(|end| end.pairs as f64).sum::<f64>() / sequences as f64,
    );
    ends
}

/// How many to draw where so many are drawn of [`SEQUENCES`].
fn sequences(number: usize) -> usize {
    let wanted = std::env::var("SEQUENCES")
        .ok()
        .and_then(|text| text.parse::<usize>().ok());
    number * wanted.unwrap_or(SEQUENCES) / SEQUENCES
}

#[test]
fn equal_programs_pass_and_slower_ones_are_found() {
    let (tree, _) = recorded();
    let share =
        |ends: &[End], of: &dyn Fn(&End) -> bool| ends.iter().filter(|end| of(end)).count() as f64 / ends.len() as f64;
    for (number, growth, limit) in [(SEQUENCES, Growth::None, LIMIT), (2, Growth::None, 0.0)] {
        let equal = ends(sequences(number), growth, limit);
        assert!(share(&equal, &|end| end.gate == Gate::Grown) <= 0.01);
    }
    let slower = ends(sequences(SEQUENCES), Growth::All(0.1), LIMIT);
    assert!(share(&slower, &End::is_seen_soon) >= 0.95);
    // A tenth of all time more, in one function; then a tenth of its own.
    let slower = ends(sequences(SEQUENCES), Growth::Function(0.6), LIMIT);
    assert!(share(&slower, &|end| end.gate == Gate::Grown && end.names_first(&tree)) >= 0.9);
    let slower = ends(sequences(3), Growth::Function(0.1), 0.0);
    assert!(share(&slower, &|end| end.gate == Gate::Grown) >= 0.9);
}
