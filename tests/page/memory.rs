//! A profile of resident memory, one of allocations, and a census.

use std::fs;
use std::path::Path;

use nativeprof::export::html;
use nativeprof::profile::memory_over_time::{MemoryOverTime, ObservedMemory};
use nativeprof::profile::model::Profile;
use nativeprof::profile::sums::sum_upwards;
use nativeprof::profile::values::{Amounts, Value, ValueType};
use serde_json::json;

use crate::sample_profile::{Builder, python};
use crate::{MAIN, write as write_profile};

const MIB: u64 = 1 << 20;
/// Samples, and ns between them.
const SAMPLES: u64 = 60;
const STEP: u64 = 100_000_000;

/// Writes the pages.
pub fn write(directory: &Path) {
    write_profile(directory.join("resident.html"), &resident());
    write_profile(directory.join("live.html"), &live());
    let census = census().to_string();
    for (name, json) in [("census.html", census.as_str()), ("damaged.html", DAMAGED)] {
        let mut out = Vec::new();
        html::write_census(json.as_bytes(), &mut out).expect("a vector can be written");
        fs::write(directory.join(name), out).expect("the directory can be written");
    }
}

/// Six seconds in which `keep` and `drop` make memory resident in turn, 1 MiB at a time; what `drop` has touched is given back.
fn stacks() -> Profile {
    let call = |name: &str, line: u32| (python(name, name, "/srv/app.py", line), line, "");
    let (main, keep, drop) = (call("main", 1), call("keep", 10), call("drop", 20));
    let mut builder = Builder::new();
    for at in 0..SAMPLES {
        let inner = if at % 2 == 0 { &keep } else { &drop };
        builder.stack(MAIN, 1, &[main.clone(), inner.clone()]);
        builder.profile.timeline.last_mut().expect("a sample").time = at * STEP;
    }
    let mut profile = builder.profile;
    profile.meta.command = "python app.py".into();
    profile.meta.duration = 6.0;
    profile.meta.threads = vec![(MAIN.0, MAIN.1, "MainThread".into())];
    profile.values = vec![Value::per_count(ValueType::SAMPLES, 1)];
    profile
}

/// Adds a value of which each sample has this amount.
fn add(profile: &mut Profile, kind: ValueType, amount: impl Fn(u64) -> u64) {
    let samples: Vec<u64> = (0..SAMPLES).map(amount).collect();
    let mut nodes = vec![0; profile.nodes.len()];
    for (sample, amount) in profile.timeline.iter().zip(&samples) {
        nodes[sample.node as usize] += amount;
    }
    sum_upwards(&mut nodes, |at| Some(profile.nodes[at].parent as usize));
    profile.values.push(Value {
        kind,
        amounts: Amounts::Each { nodes, samples },
    });
}

/// Bytes of a kind of memory by time.
type Amount = (ObservedMemory, fn(u64) -> u64);

fn over_time(amounts: &[Amount]) -> MemoryOverTime {
    MemoryOverTime {
        times: (0..=SAMPLES).map(|at| at * STEP).collect(),
        amounts: amounts
            .iter()
            .map(|(kind, of)| (*kind, (0..=SAMPLES).map(of).collect()))
            .collect(),
    }
}

fn resident() -> Profile {
    let mut profile = stacks();
    profile.meta.event = "rss".into();
    add(
        &mut profile,
        ValueType::RSS_BYTES,
        |at| if at % 2 == 0 { MIB } else { 0 },
    );
    add(&mut profile, ValueType::RSS_GROWN_BYTES, |_| MIB);
    add(&mut profile, ValueType::RSS_RETURNED_BYTES, |at| {
        if at % 4 == 3 { 2 * MIB } else { 0 }
    });
    profile.meta.memory_over_time = over_time(&[
        (ObservedMemory::Anonymous, |at| 20 * MIB + at * MIB / 2),
        (ObservedMemory::File, |_| 10 * MIB),
        (ObservedMemory::Shared, |_| 0),
    ]);
    profile
}

fn live() -> Profile {
    let mut profile = stacks();
    profile.meta.event = "allocations".into();
    add(&mut profile, ValueType::ALLOC_BYTES, |_| MIB);
    add(
        &mut profile,
        ValueType::LIVE_BYTES,
        |at| if at % 2 == 0 { MIB } else { 0 },
    );
    profile.meta.memory_over_time = over_time(&[(ObservedMemory::Live, |at| at * MIB / 2)]);
    profile
}

