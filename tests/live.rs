//! Programs with known shares of time and chains of calls, sampled in every interpreter on this machine.
//!
//! Needs the privileges to sample (root, or the capabilities that nativeprof needs), gcc and the headers of each
//! interpreter; fails with a message where one is missing.

use std::collections::BTreeMap;
use std::time::Duration;

use nativeprof::profile::model::{Frame, FrameKind};

use common::calls::{CALLBACKS, Calls, SHARES};
use common::chance::{assert_likely, repeated};
use common::recording::{Ours, Recording, Running, TRUTH, attach_while, check_counts};
use common::{
    Program, Python, Scratch, attach, each_python_and_backend, each_third_python, each_third_python_and_backend, live,
    nativeprof, newest_python, programs, sources,
};

mod common;

fn sample(python: &Python, script: &str, words: &[&str]) -> (Recording, BTreeMap<String, f64>) {
    let mut program = Program::start(python.script(script));
    let recording = attach(program.pid(), words);
    (recording, program.finish())
}

fn count(stack: &[&Frame], name: &str) -> usize {
    stack.iter().filter(|f| f.name == name).count()
}

#[test]
fn each_part_has_its_share() {
    let _live = live();
    each_python_and_backend(|python, words| {
        let (r, truth) = sample(python, "shares.py", words);
        r.check_quality(&python.name);
        r.check_rate(&python.name);
        r.check_calls(&python.name, &TRUTH, SHARES);
        r.check_shares(&python.name, &truth);
        // Without the program's own clock: a third of the work is in the outer function itself.
        let (outer, inner) = (r.with("t_beta_outer") as f64, r.with("t_beta_inner") as f64);
        let band = 4.0 * (2.0 / 9.0 / outer).sqrt();
        assert_likely!(
            (inner / outer - 2.0 / 3.0).abs() < band,
            "{}: {inner} of {outer}",
            python.name
        );
        for (stack, _) in r
            .complete_stacks()
            .filter(|(stack, _)| count(stack, "t_recurse_bottom") > 0)
        {
            assert_eq!(
                count(&stack, "t_recurse_step"),
                201,
                "{}: levels of recursion",
                python.name
            );
        }
    });
}

/// A profiler that has no CPU for a while loses samples, which count.
#[test]
fn what_is_expected_is_taken_or_lost() {
    let _live = live();
    for backend in ["ebpf", "ptrace"] {
        repeated(|| {
            let scratch = Scratch::new();
            let file = scratch.path("profile.json");
            let script = newest_python().script("many_calls.py");
            let mut command = nativeprof(&["record", "-r", "1000", "--backend", backend, "-o"]);
            command.arg(&file).arg("--").arg(script.get_program());
            command.args(script.get_args()).args(["unused", "1.2"]);
            let mut running = Running::start(command);
            running.signal("STOP");
            std::thread::sleep(Duration::from_millis(500));
            running.signal("CONT");
            let done = running.finish();
            let said = String::from_utf8_lossy(&done.stdout).into_owned();
            let r = Recording::of(&file, done);
            let q = &r.profile.meta.quality;
            assert_eq!(q.expected, q.taken + q.lost, "{backend}: {}", r.stderr);
            // The clock of the program's thread, in samples.
            let spent = said
                .lines()
                .filter_map(|line| line.strip_prefix("SPENT ")?.split_once(' '));
            let spent: u64 = spent
                .map(|(_, ns)| ns.parse::<u64>().expect("a number") / 1_000_000)
                .sum();
            assert_likely!(
                q.expected * 10 > spent * 8 && q.expected * 10 < spent * 12 + 1000,
                "{backend}: {} samples expected in {spent} ms\n{}",
                q.expected,
                r.stderr
            );
        });
    }
}

