use super::*;
use crate::measure::Measure;

fn frame(kind: FrameKind, name: &str, source: &str) -> Frame {
    Frame {
        kind,
        name: name.into(),
        qualname: String::new(),
        filename: String::new(),
        first_line: 0,
        address: 0,
        module: String::new(),
        source: source.into(),
    }
}

/// `f` with `self_count` samples at line 3, and a callee with `below` samples; the timeline has one entry for each of the two.
fn profile(command: &str, start: f64, self_count: u64, below: u64, callee: &str) -> Profile {
    let mut root = Node::new(0, 0);
    root.count = self_count + below;
    let f = Node {
        count: self_count + below,
        lines: BTreeMap::from([(3, self_count), (4, below)]),
        self_lines: BTreeMap::from([(3, self_count)]),
        first_seen_line: 3,
        ..Node::new(1, 0)
    };
    let g = Node {
        count: below,
        lines: BTreeMap::from([(9, below)]),
        first_seen_line: 9,
        ..Node::new(2, 1)
    };
    let sample = |time, node| TimelineSample {
        time,
        pid: 7,
        tid: 8,
        node,
    };
    Profile {
        meta: Meta {
            rate: 100,
            command: command.into(),
            start,
            duration: 2.0,
            pid: 7,
            quality: Quality {
                taken: self_count + below,
                reasons: BTreeMap::from([("gone".into(), self_count)]),
                ..Quality::default()
            },
            threads: vec![(7, 8, command.into())],
            ..Meta::default()
        },
        frames: vec![
            frame(FrameKind::Root, "root", ""),
            frame(FrameKind::Native, "f", command),
            frame(FrameKind::Native, callee, ""),
        ],
        nodes: vec![root, f, g],
        timeline: vec![sample(1_000_000_000, 1), sample(1_500_000_000, 2)],
        ..Profile::default()
    }
}

#[test]
fn values_are_united() {
    use crate::build::Builder;
    use crate::values::{Amounts, ValueType};

    let sampled = |rate, start| {
        let mut p = profile("a", start, 3, 4, "g");
        p.meta.rate = rate;
        p.values = Measure::of_event("cpu-clock", rate).values();
        p
    };
    let shown = |all: &Profile| {
        let types = all.value_types().iter().enumerate();
        types
            .map(|(at, value)| (value.kind.key(), value.is_per_count(), all.amounts(at)))
            .collect::<Vec<_>>()
    };
    let of = |key: &str, per_count, amounts: &[u64]| (key.to_string(), per_count, amounts.to_vec());
    let all = sum(&[sampled(100, 50.0), sampled(100, 51.0)]);
    let cpu = [140_000_000, 140_000_000, 80_000_000];
    assert_eq!(
        shown(&all),
        [of("samples", true, &[14, 14, 8]), of("cpu_ns", true, &cpu)]
    );
    // At ten times the rate a sample is a tenth of the time.
    let all = sum(&[sampled(100, 50.0), sampled(1000, 51.0)]);
    let cpu = [77_000_000, 77_000_000, 44_000_000];
    assert_eq!(
        shown(&all),
        [of("samples", true, &[14, 14, 8]), of("cpu_ns", false, &cpu)]
    );
    let amounts: Vec<u64> = (0..4).map(|sample| all.sample_amount(1, sample)).collect();
    assert_eq!(amounts, [10_000_000, 10_000_000, 1_000_000, 1_000_000]);
    // Calls and samples.
    let mut builder = Builder::new(&[ValueType::CALLS, ValueType::CPU]);
    let f = builder.frame(frame(FrameKind::Native, "f", ""));
    builder.add(&[(f, 0)], &[2, 500]);
    let calls = builder.finish(Meta::default());
    let all = sum(&[sampled(100, 50.0), calls.clone()]);
    let expected = [
        of("count", true, &[9, 9, 4]),
        of("samples", false, &[7, 7, 4]),
        of("cpu_ns", false, &[70_000_500, 70_000_500, 40_000_000]),
        of("calls", false, &[2, 2, 0]),
    ];
    assert_eq!(shown(&all), expected);
    assert_eq!(
        shown(&sum(&[all, calls]))[3],
        of("calls", false, &[4, 4, 0]),
        "and again"
    );
    // Sums of values that one profile does not have.
    let plain = Profile {
        values: Vec::new(),
        ..sampled(100, 50.0)
    };
    let all = sum(&[plain, sampled(100, 51.0)]);
    assert_eq!(
        shown(&all)[1],
        of("cpu_ns", false, &[70_000_000, 70_000_000, 40_000_000])
    );
    assert!(matches!(all.values[0].amounts, Amounts::PerCount(1)));
}

fn sum(profiles: &[Profile]) -> Profile {
    let named: Vec<_> = profiles.iter().map(|p| (p.meta.command.clone(), p.clone())).collect();
    combine(&named)
}

