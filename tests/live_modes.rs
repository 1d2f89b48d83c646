//! Options, and events in the life of a sampled process.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};
use std::time::Instant;

use nativeprof::capture::ebpf::switch_in;
use nativeprof::profile::model::{Frame, FrameKind};
use nativeprof::sys::procfs;

use common::chance::{assert_likely, patience, repeated};
use common::pythons::each_with_backend;
use common::recording::{Ours, Recording, Running, attach_while, check_counts, is_truncated};
use common::{
    Program, Python, Scratch, attach, each_third_python, live, nativeprof, newest_python, programs, pythons, record,
};

mod common;

/// Lets the target be sampled for this long, and longer after a failed attempt.
fn sleep_patiently(ms: u64) {
    std::thread::sleep(std::time::Duration::from_millis(ms) * patience());
}

fn count(stack: &[&Frame], name: &str) -> usize {
    stack.iter().filter(|f| f.name == name).count()
}

/// Python frames of this name: the program's own `main` in C may be on the stack too.
fn python_count(stack: &[&Frame], name: &str) -> usize {
    let python = |f: &&&Frame| f.name == name && f.kind == FrameKind::Python;
    stack.iter().filter(python).count()
}

const OTHER_STACK: &str = "continues on another stack";

/// However late nativeprof reads the start: here the program delays it for the first half of its own time.
#[test]
fn the_number_of_samples_matches_the_time_since_the_start() {
    const PROGRAM: &str = "
import os, signal, time
def spend(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
os.kill(os.getppid(), signal.SIGSTOP)
try:
    spend(0.5)
finally:
    os.kill(os.getppid(), signal.SIGCONT)
spend(0.5)
";
    let _live = live();
    repeated(|| {
        let mut command = Command::new(&newest_python().exe);
        command.args(["-c", PROGRAM]);
        let r = record(&[], &command);
        assert_likely!(r.samples() > 900, "{}", r.stderr);
        r.check_lost("stopped");
        r.check_rate("stopped");
    });
}

#[test]
fn launched_commands_are_sampled_from_their_start() {
    let _live = live();
    each_third_python(0, |python| {
        let mut command = python.script("shares.py");
        command.arg("1.5");
        let r = record(&[], &command);
        let q = &r.profile.meta.quality;
        assert_eq!(q.taken, r.samples(), "{}", r.stderr);
        r.check_lost(&python.name);
        r.check_rate(&python.name);
        // While the first few samples are on their way, the interpreter in the new process is not known.
        let late = r.matching(|stack| is_truncated(stack) && count(stack, "main") > 0 && count(stack, "run_alpha") > 0);
        assert_likely!(
            late <= 1,
            "{}: {late} truncated\n{}",
            python.name,
            r.examples(is_truncated)
        );
        assert_likely!(q.partial * 20 <= q.taken, "{}: {:?}", python.name, q.reasons);
        assert_likely!(
            r.with("run_alpha") > 0 && r.with("t_alpha_work") > 0,
            "{}: {}",
            python.name,
            r.stderr
        );
        assert!(r.stderr.contains("ebpf"), "{}", r.stderr);
        // From the start: the dynamic loader, or Python's own start.
        let start = |stack: &[&Frame]| {
            stack
                .iter()
                .any(|f| f.name.contains("Py_Initialize") || f.name == "pymain_init")
        };
        let loader = |stack: &[&Frame]| stack.iter().any(|f| f.module.starts_with("ld-linux"));
        assert_likely!(
            r.matching(|s| start(s) || loader(s)) > 0,
            "{}: no sample of the start",
            python.name
        );
    });
}

/// How often the threads of a process have gone to sleep.
fn sleeps(pid: u32) -> u64 {
    let of = |tid| {
        let status = procfs::read_text(format!("/proc/{pid}/task/{tid}/status")).unwrap_or_default();
        let number = procfs::field(&status, "voluntary_ctxt_switches").and_then(|n| n.parse().ok());
        number.unwrap_or(0)
    };
    procfs::threads(pid).into_iter().map(of).sum::<u64>()
}

/// What other processes do does not wake nativeprof, except now and then.
#[test]
fn programs_of_other_processes_do_not_wake_us() {
    let _live = live();
    const PROGRAMS: u64 = 300;
    repeated(|| {
        let mut program = Program::start(newest_python().script("waits.py"));
        let scratch = Scratch::new();
        let mut command = nativeprof(&["attach", &program.pid().to_string(), "--backend", "ebpf", "-o"]);
        command.arg(scratch.path("profile.json"));
        let mut running = Running::start(command);
        let ours = running.child.id();
        // Without other programs, for as long as it takes to start some.
        let (before, start) = (sleeps(ours), Instant::now());
        sleep_patiently(500);
        let alone = (sleeps(ours) - before) as f64 / start.elapsed().as_secs_f64();
        let (before, start) = (sleeps(ours), Instant::now());
        for _ in 0..PROGRAMS {
            assert!(Command::new("true").status().is_ok_and(|s| s.success()));
        }
        let (woken, seconds) = (sleeps(ours) - before, start.elapsed().as_secs_f64());
        running.signal("INT");
        running.finish();
        program.finish();
        // Each program is some ten records, which woke it several times.
        let allowed = 2.0 * alone * seconds + PROGRAMS as f64 / 2.0;
        assert!(
            woken as f64 <= allowed,
            "woken {woken} times in {seconds:.1} s, {alone:.0} a second alone"
        );
    });
}

#[test]
fn later_threads_have_the_full_rate() {
    let _live = live();
    repeated(|| {
        let python = newest_python();
        let mut command = python.script("threads.py");
        command.arg("2");
        let r = record(&["--threads"], &command);
        let thread = |stack: &[&Frame]| count(stack, "in_c") > 0;
        assert_likely!(r.matching(thread) > 300, "{}", r.stderr);
        r.check_rate(&python.name);
    });
}

#[test]
fn ten_thousand_levels_are_complete() {
    let _live = live();
    repeated(|| {
        for python in [&pythons()[0], newest_python()] {
            let mut program = Program::start(python.script("deep_recursion.py"));
            let r = attach(program.pid(), &["-r", "100", "-d", "3"]);
            program.finish();
            // Each stack takes several records: a machine that stalls for a moment loses the last of them.
            const TRUNCATED: &str = "stack deeper than the copy";
            r.check_quality_but(&python.name, &[TRUNCATED]);
            let truncated = r.profile.meta.quality.reasons.get(TRUNCATED).copied().unwrap_or(0);
            assert_likely!(truncated * 20 <= r.samples(), "{}: {}", python.name, r.stderr);
            let count = |stack: &[&Frame], name: &str| {
                let is = |f: &&&Frame| f.kind == FrameKind::Python && f.name == name;
                stack.iter().filter(is).count()
            };
            let at_end = |stack: &[&Frame]| stack.iter().any(|f| f.name == "t_alpha") && !is_truncated(stack);
            assert_likely!(
                r.matching(at_end) * 2 > r.samples(),
                "{}: the ends were hardly seen",
                python.name
            );
            let levels = |stack: &[&Frame]| {
                (
                    python_count(stack, "main") + count(stack, "in_thread"),
                    count(stack, "descend"),
                )
            };
            assert_eq!(
                r.matching(|s| at_end(s) && levels(s) != (1, 10001)),
                0,
                "{}",
                python.name
            );
            for start in ["main", "in_thread"] {
                assert_likely!(
                    r.matching(|s| at_end(s) && count(s, start) > 0) > 0,
                    "{}: {start}",
                    python.name
                );
            }
        }
    });
}

#[test]
fn children_are_sampled_only_on_request() {
    let _live = live();
    repeated(|| {
        for python in [&pythons()[0], newest_python()] {
            let mut program = Program::start(python.script("forks.py"));
            let with = attach(program.pid(), &["--subprocesses"]);
            let without = attach(program.pid(), &["-d", "1"]);
            let pid = program.pid();
            let truth = program.finish();
            // At the instant of a fork the stack's pages, and the interpreter of the new process, may be out of sight.
            const AT_FORK: [&str; 2] = ["stack page not present", "unknown interpreter"];
            for r in [&with, &without] {
                r.check_quality_but(&python.name, &AT_FORK);
                let q = &r.profile.meta.quality;
                assert_likely!(q.partial * 100 <= q.taken, "{}: {}", python.name, r.stderr);
            }
            let parent = format!("process {pid} (");
            let here = |stack: &[&Frame]| stack[0].name.starts_with(&parent);
            let parents = with.matching(here);
            let counts = BTreeMap::from([
                ("parent".to_string(), parents),
                ("child".to_string(), with.samples() - parents),
            ]);
            check_counts(&python.name, &counts, &truth, 0.05);
            assert_eq!(
                with.matching(|s| here(s) && count(s, "in_child") > 0),
                0,
                "{}",
                python.name
            );
            assert_eq!(
                with.matching(|s| !here(s) && count(s, "in_parent") > 0),
                0,
                "{}",
                python.name
            );
            // A child's stack continues its parent's.
            for (stack, _) in with.complete_stacks().filter(|(s, _)| count(s, "in_child") > 0) {
                assert_eq!(
                    (python_count(&stack, "main"), count(&stack, "make_child")),
                    (1, 1),
                    "{}",
                    python.name
                );
            }
            assert_eq!(
                without.with("in_child"),
                0,
                "{}: children that were not requested",
                python.name
            );
            assert_likely!(without.with("in_parent") > 0, "{}", python.name);
        }
    });
}

#[test]
fn programs_that_children_execute_begin_at_their_start() {
    let _live = live();
    repeated(|| {
        let mut command = Command::new("sh");
        let loop_ = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do \"$0\" -S -c pass; done";
        command.args(["-c", loop_]).arg(&newest_python().exe);
        let r = record(&["--subprocesses"], &command);
        let loaders = r.matching(|stack| stack.iter().any(|f| f.name == "_dl_start"));
        assert_likely!(loaders >= 10, "{loaders} samples in the loader: {}", r.stderr);
        // Where the stack of a new program ends is not known while the kernel executes it.
        let truncated = r.with("[truncated: return address outside code]");
        assert_likely!(truncated * 5 <= loaders, "{truncated} of {loaders}: {}", r.stderr);
    });
}

#[test]
fn kernel_frames_are_on_top() {
    let _live = live();
    repeated(|| {
        let python = newest_python();
        let mut program = Program::start(python.script("kernel_time.py"));
        let with = attach(program.pid(), &["--kernel", "-d", "1"]);
        let without = attach(program.pid(), &["-d", "1"]);
        program.finish();
        with.check_quality("--kernel");
        without.check_quality("without --kernel");
        let kernel = |f: &&Frame| f.kind == FrameKind::Kernel;
        assert_eq!(
            without.matching(|s| s.iter().any(kernel)),
            0,
            "kernel frames that were not requested"
        );
        let below = |name: &'static str| {
            move |s: &[&Frame]| s.last().is_some_and(|f| f.kind == FrameKind::Kernel) && count(s, name) > 0
        };
        assert_likely!(
            with.matching(below("t_read_loop")) * 100 > with.samples(),
            "{}",
            with.examples(|s| count(s, "t_read_loop") > 0)
        );
        assert_likely!(
            with.matching(below("t_touch_pages")) * 100 > with.samples(),
            "{}",
            with.examples(|s| count(s, "t_touch_pages") > 0)
        );
        for (stack, _) in with.stacks() {
            let first = stack.iter().position(kernel).unwrap_or(stack.len());
            assert!(stack[first..].iter().all(kernel), "a user frame above a kernel frame");
            if count(&stack, "t_read_loop") > 0 && first < stack.len() {
                // The C library's `read` is in between.
                assert_ne!(
                    stack[first - 1].name,
                    "t_read_loop",
                    "the system call's own function is missing"
                );
            }
        }
    });
}

