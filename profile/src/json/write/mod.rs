//! Writes a profile as the count tree of Dask's `distributed.profile`, in JSON.
//!
//! ```text
//! node     {"identifier", "description", "count", "values"?, "lines"?, "self_lines"?, "nativeprof"? (root only),
//!           "children": {identifier: node}}
//! Python   identifier `name;filename;firstlineno`, description {filename, name, line_number, line, qualname?}
//! native   identifier `name (module);<low-level>;0xADDR`, description {filename: "<low-level>", name, line_number: 0,
//!          line: the frame as text, kind, module?, source?, inlined?, source_line?, source_text?}
//! ```
//!
//! `kind` is one of `native`, `inlined`, `kernel`, `truncated`, `state`, `unknown`, `process`, `thread`, `task`,
//! `worker`; a Python node has none. ADDR is the start of the function in its file's own address space. `line_number`
//! and `line` belong to the first sample at that place; `lines` counts all of them, `{line: samples}`, and `self_lines`
//! the self samples (omitted if there are none or all are). Counts are inclusive. Keys marked with `?` are optional.
//! Everything but the four keys of Dask is ours, and Dask ignores it.
//!
//! The root's `value_types`, below `nativeprof`, are what is measured: `{"name", "unit", "per_count"?}`, the type of
//! the counts first. `unit` is `count`, `nanoseconds` or `bytes`. Where there is a `per_count` the amount of each node
//! is its count times that, and is not written; else `values` of a node has the inclusive amounts that are not 0, by
//! the name of the type with its unit: `{"wall_ns", "alloc_bytes", "allocs", ...}`. Files without `value_types` have
//! samples, and CPU time if their `rate` is not 0.
//!
//! The root's `nativeprof` has the metadata of the recording, among them `modules`, a row for each file on some stack
//! (path, build ID, where its symbols came from, what was not found), and the samples in chronological order. In a
//! merged profile `merged_from` describes each recording.
//!
//! ```text
//! samples  {"threads": {"pid", "tid"}, "thread"?, "time", "stack", "values"?, "omitted_nodes"?, "stacks"}
//! stacks   {"functions", "frames": {"function", "line"}, "up", "frame"}
//! ```
//!
//! `samples` is the timeline, in columns in chronological order: index of the thread (omitted if there is only one), ns
//! since the sample before (of the first, since the start), row of the stack; of value types without a `per_count` also the
//! amounts, by key. Rows of `stacks` are numbered from 1; row 0 is the root, of samples of which no stack is known.
//! Each is a frame below another row: the one that comes after `up` steps towards the root from the row before it. A
//! frame is a function at a line (0 if it is not known), which is the line of just these samples, of callers too. A
//! function is the number of a node, or, where no node in the file has it, an object with its identifier and
//! description.
//!
//! A node is numbered by its place in the file: the root is 0, and each node is followed by its children, in order,
//! each with all that is below it. Of very many nodes those with the fewest samples are omitted from the tree,
//! `omitted_nodes` of them; their samples are in the counts of the nodes above them, and in `samples`.
//!
//! Earlier versions wrote `timeline` instead of `samples`: columns `time` (ns since the start), `pid`, `tid` and
//! `node`. [`write_expanded`] still does.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::escape::write_json;
use crate::model::{Frame, FrameKind, Profile};
use crate::stacks_by_line::StacksByLine;
use crate::values::Amounts;
use crate::view::{LOW_LEVEL, View, ViewNode, shown_name};
use crate::view::{frame_text, is_group};

mod lags;
mod memory;
mod meta;
mod samples;

pub(crate) use meta::write_meta;

/// Rises when a reader of older files would misread newer ones.
pub const FORMAT_VERSION: u64 = 1;

/// Writes the profile as JSON.
pub fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    write_as(profile, false, out)
}

/// Writes the profile as JSON with all its nodes in the tree, however many, and a plain timeline: for programs that
/// work on the tree itself.
pub fn write_expanded(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    write_as(profile, true, out)
}

fn write_as(profile: &Profile, expanded: bool, out: &mut dyn Write) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(64 << 10, out);
    write_tree(profile, &View::new(profile), expanded, &mut out)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Writes the profile as gzip-compressed JSON. The same profile gives the same bytes: no time stamp is stored.
