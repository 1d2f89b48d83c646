//! Views of a profile, as profiles: by another value than the count, and split by line.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::fold::{DROPPED, Folding};
use crate::labels::LabelFilter;
use crate::model::{Frame, FrameId, FrameKind, Node, NodeId, Profile};
use crate::stacks_by_line::StacksByLine;
use crate::sums::sum_upwards;
use crate::values::{Amounts, Value};
use crate::view::View;

/// The profile with one of its values (an index in [`Profile::value_types`]) as its count, before the others. Lines of
/// functions are those of the samples whose lines are known. The first value, or none of the profile's, changes nothing.
pub fn by_value(profile: Profile, value: usize) -> Profile {
    let Some(chosen) = profile.value_types().get(value).filter(|_| value > 0) else {
        return profile;
    };
    let column = |at: usize| -> Vec<u64> {
        let samples = 0..profile.timeline.len();
        samples.map(|sample| profile.sample_amount(at, sample)).collect()
    };
    let mut out = profile.clone();
    let weights = column(value);
    for (node, amount) in out.nodes.iter_mut().zip(profile.amounts(value)) {
        node.count = amount;
    }
    match chosen.amounts {
        Amounts::PerCount(per) => {
            let lines = |lines: &mut BTreeMap<u32, u64>| {
                lines.values_mut().for_each(|count| *count = count.saturating_mul(per));
            };
            for node in &mut out.nodes {
                lines(&mut node.lines);
                lines(&mut node.self_lines);
            }
        }
        Amounts::Each { .. } => weigh_lines(&mut out, &weights),
    }
    let first = Value {
        kind: chosen.kind.clone(),
        amounts: Amounts::Each {
            nodes: Vec::new(),
            samples: weights,
        },
    };
    // What was so much for each count is not for each count of another value.
    let others = profile.value_types().iter().enumerate().filter(|(at, _)| *at != value);
    let others = others.map(|(at, other)| Value {
        kind: other.kind.clone(),
        amounts: Amounts::Each {
            nodes: profile.amounts(at),
            samples: column(at),
        },
    });
    out.values = std::iter::once(first).chain(others).collect();
    out
}

/// The samples of the profile that have all these labels. Its quality stays that of the whole recording.
pub fn by_labels(profile: &Profile, filters: &[LabelFilter]) -> Profile {
    let is_kept: Vec<bool> = profile
        .labels
        .sets
        .iter()
        .map(|set| filters.iter().all(|f| f.matches(set)))
        .collect();
    let keeps = |at: &usize| {
        let set = profile.labels.of_samples.get(*at).map_or(0, |set| *set as usize);
        is_kept.get(set).copied().unwrap_or(filters.is_empty())
    };
    let samples: Vec<usize> = (0..profile.timeline.len()).filter(keeps).collect();
    of_samples(profile, &samples, &|value, at| profile.sample_amount(value, at))
}

/// The profile with some of its samples alone, by their indices in the timeline; `amount` has what a sample amounts to
/// of a value.
pub(super) fn of_samples(profile: &Profile, samples: &[usize], amount: &dyn Fn(usize, usize) -> u64) -> Profile {
    let amounts = |value: usize| -> Vec<u64> { samples.iter().map(|at| amount(value, *at)).collect() };
    let inclusive = |amounts: &[u64]| {
        let mut sums = vec![0u64; profile.nodes.len()];
        for (at, amount) in samples.iter().zip(amounts) {
            if let Some(sum) = sums.get_mut(profile.timeline[*at].node as usize) {
                *sum = sum.saturating_add(*amount);
            }
        }
        sum_upwards(&mut sums, |at| Some(profile.nodes[at].parent as usize));
        sums
    };
    let columns = profile.pick_samples(samples);
    let mut out = Profile {
        timeline: columns.timeline,
        sample_places: columns.places,
        waits: columns.waits,
        labels: columns.labels,
        ..profile.clone()
    };
    let mut is_empty = vec![true; out.nodes.len()];
    for index in 0..profile.value_types().len() {
        let of_samples = amounts(index);
        let of_nodes = inclusive(&of_samples);
        is_empty
            .iter_mut()
            .zip(&of_nodes)
            .for_each(|(is, amount)| *is &= *amount == 0);
        if index == 0 {
            out.nodes
                .iter_mut()
                .zip(&of_nodes)
                .for_each(|(node, count)| node.count = *count);
            weigh_lines(&mut out, &of_samples);
        }
        if let Some(Amounts::Each { nodes, samples }) = out.values.get_mut(index).map(|value| &mut value.amounts) {
            *samples = of_samples;
            if index > 0 {
                *nodes = of_nodes;
            }
        }
    }
    let mut folding = Folding::new(&out);
    for (at, is_empty) in is_empty.iter().enumerate() {
        let into = match (at, Folding::parent(&out, at)) {
            (0, _) => Folding::ROOT,
            (_, Some(parent)) if !is_empty && folding.target(parent as NodeId) != DROPPED => {
                folding.child(folding.target(parent as NodeId), out.nodes[at].frame)
            }
            _ => DROPPED,
        };
        folding.keep(into);
    }
    folding.finish()
}

