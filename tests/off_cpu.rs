//! The complete time of threads: running, runnable, waiting and for what, by programs that wait in known ways.
//!
//! Needs what the other live tests need, and a kernel that can take stacks at switch-in (Linux 6.18 with BTF). On others
//! the refusal is tested.

use std::collections::BTreeMap;

use nativeprof::capture::ebpf::off_cpu;
use nativeprof::tree::profile::FrameKind;

use common::recording::{Recording, attach, nativeprof};
use common::{Program, Python, each_python, live};

mod common;

/// Functions of waits.py, the state that they bring about, and its least share of their time. It is small: they also wait
/// for the interpreter's lock, which two others want all the time, and for a CPU.
const ROLES: &[(&str, &str, f64)] = &[
    ("w_sleep", "[waiting: sleep]", 0.05),
    ("w_short", "[waiting: sleep]", 0.0),
    ("w_lock", "[waiting: lock]", 0.95),
    ("w_read", "[waiting: read pipe]", 0.01),
    ("w_poll", "[waiting: poll]", 0.05),
    ("w_feed", "[waiting: sleep]", 0.05),
];
const SPINNERS: &[&str] = &["w_spin_one", "w_spin_two"];
/// Ways to wait that a state may stand for in threads that want the interpreter's lock.
const OTHER_STATES: &[&str] = &["[runnable]", "[waiting: gil]"];

/// Wall time below a function by the state it was spent in, ns; `""`: running.
fn states(r: &Recording, role: &str) -> BTreeMap<String, u64> {
    let p = &r.profile;
    let wall = p.find_value("wall").expect("wall time is recorded");
    let mut states = BTreeMap::new();
    for (at, own) in p.own_amounts(wall).into_iter().enumerate().filter(|(_, own)| *own > 0) {
        let mut up = at;
        let mut below = false;
        while up > 0 {
            below |= p.frames[p.nodes[up].frame as usize].name == role;
            up = p.nodes[up].parent as usize;
        }
        if below {
            let leaf = &p.frames[p.nodes[at].frame as usize];
            let state = if leaf.kind == FrameKind::State {
                leaf.name.as_str()
            } else {
                ""
            };
            *states.entry(state.to_string()).or_default() += own;
        }
    }
    states
}

fn check(python: &Python) {
    let name = &python.name;
    let mut program = Program::start(python.script("waits.py"));
    let r = attach(
        program.pid(),
        &["--backend", "ebpf", "--mode", "wall", "-r", "200", "-d", "2"],
    );
    drop(program.finish());
    let q = &r.profile.meta.quality;
    // Ticks that meet one of our own programs on their CPU are lost, and counted.
    assert!(q.lost * 200 <= q.taken, "{name}: {}", r.stderr);
    // At the end threads are read in place, and one that moves on meanwhile has no stack.
    let moved_on = 2 * (ROLES.len() + SPINNERS.len()) as u64;
    let partial = q.partial.saturating_sub(moved_on);
    assert!(partial * 1000 <= q.taken, "{name}: {}", r.stderr);
    let duration = r.profile.meta.duration * 1e9;
    // Before 3.7 it is not known where the lock is, only how it is made.
    let gil = match python.minor {
        ..7 => "[waiting: condition]",
        _ => "[waiting: gil]",
    };
    for role in ROLES.iter().map(|r| r.0).chain(SPINNERS.iter().copied()) {
        let states = states(&r, role);
        let total: u64 = states.values().sum();
        let share = total as f64 / duration;
        assert!(
            (0.95..1.03).contains(&share),
            "{name}: {share:.3} of the time of {role} is accounted for: {states:?}\n{}",
            r.stderr
        );
    }
    for (role, state, least) in ROLES {
        let states = states(&r, role);
        let share = states.get(*state).copied().unwrap_or(0) as f64 / duration;
        assert!(
            share >= *least,
            "{name}: {role} was {share:.3} of its time {state}: {states:?}"
        );
        let mut known = vec![*state, "", gil];
        known.extend(OTHER_STATES);
        let unknown: u64 = states
            .iter()
            .filter(|(s, _)| !known.contains(&s.as_str()))
            .map(|(_, t)| t)
            .sum();
        assert!((unknown as f64) < 0.02 * duration, "{name}: {role}: {states:?}");
    }
    // Two threads that both always want the lock: one of them waits for it, or for a CPU, at any time.
    let spinning: Vec<_> = SPINNERS.iter().map(|role| states(&r, role)).collect();
    let of = |state: &str| spinning.iter().filter_map(|s| s.get(state)).sum::<u64>() as f64 / duration;
    assert!(of(gil) > 0.05, "{name}: {spinning:?}");
    assert!(of("") < 1.02, "{name}: one of them runs at a time: {spinning:?}");
}

#[test]
fn all_time_of_threads_is_accounted_for() {
    let _live = live();
    if let Err(e) = off_cpu::check() {
        let refused = nativeprof(&[
            "record",
            "--mode",
            "wall",
            "-o",
            "/dev/null",
            "-f",
            "json",
            "--",
            "true",
        ])
        .output();
        let said = String::from_utf8_lossy(&refused.expect("nativeprof starts").stderr).into_owned();
        assert!(said.contains(&e.why), "{said}");
        return;
    }
    each_python(check);
}

#[test]
fn what_cannot_be_done_is_refused() {
    for (words, why) in [
        (
            &["--mode", "wall", "--backend", "ptrace"][..],
            "ptrace sees threads only while they run",
        ),
        (
            &["--mode", "off-cpu", "--save-tape", "x.tape"],
            "a tape cannot hold off-CPU time",
        ),
        (&["--mode", "sleep"], "known modes: cpu, off-cpu, wall"),
    ] {
        let mut command = nativeprof(&["record", "-o", "/dev/null", "-f", "json"]);
        let done = command
            .args(words)
            .args(["--", "true"])
            .output()
            .expect("nativeprof starts");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(!done.status.success() && said.contains(why), "{words:?}: {said}");
    }
}
