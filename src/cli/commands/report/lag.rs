//! The table of callbacks and task steps that blocked an event loop for long.

use std::cmp::Reverse;

use serde_json::{Value, json};

use super::{RenderedList, ReportContext};
use crate::cli::output::row_filter;
use crate::cli::output::table;
use crate::cli::output::table::{Overflow, plain};
use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::profile::lags::Lag;
use crate::profile::values::Unit;

/// The longest ones first.
///
/// # Errors
/// `Data` where the profile has none.
pub fn lag(context: &ReportContext<'_>) -> Result<RenderedList> {
    let mut lags = context.profile.meta.lags.clone();
    if lags.is_empty() {
        let file = context.file_name();
        return Err(
            Error::new(ErrorKind::Data, format!("{file} has no blocked event loops"))
                .why("it was recorded without --lag, or none took that long")
                .hint("record again with `nativeprof record --lag 50ms -o out.json ...`"),
        );
    }
    lags.sort_by_key(|lag| (Reverse(lag.length), lag.start));
    row_filter::apply(&mut lags, context.filters, |lag| {
        format!("{} {}", lag.task, lag.function)
    });
    context.limit(&mut lags);
    let list: Value = lags.iter().map(json_of).collect();
    Ok(("lag_events", list, draw(context, &lags)))
}

fn json_of(lag: &Lag) -> Value {
    json!({
        "start": lag.start as f64 * 1e-9,
        "time_ns": lag.time,
        "ms": lag.length as f64 * 1e-6,
        "pid": lag.pid,
        "tid": lag.tid,
        "task": Some(&lag.task).filter(|task| !task.is_empty()),
        "function": lag.function,
        "stack": lag.stack,
    })
}

fn draw(context: &ReportContext<'_>, lags: &[Lag]) -> String {
    let columns = [
        ("TOOK", Overflow::Number),
        ("AT", Overflow::Number),
        ("TASK", Overflow::Word),
        ("WHERE", Overflow::End),
    ];
    let row = |lag: &Lag| {
        let task = if lag.task.is_empty() { "-" } else { &lag.task };
        vec![
            plain(Unit::Nanoseconds.show(lag.length)),
            plain(format!("{:.3} s", lag.time as f64 * 1e-9)),
            plain(line(task)),
            plain(line(&lag.function)),
        ]
    };
    table::draw(&columns, &lags.iter().map(row).collect::<Vec<_>>(), &context.style)
}
