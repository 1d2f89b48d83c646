//! Lines of samples: a function that was first seen on line 9, and then 99 times on line 12.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use nativeprof::export::select::by_line;
use nativeprof::profile::build::Builder;
use nativeprof::profile::json;
use nativeprof::profile::model::{Frame, FrameKind, Meta, Profile};
use nativeprof::profile::values::ValueType;
use serde_json::Value as Json;

use super::{plain, written};
use nativeprof::profile::measure::Measure;

/// `main` is defined on line 7; it is on line 9 once, and calls `work` on line 12 99 times.
fn profile() -> Profile {
    let mut builder = Builder::new(&[ValueType::SAMPLES]);
    let main = builder.frame(Frame::python("main", "main", "/srv/app.py", 7));
    let work = builder.frame(Frame::native("work", "lib.so", 0x40));
    builder.sample(10_000_000, (1, 1), &[(main, 9)], &[1]);
    for at in 2..101 {
        builder.sample(at * 10_000_000, (1, 1), &[(main, 12), (work, 30)], &[1]);
    }
    let mut profile = builder.finish(Meta {
        rate: 100,
        duration: 1.0,
        ..Meta::default()
    });
    profile.values = Measure::of_event("cpu-clock", 100).values();
    profile
}

fn json_of(format: &str) -> Json {
    serde_json::from_slice(&written(format, &profile())).unwrap()
}

fn numbers(column: &Json) -> Vec<u64> {
    let column = column.as_array().unwrap();
    column.iter().map(|n| n.as_u64().unwrap_or(0)).collect()
}

#[test]
fn names_show_the_definition_and_lines_on_request() {
    let text = |format: &str, profile: &Profile| String::from_utf8(written(format, profile)).unwrap();
    let stacks = "main (/srv/app.py:7) 1\nmain (/srv/app.py:7);work (lib.so) 99\n";
    assert_eq!(text("collapsed", &profile()), stacks);
    let stacks = "main (/srv/app.py:9) 1\nmain (/srv/app.py:12);work:30 (lib.so) 99\n";
    assert_eq!(text("collapsed", &by_line(&profile())), stacks);
    let svg = text("svg", &profile());
    assert!(svg.contains("<title>main (app.py:7) (100 samples, 100.00%)</title>"));
    let svg = text("svg", &by_line(&profile()));
    for title in [
        "main (app.py:9) (1 samples, 1.00%)",
        "main (app.py:12) (99 samples, 99.00%)",
    ] {
        assert!(svg.contains(&format!("<title>{title}</title>")), "{title}");
    }
}

#[test]
fn json_keeps_the_first_line_and_all_of_them() {
    let tree = json_of("json");
    let main = &tree["children"]["main;/srv/app.py;7"];
    assert_eq!(main["description"]["line_number"], 9, "as Dask has it");
    assert_eq!(main["lines"], serde_json::json!({"9": 1, "12": 99}));
    let read = json::read(&written("json", &profile())).unwrap();
    let lines = |profile: &Profile| {
        let lines = profile.sample_places.iter().map(|place| {
            let end = &profile.places[*place as usize];
            (profile.places[end.parent as usize].line, end.line)
        });
        lines.collect::<Vec<_>>()
    };
    assert_eq!(lines(&read), lines(&profile()));
    assert_eq!(lines(&read)[..2], [(0, 9), (12, 30)]);
}

#[test]
fn speedscope_frames_have_the_lines_of_samples() {
    let file = json_of("speedscope");
    let frames = file["shared"]["frames"].as_array().unwrap();
    let merged = &file["profiles"][0];
    let stacks = merged["samples"].as_array().unwrap();
    let mut found = Vec::new();
    for (stack, weight) in stacks.iter().zip(numbers(&merged["weights"])) {
        let line = |frame: &u64| frames[*frame as usize]["line"].as_u64().unwrap();
        found.push((numbers(stack).iter().map(line).collect::<Vec<_>>(), weight));
    }
    assert_eq!(found, [(vec![9], 1), (vec![12, 30], 99)]);
}

