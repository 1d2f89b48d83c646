//! The tools that read profiles: `report`, `callers`, `source`, `waits`, `diff`.

use serde_json::{Map, Value, json};

use super::{AnswerText, Tool, about, command_line, count, file, page, read, rows, scaled, text, with_rows, words};
use crate::error::Result;
use crate::mcp::answer::{self, Rows, data, data_of, percent, rounded};
use crate::mcp::arguments::Wanted;
use crate::mcp::permission::Permission;
use crate::process::rerun::Watch;

/// Functions of which callers are listed at once, and files of which lines are.
const GROUPS: usize = 5;

pub const REPORT: Tool = Tool {
    name: "report",
    description: "The hottest functions of a profile (default: Python functions with the C code that they run), or lines, modules, \
                  threads, ... self: time in the function itself. total: with what it calls. id: give it to callers and source.",
    is_read_only: true,
    arguments: || {
        let by = json!({"enum": BY});
        let filter = json!({"type": "string", "description": "regular expression"});
        let value = json!({"type": "string", "description": "cpu, wall, calls, ..."});
        (
            with_rows(json!({"profile": text(), "by": by, "filter": filter, "value": value})),
            &["profile"],
        )
    },
    answer: AnswerText {
        keys: &["value"],
        rows: FUNCTION,
    },
    run: |arguments, surroundings| {
        let options = ReportOptions {
            file: file(arguments, "profile", surroundings.permission)?,
            by: arguments.word("by", BY)?,
            value: arguments.text("value")?,
            filter: arguments.text("filter")?,
            wanted: arguments.wanted()?,
        };
        Ok(Box::new(move |permission, watch| report(permission, watch, &options)))
    },
};

const BY: &[&str] = &["function", "line", "module", "category", "thread", "process", "label"];

pub struct ReportOptions {
    /// As a word of a command in the root directory.
    pub file: String,
    /// `None`: Python functions where there are some.
    pub by: Option<&'static str>,
    pub value: Option<String>,
    pub filter: Option<String>,
    pub wanted: Wanted,
}

/// The rows of a profile.
///
/// # Errors
/// Those of the command.
pub fn report(permission: &Permission, watch: &Watch<'_>, options: &ReportOptions) -> Result<Value> {
    let mut words = words(["report", &options.file, "--json"]);
    words.extend(page(options.wanted));
    words.extend(options.by.iter().flat_map(|by| super::words(["--by", by])));
    // In one word: a value may begin with a dash.
    words.extend(options.value.as_ref().map(|value| format!("--value={value}")));
    words.extend(options.filter.as_ref().map(|filter| pattern(filter)));
    let report = read(&words, permission, watch)?.json()?;
    let whole = count(&report, "samples");
    let mut answer = about(&report);
    answer.insert("command".into(), command_line(&words).into());
    let rows = Rows {
        rows: rows(&report, "rows").iter().map(|row| function(row, whole)).collect(),
        skipped: options.wanted.skipped,
        total: count(&report, "total_rows"),
    };
    Ok(answer::with_rows(answer, rows, options.wanted.max_bytes))
}

/// A regular expression as a word that is neither an option nor a number of rows.
fn pattern(text: &str) -> String {
    format!("(?:{text})")
}

/// Texts of [`named`].
pub const FUNCTION: &[&str] = &["id", "name", "place"];

/// A row of a report.
fn function(row: &Value, whole: u64) -> Value {
    let mut out = named(row);
    for key in ["self", "total"] {
        out[key] = count(row, key).into();
        out[format!("{key}_percent")] = percent(count(row, key), whole);
    }
    if let Some(interval) = scaled(row.get("self_share_interval"), 100.0) {
        out["self_percent_interval"] = interval;
    }
    if row.get("calls").is_some_and(Value::is_u64) {
        out["calls"] = count(row, "calls").into();
    }
    if row.get("self_with_libraries").is_some() && count(row, "self_with_libraries") != count(row, "self") {
        let amount = count(row, "self_with_libraries");
        out["self_with_libraries_percent"] = percent(amount, whole);
    }
    if row.get("hottest_line").is_some_and(Value::is_u64) {
        out["hottest_line"] = count(row, "hottest_line").into();
    }
    out
}

