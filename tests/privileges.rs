//! Privileges: the owner of a command and its profile under sudo, when capabilities are dropped, and hostile names.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::chance::{assert_likely, repeated};
use common::recording::Running;
use common::{Program, Scratch, live, nativeprof, programs, with_capabilities};

mod common;
#[path = "history/day.rs"]
mod day;

/// The user nobody, on every system.
const NOBODY: u32 = 65534;

/// A directory that everyone may write to, like a home directory of the invoking user.
fn open_directory() -> Scratch {
    let scratch = Scratch::new();
    fs::set_permissions(scratch.directory(), Permissions::from_mode(0o777)).expect("permissions");
    scratch
}

/// nativeprof as sudo starts it for the user nobody.
fn by_sudo(args: &[&str]) -> Command {
    let mut command = nativeprof(args);
    command
        .env("SUDO_UID", NOBODY.to_string())
        .env("SUDO_GID", NOBODY.to_string())
        .env("SUDO_USER", "nobody")
        .env("HOME", "/root")
        .env("USER", "root")
        .stdin(Stdio::null());
    command
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

fn run(mut command: Command) -> (Output, String) {
    let done = command.output().expect("nativeprof starts");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    (done, said)
}

/// `/proc/PID/status` by its words.
fn status(pid: u32) -> BTreeMap<String, String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process that is not waited for");
    let pairs = text.lines().filter_map(|l| l.split_once(':'));
    pairs.map(|(name, value)| (name.into(), value.trim().into())).collect()
}

/// What the command prints about itself.
const WHO: &str = "id -u; id -g; echo $USER $LOGNAME $HOME; grep -E '^(CapPrm|NoNewPrivs)' /proc/self/status";

#[test]
fn under_sudo_a_command_runs_as_the_caller() {
    let _live = live();
    let scratch = open_directory();
    let out = scratch.path("x.collapsed");
    let (done, said) = run(by_sudo(&["record", "-o", text(&out), "--", "sh", "-c", WHO]));
    assert!(done.status.success(), "{said}");
    let printed = String::from_utf8_lossy(&done.stdout).into_owned();
    let lines: Vec<_> = printed.lines().collect();
    assert_eq!(lines[..2], ["65534", "65534"], "{printed}");
    assert!(
        lines[2].starts_with("nobody nobody ") && !lines[2].contains("root"),
        "{printed}"
    );
    assert_eq!(lines[3], "CapPrm:\t0000000000000000");
    // It may call sudo itself.
    assert_eq!(lines[4], "NoNewPrivs:\t0");
    let file = fs::metadata(&out).expect("a profile");
    assert_eq!((file.uid(), file.gid(), file.mode() & 0o022), (NOBODY, NOBODY, 0));
}

#[test]
fn root_stays_root_on_request() {
    let _live = live();
    let scratch = Scratch::new();
    let out = scratch.path("x.collapsed");
    let words = ["record", "--as-root", "-o", text(&out), "--", "sh", "-c", WHO];
    for mut command in [by_sudo(&words), nativeprof(&words)] {
        command.env("USER", "root").env("HOME", "/root").env_remove("LOGNAME");
        let (done, said) = run(command);
        assert!(done.status.success(), "{said}");
        let printed = String::from_utf8_lossy(&done.stdout).into_owned();
        let lines: Vec<_> = printed.lines().collect();
        assert_eq!(lines[..3], ["0", "0", "root /root"], "{printed}");
        // All capabilities of root, not those that nativeprof keeps.
        assert_eq!(lines[3], format!("CapPrm:\t{}", status(std::process::id())["CapPrm"]));
        assert_eq!(lines[4], "NoNewPrivs:\t0");
        assert_eq!(fs::metadata(&out).expect("a profile").uid(), 0);
    }
}

/// CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE, CAP_SYSLOG, CAP_PERFMON, CAP_BPF, CAP_CHECKPOINT_RESTORE
const WHILE_SAMPLING: u64 = 1 << 2 | 1 << 19 | 1 << 34 | 1 << 38 | 1 << 39 | 1 << 40;

