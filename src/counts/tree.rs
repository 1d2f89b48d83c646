//! Raw stacks as a prefix tree: each sample is one node, each node one frame below its caller.

use std::hash::BuildHasher;

use hashbrown::HashTable;
use rustc_hash::FxBuildHasher;

use crate::event::{Pid, Tid};
use crate::frame::RawFrame;
use crate::truncation::Truncation;

pub type RawNode = u32;

/// Nodes kept, at most (some 50 bytes each, and a few hundred when named): what a strange program can make us keep is
/// bounded. A stack that needs more is truncated where it leaves the tree.
const MAX_NODES: usize = 1 << 20;

/// Maximum bytes of Python names, as written, of all nodes: each node is written with its names, several times. Enough
/// for about 250,000 Python nodes with usual names.
const MAX_NAMES: usize = 24 << 20;
/// Part of the nodes and names that one process of a host may add.
const SHARE: usize = 4;

/// The last stack of a thread and the nodes of its frames.
#[derive(Debug, Default)]
pub struct FramePath {
    frames: Vec<RawFrame>,
    nodes: Vec<RawNode>,
    /// The tree of the nodes, as [`RawTree::generation`].
    generation: u32,
}

impl FramePath {
    /// Bytes on the heap.
    pub fn bytes(&self) -> usize {
        size_of::<RawFrame>() * self.frames.capacity() + size_of::<RawNode>() * self.nodes.capacity()
    }
}

/// One sample of the timeline.
#[derive(Clone, Copy, Debug)]
pub struct RawTimelineSample {
    /// CLOCK_MONOTONIC, ns.
    pub time: u64,
    pub pid: Pid,
    pub tid: Tid,
    pub node: RawNode,
    /// Sampling periods that it represents.
    pub count: u32,
    /// Time that it represents, ns, or memory, bytes; 0 where every sample represents one period.
    pub amount: u64,
    /// Number of the set of its labels; 0: it has none.
    pub labels: u32,
}

/// What one of many processes has added to a tree, of which each has a part only.
#[derive(Debug, Default)]
pub struct TreeShare {
    nodes: usize,
    names: usize,
}

/// A tree of frames with a count in each node. Node 0 is the root and has no frame.
pub struct RawTree {
    nodes: Vec<(RawNode, Option<RawFrame>, u64)>,
    /// Nodes by parent and frame.
    children: HashTable<RawNode>,
    most: usize,
    /// Remaining bytes of names.
    names: usize,
    /// Trees before this one whose paths may be passed to it.
    generation: u32,
}

impl Default for RawTree {
    fn default() -> RawTree {
        RawTree::bounded(MAX_NODES)
    }
}

impl RawTree {
    fn bounded(most: usize) -> RawTree {
        RawTree {
            nodes: vec![(0, None, 0)],
            children: HashTable::new(),
            most,
            names: MAX_NAMES,
            generation: 0,
        }
    }

    /// An empty tree that takes the place of this one: paths in this one are not taken for paths in it.
    pub fn successor(&self) -> RawTree {
        RawTree {
            generation: self.generation.wrapping_add(1),
            ..RawTree::default()
        }
    }

    /// Counts the stack `frames`, outermost first, `count` times; returns the node of its innermost frame, and whether
    /// there was room for the complete stack.
    pub fn add(&mut self, frames: &[RawFrame], count: u32) -> (RawNode, bool) {
        self.add_incremental(&mut FramePath::default(), frames, count, &|_| 0)
    }

    /// The same for consecutive stacks of one thread: only frames that differ from the previous stack are looked up.
    /// `name` returns the bytes of a frame's names; the stack is counted `count` times.
    pub fn add_incremental(
        &mut self,
        last: &mut FramePath,
        frames: &[RawFrame],
        count: u32,
        name: &dyn Fn(&RawFrame) -> usize,
    ) -> (RawNode, bool) {
        if last.generation != self.generation {
            (last.frames, last.nodes) = Default::default();
            last.generation = self.generation;
        }
        let same = last.frames.iter().zip(frames).take_while(|(a, b)| a == b).count();
        last.frames.truncate(same);
        last.nodes.truncate(same);
        let mut node = last.nodes.last().copied().unwrap_or(0);
        let mut is_complete = true;
        for f in &frames[same..] {
            let Some(next) = self.child(node, *f, self.most, name) else {
                node = self.truncated_node(node);
                is_complete = false;
                break;
            };
            node = next;
            last.frames.push(*f);
            last.nodes.push(node);
        }
        self.nodes[node as usize].2 += u64::from(count);
        (node, is_complete)
    }

    /// The same for a process of which nodes are counted in `share`, and which may add a quarter of all.
    pub fn add_shared(
        &mut self,
        share: &mut TreeShare,
        last: &mut FramePath,
        frames: &[RawFrame],
        count: u32,
        name: &dyn Fn(&RawFrame) -> usize,
    ) -> (RawNode, bool) {
        let (nodes, names, most) = (self.nodes.len(), self.names, self.most);
        let room = if share.names < MAX_NAMES / SHARE {
            (most / SHARE).saturating_sub(share.nodes)
        } else {
            0
        };
        self.most = most.min(nodes + room);
        let added = self.add_incremental(last, frames, count, name);
        self.most = most;
        share.nodes += self.nodes.len() - nodes;
        share.names += names - self.names;
        added
    }

