//! Reads Python's `marshal` data, as far as files of statistics have it: numbers, strings, tuples, lists, dictionaries
//! and references to values that came before.
//!
//! Every version of the format since Python 2.4 is read. Values are kept in one list and refer to each other by number,
//! so a value that is referred to a million times exists once. The input is not trusted: depth and number of values are
//! limited, and lengths are compared with what is left of the input before anything is allocated.
//!
//! Source: `Python/marshal.c` (`r_object`).

use std::borrow::Cow;

use super::PstatsError;
use crate::escape;

/// Number of a value.
pub type ValueId = u32;

/// Containers in each other; statistics need four.
const MAX_DEPTH: usize = 16;
/// Values of a file: 16 bytes each, and 4 more for each place where they are.
const MAX_VALUES: usize = 1 << 24;
/// Set in the type code of a value that a later reference may name.
const FLAG_REF: u8 = 0x80;

/// A value. Containers and strings are ranges: see [`MarshalValues::items`] and [`MarshalValues::text`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MarshalValue {
    /// `None`, `True`, `False` and `...`: no statistics have them.
    Constant,
    Integer {
        is_negative: bool,
        /// At most [`u64::MAX`], also if it was larger.
        magnitude: u64,
    },
    Float(f64),
    Text {
        start: u32,
        length: u32,
    },
    /// A tuple or a list.
    Sequence {
        start: u32,
        length: u32,
    },
    /// Keys and values in turn; `length` counts both.
    Dictionary {
        start: u32,
        length: u32,
    },
}

/// The values of an input.
pub struct MarshalValues<'a> {
    input: &'a [u8],
    at: usize,
    all: Vec<MarshalValue>,
    items: Vec<ValueId>,
    /// What references name by index; `None` while such a container is still being read.
    references: Vec<Option<ValueId>>,
    /// What the references of Python 2 to interned strings name.
    interned: Vec<ValueId>,
}

impl<'a> MarshalValues<'a> {
    /// For the values at the start of the input.
    pub fn new(input: &'a [u8]) -> MarshalValues<'a> {
        MarshalValues {
            input,
            at: 0,
            all: Vec::new(),
            items: Vec::new(),
            references: Vec::new(),
            interned: Vec::new(),
        }
    }

    /// Reads the next value, which begins where the last one ended. References of one value do not reach into another.
    ///
    /// # Errors
    /// The input is truncated, damaged, too large, or has a type that statistics do not have.
    pub fn read(&mut self) -> Result<ValueId, PstatsError> {
        self.references.clear();
        self.interned.clear();
        self.value(0)?.ok_or_else(|| self.error("no value where one must be"))
    }

    /// Byte of the input where the next value begins.
    pub fn position(&self) -> usize {
        self.at
    }

    /// The value of a number that came from here.
    pub fn get(&self, id: ValueId) -> MarshalValue {
        self.all.get(id as usize).copied().unwrap_or(MarshalValue::Constant)
    }

    /// What is in a container; nothing for other values.
    pub fn items(&self, value: MarshalValue) -> &[ValueId] {
        let (MarshalValue::Sequence { start, length } | MarshalValue::Dictionary { start, length }) = value else {
            return &[];
        };
        let start = start as usize;
        self.items.get(start..start + length as usize).unwrap_or_default()
    }

    /// A text; lone surrogates are spelled as by [`escape::name`]. (The files that `export` writes have them so already.) `None`
    /// for other values.
    pub fn text(&self, value: MarshalValue) -> Option<Cow<'a, str>> {
        let MarshalValue::Text { start, length } = value else {
            return None;
        };
        let start = start as usize;
        let bytes = self.input.get(start..start + length as usize)?;
        Some(match std::str::from_utf8(bytes) {
            Ok(text) => text.into(),
            Err(_) => escape::name_of_utf8(bytes).into(),
        })
    }

    /// An error at the place that was read last.
    fn error(&self, reason: impl Into<String>) -> PstatsError {
        PstatsError {
            at: self.at,
            reason: reason.into(),
        }
    }

    fn read_bytes(&mut self, length: usize) -> Result<&'a [u8], PstatsError> {
        let bytes = self.input.get(self.at..).and_then(|rest| rest.get(..length));
        let bytes = bytes.ok_or_else(|| self.error("the file is truncated"))?;
        self.at += length;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PstatsError> {
        let mut out = [0; N];
        out.copy_from_slice(self.read_bytes(N)?);
        Ok(out)
    }

    fn byte(&mut self) -> Result<u8, PstatsError> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn integer(&mut self) -> Result<i32, PstatsError> {
        self.array().map(i32::from_le_bytes)
    }

