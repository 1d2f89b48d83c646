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

use rustc_hash::FxHashMap;

use crate::export::view::{View, add_lines};
use crate::tree::places::Places;
use crate::tree::profile::{
    Frame, FrameId, FrameKind, Meta, ModuleMeta, NO_PLACE, Node, NodeId, Part, Place, PlaceId, Profile, Quality, Tick,
};

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
    let (places, tick_places) = places(profiles, &sum.places, &origins);
    let values = values::sum(profiles, &sum.places, sum.nodes.len(), &origins);
    let mut meta = facts(&metas, &numbers);
    meta.duration = duration;
    meta.parts = parts(profiles);
    let mut profile = Profile {
        meta,
        frames: sum.frames,
        nodes: sum.nodes,
        timeline: ticks.into_iter().map(|(tick, _)| tick).collect(),
        places,
        tick_places,
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

/// The places of all profiles, and the place of each sample of the sum. `nodes` has the node of the sum for each node of
/// a profile, and `origins` the profile and the index in its timeline for each sample.
fn places(
    profiles: &[(String, Profile)],
    nodes: &[Vec<Option<NodeId>>],
    origins: &[(usize, usize)],
) -> (Vec<Place>, Vec<PlaceId>) {
    if profiles.iter().all(|(_, profile)| profile.places.is_empty()) {
        return (Vec::new(), Vec::new());
    }
    let mut sum = Places::default();
    let mut moved: Vec<Vec<PlaceId>> = Vec::with_capacity(profiles.len());
    for ((_, profile), nodes) in profiles.iter().zip(nodes) {
        let mut here: Vec<PlaceId> = Vec::with_capacity(profile.places.len());
        for (at, place) in profile.places.iter().enumerate() {
            let parent = here
                .get(place.parent as usize)
                .copied()
                .filter(|parent| *parent != NO_PLACE);
            let node = nodes.get(place.node as usize).copied().flatten();
            here.push(match (at, parent, node) {
                (0, ..) => 0,
                (_, Some(parent), Some(node)) => sum.child(parent, node, place.line),
                _ => NO_PLACE,
            });
        }
        moved.push(here);
    }
    let place = |(from, at): &(usize, usize)| {
        let old = profiles[*from].1.tick_places.get(*at).copied().unwrap_or(NO_PLACE);
        moved[*from].get(old as usize).copied().unwrap_or(NO_PLACE)
    };
    let of_ticks = origins.iter().map(place).collect();
    (sum.all, of_ticks)
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
mod tests;
