//! Self and total samples by line, of functions and of source files.

use std::collections::HashMap;

use rustc_hash::FxHashMap;

use super::{ChildIndex, FunctionId, SelfTotal, Stats, TreeStep, parent};
use crate::model::{Frame, FrameKind, NodeId};
use crate::sums::sum_upwards;

/// A line of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineCounts {
    /// The function of the line.
    pub function: FunctionId,
    /// 0: unknown.
    pub line: u32,
    /// Samples of the line.
    pub counts: SelfTotal,
}

/// A line of a source file, with all functions on it: a sample counts once, also if several of them are on its stack,
/// such as a function and its generator expression, or the functions inlined into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileLineCounts<'a> {
    /// Empty: unknown.
    pub file: &'a str,
    /// 0: unknown. Of an unknown file each function has its own row.
    pub line: u32,
    /// The function with the highest total on this line.
    pub function: FunctionId,
    /// Samples of the line.
    pub counts: SelfTotal,
}

/// The samples of a line; the total grows while the tree is walked.
type Row<K> = (K, SelfTotal);

/// Rows in the order in which they were met, by key.
struct LineRows<K> {
    rows: Vec<Row<K>>,
    known: FxHashMap<K, usize>,
}

impl<K: Copy + Eq + std::hash::Hash> LineRows<K> {
    fn at(&mut self, key: K) -> usize {
        *self.known.entry(key).or_insert_with(|| {
            self.rows.push((key, SelfTotal::default()));
            self.rows.len() - 1
        })
    }

    /// Adds to the totals the samples of a tree whose nodes have several lines each: `lines` has those of a node, with
    /// inclusive amounts. A sample counts once where a line is on its stack repeatedly. Where nodes do not tell which
    /// samples those are, as few as possible are added: those of a node, or those below it, whichever are more.
    fn add_totals(&mut self, tree: &ChildIndex, lines: impl Fn(NodeId, &mut Vec<(K, u64)>)) {
        // Of the nodes on the path, their lines: row, samples, and the row's total before.
        let mut open: Vec<(usize, u64, u64)> = Vec::new();
        let mut marks = Vec::new();
        let mut of_node = Vec::new();
        tree.walk(
            |_| true,
            |step| match step {
                TreeStep::Enter(node) => {
                    marks.push(open.len());
                    of_node.clear();
                    lines(node, &mut of_node);
                    // Lines of one key follow each other.
                    for lines in of_node.chunk_by(|a, b| a.0 == b.0) {
                        let at = self.at(lines[0].0);
                        let amount = lines.iter().fold(0u64, |sum, (_, amount)| sum.saturating_add(*amount));
                        open.push((at, amount, self.rows[at].1.total));
                    }
                }
                TreeStep::Leave(_) => {
                    for (at, amount, before) in open.drain(marks.pop().unwrap_or(0)..) {
                        let total = &mut self.rows[at].1.total;
                        *total = (*total).max(before.saturating_add(amount));
                    }
                }
            },
        );
    }
}

impl<'a> Stats<'a> {
    /// Self and total by line of each function, unordered, of all samples regardless of the selection. Samples at an
    /// unknown line have line 0.
    ///
    /// Where a profile does not have the places of its samples ([`Profile::places`](crate::model::Profile::places)), it
    /// is unknown which samples have a line repeatedly on their stack; total is then a lower bound.
    pub fn lines(&self) -> Vec<LineCounts> {
        let rows = self.count_lines(|function, line| (function, line)).into_iter();
        let row = |((function, line), counts)| LineCounts { function, line, counts };
        rows.map(row).collect()
    }

