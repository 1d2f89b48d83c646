//! The thread that traces: lets stopped threads go on, and takes a sample of those whose time has come.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use rustc_hash::{FxHashMap, FxHashSet};

use super::memory::Blocks;
use super::timer::{self, RunState, Timer, Told};
use super::{Command, Note, Shared, Walk, lock};
use crate::capture::tidings::Tiding;
use crate::error::{Error, Kind, Result};
use crate::process::trace::{self, Epoll, Ready, Stopped, Why};
use crate::process::{self, sys};
use crate::sample::{Event, Pid, Sample, StackBytes, Standing, Tid, Walked};

/// As in sample.bpf.c.
const MAX_STACK: u64 = 1 << 20;
const MAX_FAULTS: usize = 64;
const MAX_FRAMES: usize = 4096;
const RED_ZONE: u64 = 128;
const PAGE: u64 = 4096;

/// Events that wait for the session before samples are dropped.
const MAX_QUEUE: usize = 1 << 14;
/// Where nothing tells of mappings: longest time between two looks, ns of the samples' clock.
const LOOK_AGAIN: u64 = 20_000_000;
/// How long the end waits for threads that were asked to stop.
const LAST_WAIT: u64 = 100_000_000;
/// Longest wait, should a signal that tells of stops go astray.
const TURN: Duration = Duration::from_millis(100);
const SHORT_TURN: Duration = Duration::from_millis(2);

