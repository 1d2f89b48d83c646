//! The thread that traces: lets stopped threads go on, and takes a sample of those whose time has come.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use rustc_hash::{FxHashMap, FxHashSet};

use super::hold::{Holder, begin_again};
use super::timer::{self, RunState, Timer, Told};
use super::{Command, Note, Shared, lock};
use crate::capture::Walk;
use crate::capture::tidings::Tiding;
use crate::process::sys;
use crate::process::trace::{self, Epoll, News, Ready, Stopped, Why};
use crate::sample::{Event, Pid, Tid};

mod members;

/// Events that wait for the session before samples are dropped.
const MAX_QUEUE: usize = 1 << 14;
/// Where nothing tells of mappings: longest time between two looks, ns of the samples' clock.
const LOOK_AGAIN: u64 = 20_000_000;
/// How long the end waits for threads that were asked to stop.
const LAST_WAIT: u64 = 100_000_000;
/// Longest wait, should a signal that tells of stops go astray.
const TURN: Duration = Duration::from_millis(100);
const SHORT_TURN: Duration = Duration::from_millis(2);

const NEWS: u64 = u64::MAX;
const COMMANDS: u64 = u64::MAX - 1;
const ALARM: u64 = u64::MAX - 2;

pub struct Parts {
    pub shared: Arc<Shared>,
    pub told: Receiver<Command>,
    pub waker: OwnedFd,
    pub children: OwnedFd,
    pub kind: timer::Kind,
    /// Samples per second of CPU time.
    pub rate: u64,
    /// Take forked children too.
    pub follow: bool,
    pub walk: Walk,
}

/// A thread of the target.
struct Traced {
    pid: Pid,
    /// `None` once it can tick no more.
    timer: Option<Timer>,
    running: Option<RunState>,
    /// When it was asked to stop for a sample, and has not yet.
    asked: Option<u64>,
    /// Blocks that the last walk read.
    blocks: Vec<u64>,
}

/// A process of the target.
#[derive(Default)]
struct Member {
    /// It becomes the command when it executes; until then it is a copy of us.
    at_exec: bool,
    /// Time of the last look at its mappings.
    looked: u64,
    /// Told by timers, in order of time.
    tidings: VecDeque<Tiding>,
}

struct Tracer {
    p: Parts,
    epoll: Epoll,
    alarm: OwnedFd,
    threads: FxHashMap<Tid, Traced>,
    members: FxHashMap<Pid, Member>,
    /// The command we started: its end is for others to see.
    own_child: Option<Pid>,
    started: bool,
    /// Threads asked to stop.
    asked: Vec<Tid>,
    holder: Holder,
    /// Code objects of samples, by fingerprint.
    seen: FxHashSet<(u64, u32)>,
}

/// Starts the thread.
///
/// # Errors
/// No thread or descriptor is left.
pub fn start(parts: Parts) -> io::Result<JoinHandle<()>> {
    let epoll = Epoll::new()?;
    let alarm = trace::alarm()?;
    epoll.add(parts.children.as_fd(), NEWS)?;
    epoll.add(parts.waker.as_fd(), COMMANDS)?;
    epoll.add(alarm.as_fd(), ALARM)?;
    Builder::new().name("tracer".into()).spawn(move || {
        // So that nobody is held for longer than it takes. Where that is not permitted, it is as it is.
        sys::hurry();
        let tracer = Tracer {
            holder: Holder::new(parts.walk),
            p: parts,
            epoll,
            alarm,
            threads: FxHashMap::default(),
            members: FxHashMap::default(),
            own_child: None,
            started: false,
            asked: Vec::new(),
            seen: FxHashSet::default(),
        };
        // At its end the kernel lets go of all threads, without stopping them.
        tracer.run();
    })
}

impl Tracer {
    fn run(mut self) {
        let mut ready: Vec<Ready> = Vec::new();
        let mut stopping = None;
        while stopping.is_none_or(|since| !self.asked.is_empty() && sys::now() - since < LAST_WAIT) {
            let wait = if self.asked.is_empty() { TURN } else { SHORT_TURN };
            self.epoll.wait(wait, &mut ready);
            let mut news = ready.is_empty();
            for r in &ready {
                match r.token {
                    NEWS => {
                        trace::empty(self.p.children.as_fd());
                        news = true;
                    }
                    COMMANDS => {
                        trace::empty(self.p.waker.as_fd());
                        while let Ok(command) = self.p.told.try_recv() {
                            match command {
                                Command::Attach(pid, at_exec, reply) => drop(reply.send(self.attach(pid, at_exec))),
                                Command::Start => self.start(),
                                Command::Stop => stopping = Some(self.stop()),
                            }
                        }
                    }
                    ALARM => {
                        trace::empty(self.alarm.as_fd());
                        self.look();
                    }
                    tid => self.tick(tid as Tid, r.over),
                }
            }
            if news {
                self.news();
            }
        }
    }

