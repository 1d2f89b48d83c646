//! Makes a profile of stacks and amounts, without a sampling session: for tracers, allocation profilers and importers.
//!
//! ```
//! use nativeprof_profile::build::Builder;
//! use nativeprof_profile::model::{Frame, Meta};
//! use nativeprof_profile::values::ValueType;
//!
//! // A tracer of calls: the count is calls, and each node has two times.
//! let mut builder = Builder::new(&[ValueType::CALLS, ValueType::WALL, ValueType::CPU]);
//! let main = builder.frame(Frame::python("main", "main", "app.py", 1));
//! let work = builder.frame(Frame::python("work", "Job.work", "app.py", 9));
//! // Self amounts of the innermost frame: 1 call, 5 µs of wall time and 4 µs of CPU time outside its callees.
//! builder.add(&[(main, 3)], &[1, 5_000, 4_000]);
//! // Added to the amounts of the stack: 2 calls.
//! builder.add(&[(main, 3), (work, 12)], &[2, 70_000, 60_000]);
//! // Or one frame at a time, for a tracer that follows calls and returns.
//! let node = builder.child(Builder::ROOT, main, 3);
//! let node = builder.child(node, work, 12);
//! builder.add_at(node, &[1, 10_000, 9_000]);
//! let profile = builder.finish(Meta::default());
//!
//! assert_eq!(profile.nodes[0].count, 4); // inclusive, as everywhere: 1 call of `main` and 3 of `work`
//! assert_eq!(profile.amounts(1), [85_000, 85_000, 80_000]); // wall time of the root, `main`, `work`
//! assert_eq!(profile.self_amounts(0), [0, 1, 3]); // calls of each
//! ```
//!
//! Amounts passed in are self amounts; the profile has inclusive ones. That includes the count, so the number of calls
//! of a function is its *self* count. Lines are where the frames are: of a caller the line of the call, 0 if unknown.
//! Samples with a time are added with [`Builder::sample`]; each has its own weight. A reader of files whose stacks refer to
//! their callers uses [`Builder::place`], so that the callers of a stack are added once.
//!
//! The builder has no limits: it grows with the number of distinct stacks.

use rustc_hash::FxHashMap;
use std::collections::HashMap;

use super::model::{Frame, FrameId, FrameKind, Meta, Node, NodeId, Place, PlaceId, Profile, TimelineSample};
use super::values::{Amounts, Value, ValueType};
use crate::sums::sum_upwards;

/// A profile under construction.
#[derive(Debug)]
pub struct Builder {
    profile: Profile,
    /// By value type except the first: self amounts by node, and amounts by sample.
    columns: Vec<(Vec<u64>, Vec<u64>)>,
    /// Amounts by sample of the count; kept only where one is not 1.
    counts: Option<Vec<u64>>,
    // Names may come from the target: use a hasher that resists collision attacks.
    frames: HashMap<Frame, FrameId>,
    children: FxHashMap<(NodeId, FrameId), NodeId>,
    places: Vec<Place>,
    /// Places by caller, function and line.
    calls: FxHashMap<(PlaceId, FrameId, u32), PlaceId>,
    /// Self counts by place.
    of_places: Vec<u64>,
}

impl Builder {
    /// The root of every profile, the node that all stacks begin at.
    pub const ROOT: NodeId = 0;
    /// Its place.
    pub const ROOT_PLACE: PlaceId = 0;

    /// An empty profile of these value types. The first is what the count counts: `samples` or `calls`. Without any it
    /// is `samples`.
    pub fn new(types: &[ValueType]) -> Builder {
        let count = types.first().cloned().unwrap_or(ValueType::SAMPLES);
        let rest = types.get(1..).unwrap_or_default();
        let mut values = vec![Value::per_count(count, 1)];
        values.extend(rest.iter().map(|kind| Value {
            kind: kind.clone(),
            amounts: Amounts::Each {
                nodes: Vec::new(),
                samples: Vec::new(),
            },
        }));
        Builder {
            profile: Profile {
                frames: vec![Frame::new(FrameKind::Root, "root")],
                nodes: vec![Node::new(0, 0)],
                values,
                ..Profile::default()
            },
            columns: vec![(vec![0], Vec::new()); rest.len()],
            counts: None,
            frames: HashMap::new(),
            children: FxHashMap::default(),
            places: vec![Place::ROOT],
            calls: FxHashMap::default(),
            of_places: vec![0],
        }
    }

