//! The table of callbacks and task steps that blocked an event loop for long.

use std::cmp::Reverse;

use serde_json::{Value, json};

use super::{RenderedList, ReportContext};
use crate::cli::output::row_filter;
use crate::cli::output::table;
use crate::cli::output::table::{Overflow, plain};
use crate::error::{Error, ErrorKind, Result};
use crate::profile::lags::{self, Lag, LagSite};
use crate::profile::values::Unit;

/// By function, the longest one first; in JSON each of them.
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
    let mut sites = lags::sites(&lags);
    row_filter::apply(&mut sites, context.filters, LagSite::text);
    context.limit(&mut sites);
    lags.sort_by_key(|lag| (Reverse(lag.length), lag.start));
    row_filter::apply(&mut lags, context.filters, |lag| {
        format!("{} {} {}", lag.task, lag.place(), lag.function)
    });
    let list: Value = lags.iter().map(json_of).collect();
    Ok(("lag_events", list, draw(context, &sites)))
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
        "program_function": lag.place(),
        "stack": lag.stack,
    })
}

fn draw(context: &ReportContext<'_>, sites: &[LagSite]) -> String {
    let columns = [
        ("COUNT", Overflow::Number),
        ("TOTAL", Overflow::Number),
        ("LONGEST", Overflow::Number),
        ("AT", Overflow::Number),
        ("TASK", Overflow::Start),
        ("WHERE", Overflow::End),
    ];
    let row = |site: &LagSite| {
        let tasks = site.tasks_text();
        vec![
            plain(site.count.to_string()),
            plain(Unit::Nanoseconds.show(site.total)),
            plain(Unit::Nanoseconds.show(site.longest.length)),
            plain(format!("{:.3} s", site.longest.time as f64 * 1e-9)),
            plain(if tasks.is_empty() { "-" } else { &tasks }),
            plain(site.place()),
        ]
    };
    table::draw(&columns, &sites.iter().map(row).collect::<Vec<_>>(), &context.style)
}
