//! Our formats in the programs they are for: all of them are by other authors, as they come from their registries
//! (`.ci/install-viewers` installs them). What they read from a file must match the profile, sample by sample.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use nativeprof::escape::line;
use nativeprof::export::by_name;
use nativeprof::profile::model::{Frame, FrameKind, Profile};
use nativeprof::profile::view::{identifier, shown_name};
use serde_json::Value;

use common::{Scratch, live, nativeprof, newest_python, pythons, sources, viewers};

mod common;
#[path = "export/sample_profile.rs"]
mod sample_profile;

/// Standard output of a program that succeeds without complaints.
fn run(command: &mut Command) -> String {
    let done = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let (out, err) = (
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr),
    );
    assert!(
        done.status.success() && err.is_empty(),
        "{command:?}: {}\n{err}\n{out}",
        done.status
    );
    out.into_owned()
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:.2000}"))
}

/// A real program with several threads, recorded just now.
fn recorded() -> &'static Profile {
    static PROFILE: OnceLock<Profile> = OnceLock::new();
    PROFILE.get_or_init(|| {
        let _live = live();
        let scratch = Scratch::new();
        let file = scratch.path("profile.json");
        let mut command = nativeprof(&["record", "--threads", "-r", "499", "-o"]);
        command
            .arg(&file)
            .arg("--")
            .arg(&newest_python().exe)
            .arg(sources().join("../../tests/viewers/busy.py"));
        let done = command.output().expect("nativeprof starts");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let bytes = fs::read(&file).expect("what was written");
        let profile = nativeprof::profile::json::read(&bytes).expect("a profile");
        assert!(profile.nodes[0].count > 200, "too little was sampled");
        let threads: BTreeSet<u32> = profile.timeline.iter().map(|sample| sample.tid).collect();
        assert!(threads.len() > 1, "one thread only");
        profile
    })
}

/// Each test profile, as a file of this format.
fn each(format: &str, ending: &str, check: impl Fn(&Profile, &Path)) {
    let scratch = Scratch::new();
    for (name, profile) in [("golden", &sample_profile::golden()), ("recorded", recorded())] {
        let path = scratch.path(&format!("{name}{ending}"));
        let mut out = Vec::new();
        (by_name(format).expect("a format").write)(profile, &mut out).expect("memory takes what is written");
        fs::write(&path, out).expect("a file");
        check(profile, &path);
    }
}

/// Samples by function, at the end and anywhere on the stack, and by caller and callee; counted stack by stack.
struct Figures<K> {
    functions: BTreeMap<K, (u64, u64)>,
    edges: BTreeMap<(K, K), (u64, u64)>,
}

fn figures<K: Ord + Clone>(profile: &Profile, key: impl Fn(Option<&Frame>) -> K) -> Figures<K> {
    let (mut functions, mut edges) = (BTreeMap::<K, (u64, u64)>::new(), BTreeMap::<(K, K), (u64, u64)>::new());
    for (at, self_count) in profile
        .self_counts()
        .into_iter()
        .enumerate()
        .filter(|(_, self_count)| *self_count > 0)
    {
        let mut stack = Vec::new();
        let mut node = at;
        while node != 0 {
            let frame = &profile.frames[profile.nodes[node].frame as usize];
            if !matches!(frame.kind, FrameKind::Process | FrameKind::Thread) {
                stack.push(key(Some(frame)));
            }
            node = profile.nodes[node].parent as usize;
        }
        if stack.is_empty() {
            stack.push(key(None));
        }
        let calls: Vec<(K, K)> = stack
            .windows(2)
            .map(|pair| (pair[1].clone(), pair[0].clone()))
            .collect();
        functions.entry(stack[0].clone()).or_default().0 += self_count;
        if let Some(call) = calls.first() {
            edges.entry(call.clone()).or_default().0 += self_count;
        }
        for function in stack.into_iter().collect::<BTreeSet<_>>() {
            functions.entry(function).or_default().1 += self_count;
        }
        for call in calls.into_iter().collect::<BTreeSet<_>>() {
            edges.entry(call).or_default().1 += self_count;
        }
    }
    Figures { functions, edges }
}

