//! What makes a thread's sample due: its own perf events, or its CPU time looked up.
//!
//! Where it can, a perf event sends its tick to the thread as a signal (F_SETSIG, F_OWNER_TID in fcntl(2)). It ticks in
//! user code only, so that no system call is ever ended by it, and a traced thread stops before it gets the signal: at
//! the tick itself, however late the tracer comes. The signal is one that is ignored by default and that the program
//! does not handle: the kernel tells a tracer of those too (kernel/signal.c, sig_ignored), and should we be killed in
//! between, nothing comes of it.
//!
//! A second event ticks in the kernel. The thread is not stopped then, since that would cut short what its system call
//! does (a `write` returns with a part written): the event notes the registers of user space, and the tracer reads the
//! stack where the thread sleeps in that same call. If it does not sleep, more events make it stop as soon as it is in
//! user code again ([`Timer::stop_soon`]): a breakpoint where the call returns to; its next page fault, which a signal does
//! not disturb; and short ticks, should both be missed. The two that tick are independent, so that each mode has its share of samples.
//!
//! Where no signal or no perf event can be had, the tracer follows each system call of the thread instead, and so knows
//! when it is in none.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use crate::arch::{PERF_REGS, PerfRegs};
use crate::capture::random::Random;
use crate::capture::ring::Ring;
use crate::capture::ticks::{RUN, Ticks};
use crate::capture::tidings::{self, Tiding};
use crate::process::sys::{self, perf};
use crate::sample::{Pid, Tid};

/// How timers are made here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Perf events that count all CPU time.
    Perf,
    /// A perf event that ticks in user code only: all that an ordinary user may have (perf_event_paranoid 2).
    PerfUser,
    /// No perf events: CPU time is looked up in /proc.
    Look,
}

impl Kind {
    /// The best that is permitted here.
    pub fn probe() -> Kind {
        let open = |mode| sys::perf_event_open(&mut attr(mode, 1_000_000), 0, -1).is_ok();
        if open(Mode::Kernel) {
            Kind::Perf
        } else if open(Mode::User) {
            Kind::PerfUser
        } else {
            Kind::Look
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Kind::Perf => "cpu-clock",
            Kind::PerfUser => "cpu-clock:u",
            Kind::Look => "cpu-time",
        }
    }
}

/// Where a perf event ticks. It counts all time all the same.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    User,
    Kernel,
}

fn attr(mode: Mode, period: u64) -> perf::perf_event_attr {
    let mut attr = perf::perf_event_attr {
        type_: perf::PERF_TYPE_SOFTWARE,
        config: perf::PERF_COUNT_SW_CPU_CLOCK.into(),
        ..Default::default()
    };
    tidings::ask(&mut attr);
    attr.__bindgen_anon_1.sample_period = period;
    attr.__bindgen_anon_2.wakeup_events = 1;
    attr.set_disabled(1);
    match mode {
        Mode::User => {
            attr.set_exclude_kernel(1);
            attr.set_exclude_hv(1);
        }
        Mode::Kernel => attr.set_exclude_user(1),
    }
    attr
}

/// Pages of a thread's ring. Room for some fifty mappings; where more come between two samples, it says so.
const RING_PAGES: usize = 1;
/// Shortest time to the next tick, ns.
const SOON: u64 = 20_000;
/// Ticks that stop the thread are told of every so many times only: the stop tells enough, if it comes.
const SIGNALS_TOLD: u32 = 8;
/// Time that a thread takes from a stop to its own code, ns.
const WAY_BACK: u64 = 10_000;
/// Samples of the past that may be caught up with, where CPU time is looked up: the kernel updates it in steps.
const CATCH_UP: u64 = 8;

/// A thread's timer. Times between ticks are random, new ones every few ticks ([`Ticks`]).
pub struct Timer {
    how: How,
    period: u64,
    random: Random,
}

/// The ticks of one perf event.
#[derive(Default)]
struct Distances {
    ticks: Ticks,
    /// Ticks in this run, and those of them that are still to come.
    run: u32,
    left: u32,
}

impl Distances {
    /// The event begins to tick, the first time after `first` ns.
    fn begin(&mut self, event: BorrowedFd<'_>, first: u64, period: u64) {
        let first = first.max(SOON);
        self.ticks.begin(0, first, period);
        // Where the thread has ended there is nothing to start.
        let _ = sys::perf_set_period(event, first);
        let _ = sys::perf_enable(event);
    }

