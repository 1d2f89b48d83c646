//! The last samples of a session that goes on: what a live view shows.

use std::ops::Range;

use super::Session;
use crate::resolve::{self, Gathered, Names};
use crate::sample::{Pid, RawFrame, Tid};
use crate::tree::profile::{Meta, Profile};
use crate::tree::raw::{RawNode, RawTick, RawTree};

use super::jit::{function_start, jit_places};

/// Nodes of the tree from which on those are left out that no sample in view needs.
const MANY_NODES: usize = 1 << 17;
/// Named frames that are kept.
const MANY_NAMES: usize = 1 << 18;

impl Session {
    /// Forgets samples before a time (of the samples' clock), and in time the stacks that only they had.
    pub fn forget_before(&mut self, time: u64) {
        let first = self.timeline.partition_point(|t| t.time < time);
        self.timeline.drain(..first);
        if self.tree.nodes().len() > MANY_NODES {
            let (tree, timeline) = subtree(&self.tree, self.timeline.iter());
            (self.tree, self.timeline) = (tree, timeline);
            self.forget_last(); // they lead to nodes of the old tree
        }
    }

    /// The samples of a span of time, of all threads or one, as a profile. What is new is named; that takes no rights but to
    /// files of debug information.
    pub fn window(&mut self, names: &mut Names, span: Range<u64>, only: Option<Tid>, meta: Meta) -> Profile {
        if names.len() > MANY_NAMES {
            names.clear();
        }
        let wanted = |t: &&RawTick| span.contains(&t.time) && only.is_none_or(|tid| t.tid == tid);
        let (tree, timeline) = subtree(&self.tree, self.timeline.iter().filter(wanted));
        let (unwinder, members) = (&mut self.unwinder, &self.members);
        let gathered = Gathered {
            opened: &self.opened,
            modules: &self.modules,
            codes: &self.codes,
            tree: &tree,
            timeline: &timeline,
            weighted: self.options.weighted.is_some(),
            threads: &self.threads,
            pythons: &self.pythons,
            function_start: &mut |owner, at| function_start(unwinder, members, owner, at),
            jit: &|pid: Pid| jit_places(members, pid),
            fetch: self.fetch.clone(),
        };
        resolve::resolve_next(names, gathered, span.start, meta)
    }
}

/// The stacks of these samples alone.
fn subtree<'a>(tree: &RawTree, ticks: impl Iterator<Item = &'a RawTick>) -> (RawTree, Vec<RawTick>) {
    let (mut out, mut path) = (RawTree::default(), Vec::new());
    let timeline = ticks.map(|tick| {
        stack(tree, tick.node, &mut path);
        RawTick {
            node: out.add(&path, tick.count).0,
            ..*tick
        }
    });
    let timeline = timeline.collect();
    (out, timeline)
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
        let tick = |i: usize| RawTick {
            time: i as u64,
            pid: 1,
            tid: 1,
            node: nodes[i],
            count: 1,
            time_spent: 0,
        };
        let ticks: Vec<RawTick> = (0..4).map(tick).collect();
        let (some, timeline) = subtree(&tree, ticks[2..].iter());
        assert_eq!(some.nodes().len(), 3);
        let mut path = Vec::new();
        stack(&some, timeline[0].node, &mut path);
        assert_eq!((path, timeline[0].time), (vec![k(1), k(2)], 2));
        assert_eq!((timeline[1].node, some.nodes()[0].2), (0, 1));
    }
}
