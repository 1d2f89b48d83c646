//! One ELF file and everything it knows about names.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;

use crate::dwarf::Dwarf;
use crate::elf::Elf;
use crate::plt::Plt;
use crate::symbols::{Symbols, find_named};
use crate::{Error, Name, Symbol, Unknown};

/// One ELF file, opened once. Cheap to open: symbols are read at the first lookup, DWARF at the first lookup that
/// wants lines, and then unit by unit.
///
/// All addresses are *stated* ones (SVMA): as in the file's symbol table, neither run-time addresses nor file offsets.
/// [`Module::svma_of_offset`] turns a file offset into one.
///
/// `Symbols` and `Dwarf` are both made from an `Elf` that is handed to them: a separate debug file (by build id or
/// .gnu_debuglink) states the same addresses, and is one more `Elf` at these two places.
pub struct Module {
    elf: Elf,
    symbols: Option<Symbols>,
    plt: Option<Plt>,
    dwarf: DwarfState,
    /// Names of symbols that have been looked up, by start.
    names: HashMap<u64, Name>,
}

enum DwarfState {
    NotRead,
    None,
    Bad(Error),
    Ready(Box<Dwarf>),
}

/// A function as the symbol table has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function<'a> {
    /// Stated address of the first byte.
    pub start: u64,
    /// Bytes. Where the table has no size: up to the next symbol.
    pub size: u64,
    /// Not demangled.
    pub raw: Cow<'a, str>,
}

/// Where the names of a file come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sources {
    /// Functions in `.symtab`: all of them have names.
    pub symtab: bool,
    /// Functions in `.dynsym`: at least the exported ones have names.
    pub dynsym: bool,
    /// DWARF: inlined functions, files and lines.
    pub dwarf: bool,
}

impl Module {
    /// Takes an open file. Reads headers only.
    ///
    /// # Errors
    /// If it is not a regular file, not ELF, not 64-bit little-endian, an object file or a core dump, or if its headers
    /// point outside of it.
    pub fn from_file(file: File) -> Result<Module, Error> {
        Elf::from_file(file).map(Module::new)
    }

