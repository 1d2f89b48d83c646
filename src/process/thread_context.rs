//! The OpenTelemetry context of threads: trace, span and attributes, where a process publishes them for readers outside.
//!
//! Sources: OTEP 4947 "Thread Context" (a thread-local pointer `otel_thread_ctx_v1` to a record), OTEP 4719 "Process
//! Context" (a mapping `OTEL_CTX` with the names of attributes), and `process_context.proto` of opentelemetry-proto, as
//! of 2026-08. [`copy`] allocates nothing, so it may run in a signal handler. The same walk in sample.bpf.c: `copy_context`.

use object::elf;
use object::read::elf::ProgramHeader;
use object::{Object, ObjectSymbol, ObjectSymbolTable, RelocationFlags, RelocationTarget};
use prost::Message;

use super::maps::Mapping;
use super::memory::Memory;
use super::modules::Module;
use crate::arch::TLS_BELOW_POINTER;
use crate::bytes::{u16_at, u32_at, u64_at};
use crate::cpython_layout::{ThreadContext, Tls};
use crate::event::SpanRecords;
use crate::limits::MAX_CONTEXT;

/// The thread-local variable.
const SYMBOL: &str = "otel_thread_ctx_v1";
/// Relocations of a file that are examined.
const MAX_RELOCATIONS: usize = 1 << 20;
/// Bytes of a record before its attributes, and where fields are: trace id, span id, valid, flags, size of the attributes.
const HEAD: usize = 28;
const SPAN_ID: usize = 16;
const VALID: usize = 24;
const SIZE: usize = 26;
/// Bytes of a process context.
const MAX_PAYLOAD: u32 = 1 << 16;
/// Module numbers and offsets of thread-local variables that are believed.
const MAX_MODULE: u64 = 4096;
const MAX_OFFSET: u64 = 1 << 30;

/// How a file refers to the variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VariableAccess {
    /// In the program itself: so many bytes from the thread pointer.
    Static(i64),
    /// svma of a word that the dynamic linker fills with that offset.
    Offset(u64),
    /// svma of two words that it fills: number of the module, and offset in its block.
    Pair(u64),
    /// svma of a descriptor, whose second word is the offset from the thread pointer or the address of such a pair.
    Descriptor(u64),
}

/// How this file refers to the variable, if it defines it.
pub fn access(module: &Module) -> Option<VariableAccess> {
    // Relocations and offsets of the other layout are not known here.
    TLS_BELOW_POINTER.then_some(())?;
    module.exports(SYMBOL)?;
    module
        .elf(|e| {
            let table = e.dynamic_symbol_table()?;
            let symbol = table
                .symbols()
                .find(|s| !s.is_undefined() && s.name_bytes() == Ok(SYMBOL.as_bytes()))?;
            let relocations = e.dynamic_relocations()?.take(MAX_RELOCATIONS);
            let own = relocations.filter(|(_, r)| r.target() == RelocationTarget::Symbol(symbol.index()));
            let found = own.filter_map(|(at, r)| match r.flags() {
                RelocationFlags::Elf { r_type } if r_type == elf::R_X86_64_TLSDESC => {
                    Some(VariableAccess::Descriptor(at))
                }
                RelocationFlags::Elf { r_type } if r_type == elf::R_X86_64_DTPMOD64 => Some(VariableAccess::Pair(at)),
                RelocationFlags::Elf { r_type } if r_type == elf::R_X86_64_TPOFF64 => Some(VariableAccess::Offset(at)),
                _ => None,
            });
            if let Some(found) = { found }.next() {
                return Some(found);
            }
            // A program's block ends at the thread pointer (System V ABI for thread-local storage, variant II).
            let endian = e.endian();
            let is_program = e
                .elf_program_headers()
                .iter()
                .any(|p| p.p_type(endian) == elf::PT_INTERP)
                || e.elf_header().e_type.get(endian) == elf::ET_EXEC;
            let block = e
                .elf_program_headers()
                .iter()
                .find(|p| p.p_type(endian) == elf::PT_TLS)?;
            let size = block
                .p_memsz(endian)
                .checked_next_multiple_of(block.p_align(endian).max(1))?;
            let offset = i64::try_from(symbol.address())
                .ok()?
                .checked_sub(i64::try_from(size).ok()?)?;
            is_program.then_some(VariableAccess::Static(offset))
        })
        .flatten()
}

