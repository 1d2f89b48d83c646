//! Samples that fall due while a thread is in the kernel, or where no tick stops it: how its system calls are kept from
//! being interrupted.

use std::os::fd::AsFd;
use std::time::Duration;

use super::{MAX_OWED, MISSED_STOPS, ThreadSlot, TracedThread, Tracer, lock};
use crate::arch::PerfRegs;
use crate::capture::ptrace::run_state::RunState;
use crate::capture::ptrace::timer::{self, Tick};
use crate::event::Tid;
use crate::sys;
use crate::sys::procfs::{NoSignal, RunSnapshot};
use crate::sys::ptrace;
use crate::sys::ptrace::Stopped;

impl Tracer {
    /// Records a thread's ticks. `regs`: user registers at the last of `ticks`, those in the kernel.
    pub(super) fn ticked(&mut self, tid: Tid, stops: u64, ticks: u64, regs: Option<PerfRegs>) {
        let Some(t) = self.threads.get_mut(&tid) else { return };
        t.expected_stops += stops;
        if t.expected_stops >= MISSED_STOPS {
            lock(&self.p.shared.stats).lost += std::mem::take(&mut t.expected_stops);
            self.replace_timer(tid, Err(NoSignal::Taken));
        }
        if ticks > 0 {
            self.due_in_kernel(tid, ticks, regs);
        }
    }

    /// Samples of this thread fell due in the kernel, where it must not be interrupted: that would cut its system call
    /// short.
    pub(super) fn due_in_kernel(&mut self, tid: Tid, ticks: u64, regs: Option<PerfRegs>) {
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let asleep = t.running.as_ref().and_then(RunState::asleep);
        let (owed, user_return) = match (asleep, &regs) {
            (Some(at), Some(regs))
                if (at.call.map(|(_, arguments)| arguments), at.sp, at.ip)
                    == (Some(regs.arguments()), regs.regs().sp(), regs.regs().ip) =>
            {
                if self.sample_sleeping(tid, regs, ticks) {
                    return;
                }
                (ticks, true)
            }
            // In another call than at the tick: that one has returned.
            (Some(_), _) => (0, false),
            (None, _) => (ticks, true),
        };
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let owed = owed.min(MAX_OWED.saturating_sub(t.owed));
        let stops = user_return
            && t.timer
                .as_mut()
                .is_some_and(|timer| timer.stop_on_user_return(regs.as_ref()));
        let taken = if stops { owed } else { 0 };
        t.owed += taken;
        let mut past = ticks - taken;
        if let Some(timer) = &mut t.timer {
            timer.handled(Tick::Notified);
            past += timer.next(Tick::Notified);
        }
        lock(&self.p.shared.stats).lost += past;
    }

    /// Takes samples of a thread that sleeps in the call in which they fell due, without stopping it. False if it runs.
    pub(super) fn sample_sleeping(&mut self, tid: Tid, regs: &PerfRegs, count: u64) -> bool {
        let Some(t) = self.threads.get_mut(&tid) else {
            return false;
        };
        let (pid, Some(thread_pointer)) = (t.pid, t.thread_pointer) else {
            return false;
        };
        let before = RunSnapshot::read(pid, tid).filter(|before| !before.runs());
        // It may have woken up, and sleep again, since its registers were compared.
        let at = |t: &TracedThread| t.running.as_ref().and_then(RunState::asleep);
        let same = at(t).is_some_and(|at| (at.sp, at.ip) == (regs.regs().sp(), regs.regs().ip));
        if before.is_none() || !same {
            return false;
        }
        let layout = lock(&self.p.shared.layouts).get(&pid).cloned();
        let mut sample = self
            .reader
            .read_sleeping(pid, tid, regs, thread_pointer, layout.as_deref());
        if RunSnapshot::read(pid, tid) != before {
            return false;
        }
        let Some(t) = self.threads.get_mut(&tid) else {
            return false;
        };
        if let Some(timer) = &mut t.timer {
            timer.handled(Tick::Notified);
            timer.next(Tick::Notified);
        }
        let (mut codes, mut missed) = (Vec::new(), false);
        if layout.is_some() {
            self.reader.finish(&mut sample, &mut t.blocks);
            missed = self.reader.missed_code();
            codes = self.reader.codes();
        }
        let time = sample.time;
        self.emit_mappings(pid, time);
        self.deliver(sample, count, codes, missed);
        true
    }

    /// A sample is due of this thread, which no tick stops.
    pub(super) fn due(&mut self, tid: Tid) {
        // If it has stopped meanwhile, its location has changed.
        self.handle_event(ptrace::next_wait_event(Some(tid)));
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let Some(polled) = &t.polled else { return };
        let (mut owed, now) = (0, sys::clock::now());
        if polled.may_be_stopped(now) {
            if ptrace::interrupt(tid).is_ok() {
                t.stop_requested = Some(now);
                self.stop_requests.push(tid);
                return;
            }
        } else if polled.slot == ThreadSlot::Call && t.owed < MAX_OWED {
            t.owed += 1;
            owed = 1;
        }
        let avoided = u64::from(matches!(polled.slot, ThreadSlot::Free | ThreadSlot::Unknown));
        let past = t.timer.as_mut().map_or(0, |t| t.next(Tick::Notified));
        let mut stats = lock(&self.p.shared.stats);
        stats.lost += 1 - owed + past;
        stats.avoided += avoided;
    }

    /// Schedules the next poll of CPU times, at random around a period from now.
    pub(super) fn set_alarm(&mut self) {
        let polls_cpu_time = |t: &TracedThread| t.timer.as_ref().is_some_and(|t| t.event().is_none());
        if self.started && (self.p.kind == timer::TimerKind::Procfs || self.threads.values().any(polls_cpu_time)) {
            let period = self.period();
            let wait = period / 2 + self.rng.below(period);
            ptrace::set_alarm(self.alarm.as_fd(), Duration::from_nanos(wait));
        }
    }

    /// Makes a thread at the entry of a system call return before the call and repeat it.
    pub(super) fn postpone_syscall(&self, stop: &Stopped) {
        if let Ok(mut regs) = stop.registers() {
            regs.postpone_syscall();
            let _ = stop.set_registers(&regs); // killed
        }
    }

    /// It need not stop for a sample any more.
    pub(super) fn clear_owed(&mut self, tid: Tid) {
        if let Some(t) = self.threads.get_mut(&tid) {
            t.owed = 0;
            for timer in [&t.timer, &t.retired].into_iter().flatten() {
                timer.cancel_stop();
            }
        }
    }
}
