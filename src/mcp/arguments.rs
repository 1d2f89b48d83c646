//! Arguments of a tool, taken one by one: what is left is not known.

use serde_json::{Map, Value};

use crate::error::{Error, ErrorKind, Result};
use crate::event::Pid;

use super::answer::data;

/// Bytes of all arguments, and of one text, at most.
const MAX_ARGUMENTS: usize = 64 << 10;
const MAX_TEXT: usize = 4096;
/// Elements of a list, at most.
const MAX_LIST: usize = 256;
/// Bytes of an answer.
const BYTES: (u64, u64, u64) = (1024, 2048, 16384);

pub struct Arguments(Map<String, Value>);

/// Which rows a client wants, and in how many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub skipped: u64,
    pub max_bytes: usize,
}

fn refused(name: &str, why: impl Into<String>) -> Error {
    Error::new(ErrorKind::Usage, format!("invalid argument `{}`", data(name)))
        .why(why)
        .hint("see the tool's inputSchema")
}

fn missing(name: &str) -> Error {
    refused(name, "it is missing")
}

impl Arguments {
    /// Of a request to call a tool.
    ///
    /// # Errors
    /// `Usage` if they are no object, or too large.
    pub fn of(value: Option<Value>) -> Result<Arguments> {
        match value {
            None | Some(Value::Null) => Ok(Arguments(Map::new())),
            Some(value) if value.to_string().len() > MAX_ARGUMENTS => {
                Err(refused("arguments", "they are larger than 64 KiB"))
            }
            Some(Value::Object(all)) => Ok(Arguments(all)),
            Some(_) => Err(refused("arguments", "they have to be an object")),
        }
    }

    /// A text.
    ///
    /// # Errors
    /// `Usage` if it is something else, empty, or too long.
    pub fn text(&mut self, name: &str) -> Result<Option<String>> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) if !text.is_empty() && text.len() <= MAX_TEXT && !text.contains('\0') => {
                Ok(Some(text))
            }
            Some(_) => Err(refused(name, "a text of 1 to 4096 bytes is expected")),
        }
    }

    /// A text that is needed.
    ///
    /// # Errors
    /// `Usage` if it is missing or not one.
    pub fn needed_text(&mut self, name: &str) -> Result<String> {
        self.text(name)?.ok_or_else(|| missing(name))
    }

    /// One of these words.
    ///
    /// # Errors
    /// `Usage` if it is another one.
    pub fn word(&mut self, name: &str, known: &[&'static str]) -> Result<Option<&'static str>> {
        let Some(text) = self.text(name)? else {
            return Ok(None);
        };
        let word = known.iter().find(|word| **word == text);
        word.copied()
            .map(Some)
            .ok_or_else(|| refused(name, format!("expected: {}", known.join(", "))))
    }

    /// A whole number in a range.
    ///
    /// # Errors
    /// `Usage` if it is something else.
    pub fn number(&mut self, name: &str, least: u64, most: u64) -> Result<Option<u64>> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let number = value.as_u64().filter(|number| (least..=most).contains(number));
                number
                    .map(Some)
                    .ok_or_else(|| refused(name, format!("a whole number from {least} to {most} is expected")))
            }
        }
    }

    /// The number of a process, `pid`.
    ///
    /// # Errors
    /// `Usage` if it is something else.
    pub fn pid(&mut self) -> Result<Option<Pid>> {
        Ok(self.number("pid", 1, Pid::MAX.into())?.map(|pid| pid as Pid))
    }

    /// The same where it is needed.
    ///
    /// # Errors
    /// `Usage` if it is missing or something else.
    pub fn needed_pid(&mut self) -> Result<Pid> {
        self.pid()?.ok_or_else(|| missing("pid"))
    }

    /// Yes or no; no by default.
    ///
    /// # Errors
    /// `Usage` if it is something else.
    pub fn flag(&mut self, name: &str) -> Result<bool> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(is_set)) => Ok(is_set),
            Some(_) => Err(refused(name, "true or false is expected")),
        }
    }

    /// A list of texts with one at least.
    ///
    /// # Errors
    /// `Usage` if it is something else, or too long.
    pub fn texts(&mut self, name: &str) -> Result<Vec<String>> {
        let wrong = || refused(name, "a list of 1 to 256 texts is expected");
        let Some(Value::Array(list)) = self.0.remove(name) else {
            return Err(wrong());
        };
        if list.is_empty() || list.len() > MAX_LIST {
            return Err(wrong());
        }
        let text = |value: Value| match value {
            Value::String(text) if text.len() <= MAX_TEXT && !text.contains('\0') => Ok(text),
            _ => Err(wrong()),
        };
        list.into_iter().map(text).collect()
    }

    /// `cursor` and `max_bytes`.
    ///
    /// # Errors
    /// `Usage` if one of them is out of its range.
    pub fn wanted(&mut self) -> Result<Wanted> {
        let (least, usual, most) = BYTES;
        Ok(Wanted {
            skipped: self.number("cursor", 0, u32::MAX.into())?.unwrap_or(0),
            max_bytes: self.number("max_bytes", least, most)?.unwrap_or(usual) as usize,
        })
    }

    /// Checks that nothing is left.
    ///
    /// # Errors
    /// `Usage` with the name of an argument that no one has taken.
    pub fn end(self) -> Result<()> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => Err(refused(name, "the tool has no such argument")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arguments_are_checked() {
        let of = |value: Value| Arguments::of(Some(value)).unwrap();
        assert!(Arguments::of(Some(json!({"a": "x".repeat(1 << 20)}))).is_err());
        assert!(Arguments::of(Some(json!([1]))).is_err());
        assert!(of(json!({"a": 1})).end().is_err());
        assert!(Arguments::of(None).unwrap().end().is_ok());
        for wrong in [json!(1), json!(""), json!("x".repeat(5000)), json!("a\0"), json!(["a"])] {
            assert!(of(json!({"a": wrong})).needed_text("a").is_err());
        }
        for wrong in [json!(-1), json!(1.5), json!("1"), json!(11)] {
            assert!(of(json!({"a": wrong})).number("a", 0, 10).is_err());
        }
        assert_eq!(of(json!({"pid": u32::MAX})).pid().unwrap(), Some(u32::MAX));
        assert_eq!(of(json!({})).pid().unwrap(), None);
        assert_eq!(of(json!({})).needed_pid().unwrap_err().why, "it is missing");
        for wrong in [json!(0), json!(1u64 << 32), json!("1")] {
            assert!(of(json!({"pid": wrong})).pid().is_err());
        }
        for wrong in [json!([]), json!("a"), json!([1]), json!(vec!["a"; 300])] {
            assert!(of(json!({"a": wrong})).texts("a").is_err());
        }
        assert!(of(json!({"a": "b"})).word("a", &["c"]).is_err());
        assert!(of(json!({"max_bytes": 100_000})).wanted().is_err());
        assert_eq!(Arguments::of(None).unwrap().wanted().unwrap().max_bytes, 2048);
    }
}
