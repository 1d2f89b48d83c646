//! Sampled profiles with exact numbers of calls: of each function its calls, and its time with an interval.

use super::{ReportContext, share};
use crate::cli::output::style::{Color, color};
use crate::cli::output::table;
use crate::cli::output::table::{Cell, Overflow, plain};
use crate::cli::output::table_rows::{CountedRow, ReportRow};
use crate::profile::intervals;
use crate::profile::model::Profile;
use crate::profile::stats::{FunctionId, Stats};
use crate::profile::values::{Unit, ValueType};

/// Calls and times of the functions of a profile, by their numbers.
pub struct CallFigures {
    calls: Vec<u64>,
    intervals: Vec<(f64, f64)>,
    /// Time of all samples, ns.
    time: u64,
    /// Time of a sample, ns.
    per_sample: f64,
}

impl CallFigures {
    /// `None` for profiles without samples, calls or times.
    pub fn of(profile: &Profile) -> Option<CallFigures> {
        let calls = profile.find_value("calls")?;
        let time = profile.find_value("cpu").or_else(|| profile.find_value("wall"))?;
        let samples = profile.nodes.first()?.count;
        if *profile.count_type() != ValueType::SAMPLES || samples == 0 {
            return None;
        }
        let time = profile.amounts(time).first().copied().unwrap_or(0);
        let mut stats = Stats::new(profile);
        stats.select(profile.self_amounts(calls));
        Some(CallFigures {
            calls: stats.functions().iter().map(|counts| counts.self_count).collect(),
            intervals: intervals::self_shares(profile),
            time,
            per_sample: time as f64 / samples as f64,
        })
    }

    /// Of one function, which has so many self samples.
    pub fn row(&self, function: FunctionId, self_count: u64) -> CountedRow {
        let at = function as usize;
        let (low, high) = self.intervals.get(at).copied().unwrap_or((0.0, 1.0));
        let part = |share: f64| (share * self.time as f64).round() as u64;
        CountedRow {
            calls: self.calls.get(at).copied().unwrap_or(0),
            time: (self_count as f64 * self.per_sample).round() as u64,
            interval: (part(low), part(high)),
        }
    }
}

/// Rows as a table.
pub fn draw(context: &ReportContext<'_>, rows: &[ReportRow]) -> String {
    let whole = context.stats.samples();
    let columns = [
        ("CALLS", Overflow::Number),
        ("SELF %", Overflow::Number),
        ("SELF TIME", Overflow::Number),
        ("95 % INTERVAL", Overflow::Number),
        ("TOTAL %", Overflow::Number),
        ("FUNCTION", Overflow::Start),
        ("WHERE", Overflow::End),
    ];
    let show = |time: u64| Unit::Nanoseconds.show(time);
    let cells = |row: &ReportRow| {
        let counted = row.counted;
        let calls = counted.map(|counted| counted.calls).filter(|calls| *calls > 0);
        let interval = counted.map(|counted| format!("{} to {}", show(counted.interval.0), show(counted.interval.1)));
        vec![
            // Only calls of Python functions are counted.
            plain(calls.map_or(String::new(), |calls| calls.to_string())),
            plain(share(row.self_count, whole)),
            plain(counted.map_or(String::new(), |counted| show(counted.time))),
            plain(interval.unwrap_or_default()),
            plain(share(row.total, whole)),
            Cell {
                text: row.name.clone(),
                color: row.kind.map_or(Color::Plain, color),
            },
            plain(&row.place),
        ]
    };
    table::draw(&columns, &rows.iter().map(cells).collect::<Vec<_>>(), &context.style)
}
