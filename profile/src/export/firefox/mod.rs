//! A profile as the Firefox Profiler has it ("processed profile", version 60): one table of stacks, which is our tree,
//! and the samples of each thread in chronological order.
//!
//! Samples weigh what they have of the profile's first value: counts, wall time, bytes. Frames have the line of their
//! sample, Python functions a file and first line, native ones their library and address; inlined functions are frames
//! of the function they are in, with an inline depth. Python counts as "JavaScript" where the viewer filters by that.
//! Kinds of frames are categories. Samples without a time follow each other in a separate thread.
//!
//! Written without the crate `fxprof-processed-profile`: version 0.8 supports neither lines and files nor inlined
//! functions, and has a table of stacks per thread.
//!
//! Sources: `src/types/profile.ts` and the upgrades of `processed-profile-versioning.ts` of the Firefox Profiler.

use std::io::{self, BufWriter, Write};

use super::thread_tracks::{StackRows, Timeline, Track, length_of, period};
use crate::escape::write_json;
use crate::json::write::{comma, key_string, write_number};
use crate::model::{FrameKind, ModuleMeta, Profile};
use crate::stacks_by_line::StacksByLine;
use crate::values::Unit;
use crate::view::View;

mod tables;

use tables::FirefoxTables;

const VERSION: u32 = 60;

/// Name and color; the first is the viewer's default.
const CATEGORIES: &[(&str, &str)] = &[
    ("Other", "grey"),
    ("Python", "blue"),
    ("Native", "orange"),
    ("Inlined", "yellow"),
    ("Kernel", "purple"),
    ("Truncated stack", "darkgray"),
    ("No symbol", "brown"),
    ("Off CPU", "transparent"),
];

fn category(kind: Option<FrameKind>) -> u32 {
    match kind {
        Some(FrameKind::Python) => 1,
        Some(FrameKind::Native) => 2,
        Some(FrameKind::Inlined) => 3,
        Some(FrameKind::Kernel) => 4,
        Some(FrameKind::Truncated) => 5,
        Some(FrameKind::Unknown) => 6,
        Some(FrameKind::State) => 7,
        _ => 0,
    }
}

/// Writes the profile as a processed profile.
pub fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let view = View::new(profile);
    let entries = StacksByLine::new(profile, &view);
    let stacks = StackRows::by_line(profile, &view, &entries);
    let tables = FirefoxTables::new(profile, &stacks);
    let states = stacks.states(&view);
    let timeline = Timeline::new(profile, &entries);
    let unit = weight_unit(profile);
    let cpu_value = profile.find_value("cpu");
    let cpu_value = cpu_value.filter(|value| !profile.value_types()[*value].is_per_count());
    let mut out = BufWriter::with_capacity(64 << 10, out);
    out.write_all(b"{\"meta\":{")?;
    write_meta(profile, &mut out)?;
    out.write_all(b"},\n\"libs\":[")?;
    for (at, lib) in tables.libs.iter().enumerate() {
        write_lib(at, lib, &mut out)?;
    }
    out.write_all(b"],\n\"shared\":{")?;
    tables.write(&stacks, &mut out)?;
    out.write_all(b"},\n\"threads\":[")?;
    let period = period(profile).unwrap_or(1_000_000);
    let cpu = |row: u32, amount: &dyn Fn(usize) -> u64| match states[row as usize] {
        Some(_) => 0,
        None => cpu_value.map_or(period, amount),
    };
    for (at, track) in timeline.tracks.iter().enumerate() {
        let samples: Vec<_> = track
            .samples
            .iter()
            .map(|(time, row, sample)| FirefoxSample {
                time: *time,
                row: *row,
                weight: profile.sample_amount(0, *sample),
                cpu: cpu(*row, &|value| profile.sample_amount(value, *sample)),
            })
            .collect();
        let is_main = track.pid == track.tid;
        write_thread(at, profile, track, is_main, (&samples, unit), period, &mut out)?;
    }
    if !timeline.untimed.is_empty() || timeline.tracks.is_empty() {
        let mut end = 0u64;
        let samples = timeline.untimed.iter().map(|(row, amounts)| {
            let time = end;
            end = end.saturating_add(length_of(profile, period, amounts[0]));
            FirefoxSample {
                time,
                row: *row,
                weight: amounts[0],
                cpu: cpu(*row, &|value| amounts[value]),
            }
        });
        let track = Track {
            pid: profile.meta.pid,
            tid: 0,
            name: "samples without a time".into(),
            samples: Vec::new(),
        };
        let (at, only) = (timeline.tracks.len(), timeline.tracks.is_empty());
        write_thread(
            at,
            profile,
            &track,
            only,
            (&samples.collect::<Vec<_>>(), unit),
            period,
            &mut out,
        )?;
    }
    out.write_all(b"]}\n")?;
    out.flush()
}