    fn period(&self) -> u64 {
        1_000_000_000 / self.p.rate.max(1)
    }

    fn start(&mut self) {
        self.started = true;
        for timer in self.threads.values_mut().filter_map(|t| t.timer.as_mut()) {
            timer.start();
        }
        // What was mapped since the session looked has been told by nobody.
        let pids: Vec<Pid> = self.members.keys().copied().collect();
        for pid in pids {
            self.push(Note::Remapped(pid));
        }
        self.set_alarm();
    }

    /// Ends sampling; returns when.
    fn stop(&mut self) -> u64 {
        self.started = false;
        for t in self.threads.values_mut() {
            if let Some(timer) = &mut t.timer {
                timer.stop();
            }
            count_time(&self.p.shared, t);
            t.timer = None;
        }
        sys::now()
    }

    /// Lets all go on that have stopped, and takes note of those that have ended.
    fn news(&mut self) {
        // First those that are held for us.
        for tid in self.asked.clone() {
            self.hear(trace::next(Some(tid)));
        }
        // More news than this in one go cannot be: something is off, and it must not keep us here.
        for _ in 0..2 * self.threads.len() + 64 {
            match trace::next(None) {
                // Stays there for those who wait for it, before all others.
                Some(News::Ended(tid)) if self.own_child == Some(tid) => {
                    for tid in self.threads.keys().copied().collect::<Vec<_>>() {
                        self.hear(trace::next(Some(tid)));
                    }
                    return;
                }
                None => return,
                news => self.hear(news),
            }
        }
    }

    fn hear(&mut self, news: Option<News>) {
        match news {
            None => {}
            Some(News::Stopped(stop)) => self.handle(stop),
            Some(News::Ended(tid)) => self.end(tid),
        }
    }

    fn handle(&mut self, stop: Stopped) {
        let tid = stop.tid;
        let asked = self.threads.get(&tid).and_then(|t| t.asked);
        match (stop.why, asked) {
            (Why::Exec, _) => self.executed(tid),
            // While the process stands still by job control, so does its sample.
            (Why::Group, _) => self.forget_asked(tid),
            // Any stop takes the place of the one that was asked for (kernel/signal.c, ptrace_stop): no other will come.
            (_, Some(since)) => {
                self.forget_asked(tid);
                self.sample(stop, since);
            }
            (Why::Made, None) => {}
            (Why::Trap, None) if !self.threads.contains_key(&tid) => self.newborn(stop),
            (Why::Signal(_) | Why::Trap, None) => drop(begin_again(&stop)),
        }
    }

    fn forget_asked(&mut self, tid: Tid) {
        if let Some(t) = self.threads.get_mut(&tid) {
            t.asked = None;
        }
        self.asked.retain(|asked| *asked != tid);
    }

    /// A timer has ticked, or can tick no more.
    fn tick(&mut self, tid: Tid, over: bool) {
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let Some(timer) = &mut t.timer else { return };
        let mut told = Told::default();
        timer.told(&mut told);
        let (pid, ticks) = (t.pid, told.ticks);
        self.told(pid, told);
        if ticks > 0 {
            self.due(tid);
        }
        if over && let Some(t) = self.threads.get_mut(&tid) {
            count_time(&self.p.shared, t);
            t.timer = None;
        }
    }

    /// Keeps what a timer told beside ticks, in order of time.
    fn told(&mut self, pid: Pid, told: Told) {
        if told.lost {
            self.push(Note::Remapped(pid));
        }
        let Some(m) = self.members.get_mut(&pid) else { return };
        // Threads and programs are told by ptrace.
        let wanted = |t: &Tiding| matches!(t.event, Event::Mmap { .. } | Event::Comm { .. });
        let before = m.tidings.len();
        m.tidings.extend(told.tidings.into_iter().filter(wanted));
        if m.tidings.len() > before {
            m.tidings.make_contiguous().sort_by_key(|t| t.time);
        }
    }

