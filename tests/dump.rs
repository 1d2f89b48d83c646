//! `dump`: threads at known places, compared with what they print; and what it must not do to them.
//!
//! Needs root (and setpriv of util-linux, to become an ordinary user), gcc and CPython; fails with a message where one
//! is missing.

use std::collections::BTreeMap;
use std::process::{Command, Output};
use std::sync::Arc;

use nativeprof::arch;
use nativeprof::capture::ptrace::snapshot::{ReadMode, SnapshotTarget, Snapshotter};
use nativeprof::cpython::frame_walk;
use nativeprof::cpython_layout::TargetLayout;
use nativeprof::profile::model::FrameKind;
use nativeprof::sys::procfs;
use serde_json::Value;

use common::recording::Running;
use common::{
    Program, Recording, Scratch, each_python, each_third_python, each_third_python_and_backend, live, nativeprof,
    newest_python, programs,
};

mod common;

fn output(mut command: Command) -> String {
    let done: Output = command.output().expect("nativeprof starts");
    let (said, text) = (
        String::from_utf8_lossy(&done.stderr),
        String::from_utf8_lossy(&done.stdout),
    );
    assert!(done.status.success(), "{said}\n{text}");
    text.into_owned()
}

fn dump(pid: u32, words: &[&str]) -> Value {
    let mut command = nativeprof(&["dump", &pid.to_string(), "--json"]);
    command.args(words);
    serde_json::from_str(&output(command)).expect("JSON")
}

fn threads(dump: &Value) -> &Vec<Value> {
    dump["threads"].as_array().expect("threads")
}

/// All stacks are complete; threads that sleep in calls that a stop would interrupt were not stopped.
fn check_quality(case: &str, dump: &Value) {
    for t in threads(dump) {
        let stack = t["stack"].as_str().unwrap_or("none");
        assert!(["exact", "repaired"].contains(&stack), "{case}: {t:#}");
    }
}

/// Words after `kind name` in the program's output.
fn printed<'a>(program: &'a Program, kind: &str, name: &str) -> Vec<&'a str> {
    let start = format!("{kind} {name} ");
    program
        .said
        .iter()
        .filter_map(|line| line.strip_prefix(&start))
        .collect()
}

#[test]
fn threads_are_where_they_say() {
    let _live = live();
    each_python(|python| {
        let program = Program::start(python.script_with_gil("waiting.py"));
        let dump = dump(program.pid(), &["--locals"]);
        let case = &python.name;
        check_quality(case, &dump);
        let thread = |name: &str| {
            let tid: u64 = printed(&program, "THREAD", name)[0].parse().expect("a number");
            let found = threads(&dump).iter().find(|t| t["tid"] == tid);
            found.unwrap_or_else(|| panic!("{case}: no thread {name}"))
        };
        assert_eq!(threads(&dump).len(), 4, "{case}");
        for name in ["asleep", "waiting"] {
            let t = thread(name);
            let frames = t["frames"].as_array().expect("frames");
            // Its own name, except for what started the thread.
            let expected: Vec<String> = printed(&program, "FRAME", name)
                .into_iter()
                .filter(|f| ["asleep", "waiting", "below"].iter().any(|ours| f.starts_with(ours)))
                .map(String::from)
                .collect();
            let ours = |f: &&Value| f["file"].as_str().is_some_and(|file| file.ends_with("/waiting.py"));
            let mut got: Vec<String> = frames
                .iter()
                .filter(ours)
                .map(|f| format!("{} {}", f["name"].as_str().unwrap_or_default(), f["line"]))
                .collect();
            got.reverse();
            assert_eq!(got, expected, "{case}: {name}");
            assert_eq!(
                (&t["state"], &t["holds_gil"]),
                (&"S".into(), &false.into()),
                "{case}: {name}"
            );
            let locals = frames.iter().find(ours).expect("a frame of ours")["locals"].as_array();
            let locals = locals.unwrap_or_else(|| panic!("{case}: {name} has no variables"));
            let value = |key: &str| {
                let found = locals.iter().find(|v| v["name"] == key);
                found
                    .and_then(|v| v["value"].as_str())
                    .unwrap_or("(missing)")
                    .to_string()
            };
            let mut checked = 0;
            for line in printed(&program, "LOCAL", name) {
                let (key, expected) = line.split_once(' ').expect("name and value");
                assert_eq!(value(key), expected, "{case}: {name}: {key}");
                checked += 1;
            }
            assert!(checked >= 2, "{case}: {name}: {checked} variables");
            if name == "waiting" {
                assert_eq!(
                    value("name"),
                    format!("'{}'... (500 characters)", "x".repeat(120)),
                    "{case}"
                );
                assert!(value("other").starts_with("<Thing at 0x"), "{case}: {}", value("other"));
                assert_eq!(value("long"), "[0, 1, 2, 3, 4, 5, 6, 7, ... 50 in all]", "{case}");
            }
        }
        // Python and C alternate: the extension's function is between the calls that it makes.
        let names: Vec<&str> = thread("asleep")["frames"]
            .as_array()
            .expect("frames")
            .iter()
            .filter_map(|f| f["name"].as_str())
            .filter(|name| ["asleep", "below"].contains(name) || name.starts_with("t_call"))
            .collect();
        let mut expected = vec!["asleep", "below"];
        expected.extend(["t_call", "below"].repeat(3));
        let plain: Vec<&str> = names
            .iter()
            .map(|n| if n.starts_with("t_call") { "t_call" } else { n })
            .collect();
        assert_eq!(plain, expected, "{case}");
        // It holds the GIL while it computes; it waits only briefly between two calls.
        let tid: u64 = printed(&program, "THREAD", "spinning")[0].parse().expect("a number");
        let seen = (0..20).map(|_| {
            let dump = self::dump(program.pid(), &["--no-native"]);
            threads(&dump)
                .iter()
                .find(|t| t["tid"] == tid)
                .expect("it runs forever")
                .clone()
        });
        let t = seen.into_iter().find(|t| t["state"] == "R" && t["holds_gil"] == true);
        let t = t.unwrap_or_else(|| panic!("{case}: it never held the lock"));
        assert!(t["stop_us"].as_f64().is_some(), "{case}: {t:#}");
    });
}

