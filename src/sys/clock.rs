//! Clocks.

#![allow(unsafe_code)]

/// CLOCK_MONOTONIC, ns.
pub fn now() -> u64 {
    clock(libc::CLOCK_MONOTONIC)
}

/// CPU time of this process, ns.
pub fn process_cpu_time() -> u64 {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// CPU time of a process with all its threads, including exited ones, ns; `None` if there is no such process.
pub fn cpu_time_of(pid: u32) -> Option<u64> {
    // include/linux/posix-timers.h, make_process_cpuclock: the number inverted, above three bits of which 2 is
    // CPUCLOCK_SCHED.
    read_clock(!(pid as libc::clockid_t) << 3 | 2)
}

fn clock(id: libc::clockid_t) -> u64 {
    read_clock(id).unwrap_or(0)
}

/// How often the kernel's clock ticks (CONFIG_HZ), per second: the coarse clock advances with each tick.
pub fn tick_rate() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid pointer for the result.
    let r = unsafe { libc::clock_getres(libc::CLOCK_MONOTONIC_COARSE, &mut t) };
    let tick = if r == 0 && t.tv_sec == 0 { t.tv_nsec as u64 } else { 0 };
    // The kernel rounds the length of a tick down. 100 is the least of its choices.
    1_000_000_000u64.checked_div(tick).unwrap_or(100).max(1)
}

/// Time on a clock, ns; `None` if there is no such clock (any more).
pub fn read_clock(id: libc::clockid_t) -> Option<u64> {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid pointer for the result.
    let r = unsafe { libc::clock_gettime(id, &mut t) };
    (r == 0).then_some(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}
