//! Tapes of recordings in every mode, replayed without privileges. What each of them must show is known from its program.
//!
//! `.ci/make-tapes` records them. They are of x86-64.
#![cfg(target_arch = "x86_64")]

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::rc::Rc;

use nativeprof::profile::gil_waits;
use nativeprof::profile::model::{Frame, FrameKind, Profile};
use nativeprof::session::{Grouping, SessionOptions, replay};
use nativeprof::tape::encode;

use random::Rng;

#[path = "common/random.rs"]
mod random;

/// Bytes of a tape at most.
const MAX_BYTES: usize = 200_000;

fn packed(name: &str) -> Vec<u8> {
    let tapes = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tapes/modes");
    std::fs::read(tapes.join(format!("{name}.tape"))).expect("a tape")
}

fn replayed(name: &str) -> Profile {
    let packed = packed(name);
    assert!(packed.len() <= MAX_BYTES, "{name} has {} bytes", packed.len());
    let tape = encode::read(&packed).expect("a good tape");
    let options = SessionOptions {
        grouping: Grouping {
            threads: true,
            ..Grouping::default()
        },
        ..SessionOptions::default()
    };
    replay::profile(&Rc::new(tape), options).expect("a replay")
}

/// The stack of a node, outermost frame first.
fn stack(profile: &Profile, mut node: usize) -> Vec<&Frame> {
    let mut frames = Vec::new();
    while node > 0 {
        frames.push(&profile.frames[profile.nodes[node].frame as usize]);
        node = profile.nodes[node].parent as usize;
    }
    frames.reverse();
    frames
}

/// The stacks, with what of a value ended in each.
fn stacks<'a>(profile: &'a Profile, value: &str) -> Vec<(Vec<&'a Frame>, u64)> {
    let value = profile.find_value(value).expect("a value of the recording");
    let amounts = profile.self_amounts(value).into_iter().enumerate();
    let some = amounts.filter(|(_, amount)| *amount > 0);
    some.map(|(node, amount)| (stack(profile, node), amount)).collect()
}

fn has(stack: &[&Frame], kind: FrameKind, name: &str) -> bool {
    stack.iter().any(|f| f.kind == kind && f.name == name)
}

/// Wall time below a function by the state it was spent in, as shares of the recording; `""`: running.
fn states(profile: &Profile, role: &str) -> BTreeMap<String, f64> {
    let mut states = BTreeMap::new();
    for (stack, time) in stacks(profile, "wall") {
        // The stack of the thread that ended a wait stands below its state.
        let end = stack.iter().position(|f| f.kind == FrameKind::State);
        if has(&stack[..end.unwrap_or(stack.len())], FrameKind::Python, role) {
            let state = end.map_or("", |at| stack[at].name.as_str());
            *states.entry(state.to_string()).or_default() += time as f64 / (profile.meta.duration * 1e9);
        }
    }
    states
}

/// Threads of waits.py, what they wait for, and for which share of their time at least: they also wait for the GIL, which two
/// others want all the time.
const ROLES: &[(&str, &str, f64)] = &[
    ("w_sleep", "[waiting: sleep]", 0.05),
    ("w_lock", "[waiting: lock", 0.95),
    ("w_read", "[waiting: read pipe]", 0.01),
    ("w_poll", "[waiting: poll]", 0.05),
    ("w_feed", "[waiting: sleep]", 0.05),
    ("w_spin_one", "[waiting: gil]", 0.2),
    ("w_spin_two", "[waiting: gil]", 0.2),
];

#[test]
fn all_time_of_threads_is_accounted_for() {
    let profile = replayed("waits");
    for (role, state, least) in ROLES {
        let states = states(&profile, role);
        let all: f64 = states.values().sum();
        assert!((0.97..1.03).contains(&all), "{role}: {all:.3} of its time: {states:?}");
        let there: f64 = states
            .iter()
            .filter(|(name, _)| name.starts_with(state))
            .map(|(_, share)| share)
            .sum();
        assert!(there >= *least, "{role} was {there:.3} of its time {state}: {states:?}");
        let known = ["", "[runnable]", "[waiting: gil]"];
        let other = states
            .iter()
            .filter(|(name, _)| !name.starts_with(state) && !known.contains(&name.as_str()));
        let other: f64 = other.map(|(_, share)| share).sum();
        assert!(other < 0.02, "{role}: {states:?}");
    }
}

