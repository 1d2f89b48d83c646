//! A profile as speedscope has it: a table of functions, all samples merged, and each thread in chronological order.
//!
//! A frame is a function at a line. The first profiles in the file are of all threads, one for each value type that is
//! no multiple of the count; the threads' profiles are in nanoseconds since the start of the profile, all up to its
//! end, with nothing on the stack while a thread was not running, unless its wait was sampled. Where the threads'
//! stacks would take more than viewers can open, only the first ones are written, and the name of the file says so.
//!
//! Source: `file-format-schema.json` of speedscope 1.25.

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};

use super::thread_tracks::{StackRows, StackSpan, Timeline, Track, joined, period, spans};
use crate::escape::write_json;
use crate::json::write::{comma, key_string, write_number};
use crate::model::Profile;
use crate::stacks_by_line::StacksByLine;
use crate::values::{Unit, ValueType};
use crate::view::View;

/// Frames of all stacks in chronological order; at some 6 bytes each. Browsers refuse texts of 512 MB.
const MAX_FRAMES: u64 = 64 << 20;

/// Writes the profile as speedscope's JSON.
pub fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let view = View::new(profile);
    let entries = StacksByLine::new(profile, &view);
    let stacks = StackRows::by_line(profile, &view, &entries);
    let frames = SpeedscopeFrames::new(&stacks);
    let timeline = Timeline::new(profile, &entries);
    let period = period(profile).unwrap_or(1);
    let tracks: Vec<(&Track, Vec<StackSpan>)> = timeline
        .tracks
        .iter()
        .map(|track| (track, joined(spans(profile, track, period))))
        .collect();
    let spans = tracks.iter().flat_map(|(_, spans)| spans);
    let on_stacks: u64 = spans.map(|span| u64::from(stacks.depth[span.item as usize])).sum();
    let fits = on_stacks <= MAX_FRAMES;
    // The viewer begins each profile at 0, whatever the file says: only with one axis do those of threads fit each other.
    let end = profile.end();

    let mut out = BufWriter::with_capacity(64 << 10, out);
    out.write_all(b"{\"$schema\":\"https://www.speedscope.app/file-format-schema.json\",")?;
    let mut name = match profile.meta.command.as_str() {
        "" => "nativeprof".to_string(),
        command => command.to_string(),
    };
    if !fits {
        name += " (merged only: too many samples for a chronological view)";
    }
    key_string("name", &name, &mut out)?;
    out.write_all(b",")?;
    key_string("exporter", &format!("nativeprof {}", profile.meta.version), &mut out)?;
    out.write_all(b",\"activeProfileIndex\":0,\"shared\":{\"frames\":[")?;
    for (at, (function, line)) in frames.all.iter().enumerate() {
        let function = &stacks.functions[*function as usize];
        out.write_all(if at == 0 { b"\n{\"name\":" } else { b",\n{\"name\":" })?;
        write_json(&function.name, &mut out)?;
        if !function.file.is_empty() {
            out.write_all(b",")?;
            key_string("file", function.file, &mut out)?;
        }
        if *line > 0 {
            write!(out, ",\"line\":{line}")?;
        }
        out.write_all(b"}")?;
    }
    out.write_all(b"\n]},\"profiles\":[\n")?;
    // A value that is a constant per count looks the same as the count.
    let types = profile.value_types().iter().enumerate();
    for (at, value) in types.filter(|(at, value)| *at == 0 || !value.is_per_count()) {
        out.write_all(if at == 0 { b"" } else { b",\n" })?;
        let self_counts = entries.self_amounts(profile, at);
        write_merged(&stacks, &frames, &value.kind, at, &self_counts, &mut out)?;
    }
    if fits {
        for (track, spans) in &tracks {
            out.write_all(b",\n")?;
            write_track(&stacks, &frames, track, (spans, end), &mut out)?;
        }
    }
    out.write_all(b"\n]}\n")?;
    out.flush()
}

/// Functions at lines.
struct SpeedscopeFrames {
    /// Function, and line: of Python code that of its definition where no other is known.
    all: Vec<(u32, u32)>,
    of_row: Vec<u32>,
    /// Represents deeper frames.
    deeper: u32,
}

