//! Files of Python's pstats as input: what each interpreter's own profilers write, and what we write ourselves.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Output, Stdio};

use common::{Scratch, nativeprof, pythons};
use nativeprof::escape::line;
use serde_json::Value;

mod common;

fn run(args: &[&str]) -> Output {
    let mut command = nativeprof(args);
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command.stdin(Stdio::null()).output().expect("nativeprof starts")
}

fn json(args: &[&str]) -> Value {
    let done = run(args);
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{args:?}: {said}");
    serde_json::from_slice(&done.stdout).unwrap_or(Value::Null)
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a number"))
}

fn text(value: &Value) -> String {
    value.as_str().expect("a text").to_string()
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().expect("a list")
}

/// A function by the name and the place that reports have; with its self and total amounts.
type Rows = BTreeMap<(String, String), (u64, u64)>;

/// `report --json` of all functions by one value.
fn report(file: &Path, value: &str) -> Rows {
    let file = file.to_str().expect("UTF-8");
    let found = json(&[
        "report",
        file,
        "--json",
        "--by",
        "function",
        "--value",
        value,
        "--interpreter-frames",
    ]);
    let row = |row: &Value| {
        let key = (
            text(&row["name"]),
            row["place"].as_str().unwrap_or_default().to_string(),
        );
        (key, (number(&row["self"]), number(&row["total"])))
    };
    list(&found["rows"]).iter().map(row).collect()
}

fn nanoseconds(seconds: &Value) -> u64 {
    (seconds.as_f64().expect("seconds") * 1e9).round() as u64
}

/// Functions that are not recursive, and call none that are.
const SIMPLE: &[&str] = &["leaf", "left", "right", "caught", "items"];

/// Compares a file that a profiler of a Python has written with what its own pstats has read in it.
fn check(file: &Path, found: &Value, is_timed: bool) {
    let calls = report(file, "calls");
    let wall = report(file, "wall");
    let functions = list(&found["functions"]);
    assert!(functions.len() > 12, "{functions:?}");
    for function in functions {
        let (path, line, name) = (text(&function[0]), number(&function[1]), text(&function[2]));
        let place = match (path.as_str(), line) {
            ("~" | "", 0) => "[builtin]".to_string(),
            (path, 0) => path.to_string(),
            (path, line) => format!("{path}:{line}"),
        };
        let key = (name.clone(), place);
        let times = wall.get(&key).copied().unwrap_or_default();
        assert_eq!(calls.get(&key).map(|row| row.0), Some(number(&function[3])), "{key:?}");
        assert!(
            times.0.abs_diff(nanoseconds(&function[4])) <= 1,
            "{key:?}: {times:?}, {function}"
        );
        let total = nanoseconds(&function[5]);
        if is_timed && SIMPLE.contains(&&*name) {
            // What a call of less than a nanosecond may lose, and what is too small to be followed.
            let allowed = 1000 + total / 1000;
            assert!(times.1.abs_diff(total) <= allowed, "{key:?}: {times:?}, {function}");
        }
    }
    let tree = Edges::of(file);
    for edge in list(&found["edges"]) {
        let key = (text(&edge[0]), text(&edge[1]));
        let (calls, self_time) = tree.0.get(&key).copied().unwrap_or_default();
        assert_eq!(calls, number(&edge[2]), "{key:?}");
        if is_timed {
            assert!(
                self_time.abs_diff(nanoseconds(&edge[3])) <= 10,
                "{key:?}: {self_time}, {edge}"
            );
        }
    }
}

/// By caller and callee, the callee's calls and self time.
#[derive(Default)]
struct Edges(BTreeMap<(String, String), (u64, u64)>);

impl Edges {
    fn of(file: &Path) -> Edges {
        let tree = json(&["export", file.to_str().expect("UTF-8"), "-f", "json", "-o", "-"]);
        let mut edges = Edges::default();
        edges.add(&tree, "");
        edges
    }

    fn add(&mut self, node: &Value, caller: &str) {
        let name = text(&node["description"]["name"]);
        let amounts =
            |node: &Value| [node["count"].as_u64(), node["values"]["wall_ns"].as_u64()].map(|n| n.unwrap_or(0));
        let [mut calls, mut self_time] = amounts(node);
        for child in node["children"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(_, child)| child)
        {
            let [more_calls, more_time] = amounts(child);
            (calls, self_time) = (calls - more_calls, self_time - more_time);
            self.add(child, &name);
        }
        let sum = self.0.entry((caller.to_string(), name)).or_default();
        *sum = (sum.0 + calls, sum.1 + self_time);
    }
}

