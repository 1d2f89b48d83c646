//! Merges profiles: trees are summed, timelines kept next to each other, metadata kept where it is the same for all.
//!
//! Functions with the same identifier are combined, across processes and machines. Recordings that are close in time
//! keep their relative timing; otherwise all begin at 0.
//!
//! The sum has the value types of all of them, and each is summed over the profiles that have it. One that is the same
//! multiple of the count everywhere stays so, another one gets an amount for each node: the CPU time of recordings of
//! different rates, for example. If the profiles count different things, samples in one and calls in another, the count
//! is the sum of both, its type is called `count`, and `samples` and `calls` become values of their own.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use rustc_hash::FxHashMap;

use crate::labels::Labels;
use crate::lags::Lag;
use crate::machine::Machine;
use crate::model::{
    Frame, FrameId, FrameKind, MergedRecording, Meta, ModuleMeta, NO_PLACE, Node, NodeId, Place, PlaceId, Profile,
    Quality, TimelineSample, limit_instructions,
};
use crate::places::Places;
use crate::resident::{MemoryPeak, ResidentMemory};
use crate::view::{View, add_lines};
use crate::waits::Waits;

mod values;

/// PIDs above the kernel's limit (PID_MAX_LIMIT of Linux 6): for processes of another machine whose PID is in use.
const FOREIGN: u32 = 1 << 22;

/// Recordings keep their relative timing if the complete time span is at most this many times the recorded time.
const CLOSE: f64 = 10.0;

/// The sum of some profiles, each with a name such as its file's.
pub fn combine(profiles: &[(String, Profile)]) -> Profile {
    let mut sum = ValueSum::default();
    for (_, profile) in profiles {
        sum.add(profile);
    }
    let metas: Vec<&Meta> = profiles.iter().map(|(_, profile)| &profile.meta).collect();
    let (time_offsets, duration) = time_offsets(&metas);
    let new_pids = renumber_pids(&metas, profiles, &time_offsets);
    // With the profile and the place in its timeline that each is from.
    let mut samples: Vec<(TimelineSample, (usize, usize))> = Vec::new();
    for (from, (((_, profile), place), (time_offset, new_pids))) in profiles
        .iter()
        .zip(&sum.places)
        .zip(time_offsets.iter().zip(&new_pids))
        .enumerate()
    {
        samples.extend(profile.timeline.iter().enumerate().filter_map(|(at, sample)| {
            let sample = TimelineSample {
                time: sample.time.saturating_add(*time_offset),
                pid: new_pids.get(&sample.pid).copied().unwrap_or(sample.pid),
                node: *place.get(sample.node as usize)?.as_ref()?,
                ..*sample
            };
            Some((sample, (from, at)))
        }));
    }
    samples.sort_by_key(|(sample, _)| sample.time);
    let origins: Vec<(usize, usize)> = samples.iter().map(|(_, origin)| *origin).collect();
    let (places, sample_places) = places(profiles, &sum.places, &origins);
    let values = values::sum(profiles, &sum.places, sum.nodes.len(), &origins);
    let waits: Vec<&Waits> = profiles.iter().map(|(_, profile)| &profile.waits).collect();
    let waits = Waits::merge(&waits, &origins, &|from, pid| {
        new_pids[from].get(&pid).copied().unwrap_or(pid)
    });
    let labels: Vec<&Labels> = profiles.iter().map(|(_, profile)| &profile.labels).collect();
    let labels = Labels::merge(&labels, &origins);
    let mut meta = merge_metadata(&metas, &new_pids);
    meta.duration = duration;
    meta.merged_from = parts(profiles);
    meta.lags = lags(&metas, &time_offsets, &new_pids);
    meta.memory = memory(&metas, &time_offsets, &new_pids);
    let mut profile = Profile {
        meta,
        frames: sum.frames,
        nodes: sum.nodes,
        timeline: samples.into_iter().map(|(sample, _)| sample).collect(),
        places,
        sample_places,
        values,
        waits,
        labels,
        ..Profile::default()
    };
    let self_counts = profile.self_counts();
    for (node, self_count) in profile.nodes.iter_mut().zip(self_counts) {
        if self_count == node.count {
            node.self_lines = BTreeMap::new();
        }
    }
    profile
}

