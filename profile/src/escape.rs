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

/// `text` for attributes and text of XML 1.0: as [`line()`], with the characters of markup as entities.
pub fn xml(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in line(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            c => out.push(c),
        }
    }
    out
}

/// `name` as code in one line or table cell of GitHub's Markdown: as [`line()`], and nothing in it is markup, a link, a
/// mention of a person, the end of the cell or a command of a log.
///
/// It is in backticks. There a `|` still ends a cell, and a backslash is none of its escapes; a name with these or a backtick is
/// an HTML element instead, with all punctuation as character references.
pub fn markdown_code(name: &str) -> String {
    let name = match line(name) {
        name if name.trim().is_empty() => "[unnamed]".into(),
        name => name,
    };
    let ends_in_space = name.starts_with(char::is_whitespace) || name.ends_with(char::is_whitespace);
    if !ends_in_space && !name.contains(['`', '|', '\\']) && !name.contains("##[") {
        return format!("`{name}`");
    }
    let mut out = "<code>".to_string();
    for c in name.chars() {
        if c.is_ascii_punctuation() {
            // Writing to a String does not fail.
            let _ = write!(out, "&#{};", c as u32);
        } else {
            out.push(c);
        }
    }
    out + "</code>"
}

/// Lines as a block of code in Markdown, with nothing in it as markup; each is escaped as by [`line()`].
pub fn markdown_block<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    let text: String = lines.map(|text| format!("{}\n", workflow_log(&line(text)))).collect();
    let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(3.max(longest + 1));
    format!("{fence}text\n{text}{fence}\n")
}

/// `text` as the message of a workflow command of GitHub Actions: as [`line()`], and `%` as `%25`. Lines of a message are to be
/// joined with `%0A`. (Decoded by src/Runner.Common/ActionCommand.cs of actions/runner, commit 079cdb1d05fe.)
pub fn workflow_message(text: &str) -> String {
    line(text).replace('%', "%25")
}

/// `text` as the value of a property of such a command, where `:` and `,` are `%3A` and `%2C`.
pub fn workflow_property(text: &str) -> String {
    workflow_message(text).replace(':', "%3A").replace(',', "%2C")
}

/// Text that GitHub Actions shows as a log, where it is to have no commands: its runner takes `##[` for one anywhere in a line.
pub fn workflow_log(text: &str) -> String {
    text.replace("##[", r"##\x5b")
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

/// The name that [`text()`], [`frame`] or [`last_frame`] has escaped. A text with a backslash that none of them writes is another
/// program's, and stays as it is.
pub fn unescaped(text: &str) -> Cow<'_, str> {
    let Some((plain, rest)) = text.split_once('\\') else {
        return Cow::Borrowed(text);
    };
    let mut out = plain.to_string();
    for escape in rest.split('\\') {
        let (digits, after) = match (escape.strip_prefix("u{"), escape.strip_prefix('x')) {
            (Some(rest), _) => rest.split_once('}').unwrap_or(("", "")),
            (None, Some(rest)) => rest.split_at_checked(2).unwrap_or(("", "")),
            (None, None) => ("", ""),
        };
        let is_hexadecimal = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        let code = u32::from_str_radix(digits, 16).ok().filter(|_| is_hexadecimal);
        let c = code.and_then(char::from_u32);
        let is_ours = |c: &char| matches!(c, ';' | '\\' | '#') || c.is_whitespace() || is_unprintable(*c);
        let Some(c) = c.filter(is_ours) else {
            return Cow::Borrowed(text);
        };
        out.push(c);
        out.push_str(after);
    }
    Cow::Owned(out)
}

/// A name of Python, from its code points, as a string of Unicode.
///
/// Python's strings may contain lone surrogates, which no UTF-8 has: it decodes a byte `0xe9` of a path that is not UTF-8 as
/// U+DCE9. They are written as `\udce9`, as by Python's error handler `backslashreplace`. Other names stay what they are, but
/// for those that would look the same: their backslash is written as `\x5c`. So different names stay different, and
/// [`name_bytes`] finds the bytes again.
pub fn name(points: impl IntoIterator<Item = u32>) -> String {
    let points: Vec<u32> = points.into_iter().collect();
    let mut out = String::with_capacity(points.len());
    for (at, point) in points.iter().enumerate() {
        let next = |c: &str| points.get(at + 1..).is_some_and(|rest| begins_with(rest, c));
        match char::from_u32(*point) {
            Some('\\') if next("x5c") || (next("ud") && surrogate(&points[at + 2..]).is_some()) => {
                out.push_str("\\x5c");
            }
            Some(c) => out.push(c),
            None if (0xd800..0xe000).contains(point) => {
                // Writing to a String does not fail.
                let _ = write!(out, "\\u{point:04x}");
            }
            None => out.push(char::REPLACEMENT_CHARACTER),
        }
    }
    out
}

