//! The exported page in a real browser: `drive.mjs` clicks, types and reads it, and compares what it shows with the
//! samples given to it here.

mod memory;
#[allow(dead_code)]
#[path = "../export/sample_profile.rs"]
mod sample_profile;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nativeprof::export::by_name;
use nativeprof::export::html;
use nativeprof::export::html::Comparison;
use nativeprof::profile::diff;
use nativeprof::profile::diff::{DiffOptions, Metric, Normalization, RowKind, Run, Side};
use nativeprof::profile::labels::Labels;
use nativeprof::profile::lags::Lag;
use nativeprof::profile::model::{Assembly, Frame, FrameKind, Profile, SampledInstruction, TimelineSample};
use nativeprof::profile::values::{Amounts, Value, ValueType};
use nativeprof::profile::waits::{Waits, Waker};
use nativeprof::resolve::source_lines;
use sample_profile::{Builder, frame, golden, python};
use serde_json::json;

const MAIN: (u32, u32) = (70, 70);
const WORKER: (u32, u32) = (70, 71);

fn native(kind: FrameKind, name: &str, module: &str) -> Frame {
    Frame {
        module: module.to_string(),
        ..frame(kind, name)
    }
}

/// A second of samples of two threads, each with its own time.
fn known(directory: &Path) -> Profile {
    let file = directory.join("app.py").display().to_string();
    let text: String = (1..=60).map(|n| format!("    step_{n}(value)\n")).collect();
    fs::write(&file, text.replace("step_19(value)", "password = 'hunter2'")).unwrap();
    let call = |name: &str, first: u32, line: u32| (python(name, name, &file, first), line, "");
    let (main, parse, solve, wait) = (
        call("main", 1, 5),
        call("parse", 10, 12),
        call("solve", 16, 20),
        call("wait", 40, 44),
    );
    let scan = (native(FrameKind::Native, "scan", "libjson.so"), 0, "");
    let gemm = (native(FrameKind::Native, "dgemm", "libblas.so"), 0, "");
    let tile = (native(FrameKind::Inlined, "tile<double>", "libblas.so"), 0, "");
    let fault = (native(FrameKind::Kernel, "page_fault", "[kernel]"), 0, "");
    let poll = (native(FrameKind::Native, "poll", "libc.so.6"), 0, "");
    let mut builder = Builder::new();
    for i in 0..600u64 {
        let stack = match i % 6 {
            0 | 3 => vec![&main, &parse, &scan],
            1 | 4 => vec![&main, &parse, &parse, &scan],
            2 => vec![&main, &solve, &gemm, &tile, &fault],
            // The solver runs only late.
            _ if i < 300 => vec![&main, &parse],
            _ => vec![&main, &solve, &gemm],
        };
        let take = |b: &mut Builder, thread, stack: Vec<&(Frame, u32, &'static str)>, time| {
            let stack: Vec<_> = stack.into_iter().cloned().collect();
            b.stack(thread, 1, &stack);
            b.profile.timeline.last_mut().unwrap().time = time;
        };
        take(&mut builder, MAIN, stack, i * 10_000_000);
        if i % 2 == 1 {
            take(&mut builder, WORKER, vec![&wait, &poll], i * 10_000_000 + 1_000_000);
        }
    }
    let mut profile = builder.profile;
    let meta = golden().meta;
    let taken = profile.nodes[0].count;
    profile.meta.quality = nativeprof::profile::model::Quality {
        expected: taken + 3,
        taken,
        exact: taken - 5,
        repaired: 2,
        partial: 3,
        lost: 3,
        reasons: BTreeMap::from([("stack page not present".to_string(), 3)]),
    };
    profile.meta = nativeprof::profile::model::Meta {
        command: "python app.py".into(),
        rate: 100,
        duration: 6.0,
        threads: vec![(70, 70, "MainThread".into()), (70, 71, "worker".into())],
        quality: profile.meta.quality,
        ..meta
    };
    source_lines::add(&mut profile, &mut source_lines::open_local);
    let instruction = |address, text: &str, samples| SampledInstruction {
        address,
        length: 4,
        text: text.into(),
        samples,
        source: Some(("/src/blas.c".into(), 7)),
    };
    profile.assembly = vec![Assembly {
        name: "dgemm".into(),
        module: "libblas.so".into(),
        address: 0,
        is_checked: false,
        instructions: vec![
            instruction(16, "mov %rax,%rbx", 0),
            instruction(20, "vfmadd231pd %ymm0,%ymm1,%ymm2", 30),
            instruction(40, "ret", 10),
        ],
    }];
    profile
}

