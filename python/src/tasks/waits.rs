//! How long each thread was in the system calls that event loops wait in.
//!
//! The hooks run without the GIL, so they only add to a record of the thread. Its machine takes what has come since with
//! the thread's next event: in between the same function was the innermost, so when it waited does not matter.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use nativeprof_hooks::{self as hooks, Cache, Handler, Ticket, Wait};

use super::measures::{Measures, USAGE, usage};
use crate::engine::Clock;

/// The waits of one thread, written by that thread only.
#[derive(Default)]
pub struct ThreadWaits {
    count: AtomicI64,
    ticks: AtomicI64,
    /// When the open wait began; 0: none is open.
    begin: AtomicI64,
    /// Resource usage in waits, and when the open one began; the bits of numbers.
    usage: [AtomicU64; USAGE],
    usage_begin: [AtomicU64; USAGE],
}

/// What a thread has waited.
#[derive(Clone, Copy, Default, Debug)]
pub struct Waited {
    pub count: i64,
    pub ticks: i64,
    pub usage: [f64; USAGE],
}

impl ThreadWaits {
    /// All waits so far, of which the one that is open lasts until `now`.
    pub fn so_far(&self, now: i64, with_usage: bool) -> Waited {
        let begin = self.begin.load(Ordering::Acquire);
        let mut waited = Waited {
            count: self.count.load(Ordering::Relaxed),
            ticks: self.ticks.load(Ordering::Relaxed),
            usage: [0.0; USAGE],
        };
        if begin != 0 {
            waited.ticks += (now - begin).max(0);
            waited.count += 1;
        }
        if with_usage {
            for (to, bits) in waited.usage.iter_mut().zip(&self.usage) {
                *to = f64::from_bits(bits.load(Ordering::Relaxed));
            }
        }
        waited
    }
}

#[derive(Default)]
struct Records {
    /// Kept for as long as the handler may run: words of threads point to them.
    all: Vec<Arc<ThreadWaits>>,
    /// Of threads that have ended.
    free: Vec<Arc<ThreadWaits>>,
}

/// The handler of the hooks, and the records of all threads.
pub struct WaitHandler {
    clock: Clock,
    with_usage: bool,
    records: Mutex<Records>,
    ticket: OnceLock<Ticket>,
}

impl WaitHandler {
    pub fn new(measures: Measures) -> WaitHandler {
        WaitHandler {
            clock: Clock::best(),
            with_usage: measures == Measures::Usage,
            records: Mutex::default(),
            ticket: OnceLock::new(),
        }
    }

    /// The hooks are in place under this ticket.
    pub fn installed(&self, ticket: Ticket) {
        let _ = self.ticket.set(ticket);
    }

    /// A record for the thread that calls this, on which the hooks write from now on.
    pub fn record(&self) -> Arc<ThreadWaits> {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let record = records.free.pop().unwrap_or_default();
        // A thread that ended in a wait has left it open.
        record.begin.store(0, Ordering::Relaxed);
        if let Some(ticket) = self.ticket.get() {
            if !records.all.iter().any(|known| Arc::ptr_eq(known, &record)) {
                records.all.push(record.clone());
            }
            hooks::with_cache(*ticket, |cache| cache.word = Arc::as_ptr(&record) as u64);
        }
        record
    }

    /// The thread of this record has ended.
    pub fn return_record(&self, record: Arc<ThreadWaits>) {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        records.free.push(record);
    }
}

impl Handler for WaitHandler {
    fn on_wait(&self, cache: &mut Cache, wait: Wait) {
        let record = cache.word as *const ThreadWaits;
        // SAFETY: null, or a record that `records` keeps; the word is this installation's.
        let Some(record) = (unsafe { record.as_ref() }) else {
            return;
        };
        match wait {
            Wait::Enter => {
                if self.with_usage {
                    for (to, value) in record.usage_begin.iter().zip(usage()) {
                        to.store(value.to_bits(), Ordering::Relaxed);
                    }
                }
                record.begin.store(self.clock.now(), Ordering::Release);
            }
            Wait::Leave => {
                let begin = record.begin.load(Ordering::Relaxed);
                // The session began inside of the wait.
                if begin == 0 {
                    return;
                }
                let passed = self.clock.now() - begin;
                record.begin.store(0, Ordering::Release);
                record.ticks.fetch_add(passed, Ordering::Relaxed);
                record.count.fetch_add(1, Ordering::Relaxed);
                if self.with_usage {
                    let values = usage();
                    for ((sum, begin), value) in record.usage.iter().zip(&record.usage_begin).zip(values) {
                        let passed = value - f64::from_bits(begin.load(Ordering::Relaxed));
                        let before = f64::from_bits(sum.load(Ordering::Relaxed));
                        sum.store((before + passed).to_bits(), Ordering::Relaxed);
                    }
                }
            }
        }
    }
}
