//! Thread states as frames, and the time that was spent in them.

use rustc_hash::FxHashMap;

use super::{ResolveInput, ResolvedFrame};
use crate::counts::{RawLag, RawMemory};
use crate::counts::{RawNode, RawTimelineSample, RawTree};
use crate::counts::{RawWaits, RawWaker};
use crate::frame::RawFrame;
use crate::profile::lags::Lag;
use crate::profile::model::{Frame, FrameKind, Node, NodeId, PlaceId};
use crate::profile::sums::sum_upwards;
use crate::profile::values::{Amounts, Unit, Value, ValueType};
use crate::profile::view::frame_text_at;
use crate::profile::waits;
use crate::profile::waits::Waker;

/// Samples, the wall time that they represent, the parts of it on and off the CPU, and for how long suspended tasks awaited
/// something. `ends`: the node of each raw node,
/// and its place.
pub fn time_values(input: &ResolveInput<'_>, nodes: &[Node], ends: &[(NodeId, PlaceId)]) -> Vec<Value> {
    let raw = input.tree.nodes();
    // Stacks of wakers are below states.
    let mut off_cpu: Vec<bool> = Vec::with_capacity(raw.len());
    for (parent, frame, _) in raw {
        let above = off_cpu.get(*parent as usize).copied().unwrap_or(false);
        off_cpu.push(above || matches!(frame, Some(RawFrame::State(_) | RawFrame::Awaiting(_))));
    }
    let is_off_cpu = |t: &RawTimelineSample| off_cpu[t.node as usize];
    let of_samples = |kind, samples| of_samples(input, nodes, ends, kind, samples);
    let of = |kind: ValueType, amount: &dyn Fn(&RawTimelineSample) -> u64| {
        of_samples(kind, input.timeline.iter().map(amount).collect())
    };
    let counts = input.timeline.iter().map(|t| t.count.into()).collect();
    let mut values = vec![
        Value {
            kind: ValueType::SAMPLES,
            amounts: Amounts::Each {
                nodes: Vec::new(),
                samples: counts,
            },
        },
        of(ValueType::WALL, &|t| t.amount),
        of(ValueType::CPU, &|t| if is_off_cpu(t) { 0 } else { t.amount }),
        of(ValueType::OFF_CPU, &|t| if is_off_cpu(t) { t.amount } else { 0 }),
    ];
    if let Some((waits, _)) = input.waits
        && !waits.awaits.is_empty()
    {
        let mut times = vec![0; input.timeline.len()];
        for (row, time) in &waits.awaits {
            if let Some(of_sample) = times.get_mut(*row as usize) {
                *of_sample = *time;
            }
        }
        values.push(of_samples(ValueType::AWAIT, times));
    }
    values
}

/// A value whose amounts the samples have.
fn of_samples(
    input: &ResolveInput<'_>,
    nodes: &[Node],
    ends: &[(NodeId, PlaceId)],
    kind: ValueType,
    samples: Vec<u64>,
) -> Value {
    let mut sums = vec![0u64; nodes.len()];
    for (t, amount) in input.timeline.iter().zip(&samples) {
        sums[ends[t.node as usize].0 as usize] += amount;
    }
    sum_upwards(&mut sums, |at| Some(nodes[at].parent as usize));
    let amounts = Amounts::Each { nodes: sums, samples };
    Value { kind, amounts }
}

/// Samples, and how many events they stand for, where that is known: as a value with the event's name.
pub fn event_values(input: &ResolveInput<'_>, nodes: &[Node], ends: &[(NodeId, PlaceId)], event: &str) -> Vec<Value> {
    let mut values = input.measure.values();
    let counts: Vec<u64> = input.timeline.iter().map(|t| t.amount).collect();
    if counts.iter().any(|count| *count > 0) {
        let kind = ValueType::new(event, Unit::Count);
        values.push(of_samples(input, nodes, ends, kind, counts));
    }
    values
}

