//! `compare`: live runs of two commands, and what can go wrong with them.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::process::{Command, Output, Stdio};

use common::chance::{assert_likely, repeated};
use common::{Scratch, live, nativeprof, sources};
use nativeprof::profile::build::Builder;
use nativeprof::profile::json;
use nativeprof::profile::model::{Frame, Meta};
use nativeprof::profile::values::ValueType;
use serde_json::Value;

mod common;

/// `compare` with these words; its temporary files are in `scratch`.
fn command(scratch: &Scratch, words: &[&str]) -> Command {
    let mut command = nativeprof(&[&["compare"], words].concat());
    command.env_remove("COLUMNS").env("TMPDIR", temporary(scratch));
    command
}

/// A directory in which nothing may be left.
fn temporary(scratch: &Scratch) -> std::path::PathBuf {
    let path = scratch.path("temporary");
    fs::create_dir_all(&path).expect("a directory");
    path
}

#[track_caller]
fn assert_nothing_is_left(scratch: &Scratch) {
    let left = fs::read_dir(temporary(scratch)).expect("a directory").count();
    assert_eq!(left, 0, "files are left");
    let mark = scratch.directory().to_str().expect("UTF-8").to_string();
    let words = |process: fs::DirEntry| fs::read(process.path().join("cmdline")).unwrap_or_default();
    let remaining = || {
        let processes = fs::read_dir("/proc").expect("/proc").flatten();
        let words = processes.map(|process| String::from_utf8_lossy(&words(process)).into_owned());
        words.filter(|words| words.contains(&mark)).collect::<Vec<_>>()
    };
    // A process that was killed may take a moment to end.
    let mut tries = 0..200;
    while !remaining().is_empty() && tries.next().is_some() {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let remaining = remaining();
    assert!(remaining.is_empty(), "processes are left: {remaining:?}");
}

/// The exit code, standard output and standard error.
fn run(scratch: &Scratch, words: &[&str]) -> (Option<i32>, String, String) {
    // Where a command would wait for it.
    let done: Output = command(scratch, words)
        .stdin(Stdio::piped())
        .output()
        .expect("nativeprof starts");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (done.status.code(), text(done.stdout), text(done.stderr))
}

/// A command with the work of `same_work.py`; all of it is so many times as much.
fn work(part: f64) -> String {
    format!("python3 '{}/same_work.py' 1 {part}", sources().display())
}

#[test]
fn slower_commands_are_found_and_equal_ones_are_not() {
    let _live = live();
    repeated(|| {
        let scratch = Scratch::new();
        let runs = scratch.path("runs");
        let kept = runs.to_str().expect("UTF-8");
        let (old, new, same) = (work(0.5), work(1.5), work(0.5));
        let results = scratch.path("results.xml");
        let junit = results.to_str().expect("UTF-8");
        let words = [
            "--runs", "4..8", "-o", kept, "--json", "--github", "--junit", junit, &old, &new,
        ];
        let (code, output, said) = run(&scratch, &words);
        assert_likely!(code == Some(3), "{code:?}: {said}");
        assert!(said.contains("runs of each command in "), "{said}");
        // In the last look, or in an earlier one.
        let is_named =
            said.contains("all CPU time grew by ") || said.contains("growth by more than 5 % was seen after ");
        assert!(is_named, "{said}");
        assert!(
            !said.contains("nativeprof: undecided"),
            "an earlier look has the answer: {said}"
        );
        let written = fs::read_to_string(&results).expect("results");
        let is_annotated = said.contains("::error ") || said.contains("::warning ");
        assert!(is_annotated && written.contains("<testcase "), "{said}{written}");
        let found: Value = serde_json::from_str(&output).expect("JSON");
        assert_eq!((&found["question"], &found["paired"]), (&"runs".into(), &true.into()));
        assert_eq!(found["verdict"], "grown");
        let pairs = found["files"][0].as_array().map_or(0, Vec::len);
        assert!(pairs >= 4 && found["files"][1].as_array().map(Vec::len) == Some(pairs));
        // They can be compared again.
        let names = |side: &str| {
            let names = fs::read_dir(&runs).expect("the runs").flatten();
            let names = names.filter(|name| name.file_name().to_string_lossy().starts_with(side));
            names.map(|name| name.path().display().to_string()).collect::<Vec<_>>()
        };
        let (a, b) = (names("a-"), names("b-"));
        assert_eq!((a.len(), b.len()), (pairs, pairs));
        let again = nativeprof(&["diff", "--normalize", "time", "--before"])
            .args(a)
            .arg("--after")
            .args(b)
            .output();
        assert_eq!(again.expect("nativeprof starts").status.code(), Some(0));
        assert_nothing_is_left(&scratch);
        // A directory with runs takes no others.
        let (code, _, said) = run(&scratch, &["-o", kept, &old, &same]);
        assert!(code == Some(2) && said.contains("has runs already"), "{said}");

        let (code, output, said) = run(&scratch, &["--runs", "2..3", &old, &same]);
        assert_likely!(code == Some(0) || code == Some(4), "{code:?}: {output}{said}");
        assert!(
            output.contains("by the spread between pairs of runs, which alternate"),
            "{output}"
        );
        assert_nothing_is_left(&scratch);
    });
}

#[test]
fn commands_that_fail_are_named() {
    let _live = live();
    let scratch = Scratch::new();
    let ok = work(0.2);
    for (a, b, parts) in [
        // In a shell, with children.
        (&*ok, "exit 3", &["of B failed: exit code 3", "nothing is compared"][..]),
        ("kill -9 $$", &ok, &[" failed: signal 9 ended it"]),
        (
            &ok,
            "/nonexistent/program",
            &["run 1 of B failed: no such command: /nonexistent/program"],
        ),
        ("true", "true", &["run 1 of ", " has no samples", "more samples"]),
    ] {
        // The start of a program may have a sample by chance.
        let rate = if a == "true" { "1" } else { "999" };
        let (code, output, said) = run(&scratch, &["--runs", "1", "-r", rate, a, b]);
        assert_eq!((code, &*output), (Some(1), ""), "{a}, {b}: {said}");
        for part in parts {
            assert!(said.contains(part), "{a}, {b}: `{part}` is not in:\n{said}");
        }
    }
    let (code, _, said) = run(&scratch, &["--prepare", "false", "--runs", "1", &ok, &ok]);
    assert!(
        code == Some(1) && said.contains("--prepare failed before run 1: exit code 1"),
        "{said}"
    );
    for (words, part) in [
        (&["", "true"][..], "command A is empty"),
        (&["true", " "], "command B is empty"),
        (&["true", "Cargo.toml"], "nativeprof diff BEFORE AFTER"),
        (&["--fail-above", "3 calls", "true", "true"], "--value calls"),
        (&["--value", "calls", "true", "true"], "--trace counts"),
        (&["--runs", "0", "true", "true"], "8, 5.., 5..40"),
        (&["true"], "COMMAND B"),
    ] {
        let (code, _, said) = run(&scratch, words);
        assert!(code == Some(2) && said.contains(part), "{words:?}: {said}");
    }
    assert_nothing_is_left(&scratch);
}

#[test]
fn what_commands_print_and_read_is_apart() {
    let _live = live();
    let scratch = Scratch::new();
    let place = scratch.path("prepared");
    // It would wait for input, or for a reader of its output; the work is that of a child.
    let text = "cat && python3 -c 'import sys; print(\"ab\" * 300_000); print(\"cd\" * 3, file=sys.stderr); sum(range(9_000_000))'";
    let prepare = format!("echo >> {}", place.display());
    let words = ["--runs", "1", "--prepare", &prepare, text, text];
    let (code, output, said) = run(&scratch, &words);
    assert_eq!(code, Some(4), "{said}");
    for printed in ["abab", "cdcd"] {
        assert!(!output.contains(printed) && !said.contains(printed), "{output}{said}");
    }
    // Before each run.
    assert_eq!(fs::read_to_string(&place).expect("written").len(), 2);
    let (code, output, said) = run(
        &scratch,
        &["--runs", "1", "--warmup", "1", "--show-output", "--json", text, text],
    );
    assert_eq!(code, Some(4));
    assert!(said.contains("abababab") && !output.contains("abab"));
    assert_eq!(said.matches("cdcdcd").count(), 4, "a run of each is not compared");
    let found: Value = serde_json::from_str(&output).expect("JSON");
    assert!(
        found["all"]["before"].as_f64() > Some(0.05),
        "the child is not sampled: {found}"
    );
}

/// A program that says when it has started, and goes on when it may.
const WAITING: &str = "
import sys
with open(sys.argv[1], 'w') as started:
    started.write('x')
with open(sys.argv[2]) as go:
    go.read(1)
sum(i * i for i in range(1_000_000))
";

#[test]
fn an_interrupted_comparison_leaves_complete_pairs() {
    let _live = live();
    let scratch = Scratch::new();
    fs::write(scratch.path("waiting.py"), WAITING).expect("a program");
    let [started, go] = ["started", "go"].map(|name| scratch.pipe(name));
    let open = |path| File::options().read(true).write(true).open(path).expect("a pipe");
    let (mut has_started, mut may_go) = (open(&started), open(&go));
    let runs = scratch.path("runs");
    let text = ["waiting.py", "started", "go"].map(|name| scratch.path(name).display().to_string());
    let text = format!("python3 {}", text.join(" "));
    for (complete, keeps, part) in [
        (2, true, "1 pair of runs kept in "),
        (0, true, "interrupted"),
        (2, false, "nothing is kept"),
    ] {
        let _ = fs::remove_dir_all(&runs);
        let mut words = vec![&*text, &*text];
        if keeps {
            words.extend(["-o", runs.to_str().expect("UTF-8")]);
        }
        let running = command(&scratch, &words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("nativeprof starts");
        let mut byte = [0];
        for _ in 0..complete {
            has_started.read_exact(&mut byte).expect("it has started");
            may_go.write_all(b"x").expect("it may go on");
        }
        has_started.read_exact(&mut byte).expect("it has started");
        let killed = Command::new("kill").args(["-INT", &running.id().to_string()]).status();
        assert!(killed.expect("kill, of procps").success());
        let done = running.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(130), "{said}");
        assert!(said.contains(part) && done.stdout.is_empty(), "{said}");
        assert_nothing_is_left(&scratch);
        let left = fs::read_dir(&runs).map_or(0, Iterator::count);
        assert_eq!(left, if keeps { complete } else { 0 }, "{said}");
    }
}

/// Stands for the package: writes the profile that its first argument names.
const COUNTER: &str = "
import shutil, sys
assert sys.argv[1:6] == ['--trace', 'counts', '--quiet', '-o', sys.argv[5]], sys.argv
shutil.copyfile(sys.argv[6], sys.argv[5])
";

#[test]
fn calls_are_counted_inside_python() {
    let scratch = Scratch::new();
    let package = scratch.path("nativeprof");
    fs::create_dir_all(&package).expect("a directory");
    for (name, text) in [("__init__.py", ""), ("__main__.py", COUNTER)] {
        fs::write(package.join(name), text).expect("a file");
    }
    let python = |calls: u64| {
        let mut builder = Builder::new(&[ValueType::CALLS]);
        let main = builder.frame(Frame::python("main", "", "/srv/app.py", 1));
        let work = builder.frame(Frame::python("work", "", "/srv/app.py", 9));
        builder.add(&[(main, 0)], &[1]);
        builder.add(&[(main, 0), (work, 0)], &[calls]);
        let mut out = Vec::new();
        json::write(&builder.finish(Meta::default()), &mut out).expect("memory takes it");
        let path = scratch.path(&format!("{calls}.json"));
        fs::write(&path, out).expect("a file");
        format!("python3 -X utf8 {}", path.display())
    };
    let (old, new) = (python(5000), python(5003));
    for (limit, code, part) in [
        ("2 calls", 3, "work (/srv/app.py:9) grew by 3 calls, more than 2"),
        ("3 calls", 0, "2 runs of each command"),
        ("0", 3, "work (/srv/app.py:9) grew by 0.06 %"),
    ] {
        let done = command(&scratch, &["--value", "calls", "--fail-above", limit, &old, &new])
            .env("PYTHONPATH", scratch.directory())
            .output()
            .expect("nativeprof starts");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(code), "{limit}: {said}");
        assert!(said.contains(part), "{limit}: {said}");
    }
    // A Python without the package.
    let (code, _, said) = run(&scratch, &["--value", "calls", "python3 -I x.py", "python3 -I x.py"]);
    assert!(
        code == Some(1) && said.contains("python3 -m pip install nativeprof"),
        "{said}"
    );
    assert_nothing_is_left(&scratch);
}
