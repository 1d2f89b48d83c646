//! Events that repeat: written once a minute, and counted meanwhile.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How often the same event is written.
const INTERVAL: Duration = Duration::from_secs(60);

/// The events that were written lately, by what tells them from each other.
#[derive(Debug)]
pub struct Repetitions<K>(BTreeMap<K, Repeated>);

#[derive(Debug)]
struct Repeated {
    written: Instant,
    /// How often it happened since.
    more: u64,
}

impl<K> Default for Repetitions<K> {
    fn default() -> Repetitions<K> {
        Repetitions(BTreeMap::new())
    }
}

impl<K: Ord> Repetitions<K> {
    /// Counts an event that happens `now`. Returns how often it happened since it was last written, if it is to be written now.
    pub fn count(&mut self, key: K, now: Instant) -> Option<u64> {
        let more = match self.0.get_mut(&key) {
            Some(same) if now.duration_since(same.written) < INTERVAL => {
                same.more += 1;
                return None;
            }
            Some(same) => same.more,
            None => 0,
        };
        self.0.insert(key, Repeated { written: now, more: 0 });
        Some(more)
    }

    /// Whether an event was written lately, or fewer than `most` others were.
    pub fn has_room_for(&self, key: &K, most: usize) -> bool {
        self.0.contains_key(key) || self.0.len() < most
    }

    /// Forgets an event, which is written the next time.
    pub fn forget(&mut self, key: &K) {
        self.0.remove(key);
    }

    /// Forgets the events that were written a minute before `now` or earlier, except for one. Returns those that happened
    /// since, and how often.
    pub fn take_old(&mut self, now: Instant, except: Option<&K>) -> Vec<(K, u64)> {
        self.take(|key, event| Some(key) != except && now.duration_since(event.written) >= INTERVAL)
    }

    /// The same for all events.
    pub fn take_all(&mut self) -> Vec<(K, u64)> {
        self.take(|_, _| true)
    }

    fn take(&mut self, is_taken: impl Fn(&K, &Repeated) -> bool) -> Vec<(K, u64)> {
        let (taken, kept) = std::mem::take(&mut self.0)
            .into_iter()
            .partition::<BTreeMap<_, _>, _>(|(key, event)| is_taken(key, event));
        self.0 = kept;
        let repeated = taken.into_iter().filter(|(_, event)| event.more > 0);
        repeated.map(|(key, event)| (key, event.more)).collect()
    }
}