    /// It has ticked; the thread stands still. Returns how many ticks of the run that ends fell where it does not tick.
    fn next(&mut self, event: BorrowedFd<'_>, period: u64, random: &mut Random) -> u64 {
        if self.left > 0 {
            self.left -= 1;
            return 0;
        }
        let seen = u64::from(self.run.max(1));
        // Short runs at first: until then the distance is that to the first tick.
        self.run = (2 * self.run).clamp(1, RUN);
        self.left = self.run - 1;
        let count = sys::read_count(event).unwrap_or(0);
        let passed = self.ticks.passed(count as i64).max(0) as u64;
        let distance = self.ticks.distance(count, self.run, period, random).max(SOON);
        self.ticks.set(count, distance, period);
        let _ = sys::perf_set_period(event, distance); // the thread has ended
        passed.saturating_sub(seen)
    }
}

enum How {
    Perf {
        ring: Ring,
        ticks: Distances,
        /// It ticks in user code and stops the thread.
        signals: Signals,
        /// Until then the thread is at a stop of ours, and ticks in the kernel tell nothing of the program.
        stopped: u64,
        /// Times of the last ticks counted that are not answered yet: in user code, and others.
        counted: [u64; 2],
    },
    /// `start`: CPU time when sampling began; `None` when it is off. A sample falls due at the end of each slot of one
    /// period.
    Look { cpu: File, start: Option<u64>, slot: u64 },
}

/// The other events of a thread that ticks stop.
struct Signals {
    /// Ticks in the kernel, and writes to the same ring.
    kernel: Option<(OwnedFd, Distances)>,
    /// Stop the thread as soon as it is in user code; off most of the time. The last one is made for each place.
    soon: [OwnedFd; 2],
    returns: Option<OwnedFd>,
    number: i32,
    tid: Tid,
}

impl Signals {
    fn soon(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.soon.iter().chain(&self.returns).map(AsFd::as_fd)
    }

    /// Makes the thread stop where its system call returns to. Without a free debug register it does not.
    fn stop_at(&mut self, ip: u64) {
        let mut attr = perf::perf_event_attr {
            type_: perf::PERF_TYPE_BREAKPOINT,
            bp_type: 4, // HW_BREAKPOINT_X (include/uapi/linux/hw_breakpoint.h)
            ..Default::default()
        };
        attr.__bindgen_anon_1.sample_period = 1;
        attr.__bindgen_anon_3.bp_addr = ip;
        attr.__bindgen_anon_4.bp_len = size_of::<libc::c_long>() as u64;
        attr.set_exclude_kernel(1);
        attr.set_exclude_hv(1);
        attr.set_disabled(1);
        self.returns = None;
        let Ok(event) = sys::perf_event_open(&mut attr, self.tid as i32, -1) else {
            return;
        };
        if sys::signal_ticks(event.as_fd(), self.tid, self.number).is_ok() && sys::perf_enable(event.as_fd()).is_ok() {
            self.returns = Some(event);
        }
    }
}

/// Which of a timer's ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tick {
    /// One that stops the thread.
    Stop,
    /// One that the tracer is told of.
    Told,
}

/// What a perf event's ring told.
#[derive(Default)]
pub struct Told {
    /// Ticks that stop the thread, and the time of the last one.
    pub stops: u64,
    pub stop_time: u64,
    /// Other ticks, and the registers of user space at the last one.
    pub ticks: u64,
    pub regs: Option<PerfRegs>,
    pub tidings: Vec<Tiding>,
    /// Tidings were lost.
    pub lost: bool,
}

impl Timer {
    /// A timer for a thread, of this kind, or else (no signal that may stop it, too many rings) by looking; not running
    /// yet. `None`: it has ended.
    pub fn new(kind: Kind, pid: Pid, tid: Tid, period: u64, signal: Option<i32>) -> Option<Timer> {
        let period = period.max(1);
        let random = Random::new(sys::now() ^ u64::from(tid) << 32);
        let how = perf_events(kind, tid, period, signal).or_else(|| {
            let cpu = File::open(format!("/proc/{pid}/task/{tid}/schedstat")).ok()?;
            Some(How::Look {
                cpu,
                start: None,
                slot: 0,
            })
        })?;
        Some(Timer { how, period, random })
    }

