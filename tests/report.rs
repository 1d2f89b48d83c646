//! Output of the commands that read saved profiles, compared with files that were reviewed by hand, and errors.
//!
//! `BLESS=1 cargo test --test report` rewrites the files in `fixtures/golden/report`.

use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};

use common::{Scratch, nativeprof, packed};
use nativeprof::profile::build::Builder;
use nativeprof::profile::json;
use nativeprof::profile::lags::Lag;
use nativeprof::profile::model::{Frame, FrameKind, Meta};
use nativeprof::profile::values::ValueType;
use serde_json::Value;

mod common;

const PROFILE: &str = "fixtures/golden/profile.json";

fn run(args: &[&str], columns: &str) -> Output {
    let mut command = nativeprof(args);
    command
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env_remove("NO_COLOR")
        .env_remove("COLUMNS");
    if !columns.is_empty() {
        command.env("COLUMNS", columns);
    }
    command.stdin(Stdio::null()).output().expect("nativeprof starts")
}

fn stdout(done: &Output) -> String {
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    String::from_utf8(done.stdout.clone()).expect("UTF-8")
}

#[track_caller]
fn check_golden(name: &str, now: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures/golden/report")
        .join(name);
    if std::env::var_os("BLESS").is_some_and(|bless| bless == "1") {
        fs::create_dir_all(path.parent().expect("a directory")).expect("the directory");
        fs::write(&path, now).expect("a golden file");
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert!(now == expected, "{name} is not what is printed now:\n{now}");
}

/// Pages with all that a profile may have: what is in none of the page's own columns must not be lost either.
#[test]
fn a_page_is_read_as_the_profile_that_it_shows() {
    let scratch = Scratch::new();
    let modes = ["waits", "lag", "spans", "workers", "tasks", "gil"];
    let mut files: Vec<String> = modes
        .iter()
        .map(|mode| format!("fixtures/tapes/modes/{mode}.tape"))
        .collect();
    files.push(PROFILE.into());
    let read = |file: &Path, words: &[&str]| {
        let mut command = nativeprof(&[&["report", "-", "--json"], words].concat());
        let done = command
            .stdin(fs::File::open(file).expect("a file"))
            .output()
            .expect("nativeprof starts");
        (done.status.code(), String::from_utf8_lossy(&done.stdout).into_owned())
    };
    for file in files {
        let [json, page] = ["x.json", "x.html"].map(|name| scratch.path(name));
        for out in [&json, &page] {
            stdout(&run(&["export", &file, "-o", out.to_str().expect("UTF-8")], ""));
        }
        for words in [
            &[][..],
            &["--by", "function", "--interpreter-frames"],
            &["--by", "line"],
            &["--tree"],
            &["--waits"],
            &["--lag"],
            &["--by", "span"],
        ] {
            let expected = read(&json, words);
            assert_eq!(read(&page, words), expected, "{file} {words:?}");
        }
    }
}

/// What is not in such files is what is known of waits besides their time, and lags.
#[test]
fn otlp_profiles_are_reported_as_json_is() {
    let scratch = Scratch::new();
    for mode in ["waits", "lag", "spans", "workers", "tasks", "gil"] {
        let tape = format!("fixtures/tapes/modes/{mode}.tape");
        let [json, otlp] = ["x.json", "x.otlp"].map(|name| scratch.path(name));
        let reports = [&json, &otlp].map(|file| {
            let file = file.to_str().expect("UTF-8");
            stdout(&run(&["export", &tape, "-o", file], ""));
            let tables = [
                &[][..],
                &["--by", "function", "--interpreter-frames"],
                &["--by", "line"],
                &["--by", "span"],
                &["--by", "thread"],
            ];
            tables.map(|words| {
                let report = run(&[&["report", file, "--json"], words].concat(), "");
                // There may be no spans in it.
                let said = String::from_utf8_lossy(&report.stdout).replace(file, "x");
                (report.status.code(), said)
            })
        });
        assert!(reports[0] == reports[1], "{mode}");
    }
}

/// Comparisons, damaged pages and those of earlier versions say what to do.
#[test]
fn pages_without_a_profile_are_refused() {
    let scratch = Scratch::new();
    let page = scratch.path("x.html");
    let file = page.to_str().expect("UTF-8");
    let whole = stdout(&run(&["export", PROFILE, "-f", "html", "-o", "-"], ""));
    let comparison = stdout(&run(&["diff", PROFILE, PROFILE, "-f", "html", "-o", "-"], ""));
    let (old, saved) = whole
        .split_once("<script type=\"application/gzip\"")
        .expect("a profile");
    let damaged = format!(
        "{old}<script type=\"application/gzip\"{}",
        saved.replacen("H4sI", "H4sJ", 1)
    );
    for (text, words) in [
        (comparison.as_str(), "it compares two profiles"),
        (old, "of an earlier version"),
        (&whole[..whole.len() - 100], "it is incomplete"),
        (&damaged, "damaged at the embedded profile"),
        ("<!DOCTYPE html><p>", "an HTML page, but not one of nativeprof"),
    ] {
        fs::write(&page, text).expect("written");
        let done = run(&["report", file], "");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(
            !done.status.success() && said.contains(words) && said.contains("try: "),
            "{said}"
        );
    }
}

#[test]
fn golden_tables() {
    for (name, words, columns) in [
        ("python", "", ""),
        ("python-narrow", "--color always 12", "60"),
        ("functions", "--by function", ""),
        ("functions-all", "--by function --interpreter-frames", ""),
        ("functions-narrow", "--by function --color always 12", "60"),
        ("functions-wide", "--by function --sort total 0.3 srv", "200"),
        ("categories", "--by category", ""),
        ("hidden", "--hide-libraries --hide-stdlib --no-native --by function", ""),
        ("focus", "--focus run --tree", ""),
        ("source", "--source run", ""),
        ("source-native", "--source cblas_dgemm", ""),
        ("lines", "--by line --sort name", ""),
        ("modules", "--by module", ""),
        ("value", "--value cpu 5", ""),
        ("threads", "--by thread", ""),
        ("processes", "--by process", ""),
        ("callers", "--callers dgemm", ""),
        ("callees", "--callees run", "80"),
        ("tree", "--tree", ""),
        ("tree-narrow", "--tree 5% solver --color always", "60"),
        ("json", "--json --sort total 5", ""),
    ] {
        let mut args = vec!["report", PROFILE];
        args.extend(words.split_whitespace());
        let said = stdout(&run(&args, columns));
        for line in said.lines() {
            let plain = line.replace("\x1b[", "");
            assert!(!plain.contains(|c: char| c.is_control()), "{name}: {line:?}");
        }
        check_golden(name, &said);
    }
}

#[test]
fn colors_are_for_terminals() {
    assert!(!stdout(&run(&["report", PROFILE], "")).contains('\x1b'));
    assert!(stdout(&run(&["report", PROFILE, "--color", "always"], "")).contains("\x1b["));
}

/// The self column of all rows, and of all lines, adds up to the profile.
#[test]
fn no_sample_is_left_out() {
    for by in ["function", "line", "module", "category"] {
        let said = stdout(&run(&["report", PROFILE, "--json", "--by", by], ""));
        let value: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        let rows = value["rows"].as_array().expect("rows");
        let self_total: u64 = rows.iter().map(|row| row["self"].as_u64().expect("a number")).sum();
        let all = value["samples"].as_u64().expect("a number");
        // Three samples have no frame except their thread.
        assert_eq!(self_total + 3, all, "by {by}");
    }
}

#[track_caller]
fn refused(args: &[&str], code: i32, words: &[&str]) {
    let done = run(args, "");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(code), "{said}");
    assert!(done.stdout.is_empty(), "an error on standard output");
    for word in words.iter().chain(&["\n  why: ", "\n  try: "]) {
        assert!(said.contains(word), "`{word}` is not in:\n{said}");
    }
}

