//! Stacks that are exchanged while a thread runs: greenlets, and contexts of the C library. Each function belongs to one
//! stack and says so by its name, so that a stack with functions of two is wrong.
//!
//! Needs the rights to sample, gcc, and the environments of `.ci/python-venvs`, which have the package `greenlet`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use nativeprof::sample::Cut;
use nativeprof::tree::profile::{Frame, FrameKind};
use serde_json::Value;

use common::environments::environments;
use common::recording::{Recording, check_counts, text, written_by};
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

/// Whose function it is, in greenlets.py: `g3_leaf` is of `g3`, and so is what the main greenlet runs of `main`.
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
fn wrong(stack: &[&Frame]) -> Option<String> {
    let mut owners: Vec<&str> = stack.iter().filter_map(|f| owner(f)).collect();
    owners.dedup();
    let root = stack.first()?.name == "[greenlet]";
    if stack.iter().skip(1).any(|f| f.name == "[greenlet]") {
        return Some("a greenlet amid a stack".into());
    }
    if owners.len() > 1 {
        return Some(format!("frames of {owners:?}"));
    }
    if stack.iter().any(|f| f.kind == FrameKind::Cut) {
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

fn check_stacks(whom: &str, r: &Recording) {
    let bad: Vec<String> = r
        .stacks()
        .filter_map(|(stack, n)| Some(format!("{n} x {}: {}", wrong(&stack)?, text(&stack))))
        .collect();
    assert!(bad.is_empty(), "{whom}: {:#?}", &bad[..bad.len().min(5)]);
    // Nothing but the exchange itself may be incomplete, and it is a small part of this program.
    let q = &r.profile.meta.quality;
    let switches = q.reasons.get(Cut::GreenletSwitch.reason()).copied().unwrap_or(0);
    assert!(q.taken >= 50 && switches * 10 <= q.taken, "{whom}: {q:?}\n{}", r.stderr);
    let bad = q.partial - switches + q.repaired;
    assert!(bad <= (q.taken / 1000).max(1), "{whom}: {q:?}\n{}", r.stderr);
    let greenlets = r.matching(|stack| stack.first().is_some_and(|f| f.name == "[greenlet]"));
    assert!(greenlets * 2 > q.taken, "{whom}: {greenlets} of {}", q.taken);
}

#[test]
fn greenlets_have_stacks_of_their_own() {
    let _live = live();
    for (name, python) in pythons() {
        for backend in ["ebpf", "ptrace"] {
            let whom = format!("CPython {name}, {backend}");
            let mut program = Program::start(script(&python, &[]));
            let r = attach(program.pid(), &["--backend", backend, "-d", "2"]);
            let truth: BTreeMap<String, f64> = program.finish();
            check_stacks(&whom, &r);
            r.check_lost(&whom);
            assert_eq!(truth.len(), GREENLETS + 1, "{whom}: {truth:?}");
            let counts = truth.keys().map(|name| (name.clone(), r.with(name))).collect();
            // What it takes to tell the time and to switch belongs to nobody.
            check_counts(&whom, &counts, &truth, 0.02);
        }
    }
}

#[test]
fn greenlets_sample_themselves() {
    let _live = live();
    for (name, python) in pythons() {
        let scratch = Scratch::new();
        let file = scratch.path("profile.json");
        let command = script(&python, &["inside", file.to_str().expect("a plain path"), "2"]);
        check_stacks(&format!("CPython {name}, inside"), &written_by(command, &file));
    }
}

#[test]
fn tapes_keep_what_greenlets_need() {
    let _live = live();
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
    assert!(
        greenlets(&again) > 50 && greenlets(&again) == greenlets(&r),
        "{}",
        r.stderr
    );
    assert!(
        again.stacks().all(|(stack, _)| wrong(&stack).is_none()),
        "CPython {name}"
    );
}

#[test]
fn dump_shows_a_greenlet_and_not_who_started_it() {
    let _live = live();
    for (name, python) in pythons() {
        let program = Program::start(script(&python, &["asleep"]));
        let mut command = nativeprof(&["dump", &program.pid().to_string(), "--json"]);
        let done = command.output().expect("nativeprof starts");
        let dump: Value = serde_json::from_slice(&done.stdout).expect("JSON");
        let thread = &dump["threads"][0];
        assert_eq!(thread["stack"], "exact", "CPython {name}: {thread:#}");
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
    let is = |f: &&Frame, name: &str| f.name == name;
    for backend in ["ebpf", "ptrace"] {
        let mut program = Program::start(programs::contexts());
        let r = attach(program.pid(), &["--backend", backend, "-d", "2"]);
        program.finish();
        // The exchange itself uses memory of its own.
        r.check_quality_but(backend, &[Cut::OtherStack.reason()]);
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
                // Where it ends cannot be known: it has to say so.
                "n_hand" => assert!(
                    first.kind == FrameKind::Cut && second.is_some_and(|f| is(f, "n_hand")),
                    "{shown}"
                ),
                context => assert!(
                    is(first, "[context]") && second.is_some_and(|f| is(f, context)),
                    "{shown}"
                ),
            }
        }
        for name in ["n_run", "n_context_heap", "n_context_mapped", "n_hand"] {
            assert!(seen.get(name).is_some_and(|n| *n > 10), "{backend}: {seen:?}");
        }
    }
}
