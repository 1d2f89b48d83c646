//! Spans of programs whose shares are known, in every CPython that the Python package supports.
//!
//! Needs the privileges to sample other processes (root), and the environments of `.ci/install-python-venvs`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use common::chance::{assert_likely, fail, patience, repeated};
use common::environments::{each_third_environment_and_backend, environments};
use common::programs::otel_contexts;
use common::recording::{Recording, check_counts};
use common::{Program, attach, live, nativeprof, record, sources};

mod common;

/// The program in an environment.
fn program(environment: &Path, what: &str) -> Command {
    let mut command = Command::new(environment.join("bin/python"));
    command
        .arg(sources().join("spans.py"))
        .arg(what)
        .env("PYTHONPATH", sources())
        .env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Samples below `burn` by their labels, as the program reports them: `outer+inner/1`.
fn by_labels(r: &Recording) -> BTreeMap<String, u64> {
    let profile = &r.profile;
    let is_burn: Vec<bool> = profile.frames.iter().map(|frame| frame.name == "burn").collect();
    let mut below = vec![false; profile.nodes.len()];
    for (at, node) in profile.nodes.iter().enumerate().skip(1) {
        below[at] = below[node.parent as usize] || is_burn[node.frame as usize];
    }
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for (at, sample) in profile
        .timeline
        .iter()
        .enumerate()
        .filter(|(_, sample)| below[sample.node as usize])
    {
        let labels = profile.labels.of(at);
        let of = |key: &str| -> Vec<&str> {
            let found = labels.iter().filter(|(k, _)| k == key);
            found.map(|(_, value)| value.as_str()).collect()
        };
        let mut name = of("span").join("+");
        if name.is_empty() {
            assert!(labels.is_empty(), "{labels:?}");
            name = "-".into();
        }
        for thread in of("thread") {
            name += &format!("/{thread}");
        }
        // A span has its own labels, and those around it.
        assert_eq!(!of("step").is_empty(), name.contains("inner"), "{labels:?}");
        *counts.entry(name).or_default() += profile.sample_amount(0, at);
        assert!(sample.tid > 0);
    }
    counts
}

/// CPU times by labels; of code without a span, those of both threads.
fn truth(program: &mut Program) -> BTreeMap<String, f64> {
    let mut times = BTreeMap::new();
    for (name, time) in program.finish() {
        let name = if name.starts_with('-') { "-".into() } else { name };
        *times.entry(name).or_default() += time;
    }
    times
}

fn check(case: &str, environment: &Path, what: &str, words: &[&str]) {
    let mut program = Program::start(program(environment, what));
    let r = attach(program.pid(), &[&["--spans"], words].concat());
    let truth = truth(&mut program);
    let mut counts: BTreeMap<String, u64> = truth.keys().map(|name| (name.clone(), 0)).collect();
    for (name, n) in by_labels(&r) {
        *counts
            .get_mut(&name)
            .unwrap_or_else(|| panic!("{case}: no such span: {name}")) += n;
    }
    check_counts(case, &counts, &truth, 0.01);
}

#[test]
fn threads_have_the_labels_of_their_spans() {
    let _live = live();
    each_third_environment_and_backend(0, |name, environment, backend| {
        check(
            &format!("{name} {backend}"),
            environment,
            "threads",
            &["--backend", backend],
        );
    });
}

#[test]
fn tasks_have_the_labels_of_their_spans() {
    let _live = live();
    each_third_environment_and_backend(1, |name, environment, backend| {
        check(
            &format!("{name} {backend}"),
            environment,
            "tasks",
            &["--backend", backend],
        );
    });
}

/// A launched program imports the package and enters spans while it is sampled.
#[test]
fn spans_are_found_while_a_program_starts() {
    let _live = live();
    let (_, environment) = environments().last().expect("an environment");
    repeated(|| {
        let mut command = program(environment, "tasks");
        command.arg((2 * patience()).to_string());
        let r = record(&["--spans"], &command);
        let counts = by_labels(&r);
        let (without, all) = (counts.get("-").copied().unwrap_or(0), counts.values().sum::<u64>());
        // Its share is 15 %, and some 5 ms pass until the location of spans is known.
        assert_likely!(without > 0 && without < all / 4 && all > 100, "{counts:?}");
    });
}

/// Programs that publish the OpenTelemetry context of their threads have its trace, its span and its attributes as labels.
#[test]
fn opentelemetry_contexts_are_labels() {
    let _live = live();
    for backend in ["ebpf", "ptrace"] {
        for (name, command) in otel_contexts() {
            let case = format!("{name} {backend}");
            repeated(|| {
                let mut again = Command::new(command.get_program());
                again.args(command.get_args());
                let mut program = Program::start(again);
                let r = attach(program.pid(), &["--spans", "--backend", backend]);
                let truth = program.finish();
                let mut counts: BTreeMap<String, u64> = truth.keys().map(|name| (name.clone(), 0)).collect();
                for (at, sample) in r.profile.timeline.iter().enumerate() {
                    let labels = r.profile.labels.of(at);
                    let of = |key: &str| labels.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str());
                    let Some(route) = of("route") else {
                        assert!(labels.is_empty(), "{case}: {labels:?}");
                        *counts.entry("-".into()).or_default() += 1;
                        continue;
                    };
                    let trace = if route == "/a" { "a0" } else { "a1" };
                    assert_eq!(of("trace_id"), Some(&*format!("{:0>32}", trace)), "{case}");
                    let is_first = sample.tid == program.pid();
                    assert_eq!(of("span_id").map(|id| id.starts_with("01")), Some(is_first), "{case}");
                    *counts.get_mut(route).expect("a route") += 1;
                }
                check_counts(&case, &counts, &truth, 0.01);
            });
        }
    }
}

