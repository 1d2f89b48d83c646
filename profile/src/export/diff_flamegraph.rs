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
use crate::diff::{Change, Diff, Normalization};
use crate::escape;
use crate::model::{Frame, Profile};

const GREY: Color = Color { r: 222, g: 222, b: 218 };
const RED: Color = Color { r: 226, g: 72, b: 60 };
const BLUE: Color = Color { r: 66, g: 126, b: 214 };

/// Writes the flame graph of `both` sides (see [`crate::diff::both`]) with the changes of self time by function in `found`.
///
/// # Errors
/// Those of `out`.
pub fn svg(
    both: &Profile,
    found: &Diff<'_>,
    title: &str,
    normalization: Normalization,
    out: &mut dyn Write,
) -> io::Result<()> {
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
        let amount = |value: f64| match normalization {
            Normalization::Time => format!("{value:.3} s"),
            Normalization::Number => format!("{value:.0}"),
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
    let style = FlamegraphStyle {
        title: escape::text(title).into_owned(),
        subtitle: "width: mean of both; color: change of the function's self time".into(),
        count_name: "%",
        factor: 100.0 / both.nodes[0].count.max(1) as f64,
        paint: &paint,
        legend: &[("grew", RED), ("shrank", BLUE), ("no significant change", GREY)],
    };
    flamegraph::draw(both, &style, out)
}

fn mixed(from: Color, to: Color, part: f64) -> Color {
    let mix = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * part).round() as u8;
    Color {
        r: mix(from.r, to.r),
        g: mix(from.g, to.g),
        b: mix(from.b, to.b),
    }
}
