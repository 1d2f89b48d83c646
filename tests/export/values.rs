//! Value types through the formats that contain them.

use std::io::Read;

use base64::prelude::{BASE64_STANDARD, Engine};
use nativeprof::export::select::by_value;
use nativeprof::profile::build::Builder;
use nativeprof::profile::json;
use nativeprof::profile::model::{Frame, Meta, Profile};
use nativeprof::profile::values::{Amounts, Unit, ValueType};

use super::lines::pprof;
use super::sample_profile::golden;
use super::written;

/// Like the output of a call tracer: calls, wall and CPU time, no timeline.
pub fn calls() -> Profile {
    let mut builder = Builder::new(&[ValueType::CALLS, ValueType::WALL, ValueType::CPU]);
    let main = builder.frame(Frame::python("main", "main", "/srv/app.py", 3));
    let work = builder.frame(Frame::python("work", "Job.work", "/srv/app.py", 9));
    let read = builder.frame(Frame::native("read", "libc.so.6", 0x1230));
    builder.add(&[(main, 5)], &[1, 5_000, 4_000]);
    builder.add(&[(main, 5), (work, 12)], &[200, 70_000_000, 60_000_000]);
    builder.add(&[(main, 5), (work, 14), (read, 0)], &[1000, 3_000_000_000, 0]);
    builder.finish(Meta {
        duration: 3.1,
        ..Meta::default()
    })
}

/// Like the output of wall-clock sampling: each sample has its own weight; one has no time.
pub fn weighted() -> Profile {
    let event = ValueType::new("cache-misses", Unit::Count);
    let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL, ValueType::LIVE_BYTES, event]);
    let main = builder.frame(Frame::python("main", "main", "/srv/app.py", 3));
    let wait = builder.frame(Frame::native("poll", "libc.so.6", 0x1230));
    for (at, weight) in [10_000_000, 2_500_000, 77].into_iter().enumerate() {
        let stack = [(main, 5 + at as u32), (wait, 0)];
        let depth = 1 + at % 2;
        builder.sample(
            at as u64 * 10_000_000,
            (7, 7 + at as u32 / 2),
            &stack[..depth],
            &[1, weight, 0, 3],
        );
    }
    builder.add(&[(main, 6)], &[1, 4_000, 1 << 40, 0]);
    builder.finish(Meta {
        duration: 0.03,
        ..Meta::default()
    })
}

#[test]
fn values_go_through_json() {
    for profile in [calls(), weighted()] {
        let bytes = written("json", &profile);
        let read = json::read(&bytes).unwrap();
        assert_eq!(read.values, profile.values);
        assert_eq!(read.timeline, profile.timeline);
        assert!(written("json", &read) == bytes);
        // Dask reads calls or samples; a missing value is not written.
        let tree: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(tree["count"], profile.nodes[0].count);
    }
    let tree: serde_json::Value = serde_json::from_slice(&written("json", &calls())).unwrap();
    let main = &tree["children"]["main;/srv/app.py;3"];
    assert_eq!(
        main["values"],
        serde_json::json!({"wall_ns": 3_070_005_000u64, "cpu_ns": 60_004_000})
    );
    let work = &main["children"]["work;/srv/app.py;9"];
    assert_eq!(
        work["children"]["read (libc.so.6);<low-level>;0x1230"]["values"],
        serde_json::json!({"wall_ns": 3_000_000_000u64})
    );
}

#[test]
fn values_go_through_pprof() {
    let (types, samples) = pprof(&calls());
    let of = |name: &str, unit: &str| (name.to_string(), unit.to_string());
    assert_eq!(
        types,
        [
            of("calls", "count"),
            of("wall", "nanoseconds"),
            of("cpu", "nanoseconds")
        ]
    );
    let values: Vec<_> = samples.iter().map(|(_, values)| values.clone()).collect();
    let expected = [
        vec![1, 5_000, 4_000],
        vec![200, 70_000_000, 60_000_000],
        vec![1000, 3_000_000_000, 0],
    ];
    assert_eq!(values, expected);
    let (types, samples) = pprof(&weighted());
    assert_eq!(types[2..], [of("inuse_space", "bytes"), of("cache-misses", "count")]);
    let sum = |at: usize| samples.iter().map(|(_, values)| values[at]).sum::<u64>();
    assert_eq!([0, 1, 2, 3].map(sum), [4, 12_504_077, 1 << 40, 9]);
}

