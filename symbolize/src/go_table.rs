//! Go's function table, the section `.gopclntab`: of each function its name, its inlined calls, files and lines, and how far it
//! has moved the stack pointer at each instruction. Go's runtime needs it, so stripped programs have it, too.
//!
//! Layout, of Go 1.16 to 1.25: `runtime/symtab.go` (`pcHeader`, `functab`, `moduledata`), `runtime/runtime2.go` (`_func`),
//! `runtime/symtabinl.go` (`inlinedCall`), `internal/abi/symtab.go` (flags), `debug/gosym/pclntab.go` (numbers of versions).
//! From Go 1.26 on the header has no address of the code (release notes of 1.26).
//!
//! The bytes are hostile: every access is checked, and every loop is bounded.

use std::borrow::Cow;

use crate::elf::{Elf, cstr_at, u16_at, u32_at, u64_at};
use crate::symbols::MAX_NAME;

/// Steps through one table of values: the largest functions have some ten thousand.
const MAX_STEPS: usize = 1 << 18;
/// Calls inlined into each other.
const MAX_DEPTH: usize = 64;
/// Bits of [`GoFunction::flags`]: its stack begins with it; it sets the stack pointer to another stack.
const TOP_FRAME: u8 = 1;
const WRITES_SP: u8 = 2;
/// Numbers of tables that functions have (`PCDATA_InlTreeIndex`, `FUNCDATA_InlTree`).
const INLINE_INDEX: u64 = 2;
const INLINE_TREE: u64 = 3;
/// "None" where an offset is expected.
const NOTHING: u32 = u32::MAX;

/// Names of the section: the second one where an external linker made a position-independent program.
pub const GO_TABLE_SECTIONS: [&str; 2] = [".gopclntab", ".data.rel.ro.gopclntab"];
/// Sections of which the first one that there is has `moduledata`: from Go 1.26 on, and before.
const MODULE_DATA: [&str; 3] = [".go.module", ".noptrdata", ".data"];

/// Which Go wrote a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Version {
    Go1_16,
    Go1_18,
    Go1_20,
}

/// The parsed header of one table, and its bytes.
#[derive(Debug)]
pub struct GoTable {
    bytes: Vec<u8>,
    version: Version,
    /// Addresses are stored in multiples of this.
    quantum: u64,
    /// Address of the code that offsets are relative to; 0 up to Go 1.17, which has addresses.
    text: u64,
    /// Functions.
    count: usize,
    // Offsets of parts: names, files of units, names of files, tables of values, functions.
    names: usize,
    units: usize,
    files: usize,
    values: usize,
    functions: usize,
    /// What `FUNCDATA` offsets are relative to, if it is known.
    function_data: Option<u64>,
}

/// A function in the table.
#[derive(Debug, Clone, Copy)]
pub struct GoFunction<'a> {
    table: &'a GoTable,
    /// Stated address of its first byte.
    pub start: u64,
    /// First address after it, padding included.
    pub end: u64,
    /// Where it is described, in the table.
    at: usize,
}

/// What locates a table in memory: its own address, and the words of the sections that may hold `moduledata`.
#[derive(Debug, Clone, Copy, Default)]
pub struct GoSections<'a> {
    /// Stated address of `.gopclntab`.
    pub table: u64,
    /// Stated address and size of `.text`.
    pub text: (u64, u64),
    /// Contents of `.go.module`, `.noptrdata` or `.data`.
    pub data: &'a [u8],
}

/// One of the functions at an address, the innermost first. See [`crate::Symbol`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GoFrame<'a> {
    /// Name, with its package.
    pub name: Cow<'a, str>,
    /// Source file.
    pub file: Option<Cow<'a, str>>,
    /// Line in it, from 1.
    pub line: Option<u32>,
}

/// The table of a file, if it has one that can be used.
pub(crate) fn load(elf: &Elf) -> Option<GoTable> {
    let section = GO_TABLE_SECTIONS.iter().find_map(|name| elf.section(name))?;
    let text = elf.section(".text")?;
    let data = MODULE_DATA.iter().find(|name| elf.section(name).is_some());
    let sections = GoSections {
        table: section.addr,
        text: (text.addr, text.size),
        data: &data.map_or(Vec::new(), |name| elf.raw_section(name)),
    };
    GoTable::parse(elf.raw_data(section).ok()?, &sections)
}

