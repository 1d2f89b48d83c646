//! The tools: what each is called, takes, answers and does.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::answer::{data, rounded};
use super::arguments::{Arguments, Wanted};
use super::permission::Permission;
use crate::error::Result;
use crate::process::rerun::{self, Finished, Watch};

mod live;
mod processes;
mod profiles;
mod reports;

/// Longest time that a command may read a profile.
const READING: Duration = Duration::from_secs(120);

/// A tool.
pub struct Tool {
    pub name: &'static str,
    description: &'static str,
    /// It does not record: nothing is written or started.
    is_read_only: bool,
    /// Properties of its arguments, and the names of those that are needed.
    arguments: fn() -> (Value, &'static [&'static str]),
    answer: AnswerText,
    run: fn(&mut Arguments, &Surroundings<'_>) -> Result<Call>,
}

/// Where an answer has text of programs and files: the schema describes what is under these keys as data, and nothing else is
/// text. It says no more, since clients send the list of tools with each turn of a conversation.
struct AnswerText {
    /// Keys of the answer, except `command`.
    keys: &'static [&'static str],
    /// Keys of its rows.
    rows: &'static [&'static str],
}

/// What a tool works with.
pub struct Surroundings<'a> {
    pub permission: &'a Permission,
    /// Set while a recording runs.
    pub is_recording: &'a AtomicBool,
}

/// A request whose arguments are checked: what there is left to do.
type Call = Box<dyn FnOnce(&Permission, &Watch<'_>) -> Result<Value> + Send>;

/// All tools, in the order in which clients are told.
pub const ALL: &[Tool] = &[
    profiles::PROFILES,
    live::RECORD,
    live::ATTACH,
    processes::DUMP,
    reports::REPORT,
    reports::CALLERS,
    reports::SOURCE,
    reports::WAITS,
    reports::DIFF,
    processes::DOCTOR,
];

impl Tool {
    /// The tool with a name.
    pub fn named(name: &str) -> Option<&'static Tool> {
        ALL.iter().find(|tool| tool.name == name)
    }

    /// Whether it records: one of these runs at a time.
    pub fn is_recording(&self) -> bool {
        !self.is_read_only
    }

    /// As clients list it.
    pub fn json(&self) -> Value {
        let (properties, needed) = (self.arguments)();
        let mut annotations = json!({"readOnlyHint": self.is_read_only});
        if !self.is_read_only {
            annotations["destructiveHint"] = false.into();
        }
        json!({
            "name": self.name,
            "description": self.description,
            "annotations": annotations,
            "inputSchema": {
                "type": "object",
                "properties": properties,
                "required": needed,
            },
            "outputSchema": self.answer.schema(),
        })
    }

    /// Checks arguments and permission.
    ///
    /// # Errors
    /// What is wrong with them, or not permitted.
    pub fn prepare(&self, arguments: Option<Value>, surroundings: &Surroundings<'_>) -> Result<Call> {
        let mut arguments = Arguments::of(arguments)?;
        let call = (self.run)(&mut arguments, surroundings)?;
        arguments.end()?;
        Ok(call)
    }
}

impl AnswerText {
    fn schema(&self) -> Value {
        let of = |keys: &str| {
            json!({
                "patternProperties": {(format!("^({keys})$")): {"description": "data"}},
                "additionalProperties": {"not": {"type": "string"}},
            })
        };
        let mut schema = of(&[&["command"], self.keys].concat().join("|"));
        schema["type"] = "object".into();
        schema["properties"] = json!({"rows": {"type": "array", "items": of(&self.rows.join("|"))}});
        schema["required"] = json!(["rows", "total_rows", "shown", "command"]);
        schema
    }
}

fn text() -> Value {
    json!({"type": "string"})
}

fn whole() -> Value {
    json!({"type": "integer"})
}

/// The properties of the arguments that choose rows, with those of a tool.
fn with_rows(properties: Value) -> Value {
    let mut properties = properties;
    if let Value::Object(all) = &mut properties {
        all.insert("cursor".into(), whole());
        all.insert("max_bytes".into(), whole());
    }
    properties
}

/// Runs a command that reads something.
fn read(words: &[String], permission: &Permission, watch: &Watch<'_>) -> Result<Finished> {
    rerun::run(words, permission.root(), READING, watch)
}

/// The file of a profile, as a word of a command that runs in the root directory.
fn file(arguments: &mut Arguments, name: &str, permission: &Permission) -> Result<String> {
    let path: PathBuf = permission.file(&arguments.needed_text(name)?)?;
    // A name that begins with a dash is no option.
    Ok(format!("./{}", path.to_string_lossy()))
}

/// A command line, as a user types it in the root directory.
fn command_line(words: &[String]) -> String {
    let quoted = words.iter().map(|word| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
        let word = data(word);
        if !word.is_empty() && word.chars().all(is_plain) {
            word
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    });
    let quoted: Vec<String> = quoted.collect();
    format!("nativeprof {}", quoted.join(" "))
}

/// Words of a command line.
fn words<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(String::from).into()
}

/// The options that choose rows. A row has 40 bytes at least, so that more than these are never shown.
fn page(wanted: Wanted) -> Vec<String> {
    let rows = (wanted.max_bytes / 40).max(1);
    words(["--limit", &rows.to_string(), "--cursor", &wanted.skipped.to_string()])
}

/// A number of the output of a command; 0 if it is missing.
fn count(value: &Value, key: &str) -> u64 {
    value.get(key).and_then(Value::as_u64).unwrap_or(0)
}

/// The elements of a list of the output.
fn rows<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// An interval of the output, times a factor.
fn scaled(value: Option<&Value>, factor: f64) -> Option<Value> {
    let ends: Option<Vec<Value>> = value?
        .as_array()?
        .iter()
        .map(|end| Some(rounded(end.as_f64()? * factor)))
        .collect();
    ends.filter(|ends| ends.len() == 2).map(Value::from)
}

/// What an answer says of a whole profile, from the JSON of a report.
fn about(report: &Value) -> Map<String, Value> {
    let quality = report.get("quality").unwrap_or(&Value::Null);
    let mut about = Map::new();
    about.insert(
        "value".into(),
        data(report.get("value").and_then(Value::as_str).unwrap_or_default()).into(),
    );
    about.insert("total".into(), count(report, "samples").into());
    about.insert(
        "seconds".into(),
        rounded(report.get("duration").and_then(Value::as_f64).unwrap_or(0.0)),
    );
    let quality = ["exact", "repaired", "partial", "lost"].map(|key| (key.to_string(), count(quality, key).into()));
    about.insert("quality".into(), Value::Object(Map::from_iter(quality)));
    about
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_tools_is_short() {
        let list: Vec<Value> = ALL.iter().map(Tool::json).collect();
        let size = Value::from(list).to_string().len();
        assert!(size <= 8192 - 64, "{size} bytes: the answer to tools/list has a frame");
    }

    #[test]
    fn commands_can_be_typed() {
        let words = words(["report", "./it's.json", "--callers", "id:0123456789ab"]);
        assert_eq!(
            command_line(&words),
            "nativeprof report './it'\\''s.json' --callers id:0123456789ab"
        );
    }
}