pub const CALLERS: Tool = Tool {
    name: "callers",
    description: "Callers of a function, or callees. function: an id, a name, or a regular expression. percent: of the function's total.",
    is_read_only: true,
    arguments: || {
        (
            with_rows(json!({
                "profile": text(), "function": text(),
                "direction": {"enum": DIRECTIONS}, "value": text(),
            })),
            &["profile", "function"],
        )
    },
    answer: AnswerText {
        keys: &["value", "functions"],
        rows: &["of", "id", "name", "place"],
    },
    run: |arguments, surroundings| {
        let file = file(arguments, "profile", surroundings.permission)?;
        let function = arguments.needed_text("function")?;
        let direction = arguments.word("direction", DIRECTIONS)?.unwrap_or("callers");
        let value = arguments.text("value")?;
        let wanted = arguments.wanted()?;
        Ok(Box::new(move |permission, watch| {
            let mut words = words(["report", &file, "--json"]);
            words.push(format!("--{direction}={function}"));
            words.extend(page(wanted));
            words.extend(value.map(|value| format!("--value={value}")));
            let report = read(&words, permission, watch)?.json()?;
            let groups = super::rows(&report, direction);
            let mut answer = about(&report);
            let named = groups.iter().take(GROUPS).map(|group| {
                let mut of = named(group);
                of["total"] = count(group, "total").into();
                of
            });
            answer.insert("functions".into(), named.collect());
            answer.insert("command".into(), command_line(&words).into());
            let calls = groups.iter().flat_map(|group| {
                super::rows(group, "calls").iter().map(move |row| {
                    let mut call = named_call(group, row);
                    call["percent"] = percent(count(row, "total"), count(group, "total"));
                    call
                })
            });
            let rows = Rows {
                rows: calls.collect(),
                skipped: wanted.skipped,
                total: count(&report, "total_rows"),
            };
            Ok(answer::with_rows(answer, rows, wanted.max_bytes))
        }))
    },
};

const DIRECTIONS: &[&str] = &["callers", "callees"];

/// Identifier, name and place of a function.
fn named(row: &Value) -> Value {
    let known = FUNCTION.iter().filter(|key| row.get(**key).is_some());
    Value::Object(known.map(|key| (key.to_string(), data_of(row, key).into())).collect())
}

fn named_call(group: &Value, row: &Value) -> Value {
    let mut call = named(row);
    call["of"] = data_of(group, "id").into();
    call["self"] = count(row, "self").into();
    call["total"] = count(row, "total").into();
    call
}