/// Sets the lines of nodes from the timeline's samples with these weights.
fn weigh_lines(profile: &mut Profile, weights: &[u64]) {
    let mut self_counts = vec![0u64; profile.places.len()];
    for (place, weight) in profile.sample_places.iter().zip(weights) {
        if let Some(sum) = self_counts.get_mut(*place as usize) {
            *sum = sum.saturating_add(*weight);
        }
    }
    let mut inclusive = self_counts.clone();
    sum_upwards(&mut inclusive, |at| Some(profile.places[at].parent as usize));
    for node in &mut profile.nodes {
        node.lines.clear();
        node.self_lines.clear();
    }
    for (at, place) in profile.places.iter().enumerate().filter(|(_, place)| place.line > 0) {
        let Some(node) = profile.nodes.get_mut(place.node as usize) else {
            continue;
        };
        for (lines, amount) in [
            (&mut node.lines, inclusive[at]),
            (&mut node.self_lines, self_counts[at]),
        ] {
            if amount > 0 {
                let sum = lines.entry(place.line).or_default();
                *sum = sum.saturating_add(amount);
            }
        }
    }
    for node in &mut profile.nodes {
        if node.self_lines == node.lines {
            node.self_lines.clear();
        }
    }
}

/// The profile with a function for each line of a function: what formats show that have names only. Its functions are
/// not those of the program, and it has no timeline.
pub fn by_line(profile: &Profile) -> Profile {
    let view = View::new(profile);
    let entries = StacksByLine::new(profile, &view);
    let mut frames = vec![Frame::new(FrameKind::Root, "root")];
    let mut known: FxHashMap<(u32, u32), FrameId> = FxHashMap::default();
    let self_counts = entries.self_amounts(profile, 0);
    let mut nodes: Vec<Node> = Vec::with_capacity(entries.all.len());
    for (entry, self_count) in entries.all.iter().zip(self_counts) {
        let identifier = view.items[entry.item as usize].identifier;
        let frame = match view.function(identifier) {
            None => 0,
            Some(frame) => *known.entry((identifier, entry.line)).or_insert_with(|| {
                frames.push(at_line(frame, entry.line));
                frames.len() as FrameId - 1
            }),
        };
        nodes.push(Node {
            count: self_count,
            ..Node::new(frame, entry.parent)
        });
    }
    let mut counts: Vec<u64> = nodes.iter().map(|node| node.count).collect();
    sum_upwards(&mut counts, |at| Some(nodes[at].parent as usize));
    nodes
        .iter_mut()
        .zip(counts)
        .for_each(|(node, count)| node.count = count);
    let count = profile.value_types()[0].kind.clone();
    Profile {
        meta: profile.meta.clone(),
        frames,
        nodes,
        values: vec![Value::per_count(count, 1)],
        ..Profile::default()
    }
}

