//! The call tree as indented text.

use serde_json::{Value, json};

use super::{RenderedList, ReportContext, share};
use crate::cli::output::row_filter::RowFilter;
use crate::cli::output::style::{Color, color};
use crate::cli::output::table::{Overflow, shortened};
use crate::cli::output::table_rows::ReportRow;
use crate::escape::line;
use crate::profile::model::{FrameKind, NodeId};
use crate::profile::stats::Stats;

/// Default for the smallest fraction of all samples that a shown node has.
const MIN_FRACTION: f64 = 0.005;
/// Columns of indentation at most: deeper branches stay there.
const MAX_INDENT: usize = 40;

/// A line of the tree.
struct Branch {
    row: ReportRow,
    /// How often it calls itself, with all its samples, before anything else happens.
    times: u64,
    /// Calls between it and the root.
    depth: usize,
    /// Indentation and branch lines before the name.
    indent: String,
}

/// The tree, largest branch first. Of the filters a count is one of lines, a fraction the least part of all
/// samples that a node is shown with, and a pattern keeps the stacks through functions that match.
pub fn tree(context: &ReportContext<'_>) -> RenderedList {
    let (stats, total) = (context.stats, context.stats.samples());
    let mut kept: Option<Vec<bool>> = None;
    let (mut count, mut least) = (usize::MAX, None);
    for filter in context.filters {
        match filter {
            RowFilter::Count(n) => count = count.min(*n),
            RowFilter::Fraction(part) => least = Some(f64::max(least.unwrap_or(0.0), *part)),
            RowFilter::Pattern(pattern) => {
                let matches = |node| ReportRow::of_frame(frame(context, node)).text();
                let through = through(context, &|node| pattern.is_match(&matches(node)));
                kept = Some(match kept {
                    None => through,
                    Some(before) => before.iter().zip(through).map(|(a, b)| *a && b).collect(),
                });
            }
        }
    }
    let least = least.unwrap_or(if count == usize::MAX { MIN_FRACTION } else { 0.0 }) * total as f64;
    let shown = |node: NodeId| stats.node(node).total as f64 >= least && kept.as_ref().is_none_or(|k| k[node as usize]);
    let mut branches = Vec::new();
    // Node, depth, indentation of the node, indentation of nodes below it.
    let mut path: Vec<(NodeId, usize, String, String)> = Vec::new();
    let below = |node: NodeId, depth: usize, indent: &str, path: &mut Vec<_>| {
        let mut children: Vec<NodeId> = stats.children(node).iter().copied().filter(|c| shown(*c)).collect();
        children.sort_by_key(|child| std::cmp::Reverse(stats.node(*child).total));
        let room = indent.chars().count() < MAX_INDENT;
        let last = children.len().saturating_sub(1);
        let children = children.into_iter().enumerate().map(|(at, child)| match () {
            _ if last == 0 || !room => (child, depth, indent.to_string(), indent.to_string()),
            _ if at == last => (child, depth, format!("{indent}└─"), format!("{indent}  ")),
            _ => (child, depth, format!("{indent}├─"), format!("{indent}│ ")),
        });
        path.extend(children.rev());
    };
    if total > 0 {
        below(0, 0, "", &mut path);
    }
    while let Some((mut node, depth, indent, next)) = path.pop() {
        let mut times = 1;
        while let Some(again) = same_below(stats, node) {
            node = again;
            times += 1;
        }
        let mut row = ReportRow::of_frame(frame(context, node));
        let counts = stats.node(node);
        (row.self_count, row.total) = (counts.self_count, counts.total);
        below(node, depth + times as usize, &next, &mut path);
        branches.push(Branch {
            row,
            times,
            depth,
            indent,
        });
    }
    let all = branches.len();
    branches.truncate(count);
    context.limit(&mut branches);
    let list: Vec<Value> = branches.iter().map(json).collect();
    let mut text = draw(context, &branches, total);
    if branches.len() < all {
        let rest = format!(
            "{} of {all} lines shown; for more: nativeprof report {} --tree 1000\n",
            branches.len(),
            context.file_name()
        );
        text += &context.style.paint(Color::Dim, &rest);
    }
    ("tree", list.into(), text)
}

