//! A thread's sampling timer: perf events of its own, or its CPU time read from /proc.
//!
//! Where possible, a perf event sends its tick to the thread as a signal (F_SETSIG, F_OWNER_TID in fcntl(2)). It ticks
//! in user code only, so that it never interrupts a system call, and a traced thread stops before it gets the signal:
//! at the tick itself, however late the tracer reacts. The signal is one that is ignored by default and that the
//! program does not handle: the kernel reports those to a tracer too (kernel/signal.c, sig_ignored), and if we are
//! killed in between, the signal has no effect.
//!
//! A second event ticks in the kernel. The thread is not stopped then, since that would cut its system call short (a
//! `write` returns with a part written): the event records the user registers, and the tracer reads the stack while the
//! thread sleeps in that same call. If it does not sleep, more events make it stop as soon as it returns to user code
//! ([`ThreadTimer::stop_on_user_return`]): a breakpoint at the return address of the call; its next page fault, which a
//! signal does not disturb; and short ticks, in case both are missed. The two ticking events are independent, so that
//! user and kernel mode are both sampled fairly.
//!
//! Where no signal or no perf event is available, the thread's CPU time is polled, and the tracer stops it when a
//! sample falls due (tracer/polled.rs).

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::arch::{PERF_REGS, PerfRegs};
use crate::capture::common::jitter::{RUN, TickSchedule};
use crate::capture::common::perf_ring::Ring;
use crate::capture::common::rng::Rng;
use crate::capture::common::sideband;
use crate::capture::common::sideband::SidebandRecord;
use crate::event::{Pid, Tid};
use crate::sys;
use crate::sys::perf::perf;
use crate::sys::procfs::{SchedStat, TickSignal};

/// The kinds of timers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimerKind {
    /// Perf events that count all CPU time.
    Perf,
    /// A perf event that ticks in user code only: all that perf_event_paranoid 2 permits to an ordinary user.
    PerfUser,
    /// No perf events: CPU time is read from /proc.
    Procfs,
}

impl TimerKind {
    /// The best kind permitted here.
    pub fn probe() -> TimerKind {
        let open = |mode| sys::perf::perf_event_open(&mut attr(mode, 1_000_000), 0, -1).is_ok();
        if open(CpuMode::Kernel) {
            TimerKind::Perf
        } else if open(CpuMode::User) {
            TimerKind::PerfUser
        } else {
            TimerKind::Procfs
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            TimerKind::Perf => "cpu-clock",
            TimerKind::PerfUser => "cpu-clock:u",
            TimerKind::Procfs => "cpu-time",
        }
    }
}

/// In which mode a perf event ticks. It counts the CPU time of both.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CpuMode {
    User,
    Kernel,
}

fn attr(mode: CpuMode, period: u64) -> perf::perf_event_attr {
    let mut attr = perf::perf_event_attr {
        type_: perf::PERF_TYPE_SOFTWARE,
        config: perf::PERF_COUNT_SW_CPU_CLOCK.into(),
        ..Default::default()
    };
    sideband::request_sideband(&mut attr);
    attr.__bindgen_anon_1.sample_period = period;
    attr.__bindgen_anon_2.wakeup_events = 1;
    attr.set_disabled(1);
    match mode {
        CpuMode::User => {
            attr.set_exclude_kernel(1);
            attr.set_exclude_hv(1);
        }
        CpuMode::Kernel => attr.set_exclude_user(1),
    }
    attr
}

/// Pages of a thread's ring. They hold some fifty mappings; if more come between two samples, the loss is reported.
const RING_PAGES: usize = 1;
/// Shortest period of a timer, ns.
const MIN_PERIOD: u64 = 20_000;
/// Ticks that stop the thread wake the tracer only every so many times: normally the stop itself wakes it.
const TICKS_PER_NOTIFICATION: u32 = 8;
/// Time that a thread takes from being resumed to its own code, ns.
const RESUME_GRACE: u64 = 10_000;
/// Samples that may be caught up with where CPU time is read from /proc: the kernel updates it in steps.
const MAX_BACKLOG: u64 = 8;

/// A thread's timer. Its periods are random, new ones every few ticks ([`TickSchedule`]).
pub struct ThreadTimer {
    source: TimerImpl,
    period: u64,
    rng: Rng,
}

/// The ticks of one perf event.
#[derive(Default)]
struct PeriodSchedule {
    ticks: TickSchedule,
    /// Ticks in this run, and how many of them are still to come.
    run: u32,
    left: u32,
}

