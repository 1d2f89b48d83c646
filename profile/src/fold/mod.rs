//! Takes frames out of the stacks of a profile: what they hold goes to the frame they fold into.
//!
//! A caller of this module decides for each node of a profile which node of a new tree gets its samples ([`Folding`]);
//! [`Folding::finish`] does the rest: counts, values, lines, timeline and stacks by line follow. No sample changes its
//! amounts, its time or its thread; a sample leaves the profile only where a node folds into [`DROPPED`].

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use super::model::{Frame, FrameId, FrameKind, NO_PLACE, Node, NodeId, Place, PlaceId, Profile};
use super::places::Places;
use super::values::Amounts;
use super::view::add_lines;
use crate::sums::sum_upwards;

/// Where samples go that the new profile does not have.
pub const DROPPED: NodeId = NodeId::MAX;

/// New nodes between a place and its caller's that are followed: a few, unless a profile was made to cost time.
const MAX_BETWEEN: usize = 1000;

/// A new tree over the nodes of a profile, while it is being made.
pub struct Folding<'a> {
    profile: &'a Profile,
    frames: Vec<Frame>,
    nodes: Vec<Node>,
    children: FxHashMap<(NodeId, FrameId), NodeId>,
    /// By node of the profile, the node of the new tree that gets its samples.
    into: Vec<NodeId>,
    /// Whether the node continues as it is, with its lines.
    is_kept: Vec<bool>,
}

impl<'a> Folding<'a> {
    /// The root of the new tree.
    pub const ROOT: NodeId = 0;

