//! Times of different machines.

use std::time::{Duration, UNIX_EPOCH};

use nativeprof::export::otlp::{SegmentInfo, encode_segment};
use nativeprof::history::{Limits, Writer};
use nativeprof::profile::machine::Machine;
use nativeprof::profile::merge;
use nativeprof::profile::model::{Meta, ModuleMeta, Profile};

use super::common::Scratch;
use super::{calls, json_of, run, sampled, written};

fn with_meta(profile: Profile, change: impl FnOnce(&mut Meta)) -> Profile {
    let mut profile = profile;
    change(&mut profile.meta);
    profile
}

fn machine(cpu: &str) -> Machine {
    Machine {
        cpu: cpu.into(),
        cores: 4,
        kernel: "6.1.0".into(),
        governor: String::new(),
    }
}

#[test]
fn times_of_different_machines_are_undecided() {
    let scratch = Scratch::new();
    let on = |name: &str, work: u64, cpu: &str| {
        let profile = with_meta(sampled(&[("work", work), ("other", 300)], 1.0), |meta| {
            meta.machine = machine(cpu);
        });
        written(&scratch, name, &profile)
    };
    let before = on("before.json", 300, "Fast\x1b[1m");
    let (here, there) = (on("here.json", 900, "Fast\x1b[1m"), on("there.json", 900, "Slow"));
    let unknown = written(
        &scratch,
        "unknown.json",
        &sampled(&[("work", 900), ("other", 300)], 1.0),
    );
    let gate = |after: &str, words: &[&'static str], code: i32| {
        run(
            &[&["diff", &before, after, "--fail-above", "5", "--single-run"], words].concat(),
            code,
        )
    };
    let difference = "different machines, or with different Pythons: CPU: Fast\\x1b[1m before, Slow after";
    for normalize in ["time", "rate"] {
        let said = gate(&there, &["--normalize", normalize], 4);
        assert!(said.contains(difference), "{said}");
        assert!(said.contains("undecided: ") && said.contains("--any-machine"), "{said}");
        assert!(!said.contains(" grew by "), "{said}");
        for after in [&here, &unknown] {
            gate(after, &["--normalize", normalize], 3);
        }
    }
    let said = gate(&there, &["--normalize", "time", "--any-machine"], 3);
    assert!(!said.contains("different machines"), "{said}");
    let said = gate(&there, &["--normalize", "share"], 3);
    assert!(!said.contains("different machines"), "{said}");
    let found = json_of(&["diff", &before, &there, "--normalize", "time"]);
    assert_eq!(
        found["machines"],
        serde_json::json!(["CPU: Fast\x1b[1m before, Slow after"])
    );
    assert_eq!(
        json_of(&["diff", &before, &here, "--normalize", "time"])["machines"],
        serde_json::json!([])
    );

    // Pairs of runs on two machines, and a side with one of them.
    let other = on("other.json", 300, "Slow");
    let words = |before: [&str; 2], after: [&str; 2]| {
        let files = [
            "diff",
            "--normalize",
            "time",
            "--before",
            before[0],
            before[1],
            "--after",
            after[0],
            after[1],
        ];
        json_of(&files)["machines"].clone()
    };
    assert_eq!(words([&before, &other], [&there, &here]), serde_json::json!([]));
    let third = on("third.json", 300, "Slow");
    assert_ne!(words([&before, &other], [&there, &third]), serde_json::json!([]));

    // A merged profile.
    let merged = scratch.path("merged.json");
    let merged = merged.to_str().expect("UTF-8");
    run(&["merge", &before, &other, "-o", merged], 0);
    let said = gate(merged, &["--normalize", "time"], 4);
    assert!(said.contains("CPU: Fast\\x1b[1m before, mixed after"), "{said}");

    // Calls are what they are.
    let [a, b] = [("a", "x"), ("b", "y")].map(|(name, cpu)| {
        let profile = with_meta(calls(&[("work", 10)]), |meta| meta.machine = machine(cpu));
        written(&scratch, &format!("{name}-calls.json"), &profile)
    });
    let said = run(&["diff", &a, &b, "--value", "calls", "--fail-above", "0"], 0);
    assert!(!said.contains("different machines"), "{said}");
}

#[test]
fn builds_of_python_are_told_apart_and_texts_of_files_are_bounded() {
    let scratch = Scratch::new();
    let built = |name: &str, python: &str, id: &str| {
        let profile = with_meta(sampled(&[("work", 300)], 1.0), |meta| {
            meta.python = python.into();
            meta.machine.kernel = "k".repeat(1 << 20);
            meta.modules = vec![ModuleMeta {
                path: "/usr/bin/python3.13".into(),
                build_id: id.into(),
                ..ModuleMeta::default()
            }];
        });
        written(&scratch, name, &profile)
    };
    let files = [
        ("a", "CPython 3.13.0", "aa"),
        ("b", "CPython 3.13.0", "bb"),
        ("c", "CPython 3.13.1", ""),
    ];
    let [a, b, c] = files.map(|(name, python, id)| built(&format!("{name}.json"), python, id));
    for (after, expected) in [
        (&b, "build of python3.13: aa before, bb after"),
        (&c, "Python: CPython 3.13.0 before, CPython 3.13.1 after"),
    ] {
        let said = run(&["diff", &a, after, "--normalize", "time"], 0);
        assert!(said.contains(&format!("different Pythons: {expected}\n")), "{said}");
    }
    let read = nativeprof::profile::json::read(&std::fs::read(&a).expect("a file")).expect("a profile");
    assert!(read.meta.machine.kernel.len() < 200);
    let merged = merge::combine(&[("one".into(), read.clone()), ("two".into(), read.clone())]);
    assert_eq!(merged.meta.machine, read.meta.machine);
}

#[test]
fn histories_of_different_machines_are_undecided() {
    const START: u64 = 1_795_835_640;
    let scratch = Scratch::new();
    let history = |name: &str, work: u64, cpu: &str| {
        let profile = with_meta(sampled(&[("work", work), ("other", 300)], START as f64), |meta| {
            meta.machine = machine(cpu);
        });
        let directory = scratch.path(name);
        let mut writer = Writer::open(&directory, Limits::default()).expect("a writer");
        let message = encode_segment(&profile, &SegmentInfo::default());
        writer
            .write(
                UNIX_EPOCH + Duration::from_secs(START),
                Duration::from_secs(1),
                &message,
            )
            .expect("a segment");
        directory.to_str().expect("UTF-8").to_string()
    };
    let before = history("before", 300, "Fast");
    let gate = |after: &str, code: i32| {
        let words = [
            "diff",
            &before,
            after,
            "--normalize",
            "rate",
            "--fail-above",
            "5",
            "--single-run",
        ];
        run(&words, code)
    };
    let said = gate(&history("there", 900, "Slow"), 4);
    assert!(
        said.contains("undecided: ") && said.contains("CPU: Fast before, Slow after"),
        "{said}"
    );
    gate(&history("here", 900, "Fast"), 3);
}