/// Like a recording of allocations: programs that read pprof know these values by the names that Go has for them.
#[test]
fn allocations_go_through_formats_in_bytes() {
    let kinds = [
        ValueType::SAMPLES,
        ValueType::ALLOC_BYTES,
        ValueType::ALLOCS,
        ValueType::LIVE_BYTES,
        ValueType::LIVE_ALLOCS,
        ValueType::PEAK_BYTES,
    ];
    let mut builder = Builder::new(&kinds);
    let main = builder.frame(Frame::python("main", "main", "/srv/app.py", 3));
    builder.sample(5, (7, 7), &[(main, 4)], &[1, 3 << 20, 3, 1 << 20, 1, 2 << 20]);
    let profile = builder.finish(Meta::default());
    let (types, samples) = pprof(&profile);
    let types: Vec<(&str, &str)> = types.iter().map(|(name, unit)| (&**name, &**unit)).collect();
    let expected = [
        ("samples", "count"),
        ("alloc_space", "bytes"),
        ("alloc_objects", "count"),
        ("inuse_space", "bytes"),
        ("inuse_objects", "count"),
        ("peak_bytes", "bytes"),
    ];
    assert_eq!(types, expected);
    assert_eq!(samples[0].1, [1, 3 << 20, 3, 1 << 20, 1, 2 << 20]);
    let file: serde_json::Value = serde_json::from_slice(&written("speedscope", &profile)).unwrap();
    let shown: Vec<(&str, &str, u64)> = file["profiles"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|profile| {
            Some((
                profile["name"].as_str()?,
                profile["unit"].as_str()?,
                profile["endValue"].as_u64()?,
            ))
        })
        .filter(|(_, unit, _)| *unit == "bytes")
        .collect();
    let merged = |name, amount| (name, "bytes", amount);
    let expected = [
        merged("all threads, merged: alloc_bytes", 3 << 20),
        merged("all threads, merged: live_bytes", 1 << 20),
        merged("all threads, merged: peak_bytes", 2 << 20),
    ];
    assert_eq!(shown, expected);
}

#[test]
fn values_go_through_speedscope() {
    let file: serde_json::Value = serde_json::from_slice(&written("speedscope", &weighted())).unwrap();
    let profiles = file["profiles"].as_array().unwrap();
    let shown: Vec<_> = profiles
        .iter()
        .map(|profile| {
            let weights = profile["weights"].as_array().unwrap().iter();
            let sum: u64 = weights.map(|weight| weight.as_u64().unwrap()).sum();
            (
                profile["name"].as_str().unwrap(),
                profile["unit"].as_str().unwrap(),
                sum,
            )
        })
        .collect();
    let expected = [
        ("all threads, merged", "none", 4),
        ("all threads, merged: wall", "nanoseconds", 12_504_077),
        ("all threads, merged: live_bytes", "bytes", 1 << 40),
        ("all threads, merged: cache-misses", "none", 9),
    ];
    assert_eq!(shown[..4], expected);
}

#[test]
fn values_go_through_firefox() {
    let weights = |profile: &Profile| {
        let file: serde_json::Value = serde_json::from_slice(&written("firefox", profile)).unwrap();
        let threads = file["threads"].as_array().unwrap();
        let of = |thread: &serde_json::Value| {
            let samples = &thread["samples"];
            (
                samples["weightType"].as_str().unwrap().to_string(),
                samples["weight"].clone(),
            )
        };
        threads.iter().map(of).collect::<Vec<_>>()
    };
    let ms = |weights: serde_json::Value| ("tracing-ms".to_string(), weights);
    let expected = [
        ms(serde_json::json!([10, 2.5])),
        ms(serde_json::json!([0.000077])),
        ms(serde_json::json!([0.004])),
    ];
    assert_eq!(weights(&by_value(weighted(), 1)), expected);
    let counted = |weights: serde_json::Value| ("samples".to_string(), weights);
    assert_eq!(weights(&weighted())[0], counted(serde_json::Value::Null));
    let bytes = weights(&by_value(weighted(), 2));
    assert_eq!(
        bytes.last().unwrap(),
        &("bytes".to_string(), serde_json::json!([1u64 << 40]))
    );
}

