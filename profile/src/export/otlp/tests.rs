//! Messages follow the rules of the format. `crate::import` has the tests that read them again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use super::*;
use crate::build::Builder;
use crate::json;
use crate::labels::Labels;
use crate::model::{Frame, Meta};
use crate::otlp::messages::{KeyValueAndUnit, ProfilesDictionary};

/// What is wrong in a message.
#[derive(Default)]
struct Violations {
    all: Vec<String>,
    /// By table, the entries that something refers to.
    used: BTreeMap<&'static str, BTreeSet<i32>>,
}

impl Violations {
    fn expect(&mut self, is_right: bool, wrong: impl FnOnce() -> String) {
        if !is_right {
            self.all.push(wrong());
        }
    }

    fn refer<T>(&mut self, table: &'static str, entries: &[T], index: i32) {
        let is_there = usize::try_from(index).is_ok_and(|index| index < entries.len());
        self.expect(is_there, || format!("{table} has no entry {index}"));
        self.used.entry(table).or_default().insert(index);
    }

    /// Attributes exist, and no key is there twice.
    fn attributes(&mut self, dictionary: &ProfilesDictionary, indices: &[i32]) {
        let mut keys = BTreeSet::new();
        for index in indices {
            self.refer("attributes", &dictionary.attribute_table, *index);
            let key = dictionary
                .attribute_table
                .get(*index as usize)
                .map(|entry| entry.key_strindex);
            self.expect(keys.insert(key), || {
                format!("the key of attribute {index} is there twice")
            });
        }
    }

    /// The first entry is the zero value, no other one is, and none is there twice or without being used.
    fn table<T: Default + PartialEq + Debug>(&mut self, name: &'static str, entries: &[T]) {
        self.expect(entries.first() == Some(&T::default()), || {
            format!("{name} begins with {:?}", entries.first())
        });
        let different: BTreeSet<String> = entries.iter().map(|entry| format!("{entry:?}")).collect();
        self.expect(different.len() == entries.len(), || {
            format!("an entry of {name} is there twice")
        });
        let used = self.used.remove(name).unwrap_or_default();
        for index in (1..entries.len() as i32).filter(|index| !used.contains(index)) {
            self.all.push(format!("nothing refers to entry {index} of {name}"));
        }
    }
}

/// The rules of the specification, and those that `profcheck` checks.
fn violations(data: &ProfilesData) -> Vec<String> {
    let mut found = Violations::default();
    let empty = ProfilesDictionary::default();
    let tables = data.dictionary.as_ref().unwrap_or(&empty);
    found.expect(!data.resource_profiles.is_empty(), || "no resource".into());
    for resource in &data.resource_profiles {
        let attributes = resource
            .resource
            .as_ref()
            .map_or(&[][..], |resource| &resource.attributes);
        let keys: BTreeSet<&str> = attributes.iter().map(|attribute| &*attribute.key).collect();
        found.expect(keys.len() == attributes.len(), || {
            "an attribute of a resource is there twice".into()
        });
        found.expect(!resource.scope_profiles.is_empty(), || "no scope".into());
        for scope in &resource.scope_profiles {
            found.expect(!scope.profiles.is_empty(), || "no profile".into());
            for profile in &scope.profiles {
                profile_violations(&mut found, tables, profile);
            }
        }
    }
    for stack in &tables.stack_table {
        for location in &stack.location_indices {
            found.refer("locations", &tables.location_table, *location);
        }
    }
    for location in &tables.location_table {
        found.refer("mappings", &tables.mapping_table, location.mapping_index);
        found.attributes(tables, &location.attribute_indices);
        for line in &location.lines {
            found.refer("functions", &tables.function_table, line.function_index);
            found.expect(line.line >= 0, || format!("line {}", line.line));
        }
    }
    for function in &tables.function_table {
        for text in [
            function.name_strindex,
            function.system_name_strindex,
            function.filename_strindex,
        ] {
            found.refer("strings", &tables.string_table, text);
        }
        found.expect(function.start_line >= 0, || format!("line {}", function.start_line));
    }
    for mapping in &tables.mapping_table {
        found.refer("strings", &tables.string_table, mapping.filename_strindex);
        found.attributes(tables, &mapping.attribute_indices);
        let (start, limit) = (mapping.memory_start, mapping.memory_limit);
        found.expect(start < limit || (start, limit) == (0, 0), || {
            format!("a mapping at {start} to {limit}")
        });
    }
    for KeyValueAndUnit {
        key_strindex,
        unit_strindex,
        ..
    } in &tables.attribute_table
    {
        found.refer("strings", &tables.string_table, *key_strindex);
        found.refer("strings", &tables.string_table, *unit_strindex);
    }
    for link in tables.link_table.iter().skip(1) {
        let lengths = (link.trace_id.len(), link.span_id.len());
        found.expect(lengths == (16, 8), || format!("a link of {lengths:?} bytes"));
    }
    found.table("mappings", &tables.mapping_table);
    found.table("locations", &tables.location_table);
    found.table("functions", &tables.function_table);
    found.table("links", &tables.link_table);
    found.table("strings", &tables.string_table);
    found.table("attributes", &tables.attribute_table);
    found.table("stacks", &tables.stack_table);
    found.all
}