/// Tid, and kind and name of each thread as the program printed them; `None`: no Python thread object.
fn printed_names(program: &Program) -> BTreeMap<u32, (String, Option<String>)> {
    let mut names = BTreeMap::new();
    for line in program.said.iter().filter_map(|line| line.strip_prefix("THREAD ")) {
        let mut words = line.splitn(3, ' ');
        let mut word = || words.next().expect("a word").to_string();
        let (tid, kind, name) = (word().parse().expect("a number"), word(), word());
        names.insert(tid, (kind, Some(name).filter(|name| name != "-")));
    }
    names
}

#[test]
fn threads_have_the_names_that_python_gave_them() {
    let _live = live();
    each_third_python(0, |python| {
        let case = &python.name;
        let mut program = Program::start(python.script("thread_names.py"));
        let mut expected = printed_names(&program);
        assert_eq!(expected.len(), 10, "{case}: {:?}", program.said);
        let check = |expected: &BTreeMap<u32, (String, Option<String>)>, pid: u32| {
            let dump = dump(pid, &[]);
            for (tid, (kind, name)) in expected {
                let found = threads(&dump).iter().find(|t| t["tid"] == *tid);
                let found = found.unwrap_or_else(|| panic!("{case}: no thread {kind}"));
                assert_eq!(found["python_name"].as_str(), name.as_deref(), "{case}: {kind}");
                assert_eq!(
                    found["name"],
                    procfs::thread_name(pid, *tid).unwrap_or_default(),
                    "{case}: {kind}"
                );
            }
        };
        check(&expected, program.pid());
        program.send("rename");
        program.wait_for("RENAMED");
        for (kind, name) in expected.values_mut() {
            if kind == "renamed" {
                *name = Some("after".into());
            }
        }
        check(&expected, program.pid());
        let text = output(nativeprof(&["dump", &program.pid().to_string()]));
        assert!(text.contains(" \"MainThread ["), "{case}: {text}");
        program.finish();
    });
}

/// Interpreters with a lock each: threads that hold one at the same time are no contradiction.
#[test]
fn holders_of_several_locks_are_named() {
    let _live = live();
    let python = newest_python();
    if python.minor < 13 {
        return; // interpreters run in threads of their own from 3.13 on
    }
    let mut command = python.script_with_gil("nested_interpreters.py");
    command.args(["threads", "n4"]);
    let program = Program::start(command);
    // Whether two hold theirs when they are read is a matter of chance.
    let texts = (0..50).map(|_| output(nativeprof(&["dump", &program.pid().to_string()])));
    let seen = texts.inspect(|text| assert!(!text.contains("changed hands"), "{text}"));
    let mut named = seen.filter(|text| text.contains(" hold the GILs of their interpreters"));
    assert!(named.next().is_some(), "never two at a time");
}

#[test]
fn names_that_are_not_utf8_hide_no_thread() {
    let _live = live();
    each_third_python(2, |python| {
        let case = &python.name;
        let mut program = Program::start(python.script("undecodable_names.py"));
        let dump = dump(program.pid(), &[]);
        check_quality(case, &dump);
        let names: Vec<_> = threads(&dump).iter().map(|t| t["name"].as_str()).collect();
        let cut = "загрузч\u{fffd}";
        assert_eq!(names, [Some(cut); 3], "{case}");
        program.finish();
    });
}

