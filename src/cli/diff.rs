//! `diff`: what changed between two profiles, and what noise accounts for.

use std::io::{self, Write};
use std::path::Path;

use serde_json::{Value, json};

use super::args::{Diff as Options, DiffBy, Normalize, Picture};
use super::open;
use super::output::value_of;
use super::place::{PUBLIC, Place};
use super::restrict;
use super::rows::{Row, kind_name};
use super::table::{self, Cell, Color, Fit, Style, color, plain};
use crate::error::{Error, Kind, Result};
use crate::export::differential;
use crate::export::escape::line;
use crate::export::select;
use crate::process::credentials::Caps;
use crate::process::privilege;
use crate::tree::diff::{self, By, Change, Count, Diff, Norm};
use crate::tree::profile::Profile;
use crate::tree::stats::module;
use crate::tree::values::{Unit, ValueType};

/// Compares; false if something grew more than `--fail-above` allows.
///
/// # Errors
/// Those of [`open::profiles`]; `Usage` for words that make no sense; `Data` where a profile lacks what the
/// normalization needs.
pub fn diff(options: &Options) -> Result<bool> {
    let words = options.restrictions.iter().map(|word| restrict::parse(word));
    let restrictions = words.collect::<Result<Vec<_>>>()?;
    let style = Style::of_stdout(options.color);
    privilege::become_caller()?;
    let picture = picture(options)?;
    let place = match (&options.output, picture) {
        (Some(path), Some(_)) if !open::is_standard(path) => Some(Place::new(path, PUBLIC)?),
        _ => None,
    };
    let kept = place.as_ref().map_or(Caps::NONE, Place::needs);
    let mut profiles = open::profiles(&[&options.before, &options.after], kept)?;
    let mut grains = [1.0; 2];
    if let Some(name) = &options.value {
        let paths = [&options.before, &options.after];
        for ((profile, path), grain) in profiles.iter_mut().zip(paths).zip(&mut grains) {
            let value = value_of(profile, name, &line(&path.to_string_lossy()))?;
            *grain = diff::grain(profile, value);
            *profile = select::by_value(profile, value);
        }
        let kinds = [0, 1].map(|i| profiles[i].count_type().clone());
        if kinds[0] != kinds[1] {
            return Err(
                Error::new(Kind::Data, format!("the values `{}` are not of one kind", line(name)))
                    .why("their names or units differ")
                    .hint("--value with a name that both have"),
            );
        }
        if kinds[0].unit != Unit::Nanoseconds && options.normalize != Normalize::Share {
            return Err(Error::new(Kind::Usage, format!("`{}` is no time", line(name)))
                .why("only times can be compared per second or as seconds")
                .hint("--normalize share"));
        }
    }
    let (a, b) = (&profiles[0], &profiles[1]);
    let norm = match options.normalize {
        Normalize::Share => Norm::Share,
        Normalize::Rate => Norm::Rate,
        Normalize::Time => Norm::Time,
    };
    for (profile, path) in [(a, &options.before), (b, &options.after)] {
        comparable(profile, path, norm)?;
    }
    let found = diff::diff(
        a,
        b,
        &diff::Options {
            norm,
            by: match options.by {
                DiffBy::Function => By::Function,
                DiffBy::Module => By::Module,
            },
            count: if options.own || picture.is_some() {
                Count::Own
            } else {
                Count::Total
            },
            confidence: options.confidence / 100.0,
            interpreter: options.interpreter,
            grains,
        },
    );
    let text = Text {
        options,
        own: options.own || picture.is_some(),
        norm,
        profiles: [a, b],
        found: &found,
    };
    if let Some(picture) = picture {
        let make = |out: &mut dyn Write| match picture {
            Picture::Svg => differential::svg(a, b, &found, &text.title(), norm, out),
            Picture::Html => differential::html(
                a,
                b,
                &found,
                &text.title(),
                &text.table(&[], &Style::default()),
                norm,
                out,
            ),
        };
        let failed = |e: io::Error| Error::io("cannot write the picture", e).hint("choose another place with -o FILE");
        match &place {
            Some(place) => {
                place.write(&make).map_err(failed)?;
                super::say(&format!("written: {}", place.path().display()));
            }
            None => {
                let mut bytes = Vec::new();
                make(&mut bytes).map_err(failed)?;
                table::print(&String::from_utf8_lossy(&bytes)).map_err(failed)?;
            }
        }
    } else {
        let said = match options.json {
            true => format!("{:#}\n", text.json(&restrictions)),
            false => text.table(&restrictions, &style),
        };
        table::print(&said).map_err(|e| Error::io("cannot write the table", e).hint("make room"))?;
    }
    Ok(options.fail_above.is_none_or(|limit| text.judge(limit)))
}

