//! Names of code that is in no file, from what JIT compilers write for profilers.
//!
//! Two files: perf maps (text, `tools/perf/Documentation/jit-interface.txt` in Linux) and jitdump files (binary,
//! `tools/perf/Documentation/jitdump-specification.txt`). Both only grow: what comes later in the file holds now.
//! Objects registered with the debugger interface ([`JitObject`]) are added to the same table.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, BufReader, Read, Seek};
use std::sync::Arc;

use crate::elf::{cstr_at, u32_at, u64_at};
use crate::{Error, ErrorKind, JitObject, Name, Symbol};

/// Maximum size of a perf map, bytes: some millions of functions.
const MAX_MAP: u64 = 256 << 20;
/// Maximum number of functions of one file; later ones are not read.
pub(crate) const MAX_FUNCTIONS: usize = 4 << 20;
/// Maximum length of a name; longer ones are truncated.
const MAX_NAME: usize = 4 << 10;
/// Maximum number of lines of all functions of a jitdump together.
const MAX_LINES: usize = 8 << 20;
/// Maximum size of the names of functions and source files of a jitdump together, bytes.
const MAX_TEXT: usize = 512 << 20;
/// Maximum size of a record with lines, bytes.
const MAX_DEBUG_INFO: u64 = 64 << 20;

/// Names of JIT code. Addresses are those of the running process.
#[derive(Default)]
pub struct JitCode {
    functions: Vec<JitFunction>,
    /// Start of a range -> its end and the index of the function. Ranges do not overlap.
    ranges: BTreeMap<u64, (u64, u32)>,
}

struct JitFunction {
    start: u64,
    size: u64,
    name: Arc<str>,
    /// Sorted by offset from the start: (offset, file, line).
    lines: Vec<(u32, Arc<str>, u32)>,
}

impl JitCode {
    /// Reads a perf map: lines `START SIZE NAME`, numbers in hexadecimal. Malformed lines are skipped.
    ///
    /// # Errors
    /// If it cannot be read. A map that is larger than 256 MiB is read up to there.
    pub fn from_perf_map(input: impl Read) -> io::Result<JitCode> {
        let mut text = Vec::new();
        input.take(MAX_MAP).read_to_end(&mut text)?;
        let mut code = JitCode::default();
        for line in text.split(|b| *b == b'\n').filter_map(perf_map_line) {
            let (start, size, name) = line;
            code.add(start, size, lossy(name), Vec::new());
        }
        Ok(code)
    }

    /// Reads a jitdump file. Code that moved is found at its new address. A file that ends within a record, as that of
    /// a running program may, is read up to there.
    ///
    /// # Errors
    /// If it is not a jitdump of this byte order, or cannot be read.
    pub fn from_jitdump(input: impl Read + Seek) -> Result<JitCode, Error> {
        let mut input = BufReader::with_capacity(64 << 10, input);
        let head = read_up_to(&mut input, 40).map_err(Error::io)?;
        let word = |at| u32_at(&head, at).unwrap_or(0);
        // "JiTD" as a number: the writer's byte order.
        if word(0) != 0x4a69_5444 {
            return Err(Error::new(ErrorKind::Corrupt, "not a jitdump file of this byte order"));
        }
        if head.len() < 40 || word(4) == 0 || word(8) < 40 {
            return Err(Error::new(
                ErrorKind::Corrupt,
                "the header of the jitdump file is damaged",
            ));
        }
        skip(&mut input, u64::from(word(8)) - 40).map_err(Error::io)?;
        let mut reader = JitDump::default();
        while reader.record(&mut input).map_err(Error::io)?.is_some() {}
        Ok(reader.code)
    }

    /// Adds the functions of an object that the program registered with the debugger interface.
    pub fn add_object(&mut self, object: &JitObject) {
        for (start, size, name) in &object.functions {
            self.add(*start, *size, name.clone(), Vec::new());
        }
    }

