//! A profile in the trace event format of Chrome, in the form of V8's CPU profiles: for each thread a tree of
//! functions, the node of each sample, the time since the one before and the line where it ended. DevTools, Perfetto
//! and speedscope open it.
//!
//! A sample lasts until the next one; `(idle)` follows where the thread was not running, unless its wait was sampled.
//! Times are in microseconds since the start. Samples without a time follow each other in a separate thread.
//!
//! Sources: "Trace Event Format" (metadata and sample events), V8's `profile-generator.cc` (`ProfileChunk`).

use std::io::{self, BufWriter, Write};

use super::thread_tracks::{NONE, StackRows, StackSpan, Timeline, Track, length_of, period, spans};
use crate::escape::write_json;
use crate::json::write::{comma, key_string, write_number};
use crate::model::Profile;
use crate::stacks_by_line::StacksByLine;
use crate::view::View;

/// Nodes that are not in the tree.
const ROOT: u32 = 1;
const IDLE: u32 = 2;
/// Number of the first item's node.
const FIRST: u32 = 3;

/// Writes the profile as trace events.
pub fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let view = View::new(profile);
    let entries = StacksByLine::new(profile, &view);
    let lines = StackRows::by_line(profile, &view, &entries);
    let timeline = Timeline::new(profile, &entries);
    let stacks = StackRows::by_function(&view);
    let period = period(profile).unwrap_or(1000);
    let mut tracks: Vec<(Track, Vec<StackSpan>)> = timeline
        .tracks
        .into_iter()
        .map(|track| {
            let spans = spans(profile, &track, period);
            (track, spans)
        })
        .collect();
    tracks.extend(untimed(profile, &timeline.untimed, period));

    let mut out = BufWriter::with_capacity(64 << 10, out);
    out.write_all(b"{\"traceEvents\":[\n")?;
    let mut named = None;
    for (at, (track, _)) in tracks.iter().enumerate() {
        let Track { pid, tid, .. } = track;
        if named.replace(*pid) != Some(*pid) {
            let command = if *pid == profile.meta.pid {
                profile.meta.command.as_str()
            } else {
                ""
            };
            let name = if command.is_empty() {
                format!("process {pid}")
            } else {
                command.to_string()
            };
            out.write_all(if at == 0 { b"" } else { b",\n" })?;
            write_name("process_name", &name, *pid, *tid, &mut out)?;
        }
        out.write_all(b",\n")?;
        let name = if track.name.is_empty() {
            track.title()
        } else {
            track.name.clone()
        };
        write_name("thread_name", &name, *pid, *tid, &mut out)?;
    }
    let mut number = vec![0; view.items.len()];
    for (at, (track, spans)) in tracks.iter().enumerate() {
        let start = spans.first().map_or(0, |span| micros(span.start));
        let end = spans.last().map_or(0, |span| micros(span.end));
        let Track { pid, tid, .. } = track;
        // DevTools shows a thread, and a time, only where some event is.
        write!(
            out,
            ",\n{{\"ph\":\"X\",\"cat\":\"nativeprof\",\"name\":\"sampled\",\"pid\":{pid},\"tid\":{tid},\"ts\":{start},\
             \"dur\":{}}}",
            end - start
        )?;
        for (name, is_chunk) in [("Profile", false), ("ProfileChunk", true)] {
            write!(
                out,
                ",\n{{\"ph\":\"P\",\"cat\":\"disabled-by-default-v8.cpu_profiler\",\"name\":\"{name}\",\"id\":\"0x{:x}\",\
                 \"pid\":{pid},\"tid\":{tid},\"ts\":{start},\"args\":{{\"data\":{{",
                at + 1
            )?;
            if is_chunk {
                write_chunk(&stacks, &lines, spans, start, &mut number, &mut out)?;
            } else {
                write!(out, "\"startTime\":{start}")?;
            }
            out.write_all(b"}}}")?;
        }
    }
    out.write_all(b"\n],\"displayTimeUnit\":\"ms\",\"otherData\":{")?;
    key_string("exporter", &format!("nativeprof {}", profile.meta.version), &mut out)?;
    out.write_all(b"}}\n")?;
    out.flush()
}