/// Where the variable is in a process, whose file has this load bias.
pub fn location(memory: &dyn Memory, access: VariableAccess, bias: u64, tls: Tls) -> Option<ThreadContext> {
    let entry = if matches!(tls, Tls::Glibc(_)) { 16 } else { 8 };
    let fixed = |offset: i64| {
        (offset != 0 && offset.unsigned_abs() < MAX_OFFSET).then_some(ThreadContext {
            block: 0,
            offset: offset as u64,
        })
    };
    let pair = |at: u64| {
        let (number, offset) = (memory.u64(at)?, memory.u64(at.checked_add(8)?)?);
        let is_sane = (1..MAX_MODULE).contains(&number) && offset < MAX_OFFSET;
        is_sane.then_some(ThreadContext {
            block: u32::try_from(number * entry).ok()?,
            offset,
        })
    };
    match access {
        VariableAccess::Static(offset) => fixed(offset),
        VariableAccess::Offset(at) => fixed(memory.u64(at.wrapping_add(bias))? as i64),
        VariableAccess::Pair(at) => pair(at.wrapping_add(bias)),
        VariableAccess::Descriptor(at) => {
            let word = memory.u64(at.wrapping_add(bias).checked_add(8)?)?;
            // Offsets are small and negative, addresses are those of user space.
            fixed(word as i64).filter(|_| (word as i64) < 0).or_else(|| pair(word))
        }
    }
}

/// The record of a thread, as address and length.
fn record(memory: &dyn Memory, at: &ThreadContext, thread_pointer: u64) -> Option<(u64, usize)> {
    let block = match at.block {
        0 => thread_pointer,
        entry => {
            // The thread's vector of blocks, at the second word of its descriptor. One that is not allocated yet is 0 or -1.
            let vector = memory.u64(thread_pointer.checked_add(8)?)?;
            memory
                .u64(vector.checked_add(entry.into())?)
                .filter(|block| *block != 0 && *block != u64::MAX)?
        }
    };
    let record = memory
        .u64(block.wrapping_add(at.offset))
        .filter(|record| *record != 0)?;
    let mut head = [0; HEAD];
    memory.read(record, &mut head).then_some(())?;
    (head.get(VALID) == Some(&1)).then_some(())?;
    Some((record, (HEAD + usize::from(u16_at(&head, SIZE)?)).min(MAX_CONTEXT)))
}

/// Copies the record of a thread.
pub fn copy(memory: &dyn Memory, at: &ThreadContext, thread_pointer: u64, out: &mut SpanRecords) {
    if let Some((record, len)) = record(memory, at, thread_pointer) {
        SpanRecords::set(&mut out.context, len, |to| memory.read(record, to));
    }
}

/// Labels of a record; `keys` has the names of attributes. Attributes without a name are left out; false if there is one.
pub fn labels(record: &[u8], keys: &[String]) -> (Vec<(String, String)>, bool) {
    let mut labels: Vec<(String, String)> = Vec::new();
    let mut has_all = true;
    let hex = |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02x}")).collect() };
    for (key, bytes) in [
        ("trace_id", record.get(..SPAN_ID)),
        ("span_id", record.get(SPAN_ID..VALID)),
    ] {
        if let Some(bytes) = bytes.filter(|bytes| bytes.iter().any(|byte| *byte != 0)) {
            labels.push((key.into(), hex(bytes)));
        }
    }
    let mut rest = record.get(HEAD..).unwrap_or_default();
    while let [key, len, after @ ..] = rest {
        let Some(value) = after.get(..usize::from(*len)) else {
            break;
        };
        rest = &after[value.len()..];
        let Some(name) = keys.get(usize::from(*key)) else {
            has_all = false;
            continue;
        };
        let value = String::from_utf8_lossy(value).into_owned();
        // The last one counts.
        labels.retain(|(known, _)| known != name);
        labels.push((name.clone(), value));
    }
    (labels, has_all)
}

#[derive(Clone, PartialEq, Message)]
struct PublishedContext {
    #[prost(message, repeated, tag = "2")]
    attributes: Vec<KeyValue>,
}

/// The same message without what [`PublishedContext`] has: one is read although the other cannot be.
#[derive(Clone, PartialEq, Message)]
struct PublishedResource {
    #[prost(message, optional, tag = "1")]
    resource: Option<Resource>,
}

