//! Tapes: recorded processes that are replayed here without privileges and without their machine.
//!
//! `.ci/make-tapes` records them; `BLESS=1 cargo test --test tape` rewrites the golden texts next to them. Besides
//! matching these, every replayed stack must be a path that the program can take, by handwritten tables.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use nativeprof::edges::EdgeCounts;
use nativeprof::event::{CodeCopy, Event, Part};
use nativeprof::profile::model::{FrameKind, NodeId, Profile};
use nativeprof::session::SessionOptions;
use nativeprof::session::replay::{self, Replay};
use nativeprof::tape::{Tape, encode};

use random::Rng;

#[path = "common/random.rs"]
mod random;
#[path = "common/wrong_returns.rs"]
mod wrong_returns;

/// Calls of fixtures/programs/tape_target.py and tapeext.c, outermost first, from `once` on; `*` is spent time in C.
const PYTHON: &[&str] = &[
    "nested tape_call tape_apply tape_apply tape_apply inner tape_call tape_apply callback *",
    "nested tape_call tape_apply tape_apply tape_apply inner tape_call tape_apply callback pure",
    "generators tape_drain numbers *",
    "generators tape_drain numbers pure",
    "generators numbers *",
    "generators numbers pure",
    "exceptions tape_call tape_apply tape_apply thrower *",
    "exceptions handler *",
    "classes __init__ *",
    "classes __lt__ *",
    // `down` itself, 31 times, is put before this one
    "*",
];
const SPENT: &[&str] = &[
    "leaf tape_spend tape_work tape_spin",
    "leaf tape_spend tape_aligned tape_spin",
];
const PYTHON_ROOTS: &[&str] = &["<module> main once", "worker once"];

/// Calls of fixtures/programs/tape_native.c.
const NATIVE: &[&str] = &["sorting compare spin", "signals on_signal spin"];
const NATIVE_ROOTS: &[&str] = &["main once", "worker once"];

