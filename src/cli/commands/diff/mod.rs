//! `diff`: what changed between two profiles, and which changes are significant.

use std::io::{self, Write};
use std::path::Path;

use serde_json::{Value, json};

use crate::cli::args::{Browse, DiffBy, DiffCommand as Options, DiffFormat, Normalize};
use crate::cli::history;
use crate::cli::input;
use crate::cli::output::atomic_file::{OutputFile, PUBLIC};
use crate::cli::output::browser;
use crate::cli::output::row_filter;
use crate::cli::output::style::{Color, TerminalStyle, color};
use crate::cli::output::table;
use crate::cli::output::table::{Cell, Overflow, plain};
use crate::cli::output::table_rows::{ReportRow, kind_name};
use crate::cli::output::{JSON_VERSION, no_such_function};
use crate::cli::print_status;
use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::export::diff_flamegraph;
use crate::export::html;
use crate::export::html::Comparison;
use crate::privileges::credentials::Caps;
use crate::privileges::phases;
use crate::profile::diff;
use crate::profile::diff::{Change, Diff, Metric, Normalization, RowKind};
use crate::profile::model::Profile;
use crate::profile::stats::module;
use crate::profile::summary::{self, counted};
use crate::profile::values::{Unit, ValueType};
use crate::resolve::source_lines;

mod comparable;
mod gate;

use comparable::{check_comparable, sampled_time};
pub use gate::Gate;

/// Both profiles: of two paths, or of two times of one history.
fn read(options: &Options, kept: Caps) -> Result<[Profile; 2]> {
    let [before, after] = options.paths();
    let sources = [(before, options.against.unwrap_or(0)), (after, 0)];
    let mut read = history::profiles(&sources, options.range, &options.history, kept)?.into_iter();
    Ok([read.next().unwrap_or_default(), read.next().unwrap_or_default()])
}

/// Compares. Without `--fail-above`, everything has passed.
///
/// # Errors
/// Those of [`history::profiles`]; `Usage` for invalid arguments; `Data` if a profile does not have what the
/// normalization needs.
pub fn diff(options: &Options) -> Result<Gate> {
    let words = options.filters.iter().map(|word| row_filter::parse(word));
    let filters = words.collect::<Result<Vec<_>>>()?;
    let style = TerminalStyle::of_stdout(options.color);
    phases::switch_to_invoking_user()?;
    let output = options.output.as_ref().map(|path| {
        if path.is_dir() {
            path.join(match options.format {
                Some(DiffFormat::Svg) => "nativeprof-diff.svg",
                _ => "nativeprof-diff.html",
            })
        } else {
            path.clone()
        }
    });
    let image = image_format(options.format, output.as_deref())?;
    if image.is_none() && options.browser.when == Browse::On {
        return Err(Error::new(ErrorKind::Usage, "--browser needs an output file")
            .why("without -o, the comparison is printed as a table")
            .hint("nativeprof diff A B -o diff.html --browser"));
    }
    let place = match (&output, image) {
        (Some(path), Some(_)) if !input::is_standard(path) => Some(OutputFile::new(path, PUBLIC)?),
        _ => None,
    };
    let kept = place.as_ref().map_or(Caps::NONE, OutputFile::needs);
    let paths = options.paths();
    let read = read(options, kept)?;
    let compared = comparable::by_value(read, paths, options.value.as_deref())?;
    let grains = compared.each_ref().map(|compared| compared.grain);
    let is_traced = compared.iter().all(|compared| compared.is_traced);
    let profiles = options
        .frames
        .view(options.no_native)
        .apply_to_both(compared.map(|compared| compared.profile))
        .map_err(no_such_function)?;
    let (a, b) = (&profiles[0], &profiles[1]);
    let is_time = a.count_type().unit == Unit::Nanoseconds;
    let normalization = match options.normalize {
        // Traces are of all calls of a program, so that their times need no common measure.
        None if is_traced && is_time => Normalization::Time,
        None | Some(Normalize::Share) => Normalization::Share,
        Some(Normalize::Rate) => Normalization::Rate,
        Some(Normalize::Time) => Normalization::Time,
    };
    for (profile, path) in [a, b].into_iter().zip(paths) {
        check_comparable(profile, path, normalization)?;
    }
    if let (Some(one), Some(other)) = (sampled_time(a), sampled_time(b))
        && one != other
    {
        print_status(&format!(
            "the first profile has {one} time, the second {other} time; to compare the same: --value cpu"
        ));
    }
    let is_self = options.self_count || image == Some(DiffFormat::Svg);
    let diff_options = diff::DiffOptions {
        normalization,
        by: match options.by {
            DiffBy::Function => RowKind::Function,
            DiffBy::Module => RowKind::Module,
        },
        metric: if is_self { Metric::SelfCount } else { Metric::Total },
        confidence: options.confidence / 100.0,
        interpreter: options.interpreter,
        grains,
    };
    let found = diff::diff(a, b, &diff_options);
    let text = Text {
        options,
        self_count: is_self,
        is_traced,
        normalization,
        profiles: [a, b],
        found: &found,
    };
    if let Some(image) = image {
        let mut both = diff::both(a, b, &diff_options);
        if image == DiffFormat::Html && !options.no_source {
            source_lines::add(&mut both.profile, &mut source_lines::open_local);
        }
        let make = |out: &mut dyn Write| match image {
            DiffFormat::Svg => diff_flamegraph::svg(&both, &found, &text.title(), normalization, out),
            DiffFormat::Html => html::write_comparison(
                &Comparison {
                    both: &both,
                    found: &found,
                    names: text.names().each_ref().map(String::as_str),
                    amounts: &text.amounts(),
                    normalization,
                    is_self,
                    confidence: options.confidence,
                },
                options.no_source,
                out,
            ),
        };
        let failed =
            |e: io::Error| Error::io("cannot write the flame graph", e).hint("choose another file with -o FILE");
        match &place {
            Some(place) => {
                place.write(&make).map_err(failed)?;
                print_status(&format!("written: {}", place.path().display()));
                if let Some(said) = browser::open(options.browser.when, place.path(), false) {
                    print_status(&said);
                }
            }
            None => {
                let mut bytes = Vec::new();
                make(&mut bytes).map_err(failed)?;
                table::print(&String::from_utf8_lossy(&bytes)).map_err(failed)?;
                if options.browser.when == Browse::On {
                    print_status(browser::NOT_STANDARD_OUTPUT);
                }
            }
        }
    } else {
        let said = if options.json {
            format!("{:#}\n", text.json(&filters))
        } else {
            text.table(&filters, &style)
        };
        table::print(&said).map_err(|e| Error::io("cannot write the table", e).hint("free some disk space"))?;
    }
    Ok(options.fail_above.map_or(Gate::Passed, |limit| text.gate(limit)))
}