#[test]
fn firefox_frames_have_the_lines_of_samples() {
    let file = json_of("firefox");
    let (shared, samples) = (&file["shared"], &file["threads"][0]["samples"]);
    let line = |stack: u64| {
        let frame = numbers(&shared["stackTable"]["frame"])[stack as usize];
        numbers(&shared["frameTable"]["line"])[frame as usize]
    };
    let stacks = numbers(&samples["stack"]);
    let prefix = numbers(&shared["stackTable"]["prefix"])[stacks[1] as usize];
    assert_eq!((line(stacks[0]), line(stacks[1]), line(prefix)), (9, 30, 12));
    assert!(numbers(&shared["funcTable"]["lineNumber"]).contains(&7));
}

#[test]
fn chrome_samples_have_the_line_where_they_ended() {
    let file = json_of("chrome");
    let events = file["traceEvents"].as_array().unwrap();
    let chunk = events.iter().find(|event| event["name"] == "ProfileChunk").unwrap();
    let data = &chunk["args"]["data"];
    let lines = numbers(&data["lines"]);
    assert_eq!(lines.len(), numbers(&data["cpuProfile"]["samples"]).len());
    let count = |line| lines.iter().filter(|known| **known == line).count();
    assert_eq!((count(9), count(30)), (1, 99));
    let nodes = data["cpuProfile"]["nodes"].as_array().unwrap();
    let main = nodes
        .iter()
        .find(|node| node["callFrame"]["functionName"] == "main")
        .unwrap();
    assert_eq!(main["callFrame"]["lineNumber"], 6, "the definition, counted from 0");
}

/// The fields of a protocol buffers message: number, and either a number or bytes.
fn fields(mut bytes: &[u8]) -> Vec<(u64, u64, &[u8])> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let length = bytes.iter().position(|byte| *byte < 128).unwrap() + 1;
        let (digits, rest) = bytes.split_at(length);
        *bytes = rest;
        digits
            .iter()
            .rev()
            .fold(0, |number, byte| number << 7 | u64::from(byte & 127))
    }
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let (number, length) = match key & 7 {
            0 => (varint(&mut bytes), 0),
            2 => (0, varint(&mut bytes) as usize),
            other => panic!("wire type {other}"),
        };
        let (content, rest) = bytes.split_at(length);
        fields.push((key >> 3, number, content));
        bytes = rest;
    }
    fields
}

/// Numbers of a packed field.
fn packed(bytes: &[u8]) -> Vec<u64> {
    let mut numbers = vec![0];
    let mut shift = 0;
    for byte in bytes {
        *numbers.last_mut().unwrap() |= u64::from(byte & 127) << shift;
        shift += 7;
        if *byte < 128 {
            numbers.push(0);
            shift = 0;
        }
    }
    numbers.pop();
    numbers
}

/// Of a sample.
type LinesAndValues = (Vec<u64>, Vec<u64>);

/// Contents of a pprof file: (type, unit) of its values; of its samples the lines, innermost first, and the values.
pub fn pprof(profile: &Profile) -> (Vec<(String, String)>, Vec<LinesAndValues>) {
    let bytes = plain(written("pprof", profile));
    let document = fields(&bytes);
    let all = |number| document.iter().filter(move |field| field.0 == number);
    let number = |parts: &[(u64, u64, &[u8])], of| parts.iter().find(|part| part.0 == of).map_or(0, |part| part.1);
    let strings: Vec<_> = all(6)
        .map(|field| String::from_utf8(field.2.to_vec()).unwrap())
        .collect();
    let types = all(1).map(|field| {
        let parts = fields(field.2);
        let string = |of| strings[number(&parts, of) as usize].clone();
        (string(1), string(2))
    });
    let line_of: BTreeMap<u64, u64> = all(4)
        .map(|field| {
            let parts = fields(field.2);
            let line = fields(parts.iter().find(|part| part.0 == 4).unwrap().2);
            (number(&parts, 1), number(&line, 2))
        })
        .collect();
    let samples = all(2).map(|field| {
        let parts = fields(field.2);
        let column = |of| packed(parts.iter().find(|part| part.0 == of).unwrap().2);
        (column(1).iter().map(|id| line_of[id]).collect(), column(2))
    });
    (types.collect(), samples.collect())
}