fn name(frame: Option<&Frame>) -> String {
    match frame {
        None => "[no stack]".into(),
        Some(f) if f.kind == FrameKind::Python && !f.qualname.is_empty() => f.qualname.clone(),
        Some(f) if shown_name(f).is_empty() => "[unnamed]".into(),
        Some(f) => shown_name(f).into_owned(),
    }
}

/// A function as tables show it, its samples at the end and anywhere on the stack.
type Row = (String, u64, u64);

/// Functions that differ only in addresses or files have separate rows.
fn rows(profile: &Profile, show: impl Fn(Option<&Frame>) -> String) -> Vec<Row> {
    let figures = figures(profile, |frame| (frame.map(identifier), show(frame)));
    let rows = figures.functions.into_iter();
    let mut rows: Vec<Row> = rows
        .map(|((_, name), (self_count, all))| (name, self_count, all))
        .collect();
    rows.sort();
    rows
}

/// With the first line, which distinguishes Python functions with the same name.
fn name_and_line(frame: Option<&Frame>) -> String {
    format!("{}:{}", name(frame), frame.map_or(0, |f| f.first_line))
}

#[track_caller]
fn same<K: Ord + Debug, V: PartialEq + Debug>(found: &BTreeMap<K, V>, expected: &BTreeMap<K, V>) {
    for (key, value) in expected {
        assert_eq!(found.get(key), Some(value), "{key:?}");
    }
    let more: Vec<_> = found.keys().filter(|key| !expected.contains_key(key)).collect();
    assert!(more.is_empty(), "{more:?}");
}

fn speedscope(file: &Path) -> Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/viewers/speedscope.js");
    let mut node = Command::new(viewers("node_modules/node/bin/node"));
    let found = json(&run(node
        .arg(script)
        .arg(viewers("node_modules/speedscope/dist/release"))
        .arg(file)));
    assert_eq!(found["said"], Value::Array(Vec::new()), "speedscope complains");
    found
}

fn text(value: &Value) -> String {
    value
        .as_str()
        .unwrap_or_else(|| panic!("{value} is no text"))
        .to_string()
}

fn number(value: &Value) -> u64 {
    let number = value.as_f64().unwrap_or_else(|| panic!("{value} is no number"));
    assert!(number >= 0.0 && number.fract() == 0.0, "{value}");
    number as u64
}

/// Functions of one of speedscope's profiles, each with its self and total weight.
fn weights(profile: &Value) -> Vec<Row> {
    let frames = profile["frames"].as_array().expect("a list").iter();
    let rows = frames.map(|f| {
        (
            format!("{}:{}", text(&f[0]), number(&f[2])),
            number(&f[3]),
            number(&f[4]),
        )
    });
    let mut rows: Vec<Row> = rows.collect();
    rows.sort();
    rows
}

/// Self weight of each name, over all lines: frames of speedscope are lines of functions.
fn by_function(rows: &[Row]) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for (name, self_count, _) in rows {
        let name = name.rsplit_once(':').map_or(name.as_str(), |(name, _)| name);
        *sums.entry(name.to_string()).or_default() += self_count;
    }
    sums
}

fn samples(profile: &Profile) -> u64 {
    profile.nodes[0].count
}

/// By thread: samples, the time of the last one, and the CPU time that they represent (each its period, or the time
/// since the previous one).
fn threads(profile: &Profile) -> BTreeMap<u32, (u64, u64, u64)> {
    let period = 1_000_000_000 / profile.meta.rate;
    let mut times: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
    for sample in &profile.timeline {
        times.entry(sample.tid).or_default().push(sample.time);
    }
    let rows = times.into_iter().map(|(tid, mut times)| {
        times.sort_unstable();
        let since = |at: usize| times[at] - at.checked_sub(1).map_or(0, |before| times[before]);
        let busy = (0..times.len()).map(|at| match since(at) {
            short if at > 0 && short < period + period / 2 => short,
            long => long.min(period),
        });
        (tid, (times.len() as u64, times[times.len() - 1], busy.sum()))
    });
    rows.collect()
}

