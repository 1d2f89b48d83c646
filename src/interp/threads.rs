//! Thread states of a process, from the interpreter's own lists.

use std::collections::BTreeMap;

use rustc_hash::FxHashSet;

use crate::layout::{Interpreter, Own};
use crate::process::memory::Memory;

/// Interpreters and thread states that are looked at.
const MAX_INTERPRETERS: usize = 1024;
const MAX_STATES: usize = 65536;

/// `pthread_self` -> thread states, of threads that have more than one: each subinterpreter that a thread runs has a
/// state of its own there. Of all threads, if they do not keep their own. The lists change while they are read; a state that does not name its interpreter ends its
/// list, and so does one that was seen before: the list leads in a circle.
pub fn nested(memory: &dyn Memory, python: &Interpreter) -> Vec<(u64, Vec<u64>)> {
    let l = &python.layout;
    let mut by_thread: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    let mut seen = FxHashSet::default();
    let read = |at: u64, offset: u64| memory.u64(at.checked_add(offset)?);
    let word = |offset: u32| (offset != 0).then(|| read(python.runtime, offset.into())).flatten();
    // Where the list's head has no name (3.6), the interpreter of whoever runs.
    let of_current = || read(word(l.runtime_current)?, l.tstate_interp.into());
    let mut interp = word(l.runtime_interpreters).or_else(of_current).unwrap_or(0);
    for _ in 0..MAX_INTERPRETERS {
        if interp == 0 {
            break;
        }
        let mut state = read(interp, l.interp_threads.into()).unwrap_or(0);
        while state != 0
            && seen.len() < MAX_STATES
            && read(state, l.tstate_interp.into()) == Some(interp)
            && seen.insert(state)
        {
            if let Some(thread) = read(state, l.tstate_thread_id.into()) {
                by_thread.entry(thread).or_default().push(state);
            }
            state = read(state, l.tstate_next.into()).unwrap_or(0);
        }
        interp = read(interp, l.interp_next.into()).unwrap_or(0);
    }
    let least = if python.own == Own::Listed { 1 } else { 2 };
    by_thread
        .into_iter()
        .filter(|(_, states)| states.len() >= least)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interp::{DEFAULT_TLS, tables};

    /// Words by address; zeros elsewhere.
    struct Words(BTreeMap<u64, u64>);

    impl Memory for Words {
        fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
            let word = self.0.get(&avma).copied().unwrap_or(0);
            buf.copy_from_slice(&word.to_le_bytes()[..buf.len()]);
            true
        }
    }

    const RUNTIME: u64 = 0x1000;

    /// Interpreters, each with its thread states and their threads; `circle`: the last of each list leads to its first.
    fn found(lists: &[(u64, &[(u64, u64)])], circle: bool, own: Own) -> Vec<(u64, Vec<u64>)> {
        let layout = tables::ROWS.last().expect("rows").1;
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
            own,
            tls: DEFAULT_TLS,
        };
        nested(&Words(words), &python)
    }

    #[test]
    fn each_state_is_listed_once() {
        let lists: [(u64, &[_]); 2] = [
            (0x10_0000, &[(0x30_0000, 7), (0x31_0000, 8)]),
            (0x20_0000, &[(0x32_0000, 7)]),
        ];
        for circle in [false, true] {
            assert_eq!(
                found(&lists, circle, Own::Key),
                [(7, vec![0x30_0000, 0x32_0000])],
                "{circle}"
            );
        }
        assert_eq!(found(&lists[..1], true, Own::Key), []);
        assert_eq!(
            found(&lists[..1], true, Own::Listed),
            [(7, vec![0x30_0000]), (8, vec![0x31_0000])]
        );
    }
}
