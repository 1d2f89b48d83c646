//! Several profiles as one: trees summed, timelines side by side, facts kept as far as they hold for all.
//!
//! Functions of one identifier are one, in whatever process or on whatever machine they ran. Where recordings lie close
//! together in time their timelines keep their distance; else all of them begin at 0.
//!
//! The sum has the value types of all of them, and each is summed over the profiles that have it. One that is the same
//! multiple of the count everywhere stays so, another one gets an amount for each node: the CPU time of recordings of
//! different rates, for example. If the profiles count different things, samples in one and calls in another, the count
//! is the sum of both, its type is called `count`, and `samples` and `calls` become values of their own.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::export::view::{View, add_lines};
use crate::tree::profile::{Frame, FrameId, FrameKind, Meta, ModuleMeta, Node, NodeId, Part, Profile, Quality, Tick};
use rustc_hash::FxHashMap;

mod values;

/// Numbers of processes that no kernel gives (PID_MAX_LIMIT of Linux 6): for those of another machine whose number is
/// taken.
const FOREIGN: u32 = 1 << 22;

/// Recordings keep their distance in time if all of it takes at most this many times what was recorded.
const CLOSE: f64 = 10.0;

/// The sum of some profiles; each with a name to tell it by, say its file's.
pub fn combine(profiles: &[(String, Profile)]) -> Profile {
    let mut sum = Sum::default();
    for (_, profile) in profiles {
        sum.add(profile);
    }
    let metas: Vec<&Meta> = profiles.iter().map(|(_, profile)| &profile.meta).collect();
    let (shifts, duration) = shifts(&metas);
    let numbers = numbers(&metas, profiles, &shifts);
    // With the profile and the place in its timeline that each is from.
    let mut ticks: Vec<(Tick, (usize, usize))> = Vec::new();
    for (from, (((_, profile), place), (shift, numbers))) in profiles
        .iter()
        .zip(&sum.places)
        .zip(shifts.iter().zip(&numbers))
        .enumerate()
    {
        ticks.extend(profile.timeline.iter().enumerate().filter_map(|(at, tick)| {
            let tick = Tick {
                time: tick.time.saturating_add(*shift),
                pid: numbers.get(&tick.pid).copied().unwrap_or(tick.pid),
                node: *place.get(tick.node as usize)?.as_ref()?,
                ..*tick
            };
            Some((tick, (from, at)))
        }));
    }
    ticks.sort_by_key(|(tick, _)| tick.time);
    let origins: Vec<(usize, usize)> = ticks.iter().map(|(_, origin)| *origin).collect();
    let values = values::sum(profiles, &sum.places, sum.nodes.len(), &origins);
    let mut meta = facts(&metas, &numbers);
    meta.duration = duration;
    meta.parts = parts(profiles);
    let mut profile = Profile {
        meta,
        frames: sum.frames,
        nodes: sum.nodes,
        timeline: ticks.into_iter().map(|(tick, _)| tick).collect(),
        values,
        ..Profile::default()
    };
    let own = profile.own_counts();
    for (node, own) in profile.nodes.iter_mut().zip(own) {
        if own == node.count {
            node.self_lines = BTreeMap::new();
        }
    }
    profile
}

#[derive(Default)]
struct Sum {
    frames: Vec<Frame>,
    /// By identifier. Names may come from anybody: a hasher that cannot be made to collide.
    known: HashMap<String, FrameId>,
    nodes: Vec<Node>,
    children: FxHashMap<(NodeId, FrameId), NodeId>,
    /// By profile and node of it, the node here; `None` if it was broken.
    places: Vec<Vec<Option<NodeId>>>,
}

impl Sum {
    fn frame(&mut self, identifier: &str, frame: &Frame) -> FrameId {
        if let Some(known) = self.known.get(identifier) {
            return *known;
        }
        self.frames.push(frame.clone());
        let id = self.frames.len() as FrameId - 1;
        self.known.insert(identifier.to_string(), id);
        id
    }