    /// A sample of this thread is due.
    fn due(&mut self, tid: Tid) {
        let Some(t) = self.threads.get_mut(&tid) else { return };
        if t.asked.is_some() {
            return;
        }
        // One that has gone to sleep since is left alone: stopping it would end its system call.
        let running = t.running.as_ref().is_some_and(RunState::is_running);
        let now = sys::now();
        if running && trace::interrupt(tid).is_ok() {
            t.asked = Some(now);
            self.asked.push(tid);
        } else {
            let past = t.timer.as_mut().map_or(0, Timer::next);
            lock(&self.p.shared.tally).lost += 1 + past;
        }
    }

    /// Samples the threads whose CPU time has come, where no perf event tells of it.
    fn look(&mut self) {
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
    fn set_alarm(&mut self) {
        let looks = |t: &Traced| t.timer.as_ref().is_some_and(|t| t.event().is_none());
        if self.started && (self.p.kind == timer::Kind::Look || self.threads.values().any(looks)) {
            let period = self.period();
            // The low bits of a ns clock are as good as chance here.
            let wait = period / 2 + sys::now().wrapping_mul(0x9e37_79b9_7f4a_7c15) % period.max(1);
            trace::set_alarm(self.alarm.as_fd(), Duration::from_nanos(wait));
        }
    }

    /// Takes a thread's sample and lets it go on.
    fn sample(&mut self, stop: Stopped, asked: u64) {
        let tid = stop.tid;
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let pid = t.pid;
        let space = lock(&self.p.shared.spaces).get(&pid).cloned();
        let Ok((mut sample, past)) = self.holder.take(stop, pid, space.as_deref(), &t.blocks, &mut t.timer) else {
            return; // killed while it stood
        };
        let held = sys::now() - asked;
        let time = sample.time;
        let mut fresh = false;
        if space.is_some() {
            self.holder.finish(&mut sample, &mut t.blocks);
            for f in &sample.python {
                fresh |= self.seen.insert((f.code, f.fingerprint));
            }
        }
        self.tell_mappings(pid, time);
        let mut tally = lock(&self.p.shared.tally);
        tally.hold(held);
        tally.lost += past;
        let mut queue = lock(&self.p.shared.queue);
        if queue.len() < MAX_QUEUE {
            tally.delivered += 1;
            queue.push_back(Note::Event(Event::Sample(Box::new(sample))));
        } else {
            tally.lost += 1;
        }
        // A new code object may not live until the session looks by itself.
        if fresh || queue.len() > MAX_QUEUE / 4 {
            self.p.shared.ready.notify_one();
        }
    }

    /// Tells what was mapped up to this time.
    fn tell_mappings(&mut self, pid: Pid, time: u64) {
        let mut silent = false;
        let mut told = Told::default();
        for t in self.threads.values_mut().filter(|t| t.pid == pid) {
            match &mut t.timer {
                Some(timer) if timer.event().is_some() => timer.told(&mut told),
                _ => silent = true,
            }
        }
        let ticks = std::mem::take(&mut told.ticks);
        self.told(pid, told);
        debug_assert!(ticks < 1 << 20, "ticks that were overtaken by their samples");
        let Some(m) = self.members.get_mut(&pid) else { return };
        let mut notes = Vec::new();
        if silent && time.saturating_sub(m.looked) > LOOK_AGAIN {
            m.looked = time;
            notes.push(Note::Remapped(pid));
        }
        while m.tidings.front().is_some_and(|t| t.time <= time) {
            notes.extend(m.tidings.pop_front().map(|t| Note::Event(t.event)));
        }
        notes.into_iter().for_each(|note| self.push(note));
    }

    fn push(&self, note: Note) {
        // What is mapped now will be looked at soon: it may be an interpreter.
        let urgent = matches!(note, Note::Event(Event::Mmap { .. } | Event::Exec { .. }));
        lock(&self.p.shared.queue).push_back(note);
        if urgent {
            self.p.shared.ready.notify_one();
        }
    }
}

fn count_time(shared: &Shared, t: &Traced) {
    if let Some(timer) = &t.timer {
        lock(&shared.tally).cpu_time += timer.count();
    }
}