/// A generator expression is on the line of the function that it belongs to: totals are those of the line.
#[test]
fn a_line_with_several_functions_counts_a_sample_once() {
    let mut builder = Builder::new(&[ValueType::SAMPLES]);
    let python = |name, first| Frame::python(name, name, "/srv/a.py", first);
    let main = builder.frame(python("main", 1));
    let f = builder.frame(python("f", 1));
    let generator = builder.frame(python("f.<locals>.<genexpr>", 2));
    builder.sample(0, (7, 7), &[(main, 9), (f, 2), (generator, 2)], &[6]);
    builder.sample(1, (7, 7), &[(main, 9), (f, 2)], &[2]);
    builder.sample(2, (7, 7), &[(main, 9), (f, 3)], &[2]);
    let mut text = Vec::new();
    json::write(&builder.finish(Meta::default()), &mut text).expect("written to memory");
    let scratch = Scratch::new();
    let file = scratch.path("lines.json");
    fs::write(&file, text).expect("a file");
    let report = |words: &[&str]| {
        let words = [&["report", file.to_str().expect("UTF-8"), "--json"], words].concat();
        serde_json::from_str::<serde_json::Value>(&stdout(&run(&words, ""))).expect("JSON")
    };
    for word in ["f", "f.<locals>.<genexpr>", "a.py"] {
        let source = report(&["--source", word]);
        let lines = source["source"].as_array().expect("a list").iter();
        let line = lines.clone().find(|line| line["line"] == 2).expect("the line");
        assert_eq!((&line["self"], &line["total"]), (&8.into(), &8.into()), "{word}");
    }
    let rows = report(&["--by", "line", "--sort", "total"]);
    let rows = rows["rows"].as_array().expect("a list").iter();
    let rows: Vec<_> = rows.map(|row| (&row["name"], &row["place"], &row["total"])).collect();
    assert_eq!(
        serde_json::json!(rows),
        serde_json::json!([
            ["main", "/srv/a.py:9", 10],
            ["f", "/srv/a.py:2", 8],
            ["f", "/srv/a.py:3", 2]
        ])
    );
}

