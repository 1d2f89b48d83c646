//! Errors of the kernel on loading and attaching programs, with their cause and the fix.

use std::io;

use aya::programs::ProgramError;

use crate::error::{Error, ErrorKind};
use crate::privileges::checks;

/// The kernel refused: the cause, as far as it can be determined, and the fix.
pub fn not_permitted(what: &str, e: &io::Error) -> Error {
    checks::explain_refusal(&checks::SystemFacts::read(), e).error(what)
}

pub fn bpf_error(what: &str, e: impl std::error::Error + 'static) -> Error {
    let mut text = e.to_string();
    let mut refusal = None;
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(&e);
    let mut rejected = false;
    while let Some(s) = source {
        // The verifier's own errors are not a matter of privileges, though some are called "permission denied".
        if let Some(ProgramError::LoadError { verifier_log, .. }) = s.downcast_ref() {
            rejected |= !verifier_log.to_string().is_empty();
        }
        if let Some(io) = s.downcast_ref::<io::Error>() {
            refusal = Some(io).filter(|io| io.kind() == io::ErrorKind::PermissionDenied);
        }
        source = s.source();
        text = source.map_or(text.clone(), |s| format!("{text}: {s}"));
    }
    if let Some(e) = refusal.filter(|_| !rejected) {
        return not_permitted(what, e);
    }
    let last: Vec<&str> = text.lines().rev().take(3).collect();
    Error::new(ErrorKind::Unsupported, what.to_string())
        .why(last.into_iter().rev().collect::<Vec<_>>().join(" | "))
        .hint("run `nativeprof doctor` to see what works on this machine")
}
