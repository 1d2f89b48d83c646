//! Requests to run a script in a process (PEP 768): the interpreter publishes where such a request is written in the state of
//! a thread, and the thread runs the script between two instructions of Python code. This is what `sys.remote_exec` does
//! (Python/remote_debug.h of CPython 3.14); here no interpreter of the same version is needed.
//!
//! The request goes to the main thread, whose state lives as long as the interpreter: that of another thread could be freed
//! while it is written to.

use super::Runtime;
use super::thread_states;
use crate::cpython_layout::Interpreter;
use crate::process::memory::Memory;

/// Where a table of offsets has the main thread of an interpreter, and the end of the process (Include/internal/
/// pycore_debug_offsets.h, v3.14.0 and v3.15.0).
const THREADS_MAIN: u64 = 80;
const FINALIZING: u64 = 32;
/// Offsets in the state of a thread, and in that of an interpreter, are below these.
const MAX_OF_THREAD: u64 = 1 << 14;
const MAX_OF_INTERPRETER: u64 = 1 << 24;
/// `_PY_EVAL_PLEASE_STOP_BIT` (Include/internal/pycore_ceval.h, v3.14.0 and v3.15.0).
const PLEASE_STOP: u8 = 1 << 5;
/// Longest path of a script.
const MAX_PATH: u64 = 1 << 12;

/// The reason why a process runs no script for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoScriptRequests {
    /// Its version has no such requests, or is not known.
    Version,
    /// They are turned off in this process or build.
    Disabled,
    /// The interpreter is starting or ending, or what it publishes is not plausible.
    NotRunning,
    /// Another request is waiting.
    Occupied,
    /// Its memory cannot be written to.
    NotWritable,
}

/// The place of requests in a process. Addresses in that process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScriptRequests {
    /// The flag of a request, an `int`.
    pending: u64,
    path: u64,
    /// Bytes of the path with the zero at its end.
    path_size: u64,
    /// The byte of the word of events that has the bit by which the thread notices.
    events: u64,
}

impl ScriptRequests {
    /// The place of requests to the main thread.
    ///
    /// # Errors
    /// Why there is none.
    pub fn find(
        memory: &dyn Memory,
        runtime: &Runtime,
        python: &Interpreter,
    ) -> Result<ScriptRequests, NoScriptRequests> {
        let position = runtime.facts.and_then(|facts| facts.script_requests);
        let position = position.ok_or(NoScriptRequests::Version)?;
        let not_running = || NoScriptRequests::NotRunning;
        let word = |at: u64| memory.u64(at).ok_or_else(not_running);
        let published = |at: u64, most: u64| {
            let offset = word(python.runtime.wrapping_add(at))?;
            if offset < most { Ok(offset) } else { Err(not_running()) }
        };
        let number = |at: u64| {
            let mut bytes = [0; 4];
            let is_read = memory.read(at, &mut bytes);
            is_read.then(|| i32::from_le_bytes(bytes)).ok_or_else(not_running)
        };
        let of_thread = |index: u64| published(position as u64 + 8 * index, MAX_OF_THREAD);
        let (events, support, pending, path) = (of_thread(0)?, of_thread(1)?, of_thread(3)?, of_thread(4)?);
        let enabled = published(position as u64 + 16, MAX_OF_INTERPRETER)?;
        let path_size = published(position as u64 + 40, MAX_PATH)?;
        let main = published(THREADS_MAIN, MAX_OF_INTERPRETER)?;
        let finalizing = published(FINALIZING, MAX_OF_INTERPRETER)?;
        // Builds without support publish no room.
        if path_size == 0 || support == 0 {
            return Err(NoScriptRequests::Disabled);
        }
        if word(python.runtime.wrapping_add(finalizing))? != 0 {
            return Err(not_running());
        }
        // The newest comes first.
        let interpreter = thread_states::interpreters(memory, python)
            .last()
            .ok_or_else(not_running)?;
        if number(interpreter.wrapping_add(enabled))? != 1 {
            return Err(NoScriptRequests::Disabled);
        }
        let state = word(interpreter.wrapping_add(main))?;
        if state == 0 || word(state.wrapping_add(python.layout.tstate_interp.into()))? != interpreter {
            return Err(not_running());
        }
        let support = state.wrapping_add(support);
        let found = ScriptRequests {
            pending: support.wrapping_add(pending),
            path: support.wrapping_add(path),
            path_size,
            events: state.wrapping_add(events),
        };
        match number(found.pending)? {
            0 => Ok(found),
            _ => Err(NoScriptRequests::Occupied),
        }
    }