/// Functions are found by the last parts of their names, if these are of one.
#[test]
fn functions_by_the_end_of_their_names() {
    let mut builder = Builder::new(&[ValueType::SAMPLES]);
    let main = builder.frame(Frame::python("main", "main", "/srv/a.py", 1));
    let run = builder.frame(Frame::python("run", "Outer.Job.run", "/srv/a.py", 20));
    let native = |name: &str, at: u64| Frame {
        source: "/src/geo.cc".into(),
        ..Frame::native(name, "geo.so", at)
    };
    let nearest = builder.frame(native("double geo::nearest<double>(double)", 0x1000));
    let grid = builder.frame(native("geo::Grid<int>::walk(int) const", 0x2000));
    let tree = builder.frame(native("tree::Tree::walk()", 0x3000));
    for (at, frame) in [(1, nearest), (2, grid), (3, tree)] {
        builder.sample(u64::from(at), (7, 7), &[(main, 9), (run, 21), (frame, at + 10)], &[6]);
    }
    let mut text = Vec::new();
    json::write(&builder.finish(Meta::default()), &mut text).expect("written to memory");
    let scratch = Scratch::new();
    let file = scratch.path("names.json");
    fs::write(&file, text).expect("a file");
    let file = file.to_str().expect("UTF-8");
    for (word, line) in [
        ("geo::nearest", 11),
        ("nearest", 11),
        ("geo::Grid::walk", 12),
        ("Grid::walk", 12),
        ("Tree::walk", 13),
        ("run", 21),
        ("Job.run", 21),
    ] {
        let report = stdout(&self::run(&["report", file, "--json", "--source", word], ""));
        let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
        assert_eq!(report["source"][0]["line"], line, "{word}");
        assert_eq!(report["source"].as_array().map(Vec::len), Some(1), "{word}");
        if !word.contains("run") {
            // The file is not there: the function has been found.
            refused(
                &["report", file, "--assembly", word],
                1,
                &["the profile does not say which file"],
            );
        }
    }
    for option in ["--source", "--assembly"] {
        let why = ["`walk` is the end of 2 names", "geo::Grid::walk, tree::Tree::walk"];
        let hint = format!("{option} 'geo::Grid::walk'");
        refused(&["report", file, option, "walk"], 1, &[why[0], why[1], &hint]);
    }
}

