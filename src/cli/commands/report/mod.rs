//! `report`: the tables of a saved profile.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use crate::cli::args::{ReportBy, ReportCommand, ReportOrder};
use crate::cli::history;
use crate::cli::input;
use crate::cli::output::labels;
use crate::cli::output::row_filter;
use crate::cli::output::row_filter::RowFilter;
use crate::cli::output::style::{Color, TerminalStyle, color};
use crate::cli::output::table;
use crate::cli::output::table::{Cell, Overflow, plain};
use crate::cli::output::table_rows::{ReportRow, kind_name};
use crate::cli::output::{JSON_VERSION, no_such_function, value_of};
use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::export::select;
use crate::privileges::credentials::Caps;
use crate::privileges::phases;
use crate::profile::intervals;
use crate::profile::model::{FrameKind, Profile};
use crate::profile::stats::{FunctionId, Stats};
use crate::profile::summary;
use crate::profile::values::{Unit, ValueType};
use crate::profile::views;
use crate::resolve::source_lines;

use counted::{Calls, calls_cell};
use functions::PythonFunctions;

mod assembly;
mod counted;
mod functions;
mod lag;
mod source;
mod tree;
mod waits;

/// Default number of rows: with heading and footer they fit a screen.
const ROWS: usize = 25;
/// Functions whose callers are shown if several match: those with the most samples.
const FUNCTIONS: usize = 10;

/// The error for a word that ends several names: what to type instead.
fn several(file: &Path, option: &str, word: &str, names: &[String]) -> Error {
    const SHOWN: usize = 5;
    let shown = names.iter().take(SHOWN).map(|name| line(name).into_owned());
    let mut shown: Vec<String> = shown.collect();
    let file = input::shown(file);
    let first = shown.first().cloned().unwrap_or_default();
    if names.len() > SHOWN {
        shown.push(format!("{} more", names.len() - SHOWN));
    }
    let what = format!("`{}` is the end of {} names", line(word), names.len());
    let hint = format!("nativeprof report {file} {option} '{first}'   or another of them");
    Error::new(ErrorKind::Data, what).why(shown.join(", ")).hint(hint)
}

