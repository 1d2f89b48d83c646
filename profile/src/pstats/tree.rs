//! Makes a tree of a table of functions and callers.
//!
//! The tree is expanded from the functions that have calls without a caller. What a function did is divided among the
//! stacks that lead to it in proportion to the times that it took for the callers on them: the table has no more about
//! it. A function that is on the stack already is not expanded again there.
//!
//! Calls and self time of each function, and of each pair of caller and callee, are then divided among the nodes of that
//! pair, so that their sums are those of the table, whatever was estimated. Only which of several longer stacks they
//! belong to is an estimate, and with it cumulative times where functions are recursive.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::BUILTIN;
use super::table::{PstatsFunction, PstatsTable};
use crate::build::Builder;
use crate::model::{Frame, FrameKind, Meta, Profile};
use crate::values::ValueType;

/// Nodes beyond which a function is expanded only once.
const MAX_NODES: usize = 100_000;
/// Depth of the tree. What is called further down begins at the root.
const MAX_DEPTH: u32 = 500;
/// Share of the whole below which a stack is not followed further, if its function has been expanded elsewhere.
const MIN_SHARE: f64 = 1e-6;
const NONE: u32 = u32::MAX;

/// What a function did for one caller, or (`NONE`) without one. The sums over all of them are those of the function.
struct CallerShare {
    caller: u32,
    calls: u64,
    self_time: u64,
    /// Share of the time in what the function calls; recursive calls are not counted.
    share: f64,
}

/// An expanded table.
struct Nodes {
    /// Function, parent (`NONE`: the root), depth.
    nodes: Vec<(u32, u32, u32)>,
    /// By edge, its nodes and which share of the caller's activity each one is.
    placed: Vec<Vec<(u32, f64)>>,
}

/// The profile of a table.
pub fn profile(table: &PstatsTable<'_>) -> Profile {
    let by_caller: Vec<Vec<CallerShare>> = table.functions.iter().map(|f| by_caller(f, table)).collect();
    let expanded = expand(table, &by_caller);
    build(table, &by_caller, &expanded)
}

/// Where a function's figures come from.
fn by_caller(function: &PstatsFunction<'_>, table: &PstatsTable<'_>) -> Vec<CallerShare> {
    let itself = |caller: u32| {
        let caller = table.functions.get(caller as usize);
        caller.is_some_and(|caller| std::ptr::eq(caller, function))
    };
    let is_timed = function.callers.iter().all(|caller| caller.times.is_some());
    let has_samples = table.is_sampled && is_timed;
    let count = |primitive: u64, calls: u64| if has_samples { primitive } else { calls };
    let (mut calls_left, mut self_left, mut total_left) = (
        count(function.primitive, function.calls),
        function.self_time,
        function.total,
    );
    // (caller, calls, self time, time in what it calls).
    let mut rows: Vec<(u32, u64, u64, f64)> = Vec::with_capacity(function.callers.len() + 1);
    for caller in &function.callers {
        let calls = count(caller.primitive, caller.calls);
        // Without times per caller, everything is divided by calls.
        let (self_time, total) = match caller.times {
            Some(times) if is_timed => times,
            _ => (calls, 0),
        };
        rows.push((
            caller.function,
            calls,
            self_time,
            total.saturating_sub(self_time) as f64,
        ));
        calls_left = calls_left.saturating_sub(calls);
        self_left = self_left.saturating_sub(self_time);
        if !itself(caller.function) {
            total_left = total_left.saturating_sub(total);
        }
    }
    // Of samples a function without a caller may have none itself.
    let is_outermost = calls_left > 0
        || rows.iter().all(|row| itself(row.0))
        || has_samples && total_left > 1000 + function.total / 1_000_000;
    if is_outermost {
        let (self_time, below) = if is_timed {
            (self_left, total_left.saturating_sub(self_left))
        } else {
            (calls_left, 0)
        };
        rows.insert(0, (NONE, calls_left, self_time, below as f64));
    }
    let all = if table.is_sampled {
        function.primitive
    } else {
        function.calls
    };
    let calls = apportion(all, rows.iter().map(|row| row.1));
    let self_time = apportion(function.self_time, rows.iter().map(|row| row.2));
    // A share of what it calls: where that takes no time, of its calls.
    let basis = |row: &(u32, u64, u64, f64)| row.3 + 1e-6 * row.1 as f64;
    let whole: f64 = rows.iter().filter(|row| !itself(row.0)).map(basis).sum();
    let parts = rows.iter().zip(calls).zip(self_time);
    parts
        .map(|((row, calls), self_time)| CallerShare {
            caller: row.0,
            calls,
            self_time,
            share: if whole > 0.0 { basis(row) / whole } else { 1.0 },
        })
        .collect()
}

