//! The thread that traces: lets stopped threads go on, and takes a sample of those whose time has come.

use std::collections::VecDeque;
use std::io;
use std::num::NonZero;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::{Builder, JoinHandle, available_parallelism};
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::hold::{Holder, begin_again};
use super::timer::{self, RunState, Tick, Timer, Told};
use super::{Command, Note, Shared, lock};
use crate::capture::random::Random;
use crate::capture::ticks::period;
use crate::capture::tidings::Tiding;
use crate::capture::{Walk, push};
use crate::process::sys;
use crate::process::trace::{self, Epoll, News, Ready, Stopped, Why};
use crate::sample::{Event, Pid, Tid};

mod lookout;
mod members;
mod tidings;

use lookout::Forecast;

/// Events that wait for the session before samples are dropped.
const MAX_QUEUE: usize = 1 << 14;
/// How long the end waits for threads that were asked to stop.
const LAST_WAIT: u64 = 100_000_000;
/// Time between two looks at the signals that a process handles, ns.
const SIGNAL_LASTS: u64 = 1_000_000_000;
/// A thread that has ticked so often without a stop blocks the signal: it should have stopped at the first.
const NOT_COMING: u64 = 2;
/// Longest wait, should a signal that tells of stops go astray.
const TURN: Duration = Duration::from_millis(100);
const SHORT_TURN: Duration = Duration::from_millis(2);
/// Timers started or stopped in one go: of many threads the first ones have ticked, and stand still, before the last
/// one is done.
const AT_ONCE: usize = 8;

const NEWS: u64 = u64::MAX;
const COMMANDS: u64 = u64::MAX - 1;
const ALARM: u64 = u64::MAX - 2;
const LOOKOUT: u64 = u64::MAX - 3;

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
    /// One that ticks no longer, whose signal may still be on its way.
    quiet: Option<Timer>,
    running: Option<RunState>,
    /// When it was asked to stop for a sample, and has not yet.
    asked: Option<u64>,
    /// Ticks that should stop it and have not yet.
    coming: u64,
    forecast: Forecast,
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
    /// The signal that stops its threads at their ticks; found out at this time.
    signal: Option<i32>,
    signal_found: u64,
    /// Told by timers, in order of time.
    tidings: VecDeque<Tiding>,
}

