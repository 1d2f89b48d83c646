//! Exporters against files that were looked at by hand, and against profiles that try to break them.
//!
//! `BLESS=1 cargo test --test export` rewrites the files in `fixtures/golden`.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use nativeprof::export::{FORMATS, by_name, json};
use nativeprof::tree::profile::{Frame, FrameKind, Meta, ModuleMeta, Node, NodeId, Profile, Quality, Tick};

fn frame(kind: FrameKind, name: &str) -> Frame {
    let python = kind == FrameKind::Python;
    let grouping = matches!(kind, FrameKind::Root | FrameKind::Process | FrameKind::Thread);
    Frame {
        kind,
        name: name.to_string(),
        qualname: String::new(),
        filename: if python || grouping {
            String::new()
        } else {
            "<low-level>".to_string()
        },
        first_line: 0,
        address: 0,
        module: if kind == FrameKind::Kernel {
            "[kernel]".to_string()
        } else {
            String::new()
        },
        source: String::new(),
    }
}

fn python(name: &str, qualname: &str, filename: &str, first_line: u32) -> Frame {
    let (qualname, filename) = (qualname.to_string(), filename.to_string());
    Frame {
        qualname,
        filename,
        first_line,
        ..frame(FrameKind::Python, name)
    }
}

fn native(kind: FrameKind, name: &str, module: &str, address: u64, source: &str) -> Frame {
    Frame {
        module: module.to_string(),
        address,
        source: source.to_string(),
        ..frame(kind, name)
    }
}

/// Grows a profile stack by stack, as a recording does.
struct Builder {
    profile: Profile,
}

impl Builder {
    fn new() -> Self {
        let mut builder = Builder {
            profile: Profile::default(),
        };
        builder.profile.frames.push(frame(FrameKind::Root, "root"));
        builder.node(0, 0, 0);
        builder
    }

    fn node(&mut self, parent: NodeId, frame: u32, line: u32) -> NodeId {
        let (lines, line_text) = (BTreeMap::new(), String::new());
        self.profile.nodes.push(Node {
            frame,
            parent,
            count: 0,
            lines,
            line_text,
            first_seen_line: line,
        });
        (self.profile.nodes.len() - 1) as NodeId
    }

    /// Adds `count` samples of a stack, root first, each frame with its line and the text of that line.
    fn stack(&mut self, thread: (u32, u32), count: u64, stack: &[(Frame, u32, &str)]) {
        let mut at = 0;
        self.profile.nodes[0].count += count;
        for (frame, line, text) in stack {
            let frames = &mut self.profile.frames;
            let id = frames.iter().position(|known| known == frame).unwrap_or_else(|| {
                frames.push(frame.clone());
                frames.len() - 1
            }) as u32;
            let known = self
                .profile
                .nodes
                .iter()
                .skip(1)
                .position(|node| node.parent == at && node.frame == id);
            at = match known {
                Some(found) => found as NodeId + 1,
                None => self.node(at, id, *line),
            };
            let node = &mut self.profile.nodes[at as usize];
            node.count += count;
            if *line != 0 {
                *node.lines.entry(*line).or_default() += count;
            }
            if node.line_text.is_empty() {
                node.line_text = text.to_string();
            }
        }
        let time = self.profile.timeline.len() as u64 * 10_101_010;
        self.profile.timeline.push(Tick {
            time,
            pid: thread.0,
            tid: thread.1,
            node: at,
        });
    }
}

