//! Blocks to types.
//!
//! Where a block is an object, a word of it leads to the object's type. Where in the block the object begins follows
//! from the
//! type's flags, so a type is accepted only if its flags put the object where the word was found. A type is an object
//! whose own type
//! is a type. Types lie outside of Python's arenas: they are larger than its blocks, or variables.
//!
//! Flags and members of types: Include/object.h and Include/cpython/object.h, v3.8.18 to v3.15.0.
//!
//! Classes of Python have only their own name in `tp_name`. The name of the module is in their namespace, and that of the
//! class around them in `ht_qualname`.

use std::ops::Range;

use rustc_hash::FxHashMap;

use super::is_in;
use super::owned::Owner;
use super::pools::MAX_BLOCK;
use crate::bytes::u64_at;
use crate::cpython::dict::KeysTable;
use crate::cpython::object_layout::ObjectLayout;
use crate::cpython::strings;
use crate::cpython_layout::Layout;
use crate::event::PAGE;
use crate::process::memory::{Memory, read_to_zero};

/// Types that are kept at most.
const MAX_TYPES: usize = 1 << 16;
/// Addresses at most of which it is remembered that no type is there.
const MAX_REFUSED: usize = 1 << 20;
/// Types of types, and bases, that are followed at most.
const MAX_DEPTH: u32 = 16;
/// Bytes of a name that are kept.
const MAX_NAME: usize = 128;
/// Entries of a class's namespace that are searched for its module. In most it is the first one.
const MAX_ENTRIES: usize = 64;
/// Names in such entries that are read in all: classes without a module are rare.
const MAX_KEYS: u32 = 1 << 14;
/// The largest objects that a type may have, and the largest items, bytes.
const MAX_BASIC: u64 = 1 << 20;
const MAX_ITEM: u64 = 1 << 16;
/// Addresses of programs end here.
const USER_END: u64 = 1 << 47;

/// `Py_TPFLAGS_HEAPTYPE`
pub const HEAP_TYPE: u64 = 1 << 9;
/// `Py_TPFLAGS_HAVE_GC`
const HAS_GC: u64 = 1 << 14;
/// `Py_TPFLAGS_LIST_SUBCLASS`, `Py_TPFLAGS_DICT_SUBCLASS`, `Py_TPFLAGS_TYPE_SUBCLASS`
pub const IS_LIST: u64 = 1 << 25;
pub const IS_DICT: u64 = 1 << 29;
/// `Py_TPFLAGS_UNICODE_SUBCLASS`
const IS_TEXT: u64 = 1 << 28;
const IS_TYPE: u64 = 1 << 31;
/// Bytes of the header of the garbage collector, and of what may be ahead of it.
const HEADER: u64 = 16;
/// Where an object may begin in a block.
const OFFSETS: [u64; 3] = [0, HEADER, 2 * HEADER];

/// How objects lie in blocks.
#[derive(Clone, Copy, Debug)]
pub struct Placement {
    /// Flags of types that put two words ahead of objects.
    pub pre_header: u64,
    /// Objects have no header of the garbage collector, and more than a count in their first word.
    pub free_threaded: bool,
    /// `tp_base`, from the start of a type.
    base: u64,
    item_size: u64,
    /// Where text is in a `str`.
    layout: Layout,
    /// Bytes of a type that are read.
    read: usize,
}

impl Placement {
    pub fn new(objects: &ObjectLayout, layout: &Layout, pre_header: u64, free_threaded: bool) -> Placement {
        let base = u64::from(objects.type_flags) + 88;
        Placement {
            pre_header,
            free_threaded,
            base,
            item_size: u64::from(objects.type_basicsize) + 8,
            layout: *layout,
            read: base as usize + 16,
        }
    }

    /// Bytes of the smallest `str`, whose text is a zero.
    fn smallest_text(&self) -> u64 {
        u64::from(self.layout.str_ascii_data) + 1
    }

    /// `tp_dict`, from the start of a type.
    fn namespace(&self) -> u64 {
        self.base + 8
    }

    /// Where objects of a type with these flags begin in their blocks.
    fn offset(&self, flags: u64) -> u64 {
        let has = |wanted: u64| u64::from(flags & wanted != 0);
        let header = has(HAS_GC) * u64::from(!self.free_threaded) + has(self.pre_header);
        header * HEADER
    }
}

