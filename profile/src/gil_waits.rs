//! The global interpreter lock in a profile of off-CPU time: who waited for it, who held it.
//!
//! Waits are measured: they end when a thread releases the lock, and that thread is known. How long a thread or function
//! held the lock is an estimate: the time of the samples whose thread held it.

use std::collections::BTreeMap;

use super::model::{FrameKind, NodeId, Profile};
use super::view::frame_text;
use super::waits::{Waker, split_label, states};
use crate::model::{Pid, Tid};

/// The kind of waits for the lock.
pub const GIL: &str = "gil";

/// A thread and the lock.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GilThread {
    /// The thread's process.
    pub pid: Pid,
    /// The thread.
    pub tid: Tid,
    /// ns.
    pub waited: u64,
    /// Number of waits, estimated.
    pub count: f64,
    /// ns.
    pub longest: u64,
    /// ns, estimated.
    pub held: u64,
}

/// How long one thread waited for another.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GilPair {
    /// The thread that waited, with its process.
    pub waiter: (Pid, Tid),
    /// `None`: not known.
    pub holder: Option<(Pid, Tid)>,
    /// ns.
    pub waited: u64,
    /// Number of waits, estimated.
    pub count: f64,
    /// ns.
    pub longest: u64,
    /// Functions of the holder that released the lock, with the time waited for each; longest first.
    pub functions: Vec<(String, u64)>,
}

/// A Python function that held the lock.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GilFunction {
    /// The function, `name (file)`.
    pub function: String,
    /// ns, estimated.
    pub held: u64,
    /// Time that other threads waited until this function released the lock, ns.
    pub waited_for: u64,
}

/// All of it, each list with its greatest times first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GilWaits {
    /// Threads that waited for the lock or held it.
    pub threads: Vec<GilThread>,
    /// Waiting threads, with the thread that each waited for.
    pub pairs: Vec<GilPair>,
    /// Python functions that held the lock.
    pub functions: Vec<GilFunction>,
}

/// A waiting thread, and the one that held the lock, if that is known.
type Pair = ((Pid, Tid), Option<(Pid, Tid)>);

/// `value`: the index of the value that has the samples' time.
pub fn of(profile: &Profile, value: usize) -> GilWaits {
    let states = states(profile);
    let is_wait = |node: NodeId| {
        let state = states.get(node as usize).copied().unwrap_or(0);
        state != 0 && split_label(&profile.frames[profile.nodes[state as usize].frame as usize].name).0 == GIL
    };
    let mut threads: BTreeMap<(Pid, Tid), GilThread> = BTreeMap::new();
    let mut pairs: BTreeMap<Pair, GilPair> = BTreeMap::new();
    let mut by_function: BTreeMap<Pair, BTreeMap<String, u64>> = BTreeMap::new();
    let mut functions: BTreeMap<String, GilFunction> = BTreeMap::new();
    for (at, sample) in profile.timeline.iter().enumerate() {
        let thread = (sample.pid, sample.tid);
        let amount = profile.sample_amount(value, at);
        let is_wait = is_wait(sample.node);
        if !is_wait && !profile.waits.holding.get(at).copied().unwrap_or(false) {
            continue;
        }
        let of_thread = threads.entry(thread).or_insert_with(|| GilThread {
            pid: sample.pid,
            tid: sample.tid,
            ..GilThread::default()
        });
        if !is_wait {
            of_thread.held = of_thread.held.saturating_add(amount);
            let function = innermost_python(profile, sample.node);
            let held = &mut functions.entry(function).or_default().held;
            *held = held.saturating_add(amount);
            continue;
        }
        let length = profile.waits.lengths.get(at).copied().unwrap_or(0);
        let count = if length > 0 { amount as f64 / length as f64 } else { 0.0 };
        of_thread.waited = of_thread.waited.saturating_add(amount);
        of_thread.count += count;
        of_thread.longest = of_thread.longest.max(length);
        for (waker, part) in profile.waits.divided(at, amount) {
            let key = (thread, waker.map(|waker| (waker.pid, waker.tid)));
            let share = part as f64 / amount.max(1) as f64;
            let pair = pairs.entry(key).or_default();
            pair.waited = pair.waited.saturating_add(part);
            pair.count += count * share;
            pair.longest = pair.longest.max((length as f64 * share) as u64);
            if let Some(Waker { function, .. }) = waker.filter(|waker| !waker.function.is_empty()) {
                let sum = by_function.entry(key).or_default().entry(function.clone()).or_default();
                *sum = sum.saturating_add(part);
                let waited = &mut functions.entry(without_line(function)).or_default().waited_for;
                *waited = waited.saturating_add(part);
            }
        }
    }
    let mut threads: Vec<GilThread> = threads.into_values().collect();
    threads.sort_by_key(|t| (std::cmp::Reverse((t.waited, t.held)), t.pid, t.tid));
    let mut pairs: Vec<GilPair> = pairs
        .into_iter()
        .map(|(key, pair)| {
            let functions = by_function.remove(&key).unwrap_or_default();
            let mut functions: Vec<(String, u64)> = functions.into_iter().collect();
            functions.sort_by(|a, b| (b.1, &a.0).cmp(&(a.1, &b.0)));
            GilPair {
                waiter: key.0,
                holder: key.1,
                functions,
                ..pair
            }
        })
        .collect();
    pairs.sort_by_key(|p| (std::cmp::Reverse(p.waited), p.waiter, p.holder));
    let mut functions: Vec<GilFunction> = functions
        .into_iter()
        .map(|(function, f)| GilFunction { function, ..f })
        .collect();
    functions.sort_by(|a, b| (b.waited_for, b.held, &a.function).cmp(&(a.waited_for, a.held, &b.function)));
    GilWaits {
        threads,
        pairs,
        functions,
    }
}

/// The innermost Python function at or above a node.
fn innermost_python(profile: &Profile, node: NodeId) -> String {
    let mut at = node;
    while at != 0 {
        let node = &profile.nodes[at as usize];
        let frame = &profile.frames[node.frame as usize];
        if frame.kind == FrameKind::Python {
            return without_line(&frame_text(frame));
        }
        at = node.parent;
    }
    "[no Python function]".into()
}

/// `f (a.py:12)` -> `f (a.py)`
fn without_line(text: &str) -> String {
    match text.rsplit_once(':') {
        Some((head, line)) if line.trim_end_matches(')').bytes().all(|b| b.is_ascii_digit()) => format!("{head})"),
        _ => text.into(),
    }
}
