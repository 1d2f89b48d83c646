//! Sampling by holding one thread at a time with ptrace, for tens of microseconds: needs no rights but those over the
//! process.
//!
//! A thread of ours is the tracer (tracer.rs), since ptrace knows threads and stops must not wait for the session. Each
//! target thread has a timer of its own CPU time (timer.rs); at a tick in user code the thread stops, its registers, stack
//! and interpreter frames are read, and it goes on. In a system call it is never interrupted; threads that sleep are never
//! touched.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::mappings::Mappings;
use super::{Clock, Counts, Held, Options, Source, Walk};
use crate::error::{Error, Kind, Result};
use crate::layout::Space;
use crate::process::trace;
use crate::sample::{Event, Pid};

mod hold;
pub mod once;
mod run_state;
mod status;
mod timer;
mod tracer;

pub use timer::Kind as Timer;

/// Longest time between two looks at the queue: bounds how old a code object may be when its name is read.
const LOOK: Duration = Duration::from_millis(10);
/// Samples handed out at once.
const BATCH: usize = 256;

/// What the tracer is told.
enum Command {
    /// Take a process in; `true`: from its next exec on.
    Attach(Pid, bool, Sender<Result<()>>),
    Start,
    Stop,
}

/// What both threads know.
#[derive(Default)]
struct Shared {
    queue: Mutex<VecDeque<Note>>,
    /// Told when something in the queue is urgent.
    ready: Condvar,
    spaces: Mutex<FxHashMap<Pid, Arc<Space>>>,
    tally: Mutex<Tally>,
}

/// What the tracer tells.
enum Note {
    Event(Event),
    /// Mappings of this process may have changed in ways that were not told.
    Remapped(Pid),
}

/// Microseconds that are counted one by one.
const FINE: usize = 1000;

#[derive(Clone)]
struct Tally {
    cpu_time: u64,
    delivered: u64,
    lost: u64,
    /// Holds by length in microseconds; the last one counts all that are longer.
    held: Vec<u64>,
    longest: u64,
}

impl Default for Tally {
    fn default() -> Tally {
        Tally {
            cpu_time: 0,
            delivered: 0,
            lost: 0,
            held: vec![0; FINE + 1],
            longest: 0,
        }
    }
}

impl Tally {
    fn hold(&mut self, ns: u64) {
        let us = usize::try_from(ns / 1000).unwrap_or(FINE).min(FINE);
        self.held[us] += 1;
        self.longest = self.longest.max(ns);
    }

    fn held(&self) -> Option<Held> {
        let all: u64 = self.held.iter().sum();
        let mut below = 0;
        let median = self.held.iter().position(|n| {
            below += n;
            below * 2 >= all
        });
        (all > 0).then_some(Held {
            median: median.unwrap_or(FINE) as u64 * 1000,
            longest: self.longest,
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No invariant spans two fields of what these protect.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub struct PtraceSource {
    shared: Arc<Shared>,
    commands: Sender<Command>,
    waker: OwnedFd,
    tracer: Option<JoinHandle<()>>,
    kind: Timer,
    mappings: Mappings,
}

impl PtraceSource {
    /// Starts the tracer; traces nothing yet. SIGCHLD is blocked from now on in this thread and those it makes.
    ///
    /// # Errors
    /// An event that cannot be had this way, or no descriptors left.
    pub fn new(options: &Options, walk: Walk) -> Result<PtraceSource> {
        PtraceSource::with_timer(options, walk, Timer::probe())
    }

    /// The same with timers of a kind that may not be the best one here.
    ///
    /// # Errors
    /// As [`PtraceSource::new`].
    pub fn with_timer(options: &Options, walk: Walk, kind: Timer) -> Result<PtraceSource> {
        if !matches!(options.event, Clock::Auto | Clock::CpuClock) {
            return Err(
                Error::new(Kind::Unsupported, "this event cannot be sampled with ptrace")
                    .why("ptrace stops a thread a moment after the event, when it is elsewhere")
                    .hint("leave --event out, or use --backend ebpf"),
            );
        }
        let failed = |e| Error::io("cannot set up tracing", e);
        let shared = Arc::new(Shared::default());
        let (commands, told) = channel();
        let waker = trace::waker().map_err(failed)?;
        let children = trace::child_signals().map_err(failed)?;
        let parts = tracer::Parts {
            shared: shared.clone(),
            told,
            waker: waker.try_clone().map_err(failed)?,
            children,
            kind,
            rate: options.rate,
            follow: options.children,
            walk,
        };
        let tracer = tracer::start(parts).map_err(failed)?;
        Ok(PtraceSource {
            shared,
            commands,
            waker,
            tracer: Some(tracer),
            kind,
            mappings: Mappings::default(),
        })
    }

    fn tell(&self, command: Command) {
        // The tracer ends only after `Stop`; later commands find nobody.
        let _ = self.commands.send(command);
        trace::wake(self.waker.as_fd());
    }

    fn take_in(&mut self, pid: Pid, at_exec: bool) -> Result<()> {
        let (reply, answer) = channel();
        self.tell(Command::Attach(pid, at_exec, reply));
        let gone = || Error::new(Kind::Io, format!("cannot trace process {pid}")).why("the tracing thread has ended");
        answer.recv().unwrap_or_else(|_| Err(gone()))
    }
}

impl Source for PtraceSource {
    fn backend(&self) -> &'static str {
        "ptrace"
    }

    fn event(&self) -> &str {
        self.kind.name()
    }

    fn attach(&mut self, pid: Pid) -> Result<()> {
        self.take_in(pid, false)
    }

    fn attach_at_exec(&mut self, pid: Pid) -> Result<()> {
        self.take_in(pid, true)
    }

    fn learn(&mut self, pid: Pid, space: &Space) -> Result<()> {
        lock(&self.shared.spaces).insert(pid, Arc::new(space.clone()));
        Ok(())
    }

    fn forget(&mut self, pid: Pid) {
        lock(&self.shared.spaces).remove(&pid);
        self.mappings.forget(pid);
    }

    fn start(&mut self) -> Result<()> {
        self.tell(Command::Start);
        Ok(())
    }

    fn poll(&mut self, wait: Duration, out: &mut Vec<Event>) -> Result<bool> {
        let mut queue = lock(&self.shared.queue);
        if queue.is_empty() && !wait.is_zero() {
            let waited = self.shared.ready.wait_timeout(queue, wait.min(LOOK));
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let n = queue.len().min(BATCH);
        let notes: Vec<Note> = queue.drain(..n).collect();
        let more = !queue.is_empty();
        drop(queue);
        for note in notes {
            match note {
                Note::Event(event) => {
                    self.mappings.see(&event);
                    out.push(event);
                }
                Note::Remapped(pid) => self.mappings.look(pid, out),
            }
        }
        Ok(more)
    }

    fn stop(&mut self) {
        self.tell(Command::Stop);
        if let Some(tracer) = self.tracer.take() {
            let _ = tracer.join(); // it has let go of all threads by now, however it ended
        }
    }

    fn counts(&self) -> Counts {
        let tally = lock(&self.shared.tally);
        Counts {
            cpu_time: tally.cpu_time,
            delivered: tally.delivered,
            lost: tally.lost,
            held: tally.held(),
        }
    }
}

impl Drop for PtraceSource {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_longest_hold() {
        let mut tally = Tally::default();
        assert_eq!(tally.held(), None);
        for us in [30, 31, 32, 40, 5000] {
            tally.hold(us * 1000 + 999);
        }
        let held = Held {
            median: 32_000,
            longest: 5_000_999,
        };
        assert_eq!(tally.held(), Some(held));
    }
}