#[test]
fn callbacks_are_in_calling_order() {
    let _live = live();
    each_third_python_and_backend(0, |python, words| {
        let (r, _) = sample(python, "callbacks.py", words);
        r.check_quality(&python.name);
        r.check_calls(&python.name, &TRUTH, CALLBACKS);
        for name in ["level3", "compare", "__lt__", "key_of", "folded", "attribute"] {
            assert_likely!(r.with(name) > 0, "{}: {name} was never seen", python.name);
        }
        // The full chain, not only pair by pair.
        for (stack, _) in r.complete_stacks().filter(|(stack, _)| count(stack, "level3") > 0) {
            assert_eq!(
                (count(&stack, "t_bridge"), count(&stack, "level2")),
                (3, 1),
                "{}",
                python.name
            );
        }
    });
}

#[test]
fn generators_coroutines_and_exceptions_keep_their_callers() {
    const CALLS: Calls = &[
        ("", &["<module>"]),
        ("<module>", &["main"]),
        (
            "main",
            &["by_generator", "by_list", "by_coroutine", "by_exception", "by_manager"],
        ),
        ("by_generator", &["outer_generator"]),
        ("by_list", &["outer_generator"]),
        ("outer_generator", &["inner_generator"]),
        ("inner_generator", &["t_alpha", "t_beta"]),
        ("by_coroutine", &["outer_coroutine"]),
        ("outer_coroutine", &["inner_coroutine"]),
        ("inner_coroutine", &["__await__", "t_alpha"]),
        ("__await__", &["t_alpha", "t_beta"]),
        ("by_exception", &["t_call", "t_alpha"]),
        ("t_call", &["t_bridge"]),
        ("t_bridge", &["rethrower", "thrower"]),
        ("rethrower", &["t_call", "t_beta"]),
        ("thrower", &["t_fail"]),
        ("t_fail", &["t_alpha_work"]),
        ("by_manager", &["managed", "t_alpha"]),
        ("managed", &["t_alpha", "t_beta"]),
        ("t_alpha", &["t_alpha_work"]),
        ("t_beta", &["t_beta_outer"]),
        ("t_beta_outer", &["t_beta_inner"]),
    ];
    let _live = live();
    each_third_python_and_backend(2, |python, words| {
        let (r, _) = sample(python, "generators.py", words);
        r.check_quality(&python.name);
        r.check_calls(&python.name, &TRUTH, CALLS);
        for name in ["inner_generator", "__await__", "thrower", "managed"] {
            assert_likely!(r.with(name) > 0, "{}: {name} was never seen", python.name);
        }
    });
}

#[test]
fn deep_stacks_are_complete() {
    const CALLS: Calls = &[
        ("", &["<module>"]),
        ("<module>", &["main"]),
        ("main", &["descend", "bridged"]),
        ("descend", &["descend", "t_alpha"]),
        ("bridged", &["t_call", "t_beta"]),
        ("t_call", &["t_bridge"]),
        ("t_bridge", &["bridged"]),
        ("t_alpha", &["t_alpha_work"]),
        ("t_beta", &["t_beta_outer"]),
        ("t_beta_outer", &["t_beta_inner"]),
    ];
    let _live = live();
    each_third_python_and_backend(1, |python, words| {
        // ptrace stops a thread for half a millisecond here: it would be stopped most of the time.
        let slower: &[&str] = if words.contains(&"ptrace") { &["-r", "300"] } else { &[] };
        let (r, _) = sample(python, "deep.py", &[words, slower].concat());
        r.check_quality(&python.name);
        r.check_calls(&python.name, &TRUTH, CALLS);
        for (stack, _) in r.complete_stacks() {
            let levels = (
                count(&stack, "descend"),
                count(&stack, "bridged"),
                count(&stack, "t_bridge"),
            );
            if count(&stack, "t_alpha_work") > 0 {
                assert_eq!(levels, (301, 0, 0), "{}: levels of Python", python.name);
            } else if count(&stack, "t_beta_outer") > 0 {
                assert_eq!(levels, (0, 301, 300), "{}: levels of Python and C", python.name);
            }
        }
    });
}

