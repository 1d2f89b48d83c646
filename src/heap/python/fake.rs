//! Memory and objects of a process that does not exist, for tests.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;

use super::pools::PoolHeader;
use super::types::Placement;
use super::{Allocator, PythonHeap, ResidentPages};
use crate::cpython::heap_layout::HeapLayout;
use crate::cpython::object_layout::ObjectLayout;
use crate::cpython::versions;
use crate::event::PAGE;
use crate::process::maps::Mapping;
use crate::process::memory::{Memory, in_pieces};

/// Pages by address, of zeros until something is written there.
#[derive(Default)]
pub struct FakeMemory {
    pages: BTreeMap<u64, Vec<u8>>,
    /// Reads so far.
    pub reads: Cell<usize>,
}

impl FakeMemory {
    pub fn write(&mut self, at: u64, bytes: &[u8]) {
        for (at, byte) in (at..).zip(bytes) {
            let page = self
                .pages
                .entry(at - at % PAGE)
                .or_insert_with(|| vec![0; PAGE as usize]);
            page[(at % PAGE) as usize] = *byte;
        }
    }

    pub fn words(&mut self, at: u64, words: &[u64]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.write(at, &bytes);
    }

    pub fn remove_page(&mut self, at: u64) {
        self.pages.remove(&(at - at % PAGE));
    }
}

impl Memory for FakeMemory {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        self.reads.set(self.reads.get() + 1);
        in_pieces(avma, buf, PAGE, |page, skip, piece| {
            let page = self.pages.get(&page);
            page.is_some_and(|page| {
                piece.copy_from_slice(&page[skip..skip + piece.len()]);
                true
            })
        })
    }
}

impl ResidentPages for FakeMemory {
    fn bytes_in(&self, range: Range<u64>) -> u64 {
        let first = range.start - range.start % PAGE;
        let inside = |at: u64| (at + PAGE).min(range.end).saturating_sub(at.max(range.start));
        self.pages.range(first..range.end).map(|(at, _)| inside(*at)).sum()
    }
}

/// Layout of a version: `minor` of those that have rows.
pub fn layouts(minor: u8) -> (ObjectLayout, HeapLayout) {
    let facts = versions::find((3, minor, 255)).expect("a known version");
    (facts.objects, facts.heap.expect("a known layout"))
}

/// How objects of a version lie in blocks.
pub fn placement(minor: u8) -> Placement {
    let (objects, heap) = layouts(minor);
    let layout = versions::find((3, minor, 255)).expect("a known version").layout;
    Placement::new(&objects, &layout, heap.pre_header, false)
}

pub const ARENA: u64 = 0x7f00_0000_0000;
/// Variables, and what is allocated elsewhere.
pub const DATA: u64 = 0x5000_0000_0000;
pub const ALLOCATED: u64 = 0x6000_0000_0000;
pub const POOL: u32 = 16 << 10;

pub fn mapping(range: Range<u64>, writable: bool, inode: u64, path: &str) -> Mapping {
    Mapping {
        start: range.start,
        end: range.end,
        readable: true,
        writable,
        executable: false,
        shared: false,
        offset: 0,
        device: (0, 0),
        inode,
        path: path.into(),
    }
}

/// The bytes of a pool: blocks of a size, of which the first `used` have been used, and these are free now.
pub fn pool(at: u64, arena: u32, block: u32, used: u32, free: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0; POOL as usize];
    let address =
        |index: Option<&u32>| index.map_or(0, |index| at + PoolHeader::BYTES as u64 + u64::from(index * block));
    let mut put = |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
    put(0, &(used - free.len() as u32).to_le_bytes());
    put(8, &address(free.first()).to_le_bytes());
    put(32, &arena.to_le_bytes());
    put(36, &(block / 16 - 1).to_le_bytes());
    put(40, &(PoolHeader::BYTES as u32 + used * block).to_le_bytes());
    put(44, &(POOL - block).to_le_bytes());
    for (n, index) in free.iter().enumerate() {
        let offset = address(Some(index)) - at;
        put(offset as usize, &address(free.get(n + 1)).to_le_bytes());
    }
    bytes
}

