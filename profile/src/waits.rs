//! Intervals off the CPU: how long each was, and which thread ended it.
//!
//! A sample of such time has a weight, the time that it represents. Where intervals are shorter than the sampling period
//! one sample represents many of them; the length of the interval itself says how many: weight / length.

use std::collections::BTreeMap;

use super::category::{is_standard_library, package};
use super::idle;
use super::model::{Frame, FrameId, FrameKind, NodeId, Profile};
use crate::model::{Pid, Tid};

/// A thread that ended waits, and what it was doing then.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Waker {
    /// The thread's process.
    pub pid: Pid,
    /// The thread.
    pub tid: Tid,
    /// The innermost Python function; empty if there is none.
    pub function: String,
    /// Outermost first, `name (file:line)` with the line that was being executed; empty if it is not known.
    pub stack: Vec<String>,
}

/// What is known of intervals off the CPU in addition to their time. Columns are by index in [`Profile::timeline`], and empty
/// where nothing is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Length of the interval, ns; 0: of samples of running threads, and where it is not known.
    pub lengths: Vec<u64>,
    /// Who ended it: index in `known` plus 1; 0: not known.
    pub wakers: Vec<u32>,
    /// Whether the thread held the global lock of its interpreter.
    pub holding: Vec<bool>,
    /// The threads that ended waits, each with what it was doing; `wakers` refers to them.
    pub known: Vec<Waker>,
    /// Of waits during which several threads held the interpreter lock, each of them: index in the timeline, its number as in
    /// `wakers`, and for how long, ns. By index in the timeline, the last one first.
    pub shares: Vec<(u32, u32, u64)>,
}

impl Waits {
    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// The waker of a sample.
    pub fn waker(&self, at: usize) -> Option<&Waker> {
        let number = *self.wakers.get(at)? as usize;
        self.known.get(number.checked_sub(1)?)
    }

    /// The parts of a sample's wait by the thread that it waited for, `None` where that is not known; `amount`: the time that the
    /// sample represents, which they add up to.
    pub fn divided(&self, at: usize, amount: u64) -> Vec<(Option<&Waker>, u64)> {
        let from = self.shares.partition_point(|(row, ..)| (*row as usize) < at);
        let rows = self.shares[from..].iter().take_while(|(row, ..)| *row as usize == at);
        // They are times by the clock: the waiter may have been without a CPU for a part of them, and not have waited. The first
        // ones may be missing.
        let length = self.lengths.get(at).copied().unwrap_or(0);
        let sum = rows.clone().fold(0u64, |sum, (.., time)| sum.saturating_add(*time));
        let whole = length.max(sum).max(1) as f64;
        let mut left = amount;
        let mut parts = Vec::new();
        for (_, number, time) in rows {
            let part = ((amount as f64 * *time as f64 / whole).round() as u64).min(left);
            left -= part;
            let waker = (*number as usize).checked_sub(1).and_then(|at| self.known.get(at));
            parts.push((waker, part));
        }
        match parts.first_mut() {
            // Lengths are rounded: what is left belongs to the last one, unless it is more than that.
            Some(first) if left < amount / 50 + 2000 => first.1 += left,
            Some(_) => parts.push((None, left)),
            None => parts.push((self.waker(at), amount)),
        }
        parts
    }

    /// The rows `origins` of several, in that order: part and index in its timeline. `renumber` gives the number of a process of
    /// a part in the sum.
    pub fn merge(parts: &[&Waits], origins: &[(usize, usize)], renumber: &dyn Fn(usize, u32) -> u32) -> Waits {
        if parts.iter().all(|waits| waits.is_empty()) {
            return Waits::default();
        }
        let mut first = Vec::with_capacity(parts.len());
        let mut known = Vec::new();
        for (part, waits) in parts.iter().enumerate() {
            first.push(known.len() as u32);
            known.extend(waits.known.iter().map(|waker| Waker {
                pid: renumber(part, waker.pid),
                ..waker.clone()
            }));
        }
        let waker = |(part, at): &(usize, usize)| match parts[*part].wakers.get(*at) {
            None | Some(0) => 0,
            Some(number) => number + first[*part],
        };
        let mut shares = Vec::new();
        for (row, (part, at)) in (0u32..).zip(origins) {
            let all = &parts[*part].shares;
            let from = all.partition_point(|(of, ..)| (*of as usize) < *at);
            let rows = all[from..].iter().take_while(|(of, ..)| *of as usize == *at);
            shares.extend(
                rows.map(|(_, number, time)| (row, if *number == 0 { 0 } else { number + first[*part] }, *time)),
            );
        }
        Waits {
            shares,
            lengths: origins
                .iter()
                .map(|(part, at)| parts[*part].lengths.get(*at).copied().unwrap_or(0))
                .collect(),
            wakers: origins.iter().map(waker).collect(),
            holding: origins
                .iter()
                .map(|(part, at)| parts[*part].holding.get(*at).copied().unwrap_or(false))
                .collect(),
            known,
        }
    }
}

