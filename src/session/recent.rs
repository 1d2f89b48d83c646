//! The last samples of a running session, for a live view.

use std::ops::Range;

use super::Session;
use crate::event::{Pid, Tid};
use crate::frame::RawFrame;
use crate::profile::count_tree::{RawNode, RawTimelineSample, RawTree};
use crate::profile::lags::RawLag;
use crate::profile::model::{Meta, Profile};
use crate::resolve::{self, NameCache, ResolveInput};

use super::jit::{function_start, jit_sources};

/// Size of the tree, in nodes, from which on nodes are dropped that no sample in view needs.
const PRUNE_NODES: usize = 1 << 17;
/// Maximum number of cached names of frames.
const MAX_NAMES: usize = 1 << 18;

impl Session {
    /// Drops samples before a time (of the samples' clock), and eventually the stacks that only they had.
    pub fn forget_before(&mut self, time: u64) {
        let first = self.timeline.partition_point(|t| t.time < time);
        self.timeline.drain(..first);
        self.waits.forget_first(first);
        self.lags.done.retain(|lag| lag.start >= time);
        if self.tree.nodes().len() > PRUNE_NODES {
            self.forget_await_nodes();
            let (mut tree, timeline) = subtree(&self.tree, self.timeline.iter());
            self.lags.forget_nodes();
            self.lags.done = moved(&self.tree, &mut tree, self.lags.done.iter());
            (self.tree, self.timeline) = (tree, timeline);
            self.forget_last_stacks(); // they lead to nodes of the old tree
        }
    }

    /// The samples of a time range, of all threads or one, as a profile; with what kept event loops also before. Resolves names that are new, which needs no
    /// privileges except for opening debug files.
    pub fn window(&mut self, names: &mut NameCache, span: Range<u64>, only: Option<Tid>, meta: Meta) -> Profile {
        if names.len() > MAX_NAMES {
            names.clear();
        }
        let wanted = |t: &RawTimelineSample| span.contains(&t.time) && only.is_none_or(|tid| t.tid == tid);
        let rows: Vec<usize> = (0..self.timeline.len())
            .filter(|row| wanted(&self.timeline[*row]))
            .collect();
        let (mut tree, timeline) = subtree(&self.tree, rows.iter().map(|row| &self.timeline[*row]));
        let waits = self.waits.lengths_of(&rows);
        let lags = self.lags.done.iter();
        let shown = lags.filter(|lag| lag.start < span.end && only.is_none_or(|tid| lag.tid == tid));
        let lags = moved(&self.tree, &mut tree, shown);
        let weighted = self.options.weighted.is_some();
        let (unwinder, targets) = (&mut self.unwinder, &self.targets);
        let input = ResolveInput {
            open_files: &self.open_files,
            modules: &self.modules,
            codes: &self.codes,
            tree: &tree,
            timeline: &timeline,
            // No view of them has labels.
            label_sets: &[],
            lags: &lags,
            waits: weighted.then_some((&waits, &[])),
            weighted,
            task_names: self.tasks.names.all(),
            socket_names: self.sockets.names(),
            futexes: self.futexes.all(),
            threads: &self.threads,
            python_threads: &self.thread_names.names,
            pythons: &self.pythons,
            function_start: &mut |owner, at| function_start(unwinder, targets, owner, at),
            jit: &|pid: Pid| jit_sources(targets, pid),
            fetch: self.fetch.clone(),
            naming: self.naming.as_mut(),
        };
        resolve::resolve_incremental(names, input, span.start, meta)
    }
}

/// The stacks of these samples only.
fn subtree<'a>(
    tree: &RawTree,
    samples: impl Iterator<Item = &'a RawTimelineSample>,
) -> (RawTree, Vec<RawTimelineSample>) {
    let (mut out, mut path) = (RawTree::default(), Vec::new());
    let timeline = samples.map(|sample| {
        stack(tree, sample.node, &mut path);
        RawTimelineSample {
            node: out.add(&path, sample.count).0,
            ..*sample
        }
    });
    let timeline = timeline.collect();
    (out, timeline)
}

/// The same callbacks, with their stacks in another tree.
fn moved<'a>(from: &RawTree, to: &mut RawTree, lags: impl Iterator<Item = &'a RawLag>) -> Vec<RawLag> {
    let mut path = Vec::new();
    let lags = lags.map(|lag| {
        stack(from, lag.node, &mut path);
        RawLag {
            node: to.add(&path, 0).0,
            ..*lag
        }
    });
    lags.collect()
}

/// Frames from the root to a node.
fn stack(tree: &RawTree, node: RawNode, path: &mut Vec<RawFrame>) {
    path.clear();
    let mut at = node;
    while let (parent, Some(frame), _) = tree.nodes()[at as usize] {
        path.push(frame);
        at = parent;
    }
    path.reverse();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_of_some_samples() {
        let k = RawFrame::Kernel;
        let mut tree = RawTree::default();
        let nodes = [&[k(1), k(2)][..], &[k(1), k(3)], &[k(1), k(2)], &[]].map(|stack| tree.add(stack, 1).0);
        let sample = |i: usize| RawTimelineSample {
            time: i as u64,
            pid: 1,
            tid: 1,
            node: nodes[i],
            count: 1,
            time_spent: 0,
            labels: 0,
        };
        let samples: Vec<RawTimelineSample> = (0..4).map(sample).collect();
        let (some, timeline) = subtree(&tree, samples[2..].iter());
        assert_eq!(some.nodes().len(), 3);
        let mut path = Vec::new();
        stack(&some, timeline[0].node, &mut path);
        assert_eq!((path, timeline[0].time), (vec![k(1), k(2)], 2));
        assert_eq!((timeline[1].node, some.nodes()[0].2), (0, 1));
    }
}