fn write_meta(profile: &Profile, out: &mut impl Write) -> io::Result<()> {
    let meta = &profile.meta;
    let finite = |n: f64| if n.is_finite() { n } else { 0.0 };
    let interval = period(profile).map_or(1.0, |ns| ns as f64 / 1e6);
    write!(
        out,
        "\"interval\":{interval:?},\"startTime\":{:?},\"processType\":0,\"version\":24,\
         \"preprocessedProfileVersion\":{VERSION},\"stackwalk\":1,\"debug\":false,\"symbolicated\":true,\
         \"usesOnlyOneStackType\":false,\"sourceCodeIsNotOnSearchfox\":true,\"markerSchema\":[],\
         \"extensions\":{{\"length\":0,\"baseURL\":[],\"id\":[],\"name\":[]}},\
         \"sampleUnits\":{{\"time\":\"ms\",\"eventDelay\":\"ms\",\"threadCPUDelta\":\"µs\"}},\
         \"platform\":\"Linux\",\"oscpu\":\"Linux\",\"toolkit\":\"\",\"importedFrom\":\"nativeprof\",",
        finite(meta.start * 1e3)
    )?;
    let product = if meta.command.is_empty() {
        "nativeprof"
    } else {
        &meta.command
    };
    key_string("product", product, out)?;
    out.write_all(b",\"categories\":[")?;
    for (at, (name, color)) in CATEGORIES.iter().enumerate() {
        write!(
            out,
            "{}{{\"name\":\"{name}\",\"color\":\"{color}\",\"subcategories\":[\"Other\"]}}",
            comma(at)
        )?;
    }
    out.write_all(b"],\"extra\":[{\"label\":\"Recording\",\"entries\":[")?;
    let q = &meta.quality;
    let mut facts = vec![
        ("Profiler", format!("nativeprof {}", meta.version)),
        ("Samples", q.taken.to_string()),
        ("Exact stacks", q.exact.to_string()),
        ("Repaired stacks", q.repaired.to_string()),
        ("Partial stacks", q.partial.to_string()),
        ("Lost samples", q.lost.to_string()),
    ];
    for (label, text) in [
        ("Python", &meta.python),
        ("Event", &meta.event),
        ("Backend", &meta.backend),
    ] {
        facts.extend((!text.is_empty()).then(|| (label, text.clone())));
    }
    for (at, (label, value)) in facts.iter().enumerate() {
        write!(out, "{}{{\"label\":\"{label}\",\"format\":\"string\",", comma(at))?;
        key_string("value", value, out)?;
        out.write_all(b"}")?;
    }
    out.write_all(b"]}]")
}

fn write_lib(at: usize, lib: &ModuleMeta, out: &mut impl Write) -> io::Result<()> {
    let name = base_name(&lib.path);
    write!(out, "{}\n{{\"arch\":\"{}\"", comma(at), std::env::consts::ARCH)?;
    for (key, text) in [
        ("name", name),
        ("path", &lib.path),
        ("debugName", name),
        ("debugPath", &lib.path),
        ("breakpadId", &breakpad_id(&lib.build_id)),
    ] {
        out.write_all(b",")?;
        key_string(key, text, out)?;
    }
    out.write_all(b",\"codeId\":")?;
    match lib.build_id.as_str() {
        "" => out.write_all(b"null")?,
        id => write_json(id, out)?,
    }
    out.write_all(b"}")
}

/// The build id as Breakpad names it: its first 16 bytes as a GUID of a little-endian machine, and an age of 0.
fn breakpad_id(build_id: &str) -> String {
    if !build_id.is_ascii() || build_id.len() < 32 {
        return String::new();
    }
    let bytes: Vec<&str> = (0..16).map(|at| &build_id[2 * at..2 * at + 2]).collect();
    let order = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15];
    let guid: String = order.iter().map(|at| bytes[*at]).collect();
    guid.to_ascii_uppercase() + "0"
}

fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or("")
}

/// A column of a table, after another.
fn column(name: &str, values: impl Iterator<Item = Option<i64>>, out: &mut impl Write) -> io::Result<()> {
    write!(out, ",\"{name}\":[")?;
    for (at, value) in values.enumerate() {
        out.write_all(comma(at).as_bytes())?;
        match value {
            None => out.write_all(b"null")?,
            Some(n) => {
                out.write_all(if n < 0 { b"-" } else { b"" })?;
                write_number(n.unsigned_abs(), out)?;
            }
        }
    }
    out.write_all(b"]")
}

/// What the viewer calls the unit of the profile's first value.
fn weight_unit(profile: &Profile) -> &'static str {
    match profile.count_type().unit {
        Unit::Count => "samples",
        Unit::Nanoseconds => "tracing-ms",
        Unit::Bytes => "bytes",
    }
}

/// A sample of a thread.
struct FirefoxSample {
    /// ns since the start.
    time: u64,
    /// Row of the stacks.
    row: u32,
    weight: u64,
    /// CPU time that it represents, ns.
    cpu: u64,
}