    /// Adds a value type behind the others, of which nothing has been added so far. Returns its index.
    pub fn value(&mut self, kind: ValueType) -> usize {
        self.profile.values.push(Value {
            kind,
            amounts: Amounts::Each {
                nodes: Vec::new(),
                samples: Vec::new(),
            },
        });
        self.columns
            .push((vec![0; self.profile.nodes.len()], vec![0; self.profile.timeline.len()]));
        self.columns.len()
    }

    /// The number of a function; the same one for equal frames.
    pub fn frame(&mut self, frame: Frame) -> FrameId {
        let frames = &mut self.profile.frames;
        *self.frames.entry(frame).or_insert_with_key(|frame| {
            frames.push(frame.clone());
            frames.len() as FrameId - 1
        })
    }

    /// The node of a frame below another node, created if needed. `line` is where the frame is (for its description); 0
    /// if unknown.
    pub fn child(&mut self, parent: NodeId, frame: FrameId, line: u32) -> NodeId {
        let nodes = &mut self.profile.nodes;
        let columns = &mut self.columns;
        let node = *self.children.entry((parent, frame)).or_insert_with(|| {
            nodes.push(Node::new(frame, parent));
            columns.iter_mut().for_each(|(self_counts, _)| self_counts.push(0));
            nodes.len() as NodeId - 1
        });
        let first = &mut nodes[node as usize].first_seen_line;
        if *first == 0 {
            *first = line;
        }
        node
    }

    /// Adds self amounts, one for each value type in order (missing ones are 0), to a stack: frames and lines from the
    /// outermost to the innermost. Returns its node.
    pub fn add(&mut self, stack: &[(FrameId, u32)], amounts: &[u64]) -> NodeId {
        let place = self.place_of(stack);
        self.add_at_place(place, amounts)
    }

    /// The place of a frame at a line (0: unknown) that was called from another place, created if needed.
    ///
    /// # Panics
    /// If there is no such place or frame.
    pub fn place(&mut self, caller: PlaceId, frame: FrameId, line: u32) -> PlaceId {
        if let Some(known) = self.calls.get(&(caller, frame, line)) {
            return *known;
        }
        let parent = self.places[caller as usize].node;
        let node = self.child(parent, frame, line);
        let place = self.places.len() as PlaceId;
        self.places.push(Place {
            parent: caller,
            node,
            line,
        });
        self.of_places.push(0);
        self.calls.insert((caller, frame, line), place);
        place
    }

    /// The number of places, that of the root included.
    pub fn places(&self) -> usize {
        self.places.len()
    }

    fn place_of(&mut self, stack: &[(FrameId, u32)]) -> PlaceId {
        let calls = stack.iter();
        calls.fold(Builder::ROOT_PLACE, |place, (frame, line)| {
            self.place(place, *frame, *line)
        })
    }

    /// Adds self amounts to the innermost place of a stack. Returns its node.
    ///
    /// # Panics
    /// If there is no such place.
    pub fn add_at_place(&mut self, place: PlaceId, amounts: &[u64]) -> NodeId {
        let node = self.places[place as usize].node;
        self.add_at(node, amounts);
        add(
            &mut self.of_places[place as usize],
            amounts.first().copied().unwrap_or(0),
        );
        node
    }

    /// Adds self amounts to a node that [`Builder::child`] or [`Builder::add`] returned.
    pub fn add_at(&mut self, node: NodeId, amounts: &[u64]) {
        let mut amounts = amounts.iter();
        let self_count = &mut self.profile.nodes[node as usize].count;
        add(self_count, amounts.next().copied().unwrap_or(0));
        for ((column, _), amount) in self.columns.iter_mut().zip(amounts) {
            add(&mut column[node as usize], *amount);
        }
    }

