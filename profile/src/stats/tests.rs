use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::model::{NO_PLACE, Node};
use crate::places::Places;

/// Stacks of functions `0..9`, outermost first, each at a line that is the function's number or ten more.
fn profile(stacks: &[Vec<u8>]) -> Profile {
    let root = Frame::new(FrameKind::Root, "root");
    let function = |n: u32| Frame {
        kind: FrameKind::Python,
        name: format!("f{n}"),
        filename: format!("{}.py", n % 2),
        first_line: n,
        ..root.clone()
    };
    let mut frames: Vec<Frame> = (0..10).map(function).collect();
    frames.push(root.clone());
    let node = Node::new;
    let mut nodes = vec![node(10, 0)];
    for stack in stacks {
        let mut at = 0;
        nodes[0].count += 1;
        for (depth, f) in stack.iter().enumerate() {
            let (frame, line) = (u32::from(f % 10), u32::from(*f));
            let known = (1..nodes.len()).find(|n| nodes[*n].parent == at && nodes[*n].frame == frame);
            at = known.unwrap_or_else(|| {
                nodes.push(node(frame, at));
                nodes.len() - 1
            }) as NodeId;
            let node = &mut nodes[at as usize];
            node.count += 1;
            *node.lines.entry(line).or_default() += 1;
            if depth + 1 == stack.len() {
                *node.self_lines.entry(line).or_default() += 1;
            }
        }
    }
    Profile {
        frames,
        nodes,
        ..Profile::default()
    }
}

fn random_stacks(mut state: u64, functions: u64) -> Vec<Vec<u8>> {
    let mut next = |below: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    (0..300)
        .map(|_| (0..next(9)).map(|_| (next(functions) + 10 * next(2)) as u8).collect())
        .collect()
}

/// The same counts stack by stack, by sets.
#[test]
fn tables_agree_with_the_stacks() {
    for seed in 0..20 {
        let stacks = random_stacks(seed, 2 + seed % 5);
        let profile = profile(&stacks);
        let stats = Stats::new(&profile);
        assert_eq!(stats.samples(), 300);
        let mut functions = vec![SelfTotal::default(); 10];
        let mut modules: BTreeMap<String, SelfTotal> = BTreeMap::new();
        let mut calls: BTreeMap<(Option<u32>, u32), SelfTotal> = BTreeMap::new();
        let mut self_lines: BTreeMap<(u32, u32), u64> = BTreeMap::new();
        for stack in &stacks {
            let f: Vec<u32> = stack.iter().map(|f| u32::from(f % 10)).collect();
            for id in BTreeSet::from_iter(&f) {
                functions[*id as usize].total += 1;
            }
            for name in f.iter().map(|id| format!("{}.py", id % 2)).collect::<BTreeSet<_>>() {
                modules.entry(name).or_default().total += 1;
            }
            let edges: Vec<_> = f
                .iter()
                .enumerate()
                .map(|(i, id)| (i.checked_sub(1).map(|i| f[i]), *id))
                .collect();
            for edge in BTreeSet::from_iter(&edges) {
                calls.entry(*edge).or_default().total += 1;
            }
            if let Some(last) = f.last() {
                functions[*last as usize].self_count += 1;
                modules.entry(format!("{}.py", last % 2)).or_default().self_count += 1;
                calls.entry(*edges.last().unwrap()).or_default().self_count += 1;
                *self_lines.entry((*last, stack[stack.len() - 1].into())).or_default() += 1;
            }
        }
        assert_eq!(stats.functions(), functions);
        let seen = stats.modules().into_iter().map(|(name, c)| (name.to_string(), c));
        assert_eq!(seen.collect::<BTreeMap<_, _>>(), modules);
        let seen = stats.calls().into_iter().map(|c| ((c.caller, c.callee), c.counts));
        assert_eq!(seen.collect::<BTreeMap<_, _>>(), calls);
        let lines = stats.lines();
        let seen = lines.iter().filter(|l| l.counts.self_count > 0);
        let seen = seen.map(|l| ((l.function, l.line), l.counts.self_count));
        assert_eq!(seen.collect::<BTreeMap<_, _>>(), self_lines);
        for line in lines {
            let with = |f: &&Vec<u8>| {
                f.iter()
                    .any(|f| (u32::from(f % 10), u32::from(*f)) == (line.function, line.line))
            };
            assert!(
                line.counts.total <= stacks.iter().filter(with).count() as u64,
                "{line:?}"
            );
        }
    }
}

