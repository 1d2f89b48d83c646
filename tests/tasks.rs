//! asyncio tasks of programs whose tasks are at known places, in every CPython on this machine.
//!
//! Needs the privileges to read other processes and to sample (root); fails with a message where one is missing.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use nativeprof::profile::lags::Lag;
use nativeprof::profile::model::{Frame, FrameKind};
use serde_json::Value;

use common::chance::{assert_likely, patience};
use common::environments::each_third_environment;
use common::pythons::{each_of, each_with_backend, third};
use common::recording::{Recording, awaited, check_account, check_counts, dump_tasks, dumped_tasks, is_truncated};
use common::{Program, Python, attach, live, newest_python, pythons, record, sources};

mod common;

/// (task, task that awaits it or `-`, functions of its coroutines)
type Row = (String, String, Vec<String>);

/// Interpreters whose tasks are supported.
fn with_tasks() -> impl Iterator<Item = &'static Python> {
    pythons().iter().filter(|p| p.minor >= 7)
}

/// A function's name without those of classes and functions around it. From 3.13 on a task group's `__aexit__` calls
/// another coroutine, and a future that is implemented in Python ends with a generator.
fn plain(names: Vec<String>) -> Vec<String> {
    let last = |name: &String| name.rsplit('.').next().unwrap_or_default().to_string();
    let mut names: Vec<String> = names.iter().map(last).filter(|name| name != "_aexit").collect();
    names.pop_if(|name| name == "__await__");
    names
}

/// What nativeprof sees.
fn seen(dump: &Value) -> BTreeSet<(Row, u8)> {
    let tasks = dump["tasks"].as_array().expect("tasks");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let name_of = |id: &Value| {
        let found = tasks.iter().find(|t| t["id"] == *id);
        text(&found.expect("a task that awaits is in the list")["name"])
    };
    numbered(tasks.iter().map(|t| {
        let by: Vec<String> = t["awaited_by"]
            .as_array()
            .expect("a list")
            .iter()
            .map(name_of)
            .collect();
        let names = t["frames"].as_array().expect("frames").iter().map(|f| text(&f["name"]));
        let parent = if by.is_empty() { "-".into() } else { by.join("+") };
        (text(&t["name"]), parent, plain(names.collect()))
    }))
}

/// Rows that are the same differ in their number: before 3.8 several tasks have one name.
fn numbered(rows: impl Iterator<Item = Row>) -> BTreeSet<(Row, u8)> {
    let mut all = BTreeSet::new();
    for row in rows {
        let n = (0..u8::MAX).find(|n| !all.contains(&(row.clone(), *n)));
        all.insert((row, n.expect("few tasks")));
    }
    all
}

/// What the program says of its tasks.
fn expected_rows(program: &Program) -> BTreeSet<(Row, u8)> {
    let row = |line: &String| {
        let words: Vec<&str> = line.strip_prefix("TASK ")?.split(' ').collect();
        let names = words[2].split(',').map(String::from).collect();
        Some((words[0].to_string(), words[1].to_string(), names))
    };
    numbered(program.said.iter().filter_map(row))
}

#[test]
fn tasks_are_where_they_say() {
    let _live = live();
    each_of(with_tasks(), |python| check_places(python, "c"));
}

/// Those that are implemented in Python, as all are that are created after `nest_asyncio.apply()`.
#[test]
fn tasks_in_python_are_where_they_say() {
    let _live = live();
    each_of(third(1, with_tasks()), |python| check_places(python, "python"));
}

fn check_places(python: &Python, implementation: &str) {
    let case = &format!("{} {implementation}", python.name);
    let mut command = python.script("tasks.py");
    command.arg(implementation);
    let mut program = Program::start(command);
    let dump = dumped_tasks(program.pid());
    let expected = expected_rows(&program);
    assert!(expected.len() >= 15, "{case}: {expected:#?}");
    assert_eq!(seen(&dump), expected, "{case}");
    assert_eq!(dump["incomplete"], Value::Array(Vec::new()), "{case}");
    let tasks = dump["tasks"].as_array().expect("tasks");
    let loops: BTreeSet<&str> = tasks.iter().filter_map(|t| t["loop"].as_str()).collect();
    assert_eq!(loops.len(), 2, "{case}: {loops:?}");
    for t in tasks {
        assert_eq!(t["state"], "suspended", "{case}: {t:#}");
        let frames = t["frames"].as_array().expect("frames");
        assert!(frames.iter().all(|f| f["line"].as_u64() > Some(0)), "{case}: {t:#}");
    }

    // A task that runs, in its thread, with the function that it calls.
    program.send("run");
    program.wait_for("RUNNING");
    let tid: u64 = program
        .said
        .last()
        .and_then(|s| s["RUNNING ".len()..].parse().ok())
        .expect("a number");
    let dump = dumped_tasks(program.pid());
    let running: Vec<&Value> = dump["tasks"]
        .as_array()
        .expect("tasks")
        .iter()
        .filter(|t| t["state"] == "running")
        .collect();
    let [task] = running[..] else {
        panic!("{case}: one task runs: {running:#?}")
    };
    let name = if python.minor > 7 { "runner" } else { "runs" };
    assert_eq!((&task["name"], &task["thread"]), (&name.into(), &tid.into()), "{case}");
    let names: Vec<&str> = task["frames"]
        .as_array()
        .expect("frames")
        .iter()
        .filter_map(|f| f["name"].as_str())
        .collect();
    assert_eq!(names[..2], ["runs", "busy"], "{case}: {names:?}");
}