#[test]
fn trees_are_summed() {
    let all = sum(&[
        profile("a", 50.0, 3, 4, "g"),
        profile("b", 51.0, 5, 6, "g"),
        profile("c", 52.0, 0, 1, "h"),
    ]);
    let counts: Vec<_> = all
        .nodes
        .iter()
        .map(|n| (all.frames[n.frame as usize].name.as_str(), n.count))
        .collect();
    assert_eq!(counts, [("root", 19), ("f", 19), ("g", 10), ("h", 1)]);
    assert_eq!(all.nodes[1].lines, BTreeMap::from([(3, 8), (4, 11)]));
    let self_counts = all.self_counts()[1];
    assert_eq!(*all.nodes[1].self_lines_of(self_counts), BTreeMap::from([(3, 8)]));
    assert_eq!(*all.nodes[2].self_lines_of(10), BTreeMap::from([(9, 10)]));
    assert_eq!((all.meta.quality.taken, all.meta.quality.reasons["gone"]), (19, 8));
    assert_eq!(
        (all.meta.rate, all.meta.pid, all.meta.command.as_str()),
        (100, 7, "a, b, c")
    );
    let parts: Vec<_> = all
        .meta
        .merged_from
        .iter()
        .map(|part| (part.name.as_str(), part.samples))
        .collect();
    assert_eq!(parts, [("a", 7), ("b", 11), ("c", 1)]);
}

#[test]
fn one_profile_stays_as_it_is() {
    let one = profile("a", 50.0, 3, 4, "g");
    let all = sum(std::slice::from_ref(&one));
    assert_eq!(
        (&all.nodes, &all.frames, &all.timeline),
        (&one.nodes, &one.frames, &one.timeline)
    );
    assert_eq!(
        sum(std::slice::from_ref(&all)).meta.merged_from,
        all.meta.merged_from,
        "no parts of parts"
    );
}

#[test]
fn timelines_lie_side_by_side() {
    let times = |all: &Profile| {
        all.timeline
            .iter()
            .map(|sample| (sample.time / 1_000_000, sample.pid))
            .collect::<Vec<_>>()
    };
    // The same process, one recording after the other.
    let all = sum(&[profile("a", 50.0, 1, 1, "g"), profile("a", 53.0, 1, 1, "g")]);
    assert_eq!(times(&all), [(1000, 7), (1500, 7), (4000, 7), (4500, 7)]);
    assert_eq!((all.meta.start, all.meta.duration), (50.0, 5.0));
    // On two machines at once: two processes of one number.
    let all = sum(&[profile("a", 50.0, 1, 1, "g"), profile("a", 50.2, 1, 1, "g")]);
    assert_eq!(times(&all), [(1000, 7), (1200, FOREIGN), (1500, 7), (1700, FOREIGN)]);
    assert_eq!(all.meta.threads.len(), 2);
    // Years apart, or at unknown times.
    for start in [5e8, 0.0] {
        let all = sum(&[profile("a", 1e9, 1, 1, "g"), profile("b", start, 1, 1, "g")]);
        assert_eq!(times(&all), [(1000, 7), (1000, FOREIGN), (1500, 7), (1500, FOREIGN)]);
        assert_eq!(all.meta.duration, 2.0);
    }
}

#[test]
fn accounts_of_memory_are_kept() {
    let recorded = |pid, start| {
        let mut profile = Profile::default();
        profile.meta.start = start;
        profile.meta.duration = 1.0;
        profile.meta.memory = vec![ResidentMemory {
            pid,
            began: 3,
            peak: Some(MemoryPeak { bytes: 9, time: 5 }),
            ..ResidentMemory::default()
        }];
        profile
    };
    let all = combine(&[("a".into(), recorded(7, 100.0)), ("b".into(), recorded(8, 101.0))]);
    let accounts: Vec<_> = all
        .meta
        .memory
        .iter()
        .map(|of| (of.pid, of.began, of.peak.map(|peak| peak.time)))
        .collect();
    assert_eq!(accounts, [(7, 3, Some(5)), (8, 1_000_000_003, Some(1_000_000_005))]);
}

#[test]
fn lags_of_all_are_kept() {
    let recording = |start, task: &str| {
        let mut profile = profile("a", start, 1, 1, "g");
        profile.meta.lags = vec![Lag {
            pid: 7,
            tid: 8,
            start: 77,
            time: 1_200_000_000,
            length: 60_000_000,
            task: task.into(),
            ..Lag::default()
        }];
        profile
    };
    let lags = |all: &Profile| {
        let rows = all.meta.lags.iter();
        rows.map(|lag| (lag.task.clone(), lag.time / 1_000_000, lag.pid, lag.start))
            .collect::<Vec<_>>()
    };
    let all = sum(&[recording(53.0, "late"), recording(50.0, "early")]);
    assert_eq!(
        lags(&all),
        [("early".into(), 1200, 7, 77), ("late".into(), 4200, 7, 77)]
    );
    // At the same time, on two machines.
    let all = sum(&[recording(50.0, "here"), recording(50.5, "there")]);
    assert_eq!(
        lags(&all),
        [("here".into(), 1200, 7, 77), ("there".into(), 1700, FOREIGN, 77)]
    );
}

#[test]
fn what_differs_is_not_known() {
    let mut other = profile("b", 51.0, 5, 6, "g");
    other.meta.rate = 999;
    other.meta.pid = 9;
    let all = sum(&[profile("a", 50.0, 3, 4, "g"), other]);
    assert_eq!((all.meta.rate, all.meta.pid), (0, 0));
    assert_eq!(combine(&[]).nodes.len(), 0);
}
