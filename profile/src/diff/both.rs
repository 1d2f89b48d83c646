//! One tree of both profiles of a comparison.

use std::collections::HashMap;

use super::matching::RowMap;
use super::runs::per_unit;
use super::{DiffOptions, Normalization, Side};
use crate::model::{Frame, FrameKind, Meta, Node, NodeId, Profile};
use crate::stats::Stats;
use crate::sums::sum_upwards;
use crate::values::{Amounts, Unit, Value, ValueType};

/// All of a profile, as a share; also one second, in nanoseconds, and one thing that is counted.
pub const WHOLE: u64 = 1_000_000_000;

/// The names of the values of the profile of [`both`], in their order.
const VALUES: [&str; 3] = ["mean of both", "before", "after"];

/// Both sides of a comparison as one profile, with a tree that has the stacks of both. Its values are the mean of both, the
/// older and the newer side, in parts of [`WHOLE`]. Lines are those of the newer one. Processes and threads are left out,
/// since their IDs differ.
pub fn both(a: &Side<'_>, b: &Side<'_>, options: &DiffOptions) -> Profile {
    let stats = [Stats::new(a.sum), Stats::new(b.sum)];
    let units = RowMap::of_functions(&stats[0], &stats[1]);
    let mut frames: Vec<Frame> = units.frames.iter().map(|frame| (*frame).clone()).collect();
    let root = frames.len() as u32;
    frames.push(Frame::new(FrameKind::Root, "root"));
    let mut nodes = vec![Node::new(root, 0)];
    let mut known: HashMap<(NodeId, u32), NodeId> = HashMap::new();
    let mut amounts: [Vec<u64>; 2] = [vec![0], vec![0]];
    for (i, side) in [a, b].into_iter().enumerate() {
        let profile = side.sum;
        let total = Some(per_unit(side, options.normalization)).filter(|total| *total > 0.0);
        let total = total.unwrap_or(1.0);
        let part = |count: u64| (count as f64 / total * WHOLE as f64).round() as u64;
        let (mut place, mut sum) = (vec![0; profile.nodes.len()], 0u64);
        for (at, node) in profile.nodes.iter().enumerate() {
            let parent = place
                .get(node.parent as usize)
                .copied()
                .filter(|_| at > 0 && (node.parent as usize) < at);
            let here = parent.map_or(0, |parent| match stats[i].function(at as NodeId) {
                Some(function) => {
                    let unit = units.of[i][function as usize];
                    *known.entry((parent, unit)).or_insert_with(|| {
                        nodes.push(Node::new(unit, parent));
                        nodes.len() as NodeId - 1
                    })
                }
                None => parent,
            });
            place[at] = here;
            if here == 0 {
                // Outside of the function in focus.
                continue;
            }
            let self_count = stats[i].node(at as NodeId).self_count;
            amounts[i].resize(nodes.len(), 0);
            // Of the sum, so that rounding does not add up.
            let with = sum.saturating_add(self_count);
            amounts[i][here as usize] += part(with) - part(sum);
            sum = with;
            if i == 1 {
                let into = &mut nodes[here as usize];
                if into.first_seen_line == 0 {
                    into.first_seen_line = node.first_seen_line;
                    into.line_text.clone_from(&node.line_text);
                }
                let self_lines = node.self_lines_of(self_count);
                for (lines, from) in [(&mut into.lines, &node.lines), (&mut into.self_lines, self_lines)] {
                    from.iter().for_each(|(line, count)| {
                        let sum = lines.entry(*line).or_default();
                        *sum = sum.saturating_add(part(*count));
                    });
                }
            }
        }
    }
    amounts.iter_mut().for_each(|side| side.resize(nodes.len(), 0));
    for at in 0..nodes.len() {
        nodes[at].count = amounts[0][at].midpoint(amounts[1][at]);
    }
    let mut counts: Vec<u64> = nodes.iter().map(|node| node.count).collect();
    for column in amounts.iter_mut().chain([&mut counts]) {
        sum_upwards(column, |at| Some(nodes[at].parent as usize));
    }
    nodes
        .iter_mut()
        .zip(counts)
        .for_each(|(node, count)| node.count = count);
    forget_unused(&mut frames, &mut nodes);
    let unit = match options.normalization {
        Normalization::Time => Unit::Nanoseconds,
        Normalization::Share | Normalization::Rate | Normalization::Number => Unit::Count,
    };
    let [before, after] = amounts;
    let values = [Vec::new(), before, after]
        .into_iter()
        .zip(VALUES)
        .map(|(nodes, name)| Value {
            kind: ValueType::new(name, unit),
            amounts: Amounts::Each {
                nodes,
                samples: Vec::new(),
            },
        });
    Profile {
        // What the categories of code depend on.
        meta: Meta {
            version: b.sum.meta.version.clone(),
            command: b.sum.meta.command.clone(),
            python: b.sum.meta.python.clone(),
            ..Meta::default()
        },
        frames,
        nodes,
        values: values.collect(),
        ..Profile::default()
    }
}

