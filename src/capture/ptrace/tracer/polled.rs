//! Threads that no tick stops, whose CPU time is polled: what keeps the number of their stops near the sampling rate, and the
//! results of their system calls unchanged.
//!
//! A thread may be stopped outside of system calls, or in one that is restarted. Which of these holds is known while each of
//! its calls stops it, which costs far more than samples do. So calls are followed as long as they are few. A thread that
//! makes many runs freely, and is stopped wherever it is when a sample falls due, unless it was seen in a call that would
//! return another result then ([`arch::cut_short`]). Such a thread is not stopped for a while, except where it sleeps in
//! a call that the kernel resumes; from there on its calls are followed again, as long as they are few.

use super::{ThreadSlot, TracedThread, Tracer, lock};
use crate::arch;
use crate::arch::CutShort;
use crate::capture::ptrace::run_state::{RunState, ThreadRuns};
use crate::capture::ptrace::timer::{ThreadTimer, TimerKind};
use crate::event::Tid;
use crate::sys;
use crate::sys::procfs;
use crate::sys::procfs::{NoSignal, TickSignal};
use crate::sys::ptrace;
use crate::sys::ptrace::{StopReason, Stopped, SyscallSide};

/// Stops at system calls that a thread may make at once, before they are limited to the sampling rate.
const MAX_BURST: u64 = 64;
/// As many of them must be left for its calls to be followed again: a few calls with what is between them.
const MIN_BURST: u64 = 8;
/// For so long after it was seen in a call that a stop would change, a thread counts as one that makes such calls, ns.
const AVOIDANCE_TIME: u64 = 10_000_000_000;

/// A thread that no tick stops.
pub(super) struct PolledThread {
    pub slot: ThreadSlot,
    allowance: Allowance,
    /// Until then the thread is not stopped where it may be in a system call.
    avoided_until: u64,
}

impl PolledThread {
    pub fn new() -> PolledThread {
        PolledThread {
            slot: ThreadSlot::Unknown,
            allowance: Allowance {
                stops: MAX_BURST,
                counted: sys::clock::now(),
            },
            avoided_until: 0,
        }
    }

    /// May it be stopped now, wherever it is?
    pub fn may_be_stopped(&self, now: u64) -> bool {
        self.slot == ThreadSlot::User || self.slot != ThreadSlot::Call && now >= self.avoided_until
    }
}

/// Stops at system calls that a thread may still make: as many per second as samples, after a first burst.
struct Allowance {
    stops: u64,
    /// Up to when new ones were added.
    counted: u64,
}

impl Allowance {
    fn refill(&mut self, now: u64, rate: u64) {
        let period = 1_000_000_000 / rate.max(1);
        let new = now.saturating_sub(self.counted) / period.max(1);
        self.counted += new * period;
        self.stops = self.stops.saturating_add(new).min(MAX_BURST);
    }

    fn take(&mut self, now: u64, rate: u64) -> bool {
        self.refill(now, rate);
        let left = self.stops > 0;
        self.stops -= u64::from(left);
        left
    }
}

/// Why the CPU time of threads is polled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::capture::ptrace) enum PollReason {
    NoPerfEvents,
    NoPermission,
    SignalsTaken,
    NoEvent,
}

impl PollReason {
    pub fn of(kind: TimerKind, signal: TickSignal) -> PollReason {
        match (kind, signal) {
            (TimerKind::Procfs, _) => PollReason::NoPerfEvents,
            (_, Err(NoSignal::NotPermitted)) => PollReason::NoPermission,
            (_, Err(NoSignal::Taken | NoSignal::Exited)) => PollReason::SignalsTaken,
            (_, Ok(_)) => PollReason::NoEvent,
        }
    }

    /// `since ...`
    pub fn text(self) -> &'static str {
        match self {
            PollReason::NoPerfEvents => "perf events are not permitted here",
            PollReason::NoPermission => {
                "this user may not send it signals (as root, or as its user, ticks would stop it)"
            }
            PollReason::SignalsTaken => {
                "it blocks or handles SIGURG, SIGWINCH and SIGCHLD, with which ticks would stop it"
            }
            PollReason::NoEvent => {
                "the kernel gave it no perf event (check `ulimit -n` and kernel.perf_event_mlock_kb)"
            }
        }
    }
}

/// Would a stop change what this call of the thread returns?
fn is_changed_by_stop(tid: Tid, (call, args): (u64, &[u64; 6])) -> bool {
    match arch::cut_short(call, args) {
        None => false,
        Some(CutShort::Always) => true,
        Some(CutShort::Write(fd)) => procfs::is_transfer_interruptible(tid, fd, true),
        Some(CutShort::Read(fd)) => procfs::is_transfer_interruptible(tid, fd, false),
    }
}

