//! Off-CPU time: the programs at context switches, and what threads were doing when sampling starts and ends.
//!
//! The account itself is kept by sample.bpf.c, thread by thread. Here threads that already exist are entered, and those that are
//! off the CPU at the end are noted.

#![allow(unsafe_code)]

use aya::Ebpf;
use aya::maps::{Array, HashMap as BpfHash, Map, MapData, MapError};

use super::errors::bpf_error;
use super::object::{self, NO_EXIST};
use super::switch_in::{self, LOAD, SwitchInHook};
use crate::capture::OpenInterval;
use crate::capture::common::suspensions::Suspensions;
use crate::capture::common::throttling::Throttling;
use crate::error::Result;
use crate::event::{Pid, Sample, Suspension, Tid, TimeSpent};
use crate::sys;
use crate::sys::procfs;

/// `MAX_WORKS` of sample.bpf.c.
pub const MAX_WORKS: u32 = 8;
/// Threads accounted for at the same time, at most.
pub const MAX_THREADS: u32 = 16384;

/// `OURS_CELLS` of sample.bpf.c.
const OURS_CELLS: u32 = 4096;
/// `RUNNING` and `BLOCKED` of sample.bpf.c.
const RUNNING: u32 = 0;
const BLOCKED: u32 = 2;
/// Flags of threads that are blocked, and of their records.
const STOPPED: u32 = 1024;
const FROZEN: u32 = 2048;

const MAX_KERNEL: usize = 127;

/// Mirrors `struct thread` of the program.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct OffCpuThread {
    since: u64,
    woken: u64,
    cpu: u64,
    until_runnable: i64,
    until_blocked: i64,
    step_runnable: u64,
    step_blocked: u64,
    take_runnable: u64,
    take_blocked: u64,
    runnable_length: u64,
    blocked_length: u64,
    take_woken: u64,
    futex: u64,
    next_futex: u64,
    selected: u64,
    pending: u64,
    late: u64,
    began: u64,
    got_lock: u64,
    until_throttled: i64,
    step_throttled: u64,
    take_throttled: u64,
    throttled_length: u64,
    queue: u64,
    queue_throttled: u64,
    state: u32,
    scheduled: u32,
    tgid: u32,
    waker: u32,
    waker_pid: u32,
    take_waker: u32,
    take_waker_pid: u32,
    timed_out: u32,
    kernel: u32,
    wants_lock: u32,
    suspended: u32,
    take_suspended: u32,
}

// SAFETY: plain integers without padding, any bit pattern is valid.
unsafe impl aya::Pod for OffCpuThread {}

impl OffCpuThread {
    /// Blocked, and not woken yet.
    fn is_blocked(&self) -> bool {
        (self.state, self.woken) == (BLOCKED, 0)
    }
}

/// The same in the program with task works.
#[repr(C)]
#[derive(Clone, Copy)]
struct ThreadWithWork {
    thread: OffCpuThread,
    stack: [u64; MAX_KERNEL + 1],
    work: u64,
}

// SAFETY: plain integers without padding, any bit pattern is valid.
unsafe impl aya::Pod for ThreadWithWork {}

/// The map `THREADS`.
enum OffCpuThreadMap {
    Plain(BpfHash<MapData, u32, OffCpuThread>),
    WithWork(BpfHash<MapData, u32, ThreadWithWork>),
}

impl OffCpuThreadMap {
    fn new(map: Map, hook: &SwitchInHook) -> Result<OffCpuThreadMap> {
        let map = match hook {
            SwitchInHook::TaskWork(_) => map.try_into().map(OffCpuThreadMap::WithWork),
            SwitchInHook::Kprobe(_) => map.try_into().map(OffCpuThreadMap::Plain),
        };
        map.map_err(|e| bpf_error(LOAD, e))
    }