    /// A length in four bytes, of things that have at least a byte each.
    fn length(&mut self) -> Result<usize, PstatsError> {
        let length = self.integer()?;
        let left = self.input.len() - self.at;
        match usize::try_from(length) {
            Ok(length) if length <= left => Ok(length),
            Ok(_) => Err(self.error("the file is truncated")),
            Err(_) => Err(self.error("a negative length")),
        }
    }

    fn push(&mut self, value: MarshalValue) -> Result<ValueId, PstatsError> {
        if self.all.len() >= MAX_VALUES {
            return Err(self.error(format!("more than {MAX_VALUES} values")));
        }
        self.all.push(value);
        Ok(self.all.len() as ValueId - 1)
    }

    /// The next value; `None` for what ends a dictionary.
    fn value(&mut self, depth: usize) -> Result<Option<ValueId>, PstatsError> {
        if depth > MAX_DEPTH {
            return Err(self.error("values nested too deeply"));
        }
        let code = self.byte()?;
        let reference = (code & FLAG_REF != 0).then_some(self.references.len());
        if reference.is_some() {
            self.references.push(None);
        }
        let value = match code & !FLAG_REF {
            b'0' => return Ok(None),
            b'r' => return self.reference().map(Some),
            b'R' => {
                let index = self.integer()?;
                let known = usize::try_from(index).ok().and_then(|at| self.interned.get(at));
                return known.copied().map(Some).ok_or_else(|| self.invalid_reference());
            }
            b'N' | b'T' | b'F' | b'.' => MarshalValue::Constant,
            b'i' => integer(self.integer()?.into()),
            b'I' => integer(i64::from_le_bytes(self.array()?)),
            b'l' => self.long()?,
            b'g' => MarshalValue::Float(f64::from_le_bytes(self.array()?)),
            b'f' => self.float_as_text()?,
            b's' | b'u' | b't' | b'a' | b'A' => {
                let length = self.length()?;
                self.string(length)?
            }
            b'z' | b'Z' => {
                let length = self.byte()?;
                self.string(length.into())?
            }
            b'(' | b'[' => {
                let length = self.length()?;
                self.sequence(length, depth)?
            }
            b')' => {
                let length = self.byte()?;
                self.sequence(length.into(), depth)?
            }
            b'{' => self.dictionary(depth)?,
            other => {
                self.at -= 1;
                let shown = match other {
                    0x21..=0x7e => format!("`{}`", other as char),
                    _ => format!("{other:#04x}"),
                };
                return Err(self.error(format!("a value of a type that statistics do not have, {shown}")));
            }
        };
        let id = self.push(value)?;
        if let Some(slot) = reference.and_then(|at| self.references.get_mut(at)) {
            *slot = Some(id);
        }
        if code == b't' {
            self.interned.push(id);
        }
        Ok(Some(id))
    }

    fn reference(&mut self) -> Result<ValueId, PstatsError> {
        let index = self.integer()?;
        let known = usize::try_from(index).ok().and_then(|at| self.references.get(at));
        known.copied().flatten().ok_or_else(|| self.invalid_reference())
    }

    fn invalid_reference(&self) -> PstatsError {
        self.error("a reference to a value that does not exist")
    }

    /// Digits of 15 bits, lowest first; the sign is that of their number.
    fn long(&mut self) -> Result<MarshalValue, PstatsError> {
        let count = self.integer()?;
        let mut magnitude: u128 = 0;
        for at in 0..count.unsigned_abs() {
            let digit = u128::from(u16::from_le_bytes(self.array()?));
            // More than five digits are more than 64 bits, unless they are 0.
            match at {
                0..=6 => magnitude |= digit << (15 * at),
                _ if digit > 0 => magnitude = u128::MAX,
                _ => {}
            }
        }
        Ok(MarshalValue::Integer {
            is_negative: count < 0,
            magnitude: u64::try_from(magnitude).unwrap_or(u64::MAX),
        })
    }

    fn float_as_text(&mut self) -> Result<MarshalValue, PstatsError> {
        let length = self.byte()?;
        let text = self.read_bytes(length.into())?;
        let number = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
        number
            .map(MarshalValue::Float)
            .ok_or_else(|| self.error("text that is not a number"))
    }

    fn string(&mut self, length: usize) -> Result<MarshalValue, PstatsError> {
        let start = self.at;
        self.read_bytes(length)?;
        match (u32::try_from(start), u32::try_from(length)) {
            (Ok(start), Ok(length)) => Ok(MarshalValue::Text { start, length }),
            _ => Err(self.error("the file is too large")),
        }
    }