/// Which picture was asked for.
fn picture(options: &Options) -> Result<Option<Picture>> {
    if options.format.is_some() || options.output.is_none() {
        return Ok(options.format);
    }
    let name = options
        .output
        .as_ref()
        .map(|path| path.to_string_lossy().to_lowercase())
        .unwrap_or_default();
    match name.rsplit('.').next() {
        Some("svg") => Ok(Some(Picture::Svg)),
        Some("html" | "htm") => Ok(Some(Picture::Html)),
        _ => Err(
            Error::new(Kind::Usage, format!("the ending of `{name}` names no picture"))
                .why("known are .svg and .html")
                .hint("nativeprof diff A B -o diff.svg; the table goes to standard output, without -o"),
        ),
    }
}

fn comparable(profile: &Profile, path: &Path, norm: Norm) -> Result<()> {
    let bad = |why: &str, hint: &str| {
        let what = format!("{} cannot be compared", path.display());
        Err(Error::new(Kind::Data, what).why(why).hint(hint))
    };
    if profile.nodes.first().is_none_or(|root| root.count == 0) {
        return bad("it has no samples", "record while the program uses CPU time");
    }
    match norm {
        Norm::Share => Ok(()),
        _ if profile.meta.rate == 0 && profile.count_type().unit != Unit::Nanoseconds => {
            bad("it does not tell at which rate it was sampled", "--normalize share")
        }
        Norm::Rate if profile.meta.duration <= 0.0 => bad("it does not tell how long it was", "--normalize share"),
        _ => Ok(()),
    }
}

/// The comparison in words.
struct Text<'a> {
    options: &'a Options,
    own: bool,
    norm: Norm,
    profiles: [&'a Profile; 2],
    found: &'a Diff<'a>,
}

