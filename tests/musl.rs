//! Programs for musl, the C library of Alpine: it has no unwind tables, and its assembler has no symbols, or some
//! without a size.
//!
//! Needs root and musl-gcc (package musl-tools). The CPython comes from `.ci/install-musl`.

use std::path::{Path, PathBuf};
use std::process::Command;

use nativeprof::profile::model::{Frame, FrameKind};
use serde_json::Value;

use common::chance::{assert_likely, repeated};
use common::recording::is_truncated;
use common::{Program, Recording, attach, live, nativeprof, programs, sources};

mod common;

/// How the C library is linked: as a shared library without symbols of its own functions, or into a program with all
/// symbols.
const LINKINGS: [&str; 2] = ["", "-static"];

/// Nothing is lost, almost nothing is incomplete. Most stacks have frames of the C library, so that they count as
/// repaired.
fn check_complete(case: &str, r: &Recording) {
    let q = &r.profile.meta.quality;
    r.check_lost(case);
    assert_likely!(q.taken >= 20, "{case}: {}", r.stderr);
    assert_likely!(
        q.partial <= (q.taken / 200).max(1),
        "{case}: {:?}\n{}",
        q.reasons,
        r.examples(is_truncated)
    );
}

fn has(stack: &[&Frame], name: &str) -> bool {
    stack.iter().any(|f| f.name == name)
}

#[test]
fn stacks_of_threads_end_where_the_thread_starts() {
    let _live = live();
    for linking in LINKINGS {
        repeated(|| {
            for backend in ["ebpf", "ptrace"] {
                let case = format!("{linking} {backend}");
                let mut program = Program::start(programs::native_for_musl(linking, &[]));
                let r = attach(program.pid(), &["--backend", backend]);
                program.finish();
                check_complete(&case, &r);
                assert_likely!(r.with("n_thread") > 10, "{case}: {}", r.stderr);
                for (stack, _) in r.complete_stacks() {
                    let names: Vec<&str> = stack.iter().map(|f| f.name.as_str()).collect();
                    let at = |name: &str| names.iter().position(|n| *n == name);
                    match (at("n_thread"), at("main")) {
                        (Some(2), None) | (None, Some(2)) => {}
                        _ => panic!("{case}: {names:?}"),
                    }
                    let is_named = |f: &&Frame| f.kind != FrameKind::Native || f.module.ends_with("libc.so");
                    match (linking, at("n_thread")) {
                        ("-static", Some(_)) => assert_eq!(names[..2], ["__clone", "start"], "{case}"),
                        // Symbols that are near, and not these functions', name others.
                        (_, Some(_)) => assert!(stack[..2].iter().all(|f| f.kind == FrameKind::Unknown), "{names:?}"),
                        _ => assert!(
                            stack.iter().take(1).all(is_named) || names[0] == "_start",
                            "{case}: {names:?}"
                        ),
                    }
                }
            }
        });
    }
}

#[test]
fn stacks_of_signal_handlers_go_on_to_what_they_interrupt() {
    let _live = live();
    for (linking, backend) in LINKINGS.into_iter().zip(["ebpf", "ptrace"]) {
        repeated(|| {
            let case = format!("{linking} {backend}");
            let mut program = Program::start(programs::native_for_musl(linking, &["handler"]));
            let r = attach(program.pid(), &["--backend", backend]);
            program.finish();
            check_complete(&case, &r);
            assert_likely!(r.with("n_handler_work") > 5, "{case}: {}", r.stderr);
            let cut =
                |s: &[&Frame]| has(s, "n_handler") && !is_truncated(s) && !(has(s, "main") && has(s, "n_signal_loop"));
            assert_eq!(r.matching(cut), 0, "{case}: {}", r.examples(cut));
        });
    }
}

/// The interpreter that `.ci/install-musl` builds; prints a message where it is missing.
fn python() -> Option<PathBuf> {
    let exe = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("musl/bin/python3.11");
    if !exe.exists() {
        eprintln!("NOTE: left out: there is no CPython for musl (.ci/install-musl brings it, where apt can)");
        return None;
    }
    Some(exe)
}

fn start_threads(python: &Path) -> Program {
    let mut command = Command::new(python);
    command.arg(sources().join("musl_threads.py"));
    Program::start(command)
}

fn is_python(f: &&Frame, name: &str) -> bool {
    f.kind == FrameKind::Python && f.name == name
}

#[test]
fn python_threads() {
    let _live = live();
    let Some(python) = python() else { return };
    repeated(|| {
        for words in [
            ["--backend", "ebpf", "--mode", "cpu"],
            ["--backend", "ptrace", "--mode", "cpu"],
            ["--backend", "ebpf", "--mode", "wall"],
        ] {
            let case = words.join(" ");
            let mut program = start_threads(&python);
            let r = attach(program.pid(), &[&words[..], &["--threads", "-r", "499"]].concat());
            program.finish();
            check_complete(&case, &r);
            assert!(r.stderr.contains("CPython 3.11"), "{case}: {}", r.stderr);
            let chains: [&[&str]; 2] = [&["_bootstrap", "work", "count_up"], &["main", "wait_for_input"]];
            let follows = |s: &[&Frame], chain: &[&str]| {
                let mut frames = s.iter();
                chain.iter().all(|name| frames.any(|f| is_python(f, name)))
            };
            let works = |s: &[&Frame]| follows(s, chains[0]) && has(s, "pythread_wrapper");
            assert_likely!(
                r.matching(works) * 10 >= r.samples() * if words[3] == "cpu" { 9 } else { 5 },
                "{case}: {}",
                r.stderr
            );
            let other =
                |s: &[&Frame]| !is_truncated(s) && !s.iter().any(|f| is_python(f, "work")) && !follows(s, chains[1]);
            assert_likely!(r.matching(other) <= 1, "{case}: {}", r.examples(other));
            if words[3] == "wall" {
                assert_likely!(r.matching(|s| follows(s, chains[1])) > 10, "{case}: {}", r.stderr);
            }
            for i in 0..2 {
                let name = format!("worker-{i}");
                let of_thread = |s: &[&Frame]| s.iter().any(|f| f.kind == FrameKind::Thread && f.name.contains(&name));
                assert_likely!(r.matching(of_thread) > 0, "{case}: no {name}");
            }
        }
    });
}

#[test]
fn python_threads_in_dump() {
    let _live = live();
    let Some(python) = python() else { return };
    let program = start_threads(&python);
    let done = nativeprof(&["dump", &program.pid().to_string(), "--json"])
        .output()
        .expect("nativeprof starts");
    let text = String::from_utf8_lossy(&done.stdout);
    let dump: Value = serde_json::from_str(&text).expect("JSON");
    let threads = dump["threads"].as_array().expect("threads");
    assert_eq!(threads.len(), 3, "{dump:#}");
    for t in threads {
        assert_eq!(t["stack"], "repaired", "{t:#}");
    }
    // (The main thread may still wait for the GIL after it has said that the others run.)
    for function in ["\"main\"", "worker-0", "worker-1"] {
        assert!(
            threads.iter().any(|t| t.to_string().contains(function)),
            "{function}: {dump:#}"
        );
    }
    assert_eq!(
        threads.iter().filter(|t| t.to_string().contains("\"work\"")).count(),
        2,
        "{dump:#}"
    );
}