#[test]
fn totals_of_lines_are_exact_without_recursion() {
    let stacks: Vec<Vec<u8>> = vec![vec![0, 1], vec![10, 1], vec![10, 11], vec![10], vec![0, 2, 13]];
    let profile = profile(&stacks);
    let mut lines = Stats::new(&profile).lines();
    lines.sort_by_key(|l| (l.function, l.line));
    let rows: Vec<_> = lines
        .iter()
        .map(|l| (l.line, l.counts.self_count, l.counts.total))
        .collect();
    assert_eq!(
        rows,
        [(0, 0, 2), (10, 1, 3), (1, 2, 2), (11, 1, 1), (2, 0, 1), (13, 1, 1)]
    );
}

/// Stacks of functions at lines, all in one file, outermost first; the first `placed` of them with their places.
fn in_one_file(stacks: &[Vec<(u32, u32)>], placed: usize) -> Profile {
    let mut profile = profile(&[]);
    profile.frames[..10]
        .iter_mut()
        .for_each(|frame| frame.filename = "a.py".into());
    let mut places = Places::default();
    for (sample, stack) in stacks.iter().enumerate() {
        profile.nodes[0].count += 1;
        let (mut at, mut place) = (0, 0);
        for (depth, (frame, line)) in stack.iter().enumerate() {
            let nodes = &mut profile.nodes;
            let known = (1..nodes.len()).find(|n| nodes[*n].parent == at && nodes[*n].frame == *frame);
            at = known.unwrap_or_else(|| {
                nodes.push(Node::new(*frame, at));
                nodes.len() - 1
            }) as NodeId;
            let node = &mut nodes[at as usize];
            node.count += 1;
            if *line > 0 {
                *node.lines.entry(*line).or_default() += 1;
                if depth + 1 == stack.len() {
                    *node.self_lines.entry(*line).or_default() += 1;
                }
            }
            place = places.child(place, at, *line);
        }
        let (time, pid, tid) = (sample as u64, 7, 7);
        profile.timeline.push(TimelineSample {
            time,
            pid,
            tid,
            node: at,
        });
        let is_placed = sample < placed;
        profile.sample_places.push(if is_placed { place } else { NO_PLACE });
    }
    profile.places = places.all;
    profile
}

fn by_file_line(profile: &Profile) -> BTreeMap<u32, (u64, u64)> {
    let rows = Stats::new(profile).file_lines().into_iter();
    let known = rows.filter(|row| row.line > 0);
    known
        .map(|row| (row.line, (row.counts.self_count, row.counts.total)))
        .collect()
}

/// A function with a generator expression on its line, which it iterates over by a built-in function.
#[test]
fn a_sample_counts_once_for_a_line_with_several_functions() {
    const SUM: u32 = 9;
    let generator = vec![(0, 9), (1, 2), (SUM, 0), (2, 2)];
    let within = vec![(0, 9), (1, 2), (SUM, 0)];
    let stacks = [vec![generator; 3], vec![within; 2], vec![vec![(0, 9), (1, 3)]]].concat();
    for placed in [0, 2, stacks.len()] {
        let mut profile = in_one_file(&stacks, placed);
        profile.frames[SUM as usize] = Frame::native("sum", "python", 4096);
        let rows = Stats::new(&profile).file_lines();
        let row = |file, line| {
            let found = rows.iter().find(|row| (row.file, row.line) == (file, line)).unwrap();
            (found.function, found.counts.self_count, found.counts.total)
        };
        assert_eq!(row("a.py", 2), (1, 3, 5), "{placed} with places");
        assert_eq!(row("a.py", 3), (1, 1, 1));
        assert_eq!(row("a.py", 9), (0, 0, 6));
        assert_eq!(row("", 0), (SUM, 2, 5));
    }
}

#[test]
fn recursion_from_several_lines_counts_once_where_places_are_known() {
    let stacks = [vec![(1, 4), (1, 5), (1, 4)], vec![(1, 5), (1, 4)], vec![(1, 5), (1, 6)]];
    let known = BTreeMap::from([(4, (2, 2)), (5, (0, 3)), (6, (1, 1))]);
    assert_eq!(by_file_line(&in_one_file(&stacks, 3)), known);
    // Those of node by node, since it is unknown which samples have which lines.
    assert_eq!(by_file_line(&in_one_file(&stacks, 0))[&5], (0, 2));
    // Places that do not fit the tree are not used.
    let mut broken = in_one_file(&stacks, 3);
    broken.timeline.extend_from_within(..);
    broken.sample_places.extend_from_within(..);
    assert_eq!(by_file_line(&broken), by_file_line(&in_one_file(&stacks, 0)));
}