/// What a type says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TypeInfo {
    /// avma.
    pub at: u64,
    /// `tp_name`: with the module, if C code defines the type, but for built-in types.
    pub name: Vec<u8>,
    /// With the module, and the classes or functions around it, for all but built-in types.
    pub full_name: Vec<u8>,
    pub flags: u64,
    /// Bytes of the smallest object.
    pub least: u64,
    /// Where its objects begin in their blocks.
    pub offset: u64,
    /// Some of its objects may be larger than the blocks of pools.
    pub may_exceed_pools: bool,
    pub owner: Owner,
}

/// The types of one process, looked up when they are first met.
pub struct Types<'a> {
    memory: &'a dyn Memory,
    objects: ObjectLayout,
    placement: Placement,
    /// Where no types are, in ascending order.
    arenas: Vec<Range<u64>>,
    /// `None`: no type is there.
    known: FxHashMap<u64, Option<u32>>,
    refused: usize,
    /// Addresses asked for last, by their lowest bits that differ: most blocks are like their neighbours.
    recent: Vec<(u64, Option<u32>)>,
    list: Vec<TypeInfo>,
    /// avma of the text `__module__` that was found last: namespaces share one.
    module_key: u64,
    /// How many names in namespaces may still be read.
    keys_left: u32,
    pub is_truncated: bool,
}

const RECENT: usize = 1024;