fn profile_violations(found: &mut Violations, tables: &ProfilesDictionary, profile: &OtlpProfile) {
    for kind in profile.sample_type.iter().chain(&profile.period_type) {
        found.refer("strings", &tables.string_table, kind.type_strindex);
        found.refer("strings", &tables.string_table, kind.unit_strindex);
    }
    found.expect(profile.sample_type.is_some(), || "no sample type".into());
    found.attributes(tables, &profile.attribute_indices);
    let end = profile.time_unix_nano.checked_add(profile.duration_nano);
    found.expect(end.is_some(), || "the end is out of range".into());
    let range = profile.time_unix_nano..end.unwrap_or(0);
    let (mut shapes, mut identities) = (BTreeSet::new(), BTreeSet::new());
    for sample in &profile.samples {
        found.refer("stacks", &tables.stack_table, sample.stack_index);
        found.refer("links", &tables.link_table, sample.link_index);
        found.attributes(tables, &sample.attribute_indices);
        let (values, times) = (sample.values.len(), sample.timestamps_unix_nano.len());
        let is_shape = if times == 0 {
            values == 1
        } else {
            [0, times].contains(&values)
        };
        found.expect(is_shape, || format!("{values} values at {times} times"));
        shapes.insert((values > 0, times > 0));
        let mut attributes = sample.attribute_indices.clone();
        attributes.sort_unstable();
        let is_new = identities.insert((sample.stack_index, attributes, sample.link_index));
        found.expect(is_new, || format!("two samples of stack {}", sample.stack_index));
        for time in &sample.timestamps_unix_nano {
            found.expect(range.contains(time), || {
                format!("a sample at {time}, outside {range:?}")
            });
        }
    }
    found.expect(shapes.len() < 2, || "samples of several shapes".into());
}

#[track_caller]
fn valid(profile: &Profile) -> ProfilesData {
    follows_the_rules(message(profile, &Facts::One(&[])))
}

#[track_caller]
fn follows_the_rules(data: ProfilesData) -> ProfilesData {
    assert_eq!(violations(&data), [""; 0]);
    let bytes = data.encode_to_vec();
    assert!(ProfilesData::decode(&*bytes).unwrap() == data);
    data
}

fn profiles(data: &ProfilesData) -> &[OtlpProfile] {
    &data.resource_profiles[0].scope_profiles[0].profiles
}

/// `samples/count cpu/nanoseconds 10`
fn types(data: &ProfilesData) -> Vec<String> {
    let strings = &data.dictionary.as_ref().unwrap().string_table;
    let text = |kind: &OtlpValueType| {
        let [name, unit] = [kind.type_strindex, kind.unit_strindex].map(|at| &strings[at as usize]);
        format!("{name}/{unit}")
    };
    let of = |profile: &OtlpProfile| match &profile.period_type {
        Some(kind) => format!(
            "{} {} {}",
            text(profile.sample_type.as_ref().unwrap()),
            text(kind),
            profile.period
        ),
        None => text(profile.sample_type.as_ref().unwrap()),
    };
    profiles(data).iter().map(of).collect()
}

