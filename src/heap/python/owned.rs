//! What objects own apart from their own block: items of lists, keys and values of dicts, tables of sets, buffers of arrays.
//!
//! Structures: Include/cpython/listobject.h, bytearrayobject.h, setobject.h; Objects/dict-common.h, later
//! Include/internal/pycore_dict.h; Modules/arraymodule.c, _collectionsmodule.c, v3.8.18 to v3.15.0;
//! numpy/core/include/numpy/
//! ndarraytypes.h, v1.26.4 and v2.1.0. Offsets are from the end of the object's header.

use super::pools::{ALIGNMENT, MAX_BLOCK, PoolHeader};
use super::types::{HEAP_TYPE, IS_DICT, IS_LIST, TypeInfo};
use crate::bytes::{u32_at, u64_at};
use crate::cpython::heap_layout::{HeapLayout, MANAGED_DICT};
use crate::cpython::object_layout::{InstanceDict, ObjectLayout};

/// The largest buffer that is believed, bytes.
const MAX_BYTES: u64 = 1 << 46;
/// The largest number of dimensions of an array (`NPY_MAXDIMS`, 64 from 2.0 on).
const MAX_DIMENSIONS: usize = 64;
/// Bytes of a block of a deque (`struct BLOCK`, Modules/_collectionsmodule.c), and the items in it.
const DEQUE_BLOCK: u64 = 528;
const DEQUE_ITEMS: u64 = 64;
/// `NPY_ARRAY_OWNDATA`
const OWNS_DATA: u32 = 4;

/// The kinds of types whose objects own buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Nothing,
    List,
    Dict,
    Set,
    Array,
    ByteArray,
    NdArray,
    Deque,
}

impl Owner {
    /// The kind of a type, but for classes derived from it.
    pub fn of_type(name: &[u8], flags: u64) -> Owner {
        let is_built_in = flags & HEAP_TYPE == 0;
        match name {
            _ if flags & IS_LIST != 0 => Owner::List,
            _ if flags & IS_DICT != 0 => Owner::Dict,
            b"frozendict" if is_built_in => Owner::Dict,
            b"set" | b"frozenset" if is_built_in => Owner::Set,
            b"bytearray" if is_built_in => Owner::ByteArray,
            // The name of a class of Python has no dot.
            b"array.array" => Owner::Array,
            b"numpy.ndarray" => Owner::NdArray,
            b"collections.deque" => Owner::Deque,
            _ => Owner::Nothing,
        }
    }

    /// Whether its buffers may be large. Blocks of a deque never are.
    pub fn may_be_large(self) -> bool {
        !matches!(self, Owner::Nothing | Owner::Deque)
    }
}

/// A buffer, or where its size has to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// At an address, so many bytes.
    Bytes(u64, u64),
    /// Blocks apart from each other: their number, and the bytes of each.
    Blocks(u64, u64),
    /// A block of an arena somewhere around this address: its pool has the size.
    InPool(u64),
    /// Values of a dict, which may be part of the object whose attributes they are.
    Values(u64),
    /// The keys of a dict.
    Keys(u64),
    /// An array's buffer, and the address of what describes its items; the number of items.
    Items { at: u64, descriptor: u64, count: u64 },
    /// An array's buffer, with the address and number of its dimensions.
    Shaped { at: u64, shape: u64, dimensions: usize },
}

/// What is read to know the size of a buffer: address and length.
pub type Wanted = (u64, usize);

/// Reads the members of objects of one process.
#[derive(Clone, Copy, Debug)]
pub struct Members {
    objects: ObjectLayout,
    bytearray_has_bytes: bool,
    /// Bytes of a pool; 0: there are none.
    pool: u64,
    /// Bytes ahead of the items of a list: in free-threaded builds the block begins with their number (`_PyListArray`,
    /// Objects/listobject.c, v3.13.0).
    before_items: u64,
}

impl Members {
    pub fn new(objects: ObjectLayout, heap: &HeapLayout, has_pools: bool) -> Members {
        Members {
            objects,
            bytearray_has_bytes: heap.bytearray_has_bytes,
            pool: if has_pools { heap.pool.into() } else { 0 },
            before_items: if has_pools { 0 } else { 8 },
        }
    }