    fn all(&self) -> Vec<(Tid, OffCpuThread)> {
        match self {
            OffCpuThreadMap::Plain(map) => map.iter().flatten().collect(),
            OffCpuThreadMap::WithWork(map) => map.iter().flatten().map(|(tid, t)| (tid, t.thread)).collect(),
        }
    }

    /// Leaves what is there as it is.
    fn add(&mut self, tid: Tid, thread: OffCpuThread) -> std::result::Result<(), MapError> {
        match self {
            OffCpuThreadMap::Plain(map) => map.insert(tid, thread, NO_EXIST),
            OffCpuThreadMap::WithWork(map) => {
                let with_work = ThreadWithWork {
                    thread,
                    stack: [0; MAX_KERNEL + 1],
                    work: 0,
                };
                map.insert(tid, with_work, NO_EXIST)
            }
        }
    }
}

/// The programs at context switches.
pub struct OffCpu {
    threads: OffCpuThreadMap,
    /// The processes whose switches count, by the low bits of their numbers.
    ours: Array<MapData, u32>,
    /// What takes stacks.
    pub hook: SwitchInHook,
    /// Why nothing better does.
    pub missing: Vec<String>,
    /// After the end: intervals that were not over.
    pub open: Vec<OpenInterval>,
    suspensions: Suspensions,
    throttling: Throttling,
}

impl OffCpu {
    /// Attaches the programs. The account begins when `period` is set in the program's facts.
    ///
    /// # Errors
    /// The kernel refuses them.
    pub fn attach(bpf: &mut Ebpf, hook: SwitchInHook, missing: Vec<String>) -> Result<OffCpu> {
        switch_in::attach(bpf, &hook)?;
        Ok(OffCpu {
            threads: OffCpuThreadMap::new(object::take_map(bpf, "THREADS")?, &hook)?,
            ours: object::take_map(bpf, "OURS")?
                .try_into()
                .map_err(|e| bpf_error(LOAD, e))?,
            hook,
            missing,
            open: Vec::new(),
            suspensions: Suspensions::default(),
            throttling: Throttling::default(),
        })
    }

    /// Notes which threads are off the CPU at `end`, when the account was stopped, and for how long no sample represents their
    /// time. Time of less than half a `period` is no sample, and blocked intervals shorter than `min_blocked` are left out.
    /// All of them in ns; `end` is on CLOCK_MONOTONIC.
    pub fn end(&mut self, end: u64, period: u64, min_blocked: u64) {
        for (tid, t) in self.threads.all() {
            // (Those that have ended are entered until the kernel frees them.)
            if t.state == RUNNING || has_ended(t.tgid, tid) {
                continue;
            }
            let since = |start: u64| end.saturating_sub(start);
            let blocked = match (t.state, t.woken) {
                (BLOCKED, 0) => since(t.since),
                (BLOCKED, woken) => woken.saturating_sub(t.since),
                _ => 0,
            };
            let runnable = since(t.since).saturating_sub(blocked);
            let seen = || {
                self.suspensions
                    .most_of(t.tgid, t.since, end)
                    .filter(|_| t.is_blocked())
            };
            let suspended = suspension(t.suspended).or_else(seen);
            let blocked = blocked + t.pending;
            let enough = |time: u64| if time * 2 >= period { time } else { 0 };
            // Since the last tick of the clock of short intervals.
            let rest = |step: u64, until: i64| step.saturating_sub(u64::try_from(until).unwrap_or(0));
            let time = TimeSpent {
                cpu: 0,
                runnable: enough(runnable + rest(t.step_runnable, t.until_runnable)),
                blocked: if blocked < min_blocked {
                    0
                } else {
                    enough(blocked + rest(t.step_blocked, t.until_blocked) + t.late)
                },
                runnable_length: runnable,
                blocked_length: blocked,
                ..TimeSpent::default() // of this it is not known whether a part was throttled
            };
            if time.runnable + time.blocked > 0 {
                self.open.push(OpenInterval {
                    pid: t.tgid,
                    tid,
                    end,
                    time,
                    runs: 0,
                    asleep: true,
                    call: None,
                    suspended,
                });
            }
        }
    }

