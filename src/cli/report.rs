//! `report`: the tables of a saved profile.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::args::{By, Report, Sort};
use super::open;
use super::output::value_of;
use super::restrict::{self, Restriction};
use super::rows::{Row, kind_name};
use super::summary;
use super::table::{self, Cell, Color, Fit, Style, color, plain};
use crate::error::{Error, Kind, Result};
use crate::export::escape::line;
use crate::export::select;
use crate::process::credentials::Caps;
use crate::process::privilege;
use crate::tree::profile::Profile;
use crate::tree::stats::{FunctionId, Stats};

mod tree;

/// Rows that a terminal gets when nothing is said.
const ROWS: usize = 30;
/// Functions whose callers are shown, those with the most samples, where several fit.
const FUNCTIONS: usize = 10;

/// Prints what was asked for.
///
/// # Errors
/// Those of [`open::profile`]; `Usage` for a restriction that makes no sense; `Data` where the profile lacks what was
/// asked for.
pub fn report(options: &Report) -> Result<()> {
    let words = options.restrictions.iter().map(|word| restrict::parse(word));
    let restrictions = words.collect::<Result<Vec<_>>>()?;
    let style = Style::of_stdout(options.color);
    privilege::become_caller()?;
    let mut profile = open::profile(&options.file, Caps::NONE)?;
    if let Some(name) = &options.value {
        let value = value_of(&profile, name, &line(&options.file.to_string_lossy()))?;
        profile = select::by_value(&profile, value);
    }
    let stats = Stats::new(&profile);
    let seen = Seen {
        file: &options.file,
        profile: &profile,
        stats: &stats,
        restrictions: &restrictions,
        sort: options.sort,
        style,
    };
    let (key, rows, text) = match (&options.callers, &options.callees) {
        (Some(function), _) => seen.calls(function, Way::Callers)?,
        (_, Some(function)) => seen.calls(function, Way::Callees)?,
        _ if options.tree => tree::tree(&seen),
        _ => seen.table(options.by)?,
    };
    let text = if options.json {
        let value = json!({
            "file": options.file.to_string_lossy(),
            "command": profile.meta.command,
            "value": profile.count_type().key(),
            "samples": stats.samples(),
            "duration": profile.meta.duration,
            "rate": profile.meta.rate,
            "quality": quality(&profile),
            key: rows,
        });
        format!("{value:#}\n")
    } else {
        format!("{}\n{text}", seen.heading())
    };
    table::print(&text)
        .map_err(|e| Error::io("cannot write the report", e).hint("make room, or send it to another place"))
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
enum Way {
    Callers,
    Callees,
}

/// A profile and how to look at it.
struct Seen<'a> {
    file: &'a Path,
    profile: &'a Profile,
    stats: &'a Stats<'a>,
    restrictions: &'a [Restriction],
    sort: Sort,
    style: Style,
}