#[test]
fn privileges_are_dropped_when_they_are_not_needed() {
    let _live = live();
    let program = Program::start(programs::native(&[]));
    let pid = program.pid().to_string();
    repeated(|| {
        for caller in [true, false] {
            let scratch = open_directory();
            let pipe = scratch.pipe("pipe");
            let owner = if caller { NOBODY } else { 0 };
            std::os::unix::fs::chown(&pipe, Some(owner), Some(owner)).expect("the tests run as root");
            let words = ["attach", &pid, "-f", "json", "-o", text(&pipe)];
            let mut running = Running::start(if caller { by_sudo(&words) } else { nativeprof(&words) });
            let profiler = running.child.id();
            let caps = |of: &BTreeMap<String, String>, name| u64::from_str_radix(&of[name], 16).expect("a set");
            // Printed before sampling: what sampling does not need is dropped.
            let now = status(profiler);
            assert_eq!(caps(&now, "CapPrm") & !WHILE_SAMPLING, 0, "{now:?}");
            assert_eq!(caps(&now, "CapEff"), caps(&now, "CapPrm"));
            assert_eq!(now["NoNewPrivs"], "1");
            assert_eq!(now["Threads"], "1", "other threads would keep their privileges");
            let user = format!("{owner}\t{owner}\t{owner}\t{owner}");
            assert_eq!(now["Uid"], user);
            running.signal("INT");
            // It opens the pipe, and continues, only when there is a reader: the profile is symbolized but not yet written.
            let mut reader = fs::File::open(&pipe).expect("a pipe");
            let now = status(profiler);
            for name in ["CapPrm", "CapEff", "CapInh", "CapAmb"] {
                assert_eq!(caps(&now, name), 0, "{name} while the profile is written: {now:?}");
            }
            assert_eq!(now["Uid"], user);
            let mut profile = Vec::new();
            reader.read_to_end(&mut profile).expect("a profile");
            let done = running.finish();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            let profile = ::nativeprof::profile::json::read(&profile).expect("a complete profile");
            // Names of functions, not only addresses: the files were open.
            let named = profile.frames.iter().any(|f| f.name == "n_leaf");
            // Of one sample it may be elsewhere.
            assert_likely!(profile.nodes[0].count == 0 || named, "{:?}", profile.frames);
        }
    });
}

/// The recorder's directory belongs to root, and is closed to others.
#[test]
fn under_sudo_histories_are_read() {
    let scratch = open_directory();
    let host = day::Host {
        processes: 4,
        services: 2,
        samples: 60,
    };
    let histories = ["a", "b"].map(|name| scratch.path(name));
    for path in &histories {
        day::write(path, host, 6, |_| 20);
        fs::set_permissions(path, Permissions::from_mode(0o700)).expect("permissions");
    }
    let [a, b] = histories.each_ref().map(|path| text(path));
    for words in [
        &["report", a][..],
        &["diff", a, b],
        &["diff", a, "--last", "2m", "--against", "3m"],
    ] {
        let (done, said) = run(by_sudo(words));
        assert!(done.status.success(), "{words:?}: {said}");
    }
}

#[test]
fn under_sudo_nothing_is_written_with_the_privileges_of_root() {
    let scratch = open_directory();
    let victim = scratch.path("victim");
    fs::write(&victim, "precious").expect("a file");
    let closed = scratch.path("closed");
    fs::create_dir(&closed).expect("a directory");
    let (done, said) = run(by_sudo(&["record", "-o", text(&closed.join("x.svg")), "--", "true"]));
    assert_eq!(done.status.code(), Some(125), "{said}");
    for word in ["ermission denied", "as nobody", "--as-root"] {
        assert!(said.contains(word), "`{word}` is not in {said}");
    }
    // A link that another user has put in the place of the profile.
    let _live = live();
    let link = scratch.path("x.collapsed");
    symlink(&victim, &link).expect("a link");
    let (done, said) = run(by_sudo(&["record", "-o", text(&link), "--", "true"]));
    assert!(done.status.success(), "{said}");
    assert_eq!(fs::read_to_string(&victim).expect("a file"), "precious");
    let file = fs::symlink_metadata(&link).expect("a profile");
    assert!(file.is_file() && file.uid() == NOBODY);
    // In a directory like /tmp, files of other users are not replaced.
    fs::set_permissions(scratch.directory(), Permissions::from_mode(0o1777)).expect("permissions");
    let (done, said) = run(by_sudo(&["record", "-f", "svg", "-o", text(&victim), "--", "true"]));
    assert_eq!(done.status.code(), Some(125), "{said}");
    assert_eq!(fs::read_to_string(&victim).expect("a file"), "precious");
}

/// Ticks cannot stop threads to which the invoking user may not send signals.
#[test]
fn under_sudo_stops_of_another_users_process_are_as_many_as_samples() {
    let _live = live();
    let scratch = open_directory();
    let out = scratch.path("x.json");
    let mut command = common::newest_python().script("many_calls.py");
    command.arg("unused");
    let program = Program::start(command);
    let pid = program.pid();
    // It never waits by itself.
    let stops = || -> u64 { status(pid)["voluntary_ctxt_switches"].parse().expect("a number") };
    let before = stops();
    let words = [
        "attach",
        &pid.to_string(),
        "--backend",
        "ptrace",
        "-d",
        "1",
        "-o",
        text(&out),
    ];
    let (done, said) = run(by_sudo(&words));
    assert!(done.status.success(), "{said}");
    let stops = stops() - before;
    assert!(stops < 3 * 100 + 200, "{stops} stops in a second: {said}");
    // Which of both it is depends on kernel.perf_event_paranoid.
    assert!(
        said.contains("may not send it signals") || said.contains("perf events are not permitted"),
        "{said}"
    );
}