/// While asyncio is imported, the objects that will hold its tasks are not there yet: others must not be taken for them.
#[test]
fn a_half_imported_asyncio_has_no_tasks_yet() {
    let _live = live();
    let plain = with_tasks().filter(|p| p.flags.is_empty());
    each_of(third(1, plain), |python| {
        let program = Program::start(python.script("half_imported.py"));
        let done = dump_tasks(program.pid(), &[]);
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(said.contains("has no asyncio tasks"), "{}: {said}", python.name);
    });
}

/// Lines of a tree: depth and text.
fn tree(text: &str) -> Vec<(usize, String)> {
    let line = |line: &str| {
        let start = line.find(|c: char| !" │├└─".contains(c))?;
        Some((line[..start].chars().count() / 4, line[start..].trim().to_string()))
    };
    text.lines().filter_map(line).collect()
}

/// The chain of names from the root to each task, as a set: the order of siblings differs.
fn paths(
    tree: &[(usize, String)],
    is_task: &dyn Fn(&str) -> Option<String>,
    frame: &dyn Fn(&str) -> String,
) -> BTreeSet<String> {
    let mut path: Vec<String> = vec![String::new()]; // tasks are one level below it
    let mut all = BTreeSet::new();
    for (depth, text) in tree {
        path.truncate(*depth);
        path.push(is_task(text).map_or_else(|| frame(text), |name| format!("task {name}")));
        all.insert(path.join(" > "));
    }
    all
}

/// The reader that comes with CPython 3.14 and later prints the same tree.
#[test]
fn the_tree_is_that_of_asyncio_pstree() {
    let _live = live();
    each_of(
        pythons().iter().filter(|p| p.minor >= 14 && p.flags.is_empty()),
        |python| {
            let case = &python.name;
            let program = Program::start(python.script("tasks.py"));
            let pid = program.pid().to_string();
            let oracle = Command::new(&python.exe)
                .args(["-m", "asyncio", "pstree", &pid])
                .output()
                .expect("the interpreter starts");
            let oracle = String::from_utf8_lossy(&oracle.stdout).into_owned();
            // `└──  outer /path/tasks.py:35`: from 3.14 on, the frame's name is followed by its place.
            let theirs = tree(&oracle);
            let theirs = paths(&theirs, &|text| text.strip_prefix("(T) ").map(String::from), &|text| {
                text.to_string()
            });
            let done = dump_tasks(program.pid(), &[]);
            let text = String::from_utf8_lossy(&done.stdout).into_owned();
            let (_, ours) = text.split_once("\n\n").expect("a tree after the heading");
            let ours: Vec<(usize, String)> = tree(ours).into_iter().map(|(depth, text)| (depth + 1, text)).collect();
            let ours = paths(
                &ours,
                &|text| text.strip_prefix("[task: ")?.strip_suffix(']').map(String::from),
                &|text| text.replacen(" (", " ", 1).trim_end_matches(')').to_string(),
            );
            let missing: Vec<&String> = theirs.difference(&ours).collect();
            assert!(
                theirs.len() > 40 && missing.is_empty(),
                "{case}: {missing:#?}\n{oracle}\n{text}"
            );
            // Theirs does not follow coroutines into generators, and 3.14.8's misses the loops of other threads.
            let excused = ["task by-object > by_object", "task looper > loops", "task elsewhere"];
            let extra = ours
                .difference(&theirs)
                .find(|path| !excused.iter().any(|part| path.contains(part)));
            assert_eq!(extra, None, "{case}:\n{oracle}\n{text}");
        },
    );
}