#[test]
fn speedscope_reads_its_own_format() {
    each("speedscope", ".speedscope.json", |profile, file| {
        let found = speedscope(file);
        let profiles = found["profiles"].as_array().expect("a list");
        assert_eq!(number(&profiles[0]["total"]), samples(profile));
        same(
            &by_function(&weights(&profiles[0])),
            &by_function(&rows(profile, name_and_line)),
        );
        let threads = threads(profile);
        assert_eq!(profiles.len() - 1, threads.len());
        for thread in &profiles[1..] {
            let title = text(&thread["name"]);
            let tid = title
                .split_once("tid ")
                .and_then(|(_, rest)| rest.split([',', ')']).next())
                .expect("a tid");
            let (_, _, busy) = threads[&tid.parse().expect("a number")];
            assert_eq!(
                (text(&thread["unit"]), number(&thread["busy"])),
                ("nanoseconds".into(), busy),
                "{title}"
            );
        }
    });
}

#[test]
fn speedscope_reads_collapsed_stacks() {
    each("collapsed", ".collapsed", |profile, file| {
        let found = speedscope(file);
        assert_eq!(number(&found["profiles"][0]["total"]), samples(profile));
        let self_count: u64 = weights(&found["profiles"][0])
            .iter()
            .map(|(_, self_count, _)| self_count)
            .sum();
        assert!(self_count <= samples(profile));
    });
}

/// What a script reads with the message definitions of the format.
fn checked(script: &str, file: &Path) -> Value {
    let mut python = Command::new(&newest_python().exe);
    python
        .env("PYTHONPATH", viewers("python"))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/viewers").join(script))
        .arg(file);
    json(&run(&mut python))
}

#[test]
fn perfetto_traces_have_all_samples() {
    each("perfetto", ".pftrace", |profile, file| {
        let found = checked("perfetto_check.py", file);
        let functions = found["functions"].as_object().expect("an object").iter();
        let functions = functions.map(|(name, row)| (name.clone(), (number(&row[0]), number(&row[1]))));
        same(
            &functions.collect(),
            &figures(profile, |frame| line(&name(frame)).into_owned()).functions,
        );
        for (at, value) in profile.value_types().iter().enumerate() {
            assert_eq!(
                number(&found["totals"][&*value.kind.name]),
                profile.amounts(at)[0],
                "{:?}",
                value.kind
            );
        }
        let of_threads = threads(profile).into_iter();
        let of_threads = of_threads.map(|(tid, (samples, last, _))| (tid.to_string(), (samples, last)));
        let rows = found["threads"].as_object().expect("an object").iter();
        let rows = rows.map(|(tid, row)| (tid.clone(), (number(&row[0]), number(&row[1]))));
        same(&rows.filter(|(tid, _)| tid != "0").collect(), &of_threads.collect());
        let ids: BTreeSet<&str> = profile.meta.modules.iter().map(|row| &*row.build_id).collect();
        for id in found["build_ids"].as_array().expect("a list") {
            assert!(ids.contains(id.as_str().expect("a string")), "{id}");
        }
    });
}

#[test]
fn inferno_draws_collapsed_stacks() {
    each("collapsed", ".collapsed", |profile, file| {
        let text = fs::read_to_string(file).expect("a file");
        let mut svg = Vec::new();
        let mut options = inferno::flamegraph::Options::default();
        inferno::flamegraph::from_lines(&mut options, text.lines(), &mut svg).expect("a flame graph");
        let svg = String::from_utf8(svg).expect("text");
        assert!(
            svg.contains(&format!("all ({} samples, 100%)", samples(profile))),
            "{svg:.3000}"
        );
    });
}

