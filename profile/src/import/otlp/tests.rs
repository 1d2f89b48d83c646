//! What is written is read again, and files of other tools.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use prost::Message;

use super::*;
use crate::build::Builder;
use crate::export::otlp::encode;
use crate::json;
use crate::labels::LabelSet;
use crate::model::{Frame, FrameKind, Node, StopSummary};
use crate::otlp::messages::{
    AnyValue, Function, KeyValueAndUnit, Line, Link, Location, OtlpProfile, ProfilesData, ProfilesDictionary,
    ResourceProfiles, ScopeProfiles, Stack,
};
use crate::values::Amounts;
use crate::view::shown_name;

fn golden() -> Profile {
    json::read(include_bytes!("../../../../fixtures/golden/profile.json")).unwrap()
}

#[track_caller]
fn again(profile: &Profile) -> Profile {
    let bytes = encode(profile, &[]);
    assert!(is(&bytes));
    assert!(!pprof::is(&bytes));
    read(&bytes).unwrap()
}

/// Frames of a stack as text, outermost first.
type Shown = Vec<(FrameKind, String, String, String, u32, u64)>;

/// What is known of a frame. Where Python's name and its qualified name are the same, the latter need not be there.
fn shown(frame: &Frame) -> (FrameKind, String, String, String, u32, u64) {
    let name = if frame.qualname.is_empty() {
        shown_name(frame)
    } else {
        (&frame.qualname).into()
    };
    let file = if frame.kind == FrameKind::Python {
        &frame.filename
    } else {
        &frame.source
    };
    (
        frame.kind,
        name.into_owned(),
        file.clone(),
        frame.module.clone(),
        frame.first_line,
        frame.address,
    )
}

fn stack_of(profile: &Profile, mut node: u32) -> Shown {
    let mut stack = Vec::new();
    while node != 0 {
        let Node { frame, parent, .. } = &profile.nodes[node as usize];
        stack.push(shown(&profile.frames[*frame as usize]));
        node = *parent;
    }
    stack.reverse();
    stack
}

/// Self amounts of all value types by stack.
fn amounts(profile: &Profile) -> BTreeMap<Shown, Vec<u64>> {
    let types = profile.value_types().len();
    let mut sums: BTreeMap<Shown, Vec<u64>> = BTreeMap::new();
    for value in 0..types {
        for (node, amount) in (0u32..).zip(profile.self_amounts(value)) {
            if amount > 0 {
                sums.entry(stack_of(profile, node)).or_insert_with(|| vec![0; types])[value] += amount;
            }
        }
    }
    sums
}

/// A sample: time, process, thread, stack, amounts, labels.
type Timed = (u64, u32, u32, Shown, Vec<u64>, LabelSet);

/// Samples with a time, in an order of their own.
fn timed(profile: &Profile) -> Vec<Timed> {
    let types = profile.value_types().len();
    let samples = profile.timeline.iter().enumerate();
    let mut samples: Vec<_> = samples
        .map(|(at, sample)| {
            let amounts = (0..types).map(|value| profile.sample_amount(value, at)).collect();
            let labels = profile.labels.of(at).to_vec();
            (
                sample.time,
                sample.pid,
                sample.tid,
                stack_of(profile, sample.node),
                amounts,
                labels,
            )
        })
        .collect();
    samples.sort();
    samples
}

fn kinds(profile: &Profile) -> Vec<ValueType> {
    profile.value_types().iter().map(|value| value.kind.clone()).collect()
}

/// Equal maps, or one of the differences: the whole of them is long.
#[track_caller]
fn assert_same<T: Ord + Debug>(found: impl IntoIterator<Item = T>, expected: impl IntoIterator<Item = T>) {
    let [found, expected] = [BTreeSet::from_iter(found), BTreeSet::from_iter(expected)];
    let (more, less) = (found.difference(&expected).next(), expected.difference(&found).next());
    assert_eq!((more, less), (None, None), "only found, only expected");
}