fn at(bytes: &[u8], offset: usize, more: u64) -> Option<&[u8]> {
    bytes.get(offset.checked_add(usize::try_from(more).ok()?)?..)
}

impl GoTable {
    /// Parses the header of a section. `None`: it is none, or where the code is that it describes cannot be said.
    pub fn parse(bytes: Vec<u8>, sections: &GoSections<'_>) -> Option<GoTable> {
        let version = match u32_at(&bytes, 0)? {
            0xffff_fffa => Version::Go1_16,
            0xffff_fff0 => Version::Go1_18,
            0xffff_fff1 => Version::Go1_20,
            _ => return None,
        };
        let quantum = u64::from(*bytes.get(6)?);
        let is_known = matches!(quantum, 1 | 2 | 4) && u16_at(&bytes, 4) == Some(0) && bytes.get(7) == Some(&8);
        is_known.then_some(())?;
        let word = |i: usize| u64_at(&bytes, 8 + 8 * i);
        // From Go 1.18 on, the third word is the address of the code.
        let skip = usize::from(version > Version::Go1_16);
        let offset = |i: usize| {
            let offset = usize::try_from(word(i + skip)?).ok()?;
            (offset < bytes.len()).then_some(offset)
        };
        let count = usize::try_from(word(0)?).ok()?;
        let mut table = GoTable {
            names: offset(2)?,
            units: offset(3)?,
            files: offset(4)?,
            values: offset(5)?,
            functions: offset(6)?,
            text: if skip == 1 { word(2)? } else { 0 },
            count,
            version,
            quantum,
            function_data: None,
            bytes,
        };
        // The end of the last function follows its entry.
        let size = count
            .checked_mul(2 * table.entry_size())?
            .checked_add(table.entry_size())?;
        (count > 0 && size <= table.bytes.len() - table.functions).then_some(())?;
        let data = table.module_data(sections);
        if skip == 1 && table.text == 0 {
            table.text = match data {
                Some(data) => u64_at(data, 8 * 22)?,
                // All code is Go's if as much is in the section as in the table.
                None => {
                    let (start, size) = sections.text;
                    let size_of_go = table.entry(count)?;
                    (size.checked_sub(size_of_go)? < 64).then_some(start)?
                }
            };
        }
        let first_of_data = match version {
            Version::Go1_16 => None,
            Version::Go1_18 => Some(38),
            Version::Go1_20 => Some(40),
        };
        let data = data.filter(|data| u64_at(data, 8 * 22) == Some(table.text));
        table.function_data = first_of_data
            .and_then(|word| u64_at(data?, 8 * word))
            .filter(|at| *at != 0);
        let (first, last) = (table.entry(0)?, table.entry(count)?);
        (first < last && (first != 0 || skip == 1)).then_some(table)
    }