    /// What the object that begins at `offset` of a block owns. `at`: the block's address; of the block, `bytes` has
    /// the first ones
    /// at least.
    pub fn buffer(&self, info: &TypeInfo, bytes: &[u8], offset: u64, at: u64) -> Option<Buffer> {
        let object = usize::try_from(offset).ok()?;
        let body = object + usize::from(self.objects.body);
        let word = |position: usize| u64_at(bytes, position);
        let member = |n: usize| word(body.checked_add(8 * n)?);
        match info.owner {
            Owner::List => {
                let place = object + usize::from(self.objects.list_items);
                let (items, allocated) = (word(place)?, word(place + 8)?);
                let size = allocated.checked_mul(8)?.checked_add(self.before_items)?;
                (allocated > 0).then_some(Buffer::Bytes(items.checked_sub(self.before_items)?, size))
            }
            Owner::Set => {
                let (mask, table) = (member(2)?, member(3)?);
                let is_inside = table.wrapping_sub(at) < bytes.len() as u64;
                let slots = mask.checked_add(1).filter(|slots| slots.is_power_of_two())?;
                (!is_inside).then_some(Buffer::Bytes(table, slots.checked_mul(16)?))
            }
            Owner::ByteArray => {
                let buffer = Buffer::Bytes(member(2)?, member(1)?);
                (!self.bytearray_has_bytes).then_some(buffer)
            }
            Owner::Array => Some(Buffer::Items {
                at: member(1)?,
                count: member(2)?,
                descriptor: member(3)?,
            }),
            Owner::Deque => {
                let (length, left) = (member(0)?, member(3)?);
                let blocks = length.checked_add(left)?.div_ceil(DEQUE_ITEMS).max(1);
                Some(Buffer::Blocks(blocks, DEQUE_BLOCK))
            }
            Owner::NdArray => {
                let dimensions = u32_at(bytes, body + 8)? as usize;
                let owns = u32_at(bytes, body + 48)? & OWNS_DATA != 0;
                let shape = member(2)?;
                (owns && (1..=MAX_DIMENSIONS).contains(&dimensions)).then_some(Buffer::Shaped {
                    at: member(0)?,
                    shape,
                    dimensions,
                })
            }
            Owner::Dict => {
                let keys = word(object + usize::from(self.objects.dict_keys))?;
                match (
                    word(object + usize::from(self.objects.dict_values))?,
                    self.objects.instance_dict,
                ) {
                    (0, _) => Some(Buffer::Keys(keys)),
                    // Keys of their own are the class's.
                    (values, Some(InstanceDict::DictOrInline(_))) => Some(Buffer::Values(values)),
                    (values, _) => Some(Buffer::InPool(values)),
                }
            }
            Owner::Nothing => {
                let before = |distance: u16| word(object.checked_sub(distance.into())?);
                let values = match self.objects.instance_dict? {
                    InstanceDict::ValuesAndDict { values, .. } => before(values)?,
                    InstanceDict::ValuesOrDict(at) => before(at).filter(|word| word & 1 == 1)?,
                    InstanceDict::DictOrInline(_) => 0,
                };
                (values != 0 && info.flags & MANAGED_DICT != 0).then_some(Buffer::InPool(values))
            }
        }
    }

    /// What has to be read for the size of a buffer.
    pub fn wanted(&self, buffer: Buffer) -> Option<Wanted> {
        match buffer {
            Buffer::Bytes(..) | Buffer::Blocks(..) => None,
            Buffer::InPool(at) => (self.pool != 0).then(|| (at - at % self.pool, PoolHeader::BYTES)),
            Buffer::Values(at) => Some((at, 8)),
            Buffer::Keys(at) => Some((at, 16)),
            Buffer::Items { descriptor, .. } => Some((descriptor, 8)),
            Buffer::Shaped { shape, dimensions, .. } => Some((shape, dimensions * 16)),
        }
    }

