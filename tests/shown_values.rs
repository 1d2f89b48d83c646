//! Which value of a profile the commands show, and of which time.

use std::fs;
use std::process::{Output, Stdio};

use common::{Scratch, nativeprof, packed};
use nativeprof::export::by_name;
use nativeprof::profile::build::Builder;
use nativeprof::profile::measure::{Clock, Measure};
use nativeprof::profile::model::{Frame, FrameKind, Meta, Profile};
use nativeprof::profile::values::{Unit, ValueType};
use serde_json::Value;

mod common;

const MS: u64 = 1_000_000;
const GOLDEN: &str = "fixtures/golden/profile.json";

fn run(words: &[&str]) -> Output {
    let mut command = nativeprof(words);
    command.current_dir(env!("CARGO_MANIFEST_DIR")).env_remove("COLUMNS");
    command.stdin(Stdio::null()).output().expect("nativeprof starts")
}

#[track_caller]
fn stdout(words: &[&str]) -> String {
    let done = run(words);
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{words:?}: {said}");
    String::from_utf8(done.stdout).expect("UTF-8")
}

#[track_caller]
fn json(words: &[&str]) -> Value {
    serde_json::from_str(&stdout(words)).expect("JSON")
}

#[track_caller]
fn refused(words: &[&str], code: i32, parts: &[&str]) {
    let done = run(words);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(code), "{words:?}: {said}");
    for part in parts.iter().chain(&["\n  why: ", "\n  try: "]) {
        assert!(said.contains(part), "{words:?}: `{part}` is not in:\n{said}");
    }
}

/// Writes a profile in a format; returns the path.
fn written(scratch: &Scratch, name: &str, format: &str, profile: &Profile) -> String {
    let mut out = Vec::new();
    (by_name(format).expect("a format").write)(profile, &mut out).expect("memory takes it");
    let path = scratch.path(name);
    fs::write(&path, out).expect("a file");
    path.to_str().expect("UTF-8").to_string()
}

/// Calls of two functions by a third, where one takes so many times longer than the other.
fn traced(times: u64) -> Profile {
    let mut builder = Builder::new(&[ValueType::CALLS, ValueType::WALL]);
    let python = |name: &str, line| Frame::python(name, "", "/srv/app.py", line);
    let main = builder.frame(python("main", 9));
    let work = builder.frame(python("work", 1));
    let other = builder.frame(python("other", 5));
    let len = builder.frame(Frame::native("<built-in method builtins.len>", "[builtin]", 0));
    builder.add(&[(main, 0)], &[1, MS]);
    builder.add(&[(main, 0), (work, 0)], &[50, times * 60 * MS]);
    builder.add(&[(main, 0), (other, 0)], &[50, 56 * MS]);
    builder.add(&[(main, 0), (other, 0), (len, 0)], &[3000, 3 * MS]);
    builder.finish(Meta::default())
}

/// A thread that runs for 10 ms and then sleeps up to 100 ms, twice.
fn waiting() -> Profile {
    let types = [ValueType::SAMPLES, ValueType::WALL, ValueType::CPU, ValueType::OFF_CPU];
    let mut builder = Builder::new(&types);
    let run = builder.frame(Frame::python("run", "", "/srv/app.py", 1));
    let sleep = builder.frame(Frame::new(FrameKind::State, "[waiting: sleep]"));
    for begin in [0, 100] {
        builder.sample((begin + 10) * MS, (7, 7), &[(run, 2)], &[1, 10 * MS, 10 * MS, 0]);
        let waited = [9, 90 * MS, 0, 90 * MS];
        builder.sample((begin + 100) * MS, (7, 7), &[(run, 3), (sleep, 0)], &waited);
    }
    let mut profile = builder.finish(Meta {
        duration: 0.2,
        rate: 100,
        event: "cpu-clock".into(),
        ..Meta::default()
    });
    profile.waits.lengths = vec![0, 90 * MS, 0, 90 * MS];
    profile
}