    /// As [`Builder::add`], and puts the sample in the timeline: `time` in ns since the start of the profile.
    pub fn sample(&mut self, time: u64, (pid, tid): (u32, u32), stack: &[(FrameId, u32)], amounts: &[u64]) -> NodeId {
        let place = self.place_of(stack);
        self.sample_at_place(time, (pid, tid), place, amounts)
    }

    /// As [`Builder::sample`], of a stack by its innermost place.
    ///
    /// # Panics
    /// If there is no such place.
    pub fn sample_at_place(&mut self, time: u64, (pid, tid): (u32, u32), place: PlaceId, amounts: &[u64]) -> NodeId {
        let node = self.add_at_place(place, amounts);
        let count = amounts.first().copied().unwrap_or(0);
        let before = self.profile.timeline.len();
        if count != 1 || self.counts.is_some() {
            self.counts.get_or_insert_with(|| vec![1; before]).push(count);
        }
        for (at, (_, samples)) in self.columns.iter_mut().enumerate() {
            samples.push(amounts.get(at + 1).copied().unwrap_or(0));
        }
        self.profile.sample_places.push(place);
        self.profile.timeline.push(TimelineSample { time, pid, tid, node });
        node
    }

    /// The functions of another profile, by their number there as those of this one.
    pub fn frames_of(&mut self, other: &Builder) -> Vec<FrameId> {
        let rest = other
            .profile
            .frames
            .iter()
            .skip(1)
            .map(|frame| self.frame(frame.clone()));
        std::iter::once(0).chain(rest).collect()
    }

    /// Caller, function and line of each place but the root's, callers first.
    pub fn calls(&self) -> impl Iterator<Item = (PlaceId, FrameId, u32)> + '_ {
        let places = self.places.iter().skip(1);
        places.map(|place| (place.parent, self.profile.nodes[place.node as usize].frame, place.line))
    }

    /// Adds the amounts of another profile without a timeline. `places`: by place of that one, the place here; `columns`: by
    /// value type of that one, the number of the type here.
    ///
    /// # Panics
    /// If there is no such place or value type.
    pub fn add_all(&mut self, other: &Builder, places: &[PlaceId], columns: &[usize]) {
        let mut nodes: FxHashMap<NodeId, NodeId> = FxHashMap::default();
        for (at, place) in places.iter().enumerate() {
            let node = self.places[*place as usize].node;
            nodes.insert(other.places[at].node, node);
            add(&mut self.of_places[*place as usize], other.of_places[at]);
        }
        let mut amounts = vec![0; self.columns.len() + 1];
        for (of_other, node) in nodes {
            let of_other = of_other as usize;
            amounts.fill(0);
            for (at, column) in columns.iter().enumerate() {
                let amount = match at.checked_sub(1) {
                    None => other.profile.nodes[of_other].count,
                    Some(at) => other.columns[at].0[of_other],
                };
                add(&mut amounts[*column], amount);
            }
            self.add_at(node, &amounts);
        }
    }

    /// The finished profile.
    pub fn finish(self, meta: Meta) -> Profile {
        let mut profile = self.profile;
        profile.meta = meta;
        let (places, nodes) = (self.places, &mut profile.nodes);
        // Lines are inclusive, like counts.
        let mut inclusive = self.of_places.clone();
        sum_upwards(&mut inclusive, |at| Some(places[at].parent as usize));
        let with_lines = places.iter().zip(inclusive.iter().zip(&self.of_places));
        for (place, (all, ended)) in with_lines.filter(|(place, _)| place.line > 0) {
            let node = &mut nodes[place.node as usize];
            for (lines, count) in [(&mut node.lines, *all), (&mut node.self_lines, *ended)] {
                if count > 0 {
                    add(lines.entry(place.line).or_default(), count);
                }
            }
        }
        if !profile.timeline.is_empty() {
            profile.places = places;
        }
        let mut counts: Vec<u64> = nodes.iter().map(|node| node.count).collect();
        sum_upwards(&mut counts, |at| Some(nodes[at].parent as usize));
        for (node, count) in nodes.iter_mut().zip(counts) {
            node.count = count;
            if node.self_lines == node.lines {
                node.self_lines.clear();
            }
        }
        if let (Some(samples), Some(count)) = (self.counts, profile.values.first_mut()) {
            count.amounts = Amounts::Each {
                nodes: Vec::new(),
                samples,
            };
        }
        for (value, (mut self_counts, samples)) in profile.values.iter_mut().skip(1).zip(self.columns) {
            sum_upwards(&mut self_counts, |at| Some(nodes[at].parent as usize));
            value.amounts = Amounts::Each {
                nodes: self_counts,
                samples,
            };
        }
        profile
    }
}

