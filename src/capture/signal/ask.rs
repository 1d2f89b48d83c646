//! One thread's stack on demand.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::asleep::{Doing, Files};
use super::pool::{Ask, Pool};
use super::slot::Wants;
use crate::capture::Walk;
use crate::error;
use crate::process::{own, sys};
use crate::sample::{Sample, Tid};

/// Threads that are kept.
const MOST_KEPT: usize = 128;
/// How old a sample may be that came too late for whoever asked for it, ns.
const MOST_AGE: u64 = 5_000_000_000;
/// How long an answer is looked for before sleeping, if at all: whoever sleeps wakes much later where CPUs are busy. A
/// thread that is on a CPU answers within 20 us.
const BRIEFLY: Duration = Duration::from_micros(50);
/// One that takes longer to answer had no CPU, ns.
const AT_ONCE: u64 = 1_000_000;
/// For so long after it had none, a thread is asked in advance, ns.
const BEHIND: u64 = 1_000_000_000;
const WANTS: Wants = Wants {
    stack: true,
    python: false,
};

/// Takes native stacks of threads of this process, one at a time.
pub struct Asker {
    pool: &'static Pool,
    threads: Mutex<Threads>,
}

type Threads = FxHashMap<Tid, Thread>;

struct Thread {
    /// `None`: this kernel does not tell how often it has run.
    files: Option<Files>,
    /// It has been asked, and has not answered yet.
    asked: Option<Asked>,
    last: Option<Last>,
    /// When it was last found to wait for a CPU.
    late: u64,
}

struct Asked {
    ask: Ask,
    time: u64,
    /// How often the thread had run then.
    runs: Option<u64>,
}

/// Its last answer.
struct Last {
    sample: Arc<Sample>,
    /// How often it had run: until it is given a CPU again, it is not far from there.
    runs: Option<u64>,
    given: bool,
}

impl Thread {
    fn new(tid: Tid) -> Thread {
        Thread {
            files: Files::new(tid),
            asked: None,
            last: None,
            late: 0,
        }
    }

    fn runs(&self) -> Option<u64> {
        self.files.as_ref().and_then(Files::runs)
    }

    /// Takes its answer; false: `wait` brought none. `late`: it has had its time before.
    fn take(&mut self, late: bool, wait: impl FnOnce(&Ask) -> Option<Sample>) -> bool {
        let Some(asked) = self.asked.take() else { return false };
        match wait(&asked.ask) {
            Some(sample) => {
                self.answered(&asked, sample, late);
                true
            }
            None => {
                self.asked = Some(asked);
                false
            }
        }
    }

    fn answered(&mut self, asked: &Asked, sample: Sample, late: bool) -> &mut Last {
        if sample.time.saturating_sub(asked.time) > AT_ONCE {
            self.late = sys::now();
        }
        // One that is on a CPU answers at once, in that turn; else it does so at the beginning of its next.
        let next = asked.runs.map(|runs| runs + 1);
        self.last.insert(Last {
            sample: Arc::new(sample),
            runs: if late { next } else { next.min(self.runs()) },
            given: false,
        })
    }

    /// Should it be asked in advance?
    fn is_behind(&self) -> bool {
        self.late > 0 && sys::now().saturating_sub(self.late) < BEHIND
    }

    /// Has it had no CPU since the turn in which it answered?
    fn stands(&self) -> bool {
        let last = self.last.as_ref().and_then(|last| last.runs);
        last.is_some_and(|last| self.runs().is_some_and(|runs| runs <= last))
    }

    /// Is its last answer one that nobody was given?
    fn waits(&self) -> bool {
        let recent = |last: &Last| !last.given && sys::now().saturating_sub(last.sample.time) < MOST_AGE;
        self.last.as_ref().is_some_and(recent)
    }
}

/// What came of asking.
pub enum Answer {
    Sample(Arc<Sample>),
    /// There is no such thread.
    Gone,
    /// It has not answered so far: ask [`Asker::wait`].
    Late(Tid),
}

impl Asker {
    /// # Errors
    /// `Unsupported`: this process cannot sample itself.
    pub fn new(walk: Walk) -> error::Result<Asker> {
        Ok(Asker {
            pool: super::pool(walk)?,
            threads: Mutex::default(),
        })
    }

    /// Was it made in this process, not in one that this was forked from?
    pub fn is_own(&self) -> bool {
        self.pool.is_own()
    }

