//! Sampled allocations: what each stands for, and the values of a profile that follow from them.

use rustc_hash::FxHashMap;

use crate::event::Tid;
use crate::profile::memory_over_time::{MemoryObserver, ObservedMemory};
use crate::profile::model::{NodeId, Profile};
use crate::profile::sums::sum_upwards;
use crate::profile::values::{Amounts, Unit, Value, ValueType};

/// A sampled block, as it was read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Block {
    pub tid: Tid,
    /// When it was allocated, as the time of its sample, ns.
    pub time: u64,
    /// When it was freed, ns; 0: it was not.
    pub end: u64,
    /// Bytes.
    pub size: f64,
    /// Blocks that it stands for.
    pub count: f64,
    /// Of a mapping: bytes that are still mapped.
    pub mapped: Option<f64>,
}

/// What was live when, times in ns as they are in the blocks, and which of the blocks were live when most was.
fn live_over_time(blocks: &[Block]) -> (MemoryObserver<1>, Vec<bool>) {
    let bytes = |block: &Block| block.size * block.count;
    let heap = || blocks.iter().filter(|block| block.mapped.is_none());
    let begins = heap().map(|block| (block.time, bytes(block)));
    let ends = heap().filter(|block| block.end != 0);
    let mut changes: Vec<(u64, f64)> = begins.chain(ends.map(|block| (block.end, -bytes(block)))).collect();
    changes.sort_by_key(|(time, _)| *time);
    let (mut live, mut most, mut peak) = (0.0, 0.0, 0);
    let mut over_time = MemoryObserver::new([ObservedMemory::Live]);
    for (time, change) in changes {
        live += change;
        if live > most {
            (most, peak) = (live, time);
        }
        over_time.add(time, [live.round() as u64]);
    }
    let is_live = |block: &Block| block.time <= peak && (block.end == 0 || block.end > peak);
    (over_time, blocks.iter().map(is_live).collect())
}

/// Which of the blocks look like leaks: they live, are older than the youngest tenth of the recording, and their stack has such
/// blocks from each third of the time before that. `nodes`: where their stacks end.
fn leaked(blocks: &[Block], nodes: &[NodeId], start: u64, duration: u64) -> Vec<bool> {
    let third = (duration / 10 * 9 / 3).max(1);
    let part = |block: &Block| match block.time.saturating_sub(start) / third {
        part @ 0..3 if block.end == 0 => Some(part),
        _ => None,
    };
    let mut parts: FxHashMap<NodeId, u8> = FxHashMap::default();
    for (block, node) in blocks.iter().zip(nodes) {
        if let Some(part) = part(block) {
            *parts.entry(*node).or_default() |= 1 << part;
        }
    }
    let is_leaked = |(block, node): (&Block, &NodeId)| part(block).is_some() && parts.get(node) == Some(&0b111);
    blocks.iter().zip(nodes).map(is_leaked).collect()
}