/// All but what docs/formats.md says is not in such a file.
#[track_caller]
fn round_trip(profile: &Profile) {
    let found = again(profile);
    assert_eq!(kinds(&found), kinds(profile));
    assert_same(amounts(&found), amounts(profile));
    assert_eq!(found.timeline.len(), profile.timeline.len());
    assert_same(timed(&found), timed(profile));
    let of_period = |profile: &Profile| profile.values.get(1).filter(|value| value.is_per_count()).cloned();
    assert_eq!(of_period(&found), of_period(profile));
    let (found, meta) = (&found.meta, &profile.meta);
    assert_eq!(found.quality, meta.quality);
    let text =
        |meta: &Meta| [&meta.version, &meta.event, &meta.backend, &meta.command, &meta.python].map(String::clone);
    assert_eq!(text(found), text(meta));
    assert_eq!(
        (found.rate, found.pid, found.stopped),
        (meta.rate, meta.pid, meta.stopped)
    );
    assert_eq!(found.threads, meta.threads);
    let times = |meta: &Meta| {
        [
            meta.start,
            meta.duration,
            meta.profiler_cpu,
            meta.sampling_cpu,
            meta.target_cpu,
        ]
    };
    assert_eq!(times(found), times(meta));
}

/// With every kind of frame, odd names, and samples with and without a time.
#[test]
fn the_golden_profile_is_read_again() {
    let mut profile = golden();
    round_trip(&profile);
    profile.meta.modules[0].instructions.clear();
    assert_eq!(again(&profile).meta.modules, profile.meta.modules);
    profile.timeline.clear();
    let found = again(&profile);
    assert_same(amounts(&found), amounts(&profile));
    assert_eq!(found.meta.threads, []);
}

/// The next of a series of numbers below `end`.
fn next(state: &mut u64, end: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state % end
}

fn random_profile(seed: u64) -> Profile {
    let state = &mut seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    let types = [
        &[ValueType::SAMPLES][..],
        &[ValueType::SAMPLES, ValueType::WALL, ValueType::OFF_CPU],
        &[ValueType::ALLOCS, ValueType::ALLOC_BYTES],
        &[ValueType::WALL, ValueType::CALLS],
    ];
    let types = types[next(state, 4) as usize];
    let mut builder = Builder::new(types);
    let kinds = [
        FrameKind::Kernel,
        FrameKind::Truncated,
        FrameKind::Task,
        FrameKind::Worker,
        FrameKind::State,
    ];
    let mut frames = Vec::new();
    for n in 0..20 {
        let name = format!("{n}\n<f>");
        let frame = match next(state, 4) {
            0 => Frame::python(
                format!("f{n}"),
                if n % 2 > 0 { format!("C.f{n}") } else { String::new() },
                "/a.py",
                n,
            ),
            1 => Frame {
                source: format!("{}.c", n % 3),
                ..Frame::native(name, format!("lib{}.so", n % 2), next(state, 1 << 40))
            },
            2 => Frame {
                module: ["", "lib0.so"][n as usize % 2].into(),
                address: next(state, u64::MAX),
                ..Frame::new(FrameKind::Unknown, "[unknown]")
            },
            _ => Frame::new(kinds[next(state, 5) as usize], name),
        };
        frames.push(builder.frame(frame));
    }
    let groups =
        [FrameKind::Process, FrameKind::Thread].map(|kind| builder.frame(Frame::new(kind, format!("{kind:?} 1"))));
    let has_groups = next(state, 2) as usize * 2;
    let mut labels = Vec::new();
    for _ in 0..next(state, 200) {
        let depth = next(state, 12);
        let calls = (0..depth).map(|_| (frames[next(state, 20) as usize], next(state, 3) as u32));
        let calls: Vec<_> = calls.collect();
        let stack: Vec<_> = groups[..has_groups]
            .iter()
            .map(|frame| (*frame, 0))
            .chain(calls)
            .collect();
        let count = if seed.is_multiple_of(3) { next(state, 5) } else { 1 };
        let of_types: Vec<u64> = std::iter::once(count)
            .chain((1..types.len()).map(|_| next(state, 3) * 1000))
            .collect();
        if next(state, 4) > 0 {
            // Some at the same time.
            let time = next(state, 50);
            builder.sample(time, (1, next(state, 2) as u32), &stack, &of_types);
            labels.push(next(state, 3) as u32);
        } else {
            builder.add(&stack, &of_types);
        }
    }
    let meta = Meta {
        start: seed as f64,
        duration: 1.5,
        rate: 99,
        ..Meta::default()
    };
    let mut profile = builder.finish(meta);
    let set = |labels: &[(&str, &str)]| labels.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let sets = [
        vec![],
        set(&[
            ("trace_id", trace),
            ("span_id", "00f067aa0ba902b7"),
            ("service.name", "x"),
        ]),
        set(&[("span", "a"), ("span", "b"), ("user", "7")]),
    ];
    profile.labels = Labels::new(&sets, labels);
    if types.len() == 1 && seed % 3 == 1 {
        profile.values.push(Value::per_count(ValueType::CPU, 10_101_010));
    }
    profile
}