/// Prints the requested table.
///
/// # Errors
/// Those of [`history::profile`]; `Usage` for an invalid filter; `Data` if the profile does not have the requested data.
pub fn report(options: &ReportCommand) -> Result<()> {
    let words = options.filters.iter().map(|word| row_filter::parse(word));
    let filters = words.collect::<Result<Vec<_>>>()?;
    let style = TerminalStyle::of_stdout(options.color);
    phases::switch_to_invoking_user()?;
    let mut profile = history::profile(&options.file, options.range, &options.history, Caps::NONE)?;
    profile = labels::select(profile, &options.labels, &options.file)?;
    let lists_python = options.by.is_none()
        && !options.tree
        && [&options.callers, &options.callees]
            .iter()
            .all(|option| option.is_none());
    let value = match &options.value {
        Some(name) => value_of(&profile, name, &line(&options.file.to_string_lossy()))?,
        // It has times with their intervals.
        None if lists_python && counted::is_counted_and_sampled(&profile) => 0,
        // Of instructions only samples are known.
        None if options.assembly.is_some() => 0,
        None => profile.default_value(),
    };
    profile = select::by_value(profile, value);
    // Folded functions have code, too.
    let whole = options.assembly.is_some().then(|| profile.clone());
    let view = options.frames.view(options.no_native);
    let calls = Calls::of(&profile, &view)?;
    profile = view.apply(profile).map_err(no_such_function)?;
    let has_python = lists_python && profile.frames.iter().any(|frame| frame.kind == FrameKind::Python);
    let is_table = options.source.is_none() && options.assembly.is_none() && !options.lag && !options.waits;
    let python = (has_python && is_table).then(|| PythonFunctions::of(&profile));
    let is_python_source = options
        .source
        .as_ref()
        .is_none_or(|word| source::is_python(&profile, word));
    if has_python && is_python_source {
        profile = views::without_native(&profile);
    }
    if options.source.is_some() {
        source_lines::add(&mut profile, &mut source_lines::open_local);
    }
    let stats = Stats::new(&profile);
    let context = ReportContext {
        file: &options.file,
        profile: &profile,
        stats: &stats,
        calls,
        filters: &filters,
        sort: options.sort,
        style,
        is_short: !options.json,
    };
    let code = whole.as_ref().zip(options.assembly.as_ref());
    let (key, mut rows, text) = match (&options.callers, &options.callees) {
        (Some(function), _) => context.calls(function, CallDirection::Callers)?,
        (_, Some(function)) => context.calls(function, CallDirection::Callees)?,
        _ if options.tree => tree::tree(&context),
        _ if options.lag => lag::lag(&context)?,
        _ if options.waits => waits::waits(&context, options.kind.as_deref())?,
        _ => match (code, &options.source, python) {
            (Some((whole, function)), ..) => assembly::assembly(&context, whole, function)?,
            (_, Some(word), _) => source::source(&context, word)?,
            (_, None, Some(python)) => functions::functions(&context, &python),
            (_, None, None) => context.table(options.by.unwrap_or(ReportBy::Function))?,
        },
    };
    let text = if options.json {
        let inner = match key {
            "callers" | "callees" => Some("calls"),
            "assembly" => Some("instructions"),
            _ => None,
        };
        let shown = options.page.page().cut_json(&mut rows, inner);
        let value = json!({
            "version": JSON_VERSION,
            "file": options.file.to_string_lossy(),
            "command": profile.meta.command,
            "value": profile.count_type().key(),
            "samples": stats.samples(),
            "duration": profile.meta.duration,
            "rate": profile.meta.rate,
            "quality": quality(&profile),
        });
        format!("{:#}\n", shown.with_rows(value, key, rows))
    } else {
        format!("{}\n{text}", context.heading())
    };
    table::print(&text)
        .map_err(|e| Error::io("cannot write the report", e).hint("free some disk space, or write to another file"))
}