    /// Readable at a tick of which the tracer is told; `None` where ticks must be looked for.
    pub fn event(&self) -> Option<BorrowedFd<'_>> {
        match &self.how {
            How::Perf { ring, .. } => Some(ring.event()),
            How::Look { .. } => None,
        }
    }

    /// Did a signal that tells of this descriptor come from here?
    pub fn sends(&self, descriptor: i32) -> bool {
        let is = |fd: BorrowedFd<'_>| fd.as_raw_fd() == descriptor;
        matches!(&self.how, How::Perf { ring, signals, .. } if is(ring.event()) || signals.soon().any(is))
    }

    /// Does this descriptor stand for a tick of the thread's own clock, not one of [`Timer::stop_soon`]?
    pub fn ticks(&self, descriptor: i32) -> bool {
        matches!(&self.how, How::Perf { ring, .. } if ring.event().as_raw_fd() == descriptor)
    }

    /// Makes the thread stop as soon as it is in user code: where its registers of user space are these, if they are
    /// known. False if it cannot.
    pub fn stop_soon(&mut self, regs: Option<&PerfRegs>) -> bool {
        let How::Perf { signals, .. } = &mut self.how else {
            return false;
        };
        if let Some(ip) = regs.and_then(PerfRegs::call_returns_to) {
            signals.stop_at(ip);
        }
        signals
            .soon()
            .map(sys::perf_enable)
            .fold(false, |any, done| any | done.is_ok())
    }

    /// It need not stop soon any more. Its descriptors stay: a signal of theirs may be on its way.
    pub fn stop_no_more(&self) {
        if let How::Perf { signals, .. } = &self.how {
            for event in signals.soon() {
                let _ = sys::perf_disable(event); // the thread has ended
            }
        }
    }

    pub fn start(&mut self) {
        let period = self.period;
        match &mut self.how {
            How::Perf {
                ring, ticks, signals, ..
            } => {
                if let Some((kernel, ticks)) = &mut signals.kernel {
                    // It goes on ticking at this distance as long as it meets user code: not a short one.
                    ticks.begin(kernel.as_fd(), self.random.between(period), period);
                }
                ticks.begin(ring.event(), self.random.first(period), period);
            }
            How::Look { cpu, start, .. } => *start = Some(looked_up(cpu)),
        }
    }

    pub fn stop(&mut self) {
        match &mut self.how {
            How::Perf { ring, signals, .. } => {
                // Where the thread has ended there is nothing to stop.
                let _ = sys::perf_disable(ring.event());
                if let Some((kernel, _)) = &signals.kernel {
                    let _ = sys::perf_disable(kernel.as_fd());
                }
            }
            How::Look { .. } => {} // nobody looks any more
        }
    }

    /// CPU time since the start, ns.
    pub fn count(&self) -> u64 {
        match &self.how {
            How::Perf { ring, .. } => sys::read_count(ring.event()).unwrap_or(0),
            How::Look { cpu, start, .. } => looked_since(cpu, *start),
        }
    }

    /// Adds what the perf events have told since the last call.
    pub fn told(&mut self, told: &mut Told) {
        let period = self.period;
        let How::Perf {
            ring, stopped, counted, ..
        } = &mut self.how
        else {
            return;
        };
        // Until it is answered an event goes on ticking at the distance last set, which may be a very short one: of
        // such ticks one in each period was due.
        let mut counts = |which: Tick, time: u64| {
            let last = &mut counted[which as usize];
            let new = *last == 0 || time >= *last + period;
            if new {
                *last = time.max(1);
            }
            u64::from(new)
        };
        ring.drain(|kind, misc, body| match kind {
            perf::PERF_RECORD_SAMPLE => {
                let mode = u32::from(misc) & perf::PERF_RECORD_MISC_CPUMODE_MASK;
                let time = tidings::time_of_sample(body).unwrap_or(0);
                if mode == perf::PERF_RECORD_MISC_USER {
                    told.stops += counts(Tick::Stop, time);
                    told.stop_time = time;
                    *stopped = u64::MAX;
                } else if time >= *stopped {
                    let new = counts(Tick::Told, time);
                    told.ticks += new;
                    if new > 0 {
                        told.regs = body.get(16..).and_then(PerfRegs::parse);
                    }
                }
            }
            _ => match tidings::decode(kind, misc, body) {
                Some(Ok(tiding)) => told.tidings.push(tiding),
                Some(Err(_)) => told.lost = true,
                None => {}
            },
        });
    }

    /// The tick that was told of has become a sample, or cannot: the next one told of is a new one.
    pub fn answered(&mut self, tick: Tick) {
        if let How::Perf { counted, .. } = &mut self.how {
            counted[tick as usize] = 0;
        }
    }

    /// The thread was let go after a tick, at this time.
    pub fn let_go(&mut self, time: u64) {
        if let How::Perf { stopped, .. } = &mut self.how {
            *stopped = time + WAY_BACK;
        }
    }

    /// CPU time from one tick that stops the thread to the next, as it is now, ns.
    pub fn distance(&self) -> Option<u64> {
        match &self.how {
            How::Perf { ticks, .. } => Some(ticks.ticks.current()),
            How::Look { .. } => None,
        }
    }

    /// Is a sample due by the CPU time looked up?
    pub fn looks_due(&self) -> bool {
        match self.how {
            How::Look {
                start: Some(_), slot, ..
            } => self.count() >= (slot + 1) * self.period,
            _ => false,
        }
    }

    /// The sample that was due is taken, or cannot be: sets the next. Returns how many fell due meanwhile and are past,
    /// where no ticks tell of them.
    pub fn next(&mut self, tick: Tick) -> u64 {
        let period = self.period;
        match &mut self.how {
            How::Perf {
                ring, ticks, signals, ..
            } => {
                let in_kernel = signals.kernel.as_mut();
                // Where none ticks in the kernel, ticks that fell there come to nothing.
                let unseen = in_kernel.is_none();
                let (event, ticks) = match in_kernel {
                    Some((kernel, ticks)) if tick == Tick::Told => ((*kernel).as_fd(), ticks),
                    _ => (ring.event(), ticks),
                };
                let past = ticks.next(event, period, &mut self.random);
                if unseen { past } else { 0 }
            }
            How::Look { cpu, start, slot } => {
                let count = looked_since(cpu, *start);
                let reached = (count / period).saturating_sub(CATCH_UP).max(*slot + 1);
                let past = reached - *slot - 1;
                *slot = reached;
                past
            }
        }
    }
}

