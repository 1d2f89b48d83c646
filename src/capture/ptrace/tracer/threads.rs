//! Which processes and threads are traced: added on request or when traced ones create them, removed when they exit.

use super::polled::PolledThread;
use super::prewake::StopForecast;
use super::{SIGNAL_RECHECK_INTERVAL, TracedProcess, TracedThread, Tracer, count_time};
use crate::capture::common::block_cache::MAX_PREFETCH;
use crate::capture::ptrace::run_state::RunState;
use crate::capture::ptrace::timer::ThreadTimer;
use crate::capture::ptrace::{TracerEvent, lock};
use crate::error::Result;
use crate::event::{Event, Pid, Tid};
use crate::privileges::checks;
use crate::sys;
use crate::sys::procfs;
use crate::sys::procfs::{NoSignal, TickSignal};
use crate::sys::ptrace;
use crate::sys::ptrace::Stopped;

impl Tracer {
    pub(super) fn attach(&mut self, pid: Pid, at_exec: bool) -> Result<()> {
        let process = self.processes.entry(pid).or_default();
        process.at_exec = at_exec;
        process.signal = Some(procfs::tick_signal(pid));
        process.signal_found = sys::clock::now();
        if at_exec {
            self.command = Some(pid);
        }
        // Threads may be created during the scan; those of traced threads are traced from the start.
        for _ in 0..1000 {
            let mut new = false;
            for tid in procfs::threads(pid) {
                self.reap_events();
                if self.threads.contains_key(&tid) {
                    continue;
                }
                match ptrace::seize(tid, self.p.follow) {
                    Ok(()) => {}
                    Err(e) if e.raw_os_error() == Some(libc::ESRCH) => continue, // it has exited
                    // The kernel refuses what has exited and was not waited for.
                    Err(_) if matches!(procfs::stat_state(tid), None | Some('Z' | 'X')) => continue,
                    // New; its first stop is pending.
                    Err(_) if procfs::tracer_of(tid) == Some(sys::process::current_tid() as Tid) => continue,
                    Err(e) => {
                        self.processes.remove(&pid);
                        return Err(checks::trace_refused(pid, &e));
                    }
                }
                let signal = procfs::tick_signal(tid);
                self.add(pid, tid, (!at_exec).then_some(signal));
                new = true;
            }
            if !new {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Adds a traced thread. With `timed` it may be sampled, and this signal stops it at its ticks.
    fn add(&mut self, pid: Pid, tid: Tid, timed: Option<TickSignal>) {
        let traced = TracedThread {
            pid,
            timer: None,
            retired: None,
            running: RunState::new(pid, tid),
            thread_pointer: None,
            owed: 0,
            polled: None,
            stop_requested: None,
            expected_stops: 0,
            forecast: StopForecast::default(),
            blocks: Vec::with_capacity(MAX_PREFETCH),
        };
        self.threads.insert(tid, traced);
        if let Some(signal) = timed {
            self.attach_timer(tid, signal);
        }
    }

    fn attach_timer(&mut self, tid: Tid, signal: TickSignal) {
        let (kind, period) = (self.p.kind, self.period());
        let Some(t) = self.threads.get_mut(&tid) else { return };
        t.timer = ThreadTimer::new(kind, t.pid, tid, period, signal);
        t.polled = None;
        if let Some(timer) = &mut t.timer {
            if timer.event().is_none() {
                t.polled = Some(PolledThread::new());
            }
            // Without an epoll entry its ticks would never be read.
            let polled = timer.event().is_none_or(|e| self.epoll.add(e, tid.into()).is_ok());
            if self.started && polled {
                timer.start();
            }
            // It may be the first one whose CPU time is polled.
            if timer.event().is_none() {
                self.count_polled(signal);
                self.set_alarm();
            }
        }
    }

    /// Replaces a thread's timer.
    pub(super) fn replace_timer(&mut self, tid: Tid, signal: TickSignal) {
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let Some(mut old) = t.timer.take() else { return };
        old.stop();
        lock(&self.p.shared.stats).cpu_time += old.count();
        t.retired = Some(old);
        self.attach_timer(tid, signal);
    }

    /// Now and then determines again which signal may stop the threads of a process: it may have begun to handle the
    /// one in use.
    pub(super) fn find_signal(&mut self, pid: Pid, time: u64) {
        let Some(m) = self.processes.get_mut(&pid) else { return };
        if time.saturating_sub(m.signal_found) < SIGNAL_RECHECK_INTERVAL {
            return;
        }
        let before = m.signal.replace(procfs::tick_signal(pid));
        m.signal_found = time;
        if before.is_some_and(|before| before.is_ok()) && m.signal != before {
            let tids: Vec<Tid> = self
                .threads
                .iter()
                .filter(|(_, t)| t.pid == pid)
                .map(|(tid, _)| *tid)
                .collect();
            for tid in tids {
                let signal = procfs::tick_signal(tid);
                let is_polled = self.threads.get(&tid).is_some_and(|t| t.polled.is_some());
                if signal.is_ok() || !is_polled {
                    self.replace_timer(tid, signal);
                }
            }
        }
    }

    /// Adds a thread that a traced one has created, or detaches if it was not requested.
    pub(super) fn on_clone(&mut self, mut stop: Stopped) {
        let tid = stop.tid;
        let Some((pid, parent)) = procfs::ids(tid) else { return }; // killed
        // The signals it blocks now are those that the C library blocks in a new thread.
        let known = |m: &TracedProcess| m.signal.unwrap_or(Err(NoSignal::Exited));
        if let Some(signal) = self.processes.get(&pid).map(known) {
            self.add(pid, tid, Some(signal));
            self.push(TracerEvent::Event(Event::Thread { pid, tid }));
        } else if self.p.follow && pid == tid {
            let signal = self
                .processes
                .get(&parent)
                .map_or_else(|| procfs::tick_signal(tid), known);
            let process = TracedProcess {
                signal: Some(signal),
                signal_found: sys::clock::now(),
                ..TracedProcess::default()
            };
            self.processes.insert(pid, process);
            // It shares its parent's layout, entered at once: a child may live for a few samples only.
            let mut layouts = lock(&self.p.shared.layouts);
            if let Some(layout) = layouts.get(&parent).cloned() {
                layouts.insert(pid, layout);
            }
            drop(layouts);
            self.push(TracerEvent::Event(Event::Fork { pid, parent }));
            self.add(pid, tid, Some(signal));
        } else {
            stop.detach();
            return;
        }
        self.follow(&mut stop);
    }

    pub(super) fn on_exec(&mut self, pid: Pid) {
        // All other threads are gone, and this one may have taken over the ID of the first.
        for (_, exited) in self.threads.extract_if(|_, t| t.pid == pid) {
            lock(&self.p.shared.stats).lost += exited.owed;
            count_time(&self.p.shared, &exited);
        }
        self.stop_requests.retain(|tid| self.threads.contains_key(tid));
        let process = self.processes.entry(pid).or_default();
        process.records.clear();
        let signal = procfs::tick_signal(pid);
        (process.signal, process.signal_found) = (Some(signal), sys::clock::now());
        let begun = std::mem::take(&mut process.at_exec);
        let started = self.started;
        self.started |= begun;
        self.add(pid, pid, Some(signal));
        self.started = started;
        lock(&self.p.shared.layouts).remove(&pid);
        let comm = procfs::thread_name(pid, pid).unwrap_or_default().into_bytes();
        self.push(TracerEvent::Event(Event::Exec { pid, comm }));
    }

    pub(super) fn on_exit(&mut self, tid: Tid) {
        // The thread that started the command waits for its exit, and the kernel reports it to one of us only.
        if self.command != Some(tid) {
            ptrace::reap(tid);
        }
        self.forget_stop_request(tid);
        if let Some(t) = self.threads.remove(&tid) {
            lock(&self.p.shared.stats).lost += t.owed;
            count_time(&self.p.shared, &t);
            self.push(TracerEvent::Event(Event::Exit { pid: t.pid, tid }));
            if t.pid == tid {
                self.processes.remove(&tid);
            }
        }
    }
}