/// The entries of an array of arenas, each with the number of its pools; 0: an entry that is not in use.
pub fn entries(arenas: &[(u64, u64)]) -> Vec<u64> {
    let entry = |(address, pools): &(u64, u64)| match address {
        0 => [0; 6],
        _ => [
            *address,
            address + pools * u64::from(POOL),
            64 << 32 | (64 - pools),
            0,
            0,
            0,
        ],
    };
    arenas.iter().flat_map(entry).collect()
}

/// Writes a type. `name` is written behind it.
pub fn put_type(memory: &mut FakeMemory, at: u64, meta: u64, name: &str, sizes: (u64, u64), flags: u64, base: u64) {
    memory.words(at, &[1, meta, 0, at + 1024, sizes.0, sizes.1]);
    memory.words(at + 168, &[flags]);
    memory.words(at + 256, &[base]);
    memory.write(at + 1024, name.as_bytes());
    memory.write(at + 1024 + name.len() as u64, &[0]);
}

/// Writes an ASCII text.
pub fn put_text(memory: &mut FakeMemory, minor: u8, at: u64, text: &str) {
    let layout = versions::find((3, minor, 255)).expect("a known version").layout;
    memory.words(at, &[1, STR]);
    memory.words(at + u64::from(layout.str_length), &[text.len() as u64]);
    // Characters of a byte, behind the header, ASCII.
    let state = 0b1_1001_u32 << layout.str_kind_bit;
    memory.write(at + u64::from(layout.str_state), &state.to_le_bytes());
    memory.write(at + u64::from(layout.str_ascii_data), text.as_bytes());
}

/// Writes a dict with its keys and values behind it. Keys are all texts.
pub fn put_dict(memory: &mut FakeMemory, minor: u8, at: u64, entries: &[(u64, u64)]) {
    let (objects, _) = layouts(minor);
    let keys = at + 64;
    memory.words(at, &[1, DICT]);
    memory.words(at + u64::from(objects.dict_keys), &[keys, 0]);
    // A table of eight places; its index has a byte for each.
    let first = if objects.dict_kinds {
        memory.words(
            keys,
            &[1, u64::from_le_bytes([3, 3, 1, 0, 0, 0, 0, 0]), 0, entries.len() as u64],
        );
        keys + 32 + 8
    } else {
        memory.words(keys, &[1, 8, 0, 0, entries.len() as u64]);
        keys + 40 + 8
    };
    let words = entries.iter().flat_map(|(key, value)| {
        let hash = (!objects.dict_kinds).then_some(7);
        hash.into_iter().chain([*key, *value])
    });
    memory.words(first, &words.collect::<Vec<u64>>());
}

pub const TYPE: u64 = DATA;
pub const LIST: u64 = DATA + 0x1000;
pub const FLOAT: u64 = DATA + 0x2000;
pub const DICT: u64 = DATA + 0x3000;
pub const STR: u64 = DATA + 0x4000;
/// `Py_TPFLAGS_HAVE_GC`
pub const GC: u64 = 1 << 14;

/// Memory with some types.
pub fn with_types() -> FakeMemory {
    let mut memory = FakeMemory::default();
    put_type(&mut memory, TYPE, TYPE, "type", (900, 40), 1 << 31 | GC, 0);
    put_type(&mut memory, LIST, TYPE, "list", (40, 0), 1 << 25 | GC, 0);
    put_type(&mut memory, FLOAT, TYPE, "float", (24, 0), 0, 0);
    put_type(&mut memory, DICT, TYPE, "dict", (48, 0), 1 << 29 | GC, 0);
    put_type(&mut memory, STR, TYPE, "str", (80, 0), 1 << 28, 0);
    memory
}

/// A heap with these arenas, each with so many pools in use.
pub fn heap(minor: u8, pools: Vec<super::arenas::Arena>) -> PythonHeap {
    let (objects, layout) = layouts(minor);
    PythonHeap {
        arenas: pools.iter().map(|arena| arena.range.clone()).collect(),
        allocator: Allocator::Pools(pools),
        layout,
        objects,
        placement: placement(minor),
    }
}
