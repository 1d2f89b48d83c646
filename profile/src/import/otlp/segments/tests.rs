use super::*;
use crate::build::Builder;
use crate::export::otlp::{SegmentInfo, SegmentProcess, encode_segment};
use crate::import;

const SECOND: u64 = 1_000_000_000;
/// When segments begin, s.
const START: u64 = 1_795_835_640;

/// A minute with a sample each second, in turns of three processes of two services, at a rate.
fn segment(minute: u64, rate: u64) -> (Profile, SegmentInfo) {
    let mut builder = Builder::new(&[ValueType::SAMPLES]);
    let frames = ["f", "g", "h"].map(|name| builder.frame(Frame::python(name, "", "app.py", 1)));
    for second in 0..60u32 {
        let stack = [(frames[0], 2), (frames[second as usize % 3], second)];
        builder.sample(u64::from(second) * SECOND, (second % 3 + 1, 1), &stack, &[1]);
    }
    let mut profile = builder.finish(Meta {
        start: (START + minute * 60) as f64,
        duration: 60.0,
        rate,
        event: "cpu-clock".into(),
        ..Meta::default()
    });
    profile.values.push(Value::per_count(ValueType::CPU, SECOND / rate));
    let quality = |taken, lost| Quality {
        expected: taken + lost,
        taken,
        exact: taken - 1,
        repaired: 0,
        partial: 1,
        lost,
        reasons: BTreeMap::from([("gone".into(), 1)]),
    };
    profile.meta.quality = quality(60, 5);
    let resource = |service: &str, container: &str| {
        let attributes = [
            ("host.name", "h"),
            ("service.name", service),
            ("container.id", container),
        ];
        attributes
            .map(|(key, value)| (key.to_string(), value.to_string()))
            .into()
    };
    let process = |pid: u32, name: &str, resource| SegmentProcess {
        pid,
        name: name.into(),
        resource,
        quality: quality(20, 1),
    };
    let info = SegmentInfo {
        resources: vec![resource("shop", "abc1"), resource("mail", "def2")],
        processes: vec![process(1, "python", 0), process(2, "nginx", 0), process(3, "python", 1)],
        process_of_sample: (0..60).map(|second| second % 3).collect(),
        counts: BTreeMap::from([("refused.permission".into(), 2)]),
    };
    (profile, info)
}

fn message(minute: u64, rate: u64) -> Vec<u8> {
    let (profile, info) = segment(minute, rate);
    encode_segment(&profile, &info)
}

/// The same however the segments are divided.
#[track_caller]
fn sum(selection: Selection, messages: &[Vec<u8>]) -> Profile {
    let of = |messages: &[Vec<u8>]| {
        let mut segments = Segments::new(selection.clone());
        for message in messages {
            segments.add(message).unwrap();
        }
        segments
    };
    let whole = of(messages).finish();
    for at in 0..messages.len() {
        let (first, second) = messages.split_at(at);
        let mut all = of(first);
        all.add_all(of(second)).unwrap();
        assert_eq!(all.finish(), whole, "{at} of {}", messages.len());
    }
    whole
}

/// Samples, and ns of CPU time.
fn totals(profile: &Profile) -> (u64, u64) {
    let time = profile
        .find_value("cpu_ns")
        .map_or(0, |value| profile.total_amount(value));
    (profile.total_amount(0), time)
}

#[test]
fn time_is_the_sum_of_each_segments_own() {
    let messages = [message(0, 20), message(1, 20), message(2, 5)];
    let same = sum(Selection::default(), &messages[..2]);
    assert_eq!(totals(&same), (120, 6 * SECOND));
    assert_eq!(
        (same.meta.rate, same.meta.duration, &*same.meta.event),
        (20, 120.0, "cpu-clock")
    );
    assert_eq!(same.values[1], Value::per_count(ValueType::CPU, SECOND / 20));
    let all = sum(Selection::default(), &messages);
    assert_eq!(totals(&all), (180, 6 * SECOND + 12 * SECOND));
    assert_eq!((all.meta.rate, all.meta.start), (0, START as f64));
    let quality = &all.meta.quality;
    assert_eq!((quality.expected, quality.taken, quality.lost), (195, 180, 15));
    assert_eq!(quality.reasons["gone"], 3);
}

