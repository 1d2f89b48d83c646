//! Tasks that are not asyncio's own: greenlets, and tasks of trio and anyio, in programs where each has its part of the time.
//!
//! Needs the privileges to sample (root), and the environments of `.ci/install-python-venvs`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use nativeprof::profile::model::{Frame, FrameKind};
use serde_json::Value;

use common::chance::assert_likely;
use common::environments::{each_third_environment, each_third_environment_and_backend};
use common::recording::{awaited, check_account, check_counts, dumped_tasks, is_truncated};
use common::{Program, attach, live, sources};

mod common;

/// Runs `test` with a name of the case, a package and the interpreter of every third environment, for each package with
/// others.
fn each_package(packages: &[&str], test: impl Fn(&str, &str, &Path) + Sync) {
    for (first, package) in packages.iter().enumerate() {
        each_third_environment(first, |name, directory| {
            test(
                &format!("CPython {name}, {package}"),
                package,
                &directory.join("bin/python"),
            );
        });
    }
}

/// The same, with each backend.
fn each_package_and_backend(packages: &[&str], test: impl Fn(&str, &str, &Path, &str) + Sync) {
    for (first, package) in packages.iter().enumerate() {
        each_third_environment_and_backend(first, |name, directory, backend| {
            let case = format!("CPython {name}, {package}, {backend}");
            test(&case, package, &directory.join("bin/python"), backend);
        });
    }
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
    each_package_and_backend(&["greenlet", "gevent", "eventlet"], |case, package, python, backend| {
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
            let ([task], false) = (&task_frames(&stack)[..], is_truncated(&stack)) else {
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
        check_counts(case, &counts, &truth, 0.02);
        assert_likely!(without * 200 <= all, "{case}: {without} of {all}\n{}", r.stderr);
        assert_eq!(names.len(), 2, "{case}: {names:?}");
    });
}

#[test]
fn greenlets_that_wait() {
    let _live = live();
    each_package(&["greenlet", "gevent", "eventlet"], |case, package, python| {
        let program = Program::start(script(python, "greenlet_tasks.py", package));
        let dump = dumped_tasks(program.pid());
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

/// A task's name without its address or module.
fn plain_name(name: &str) -> &str {
    let name = name.split(" at 0x").next().unwrap_or(name);
    name.rsplit('.').next().unwrap_or(name)
}

/// Function that each waiting task of `other_waits.py` runs, and what it awaits.
fn waits(package: &str) -> &'static [(&'static str, &'static str)] {
    match package {
        "gevent" => &[
            ("wait_event", "event"),
            ("wait_lock", "lock"),
            ("wait_queue", "queue"),
            ("wait_semaphore", "semaphore"),
            ("wait_sleep", "sleep"),
            ("wait_socket", "socket"),
        ],
        "eventlet" => &[
            ("wait_event", "event"),
            ("wait_queue", "queue"),
            ("wait_sleep", "sleep"),
            ("wait_socket", "socket"),
        ],
        _ => &[
            ("inner_lock", "lock"),
            ("wait_event", "event"),
            ("wait_lock", "task"),
            ("wait_queue", "queue"),
            ("wait_sleep", "sleep"),
            ("wait_socket", "socket"),
        ],
    }
}

/// Suspended greenlets and tasks of trio have the time that they await, and share the time that their hub waits.
#[test]
fn suspended_tasks_have_their_time() {
    let _live = live();
    each_package_and_backend(&["gevent", "eventlet", "trio"], |case, package, python, backend| {
        let mut program = Program::start(script(python, "other_waits.py", package));
        let words = ["--tasks", "--mode", "wall", "-r", "200", "--backend", backend];
        let r = attach(program.pid(), &words);
        program.finish();
        let duration = r.profile.meta.duration * 1e9;
        let by_function = |value| {
            let mut sums: BTreeMap<(String, String), u64> = BTreeMap::new();
            for ((task, kind), amount) in awaited(&r.profile, value) {
                *sums.entry((plain_name(&task).to_string(), kind)).or_default() += amount;
            }
            sums
        };
        let (awaits, wall) = (by_function("await"), by_function("wall"));
        let all: u64 = wall.values().sum();
        let expected = waits(package);
        for (task, kind) in expected {
            let key = ((*task).to_string(), (*kind).to_string());
            let time = awaits.get(&key).copied().unwrap_or(0) as f64;
            assert_likely!(
                (time / duration - 1.0).abs() < 0.05,
                "{case}: {task} {time} of {duration}: {awaits:?}\n{}",
                r.stderr
            );
            // All have equal shares, and so has the one that sleeps for short times.
            let share = wall.get(&key).copied().unwrap_or(0) as f64 / all as f64;
            let equal = 1.0 / (expected.len() + 1) as f64;
            assert_likely!((share - equal).abs() < 0.02, "{case}: {task} {share}: {wall:?}");
        }
        check_account(case, &r.profile);
        let poll = r.with("[waiting: poll]");
        assert_likely!(poll * 20 <= r.samples(), "{case}: {poll} of {} poll", r.samples());
    });
}

/// What blocks in `select` keeps that time, and only the rest is shared.
#[test]
fn tasks_that_block_have_their_time() {
    let _live = live();
    each_package(&["gevent", "eventlet", "trio", "asyncio"], |case, package, python| {
        let mut program = Program::start(script(python, "other_blocks.py", package));
        let words = ["--tasks", "--mode", "wall", "-r", "500"];
        let r = attach(program.pid(), &words);
        program.finish();
        let wall = r.profile.find_value("wall").expect("the value");
        let all = r.profile.amounts(wall)[0] as f64;
        let frame = |at: usize| &*r.profile.frames[r.profile.nodes[at].frame as usize].name;
        let (mut blocked, mut shared) = (0, 0);
        for (at, amount) in r.profile.self_amounts(wall).into_iter().enumerate() {
            let (mut up, mut is_inside) = (at, false);
            while up > 0 && !is_inside {
                up = r.profile.nodes[up].parent as usize;
                is_inside = frame(up) == "blocks";
            }
            blocked += if is_inside { amount } else { 0 };
            shared += if frame(at).starts_with("[awaiting ") { amount } else { 0 };
        }
        for (what, amount) in [("blocked", blocked), ("shared", shared)] {
            let share = amount as f64 / all;
            assert_likely!((share - 0.5).abs() < 0.1, "{case}: {what} {share}\n{}", r.stderr);
        }
    });
}

/// Tasks of trio that wait, each below the task whose nursery it is in.
#[test]
fn tasks_of_trio_that_wait() {
    let _live = live();
    each_package(&["trio"], |case, package, python| {
        let program = Program::start(script(python, "other_waits.py", package));
        let dump = dumped_tasks(program.pid());
        let tasks = dump["tasks"].as_array().expect("tasks");
        let of_id = |id: &Value| tasks.iter().find(|t| t["id"] == *id).expect("a task with this id");
        let plain = |text: &Value| plain_name(text.as_str().expect("a name")).to_string();
        let mut found = BTreeMap::new();
        for task in tasks.iter().filter(|t| t["kind"] == "trio") {
            let parent = task["awaited_by"].as_array().expect("a list").first();
            let parent = parent.map_or(String::new(), |id| plain(&of_id(id)["name"]));
            let outermost = plain(&task["frames"][0]["name"]);
            found.insert(plain(&task["name"]), (parent, outermost));
        }
        let pair = |a: &str, b: &str| (a.to_string(), b.to_string());
        let mut expected = BTreeMap::from([
            ("main".to_string(), pair("", "main")),
            ("inner_lock".to_string(), pair("wait_lock", "acquire")),
        ]);
        for name in ["wait_event", "wait_lock", "wait_queue", "wait_sleep", "wait_socket"] {
            expected.insert(name.to_string(), pair("main", name));
        }
        assert_eq!(found, expected, "{case}: {dump:#}");
    });
}

/// Each task has its share of the time, below the task whose nursery or group it is in.
#[test]
fn tasks_of_trio_and_anyio() {
    let _live = live();
    each_package_and_backend(
        &["trio", "anyio-trio", "anyio-asyncio"],
        |case, word, python, backend| {
            let mut program = Program::start(script(python, "trio_tasks.py", word));
            let r = attach(program.pid(), &["--tasks", "--backend", backend]);
            let truth = program.finish();
            let mut counts: BTreeMap<String, u64> = truth.keys().map(|name| (name.clone(), 0)).collect();
            let (mut without, mut in_part, mut all) = (0, 0, 0);
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
                // A task that was not known before its first sample has no awaiting tasks there, unless the sample proves them.
                assert!(chain.ends_with(&plain), "{case}: {plain:?}");
                in_part += if plain.len() < chain.len() { n } else { 0 };
                let at = stack.iter().rposition(|f| f.kind == FrameKind::Task).expect("a task");
                // anyio has a coroutine of its own around it; before 3.11 there is C between them.
                let below = stack[at + 1..].iter().filter(|f| f.kind == FrameKind::Python);
                let below: Vec<&str> = below.take(2).map(|f| f.name.as_str()).collect();
                assert!(below.contains(&"work"), "{case}: {plain:?} above {below:?}");
                *counts.get_mut(*names.last().expect("a task")).expect("it is there") += n;
            }
            check_counts(case, &counts, &truth, 0.02);
            assert_likely!(without * 200 <= all, "{case}: {without} of {all}\n{}", r.stderr);
            assert_likely!(in_part * 20 <= all, "{case}: {in_part} of {all}\n{}", r.stderr);
        },
    );
}