    /// Examines the processes, from time to time.
    pub fn examine(&mut self) {
        let now = sys::clock::now();
        for pid in self.suspensions.examine(now) {
            if matches!(self.hook, SwitchInHook::Kprobe(_)) {
                self.throttling.read(pid, now, now);
            }
        }
    }

    /// Completes a sample with what the program did not see.
    pub fn complete(&mut self, s: &mut Sample) {
        if s.time_spent.blocked > 0 && s.suspended.is_none() {
            let woken = if s.wake_up.time > 0 { s.wake_up.time } else { s.time };
            let since = woken.saturating_sub(s.time_spent.blocked_length);
            s.suspended = self.suspensions.most_of(s.pid, since, woken);
        }
        if matches!(self.hook, SwitchInHook::Kprobe(_)) {
            self.throttling
                .split(s.pid, &mut s.time_spent, s.time, sys::clock::now());
        }
    }

    pub fn remove_process(&mut self, pid: Pid) {
        self.suspensions.remove_process(pid);
        self.throttling.remove_process(pid);
    }

    /// Makes the programs account for the switches of a process.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn watch(&mut self, pid: Pid) -> Result<()> {
        let set = self.ours.set(pid % OURS_CELLS, 1, 0);
        set.map_err(|e| bpf_error(LOAD, e))
    }

    /// Enters the threads of a process that exist already: what they do now began when the account did, `began`
    /// (CLOCK_MONOTONIC, ns). Reading all of them takes a while, but one that was switched since is entered already.
    pub fn add_process(&mut self, pid: Pid, began: u64) {
        self.suspensions.add_process(pid);
        if matches!(self.hook, SwitchInHook::Kprobe(_)) {
            self.throttling.read(pid, began, sys::clock::now());
        }
        let suspended = match sys::cgroup::suspension(pid) {
            None => 0,
            Some(Suspension::Stopped) => STOPPED,
            Some(Suspension::Frozen) => FROZEN,
        };
        for tid in procfs::threads(pid) {
            let thread = OffCpuThread {
                since: began,
                woken: 0,
                cpu: 0,
                until_runnable: 1,
                until_blocked: 1,
                step_runnable: 1,
                step_blocked: 1,
                take_runnable: 0,
                take_blocked: 0,
                runnable_length: 0,
                blocked_length: 0,
                take_woken: 0,
                futex: 0,
                next_futex: 0,
                selected: 0,
                pending: 0,
                late: 0,
                began,
                got_lock: 0,
                until_throttled: 1,
                step_throttled: 1,
                take_throttled: 0,
                throttled_length: 0,
                queue: 0,
                queue_throttled: 0,
                state: if is_running(pid, tid) { RUNNING } else { BLOCKED },
                scheduled: 0,
                tgid: pid,
                waker: 0,
                waker_pid: 0,
                take_waker: 0,
                take_waker_pid: 0,
                timed_out: 0,
                kernel: 0,
                wants_lock: 0,
                suspended,
                take_suspended: 0,
            };
            let _ = self.threads.add(tid, thread);
        }
    }
}

/// From the flags of the program.
pub fn suspension(flags: u32) -> Option<Suspension> {
    match flags & (STOPPED | FROZEN) {
        0 => None,
        STOPPED => Some(Suspension::Stopped),
        _ => Some(Suspension::Frozen),
    }
}

/// Does it run or want to? In doubt, yes.
fn is_running(pid: Pid, tid: Tid) -> bool {
    procfs::thread_state(pid, tid).is_none_or(|s| s == 'R')
}

fn has_ended(pid: Pid, tid: Tid) -> bool {
    procfs::thread_state(pid, tid).is_none_or(|s| matches!(s, 'Z' | 'X'))
}