fn quality(profile: &Profile) -> Value {
    let q = &profile.meta.quality;
    json!({
        "exact": q.exact,
        "repaired": q.repaired,
        "partial": q.partial,
        "lost": q.lost,
        "reasons": q.reasons,
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CallDirection {
    Callers,
    Callees,
}

/// A profile and how to show it.
struct ReportContext<'a> {
    file: &'a Path,
    profile: &'a Profile,
    stats: &'a Stats<'a>,
    /// `None`: calls were not counted, or are what is shown.
    calls: Option<Calls>,
    filters: &'a [RowFilter],
    sort: ReportOrder,
    style: TerminalStyle,
    /// Whether long tables are cut.
    is_short: bool,
}

/// JSON key of the list, the list as JSON, the text.
type RenderedList = (&'static str, Value, String);

impl ReportContext<'_> {
    /// The name of the file, as it may be sent to a terminal.
    fn file_name(&self) -> String {
        line(&self.file.to_string_lossy()).into_owned()
    }

    /// What was recorded, and how well.
    fn heading(&self) -> String {
        let meta = &self.profile.meta;
        let mut text = self.style.paint(Color::Bold, &self.file_name());
        if !meta.command.is_empty() {
            text += &format!(": {}", line(&meta.command));
        }
        let kind = self.profile.count_type();
        text += &format!("\n{}", line(&summary::amount(kind, self.stats.samples())));
        if meta.duration > 0.0 {
            text += &format!(" in {:.1} s", meta.duration);
        }
        if meta.rate > 0 {
            text += &format!(" at {} Hz ({})", meta.rate, line(&meta.event));
        }
        let q = &meta.quality;
        if q.taken > 0 {
            text += &format!("; {}, lost {}", line(&summary::stacks(q)), q.lost);
        }
        if let Some(account) = summary::memory(meta) {
            text += &format!("\n{account}");
        } else if meta.event == "rss" {
            text += "\n  memory:   no account: that of a whole recording does not hold for a part of its time";
        }
        text + "\n"
    }

    /// The heading of a column of amounts: what they are, unless they are samples. `word`: `SELF`, `TOTAL`.
    fn amounts_title(&self, word: &str) -> String {
        let kind = self.profile.count_type();
        match kind.unit {
            _ if *kind == ValueType::SAMPLES => word.into(),
            Unit::Nanoseconds => format!("{word} TIME"),
            Unit::Count | Unit::Bytes => format!("{word} {}", line(&kind.name).to_uppercase()),
        }
    }

    /// An amount of what is counted, with its unit.
    fn amount(&self, amount: u64) -> String {
        self.profile.count_type().unit.show(amount)
    }

    fn table(&self, by: ReportBy) -> Result<RenderedList> {
        let mut rows = match by {
            ReportBy::Label => labels::rows(self.profile, self.file)?,
            ReportBy::Function => self.functions(),
            ReportBy::Category => ReportRow::of_categories(self.profile, self.stats),
            ReportBy::Line => ReportRow::of_lines(self.stats),
            ReportBy::Module => ReportRow::of_modules(self.stats),
            ReportBy::Thread | ReportBy::Process => ReportRow::of_threads(self.profile, by == ReportBy::Process)
                .ok_or_else(|| {
                    let (what, option) = match by {
                        ReportBy::Thread => ("threads", "--threads"),
                        _ => ("processes", "--subprocesses"),
                    };
                    Error::new(
                        ErrorKind::Data,
                        format!("{} has no data about {what}", self.file.display()),
                    )
                    .why("it has no timeline, and its stacks are not grouped by them")
                    .hint(format!("record again: nativeprof record {option} -o out.json ..."))
                })?,
        };
        self.arrange(&mut rows);
        let all = rows.len();
        self.limit(&mut rows);
        let list = rows.iter().map(ReportRow::json).collect();
        let mut text = self.draw(&rows, by);
        if rows.len() < all {
            text += &self.style.paint(
                Color::Dim,
                &format!(
                    "{} of {all} rows shown; for more: nativeprof report {file} 1.0; to search: a name instead of 1.0\n",
                    rows.len(),
                    file = self.file_name()
                ),
            );
        }
        Ok(("rows", list, text))
    }

    /// By function, the interval of its share of self samples, or of sampled allocations. None for text, and where something else
    /// is shown: it does not tell how many samples there were.
    fn share_intervals(&self) -> Vec<(f64, f64)> {
        if self.is_short {
            return Vec::new();
        }
        if *self.profile.count_type() == ValueType::SAMPLES {
            return intervals::self_shares(self.profile);
        }
        intervals::of_blocks(self.profile).map_or(Vec::new(), |found| found.shares)
    }

    /// How exact the amounts of sampled allocations are, as a sentence; empty where something else is shown, and for JSON.
    fn exactness(&self) -> String {
        let found = self.is_short.then(|| intervals::of_blocks(self.profile)).flatten();
        found.map_or(String::new(), |found| {
            format!(
                "Amounts are estimates: the sum is {} to {} (95 %); --json has an interval for each function. ",
                self.amount(found.of_sum.0.round() as u64),
                self.amount(found.of_sum.1.round() as u64),
            )
        })
    }

    /// All functions, with their calls where these were counted.
    fn functions(&self) -> Vec<ReportRow> {
        let shares = self.share_intervals();
        let rows = ReportRow::of_functions_by_id(self.stats).into_iter();
        let rows = rows.map(|(id, mut row)| {
            row.share = shares.get(id as usize).copied();
            row.calls = self.calls.as_ref().map(|calls| calls.of_function(self.stats.frame(id)));
            row
        });
        rows.filter(|row| row.total > 0 || row.calls.is_some_and(|calls| calls > 0))
            .collect()
    }

    /// Sorts and filters; functions of the user's own come first.
    fn arrange(&self, rows: &mut Vec<ReportRow>) {
        match self.sort {
            ReportOrder::SelfCount => rows.sort_by(|a, b| {
                let of = |row: &ReportRow| row.yours.as_ref().map_or(row.self_count, |yours| yours.amount);
                (of(b), b.total, &a.name, &a.place).cmp(&(of(a), a.total, &b.name, &b.place))
            }),
            ReportOrder::Total => rows.sort_by(|a, b| {
                (b.total, b.self_count, &a.name, &a.place).cmp(&(a.total, a.self_count, &b.name, &b.place))
            }),
            ReportOrder::Name => {
                rows.sort_by(|a, b| (&a.name, &a.place, b.self_count).cmp(&(&b.name, &b.place, a.self_count)))
            }
        }
        rows.sort_by_key(|row| row.yours.is_none());
        row_filter::apply(rows, self.filters, ReportRow::text);
    }

    /// Limits the rows of text, unless filters are given.
    fn limit<T>(&self, rows: &mut Vec<T>) {
        if self.is_short && self.filters.is_empty() {
            rows.truncate(ROWS);
        }
    }

    fn draw(&self, rows: &[ReportRow], by: ReportBy) -> String {
        if rows.is_empty() {
            return "no rows\n".into();
        }
        let total = self.stats.samples();
        let title_of_all = line(&self.profile.count_type().name).to_uppercase();
        let titles = ["SELF", "TOTAL"].map(|word| self.amounts_title(word));
        let has_calls = by == ReportBy::Function && self.calls.is_some();
        let (title, place) = match by {
            ReportBy::Function => ("FUNCTION", "WHERE"),
            ReportBy::Line => ("FUNCTION", "LINE"),
            ReportBy::Category => ("CATEGORY", ""),
            ReportBy::Module => ("MODULE", ""),
            ReportBy::Thread => ("THREAD", "PROCESS"),
            ReportBy::Process => ("PROCESS", ""),
            ReportBy::Label => ("LABEL", ""),
        };
        let mut columns = match by {
            ReportBy::Thread | ReportBy::Process => {
                vec![(&*title_of_all, Overflow::Number), ("%", Overflow::Number)]
            }
            _ => vec![
                (&*titles[0], Overflow::Number),
                ("%", Overflow::Number),
                (&*titles[1], Overflow::Number),
                ("%", Overflow::Number),
            ],
        };
        if has_calls {
            columns.insert(0, ("CALLS", Overflow::Number));
        }
        if matches!(by, ReportBy::Function | ReportBy::Line) {
            columns.push(("KIND", Overflow::Word));
        }
        // The end of a path is more informative.
        columns.push((
            title,
            if matches!(by, ReportBy::Module | ReportBy::Category | ReportBy::Label) {
                Overflow::End
            } else {
                Overflow::Start
            },
        ));
        columns.push((place, Overflow::End));
        let row = |row: &ReportRow| {
            let mut cells = vec![plain(self.amount(row.self_count)), plain(share(row.self_count, total))];
            if !matches!(by, ReportBy::Thread | ReportBy::Process) {
                cells.extend([plain(self.amount(row.total)), plain(share(row.total, total))]);
            }
            if has_calls {
                cells.insert(0, calls_cell(row));
            }
            if matches!(by, ReportBy::Function | ReportBy::Line) {
                cells.push(row.kind.map_or_else(Cell::default, |kind| plain(kind_name(kind))));
            }
            cells.push(Cell {
                text: row.name.clone(),
                color: row.kind.map_or(Color::Plain, color),
            });
            cells.push(plain(&row.place));
            cells
        };
        table::draw(&columns, &rows.iter().map(row).collect::<Vec<_>>(), &self.style)
    }

    /// Callers or callees of the functions that match a pattern.
    fn calls(&self, word: &str, direction: CallDirection) -> Result<RenderedList> {
        let pattern = row_filter::pattern(word)?;
        let mut functions: Vec<(FunctionId, ReportRow)> = ReportRow::of_functions_by_id(self.stats);
        functions.retain(|(_, row)| row.total > 0);
        // A complete name selects that function only, though others contain it.
        if functions.iter().any(|(_, row)| row.is_named(word)) {
            functions.retain(|(_, row)| row.is_named(word));
        } else {
            functions.retain(|(_, row)| pattern.is_match(&row.text()));
        }
        if functions.is_empty() {
            return Err(Error::new(ErrorKind::Data, format!("no function matches `{word}`"))
                .why("patterns are regular expressions, matched against `NAME (LOCATION)`")
                .hint(format!(
                    "list functions with `nativeprof report {}`",
                    self.file.display()
                )));
        }
        functions.sort_by(|(_, a), (_, b)| (b.total, &a.name, &a.place).cmp(&(a.total, &b.name, &b.place)));
        let all = functions.len();
        functions.truncate(FUNCTIONS);
        let mut tables: BTreeMap<FunctionId, Vec<ReportRow>> = BTreeMap::new();
        for call in self.stats.calls() {
            let (of, other) = match direction {
                CallDirection::Callers => (Some(call.callee), call.caller),
                CallDirection::Callees => (call.caller, Some(call.callee)),
            };
            let Some(of) = of.filter(|of| functions.iter().any(|(id, _)| id == of)) else {
                continue;
            };
            let mut row = other.map_or_else(ReportRow::outermost, |other| ReportRow::of_function(self.stats, other));
            (row.self_count, row.total) = (call.counts.self_count, call.counts.total);
            if row.total > 0 {
                tables.entry(of).or_default().push(row);
            }
        }
        let (word, end) = match direction {
            CallDirection::Callers => ("called by", "has no callers"),
            CallDirection::Callees => ("calls", "has no sampled callees"),
        };
        let (mut list, mut text) = (Vec::new(), String::new());
        for (id, function) in &functions {
            let mut rows = tables.remove(id).unwrap_or_default();
            self.arrange(&mut rows);
            let title = format!(
                "{}: self {}, total {}",
                line(&function.text()),
                self.amount(function.self_count),
                self.amount(function.total)
            );
            let title = self.style.paint(Color::Bold, &title);
            if rows.is_empty() {
                text += &format!("{title}; {end}\n\n");
            } else {
                text += &format!("{title}; {word}\n{}\n", self.draw_calls(&rows, function.total));
            }
            let mut value = function.json();
            value["calls"] = rows.iter().map(ReportRow::json).collect();
            list.push(value);
        }
        text.pop();
        if all > functions.len() {
            text += &format!(
                "\n{} of {all} matching functions shown; use a more specific pattern for fewer\n",
                functions.len()
            );
        }
        let key = if direction == CallDirection::Callers {
            "callers"
        } else {
            "callees"
        };
        Ok((key, list.into(), text))
    }

    fn draw_calls(&self, rows: &[ReportRow], total: u64) -> String {
        let titles = ["SELF", "TOTAL"].map(|word| self.amounts_title(word));
        let columns = [
            (&*titles[0], Overflow::Number),
            (&*titles[1], Overflow::Number),
            ("%", Overflow::Number),
            ("KIND", Overflow::Word),
            ("FUNCTION", Overflow::Start),
            ("WHERE", Overflow::End),
        ];
        let row = |row: &ReportRow| {
            vec![
                plain(self.amount(row.self_count)),
                plain(self.amount(row.total)),
                plain(share(row.total, total)),
                plain(row.kind.map_or("", kind_name)),
                Cell {
                    text: row.name.clone(),
                    color: row.kind.map_or(Color::Plain, color),
                },
                plain(&row.place),
            ]
        };
        table::draw(&columns, &rows.iter().map(row).collect::<Vec<_>>(), &self.style)
    }
}

/// `12.3`, in percent.
fn share(part: u64, total: u64) -> String {
    format!("{:.1}", 100.0 * part as f64 / total.max(1) as f64)
}