/// What the page should show, independent of the page's format: each sample with its stack.
fn facts(profile: &Profile) -> serde_json::Value {
    let stack = |node: u32| {
        let mut names = Vec::new();
        let mut at = node as usize;
        while at != 0 {
            names.push(profile.frames[profile.nodes[at].frame as usize].name.as_str());
            at = profile.nodes[at].parent as usize;
        }
        names.reverse();
        names
    };
    let samples = profile.timeline.iter();
    let samples: Vec<_> = samples
        .map(|t| json!({"time": t.time as f64 / 1e9, "tid": t.tid, "stack": stack(t.node)}))
        .collect();
    let functions = profile.frames.iter().skip(1);
    let functions: BTreeMap<_, _> = functions
        .map(|f| {
            (
                f.name.as_str(),
                json!({"kind": format!("{:?}", f.kind), "module": f.module}),
            )
        })
        .collect();
    let q = &profile.meta.quality;
    let quality = json!({"exact": q.exact, "repaired": q.repaired, "partial": q.partial, "lost": q.lost});
    json!({"samples": samples, "functions": functions, "quality": quality})
}

/// A program with the interpreter's own frames on its stacks, in the standard library and in a library too.
fn calls() -> Profile {
    const PYTHON: &str = "libpython3.13.so.1.0";
    let native = |name: &str, module: &str| (native(FrameKind::Native, name, module), 0, "");
    let function = |name: &str, file: &str, line: u32| (python(name, name, file, 1), line, "");
    let start = [
        native("_start", "python3.13"),
        native("Py_BytesMain", PYTHON),
        native("PyEval_EvalCode", PYTHON),
    ];
    let module = function("<module>", "/srv/app.py", 9);
    let main = function("main", "/srv/app.py", 5);
    let vectorcall = native("PyObject_Vectorcall", PYTHON);
    let sort = native("list_sort", PYTHON);
    let get = function("get", "/usr/lib/python3.13/site-packages/requests/api.py", 3);
    let dumps = function("dumps", "/usr/lib/python3.13/json/__init__.py", 3);
    let mut builder = Builder::new();
    for inner in [
        vec![&main, &vectorcall],
        vec![&main, &vectorcall, &sort],
        vec![&main, &vectorcall, &sort],
        vec![&main, &get],
        vec![&main, &dumps, &vectorcall],
    ] {
        let stack = start.iter().chain([&module, &vectorcall]).chain(inner);
        let stack: Vec<_> = stack.cloned().collect();
        builder.stack(MAIN, 10, &stack);
    }
    builder.profile
}

/// Hostile names, long ones, and everything in the golden profile.
fn hostile() -> Profile {
    let mut profile = golden();
    let image = "<img src=x onerror=alert(1)>".to_string();
    for name in [
        "x".repeat(1_000_000),
        image.clone(),
        "a\u{202e}\u{2066}\u{200b}\0\u{1b}[31mb".to_string(),
        "-->\"'`${alert(1)}</style></title>".to_string(),
    ] {
        let node = profile.nodes.len() as u32;
        let file = format!("/tmp/{}.py", &name.chars().take(50).collect::<String>());
        profile.frames.push(python(&name, &name, &file, 1));
        profile.nodes.push(nativeprof::profile::model::Node {
            frame: profile.frames.len() as u32 - 1,
            count: 50,
            parent: 0,
            ..profile.nodes[1].clone()
        });
        profile.nodes[0].count += 50;
        profile.timeline.push(TimelineSample {
            time: 3_000_000_000,
            pid: 9,
            tid: 9,
            node,
        });
    }
    profile.meta.threads.push((9, 9, image.clone()));
    profile.meta.python = image.clone();
    profile.meta.quality.reasons.insert(image.clone(), 1);
    profile.meta.modules[0].path = image.clone();
    profile.excerpts = vec![nativeprof::profile::model::SourceExcerpt {
        path: "/srv/</script><script>alert(1)</script>.py".into(),
        length: 1,
        lines: vec![(0, image)],
    }];
    profile
}