#[test]
fn what_has_no_tasks_is_explained() {
    let _live = live();
    let check = |pid: u32, expected: &str| {
        let done = dump_tasks(pid, &[]);
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(said.contains(expected), "{expected}: {said}");
    };
    let program = Program::start(newest_python().script("shares.py"));
    check(program.pid(), "it has not imported asyncio");
    let mut child = Command::new("sleep").arg("1000").spawn().expect("sleep starts");
    check(child.id(), "does not run Python");
    child.kill().expect("killed");
    child.wait().expect("waited for");
    check(child.id(), "no process");
    if let Some(old) = pythons().iter().find(|p| p.minor == 6) {
        let program = Program::start(old.script("shares.py"));
        check(program.pid(), "the layout of tasks is known for CPython 3.7 to 3.");
    }
}

/// Names of the task frames of a stack, outermost first.
fn task_frames<'a>(stack: &[&'a Frame]) -> Vec<&'a str> {
    let tasks = stack.iter().filter(|f| f.kind == FrameKind::Task);
    let name = |f: &&'a Frame| f.name.strip_prefix("[task: ")?.strip_suffix(']');
    tasks.filter_map(name).collect()
}

/// Each task has its share of the CPU time, with the tasks that await it above.
#[test]
fn samples_have_their_task() {
    const CHAINS: &[(&str, &[&str])] = &[
        ("alpha", &["main", "alpha"]),
        ("beta", &["main", "beta"]),
        ("python", &["main", "python"]),
        ("child", &["main", "parent", "child"]),
    ];
    let _live = live();
    let check = |python: &Python, backend: &str, implementation: &str| {
        let case = &format!("{} {implementation}", python.name);
        let mut command = python.script("task_shares.py");
        command.arg(implementation);
        let mut program = Program::start(command);
        let r = attach(program.pid(), &["--tasks", "--backend", backend]);
        let truth = program.finish();
        r.check_quality(case);
        let mut counts: BTreeMap<String, u64> = truth.keys().map(|name| (name.clone(), 0)).collect();
        let mut without = 0;
        for (stack, n) in r
            .stacks()
            .filter(|(stack, _)| stack.iter().any(|f| f.name == "measured"))
        {
            let names = task_frames(&stack);
            let Some(name) = names.last().filter(|_| !is_truncated(&stack)) else {
                without += n;
                continue;
            };
            let chain = CHAINS.iter().find(|(known, _)| known == name).map(|(_, chain)| *chain);
            assert_eq!(Some(&names[..]), chain, "{case}: {names:?}");
            // The coroutine is right below its task.
            let at = stack.iter().rposition(|f| f.kind == FrameKind::Task).expect("a task");
            assert_eq!(stack[at + 1].name, *name, "{case}");
            *counts.get_mut(*name).expect("a task with a share") += n;
        }
        check_counts(case, &counts, &truth, 0.01);
        let all = without + counts.values().sum::<u64>();
        // A task in Python is known from its second sample on.
        let some = if implementation == "c" { 500 } else { 50 };
        assert_likely!(
            without <= (all / some).max(1),
            "{case}: {without} of {all} samples have no task\n{}",
            r.stderr
        );
        assert!(
            r.stderr.contains("samples in coroutines and greenlets have their task"),
            "{case}: {}",
            r.stderr
        );
    };
    each_with_backend(with_tasks(), |python, backend| check(python, backend, "c"));
    eprintln!("with tasks in Python:"); // printed if it fails
    each_of(third(2, with_tasks()), |python| check(python, "ebpf", "python"));
}

/// Tasks that have ended before they could be read have their names, too.
#[test]
fn eager_tasks_have_their_names() {
    let _live = live();
    // `_asyncio` is built into the interpreter of some.
    let with_eager_tasks = |p: &&Python| p.minor >= 12;
    each_with_backend(pythons().iter().filter(with_eager_tasks), |python, backend| {
        let case = &python.name;
        let mut program = Program::start(python.script("eager_tasks.py"));
        let r = attach(program.pid(), &["--tasks", "--backend", backend]);
        program.finish();
        let (mut all, mut named) = (0, 0);
        let in_task = |stack: &[&Frame]| stack.iter().any(|f| f.name == "measured");
        for (stack, n) in r.stacks().filter(|(stack, _)| in_task(stack)) {
            all += n;
            named += if task_frames(&stack).last() == Some(&"quick") {
                n
            } else {
                0
            };
        }
        assert_likely!(all >= 100, "{case}: {all} samples\n{}", r.stderr);
        // The first ones come before the backend knows where tasks are.
        assert_likely!(all - named <= all / 50, "{case}: {named} of {all}\n{}", r.stderr);
    });
}