/// Samples of CPU time, one each 10 ms.
fn sampled(samples: u64) -> Profile {
    let mut builder = Builder::new(&[ValueType::SAMPLES]);
    let run = builder.frame(Frame::python("run", "", "/srv/app.py", 1));
    for at in 1..=samples {
        builder.sample(at * 10 * MS, (7, 7), &[(run, 2)], &[1]);
    }
    let mut profile = builder.finish(Meta {
        duration: samples as f64 / 100.0,
        rate: 100,
        event: "cpu-clock".into(),
        ..Meta::default()
    });
    profile.values = Measure::period(Clock::Cpu, 100).values();
    profile
}

#[test]
fn traced_calls_are_shown_by_their_time() {
    let scratch = Scratch::new();
    let profile = traced(1);
    for (name, format) in [("calls.json", "json"), ("calls.pstats", "pstats")] {
        let file = &*written(&scratch, name, format, &profile);
        let said = stdout(&["report", file]);
        assert!(said.contains("\n120.0 ms wall\n"), "{said}");
        let rows = said
            .lines()
            .map(|row| row.split_whitespace().collect::<Vec<_>>().join(" "));
        let rows: Vec<String> = rows.skip_while(|row| !row.starts_with("CALLS")).collect();
        assert!(
            rows[0].starts_with("CALLS SELF TIME % ") && rows[0].contains("TOTAL TIME"),
            "{said}"
        );
        assert!(
            rows[1].starts_with("50 60.00 ms 50.0 ") && rows[1].contains(" work "),
            "{said}"
        );
        // Of its calls none are those of the function that it calls.
        assert!(
            rows[2].starts_with("50 59.00 ms 49.2 ") && rows[2].contains(" other "),
            "{said}"
        );
        for words in [
            &["--by", "function"][..],
            &["--by", "module"],
            &["--by", "line"],
            &["--by", "category"],
            &["--callers", "work"],
            &["--callees", "main"],
            &["--tree"],
        ] {
            let said = stdout(&[&["report", file], words].concat());
            assert!(
                said.contains("SELF TIME") && said.contains("TOTAL TIME"),
                "{words:?}: {said}"
            );
            let value = json(&[&["report", file, "--json"], words].concat());
            assert_eq!(
                (&value["value"], &value["samples"]),
                (&"wall_ns".into(), &(120 * MS).into()),
                "{words:?}"
            );
        }
        let calls = stdout(&["report", file, "--value", "calls"]);
        assert!(calls.contains("3101 calls") && calls.contains("SELF CALLS"), "{calls}");

        let collapsed = stdout(&["export", file, "-f", "collapsed", "-o", "-"]);
        assert!(
            collapsed.contains("main (/srv/app.py:9);work (/srv/app.py:1) 60000000\n"),
            "{collapsed}"
        );
        assert!(stdout(&["export", file, "-f", "svg", "-o", "-"]).contains("120.0 ms wall"));
        let page = packed(&stdout(&["export", file, "-f", "html", "-o", "-"]));
        assert!(
            page.contains(r#""values":[{"name":"wall","unit":"nanoseconds","weighted":true},{"name":"calls""#),
            "{page}"
        );
        let speedscope = json(&["export", file, "-f", "speedscope", "-o", "-"]);
        let first = &speedscope["profiles"][0];
        assert_eq!(
            (&first["unit"], &first["endValue"]),
            (&"nanoseconds".into(), &(120 * MS).into())
        );
        let firefox = json(&["export", file, "-f", "firefox", "-o", "-"]);
        assert_eq!(firefox["threads"][0]["samples"]["weightType"], "tracing-ms");
        // What nativeprof and Dask read again counts calls.
        assert_eq!(json(&["export", file, "-f", "json", "-o", "-"])["count"], 3101);
    }
}

/// Of exact calls with sampled times the functions' times have intervals.
#[test]
fn sampled_times_of_counted_calls_have_intervals() {
    let scratch = Scratch::new();
    for (name, time) in [("cpu.json", ValueType::CPU), ("wall.json", ValueType::WALL)] {
        let mut builder = Builder::new(&[ValueType::SAMPLES, time, ValueType::CALLS]);
        let work = builder.frame(Frame::python("work", "", "/srv/app.py", 1));
        for at in 1..=40 {
            builder.sample(at * 10 * MS, (7, 7), &[(work, 2)], &[1, 10 * MS, 0]);
        }
        builder.add(&[(work, 0)], &[0, 0, 5]);
        let file = &*written(&scratch, name, "json", &builder.finish(Meta::default()));
        let said = stdout(&["report", file]);
        let row = said.lines().find(|row| row.contains("work")).expect("a row");
        assert!(
            said.contains("CALLS  SELF %  SELF TIME") && said.contains("95 % INTERVAL"),
            "{said}"
        );
        assert_eq!(
            row.split_whitespace().take(4).collect::<Vec<_>>(),
            ["5", "100.0", "400.0", "ms"],
            "{said}"
        );
    }
}

#[test]
fn traced_calls_are_compared_by_their_time() {
    let scratch = Scratch::new();
    let [a, b] =
        [("a.pstats", 1), ("b.pstats", 3)].map(|(name, times)| written(&scratch, name, "pstats", &traced(times)));
    let found = json(&["diff", &a, &b, "--json"]);
    assert_eq!(
        (&found["value"], &found["unit"]),
        (&"wall_ns".into(), &"wall seconds".into())
    );
    let changes: Vec<(&str, f64)> = found["rows"]
        .as_array()
        .expect("rows")
        .iter()
        .map(|row| {
            (
                row["name"].as_str().expect("text"),
                row["change"].as_f64().expect("a number"),
            )
        })
        .collect();
    for (name, change) in &changes {
        assert!(
            ["main", "work"].contains(name) && (change - 0.12).abs() < 1e-3,
            "{changes:?}"
        );
    }
    assert_eq!(changes.len(), 2, "{changes:?}");
    let said = stdout(&["diff", &a, &b, "--normalize", "share"]);
    assert!(
        said.contains("all wall time, in percent") && said.contains("3101 calls"),
        "{said}"
    );
    refused(
        &["diff", &a, &b, "--value", "calls", "--normalize", "rate"],
        2,
        &["calls are compared as numbers", "--value wall"],
    );
}

#[test]
fn different_values_are_not_compared() {
    let scratch = Scratch::new();
    let calls = written(&scratch, "calls.json", "json", &traced(1));
    let cpu = written(&scratch, "cpu.json", "json", &sampled(100));
    let wall = written(&scratch, "wall.json", "json", &waiting());
    refused(
        &["diff", &cpu, &wall],
        1,
        &[
            "one of samples (cpu-clock), the second one of wall",
            "cpu.json has samples and cpu, ",
            "wall.json has samples, wall, cpu and off_cpu; both have samples and cpu",
            "--value cpu",
        ],
    );
    stdout(&["diff", &cpu, &wall, "--value", "cpu"]);
    refused(
        &["diff", &cpu, &calls],
        1,
        &["both have none of these", "record both in the same way"],
    );
    let found = json(&["diff", &calls, &wall, "--json"]);
    assert_eq!(found["value"], "wall_ns");
    let mut faults = sampled(100);
    faults.meta.event = "page-faults".into();
    faults.values = Measure::Event.values();
    let faults = written(&scratch, "faults.json", "json", &faults);
    refused(
        &["diff", &cpu, &faults],
        1,
        &["samples (cpu-clock)", "samples (page-faults)", "--value samples"],
    );
    stdout(&["diff", &cpu, &faults, "--value", "samples"]);
}

#[test]
fn waiting_time_is_shown_in_seconds() {
    let scratch = Scratch::new();
    let file = &*written(&scratch, "wall.json", "json", &waiting());
    let said = stdout(&["report", file]);
    assert!(
        said.contains("200.0 ms wall in 0.2 s") && said.contains("SELF TIME"),
        "{said}"
    );
    assert!(stdout(&["report", file, "--waits"]).contains("180.0 ms"));
    let lines = stdout(&["report", file, "--by", "line"]);
    assert!(lines.contains("180.0 ms") && lines.contains("/srv/app.py:3"), "{lines}");
    let threads = stdout(&["report", file, "--by", "thread"]);
    assert!(
        threads.contains("WALL") && threads.contains("200.0 ms  100.0"),
        "{threads}"
    );
    assert!(stdout(&["export", file, "-f", "svg", "-o", "-"]).contains("200.0 ms wall"));
    let page = packed(&stdout(&["export", file, "-f", "html", "-o", "-"]));
    assert!(
        page.contains(r#""values":[{"name":"wall""#) && page.contains(r#""waits":{"value":0"#),
        "{page}"
    );
    let page = packed(&stdout(&["export", file, "-f", "html", "-o", "-", "--value", "cpu"]));
    assert!(page.contains(r#""values":[{"name":"cpu""#), "{page}");
    // CPU time is that of so many samples: it stays with these.
    let file = &*written(&scratch, "cpu.json", "json", &sampled(100));
    assert!(stdout(&["report", file]).contains("100 samples in 1.0 s"));
}

/// The threads of a file for speedscope: start and end of each, and its stacks' times on the axis.
#[test]
fn threads_have_one_time_axis() {
    let scratch = Scratch::new();
    let mut profile = sampled(20);
    profile
        .timeline
        .iter_mut()
        .for_each(|sample| sample.tid += u32::from(sample.time > 100 * MS));
    profile.meta.duration = 0.25;
    let file = &*written(&scratch, "threads.json", "json", &profile);
    let found = json(&["export", file, "-f", "speedscope", "-o", "-"]);
    let threads = &found["profiles"].as_array().expect("a list")[1..];
    let axes: Vec<_> = threads
        .iter()
        .map(|thread| {
            let number = |value: &Value| value.as_u64().expect("a number") / MS;
            let weights: Vec<u64> = thread["weights"]
                .as_array()
                .expect("a list")
                .iter()
                .map(number)
                .collect();
            (number(&thread["startValue"]), number(&thread["endValue"]), weights)
        })
        .collect();
    assert_eq!(axes, [(0, 250, vec![100, 150]), (0, 250, vec![100, 100, 50])]);
    let firefox = json(&["export", file, "-f", "firefox", "-o", "-"]);
    let times: Vec<f64> = firefox["threads"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|thread| thread["samples"]["time"][0].as_f64().expect("a time"))
        .collect();
    assert_eq!(times, [10.0, 110.0]);
}

#[test]
fn files_for_viewers_can_be_folded() {
    let total = |file: &Value| -> u64 {
        let weights = file["profiles"][0]["weights"].as_array().expect("a list").iter();
        weights.map(|weight| weight.as_u64().expect("a number")).sum()
    };
    for format in ["speedscope", "firefox", "pprof", "chrome"] {
        let export = |words: &[&str]| run(&[&["export", GOLDEN, "-f", format, "-o", "-"], words].concat()).stdout;
        let (whole, folded) = (export(&[]), export(&["--fold"]));
        if format == "pprof" {
            assert!(folded.len() < whole.len(), "{format}");
            continue;
        }
        let [whole, folded] = [whole, folded].map(|text| String::from_utf8(text).expect("text"));
        assert!(
            whole.contains("_PyEval_EvalFrameDefault") && !folded.contains("_PyEval_EvalFrameDefault"),
            "{format}"
        );
        assert!(folded.contains("cblas_dgemm"), "{format}");
        if format == "speedscope" {
            let [whole, folded] = [whole, folded].map(|text| serde_json::from_str(&text).expect("JSON"));
            assert_eq!(total(&whole), total(&folded));
        }
    }
    refused(
        &["export", GOLDEN, "-f", "json", "-o", "-", "--fold"],
        2,
        &["--fold has no effect on format json"],
    );
}

#[test]
fn a_part_of_the_time_can_be_shown() {
    let scratch = Scratch::new();
    let file = &*written(&scratch, "wall.json", "json", &waiting());
    for (range, wall, duration) in [
        (&["--from", "50ms"][..], 150, 0.15),
        (&["--to", "0.05"], 50, 0.05),
        (&["--from", "50ms", "--to", "0.15s"], 100, 0.1),
        (&["--from", "0", "--to", "200ms"], 200, 0.2),
    ] {
        let value = json(&[&["report", file, "--json", "--by", "function"], range].concat());
        assert_eq!(
            (&value["samples"], &value["duration"]),
            (&(wall * MS).into(), &duration.into()),
            "{range:?}"
        );
        let rows = value["rows"].as_array().expect("rows").iter();
        let own: u64 = rows.map(|row| row["self"].as_u64().expect("a number")).sum();
        assert_eq!(own, wall * MS, "{range:?}");
        let svg = stdout(&[&["export", file, "-f", "svg", "-o", "-"], range].concat());
        assert!(svg.contains(&Unit::Nanoseconds.show(wall * MS)), "{range:?}");
        let text = stdout(&[&["export", file, "-f", "json", "-o", "-"], range].concat());
        let tree: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(tree["values"]["wall_ns"], wall * MS, "{range:?}");
        assert_eq!(tree["nativeprof"]["quality"]["taken"], 0);
    }
    let found = json(&["diff", file, file, "--from", "0", "--to", "100ms", "--json", "--all"]);
    assert_eq!(found["samples"], serde_json::json!([100 * MS, 100 * MS]));

    let calls = &*written(&scratch, "calls.pstats", "pstats", &traced(1));
    for command in [
        &["report"][..],
        &["export", "-f", "svg", "-o", "-"],
        &["export", "-f", "html", "-o", "-"],
        &["diff", file],
    ] {
        let with = |words: &[&'static str], file: &str, code, parts: &[&str]| {
            refused(&[command, &[file], words].concat(), code, parts)
        };
        with(
            &["--from", "10ms"],
            calls,
            1,
            &["no times to choose from", "no timeline", "omit --from"],
        );
        with(
            &["--from", "60s"],
            file,
            1,
            &["--from 60.00 s is not within", "ends after 200.0 ms"],
        );
        with(
            &["--to", "60s"],
            file,
            1,
            &["--to 60.00 s is not within", "up to 200.0 ms"],
        );
        with(&["--from", "2s", "--to", "1s"], file, 2, &["no time is between"]);
    }
}

/// Amounts of files are not trusted: their sums stay the largest number there is.
#[test]
fn times_of_any_size_are_shown() {
    let scratch = Scratch::new();
    let node = |name: &str, children: Vec<Value>| -> Value {
        let below = children
            .into_iter()
            .map(|child| (child["identifier"].as_str().expect("text").to_string(), child));
        serde_json::json!({
            "identifier": format!("{name};/srv/app.py;1"),
            "description": {"name": name, "filename": "/srv/app.py", "line_number": 2, "line": ""},
            "count": 3, "lines": {"2": 3}, "values": {"wall_ns": u64::MAX},
            "children": below.collect::<serde_json::Map<_, _>>(),
        })
    };
    let own = || node("own", Vec::new());
    let mut root = node(
        "root",
        vec![node("main", vec![own(), node("other", vec![own()])]), own()],
    );
    root["identifier"] = "root".into();
    root["nativeprof"] = serde_json::json!({
        "format": 1, "duration": 1.0,
        "value_types": [{"name": "calls", "unit": "count"}, {"name": "wall", "unit": "nanoseconds"}],
    });
    let path = scratch.path("large.json");
    fs::write(&path, root.to_string()).expect("a file");
    let file = path.to_str().expect("UTF-8");
    for words in [
        &[][..],
        &["--by", "function"],
        &["--by", "line"],
        &["--by", "module"],
        &["--by", "category"],
        &["--callers", "own"],
        &["--tree"],
    ] {
        assert!(
            stdout(&[&["report", file], words].concat()).contains("18446744073.7 s"),
            "{words:?}"
        );
    }
    for format in [
        "html",
        "svg",
        "speedscope",
        "firefox",
        "chrome",
        "pprof",
        "perfetto",
        "pstats",
        "json",
    ] {
        let done = run(&["export", file, "-f", format, "-o", "-", "--interpreter-frames"]);
        assert!(done.status.success() && !done.stdout.is_empty(), "{format}");
    }
    for normalize in ["share", "rate", "time"] {
        for output in [&["--json"][..], &["-f", "svg", "-o", "-"], &["-f", "html", "-o", "-"]] {
            stdout(&[&["diff", file, file, "--normalize", normalize], output].concat());
        }
    }
}