#[test]
fn each_thread_has_its_share() {
    const CALLS: Calls = &[
        ("", &["<module>", "run"]),
        ("<module>", &["main"]),
        ("run", &["in_c", "in_python", "asleep", "reading"]),
        ("in_c", &["t_nogil"]),
        ("t_nogil", &["t_nogil_work"]),
        ("in_python", &["count_up"]),
        ("reading", &["read_some"]),
    ];
    let _live = live();
    each_third_python_and_backend(2, |python, words| {
        let mut program = Program::start(python.script("threads.py"));
        // From the begin of their work to their end.
        let r = attach_while(program.pid(), &[words, &["--threads", "-d", "60"]].concat(), || {
            program.send("go")
        });
        let truth = program.finish();
        r.check_quality(&python.name);
        r.check_calls(&python.name, &TRUTH, CALLS);
        let mut counts = BTreeMap::new();
        for line in &program.said {
            let ["THREAD", name, tid] = line.split(' ').collect::<Vec<_>>()[..] else {
                continue;
            };
            let node = format!("thread {tid} (");
            let here = |stack: &[&Frame]| stack[0].kind == FrameKind::Thread && stack[0].name.starts_with(&node);
            counts.insert(name.to_string(), r.matching(here));
            let work = name.rsplit_once('-').expect("a numbered name").0;
            let works = ["in_c", "in_python", "asleep", "reading"];
            let others = |stack: &[&Frame]| here(stack) && works.iter().any(|w| *w != work && count(stack, w) > 0);
            assert_eq!(r.matching(others), 0, "{}: work of others in {name}", python.name);
        }
        assert_eq!(counts.len(), 8, "{}: {:?}", python.name, program.said);
        check_counts(&python.name, &counts, &truth, 0.03);
    });
}

#[test]
fn short_lived_threads_have_complete_stacks() {
    const CALLS: Calls = &[
        ("", &["<module>", "in_c", "in_python"]),
        ("<module>", &["main"]),
        ("in_c", &["t_nogil"]),
        ("t_nogil", &["t_nogil_work"]),
    ];
    let _live = live();
    each_third_python_and_backend(0, |python, words| {
        let (r, _) = sample(python, "short_threads.py", words);
        r.check_quality(&python.name);
        r.check_calls(&python.name, &TRUTH, CALLS);
    });
}

#[test]
fn children_that_end_at_once_have_names() {
    let _live = live();
    each_third_python_and_backend(1, |python, words| {
        let mut program = Program::start(python.script("forked_code.py"));
        let r = attach(program.pid(), &[words, &["--subprocesses"]].concat());
        program.finish();
        // At the instant of a fork the stack's pages, and the interpreter of the new process, may be out of sight.
        const AT_FORK: [&str; 3] = [
            "stack page not present",
            "unknown interpreter",
            "Python frame unreadable",
        ];
        r.check_quality_but(&python.name, &AT_FORK);
        let q = &r.profile.meta.quality;
        assert_likely!(q.partial * 50 <= q.taken, "{}: {}", python.name, r.stderr);
        // The program sees to it that they run most of the time.
        assert_likely!(r.with("made_inner") * 4 > q.taken, "{}: {}", python.name, r.stderr);
    });
}

