//! Stacks by line during the construction of a profile.

use rustc_hash::FxHashMap;

use super::model::{NodeId, Place, PlaceId};

/// Distinct places.
#[derive(Debug)]
pub struct Places {
    /// The places by their number; the first one is [`Place::ROOT`].
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
    /// The place of a line (0: unknown) of a node as called from another place, created if needed.
    pub fn child(&mut self, parent: PlaceId, node: NodeId, line: u32) -> PlaceId {
        let all = &mut self.all;
        *self.known.entry((parent, node, line)).or_insert_with(|| {
            all.push(Place { parent, node, line });
            all.len() as PlaceId - 1
        })
    }
}