/// Adds the values of blocks to a profile whose samples are their stacks; it began at `start`, ns. `with_mappings`: mappings of
/// memory were sampled, too.
pub fn add_values(profile: &mut Profile, start: u64, blocks: &[Block], with_mappings: bool) {
    let samples = profile.timeline.iter().enumerate();
    let rows: FxHashMap<(Tid, u64), usize> = samples.map(|(row, s)| ((s.tid, s.time), row)).collect();
    let row_of = |block: &Block| rows.get(&(block.tid, block.time.saturating_sub(start))).copied();
    let rows: Vec<Option<usize>> = blocks.iter().map(row_of).collect();
    // What has no stack is the root's.
    let node_of = |row: &Option<usize>| row.map_or(0, |row| profile.timeline[row].node);
    let nodes: Vec<NodeId> = rows.iter().map(node_of).collect();
    let duration = (profile.meta.duration * 1e9) as u64;
    let all = vec![true; blocks.len()];
    let live = blocks.iter().map(|block| block.end == 0).collect();
    let (mut over_time, at_peak) = live_over_time(blocks);
    over_time.extend_to(start.saturating_add(duration));
    profile.meta.memory_over_time = over_time.finish().of_profile(start, duration);
    let mapped = blocks.iter().map(|block| block.mapped.is_some()).collect();
    let columns = [
        (ValueType::ALLOC_BYTES, &all),
        (ValueType::ALLOCS, &all),
        (ValueType::LIVE_BYTES, &live),
        (ValueType::LIVE_ALLOCS, &live),
        (ValueType::PEAK_BYTES, &at_peak),
        (ValueType::LEAKED_BYTES, &leaked(blocks, &nodes, start, duration)),
        (ValueType::MAPPED_BYTES, &mapped),
    ];
    let are_sampled = |kind: &ValueType| with_mappings || *kind != ValueType::MAPPED_BYTES;
    for (kind, is_counted) in columns.into_iter().filter(|(kind, _)| are_sampled(kind)) {
        let (mut of_nodes, mut of_samples) = (vec![0u64; profile.nodes.len()], vec![0u64; profile.timeline.len()]);
        // What rounding leaves goes to the next block, so that sums are right.
        let mut rest = 0.0;
        let is_of_mappings = kind == ValueType::MAPPED_BYTES;
        let counted = blocks.iter().enumerate();
        for (at, block) in counted.filter(|(at, block)| is_counted[*at] && block.mapped.is_some() == is_of_mappings) {
            let size = match (kind.unit, block.mapped) {
                (Unit::Bytes, Some(mapped)) => mapped,
                (Unit::Bytes, None) => block.size,
                _ => 1.0,
            };
            let exact = size * block.count + rest;
            let amount = exact.round().max(0.0);
            rest = exact - amount;
            let sample = rows[at].and_then(|row| of_samples.get_mut(row));
            for sum in of_nodes.get_mut(nodes[at] as usize).into_iter().chain(sample) {
                *sum = sum.saturating_add(amount as u64);
            }
        }
        sum_upwards(&mut of_nodes, |at| Some(profile.nodes[at].parent as usize));
        let amounts = Amounts::Each {
            nodes: of_nodes,
            samples: of_samples,
        };
        profile.values.push(Value { kind, amounts });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::model::{Node, TimelineSample};

    fn block(time: u64, end: u64, size: f64) -> Block {
        Block {
            tid: 7,
            time,
            end,
            size,
            count: 2.0,
            mapped: None,
        }
    }

    #[test]
    fn values_are_added_by_stack() {
        let sample = |time, node| TimelineSample {
            time,
            pid: 1,
            tid: 7,
            node,
        };
        let mut profile = Profile {
            nodes: vec![Node::new(0, 0), Node::new(1, 0), Node::new(2, 1)],
            timeline: vec![sample(10, 1), sample(20, 2), sample(30, 2)],
            values: vec![Value::per_count(ValueType::SAMPLES, 1)],
            ..Profile::default()
        };
        profile.meta.duration = 1e-6;
        // The first is freed before the third comes; the fourth has no sample; the last is a mapping, half of it unmapped.
        let mapping = Block {
            mapped: Some(500.0),
            ..block(120, 0, 1000.0)
        };
        let blocks = [
            block(110, 125, 100.0),
            block(120, 0, 10.1),
            block(130, 140, 50.0),
            block(131, 0, 1.0),
            mapping,
        ];
        add_values(&mut profile, 100, &blocks, true);
        let over_time = &profile.meta.memory_over_time;
        assert_eq!(over_time.times, [20, 1000]);
        assert_eq!(over_time.amounts, [(ObservedMemory::Live, vec![220, 22])]);
        for (name, nodes, samples) in [
            ("alloc_bytes", [322, 320, 120], [200, 20, 100]),
            ("allocs", [8, 6, 4], [2, 2, 2]),
            ("live_bytes", [22, 20, 20], [0, 20, 0]),
            ("live_allocs", [4, 2, 2], [0, 2, 0]),
            ("peak_bytes", [220, 220, 20], [200, 20, 0]),
            ("leaked_bytes", [0, 0, 0], [0, 0, 0]),
            ("mapped_bytes", [1000, 1000, 1000], [0, 1000, 0]),
        ] {
            let value = profile.find_value(name).expect(name);
            assert_eq!(profile.amounts(value), nodes, "{name}");
            let of_samples = (0..3).map(|at| profile.sample_amount(value, at)).collect::<Vec<_>>();
            assert_eq!(of_samples, samples, "{name}");
        }
    }

    #[test]
    fn leaks_are_old_and_from_all_of_the_time() {
        // Between 100 and 1100 the youngest tenth begins at 1000, the parts before it at 100, 400 and 700.
        let blocks = [
            (150, 0, 1), // leaks, with the next two
            (450, 0, 1),
            (750, 0, 1),
            (760, 900, 1), // freed
            (1050, 0, 1),  // young
            (150, 0, 2),   // a cache that is filled once
            (200, 0, 2),
            (800, 0, 3), // has only begun
        ];
        let nodes: Vec<NodeId> = blocks.iter().map(|(.., node)| *node).collect();
        let blocks: Vec<Block> = blocks.iter().map(|(time, end, _)| block(*time, *end, 1.0)).collect();
        let leaked = leaked(&blocks, &nodes, 100, 1000);
        assert_eq!(leaked, [true, true, true, false, false, false, false, false]);
    }
}
