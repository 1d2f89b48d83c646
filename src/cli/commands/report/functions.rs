//! The table that `report` begins with: Python functions with the native code that they run, those of the user's own first.

use std::collections::HashMap;

use super::counted::{FunctionKey, SampledTimes, calls_cell};
use super::{RenderedList, ReportContext, share};
use crate::cli::output::style::{Color, color};
use crate::cli::output::table::{self, Cell, Overflow, plain};
use crate::cli::output::table_rows::{ReportRow, YourRow};
use crate::profile::model::{FrameKind, Profile};
use crate::profile::stats::{FunctionId, Stats};
use crate::profile::values::ValueType;
use crate::profile::your_functions::{InnermostFunctions, Whose};

/// Narrower screens have fewer columns.
const WIDE: usize = 100;
/// Rows of the user's functions, unless filters are given: the others follow on the same screen.
const YOUR_ROWS: usize = 15;

/// What is known of the Python functions of a profile before native code is folded into them.
pub struct PythonFunctions {
    /// Samples that ended in the functions themselves, not in code that they called.
    alone: HashMap<FunctionKey, u64>,
    /// Those of the user's own.
    yours: HashMap<FunctionKey, YourRow>,
}

impl PythonFunctions {
    /// Of a profile with its native code.
    pub fn of(profile: &Profile) -> PythonFunctions {
        let stats = Stats::new(profile);
        let python = |id: FunctionId| {
            let frame = stats.frame(id);
            (frame.kind == FrameKind::Python).then(|| FunctionKey::of(frame))
        };
        let counts = stats.functions().into_iter().enumerate();
        let alone = counts
            .filter_map(|(id, counts)| Some((python(id as FunctionId)?, counts.self_count)))
            .collect();
        let first = InnermostFunctions::of(profile, &stats);
        let yours = first.rows.iter().filter(|_| first.whose == Whose::Yours);
        let yours = yours.filter_map(|row| Some((python(row.function)?, YourRow::new(row, stats.frame(row.function)))));
        PythonFunctions {
            alone,
            yours: yours.collect(),
        }
    }
}

/// Python functions; the profile of `context` has native code as part of them.
pub fn functions(context: &ReportContext<'_>, python: &PythonFunctions) -> RenderedList {
    let sampled = context.calls.as_ref().and_then(|_| SampledTimes::of(context.profile));
    let shares = context.share_intervals();
    let by_id = ReportRow::of_functions_by_id(context.stats).into_iter();
    let rows = by_id.map(|(id, mut row)| {
        let frame = context.stats.frame(id);
        row.calls = context.calls.as_ref().map(|calls| calls.of_function(frame));
        row.share = shares.get(id as usize).copied();
        row.sampled = sampled.as_ref().map(|times| times.row(id, row.self_count));
        if frame.kind == FrameKind::Python {
            let function = FunctionKey::of(frame);
            let alone = python.alone.get(&function).copied().unwrap_or(0);
            row.native = Some(row.self_count.saturating_sub(alone));
            row.yours = python.yours.get(&function).cloned();
        }
        row
    });
    // Functions that were called, but never sampled, are rows too.
    let is_called = |row: &ReportRow| row.calls.is_some_and(|calls| calls > 0);
    let is_shown = |row: &ReportRow| row.total > 0 || row.kind == Some(FrameKind::Python) && is_called(row);
    let mut rows: Vec<ReportRow> = rows.filter(is_shown).collect();
    context.arrange(&mut rows);
    let all: Vec<u64> = rows.iter().map(|row| row.self_count).collect();
    if context.is_short && context.filters.is_empty() {
        let (yours, others) = rows.split_at(rows.partition_point(|row| row.yours.is_some()));
        let room = YOUR_ROWS.max(super::ROWS.saturating_sub(others.len()));
        let yours = yours.iter().take(room);
        rows = yours.chain(others).take(super::ROWS).cloned().collect();
    }
    let mut text = if rows.is_empty() {
        "no rows\n".into()
    } else if sampled.is_some() {
        // One table: the intervals are those of what functions do without libraries.
        draw_table(context, &rows, Columns::Sampled)
    } else {
        draw(context, &rows)
    };
    // A file states the amounts: sums stop at the highest number.
    let sum = |amounts: &mut dyn Iterator<Item = u64>| amounts.fold(0u64, u64::saturating_add);
    let shown = sum(&mut rows.iter().map(|row| row.self_count));
    let left_out = match all.len() - rows.len() {
        0 => String::new(),
        _ => format!(
            "{} of {} functions; the others have {} % of self. All of them: nativeprof report {} 1.0\n",
            rows.len(),
            all.len(),
            share(
                sum(&mut all.iter().copied()).saturating_sub(shown),
                context.stats.samples()
            ),
            context.file_name()
        ),
    };
    let of_c = if sampled.is_some() { "" } else { " (IN C)" };
    let hint = format!(
        "SELF includes the C code that a function runs{of_c}, TOTAL also all that it calls. Other tables: --by \
         function (with C functions), --by category, --by line, --source FUNCTION\n"
    );
    text += &context
        .style
        .paint(Color::Dim, &format!("{left_out}{}{hint}", context.exactness()));
    ("rows", rows.iter().map(ReportRow::json).collect(), text)
}