#[test]
fn files_of_every_python() {
    for python in pythons() {
        let scratch = Scratch::new();
        let mut command = python.script("pstats_files.py");
        let done = command.arg(scratch.directory()).output().expect("the Python starts");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{}: {said}", python.exe.display());
        let found: Value = serde_json::from_slice(&done.stdout).expect("JSON");
        check(&scratch.path("cProfile"), &found["cProfile"], true);
        check(&scratch.path("profile"), &found["profile"], false);
        assert_rewritten(&scratch, &scratch.path("cProfile"));
        // The other commands read it too.
        let file = scratch.path("cProfile");
        let file = file.to_str().expect("UTF-8");
        let diff = json(&["diff", file, file, "--json", "--value", "wall"]);
        assert!(diff.is_object(), "{diff}");
        let sum = scratch.path("sum.json");
        json(&["merge", file, file, "-o", sum.to_str().expect("UTF-8")]);
        for (key, (calls, _)) in report(&sum, "calls") {
            assert_eq!(calls, 2 * report(Path::new(file), "calls")[&key].0, "{key:?}");
        }
    }
}

/// Written as pstats and read again, each function has the same figures.
fn assert_rewritten(scratch: &Scratch, file: &Path) {
    let again = scratch.path("again.pstats");
    let again_text = again.to_str().expect("UTF-8");
    json(&["export", file.to_str().expect("UTF-8"), "-o", again_text]);
    for value in ["calls", "wall"] {
        let (before, after) = (report(file, value), report(&again, value));
        let self_time = |rows: &Rows| {
            rows.iter()
                .map(|(key, row)| (key.clone(), row.0))
                .collect::<BTreeMap<_, _>>()
        };
        assert_eq!(self_time(&before), self_time(&after), "{value}");
    }
}

#[test]
fn a_sampled_profile_keeps_its_samples() {
    let scratch = Scratch::new();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/golden/profile.json");
    let file = scratch.path("golden.pstats");
    let names = [&golden, &file].map(|path| path.to_str().expect("UTF-8"));
    json(&["export", names[0], "-o", names[1]]);
    for value in ["samples", "cpu"] {
        let by_name = |rows: Rows| {
            let mut self_time: BTreeMap<String, u64> = BTreeMap::new();
            for ((name, place), row) in rows {
                // Files of pstats have no qualified names, and no control characters.
                let is_python = place.rsplit(':').next().is_some_and(|line| line.parse::<u32>().is_ok());
                let key = if is_python { place } else { name };
                *self_time.entry(line(&key).into_owned()).or_default() += row.0;
            }
            self_time.retain(|_, self_time| *self_time > 0);
            self_time
        };
        let (before, mut after) = (by_name(report(&golden, value)), by_name(report(&file, value)));
        // Samples of threads outside of all functions have no row of their own in the original.
        after.remove("[no stack]");
        assert_eq!(before.len(), after.len(), "{before:?}, {after:?}");
        for (name, self_time) in before {
            let found = after.get(&name).copied().unwrap_or(0);
            assert!(found.abs_diff(self_time) <= 1, "{name}: {self_time}, {found}");
        }
    }
}

#[test]
fn damaged_files_are_refused() {
    let scratch = Scratch::new();
    let golden = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/golden/profile.pstats"));
    let golden = golden.expect("the golden file");
    for (name, bytes, why) in [
        ("cut", &golden[..golden.len() / 2], "truncated"),
        (
            "key",
            b"{)\x01i\x01\0\0\0N0",
            "a key that is not a file, a line and a name",
        ),
        (
            "code",
            b"{(\x03\0\0\0ccc",
            "a value of a type that statistics do not have, `c`",
        ),
    ] {
        let file = scratch.path(name);
        std::fs::write(&file, bytes).expect("a file");
        for command in ["report", "export"] {
            let done = run(&[command, file.to_str().expect("UTF-8")]);
            let said = String::from_utf8_lossy(&done.stderr);
            assert_eq!(done.status.code(), Some(1), "{said}");
            for word in [name, why, "\n  why: ", "\n  try: ", "cProfile -o"] {
                assert!(said.contains(word), "`{word}` is not in:\n{said}");
            }
        }
    }
}