fn golden() -> Profile {
    json::read(include_bytes!("../../../../fixtures/golden/profile.json")).unwrap()
}

/// The golden profile has every kind of frame and odd names; one sample in the timeline of each stack has a time.
#[test]
fn the_golden_profile_follows_the_rules() {
    let data = valid(&golden());
    let samples = "samples/count cpu/nanoseconds 10101010";
    assert_eq!(types(&data), [samples, samples], "with a time, and without");
    let timed: usize = profiles(&data)[0]
        .samples
        .iter()
        .map(|sample| sample.timestamps_unix_nano.len())
        .sum();
    assert_eq!(timed, golden().timeline.len());
    let rest: i64 = profiles(&data)[1]
        .samples
        .iter()
        .flat_map(|sample| &sample.values)
        .sum();
    assert_eq!(rest as u64 + timed as u64, golden().nodes[0].count);
}

#[test]
fn profiles_without_samples_follow_the_rules() {
    valid(&Profile::default());
    let mut profile = Builder::new(&[ValueType::SAMPLES, ValueType::WALL]).finish(Meta::default());
    assert_eq!(types(&valid(&profile)), ["samples/count", "wall/nanoseconds"]);
    profile.meta.start = f64::NAN;
    profile.meta.duration = f64::INFINITY;
    valid(&profile);
}

/// A profile of a few stacks, with everything that the format can have.
fn profile(types: &[ValueType], labels: &[&[(&str, &str)]]) -> Profile {
    let mut builder = Builder::new(types);
    let frames = [
        Frame::python("f", "C.f", "/a.py", 3),
        Frame::native("g", "libg.so", 0x1000),
        Frame {
            source: "g.h".into(),
            ..Frame::new(FrameKind::Inlined, "inlined")
        },
        Frame::new(FrameKind::State, "[waiting: sleep]"),
    ];
    let frames = frames.map(|frame| builder.frame(frame));
    for (at, _) in (0u64..).zip(labels) {
        let depth = at as usize % frames.len();
        let stack: Vec<(u32, u32)> = frames[..=depth].iter().map(|frame| (*frame, at as u32)).collect();
        builder.sample(at * 7, (1, 1 + at as u32 % 2), &stack, &[1, at * 100]);
    }
    let mut profile = builder.finish(Meta::default());
    let sets: Vec<_> = labels
        .iter()
        .map(|set| {
            set.iter()
                .map(|(key, value)| (key.to_string(), value.to_string()))
                .collect()
        })
        .collect();
    profile.labels = Labels::new(&sets, (0..sets.len() as u32).collect());
    profile
}

#[test]
fn amounts_of_their_own_are_profiles() {
    let profile = profile(&[ValueType::SAMPLES, ValueType::OFF_CPU], &[&[][..]; 6]);
    let data = valid(&profile);
    assert_eq!(types(&data), ["samples/count", "off_cpu/nanoseconds"]);
    let [count, off_cpu] = profiles(&data) else { panic!() };
    assert!(count.samples.iter().all(|sample| sample.values.is_empty()));
    let sum: i64 = off_cpu.samples.iter().flat_map(|sample| &sample.values).sum();
    assert_eq!(sum, 1500);
    let times = |profile: &OtlpProfile| {
        profile
            .samples
            .iter()
            .map(|sample| sample.timestamps_unix_nano.len())
            .sum::<usize>()
    };
    assert_eq!((times(count), times(off_cpu)), (6, 5), "that of 0 ns is left out");
}