#[test]
fn random_profiles_are_read_again() {
    for seed in 0..60 {
        round_trip(&random_profile(seed));
    }
}

#[test]
fn the_recording_is_read_again() {
    let mut profile = random_profile(5);
    profile.meta.stopped = Some(StopSummary {
        median_us: 33,
        max_us: 210,
    });
    profile.meta.target_cpu = 1.25;
    profile.meta.sampling_cpu = 0.125;
    round_trip(&profile);
    // A sample after the end does not make the recording longer.
    profile.meta.duration = 1e-9;
    assert_eq!(again(&profile).meta.duration, 1e-9);
}

/// A file as other tools write it, with two stacks: `strings` follow the empty one.
struct Foreign {
    data: ProfilesData,
}

impl Foreign {
    fn new() -> Foreign {
        let strings = [
            "",
            "samples",
            "count",
            "cpu",
            "nanoseconds",
            "main",
            "C.run",
            "/a.py",
            "libc.so",
            "vmlinux",
            "profile.frame.type",
            "cpython",
            "kernel",
            "native",
            "thread.id",
            "thread.name",
            "worker",
            "read",
        ];
        let at = |text: &str| strings.iter().position(|known| *known == text).unwrap() as i32;
        let attribute = |key: &str, value: AnyValue| KeyValueAndUnit {
            key_strindex: at(key),
            value: Some(value),
            unit_strindex: 0,
        };
        let function = |name: &str, file: &str, start_line: i64| Function {
            name_strindex: at(name),
            filename_strindex: at(file),
            start_line,
            ..Function::default()
        };
        let location = |mapping_index: i32, attribute: i32, function_index: i32, line: i64| Location {
            mapping_index,
            address: 0x7fff_0000 + line as u64,
            lines: if function_index > 0 {
                vec![Line { function_index, line }]
            } else {
                vec![]
            },
            attribute_indices: vec![attribute],
        };
        let mapping = |file: &str| Mapping {
            memory_limit: 4096,
            filename_strindex: at(file),
            ..Mapping::default()
        };
        let dictionary = ProfilesDictionary {
            mapping_table: vec![Mapping::default(), mapping("libc.so"), mapping("vmlinux")],
            location_table: vec![
                Location::default(),
                location(0, 1, 1, 12),
                location(1, 3, 2, 0),
                location(1, 3, 0, 0),
                location(2, 2, 2, 0),
            ],
            function_table: vec![
                Function::default(),
                function("C.run", "/a.py", 10),
                function("read", "", 0),
            ],
            link_table: vec![Link::default()],
            string_table: strings.map(String::from).to_vec(),
            attribute_table: vec![
                KeyValueAndUnit::default(),
                attribute("profile.frame.type", "cpython".into()),
                attribute("profile.frame.type", "kernel".into()),
                attribute("profile.frame.type", "native".into()),
                attribute("thread.id", 7.into()),
                attribute(
                    "thread.name",
                    AnyValue {
                        value: Some(Any::TextIndex(at("worker"))),
                    },
                ),
            ],
            stack_table: vec![
                Stack::default(),
                Stack {
                    location_indices: vec![4, 2, 1],
                },
                Stack {
                    location_indices: vec![3, 1],
                },
            ],
        };
        let profile = OtlpProfile {
            sample_type: Some(OtlpValueType {
                type_strindex: at("samples"),
                unit_strindex: at("count"),
            }),
            period_type: Some(OtlpValueType {
                type_strindex: at("cpu"),
                unit_strindex: at("nanoseconds"),
            }),
            period: 1000,
            time_unix_nano: 5_000_000_000,
            duration_nano: 2_000_000_000,
            samples: vec![
                OtlpSample {
                    stack_index: 1,
                    attribute_indices: vec![4, 5],
                    timestamps_unix_nano: vec![5_000_000_010, 5_000_000_030],
                    ..OtlpSample::default()
                },
                OtlpSample {
                    stack_index: 2,
                    timestamps_unix_nano: vec![5_000_000_020],
                    ..OtlpSample::default()
                },
            ],
            ..OtlpProfile::default()
        };
        let data = ProfilesData {
            resource_profiles: vec![ResourceProfiles {
                resource: None,
                scope_profiles: vec![ScopeProfiles {
                    scope: None,
                    profiles: vec![profile],
                }],
            }],
            dictionary: Some(dictionary),
        };
        Foreign { data }
    }