    fn sequence(&mut self, length: usize, depth: usize) -> Result<MarshalValue, PstatsError> {
        let mut items = Vec::new();
        for _ in 0..length {
            let item = self.value(depth + 1)?;
            items.push(item.ok_or_else(|| self.error("a tuple that ends too early"))?);
        }
        let (start, length) = self.range(&items)?;
        Ok(MarshalValue::Sequence { start, length })
    }

    fn dictionary(&mut self, depth: usize) -> Result<MarshalValue, PstatsError> {
        let mut items = Vec::new();
        while let Some(key) = self.value(depth + 1)? {
            let value = self.value(depth + 1)?;
            items.extend([key, value.ok_or_else(|| self.error("a key without a value"))?]);
        }
        let (start, length) = self.range(&items)?;
        Ok(MarshalValue::Dictionary { start, length })
    }

    /// Keeps the items of a container.
    fn range(&mut self, items: &[ValueId]) -> Result<(u32, u32), PstatsError> {
        let start = self.items.len();
        self.items.extend_from_slice(items);
        match (u32::try_from(start), u32::try_from(items.len())) {
            (Ok(start), Ok(length)) if u32::try_from(self.items.len()).is_ok() => Ok((start, length)),
            _ => Err(self.error("the file is too large")),
        }
    }
}

fn integer(number: i64) -> MarshalValue {
    MarshalValue::Integer {
        is_negative: number < 0,
        magnitude: number.unsigned_abs(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(input: &[u8]) -> Result<MarshalValue, PstatsError> {
        let mut values = MarshalValues::new(input);
        values.read().map(|id| values.get(id))
    }

    fn positive(magnitude: u64) -> MarshalValue {
        MarshalValue::Integer {
            is_negative: false,
            magnitude,
        }
    }

    #[test]
    fn numbers() {
        let minus_two = MarshalValue::Integer {
            is_negative: true,
            magnitude: 2,
        };
        for (input, expected) in [
            (&b"i\x07\0\0\0"[..], positive(7)),
            (b"i\xfe\xff\xff\xff", minus_two),
            (b"\xe9\x07\0\0\0", positive(7)),
            (b"I\0\0\0\0\x01\0\0\0", positive(1 << 32)),
            (b"l\x03\0\0\0\x01\0\0\0\x02\0", positive((2 << 30) + 1)),
            (b"l\xff\xff\xff\xff\x02\0", minus_two),
            (b"l\x06\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\0", positive(u64::MAX)),
            (b"g\0\0\0\0\0\0\xf8\x3f", MarshalValue::Float(1.5)),
            (b"f\x031.5", MarshalValue::Float(1.5)),
            (b"N", MarshalValue::Constant),
        ] {
            assert_eq!(read(input).unwrap(), expected, "{input:?}");
        }
    }

    #[test]
    fn texts_and_references() {
        // ("ab", <the same>, <the same as interned>), where Python 3 refers by the flag and Python 2 by interning.
        for input in [
            &b")\x03\xfa\x02abr\0\0\0\0u\x02\0\0\0ab"[..],
            b"(\x03\0\0\0t\x02\0\0\0abR\0\0\0\0s\x02\0\0\0ab",
            b"\xa9\x03\xe1\x02\0\0\0abr\x01\0\0\0\x41\x02\0\0\0ab",
        ] {
            let mut values = MarshalValues::new(input);
            let tuple = values.read().unwrap();
            let items = values.items(values.get(tuple)).to_vec();
            assert_eq!(items.len(), 3);
            assert_eq!(items[0], items[1], "one value: {input:?}");
            for item in items {
                assert_eq!(values.text(values.get(item)).unwrap(), "ab");
            }
            assert_eq!(values.position(), input.len());
        }
    }

    #[test]
    fn damaged_input_is_an_error() {
        let deep = [b")\x01".repeat(99), b"N".to_vec()].concat();
        for (input, reason) in [
            (&b""[..], "truncated"),
            (b"i\x01\0", "truncated"),
            (b"(\xff\xff\xff\x7f", "truncated"),
            (b"u\xff\xff\xff\xff", "negative length"),
            (b"l\xff\xff\xff\x7f\0\0", "truncated"),
            (b"r\0\0\0\0", "does not exist"),
            (b"r\xff\xff\xff\xff", "does not exist"),
            (b"R\0\0\0\0", "does not exist"),
            (b"\xa9\x01r\0\0\0\0", "does not exist"),
            (b"\xfbNr\0\0\0\x000", "does not exist"),
            (b"0", "no value"),
            (b")\x010", "ends too early"),
            (b"{N0", "key without a value"),
            (b"c", "`c`"),
            (b"\x01", "0x01"),
            (b"f\x02x.", "not a number"),
            (&deep, "too deeply"),
        ] {
            let e = read(input).unwrap_err();
            assert!(e.reason.contains(reason), "{input:?}: {e}");
        }
    }
}
