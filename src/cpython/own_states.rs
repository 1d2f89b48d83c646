//! The thread states of one thread, which is stopped or the calling one. The same search as in
//! capture/ebpf/sample/thread_state.h, for backends that do not run in the kernel.
//!
//! Allocates nothing, so it may run in a signal handler.

use crate::arch::TLS_VECTOR;
use crate::cpython_layout::{Interpreter, TargetLayout, ThreadStateLocation, Tls};
use crate::event::StoppedThread;
use crate::limits::MAX_NESTED;
use crate::target::memory::Memory;

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
        let thread = thread.thread_pointer;
        let is_own = |state: &u64| *state != 0 && m.word(*state, l.tstate_thread_id) == thread;
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
            let is_listed_only = python.thread_state == ThreadStateLocation::InterpreterList;
            stored.or(listed.first().copied().filter(is_own).filter(|_| is_listed_only))
        })?;
        let mut own = OwnStates {
            states: [first; 1 + MAX_NESTED],
            len: 1,
            left_out: false,
            attached: attached.is_some() || l.runtime_current == 0,
        };
        for other in listed.iter().filter(|other| is_own(other)) {
            own.add(*other);
        }
        Some(own)
    }

    pub fn list(&self) -> &[u64] {
        &self.states[..self.len]
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