impl Text<'_> {
    fn title(&self) -> String {
        let name = |path: &Path| {
            path.file_name()
                .unwrap_or(path.as_os_str())
                .to_string_lossy()
                .into_owned()
        };
        format!(
            "{} compared with {}",
            name(&self.options.after),
            name(&self.options.before)
        )
    }

    fn row(&self, change: &Change<'_>) -> Row {
        let row = Row::of_frame(change.frame);
        match self.options.by {
            DiffBy::Function => row,
            DiffBy::Module => Row {
                name: module(change.frame).into(),
                kind: None,
                place: String::new(),
                ..row
            },
        }
    }

    /// The rows to show, largest change first.
    fn rows(&self, restrictions: &[restrict::Restriction]) -> Vec<(&Change<'_>, Row)> {
        let changes = self.found.rows.iter();
        let mut rows: Vec<_> = changes.map(|change| (change, self.row(change))).collect();
        if !self.options.all {
            let significant = rows.iter().filter(|(change, _)| change.is_significant()).count();
            rows.truncate(significant);
        }
        restrict::apply(&mut rows, restrictions, |(_, row)| row.text());
        rows
    }

    fn table(&self, restrictions: &[restrict::Restriction], style: &Style) -> String {
        let Text { options, found, .. } = self;
        let mut text = String::new();
        for (word, path, profile) in [
            ("before", &options.before, self.profiles[0]),
            ("after ", &options.after, self.profiles[1]),
        ] {
            let (samples, meta) = (profile.nodes[0].count, &profile.meta);
            let kind = profile.count_type();
            let amount = kind.unit.show(samples);
            text += &format!(
                "{word}: {}: {amount} {}",
                line(&path.to_string_lossy()),
                line(&kind.name)
            );
            if meta.rate > 0 && *kind == ValueType::SAMPLES {
                text += &format!(", {:.2} s CPU", samples as f64 / meta.rate as f64);
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
            "{} of {}; intervals of all {tested} rows together hold with {} % confidence{}\n\n",
            if self.own { "self" } else { "total" },
            match self.norm {
                Norm::Share => format!("all {}, in percent (where one part grows, others shrink)", self.value()),
                Norm::Rate if options.value.is_none() => "one CPU, in percent".into(),
                Norm::Rate => format!("{} per second of the recording, in percent", self.value()),
                Norm::Time if options.value.is_none() => "CPU time, in seconds".into(),
                Norm::Time => format!("{}, in seconds", self.value()),
            },
            options.confidence,
            match found.blocks {
                Some(blocks) => format!(" ({blocks} blocks of time)"),
                None => "; without a timeline in both files samples are taken as independent, which is too sure".into(),
            },
        );
        let mut rows = self.rows(restrictions);
        let all = found.all.as_ref().map(|all| {
            (
                all,
                Row {
                    name: "[all]".into(),
                    ..Row::default()
                },
            )
        });
        if let Some(all) = all {
            rows.insert(0, all);
        }
        let significant = found.rows.iter().filter(|row| row.is_significant()).count();
        if significant == 0 {
            text += &format!("no change beyond noise{}\n", self.blind());
        }
        if !rows.is_empty() {
            text += &self.draw(&rows, style);
        }
        if !options.all && significant > 0 {
            text += &style.paint(
                Color::Dim,
                "rows whose change noise accounts for are left out; --all shows them\n",
            );
        }
        if found.rows.iter().any(|row| row.inside) {
            text += &style.paint(
                Color::Dim,
                "functions inside the interpreter are not judged, their callers are; --interpreter judges them too\n",
            );
        }
        text
    }

    /// How large a change would have had to be, of the row that noise hides most in.
    fn blind(&self) -> String {
        let rows = self.found.rows.iter().filter_map(|row| Some((row.interval?, row)));
        let widest = rows.max_by(|((low, high), _), ((l, h), _)| (high - low).total_cmp(&(h - l)));
        widest.map_or(String::new(), |((low, high), row)| {
            format!(
                "; of {} it would be seen from {} {} on",
                line(&self.row(row).name),
                self.amount((high - low) / 2.0, false),
                self.unit()
            )
        })
    }

    /// What is compared.
    fn value(&self) -> String {
        line(&self.profiles[1].count_type().name).into_owned()
    }

    fn unit(&self) -> &'static str {
        if self.norm == Norm::Time { "s" } else { "%" }
    }

    fn amount(&self, value: f64, sign: bool) -> String {
        let value = if self.norm == Norm::Time { value } else { value * 100.0 };
        let text = match self.norm {
            Norm::Time => format!("{value:+.3}"),
            _ => format!("{value:+.2}"),
        };
        if sign {
            text
        } else {
            text.trim_start_matches('+').into()
        }
    }

    fn draw(&self, rows: &[(&Change<'_>, Row)], style: &Style) -> String {
        let unit = self.unit();
        let (before, after) = (format!("BEFORE {unit}"), format!("AFTER {unit}"));
        let functions = self.options.by == DiffBy::Function;
        let mut columns = vec![
            (&*before, Fit::Number),
            (&*after, Fit::Number),
            ("CHANGE", Fit::Number),
            ("INTERVAL", Fit::Word),
        ];
        if functions {
            columns.push(("KIND", Fit::Word));
        }
        columns.push((if functions { "FUNCTION" } else { "MODULE" }, Fit::Start));
        columns.push((if functions { "WHERE" } else { "" }, Fit::End));
        let cells = |(change, row): &(&Change<'_>, Row)| {
            let tint = match change.is_significant() {
                true if change.change() > 0.0 => Color::Red,
                true => Color::Green,
                false => Color::Dim,
            };
            let untold = match change.inside {
                true => "not judged",
                false => "too few samples",
            };
            let interval = change.interval.map_or(untold.into(), |(low, high)| {
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

    fn json(&self, restrictions: &[restrict::Restriction]) -> Value {
        let value = |change: &Change<'_>| {
            json!({
                "before": change.before,
                "after": change.after,
                "change": change.change(),
                "interval": change.interval.map(|(low, high)| [low, high]),
                "significant": change.is_significant(),
                "inside_interpreter": change.inside,
                "samples": [change.samples.0, change.samples.1],
            })
        };
        let row = |(change, row): (&Change<'_>, Row)| {
            let mut value = value(change);
            for key in ["kind", "name", "place"] {
                if let Some(text) = row.json().get(key) {
                    value[key] = text.clone();
                }
            }
            value
        };
        json!({
            "before": self.options.before.to_string_lossy(),
            "after": self.options.after.to_string_lossy(),
            "value": self.profiles[1].count_type().key(),
            "samples": self.profiles.map(|profile| profile.nodes[0].count),
            "unit": match self.norm {
                Norm::Share => "part of all samples",
                Norm::Rate => "CPU seconds per second",
                Norm::Time => "CPU seconds",
            },
            "count": if self.own { "self" } else { "total" },
            "confidence": self.options.confidence / 100.0,
            "blocks": self.found.blocks,
            "tested": self.found.rows.iter().filter(|row| row.interval.is_some()).count(),
            "significant": self.found.rows.iter().filter(|row| row.is_significant()).count(),
            "all": self.found.all.as_ref().map(value),
            "rows": self.rows(restrictions).into_iter().map(row).collect::<Vec<_>>(),
        })
    }

    /// Whether nothing grew by more than `limit` percent of all that was before; says what did.
    fn judge(&self, limit: f64) -> bool {
        let whole = match self.norm {
            Norm::Share => 1.0,
            _ => self.found.all.as_ref().map_or(1.0, |all| all.before),
        };
        let percent = |change: &Change<'_>| change.change() / whole * 100.0;
        let grew = |change: &&Change<'_>| change.is_significant() && percent(change) > limit;
        let all = self
            .found
            .all
            .iter()
            .filter(grew)
            .map(|change| ("all CPU time".to_string(), change));
        let rows = self
            .found
            .rows
            .iter()
            .filter(grew)
            .map(|change| (self.row(change).text(), change));
        let mut good = true;
        for (name, change) in all.chain(rows) {
            let before = if self.norm == Norm::Share {
                "all samples"
            } else {
                "all CPU time before"
            };
            super::say(&format!(
                "{name} grew by {:.2} % of {before}, more than {limit} %",
                percent(change)
            ));
            good = false;
        }
        good
    }
}