/// What is not the same for all segments is mixed, and what one of them does not say is unknown.
#[test]
fn the_machine_is_that_of_all_segments() {
    let on = |minute, cpu: &str, cores| {
        let (mut profile, info) = segment(minute, 20);
        profile.meta.machine = Machine {
            cpu: cpu.into(),
            cores,
            kernel: "6.1.0".into(),
            governor: "performance".into(),
        };
        encode_segment(&profile, &info)
    };
    let machine = |messages: &[Vec<u8>]| sum(Selection::default(), messages).meta.machine;
    let [a, b] = [on(0, "Fast", 4), on(1, "Fast", 4)];
    let same = machine(&[a.clone(), b.clone()]);
    assert_eq!((&*same.cpu, same.cores), ("Fast", 4));
    assert_eq!((&*same.kernel, &*same.governor), ("6.1.0", "performance"));
    let moved = machine(&[a.clone(), b, on(2, "Slow", 2)]);
    assert_eq!((&*moved.cpu, moved.cores, &*moved.kernel), ("mixed", 0, "6.1.0"));
    // A segment of an earlier version.
    assert_eq!(machine(&[a, message(1, 20)]), Machine::default());
    // Of a selected service it is the same.
    let selection = Selection {
        service: Some("shop".into()),
        ..Selection::default()
    };
    let long = sum(selection, &[on(0, &"é".repeat(5000), 4)]).meta.machine.cpu;
    assert_eq!(long.chars().count(), 120);
}

#[test]
fn samples_are_selected() {
    let messages = [message(0, 20), message(1, 20)];
    let with = |set: fn(&mut Selection)| {
        let mut selection = Selection::default();
        set(&mut selection);
        let profile = sum(selection, &messages);
        (totals(&profile).0, profile.meta.quality.taken)
    };
    assert_eq!(with(|selection| selection.service = Some("shop".into())), (80, 80));
    assert_eq!(with(|selection| selection.container = Some("def".into())), (40, 40));
    assert_eq!(with(|selection| selection.container = Some(String::new())), (0, 0));
    assert_eq!(with(|selection| selection.comm = Some("python".into())), (80, 80));
    assert_eq!(with(|selection| selection.pid = Some(2)), (40, 40));
    let both = |selection: &mut Selection| {
        selection.service = Some("shop".into());
        selection.comm = Some("python".into());
    };
    assert_eq!(with(both), (40, 40));
    // Half a segment: its quality is not known.
    assert_eq!(with(|selection| selection.from = (START + 30) * SECOND), (90, 60));
    assert_eq!(with(|selection| selection.to = (START + 61) * SECOND), (61, 60));
    assert_eq!(with(|selection| selection.to = START * SECOND), (0, 0));
}

#[test]
fn services_are_nodes() {
    let profile = sum(Selection::default(), &[message(0, 20)]);
    let names: Vec<&str> = (profile.nodes.iter())
        .filter(|node| node.parent == 0)
        .map(|node| &*profile.frames[node.frame as usize].name)
        .collect();
    assert_eq!(names, ["root", "shop", "mail"]);
    let (mut segments, message) = (Segments::new(Selection::default()), message(0, 20));
    segments.add(&message).unwrap();
    segments.add(&message).unwrap();
    assert_eq!(segments.counts()["refused.permission"], 4);
}

/// The file alone is a profile, too, with what is known of the whole segment.
#[test]
fn a_segment_is_read_as_a_file() {
    let profile = import::read(&message(0, 20)).unwrap();
    assert_eq!(totals(&profile), (60, 3 * SECOND));
    assert_eq!((profile.meta.quality.lost, profile.meta.rate), (5, 20));
    assert!(profile.frames.iter().any(|frame| frame.name == "nginx 2"));
}

#[test]
fn nothing_of_a_damaged_segment_is_counted() {
    let whole = message(0, 20);
    for length in (0..whole.len()).step_by(7) {
        let mut segments = Segments::new(Selection::default());
        let is_read = segments.add(&whole[..length]).is_ok();
        let profile = segments.finish();
        assert!(
            is_read || totals(&profile) == (0, 0) && profile.meta == Meta::default(),
            "{length}"
        );
    }
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x41;
        let _ = Segments::new(Selection::default()).add(&damaged);
    }
}

#[test]
fn newer_segments_and_those_of_others_are_refused() {
    let needle = otlp::SEGMENT_VERSION.as_bytes();
    let mut newer = message(0, 20);
    let at = newer.windows(needle.len()).position(|bytes| bytes == needle).unwrap() + needle.len();
    // The field `value`, its length, the field `int_value`, and the number.
    assert_eq!(newer[at..at + 4], [0x12, 2, 0x18, 1]);
    newer[at + 3] = 2;
    let reason = Segments::new(Selection::default()).add(&newer).unwrap_err().reason;
    assert!(reason.contains("version 2"), "{reason}");
    let (profile, _) = segment(0, 20);
    let other = crate::export::otlp::encode(&profile, &[]);
    let mut foreign = other.clone();
    let at = foreign.windows(10).position(|bytes| bytes == b"nativeprof").unwrap();
    foreign[at] = b'm';
    assert!(Segments::new(Selection::default()).add(&foreign).is_err());
}
