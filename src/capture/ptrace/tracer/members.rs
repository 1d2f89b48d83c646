//! Which processes and threads are traced: taken in when asked for or born of traced ones, forgotten when they end.

use super::lookout::Forecast;
use super::{Member, Place, SIGNAL_LASTS, Traced, Tracer, count_time};
use crate::capture::blocks::MAX_AHEAD;
use crate::capture::ptrace::run_state::RunState;
use crate::capture::ptrace::timer::Timer;
use crate::capture::ptrace::{Note, lock, status};
use crate::error::Result;
use crate::process::trace::{self, Stopped};
use crate::process::{self, sys};
use crate::sample::{Event, Pid, Tid};

impl Tracer {
    pub(super) fn attach(&mut self, pid: Pid, at_exec: bool) -> Result<()> {
        let member = self.members.entry(pid).or_default();
        member.at_exec = at_exec;
        member.signal = status::tick_signal(pid);
        member.signal_found = sys::now();
        if at_exec {
            self.own_child = Some(pid);
        }
        // Threads may be made while we look; those of traced threads are traced from birth.
        for _ in 0..1000 {
            let mut new = false;
            for tid in process::threads(pid) {
                self.news();
                if self.threads.contains_key(&tid) {
                    continue;
                }
                match trace::seize(tid, self.p.follow) {
                    Ok(()) => {}
                    Err(e) if e.raw_os_error() == Some(libc::ESRCH) => continue, // it has ended
                    // New, and its first stop comes soon.
                    Err(_) if status::tracer_of(tid) == Some(sys::own_tid() as Tid) => continue,
                    Err(e) => {
                        self.members.remove(&pid);
                        return Err(status::refused(pid, &e));
                    }
                }
                let signal = status::tick_signal(tid);
                self.add(pid, tid, (!at_exec).then_some(signal));
                new = true;
            }
            if !new {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Notes a traced thread. With `timed` it may be sampled, and this signal stops it at its ticks.
    fn add(&mut self, pid: Pid, tid: Tid, timed: Option<Option<i32>>) {
        let traced = Traced {
            pid,
            timer: None,
            quiet: None,
            running: RunState::new(pid, tid),
            pointer: None,
            owed: 0,
            place: None,
            asked: None,
            coming: 0,
            forecast: Forecast::default(),
            blocks: Vec::with_capacity(MAX_AHEAD),
        };
        self.threads.insert(tid, traced);
        if let Some(signal) = timed {
            self.give_timer(tid, signal);
        }
    }

    fn give_timer(&mut self, tid: Tid, signal: Option<i32>) {
        let (kind, period) = (self.p.kind, self.period());
        let Some(t) = self.threads.get_mut(&tid) else { return };
        t.timer = Timer::new(kind, t.pid, tid, period, signal);
        t.place = None;
        if let Some(timer) = &mut t.timer {
            if timer.event().is_none() {
                t.place = Some(Place::Unknown);
            }
            // Without a place in the set it would never be heard of.
            let heard = timer.event().is_none_or(|e| self.epoll.add(e, tid.into()).is_ok());
            if self.started && heard {
                timer.start();
            }
        }
    }

    /// Replaces a thread's timer.
    pub(super) fn time_anew(&mut self, tid: Tid, signal: Option<i32>) {
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let Some(mut old) = t.timer.take() else { return };
        old.stop();
        lock(&self.p.shared.tally).cpu_time += old.count();
        t.quiet = Some(old);
        self.give_timer(tid, signal);
    }

    /// Finds out now and then which signal may stop the threads of a process: it may have begun to handle the one that
    /// does.
    pub(super) fn find_signal(&mut self, pid: Pid, time: u64) {
        let Some(m) = self.members.get_mut(&pid) else { return };
        if time.saturating_sub(m.signal_found) < SIGNAL_LASTS {
            return;
        }
        let before = std::mem::replace(&mut m.signal, status::tick_signal(pid));
        m.signal_found = time;
        if before.is_some() && m.signal != before {
            let tids: Vec<Tid> = self
                .threads
                .iter()
                .filter(|(_, t)| t.pid == pid)
                .map(|(tid, _)| *tid)
                .collect();
            for tid in tids {
                self.time_anew(tid, status::tick_signal(tid));
            }
        }
    }

    /// Takes in a thread that a traced one has made, or lets go of what nobody asked for.
    pub(super) fn newborn(&mut self, mut stop: Stopped) {
        let tid = stop.tid;
        let Some((pid, parent)) = status::ids(tid) else { return }; // killed
        // What it blocks now is what the C library has a new thread block.
        let known = |m: &Member| m.signal;
        if let Some(signal) = self.members.get(&pid).map(known) {
            self.add(pid, tid, Some(signal));
            self.push(Note::Event(Event::Thread { pid, tid }));
        } else if self.p.follow && pid == tid {
            let signal = self.members.get(&parent).and_then(known);
            let member = Member {
                signal,
                signal_found: sys::now(),
                ..Member::default()
            };
            self.members.insert(pid, member);
            // It has its parent's memory. Told at once: a child may live for a few samples only.
            let mut spaces = lock(&self.p.shared.spaces);
            if let Some(space) = spaces.get(&parent).cloned() {
                spaces.insert(pid, space);
            }
            drop(spaces);
            self.push(Note::Event(Event::Fork { pid, parent }));
            self.add(pid, tid, Some(signal));
        } else {
            stop.detach();
            return;
        }
        self.follow(&mut stop);
    }

    pub(super) fn executed(&mut self, pid: Pid) {
        // All threads but this one are gone, and it may have taken over the number of the first.
        for (_, gone) in self.threads.extract_if(|_, t| t.pid == pid) {
            lock(&self.p.shared.tally).lost += gone.owed;
            count_time(&self.p.shared, &gone);
        }
        self.asked.retain(|tid| self.threads.contains_key(tid));
        let member = self.members.entry(pid).or_default();
        member.tidings.clear();
        member.signal = status::tick_signal(pid);
        member.signal_found = sys::now();
        let (begun, signal) = (std::mem::take(&mut member.at_exec), member.signal);
        let started = self.started;
        self.started |= begun;
        self.add(pid, pid, Some(signal));
        self.started = started;
        lock(&self.p.shared.spaces).remove(&pid);
        let comm = process::thread_name(pid, pid).unwrap_or_default().into_bytes();
        self.push(Note::Event(Event::Exec { pid, comm }));
    }

    pub(super) fn end(&mut self, tid: Tid) {
        // Whoever started the command waits for its end, and the kernel tells one of us only.
        if self.own_child != Some(tid) {
            trace::reap(tid);
        }
        self.forget_asked(tid);
        if let Some(t) = self.threads.remove(&tid) {
            lock(&self.p.shared.tally).lost += t.owed;
            count_time(&self.p.shared, &t);
            self.push(Note::Event(Event::Exit { pid: t.pid, tid }));
            if t.pid == tid {
                self.members.remove(&tid);
            }
        }
    }
}