fn perf_events(kind: Kind, tid: Tid, period: u64, signal: Option<i32>) -> Option<How> {
    let open = |mut attr| sys::perf_event_open(&mut attr, tid as i32, -1).ok();
    // Without a signal it would not be known where the thread is when the tracer comes.
    let signal = signal.filter(|_| kind != Kind::Look)?;
    let mut main = attr(Mode::User, period.max(SOON));
    main.__bindgen_anon_2.wakeup_events = SIGNALS_TOLD;
    let ring = Ring::new(open(main)?, RING_PAGES).ok()?;
    sys::signal_ticks(ring.event(), tid, signal).ok()?;
    let soon = |config: u32, period: u64| {
        let mut attr = attr(Mode::User, period);
        tidings::ask_for_ticks_only(&mut attr);
        attr.config = config.into();
        let event = open(attr)?;
        sys::signal_ticks(event.as_fd(), tid, signal).ok()?;
        Some(event)
    };
    let soon = [
        soon(perf::PERF_COUNT_SW_PAGE_FAULTS, 1)?,
        soon(perf::PERF_COUNT_SW_CPU_CLOCK, SOON)?,
    ];
    let mut kernel = None;
    if kind == Kind::Perf {
        let mut attr = attr(Mode::Kernel, period.max(SOON));
        tidings::ask_for_ticks_only(&mut attr);
        attr.sample_type |= u64::from(perf::PERF_SAMPLE_REGS_USER);
        attr.sample_regs_user = PERF_REGS;
        kernel = open(attr).filter(|event| sys::perf_set_output(event.as_fd(), ring.event()).is_ok());
    }
    Some(How::Perf {
        ring,
        ticks: Distances::default(),
        signals: Signals {
            kernel: kernel.map(|event| (event, Distances::default())),
            soon,
            returns: None,
            number: signal,
            tid,
        },
        stopped: 0,
        counted: [0; 2],
    })
}

/// CPU time of a thread since `start`, ns.
fn looked_since(cpu: &File, start: Option<u64>) -> u64 {
    start.map_or(0, |start| looked_up(cpu).saturating_sub(start))
}

/// CPU time of a thread, ns: the first number of its schedstat; 0 once it has ended.
fn looked_up(cpu: &File) -> u64 {
    let mut text = [0; 64];
    let n = cpu.read_at(&mut text, 0).unwrap_or(0);
    let word = text[..n].split(|c| *c == b' ').next().unwrap_or_default();
    std::str::from_utf8(word).ok().and_then(|w| w.parse().ok()).unwrap_or(0)
}
