//! Lexer of the readers of JSON; copies only strings with escapes.

use std::borrow::Cow;

use serde_json::Value;

use super::JsonError;

/// A text of JSON, and how far it has been read.
pub(crate) struct Lexer<'a> {
    pub text: &'a str,
    pub at: usize,
}

/// What follows in an object or an array.
#[derive(Default)]
pub(crate) struct Members {
    is_open: bool,
}

impl<'a> Lexer<'a> {
    /// The lexer of a file.
    ///
    /// # Errors
    /// It is not UTF-8.
    pub fn new(bytes: &'a [u8]) -> Result<Lexer<'a>, JsonError> {
        let text = std::str::from_utf8(bytes).map_err(|e| JsonError {
            at: e.valid_up_to(),
            reason: "invalid UTF-8".into(),
        })?;
        Ok(Lexer { text, at: 0 })
    }

    /// The next key of an object, whose value is to be read then; `None` at its end.
    pub fn key(&mut self, members: &mut Members) -> Result<Option<Cow<'a, str>>, JsonError> {
        if !self.member(members, b'{', b'}')? {
            return Ok(None);
        }
        let key = self.string()?;
        self.expect_byte(b':')?;
        Ok(Some(key))
    }

    /// Whether an array has another item, which is to be read then.
    pub fn item(&mut self, members: &mut Members) -> Result<bool, JsonError> {
        self.member(members, b'[', b']')
    }

    fn member(&mut self, members: &mut Members, open: u8, close: u8) -> Result<bool, JsonError> {
        let is_first = !std::mem::replace(&mut members.is_open, true);
        if is_first {
            self.expect_byte(open)?;
        }
        if self.peek() == Some(close) {
            self.at += 1;
            return Ok(false);
        }
        if !is_first {
            self.expect_byte(b',')?;
        }
        Ok(true)
    }

    pub fn error(&self, reason: &str) -> JsonError {
        JsonError {
            at: self.at,
            reason: reason.to_string(),
        }
    }

    pub fn space(&mut self) {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest
            .iter()
            .take_while(|byte| matches!(byte, b' ' | b'\n' | b'\r' | b'\t'))
            .count();
    }

    pub fn peek(&mut self) -> Option<u8> {
        self.space();
        self.text.as_bytes().get(self.at).copied()
    }

    pub fn expect_byte(&mut self, byte: u8) -> Result<(), JsonError> {
        match self.peek() {
            Some(found) if found == byte => {
                self.at += 1;
                Ok(())
            }
            None if self.at > 0 => Err(self.error("the file ends early")),
            _ => Err(self.error(&format!("`{}` expected", byte as char))),
        }
    }

    pub fn string(&mut self) -> Result<Cow<'a, str>, JsonError> {
        if self.peek() == Some(b'"') {
            let rest = &self.text.as_bytes()[self.at + 1..];
            let plain = |byte: &u8| !matches!(byte, b'"' | b'\\' | 0..0x20);
            let end = rest.iter().position(|byte| !plain(byte));
            // Most have no escapes and are borrowed.
            if let Some(length) = end.filter(|end| rest[*end] == b'"') {
                let start = self.at + 1;
                self.at = start + length + 1;
                return Ok(Cow::Borrowed(&self.text[start..start + length]));
            }
        }
        match self.value()? {
            Value::String(text) => Ok(Cow::Owned(text)),
            _ => Err(self.error("text expected")),
        }
    }

    /// Reads an integer; `None` if the value is something else.
    pub fn integer(&mut self) -> Result<Option<u64>, JsonError> {
        self.space();
        let rest = &self.text.as_bytes()[self.at..];
        let length = rest.iter().take(20).take_while(|byte| byte.is_ascii_digit()).count();
        let ends = matches!(
            rest.get(length),
            Some(b',' | b'}' | b']' | b' ' | b'\n' | b'\r' | b'\t')
        );
        // Up to 19 digits always fit; other numbers are left to the JSON crate.
        if ends && (1..20).contains(&length) && (length == 1 || rest[0] != b'0') {
            self.at += length;
            return Ok(Some(
                rest[..length]
                    .iter()
                    .fold(0, |n, digit| 10 * n + u64::from(digit - b'0')),
            ));
        }
        Ok(self.value()?.as_u64())
    }

    /// Reads a number; `None` if the value is something else.
    pub fn number(&mut self) -> Result<Option<f64>, JsonError> {
        self.space();
        let rest = &self.text[self.at..];
        let is_part = |byte: u8| byte.is_ascii_digit() || matches!(byte, b'+' | b'-' | b'.' | b'e' | b'E');
        let length = rest.bytes().take_while(|byte| is_part(*byte)).count();
        match rest[..length].parse() {
            Ok(number) => {
                self.at += length;
                Ok(Some(number))
            }
            Err(_) => {
                self.skip_value()?;
                Ok(None)
            }
        }
    }

    /// A complete value outside of the tree: its extent is found first, then the JSON crate (which limits its depth)
    /// parses it.
    pub fn value(&mut self) -> Result<Value, JsonError> {
        self.space();
        let start = self.at;
        self.skip_value()?;
        serde_json::from_str(&self.text[start..self.at]).map_err(|error| JsonError {
            at: start,
            reason: format!("invalid JSON ({error})"),
        })
    }

    /// Skips a value of any depth. Only brackets and strings are examined.
    pub fn skip_value(&mut self) -> Result<(), JsonError> {
        let mut depth = 0usize;
        loop {
            match self.peek() {
                None => return Err(self.error("the file ends early")),
                Some(b'{' | b'[') => {
                    depth += 1;
                    self.at += 1;
                }
                Some(b'}' | b']') => {
                    depth = depth.checked_sub(1).ok_or_else(|| self.error("a value expected"))?;
                    self.at += 1;
                }
                Some(b'"') => self.skip_string()?,
                Some(b',' | b':') if depth > 0 => self.at += 1,
                Some(_) => {
                    let rest = &self.text.as_bytes()[self.at..];
                    let is_word = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.');
                    let length = rest.iter().take_while(|byte| is_word(byte)).count();
                    if length == 0 {
                        return Err(self.error("a value expected"));
                    }
                    self.at += length;
                }
            }
            if depth == 0 {
                return Ok(());
            }
        }
    }

    fn skip_string(&mut self) -> Result<(), JsonError> {
        let bytes = self.text.as_bytes();
        self.at += 1;
        loop {
            match bytes.get(self.at) {
                None => return Err(self.error("the file ends early")),
                Some(b'"') => break,
                Some(b'\\') => self.at += 2,
                Some(_) => self.at += 1,
            }
        }
        self.at += 1;
        Ok(())
    }
}