struct Tracer {
    p: Parts,
    epoll: Epoll,
    alarm: OwnedFd,
    /// Goes off before a stop; the one it was set for last.
    lookout: OwnedFd,
    looks_out_for: u64,
    /// CPUs that we may use.
    cpus: usize,
    threads: FxHashMap<Tid, Traced>,
    members: FxHashMap<Pid, Member>,
    /// The command we started: its end is for others to see.
    own_child: Option<Pid>,
    started: bool,
    /// Threads asked to stop.
    asked: Vec<Tid>,
    holder: Holder,
    random: Random,
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
    let lookout = trace::alarm()?;
    epoll.add(lookout.as_fd(), LOOKOUT)?;
    Builder::new().name("tracer".into()).spawn(move || {
        // So that nobody is held for longer than it takes. Where that is not permitted, it is as it is.
        sys::hurry();
        let tracer = Tracer {
            holder: Holder::new(parts.walk, Arc::default()),
            p: parts,
            epoll,
            alarm,
            lookout,
            looks_out_for: 0,
            cpus: available_parallelism().map_or(1, NonZero::get),
            threads: FxHashMap::default(),
            members: FxHashMap::default(),
            own_child: None,
            started: false,
            asked: Vec::new(),
            random: Random::new(sys::now()),
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
            self.look_out();
            let wait = if self.asked.is_empty() { TURN } else { SHORT_TURN };
            self.epoll.wait(wait, &mut ready);
            let mut news = ready.is_empty();
            for r in &ready {
                match r.token {
                    NEWS => {
                        // Somebody stands still. What is told before the signal is taken is told again after it.
                        self.news();
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
                    LOOKOUT => trace::empty(self.lookout.as_fd()),
                    tid => self.tick(tid as Tid, r.over),
                }
            }
            if news {
                self.news();
            }
        }
    }

    fn period(&self) -> u64 {
        period(self.p.rate)
    }

    fn start(&mut self) {
        self.started = true;
        for some in self.tids().chunks(AT_ONCE) {
            for tid in some {
                if let Some(timer) = self.threads.get_mut(tid).and_then(|t| t.timer.as_mut()) {
                    timer.start();
                }
            }
            self.news();
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
        let now = sys::now();
        for some in self.tids().chunks(AT_ONCE) {
            self.news();
            for tid in some {
                self.stop_timer(*tid, now);
            }
        }
        now
    }

    fn stop_timer(&mut self, tid: Tid, now: u64) {
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let Some(mut timer) = t.timer.take() else { return };
        timer.stop();
        let mut told = Told::default();
        timer.told(&mut told);
        lock(&self.p.shared.tally).cpu_time += timer.count();
        // Its last tick is on its way to a stop.
        if t.coming + told.stops > 0 && t.asked.is_none() {
            t.asked = Some(now);
            self.asked.push(tid);
        }
        t.quiet = Some(timer);
    }

    fn tids(&self) -> Vec<Tid> {
        self.threads.keys().copied().collect()
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
                    for tid in self.tids() {
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

    fn handle(&mut self, mut stop: Stopped) {
        let tid = stop.tid;
        if let Why::Signal(_) = stop.why
            && let Some(t) = self.threads.get(&tid)
            && let Some(descriptor) = stop.ready_descriptor()
            && [&t.timer, &t.quiet].into_iter().flatten().any(|t| t.sends(descriptor))
        {
            stop.swallow();
        }
        let asked = self.threads.get(&tid).and_then(|t| t.asked);
        match (stop.why, asked) {
            (Why::Exec, _) => self.executed(tid),
            // While the process stands still by job control, so does its sample.
            (Why::Group, _) => self.forget_asked(tid),
            // Any stop takes the place of the one that was asked for (kernel/signal.c, ptrace_stop): no other will come.
            (_, Some(since)) => {
                self.forget_asked(tid);
                self.sample(stop, Some(since));
            }
            (Why::Tick, None) if self.threads.get(&tid).is_some_and(|t| t.timer.is_some()) => self.sample(stop, None),
            (Why::Made, None) => {}
            (Why::Trap, None) if !self.threads.contains_key(&tid) => self.newborn(stop),
            (Why::Signal(_) | Why::Trap | Why::Tick, None) => drop(begin_again(&stop)),
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
        let mut told = Told::default();
        let Some(t) = self.threads.get_mut(&tid) else { return };
        if let Some(timer) = &mut t.timer {
            timer.told(&mut told);
        }
        let pid = t.pid;
        self.ticked(tid, told.stops, told.ticks);
        self.told(pid, told);
        if over && let Some(t) = self.threads.get_mut(&tid) {
            count_time(&self.p.shared, t);
            (t.timer, t.quiet) = (None, None);
        }
    }

    /// Takes note of a thread's ticks: of all that were told, one can still become a sample.
    fn ticked(&mut self, tid: Tid, stops: u64, ticks: u64) {
        let Some(t) = self.threads.get_mut(&tid) else { return };
        t.coming += stops;
        if t.coming >= NOT_COMING {
            lock(&self.p.shared.tally).lost += std::mem::take(&mut t.coming);
            self.time_anew(tid, None);
        }
        if ticks > 0 {
            lock(&self.p.shared.tally).lost += ticks - 1;
            self.due(tid);
        }
    }

    /// A sample of this thread is due.
    fn due(&mut self, tid: Tid) {
        let Some(t) = self.threads.get_mut(&tid) else { return };
        if t.asked.is_some() {
            lock(&self.p.shared.tally).lost += 1;
            return;
        }
        // One that has gone to sleep since is left alone: stopping it would end its system call.
        let running = t.running.as_ref().is_some_and(RunState::is_running);
        let now = sys::now();
        if running && trace::interrupt(tid).is_ok() {
            t.asked = Some(now);
            self.asked.push(tid);
        } else {
            let past = t.timer.as_mut().map_or(0, |t| {
                t.answered(Tick::Told);
                t.next(Tick::Told)
            });
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
            let wait = period / 2 + self.random.below(period);
            trace::set_alarm(self.alarm.as_fd(), Duration::from_nanos(wait));
        }
    }

    /// Takes a thread's sample and lets it go on. `asked`: when it was asked to stop, if it was; else it is a tick.
    fn sample(&mut self, stop: Stopped, asked: Option<u64>) {
        let tid = stop.tid;
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let pid = t.pid;
        let space = lock(&self.p.shared.spaces).get(&pid).cloned();
        let tick = if stop.why == Why::Tick { Tick::Stop } else { Tick::Told };
        let taken = self
            .holder
            .take(stop, pid, space.as_deref(), &t.blocks, &mut t.timer, tick);
        let Ok((mut sample, past)) = taken else {
            return; // killed while it stood
        };
        let let_go = sys::now();
        let mut told = Told::default();
        let ticks = t.timer.is_some();
        if let Some(timer) = &mut t.timer {
            timer.told(&mut told);
            timer.answered(tick);
            timer.let_go(let_go);
        }
        let mut since = asked.unwrap_or(sample.time);
        let mut past = past;
        if tick == Tick::Stop {
            if told.stops > 0 {
                since = told.stop_time;
            }
            let all = std::mem::take(&mut t.coming) + std::mem::take(&mut told.stops);
            // One stop for both kinds of ticks gives one sample.
            past += all.saturating_sub(1) + u64::from(asked.is_some() && ticks);
        }
        if tick == Tick::Stop
            && let Some(distance) = t.timer.as_ref().and_then(Timer::distance)
        {
            t.forecast.stopped(since, let_go + distance);
        }
        let held = let_go.saturating_sub(since);
        let time = sample.time;
        let (mut codes, mut missed) = (Vec::new(), false);
        if space.is_some() {
            self.holder.finish(&mut sample, &mut t.blocks);
            missed = self.holder.missed_code();
            codes = self.holder.codes();
        }
        self.ticked(tid, told.stops, told.ticks);
        self.told(pid, told);
        self.tell_mappings(pid, time);
        self.find_signal(pid, time);
        let mut tally = lock(&self.p.shared.tally);
        tally.hold(held);
        tally.lost += past;
        let mut queue = lock(&self.p.shared.queue);
        if queue.len() < MAX_QUEUE {
            tally.delivered += 1;
            let mut events = Vec::with_capacity(1 + codes.len());
            push(sample, codes, &mut events);
            queue.extend(events.into_iter().map(Note::Event));
        } else {
            tally.lost += 1;
        }
        // A code object that was not copied may not live until the session looks by itself.
        if missed || queue.len() > MAX_QUEUE / 4 {
            self.p.shared.ready.notify_one();
        }
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
