//! What the machine said during a recording. A call can have another response each time: a response says of which part of the
//! recording it is.

use std::cell::Cell;
use std::hash::Hash;

use rustc_hash::FxHashMap;

use crate::event::{Pid, Sample, Tid};

/// When a call was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct When {
    /// Number of events and marks before it.
    pub after: u32,
    /// How often the same call had been made since the last of them.
    pub call: u32,
}

/// The response to a call, and to the same calls that follow until there is another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response<K, V> {
    pub key: K,
    pub when: When,
    pub value: V,
}

/// Process, address and path of a mapping.
pub type Mapped = (Pid, u64, Vec<u8>);
/// A thread that was read while it slept, if it did.
pub type SleepingThread = Option<Box<Sample>>;
/// Process, address and length.
pub type MemoryRange = (Pid, u64, u32);

/// The machine's responses, those to the same call in the order in which they were given.
#[derive(Clone, Debug, Default)]
pub struct SystemResponses {
    pub maps: Vec<Response<Pid, Option<Vec<u8>>>>,
    pub stack_ends: Vec<Response<Pid, u64>>,
    pub threads: Vec<Response<Pid, Vec<Tid>>>,
    pub names: Vec<Response<(Pid, Tid), Option<String>>>,
    /// Index of the file.
    pub opened: Vec<Response<Mapped, Option<u32>>>,
    /// The bytes that could be read.
    pub reads: Vec<Response<MemoryRange, Vec<u8>>>,
    /// CLOCK_MONOTONIC (0) and the CPU time of the recording nativeprof (1), ns.
    pub clocks: Vec<Response<u8, u64>>,
    /// System calls that threads slept in.
    pub calls: Vec<Response<(Pid, Tid), Option<u64>>>,
    /// Sleeping threads that were read in addition to the samples.
    pub sleeping: Vec<Response<(Pid, Tid), SleepingThread>>,
    /// What file descriptors referred to.
    pub descriptors: Vec<Response<(Pid, u32), Option<String>>>,
    /// The lines of tables of sockets that matter.
    pub networks: Vec<Response<(Pid, String), Option<String>>>,
}

/// Responses by call, while they are recorded. One that equals the last one takes no room.
pub(super) struct ResponseLog<K, V> {
    all: Vec<Response<K, V>>,
    /// Of each call, when it was made the last time, and its last response in `all`.
    last: FxHashMap<K, (When, usize)>,
}

impl<K, V> Default for ResponseLog<K, V> {
    fn default() -> Self {
        ResponseLog {
            all: Vec::new(),
            last: FxHashMap::default(),
        }
    }
}

impl<K: Hash + Eq + Ord + Clone, V: PartialEq> ResponseLog<K, V> {
    /// Whether the response to a call is not that of its last one.
    pub(super) fn is_new(&self, key: &K, value: &V) -> bool {
        let last = self.last.get(key).and_then(|(_, at)| self.all.get(*at));
        last.is_none_or(|last| last.value != *value)
    }

    /// Adds the response to a call, which was made after so many events and marks.
    pub(super) fn add(&mut self, key: K, after: u32, value: V) {
        let is_new = self.is_new(&key, &value);
        let known = self.last.get(&key);
        let when = match known {
            Some((last, _)) if last.after == after => When {
                after,
                call: last.call + 1,
            },
            _ => When { after, call: 0 },
        };
        let at = match known {
            Some((_, at)) if !is_new => *at,
            _ => self.all.len(),
        };
        self.last.insert(key.clone(), (when, at));
        if is_new {
            self.all.push(Response { key, when, value });
        }
    }

    /// The responses, those to the same call one after the other.
    pub(super) fn take(&mut self) -> Vec<Response<K, V>> {
        self.last.clear();
        let mut all = std::mem::take(&mut self.all);
        all.sort_by(|a, b| a.key.cmp(&b.key));
        all
    }
}

/// Responses by call, for a replay.
pub(super) struct ResponseQueues<K, V>(FxHashMap<K, Responses<V>>);

struct Responses<V> {
    /// Ascending.
    all: Vec<(When, V)>,
    /// When the next call is made, unless there are events or marks before.
    next: Cell<When>,
}

impl<K: Hash + Eq + Clone, V: Clone> ResponseQueues<K, V> {
    pub(super) fn new(all: &[Response<K, V>]) -> ResponseQueues<K, V> {
        let mut map: FxHashMap<K, Responses<V>> = FxHashMap::default();
        for Response { key, when, value } in all {
            let responses = map.entry(key.clone()).or_insert_with(|| Responses {
                all: Vec::new(),
                next: Cell::default(),
            });
            responses.all.push((*when, value.clone()));
        }
        map.values_mut()
            .for_each(|responses| responses.all.sort_by_key(|(when, _)| *when));
        ResponseQueues(map)
    }

    /// The response to a call that is made after so many events and marks. One that was not made so early has the first response.
    pub(super) fn next(&self, key: &K, after: u32) -> Option<&V> {
        let responses = self.0.get(key)?;
        let when = Some(responses.next.get()).filter(|next| next.after == after);
        let when = when.unwrap_or(When { after, call: 0 });
        responses.next.set(When {
            call: when.call.saturating_add(1),
            ..when
        });
        let known = responses.all.partition_point(|(known, _)| *known <= when);
        responses.all.get(known.saturating_sub(1)).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_have_the_response_of_their_time() {
        let made = [
            (0, 'a'),
            (0, 'a'),
            (0, 'b'),
            (3, 'b'),
            (3, 'c'),
            (3, 'b'),
            (7, 'b'),
            (7, 'd'),
        ];
        let mut log = ResponseLog::default();
        for (after, value) in made {
            log.add((), after, value);
        }
        let all = log.take();
        assert_eq!(all.len(), 5, "{all:?}");
        let queues = ResponseQueues::new(&all);
        for (after, value) in made {
            assert_eq!(queues.next(&(), after), Some(&value), "after {after}");
        }
        // Calls that were not made.
        for (after, value) in [(5, 'b'), (0, 'a'), (9, 'd')] {
            assert_eq!(queues.next(&(), after), Some(&value), "after {after}");
        }
        assert_eq!(ResponseQueues::<u8, char>::new(&[]).next(&1, 0), None);
    }
}
