//! A profile as the count tree of Dask's `distributed.profile`, in JSON; and back.
//!
//! ```text
//! node     {"identifier", "description", "count", "lines"?, "nativeprof"? (root only), "children": {identifier: node}}
//! Python   identifier `name;filename;firstlineno`, description {filename, name, line_number, line, qualname?}
//! native   identifier `name;<low-level>;0xADDR`, description {filename: "<low-level>", name, line_number: 0,
//!          line: the frame as text, kind, module?, source?, source_line?, source_text?, inlined?}
//! ```
//!
//! `kind` is one of `native`, `inlined`, `kernel`, `cut`, `unknown`, `process`, `thread`; a Python node has none.
//! ADDR is the start of the function in its file's own address space. `line_number` and `line` belong to the first
//! sample at that place; `lines` counts all of them, `{line: samples}`. Counts are inclusive. Keys marked with `?` are
//! left out when they have nothing to say. Everything but the four keys of Dask is ours, and Dask ignores it.
//!
//! The root's `nativeprof` holds the facts of the recording and the timeline: columns of equal length, `time` (ns since
//! the start), `pid`, `tid` and `node`. A node is numbered by its place in the file: the root is 0, and each node is
//! followed by its children, in order, each with all that is below it.

use std::io::{self, BufWriter, Write};

use flate2::Compression;
use flate2::write::GzEncoder;

use super::collapsed::frame_text;
use super::escape::write_json;
pub use super::json_read::{Error, read};
use super::view::{Item, LOW_LEVEL, View, shown_name};
use crate::tree::profile::{FrameKind, Meta, Profile};

/// Rises when a reader of older files would misread newer ones.
pub const FORMAT_VERSION: u64 = 1;

/// Writes the profile as JSON.
pub fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(64 << 10, out);
    write_tree(profile, &View::new(profile), &mut out)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Writes the profile as JSON, compressed by gzip. The same profile gives the same bytes: no time stamp is stored.
pub fn write_gz(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let mut gz = GzEncoder::new(out, Compression::default());
    write(profile, &mut gz)?;
    gz.finish()?.flush()
}

/// `kind` in descriptions of nodes that are not Python code.
pub(super) const KINDS: &[(&str, FrameKind)] = &[
    ("native", FrameKind::Native),
    ("inlined", FrameKind::Inlined),
    ("kernel", FrameKind::Kernel),
    ("cut", FrameKind::Cut),
    ("unknown", FrameKind::Unknown),
    ("process", FrameKind::Process),
    ("thread", FrameKind::Thread),
];

fn write_tree(profile: &Profile, view: &View<'_>, out: &mut impl Write) -> io::Result<()> {
    open_node(profile, view, 0, out)?;
    // An own stack of (item, children already written), because a profile may be deeper than ours.
    let mut path = vec![(0u32, 0usize)];
    while let Some((item, done)) = path.last_mut() {
        match view.children(*item).get(*done) {
            Some(&child) => {
                out.write_all(if *done == 0 { b"\n" } else { b",\n" })?;
                *done += 1;
                write_json(&view.identifiers[view.items[child as usize].identifier as usize], out)?;
                out.write_all(b":")?;
                open_node(profile, view, child, out)?;
                path.push((child, 0));
            }
            None => {
                out.write_all(b"}}")?;
                path.pop();
            }
        }
    }
    Ok(())
}

/// Writes a node up to the opening brace of its children.
fn open_node(profile: &Profile, view: &View<'_>, index: u32, out: &mut impl Write) -> io::Result<()> {
    let item = &view.items[index as usize];
    out.write_all(b"{\"identifier\":")?;
    write_json(&view.identifiers[item.identifier as usize], out)?;
    out.write_all(b",\"description\":{")?;
    write_description(item, out)?;
    write!(out, "}},\"count\":{}", item.count)?;
    if !item.lines.is_empty() {
        out.write_all(b",\"lines\":{")?;
        for (at, (line, count)) in item.lines.iter().enumerate() {
            write!(out, "{}\"{line}\":{count}", comma(at))?;
        }
        out.write_all(b"}")?;
    }
    if index == 0 {
        out.write_all(b",\"nativeprof\":{")?;
        write_meta(&profile.meta, out)?;
        write_timeline(profile, view, out)?;
        out.write_all(b"}")?;
    }
    out.write_all(b",\"children\":{")
}

