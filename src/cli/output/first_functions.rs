//! The first lines after a recording: the functions to look at.

use super::style::{Color, TerminalStyle, color};
use super::table::{self, Cell, Overflow, plain};
use crate::export::select;
use crate::profile::model::Profile;
use crate::profile::stats::Stats;
use crate::profile::views::ViewOptions;
use crate::profile::your_functions::{InnermostFunctions, Whose, function_name};

/// Functions that are shown.
const ROWS: usize = 5;
/// Columns where no terminal has a width.
const MAX_WIDTH: usize = 120;

/// A title and a table of the functions with most samples in the default view, each with its hottest line; `None` for a
/// profile without samples.
pub fn text(profile: &Profile, style: &TerminalStyle) -> Option<String> {
    let profile = ViewOptions::default().folded(profile.clone());
    let value = profile.default_value();
    let profile = select::by_value(profile, value);
    let stats = Stats::new(&profile);
    let whole = stats.samples();
    if whole == 0 {
        return None;
    }
    let found = InnermostFunctions::of(&profile, &stats);
    let what = measured(&profile);
    let title = match found.whose {
        Whose::Yours => format!("most {what} in your functions, libraries and C code included"),
        Whose::Python => format!("most {what} in Python functions, C code included"),
        Whose::Native => format!("most {what} in functions"),
    };
    let share = |amount: u64| format!("{:.1} %", 100.0 * amount as f64 / whole as f64);
    let mut rows: Vec<Vec<Cell>> = Vec::new();
    // Less is not seen in a table of tenths of a percent.
    let is_seen = |amount: u64| amount >= whole / 1000;
    for row in found.innermost().take(ROWS).filter(|row| is_seen(row.amount)) {
        let frame = stats.frame(row.function);
        rows.push(vec![
            plain(share(row.amount)),
            Cell {
                text: function_name(frame).into(),
                color: color(frame.kind),
            },
            plain(row.short_place(frame)),
        ]);
    }
    let others = found
        .innermost()
        .skip(ROWS)
        .fold(0u64, |sum, row| sum.saturating_add(row.amount));
    let rest = [
        (others, "other functions of yours", Whose::Yours),
        (found.outside, "outside of your functions", Whose::Yours),
    ];
    // Less is not seen in a table of tenths of a percent.
    let rest = rest
        .iter()
        .filter(|(amount, _, whose)| found.whose == *whose && *amount >= whole / 200);
    rows.extend(rest.map(|(amount, words, _)| {
        vec![
            plain(share(*amount)),
            Cell {
                text: (*words).into(),
                color: Color::Dim,
            },
            plain(""),
        ]
    }));
    let columns = [Overflow::Number, Overflow::Start, Overflow::End];
    // Names can be thousands of characters long, also where the width is unlimited.
    let narrower = TerminalStyle {
        width: Some(style.width.unwrap_or(MAX_WIDTH).saturating_sub(2)),
        ..*style
    };
    let table = table::rows(&columns, &rows, &narrower);
    let mut text = format!("nativeprof: {title}");
    table.lines().for_each(|line| text += &format!("\n  {line}"));
    Some(text)
}

/// What samples of a profile are of, as a title has it.
fn measured(profile: &Profile) -> &str {
    let has = |name: &str| profile.find_value(name).is_some();
    if has("wall") {
        "time"
    } else if has("cpu") {
        "CPU time"
    } else {
        "samples"
    }
}