/// The places of all profiles, and the place of each sample of the sum. `nodes` has the node of the sum for each node
/// of a profile, and `origins` the profile and the index in its timeline for each sample.
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
        let old = profiles[*from].1.sample_places.get(*at).copied().unwrap_or(NO_PLACE);
        moved[*from].get(old as usize).copied().unwrap_or(NO_PLACE)
    };
    let of_samples = origins.iter().map(place).collect();
    (sum.all, of_samples)
}

#[derive(Default)]
struct ValueSum {
    frames: Vec<Frame>,
    /// By identifier. Names are not trusted: the hasher resists collision attacks.
    known: HashMap<String, FrameId>,
    nodes: Vec<Node>,
    children: FxHashMap<(NodeId, FrameId), NodeId>,
    /// By profile and node of it, the node here; `None` if it was broken.
    places: Vec<Vec<Option<NodeId>>>,
}

impl ValueSum {
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

/// By profile, ns to add to its times; and the complete time span in seconds.
fn time_offsets(metas: &[&Meta]) -> (Vec<u64>, f64) {
    let seconds = |n: f64| if n.is_finite() { n.max(0.0) } else { 0.0 };
    let longest = metas.iter().map(|meta| seconds(meta.duration)).fold(0.0, f64::max);
    let recorded: f64 = metas.iter().map(|meta| seconds(meta.duration)).sum();
    let first = metas
        .iter()
        .map(|meta| seconds(meta.start))
        .fold(f64::INFINITY, f64::min);
    let ends = metas.iter().map(|meta| seconds(meta.start) + seconds(meta.duration));
    let all = ends.fold(0.0, f64::max) - first;
    // A start of 0 means unknown.
    if first > 0.0 && all <= CLOSE * recorded {
        let time_offset = |meta: &&Meta| ((seconds(meta.start) - first) * 1e9) as u64;
        return (metas.iter().map(time_offset).collect(), all);
    }
    (vec![0; metas.len()], longest)
}

/// By profile, the new PIDs of processes whose PID is used by a process of another profile. A process that was recorded
/// twice keeps its PID: its recordings do not overlap and have the same command.
fn renumber_pids(metas: &[&Meta], profiles: &[(String, Profile)], time_offsets: &[u64]) -> Vec<BTreeMap<u32, u32>> {
    let mut taken: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    let mut next = FOREIGN;
    let ends = profiles
        .iter()
        .map(|(_, profile)| profile.timeline.iter().map(|sample| sample.time).max().unwrap_or(0));
    let spans: Vec<(u64, u64)> = time_offsets
        .iter()
        .zip(ends)
        .map(|(time_offset, end)| (*time_offset, time_offset.saturating_add(end)))
        .collect();
    let other = |a: usize, b: usize| {
        let ((start_a, end_a), (start_b, end_b)) = (spans[a], spans[b]);
        metas[a].command != metas[b].command || start_a <= end_b && start_b <= end_a
    };
    let mut all = Vec::new();
    for (at, (_, profile)) in profiles.iter().enumerate() {
        let named = profile.meta.threads.iter().map(|(pid, ..)| *pid);
        let pids: BTreeSet<u32> = profile.timeline.iter().map(|sample| sample.pid).chain(named).collect();
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

/// What kept event loops for long in all of them, in chronological order.
fn lags(metas: &[&Meta], time_offsets: &[u64], new_pids: &[BTreeMap<u32, u32>]) -> Vec<Lag> {
    let mut all: Vec<Lag> = Vec::new();
    for ((meta, time_offset), new_pids) in metas.iter().zip(time_offsets).zip(new_pids) {
        all.extend(meta.lags.iter().map(|lag| Lag {
            pid: new_pids.get(&lag.pid).copied().unwrap_or(lag.pid),
            time: lag.time.saturating_add(*time_offset),
            ..lag.clone()
        }));
    }
    all.sort_by_key(|lag| (lag.time, lag.tid));
    all
}

/// The accounts of resident memory of all of them, with times since the start of the sum.
fn memory(metas: &[&Meta], time_offsets: &[u64], new_pids: &[BTreeMap<u32, u32>]) -> Vec<ResidentMemory> {
    let mut all: Vec<ResidentMemory> = Vec::new();
    for ((meta, time_offset), new_pids) in metas.iter().zip(time_offsets).zip(new_pids) {
        all.extend(meta.memory.iter().map(|account| ResidentMemory {
            pid: new_pids.get(&account.pid).copied().unwrap_or(account.pid),
            began: account.began.saturating_add(*time_offset),
            peak: account.peak.map(|peak| MemoryPeak {
                time: peak.time.saturating_add(*time_offset),
                ..peak
            }),
            ..*account
        }));
    }
    all
}

/// Common metadata and sums. Different texts are joined; a number that is not the same for all becomes unknown.
fn merge_metadata(metas: &[&Meta], new_pids: &[BTreeMap<u32, u32>]) -> Meta {
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
    for meta in metas {
        quality.add(&meta.quality);
    }
    let mut modules: BTreeMap<(&str, &str), ModuleMeta> = BTreeMap::new();
    for module in metas.iter().flat_map(|meta| &meta.modules) {
        let row = modules.entry((&module.path, &module.build_id));
        let row = row.or_insert_with(|| ModuleMeta {
            frames: 0,
            unnamed: 0,
            samples: 0,
            instructions: BTreeMap::new(),
            ..module.clone()
        });
        for (address, samples) in &module.instructions {
            let sum = row.instructions.entry(*address).or_default();
            *sum = sum.saturating_add(*samples);
        }
        row.frames = row.frames.saturating_add(module.frames);
        row.unnamed = row.unnamed.saturating_add(module.unnamed);
        row.samples = row.samples.saturating_add(module.samples);
    }
    let mut modules = modules.into_values().collect::<Vec<_>>();
    limit_instructions(&mut modules);
    modules.sort_by(|a, b| (b.samples, &a.path).cmp(&(a.samples, &b.path)));
    let mut threads = BTreeMap::new();
    for (meta, new_pids) in metas.iter().zip(new_pids) {
        for (pid, tid, name) in &meta.threads {
            let pid = new_pids.get(pid).copied().unwrap_or(*pid);
            threads.entry((pid, *tid)).or_insert_with(|| name.clone());
        }
    }
    let mut stopped = metas.iter().filter_map(|meta| meta.stopped);
    Meta {
        version: env!("CARGO_PKG_VERSION").into(),
        rate: same(|meta| meta.rate),
        event: words(|meta| &meta.event),
        backend: words(|meta| &meta.backend),
        start: if start.is_finite() { start } else { 0.0 },
        command: words(|meta| &meta.command),
        pid: same(|meta| meta.pid.into()) as u32,
        python: words(|meta| &meta.python),
        machine: Machine::merged(metas.iter().map(|meta| &meta.machine)),
        // Of medians there is none.
        stopped: stopped.next().filter(|_| stopped.next().is_none()),
        quality,
        profiler_cpu: metas.iter().map(|meta| meta.profiler_cpu).sum(),
        sampling_cpu: sum_of_known(metas.iter().map(|meta| meta.sampling_cpu)),
        target_cpu: sum_of_known(metas.iter().map(|meta| meta.target_cpu)),
        modules,
        threads: threads.into_iter().map(|((pid, tid), name)| (pid, tid, name)).collect(),
        ..Meta::default()
    }
}

/// The sum of seconds; 0, not known, if one of them is.
fn sum_of_known(seconds: impl Iterator<Item = f64> + Clone) -> f64 {
    if seconds.clone().all(|seconds| seconds > 0.0) {
        seconds.sum()
    } else {
        0.0
    }
}

/// What was merged; of a profile that was itself merged, its parts.
fn parts(profiles: &[(String, Profile)]) -> Vec<MergedRecording> {
    let parts = profiles
        .iter()
        .flat_map(|(name, profile)| match profile.meta.merged_from.as_slice() {
            [] => vec![MergedRecording {
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
