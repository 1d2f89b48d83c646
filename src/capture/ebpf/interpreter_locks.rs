//! Where the interpreter locks (GILs) of each process lie, as the program needs it to see which thread holds one.

#![allow(unsafe_code)]

use aya::maps::{HashMap as BpfHash, Map, MapData};

use super::NOTIFY_FAILED;
use super::errors::bpf_error;
use super::object::LOAD;
use crate::cpython_layout;
use crate::error::Result;
use crate::event::Pid;
use crate::limits::MAX_LOCKS;

/// `RELEASES` of it.
const RELEASES: usize = 64;

/// Mirrors `struct gils` of the program.
#[repr(C)]
#[derive(Clone, Copy)]
struct InterpreterLockEntry {
    at: [u64; MAX_LOCKS],
    len: u32,
    last_holder: u32,
    in_interpreter: u32,
    pad: u32,
    released: u64,
    releases: [[u64; 6]; RELEASES],
}

// SAFETY: plain integers without padding, any bit pattern is valid.
unsafe impl aya::Pod for InterpreterLockEntry {}

/// The map `INTERPRETER_LOCKS`. Processes that are not in it cost the program one lookup per sample.
pub struct InterpreterLockMap {
    map: BpfHash<MapData, u32, InterpreterLockEntry>,
    /// Most locks of one process that there was no room for.
    left_out: usize,
}

impl InterpreterLockMap {
    /// # Errors
    /// It is a map of another kind.
    pub fn new(map: Map) -> Result<InterpreterLockMap> {
        Ok(InterpreterLockMap {
            map: map.try_into().map_err(|e| bpf_error(LOAD, e))?,
            left_out: 0,
        })
    }

    /// Sets the locks of a process; without any, nothing is to be known of it.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn set(&mut self, pid: Pid, locks: &cpython_layout::InterpreterLocks) -> Result<()> {
        if locks.at.is_empty() {
            self.remove(pid);
            return Ok(());
        }
        let mut value = InterpreterLockEntry {
            at: [0; MAX_LOCKS],
            len: locks.len,
            last_holder: locks.last_holder,
            in_interpreter: locks.in_interpreter,
            pad: 0,
            released: 0,
            releases: [[0; 6]; RELEASES],
        };
        value.at.iter_mut().zip(&locks.at).for_each(|(to, at)| *to = *at);
        self.left_out = self.left_out.max(locks.at.len().saturating_sub(MAX_LOCKS));
        // The log of releases continues while the locks are the same.
        let known = self.map.get(&pid, 0);
        if known.is_ok_and(|known| (known.at, known.len) == (value.at, value.len)) {
            return Ok(());
        }
        self.map.insert(pid, value, 0).map_err(|e| bpf_error(NOTIFY_FAILED, e))
    }

    /// What there was no room for, as text.
    pub fn exceeded(&self) -> Option<String> {
        let locks = self.left_out;
        (locks > 0).then(|| format!("{locks} interpreter locks: waits for them are in parts of 5 ms, without holders"))
    }

    /// Removes a process.
    pub fn remove(&mut self, pid: Pid) {
        let _ = self.map.remove(&pid); // absent: nothing to remove
    }
}
