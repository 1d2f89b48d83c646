//! Stacks by line while a profile is being made.

use rustc_hash::FxHashMap;

use super::profile::{NodeId, Place, PlaceId};

/// Places, each kept once.
#[derive(Debug)]
pub struct Places {
    pub all: Vec<Place>,
    known: FxHashMap<(PlaceId, NodeId, u32), PlaceId>,
}

impl Default for Places {
    fn default() -> Places {
        Places {
            all: vec![Place::ROOT],
            known: FxHashMap::default(),
        }
    }
}

impl Places {
    /// The place of a line (0: not known) of a node as called from another place, made when it is new.
    pub fn child(&mut self, parent: PlaceId, node: NodeId, line: u32) -> PlaceId {
        let all = &mut self.all;
        *self.known.entry((parent, node, line)).or_insert_with(|| {
            all.push(Place { parent, node, line });
            all.len() as PlaceId - 1
        })
    }
}