    /// Address and size of a buffer, with the bytes that were [wanted](Members::wanted) for it. `None`: there is none
    /// of its own.
    pub fn sized(&self, buffer: Buffer, bytes: &[u8]) -> Option<(u64, u64)> {
        let (at, size) = match buffer {
            Buffer::Bytes(at, size) => (at, size),
            Buffer::Blocks(count, size) => (0, count.checked_mul(size)?),
            Buffer::InPool(at) => {
                let header = PoolHeader::parse(bytes)?;
                let is_pool = header.is_plausible(at - at % self.pool.max(1), self.pool as u32);
                is_pool.then(|| (at, u64::from(header.block())))?
            }
            // `struct _dictvalues`, Include/internal/pycore_dict.h, v3.13.0: capacity, size, embedded, valid.
            Buffer::Values(at) => {
                let [capacity, _, embedded, ..] = *bytes else {
                    return None;
                };
                let capacity = u64::from(capacity);
                // The order of insertion follows, a byte for each.
                (embedded == 0).then_some((at, 8 + 8 * capacity + capacity.next_multiple_of(8)))?
            }
            Buffer::Keys(at) => (at, self.keys_size(bytes)?),
            Buffer::Items { at, count, .. } => (at, count.checked_mul(u32_at(bytes, 4)?.clamp(1, 64).into())?),
            Buffer::Shaped { at, dimensions, .. } => {
                // Of an array with data of its own, the longest step and its number are all of it.
                let extent = |n: usize| u64_at(bytes, 8 * n)?.checked_mul(u64_at(bytes, 8 * (dimensions + n))?);
                (at, (0..dimensions).filter_map(extent).max()?)
            }
        };
        (size > 0 && size <= MAX_BYTES).then_some((at, size))
    }

    /// Bytes of a keys object, of which these are the first ones.
    fn keys_size(&self, bytes: &[u8]) -> Option<u64> {
        let usable = |slots: u64| slots.checked_mul(2).map(|twice| twice / 3);
        if self.objects.dict_kinds {
            let &[slots, index, kind] = bytes.get(8..11)?.first_chunk()?;
            let slots = 1_u64.checked_shl(slots.into()).filter(|slots| *slots <= MAX_BYTES)?;
            let index = 1_u64.checked_shl(index.into()).filter(|index| *index <= MAX_BYTES)?;
            let entry = if kind == 0 { 24 } else { 16 };
            return usable(slots)?.checked_mul(entry)?.checked_add(index + 32);
        }
        let slots = u64_at(bytes, 8)?;
        let width = match slots {
            0..=0xff => 1,
            0x100..=0xffff => 2,
            0x1_0000..=0xffff_ffff => 4,
            _ => 8,
        };
        (slots.is_power_of_two() && slots <= MAX_BYTES).then_some(())?;
        usable(slots)?.checked_mul(24)?.checked_add(slots * width + 40)
    }
}

/// Bytes of the block that a buffer of so many bytes has in an arena. `None`: it is too large for one.
pub fn block_size(bytes: u64) -> Option<u64> {
    let block = bytes.checked_next_multiple_of(ALIGNMENT.into())?;
    (block <= MAX_BLOCK).then_some(block)
}

#[cfg(test)]
mod tests {
    use super::super::fake::{ALLOCATED, ARENA, POOL, layouts, pool};
    use super::*;

    fn members(minor: u8) -> Members {
        let (objects, layout) = layouts(minor);
        Members::new(objects, &layout, true)
    }

    fn info(owner: Owner, flags: u64) -> TypeInfo {
        TypeInfo {
            at: ALLOCATED,
            name: b"x".to_vec(),
            full_name: b"x".to_vec(),
            flags,
            least: 16,
            offset: 0,
            may_exceed_pools: false,
            owner,
        }
    }