/// Samples in functions that only one task each runs (`task_names.py`) are below this task and those that await it:
/// `name` has the names of `main`, a task and its child, by their number.
fn check_names(case: &str, r: &Recording, name: &dyn Fn(&str) -> [String; 3]) {
    let (mut all, mut without) = (0, 0);
    for (stack, n) in r.stacks() {
        let mut numbers = stack.iter().filter_map(|f| Some((f, f.name.split_once('_')?)));
        let number = numbers.rfind(|(f, (kind, _))| f.kind == FrameKind::Python && ["work", "child"].contains(kind));
        let Some((_, (kind, number))) = number else { continue };
        all += n;
        let names = task_frames(&stack);
        if names.is_empty() {
            without += n;
            continue;
        }
        let [main, work, child] = name(number);
        let expected = if kind == "child" {
            vec![main, work, child]
        } else {
            vec![main, work]
        };
        assert_eq!(names, expected, "{case}");
    }
    assert_likely!(all >= 30, "{case}: {all} samples\n{}", r.stderr);
    assert_likely!(
        without <= all / 50,
        "{case}: {without} of {all} have no task\n{}",
        r.stderr
    );
}

/// Tasks that have ended, whose places others have taken, when their samples are processed.
#[test]
fn names_are_those_of_the_samples_instant() {
    let _live = live();
    let modes = [("sequence", "named"), ("concurrent", "unnamed"), ("children", "named")];
    each_with_backend(with_tasks(), |python, backend| {
        let (mode, names) = modes[(python.minor as usize + usize::from(backend == "ptrace")) % modes.len()];
        let case = format!("{} {mode} {names}", python.name);
        let mut command = python.script("task_names.py");
        command.args([mode, names]);
        let mut program = Program::start(command);
        let r = attach(program.pid(), &["--tasks", "-r", "199", "--backend", backend]);
        program.finish();
        check_names(&case, &r, &|number| match (python.minor, names) {
            (7, _) => ["main".into(), format!("work_{number}"), format!("child_{number}")],
            (_, "named") => ["main".into(), format!("conn-{number}"), "child".into()],
            _ => ["Task-1".into(), format!("Task-{number}"), String::new()],
        });
    });
}

#[test]
fn names_are_those_of_the_samples_instant_with_uvloop() {
    let _live = live();
    each_third_environment(1, |version, directory| {
        let mode = if version == "3.9" { "concurrent" } else { "sequence" };
        let mut command = Command::new(directory.join("bin/python"));
        command
            .arg(sources().join("task_names.py"))
            .args([mode, "named", "uvloop"]);
        let mut program = Program::start(command);
        let r = attach(program.pid(), &["--tasks", "-r", "199"]);
        program.finish();
        check_names(version, &r, &|number| {
            ["main".into(), format!("conn-{number}"), "child".into()]
        });
    });
}

/// Suspended tasks have the time that they await, and share the time that their event loop waits.
#[test]
fn suspended_tasks_have_their_time() {
    let _live = live();
    each_with_backend(third(2, with_tasks()), |python, backend| {
        let case = &python.name;
        let mut program = Program::start(python.script("task_waits.py"));
        let words = ["--tasks", "--mode", "wall", "-r", "200", "--backend", backend];
        let r = attach(program.pid(), &words);
        program.finish();
        let duration = r.profile.meta.duration * 1e9;
        let awaits = awaited(&r.profile, "await");
        let wall = awaited(&r.profile, "wall");
        let all: u64 = wall.values().sum();
        let kinds = "lock semaphore condition event queue future gather task";
        for kind in kinds.split(' ') {
            let key = (kind.to_string(), kind.to_string());
            let time = awaits.get(&key).copied().unwrap_or(0) as f64;
            assert_likely!(
                (time / duration - 1.0).abs() < 0.03,
                "{case}: {kind} {time} of {duration}: {awaits:?}"
            );
            // The 10 tasks have equal shares.
            let share = wall.get(&key).copied().unwrap_or(0) as f64 / all as f64;
            assert_likely!((share - 0.1).abs() < 0.02, "{case}: {kind} {share}: {wall:?}");
        }
        let sleeps = awaits.get(&("sleep".into(), "sleep".into())).copied().unwrap_or(0);
        assert_likely!(
            sleeps as f64 > 0.8 * duration,
            "{case}: sleep {sleeps} of {duration}: {awaits:?}"
        );
        let poll = r.with("[waiting: poll]");
        assert_likely!(
            poll * 50 <= r.samples(),
            "{case}: {poll} of {} wait in poll",
            r.samples()
        );
        check_account(case, &r.profile);
    });
}

