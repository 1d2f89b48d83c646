//! What an answer may contain: text from programs and files is escaped and cut, and an answer has a size.

use serde_json::{Map, Value, json};

use crate::error::Error;
use crate::escape;

/// Characters of a text from a program or a file, at most.
const MAX_TEXT: usize = 200;

/// Text from a program or a file: a name, a path, a line of source. It is one line without invisible characters, which a person
/// would not see and a model would read.
pub fn data(text: &str) -> String {
    let visible: String = escape::line(text).chars().map(shown).collect();
    let mut characters = visible.chars();
    let cut: String = characters.by_ref().take(MAX_TEXT).collect();
    match characters.next() {
        None => cut,
        Some(_) => cut.chars().take(MAX_TEXT - 1).chain(['…']).collect(),
    }
}

/// A character that takes no room as a code that does.
fn shown(c: char) -> String {
    let is_invisible = matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}' | '\u{2800}'
        | '\u{3164}' | '\u{ffa0}' | '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{206f}' | '\u{fe00}'..='\u{fe0f}' | '\u{fff9}'..='\u{fffb}'
        | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}');
    if is_invisible {
        format!("\\u{{{:x}}}", u32::from(c))
    } else {
        c.to_string()
    }
}

/// The text under a key as [`data`]; empty if there is none.
pub fn data_of(value: &Value, key: &str) -> String {
    data(value.get(key).and_then(Value::as_str).unwrap_or_default())
}

/// A number with few digits: two behind the point, or three in all.
pub fn rounded(number: f64) -> Value {
    let factor = if number.abs() >= 1.0 || number == 0.0 {
        100.0
    } else {
        10f64.powf(2.0 - number.abs().log10().floor()).min(1e9)
    };
    json!((number * factor).round() / factor)
}

/// A part of an amount in percent.
pub fn percent(part: u64, whole: u64) -> Value {
    rounded(100.0 * part as f64 / whole.max(1) as f64)
}

/// Rows of an answer, with how many there are before and behind them.
pub struct Rows {
    pub rows: Vec<Value>,
    /// Rows before the first one.
    pub skipped: u64,
    /// All rows.
    pub total: u64,
}

/// The answer with as many rows as fit into so many bytes. It gets `rows`, `total_rows`, `shown` and, where more rows follow,
/// `next_cursor`.
pub fn with_rows(answer: Map<String, Value>, rows: Rows, max_bytes: usize) -> Value {
    let Rows {
        mut rows,
        skipped,
        total,
    } = rows;
    loop {
        let shown = rows.len() as u64;
        // A row that is too large for the answer is left out.
        let next = skipped.saturating_add(shown.max(u64::from(skipped < total)));
        let mut whole = answer.clone();
        whole.insert("total_rows".into(), total.into());
        whole.insert("shown".into(), shown.into());
        if next < total {
            whole.insert("next_cursor".into(), next.into());
        }
        let size = size(&Value::Object(whole.clone())) + r#","rows":[]"#.len();
        let fitting = rows.iter().scan(size, |sum, row| {
            *sum += self::size(row) + 1;
            (*sum <= max_bytes).then_some(())
        });
        let fitting = fitting.count();
        if fitting == rows.len() {
            whole.insert("rows".into(), rows.into());
            return Value::Object(whole);
        }
        rows.truncate(fitting);
    }
}

/// Bytes of a value as it is sent.
pub fn size(value: &Value) -> usize {
    value.to_string().len()
}

/// A refusal or failure as a client shows it to its model.
pub fn error(e: &Error) -> Value {
    json!({"error": data(&e.what), "why": data(&e.why), "try": data(&e.hint)})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_and_cut() {
        for (text, expected) in [
            ("f", "f"),
            ("größe 数", "größe 数"),
            ("a\nb\x1b[2J", "a\\x0ab\\x1b[2J"),
            ("\u{202e}x\u{200b}y\u{e0041}", "\\u{202e}x\\u{200b}y\\u{e0041}"),
        ] {
            assert_eq!(data(text), expected);
        }
        let long = data(&"\u{e0041}x".repeat(1000));
        assert_eq!(long.chars().count(), MAX_TEXT);
        assert!(long.ends_with('…'));
        assert_eq!(data(&"x".repeat(MAX_TEXT)).len(), MAX_TEXT);
    }

    #[test]
    fn answers_have_a_size() {
        for max in (80..2048).step_by(37) {
            let rows: Vec<Value> = (0..50)
                .map(|i| json!({"name": "数".repeat(i % 9), "line": i}))
                .collect();
            let rows = Rows {
                rows,
                skipped: 7,
                total: 100,
            };
            let answer = with_rows(Map::from_iter([("value".into(), "x".into())]), rows, max);
            let shown = answer["rows"].as_array().unwrap().len() as u64;
            assert!(size(&answer) <= max, "{max}: {answer}");
            assert_eq!(answer["shown"], shown);
            assert_eq!(answer["total_rows"], 100);
            assert_eq!(
                answer.get("next_cursor").and_then(Value::as_u64),
                Some(7 + shown.max(1))
            );
        }
    }

    #[test]
    fn numbers_have_few_digits() {
        for (number, expected) in [
            (0.0, "0.0"),
            (12.3456, "12.35"),
            (-0.012345, "-0.0123"),
            (1e-30, "0.0"),
            (123456.0, "123456.0"),
        ] {
            assert_eq!(rounded(number).to_string(), expected);
        }
    }
}