fn deep(depth: u32) -> Profile {
    let mut builder = Builder::new();
    builder.profile.frames.push(python("down", "down", "/srv/down.py", 1));
    builder
        .profile
        .frames
        .push(python("bottom", "bottom", "/srv/down.py", 9));
    for at in 0..depth {
        builder.node(at, if at + 1 == depth { 2 } else { 1 }, 2);
    }
    for node in &mut builder.profile.nodes {
        node.count = 7;
    }
    for i in 0..7 {
        builder.profile.timeline.push(TimelineSample {
            time: i * 10_000_000,
            pid: 1,
            tid: 1,
            node: depth,
        });
    }
    builder.profile
}

/// A program before and after a change: `old` became `new`, `more` grew, `same` and the ends of stacks vary.
fn before_and_after() -> [Profile; 2] {
    let profile = |changed: &str, more: u64| {
        let call = |name: &str, line: u32| (python(name, name, "/srv/app.py", line), line, "");
        let mut builder = Builder::new();
        for (name, count) in [(changed, 2000), ("more", more), ("same", 3000)] {
            let inner = call(&format!("in_{name}"), 30);
            builder.stack(MAIN, count, &[call("main", 1), call(name, 10), inner.clone()]);
            builder.stack(MAIN, 4, &[call("main", 1), call(name, 10), inner, call("end", 40)]);
        }
        Profile {
            timeline: Vec::new(),
            ..builder.profile
        }
    };
    [profile("old", 1000), profile("new", 3000)]
}

/// A thread that runs half of the time and sleeps, and one that waits for the other's lock.
fn waits() -> Profile {
    let main = (python("main", "main", "/srv/app.py", 1), 5, "");
    let wait = (python("wait", "wait", "/srv/app.py", 10), 12, "");
    let state = |name: &str| (frame(FrameKind::State, name), 0, "");
    let (sleep, gil) = (state("[waiting: sleep]"), state("[waiting: gil]"));
    let mut builder = Builder::new();
    let (mut weights, mut lengths) = (Vec::new(), Vec::new());
    let mut take = |thread, stack: &[_], time: u64, weight: u64, length: u64| {
        builder.stack(thread, 1, stack);
        builder.profile.timeline.last_mut().unwrap().time = time * 1_000_000;
        weights.push(weight * 1_000_000);
        lengths.push(length * 1_000_000);
    };
    for i in 1..=10 {
        take(MAIN, std::slice::from_ref(&main), i * 100, 100, 0);
        take(WORKER, &[wait.clone(), gil.clone()], i * 100, 100, 5);
    }
    take(MAIN, &[main, sleep], 2000, 1000, 1000);
    take(WORKER, &[wait, gil], 2000, 1000, 1000);
    let mut profile = builder.profile;
    profile.meta.duration = 2.0;
    profile.meta.threads = vec![(70, 70, "MainThread".into()), (70, 71, "worker".into())];
    profile.values = samples_and_wall_time(&profile, weights);
    let rows = lengths.len();
    profile.waits = Waits {
        lengths,
        wakers: vec![1; rows],
        holding: profile.timeline.iter().map(|sample| sample.tid == MAIN.1).collect(),
        known: vec![Waker {
            pid: 70,
            tid: 70,
            function: "main (/srv/app.py:5)".into(),
            ..Waker::default()
        }],
        ..Waits::default()
    };
    profile
}

/// The values of a profile whose samples represent these times, ns; those of the nodes are not needed.
fn samples_and_wall_time(profile: &Profile, samples: Vec<u64>) -> Vec<Value> {
    let nodes = vec![0; profile.nodes.len()];
    vec![
        Value::per_count(ValueType::SAMPLES, 1),
        Value {
            kind: ValueType::WALL,
            amounts: Amounts::Each { nodes, samples },
        },
    ]
}