/// What the program says of how it blocked its event loop: task, function, start and length in ns.
fn blocks(program: &Program) -> Vec<(String, String, u64, u64)> {
    let row = |line: &String| {
        let words: Vec<&str> = line.strip_prefix("BLOCK ")?.split(' ').collect();
        let number = |at: usize| words[at].parse().expect("a number of ns");
        let task = words[0].trim_matches('-').to_string();
        Some((task, words[1].to_string(), number(2), number(3)))
    };
    program.said.iter().filter_map(row).collect()
}

/// Every callback that blocks the event loop is listed, with its task, function and length, and no other.
#[test]
fn what_keeps_the_loop_is_listed() {
    let _live = live();
    let check = |python: &Python, words: &[&str]| {
        let case = &python.name;
        let mut program = Program::start(python.script("loop_blocks.py"));
        let seconds = 2 * u64::from(patience());
        let duration = seconds.to_string();
        let r = attach(program.pid(), &[words, &["--lag", "50ms", "-d", &duration]].concat());
        program.finish();
        let lags = &r.profile.meta.lags;
        assert_likely!(!lags.is_empty(), "{case}: {}", r.stderr);
        let began = lags[0].start - lags[0].time;
        // Those at the ends of the recording may be cut.
        let margin = 700_000_000;
        let window = began + margin..began + seconds * 1_000_000_000 - margin / 4;
        let truth = blocks(&program);
        let mut found = 0;
        for (task, function, start, length) in &truth {
            if !window.contains(start) || !window.contains(&(start + length)) {
                continue;
            }
            let middle = start + length / 2;
            let lag = lags
                .iter()
                .find(|lag| (lag.start..lag.start + lag.length).contains(&middle));
            let Some(lag) = lag else {
                assert_likely!(false, "{case}: {task} {function} at {start} is missing: {lags:#?}");
                continue;
            };
            found += 1;
            // Off-CPU intervals are exact; else the times are those at which the queue was read.
            let exact = words.contains(&"wall");
            let slack = if exact { 5_000_000 } else { 20_000_000 };
            assert_likely!(
                lag.length.abs_diff(*length) < slack + length / 10,
                "{case}: {function} took {length}: {lag:#?}"
            );
            let is_there = |name: &str| lag.stack.iter().any(|frame| frame.starts_with(&format!("{name} ")));
            assert_likely!(is_there(function), "{case}: {task} {function}: {lag:#?}");
            assert_likely!(lag.task == *task, "{case}: {task} {function}: {lag:#?}");
        }
        assert_likely!(found >= 4, "{case}: {found} of {truth:?} are in {window:?}");
        let is_other = |lag: &&Lag| {
            let overlaps = |(_, _, start, length): &(String, String, u64, u64)| {
                lag.start < start + length && *start < lag.start + lag.length
            };
            window.contains(&lag.start) && !truth.iter().any(overlaps)
        };
        let other = lags.iter().find(is_other);
        assert_likely!(other.is_none(), "{case}: {other:#?}");
        assert!(r.stderr.contains("blocked an event loop"), "{case}: {}", r.stderr);
    };
    each_with_backend(third(1, with_tasks()), |python, backend| {
        check(python, &["--backend", backend])
    });
    eprintln!("with waiting time:"); // printed if it fails
    each_of(third(0, with_tasks()), |python| {
        check(python, &["--backend", "ebpf", "--mode", "wall"])
    });
}

/// The functions of the callbacks that blocked the event loop of a launched program.
fn early_lags(command: &Command) -> (BTreeSet<String>, String) {
    let r = record(&["--lag", "50ms"], command);
    let function = |lag: &Lag| Some(lag.function.split_once(' ')?.0.to_string());
    (r.profile.meta.lags.iter().filter_map(function).collect(), r.stderr)
}

const EARLY: [&str; 4] = ["block_1", "block_2", "block_3", "block_4"];

/// What blocks the event loop of a program that was just launched is listed from the first callback on.
#[test]
fn early_lags_are_listed() {
    let _live = live();
    each_of(third(2, with_tasks()), |python| {
        let (found, stderr) = early_lags(&python.script("early_blocks.py"));
        assert_likely!(found.iter().eq(&EARLY), "{}: {found:?}\n{stderr}", python.name);
    });
}

/// The same of uvloop, whose thread is known although no sample shows it.
#[test]
fn early_lags_of_uvloop_are_listed() {
    let _live = live();
    each_third_environment(2, |version, directory| {
        let mut command = Command::new(directory.join("bin/python"));
        command.arg(sources().join("early_blocks.py")).arg("uvloop");
        let (found, stderr) = early_lags(&command);
        assert_likely!(found.iter().eq(&EARLY), "{version}: {found:?}\n{stderr}");
    });
}