/// Name of the list, the list for programs, the text for people.
type Shown = (&'static str, Value, String);

impl Seen<'_> {
    /// What was recorded, and how well.
    fn heading(&self) -> String {
        let meta = &self.profile.meta;
        let mut text = self.style.paint(Color::Bold, &line(&self.file.to_string_lossy()));
        if !meta.command.is_empty() {
            text += &format!(": {}", line(&meta.command));
        }
        let kind = self.profile.count_type();
        text += &format!("\n{} {}", self.amount(self.stats.samples()), line(&kind.name));
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
        text + "\n"
    }

    /// An amount of what is counted, with its unit.
    fn amount(&self, amount: u64) -> String {
        self.profile.count_type().unit.show(amount)
    }

    fn table(&self, by: By) -> Result<Shown> {
        let mut rows = match by {
            By::Function => Row::of_functions(self.stats),
            By::Line => Row::of_lines(self.stats),
            By::Module => Row::of_modules(self.stats),
            By::Thread | By::Process => Row::of_threads(self.profile, by == By::Process).ok_or_else(|| {
                let what = if by == By::Thread { "threads" } else { "processes" };
                Error::new(
                    Kind::Data,
                    format!("{} does not tell {what} apart", self.file.display()),
                )
                .why("it has neither a timeline nor nodes for them")
                .hint("nativeprof record -o out.json ... makes a file that does")
            })?,
        };
        self.arrange(&mut rows);
        let all = rows.len();
        self.limit(&mut rows);
        let list = rows.iter().map(Row::json).collect();
        let mut text = self.draw(&rows, by);
        if rows.len() < all {
            text += &self.style.paint(
                Color::Dim,
                &format!(
                    "{} of {all} rows; more: report FILE 1000; some: report FILE PATTERN\n",
                    rows.len()
                ),
            );
        }
        Ok(("rows", list, text))
    }

    /// Sorts and restricts.
    fn arrange(&self, rows: &mut Vec<Row>) {
        match self.sort {
            Sort::Own => {
                rows.sort_by(|a, b| (b.own, b.total, &a.name, &a.place).cmp(&(a.own, a.total, &b.name, &b.place)))
            }
            Sort::Total => {
                rows.sort_by(|a, b| (b.total, b.own, &a.name, &a.place).cmp(&(a.total, a.own, &b.name, &b.place)))
            }
            Sort::Name => rows.sort_by(|a, b| (&a.name, &a.place, b.own).cmp(&(&b.name, &b.place, a.own))),
        }
        restrict::apply(rows, self.restrictions, Row::text);
    }

    /// Spares a terminal the long tail, unless the words have said what to show.
    fn limit<T>(&self, rows: &mut Vec<T>) {
        if self.style.terminal && self.restrictions.is_empty() {
            rows.truncate(ROWS);
        }
    }

    fn draw(&self, rows: &[Row], by: By) -> String {
        if rows.is_empty() {
            return "no rows\n".into();
        }
        let whole = self.stats.samples();
        let title_of_amounts = line(&self.profile.count_type().name).to_uppercase();
        let (title, place) = match by {
            By::Function => ("FUNCTION", "WHERE"),
            By::Line => ("FUNCTION", "LINE"),
            By::Module => ("MODULE", ""),
            By::Thread => ("THREAD", "PROCESS"),
            By::Process => ("PROCESS", ""),
        };
        let mut columns = match by {
            By::Thread | By::Process => vec![(&*title_of_amounts, Fit::Number), ("%", Fit::Number)],
            _ => vec![
                ("SELF", Fit::Number),
                ("%", Fit::Number),
                ("TOTAL", Fit::Number),
                ("%", Fit::Number),
            ],
        };
        if matches!(by, By::Function | By::Line) {
            columns.push(("KIND", Fit::Word));
        }
        // Of a path, the end tells more.
        columns.push((title, if by == By::Module { Fit::End } else { Fit::Start }));
        columns.push((place, Fit::End));
        let row = |row: &Row| {
            let mut cells = vec![plain(self.amount(row.own)), plain(share(row.own, whole))];
            if !matches!(by, By::Thread | By::Process) {
                cells.extend([plain(self.amount(row.total)), plain(share(row.total, whole))]);
            }
            if matches!(by, By::Function | By::Line) {
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

    /// Who calls the functions that fit a pattern, or whom they call.
    fn calls(&self, word: &str, way: Way) -> Result<Shown> {
        let pattern = restrict::pattern(word)?;
        let mut functions: Vec<(FunctionId, Row)> = Row::of_functions_by_id(self.stats);
        functions.retain(|(_, row)| row.total > 0);
        // A name in full means itself, though others contain it.
        if functions.iter().any(|(_, row)| row.is_named(word)) {
            functions.retain(|(_, row)| row.is_named(word));
        } else {
            functions.retain(|(_, row)| pattern.is_match(&row.text()));
        }
        if functions.is_empty() {
            return Err(
                Error::new(Kind::Data, format!("no function of the profile fits `{word}`"))
                    .why("it is held against `NAME (PLACE)`, as a regular expression")
                    .hint(format!(
                        "nativeprof report {} PATTERN   lists functions",
                        self.file.display()
                    )),
            );
        }
        functions.sort_by(|(_, a), (_, b)| (b.total, &a.name, &a.place).cmp(&(a.total, &b.name, &b.place)));
        let all = functions.len();
        functions.truncate(FUNCTIONS);
        let mut tables: BTreeMap<FunctionId, Vec<Row>> = BTreeMap::new();
        for call in self.stats.calls() {
            let (of, other) = match way {
                Way::Callers => (Some(call.callee), call.caller),
                Way::Callees => (call.caller, Some(call.callee)),
            };
            let Some(of) = of.filter(|of| functions.iter().any(|(id, _)| id == of)) else {
                continue;
            };
            let mut row = other.map_or_else(Row::outermost, |other| Row::of_function(self.stats, other));
            (row.own, row.total) = (call.counts.own, call.counts.total);
            if row.total > 0 {
                tables.entry(of).or_default().push(row);
            }
        }
        let (word, end) = match way {
            Way::Callers => ("called by", "is not called"),
            Way::Callees => ("calls", "calls nothing that was sampled"),
        };
        let (mut list, mut text) = (Vec::new(), String::new());
        for (id, function) in &functions {
            let mut rows = tables.remove(id).unwrap_or_default();
            self.arrange(&mut rows);
            let title = format!(
                "{}: self {}, total {}",
                line(&function.text()),
                self.amount(function.own),
                self.amount(function.total)
            );
            let title = self.style.paint(Color::Bold, &title);
            if rows.is_empty() {
                text += &format!("{title}; {end}\n\n");
            } else {
                text += &format!("{title}; {word}\n{}\n", self.draw_calls(&rows, function.total));
            }
            let mut value = function.json();
            value["calls"] = rows.iter().map(Row::json).collect();
            list.push(value);
        }
        text.pop();
        if all > functions.len() {
            text += &format!(
                "\n{} of {all} functions that fit; a longer pattern fits fewer\n",
                functions.len()
            );
        }
        let key = if way == Way::Callers { "callers" } else { "callees" };
        Ok((key, list.into(), text))
    }

    fn draw_calls(&self, rows: &[Row], whole: u64) -> String {
        let columns = [
            ("SELF", Fit::Number),
            ("TOTAL", Fit::Number),
            ("%", Fit::Number),
            ("KIND", Fit::Word),
            ("FUNCTION", Fit::Start),
            ("WHERE", Fit::End),
        ];
        let row = |row: &Row| {
            vec![
                plain(self.amount(row.own)),
                plain(self.amount(row.total)),
                plain(share(row.total, whole)),
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
fn share(part: u64, whole: u64) -> String {
    format!("{:.1}", 100.0 * part as f64 / whole.max(1) as f64)
}
