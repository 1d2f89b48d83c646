//! Headers, sections and build id of an ELF file.
//!
//! Nothing is mapped: if a mapped file is truncated, its reader is killed by SIGBUS, and the files of a profiled
//! program are not ours. Sections are read one by one, on demand.
//!
//! Layouts are those of the System V gABI, chapter 4 (`elf.h` of glibc has the same in C). Every count and size is
//! checked against the length of the file before anything is allocated.

use std::fs::File;
use std::os::unix::fs::FileExt;

use object::read::{CompressedData, CompressionFormat};

use crate::segments::segment_sections;
use crate::{Error, ErrorKind};

/// Maximum size of a decompressed section.
const MAX_DECOMPRESSED: u64 = 1 << 30;
/// Maximum number of bytes read at once. A file's length does not limit it: it may be one large hole.
const MAX_READ: u64 = 2 << 30;
/// Maximum compression ratio. Real debug sections shrink to a third or a tenth. zlib cannot exceed about 1032 to 1, so
/// a section that claims more has a false size.
const MAX_RATIO: u64 = 1100;
/// Maximum number of sections: more than any linker writes for an executable; objects with one section per function are
/// ET_REL, refused.
const MAX_SECTIONS: u64 = 1 << 20;

const ET_REL: u16 = 1;
const ET_EXEC: u16 = 2;
const ET_DYN: u16 = 3;
pub(crate) const EM_X86_64: u16 = 62;
pub(crate) const EM_AARCH64: u16 = 183;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const SHT_PROGBITS: u32 = 1;
pub(crate) const SHT_SYMTAB: u32 = 2;
pub(crate) const SHT_RELA: u32 = 4;
const SHT_NOTE: u32 = 7;
pub(crate) const SHT_NOBITS: u32 = 8;
pub(crate) const SHT_DYNSYM: u32 = 11;
pub(crate) const SHF_EXECINSTR: u64 = 4;
const SHF_ALLOC: u64 = 2;
/// Indices from here on are not those of sections.
const SHN_LORESERVE: u16 = 0xff00;
const SHF_COMPRESSED: u64 = 1 << 11;

/// The source of the bytes.
enum FileBytes {
    File { file: File, len: u64 },
    Bytes(Vec<u8>),
}

/// One section header, names resolved.
#[derive(Debug, Clone)]
pub(crate) struct SectionHeader {
    pub name: String,
    pub kind: u32,
    pub flags: u64,
    pub addr: u64,
    pub offset: u64,
    pub size: u64,
    pub link: u32,
}

impl SectionHeader {
    pub fn is_code(&self) -> bool {
        self.flags & SHF_EXECINSTR != 0
    }
    /// Whether it is in memory when the program runs.
    pub fn is_loaded(&self) -> bool {
        self.flags & SHF_ALLOC != 0
    }
    /// First address after the section; sections that would wrap around end at the top.
    pub fn end(&self) -> u64 {
        self.addr.saturating_add(self.size)
    }
}

/// One loadable segment.
#[derive(Debug, Clone, Copy)]
struct LoadSegment {
    offset: u64,
    addr: u64,
    file_size: u64,
    mem_size: u64,
}

/// The parsed headers of one file, and access to its bytes.
pub(crate) struct Elf {
    input: FileBytes,
    pub sections: Vec<SectionHeader>,
    segments: Vec<LoadSegment>,
    pub build_id: Option<Vec<u8>>,
    /// The CPU: [`EM_X86_64`] and [`EM_AARCH64`] are those whose PLT stubs can be decoded.
    pub machine: u16,
    /// Values of symbols are offsets in their sections.
    pub is_relocatable: bool,
    /// Whether the file has section headers, to which symbols refer; else the sections are those that its program
    /// headers show.
    has_headers: bool,
}