#[test]
fn other_events_are_counted_where_they_happen() {
    let _live = live();
    repeated(|| {
        let python = newest_python();
        let mut program = Program::start(python.script("kernel_time.py"));
        let faults = attach(program.pid(), &["--event", "page-faults", "-d", "1"]);
        let switches = attach(program.pid(), &["--event", "context-switches", "-d", "1"]);
        program.finish();
        faults.check_quality("page-faults");
        switches.check_quality("context-switches");
        let touching = faults.with("t_touch_pages");
        assert_likely!(
            touching * 10 >= faults.samples() * 9,
            "{touching} of {} faults",
            faults.samples()
        );
        assert_likely!(switches.with("waiting") > 20, "{}", switches.stderr);
        assert_eq!(faults.profile.meta.event, "page-faults");
        assert_eq!(switches.profile.meta.event, "context-switches");
    });
}

#[test]
fn python_frames_alone() {
    let _live = live();
    each_third_python(1, |python| {
        let mut program = Program::start(python.script("callbacks.py"));
        let r = attach(program.pid(), &["--no-native", "-d", "1"]);
        program.finish();
        r.check_quality(&python.name);
        assert!(
            r.profile
                .frames
                .iter()
                .all(|f| matches!(f.kind, FrameKind::Root | FrameKind::Python | FrameKind::Truncated)),
            "{}: a frame that is not Python's",
            python.name
        );
        for (stack, _) in r.complete_stacks().filter(|(s, _)| count(s, "level3") > 0) {
            let names: Vec<&str> = stack.iter().map(|f| f.name.as_str()).collect();
            assert_eq!(
                names,
                ["<module>", "main", "level1", "level2", "level3"],
                "{}",
                python.name
            );
        }
    });
}

