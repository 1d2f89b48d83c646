//! Allocations recorded by the command line: of commands, and of running processes. The package is tested by
//! python/tests/test_alloc.py.

use std::path::Path;
use std::process::{Command, Output};

use common::Scratch;
use common::environments::environments;
use common::live;
use common::programs::Program;
use common::recording::{Running, nativeprof};
use common::sources;
use nativeprof::profile::json;
use nativeprof::profile::model::Profile;

mod common;

/// Bytes of a block of the program, and of a mapping.
const BLOCK: u64 = 100_000;
const MAPPING: u64 = 1 << 20;
/// Blocks are larger than some of these, so that nearly all of them are seen.
const OFTEN: [&str; 4] = ["--interval", "4096", "--max-overhead", "100%"];

fn script() -> String {
    sources().join("allocating.py").to_str().expect("UTF-8").to_string()
}

fn stderr(done: &Output) -> String {
    String::from_utf8_lossy(&done.stderr).into_owned()
}

/// Inclusive amount of a value of the functions with this name.
fn amount(profile: &Profile, value: &str, function: &str) -> u64 {
    let value = profile.find_value(value).unwrap_or_else(|| panic!("no {value}"));
    let named = profile
        .nodes
        .iter()
        .map(|node| profile.frames[node.frame as usize].name == function);
    named
        .zip(profile.amounts(value))
        .filter(|(named, _)| *named)
        .map(|(_, amount)| amount)
        .sum()
}

fn read(file: &Path) -> Profile {
    json::read(&std::fs::read(file).expect("a profile")).expect("JSON")
}

fn is_about(seen: u64, truth: u64) {
    let share = seen as f64 / truth as f64;
    assert!((0.97..1.05).contains(&share), "{seen} of {truth}");
}

/// The newest Python that runs scripts for others, and the newest one that does not.
fn newest(has_requests: bool) -> (String, String) {
    let minor = |name: &str| name.split('.').nth(1).and_then(|minor| minor.parse::<u32>().ok());
    let fits = |name: &str| minor(name).is_some_and(|minor| (minor >= 14) == has_requests);
    let (name, directory) = environments()
        .iter()
        .rfind(|(name, _)| fits(name))
        .expect("a Python of 3.9 to 3.15");
    let python = directory.join("bin/python");
    (name.clone(), python.to_str().expect("UTF-8").to_string())
}

/// The amounts of a program that has allocated so many blocks in each way.
fn check(profile: &Profile, blocks: u64) {
    is_about(amount(profile, "alloc_bytes", "keep_blocks"), blocks * BLOCK);
    is_about(amount(profile, "live_bytes", "keep_blocks"), blocks * BLOCK);
    is_about(amount(profile, "alloc_bytes", "drop_blocks"), blocks * BLOCK);
    assert!(amount(profile, "live_bytes", "drop_blocks") < BLOCK * 2);
    is_about(amount(profile, "mapped_bytes", "map_blocks"), blocks / 10 * MAPPING);
    assert_eq!(amount(profile, "mapped_bytes", "drop_blocks"), 0);
}

