//! The thread states of one thread, which is stopped or the calling one. The same search as in
//! capture/ebpf/sample/thread_state.h, for backends that do not run in the kernel.
//!
//! A thread has a state in each interpreter that it runs code of. A state names its thread; but a thread can also run a
//! state of another one, which it was lent (`PyThreadState_Swap`; `_xxsubinterpreters.run_string` up to 3.12). Where
//! calls of the bytecode loop have a CFrame on the stack (3.10 to 3.12), that of a lent state shows which thread runs
//! it. Before, each thread is taken to run all that were ever seen to be lent, until the session compares their frames
//! with the stack.
//!
//! Allocates nothing, so it may run in a signal handler.

use std::ops::Range;

use crate::arch::TLS_VECTOR;
use crate::cpython_layout::{ABSENT, Interpreter, TargetLayout, ThreadStateLocation, Tls};
use crate::event::{StoppedThread, known_stack_end};
use crate::limits::MAX_NESTED;
use crate::process::memory::Memory;

/// Interpreters, and thread states of each, that are searched for a subinterpreter.
const NEWEST: usize = 16;
/// Number of pthread keys of a process (`PTHREAD_KEYS_MAX`).
const KEYS: i32 = 1024;

/// Memory in words; an unreadable word is 0.
pub(super) struct ReadOrZero<'a>(pub &'a dyn Memory);

impl ReadOrZero<'_> {
    pub fn at(&self, avma: u64) -> u64 {
        self.0.u64(avma).unwrap_or(0)
    }

    pub fn word(&self, object: u64, offset: u16) -> u64 {
        self.at(object.wrapping_add(offset.into()))
    }
}

/// The thread states of a thread, innermost first as far as that is known.
pub(super) struct OwnStates {
    states: [u64; 1 + MAX_NESTED],
    len: usize,
    /// The first ones are certainly states of the thread.
    named: usize,
    /// There are more.
    pub left_out: bool,
    /// The first one is that of the interpreter whose code the thread runs, if it runs any now: it is attached. Up to 3.11 the
    /// thread holds the GIL then; later it need not.
    pub attached: bool,
}

impl OwnStates {
    /// `None`: the thread has none.
    pub fn find(
        m: &ReadOrZero<'_>,
        layout: &TargetLayout,
        python: &Interpreter,
        thread: &StoppedThread,
    ) -> Option<OwnStates> {
        let l = &python.layout;
        let stack = known_stack(thread, layout).filter(|_| !layout.lent_states.is_empty());
        let thread = thread.thread_pointer;
        // Where it runs code: `None` if it runs none, or that is not known.
        let runs_here = |state: u64| {
            let stack = stack.as_ref().filter(|_| l.tstate_cframe != ABSENT)?;
            let at = m.word(state, l.tstate_cframe);
            let root = state.wrapping_add(l.tstate_root_cframe.into());
            (at != 0 && at != root).then(|| stack.contains(&at))
        };
        let names = |state: u64| m.word(state, l.tstate_thread_id) == thread;
        let is_own = |state: &u64| *state != 0 && runs_here(*state).unwrap_or_else(|| names(*state));
        let at = layout
            .states_by_thread
            .binary_search_by_key(&thread, |(thread, _)| *thread);
        let listed = at.map_or(&[][..], |at| &layout.states_by_thread[at].1);
        // The attached thread state, if it belongs to this thread: the one that runs Python (subinterpreters before 3.12).
        let attached = (l.runtime_current != 0)
            .then(|| m.at(python.runtime.wrapping_add(l.runtime_current.into())))
            .filter(is_own);
        let first = attached.or_else(|| {
            let stored = stored(m, python, thread).filter(is_own);
            // Where it keeps a lent one that runs nothing: one of those that name the thread.
            let is_listed_only =
                python.thread_state == ThreadStateLocation::InterpreterList || !layout.lent_states.is_empty();
            stored.or(listed.first().copied().filter(is_own).filter(|_| is_listed_only))
        })?;
        let mut own = OwnStates {
            states: [first; 1 + MAX_NESTED],
            len: 1,
            named: 1,
            left_out: false,
            attached: attached.is_some() || l.runtime_current == 0,
        };
        for other in listed.iter().filter(|other| names(**other) && is_own(other)) {
            own.add(*other);
        }
        let lent = layout.lent_states.iter();
        // Where no CFrame says which thread runs a state, the session finds out whose frames these are.
        let may_run_here = |state: u64| l.tstate_cframe == ABSENT || runs_here(state) == Some(true);
        own.named = own.len;
        for other in lent.filter(|other| !names(**other) && may_run_here(**other)) {
            own.add(*other);
        }
        if l.tstate_cframe != ABSENT {
            own.named = own.len;
        }
        Some(own)
    }