impl<'a> Types<'a> {
    /// `arenas`: in ascending order.
    pub fn new(
        memory: &'a dyn Memory,
        objects: ObjectLayout,
        placement: Placement,
        arenas: Vec<Range<u64>>,
    ) -> Types<'a> {
        Types {
            memory,
            objects,
            placement,
            arenas,
            known: FxHashMap::default(),
            refused: 0,
            recent: vec![(0, None); RECENT],
            list: Vec::new(),
            module_key: 0,
            keys_left: MAX_KEYS,
            is_truncated: false,
        }
    }

    pub fn get(&self, index: u32) -> Option<&TypeInfo> {
        self.list.get(index as usize)
    }

    fn is_in_arena(&self, avma: u64) -> bool {
        is_in(&self.arenas, avma)
    }

    /// The type of the object in a block of `size` bytes, of which `head` has the first ones, and where it begins there.
    pub fn classify(&mut self, head: &[u8], size: u64) -> Option<(u32, u64)> {
        for offset in OFFSETS {
            let start = usize::try_from(offset).ok()?;
            let references = u64_at(head, start)?;
            let word = u64_at(head, start + usize::from(self.objects.ob_type))?;
            // Not more references than 32 bits have; flags may be above 48 (Include/refcount.h, v3.14.0). Pointers are
            // not like this.
            if !self.placement.free_threaded && references >> 32 & 0xffff != 0 {
                continue;
            }
            let Some(index) = self.find(word) else { continue };
            let info = self.get(index)?;
            if info.offset == offset && info.least + offset <= size {
                // Of a freed object, some word further on may look like a type.
                let is_alive = self.placement.free_threaded || references != 0;
                return is_alive.then_some((index, offset));
            }
        }
        None
    }

    /// The type at an address.
    pub fn find(&mut self, at: u64) -> Option<u32> {
        if !may_be_type(at) {
            return None;
        }
        let slot = (at >> 4) as usize % RECENT;
        if let Some((address, found)) = self.recent.get(slot)
            && *address == at
        {
            return *found;
        }
        let found = if self.is_in_arena(at) {
            None
        } else {
            self.look_up(at, 0)
        };
        if let Some(recent) = self.recent.get_mut(slot) {
            *recent = (at, found);
        }
        found
    }

    fn look_up(&mut self, at: u64, depth: u32) -> Option<u32> {
        if let Some(found) = self.known.get(&at) {
            return *found;
        }
        if depth > MAX_DEPTH || !may_be_type(at) {
            return None;
        }
        // Until it is known: types lead to themselves.
        self.known.insert(at, None);
        let found = self.read(at, depth);
        let index = found.and_then(|info| self.add(info));
        if index.is_some() {
            self.known.insert(at, index);
        } else {
            self.refused += 1;
            if self.refused > MAX_REFUSED {
                self.known.retain(|_, index| index.is_some());
                self.refused = 0;
            }
        }
        index
    }

    fn add(&mut self, info: TypeInfo) -> Option<u32> {
        if self.list.len() >= MAX_TYPES {
            self.is_truncated = true;
            return None;
        }
        self.list.push(info);
        u32::try_from(self.list.len() - 1).ok()
    }

    /// Reads a type.
    fn read(&mut self, at: u64, depth: u32) -> Option<TypeInfo> {
        let mut bytes = [0; 512];
        let bytes = bytes.get_mut(..self.placement.read)?;
        self.memory.read(at, bytes).then_some(())?;
        let word = |offset: u64| u64_at(bytes, usize::try_from(offset).ok()?);
        let meta = word(self.objects.ob_type.into())?;
        let flags = word(self.objects.type_flags.into())?;
        let basic = word(self.objects.type_basicsize.into())?;
        let item = word(self.placement.item_size)?;
        (basic < MAX_BASIC && item < MAX_ITEM && basic >= u64::from(self.objects.body)).then_some(())?;
        let is_own = meta == at;
        let name = self.name(word(self.objects.type_name.into())?)?;
        if is_own {
            (flags & IS_TYPE != 0 && name == b"type").then_some(())?;
        } else {
            (!self.is_in_arena(meta)).then_some(())?;
            let meta = self.look_up(meta, depth + 1)?;
            (self.get(meta)?.flags & IS_TYPE != 0).then_some(())?;
        }
        let base = word(self.placement.base)?;
        let owner = match Owner::of_type(&name, flags) {
            // A class of Python is like the built-in type that it is derived from.
            Owner::Nothing if flags & HEAP_TYPE != 0 && base != at && !self.is_in_arena(base) => {
                let base = self.look_up(base, depth + 1);
                base.and_then(|base| self.get(base))
                    .map_or(Owner::Nothing, |base| base.owner)
            }
            owner => owner,
        };
        let full_name = if flags & HEAP_TYPE != 0 && !name.contains(&b'.') {
            let namespace = word(self.placement.namespace())?;
            self.full_name(at, namespace, &name, depth)
        } else {
            name.clone()
        };
        Some(TypeInfo {
            at,
            name,
            full_name,
            flags,
            // `tp_basicsize` is that of a `str` of which the text is elsewhere; ASCII text has a shorter header
            // (PyASCIIObject, Include/cpython/unicodeobject.h, v3.8.18 to v3.15.0).
            least: if flags & (IS_TEXT | HEAP_TYPE) == IS_TEXT {
                basic.min(self.placement.smallest_text())
            } else {
                basic
            },
            may_exceed_pools: item > 0 || flags & IS_TEXT != 0 || basic + self.placement.offset(flags) > MAX_BLOCK,
            offset: self.placement.offset(flags),
            owner,
        })
    }

    /// The name of a class of Python with its module, as `repr` has it, as far as that can be read.
    fn full_name(&mut self, at: u64, namespace: u64, name: &[u8], depth: u32) -> Vec<u8> {
        let mut full = name.to_vec();
        // Ahead of `ht_cached_keys`.
        let qualified = at.checked_add(u64::from(self.objects.type_keys) - 8);
        if let Some(text) = qualified.and_then(|place| self.text(self.memory.u64(place)?, depth))
            && text.rsplit(|c| *c == b'.').next() == Some(name)
        {
            full = text;
        }
        match self.module(namespace, depth) {
            Some(module) if module != b"builtins" => [&module, &b"."[..], &full].concat(),
            _ => full,
        }
    }

    /// The name of the module in a class's namespace.
    fn module(&mut self, namespace: u64, depth: u32) -> Option<Vec<u8>> {
        let table = KeysTable::of_dict(self.memory, &self.objects, namespace)?;
        let entries = table.entries(self.memory, MAX_ENTRIES)?;
        let known = entries.iter().find(|entry| entry.key == self.module_key);
        if let Some(entry) = known {
            return self.text(entry.value, depth);
        }
        for entry in &entries {
            self.keys_left = self.keys_left.checked_sub(1)?;
            if self.text(entry.key, depth).is_some_and(|text| text == b"__module__") {
                self.module_key = entry.key;
                return self.text(entry.value, depth);
            }
        }
        None
    }

    /// The beginning of the text of a `str`. `None`: there is none.
    fn text(&mut self, at: u64, depth: u32) -> Option<Vec<u8>> {
        let kind = self.memory.u64(at.checked_add(self.objects.ob_type.into())?)?;
        let kind = self.look_up(kind, depth + 1)?;
        (self.get(kind)?.flags & IS_TEXT != 0).then_some(())?;
        let (text, _) = strings::read_str_start(self.memory, &self.placement.layout, at, MAX_NAME as u64)?;
        Some(text.into_bytes())
    }

    /// The text at an address, which is a name: it has no control characters and ends.
    fn name(&self, at: u64) -> Option<Vec<u8>> {
        // A longer name is cut.
        let name = read_to_zero(self.memory, at, MAX_NAME)?;
        (!name.is_empty() && name.iter().all(|byte| *byte >= b' ' && *byte != 0x7f)).then_some(name)
    }
}

