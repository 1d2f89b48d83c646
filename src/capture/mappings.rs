//! Executable mappings as last told, so that what changed unseen can be told late.

use rustc_hash::FxHashMap;

use crate::process::host::{Host, Live};
use crate::process::maps;
use crate::sample::{Event, Pid};

/// Start -> end, offset, path.
type Known = FxHashMap<u64, (u64, u64, Vec<u8>)>;

/// What was told of the mappings of each process.
#[derive(Default)]
pub struct Mappings(FxHashMap<Pid, Known>);

impl Mappings {
    /// Notes what an event told.
    pub fn see(&mut self, event: &Event) {
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

    pub fn forget(&mut self, pid: Pid) {
        self.0.remove(&pid);
    }

    /// Looks at the mappings and appends an event for each that is new. For a process never looked at, that is each.
    pub fn look(&mut self, pid: Pid, out: &mut Vec<Event>) {
        let Ok(text) = Live.maps(pid) else { return }; // it has ended
        let known = self.0.entry(pid).or_default();
        let mut now = Known::default();
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