#[test]
fn collapsed_text_has_the_same_data_as_json() {
    let _live = live();
    repeated(|| {
        let scratch = Scratch::new();
        let mut command = newest_python().script("shares.py");
        command.arg("1");
        let out = scratch.path("x.collapsed");
        let mut ours = nativeprof(&["record", "-r", "997", "-o"]);
        ours.arg(&out)
            .arg("--")
            .arg(command.get_program())
            .args(command.get_args());
        ours.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let done = ours.stdin(Stdio::null()).output().expect("nativeprof starts");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        let text = std::fs::read_to_string(&out).expect("a text file");
        let mut total = 0;
        let mut alpha = 0;
        for line in text.lines() {
            let (stack, n) = line.rsplit_once(' ').expect("a count");
            let n: u64 = n.parse().expect("a number");
            total += n;
            // Except for the first samples, taken before the interpreter is known.
            if stack.contains("t_alpha_work (known_shares.so)") && stack.contains("/shares.py:") {
                alpha += n;
            }
        }
        assert_likely!(alpha > 50, "{said}");
        assert!(
            said.contains(&format!("nativeprof: {total} samples in")),
            "{total}: {said}"
        );
        assert!(said.contains("python:   CPython 3."), "{said}");
        assert!(said.contains("x.collapsed (collapsed, "), "{said}");
    });
}

