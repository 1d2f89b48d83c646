//! Classes of C++ objects: an object with virtual functions begins with the address of its virtual table, before which is that of
//! its type information, which has the mangled name. No symbols are needed (Itanium C++ ABI, sections 2.5.2 and 2.9.5).

use std::rc::Rc;

use rustc_hash::FxHashMap;

use crate::process::memory::{Memory, read_to_zero};
use crate::process::smaps::{Area, Smaps};

/// Addresses that are looked at: no program has so many virtual tables.
const MAX_KNOWN: usize = 1 << 16;
/// Longest mangled name, bytes.
const MAX_NAME: usize = 4096;
/// Bytes of names that are read, and of those that are kept, in all.
const MAX_READ: usize = 4 << 20;
const MAX_KEPT: usize = 16 << 20;
/// Largest mapping behind a file's data that is taken for its variables, bytes. A program that is linked at a fixed address has
/// copies of the tables of libraries there.
const MAX_BSS: u64 = 16 << 20;

/// The classes of one process.
pub struct Classes<'a> {
    memory: &'a dyn Memory,
    smaps: &'a Smaps,
    /// By address; `None`: no virtual table is there.
    known: FxHashMap<u64, Option<u32>>,
    names: Vec<Rc<str>>,
    /// By name: each file may have a table of its own for a class.
    indices: FxHashMap<Rc<str>, u32>,
    read: usize,
    kept: usize,
    /// There are more than are named.
    pub is_truncated: bool,
}