pub(crate) fn u16_at(b: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(b.get(at..at.checked_add(2)?)?.try_into().ok()?))
}
pub(crate) fn u32_at(b: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(b.get(at..at.checked_add(4)?)?.try_into().ok()?))
}
pub(crate) fn u64_at(b: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(b.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

/// The bytes of a string table from `at` up to the NUL, at most `max` of them. `None` if there is no NUL within that.
pub(crate) fn cstr_at(table: &[u8], at: usize, max: usize) -> Option<&[u8]> {
    let rest = table.get(at..)?;
    let rest = &rest[..rest.len().min(max.saturating_add(1))];
    let end = rest.iter().position(|&b| b == 0)?;
    Some(&rest[..end])
}

impl Elf {
    pub fn from_file(file: File) -> Result<Elf, Error> {
        Elf::open(file, false)
    }

    /// A file that only debuggers read: `.dwo` and `.dwp` files, and the files of `dwz`, are object files by their
    /// header. Nothing in their sections is relocated.
    pub fn from_debug_file(file: File) -> Result<Elf, Error> {
        Elf::open(file, true)
    }

    fn open(file: File, object: bool) -> Result<Elf, Error> {
        let meta = file.metadata().map_err(Error::io)?;
        // A pipe or a device could block forever or never end.
        if !meta.is_file() {
            return Err(Error::new(ErrorKind::NotElf, "not a regular file"));
        }
        Elf::parse(FileBytes::File { file, len: meta.len() }, object)
    }

    pub fn from_bytes(bytes: Vec<u8>) -> Result<Elf, Error> {
        Elf::parse(FileBytes::Bytes(bytes), false)
    }

    /// The same, but accepts object files.
    pub fn from_object(bytes: Vec<u8>) -> Result<Elf, Error> {
        Elf::parse(FileBytes::Bytes(bytes), true)
    }

    fn parse(input: FileBytes, object: bool) -> Result<Elf, Error> {
        let truncated = || Error::new(ErrorKind::Truncated, "the file ends inside its own headers");
        let unsupported = |what: &'static str| Err(Error::new(ErrorKind::Unsupported, what));
        let head = input.read(0, input.len().min(64))?;
        if !head.starts_with(b"\x7fELF") {
            return Err(Error::new(
                ErrorKind::NotElf,
                "not an ELF file (no \\x7fELF at its start)",
            ));
        }
        match (head.get(4), head.get(5)) {
            (None, _) | (_, None) => return Err(truncated()),
            (Some(2), Some(1)) => {}
            (Some(1), _) => return unsupported("a 32-bit ELF file; only 64-bit ones are read"),
            (_, Some(2)) => return unsupported("a big-endian ELF file; only little-endian ones are read"),
            _ => return Err(Error::new(ErrorKind::Corrupt, "unknown ELF class or byte order")),
        }
        if head.len() < 64 {
            return Err(truncated());
        }
        let half = |at| u16_at(&head, at).unwrap_or(0);
        let wide = |at| u64_at(&head, at).unwrap_or(0);
        match half(16) {
            ET_EXEC | ET_DYN => {}
            ET_REL if object => {}
            ET_REL => return unsupported("a relocatable object (ET_REL); link it first"),
            4 => return unsupported("a core dump (ET_CORE)"),
            _ => return unsupported("neither an executable nor a shared library"),
        }
        let mut elf = Elf {
            input,
            sections: Vec::new(),
            segments: Vec::new(),
            build_id: None,
            machine: half(18),
            is_relocatable: half(16) == ET_REL,
            has_headers: true,
        };
        elf.read_segments(wide(32), half(54), half(56))?;
        elf.read_sections(wide(40), half(58), half(60), half(62))?;
        if elf.sections.is_empty() && !elf.is_relocatable {
            elf.has_headers = false;
            elf.sections = elf.sections_of_segments();
        }
        if elf.build_id.is_none() {
            elf.build_id = elf.build_id_from_sections();
        }
        Ok(elf)
    }

    fn read_segments(&mut self, offset: u64, entry: u16, count: u16) -> Result<(), Error> {
        if count == 0 {
            return Ok(());
        }
        if entry != 56 {
            return Err(Error::new(ErrorKind::Corrupt, "program headers have an unknown size"));
        }
        let table = self.input.read(offset, 56 * u64::from(count))?;
        for ph in table.chunks_exact(56) {
            let wide = |at| u64_at(ph, at).unwrap_or(0);
            let (offset, addr, file_size, mem_size) = (wide(8), wide(16), wide(32), wide(40));
            match u32_at(ph, 0) {
                Some(PT_LOAD) => self.segments.push(LoadSegment {
                    offset,
                    addr,
                    file_size,
                    mem_size,
                }),
                Some(PT_NOTE) if self.build_id.is_none() => {
                    self.build_id = self.build_id_in(offset, file_size);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn read_sections(&mut self, offset: u64, entry: u16, count: u16, names: u16) -> Result<(), Error> {
        if offset == 0 {
            return Ok(()); // sstrip'ed
        }
        if entry != 64 {
            return Err(Error::new(ErrorKind::Corrupt, "section headers have an unknown size"));
        }
        let first = self.input.read(offset, 64)?;
        // Counts that do not fit in 16 bits are in section 0.
        let count = match count {
            0 => u64_at(&first, 32).unwrap_or(0),
            n => u64::from(n),
        };
        let names = match names {
            0xffff => u32_at(&first, 40).unwrap_or(0),
            n => u32::from(n),
        };
        if count > MAX_SECTIONS {
            return Err(Error::new(ErrorKind::Corrupt, "too many sections"));
        }
        let table = self.input.read(offset, 64 * count)?;
        let header = |i: usize| -> Option<(u32, SectionHeader)> {
            let sh = table.get(i.checked_mul(64)?..)?.get(..64)?;
            Some((
                u32_at(sh, 0)?,
                SectionHeader {
                    name: String::new(),
                    kind: u32_at(sh, 4)?,
                    flags: u64_at(sh, 8)?,
                    addr: u64_at(sh, 16)?,
                    offset: u64_at(sh, 24)?,
                    size: u64_at(sh, 32)?,
                    link: u32_at(sh, 40)?,
                },
            ))
        };
        let strings = match header(names as usize) {
            // Without a name table, sections have no names, which loses DWARF and PLT but not symbols.
            Some((_, s)) if s.kind != SHT_NOBITS => self.input.read(s.offset, s.size).unwrap_or_default(),
            _ => Vec::new(),
        };
        for i in 0..count as usize {
            let Some((name, mut section)) = header(i) else { break };
            if let Some(bytes) = cstr_at(&strings, name as usize, 64) {
                section.name = String::from_utf8_lossy(bytes).into_owned();
            }
            self.sections.push(section);
        }
        Ok(())
    }

    /// The sections that program headers show.
    fn sections_of_segments(&self) -> Vec<SectionHeader> {
        let found = segment_sections(&|offset, size| self.input.read(offset, size).ok());
        let strings = found.iter().position(|s| s.name == ".dynstr").unwrap_or(0) as u32;
        let sections = found.into_iter().map(|s| {
            let (kind, flags) = match s.name {
                ".text" => (SHT_PROGBITS, SHF_ALLOC | SHF_EXECINSTR),
                ".dynsym" => (SHT_DYNSYM, SHF_ALLOC),
                _ => (SHT_PROGBITS, SHF_ALLOC),
            };
            SectionHeader {
                name: s.name.into(),
                kind,
                flags,
                addr: s.addr,
                offset: s.offset,
                size: s.size,
                link: strings,
            }
        });
        sections.collect()
    }

    /// The section with code that a symbol with this index and address is in.
    pub fn code_of_symbol(&self, index: u16, addr: u64) -> Option<&SectionHeader> {
        if self.has_headers {
            return self.sections.get(usize::from(index)).filter(|s| s.is_code());
        }
        let is_defined = index != 0 && index < SHN_LORESERVE;
        let mut code = self.sections.iter().filter(|s| s.is_code() && is_defined);
        code.find(|s| addr >= s.addr && addr < s.end())
    }

    /// Debug files keep their note section but may not have the segment's bytes.
    fn build_id_from_sections(&self) -> Option<Vec<u8>> {
        let notes = self.sections.iter().filter(|s| s.kind == SHT_NOTE).take(64);
        notes
            .map(|s| (s.offset, s.size))
            .find_map(|(offset, size)| self.build_id_in(offset, size))
    }

    /// Finds NT_GNU_BUILD_ID (3) in one block of notes. Notes are small; at most 64 KiB of them are read.
    fn build_id_in(&self, offset: u64, size: u64) -> Option<Vec<u8>> {
        let notes = self.input.read(offset, size.min(1 << 16)).ok()?;
        let mut rest = &notes[..];
        while rest.len() >= 12 {
            let (namesz, descsz) = (u32_at(rest, 0)? as usize, u32_at(rest, 4)? as usize);
            let kind = u32_at(rest, 8)?;
            let desc = 12usize.checked_add(namesz.checked_next_multiple_of(4)?)?;
            let end = desc.checked_add(descsz)?;
            if kind == 3 && rest.get(12..16) == Some(b"GNU\0") && (1..=64).contains(&descsz) {
                return rest.get(desc..end).map(<[u8]>::to_vec);
            }
            rest = rest.get(end.checked_next_multiple_of(4)?..)?;
        }
        None
    }

    /// Index and header of the first section of this name.
    pub fn section(&self, name: &str) -> Option<&SectionHeader> {
        self.sections.iter().find(|s| s.name == name)
    }

    /// The bytes of a section as they are in the file.
    pub fn raw_data(&self, section: &SectionHeader) -> Result<Vec<u8>, Error> {
        if section.kind == SHT_NOBITS {
            return Ok(Vec::new());
        }
        self.input.read(section.offset, section.size)
    }

    /// `size` bytes of an executable section from a stated address on.
    pub fn code(&self, svma: u64, size: u64) -> Result<Vec<u8>, Error> {
        let is_inside = |s: &&SectionHeader| {
            let end = svma.checked_add(size);
            s.is_code() && s.kind != SHT_NOBITS && svma >= s.addr && end.is_some_and(|end| end <= s.end())
        };
        let section = self.sections.iter().find(is_inside);
        let section = section.ok_or_else(|| Error::new(ErrorKind::Corrupt, "no section has this code"))?;
        let offset = section.offset.checked_add(svma - section.addr);
        let offset = offset.ok_or_else(|| Error::new(ErrorKind::Corrupt, "the section is not in the file"))?;
        self.input.read(offset, size)
    }

    /// `size` bytes of a loaded segment from a stated address on, if they are in the file.
    pub fn loaded(&self, svma: u64, size: u64) -> Option<Vec<u8>> {
        let offset = self.segments.iter().find_map(|s| {
            let at = svma.checked_sub(s.addr)?;
            (at.checked_add(size)? <= s.file_size).then(|| s.offset.checked_add(at))?
        })?;
        self.input.read(offset, size).ok()
    }

    /// The bytes of a section by its name; empty if it is missing or cannot be read.
    pub fn raw_section(&self, name: &str) -> Vec<u8> {
        let section = self.section(name);
        section.and_then(|s| self.raw_data(s).ok()).unwrap_or_default()
    }

    /// When the file was written last; `None` for an image in memory.
    pub fn modified(&self) -> Option<std::time::SystemTime> {
        match &self.input {
            FileBytes::File { file, .. } => file.metadata().ok()?.modified().ok(),
            FileBytes::Bytes(_) => None,
        }
    }

    /// Whether this file has DWARF entries, according to its headers.
    pub fn has_dwarf(&self) -> bool {
        let info = self.section(".debug_info").or(self.section(".zdebug_info"));
        info.is_some_and(|s| s.kind != SHT_NOBITS && s.size > 0)
    }

    /// Whether there is a table of this kind with at least one entry.
    pub fn has_table(&self, kind: u32) -> bool {
        self.sections.iter().any(|s| s.kind == kind && s.size > 24)
    }

    /// The bytes of a debug section, decompressed if necessary: SHF_COMPRESSED with zlib or zstd (gABI, "Section
    /// Compression"), and the older `.zdebug_*` (binutils `bfd/compress.c`). Empty if there is no such section.
    pub fn debug_data(&self, name: &str) -> Result<Vec<u8>, Error> {
        let old_name = || format!(".z{}", name.trim_start_matches('.'));
        let Some(section) = self.section(name).or_else(|| self.section(&old_name())) else {
            return Ok(Vec::new());
        };
        let raw = self.raw_data(section)?;
        let bad = || Error::new(ErrorKind::Corrupt, "a compressed section has a bad header");
        if section.flags & SHF_COMPRESSED != 0 {
            let format = match u32_at(&raw, 0) {
                Some(1) => CompressionFormat::Zlib,
                Some(2) => CompressionFormat::Zstandard,
                _ => return Err(bad()),
            };
            let size = u64_at(&raw, 8).ok_or_else(bad)?;
            decompress(format, raw.get(24..).ok_or_else(bad)?, size)
        } else if section.name.starts_with(".zdebug_") {
            let head = raw.get(..12).ok_or_else(bad)?;
            if !head.starts_with(b"ZLIB") {
                return Err(bad());
            }
            let size = u64::from_be_bytes(head[4..12].try_into().map_err(|_| bad())?);
            decompress(CompressionFormat::Zlib, &raw[12..], size)
        } else {
            Ok(raw)
        }
    }

    /// Whether the address is in a loaded segment.
    pub fn is_loaded(&self, svma: u64) -> bool {
        let mut from = self
            .segments
            .iter()
            .filter_map(|s| Some((svma.checked_sub(s.addr)?, s.mem_size)));
        from.any(|(at, size)| at < size)
    }

    /// File offset to stated address, by the loadable segments.
    pub fn svma_of_offset(&self, offset: u64) -> Option<u64> {
        self.segments.iter().find_map(|s| {
            let at = offset.checked_sub(s.offset).filter(|at| *at < s.file_size)?;
            s.addr.checked_add(at)
        })
    }
}

impl FileBytes {
    fn len(&self) -> u64 {
        match self {
            FileBytes::File { len, .. } => *len,
            FileBytes::Bytes(bytes) => bytes.len() as u64,
        }
    }

    /// Reads exactly `len` bytes. Refuses before allocating if the file is not that long.
    fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, Error> {
        let truncated = || Error::new(ErrorKind::Truncated, "headers point past the end of the file");
        let end = offset
            .checked_add(len)
            .filter(|&end| end <= self.len())
            .ok_or_else(truncated)?;
        if len > MAX_READ {
            return Err(Error::new(ErrorKind::Unsupported, "a section of more than 2 GiB"));
        }
        match self {
            FileBytes::File { file, .. } => {
                let mut bytes = vec![0; len as usize];
                // The file may have shrunk since its length was read: that is an error here, not a signal.
                file.read_exact_at(&mut bytes, offset).map_err(Error::io)?;
                Ok(bytes)
            }
            FileBytes::Bytes(bytes) => Ok(bytes[offset as usize..end as usize].to_vec()),
        }
    }
}

fn decompress(format: CompressionFormat, data: &[u8], size: u64) -> Result<Vec<u8>, Error> {
    if size > MAX_DECOMPRESSED || size / MAX_RATIO > data.len() as u64 {
        return Err(Error::new(
            ErrorKind::Corrupt,
            "a compressed section claims an implausible size",
        ));
    }
    let packed = CompressedData {
        format,
        data,
        uncompressed_size: size,
    };
    match packed.decompress() {
        Ok(bytes) => Ok(bytes.into_owned()),
        Err(_) => Err(Error::new(
            ErrorKind::Corrupt,
            "a compressed section cannot be decompressed",
        )),
    }
}
