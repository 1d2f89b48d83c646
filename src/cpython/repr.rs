//! Values of local variables, read from memory and formatted like Python's `repr`, for simple types. No code of the
//! target is run; depth, length and number of reads are bounded.

use std::fmt::Write as _;

use super::dict::KeysTable;
use super::object_layout::{LocalNames, ObjectLayout};
use super::strings;
use crate::cpython_layout::Layout;
use crate::process::memory::Memory;

/// Maximum number of variables read of one frame.
const MAX_LOCALS: u64 = 100;
/// Maximum number of items shown of a container.
const MAX_ITEMS: u64 = 8;
/// Maximum depth of nested containers.
const MAX_DEPTH: u32 = 3;
/// Maximum length of a `str` in code points, and of a `bytes` in bytes.
const MAX_TEXT: u64 = 120;
/// Maximum length of one value, characters.
const MAX_VALUE: usize = 400;
/// Maximum number of 30-bit digits of an integer.
const MAX_DIGITS: u64 = 64;
/// Maximum length of a type's name, bytes.
const MAX_TYPE: usize = 80;
/// Maximum number of slots of a keys table that are searched for items.
const MAX_SLOTS: usize = 4 * MAX_ITEMS as usize;

/// `Py_TPFLAGS_HEAPTYPE` and the flags of subclasses (Include/object.h, v3.6.15 to v3.15.0).
const HEAP_TYPE: u64 = 1 << 9;

/// Name and value of a local variable.
pub type LocalVariable = (String, String);

/// Reads values of a process whose thread is stopped.
pub struct ValueReader<'a> {
    pub memory: &'a dyn Memory,
    pub layout: &'a Layout,
    pub objects: &'a ObjectLayout,
    /// True once the time for reading is up.
    pub over: &'a dyn Fn() -> bool,
}