impl<'a> Classes<'a> {
    /// `memory` is that of the process with the mappings `smaps`.
    pub fn new(memory: &'a dyn Memory, smaps: &'a Smaps) -> Classes<'a> {
        Classes {
            memory,
            smaps,
            known: FxHashMap::default(),
            names: Vec::new(),
            indices: FxHashMap::default(),
            read: 0,
            kept: 0,
            is_truncated: false,
        }
    }

    /// The class of an object that begins with this word, by its index; `None`: it is no such object.
    pub fn find(&mut self, word: u64) -> Option<u32> {
        if !word.is_multiple_of(8) {
            return None;
        }
        if let Some(known) = self.known.get(&word) {
            return *known;
        }
        if !self.is_static(word) {
            return None;
        }
        if self.known.len() >= MAX_KNOWN || self.read >= MAX_READ || self.kept >= MAX_KEPT {
            self.is_truncated = true;
            return None;
        }
        let class = self.read(word).map(|name| self.index_of(name));
        self.known.insert(word, class);
        class
    }

    fn index_of(&mut self, name: String) -> u32 {
        let next = self.names.len() as u32;
        let name: Rc<str> = name.into();
        let index = *self.indices.entry(name.clone()).or_insert(next);
        if index == next {
            self.kept += name.len();
            self.names.push(name);
        }
        index
    }

    /// The name of a class that was found.
    pub fn name(&self, class: u32) -> Option<&Rc<str>> {
        self.names.get(class as usize)
    }

    /// Whether an address is in the data of a file.
    fn is_static(&self, avma: u64) -> bool {
        let Some(index) = self.smaps.index_of(avma) else {
            return false;
        };
        let is_bss = |area: &Area| area.end - area.start <= MAX_BSS && self.smaps.file_before(index).is_some();
        let area = self.smaps.areas.get(index).filter(|area| area.is_readable);
        area.is_some_and(|area| area.is_file || is_bss(area))
    }

    /// The name of the class with this virtual table.
    fn read(&mut self, table: u64) -> Option<String> {
        let [to_top, information] = self.words(table.checked_sub(16)?)?;
        // An object begins with the table of its first part.
        if to_top != 0 || !information.is_multiple_of(8) || !self.is_static(information) {
            return None;
        }
        let [kind, name] = self.words(information)?;
        if !kind.is_multiple_of(8) || !self.is_static(kind) || !self.is_static(name) {
            return None;
        }
        let mangled = self.mangled(name)?;
        // The mark of names that other files may have, too.
        let mangled = mangled.strip_prefix('*').unwrap_or(&mangled);
        let text = symbolize::demangle(&format!("_ZTI{mangled}")).into_owned();
        text.strip_prefix("typeinfo for ").map(String::from)
    }

    fn words(&self, avma: u64) -> Option<[u64; 2]> {
        Some([self.memory.u64(avma)?, self.memory.u64(avma.checked_add(8)?)?])
    }

    /// A mangled name, which ends.
    fn mangled(&mut self, avma: u64) -> Option<String> {
        let name = read_to_zero(self.memory, avma, MAX_NAME)?;
        // Also if it is none: each costs time.
        self.read += name.len();
        let is_name = !name.is_empty() && name.len() < MAX_NAME && name.iter().all(u8::is_ascii_graphic);
        is_name.then(|| String::from_utf8(name).ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page of data at 0x10000.
    struct Data(Vec<u8>);

    impl Data {
        fn put(&mut self, at: u64, bytes: &[u8]) {
            let at = (at - 0x10000) as usize;
            self.0[at..at + bytes.len()].copy_from_slice(bytes);
        }

        fn put_words(&mut self, at: u64, words: &[u64]) {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            self.put(at, &bytes);
        }
    }

    impl Memory for Data {
        fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
            let at = avma.wrapping_sub(0x10000) as usize;
            let bytes = at.checked_add(buf.len()).and_then(|end| self.0.get(at..end));
            bytes.map(|bytes| buf.copy_from_slice(bytes)).is_some()
        }
    }

    #[test]
    fn classes_are_named_by_their_type_information() {
        let text = b"10000-11000 r--p 00000000 fd:01 42 /a\n20000-30000 rw-p 0 00:00 0 [heap]\n";
        let smaps = Smaps::read(&text[..]).expect("bytes");
        let mut data = Data(vec![0; 4096]);
        let names: [&[u8]; 6] = [
            b"N4leak6WidgetE",
            b"*N12_GLOBAL__N_14NodeE",
            b"3Foo\n",
            b"",
            b"not mangled",
            b"St6vectorIiSaIiEE",
        ];
        for (i, name) in (0..).zip(names) {
            data.put(0x10800 + i * 64, name);
            // The type information, and the virtual table with one function.
            data.put_words(0x10400 + i * 16, &[0x10040, 0x10800 + i * 64]);
            data.put_words(0x10100 + i * 24, &[0, 0x10400 + i * 16, 0x10000]);
        }
        // Of a second part of an object; without type information; with that in the heap, or its name there.
        data.put_words(0x10200, &[-16i64 as u64, 0x10400, 0]);
        data.put_words(0x10218, &[0, 0, 0]);
        data.put_words(0x10230, &[0, 0x20000, 0]);
        data.put_words(0x10248, &[0, 0x10600, 0, 0]);
        data.put_words(0x10600, &[0x10040, 0x20000]);
        data.put_words(0x10290, &[0, 0x10620, 0]);
        data.put_words(0x10620, &[0x10040, 0x10800]);
        // A name without end.
        data.put_words(0x10260, &[0, 0x10700, 0]);
        data.put_words(0x10700, &[0x10040, 0x10fc0]);
        data.put(0x10fc0, &[b'a'; 64]);
        let mut classes = Classes::new(&data, &smaps);
        for (word, expected) in [
            (0x10110, Some("leak::Widget")),
            (0x10128, Some("(anonymous namespace)::Node")),
            (0x10140, None),
            (0x10158, None),
            (0x10170, None),
            (0x10188, Some("std::vector<int, std::allocator<int> >")),
            (0x10210, None),
            (0x10228, None),
            (0x10240, None),
            (0x10258, None),
            (0x10270, None),
            (0x102a0, Some("leak::Widget")), // of another file
            (0x10111, None),
            (0x20000, None),
            (0x10000, None), // the table would begin before the file
            (8, None),
            (0, None),
            (u64::MAX - 7, None),
        ] {
            // It is the same when it is met again.
            for _ in 0..2 {
                let found = classes.find(word);
                assert_eq!(
                    found.and_then(|class| classes.name(class)).map(|name| &**name),
                    expected,
                    "{word:x}"
                );
            }
        }
        assert_eq!(classes.find(0x10110), classes.find(0x102a0));
        assert!(!classes.is_truncated);
    }
}