/// A server's profile in a file: a request handler that waits for a database in tasks without names, its idle pool, and what it
/// blocked the event loop with.
fn server_profile(scratch: &Scratch) -> String {
    let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL, ValueType::OFF_CPU]);
    let views = "/srv/applications/shop/releases/2031-07-01/web/orders/views.py";
    let order = builder.frame(Frame::python("order", "Orders.order", views, 117));
    let module = "_umath.cpython-312-x86_64-linux-gnu.so";
    let add = builder.frame(Frame::native("add", module, 7));
    let pool = "/usr/lib/python3.12/concurrent/futures/thread.py";
    let worker = builder.frame(Frame::python("_worker", "_worker", pool, 69));
    let state = |label: &str| Frame::new(FrameKind::State, label);
    let read = builder.frame(state("[waiting: read socket 127.0.0.1:5432]"));
    let lock = builder.frame(state("[waiting: lock]"));
    for number in 1..=3 {
        let task = builder.frame(Frame::new(FrameKind::Task, format!("[task: Task-{number}]")));
        builder.sample(
            0,
            (7, 7),
            &[(task, 0), (order, 1234), (read, 0)],
            &[1, 4_000_000, 4_000_000],
        );
    }
    builder.sample(1, (7, 7), &[(order, 1235), (add, 0)], &[2, 2_000_000, 0]);
    builder.sample(2, (7, 8), &[(worker, 81), (lock, 0)], &[9, 9_000_000, 9_000_000]);
    let mut profile = builder.finish(Meta::default());
    profile.waits.lengths = vec![4_000_000, 4_000_000, 4_000_000, 0, 9_000_000];
    let lag = |task: &str, length, line: u32| Lag {
        task: task.into(),
        length,
        stack: vec![
            format!("Orders.order ({views}:{line})"),
            "JSONEncoder.encode (/usr/lib/python3.12/json/encoder.py:200)".into(),
        ],
        function: "JSONEncoder.encode (/usr/lib/python3.12/json/encoder.py:200)".into(),
        ..Lag::default()
    };
    profile.meta.lags = vec![lag("Task-1", 60_000_000, 1235), lag("Task-2", 80_000_000, 1236)];
    let mut text = Vec::new();
    json::write(&profile, &mut text).expect("written to memory");
    let file = scratch.path("server.json");
    fs::write(&file, text).expect("a file");
    file.to_str().expect("UTF-8").to_string()
}

/// The lines of a table, each with single spaces.
fn lines_of(file: &str, words: &str, columns: &str) -> Vec<String> {
    let mut args = vec!["report", file];
    args.extend(words.split_whitespace());
    let said = stdout(&run(&args, columns));
    said.lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect()
}

#[test]
fn places_are_readable_in_80_columns() {
    let scratch = Scratch::new();
    let file = server_profile(&scratch);
    for (words, expected) in [
        ("", "14.00 ms 60.9 0.0 8.7 14.00 ms Orders.order …/views.py:1234"),
        ("--by function", "2.00 ms 8.7 2.00 ms 8.7 native add _umath.so"),
        ("--by module", "2.00 ms 8.7 2.00 ms 8.7 _umath.so"),
        (
            "--waits",
            "12.00 ms 3.0 4.00 ms read 127.0.0.1:5432 …ders.order (…/views.py:1234)",
        ),
        (
            "--lag",
            "2 140.0 ms 80.00 ms 0.000 s 2 tasks Orders.order (/srv/…/views.py:1236)",
        ),
    ] {
        let lines = lines_of(&file, words, "80");
        assert!(lines.iter().any(|line| line == expected), "{words}: {lines:#?}");
    }
}