#[test]
fn a_target_may_end_at_any_time() {
    let _live = live();
    repeated(|| {
        let mut program = Program::start(newest_python().script("shares.py"));
        let r = attach_while(program.pid(), &["-d", "600"], || {
            sleep_patiently(700); // so that there are samples
            program.finish();
        });
        r.check_quality("a target that ends");
        assert!(r.profile.meta.duration < 500.0, "the end of the target was not noticed");
        assert_likely!(r.with("run_alpha") > 0, "{}", r.stderr);
    });
}

#[test]
fn exec_in_place_changes_the_names() {
    let _live = live();
    each_third_python(2, |python| {
        let mut program = Program::start(python.script("exec_in_place.py"));
        let pid = program.pid();
        let r = attach_while(pid, &["-d", "600"], || {
            sleep_patiently(500); // samples of the first program
            program.send("exec");
            program.wait_for("READY");
            sleep_patiently(500); // and of the second
            program.finish();
        });
        r.check_lost(&python.name);
        // The second program starts from the beginning: its first samples are taken before its interpreter is known.
        assert_likely!(
            r.profile.meta.quality.partial * 8 <= r.samples(),
            "{}: {}",
            python.name,
            r.stderr
        );
        for name in ["before", "after"] {
            let other = if name == "before" { "t_beta" } else { "t_alpha" };
            assert_likely!(r.with(name) > 50, "{}: {name} was not seen\n{}", python.name, r.stderr);
            assert_eq!(
                r.matching(|s| count(s, name) > 0 && count(s, other) > 0),
                0,
                "{}: {name}",
                python.name
            );
        }
        let bad = r.matching(|s| is_truncated(s) && (count(s, "before") > 0 || count(s, "after") > 0));
        assert_likely!(
            bad <= 1,
            "{}: {bad} truncated\n{}",
            python.name,
            r.examples(is_truncated)
        );
    });
}

