//! Spans of the Python package (`nativeprof.span`): which one is active in a thread, read from outside.
//!
//! The active span is the value of a context variable, so that it follows tasks, greenlets and threads as the interpreter
//! itself switches contexts: nothing runs when a context is entered or left. A thread's value is found as the interpreter
//! finds it, from the thread state to its context, to the context's mapping (a hash array mapped trie, Python/hamt.c and
//! Include/internal/pycore_context.h, v3.9 to v3.15), to the value. What is not the same in every version, the package measures
//! in its own process and publishes: see [`Publication`].
//!
//! [`copy`] allocates nothing, so it may run in a signal handler. The same walk in BPF: `copy_span` in tasks_and_spans.h.

use crate::bytes::u64_at;
use crate::cpython_layout::SpanLocation;
use crate::event::SpanRecords;
use crate::limits::MAX_SPAN;
use crate::process::memory::Memory;

/// Section of the extension module that holds a [`Publication`].
pub const SECTION: &str = ".nativeprof_spans";
/// Its first word. The last digit is the version of what follows.
pub const MAGIC: u64 = u64::from_le_bytes(*b"npspans1");
/// Words of a publication, with the first one.
pub const WORDS: usize = 10;
/// Levels of a trie: 32 bits of a hash, five at a time.
const LEVELS: u32 = 7;
/// Where offsets can be, bytes: thread states have less than 2 KiB.
const MAX_OFFSET: u64 = 0x4000;

/// What the extension module publishes, in this order: [`MAGIC`], 1 when the rest is complete, and the fields of
/// [`SpanLocation`].
pub type Publication = [u64; WORDS];

/// A publication for this location.
pub fn publication(at: &SpanLocation) -> Publication {
    [
        MAGIC,
        1,
        at.variable,
        at.hash.into(),
        at.bitmap_node,
        at.array_node,
        at.context.into(),
        at.header.into(),
        at.item.into(),
        at.data.into(),
    ]
}

/// The location that a publication has; `None` if it is not complete, or makes no sense.
pub fn location(words: &Publication) -> Option<SpanLocation> {
    let [magic, complete, variable, hash, bitmap_node, array_node, offsets @ ..] = *words;
    let is_sane = magic == MAGIC && complete == 1 && variable != 0 && offsets.iter().all(|at| *at < MAX_OFFSET);
    is_sane.then_some(())?;
    let [context, header, item, data] = offsets.map(|at| at as u16);
    (header >= 8).then_some(SpanLocation {
        variable,
        hash: hash as u32,
        bitmap_node,
        array_node,
        context,
        header,
        item,
        data,
    })
}

/// The publication at an address.
pub fn read(memory: &dyn Memory, avma: u64) -> Option<Publication> {
    let mut bytes = [0; 8 * WORDS];
    memory.read(avma, &mut bytes).then_some(())?;
    let mut words = [0; WORDS];
    for (at, word) in words.iter_mut().enumerate() {
        *word = u64_at(&bytes, 8 * at)?;
    }
    Some(words)
}

fn word(memory: &dyn Memory, object: u64, offset: u16) -> Option<u64> {
    memory.u64(object.checked_add(offset.into())?).filter(|word| *word != 0)
}

/// The root of a context's mapping; `header`: bytes of a `PyObject`. Its second field is the mapping, whose first one
/// is the root.
pub fn root(memory: &dyn Memory, context: u64, header: u16) -> Option<u64> {
    word(memory, word(memory, context, header.checked_add(8)?)?, header)
}

/// The type of an object, which is the last word of its header.
pub fn type_of(memory: &dyn Memory, object: u64, header: u16) -> Option<u64> {
    word(memory, object, header.checked_sub(8)?)
}