const STOPS: u64 = u64::MAX;
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
    blocks: Blocks,
    walked: Walked,
    stack: Vec<u8>,
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
    epoll.add(parts.children.as_fd(), STOPS)?;
    epoll.add(parts.waker.as_fd(), COMMANDS)?;
    epoll.add(alarm.as_fd(), ALARM)?;
    Builder::new().name("tracer".into()).spawn(move || {
        let tracer = Tracer {
            p: parts,
            epoll,
            alarm,
            threads: FxHashMap::default(),
            members: FxHashMap::default(),
            own_child: None,
            started: false,
            asked: Vec::new(),
            blocks: Blocks::default(),
            walked: Walked::with_room(MAX_FRAMES),
            stack: vec![0; MAX_STACK as usize],
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
            let mut stops = ready.is_empty();
            for r in &ready {
                match r.token {
                    STOPS => {
                        trace::empty(self.p.children.as_fd());
                        stops = true;
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
            if stops {
                self.stops();
                self.ends();
            }
        }
    }

    fn period(&self) -> u64 {
        1_000_000_000 / self.p.rate.max(1)
    }

    // Processes and threads

    fn attach(&mut self, pid: Pid, at_exec: bool) -> Result<()> {
        let member = self.members.entry(pid).or_default();
        member.at_exec = at_exec;
        if at_exec {
            self.own_child = Some(pid);
        }
        // Threads may be made while we look; those of traced threads are traced from birth.
        for _ in 0..1000 {
            let mut new = false;
            for tid in process::threads(pid) {
                self.stops();
                if self.threads.contains_key(&tid) {
                    continue;
                }
                match trace::seize(tid, self.p.follow) {
                    Ok(()) => {}
                    Err(e) if e.raw_os_error() == Some(libc::ESRCH) => continue, // it has ended
                    // New, and its first stop comes soon.
                    Err(_) if tracer_of(tid) == Some(sys::own_tid() as Tid) => continue,
                    Err(e) => {
                        self.members.remove(&pid);
                        return Err(refused(pid, tid, &e));
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
            blocks: Vec::new(),
        };
        self.threads.insert(tid, traced);
    }

    /// Takes in a thread that a traced one has made, or lets go of what nobody asked for.
    fn newborn(&mut self, stop: Stopped) {
        let tid = stop.tid;
        let Some((pid, parent)) = ids(tid) else { return }; // killed
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

    fn executed(&mut self, pid: Pid) {
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

    /// Lets all go on that have stopped.
    fn stops(&mut self) {
        // First those that are held for us.
        for i in (0..self.asked.len()).rev() {
            if let Some(stop) = Stopped::next(Some(self.asked[i])) {
                self.handle(stop);
            }
        }
        // More than one stop of each thread in one go cannot be: something is off, and it must not keep us here.
        for _ in 0..2 * self.threads.len() + 64 {
            let Some(stop) = Stopped::next(None) else { break };
            self.handle(stop);
        }
    }

    fn handle(&mut self, stop: Stopped) {
        let tid = stop.tid;
        match stop.why {
            Why::Made => {}
            Why::Exec => self.executed(tid),
            // While the process stands still by job control, so does its sample.
            Why::Group => self.forget_asked(tid),
            Why::Signal(_) => drop(begin_again(&stop)),
            Why::Trap => match self.threads.get(&tid) {
                None => self.newborn(stop),
                Some(Traced { asked: Some(since), .. }) => {
                    let since = *since;
                    self.forget_asked(tid);
                    self.sample(stop, since);
                }
                Some(_) => drop(begin_again(&stop)),
            },
        }
    }

    fn forget_asked(&mut self, tid: Tid) {
        if let Some(t) = self.threads.get_mut(&tid) {
            t.asked = None;
        }
        self.asked.retain(|asked| *asked != tid);
    }

    /// Takes note of threads that have ended.
    fn ends(&mut self) {
        while let Some(tid) = trace::ended() {
            // Whoever started the command waits for its end, and the kernel tells one of us only.
            if self.own_child == Some(tid) {
                break;
            }
            trace::reap(tid);
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

    // Samples

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
        let time = sys::now();
        let Ok(words) = begin_again(&stop) else { return }; // killed
        let regs = words.regs();
        let standing = Standing {
            pointer: words.thread_pointer(),
            registers: words.general(),
        };
        if let Some(space) = &space {
            self.blocks.begin(pid, &t.blocks);
            (self.p.walk)(&self.blocks, space, &standing, &mut self.walked);
        }
        let base = regs.sp().wrapping_sub(RED_ZONE);
        let end = stack_end(base, standing.pointer, space.as_ref().map_or(0, |s| s.stack_end));
        let (len, holes) = copy_stack(pid, base, end, &mut self.stack);
        // While it stands still its timer does too, and is cheap to set.
        let past = t.timer.as_mut().map_or(0, Timer::next);
        drop(stop);
        let held = sys::now() - asked;

        let mut sample = Sample {
            pid,
            tid,
            time,
            regs: Some(regs),
            stack: StackBytes {
                base,
                bytes: self.stack[..len].to_vec(),
                holes,
            },
            kernel: Vec::new(),
            python: Vec::new(),
            marks: Vec::new(),
            walk: Default::default(),
        };
        let mut fresh = false;
        if space.is_some() {
            self.blocks.touched(&mut t.blocks);
            sample.python.clone_from(&self.walked.python);
            sample.marks.clone_from(&self.walked.marks);
            sample.walk = self.walked.walk;
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

/// The thread's registers; a system call that the stop has ended will begin again.
fn begin_again(stop: &Stopped) -> io::Result<crate::arch::UserRegs> {
    let regs = stop.registers()?;
    let mut again = regs;
    if again.begin_again() {
        stop.set_registers(&again)?;
    }
    Ok(regs)
}

/// Where a stack that begins at `sp` ends: `argc` in the main thread, the thread descriptor in the others (glibc and
/// musl put it above the stack); anywhere else (signal stacks, coroutines) a guess. As in sample.bpf.c.
fn stack_end(sp: u64, thread_pointer: u64, main: u64) -> u64 {
    let end = if main >= sp && main - sp < 64 << 20 {
        main + 8
    } else if thread_pointer > sp && thread_pointer - sp < 1 << 30 {
        thread_pointer
    } else {
        sp.saturating_add(65536)
    };
    end.min(sp.saturating_add(MAX_STACK))
}

/// Copies a stack into `out`, over pages that cannot be read; returns its length and the bits of such pages.
fn copy_stack(pid: Pid, base: u64, end: u64, out: &mut [u8]) -> (usize, Vec<u64>) {
    let len = usize::try_from(end.saturating_sub(base)).map_or(out.len(), |n| n.min(out.len()));
    let (mut at, mut faults, mut holes) = (0, 0, Vec::new());
    while at < len && faults <= MAX_FAULTS {
        at += sys::read_memory(pid, base + at as u64, &mut out[at..len]);
        if at < len {
            let avma = base + at as u64;
            let page = (avma / PAGE - base / PAGE) as usize;
            holes.resize(holes.len().max(page / 64 + 1), 0);
            holes[page / 64] |= 1 << (page % 64);
            let next = (((avma / PAGE + 1) * PAGE - base) as usize).min(len);
            out[at..next].fill(0);
            (at, faults) = (next, faults + 1);
        }
    }
    (at, holes)
}

fn count_time(shared: &Shared, t: &Traced) {
    if let Some(timer) = &t.timer {
        lock(&shared.tally).cpu_time += timer.count();
    }
}

/// A number after a word in /proc/TID/status.
fn status_number(text: &str, word: &str) -> Option<u32> {
    text.lines().find_map(|l| l.strip_prefix(word)?.trim().parse().ok())
}

/// Process and parent process of a thread.
fn ids(tid: Tid) -> Option<(Pid, Pid)> {
    let text = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    Some((status_number(&text, "Tgid:")?, status_number(&text, "PPid:")?))
}

/// Who traces a thread.
fn tracer_of(tid: Tid) -> Option<Tid> {
    let text = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    status_number(&text, "TracerPid:").filter(|pid| *pid != 0)
}

fn refused(pid: Pid, tid: Tid, e: &io::Error) -> Error {
    const YAMA: &str = "/proc/sys/kernel/yama/ptrace_scope";
    let scope = fs::read_to_string(YAMA).ok().and_then(|t| t.trim().parse::<u32>().ok());
    let error = Error::new(Kind::NotPermitted, format!("cannot trace process {pid}"));
    match (tracer_of(tid), scope) {
        (Some(other), _) => {
            let name = process::thread_name(other, other).unwrap_or_default();
            error
                .why(format!("process {other} ({name}) traces it already"))
                .hint("end the debugger or tracer first, or use --backend ebpf")
        }
        (None, Some(scope @ 1..)) if sys::effective_uid() != 0 => error
            .why(format!("kernel.yama.ptrace_scope is {scope}: {e}"))
            .hint("run it with sudo, or start the program under it: nativeprof record -- COMMAND"),
        _ => error
            .why(format!("{e}: it belongs to somebody else or is protected"))
            .hint("run it with sudo, as root on the host"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_end_where_the_program_says() {
        const SP: u64 = 0x7000_0000;
        let check = |pointer: u64, main: u64, expected: u64| assert_eq!(stack_end(SP, pointer, main), expected);
        check(0x6000_0000, SP + 0x3000, SP + 0x3008); // main thread
        check(SP + 0x9000, 0x7fff_0000_0000, SP + 0x9000); // another
        check(0x6000_0000, 0x6000_0000, SP + 65536); // neither
        check(SP + 0x900_0000, 0, SP + MAX_STACK);
        assert_eq!(stack_end(u64::MAX - 8, 0, 0), u64::MAX);
    }

    #[test]
    fn stacks_are_copied_over_holes() {
        // A page that cannot be read is not to be had without unsafe code: the first page of memory stands for it.
        let own = [7u8; 64];
        let at = own.as_ptr() as u64;
        let mut out = [1; 64];
        assert_eq!(copy_stack(std::process::id(), at, at + 64, &mut out), (64, Vec::new()));
        assert_eq!(out, own);
        let mut out = [1; 6000];
        let (len, holes) = copy_stack(std::process::id(), 8, 5008, &mut out);
        assert_eq!((len, holes), (5000, vec![0b11]));
        assert!(out[..5000].iter().all(|b| *b == 0));
        let mut out = vec![1; 1 << 20];
        let (len, holes) = copy_stack(std::process::id(), 0, 1 << 20, &mut out);
        assert_eq!(len, (MAX_FAULTS + 1) * PAGE as usize, "no more faults than these");
        assert_eq!(holes, [u64::MAX, 1]);
    }
}
