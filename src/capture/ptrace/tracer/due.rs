//! Samples that fall due while a thread is in the kernel, or where no tick stops it: how it is kept from being interrupted
//! in the middle of a system call.

use std::os::fd::AsFd;
use std::time::Duration;

use super::{MAX_OWED, NOT_COMING, Place, Traced, Tracer, lock};
use crate::arch::PerfRegs;
use crate::capture::ptrace::run_state::RunState;
use crate::capture::ptrace::timer::{self, Tick, Timer};
use crate::process::sys;
use crate::process::task::Still;
use crate::process::trace::{self, Side, Stopped, Why};
use crate::sample::Tid;

impl Tracer {
    /// Takes note of a thread's ticks. `regs`: of user space at the last of `ticks`, those in the kernel.
    pub(super) fn ticked(&mut self, tid: Tid, stops: u64, ticks: u64, regs: Option<PerfRegs>) {
        let Some(t) = self.threads.get_mut(&tid) else { return };
        t.coming += stops;
        if t.coming >= NOT_COMING {
            lock(&self.p.shared.tally).lost += std::mem::take(&mut t.coming);
            self.time_anew(tid, None);
        }
        if ticks > 0 {
            self.due_in_kernel(tid, ticks, regs);
        }
    }

    /// Samples of this thread fell due in the kernel, where it must not be interrupted: that would cut short what its
    /// system call does.
    pub(super) fn due_in_kernel(&mut self, tid: Tid, ticks: u64, regs: Option<PerfRegs>) {
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let asleep = t.running.as_ref().and_then(RunState::asleep);
        let (owed, soon) = match (asleep, &regs) {
            (Some((arguments, sp, ip)), Some(regs))
                if (arguments, sp, ip) == (regs.arguments(), regs.regs().sp(), regs.regs().ip) =>
            {
                if self.sample_asleep(tid, regs, ticks) {
                    return;
                }
                (ticks, true)
            }
            // In another call than at the tick: that one is over.
            (Some(_), _) => (0, false),
            (None, _) => (ticks, true),
        };
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let owed = owed.min(MAX_OWED.saturating_sub(t.owed));
        let stops = soon && t.timer.as_mut().is_some_and(|timer| timer.stop_soon(regs.as_ref()));
        let taken = if stops { owed } else { 0 };
        t.owed += taken;
        let mut past = ticks - taken;
        if let Some(timer) = &mut t.timer {
            timer.answered(Tick::Told);
            past += timer.next(Tick::Told);
        }
        lock(&self.p.shared.tally).lost += past;
    }

    /// Takes samples of a thread that sleeps in the call in which they fell due, without stopping it. False if it moves.
    pub(super) fn sample_asleep(&mut self, tid: Tid, regs: &PerfRegs, count: u64) -> bool {
        let Some(t) = self.threads.get_mut(&tid) else {
            return false;
        };
        let (pid, Some(pointer)) = (t.pid, t.pointer) else {
            return false;
        };
        let before = Still::read(pid, tid).filter(|before| !before.runs());
        // It may have woken, and sleep again, since its registers were compared.
        let at = |t: &Traced| t.running.as_ref().and_then(RunState::asleep);
        let same = at(t).is_some_and(|(_, sp, ip)| (sp, ip) == (regs.regs().sp(), regs.regs().ip));
        if before.is_none() || !same {
            return false;
        }
        let space = lock(&self.p.shared.spaces).get(&pid).cloned();
        let mut sample = self.holder.asleep(pid, tid, regs, pointer, space.as_deref());
        if Still::read(pid, tid) != before {
            return false;
        }
        let Some(t) = self.threads.get_mut(&tid) else {
            return false;
        };
        if let Some(timer) = &mut t.timer {
            timer.answered(Tick::Told);
            timer.next(Tick::Told);
        }
        let (mut codes, mut missed) = (Vec::new(), false);
        if space.is_some() {
            self.holder.finish(&mut sample, &mut t.blocks);
            missed = self.holder.missed_code();
            codes = self.holder.codes();
        }
        let time = sample.time;
        self.tell_mappings(pid, time);
        self.deliver(sample, count, codes, missed);
        true
    }

    /// A sample of this thread is due, whose system calls are followed.
    pub(super) fn due(&mut self, tid: Tid) {
        // If it has stopped meanwhile it is elsewhere now.
        self.hear(trace::next(Some(tid)));
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let (mut owed, mut asked) = (0, false);
        match t.place {
            Some(Place::Call) if t.owed < MAX_OWED => {
                t.owed += 1;
                owed = 1;
            }
            // Where it is not known, this is the one time that it may be in a call.
            Some(Place::User | Place::Unknown) => asked = trace::interrupt(tid).is_ok(),
            _ => {}
        }
        if asked {
            t.asked = Some(sys::now());
            self.asked.push(tid);
            return;
        }
        let past = t.timer.as_mut().map_or(0, |t| t.next(Tick::Told));
        lock(&self.p.shared.tally).lost += 1 - owed + past;
    }

    /// Samples the threads whose CPU time has come, where no perf event tells of it.
    pub(super) fn look(&mut self) {
        let due: Vec<Tid> = self
            .threads
            .iter()
            .filter(|(_, t)| {
                let running = || t.running.as_ref().is_some_and(RunState::is_running);
                t.asked.is_none() && t.timer.as_ref().is_some_and(Timer::looks_due) && running()
            })
            .map(|(tid, _)| *tid)
            .collect();
        for tid in due {
            self.due(tid);
        }
        self.set_alarm();
    }

    /// Sets the next look at CPU times, at random around a period from now.
    pub(super) fn set_alarm(&mut self) {
        let looks = |t: &Traced| t.timer.as_ref().is_some_and(|t| t.event().is_none());
        if self.started && (self.p.kind == timer::Kind::Look || self.threads.values().any(looks)) {
            let period = self.period();
            let wait = period / 2 + self.random.below(period);
            trace::set_alarm(self.alarm.as_fd(), Duration::from_nanos(wait));
        }
    }

    /// Notes where a thread is whose system calls are followed, and has it stop at the next one too.
    pub(super) fn follow(&mut self, stop: &mut Stopped) -> Option<Side> {
        let place = self.threads.get_mut(&stop.tid)?.place.as_mut()?;
        stop.calls = true;
        let side = (stop.why == Why::Call).then(|| stop.side()).flatten();
        *place = match (stop.why, side) {
            (Why::Made | Why::Exec, _) | (_, Some(Side::Entry)) => Place::Call,
            (Why::Call, None) => Place::Unknown, // killed
            _ => Place::User,
        };
        side
    }

    /// A thread at the entry of a system call makes it a little later.
    pub(super) fn call_later(&self, stop: &Stopped) {
        if let Ok(mut regs) = stop.registers() {
            regs.call_later();
            let _ = stop.set_registers(&regs); // killed
        }
    }

    /// It need not stop for a sample any more.
    pub(super) fn owes_nothing(&mut self, tid: Tid) {
        if let Some(t) = self.threads.get_mut(&tid) {
            t.owed = 0;
            for timer in [&t.timer, &t.quiet].into_iter().flatten() {
                timer.stop_no_more();
            }
        }
    }
}