/// Lines of the Python program on which a function calls what is below it, by their text.
const CALLS: &[(&str, &[&str])] = &[
    ("<module>", &["main()"]),
    ("main", &["once()"]),
    ("worker", &["once()"]),
    ("leaf", &["tapeext.spend(SPEND)"]),
    ("nested", &["tapeext.call(inner, 2)"]),
    ("inner", &["tapeext.call(callback, 0)"]),
    ("handler", &["leaf()"]),
    ("thrower", &["leaf()"]),
    ("recursion", &["down(30)"]),
    ("down", &["leaf()", "down(n - 1)"]),
    ("__init__", &["leaf()"]),
    ("__lt__", &["leaf()"]),
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// Tapes of this CPU, and of another one: each replays on its own.
const TAPES: [&str; 2] = if cfg!(target_arch = "x86_64") {
    ["tapes", "tapes/aarch64"]
} else {
    ["tapes/aarch64", "tapes"]
};

fn tapes() -> Vec<(String, Vec<u8>)> {
    tapes_in(TAPES[0])
}

fn tapes_in(directory: &str) -> Vec<(String, Vec<u8>)> {
    let files = std::fs::read_dir(fixture(directory)).expect("a directory of tapes");
    let mut all: Vec<_> = files
        .map(|f| f.expect("a file").path())
        .filter(|p| p.extension().is_some_and(|e| e == "tape"))
        .map(|p| {
            let name = p.file_stem().expect("a name").to_string_lossy().into_owned();
            (name, std::fs::read(&p).expect("a tape"))
        })
        .collect();
    all.sort();
    assert!(!all.is_empty());
    all
}

fn replayed(packed: &[u8]) -> Profile {
    let tape = encode::read(packed).expect("a good tape");
    replay::profile(&Rc::new(tape), SessionOptions::default()).expect("a replay")
}

fn collapsed(profile: &Profile) -> String {
    let mut out = Vec::new();
    let format = nativeprof::export::by_name("collapsed").expect("a format");
    (format.write)(profile, &mut out).expect("written to memory");
    String::from_utf8(out).expect("text")
}

#[test]
fn tapes_replay_as_before() {
    for (name, packed) in tapes() {
        let now = collapsed(&replayed(&packed));
        let path = fixture(TAPES[0]).join(format!("{name}.collapsed"));
        if std::env::var_os("BLESS").is_some_and(|bless| bless == "1") {
            std::fs::write(&path, &now).expect("written");
        }
        let expected = std::fs::read_to_string(&path).unwrap_or_default();
        let differing = now.lines().zip(expected.lines()).find(|(now, then)| now != then);
        assert!(now == expected, "{name} replays differently; first: {differing:#?}");
    }
}

/// Lines are known for each sample; added up, they are those of the nodes, and JSON keeps them.
#[test]
fn lines_of_samples_add_up_to_those_of_nodes() {
    let mut several = 0;
    for (name, packed) in tapes() {
        let profile = replayed(&packed);
        assert_eq!(profile.sample_places.len(), profile.timeline.len(), "{name}");
        let added_up = |profile: &Profile| {
            let mut lines = vec![BTreeMap::<u32, u64>::new(); profile.nodes.len()];
            for (sample, place) in profile.timeline.iter().zip(&profile.sample_places) {
                let mut at = *place as usize;
                assert_eq!(profile.places[at].node, sample.node, "{name}");
                while at > 0 {
                    let place = &profile.places[at];
                    if place.line > 0 {
                        *lines[place.node as usize].entry(place.line).or_default() += 1;
                    }
                    assert_eq!(
                        profile.places[place.parent as usize].node,
                        profile.nodes[place.node as usize].parent
                    );
                    at = place.parent as usize;
                }
            }
            lines
        };
        for (node, lines) in profile.nodes.iter().zip(added_up(&profile)) {
            assert_eq!(node.lines, lines, "{name}");
            several += usize::from(lines.len() > 1);
        }
        let mut json = Vec::new();
        nativeprof::profile::json::write(&profile, &mut json).expect("written to memory");
        let read = nativeprof::profile::json::read(&json).expect("a profile");
        assert_eq!(read.timeline.len(), profile.timeline.len(), "{name}");
        for (node, lines) in read.nodes.iter().zip(added_up(&read)) {
            assert_eq!(node.lines, lines, "{name}, read again");
        }
    }
    let least = 10.min(5 * tapes().len());
    assert!(
        several > least,
        "{several} nodes with several lines are too few to be sure"
    );
}

#[test]
fn tapes_survive_being_written_again() {
    for (name, packed) in tapes() {
        let once = encode::read(&packed).expect("a good tape");
        let again = encode::read(&encode::write(&once)).expect("written by us");
        assert!(once.events == again.events && once.header == again.header, "{name}");
        let text =
            |tape: Tape| collapsed(&replay::profile(&Rc::new(tape), SessionOptions::default()).expect("a replay"));
        assert_eq!(text(once), text(again), "{name}");
    }
}

#[test]
fn copies_of_code_objects_are_kept() {
    let part = |avma, len| Part {
        avma,
        bytes: vec![7; len],
    };
    let copy = CodeCopy {
        code: 0x1000,
        fingerprint: 9,
        parts: vec![part(0x1000, 40), part(0x2000, 0)],
    };
    let events = vec![
        Event::Code {
            pid: 1,
            copy: Box::new(copy),
        },
        Event::Lost(3),
    ];
    let tape = Tape {
        events,
        ..Tape::default()
    };
    let again = encode::read(&encode::write(&tape)).expect("written by us");
    assert_eq!(again.events, tape.events);
}

/// Complete paths of the program, of which each stack must be a prefix.
fn valid_call_chains(native: bool) -> Vec<String> {
    let mut paths = Vec::new();
    if native {
        for root in NATIVE_ROOTS {
            paths.extend(NATIVE.iter().map(|p| format!("{root} {p}")));
            paths.push(format!("{root}{} spin", " descend".repeat(21)));
        }
        return paths;
    }
    for root in PYTHON_ROOTS {
        for path in PYTHON {
            for spent in SPENT {
                let down = if *path == "*" {
                    " recursion".to_string() + &" down".repeat(31)
                } else {
                    String::new()
                };
                paths.push(format!("{root}{down} {}", path.replace('*', spent)));
            }
        }
    }
    paths
}

/// Nodes from below the root down to `node`.
fn path_to(profile: &Profile, mut node: NodeId) -> Vec<NodeId> {
    let mut path = Vec::new();
    while node != 0 {
        path.push(node);
        node = profile.nodes[node as usize].parent;
    }
    path.reverse();
    path
}

/// Samples that end in each node.
fn self_counts(profile: &Profile) -> Vec<u64> {
    let mut counts: Vec<u64> = profile.nodes.iter().map(|n| n.count).collect();
    for n in &profile.nodes[1..] {
        counts[n.parent as usize] -= n.count;
    }
    counts
}

#[test]
fn every_stack_is_a_path_of_the_program() {
    for (name, packed) in tapes() {
        let profile = replayed(&packed);
        let valid = valid_call_chains(name == "native");
        let mut roots = BTreeMap::<&str, u64>::new();
        let mut bodies = BTreeMap::<String, u64>::new();
        for (node, count) in self_counts(&profile).into_iter().enumerate().filter(|(_, n)| *n > 0) {
            let path = path_to(&profile, node as NodeId);
            let frame = |node: &NodeId| &profile.frames[profile.nodes[*node as usize].frame as usize];
            // Every stack begins where threads begin.
            let first = frame(&path[0]);
            assert!(
                first.name == "_start" || first.module.starts_with("libc") && first.kind == FrameKind::Unknown,
                "{name}: a stack begins with {first:?}"
            );
            // The evaluation loop may only remain where it is being entered or left: below the last Python frame.
            let last_python = path
                .iter()
                .rposition(|n| frame(n).kind == FrameKind::Python)
                .unwrap_or(0);
            for n in &path[..last_python] {
                assert!(
                    !frame(n).name.starts_with("_PyEval_EvalFrameDefault"),
                    "{name}: {:?}",
                    frame(n)
                );
            }
            let ours: Vec<&str> = path
                .iter()
                .map(frame)
                .filter(|f| match f.kind {
                    FrameKind::Python => f.filename.ends_with("/tape_target.py"),
                    FrameKind::Truncated => panic!("{name}: {}", f.name),
                    _ => matches!(f.module.as_str(), "tapeext.so" | "tape_native") && f.name != "_start",
                })
                .map(|f| f.name.strip_suffix("@plt").unwrap_or(&f.name))
                .filter(|n| !n.starts_with("Py"))
                .collect();
            let text = ours.join(" ");
            let good = valid.iter().any(|l| {
                l.strip_prefix(&text)
                    .is_some_and(|r| r.is_empty() || r.starts_with(' '))
            });
            assert!(good, "{name}: not a path of the program: {text}");
            *roots.entry(ours[0]).or_default() += count;
            let after_once = ours.iter().skip_while(|n| **n != "once").nth(1);
            *bodies.entry(after_once.unwrap_or(&"once").to_string()).or_default() += count;
        }
        assert_eq!(roots.len(), 2, "{name}: both threads are on the tape: {roots:?}");
        assert!(bodies.len() >= 3, "{name}: {bodies:?}");
    }
}

/// Whether every sample below this node passes through another function of the program.
fn reaches_program(profile: &Profile, children: &[Vec<usize>], ends: &[u64], node: usize) -> bool {
    ends[node] == 0
        && children[node].iter().all(|c| {
            let f = &profile.frames[profile.nodes[*c].frame as usize];
            let ours = f.filename.ends_with("/tape_target.py") || f.module == "tapeext.so";
            ours || reaches_program(profile, children, ends, *c)
        })
}

#[test]
fn lines_are_those_of_the_source() {
    let source = std::fs::read_to_string(fixture("programs/tape_target.py")).expect("the program");
    let source: Vec<&str> = source.lines().collect();
    for (name, packed) in tapes().into_iter().filter(|(name, _)| name != "native") {
        let profile = replayed(&packed);
        let ends = self_counts(&profile);
        let mut children = vec![Vec::new(); profile.nodes.len()];
        for (i, n) in profile.nodes.iter().enumerate().skip(1) {
            children[n.parent as usize].push(i);
        }
        let mut seen = 0;
        for (i, node) in profile.nodes.iter().enumerate() {
            let frame = &profile.frames[node.frame as usize];
            if frame.kind != FrameKind::Python || !frame.filename.ends_with("/tape_target.py") {
                continue;
            }
            let first = frame.first_line as usize;
            let def = source[first - 1].trim();
            assert!(
                frame.name == "<module>" || def.starts_with(&format!("def {}(", frame.name)),
                "{name}: {} begins at line {first}: {def}",
                frame.name
            );
            // Where everything below returns to the program itself, only its calls can be the lines.
            let all_called = reaches_program(&profile, &children, &ends, i);
            let calls = CALLS
                .iter()
                .find(|(name, _)| *name == frame.name)
                .filter(|_| all_called);
            for line in node.lines.keys() {
                let text = source[*line as usize - 1].trim();
                assert!(*line as usize >= first, "{name}: {} at line {line}", frame.name);
                if let Some((_, calls)) = calls {
                    assert!(calls.contains(&text), "{name}: {} at line {line}: {text}", frame.name);
                    seen += 1;
                }
            }
        }
        assert!(seen > 20, "{name}: {seen} lines were judged");
    }
}

#[test]
fn stacks_are_exact() {
    for (name, packed) in tapes() {
        let q = replayed(&packed).meta.quality;
        assert!(q.taken >= 20, "{name}: {q:?}");
        assert_eq!(q.taken, q.exact, "{name}: {q:?}");
    }
}

/// Verdicts on the edges of all native stacks of a tape.
fn judged(tape: Tape) -> EdgeCounts {
    let replay = Replay::with_edges(&Rc::new(tape), SessionOptions::default()).expect("a replay");
    replay.edges().expect("a judge").clone()
}

/// The machine code contradicts no native stack, and proves as many of their edges as before.
#[test]
fn edges_of_native_stacks_are_proved() {
    let path = fixture(TAPES[0]).join("edges.txt");
    let before = std::fs::read_to_string(&path).unwrap_or_default();
    let mut now = String::new();
    for (name, packed) in tapes() {
        let counts = judged(encode::read(&packed).expect("a good tape"));
        let all = counts.total();
        assert_eq!(
            all.impossible,
            0,
            "{name}: {}",
            counts.text(&|place| format!("{place:x?}"))
        );
        let [proved, possible, unjudged] =
            [all.proved, all.possible, all.unjudged].map(|n| n as f64 / counts.samples as f64);
        now +=
            &format!("{name}: {proved:.2} proved, {possible:.2} possible, {unjudged:.2} unjudged edges per sample\n");
        let least = before.lines().find_map(|l| {
            l.strip_prefix(&name)?
                .strip_prefix(": ")?
                .split(' ')
                .next()?
                .parse::<f64>()
                .ok()
        });
        let is_blessed = std::env::var_os("BLESS").is_some_and(|bless| bless == "1");
        assert!(
            is_blessed || least.is_some_and(|least| proved > least - 0.01),
            "{name}: {proved:.2} proved edges per sample; before: {least:?}"
        );
    }
    if std::env::var_os("BLESS").is_some_and(|bless| bless == "1") {
        std::fs::write(&path, &now).expect("written");
    }
}

/// Return addresses are one byte off: the tables still lead from frame to frame.
#[test]
fn edges_of_wrong_stacks_are_impossible() {
    let (_, packed) = tapes()
        .into_iter()
        .find(|(name, _)| *name == "native")
        .unwrap_or_else(|| tapes().remove(0));
    let mut tape = encode::read(&packed).expect("a good tape");
    let good = judged(tape.clone());
    wrong_returns::make(&mut tape);
    let bad = judged(tape);
    assert!(bad.total().impossible > bad.samples, "{bad:?}");
    assert!(
        bad.proved_per_sample() < good.proved_per_sample() / 2.0,
        "{bad:?}, {good:?}"
    );
}

#[test]
fn tapes_are_small_and_contain_nothing_of_the_machine() {
    for (name, packed) in tapes() {
        // Those of stripped interpreters hold more code.
        assert!(packed.len() <= 85_000, "{name} has {} bytes", packed.len());
        let raw = unpacked(&packed);
        for path in ["/root/", "/home/", "/tmp/", env!("CARGO_MANIFEST_DIR")] {
            assert!(
                !raw.windows(path.len()).any(|w| w == path.as_bytes()),
                "{name} has {path}"
            );
        }
    }
}

fn unpacked(packed: &[u8]) -> Vec<u8> {
    let mut raw = Vec::new();
    flate2::read::GzDecoder::new(packed)
        .read_to_end(&mut raw)
        .expect("gzip");
    raw
}

/// Accepts any bytes; whether they are a tape. A valid tape is replayed, too.
fn survive(raw: &[u8]) -> bool {
    let began = Instant::now();
    let tape = encode::parse(raw);
    let good = tape.is_ok();
    if let Ok(tape) = tape {
        let tape = Rc::new(tape);
        if let Ok(mut replay) = Replay::with_edges(&tape, SessionOptions::default()) {
            replay.profile();
        }
    }
    assert!(began.elapsed() < Duration::from_secs(20), "took {:?}", began.elapsed());
    good
}

#[test]
fn tapes_of_another_cpu_are_refused() {
    for (name, packed) in tapes_in(TAPES[1]) {
        let refused = encode::read(&packed).map(drop).expect_err("registers of another CPU");
        assert!(refused.why.contains("it was recorded on"), "{name}: {refused:?}");
    }
}

#[test]
fn truncated_tapes_are_refused() {
    for (_, packed) in tapes() {
        let raw = unpacked(&packed);
        assert!(survive(&raw));
        let mut random = Rng(1);
        for len in (0..64).chain((0..40).map(|_| random.below(raw.len()))) {
            assert!(!survive(&raw[..len]), "{len} bytes");
        }
        for _ in 0..10 {
            assert!(encode::read(&packed[..random.below(packed.len())]).is_err());
        }
    }
    assert!(encode::read(b"").is_err());
    assert!(encode::read(b"nativeprof tape\n").is_err());
}

/// Replays tapes in which a few bytes are changed; fewer of the long ones.
#[test]
fn damaged_tapes_do_no_harm() {
    let mut random = Rng(7);
    let (mut good, mut bad) = (0, 0);
    for (name, packed) in tapes() {
        let raw = unpacked(&packed);
        for _ in 0..if name == "native" { 800 } else { 12 } {
            let mut bytes = raw.clone();
            // Lengths and counts are near the ends; files are the rest.
            let reach = [64, 4096, raw.len()][random.below(3)].min(raw.len());
            for _ in 0..1 + random.below(6) {
                let at = random.below(reach);
                let at = if random.below(2) == 0 { at } else { raw.len() - 1 - at };
                bytes[at] = [0, 1, 0x7f, 0x80, 0xff, random.below(256) as u8][random.below(6)];
            }
            if survive(&bytes) {
                good += 1;
            } else {
                bad += 1;
            }
        }
    }
    assert!(good > 100 && bad > 100, "{good} were tapes, {bad} were not");
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let peak = status
        .lines()
        .find_map(|l| l.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    let peak: u64 = peak.expect("a line").trim().parse().expect("a number");
    assert!(peak < 1_000_000, "{peak} KB at the peak");
}
