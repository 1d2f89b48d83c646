//! Recordings of every mode, and the replays of their tapes: both have the same samples, states, tasks and labels.
//!
//! Needs what the other live tests need.

use std::collections::BTreeMap;

use nativeprof::capture::ebpf::switch_in;
use nativeprof::profile::model::{FrameKind, Profile};

use common::recording::{Recording, attach, nativeprof, written_by};
use common::{Program, Scratch, live, newest_python, programs};

mod common;

/// What was measured below a path, in order of the value types. Names of native functions are left out: on tapes there are only
/// those of symbol tables.
type Rows = BTreeMap<Vec<String>, Vec<u64>>;

fn rows(profile: &Profile) -> Rows {
    let named = [
        FrameKind::Thread,
        FrameKind::Python,
        FrameKind::Truncated,
        FrameKind::Task,
        FrameKind::Worker,
        FrameKind::State,
    ];
    let mut rows = Rows::new();
    for (at, sample) in profile.timeline.iter().enumerate() {
        let (mut path, mut node) = (Vec::new(), sample.node as usize);
        while node > 0 {
            let frame = &profile.frames[profile.nodes[node].frame as usize];
            if named.contains(&frame.kind) {
                path.push(format!("{}:{}", frame.name, frame.first_line));
            }
            node = profile.nodes[node].parent as usize;
        }
        path.reverse();
        let labels = profile
            .labels
            .of(at)
            .iter()
            .map(|(key, value)| format!("{key}={value}"));
        path.extend(labels);
        path.push(format!("{} {}", sample.tid, sample.time));
        let amounts = (0..profile.value_types().len()).map(|value| profile.sample_amount(value, at));
        rows.insert(path, amounts.collect());
    }
    rows
}

/// The callbacks that kept an event loop, without the names of native functions.
fn lags(profile: &Profile) -> Vec<(u64, u64, &str, &str)> {
    let lags = profile.meta.lags.iter();
    lags.map(|lag| (lag.time, lag.length, &*lag.task, &*lag.function))
        .collect()
}

/// Records a program of the fixtures with a tape. Returns the recording, and what its replay has.
fn replayed(script: &str, arguments: &[&str], words: &[&str]) -> Recording {
    let scratch = Scratch::new();
    let (tape, file) = (scratch.path("a.tape"), scratch.path("again.json"));
    let tape = tape.to_str().expect("a plain path");
    let mut command = newest_python().script_with_gil(script);
    command.args(arguments);
    let program = Program::start(command);
    let saving = ["--threads", "--save-tape", tape, "--tape-samples", "100000"];
    let r = attach(program.pid(), &[&saving, words].concat());
    drop(program);
    let mut replay = nativeprof(&["replay", "--threads", tape, "-o"]);
    replay.arg(&file);
    let again = written_by(replay, &file);
    let (before, after) = (rows(&r.profile), rows(&again.profile));
    assert!(!before.is_empty(), "{script}: {}", r.stderr);
    let differs = before.iter().find(|(path, amounts)| after.get(*path) != Some(*amounts));
    let same = |(path, _): &(&Vec<String>, &Vec<u64>)| differs.is_some_and(|(other, _)| path.last() == other.last());
    assert!(
        differs.is_none(),
        "{script}: {differs:?}, but in the replay {:?}",
        after.iter().find(same)
    );
    assert_eq!(before.len(), after.len(), "{script}");
    assert_eq!(lags(&r.profile), lags(&again.profile), "{script}");
    again
}

fn has(r: &Recording, kind: FrameKind, name: &str) -> bool {
    r.matching(|stack| stack.iter().any(|f| f.kind == kind && f.name.starts_with(name))) > 0
}

#[test]
fn waits_and_what_ends_them() {
    let _live = live();
    if switch_in::check().is_ok() {
        let r = replayed("waits.py", &[], &["--mode", "wall", "--wakers", "-r", "200"]);
        assert!(has(&r, FrameKind::State, "[waiting: read pipe]"), "{}", r.stderr);
        assert!(has(&r, FrameKind::State, "[waiting: gil]"), "{}", r.stderr);
    }
}

#[test]
fn holders_of_the_interpreter_lock() {
    let _live = live();
    let r = replayed("gil_shares.py", &[], &["--gil", "-d", "0.5"]);
    assert!(r.with("g_python") > 0, "{}", r.stderr);
}

#[test]
fn tasks_and_what_they_await() {
    let _live = live();
    if switch_in::check().is_ok() {
        let r = replayed(
            "task_waits.py",
            &[],
            &["--tasks", "--mode", "wall", "-r", "200", "-d", "0.5"],
        );
        assert!(has(&r, FrameKind::State, "[awaiting queue]"), "{}", r.stderr);
        assert!(has(&r, FrameKind::Task, "[task: event]"), "{}", r.stderr);
    }
}

#[test]
fn blocked_event_loops() {
    let _live = live();
    let r = replayed("loop_blocks.py", &[], &["--lag", "50ms"]);
    assert!(!r.profile.meta.lags.is_empty(), "{}", r.stderr);
}

#[test]
fn workers_below_their_callers() {
    let _live = live();
    let library = programs::worker_pool();
    let library = library.to_str().expect("a plain path");
    let r = replayed(
        "worker_pools.py",
        &[library, "waiting"],
        &["--attribute-workers", "-d", "0.5"],
    );
    assert!(
        r.matching(|stack| stack.iter().any(|f| f.kind == FrameKind::Worker)) > 0,
        "{}",
        r.stderr
    );
}