/// `f (a.py:59)` for Python, `f:59 (lib.so)` for native code.
fn at_line(frame: &Frame, line: u32) -> Frame {
    let mut frame = frame.clone();
    match frame.kind {
        _ if line == 0 => {}
        FrameKind::Python => frame.first_line = line,
        _ => frame.name = format!("{}:{line}", frame.name),
    }
    frame
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::build::Builder;
    use crate::labels::Labels;
    use crate::model::Meta;
    use crate::stats::Stats;
    use crate::values::ValueType;

    fn profile() -> Profile {
        let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL]);
        let f = builder.frame(Frame::python("f", "f", "a.py", 1));
        let g = builder.frame(Frame::native("g", "g.so", 16));
        builder.sample(1, (1, 1), &[(f, 9)], &[1, 10]);
        builder.sample(2, (1, 1), &[(f, 12), (g, 0)], &[1, 300]);
        builder.sample(3, (1, 1), &[(f, 12), (g, 7)], &[1, 5]);
        builder.finish(Meta::default())
    }

    #[test]
    fn a_value_becomes_the_count() {
        let wall = by_value(profile(), 1);
        let counts: Vec<u64> = wall.nodes.iter().map(|node| node.count).collect();
        assert_eq!((counts, wall.count_type()), (vec![315, 315, 305], &ValueType::WALL));
        assert_eq!(wall.nodes[1].lines, BTreeMap::from([(9, 10), (12, 305)]));
        assert_eq!(wall.nodes[1].self_lines, BTreeMap::from([(9, 10)]));
        assert_eq!(
            wall.nodes[2].lines,
            BTreeMap::from([(7, 5)]),
            "of the others no line is known"
        );
        assert!(wall.is_timed());
        assert_eq!(
            (wall.amounts(1), &wall.values[1].kind),
            (vec![3, 3, 2], &ValueType::SAMPLES)
        );
        assert_eq!(wall.sample_amount(1, 2), 1);
        let mut cpu = profile();
        cpu.values[1] = Value::per_count(ValueType::CPU, 100);
        let cpu = by_value(cpu, 1);
        assert_eq!((cpu.nodes[0].count, cpu.nodes[1].lines[&12]), (300, 200));
        assert!(cpu.is_timed());
        assert_eq!((cpu.amounts(1), cpu.sample_amount(1, 0)), (vec![3, 3, 2], 1));
        assert_eq!(by_value(profile(), 9), profile());
        assert_eq!(by_value(profile(), 0), profile());
    }

    #[test]
    fn samples_are_kept_by_their_labels() {
        let mut all = profile();
        let set = |span: &str| vec![("span".to_string(), span.to_string())];
        all.labels = Labels::new(&[vec![], set("a"), set("b")], vec![1, 2, 0]);
        let filter = |value: &str| LabelFilter {
            key: "span".into(),
            value: value.into(),
        };
        let of = |filters: &[LabelFilter]| {
            let kept = by_labels(&all, filters);
            let counts: Vec<u64> = kept.nodes.iter().map(|node| node.count).collect();
            (counts, kept.amounts(1), kept.timeline.len())
        };
        assert_eq!(of(&[filter("a")]), (vec![1, 1], vec![10, 10], 1));
        assert_eq!(of(&[filter("b")]), (vec![1, 1, 1], vec![300, 300, 300], 1));
        assert_eq!(of(&[filter("a"), filter("b")]), (vec![0], vec![0], 0));
        assert_eq!(of(&[]).0, [3, 3, 2]);
        let kept = by_labels(&all, &[filter("b")]);
        assert_eq!(kept.nodes[1].lines, BTreeMap::from([(12, 1)]));
        assert_eq!(kept.labels.of(0), set("b"));
    }

    #[test]
    fn lines_become_functions() {
        let lines = by_line(&profile());
        let shown: Vec<_> = lines
            .nodes
            .iter()
            .map(|node| {
                let frame = &lines.frames[node.frame as usize];
                (frame.name.as_str(), frame.first_line, node.count)
            })
            .collect();
        assert_eq!(
            shown,
            [("root", 0, 3), ("f", 9, 1), ("f", 12, 2), ("g", 0, 1), ("g:7", 0, 1)]
        );
    }

    /// Samples count once for a line with several functions, also in amounts that differ from sample to sample.
    #[test]
    fn totals_of_lines_are_within_those_of_the_profile_and_of_functions() {
        for seed in 0u64..20 {
            let mut state = seed;
            let mut next = |below: u64| {
                state = state
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                (state >> 33) % below
            };
            let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL]);
            let frames: Vec<_> = (1..6)
                .map(|n| builder.frame(Frame::python(format!("f{n}"), "", "/srv/a.py", n)))
                .collect();
            let mut stacks: Vec<(BTreeSet<u32>, u64)> = Vec::new();
            for time in 0..200 {
                let depth = 1 + next(7);
                // Functions share lines, and some lines are unknown.
                let stack: Vec<_> = (0..depth).map(|_| (frames[next(5) as usize], next(4) as u32)).collect();
                let amount = next(9) * 1_000;
                // The places of some samples are unknown in every second profile.
                if seed % 2 == 1 && next(3) == 0 {
                    builder.add(&stack, &[1, amount]);
                } else {
                    builder.sample(time, (1, 1), &stack, &[1, amount]);
                }
                stacks.push((stack.iter().map(|(_, line)| *line).collect(), amount));
            }
            let profile = by_value(builder.finish(Meta::default()), 1);
            let stats = Stats::new(&profile);
            assert_eq!(stats.samples(), stacks.iter().map(|(_, amount)| amount).sum::<u64>());
            let rows = stats.file_lines();
            for row in &rows {
                let with = stacks.iter().filter(|(lines, _)| lines.contains(&row.line));
                let with: u64 = with.map(|(_, amount)| amount).sum();
                let (line, total) = (row.line, row.counts.total);
                assert!(total <= stats.samples(), "line {line}: {total} of {}", stats.samples());
                assert!(seed % 2 == 1 || total == with, "line {line}: {total} of {with}");
            }
            let functions = stats.functions();
            let mut sums = vec![0; functions.len()];
            for line in stats.lines() {
                let of_file = rows.iter().find(|row| row.line == line.line).unwrap();
                sums[line.function as usize] += of_file.counts.total;
            }
            for (function, (sum, counts)) in sums.iter().zip(&functions).enumerate() {
                assert!(*sum >= counts.total, "function {function}: {sum} of {}", counts.total);
            }
        }
    }
}
