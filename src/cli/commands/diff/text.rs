//! The comparison as text.

use std::path::PathBuf;

use super::comparable::sampled_time;
use crate::cli::args::{DiffBy, DiffCommand as Options};
use crate::cli::output::row_filter;
use crate::cli::output::style::{Color, TerminalStyle, color};
use crate::cli::output::table;
use crate::cli::output::table::{Cell, Overflow, plain};
use crate::cli::output::table_rows::{ReportRow, kind_name};
use crate::escape::line;
use crate::profile::diff::{Change, CpuClock, Diff, Normalization, Question, Run, Side};
use crate::profile::model::Profile;
use crate::profile::stats::module;
use crate::profile::summary::{self, counted};
use crate::profile::values::{Unit, ValueType};

/// How many of the rows that differ between runs of one side are shown.
const MAX_VARYING: usize = 10;

pub(super) const DIFFERENT_MACHINES: &str = "recorded on different machines, or with different Pythons";

/// What the mark of a row that makes up for others means.
pub(super) const MAKES_UP: &str = "makes up for other rows: its part of what these leave is as before";

/// A comparison, and what its texts need.
pub(super) struct Text<'a> {
    pub options: &'a Options,
    /// The files of the older and of the newer side.
    pub files: &'a [Vec<PathBuf>; 2],
    pub self_count: bool,
    /// Both profiles have exact calls, not samples.
    pub is_traced: bool,
    pub normalization: Normalization,
    pub sides: [&'a Side<'a>; 2],
    /// Where times depend on the machine: how those of both sides differ, line by line. Empty with `--any-machine`.
    pub machines: &'a [String],
    pub found: &'a Diff<'a>,
}

