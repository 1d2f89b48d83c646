//! The timeline in JSON, with the lines of its stacks; and which nodes of the tree are written out.
//!
//! A profile of many distinct stacks has hundreds of thousands of nodes, and the tree that Dask reads takes some
//! hundred bytes for each. Nodes beyond [`TREE_BYTES`] are omitted, those with the fewest samples first, if the
//! timeline has all their data; [`read`](super::read) restores them.

use std::io::{self, Write};

use rustc_hash::FxHashMap;

use super::{NodeFragments, comma, write_number};
use crate::escape::write_json;
use crate::labels::Labels;
use crate::model::Profile;
use crate::stacks_by_line::{NONE, StacksByLine};
use crate::sums::sum_upwards;
use crate::view::View;

/// Bytes of nodes that are written out, about.
const TREE_BYTES: usize = 10 << 20;
/// The same for each node there is, at least: so that omitted nodes are in proportion to the size of the file for its
/// readers.
const BYTES_PER_NODE: usize = 10;

/// By item, whether it is written out.
pub(crate) fn kept(profile: &Profile, view: &View<'_>, entries: &StacksByLine, fragments: &NodeFragments) -> Vec<bool> {
    let count = view.items.len();
    let bytes: Vec<usize> = (0..count as u32).map(|item| fragments.bytes(view, item)).collect();
    let most = TREE_BYTES.max(count.saturating_mul(BYTES_PER_NODE));
    let is_small = bytes.iter().fold(0usize, |sum, more| sum.saturating_add(*more)) <= most;
    if is_small || !entries.is_exact {
        return vec![true; count];
    }
    // Most samples first; callers have at least as many as what they call, and come first where they have as many.
    let mut order: Vec<u32> = (0..count as u32).collect();
    order.sort_by_key(|item| (std::cmp::Reverse(view.items[*item as usize].count), *item));
    let mut kept = vec![false; count];
    kept[0] = true;
    let mut left = most;
    for item in order {
        let at = item as usize;
        let Some(rest) = left.checked_sub(bytes[at]) else { break };
        kept[at] = kept[view.items[at].parent as usize];
        left = rest;
    }
    if !follow_from_samples(profile, view, entries, &kept) {
        return vec![true; count];
    }
    kept
}

/// Whether counts, lines and values of all items that are not kept are those of the timeline.
fn follow_from_samples(profile: &Profile, view: &View<'_>, entries: &StacksByLine, kept: &[bool]) -> bool {
    for value in 0..profile.value_types().len() {
        if value > 0 && profile.value_types()[value].is_per_count() {
            continue;
        }
        let self_counts = entries.self_amounts(profile, value);
        let mut of_items = vec![0u64; kept.len()];
        let mut inclusive = self_counts.clone();
        sum_upwards(&mut inclusive, |at| Some(entries.all[at].parent as usize));
        for (entry, amount) in entries.all.iter().zip(&inclusive) {
            let sum = &mut of_items[entry.item as usize];
            *sum = sum.saturating_add(*amount);
        }
        let amounts = view.amounts(profile, value);
        if (0..kept.len()).any(|item| !kept[item] && amounts[item] != of_items[item]) {
            return false;
        }
        if value > 0 {
            continue;
        }
        let mut lines: FxHashMap<(u32, u32), (u64, u64)> = FxHashMap::default();
        for (at, entry) in entries.all.iter().enumerate() {
            if entry.line > 0 && !kept[entry.item as usize] {
                let (all, ended) = lines.entry((entry.item, entry.line)).or_default();
                *all = all.saturating_add(inclusive[at]);
                *ended = ended.saturating_add(self_counts[at]);
            }
        }
        let mut of_nodes = 0;
        for (at, item) in view.items.iter().enumerate().filter(|(at, _)| !kept[*at]) {
            of_nodes += item.lines.len();
            let same = item.lines.iter().all(|(line, count)| {
                let ended = item.self_lines.get(line).copied().unwrap_or(0);
                lines.get(&(at as u32, *line)) == Some(&(*count, ended))
            });
            if !same {
                return false;
            }
        }
        if of_nodes != lines.len() {
            return false;
        }
    }
    true
}

