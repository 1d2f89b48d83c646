//! Commands read the history in a directory: the time, the service, the container and the process that are asked for.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, UNIX_EPOCH};

use nativeprof::history::{Limits, Writer};

#[path = "history/day.rs"]
mod day;

use day::Host;

const SMALL: Host = Host {
    processes: 8,
    services: 2,
    samples: 120,
};

struct Scratch(PathBuf);

impl Scratch {
    /// A directory with so many minutes, the last of them at a quarter of the rate.
    fn new(name: &str, minutes: u64) -> Scratch {
        let path = std::env::temp_dir().join(format!("nativeprof-read-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        day::write(
            &path,
            SMALL,
            minutes,
            |minute| if minute + 1 == minutes { 5 } else { 20 },
        );
        Scratch(path)
    }

    fn segments(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path());
        let mut all: Vec<PathBuf> = entries.filter(|path| path.extension().is_some()).collect();
        all.sort();
        all
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn run(command: &str, path: &Path, arguments: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_nativeprof"));
    program.arg(command).arg(path).args(arguments);
    program.output().expect("it runs")
}

#[track_caller]
fn json(command: &str, path: &Path, arguments: &[&str]) -> serde_json::Value {
    let output = run(command, path, &[arguments, &["--json"]].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[track_caller]
fn samples(path: &Path, arguments: &[&str]) -> u64 {
    json("report", path, arguments)["samples"].as_u64().expect("a number")
}

#[track_caller]
fn error(path: &Path, arguments: &[&str]) -> String {
    let output = run("report", path, arguments);
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn times_are_of_a_clock() {
    let scratch = Scratch::new("times", 10);
    let path = &scratch.0;
    assert_eq!(samples(path, &[]), 1200);
    let output = run("report", path, &["--last", "2m"]);
    let status = String::from_utf8_lossy(&output.stderr);
    assert!(
        status.contains("2 segments from 2026-11-28T03:22:00Z to 2026-11-28T03:24:00Z"),
        "{status}"
    );
    assert!(
        status.contains("could not be opened, in each segment: 2 not permitted"),
        "{status}"
    );
    assert_eq!(samples(path, &["--last", "2m"]), 240);
    assert_eq!(samples(path, &["--from", "03:20"]), 480);
    assert_eq!(samples(path, &["--from", "2026-11-28T03:15", "--to", "03:17"]), 240);
    assert_eq!(samples(path, &["--from", "2026-11-28T03:15:30Z", "--to", "03:16"]), 60);
    assert_eq!(samples(path, &["--to", "03:16", "--last", "1m"]), 120);
    let quality = json("report", path, &["--last", "1m"]);
    assert_eq!(quality["quality"]["exact"], 119, "one of a hundred is partial");
    for (arguments, part) in [
        (&["--from", "2s"][..], "--from 03:00"),
        (
            &["--from", "2020-01-01", "--to", "2020-01-02"],
            "it has segments from 2026-11-28T03:14:00Z to 2026-11-28T03:24:00Z",
        ),
        (&["--from", "03:20", "--to", "03:18"], "no time is between"),
        (&["--from", "03:61"], "a time in UTC"),
        (
            &["--service", "none"],
            "no process has --service none; there are service-0, service-1",
        ),
        (&["--comm", "PYTHON"], "there are python3.13, nginx"),
        (
            &["--container", "x\ny"],
            "no process has --container x\\x0ay; there are ",
        ),
        (&["--pid", "4000000"], "no process has --pid 4000000; there are "),
        (
            &["--service", "service-0", "--comm", "nginx", "--pid", "1003"],
            "none of what is selected",
        ),
    ] {
        let error = error(path, arguments);
        assert!(error.contains(part), "{error}");
    }
    assert!(error(&scratch.segments()[0], &["--service", "a"]).contains("omit --service"));
}

/// The last minutes are those that were written last, whatever the clock said before.
#[test]
fn clocks_are_stepped() {
    let scratch = Scratch::new("stepped", 0);
    let path = &scratch.0;
    for (first, minutes, of_last_20) in [(60, 10, 10), (0, 5, 15), (120, 4, 4)] {
        let mut writer = Writer::open(path, Limits::default()).unwrap();
        for minute in first..first + minutes {
            let start = UNIX_EPOCH + Duration::from_secs(day::START + minute * 60);
            let message = day::segment(SMALL, minute, 20);
            writer.write(start, Duration::from_secs(60), &message).unwrap();
        }
        assert_eq!(samples(path, &["--last", "3m"]), 360);
        assert_eq!(samples(path, &["--last", "20m"]), 120 * of_last_20);
    }
    assert_eq!(samples(path, &[]), 19 * 120);
    assert_eq!(samples(path, &["--from", "03:14", "--to", "03:16"]), 240);
}

#[test]
fn parts_are_the_whole() {
    let scratch = Scratch::new("parts", 3);
    let path = &scratch.0;
    let services = ["service-0", "service-1"].map(|service| samples(path, &["--service", service]));
    assert!(services[0] > 0 && services[0] + services[1] == 360, "{services:?}");
    let containers = ["00000", &format!("{:064x}", 1)].map(|container| samples(path, &["--container", container]));
    assert_eq!(containers, [360, services[1]], "the first one begins both");
    let programs = ["nginx", "python3.13"].map(|program| samples(path, &["--comm", program]));
    assert_eq!(programs[0] + programs[1], 360);
    let processes = (1000..1008).map(
        |pid: u32| match run("report", path, &["--pid", &pid.to_string(), "--json"]) {
            output if output.status.success() => {
                let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
                report["samples"].as_u64().unwrap()
            }
            _ => 0,
        },
    );
    assert_eq!(processes.sum::<u64>(), 360);
    let time = json("report", path, &["--value", "cpu"])["samples"].as_u64();
    assert_eq!(
        time,
        Some((240 * 50 + 120 * 200) * 1_000_000),
        "each minute at its own rate"
    );
}

#[test]
fn what_cannot_be_read_is_named() {
    let scratch = Scratch::new("damaged", 4);
    let segments = scratch.segments();
    fs::write(&segments[1], "no segment").unwrap();
    fs::write(scratch.0.join("notes.txt"), "").unwrap();
    let output = run("report", &scratch.0, &[]);
    let status = String::from_utf8_lossy(&output.stderr);
    for name in [Path::new("notes.txt"), &segments[1]] {
        let name = name.file_name().unwrap().to_string_lossy();
        assert!(status.contains(&*format!("skipped: {name}")), "{status}");
    }
    assert_eq!(samples(&scratch.0, &[]), 360);
}

#[test]
fn two_times_are_compared() {
    let scratch = Scratch::new("against", 10);
    let found = json(
        "diff",
        &scratch.0,
        &["--last", "2m", "--against", "5m", "--value", "samples"],
    );
    assert_eq!(found["samples"], serde_json::json!([240, 240]));
    let output = run("export", &scratch.0, &["--last", "1m", "-f", "collapsed", "-o", "-"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let counts = text
        .lines()
        .map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap());
    assert_eq!(counts.sum::<u64>(), 120);
}