fn write_thread(
    at: usize,
    profile: &Profile,
    track: &Track,
    is_main: bool,
    (samples, unit): (&[FirefoxSample], &str),
    period: u64,
    out: &mut impl Write,
) -> io::Result<()> {
    let first = samples.first().map_or(0, |sample| sample.time);
    let name = if track.name.is_empty() {
        track.title()
    } else {
        track.name.clone()
    };
    write!(out, "{}\n{{\"processType\":\"default\",\"processName\":", comma(at))?;
    let command = if track.pid == profile.meta.pid {
        profile.meta.command.as_str()
    } else {
        ""
    };
    match command {
        "" => write_json(&format!("process {}", track.pid), out)?,
        command => write_json(command, out)?,
    }
    out.write_all(b",")?;
    key_string("name", &name, out)?;
    write!(
        out,
        ",\"isMainThread\":{is_main},\"pid\":\"{}\",\"tid\":{},\"processStartupTime\":0,\"processShutdownTime\":null,\
         \"registerTime\":{:?},\"unregisterTime\":null,\"pausedRanges\":[],\"markers\":{{\"length\":0,\"category\":[],\
         \"data\":[],\"endTime\":[],\"name\":[],\"phase\":[],\"startTime\":[]}},\
         \"samples\":{{\"length\":{},\"weightType\":\"{unit}\"",
        track.pid,
        track.tid,
        first.saturating_sub(period) as f64 / 1e6,
        samples.len()
    )?;
    column("stack", samples.iter().map(|sample| Some(i64::from(sample.row))), out)?;
    if unit == "tracing-ms" {
        out.write_all(b",\"weight\":[")?;
        for (at, sample) in samples.iter().enumerate() {
            out.write_all(comma(at).as_bytes())?;
            write_milliseconds(sample.weight, out)?;
        }
        out.write_all(b"]")?;
    } else if samples.iter().any(|sample| sample.weight != 1) {
        let counts = samples
            .iter()
            .map(|sample| Some(i64::try_from(sample.weight).unwrap_or(i64::MAX)));
        column("weight", counts, out)?;
    } else {
        out.write_all(b",\"weight\":null")?;
    }
    out.write_all(b",\"time\":[")?;
    for (at, sample) in samples.iter().enumerate() {
        out.write_all(comma(at).as_bytes())?;
        write_milliseconds(sample.time, out)?;
    }
    out.write_all(b"]")?;
    let mut before = first.saturating_sub(period);
    let deltas = samples.iter().map(|sample| {
        let ran = sample.cpu.min(sample.time.saturating_sub(before));
        before = sample.time;
        Some((ran / 1000) as i64)
    });
    column("threadCPUDelta", deltas, out)?;
    out.write_all(b"}}")
}

/// As a number of JSON, to the nanosecond.
fn write_milliseconds(ns: u64, out: &mut impl Write) -> io::Result<()> {
    write_number(ns / 1_000_000, out)?;
    let rest = ns % 1_000_000;
    if rest == 0 {
        return Ok(());
    }
    let digits: [u8; 6] = std::array::from_fn(|at| b'0' + (rest / 10u64.pow(5 - at as u32) % 10) as u8);
    out.write_all(b".")?;
    out.write_all(&digits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::Builder;
    use crate::model::{Frame, Meta};
    use crate::values::ValueType;

    #[test]
    fn only_running_threads_use_the_cpu() {
        const MS: u64 = 1_000_000;
        let deltas = |types: &[ValueType]| {
            let mut builder = Builder::new(types);
            let function = builder.frame(Frame::python("f", "f", "/a.py", 1));
            let wait = builder.frame(Frame::new(FrameKind::State, "[waiting: gil]"));
            let runnable = builder.frame(Frame::new(FrameKind::State, "[runnable]"));
            for (time, below, cpu) in [
                (10, &[][..], 10),
                (40, &[wait], 0),
                (50, &[runnable], 0),
                // With the stack of the thread that ended the wait.
                (60, &[wait, function], 0),
                (100, &[], 25),
                (105, &[], 10),
            ] {
                let stack: Vec<(u32, u32)> = [function].iter().chain(below).map(|frame| (*frame, 0)).collect();
                builder.sample(time * MS, (1, 1), &stack, &[1, cpu * MS]);
            }
            let profile = builder.finish(Meta {
                rate: 100,
                ..Meta::default()
            });
            let mut out = Vec::new();
            write(&profile, &mut out).unwrap();
            let file: serde_json::Value = serde_json::from_slice(&out).unwrap();
            file["threads"][0]["samples"]["threadCPUDelta"].clone()
        };
        let counted = deltas(&[ValueType::SAMPLES]);
        assert_eq!(counted, serde_json::json!([10_000, 0, 0, 0, 10_000, 5_000]));
        let weighted = deltas(&[ValueType::SAMPLES, ValueType::CPU]);
        assert_eq!(weighted, serde_json::json!([10_000, 0, 0, 0, 25_000, 5_000]));
    }

    #[test]
    fn build_ids_as_breakpad_has_them() {
        let id = "0123456789abcdeffedcba9876543210aabbccdd";
        assert_eq!(breakpad_id(id), "67452301AB89EFCDFEDCBA98765432100");
        assert_eq!(breakpad_id("0123456789abcdef"), "");
        assert_eq!(breakpad_id("ß".repeat(40).as_str()), "");
    }
}