    /// The same for an image in memory, such as a vDSO.
    ///
    /// # Errors
    /// As [`Module::from_file`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Module, Error> {
        Elf::from_bytes(bytes).map(Module::new)
    }

    fn new(elf: Elf) -> Module {
        Module {
            elf,
            symbols: None,
            plt: None,
            dwarf: DwarfState::NotRead,
            names: HashMap::new(),
        }
    }

    /// The GNU build id, up to 64 bytes.
    pub fn build_id(&self) -> Option<&[u8]> {
        self.elf.build_id.as_deref()
    }

    /// The stated address of a file offset, by the loadable segments.
    pub fn svma_of_offset(&self, offset: u64) -> Option<u64> {
        self.elf.svma_of_offset(offset)
    }

    /// All functions at an address: the **innermost inlined function first, the real function last**. Never empty.
    ///
    /// The real function's name and extent come from `.symtab` or `.dynsym`, else from the PLT, else from DWARF.
    ///
    /// # Errors
    /// The reason why there is no name.
    pub fn lookup(&mut self, svma: u64) -> Result<Vec<Symbol>, Unknown> {
        self.read_symbols();
        self.read_dwarf();
        let mut found = match &mut self.dwarf {
            DwarfState::Ready(dwarf) => dwarf.find(svma),
            _ => Default::default(),
        };
        let outer = found.frames.pop();
        let real = match (self.real_function(svma), found.range) {
            (Some(real), _) => Some(real),
            (None, Some((begin, end))) => {
                let name = outer.as_ref().and_then(|f| f.name.clone());
                name.map(|name| (name, begin, end - begin))
            }
            (None, None) => None,
        };
        let Some((name, start, size)) = real else {
            return Err(self.why_unknown(svma));
        };
        // An inlined function whose name is in a file that is not read is left out; its caller has the place of the call.
        let inlined = found.frames.into_iter().filter_map(|f| {
            let Name { raw, display } = f.name?;
            Some(Symbol {
                name: display,
                raw,
                start,
                size,
                file: f.file,
                line: f.line,
                inlined: true,
            })
        });
        let mut out: Vec<Symbol> = inlined.collect();
        let (file, line) = outer.map_or((None, None), |f| (f.file, f.line));
        out.push(Symbol {
            name: name.display,
            raw: name.raw,
            start,
            size,
            file,
            line,
            inlined: false,
        });
        Ok(out)
    }

    /// [`Module::lookup`] for many addresses; results are in their order. Neighbours share what is parsed for them, so
    /// one call for all addresses of a module is also the call that needs the least memory traffic.
    pub fn lookup_many(&mut self, svmas: &[u64]) -> Vec<Result<Vec<Symbol>, Unknown>> {
        let mut order: Vec<usize> = (0..svmas.len()).collect();
        order.sort_unstable_by_key(|&i| svmas[i]);
        let mut out: Vec<Result<Vec<Symbol>, Unknown>> = vec![Err(Unknown::NoSymbols); svmas.len()];
        let mut last: Option<usize> = None;
        for i in order {
            out[i] = match last {
                Some(l) if svmas[l] == svmas[i] => out[l].clone(),
                _ => self.lookup(svmas[i]),
            };
            last = Some(i);
        }
        out
    }

    /// The symbol that covers an address, from the symbol tables only: cheap, no DWARF is read.
    pub fn symbol_at(&mut self, svma: u64) -> Option<Function<'_>> {
        let symbols = self.read_symbols();
        symbols.find(svma).map(|s| Function {
            start: s.start,
            size: s.end - s.start,
            raw: symbols.name(s),
        })
    }

    /// All function symbols by address, one for each address where one starts.
    pub fn symbols(&mut self) -> impl Iterator<Item = Function<'_>> {
        let symbols = self.read_symbols();
        symbols.iter().map(|s| Function {
            start: s.start,
            size: s.end - s.start,
            raw: symbols.name(s),
        })
    }

    /// Address and size of the function symbol with exactly this raw name; finds aliases too. The size is 0 if the table
    /// states none. Scans the tables: for a few names.
    pub fn symbol_named(&mut self, raw: &str) -> Option<(u64, u64)> {
        find_named(&self.elf, raw)
    }

    /// What the names come from, as far as it is known without parsing: by the sections that are there, and by what was
    /// found in them once they were read.
    pub fn sources(&self) -> Sources {
        let has = |kind| self.elf.sections.iter().any(|s| s.kind == kind && s.size > 24);
        let (symtab, dynsym) = match &self.symbols {
            Some(s) => (s.has_symtab, s.has_dynsym),
            None => (has(crate::elf::SHT_SYMTAB), has(crate::elf::SHT_DYNSYM)),
        };
        let dwarf = match &self.dwarf {
            DwarfState::NotRead => self
                .elf
                .section(".debug_info")
                .or(self.elf.section(".zdebug_info"))
                .is_some(),
            DwarfState::None | DwarfState::Bad(_) => false,
            DwarfState::Ready(dwarf) => dwarf.has_units(),
        };
        Sources { symtab, dynsym, dwarf }
    }

    /// Why DWARF is not used, or no longer, although the file has some. Known once a lookup has tried.
    pub fn dwarf_error(&self) -> Option<Error> {
        match &self.dwarf {
            DwarfState::Bad(error) => Some(error.clone()),
            DwarfState::Ready(dwarf) => dwarf.error(),
            _ => None,
        }
    }

    fn read_symbols(&mut self) -> &Symbols {
        self.symbols.get_or_insert_with(|| Symbols::load(&self.elf))
    }

    fn read_dwarf(&mut self) {
        if matches!(self.dwarf, DwarfState::NotRead) {
            self.dwarf = match Dwarf::load(&self.elf) {
                Ok(Some(dwarf)) => DwarfState::Ready(Box::new(dwarf)),
                Ok(None) => DwarfState::None,
                Err(error) => DwarfState::Bad(error),
            };
        }
    }

    /// Name, start and size by symbol table or PLT.
    fn real_function(&mut self, svma: u64) -> Option<(Name, u64, u64)> {
        let symbols = self.symbols.as_ref()?;
        if let Some(sym) = symbols.find(svma) {
            let name = self
                .names
                .entry(sym.start)
                .or_insert_with(|| Name::new(&symbols.name(sym)));
            return Some((name.clone(), sym.start, sym.end - sym.start));
        }
        let plt = self.plt.get_or_insert_with(|| Plt::load(&self.elf));
        let (stub, name) = plt.find(svma)?;
        let raw: std::sync::Arc<str> = name.into();
        // A C++ stub is called by its demangled name too.
        let base = name.strip_suffix("@plt").unwrap_or(name);
        let display = format!("{}@plt", crate::demangle(base)).into();
        Some((Name { raw, display }, stub.start, stub.size))
    }

    fn why_unknown(&self, svma: u64) -> Unknown {
        if !self.elf.is_loaded(svma) {
            return Unknown::OutsideFile;
        }
        let symbols = self.symbols.as_ref();
        if let Some(error) = symbols.and_then(|s| s.error.clone()).or_else(|| self.dwarf_error()) {
            return Unknown::Corrupt(error);
        }
        let no_dwarf = !self.sources().dwarf;
        if symbols.is_none_or(Symbols::is_empty) && no_dwarf {
            return Unknown::NoSymbols;
        }
        Unknown::NotInAnyFunction
    }
}