    /// The function that covers an address; of several the one added last.
    pub fn lookup(&self, avma: u64) -> Option<Symbol> {
        let (_, (end, index)) = self.ranges.range(..=avma).next_back()?;
        if avma >= *end {
            return None;
        }
        let f = self.functions.get(*index as usize)?;
        let after = f.lines.partition_point(|l| f.start.wrapping_add(l.0.into()) <= avma);
        let line = after.checked_sub(1).and_then(|i| f.lines.get(i));
        let name = Name::new(&f.name);
        Some(Symbol {
            name: name.display,
            raw: name.raw,
            start: f.start,
            size: f.size,
            file: line.map(|l| l.1.clone()),
            line: line.map(|l| l.2).filter(|l| *l != 0),
            inlined: false,
        })
    }

    /// How many functions were read.
    pub fn len(&self) -> usize {
        self.functions.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    fn add(&mut self, start: u64, size: u64, name: Arc<str>, lines: Vec<(u32, Arc<str>, u32)>) {
        if size == 0 || start.checked_add(size).is_none() || self.functions.len() >= MAX_FUNCTIONS {
            return;
        }
        let index = self.functions.len() as u32;
        self.functions.push(JitFunction {
            start,
            size,
            name,
            lines,
        });
        self.cover(start, start + size, index);
    }

    /// Assigns a range to a function, removing it from all others.
    fn cover(&mut self, start: u64, end: u64, index: u32) {
        // A range that begins earlier and overlaps keeps its outer parts.
        if let Some((&before, &(its_end, other))) = self.ranges.range(..start).next_back()
            && its_end > start
        {
            self.ranges.insert(before, (start, other));
            if its_end > end {
                self.ranges.insert(end, (its_end, other));
            }
        }
        while let Some((&inside, &(its_end, other))) = self.ranges.range(start..end).next() {
            self.ranges.remove(&inside);
            if its_end > end {
                self.ranges.insert(end, (its_end, other));
            }
        }
        self.ranges.insert(start, (end, index));
    }
}

fn perf_map_line(line: &[u8]) -> Option<(u64, u64, &[u8])> {
    let mut parts = line.splitn(3, |b| *b == b' ');
    let mut number = || {
        let digits = std::str::from_utf8(parts.next()?).ok()?;
        let digits = digits.strip_prefix("0x").unwrap_or(digits);
        // `from_str_radix` would accept a sign.
        digits.bytes().all(|b| b.is_ascii_hexdigit()).then_some(())?;
        u64::from_str_radix(digits, 16).ok()
    };
    let (start, size) = (number()?, number()?);
    let name = parts.next()?.trim_ascii();
    (!name.is_empty()).then_some((start, size, name))
}

pub(crate) fn lossy(name: &[u8]) -> Arc<str> {
    String::from_utf8_lossy(&name[..name.len().min(MAX_NAME)]).into()
}

/// State of reading one jitdump.
#[derive(Default)]
struct JitDump {
    code: JitCode,
    /// Functions by their number in the file.
    by_number: HashMap<u64, u32>,
    /// Lines of code that is to be loaded next, by its address.
    lines: HashMap<u64, Vec<(u32, Arc<str>, u32)>>,
    line_count: usize,
    text: usize,
}

impl JitDump {
    /// Reads one record; `None` at the end.
    fn record(&mut self, input: &mut BufReader<impl Read + Seek>) -> io::Result<Option<()>> {
        let head = read_up_to(input, 16)?;
        let (Some(kind), Some(size)) = (u32_at(&head, 0), u32_at(&head, 4)) else {
            return Ok(None);
        };
        let Some(body) = u64::from(size).checked_sub(16).filter(|_| head.len() == 16) else {
            return Ok(None);
        };
        // Of JIT_CODE_LOAD, only the fixed part and the name are read, not the code itself.
        let wanted = match kind {
            0 => body.min(40 + MAX_NAME as u64 + 1),
            1 => body.min(48),
            2 if body <= MAX_DEBUG_INFO => body,
            3 => return Ok(None),
            _ => 0,
        };
        let bytes = read_up_to(input, wanted)?;
        if (bytes.len() as u64) < wanted {
            return Ok(None);
        }
        // A damaged record is skipped; the next one is found by its size.
        let _ = match kind {
            0 => self.load(&bytes),
            1 => self.moved(&bytes),
            2 => self.debug_info(&bytes),
            _ => None,
        };
        skip(input, body - wanted)?;
        Ok(Some(()))
    }

