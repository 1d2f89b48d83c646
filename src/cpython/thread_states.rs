//! Thread states of a process, from the interpreter's own lists.

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::arch::PTHREAD_TID;
use crate::cpython_layout::{ABSENT, Interpreter, ThreadStateLocation, Tls};
use crate::event::{Tid, known_stack_end};
use crate::process::memory::Memory;

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

/// The interpreters of a process, newest first. Bounded.
pub fn interpreters<'a>(memory: &'a dyn Memory, python: &Interpreter) -> impl Iterator<Item = u64> + use<'a> {
    let (runtime, l) = (python.runtime, python.layout);
    let word = |offset: u32| (offset != 0).then(|| word_at(memory, runtime, offset)).flatten();
    // Where the list's head has no symbol (3.6): the interpreter of the running thread.
    let of_current = || word_at(memory, word(l.runtime_current)?, l.tstate_interp);
    let first = word(l.runtime_interpreters).or_else(of_current);
    let next = move |interpreter: &u64| word_at(memory, *interpreter, l.interp_next);
    std::iter::successors(first, next)
        .take_while(|interpreter| *interpreter != 0)
        .take(MAX_INTERPRETERS)
}

fn word_at(memory: &dyn Memory, base: u64, offset: impl Into<u64>) -> Option<u64> {
    memory.u64(base.checked_add(offset.into())?)
}

/// All thread states. The lists change while they are read: a state that does not name its interpreter ends its list,
/// and so does one that was seen before (the list is circular).
pub fn states(memory: &dyn Memory, python: &Interpreter) -> Vec<PyThreadState> {
    let l = &python.layout;
    let mut all = Vec::new();
    let mut seen = FxHashSet::default();
    for interpreter in interpreters(memory, python) {
        let mut state = word_at(memory, interpreter, l.interp_threads).unwrap_or(0);
        while state != 0
            && seen.len() < MAX_STATES
            && word_at(memory, state, l.tstate_interp) == Some(interpreter)
            && seen.insert(state)
        {
            all.extend(word_at(memory, state, l.tstate_thread_id).map(|thread| PyThreadState {
                state,
                interpreter,
                thread,
            }));
            state = word_at(memory, state, l.tstate_next).unwrap_or(0);
        }
    }
    all
}

/// `pthread_self` of the thread that a thread state belongs to, read without the other states. `None`: the state names
/// no interpreter of the process, so its thread has exited.
pub fn thread_of(memory: &dyn Memory, python: &Interpreter, state: u64) -> Option<u64> {
    let l = &python.layout;
    let of_state = word_at(memory, state, l.tstate_interp)?;
    interpreters(memory, python)
        .any(|interpreter| interpreter == of_state)
        .then(|| word_at(memory, state, l.tstate_thread_id))
        .flatten()
}

/// `pthread_self` -> thread states, of threads that have more than one: each subinterpreter that a thread runs has its
/// own state there. Of all threads, if the location of their own thread state is unknown, or if they run states of others.
pub fn states_by_thread(python: &Interpreter, states: &[PyThreadState], has_lent: bool) -> Vec<(u64, Vec<u64>)> {
    let mut by_thread: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for s in states {
        by_thread.entry(s.thread).or_default().push(s.state);
    }
    let all = has_lent || python.thread_state == ThreadStateLocation::InterpreterList;
    let min = if all { 1 } else { 2 };
    by_thread
        .into_iter()
        .filter(|(_, states)| states.len() >= min)
        .collect()
}