/// Writes `,"samples":{...}` if there are any.
pub(crate) fn write(
    profile: &Profile,
    view: &View<'_>,
    entries: &StacksByLine,
    fragments: &NodeFragments,
    kept: &[bool],
    out: &mut impl Write,
) -> io::Result<()> {
    let mut order: Vec<u32> = (0..profile.timeline.len() as u32).collect();
    order.retain(|sample| entries.of_sample[*sample as usize] != NONE);
    if order.is_empty() {
        return Ok(());
    }
    order.sort_by_key(|sample| profile.timeline[*sample as usize].time);
    let sample = |at: &u32| &profile.timeline[*at as usize];
    let mut threads: Vec<(u32, u32)> = Vec::new();
    let mut known: FxHashMap<(u32, u32), u64> = FxHashMap::default();
    let thread_of: Vec<u64> = order
        .iter()
        .map(|at| {
            let thread = (sample(at).pid, sample(at).tid);
            *known.entry(thread).or_insert_with(|| {
                threads.push(thread);
                threads.len() as u64 - 1
            })
        })
        .collect();
    out.write_all(b",\"samples\":{\"threads\":{")?;
    column("pid", threads.iter().map(|(pid, _)| u64::from(*pid)), out)?;
    out.write_all(b",")?;
    column("tid", threads.iter().map(|(_, tid)| u64::from(*tid)), out)?;
    out.write_all(b"},")?;
    if threads.len() > 1 {
        column("thread", thread_of.into_iter(), out)?;
        out.write_all(b",")?;
    }
    let mut before = 0;
    let deltas = order.iter().map(|at| {
        let time = sample(at).time;
        time - std::mem::replace(&mut before, time)
    });
    column("time", deltas, out)?;
    out.write_all(b",")?;
    let rows = Rows::new(entries, &order);
    let row = |at: &u32| u64::from(rows.of_entry[entries.of_sample[*at as usize] as usize]);
    column("stack", order.iter().map(row), out)?;
    let types = profile
        .value_types()
        .iter()
        .enumerate()
        .filter(|(_, value)| !value.is_per_count());
    for (at, (value, kind)) in types.enumerate() {
        out.write_all(if at == 0 { b",\"values\":{" } else { b"," })?;
        let amounts = order
            .iter()
            .map(|sample| profile.sample_amount(value, *sample as usize));
        column(&kind.kind.key(), amounts, out)?;
    }
    if profile.value_types().iter().any(|value| !value.is_per_count()) {
        out.write_all(b"}")?;
    }
    write_waits(profile, &order, out)?;
    write_labels(&profile.labels, &order, out)?;
    let omitted = kept.iter().filter(|kept| !**kept).count();
    if omitted > 0 {
        write!(out, ",\"omitted_nodes\":{omitted}")?;
    }
    out.write_all(b",\"stacks\":{")?;
    rows.write(view, fragments, kept, entries, out)?;
    out.write_all(b"}}")
}

