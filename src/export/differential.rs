//! What changed between two profiles, as a flame graph.
//!
//! A block is as wide as the mean of its parts of both profiles, so that what is gone is seen as well as what is new.
//! Its colour tells how the function changed all over the profile: red if it grew, blue if it shrank, grey if noise
//! accounts for the change.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use super::collapsed::field;
use super::escape;
use super::flamegraph::{self, Color, Look};
use crate::tree::diff::{Change, Diff, Norm, Units};
use crate::tree::profile::{Frame, FrameKind, Node, NodeId, Profile};
use crate::tree::stats::Stats;

/// Parts of the whole that the picture counts in.
const WHOLE: u128 = 1_000_000;

const GREY: Color = Color { r: 222, g: 222, b: 218 };
const RED: Color = Color { r: 226, g: 72, b: 60 };
const BLUE: Color = Color { r: 66, g: 126, b: 214 };

/// Writes the picture of what `found` tells of self time by function.
///
/// # Errors
/// Those of `out`.
pub fn svg(a: &Profile, b: &Profile, found: &Diff<'_>, title: &str, norm: Norm, out: &mut dyn Write) -> io::Result<()> {
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
            Norm::Time => format!("{value:.3} s"),
            Norm::Share | Norm::Rate => format!("{:.2} %", value * 100.0),
        };
        let color = if change.change() > 0.0 { RED } else { BLUE };
        // The least change is still told from none.
        let strength = 0.25 + 0.75 * change.change().abs() / largest.max(f64::MIN_POSITIVE);
        let text = format!(
            "{text} [{} before, {} after]",
            amount(change.before),
            amount(change.after)
        );
        (text, mixed(GREY, color, strength))
    };
    let look = Look {
        title: escape::text(title).into_owned(),
        subtitle: "width: mean of both; colour: change of the function's self time".into(),
        count_name: "%",
        factor: 100.0 / WHOLE as f64,
        paint: &paint,
        legend: &[("grew", RED), ("shrank", BLUE), ("no change beyond noise", GREY)],
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
    norm: Norm,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut picture = Vec::new();
    svg(a, b, found, title, norm, &mut picture)?;
    let picture = String::from_utf8_lossy(&picture);
    // A page takes the element alone.
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

/// One tree of both profiles, each with half of [`WHOLE`]. Processes and threads, whose numbers differ, are left out.
fn both(a: &Profile, b: &Profile) -> Profile {
    let stats = [Stats::new(a), Stats::new(b)];
    let units = Units::of_functions(&stats[0], &stats[1]);
    let mut frames: Vec<Frame> = units.frames.iter().map(|frame| (*frame).clone()).collect();
    let root = frames.len() as u32;
    frames.push(Frame {
        kind: FrameKind::Root,
        name: "root".into(),
        qualname: String::new(),
        filename: String::new(),
        first_line: 0,
        address: 0,
        module: String::new(),
        source: String::new(),
    });
    let new = |frame, parent, line| Node {
        frame,
        parent,
        count: 0,
        lines: BTreeMap::new(),
        self_lines: BTreeMap::new(),
        line_text: String::new(),
        first_seen_line: line,
    };
    let mut nodes = vec![new(root, 0, 0)];
    let mut known: HashMap<(NodeId, u32), NodeId> = HashMap::new();
    for (i, profile) in [a, b].into_iter().enumerate() {
        let whole = u128::from(stats[i].samples().max(1));
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
            let own = u128::from(stats[i].node(at as NodeId).own);
            nodes[here as usize].count += (own * (WHOLE / 2) / whole) as u64;
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