    fn add(&mut self, profile: &Profile) {
        let view = View::new(profile);
        if self.nodes.is_empty() {
            self.frames.push(Frame::new(FrameKind::Root, "root"));
            self.nodes.push(Node::new(0, 0));
        }
        let mut place: Vec<NodeId> = Vec::with_capacity(view.items.len());
        for (index, item) in (0u32..).zip(&view.items) {
            let here = match view.frame(index) {
                None => 0,
                Some(frame) => {
                    let frame = self.frame(&view.identifiers[item.identifier as usize], frame);
                    let parent = place[item.parent as usize];
                    let nodes = &mut self.nodes;
                    *self.children.entry((parent, frame)).or_insert_with(|| {
                        nodes.push(Node::new(frame, parent));
                        nodes.len() as NodeId - 1
                    })
                }
            };
            place.push(here);
            let node = &mut self.nodes[here as usize];
            node.count = node.count.saturating_add(item.count);
            add_lines(&mut node.lines, &item.lines);
            add_lines(&mut node.self_lines, &item.self_lines);
            if node.first_seen_line == 0 {
                node.first_seen_line = item.first_seen_line;
                node.line_text = item.line_text.to_string();
            }
        }
        let of_nodes = 0..profile.nodes.len() as u32;
        let places = of_nodes.map(|node| Some(place[view.item_of(node)? as usize]));
        self.places.push(places.collect());
    }
}

/// By profile, ns to add to its times; and the seconds that all of them take.
fn shifts(metas: &[&Meta]) -> (Vec<u64>, f64) {
    let seconds = |n: f64| if n.is_finite() { n.max(0.0) } else { 0.0 };
    let longest = metas.iter().map(|meta| seconds(meta.duration)).fold(0.0, f64::max);
    let recorded: f64 = metas.iter().map(|meta| seconds(meta.duration)).sum();
    let first = metas
        .iter()
        .map(|meta| seconds(meta.start))
        .fold(f64::INFINITY, f64::min);
    let ends = metas.iter().map(|meta| seconds(meta.start) + seconds(meta.duration));
    let all = ends.fold(0.0, f64::max) - first;
    // A start of 0 is one that is not known.
    if first > 0.0 && all <= CLOSE * recorded {
        let shift = |meta: &&Meta| ((seconds(meta.start) - first) * 1e9) as u64;
        return (metas.iter().map(shift).collect(), all);
    }
    (vec![0; metas.len()], longest)
}

/// By profile, the new numbers of processes whose old one is taken by a process of another profile. One process that
/// was recorded twice keeps its number: its recordings do not overlap, and tell of the same command.
fn numbers(metas: &[&Meta], profiles: &[(String, Profile)], shifts: &[u64]) -> Vec<BTreeMap<u32, u32>> {
    let mut taken: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    let mut next = FOREIGN;
    let ends = profiles
        .iter()
        .map(|(_, profile)| profile.timeline.iter().map(|tick| tick.time).max().unwrap_or(0));
    let spans: Vec<(u64, u64)> = shifts
        .iter()
        .zip(ends)
        .map(|(shift, end)| (*shift, shift.saturating_add(end)))
        .collect();
    let other = |a: usize, b: usize| {
        let ((start_a, end_a), (start_b, end_b)) = (spans[a], spans[b]);
        metas[a].command != metas[b].command || start_a <= end_b && start_b <= end_a
    };
    let mut all = Vec::new();
    for (at, (_, profile)) in profiles.iter().enumerate() {
        let named = profile.meta.threads.iter().map(|(pid, ..)| *pid);
        let pids: BTreeSet<u32> = profile.timeline.iter().map(|tick| tick.pid).chain(named).collect();
        let mut changed = BTreeMap::new();
        for pid in pids {
            let holders = taken.entry(pid).or_default();
            if holders.iter().any(|holder| other(*holder, at)) {
                changed.insert(pid, next);
                next = next.saturating_add(1);
            } else {
                holders.push(at);
            }
        }
        all.push(changed);
    }
    all
}

