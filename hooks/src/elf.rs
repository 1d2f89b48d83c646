//! Loaded modules and their relocation tables, as the loader left them in this process's memory.
//!
//! The memory is our own process's and was checked by the loader, yet nothing is read outside a module's own segments:
//! a module with an odd table is left alone.

use std::ffi::CStr;

use libc::{Elf64_Phdr, Elf64_Rela, Elf64_Sym};

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_GNU_RELRO: u32 = 0x6474_e552;
const PF_X: u32 = 1;
const PF_W: u32 = 2;

const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
const DT_STRSZ: u64 = 10;
const DT_PLTRELSZ: u64 = 2;
const DT_PLTREL: u64 = 20;
const DT_JMPREL: u64 = 23;
const DT_HASH: u64 = 4;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
const DT_VERSYM: u64 = 0x6fff_fff0;

/// Relocations that put the address of a symbol into a word: of data, of the global offset table, and of the linkage table;
/// R_X86_64_64, R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT.
#[cfg(target_arch = "x86_64")]
const RELOCATIONS: [u32; 3] = [1, 6, 7];
/// R_AARCH64_ABS64, R_AARCH64_GLOB_DAT, R_AARCH64_JUMP_SLOT.
#[cfg(target_arch = "aarch64")]
const RELOCATIONS: [u32; 3] = [257, 1025, 1026];

/// Entries of a dynamic section that are examined.
const MAX_DYNAMIC: usize = 4096;
/// Symbols of one hash chain that are examined.
const MAX_CHAIN: usize = 1 << 16;

/// One stretch of a module's memory.
#[derive(Clone, Copy, Debug)]
pub struct ModuleSegment {
    pub start: usize,
    pub end: usize,
    pub is_executable: bool,
    pub is_writable: bool,
}

/// A loaded module, described by absolute addresses.
pub struct LoadedModule {
    /// What the loader added to the addresses in the file.
    pub base: usize,
    pub segments: Vec<ModuleSegment>,
    /// Made read-only after relocation; empty if there is none. Whole pages.
    pub relro: std::ops::Range<usize>,
    tables: DynamicTables,
}

#[derive(Default, Clone, Copy)]
struct DynamicTables {
    strings: (usize, usize),
    symbols: usize,
    rela: (usize, usize),
    jump: (usize, usize),
    gnu_hash: usize,
    hash: usize,
    versions: usize,
}

/// A place that the loader filled with the address of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GotSlot {
    pub address: usize,
    /// Bound on the first call, perhaps: until then it holds an address in the module's own linkage table.
    pub is_lazy: bool,
    /// A variable that begins with the address, and that the program may change: `_decimal` does with that of `malloc`.
    pub is_variable: bool,
    /// The module defines the symbol itself, so it may use another definition than all other modules.
    pub is_defined_here: bool,
}

impl LoadedModule {
    /// Describes a module from its program headers; None if it has no usable dynamic section.
    ///
    /// # Safety
    /// `headers` are those of a module that stays loaded during the call, at `base`.
    pub unsafe fn new(base: usize, headers: &[Elf64_Phdr], page: usize) -> Option<LoadedModule> {
        let mut segments = Vec::new();
        let (mut dynamic, mut relro) = (None, 0..0);
        for header in headers {
            let start = base.wrapping_add(header.p_vaddr as usize);
            let end = start.checked_add(header.p_memsz as usize)?;
            match header.p_type {
                PT_LOAD => segments.push(ModuleSegment {
                    start,
                    end,
                    is_executable: header.p_flags & PF_X != 0,
                    is_writable: header.p_flags & PF_W != 0,
                }),
                PT_DYNAMIC => dynamic = Some((start, end)),
                // The loader rounds both ends down.
                PT_GNU_RELRO => relro = (start & !(page - 1))..(end & !(page - 1)),
                _ => {}
            }
        }
        let mut module = LoadedModule {
            base,
            segments,
            relro,
            tables: DynamicTables::default(),
        };
        let (start, end) = dynamic?;
        if !module.contains(start, end - start) || !start.is_multiple_of(8) {
            return None;
        }
        let count = ((end - start) / 16).min(MAX_DYNAMIC);
        // SAFETY: within a segment of the module, as was just checked; entries are two words.
        let entries = unsafe { std::slice::from_raw_parts(start as *const [u64; 2], count) };
        module.tables = module.tables(entries);
        Some(module)
    }

