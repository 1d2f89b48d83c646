//! Which processes and threads are traced: taken in when asked for or born of traced ones, forgotten when they end.

use super::{Member, Traced, Tracer, count_time};
use crate::capture::blocks::MAX_AHEAD;
use crate::capture::ptrace::timer::{RunState, Timer};
use crate::capture::ptrace::{Note, lock, status};
use crate::error::Result;
use crate::process::trace::{self, Stopped};
use crate::process::{self, sys};
use crate::sample::{Event, Pid, Tid};

impl Tracer {
    pub(super) fn attach(&mut self, pid: Pid, at_exec: bool) -> Result<()> {
        let member = self.members.entry(pid).or_default();
        member.at_exec = at_exec;
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
                self.add(pid, tid, !at_exec);
                new = true;
            }
            if !new {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Notes a traced thread; `timed`: it may be sampled.
    fn add(&mut self, pid: Pid, tid: Tid, timed: bool) {
        let mut timer = None;
        if timed {
            timer = Timer::new(self.p.kind, pid, tid, self.period());
            if let Some(timer) = &mut timer {
                // Without a place in the set it would never be heard of.
                let heard = timer.event().is_none_or(|e| self.epoll.add(e, tid.into()).is_ok());
                if self.started && heard {
                    timer.start();
                }
            }
        }
        let traced = Traced {
            pid,
            timer,
            running: RunState::new(pid, tid),
            asked: None,
            blocks: Vec::with_capacity(MAX_AHEAD),
        };
        self.threads.insert(tid, traced);
    }

    /// Takes in a thread that a traced one has made, or lets go of what nobody asked for.
    pub(super) fn newborn(&mut self, stop: Stopped) {
        let tid = stop.tid;
        let Some((pid, parent)) = status::ids(tid) else { return }; // killed
        if self.members.contains_key(&pid) {
            self.add(pid, tid, true);
            self.push(Note::Event(Event::Thread { pid, tid }));
        } else if self.p.follow && pid == tid {
            self.members.insert(pid, Member::default());
            // It has its parent's memory. Told at once: a child may live for a few samples only.
            let mut spaces = lock(&self.p.shared.spaces);
            if let Some(space) = spaces.get(&parent).cloned() {
                spaces.insert(pid, space);
            }
            drop(spaces);
            self.push(Note::Event(Event::Fork { pid, parent }));
            self.add(pid, tid, true);
        } else {
            stop.detach();
        }
    }

    pub(super) fn executed(&mut self, pid: Pid) {
        // All threads but this one are gone, and it may have taken over the number of the first.
        for (_, gone) in self.threads.extract_if(|_, t| t.pid == pid) {
            count_time(&self.p.shared, &gone);
        }
        self.asked.retain(|tid| self.threads.contains_key(tid));
        let member = self.members.entry(pid).or_default();
        member.tidings.clear();
        let begun = std::mem::take(&mut member.at_exec);
        let started = self.started;
        self.started |= begun;
        self.add(pid, pid, true);
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
            count_time(&self.p.shared, &t);
            self.push(Note::Event(Event::Exit { pid: t.pid, tid }));
            if t.pid == tid {
                self.members.remove(&tid);
            }
        }
    }
}
