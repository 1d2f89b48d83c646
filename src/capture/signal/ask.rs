//! One thread's stack on demand.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::asleep::{Doing, Files};
use super::pool::{Ask, Pool};
use super::slot::Wants;
use crate::capture::Walk;
use crate::error::Result;
use crate::process::{own, sys};
use crate::sample::{Sample, Tid};

/// Threads whose files are kept open.
const MOST_OPEN: usize = 128;
/// How old a sample may be that came too late for whoever asked for it, ns.
const MOST_AGE: u64 = 100_000_000;
const WANTS: Wants = Wants {
    stack: true,
    python: false,
};

/// Takes native stacks of threads of this process, one at a time.
pub struct Asker {
    pool: &'static Pool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    files: FxHashMap<Tid, Files>,
    /// Threads that have not answered yet, by their numbers.
    late: FxHashMap<Tid, Ask>,
}

/// What came of asking.
pub enum Answer {
    Sample(Box<Sample>),
    /// There is no such thread.
    Gone,
    /// It has not answered so far: ask [`Asker::wait`].
    Late(Tid),
}

impl Asker {
    /// # Errors
    /// `Unsupported`: this process cannot sample itself.
    pub fn new(walk: Walk) -> Result<Asker> {
        Ok(Asker {
            pool: super::pool(walk)?,
            state: Mutex::default(),
        })
    }

    /// Was it made in this process, not in one that this was forked from?
    pub fn is_own(&self) -> bool {
        self.pool.is_own()
    }

    /// The stack of the thread with this pointer (`pthread_t`), waited for at most so long.
    ///
    /// A thread that is about to run, on CPUs that are busy, may answer later. Its answer is not lost: asked again
    /// within 100 ms, and late again, that is what is given.
    #[inline(never)]
    pub fn ask(&self, pointer: u64, most: Duration) -> Answer {
        let Some(tid) = own::tid_of(pointer) else {
            return Answer::Gone;
        };
        if tid == sys::own_tid() as Tid {
            return self
                .pool
                .here(WANTS)
                .map_or(Answer::Gone, |s| Answer::Sample(Box::new(s)));
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match self.asleep(&mut state, tid, pointer) {
            Some(Answer::Late(_)) | None => {}
            Some(answer) => return answer,
        }
        let earlier = state.late.get(&tid).and_then(|ask| ask.wait(Duration::ZERO));
        let waits = earlier.is_none() && state.late.contains_key(&tid);
        if !waits {
            match self.pool.ask(tid, WANTS) {
                Ok(ask) => drop(state.late.insert(tid, ask)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => {
                    state.late.remove(&tid);
                    state.files.remove(&tid);
                    return Answer::Gone;
                }
            }
        }
        let sample = state.late.get(&tid).and_then(|ask| ask.wait(most));
        if sample.is_some() {
            state.late.remove(&tid);
        }
        let recent = |s: &Sample| sys::now().saturating_sub(s.time) < MOST_AGE;
        match sample.or_else(|| earlier.filter(recent)) {
            Some(sample) => Answer::Sample(Box::new(sample)),
            None => Answer::Late(tid),
        }
    }

    /// The late answer of a thread, waited for at most so long. `None`: there is none so far.
    pub fn wait(&self, tid: Tid, most: Duration) -> Option<Box<Sample>> {
        let state = || self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let ask = state().late.remove(&tid)?;
        // Without the lock: others may ask meanwhile.
        let sample = ask.wait(most);
        if sample.is_none() {
            state().late.insert(tid, ask);
        }
        Some(Box::new(sample?))
    }

    /// Reads a thread that sleeps.
    fn asleep(&self, state: &mut State, tid: Tid, pointer: u64) -> Option<Answer> {
        if !state.files.contains_key(&tid) {
            if state.files.len() >= MOST_OPEN {
                state.files.clear();
                state.late.retain(|tid, _| own::cpu_time(*tid).is_some());
            }
            state.files.insert(tid, Files::new(tid)?);
        }
        let files = &state.files[&tid];
        // The count first: a thread that sleeps after it, and whose count is the same at the end, has not run meanwhile.
        let runs = files.runs();
        let doing = files.doing();
        if doing == Doing::Ended {
            // The number may have been given to a new thread, whose files are others.
            state.files.remove(&tid);
            return None;
        }
        let unchanged = || runs.is_some() && files.runs() == runs;
        let sample = self.pool.read(doing.regs()?, tid, pointer, WANTS, &unchanged)?;
        Some(Answer::Sample(Box::new(sample)))
    }
}
