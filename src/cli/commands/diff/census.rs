//! Two censuses of memory, which `heap --format json` wrote: what grew between them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;

use serde_json::{Value, json};

use crate::cli::args::{DiffBy, DiffCommand as Options};
use crate::cli::commands::heap::MAX_LISTED;
use crate::cli::commands::heap::saved::{self, no_census};
use crate::cli::output::JSON_VERSION;
use crate::cli::output::style::{Color, TerminalStyle};
use crate::cli::output::table::{self, Cell, Overflow, plain};
use crate::error::{Error, ErrorKind, Result};
use crate::heap::blocks;
use crate::heap::estimate::Estimate;
use crate::heap::mappings::Part;
use crate::privileges::phases;
use crate::profile::values::Unit;

/// Rows of the table of types.
const MAX_ROWS: usize = 30;
/// Rows of the table of blocks of the C heap.
const MAX_BLOCKS: usize = 10;

/// A census that was saved.
struct Saved {
    rss: u64,
    parts: BTreeMap<String, u64>,
    /// Count and bytes.
    types: BTreeMap<String, (Estimate, Estimate)>,
    blocks: Blocks,
}

/// Blocks of the C heap; none if the census is older, or the C heap was not divided.
#[derive(Default)]
struct Blocks {
    /// Count and bytes, by size and class.
    kinds: BTreeMap<(u64, Option<String>), (u64, u64)>,
    /// Not all kinds may be listed.
    is_cut: bool,
}

impl Blocks {
    /// Count and bytes of a kind; `None`: they are not known.
    fn of(&self, kind: &(u64, Option<String>)) -> Option<(u64, u64)> {
        let absent = (!self.is_cut).then_some((0, 0));
        self.kinds.get(kind).copied().or(absent)
    }
}

/// A type in both.
struct Change<'a> {
    name: &'a str,
    count: [Estimate; 2],
    bytes: [Estimate; 2],
    /// Of the bytes: the change, and its interval.
    change: (i64, i64, i64),
}

impl Change<'_> {
    fn is_significant(&self) -> bool {
        self.change.1 > 0 || self.change.2 < 0
    }
}

/// Compares two censuses, and prints what changed. `None`: the files are none.
///
/// # Errors
/// `Usage` for options that are of no use here; `Data` if only one is a census, or damaged.
pub fn diff(options: &Options) -> Option<Result<()>> {
    let paths = options.paths();
    let [[before], [after]] = [&paths[0][..], &paths[1][..]] else {
        return None;
    };
    let files = [*before, *after].map(|path| (path, saved::open(path)));
    if files.iter().all(|(_, file)| file.is_none()) {
        return None;
    }
    Some(compare(options, files))
}

fn compare(options: &Options, files: [(&Path, Option<File>); 2]) -> Result<()> {
    let has_others = options.has_runs()
        || options.output.is_some()
        || options.format.is_some()
        || options.value.is_some()
        || options.normalize.is_some()
        || options.fail_above.is_some()
        || options.self_count
        || options.by != DiffBy::Function
        || !options.filters().is_empty();
    if has_others {
        return Err(
            Error::new(ErrorKind::Usage, "an option that is of no use for a census of memory")
                .why("of two censuses the parts and the types are compared")
                .hint("nativeprof diff before.json after.json   (with --all, --json or --color)"),
        );
    }
    phases::drop_all()?;
    let mut both = Vec::new();
    for (path, file) in files {
        let file =
            file.ok_or_else(|| no_census(path, "the other file is one, and a profile cannot be compared with it"))?;
        both.push(read(path, file)?);
    }
    let [before, after] = &both[..] else {
        return Ok(());
    };
    let changes = changes(before, after);
    let text = if options.json {
        format!("{:#}\n", to_json(before, after, &changes))
    } else {
        text(
            before,
            after,
            &changes,
            options.all,
            &TerminalStyle::of_stdout(options.color),
        )
    };
    table::print(&text).map_err(|e| Error::io("cannot write the table", e).hint("free some disk space"))
}

fn read(path: &Path, file: File) -> Result<Saved> {
    let value = saved::read(path, file)?;
    self::saved(&value).ok_or_else(|| no_census(path, "keys are missing, or have other types"))
}