    /// As [`Stats::lines`], by line of each source file.
    pub fn file_lines(&self) -> Vec<FileLineCounts<'a>> {
        // Names come from the target: use a hasher that resists collision attacks.
        let mut known: HashMap<&str, u32> = HashMap::new();
        let file_of: Vec<u32> = self
            .frames
            .iter()
            .map(|frame| {
                let next = known.len() as u32;
                *known.entry(source_file(frame)).or_insert(next)
            })
            .collect();
        let key = |function: FunctionId, line: u32| match source_file(self.frames[function as usize]) {
            "" => (Some(function), 0, 0),
            _ => (None, file_of[function as usize], line),
        };
        let mut leaders: FxHashMap<_, (u64, FunctionId)> = FxHashMap::default();
        for row in self.lines() {
            let (total, function) = (row.counts.total, row.function);
            let leader = leaders.entry(key(function, row.line)).or_insert((total, function));
            if (total, leader.1) > (leader.0, function) {
                *leader = (total, function);
            }
        }
        let row = |(key, counts)| {
            let (_, function) = *leaders.get(&key)?;
            Some(FileLineCounts {
                file: source_file(self.frame(function)),
                line: key.2,
                function,
                counts,
            })
        };
        self.count_lines(key).into_iter().filter_map(row).collect()
    }

    /// Samples by key of a line; `key` has that of a line of a function.
    fn count_lines<K: Copy + Eq + std::hash::Hash>(&self, key: impl Fn(FunctionId, u32) -> K) -> Vec<Row<K>> {
        let mut rows = LineRows {
            rows: Vec::new(),
            known: FxHashMap::default(),
        };
        let nodes = &self.profile.nodes;
        let placed = self.placed_amounts();
        // Samples whose places are unknown.
        rows.add_totals(&self.tree, |node, out| {
            let Some(function) = self.function(node) else { return };
            for (line, count) in lines_of(&nodes[node as usize]) {
                let placed = placed.of_line.get(&(node, line)).copied().unwrap_or(0);
                if count > placed {
                    out.push((key(function, line), count - placed));
                }
            }
        });
        if !placed.of_place.is_empty() {
            let places = &self.profile.places;
            let parent = |at: usize| Some(places[at].parent as usize).filter(|parent| *parent < at);
            rows.add_totals(&ChildIndex::new(places.len(), parent), |at, out| {
                let place = places[at as usize];
                let amount = placed.of_place[at as usize];
                if let Some(function) = self.function(place.node).filter(|_| amount > 0) {
                    out.push((key(function, place.line), amount));
                }
            });
        }
        let self_counts = self.profile.self_counts();
        for (at, node) in nodes.iter().enumerate() {
            let Some(function) = self.function(at as NodeId).filter(|_| self.is_in_tree(at)) else {
                continue;
            };
            let mut rest = self_counts[at];
            let lines = node.self_lines_of(rest).iter().map(|(line, count)| (*line, *count));
            for (line, count) in lines {
                rest = rest.saturating_sub(count);
                let row = rows.at(key(function, line));
                let sum = &mut rows.rows[row].1.self_count;
                *sum = sum.saturating_add(count);
            }
            if rest > 0 {
                let row = rows.at(key(function, 0));
                let sum = &mut rows.rows[row].1.self_count;
                *sum = sum.saturating_add(rest);
            }
        }
        let at_least_self = |(key, mut counts): Row<K>| {
            counts.total = counts.total.max(counts.self_count);
            (key, counts)
        };
        rows.rows.into_iter().map(at_least_self).collect()
    }

    /// Inclusive samples of the places; none if they do not agree with the tree.
    fn placed_amounts(&self) -> PlacedAmounts {
        let profile = self.profile;
        let mut of_place = vec![0u64; profile.places.len()];
        for (at, (sample, place)) in profile.timeline.iter().zip(&profile.sample_places).enumerate() {
            let found = profile.places.get(*place as usize);
            if found.is_some_and(|found| found.node == sample.node) {
                let amount = &mut of_place[*place as usize];
                *amount = amount.saturating_add(profile.sample_amount(0, at));
            }
        }
        sum_upwards(&mut of_place, |at| Some(profile.places[at].parent as usize));
        let mut of_line: FxHashMap<(NodeId, u32), u64> = FxHashMap::default();
        for (place, amount) in profile.places.iter().zip(&of_place).skip(1) {
            let sum = of_line.entry((place.node, place.line)).or_default();
            *sum = sum.saturating_add(*amount);
        }
        let follows = |at: usize| {
            let place = profile.places[at];
            let caller = profile
                .places
                .get(place.parent as usize)
                .filter(|_| (place.parent as usize) < at);
            let node = place.node as usize;
            let is_known = node < profile.nodes.len() && self.is_in_tree(node);
            caller.is_some_and(|caller| is_known && profile.nodes[node].parent == caller.node)
        };
        let fits = |(&(node, line), &amount): (&(NodeId, u32), &u64)| {
            let lines = profile.nodes.get(node as usize).map(lines_of);
            amount == 0 || lines.is_some_and(|mut lines| lines.any(|(at, count)| at == line && count >= amount))
        };
        if (1..profile.places.len()).all(follows) && of_line.iter().all(fits) {
            PlacedAmounts { of_place, of_line }
        } else {
            PlacedAmounts::default()
        }
    }

    /// Whether the node has a valid parent and frame.
    fn is_in_tree(&self, at: usize) -> bool {
        at > 0 && parent(self.profile, at).is_some()
    }
}

/// Inclusive samples that have a place.
#[derive(Default)]
struct PlacedAmounts {
    of_place: Vec<u64>,
    /// By node and line.
    of_line: FxHashMap<(NodeId, u32), u64>,
}

/// The lines of a node with their samples, inclusive; line 0 has those at unknown lines.
fn lines_of(node: &crate::model::Node) -> impl Iterator<Item = (u32, u64)> + '_ {
    let lines = node.lines.iter().filter(|(line, _)| **line > 0);
    let known = lines.clone().fold(0u64, |sum, (_, count)| sum.saturating_add(*count));
    let rest = node.count.saturating_sub(known);
    lines
        .map(|(line, count)| (*line, *count))
        .chain((rest > 0).then_some((0, rest)))
}

/// The source file of a function; empty if it is not known.
pub fn source_file(frame: &Frame) -> &str {
    match frame.kind {
        FrameKind::Python => &frame.filename,
        _ => &frame.source,
    }
}