/// Divides a total in proportion to weights, such that the parts are integers with this sum. Weights that have the sum
/// are the parts. Without any weight, the first part is everything.
fn apportion(total: u64, weights: impl Iterator<Item = u64> + Clone) -> Vec<u64> {
    let whole: u128 = weights.clone().map(u128::from).sum();
    let mut parts = vec![0; weights.clone().count()];
    if whole == 0 {
        parts.first_mut().into_iter().for_each(|first| *first = total);
        return parts;
    }
    let (mut weight_so_far, mut so_far) = (0u128, 0u128);
    for (part, weight) in parts.iter_mut().zip(weights) {
        weight_so_far += u128::from(weight);
        let until = match u128::from(total).checked_mul(weight_so_far) {
            Some(product) => product / whole,
            None => ((total as f64) * (weight_so_far as f64 / whole as f64)) as u128,
        };
        let until = if weight_so_far == whole {
            total.into()
        } else {
            until.min(total.into())
        };
        *part = u64::try_from(until.saturating_sub(so_far)).unwrap_or(0);
        so_far = so_far.max(until);
    }
    parts
}

/// The same with weights that are estimates. Where they are 0, all parts are equal.
fn apportion_by_share(total: u64, nodes: &[(u32, f64)]) -> Vec<u64> {
    let whole: f64 = nodes.iter().map(|(_, share)| share).sum();
    let is_usable = whole > 0.0 && whole.is_finite();
    let (mut share_so_far, mut so_far) = (0.0, 0u64);
    let part = |(at, (_, share)): (usize, &(u32, f64))| {
        share_so_far += if is_usable {
            share / whole
        } else {
            1.0 / nodes.len() as f64
        };
        let is_last = at + 1 == nodes.len();
        let until = if is_last {
            total
        } else {
            (total as f64 * share_so_far).round() as u64
        };
        let until = until.clamp(so_far, total);
        until - std::mem::replace(&mut so_far, until)
    };
    nodes.iter().enumerate().map(part).collect()
}

/// Expands the functions, those with most time first.
fn expand(table: &PstatsTable<'_>, by_caller: &[Vec<CallerShare>]) -> Nodes {
    // Edges are numbered in the order of `by_caller`.
    let mut callees: Vec<Vec<(u32, u32, f64)>> = vec![Vec::new(); by_caller.len()];
    let mut outermost = Vec::new();
    let mut edges = 0;
    for (function, from) in by_caller.iter().enumerate() {
        for part in from {
            match callees.get_mut(part.caller as usize) {
                Some(callees) => callees.push((function as u32, edges, part.share)),
                None => outermost.push((function as u32, edges, part.share)),
            }
            edges += 1;
        }
    }
    let has_times = table.functions.iter().any(|f| f.total > 0);
    let size = |function: &PstatsFunction<'_>| if has_times { function.total } else { function.calls } as f64;
    let whole = outermost
        .iter()
        .filter_map(|(f, _, share)| Some(size(table.functions.get(*f as usize)?) * share));
    let least = MIN_SHARE * whole.sum::<f64>();
    let mut result = Nodes {
        nodes: Vec::new(),
        placed: vec![Vec::new(); edges as usize],
    };
    let mut is_expanded = vec![false; by_caller.len()];
    // Functions that nothing outermost leads to come last.
    let mut others: Vec<u32> = (0..by_caller.len() as u32).collect();
    others.sort_by_key(|function| table.functions.get(*function as usize).map_or(0, |f| f.total));
    // (time of the stack, its node, share of the function's activity); the order of positive floats is that of their bits.
    let mut open: BinaryHeap<(u64, Reverse<u32>, u64)> = BinaryHeap::new();
    let weigh = |function: u32, share: f64| {
        let amount = table.functions.get(function as usize).map_or(0.0, size) * share;
        amount.max(0.0).to_bits()
    };
    for (function, edge, share) in outermost {
        let node = result.push(function, NONE, 0);
        result.placed[edge as usize].push((node, 1.0));
        open.push((weigh(function, share), Reverse(node), share.to_bits()));
    }
    loop {
        let Some((amount, Reverse(node), share)) = open.pop() else {
            let Some(function) = others.pop() else { break };
            if !is_expanded[function as usize] {
                let node = result.push(function, NONE, 0);
                open.push((weigh(function, 1.0), Reverse(node), 1f64.to_bits()));
            }
            continue;
        };
        let (function, _, depth) = result.nodes[node as usize];
        let below = &callees[function as usize];
        let is_small = f64::from_bits(amount) < least || result.nodes.len() + below.len() > MAX_NODES;
        if std::mem::replace(&mut is_expanded[function as usize], true) && is_small {
            continue;
        }
        let share = f64::from_bits(share);
        for (callee, edge, part) in below {
            let is_recursive = result.path(node).any(|above| above == *callee);
            let child = result.push(*callee, node, depth + 1);
            result.placed[*edge as usize].push((child, share));
            if !is_recursive && depth < MAX_DEPTH {
                let share = share * part;
                open.push((weigh(*callee, share), Reverse(child), share.to_bits()));
            }
        }
    }
    result
}