impl Tracer {
    /// Records where a polled thread is that has stopped, and whether it stops at its next system call too.
    pub(super) fn follow(&mut self, stop: &mut Stopped) -> Option<SyscallSide> {
        let (now, rate, tid) = (sys::clock::now(), self.p.rate, stop.tid);
        let t = self.threads.get_mut(&tid)?;
        let polled = t.polled.as_mut()?;
        let side = (stop.reason == StopReason::Call).then(|| stop.side()).flatten();
        let call = match side {
            Some(SyscallSide::Entry(call, args)) => Some((call, args)),
            // It was stopped wherever it was.
            None if stop.reason == StopReason::Trap && polled.slot == ThreadSlot::Free => {
                stop.registers().ok().and_then(|regs| regs.system_call())
            }
            _ => None,
        };
        if call.is_some_and(|(call, args)| is_changed_by_stop(tid, (call, &args))) {
            polled.avoided_until = now + AVOIDANCE_TIME;
        }
        // A sample that is owed is taken when the call returns.
        stop.at_syscalls = polled.allowance.take(now, rate) || t.owed > 0;
        polled.slot = match (stop.reason, side) {
            _ if !stop.at_syscalls => ThreadSlot::Free,
            (StopReason::Cloned | StopReason::Exec, _) | (_, Some(SyscallSide::Entry(..))) => ThreadSlot::Call,
            (StopReason::Call, None) => ThreadSlot::Unknown, // killed
            _ => ThreadSlot::User,
        };
        side
    }

    /// Samples the threads whose CPU time says so, where no perf event does.
    pub(super) fn poll_cpu_time(&mut self) {
        let (now, rate) = (sys::clock::now(), self.p.rate);
        let (mut due, mut resumable) = (Vec::new(), Vec::new());
        for (tid, t) in &mut self.threads {
            let TracedThread {
                polled, timer, running, ..
            } = t;
            let (Some(polled), Some(running)) = (polled, running) else {
                continue;
            };
            if t.stop_requested.is_some() || !timer.as_ref().is_some_and(ThreadTimer::is_due) {
                continue;
            }
            match RunState::read(running) {
                ThreadRuns::Running => due.push(*tid),
                ThreadRuns::Asleep(at) => {
                    let Some((call, args)) = at.call else { continue };
                    if is_changed_by_stop(*tid, (call, &args)) {
                        polled.avoided_until = now + AVOIDANCE_TIME;
                        continue;
                    }
                    polled.allowance.refill(now, rate);
                    if polled.slot == ThreadSlot::Free
                        && !polled.may_be_stopped(now)
                        && polled.allowance.stops >= MIN_BURST
                        && arch::resumes_unnoticed(call, &args)
                    {
                        resumable.push(*tid);
                    }
                }
                ThreadRuns::Unknown => {}
            }
        }
        for tid in due {
            self.due(tid);
        }
        for tid in resumable {
            let _ = ptrace::interrupt(tid); // it has exited
        }
        self.set_alarm();
    }

    /// Counts a thread whose CPU time is polled from now on.
    pub(super) fn count_polled(&self, signal: TickSignal) {
        let reason = PollReason::of(self.p.kind, signal);
        *lock(&self.p.shared.stats).polled.entry(reason).or_default() += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stops_at_calls_are_limited_to_the_rate() {
        let (second, rate) = (1_000_000_000, 100);
        let mut allowance = Allowance {
            stops: MAX_BURST,
            counted: 0,
        };
        // A call each 10 us.
        let taken = |from: u64, allowance: &mut Allowance| {
            let times = (from..from + second).step_by(10_000);
            times.filter(|now| allowance.take(*now, rate)).count() as u64
        };
        let first = taken(0, &mut allowance);
        assert!((MAX_BURST + rate - 1..=MAX_BURST + rate).contains(&first), "{first}");
        assert_eq!(taken(second, &mut allowance), rate);
        // What is not used is not kept.
        assert_eq!(taken(100 * second, &mut allowance), MAX_BURST + rate - 1);
    }

    #[test]
    fn a_thread_in_calls_that_a_stop_changes_is_left_alone() {
        let mut polled = PolledThread::new();
        for (slot, until, expected) in [
            (ThreadSlot::Unknown, 0, true),
            (ThreadSlot::Free, 0, true),
            (ThreadSlot::Free, 8, false),
            (ThreadSlot::Unknown, 8, false),
            (ThreadSlot::User, 8, true),
            (ThreadSlot::Call, 0, false),
        ] {
            (polled.slot, polled.avoided_until) = (slot, until);
            assert_eq!(polled.may_be_stopped(7), expected, "{slot:?} {until}");
        }
    }
}