    /// JIT_CODE_LOAD: pid, tid, vma, code_addr, code_size, code_index, name, code.
    fn load(&mut self, body: &[u8]) -> Option<()> {
        let (start, size, number) = (u64_at(body, 16)?, u64_at(body, 24)?, u64_at(body, 32)?);
        let rest = body.get(40..)?;
        let name = cstr_at(rest, 0, MAX_NAME).unwrap_or(&rest[..rest.len().min(MAX_NAME)]);
        self.pay(name.len())?;
        let lines = self.lines.remove(&start).unwrap_or_default();
        let index = self.code.functions.len() as u32;
        self.code.add(start, size, lossy(name), lines);
        if self.code.functions.len() as u32 > index {
            self.by_number.insert(number, index);
        }
        Some(())
    }

    /// JIT_CODE_MOVE: pid, tid, vma, old_code_addr, new_code_addr, code_size, code_index.
    fn moved(&mut self, body: &[u8]) -> Option<()> {
        let (to, size, number) = (u64_at(body, 24)?, u64_at(body, 32)?, u64_at(body, 40)?);
        let index = *self.by_number.get(&number)?;
        let end = to.checked_add(size).filter(|end| *end > to)?;
        let function = self.code.functions.get_mut(index as usize)?;
        let (from, its_end) = (function.start, function.start.saturating_add(function.size));
        (function.start, function.size) = (to, size);
        if let Some(&(end, i)) = self.code.ranges.get(&from)
            && i == index
            && end <= its_end
        {
            self.code.ranges.remove(&from);
        }
        self.code.cover(to, end, index);
        Some(())
    }

    /// JIT_CODE_DEBUG_INFO: code_addr, count, then for each: address, line, discriminator, name of the file. The
    /// one-byte name 0xff represents the previous name.
    fn debug_info(&mut self, body: &[u8]) -> Option<()> {
        let (start, count) = (u64_at(body, 0)?, u64_at(body, 8)?);
        let mut lines = Vec::new();
        let mut file: Option<Arc<str>> = None;
        let mut at = 16;
        for _ in 0..count {
            let (Some(address), Some(line)) = (u64_at(body, at), u32_at(body, at + 8)) else {
                break;
            };
            let Some(name) = cstr_at(body, at + 16, MAX_NAME) else {
                break;
            };
            at += 16 + name.len() + 1;
            self.line_count += 1;
            (self.line_count <= MAX_LINES).then_some(())?;
            if name != [0xff] && file.as_deref().is_none_or(|f| f.as_bytes() != name) {
                self.pay(name.len())?;
                file = Some(lossy(name));
            }
            if let (Some(file), Ok(offset)) = (&file, u32::try_from(address.wrapping_sub(start))) {
                lines.push((offset, file.clone(), line));
            }
        }
        lines.sort_by_key(|l| l.0);
        self.lines.insert(start, lines);
        Some(())
    }

