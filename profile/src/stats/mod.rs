//! Self and total samples by function, line and module, and calls between functions: the data of tables.
//!
//! *Self* samples have the function innermost; *total* samples have it anywhere on the stack. A sample counts once,
//! also if recursion repeats the function.
//!
//! ```text
//! let stats = Stats::new(&profile);            // or .select(self_counts): of some samples only
//! for (id, counts) in stats.functions().iter().enumerate() { stats.frame(id as FunctionId); counts.self_count; counts.total }
//! ```

use std::collections::HashMap;

use rustc_hash::FxHashMap;

pub use lines::{FileLineCounts, LineCounts, source_file};

use super::model::{Frame, FrameId, FrameKind, NodeId, Profile, TimelineSample};
use crate::sums::sum_upwards;

mod lines;

/// Number of a function of a profile, from 0 without gaps.
pub type FunctionId = u32;

/// Samples of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SelfTotal {
    /// Self: samples that ended here.
    pub self_count: u64,
    /// Samples with the row anywhere on their stack.
    pub total: u64,
}

/// Files are not trusted, so sums stop at the highest number.
impl SelfTotal {
    fn add_self(&mut self, amount: u64) {
        self.self_count = self.self_count.saturating_add(amount);
    }

    fn add_total(&mut self, amount: u64) {
        self.total = self.total.saturating_add(amount);
    }
}

/// One function calling another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallEdge {
    /// `None`: the callee is the outermost function of its stacks.
    pub caller: Option<FunctionId>,
    /// The called function.
    pub callee: FunctionId,
    /// Self samples of the callee when this one called it; samples with this call on their stack.
    pub counts: SelfTotal,
}

/// A profile prepared for counting; invalid nodes (no such parent or frame) are omitted.
pub struct Stats<'a> {
    profile: &'a Profile,
    /// By frame; `NONE` for frames that are not code.
    function_of: Vec<FunctionId>,
    /// The first frame of each function.
    frames: Vec<&'a Frame>,
    tree: ChildIndex,
    /// Selected samples that ended in each node, and those there and below.
    self_counts: Vec<u64>,
    total: Vec<u64>,
}

const NONE: u32 = u32::MAX;

/// What makes a frame the same function as another one.
#[derive(PartialEq, Eq, Hash)]
struct Key<'a>(FrameKind, &'a str, &'a str, u64);

fn key(frame: &Frame) -> Option<Key<'_>> {
    let Frame { kind, name, module, .. } = frame;
    match kind {
        FrameKind::Root | FrameKind::Process | FrameKind::Thread => None,
        FrameKind::Python => Some(Key(*kind, name, &frame.filename, frame.first_line.into())),
        // Its address is that of the function it was inlined into.
        FrameKind::Inlined => Some(Key(*kind, name, module, 0)),
        FrameKind::Native
        | FrameKind::Kernel
        | FrameKind::Truncated
        | FrameKind::Task
        | FrameKind::Worker
        | FrameKind::State
        | FrameKind::Unknown => Some(Key(*kind, name, module, frame.address)),
    }
}

enum TreeStep {
    Enter(NodeId),
    Leave(NodeId),
}

impl<'a> Stats<'a> {
    /// With all samples selected.
    pub fn new(profile: &'a Profile) -> Stats<'a> {
        let mut frames = Vec::new();
        // Names come from the target: use a hasher that resists collision attacks.
        let mut known: HashMap<Key<'_>, FunctionId> = HashMap::new();
        let function_of = profile.frames.iter().map(|frame| {
            let Some(key) = key(frame) else { return NONE };
            *known.entry(key).or_insert_with(|| {
                frames.push(frame);
                frames.len() as FunctionId - 1
            })
        });
        let function_of = function_of.collect();
        let tree = ChildIndex::new(profile.nodes.len(), |at| parent(profile, at));
        let mut stats = Stats {
            profile,
            function_of,
            frames,
            tree,
            self_counts: Vec::new(),
            total: Vec::new(),
        };
        stats.select(profile.self_counts());
        stats
    }

    /// Selects samples: so many that ended in each node. Nodes beyond the end of `self_counts` have none.
    pub fn select(&mut self, mut self_counts: Vec<u64>) {
        self_counts.resize(self.profile.nodes.len(), 0);
        let mut total = self_counts.clone();
        sum_upwards(&mut total, |at| parent(self.profile, at));
        (self.self_counts, self.total) = (self_counts, total);
    }

    /// Selects all samples but those that ended in functions like this; with `below`, nor any that have them on their stack.
    pub(crate) fn select_without(&mut self, is_left_out: impl Fn(FunctionId) -> bool, below: bool) {
        let mut is_out = vec![false; self.profile.nodes.len()];
        let mut self_counts = self.profile.self_counts();
        for (at, count) in self_counts.iter_mut().enumerate() {
            let is_below = below && parent(self.profile, at).is_some_and(|parent| is_out[parent]);
            is_out[at] = is_below || self.function(at as NodeId).is_some_and(&is_left_out);
            if is_out[at] {
                *count = 0;
            }
        }
        self.select(self_counts);
    }

    /// Selects some samples of the timeline: of a span of time, of a thread.
    pub fn select_samples<'t>(&mut self, samples: impl Iterator<Item = &'t TimelineSample>) {
        let mut self_counts = vec![0; self.profile.nodes.len()];
        for sample in samples {
            if let Some(count) = self_counts.get_mut(sample.node as usize) {
                *count += 1;
            }
        }
        self.select(self_counts);
    }