/// The record of the span that is active in the thread with this thread state, as address and length.
pub fn active(memory: &dyn Memory, at: &SpanLocation, state: u64) -> Option<(u64, usize)> {
    let mut node = root(memory, word(memory, state, at.context)?, at.header)?;
    for level in 0..LEVELS {
        let slot = at.hash.checked_shr(5 * level)? & 31;
        let kind = type_of(memory, node, at.header)?;
        if kind == at.array_node {
            node = word(memory, node.checked_add(8 * u64::from(slot))?, at.header)?;
            continue;
        }
        // (A collision node has several keys with the same hash: what is in one is not found.)
        (kind == at.bitmap_node).then_some(())?;
        let fields = node.checked_add(at.header.into())?;
        let bitmap = memory.u32(fields.checked_add(8)?)?;
        (bitmap >> slot & 1 == 1).then_some(())?;
        let before = (bitmap & ((1 << slot) - 1)).count_ones();
        let mut pair = [0; 16];
        let entry = fields.checked_add(16 + 16 * u64::from(before))?;
        memory.read(entry, &mut pair).then_some(())?;
        let (key, value) = (u64_at(&pair, 0)?, u64_at(&pair, 8)?);
        if key == at.variable {
            let record = word(memory, value, at.item)?;
            let len = memory.u64(record.checked_add(at.header.into())?)?;
            let len = usize::try_from(len).ok().filter(|len| (1..=MAX_SPAN).contains(len))?;
            return Some((record.checked_add(at.data.into())?, len));
        }
        (key == 0).then_some(())?;
        node = value;
    }
    None
}

/// Copies that record.
pub fn copy(memory: &dyn Memory, at: &SpanLocation, state: u64, out: &mut SpanRecords) {
    if let Some((record, len)) = active(memory, at, state) {
        SpanRecords::set(&mut out.package, len, |to| memory.read(record, to));
    }
}

/// The key under which the name of a span is among its labels.
pub const NAME: &str = "span";

/// Bytes of a key and of a value, at most.
const MAX_KEY: usize = 63;
const MAX_VALUE: usize = 255;

/// Appends a label to a record: length of the key, length of the value, both in UTF-8; for the name of a span the key is empty.
/// What is longer than 63 and 255 bytes is cut.
pub fn write_label(key: &str, value: &str, record: &mut Vec<u8>) {
    let key = if key == NAME {
        ""
    } else {
        &key[..key.floor_char_boundary_at(MAX_KEY)]
    };
    let value = &value[..value.floor_char_boundary_at(MAX_VALUE)];
    record.extend([key.len() as u8, value.len() as u8]);
    record.extend(key.as_bytes());
    record.extend(value.as_bytes());
}

/// `str::floor_char_boundary`, which Rust 1.88 does not have.
trait Boundary {
    fn floor_char_boundary_at(&self, most: usize) -> usize;
}

impl Boundary for str {
    fn floor_char_boundary_at(&self, most: usize) -> usize {
        let most = most.min(self.len());
        (0..=most).rev().find(|at| self.is_char_boundary(*at)).unwrap_or(0)
    }
}

/// Length of as many labels of a record as fit into `most` bytes.
pub fn labels_within(record: &[u8], most: usize) -> usize {
    let mut at = 0;
    while let Some([key, value]) = record.get(at..at + 2) {
        let end = at + 2 + usize::from(*key) + usize::from(*value);
        if end > record.len().min(most) {
            break;
        }
        at = end;
    }
    at
}