/// The stack below a wait is that of the thread which ended it: what `w_feed` writes is what `w_read` reads.
#[test]
fn wakers_stand_below_what_they_end() {
    let profile = replayed("waits");
    let all = stacks(&profile, "wall");
    let reads = all
        .iter()
        .filter(|(stack, _)| has(stack, FrameKind::State, "[waiting: read pipe]"));
    let reads: Vec<_> = reads
        .filter(|(stack, _)| has(stack, FrameKind::Python, "w_read"))
        .collect();
    let woken: u64 = reads.iter().map(|(_, time)| time).sum();
    let by_feed = reads
        .iter()
        .filter(|(stack, _)| has(stack, FrameKind::Python, "w_feed"));
    let by_feed: u64 = by_feed.map(|(_, time)| time).sum();
    assert!(woken > 0 && by_feed * 10 >= woken * 9, "{by_feed} of {woken} ns");
}

/// `hold_lock` holds the interpreter lock all the time that it runs, and the others wait for its thread.
#[test]
fn holders_of_the_interpreter_lock_are_named() {
    let profile = replayed("gil_holders");
    let gil = gil_waits::of(&profile, profile.find_value("wall").expect("wall time"));
    let hog = gil.threads.iter().max_by_key(|t| t.held).expect("a holder");
    let waits: Vec<_> = gil.pairs.iter().filter(|p| p.waiter.1 != hog.tid).collect();
    let all: u64 = waits.iter().map(|p| p.waited).sum();
    let of_hog = waits.iter().filter(|p| p.holder == Some((hog.pid, hog.tid)));
    let for_hog: u64 = of_hog.map(|p| p.waited).sum();
    assert!(all as f64 > 0.2e9 * profile.meta.duration, "{gil:?}");
    assert!(for_hog * 10 >= all * 9, "{for_hog} of {all}: {gil:?}");
    let held = gil
        .functions
        .iter()
        .max_by_key(|f| f.held)
        .expect("functions that held the lock");
    assert!(held.function.starts_with("hold_lock ("), "{gil:?}");
}

/// Of two threads, one runs Python code, and the other one a C function without the lock.
#[test]
fn only_holders_of_the_interpreter_lock_are_sampled() {
    let profile = replayed("gil");
    let below = |role: &str| -> u64 {
        let all = stacks(&profile, "samples").into_iter();
        all.filter(|(stack, _)| has(stack, FrameKind::Python, role))
            .map(|(_, count)| count)
            .sum()
    };
    let (python, digest) = (below("g_python"), below("g_digest"));
    assert!(python > 50 && digest * 20 < python, "{python} and {digest} samples");
}

#[test]
fn workers_stand_below_their_callers() {
    let profile = replayed("workers");
    for (job, caller) in [("t_first_job", "first_caller"), ("t_second_job", "second_caller")] {
        let (mut all, mut right) = (0, 0);
        for (stack, count) in stacks(&profile, "samples") {
            let Some(at) = stack.iter().position(|f| f.name == job) else {
                continue;
            };
            all += count;
            let seam = stack[..at].iter().position(|f| f.kind == FrameKind::Worker);
            if seam.is_some_and(|seam| has(&stack[..seam], FrameKind::Python, caller)) {
                right += count;
            }
        }
        assert!(
            all >= 50 && right * 100 >= all * 95,
            "{right} of {all} samples of {job}"
        );
    }
}

/// In each thread of spans.py, `outer` alone, `inner` in it, and neither have their shares, as rounds of a loop.
#[test]
fn samples_have_the_labels_of_their_spans() {
    let profile = replayed("spans");
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for (at, sample) in profile.timeline.iter().enumerate() {
        if !has(&stack(&profile, sample.node as usize), FrameKind::Python, "burn") {
            continue;
        }
        let labels = profile.labels.of(at);
        let of = |key: &str| -> Vec<&str> {
            let found = labels.iter().filter(|(k, _)| k == key);
            found.map(|(_, value)| value.as_str()).collect()
        };
        let name = format!("{}/{}", of("span").join("+"), of("thread").join("+"));
        assert_eq!(!of("step").is_empty(), name.contains("inner"), "{labels:?}");
        *counts.entry(name).or_default() += 1;
    }
    let all: u64 = counts.values().sum();
    assert!(all >= 200, "{counts:?}");
    let truth = [
        ("outer/1", 0.2),
        ("outer/2", 0.2),
        ("outer+inner/1", 0.2),
        ("outer+inner/2", 0.2),
        ("/", 0.2),
    ];
    for (name, expected) in truth {
        let share = counts.get(name).copied().unwrap_or(0) as f64 / all as f64;
        assert!((share - expected).abs() < 0.08, "{name}: {share:.3}: {counts:?}");
    }
    assert_eq!(counts.len(), truth.len(), "{counts:?}");
}

