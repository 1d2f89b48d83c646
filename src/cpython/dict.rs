//! Entries of `dict` objects of a target, and of the attributes that instances keep by the keys of their class.

use super::object_layout::ObjectLayout;
use crate::process::memory::Memory;

/// One entry of a keys table: addresses of key and value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DictEntry {
    /// Hash of the key; 0 where keys are all strings, which have their own hash (3.11 and later).
    pub hash: u64,
    pub key: u64,
    pub value: u64,
}

/// Where a table's entries lie.
#[derive(Clone, Copy, Debug)]
pub struct KeysTable {
    first: u64,
    count: u64,
    /// Entries are keys and values only.
    bare: bool,
    /// First value, if values lie apart from their keys.
    values: Option<u64>,
}

impl KeysTable {
    /// The table of a `dict` object.
    pub fn of_dict(memory: &dyn Memory, objects: &ObjectLayout, dict: u64) -> Option<KeysTable> {
        let word = |offset: u16| memory.u64(dict.checked_add(offset.into())?);
        let values = match word(objects.dict_values)? {
            0 => None,
            values => Some(values.checked_add(objects.values_first.into())?),
        };
        KeysTable::of_keys(memory, objects, word(objects.dict_keys)?, values)
    }

    /// The table of a keys object. `values`: address of the first value, if they lie apart.
    pub fn of_keys(memory: &dyn Memory, objects: &ObjectLayout, keys: u64, values: Option<u64>) -> Option<KeysTable> {
        let word = |offset: u64| memory.u64(keys.checked_add(offset)?);
        // Objects/dict-common.h, v3.6 to v3.10: dk_size, entries of hash, key and value. pycore_dict.h, v3.11 and
        // later: log2 of the index's bytes; keys that are all strings have no hash.
        if objects.dict_kinds {
            let mut small = [0; 2];
            memory.read(keys.checked_add(9)?, &mut small).then_some(())?;
            let index = 1u64.checked_shl(small[0].into()).filter(|n| *n < 1 << 40)?;
            return Some(KeysTable {
                first: keys.checked_add(32)?.checked_add(index)?,
                count: word(24)?,
                bare: small[1] != 0,
                values,
            });
        }
        let size = word(8)?;
        let width = match size {
            0..=0xff => 1,
            0x100..=0xffff => 2,
            0x1_0000..=0xffff_ffff => 4,
            _ => 8,
        };
        Some(KeysTable {
            first: keys.checked_add(40)?.checked_add(size.checked_mul(width)?)?,
            count: word(32)?,
            bare: false,
            values,
        })
    }

    /// The first `max` entries at most that are in use, in the order in which they were added. `None`: unreadable.
    pub fn entries(&self, memory: &dyn Memory, max: usize) -> Option<Vec<DictEntry>> {
        let count = usize::try_from(self.count).map_or(max, |n| n.min(max));
        let words = if self.bare { 2 } else { 3 };
        let table = words_at(memory, self.first, words * count)?;
        let values = match self.values {
            Some(at) => Some(words_at(memory, at, count)?),
            None => None,
        };
        let entry = |(i, words): (usize, &[u64])| {
            let (hash, key, value) = match *words {
                [hash, key, value] => (hash, key, value),
                [key, value] => (0, key, value),
                _ => return None,
            };
            let value = values.as_ref().map_or(Some(value), |values| values.get(i).copied())?;
            // Deleted, or not set in this instance.
            (key != 0 && value != 0).then_some(DictEntry { hash, key, value })
        };
        Some(table.chunks_exact(words).enumerate().filter_map(entry).collect())
    }
}

fn words_at(memory: &dyn Memory, at: u64, count: usize) -> Option<Vec<u64>> {
    let mut raw = vec![0; 8 * count];
    memory.read(at, &mut raw).then_some(())?;
    let word = |b: &[u8]| b.try_into().map_or(0, u64::from_le_bytes);
    Some(raw.chunks_exact(8).map(word).collect())
}