    pub fn list(&self) -> &[u64] {
        &self.states[..self.len]
    }

    /// Those of them that are certainly the thread's.
    pub fn certain(&self) -> &[u64] {
        &self.states[..self.named]
    }

    fn add(&mut self, state: u64) {
        if self.list().contains(&state) {
            return;
        }
        match self.states.get_mut(self.len) {
            Some(to) => {
                *to = state;
                self.len += 1;
            }
            None => self.left_out = true,
        }
    }

    /// Adds the thread's state in one of the newest interpreters, which the lists do not have yet.
    pub fn add_newest(&mut self, m: &ReadOrZero<'_>, python: &Interpreter, thread: u64) -> Option<u64> {
        let state = newest_state(m, python, thread, self.list()).filter(|_| self.len < self.states.len())?;
        self.add(state);
        Some(state)
    }
}

/// The part of the thread's stack that is in use, where it is known to end: as in sample.bpf.c.
fn known_stack(thread: &StoppedThread, layout: &TargetLayout) -> Option<Range<u64>> {
    let sp = thread.stack_pointer;
    let end = known_stack_end(sp, thread.thread_pointer, layout.stack_end).filter(|_| sp != 0);
    end.map(|end| sp..end)
}

/// The state that the thread keeps for itself.
fn stored(m: &ReadOrZero<'_>, python: &Interpreter, thread: u64) -> Option<u64> {
    let l = &python.layout;
    let pointer = |at: u64| Some(m.at(at)).filter(|p| *p != 0);
    let key = || {
        let key = m.0.u32(python.runtime.wrapping_add(l.runtime_key.into()))? as i32;
        Some(u64::from((0..KEYS).contains(&key).then_some(key)? as u32))
    };
    // What a thread pointer points to begins here: the descriptor, or what is above it.
    let thread_pointer = thread.wrapping_add(python.descriptor.size.into());
    let state = match (python.thread_state, python.descriptor.tls) {
        // nptl/descr.h: struct pthread.specific[key / 32] -> {seq, data} pairs
        (ThreadStateLocation::Key, Tls::Glibc(specific)) => {
            let (key, blocks) = (key()?, thread.wrapping_add(specific.into()));
            let block = pointer(blocks.wrapping_add(8 * (key / 32)))?;
            m.at(block.wrapping_add(16 * (key % 32) + 8))
        }
        (ThreadStateLocation::Key, Tls::Musl(tsd)) => {
            m.at(pointer(thread.wrapping_add(tsd.into()))?.wrapping_add(8 * key()?))
        }
        (ThreadStateLocation::Offset(at), _) => m.at(thread_pointer.wrapping_add_signed(at.into())),
        // The thread's vector of blocks (arch/); glibc's entries have two words. A block that is not allocated yet is 0 or -1.
        (ThreadStateLocation::Block { id, offset }, tls) => {
            let number = pointer(python.runtime.wrapping_add_signed(id.into())).filter(|n| *n < 4096)?;
            let entry = number * if matches!(tls, Tls::Glibc(_)) { 16 } else { 8 };
            let block = pointer(m.at(thread_pointer.wrapping_add(TLS_VECTOR)).wrapping_add(entry))
                .filter(|b| *b != u64::MAX)?;
            m.at(block.wrapping_add(offset.into()))
        }
        (ThreadStateLocation::InterpreterList, _) => return None,
    };
    // Before the interpreter creates its key, slot 0 may hold anything: the caller checks that the state names the thread.
    Some(state)
}