impl PeriodSchedule {
    /// Starts the event; it ticks for the first time after `first` ns.
    fn begin(&mut self, event: BorrowedFd<'_>, first: u64, period: u64) {
        let first = first.max(MIN_PERIOD);
        self.ticks.begin(0, first, period);
        // If the thread has exited there is nothing to start.
        let _ = sys::perf::perf_set_period(event, first);
        let _ = sys::perf::perf_enable(event);
    }

    /// Called after a tick, while the thread is stopped. Returns how many ticks of the run that ends fell into the mode
    /// in which the event does not tick.
    fn next(&mut self, event: BorrowedFd<'_>, period: u64, rng: &mut Rng) -> u64 {
        if self.left > 0 {
            self.left -= 1;
            return 0;
        }
        let seen = u64::from(self.run.max(1));
        // Short runs at first: until then the interval is that to the first tick.
        self.run = (2 * self.run).clamp(1, RUN);
        self.left = self.run - 1;
        let count = sys::perf::read_count(event).unwrap_or(0);
        let passed = self.ticks.passed(count as i64).max(0) as u64;
        let interval = self.ticks.next_period(count, self.run, period, rng).max(MIN_PERIOD);
        self.ticks.set(count, interval, period);
        let _ = sys::perf::perf_set_period(event, interval); // the thread has ended
        passed.saturating_sub(seen)
    }
}

enum TimerImpl {
    Perf {
        ring: Ring,
        ticks: PeriodSchedule,
        /// Ticks in user code and stops the thread.
        signals: Signals,
        /// Until then the thread is in a stop of ours: ticks in the kernel say nothing about the program.
        stopped: u64,
        /// Times of the last counted ticks that were not handled yet: those that stop the thread, and others.
        counted: [u64; 2],
    },
    /// `start`: CPU time when sampling began; `None` when it is off. A sample falls due at the end of each period-long
    /// slot.
    Procfs { cpu: File, start: Option<u64>, slot: u64 },
}

/// The other events of a thread that is stopped by ticks.
struct Signals {
    /// Ticks in the kernel; writes to the same ring.
    kernel: Option<(OwnedFd, PeriodSchedule)>,
    /// Stop the thread as soon as it is in user code; usually disabled. The breakpoint is created for each address.
    user_return: [OwnedFd; 2],
    breakpoint: Option<OwnedFd>,
    number: i32,
    tid: Tid,
}

impl Signals {
    fn user_return(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.user_return.iter().chain(&self.breakpoint).map(AsFd::as_fd)
    }

    /// Makes the thread stop where its system call returns to. Does nothing if no debug register is free.
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
        self.breakpoint = None;
        let Ok(event) = sys::perf::perf_event_open(&mut attr, self.tid as i32, -1) else {
            return;
        };
        if sys::perf::signal_ticks(event.as_fd(), self.tid, self.number).is_ok()
            && sys::perf::perf_enable(event.as_fd()).is_ok()
        {
            self.breakpoint = Some(event);
        }
    }
}

/// The ticks of a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tick {
    /// Stops the thread.
    Stop,
    /// Is reported to the tracer only.
    Notified,
}

/// What the ring of a perf event contained.
#[derive(Default)]
pub struct TimerEvents {
    /// Ticks that stop the thread, and the time of the last one.
    pub stops: u64,
    pub stop_time: u64,
    /// Other ticks, and the user registers at the last one.
    pub ticks: u64,
    pub regs: Option<PerfRegs>,
    pub records: Vec<SidebandRecord>,
    /// Sideband records were lost.
    pub lost: bool,
}

impl ThreadTimer {
    /// A timer for a thread, not started yet: of this kind, or of kind `Procfs` if that fails (no usable signal, too
    /// many rings). `None`: the thread has exited.
    pub fn new(kind: TimerKind, pid: Pid, tid: Tid, period: u64, signal: TickSignal) -> Option<ThreadTimer> {
        let period = period.max(1);
        let rng = Rng::new(sys::clock::now() ^ u64::from(tid) << 32);
        let source = perf_events(kind, tid, period, signal.ok()).or_else(|| {
            let cpu = File::open(format!("/proc/{pid}/task/{tid}/schedstat")).ok()?;
            Some(TimerImpl::Procfs {
                cpu,
                start: None,
                slot: 0,
            })
        })?;
        Some(ThreadTimer { source, period, rng })
    }

