//! A profile as speedscope has it: a table of functions, all samples merged, and each thread in order of time.
//!
//! The first profile in the file counts samples; the threads' profiles are in nanoseconds since the start, with nothing
//! on the stack while a thread was not running. Where the threads' stacks would take more than viewers can open, only
//! the first is there, and the name of the file says so.
//!
//! Source: `file-format-schema.json` of speedscope 1.25.

use std::io::{self, BufWriter, Write};

use super::escape::write_json;
use super::json::{comma, key_string, write_number};
use super::stacks::{Span, Stacks, Timeline, Track, joined, period, spans};
use super::view::View;
use crate::tree::profile::Profile;

/// Frames of all stacks in order of time; at some 6 bytes each. Browsers refuse texts of 512 MB.
const MOST_FRAMES: u64 = 64 << 20;

/// Writes the profile as speedscope's JSON.
pub fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let view = View::new(profile);
    let stacks = Stacks::new(&view);
    let timeline = Timeline::new(profile, &view, &stacks);
    let period = period(profile).unwrap_or(1);
    let tracks: Vec<(&Track, Vec<Span>)> = timeline
        .tracks
        .iter()
        .map(|track| (track, joined(spans(track, period))))
        .collect();
    let spans = tracks.iter().flat_map(|(_, spans)| spans);
    let frames: u64 = spans.map(|span| u64::from(stacks.depth[span.item as usize])).sum();
    let fits = frames <= MOST_FRAMES;

    let mut out = BufWriter::with_capacity(64 << 10, out);
    out.write_all(b"{\"$schema\":\"https://www.speedscope.app/file-format-schema.json\",")?;
    let mut name = match profile.meta.command.as_str() {
        "" => "nativeprof".to_string(),
        command => command.to_string(),
    };
    if !fits {
        name += " (merged only: too many samples to show in order of time)";
    }
    key_string("name", &name, &mut out)?;
    out.write_all(b",")?;
    key_string("exporter", &format!("nativeprof {}", profile.meta.version), &mut out)?;
    out.write_all(b",\"activeProfileIndex\":0,\"shared\":{\"frames\":[")?;
    for (at, function) in stacks.functions.iter().enumerate() {
        out.write_all(if at == 0 { b"\n{\"name\":" } else { b",\n{\"name\":" })?;
        write_json(&function.name, &mut out)?;
        if !function.file.is_empty() {
            out.write_all(b",")?;
            key_string("file", function.file, &mut out)?;
        }
        if function.first_line > 0 {
            write!(out, ",\"line\":{}", function.first_line)?;
        }
        out.write_all(b"}")?;
    }
    out.write_all(b"\n]},\"profiles\":[\n")?;
    write_merged(&stacks, &mut out)?;
    if fits {
        for (track, spans) in &tracks {
            out.write_all(b",\n")?;
            write_track(&stacks, track, spans, &mut out)?;
        }
    }
    out.write_all(b"\n]}\n")?;
    out.flush()
}

fn write_merged(stacks: &Stacks<'_>, out: &mut impl Write) -> io::Result<()> {
    let ends = || (0..).zip(&stacks.own).filter(|(_, own)| **own > 0);
    let total = stacks.own.iter().fold(0u64, |sum, own| sum.saturating_add(*own));
    write!(
        out,
        "{{\"type\":\"sampled\",\"name\":\"all threads, merged\",\"unit\":\"none\",\"startValue\":0,\"endValue\":{total},\
         \"samples\":["
    )?;
    let mut stack = Vec::new();
    for (at, (item, _)) in ends().enumerate() {
        stacks.functions_of(item, &mut stack);
        write_stack(at, &stack, out)?;
    }
    out.write_all(b"],\"weights\":[")?;
    for (at, (_, own)) in ends().enumerate() {
        out.write_all(comma(at).as_bytes())?;
        write_number(*own, out)?;
    }
    out.write_all(b"]}")
}

fn write_track(stacks: &Stacks<'_>, track: &Track, spans: &[Span], out: &mut impl Write) -> io::Result<()> {
    let (start, end) = match (spans.first(), spans.last()) {
        (Some(first), Some(last)) => (first.start, last.end),
        _ => (0, 0),
    };
    out.write_all(b"{\"type\":\"sampled\",")?;
    key_string("name", &format!("{}, pid {}", track.title(), track.pid), out)?;
    write!(
        out,
        ",\"unit\":\"nanoseconds\",\"startValue\":{start},\"endValue\":{end},\"samples\":["
    )?;
    let (mut stack, mut at, mut before) = (Vec::new(), 0, start);
    let mut weights = Vec::with_capacity(spans.len());
    for span in spans {
        if span.start > before {
            write_stack(at, &[], out)?;
            weights.push(span.start - before);
            at += 1;
        }
        stacks.functions_of(span.item, &mut stack);
        write_stack(at, &stack, out)?;
        weights.push(span.end - span.start);
        at += 1;
        before = span.end;
    }
    out.write_all(b"],\"weights\":[")?;
    for (at, weight) in weights.into_iter().enumerate() {
        out.write_all(comma(at).as_bytes())?;
        write_number(weight, out)?;
    }
    out.write_all(b"]}")
}

fn write_stack(at: usize, functions: &[u32], out: &mut impl Write) -> io::Result<()> {
    out.write_all(if at == 0 { b"[" } else { b",[" })?;
    for (at, function) in functions.iter().enumerate() {
        out.write_all(comma(at).as_bytes())?;
        write_number((*function).into(), out)?;
    }
    out.write_all(b"]")
}