fn begins_with(points: &[u32], text: &str) -> bool {
    points.len() >= text.len() && points.iter().zip(text.chars()).all(|(point, c)| *point == c as u32)
}

/// The surrogate whose four hexadecimal digits, as [`name`] writes them, are at the start.
fn surrogate(points: &[u32]) -> Option<u32> {
    let mut digits = points.get(..4)?.iter().map(|point| match char::from_u32(*point)? {
        c @ ('0'..='9' | 'a'..='f') => c.to_digit(16),
        _ => None,
    });
    let value = digits.try_fold(0, |value, digit| Some(value << 4 | digit?))?;
    (0xd800..0xe000).contains(&value).then_some(value)
}

/// As [`name`], for a text in Python's `utf-8` with `surrogatepass`. Other bytes that are not UTF-8 are taken for what Python's
/// `surrogateescape` makes of them.
pub fn name_of_utf8(bytes: &[u8]) -> String {
    let mut points = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while !rest.is_empty() {
        let valid = match std::str::from_utf8(rest) {
            Ok(text) => text,
            Err(error) => rest
                .get(..error.valid_up_to())
                .and_then(|valid| std::str::from_utf8(valid).ok())
                .unwrap_or_default(),
        };
        points.extend(valid.chars().map(u32::from));
        rest = rest.get(valid.len()..).unwrap_or_default();
        match *rest {
            [0xed, second @ 0xa0..=0xbf, third @ 0x80..=0xbf, ..] => {
                points.push(0xd000 | u32::from(second & 0x3f) << 6 | u32::from(third & 0x3f));
                rest = rest.get(3..).unwrap_or_default();
            }
            [byte, ..] => {
                points.push(0xdc00 | u32::from(byte));
                rest = rest.get(1..).unwrap_or_default();
            }
            [] => {}
        }
    }
    name(points)
}

/// The bytes of a path that [`name`] has written, as the file system has them (Python's `os.fsencode`).
pub fn name_bytes(name: &str) -> Vec<u8> {
    let points: Vec<u32> = name.chars().map(u32::from).collect();
    let mut out = Vec::with_capacity(name.len());
    let mut at = 0;
    while let Some(point) = points.get(at) {
        let rest = points.get(at + 1..).unwrap_or_default();
        if *point == u32::from('\\') && begins_with(rest, "x5c") {
            out.push(b'\\');
            at += 4;
        } else if *point == u32::from('\\')
            && begins_with(rest, "ud")
            && let Some(escaped @ 0xdc80..=0xdcff) = surrogate(&rest[1..])
        {
            out.push(escaped as u8);
            at += 6;
        } else {
            let c = char::from_u32(*point).unwrap_or(char::REPLACEMENT_CHARACTER);
            out.extend(c.encode_utf8(&mut [0; 4]).as_bytes());
            at += 1;
        }
    }
    out
}

/// Begins the mark of a name that was cut: see [`cut_name`].
const CUT: &str = "...[cut: ";

/// The start of a name that is too long to be kept, with what tells it from others: its length in code points, and a hash of
/// what was read of it.
pub fn cut_name(start: &str, length: u64, hash: u64) -> String {
    format!("{start}{CUT}{length} characters, hash {hash:016x}]")
}