#[test]
fn functions_with_odd_names_stay_different() {
    let start = format!("{}...[cut: 5001 characters, hash ", &"long_".repeat(1000)[..4096]);
    let _live = live();
    each_third_python_and_backend(1, |python, words| {
        let (r, truth) = sample(python, "odd_names.py", words);
        r.check_quality(&python.name);
        let mut counts: BTreeMap<String, u64> = BTreeMap::new();
        let mut cut_names: BTreeMap<String, u64> = BTreeMap::new();
        for (stack, n) in r.stacks() {
            let Some(f) = stack.iter().rfind(|f| f.kind == FrameKind::Python) else {
                continue;
            };
            let part = match (&*f.name, &*f.filename) {
                ("of_subclass", "/job/odd.py") => "subclass",
                ("crunch", r"/caf\udce9/mod.py") => "e9",
                ("crunch", r"/caf\udce8/mod.py") => "e8",
                ("crunch", r"/caf\x5cudce8/mod.py") => "literal",
                (name, "/long.py") if name.starts_with(&start) => {
                    *cut_names.entry(name.to_string()).or_default() += n;
                    continue;
                }
                _ => continue,
            };
            *counts.entry(part.to_string()).or_default() += n;
        }
        // Their order is that of their shares.
        let mut shares: Vec<u64> = cut_names.into_values().collect();
        shares.sort_unstable();
        assert_likely!(shares.len() == 2, "{}: {shares:?}", python.name);
        for (name, count) in ["long1", "long2"].iter().zip(shares) {
            counts.insert(name.to_string(), count);
        }
        check_counts(&python.name, &counts, &truth, 0.0);
        assert!(
            r.stderr
                .contains("2 functions with a name or file longer than 4096 characters"),
            "{}",
            r.stderr
        );
    });
}

#[test]
fn reused_code_addresses_are_distinguished() {
    let _live = live();
    each_third_python_and_backend(0, |python, words| {
        let (r, truth) = sample(python, "fresh_code.py", words);
        // A function that exists for a fraction of a millisecond is still named.
        r.check_quality(&python.name);
        let mut seen: BTreeMap<(String, String), u64> = BTreeMap::new();
        let mut wrong = 0;
        let mut example = String::new();
        for (stack, n) in r.stacks() {
            let python: Vec<_> = stack.iter().filter(|f| f.kind == FrameKind::Python).collect();
            let Some(at) = python.iter().position(|f| f.name == "call_fresh") else {
                continue;
            };
            let Some(f) = python.get(at + 1) else { continue };
            // The module code of each file has the same name.
            *seen.entry((f.name.clone(), f.filename.clone())).or_default() += n;
            if f.name.starts_with("fresh_") && f.name.strip_prefix("fresh_") != f.filename.strip_prefix("fresh-") {
                wrong += n;
                example = format!("{} in {}", f.name, f.filename);
            }
        }
        assert_eq!(
            wrong,
            0,
            "{}: of {} samples, such as {example}",
            python.name,
            r.samples()
        );
        assert_likely!(
            seen.len() > 20,
            "{}: {} functions of fresh code",
            python.name,
            seen.len()
        );
        // Each runs once: more samples than fit into its time (two per millisecond) mean that another function was
        // given its name.
        let most = seen.iter().max_by_key(|(_, n)| **n);
        let few = 2.0 + 2.0 * truth["longest"] / 1e6;
        assert_likely!(
            most.is_none_or(|(_, n)| *n as f64 <= few),
            "{}: {most:?}, but no more than {few}",
            python.name
        );
    });
}

#[test]
fn names_of_unloaded_libraries_are_not_reused() {
    const OURS: Ours = Ours {
        modules: &["known_shares.so", "plugin"],
        files: &[],
    };
    const CALLS: Calls = &[
        ("", &["<module>"]),
        ("<module>", &["main"]),
        ("main", &["use_0", "use_1", "use_2"]),
        ("use_0", &["t_plugin"]),
        ("use_1", &["t_plugin"]),
        ("use_2", &["t_plugin"]),
        ("t_plugin", &["plugin0_outer", "plugin1_outer", "plugin2_outer"]),
        ("plugin0_outer", &["plugin0_inner"]),
        ("plugin1_outer", &["plugin1_inner"]),
        ("plugin2_outer", &["plugin2_inner"]),
    ];
    let _live = live();
    let libraries = programs::plugins();
    each_third_python(2, |python| {
        let mut command = python.script("plugins.py");
        command.env("FIXTURE_LIBRARIES", &libraries);
        let mut program = Program::start(command);
        let r = attach(program.pid(), &[]);
        program.finish();
        for (stack, n) in r.stacks() {
            for n_th in 0..3 {
                let (user, library) = (format!("use_{n_th}"), format!("plugin{n_th}"));
                let others = stack
                    .iter()
                    .any(|f| f.module.starts_with("plugin") && !f.module.starts_with(&library));
                assert!(
                    count(&stack, &user) == 0 || !others,
                    "{}: {n} x {}",
                    python.name,
                    common::recording::text(&stack)
                );
            }
        }
        r.check_quality(&python.name);
        r.check_calls(&python.name, &OURS, CALLS);
    });
}

