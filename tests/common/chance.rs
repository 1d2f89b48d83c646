//! Checks that can fail by chance, or because the machine was busy with something else: they are repeated.
//!
//! Shares of samples are compared with bands of some standard deviations, for each interpreter and backend: hundreds of
//! comparisons, of which one may fail in a correct program. And if the host takes the CPUs for a moment, or other
//! programs run, samples are lost and threads starve. What must never happen (an impossible stack, a wrong count) is
//! checked with `assert!`, and is not repeated.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any, resume_unwind};

/// How often a check that can fail by chance is tried.
const ATTEMPTS: usize = 3;

thread_local! {
    static FAILED: Cell<usize> = const { Cell::new(0) };
}

/// How much longer than at first this attempt should measure: a busy machine leaves the programs little time.
pub fn patience() -> u32 {
    4u32.pow(FAILED.get() as u32)
}

/// The payload of a panic of [`assert_likely`].
struct Unlikely;

/// Like `assert!`, for what can fail by chance: [`repeated`] tries again.
macro_rules! assert_likely {
    ($holds:expr, $($message:tt)+) => {
        let holds: bool = $holds;
        if !holds {
            $crate::common::chance::fail(&format!($($message)+));
        }
    };
}
pub(crate) use assert_likely;

/// Ends this attempt; `message` says what was seen.
pub fn fail(message: &str) -> ! {
    eprintln!("by chance or on a busy machine: {message}");
    panic_any(Unlikely);
}

/// How one try of a check ended.
pub enum Attempt {
    Passed,
    /// An `assert_likely!` failed.
    Unlikely,
    Failed,
}

/// Runs `test` once.
pub fn attempt(test: impl Fn()) -> Attempt {
    FAILED.set(0);
    match catch_unwind(AssertUnwindSafe(test)) {
        Ok(()) => Attempt::Passed,
        Err(payload) if payload.is::<Unlikely>() => Attempt::Unlikely,
        Err(_) => Attempt::Failed,
    }
}

/// Runs `test`, and again if an `assert_likely!` failed. Fails if all attempts fail, and at once if it panics otherwise.
pub fn repeated<T>(test: impl Fn() -> T) -> T {
    FAILED.set(0);
    loop {
        let payload = match catch_unwind(AssertUnwindSafe(&test)) {
            Ok(done) => return done,
            Err(payload) => payload,
        };
        let failed = FAILED.get() + 1;
        FAILED.set(failed);
        if failed == ATTEMPTS || !payload.is::<Unlikely>() {
            resume_unwind(payload);
        }
        eprintln!("NOTE: tried again: {failed} of {ATTEMPTS} attempts failed");
    }
}
