//! Samples of threads for one-shot use. A sleeping thread is not stopped: its stack does not change while it does not
//! run, and that it did not run is verified. A running thread is stopped.

use std::sync::Arc;
use std::time::Duration;

use super::stopped_reader::StoppedReader;
use crate::arch::Regs;
use crate::capture::common::polled::polled;
use crate::capture::common::seen_code::SeenCode;
use crate::capture::{WalkFn, take_tasks};
use crate::cpython_layout::TargetLayout;
use crate::event::{CodeCopy, Pid, PythonWalk, Sample, Tid};
use crate::sys;
use crate::sys::procfs;
use crate::sys::procfs::{BlockedAt, RunSnapshot};
use crate::sys::ptrace;
use crate::sys::ptrace::{Stopped, WaitEvent};

/// Attempts to read a thread that runs in between.
const TRIES: usize = 8;
/// How long to wait for a thread to stop, ns: it may be waiting for a CPU.
const MAX_STOP_WAIT: u64 = 2_000_000_000;
/// How long to wait for it without yielding our CPU, ns. A thread that spins for longer loses its CPU when it matters.
const MAX_SPIN: u64 = 200_000;

/// How a thread was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadMode {
    /// It did not run, and was not stopped.
    Asleep,
    /// It was stopped, for at most so many ns.
    Stopped(u64),
}

/// Why a thread was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotError {
    /// It has exited.
    Gone,
    /// It may not be traced: missing privilege, or it has another tracer.
    Refused,
    /// It ran: at every attempt, or, if it may not be stopped, at the first.
    KeptRunning,
    /// It slept at the first attempt, but ran meanwhile at each, and may not be stopped.
    MovedOn,
    /// It did not stop when requested: it waits for a CPU, or is in an uninterruptible wait.
    DidNotStop,
    /// The thread that traces it cannot be started.
    NoTracer,
}

/// A thread as it was at one instant.
#[derive(Clone, Debug)]
pub struct ThreadSnapshot<T> {
    pub sample: Sample,
    /// Code objects that were copied.
    pub codes: Vec<CodeCopy>,
    pub mode: ReadMode,
    /// As in [`RunSnapshot`]; `R` for one that was stopped.
    pub state: char,
    pub blocked: Option<BlockedAt>,
    /// Kernel functions, innermost first; if requested and permitted.
    pub kernel: Option<Vec<String>>,
    /// The result of `during`.
    pub found: T,
}

/// What to read of threads, and how.
pub struct Snapshotter<'a, T> {
    pub pid: Pid,
    pub layout: &'a TargetLayout,
    pub walk: WalkFn,
    /// Code objects that need not be copied again.
    pub seen_code: Arc<SeenCode>,
    /// Memory that may hold stacks (start and end), ascending.
    pub writable: &'a [(u64, u64)],
    /// Read the names of kernel functions too.
    pub kernel: bool,
    /// Running threads are not stopped: they give `KeptRunning` or `MovedOn`.
    pub never_stop: bool,
    /// Called while the thread is where it was read, with its interpreter frames, its thread pointer (0: not known),
    /// and whether it is stopped: then it must be quick.
    pub during: &'a (dyn Fn(&PythonWalk, u64, bool) -> T + Sync),
}

/// A thread to read.
#[derive(Clone, Copy, Debug)]
pub struct SnapshotTarget {
    pub tid: Tid,
    /// Its thread pointer, if known from elsewhere.
    pub thread_pointer: Option<u64>,
    /// Stop it even if it sleeps.
    pub stop_sleeping: bool,
}

