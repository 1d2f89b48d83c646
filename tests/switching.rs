//! Stacks that are switched while a thread runs: greenlets, and contexts of the C library. Each function belongs to one
//! stack and has its name, so that a stack with functions of two is wrong. And stacks with code that no table covers.
//!
//! Needs the privileges to sample, gcc, and the environments of `.ci/install-python-venvs`, which have the package
//! `greenlet`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use nativeprof::profile::model::{Frame, FrameKind};
use nativeprof::truncation::Truncation;
use serde_json::Value;

use common::chance::{assert_likely, repeated};
use common::environments::environments;
use common::pythons::third;
use common::recording::{Recording, check_counts, is_truncated, text, written_by};
use common::{Program, Scratch, attach, live, nativeprof, programs, record, sources};

mod common;

const GREENLETS: usize = 6;

fn script(python: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(python);
    command.arg(sources().join("greenlets.py")).args(words);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Name and interpreter of each environment.
fn pythons() -> impl Iterator<Item = (&'static str, std::path::PathBuf)> {
    let named = environments().iter();
    named.map(|(name, place)| (name.as_str(), place.join("bin/python")))
}

/// The greenlet of a function in greenlets.py: `g3_leaf` is of `g3`, and everything that the main greenlet runs of
/// `main`.
fn owner(f: &Frame) -> Option<&str> {
    if f.kind != FrameKind::Python {
        return None;
    }
    let number = f.name.strip_prefix('g').and_then(|n| n.split_once('_'));
    match number {
        Some((n, _)) if n.parse::<usize>().is_ok_and(|n| n < GREENLETS) => f.name.get(..2),
        _ if ["run", "main_leaf"].contains(&f.name.as_str()) => Some("main"),
        _ => None,
    }
}

/// What is wrong with a stack, outermost frame first.
fn problem(stack: &[&Frame]) -> Option<String> {
    let mut owners: Vec<&str> = stack.iter().filter_map(|f| owner(f)).collect();
    owners.dedup();
    let root = stack.first()?.name == "[greenlet]";
    if stack.iter().skip(1).any(|f| f.name == "[greenlet]") {
        return Some("a greenlet in the middle of a stack".into());
    }
    if owners.len() > 1 {
        return Some(format!("frames of {owners:?}"));
    }
    if is_truncated(stack) {
        return None;
    }
    let first = stack.iter().find(|f| f.kind == FrameKind::Python);
    let begins = |f: &&Frame| f.name.ends_with("_first") || f.name.ends_with("_child") || f.name.ends_with("_wait");
    match owners.first() {
        Some(&"main") if root => Some("the main greenlet has a root".into()),
        Some(&"main") | None => None,
        Some(_) if !root => Some("a greenlet without its root".into()),
        Some(_) if !first.is_some_and(begins) => Some("its first function is missing".into()),
        Some(_) => None,
    }
}

/// Number of stacks that are not exact, of how many, apart from the switch itself, which may be incomplete.
#[derive(Default)]
struct StackCounts {
    bad: u64,
    taken: u64,
}

impl StackCounts {
    /// While an exception enters its handler, for some 0.1 us, registers that tables need hold the handler's already: a few
    /// stacks in ten thousand are repaired. All recordings together are a stricter test than each alone.
    fn check(&self) {
        assert_likely!(
            self.bad <= (self.taken / 1000).max(5),
            "{} of {} stacks are not exact",
            self.bad,
            self.taken
        );
    }
}

fn check_stacks(case: &str, r: &Recording, counts: &mut StackCounts) {
    let bad: Vec<String> = r
        .stacks()
        .filter_map(|(stack, n)| Some(format!("{n} x {}: {}", problem(&stack)?, text(&stack))))
        .collect();
    assert!(bad.is_empty(), "{case}: {:#?}", &bad[..bad.len().min(5)]);
    // The switch is a small part of this program.
    let q = &r.profile.meta.quality;
    let switches = q.reasons.get(Truncation::GreenletSwitch.reason()).copied().unwrap_or(0);
    assert_likely!(q.taken >= 50 && switches * 10 <= q.taken, "{case}: {q:?}\n{}", r.stderr);
    let truncated = q.partial - switches;
    assert_likely!(truncated <= (q.taken / 1000).max(1), "{case}: {q:?}\n{}", r.stderr);
    counts.bad += truncated + q.repaired;
    counts.taken += q.taken;
    let greenlets = r.matching(|stack| stack.first().is_some_and(|f| f.name == "[greenlet]"));
    assert_likely!(greenlets * 2 > q.taken, "{case}: {greenlets} of {}", q.taken);
}

#[test]
fn greenlets_have_separate_stacks() {
    let _live = live();
    repeated(|| {
        let mut counts = StackCounts::default();
        for (first, backend) in ["ebpf", "ptrace"].into_iter().enumerate() {
            for (name, python) in third(first, pythons()) {
                let case = format!("CPython {name}, {backend}");
                let mut program = Program::start(script(&python, &[]));
                let r = attach(program.pid(), &["--backend", backend, "-d", "2"]);
                let truth: BTreeMap<String, f64> = program.finish();
                check_stacks(&case, &r, &mut counts);
                r.check_lost(&case);
                assert_eq!(truth.len(), GREENLETS + 1, "{case}: {truth:?}");
                let counts = truth.keys().map(|name| (name.clone(), r.with(name))).collect();
                // Reading the clock and switching belong to no greenlet.
                check_counts(&case, &counts, &truth, 0.02);
            }
        }
        counts.check();
    });
}

#[test]
fn greenlets_sample_themselves() {
    let _live = live();
    repeated(|| {
        let mut counts = StackCounts::default();
        for (name, python) in third(2, pythons()) {
            let scratch = Scratch::new();
            let file = scratch.path("profile.json");
            let command = script(&python, &["inside", file.to_str().expect("a plain path"), "2"]);
            check_stacks(
                &format!("CPython {name}, inside"),
                &written_by(command, &file),
                &mut counts,
            );
        }
        counts.check();
    });
}

#[test]
fn tapes_keep_what_greenlets_need() {
    let _live = live();
    repeated(|| {
        let (name, python) = pythons().last().expect("an environment");
        let scratch = Scratch::new();
        let (tape, file) = (scratch.path("a.tape"), scratch.path("again.json"));
        let tape = tape.to_str().expect("a plain path");
        let r = record(
            &["--save-tape", tape, "--tape-samples", "100000"],
            &script(&python, &["1"]),
        );
        let mut replay = nativeprof(&["replay", tape, "-o"]);
        replay.arg(&file);
        let again = written_by(replay, &file);
        let counts = |r: &Recording| {
            let q = &r.profile.meta.quality;
            (q.exact, q.repaired, q.reasons.clone())
        };
        assert_eq!(counts(&again), counts(&r), "CPython {name}");
        let greenlets = |r: &Recording| r.matching(|stack| stack.first().is_some_and(|f| f.name == "[greenlet]"));
        assert_likely!(
            greenlets(&again) > 50 && greenlets(&again) == greenlets(&r),
            "{}",
            r.stderr
        );
        assert!(
            again.stacks().all(|(stack, _)| problem(&stack).is_none()),
            "CPython {name}"
        );
    });
}

#[test]
fn dump_shows_a_greenlet_without_its_starter() {
    let _live = live();
    for (name, python) in pythons() {
        let program = Program::start(script(&python, &["asleep"]));
        let mut command = nativeprof(&["dump", &program.pid().to_string(), "--json"]);
        let done = command.output().expect("nativeprof starts");
        let dump: Value = serde_json::from_slice(&done.stdout).expect("JSON");
        let thread = &dump["threads"][0];
        // In Debian's CPython 3.15 a function on the way to `read` has no unwind table.
        let is_complete = thread["stack"] == "exact" || name == "3.15" && thread["stack"] == "repaired";
        assert!(is_complete, "CPython {name}: {thread:#}");
        let frames = thread["frames"].as_array().expect("frames").iter();
        let names: Vec<&str> = frames.filter_map(|f| f["name"].as_str()).collect();
        assert_eq!(names.last(), Some(&"[greenlet]"), "CPython {name}: {names:?}");
        assert!(names.contains(&"g1_wait"), "CPython {name}: {names:?}");
        for other in ["g0_wait", "<module>"] {
            assert!(!names.contains(&other), "CPython {name}: {names:?}");
        }
        drop(program);
    }
}

#[test]
fn contexts_end_where_they_begin() {
    let _live = live();
    repeated(|| {
        let is = |f: &&Frame, name: &str| f.name == name;
        for backend in ["ebpf", "ptrace"] {
            let mut program = Program::start(programs::contexts());
            let r = attach(program.pid(), &["--backend", backend, "-d", "2"]);
            program.finish();
            // The switch itself uses its own memory.
            r.check_quality_but(backend, &[Truncation::ForeignStack.reason()]);
            let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
            for (stack, n) in r.stacks() {
                let shown = text(&stack);
                let whose: Vec<&str> = ["n_run", "n_context_heap", "n_context_mapped", "n_hand"]
                    .into_iter()
                    .filter(|name| stack.iter().any(|f| is(f, name)))
                    .collect();
                assert!(whose.len() < 2, "{backend}: {whose:?} in {shown}");
                let Some(whose) = whose.first() else { continue };
                *seen.entry(whose).or_default() += n;
                let (first, second) = (&stack[0], stack.get(1));
                match *whose {
                    "n_run" => assert!(stack.iter().any(|f| is(f, "main") || is(f, "n_thread")), "{shown}"),
                    // Its end cannot be known, which has to be reported.
                    "n_hand" => assert!(
                        first.kind == FrameKind::Truncated && second.is_some_and(|f| is(f, "n_hand")),
                        "{shown}"
                    ),
                    context => assert!(
                        is(first, "[context]") && second.is_some_and(|f| is(f, context)),
                        "{shown}"
                    ),
                }
            }
            for name in ["n_run", "n_context_heap", "n_context_mapped", "n_hand"] {
                assert_likely!(seen.get(name).is_some_and(|n| *n > 10), "{backend}: {seen:?}");
            }
        }
    });
}

/// The whole stacks of the program, from `main` on, that end with this function or are incomplete: names and samples.
#[cfg(target_arch = "x86_64")]
fn stacks_without_tables(how: &str, leaf: &str) -> BTreeMap<String, u64> {
    let recording = record(&[], &programs::no_tables(&["1500", how]));
    let mut found = BTreeMap::new();
    for (stack, n) in recording.stacks() {
        let stack: Vec<_> = stack.into_iter().filter(|f| f.kind != FrameKind::Kernel).collect();
        let from = stack.iter().position(|f| f.name == "main").unwrap_or(0);
        let names: Vec<&str> = stack[from..].iter().map(|f| f.name.as_str()).collect();
        if names.last() == Some(&leaf) || stack.iter().any(|f| f.kind == FrameKind::Truncated) {
            *found.entry(names.join(" ")).or_default() += n;
        }
    }
    found
}

#[test]
#[cfg(target_arch = "x86_64")]
fn stacks_with_code_that_no_table_covers() {
    let generated = "main [anonymous code #1] [anonymous code #1] [anonymous code #1] leaf";
    let _live = live();
    for (how, leaf, expected) in [
        ("jit", "leaf", generated),
        ("small", "leaf", generated),
        ("jump", "machine", "main outer machine"),
    ] {
        repeated(|| {
            let found = stacks_without_tables(how, leaf);
            let all: u64 = found.values().sum();
            let right = found.get(expected).copied().unwrap_or(0);
            // At its start and its end the program is in the loader, and in the kernel.
            assert_likely!(all > 100 && right * 100 >= all * 98, "{how}: {found:#?}");
        });
    }
}
