//! How long each format takes for a profile with 100,000 distinct stacks, and how much it writes.
//!
//! `cargo bench --bench export`

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nativeprof::export::{FORMATS, json};
use nativeprof::tree::profile::{Frame, FrameKind, Node, Profile, Tick};

const STACKS: u32 = 100_000;
const FUNCTIONS: u32 = 4_000;
const DEPTH: u32 = 24;
const RUNS: usize = 5;

/// Stacks that share their outer frames, as those of real programs do; the same ones in every run.
fn profile() -> Profile {
    let mut profile = Profile::default();
    let functions = (0..FUNCTIONS).map(|i| {
        let python = i % 3 == 0;
        Frame {
            kind: if python { FrameKind::Python } else { FrameKind::Native },
            name: if python {
                format!("function_{i}")
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
            } else {
                format!("lib{}.so.1", i % 40)
            },
            source: String::new(),
        }
    });
    profile.frames.extend(functions);
    let node = |frame, parent, line: u32| {
        let lines = BTreeMap::from([(line, 1)]);
        Node {
            frame,
            parent,
            count: 1,
            lines,
            self_lines: BTreeMap::new(),
            line_text: String::new(),
            first_seen_line: line,
        }
    };
    profile.nodes.push(node(0, 0, 0));
    let mut path = vec![0u32];
    let mut state = 1u64;
    for stack in 0..STACKS {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let random = (state >> 33) as u32;
        // A few frames change at the leaf; now and then nearly all of them.
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
        let node = path[path.len() - 1];
        profile.nodes[node as usize].count += 1;
        profile.timeline.push(Tick {
            time: u64::from(stack) * 1_000_000,
            pid: 1,
            tid: 1,
            node,
        });
    }
    for index in (1..profile.nodes.len()).rev() {
        let (parent, count) = (profile.nodes[index].parent as usize, profile.nodes[index].count);
        // Samples end at leaves only; here everybody above gets them.
        profile.nodes[parent].count += count;
    }
    profile
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn report(name: &str, bytes: usize, time: Duration) {
    let (ms, mb) = (time.as_secs_f64() * 1e3, bytes as f64 / 1e6);
    println!(
        "{name:<12} {ms:>8.1} ms {mb:>8.1} MB {:>8.1} MB/s",
        mb / time.as_secs_f64()
    );
}

fn main() {
    let profile = profile();
    println!(
        "{STACKS} stacks, {} nodes, {} functions, median of {RUNS}",
        profile.nodes.len(),
        profile.frames.len()
    );
    for format in FORMATS {
        let mut out = Vec::new();
        let times = (0..RUNS).map(|_| {
            out.clear();
            let start = Instant::now();
            (format.write)(&profile, &mut out).expect("memory takes what is written");
            start.elapsed()
        });
        let time = median(times.collect());
        report(format.name, out.len(), time);
        if format.name == "json" {
            let times = (0..RUNS).map(|_| {
                let start = Instant::now();
                json::read(&out).expect("what was written is read");
                start.elapsed()
            });
            report("json, read", out.len(), median(times.collect()));
        }
    }
}