#[test]
fn embedded_interpreters_are_found() {
    const OURS: Ours = Ours {
        modules: &["known_shares.so", "embedded"],
        files: &["<string>"],
    };
    const CALLS: Calls = &[
        ("", &["main"]),
        ("main", &["e_run_python", "work"]),
        ("e_run_python", &["<module>"]),
        ("<module>", &["<module>", "main"]),
        ("work", &["t_call"]),
        ("t_call", &["t_bridge"]),
        ("t_bridge", &["bridged"]),
        ("bridged", &["t_alpha"]),
        ("t_alpha", &["t_alpha_work"]),
    ];
    let _live = live();
    common::pythons::each_of(common::pythons().iter().filter(|p| p.library().is_some()), |python| {
        let mut program = Program::start(python.embedded(false));
        let r = attach(program.pid(), &["-d", "1"]);
        program.finish();
        r.check_quality(&python.name);
        r.check_calls(&python.name, &OURS, CALLS);
        assert_likely!(
            r.with("bridged") * 10 > r.samples() * 9,
            "{}: {}",
            python.name,
            r.stderr
        );
        assert!(
            r.profile.meta.python.contains(&format!("CPython 3.{}", python.minor)),
            "{}",
            r.stderr
        );
    });
}

/// A phase that got much faster is found with one run of each side: phases are the same in every run, and no noise.
#[test]
fn a_faster_phase_is_the_largest_change() {
    let _live = live();
    let scratch = Scratch::new();
    let python = newest_python();
    repeated(|| {
        let files = ["", "fast"].map(|word| {
            let file = scratch.path(&format!("phases-{word}.json"));
            let file = file.to_str().expect("UTF-8").to_string();
            let program = sources().join("phases.py");
            let mut command = nativeprof(&["record", "-r", "999", "-o", &file, "--"]);
            command.arg(&python.exe).arg(program);
            if !word.is_empty() {
                command.arg(word);
            }
            let done = command.output().expect("nativeprof starts");
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            file
        });
        for (normalize, callers) in [("time", &["<module>", "main"][..]), ("share", &[])] {
            let done = nativeprof(&["diff", &files[0], &files[1], "--normalize", normalize, "--json"]).output();
            let done = done.expect("nativeprof starts");
            let found: serde_json::Value = serde_json::from_slice(&done.stdout).expect("JSON");
            assert_eq!(found["question"], "recordings");
            let rows = found["rows"].as_array().expect("rows").iter();
            let change = |row: &serde_json::Value| row["change"].as_f64().unwrap_or(0.0);
            let falls = rows
                .clone()
                .filter(|row| !callers.iter().any(|name| row["name"] == *name));
            let first = falls.min_by(|a, b| change(a).total_cmp(&change(b))).expect("a change");
            assert_likely!(first["name"] == "aggregate", "{found:#}");
            let low = first["interval"][0].as_f64().unwrap_or(0.0);
            assert!(
                -1.5 * first["before"].as_f64().unwrap_or(0.0) < low && change(first) < 0.0,
                "{found:#}"
            );
            assert!(first["makes_up"] == false, "{found:#}");
            // What grew did so in share only.
            let grown = rows.filter(|row| normalize == "share" && change(row) > 0.0);
            assert_likely!(grown.into_iter().all(|row| row["makes_up"] == true), "{found:#}");
        }
    });
}