/// The format of the flame graph; `None` for a table.
fn image_format(format: Option<DiffFormat>, output: Option<&Path>) -> Result<Option<DiffFormat>> {
    let Some(path) = output.filter(|_| format.is_none()) else {
        return Ok(format);
    };
    let name = path.to_string_lossy().to_lowercase();
    match name.rsplit('.').next() {
        Some("svg") => Ok(Some(DiffFormat::Svg)),
        Some("html" | "htm") => Ok(Some(DiffFormat::Html)),
        _ => Err(Error::new(
            ErrorKind::Usage,
            format!("cannot tell the flame graph format from the extension of `{name}`"),
        )
        .why("supported extensions: .svg, .html")
        .hint("nativeprof diff A B -o diff.svg   (without -o, a table goes to standard output)")),
    }
}

/// The comparison as text and JSON.
struct Text<'a> {
    options: &'a Options,
    self_count: bool,
    /// Both profiles have exact calls, not samples.
    is_traced: bool,
    normalization: Normalization,
    profiles: [&'a Profile; 2],
    found: &'a Diff<'a>,
}

impl Text<'_> {
    /// Names of the older and of the newer profile.
    fn names(&self) -> [String; 2] {
        self.options.paths().map(|path| {
            let name = path.file_name().unwrap_or(path.as_os_str());
            name.to_string_lossy().into_owned()
        })
    }

    /// The time that is compared, where it is one.
    fn time(&self) -> &str {
        sampled_time(self.profiles[1]).unwrap_or_default()
    }

    fn title(&self) -> String {
        let [before, after] = self.names();
        format!("{after} compared to {before}")
    }

    fn row(&self, change: &Change<'_>) -> ReportRow {
        let row = ReportRow::of_frame(change.frame);
        match self.options.by {
            DiffBy::Function => row,
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
    fn rows(&self, filters: &[row_filter::RowFilter]) -> Vec<(&Change<'_>, ReportRow)> {
        let changes = self.found.rows.iter();
        let mut rows: Vec<_> = changes.map(|change| (change, self.row(change))).collect();
        if !self.options.all {
            let significant = rows.iter().filter(|(change, _)| change.is_significant()).count();
            rows.truncate(significant);
        }
        row_filter::apply(&mut rows, filters, |(_, row)| row.text());
        rows
    }

    fn table(&self, filters: &[row_filter::RowFilter], style: &TerminalStyle) -> String {
        let Text { options, found, .. } = self;
        let [before, after] = options.paths();
        let mut text = String::new();
        for (word, path, profile) in [
            ("before", before, self.profiles[0]),
            ("after ", after, self.profiles[1]),
        ] {
            let (samples, meta) = (profile.nodes[0].count, &profile.meta);
            let kind = profile.count_type();
            text += &format!(
                "{word}: {}: {}",
                line(&path.to_string_lossy()),
                line(&summary::amount(kind, samples))
            );
            let calls = profile.find_value("calls").filter(|value| *value > 0);
            if let Some(calls) = calls {
                text += &format!(", {}", counted(profile.total_amount(calls), "calls"));
            }
            if let Some(time) = sampled_time(profile).filter(|_| meta.rate > 0 && *kind == ValueType::SAMPLES) {
                text += &format!(", {:.2} s {time}", samples as f64 / meta.rate as f64);
            }
            if meta.duration > 0.0 {
                text += &format!(" in {:.1} s", meta.duration);
            }
            if !meta.command.is_empty() {
                text += &format!(" ({})", line(&meta.command));
            }
            text.push('\n');
        }
        let tested = found.rows.iter().filter(|row| row.interval.is_some()).count();
        text += &format!(
            "{} of {}; simultaneous {} % confidence intervals for {}{}\n\n",
            if self.self_count { "self" } else { "total" },
            self.amounts_and_unit(),
            options.confidence,
            counted(tested as u64, "rows"),
            match found.blocks {
                Some(blocks) => format!(" (from {blocks} blocks of the timeline)"),
                None if self.is_traced =>
                    "; files of traced calls do not say how their times vary: assumed are independent calls \
                                           that take equally long"
                        .into(),
                None => "; at least one file has no timeline: samples assumed independent, so intervals are too narrow"
                    .into(),
            },
        );
        for (old, new) in &found.renamed {
            text += &format!(
                "renamed: {} is now {}; their functions are compared\n",
                line(old),
                line(new)
            );
        }
        let mut rows = self.rows(filters);
        let all = found.all.as_ref().map(|all| {
            (
                all,
                ReportRow {
                    name: "[all]".into(),
                    ..ReportRow::default()
                },
            )
        });
        if let Some(all) = all {
            rows.insert(0, all);
        }
        let significant = found.rows.iter().filter(|row| row.is_significant()).count();
        if significant == 0 {
            text += &format!("no significant change{}\n", self.detection_limit());
        }
        if !rows.is_empty() {
            text += &self.draw(&rows, style);
        }
        if !options.all && significant > 0 {
            text += &style.paint(Color::Dim, "insignificant rows hidden; show them with --all\n");
        }
        if found.rows.iter().any(|row| row.interpreter_internal) {
            text += &style.paint(
                Color::Dim,
                "interpreter-internal functions are not tested (their callers are); test them with --interpreter\n",
            );
        }
        text
    }

    /// The smallest change that would have been detected, for the row with the widest interval.
    fn detection_limit(&self) -> String {
        let rows = self.found.rows.iter().filter_map(|row| Some((row.limit?.now, row)));
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
    fn value(&self) -> String {
        let kind = self.profiles[1].count_type();
        match kind.unit {
            Unit::Nanoseconds => format!("{} time", line(self.time())),
            Unit::Count | Unit::Bytes => line(&kind.name).into_owned(),
        }
    }

    /// What the amounts of rows are parts of.
    fn amounts(&self) -> String {
        let time = line(self.time());
        match self.normalization {
            Normalization::Share => format!("all {}", self.value()),
            Normalization::Rate if time == "CPU" => "one CPU".into(),
            Normalization::Rate => format!("{time} time per second of the recording"),
            Normalization::Time => format!("{time} time"),
        }
    }

    /// The same, with the unit that tables have.
    fn amounts_and_unit(&self) -> String {
        let unit = match self.normalization {
            Normalization::Share => "in percent (shares: if one grows, others shrink)",
            Normalization::Rate => "in percent",
            Normalization::Time => "in seconds",
        };
        format!("{}, {unit}", self.amounts())
    }

    fn unit(&self) -> &'static str {
        if self.normalization == Normalization::Time {
            "s"
        } else {
            "%"
        }
    }

    fn amount(&self, value: f64, sign: bool) -> String {
        let value = if self.normalization == Normalization::Time {
            value
        } else {
            value * 100.0
        };
        let text = match self.normalization {
            Normalization::Time => format!("{value:+.3}"),
            _ => format!("{value:+.2}"),
        };
        if sign {
            text
        } else {
            text.trim_start_matches('+').into()
        }
    }

    fn draw(&self, rows: &[(&Change<'_>, ReportRow)], style: &TerminalStyle) -> String {
        let unit = self.unit();
        let (before, after) = (format!("BEFORE {unit}"), format!("AFTER {unit}"));
        let functions = self.options.by == DiffBy::Function;
        let mut columns = vec![
            (&*before, Overflow::Number),
            (&*after, Overflow::Number),
            ("CHANGE", Overflow::Number),
            ("INTERVAL", Overflow::Word),
        ];
        if functions {
            columns.push(("KIND", Overflow::Word));
        }
        columns.push((if functions { "FUNCTION" } else { "MODULE" }, Overflow::Start));
        columns.push((if functions { "WHERE" } else { "" }, Overflow::End));
        let cells = |(change, row): &(&Change<'_>, ReportRow)| {
            let tint = if !change.is_significant() {
                Color::Dim
            } else if change.change() > 0.0 {
                Color::Red
            } else {
                Color::Green
            };
            let no_interval = if change.interpreter_internal {
                "not tested"
            } else if self.is_traced {
                "too few calls"
            } else {
                "too few samples"
            };
            let interval = change.interval.map_or(no_interval.into(), |(low, high)| {
                format!("{} to {}", self.amount(low, true), self.amount(high, true))
            });
            let mut cells = vec![
                plain(self.amount(change.before, false)),
                plain(self.amount(change.after, false)),
                Cell {
                    text: self.amount(change.change(), true),
                    color: tint,
                },
                Cell {
                    text: interval,
                    color: if tint == Color::Dim { tint } else { Color::Plain },
                },
            ];
            if functions {
                cells.push(plain(row.kind.map_or("", kind_name)));
            }
            cells.push(Cell {
                text: row.name.clone(),
                color: row.kind.map_or(Color::Plain, color),
            });
            cells.push(plain(&row.place));
            cells
        };
        table::draw(&columns, &rows.iter().map(cells).collect::<Vec<_>>(), style)
    }

    fn json(&self, filters: &[row_filter::RowFilter]) -> Value {
        let value = |change: &Change<'_>| {
            json!({
                "before": change.before,
                "after": change.after,
                "change": change.change(),
                "interval": change.interval.map(|(low, high)| [low, high]),
                "significant": change.is_significant(),
                "interpreter_internal": change.interpreter_internal,
                "samples": [change.samples.0, change.samples.1],
            })
        };
        let row = |(change, row): (&Change<'_>, ReportRow)| {
            let mut value = value(change);
            for key in ["id", "kind", "name", "place"] {
                if let Some(text) = row.json().get(key) {
                    value[key] = text.clone();
                }
            }
            value
        };
        let mut rows = self.rows(filters);
        let shown = self.options.page.page().cut(&mut rows);
        let [before, after] = self.options.paths();
        let mut output = json!({
            "version": JSON_VERSION,
            "before": before.to_string_lossy(),
            "after": after.to_string_lossy(),
            "value": self.profiles[1].count_type().key(),
            "samples": self.profiles.map(|profile| profile.nodes[0].count),
            "unit": match self.normalization {
                Normalization::Share => "fraction of all samples".into(),
                Normalization::Rate => format!("{} seconds per second", self.time()),
                Normalization::Time => format!("{} seconds", self.time()),
            },
            "count": if self.self_count { "self" } else { "total" },
            "confidence": self.options.confidence / 100.0,
            "blocks": self.found.blocks,
            "tested": self.found.rows.iter().filter(|row| row.interval.is_some()).count(),
            "significant": self.found.rows.iter().filter(|row| row.is_significant()).count(),
            "all": self.found.all.as_ref().map(value),
            "renamed": self.found.renamed.iter().map(|(old, new)| json!({"before": old, "after": new})).collect::<Vec<_>>(),
        });
        if let Value::Object(output) = &mut output {
            shown.add_to(output);
            output.insert("rows".into(), rows.into_iter().map(row).collect());
        }
        output
    }
}