    fn pay(&mut self, bytes: usize) -> Option<()> {
        self.text += bytes;
        (self.text <= MAX_TEXT).then_some(())
    }
}

fn read_up_to(input: &mut impl Read, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    input.take(len).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn skip(input: &mut BufReader<impl Read + Seek>, bytes: u64) -> io::Result<()> {
    input.seek_relative(bytes as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(code: &JitCode, at: u64) -> Option<(String, u64)> {
        code.lookup(at).map(|s| (s.name.to_string(), s.start))
    }

    #[test]
    fn perf_maps() {
        let text = b"1000 100 first\n0x2000 0x10 py::f:/a b.py\n\nnonsense\n3000 0 empty\n+10 1 sign\n\
            1040 20 inside\nffffffffffffffff 10 wraps\n4000 8 \n5000 8 \xff\n6000 10 cut";
        let code = JitCode::from_perf_map(&text[..]).expect("read");
        for (at, expected) in [
            (0xfff, None),
            (0x1000, Some(("first", 0x1000))),
            (0x103f, Some(("first", 0x1000))),
            (0x1040, Some(("inside", 0x1040))),
            (0x105f, Some(("inside", 0x1040))),
            (0x1060, Some(("first", 0x1000))),
            (0x1100, None),
            (0x200f, Some(("py::f:/a b.py", 0x2000))),
            (0x3000, None),
            (0x10, None),
            (u64::MAX, None),
            (0x4000, None),
            (0x5000, Some(("\u{fffd}", 0x5000))),
            (0x6000, Some(("cut", 0x6000))),
        ] {
            assert_eq!(found(&code, at), expected.map(|(n, s)| (n.to_string(), s)), "{at:#x}");
        }
        assert_eq!(code.len(), 5);
    }

    #[test]
    fn later_entries_replace_earlier_ones() {
        // Compared with a simple search of all functions for each address, the last first.
        let mut state = 7u64;
        let mut below = |n: u64| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        for _ in 0..200 {
            let all: Vec<(u64, u64)> = (0..12).map(|_| (below(60), 1 + below(20))).collect();
            let text: String = all.iter().map(|(s, n)| format!("{s:x} {n:x} f{s}_{n}\n")).collect();
            let code = JitCode::from_perf_map(text.as_bytes()).expect("read");
            for at in 0..90 {
                let expected = all.iter().rev().find(|(s, n)| *s <= at && at < s + n);
                let expected = expected.map(|(s, n)| (format!("f{s}_{n}"), *s));
                assert_eq!(found(&code, at), expected, "{at} in {text}");
            }
        }
    }

    fn record(kind: u32, words: &[u64], tail: &[u8]) -> Vec<u8> {
        let mut out = kind.to_le_bytes().to_vec();
        out.extend((16 + 8 * words.len() as u32 + tail.len() as u32).to_le_bytes());
        out.extend(99u64.to_le_bytes()); // time
        words.iter().for_each(|w| out.extend(w.to_le_bytes()));
        out.extend(tail);
        out
    }

    fn header() -> Vec<u8> {
        let words = [0x4a69_5444u32, 1, 40, 62, 0, 1234, 0, 0, 0, 0];
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    #[test]
    fn jitdumps() {
        let lines = [
            &0x1000u64.to_le_bytes()[..],
            &[7, 0, 0, 0, 0, 0, 0, 0],
            b"/a.js\0",
            &0x1008u64.to_le_bytes(),
            &[9, 0, 0, 0, 0, 0, 0, 0],
            b"\xff\0",
        ]
        .concat();
        let file = [
            header(),
            record(2, &[0x1000, 2], &lines),
            record(0, &[0, 0x1000, 0x1000, 16, 1], b"first\0CODECODECODECODE"),
            record(0, &[0, 0x2000, 0x2000, 16, 2], b"second\0CODECODECODECODE"),
            record(77, &[1, 2], b"unknown kind"),
            record(1, &[0, 0, 0x2000, 0x3000, 16, 2], b""),
            record(0, &[0, 0x4000, 0x4000, 16, 3], b"after\0"),
        ]
        .concat();
        let read = |file: &[u8]| JitCode::from_jitdump(io::Cursor::new(file.to_vec()));
        let code = read(&file).expect("read");
        assert_eq!(found(&code, 0x100f), Some(("first".into(), 0x1000)));
        let place = |at| code.lookup(at).map(|s| (s.file.map(|f| f.to_string()), s.line));
        assert_eq!(place(0x1007), Some((Some("/a.js".into()), Some(7))));
        assert_eq!(place(0x1008), Some((Some("/a.js".into()), Some(9))));
        assert_eq!(
            (found(&code, 0x2000), found(&code, 0x300f)),
            (None, Some(("second".into(), 0x3000)))
        );
        assert_eq!(found(&code, 0x4000), Some(("after".into(), 0x4000)));
        // Truncated anywhere, it still reads up to there.
        for len in 40..file.len() {
            assert!(read(&file[..len]).is_ok_and(|c| c.len() <= 3), "{len}");
        }
        for bad in [&b""[..], b"JiTD", b"DTiJ", &file[..39]] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
    }
}