    fn bytes(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// What an object owns whose words are these, if it begins at this word of its block, and what has to be read is `more`.
    fn owned(minor: u8, owner: Owner, words: &[u64], start: u64, more: &[u8]) -> Option<(u64, u64)> {
        let members = members(minor);
        let buffer = members.buffer(&info(owner, MANAGED_DICT), &bytes(words), 8 * start, ARENA)?;
        assert_eq!(members.wanted(buffer).is_none(), more.is_empty(), "{buffer:?}");
        members.sized(buffer, more)
    }

    const AT: u64 = ALLOCATED;

    #[test]
    fn buffers_of_objects() {
        let head = [1, AT];
        let object = |members: &[u64]| [&head, members].concat();
        let shaped = object(&[AT, 2, AT, AT, 0, AT, 5]);
        let set = |table: u64| object(&[5, 5, 31, table, 0, 0]);
        let keys_old = bytes(&[1, 1 << 10]);
        let keys_new = |kind: u8| [&bytes(&[1])[..], &[10, 11, kind, 0, 0, 0, 0, 0]].concat();
        let values = [30, 4, 0, 1, 0, 0, 0, 0];
        let embedded = [30, 4, 1, 1, 0, 0, 0, 0];
        let in_pool = pool(ARENA, 0, 96, 3, &[])[..PoolHeader::BYTES].to_vec();
        let split = object(&[3, 0, AT, ARENA + 500]);
        type Case<'a> = (&'a str, u8, Owner, &'a [u64], u64, &'a [u8], Option<(u64, u64)>);
        let cases: &[Case] = &[
            ("a list", 12, Owner::List, &object(&[5, AT, 8]), 0, &[], Some((AT, 64))),
            ("an empty list", 12, Owner::List, &object(&[0, 0, 0]), 0, &[], None),
            ("a set", 12, Owner::Set, &set(AT), 0, &[], Some((AT, 512))),
            ("a set without a table", 12, Owner::Set, &set(ARENA + 56), 0, &[], None),
            (
                "a bytearray",
                12,
                Owner::ByteArray,
                &object(&[5, 9, AT, AT]),
                0,
                &[],
                Some((AT, 9)),
            ),
            (
                "a bytearray with an object",
                15,
                Owner::ByteArray,
                &object(&[5, 9, AT, AT]),
                0,
                &[],
                None,
            ),
            (
                "an array",
                12,
                Owner::Array,
                &object(&[5, AT, 7, AT]),
                0,
                &bytes(&[8 << 32]),
                Some((AT, 56)),
            ),
            (
                "a deque",
                12,
                Owner::Deque,
                &object(&[70, AT, AT, 30, 35]),
                0,
                &[],
                Some((0, 2 * 528)),
            ),
            (
                "an array of C",
                12,
                Owner::NdArray,
                &shaped,
                0,
                &bytes(&[3, 5, 40, 8]),
                Some((AT, 120)),
            ),
            (
                "an array of Fortran",
                12,
                Owner::NdArray,
                &shaped,
                0,
                &bytes(&[3, 5, 8, 24]),
                Some((AT, 120)),
            ),
            (
                "a dict up to 3.10",
                8,
                Owner::Dict,
                &object(&[3, 0, AT, 0]),
                0,
                &keys_old,
                Some((AT, 40 + 2048 + 682 * 24)),
            ),
            (
                "a dict",
                12,
                Owner::Dict,
                &object(&[3, 0, AT, 0]),
                0,
                &keys_new(0),
                Some((AT, 32 + 2048 + 682 * 24)),
            ),
            (
                "a dict of texts",
                12,
                Owner::Dict,
                &object(&[3, 0, AT, 0]),
                0,
                &keys_new(1),
                Some((AT, 32 + 2048 + 682 * 16)),
            ),
            (
                "attributes",
                11,
                Owner::Dict,
                &split,
                0,
                &in_pool,
                Some((ARENA + 500, 96)),
            ),
            (
                "attributes of 3.13",
                13,
                Owner::Dict,
                &split,
                0,
                &values,
                Some((ARENA + 500, 280)),
            ),
            (
                "attributes in the instance",
                13,
                Owner::Dict,
                &split,
                0,
                &embedded,
                None,
            ),
            (
                "values of an instance",
                11,
                Owner::Nothing,
                &[ARENA + 96, 0, 0, 0, 1, AT],
                4,
                &in_pool,
                Some((ARENA + 96, 96)),
            ),
            (
                "values of 3.12",
                12,
                Owner::Nothing,
                &[0, ARENA + 97, 0, 0, 1, AT],
                4,
                &in_pool,
                Some((ARENA + 97, 96)),
            ),
            (
                "a dict of an instance",
                12,
                Owner::Nothing,
                &[0, ARENA + 96, 0, 0, 1, AT],
                4,
                &[],
                None,
            ),
            ("nothing", 8, Owner::Nothing, &object(&[]), 0, &[], None),
        ];
        for (name, minor, owner, words, start, more, expected) in cases {
            assert_eq!(owned(*minor, *owner, words, *start, more), *expected, "{name}");
        }
    }

