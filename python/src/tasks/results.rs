//! What is made of the chains: figures of functions and of pairs of caller and callee, and the profile.

use std::collections::HashMap;

use nativeprof::profile::build::Builder;
use nativeprof::profile::model::{Frame as ProfileFrame, FrameKind, Meta, Profile};
use nativeprof::profile::values::{Unit, ValueType};

use super::chains::{MAIN, MAIN_ID, OVERFLOW, ROOT, TaskChains, WAIT, WAIT_ID};
use super::measures::Measures;
use crate::engine::FunctionNumber;

/// What was charged to a function.
#[derive(Clone, Default, Debug)]
pub struct Charge {
    pub calls: u64,
    /// Ticks for which tasks were suspended in it.
    pub suspended: i64,
    /// Ticks in it alone, and values.
    pub own: i64,
    pub own_values: Vec<f64>,
    /// In it and in what it called on the stacks of its tasks, of outermost activations.
    pub aggregate: i64,
    pub aggregate_values: Vec<f64>,
}

/// Sums of `amount` over each node and all below it.
fn inclusive(chains: &TaskChains, amount: impl Fn(usize) -> f64) -> Vec<f64> {
    let mut sums: Vec<f64> = (0..chains.nodes.len()).map(amount).collect();
    // A node comes after its parent.
    for at in (1..sums.len()).rev() {
        let parent = chains.nodes.get(at).map_or(0, |n| n.parent as usize);
        let below = sums.get(at).copied().unwrap_or(0.0);
        if let Some(sum) = sums.get_mut(parent) {
            *sum += below;
        }
    }
    sums
}

/// Whether an outer activation of its function is above each node.
fn recursive(chains: &TaskChains) -> Vec<bool> {
    let count = chains.nodes.len();
    let mut children: Vec<Vec<u32>> = vec![Vec::new(); count];
    for (at, node) in chains.nodes.iter().enumerate().skip(1) {
        if let Some(list) = children.get_mut(node.parent as usize) {
            list.push(at as u32);
        }
    }
    let mut result = vec![false; count];
    let mut open: HashMap<FunctionNumber, u32> = HashMap::new();
    // A node is left after all below it.
    let mut work = vec![(ROOT, false)];
    while let Some((at, is_left)) = work.pop() {
        let Some(node) = chains.nodes.get(at as usize) else {
            continue;
        };
        let level = open.entry(node.function).or_insert(0);
        if is_left {
            *level -= 1;
            continue;
        }
        if let Some(place) = result.get_mut(at as usize) {
            *place = *level > 0;
        }
        *level += 1;
        work.push((at, true));
        let below = children.get_mut(at as usize).map(std::mem::take).unwrap_or_default();
        work.extend(below.into_iter().map(|child| (child, false)));
    }
    result
}

/// Figures of each function. The event loop and waits are there even if nothing was charged to them.
pub fn charges(chains: &TaskChains, width: usize) -> Vec<(FunctionNumber, Charge)> {
    let ticks = inclusive(chains, |at| chains.nodes.get(at).map_or(0.0, |n| n.ticks as f64));
    let values: Vec<Vec<f64>> = (0..width)
        .map(|i| inclusive(chains, |at| chains.values.get(at * width + i).copied().unwrap_or(0.0)))
        .collect();
    let is_recursive = recursive(chains);
    let mut order = vec![MAIN_ID, WAIT_ID];
    let mut found: HashMap<FunctionNumber, Charge> = HashMap::new();
    let empty = || Charge {
        own_values: vec![0.0; width],
        aggregate_values: vec![0.0; width],
        ..Charge::default()
    };
    for id in [MAIN_ID, WAIT_ID] {
        found.insert(id, empty());
    }
    for (at, node) in chains.nodes.iter().enumerate() {
        if at == ROOT as usize || at == OVERFLOW as usize {
            continue;
        }
        let charge = found.entry(node.function).or_insert_with(|| {
            order.push(node.function);
            empty()
        });
        charge.calls += node.calls;
        charge.suspended = charge.suspended.wrapping_add(node.suspended);
        charge.own = charge.own.wrapping_add(node.ticks);
        for (i, sum) in charge.own_values.iter_mut().enumerate() {
            *sum += chains.values.get(at * width + i).copied().unwrap_or(0.0);
        }
        if !is_recursive.get(at).copied().unwrap_or(false) {
            charge.aggregate += ticks.get(at).copied().unwrap_or(0.0) as i64;
            for (sum, values) in charge.aggregate_values.iter_mut().zip(&values) {
                *sum += values.get(at).copied().unwrap_or(0.0);
            }
        }
    }
    order
        .into_iter()
        .filter_map(|id| found.remove(&id).map(|charge| (id, charge)))
        .filter(|(id, c)| *id >= WAIT_ID || c.calls > 0 || c.own != 0 || c.suspended != 0)
        .collect()
}