impl ValueReader<'_> {
    /// The variables of a frame that have a value. Ends early where memory cannot be read.
    pub fn locals(&self, frame: u64, code: u64) -> Vec<LocalVariable> {
        let mut out = Vec::new();
        let tuples = match self.objects.names {
            LocalNames::Three(variables, cells, free) => vec![variables, cells, free],
            LocalNames::One(all) => vec![all],
        };
        let mut slot = 0;
        for tuple in tuples {
            let Some((items, n)) = self.word(code, tuple).and_then(|t| self.tuple(t)) else {
                return out;
            };
            for i in 0..n {
                if slot >= MAX_LOCALS || (self.over)() {
                    return out;
                }
                out.extend(self.local(frame, slot, items.wrapping_add(8 * i)));
                slot += 1;
            }
        }
        out
    }

    /// The variable at a slot of the frame; the address of its name object is at `name`.
    fn local(&self, frame: u64, slot: u64, name: u64) -> Option<LocalVariable> {
        let at = frame.checked_add(u64::from(self.objects.frame_locals) + 8 * slot)?;
        let mut value = self.memory.u64(at)?;
        if self.objects.tagged {
            if value & 3 == 3 {
                let name = strings::read_str(self.memory, self.layout, self.memory.u64(name)?)?;
                return Some((name, (value as i64 >> 2).to_string()));
            }
            value &= !3;
        }
        (value != 0).then_some(())?;
        let name = strings::read_str(self.memory, self.layout, self.memory.u64(name)?)?;
        let (type_name, plain) = self.type_of(value)?;
        if plain && type_name == "cell" {
            value = self.word(value, self.objects.body)?;
            (value != 0).then_some(())?;
        }
        Some((name, self.show(value)))
    }

    /// A value as `repr` shows it, or `<type at 0x..>`.
    pub fn show(&self, at: u64) -> String {
        let mut out = String::new();
        self.value(at, 0, &mut out);
        if let Some((end, _)) = out.char_indices().nth(MAX_VALUE) {
            out.truncate(end);
            out.push_str("...");
        }
        out
    }

    pub(super) fn word(&self, at: u64, offset: u16) -> Option<u64> {
        self.memory.u64(at.checked_add(offset.into())?)
    }

    /// Name of an object's type, and whether it is a built-in type.
    pub(super) fn type_of(&self, at: u64) -> Option<(String, bool)> {
        let kind = self.word(at, self.objects.ob_type)?;
        let name = self.word(kind, self.objects.type_name)?;
        let mut raw = [0; MAX_TYPE];
        // A name may end right before an unmapped page.
        let room = (4096 - (name % 4096) as usize).min(MAX_TYPE);
        self.memory.read(name, &mut raw[..room]).then_some(())?;
        let end = raw.iter().position(|c| *c == 0).unwrap_or(MAX_TYPE);
        let flags = self.word(kind, self.objects.type_flags)?;
        Some((
            String::from_utf8_lossy(&raw[..end]).into_owned(),
            flags & HEAP_TYPE == 0,
        ))
    }

    fn value(&self, at: u64, depth: u32, out: &mut String) {
        let Some((name, plain)) = self.type_of(at) else {
            let _ = write!(out, "<unreadable at {at:#x}>");
            return;
        };
        let before = out.len();
        let done = match name.as_str() {
            _ if !plain || out.len() > MAX_VALUE => None,
            _ if (self.over)() => out.write_str("<not read: time limit>").ok(),
            "NoneType" => out.write_str("None").ok(),
            "ellipsis" => out.write_str("Ellipsis").ok(),
            "bool" => self.digits(at).and_then(|(_, d)| {
                let word = if d.is_empty() { "False" } else { "True" };
                out.write_str(word).ok()
            }),
            "int" => self.int(at, out),
            "float" => self
                .word(at, self.objects.body)
                .map(|bits| float(f64::from_bits(bits), out)),
            "str" => self.str(at, out),
            "bytes" => self.bytes(at, out),
            "tuple" | "list" | "dict" if depth >= MAX_DEPTH => None,
            "tuple" => self
                .tuple(at)
                .and_then(|items| self.items(items, depth, ("(", ")"), out)),
            "list" => self
                .list(at)
                .and_then(|items| self.items(items, depth, ("[", "]"), out)),
            "dict" => self.dict(at, depth, out),
            _ => None,
        };
        if done.is_none() {
            out.truncate(before);
            let _ = write!(out, "<{name} at {at:#x}>");
        }
    }

    /// Whether it is negative, and its 30-bit digits, lowest first; zero has none. `None` if unreadable or too long.
    pub(super) fn digits(&self, at: u64) -> Option<(bool, Vec<u32>)> {
        let (negative, n) = self.int_size(at)?;
        (n <= MAX_DIGITS).then_some(())?;
        let mut raw = vec![0; 4 * n as usize];
        let first = at.checked_add(u64::from(self.objects.body) + 8)?;
        self.memory.read(first, &mut raw).then_some(())?;
        let digit = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) & 0x3fff_ffff;
        Some((negative, raw.chunks_exact(4).map(digit).collect()))
    }

    fn int_size(&self, at: u64) -> Option<(bool, u64)> {
        let word = self.word(at, self.objects.body)?;
        Some(if self.objects.tagged_int {
            (word & 3 == 2, word >> 3)
        } else {
            ((word as i64) < 0, (word as i64).unsigned_abs())
        })
    }

    fn int(&self, at: u64, out: &mut String) -> Option<()> {
        let Some((negative, digits)) = self.digits(at) else {
            let (_, n) = self.int_size(at).filter(|(_, n)| *n > MAX_DIGITS)?;
            let _ = write!(
                out,
                "<int of {} to {} bits>",
                (n - 1).saturating_mul(30),
                n.saturating_mul(30)
            );
            return Some(());
        };
        if negative {
            out.push('-');
        }
        out.push_str(&decimal(digits));
        Some(())
    }

    fn str(&self, at: u64, out: &mut String) -> Option<()> {
        let (text, all) = strings::read_code_points(self.memory, self.layout, at, MAX_TEXT)?;
        quoted(&text, out);
        if all > MAX_TEXT {
            let _ = write!(out, "... ({all} characters)");
        }
        Some(())
    }

    fn bytes(&self, at: u64, out: &mut String) -> Option<()> {
        let all = self.word(at, self.layout.bytes_size)?;
        let mut raw = vec![0; all.min(MAX_TEXT) as usize];
        let data = at.checked_add(self.layout.bytes_data.into())?;
        self.memory.read(data, &mut raw).then_some(())?;
        let quote = if raw.contains(&b'\'') && !raw.contains(&b'"') {
            b'"'
        } else {
            b'\''
        };
        let _ = write!(out, "b{}", quote as char);
        for b in raw {
            let _ = match b {
                b'\n' => out.write_str("\\n"),
                b'\r' => out.write_str("\\r"),
                b'\t' => out.write_str("\\t"),
                b if b == quote || b == b'\\' => write!(out, "\\{}", b as char),
                b' '..=b'~' => out.write_char(b as char),
                _ => write!(out, "\\x{b:02x}"),
            };
        }
        out.push(quote as char);
        if all > MAX_TEXT {
            let _ = write!(out, "... ({all} bytes)");
        }
        Some(())
    }

    /// Address of the first item, and number of items.
    fn tuple(&self, at: u64) -> Option<(u64, u64)> {
        Some((
            at.checked_add(self.objects.tuple_items.into())?,
            self.word(at, self.objects.body)?,
        ))
    }

    fn list(&self, at: u64) -> Option<(u64, u64)> {
        Some((
            self.word(at, self.objects.list_items)?,
            self.word(at, self.objects.body)?,
        ))
    }

    fn items(&self, (first, n): (u64, u64), depth: u32, (open, close): (&str, &str), out: &mut String) -> Option<()> {
        out.push_str(open);
        for i in 0..n.min(MAX_ITEMS) {
            if i > 0 {
                out.push_str(", ");
            }
            let item = self.memory.u64(first.checked_add(8 * i)?)?;
            self.value(item, depth + 1, out);
        }
        if n > MAX_ITEMS {
            let _ = write!(out, ", ... {n} in all");
        } else if n == 1 && open == "(" {
            out.push(',');
        }
        out.push_str(close);
        Some(())
    }

    fn dict(&self, at: u64, depth: u32, out: &mut String) -> Option<()> {
        let used = self.word(at, self.objects.dict_used)?;
        let entries = KeysTable::of_dict(self.memory, self.objects, at)?.entries(self.memory, MAX_SLOTS)?;
        out.push('{');
        let shown = entries.len().min(MAX_ITEMS as usize);
        for (i, entry) in entries.into_iter().take(shown).enumerate() {
            if i > 0 {
                out.push_str(", ");
            }
            self.value(entry.key, depth + 1, out);
            out.push_str(": ");
            self.value(entry.value, depth + 1, out);
        }
        if used > shown as u64 {
            let _ = write!(out, "{}... {used} in all", if shown > 0 { ", " } else { "" });
        }
        out.push('}');
        Some(())
    }
}

