//! The layouts of abi.rs against the type information (`.BTF`) of the objects: every field by its name.

use std::collections::BTreeMap;

use object::{Object, ObjectSection};

use super::abi;
use super::object::Variant;
use crate::bytes::{u16_at, u32_at, u64_at};
use crate::cpython_layout::*;
use crate::event::probes::{ArgumentPlace, ProbeArgument, ProbeEvent};

/// Kinds of types, of include/uapi/linux/btf.h, v6.18.
const INT: u32 = 1;
const POINTER: u32 = 2;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const ENUM: u32 = 6;
const TYPEDEF: u32 = 8;
const FUNCTION_PROTOTYPE: u32 = 13;
const VARIABLE: u32 = 14;
const DATA_SECTION: u32 = 15;
const DECLARATION_TAG: u32 = 17;
const ENUM64: u32 = 19;

/// A type: its kind, its size or the number of another type, and what follows it.
struct Type<'a> {
    kind: u32,
    name: &'a str,
    size_or_type: u32,
    rest: &'a [u8],
}

/// Offset and size of each field, by name; of a structure in it as `OUTER.INNER`, of an array's first element.
type Fields = BTreeMap<String, (usize, usize)>;

struct Types<'a> {
    /// By number, from 1 on.
    types: Vec<Type<'a>>,
    strings: &'a [u8],
}

impl<'a> Types<'a> {
    /// Reads `struct btf_header` and what it leads to.
    fn new(btf: &'a [u8]) -> Types<'a> {
        let word = |at| u32_at(btf, at).expect("a word") as usize;
        let part = |start: usize, length: usize| &btf[word(4) + word(start)..][..word(length)];
        let (mut bytes, strings) = (part(8, 12), part(16, 20));
        let mut types = Vec::new();
        while !bytes.is_empty() {
            let [name, info, size_or_type] = [0, 4, 8].map(|at| u32_at(bytes, at).expect("a type"));
            let (kind, count) = (info >> 24 & 31, (info & 0xffff) as usize);
            let rest = match kind {
                INT | VARIABLE | DECLARATION_TAG => 4,
                ARRAY => 12,
                STRUCT | UNION | DATA_SECTION | ENUM64 => 12 * count,
                ENUM | FUNCTION_PROTOTYPE => 8 * count,
                _ => 0,
            };
            types.push(Type {
                kind,
                name: text(strings, name),
                size_or_type,
                rest: &bytes[12..12 + rest],
            });
            bytes = &bytes[12 + rest..];
        }
        Types { types, strings }
    }

    fn get(&self, number: u32) -> &Type<'a> {
        &self.types[number as usize - 1]
    }

    fn size(&self, number: u32) -> usize {
        let found = self.get(number);
        match found.kind {
            INT | STRUCT | UNION | ENUM | ENUM64 => found.size_or_type as usize,
            POINTER => 8,
            ARRAY => {
                self.size(u32_at(found.rest, 0).expect("elements")) * u32_at(found.rest, 8).expect("a length") as usize
            }
            // Names, and qualifiers.
            TYPEDEF..=11 => self.size(found.size_or_type),
            kind => panic!("a field has a type of kind {kind}"),
        }
    }

    /// The fields of a structure, and its size.
    fn structure(&self, name: &str) -> (Fields, usize) {
        let found = self.types.iter().filter(|t| t.kind == STRUCT && t.name == name);
        let found: Vec<_> = found.collect();
        assert_eq!(found.len(), 1, "structures named {name}");
        let mut fields = Fields::new();
        self.add_fields(found[0], "", &mut fields);
        (fields, found[0].size_or_type as usize)
    }

    fn add_fields(&self, structure: &Type<'_>, prefix: &str, out: &mut Fields) {
        for member in structure.rest.chunks_exact(12) {
            let [name, number, bits] = [0, 4, 8].map(|at| u32_at(member, at).expect("a member"));
            let name = format!("{prefix}{}", text(self.strings, name));
            let mut inner = self.get(number);
            if inner.kind == ARRAY {
                inner = self.get(u32_at(inner.rest, 0).expect("elements"));
            }
            if inner.kind == STRUCT {
                self.add_fields(inner, &format!("{name}."), out);
            }
            out.insert(name, (bits as usize / 8, self.size(number)));
        }
    }
}