#[test]
fn pprof_locations_have_the_lines_of_samples() {
    let (_, found) = pprof(&profile());
    assert_eq!(
        found,
        [(vec![9], vec![1, 10_000_000]), (vec![30, 12], vec![99, 990_000_000])]
    );
}

/// A function that is inlined into two others, and its copy that is not, are one function at three places.
#[test]
fn inlined_functions_are_one_function() {
    let mut builder = Builder::new(&[ValueType::SAMPLES]);
    let native = |name: &str, kind, address| Frame {
        address,
        kind,
        source: "/srv/tiny.h".to_string(),
        ..Frame::native(name, "lib.so", 0)
    };
    for (outer, at) in [("first", 0x40), ("second", 0x80)] {
        let outer = builder.frame(native(outer, FrameKind::Native, at));
        let tiny = builder.frame(native("tiny", FrameKind::Inlined, at + 4));
        builder.sample(at, (1, 1), &[(outer, 9), (tiny, 3)], &[1]);
    }
    let tiny = builder.frame(native("tiny", FrameKind::Native, 0xc0));
    builder.sample(0xc0, (1, 1), &[(tiny, 3)], &[1]);
    let profile = builder.finish(Meta::default());

    let bytes = plain(written("pprof", &profile));
    let document = fields(&bytes);
    let all = |number| document.iter().filter(move |field| field.0 == number);
    let number = |parts: &[(u64, u64, &[u8])], of| parts.iter().find(|part| part.0 == of).map_or(0, |part| part.1);
    let strings: Vec<_> = all(6).map(|field| std::str::from_utf8(field.2).unwrap()).collect();
    let name_of: BTreeMap<u64, &str> = all(5)
        .map(|field| {
            (
                number(&fields(field.2), 1),
                strings[number(&fields(field.2), 2) as usize],
            )
        })
        .collect();
    let mut names: Vec<_> = name_of
        .values()
        .copied()
        .filter(|name| !name.starts_with('['))
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["first", "second", "tiny"]);
    let mut locations: Vec<_> = all(4)
        .map(|field| {
            let parts = fields(field.2);
            let lines = parts.iter().filter(|part| part.0 == 4);
            let functions: Vec<_> = lines.map(|line| name_of[&number(&fields(line.2), 1)]).collect();
            (number(&parts, 3), functions.join(" in "))
        })
        .filter(|(address, _)| *address > 0)
        .collect();
    locations.sort_unstable();
    let places = [
        (0x40, "first"),
        (0x40, "tiny in first"),
        (0x80, "second"),
        (0x80, "tiny in second"),
        (0xc0, "tiny"),
    ];
    assert_eq!(locations, places.map(|(address, name)| (address, name.to_string())));

    let file: Json = serde_json::from_slice(&written("speedscope", &profile)).unwrap();
    let frames = file["shared"]["frames"].as_array().unwrap().iter();
    let mut frames: Vec<_> = frames.map(|frame| frame["name"].as_str().unwrap()).collect();
    frames.retain(|name| !name.starts_with('['));
    frames.sort_unstable();
    assert_eq!(frames, ["first", "second", "tiny"]);
    assert_eq!(file["profiles"][0]["samples"].as_array().unwrap().len(), 3);
}