    /// `moduledata`, which refers to the header and then to the names.
    fn module_data<'a>(&self, sections: &GoSections<'a>) -> Option<&'a [u8]> {
        let names = sections.table.checked_add(self.names as u64)?;
        let wanted = [sections.table.to_le_bytes(), names.to_le_bytes()].concat();
        let places = sections.data.chunks_exact(8).enumerate();
        let mut places = places
            .filter(|(_, word)| *word == &wanted[..8])
            .map(|(i, _)| &sections.data[8 * i..]);
        places.find(|rest| rest.starts_with(&wanted))
    }

    /// Bytes of half an entry: the address of a function, or where it is described.
    fn entry_size(&self) -> usize {
        if self.version == Version::Go1_16 { 8 } else { 4 }
    }

    /// A word of the list of functions.
    fn list_word(&self, i: usize) -> Option<u64> {
        let at = self.functions.checked_add(i.checked_mul(self.entry_size())?)?;
        match self.version {
            Version::Go1_16 => u64_at(&self.bytes, at),
            _ => u32_at(&self.bytes, at).map(u64::from),
        }
    }

    /// Where function `i` begins, relative to the code.
    fn entry(&self, i: usize) -> Option<u64> {
        self.list_word(i.checked_mul(2)?)
    }

    /// Start of the first function, and end of the last one.
    pub fn range(&self) -> (u64, u64) {
        let at = |i| self.entry(i).map_or(0, |entry| self.text.saturating_add(entry));
        (at(0), at(self.count))
    }

    /// The function that contains an address.
    pub fn find(&self, svma: u64) -> Option<GoFunction<'_>> {
        let wanted = svma.checked_sub(self.text)?;
        let (mut low, mut high) = (0, self.count);
        // The last function that begins at or before the address.
        while low < high {
            let middle = low + (high - low) / 2;
            if self.entry(middle)? <= wanted {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let i = low.checked_sub(1)?;
        let (start, end) = (self.entry(i)?, self.entry(i + 1)?);
        (start..end).contains(&wanted).then_some(())?;
        Some(GoFunction {
            table: self,
            start: self.text.checked_add(start)?,
            end: self.text.checked_add(end)?,
            at: self
                .functions
                .checked_add(usize::try_from(self.list_word(2 * i + 1)?).ok()?)?,
        })
    }

    fn text_at(&self, part: usize, offset: u64) -> Option<Cow<'_, str>> {
        let name = cstr_at(at(&self.bytes, part, offset)?, 0, MAX_NAME)?;
        Some(String::from_utf8_lossy(name))
    }

    /// The value that a table has at `distance` from the start of its function: pairs of a difference of values and one of
    /// addresses.
    fn value(&self, table: u32, distance: u64) -> Option<i32> {
        (table != 0).then_some(())?;
        let mut rest = at(&self.bytes, self.values, table.into())?;
        let (mut value, mut end) = (-1i32, 0u64);
        for step in 0..MAX_STEPS {
            let by = variable_length(&mut rest)?;
            if by == 0 && step > 0 {
                return None;
            }
            // Zigzag: the lowest bit is the sign.
            value = value.wrapping_add((by >> 1) as i32 ^ -((by & 1) as i32));
            end = end.checked_add(u64::from(variable_length(&mut rest)?).checked_mul(self.quantum)?)?;
            if distance < end {
                return Some(value);
            }
        }
        None
    }
}

