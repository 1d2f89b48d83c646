//! Files of other tools, and what we write, read again.

use std::collections::BTreeMap;
use std::io::Read;

use super::*;
use crate::build::Builder;
use crate::escape;
use crate::export;
use crate::model::{Frame, FrameKind, Meta};
use crate::values::ValueType;
use crate::view::shown_name;

fn unpacked(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    if bytes.starts_with(&[0x1f, 0x8b]) {
        flate2::read::GzDecoder::new(bytes).read_to_end(&mut out).unwrap();
    } else {
        out.extend(bytes);
    }
    out
}

fn fixture(name: &str) -> Vec<u8> {
    let path = format!("{}/../fixtures/imports/{name}", env!("CARGO_MANIFEST_DIR"));
    unpacked(&std::fs::read(path).expect("a file in fixtures/imports"))
}

/// The name of the format, and the profile.
fn imported(bytes: &[u8]) -> (&'static str, Profile) {
    let reader = READERS.iter().find(|reader| (reader.is)(bytes)).expect("a format");
    (reader.name, read(bytes).expect("a profile"))
}

/// A function as all formats name it.
fn name_of(frame: &Frame) -> String {
    let name = match frame.kind {
        _ if !frame.qualname.is_empty() => frame.qualname.as_str().into(),
        _ => shown_name(frame),
    };
    match &*escape::line(&name) {
        "" => "[unnamed]".into(),
        name => name.into(),
    }
}

/// Self amount of a value by name; what is in no function is without a name.
fn self_by_name(profile: &Profile, value: usize) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for (node, amount) in profile.nodes.iter().zip(profile.self_amounts(value)) {
        let frame = &profile.frames[node.frame as usize];
        let name = match frame.kind {
            FrameKind::Root | FrameKind::Process | FrameKind::Thread => String::new(),
            _ => name_of(frame),
        };
        if amount > 0 {
            *sums.entry(name).or_default() += amount;
        }
    }
    sums
}

fn find<'a>(profile: &'a Profile, name: &str) -> &'a Frame {
    let mut frames = profile.frames.iter();
    frames
        .find(|frame| frame.name == name || frame.qualname == name)
        .unwrap_or_else(|| panic!("no function {name}"))
}

fn total(profile: &Profile, value: usize, name: &str) -> u64 {
    let amounts = profile.amounts(value);
    let of = |node: usize| {
        let frame = &profile.frames[profile.nodes[node].frame as usize];
        frame.name == name || frame.qualname == name
    };
    (1..profile.nodes.len())
        .filter(|node| of(*node) && !of(profile.nodes[*node].parent as usize))
        .map(|node| amounts[node])
        .sum()
}

#[test]
fn files_of_other_tools() {
    for (file, format, types, samples) in [
        ("pyspy.collapsed", "collapsed", &["samples"][..], 486),
        ("pyspy-threads.collapsed", "collapsed", &["samples"], 329),
        ("pyspy-native.collapsed", "collapsed", &["samples"], 507),
        ("pyspy.speedscope.json", "speedscope", &["time_ns"], 4_500_000_000),
        ("austin.collapsed", "collapsed", &["samples", "wall_ns"], 202),
        ("perf-c.script", "perf script", &["samples", "cpu_ns"], 90),
        ("samply.firefox.json.gz", "firefox", &["samples"], 90),
        ("go.pprof", "pprof", &["samples", "cpu_ns"], 0),
    ] {
        let (found, profile) = imported(&fixture(file));
        let keys: Vec<String> = profile.value_types().iter().map(|value| value.kind.key()).collect();
        assert_eq!(
            (found, keys.iter().map(String::as_str).collect::<Vec<_>>().as_slice()),
            (format, types),
            "{file}"
        );
        if samples > 0 {
            assert_eq!(profile.nodes[0].count, samples, "{file}");
        }
        if file.starts_with("samply") {
            continue; // without symbols
        }
        let prefix = if file.starts_with("go") { "main." } else { "" };
        let last = types.len() - 1;
        let [parse, solve] = ["parse", "solve"].map(|name| total(&profile, last, &format!("{prefix}{name}")) as f64);
        let share = parse / (parse + solve);
        assert!((0.55..0.78).contains(&share), "{file}: {parse} {solve}");
        assert!(parse + solve > 0.8 * profile.amounts(last)[0] as f64, "{file}");
    }
}