/// A thread's state other than `known` in the newest interpreters: those are the first ones in the interpreter's list. Bounded,
/// since the thread is stopped meanwhile.
fn newest_state(m: &ReadOrZero<'_>, python: &Interpreter, thread: u64, known: &[u64]) -> Option<u64> {
    let l = &python.layout;
    let first = m.at(python.runtime.wrapping_add(l.runtime_interpreters.into()));
    let follow = |from: u64, next: u64| {
        let nonzero = |at: u64| Some(at).filter(|at| *at != 0);
        std::iter::successors(nonzero(from), move |at| nonzero(m.at(at.wrapping_add(next)))).take(NEWEST)
    };
    // Most programs have one interpreter, which the lists leave out.
    let others = first != 0 && m.at(first.wrapping_add(l.interp_next.into())) != 0;
    let interpreters = follow(first, l.interp_next.into()).filter(|_| l.runtime_interpreters != 0 && others);
    let mut states = interpreters.flat_map(|interpreter| {
        let first = m.at(interpreter.wrapping_add(l.interp_threads.into()));
        follow(first, l.tstate_next.into())
    });
    states.find(|state| !known.contains(state) && m.word(*state, l.tstate_thread_id) == thread)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::arch::GPRS;
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
    const THREAD: u64 = 0x7000_0000;
    const OTHER: u64 = 0x6000_0000;
    const SP: u64 = THREAD - 0x1000;
    /// Thread states: which thread they name, and where their CFrame lies.
    const OWN: u64 = 0x10_0000; // this one, on its stack
    const BORROWED: u64 = 0x20_0000; // the other one, on this one's stack
    const FOREIGN: u64 = 0x30_0000; // the other one, on its stack
    const AWAY: u64 = 0x40_0000; // this one, on the other one's stack
    const IDLE: u64 = 0x50_0000; // the other one, nowhere

    /// The states of the thread (`|` before those that are not certain), and whether the first one is attached.
    fn found(minor: u8, current: u64, lent: &[u64], stack_pointer: u64) -> String {
        let layout = versions::find((3, minor, 0)).expect("a row").layout;
        let states = [
            (OWN, THREAD, SP + 0x100),
            (BORROWED, OTHER, SP + 0x40),
            (FOREIGN, OTHER, OTHER - 0x100),
            (AWAY, THREAD, OTHER - 0x200),
            (IDLE, OTHER, IDLE + u64::from(layout.tstate_root_cframe)),
        ];
        let mut words = BTreeMap::from([
            (THREAD - 8, OWN),
            (RUNTIME + u64::from(layout.runtime_current), current),
        ]);
        for (state, thread, cframe) in states {
            words.insert(state + u64::from(layout.tstate_thread_id), thread);
            if layout.tstate_cframe != ABSENT {
                words.insert(state + u64::from(layout.tstate_cframe), cframe);
            }
        }
        let python = Interpreter {
            runtime: RUNTIME,
            layout,
            thread_state: ThreadStateLocation::Offset(-8),
            descriptor: DEFAULT_DESCRIPTOR,
        };
        let layout = TargetLayout {
            states_by_thread: vec![(OTHER, vec![BORROWED, FOREIGN, IDLE]), (THREAD, vec![OWN, AWAY])],
            lent_states: lent.to_vec(),
            ..TargetLayout::default()
        };
        let thread = StoppedThread {
            stack_pointer,
            thread_pointer: THREAD,
            registers: [0; GPRS],
        };
        let words = WordMemory(words);
        let own = OwnStates::find(&ReadOrZero(&words), &layout, &python, &thread).expect("a state");
        let name = |state: &u64| match *state {
            OWN => "own",
            BORROWED => "borrowed",
            AWAY => "away",
            _ => "wrong",
        };
        let (certain, rest) = own.list().split_at(own.certain().len());
        let mut words: Vec<&str> = certain.iter().map(name).collect();
        words.extend(rest.first().map(|_| "|"));
        words.extend(rest.iter().map(name));
        words.extend((!own.attached).then_some("detached"));
        words.join(" ")
    }

    #[test]
    fn a_thread_has_the_states_that_run_on_its_stack() {
        for minor in [10, 11] {
            // Without any that were seen to be lent, names count.
            assert_eq!(found(minor, OWN, &[], SP), "own away", "{minor}");
            assert_eq!(found(minor, AWAY, &[], SP), "away own", "{minor}");
            assert_eq!(found(minor, BORROWED, &[], SP), "own away detached", "{minor}");
            let lent = &[IDLE, BORROWED, FOREIGN, AWAY];
            assert_eq!(found(minor, OWN, lent, SP), "own borrowed", "{minor}");
            assert_eq!(found(minor, BORROWED, lent, SP), "borrowed own", "{minor}");
            assert_eq!(found(minor, AWAY, lent, SP), "own borrowed detached", "{minor}");
            assert_eq!(found(minor, 0, lent, SP), "own borrowed detached", "{minor}");
            // On another stack nothing is known of places.
            assert_eq!(found(minor, BORROWED, lent, 0), "own away detached", "{minor}");
        }
        assert_eq!(found(12, 0, &[BORROWED, AWAY], SP), "own borrowed");
    }

    #[test]
    fn without_cframes_the_frames_of_lent_states_are_candidates() {
        assert_eq!(found(9, OWN, &[BORROWED], SP), "own away | borrowed");
        assert_eq!(found(9, BORROWED, &[BORROWED], SP), "own away | borrowed detached");
    }
}