/// Intervals of one kind that began at one place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WaitSite {
    /// `gil`, `lock`, `read`, ...; `runnable`; `idle` of a pool of threads that wait for work.
    pub kind: String,
    /// What the kind's own words say of what is waited for: `pipe`, `socket 127.0.0.1:5432`, `threading.RLock`,
    /// `table_lock (tables.so)`; the name of the pool; else empty.
    pub object: String,
    /// The innermost Python function that waits, else the outermost native one that is known: as [`super::view::frame_text`] has
    /// it, with the line that waits. Of a library's function, that of the program which called it, and then the library's. Empty
    /// for an idle pool.
    pub site: String,
    /// ns.
    pub total: u64,
    /// Number of intervals, estimated: shorter ones are sampled.
    pub count: f64,
    /// Quantiles of the intervals' lengths, ns; 0 where no length is known. Of short intervals, those that were sampled.
    pub median: u64,
    /// The 99th percentile, ns.
    pub p99: u64,
    /// The longest interval, ns.
    pub longest: u64,
}

impl WaitSite {
    /// As filters see it.
    pub fn text(&self) -> String {
        format!("{} {} {}", self.kind, self.object, self.site)
    }
}

/// `[waiting: read pipe]` -> (`read`, `pipe`); `[runnable]` -> (`runnable`, ``); `[idle: ThreadPoolExecutor]` -> (`idle`,
/// `ThreadPoolExecutor`).
pub fn split_label(label: &str) -> (&str, &str) {
    if let Some(pool) = label.strip_prefix(idle::LABEL) {
        return ("idle", pool.strip_suffix(']').unwrap_or(pool));
    }
    let inner = label
        .strip_prefix('[')
        .and_then(|l| l.strip_suffix(']'))
        .unwrap_or(label);
    let kind = inner.strip_prefix("waiting: ").unwrap_or(inner);
    // Kinds of two words: nothing follows them.
    match kind.split_once(' ') {
        Some((first @ ("read" | "write" | "connect" | "accept" | "lock" | "condition" | "futex"), object)) => {
            (first, object)
        }
        _ => (kind, ""),
    }
}

/// By node, the node of the state that it is, or is below; 0 if there is none.
pub fn states(profile: &Profile) -> Vec<NodeId> {
    let mut states: Vec<NodeId> = Vec::with_capacity(profile.nodes.len());
    for (at, node) in profile.nodes.iter().enumerate() {
        let above = states.get(node.parent as usize).copied().unwrap_or(0);
        let is_state = profile.frames[node.frame as usize].kind == FrameKind::State;
        states.push(if above == 0 && is_state { at as NodeId } else { above });
    }
    states
}

/// The places where threads waited: the state's frame, and the text of the place; and by sample its index in there plus 1, 0 of
/// samples of running threads.
pub fn places(profile: &Profile) -> (Vec<(FrameId, String)>, Vec<u32>) {
    let states = states(profile);
    let mut all: Vec<(FrameId, String)> = Vec::new();
    let mut numbers: BTreeMap<(FrameId, String), u32> = BTreeMap::new();
    let mut known: BTreeMap<(NodeId, u32), u32> = BTreeMap::new();
    let of_samples = profile.timeline.iter().enumerate().map(|(at, sample)| {
        let state = states.get(sample.node as usize).copied().unwrap_or(0);
        if state == 0 {
            return 0;
        }
        let place = profile.sample_places.get(at).copied().unwrap_or(super::model::NO_PLACE);
        *known.entry((state, place)).or_insert_with(|| {
            let key = (profile.nodes[state as usize].frame, site(profile, state, place));
            *numbers.entry(key).or_insert_with_key(|key| {
                all.push(key.clone());
                all.len() as u32
            })
        })
    });
    let of_samples = of_samples.collect();
    (all, of_samples)
}

