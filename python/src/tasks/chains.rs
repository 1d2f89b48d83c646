//! What is charged: a tree of chains of callers, from where each task begins.

use crate::engine::table::PairTable;
use crate::engine::{EndedFunctions, EventOutcome, FunctionNumber};

/// Most chains of callers in one thread: about 100 MB.
const MAX_NODES: usize = 1 << 20;

/// Node of the thread itself: what runs outside of all functions that are known is charged to it alone.
pub const ROOT: u32 = 0;
/// Functions in chains beyond [`MAX_NODES`] are right below it.
pub const OVERFLOW: u32 = 1;
/// The event loop, outside of tasks.
pub const MAIN: u32 = 2;
/// Waits of the event loop.
pub const WAIT: u32 = 3;

/// Numbers of what is not a function: the event loop and waits.
pub const MAIN_ID: FunctionNumber = FunctionNumber::MAX - 1;
pub const WAIT_ID: FunctionNumber = FunctionNumber::MAX - 2;
/// A key that is not an address of an object.
const WAIT_KEY: usize = 1;

/// A chain: a function, in its callers.
pub struct ChainNode {
    pub function: FunctionNumber,
    pub parent: u32,
    pub key: usize,
    /// As [`super::kinds`] has it.
    pub kind: u8,
    /// Activations: not how often a coroutine was resumed. Of waits: their number.
    pub calls: u64,
    /// Ticks in it alone.
    pub ticks: i64,
    /// Ticks for which its task was suspended in it.
    pub suspended: i64,
    /// What it called last.
    last_key: usize,
    last_child: u32,
}

impl ChainNode {
    fn new(function: FunctionNumber, parent: u32, key: usize, kind: u8) -> ChainNode {
        ChainNode {
            function,
            parent,
            key,
            kind,
            calls: 0,
            ticks: 0,
            suspended: 0,
            last_key: 0,
            last_child: 0,
        }
    }
}

/// The chains of one thread, or of several.
pub struct TaskChains {
    pub nodes: Vec<ChainNode>,
    /// Further values of each node (not time), `width` for each.
    pub values: Vec<f64>,
    /// How often Python functions began or continued, and C functions were called: what tracing costs depends on it.
    pub entered: [u64; 2],
    width: usize,
    /// (parent, key) to `nodes`.
    index: PairTable,
}

impl TaskChains {
    /// Without any calls. `width`: number of values in addition to time.
    pub fn new(width: usize) -> TaskChains {
        let ids = [FunctionNumber::MAX, FunctionNumber::MAX, MAIN_ID, WAIT_ID];
        TaskChains {
            nodes: ids.map(|id| ChainNode::new(id, ROOT, 0, 0)).into(),
            values: vec![0.0; ids.len() * width],
            entered: [0; 2],
            width,
            index: PairTable::default(),
        }
    }

    /// The child of `parent` for a function that is known; `find` is for the others, and fails if it is left out.
    #[inline(always)]
    pub fn child(
        &mut self,
        parent: u32,
        key: usize,
        find: impl FnOnce() -> Option<(FunctionNumber, u8)>,
    ) -> Result<u32, EventOutcome> {
        if let Some(node) = self.nodes.get(parent as usize)
            && node.last_key == key
        {
            return Ok(node.last_child);
        }
        let child = match self.index.get(parent, key) {
            Some(child) => child,
            None => {
                let (id, kind) = find().ok_or(EventOutcome::Excluded)?;
                self.add_child(parent, key, id, kind)
            }
        };
        if let Some(node) = self.nodes.get_mut(parent as usize) {
            (node.last_key, node.last_child) = (key, child);
        }
        Ok(child)
    }

    #[cold]
    fn add_child(&mut self, mut parent: u32, key: usize, id: FunctionNumber, kind: u8) -> u32 {
        let above = self.nodes.get(parent as usize).map_or(ROOT, |n| n.parent);
        if self.nodes.len() >= MAX_NODES || above == OVERFLOW {
            parent = OVERFLOW;
            if let Some(known) = self.index.get(parent, key) {
                return known;
            }
        }
        let node = self.nodes.len() as u32;
        self.nodes.push(ChainNode::new(id, parent, key, kind));
        self.values.resize(self.nodes.len() * self.width, 0.0);
        self.index.insert(parent, key, node);
        node
    }

    /// The node for waits in the function of this node.
    pub fn wait_in(&mut self, node: u32) -> u32 {
        if node == MAIN || node == ROOT {
            return WAIT;
        }
        match self.index.get(node, WAIT_KEY) {
            Some(child) => child,
            None => self.add_child(node, WAIT_KEY, WAIT_ID, 0),
        }
    }

    /// The values of a node.
    pub fn values_of(&mut self, node: u32) -> &mut [f64] {
        let from = node as usize * self.width;
        self.values.get_mut(from..from + self.width).unwrap_or_default()
    }

    /// Adds all of another tree.
    pub fn add(&mut self, other: &TaskChains) {
        self.add_as(other, |node| (node.key, node.function));
    }

    /// Calls functions by what they are called from now on. Gives the new place of each node.
    pub fn rename(&mut self, ended: &mut EndedFunctions) -> Vec<u32> {
        let old = std::mem::replace(self, TaskChains::new(self.width));
        self.add_as(&old, |node| (ended.key(node.key), ended.number(node.function)))
    }

    /// Adds all of another tree, with the keys and numbers that `name` gives for its nodes. Gives the place of each of them.
    fn add_as(&mut self, other: &TaskChains, mut name: impl FnMut(&ChainNode) -> (usize, FunctionNumber)) -> Vec<u32> {
        for (sum, count) in self.entered.iter_mut().zip(other.entered) {
            *sum += count;
        }
        let mut places: Vec<u32> = Vec::with_capacity(other.nodes.len());
        for (at, node) in other.nodes.iter().enumerate() {
            let place = if at as u32 <= WAIT {
                at as u32
            } else {
                let parent = places.get(node.parent as usize).copied().unwrap_or(OVERFLOW);
                let (key, function) = name(node);
                let known = self.index.get(parent, key);
                known.unwrap_or_else(|| self.add_child(parent, key, function, node.kind))
            };
            places.push(place);
            if let Some(sum) = self.nodes.get_mut(place as usize) {
                sum.calls += node.calls;
                sum.ticks = sum.ticks.wrapping_add(node.ticks);
                sum.suspended = sum.suspended.wrapping_add(node.suspended);
            }
            let from = at * self.width;
            let values = other.values.get(from..from + self.width).unwrap_or_default();
            for (sum, value) in self.values_of(place).iter_mut().zip(values) {
                *sum += value;
            }
        }
        places
    }
}
