//! Futexes in the data of files: the variables of programs and libraries that threads wait for. Those on heaps and stacks have no
//! names.

use rustc_hash::FxHashMap;

use crate::event::FutexId;
use crate::frame::ModuleId;
use crate::process::AddressSpace;
use crate::process::modules::Modules;

/// Different futexes in one recording, at most: waits for others are counted without a name.
const MAX_FUTEXES: usize = 256;

#[derive(Default)]
pub(super) struct Futexes {
    /// File and svma.
    all: Vec<(ModuleId, u64)>,
    ids: FxHashMap<(ModuleId, u64), FutexId>,
}

impl Futexes {
    /// File and svma, by their number.
    pub(super) fn all(&self) -> &[(ModuleId, u64)] {
        &self.all
    }

    /// The futex at an address of a process, if it is in the data of a file.
    pub(super) fn at(&mut self, process: &AddressSpace, modules: &Modules, avma: u64) -> Option<FutexId> {
        let place = process.data_at(modules, avma)?;
        if let Some(id) = self.ids.get(&place) {
            return Some(*id);
        }
        if self.all.len() >= MAX_FUTEXES {
            return None;
        }
        let id = FutexId(u16::try_from(self.all.len()).ok()?);
        self.all.push(place);
        self.ids.insert(place, id);
        Some(id)
    }
}