#[test]
fn inlined_functions_are_lines_of_a_location() {
    let data = valid(&profile(&[ValueType::SAMPLES], &[&[][..]; 3]));
    let tables = data.dictionary.unwrap();
    let lines: Vec<Vec<&str>> = tables.location_table[1..]
        .iter()
        .map(|location| {
            let function = |line: &crate::otlp::messages::Line| &tables.function_table[line.function_index as usize];
            let name = |line| &*tables.string_table[function(line).name_strindex as usize];
            location.lines.iter().map(name).collect()
        })
        .collect();
    assert!(lines.contains(&vec!["inlined", "g"]), "{lines:?}");
    // `C.f` is called `f` by the system, and `g` is not called anything else.
    let names: BTreeSet<(&str, &str)> = tables.function_table[1..]
        .iter()
        .map(|function| {
            [function.name_strindex, function.system_name_strindex]
                .map(|at| &*tables.string_table[at as usize])
                .into()
        })
        .collect();
    assert_eq!(names, BTreeSet::from([("C.f", "f"), ("g", ""), ("inlined", "")]));
}

/// The attributes of each sample, as text, and its link.
fn contexts(data: &ProfilesData) -> BTreeSet<(BTreeMap<String, String>, i32)> {
    let tables = data.dictionary.as_ref().unwrap();
    let attribute = |at: &i32| {
        let entry = &tables.attribute_table[*at as usize];
        let value = match entry.value.as_ref().unwrap().value.as_ref().unwrap() {
            Any::Text(text) => text.clone(),
            Any::Int(number) => number.to_string(),
            Any::Array(array) => format!("{:?}", array.values.len()),
            other => panic!("{other:?}"),
        };
        (tables.string_table[entry.key_strindex as usize].clone(), value)
    };
    profiles(data)
        .iter()
        .flat_map(|profile| &profile.samples)
        .map(|sample| {
            (
                sample.attribute_indices.iter().map(attribute).collect(),
                sample.link_index,
            )
        })
        .collect()
}

#[test]
fn labels_are_attributes_and_links() {
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let data = valid(&profile(
        &[ValueType::SAMPLES],
        &[
            &[],
            &[("span", "outer"), ("user", "7"), ("span", "inner")],
            &[
                ("trace_id", trace),
                ("span_id", "00f067aa0ba902b7"),
                ("http.route", "/"),
            ],
            // No trace is all zero, and none is without a span.
            &[("trace_id", &"0".repeat(32)), ("span_id", "00f067aa0ba902b7")],
            &[("trace_id", trace)],
            // What the program says is not mistaken for what we know.
            &[("thread.id", "x"), ("service.name", "other"), ("", "empty")],
        ],
    ));
    let link = Link {
        trace_id: otlp::identifier_of_hex(trace, 16).unwrap(),
        span_id: vec![0, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 2, 0xb7],
    };
    assert_eq!(data.dictionary.as_ref().unwrap().link_table, [Link::default(), link]);
    let context = |tid: &str, labels: &[(&str, &str)], link: i32| {
        let known = [("process.pid", "1"), ("thread.id", tid)];
        let all = known.iter().chain(labels);
        (
            all.map(|(key, value)| (key.to_string(), value.to_string()))
                .collect::<BTreeMap<_, _>>(),
            link,
        )
    };
    let expected = BTreeSet::from([
        context("1", &[], 0),
        context("2", &[("span", "2"), ("user", "7")], 0),
        context("1", &[("http.route", "/")], 1),
        context(
            "2",
            &[("trace_id", &"0".repeat(32)), ("span_id", "00f067aa0ba902b7")],
            0,
        ),
        context("1", &[("trace_id", trace)], 0),
        context(
            "2",
            &[
                ("nativeprof.label.thread.id", "x"),
                ("nativeprof.label.service.name", "other"),
                ("nativeprof.label.", "empty"),
            ],
            0,
        ),
    ]);
    assert_eq!(contexts(&data), expected);
}

#[test]
fn resources_have_what_is_known() {
    let mut profile = Profile::default();
    assert_eq!(resource_of(&profile, &[]), Resource::default());
    profile.meta.pid = 7;
    profile.meta.python = "3.13.0".into();
    let resource = resource_of(&profile, &[("service.name", "shop"), (otlp::RUNTIME_NAME, "pypy")]);
    let found: Vec<_> = resource
        .attributes
        .iter()
        .map(|attribute| (&*attribute.key, attribute.value.clone().unwrap()))
        .collect();
    let expected: [(&str, AnyValue); 4] = [
        ("service.name", "shop".into()),
        ("process.runtime.name", "pypy".into()),
        ("process.pid", 7.into()),
        ("process.runtime.version", "3.13.0".into()),
    ];
    assert_eq!(found, expected);
}

