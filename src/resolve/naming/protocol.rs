//! Messages between this process and the one that reads names: a kind, a length, and so many bytes.
//!
//! The process that reads names is not trusted, since what it reads is not: its messages are limited in size, and each
//! of their numbers is checked.

use std::sync::Arc;

use crate::codec::{Decoder, Encoder};

/// Kinds of messages. To the process: a module with addresses, and answers to its questions.
pub const LOOK_UP: u8 = 1;
pub const FILE: u8 = 2;
pub const NO_FILE: u8 = 3;
pub const REFUSED: u8 = 4;
/// From the process: it has given up its privileges, and waits.
pub const READY: u8 = 8;
/// From the process: questions for a file by path, and for debug information by build ID; and the result.
pub const OPEN: u8 = 5;
pub const FETCH: u8 = 6;
pub const NAMES: u8 = 7;

/// Bytes before the contents: kind and length.
pub const HEADER: usize = 5;
/// Maximum length of a question.
pub const MAX_QUESTION: usize = 4 << 10;
/// Maximum length of a result, bytes.
pub const MAX_RESULT: usize = 256 << 20;
/// Maximum length of a message to the process: the addresses of all nodes of a tree.
pub const MAX_LOOK_UP: usize = 16 << 20;
/// Maximum length of a name, a path or a reason; longer ones are invalid.
const MAX_TEXT: usize = 64 << 10;

/// One function at an address: the real one, or one that was inlined into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedFrame {
    pub name: Arc<str>,
    /// The name in the file, for code of JIT compilers and for variables.
    pub raw: Option<Arc<str>>,
    /// Address of the real function: as looked up, svma or avma.
    pub start: u64,
    pub file: Option<Arc<str>>,
    /// 0 if it is not known.
    pub line: u32,
    pub inlined: bool,
}

impl From<symbolize::Symbol> for NamedFrame {
    fn from(s: symbolize::Symbol) -> NamedFrame {
        NamedFrame {
            name: s.name,
            raw: None,
            start: s.start,
            file: s.file,
            line: s.line.unwrap_or(0),
            inlined: s.inlined,
        }
    }
}

/// Names in one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModuleNames {
    /// For each address, innermost function first; empty if it has no name.
    pub found: Vec<Vec<NamedFrame>>,
    /// Where names come from, or why there are none, and what was missing: text for `ModuleMeta`.
    pub symbols_from: String,
    pub symbols_missing: String,
}

/// What is in a file, and which names of it are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileFormat {
    Elf,
    /// Names of code in memory, by avma.
    PerfMap,
    JitDump,
    /// An ELF file, for the names of variables.
    ElfVariables,
    /// An ELF file of which the DWARF is not read.
    ElfSymbols,
}

impl FileFormat {
    fn of(number: u8) -> Option<FileFormat> {
        [
            FileFormat::Elf,
            FileFormat::PerfMap,
            FileFormat::JitDump,
            FileFormat::ElfVariables,
            FileFormat::ElfSymbols,
        ]
        .into_iter()
        .find(|format| *format as u8 == number)
    }

    /// The same for all names of one file.
    pub fn of_file(self) -> FileFormat {
        match self {
            FileFormat::ElfVariables | FileFormat::ElfSymbols => FileFormat::Elf,
            other => other,
        }
    }
}

/// A question for the names in a file.
#[derive(Debug, PartialEq, Eq)]
pub struct LookUp {
    pub format: FileFormat,
    /// Number of the file among those that contain the same: the process keeps ELF files open.
    pub id: u32,
    /// Whether debug information may be requested by build ID.
    pub can_fetch: bool,
    /// Path as the target sees it.
    pub path: Vec<u8>,
    pub addresses: Vec<u64>,
}

/// The header of a message.
pub fn header(kind: u8, length: usize) -> [u8; HEADER] {
    let [a, b, c, d] = (length as u32).to_le_bytes();
    [kind, a, b, c, d]
}

/// Kind and length.
pub fn parse_header(bytes: [u8; HEADER]) -> (u8, usize) {
    let [kind, a, b, c, d] = bytes;
    (kind, u32::from_le_bytes([a, b, c, d]) as usize)
}

impl LookUp {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Encoder::default();
        out.u8(self.format as u8);
        out.u8(self.can_fetch.into());
        out.u32(self.id);
        put_text(&mut out, &self.path);
        out.words(&self.addresses);
        out.0
    }

    pub fn decode(bytes: &[u8]) -> Option<LookUp> {
        let mut input = Decoder(bytes);
        let (format, can_fetch) = (FileFormat::of(input.u8()?)?, input.u8()? != 0);
        let id = input.u32()?;
        let path = input.bytes_within(MAX_TEXT)?.to_vec();
        let addresses = input.list(8, Decoder::u64)?;
        input.is_empty().then_some(LookUp {
            format,
            id,
            can_fetch,
            path,
            addresses,
        })
    }
}