#[test]
fn recordings_have_the_names_of_python_threads() {
    let _live = live();
    each_third_python_and_backend(1, |python, words| {
        let case = &python.name;
        let mut program = Program::start(python.script("thread_names.py"));
        let scratch = Scratch::new();
        let file = scratch.path("profile.json");
        let mut command = nativeprof(&["attach", &program.pid().to_string(), "-r", "1000", "--threads", "-o"]);
        command.arg(&file).args(words);
        let mut running = Running::start(command);
        // Each answer takes the lock from threads that hold it for some milliseconds.
        for _ in 0..20 {
            program.send("rename");
            program.wait_for("RENAMED");
        }
        running.signal("INT");
        let r = Recording::of(&file, running.finish());
        let names = printed_names(&program);
        let mut seen = 0;
        for frame in r.profile.frames.iter().filter(|f| f.kind == FrameKind::Thread) {
            let (start, shown) = frame.name.split_once(" (").expect("a name");
            let tid = start.trim_start_matches("thread ").parse().expect("a number");
            let shown = shown.strip_suffix(')').expect("a closed name");
            let in_meta = r.profile.meta.threads.iter().find(|(_, t, _)| *t == tid);
            assert_eq!(in_meta.map(|(_, _, name)| name.as_str()), Some(shown), "{case}");
            let (kind, name) = &names[&tid];
            match (kind.as_str(), name) {
                ("renamed", _) => assert!(shown == "after" || shown.starts_with("after ["), "{case}: {shown}"),
                (_, Some(name)) => {
                    let alone = shown == name;
                    assert!(
                        alone || shown.starts_with(&format!("{name} [")),
                        "{case}: {kind}: {shown}"
                    );
                }
                (_, None) => assert!(!shown.contains('['), "{case}: {kind}: {shown}"),
            }
            seen += 1;
        }
        assert!(seen > 1, "{case}: {}", r.stderr);
        program.finish();
    });
}

/// Functions that live for a fraction of a millisecond have their names.
#[test]
fn short_lived_code_is_named() {
    let _live = live();
    each_third_python(2, |python| {
        let program = Program::start(python.script("fresh_code.py"));
        let (mut fresh, mut dumps) = (0, 0);
        // How often it is met there is a matter of chance.
        while dumps < 20 || fresh == 0 && dumps < 200 {
            dumps += 1;
            let dump = dump(program.pid(), &[]);
            check_quality(&python.name, &dump);
            let frames = threads(&dump).iter().filter_map(|t| t["frames"].as_array());
            let names = frames.flatten().filter_map(|f| f["name"].as_str());
            fresh += names.filter(|name| name.starts_with("fresh_")).count();
        }
        assert!(fresh > 0, "{}: it was never seen there", python.name);
    });
}

#[test]
fn no_call_is_interrupted() {
    let _live = live();
    let mut program = Program::start(programs::uninterruptible(&[]));
    for _ in 0..10 {
        let dump = dump(program.pid(), &[]);
        check_quality("uninterruptible", &dump);
        assert!(dump["python"].is_null());
        let roots = |t: &Value| {
            let frames = t["frames"].as_array().expect("frames");
            frames
                .iter()
                .any(|f| f["name"] == "main" || f["name"] == "go_round" || f["name"] == "work_on")
        };
        assert!(threads(&dump).iter().all(roots), "{dump:#}");
    }
    program.finish(); // it aborts on EINTR
}

/// Sleeping threads that are stopped where that is harmless keep sleeping, and their calls do not fail.
#[test]
fn restartable_calls_are_not_interrupted() {
    let _live = live();
    let mut program = Program::start(programs::uninterruptible(&[]));
    let pid = program.pid();
    let (mut stopped, layout) = (0, TargetLayout::default());
    // However late the threads begin to sleep.
    for _ in 0..1000 {
        if stopped >= 20 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
        for tid in nativeprof::sys::procfs::threads(pid) {
            let call = procfs::blocked(pid, tid).ok().flatten().and_then(|b| b.call);
            if !call.is_some_and(|(call, args)| arch::resumes_unnoticed(call, &args)) {
                continue;
            }
            let once = Snapshotter {
                pid,
                layout: &layout,
                walk: frame_walk::walk,
                seen_code: Arc::default(),
                writable: &[],
                kernel: false,
                never_stop: false,
                during: &|_, _, _| (),
            };
            let target = SnapshotTarget {
                tid,
                thread_pointer: None,
                stop_sleeping: true,
            };
            let seen = once
                .inspect(&[target])
                .pop()
                .expect("one for one")
                .1
                .expect("it can be held");
            assert!(matches!(seen.mode, ReadMode::Stopped(_)), "{:?}", seen.mode);
            stopped += 1;
        }
    }
    assert!(stopped >= 20, "{stopped} threads were stopped");
    program.finish();
}