    #[test]
    fn items_of_free_threaded_builds_have_their_number_ahead() {
        let (objects, layout) = layouts(14);
        let members = Members::new(objects, &layout, false);
        let buffer = |words: &[u64]| members.buffer(&info(Owner::List, 0), &bytes(words), 0, ARENA);
        assert_eq!(buffer(&[1, AT, 5, AT, 8]), Some(Buffer::Bytes(AT - 8, 72)));
        for words in [[1, AT, 0, 0, 0], [1, AT, 5, 4, 8], [1, AT, 5, AT, u64::MAX]] {
            assert_eq!(buffer(&words), None, "{words:?}");
        }
    }

    #[test]
    fn forged_members_own_nothing() {
        let head = [1, AT];
        let object = |members: &[u64]| [&head, members].concat();
        let huge = u64::MAX;
        type Case<'a> = (&'a str, u8, Owner, &'a [u64], &'a [u8]);
        let cases: &[Case] = &[
            (
                "a list that is being sorted",
                12,
                Owner::List,
                &object(&[5, AT, huge]),
                &[],
            ),
            ("a huge list", 12, Owner::List, &object(&[5, AT, 1 << 60]), &[]),
            ("a list that is cut", 12, Owner::List, &object(&[5, AT]), &[]),
            ("a set of all", 12, Owner::Set, &object(&[5, 5, huge, AT]), &[]),
            ("a set with a wrong mask", 12, Owner::Set, &object(&[5, 5, 30, AT]), &[]),
            ("a huge set", 12, Owner::Set, &object(&[5, 5, (1 << 62) - 1, AT]), &[]),
            ("a huge bytearray", 12, Owner::ByteArray, &object(&[5, huge, AT]), &[]),
            ("a huge array", 12, Owner::Array, &object(&[5, AT, huge, AT]), &[0; 8]),
            (
                "a deque with a huge index",
                12,
                Owner::Deque,
                &object(&[70, AT, AT, huge, 35]),
                &[],
            ),
            (
                "an array without dimensions",
                12,
                Owner::NdArray,
                &object(&[AT, 0, AT, AT, 0, AT, 4]),
                &[],
            ),
            (
                "an array with many",
                12,
                Owner::NdArray,
                &object(&[AT, 65, AT, AT, 0, AT, 4]),
                &[],
            ),
            (
                "an array of others' data",
                12,
                Owner::NdArray,
                &object(&[AT, 1, AT, AT, 0, AT, 3]),
                &[],
            ),
            (
                "a huge array of numbers",
                12,
                Owner::NdArray,
                &object(&[AT, 1, AT, AT, 0, AT, 4]),
                &[0xff; 16],
            ),
            ("huge keys", 12, Owner::Dict, &object(&[3, 0, AT, 0]), &[0xff; 16]),
            (
                "huge keys up to 3.10",
                8,
                Owner::Dict,
                &object(&[3, 0, AT, 0]),
                &[0xff; 16],
            ),
            ("keys that are cut", 8, Owner::Dict, &object(&[3, 0, AT, 0]), &[1; 9]),
            (
                "values in no pool",
                8,
                Owner::Dict,
                &object(&[3, 0, AT, ARENA]),
                &[0xff; 48],
            ),
        ];
        for (name, minor, owner, words, more) in cases {
            let members = members(*minor);
            let buffer = members.buffer(&info(*owner, 0), &bytes(words), 0, ARENA);
            let found = buffer.and_then(|buffer| members.sized(buffer, more));
            assert_eq!(found, None, "{name}");
        }
        for minor in 8..=15 {
            for owner in [
                Owner::List,
                Owner::Dict,
                Owner::Set,
                Owner::Array,
                Owner::NdArray,
                Owner::Deque,
                Owner::Nothing,
            ] {
                for length in 0..80 {
                    for fill in [0, 1, 0x7f, 0xff] {
                        let words = vec![fill; length];
                        let buffer = members(minor).buffer(&info(owner, MANAGED_DICT), &words, 32, huge - 100);
                        let sized = buffer.and_then(|buffer| members(minor).sized(buffer, &vec![fill; length]));
                        assert!(sized.is_none_or(|(_, size)| size <= MAX_BYTES));
                    }
                }
            }
        }
    }

    #[test]
    fn blocks_are_rounded_to_their_sizes() {
        assert_eq!(
            [1, 16, 17, 512].map(block_size),
            [Some(16), Some(16), Some(32), Some(512)]
        );
        assert_eq!([513, u64::MAX].map(block_size), [None, None]);
        assert_eq!(POOL % 16, 0);
    }
}
