//! One thread's stack on request.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::sleeping::{ThreadActivity, ThreadProcFiles};
use super::slot::CopyOptions;
use super::slot_pool::{Request, SlotPool};
use crate::capture::WalkFn;
use crate::error;
use crate::event::{Sample, Tid};
use crate::sys;
use crate::sys::procfs::SignalReadiness;
use crate::sys::threads;

/// Threads whose state is kept.
const MAX_THREADS: usize = 128;
/// Maximum age of a sample that came too late for its request, ns.
const MAX_AGE: u64 = 5_000_000_000;
/// How long to spin for a response before sleeping: a thread that sleeps wakes much later when CPUs are busy. A thread
/// that is on a CPU responds within 20 us.
const SPIN_TIME: Duration = Duration::from_micros(50);
/// A thread that takes longer to respond had no CPU, ns.
const MAX_PROMPT: u64 = 1_000_000;
/// For so long after it had none, samples of a thread are requested in advance, ns.
const LATE_WINDOW: u64 = 1_000_000_000;
const COPY: CopyOptions = CopyOptions {
    stack: true,
    python: false,
};

/// Takes native stacks of threads of this process, one at a time.
pub struct StackRequester {
    pool: &'static SlotPool,
    threads: Mutex<RequestedThreads>,
}

type RequestedThreads = FxHashMap<Tid, RequestedThread>;

struct RequestedThread {
    /// `None`: this kernel does not expose how often it has run.
    files: Option<ThreadProcFiles>,
    /// Request without a response so far.
    pending: Option<Pending>,
    last: Option<LastResponse>,
    /// When it was last found to wait for a CPU.
    late: u64,
}

struct Pending {
    request: Request,
    time: u64,
    /// How often the thread had run then.
    runs: Option<u64>,
}

/// The last response of a thread.
struct LastResponse {
    sample: Arc<Sample>,
    /// How often it had run: until it is scheduled again, it is still near there.
    runs: Option<u64>,
    given: bool,
}

impl RequestedThread {
    fn new(tid: Tid) -> RequestedThread {
        RequestedThread {
            files: ThreadProcFiles::new(tid),
            pending: None,
            last: None,
            late: 0,
        }
    }

    fn runs(&self) -> Option<u64> {
        self.files.as_ref().and_then(ThreadProcFiles::runs)
    }

    /// Takes its response; false: `wait` returned none. `late`: the response was not waited for in time.
    fn take_response(&mut self, late: bool, wait: impl FnOnce(&Request) -> Option<Sample>) -> bool {
        let Some(pending) = self.pending.take() else {
            return false;
        };
        match wait(&pending.request) {
            Some(sample) => {
                self.on_response(&pending, sample, late);
                true
            }
            None => {
                self.pending = Some(pending);
                false
            }
        }
    }

    fn on_response(&mut self, pending: &Pending, sample: Sample, late: bool) -> &mut LastResponse {
        if sample.time.saturating_sub(pending.time) > MAX_PROMPT {
            self.late = sys::clock::now();
        }
        // A thread on a CPU responds at once, in that time slice; else at the beginning of its next.
        let next = pending.runs.map(|runs| runs + 1);
        self.last.insert(LastResponse {
            sample: Arc::new(sample),
            runs: if late { next } else { next.min(self.runs()) },
            given: false,
        })
    }

    /// Should a sample be requested in advance?
    fn was_recently_late(&self) -> bool {
        self.late > 0 && sys::clock::now().saturating_sub(self.late) < LATE_WINDOW
    }

    /// Has it had no CPU since the time slice in which it responded?
    fn unchanged(&self) -> bool {
        let last = self.last.as_ref().and_then(|last| last.runs);
        last.is_some_and(|last| self.runs().is_some_and(|runs| runs <= last))
    }

    /// Has its last response not been returned to a caller yet?
    fn has_unread_response(&self) -> bool {
        let recent = |last: &LastResponse| !last.given && sys::clock::now().saturating_sub(last.sample.time) < MAX_AGE;
        self.last.as_ref().is_some_and(recent)
    }
}

/// Outcome of a request.
pub enum Response {
    Sample(Arc<Sample>),
    /// There is no such thread.
    Gone,
    /// No response so far: call [`StackRequester::wait`].
    Late(Tid),
}

impl StackRequester {
    /// # Errors
    /// `Unsupported`: this process cannot sample itself.
    pub fn new(walk: WalkFn) -> error::Result<StackRequester> {
        Ok(StackRequester {
            pool: super::pool(walk)?,
            threads: Mutex::default(),
        })
    }

    /// Was it created in this process, not in one that this was forked from?
    pub fn is_current_process(&self) -> bool {
        self.pool.is_current_process()
    }

