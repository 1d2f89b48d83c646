//! Object files that a program creates in its own memory and registers with debuggers (GDB manual, "JIT Compilation
//! Interface"): code of a just-in-time compiler, its names, and the address of its unwind table.

use std::sync::Arc;

use crate::elf::{Elf, SHT_NOBITS, SHT_SYMTAB, cstr_at, u16_at, u32_at, u64_at};
use crate::jit::{MAX_FUNCTIONS, lossy};
use crate::symbols::MAX_NAME;
use crate::{Error, ErrorKind};

/// Maximum size of an object, bytes: one compiled module, without the debug information of a complete program.
const MAX_OBJECT: usize = 16 << 20;
/// Maximum number of executable sections of one object.
const MAX_CODE: usize = 1024;
const SHF_ALLOC: u64 = 2;
/// The kind of function symbols (System V ABI, chapter 4), in the low half of `st_info`.
const STT_FUNC: u8 = 2;

/// What a registered object contains about the code that it describes. All addresses are those of the running process.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct JitObject {
    /// Start, size in bytes, and name of each function.
    pub(crate) functions: Vec<(u64, u64, Arc<str>)>,
    /// Start and end of each range of code.
    pub code: Vec<(u64, u64)>,
    /// Start and size in bytes of its `.eh_frame` in the process. The copy in the object need not be relocated.
    pub eh_frame: Option<(u64, u64)>,
}