#[test]
fn speedscope_reads_trace_events() {
    each("chrome", ".trace.json", |profile, file| {
        let found = speedscope(file);
        let profiles = found["profiles"].as_array().expect("a list");
        let threads = threads(profile);
        let timed: Vec<&Value> = profiles
            .iter()
            .filter(|p| !text(&p["name"]).contains("without a time"))
            .collect();
        assert_eq!(timed.len(), threads.len());
        // Microseconds: each interval is accurate to one.
        let busy: u64 = timed.iter().map(|p| number(&p["busy"])).sum();
        let expected: u64 = threads.values().map(|(_, _, busy)| busy / 1000).sum();
        let stretches = profile.timeline.len() as u64;
        assert!(busy.abs_diff(expected) <= 2 * stretches, "{busy} us, not {expected}");
        let found: BTreeSet<_> = profiles.iter().flat_map(weights).map(|(name, ..)| name).collect();
        let expected: BTreeSet<_> = rows(profile, name_and_line)
            .into_iter()
            .map(|(name, ..)| name)
            .collect();
        assert_eq!(found, expected);
    });
}

#[test]
fn devtools_read_trace_events() {
    each("chrome", ".trace.json", |profile, file| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/viewers/devtools.mjs");
        let mut node = Command::new(viewers("node_modules/node/bin/node"));
        let found = json(&run(node
            .arg(script)
            .arg(viewers("node_modules/@paulirish/trace_engine"))
            .arg(file)));
        assert_eq!(number(&found["warnings"]), 0);
        let mut self_count = BTreeMap::<String, u64>::new();
        let mut names = BTreeSet::new();
        for thread in found["threads"].as_array().expect("a list") {
            names.insert((number(&thread["tid"]) as u32, text(&thread["name"])));
            assert!(number(&thread["drawn"]) > 1, "{thread}");
            for (function, samples) in thread["self"].as_object().expect("an object") {
                *self_count.entry(function.clone()).or_default() += number(samples);
            }
        }
        for (_, tid, name) in &profile.meta.threads {
            assert!(
                names.contains(&(*tid, name.clone())) || !threads(profile).contains_key(tid),
                "{name}"
            );
        }
        self_count.retain(|function, samples| *samples > 0 && function != "(idle):0");
        // Samples without a time are at the same place there.
        if profile.timeline.len() as u64 == samples(profile) {
            let mut expected = BTreeMap::<String, u64>::new();
            for (function, self_count, _) in rows(profile, name_and_line)
                .into_iter()
                .filter(|(_, self_count, _)| *self_count > 0)
            {
                *expected.entry(function).or_default() += self_count;
            }
            same(&self_count, &expected);
        } else {
            assert!(self_count.values().sum::<u64>() > profile.timeline.len() as u64);
        }
    });
}

/// Tables of Go's pprof for these values: function -> (at the end, anywhere), and the total.
fn pprof(file: &Path, index: &str) -> (BTreeMap<String, (u64, u64)>, u64) {
    let scratch = Scratch::new();
    let mut pprof = Command::new(viewers("pprof"));
    pprof
        .env("PPROF_TMPDIR", scratch.directory())
        .env("HOME", scratch.directory())
        .args([
            "-top",
            if index == "cpu" {
                "-unit=nanoseconds"
            } else {
                "-unit=count"
            },
            "-nodecount=1000000",
            "-nodefraction=0",
            "-edgefraction=0",
            &format!("-sample_index={index}"),
        ]);
    let said = run(pprof.arg(file));
    let (head, table) = said
        .split_once("flat  flat%")
        .unwrap_or_else(|| panic!("no table: {said}"));
    let value = |text: &str| -> u64 { text.trim_end_matches("ns").parse().unwrap_or_else(|_| panic!("{text}")) };
    let total = head
        .rsplit_once("% of ")
        .and_then(|(_, rest)| rest.split(' ').next())
        .expect("a total");
    let mut rows = BTreeMap::new();
    for row in table.lines().skip(1) {
        let mut rest = row;
        let mut columns = Vec::new();
        for _ in 0..5 {
            rest = rest.trim_start();
            let end = rest.find(' ').unwrap_or(rest.len());
            columns.push(&rest[..end]);
            rest = &rest[end..];
        }
        let name = rest.trim_start();
        let name = [" (inline)", " (partial-inline)"]
            .iter()
            .fold(name, |name, end| name.trim_end_matches(end));
        let before = rows.insert(name.to_string(), (value(columns[0]), value(columns[3])));
        assert_eq!(before, None, "{name}");
    }
    (rows, value(total))
}