    /// The stack of the thread with this pointer (`pthread_t`), waiting for at most so long.
    ///
    /// A thread that waits for a CPU cannot respond before it has one. Its response is kept: if it is requested again
    /// within five seconds, and is late again, that response is returned, and the next one is requested in advance. As
    /// long as the thread has had no CPU since its last response, a request is pointless: that response is returned
    /// again.
    #[inline(never)]
    pub fn request(&self, thread_pointer: u64, timeout: Duration) -> Response {
        let Some(tid) = threads::tid_of(thread_pointer) else {
            return Response::Gone;
        };
        if tid == sys::process::current_tid() as Tid {
            return self
                .pool
                .sample_current_thread(COPY)
                .map_or(Response::Gone, |s| Response::Sample(Arc::new(s)));
        }
        let threads = &mut *self.lock();
        if threads.len() >= MAX_THREADS && !threads.contains_key(&tid) {
            threads.retain(|tid, t| t.pending.is_some() && threads::cpu_time(*tid).is_some());
        }
        let thread = threads.entry(tid).or_insert_with(|| RequestedThread::new(tid));
        match thread
            .files
            .as_ref()
            .map(|files| self.read_sleeping(files, tid, thread_pointer))
        {
            None | Some(Ok(None)) => {}
            Some(Ok(Some(sample))) => return Response::Sample(Arc::new(sample)),
            // The ID belongs to a new thread, with other files.
            Some(Err(Ended)) => *thread = RequestedThread::new(tid),
        }
        thread.take_response(true, |request| request.wait(Duration::ZERO));
        let known = thread.has_unread_response() || thread.unchanged();
        if thread.pending.is_none() && self.send(tid, threads).is_err() {
            threads.remove(&tid);
            return Response::Gone;
        }
        let Some(thread) = threads.get_mut(&tid) else {
            return Response::Gone;
        };
        // With a response available it is not worth sleeping for another. A thread that had no CPU a moment ago has a
        // request already, and would have responded since if it had got one.
        let pointless = known && thread.was_recently_late();
        let fresh = !pointless
            && thread.take_response(false, |request| {
                let wait = || if known { None } else { request.wait(timeout) };
                request.spin(SPIN_TIME).or_else(wait)
            });
        let response = match &mut thread.last {
            Some(last) if known || fresh => {
                last.given = true;
                Response::Sample(last.sample.clone())
            }
            _ => return Response::Late(tid),
        };
        if thread.pending.is_none() && thread.was_recently_late() {
            self.prefetch_request(tid, threads);
        }
        response
    }

    /// Requests a thread's next sample in advance, unless it sleeps.
    fn prefetch_request(&self, tid: Tid, threads: &mut RequestedThreads) {
        let files = threads.get(&tid).and_then(|t| t.files.as_ref());
        if files.is_some_and(|files| files.activity() != ThreadActivity::Runs) {
            return;
        }
        let _ = self.send(tid, threads); // a thread that has exited is detected at its next request
    }

    /// Sends a request to a known thread, unless no slot is free, or it blocks the signal: that would stay pending, and the next
    /// `sigwait` for all signals would return it to the program.
    ///
    /// # Errors
    /// ESRCH: it has exited.
    fn send(&self, tid: Tid, threads: &mut RequestedThreads) -> io::Result<()> {
        let runs = threads.get(&tid).and_then(RequestedThread::runs);
        // One that has responded does not block it, unless it has begun to.
        let responds = threads
            .get(&tid)
            .is_some_and(|t| t.last.is_some() && !t.was_recently_late());
        if !responds && self.blocks_signal(tid) {
            return Ok(());
        }
        let mut sent = self.pool.request(tid, COPY);
        if sent.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock) {
            // Responses that were not fetched occupy the slots.
            for other in threads.values_mut() {
                other.take_response(true, |request| request.wait(Duration::ZERO));
            }
            sent = self.pool.request(tid, COPY);
        }
        let request = match sent {
            Ok(request) => request,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(e),
        };
        let time = sys::clock::now();
        if let Some(thread) = threads.get_mut(&tid) {
            thread.pending = Some(Pending { request, time, runs });
        }
        Ok(())
    }

    fn blocks_signal(&self, tid: Tid) -> bool {
        let status = File::open(format!("/proc/self/task/{tid}/status")).ok();
        let readiness = status.and_then(|file| SignalReadiness::read(&file, self.pool.signal()));
        readiness.is_some_and(|readiness| readiness.blocks)
    }

    /// The late response of a thread, waiting until so long after its request. `None`: there is none so far.
    pub fn wait(&self, tid: Tid, timeout: Duration) -> Option<Arc<Sample>> {
        let pending = self.lock().get_mut(&tid)?.pending.take()?;
        let timeout = timeout.saturating_sub(Duration::from_nanos(sys::clock::now().saturating_sub(pending.time)));
        // Without the lock: others may send requests meanwhile.
        let sample = pending.request.wait(timeout);
        let threads = &mut *self.lock();
        let Some(thread) = threads.get_mut(&tid) else {
            return sample.map(Arc::new); // no longer kept
        };
        let Some(sample) = sample else {
            thread.pending = Some(pending);
            return None;
        };
        let last = thread.on_response(&pending, sample, true);
        last.given = true;
        let sample = last.sample.clone();
        self.prefetch_request(tid, threads);
        Some(sample)
    }

    fn lock(&self) -> MutexGuard<'_, RequestedThreads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a thread if it sleeps.
    fn read_sleeping(&self, files: &ThreadProcFiles, tid: Tid, thread_pointer: u64) -> Result<Option<Sample>, Ended> {
        // The count first: a thread that sleeps after it, and whose count is the same at the end, has not run
        // meanwhile.
        let runs = files.runs();
        let activity = files.activity();
        if activity == ThreadActivity::Ended {
            return Err(Ended);
        }
        let unchanged = || runs.is_some() && files.runs() == runs;
        let read = |regs| self.pool.read(regs, tid, thread_pointer, COPY, &unchanged);
        Ok(activity.regs().and_then(read).map(|(sample, _)| sample))
    }
}

/// The thread has exited.
struct Ended;
