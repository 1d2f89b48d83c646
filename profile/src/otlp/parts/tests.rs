use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::otlp::messages::{
    InstrumentationScope, KeyValueAndUnit, Line, OtlpProfile, ProfilesData, ProfilesDictionary, ResourceProfiles,
    ScopeProfiles,
};

fn golden() -> Vec<u8> {
    include_bytes!("../../../../fixtures/golden/profile.otlp").to_vec()
}

fn text(string: &str) -> Option<AnyValue> {
    Some(AnyValue {
        value: Some(Any::Text(string.into())),
    })
}

/// A file with two resources, three profiles, and an entry of each table that another one has not.
fn two_resources() -> ProfilesData {
    let names = ["", "samples", "count", "one", "two", "file", "key", "unit", "host"];
    let function = |name: i32| Function {
        name_strindex: name,
        ..Function::default()
    };
    let location = |function_index: i32| Location {
        mapping_index: 1,
        lines: vec![Line {
            function_index,
            line: 3,
        }],
        ..Location::default()
    };
    let sample = |stack_index: i32, link_index: i32, attribute: Option<i32>| OtlpSample {
        stack_index,
        link_index,
        attribute_indices: attribute.into_iter().collect(),
        values: vec![i64::from(stack_index)],
        timestamps_unix_nano: Vec::new(),
    };
    let profile = |samples: Vec<OtlpSample>| OtlpProfile {
        sample_type: Some(OtlpValueType {
            type_strindex: 1,
            unit_strindex: 2,
        }),
        samples,
        time_unix_nano: 5,
        ..OtlpProfile::default()
    };
    let of = |service: &str, profiles: Vec<OtlpProfile>| ResourceProfiles {
        resource: Some(Resource {
            attributes: vec![
                KeyValue {
                    key: "service.name".into(),
                    value: text(service),
                    key_strindex: 0,
                },
                KeyValue {
                    key: String::new(),
                    value: Some(AnyValue {
                        value: Some(Any::TextIndex(4)),
                    }),
                    key_strindex: 8,
                },
            ],
        }),
        scope_profiles: vec![ScopeProfiles {
            scope: Some(InstrumentationScope {
                name: "scope".into(),
                ..InstrumentationScope::default()
            }),
            profiles,
        }],
    };
    ProfilesData {
        resource_profiles: vec![
            of(
                "first",
                vec![
                    profile(vec![sample(1, 0, Some(1)), sample(2, 1, None)]),
                    profile(vec![]),
                    profile(vec![sample(2, 0, None)]),
                ],
            ),
            of("second", vec![profile(vec![sample(1, 0, None)])]),
        ],
        dictionary: Some(ProfilesDictionary {
            mapping_table: vec![
                Mapping::default(),
                Mapping {
                    filename_strindex: 5,
                    ..Mapping::default()
                },
            ],
            location_table: vec![Location::default(), location(1), location(2)],
            function_table: vec![Function::default(), function(3), function(4)],
            link_table: vec![
                Link::default(),
                Link {
                    trace_id: vec![1; 16],
                    span_id: vec![2; 8],
                },
            ],
            string_table: names.map(String::from).to_vec(),
            attribute_table: vec![
                KeyValueAndUnit::default(),
                KeyValueAndUnit {
                    key_strindex: 6,
                    value: text("value"),
                    unit_strindex: 7,
                },
            ],
            stack_table: vec![
                Stack::default(),
                Stack {
                    location_indices: vec![1],
                },
                Stack {
                    location_indices: vec![2, 1],
                },
            ],
        }),
    }
}