#[test]
fn functions_have_what_files_state() {
    let place = |profile: &Profile, name: &str| {
        let frame = find(profile, name);
        (
            frame.kind,
            frame.module.clone(),
            frame.filename.clone(),
            frame.first_line,
        )
    };
    let python = |file: &str, line| (FrameKind::Python, String::new(), file.to_string(), line);
    let other = |kind, module: &str| (kind, module.to_string(), "<low-level>".to_string(), 0);
    for (file, name, expected) in [
        // Executed lines are no definitions.
        ("pyspy.collapsed", "Job.run", python("work.py", 0)),
        (
            "pyspy-native.collapsed",
            "thread_run",
            other(FrameKind::Native, "libpython3.12.so.1.0"),
        ),
        ("pyspy.speedscope.json", "parse", python("/srv/src/work.py", 0)),
        ("austin.collapsed", "Job.run", python("/srv/src/work.py", 0)),
        (
            "async-profiler.collapsed",
            "vfs_read",
            other(FrameKind::Kernel, "[kernel]"),
        ),
        (
            "async-profiler.collapsed",
            "java/util/HashMap.get",
            other(FrameKind::Inlined, ""),
        ),
        (
            "stackcollapse.collapsed",
            "entry_SYSCALL_64",
            other(FrameKind::Kernel, "[kernel]"),
        ),
        ("perf-c.script", "parse", other(FrameKind::Native, "work_c")),
        ("perf-c.script", "do_syscall_64", other(FrameKind::Kernel, "[kernel]")),
        ("perf-python.script", "spin", python("/srv/src/work.py", 0)),
        (
            "samply.firefox.json.gz",
            "do_syscall_64",
            other(FrameKind::Kernel, "[kernel]"),
        ),
        ("go.pprof", "main.parse", other(FrameKind::Native, "work_go")),
        ("evented.speedscope.json", "work", other(FrameKind::Native, "app.rb")),
        ("shared.firefox.json", "main", python("/app/a.py", 3)),
        ("shared.firefox.json", "read", other(FrameKind::Kernel, "[kernel]")),
    ] {
        assert_eq!(place(&imported(&fixture(file)).1, name), expected, "{file} {name}");
    }
    let go = imported(&fixture("go.pprof")).1;
    assert_eq!(find(&go, "main.parse").source, "/srv/src/work.go");
    let pyspy = imported(&fixture("pyspy.collapsed")).1;
    let parse = pyspy
        .nodes
        .iter()
        .find(|node| pyspy.frames[node.frame as usize].name == "parse");
    assert_eq!(parse.unwrap().lines.keys().collect::<Vec<_>>(), [&13]);
    let threads = imported(&fixture("pyspy-threads.collapsed")).1;
    assert_eq!(find(&threads, "thread (24349): MainThread").kind, FrameKind::Thread);
    assert_eq!(
        find(&imported(&fixture("async-profiler.collapsed")).1, "[main tid=42]").kind,
        FrameKind::Thread
    );
}