impl<T: Send> Snapshotter<'_, T> {
    /// Reads the threads one after the other. Afterwards no thread is traced, even after an error.
    pub fn inspect(&self, targets: &[SnapshotTarget]) -> Vec<(Tid, Result<ThreadSnapshot<T>, SnapshotError>)> {
        if self.never_stop {
            return self.inspect_here(targets);
        }
        // A separate thread: when it ends, the kernel detaches it from everything it traced.
        std::thread::scope(|scope| {
            let tracer = std::thread::Builder::new().spawn_scoped(scope, || {
                // Raise priority to shorten stops; ignored if not permitted.
                sys::process::set_realtime_priority();
                self.inspect_here(targets)
            });
            match tracer {
                Ok(tracer) => tracer.join().unwrap_or_default(),
                Err(_) => targets.iter().map(|t| (t.tid, Err(SnapshotError::NoTracer))).collect(),
            }
        })
    }

    fn inspect_here(&self, targets: &[SnapshotTarget]) -> Vec<(Tid, Result<ThreadSnapshot<T>, SnapshotError>)> {
        let (mut reader, mut late) = (StoppedReader::new(self.walk, self.seen_code.clone()), Vec::new());
        let read = |t: &SnapshotTarget| (t.tid, self.read_thread(&mut reader, &mut late, t));
        targets.iter().map(read).collect()
    }

    fn read_thread(
        &self,
        reader: &mut StoppedReader,
        late: &mut Vec<Tid>,
        target: &SnapshotTarget,
    ) -> Result<ThreadSnapshot<T>, SnapshotError> {
        // Including those of failed attempts, which are not copied again.
        let mut codes = Vec::new();
        let mut moved = SnapshotError::KeptRunning;
        for _ in 0..TRIES {
            let before = RunSnapshot::read(self.pid, target.tid).ok_or(SnapshotError::Gone)?;
            if self.never_stop {
                if before.runs() {
                    return Err(moved);
                }
                moved = SnapshotError::MovedOn;
            }
            let seen = if before.runs() || target.stop_sleeping {
                self.stopped(reader, late, target, before.state)
            } else {
                self.asleep(reader, target, before)
            };
            let copies = reader.codes();
            match seen {
                Ok(mut seen) => {
                    // Tasks of failed attempts may have ended.
                    codes.extend(take_tasks(copies, &mut seen.sample));
                    return Ok(ThreadSnapshot { codes, ..seen });
                }
                Err(SnapshotError::KeptRunning) => {
                    codes.extend(take_tasks(copies, &mut Sample::default()));
                }
                Err(error) => return Err(error),
            }
        }
        Err(moved)
    }

    /// Reads a thread that does not run. `KeptRunning` if it has run meanwhile.
    fn asleep(
        &self,
        reader: &mut StoppedReader,
        target: &SnapshotTarget,
        before: RunSnapshot,
    ) -> Result<ThreadSnapshot<T>, SnapshotError> {
        let (pid, tid) = (self.pid, target.tid);
        let blocked = procfs::blocked(pid, tid).map_err(|_| SnapshotError::Refused)?;
        let blocked = blocked.ok_or(SnapshotError::KeptRunning)?;
        let regs = Regs::from_ip_sp(blocked.ip, blocked.sp);
        let at = self.writable.partition_point(|(_, end)| *end <= blocked.sp);
        let memory = self.writable.get(at).filter(|(start, _)| *start <= blocked.sp);
        let end = memory.map_or(0, |(_, end)| *end);
        let (mut sample, python_walk) = reader.read_thread((pid, tid), regs, target.thread_pointer, end, self.layout);
        let read = |at, out: &mut [u8]| sys::memory::read_memory(pid, at, out);
        sample.polled = blocked.call.and_then(|(call, args)| polled(call, &args, read));
        let found = (self.during)(python_walk, target.thread_pointer.unwrap_or(0), false);
        let kernel = self.kernel.then(|| procfs::kernel_stack(pid, tid)).flatten();
        let after = RunSnapshot::read(pid, tid).ok_or(SnapshotError::Gone)?;
        if after != before {
            return Err(SnapshotError::KeptRunning);
        }
        Ok(ThreadSnapshot {
            sample,
            codes: Vec::new(),
            mode: ReadMode::Asleep,
            state: before.state,
            blocked: Some(blocked),
            kernel,
            found,
        })
    }

    /// Stops and reads a thread.
    fn stopped(
        &self,
        reader: &mut StoppedReader,
        late: &mut Vec<Tid>,
        target: &SnapshotTarget,
        state: char,
    ) -> Result<ThreadSnapshot<T>, SnapshotError> {
        let (pid, tid) = (self.pid, target.tid);
        let blocked = procfs::blocked(pid, tid).ok().flatten().filter(|_| state != 'R');
        if let Some(thread_pointer) = target.thread_pointer {
            reader.copy_code_early(self.pid, tid, thread_pointer, self.layout);
        }
        ptrace::seize_alone(tid).map_err(|_| SnapshotError::Refused)?;
        ptrace::interrupt(tid).map_err(|_| SnapshotError::Gone)?;
        let (stop, since) = wait(tid, late)?;
        let mut found = None;
        let mut during =
            |python_walk: &PythonWalk, thread_pointer| found = Some((self.during)(python_walk, thread_pointer, true));
        let taken = reader.take_and_detach(stop, pid, self.layout, &mut during);
        let stopped = sys::clock::now() - since;
        match (taken, found) {
            (Ok(sample), Some(found)) => Ok(ThreadSnapshot {
                sample,
                codes: Vec::new(),
                mode: ReadMode::Stopped(stopped),
                state,
                blocked,
                kernel: None,
                found,
            }),
            _ => Err(SnapshotError::Gone),
        }
    }
}

/// Waits until a thread has stopped; also returns a time at which it had not. `late`: threads that did not stop in
/// time; they are resumed when they do.
fn wait(tid: Tid, late: &mut Vec<Tid>) -> Result<(Stopped, u64), SnapshotError> {
    let begun = sys::clock::now();
    loop {
        late.retain(|tid| ptrace::next_wait_event(Some(*tid)).is_none());
        let since = sys::clock::now();
        match ptrace::next_wait_event(Some(tid)) {
            Some(WaitEvent::Stopped(stop)) => return Ok((stop, since)),
            Some(WaitEvent::Ended(_)) => return Err(SnapshotError::Gone),
            None if since - begun > MAX_STOP_WAIT => {
                late.push(tid);
                return Err(SnapshotError::DidNotStop);
            }
            // With one CPU the thread cannot stop before we yield.
            None if since - begun > MAX_SPIN || sys::process::cpu_count() == 1 => {
                std::thread::sleep(Duration::from_micros(50))
            }
            None => std::hint::spin_loop(),
        }
    }
}