#[test]
fn idle_pools_and_tasks_without_names_are_rows() {
    let scratch = Scratch::new();
    let file = server_profile(&scratch);
    for (words, has, has_not) in [
        ("", "[idle: ThreadPoolExecutor]", "_worker"),
        ("", "[task: Orders.order ×3]", "Task-1"),
        ("--by line", "[idle: ThreadPoolExecutor]", "_worker"),
        ("--tree", "[task: Orders.order ×3]", "Task-1"),
        ("--waits", "idle ThreadPoolExecutor", "_worker"),
        ("--idle", "_worker", "[idle: "),
        ("--idle --waits", "_worker", "idle "),
        ("--task-names", "[task: Task-3]", "×3"),
        ("--callers Orders.order", "[task: Orders.order ×3]", "Task-1"),
    ] {
        let text = lines_of(&file, words, "").join("\n");
        assert!(text.contains(has) && !text.contains(has_not), "{words}:\n{text}");
    }
    for (words, names) in [(&[][..], false), (&["--task-names"], true)] {
        let svg = [&["export", &file, "-f", "svg", "-o", "-"], words].concat();
        let svg = stdout(&run(&svg, ""));
        assert_eq!((svg.contains("Task-3"), svg.contains("×3")), (names, !names));
    }
    let full = stdout(&run(&["export", &file, "-f", "collapsed", "-o", "-"], ""));
    assert!(full.contains("[task: Task-3]") && full.contains("_worker"), "{full}");
    let refused = run(&["export", &file, "-f", "collapsed", "-o", "-", "--task-names"], "");
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn errors() {
    let scratch = Scratch::new();
    let dask = scratch.path("dask.json");
    let tree = r#"{"identifier":"root","description":{},"count":3,"children":{"f;a.py;1":
        {"identifier":"f;a.py;1","description":{"name":"f","filename":"a.py","line_number":2,"line":""},"count":3,"children":{}}}}"#;
    fs::write(&dask, tree).expect("a file");
    let dask = dask.to_str().expect("UTF-8");
    let empty = scratch.path("empty.json");
    fs::write(
        &empty,
        r#"{"identifier":"root","description":{},"count":0,"children":{}}"#,
    )
    .expect("a file");
    let empty = empty.to_str().expect("UTF-8");
    let words = ["no value `wall`", "it has samples, cpu", "--value samples"];
    refused(&["report", PROFILE, "--value", "wall"], 1, &words);
    refused(&["diff", PROFILE, PROFILE, "--value", "wall"], 1, &words);
    let svg = scratch.path("out.svg");
    let svg = svg.to_str().expect("UTF-8");
    refused(&["export", PROFILE, "-o", svg, "--value", "wall"], 1, &words);
    let json = scratch.path("out.json");
    let json = json.to_str().expect("UTF-8");
    for option in [&["--lines"][..], &["--value", "cpu"]] {
        let args = [&["export", PROFILE, "-o", json], option].concat();
        refused(&args, 2, &[option[0], "has no effect on format json"]);
    }
    refused(&["report", "/nonexistent"], 1, &["cannot read /nonexistent"]);
    refused(&["report", "/"], 1, &["directory"]);
    refused(&["report", "-"], 1, &["standard input", "empty"]);
    refused(&["report", PROFILE, "a("], 2, &["`a(`", "open group", "'a\\('"]);
    refused(&["report", PROFILE, "1.5"], 2, &["1.5", "fraction"]);
    refused(&["report", PROFILE, "--callers", "nobody"], 1, &["nobody"]);
    refused(&["report", PROFILE, "--source", "nobody"], 1, &["nobody", "--by line"]);
    for command in [
        &["report", PROFILE][..],
        &["diff", PROFILE, PROFILE],
        &["export", PROFILE, "-o", svg],
    ] {
        let args = [command, &["--focus", "dgem"]].concat();
        refused(
            &args,
            1,
            &["no function with samples is called `dgem`", "--focus cblas_dgemm"],
        );
    }
    refused(
        &["report", dask, "--by", "thread"],
        1,
        &["no data about threads", "timeline"],
    );
    refused(&["diff", PROFILE, empty], 1, &["empty.json", "no samples"]);
    refused(
        &["diff", "--normalize", "time", dask, PROFILE],
        1,
        &["rate", "--normalize share"],
    );
    refused(&["diff", "-", "-"], 2, &["standard input given twice"]);
    refused(&["diff", PROFILE, PROFILE, "-o", "x.pdf"], 2, &["x.pdf", ".svg"]);

    // A profile written by Dask is a profile like others, and so is one without samples.
    assert!(
        stdout(&run(&["report", dask, "--by", "function"], ""))
            .contains("3  100.0      3  100.0  Python  f         a.py:1")
    );
    assert!(stdout(&run(&["report", dask, "--by", "line"], "")).contains("a.py [no line]"));
    assert!(stdout(&run(&["report", empty], "")).contains("no rows"));
    assert!(stdout(&run(&["report", empty, "--tree"], "")).contains("no rows"));
    assert!(stdout(&run(&["diff", dask, PROFILE], "")).contains("by the error of sampling alone"));
}

/// Profiles of a busy program of five functions, weighted by their times.
fn profile(scratch: &Scratch, name: &str, weights: &[u64]) -> String {
    profile_of(scratch, name, weights, 1000)
}

