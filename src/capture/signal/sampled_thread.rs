//! A thread that is sampled: whether it may be signaled, and how many of its samples are missing.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::SignalBackend;
use super::handler;
use super::sleeping::{ThreadActivity, ThreadProcFiles};
use super::tick_timer::{EVENT_SIGNAL, TickTimer};
use crate::arch::wait_kind;
use crate::event::{Sample, Tid, WaitKind};
use crate::sys::files::are_scarce;
use crate::sys::procfs::SignalReadiness;

/// A thread that was seen to block our signal is signaled again when it was not seen to so often, with this time in between. It
/// would stay pending, and the next `sigwait` or `signalfd` for all signals would return it to the program; and while a thread is
/// in `sigwait`, the kernel shows the signals that it waits for as not blocked.
const UNBLOCKED_READS: u32 = 8;
const READ_INTERVAL: Duration = Duration::from_millis(20);
/// Ticks may take so long to arrive, ns: the kernel checks timers of CPU time at its own clock ticks, at least 100 a second.
const ARRIVAL_TIME: u64 = 20_000_000;

/// A sampled thread.
#[derive(Default)]
pub(super) struct SampledThread {
    pub thread_pointer: Option<u64>,
    pub timer: Option<TickTimer>,
    /// CPU time when sampling began, and when last read.
    pub began: u64,
    pub used: u64,
    /// CPU time at which its first tick is due, how many of its samples have arrived, and CPU time when the last one had.
    pub first_tick: u64,
    pub arrived: u64,
    pub arrived_at: u64,
    /// Its file `status`. If it was seen to block our signal: how often not since, and when that was.
    pub status: Option<File>,
    pub unblocked_reads: Option<u32>,
    pub read_at: Option<Instant>,
    pub files: Option<ThreadProcFiles>,
    /// How often it had run when it was last read while sleeping, and that sample.
    pub asleep: Option<(u64, Box<Sample>)>,
    /// When it was signaled, until its sample arrives.
    pub pending: Option<Instant>,
    pub seen: bool,
}

impl SampledThread {
    /// Whether it may be signaled now.
    pub fn readiness(&mut self, tid: Tid, signal: i32) -> SignalReadiness {
        if self.status.is_none() {
            self.status = File::open(format!("/proc/self/task/{tid}/status")).ok();
        }
        let read = self
            .status
            .as_ref()
            .and_then(|file| SignalReadiness::read(file, signal));
        let waits = self.waits_for_signals(tid);
        self.spare_descriptors();
        // It has exited: there is nothing to signal.
        let mut readiness = read.unwrap_or(SignalReadiness {
            runs: false,
            blocks: false,
        });
        if readiness.blocks || waits {
            self.unblocked_reads = Some(0);
        } else if let Some(reads) = &mut self.unblocked_reads
            && self.read_at.is_none_or(|at| at.elapsed() > READ_INTERVAL)
        {
            *reads += 1;
            self.unblocked_reads = self.unblocked_reads.filter(|reads| *reads < UNBLOCKED_READS);
        } else {
            readiness.blocks = self.unblocked_reads.is_some();
            return readiness;
        }
        self.read_at = Some(Instant::now());
        readiness.blocks = self.unblocked_reads.is_some();
        readiness
    }

    /// Closes the files of the thread, which are opened when they are needed again.
    pub fn close_files(&mut self) {
        (self.status, self.files) = (None, None);
    }

    /// Closes the files of the thread if the program needs the descriptors more: they are opened again for each reading then.
    pub fn spare_descriptors(&mut self) {
        self.status.take_if(|file| are_scarce(file.as_fd()));
        self.files.take_if(|files| files.are_scarce());
    }

    /// Does it sleep until it gets a signal?
    fn waits_for_signals(&mut self, tid: Tid) -> bool {
        if self.files.is_none() {
            self.files = ThreadProcFiles::new(tid);
        }
        match self.files.as_ref().map(ThreadProcFiles::activity) {
            Some(ThreadActivity::Sleeps(call)) => wait_kind(call.number, &call.regs()) == WaitKind::Signal,
            _ => false,
        }
    }

    /// Samples that were due on the CPU clock and have not arrived.
    pub fn missing(&self, period: u64) -> u64 {
        let due = match self.used.checked_sub(self.first_tick) {
            Some(time) => 1 + time / period,
            None => 0,
        };
        let missing = due.saturating_sub(self.arrived);
        // The last ones may be on their way.
        if missing > 1 + ARRIVAL_TIME / period {
            missing
        } else {
            0
        }
    }
}

impl SignalBackend {
    /// Stops the timers of threads that have begun to block their signal, and starts those of threads that no longer do.
    pub(super) fn check_timers(&mut self) {
        let (period, mut pending) = (self.period(), Vec::new());
        if self.with_events && !handler::is_installed(EVENT_SIGNAL) {
            // The program has its own handler now. Timers are made below.
            self.with_events = false;
            let is_event = |t: &&mut SampledThread| matches!(t.timer, Some(TickTimer::Event(_)));
            self.threads.values_mut().filter(is_event).for_each(|t| t.timer = None);
        }
        let mut threads = std::mem::take(&mut self.threads);
        for (tid, t) in &mut threads {
            let next = match t.used.checked_sub(t.first_tick) {
                Some(passed) => period - passed % period,
                None => t.first_tick - t.used,
            };
            if let Some(timer) = &t.timer {
                let (late, signal) = (t.used.saturating_sub(t.arrived_at.max(t.first_tick)), timer.signal());
                if late <= 2 * period + ARRIVAL_TIME {
                    continue;
                }
                if t.readiness(*tid, signal).blocks {
                    t.timer = None;
                    pending.push(signal);
                } else if let Some(timer) = &t.timer {
                    // Ticks were lost, and an event waits for the handler of the last one.
                    timer.set(next, period);
                    t.arrived_at = t.used;
                }
            } else if t.used > t.arrived_at && !t.readiness(*tid, self.tick_signal()).blocks {
                t.arrived_at = t.used;
                t.timer = self.timer(*tid);
                if let Some(timer) = &t.timer {
                    timer.set(next, period);
                }
            }
        }
        self.threads = threads;
        pending.sort_unstable();
        pending.dedup();
        pending.into_iter().for_each(handler::discard_pending);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_that_do_not_arrive_are_missing() {
        const MS: u64 = 1_000_000;
        let check = |used: u64, arrived: u64, expected: u64| {
            let thread = SampledThread {
                first_tick: 13 * MS,
                used: used * MS,
                arrived,
                ..SampledThread::default()
            };
            assert_eq!(thread.missing(10 * MS), expected, "{used} {arrived}");
        };
        check(12, 0, 0); // none is due
        check(13, 0, 0); // may be on its way
        check(33, 0, 0);
        check(43, 0, 4);
        check(1003, 100, 0);
        check(1003, 29, 71);
        check(1003, 200, 0);
    }
}
