//! A profile as the Firefox Profiler has it ("processed profile", version 60): one table of stacks, which is our tree,
//! and the samples of each thread in chronological order.
//!
//! Samples weigh what the first value has that does not follow from their number: wall time, bytes; else they are
//! counted. Frames have the line of their sample, Python functions a file and first line, native ones their library and
//! address; inlined functions are frames of the function they are in, with an inline depth. Python counts as
//! "JavaScript" where the viewer filters by that. Kinds of frames are categories. Samples without a time follow each
//! other in a separate thread.
//!
//! Written without the crate `fxprof-processed-profile`: version 0.8 supports neither lines and files nor inlined
//! functions, and has a table of stacks per thread.
//!
//! Sources: `src/types/profile.ts` and the upgrades of `processed-profile-versioning.ts` of the Firefox Profiler.

use std::io::{self, BufWriter, Write};

use super::thread_tracks::{StackRows, Timeline, Track, period};
use crate::escape::write_json;
use crate::profile::json::write::{comma, key_string, write_number};
use crate::profile::model::{FrameKind, ModuleMeta, Profile};
use crate::profile::stacks_by_line::StacksByLine;
use crate::profile::values::Unit;
use crate::profile::view::View;

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
    let timeline = Timeline::new(profile, &entries);
    let weight = weight(profile);
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
    for (at, track) in timeline.tracks.iter().enumerate() {
        let samples: Vec<_> = track
            .ticks
            .iter()
            .map(|(time, row, tick)| (*time, *row, profile.tick_amount(weight.0, *tick)))
            .collect();
        let is_main = track.pid == track.tid;
        write_thread(at, profile, track, is_main, (&samples, weight), period, &mut out)?;
    }
    if !timeline.untimed.is_empty() || timeline.tracks.is_empty() {
        let mut end = 0u64;
        let samples = timeline.untimed.iter().map(|(row, amounts)| {
            let time = end;
            end = end.saturating_add(period.saturating_mul(amounts[0]));
            (time, *row, amounts[weight.0])
        });
        let track = Track {
            pid: profile.meta.pid,
            tid: 0,
            name: "samples without a time".into(),
            ticks: Vec::new(),
        };
        let (at, only) = (timeline.tracks.len(), timeline.tracks.is_empty());
        write_thread(
            at,
            profile,
            &track,
            only,
            (&samples.collect::<Vec<_>>(), weight),
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

/// The value that weighs the samples of all threads, and what the viewer calls its unit: the first one that does not
/// follow from the count, or the count.
fn weight(profile: &Profile) -> (usize, &'static str) {
    let types = profile.value_types();
    let each = types.iter().position(|value| !value.is_per_count());
    let value = each.unwrap_or(0);
    let unit = match types[value].kind.unit {
        Unit::Count => "samples",
        Unit::Nanoseconds => "tracing-ms",
        Unit::Bytes => "bytes",
    };
    (value, unit)
}

/// A sample: ns since the start, row of the stacks, weight.
type Weighted = (u64, u32, u64);

fn write_thread(
    at: usize,
    profile: &Profile,
    track: &Track,
    is_main: bool,
    (samples, (_, unit)): (&[Weighted], (usize, &str)),
    period: u64,
    out: &mut impl Write,
) -> io::Result<()> {
    let first = samples.first().map_or(0, |(time, ..)| *time);
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
    column("stack", samples.iter().map(|(_, item, _)| Some(i64::from(*item))), out)?;
    if unit == "tracing-ms" {
        out.write_all(b",\"weight\":[")?;
        for (at, (.., ns)) in samples.iter().enumerate() {
            out.write_all(comma(at).as_bytes())?;
            write_milliseconds(*ns, out)?;
        }
        out.write_all(b"]")?;
    } else if samples.iter().any(|(.., count)| *count != 1) {
        let counts = samples
            .iter()
            .map(|(.., count)| Some(i64::try_from(*count).unwrap_or(i64::MAX)));
        column("weight", counts, out)?;
    } else {
        out.write_all(b",\"weight\":null")?;
    }
    out.write_all(b",\"time\":[")?;
    for (at, (time, ..)) in samples.iter().enumerate() {
        out.write_all(comma(at).as_bytes())?;
        write_milliseconds(*time, out)?;
    }
    out.write_all(b"]")?;
    let mut before = first.saturating_sub(period);
    let deltas = samples.iter().map(|(time, ..)| {
        let ran = (time - before).min(period);
        before = *time;
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

    #[test]
    fn build_ids_as_breakpad_has_them() {
        let id = "0123456789abcdeffedcba9876543210aabbccdd";
        assert_eq!(breakpad_id(id), "67452301AB89EFCDFEDCBA98765432100");
        assert_eq!(breakpad_id("0123456789abcdef"), "");
        assert_eq!(breakpad_id("ß".repeat(40).as_str()), "");
    }
}
