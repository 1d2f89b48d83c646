//! The complete time of threads: running, runnable and waiting, with the kind of wait, in programs with known waits.
//!
//! Needs what the other live tests need, and a kernel that can take stacks at switch-in (Linux 6.18 with BTF, or with kprobes).
//! On others the refusal is tested.

use std::collections::BTreeMap;

use nativeprof::capture::ebpf::switch_in;
use nativeprof::profile::gil_waits;
use nativeprof::profile::model::Profile;
use nativeprof::profile::waits;

use common::chance::{assert_likely, fail, patience, repeated};
use common::pythons::{each_of, each_with_backend, third};
use common::recording::{Recording, attach, nativeprof, record};
use common::{Program, Python, each_third_python, live, newest_python, pythons};

mod common;
#[path = "off_cpu/halted.rs"]
mod halted;

/// Functions of waits.py, the state that they cause, and its minimum share of their time. It is small: they also wait
/// for the GIL, which two others want all the time, and for a CPU.
const ROLES: &[(&str, &str, f64)] = &[
    ("w_sleep", "[waiting: sleep]", 0.05),
    ("w_short", "[waiting: sleep]", 0.0),
    ("w_lock", "[waiting: lock]", 0.95), // or with its owner
    ("w_read", "[waiting: read pipe]", 0.01),
    ("w_poll", "[waiting: read pipe]", 0.05),
    ("w_feed", "[waiting: sleep]", 0.05),
];
const SPINNERS: &[&str] = &["w_spin_one", "w_spin_two"];
/// Kinds of waits that threads which want the GIL may have instead.
const OTHER_STATES: &[&str] = &["[runnable]", "[waiting: gil]"];