/// Filters and tables by label; files and merges keep labels.
#[test]
fn reports_and_exports_select_by_label() {
    let _live = live();
    repeated(|| {
        let (_, environment) = environments().last().expect("an environment");
        let scratch = common::Scratch::new();
        let (file, inner, merged) = (
            scratch.path("all.json"),
            scratch.path("inner.json"),
            scratch.path("merged.json"),
        );
        let mut program = Program::start(program(environment, "threads"));
        let r = attach(program.pid(), &["--spans"]);
        program.finish();
        std::fs::write(&file, to_json(&r)).expect("a file");
        let counts = by_labels(&r);
        let expected: u64 = counts
            .iter()
            .filter(|(name, _)| name.contains("inner/1"))
            .map(|(_, n)| n)
            .sum();
        let run = |words: &[&str]| {
            let done = nativeprof(words).output().expect("nativeprof starts");
            let (out, err) = (
                String::from_utf8_lossy(&done.stdout),
                String::from_utf8_lossy(&done.stderr),
            );
            (done.status.success(), out.into_owned(), err.into_owned())
        };
        let path = |path: &Path| path.to_string_lossy().into_owned();
        let (ok, out, err) = run(&["report", &path(&file), "--by", "label", "--json"]);
        assert!(ok, "{err}");
        let rows: serde_json::Value = serde_json::from_str(&out).expect("JSON");
        let row = |name: &str| {
            let rows = rows["rows"].as_array().expect("rows");
            let row = rows.iter().find(|row| row["name"] == name);
            let row = row.unwrap_or_else(|| fail(&format!("no row {name}: {out}\n{}", r.stderr)));
            (
                row["self"].as_u64().expect("a number"),
                row["total"].as_u64().expect("a number"),
            )
        };
        let (outer_self, outer) = row("outer");
        let (inner_self, inner_all) = row("inner");
        assert_eq!((outer, inner_self), (outer_self + inner_all, inner_all));
        assert!(row("thread=1").1 + row("thread=2").1 == outer, "{out}");
        let words = ["-o", &path(&inner), "--span", "inner", "--label", "thread=1"];
        let (ok, _, err) = run(&[&["export", &path(&file)], &words[..]].concat());
        assert!(ok, "{err}");
        let read =
            |path: &Path| nativeprof::profile::json::read(&std::fs::read(path).expect("a file")).expect("a profile");
        let part = read(&inner);
        assert_likely!(inner_all > expected, "one thread only: {expected}");
        assert!(
            part.nodes[0].count >= expected && part.nodes[0].count < inner_all,
            "{expected}"
        );
        assert!((0..part.timeline.len()).all(|at| part.labels.of(at).contains(&("span".into(), "inner".into()))));
        let (ok, _, err) = run(&["merge", &path(&inner), &path(&file), "-o", &path(&merged)]);
        assert!(ok, "{err}");
        let both = read(&merged);
        let with = (0..both.timeline.len())
            .filter(|at| !both.labels.of(*at).is_empty())
            .count() as u64;
        assert_eq!(with, outer + part.nodes[0].count);
        let (ok, _, err) = run(&["report", &path(&file), "--span", "nowhere"]);
        assert!(!ok && err.contains("span=outer") && err.contains("--by label"), "{err}");
    });
}

fn to_json(r: &Recording) -> Vec<u8> {
    let mut out = Vec::new();
    nativeprof::export::by_name("json")
        .expect("a format")
        .write_default(&r.profile, &mut out)
        .expect("written");
    out
}