fn frame<'a>(context: &ReportContext<'a>, node: NodeId) -> &'a crate::profile::model::Frame {
    &context.profile.frames[context.profile.nodes[node as usize].frame as usize]
}

/// The only node below, if it is the same function and nothing but it was sampled here.
fn same_below(stats: &Stats<'_>, node: NodeId) -> Option<NodeId> {
    let [child] = stats.children(node) else { return None };
    let same = stats.function(node)? == stats.function(*child)?;
    (same && stats.node(*child).total == stats.node(node).total).then_some(*child)
}

/// Nodes on a stack with a match: matching nodes, their descendants and their ancestors.
fn through(context: &ReportContext<'_>, matches: &dyn Fn(NodeId) -> bool) -> Vec<bool> {
    let nodes = &context.profile.nodes;
    let mut matched = vec![false; nodes.len()];
    let mut by_frame: Vec<Option<bool>> = vec![None; context.profile.frames.len()];
    let mut order = vec![0 as NodeId];
    let mut at = 0;
    while let Some(node) = order.get(at).copied() {
        at += 1;
        order.extend(context.stats.children(node));
        if node > 0 {
            let of_frame = &mut by_frame[nodes[node as usize].frame as usize];
            let parent = matched[nodes[node as usize].parent as usize];
            matched[node as usize] = parent || *of_frame.get_or_insert_with(|| matches(node));
        }
    }
    for node in order.iter().skip(1).rev() {
        if matched[*node as usize] {
            let parent = nodes[*node as usize].parent as usize;
            matched[parent] = true;
        }
    }
    matched
}

fn json(branch: &Branch) -> Value {
    let mut value = branch.row.json();
    value["depth"] = branch.depth.into();
    if branch.times > 1 {
        value["times"] = json!(branch.times);
    }
    value
}

fn draw(context: &ReportContext<'_>, branches: &[Branch], total: u64) -> String {
    let style = &context.style;
    if branches.is_empty() {
        return "no rows\n".into();
    }
    let titles = ["TOTAL", "SELF"].map(|word| context.amounts_title(word) + " %");
    let [total_width, self_width] = titles.each_ref().map(String::len);
    let mut text = style.paint(Color::Bold, &format!("{}  FUNCTION (WHERE)", titles.join("  "))) + "\n";
    for Branch { row, times, indent, .. } in branches {
        let self_share = if row.self_count > 0 {
            share(row.self_count, total)
        } else {
            String::new()
        };
        let numbers = format!(
            "{:>total_width$}  {self_share:>self_width$}  {indent}",
            share(row.total, total)
        );
        let name = line(&row.name);
        let times = if *times > 1 {
            format!(" ×{times}")
        } else {
            String::new()
        };
        let place = if row.place.is_empty() {
            String::new()
        } else {
            format!(" ({})", line(&row.place))
        };
        let kind = row.kind.unwrap_or(FrameKind::Root);
        text += &numbers;
        match style.width {
            None => text += &format!("{}{times}{place}", style.paint(color(kind), &name)),
            Some(width) => {
                // The name has priority; the location gets the remaining width.
                let room = width.saturating_sub(numbers.chars().count() + times.chars().count());
                let name = shortened(&name, room.max(8), Overflow::Start);
                let left = room.saturating_sub(unicode_width::UnicodeWidthStr::width(&*name));
                text += &style.paint(color(kind), &name);
                text += &times;
                if left >= 10 && !place.is_empty() {
                    let inner = &place[2..place.len() - 1];
                    let place = format!(" ({})", shortened(inner, left - 3, Overflow::End));
                    text += &style.paint(Color::Dim, &place);
                }
            }
        }
        text.push('\n');
    }
    text
}
