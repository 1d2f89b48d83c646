//! `diff` of several runs of each side, of exact numbers, and of labels; what it prints for CI systems.

use std::fs;
use std::process::{Output, Stdio};

use common::{Scratch, nativeprof, packed};
use nativeprof::profile::build::Builder;
use nativeprof::profile::json;
use nativeprof::profile::labels::Labels;
use nativeprof::profile::measure::{Clock, Measure};
use nativeprof::profile::model::{Frame, Meta, Profile};
use nativeprof::profile::values::ValueType;
use serde_json::Value;

mod common;
#[path = "diff/machines.rs"]
mod machines;
#[path = "diff/outputs.rs"]
mod outputs;

/// The exit code, and both outputs together.
#[track_caller]
fn run(words: &[&str], code: i32) -> String {
    let mut command = nativeprof(words);
    let done: Output = command
        .env_remove("COLUMNS")
        .stdin(Stdio::null())
        .output()
        .expect("nativeprof starts");
    let said = [done.stdout, done.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert_eq!(done.status.code(), Some(code), "{words:?}: {said}");
    said
}

#[track_caller]
fn json_of(words: &[&str]) -> Value {
    serde_json::from_str(&run(&[words, &["--json", "--all"]].concat(), 0)).expect("JSON")
}

fn written(scratch: &Scratch, name: &str, profile: &Profile) -> String {
    let mut out = Vec::new();
    json::write(profile, &mut out).expect("memory takes it");
    let path = scratch.path(name);
    fs::create_dir_all(path.parent().expect("a directory")).expect("the directory");
    fs::write(&path, out).expect("a file");
    path.to_str().expect("UTF-8").to_string()
}

/// Samples of functions of `main`, one each ms, the functions by turns. `start` in seconds.
fn sampled(counts: &[(&str, u64)], start: f64) -> Profile {
    let mut builder = Builder::new(&[ValueType::SAMPLES]);
    let main = builder.frame(Frame::python("main", "", "/srv/app.py", 1));
    let mut time = 0;
    for (name, count) in counts {
        let function = builder.frame(Frame::python(*name, "", "/srv/app.py", 9));
        for _ in 0..*count {
            time += 1_000_000;
            builder.sample(time, (7, 7), &[(main, 2), (function, 9)], &[1]);
        }
    }
    let mut profile = builder.finish(Meta {
        command: "python3 app.py".into(),
        duration: time as f64 / 1e9,
        rate: 1000,
        start,
        ..Meta::default()
    });
    profile.values = Measure::period(Clock::Cpu, 1000).values();
    profile
}

/// Six runs of each side in alternation, with a tenth more or less of each function; `work` takes so much longer after.
fn runs(scratch: &Scratch, slower: u64) -> [Vec<String>; 2] {
    let noise = [100, 96, 103, 99, 101, 98];
    [0, 1].map(|side| {
        let run = |at: usize| {
            let work = 10 * noise[at] * if side == 1 { slower } else { 100 } / 100;
            let other = 10 * noise[(at * 5 + side * 3 + 2) % 6];
            let start = 1000.0 + 10.0 * (2 * at + side) as f64;
            let name = format!("{}{slower}/{at}.json", ["before", "after"][side]);
            written(scratch, &name, &sampled(&[("work", work), ("other", other)], start))
        };
        (0..6).map(run).collect()
    })
}

fn sides(runs: &[Vec<String>; 2]) -> Vec<&str> {
    let [before, after] = runs.each_ref().map(|runs| runs.iter().map(String::as_str));
    ["diff", "--before"]
        .into_iter()
        .chain(before)
        .chain(["--after"])
        .chain(after)
        .collect()
}

#[test]
fn runs_decide_by_their_spread() {
    let scratch = Scratch::new();
    let (same, slower) = (runs(&scratch, 100), runs(&scratch, 130));
    let with = |runs, words: &[&'static str]| [&sides(runs)[..], words].concat();
    let said = run(&with(&slower, &["--normalize", "time", "--fail-above", "5"]), 3);
    for part in [
        "before: 6 runs, ",
        "6 and 6 runs: whether more runs would differ likewise, by the spread between pairs of runs, which alternate",
        "they can show a change of ",
        "work (/srv/app.py:9) grew by ",
        "all CPU time grew by ",
    ] {
        assert!(said.contains(part), "`{part}` is not in:\n{said}");
    }
    assert!(!said.contains("other (/srv/app.py:9) grew"), "{said}");
    let said = run(&with(&same, &["--normalize", "time", "--fail-above", "10"]), 0);
    assert!(said.contains("no significant change"), "{said}");
    let said = run(&with(&same, &["--normalize", "time", "--fail-above", "0.1"]), 4);
    assert!(said.contains(" runs of each side instead of 6 and 6"), "{said}");
    // The exit code in words, and why.
    for (runs, limit, code, verdict, why) in [
        (&slower, "5", 3, "grown", "all CPU time grew by "),
        (&same, "10", 0, "passed", ""),
        (&same, "0.1", 4, "undecided", "undecided: "),
    ] {
        let words = with(runs, &["--normalize", "time", "--json", "--fail-above"]);
        let output = nativeprof(&[&words[..], &[limit]].concat()).output();
        let output = output.expect("nativeprof starts");
        assert_eq!(output.status.code(), Some(code));
        let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let limit = format!("{limit} %");
        assert_eq!((&found["verdict"], &found["limit"]), (&verdict.into(), &limit.into()));
        let first = found["reasons"][0].as_str().unwrap_or_default();
        assert!(first.starts_with(why), "{first}");
    }

    // A directory is all of its files; what else is given are filters.
    let [before, after] = slower.each_ref().map(|files| {
        let path = std::path::Path::new(&files[0]).parent().expect("a directory");
        path.to_str().expect("UTF-8").to_string()
    });
    let found = json_of(&["diff", "work", "--before", &before, "--after", &after]);
    assert_eq!((&found["question"], &found["paired"]), (&"runs".into(), &true.into()));
    assert!(found["verdict"].is_null() && found["limit"].is_null(), "{found}");
    assert_eq!(found["files"][0].as_array().map(Vec::len), Some(6));
    assert_eq!(found["rows"].as_array().map(Vec::len), Some(1), "{found}");
    assert_eq!(
        (&found["rows"][0]["name"], &found["rows"][0]["significant"]),
        (&"work".into(), &true.into())
    );
    // One run of one side does for a spread that the other side has.
    let words = [
        &["diff", "--normalize", "time", "--before"],
        &sides(&slower)[2..8],
        &["--after", &slower[1][0]],
    ]
    .concat();
    let said = run(&words, 0);
    assert!(
        said.contains("6 and 1 runs") && said.contains("by the spread between runs"),
        "{said}"
    );
    // The page has the sums.
    let page = run(&with(&slower, &["-f", "html", "-o", "-"]), 0);
    assert!(
        packed(&page).contains(r#""before":"6 runs","after":"6 runs""#),
        "its title"
    );
}

#[test]
fn runs_that_are_none() {
    let scratch = Scratch::new();
    let a = &*written(&scratch, "a.json", &sampled(&[("work", 50)], 1.0));
    let b = &*written(&scratch, "b.json", &sampled(&[("work", 50)], 2.0));
    let empty = &*written(&scratch, "empty.json", &sampled(&[], 3.0));
    let directory = scratch.path("none");
    fs::create_dir(&directory).expect("a directory");
    let directory = directory.to_str().expect("UTF-8");
    let mut other = sampled(&[("work", 50)], 4.0);
    other.meta.command = "python3 other.py".into();
    let other = &*written(&scratch, "other.json", &other);
    for (words, code, parts) in [
        (
            &["--before", a, a, "--after", b][..],
            2,
            &["a.json is given twice", "no spread"][..],
        ),
        (&["--before", a, "--after", a], 2, &["a.json is given twice"]),
        (&["--before", a, "--after", b, empty], 1, &["empty.json", "no samples"]),
        (&["--before", directory, "--after", b], 2, &["none has no files"]),
        (&["--before", a], 2, &["--after"]),
        (&["--before", a, "--after", b, "--single-run"], 2, &["--single-run"]),
        (
            &["--before", a, "/nonexistent", "--after", b],
            1,
            &["cannot read /nonexistent"],
        ),
        (
            &["--before", a, other, "--after", b],
            0,
            &["the older runs are of 2 different commands"],
        ),
    ] {
        let said = run(&[&["diff"], words].concat(), code);
        for part in parts {
            assert!(said.contains(part), "{words:?}: `{part}` is not in:\n{said}");
        }
    }
    // One run of each side is one recording of each side, however it is given.
    assert!(run(&["diff", "--before", a, "--after", b], 0).contains("one run of each side"));
}

/// Numbers of calls of functions, each called by `main`.
fn calls(counts: &[(&str, u64)]) -> Profile {
    let mut builder = Builder::new(&[ValueType::CALLS, ValueType::WALL]);
    let main = builder.frame(Frame::python("main", "", "/srv/app.py", 1));
    builder.add(&[(main, 0)], &[1, 500]);
    for (name, count) in counts {
        let function = builder.frame(Frame::python(*name, "", "/srv/app.py", 9));
        builder.add(&[(main, 0), (function, 0)], &[*count, count * 100]);
    }
    builder.finish(Meta::default())
}

#[test]
fn calls_are_compared_as_numbers() {
    let scratch = Scratch::new();
    let file = |name: &str, work, hashed| written(&scratch, name, &calls(&[("work", work), ("hashed", hashed)]));
    let (a, b) = (&*file("a.json", 5000, 7), &*file("b.json", 5001, 7));
    let of_calls = |words: &[&'static str], a: &str, b: &str, code| {
        run(&[&["diff", a, b, "--value", "calls"], words].concat(), code)
    };
    let said = of_calls(&["--fail-above", "0"], a, b, 3);
    for part in [
        "exact numbers: any difference",
        "5000   5001      +1",
        "work (/srv/app.py:9) grew by ",
        "of all calls of the older side",
    ] {
        assert!(said.contains(part), "`{part}` is not in:\n{said}");
    }
    assert!(!said.contains("INTERVAL") && !said.contains("main "), "{said}");
    assert!(of_calls(&["--fail-above", "0 calls"], a, b, 3).contains("grew by 1 call, more than 0"));
    of_calls(&["--fail-above", "1 calls"], a, b, 0);
    of_calls(&["--fail-above", "0.1"], a, b, 0);
    of_calls(&["--fail-above", "0"], a, a, 0);
    assert!(of_calls(&[], a, a, 0).contains("no difference"));
    // As time: numbers too. As shares they mean nothing.
    of_calls(&["--normalize", "time"], a, b, 0);
    assert!(of_calls(&["--normalize", "share"], a, b, 2).contains("calls are compared as numbers"));
    let said = run(&["diff", a, b, "--single-run", "--fail-above", "5 calls"], 2);
    assert!(said.contains("needs numbers of calls"), "{said}");

    // What differs between runs of one side fails only outside of their range.
    let file = |name: &str, work, hashed| file(&format!("runs/{name}.json"), work, hashed);
    let before = [file("b1", 5000, 7), file("b2", 5000, 9)];
    let after = [file("a1", 5000, 8), file("a2", 5000, 9)];
    let worse = [file("w1", 5000, 12), file("w2", 5001, 14)];
    let of = |after: &[String; 2], limit: &str, code| {
        let ([b1, b2], [a1, a2]) = (&before, after);
        let sides = ["diff", "--before", b1, b2, "--after", a1, a2];
        run(
            &[&sides[..], &["--value", "calls", "--fail-above", limit]].concat(),
            code,
        )
    };
    let said = of(&after, "0 calls", 0);
    assert!(said.contains("VARIES") && said.contains("7 to 9; 8 to 9"), "{said}");
    let said = of(&worse, "2 calls", 3);
    assert!(
        said.contains("hashed (/srv/app.py:9) grew by 3 calls, more than 2")
            && !said.contains("work (/srv/app.py:9) grew"),
        "{said}"
    );
    let found = json_of(&["diff", a, b, "--value", "calls"]);
    assert_eq!(
        (&found["unit"], &found["question"], &found["count"]),
        (&"calls".into(), &"numbers".into(), &"self".into())
    );
    assert_eq!(
        found["rows"][0]["ranges"],
        serde_json::json!([[5000, 5000], [5001, 5001]])
    );
}

#[test]
fn labels_are_chosen_and_compared() {
    let scratch = Scratch::new();
    // Two tests of a second each; the second one gets slower by a half, in one function.
    let labeled = |name: &str, slower: u64| {
        let mut profile = sampled(&[("work", 1000), ("work", 500), ("slow", slower)], 1.0);
        let set = |test: &str| vec![("test".to_string(), test.to_string())];
        let of_samples = (0..profile.timeline.len()).map(|at| if at < 1000 { 1 } else { 2 });
        profile.labels = Labels::new(&[vec![], set("one"), set("two")], of_samples.collect());
        written(&scratch, name, &profile)
    };
    let (a, b) = (&*labeled("a.json", 500), &*labeled("b.json", 1000));
    let time = ["diff", a, b, "--normalize", "time"];
    let found = json_of(&[&time[..], &["--label", "test=two"]].concat());
    assert_eq!(found["samples"], serde_json::json!([1000, 1500]));
    let rows = found["rows"].as_array().expect("rows");
    let slow = rows.iter().find(|row| row["name"] == "slow").expect("a row");
    assert_eq!((&slow["before"], &slow["change"]), (&0.5.into(), &0.5.into()));
    let found = json_of(&[&time[..], &["--by", "label"]].concat());
    let rows: Vec<_> = found["rows"]
        .as_array()
        .expect("rows")
        .iter()
        .map(|row| (&row["name"], &row["change"]))
        .collect();
    assert_eq!(
        rows,
        [(&"test=two".into(), &0.5.into()), (&"test=one".into(), &0.0.into())]
    );
    assert!(found["rows"][0].get("kind").is_none(), "{found}");
    // Percent of what the test itself took.
    let gate = [&time[..], &["--by", "label", "--single-run", "--fail-above"]].concat();
    let said = run(&[&gate[..], &["40"]].concat(), 3);
    assert!(
        said.contains("test=two grew by 50.00 % of its older amount") && said.contains("LABEL"),
        "{said}"
    );
    let said = run(&[&time[..], &["--label", "test=none"]].concat(), 1);
    assert!(said.contains("no sample has test=none"), "{said}");
}