impl Nodes {
    fn push(&mut self, function: u32, parent: u32, depth: u32) -> u32 {
        self.nodes.push((function, parent, depth));
        self.nodes.len() as u32 - 1
    }

    /// The functions from a node to the root.
    fn path(&self, node: u32) -> impl Iterator<Item = u32> {
        let mut at = node;
        std::iter::from_fn(move || {
            let (function, parent, _) = self.nodes.get(at as usize)?;
            at = *parent;
            Some(*function)
        })
    }
}

fn build(table: &PstatsTable<'_>, by_caller: &[Vec<CallerShare>], expanded: &Nodes) -> Profile {
    let count = if table.is_sampled {
        ValueType::SAMPLES
    } else {
        ValueType::CALLS
    };
    let types: Vec<ValueType> = std::iter::once(count).chain(table.clock.clone()).collect();
    let mut builder = Builder::new(&types);
    let frames: Vec<u32> = table.functions.iter().map(|f| builder.frame(frame(f))).collect();
    let mut places: Vec<u32> = Vec::with_capacity(expanded.nodes.len());
    for (function, parent, _) in &expanded.nodes {
        let parent = places.get(*parent as usize).copied().unwrap_or(Builder::ROOT);
        let place = frames
            .get(*function as usize)
            .map(|frame| builder.child(parent, *frame, 0));
        places.push(place.unwrap_or(Builder::ROOT));
    }
    for (part, nodes) in by_caller.iter().flatten().zip(&expanded.placed) {
        let calls = apportion_by_share(part.calls, nodes);
        let self_time = apportion_by_share(part.self_time, nodes);
        for ((node, _), (calls, self_time)) in nodes.iter().zip(calls.into_iter().zip(self_time)) {
            builder.add_at(places[*node as usize], &[calls, self_time]);
        }
    }
    builder.finish(Meta {
        event: types[0].name.to_string(),
        backend: "pstats".to_string(),
        ..Meta::default()
    })
}

/// The frame of a function. C functions have `~` for a file, and those of `profile` none; our own files have the name
/// of the module there.
fn frame(function: &PstatsFunction<'_>) -> Frame {
    let PstatsFunction { file, line, name, .. } = function;
    let is_path = file.contains('/') || file.ends_with(".py") || file.starts_with('<');
    match &**file {
        "[kernel]" => Frame {
            module: file.to_string(),
            ..Frame::new(FrameKind::Kernel, name.as_ref())
        },
        "~" | "" => Frame::native(name.as_ref(), BUILTIN, 0),
        _ if *line > 0 || is_path || file == "profile" => Frame::python(name.as_ref(), "", file.as_ref(), *line),
        _ => Frame::native(name.as_ref(), file.as_ref(), 0),
    }
}