/// Thread states that now run code in another thread than the one that they name, as far as CFrames on the stacks show it
/// (3.10 to 3.12), and perhaps others. `main_end`: where the main thread's stack ends.
pub fn lent_states(memory: &dyn Memory, python: &Interpreter, states: &[PyThreadState], main_end: u64) -> Vec<u64> {
    let l = &python.layout;
    if l.tstate_cframe == ABSENT {
        return Vec::new();
    }
    let threads: BTreeSet<u64> = states.iter().map(|s| s.thread).collect();
    // The oldest one.
    let main = states.last().map(|s| s.thread);
    let runs_elsewhere = |s: &&PyThreadState| {
        let root = s.state.wrapping_add(l.tstate_root_cframe.into());
        let cframe = word_at(memory, s.state, l.tstate_cframe).filter(|at| *at != 0 && *at != root);
        cframe.is_some_and(|at| match known_stack_end(at, 0, main_end) {
            Some(_) => main != Some(s.thread),
            // The descriptor of a thread lies above its stack.
            None => threads.range(at..).next() != Some(&s.thread),
        })
    };
    states.iter().filter(runs_elsewhere).map(|s| s.state).collect()
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
    use crate::cpython::{DEFAULT_DESCRIPTOR, versions};

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
        let (python, words) = process(lists, circle, location);
        states_by_thread(&python, &states(&WordMemory(words), &python), false)
    }

    fn process(
        lists: &[(u64, &[(u64, u64)])],
        circle: bool,
        location: ThreadStateLocation,
    ) -> (Interpreter, BTreeMap<u64, u64>) {
        let layout = versions::newest().layout;
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
        (python, words)
    }

    #[test]
    fn the_thread_of_one_state_is_found_in_few_reads() {
        /// Memory, and how often it was read.
        struct Counted(WordMemory, std::cell::Cell<usize>);
        impl Memory for Counted {
            fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
                self.1.set(self.1.get() + 1);
                self.0.read(avma, buf)
            }
        }
        let many: Vec<(u64, u64)> = (0..1000).map(|i| (0x30_0000 + 0x1000 * i, 7 + i)).collect();
        let lists: [(u64, &[_]); 2] = [(0x10_0000, &many), (0x20_0000, &[(0x2f_0000, 5)])];
        for circle in [false, true] {
            let (python, words) = process(&lists, circle, ThreadStateLocation::Key);
            let memory = Counted(WordMemory(words), 0.into());
            for (state, expected) in [
                (many[999].0, Some(1006)),
                (many[0].0, Some(7)),
                (0x2f_0000, Some(5)),
                (0x70_0000, None),
                (0, None),
                (u64::MAX, None),
            ] {
                memory.1.set(0);
                assert_eq!(thread_of(&memory, &python, state), expected, "{state:#x}");
                // With a circular list of interpreters, one of none of them costs most.
                let most = if circle && expected.is_none() { 1100 } else { 6 };
                assert!(memory.1.get() <= most, "{state:#x}: {} reads", memory.1.get());
            }
        }
    }

    #[test]
    fn states_on_the_stacks_of_other_threads_are_lent() {
        const THREADS: [u64; 3] = [0x7f_0000_0000, 0x7f_0100_0000, 0x7f_0200_0000];
        const MAIN_END: u64 = 0x7ff_0000_0000;
        let layout = versions::find((3, 11, 0)).expect("a row").layout;
        let python = Interpreter {
            runtime: RUNTIME,
            layout,
            thread_state: ThreadStateLocation::Key,
            descriptor: DEFAULT_DESCRIPTOR,
        };
        // Thread that it names, where its CFrame lies (0: it runs nothing), and whether it is lent. The last one is the oldest.
        let cases = [
            (THREADS[1], THREADS[1] - 0x1000, false),
            (THREADS[1], THREADS[2] - 0x1000, true),
            (THREADS[1], MAIN_END - 0x1000, true),
            (THREADS[0], THREADS[1] - 0x2000, true),
            (THREADS[0], 0, false),
            (THREADS[2], THREADS[2] - 0x2000, false),
            (THREADS[0], MAIN_END - 0x2000, false),
        ];
        let (mut words, mut all, mut expected) = (BTreeMap::new(), Vec::new(), Vec::new());
        for (i, (thread, cframe, is_lent)) in cases.into_iter().enumerate() {
            let state = 0x10_0000 * (1 + i as u64);
            let root = state + u64::from(layout.tstate_root_cframe);
            let at = if cframe == 0 { root } else { cframe };
            words.insert(state + u64::from(layout.tstate_cframe), at);
            all.push(PyThreadState {
                state,
                interpreter: 0,
                thread,
            });
            expected.extend(is_lent.then_some(state));
        }
        assert_eq!(lent_states(&WordMemory(words), &python, &all, MAIN_END), expected);
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