/// Whether [`cut_name`] has written it.
pub fn is_cut(name: &str) -> bool {
    name.ends_with(']') && name.rfind(CUT).is_some_and(|at| name.len() - at < CUT.len() + 60)
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
            if !name.is_empty() {
                assert_eq!(unescaped(safe), name);
            }
        }
        for other in ["C:\\x41\\a.py", "\\", "\\x", "\\u{}", "\\u{41", "a\\x3b\\d", "\\x+3"] {
            assert_eq!(unescaped(other), other, "of another program");
        }
        assert_eq!(frame("worker 5"), "worker 5", "a count cannot follow");
    }

    #[test]
    fn names_stay_different_and_give_their_bytes_again() {
        fn points(text: &str) -> Vec<u32> {
            text.chars().map(u32::from).collect()
        }
        for (of, expected, bytes) in [
            (points("/café/größe.py"), "/café/größe.py", "/café/größe.py".as_bytes()),
            (
                points(r"/a\b\n\u1234\x5.py"),
                r"/a\b\n\u1234\x5.py",
                br"/a\b\n\u1234\x5.py",
            ),
            (vec![0x2f, 0xdce9, 0x2e], r"/\udce9.", b"/\xe9."),
            (vec![0x2f, 0xdce8, 0x2e], r"/\udce8.", b"/\xe8."),
            // What looks the same is not.
            (points(r"/\udce9."), r"/\x5cudce9.", br"/\udce9."),
            (points(r"/\x5cudce9."), r"/\x5cx5cudce9.", br"/\x5cudce9."),
            (vec![0x5c, 0xdce9], r"\\udce9", b"\\\xe9"),
            (points(r"\ud"), r"\ud", br"\ud"),
            (
                points(r"\uD8FF\ud7ff\udcgg\"),
                r"\uD8FF\ud7ff\udcgg\",
                br"\uD8FF\ud7ff\udcgg\",
            ),
            (vec![], "", b""),
        ] {
            let spelled = name(of.iter().copied());
            assert_eq!(spelled, expected);
            assert_eq!(name_bytes(&spelled), bytes, "{expected}");
            let with_surrogates = of.iter().flat_map(|point| match char::from_u32(*point) {
                Some(c) => c.to_string().into_bytes(),
                None => vec![0xed, 0xa0 | (point >> 6 & 0x1f) as u8, 0x80 | (point & 0x3f) as u8],
            });
            assert_eq!(name_of_utf8(&with_surrogates.collect::<Vec<_>>()), expected);
            if !expected.starts_with(r"\\") {
                assert_eq!(name_of_utf8(bytes), expected, "as the file system has it");
            }
        }
        assert_eq!(name([0xd800, 0xdfff, 0x0011_0000]), "\\ud800\\udfff\u{fffd}");
        // A surrogate in UTF-8 that is cut.
        assert_eq!(name_of_utf8(b"\xed\xb3"), r"\udced\udcb3");
        let cut = cut_name("abc", 5000, 0x1f);
        assert_eq!(cut, "abc...[cut: 5000 characters, hash 000000000000001f]");
        assert!(is_cut(&cut) && !is_cut("abc") && !is_cut("[cut: x]"));
    }

    #[test]
    fn names_for_ci() {
        for (name, of_xml, markdown, property) in [
            ("f", "f", "`f`", "f"),
            ("<module>", "&lt;module&gt;", "`<module>`", "<module>"),
            ("a|b", "a|b", "<code>a&#124;b</code>", "a|b"),
            ("a`b\\", "a`b\\", "<code>a&#96;b&#92;</code>", "a`b\\"),
            (
                "--> </details>",
                "--&gt; &lt;/details&gt;",
                "`--> </details>`",
                "--> </details>",
            ),
            (
                "]]>&amp;\"'",
                "]]&gt;&amp;amp;&quot;&apos;",
                "`]]>&amp;\"'`",
                "]]>&amp;\"'",
            ),
            ("\x1b[1m", "\\x1b[1m", "<code>&#92;x1b&#91;1m</code>", "\\x1b[1m"),
            (
                "a\nb\r",
                "a\\x0ab\\x0d",
                "<code>a&#92;x0ab&#92;x0d</code>",
                "a\\x0ab\\x0d",
            ),
            ("a::b,c=%0A", "a::b,c=%0A", "`a::b,c=%0A`", "a%3A%3Ab%2Cc=%250A"),
            (
                "##[error]x",
                "##[error]x",
                "<code>&#35;&#35;&#91;error&#93;x</code>",
                "##[error]x",
            ),
            (
                "\u{0}\u{b}\u{fffe}",
                "\\x00\\x0b\\u{fffe}",
                "<code>&#92;x00&#92;x0b&#92;u&#123;fffe&#125;</code>",
                "\\x00\\x0b\\u{fffe}",
            ),
            ("\\udce9", "\\udce9", "<code>&#92;udce9</code>", "\\udce9"),
            ("@user", "@user", "`@user`", "@user"),
            (" x ", " x ", "<code> x </code>", " x "),
            ("  ", "  ", "`[unnamed]`", "  "),
            ("größe 数", "größe 数", "`größe 数`", "größe 数"),
        ] {
            assert_eq!(xml(name), of_xml, "{name:?}");
            assert_eq!(markdown_code(name), markdown, "{name:?}");
            assert_eq!(workflow_property(name), property, "{name:?}");
        }
        assert_eq!(workflow_message("50 %\n::"), "50 %25\\x0a::");
        assert_eq!(workflow_log("a ##[error]b"), r"a ##\x5berror]b");
        for (text, block) in [
            ("a\nb", "```text\na\\x0ab\n```\n"),
            ("```", "````text\n```\n````\n"),
            ("x````` ` ##[y]", "``````text\nx````` ` ##\\x5by]\n``````\n"),
        ] {
            assert_eq!(markdown_block([text].into_iter()), block, "{text:?}");
        }
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