    /// Samples selected.
    pub fn samples(&self) -> u64 {
        self.total.first().copied().unwrap_or(0)
    }

    /// How many functions there are, selected or not.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether there are no functions.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// A frame of the function, for its name and location.
    ///
    /// # Panics
    /// If there is no such function.
    pub fn frame(&self, function: FunctionId) -> &'a Frame {
        self.frames[function as usize]
    }

    /// The function of a node; `None` for processes, threads and the root.
    pub fn function(&self, node: NodeId) -> Option<FunctionId> {
        self.function_of_frame(self.profile.nodes.get(node as usize)?.frame)
    }

    /// The function of a frame, by the frame's index in the profile; `None` for processes, threads and the root.
    pub(crate) fn function_of_frame(&self, frame: FrameId) -> Option<FunctionId> {
        let function = *self.function_of.get(frame as usize)?;
        (function != NONE).then_some(function)
    }

    /// Selected samples of a node: ended there; there and below.
    pub fn node(&self, node: NodeId) -> SelfTotal {
        SelfTotal {
            self_count: self.self_counts[node as usize],
            total: self.total[node as usize],
        }
    }

    /// Nodes called from a node, in the order of the profile.
    pub fn children(&self, node: NodeId) -> &[NodeId] {
        self.tree.of(node)
    }

    /// Self and total of each function, by its number.
    pub fn functions(&self) -> Vec<SelfTotal> {
        self.tally(self.frames.len(), |node| self.function(node))
    }

    /// Self and total of groups of functions; `of_function` has the group of each, a number below `groups`; others are in none.
    pub fn group(&self, groups: usize, of_function: &[u32]) -> Vec<SelfTotal> {
        self.tally(groups, |node| {
            let group = of_function.get(self.function(node)? as usize).copied();
            group.filter(|group| (*group as usize) < groups)
        })
    }

    /// Self and total of each module: a library or program, a Python file, `[kernel]`; those selected, in no order.
    pub fn modules(&self) -> Vec<(&'a str, SelfTotal)> {
        let mut names = Vec::new();
        let mut known: HashMap<&str, u32> = HashMap::new();
        let of_function = self.frames.iter().map(|frame| {
            let name = module(frame);
            *known.entry(name).or_insert_with(|| {
                names.push(name);
                names.len() as u32 - 1
            })
        });
        let of_function: Vec<u32> = of_function.collect();
        let counts = self.group(names.len(), &of_function);
        let rows = names.into_iter().zip(counts);
        rows.filter(|(_, counts)| counts.total > 0).collect()
    }

    /// Self and total by things that nodes are part of, numbered below `keys`.
    fn tally(&self, keys: usize, key: impl Fn(NodeId) -> Option<u32>) -> Vec<SelfTotal> {
        let mut counts = vec![SelfTotal::default(); keys];
        let mut open = vec![0u32; keys];
        self.walk(|step| match step {
            TreeStep::Enter(node) => {
                let Some(key) = key(node).map(|k| k as usize) else {
                    return;
                };
                counts[key].add_self(self.self_counts[node as usize]);
                if open[key] == 0 {
                    counts[key].add_total(self.total[node as usize]);
                }
                open[key] += 1;
            }
            TreeStep::Leave(node) => {
                if let Some(key) = key(node) {
                    open[key as usize] -= 1;
                }
            }
        });
        counts
    }

    /// All calls between functions, in no order. A recursive function calls itself.
    pub fn calls(&self) -> Vec<CallEdge> {
        let mut calls: Vec<(CallEdge, u32)> = Vec::new();
        let mut known: FxHashMap<(FunctionId, FunctionId), usize> = FxHashMap::default();
        // Functions from the root to here, and the calls between them.
        let mut path: Vec<(FunctionId, usize)> = Vec::new();
        self.walk(|step| match step {
            TreeStep::Enter(node) => {
                let Some(callee) = self.function(node) else { return };
                let caller = path.last().map(|(function, _)| *function);
                let at = *known.entry((caller.unwrap_or(NONE), callee)).or_insert_with(|| {
                    let counts = SelfTotal::default();
                    calls.push((CallEdge { caller, callee, counts }, 0));
                    calls.len() - 1
                });
                let (call, open) = &mut calls[at];
                call.counts.add_self(self.self_counts[node as usize]);
                if *open == 0 {
                    call.counts.add_total(self.total[node as usize]);
                }
                *open += 1;
                path.push((callee, at));
            }
            TreeStep::Leave(node) => {
                if self.function(node).is_some()
                    && let Some((_, at)) = path.pop()
                {
                    calls[at].1 -= 1;
                }
            }
        });
        calls.into_iter().map(|(call, _)| call).collect()
    }

    /// Visits all nodes with selected samples, depth first, without recursion.
    fn walk(&self, visit: impl FnMut(TreeStep)) {
        if self.samples() > 0 {
            self.tree.walk(|node| self.total[node as usize] > 0, visit);
        }
    }
}

