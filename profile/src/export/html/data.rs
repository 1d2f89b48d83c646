//! The profile packed for the page: a deflate stream of the length of a JSON text (4 bytes, little endian), the text, and
//! columns of numbers in LEB128.
//!
//! ```text
//! text     {"meta", "kinds", "files", "modules", "categories",
//!          "functions": {"name", "kind", "file", "module", "category", "line", "hottest"},
//!          "threads": [[pid, tid, name]], "nodes",
//!          "folded", "interpreterFrames", "noSource", "timeline", "values",
//!          "excerpts": [[path, lines of the file, line, text, ...]],
//!          "assembly": [[function, whether its file was checked, [address, length, text, samples, source, line], ...]],
//!          "labels": [[key, value, ...]] (of a profile with labels), "lags" (see `lags.rs`),
//!          "waits" (of a profile with off-CPU time, see `waits.rs`), "comparison" (of two profiles, see `comparison.rs`)}
//! columns  of nodes: distance to the parent, function, self samples, number of lines
//!          of lines: distance to the line before in the same node, samples, self samples
//!          of samples: microseconds since the sample before, thread, node
//!          of each of "values": of nodes the self amount (except of the first value, which is the samples
//!          above), of samples the amount (if it is "weighted")
//!          of the "folded" nodes, those without the interpreter's frames: as of nodes and of lines; then of nodes the
//!          folded node that has its samples; with "waits", of samples the site and the length of the interval;
//!          with "labels", of samples the number of the set of labels
//! ```
//!
//! The text's "values" are the value types to choose from, the one of the counts first: {"name", "unit", "weighted"}.
//! Value types that are a constant per count are omitted: they add no information.
//!
//! Node 0 is the root; each node is followed by all that is below it. Node `n` with function 0 is the root, functions
//! are counted from 1. Long names are shortened.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::{self, Write};

use flate2::write::ZlibEncoder;
use rustc_hash::FxHashMap;

use super::comparison::Comparison;
use super::{COMPRESSION, PageOptions, lags, waits};
use crate::category::Categories;
use crate::escape::write_json;
use crate::folded;
use crate::json::write;
use crate::model::{Frame, FrameKind, Meta, Profile};
use crate::stats::Stats;
use crate::values::Value;
use crate::view::{View, identifier, shown_name};
use crate::your_functions::{InnermostFunction, InnermostFunctions};

/// Characters of a name that are kept.
const MAX_NAME: usize = 1000;

/// Names of the kinds in the page; functions refer to them by index.
const KINDS: &[(FrameKind, &str)] = &[
    (FrameKind::Python, "python"),
    (FrameKind::Native, "native"),
    (FrameKind::Inlined, "inlined"),
    (FrameKind::Kernel, "kernel"),
    (FrameKind::Truncated, "truncated"),
    (FrameKind::Task, "task"),
    (FrameKind::Worker, "worker"),
    (FrameKind::State, "state"),
    (FrameKind::Unknown, "unknown"),
    (FrameKind::Process, "process"),
    (FrameKind::Thread, "thread"),
    (FrameKind::Root, "root"),
];

/// The packed profile. `comparison`: the profile is both profiles of this one.
pub fn pack(profile: &Profile, options: &PageOptions<'_>, comparison: Option<&Comparison<'_>>) -> io::Result<Vec<u8>> {
    let (folded, into) = folded::with_targets(profile);
    // Both have the same functions, so that their numbers mean the same.
    let profile = &Profile {
        frames: folded.frames.clone(),
        ..profile.clone()
    };
    let (view, folded_view) = (View::new(profile), View::new(&folded));
    let mut columns = NumberColumn::default();
    columns.nodes(&view);
    let (threads, order) = columns.samples(profile, &view);
    columns.values(profile, &view, &order);
    columns.nodes(&folded_view);
    columns.targets(&view, &folded_view, &into);
    let mut text = Vec::new();
    head(profile, &view, &threads, &mut text)?;
    text.pop();
    lags::write(&profile.meta.lags, &view, &threads, &mut text)?;
    write!(
        text,
        ",\"folded\":{},\"interpreterFrames\":{},\"noSource\":{}",
        folded_view.items.len(),
        options.interpreter_frames,
        options.no_source
    )?;
    if let Some(value) = waits::value(profile) {
        let shown = values(profile).position(|(at, _)| at == value).unwrap_or(0);
        text.extend(b",\"waits\":");
        for column in waits::write(profile, value, shown, &threads, &mut text)? {
            order.iter().for_each(|sample| columns.push(column[*sample]));
        }
    }
    if !profile.labels.is_empty() {
        list("labels", profile.labels.sets.iter(), &mut text, |set, out| {
            out.push(b'[');
            for (at, text) in set.iter().flat_map(|(key, value)| [key, value]).enumerate() {
                out.extend((at > 0).then_some(b','));
                write_json(&short(text), out)?;
            }
            out.write_all(b"]")
        })?;
        let sets = &profile.labels.of_samples;
        order
            .iter()
            .for_each(|sample| columns.push(sets.get(*sample).map_or(0, |set| (*set).into())));
    }
    if let Some(comparison) = comparison {
        text.extend(b",\"comparison\":");
        comparison.write(&view, &mut text)?;
    }
    text.push(b'}');

    let mut out = ZlibEncoder::new(Vec::new(), COMPRESSION);
    let length = u32::try_from(text.len()).map_err(io::Error::other)?;
    out.write_all(&length.to_le_bytes())?;
    out.write_all(&text)?;
    out.write_all(&columns.0)?;
    out.finish()
}