/// The places where threads waited, longest total first; `value`: the index of the value that has the samples' time.
pub fn sites(profile: &Profile, value: usize) -> Vec<WaitSite> {
    let (places, of_samples) = places(profile);
    let mut samples: Vec<Vec<(u64, u64)>> = vec![Vec::new(); places.len()];
    for (at, place) in of_samples.into_iter().enumerate() {
        if let Some(samples) = (place as usize).checked_sub(1).and_then(|at| samples.get_mut(at)) {
            let length = profile.waits.lengths.get(at).copied().unwrap_or(0);
            samples.push((length, profile.sample_amount(value, at)));
        }
    }
    let mut sites: Vec<WaitSite> = places
        .into_iter()
        .zip(samples)
        .map(|((frame, site), samples)| summed(&profile.frames[frame as usize].name, site, samples))
        .collect();
    sites.sort_by(|a, b| (b.total, &a.site, &a.kind).cmp(&(a.total, &b.site, &b.kind)));
    sites
}

/// `samples`: length and weight of each.
fn summed(label: &str, site: String, mut samples: Vec<(u64, u64)>) -> WaitSite {
    let (kind, object) = split_label(label);
    samples.sort_unstable();
    // So many intervals are like the one that was sampled.
    let count = |(length, weight): &(u64, u64)| match *length {
        0 => 0.0,
        length => *weight as f64 / length as f64,
    };
    let all: f64 = samples.iter().map(count).sum();
    let quantile = |part: f64| {
        let mut sum = 0.0;
        let at = samples.iter().find(|sample| {
            sum += count(sample);
            sum >= part * all && sample.0 > 0
        });
        at.map_or(0, |(length, _)| *length)
    };
    WaitSite {
        kind: kind.into(),
        object: object.into(),
        site,
        total: samples
            .iter()
            .fold(0u64, |sum, (_, weight)| sum.saturating_add(*weight)),
        count: all,
        median: quantile(0.5),
        p99: quantile(0.99),
        longest: samples.last().map_or(0, |(length, _)| *length),
    }
}

/// The function that waits in the state at node `state`; if it comes from a library, the function of the program that led
/// there, too. `place`: of the sample.
fn site(profile: &Profile, state: NodeId, place: u32) -> String {
    // Lines are known by place, which leads through the same nodes.
    let mut line_of: BTreeMap<NodeId, u32> = BTreeMap::new();
    let mut at = place;
    while let Some(p) = profile.places.get(at as usize).filter(|_| at != 0) {
        line_of.insert(p.node, p.line);
        at = p.parent;
    }
    let text = |node: NodeId, frame: &Frame| {
        let line = line_of.get(&node).copied().filter(|line| *line > 0);
        super::view::frame_text_at(frame, line.unwrap_or(frame.first_line))
    };
    let label = &profile.frames[profile.nodes[state as usize].frame as usize].name;
    if label.starts_with(idle::LABEL) {
        return String::new();
    }
    let (mut native, mut library, mut node) = (None, None, state);
    while node != 0 {
        let frame = &profile.frames[profile.nodes[node as usize].frame as usize];
        match frame.kind {
            FrameKind::Python if is_of_library(&frame.filename) => {
                library.get_or_insert((node, frame));
            }
            FrameKind::Python => {
                let own = text(node, frame);
                return match library {
                    None => own,
                    // Where the library is says nothing new.
                    Some((node, frame)) => {
                        let inner = text(node, frame);
                        format!(
                            "{own} in {}",
                            inner.replace(&*frame.filename, file_name(&frame.filename))
                        )
                    }
                };
            }
            FrameKind::Native | FrameKind::Inlined if library.is_none() => native = Some(frame),
            _ => {}
        }
        node = profile.nodes[node as usize].parent;
    }
    match (library, native) {
        (Some((node, frame)), _) => text(node, frame),
        (None, Some(frame)) => super::view::frame_text(frame).into_owned(),
        (None, None) => "[no function]".into(),
    }
}

/// Whether a Python file is part of the standard library or of a package.
pub fn is_of_library(file: &str) -> bool {
    is_standard_library(file) || package(file).is_some()
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests;