#[test]
fn amounts_keep_their_units() {
    let heap = imported(&fixture("go-heap.pprof")).1;
    let keys: Vec<String> = heap.value_types().iter().map(|value| value.kind.key()).collect();
    assert_eq!(
        keys,
        [
            "alloc_objects",
            "alloc_space_bytes",
            "inuse_objects",
            "inuse_space_bytes"
        ]
    );
    let events = imported(&fixture("perf-events.script")).1;
    let keys: Vec<String> = events.value_types().iter().map(|value| value.kind.key()).collect();
    assert_eq!(keys, ["samples", "page-faults", "cpu_ns"]);
    assert_eq!(events.nodes[0].count, 26);
    assert_eq!(events.amounts(2)[0] % 10_000_000, 0);
    let evented = imported(&fixture("evented.speedscope.json")).1;
    let ms = |n: u64| n * 1_000_000;
    let expected = [("f", ms(2)), ("main", ms(5)), ("work", ms(3))].map(|(name, time)| (name.to_string(), time));
    assert_eq!(self_by_name(&evented, 0), BTreeMap::from(expected));
    let times: Vec<u64> = evented.timeline.iter().map(|sample| sample.time / ms(1)).collect();
    assert_eq!(times, [0, 2, 5, 6, 8]);
    let austin = imported(&fixture("austin.collapsed")).1;
    assert!((1.0..60.0).contains(&austin.meta.duration), "{}", austin.meta.duration);
    let shared = imported(&fixture("shared.firefox.json")).1;
    assert_eq!((shared.nodes[0].count, shared.timeline[1].time), (7, 1_500_000));
    assert_eq!(shared.meta.threads, [(7, 8, "main".to_string())]);
    let full = b"# austin: 3.7.0\n# mode: full\n\nP1;T0:1;a.py:f:3 100,0,64\nP1;T0:1;a.py:f:3 50,1,-64\n";
    let full = imported(full).1;
    assert_eq!([0, 1, 2].map(|value| full.amounts(value)[0]), [2, 150_000, 100_000]);
}

/// The golden profile has every kind of frame and odd names.
fn golden() -> Profile {
    json::read(include_bytes!("../../../fixtures/golden/profile.json")).unwrap()
}

fn waits() -> Profile {
    let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL]);
    let main = builder.frame(Frame::python("main", "main", "/srv/app.py", 1));
    let run = builder.frame(Frame::python("run", "Job.run", "/srv/app.py", 9));
    let read = builder.frame(Frame::native("read", "libc.so.6", 64));
    let wait = builder.frame(Frame::new(FrameKind::State, "[waiting: read pipe]"));
    builder.sample(0, (1, 1), &[(main, 3), (run, 10)], &[1, 1_000_000]);
    builder.sample(
        5_000_000,
        (1, 1),
        &[(main, 3), (run, 11), (read, 0), (wait, 0)],
        &[1, 40_000_000],
    );
    builder.sample(9_000_000, (1, 2), &[(main, 4)], &[1, 2_000_000]);
    builder.finish(Meta::default())
}

#[test]
fn what_we_write_is_read() {
    for (profile, values) in [(golden(), 1), (waits(), 2)] {
        for name in ["json", "html", "collapsed", "speedscope", "firefox", "pprof", "otlp"] {
            let format = export::by_name(name).unwrap();
            let mut out = Vec::new();
            (format.write)(&profile, &mut out).unwrap();
            let (found, again) = imported(&unpacked(&out));
            assert_eq!(found, name);
            // Firefox has one amount of each sample.
            let count = if name == "firefox" && values == 2 {
                3
            } else {
                profile.nodes[0].count
            };
            assert_eq!(again.nodes[0].count, count, "{name}");
            for value in 0..values {
                let kind = &profile.value_types()[value].kind;
                let key = if name == "firefox" && value > 0 {
                    "time_ns".into()
                } else {
                    kind.key()
                };
                let Some(at) = again.find_value(&key) else {
                    assert!(["collapsed", "firefox"].contains(&name) && value > 0, "{name} {key}");
                    continue;
                };
                let mut expected = self_by_name(&profile, value);
                let mut found = self_by_name(&again, at);
                // Collapsed stacks have processes and threads as frames, and do not say that they are.
                if name == "collapsed" {
                    for text in [&mut expected, &mut found] {
                        text.remove("");
                        text.remove("worker 7");
                    }
                }
                assert_eq!(found, expected, "{name} {key}");
            }
        }
    }
}