    /// Counts the stack that ends at a node `count` times more.
    pub fn count(&mut self, node: RawNode, count: u32) {
        if let Some((.., counted)) = self.nodes.get_mut(node as usize) {
            *counted += u64::from(count);
        }
    }

    /// Where a stack ends for which there is no room.
    fn truncated_node(&mut self, parent: RawNode) -> RawNode {
        let truncated = RawFrame::Truncated(Truncation::TreeLimit);
        // In the end, only below the root.
        let here = self.child(parent, truncated, self.most + self.most / 8, &|_| 0);
        here.or_else(|| self.child(0, truncated, usize::MAX, &|_| 0))
            .unwrap_or(0)
    }

    /// The node of a frame below its caller, created if there are fewer than `most`.
    fn child(
        &mut self,
        parent: RawNode,
        f: RawFrame,
        most: usize,
        name: &dyn Fn(&RawFrame) -> usize,
    ) -> Option<RawNode> {
        let nodes = &mut self.nodes;
        let hash = |key: &(RawNode, Option<RawFrame>)| FxBuildHasher.hash_one(key);
        let is = |node: &RawNode| {
            let (p, frame, _) = &nodes[*node as usize];
            (*p, *frame) == (parent, Some(f))
        };
        let key = hash(&(parent, Some(f)));
        if let Some(node) = self.children.find(key, is) {
            return Some(*node);
        }
        if nodes.len() >= most {
            return None;
        }
        self.names = self.names.checked_sub(name(&f))?;
        let node = nodes.len() as RawNode;
        nodes.push((parent, Some(f), 0));
        self.children.insert_unique(key, node, |n| {
            let (p, frame, _) = &nodes[*n as usize];
            hash(&(*p, *frame))
        });
        Some(node)
    }

    /// (parent, frame, samples that end here) of each node, callers before callees; the root has no frame.
    pub fn nodes(&self) -> &[(RawNode, Option<RawFrame>, u64)] {
        &self.nodes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn k(n: u64) -> RawFrame {
        RawFrame::Kernel(n)
    }

    #[test]
    fn stacks_share_their_outer_part() {
        let mut t = RawTree::default();
        let (a, _) = t.add(&[k(1), k(2)], 1);
        let (b, _) = t.add(&[k(1), k(3)], 1);
        assert_eq!(t.add(&[k(1), k(2)], 1), (a, true));
        let mut last = FramePath::default();
        for (stack, node) in [(&[k(1), k(2)][..], a), (&[k(1), k(3)], b), (&[], 0), (&[k(1), k(2)], a)] {
            assert_eq!(t.add_incremental(&mut last, stack, 1, &|_| 1), (node, true));
            t.nodes[node as usize].2 -= 1;
        }
        assert_eq!(t.add(&[], 1), (0, true));
        assert_eq!(t.nodes().len(), 4);
        assert_eq!(
            (t.nodes()[a as usize].2, t.nodes()[b as usize].2, t.nodes()[0].2),
            (2, 1, 1)
        );
    }

    #[test]
    fn a_full_tree_truncates_stacks_and_counts_them() {
        let mut t = RawTree::bounded(8);
        let mut last = FramePath::default();
        let mut truncated = 0;
        for round in 0..3 {
            for i in 0..100 {
                let stack = [k(0), k(1), k(100 + i), k(200 + i)];
                let (node, is_complete) = t.add_incremental(&mut last, &stack, 1, &|_| 1);
                truncated += u64::from(!is_complete);
                let frame = t.nodes()[node as usize].1;
                assert_eq!(
                    frame == Some(RawFrame::Truncated(Truncation::TreeLimit)),
                    !is_complete,
                    "{round} {i}"
                );
            }
        }
        assert!(t.nodes().len() <= 8 + 8 / 8 + 1);
        assert_eq!(t.nodes().iter().map(|n| n.2).sum::<u64>(), 300, "nothing is left out");
        assert_eq!(truncated, 300 - 3 * 2, "two stacks and a half fit");
    }

    #[test]
    fn one_process_of_many_fills_a_quarter() {
        let mut t = RawTree::bounded(4000);
        let (mut one, mut other) = (TreeShare::default(), TreeShare::default());
        let add = |t: &mut RawTree, share: &mut TreeShare, frame: u64| {
            t.add_shared(share, &mut FramePath::default(), &[k(frame)], 1, &|_| 1)
        };
        let complete = (0..3000).filter(|frame| add(&mut t, &mut one, *frame).1).count();
        assert_eq!(complete, 1000);
        assert!(add(&mut t, &mut one, 999).1, "what is known has room");
        let complete = (5000..5900).filter(|frame| add(&mut t, &mut other, *frame).1).count();
        assert_eq!(complete, 900);
        assert_eq!(t.nodes().iter().map(|n| n.2).sum::<u64>(), 3901, "nothing is left out");
    }

    #[test]
    fn names_fill_a_tree_too() {
        let mut t = RawTree {
            names: 10,
            ..RawTree::default()
        };
        for (n, fits) in [(1, true), (2, true), (3, false), (2, true)] {
            assert_eq!(
                t.add_incremental(&mut FramePath::default(), &[k(n)], 1, &|_| 4).1,
                fits,
                "{n}"
            );
        }
    }
}
