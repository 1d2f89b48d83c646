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
use super::run_state::RunState;
use super::timer::{self, Tick, Timer, Told};
use super::{Command, Note, Shared, lock};
use crate::capture::random::Random;
use crate::capture::ticks::period;
use crate::capture::tidings::Tiding;
use crate::capture::{Walk, push};
use crate::process::sys;
use crate::process::trace::{self, Epoll, News, Ready, Side, Stopped, Why};
use crate::sample::{CodeCopy, Event, Pid, Sample, Tid};

mod due;
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
/// Samples that a thread may owe; more count as lost.
const MAX_OWED: u64 = 100;
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
    /// Its thread pointer, once it is known.
    pointer: Option<u64>,
    /// Samples that fell due in the kernel and are taken as soon as it is out of it, or sleeps in the same call.
    owed: u64,
    /// Where it is, if its system calls are followed.
    place: Option<Place>,
    /// When it was asked to stop for a sample, and has not yet.
    asked: Option<u64>,
    /// Ticks that should stop it and have not yet.
    coming: u64,
    forecast: Forecast,
    /// Blocks that the last walk read.
    blocks: Vec<u64>,
}

/// Where a thread is whose system calls are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// It has not stopped since they are.
    Unknown,
    User,
    Call,
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
        lock(&self.p.shared.tally).lost += self.threads.values().map(|t| t.owed).sum::<u64>();
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
        t.owed += u64::from(t.coming + told.stops > 0);
        if t.owed > 0 && t.asked.is_none() {
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
        let mut own_tick = false;
        if let Why::Signal(_) = stop.why
            && let Some(t) = self.threads.get(&tid)
            && let Some(descriptor) = stop.ready_descriptor()
            && let Some(timer) = [&t.timer, &t.quiet].into_iter().flatten().find(|t| t.sends(descriptor))
        {
            own_tick = timer.ticks(descriptor) && t.timer.as_ref().is_some_and(|t| t.sends(descriptor));
            stop.swallow();
        }
        let side = self.follow(&mut stop);
        let t = self.threads.get(&tid);
        let (asked, owed) = t.map_or((None, 0), |t| (t.asked, t.owed));
        match (stop.why, asked) {
            (Why::Exec, _) => {
                self.executed(tid);
                self.follow(&mut stop);
            }
            // While the process stands still by job control, so does its sample.
            (Why::Group, _) => self.forget_asked(tid),
            // In the middle of a call; it falls due again.
            (Why::Made, _) => self.forget_asked(tid),
            (Why::Call, None) if side != Some(Side::Exit) => {}
            // Any stop takes the place of the one that was asked for (kernel/signal.c, ptrace_stop): no other will come.
            (_, Some(since)) => {
                self.forget_asked(tid);
                if side == Some(Side::Entry) {
                    // Or one will, where the thread stopped here before it was asked: not in the middle of this call.
                    self.call_later(&stop);
                }
                self.sample(stop, Some(since), own_tick);
            }
            (Why::Trap, None) if t.is_none() => self.newborn(stop),
            (Why::Tick, None) if own_tick => self.sample(stop, None, true),
            (_, None) if owed > 0 => self.sample(stop, None, false),
            (Why::Tick, None) => self.owes_nothing(tid),
            (Why::Call, None) => {}
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
        let mut told = Told::default();
        let Some(t) = self.threads.get_mut(&tid) else { return };
        if let Some(timer) = &mut t.timer {
            timer.told(&mut told);
        }
        let pid = t.pid;
        self.ticked(tid, told.stops, told.ticks, told.regs.take());
        self.told(pid, told);
        if over && let Some(t) = self.threads.get_mut(&tid) {
            count_time(&self.p.shared, t);
            (t.timer, t.quiet) = (None, None);
        }
    }

    /// Takes a thread's sample and lets it go on. `asked`: when it was asked to stop, if it was. `own_tick`: it stopped at
    /// a tick. One stop gives all samples that are owed.
    fn sample(&mut self, stop: Stopped, asked: Option<u64>, own_tick: bool) {
        let tid = stop.tid;
        let Some(t) = self.threads.get_mut(&tid) else { return };
        let pid = t.pid;
        let space = lock(&self.p.shared.spaces).get(&pid).cloned();
        let owed = std::mem::take(&mut t.owed);
        let looks = t.timer.as_ref().is_some_and(|t| t.event().is_none());
        let tick = if own_tick {
            Some(Tick::Stop)
        } else {
            (looks && asked.is_some()).then_some(Tick::Told)
        };
        if owed > 0 {
            for timer in [&t.timer, &t.quiet].into_iter().flatten() {
                timer.stop_no_more();
            }
        }
        let taken = self
            .holder
            .take(stop, pid, space.as_deref(), &t.blocks, &mut t.timer, tick);
        let Ok((mut sample, pointer, mut past)) = taken else {
            lock(&self.p.shared.tally).lost += owed;
            return; // killed while it stood
        };
        t.pointer = Some(pointer);
        let let_go = sys::now();
        let mut told = Told::default();
        if let Some(timer) = &mut t.timer {
            timer.told(&mut told);
            if let Some(tick) = tick {
                timer.answered(tick);
            }
            timer.let_go(let_go);
        }
        let mut since = asked.unwrap_or(sample.time);
        let mut count = owed;
        if own_tick {
            if told.stops > 0 {
                since = told.stop_time;
            }
            let all = std::mem::take(&mut t.coming) + std::mem::take(&mut told.stops);
            past += all.saturating_sub(1);
            count += 1;
            if let Some(distance) = t.timer.as_ref().and_then(Timer::distance) {
                t.forecast.stopped(since, let_go + distance);
            }
        } else if looks && asked.is_some() {
            count += 1;
        }
        let held = let_go.saturating_sub(since);
        let time = sample.time;
        let (mut codes, mut missed) = (Vec::new(), false);
        if space.is_some() {
            self.holder.finish(&mut sample, &mut t.blocks);
            missed = self.holder.missed_code();
            codes = self.holder.codes();
        }
        self.ticked(tid, told.stops, told.ticks, told.regs.take());
        self.told(pid, told);
        self.tell_mappings(pid, time);
        self.find_signal(pid, time);
        let mut tally = lock(&self.p.shared.tally);
        tally.hold(held);
        tally.lost += past;
        drop(tally);
        self.deliver(sample, count, codes, missed);
    }

    /// Hands on a sample that stands for so many, with its code objects. `missed`: some of them were not copied.
    fn deliver(&self, sample: Sample, count: u64, codes: Vec<CodeCopy>, missed: bool) {
        let mut tally = lock(&self.p.shared.tally);
        let mut queue = lock(&self.p.shared.queue);
        let mut codes = codes;
        for _ in 0..count {
            if queue.len() < MAX_QUEUE {
                tally.delivered += 1;
                let mut events = Vec::with_capacity(1 + codes.len());
                push(sample.clone(), std::mem::take(&mut codes), &mut events);
                queue.extend(events.into_iter().map(Note::Event));
            } else {
                tally.lost += 1;
            }
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