/// A sequence of LEB128 numbers.
#[derive(Default)]
struct NumberColumn(Vec<u8>);

impl NumberColumn {
    fn push(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.0.push(n as u8 | 0x80);
            n >>= 7;
        }
        self.0.push(n as u8);
    }

    fn nodes(&mut self, view: &View<'_>) {
        let preorder = view.preorder();
        let mut items = vec![0u32; view.items.len()];
        for (item, at) in preorder.iter().enumerate() {
            items[*at as usize] = item as u32;
        }
        let of = |item: &u32| &view.items[*item as usize];
        for (at, item) in items.iter().enumerate().skip(1) {
            self.push(at as u64 - u64::from(preorder[of(item).parent as usize]));
        }
        items.iter().for_each(|item| self.push(of(item).identifier.into()));
        let self_counts = view.self_counts();
        items.iter().for_each(|item| self.push(self_counts[*item as usize]));
        items.iter().for_each(|item| self.push(of(item).lines.len() as u64));
        for item in &items {
            let mut before = 0;
            for line in of(item).lines.keys() {
                self.push(u64::from(line - before));
                before = *line;
            }
        }
        items
            .iter()
            .flat_map(|item| of(item).lines.values())
            .for_each(|n| self.push(*n));
        for item in &items {
            let ended = &of(item).self_lines;
            for line in of(item).lines.keys() {
                self.push(ended.get(line).copied().unwrap_or(0));
            }
        }
    }

    /// Of each item of a view, the item of the folded one that has its samples; `into` has this by node.
    fn targets(&mut self, view: &View<'_>, folded: &View<'_>, into: &[u32]) {
        let (order, folded_order) = (view.preorder(), folded.preorder());
        let mut targets = vec![0u32; view.items.len()];
        for (node, into) in into.iter().enumerate() {
            if let (Some(item), Some(target)) = (view.item_of(node as u32), folded.item_of(*into)) {
                targets[order[item as usize] as usize] = folded_order[target as usize];
            }
        }
        targets.into_iter().for_each(|target| self.push(target.into()));
    }

    /// Amounts of the values; `order` has the samples that were written.
    fn values(&mut self, profile: &Profile, view: &View<'_>, order: &[usize]) {
        let preorder = view.preorder();
        for (at, value) in values(profile) {
            if at > 0 {
                let mut amounts = vec![0; view.items.len()];
                for (item, amount) in view.self_amounts(profile, at).into_iter().enumerate() {
                    amounts[preorder[item] as usize] = amount;
                }
                amounts.into_iter().for_each(|amount| self.push(amount));
            }
            if !value.is_per_count() {
                order
                    .iter()
                    .for_each(|sample| self.push(profile.sample_amount(at, *sample)));
            }
        }
    }

    /// Timeline samples with valid nodes, by time; returns their threads and indices.
    fn samples(&mut self, profile: &Profile, view: &View<'_>) -> (Vec<(u32, u32)>, Vec<usize>) {
        let preorder = view.preorder();
        let mut threads = Vec::new();
        let mut known: FxHashMap<(u32, u32), u32> = FxHashMap::default();
        let mut samples: Vec<(u64, u32, u32, usize)> = profile
            .timeline
            .iter()
            .enumerate()
            .filter_map(|(at, t)| {
                let node = preorder[view.item_of(t.node)? as usize];
                let thread = *known.entry((t.pid, t.tid)).or_insert_with(|| {
                    threads.push((t.pid, t.tid));
                    threads.len() as u32 - 1
                });
                Some((t.time / 1000, thread, node, at))
            })
            .collect();
        samples.sort_by_key(|t| t.0);
        let mut before = 0;
        for (time, ..) in &samples {
            self.push(time - before);
            before = *time;
        }
        samples.iter().for_each(|t| self.push(t.1.into()));
        samples.iter().for_each(|t| self.push(t.2.into()));
        (threads, samples.into_iter().map(|t| t.3).collect())
    }
}

