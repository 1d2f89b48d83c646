//! The profile of what a session gathered.

use nativeprof::profile::build::Builder;
use nativeprof::profile::model::{Frame as ProfileFrame, FrameKind, Meta, Profile};
use nativeprof::profile::values::ValueType;

use super::Taken;
use super::chains::{OVERFLOW, ROOT};

/// How many calls there were of Python functions, and of C functions.
pub fn calls(taken: &[(String, Taken)], frames: &[ProfileFrame]) -> (u64, u64) {
    let mut sums = (0, 0);
    for node in taken.iter().flat_map(|(_, Taken(chains))| &chains.nodes) {
        match frames.get(node.function as usize) {
            Some(frame) if frame.kind != FrameKind::Python => sums.1 += node.calls,
            _ => sums.0 += node.calls,
        }
    }
    sums
}

/// Which value types a profile has.
#[derive(Clone, Copy)]
pub struct ValueColumns {
    pub wall: bool,
    pub cpu: bool,
    /// The profile counts samples, of which it has none, and calls are a value: to be combined with a sampled profile.
    pub with_samples: bool,
}

/// The profile of what [`take_chains`](super::take_chains) gave. `nanoseconds` per tick.
pub fn profile(
    taken: &[(String, Taken)],
    frames: &[ProfileFrame],
    columns: ValueColumns,
    nanoseconds: f64,
    meta: Meta,
) -> Profile {
    let wanted = [
        (columns.with_samples, ValueType::SAMPLES),
        (true, ValueType::CALLS),
        (columns.wall, ValueType::WALL),
        (columns.cpu, ValueType::CPU),
    ];
    let types: Vec<ValueType> = wanted
        .into_iter()
        .filter_map(|(is_wanted, kind)| is_wanted.then_some(kind))
        .collect();
    let mut builder = Builder::new(&types);
    for (name, Taken(chains)) in taken {
        let top = if name.is_empty() {
            Builder::ROOT
        } else {
            let frame = builder.frame(ProfileFrame::new(FrameKind::Thread, name.clone()));
            builder.child(Builder::ROOT, frame, 0)
        };
        let mut places = Vec::with_capacity(chains.nodes.len());
        for (at, node) in chains.nodes.iter().enumerate() {
            let place = match at as u32 {
                ROOT => top,
                OVERFLOW if node.calls == 0 => top,
                OVERFLOW => {
                    let frame = builder.frame(ProfileFrame::new(
                        FrameKind::Truncated,
                        "[truncated: too many chains of callers]",
                    ));
                    builder.child(top, frame, 0)
                }
                _ => {
                    let parent = places.get(node.parent as usize).copied().unwrap_or(top);
                    let unknown = || ProfileFrame::new(FrameKind::Unknown, "[unknown]");
                    let frame = frames.get(node.function as usize).cloned().unwrap_or_else(unknown);
                    let frame = builder.frame(frame);
                    builder.child(parent, frame, 0)
                }
            };
            places.push(place);
            let wall = (node.wall.max(0) as f64 * nanoseconds) as u64;
            let mut amounts = Vec::with_capacity(types.len());
            amounts.extend(columns.with_samples.then_some(0));
            amounts.push(node.calls);
            amounts.extend(columns.wall.then_some(wall));
            amounts.extend(columns.cpu.then_some(node.cpu.max(0) as u64));
            builder.add_at(place, &amounts);
        }
    }
    builder.finish(meta)
}