    fn tables(&self, entries: &[[u64; 2]]) -> DynamicTables {
        // Some loaders relocate the addresses here, and leave those of read-only sections as they are.
        let absolute = |value: u64| {
            let value = value as usize;
            if self.contains(value, 1) {
                value
            } else {
                self.base.wrapping_add(value)
            }
        };
        let mut tables = DynamicTables::default();
        let mut is_rela = true;
        for [tag, value] in entries.iter().take_while(|[tag, _]| *tag != 0) {
            match *tag {
                DT_STRTAB => tables.strings.0 = absolute(*value),
                DT_STRSZ => tables.strings.1 = *value as usize,
                DT_SYMTAB => tables.symbols = absolute(*value),
                DT_RELA => tables.rela.0 = absolute(*value),
                DT_RELASZ => tables.rela.1 = *value as usize,
                DT_JMPREL => tables.jump.0 = absolute(*value),
                DT_PLTRELSZ => tables.jump.1 = *value as usize,
                DT_PLTREL => is_rela = *value == DT_RELA,
                DT_GNU_HASH => tables.gnu_hash = absolute(*value),
                DT_HASH => tables.hash = absolute(*value),
                DT_VERSYM => tables.versions = absolute(*value),
                _ => {}
            }
        }
        if !is_rela {
            tables.jump = (0, 0);
        }
        tables
    }

    /// Whether `length` bytes from `address` lie in one segment.
    pub fn contains(&self, address: usize, length: usize) -> bool {
        let Some(end) = address.checked_add(length) else {
            return false;
        };
        self.segments.iter().any(|s| s.start <= address && end <= s.end)
    }

    /// Whether the address is in code of the module.
    pub fn has_code(&self, address: usize) -> bool {
        self.segments
            .iter()
            .any(|s| s.is_executable && (s.start..s.end).contains(&address))
    }

    fn read<T: Copy>(&self, address: usize) -> Option<T> {
        if !address.is_multiple_of(align_of::<T>()) || !self.contains(address, size_of::<T>()) {
            return None;
        }
        // SAFETY: aligned and within a segment; only plain integers and structures of them are read.
        Some(unsafe { *(address as *const T) })
    }

    fn symbol(&self, index: usize) -> Option<Elf64_Sym> {
        self.read(
            self.tables
                .symbols
                .checked_add(index.checked_mul(size_of::<Elf64_Sym>())?)?,
        )
    }

    fn name(&self, symbol: &Elf64_Sym) -> Option<&CStr> {
        let (start, length) = self.tables.strings;
        let offset = symbol.st_name as usize;
        if offset >= length || !self.contains(start, length) {
            return None;
        }
        // SAFETY: the table lies within a segment.
        let bytes = unsafe { std::slice::from_raw_parts((start + offset) as *const u8, length - offset) };
        CStr::from_bytes_until_nul(bytes).ok()
    }

    fn relocations(&self, table: (usize, usize)) -> &[Elf64_Rela] {
        let (start, length) = table;
        if start == 0 || !start.is_multiple_of(8) || !self.contains(start, length) {
            return &[];
        }
        // SAFETY: within a segment and aligned.
        unsafe { std::slice::from_raw_parts(start as *const Elf64_Rela, length / size_of::<Elf64_Rela>()) }
    }

    /// Calls `found(slot, index)` for each slot of this module whose symbol is `names[index]`.
    ///
    /// Relative relocations, packed ones (RELR) too, name no symbol and are passed over.
    pub fn slots(&self, names: &[&CStr], mut found: impl FnMut(GotSlot, usize)) {
        for table in [self.tables.rela, self.tables.jump] {
            for entry in self.relocations(table) {
                let (kind, index) = (entry.r_info as u32, (entry.r_info >> 32) as usize);
                if !RELOCATIONS.contains(&kind) || index == 0 {
                    continue;
                }
                if kind == RELOCATIONS[0] && entry.r_addend != 0 {
                    continue;
                }
                let Some(symbol) = self.symbol(index) else { continue };
                let Some(which) = self.name(&symbol).and_then(|n| names.iter().position(|x| *x == n)) else {
                    continue;
                };
                let address = self.base.wrapping_add(entry.r_offset as usize);
                let is_writable = self
                    .segments
                    .iter()
                    .any(|s| s.is_writable && s.start <= address && address.saturating_add(8) <= s.end);
                if is_writable && address.is_multiple_of(8) {
                    let slot = GotSlot {
                        address,
                        is_lazy: kind == RELOCATIONS[2],
                        is_variable: kind == RELOCATIONS[0],
                        is_defined_here: symbol.st_shndx != 0,
                    };
                    found(slot, which);
                }
            }
        }
    }