#[test]
fn collapsed_stacks_are_read_as_they_were_written() {
    let profile = golden();
    let mut out = Vec::new();
    export::collapsed::write(&profile, &mut out).unwrap();
    let again = read(&out).unwrap();
    for kind in [
        FrameKind::Python,
        FrameKind::Kernel,
        FrameKind::Truncated,
        FrameKind::Unknown,
        FrameKind::State,
    ] {
        let of = |profile: &Profile| {
            let frames = profile.frames.iter().filter(|frame| frame.kind == kind);
            let mut frames: Vec<_> = frames
                .map(|f| (f.name.clone(), f.filename.clone(), f.first_line, f.address))
                .collect();
            // Two addresses of the kernel with one name are one function in the text.
            if kind == FrameKind::Kernel {
                frames.iter_mut().for_each(|frame| frame.3 = 0);
            }
            frames.sort();
            frames.dedup();
            frames
        };
        assert_eq!(of(&again), of(&profile), "{kind:?}");
    }
    // Lines that were executed.
    let mut out = Vec::new();
    export::collapsed::write(&export::select::by_line(&waits()), &mut out).unwrap();
    assert!(String::from_utf8(out).unwrap().contains("Job.run (/srv/app.py:11)"));
}

#[test]
fn damaged_files_say_where() {
    for (bytes, words) in [
        (&*[&b"main 3\n".repeat(20)[..], b"work\n"].concat(), "damaged at line 21: no number"),
        (b"main 3 4\nwork 1 2\n", "it compares two profiles"),
        (
            br#"{"$schema":"https://www.speedscope.app/x","profiles":[{"type":"sampled","unit":"none","samples":[[0]],"weights":[1]}]}"#,
            "damaged at profile 1: a frame that does not exist",
        ),
        (b"\xef\xbb\xbf{\"profiles\":[], \"shared\":", "the file ends early"),
        (br#"{"meta":{"preprocessedProfileVersion":50},"threads":[{"samples":{"stack":[0]}}]}"#, "damaged at thread 1: a sample of a stack"),
        (br#"{"meta":{"version":29},"libs":[]}"#, "it is a raw profile of Firefox"),
        (b"\x00\x01\x02", "it is binary data of another kind"),
        (b"\x0a\x04\x08\x01\x10\x02\x12\x05\x0a\x01\x07\x10\x01\x32\x00", "damaged at sample 1: location 7 does not exist"),
        (b"\x0a\x04\x08\x01\x10\x02\x12\x04\x0a\x00\x10\xff\x32\x00", "sample 1: a part of it is no protocol buffer"),
        (b"PERFILE2", "it is a perf.data file"),
        (b"just a text\n", "it is text of another kind; formats that are read: html, pstats, speedscope"),
    ] {
        let e = read(bytes).unwrap_err();
        assert!(e.reason.contains(words), "{e:?}");
    }
}

#[test]
fn limits_are_errors() {
    let deep = "f;".repeat(MAX_DEPTH as usize) + "g 1\n";
    let e = read(deep.as_bytes()).unwrap_err();
    assert!(e.reason.contains("more than 100000 frames"), "{e:?}");
    let events: String = (0..=MAX_VALUE_TYPES)
        .map(|n| format!("a 1 1.000000: event{n}: \n"))
        .collect();
    let e = read(events.as_bytes()).unwrap_err();
    assert!(e.reason.contains("more than 32 units"), "{e:?}");
}

/// Truncated at every length, or with any byte damaged, a file is an error or a profile, never a panic.
#[test]
fn damage_never_panics() {
    for file in [
        "shared.firefox.json",
        "evented.speedscope.json",
        "go.pprof",
        "async-profiler.collapsed",
        "perf-events.script",
    ] {
        let bytes = fixture(file);
        for at in 0..bytes.len() {
            let _ = read(&bytes[..at]);
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x11;
            let _ = read(&damaged);
        }
    }
}