/// An event loop that waits all the time; its suspended tasks are counted after one second, and after two.
fn suspended() -> Profile {
    let task = (frame(FrameKind::Task, "[task: request]"), 0, "");
    let state = |name: &str| (frame(FrameKind::State, name), 0, "");
    let (stream, sleep) = (state("[awaiting stream]"), state("[awaiting sleep]"));
    let mut builder = Builder::new();
    let mut weights = Vec::new();
    for (time, streams) in [(1_000_000_000, 3), (2_000_000_000, 1)] {
        for at in 0..4 {
            let awaited = if at < streams { &stream } else { &sleep };
            builder.stack(MAIN, 1, &[task.clone(), awaited.clone()]);
            builder.profile.timeline.last_mut().unwrap().time = time;
            weights.push(250_000_000);
        }
    }
    let mut profile = builder.profile;
    profile.meta.duration = 2.0;
    profile.meta.threads = vec![(70, 70, "MainThread".into())];
    profile.values = samples_and_wall_time(&profile, weights);
    let rows = profile.timeline.len();
    profile.waits = Waits {
        lengths: vec![0; rows],
        wakers: vec![0; rows],
        holding: vec![false; rows],
        ..Waits::default()
    };
    profile
}

/// The known one, with callbacks that blocked its event loop.
fn lagging(directory: &Path) -> Profile {
    let mut profile = known(directory);
    let app = directory.join("app.py").display().to_string();
    let lag = |time: u64, length: u64, task: &str, function: String| Lag {
        pid: 70,
        tid: 70,
        start: 0,
        time: time * 1_000_000,
        length: length * 1_000_000,
        task: task.into(),
        stack: vec!["main".into(), function.clone()],
        function,
    };
    profile.meta.lags = vec![
        lag(1000, 60, "report", format!("solve ({app}:20)")),
        lag(4000, 90, "", format!("parse ({app}:12)")),
        lag(9000, 70, "late", "gone (/srv/other.py:3)".into()),
    ];
    profile
}

/// The known one, where each thread works within a span of its own.
fn labeled(directory: &Path) -> Profile {
    let mut profile = known(directory);
    let labels = |span: &str, route: &str| vec![("span".into(), span.into()), ("route".into(), route.into())];
    let sets = [vec![], labels("request", "/a"), labels("<b>job</b>", "/b")];
    let of_samples = profile
        .timeline
        .iter()
        .map(|sample| if sample.tid == MAIN.1 { 1 } else { 2 });
    profile.labels = Labels::new(&sets, of_samples.collect());
    profile
}

/// All that a page can have at once: long names, two processes, waits for the GIL, blocked event loops, labels.
fn everything(directory: &Path) -> Profile {
    let deep = "/srv/applications/of/the/team/current/lib/python3.13/site-packages/warehouse/stock/levels.py";
    let mut builder = Builder {
        profile: labeled(directory),
    };
    builder.profile.meta.lags = lagging(directory).meta.lags;
    let handler = "recalculate_the_levels_of_all_articles_in_all_warehouses";
    let outer = (python(handler, handler, deep, 1), 2001, "");
    let gil = (frame(FrameKind::State, "[waiting: gil]"), 0, "");
    let other = (80, 81);
    for at in 0..50 {
        builder.stack(other, 1, &[outer.clone(), gil.clone()]);
        builder.profile.timeline.last_mut().unwrap().time = at * 100_000_000;
    }
    let mut profile = builder.profile;
    profile.meta.command =
        format!("/usr/bin/python3.13 {deep} --configuration=/etc/warehouse/production.toml --verbose");
    profile.meta.python = "CPython 3.13.0".into();
    profile.meta.threads.push((80, 81, "recalculating worker".into()));
    let rows = profile.timeline.len();
    profile.values = samples_and_wall_time(&profile, vec![10_000_000; rows]);
    profile.waits = Waits {
        lengths: profile
            .timeline
            .iter()
            .map(|t| if t.tid == other.1 { 5_000_000 } else { 0 })
            .collect(),
        wakers: vec![0; rows],
        holding: vec![false; rows],
        ..Waits::default()
    };
    profile
}

/// Two lines give work to a native worker, whose samples are below them.
fn attributed() -> Profile {
    let call = |name: &str, line: u32| (python(name, name, "/srv/app.py", line), line, "");
    let native = |name: &str| (native(FrameKind::Native, name, "libblas.so"), 0, "");
    let (main, first, second) = (call("main", 1), call("first", 10), call("second", 20));
    let (dispatch, kernel) = (native("exec_blas"), native("kernel"));
    let thread = (frame(FrameKind::Thread, "MainThread"), 0, "");
    let worker = (frame(FrameKind::Worker, "[worker thread blas]"), 0, "");
    let mut builder = Builder::new();
    for (line, count) in [(&first, 30), (&second, 50)] {
        let own = [&thread, &main, line, &dispatch].map(Clone::clone);
        let below = [&thread, &main, line, &dispatch, &worker, &kernel].map(Clone::clone);
        for _ in 0..count {
            builder.stack(MAIN, 1, &own);
            builder.stack(WORKER, 1, &below);
        }
    }
    let mut profile = builder.profile;
    profile.meta.threads = vec![(70, 70, "MainThread".into()), (70, 71, "blas".into())];
    profile
}