#[test]
fn text_shows_the_selected_value() {
    let text = |format: &str, profile: &Profile| String::from_utf8(written(format, profile)).unwrap();
    let wall = by_value(calls(), 1);
    let stacks = [
        "main (/srv/app.py:3) 5000\n",
        "main (/srv/app.py:3);Job.work (/srv/app.py:9) 70000000\n",
        "main (/srv/app.py:3);Job.work (/srv/app.py:9);read (libc.so.6) 3000000000\n",
    ];
    let stacks = stacks.concat();
    assert_eq!(text("collapsed", &wall), stacks);
    let svg = text("svg", &wall);
    assert!(svg.contains("3.07 s wall") && svg.contains("<title>main (app.py:3) (3,070 ms, 100.00%)</title>"));
}

/// The values that the page can show: those that differ from the count.
#[test]
fn pages_contain_values() {
    for (profile, values) in [
        (calls(), vec!["calls", "wall", "cpu"]),
        (by_value(calls(), 1), vec!["wall", "calls", "cpu"]),
        (golden(), vec!["samples"]),
    ] {
        let page = String::from_utf8(written("html", &profile)).unwrap();
        let packed = page.split("id=\"profile\">").nth(1).unwrap().split('<').next().unwrap();
        let packed = BASE64_STANDARD.decode(packed).unwrap();
        let mut bytes = Vec::new();
        flate2::read::ZlibDecoder::new(&packed[..])
            .read_to_end(&mut bytes)
            .unwrap();
        let length = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
        let head: serde_json::Value = serde_json::from_slice(&bytes[4..4 + length]).unwrap();
        let names: Vec<_> = head["values"]
            .as_array()
            .unwrap()
            .iter()
            .map(|value| &value["name"])
            .collect();
        assert_eq!(names, values);
    }
}

/// Samples with their CPU time need no more space than samples alone: it follows from them.
#[test]
fn derived_values_take_no_space() {
    let with = golden();
    let mut without = golden();
    without.values = Vec::new();
    for format in nativeprof::export::FORMATS {
        let (with, without) = (written(format.name, &with).len(), written(format.name, &without).len());
        assert!(
            with <= without + without / 10,
            "{}: {with} bytes, {without} without",
            format.name
        );
    }
}

/// With malformed values, the reader neither fails on optional ones nor allocates memory for them.
#[test]
fn malformed_values_are_left_out() {
    let text = r#"{"count":2,"children":{},"values":{"x":7,"wall_ns":9,"cpu_ns":-1,"y":{}},"nativeprof":{"value_types":[
        {"name":"calls","unit":"count","per_count":1},{"name":"wall","unit":"nanoseconds"},{"name":"wall"},7,
        {"name":"wall","unit":"nanoseconds","per_count":3},{"name":"cpu","unit":"parsecs","per_count":-1}]}}"#;
    let profile = json::read(text.as_bytes()).unwrap();
    let types: Vec<_> = profile.value_types().iter().map(|value| value.kind.key()).collect();
    assert_eq!(types, ["calls", "wall_ns", "wall", "cpu"]);
    assert_eq!(profile.amounts(1), [9]);
    assert_eq!(profile.values[3].amounts, Amounts::PerCount(0));
    let many: Vec<String> = (0..64).map(|n| format!("{{\"name\":\"{n}\"}}")).collect();
    let nodes = "\"\":{},".repeat(100_000);
    let text = format!(
        "{{\"count\":1,\"nativeprof\":{{\"value_types\":[{}]}},\"children\":{{{nodes}\"\":{{}}}}}}",
        many.join(",")
    );
    assert!(json::read(text.as_bytes()).unwrap_err().reason.contains("value types"));
}
