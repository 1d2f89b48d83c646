//! What changed between two profiles, as a flame graph.
//!
//! The width of a block is the mean of its shares in both profiles, so removed and new functions are both visible. Its
//! color is the change of the function in the complete profile: red if it grew, blue if it shrank, gray if the change
//! is not significant.

use std::collections::HashMap;
use std::io::{self, Write};

use super::collapsed::field;
use super::flamegraph;
use super::flamegraph::{Color, FlamegraphStyle};
use crate::escape;
use crate::profile::diff::{Change, Diff, Normalization, RowMap};
use crate::profile::model::{Frame, FrameKind, Node, NodeId, Profile};
use crate::profile::stats::Stats;

/// The total of the flame graph's counts.
const WHOLE: u128 = 1_000_000;

const GREY: Color = Color { r: 222, g: 222, b: 218 };
const RED: Color = Color { r: 226, g: 72, b: 60 };
const BLUE: Color = Color { r: 66, g: 126, b: 214 };

/// Writes the flame graph of the changes of self time by function in `found`.
///
/// # Errors
/// Those of `out`.
pub fn svg(
    a: &Profile,
    b: &Profile,
    found: &Diff<'_>,
    title: &str,
    norm: Normalization,
    out: &mut dyn Write,
) -> io::Result<()> {
    let both = both(a, b);
    let changes: HashMap<&Frame, &Change<'_>> = found
        .rows
        .iter()
        .filter(|row| row.is_significant())
        .map(|row| (row.frame, row))
        .collect();
    let largest = changes.values().map(|row| row.change().abs()).fold(0.0, f64::max);
    let paint = |frame: &Frame| {
        let text = field(frame);
        let Some(change) = changes.get(frame) else {
            return (text, GREY);
        };
        let amount = |value: f64| match norm {
            Normalization::Time => format!("{value:.3} s"),
            Normalization::Share | Normalization::Rate => format!("{:.2} %", value * 100.0),
        };
        let color = if change.change() > 0.0 { RED } else { BLUE };
        // The smallest change still differs from none.
        let strength = 0.25 + 0.75 * change.change().abs() / largest.max(f64::MIN_POSITIVE);
        let text = format!(
            "{text} [{} before, {} after]",
            amount(change.before),
            amount(change.after)
        );
        (text, mixed(GREY, color, strength))
    };
    let look = FlamegraphStyle {
        title: escape::text(title).into_owned(),
        subtitle: "width: mean of both; color: change of the function's self time".into(),
        count_name: "%",
        factor: 100.0 / WHOLE as f64,
        paint: &paint,
        legend: &[("grew", RED), ("shrank", BLUE), ("no significant change", GREY)],
    };
    flamegraph::draw(&both, &look, out)
}

/// The same as a page that needs nothing else, with the table.
///
/// # Errors
/// Those of `out`.
pub fn html(
    a: &Profile,
    b: &Profile,
    found: &Diff<'_>,
    title: &str,
    table: &str,
    norm: Normalization,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut picture = Vec::new();
    svg(a, b, found, title, norm, &mut picture)?;
    let picture = String::from_utf8_lossy(&picture);
    // HTML takes the element without the XML declaration.
    let picture = picture.find("<svg").map_or("", |at| &picture[at..]);
    let (title, table) = (as_text(title), as_text(table));
    write!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>{title}</title>\n\
         <style>body{{font-family:sans-serif;margin:1em;background:#fcfcfa;color:#222}}pre{{overflow-x:auto}}\
         svg{{width:100%}}</style>\n\
         <h1>{title}</h1>\n<pre>{table}</pre>\n{picture}\n</html>\n"
    )
}

fn as_text(text: &str) -> String {
    text.split('\n')
        .map(|line| {
            escape::line(line)
                .replace('&', "&amp;")
                .replace('<', "&lt;")
                .replace('>', "&gt;")
        })
        .collect::<Vec<_>>()
        .join("\n")
}

fn mixed(from: Color, to: Color, part: f64) -> Color {
    let mix = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * part).round() as u8;
    Color {
        r: mix(from.r, to.r),
        g: mix(from.g, to.g),
        b: mix(from.b, to.b),
    }
}

/// One tree of both profiles, each with half of [`WHOLE`]. Processes and threads are omitted, since their IDs differ.
fn both(a: &Profile, b: &Profile) -> Profile {
    let stats = [Stats::new(a), Stats::new(b)];
    let units = RowMap::of_functions(&stats[0], &stats[1]);
    let mut frames: Vec<Frame> = units.frames.iter().map(|frame| (*frame).clone()).collect();
    let root = frames.len() as u32;
    frames.push(Frame::new(FrameKind::Root, "root"));
    let new = |frame, parent, line| Node {
        first_seen_line: line,
        ..Node::new(frame, parent)
    };
    let mut nodes = vec![new(root, 0, 0)];
    let mut known: HashMap<(NodeId, u32), NodeId> = HashMap::new();
    for (i, profile) in [a, b].into_iter().enumerate() {
        let total = u128::from(stats[i].samples().max(1));
        let mut place = vec![0; profile.nodes.len()];
        for (at, node) in profile.nodes.iter().enumerate() {
            let parent = place
                .get(node.parent as usize)
                .copied()
                .filter(|_| at > 0 && (node.parent as usize) < at);
            let here = parent.map_or(0, |parent| match stats[i].function(at as NodeId) {
                Some(function) => {
                    let unit = units.of[i][function as usize];
                    *known.entry((parent, unit)).or_insert_with(|| {
                        nodes.push(new(unit, parent, node.first_seen_line));
                        nodes.len() as NodeId - 1
                    })
                }
                None => parent,
            });
            place[at] = here;
            let self_count = u128::from(stats[i].node(at as NodeId).self_count);
            nodes[here as usize].count += (self_count * (WHOLE / 2) / total) as u64;
        }
    }
    for at in (1..nodes.len()).rev() {
        let (parent, count) = (nodes[at].parent as usize, nodes[at].count);
        nodes[parent].count += count;
    }
    Profile {
        frames,
        nodes,
        ..Profile::default()
    }
}