#[test]
fn a_stopped_process_is_left_stopped() {
    let _live = live();
    let program = Program::start(newest_python().script("waiting.py"));
    let pid = program.pid().to_string();
    let kill = |signal: &str| {
        let done = Command::new("kill").args(["-s", signal, &pid]).status();
        assert!(done.is_ok_and(|s| s.success()), "signal {signal} cannot be sent");
    };
    kill("STOP");
    let mut dumped = dump(program.pid(), &[]);
    for _ in 0..100 {
        if threads(&dumped).iter().all(|t| t["state"] == "T") {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
        dumped = dump(program.pid(), &[]);
    }
    assert!(threads(&dumped).iter().all(|t| t["state"] == "T"), "{dumped:#}");
    check_quality("stopped", &dumped);
    // One that was stopped outside of a system call shows its registers to a tracer only; all others are left alone.
    let touched = |t: &&Value| !t["stop_us"].is_null() && !t["syscall"].is_null();
    assert_eq!(threads(&dumped).iter().filter(touched).count(), 0, "{dumped:#}");
    let text = output(nativeprof(&["dump", &pid]));
    assert!(text.contains("stopped by job control in futex"), "{text}");
    assert_eq!(nativeprof::sys::procfs::stat_state(program.pid()), Some('T'));
    kill("CONT");
}

#[test]
fn an_ordinary_user_sees_their_own_processes() {
    let _live = live();
    let scratch = Scratch::new();
    let copy = scratch.path("nativeprof");
    programs::copy(env!("CARGO_BIN_EXE_nativeprof"), &copy);
    let open = |path: &std::path::Path| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("permissions can be set");
    };
    open(scratch.directory());
    open(&copy);
    let as_user = |program: &std::path::Path| {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(program);
        command
    };
    // The program itself must be readable for that user, too.
    let program = programs::uninterruptible(&[]);
    let program_copy = scratch.path("uninterruptible");
    programs::copy(program.get_program(), &program_copy);
    open(&program_copy);
    let program = Program::start(as_user(&program_copy));
    let pid = program.pid().to_string();
    let mut command = as_user(&copy);
    command.args(["dump", &pid, "--json"]);
    // Only a child may be traced if kernel.yama.ptrace_scope says so.
    if std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|t| t.trim() != "0") {
        let done = command.output().expect("nativeprof starts");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(said.contains("ptrace_scope") || done.status.success(), "{said}");
        return;
    }
    let dumped: Value = serde_json::from_str(&output(command)).expect("JSON");
    check_quality("an ordinary user", &dumped);

    let mut command = as_user(&copy);
    command.args(["dump", &std::process::id().to_string()]);
    let done = command.output().expect("nativeprof starts");
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(said.contains("is not permitted") && said.contains(" dump "), "{said}");
}

#[test]
fn functions_of_the_kernel_are_shown() {
    let _live = live();
    let program = Program::start(newest_python().script("waiting.py"));
    let dumped = dump(program.pid(), &["--kernel", "--no-native"]);
    let mut kernel: BTreeMap<&str, usize> = BTreeMap::new();
    for t in threads(&dumped).iter().filter(|t| t["stop_us"].is_null()) {
        let names = t["kernel"].as_array().unwrap_or_else(|| panic!("{t:#}"));
        *kernel.entry(t["syscall"].as_str().unwrap_or("none")).or_default() += names.len();
        let python = |f: &Value| f["kind"] == "python";
        assert!(t["frames"].as_array().expect("frames").iter().all(python), "{t:#}");
    }
    assert!(kernel.get("futex").is_some_and(|n| *n > 1), "{kernel:?}");
}

#[test]
fn errors_say_what_to_do() {
    let check = |words: &[&str], code: i32, expected: &str| {
        let done = nativeprof(words).output().expect("nativeprof starts");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(code), "{words:?}: {said}");
        assert!(said.contains(expected), "{words:?}: {said}");
    };
    check(&["dump", "4194305"], 1, "no process 4194305\n  why: ");
    check(&["dump"], 2, "PID");
    check(&["dump", "1", "--pid", "1"], 2, "cannot be used");
    check(&["dump", "no-such-program"], 1, "pgrep -af");
    check(&["dump", "2"], 1, "");
}