/// Writes `,"waits":{...}`, rows in the order of the samples, if anything is known of intervals.
fn write_waits(profile: &Profile, order: &[u32], out: &mut impl Write) -> io::Result<()> {
    let waits = &profile.waits;
    if waits.is_empty() {
        return Ok(());
    }
    let rows = || order.iter().map(|sample| *sample as usize);
    out.write_all(b",\"waits\":{")?;
    column(
        "length",
        rows().map(|sample| waits.lengths.get(sample).copied().unwrap_or(0)),
        out,
    )?;
    out.write_all(b",")?;
    column(
        "waker",
        rows().map(|sample| waits.wakers.get(sample).map_or(0, |n| u64::from(*n))),
        out,
    )?;
    out.write_all(b",")?;
    column(
        "holds_gil",
        rows().map(|sample| waits.holding.get(sample).map_or(0, |h| u64::from(*h))),
        out,
    )?;
    out.write_all(b",\"wakers\":[")?;
    for (at, waker) in waits.known.iter().enumerate() {
        out.write_all(comma(at).as_bytes())?;
        write!(out, "{{\"pid\":{},\"tid\":{},\"function\":", waker.pid, waker.tid)?;
        write_json(&waker.function, out)?;
        out.write_all(b",\"stack\":[")?;
        for (at, frame) in waker.stack.iter().enumerate() {
            out.write_all(comma(at).as_bytes())?;
            write_json(frame, out)?;
        }
        out.write_all(b"]}")?;
    }
    out.write_all(b"]")?;
    let mut rows: Vec<(u64, u32, u64)> = Vec::new();
    for (row, sample) in (0u64..).zip(order) {
        let from = waits.shares.partition_point(|(of, ..)| of < sample);
        let shares = waits.shares[from..].iter().take_while(|(of, ..)| of == sample);
        rows.extend(shares.map(|(_, number, time)| (row, *number, *time)));
    }
    if !rows.is_empty() {
        out.write_all(b",\"shares\":{")?;
        column("sample", rows.iter().map(|(row, ..)| *row), out)?;
        out.write_all(b",")?;
        column("waker", rows.iter().map(|(_, number, _)| u64::from(*number)), out)?;
        out.write_all(b",")?;
        column("time", rows.iter().map(|(.., time)| *time), out)?;
        out.write_all(b"}")?;
    }
    out.write_all(b"}")
}

/// Writes `,"labels":{...}`, rows in the order of the samples, if there are any.
pub(super) fn write_labels(labels: &Labels, order: &[u32], out: &mut impl Write) -> io::Result<()> {
    if labels.is_empty() {
        return Ok(());
    }
    out.write_all(b",\"labels\":{\"sets\":[")?;
    for (at, set) in labels.sets.iter().enumerate() {
        out.write_all(comma(at).as_bytes())?;
        out.write_all(b"[")?;
        for (at, (key, value)) in set.iter().enumerate() {
            out.write_all(comma(at).as_bytes())?;
            out.write_all(b"[")?;
            write_json(key, out)?;
            out.write_all(b",")?;
            write_json(value, out)?;
            out.write_all(b"]")?;
        }
        out.write_all(b"]")?;
    }
    out.write_all(b"],")?;
    let number = |sample: &u32| labels.of_samples.get(*sample as usize).map_or(0, |set| u64::from(*set));
    column("set", order.iter().map(number), out)?;
    out.write_all(b"}")
}

/// Stacks as rows, each followed by all that are below it.
struct Rows {
    /// Entries in this order. The first one is the root, which is not written.
    entries: Vec<u32>,
    /// By entry, its row.
    of_entry: Vec<u32>,
}

impl Rows {
    /// The entries that the samples `order` of the timeline need.
    fn new(entries: &StacksByLine, order: &[u32]) -> Rows {
        let count = entries.all.len();
        let mut used = vec![false; count];
        used[0] = true;
        for at in order {
            let mut entry = entries.of_sample[*at as usize] as usize;
            while !used[entry] {
                used[entry] = true;
                entry = entries.all[entry].parent as usize;
            }
        }
        // Lists of children, the first one first.
        let (mut first, mut next) = (vec![NONE; count], vec![NONE; count]);
        for entry in (1..count).rev().filter(|entry| used[*entry]) {
            let parent = entries.all[entry].parent as usize;
            next[entry] = std::mem::replace(&mut first[parent], entry as u32);
        }
        let (mut rows, mut of_entry) = (Vec::new(), vec![NONE; count]);
        let mut path = vec![0u32];
        while let Some(entry) = path.pop() {
            of_entry[entry as usize] = rows.len() as u32;
            rows.push(entry);
            path.extend(
                [next[entry as usize], first[entry as usize]]
                    .into_iter()
                    .filter(|entry| *entry != NONE),
            );
        }
        Rows {
            entries: rows,
            of_entry,
        }
    }

