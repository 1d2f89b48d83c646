//! `--attribute-workers`: native threads below the Python code that they work for. The function on a worker's stack says which
//! that is.
//!
//! Needs what the other live tests need.

use std::process::Command;

use nativeprof::profile::model::{Frame, FrameKind};

use common::chance::{assert_likely, repeated};
use common::pythons::{some_at_a_time, third};
use common::recording::{Recording, attach, nativeprof};
use common::{Program, Python, live, programs, pythons};

mod common;

/// How the native threads of `worker_pools.py` get their work. With each Python the first ones, with the newest one all.
const WAITING: &[&str] = &["waiting-heap", "waiting", "waiting-shared", "new-threads"];
/// The same where threads spin between jobs.
const SPINNING: &[&str] = &["spinning-shared", "spinning"];
/// Functions of jobs, and who calls for them.
const JOBS: &[(&str, &str)] = &[("t_first_job", "first_caller"), ("t_second_job", "second_caller")];

fn script(python: &Python, pool: &str) -> Command {
    let mut command = python.script("worker_pools.py");
    command.arg(programs::worker_pool()).arg(pool);
    command
}

/// Is the function below the seam, and `caller` above?
fn is_below(stack: &[&Frame], job: &str, caller: &str) -> bool {
    let Some(seam) = stack.iter().position(|f| f.kind == FrameKind::Worker) else {
        return false;
    };
    let (above, below) = stack.split_at(seam);
    let is_caller = |f: &&Frame| f.kind == FrameKind::Python && f.name == caller;
    above.iter().any(is_caller) && below.iter().any(|f| f.name == job)
}

/// Of the samples of each job, almost all are below its caller.
fn check_callers(r: &Recording, case: &str) {
    for (job, caller) in JOBS {
        let all = r.with(job);
        assert_likely!(all >= 50, "{case}: {all} samples of {job}\n{}", r.stderr);
        let right = r.matching(|stack| is_below(stack, job, caller));
        let wrong = |stack: &[&Frame]| stack.iter().any(|f| f.name == *job) && !is_below(stack, job, caller);
        assert_likely!(
            right * 100 >= all * 99,
            "{case}: {right} of {all} samples of {job} are below {caller}, not these:\n{}",
            r.examples(wrong)
        );
    }
    // What a worker does is below the call into its library, where that was seen.
    let direct = r.matching(|stack| {
        let seam = stack.iter().position(|f| f.kind == FrameKind::Worker);
        seam.is_some_and(|at| stack[at - 1].kind == FrameKind::Native)
    });
    assert_likely!(direct > 0, "{case}: no call into the library: {}", r.examples(|_| true));
}

fn check(python: &Python, pools: &[&str]) {
    let pools = if python.exe == common::newest_python().exe {
        pools
    } else {
        &pools[..1]
    };
    for pool in pools {
        let case = format!("{}, {pool}", python.name);
        let program = Program::start(script(python, pool));
        let r = attach(program.pid(), &["--backend", "ebpf", "--attribute-workers"]);
        drop(program);
        check_callers(&r, &case);
        r.check_lost(&case);
    }
}

#[test]
fn workers_stand_below_their_callers() {
    let _live = live();
    // One program at a time: on Linux 6.18, two that wake each other's threads this often keep even the kernel's own threads
    // from running, for up to a minute.
    some_at_a_time(1, third(1, pythons()), |p| &p.name, |python| check(python, WAITING));
    some_at_a_time(1, third(0, pythons()), |p| &p.name, |python| check(python, SPINNING));
}

/// The registers of the thread that created a worker are still on the worker's stack. They do not say that it works for it.
/// Here nothing else does: the workers spin, and jobs are on the heap.
#[test]
fn who_created_a_worker_is_not_its_caller() {
    let _live = live();
    repeated(|| {
        let program = Program::start(script(common::newest_python(), "spinning-heap-shared"));
        let r = attach(program.pid(), &["--backend", "ebpf", "--attribute-workers"]);
        let of_workers = r.matching(|stack| stack.iter().any(|f| f.name == "t_spin" || f.name == "t_do"));
        let seam = |stack: &[&Frame]| stack.iter().any(|f| f.kind == FrameKind::Worker);
        let attributed = r.matching(seam);
        assert_likely!(of_workers >= 100, "{of_workers} samples of workers: {}", r.stderr);
        // The first ones are taken before the stack of a worker has been seen.
        assert_likely!(
            attributed * 2 <= of_workers,
            "{attributed} of {of_workers} samples of workers are below other threads:\n{}",
            r.examples(seam)
        );
    });
}

#[test]
fn only_if_wanted() {
    let _live = live();
    repeated(|| {
        let program = Program::start(script(common::newest_python(), "waiting"));
        let r = attach(program.pid(), &["--backend", "ebpf"]);
        assert_likely!(r.with("t_first_job") > 0, "{}", r.stderr);
        let seam = |stack: &[&Frame]| stack.iter().any(|f| f.kind == FrameKind::Worker);
        assert_eq!(r.matching(seam), 0, "{}", r.examples(seam));
    });
}

#[test]
fn what_is_not_possible_says_why() {
    for (words, said) in [
        (
            &["--backend", "ptrace"][..],
            "the ptrace backend does not support --attribute-workers",
        ),
        (&["--mode", "off-cpu"], "--attribute-workers needs CPU time"),
    ] {
        let mut command = nativeprof(&["record", "--attribute-workers", "-o", "/dev/null", "-f", "json"]);
        let done = command
            .args(words)
            .args(["--", "true"])
            .output()
            .expect("nativeprof starts");
        let stderr = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && stderr.contains(said), "{words:?}: {stderr}");
    }
}