pub fn write_gz(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let mut gz = GzEncoder::new(out, Compression::fast());
    write(profile, &mut gz)?;
    gz.finish()?.flush()
}

/// `kind` in descriptions of nodes that are not Python code.
pub(crate) const KINDS: &[(&str, FrameKind)] = &[
    ("native", FrameKind::Native),
    ("inlined", FrameKind::Inlined),
    ("kernel", FrameKind::Kernel),
    ("truncated", FrameKind::Truncated),
    ("task", FrameKind::Task),
    ("worker", FrameKind::Worker),
    ("state", FrameKind::State),
    ("unknown", FrameKind::Unknown),
    ("process", FrameKind::Process),
    ("thread", FrameKind::Thread),
];

fn write_tree(profile: &Profile, view: &View<'_>, expanded: bool, out: &mut impl Write) -> io::Result<()> {
    let fragments = NodeFragments::new(profile, view)?;
    let entries = StacksByLine::new(profile, view);
    let kept = if expanded {
        vec![true; view.items.len()]
    } else {
        samples::kept(profile, view, &entries, &fragments)
    };
    open_node(view, &fragments, 0, out)?;
    out.write_all(b",\"nativeprof\":{")?;
    write_meta(&profile.meta, out)?;
    write_value_types(profile, out)?;
    if expanded {
        write_timeline(profile, view, out)?
    } else {
        samples::write(profile, view, &entries, &fragments, &kept, out)?
    }
    out.write_all(b"},\"children\":{")?;
    // An own stack of (item, children already written), because a profile may be deeper than ours.
    let mut path = vec![(0u32, 0usize, true)];
    while let Some((item, done, first)) = path.last_mut() {
        let left = view.children(*item).get(*done..).unwrap_or_default();
        let skipped = left.iter().take_while(|child| !kept[**child as usize]).count();
        match left.get(skipped) {
            Some(&child) => {
                out.write_all(if std::mem::replace(first, false) { b"\n" } else { b",\n" })?;
                *done += skipped + 1;
                out.write_all(&fragments.identifiers[view.items[child as usize].identifier as usize])?;
                out.write_all(b":")?;
                open_node(view, &fragments, child, out)?;
                out.write_all(b",\"children\":{")?;
                path.push((child, 0, true));
            }
            None => {
                out.write_all(b"}}")?;
                path.pop();
            }
        }
    }
    Ok(())
}

/// What all nodes of one function have in common, written once: most of the file is this.
struct NodeFragments {
    /// As JSON strings, by [`View::identifiers`].
    identifiers: Vec<Vec<u8>>,
    /// By frame, the description up to where the node's line belongs, and after that.
    descriptions: Vec<(Vec<u8>, Vec<u8>)>,
    /// Values that do not follow from the count: `"key":`, and inclusive amounts by item.
    values: Vec<(Vec<u8>, Vec<u64>)>,
}

impl NodeFragments {
    fn new(profile: &Profile, view: &View<'_>) -> io::Result<Self> {
        let identifiers = view.identifiers.iter().map(|text| {
            let mut json = Vec::with_capacity(text.len() + 8);
            write_json(text, &mut json).map(|()| json)
        });
        let types = profile.value_types().iter().enumerate().skip(1);
        let values = types.filter(|(_, value)| !value.is_per_count()).map(|(at, value)| {
            let mut key = Vec::new();
            write_json(&value.kind.key(), &mut key)?;
            key.push(b':');
            Ok((key, view.amounts(profile, at)))
        });
        Ok(NodeFragments {
            values: values.collect::<io::Result<_>>()?,
            identifiers: identifiers.collect::<io::Result<_>>()?,
            descriptions: view.frames.iter().map(describe).collect::<io::Result<_>>()?,
        })
    }
}

impl NodeFragments {
    /// About how many bytes a node takes.
    fn bytes(&self, view: &View<'_>, item: u32) -> usize {
        let item = &view.items[item as usize];
        let (head, tail) = item.frame.map_or((0, 0), |frame| {
            let (head, tail) = &self.descriptions[frame as usize];
            (head.len(), tail.len())
        });
        let lines = 12 * (item.lines.len() + item.self_lines.len());
        2 * self.identifiers[item.identifier as usize].len() + head + tail + item.line_text.len() + lines + 80
    }

