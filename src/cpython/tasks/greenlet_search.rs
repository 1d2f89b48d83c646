//! Where the greenlets of a process are: a search of the memory that Python allocates, all at once or piece by piece.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use super::greenlets::python_object;
use super::objects::Objects;
use super::{Gap, MAX_TASKS, OtherTasks};
use crate::event::PAGE;
use crate::process::maps::Mapping;
use crate::process::memory::{Memory, Pages};

/// Memory that is searched of one process at most, bytes, and how much is read at a time.
pub const MAX_SEARCHED: u64 = 16 << 30;
const CHUNK: usize = 1 << 20;
/// Python allocates objects of one size next to each other, in pools of this size or multiples of it.
const PLACE: u64 = 16 << 10;
/// Maximum number of places that are searched again and again.
const MAX_PLACES: usize = 2048;

/// The greenlets found so far, and how far the search has come.
#[derive(Default)]
pub struct GreenletSearch {
    /// Object of C++ -> object of Python.
    known: FxHashMap<u64, u64>,
    /// Where they were found: new ones are likely to be there.
    places: BTreeSet<u64>,
    maps: Vec<Mapping>,
    /// Of the file of greenlet.
    module: (u64, u64),
    /// Mapping and address to continue with, and what has been searched since the beginning.
    next: (usize, u64),
    searched: u64,
}

impl GreenletSearch {
    /// Begins to search all memory; those found before remain.
    pub fn begin(&mut self, maps: Vec<Mapping>) {
        let is_of_greenlet = |m: &&Mapping| {
            let file = m.path.rsplit(|c| *c == b'/').next().unwrap_or_default();
            file.starts_with(b"_greenlet.")
        };
        let module = maps.iter().filter(is_of_greenlet);
        let range = module.fold((u64::MAX, 0), |(low, high), m| (m.start.min(low), m.end.max(high)));
        self.module = range;
        self.maps = maps;
        (self.next, self.searched) = ((0, 0), 0);
    }

    /// Whether all memory has been searched since it began.
    pub fn is_complete(&self) -> bool {
        self.next.0 >= self.maps.len()
    }

    pub fn maps(&self) -> &[Mapping] {
        &self.maps
    }

    /// Objects of C++ and of Python, by address.
    pub fn found(&self) -> Vec<(u64, u64)> {
        let mut found: Vec<_> = self.known.iter().map(|(object, address)| (*object, *address)).collect();
        found.sort_unstable();
        found
    }

    fn visit(&mut self, objects: &Objects<'_>, at: u64, bytes: &[u8]) {
        let (low, high) = self.module;
        for (i, word) in bytes.chunks_exact(8).enumerate() {
            let word = word.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
            if !(low..high).contains(&word) || self.known.len() >= MAX_TASKS {
                continue;
            }
            let object = at + 8 * i as u64;
            if !self.known.contains_key(&object)
                && let Some(address) = python_object(objects, object)
            {
                self.known.insert(object, address);
                if self.places.len() < MAX_PLACES {
                    self.places.insert(object - object % PLACE);
                }
            }
        }
    }

    /// Searches a part of the memory.
    fn visit_range(&mut self, (live, objects): (&dyn Memory, &Objects<'_>), at: u64, buf: &mut [u8]) {
        if live.read(at, buf) {
            return self.visit(objects, at, buf);
        }
        // It was unmapped in part meanwhile, or has pages that nothing can read.
        for (at, page) in (at..).step_by(PAGE as usize).zip(buf.chunks_mut(PAGE as usize)) {
            if live.read(at, page) {
                self.visit(objects, at, page);
            }
        }
    }
}

impl OtherTasks {
    /// Continues to search for greenlets, for about so many bytes. Returns why some may be missing.
    pub fn find_greenlets(&self, live: &dyn Memory, search: &mut GreenletSearch, bytes: u64) -> Option<Gap> {
        let memory = Pages::new(live);
        let objects = self.objects(&memory);
        if search.module.1 == 0 {
            search.next.0 = search.maps.len();
            return None;
        }
        let is_data =
            |m: &Mapping| m.writable && (m.path.is_empty() || m.path == b"[heap]" || m.path.starts_with(b"[anon:"));
        let (mut left, mut buf) = (bytes, vec![0; CHUNK]);
        while let Some(m) = search.maps.get(search.next.0) {
            let (at, end) = (search.next.1.max(m.start), m.end);
            if at >= end || !is_data(m) {
                search.next = (search.next.0 + 1, 0);
                continue;
            }
            if search.known.len() >= MAX_TASKS || search.searched >= MAX_SEARCHED {
                let is_full = search.known.len() >= MAX_TASKS;
                search.next.0 = search.maps.len();
                return Some(if is_full { Gap::TooMany } else { Gap::TooLarge });
            }
            if left == 0 {
                return None;
            }
            let n = (end - at).min(CHUNK as u64);
            search.visit_range((live, &objects), at, &mut buf[..n as usize]);
            search.next.1 = at.saturating_add(n);
            search.searched += n;
            left = left.saturating_sub(n);
        }
        None
    }

    /// Forgets the greenlets that are gone, and searches where others were.
    pub fn refresh_greenlets(&self, live: &dyn Memory, search: &mut GreenletSearch) {
        let memory = Pages::new(live);
        let objects = self.objects(&memory);
        search
            .known
            .retain(|object, address| python_object(&objects, *object) == Some(*address));
        let places: BTreeSet<u64> = search.known.keys().map(|object| object - object % PLACE).collect();
        search.places.retain(|place| places.contains(place));
        let mut buf = [0; PLACE as usize];
        for place in search.places.clone() {
            search.visit_range((live, &objects), place, &mut buf);
        }
    }
}