#[test]
fn a_command_is_run_by_the_package() {
    let _live = live();
    let scratch = Scratch::new();
    let file = scratch.path("out.json");
    for (_, directory) in [environments().first(), environments().last()].into_iter().flatten() {
        let python = directory.join("bin/python").to_str().expect("UTF-8").to_string();
        let mut command = nativeprof(&["record", "--alloc", "-o", file.to_str().expect("UTF-8")]);
        command.args(OFTEN).args(["--", &python, "-B", &script(), "200"]);
        let done = command.output().expect("nativeprof starts");
        let text = stderr(&done);
        assert_eq!(done.status.code(), Some(3), "{text}");
        for words in [
            "sampling the allocations of",
            "every 4.00 KiB",
            "stacks:",
            "memory:",
            "written:",
            "code 3",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let profile = read(&file);
        check(&profile, 200);
        assert_eq!(profile.meta.command, format!("{python} -B {} 200", script()));
        assert_eq!(scratch.names(), ["out.json"]);
    }
}

#[test]
fn a_script_is_run_by_the_interpreter_that_it_names() {
    let _live = live();
    let scratch = Scratch::new();
    let (file, program) = (scratch.path("out.json"), scratch.path("program"));
    let (_, python) = newest(true);
    let text = std::fs::read_to_string(script()).expect("text");
    std::fs::write(&program, format!("#!{python} -B\n{text}")).expect("written");
    let mut command = nativeprof(&["record", "--alloc", "-o", file.to_str().expect("UTF-8")]);
    command.args(OFTEN).arg("--").arg(&program).arg("50");
    let done = command.output().expect("nativeprof starts");
    assert_eq!(done.status.code(), Some(3), "{}", stderr(&done));
    is_about(amount(&read(&file), "alloc_bytes", "keep_blocks"), 50 * BLOCK);
}

#[test]
fn commands_that_cannot_be_recorded_say_why() {
    let scratch = Scratch::new();
    let file = scratch.path("out.json");
    let (_, python) = newest(true);
    let refused = |options: &[&str], command: &[&str]| {
        let mut ours = nativeprof(&["record", "--alloc", "-o", file.to_str().expect("UTF-8")]);
        ours.args(options).arg("--").args(command);
        let done = ours.output().expect("nativeprof starts");
        assert!(!file.exists(), "{command:?}");
        (done.status.code(), stderr(&done))
    };
    let script = script();
    let (python, script) = (python.as_str(), script.as_str());
    for (command, code, words) in [
        (
            vec!["sleep", "1"],
            125,
            vec!["--alloc cannot be used with sleep", "why:", "--mode rss -- sleep 1"],
        ),
        (vec![python], 125, vec!["names no script"]),
        (vec![python, "-x", script], 125, vec!["option -x"]),
        // Without its site-packages.
        (
            vec![python, "-IS", script, "1"],
            125,
            vec![
                "cannot use the package nativeprof",
                "ModuleNotFoundError",
                "-m pip install",
                "--mode rss",
            ],
        ),
        (vec!["/no/such/python3", "x.py"], 127, vec!["no such command"]),
        (vec!["no-such-command"], 127, vec!["no such command"]),
        (
            vec![python, "-c", "import os; os._exit(5)"],
            125,
            vec!["left no profile", "os._exit"],
        ),
    ] {
        let (seen, text) = refused(&[], &command);
        assert_eq!(seen, Some(code), "{command:?}: {text}");
        for words in words {
            assert!(text.contains(words), "{command:?}: {words}: {text}");
        }
    }
    for (options, words) in [
        (&["-d", "1"][..], "--duration cannot be used with --alloc"),
        (&["--mode", "wall"], "cannot be used with"),
        (&["-r", "10"], "cannot be used with"),
        (&["--subprocesses"], "cannot be used with"),
    ] {
        let (_, text) = refused(options, &[python, script, "1"]);
        assert!(text.contains(words), "{options:?}: {text}");
    }
}

fn program(python: &str, environment: &[(&str, &str)]) -> Program {
    let mut command = Command::new(python);
    command.args(["-B", &script()]).envs(environment.iter().copied());
    Program::start(command)
}

/// `attach --alloc`, up to its words that it waits for the program, which sleeps; then the program runs Python code.
fn attached(target: &mut Program, file: &Path, options: &[&str]) -> Running {
    let mut command = nativeprof(&["attach", &target.pid().to_string(), "--alloc", "-o"]);
    command.arg(file).args(OFTEN).args(options);
    let mut running = Running::start_until(command, "waiting until the main thread");
    target.send("nothing");
    running.read_until("sampling the allocations");
    target.wait_for("DONE");
    running
}

fn ask(target: &mut Program, line: &str) -> String {
    target.send(line);
    target.wait_for("DONE");
    target.said.last().expect("a line").clone()
}

/// No slot of the program is hooked, and it has one thread, as soon as the package's thread has ended.
fn left_alone(target: &mut Program) {
    let mut said = String::new();
    for _ in 0..10_000 {
        said = ask(target, "hooks");
        if said == "DONE 0 1" {
            return;
        }
    }
    panic!("hooked slots, and threads: {said}");
}

#[test]
fn a_running_process_is_recorded_and_left_as_it_was() {
    let _live = live();
    let (_, python) = newest(true);
    let scratch = Scratch::new();
    let file = scratch.path("out.json");
    let mut target = program(&python, &[]);
    ask(&mut target, "keep 10"); // before: not seen
    for _ in 0..2 {
        let mut running = attached(&mut target, &file, &[]);
        for line in ["keep 200", "drop 200", "map 20"] {
            ask(&mut target, line);
        }
        running.signal("INT");
        let done = running.finish();
        assert!(done.status.success(), "{}", stderr(&done));
        let profile = read(&file);
        check(&profile, 200);
        assert!(profile.meta.command.contains("allocating.py"));
        assert_eq!(
            ask(&mut target, "hooks"),
            "DONE 0 1",
            "no slot is hooked, and there is one thread"
        );
    }
    target.finish();
}

/// The blocks that the package samples, read from outside at the same time.
#[test]
fn recordings_inside_are_published() {
    let _live = live();
    for (_, python) in [newest(false), newest(true)] {
        let scratch = Scratch::new();
        let (inside, outside) = (scratch.path("inside.json"), scratch.path("outside.json"));
        let mut command = Command::new(python);
        command.args([
            "-B",
            "-m",
            "nativeprof",
            "--alloc",
            "-q",
            "--max-overhead",
            "100%",
            "-o",
        ]);
        command.arg(&inside).arg(script());
        let mut target = Program::start(command);
        let mut ours = nativeprof(&["attach", &target.pid().to_string(), "--mode", "alloc", "-o"]);
        ours.arg(&outside);
        let mut running = Running::start(ours);
        for line in ["keep 2000", "drop 5000"] {
            ask(&mut target, line);
        }
        running.signal("INT");
        let done = running.finish();
        assert!(done.status.success(), "{}", stderr(&done));
        target.finish();
        let (inside, outside) = (read(&inside), read(&outside));
        assert_eq!(outside.meta.quality.lost, 0, "{}", stderr(&done));
        for (value, function) in [
            ("alloc_bytes", "keep_blocks"),
            ("live_bytes", "keep_blocks"),
            ("alloc_bytes", "drop_blocks"),
            ("allocs", "drop_blocks"),
        ] {
            let (own, seen) = (amount(&inside, value, function), amount(&outside, value, function));
            // A stack that is incomplete on one side has no such function.
            let share = seen as f64 / own as f64;
            assert!(
                (0.95..1.05).contains(&share),
                "{value} of {function}: {seen}, not {own}"
            );
        }
        assert!(outside.find_value("mapped_bytes").is_none());
    }
}

/// A process that cannot be recorded from its inside, and publishes.
#[test]
fn processes_that_publish_are_read_from_outside() {
    let _live = live();
    let (_, python) = newest(false);
    let scratch = Scratch::new();
    let mut command = Command::new(python);
    command.args(["-B", "-m", "nativeprof", "--alloc", "-q", "-o"]);
    command.arg(scratch.path("inside.json")).arg(script());
    let mut target = Program::start(command);
    let mut ours = nativeprof(&["attach", &target.pid().to_string(), "--alloc", "-o"]);
    let done = ours.arg(scratch.path("out.json")).output().expect("nativeprof starts");
    let said = stderr(&done);
    assert!(!done.status.success() && said.contains("--mode alloc"), "{said}");
    target.finish();
}

#[test]
fn the_end_of_a_recording_comes_in_many_ways() {
    let _live = live();
    let (_, python) = newest(true);
    let scratch = Scratch::new();
    let file = scratch.path("out.json");

    // The duration is over.
    let mut target = program(&python, &[]);
    let mut running = attached(&mut target, &file, &["-d", "500ms"]);
    ask(&mut target, "keep 50");
    assert!(running.finish().status.success());
    is_about(amount(&read(&file), "live_bytes", "keep_blocks"), 50 * BLOCK);

    // nativeprof is killed: the package notices, and takes its hooks away.
    let mut running = attached(&mut target, &file, &[]);
    running.signal("KILL");
    running.child.wait().expect("a child");
    left_alone(&mut target);

    // The program ends.
    let mut running = attached(&mut target, &file, &[]);
    ask(&mut target, "keep 60");
    target.finish();
    let done = running.finish();
    assert!(done.status.success(), "{}", stderr(&done));
    is_about(amount(&read(&file), "live_bytes", "keep_blocks"), 60 * BLOCK);

    // It is given up before the program has noticed.
    let mut target = program(&python, &[]);
    let mut command = nativeprof(&["attach", &target.pid().to_string(), "--alloc", "-o"]);
    command.arg(&file);
    let mut running = Running::start_until(command, "waiting until the main thread");
    running.signal("INT");
    let done = running.finish();
    assert_eq!(done.status.code(), Some(1));
    assert!(
        stderr(&done).contains("the request was taken back"),
        "{}",
        stderr(&done)
    );
    assert_eq!(ask(&mut target, "nothing"), "DONE");
    left_alone(&mut target);
    target.finish();
}

#[test]
fn processes_that_cannot_be_recorded_say_why() {
    let _live = live();
    let (old, new) = (newest(false), newest(true));
    let scratch = Scratch::new();
    let file = scratch.path("out.json");
    let disabled = [("PYTHON_DISABLE_REMOTE_DEBUG", "1")];
    let mut missing = Command::new(&new.1);
    missing.args(["-BIS", &script()]);
    let mut sleeping = Command::new("sh");
    sleeping.args(["-c", "echo READY; read line"]);
    let version = format!("CPython {}", old.0);
    for (mut target, words) in [
        (program(&old.1, &[]), vec![version.as_str(), "sys.remote_exec"]),
        (program(&new.1, &disabled), vec!["PYTHON_DISABLE_REMOTE_DEBUG"]),
        (Program::start(sleeping), vec!["does not run CPython"]),
        (Program::start(missing), vec!["ModuleNotFoundError", "-m pip install"]),
    ] {
        let pid = target.pid().to_string();
        let mut command = nativeprof(&["attach", &pid, "--alloc", "-o"]);
        command.arg(&file);
        let done = if words[0] == "ModuleNotFoundError" {
            let mut running = Running::start_until(command, "waiting until the main thread");
            target.send("nothing");
            running.finish()
        } else {
            command.output().expect("nativeprof starts")
        };
        let text = stderr(&done);
        assert_eq!(done.status.code(), Some(1), "{text}");
        for words in words.iter().chain(&["why:", &format!("attach {pid} --mode rss")[..]]) {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(!file.exists());
    }
}
