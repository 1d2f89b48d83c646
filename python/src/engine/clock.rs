//! Time for events: the processor's time stamp counter where it runs at one rate, else `CLOCK_MONOTONIC`.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long the counter is compared with the system's clock at least before its rate is used.
const COMPARED: Duration = Duration::from_millis(2);

/// A clock of this process. Ticks of one clock are comparable between threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Time stamp counter; the kernel uses it as its clock source too.
    Counter,
    /// `CLOCK_MONOTONIC`, in nanoseconds.
    Monotonic,
}

/// Both clocks at one moment.
struct ClockPair {
    counter: u64,
    at: Instant,
}

fn baseline() -> &'static ClockPair {
    static BASELINE: OnceLock<ClockPair> = OnceLock::new();
    BASELINE.get_or_init(|| ClockPair {
        counter: counter(),
        at: Instant::now(),
    })
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has the instruction; Linux lets user code run it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn counter() -> u64 {
    0
}

/// Whether the counter runs at one rate whatever the processor does, and the kernel found it in step on all processors.
#[cfg(target_arch = "x86_64")]
fn is_steady() -> bool {
    use core::arch::x86_64::__cpuid;
    let is_invariant = __cpuid(0x8000_0000).eax >= 0x8000_0007 && __cpuid(0x8000_0007).edx & (1 << 8) != 0;
    let source = std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    is_invariant && source.is_ok_and(|s| s.trim() == "tsc")
}

#[cfg(not(target_arch = "x86_64"))]
fn is_steady() -> bool {
    false
}

impl Clock {
    /// The cheapest one that is right on this machine.
    pub fn best() -> Clock {
        static BEST: OnceLock<Clock> = OnceLock::new();
        *BEST.get_or_init(|| {
            baseline();
            if is_steady() { Clock::Counter } else { Clock::Monotonic }
        })
    }

    /// Ticks now.
    #[inline(always)]
    pub fn now(self) -> i64 {
        match self {
            Clock::Counter => counter() as i64,
            Clock::Monotonic => monotonic(),
        }
    }

    /// Nanoseconds per tick.
    pub fn nanoseconds(self) -> f64 {
        match self {
            Clock::Monotonic => 1.0,
            Clock::Counter => {
                let base = baseline();
                loop {
                    let (ticks, passed) = (counter().wrapping_sub(base.counter), base.at.elapsed());
                    if passed >= COMPARED && ticks > 0 {
                        return passed.as_nanos() as f64 / ticks as f64;
                    }
                    std::hint::spin_loop();
                }
            }
        }
    }
}

/// Nanoseconds of `CLOCK_MONOTONIC`.
#[inline(never)]
pub fn monotonic() -> i64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a timespec to write to; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec * 1_000_000_000 + t.tv_nsec
}

/// Nanoseconds of this thread's CPU time. A system call.
pub fn thread_cpu() -> i64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: as above.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    t.tv_sec * 1_000_000_000 + t.tv_nsec
}