/// What the samples of a message say, with all indices followed, and their sums; checks that nothing else is in the tables.
fn meaning(message: &[u8]) -> BTreeMap<String, i64> {
    let data = ProfilesData::decode(message).expect("a message");
    let tables = data.dictionary.expect("a dictionary");
    let used: std::cell::RefCell<BTreeMap<&str, BTreeSet<usize>>> = std::cell::RefCell::default();
    let entry = |table: &'static str, index: i32| {
        let index = index as usize;
        used.borrow_mut().entry(table).or_default().insert(index);
        index
    };
    let string = |index: i32| tables.string_table[entry("string", index)].clone();
    let value = |value: &Option<AnyValue>| match value.as_ref().and_then(|value| value.value.clone()) {
        Some(Any::TextIndex(index)) => format!("{:?}", Any::Text(string(index))),
        other => format!("{:?}", other.expect("a value")),
    };
    let attributes = |indices: &[i32]| {
        let of = |index: &i32| {
            let row = &tables.attribute_table[entry("attribute", *index)];
            format!(
                "{} {} {}",
                string(row.key_strindex),
                value(&row.value),
                string(row.unit_strindex)
            )
        };
        indices.iter().map(of).collect::<Vec<_>>()
    };
    let kind = |kind: &Option<OtlpValueType>| {
        kind.as_ref()
            .map(|kind| (string(kind.type_strindex), string(kind.unit_strindex)))
    };
    let mut sums = BTreeMap::new();
    for of_resource in &data.resource_profiles {
        let keys = &of_resource.resource.as_ref().expect("a resource").attributes;
        let key = |row: &KeyValue| {
            let key = if row.key.is_empty() {
                string(row.key_strindex)
            } else {
                row.key.clone()
            };
            format!("{key}={}", value(&row.value))
        };
        let resource: Vec<String> = keys.iter().map(key).collect();
        assert!(!of_resource.scope_profiles.is_empty());
        for scope in &of_resource.scope_profiles {
            assert!(!scope.profiles.is_empty());
            for profile in &scope.profiles {
                assert!(!profile.samples.is_empty());
                let head = format!(
                    "{resource:?} {:?} {:?} {} {} {:?} {:?}",
                    scope.scope,
                    kind(&profile.sample_type),
                    profile.time_unix_nano,
                    profile.period,
                    kind(&profile.period_type),
                    attributes(&profile.attribute_indices)
                );
                for sample in &profile.samples {
                    let link = &tables.link_table[entry("link", sample.link_index)];
                    let stack = &tables.stack_table[entry("stack", sample.stack_index)];
                    let stack = stack.location_indices.iter().map(|index| {
                        let location = &tables.location_table[entry("location", *index)];
                        let mapping = &tables.mapping_table[entry("mapping", location.mapping_index)];
                        let lines = location.lines.iter().map(|line| {
                            let function = &tables.function_table[entry("function", line.function_index)];
                            let names = [
                                function.name_strindex,
                                function.system_name_strindex,
                                function.filename_strindex,
                            ];
                            format!("{:?} {} {}", names.map(&string), function.start_line, line.line)
                        });
                        format!(
                            "{} {:?} {:?} {} {:?}",
                            string(mapping.filename_strindex),
                            attributes(&mapping.attribute_indices),
                            attributes(&location.attribute_indices),
                            location.address,
                            lines.collect::<Vec<_>>()
                        )
                    });
                    let row = format!(
                        "{head} {:?} {link:?} {:?} {:?}",
                        stack.collect::<Vec<_>>(),
                        attributes(&sample.attribute_indices),
                        sample.timestamps_unix_nano
                    );
                    *sums.entry(row).or_default() += sample.values.iter().sum::<i64>();
                }
            }
        }
    }
    let used = used.into_inner();
    for (table, entries) in [
        ("mapping", tables.mapping_table.len()),
        ("location", tables.location_table.len()),
        ("function", tables.function_table.len()),
        ("link", tables.link_table.len()),
        ("string", tables.string_table.len()),
        ("attribute", tables.attribute_table.len()),
        ("stack", tables.stack_table.len()),
    ] {
        let mut of = used.get(table).cloned().unwrap_or_default();
        of.insert(0);
        assert_eq!(of.len(), entries, "entries of {table} that nothing refers to");
    }
    sums
}

fn all_parts(file: &OtlpParts, max: usize, ends: PartEnd) -> Vec<OtlpPart> {
    let mut parts = Vec::new();
    let mut from = 0;
    while let Some(part) = file.part(from, max, ends).expect("a part") {
        assert!(part.end > from, "no progress");
        from = part.end;
        parts.push(part);
    }
    assert_eq!(from, file.samples());
    parts
}

/// In parts of every size there are the same samples, and each part has the dictionary that it needs and nothing else.
#[test]
fn parts_have_what_the_file_has() {
    for bytes in [golden(), two_resources().encode_to_vec()] {
        let file = OtlpParts::new(bytes.clone()).expect("a file");
        let [whole] = &all_parts(&file, usize::MAX, PartEnd::File)[..] else {
            panic!("several parts");
        };
        let expected = meaning(&whole.message);
        assert_eq!(expected.values().sum::<i64>(), meaning_of_values(&bytes));
        let mut numbers = BTreeSet::new();
        for max in [
            1,
            300,
            1000,
            4000,
            20_000,
            whole.message.len() / 2,
            whole.message.len() * 2,
        ] {
            for ends in [PartEnd::File, PartEnd::Resource] {
                let parts = all_parts(&file, max, ends);
                let mut sums = BTreeMap::new();
                for part in &parts {
                    let is_one = part.end
                        - parts
                            .iter()
                            .map(|other| other.end)
                            .filter(|end| *end < part.end)
                            .max()
                            .unwrap_or(0)
                        == 1;
                    assert!(part.message.len() <= max || is_one, "{} > {max}", part.message.len());
                    for (row, sum) in meaning(&part.message) {
                        *sums.entry(row).or_default() += sum;
                    }
                }
                assert_eq!(sums, expected, "{max} bytes");
                numbers.insert(parts.len());
            }
        }
        assert!(numbers.len() > 2, "{numbers:?}");
    }
}