    /// Readable after a tick that is reported to the tracer; `None` where ticks must be polled for.
    pub fn event(&self) -> Option<BorrowedFd<'_>> {
        match &self.source {
            TimerImpl::Perf { ring, .. } => Some(ring.event()),
            TimerImpl::Procfs { .. } => None,
        }
    }

    /// Does this descriptor, from a signal, belong to this timer?
    pub fn owns_descriptor(&self, descriptor: i32) -> bool {
        let is = |fd: BorrowedFd<'_>| fd.as_raw_fd() == descriptor;
        match &self.source {
            TimerImpl::Perf { ring, signals, .. } => is(ring.event()) || signals.user_return().any(is),
            TimerImpl::Procfs { .. } => false,
        }
    }

    /// Is this the descriptor of the thread's own clock, rather than of one of [`ThreadTimer::stop_on_user_return`]?
    pub fn is_tick(&self, descriptor: i32) -> bool {
        matches!(&self.source, TimerImpl::Perf { ring, .. } if ring.event().as_raw_fd() == descriptor)
    }

    /// Makes the thread stop as soon as it is in user code: at the return address in its user registers, if they are
    /// known. False if it cannot.
    pub fn stop_on_user_return(&mut self, regs: Option<&PerfRegs>) -> bool {
        let TimerImpl::Perf { signals, .. } = &mut self.source else {
            return false;
        };
        if let Some(ip) = regs.and_then(PerfRegs::call_returns_to) {
            signals.stop_at(ip);
        }
        signals
            .user_return()
            .map(sys::perf::perf_enable)
            .fold(false, |any, done| any | done.is_ok())
    }

    /// Cancels [`ThreadTimer::stop_on_user_return`]. The descriptors stay open: one of their signals may still be pending.
    pub fn cancel_stop(&self) {
        if let TimerImpl::Perf { signals, .. } = &self.source {
            for event in signals.user_return() {
                let _ = sys::perf::perf_disable(event); // the thread has ended
            }
        }
    }

    pub fn start(&mut self) {
        let period = self.period;
        match &mut self.source {
            TimerImpl::Perf {
                ring, ticks, signals, ..
            } => {
                if let Some((kernel, ticks)) = &mut signals.kernel {
                    // It keeps ticking at this interval while user code runs, so the interval must not be short.
                    ticks.begin(kernel.as_fd(), self.rng.between(period), period);
                }
                ticks.begin(ring.event(), self.rng.first(period), period);
            }
            TimerImpl::Procfs { cpu, start, .. } => *start = Some(read_cpu_time(cpu)),
        }
    }

    pub fn stop(&mut self) {
        match &mut self.source {
            TimerImpl::Perf { ring, signals, .. } => {
                // If the thread has exited there is nothing to stop.
                let _ = sys::perf::perf_disable(ring.event());
                if let Some((kernel, _)) = &signals.kernel {
                    let _ = sys::perf::perf_disable(kernel.as_fd());
                }
            }
            TimerImpl::Procfs { .. } => {} // no longer polled
        }
    }

    /// CPU time since the start, ns.
    pub fn count(&self) -> u64 {
        match &self.source {
            TimerImpl::Perf { ring, .. } => sys::perf::read_count(ring.event()).unwrap_or(0),
            TimerImpl::Procfs { cpu, start, .. } => cpu_time_since(cpu, *start),
        }
    }

    /// Adds what the perf events have recorded since the last call.
    pub fn drain_events(&mut self, events: &mut TimerEvents) {
        let period = self.period;
        let TimerImpl::Perf {
            ring, stopped, counted, ..
        } = &mut self.source
        else {
            return;
        };
        // Until a tick is handled, the event keeps ticking at the interval set last, which may be very short: of such
        // ticks one per period was due.
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
                let time = sideband::time_of_sample(body).unwrap_or(0);
                if mode == perf::PERF_RECORD_MISC_USER {
                    events.stops += counts(Tick::Stop, time);
                    events.stop_time = time;
                    *stopped = u64::MAX;
                } else if time >= *stopped {
                    let new = counts(Tick::Notified, time);
                    events.ticks += new;
                    if new > 0 {
                        events.regs = body.get(16..).and_then(PerfRegs::parse);
                    }
                }
            }
            _ => match sideband::decode(kind, misc, body) {
                Some(Ok(record)) => events.records.push(record),
                Some(Err(_)) => events.lost = true,
                None => {}
            },
        });
    }

    /// The tick that was reported has become a sample, or cannot: the next one reported is a new one.
    pub fn handled(&mut self, tick: Tick) {
        if let TimerImpl::Perf { counted, .. } = &mut self.source {
            counted[tick as usize] = 0;
        }
    }

    /// The thread was resumed after a tick, at this time.
    pub fn resumed(&mut self, time: u64) {
        if let TimerImpl::Perf { stopped, .. } = &mut self.source {
            *stopped = time + RESUME_GRACE;
        }
    }

    /// Current CPU time between two ticks that stop the thread, ns.
    pub fn next_period(&self) -> Option<u64> {
        match &self.source {
            TimerImpl::Perf { ticks, .. } => Some(ticks.ticks.current()),
            TimerImpl::Procfs { .. } => None,
        }
    }

    /// Is a sample due by the CPU time read from /proc?
    pub fn is_due(&self) -> bool {
        match self.source {
            TimerImpl::Procfs {
                start: Some(_), slot, ..
            } => self.count() >= (slot + 1) * self.period,
            _ => false,
        }
    }

    /// The due sample was taken, or cannot be: schedules the next. Returns how many fell due meanwhile and are lost,
    /// where no ticks report them.
    pub fn next(&mut self, tick: Tick) -> u64 {
        let period = self.period;
        match &mut self.source {
            TimerImpl::Perf {
                ring, ticks, signals, ..
            } => {
                let in_kernel = signals.kernel.as_mut();
                // Where no event ticks in the kernel, ticks that fell there are lost.
                let unseen = in_kernel.is_none();
                let (event, ticks) = match in_kernel {
                    Some((kernel, ticks)) if tick == Tick::Notified => ((*kernel).as_fd(), ticks),
                    _ => (ring.event(), ticks),
                };
                let past = ticks.next(event, period, &mut self.rng);
                if unseen { past } else { 0 }
            }
            TimerImpl::Procfs { cpu, start, slot } => {
                let count = cpu_time_since(cpu, *start);
                let reached = (count / period).saturating_sub(MAX_BACKLOG).max(*slot + 1);
                let past = reached - *slot - 1;
                *slot = reached;
                past
            }
        }
    }
}