/// A number in seven bits a byte, the lowest first.
fn variable_length(rest: &mut &[u8]) -> Option<u32> {
    let mut value = 0;
    for shift in (0..35).step_by(7) {
        let (byte, more) = rest.split_first()?;
        *rest = more;
        value |= u32::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

impl<'a> GoFunction<'a> {
    /// A word of its description: 32 bits, `i` words after its address.
    fn word(&self, i: usize) -> Option<u32> {
        let at = self.at.checked_add(self.table.entry_size() + 4 * i)?;
        u32_at(&self.table.bytes, at)
    }

    /// Where the bytes with its kind, its flags, and the number of its data tables are.
    fn kind_at(&self) -> usize {
        let words = if self.table.version == Version::Go1_20 { 9 } else { 8 };
        self.at.saturating_add(self.table.entry_size() + 4 * words)
    }

    fn flags(&self) -> u8 {
        self.kind_at()
            .checked_add(1)
            .and_then(|at| self.table.bytes.get(at))
            .copied()
            .unwrap_or(0)
    }

    /// Its name, with its package: `net/http.(*conn).serve`.
    pub fn name(&self) -> Option<Cow<'a, str>> {
        self.table.text_at(self.table.names, self.word(0)?.into())
    }

    /// Whether it is the first one of its stack: nothing that a return address is for called it.
    pub fn is_first(&self) -> bool {
        // Go 1.16 has no flags.
        let is_known = |name: &str| matches!(name, "runtime.goexit" | "runtime.mstart" | "runtime.rt0_go");
        self.flags() & TOP_FRAME != 0
            || self.table.version == Version::Go1_16 && self.name().is_some_and(|name| is_known(&name))
    }

    /// Whether it sets the stack pointer to what no table knows: it aligns it, or switches stacks.
    pub fn writes_stack_pointer(&self) -> bool {
        self.flags() & WRITES_SP != 0
    }

    /// Whether it switches from one stack to another one.
    pub fn switches_stacks(&self) -> bool {
        const SWITCHES: [&str; 8] = [
            "runtime.asmcgocall",
            "runtime.cgocallback",
            "runtime.gogo",
            "runtime.mcall",
            "runtime.morestack",
            "runtime.nanotime1",
            "runtime.systemstack",
            "runtime.walltime",
        ];
        // Others only align it.
        let is_switch = |name: &str| match self.table.version {
            Version::Go1_16 => SWITCHES.contains(&name),
            _ => name.starts_with("runtime."),
        };
        let may_switch = self.writes_stack_pointer() || self.table.version == Version::Go1_16;
        may_switch && self.name().is_some_and(|name| is_switch(&name))
    }

    /// Bytes by which the stack pointer is below the one that its caller had when it called; on x86-64 without the return
    /// address.
    pub fn stack_size(&self, svma: u64) -> Option<u32> {
        let value = self.table.value(self.word(3)?, svma.checked_sub(self.start)?)?;
        u32::try_from(value).ok()
    }

    /// Source file and line of an address: those of the innermost function, if calls were inlined there.
    fn source(&self, svma: u64) -> (Option<Cow<'a, str>>, Option<u32>) {
        let distance = svma.wrapping_sub(self.start);
        let value = |word| self.table.value(self.word(word)?, distance);
        let line = value(5)
            .and_then(|line| u32::try_from(line).ok())
            .filter(|line| *line > 0);
        let file = || {
            let number = u64::from(u32::try_from(value(4)?).ok()?);
            let of_unit = u64::from(self.word(7)?).checked_add(number)?.checked_mul(4)?;
            let name = u32_at(at(&self.table.bytes, self.table.units, of_unit)?, 0)?;
            (name != NOTHING).then(|| self.table.text_at(self.table.files, name.into()))?
        };
        (file(), line)
    }

    /// Index of the inlined call at an address in the function's list of them.
    fn inlined_call(&self, svma: u64) -> Option<u32> {
        (u64::from(self.word(6)?) > INLINE_INDEX).then_some(())?;
        let table = u32_at(at(&self.table.bytes, self.kind_at(), 4 + 4 * INLINE_INDEX)?, 0)?;
        let value = self.table.value(table, svma.checked_sub(self.start)?)?;
        u32::try_from(value).ok()
    }

    /// Stated address of the list of inlined calls.
    fn inlined_calls(&self) -> Option<u64> {
        let tables = self.table.bytes.get(self.kind_at().checked_add(3)?)?;
        (u64::from(*tables) > INLINE_TREE).then_some(())?;
        let first = 4 + 4 * u64::from(self.word(6)?);
        let offset = u32_at(at(&self.table.bytes, self.kind_at(), first + 4 * INLINE_TREE)?, 0)?;
        (offset != NOTHING).then_some(())?;
        self.table.function_data?.checked_add(offset.into())
    }

    /// The functions at an address, innermost first; the last one is this. `read` reads bytes of the file at a stated address.
    pub fn frames(&self, svma: u64, read: &mut dyn FnMut(u64, u64) -> Option<Vec<u8>>) -> Vec<GoFrame<'a>> {
        let (mut frames, mut at) = (Vec::new(), svma);
        // Index, and offsets in an entry: name, and the instruction that stands for the call. Go 1.18 had other entries.
        let (size, name_at, call_at) = match self.table.version {
            Version::Go1_20 => (16, 4, 8),
            _ => (20, 12, 16),
        };
        let name = self.name().unwrap_or("?".into());
        while let Some(index) = self.inlined_call(at) {
            let entry = || {
                let from = self.inlined_calls()?.checked_add(size * u64::from(index))?;
                let entry = read(from, size)?;
                let name = self.table.text_at(self.table.names, u32_at(&entry, name_at)?.into())?;
                let call = self.start.checked_add(u32_at(&entry, call_at)?.into())?;
                (call < self.end && frames.len() < MAX_DEPTH).then_some((name, call))
            };
            let Some((inlined, call)) = ({ entry })() else {
                // The line is one of an inlined function that has no name here.
                frames.push(GoFrame {
                    name,
                    file: None,
                    line: None,
                });
                return frames;
            };
            let (file, line) = self.source(at);
            frames.push(GoFrame {
                name: inlined,
                file,
                line,
            });
            at = call;
        }
        let (file, line) = self.source(at);
        frames.push(GoFrame { name, file, line });
        frames
    }
}

#[cfg(test)]
mod tests;