    /// Requests that the script at this path is run, once; `write` writes to the process.
    ///
    /// # Errors
    /// `NotWritable`; the path is too long (`NotRunning`). Nothing is run then.
    pub fn request(
        &self,
        memory: &dyn Memory,
        write: &dyn Fn(u64, &[u8]) -> bool,
        path: &str,
    ) -> Result<(), NoScriptRequests> {
        let mut text = path.as_bytes().to_vec();
        text.push(0);
        if text.len() as u64 > self.path_size {
            return Err(NoScriptRequests::NotRunning);
        }
        // The path is complete before the flag is set, and the flag is set before the thread is made to look.
        let is_written = write(self.path, &text) && write(self.pending, &1i32.to_le_bytes());
        let mut events = [0];
        if is_written && memory.read(self.events, &mut events) && write(self.events, &[events[0] | PLEASE_STOP]) {
            return Ok(());
        }
        self.withdraw(write);
        Err(NoScriptRequests::NotWritable)
    }

    /// Whether the request is still waiting. `None`: the process's memory cannot be read any more.
    pub fn is_waiting(&self, memory: &dyn Memory) -> Option<bool> {
        let mut bytes = [0; 4];
        memory.read(self.pending, &mut bytes).then_some(bytes != [0; 4])
    }

    /// Takes back a request that is waiting. The thread may have begun with it just before.
    pub fn withdraw(&self, write: &dyn Fn(u64, &[u8]) -> bool) {
        // Where it fails the process has ended.
        let _ = write(self.pending, &0i32.to_le_bytes()) && write(self.path, &[0]);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::cpython::DEFAULT_DESCRIPTOR;
    use crate::cpython::versions;
    use crate::cpython_layout::{ABSENT, ThreadStateLocation};

    const RUNTIME: u64 = 0x1000;
    const INTERPRETER: u64 = 0x4000;
    const STATE: u64 = 0x9000;

    /// Memory of a process from address 0 on.
    struct Bytes(RefCell<Vec<u8>>);

    impl Memory for Bytes {
        fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
            let (bytes, at) = (self.0.borrow(), avma as usize);
            match bytes.get(at..at.saturating_add(buf.len())) {
                Some(found) => buf.copy_from_slice(found),
                None => return false,
            }
            true
        }
    }

    impl Bytes {
        fn put(&self, at: u64, bytes: &[u8]) -> bool {
            let (mut all, at) = (self.0.borrow_mut(), at as usize);
            match all.get_mut(at..at.saturating_add(bytes.len())) {
                Some(place) => place.copy_from_slice(bytes),
                None => return false,
            }
            true
        }

        fn word(&self, at: u64, word: u64) {
            assert!(self.put(at, &word.to_le_bytes()));
        }
    }

