//! Signals that end a recording, and signals that are passed on to the command that is recorded.

#![allow(unsafe_code)]

use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use super::spawn::GroupProbe;
use crate::event::Pid;

static INTERRUPTS: AtomicU32 = AtomicU32::new(0);
/// This many signals end the process at once: two are easily sent in haste while the profile is being written.
const MAX_INTERRUPTS: u32 = 3;

/// Signals that end a recording.
const ENDING: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
/// Signals that are only passed on.
const OTHERS: [libc::c_int; 3] = [libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];

/// The command that receives signals; 0: none.
static COMMAND: AtomicI32 = AtomicI32::new(0);
/// It is terminated when this process ends.
static ENDS_WITH_US: AtomicBool = AtomicBool::new(false);
/// Nothing is left to do but to wait for it.
static WAITING: AtomicBool = AtomicBool::new(false);
/// SIGHUP asks to read settings again.
static RENEWS_AT_HANGUP: AtomicBool = AtomicBool::new(false);
static HANGUPS: AtomicU32 = AtomicU32::new(0);
/// This process was started with SIGHUP ignored (nohup).
static IGNORES_HANGUP: AtomicBool = AtomicBool::new(false);

/// Handles a signal as `timeout` does with its command: one that was sent to this process only is passed on. One that
/// was sent to the whole process group (Ctrl-C, a closed terminal, `kill -- -PGID`) has reached the command already.
extern "C" fn on_signal(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the location is the calling thread's own; the kernel passes a valid structure (SA_SIGINFO).
    let (errno, code) = unsafe { (*libc::__errno_location(), (*info).si_code) };
    let command = COMMAND.load(Ordering::SeqCst);
    let is_ours = !OTHERS.contains(&signal);
    // Without a probe: of those signals the kernel sends itself only what comes from a terminal.
    let was_sent_to_group =
        || GroupProbe::has_received(signal).unwrap_or(code == libc::SI_KERNEL && signal != libc::SIGHUP);
    let is_for_command = command != 0 && !(is_ours && ENDS_WITH_US.load(Ordering::SeqCst));
    let passed_on = is_for_command && !was_sent_to_group();
    if passed_on {
        // SAFETY: two integers. The process has not been reaped, see `forget_command`.
        unsafe { libc::kill(command, signal) };
    }
    let ends_recording = match signal {
        libc::SIGHUP if RENEWS_AT_HANGUP.load(Ordering::SeqCst) => {
            HANGUPS.fetch_add(1, Ordering::Relaxed);
            false
        }
        // Many servers read their settings again: whether this one ends is seen when it does.
        libc::SIGHUP => !passed_on && !IGNORES_HANGUP.load(Ordering::SeqCst),
        _ => is_ours,
    };
    if ends_recording {
        let count = INTERRUPTS.fetch_add(1, Ordering::Relaxed) + 1;
        let ends_process = if is_for_command {
            // The command would be left alone. Only Ctrl-C may do that.
            let enough = count >= MAX_INTERRUPTS || WAITING.load(Ordering::SeqCst);
            signal == libc::SIGINT && !passed_on && enough
        } else {
            count >= MAX_INTERRUPTS
        };
        if ends_process {
            // SAFETY: all are async-signal-safe; the default action is always valid. The signal is blocked here.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                libc::raise(signal);
            }
        }
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// From now on Ctrl-C (SIGINT), SIGTERM and SIGHUP are only counted, see `interrupts`; the third one ends the process.
pub fn install_interrupt_handler() {
    ENDING.into_iter().for_each(install);
}

/// From now on SIGHUP is counted by [`hangups`] and ends nothing.
pub fn renew_at_hangup() {
    RENEWS_AT_HANGUP.store(true, Ordering::SeqCst);
}

/// Number of SIGHUP since [`renew_at_hangup`].
pub fn hangups() -> u32 {
    HANGUPS.load(Ordering::Relaxed)
}

/// Sends SIGHUP to a child: one of ours reads its settings again.
pub fn hang_up(child: &mut Child) {
    // A process that was waited for has no number any more; another one may have got it.
    if let (Ok(None), Ok(pid)) = (child.try_wait(), i32::try_from(child.id())) {
        // SAFETY: two integers; the process has not been reaped.
        unsafe { libc::kill(pid, libc::SIGHUP) };
    }
}

/// From now on signals that this process receives are passed on to a command that it has started. With `ends_with_us`
/// those that end a recording are not: the command is terminated when this process ends.
pub fn pass_on_to(command: Pid, ends_with_us: bool) {
    ENDS_WITH_US.store(ends_with_us, Ordering::SeqCst);
    COMMAND.store(command as i32, Ordering::SeqCst);
    OTHERS.into_iter().for_each(install);
}

/// From now on nothing is passed on. To be called before the command is reaped: another process may get its number
/// then.
pub fn forget_command() {
    COMMAND.store(0, Ordering::SeqCst);
}

/// From now on nothing is left to do but to wait for the command: Ctrl-C ends the process.
pub fn wait_for_command() {
    WAITING.store(true, Ordering::SeqCst);
}

fn install(signal: libc::c_int) {
    // SAFETY: the handler does only what is async-signal-safe; the structures are fully initialized. Without
    // SA_RESTART, so that a wait ends at once. No other signal interrupts the handler.
    unsafe {
        let (mut action, mut before): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
        action.sa_sigaction = on_signal as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        for other in ENDING.into_iter().chain(OTHERS) {
            libc::sigaddset(&mut action.sa_mask, other);
        }
        libc::sigaction(signal, &action, &mut before);
        if signal == libc::SIGHUP && before.sa_sigaction == libc::SIG_IGN {
            IGNORES_HANGUP.store(true, Ordering::SeqCst);
        }
    }
}

pub fn interrupted() -> bool {
    interrupts() > 0
}

/// Number of such signals so far.
pub fn interrupts() -> u32 {
    INTERRUPTS.load(Ordering::Relaxed)
}