/// The same with `rounds` times as many samples as the sum of the weights.
fn profile_of(scratch: &Scratch, name: &str, weights: &[u64], rounds: u64) -> String {
    let mut children = serde_json::Map::new();
    let (mut node, mut order): (Vec<u64>, Vec<u64>) = (Vec::new(), Vec::new());
    for (i, weight) in weights.iter().enumerate() {
        let id = format!("f{i};/srv/a.py;{i}");
        let description =
            serde_json::json!({"name": format!("f{i}"), "filename": "/srv/a.py", "line_number": i, "line": ""});
        let value =
            serde_json::json!({"identifier": id, "description": description, "count": weight * rounds, "children": {}});
        children.insert(id, value);
        order.extend(std::iter::repeat_n(i as u64 + 1, *weight as usize));
    }
    for _ in 0..rounds {
        node.extend(&order);
    }
    let times: Vec<u64> = (0..node.len() as u64).map(|i| i * 1_000_000).collect();
    let ones = vec![1; node.len()];
    let value = serde_json::json!({
        "identifier": "root", "description": {}, "count": node.len(),
        "nativeprof": {"format": 1, "rate": 1000, "duration": node.len() as f64 / 1000.0, "command": "python3 </pre><script>",
            "timeline": {"time": times, "pid": ones, "tid": ones, "node": node}},
        "children": children,
    });
    let path = scratch.path(name);
    fs::write(&path, value.to_string()).expect("a file");
    path.to_str().expect("UTF-8").to_string()
}

#[test]
fn differences() {
    let scratch = Scratch::new();
    let (a, b) = (
        profile(&scratch, "a.json", &[10, 20, 30]),
        profile(&scratch, "b.json", &[10, 23, 30]),
    );
    let hidden = |text: String| text.replace(scratch.directory().to_str().expect("UTF-8"), "DIR");
    let same = stdout(&run(&["diff", &a, &a, "--single-run", "--fail-above", "0"], ""));
    assert!(
        same.contains("no significant change; any change of at least "),
        "{same}"
    );
    check_golden("diff", &hidden(stdout(&run(&["diff", &a, &b, "--all"], ""))));
    check_golden(
        "diff-time",
        &hidden(stdout(&run(&["diff", &a, &b, "--normalize", "time"], ""))),
    );
    let rate = stdout(&run(
        &["diff", &a, &b, "--normalize", "rate", "f1", "--color", "always"],
        "80",
    ));
    assert!(rate.contains("[all]") && rate.contains('\x1b'), "{rate}");
    let said = stdout(&run(
        &["diff", &a, &b, "--json", "--by", "module", "--self", "--all"],
        "",
    ));
    let value: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(value["rows"][0]["name"], "/srv/a.py");

    for (words, code) in [
        ("--fail-above 3", 3),
        ("--fail-above 5", 0),
        ("--normalize time --fail-above 4.9", 3),
    ] {
        let mut args = vec!["diff", &a, &b, "--single-run"];
        args.extend(words.split_whitespace());
        let done = run(&args, "");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(code), "{words}: {said}");
        assert_eq!(said.contains("f1 (/srv/a.py:1) grew by "), code == 3, "{words}: {said}");
    }
    // Too short: it says so, and how long to record, instead of passing.
    let short = profile_of(&scratch, "c.json", &[1, 2, 3], 10);
    let none = profile_of(&scratch, "d.json", &[1, 2], 1);
    for (file, limit, words) in [
        (&short, "2", ["undecided: ", "recordings of about "]),
        (&short, "0.1", ["undecided: ", "minutes instead of"]),
        (&none, "2", ["undecided: ", "too few samples"]),
    ] {
        let done = run(&["diff", file, file, "--single-run", "--fail-above", limit], "");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(4), "{said}");
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    }
    // Decreases do not fail.
    assert!(
        run(&["diff", &b, &a, "f1", "--single-run", "--fail-above", "3"], "")
            .status
            .success()
    );
    // One run of each side decides only on request.
    let done = run(&["diff", &a, &b, "--fail-above", "3"], "");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(4), "{said}");
    assert!(
        said.contains("--before A1 A2 A3 --after B1 B2 B3") && said.contains("--single-run"),
        "{said}"
    );
    let table = String::from_utf8_lossy(&done.stdout);
    assert!(table.contains("+3.17"), "the table is printed all the same: {table}");
}