fn add(sum: &mut u64, more: u64) {
    *sum = sum.saturating_add(more);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_carry_their_weights() {
        let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL, ValueType::OFF_CPU]);
        let f = builder.frame(Frame::python("f", "f", "a.py", 1));
        let g = builder.frame(Frame::python("g", "g", "a.py", 5));
        assert_eq!(builder.frame(Frame::python("f", "f", "a.py", 1)), f);
        builder.sample(10, (1, 1), &[(f, 2)], &[1, 100, 0]);
        builder.sample(20, (1, 1), &[(f, 3), (g, 6)], &[1, 40, 40]);
        builder.sample(30, (1, 2), &[(f, 3), (g, 7)], &[1, 7]);
        let profile = builder.finish(Meta::default());
        assert_eq!(profile.find_value("off_cpu_ns"), Some(2));
        assert_eq!(profile.amounts(0), [3, 3, 2]);
        assert_eq!(
            (profile.amounts(1), profile.self_amounts(1)),
            (vec![147, 147, 47], vec![0, 100, 47])
        );
        assert_eq!(profile.amounts(2), [40, 40, 40]);
        assert_eq!(profile.amounts(3), [0, 0, 0], "there is no such value");
        let of_samples = |value| {
            (0..4)
                .map(|sample| profile.sample_amount(value, sample))
                .collect::<Vec<_>>()
        };
        assert_eq!((of_samples(1), of_samples(2)), (vec![100, 40, 7, 0], vec![0, 40, 0, 0]));
        assert!(profile.is_timed());
        let f = &profile.nodes[1];
        assert_eq!(
            (f.first_seen_line, f.lines[&2], f.lines[&3], f.self_lines[&2]),
            (2, 1, 2, 1)
        );
        assert!(profile.nodes[2].self_lines.is_empty(), "all of them are");
    }

    #[test]
    fn stacks_are_added_by_their_callers() {
        let mut builder = Builder::new(&[ValueType::SAMPLES]);
        let f = builder.frame(Frame::python("f", "f", "a.py", 1));
        let outer = builder.place(Builder::ROOT_PLACE, f, 2);
        let inner = builder.place(outer, f, 3);
        assert_eq!((builder.place(outer, f, 3), builder.places()), (inner, 3));
        builder.add_at_place(outer, &[2]);
        builder.sample_at_place(5, (1, 1), inner, &[4]);
        let profile = builder.finish(Meta::default());
        let of_nodes = |of: fn(&Node) -> Vec<(u32, u64)>| profile.nodes.iter().map(of).collect::<Vec<_>>();
        assert_eq!(
            of_nodes(|node| node.lines.clone().into_iter().collect()),
            [vec![], vec![(2, 6)], vec![(3, 4)]]
        );
        assert_eq!(
            of_nodes(|node| node.self_lines.clone().into_iter().collect()),
            [vec![], vec![(2, 2)], vec![]],
            "of the last one all of them are"
        );
        assert_eq!(profile.sample_places, [inner]);
    }

    #[test]
    fn a_count_may_be_more_than_one() {
        let mut builder = Builder::new(&[ValueType::ALLOCS, ValueType::ALLOC_BYTES]);
        let f = builder.frame(Frame::python("f", "f", "a.py", 1));
        builder.sample(1, (1, 1), &[(f, 0)], &[1, 512]);
        builder.sample(2, (1, 1), &[(f, 0)], &[64, 4096]);
        builder.add(&[], &[2, 1]);
        let profile = builder.finish(Meta::default());
        assert_eq!(
            (profile.amounts(0), profile.amounts(1)),
            (vec![67, 65], vec![4609, 4608])
        );
        assert_eq!((profile.sample_amount(0, 0), profile.sample_amount(0, 1)), (1, 64));
        assert!(!profile.is_timed(), "two allocations have no time");
    }
}