/// Whether a type may be at this address.
fn may_be_type(at: u64) -> bool {
    at.is_multiple_of(8) && (PAGE..USER_END).contains(&at)
}

#[cfg(test)]
mod tests {
    use super::super::fake::{
        ALLOCATED, ARENA, DATA, FLOAT, FakeMemory, GC, LIST, STR, TYPE, layouts, placement, put_dict, put_text,
        put_type, with_types,
    };
    use super::*;

    fn types(memory: &FakeMemory, minor: u8) -> Types<'_> {
        let (objects, _) = layouts(minor);
        Types::new(
            memory,
            objects,
            placement(minor),
            std::iter::once(ARENA..ARENA + (1 << 20)).collect(),
        )
    }

    /// The first words of a block.
    fn block(words: &[u64]) -> Vec<u8> {
        let mut words = words.to_vec();
        words.resize(16, 0);
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn blocks_are_objects_where_their_types_put_them() {
        let mut memory = with_types();
        let class = ALLOCATED;
        put_type(
            &mut memory,
            class,
            TYPE,
            "Point",
            (16, 0),
            1 << 9 | GC | 1 << 4 | 1 << 3,
            FLOAT,
        );
        let derived = ALLOCATED + 0x1000;
        put_type(
            &mut memory,
            derived,
            TYPE,
            "MyList",
            (56, 0),
            1 << 9 | GC | 1 << 25,
            LIST,
        );
        let text = ALLOCATED + 0x2000;
        put_type(&mut memory, text, TYPE, "Text", (80, 0), 1 << 9 | 1 << 28, STR);
        let garbage = ARENA + 64;
        type Case<'a> = (&'a str, u8, &'a [u64], u64, Option<(&'a str, u64)>);
        let cases: &[Case] = &[
            ("a float", 12, &[1, FLOAT], 32, Some(("float", 0))),
            ("a list", 12, &[garbage, garbage, 5, LIST], 64, Some(("list", 16))),
            ("an instance", 12, &[0, 0, 0, 0, 1, class], 48, Some(("Point", 32))),
            (
                "an instance, with one header",
                8,
                &[garbage, garbage, 1, class],
                48,
                Some(("Point", 16)),
            ),
            ("a class of its own", 12, &[0, 0, 1, derived], 80, Some(("MyList", 16))),
            ("an immortal object", 12, &[0xffff_ffff, FLOAT], 32, Some(("float", 0))),
            (
                "an object with flags",
                14,
                &[3 << 62 | 1, FLOAT],
                32,
                Some(("float", 0)),
            ),
            ("a short text", 11, &[1, STR, 5], 64, Some(("str", 0))),
            ("a short text of 3.12", 12, &[1, STR, 5], 48, Some(("str", 0))),
            ("a block that is too small for a text", 11, &[1, STR, 5], 48, None),
            ("a text of a class in a small block", 11, &[1, text, 5], 64, None),
            ("a text of a class", 11, &[1, text, 5], 80, Some(("Text", 0))),
            ("a list where a float would be", 12, &[1, LIST], 64, None),
            ("a float where a list would be", 12, &[0, 0, 1, FLOAT], 64, None),
            ("a freed float", 12, &[0, FLOAT], 32, None),
            (
                "a freed object with a pointer to another type",
                12,
                &[0, 0, 0, LIST, 0x40_0000, class],
                64,
                None,
            ),
            ("a table of types", 12, &[0x7f00_1234_5678, FLOAT], 32, None),
            ("a block that is too small", 12, &[1, FLOAT], 16, None),
            (
                "a list in a block that is too small",
                12,
                &[garbage, garbage, 5, LIST],
                48,
                None,
            ),
            ("a type in an arena", 12, &[1, garbage], 32, None),
            ("a word that is no address", 12, &[1, u64::MAX], 32, None),
            ("memory that cannot be read", 12, &[1, DATA + 0x10_0000], 32, None),
            ("zeros", 12, &[], 64, None),
        ];
        for (name, minor, words, size, expected) in cases {
            let mut types = types(&memory, *minor);
            // The second answer is the one that was remembered.
            for _ in 0..2 {
                let found = types.classify(&block(words), *size);
                let found = found.map(|(index, offset)| (types.get(index).expect("a type").name.clone(), offset));
                let expected = expected.map(|(name, offset)| (name.as_bytes().to_vec(), offset));
                assert_eq!(found, expected, "{name}");
            }
        }
        let mut types = types(&memory, 12);
        let owner = |types: &Types, index: Option<u32>| index.and_then(|index| types.get(index)).map(|info| info.owner);
        let found = types.find(derived);
        assert_eq!(owner(&types, found), Some(Owner::List));
        let found = types.find(class);
        assert_eq!(owner(&types, found), Some(Owner::Nothing));
        for short in 0..40 {
            types.classify(&block(&[1, FLOAT])[..short], 512);
        }
    }

    #[test]
    fn forged_types_are_refused() {
        let (a, b) = (ALLOCATED, ALLOCATED + 0x1000);
        type Forge = Box<dyn Fn(&mut FakeMemory)>;
        let put = |meta: u64, name: &'static str, sizes: (u64, u64), flags: u64| -> Forge {
            Box::new(move |memory| put_type(memory, a, meta, name, sizes, flags, 0))
        };
        let forged: Vec<(&str, Forge)> = vec![
            ("its own type is no type", put(FLOAT, "x", (16, 0), 0)),
            ("it is its own type with another name", put(a, "x", (16, 0), 1 << 31)),
            ("it is its own type without the flag", put(a, "type", (16, 0), 0)),
            ("objects without a header", put(TYPE, "x", (8, 0), 0)),
            ("huge objects", put(TYPE, "x", (1 << 40, 0), 0)),
            ("negative sizes", put(TYPE, "x", (u64::MAX, 0), 0)),
            ("huge items", put(TYPE, "x", (16, 1 << 40), 0)),
            ("no name", put(TYPE, "", (16, 0), 0)),
            ("a name that is no text", put(TYPE, "a\x01b", (16, 0), 0)),
            ("its type is in an arena", put(ARENA, "x", (16, 0), 0)),
            (
                "two types of each other",
                Box::new(move |memory| {
                    put_type(memory, a, b, "a", (16, 0), 1 << 31, 0);
                    put_type(memory, b, a, "b", (16, 0), 1 << 31, 0);
                }),
            ),
            (
                "a name that cannot be read",
                Box::new(move |memory| {
                    put_type(memory, a, TYPE, "a", (16, 0), 0, 0);
                    memory.words(a + 24, &[0x1000_0000]);
                }),
            ),
            (
                "a name at the end of addresses",
                Box::new(move |memory| {
                    put_type(memory, a, TYPE, "a", (16, 0), 0, 0);
                    memory.words(a + 24, &[u64::MAX - 3]);
                }),
            ),
        ];
        for (name, forge) in forged {
            let mut memory = with_types();
            forge(&mut memory);
            assert_eq!(types(&memory, 12).find(a), None, "{name}");
        }
    }

    #[test]
    fn lookups_are_bounded() {
        // Each type's type, or base, is the next one.
        for by_base in [false, true] {
            let mut memory = with_types();
            for n in 0..100 {
                let (at, next) = (ALLOCATED + 0x1000 * n, ALLOCATED + 0x1000 * (n + 1));
                let (meta, base) = if by_base { (TYPE, next) } else { (next, 0) };
                put_type(&mut memory, at, meta, "a", (16, 0), 1 << 31 | 1 << 9, base);
            }
            let mut types = types(&memory, 12);
            types.find(ALLOCATED);
            assert!(memory.reads.get() < 100, "{}", memory.reads.get());
        }
        // Addresses without types are read once.
        let memory = with_types();
        let mut types = types(&memory, 12);
        for _ in 0..3 {
            for n in 0..2000 {
                assert_eq!(types.find(ALLOCATED + 16 * n), None);
            }
        }
        assert_eq!(memory.reads.get(), 2000);
    }

    #[test]
    fn classes_are_named_with_their_modules() {
        let (class, other) = (ALLOCATED, ALLOCATED + 0x1000);
        let dict = ALLOCATED + 0x2000;
        let text = |n: u64| ALLOCATED + 0x3000 + 128 * n;
        let (key, doc, geo, own, outer, builtins) = (text(0), text(1), text(2), text(3), text(4), text(5));
        type Case<'a> = (&'a str, &'a str, u64, u64, &'a [(u64, u64)], &'a str);
        let cases: &[Case] = &[
            (
                "a class",
                "Point",
                own,
                HEAP_TYPE,
                &[(key, geo), (doc, geo)],
                "geo.Point",
            ),
            (
                "the module is no first key",
                "Point",
                own,
                HEAP_TYPE,
                &[(doc, own), (key, geo)],
                "geo.Point",
            ),
            (
                "a class in another one",
                "Point",
                outer,
                HEAP_TYPE,
                &[(key, geo)],
                "geo.Outer.Point",
            ),
            (
                "it has another name now",
                "Other",
                outer,
                HEAP_TYPE,
                &[(key, geo)],
                "geo.Other",
            ),
            ("no module", "Point", outer, HEAP_TYPE, &[(doc, geo)], "Outer.Point"),
            (
                "a module that is no text",
                "Point",
                own,
                HEAP_TYPE,
                &[(key, class)],
                "Point",
            ),
            (
                "a key that is no text",
                "Point",
                own,
                HEAP_TYPE,
                &[(class, geo), (key, geo)],
                "geo.Point",
            ),
            (
                "a qualified name that is no text",
                "Point",
                class,
                HEAP_TYPE,
                &[(key, geo)],
                "geo.Point",
            ),
            (
                "the module of built-in types",
                "Point",
                own,
                HEAP_TYPE,
                &[(key, builtins)],
                "Point",
            ),
            (
                "a class of C",
                "array.array",
                own,
                HEAP_TYPE,
                &[(key, geo)],
                "array.array",
            ),
            ("a built-in type", "Point", outer, 0, &[(key, geo)], "Point"),
        ];
        for minor in 8..=15 {
            for (name, own_name, qualified, flags, entries, expected) in cases {
                let mut memory = with_types();
                for (at, words) in [
                    (key, "__module__"),
                    (doc, "__doc__"),
                    (geo, "geo"),
                    (own, "Point"),
                    (outer, "Outer.Point"),
                    (builtins, "builtins"),
                ] {
                    put_text(&mut memory, minor, at, words);
                }
                put_dict(&mut memory, minor, dict, entries);
                let (objects, _) = layouts(minor);
                // The key is known when the second one is looked up.
                for at in [class, other] {
                    put_type(&mut memory, at, TYPE, own_name, (16, 0), *flags, 0);
                    memory.words(at + 264, &[dict]);
                    memory.words(at + u64::from(objects.type_keys) - 8, &[*qualified]);
                }
                let mut types = types(&memory, minor);
                for at in [class, other] {
                    let index = types.find(at).expect("a type");
                    let found = types
                        .get(index)
                        .map(|info| String::from_utf8_lossy(&info.full_name).into_owned());
                    assert_eq!(found.as_deref(), Some(*expected), "{name} of 3.{minor}");
                }
            }
        }
    }

    #[test]
    fn long_names_are_cut_and_may_cross_pages() {
        let mut memory = with_types();
        put_type(&mut memory, ALLOCATED, TYPE, "x", (16, 0), 0, 0);
        for (name, at, expected) in [
            ("n".repeat(500), ALLOCATED + 0x1000, "n".repeat(MAX_NAME)),
            ("short".into(), ALLOCATED + 0x2000 - 6, "short".into()),
            ("crosses".into(), ALLOCATED + 0x2000 - 3, "crosses".into()),
        ] {
            memory.words(ALLOCATED + 24, &[at]);
            memory.write(at, name.as_bytes());
            memory.write(at + name.len() as u64, &[0]);
            let mut types = types(&memory, 12);
            let index = types.find(ALLOCATED).expect("a type");
            assert_eq!(
                types.get(index).map(|info| info.name.clone()),
                Some(expected.into_bytes())
            );
        }
    }
}
