//! Places of control groups by their number, for processes that have exited when their first sample is handled.
//!
//! The number is the inode of the group's directory in the hierarchy of version 2 (Linux, `cgroup_id`). A thread reads it when
//! the group is made: a container may be gone before its first sample is handled. A group that was removed is remembered for
//! some segments.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::cgroup::{self, Place};
use crate::sys::cgroup as groups;
use crate::sys::directory_watch::{DirectoryChange, DirectoryWatch, WatchId};
use crate::sys::files;

/// Groups that are remembered.
const MAX_GROUPS: usize = 65_536;
/// Shortest time between two searches for groups that the thread has not seen.
const INTERVAL: Duration = Duration::from_secs(1);
/// Segments after which a group that is not watched and was not asked for is forgotten.
const UNUSED_SEGMENTS: u64 = 5;
/// Longest time that the thread waits. It ends at once if it is to.
const WAIT: Duration = Duration::from_secs(3600);

/// Groups by number.
#[derive(Debug)]
pub struct Groups {
    root: Option<PathBuf>,
    known: Arc<Mutex<Known>>,
    searched: Option<Instant>,
    /// Closed when this is dropped, which ends the thread.
    _end: Option<File>,
}

#[derive(Debug, Default)]
struct Known {
    segment: u64,
    by_number: FxHashMap<u64, Group>,
    /// Groups that were not remembered because there are too many.
    refused: u64,
}

#[derive(Debug)]
struct Group {
    place: Place,
    is_watched: bool,
    /// Segment in which it was asked for, or removed.
    used: u64,
}

impl Known {
    fn insert(&mut self, number: u64, place: Place, is_watched: bool) {
        let used = self.segment;
        if let Some(group) = self.by_number.get_mut(&number) {
            // The number of one that was removed may be used again.
            group.is_watched |= is_watched;
            group.place = place;
            group.used = used;
        } else if self.by_number.len() < MAX_GROUPS {
            let group = Group {
                place,
                is_watched,
                used,
            };
            self.by_number.insert(number, group);
        } else if is_watched {
            // Others are searched for again and again.
            self.refused += 1;
        }
    }
}

