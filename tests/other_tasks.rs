//! Tasks that are not asyncio's own: greenlets, and tasks of trio and anyio, in programs where each has its part of the time.
//!
//! Needs the privileges to sample (root), and the environments of `.ci/install-python-venvs`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use nativeprof::profile::model::{Frame, FrameKind};
use serde_json::Value;

use common::chance::assert_likely;
use common::environments::environments;
use common::pythons::some_at_a_time;
use common::recording::check_counts;
use common::{Program, attach, live, nativeprof, sources};

mod common;

/// Runs `test` with the name and interpreter of each environment, two at a time.
fn each_environment(test: impl Fn(&str, &Path) + Sync) {
    some_at_a_time(
        2,
        environments(),
        |(name, _)| name,
        |(name, place)| test(name, &place.join("bin/python")),
    );
}

fn script(python: &Path, name: &str, word: &str) -> Command {
    let mut command = Command::new(python);
    command.arg(sources().join(name)).arg(word);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Names of the task frames of a stack, outermost first.
fn task_frames<'a>(stack: &[&'a Frame]) -> Vec<&'a str> {
    let tasks = stack.iter().filter(|f| f.kind == FrameKind::Task);
    tasks
        .filter_map(|f| f.name.strip_prefix("[task: ")?.strip_suffix(']'))
        .collect()
}

#[test]
fn greenlets_that_run() {
    let _live = live();
    for package in ["greenlet", "gevent", "eventlet"] {
        for backend in ["ebpf", "ptrace"] {
            each_environment(|name, python| {
                let case = format!("CPython {name}, {package}, {backend}");
                let mut program = Program::start(script(python, "greenlet_tasks.py", package));
                let r = attach(program.pid(), &["--tasks", "--backend", backend]);
                let truth = program.finish();
                let mut counts: BTreeMap<String, u64> = truth.keys().map(|name| (name.clone(), 0)).collect();
                let mut names = BTreeSet::new();
                let (mut without, mut all) = (0, 0);
                for (stack, n) in r
                    .stacks()
                    .filter(|(stack, _)| stack.iter().any(|f| f.name == "measured"))
                {
                    all += n;
                    let [task] = task_frames(&stack)[..] else {
                        without += n;
                        continue;
                    };
                    let at = stack.iter().position(|f| f.kind == FrameKind::Task);
                    assert_eq!((at, &*stack[0].name), (Some(1), "[greenlet]"), "{case}");
                    names.insert(task.to_string());
                    let function = stack.iter().find(|f| counts.contains_key(&f.name));
                    let function = &function.expect("a function with a part of the time").name;
                    // Of plain greenlets a lambda calls it.
                    let expected = if package == "greenlet" {
                        "spawn"
                    } else {
                        function.as_str()
                    };
                    let begins = task.starts_with(expected) || task.starts_with("<lambda>");
                    assert!(begins && task.contains(" at 0x"), "{case}: {task} runs {function}");
                    *counts.get_mut(function).expect("it is there") += n;
                }
                check_counts(&case, &counts, &truth, 0.02);
                assert_likely!(without * 200 <= all, "{case}: {without} of {all}\n{}", r.stderr);
                assert_eq!(names.len(), 2, "{case}: {names:?}");
            });
        }
    }
}

#[test]
fn greenlets_that_wait() {
    let _live = live();
    for package in ["greenlet", "gevent", "eventlet"] {
        each_environment(|name, python| {
            let case = format!("CPython {name}, {package}");
            let program = Program::start(script(python, "greenlet_tasks.py", package));
            let done = nativeprof(&["dump", "--tasks", "--json", &program.pid().to_string()])
                .output()
                .expect("nativeprof starts");
            let said = String::from_utf8_lossy(&done.stderr).into_owned();
            assert!(done.status.success(), "{case}: {said}");
            let dump: Value = serde_json::from_slice(&done.stdout).expect("JSON");
            let greenlets = dump["tasks"].as_array().expect("tasks");
            let greenlets = greenlets.iter().filter(|t| t["kind"] == "greenlet");
            let mut found = Vec::new();
            for task in greenlets.filter(|t| t["state"] == "suspended") {
                let frames = task["frames"].as_array().expect("frames").iter();
                let frames: Vec<&str> = frames.filter_map(|f| f["name"].as_str()).collect();
                let Some(begin) = frames.iter().position(|name| name.ends_with("waiter")) else {
                    continue;
                };
                let levels = frames.iter().filter(|name| name.ends_with("outer")).count();
                assert_eq!(frames[begin + 1], "outer", "{case}: {frames:?}");
                assert_eq!(frames[begin + 1 + levels], "inner", "{case}: {frames:?}");
                assert_eq!(frames[begin + 2 + levels], "wait_long", "{case}: {frames:?}");
                let name = task["name"].as_str().expect("a name");
                assert_eq!(name == "named", package == "gevent" && levels == 1, "{case}: {name}");
                let is_by_function = name.contains(" at 0x");
                assert!(name == "named" || is_by_function, "{case}: {name}");
                found.push(levels);
            }
            found.sort_unstable();
            assert_eq!(found, [1, 2, 3, 4, 5], "{case}: {dump:#}");
        });
    }
}

/// Each task has its share of the time, below the task whose nursery or group it is in.
#[test]
fn tasks_of_trio_and_anyio() {
    let _live = live();
    for word in ["trio", "anyio-trio", "anyio-asyncio"] {
        for backend in ["ebpf", "ptrace"] {
            each_environment(|name, python| {
                let case = format!("CPython {name}, {word}, {backend}");
                let mut program = Program::start(script(python, "trio_tasks.py", word));
                let r = attach(program.pid(), &["--tasks", "--backend", backend]);
                let truth = program.finish();
                let mut counts: BTreeMap<String, u64> = truth.keys().map(|name| (name.clone(), 0)).collect();
                let (mut without, mut all) = (0, 0);
                for (stack, n) in r
                    .stacks()
                    .filter(|(stack, _)| stack.iter().any(|f| f.name == "measured"))
                {
                    all += n;
                    let names = task_frames(&stack);
                    let chain = match names.last() {
                        Some(&"alpha") => &["main", "alpha"][..],
                        Some(&"child") => &["main", "parent", "child"],
                        Some(other) => panic!("{case}: {other}"),
                        None => {
                            without += n;
                            continue;
                        }
                    };
                    let plain: Vec<&str> = names.iter().filter_map(|name| name.rsplit('.').next()).collect();
                    assert_eq!(plain, chain, "{case}");
                    let at = stack.iter().rposition(|f| f.kind == FrameKind::Task).expect("a task");
                    // anyio has a coroutine of its own around it; before 3.11 there is C between them.
                    let below = stack[at + 1..].iter().filter(|f| f.kind == FrameKind::Python);
                    let below: Vec<&str> = below.take(2).map(|f| f.name.as_str()).collect();
                    assert!(below.contains(&"work"), "{case}: {plain:?} above {below:?}");
                    *counts.get_mut(*names.last().expect("a task")).expect("it is there") += n;
                }
                check_counts(&case, &counts, &truth, 0.02);
                assert_likely!(without * 200 <= all, "{case}: {without} of {all}\n{}", r.stderr);
            });
        }
    }
}