/// Library or program of native code, file of Python code.
pub fn module(frame: &Frame) -> &str {
    match frame.kind {
        FrameKind::Python => &frame.filename,
        FrameKind::Truncated => "[truncated]",
        FrameKind::Task => "[task]",
        FrameKind::Worker => "[worker thread]",
        FrameKind::State => "[off CPU]",
        _ if frame.module.is_empty() => "[unmapped]",
        _ => &frame.module,
    }
}

/// Samples of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadSamples {
    /// The thread's process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// Last known name; may be empty.
    pub name: String,
    /// Number of samples; calls, or what else the profile's first value type is.
    pub samples: u64,
}

/// Samples of each thread by the timeline, ordered by number; none if the profile has no timeline.
pub fn threads(profile: &Profile) -> Vec<ThreadSamples> {
    let mut counts: FxHashMap<(u32, u32), u64> = FxHashMap::default();
    for (at, sample) in profile.timeline.iter().enumerate() {
        let count: &mut u64 = counts.entry((sample.pid, sample.tid)).or_default();
        *count = count.saturating_add(profile.sample_amount(0, at));
    }
    let names = profile.meta.threads.iter();
    let names: FxHashMap<_, _> = names.map(|(pid, tid, name)| ((*pid, *tid), name)).collect();
    let thread = |((pid, tid), samples)| ThreadSamples {
        pid,
        tid,
        name: names.get(&(pid, tid)).map_or(String::new(), |name| name.to_string()),
        samples,
    };
    let mut rows: Vec<ThreadSamples> = counts.into_iter().map(thread).collect();
    rows.sort_by_key(|thread| (thread.pid, thread.tid));
    rows
}

fn parent(profile: &Profile, at: usize) -> Option<usize> {
    let node = &profile.nodes[at];
    let parent = node.parent as usize;
    (parent < at && (node.frame as usize) < profile.frames.len()).then_some(parent)
}

/// The children of the nodes of a tree; the root is node 0.
struct ChildIndex {
    /// Children of node `i` are `children[starts[i]..starts[i + 1]]`.
    starts: Vec<u32>,
    children: Vec<NodeId>,
}

impl ChildIndex {
    /// `parent` has the parent of a node but the root, `None` for nodes that are omitted.
    fn new(count: usize, parent: impl Fn(usize) -> Option<usize>) -> ChildIndex {
        let mut starts = vec![0u32; count + 1];
        for at in 1..count {
            if let Some(parent) = parent(at) {
                starts[parent + 1] += 1;
            }
        }
        for at in 1..starts.len() {
            starts[at] += starts[at - 1];
        }
        let mut free = starts.clone();
        let mut children = vec![0; starts[count] as usize];
        for at in 1..count {
            if let Some(parent) = parent(at) {
                children[free[parent] as usize] = at as NodeId;
                free[parent] += 1;
            }
        }
        ChildIndex { starts, children }
    }

    fn of(&self, node: NodeId) -> &[NodeId] {
        &self.children[self.starts[node as usize] as usize..self.starts[node as usize + 1] as usize]
    }

    /// Visits the root and the nodes that are taken, depth first, without recursion.
    fn walk(&self, is_taken: impl Fn(NodeId) -> bool, mut visit: impl FnMut(TreeStep)) {
        if self.starts.len() < 2 {
            return;
        }
        let mut path: Vec<(NodeId, usize)> = vec![(0, 0)];
        visit(TreeStep::Enter(0));
        while let Some((node, next)) = path.last_mut() {
            match self.of(*node).get(*next) {
                Some(child) => {
                    *next += 1;
                    if is_taken(*child) {
                        visit(TreeStep::Enter(*child));
                        path.push((*child, 0));
                    }
                }
                None => {
                    visit(TreeStep::Leave(*node));
                    path.pop();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