pub const SOURCE: Tool = Tool {
    name: "source",
    description: "Lines of a function or file, hottest first. function: an id, a name, or the end of a path. Text of files below the root \
                  directory only.",
    is_read_only: true,
    arguments: || {
        (
            with_rows(json!({"profile": text(), "function": text(), "value": text()})),
            &["profile", "function"],
        )
    },
    answer: AnswerText {
        keys: &["value", "files"],
        rows: &["source"],
    },
    run: |arguments, surroundings| {
        let file = file(arguments, "profile", surroundings.permission)?;
        let function = arguments.needed_text("function")?;
        let value = arguments.text("value")?;
        let wanted = arguments.wanted()?;
        Ok(Box::new(move |permission, watch| {
            let mut words = words(["report", &file, "--json"]);
            words.push(format!("--source={function}"));
            words.extend(value.map(|value| format!("--value={value}")));
            let report = read(&words, permission, watch)?.json()?;
            let mut lines: Vec<&Value> = super::rows(&report, "source")
                .iter()
                .filter(|line| count(line, "total") > 0)
                .collect();
            lines.sort_by_key(|line| std::cmp::Reverse(count(line, "total")));
            let mut files: Vec<(&str, bool)> = Vec::new();
            for line in &lines {
                let path = line.get("file").and_then(Value::as_str).unwrap_or_default();
                if !files.iter().any(|(known, _)| *known == path) {
                    files.push((path, permission.may_quote(path)));
                }
            }
            let whole = count(&report, "samples");
            let mut answer = about(&report);
            answer.insert(
                "files".into(),
                files
                    .iter()
                    .take(GROUPS)
                    .map(|(path, _)| Value::from(data(path)))
                    .collect(),
            );
            answer.insert("command".into(), command_line(&words).into());
            let row = |line: &&Value| {
                let path = line.get("file").and_then(Value::as_str).unwrap_or_default();
                let at = files.iter().position(|(known, _)| *known == path);
                let mut row = json!({
                    "line": count(line, "line"),
                    "self_percent": percent(count(line, "self"), whole),
                    "total_percent": percent(count(line, "total"), whole),
                });
                if line.get("source").is_some_and(Value::is_string)
                    && let Some((_, true)) = at.and_then(|at| files.get(at))
                {
                    row["source"] = data_of(line, "source").into();
                }
                if files.len() > 1 {
                    row["file"] = at.into();
                }
                row
            };
            let rows = Rows {
                rows: lines.iter().skip(wanted.skipped as usize).map(row).collect(),
                skipped: wanted.skipped,
                total: lines.len() as u64,
            };
            Ok(answer::with_rows(answer, rows, wanted.max_bytes))
        }))
    },
};

pub const WAITS: Tool = Tool {
    name: "waits",
    description: "Where threads waited, in a profile of mode wall or off-cpu. kind: gil (with who held it), lock, sleep, read, ...",
    is_read_only: true,
    arguments: || (with_rows(json!({"profile": text(), "kind": text()})), &["profile"]),
    answer: AnswerText {
        keys: &["value", "holders"],
        rows: &["kind", "object", "site"],
    },
    run: |arguments, surroundings| {
        let file = file(arguments, "profile", surroundings.permission)?;
        let kind = arguments.text("kind")?;
        let wanted = arguments.wanted()?;
        Ok(Box::new(move |permission, watch| {
            let mut words = words(["report", &file, "--waits", "--json"]);
            words.extend(kind.as_ref().map(|kind| format!("--kind={kind}")));
            if kind.is_none() {
                words.extend(page(wanted));
            }
            let report = read(&words, permission, watch)?.json()?;
            let gil = report.get("gil");
            // Of waits for the interpreter lock there are four lists, which are not cut.
            let (sites, total) = match gil {
                Some(gil) => (super::rows(gil, "sites"), super::rows(gil, "sites").len() as u64),
                None => (super::rows(&report, "waits"), count(&report, "total_rows")),
            };
            let skipped = if kind.is_some() { wanted.skipped as usize } else { 0 };
            let seconds = |value: &Value, key: &str| rounded(count(value, key) as f64 * 1e-9);
            let milliseconds = |value: &Value, key: &str| rounded(count(value, key) as f64 * 1e-6);
            let mut answer = about(&report);
            if let Some(gil) = gil {
                let holders = super::rows(gil, "functions").iter().take(GROUPS).map(|holder| {
                    json!({
                        "function": data_of(holder, "function"),
                        "held_seconds": seconds(holder, "held_estimate_ns"),
                        "waited_for_seconds": seconds(holder, "waited_for_ns"),
                    })
                });
                answer.insert("holders".into(), holders.collect());
            }
            answer.insert("command".into(), command_line(&words).into());
            let row = |site: &Value| {
                json!({
                    "kind": data_of(site, "kind"),
                    "object": data_of(site, "object"),
                    "site": data_of(site, "site"),
                    "total_seconds": seconds(site, "total_ns"),
                    "count": rounded(site.get("count").and_then(Value::as_f64).unwrap_or(0.0)),
                    "p50_ms": milliseconds(site, "p50_ns"),
                    "p99_ms": milliseconds(site, "p99_ns"),
                    "max_ms": milliseconds(site, "max_ns"),
                })
            };
            let rows = Rows {
                rows: sites.iter().skip(skipped).map(row).collect(),
                skipped: wanted.skipped,
                total,
            };
            Ok(answer::with_rows(answer, rows, wanted.max_bytes))
        }))
    },
};