#[test]
fn totals_of_lines_are_within_those_of_the_profile_and_of_functions() {
    for seed in 0..10 {
        let stacks = random_stacks(seed, 2 + seed % 5);
        // Functions share lines, and some lines are unknown.
        let at = |f: &u8| (u32::from(f % 10), u32::from(f / 2 % 4));
        let stacks: Vec<Vec<(u32, u32)>> = stacks.iter().map(|stack| stack.iter().map(at).collect()).collect();
        for placed in [0, 120, stacks.len()] {
            let profile = in_one_file(&stacks, placed);
            let stats = Stats::new(&profile);
            let lines = by_file_line(&profile);
            for (line, (self_count, total)) in &lines {
                let with = stacks
                    .iter()
                    .filter(|stack| stack.iter().any(|at| at.1 == *line))
                    .count() as u64;
                let last = stacks
                    .iter()
                    .filter(|stack| stack.last().is_some_and(|at| at.1 == *line));
                assert_eq!(*self_count, last.count() as u64);
                assert!(*total <= with, "line {line}: {total} of {with}");
                assert!(
                    placed < stacks.len() || *total == with,
                    "line {line}: {total} of {with}"
                );
            }
            let functions = stats.functions();
            let mut of_function: BTreeMap<FunctionId, BTreeSet<u32>> = BTreeMap::new();
            for row in stats.lines() {
                of_function.entry(row.function).or_default().insert(row.line);
            }
            let rows = stats.file_lines();
            let at = |line| rows.iter().find(|row| row.line == line).unwrap().counts.total;
            for (function, own) in of_function {
                let sum: u64 = own.iter().map(|line| at(*line)).sum();
                assert!(sum >= functions[function as usize].total, "function {function}: {sum}");
            }
        }
    }
}

#[test]
fn some_samples_only() {
    let mut profile = profile(&[vec![0, 1], vec![0, 2], vec![3]]);
    let sample = |node, tid| TimelineSample {
        time: 0,
        pid: 7,
        tid,
        node,
    };
    profile.timeline = vec![sample(2, 1), sample(2, 1), sample(3, 2), sample(99, 2)];
    profile.meta.threads = vec![(7, 2, "two".into())];
    let mut stats = Stats::new(&profile);
    stats.select_samples(profile.timeline.iter().filter(|t| t.tid == 1));
    let totals: Vec<u64> = stats.functions().iter().map(|c| c.total).collect();
    assert_eq!((stats.samples(), &totals[..4]), (2, &[2, 2, 0, 0][..]));
    assert_eq!(stats.modules().len(), 2);
    let names: Vec<_> = threads(&profile)
        .into_iter()
        .map(|t| (t.tid, t.name, t.samples))
        .collect();
    assert_eq!(names, [(1, String::new(), 2), (2, "two".into(), 2)]);
}

#[test]
fn broken_and_deep_profiles_are_counted_as_far_as_they_go() {
    let mut deep = profile(&[vec![1; 5]]);
    for at in 6..200_000u32 {
        let node = Node {
            parent: at - 1,
            count: 1,
            ..deep.nodes[5].clone()
        };
        deep.nodes.push(node);
    }
    let stats = Stats::new(&deep);
    assert_eq!(
        stats.functions()[1],
        SelfTotal {
            self_count: 1,
            total: 1
        }
    );
    assert_eq!(stats.calls().len(), 2);
    let mut broken = profile(&[vec![1, 2]]);
    for (frame, parent) in [(1, 77), (77, 0), (1, 3)] {
        let node = Node {
            frame,
            parent,
            ..broken.nodes[1].clone()
        };
        broken.nodes.push(node);
    }
    let stats = Stats::new(&broken);
    assert_eq!(
        stats.functions()[2],
        SelfTotal {
            self_count: 1,
            total: 1
        }
    );
    assert!(Stats::new(&Profile::default()).functions().is_empty());
    assert_eq!(Stats::new(&Profile::default()).lines(), []);
}