    fn write(
        &self,
        view: &View<'_>,
        fragments: &NodeFragments,
        kept: &[bool],
        entries: &StacksByLine,
        out: &mut impl Write,
    ) -> io::Result<()> {
        let rows = || self.entries.iter().skip(1).map(|entry| &entries.all[*entry as usize]);
        // Often used numbers are short ones.
        let frames = by_frequency(rows().map(|entry| (view.items[entry.item as usize].identifier, entry.line)));
        let functions = by_frequency(frames.iter().map(|(identifier, _)| *identifier));
        let number = |all: &[u32]| -> FxHashMap<u32, u64> { all.iter().copied().zip(0..).collect() };
        let function_of = number(&functions);
        let frame_of: FxHashMap<(u32, u32), u64> = frames.iter().copied().zip(0..).collect();
        // A function is the number of a node in the file that is one, or written out.
        let mut node_of: FxHashMap<u32, u32> = FxHashMap::default();
        for (item, place) in preorder(view, kept) {
            node_of.entry(view.items[item as usize].identifier).or_insert(place);
        }
        out.write_all(b"\"functions\":[")?;
        for (at, identifier) in functions.iter().enumerate() {
            out.write_all(comma(at).as_bytes())?;
            match node_of.get(identifier) {
                Some(place) => write_number((*place).into(), out)?,
                None => fragments.write_function(view, *identifier, out)?,
            }
        }
        out.write_all(b"],\"frames\":{")?;
        column(
            "function",
            frames.iter().map(|(identifier, _)| function_of[identifier]),
            out,
        )?;
        out.write_all(b",")?;
        column("line", frames.iter().map(|(_, line)| u64::from(*line)), out)?;
        out.write_all(b"},")?;
        let mut depths: Vec<u32> = vec![0; entries.all.len()];
        let mut before = 0;
        let ups = self.entries.iter().skip(1).map(|entry| {
            let depth = depths[entries.all[*entry as usize].parent as usize] + 1;
            depths[*entry as usize] = depth;
            u64::from(std::mem::replace(&mut before, depth) + 1 - depth)
        });
        column("up", ups, out)?;
        out.write_all(b",")?;
        let of_row = rows().map(|entry| frame_of[&(view.items[entry.item as usize].identifier, entry.line)]);
        column("frame", of_row, out)
    }
}

/// Kept items with their places in the file.
pub(crate) fn preorder<'a>(view: &'a View<'_>, kept: &'a [bool]) -> impl Iterator<Item = (u32, u32)> + 'a {
    let mut path = vec![0u32];
    let mut place = 0;
    std::iter::from_fn(move || {
        let item = path.pop()?;
        path.extend(view.children(item).iter().rev().filter(|child| kept[**child as usize]));
        place += 1;
        Some((item, place - 1))
    })
}

/// Each once; those that come most often first, of equal ones the first to come.
fn by_frequency<T: Copy + Eq + std::hash::Hash>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut counts: FxHashMap<T, (u64, usize)> = FxHashMap::default();
    for (at, one) in all.enumerate() {
        counts.entry(one).or_insert((0, at)).0 += 1;
    }
    let mut sorted: Vec<_> = counts.into_iter().collect();
    sorted.sort_unstable_by_key(|(_, (count, first))| (std::cmp::Reverse(*count), *first));
    sorted.into_iter().map(|(one, _)| one).collect()
}

fn column(key: &str, numbers: impl Iterator<Item = u64>, out: &mut impl Write) -> io::Result<()> {
    write_json(key, out)?;
    out.write_all(b":[")?;
    super::write_column(numbers, out)?;
    out.write_all(b"]")
}
