//! Ctrl-C, SIGTERM and SIGHUP.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};

static INTERRUPTS: AtomicU32 = AtomicU32::new(0);
/// This many signals end the process at once: two are easily sent in haste while the profile is being written.
const MAX_INTERRUPTS: u32 = 3;

extern "C" fn on_interrupt(signal: libc::c_int) {
    if INTERRUPTS.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_INTERRUPTS {
        // SAFETY: both are async-signal-safe; the default action is always valid.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }
}

/// From now on Ctrl-C (SIGINT), SIGTERM and SIGHUP are only counted, see `interrupts`; the third one ends the process.
pub fn install_interrupt_handler() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler does only what is async-signal-safe; the structure is fully initialized. Without
        // SA_RESTART, so that a wait ends at once.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_interrupt as *const () as usize;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// From now on Ctrl-C ends the process again.
pub fn restore_default_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the default action is always valid.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

pub fn interrupted() -> bool {
    interrupts() > 0
}

/// Number of such signals so far.
pub fn interrupts() -> u32 {
    INTERRUPTS.load(Ordering::Relaxed)
}