fn comparison(directory: &Path) {
    let [a, b] = before_and_after();
    let options = DiffOptions {
        normalization: Normalization::Share,
        by: RowKind::Function,
        metric: Metric::Total,
        confidence: 0.99,
        interpreter: false,
    };
    let [a, b] = [&a, &b].map(|profile| {
        Side::of_one(Run {
            profile,
            grain: 1.0,
            clock: None,
        })
    });
    let both = diff::both(&a, &b, &options);
    let comparison = Comparison {
        both: &both,
        found: &diff::diff(&a, &b, &options),
        names: ["a.json", "b.json"],
        amounts: "all samples",
        normalization: Normalization::Share,
        is_self: false,
        confidence: 99.0,
    };
    let mut out = Vec::new();
    html::write_comparison(&comparison, false, &mut out).unwrap();
    fs::write(directory.join("comparison.html"), out).unwrap();
}

/// A directory for pages of a test, which removes it when it has passed.
fn pages(name: &str) -> PathBuf {
    let directory = std::env::temp_dir().join(format!("nativeprof-{name}-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    directory
}

fn write(path: PathBuf, profile: &Profile) {
    let format = path.extension().unwrap().to_str().unwrap();
    let mut out = Vec::new();
    by_name(format).unwrap().write_default(profile, &mut out).unwrap();
    fs::write(path, out).unwrap();
}

/// Runs a script of this directory in Node.js, which drives Chromium.
fn run(script: &str, directory: &Path, files: &[&str]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    for (path, hint) in [
        (target.join("browser/done"), ".ci/install-browser"),
        (PathBuf::from("/usr/bin/chromium"), "apt-get install chromium"),
    ] {
        assert!(path.exists(), "no {}; `.ci/setup` brings it, or {hint}", path.display());
    }
    let output = Command::new("node")
        .arg(root.join("tests/page").join(script))
        .arg(directory)
        .args(files)
        .output()
        .expect("node starts; `.ci/setup` brings it");
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&text));
    fs::remove_dir_all(directory).unwrap();
}

#[test]
fn page_in_a_browser() {
    let directory = pages("page");
    let write = |name: &str, profile: &Profile| write(directory.join(name), profile);
    let known = known(&directory);
    write("known.html", &known);
    fs::write(directory.join("known.json"), facts(&known).to_string()).unwrap();
    write("hostile.html", &hostile());
    write("deep.html", &deep(10_000));
    write("empty.html", &Profile::default());
    write("calls.html", &calls());
    comparison(&directory);
    write("waits.html", &waits());
    let untimed = Profile {
        timeline: Vec::new(),
        ..known
    };
    write("untimed.html", &untimed);
    let mut shared = untimed;
    source_lines::remove(&mut shared);
    let options = html::PageOptions {
        no_source: true,
        ..Default::default()
    };
    let mut out = Vec::new();
    html::write_page(&shared, &options, &mut out).unwrap();
    fs::write(directory.join("shared.html"), out).unwrap();
    write("suspended.html", &suspended());
    write("lagging.html", &lagging(&directory));
    write("labeled.html", &labeled(&directory));
    write("attributed.html", &attributed());
    write("everything.html", &everything(&directory));
    run("drive.mjs", &directory, &[]);
}

/// Memory over time, and the page of a census.
#[test]
fn memory_in_a_browser() {
    let directory = pages("memory");
    memory::write(&directory);
    run("memory.mjs", &directory, &[]);
}

/// In small windows and usual ones, light and dark: nothing is cut, and everyone can use it.
#[test]
fn looks() {
    let directory = pages("looks");
    write(directory.join("everything.html"), &everything(&directory));
    write(directory.join("everything.svg"), &everything(&directory));
    comparison(&directory);
    memory::write(&directory);
    let files = [
        "everything.html",
        "comparison.html",
        "everything.svg",
        "resident.html",
        "census.html",
    ];
    run("looks.mjs", &directory, &files);
}