/// A profile of many distinct stacks is written without the nodes with the fewest samples, and read with them.
#[test]
fn large_trees_are_small_files() {
    const SAMPLES: u64 = 70_000;
    let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL]);
    let frames: Vec<u32> = (0..60)
        .map(|at| {
            let name = format!("visit_{at}");
            builder.frame(Frame::python(
                &name,
                &name,
                "/srv/application/package/visitors.py",
                10 * at,
            ))
        })
        .collect();
    let mut state = 1u64;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut stack: Vec<(u32, u32)> = Vec::new();
    for at in 0..SAMPLES {
        stack.truncate(stack.len().saturating_sub(random(16) as usize));
        while stack.len() < 30 {
            let function = random(60) as u32;
            stack.push((frames[function as usize], 1 + 10 * function + random(4) as u32));
        }
        builder.sample(at * 250_000, (7, 7 + (at % 3) as u32), &stack, &[1, random(1000)]);
    }
    let profile = builder.finish(Meta::default());
    let mut expanded = Vec::new();
    json::write_expanded(&profile, &mut expanded).unwrap();
    let bytes = written("json", &profile);
    let (nodes, all) = (profile.nodes.len(), expanded.len());
    println!("{nodes} nodes: {} bytes, with all of them {all}", bytes.len());
    assert!(nodes > 400_000 && all > 100 << 20, "{nodes} nodes, {all} bytes");
    assert!(bytes.len() <= 30_000_000, "{}", bytes.len());
    let read = json::read(&bytes).unwrap();
    assert_eq!(read.nodes.len(), profile.nodes.len());
    let stacks = |profile: &Profile| {
        let text = String::from_utf8(written("collapsed", profile)).unwrap();
        let mut lines: Vec<String> = text.lines().map(str::to_string).collect();
        lines.sort();
        lines
    };
    assert!(stacks(&read) == stacks(&profile));
    assert!(stacks(&by_line(&read)) == stacks(&by_line(&profile)));
    // Each node completely: counts, values, lines.
    let nodes = |profile: &Profile| {
        let (wall, mut path) = (profile.amounts(1), vec![0u64; profile.nodes.len()]);
        let mut all: Vec<_> = (1..profile.nodes.len())
            .map(|at| {
                let node = &profile.nodes[at];
                let name = &profile.frames[node.frame as usize].name;
                let mut hasher = DefaultHasher::new();
                (path[node.parent as usize], name).hash(&mut hasher);
                path[at] = hasher.finish();
                (
                    path[at],
                    node.count,
                    wall[at],
                    node.lines.clone(),
                    node.self_lines.clone(),
                )
            })
            .collect();
        all.sort();
        all
    };
    assert!(nodes(&read) == nodes(&profile));
    // What Dask reads: fewer nodes, all samples, and counts that add up.
    let tree: Json = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(tree["count"], SAMPLES);
    let mut work = vec![&tree];
    let mut count = 0;
    while let Some(node) = work.pop() {
        count += 1;
        let below = || node["children"].as_object().unwrap().values();
        let sum: u64 = below().map(|child| child["count"].as_u64().unwrap()).sum();
        assert!(sum <= node["count"].as_u64().unwrap());
        work.extend(below());
    }
    assert_eq!(
        tree["nativeprof"]["samples"]["omitted_nodes"],
        profile.nodes.len() - count
    );
    assert!(count > 10_000, "{count}");
}

/// A function may be inlined into itself: both frames have one identifier.
#[test]
fn frames_of_one_identifier_keep_their_samples() {
    let mut builder = Builder::new(&[ValueType::SAMPLES]);
    let main = builder.frame(Frame::python("main", "main", "/srv/app.py", 7));
    let called = builder.frame(Frame::native("multiply", "lib.so", 0x40));
    let inlined = builder.frame(Frame {
        kind: FrameKind::Inlined,
        ..Frame::native("multiply", "lib.so", 0x40)
    });
    builder.sample(1, (1, 1), &[(main, 9), (called, 0)], &[1]);
    builder.sample(2, (1, 1), &[(main, 9), (called, 0), (inlined, 0)], &[1]);
    builder.sample(3, (1, 1), &[(inlined, 0)], &[1]);
    let profile = builder.finish(Meta::default());
    let read = json::read(&written("json", &profile)).unwrap();
    let times: Vec<u64> = read.timeline.iter().map(|sample| sample.time).collect();
    assert_eq!(times, [1, 2, 3]);
    assert!(written("collapsed", &read) == written("collapsed", &profile));
}
