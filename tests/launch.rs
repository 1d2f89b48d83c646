//! The environment of a launched command, and the behavior of its processes: exactly as without nativeprof.
//!
//! Needs root, gcc and CPython; fails with a message where one is missing.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Scratch, live, nativeprof, newest_python, programs};

mod common;

/// Runs a command prefixed by others, with pipes for input, output and errors; its exit code must be 0.
fn run(before: &[&str], command: &Command, extra: &[(&str, &str)]) -> (String, String) {
    let mut words: Vec<_> = before.iter().map(|w| w.as_ref()).collect();
    words.push(command.get_program());
    words.extend(command.get_args());
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    for name in ["SUDO_UID", "SUDO_GID", "SUDO_USER", "DOAS_USER"] {
        command.env_remove(name);
    }
    command.envs(extra.iter().copied()).stdin(Stdio::piped());
    let done = command.output().expect("a program that starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let said = text(&done.stderr);
    assert!(done.status.success(), "{command:?}: {}: {said}", done.status);
    (text(&done.stdout), said)
}

/// A copy that all users may execute.
fn copy(from: &Path, scratch: &Scratch) -> PathBuf {
    let to = scratch.path(&from.file_name().expect("a file").to_string_lossy());
    programs::copy(from, &to);
    to
}

/// Variables that sudo's user has instead of root's.
const OF_USER: [&str; 12] = [
    "Uid:",
    "Gid:",
    "Groups:",
    "CapInh:",
    "CapPrm:",
    "CapEff:",
    "CapAmb:",
    "variable USER=",
    "variable LOGNAME=",
    "variable HOME=",
    "variable SHELL=",
    "variable SUDO_",
];

fn check_state(backend: &str, sudo: bool, children: bool) {
    let scratch = Scratch::new();
    fs::set_permissions(scratch.directory(), Permissions::from_mode(0o777)).expect("permissions");
    let state = copy(Path::new(programs::state().get_program()), &scratch);
    let state = state.to_str().expect("a path in UTF-8");
    let mut show = Command::new(state);
    show.arg("show");
    let ours = nativeprof(&[]);
    let mut with = vec![
        ours.get_program().to_str().expect("a path in UTF-8"),
        "record",
        "--backend",
        backend,
    ];
    with.extend(["-o", "/dev/null", "-f", "collapsed"]);
    with.extend(children.then_some("--subprocesses"));
    with.push("--");
    let variables = [("SUDO_UID", "65534"), ("SUDO_GID", "65534"), ("SUDO_USER", "nobody")];
    let variables = if sudo { &variables[..] } else { &[] };
    for mode in [&[][..], &[state, "odd"], &[state, "terminal"]] {
        let expected = run(mode, &show, variables).0;
        let (found, said) = run(&[mode, &with[..]].concat(), &show, variables);
        let lines = |text: &str| -> Vec<String> {
            let other = |line: &&str| !sudo || !OF_USER.iter().any(|w| line.contains(w));
            text.lines().filter(other).map(String::from).collect()
        };
        let (expected, found) = (lines(&expected), lines(&found));
        assert!(expected.len() > 60, "{expected:#?}");
        let set = |lines: &[String]| -> BTreeSet<String> { lines.iter().cloned().collect() };
        let (before, after) = (set(&expected), set(&found));
        let lost: Vec<_> = before.difference(&after).collect();
        let new: Vec<_> = after.difference(&before).collect();
        let case = format!("{backend}, sudo {sudo}, subprocesses {children}, {mode:?}");
        assert!(
            lost.is_empty() && new.is_empty(),
            "{case}: {lost:#?} became {new:#?}\n{said}"
        );
        // Also in the same order.
        assert_eq!(found, expected, "{case}");
        assert!(said.contains(&format!("({backend}, ")), "{case}: {said}");
    }
}

#[test]
fn a_command_starts_as_without_nativeprof() {
    let _live = live();
    for backend in ["ebpf", "ptrace"] {
        for (sudo, children) in [(false, false), (false, true), (true, false), (true, true)] {
            check_state(backend, sudo, children);
        }
    }
}

#[test]
fn record_ends_with_the_exit_code_of_its_command() {
    let _live = live();
    for (script, code, said) in [
        ("exit 0", 0, ""),
        ("exit 3", 3, "sh exited with code 3"),
        ("exit 125", 125, "sh exited with code 125"),
        ("kill -USR1 $$", 138, "sh was killed by signal 10"),
        ("kill -PIPE $$", 141, "sh was killed by signal 13"),
    ] {
        for backend in ["ebpf", "ptrace"] {
            let words = [
                "record",
                "--backend",
                backend,
                "-o",
                "/dev/null",
                "-f",
                "collapsed",
                "--",
                "sh",
                "-c",
                script,
            ];
            let done = nativeprof(&words)
                .stdin(Stdio::null())
                .output()
                .expect("nativeprof starts");
            let text = String::from_utf8_lossy(&done.stderr).into_owned();
            assert!(done.status.code() == Some(code) && text.contains(said), "{text}");
        }
    }
    let words = ["record", "-o", "/dev/null", "-f", "collapsed", "--", "/"];
    let done = nativeprof(&words)
        .stdin(Stdio::null())
        .output()
        .expect("nativeprof starts");
    let text = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(
        done.status.code() == Some(126) && text.contains("cannot run /") && text.contains("Permission denied"),
        "{text}"
    );
}

#[test]
fn killed_workers_are_replaced() {
    let _live = live();
    let script = newest_python().script("prefork.py");
    for backend in ["ebpf", "ptrace"] {
        let mut ours = nativeprof(&["record", "-r", "1000", "--subprocesses", "--backend", backend]);
        ours.args(["-o", "/dev/null", "-f", "collapsed", "--"]);
        ours.arg(script.get_program()).args(script.get_args());
        for (name, value) in script.get_envs() {
            match value {
                Some(value) => ours.env(name, value),
                None => ours.env_remove(name),
            };
        }
        let done = ours.stdin(Stdio::null()).output().expect("nativeprof starts");
        let (said, text) = (
            String::from_utf8_lossy(&done.stdout),
            String::from_utf8_lossy(&done.stderr),
        );
        assert!(
            done.status.success() && said.contains("REPLACED"),
            "{backend}: {said}{text}"
        );
    }
}
