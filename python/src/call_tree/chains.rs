//! Chains of callers, with the calls and times of each.

use crate::engine::table::PairTable;
use crate::engine::{EndedFunctions, FunctionNumber};

/// Most chains of callers in one thread: about 100 MB.
const MAX_NODES: usize = 1 << 20;

/// Node of the thread itself.
pub const ROOT: u32 = 0;
/// Node for calls in chains beyond [`MAX_NODES`].
pub const OVERFLOW: u32 = 1;

pub struct CallNode {
    pub function: FunctionNumber,
    pub parent: u32,
    pub key: usize,
    pub calls: u64,
    /// Ticks in it alone.
    pub wall: i64,
    /// Nanoseconds of the thread's CPU time in it alone.
    pub cpu: i64,
    /// What it called last.
    pub last_key: usize,
    pub last_child: u32,
}

impl CallNode {
    fn new(function: FunctionNumber, parent: u32, key: usize) -> CallNode {
        CallNode {
            function,
            parent,
            key,
            calls: 0,
            wall: 0,
            cpu: 0,
            last_key: 0,
            last_child: 0,
        }
    }
}

/// The chains of one thread, or of several that have ended.
pub struct CallChains {
    pub nodes: Vec<CallNode>,
    /// (parent, key) to `nodes`.
    pub index: PairTable,
}

impl CallChains {
    pub fn new() -> CallChains {
        CallChains {
            nodes: vec![
                CallNode::new(FunctionNumber::MAX, ROOT, 0),
                CallNode::new(FunctionNumber::MAX, ROOT, 0),
            ],
            index: PairTable::default(),
        }
    }

    /// The child of `parent` for a function, made if there is room.
    pub fn child(&mut self, parent: u32, key: usize, function: FunctionNumber) -> u32 {
        if parent == OVERFLOW {
            return OVERFLOW;
        }
        if let Some(node) = self.index.get(parent, key) {
            return node;
        }
        if self.nodes.len() >= MAX_NODES {
            return OVERFLOW;
        }
        let node = self.nodes.len() as u32;
        self.nodes.push(CallNode::new(function, parent, key));
        self.index.insert(parent, key, node);
        node
    }

    pub fn add(&mut self, other: &CallChains) {
        self.add_as(other, |node| (node.key, node.function));
    }

    /// Calls functions by what they are called from now on. Gives the new place of each node.
    pub fn rename(&mut self, ended: &mut EndedFunctions) -> Vec<u32> {
        let old = std::mem::replace(self, CallChains::new());
        self.add_as(&old, |node| (ended.key(node.key), ended.number(node.function)))
    }

    /// Adds all of another tree, with the keys and numbers that `name` gives for its nodes. Gives the place of each of them.
    fn add_as(&mut self, other: &CallChains, mut name: impl FnMut(&CallNode) -> (usize, FunctionNumber)) -> Vec<u32> {
        let mut places: Vec<u32> = Vec::with_capacity(other.nodes.len());
        for (at, node) in other.nodes.iter().enumerate() {
            let place = match at as u32 {
                ROOT => ROOT,
                OVERFLOW => OVERFLOW,
                _ => {
                    let parent = places.get(node.parent as usize).copied().unwrap_or(OVERFLOW);
                    let (key, function) = name(node);
                    self.child(parent, key, function)
                }
            };
            places.push(place);
            if let Some(sum) = self.nodes.get_mut(place as usize) {
                sum.calls += node.calls;
                sum.wall = sum.wall.wrapping_add(node.wall);
                sum.cpu = sum.cpu.wrapping_add(node.cpu);
            }
        }
        places
    }
}