/// The value types to choose from, with their indices.
fn values(profile: &Profile) -> impl Iterator<Item = (usize, &Value)> {
    let types = profile.value_types().iter().enumerate();
    types.filter(|(at, value)| *at == 0 || !value.is_per_count())
}

/// What makes a Python function the same one: name, file, line of the definition.
type PythonFunction<'a> = (&'a str, &'a str, u32);

fn python_function(frame: &Frame) -> Option<PythonFunction<'_>> {
    (frame.kind == FrameKind::Python).then(|| (&*frame.name, &*frame.filename, frame.first_line))
}

/// The hottest lines of the functions that the page begins with.
fn hottest_lines(profile: &Profile) -> HashMap<PythonFunction<'_>, u32> {
    let stats = Stats::new(profile);
    let first = InnermostFunctions::of(profile, &stats);
    let line = |row: &InnermostFunction| Some((python_function(stats.frame(row.function))?, row.hottest_line));
    first.rows.iter().filter_map(line).collect()
}

fn head(profile: &Profile, view: &View<'_>, threads: &[(u32, u32)], out: &mut Vec<u8>) -> io::Result<()> {
    out.extend(b"{\"meta\":");
    out.push(b'{');
    let meta = Meta {
        lags: Vec::new(),
        ..profile.meta.clone()
    };
    write::write_meta(&meta, out)?;
    out.push(b'}');
    let kinds = KINDS.iter().map(|(_, name)| *name);
    list("kinds", kinds, out, write_json)?;

    // The first frame of each identifier represents all of them.
    let mut first: Vec<Option<&_>> = vec![None; view.identifiers.len()];
    for item in &view.items {
        let frame = item.frame.map(|id| &view.frames[id as usize]);
        first[item.identifier as usize] = first[item.identifier as usize].or(frame);
    }
    let (mut files, mut modules) = (Strings::default(), Strings::default());
    for (identifier, first) in first.iter_mut().enumerate().skip(1) {
        *first = first.or_else(|| view.function(identifier as u32));
    }
    let (categories, mut labels) = (Categories::new(profile), Strings::default());
    let label_of: Vec<String> = first
        .iter()
        .map(|frame| frame.and_then(|frame| categories.label(frame)).unwrap_or_default())
        .collect();
    let hottest = hottest_lines(profile);
    let mut columns = [const { Vec::new() }; 6];
    for (frame, label) in first.iter().zip(&label_of) {
        let kind = frame.map_or(FrameKind::Root, |f| f.kind);
        let kind = KINDS.iter().position(|(k, _)| *k == kind).unwrap_or(0) as u32;
        let (file, module, line) = frame.map_or(("", "", 0), |f| {
            let file = if f.kind == FrameKind::Python {
                &f.filename
            } else {
                &f.source
            };
            (file, &f.module, f.first_line)
        });
        let hottest = frame.and_then(|frame| hottest.get(&python_function(frame)?)).copied();
        let row = [
            kind,
            files.of(file),
            modules.of(module),
            labels.of(label),
            line,
            hottest.unwrap_or(0),
        ];
        for (column, n) in columns.iter_mut().zip(row) {
            column.push(n);
        }
    }
    list("files", files.all.iter(), out, |s, out| write_json(&short(s), out))?;
    list("modules", modules.all.iter(), out, |s, out| write_json(&short(s), out))?;
    list("categories", labels.all.iter(), out, |s, out| {
        write_json(&short(s), out)
    })?;
    out.extend(b",\"functions\":{\"count\":");
    write!(out, "{}", first.len())?;
    list("name", first.iter(), out, |frame, out| {
        let Some(f) = frame else {
            return write_json("all", out);
        };
        let name = match f.kind {
            FrameKind::Python | FrameKind::Task => Cow::Borrowed(f.full_name()),
            _ => shown_name(f),
        };
        write_json(&short(&name), out)
    })?;
    for (key, column) in ["kind", "file", "module", "category", "line", "hottest"]
        .iter()
        .zip(&columns)
    {
        list(key, column.iter(), out, |n, out| write!(out, "{n}"))?;
    }
    out.push(b'}');
    let names: FxHashMap<_, _> = profile
        .meta
        .threads
        .iter()
        .map(|(pid, tid, name)| ((*pid, *tid), name))
        .collect();
    list("threads", threads.iter(), out, |thread, out| {
        write!(out, "[{},{},", thread.0, thread.1)?;
        write_json(&short(names.get(thread).map_or("", |name| name)), out)?;
        out.write_all(b"]")
    })?;
    write!(
        out,
        ",\"nodes\":{},\"timeline\":{}",
        view.items.len(),
        timeline_length(profile, view)
    )?;
    list("values", values(profile), out, |(_, value), out| {
        out.write_all(b"{\"name\":")?;
        write_json(&short(&value.kind.name), out)?;
        let (unit, weighted) = (value.kind.unit.name(), !value.is_per_count());
        write!(out, ",\"unit\":\"{unit}\",\"weighted\":{weighted}}}")
    })?;
    list("excerpts", profile.excerpts.iter(), out, |excerpt, out| {
        out.push(b'[');
        write_json(&short(&excerpt.path), out)?;
        write!(out, ",{}", excerpt.length)?;
        for (number, text) in &excerpt.lines {
            write!(out, ",{number},")?;
            write_json(text, out)?;
        }
        out.write_all(b"]")
    })?;
    assembly(profile, view, out)?;
    out.push(b'}');
    Ok(())
}