/// A thread that is not the first one executes a program: it has the first one's number from then on.
#[test]
fn exec_by_another_thread_than_the_first() {
    let _live = live();
    let cases = [
        ("ebpf", "cpu", "thread"),
        ("ebpf", "cpu", "outlived"),
        ("ebpf", "wall", "thread"),
        ("ebpf", "wall", "outlived"),
        ("ptrace", "cpu", "outlived"),
        ("ptrace", "wall", "thread"),
    ];
    for (backend, mode, how) in cases {
        if (backend, mode) == ("ebpf", "wall") && switch_in::check().is_err() {
            continue;
        }
        repeated(|| {
            let words = ["--backend", backend, "--mode", mode];
            let r = record(&words, &programs::exec_by_thread(how));
            let case = format!("{backend} {mode} {how}");
            // In `wall` mode time for which it had no CPU is sampled, too.
            let running = r.matching(|stack| stack.last().is_some_and(|f| f.name == "burned_after_exec"));
            assert_likely!(running > 250, "{case}: {running} samples\n{}", r.stderr);
            assert_likely!(
                r.with("burned_after_exec") * 10 >= r.samples() * 9,
                "{case}: {}\n{}",
                r.samples(),
                r.stderr
            );
        });
    }
}

#[test]
fn interpreters_may_come_late() {
    let _live = live();
    common::pythons::each_of(pythons().iter().filter(|p| p.library().is_some()), |python| {
        let mut program = Program::start(python.embedded(true));
        let r = attach_while(program.pid(), &["-d", "600"], || {
            sleep_patiently(300); // samples without Python
            program.send("load");
            program.wait_for("READY");
            sleep_patiently(700); // and with it
            program.finish();
        });
        r.check_lost(&python.name);
        assert_likely!(r.with("e_before_python") > 50, "{}: {}", python.name, r.stderr);
        assert_likely!(r.with("bridged") > 100, "{}: {}", python.name, r.stderr);
        let work = |s: &[&Frame]| count(s, "t_alpha_work") > 0;
        let chain = |s: &[&Frame]| count(s, "work") == 1 && count(s, "bridged") == 1 && count(s, "e_run_python") == 1;
        let wrong = r.matching(|s| work(s) && !chain(s));
        // The first few samples are taken before the interpreter is known, which is their reason.
        let partial = r.profile.meta.quality.partial;
        assert!(
            wrong <= partial,
            "{}: {wrong}\n{}",
            python.name,
            r.examples(|s| work(s) && !chain(s))
        );
        assert_likely!(
            r.profile.meta.quality.partial * 10 <= r.samples(),
            "{}: {}",
            python.name,
            r.stderr
        );
    });
}