    fn process() -> (Bytes, Runtime, Interpreter) {
        let facts = versions::ALL.iter().rev().find(|facts| facts.script_requests.is_some());
        let facts = facts.expect("a version with requests");
        let position = facts.script_requests.expect("it has") as u64;
        let layout = facts.layout;
        let memory = Bytes(RefCell::new(vec![0; 0x20000]));
        for (at, offset) in [
            (FINALIZING, 0x700),
            (THREADS_MAIN, 0x20),
            (position, 0x18),
            (position + 8, 0x100),
            (position + 16, 0x30),
            (position + 24, 0),
            (position + 32, 4),
            (position + 40, 512),
        ] {
            memory.word(RUNTIME + at, offset);
        }
        memory.word(RUNTIME + u64::from(layout.runtime_interpreters), INTERPRETER);
        memory.word(INTERPRETER + 0x20, STATE);
        memory.word(INTERPRETER + 0x30, 1);
        memory.word(STATE + u64::from(layout.tstate_interp), INTERPRETER);
        assert_ne!(layout.tstate_interp, ABSENT);
        let runtime = Runtime {
            version: (3, facts.minor, 0),
            facts: Some(facts),
            runtime: RUNTIME,
            layout: Some(layout),
            thread_state: ThreadStateLocation::InterpreterList,
            free_threaded: false,
            newer_than_known: false,
            eval: Vec::new(),
        };
        let python = runtime.in_process(0, DEFAULT_DESCRIPTOR).expect("a layout");
        (memory, runtime, python)
    }

    #[test]
    fn a_request_is_written_and_withdrawn() {
        let (memory, runtime, python) = process();
        let write = |at: u64, bytes: &[u8]| memory.put(at, bytes);
        let found = ScriptRequests::find(&memory, &runtime, &python).expect("supported");
        assert_eq!(found.is_waiting(&memory), Some(false));
        memory.put(STATE + 0x18, &[2]);
        found.request(&memory, &write, "/tmp/x").expect("written");
        assert_eq!(found.is_waiting(&memory), Some(true));
        let bytes = memory.0.borrow().clone();
        let at = |start: u64, length: usize| &bytes[start as usize..start as usize + length];
        assert_eq!(at(STATE + 0x100, 4), [1, 0, 0, 0]);
        assert_eq!(at(STATE + 0x104, 7), b"/tmp/x\0");
        assert_eq!(at(STATE + 0x18, 1), [PLEASE_STOP | 2], "other events stay");
        let occupied = ScriptRequests::find(&memory, &runtime, &python);
        assert_eq!(occupied, Err(NoScriptRequests::Occupied));
        found.withdraw(&write);
        assert_eq!(found.is_waiting(&memory), Some(false));
        let long = "x".repeat(512);
        assert_eq!(found.request(&memory, &write, &long), Err(NoScriptRequests::NotRunning));
        let refused = |_: u64, _: &[u8]| false;
        assert_eq!(
            found.request(&memory, &refused, "/tmp/x"),
            Err(NoScriptRequests::NotWritable)
        );
    }

    #[test]
    fn processes_without_requests_say_why() {
        let position = process()
            .1
            .facts
            .and_then(|facts| facts.script_requests)
            .expect("it has") as u64;
        for (at, word, expected) in [
            (INTERPRETER + 0x30, 0, NoScriptRequests::Disabled),
            (INTERPRETER + 0x30, 2, NoScriptRequests::Disabled),
            (RUNTIME + position + 40, 0, NoScriptRequests::Disabled),
            (RUNTIME + 0x700, 1, NoScriptRequests::NotRunning),
            (INTERPRETER + 0x20, 0, NoScriptRequests::NotRunning),
            (INTERPRETER + 0x20, 0x100, NoScriptRequests::NotRunning),
            (INTERPRETER + 0x20, u64::MAX, NoScriptRequests::NotRunning),
            (RUNTIME + position, u64::MAX, NoScriptRequests::NotRunning),
            (RUNTIME + position + 16, 1 << 40, NoScriptRequests::NotRunning),
        ] {
            let (memory, runtime, python) = process();
            memory.word(at, word);
            let found = ScriptRequests::find(&memory, &runtime, &python);
            assert_eq!(found, Err(expected), "{at:#x}: {word:#x}");
        }
        let (memory, mut runtime, python) = process();
        runtime.facts = None;
        let found = ScriptRequests::find(&memory, &runtime, &python);
        assert_eq!(found, Err(NoScriptRequests::Version));
    }
}