#[test]
fn differential_flame_graphs() {
    let scratch = Scratch::new();
    let (a, b) = (
        profile(&scratch, "a.json", &[10, 20, 30]),
        profile(&scratch, "b.json", &[10, 23, 30, 1]),
    );
    let out = scratch.path("diff.svg");
    stdout(&run(&["diff", &a, &b, "-o", out.to_str().expect("UTF-8")], ""));
    let svg = fs::read_to_string(&out).expect("a flame graph");
    for part in [
        "f1 (/srv/a.py:1) [33.33 % before, 35.94 % after]",
        "f3 (/srv/a.py:3) [0.00 % before, 1.56 % after]",
        "no significant change",
    ] {
        assert!(svg.contains(part), "{part}\n{svg}");
    }
    let page = stdout(&run(&["diff", &a, &b, "-f", "html", "-o", "-"], ""));
    assert!(page.starts_with("<!doctype html>"), "{page}");
    assert!(!page.contains("</pre><script>"), "a name became part of the page");
    let text = packed(&page);
    for part in [
        r#""comparison":{"normalize":"share","self":false,"confidence":99,"before":"a.json","after":"b.json""#,
        r#""values":[{"name":"mean of both","#,
        r#""name":["all","f"#,
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
}

/// Flame graphs of changes leave out what the view leaves out.
#[test]
fn views_of_differential_flame_graphs() {
    let scratch = Scratch::new();
    let function = |name: &str, file: &str, count: u64, child: Option<serde_json::Value>| {
        let description = serde_json::json!({"name": name, "filename": file, "line_number": 1, "line": ""});
        let id = |value: &serde_json::Value| value["identifier"].as_str().expect("text").to_string();
        let children: serde_json::Map<_, _> = child.into_iter().map(|child| (id(&child), child)).collect();
        let id = format!("{name};{file};1");
        serde_json::json!({"identifier": id, "description": description, "count": count, "children": children})
    };
    let write = |name: &str, count: u64| {
        let own = function("own", "/srv/a.py", count, None);
        let library = function(
            "library",
            "/usr/lib/python3.11/site-packages/lib/x.py",
            count + 10,
            Some(own),
        );
        let standard = function(
            "standard",
            "/usr/lib/python3.11/json/encoder.py",
            count + 20,
            Some(library),
        );
        let main = function("main", "/srv/a.py", count + 30, Some(standard));
        let mut root = function("root", "", count + 30, Some(main));
        root["identifier"] = "root".into();
        let path = scratch.path(name);
        fs::write(&path, root.to_string()).expect("written");
        path.to_str().expect("UTF-8").to_string()
    };
    let (a, b) = (write("a.json", 100), write("b.json", 200));
    for (words, expected) in [
        (&[][..], [true, true, true, true]),
        (&["--hide-stdlib"], [true, false, true, true]),
        (&["--hide-libraries"], [true, true, false, true]),
        (&["--hide-stdlib", "--hide-libraries"], [true, false, false, true]),
        (&["--focus", "library"], [false, false, true, true]),
    ] {
        for format in ["svg", "html"] {
            let flame_graph = stdout(&run(&[&["diff", &a, &b, "-f", format, "-o", "-"], words].concat(), ""));
            let (flame_graph, before, after) = match format {
                "svg" => (flame_graph, ">", " ("),
                _ => (packed(&flame_graph), "\"", "\""),
            };
            let shown = ["main", "standard", "library", "own"];
            let shown = shown.map(|name| flame_graph.contains(&format!("{before}{name}{after}")));
            assert_eq!(shown, expected, "{words:?} {format}");
        }
    }
}

/// Images and text of a selected value, and of lines.
#[test]
fn values_and_lines_are_exported() {
    let export = |words: &[&str]| {
        let args = [&["export", PROFILE, "-o", "-"], words].concat();
        stdout(&run(&args, ""))
    };
    let total = |text: &str| -> u64 {
        let counts = text
            .lines()
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
        counts.sum()
    };
    let (samples, cpu) = (
        export(&["-f", "collapsed"]),
        export(&["-f", "collapsed", "--value", "cpu"]),
    );
    assert_eq!(total(&cpu), total(&samples) * 10_101_010);
    assert!(export(&["-f", "svg", "--value", "cpu_ns"]).contains("4.11 s cpu"));
    let lines = export(&["-f", "collapsed", "--lines"]);
    assert!(
        lines.contains("Solver.run (/srv/app/solver.py:40) 6\n") && !samples.contains("solver.py:40)"),
        "{lines}"
    );
    assert_eq!(total(&lines), total(&samples));
    // The value compared by default, samples, is equivalent to CPU time.
    let diff = |words: &[&str]| {
        let args = [&["diff", PROFILE, PROFILE, "--all", "--json"], words].concat();
        let value: serde_json::Value = serde_json::from_str(&stdout(&run(&args, ""))).expect("JSON");
        let rows = value["rows"].as_array().expect("rows").iter();
        rows.map(|row| (row["name"].clone(), row["before"].clone(), row["interval"].clone()))
            .collect::<Vec<_>>()
    };
    let (samples, cpu) = (diff(&[]), diff(&["--value", "cpu"]));
    assert_eq!(samples.len(), cpu.len());
    let part = |value: &serde_json::Value| value.as_f64().unwrap_or(f64::NAN);
    for (a, b) in samples.iter().zip(&cpu) {
        assert_eq!(a.0, b.0);
        assert!((part(&a.1) - part(&b.1)).abs() < 1e-9, "{a:?} {b:?}");
        assert!(a.2.is_null() == b.2.is_null(), "{a:?} {b:?}");
        if let (Some(a), Some(b)) = (a.2.as_array(), b.2.as_array()) {
            assert!((part(&a[1]) - part(&b[1])).abs() < 1e-6, "{a:?} {b:?}");
        }
    }
}

/// Each part has other rows, and what it says of the profile is the same.
#[test]
fn json_is_printed_in_parts() {
    let rows = |value: &Value, words: &[&str]| {
        let (list, inner) = match words {
            ["report", _, "--callers", ..] => ("callers", Some("calls")),
            ["report", _, "--tree", ..] => ("tree", None),
            _ => ("rows", None),
        };
        let list = value[list].as_array().expect("a list").clone();
        match inner {
            None => list,
            Some(inner) => list
                .iter()
                .flat_map(|group| group[inner].as_array().expect("rows").clone())
                .collect(),
        }
    };
    let about = |value: &Value| {
        [
            "samples",
            "quality",
            "duration",
            "all",
            "tested",
            "significant",
            "total_rows",
        ]
        .map(|key| value[key].clone())
    };
    for words in [
        &["report", PROFILE][..],
        &["report", PROFILE, "--by", "line"],
        &["report", PROFILE, "--tree"],
        &["report", PROFILE, "--callers", "."],
        &["diff", PROFILE, PROFILE, "--all"],
    ] {
        let json = |more: &[&str]| -> Value {
            let done = run(&[words, &["--json"], more].concat(), "");
            serde_json::from_str(&stdout(&done)).expect("JSON")
        };
        let whole = json(&[]);
        let all = rows(&whole, words);
        assert_eq!(whole["total_rows"], all.len(), "{words:?}");
        assert!(all.len() > 3 && whole["next_cursor"].is_null(), "{words:?}: {whole:#}");
        let (mut parts, mut cursor) = (Vec::new(), String::from("0"));
        loop {
            let part = json(&["--limit", "2", "--cursor", &cursor]);
            let here = rows(&part, words);
            assert_eq!(part["shown"], here.len());
            assert_eq!(about(&part), about(&whole), "{words:?}");
            parts.extend(here);
            match part["next_cursor"].as_str() {
                Some(next) => cursor = next.into(),
                None => break,
            }
        }
        assert!(parts == all, "{words:?}");
    }
    for words in [
        &["--limit", "2"][..],
        &["--json", "--limit", "0"],
        &["--json", "--cursor", "x"],
    ] {
        let done = run(&[&["report", PROFILE], words].concat(), "");
        assert_eq!(done.status.code(), Some(2), "{words:?}");
    }
}

#[test]
fn functions_are_found_by_their_identifiers() {
    let json = |words: &[&str]| -> Value {
        serde_json::from_str(&stdout(&run(&[&["report", PROFILE, "--json"], words].concat(), ""))).expect("JSON")
    };
    let mut found = 0;
    for row in json(&["--by", "function"])["rows"].as_array().expect("rows") {
        let id = row["id"].as_str().expect("an identifier");
        for (option, list) in [("--callers", "callers"), ("--callees", "callees")] {
            let groups = json(&[option, id]);
            let groups = groups[list].as_array().expect("a list").clone();
            found += groups.len();
            assert!(
                groups
                    .iter()
                    .all(|group| group["id"] == id && group["name"] == row["name"])
            );
        }
    }
    assert!(found > 10, "{found}");
    let python = json(&[])["rows"][1].clone();
    let id = python["id"].as_str().expect("an identifier");
    let lines = json(&["--source", id]);
    assert_eq!(
        lines["source"],
        json(&["--source", python["name"].as_str().expect("a name")])["source"]
    );
    let done = run(&["report", PROFILE, "--callers", "id:000000000000"], "");
    assert!(!done.status.success());
}
