//! Further thread states of single threads, where the program finds them: of the interpreters around the subinterpreter that a
//! thread runs.

#![allow(unsafe_code)]

use aya::maps::{HashMap as BpfHash, Map, MapData};
use rustc_hash::FxHashMap;

use super::errors::bpf_error;
use super::object::LOAD;
use crate::error::Result;
use crate::event::Pid;
use crate::limits::MAX_NESTED;

/// Mirrors `struct nested_key` of the program.
#[repr(C)]
#[derive(Clone, Copy)]
struct NestedKey {
    thread_pointer: u64,
    pid: u32,
    pad: u32,
}

// SAFETY: three plain integers, no padding, any bit pattern is valid.
unsafe impl aya::Pod for NestedKey {}

/// The map `NESTED_STATES`.
pub struct NestedStateMap {
    map: BpfHash<MapData, NestedKey, [u64; MAX_NESTED]>,
    keys: FxHashMap<Pid, Vec<NestedKey>>,
}

impl NestedStateMap {
    /// # Errors
    /// It is a map of another kind.
    pub fn new(map: Map) -> Result<NestedStateMap> {
        Ok(NestedStateMap {
            map: map.try_into().map_err(|e| bpf_error(LOAD, e))?,
            keys: FxHashMap::default(),
        })
    }

    /// Replaces the states of a process: `pthread_self` of each thread, and its states.
    pub fn set(&mut self, pid: Pid, states_by_thread: &[(u64, Vec<u64>)]) {
        self.remove(pid);
        for (thread_pointer, states) in states_by_thread {
            let key = NestedKey {
                thread_pointer: *thread_pointer,
                pid,
                pad: 0,
            };
            // The thread's own state is among them; the program leaves it out.
            let mut value = [0; MAX_NESTED];
            value.iter_mut().zip(states).for_each(|(v, s)| *v = *s);
            // The map can be full: a process may have any number of threads with several states. Those that are left out
            // are sampled with the thread's own state.
            if self.map.insert(key, value, 0).is_err() {
                break;
            }
            self.keys.entry(pid).or_default().push(key);
        }
    }

    /// Removes a process.
    pub fn remove(&mut self, pid: Pid) {
        for key in self.keys.remove(&pid).into_iter().flatten() {
            let _ = self.map.remove(&key); // absent: nothing to remove
        }
    }
}
