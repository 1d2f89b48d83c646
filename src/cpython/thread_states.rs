//! Thread states of a process, from the interpreter's own lists.

use std::collections::BTreeMap;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::arch::PTHREAD_TID;
use crate::cpython_layout::{Interpreter, ThreadStateLocation, Tls};
use crate::event::Tid;
use crate::target::memory::Memory;

/// Maximum number of interpreters, and of thread states, that are read.
const MAX_INTERPRETERS: usize = 1024;
const MAX_STATES: usize = 65536;

/// A thread state, the interpreter that it belongs to, and `pthread_self` of its thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PyThreadState {
    pub state: u64,
    pub interpreter: u64,
    pub thread: u64,
}

/// All thread states. The lists change while they are read: a state that does not name its interpreter ends its list,
/// and so does one that was seen before (the list is circular).
pub fn states(memory: &dyn Memory, python: &Interpreter) -> Vec<PyThreadState> {
    let l = &python.layout;
    let mut all = Vec::new();
    let mut seen = FxHashSet::default();
    let read = |at: u64, offset: u64| memory.u64(at.checked_add(offset)?);
    let word = |offset: u32| (offset != 0).then(|| read(python.runtime, offset.into())).flatten();
    // Where the list's head has no symbol (3.6): the interpreter of the running thread.
    let of_current = || read(word(l.runtime_current)?, l.tstate_interp.into());
    let mut interpreter = word(l.runtime_interpreters).or_else(of_current).unwrap_or(0);
    for _ in 0..MAX_INTERPRETERS {
        if interpreter == 0 {
            break;
        }
        let mut state = read(interpreter, l.interp_threads.into()).unwrap_or(0);
        while state != 0
            && seen.len() < MAX_STATES
            && read(state, l.tstate_interp.into()) == Some(interpreter)
            && seen.insert(state)
        {
            all.extend(read(state, l.tstate_thread_id.into()).map(|thread| PyThreadState {
                state,
                interpreter,
                thread,
            }));
            state = read(state, l.tstate_next.into()).unwrap_or(0);
        }
        interpreter = read(interpreter, l.interp_next.into()).unwrap_or(0);
    }
    all
}

/// `pthread_self` -> thread states, of threads that have more than one: each subinterpreter that a thread runs has its
/// own state there. Of all threads, if the location of their own thread state is unknown.
pub fn states_by_thread(memory: &dyn Memory, python: &Interpreter) -> Vec<(u64, Vec<u64>)> {
    let mut by_thread: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for s in states(memory, python) {
        by_thread.entry(s.thread).or_default().push(s.state);
    }
    let min = if python.thread_state == ThreadStateLocation::InterpreterList {
        1
    } else {
        2
    };
    by_thread
        .into_iter()
        .filter(|(_, states)| states.len() >= min)
        .collect()
}

/// `pthread_self` of each thread that has a state, by the thread's number in the process's own PID namespace.
pub fn thread_pointers(memory: &dyn Memory, python: &Interpreter, states: &[PyThreadState]) -> FxHashMap<Tid, u64> {
    let number = |thread: u64| thread_id(memory, python, thread);
    states
        .iter()
        .filter_map(|s| Some((number(s.thread)?, s.thread)))
        .collect()
}

/// The number in the process's own PID namespace of the thread with this `pthread_self`.
pub fn thread_id(memory: &dyn Memory, python: &Interpreter, thread: u64) -> Option<Tid> {
    let [glibc, musl] = PTHREAD_TID;
    let at = match python.descriptor.tls {
        Tls::Glibc(_) => glibc,
        Tls::Musl(_) => musl,
    };
    memory.u32(thread.checked_add(at)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpython::{DEFAULT_DESCRIPTOR, layouts};

    /// Words by address; 0 elsewhere.
    struct WordMemory(BTreeMap<u64, u64>);

    impl Memory for WordMemory {
        fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
            let word = self.0.get(&avma).copied().unwrap_or(0);
            buf.copy_from_slice(&word.to_le_bytes()[..buf.len()]);
            true
        }
    }

    const RUNTIME: u64 = 0x1000;

    /// Interpreters, each with its thread states and their threads; `circle`: the last of each list points to its
    /// first.
    fn found(lists: &[(u64, &[(u64, u64)])], circle: bool, location: ThreadStateLocation) -> Vec<(u64, Vec<u64>)> {
        let layout = layouts::ROWS.last().expect("rows").1;
        let mut words = BTreeMap::new();
        let next = |i: usize, all: &[u64]| all.get(i + 1).or(all.first().filter(|_| circle)).copied().unwrap_or(0);
        let interpreters: Vec<u64> = lists.iter().map(|(at, _)| *at).collect();
        words.insert(RUNTIME + u64::from(layout.runtime_interpreters), interpreters[0]);
        for (i, (at, list)) in lists.iter().enumerate() {
            let states: Vec<u64> = list.iter().map(|(state, _)| *state).collect();
            words.insert(at + u64::from(layout.interp_next), next(i, &interpreters));
            words.insert(at + u64::from(layout.interp_threads), states[0]);
            for (i, (state, thread)) in list.iter().enumerate() {
                words.insert(state + u64::from(layout.tstate_next), next(i, &states));
                words.insert(state + u64::from(layout.tstate_interp), *at);
                words.insert(state + u64::from(layout.tstate_thread_id), *thread);
            }
        }
        let python = Interpreter {
            runtime: RUNTIME,
            layout,
            thread_state: location,
            descriptor: DEFAULT_DESCRIPTOR,
        };
        states_by_thread(&WordMemory(words), &python)
    }

    #[test]
    fn each_state_is_listed_once() {
        let lists: [(u64, &[_]); 2] = [
            (0x10_0000, &[(0x30_0000, 7), (0x31_0000, 8)]),
            (0x20_0000, &[(0x32_0000, 7)]),
        ];
        for circle in [false, true] {
            assert_eq!(
                found(&lists, circle, ThreadStateLocation::Key),
                [(7, vec![0x30_0000, 0x32_0000])],
                "{circle}"
            );
        }
        assert_eq!(found(&lists[..1], true, ThreadStateLocation::Key), []);
        assert_eq!(
            found(&lists[..1], true, ThreadStateLocation::InterpreterList),
            [(7, vec![0x30_0000]), (8, vec![0x31_0000])]
        );
    }
}