fn perf_events(kind: TimerKind, tid: Tid, period: u64, signal: Option<i32>) -> Option<TimerImpl> {
    let open = |mut attr| sys::perf::perf_event_open(&mut attr, tid as i32, -1).ok();
    // Without a signal the thread's location at the tick would be lost by the time the tracer reacts.
    let signal = signal.filter(|_| kind != TimerKind::Procfs)?;
    let mut main = attr(CpuMode::User, period.max(MIN_PERIOD));
    main.__bindgen_anon_2.wakeup_events = TICKS_PER_NOTIFICATION;
    let ring = Ring::new(open(main)?, RING_PAGES).ok()?;
    sys::perf::signal_ticks(ring.event(), tid, signal).ok()?;
    let user_return = |config: u32, period: u64| {
        let mut attr = attr(CpuMode::User, period);
        sideband::disable_sideband(&mut attr);
        attr.config = config.into();
        let event = open(attr)?;
        sys::perf::signal_ticks(event.as_fd(), tid, signal).ok()?;
        Some(event)
    };
    let user_return = [
        user_return(perf::PERF_COUNT_SW_PAGE_FAULTS, 1)?,
        user_return(perf::PERF_COUNT_SW_CPU_CLOCK, MIN_PERIOD)?,
    ];
    let mut kernel = None;
    if kind == TimerKind::Perf {
        let mut attr = attr(CpuMode::Kernel, period.max(MIN_PERIOD));
        sideband::disable_sideband(&mut attr);
        attr.sample_type |= u64::from(perf::PERF_SAMPLE_REGS_USER);
        attr.sample_regs_user = PERF_REGS;
        kernel = open(attr).filter(|event| sys::perf::perf_set_output(event.as_fd(), ring.event()).is_ok());
    }
    Some(TimerImpl::Perf {
        ring,
        ticks: PeriodSchedule::default(),
        signals: Signals {
            kernel: kernel.map(|event| (event, PeriodSchedule::default())),
            user_return,
            breakpoint: None,
            number: signal,
            tid,
        },
        stopped: 0,
        counted: [0; 2],
    })
}

/// CPU time of a thread since `start`, ns.
fn cpu_time_since(cpu: &File, start: Option<u64>) -> u64 {
    start.map_or(0, |start| read_cpu_time(cpu).saturating_sub(start))
}

/// CPU time of a thread, ns; 0 once it has ended.
fn read_cpu_time(cpu: &File) -> u64 {
    SchedStat::read(cpu).map_or(0, |stat| stat.cpu_time)
}