/// Wall time below a function by the state it was spent in, ns, without what locks and conditions belong to: that is known where
/// functions have names. `""`: running.
fn states(r: &Recording, role: &str) -> BTreeMap<String, u64> {
    let mut states = BTreeMap::new();
    for (state, time) in r.states_below(role) {
        let without_object = ["lock", "condition"]
            .iter()
            .find(|kind| state.starts_with(&format!("[waiting: {kind} ")))
            .map_or(state.clone(), |kind| format!("[waiting: {kind}]"));
        *states.entry(without_object).or_default() += time;
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
    // Ticks that hit one of our own programs on their CPU are lost, and counted.
    assert_likely!(q.lost * 200 <= q.taken, "{name}: {}", r.stderr);
    // Sleeping threads are read at the end, and one that runs meanwhile has no stack.
    let moved_on = 2 * (ROLES.len() + SPINNERS.len()) as u64;
    let partial = q.partial.saturating_sub(moved_on);
    assert_likely!(partial * 1000 <= q.taken, "{name}: {}", r.stderr);
    let duration = r.profile.meta.duration * 1e9;
    // Before 3.7 the address of the GIL is not known, only how it is implemented.
    let gil = match python.minor {
        ..7 => "[waiting: condition]",
        _ => "[waiting: gil]",
    };
    for role in ROLES.iter().map(|r| r.0).chain(SPINNERS.iter().copied()) {
        let states = states(&r, role);
        let total: u64 = states.values().sum();
        let share = total as f64 / duration;
        assert_likely!(
            (0.95..1.03).contains(&share),
            "{name}: {share:.3} of the time of {role} is accounted for: {states:?}\n{}",
            r.stderr
        );
    }
    for (role, state, least) in ROLES {
        let states = states(&r, role);
        let share = states.get(*state).copied().unwrap_or(0) as f64 / duration;
        assert_likely!(
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
        assert_likely!((unknown as f64) < 0.02 * duration, "{name}: {role}: {states:?}");
    }
    // Two threads that both always want the GIL: one of them waits for it, or for a CPU, at any time.
    let spinning: Vec<_> = SPINNERS.iter().map(|role| states(&r, role)).collect();
    let of = |state: &str| spinning.iter().filter_map(|s| s.get(state)).sum::<u64>() as f64 / duration;
    if python.is_free_threaded() {
        assert!(of(gil) == 0.0, "{name}: the GIL is off: {spinning:?}");
        return;
    }
    assert_likely!(of(gil) > 0.05, "{name}: {spinning:?}");
    assert_likely!(of("") < 1.02, "{name}: one of them runs at a time: {spinning:?}");
}

#[test]
fn all_time_of_threads_is_accounted_for() {
    let _live = live();
    if let Err(e) = switch_in::check() {
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
    each_third_python(1, check);
}

/// Each wait for the GIL asks which thread held it. With many threads nothing may be lost for that.
#[test]
fn many_threads_that_want_the_interpreter_lock_lose_nothing() {
    let _live = live();
    if switch_in::check().is_err() {
        return;
    }
    const THREADS: u64 = 300;
    each_third_python(2, |python| {
        let name = &python.name;
        let mut command = python.script_with_gil("many_threads.py");
        command.args([&THREADS.to_string(), "threads"]);
        let mut program = Program::start(command);
        let r = attach(
            program.pid(),
            &["--backend", "ebpf", "--mode", "wall", "-r", "99", "-d", "1"],
        );
        drop(program.finish());
        let q = &r.profile.meta.quality;
        // Four fifths were lost when each wait read all threads.
        assert_likely!(q.lost * 100 <= q.taken, "{name}: {}", r.stderr);
        for (role, threads) in [("w_lock", THREADS / 2), ("w_sleep", THREADS / 2)] {
            let states = states(&r, role);
            let share = states.values().sum::<u64>() as f64 / (threads as f64 * r.profile.meta.duration * 1e9);
            assert_likely!(
                (0.95..1.05).contains(&share),
                "{name}: {share:.3} of the time of {role} is accounted for: {states:?}\n{}",
                r.stderr
            );
        }
    });
}

/// With ptrace: threads that sleep are read in place, at a fixed rate.
fn check_ptrace(python: &Python) {
    let name = &python.name;
    let mut program = Program::start(python.script_with_gil("waits.py"));
    let duration = (2 * patience()).to_string();
    let r = attach(
        program.pid(),
        &["--backend", "ptrace", "--mode", "wall", "-r", "100", "-d", &duration],
    );
    drop(program.finish());
    let duration = r.profile.meta.duration * 1e9;
    let gil = match python.minor {
        ..7 => "[waiting: condition]",
        _ => "[waiting: gil]",
    };
    for (role, state, _) in ROLES {
        let states = states(&r, role);
        let total: u64 = states.values().sum();
        let share = total as f64 / duration;
        // Samples are random times, and between two reads of a thread it may have slept or not.
        assert_likely!(
            (0.75..1.25).contains(&share),
            "{name}: {share:.3} of the time of {role} is accounted for: {states:?}\n{}",
            r.stderr
        );
        let known = [*state, "", gil, "[runnable]"];
        let unknown = states.iter().filter(|(state, _)| !known.contains(&state.as_str()));
        let unknown: u64 = unknown.map(|(_, time)| time).sum();
        assert_likely!((unknown as f64) < 0.05 * duration, "{name}: {role}: {states:?}");
        if *role == "w_lock" {
            let waited = states.get(*state).copied().unwrap_or(0);
            assert_likely!(waited as f64 > 0.9 * duration, "{name}: {states:?}");
        }
    }
    let spinning: Vec<_> = SPINNERS.iter().map(|role| states(&r, role)).collect();
    let of = |state: &str| spinning.iter().filter_map(|s| s.get(state)).sum::<u64>() as f64 / duration;
    assert_likely!(of(gil) > 0.1 && of("") > 0.02, "{name}: {spinning:?}\n{}", r.stderr);
}

#[test]
fn states_are_seen_with_ptrace() {
    let _live = live();
    each_of(third(0, pythons()), check_ptrace);
}

/// Threads whose names in the kernel are not UTF-8 have all their time, and stacks.
#[test]
fn names_that_are_not_utf8_hide_no_thread() {
    let _live = live();
    each_with_backend(third(1, pythons()), |python, backend| {
        let name = &python.name;
        if backend == "ebpf" && switch_in::check().is_err() {
            return;
        }
        let mut program = Program::start(python.script("undecodable_names.py"));
        let duration = patience().to_string();
        let words = ["--backend", backend, "--mode", "wall", "-r", "200", "-d", &duration];
        let r = attach(program.pid(), &words);
        program.finish();
        let q = &r.profile.meta.quality;
        assert_likely!(q.partial * 50 <= q.taken, "{name}: {}", r.stderr);
        let duration = r.profile.meta.duration * 1e9;
        for role in ["w_sleep", "w_lock", "w_main"] {
            let states = states(&r, role);
            let share = states.values().sum::<u64>() as f64 / duration;
            assert_likely!(
                (0.75..1.25).contains(&share),
                "{name}: {share:.3} of the time of {role}: {states:?}\n{}",
                r.stderr
            );
        }
    });
}

/// Waits for the interpreter lock by who held it: nearly all of it is one thread, and the function in which it holds the lock is
/// named.
fn check_gil_holder(python: &Python) {
    let name = &python.name;
    // Before 3.7 it is not known where the lock is.
    if python.minor < 7 {
        return;
    }
    let mut program = Program::start(python.script_with_gil("gil_holder.py"));
    let r = attach(
        program.pid(),
        &["--backend", "ebpf", "--mode", "wall", "-r", "200", "-d", "3"],
    );
    drop(program.finish());
    let profile = &r.profile;
    let wall = profile.find_value("wall").expect("wall time is recorded");
    let gil = gil_waits::of(profile, wall);
    let hog = gil.threads.iter().max_by_key(|t| t.held);
    let hog = hog.unwrap_or_else(|| fail(&format!("{name}: no thread held the lock\n{}", r.stderr)));
    let waiters: Vec<_> = gil.pairs.iter().filter(|p| p.waiter.1 != hog.tid).collect();
    let all: u64 = waiters.iter().map(|p| p.waited).sum();
    let of_hog = waiters.iter().filter(|p| p.holder == Some((hog.pid, hog.tid)));
    let for_hog: u64 = of_hog.clone().map(|p| p.waited).sum();
    assert_likely!(all as f64 > 0.2e9 * profile.meta.duration, "{name}: {gil:?}");
    assert_likely!(
        for_hog as f64 >= 0.9 * all as f64,
        "{name}: {for_hog} of {all}: {gil:?}"
    );
    let itself = gil.pairs.iter().find(|p| p.holder == Some(p.waiter));
    assert!(itself.is_none(), "{name}: a thread waits for itself: {gil:?}");
    let unknown = waiters.iter().filter(|p| p.holder.is_none());
    let unknown: u64 = unknown.map(|p| p.waited).sum();
    assert_likely!(unknown * 50 <= all, "{name}: {unknown} of {all}: {gil:?}");
    let longest = of_hog.flat_map(|p| &p.functions).max_by_key(|(_, time)| *time);
    let function = &longest.expect("stacks of the holder").0;
    assert!(
        function.starts_with("w_hog (") || function.starts_with("hold_lock ("),
        "{name}: {function}"
    );
    // The function that holds the lock is `hold_lock`, all the time that it runs.
    let held = gil
        .functions
        .iter()
        .max_by_key(|f| f.held)
        .expect("functions that held the lock");
    assert!(held.function.starts_with("hold_lock ("), "{name}: {gil:?}");
}

#[test]
fn holders_of_the_interpreter_lock_are_named() {
    let _live = live();
    if switch_in::check().is_ok() {
        each_third_python(0, check_gil_holder);
    }
}

/// Threads that are blocked when their process ends: their time and their stacks, and what the locks belong to.
#[test]
fn threads_that_exit_while_blocked_have_their_stacks() {
    let _live = live();
    if switch_in::check().is_err() {
        return;
    }
    each_third_python(1, |python| {
        let name = &python.name;
        let r = record(
            &["--backend", "ebpf", "--mode", "wall"],
            &python.script("blocked_at_exit.py"),
        );
        let wall = r.profile.find_value("wall").expect("wall time is recorded");
        let sites = waits::sites(&r.profile, wall);
        let has_function = |begin: &str| r.profile.frames.iter().any(|f| f.name.starts_with(begin));
        for (role, kind, owner, known_by) in [
            ("w_lock", "lock", "threading.Lock", "lock_PyThread_acquire_lock"),
            ("w_rlock", "lock", "threading.RLock", "rlock_acquire"),
            (
                "w_join",
                "lock",
                "Thread.join",
                if python.minor < 13 { "" } else { "ThreadHandle_join" },
            ),
            ("w_simple_queue", "lock", "queue.SimpleQueue", "_queue_SimpleQueue_get"),
            ("w_condition", "condition", "", ""),
            ("w_read", "read", "", ""),
        ] {
            let of_role = sites.iter().filter(|s| s.site.starts_with(&format!("{role} (")));
            let longest = of_role.max_by_key(|s| s.total);
            let Some(site) = longest.filter(|site| site.total > 900_000_000) else {
                fail(&format!("{name}: {role}: {sites:?}\n{}", r.stderr));
            };
            // Before 3.7 there is no simple queue.
            if role == "w_simple_queue" && python.minor < 7 {
                continue;
            }
            assert_eq!(site.kind, kind, "{name}: {role}: {site:?}");
            if !owner.is_empty() && has_function(known_by) {
                assert_eq!(site.object, owner, "{name}: {role}: {site:?}");
            }
            if role == "w_condition" {
                // (Before 3.11 functions have no qualified names.)
                let inner = site.site.split_once(" in ").map_or("", |(_, inner)| inner);
                assert!(inner.contains("wait (threading.py:"), "{name}: {site:?}");
            }
        }
    });
}

/// `--wakers`: below each wait is what ended it; `--min-blocked` leaves short intervals out.
#[test]
fn wakers_and_long_intervals() {
    let _live = live();
    if switch_in::check().is_err() {
        return;
    }
    each_third_python(2, |python| {
        let name = &python.name;
        let mut program = Program::start(python.script("waits.py"));
        let words = ["--backend", "ebpf", "--mode", "off-cpu", "-r", "200", "-d", "1"];
        let wakers = attach(program.pid(), &[&words[..], &["--wakers"]].concat());
        let long = attach(program.pid(), &[&words[..], &["--min-blocked", "4ms"]].concat());
        drop(program.finish());
        // The reader is woken by the thread that writes, sleeps by the timer.
        let p = &wakers.profile;
        let off_cpu = p.find_value("off_cpu").expect("off-CPU time is recorded");
        // Of the waits that ended while they were watched: the last one of each thread did not.
        let (mut by_feed, mut by_timer, mut sleeps, mut reads) = (0, 0, 0, 0);
        for (at, self_count) in p
            .self_amounts(off_cpu)
            .into_iter()
            .enumerate()
            .filter(|(_, self_count)| *self_count > 0)
        {
            let (mut up, mut path) = (at, Vec::new());
            while up > 0 {
                path.push(p.frames[p.nodes[up].frame as usize].name.as_str());
                up = p.nodes[up].parent as usize;
            }
            let has = |name: &str| path.contains(&name);
            if !path.iter().any(|name| name.starts_with("[woken by: ")) {
                continue;
            }
            if has("w_read") && has("[waiting: read pipe]") {
                reads += self_count;
                by_feed += if has("w_feed") { self_count } else { 0 };
            } else if has("w_sleep") && has("[waiting: sleep]") {
                sleeps += self_count;
                by_timer += if has("[woken by: timer interrupt]") {
                    self_count
                } else {
                    0
                };
            }
        }
        assert_likely!(by_feed * 10 >= reads * 9 && reads > 0, "{name}: {by_feed} of {reads}");
        assert_likely!(
            by_timer * 10 >= sleeps * 9 && sleeps > 0,
            "{name}: {by_timer} of {sleeps}"
        );
        let short = |p: &Profile| {
            let state = |node: u32| p.frames[p.nodes[node as usize].frame as usize].name.as_str();
            let lengths = p.timeline.iter().zip(&p.waits.lengths);
            lengths
                .filter(|(t, length)| state(t.node).starts_with("[waiting") && **length < 4_000_000)
                .count()
        };
        assert!(short(&long.profile) == 0, "{name}: {}", long.stderr);
        assert_likely!(!long.profile.timeline.is_empty(), "{name}: {}", long.stderr);
    });
}

/// With ptrace, which every machine has: how a wait was seen makes no difference here.
#[test]
fn sockets_are_named_by_their_other_end() {
    let _live = live();
    repeated(|| {
        let mut program = Program::start(newest_python().script("sockets.py"));
        let said = |word| {
            program
                .said
                .iter()
                .find_map(|line| line.strip_prefix(word))
                .expect("it says so")
        };
        let (port, path) = (said("PORT ").to_string(), said("PATH ").to_string());
        let r = attach(program.pid(), &["--backend", "ptrace", "--mode", "wall", "-d", "1"]);
        drop(program.finish());
        for (role, state) in [
            ("w_client", format!("[waiting: read socket 127.0.0.1:{port}]")),
            ("w_server", "[waiting: read socket 127.0.0.1]".to_string()),
            ("w_accept", format!("[waiting: accept 127.0.0.1:{port}]")),
            ("w_local", format!("[waiting: read socket {path}]")),
        ] {
            let states = states(&r, role);
            let waited = states.get(&state).copied().unwrap_or(0);
            assert_likely!(waited * 10 > states.values().sum::<u64>() * 9, "{role}: {states:?}");
            assert_likely!(waited > 0, "{role}: {states:?}\n{}", r.stderr);
        }
    });
}

/// What polls one descriptor, as a socket with a time-out does, waits as if it read it, wrote to it, connected or accepted.
#[test]
fn a_poll_of_one_descriptor_is_a_wait_for_it() {
    let _live = live();
    each_with_backend(pythons(), |python, backend| {
        if backend == "ebpf" && switch_in::check().is_err() {
            return;
        }
        let name = &python.name;
        let mut program = Program::start(python.script("polled.py"));
        let port = program.said.iter().find_map(|line| line.strip_prefix("PORT "));
        let port = port.expect("it says so").to_string();
        let words = ["--backend", backend, "--mode", "wall", "-r", "200", "-d", "1"];
        let r = attach(program.pid(), &words);
        drop(program.finish());
        for (role, expected) in [
            ("w_recv", format!("[waiting: read socket 127.0.0.1:{port}]")),
            ("w_server", "[waiting: read socket 127.0.0.1]".to_string()),
            ("w_send", format!("[waiting: write socket 127.0.0.1:{port}]")),
            ("w_accept", format!("[waiting: accept 127.0.0.1:{port}]")),
            // Connections that are tried again and again are not all named.
            ("w_connect", "[waiting: connect".to_string()),
            ("w_select", "[waiting: read pipe]".to_string()),
            ("w_poll", "[waiting: read pipe]".to_string()),
            ("w_two", "[waiting: poll]".to_string()),
            ("w_epoll", "[waiting: poll]".to_string()),
        ] {
            let states = states(&r, role);
            // They also wait for the GIL and for a CPU.
            let waits = states
                .iter()
                .filter(|(state, _)| !OTHER_STATES.contains(&state.as_str()) && !state.is_empty());
            let all: u64 = waits.map(|(_, time)| time).sum();
            let waits = states.iter().filter(|(state, _)| state.starts_with(&expected));
            let waited: u64 = waits.map(|(_, time)| time).sum();
            assert_likely!(
                waited * 10 > all * 9 && all > 0,
                "{name}, {role}: {states:?}\n{}",
                r.stderr
            );
        }
    });
}

#[test]
fn unsupported_combinations_are_refused() {
    for (words, why) in [
        (
            &["--mode", "wall", "--backend", "ptrace", "--wakers"][..],
            "nor what wakes it",
        ),
        (&["--mode", "sleep"], "expected one of cpu, off-cpu, wall"),
        (&["--wakers"], "only CPU time is sampled"),
        (&["--min-blocked", "1ms"], "only CPU time is sampled"),
        (&["--mode", "wall", "--min-blocked", "10"], "a number with its unit"),
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
