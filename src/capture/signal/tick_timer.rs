//! What interrupts a thread when samples of its CPU time are due: a timer of its CPU time (timer_create(2)), or a perf event.
//!
//! The kernel checks timers of CPU time at its clock ticks (CONFIG_HZ, 100 to 1000 a second), so they keep no higher rate than
//! that. A perf event has a timer of high resolution, and needs a permission. It sends its ticks as [`EVENT_SIGNAL`]: that is
//! ignored where there is no handler, so a tick that is pending when the program calls `exec` has no effect; and as it is no
//! real-time signal it does not queue, so that a full queue (RLIMIT_SIGPENDING) does not make the kernel send SIGIO, which
//! would end the process (fs/fcntl.c, send_sigio_to_task, Linux 6.18).

use std::io;
use std::os::fd::AsFd;

use super::handler;
use crate::error::{Error, ErrorKind};
use crate::event::Tid;
use crate::sys;
use crate::sys::files::ClosedAtFork;
use crate::sys::perf::{self, perf as abi};
use crate::sys::threads::CpuTimer;

/// The signal of perf events: of those that are ignored by default, the one that programs use least.
pub const EVENT_SIGNAL: i32 = libc::SIGURG;
/// Shortest time to a tick of a perf event, ns (kernel/events/core.c, perf_swevent_start_hrtimer, Linux 6.18).
const MIN_FIRST: u64 = 10_000;

/// A thread's timer; it is deleted when dropped.
#[derive(Debug)]
pub enum TickTimer {
    Cpu { timer: CpuTimer, signal: i32 },
    Event(TickEvent),
}

impl TickTimer {
    /// Creates a timer of CPU time that is not armed, with this signal and value.
    ///
    /// # Errors
    /// EINVAL: the thread has exited. EAGAIN: too many timers and queued signals (RLIMIT_SIGPENDING).
    pub fn new(tid: Tid, signal: i32, value: u64) -> io::Result<TickTimer> {
        let timer = CpuTimer::new(tid, signal, value)?;
        Ok(TickTimer::Cpu { timer, signal })
    }

    /// The signal that it sends.
    pub fn signal(&self) -> i32 {
        match self {
            TickTimer::Cpu { signal, .. } => *signal,
            TickTimer::Event(_) => EVENT_SIGNAL,
        }
    }

    /// Arms it: it ticks after `first` ns of CPU time, then every `period` ns. Of an event only the first tick is set here: the
    /// handler then calls [`super::slot_pool::SlotPool::tick_on`].
    pub fn set(&self, first: u64, period: u64) {
        match self {
            TickTimer::Cpu { timer, .. } => timer.set(first, period),
            TickTimer::Event(event) => event.set(first),
        }
    }
}

/// A perf event of one thread's CPU time, in user code and in the kernel.
#[derive(Debug)]
pub struct TickEvent {
    fd: Option<ClosedAtFork>,
    number: u64,
}

impl TickEvent {
    /// Creates an event that does not tick. `tid` 0: of the calling thread.
    ///
    /// # Errors
    /// EACCES, EPERM: not permitted. ESRCH: the thread has exited. EMFILE: half of the descriptors that the process may have
    /// open are in use; the others are for the program.
    pub fn new(tid: Tid, period: u64) -> io::Result<TickEvent> {
        let mut attr = abi::perf_event_attr {
            type_: abi::PERF_TYPE_SOFTWARE,
            config: abi::PERF_COUNT_SW_TASK_CLOCK.into(),
            ..Default::default()
        };
        attr.__bindgen_anon_1.sample_period = period;
        attr.__bindgen_anon_2.wakeup_events = 1;
        attr.set_disabled(1);
        let event = perf::perf_event_open(&mut attr, tid as i32, -1)?;
        let too_many = || io::Error::from_raw_os_error(libc::EMFILE);
        if sys::files::are_scarce(event.as_fd()) {
            return Err(too_many());
        }
        let number = perf::perf_event_number(event.as_fd())?;
        let owner = if tid == 0 {
            sys::process::current_tid() as Tid
        } else {
            tid
        };
        perf::signal_ticks(event.as_fd(), owner, EVENT_SIGNAL)?;
        let fd = Some(ClosedAtFork::new(event).ok_or_else(too_many)?);
        Ok(TickEvent { fd, number })
    }

    fn set(&self, first: u64) {
        if let Some(fd) = &self.fd {
            // If the thread has exited there is nothing to start.
            let _ = perf::perf_set_period(fd.as_fd(), first.max(MIN_FIRST));
            let _ = perf::perf_enable_once(fd.as_fd());
        }
    }
}

impl Drop for TickEvent {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        if perf::perf_event_number(fd.as_fd()).ok() == Some(self.number) {
            // A child that was forked without its handlers (clone(2)) has the event too, and it would tick on.
            let _ = perf::perf_disable(fd.as_fd());
        } else {
            // The program has closed all descriptors that it did not know.
            fd.forget();
        }
    }
}

/// Whether timers of CPU time lose samples at a rate: from half of the kernel's own on, their ticks come late and together
/// where other programs want the CPU.
pub fn needs_events(rate: u64) -> bool {
    2 * rate > sys::clock::tick_rate()
}

/// Installs the handler of perf events, and tries whether there can be any.
///
/// # Errors
/// `AddrInUse`: the program handles their signal. Those of [`TickEvent::new`].
pub fn events_work() -> io::Result<()> {
    handler::install_for(EVENT_SIGNAL)?;
    TickEvent::new(0, MIN_FIRST).map(drop)
}

/// Samples per second of CPU time that can be taken of each thread, at most `rate`, and why they are fewer.
pub fn possible_rate(rate: u64) -> (u64, Option<Error>) {
    let tick_rate = sys::clock::tick_rate();
    if rate <= tick_rate {
        return (rate, None);
    }
    let limited = |why: String, hint: String| {
        let what = format!("CPU time is sampled {tick_rate} times a second, not {rate} times");
        let why = format!("{why}, and timers of CPU time tick with the kernel's clock, {tick_rate} times a second");
        let error = Error::new(ErrorKind::NotPermitted, what).why(why);
        (tick_rate, Some(error.hint(format!("{hint}rate={tick_rate}"))))
    };
    match events_work() {
        Ok(()) => (rate, None),
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => limited("the program handles SIGURG".into(), String::new()),
        Err(e) => {
            let is_refused = matches!(e.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::ENOSYS));
            let (why, hint) = match perf::paranoid_level() {
                Some(level @ 2..) if is_refused => (
                    format!("kernel.perf_event_paranoid is {level}"),
                    "sudo sysctl kernel.perf_event_paranoid=1, or ",
                ),
                _ if is_refused => (
                    format!("perf events are not permitted ({e})"),
                    "in a container: permit perf_event_open in its seccomp profile, or ",
                ),
                _ => (format!("no perf event can be opened ({e})"), ""),
            };
            limited(why, hint.into())
        }
    }
}
