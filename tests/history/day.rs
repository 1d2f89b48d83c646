//! A synthetic host: some services, each with processes of its own, whose stacks are like those of real programs: few
//! are hot, many are rare.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use nativeprof::export::otlp::{SegmentInfo, SegmentProcess, encode_segment};
use nativeprof::history::{Limits, Writer};
use nativeprof::profile::build::Builder;
use nativeprof::profile::model::{Frame, Meta, Quality};
use nativeprof::profile::values::{Value, ValueType};

/// When the first segment begins, s since the Unix epoch: 2026-11-28T03:14:00Z.
pub const START: u64 = 1_795_835_640;
const SECOND: u64 = 1_000_000_000;

/// How much there is in each minute.
#[derive(Clone, Copy)]
pub struct Host {
    pub processes: u32,
    pub services: u32,
    pub samples: u32,
}

/// Random numbers that are the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 33) % u64::from(end)) as u32
    }

    /// Small numbers more often than large ones.
    fn skewed(&mut self, end: u32) -> u32 {
        let power = self.below(end.ilog2() + 1);
        self.below(end.min(1 << (power + 1)))
    }
}

/// Writes so many minutes, in each of which samples are taken `rate(minute)` times a second.
pub fn write(path: &Path, host: Host, minutes: u64, rate: impl Fn(u64) -> u64) {
    let mut writer = Writer::open(path, Limits::default()).expect("a writer");
    for minute in 0..minutes {
        let start = UNIX_EPOCH + Duration::from_secs(START + minute * 60);
        let message = segment(host, minute, rate(minute));
        writer
            .write(start, Duration::from_secs(60), &message)
            .expect("a segment");
    }
}

/// The segment of a minute.
pub fn segment(host: Host, minute: u64, rate: u64) -> Vec<u8> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (minute + 1));
    let mut builder = Builder::new(&[ValueType::SAMPLES]);
    let mut process_of_sample = Vec::new();
    let mut taken = vec![0; host.processes as usize];
    for sample in 0..host.samples {
        let process = random.skewed(host.processes);
        let time = u64::from(sample) * 60 * SECOND / u64::from(host.samples) + u64::from(random.below(1_000_000));
        let service = process % host.services;
        // The stack follows from its number: outer calls are shared by many.
        let mut stack_number = random.skewed(400);
        let depth = 12 + stack_number % 25;
        let stack: Vec<_> = (0..depth)
            .map(|level| {
                let which = if level < depth / 2 {
                    level
                } else {
                    level * 7 + stack_number
                };
                stack_number /= if level % 8 == 7 { 2 } else { 1 };
                (builder.frame(function(service, which)), level * 3 + which % 3)
            })
            .collect();
        builder.sample(time, (1000 + process, 1000 + process), &stack, &[1]);
        process_of_sample.push(process);
        taken[process as usize] += 1;
    }
    let mut profile = builder.finish(Meta {
        version: env!("CARGO_PKG_VERSION").into(),
        start: (START + minute * 60) as f64,
        duration: 60.0,
        rate,
        event: "cpu-clock".into(),
        backend: "ebpf".into(),
        ..Meta::default()
    });
    profile.values.push(Value::per_count(ValueType::CPU, SECOND / rate));
    let quality = |taken: u64| Quality {
        expected: taken,
        taken,
        exact: taken - taken / 100,
        partial: taken / 100,
        reasons: BTreeMap::from([("no unwind information".into(), taken / 100)]),
        ..Quality::default()
    };
    profile.meta.quality = quality(host.samples.into());
    let resource = |service| {
        let attributes = [
            ("container.id", format!("{service:064x}")),
            ("host.name", "host-1".into()),
            ("service.name", format!("service-{service}")),
        ];
        attributes.map(|(key, value)| (key.to_string(), value)).into()
    };
    let processes = (0..host.processes).zip(&taken).map(|(process, taken)| SegmentProcess {
        pid: 1000 + process,
        name: if process % 4 == 0 { "nginx" } else { "python3.13" }.into(),
        resource: process % host.services,
        quality: quality(*taken),
    });
    let info = SegmentInfo {
        resources: (0..host.services).map(resource).collect(),
        processes: processes.collect(),
        process_of_sample,
        counts: BTreeMap::from([("processes.not_permitted".into(), 1)]),
    };
    encode_segment(&profile, &info)
}

fn function(service: u32, which: u32) -> Frame {
    // Libraries are shared by all services.
    if which.is_multiple_of(3) {
        let name = format!("_library_function_{which}");
        return Frame::native(name, format!("lib{}.so.6", which % 7), u64::from(which) << 8);
    }
    let file = format!("/srv/service-{service}/app/module_{}.py", which % 40);
    Frame::python(
        format!("function_{which}"),
        format!("Class{}.function_{which}", which % 9),
        file,
        which,
    )
}