/// A recorded profile and the golden one follow the rules of the format, and have all samples.
#[test]
fn opentelemetry_reads_otlp() {
    each("otlp", ".otlp", |profile, file| {
        let found = checked("otlp_check.py", file);
        let functions = found["functions"].as_object().expect("an object").iter();
        let functions = functions.map(|(name, row)| (name.clone(), (number(&row[0]), number(&row[1]))));
        same(&functions.collect(), &figures(profile, name).functions);
        for (at, value) in profile.value_types().iter().enumerate() {
            let total = number(&found["totals"][&*value.kind.name]);
            assert_eq!(total, profile.amounts(at)[0], "{:?}", value.kind);
        }
        let expected = threads(profile).into_iter();
        let expected = expected.map(|(tid, (samples, last, _))| (tid.to_string(), (samples, last)));
        let rows = found["threads"].as_object().expect("an object").iter();
        let rows = rows.map(|(tid, row)| (tid.clone(), (number(&row[0]), number(&row[1]))));
        same(&rows.collect(), &expected.collect());
        let ids: BTreeSet<&str> = profile.meta.modules.iter().map(|row| &*row.build_id).collect();
        for id in found["build_ids"].as_array().expect("a list") {
            assert!(ids.contains(id.as_str().expect("a string")), "{id}");
        }
        let quality = &profile.meta.quality;
        for (key, samples) in [
            ("exact", quality.exact),
            ("taken", quality.taken),
            ("lost", quality.lost),
        ] {
            let key = format!("nativeprof.quality.{key}");
            assert_eq!(found["recording"][&key].as_u64().unwrap_or(0), samples, "{key}");
        }
    });
}

#[test]
fn go_reads_pprof() {
    each("pprof", ".pb.gz", |profile, file| {
        // Its table merges functions with the same name.
        let figures = figures(profile, |frame| line(&name(frame)).trim_start().to_string());
        let (counts, total) = pprof(file, "samples");
        assert_eq!(total, samples(profile));
        same(&counts, &figures.functions);
        let (times, total) = pprof(file, "cpu");
        let period = 1_000_000_000 / profile.meta.rate;
        assert_eq!(total, samples(profile) * period);
        let expected = figures
            .functions
            .iter()
            .map(|(k, (self_count, all))| (k.clone(), (self_count * period, all * period)));
        same(&times, &expected.collect());
    });
}

#[test]
fn go_finds_lines_threads_and_inlined_functions_in_pprof() {
    let scratch = Scratch::new();
    let file = scratch.path("golden.pb.gz");
    let profile = sample_profile::golden();
    let mut out = Vec::new();
    (by_name("pprof").expect("a format").write)(&profile, &mut out).expect("memory takes what is written");
    fs::write(&file, out).expect("a file");
    let run = |words: &[&str]| {
        let mut pprof = Command::new(viewers("pprof"));
        run(pprof
            .env("PPROF_TMPDIR", scratch.directory())
            .env("HOME", scratch.directory())
            .args(words)
            .arg(&file))
    };
    let said = run(&["-top", "-lines", "-sample_index=samples"]);
    for row in [
        "Solver.run /srv/app/solver.py:40",
        "npy::less<double, long; 2>(a, b) npy/tag.h:33 (inline)",
        "File: python3.13",
    ] {
        assert!(said.contains(row), "{row} is not in\n{said}");
    }
    let said = run(&["-tags", "-sample_index=samples"]);
    assert!(
        said.contains("MainThread") && said.contains("worker 7") && said.contains("4300"),
        "{said}"
    );
}

/// The Firefox Profiler's own code on a file: it runs in the background until it is stopped.
struct Firefox {
    home: Scratch,
}