fn lock(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Groups {
    /// Those of this machine, and new ones as they are made.
    pub fn of_machine() -> Groups {
        Groups::below(groups::unified_root())
    }

    /// Those below a directory; `None`: only those of processes that run.
    pub(super) fn below(root: Option<PathBuf>) -> Groups {
        let known = Arc::default();
        let end = root.as_ref().and_then(|root| watch(root.clone(), &known));
        Groups {
            root,
            known,
            searched: None,
            _end: end,
        }
    }

    /// Takes note of the group of a process that runs, if the hierarchy is not to be seen; `text` is that of its
    /// `/proc/PID/cgroup`. (The process may have been moved since its sample was taken.)
    pub fn add(&mut self, number: u64, text: &str) {
        let path = text.lines().find_map(|line| line.strip_prefix("0::"));
        if let Some(path) = path.filter(|_| number != 0 && self.root.is_none()) {
            lock(&self.known).insert(number, cgroup::of_path(path), false);
        }
    }

    /// The place of a group. Unknown ones are searched for, at most once a second.
    pub fn place(&mut self, number: u64) -> Option<Place> {
        if number == 0 {
            return None;
        }
        let is_due = self.searched.is_none_or(|last| last.elapsed() >= INTERVAL);
        if is_due && !lock(&self.known).by_number.contains_key(&number) {
            self.searched = Some(Instant::now());
            self.search();
        }
        let mut known = lock(&self.known);
        let segment = known.segment;
        let group = known.by_number.get_mut(&number)?;
        group.used = segment;
        Some(group.place.clone())
    }

    /// Forgets groups that are not watched and were not asked for in the last segments.
    pub fn end_segment(&mut self) {
        let mut known = lock(&self.known);
        known.segment += 1;
        let oldest = known.segment.saturating_sub(UNUSED_SEGMENTS);
        known
            .by_number
            .retain(|_, group| group.is_watched || group.used >= oldest);
    }

    /// Groups that were not remembered because there are too many, so far.
    pub fn refused(&self) -> u64 {
        lock(&self.known).refused
    }

    fn search(&mut self) {
        let Some(root) = &self.root else { return };
        groups::each_below(root, &mut |path, number| {
            lock(&self.known).insert(number, place_below(root, path), false);
            true
        });
    }
}

fn place_below(root: &Path, path: &Path) -> Place {
    let below = path.strip_prefix(root).unwrap_or(path);
    cgroup::of_path(&below.to_string_lossy())
}

/// Starts the thread that reads the numbers of groups as they are made; it ends when what is returned is closed. `None`: it
/// cannot be started.
fn watch(root: PathBuf, known: &Arc<Mutex<Known>>) -> Option<File> {
    let (end, ours) = files::pipe().ok()?;
    let mut watcher = Watcher {
        watch: DirectoryWatch::new().ok()?,
        watched: FxHashMap::default(),
        known: known.clone(),
        root,
    };
    // Those that are there already are known from the beginning.
    watcher.add_all(&watcher.root.clone());
    let run = move || {
        while !files::is_hung_up(end.as_fd()) {
            // (An interruption is no error here.)
            if files::poll(&[watcher.watch.as_fd(), end.as_fd()], WAIT).is_err() {
                return;
            }
            watcher.handle();
        }
    };
    let thread = std::thread::Builder::new().name("cgroups".into()).spawn(run);
    thread.ok().map(|_| ours)
}

/// What the thread has.
struct Watcher {
    root: PathBuf,
    watch: DirectoryWatch,
    /// Path and number of each group that is watched.
    watched: FxHashMap<WatchId, (PathBuf, u64)>,
    known: Arc<Mutex<Known>>,
}

impl Watcher {
    fn handle(&mut self) {
        for change in self.watch.read() {
            match change {
                DirectoryChange::Made { within, name } => {
                    if let Some((path, _)) = self.watched.get(&within) {
                        self.add_all(&path.join(name));
                    }
                }
                DirectoryChange::Removed(watch) => {
                    let Some((_, number)) = self.watched.remove(&watch) else {
                        continue;
                    };
                    let mut known = lock(&self.known);
                    let segment = known.segment;
                    if let Some(group) = known.by_number.get_mut(&number) {
                        group.is_watched = false;
                        group.used = segment;
                    }
                }
                DirectoryChange::Lost => {
                    // Removals may be among what was lost. The same directories get the same watches.
                    self.watched.clear();
                    let mut known = lock(&self.known);
                    let segment = known.segment;
                    for group in known.by_number.values_mut() {
                        (group.is_watched, group.used) = (false, segment);
                    }
                    drop(known);
                    self.add_all(&self.root.clone());
                }
            }
        }
    }

    /// Adds a group and those below it.
    fn add_all(&mut self, path: &Path) {
        if self.add(path) {
            // Each is listed after it is watched: none is made in between.
            groups::each_below(path, &mut |path, _| self.add(path));
        }
    }

    /// Adds a group; false if it is gone.
    fn add(&mut self, path: &Path) -> bool {
        // Read right before it is watched: what a list says may be of one that was removed and made again.
        let Ok(group) = fs::symlink_metadata(path) else {
            return false;
        };
        let (number, place) = (group.ino(), place_below(&self.root, path));
        let watch = if self.watched.len() < MAX_GROUPS {
            self.watch.add(path).ok()
        } else {
            None
        };
        lock(&self.known).insert(number, place, watch.is_some());
        if let Some(watch) = watch {
            self.watched.insert(watch, (path.to_path_buf(), number));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(place: Option<Place>) -> Option<String> {
        place.and_then(|place| place.container)
    }

    #[test]
    fn groups_of_version_2_are_remembered() {
        let id = "0123456789abcdef".repeat(4);
        let mut groups = Groups::below(None);
        groups.add(7, &format!("3:cpu:/docker/ffff\n0::/docker/{id}\n"));
        // Without the hierarchy of version 2 the number says nothing.
        groups.add(8, &format!("3:cpu:/docker/{id}\n"));
        groups.add(0, &format!("0::/docker/{id}\n"));
        assert_eq!(container(groups.place(7)), Some(id));
        assert_eq!((container(groups.place(8)), container(groups.place(0))), (None, None));
        for _ in 0..=UNUSED_SEGMENTS {
            groups.end_segment();
        }
        assert!(groups.place(7).is_none());
        assert_eq!(groups.refused(), 0);
    }

    #[test]
    fn groups_that_were_removed_are_known_and_forgotten_later() {
        let directory = std::env::temp_dir().join(format!("nativeprof-groups-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        let mut groups = Groups::below(Some(directory.clone()));
        // As a container engine does: several levels at once, gone soon.
        let id = "fedcba9876543210".repeat(4);
        let group = directory.join("system.slice").join(format!("docker-{id}.scope"));
        fs::create_dir_all(&group).expect("a directory");
        let number = fs::metadata(&group).expect("its number").ino();
        let seen = |groups: &Groups| lock(&groups.known).by_number.contains_key(&number);
        while !seen(&groups) {
            std::thread::yield_now();
        }
        fs::remove_dir_all(directory.join("system.slice")).expect("it is ours");
        let is_watched = |groups: &Groups| {
            let known = lock(&groups.known);
            known.by_number.get(&number).is_some_and(|group| group.is_watched)
        };
        while is_watched(&groups) {
            std::thread::yield_now();
        }
        assert_eq!(container(groups.place(number)), Some(id));
        for _ in 0..=UNUSED_SEGMENTS {
            groups.end_segment();
        }
        assert!(!seen(&groups));
        // One that is there is kept, though it is not asked for.
        let root = fs::metadata(&directory).expect("its number").ino();
        assert!(lock(&groups.known).by_number.contains_key(&root));
        drop(groups);
        fs::remove_dir_all(&directory).expect("it is ours");
    }

    #[test]
    fn without_a_watch_groups_are_searched_for() {
        let directory = std::env::temp_dir().join(format!("nativeprof-search-{}", std::process::id()));
        let mut groups = Groups::below(None);
        groups.root = Some(directory.clone());
        let id = "fedcba9876543210".repeat(4);
        let group = directory.join("docker").join(&id);
        fs::create_dir_all(&group).expect("a directory");
        let number = fs::metadata(&group).expect("its number").ino();
        assert_eq!(container(groups.place(number)), Some(id));
        fs::remove_dir_all(&directory).expect("it is ours");
        assert!(groups.place(number).is_some());
    }
}