    /// Writes a function as an object: identifier and description, without a line.
    fn write_function(&self, view: &View<'_>, identifier: u32, out: &mut impl Write) -> io::Result<()> {
        out.write_all(b"{\"identifier\":")?;
        out.write_all(&self.identifiers[identifier as usize])?;
        out.write_all(b",\"description\":{")?;
        let item = ViewNode {
            parent: 0,
            frame: view.first_frame(identifier),
            identifier,
            count: 0,
            lines: Cow::Owned(BTreeMap::new()),
            self_lines: Cow::Owned(BTreeMap::new()),
            line_text: "",
            first_seen_line: 0,
        };
        write_description(view, self, &item, out)?;
        out.write_all(b"}}")
    }
}

fn describe(frame: &Frame) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let (mut head, mut tail) = (Vec::new(), Vec::new());
    let name = shown_name(frame);
    let group = is_group(frame);
    let python = frame.kind == FrameKind::Python;
    let filename = if python { frame.filename.as_str() } else { LOW_LEVEL };
    key_string("filename", if group { "" } else { filename }, &mut head)?;
    head.extend(b",");
    key_string("name", &name, &mut head)?;
    if python {
        head.extend(b",\"line_number\":");
        optional_string("qualname", &frame.qualname, &mut tail)?;
        return Ok((head, tail));
    }
    head.extend(b",\"line_number\":0,");
    let mut text = if group {
        String::new()
    } else {
        frame_text(frame).into_owned()
    };
    if !group && !frame.source.is_empty() {
        text.push_str(&format!(" at {}:", frame.source));
    }
    key_string("line", &text, &mut head)?;
    // The closing quote: a source line may have to be inserted before it.
    head.pop();
    tail.extend(b"\"");
    let kind = KINDS
        .iter()
        .find(|(_, kind)| *kind == frame.kind)
        .map_or("native", |(name, _)| name);
    optional_string("kind", kind, &mut tail)?;
    optional_string("module", &frame.module, &mut tail)?;
    optional_string("source", &frame.source, &mut tail)?;
    if frame.kind == FrameKind::Inlined {
        tail.extend(b",\"inlined\":true");
    }
    Ok((head, tail))
}

/// Writes a node up to its children.
fn open_node(view: &View<'_>, fragments: &NodeFragments, index: u32, out: &mut impl Write) -> io::Result<()> {
    let item = &view.items[index as usize];
    out.write_all(b"{\"identifier\":")?;
    out.write_all(&fragments.identifiers[item.identifier as usize])?;
    out.write_all(b",\"description\":{")?;
    write_description(view, fragments, item, out)?;
    out.write_all(b"},\"count\":")?;
    write_number(item.count, out)?;
    write_values(fragments, index, out)?;
    write_lines(b",\"lines\":{\"", &item.lines, out)?;
    if item.self_lines != item.lines {
        write_lines(b",\"self_lines\":{\"", &item.self_lines, out)?;
    }
    Ok(())
}

fn write_values(fragments: &NodeFragments, index: u32, out: &mut impl Write) -> io::Result<()> {
    let mut open = false;
    for (key, amounts) in &fragments.values {
        let amount = amounts[index as usize];
        if amount > 0 {
            out.write_all(if open { b"," } else { b",\"values\":{" })?;
            open = true;
            out.write_all(key)?;
            write_number(amount, out)?;
        }
    }
    out.write_all(if open { b"}" } else { b"" })
}

fn write_value_types(profile: &Profile, out: &mut impl Write) -> io::Result<()> {
    for (at, value) in profile.value_types().iter().enumerate() {
        out.write_all(if at == 0 { b",\"value_types\":[{" } else { b",{" })?;
        key_string("name", &value.kind.name, out)?;
        write!(out, ",\"unit\":\"{}\"", value.kind.unit.name())?;
        if let Amounts::PerCount(amount) = value.amounts {
            write!(out, ",\"per_count\":{amount}")?;
        }
        out.write_all(b"}")?;
    }
    out.write_all(b"]")
}