fn text(strings: &[u8], at: u32) -> &str {
    let bytes = strings[at as usize..].split(|b| *b == 0).next();
    std::str::from_utf8(bytes.expect("a string")).expect("text")
}

/// Calls `check` with the types of each object.
fn each_object(check: impl Fn(&Types<'_>)) {
    for variant in [Variant::Current, Variant::Linux5_8] {
        let file = object::File::parse(variant.object()).expect("an object");
        let section = file.section_by_name(".BTF").expect("type information");
        check(&Types::new(section.data().expect("its bytes")));
    }
}

#[test]
fn records_are_where_they_are_read() {
    each_object(|types| {
        for (name, size, expected) in abi::record_fields() {
            let (fields, actual) = types.structure(name);
            assert!(actual <= size, "{name}: {actual} bytes");
            let expected = expected
                .into_iter()
                .map(|(name, at, size)| (name.to_string(), (at, size)));
            assert_eq!(fields, expected.collect::<Fields>(), "{name}");
        }
    });
}

/// Compares encoded bytes with the value that each field of the structure must have.
fn compare(types: &Types<'_>, name: &str, bytes: &[u8], expected: &[(&str, u64)]) {
    let (fields, size) = types.structure(name);
    assert_eq!(size, bytes.len(), "{name}");
    let value = |(at, size): &(usize, usize)| match size {
        1 => bytes.get(*at).copied().map(u64::from),
        2 => u16_at(bytes, *at).map(u64::from),
        4 => u32_at(bytes, *at).map(u64::from),
        _ => u64_at(bytes, *at),
    };
    let encoded: BTreeMap<&str, u64> = fields
        .iter()
        .map(|(name, place)| (name.as_str(), value(place).expect("a field")))
        .collect();
    assert_eq!(encoded, expected.iter().copied().collect(), "{name}");
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn tasks_and_spans_are_written_where_they_are_read() {
    let tasks = RunningTasks {
        current: 1 << 40,
        keys: 1,
        entries: 2,
        task: 3,
        coroutine: 4,
        frame: 5,
        frame_is_pointer: false,
        name: 6,
        coroutine_has_name: true,
        callback: 7,
        waiter: 8,
        closure: 9,
        items: 10,
        head: 11,
        awaited_by: 12,
        awaited_by_is_set: 13,
    };
    let spans = SpanLocation {
        variable: 1 << 40,
        hash: 2,
        bitmap_node: 3,
        array_node: 4,
        context: 5,
        header: 6,
        item: 7,
        data: 8,
    };
    let context = ThreadContext { block: 9, offset: 10 };
    each_object(|types| {
        let expected = [
            ("current", 1 << 40),
            ("keys", 1),
            ("entries", 2),
            ("task", 3),
            ("coroutine", 4),
            ("frame", 5),
            ("flags", 2),
            ("name", 6),
            ("callback", 7),
            ("waiter", 8),
            ("closure", 9),
            ("items", 10),
            ("head", 11),
            ("awaited_by", 12),
            ("awaited_by_is_set", 13),
            ("pad", 0),
        ];
        compare(types, "running", &bytes_of(&abi::encode_running(&tasks)), &expected);
        let expected = [
            ("variable", 1 << 40),
            ("hash", 2),
            ("bitmap_node", 3),
            ("array_node", 4),
            ("context", 5),
            ("header", 6),
            ("item", 7),
            ("data", 8),
            ("context_block", 9),
            ("context_offset", 10),
            ("has_context", 1),
        ];
        compare(
            types,
            "spans",
            &bytes_of(&abi::encode_spans(Some(&spans), Some(&context))),
            &expected,
        );
    });
}

#[test]
fn probes_are_written_where_they_are_read() {
    let argument = |place, size, is_signed| ProbeArgument { place, size, is_signed };
    let memory = ArgumentPlace::Memory {
        register: 4,
        offset: -16,
        index: Some((5, 3)),
    };
    let event = ProbeEvent::Allocation([
        argument(memory, 8, true),
        argument(ArgumentPlace::Register(9), 4, false),
        argument(ArgumentPlace::Constant(7), 8, false),
    ]);
    let words = abi::encode_probe(&event);
    let free = abi::encode_probe(&ProbeEvent::Free(argument(ArgumentPlace::Register(9), 8, false)));
    assert_eq!((words[0], free[0]), (0, 1));
    each_object(|types| {
        let (fields, size) = types.structure("probe");
        assert_eq!((fields["arguments"], size), ((8, 48), 8 * abi::PROBE_WORDS));
        let check = |at: usize, expected: [u64; 8]| {
            let names = ["offset", "place", "reg", "index", "shift", "size", "is_signed", "pad"];
            let expected: Vec<_> = names.into_iter().zip(expected).collect();
            compare(types, "probe_argument", &bytes_of(&words[at..at + 2]), &expected);
        };
        check(1, [-16i64 as u64, 2, 4, 5, 3, 8, 1, 0]);
        check(3, [0, 1, 9, 255, 0, 4, 0, 0]);
        check(5, [7, 0, 0, 255, 0, 8, 0, 0]);
    });
}

#[test]
fn layouts_are_written_where_they_are_read() {
    // Where two fields decide on a third one, they have one value.
    let layout = Layout {
        line_table: LineTable::Locations,
        instruction_encoding: InstructionEncoding::Pointer,
        anchor: Anchor::CFramePerEntry,
        runtime_key: 1,
        runtime_current: 2,
        runtime_interpreters: 3,
        runtime_generation: -4,
        interp_next: 5,
        interp_threads: 6,
        interp_modules: 7,
        interp_generation: 8,
        tstate_next: 9,
        tstate_interp: 10,
        tstate_thread_id: 11,
        tstate_first: 12,
        tstate_cframe: 12,
        tstate_root_cframe: 13,
        tstate_base_frame: 14,
        cframe_current_frame: 15,
        cframe_previous: 16,
        frame_size: 17,
        frame_previous: 18,
        frame_code: 19,
        frame_instr: 20,
        frame_owner: 21,
        frame_entry: 22,
        frame_copy: 23,
        code_name: 24,
        code_qualname: 25,
        code_filename: 26,
        code_firstlineno: 27,
        code_linetable: 28,
        code_adaptive: 29,
        code_firsttraceable: 300,
        code_version: 31,
        code_copies: 32,
        str_length: 33,
        str_state: 34,
        str_kind_bit: 35,
        str_ascii_data: 36,
        str_compact_data: 37,
        bytes_size: 38,
        bytes_data: 39,
    };
    let process = TargetLayout {
        stack_end: 1 << 40,
        python: Some(Interpreter {
            runtime: 1 << 41,
            layout,
            thread_state: ThreadStateLocation::Block { id: 40, offset: 41 },
            descriptor: ThreadDescriptor {
                tls: Tls::Musl(42),
                size: 43,
            },
        }),
        lent_states: vec![44],
        ..TargetLayout::default()
    };
    let expected = [
        ("stack_end", 1 << 40),
        ("runtime", 1 << 41),
        ("key", 40),
        ("current", 2),
        ("tls", 5),
        ("tls_specific", 41),
        ("interpreter", 3 + 8),
        ("interp_generation", 8),
        ("generation", u64::from(-4i32 as u32)),
        ("thread_id", 11),
        ("first", 12),
        ("cframe_frame", 15),
        ("cframe_previous", 16),
        ("cframe_root", 13),
        ("cframe", 12),
        ("frame_size", 17),
        ("frame_previous", 18),
        ("frame_code", 19),
        ("frame_instr", 20),
        ("instr_size", 8),
        ("frame_owner", 21),
        ("frame_entry", 22),
        ("code_name", 24),
        ("code_filename", 26),
        ("code_firstlineno", 27),
        ("str_length", 33),
        ("str_data", 36),
        ("code_version", 31),
        ("base_frame", 14),
        ("frame_copy", 23),
        ("code_copies", 32),
        ("code_adaptive", 29),
        ("state_interp", 10),
        ("code_size", 300 + 8),
        ("code_qualname", 25),
        ("code_linetable", 28),
        ("str_state", 34),
        ("str_kind_bit", 35),
        ("str_compact_data", 37),
        ("bytes_size", 38),
        ("bytes_data", 39),
        ("descriptor", 43),
        ("interp_next", 5),
        ("interp_threads", 6),
        ("tstate_next", 9),
        ("lent", 12),
    ];
    each_object(|types| compare(types, "layout", &abi::encode(&process), &expected));
}
