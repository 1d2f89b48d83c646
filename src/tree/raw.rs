//! Raw stacks as a prefix tree: each sample is one node, each node one frame below its caller.

use rustc_hash::FxHashMap;

use crate::sample::{Pid, RawFrame, Tid};

pub type RawNode = u32;

/// The last stack of a thread and the nodes of its frames.
#[derive(Debug, Default)]
pub struct Path {
    frames: Vec<RawFrame>,
    nodes: Vec<RawNode>,
}

/// One sample in order of time.
#[derive(Clone, Copy, Debug)]
pub struct RawTick {
    /// CLOCK_MONOTONIC, ns.
    pub time: u64,
    pub pid: Pid,
    pub tid: Tid,
    pub node: RawNode,
}

/// A tree of frames with a count in each node. Node 0 is the root and has no frame.
#[derive(Debug)]
pub struct RawTree {
    nodes: Vec<(RawNode, Option<RawFrame>, u64)>,
    children: FxHashMap<(RawNode, RawFrame), RawNode>,
}

impl Default for RawTree {
    fn default() -> RawTree {
        RawTree {
            nodes: vec![(0, None, 0)],
            children: FxHashMap::default(),
        }
    }
}

impl RawTree {
    /// Counts one sample of the stack `frames`, outermost first; returns the node of its innermost frame.
    pub fn add(&mut self, frames: &[RawFrame]) -> RawNode {
        let mut node = 0;
        for f in frames {
            node = self.child(node, *f);
        }
        self.nodes[node as usize].2 += 1;
        node
    }

    /// The same, for one stack after the other of one thread: only what differs from the last one is looked up.
    pub fn add_next(&mut self, last: &mut Path, frames: &[RawFrame]) -> RawNode {
        let same = last.frames.iter().zip(frames).take_while(|(a, b)| a == b).count();
        last.frames.truncate(same);
        last.nodes.truncate(same);
        let mut node = last.nodes.last().copied().unwrap_or(0);
        for f in &frames[same..] {
            node = self.child(node, *f);
            last.frames.push(*f);
            last.nodes.push(node);
        }
        self.nodes[node as usize].2 += 1;
        node
    }

    fn child(&mut self, parent: RawNode, f: RawFrame) -> RawNode {
        *self.children.entry((parent, f)).or_insert_with(|| {
            self.nodes.push((parent, Some(f), 0));
            (self.nodes.len() - 1) as RawNode
        })
    }

    /// (parent, frame, samples that end here) of each node, callers before callees; the root has no frame.
    pub fn nodes(&self) -> &[(RawNode, Option<RawFrame>, u64)] {
        &self.nodes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_share_their_outer_part() {
        let mut t = RawTree::default();
        let k = |n| RawFrame::Kernel(n);
        let a = t.add(&[k(1), k(2)]);
        let b = t.add(&[k(1), k(3)]);
        assert_eq!(t.add(&[k(1), k(2)]), a);
        let mut last = Path::default();
        for (stack, node) in [(&[k(1), k(2)][..], a), (&[k(1), k(3)], b), (&[], 0), (&[k(1), k(2)], a)] {
            assert_eq!(t.add_next(&mut last, stack), node);
            t.nodes[node as usize].2 -= 1;
        }
        assert_eq!(t.add(&[]), 0);
        assert_eq!(t.nodes().len(), 4);
        assert_eq!(
            (t.nodes()[a as usize].2, t.nodes()[b as usize].2, t.nodes()[0].2),
            (2, 1, 1)
        );
    }
}
