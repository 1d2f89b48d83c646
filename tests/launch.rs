//! The environment of a launched command, and the behavior of its processes: exactly as without nativeprof.
//!
//! Needs root, gcc and CPython; fails with a message where one is missing.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::recording::Running;
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
fn a_recording_says_what_it_was_made_on() {
    let _live = live();
    let scratch = Scratch::new();
    let file = scratch.path("profile.json");
    let mut words = vec!["record", "-r", "499", "-o", file.to_str().expect("UTF-8"), "--"];
    // The CPUs that it may use are chosen after the start.
    words.extend(["taskset", "-c", "0", "python3", "-c", "sum(range(3_000_000))"]);
    run(&[], &nativeprof(&words), &[]);
    let profile = nativeprof::profile::json::read(&fs::read(&file).expect("a file")).expect("a profile");
    let machine = profile.meta.machine;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("a release");
    assert_eq!((&*machine.kernel, machine.cores), (release.trim(), 1));
    assert!(!machine.cpu.is_empty(), "{machine:?}");
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

/// Counts the signals that it receives, and prints each. Ends with code 3 at the SIGTERM of this number.
const COUNTER: &str = "
import os, signal, sys
terms = 0
def handle(number, frame):
    global terms
    name = signal.Signals(number).name
    print(name, flush=True)
    terms += name == 'SIGTERM'
    if terms == int(sys.argv[1]):
        sys.exit(3)
for name in 'TERM', 'HUP', 'INT', 'QUIT', 'USR1', 'USR2':
    signal.signal(getattr(signal, 'SIG' + name), handle)
print('READY', flush=True)
while True:
    sum(range(1000))
";

/// The program that counts signals, recorded, in a process group of its own.
struct Counted {
    running: Running,
    printed: BufReader<std::process::ChildStdout>,
}

impl Counted {
    fn start(backend: &str, out: &Path, terms: &str) -> Counted {
        let mut ours = nativeprof(&["record", "--backend", backend, "-o"]);
        ours.arg(out).arg("--").arg(&newest_python().exe);
        ours.args(["-c", COUNTER, terms]).process_group(0);
        let mut running = Running::start(ours);
        let printed = BufReader::new(running.child.stdout.take().expect("a pipe"));
        let mut counted = Counted { running, printed };
        assert_eq!(counted.line(), "READY");
        counted
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.printed.read_line(&mut line).expect("a readable pipe");
        line.trim_end().to_string()
    }

    /// Sends a signal to nativeprof, or to it and the command.
    fn signal(&self, name: &str, group: bool) {
        let pid = self.running.child.id();
        let to = if group { format!("-{pid}") } else { pid.to_string() };
        let done = Command::new("kill").args(["-s", name, "--", &to]).status();
        assert!(
            done.is_ok_and(|status| status.success()),
            "signal {name} cannot be sent"
        );
    }

    /// What else it printed until no process has its output open, then how nativeprof ended, and its messages.
    fn finish(mut self) -> (String, Option<i32>, String) {
        let mut rest = String::new();
        self.printed.read_to_string(&mut rest).expect("a readable pipe");
        let done = self.running.finish();
        (
            rest,
            done.status.code(),
            String::from_utf8_lossy(&done.stderr).into_owned(),
        )
    }
}

/// As `timeout` does, and a shell without nativeprof: each signal arrives once, however it was sent.
#[test]
fn signals_reach_the_command_once() {
    let _live = live();
    let scratch = Scratch::new();
    for (backend, group) in [("ebpf", false), ("ebpf", true), ("ptrace", false), ("ptrace", true)] {
        let out = scratch.path("x.collapsed");
        let mut counted = Counted::start(backend, &out, "2");
        let case = format!("{backend}, to the group: {group}");
        // Those after the first SIGTERM come while the profile is written, or nativeprof only waits.
        for name in ["USR1", "USR2", "QUIT", "HUP", "TERM", "USR1", "HUP", "QUIT", "TERM"] {
            counted.signal(name, group);
            assert_eq!(counted.line(), format!("SIG{name}"), "{case}");
        }
        let (rest, code, said) = counted.finish();
        assert_eq!((rest.as_str(), code), ("", Some(3)), "{case}: {said}");
        assert!(said.contains("  written:  ") && out.exists(), "{case}: {said}");
        fs::remove_file(&out).expect("the profile");
    }
}

/// Ctrl-C reaches the command without us; one that ignores it is left alone by the third, or by the one that ends the
/// wait.
#[test]
fn ctrl_c_ends_the_recording_then_the_wait() {
    let _live = live();
    let scratch = Scratch::new();
    let mut counted = Counted::start("ebpf", &scratch.path("x.collapsed"), "1");
    counted.signal("INT", true);
    assert_eq!(counted.line(), "SIGINT");
    let said = counted
        .running
        .read_until("waiting for the command to exit")
        .to_string();
    // Another user of `kill` than a terminal does not end the wait.
    counted.signal("INT", false);
    assert_eq!(counted.line(), "SIGINT");
    counted.signal("INT", true);
    assert_eq!(counted.line(), "SIGINT");
    let status = counted.running.child.wait().expect("a child to wait for");
    assert_eq!(status.signal(), Some(2), "{said}");
    counted.signal("TERM", true);
    assert_eq!(counted.line(), "SIGTERM");
}

/// At whatever point of the start it comes, no command is left, and the exit code is that of a command that received
/// it.
#[test]
fn a_signal_during_the_start_leaves_no_command() {
    let _live = live();
    let scratch = Scratch::new();
    let out = scratch.path("x.collapsed");
    for delay in 0..12 {
        let mut ours = nativeprof(&["record", "-o"]);
        ours.arg(&out).args(["--", "sleep", "1000"]).stdin(Stdio::null());
        let mut child: Child = ours
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        // Not a wait for anything: each round hits another part.
        std::thread::sleep(std::time::Duration::from_millis(delay * 12));
        let sent = Command::new("kill")
            .args(["-s", "TERM", &child.id().to_string()])
            .status();
        assert!(sent.is_ok_and(|status| status.success()));
        let (mut text, mut said) = (String::new(), String::new());
        // Until the command, too, has closed its output.
        child
            .stdout
            .take()
            .expect("a pipe")
            .read_to_string(&mut text)
            .expect("text");
        child
            .stderr
            .take()
            .expect("a pipe")
            .read_to_string(&mut said)
            .expect("text");
        let status = child.wait().expect("a child to wait for");
        assert!(
            status.signal() == Some(15) || status.code() == Some(143),
            "{status}: {said}"
        );
    }
}