/// Every kind of frame, several threads and processes, a deep chain, and names that want to do harm.
fn golden() -> Profile {
    use FrameKind::{Cut, Inlined, Kernel, Native, Process, Thread, Unknown};
    let mut builder = Builder::new();
    let process = (frame(Process, "python 4242"), 0, "");
    let main_thread = (frame(Thread, "MainThread 4242"), 0, "");
    let worker = (frame(Thread, "worker 7"), 0, "");
    let start = (native(Native, "_start", "python3.13", 0x4021d0, ""), 0, "");
    let eval = (
        native(
            Native,
            "_PyEval_EvalFrameDefault",
            "libpython3.13.so.1.0",
            0x1a2b30,
            "Python/ceval.c",
        ),
        812,
        "",
    );
    let module = (python("<module>", "<module>", "/srv/app/main.py", 1), 88, "main()\n");
    let run = (
        python("run", "Solver.run", "/srv/app/solver.py", 31),
        40,
        "x = self.step(x)\n",
    );
    let run_later = (run.0.clone(), 44, "");
    let dot = (
        native(Native, "cblas_dgemm", "libopenblas.so.0", 0x33b0, "interface/gemm.c"),
        512,
        "",
    );
    let kernel_fn = (
        native(Native, "dgemm_kernel_HASWELL", "libopenblas.so.0", 0x8c5a40, ""),
        0,
        "",
    );
    let sort = (
        native(
            Native,
            "npy_quicksort",
            "_multiarray_umath.so",
            0x5100,
            "npysort/quicksort.cpp",
        ),
        210,
        "",
    );
    let less = (
        native(
            Inlined,
            "npy::less<double, long; 2>(a, b)",
            "_multiarray_umath.so",
            0x5100,
            "npy/tag.h",
        ),
        33,
        "",
    );
    let syscall = (
        native(Kernel, "do_syscall_64", "[kernel]", 0xffff_ffff_8120_0000, ""),
        0,
        "",
    );
    let read = (native(Kernel, "vfs_read", "[kernel]", 0xffff_ffff_8134_0040, ""), 0, "");
    let key = (
        python("<lambda>", "Solver.run.<locals>.<lambda>", "/srv/app/solver.py", 38),
        38,
        "key=lambda p: p.größe\n",
    );

    let base = [
        process.clone(),
        main_thread.clone(),
        start.clone(),
        eval.clone(),
        module.clone(),
    ];
    let on = |rest: &[&(Frame, u32, &'static str)]| {
        let mut stack = base.to_vec();
        stack.extend(rest.iter().map(|frame| (*frame).clone()));
        stack
    };
    let main = (4242, 4242);
    builder.stack(main, 120, &on(&[&run, &dot, &kernel_fn]));
    builder.stack(main, 14, &on(&[&run, &dot]));
    builder.stack(main, 60, &on(&[&run_later, &sort, &less]));
    builder.stack(main, 22, &on(&[&run_later, &sort]));
    builder.stack(main, 35, &on(&[&run_later, &sort, &key]));
    builder.stack(main, 18, &on(&[&run, &syscall, &read]));
    builder.stack(main, 6, &on(&[&run]));
    builder.stack(main, 4, &on(&[]));

    // Recursion stays a chain.
    let walk = (
        python("walk", "walk", "/srv/app/größe/数.py", 7),
        9,
        "return walk(n - 1)\n",
    );
    let mut deep = base.to_vec();
    deep.extend(std::iter::repeat_n(walk, 40));
    builder.stack(main, 12, &deep);

    // Two native functions that have the same identifier become one node.
    let twin = |source: &str| (native(Native, "twin", "libtwin.so", 0x1000, source), 5, "");
    builder.stack(main, 8, &on(&[&twin("a.c")]));
    builder.stack(main, 9, &on(&[&twin("b.c")]));

    // The worker thread: incomplete and nameless.
    let on_worker = |rest: &[(Frame, u32, &'static str)]| {
        let mut stack = vec![process.clone(), worker.clone()];
        stack.extend_from_slice(rest);
        stack
    };
    let unknown = (native(Unknown, "[unknown]", "libsecret.so", 0x1f00, ""), 0, "");
    let jit = (native(Unknown, "[unknown]", "", 0x7f00_dead_b000, ""), 0, "");
    let cut = (frame(Cut, "[cut: stack page not present]"), 0, "");
    builder.stack(
        (4242, 4250),
        20,
        &on_worker(&[cut.clone(), dot.clone(), kernel_fn.clone()]),
    );
    builder.stack((4242, 4250), 16, &on_worker(&[start.clone(), unknown, jit]));
    builder.stack((4242, 4250), 3, &on_worker(&[]));

    // A second process, whose names were chosen by somebody else.
    let other = (frame(Process, "sh 4300"), 0, "");
    for (at, name) in HOSTILE.iter().enumerate() {
        let function = (python(name, "", &format!("/tmp/{name}.py"), 1), at as u32, *name);
        let library = (native(Native, name, name, at as u64, name), 0, "");
        builder.stack((4300, 4300), 5, &[other.clone(), function, library]);
    }

    let mut profile = builder.profile;
    let taken = profile.nodes[0].count;
    let reason = "stack page not present".to_string();
    profile.meta = Meta {
        version: "0.1.0".to_string(),
        rate: 99,
        event: "cpu-clock".to_string(),
        backend: "ebpf".to_string(),
        start: 1_795_190_400.25,
        duration: 4.75,
        command: "python main.py --name '</script><b>&' \u{1b}[31m".to_string(),
        pid: 4242,
        python: "3.13.0".to_string(),
        quality: Quality {
            asked: taken + 2,
            taken,
            exact: taken - 56,
            repaired: 36,
            partial: 20,
            lost: 2,
            reasons: BTreeMap::from([(reason, 20)]),
        },
        own_cpu: 0.011,
        modules: vec![ModuleMeta {
            path: "/usr/lib/libopenblas.so.0".to_string(),
            build_id: "0123456789abcdef".to_string(),
            names: "symbol table".to_string(),
            frames: 154,
        }],
        threads: vec![
            (4242, 4242, "MainThread".to_string()),
            (4242, 4250, "worker 7".to_string()),
        ],
    };
    profile
}

const HOSTILE: &[&str] = &[
    "</script><script>alert(1)</script>",
    "]]><!--",
    "\"quoted\" 'single' & <b>",
    "semi;colon",
    "new\nline\r\ttab",
    "\u{1b}]0;title\u{7}\u{1b}[2J",
    "\u{202e}gnp.exe\u{2066}",
    "back\\slash\\x3b",
    " ends with a number 17",
    "# comment",
    "nul\0 \u{85}\u{2028}\u{feff}\u{ffff}",
    "",
];

fn written(format: &str, profile: &Profile) -> Vec<u8> {
    let mut out = Vec::new();
    (by_name(format).unwrap().write)(profile, &mut out).unwrap();
    out
}

#[test]
fn golden_files() {
    let profile = golden();
    let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/golden");
    for format in ["json", "collapsed", "svg"] {
        let path = folder.join(format!("profile.{format}"));
        let now = written(format, &profile);
        assert!(
            now == written(format, &profile),
            "{format} differs from one writing to the next"
        );
        if std::env::var_os("BLESS").is_some_and(|bless| bless == "1") {
            std::fs::write(&path, &now).unwrap();
        }
        let expected = std::fs::read(&path).unwrap_or_default();
        if now != expected {
            let (now, expected) = (String::from_utf8_lossy(&now), String::from_utf8_lossy(&expected));
            let differing = now
                .lines()
                .zip(expected.lines())
                .find(|(now, expected)| now != expected);
            panic!(
                "{} is not what is written now; first difference: {differing:?}",
                path.display()
            );
        }
    }
}

#[test]
fn gzip_holds_the_same_json() {
    let profile = golden();
    let mut json = Vec::new();
    flate2::read::GzDecoder::new(&written("json.gz", &profile)[..])
        .read_to_end(&mut json)
        .unwrap();
    assert_eq!(json, written("json", &profile));
}

#[test]
fn json_round_trip() {
    let bytes = written("json", &golden());
    let read = json::read(&bytes).unwrap();
    assert!(written("json", &read) == bytes);
    let golden = golden();
    assert_eq!(read.meta, golden.meta);
    assert_eq!(read.timeline.len(), golden.timeline.len());
    assert_eq!(read.nodes.len(), golden.nodes.len() - 1, "the twins became one");
    for format in ["collapsed", "svg"] {
        assert!(written(format, &read) == written(format, &golden), "{format}");
    }
}

#[test]
fn collapsed_lines_account_for_every_sample() {
    let profile = golden();
    let text = String::from_utf8(written("collapsed", &profile)).unwrap();
    let mut sum = 0;
    for line in text.lines() {
        let (stack, count) = line.rsplit_once(' ').unwrap();
        sum += count.parse::<u64>().unwrap();
        assert!(
            stack.split(';').all(|frame| !frame.is_empty() && frame.trim() == frame),
            "{line}"
        );
        assert!(!line.chars().any(char::is_control), "{line:?}");
    }
    assert_eq!(sum, profile.nodes[0].count);
}

#[test]
fn very_deep_profiles_neither_overflow_nor_take_long() {
    const DEPTH: u32 = 50_000;
    let mut builder = Builder::new();
    let function = python("f", "f", "f.py", 1);
    builder.profile.frames.push(function);
    for depth in 0..DEPTH {
        builder.node(depth, 1, 2);
    }
    for node in &mut builder.profile.nodes {
        node.count = 3;
    }
    builder.profile.timeline.push(Tick {
        time: 1,
        pid: 1,
        tid: 1,
        node: DEPTH,
    });
    let bytes = written("json", &builder.profile);
    let read = json::read(&bytes).unwrap();
    assert_eq!(read.nodes.len() as u32, DEPTH + 1);
    assert_eq!(read.timeline, builder.profile.timeline);
    assert!(written("json", &read) == bytes);
    assert_eq!(
        written("collapsed", &read).iter().filter(|byte| **byte == b';').count() as u32,
        DEPTH - 1
    );
    let svg = String::from_utf8(written("svg", &read)).unwrap();
    assert!(svg.contains("[deeper frames] (3 samples, 100.00%)"));
}

#[test]
fn broken_profiles_are_written_as_far_as_they_go() {
    let mut profile = golden();
    let sound = written("json", &profile);
    let node = |frame, parent, count| {
        let (lines, line_text) = (BTreeMap::new(), String::new());
        Node {
            frame,
            parent,
            count,
            lines,
            line_text,
            first_seen_line: 0,
        }
    };
    let next = profile.nodes.len() as u32;
    profile.nodes.push(node(u32::MAX, 0, 1));
    profile.nodes.push(node(1, next, 1));
    profile.nodes.push(node(1, next + 2, 1));
    profile.nodes.push(node(1, u32::MAX, 1));
    profile.nodes.push(node(0, 0, 1));
    profile.timeline.push(Tick {
        time: 0,
        pid: 0,
        tid: 0,
        node: next,
    });
    profile.timeline.push(Tick {
        time: 0,
        pid: 0,
        tid: 0,
        node: u32::MAX,
    });
    assert!(
        written("json", &profile) == sound,
        "only what hangs on broken indices is left out"
    );
    // Counts that do not add up, and overflow.
    for node in &mut profile.nodes {
        node.count = u64::MAX - u64::from(node.parent);
    }
    profile.meta.start = f64::NAN;
    profile.meta.duration = f64::INFINITY;
    for profile in [
        profile,
        Profile::default(),
        Profile {
            frames: golden().frames,
            ..Profile::default()
        },
    ] {
        for format in FORMATS {
            assert!(!written(format.name, &profile).is_empty() || format.name == "collapsed");
        }
        let bytes = written("json", &profile);
        assert!(written("json", &json::read(&bytes).unwrap()) == bytes);
    }
}

#[test]
fn reader_refuses_what_is_no_profile() {
    for (text, reason) in [
        ("", "`{` expected at byte 0"),
        ("[]", "`{` expected at byte 0"),
        ("{", "the file ends early"),
        ("{} {}", "text after the end"),
        ("{\"count\":-1}", "a count that is no whole number"),
        ("{\"count\":1,}", "a value expected"),
        ("{\"count\" 1}", "`:` expected"),
        ("{\"count\":1 \"children\":{}}", "`,` expected"),
        ("{\"children\":{\"a\":3}}", "`{` expected"),
        ("{\"description\":7}", "a description that is not an object"),
        ("{\"x\":}", "a value expected"),
        ("{\"identifier\":\"\\u12\"}", "invalid JSON"),
        ("{\"x\":\"\\", "the file ends early"),
        ("{\"nativeprof\":{\"format\":99}}", "newer nativeprof"),
    ] {
        let error = json::read(text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
    assert!(
        json::read(b"{\"identifier\":\"\xff\"}")
            .unwrap_err()
            .to_string()
            .contains("UTF-8")
    );
    let deep = "{\"children\":{\"a\":".repeat(100_010);
    assert!(json::read(deep.as_bytes()).unwrap_err().reason.contains("too deeply"));
    assert!(json::read(format!("{{\"description\":{}", "[".repeat(1 << 20)).as_bytes()).is_err());
    // Every way of cutting a file off, or of damaging one byte, is an error or a profile, never a panic.
    let bytes = written("json", &golden());
    for at in (0..bytes.len()).step_by(61) {
        assert!(json::read(&bytes[..at]).is_err());
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        if let Ok(profile) = json::read(&damaged) {
            written("collapsed", &profile);
        }
    }
}

#[test]
fn reader_takes_a_tree_of_dask_itself() {
    let text = r#"{"count": 3, "children": {"f;a.py;4": {"identifier": "f;a.py;4", "count": 3, "children":
        {"sin;<low-level>;0x7f10": {"count": 2, "children": {}, "identifier": "sin;<low-level>;0x7f10", "description":
        {"filename": "<low-level>", "name": "sin", "line_number": 0, "line": "[0x7f12] sin +2"}}},
        "description": {"filename": "a.py", "name": "f", "line_number": 5, "line": "sin(x)\n"}}},
        "identifier": "root", "description": {"filename": "", "name": "", "line_number": 0, "line": ""}}"#;
    let profile = json::read(text.as_bytes()).unwrap();
    assert_eq!(
        String::from_utf8(written("collapsed", &profile)).unwrap(),
        "f (a.py:5) 1\nf (a.py:5);sin 2\n"
    );
}

#[test]
fn flame_graph_colours_tell_kinds_apart() {
    let svg = String::from_utf8(written("svg", &golden())).unwrap();
    let fill = |name: &str| {
        let at = svg
            .find(&format!("<title>{name}"))
            .unwrap_or_else(|| panic!("{name} is not drawn"));
        let rgb = svg[at..]
            .split_once("fill=\"rgb(")
            .unwrap()
            .1
            .split_once(')')
            .unwrap()
            .0;
        let parts: Vec<i32> = rgb.split(',').map(|part| part.parse().unwrap()).collect();
        (parts[0], parts[1], parts[2])
    };
    let (r, _, b) = fill("Solver.run (");
    assert!(b > r + 50, "Python is blue");
    let (r, g, b) = fill("cblas_dgemm");
    assert!(r > g + 30 && g > b, "native is orange");
    let (_, _, b_inlined) = fill("npy::less");
    assert!(b_inlined > b, "inlined is lighter");
    let (r, g, b) = fill("vfs_read");
    assert!(b > r && r > g, "kernel is purple");
    let (r, g, b) = fill("[cut: stack page");
    assert!(r == g && g == b, "a cut is grey");
    assert!(!svg.contains("<script>alert") && !svg.contains("<b>"));
    assert!(svg.contains("id=\"legend\"") && svg.trim_end().ends_with("</svg>"));
}
