//! The table that `report` begins with: Python functions with the native code that they run, those of the user's own first.

use std::collections::HashMap;

use super::counted::{self, CallFigures};
use super::{RenderedList, ReportContext, share};
use crate::cli::output::style::{Color, color};
use crate::cli::output::table::{self, Cell, Overflow, plain};
use crate::cli::output::table_rows::{ReportRow, YourRow};
use crate::profile::model::{Frame, FrameKind, Profile};
use crate::profile::stats::{FunctionId, Stats};
use crate::profile::your_functions::{InnermostFunctions, Whose};

/// Rows of the user's functions, unless filters are given: the others follow on the same screen.
const YOUR_ROWS: usize = 15;

/// What makes a Python function the same one: name, file, line of the definition.
type PythonFunction = (String, String, u32);

/// What is known of the Python functions of a profile before native code is folded into them.
pub struct PythonFunctions {
    /// Samples that ended in the functions themselves, not in code that they called.
    alone: HashMap<PythonFunction, u64>,
    /// Those of the user's own.
    yours: HashMap<PythonFunction, YourRow>,
}

impl PythonFunctions {
    /// `None` if the profile has no Python functions.
    pub fn of(profile: &Profile) -> Option<PythonFunctions> {
        let stats = Stats::new(profile);
        let python = |id: FunctionId| {
            let frame = stats.frame(id);
            (frame.kind == FrameKind::Python).then(|| python_function(frame))
        };
        let counts = stats.functions().into_iter().enumerate();
        let alone: HashMap<_, _> = counts
            .filter_map(|(id, counts)| Some((python(id as FunctionId)?, counts.self_count)))
            .collect();
        let first = InnermostFunctions::of(profile, &stats);
        let yours = first.rows.iter().filter(|_| first.whose == Whose::Yours);
        let yours = yours.filter_map(|row| Some((python(row.function)?, YourRow::new(row, stats.frame(row.function)))));
        let yours = yours.collect();
        (!alone.is_empty()).then_some(PythonFunctions { alone, yours })
    }
}

fn python_function(frame: &Frame) -> PythonFunction {
    (frame.name.clone(), frame.filename.clone(), frame.first_line)
}

/// Python functions; the profile of `context` has native code as part of them.
pub fn functions(context: &ReportContext<'_>, python: &PythonFunctions) -> RenderedList {
    let counted = CallFigures::of(context.profile);
    let by_id = ReportRow::of_functions_by_id(context.stats).into_iter();
    let rows = by_id.map(|(id, mut row)| {
        row.counted = counted.as_ref().map(|counted| counted.row(id, row.self_count));
        let frame = context.stats.frame(id);
        if frame.kind == FrameKind::Python {
            let function = python_function(frame);
            let alone = python.alone.get(&function).copied().unwrap_or(0);
            row.native = Some(row.self_count.saturating_sub(alone));
            row.yours = python.yours.get(&function).cloned();
        }
        row
    });
    // Functions that were called, but never sampled, are rows too.
    let is_shown = |row: &ReportRow| row.total > 0 || row.counted.is_some_and(|counted| counted.calls > 0);
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
    } else if counted.is_some() {
        counted::draw(context, &rows)
    } else {
        draw(context, &rows)
    };
    let shown: u64 = rows.iter().map(|row| row.self_count).sum();
    let left_out = match all.len() - rows.len() {
        0 => String::new(),
        _ => format!(
            "{} of {} functions; the others have {} % of self. All of them: nativeprof report {} 1.0\n",
            rows.len(),
            all.len(),
            share(all.iter().sum::<u64>() - shown, context.stats.samples()),
            context.file_name()
        ),
    };
    let of_c = if counted.is_some() { "" } else { " (IN C)" };
    let hint = format!(
        "SELF includes the C code that a function runs{of_c}, TOTAL also all that it calls. Other tables: --by \
         function (with C functions), --by category, --by line, --source FUNCTION\n"
    );
    text += &context.style.paint(Color::Dim, &format!("{left_out}{hint}"));
    ("rows", rows.iter().map(ReportRow::json).collect(), text)
}

/// A table of the user's functions, and one of the others, each with a title if there are both.
fn draw(context: &ReportContext<'_>, rows: &[ReportRow]) -> String {
    let (yours, others) = rows.split_at(rows.partition_point(|row| row.yours.is_some()));
    let title = |text: &str| format!("{}\n", context.style.paint(Color::Bold, text));
    let mut text = String::new();
    if !yours.is_empty() {
        text += &title("Your functions with the libraries and C code that they run, each at its hottest line");
        text += &draw_yours(context, yours);
    }
    if others.is_empty() {
        return text;
    }
    if !yours.is_empty() {
        text += &format!("\n{}", title("Other functions with the C code that they run"));
    }
    text + &draw_others(context, others)
}

fn draw_yours(context: &ReportContext<'_>, rows: &[ReportRow]) -> String {
    let whole = context.stats.samples();
    let columns = [
        ("SELF %", Overflow::Number),
        ("IN LIB %", Overflow::Number),
        ("IN C %", Overflow::Number),
        ("TOTAL %", Overflow::Number),
        ("FUNCTION", Overflow::Start),
        ("LINE", Overflow::End),
    ];
    let cells = |row: &ReportRow| {
        let yours = row.yours.as_ref()?;
        Some(vec![
            plain(share(yours.amount, whole)),
            plain(share(yours.in_libraries, whole)),
            plain(share(yours.in_native, whole)),
            plain(share(row.total, whole)),
            name(row),
            plain(&yours.place),
        ])
    };
    table::draw(
        &columns,
        &rows.iter().filter_map(cells).collect::<Vec<_>>(),
        &context.style,
    )
}

fn draw_others(context: &ReportContext<'_>, rows: &[ReportRow]) -> String {
    let whole = context.stats.samples();
    let columns = [
        ("SELF %", Overflow::Number),
        ("IN C %", Overflow::Number),
        ("TOTAL %", Overflow::Number),
        ("FUNCTION", Overflow::Start),
        ("WHERE", Overflow::End),
    ];
    let cells = |row: &ReportRow| {
        vec![
            plain(share(row.self_count, whole)),
            plain(row.native.map_or(String::new(), |native| share(native, whole))),
            plain(share(row.total, whole)),
            name(row),
            plain(&row.place),
        ]
    };
    table::draw(&columns, &rows.iter().map(cells).collect::<Vec<_>>(), &context.style)
}

fn name(row: &ReportRow) -> Cell {
    Cell {
        text: row.name.clone(),
        color: row.kind.map_or(Color::Plain, color),
    }
}