    fn profile(&mut self) -> &mut OtlpProfile {
        &mut self.data.resource_profiles[0].scope_profiles[0].profiles[0]
    }

    fn tables(&mut self) -> &mut ProfilesDictionary {
        self.data.dictionary.as_mut().unwrap()
    }

    fn read(&self) -> Result<Profile, Damage> {
        let bytes = self.data.encode_to_vec();
        assert!(is(&bytes));
        read(&bytes)
    }
}

#[test]
fn files_of_other_tools_are_read() {
    let profile = Foreign::new().read().unwrap();
    let period = Value::per_count(ValueType::CPU, 1000);
    assert_eq!((profile.nodes[0].count, profile.values.get(1)), (3, Some(&period)));
    let frame = |kind, name: &str, module: &str| Frame {
        module: module.into(),
        ..Frame::new(kind, name)
    };
    let run = shown(&Frame::python("run", "C.run", "/a.py", 10));
    let read = shown(&Frame::native("read", "libc.so", 0));
    let kernel = shown(&frame(FrameKind::Kernel, "read", "[kernel]"));
    let unknown = shown(&Frame::native("[unknown]", "libc.so", 0));
    let inner = vec![run.clone(), read, kernel];
    assert_eq!(
        timed(&profile),
        [
            (10, 0, 7, inner.clone(), vec![1, 1000], vec![]),
            (20, 0, 0, vec![run, unknown], vec![1, 1000], vec![]),
            (30, 0, 7, inner, vec![1, 1000], vec![]),
        ]
    );
    assert_eq!(profile.meta.threads, [(0, 7, "worker".to_string())]);
    assert_eq!((profile.meta.start, profile.meta.duration), (5.0, 2.0));
    assert_eq!(profile.nodes[1].lines, BTreeMap::from([(12, 3)]));
}