/// A census whose parts have types in several of them, more than is resident, and hostile names.
fn census() -> serde_json::Value {
    let of_type = |name: &str, count: [u64; 3], bytes: [u64; 3], parts: serde_json::Value| json!({"name": name, "count": count, "bytes": bytes, "parts": parts, "is_object": !name.starts_with("blocks")});
    let mut types = vec![
        of_type(
            "numpy.ndarray",
            [40, 30, 50],
            [420 * MIB, 400 * MIB, 460 * MIB],
            json!({"python_objects": 4 * MIB, "c_in_use": 16 * MIB, "c_large": 400 * MIB}),
        ),
        of_type(
            "dict",
            [500_000; 3],
            [120 * MIB; 3],
            json!({"python_objects": 100 * MIB, "c_in_use": 20 * MIB}),
        ),
        of_type(
            "<img src=x onerror=alert(1)>",
            [9; 3],
            [30 * MIB; 3],
            json!({"python_objects": 30 * MIB}),
        ),
        of_type(
            "blocks of 512 bytes",
            [2048; 3],
            [MIB; 3],
            json!({"python_objects": MIB}),
        ),
    ];
    types.extend((0..500).map(|at| {
        let name = format!("app.models.Type{at}");
        of_type(&name, [7; 3], [at * 500; 3], json!({"python_objects": at * 500}))
    }));
    json!({
        "kind": "census", "version": 1, "time_ms": 1_700_000_000_000_u64, "pid": 1234,
        "command": "/usr/bin/python3.13 /srv/warehouse/server.py --port 8080",
        "python": "CPython 3.13.0 (libpython3.13.so.1.0)",
        "rss_bytes": 900 * MIB, "swap_bytes": 3 * MIB, "hugetlb_bytes": 0,
        "parts": [
            {"name": "python_objects", "bytes": 300 * MIB}, {"name": "python_free_blocks", "bytes": 20 * MIB},
            {"name": "python_free_pools", "bytes": 10 * MIB}, {"name": "c_in_use", "bytes": 60 * MIB},
            {"name": "c_free", "bytes": 90 * MIB}, {"name": "c_large", "bytes": 300 * MIB},
            {"name": "stacks", "bytes": MIB}, {"name": "files_private", "bytes": 40 * MIB},
            {"name": "files_shared", "bytes": 19 * MIB}, {"name": "anonymous", "bytes": 59 * MIB},
            {"name": "kernel", "bytes": 0}, {"name": "unknown", "bytes": MIB},
        ],
        "pools": {"all": 20_000, "read": 5_000, "torn": 1, "is_full": false},
        "types": types,
        "large": [{"address": 4096, "bytes": 800 * MIB, "is_mapped": true, "owner": "object", "type": "numpy.ndarray"}],
        "sample": null,
        "glibc": {
            "system": 170 * MIB, "in_use": 70 * MIB, "free": 100 * MIB, "free_resident": 90 * MIB, "returnable": 80 * MIB,
            "not_read": 0, "mapped": 400 * MIB,
            "arenas": [
                {"address": 4096, "is_main": true, "system": 160 * MIB, "in_use": 65 * MIB, "free": 95 * MIB,
                 "free_resident": 88 * MIB, "returnable": 79 * MIB, "not_read": 0},
                {"address": 8192, "is_main": false, "system": 10 * MIB, "in_use": 5 * MIB, "free": 5 * MIB,
                 "free_resident": 2 * MIB, "returnable": MIB, "not_read": 0},
            ],
        },
        "files": [
            {"name": "/usr/lib/libpython3.13.so.1.0", "private_bytes": 30 * MIB, "shared_bytes": 15 * MIB},
            {"name": "/srv/</script><script>alert(1)</script>\u{202e}.so", "private_bytes": 5 * MIB, "shared_bytes": MIB},
        ],
        "anonymous": [{"address": 65536, "mapped_bytes": 64 * MIB, "rss_bytes": 59 * MIB, "name": "[anon: arrow]"}],
        "notes": ["12.0 MiB of the C heap were not read"],
    })
}

/// What is no census.
const DAMAGED: &str = r#"{"rss_bytes": -4, "command": null, "types": [3, {"count": "x", "bytes": [1], "parts": 7}, null],
    "parts": [{"name": "python_objects", "bytes": 5}, {"name": "constructor", "bytes": 5}, {"name": "c_in_use"}, {"name": 7, "bytes": 1}],
    "glibc": 7, "files": {"a": 1}, "anonymous": "x", "notes": {}, "pools": [], "sample": {"objects": 3}}"#;