fn saved(census: &Value) -> Option<Saved> {
    let estimate = |value: &Value| {
        let number = |at: usize| value.get(at).and_then(Value::as_u64);
        Some(Estimate {
            value: number(0)?,
            low: number(1)?.min(number(0)?),
            high: number(2)?.max(number(0)?),
        })
    };
    let name = |row: &Value| row.get("name").and_then(Value::as_str).map(String::from);
    let parts = census.get("parts")?.as_array()?.iter();
    let parts = parts.map(|row| Some((name(row)?, row.get("bytes")?.as_u64()?)));
    let mut types: BTreeMap<String, (Estimate, Estimate)> = BTreeMap::new();
    for row in census.get("types")?.as_array()? {
        let (count, bytes) = (estimate(row.get("count")?)?, estimate(row.get("bytes")?)?);
        // Several types may have one name.
        let sums = types.entry(name(row)?).or_default();
        *sums = (sums.0 + count, sums.1 + bytes);
    }
    let blocks = match census.get("c_blocks") {
        Some(rows) => saved_blocks(rows)?,
        None => Blocks::default(),
    };
    Some(Saved {
        blocks,
        rss: census.get("rss_bytes")?.as_u64()?,
        parts: parts.collect::<Option<_>>()?,
        types,
    })
}

fn saved_blocks(rows: &Value) -> Option<Blocks> {
    let rows = rows.as_array()?;
    let mut blocks = Blocks {
        is_cut: rows.len() >= MAX_LISTED,
        ..Blocks::default()
    };
    for row in rows {
        let number = |key: &str| row.get(key).and_then(Value::as_u64);
        let class = row.get("class").and_then(Value::as_str).map(String::from);
        let sums = blocks.kinds.entry((number("usable_bytes")?, class)).or_default();
        let (count, bytes) = (number("count")?, number("bytes")?);
        *sums = (sums.0.saturating_add(count), sums.1.saturating_add(bytes));
    }
    Some(blocks)
}

/// Blocks of a size and class in both.
struct BlockChange<'a> {
    usable: u64,
    class: Option<&'a str>,
    count: [u64; 2],
    bytes: [u64; 2],
}

/// The blocks of the C heap of both, those whose bytes changed most first. None if one of the censuses has none. Kinds that
/// one of them may have without listing them are left out.
fn block_changes<'a>(before: &'a Saved, after: &'a Saved) -> Vec<BlockChange<'a>> {
    let (before, after) = (&before.blocks, &after.blocks);
    if before.kinds.is_empty() || after.kinds.is_empty() {
        return Vec::new();
    }
    let kinds: BTreeSet<&(u64, Option<String>)> = before.kinds.keys().chain(after.kinds.keys()).collect();
    let change = |kind: &'a (u64, Option<String>)| {
        let (first, last) = (before.of(kind)?, after.of(kind)?);
        Some(BlockChange {
            usable: kind.0,
            class: kind.1.as_deref(),
            count: [first.0, last.0],
            bytes: [first.1, last.1],
        })
    };
    let changes = kinds.into_iter().filter_map(change);
    let mut changes: Vec<BlockChange> = changes.filter(|change| change.count[0] != change.count[1]).collect();
    changes.sort_by_key(|change| std::cmp::Reverse(change.bytes[0].abs_diff(change.bytes[1])));
    changes
}

/// The types of both, those whose bytes changed most first.
fn changes<'a>(before: &'a Saved, after: &'a Saved) -> Vec<Change<'a>> {
    let mut names: Vec<&str> = before
        .types
        .keys()
        .chain(after.types.keys())
        .map(String::as_str)
        .collect();
    names.sort_unstable();
    names.dedup();
    let of = |saved: &Saved, name: &str| saved.types.get(name).copied().unwrap_or_default();
    let mut changes: Vec<Change> = names
        .into_iter()
        .map(|name| {
            let (first, last) = (of(before, name), of(after, name));
            Change {
                name,
                count: [first.0, last.0],
                bytes: [first.1, last.1],
                change: difference(first.1, last.1),
            }
        })
        .collect();
    changes.sort_by_key(|change| std::cmp::Reverse(change.change.0.unsigned_abs()));
    changes
}

/// The difference of two independent estimates with its interval: that of Zou and Donner (Construction of confidence limits about
/// effect measures, 2008), which has the confidence of the two intervals and need not be symmetric.
fn difference(before: Estimate, after: Estimate) -> (i64, i64, i64) {
    let number = |n: u64| n as f64;
    let change = number(after.value) - number(before.value);
    let down = (number(after.value - after.low)).hypot(number(before.high - before.value));
    let up = (number(after.high - after.value)).hypot(number(before.value - before.low));
    (
        (change) as i64,
        (change - down).floor() as i64,
        (change + up).ceil() as i64,
    )
}