impl Firefox {
    fn load(file: &Path) -> Firefox {
        let firefox = Firefox { home: Scratch::new() };
        let mut load = firefox.command();
        let done = load
            .arg("load")
            .arg(file)
            .args(["--session", "t"])
            .output()
            .expect("node starts");
        let said = String::from_utf8_lossy(&done.stderr);
        if done.status.success() {
            assert!(said.is_empty(), "{said}");
            return firefox;
        }
        // It waits for half a second, in which a busy machine does not start it; it starts anyway.
        assert!(said.contains("did not become ready"), "{said}");
        let is_ready = || {
            std::thread::sleep(std::time::Duration::from_millis(500));
            let status = firefox.command().args(["status", "--session", "t"]).output();
            status.is_ok_and(|done| done.status.success())
        };
        assert!((0..60).any(|_| is_ready()), "the Firefox Profiler does not start");
        firefox.query(&["session", "use", "t"]);
        firefox
    }

    fn command(&self) -> Command {
        let mut node = Command::new(viewers("node_modules/node/bin/node"));
        node.env("HOME", self.home.directory())
            .env("TMPDIR", self.home.directory());
        node.arg(viewers(
            "node_modules/@firefox-devtools/profiler-cli/dist/profiler-cli.js",
        ));
        node
    }

    fn query(&self, words: &[&str]) -> String {
        run(self.command().args(words))
    }
}

impl Drop for Firefox {
    fn drop(&mut self) {
        // A failure while a test fails would end all of them.
        let _ = self.command().args(["stop", "--all"]).output();
    }
}

#[test]
fn the_firefox_profiler_reads_its_format() {
    each("firefox", ".json", |profile, file| {
        let firefox = Firefox::load(file);
        let list = json(&firefox.query(&["thread", "list", "--limit", "0", "--json"]));
        let (mut functions, mut all) = (BTreeMap::<u64, (String, u64, u64)>::new(), 0);
        let threads = threads(profile);
        let listed = list["threads"].as_array().expect("a list");
        let timed = profile.timeline.len() as u64;
        assert_eq!(listed.len(), threads.len() + usize::from(timed < samples(profile)));
        for thread in listed {
            let handle = text(&thread["threadHandle"]);
            if let Some((count, last, _)) = threads.get(&(number(&thread["tid"]) as u32)) {
                let info = json(&firefox.query(&["thread", "info", "--thread", &handle, "--json"]));
                assert_eq!(number(&info["sampleCount"]), *count, "{info}");
                let ends = info["cpuActivity"].as_array().map_or(&[][..], |list| list);
                let ends = ends.iter().filter_map(|activity| activity["endTime"].as_f64());
                let end = ends.fold(0.0, f64::max);
                assert!(end * 1e6 <= *last as f64 + 1.0, "{info}");
            }
            let words = [
                "thread",
                "functions",
                "--thread",
                &handle,
                "--include-idle",
                "--limit",
                "0",
                "--json",
            ];
            let found = json(&firefox.query(&words));
            for row in found["functions"].as_array().expect("a list") {
                let entry = functions
                    .entry(number(&row["functionIndex"]))
                    .or_insert((text(&row["name"]), 0, 0));
                entry.1 += number(&row["selfSamples"]);
                entry.2 += number(&row["totalSamples"]);
                all += number(&row["selfSamples"]);
            }
        }
        assert_eq!(all, samples(profile));
        let mut found: Vec<_> = functions.into_values().collect();
        found.sort();
        // The part before a `!` is a library, which has its own column there.
        let show = |frame: Option<&Frame>| {
            let name = name(frame);
            name.rsplit_once('!').map_or(name.clone(), |(_, name)| name.to_string())
        };
        assert_eq!(found, rows(profile, show));
    });
}

