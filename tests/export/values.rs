//! Value types through the formats that hold them.

use nativeprof::export::json;
use nativeprof::tree::build::Builder;
use nativeprof::tree::profile::{Frame, Meta, Profile};
use nativeprof::tree::values::{Amounts, Unit, ValueType};

use super::written;

/// What a tracer of calls makes: calls, wall and CPU time, no timeline.
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

/// What whole-time sampling makes: each sample has its own weight; one has no time.
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
        // Dask reads calls or samples; a value that is not there is not written.
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
        work["children"]["read;<low-level>;0x1230"]["values"],
        serde_json::json!({"wall_ns": 3_000_000_000u64})
    );
}

/// Whatever stands for values, the reader neither fails on what it may leave out nor takes memory for it.
#[test]
fn values_that_make_no_sense_are_left_out() {
    let text = r#"{"count":2,"values":{"x":7,"wall_ns":9,"cpu_ns":-1,"y":{}},"nativeprof":{"value_types":[
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
        "{{\"nativeprof\":{{\"value_types\":[{}]}},\"children\":{{{nodes}\"\":{{}}}}}}",
        many.join(",")
    );
    assert!(json::read(text.as_bytes()).unwrap_err().reason.contains("value types"));
}