/// Digits of 30 bits, lowest first, in decimal.
fn decimal(mut digits: Vec<u32>) -> String {
    let mut groups = Vec::new();
    while digits.iter().any(|d| *d != 0) {
        let mut rest = 0u64;
        for d in digits.iter_mut().rev() {
            let value = rest << 30 | u64::from(*d);
            *d = (value / 1_000_000_000) as u32;
            rest = value % 1_000_000_000;
        }
        groups.push(rest);
    }
    let mut out = groups.pop().unwrap_or(0).to_string();
    for group in groups.iter().rev() {
        let _ = write!(out, "{group:09}");
    }
    out
}

/// As Python writes them: the shortest digits that round-trip; an exponent below 1e-4 and from 1e16 on.
fn float(value: f64, out: &mut String) {
    if value.is_nan() {
        return out.push_str("nan");
    }
    if value.is_infinite() {
        return out.push_str(if value > 0.0 { "inf" } else { "-inf" });
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let _ = if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        write!(out, "{digits}e{sign}{:02}", exponent.abs())
    } else {
        write!(out, "{value:?}")
    };
}

/// With the quotes that `repr` chooses.
fn quoted(text: &[u32], out: &mut String) {
    let contains = |c: char| text.contains(&u32::from(c));
    let quote = if contains('\'') && !contains('"') { '"' } else { '\'' };
    out.push(quote);
    for point in text {
        let Some(c) = char::from_u32(*point) else {
            let _ = write!(out, "\\u{point:04x}"); // a lone surrogate
            continue;
        };
        let _ = match c {
            '\n' => out.write_str("\\n"),
            '\r' => out.write_str("\\r"),
            '\t' => out.write_str("\\t"),
            c if c == quote || c == '\\' => write!(out, "\\{c}"),
            c if c.is_control() && (c as u32) < 0x100 => write!(out, "\\x{:02x}", c as u32),
            c => out.write_char(c),
        };
    }
    out.push(quote);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_python_does() {
        let check = |digits: &[u32], expected: &str| assert_eq!(decimal(digits.to_vec()), expected);
        check(&[], "0");
        check(&[7], "7");
        check(&[0, 1], "1073741824");
        check(&[0x3fff_ffff, 0x3fff_ffff, 0xff], "295147905179352825855"); // 2 ** 68 - 1
        let check = |value: f64, expected: &str| {
            let mut out = String::new();
            float(value, &mut out);
            assert_eq!(out, expected);
        };
        check(1.0, "1.0");
        check(-0.0, "-0.0");
        check(0.1, "0.1");
        check(1e16, "1e+16");
        check(123456789012345.0, "123456789012345.0");
        check(0.0001, "0.0001");
        check(0.00001, "1e-05");
        check(-1.5e300, "-1.5e+300");
        check(f64::NEG_INFINITY, "-inf");
        check(f64::NAN, "nan");
    }

    #[test]
    fn strings_are_quoted_as_python_does() {
        let check = |text: &str, expected: &str| {
            let mut out = String::new();
            let points: Vec<u32> = text.chars().map(u32::from).collect();
            quoted(&points, &mut out);
            assert_eq!(out, expected);
        };
        check("plain", "'plain'");
        check("it's", "\"it's\"");
        check("'\"", "'\\'\"'");
        check("a\n\t\\\x1b\u{9b}", "'a\\n\\t\\\\\\x1b\\x9b'");
        check("é", "'é'");
        let mut out = String::new();
        quoted(&[0x2f, 0xdce9, 0x5c], &mut out);
        assert_eq!(out, r"'/\udce9\\'");
    }
}