/// What the profiles have in common, and sums. Different words stand side by side; a number that is not the same for
/// all is not known any more.
fn facts(metas: &[&Meta], numbers: &[BTreeMap<u32, u32>]) -> Meta {
    let words = |get: fn(&Meta) -> &String| {
        let mut seen = BTreeSet::new();
        let all = metas.iter().map(|meta| get(meta).as_str());
        all.filter(|word| !word.is_empty() && seen.insert(*word))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let same = |get: fn(&Meta) -> u64| {
        let first = metas.first().map_or(0, |meta| get(meta));
        if metas.iter().all(|meta| get(meta) == first) {
            first
        } else {
            0
        }
    };
    let starts = metas.iter().map(|meta| meta.start).filter(|start| *start > 0.0);
    let start = starts.fold(f64::INFINITY, f64::min);
    let mut quality = Quality::default();
    for q in metas.iter().map(|meta| &meta.quality) {
        for (sum, more) in [
            (&mut quality.asked, q.asked),
            (&mut quality.taken, q.taken),
            (&mut quality.exact, q.exact),
            (&mut quality.repaired, q.repaired),
            (&mut quality.partial, q.partial),
            (&mut quality.lost, q.lost),
        ] {
            *sum = sum.saturating_add(more);
        }
        for (reason, count) in &q.reasons {
            let sum = quality.reasons.entry(reason.clone()).or_default();
            *sum = sum.saturating_add(*count);
        }
    }
    let mut modules: BTreeMap<(&str, &str), ModuleMeta> = BTreeMap::new();
    for module in metas.iter().flat_map(|meta| &meta.modules) {
        let row = modules.entry((&module.path, &module.build_id));
        let row = row.or_insert_with(|| ModuleMeta {
            frames: 0,
            unnamed: 0,
            samples: 0,
            ..module.clone()
        });
        row.frames = row.frames.saturating_add(module.frames);
        row.unnamed = row.unnamed.saturating_add(module.unnamed);
        row.samples = row.samples.saturating_add(module.samples);
    }
    let mut modules = modules.into_values().collect::<Vec<_>>();
    modules.sort_by(|a, b| (b.samples, &a.path).cmp(&(a.samples, &b.path)));
    let mut threads = BTreeMap::new();
    for (meta, numbers) in metas.iter().zip(numbers) {
        for (pid, tid, name) in &meta.threads {
            let pid = numbers.get(pid).copied().unwrap_or(*pid);
            threads.entry((pid, *tid)).or_insert_with(|| name.clone());
        }
    }
    let mut held = metas.iter().filter_map(|meta| meta.held);
    Meta {
        version: env!("CARGO_PKG_VERSION").into(),
        rate: same(|meta| meta.rate),
        event: words(|meta| &meta.event),
        backend: words(|meta| &meta.backend),
        start: if start.is_finite() { start } else { 0.0 },
        command: words(|meta| &meta.command),
        pid: same(|meta| meta.pid.into()) as u32,
        python: words(|meta| &meta.python),
        // Of medians there is none.
        held: held.next().filter(|_| held.next().is_none()),
        quality,
        own_cpu: metas.iter().map(|meta| meta.own_cpu).sum(),
        modules,
        threads: threads.into_iter().map(|((pid, tid), name)| (pid, tid, name)).collect(),
        ..Meta::default()
    }
}

/// What was put together; of a profile that was itself put together, its parts.
fn parts(profiles: &[(String, Profile)]) -> Vec<Part> {
    let parts = profiles
        .iter()
        .flat_map(|(name, profile)| match profile.meta.parts.as_slice() {
            [] => vec![Part {
                name: name.clone(),
                command: profile.meta.command.clone(),
                rate: profile.meta.rate,
                start: profile.meta.start,
                duration: profile.meta.duration,
                samples: profile.nodes.first().map_or(0, |root| root.count),
            }],
            parts => parts.to_vec(),
        });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: FrameKind, name: &str, source: &str) -> Frame {
        Frame {
            kind,
            name: name.into(),
            qualname: String::new(),
            filename: String::new(),
            first_line: 0,
            address: 0,
            module: String::new(),
            source: source.into(),
        }
    }

    /// `f` with `own` samples at line 3, and a callee with `below` samples; one tick for each of the two.
    fn profile(command: &str, start: f64, own: u64, below: u64, callee: &str) -> Profile {
        let mut root = Node::new(0, 0);
        root.count = own + below;
        let f = Node {
            count: own + below,
            lines: BTreeMap::from([(3, own), (4, below)]),
            self_lines: BTreeMap::from([(3, own)]),
            first_seen_line: 3,
            ..Node::new(1, 0)
        };
        let g = Node {
            count: below,
            lines: BTreeMap::from([(9, below)]),
            first_seen_line: 9,
            ..Node::new(2, 1)
        };
        let tick = |time, node| Tick {
            time,
            pid: 7,
            tid: 8,
            node,
        };
        Profile {
            meta: Meta {
                rate: 100,
                command: command.into(),
                start,
                duration: 2.0,
                pid: 7,
                quality: Quality {
                    taken: own + below,
                    reasons: BTreeMap::from([("gone".into(), own)]),
                    ..Quality::default()
                },
                threads: vec![(7, 8, command.into())],
                ..Meta::default()
            },
            frames: vec![
                frame(FrameKind::Root, "root", ""),
                frame(FrameKind::Native, "f", command),
                frame(FrameKind::Native, callee, ""),
            ],
            nodes: vec![root, f, g],
            timeline: vec![tick(1_000_000_000, 1), tick(1_500_000_000, 2)],
            ..Profile::default()
        }
    }

    #[test]
    fn values_are_united() {
        use crate::tree::build::Builder;
        use crate::tree::values::{Amounts, Value, ValueType};

        let sampled = |rate, start| {
            let mut p = profile("a", start, 3, 4, "g");
            p.meta.rate = rate;
            p.values = Value::of_sampling("cpu-clock", rate);
            p
        };
        let shown = |all: &Profile| {
            let types = all.value_types().iter().enumerate();
            types
                .map(|(at, value)| (value.kind.key(), value.is_per_count(), all.amounts(at)))
                .collect::<Vec<_>>()
        };
        let of = |key: &str, per_count, amounts: &[u64]| (key.to_string(), per_count, amounts.to_vec());
        let all = sum(&[sampled(100, 50.0), sampled(100, 51.0)]);
        let cpu = [140_000_000, 140_000_000, 80_000_000];
        assert_eq!(
            shown(&all),
            [of("samples", true, &[14, 14, 8]), of("cpu_ns", true, &cpu)]
        );
        // At ten times the rate a sample is a tenth of the time.
        let all = sum(&[sampled(100, 50.0), sampled(1000, 51.0)]);
        let cpu = [77_000_000, 77_000_000, 44_000_000];
        assert_eq!(
            shown(&all),
            [of("samples", true, &[14, 14, 8]), of("cpu_ns", false, &cpu)]
        );
        let ticks: Vec<u64> = (0..4).map(|tick| all.tick_amount(1, tick)).collect();
        assert_eq!(ticks, [10_000_000, 10_000_000, 1_000_000, 1_000_000]);
        // Calls and samples.
        let mut builder = Builder::new(&[ValueType::CALLS, ValueType::CPU]);
        let f = builder.frame(frame(FrameKind::Native, "f", ""));
        builder.add(&[(f, 0)], &[2, 500]);
        let calls = builder.finish(Meta::default());
        let all = sum(&[sampled(100, 50.0), calls.clone()]);
        let expected = [
            of("count", true, &[9, 9, 4]),
            of("samples", false, &[7, 7, 4]),
            of("cpu_ns", false, &[70_000_500, 70_000_500, 40_000_000]),
            of("calls", false, &[2, 2, 0]),
        ];
        assert_eq!(shown(&all), expected);
        assert_eq!(
            shown(&sum(&[all, calls]))[3],
            of("calls", false, &[4, 4, 0]),
            "and again"
        );
        // Sums of what one profile lacks.
        let plain = Profile {
            values: Vec::new(),
            ..sampled(100, 50.0)
        };
        let all = sum(&[plain, sampled(100, 51.0)]);
        assert_eq!(
            shown(&all)[1],
            of("cpu_ns", false, &[70_000_000, 70_000_000, 40_000_000])
        );
        assert!(matches!(all.values[0].amounts, Amounts::PerCount(1)));
    }

    fn sum(profiles: &[Profile]) -> Profile {
        let named: Vec<_> = profiles.iter().map(|p| (p.meta.command.clone(), p.clone())).collect();
        combine(&named)
    }

    #[test]
    fn trees_are_summed() {
        let all = sum(&[
            profile("a", 50.0, 3, 4, "g"),
            profile("b", 51.0, 5, 6, "g"),
            profile("c", 52.0, 0, 1, "h"),
        ]);
        let counts: Vec<_> = all
            .nodes
            .iter()
            .map(|n| (all.frames[n.frame as usize].name.as_str(), n.count))
            .collect();
        assert_eq!(counts, [("root", 19), ("f", 19), ("g", 10), ("h", 1)]);
        assert_eq!(all.nodes[1].lines, BTreeMap::from([(3, 8), (4, 11)]));
        let own = all.own_counts()[1];
        assert_eq!(*all.nodes[1].own_lines(own), BTreeMap::from([(3, 8)]));
        assert_eq!(*all.nodes[2].own_lines(10), BTreeMap::from([(9, 10)]));
        assert_eq!((all.meta.quality.taken, all.meta.quality.reasons["gone"]), (19, 8));
        assert_eq!(
            (all.meta.rate, all.meta.pid, all.meta.command.as_str()),
            (100, 7, "a, b, c")
        );
        let parts: Vec<_> = all
            .meta
            .parts
            .iter()
            .map(|part| (part.name.as_str(), part.samples))
            .collect();
        assert_eq!(parts, [("a", 7), ("b", 11), ("c", 1)]);
    }

    #[test]
    fn one_profile_stays_as_it_is() {
        let one = profile("a", 50.0, 3, 4, "g");
        let all = sum(std::slice::from_ref(&one));
        assert_eq!(
            (&all.nodes, &all.frames, &all.timeline),
            (&one.nodes, &one.frames, &one.timeline)
        );
        assert_eq!(
            sum(std::slice::from_ref(&all)).meta.parts,
            all.meta.parts,
            "no parts of parts"
        );
    }

    #[test]
    fn timelines_lie_side_by_side() {
        let times = |all: &Profile| {
            all.timeline
                .iter()
                .map(|tick| (tick.time / 1_000_000, tick.pid))
                .collect::<Vec<_>>()
        };
        // The same process, one recording after the other.
        let all = sum(&[profile("a", 50.0, 1, 1, "g"), profile("a", 53.0, 1, 1, "g")]);
        assert_eq!(times(&all), [(1000, 7), (1500, 7), (4000, 7), (4500, 7)]);
        assert_eq!((all.meta.start, all.meta.duration), (50.0, 5.0));
        // On two machines at once: two processes of one number.
        let all = sum(&[profile("a", 50.0, 1, 1, "g"), profile("a", 50.2, 1, 1, "g")]);
        assert_eq!(times(&all), [(1000, 7), (1200, FOREIGN), (1500, 7), (1700, FOREIGN)]);
        assert_eq!(all.meta.threads.len(), 2);
        // Years apart, or nobody knows when.
        for start in [5e8, 0.0] {
            let all = sum(&[profile("a", 1e9, 1, 1, "g"), profile("b", start, 1, 1, "g")]);
            assert_eq!(times(&all), [(1000, 7), (1000, FOREIGN), (1500, 7), (1500, FOREIGN)]);
            assert_eq!(all.meta.duration, 2.0);
        }
    }

    #[test]
    fn what_differs_is_not_known() {
        let mut other = profile("b", 51.0, 5, 6, "g");
        other.meta.rate = 999;
        other.meta.pid = 9;
        let all = sum(&[profile("a", 50.0, 3, 4, "g"), other]);
        assert_eq!((all.meta.rate, all.meta.pid), (0, 0));
        assert_eq!(combine(&[]).nodes.len(), 0);
    }
}
