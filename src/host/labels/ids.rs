//! Places of control groups by their number, for processes that have exited when their first sample is handled.
//!
//! The number is the inode of the group's directory in the hierarchy of version 2 (Linux, `cgroup_id`). A group that was removed
//! is remembered for some segments.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::cgroup::{self, Place};
use crate::sys::cgroup as groups;

/// Groups that are remembered.
const MAX_GROUPS: usize = 65_536;
/// Shortest time between two searches.
const INTERVAL: Duration = Duration::from_secs(1);
/// Segments after which a group that was not seen again is forgotten.
const UNUSED_SEGMENTS: u64 = 5;

/// Groups by number.
#[derive(Debug)]
pub struct CgroupIds {
    root: Option<PathBuf>,
    segment: u64,
    /// With the segment in which it was last seen.
    known: FxHashMap<u64, (u64, Place)>,
    searched: Option<Instant>,
}

impl CgroupIds {
    /// No group is known yet.
    pub fn new() -> CgroupIds {
        CgroupIds {
            root: groups::unified_root(),
            segment: 0,
            known: FxHashMap::default(),
            searched: None,
        }
    }

    /// Takes note of the group of a process that runs; `text` is that of its `/proc/PID/cgroup`.
    pub fn add(&mut self, id: u64, text: &str) {
        let path = text.lines().find_map(|line| line.strip_prefix("0::"));
        if let Some(path) = path.filter(|_| id != 0) {
            self.insert(id, cgroup::of_path(path));
        }
    }

    /// The place of a group. Unknown groups are searched for, at most once a second.
    pub fn place(&mut self, id: u64) -> Option<Place> {
        if id == 0 {
            return None;
        }
        let is_due = self.searched.is_none_or(|last| last.elapsed() >= INTERVAL);
        if !self.known.contains_key(&id) && is_due {
            self.searched = Some(Instant::now());
            self.search();
        }
        let (seen, place) = self.known.get_mut(&id)?;
        *seen = self.segment;
        Some(place.clone())
    }

    /// Forgets groups that were not seen in the last segments.
    pub fn end_segment(&mut self) {
        self.segment += 1;
        let oldest = self.segment.saturating_sub(UNUSED_SEGMENTS);
        self.known.retain(|_, (seen, _)| *seen >= oldest);
    }

    fn insert(&mut self, id: u64, place: Place) {
        if self.known.len() < MAX_GROUPS || self.known.contains_key(&id) {
            self.known.insert(id, (self.segment, place));
        }
    }

    fn search(&mut self) {
        let Some(root) = self.root.clone() else { return };
        groups::each_below(&root, &mut |path, id| {
            let below = path.strip_prefix(&root).unwrap_or(path);
            self.insert(id, cgroup::of_path(&below.to_string_lossy()));
            true
        });
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn groups_of_version_2_are_remembered() {
        let container = "0123456789abcdef".repeat(4);
        let mut ids = CgroupIds::new();
        ids.root = None;
        ids.add(7, &format!("3:cpu:/docker/ffff\n0::/docker/{container}\n"));
        // Without the hierarchy of version 2 the number says nothing.
        ids.add(8, &format!("3:cpu:/docker/{container}\n"));
        ids.add(0, &format!("0::/docker/{container}\n"));
        let of = |ids: &mut CgroupIds, id| ids.place(id).and_then(|place| place.container);
        assert_eq!(of(&mut ids, 7).as_deref(), Some(&*container));
        assert_eq!((of(&mut ids, 8), of(&mut ids, 0)), (None, None));
        for _ in 0..=UNUSED_SEGMENTS {
            ids.end_segment();
        }
        assert!(ids.place(7).is_none());
    }

    #[test]
    fn groups_are_found_by_the_number_of_their_directory() {
        let container = "fedcba9876543210".repeat(4);
        let root = std::env::temp_dir().join(format!("nativeprof-groups-{}", std::process::id()));
        let group = root.join("system.slice").join(format!("docker-{container}.scope"));
        fs::create_dir_all(&group).expect("a directory");
        let id = std::os::unix::fs::MetadataExt::ino(&fs::metadata(&group).expect("its number"));
        let mut ids = CgroupIds::new();
        ids.root = Some(root.clone());
        let place = ids.place(id);
        fs::remove_dir_all(&root).expect("it is ours");
        assert_eq!(place.and_then(|place| place.container), Some(container));
        // It is remembered after its end.
        assert!(ids.place(id).is_some());
    }
}