/// The tasks of task_waits.py await one thing each for the whole time, by which they are named.
#[test]
fn suspended_tasks_have_their_time() {
    let profile = replayed("tasks");
    let awaited = |value: &str| {
        let mut times: BTreeMap<(String, String), f64> = BTreeMap::new();
        for (stack, time) in stacks(&profile, value) {
            let task = stack.iter().rfind(|f| f.kind == FrameKind::Task);
            let state = stack.iter().rfind(|f| f.name.starts_with("[awaiting "));
            if let (Some(task), Some(state)) = (task, state) {
                *times.entry((task.name.clone(), state.name.clone())).or_default() += time as f64;
            }
        }
        times
    };
    let (awaits, wall) = (awaited("await"), awaited("wall"));
    let all: f64 = wall.values().sum();
    let duration = profile.meta.duration * 1e9;
    for kind in [
        "lock",
        "semaphore",
        "condition",
        "event",
        "queue",
        "future",
        "gather",
        "task",
    ] {
        let key = (format!("[task: {kind}]"), format!("[awaiting {kind}]"));
        let time = awaits.get(&key).copied().unwrap_or(0.0);
        assert!(
            (time / duration - 1.0).abs() < 0.05,
            "{kind}: {time} of {duration}: {awaits:?}"
        );
        // The 10 tasks have equal shares of the time in which their event loop waits.
        let share = wall.get(&key).copied().unwrap_or(0.0) / all;
        assert!((share - 0.1).abs() < 0.03, "{kind}: {share}: {wall:?}");
    }
}

/// The callbacks of loop_blocks.py, and how long they keep the event loop, ns.
#[test]
fn what_keeps_the_loop_is_listed() {
    let profile = replayed("lag");
    let mut found = BTreeMap::new();
    for lag in &profile.meta.lags {
        let expected = match (lag.task.as_str(), lag.function.split(' ').next()) {
            ("sleeper" | "", Some("sleeping")) => 80_000_000,
            ("computer", Some("computing")) => 120_000_000,
            other => panic!("{other:?}: {lag:?}"),
        };
        // Those at the ends of the recording are cut.
        let (begins, ends) = (lag.time < 200_000_000, lag.time + lag.length + 200_000_000);
        if begins || ends > (profile.meta.duration * 1e9) as u64 {
            continue;
        }
        assert!(lag.length.abs_diff(expected) < 30_000_000, "{lag:?}");
        assert!(
            lag.stack
                .iter()
                .any(|frame| frame.starts_with("main ") || frame.starts_with("<module> ")),
            "{lag:?}"
        );
        *found.entry(lag.task.as_str()).or_insert(0) += 1;
    }
    assert!(
        found.len() == 3 && found.values().all(|n| *n >= 2),
        "{found:?}: {:?}",
        profile.meta.lags
    );
}

/// Replays tapes in which a few bytes are changed. Most of these are among the events and responses.
#[test]
fn damaged_tapes_do_no_harm() {
    let mut random = Rng(99);
    let (mut good, mut bad) = (0, 0);
    for name in ["waits", "gil_holders", "workers", "spans", "tasks", "lag"] {
        let mut raw = Vec::new();
        let packed = packed(name);
        flate2::read::GzDecoder::new(&*packed)
            .read_to_end(&mut raw)
            .expect("gzip");
        for _ in 0..6 {
            let mut bytes = raw.clone();
            let reach = [200, 20_000, raw.len()][random.below(3)];
            for _ in 0..1 + random.below(6) {
                let (at, length) = (random.below(reach), [1, 8][random.below(2)]);
                let byte = [0, 1, 0x7f, 0xff, random.below(256) as u8][random.below(5)];
                bytes.iter_mut().skip(at).take(length).for_each(|b| *b = byte);
            }
            let Ok(tape) = encode::parse(&bytes) else {
                bad += 1;
                continue;
            };
            good += 1;
            let _ = replay::profile(&Rc::new(tape), SessionOptions::default());
        }
    }
    assert!(good > 3 && bad > 3, "{good} were tapes, {bad} were not");
}
