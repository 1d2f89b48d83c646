//! The executable mappings last reported, so that changes without a record can be reported later.

use rustc_hash::FxHashMap;

use crate::event::{Event, Pid};
use crate::process::maps;
use crate::process::system::{LiveSystem, System};

/// Start -> end, offset, path.
type KnownMappings = FxHashMap<u64, (u64, u64, Vec<u8>)>;

/// The reported mappings of each process.
#[derive(Default)]
pub struct MappingTracker(FxHashMap<Pid, KnownMappings>);

impl MappingTracker {
    /// Records the mappings that an event reports.
    pub fn observe(&mut self, event: &Event) {
        match event {
            Event::Mmap {
                pid,
                start,
                end,
                offset,
                path,
            } => {
                let known = self.0.entry(*pid).or_default();
                known.insert(*start, (*end, *offset, path.clone()));
            }
            Event::Exec { pid, .. } | Event::Fork { pid, .. } => drop(self.0.remove(pid)),
            _ => {}
        }
    }

    pub fn remove_process(&mut self, pid: Pid) {
        self.0.remove(&pid);
    }

    /// Reads the mappings and appends an event for each new one; for a process not seen before, for all.
    pub fn rescan(&mut self, pid: Pid, out: &mut Vec<Event>) {
        let Ok(text) = LiveSystem.maps(pid) else { return }; // it has exited
        let known = self.0.entry(pid).or_default();
        let mut now = KnownMappings::default();
        for m in maps::parse(&text).into_iter().filter(|m| m.executable) {
            let is = (m.end, m.offset, m.path);
            if known.get(&m.start) != Some(&is) {
                out.push(Event::Mmap {
                    pid,
                    start: m.start,
                    end: is.0,
                    offset: is.1,
                    path: is.2.clone(),
                });
            }
            now.insert(m.start, is);
        }
        *known = now;
    }
}