impl JitObject {
    /// Reads the copy of an object. In relocatable ones the program must have set the addresses of the sections, as
    /// debuggers expect; sections without one are left out.
    ///
    /// # Errors
    /// If it is not a 64-bit little-endian ELF file, larger than 16 MiB, or if its headers point outside of it.
    pub fn parse(bytes: Vec<u8>) -> Result<JitObject, Error> {
        let len = bytes.len();
        if len > MAX_OBJECT {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a registered object of more than 16 MiB",
            ));
        }
        let elf = Elf::from_object(bytes)?;
        let code = elf
            .sections
            .iter()
            .filter(|s| s.is_code() && s.addr != 0 && s.size != 0);
        let mut object = JitObject {
            code: code.map(|s| (s.addr, s.end())).take(MAX_CODE).collect(),
            ..JitObject::default()
        };
        let table = elf.section(".eh_frame");
        let table = table.filter(|s| s.flags & SHF_ALLOC != 0 && s.kind != SHT_NOBITS && s.addr != 0 && s.size != 0);
        object.eh_frame = table.map(|s| (s.addr, s.size));
        object.read_functions(&elf, len);
        Ok(object)
    }

    /// Start and size in bytes of each function.
    pub fn functions(&self) -> impl Iterator<Item = (u64, u64)> {
        self.functions.iter().map(|f| (f.0, f.1))
    }

    /// `room`: maximum number of bytes of names. They come from the object, so together they are no longer than it,
    /// except for those that share their ends.
    fn read_functions(&mut self, elf: &Elf, room: usize) {
        let Some(table) = elf.sections.iter().find(|s| s.kind == SHT_SYMTAB) else {
            return;
        };
        let strings = elf.sections.get(table.link as usize);
        let Some((symbols, strings)) = elf.raw_data(table).ok().zip(strings.and_then(|s| elf.raw_data(s).ok())) else {
            return;
        };
        let mut room = room.saturating_mul(2);
        for symbol in symbols.chunks_exact(24) {
            let (Some(name), Some(index)) = (u32_at(symbol, 0), u16_at(symbol, 6)) else {
                continue;
            };
            let (Some(value), Some(size)) = (u64_at(symbol, 8), u64_at(symbol, 16)) else {
                continue;
            };
            let section = elf.sections.get(usize::from(index)).filter(|_| index != 0);
            let Some(section) = section.filter(|s| s.is_code() && s.addr != 0) else {
                continue;
            };
            if symbol[4] & 0xf != STT_FUNC || self.functions.len() >= MAX_FUNCTIONS {
                continue;
            }
            let start = if elf.is_relocatable {
                section.addr.checked_add(value)
            } else {
                Some(value)
            };
            let Some(start) = start.filter(|start| (section.addr..section.end()).contains(start)) else {
                continue;
            };
            // A symbol without a size may cover the rest of its section, except for other functions.
            let left = section.end() - start;
            let size = if size == 0 { left } else { size.min(left) };
            let Some(name) = cstr_at(&strings, name as usize, MAX_NAME).filter(|name| !name.is_empty()) else {
                continue;
            };
            let Some(rest) = room.checked_sub(name.len()) else {
                break;
            };
            room = rest;
            self.functions.push((start, size, lossy(name)));
        }
        // Later ranges replace earlier ones: parts after the ranges that contain them.
        self.functions.sort_by_key(|f| std::cmp::Reverse(f.1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::JitCode;

    const TEXT: u64 = 0x7f00_0000_1000;
    const EH: u64 = 0x7f00_0000_2000;

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    /// A relocatable object with `.text`, `.eh_frame`, `.symtab` and `.strtab`, in this order.
    fn object(kind: u16, symbols: &[(u32, u8, u16, u64, u64)], strings: &[u8]) -> Vec<u8> {
        let names = b"\0.text\0.eh_frame\0.symtab\0.strtab\0";
        let mut table = Vec::new();
        for (name, info, section, value, size) in symbols {
            table.extend(name.to_le_bytes());
            table.extend([*info, 0]);
            table.extend(section.to_le_bytes());
            table.extend(words(&[*value, *size]));
        }
        let mut out = vec![0; 64];
        let mut headers = vec![0; 64];
        let mut section = |out: &mut Vec<u8>, name: u32, kind: u32, flags: u64, addr: u64, bytes: &[u8], link: u32| {
            headers.extend([name.to_le_bytes(), kind.to_le_bytes()].concat());
            headers.extend(words(&[flags, addr, out.len() as u64, bytes.len() as u64]));
            headers.extend([link.to_le_bytes(), 0u32.to_le_bytes()].concat());
            headers.extend(words(&[0, 24]));
            out.extend(bytes);
        };
        section(&mut out, 1, 1, 6, TEXT, &[0x90; 256], 0);
        section(&mut out, 7, 1, 2, EH, &[0; 32], 0);
        section(&mut out, 17, 2, 0, 0, &table, 5);
        section(&mut out, 25, 3, 0, 0, names, 0);
        section(&mut out, 25, 3, 0, 0, strings, 0);
        let at = out.len() as u64;
        out.extend(&headers);
        out[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        out[16..18].copy_from_slice(&kind.to_le_bytes());
        out[18..20].copy_from_slice(&62u16.to_le_bytes());
        out[40..48].copy_from_slice(&at.to_le_bytes());
        out[58..60].copy_from_slice(&64u16.to_le_bytes());
        out[60..62].copy_from_slice(&6u16.to_le_bytes());
        out[62..64].copy_from_slice(&4u16.to_le_bytes());
        out
    }

    const STRINGS: &[u8] = b"\0_Z5firsti\0second\0part\0";

    #[test]
    fn functions_of_a_registered_object() {
        let symbols = [
            (1, 0x12, 1, 0x10, 0x40),
            (11, 0x12, 1, 0x60, 0),
            (18, 0x02, 1, 0x20, 8),
            (1, 0x12, 0, 0, 16),        // not defined here
            (1, 0x12, 9, 0, 16),        // no such section
            (1, 0x11, 1, 0x80, 16),     // data
            (1, 0x12, 1, 0x1000, 16),   // outside
            (900, 0x12, 1, 0x90, 16),   // no name
            (1, 0x12, 1, u64::MAX, 16), // wraps
        ];
        let read = JitObject::parse(object(1, &symbols, STRINGS)).expect("an object");
        assert_eq!(
            (read.code.as_slice(), read.eh_frame),
            (&[(TEXT, TEXT + 256)][..], Some((EH, 32)))
        );
        let mut code = JitCode::default();
        code.add_object(&read);
        for (at, expected) in [
            (0x0f, None),
            (0x10, Some(("first(int)", 0x10))),
            (0x20, Some(("part", 0x20))),
            (0x28, Some(("first(int)", 0x10))),
            (0x50, None),
            (0x60, Some(("second", 0x60))),
            (0xff, Some(("second", 0x60))),
            (0x100, None),
        ] {
            let found = code.lookup(TEXT + at).map(|s| (s.name.to_string(), s.start));
            assert_eq!(found, expected.map(|(n, at)| (n.to_string(), TEXT + at)), "{at:#x}");
        }
        // In other kinds of files the addresses are final.
        let plain = JitObject::parse(object(3, &[(11, 0x12, 1, TEXT + 4, 8)], STRINGS)).expect("an object");
        assert_eq!(plain.functions, [(TEXT + 4, 8, "second".into())]);
    }

    #[test]
    fn names_are_bounded_by_the_size_of_the_object() {
        let long: Vec<u8> = [&[0][..], &[b'x'; 3000], &[0]].concat();
        let many: Vec<_> = (0..5000).map(|i| (1, 0x12, 1, i % 256, 1)).collect();
        let bytes = object(1, &many, &long);
        let len = bytes.len();
        let read = JitObject::parse(bytes).expect("an object");
        let taken: usize = read.functions.iter().map(|f| f.2.len()).sum();
        assert!(taken > 0 && taken <= 2 * len, "{taken} of {len}");
        assert!(JitObject::parse(b"\x7fELF".to_vec()).is_err() && JitObject::parse(Vec::new()).is_err());
    }
}