/// Samples, and the memory that they represent: that which is still resident, that which was when most was, all growth, and what
/// was given back.
pub fn memory_values(input: &ResolveInput<'_>, nodes: &[Node], ends: &[(NodeId, PlaceId)]) -> Vec<Value> {
    let of = |kind: ValueType, counts: fn(RawMemory) -> bool| {
        let rows = input.timeline.iter().zip(input.memory);
        let amounts = rows.map(|(t, memory)| if counts(*memory) { t.amount } else { 0 });
        of_samples(input, nodes, ends, kind, amounts.collect())
    };
    let mut values = vec![
        Value::per_count(ValueType::SAMPLES, 1),
        of(ValueType::RSS_BYTES, RawMemory::is_resident),
    ];
    // The peak is known in the end.
    if input.memory.iter().any(|memory| memory.was_at_peak()) {
        values.push(of(ValueType::RSS_PEAK_BYTES, RawMemory::was_at_peak));
    }
    values.push(of(ValueType::RSS_GROWN_BYTES, |m| matches!(m, RawMemory::Grown { .. })));
    values.push(of(ValueType::RSS_RETURNED_BYTES, |m| m == RawMemory::Returned));
    values
}

/// A stack with names.
#[derive(Default)]
struct NamedStack {
    /// Outermost first, `name (file:line)`.
    frames: Vec<String>,
    /// The innermost Python function, as it is in `frames`, and the name of the innermost task.
    function: Option<String>,
    task: Option<String>,
}

/// The stack that ends at a node.
fn named_stack(
    node: RawNode,
    tree: &RawTree,
    named: &FxHashMap<RawFrame, Vec<ResolvedFrame>>,
    frames: &[Frame],
) -> NamedStack {
    let mut stack = NamedStack::default();
    let mut at = node;
    while let (parent, Some(raw), _) = &tree.nodes()[at as usize] {
        for (frame, line) in named.get(raw).map_or(&[][..], Vec::as_slice).iter().rev() {
            let frame = &frames[*frame as usize];
            let text = frame_text_at(frame, *line);
            if frame.kind == FrameKind::Python && stack.function.is_none() {
                stack.function = Some(text.clone());
            }
            if frame.kind == FrameKind::Task && stack.task.is_none() {
                let name = frame
                    .name
                    .strip_prefix("[task: ")
                    .and_then(|name| name.strip_suffix(']'));
                stack.task = name.map(String::from);
            }
            stack.frames.push(text);
        }
        at = *parent;
    }
    stack.frames.reverse();
    stack
}

/// What kept event loops for long, in chronological order; `start` of the profile on the samples' clock.
pub fn lags(
    raw: &[RawLag],
    tree: &RawTree,
    named: &FxHashMap<RawFrame, Vec<ResolvedFrame>>,
    frames: &[Frame],
    start: u64,
) -> Vec<Lag> {
    let lag = |lag: &RawLag| {
        let stack = named_stack(lag.node, tree, named, frames);
        Lag {
            pid: lag.pid,
            tid: lag.tid,
            start: lag.start,
            time: lag.start.saturating_sub(start),
            length: lag.length,
            task: stack.task.unwrap_or_default(),
            function: stack.function.unwrap_or_default(),
            stack: stack.frames,
        }
    };
    let mut lags: Vec<Lag> = raw.iter().map(lag).collect();
    lags.sort_by_key(|lag| (lag.start, lag.tid));
    lags
}

/// Intervals off the CPU, with the stacks of wakers named.
pub fn waits(
    raw: &RawWaits,
    wakers: &[RawWaker],
    tree: &RawTree,
    named: &FxHashMap<RawFrame, Vec<ResolvedFrame>>,
    frames: &[Frame],
) -> waits::Waits {
    let waker = |w: &RawWaker| {
        let stack = named_stack(w.node, tree, named, frames);
        Waker {
            pid: w.pid,
            tid: w.tid,
            function: stack.function.unwrap_or_default(),
            stack: stack.frames,
        }
    };
    waits::Waits {
        lengths: raw.lengths.clone(),
        wakers: raw.wakers.clone(),
        holding: raw.holding.clone(),
        shares: raw.shares.clone(),
        known: wakers.iter().map(waker).collect(),
    }
}