/// Labels of a record, those of the outermost span first. Of a key that several spans have, only the innermost value, but all
/// names. A record holds the innermost span first, and each span's name before its labels.
pub fn labels(record: &[u8]) -> Vec<(String, String)> {
    let mut spans: Vec<Vec<(String, String)>> = Vec::new();
    let mut rest = &record[..labels_within(record, record.len())];
    while let [key, value, text @ ..] = rest {
        let (key, text) = text.split_at(usize::from(*key).min(text.len()));
        let (value, after) = text.split_at(usize::from(*value).min(text.len()));
        rest = after;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if key.is_empty() || spans.is_empty() {
            spans.push(Vec::new());
        }
        let key = if key.is_empty() { NAME.into() } else { text(key) };
        let is_known = key != NAME && spans.iter().flatten().any(|(known, _)| *known == key);
        if let (false, Some(span)) = (is_known, spans.last_mut()) {
            span.push((key, text(value)));
        }
    }
    spans.into_iter().rev().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::memory::NoMemory;

    fn pair(key: &str, value: &str) -> (String, String) {
        (key.into(), value.into())
    }

    #[test]
    fn records_are_read_as_written() {
        let (mut inner, mut outer) = (Vec::new(), Vec::new());
        write_label(NAME, "query", &mut inner);
        write_label("table", "users", &mut inner);
        write_label(NAME, "request", &mut outer);
        write_label("table", "none", &mut outer);
        write_label("route", "/a", &mut outer);
        let both = [inner.clone(), outer].concat();
        let expected = [
            pair(NAME, "request"),
            pair("route", "/a"),
            pair(NAME, "query"),
            pair("table", "users"),
        ];
        assert_eq!(labels(&both), expected);
        assert_eq!(labels_within(&both, inner.len() + 3), inner.len());
        for len in 0..both.len() {
            assert!(labels(&both[..len]).len() <= 4, "{len}");
        }
        assert_eq!(labels(&[]), []);
        assert_eq!(labels(&[1, 1, 0xff, b'x']), [pair("\u{fffd}", "x")]);
    }

    #[test]
    fn long_labels_are_cut_between_characters() {
        let mut record = Vec::new();
        write_label(&"k".repeat(100), &"é".repeat(200), &mut record);
        let read = labels(&record);
        assert_eq!(read, [pair(&"k".repeat(63), &"é".repeat(127))]);
    }

    #[test]
    fn publications_round_trip_and_are_checked() {
        let at = SpanLocation {
            variable: 0x1000,
            hash: 0xffff_ffff,
            bitmap_node: 1,
            array_node: 2,
            context: 3,
            header: 16,
            item: 5,
            data: 6,
        };
        let words = publication(&at);
        assert_eq!(location(&words), Some(at));
        for (word, wrong) in [(0, 0), (1, 0), (2, 0), (6, MAX_OFFSET), (7, 0)] {
            let mut words = words;
            words[word] = wrong;
            assert_eq!(location(&words), None, "{word}");
        }
        assert_eq!(active(&NoMemory, &at, 0x1000), None);
    }

    /// Memory of words by address.
    struct WordMemory(std::collections::BTreeMap<u64, u64>);

    impl Memory for WordMemory {
        fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
            buf.iter_mut().zip(avma..).all(|(byte, at)| {
                let word = self.0.get(&(at & !7));
                *byte = word.map_or(0, |word| word.to_le_bytes()[(at & 7) as usize]);
                word.is_some()
            })
        }
    }

    /// A context whose mapping has an array node above a bitmap node, and one that leads in a circle.
    #[test]
    fn tries_are_walked_and_bounded() {
        let at = SpanLocation {
            variable: 0x1000,
            hash: 0b00010_00011, // slot 3, then slot 2
            bitmap_node: 0xb,
            array_node: 0xa,
            context: 0x40,
            header: 16,
            item: 24,
            data: 32,
        };
        let mut words = WordMemory(
            [
                (0x2040, 0x3000), // thread state
                (0x3018, 0x3100), // context: mapping
                (0x3110, 0x4000), // mapping: root
                (0x4008, 0xa),    // array node
                (0x4010 + 8 * 3, 0x5000),
                (0x5008, 0xb), // bitmap node with slots 0 and 2
                (0x5018, 0b101),
                (0x5020 + 16, 0x1000),
                (0x5020 + 24, 0x6000),
                (0x6018, 0x7000), // value: its first item
                (0x7010, 5),      // size
            ]
            .into(),
        );
        assert_eq!(active(&words, &at, 0x2000), Some((0x7020, 5)));
        words.0.insert(0x7010, 1 + MAX_SPAN as u64);
        assert_eq!(active(&words, &at, 0x2000), None, "too long");
        words.0.insert(0x5018, 0b1001);
        assert_eq!(active(&words, &at, 0x2000), None, "no such slot");
        words.0.extend((0..32).map(|slot| (0x4010 + 8 * slot, 0x4000)));
        assert_eq!(active(&words, &at, 0x2000), None, "a circle");
    }
}