#[test]
fn subinterpreters_are_above_their_caller() {
    let _live = live();
    // Before 3.8 no module creates subinterpreters.
    pythons::each_of(common::pythons().iter().filter(|p| p.minor >= 8), |python| {
        let mut program = Program::start(python.script("subinterpreters.py"));
        let r = attach(program.pid(), &["-d", "1"]);
        program.finish();
        r.check_lost(&python.name);
        // What runs in the main interpreter is complete.
        let alone = |s: &[&Frame]| count(s, "alone") > 0;
        assert_likely!(r.matching(alone) > 50, "{}: {}", python.name, r.stderr);
        assert_likely!(r.matching(|s| alone(s) && is_truncated(s)) <= 1, "{}", python.name);
        assert_eq!(r.matching(|s| alone(s) && count(s, "inner") > 0), 0, "{}", python.name);
        // The frames of the calling interpreter belong to another thread state, which is not walked yet. Until then, no
        // such stack may count as complete.
        let inner = |s: &[&Frame]| count(s, "t_beta_outer") > 0;
        let complete = |s: &[&Frame]| count(s, "outer") == 1 && count(s, "inner") == 1;
        let partial = r.profile.meta.quality.partial;
        let incomplete = r.matching(|s| inner(s) && !complete(s));
        assert_likely!(r.matching(inner) > 50, "{}: {}", python.name, r.stderr);
        assert_likely!(
            incomplete <= partial,
            "{}: {incomplete} stacks without the outer interpreter, {partial} are marked partial",
            python.name
        );
        eprintln!(
            "{}: {incomplete} of {} stacks of the subinterpreter have no caller",
            python.name,
            r.matching(inner)
        );
    });
}

/// Some interpreters have thread states of one thread, of which two have frames.
#[test]
fn many_interpreters_of_one_thread() {
    let _live = live();
    let check = |python: &Python, backend: &str| {
        let case = format!("{}, {backend}", python.name);
        let mut command = python.script("nested_interpreters.py");
        command.args(["nested", "n40"]);
        let program = Program::start(command);
        let r = attach(program.pid(), &["--backend", backend, "-r", "499"]);
        drop(program);
        let q = &r.profile.meta.quality;
        assert_likely!(q.taken >= 20, "{case}: {}", r.stderr);
        assert_likely!(q.partial * 20 <= q.taken, "{case}: {}", r.stderr);
        let expected = ["main", "call_inside", "burn_inside"];
        for (stack, _) in r.complete_stacks() {
            let python = stack.iter().filter(|f| f.kind == FrameKind::Python);
            let ours: Vec<&str> = python.map(|f| &*f.name).filter(|name| *name != "<module>").collect();
            assert_eq!(ours, expected, "{case}");
        }
    };
    // Before 3.8 no module creates subinterpreters.
    each_with_backend(common::pythons().iter().filter(|p| p.minor >= 8), check);
}

/// Interpreters with a lock each (3.12; run in threads of their own from 3.13 on): all of them have holders.
#[test]
fn holders_of_many_interpreter_locks() {
    let _live = live();
    const INTERPRETERS: usize = 8;
    let check = |python: &Python, backend: &str| {
        let case = format!("{}, {backend}", python.name);
        let mut command = python.script_with_gil("nested_interpreters.py");
        command.args(["threads", &format!("n{INTERPRETERS}")]);
        let program = Program::start(command);
        let r = attach(
            program.pid(),
            &["--gil", "--threads", "--backend", backend, "-r", "499"],
        );
        drop(program);
        let mut threads = BTreeSet::new();
        for (stack, _) in r.stacks().filter(|(stack, _)| count(stack, "burn_inside") > 0) {
            let thread = stack.iter().find(|f| f.kind == FrameKind::Thread);
            threads.insert(thread.map(|f| f.name.clone()));
        }
        assert_likely!(threads.len() == INTERPRETERS, "{case}: {threads:?}\n{}", r.stderr);
    };
    each_with_backend(common::pythons().iter().filter(|p| p.minor >= 13), check);
}