    /// The stack of the thread with this pointer (`pthread_t`), waited for at most so long.
    ///
    /// A thread that waits for a CPU cannot answer before it has one. Its answer is not lost: asked again within five
    /// seconds, and late again, that is what is given, and it is asked in advance for the next time. As long as it has had
    /// no CPU since its last answer, it is asked in vain: then that is given again.
    #[inline(never)]
    pub fn ask(&self, pointer: u64, most: Duration) -> Answer {
        let Some(tid) = own::tid_of(pointer) else {
            return Answer::Gone;
        };
        if tid == sys::own_tid() as Tid {
            return self
                .pool
                .here(WANTS)
                .map_or(Answer::Gone, |s| Answer::Sample(Arc::new(s)));
        }
        let threads = &mut *self.lock();
        if threads.len() >= MOST_KEPT && !threads.contains_key(&tid) {
            threads.retain(|tid, t| t.asked.is_some() && own::cpu_time(*tid).is_some());
        }
        let thread = threads.entry(tid).or_insert_with(|| Thread::new(tid));
        match thread.files.as_ref().map(|files| self.asleep(files, tid, pointer)) {
            None | Some(Ok(None)) => {}
            Some(Ok(Some(sample))) => return Answer::Sample(Arc::new(sample)),
            // The number has been given to a new thread, whose files are others.
            Some(Err(Ended)) => *thread = Thread::new(tid),
        }
        thread.take(true, |ask| ask.wait(Duration::ZERO));
        let known = thread.waits() || thread.stands();
        if thread.asked.is_none() && self.send(tid, threads).is_err() {
            threads.remove(&tid);
            return Answer::Gone;
        }
        let Some(thread) = threads.get_mut(&tid) else {
            return Answer::Gone;
        };
        // Where there is an answer already, it is not worth sleeping for another.
        // One that had no CPU a moment ago has been asked in advance, and would have answered since if it had got one.
        let in_vain = known && thread.is_behind();
        let fresh = !in_vain
            && thread.take(false, |ask| {
                let wait = || if known { None } else { ask.wait(most) };
                ask.spin(BRIEFLY).or_else(wait)
            });
        let answer = match &mut thread.last {
            Some(last) if known || fresh => {
                last.given = true;
                Answer::Sample(last.sample.clone())
            }
            _ => return Answer::Late(tid),
        };
        if thread.asked.is_none() && thread.is_behind() {
            self.send_ahead(tid, threads);
        }
        answer
    }

    /// Asks a thread for the next time, unless it has gone to sleep.
    fn send_ahead(&self, tid: Tid, threads: &mut Threads) {
        let files = threads.get(&tid).and_then(|t| t.files.as_ref());
        if files.is_some_and(|files| files.doing() != Doing::Runs) {
            return;
        }
        let _ = self.send(tid, threads); // one that has ended is found out when it is asked for
    }

    /// Asks a thread that is known, unless no more can be asked now.
    ///
    /// # Errors
    /// ESRCH: it has ended.
    fn send(&self, tid: Tid, threads: &mut Threads) -> io::Result<()> {
        let runs = threads.get(&tid).and_then(Thread::runs);
        let mut sent = self.pool.ask(tid, WANTS);
        if sent.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock) {
            // Answers that nobody has fetched stand in the way.
            for other in threads.values_mut() {
                other.take(true, |ask| ask.wait(Duration::ZERO));
            }
            sent = self.pool.ask(tid, WANTS);
        }
        let ask = match sent {
            Ok(ask) => ask,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(e),
        };
        let time = sys::now();
        if let Some(thread) = threads.get_mut(&tid) {
            thread.asked = Some(Asked { ask, time, runs });
        }
        Ok(())
    }

    /// The late answer of a thread, waited for until so long after it was asked. `None`: there is none so far.
    pub fn wait(&self, tid: Tid, most: Duration) -> Option<Arc<Sample>> {
        let asked = self.lock().get_mut(&tid)?.asked.take()?;
        let most = most.saturating_sub(Duration::from_nanos(sys::now().saturating_sub(asked.time)));
        // Without the lock: others may ask meanwhile.
        let sample = asked.ask.wait(most);
        let threads = &mut *self.lock();
        let Some(thread) = threads.get_mut(&tid) else {
            return sample.map(Arc::new); // no longer kept
        };
        let Some(sample) = sample else {
            thread.asked = Some(asked);
            return None;
        };
        let last = thread.answered(&asked, sample, true);
        last.given = true;
        let sample = last.sample.clone();
        self.send_ahead(tid, threads);
        Some(sample)
    }

    fn lock(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a thread if it sleeps.
    fn asleep(&self, files: &Files, tid: Tid, pointer: u64) -> Result<Option<Sample>, Ended> {
        // The count first: a thread that sleeps after it, and whose count is the same at the end, has not run meanwhile.
        let runs = files.runs();
        let doing = files.doing();
        if doing == Doing::Ended {
            return Err(Ended);
        }
        let unchanged = || runs.is_some() && files.runs() == runs;
        let read = |regs| self.pool.read(regs, tid, pointer, WANTS, &unchanged);
        Ok(doing.regs().and_then(read).map(|(sample, _)| sample))
    }
}

/// A thread has ended.
struct Ended;
