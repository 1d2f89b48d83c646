//! Further thread states of single threads, where the program finds them: of the interpreters around the subinterpreter that a
//! thread runs.

#![allow(unsafe_code)]

use aya::maps::{HashMap as BpfHash, Map, MapData};
use rustc_hash::FxHashMap;

use super::errors::bpf_error;
use super::object::LOAD;
use crate::cpython_layout::TargetLayout;
use crate::error::Result;
use crate::event::Pid;
use crate::limits::MAX_NESTED;

/// Mirrors `struct nested_key` of the program.
#[repr(C)]
#[derive(Clone, Copy)]
struct NestedKey {
    thread_pointer: u64,
    pid: u32,
    part: u32,
}

// SAFETY: three plain integers, no padding, any bit pattern is valid.
unsafe impl aya::Pod for NestedKey {}

/// The map `NESTED_STATES`.
pub struct NestedStateMap {
    map: BpfHash<MapData, NestedKey, [u64; PART]>,
    keys: FxHashMap<Pid, Vec<NestedKey>>,
    /// Most threads for whose states there was no room, at one time.
    left_out: usize,
}

/// `NESTED_PART` of the program: states in one entry. The next entry follows if all are used.
const PART: usize = 8;
/// `NESTED_PARTS` of it: entries for one thread.
const PARTS: usize = 9;
/// One more than fit, so that the program sees that there are more, and the thread's own.
const _: () = assert!(PART * PARTS >= MAX_NESTED + 2);

impl NestedStateMap {
    /// # Errors
    /// It is a map of another kind.
    pub fn new(map: Map) -> Result<NestedStateMap> {
        Ok(NestedStateMap {
            map: map.try_into().map_err(|e| bpf_error(LOAD, e))?,
            keys: FxHashMap::default(),
            left_out: 0,
        })
    }

    /// Replaces the states of a process: `pthread_self` of each thread, and its states; and those that any thread may run.
    pub fn set(&mut self, pid: Pid, layout: &TargetLayout) {
        self.remove(pid);
        let of_threads = layout.states_by_thread.iter().map(|(thread, states)| (*thread, states));
        let len = layout.states_by_thread.len();
        for (i, (thread_pointer, states)) in std::iter::once((0, &layout.lent_states)).chain(of_threads).enumerate() {
            // The thread's own state is among them; the program leaves it out.
            for (part, some) in (0..).zip(states.chunks(PART).take(PARTS)) {
                let key = NestedKey {
                    thread_pointer,
                    pid,
                    part,
                };
                let mut value = [0; PART];
                value[..some.len()].copy_from_slice(some);
                // The map can be full: a process may have any number of threads with several states. Those that are left out
                // are sampled with the thread's own state.
                if self.map.insert(key, value, 0).is_err() {
                    self.left_out = self.left_out.max(len + 1 - i);
                    return;
                }
                self.keys.entry(pid).or_default().push(key);
            }
        }
    }

    /// What there was no room for, as text.
    pub fn exceeded(&self) -> Option<String> {
        let threads = self.left_out;
        (threads > 0).then(|| format!("{threads} threads with several thread states are sampled with one of them"))
    }

    /// Removes a process.
    pub fn remove(&mut self, pid: Pid) {
        for key in self.keys.remove(&pid).into_iter().flatten() {
            let _ = self.map.remove(&key); // absent: nothing to remove
        }
    }
}