fn write_lines(start: &[u8], lines: &BTreeMap<u32, u64>, out: &mut impl Write) -> io::Result<()> {
    for (at, (line, count)) in lines.iter().enumerate() {
        out.write_all(if at == 0 { start } else { b",\"" })?;
        write_number((*line).into(), out)?;
        out.write_all(b"\":")?;
        write_number(*count, out)?;
    }
    out.write_all(if lines.is_empty() { b"" } else { b"}" })
}

fn write_description(
    view: &View<'_>,
    fragments: &NodeFragments,
    item: &ViewNode<'_>,
    out: &mut impl Write,
) -> io::Result<()> {
    let Some(id) = item.frame else {
        return out.write_all(b"\"filename\":\"\",\"name\":\"\",\"line_number\":0,\"line\":\"\"");
    };
    let frame = &view.frames[id as usize];
    let (head, tail) = &fragments.descriptions[id as usize];
    let line = u64::from(item.first_seen_line);
    out.write_all(head)?;
    if frame.kind == FrameKind::Python {
        write_number(line, out)?;
        out.write_all(b",\"line\":")?;
        write_json(item.line_text, out)?;
        return out.write_all(tail);
    }
    if !frame.source.is_empty() && !is_group(frame) {
        write_number(line, out)?;
    }
    out.write_all(tail)?;
    if line != 0 {
        out.write_all(b",\"source_line\":")?;
        write_number(line, out)?;
    }
    optional_string("source_text", item.line_text, out)
}

fn write_timeline(profile: &Profile, view: &View<'_>, out: &mut impl Write) -> io::Result<()> {
    // Ticks at a node that is not in the tree are left out, as the node is.
    let place = if profile.timeline.is_empty() {
        Vec::new()
    } else {
        view.preorder()
    };
    let samples = || {
        profile
            .timeline
            .iter()
            .filter_map(|sample| Some((sample, place[view.item_of(sample.node)? as usize])))
    };
    out.write_all(b",\"timeline\":{\"time\":[")?;
    write_column(samples().map(|(sample, _)| sample.time), out)?;
    out.write_all(b"],\"pid\":[")?;
    write_column(samples().map(|(sample, _)| sample.pid.into()), out)?;
    out.write_all(b"],\"tid\":[")?;
    write_column(samples().map(|(sample, _)| sample.tid.into()), out)?;
    out.write_all(b"],\"node\":[")?;
    write_column(samples().map(|(_, place)| place.into()), out)?;
    out.write_all(b"]")?;
    let mut open = false;
    for (at, value) in profile.value_types().iter().enumerate() {
        if !value.is_per_count() {
            out.write_all(if open { b"," } else { b",\"values\":{" })?;
            open = true;
            write_json(&value.kind.key(), out)?;
            out.write_all(b":[")?;
            let rows = (0..)
                .zip(&profile.timeline)
                .filter(|(_, sample)| view.item_of(sample.node).is_some());
            write_column(rows.map(|(sample, _)| profile.sample_amount(at, sample)), out)?;
            out.write_all(b"]")?;
        }
    }
    if open {
        out.write_all(b"}")?;
    }
    let rows = (0u32..)
        .zip(&profile.timeline)
        .filter(|(_, sample)| view.item_of(sample.node).is_some());
    let rows: Vec<u32> = rows.map(|(at, _)| at).collect();
    samples::write_labels(&profile.labels, &rows, out)?;
    out.write_all(b"}")
}

fn write_column(numbers: impl Iterator<Item = u64>, out: &mut impl Write) -> io::Result<()> {
    for (at, number) in numbers.enumerate() {
        out.write_all(comma(at).as_bytes())?;
        write_number(number, out)?;
    }
    Ok(())
}

/// `write!` does this too, in several times the time, and a profile is full of numbers.
pub(crate) fn write_number(mut number: u64, out: &mut impl Write) -> io::Result<()> {
    let mut digits = [0; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return out.write_all(&digits[at..]);
        }
    }
}

pub(crate) fn comma(at: usize) -> &'static str {
    if at == 0 { "" } else { "," }
}

pub(crate) fn key_string(key: &str, text: &str, out: &mut impl Write) -> io::Result<()> {
    out.write_all(b"\"")?;
    out.write_all(key.as_bytes())?;
    out.write_all(b"\":")?;
    write_json(text, out)
}

fn optional_string(key: &str, text: &str, out: &mut impl Write) -> io::Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    out.write_all(b",")?;
    key_string(key, text, out)
}
