//! Time of `export` to each format for a profile of 1,000,000 samples with 100,000 distinct stacks, and size of the
//! output: CPU time for reading JSON and for writing.
//!
//! `cargo bench --bench export`; with a file name after `--` it only writes that profile there, as JSON.

use std::collections::BTreeMap;

use nativeprof::export::FORMATS;
use nativeprof::profile::json;
use nativeprof::profile::model::{Frame, FrameKind, Node, Profile, TimelineSample};
use nativeprof::sys::clock::process_cpu_time;

const SAMPLES: u64 = 1_000_000;
const STACKS: u32 = 100_000;
const FUNCTIONS: u32 = 4_000;
const DEPTH: u32 = 24;
const RUNS: usize = 3;

const THREADS: u32 = 4;

/// A linear congruential generator.
fn random(state: &mut u64) -> u32 {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as u32
}

/// Stacks that share their outer frames, as in real programs; the same ones in every run.
fn profile() -> Profile {
    let mut profile = Profile::default();
    let functions = (0..FUNCTIONS).map(|i| {
        let python = i % 3 == 0;
        // Call glue, which the page folds away until it is requested.
        let glue = i % 6 == 1;
        Frame {
            kind: if python { FrameKind::Python } else { FrameKind::Native },
            name: if python {
                format!("function_{i}")
            } else if glue {
                "PyObject_Vectorcall".into()
            } else {
                format!("space::Class<double, {i}>::method_{i}(long)")
            },
            qualname: if python {
                format!("Class{i}.function_{i}")
            } else {
                String::new()
            },
            filename: if python {
                format!("/srv/app/package/module_{}.py", i % 50)
            } else {
                "<low-level>".into()
            },
            first_line: if python { i } else { 0 },
            address: if python { 0 } else { u64::from(i) * 64 },
            module: if python {
                String::new()
            } else if glue {
                "libpython3.13.so.1.0".into()
            } else {
                format!("lib{}.so.1", i % 40)
            },
            source: String::new(),
        }
    });
    profile.frames.extend(functions);
    let node = |frame, parent, line: u32| Node {
        first_seen_line: line,
        ..Node::new(frame, parent)
    };
    profile.nodes.push(node(0, 0, 0));
    let mut path = vec![0u32];
    let mut state = 1u64;
    let mut ends = Vec::new();
    for _ in 0..STACKS {
        let random = random(&mut state);
        // Usually a few frames change at the leaf; sometimes almost all of them.
        let keep = if random.is_multiple_of(64) {
            2
        } else {
            DEPTH - 1 - random % 4
        };
        path.truncate(keep as usize);
        while path.len() < DEPTH as usize {
            let parent = path[path.len() - 1];
            // Consecutive ids, so that siblings differ.
            let frame = profile.nodes.len() as u32 % FUNCTIONS;
            path.push(profile.nodes.len() as u32);
            profile.nodes.push(node(frame, parent, random % 1000));
        }
        ends.push(path[path.len() - 1]);
    }
    // Each stack once, then mostly stacks close to the last one.
    let mut at = 0;
    for sample in 0..SAMPLES {
        let random = random(&mut state);
        at = match random % 4 {
            _ if sample < u64::from(STACKS) => sample as u32,
            0 => random / 4 % STACKS,
            _ => (at + random / 4 % 16) % STACKS,
        };
        let node = ends[at as usize];
        profile.nodes[node as usize].count += 1;
        profile.timeline.push(TimelineSample {
            time: sample * 1_010_101,
            pid: 1,
            tid: 1 + random / 64 % THREADS,
            node,
        });
    }
    for index in (1..profile.nodes.len()).rev() {
        let node = &mut profile.nodes[index];
        let (parent, count, line) = (node.parent as usize, node.count, node.first_seen_line);
        let later = count / 3;
        node.lines = BTreeMap::from([(line, count - later)]);
        if later > 0 {
            node.lines.insert(line + 1, later);
        }
        if profile.frames[node.frame as usize].kind == FrameKind::Python {
            node.line_text = format!("value = self.method_{line}(value, *args)");
        }
        // Samples end at leaves only; here they are added to all callers.
        profile.nodes[parent].count += count;
    }
    profile
}

/// Median CPU time of this process, in seconds; the runs never wait.
fn cpu(mut run: impl FnMut()) -> f64 {
    let times = (0..RUNS).map(|_| {
        let start = process_cpu_time();
        run();
        (process_cpu_time() - start) as f64 * 1e-9
    });
    let mut times: Vec<f64> = times.collect();
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let profile = profile();
    let mut json = Vec::new();
    json::write(&profile, &mut json).expect("memory takes what is written");
    if let Some(path) = std::env::args().skip(1).find(|word| !word.starts_with('-')) {
        std::fs::write(path, json).expect("a writable place");
        return;
    }
    let (nodes, functions) = (profile.nodes.len(), profile.frames.len());
    println!("{SAMPLES} samples, {STACKS} stacks, {nodes} nodes, {functions} functions; CPU time, median of {RUNS}");
    let read = cpu(|| {
        json::read(&json).expect("what was written is read");
    });
    println!(
        "reading JSON  {:8.1} ms {:8.1} MB",
        read * 1e3,
        json.len() as f64 * 1e-6
    );
    for format in FORMATS {
        let mut out = Vec::new();
        let write = cpu(|| {
            out.clear();
            (format.write)(&profile, &mut out).expect("memory takes what is written");
        });
        let (name, ms, all) = (format.name, write * 1e3, (read + write) * 1e3);
        println!(
            "{name:<13} {ms:8.1} ms {:8.1} MB, {all:8.1} ms with reading",
            out.len() as f64 * 1e-6
        );
    }
}