/// Samples without a time, as a thread.
fn untimed(profile: &Profile, samples: &[(u32, Vec<u64>)], period: u64) -> Option<(Track, Vec<StackSpan>)> {
    let mut end = 0u64;
    let spans = samples.iter().map(|(item, amounts)| {
        let start = end;
        end = end.saturating_add(length_of(profile, period, amounts[0]));
        StackSpan {
            start,
            end,
            item: *item,
        }
    });
    let track = Track {
        pid: profile.meta.pid,
        tid: 0,
        name: "samples without a time".into(),
        samples: Vec::new(),
    };
    (!samples.is_empty()).then(|| (track, spans.collect()))
}

fn micros(ns: u64) -> u64 {
    ns / 1000
}

fn write_name(what: &str, name: &str, pid: u32, tid: u32, out: &mut impl Write) -> io::Result<()> {
    write!(
        out,
        "{{\"ph\":\"M\",\"cat\":\"__metadata\",\"name\":\"{what}\",\"pid\":{pid},\"tid\":{tid},\"ts\":0,\"args\":{{"
    )?;
    key_string("name", name, out)?;
    out.write_all(b"}}")
}

/// The complete profile of one thread. Spans are at rows of `lines`, nodes are rows of `stacks`: the viewers take a
/// line for the end of a stack only. `number` has room for each item, zeros, and is left so.
fn write_chunk(
    stacks: &StackRows<'_>,
    lines: &StackRows<'_>,
    spans: &[StackSpan],
    start: u64,
    number: &mut [u32],
    out: &mut impl Write,
) -> io::Result<()> {
    let mut used = Vec::new();
    for span in spans {
        let mut item = lines.item[span.item as usize];
        while item != NONE && number[item as usize] == 0 {
            number[item as usize] = 1;
            used.push(item);
            item = stacks.caller[item as usize];
        }
    }
    // Callers before callees.
    used.sort_unstable();
    out.write_all(b"\"cpuProfile\":{\"nodes\":[")?;
    write!(
        out,
        "{{\"id\":{ROOT},\"callFrame\":{{\"functionName\":\"(root)\",\"scriptId\":0,\"url\":\"\"}}}},\
         {{\"id\":{IDLE},\"parent\":{ROOT},\"callFrame\":{{\"functionName\":\"(idle)\",\"scriptId\":0,\"url\":\"\"}}}}"
    )?;
    for (at, item) in (FIRST..).zip(&used) {
        number[*item as usize] = at;
        let caller = stacks.caller[*item as usize];
        let parent = if caller == NONE { ROOT } else { number[caller as usize] };
        let function = &stacks.functions[stacks.function[*item as usize] as usize];
        out.write_all(b",\n{\"id\":")?;
        write_number(at.into(), out)?;
        out.write_all(b",\"parent\":")?;
        write_number(parent.into(), out)?;
        out.write_all(b",\"callFrame\":{\"functionName\":")?;
        write_json(&function.name, out)?;
        out.write_all(b",\"scriptId\":0,\"url\":")?;
        write_json(function.file, out)?;
        if function.first_line > 0 {
            // Counted from 0, unlike everywhere else.
            out.write_all(b",\"lineNumber\":")?;
            write_number(u64::from(function.first_line) - 1, out)?;
        }
        out.write_all(b"}}")?;
    }
    let mut samples: Vec<(u64, u32, u32)> = Vec::with_capacity(spans.len() + 1);
    for (at, span) in spans.iter().enumerate() {
        let (item, line) = (lines.item[span.item as usize], lines.line[span.item as usize]);
        samples.push((micros(span.start), number[item as usize], line));
        if spans
            .get(at + 1)
            .is_none_or(|next| micros(next.start) > micros(span.end))
        {
            samples.push((micros(span.end), IDLE, 0));
        }
    }
    out.write_all(b"],\"samples\":[")?;
    for (at, (_, node, _)) in samples.iter().enumerate() {
        out.write_all(comma(at).as_bytes())?;
        write_number((*node).into(), out)?;
    }
    out.write_all(b"]},\"timeDeltas\":[")?;
    let mut before = start;
    for (at, (time, ..)) in samples.iter().enumerate() {
        out.write_all(comma(at).as_bytes())?;
        write_number(time - before, out)?;
        before = *time;
    }
    for item in used {
        number[item as usize] = 0;
    }
    if samples.iter().any(|(.., line)| *line > 0) {
        out.write_all(b"],\"lines\":[")?;
        for (at, (.., line)) in samples.iter().enumerate() {
            out.write_all(comma(at).as_bytes())?;
            write_number((*line).into(), out)?;
        }
    }
    out.write_all(b"]")
}