/// A table of the user's functions, and one of the others, each with a title if there are both.
fn draw(context: &ReportContext<'_>, rows: &[ReportRow]) -> String {
    let (yours, others) = rows.split_at(rows.partition_point(|row| row.yours.is_some()));
    let title = |text: &str| format!("{}\n", context.style.paint(Color::Bold, text));
    let mut text = String::new();
    if !yours.is_empty() {
        text += &title("Your functions with the libraries and C code that they run, each at its hottest line");
        text += &draw_table(context, yours, Columns::Yours);
    }
    if others.is_empty() {
        return text;
    }
    if !yours.is_empty() {
        text += &format!("\n{}", title("Other functions with the C code that they run"));
    }
    text + &draw_table(context, others, Columns::Others)
}

/// What a table is of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Columns {
    /// The user's functions, with the libraries that they call.
    Yours,
    /// Other functions.
    Others,
    /// Functions of a sampled profile with exact numbers of calls.
    Sampled,
}

fn draw_table(context: &ReportContext<'_>, rows: &[ReportRow], of: Columns) -> String {
    let whole = context.stats.samples();
    let titles = ["SELF", "TOTAL"].map(|word| context.amounts_title(word));
    // Every sample is worth the same, so that their numbers say no more than their shares.
    let has_amounts = *context.profile.count_type() != ValueType::SAMPLES;
    let number = |title| (title, Overflow::Number);
    let mut columns: Vec<(&str, Overflow)> = Vec::new();
    columns.extend(context.calls.is_some().then_some(number("CALLS")));
    let selves = [number(&titles[0]), number("%")];
    let totals = [number(&titles[1]), number("%")];
    let parts: &[_] = match of {
        Columns::Yours => &["IN LIB %", "IN C %"],
        Columns::Others => &["IN C %"],
        Columns::Sampled => &["SELF TIME", "95 % INTERVAL"],
    };
    if has_amounts {
        columns.extend(selves);
    } else {
        columns.push(number("SELF %"));
    }
    columns.extend(parts.iter().map(|title| number(*title)));
    // On a narrow screen the place needs the columns more.
    let has_total_share = !has_amounts || context.style.width.is_none_or(|width| width >= WIDE);
    match (has_amounts, has_total_share) {
        (true, true) => columns.extend(totals),
        (true, false) => columns.push(number(&titles[1])),
        (false, _) => columns.push(number("TOTAL %")),
    }
    let place = if of == Columns::Yours { "LINE" } else { "WHERE" };
    columns.extend([("FUNCTION", Overflow::Start), (place, Overflow::End)]);
    let amount = |cells: &mut Vec<Cell>, amount: u64| {
        cells.extend(has_amounts.then(|| plain(context.amount(amount))));
        cells.push(plain(share(amount, whole)));
    };
    let cells = |row: &ReportRow| {
        let mut cells = Vec::with_capacity(columns.len());
        cells.extend(context.calls.is_some().then(|| calls_cell(row)));
        let yours = row.yours.as_ref().filter(|_| of == Columns::Yours);
        amount(&mut cells, yours.map_or(row.self_count, |yours| yours.amount));
        match (yours, row.sampled) {
            (Some(yours), _) => {
                cells.extend([yours.in_libraries, yours.in_native].map(|part| plain(share(part, whole))))
            }
            (None, Some(sampled)) => cells.extend([sampled.time(), sampled.interval()]),
            (None, None) => cells.push(plain(row.native.map_or(String::new(), |native| share(native, whole)))),
        }
        amount(&mut cells, row.total);
        if !has_total_share {
            cells.pop();
        }
        cells.push(Cell {
            text: row.name.clone(),
            color: row.kind.map_or(Color::Plain, color),
        });
        cells.push(plain(yours.map_or(&row.place, |yours| &yours.place)));
        cells
    };
    table::draw(&columns, &rows.iter().map(cells).collect::<Vec<_>>(), &context.style)
}