/// Some samples of many processes, each with stacks of its own: a segment of a whole host.
#[test]
fn messages_are_small() {
    let mut builder = Builder::new(&[ValueType::SAMPLES]);
    let shared: Vec<_> = (0..400)
        .map(|n| {
            builder.frame(Frame::python(
                format!("function_{n}"),
                "",
                format!("/srv/app/{}.py", n % 40),
                n,
            ))
        })
        .collect();
    for sample in 0..287u32 {
        let process = builder.frame(Frame::new(FrameKind::Process, format!("python {}", sample % 200)));
        let calls = (0..20).map(|depth| {
            (
                shared[((sample * 7 + depth * (depth + sample % 5)) % 400) as usize],
                depth,
            )
        });
        let stack: Vec<_> = std::iter::once((process, 0)).chain(calls).collect();
        builder.sample(
            u64::from(sample) * 50_123_457,
            (sample % 200, sample % 200),
            &stack,
            &[1],
        );
    }
    let profile = builder.finish(Meta::default());
    valid(&profile);
    let size = |write: fn(&Profile, &mut dyn Write) -> io::Result<()>| {
        let mut out = Vec::new();
        write(&profile, &mut out).unwrap();
        out.len()
    };
    let (otlp, pprof) = (size(write), size(crate::export::pprof::write));
    assert!(otlp < pprof, "{otlp} bytes, {pprof} as pprof");
}

/// Two resources of three processes, one of them with a pid that is used again, and a sample of no process.
#[test]
fn segments_are_grouped_by_resource() {
    let profile = profile(&[ValueType::SAMPLES, ValueType::OFF_CPU], &[&[][..]; 7]);
    let process = |pid, name: &str, resource, taken| SegmentProcess {
        pid,
        name: name.into(),
        resource,
        quality: Quality {
            taken,
            ..Quality::default()
        },
    };
    let service = |name: &str| {
        vec![
            ("host.name".to_string(), "h".to_string()),
            ("service.name".into(), name.into()),
        ]
    };
    let info = SegmentInfo {
        resources: vec![service("a"), service("b"), service("unused")],
        processes: vec![process(1, "x", 0, 3), process(1, "y", 1, 1), process(2, "", 1, 2)],
        process_of_sample: vec![0, 1, 0, 2, 0, 2],
        counts: BTreeMap::from([("processes.refused.permission".into(), 3)]),
    };
    let data = follows_the_rules(message(&profile, &Facts::Segment(Segment::new(&profile, &info))));
    let of_resources: Vec<(usize, usize)> = data
        .resource_profiles
        .iter()
        .map(|resource| {
            let count = &resource.scope_profiles[0].profiles[0];
            let times = count.samples.iter().map(|sample| sample.timestamps_unix_nano.len());
            (resource.resource.as_ref().unwrap().attributes.len(), times.sum())
        })
        .collect();
    assert_eq!(of_resources, [(2, 3), (2, 3), (0, 1)]);
    assert_eq!(encode_segment(&profile, &info), data.encode_to_vec());
}

#[test]
fn a_segment_without_samples_follows_the_rules() {
    let (profile, info) = (Profile::default(), SegmentInfo::default());
    let data = follows_the_rules(message(&profile, &Facts::Segment(Segment::new(&profile, &info))));
    assert_eq!(data.resource_profiles.len(), 1);
    let info = SegmentInfo {
        resources: vec![Vec::new()],
        processes: vec![SegmentProcess::default()],
        ..SegmentInfo::default()
    };
    let data = follows_the_rules(message(&profile, &Facts::Segment(Segment::new(&profile, &info))));
    assert_eq!(data.resource_profiles.len(), 1);
}