/// Drops frames that no node has: of what a view has left out.
fn forget_unused(frames: &mut Vec<Frame>, nodes: &mut [Node]) {
    let mut used = vec![false; frames.len()];
    nodes.iter().for_each(|node| used[node.frame as usize] = true);
    let mut number = 0;
    let numbers: Vec<u32> = used
        .iter()
        .map(|used| {
            number += u32::from(*used);
            number.saturating_sub(1)
        })
        .collect();
    let mut is_used = used.into_iter();
    frames.retain(|_| is_used.next().unwrap_or(false));
    nodes
        .iter_mut()
        .for_each(|node| node.frame = numbers[node.frame as usize]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diff::{Metric, RowKind, Run};

    /// A profile of stacks of Python functions, with their samples.
    fn profile(stacks: &[(&[&str], u64)]) -> Profile {
        let mut profile = Profile {
            frames: vec![Frame::new(FrameKind::Root, "root")],
            nodes: vec![Node::new(0, 0)],
            ..Profile::default()
        };
        for (stack, count) in stacks {
            let mut at = 0;
            profile.nodes[0].count += count;
            for name in *stack {
                profile.frames.push(Frame::python(*name, *name, "/srv/app.py", 1));
                let mut node = Node::new(profile.frames.len() as u32 - 1, at);
                (node.count, at) = (*count, profile.nodes.len() as NodeId);
                node.lines.insert(3, *count);
                profile.nodes.push(node);
            }
        }
        profile
    }

    #[test]
    fn the_tree_has_the_stacks_of_both_with_their_shares() {
        let a = profile(&[(&["main", "old"], 3), (&["main", "same"], 7)]);
        let b = profile(&[(&["main", "new"], 10), (&["main", "same"], 30)]);
        let options = DiffOptions {
            normalization: Normalization::Share,
            by: RowKind::Function,
            metric: Metric::Total,
            confidence: 0.99,
            interpreter: false,
        };
        let [a, b] = [&a, &b].map(|profile| {
            Side::of_one(Run {
                profile,
                grain: 1.0,
                clock: None,
            })
        });
        let both = both(&a, &b, &options);
        let column = |at: usize| {
            let amounts = both.amounts(at);
            let rows = both.nodes.iter().zip(amounts.iter());
            let rows = rows.map(|(node, amount)| (both.frames[node.frame as usize].name.as_str(), *amount));
            let mut rows: Vec<_> = rows.collect();
            rows.sort_unstable();
            rows
        };
        let all = WHOLE;
        assert_eq!(
            column(1),
            [
                ("main", all),
                ("new", 0),
                ("old", all / 10 * 3),
                ("root", all),
                ("same", all / 10 * 7)
            ]
        );
        assert_eq!(
            column(2),
            [
                ("main", all),
                ("new", all / 4),
                ("old", 0),
                ("root", all),
                ("same", all / 4 * 3)
            ]
        );
        assert_eq!(
            column(0),
            [
                ("main", all),
                ("new", all / 8),
                ("old", all / 20 * 3),
                ("root", all),
                ("same", all / 40 * 29)
            ]
        );
        let new = both
            .nodes
            .iter()
            .find(|n| both.frames[n.frame as usize].name == "new")
            .unwrap();
        assert_eq!(new.lines[&3], all / 4);
    }
}