    /// Address of the function that this module defines under a name, its default version; None if it defines none.
    pub fn definition(&self, name: &CStr) -> Option<usize> {
        let mut result = None;
        self.chain(name, |index| {
            let Some(symbol) = self.symbol(index) else { return };
            let is_function = matches!(symbol.st_info & 15, 1 | 2);
            let is_global = matches!(symbol.st_info >> 4, 1 | 2);
            if symbol.st_shndx == 0 || !is_function || !is_global || self.name(&symbol) != Some(name) {
                return;
            }
            let version = match self.tables.versions {
                0 => 0,
                table => self.read::<u16>(table + 2 * index).unwrap_or(0),
            };
            // The top bit marks a version kept for old programs only.
            if result.is_none() || version & 0x8000 == 0 {
                result = Some(self.base.wrapping_add(symbol.st_value as usize));
            }
        });
        result
    }

    /// Calls `each` with the index of every symbol that may have the name.
    fn chain(&self, name: &CStr, mut each: impl FnMut(usize)) {
        let word = |address: usize| self.read::<u32>(address).map(|w| w as usize);
        if self.tables.gnu_hash != 0 {
            let table = self.tables.gnu_hash;
            let hash = name
                .to_bytes()
                .iter()
                .fold(5381u32, |h, b| h.wrapping_mul(33).wrapping_add(u32::from(*b)));
            let (Some(buckets), Some(first), Some(bloom)) = (word(table), word(table + 4), word(table + 8)) else {
                return;
            };
            if buckets == 0 {
                return;
            }
            let bucket_table = table + 16 + bloom * 8;
            let Some(mut index) = word(bucket_table + 4 * (hash as usize % buckets)) else {
                return;
            };
            if index < first {
                return;
            }
            for _ in 0..MAX_CHAIN {
                let Some(entry) = self.read::<u32>(bucket_table + 4 * (buckets + index - first)) else {
                    return;
                };
                if entry | 1 == hash | 1 {
                    each(index);
                }
                if entry & 1 != 0 {
                    return;
                }
                index += 1;
            }
        } else if self.tables.hash != 0 {
            let symbols = word(self.tables.hash + 4).unwrap_or(0);
            (1..symbols.min(MAX_CHAIN)).for_each(each);
        }
    }
}

/// Calls `each` with every loaded module, in the order of the global search. No module is unloaded meanwhile: the loader's
/// lock is held. `each` must not load one. The numbers are how many modules were ever loaded and unloaded.
pub fn for_each_module(mut each: impl FnMut(&LoadedModule, &CStr, (u64, u64))) {
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, data: *mut libc::c_void) -> libc::c_int {
        // SAFETY: the loader gives a valid description, and back the pointer that it was given below.
        let (info, each) = unsafe { (&*info, &mut *data.cast::<Visitor<'_>>()) };
        if info.dlpi_phdr.is_null() {
            return 0;
        }
        // SAFETY: the program headers of a loaded module, which stays loaded while the loader's lock is held.
        let module = unsafe {
            let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
            LoadedModule::new(info.dlpi_addr as usize, headers, crate::page_size())
        };
        if let Some(module) = module {
            let name = if info.dlpi_name.is_null() {
                c""
            } else {
                // SAFETY: the loader's name of the module, which ends with a zero.
                unsafe { CStr::from_ptr(info.dlpi_name) }
            };
            each(&module, name, (info.dlpi_adds, info.dlpi_subs));
        }
        0
    }
    type Visitor<'a> = &'a mut dyn FnMut(&LoadedModule, &CStr, (u64, u64));
    let mut each: Visitor<'_> = &mut each;
    // SAFETY: `visit` takes the pointer as what it is, during this call only.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut each).cast()) };
}