/// How often each function called each other one.
pub fn calls(chains: &TaskChains) -> Vec<(FunctionNumber, FunctionNumber, u64)> {
    let mut order = Vec::new();
    let mut found: HashMap<(FunctionNumber, FunctionNumber), u64> = HashMap::new();
    for node in &chains.nodes {
        let above = chains
            .nodes
            .get(node.parent as usize)
            .map_or(FunctionNumber::MAX, |n| n.function);
        if above == FunctionNumber::MAX || node.function == WAIT_ID || node.calls == 0 {
            continue;
        }
        let count = found.entry((above, node.function)).or_insert_with(|| {
            order.push((above, node.function));
            0
        });
        *count += node.calls;
    }
    let count = |pair: &(FunctionNumber, FunctionNumber)| found.get(pair).copied().unwrap_or(0);
    order.iter().map(|pair| (pair.0, pair.1, count(pair))).collect()
}

/// The profile: value types are calls, time, suspended time and then `types`. `nanoseconds` per tick.
pub fn profile(
    chains: &TaskChains,
    frames: &[ProfileFrame],
    measures: Measures,
    types: &[ValueType],
    nanoseconds: f64,
    meta: Meta,
) -> Profile {
    let width = measures.count();
    let mut kinds = vec![ValueType::CALLS, ValueType::WALL, ValueType::AWAIT];
    // CPU time is one value, as in other profiles.
    match measures {
        Measures::Usage => {
            let names = ["minor_faults", "major_faults", "blocks_in", "blocks_out"];
            let switches = ["voluntary_switches", "involuntary_switches"];
            kinds.push(ValueType::CPU);
            let names = names.into_iter().chain(switches);
            kinds.extend(names.map(|name| ValueType::new(name, Unit::Count)));
        }
        _ => kinds.extend(types.iter().cloned()),
    }
    let used = inclusive(chains, |at| {
        let node = chains.nodes.get(at);
        node.map_or(0.0, |n| n.calls as f64 + (n.ticks | n.suspended).unsigned_abs() as f64)
    });
    let mut builder = Builder::new(&kinds);
    let mut places = Vec::with_capacity(chains.nodes.len());
    for (at, node) in chains.nodes.iter().enumerate() {
        let parent = places.get(node.parent as usize).copied().unwrap_or(Builder::ROOT);
        let is_used = used.get(at).is_some_and(|u| *u > 0.0);
        let place = if at == ROOT as usize || !is_used {
            parent
        } else {
            let unknown = || ProfileFrame::new(FrameKind::Unknown, "[unknown]");
            let frame = match (at as u32, node.function) {
                (MAIN, _) => ProfileFrame::native("<main>", "[event loop]", 0),
                (WAIT, _) | (_, WAIT_ID) => ProfileFrame::new(FrameKind::State, "<wait>"),
                (OVERFLOW, _) => ProfileFrame::new(FrameKind::Truncated, "[truncated: too many chains of callers]"),
                (_, id) => frames.get(id as usize).cloned().unwrap_or_else(unknown),
            };
            let frame = builder.frame(frame);
            builder.child(parent, frame, 0)
        };
        places.push(place);
        if !is_used {
            continue;
        }
        let time = |ticks: i64| (ticks.max(0) as f64 * nanoseconds) as u64;
        let mut amounts = vec![node.calls, time(node.ticks), time(node.suspended)];
        let from = at * width;
        let values = chains.values.get(from..from + width).unwrap_or_default();
        let amount = |value: f64| value.max(0.0).round() as u64;
        match (measures, values) {
            (Measures::Usage, [user, system, rest @ ..]) => {
                amounts.push(amount(user + system));
                amounts.extend(rest.iter().map(|v| amount(*v)));
            }
            _ => amounts.extend(values.iter().map(|v| amount(*v))),
        }
        builder.add_at(place, &amounts);
    }
    builder.finish(meta)
}