fn write_description(item: &Item<'_>, out: &mut impl Write) -> io::Result<()> {
    let Some(frame) = item.frame else {
        return out.write_all(b"\"filename\":\"\",\"name\":\"\",\"line_number\":0,\"line\":\"\"");
    };
    let name = shown_name(frame);
    if frame.kind == FrameKind::Python {
        key_string("filename", &frame.filename, out)?;
        out.write_all(b",")?;
        key_string("name", &name, out)?;
        write!(out, ",\"line_number\":{},", item.first_seen_line)?;
        key_string("line", item.line_text, out)?;
        return optional_string("qualname", &frame.qualname, out);
    }
    let group = matches!(frame.kind, FrameKind::Process | FrameKind::Thread);
    key_string("filename", if group { "" } else { LOW_LEVEL }, out)?;
    out.write_all(b",")?;
    key_string("name", &name, out)?;
    out.write_all(b",\"line_number\":0,")?;
    let mut text = if group {
        String::new()
    } else {
        frame_text(frame, 0).into_owned()
    };
    if !group && !frame.source.is_empty() {
        text.push_str(&format!(" at {}:{}", frame.source, item.first_seen_line));
    }
    key_string("line", &text, out)?;
    let kind = KINDS
        .iter()
        .find(|(_, kind)| *kind == frame.kind)
        .map_or("native", |(name, _)| name);
    optional_string("kind", kind, out)?;
    optional_string("module", &frame.module, out)?;
    optional_string("source", &frame.source, out)?;
    if item.first_seen_line != 0 {
        write!(out, ",\"source_line\":{}", item.first_seen_line)?;
    }
    optional_string("source_text", item.line_text, out)?;
    if frame.kind == FrameKind::Inlined {
        out.write_all(b",\"inlined\":true")?;
    }
    Ok(())
}

fn write_meta(meta: &Meta, out: &mut impl Write) -> io::Result<()> {
    write!(out, "\"format\":{FORMAT_VERSION}")?;
    for (key, text) in [
        ("version", &meta.version),
        ("event", &meta.event),
        ("backend", &meta.backend),
        ("python", &meta.python),
    ] {
        out.write_all(b",")?;
        key_string(key, text, out)?;
    }
    out.write_all(b",")?;
    key_string("command", &meta.command, out)?;
    write!(out, ",\"pid\":{},\"rate\":{}", meta.pid, meta.rate)?;
    for (key, seconds) in [
        ("start", meta.start),
        ("duration", meta.duration),
        ("own_cpu", meta.own_cpu),
    ] {
        // JSON has no word for infinity and the like.
        write!(out, ",\"{key}\":{:?}", if seconds.is_finite() { seconds } else { 0.0 })?;
    }
    let q = &meta.quality;
    out.write_all(b",\"quality\":{")?;
    let counts = [
        ("asked", q.asked),
        ("taken", q.taken),
        ("exact", q.exact),
        ("repaired", q.repaired),
        ("partial", q.partial),
        ("lost", q.lost),
    ];
    for (key, count) in counts {
        write!(out, "\"{key}\":{count},")?;
    }
    out.write_all(b"\"reasons\":{")?;
    for (at, (reason, count)) in q.reasons.iter().enumerate() {
        write!(out, "{}", comma(at))?;
        write_json(reason, out)?;
        write!(out, ":{count}")?;
    }
    out.write_all(b"}},\"modules\":[")?;
    for (at, module) in meta.modules.iter().enumerate() {
        write!(out, "{}{{", comma(at))?;
        for (key, text) in [
            ("path", &module.path),
            ("build_id", &module.build_id),
            ("names", &module.names),
        ] {
            key_string(key, text, out)?;
            out.write_all(b",")?;
        }
        write!(out, "\"frames\":{}}}", module.frames)?;
    }
    out.write_all(b"],\"threads\":[")?;
    for (at, (pid, tid, name)) in meta.threads.iter().enumerate() {
        write!(out, "{}{{\"pid\":{pid},\"tid\":{tid},", comma(at))?;
        key_string("name", name, out)?;
        out.write_all(b"}")?;
    }
    out.write_all(b"]")
}

fn write_timeline(profile: &Profile, view: &View<'_>, out: &mut impl Write) -> io::Result<()> {
    // Ticks at a node that is not in the tree are left out, as the node is.
    let place = if profile.timeline.is_empty() {
        Vec::new()
    } else {
        view.preorder()
    };
    let ticks = || {
        profile
            .timeline
            .iter()
            .filter_map(|tick| Some((tick, place[view.item_of(tick.node)? as usize])))
    };
    out.write_all(b",\"timeline\":{\"time\":[")?;
    write_column(ticks().map(|(tick, _)| tick.time), out)?;
    out.write_all(b"],\"pid\":[")?;
    write_column(ticks().map(|(tick, _)| tick.pid.into()), out)?;
    out.write_all(b"],\"tid\":[")?;
    write_column(ticks().map(|(tick, _)| tick.tid.into()), out)?;
    out.write_all(b"],\"node\":[")?;
    write_column(ticks().map(|(_, place)| place.into()), out)?;
    out.write_all(b"]}")
}

fn write_column(numbers: impl Iterator<Item = u64>, out: &mut impl Write) -> io::Result<()> {
    for (at, number) in numbers.enumerate() {
        write!(out, "{}{number}", comma(at))?;
    }
    Ok(())
}

fn comma(at: usize) -> &'static str {
    if at == 0 { "" } else { "," }
}

fn key_string(key: &str, text: &str, out: &mut impl Write) -> io::Result<()> {
    write!(out, "\"{key}\":")?;
    write_json(text, out)
}

fn optional_string(key: &str, text: &str, out: &mut impl Write) -> io::Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    out.write_all(b",")?;
    key_string(key, text, out)
}