#[test]
fn several_processes_have_nodes() {
    let mut file = Foreign::new();
    file.data.resource_profiles.push(file.data.resource_profiles[0].clone());
    for (resource, (pid, name)) in file
        .data
        .resource_profiles
        .iter_mut()
        .zip([(7u64, "python"), (8, "java")])
    {
        let attribute = |key: &str, value: AnyValue| crate::otlp::messages::KeyValue {
            key: key.into(),
            value: Some(value),
            key_strindex: 0,
        };
        let attributes = vec![
            attribute(otlp::PID, pid.into()),
            attribute(otlp::EXECUTABLE, name.into()),
        ];
        resource.resource = Some(crate::otlp::messages::Resource { attributes });
    }
    let profile = file.read().unwrap();
    let below_root = (1..profile.nodes.len()).filter(|node| profile.nodes[*node].parent == 0);
    let names: Vec<_> = below_root
        .map(|node| &profile.frames[profile.nodes[node].frame as usize])
        .map(|frame| (frame.kind, &*frame.name))
        .collect();
    assert_eq!(
        names,
        [(FrameKind::Process, "python 7"), (FrameKind::Process, "java 8")]
    );
}

#[test]
fn periods_of_their_own_are_no_value() {
    let mut file = Foreign::new();
    let mut other = file.profile().clone();
    other.period = 2000;
    file.data.resource_profiles[0].scope_profiles[0].profiles.push(other);
    assert_eq!(kinds(&file.read().unwrap()), [ValueType::SAMPLES]);
    // Nor is what is measured itself.
    let mut file = Foreign::new();
    file.profile().sample_type = file.profile().period_type.clone();
    let profile = file.read().unwrap();
    assert_eq!(kinds(&profile), [ValueType::CPU]);
    assert!(matches!(profile.values[0].amounts, Amounts::PerCount(1)));
}

/// What is done to a file, and what the error says.
type Change = (fn(&mut Foreign), &'static str);

#[test]
fn damaged_files_say_where() {
    let changes: [Change; 8] = [
        (
            |file| file.profile().samples[1].stack_index = 9,
            "stack 9 does not exist",
        ),
        (
            |file| file.profile().samples[1].stack_index = -1,
            "stack -1 does not exist",
        ),
        (
            |file| file.profile().samples[1].attribute_indices = vec![6],
            "attribute 6 does not exist",
        ),
        (|file| file.profile().samples[1].link_index = 1, "link 1 does not exist"),
        (
            |file| file.profile().samples[1].values = vec![1, 2],
            "2 values at 1 times",
        ),
        (|file| file.profile().samples[1].values = vec![-1], "a negative amount"),
        (
            |file| file.tables().location_table[3].mapping_index = 3,
            "mapping 3 does not exist",
        ),
        (
            |file| file.tables().stack_table[2].location_indices[0] = 5,
            "location 5 does not exist",
        ),
    ];
    for (change, words) in changes {
        let mut file = Foreign::new();
        change(&mut file);
        let damage = file.read().unwrap_err();
        assert_eq!(damage.at, "profile 1");
        assert!(
            damage.reason.starts_with("sample 2: ") && damage.reason.contains(words),
            "{damage:?}"
        );
    }
}

/// Small references to a large entry would take gigabytes.
#[test]
fn large_entries_with_many_references_are_refused() {
    let mut file = Foreign::new();
    file.tables().string_table[1] = "x".repeat(1 << 20);
    let dictionary = file.tables().encode_to_vec();
    let mut tables = Tables::default();
    tables.add(&dictionary).unwrap();
    let references = (0..).find_map(|n| tables.text(1).err().map(|damage| (n, damage)));
    let (references, damage) = references.unwrap();
    assert_eq!(references, 1024);
    assert!(
        damage.reason.contains("more than 1 GiB of the dictionary"),
        "{damage:?}"
    );
}

/// Truncated at every length, or with any byte damaged, a file is an error or a profile.
#[test]
fn damage_never_panics() {
    let bytes = Foreign::new().data.encode_to_vec();
    for at in 0..bytes.len() {
        let _ = read(&bytes[..at]);
        for flip in [1, 0x11, 0x80] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            let _ = (is(&damaged), read(&damaged));
        }
    }
}