#[test]
fn programs_without_python() {
    const OURS: Ours = Ours {
        modules: &["native"],
        files: &[],
    };
    let _live = live();
    repeated(|| {
        let mut program = Program::start(programs::native(&[]));
        let r = attach(program.pid(), &[]);
        program.finish();
        r.check_quality("native");
        r.check_rate("native");
        r.check_calls(
            "native",
            &OURS,
            &[
                ("", &["main", "n_thread"]),
                ("main", &["n_loop"]),
                ("n_loop", &["n_alloca", "n_aligned", "n_deep", "n_pages"]),
                ("n_alloca", &["n_leaf"]),
                ("n_aligned", &["n_leaf"]),
                ("n_deep", &["n_deep", "n_leaf"]),
                ("n_pages", &["n_pages", "n_hole"]),
                ("n_hole", &["n_leaf"]),
                ("n_thread", &["n_leaf"]),
            ],
        );
        assert!(r.stderr.contains("python:   none found"), "{}", r.stderr);
        // Each of the main thread's four parts has 300 units of work.
        let parts = ["n_alloca", "n_aligned", "n_deep", "n_pages"];
        let truth: BTreeMap<String, f64> = parts.map(|n| (n.to_string(), 1.0)).into();
        r.check_shares("native", &truth);
        for (stack, _) in r
            .complete_stacks()
            .filter(|(s, _)| count(s, "n_deep") > 0 && count(s, "n_leaf") > 0)
        {
            assert_eq!(count(&stack, "n_deep"), 101, "levels of recursion");
        }
    });
}

#[test]
fn stacks_of_megabytes_are_complete() {
    const BIG: [&str; 4] = ["n_big", "n_filled", "n_wide", "n_leaf"];
    let _live = live();
    let check = |case: &str, r: &Recording| {
        r.check_quality(case);
        let is_whole = |s: &[&Frame]| s.windows(4).any(|part| part.iter().map(|f| &*f.name).eq(BIG));
        let (thread, main) = (
            r.matching(|s| is_whole(s) && count(s, "main") == 0),
            r.matching(|s| is_whole(s) && count(s, "main") == 1),
        );
        assert_likely!(thread > 10 && main > 10, "{case}: {thread} {main}\n{}", r.stderr);
        // The rest is in memset, or in poll.
        assert_likely!((thread + main) * 10 > r.samples() * 7, "{case}: {}", r.stderr);
    };
    repeated(|| {
        for backend in ["ebpf", "ptrace"] {
            let mut program = Program::start(programs::native(&["big"]));
            // (Slowly: each sample has megabytes.)
            let r = attach(program.pid(), &["--backend", backend, "-r", "199"]);
            program.finish();
            check(backend, &r);
        }
        // From its first instruction on: nothing is known of the stacks yet.
        let command = programs::native(&["big", &patience().to_string()]);
        check("launched", &record(&["-r", "199"], &command));
    });
}

#[test]
fn ticks_do_not_depend_on_events_of_the_program() {
    // Each new thread is reported at once, in time for setting other periods. That restarts them, and a thread that
    // lives for one period would get no tick.
    let _live = live();
    repeated(|| {
        let mut program = Program::start(programs::native(&["bursts"]));
        let r = attach(program.pid(), &["-r", "250", "-d", "6"]);
        program.finish();
        r.check_rate("bursts");
        assert_likely!(r.with("n_burst") * 10 >= r.samples() * 8, "{}", r.stderr);
    });
}

#[test]
fn threads_outlive_the_first_one() {
    let _live = live();
    repeated(|| {
        for backend in ["ebpf", "ptrace"] {
            let r = record(&["--backend", backend], &programs::native(&["outlived", "1"]));
            r.check_quality(backend);
            r.check_rate(backend);
            assert_likely!(
                r.with("n_outlives") * 10 >= r.samples() * 9,
                "{backend}: {}\n{}",
                r.with("n_outlives"),
                r.stderr
            );
        }
    });
}

#[test]
fn signal_handlers_on_their_own_stack() {
    const OURS: Ours = Ours {
        modules: &["native"],
        files: &[],
    };
    let _live = live();
    repeated(|| {
        let mut program = Program::start(programs::native(&["signal"]));
        let r = attach(program.pid(), &[]);
        program.finish();
        // Only the handler's own stack is copied: the missing rest must be reported, and only for that reason.
        r.check_quality_but("signal", &[OTHER_STACK]);
        r.check_calls(
            "signal",
            &OURS,
            &[
                ("", &["main"]),
                ("main", &["n_signal_loop"]),
                ("n_signal_loop", &["n_interrupted", "n_handler"]),
                ("n_interrupted", &["n_handler"]),
                ("n_handler", &["n_handler_work"]),
            ],
        );
        let handled = r.with("n_handler_work");
        assert_likely!(handled > 50, "{}", r.stderr);
        // The interrupted function is known: its registers are in the signal frame.
        let below = r.matching(|s| count(s, "n_handler_work") > 0 && count(s, "n_interrupted") > 0);
        assert_likely!(
            below * 20 >= handled * 19,
            "{below} of {handled}\n{}",
            r.examples(|s| count(s, "n_handler") > 0)
        );
    });
}

