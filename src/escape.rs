//! Names from a target, made safe for a line of text or a JSON string.
//!
//! Names are untrusted: they may contain newlines, terminal sequences, characters that reverse the direction of text,
//! or the end tag of the element they are embedded in.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};

/// Characters that must not reach a terminal, a line of text or an XML document unescaped: C0, DEL, C1, line
/// separators, characters that set the text direction, byte order marks and what XML forbids.
fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
            | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

fn push_escaped(out: &mut String, c: char) {
    // Writing to a String does not fail.
    let _ = match c as u32 {
        byte @ 0..=0xff => write!(out, "\\x{byte:02x}"),
        code => write!(out, "\\u{{{code:x}}}"),
    };
}

/// `text` with unprintable characters and backslashes as `\xHH` (up to U+00FF) or `\u{H…}`.
///
/// Reversible, since every backslash in the result begins such an escape.
pub fn text(text: &str) -> Cow<'_, str> {
    escaped(text, |_, c| c == '\\' || is_unprintable(c))
}

/// `text` for people, as one line on a terminal: as [`text`], but backslashes stay, so it is not reversible.
pub fn line(text: &str) -> Cow<'_, str> {
    escaped(text, |_, c| is_unprintable(c))
}

/// `name` as one frame of a collapsed stack: as [`text`], and also escapes `;`, space at either end and `#` at the
/// start (a line that begins with `# ` is taken for a comment). Empty names become `[unnamed]`.
///
/// Names that end in a space and a number are valid only if another frame follows, see [`last_frame`].
pub fn frame(name: &str) -> Cow<'_, str> {
    field(name, None)
}

/// As [`frame`], for one that may be the last of its line: the space before a number at the end is escaped too, since
/// tools take the number for a sample count.
pub fn last_frame(name: &str) -> Cow<'_, str> {
    field(
        name,
        name.rfind(' ')
            .filter(|at| name[at + 1..].bytes().all(|b| b.is_ascii_digit() || b == b'.')),
    )
}

fn field(name: &str, number: Option<usize>) -> Cow<'_, str> {
    if name.is_empty() {
        return Cow::Borrowed("[unnamed]");
    }
    let end = name.trim_end().len();
    let mut leading = true;
    escaped(name, move |at, c| {
        let space = c.is_whitespace();
        leading &= space;
        c == ';'
            || c == '\\'
            || (c == '#' && at == 0)
            || (space && (leading || at >= end || Some(at) == number))
            || is_unprintable(c)
    })
}

fn escaped(text: &str, mut unsafe_at: impl FnMut(usize, char) -> bool) -> Cow<'_, str> {
    let mut out = String::new();
    let mut copied = 0;
    for (at, c) in text.char_indices() {
        if unsafe_at(at, c) {
            out.push_str(&text[copied..at]);
            push_escaped(&mut out, c);
            copied = at + c.len_utf8();
        }
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    out.push_str(&text[copied..]);
    Cow::Owned(out)
}

/// Writes `text` as a JSON string that is also safe inside an HTML script element and on a terminal.
///
/// `</` becomes `<\/`; `<!` becomes `\u003c!`, because `<!--` lets a script element swallow its own end tag.
pub fn write_json(text: &str, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    out.write_all(b"\"")?;
    let bytes = text.as_bytes();
    let mut copied = 0;
    let mut at = 0;
    while at < bytes.len() {
        let next = bytes.get(at + 1);
        // Nearly all text is ASCII: decide by the byte, decode only what is not ASCII.
        let (length, escape): (usize, &[u8]) = match bytes[at] {
            b'"' => (1, b"\\\""),
            b'\\' => (1, b"\\\\"),
            b'\n' => (1, b"\\n"),
            b'\r' => (1, b"\\r"),
            b'\t' => (1, b"\\t"),
            b'<' if next == Some(&b'/') => (2, b"<\\/"),
            b'<' if next == Some(&b'!') => (2, b"\\u003c!"),
            0x20..=0x7e => {
                at += 1;
                continue;
            }
            _ => {
                let c = text[at..].chars().next().unwrap_or('\0');
                if is_unprintable(c) {
                    out.write_all(&bytes[copied..at])?;
                    // All of them are in the basic multilingual plane, so no surrogates are needed.
                    write!(out, "\\u{:04x}", c as u32)?;
                    copied = at + c.len_utf8();
                }
                at += c.len_utf8();
                continue;
            }
        };
        out.write_all(&bytes[copied..at])?;
        out.write_all(escape)?;
        at += length;
        copied = at;
    }
    out.write_all(&bytes[copied..])?;
    out.write_all(b"\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> String {
        let mut out = Vec::new();
        write_json(text, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn frames_stay_one_field_of_one_line() {
        for (name, safe) in [
            ("plain", "plain"),
            ("std::vec<int, a>::f() const", "std::vec<int, a>::f() const"),
            ("a;b", "a\\x3bb"),
            ("a\nb\r\x1b[0m", "a\\x0ab\\x0d\\x1b[0m"),
            ("\\x3b", "\\x5cx3b"),
            ("\u{7f}\u{85}\u{9b}", "\\x7f\\x85\\x9b"),
            ("\u{202e}cod.exe", "\\u{202e}cod.exe"),
            ("a\u{2028}b", "a\\u{2028}b"),
            ("worker 5", "worker\\x205"),
            ("a b 1.5", "a b\\x201.5"),
            ("# note", "\\x23 note"),
            ("a#b", "a#b"),
            ("  a  ", "\\x20\\x20a\\x20\\x20"),
            ("\u{3000}a", "\\u{3000}a"),
            ("   ", "\\x20\\x20\\x20"),
            ("", "[unnamed]"),
            ("größe 数", "größe 数"),
        ] {
            assert_eq!(last_frame(name), safe);
        }
        assert_eq!(frame("worker 5"), "worker 5", "a count cannot follow");
    }

    #[test]
    fn lines_for_people() {
        assert_eq!(
            line("a\\b \x1b]0;x\x07\n\u{202e}é"),
            "a\\b \\x1b]0;x\\x07\\x0a\\u{202e}é"
        );
    }

    #[test]
    fn every_character_survives_or_is_escaped() {
        for c in (0..=0x10ffff).filter_map(char::from_u32) {
            let name = format!("a{c}b");
            let safe = frame(&name);
            assert!(*safe == name || safe.starts_with("a\\"), "{c:?}");
            assert!(!safe.contains(|c: char| c == ';' || is_unprintable(c)));
            assert_eq!(serde_json::from_str::<String>(&json(&name)).unwrap(), name);
        }
    }

    #[test]
    fn json_strings_cannot_leave_a_script_element() {
        assert_eq!(json("</script><!--<script>"), r#""<\/script>\u003c!--<script>""#);
        assert_eq!(json("<low-level>"), r#""<low-level>""#);
        assert_eq!(json("a\"\\\n\x01\u{7f}\u{202e}é"), r#""a\"\\\n\u0001\u007f\u202eé""#);
        assert_eq!(json("<<//!<"), r#""<<\//!<""#);
    }
}