impl Text<'_> {
    /// Names of the older and of the newer profile.
    pub fn names(&self) -> [String; 2] {
        self.files.each_ref().map(|files| match &files[..] {
            [path] => {
                let name = path.file_name().unwrap_or(path.as_os_str());
                name.to_string_lossy().into_owned()
            }
            runs => counted(runs.len() as u64, "runs"),
        })
    }

    fn newer(&self) -> &Profile {
        self.sides[1].sum
    }

    /// The time that is compared, where it is one.
    pub fn time(&self) -> &str {
        sampled_time(self.newer()).unwrap_or_default()
    }

    pub fn title(&self) -> String {
        let [before, after] = self.names();
        format!("{after} compared to {before}")
    }

    pub fn row(&self, change: &Change<'_>) -> ReportRow {
        let row = ReportRow::of_frame(change.frame);
        match self.options.by {
            DiffBy::Function => row,
            DiffBy::Label => ReportRow {
                id: None,
                kind: None,
                place: String::new(),
                ..row
            },
            DiffBy::Module => ReportRow {
                name: module(change.frame).into(),
                id: None,
                kind: None,
                place: String::new(),
                ..row
            },
        }
    }

    /// The rows to show, largest change first.
    pub fn rows(&self, filters: &[row_filter::RowFilter]) -> Vec<(&Change<'_>, ReportRow)> {
        let changes = self.found.rows.iter();
        let mut rows: Vec<_> = changes.map(|change| (change, self.row(change))).collect();
        if !self.options.all {
            let significant = rows.iter().filter(|(change, _)| change.is_significant()).count();
            rows.truncate(significant);
        }
        row_filter::apply(&mut rows, filters, |(_, row)| row.text());
        rows
    }

    /// The rows to show, before them the one of all time.
    pub fn rows_with_all(&self, filters: &[row_filter::RowFilter]) -> Vec<(&Change<'_>, ReportRow)> {
        let all = self.found.all.iter().map(|all| {
            let row = ReportRow {
                name: "[all]".into(),
                ..ReportRow::default()
            };
            (all, row)
        });
        all.chain(self.rows(filters)).collect()
    }

    /// Rows of numbers that differ between runs of one side, and not beyond that: the gate cannot see growth in them.
    fn varying(&self, filters: &[row_filter::RowFilter]) -> Vec<(&Change<'_>, ReportRow)> {
        let changes = self.found.rows.iter();
        let varying = changes.filter(|change| change.varies() && !change.is_significant());
        let mut rows: Vec<_> = varying.map(|change| (change, self.row(change))).collect();
        row_filter::apply(&mut rows, filters, |(_, row)| row.text());
        rows.truncate(MAX_VARYING);
        rows
    }

    /// What is compared, line by line.
    pub fn about(&self) -> Vec<String> {
        let sides = ["before", "after "].into_iter().enumerate();
        let mut lines: Vec<String> = sides.map(|(i, word)| format!("{word}: {}", self.side(i))).collect();
        let metric = if self.self_count { "self" } else { "total" };
        let mut amounts = format!("{metric} of {}", self.amounts_and_unit());
        let tested = self.found.rows.iter().filter(|row| row.interval.is_some()).count();
        if self.normalization != Normalization::Number {
            let rows = counted(tested as u64, "rows");
            amounts += &format!(
                "; simultaneous {} % confidence intervals for {rows}",
                self.options.confidence
            );
        }
        if self.is_traced && self.found.question == Question::Recordings {
            amounts += "; files of traced calls do not say how their times vary: calls are assumed to be independent and to take equally long";
        }
        lines.push(amounts);
        lines.push(format!("{}{}", self.found.question, self.of_runs()));
        if !self.machines.is_empty() {
            lines.push(format!("{DIFFERENT_MACHINES}: {}", line(&self.machines.join("; "))));
        }
        lines
    }

    /// Which files were renamed, line by line.
    pub fn renamed(&self) -> Vec<String> {
        let line_of = |(old, new): &(&str, &str)| {
            format!(
                "renamed: {} is now {}; their functions are compared",
                line(old),
                line(new)
            )
        };
        self.found.renamed.iter().map(line_of).collect()
    }

    /// After `no`, if no row is significant: `significant change of ...`.
    pub fn nothing_significant(&self) -> String {
        let but_all = match &self.found.all {
            Some(all) if all.is_significant() => " of a row, only of all rows together",
            _ => "",
        };
        format!("{}{but_all}{}", self.what_counts(), self.detection_limit())
    }

    pub fn table(&self, filters: &[row_filter::RowFilter], style: &TerminalStyle) -> String {
        let Text { options, found, .. } = self;
        let [about, renamed] = [self.about(), self.renamed()].map(|lines| {
            let lines = lines.into_iter().map(|text| text + "\n");
            lines.collect::<String>()
        });
        let mut text = format!("{about}\n{renamed}");
        let mut rows = self.rows_with_all(filters);
        if !options.all {
            rows.extend(self.varying(filters));
        }
        let significant = found.rows.iter().filter(|row| row.is_significant()).count();
        if significant == 0 {
            text += &format!("no {}\n", self.nothing_significant());
        }
        if !rows.is_empty() {
            text += &self.draw(&rows, style);
        }
        if !options.all && significant > 0 {
            let hidden = match self.normalization {
                Normalization::Number => "rows without a difference hidden; show them with --all\n",
                _ => "insignificant rows hidden; show them with --all\n",
            };
            text += &style.paint(Color::Dim, hidden);
        }
        if found.rows.iter().any(|row| row.makes_up) {
            text += &format!("*: {MAKES_UP}\n");
        }
        if found.rows.iter().any(|row| row.interpreter_internal) {
            text += &style.paint(
                Color::Dim,
                "interpreter-internal functions are not tested (their callers are); test them with --interpreter\n",
            );
        }
        text
    }

    /// What was recorded of a side.
    fn side(&self, side: usize) -> String {
        let (files, Side { sum, runs }) = (&self.files[side], self.sides[side]);
        let mut text = match &files[..] {
            [path] => line(&path.to_string_lossy()).into_owned(),
            [first, .., last] => format!(
                "{}, {} to {}",
                counted(files.len() as u64, "runs"),
                line(&first.to_string_lossy()),
                line(&last.to_string_lossy())
            ),
            [] => String::new(),
        };
        let (samples, meta, kind) = (sum.total_amount(0), &sum.meta, sum.count_type());
        text += &format!(": {}", line(&summary::amount(kind, samples)));
        let calls = sum.find_value("calls").filter(|value| *value > 0);
        if let Some(calls) = calls {
            text += &format!(", {}", counted(sum.total_amount(calls), "calls"));
        }
        let by_clock = |run: &Run<'_>| {
            let CpuClock { seconds, count } = run.clock?;
            Some(seconds * run.profile.total_amount(0) as f64 / count as f64)
        };
        let clocks = runs.iter().map(by_clock).sum::<Option<f64>>();
        if let Some(time) = sampled_time(sum).filter(|_| meta.rate > 0 && *kind == ValueType::SAMPLES) {
            match clocks {
                Some(seconds) => text += &format!(", {seconds:.2} s {time} by its clock"),
                None => text += &format!(", {:.2} s {time}", samples as f64 / meta.rate as f64),
            }
        }
        let duration: f64 = runs.iter().map(|run| run.profile.meta.duration).sum();
        if duration > 0.0 {
            text += &format!(" in {duration:.1} s");
        }
        if !meta.command.is_empty() {
            text += &format!(" ({})", line(&meta.command));
        }
        text
    }

    /// Of several runs, which changes they could show.
    fn of_runs(&self) -> String {
        if !matches!(self.found.question, Question::Runs { .. }) {
            return String::new();
        }
        let shown = |limit: f64| format!("{} {}", self.amount(limit, false), self.unit());
        let all = self.found.all.as_ref().and_then(Change::detectable);
        let all = all.map(|limit| format!("{} of all, and ", shown(limit)));
        let rows = self.found.rows.iter().filter_map(Change::detectable);
        let Some(widest) = rows.reduce(f64::max) else {
            return String::new();
        };
        format!(
            "; they can show a change of {}{} of any row",
            all.unwrap_or_default(),
            shown(widest)
        )
    }

    /// What a row must have to be shown.
    fn what_counts(&self) -> &'static str {
        match self.normalization {
            Normalization::Number if self.found.rows.iter().any(Change::varies) => {
                "difference beyond that of runs of one side"
            }
            Normalization::Number => "difference",
            _ => "significant change",
        }
    }

    /// The smallest change that would have been detected, for the row with the widest interval.
    fn detection_limit(&self) -> String {
        let rows = self.found.rows.iter().filter_map(|row| Some((row.detectable()?, row)));
        let widest = rows.max_by(|(limit, _), (other, _)| limit.total_cmp(other));
        widest.map_or(String::new(), |(limit, row)| {
            format!(
                "; any change of at least {} {} would be detected (least certain row: {})",
                self.amount(limit, false),
                self.unit(),
                line(&self.row(row).name)
            )
        })
    }

    /// What is compared: `samples`, `calls`, `wall time`.
    pub fn value(&self) -> String {
        let kind = self.newer().count_type();
        match kind.unit {
            Unit::Nanoseconds => format!("{} time", line(self.time())),
            Unit::Count | Unit::Bytes => line(&kind.name).into_owned(),
        }
    }

    /// What the amounts of rows are parts of.
    pub fn amounts(&self) -> String {
        let time = line(self.time());
        match self.normalization {
            Normalization::Share => format!("all {}", self.value()),
            Normalization::Rate if time == "CPU" => "one CPU".into(),
            Normalization::Rate => format!("{time} time per second of the recording"),
            Normalization::Time => format!("{time} time"),
            Normalization::Number => self.value(),
        }
    }

    /// The same, with the unit that tables have.
    fn amounts_and_unit(&self) -> String {
        let unit = match self.normalization {
            Normalization::Share => "in percent (shares: if one grows, others shrink)",
            Normalization::Rate => "in percent",
            Normalization::Time => "in seconds",
            Normalization::Number => return self.amounts(),
        };
        format!("{}, {unit}", self.amounts())
    }

    pub fn unit(&self) -> &'static str {
        match self.normalization {
            Normalization::Time => "s",
            Normalization::Number => "calls",
            Normalization::Share | Normalization::Rate => "%",
        }
    }

    pub fn amount(&self, value: f64, sign: bool) -> String {
        let text = match self.normalization {
            Normalization::Time => format!("{value:+.3}"),
            // The mean of runs is no whole number.
            Normalization::Number if value.fract() == 0.0 => format!("{value:+.0}"),
            Normalization::Number => format!("{value:+.1}"),
            Normalization::Share | Normalization::Rate => format!("{:+.2}", value * 100.0),
        };
        if sign {
            text
        } else {
            text.trim_start_matches('+').into()
        }
    }

    /// The title of the column of intervals, if there are any.
    pub fn intervals(&self) -> Option<&'static str> {
        match self.normalization {
            Normalization::Number if !self.found.rows.iter().any(Change::varies) => None,
            Normalization::Number => Some("VARIES"),
            _ => Some("INTERVAL"),
        }
    }

    pub fn title_of_rows(&self) -> &'static str {
        match self.options.by {
            DiffBy::Function => "FUNCTION",
            DiffBy::Module => "MODULE",
            DiffBy::Label => "LABEL",
        }
    }

    /// The amounts of a row in words: `1.200 s before, 1.600 s after: +0.400 s (+0.300 to +0.500)`.
    pub fn words(&self, change: &Change<'_>) -> String {
        let shown = |value: f64, sign: bool| format!("{} {}", self.amount(value, sign), self.unit());
        let interval = match self.interval(change) {
            interval if interval.is_empty() => interval,
            interval => format!(" ({interval})"),
        };
        format!(
            "{} before, {} after: {}{interval}",
            shown(change.before, false),
            shown(change.after, false),
            shown(change.change(), true),
        )
    }

    fn draw(&self, rows: &[(&Change<'_>, ReportRow)], style: &TerminalStyle) -> String {
        let (before, after) = match self.normalization {
            Normalization::Number => ("BEFORE".into(), "AFTER".into()),
            _ => (format!("BEFORE {}", self.unit()), format!("AFTER {}", self.unit())),
        };
        let functions = self.options.by == DiffBy::Function;
        let intervals = self.intervals();
        let mut columns = vec![
            (&*before, Overflow::Number),
            (&*after, Overflow::Number),
            ("CHANGE", Overflow::Number),
        ];
        columns.extend(intervals.map(|title| (title, Overflow::Word)));
        if functions {
            columns.push(("KIND", Overflow::Word));
        }
        columns.push((self.title_of_rows(), Overflow::Start));
        columns.push((if functions { "WHERE" } else { "" }, Overflow::End));
        let cells = |(change, row): &(&Change<'_>, ReportRow)| {
            let tint = if !change.is_significant() || change.makes_up {
                Color::Dim
            } else if change.change() > 0.0 {
                Color::Red
            } else {
                Color::Green
            };
            let mut cells = vec![
                plain(self.amount(change.before, false)),
                plain(self.amount(change.after, false)),
                Cell {
                    text: self.amount(change.change(), true),
                    color: tint,
                },
            ];
            cells.extend(intervals.map(|_| Cell {
                text: self.interval(change),
                color: if tint == Color::Dim { tint } else { Color::Plain },
            }));
            if functions {
                cells.push(plain(row.kind.map_or("", kind_name)));
            }
            cells.push(Cell {
                text: format!("{}{}", if change.makes_up { "* " } else { "" }, row.name),
                color: row.kind.map_or(Color::Plain, color),
            });
            cells.push(plain(&row.place));
            cells
        };
        table::draw(&columns, &rows.iter().map(cells).collect::<Vec<_>>(), style)
    }

    /// The interval of a row, or why it has none; of a number, between which ones it varies.
    pub fn interval(&self, change: &Change<'_>) -> String {
        if let Some(ranges) = change.ranges {
            if !change.varies() {
                return String::new();
            }
            let [before, after] = ranges.map(|(lowest, highest)| {
                if lowest == highest {
                    lowest.to_string()
                } else {
                    format!("{lowest} to {highest}")
                }
            });
            return format!("{before}; {after}");
        }
        match change.interval {
            Some((low, high)) => format!("{} to {}", self.amount(low, true), self.amount(high, true)),
            None if change.interpreter_internal => "not tested".into(),
            None if self.is_traced => "too few calls".into(),
            None => "too few samples".into(),
        }
    }
}