#[derive(Clone, PartialEq, Message)]
struct Resource {
    #[prost(message, repeated, tag = "1")]
    attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct KeyValue {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(message, optional, tag = "2")]
    value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct AnyValue {
    #[prost(string, tag = "1")]
    text: String,
    #[prost(message, optional, tag = "5")]
    array: Option<ArrayValue>,
}

/// Of texts: deeper arrays have no meaning here.
#[derive(Clone, PartialEq, Message)]
struct ArrayValue {
    #[prost(message, repeated, tag = "1")]
    values: Vec<TextValue>,
}

#[derive(Clone, PartialEq, Message)]
struct TextValue {
    #[prost(string, tag = "1")]
    text: String,
}

/// Names of the attributes of records, by their numbers, as the process publishes them. `None`: it does not, or is just about
/// to change them.
pub fn keys(memory: &dyn Memory, maps: &[Mapping]) -> Option<Vec<String>> {
    published(maps).find_map(|at| read_keys(&read_payload(memory, at)?))
}

/// Attributes of the resource that the process is, as it publishes them, those with texts; none if it does not.
pub fn resource(memory: &dyn Memory, maps: &[Mapping]) -> Vec<(String, String)> {
    let found = published(maps).find_map(|at| read_resource(&read_payload(memory, at)?));
    found.unwrap_or_default()
}

/// Where a process may publish its context.
fn published(maps: &[Mapping]) -> impl Iterator<Item = u64> {
    const NAMES: [&[u8]; 3] = [b"/memfd:OTEL_CTX", b"[anon_shmem:OTEL_CTX]", b"[anon:OTEL_CTX]"];
    let own = maps
        .iter()
        .filter(|m| NAMES.iter().any(|name| m.path.starts_with(name)));
    own.take(4).map(|mapping| mapping.start)
}

/// The message, unless it is changed meanwhile.
fn read_payload(memory: &dyn Memory, at: u64) -> Option<Vec<u8>> {
    // Signature, version, size of the payload, when it was published, the payload's address.
    let head = || {
        let mut head = [0; 32];
        memory.read(at, &mut head).then_some(head)
    };
    let before = head()?;
    let is_known = before.starts_with(b"OTEL_CTX") && matches!(u32_at(&before, 8)?, 1 | 2);
    let size = u32_at(&before, 12).filter(|size| is_known && *size <= MAX_PAYLOAD)?;
    u64_at(&before, 16).filter(|published| *published != 0)?;
    let mut payload = vec![0; size as usize];
    memory.read(u64_at(&before, 24)?, &mut payload).then_some(())?;
    (head()? == before).then_some(payload)
}

fn read_resource(payload: &[u8]) -> Option<Vec<(String, String)>> {
    let attributes = PublishedResource::decode(payload).ok()?.resource?.attributes;
    let texts = attributes.into_iter().filter_map(|a| Some((a.key, a.value?.text)));
    Some(texts.filter(|(_, text)| !text.is_empty()).collect())
}

fn read_keys(payload: &[u8]) -> Option<Vec<String>> {
    let context = PublishedContext::decode(payload).ok()?;
    let value = |name: &str| context.attributes.iter().find(|a| a.key == name)?.value.as_ref();
    value("threadlocal.schema_version")?;
    let keys = value("threadlocal.attribute_key_map").and_then(|value| value.array.as_ref());
    Some(keys.map_or(Vec::new(), |keys| {
        keys.values.iter().map(|key| key.text.clone()).collect()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(attributes: &[u8]) -> Vec<u8> {
        let mut record = vec![0; HEAD];
        record[0] = 0xab;
        record[SPAN_ID + 7] = 1;
        record[VALID] = 1;
        record[SIZE..HEAD].copy_from_slice(&(attributes.len() as u16).to_le_bytes());
        record.extend(attributes);
        record
    }

    #[test]
    fn records_are_read() {
        let keys = ["route".to_string(), "user".to_string()];
        let all = record(b"\0\x02/a\x01\x017\x05\x01x\0\x02/b");
        let pair = |key: &str, value: &str| (key.to_string(), value.to_string());
        let ids = [
            pair("trace_id", "ab000000000000000000000000000000"),
            pair("span_id", "0000000000000001"),
        ];
        let (found, has_all) = labels(&all, &keys);
        assert_eq!(found, [&ids[..], &[pair("user", "7"), pair("route", "/b")]].concat());
        assert!(!has_all, "attribute 5 has no name");
        for len in 0..all.len() {
            assert!(labels(&all[..len], &keys).0.len() <= 4, "{len}");
        }
        assert_eq!(labels(&record(b"\0\xffabc"), &keys), (ids.to_vec(), true), "cut");
    }

    struct Bytes(u64, Vec<u8>);

    impl Memory for Bytes {
        fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
            let at = avma.checked_sub(self.0).and_then(|at| usize::try_from(at).ok());
            let found = at.and_then(|at| self.1.get(at..at.checked_add(buf.len())?));
            found.is_some_and(|found| {
                buf.copy_from_slice(found);
                true
            })
        }
    }

    fn process_context(keys: &[&str]) -> Vec<u8> {
        let text = |text: &str| TextValue { text: text.into() };
        let attribute = |key: &str, value: AnyValue| KeyValue {
            key: key.into(),
            value: Some(value),
        };
        let payload = PublishedContext {
            attributes: vec![
                attribute(
                    "threadlocal.schema_version",
                    AnyValue {
                        text: "tls_v1".into(),
                        array: None,
                    },
                ),
                attribute(
                    "threadlocal.attribute_key_map",
                    AnyValue {
                        text: String::new(),
                        array: Some(ArrayValue {
                            values: keys.iter().map(|key| text(key)).collect(),
                        }),
                    },
                ),
            ],
        }
        .encode_to_vec();
        let mut bytes = b"OTEL_CTX".to_vec();
        bytes.extend(2u32.to_le_bytes());
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(7u64.to_le_bytes());
        bytes.extend(0x1020u64.to_le_bytes());
        bytes.extend(payload);
        bytes
    }

    #[test]
    fn names_of_attributes_are_read() {
        let read_keys = |memory: &Bytes, at| read_keys(&read_payload(memory, at)?);
        let all = process_context(&["route", "user"]);
        assert_eq!(
            read_keys(&Bytes(0x1000, all.clone()), 0x1000),
            Some(vec!["route".into(), "user".into()])
        );
        for len in 0..all.len() {
            assert_eq!(read_keys(&Bytes(0x1000, all[..len].to_vec()), 0x1000), None, "{len}");
        }
        for (at, value) in [(0, 0), (8, 9), (14, 0xff), (16, 0), (24, 0)] {
            let mut wrong = all.clone();
            wrong[at] = value;
            assert_eq!(read_keys(&Bytes(0x1000, wrong), 0x1000), None, "{at}");
        }
    }

    #[test]
    fn attributes_of_the_resource_are_read() {
        let text = |key: &str, text: &str| KeyValue {
            key: key.into(),
            value: Some(AnyValue {
                text: text.into(),
                array: None,
            }),
        };
        let attributes = vec![text("service.name", "shop"), text("number", "")];
        let resource = Some(Resource { attributes });
        let mut payload = PublishedResource { resource }.encode_to_vec();
        let expected = vec![("service.name".to_string(), "shop".to_string())];
        assert_eq!(read_resource(&payload), Some(expected.clone()));
        // What is no resource of this form has no names of attributes either, and the other way round.
        assert_eq!(read_keys(&payload), None);
        payload.extend(&process_context(&["route"])[32..]);
        assert_eq!(read_resource(&payload), Some(expected));
        assert_eq!(read_keys(&payload), Some(vec!["route".into()]));
        assert_eq!(read_resource(b"\x0a\x04name"), None);
        for len in 0..payload.len() {
            let _ = (read_resource(&payload[..len]), read_keys(&payload[..len]));
        }
    }

    #[test]
    fn variables_are_located_and_read() {
        let mut bytes = vec![0; 0x400];
        let mut put = |at: usize, word: u64| bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        put(0x108, 0x1180); // the thread's vector
        put(0x180 + 32, 0x1200); // the block of module 2
        put(0x210, 0x1300); // the variable in it
        put(0x0f8, 0x1300); // the variable next to the thread pointer
        put(0x10, 2); // pair
        put(0x18, 0x10);
        put(0x28, 0x1010); // descriptor with a pair
        put(0x38, -8i64 as u64); // descriptor with an offset
        let context = record(b"\0\x01x");
        bytes[0x300..0x300 + context.len()].copy_from_slice(&context);
        let memory = Bytes(0x1000, bytes);
        let glibc = Tls::Glibc(0);
        for access in [
            VariableAccess::Static(-8),
            VariableAccess::Offset(0x38),
            VariableAccess::Pair(0x10),
            VariableAccess::Descriptor(0x20),
            VariableAccess::Descriptor(0x30),
        ] {
            let at = location(&memory, access, 0x1000, glibc).expect("a location");
            assert_eq!(
                super::record(&memory, &at, 0x1100),
                Some((0x1300, context.len())),
                "{access:?}"
            );
            assert_eq!(super::record(&memory, &at, 0x9000), None, "{access:?}");
        }
        assert_eq!(location(&memory, VariableAccess::Pair(0x20), 0x1000, glibc), None);
        assert_eq!(location(&memory, VariableAccess::Offset(0), 0x1000, glibc), None);
    }
}