    /// A tree with a root alone.
    pub fn new(profile: &'a Profile) -> Folding<'a> {
        let root = profile.nodes.first().map_or(0, |root| root.frame);
        Folding {
            profile,
            frames: profile.frames.clone(),
            nodes: vec![Node::new(root, 0)],
            children: FxHashMap::default(),
            into: Vec::with_capacity(profile.nodes.len()),
            is_kept: Vec::with_capacity(profile.nodes.len()),
        }
    }

    /// A frame that the profile does not have.
    pub fn add_frame(&mut self, frame: Frame) -> FrameId {
        self.frames.push(frame);
        self.frames.len() as FrameId - 1
    }

    /// A frame for a row that represents others, `[native code]`; the same one for the same name.
    pub fn row(&mut self, name: &str) -> FrameId {
        let first = self.profile.frames.len();
        let known = self.frames[first..].iter().position(|frame| frame.name == name);
        match known {
            Some(at) => (first + at) as FrameId,
            None => self.add_frame(Frame::new(FrameKind::Native, name)),
        }
    }

    /// The node below a node of the new tree for a frame, made when it is new.
    pub fn child(&mut self, parent: NodeId, frame: FrameId) -> NodeId {
        let nodes = &mut self.nodes;
        *self.children.entry((parent, frame)).or_insert_with(|| {
            nodes.push(Node::new(frame, parent));
            nodes.len() as NodeId - 1
        })
    }

    /// The parent of a node of the profile, if the node is sound: a lower index, and a frame that exists.
    pub fn parent(profile: &Profile, node: usize) -> Option<usize> {
        let data = profile.nodes.get(node)?;
        let parent = data.parent as usize;
        (parent < node && (data.frame as usize) < profile.frames.len()).then_some(parent)
    }

    /// The next node of the profile, in order of its nodes, continues as `into`.
    pub fn keep(&mut self, into: NodeId) {
        self.into.push(into);
        self.is_kept.push(into != DROPPED);
    }

    /// The next node of the profile, in order of its nodes, gives its samples to `into`.
    pub fn fold(&mut self, into: NodeId) {
        self.into.push(into);
        self.is_kept.push(false);
    }

    /// Where a node of the profile went.
    pub fn target(&self, node: NodeId) -> NodeId {
        self.into.get(node as usize).copied().unwrap_or(DROPPED)
    }

    /// The profile over the new tree. Nodes that were not decided on are dropped.
    pub fn finish(self) -> Profile {
        self.finish_with_targets().0
    }

    /// The same, and by node of the profile the node of the new one that has its samples, or [`DROPPED`].
    pub fn finish_with_targets(mut self) -> (Profile, Vec<NodeId>) {
        let profile = self.profile;
        self.into.resize(profile.nodes.len(), DROPPED);
        self.is_kept.resize(profile.nodes.len(), false);
        self.drop_empty();
        let self_counts = self.self_of(&profile.self_counts());
        let counts = self.inclusive(self_counts.clone());
        for (node, count) in self.nodes.iter_mut().zip(&counts) {
            node.count = *count;
        }
        let (places, sample_places) = self.places();
        self.lines(&self_counts);
        let kept_sample = |at: &usize| {
            let sample = &profile.timeline[*at];
            self.target(sample.node) != DROPPED
        };
        let samples: Vec<usize> = (0..profile.timeline.len()).filter(kept_sample).collect();
        let mut columns = profile.pick_samples(&samples);
        for sample in &mut columns.timeline {
            sample.node = self.target(sample.node);
        }
        let sample_places = if sample_places.is_empty() {
            sample_places
        } else {
            samples.iter().map(|at| sample_places[*at]).collect()
        };
        let mut values = profile.values.clone();
        for (index, (value, picked)) in values.iter_mut().zip(columns.amounts).enumerate() {
            let Amounts::Each { nodes, samples } = &mut value.amounts else {
                continue;
            };
            if index > 0 {
                *nodes = self.inclusive(self.self_of(&profile.self_amounts(index)));
            }
            *samples = picked;
        }
        let folded = Profile {
            meta: profile.meta.clone(),
            frames: self.frames,
            nodes: self.nodes,
            timeline: columns.timeline,
            excerpts: profile.excerpts.clone(),
            assembly: profile.assembly.clone(),
            places,
            sample_places,
            values,
            waits: columns.waits,
            labels: columns.labels,
        };
        (folded, self.into)
    }

    /// Leaves out nodes that were made and got nothing, neither themselves nor below.
    fn drop_empty(&mut self) {
        let mut used = vec![false; self.nodes.len()];
        used[0] = true;
        let mut has_self = self.is_kept.clone();
        for value in 0..self.profile.value_types().len() {
            let self_counts = self.profile.self_amounts(value);
            has_self
                .iter_mut()
                .zip(self_counts)
                .for_each(|(has, self_count)| *has |= self_count > 0);
        }
        for sample in &self.profile.timeline {
            if let Some(has) = has_self.get_mut(sample.node as usize) {
                *has = true;
            }
        }
        let targets = self.into.iter().zip(&has_self).filter(|(_, has_self)| **has_self);
        for (into, _) in targets {
            if let Some(used) = used.get_mut(*into as usize) {
                *used = true;
            }
        }
        for at in (1..self.nodes.len()).rev() {
            if used[at] {
                used[self.nodes[at].parent as usize] = true;
            }
        }
        if used.iter().all(|used| *used) {
            return;
        }
        let mut index = vec![DROPPED; used.len()];
        let mut next = 0;
        for (at, used) in used.iter().enumerate() {
            if *used {
                index[at] = next;
                next += 1;
            }
        }
        let mut at = 0;
        self.nodes.retain_mut(|node| {
            node.parent = index[node.parent as usize];
            at += 1;
            used[at - 1]
        });
        for into in self.into.iter_mut().filter(|into| **into != DROPPED) {
            *into = index.get(*into as usize).copied().unwrap_or(DROPPED);
        }
    }

    /// Self amounts by new node, of self amounts by node of the profile.
    fn self_of(&self, amounts: &[u64]) -> Vec<u64> {
        let mut self_counts = vec![0u64; self.nodes.len()];
        for (into, amount) in self.into.iter().zip(amounts) {
            if let Some(sum) = self_counts.get_mut(*into as usize) {
                *sum = sum.saturating_add(*amount);
            }
        }
        self_counts
    }

    fn inclusive(&self, mut amounts: Vec<u64>) -> Vec<u64> {
        sum_upwards(&mut amounts, |at| Some(self.nodes[at].parent as usize));
        amounts
    }

    /// The new stacks by line: a folded frame has no line, so the place of its caller represents it.
    fn places(&self) -> (Vec<Place>, Vec<PlaceId>) {
        let profile = self.profile;
        if profile.places.is_empty() {
            return (Vec::new(), Vec::new());
        }
        let mut places = Places::default();
        let mut new_of: Vec<PlaceId> = Vec::with_capacity(profile.places.len());
        for (at, place) in profile.places.iter().enumerate() {
            let parent = if (place.parent as usize) < at {
                new_of[place.parent as usize]
            } else {
                0
            };
            let into = self.target(place.node);
            new_of.push(match (at, into) {
                (0, _) => 0,
                (_, DROPPED) => NO_PLACE,
                _ => self.place(&mut places, parent, place, into),
            });
        }
        let of_sample = |at: usize| {
            let place = profile.sample_places.get(at).copied().unwrap_or(NO_PLACE);
            let new = new_of.get(place as usize).copied().unwrap_or(NO_PLACE);
            let fits =
                places.all.get(new as usize).map(|place| place.node) == Some(self.target(profile.timeline[at].node));
            if fits { new } else { NO_PLACE }
        };
        let of_samples = (0..profile.timeline.len()).map(of_sample).collect();
        (places.all, of_samples)
    }

    fn place(&self, places: &mut Places, parent: PlaceId, place: &Place, into: NodeId) -> PlaceId {
        // What was dropped above (a caller of the function in focus) leaves no place to hang this one below.
        let parent = if parent == NO_PLACE { 0 } else { parent };
        let above = places.all[parent as usize].node;
        let is_kept = self.is_kept[place.node as usize];
        if above == into && !is_kept {
            return parent;
        }
        // New nodes between the caller's and this one have no lines.
        let (mut path, mut at) = (Vec::new(), self.nodes[into as usize].parent);
        while at != above && at != Self::ROOT {
            if path.len() == MAX_BETWEEN {
                return NO_PLACE;
            }
            path.push(at);
            at = self.nodes[at as usize].parent;
        }
        let mut parent = if at == above { parent } else { 0 };
        for node in path.into_iter().rev() {
            parent = places.child(parent, node, 0);
        }
        places.child(parent, into, if is_kept { place.line } else { 0 })
    }

    /// Lines of the new nodes: those of the nodes that continued, and of samples in folded frames the line of the caller.
    fn lines(&mut self, self_counts: &[u64]) {
        let profile = self.profile;
        let before = profile.self_counts();
        let mut ended: Vec<BTreeMap<u32, u64>> = vec![BTreeMap::new(); self.nodes.len()];
        for (at, node) in profile.nodes.iter().enumerate() {
            let into = self.into[at];
            if !self.is_kept[at] {
                continue;
            }
            let new = &mut self.nodes[into as usize];
            add_lines(&mut new.lines, &node.lines);
            add_lines(&mut ended[into as usize], node.self_lines_of(before[at]));
            if new.line_text.is_empty() && new.first_seen_line == 0 {
                new.line_text = node.line_text.clone();
                new.first_seen_line = node.first_seen_line;
            }
        }
        let known = self.lines_of_folded_samples(&mut ended);
        // By node, the next kept node outward, or the root.
        let mut callers: Vec<usize> = vec![0; profile.nodes.len()];
        // The node that a folded node folds into, and its line if it has only one.
        for at in 1..profile.nodes.len() {
            callers[at] = match Self::parent(profile, at) {
                Some(parent) if self.is_kept[parent] => parent,
                Some(parent) => callers[parent],
                None => 0,
            };
            let left = before[at].saturating_sub(known.get(&(at as NodeId)).copied().unwrap_or(0));
            if self.is_kept[at] || self.into[at] == DROPPED || left == 0 {
                continue;
            }
            let caller = callers[at];
            if self.into[caller] != self.into[at] {
                continue;
            }
            let caller = &profile.nodes[caller];
            if let (1, Some((line, count))) = (caller.lines.len(), caller.lines.iter().next())
                && *count >= caller.count
            {
                add(&mut ended[self.into[at] as usize], *line, left);
            }
        }
        for ((node, ended), self_count) in self.nodes.iter_mut().zip(ended).zip(self_counts) {
            if *self_count != node.count {
                node.self_lines = ended;
            }
        }
    }

    /// Adds the lines of samples in folded frames as far as the stacks by line know them; says of how many they do, by
    /// node of the profile.
    fn lines_of_folded_samples(&self, ended: &mut [BTreeMap<u32, u64>]) -> FxHashMap<NodeId, u64> {
        let profile = self.profile;
        let mut known: FxHashMap<NodeId, u64> = FxHashMap::default();
        // By place, the place of the next kept frame outward.
        let mut kept: Vec<PlaceId> = Vec::with_capacity(profile.places.len());
        for (at, place) in profile.places.iter().enumerate() {
            let is_kept = self.is_kept.get(place.node as usize) == Some(&true);
            kept.push(match () {
                () if is_kept => at as PlaceId,
                () if (place.parent as usize) < at => kept[place.parent as usize],
                () => NO_PLACE,
            });
        }
        for (at, place) in profile.sample_places.iter().enumerate().take(profile.timeline.len()) {
            let node = profile.timeline[at].node;
            let into = self.target(node);
            if into == DROPPED || self.is_kept[node as usize] {
                continue;
            }
            let caller = kept
                .get(*place as usize)
                .and_then(|at| profile.places.get(*at as usize));
            let Some(caller) = caller.filter(|caller| caller.line > 0 && self.target(caller.node) == into) else {
                continue;
            };
            let amount = profile.sample_amount(0, at);
            add(&mut ended[into as usize], caller.line, amount);
            let sum = known.entry(node).or_default();
            *sum = sum.saturating_add(amount);
        }
        known
    }
}

/// Adds an amount to that of a line.
fn add(lines: &mut BTreeMap<u32, u64>, line: u32, amount: u64) {
    let sum = lines.entry(line).or_default();
    *sum = sum.saturating_add(amount);
}

/// Whether the frame holds others without being code: the root, a process, a thread.
pub fn is_container(frame: &Frame) -> bool {
    matches!(frame.kind, FrameKind::Root | FrameKind::Process | FrameKind::Thread)
}

#[cfg(test)]
mod tests;