/// What `after` has more than `before`.
fn growth(before: u64, after: u64) -> i64 {
    let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    number(after) - number(before)
}

fn signed(amount: i64) -> String {
    let sign = match amount {
        0 => "",
        1.. => "+",
        _ => "-",
    };
    format!("{sign}{}", Unit::Bytes.show(amount.unsigned_abs()))
}

fn text(before: &Saved, after: &Saved, changes: &[Change], all: bool, style: &TerminalStyle) -> String {
    let bytes = |amount: u64| Unit::Bytes.show(amount);
    let part = |saved: &Saved, part: &Part| saved.parts.get(part.name()).copied().unwrap_or(0);
    let row = |amounts: [u64; 2], name: &str| {
        let [first, last] = amounts;
        vec![
            plain(bytes(first)),
            plain(bytes(last)),
            plain(signed(growth(first, last))),
            plain(name),
        ]
    };
    let mut rows = vec![row([before.rss, after.rss], "resident")];
    for name in &Part::ALL {
        let amounts = [part(before, name), part(after, name)];
        if amounts != [0, 0] {
            rows.push(row(amounts, name.text()));
        }
    }
    let columns = [
        ("BEFORE", Overflow::Number),
        ("AFTER", Overflow::Number),
        ("CHANGE", Overflow::Number),
        ("MEMORY", Overflow::Start),
    ];
    let out = table::draw(&columns, &rows, style);
    let shown: Vec<&Change> = changes
        .iter()
        .filter(|change| all || change.is_significant())
        .take(if all { usize::MAX } else { MAX_ROWS })
        .collect();
    let blocks = blocks_text(&block_changes(before, after), all, style);
    if shown.is_empty() {
        return out + "\nNo type has changed significantly.\n" + &blocks;
    }
    let row = |change: &&Change| {
        let (value, low, high) = change.change;
        let interval = if low == high {
            String::new()
        } else {
            format!("{} to {}", signed(low), signed(high))
        };
        let [first, last] = change.count;
        let color = match value {
            _ if !change.is_significant() => Color::Dim,
            1.. => Color::Red,
            _ => Color::Green,
        };
        let count = growth(first.value, last.value);
        let text = signed(value);
        vec![
            plain(format!("{count:+}")),
            Cell { text, color },
            plain(interval),
            plain(change.name),
        ]
    };
    let rows: Vec<Vec<Cell>> = shown.iter().map(row).collect();
    let columns = [
        ("COUNT", Overflow::Number),
        ("BYTES", Overflow::Number),
        ("99 % INTERVAL", Overflow::Number),
        ("TYPE", Overflow::Start),
    ];
    out + &table::section(&columns, &rows, style) + &blocks
}

/// The blocks of the C heap that changed, below an empty line.
fn blocks_text(changes: &[BlockChange], all: bool, style: &TerminalStyle) -> String {
    let row = |change: &BlockChange| {
        let ([first, last], [before, after]) = (change.count, change.bytes);
        vec![
            plain(format!("{:+}", growth(first, last))),
            plain(signed(growth(before, after))),
            plain(blocks::text(change.usable, change.class)),
        ]
    };
    let most = if all { usize::MAX } else { MAX_BLOCKS };
    let rows: Vec<Vec<Cell>> = changes.iter().take(most).map(row).collect();
    let columns = [
        ("COUNT", Overflow::Number),
        ("BYTES", Overflow::Number),
        ("BLOCKS OF THE C HEAP THAT ARE NO OBJECTS OF PYTHON", Overflow::Start),
    ];
    table::section(&columns, &rows, style)
}