#[test]
fn an_interrupt_ends_and_writes() {
    let _live = live();
    repeated(|| {
        let mut program = Program::start(newest_python().script("shares.py"));
        let scratch = Scratch::new();
        let out = scratch.path("x.collapsed");
        for signal in ["INT", "TERM"] {
            let mut command = nativeprof(&["attach", &program.pid().to_string(), "-r", "1000", "-o"]);
            command.arg(&out);
            let mut running = Running::start(command);
            sleep_patiently(500); // so that there are samples to write
            running.signal(signal);
            let done = running.finish();
            let said = String::from_utf8_lossy(&done.stderr).into_owned();
            assert!(done.status.success(), "{signal}: {said}");
            // The second recording overwrites the file of the first.
            let text = std::fs::read_to_string(&out).expect("a file");
            assert_likely!(text.contains("run_alpha"), "{signal}: {said}");
            assert_eq!(scratch.names(), ["x.collapsed"], "{signal}: something was left behind");
            std::fs::write(&out, "").expect("a file to write");
        }
        program.finish();
    });
}

#[test]
fn partial_stacks_say_why() {
    // A handler on a separate stack: the interrupted function is on a stack that is not copied.
    let _live = live();
    repeated(|| {
        let r = record(&[], &programs::native(&["signal", "0.5"]));
        let reasons = &r.profile.meta.quality.reasons;
        assert_likely!(!reasons.is_empty(), "{}", r.stderr);
        for why in reasons.keys() {
            assert!(r.stderr.contains(why), "{why} is not in the summary: {}", r.stderr);
            let named = format!("[truncated: {why}]");
            assert_likely!(r.with(&named) > 0, "{named} is not in the tree");
        }
    });
}

/// `--gil`: of two threads that run all the time, one has the GIL.
fn check_gil_holders(python: &Python, backend: &str) {
    let case = format!("{}, {backend}", python.name);
    let mut program = Program::start(python.script_with_gil("gil_shares.py"));
    let seconds = patience().to_string();
    let words = ["--backend", backend, "-r", "499", "-d", &seconds];
    let all = attach(program.pid(), &words);
    let holders = attach(program.pid(), &[&words[..], &["--gil"]].concat());
    drop(program.finish());
    if python.minor < 7 {
        assert!(holders.samples() == 0, "{case}: {}", holders.stderr);
        assert!(
            holders.stderr.contains("without a known GIL"),
            "{case}: {}",
            holders.stderr
        );
        return;
    }
    assert!(
        holders.stderr.contains("  GIL:      held in "),
        "{case}: {}",
        holders.stderr
    );
    assert!(holders.profile.meta.event.ends_with("of GIL holders"), "{case}");
    let share = |r: &Recording, role: &str| r.with(role) as f64 / r.samples().max(1) as f64;
    let (before, after) = (share(&all, "g_digest"), share(&holders, "g_digest"));
    // On a busy machine the two do not have a CPU each.
    assert_likely!(before > 0.3, "{case}: {before:.3} of all samples\n{}", all.stderr);
    assert_likely!(
        after < 0.02,
        "{case}: {after:.3} of the holders' samples\n{}",
        holders.stderr
    );
    assert_likely!(
        holders.with("g_python") * 3 > all.with("g_python") * 2,
        "{case}: {} of {} samples of the thread that has it\n{}",
        holders.with("g_python"),
        all.with("g_python"),
        holders.stderr
    );
}

#[test]
fn only_holders_of_the_gil() {
    let _live = live();
    each_third_python(0, |python| check_gil_holders(python, "ebpf"));
    repeated(|| check_gil_holders(newest_python(), "ptrace"));
}