impl SpeedscopeFrames {
    fn new(stacks: &StackRows<'_>) -> SpeedscopeFrames {
        let mut all = Vec::new();
        // By what is shown: an inlined function is one for each function around it. Names come from the target: this hasher
        // resists collision attacks.
        let mut known: HashMap<(&str, &str, u32), u32> = HashMap::new();
        let mut frame = |function: u32, line: u32| {
            let line = if line > 0 {
                line
            } else {
                stacks.functions[function as usize].first_line
            };
            let of = &stacks.functions[function as usize];
            *known.entry((&of.name, of.file, line)).or_insert_with(|| {
                all.push((function, line));
                all.len() as u32 - 1
            })
        };
        let rows = stacks.function.iter().zip(&stacks.line);
        let of_row = rows.map(|(function, line)| frame(*function, *line)).collect();
        let deeper = frame(stacks.deeper(), 0);
        SpeedscopeFrames { all, of_row, deeper }
    }

    /// The frames of the stack that ends in a row, outermost first, into `out`.
    fn of_stack(&self, stacks: &StackRows<'_>, row: u32, out: &mut Vec<u32>) {
        out.clear();
        let (path, deeper) = stacks.path(row);
        out.extend(deeper.then_some(self.deeper));
        out.extend(path.map(|row| self.of_row[row as usize]));
        out.reverse();
    }
}

/// All stacks with their amounts of a value type.
fn write_merged(
    stacks: &StackRows<'_>,
    frames: &SpeedscopeFrames,
    kind: &ValueType,
    at: usize,
    self_counts: &[u64],
    out: &mut impl Write,
) -> io::Result<()> {
    let ends = || (0..).zip(self_counts).filter(|(_, self_count)| **self_count > 0);
    let total = self_counts
        .iter()
        .fold(0u64, |sum, self_count| sum.saturating_add(*self_count));
    let unit = match kind.unit {
        Unit::Count => "none",
        unit => unit.name(),
    };
    out.write_all(b"{\"type\":\"sampled\",")?;
    let name = match (at, kind) {
        (0, kind) if *kind == ValueType::SAMPLES => "all threads, merged".to_string(),
        _ => format!("all threads, merged: {}", kind.name),
    };
    key_string("name", &name, out)?;
    write!(
        out,
        ",\"unit\":\"{unit}\",\"startValue\":0,\"endValue\":{total},\"samples\":["
    )?;
    let mut stack = Vec::new();
    for (at, (row, _)) in ends().enumerate() {
        frames.of_stack(stacks, row, &mut stack);
        write_stack(at, &stack, out)?;
    }
    out.write_all(b"],\"weights\":[")?;
    for (at, (_, self_count)) in ends().enumerate() {
        out.write_all(comma(at).as_bytes())?;
        write_number(*self_count, out)?;
    }
    out.write_all(b"]}")
}

fn write_track(
    stacks: &StackRows<'_>,
    frames: &SpeedscopeFrames,
    track: &Track,
    (spans, end): (&[StackSpan], u64),
    out: &mut impl Write,
) -> io::Result<()> {
    out.write_all(b"{\"type\":\"sampled\",")?;
    key_string("name", &format!("{}, pid {}", track.title(), track.pid), out)?;
    write!(
        out,
        ",\"unit\":\"nanoseconds\",\"startValue\":0,\"endValue\":{end},\"samples\":["
    )?;
    let (mut stack, mut at, mut before) = (Vec::new(), 0, 0);
    let mut weights = Vec::with_capacity(spans.len());
    for span in spans {
        if span.start > before {
            write_stack(at, &[], out)?;
            weights.push(span.start - before);
            at += 1;
        }
        frames.of_stack(stacks, span.item, &mut stack);
        write_stack(at, &stack, out)?;
        weights.push(span.end - span.start);
        at += 1;
        before = span.end;
    }
    if end > before {
        write_stack(at, &[], out)?;
        weights.push(end - before);
    }
    out.write_all(b"],\"weights\":[")?;
    for (at, weight) in weights.into_iter().enumerate() {
        out.write_all(comma(at).as_bytes())?;
        write_number(weight, out)?;
    }
    out.write_all(b"]}")
}

fn write_stack(at: usize, frames: &[u32], out: &mut impl Write) -> io::Result<()> {
    out.write_all(if at == 0 { b"[" } else { b",[" })?;
    for (at, frame) in frames.iter().enumerate() {
        out.write_all(comma(at).as_bytes())?;
        write_number((*frame).into(), out)?;
    }
    out.write_all(b"]")
}
