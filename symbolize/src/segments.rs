//! What the sections of a file would be if it had no section headers (`sstrip`, packers): those that the dynamic loader
//! and exception handling find by the program headers.

use crate::elf::{u16_at, u32_at, u64_at};

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_GNU_EH_FRAME: u32 = 0x6474_e550;
const PF_X: u32 = 1;
const DT_HASH: u64 = 4;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_STRSZ: u64 = 10;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
/// Bytes of an `Elf64_Sym`.
const SYMBOL: u64 = 24;
/// Maximum number of program headers, and of entries of the dynamic section.
const MAX_HEADERS: u64 = 4096;
/// Maximum number of symbols.
const MAX_SYMBOLS: u64 = 8 << 20;
/// Maximum number of bytes of a hash table's chain; they are as long as hashes collide.
const MAX_CHAIN: u64 = 64 << 10;
/// `DW_EH_PE_pcrel | DW_EH_PE_sdata4` (LSB 5.0 core, section 10.5): how linkers encode where `.eh_frame` is.
const PCREL_SDATA4: u8 = 0x1b;

/// A part of a file that would be a section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentSection {
    /// The usual name of such a section; `.text` for all code.
    pub name: &'static str,
    /// Stated address.
    pub addr: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Bytes in the file.
    pub size: u64,
}

struct Load {
    offset: u64,
    addr: u64,
    size: u64,
}

/// The sections that the program headers of a 64-bit little-endian ELF file show. `read` returns exactly so many bytes
/// from an offset in the file on, or `None`.
pub fn segment_sections(read: &dyn Fn(u64, u64) -> Option<Vec<u8>>) -> Vec<SegmentSection> {
    let mut found = Vec::new();
    let mut file = Segments {
        read,
        loads: Vec::new(),
    };
    if let Some(headers) = file.headers() {
        file.collect(&headers, &mut found);
    }
    found
}

struct Segments<'a> {
    read: &'a dyn Fn(u64, u64) -> Option<Vec<u8>>,
    loads: Vec<Load>,
}

impl Segments<'_> {
    /// The table of program headers.
    fn headers(&self) -> Option<Vec<u8>> {
        let head = (self.read)(0, 64)?;
        let (offset, entry, count) = (u64_at(&head, 32)?, u16_at(&head, 54)?, u64::from(u16_at(&head, 56)?));
        (entry == 56 && count <= MAX_HEADERS).then_some(())?;
        (self.read)(offset, 56 * count)
    }

    fn collect(&mut self, headers: &[u8], found: &mut Vec<SegmentSection>) {
        let (mut tables, mut dynamic) = (None, None);
        for header in headers.chunks_exact(56) {
            let word = |at| u64_at(header, at).unwrap_or(0);
            let (offset, addr, size) = (word(8), word(16), word(32));
            match u32_at(header, 0) {
                Some(PT_LOAD) => {
                    if u32_at(header, 4).is_some_and(|flags| flags & PF_X != 0) {
                        let name = ".text";
                        found.push(SegmentSection {
                            name,
                            addr,
                            offset,
                            size,
                        });
                    }
                    self.loads.push(Load { offset, addr, size });
                }
                Some(PT_GNU_EH_FRAME) => tables = Some((addr, offset, size)),
                Some(PT_DYNAMIC) => dynamic = Some((offset, size)),
                _ => {}
            }
        }
        if let Some((addr, offset, size)) = tables {
            let name = ".eh_frame_hdr";
            found.push(SegmentSection {
                name,
                addr,
                offset,
                size,
            });
            found.extend(self.frame_tables(addr, offset));
        }
        if let Some((offset, size)) = dynamic {
            found.extend(self.symbols(offset, size).into_iter().flatten());
        }
    }

    /// `.eh_frame`, which the header of `.eh_frame_hdr` points to. Its end is not stated, but marked by an entry
    /// without bytes.
    fn frame_tables(&self, addr: u64, offset: u64) -> Option<SegmentSection> {
        let head = (self.read)(offset, 8)?;
        let by = u32_at(&head, 4).filter(|_| head.starts_with(&[1, PCREL_SDATA4]))? as i32;
        self.at(
            ".eh_frame",
            addr.checked_add(4)?.checked_add_signed(by.into())?,
            u64::MAX,
        )
    }

    /// `.dynsym` and `.dynstr`.
    fn symbols(&self, offset: u64, size: u64) -> Option<[SegmentSection; 2]> {
        let table = (self.read)(offset, size.min(16 * MAX_HEADERS))?;
        let entries = || table.chunks_exact(16).take_while(|e| u64_at(e, 0) != Some(0));
        let value = |tag| entries().find(|e| u64_at(e, 0) == Some(tag)).and_then(|e| u64_at(e, 8));
        let count = value(DT_HASH)
            .and_then(|at| self.count(at))
            .or_else(|| self.gnu_count(value(DT_GNU_HASH)?))?;
        Some([
            self.at(".dynsym", value(DT_SYMTAB)?, count.min(MAX_SYMBOLS) * SYMBOL)?,
            self.at(".dynstr", value(DT_STRTAB)?, value(DT_STRSZ)?)?,
        ])
    }

    /// Number of symbols by a hash table (gABI, "Hash Table"): one chain entry each.
    fn count(&self, addr: u64) -> Option<u64> {
        u32_at(&self.bytes(addr, 8)?, 4).map(u64::from)
    }

    /// The same by a GNU hash table (binutils `bfd/elflink.c`): the symbols of a bucket are consecutive, and the last
    /// one is marked.
    fn gnu_count(&self, addr: u64) -> Option<u64> {
        let head = self.bytes(addr, 16)?;
        let word = |at| u32_at(&head, at).map(u64::from);
        let (buckets, first, bloom) = (word(0)?, word(4)?, word(8)?);
        (buckets <= MAX_SYMBOLS).then_some(())?;
        let start = addr.checked_add(16)?.checked_add(8 * bloom)?;
        let last = self.bytes(start, 4 * buckets)?;
        let last = last
            .chunks_exact(4)
            .filter_map(|word| u32_at(word, 0))
            .max()
            .map(u64::from)?;
        let Some(at) = last.checked_sub(first) else {
            return Some(first); // nothing is exported
        };
        let chain = start.checked_add(4 * buckets)?.checked_add(4 * at)?;
        let chain = self.at("", chain, MAX_CHAIN)?;
        let chain = (self.read)(chain.offset, chain.size)?;
        let length = chain.chunks_exact(4).position(|hash| hash[0] & 1 != 0)?;
        first.checked_add(at)?.checked_add(length as u64 + 1)
    }

    /// At most `size` bytes of a segment from an address on.
    fn at(&self, name: &'static str, addr: u64, size: u64) -> Option<SegmentSection> {
        self.loads.iter().find_map(|load| {
            let skip = addr.checked_sub(load.addr).filter(|skip| *skip < load.size)?;
            Some(SegmentSection {
                name,
                addr,
                offset: load.offset.checked_add(skip)?,
                size: size.min(load.size - skip),
            })
        })
    }

    fn bytes(&self, addr: u64, size: u64) -> Option<Vec<u8>> {
        let found = self.at("", addr, size).filter(|found| found.size == size)?;
        (self.read)(found.offset, size)
    }
}
