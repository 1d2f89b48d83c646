//! Native stacks of single threads, for the `stacktrace` package.

use std::sync::atomic::{AtomicPtr, Ordering};

use nativeprof::in_process::thread_stack::{StackEntry, StackSampler, TIMEOUT, ThreadStack};
use pyo3::prelude::*;

static STACKS: AtomicPtr<StackSampler> = AtomicPtr::new(std::ptr::null_mut());

/// The one of this process: a forked child makes its own. The caller holds the interpreter's lock, so that no other thread makes
/// another one meanwhile.
fn stacks(_: Python<'_>) -> Option<&'static StackSampler> {
    // SAFETY: null, or made below and never freed.
    let known = unsafe { STACKS.load(Ordering::Acquire).as_ref() };
    known.filter(|s| s.is_current_process()).or_else(|| {
        let made: &StackSampler = Box::leak(Box::new(StackSampler::new().ok()?));
        STACKS.store(std::ptr::from_ref(made).cast_mut(), Ordering::Release);
        Some(made)
    })
}

/// Address, name, offset from the function's start, and whether it represents Python.
type StackRow = (u64, String, u64, bool);

fn row(e: &StackEntry) -> StackRow {
    (e.address, e.name.to_string(), e.address.wrapping_sub(e.start), false)
}

/// Puts one entry in the place of each run of the interpreter's own frames that begins with its bytecode loop. The
/// innermost frame stays as it is: a thread is somewhere in native code whatever it runs.
fn fold(entries: &[StackEntry]) -> Vec<StackRow> {
    let (mut rows, mut i) = (Vec::with_capacity(entries.len()), 0);
    while i < entries.len() {
        let run = match i {
            0 => 0,
            _ if entries[i].is_eval || entries[i - 1].is_eval => {
                entries[i..].iter().take_while(|e| e.is_interpreter).count()
            }
            _ => 0,
        };
        if run == 0 {
            rows.push(row(&entries[i]));
            i += 1;
        } else {
            let (address, _, offset, _) = row(&entries[i]);
            rows.push((address, format!("<skipped {run} Python entries>"), offset, true));
            i += run;
        }
    }
    rows
}

/// The native stack of a thread as (addr, name, offset, is_python), innermost first; empty if there is no such thread
/// or it does not answer.
///
/// The interpreter's lock is kept for the first half millisecond of waiting: getting it back from a thread that runs
/// bytecode would take ten times as long. The signal's handler does not need it.
#[pyfunction]
pub fn thread_stack(py: Python<'_>, tid: u64, maxdepth: usize, show_python: bool) -> Vec<StackRow> {
    let Some(stacks) = stacks(py) else { return Vec::new() };
    let entries = match stacks.get(tid, maxdepth) {
        ThreadStack::Stack(entries) => entries,
        ThreadStack::Late(tid) => py.detach(|| stacks.later(tid, maxdepth, TIMEOUT)),
    };
    if show_python {
        entries.iter().map(row).collect()
    } else {
        fold(&entries)
    }
}
