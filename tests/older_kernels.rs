//! The BPF program for older kernels, forced where the other one loads too: the same stacks, counts and bounds.
//!
//! Needs what the other live tests need. That it loads on old kernels is what `.ci/kernels` tries.

use std::path::Path;
use std::process::Command;

use nativeprof::profile::model::{Frame, FrameKind};

use common::calls::CALLBACKS;
use common::chance::{assert_likely, patience, repeated};
use common::recording::{Recording, Running, TRUTH, is_truncated, nativeprof};
use common::{Program, Scratch, each_third_python, live, newest_python, programs};

mod common;

/// nativeprof with that program.
fn older(args: &[&str]) -> Command {
    let mut command = nativeprof(args);
    command.env("NATIVEPROF_BPF_OBJECT", "5.8");
    command
}

fn attach(pid: u32, words: &[&str]) -> Recording {
    let scratch = Scratch::new();
    let file = scratch.path("profile.json");
    let mut command = older(&["attach", &pid.to_string(), "--backend", "ebpf", "-o"]);
    command.arg(&file).args(words);
    if !words.contains(&"-d") {
        command.args(["-d", &patience().to_string()]);
    }
    let done = Running::start(command).finish();
    Recording::of(&file, done)
}

fn text(mut command: Command) -> String {
    let done = command.output().expect("nativeprof starts");
    [done.stdout, done.stderr]
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .concat()
}

#[test]
fn callbacks_are_in_calling_order() {
    let _live = live();
    each_third_python(2, |python| {
        let mut program = Program::start(python.script("callbacks.py"));
        let r = attach(program.pid(), &["-r", "1000"]);
        program.finish();
        r.check_quality(&python.name);
        r.check_calls(&python.name, &TRUTH, CALLBACKS);
        for name in ["level3", "compare", "__lt__", "key_of", "folded", "attribute"] {
            assert_likely!(r.with(name) > 0, "{}: {name} was never seen", python.name);
        }
    });
}

#[test]
fn ten_thousand_levels_are_complete() {
    const TRUNCATED: &str = "stack deeper than the copy";
    let _live = live();
    repeated(|| {
        let python = newest_python();
        let mut program = Program::start(python.script("deep_recursion.py"));
        let r = attach(program.pid(), &["-r", "100", "-d", "3"]);
        program.finish();
        r.check_quality_but(&python.name, &[TRUNCATED]);
        let levels = |stack: &[&Frame]| {
            let is_level = |f: &&&Frame| f.kind == FrameKind::Python && f.name == "descend";
            stack.iter().filter(is_level).count()
        };
        let at_end = |stack: &[&Frame]| stack.iter().any(|f| f.name == "t_alpha") && !is_truncated(stack);
        assert_likely!(r.matching(at_end) * 2 > r.samples(), "the ends were hardly seen");
        assert_eq!(r.matching(|s| at_end(s) && levels(s) != 10001), 0);
    });
}

#[test]
fn stacks_of_megabytes_are_complete() {
    let _live = live();
    repeated(|| {
        let mut program = Program::start(programs::native(&["big"]));
        let r = attach(program.pid(), &["-r", "199"]);
        program.finish();
        r.check_quality("big");
        assert_likely!(r.with("n_wide") * 10 > r.samples() * 7, "{}", r.stderr);
    });
}

#[test]
fn off_cpu_time_needs_kprobes() {
    let scratch = Scratch::new();
    let mut recording = older(&["record", "--backend", "ebpf", "--mode", "wall", "-o"]);
    recording.arg(scratch.path("profile.json")).args(["--", "sleep", "1"]);
    let said = text(recording);
    let found = text(older(&["doctor"]));
    if Path::new("/sys/bus/event_source/devices/kprobe").exists() {
        assert!(said.contains("waiting 1."), "{said}");
        assert!(found.contains("by a kprobe at finish_task_switch"), "{found}");
    } else {
        assert!(said.contains("cannot sample off-CPU time"), "{said}");
        assert!(said.contains("this kernel has no kprobes"), "{said}");
    }
    let expected = "the BPF program for Linux 5.8 and newer loads and runs; NATIVEPROF_BPF_OBJECT is set";
    assert!(found.contains(expected), "{found}");
}

#[test]
fn other_values_are_refused() {
    let mut command = nativeprof(&["record", "--backend", "ebpf", "--", "true"]);
    command.env("NATIVEPROF_BPF_OBJECT", "4.4");
    let refused = text(command);
    assert!(refused.contains("invalid value NATIVEPROF_BPF_OBJECT=4.4"), "{refused}");
}
