//! What makes a thread's sample due: its own perf event, or its CPU time looked up.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;

use crate::capture::ring::Ring;
use crate::capture::tidings::{self, Tiding};
use crate::process::sys::{self, perf};
use crate::sample::{Pid, Tid};

/// How timers are made here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A perf event that counts all CPU time.
    Perf,
    /// A perf event that ticks in user code only: all that an ordinary user may have (perf_event_paranoid 2).
    PerfUser,
    /// No perf events: CPU time is looked up in /proc.
    Look,
}

impl Kind {
    /// The best that is permitted here.
    pub fn probe() -> Kind {
        let open = |kind| sys::perf_event_open(&mut attr(kind, 1_000_000), 0, -1).is_ok();
        let kinds = [Kind::Perf, Kind::PerfUser];
        kinds.into_iter().find(|kind| open(*kind)).unwrap_or(Kind::Look)
    }

    pub fn name(self) -> &'static str {
        match self {
            Kind::Perf => "cpu-clock",
            Kind::PerfUser => "cpu-clock:u",
            Kind::Look => "cpu-time",
        }
    }
}

fn attr(kind: Kind, period: u64) -> perf::perf_event_attr {
    let mut attr = perf::perf_event_attr {
        type_: perf::PERF_TYPE_SOFTWARE,
        config: perf::PERF_COUNT_SW_CPU_CLOCK.into(),
        ..Default::default()
    };
    tidings::ask(&mut attr);
    attr.__bindgen_anon_1.sample_period = period;
    attr.__bindgen_anon_2.wakeup_events = 1;
    attr.set_disabled(1);
    if kind == Kind::PerfUser {
        attr.set_exclude_kernel(1);
        attr.set_exclude_hv(1);
    }
    attr
}

/// Pages of a thread's ring. Room for some fifty mappings; where more come between two samples, it says so.
const RING_PAGES: usize = 1;
/// Shortest time to the next tick, ns.
const SOON: u64 = 20_000;
/// Samples of the past that may be caught up with, where CPU time is looked up: the kernel updates it in steps.
const CATCH_UP: u64 = 8;

/// A thread's timer. The CPU time is divided into slots of one period; a sample falls due once in each, at random, so
/// that no loop of the target keeps step with it.
pub struct Timer {
    how: How,
    kind: Kind,
    period: u64,
    slot: u64,
    random: u64,
}

enum How {
    Perf(Ring),
    /// `start`: CPU time when sampling began; `None` when it is off.
    Look {
        cpu: File,
        start: Option<u64>,
    },
}

/// What a perf event's ring told.
#[derive(Default)]
pub struct Told {
    pub ticks: u64,
    pub tidings: Vec<Tiding>,
    /// Tidings were lost.
    pub lost: bool,
}

impl Timer {
    /// A timer for a thread, of this kind or else (too many rings) by looking; not running yet. `None`: it has ended.
    pub fn new(kind: Kind, pid: Pid, tid: Tid, period: u64) -> Option<Timer> {
        let random = sys::now() ^ u64::from(tid) << 32 | 1;
        let timer = |how, kind| Timer {
            how,
            kind,
            period: period.max(1),
            slot: 0,
            random,
        };
        if kind != Kind::Look {
            let event = sys::perf_event_open(&mut attr(kind, period.max(SOON)), tid as i32, -1);
            if let Ok(ring) = event.and_then(|event| Ring::new(event, RING_PAGES)) {
                return Some(timer(How::Perf(ring), kind));
            }
        }
        let cpu = File::open(format!("/proc/{pid}/task/{tid}/schedstat")).ok()?;
        Some(timer(How::Look { cpu, start: None }, Kind::Look))
    }