fn meaning_of_values(bytes: &[u8]) -> i64 {
    let data = ProfilesData::decode(bytes).expect("a message");
    let scopes = data
        .resource_profiles
        .iter()
        .flat_map(|resource| &resource.scope_profiles);
    let samples = scopes
        .flat_map(|scope| &scope.profiles)
        .flat_map(|profile| &profile.samples);
    samples.flat_map(|sample| &sample.values).sum()
}

#[test]
fn a_resource_is_not_divided_if_it_fits_alone() {
    let file = OtlpParts::new(two_resources().encode_to_vec()).expect("a file");
    let first = all_parts(&file, usize::MAX, PartEnd::Resource).remove(0).message.len();
    let ends = |parts: Vec<OtlpPart>| parts.iter().map(|part| part.end).collect::<Vec<_>>();
    assert_eq!(ends(all_parts(&file, first + 40, PartEnd::File)), [3, 4]);
    let of_resources = all_parts(&file, usize::MAX, PartEnd::Resource);
    let services: Vec<_> = of_resources.iter().map(|part| part.resource.clone()).collect();
    let row = |service: &str| {
        [("service.name", service), ("host", "two")].map(|(key, value)| (key.to_string(), value.to_string()))
    };
    assert_eq!(services, [row("first"), row("second")]);
    assert_eq!(ends(of_resources), [3, 4]);
}

#[test]
fn damaged_files_are_errors() {
    type Damaging = fn(&mut ProfilesData);
    let cases: &[(&str, Damaging)] = &[
        ("stack 9 does not exist", |data| sample(data).stack_index = 9),
        ("link -1 does not exist", |data| sample(data).link_index = -1),
        ("attribute 2 does not exist", |data| {
            sample(data).attribute_indices = vec![2]
        }),
        ("location 3 does not exist", |data| {
            tables(data).stack_table[1].location_indices = vec![3]
        }),
        ("mapping 2 does not exist", |data| {
            tables(data).location_table[1].mapping_index = 2
        }),
        ("string 99 does not exist", |data| {
            tables(data).function_table[1].name_strindex = 99
        }),
    ];
    for (expected, damage) in cases {
        let mut data = two_resources();
        damage(&mut data);
        let file = OtlpParts::new(data.encode_to_vec()).expect("a file");
        let found = file.part(0, usize::MAX, PartEnd::File).expect_err("damaged");
        assert_eq!(found.to_string(), *expected);
    }
    let bytes = two_resources().encode_to_vec();
    assert!(OtlpParts::new(bytes[..bytes.len() - 1].to_vec()).is_err());
    let empty = OtlpParts::new(Vec::new()).expect("a file");
    assert_eq!(empty.part(0, 100, PartEnd::File), Ok(None));
}

/// Whatever a file has, parts go on, and are files that can be divided.
#[test]
fn damaged_bytes_are_errors_or_good_parts() {
    let bytes = two_resources().encode_to_vec();
    let (mut errors, mut parts) = (0, 0);
    for at in 0..bytes.len() {
        for value in [
            0,
            1,
            2,
            9,
            0x7f,
            0x80,
            0xff,
            bytes[at] ^ 0x10,
            bytes[at].wrapping_add(1),
        ] {
            let mut damaged = bytes.clone();
            damaged[at] = value;
            let Ok(file) = OtlpParts::new(damaged) else {
                errors += 1;
                continue;
            };
            let mut from = 0;
            loop {
                match file.part(from, 200, PartEnd::Resource) {
                    Ok(Some(part)) => {
                        let again = OtlpParts::new(part.message).expect("a message");
                        assert_eq!(again.samples(), part.end - from);
                        assert!(again.part(0, usize::MAX, PartEnd::File).is_ok());
                        from = part.end;
                        parts += 1;
                    }
                    Ok(None) => break,
                    Err(_) => {
                        errors += 1;
                        break;
                    }
                }
            }
        }
    }
    assert!(errors > 100 && parts > 100, "{errors} {parts}");
}

fn tables(data: &mut ProfilesData) -> &mut ProfilesDictionary {
    data.dictionary.as_mut().expect("a dictionary")
}

fn sample(data: &mut ProfilesData) -> &mut OtlpSample {
    &mut data.resource_profiles[0].scope_profiles[0].profiles[0].samples[0]
}