fn assembly(profile: &Profile, view: &View<'_>, out: &mut Vec<u8>) -> io::Result<()> {
    let numbers: HashMap<&str, usize> = view.identifiers.iter().map(String::as_str).zip(0..).collect();
    let known = profile.assembly.iter().filter_map(|code| {
        let native = identifier(&Frame::native(&*code.name, &*code.module, code.address));
        Some((*numbers.get(native.as_str())?, code))
    });
    list("assembly", known, out, |(function, code), out| {
        write!(out, "[{function},{}", code.is_checked)?;
        for row in &code.instructions {
            write!(out, ",[{},{},", row.address, row.length)?;
            write_json(&row.text, out)?;
            let (file, line) = row.source.as_ref().map_or(("", 0), |(file, line)| (file, *line));
            write!(out, ",{},", row.samples)?;
            write_json(&short(file), out)?;
            write!(out, ",{line}]")?;
        }
        out.write_all(b"]")
    })
}

fn timeline_length(profile: &Profile, view: &View<'_>) -> usize {
    profile
        .timeline
        .iter()
        .filter(|t| view.item_of(t.node).is_some())
        .count()
}

/// Writes `,"key":[...]`.
pub(super) fn list<T>(
    key: &str,
    items: impl Iterator<Item = T>,
    out: &mut Vec<u8>,
    mut write: impl FnMut(T, &mut Vec<u8>) -> io::Result<()>,
) -> io::Result<()> {
    write!(out, ",\"{key}\":[")?;
    for (at, item) in items.enumerate() {
        if at > 0 {
            out.push(b',');
        }
        write(item, out)?;
    }
    out.push(b']');
    Ok(())
}

/// Distinct strings; the first one is empty.
struct Strings<'a> {
    all: Vec<&'a str>,
    // Names come from the target: use a hasher that resists collision attacks.
    ids: HashMap<&'a str, u32>,
}

impl Default for Strings<'_> {
    fn default() -> Self {
        Strings {
            all: vec![""],
            ids: HashMap::from([("", 0)]),
        }
    }
}

impl<'a> Strings<'a> {
    fn of(&mut self, text: &'a str) -> u32 {
        *self.ids.entry(text).or_insert_with(|| {
            self.all.push(text);
            self.all.len() as u32 - 1
        })
    }
}

/// The name, shortened to `MAX_NAME` characters.
pub(super) fn short(name: &str) -> Cow<'_, str> {
    match name.char_indices().nth(MAX_NAME) {
        None => Cow::Borrowed(name),
        Some((end, _)) => Cow::Owned(format!("{}… ({} characters)", &name[..end], name.chars().count())),
    }
}