fn to_json(before: &Saved, after: &Saved, changes: &[Change]) -> Value {
    let parts = Part::ALL.iter().map(|part| {
        let of = |saved: &Saved| saved.parts.get(part.name()).copied().unwrap_or(0);
        json!({"name": part.name(), "before": of(before), "after": of(after)})
    });
    let estimate = |e: &Estimate| json!([e.value, e.low, e.high]);
    let types = changes.iter().map(|change| {
        let (value, low, high) = change.change;
        json!({
            "name": change.name,
            "count": change.count.each_ref().map(estimate),
            "bytes": change.bytes.each_ref().map(estimate),
            "change": [value, low, high],
            "significant": change.is_significant(),
        })
    });
    let blocks = block_changes(before, after).into_iter().map(|change| {
        json!({
            "usable_bytes": change.usable,
            "class": change.class,
            "count": change.count,
            "bytes": change.bytes,
        })
    });
    json!({
        "kind": "census_diff",
        "version": JSON_VERSION,
        "rss_bytes": [before.rss, after.rss],
        "parts": parts.collect::<Vec<_>>(),
        "types": types.collect::<Vec<_>>(),
        "c_blocks": blocks.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::ColorWhen;

    #[test]
    fn differences_have_intervals() {
        let estimate = |value, low, high| Estimate { value, low, high };
        for (before, after, expected) in [
            (Estimate::exact(5), Estimate::exact(9), (4, 4, 4)),
            (Estimate::exact(9), Estimate::exact(5), (-4, -4, -4)),
            (estimate(100, 70, 140), estimate(200, 170, 240), (100, 50, 150)),
            (estimate(100, 100, 104), estimate(100, 97, 100), (0, -5, 0)),
        ] {
            assert_eq!(difference(before, after), expected, "{before:?} {after:?}");
        }
        // Forged ones, too, have some.
        let (change, low, high) = difference(estimate(0, 0, u64::MAX), estimate(u64::MAX, 0, u64::MAX));
        assert!(low <= change && change <= high);
    }

    #[test]
    fn censuses_of_others_are_refused() {
        for text in [
            "{}",
            "[]",
            r#"{"rss_bytes": 1, "parts": [], "types": {}}"#,
            r#"{"rss_bytes": -1, "parts": [], "types": []}"#,
            r#"{"rss_bytes": 1, "parts": [{"name": 1}], "types": []}"#,
            r#"{"rss_bytes": 1, "parts": [], "types": [], "c_blocks": [{"usable_bytes": 1, "class": null, "count": 1}]}"#,
            r#"{"rss_bytes": 1, "parts": [], "types": [{"name": "a", "count": [1], "bytes": [1, 1, 1]}]}"#,
        ] {
            let value = serde_json::from_str(text).expect("JSON");
            assert!(saved(&value).is_none(), "{text}");
        }
        let text = r#"{"rss_bytes": 1, "parts": [{"name": "stacks", "bytes": 1}],
            "types": [{"name": "a", "count": [1, 2, 0], "bytes": [3, 3, 3]}, {"name": "a", "count": [1, 1, 1], "bytes": [4, 4, 4]}]}"#;
        let found = saved(&serde_json::from_str(text).expect("JSON")).expect("a census");
        assert_eq!(found.types["a"], (Estimate::exact(2), Estimate::exact(7)));
    }

    #[test]
    fn blocks_of_the_c_heap_are_compared_by_size_and_class() {
        let census = |rows: &str| {
            let text = format!(r#"{{"rss_bytes": 1, "parts": [], "types": [], "c_blocks": [{rows}]}}"#);
            saved(&serde_json::from_str(&text).expect("JSON")).expect("a census")
        };
        let before = census(
            r#"{"usable_bytes": 24, "class": null, "count": 5, "bytes": 160},
            {"usable_bytes": 24, "class": "leak::Widget", "count": 1, "bytes": 32},
            {"usable_bytes": 40, "class": null, "count": 7, "bytes": 336}"#,
        );
        let after = census(
            r#"{"usable_bytes": 24, "class": null, "count": 1, "bytes": 32},
            {"usable_bytes": 24, "class": null, "count": 3, "bytes": 96},
            {"usable_bytes": 24, "class": "leak::Widget", "count": 11, "bytes": 352},
            {"usable_bytes": 40, "class": null, "count": 7, "bytes": 336}"#,
        );
        let shown = blocks_text(
            &block_changes(&before, &after),
            false,
            &TerminalStyle::of_stdout(ColorWhen::Never),
        );
        let rows: Vec<&str> = shown.lines().skip(2).map(str::trim).collect();
        assert_eq!(
            rows,
            [
                "+10  +320 B  leak::Widget of 0 to 24 bytes",
                "-1   -32 B  of 0 to 24 bytes"
            ]
        );
        // A census without blocks has not been asked for them.
        assert!(block_changes(&census(""), &after).is_empty());
        // What a full list lacks may be there nevertheless.
        let rows = (0..MAX_LISTED).map(|n| {
            let usable = 24 + 16 * n;
            format!(r#"{{"usable_bytes": {usable}, "class": null, "count": 4, "bytes": 128}}"#)
        });
        let full = census(&rows.collect::<Vec<_>>().join(","));
        assert!(block_changes(&full, &after).iter().all(|change| change.class.is_none()));
    }
}