#[test]
fn tapes_are_readable_by_their_owner_only() {
    let _live = live();
    let scratch = open_directory();
    let (tape, out) = (scratch.path("x.tape"), scratch.path("x.collapsed"));
    let words = ["record", "--save-tape", text(&tape), "-o", text(&out), "--", "true"];
    let (done, said) = run(by_sudo(&words));
    assert!(done.status.success(), "{said}");
    let file = fs::metadata(&tape).expect("a tape");
    assert_eq!((file.uid(), file.mode() & 0o777), (NOBODY, 0o600));
}

/// A shell that runs Python: the profile is native, and the message has the process with Python.
#[test]
fn the_python_child_of_a_shell_is_suggested() {
    let _live = live();
    let python = common::newest_python().script("shares.py");
    let mut command = Command::new("sh");
    // The shell does not exit: it waits for a child in the background.
    command.args(["-c", "exec 3<&0; \"$@\" <&3 3<&- & echo CHILD $!; wait", "sh"]);
    command.arg(python.get_program()).args(python.get_args());
    command.envs(python.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut shell = Program::start(command);
    if !shell.said.iter().any(|l| l.starts_with("CHILD ")) {
        shell.wait_for("CHILD");
    }
    let child = shell.said.iter().find_map(|l| l.strip_prefix("CHILD "));
    let child = child.expect("it was said");
    let (scratch, pid) = (Scratch::new(), shell.pid().to_string());
    let out = scratch.path("x.collapsed");
    let (done, said) = run(nativeprof(&["attach", &pid, "-d", "0.3", "-o", text(&out)]));
    assert!(done.status.success(), "{said}");
    for words in [
        "(sh) does not run Python",
        &format!("nativeprof attach {child}"),
        "shares.py",
    ] {
        assert!(said.contains(words), "`{words}` is not in {said}");
    }
    // With its children there is nothing to suggest, and they are sampled although they were there before.
    let words = [
        "attach",
        &pid,
        "-d",
        "3",
        "-r",
        "500",
        "--subprocesses",
        "-o",
        text(&out),
    ];
    let (done, said) = run(nativeprof(&words));
    assert!(done.status.success() && !said.contains("does not run Python"), "{said}");
    let stacks = fs::read_to_string(&out).expect("a profile");
    assert!(stacks.contains("shares.py"), "{said}{stacks}");
    // Its one thread has one event: with two it would have twice as many samples as its time requires.
    let words: Vec<_> = said
        .lines()
        .find(|l| l.contains(" samples in "))
        .expect("a summary")
        .split(' ')
        .collect();
    let number = |at: usize| words[at].parse::<f64>().expect("`nativeprof: N samples in T s`");
    assert!(number(1) <= number(4) * 500.0 * 1.2 + 5.0, "{said}");
}

#[test]
fn both_pids_of_a_process_in_a_namespace_are_shown() {
    let _live = live();
    let program = programs::native(&[]);
    let mut command = Command::new("unshare");
    command
        .args(["--pid", "--fork", "--kill-child"])
        .arg(program.get_program());
    let shell = Program::start(command);
    let children =
        fs::read_to_string(format!("/proc/{0}/task/{0}/children", shell.pid())).expect("a kernel with lists");
    let pid = children.trim();
    let scratch = Scratch::new();
    let out = scratch.path("x.collapsed");
    let (done, said) = run(nativeprof(&["attach", pid, "-d", "0.3", "-o", text(&out)]));
    assert!(done.status.success(), "{said}");
    assert!(
        said.contains(&format!("sampling {pid} (PID 1 in its namespace) at")),
        "{said}"
    );
}

/// Clears the screen, starts a new line, changes the text direction.
const HARM: &str = "a\u{1b}[2J\u{7}\nb\u{202e}c";

/// eBPF sees the host's process numbers: in our own namespace it would take no sample, silently.
#[test]
fn in_a_pid_namespace_ptrace_is_used() {
    let _live = live();
    let scratch = Scratch::new();
    let file = scratch.path("out.txt");
    let python = common::newest_python().exe.clone();
    let mut command = Command::new("unshare");
    command.args(["-p", "-m", "--fork", "--mount-proc", env!("CARGO_BIN_EXE_nativeprof")]);
    command.args(["record", "-r", "1000", "-f", "collapsed", "-o", text(&file), "--"]);
    command.args([text(&python), "-c", "sum(i * i for i in range(20_000_000))"]);
    let (_, said) = run(command);
    assert!(said.contains("PID namespace") && said.contains("(ptrace"), "{said}");
    let stacks = fs::read_to_string(&file).expect("a profile");
    assert!(stacks.contains("genexpr"), "{said}");
}

#[test]
fn names_do_not_control_the_terminal() {
    let _live = live();
    let scratch = Scratch::new();
    let program = scratch.path(&format!("{HARM}.bin"));
    programs::copy(programs::native(&[]).get_program(), &program);
    let mut command = Command::new(&program);
    command.arg(HARM);
    let running = Program::start(command);
    let pid = running.pid();
    // The kernel named its main thread after the file.
    let thread = fs::read(format!("/proc/{pid}/comm")).expect("a thread");
    assert!(thread.contains(&0x1b), "{thread:?}");
    let harmless = |whose: &str, bytes: &[u8]| {
        let said = String::from_utf8_lossy(bytes);
        let bad = said
            .chars()
            .find(|c| (c.is_control() && *c != '\n') || *c == '\u{202e}');
        assert_eq!(bad, None, "{whose}: {said:?}");
    };
    let pid = pid.to_string();
    let out = scratch.path(&format!("{HARM}.collapsed"));
    let missing = scratch.path(&format!("{HARM}/{HARM}.svg"));
    let absent = scratch.path(HARM);
    let gone = [text(&absent)];
    for (words, good) in [
        (
            &[
                "attach",
                &pid,
                "-d",
                "0.3",
                "--threads",
                "--subprocesses",
                "-o",
                text(&out),
            ][..],
            true,
        ),
        (&["attach", &pid, "-d", "0.3", "-o", text(&missing)], false),
        (&["attach", &pid, "-d", "0.3", "--threads", "-o", "-"], true),
        (&["record", "-o", text(&out), "--", gone[0]], false),
        (&["record", "-o", text(&out), "--", "sh", "-c", ":", HARM], true),
        (&["replay", gone[0]], false),
    ] {
        let (done, said) = run(nativeprof(words));
        assert_eq!(done.status.success(), good, "{words:?}: {said}");
        harmless("standard error", &done.stderr);
        harmless("standard output", &done.stdout);
        if words.contains(&text(&out)) && good {
            assert!(
                said.contains("a\\x1b[2J\\x07\\x0ab\\u{202e}c"),
                "the name is not shown: {said}"
            );
            harmless("the file", &fs::read(&out).expect("a profile"));
        }
    }
    assert!(
        Path::new(&out).as_os_str().as_bytes().contains(&0x1b),
        "the file has the requested name"
    );
}

/// Whatever it is started with: an error, and no output.
#[test]
fn a_setuid_program_refuses_everything() {
    let _live = live();
    let scratch = open_directory();
    let (copy, out) = (scratch.path("nativeprof"), scratch.path("out"));
    programs::copy(env!("CARGO_BIN_EXE_nativeprof"), &copy);
    let (ours, file) = (text(&copy), text(&out));
    let profile = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/golden/profile.json");
    let pid = std::process::id().to_string();
    for ids in [["--ruid=65534", "--clear-groups"], ["--rgid=65534", "--clear-groups"]] {
        for (words, code) in [
            (&["record", "-o", file, "--", "touch", file][..], 125),
            (&["attach", &pid, "-d", "0.1", "-o", file], 1),
            (&["dump", &pid], 1),
            (&["heap", &pid], 1),
            (&["report", profile], 1),
            (&["export", profile, "-f", "svg", "-o", file], 1),
            (&["man", file], 1),
            (&["doctor"], 1),
            (&["--version"], 1),
        ] {
            let mut command = Command::new("setpriv");
            command.args(ids).arg(ours).args(words);
            let (done, said) = run(command);
            assert_eq!(done.status.code(), Some(code), "{ids:?} {words:?}: {said}");
            let advice = format!("try: sudo chmod ug-s {ours}; sudo setcap cap_bpf");
            assert!(said.contains("a setuid nativeprof") && said.contains(&advice), "{said}");
            assert!(done.stdout.is_empty() && !out.exists(), "{words:?}");
        }
    }
}

/// The first of users who own nothing here: limits count the processes of a user, also those that are just ending.
const LIMITED: u32 = 64_100;

#[test]
fn where_no_thread_can_be_made_an_error_says_so() {
    let _live = live();
    let scratch = open_directory();
    let copy = scratch.path("nativeprof");
    programs::copy(env!("CARGO_BIN_EXE_nativeprof"), &copy);
    let program = Program::start(programs::native(&[]));
    let pid = program.pid().to_string();
    let ours = text(&copy);
    let mut users = (LIMITED..).map(|user| format!("--reuid={user}"));
    let capabilities = "--ambient-caps=+bpf,+perfmon,+sys_ptrace";
    // Commands, the limits at which they fail, and one with which they succeed.
    let attach = |backend| {
        [
            "attach",
            &pid,
            "-d",
            "0.1",
            "-f",
            "collapsed",
            "-o",
            "-",
            "--backend",
            backend,
        ]
    };
    let record = |backend| {
        [
            "record",
            "-f",
            "collapsed",
            "-o",
            "-",
            "--backend",
            backend,
            "--",
            "true",
        ]
    };
    for (words, fails, succeeds) in [
        (&attach("ebpf")[..], &[1][..], Some(2)),
        (&attach("ptrace"), &[1], None),
        (&attach("auto"), &[1], None),
        (&record("ebpf"), &[1, 2, 3], Some(4)),
        (&record("ptrace"), &[1, 3], None),
    ] {
        for limit in fails.iter().copied().chain(succeeds) {
            let user = users.next().expect("a number");
            let limited = format!("--nproc={limit}");
            let mut command = Command::new("prlimit");
            command.args([&limited, "setpriv", &user, "--regid=65534", "--clear-groups"]);
            command.args(["--inh-caps=+bpf,+perfmon,+sys_ptrace", capabilities, ours]);
            command.args(words).stdin(Stdio::null());
            let (done, said) = run(command);
            let case = format!("{words:?} with {limit}: {said}");
            assert!(!said.contains("panicked"), "{case}");
            assert_eq!(done.status.success(), Some(limit) == succeeds, "{case}");
            let why = "no more threads or processes are permitted: a limit of this user";
            let explained = said.contains(why) && said.contains("try: end other");
            assert!(done.status.success() || explained, "{case}");
        }
    }
    let user = users.next().expect("a number");
    let mut command = Command::new("prlimit");
    command.args(["--nproc=1", "setpriv", &user, "--regid=65534", "--clear-groups"]);
    command.args([
        "--inh-caps=+sys_ptrace",
        "--ambient-caps=+sys_ptrace",
        ours,
        "dump",
        &pid,
    ]);
    let (done, _) = run(command);
    let printed = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(printed.contains("no thread can be started to trace it"), "{printed}");
}

/// nativeprof as the user nobody, with these capabilities (`+bpf,+perfmon`) or none.
fn by_nobody(copy: &Path, capabilities: &str, words: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    if !capabilities.is_empty() {
        command.arg(format!("--inh-caps={capabilities}"));
        command.arg(format!("--ambient-caps={capabilities}"));
    }
    command.arg(copy).args(words).stdin(Stdio::null());
    command
}

/// A copy of nativeprof that all users may execute.
fn open_copy(scratch: &Scratch) -> std::path::PathBuf {
    let copy = scratch.path("nativeprof");
    programs::copy(env!("CARGO_BIN_EXE_nativeprof"), &copy);
    copy
}

/// The first lines of a Python program that becomes the user nobody, which makes it not dumpable.
const AS_NOBODY: &str = "
import ctypes, os, sys
prctl = ctypes.CDLL(None).prctl
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
";

fn python(lines: &str) -> Program {
    let mut command = Command::new(&common::newest_python().exe);
    command.args(["-c", &format!("{AS_NOBODY}{lines}\nsys.stdin.read()")]);
    Program::start(command)
}

/// nativeprof with these capabilities: `-all,+bpf`.
fn limited(set: &str, words: &[&str]) -> Command {
    let mut command = with_capabilities(set);
    command.arg(env!("CARGO_BIN_EXE_nativeprof")).args(words);
    command
}

/// With the capabilities that the files in `deploy/` give, and without each of them.
#[test]
fn doctor_names_each_capability_that_a_host_needs() {
    const NEEDED: [&str; 6] = [
        "bpf",
        "perfmon",
        "sys_ptrace",
        "dac_read_search",
        "checkpoint_restore",
        "syslog",
    ];
    let _live = live();
    let scratch = Scratch::new();
    let words = ["doctor", "--host", "--json", "--dir", text(scratch.directory())];
    let set = |without: Option<&str>| {
        let kept = NEEDED.iter().filter(|name| Some(**name) != without);
        kept.fold("-all".to_string(), |set, name| format!("{set},+{name}"))
    };
    // All at once: each loads the BPF program.
    let cases: Vec<_> = (NEEDED.into_iter().map(Some).chain([None]))
        .map(|without| {
            let mut command = limited(&set(without), &words);
            (
                without,
                command.stdout(Stdio::piped()).spawn().expect("nativeprof starts"),
            )
        })
        .collect();
    for (without, child) in cases {
        let done = child.wait_with_output().expect("it ends");
        let report: serde_json::Value = serde_json::from_slice(&done.stdout).expect("JSON");
        let findings = report["host"]["findings"].as_array().expect("findings");
        let name = |capability: &str| format!("CAP_{}", capability.to_uppercase());
        for capability in NEEDED {
            let subject = name(capability);
            let found = findings.iter().find(|finding| finding["subject"] == *subject);
            let found = found.unwrap_or_else(|| panic!("{subject}: {findings:#?}"));
            let expected = match capability {
                _ if Some(capability) != without => "ok",
                "bpf" | "perfmon" => "missing",
                _ => "limited",
            };
            let advice = found["try"].as_str().expect("a text");
            assert_eq!(found["status"], expected, "without {without:?}: {found}");
            let is_named = NEEDED.iter().all(|other| advice.contains(&other.to_uppercase()));
            assert!(expected == "ok" || is_named, "without {without:?}: {found}");
        }
        let works = !matches!(without, Some("bpf" | "perfmon"));
        assert_eq!(report["host"]["works"], works, "without {without:?}: {findings:#?}");
        assert_eq!(done.status.success(), works);
        for subject in ["kernel", "directory"] {
            let found = findings.iter().find(|finding| finding["subject"] == subject);
            assert!(found.is_some_and(|finding| finding["status"] == "ok"), "{findings:#?}");
        }
    }
    // `host` says the same.
    let directory = scratch.path("history");
    for (without, expected) in [("perfmon", "CAP_PERFMON"), ("syslog", "event=limited needs=CAP_SYSLOG")] {
        let words = ["host", "-d", "0.1", "--dir", text(&directory)];
        let (done, said) = run(limited(&set(Some(without)), &words));
        assert!(said.contains(expected), "{said}");
        assert_eq!(done.status.success(), without != "perfmon", "{said}");
    }
}

#[test]
fn the_older_capability_permits_ebpf() {
    let _live = live();
    let with = |words: &[&str]| limited("-all,+sys_admin,+sys_ptrace", words);
    let (works, machine, _) = doctor(with(&["doctor", "--json"]));
    assert!(works && machine["eBPF sampling"].0 == "ok", "{machine:?}");
    for mode in ["cpu", "wall"] {
        let words = ["record", "--mode", mode, "-f", "collapsed", "-o", "-", "--", "true"];
        let (done, said) = run(with(&words));
        assert!(done.status.success() && said.contains(" Hz (ebpf, "), "{said}");
    }
}

#[test]
fn a_process_that_is_not_dumpable_is_named_so() {
    let _live = live();
    let scratch = open_directory();
    let copy = open_copy(&scratch);
    let program = python("print('READY', flush=True)");
    let pid = program.pid().to_string();
    for words in [&["attach", &pid, "-o", "-"][..], &["dump", &pid], &["heap", &pid]] {
        let (done, said) = run(by_nobody(&copy, "", words));
        let why = format!("process {pid} is not dumpable");
        let advice = format!("try: sudo {} {}", text(&copy), words.join(" "));
        assert!(
            !done.status.success() && said.contains(&why) && said.contains(&advice),
            "{said}"
        );
    }
    let (_, _, process) = doctor(by_nobody(&copy, "", &["doctor", "--json", &pid]));
    let text = &process["reading other processes"].1;
    assert!(text.contains("is not dumpable"), "{text}");
}

#[test]
fn where_kernel_functions_have_no_names_the_reason_is_said() {
    let _live = live();
    let scratch = open_directory();
    let copy = open_copy(&scratch);
    let program = Program::start(programs::native(&[]));
    let pid = program.pid().to_string();
    // These settings may show the names to all users, or to none.
    let number = |path: &str| -> i32 {
        let text = fs::read_to_string(format!("/proc/sys/kernel/{path}")).expect("a setting");
        text.trim().parse().expect("a number")
    };
    let (restrict, paranoid) = (number("kptr_restrict"), number("perf_event_paranoid"));
    let capabilities = "+bpf,+perfmon,+sys_ptrace";
    for (capabilities, are_hidden) in [
        (capabilities.to_string(), restrict > 0 || paranoid > 1),
        (format!("{capabilities},+syslog"), restrict > 1),
    ] {
        for (kernel, is_said) in [(&["--kernel"][..], are_hidden), (&[], false)] {
            let words = [&["attach", &pid, "-d", "0.1", "-f", "collapsed", "-o", "-"][..], kernel].concat();
            let (done, said) = run(by_nobody(&copy, &capabilities, &words));
            let line = said.matches("kernel functions will have no names: ").count();
            assert_eq!(line, usize::from(is_said), "{capabilities} {kernel:?}: {said}");
            assert!(done.status.success() && said.contains("(ebpf, "), "{said}");
        }
    }
}

/// The first process of a container often may not be read by others.
#[test]
fn what_cannot_be_read_does_not_end_a_recording_of_its_family() {
    let _live = live();
    let scratch = open_directory();
    let copy = open_copy(&scratch);
    // Constants of prctl(2): PR_SET_DUMPABLE, PR_SET_PTRACER.
    let program = python(
        "
def start(readable):
    ready, written = os.pipe()
    if os.fork() == 0:
        if readable:
            prctl(4, 1, 0, 0, 0)
            prctl(0x59616d61, ctypes.c_ulong(-1 & 2**64 - 1), 0, 0, 0)
        os.write(written, b'x')
        while os.getppid() > 1: sum(range(1000))
        os._exit(0)
    os.read(ready, 1)
for readable in False, True, False: start(readable)
print('READY', flush=True)",
    );
    let pid = program.pid().to_string();
    let attach = [
        "attach",
        &pid,
        "-d",
        "0.2",
        "-f",
        "collapsed",
        "-o",
        "-",
        "--backend",
        "ptrace",
    ];
    let (done, said) = run(by_nobody(&copy, "", &attach));
    assert!(!done.status.success() && said.contains("is not dumpable"), "{said}");
    let line = format!("3 processes, the first of which is {pid}, are not sampled: ");
    repeated(|| {
        let (done, said) = run(by_nobody(&copy, "", &[&attach[..], &["--subprocesses"]].concat()));
        assert!(done.status.success() && said.contains(&line), "{said}");
        assert_eq!(said.matches("not sampled").count(), 1, "{said}");
        let stacks = String::from_utf8_lossy(&done.stdout).into_owned();
        assert_likely!(stacks.contains("start (<string>"), "{stacks}{said}");
    });
}

/// Children that have ended and are not waited for cannot be traced, which is no reason to warn of each.
#[test]
fn ended_children_are_no_warning() {
    let _live = live();
    let mut command = Command::new(&common::newest_python().exe);
    let lines = "
import os, sys
for _ in range(30):
    if os.fork() == 0: os._exit(0)
while sum(open('/proc/%s/stat' % pid).read().rsplit(') ')[-1][0] == 'Z'
          for pid in open('/proc/self/task/%d/children' % os.getpid()).read().split()) < 30: pass
print('READY', flush=True)
sys.stdin.read()
";
    command.args(["-c", lines]);
    let program = Program::start(command);
    let pid = program.pid().to_string();
    for backend in ["ptrace", "ebpf"] {
        let words = [
            "attach",
            &pid,
            "-d",
            "0.1",
            "-f",
            "collapsed",
            "-o",
            "-",
            "--subprocesses",
            "--backend",
            backend,
        ];
        let (done, said) = run(nativeprof(&words));
        assert!(
            done.status.success() && !said.contains("not sampled"),
            "{backend}: {said}"
        );
    }
}

/// Debian's python3 is one file with its own library, which an upgrade replaces.
#[test]
fn a_replaced_program_is_read_without_root() {
    let _live = live();
    let scratch = open_directory();
    let (copy, program) = (open_copy(&scratch), scratch.path("python3"));
    programs::copy("/usr/bin/python3", &program);
    let mut command = Command::new(&program);
    // Constants of prctl(2): PR_SET_DUMPABLE, PR_SET_PTRACER.
    let lines = "
prctl(4, 1, 0, 0, 0)
prctl(0x59616d61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)
import threading
def crunch():
    while True: sum(range(1000))
threading.Thread(target=crunch, daemon=True).start()
print('READY', flush=True)
sys.stdin.read()
";
    command
        .args(["-c", &format!("{AS_NOBODY}{lines}")])
        .env("PYTHONHOME", "/usr");
    let running = Program::start(command);
    let pid = running.pid().to_string();
    // Another program of this name, which must not be read.
    let other = scratch.path("other");
    programs::copy(programs::native(&[]).get_program(), &other);
    fs::rename(&other, &program).expect("the program is replaced");
    repeated(|| {
        for (capabilities, backend) in [("+bpf,+perfmon,+sys_ptrace", "ebpf"), ("", "ptrace")] {
            let words = [
                "attach",
                &pid,
                "-d",
                "0.3",
                "-f",
                "collapsed",
                "-o",
                "-",
                "--backend",
                backend,
            ];
            let (done, said) = run(by_nobody(&copy, capabilities, &words));
            assert!(
                done.status.success() && said.contains("  python:   CPython 3."),
                "{said}"
            );
            let stacks = String::from_utf8_lossy(&done.stdout).into_owned();
            assert_likely!(stacks.contains("crunch (<string>"), "{backend}: {stacks}{said}");
            // A function that the replaced file exports.
            let named = stacks.contains("_PyFunction_Vectorcall (python3)") || stacks.contains(";Py");
            assert_likely!(named, "{backend}: {stacks}");
        }
    });
    let (done, said) = run(by_nobody(&copy, "", &["dump", &pid]));
    let printed = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(
        printed.contains("CPython 3.") && printed.contains("crunch"),
        "{printed}{said}"
    );
}

/// Findings by subject: state and text.
type Findings = BTreeMap<String, (String, String)>;

/// `doctor --json`: whether it works, which must match the exit code, and the findings about machine and process.
fn doctor(mut command: Command) -> (bool, Findings, Findings) {
    let done = command.output().expect("nativeprof starts");
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    let report: serde_json::Value =
        serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {said}{}", String::from_utf8_lossy(&done.stderr)));
    let works = report["works"].as_bool().expect("a verdict");
    assert_eq!(done.status.code(), Some(if works { 0 } else { 1 }));
    let findings = |value: &serde_json::Value| {
        let one = |f: &serde_json::Value| {
            let word = |name: &str| f[name].as_str().expect("a text").to_string();
            assert!(f["status"] != "missing" || !word("try").is_empty(), "no remedy: {f}");
            (word("subject"), (word("status"), word("text")))
        };
        value.as_array().into_iter().flatten().map(one).collect()
    };
    (
        works,
        findings(&report["machine"]),
        findings(&report["process"]["findings"]),
    )
}

#[test]
fn doctor_reports_the_machine_and_a_process() {
    let _live = live();
    let (works, machine, _) = doctor(nativeprof(&["doctor", "--json"]));
    assert!(works, "the live tests need these privileges: {machine:?}");
    assert_eq!(machine["eBPF sampling"].0, "ok", "{machine:?}");

    let program = Program::start(programs::native(&[]));
    let pid = program.pid().to_string();
    let (works, _, process) = doctor(nativeprof(&["doctor", "--json", &pid]));
    assert!(
        works && process["interpreter"].1.starts_with("no CPython"),
        "{process:?}"
    );
    assert!(process["symbols"].1.starts_with("native: DWARF"), "{process:?}");
    let by_option = doctor(nativeprof(&["doctor", "--json", "--pid", &pid])).2;
    assert_eq!(by_option["symbols"], process["symbols"]);

    let python = common::newest_python();
    let program = Program::start(python.script("shares.py"));
    let pid = program.pid().to_string();
    for command in [
        nativeprof(&["doctor", "--json", &pid]),
        by_sudo(&["doctor", "--json", &pid]),
    ] {
        let (works, _, process) = doctor(command);
        assert!(works && process["can be sampled"].0 == "ok", "{process:?}");
        assert!(process["interpreter"].1.starts_with("CPython 3."), "{process:?}");
    }
    // By its name, as `attach` finds it.
    let named = open_directory();
    let file = named.path("checked_by_name");
    programs::compile(&common::sources().join("native.c"), &file, &["-pthread"]);
    let by_name = Program::start(Command::new(&file));
    let done = nativeprof(&["doctor", "checked_by_name"]).output().expect("starts");
    let said = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    let title = format!("Process {}", by_name.pid());
    let found = format!("checked_by_name is process {}", by_name.pid());
    assert!(said[0].contains(&title) && said[1].contains(&found), "{said:?}");
    let done = nativeprof(&["doctor", "nobody_runs_this.py"]).output().expect("starts");
    assert!(!done.status.success());

    // As an ordinary user: a process of another user.
    let scratch = open_directory();
    let copy = scratch.path("nativeprof");
    programs::copy(env!("CARGO_BIN_EXE_nativeprof"), &copy);
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&copy)
        .args(["doctor", "--json", &pid]);
    let (works, machine, process) = doctor(command);
    assert!(!works, "{process:?}");
    let missing = "this user does not have CAP_BPF and CAP_PERFMON";
    assert_eq!(machine["eBPF sampling"], ("missing".into(), missing.into()));
    assert!(
        process["reading other processes"]
            .1
            .contains("belongs to another user (uid 0)"),
        "{process:?}"
    );

    // For people: plain text in a pipe.
    let (done, _) = run(nativeprof(&["doctor"]));
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(
        said.is_ascii() && said.contains("\n  ok eBPF sampling") && said.ends_with("\nSampling works.\n"),
        "{said}"
    );
}