pub const DIFF: Tool = Tool {
    name: "diff",
    description: "What changed significantly between two profiles, with joint intervals. normalize: share (of all samples), rate (servers), \
                  time (same work from start to end). makes_up: only because others changed.",
    is_read_only: true,
    arguments: || {
        (
            with_rows(json!({
                "before": text(), "after": text(), "normalize": {"enum": NORMALIZATIONS},
                "self": {"type": "boolean"}, "all": {"type": "boolean", "description": "also insignificant changes"},
                "value": text(),
            })),
            &["before", "after"],
        )
    },
    answer: AnswerText {
        keys: &["unit", "question"],
        rows: FUNCTION,
    },
    run: |arguments, surroundings| {
        let before = file(arguments, "before", surroundings.permission)?;
        let after = file(arguments, "after", surroundings.permission)?;
        let normalize = arguments.word("normalize", NORMALIZATIONS)?;
        let (is_self, is_all) = (arguments.flag("self")?, arguments.flag("all")?);
        let value = arguments.text("value")?;
        let wanted = arguments.wanted()?;
        Ok(Box::new(move |permission, watch| {
            let mut words = words(["diff", &before, &after, "--json"]);
            words.extend(page(wanted));
            words.extend(normalize.iter().flat_map(|by| super::words(["--normalize", by])));
            words.extend(is_self.then(|| "--self".into()));
            words.extend(is_all.then(|| "--all".into()));
            words.extend(value.map(|value| format!("--value={value}")));
            let diff = read(&words, permission, watch)?.json()?;
            let mut answer = Map::new();
            answer.insert("unit".into(), data_of(&diff, "unit").into());
            answer.insert("question".into(), data_of(&diff, "question").into());
            answer.insert("confidence".into(), diff.get("confidence").cloned().unwrap_or(json!(0)));
            for key in ["tested", "significant"] {
                answer.insert(key.into(), count(&diff, key).into());
            }
            answer.insert("samples".into(), diff.get("samples").cloned().unwrap_or(json!([])));
            if let Some(all) = diff.get("all").filter(|all| all.is_object()) {
                answer.insert("all".into(), change(all));
            }
            answer.insert("command".into(), command_line(&words).into());
            let row = |row: &Value| {
                let mut out = named(row);
                if let (Value::Object(out), Value::Object(change)) = (&mut out, change(row)) {
                    out.extend(change);
                }
                out
            };
            let rows = Rows {
                rows: super::rows(&diff, "rows").iter().map(row).collect(),
                skipped: wanted.skipped,
                total: count(&diff, "total_rows"),
            };
            Ok(answer::with_rows(answer, rows, wanted.max_bytes))
        }))
    },
};

const NORMALIZATIONS: &[&str] = &["share", "rate", "time"];

/// Amounts before and after, and the interval of the change.
fn change(row: &Value) -> Value {
    let number = |key: &str| rounded(row.get(key).and_then(Value::as_f64).unwrap_or(0.0));
    let mut out = json!({"before": number("before"), "after": number("after"), "change": number("change")});
    if let Some(interval) = scaled(row.get("interval"), 1.0) {
        out["interval"] = interval;
    }
    out["significant"] = (row.get("significant") == Some(&true.into())).into();
    if row.get("makes_up") == Some(&true.into()) {
        out["makes_up"] = true.into();
    }
    out
}
