//! Exporters, compared with files that were reviewed by hand, and with malformed profiles.
//!
//! `BLESS=1 cargo test --test export` rewrites the files in `fixtures/golden`.

mod lines;
mod sample_profile;
mod values;

use std::io::Read;
use std::path::{Path, PathBuf};

use nativeprof::export::{FORMATS, by_name};
use nativeprof::profile::json;
use nativeprof::profile::model::{FrameKind, Node, Profile, TimelineSample};

use sample_profile::{Builder, frame, golden, python};

fn written(format: &str, profile: &Profile) -> Vec<u8> {
    let mut out = Vec::new();
    (by_name(format).unwrap().write)(profile, &mut out).unwrap();
    out
}

/// Decompressed, because the compressed bytes may change with the library.
fn plain(bytes: Vec<u8>) -> Vec<u8> {
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return bytes;
    }
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(&bytes[..])
        .read_to_end(&mut plain)
        .unwrap();
    plain
}

#[test]
fn golden_files() {
    let profile = golden();
    let directory: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/golden");
    // Compressed JSON has its own test; most of a page is its program.
    let names = FORMATS.iter().map(|format| format.name);
    for format in names.filter(|name| !["json.gz", "html"].contains(name)) {
        let path = directory.join(format!("profile.{format}"));
        let now = plain(written(format, &profile));
        assert!(
            now == plain(written(format, &profile)),
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

/// Output of earlier versions is read as intended: a file of version 0.1, with the golden profile.
#[test]
fn older_files_are_read() {
    let old = include_bytes!("../../fixtures/golden/old/profile-0.1.json");
    let old = json::read(old).unwrap();
    let golden = || {
        let mut golden = golden();
        // Earlier files do not have the number of frames without a name per module, and no instructions.
        for module in &mut golden.meta.modules {
            module.unnamed = 0;
            module.instructions.clear();
        }
        golden
    };
    assert_eq!((&old.meta, &old.values), (&golden().meta, &golden().values));
    // In a page functions are numbered in the order of the profile's frames, which a file does not keep.
    for format in FORMATS.iter().filter(|format| format.name != "html") {
        assert!(
            written(format.name, &old) == written(format.name, &golden()),
            "{}",
            format.name
        );
    }
    // As the library writes it for programs that process the tree itself.
    let mut expanded = Vec::new();
    json::write_expanded(&golden(), &mut expanded).unwrap();
    assert!(json::read(&expanded).unwrap() == old);
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
    builder.profile.timeline.push(TimelineSample {
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
    assert!(svg.contains("[truncated] (3 samples, 100.00%)"));
    for format in FORMATS {
        let bytes = plain(written(format.name, &read)).len();
        assert!(bytes < 40_000_000, "{}: {bytes} bytes", format.name);
    }
}

#[test]
fn broken_profiles_are_written_as_far_as_they_go() {
    let mut profile = golden();
    let sound = written("json", &profile);
    let node = |frame, parent, count| Node {
        count,
        ..Node::new(frame, parent)
    };
    let next = profile.nodes.len() as u32;
    profile.nodes.push(node(u32::MAX, 0, 1));
    profile.nodes.push(node(1, next, 1));
    profile.nodes.push(node(1, next + 2, 1));
    profile.nodes.push(node(1, u32::MAX, 1));
    profile.nodes.push(node(0, 0, 1));
    profile.timeline.push(TimelineSample {
        time: 0,
        pid: 0,
        tid: 0,
        node: next,
    });
    profile.timeline.push(TimelineSample {
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
fn the_reader_refuses_other_files() {
    for (text, reason) in [
        ("", "`{` expected at byte 0"),
        ("[]", "`{` expected at byte 0"),
        ("{", "the file ends early"),
        ("{\"count\":1,\"children\":{}} {}", "text after the end"),
        ("{}", "`count` expected in the root object"),
        ("{\"count\":1}", "`children` expected in the root object"),
        ("{\"count\":-1}", "a count that is not an integer"),
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
    // Truncated at every length, or with any byte damaged, it is an error or a profile, never a panic.
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
fn the_reader_accepts_a_tree_of_dask_itself() {
    let text = r#"{"count": 3, "children": {"f;a.py;4": {"identifier": "f;a.py;4", "count": 3, "children":
        {"sin;<low-level>;0x7f10": {"count": 2, "children": {}, "identifier": "sin;<low-level>;0x7f10", "description":
        {"filename": "<low-level>", "name": "sin", "line_number": 0, "line": "[0x7f12] sin +2"}}},
        "description": {"filename": "a.py", "name": "f", "line_number": 5, "line": "sin(x)\n"}}},
        "identifier": "root", "description": {"filename": "", "name": "", "line_number": 0, "line": ""}}"#;
    let profile = json::read(text.as_bytes()).unwrap();
    assert_eq!(
        String::from_utf8(written("collapsed", &profile)).unwrap(),
        "f (a.py:4) 1\nf (a.py:4);sin 2\n"
    );
}

#[test]
fn flame_graph_colors_differ_by_kind() {
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
    let (r, g, b) = fill("[truncated: stack page");
    assert!(r == g && g == b, "a truncated stack is gray");
    assert!(!svg.contains("<script>alert") && !svg.contains("<b>"));
    assert!(svg.contains("id=\"legend\"") && svg.trim_end().ends_with("</svg>"));
}

#[test]
fn flame_graphs_keep_every_sample_but_hide_narrow_frames() {
    let mut builder = Builder::new();
    let thread = (frame(FrameKind::Thread, "worker 7"), 0, "");
    builder.stack((1, 1), 9_000, std::slice::from_ref(&thread));
    for line in 0..100u32 {
        // Each far below the width that is drawn, and in two places: in the thread, and at the root.
        let narrow = (python("narrow", "", "a.py", line), line, "");
        builder.stack((1, 1), 1, &[thread.clone(), narrow.clone()]);
        builder.stack((1, 1), 1, &[narrow]);
    }
    builder.stack((1, 1), 800, &[]);
    let svg = String::from_utf8(written("svg", &builder.profile)).unwrap();
    for title in [
        "all (10,000 samples, 100%)",
        "worker 7 (9,100 samples, 91.00%)",
        "[no stack] (9,000 samples, 90.00%)",
        "[too narrow to draw] (100 samples, 1.00%)",
        "[no stack] (800 samples, 8.00%)",
    ] {
        assert!(svg.contains(&format!("<title>{title}</title>")), "{title}");
    }
}