    /// Readable at a tick; `None` where ticks must be looked for.
    pub fn event(&self) -> Option<BorrowedFd<'_>> {
        match &self.how {
            How::Perf(ring) => Some(ring.event()),
            How::Look { .. } => None,
        }
    }

    pub fn start(&mut self) {
        self.set(0);
        match &mut self.how {
            How::Perf(ring) => drop(sys::perf_enable(ring.event())), // the thread has ended: nothing to start
            How::Look { cpu, start } => *start = Some(looked_up(cpu)),
        }
    }

    pub fn stop(&mut self) {
        match &mut self.how {
            How::Perf(ring) => drop(sys::perf_disable(ring.event())), // the thread has ended: nothing to stop
            How::Look { .. } => {}                                    // nobody looks any more
        }
    }

    /// CPU time since the start, ns.
    pub fn count(&self) -> u64 {
        match &self.how {
            How::Perf(ring) => sys::read_count(ring.event()).unwrap_or(0),
            How::Look { cpu, start } => start.map_or(0, |start| looked_up(cpu).saturating_sub(start)),
        }
    }

    /// What the perf event told since the last call.
    pub fn told(&mut self, told: &mut Told) {
        let How::Perf(ring) = &mut self.how else { return };
        ring.drain(|kind, misc, body| match kind {
            perf::PERF_RECORD_SAMPLE => told.ticks += 1,
            _ => match tidings::decode(kind, misc, body) {
                Some(Ok(tiding)) => told.tidings.push(tiding),
                Some(Err(_)) => told.lost = true,
                None => {}
            },
        });
    }

    /// Is a sample due by the CPU time looked up?
    pub fn looks_due(&self) -> bool {
        matches!(self.how, How::Look { start: Some(_), .. }) && self.count() >= (self.slot + 1) * self.period
    }

    /// The sample that was due is taken, or cannot be: sets the next. Returns how many fell due meanwhile and are past.
    pub fn next(&mut self) -> u64 {
        let count = self.count();
        match self.how {
            How::Perf(_) => {
                let reached = (count / self.period).max(self.slot + 1);
                let past = reached - self.slot - 1;
                self.slot = reached;
                self.set(count);
                // Time in the kernel goes by without a tick of a timer for user code.
                if self.kind == Kind::PerfUser { 0 } else { past }
            }
            How::Look { .. } => {
                let reached = (count / self.period).saturating_sub(CATCH_UP).max(self.slot + 1);
                let past = reached - self.slot - 1;
                self.slot = reached;
                past
            }
        }
    }

    /// Sets the tick of this slot, at random in what is left of it.
    fn set(&mut self, count: u64) {
        // xorshift64 (Marsaglia, 2003)
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let How::Perf(ring) = &self.how else { return };
        let start = (self.slot * self.period).max(count);
        let left = ((self.slot + 1) * self.period).saturating_sub(start).max(1);
        let due = start + self.random % left;
        let _ = sys::perf_set_period(ring.event(), (due - count).max(SOON)); // the thread has ended
    }
}

/// CPU time of a thread, ns: the first number of its schedstat; 0 once it has ended.
fn looked_up(cpu: &File) -> u64 {
    let mut text = [0; 64];
    let n = cpu.read_at(&mut text, 0).unwrap_or(0);
    let word = text[..n].split(|c| *c == b' ').next().unwrap_or_default();
    std::str::from_utf8(word).ok().and_then(|w| w.parse().ok()).unwrap_or(0)
}

/// Tells whether a thread runs, without touching it.
pub struct RunState {
    file: File,
    is_call: bool,
}

impl RunState {
    /// `None`: it has ended.
    pub fn new(pid: Pid, tid: Tid) -> Option<RunState> {
        let open = |name: &str| File::open(format!("/proc/{pid}/task/{tid}/{name}"));
        let mut state = match open("syscall") {
            Ok(file) => RunState { file, is_call: true },
            Err(_) => RunState {
                file: open("stat").ok()?,
                is_call: false,
            },
        };
        if state.is_call && state.text().is_none() {
            // A kernel may refuse to read what it lets open.
            state = RunState {
                file: open("stat").ok()?,
                is_call: false,
            };
        }
        Some(state)
    }

    fn text(&self) -> Option<([u8; 128], usize)> {
        let mut text = [0; 128];
        let n = self.file.read_at(&mut text, 0).ok().filter(|n| *n > 0)?;
        Some((text, n))
    }

    /// Is it running, or about to? One that has ended is not.
    pub fn is_running(&self) -> bool {
        let Some((text, n)) = self.text() else { return false };
        let text = &text[..n];
        if self.is_call {
            return text.starts_with(b"running"); // fs/proc/base.c, proc_pid_syscall
        }
        // The name before the state may hold anything.
        let after = text.iter().rposition(|c| *c == b')').map_or(n, |at| at + 2);
        text.get(after) == Some(&b'R')
    }
}