impl ModuleNames {
    /// No names at `count` addresses, for this reason.
    pub fn none(count: usize, why: &str) -> ModuleNames {
        ModuleNames {
            found: vec![Vec::new(); count],
            symbols_from: format!("none: {why}"),
            symbols_missing: String::new(),
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Encoder::default();
        let mut texts = TextsOut::default();
        for frames in &self.found {
            // The last ones: the function itself is among them.
            let frames = &frames[frames.len().saturating_sub(u16::MAX.into())..];
            out.u16(frames.len() as u16);
            for frame in frames {
                texts.put(&mut out, Some(&frame.name));
                texts.put(&mut out, frame.raw.as_deref());
                out.u64(frame.start);
                texts.put(&mut out, frame.file.as_deref());
                out.u32(frame.line);
                out.u8(frame.inlined.into());
            }
        }
        put_text(&mut out, self.symbols_from.as_bytes());
        put_text(&mut out, self.symbols_missing.as_bytes());
        out.0
    }

    /// The names of `count` addresses; `None` if the bytes are not valid.
    pub fn decode(bytes: &[u8], count: usize) -> Option<ModuleNames> {
        let mut input = Decoder(bytes);
        let mut texts: Vec<Arc<str>> = Vec::new();
        let mut found = Vec::with_capacity(count);
        for _ in 0..count {
            let mut frames = Vec::new();
            for _ in 0..input.u16()? {
                frames.push(NamedFrame {
                    name: get_shared(&mut input, &mut texts)??,
                    raw: get_shared(&mut input, &mut texts)?,
                    start: input.u64()?,
                    file: get_shared(&mut input, &mut texts)?,
                    line: input.u32()?,
                    inlined: input.u8()? != 0,
                });
            }
            // The last one is the function itself.
            let is_stack = frames.iter().rev().skip(1).all(|f| f.inlined) && frames.last().is_none_or(|f| !f.inlined);
            is_stack.then_some(())?;
            found.push(frames);
        }
        let [symbols_from, symbols_missing] = [get_text(&mut input)?, get_text(&mut input)?];
        input.is_empty().then_some(ModuleNames {
            found,
            symbols_from,
            symbols_missing,
        })
    }
}

/// Texts by number: each is sent once. 0 is none; a new number is followed by its text.
#[derive(Default)]
struct TextsOut<'a>(rustc_hash::FxHashMap<&'a str, u32>);

impl<'a> TextsOut<'a> {
    fn put(&mut self, out: &mut Encoder, text: Option<&'a str>) {
        let Some(text) = text else {
            return out.u32(0);
        };
        let next = self.0.len() as u32 + 1;
        let number = *self.0.entry(text).or_insert(next);
        out.u32(number);
        if number == next {
            put_text(out, text.as_bytes());
        }
    }
}

fn put_text(out: &mut Encoder, text: &[u8]) {
    out.bytes(&text[..text.len().min(MAX_TEXT)]);
}

/// A text of limited length; what is not UTF-8 in it is replaced.
fn get_text(input: &mut Decoder) -> Option<String> {
    Some(String::from_utf8_lossy(input.bytes_within(MAX_TEXT)?).into_owned())
}

/// A text by number, or none.
fn get_shared(input: &mut Decoder, known: &mut Vec<Arc<str>>) -> Option<Option<Arc<str>>> {
    let Some(index) = (input.u32()? as usize).checked_sub(1) else {
        return Some(None);
    };
    if index == known.len() {
        known.push(get_text(input)?.into());
    }
    Some(Some(known.get(index)?.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(name: &str, file: Option<&str>, inlined: bool) -> NamedFrame {
        NamedFrame {
            name: name.into(),
            raw: file.map(Into::into),
            start: 0x1234_5678_9abc,
            file: file.map(Into::into),
            line: 7,
            inlined,
        }
    }

    fn names() -> ModuleNames {
        ModuleNames {
            found: vec![
                vec![frame("in", Some("a.h"), true), frame("f", Some("a.c"), false)],
                vec![],
                vec![frame("f", None, false)],
            ],
            symbols_from: "DWARF".into(),
            symbols_missing: String::new(),
        }
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        assert_eq!(ModuleNames::decode(&names().encode(), 3), Some(names()));
        let look_up = LookUp {
            format: FileFormat::JitDump,
            id: 5,
            can_fetch: true,
            path: b"/usr/lib/\xff.so".to_vec(),
            addresses: vec![0, u64::MAX],
        };
        assert_eq!(LookUp::decode(&look_up.encode()), Some(look_up));
        assert_eq!(parse_header(header(NAMES, 77)), (NAMES, 77));
    }

    #[test]
    fn invalid_results() {
        let good = names().encode();
        for length in 0..good.len() {
            assert_eq!(ModuleNames::decode(&good[..length], 3), None, "{length}");
        }
        for count in [0, 1, 2, 4, 1000] {
            assert_eq!(ModuleNames::decode(&good, count), None, "{count}");
        }
        // Any byte may be wrong: no panic, and no text that was not sent.
        for at in 0..good.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut bad = good.clone();
                bad[at] = value;
                if let Some(names) = ModuleNames::decode(&bad, 3) {
                    assert!(names.found.iter().flatten().all(|f| f.name.len() <= bad.len()));
                }
            }
        }
        let only_inlined = ModuleNames {
            found: vec![vec![frame("in", None, true)]],
            ..ModuleNames::default()
        };
        assert_eq!(ModuleNames::decode(&only_inlined.encode(), 1), None);
    }

    #[test]
    fn long_texts_are_cut() {
        let mut long = names();
        long.symbols_missing = "x".repeat(MAX_TEXT + 1);
        let read = ModuleNames::decode(&long.encode(), 3).expect("valid");
        assert_eq!(read.symbols_missing.len(), MAX_TEXT);
    }
}