#[test]
fn the_firefox_profiler_finds_lines_and_inlined_functions() {
    let scratch = Scratch::new();
    let file = scratch.path("golden.json");
    let mut out = Vec::new();
    (by_name("firefox").expect("a format").write)(&sample_profile::golden(), &mut out).expect("memory takes it");
    fs::write(&file, out).expect("a file");
    let firefox = Firefox::load(&file);
    let tree = firefox.query(&["thread", "samples-top-down", "--json"]);
    assert!(tree.contains("\"hasInlinedFrames\": true"), "{tree:.3000}");
    let found = json(&firefox.query(&["thread", "functions", "--limit", "0", "--json"]));
    let rows = found["functions"].as_array().expect("a list");
    let run = rows.iter().find(|row| row["name"] == "Solver.run").expect("a function");
    let source = firefox.query(&["function", "annotate", &text(&run["functionHandle"]), "--json"]);
    assert!(
        source.contains("/srv/app/solver.py") && source.contains("40"),
        "{source}"
    );
}

type Key = (String, u64, String);

fn pstats_key(frame: Option<&Frame>) -> Key {
    let clean = |text: &str| line(text).into_owned();
    match frame {
        Some(f) if f.kind == FrameKind::Python => (clean(&f.filename), f.first_line.into(), clean(&f.name)),
        Some(f) if !f.module.is_empty() => (clean(&f.module), 0, clean(&name(frame))),
        _ => ("~".into(), 0, clean(&name(frame))),
    }
}

fn check_pstats(profile: &Profile, found: &Value) {
    let expected = figures(profile, pstats_key);
    let period = 1.0 / profile.meta.rate as f64;
    let close = |seconds: &Value, samples: u64| {
        let seconds = seconds.as_f64().expect("a number");
        assert!(
            (seconds - samples as f64 * period).abs() < 1e-7 * (1 + samples) as f64,
            "{seconds}: {samples}"
        );
    };
    assert_eq!(number(&found["samples"]), samples(profile));
    close(&found["seconds"], samples(profile));
    let key = |row: &[Value]| (text(&row[0]), number(&row[1]), text(&row[2]));
    let (mut functions, mut edges) = (BTreeMap::new(), BTreeMap::new());
    for row in found["functions"].as_array().expect("a list") {
        let row = row.as_array().expect("a row");
        let (self_count, all) = (number(&row[3]), number(&row[4]));
        close(&row[5], self_count);
        close(&row[6], all);
        functions.insert(key(row), (self_count, all));
    }
    for row in found["edges"].as_array().expect("a list") {
        let row = row.as_array().expect("a row");
        let (all, self_count) = (number(&row[6]), number(&row[7]));
        close(&row[8], self_count);
        close(&row[9], all);
        edges.insert((key(row), key(&row[3..])), (self_count, all));
    }
    same(&functions, &expected.functions);
    same(&edges, &expected.edges);
}

fn pstats_script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/viewers/pstats_check.py")
}

#[test]
fn every_python_reads_pstats() {
    each("pstats", ".pstats", |profile, file| {
        for python in pythons() {
            let mut command = Command::new(&python.exe);
            let said = run(command.args(["-W", "error", "-I"]).arg(pstats_script()).arg(file));
            check_pstats(profile, &json(&said));
        }
    });
}

#[test]
fn gprof2dot_and_snakeviz_read_pstats() {
    // These packages may not support the newest.
    let python = pythons().iter().rfind(|python| (9..=13).contains(&python.minor));
    let python = python.expect("a CPython of 3.9 to 3.13");
    let run_with = |words: &[&str], file: &Path, more: &[&str]| {
        let mut command = Command::new(&python.exe);
        command
            .env("PYTHONPATH", viewers("python"))
            .env("PYTHONDONTWRITEBYTECODE", "1");
        run(command.args(words).arg(file).args(more))
    };
    each("pstats", ".pstats", |profile, file| {
        let said = run_with(&[pstats_script().to_str().expect("a path in UTF-8")], file, &["more"]);
        check_pstats(profile, &json(&said));
        let dot = run_with(&["-m", "gprof2dot", "-f", "pstats", "-n0", "-e0"], file, &[]);
        assert!(dot.starts_with("digraph") && dot.contains("label="), "{dot:.2000}");
    });
}
