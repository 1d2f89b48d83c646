//! One ELF file and all its names.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use crate::cython::Cython;
use crate::debugfile::{DebugFile, FileContext, Files, Search, mini_debug_info};
use crate::dwarf::{Dwarf, DwarfContext, DwarfFrame, DwarfLookup};
use crate::elf::{Elf, SHT_DYNSYM, SHT_SYMTAB};
use crate::go_table::{self, GoTable};
use crate::plt::Plt;
use crate::symbols::{Symbols, find_named};
use crate::{DataObject, Error, Name, Reason, Symbol, data_objects};

/// One ELF file, opened once. Cheap to open: symbols are read at the first lookup, DWARF at the first lookup that needs
/// lines, and then unit by unit.
///
/// All addresses are *stated* ones (SVMA): as in the file's symbol table, neither run-time addresses nor file offsets.
/// [`Module::svma_of_offset`] turns a file offset into one.
///
/// Separate debug information is found if the module has access to other files: [`Module::with_files`]. A separate
/// debug file has the same addresses, so it replaces the file where symbols and DWARF are read.
pub struct Module {
    elf: Elf,
    context: Option<FileContext>,
    /// Searched for at the first lookup.
    debug: Option<Debug>,
    search: Search,
    symbols: Option<Symbols>,
    plt: Option<Plt>,
    dwarf: DwarfState,
    /// Read at the first lookup that DWARF has no answer to.
    go_table: Option<Option<GoTable>>,
    /// Names of symbols that have been looked up, by start.
    names: HashMap<u64, Name>,
    cython: Cython,
}

enum DwarfState {
    NotRead,
    None,
    Bad(Error),
    Ready(Box<Dwarf>),
}

/// What replaces the file itself.
#[derive(Default)]
struct Debug {
    debug_file: Option<DebugFile>,
    supplementary: Option<DebugFile>,
    /// Contents of `.gnu_debugdata`.
    mini: Option<Elf>,
}

impl Debug {
    /// The file that has the full symbol table.
    fn symbols<'a>(&'a self, elf: &'a Elf) -> &'a Elf {
        let debug_file = self.debug_file.as_ref().map(|s| &s.elf);
        let all = [debug_file, Some(elf), self.mini.as_ref()];
        all.into_iter()
            .flatten()
            .find(|e| e.has_table(SHT_SYMTAB))
            .unwrap_or(elf)
    }

    /// The file that has the DWARF, if any.
    fn dwarf<'a>(&'a self, elf: &'a Elf) -> &'a Elf {
        let debug_file = self.debug_file.as_ref().map(|s| &s.elf);
        debug_file.filter(|s| s.has_dwarf()).unwrap_or(elf)
    }
}

/// A function in the symbol table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function<'a> {
    /// Stated address of the first byte.
    pub start: u64,
    /// Bytes. Where no table has a size: up to the next function that is known.
    pub size: u64,
    /// Whether the symbol table has a size, or the call frame table has this function.
    pub sized: bool,
    /// Not demangled.
    pub raw: Cow<'a, str>,
}

/// Where the names of a file come from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SymbolSources {
    /// Functions in `.symtab`, of the file or of its debug file: all functions have names.
    pub symtab: bool,
    /// Functions in `.dynsym`: at least the exported functions have names.
    pub dynsym: bool,
    /// Functions in `.gnu_debugdata`: those that are not exported have names, too.
    pub debugdata: bool,
    /// DWARF: inlined functions, files and lines.
    pub dwarf: bool,
    /// Go's function table: the same for all code of Go.
    pub go_table: bool,
    /// The separate debug file that symbols or DWARF are read from.
    pub debug_file: Option<PathBuf>,
    /// The debug file comes from [`Files::fetch`].
    pub fetched: bool,
    /// The supplementary file (`dwz`) that the DWARF refers to.
    pub supplementary: Option<PathBuf>,
    /// Units of split DWARF that were needed and found, and that were needed and not found.
    pub split_units: (usize, usize),
    /// Paths where nothing was found; not all, if there were very many.
    pub searched: Vec<PathBuf>,
    /// What was found and not used, with the reason.
    pub refused: Vec<String>,
    /// Functions that Cython made were named without their lines in the `.pyx` file.
    pub cython_lines_missing: bool,
}

impl Module {
    /// Uses an open file. Reads headers only.
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
            context: None,
            debug: None,
            search: Search::default(),
            symbols: None,
            plt: None,
            dwarf: DwarfState::NotRead,
            go_table: None,
            names: HashMap::new(),
            cython: Cython::default(),
        }
    }

    /// Enables the search for debug information that is not in the file: by build id and `.gnu_debuglink`, in `dwz`'s
    /// supplementary files, in `.dwo` and `.dwp` files. `path` is the file's path as the program sees it.
    #[must_use]
    pub fn with_files(mut self, path: impl Into<PathBuf>, files: Arc<dyn Files>) -> Module {
        let path = path.into();
        self.context = Some(FileContext { path, files });
        self
    }

    /// Reads no DWARF, which takes much memory in large files: names come from symbol tables, without lines and inlined
    /// functions.
    #[must_use]
    pub fn without_dwarf(mut self) -> Module {
        self.dwarf = DwarfState::None;
        self
    }

    /// The GNU build id, up to 64 bytes.
    pub fn build_id(&self) -> Option<&[u8]> {
        self.elf.build_id.as_deref()
    }

    /// The machine code at a stated address, `size` bytes.
    ///
    /// # Errors
    /// If they are not all in one executable section of the file.
    pub fn code(&self, svma: u64, size: u64) -> Result<Vec<u8>, Error> {
        self.elf.code(svma, size)
    }

    /// The stated address of a file offset, by the loadable segments.
    pub fn svma_of_offset(&self, offset: u64) -> Option<u64> {
        self.elf.svma_of_offset(offset)
    }

    /// All functions at an address: the **innermost inlined function first, the real function last**. Never empty.
    ///
    /// The real function's name and extent come from `.symtab` or `.dynsym`, else from the PLT, else from DWARF, else from
    /// Go's function table. Functions that Cython made have their names and, where these are found, lines in the source.
    ///
    /// # Errors
    /// The reason why there is no name.
    pub fn lookup(&mut self, svma: u64) -> Result<Vec<Symbol>, Reason> {
        self.read_symbols();
        self.read_dwarf();
        let mut found = match &mut self.dwarf {
            DwarfState::Ready(dwarf) => dwarf.find(svma, &mut self.search),
            _ => Default::default(),
        };
        if found.frames.is_empty() && found.range.is_none() {
            found = self.find_go(svma).unwrap_or_default();
        }
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
        // An inlined function whose name is in a file that is not read is left out; its caller has the location of the
        // call.
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
        self.cython.improve(&mut out, &self.elf, self.context.as_ref());
        Ok(out)
    }

    /// [`Module::lookup`] for many addresses; results are in their order. Neighbors share parsed data, so one call for
    /// all addresses of a module also needs the least memory traffic.
    pub fn lookup_many(&mut self, svmas: &[u64]) -> Vec<Result<Vec<Symbol>, Reason>> {
        let mut order: Vec<usize> = (0..svmas.len()).collect();
        order.sort_unstable_by_key(|&i| svmas[i]);
        let mut out: Vec<Result<Vec<Symbol>, Reason>> = vec![Err(Reason::NoSymbols); svmas.len()];
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

    /// The variables at these addresses, by the symbol tables; of several, the smallest one. For many addresses at once: reads
    /// the tables again.
    pub fn data_objects(&mut self, svmas: &[u64]) -> Vec<Option<DataObject>> {
        self.find_debug();
        let full = self.debug.as_ref().map_or(&self.elf, |d| d.symbols(&self.elf));
        data_objects::find(&self.elf, full, svmas)
    }

    /// The symbol that covers an address, from the symbol tables only: cheap, no DWARF is read.
    pub fn symbol_at(&mut self, svma: u64) -> Option<Function<'_>> {
        let symbols = self.read_symbols();
        symbols.find(svma).map(|s| Function {
            start: s.start,
            size: s.end - s.start,
            sized: s.sized,
            raw: symbols.name(s),
        })
    }

    /// All function symbols by address, one for each address where one starts.
    pub fn symbols(&mut self) -> impl Iterator<Item = Function<'_>> {
        let symbols = self.read_symbols();
        symbols.iter().map(|s| Function {
            start: s.start,
            size: s.end - s.start,
            sized: s.sized,
            raw: symbols.name(s),
        })
    }

    /// Address and size of the function symbol with exactly this raw name; finds aliases too. The size is 0 if the
    /// table states none. Scans the tables: for a few names.
    pub fn symbol_named(&mut self, raw: &str) -> Option<(u64, u64)> {
        self.find_debug();
        let full = self.debug.as_ref().map_or(&self.elf, |d| d.symbols(&self.elf));
        find_named(full, raw).or_else(|| find_named(&self.elf, raw))
    }

    /// Where the names come from, as far as known without parsing: by the sections of the file, and by their contents
    /// once they were read. Other files count once a lookup has searched for them.
    pub fn sources(&self) -> SymbolSources {
        let debug = self.debug.as_ref();
        let full = debug.map_or(&self.elf, |d| d.symbols(&self.elf));
        let mini = debug.is_some_and(|d| d.mini.as_ref().is_some_and(|mini| std::ptr::eq(mini, full)));
        let (table, dynsym) = match &self.symbols {
            Some(s) => (s.has_symtab, s.has_dynsym),
            None => (full.has_table(SHT_SYMTAB), self.elf.has_table(SHT_DYNSYM)),
        };
        let (dwarf, split_units) = match &self.dwarf {
            DwarfState::NotRead => (debug.map_or(&self.elf, |d| d.dwarf(&self.elf)).has_dwarf(), (0, 0)),
            DwarfState::None | DwarfState::Bad(_) => (false, (0, 0)),
            DwarfState::Ready(dwarf) => (dwarf.has_units(), dwarf.split_units()),
        };
        let debug_file = debug.and_then(|d| d.debug_file.as_ref());
        SymbolSources {
            symtab: table && !mini,
            dynsym,
            debugdata: table && mini,
            dwarf,
            go_table: match &self.go_table {
                Some(table) => table.is_some(),
                None => go_table::GO_TABLE_SECTIONS
                    .iter()
                    .any(|name| self.elf.section(name).is_some()),
            },
            debug_file: debug_file.and_then(|s| s.path.clone()),
            fetched: debug_file.is_some_and(|s| s.path.is_none()),
            supplementary: debug.and_then(|d| d.supplementary.as_ref()?.path.clone()),
            split_units,
            searched: self.search.searched.clone(),
            refused: self.search.refused.clone(),
            cython_lines_missing: self.cython.lines_missing,
        }
    }

    /// Why DWARF is not used, or no longer, although the file has some. Known once a lookup has tried.
    pub fn dwarf_error(&self) -> Option<Error> {
        match &self.dwarf {
            DwarfState::Bad(error) => Some(error.clone()),
            DwarfState::Ready(dwarf) => dwarf.error(),
            _ => None,
        }
    }

    /// Searches for what is missing in the file itself, once.
    fn find_debug(&mut self) {
        if self.debug.is_some() {
            return;
        }
        let mut debug = Debug::default();
        let context = self.context.as_ref();
        if let Some(context) = context.filter(|_| !self.elf.has_dwarf()) {
            debug.debug_file = self.search.debug_file(&self.elf, context);
        }
        if !debug.symbols(&self.elf).has_table(SHT_SYMTAB) {
            match mini_debug_info(&self.elf) {
                Some(Ok(mini)) => debug.mini = Some(mini),
                Some(Err(why)) => self.search.refuse(why.to_string()).unwrap_or_default(),
                None => {}
            }
        }
        if let Some(context) = context {
            let path = debug
                .debug_file
                .as_ref()
                .map_or(Some(&context.path), |s| s.path.as_ref());
            let path = path.unwrap_or(&context.path).clone();
            debug.supplementary = self.search.supplementary(debug.dwarf(&self.elf), &path, context);
        }
        self.debug = Some(debug);
    }

    fn read_symbols(&mut self) -> &Symbols {
        self.find_debug();
        let full = self.debug.as_ref().map_or(&self.elf, |d| d.symbols(&self.elf));
        self.symbols.get_or_insert_with(|| Symbols::load(&self.elf, full))
    }

    fn read_dwarf(&mut self) {
        if !matches!(self.dwarf, DwarfState::NotRead) {
            return;
        }
        self.find_debug();
        let debug = self.debug.as_ref();
        let packages = || {
            let debug_file = debug.and_then(|d| d.debug_file.as_ref()?.path.as_deref());
            let files = self
                .context
                .as_ref()
                .map(|a| a.path.as_path())
                .into_iter()
                .chain(debug_file);
            files.map(|path| {
                let mut name = path.as_os_str().to_owned();
                name.push(".dwp");
                name.into()
            })
        };
        let context = DwarfContext {
            supplementary: debug.and_then(|d| d.supplementary.as_ref().map(|s| &s.elf)),
            file: self.context.clone(),
            packages: packages().collect(),
        };
        let elf = debug.map_or(&self.elf, |d| d.dwarf(&self.elf));
        self.dwarf = match Dwarf::load(elf, context) {
            Ok(Some(dwarf)) => DwarfState::Ready(Box::new(dwarf)),
            Ok(None) => DwarfState::None,
            Err(error) => DwarfState::Bad(error),
        };
    }

    /// What Go's own table has.
    fn find_go(&mut self, svma: u64) -> Option<DwarfLookup> {
        let table = self
            .go_table
            .get_or_insert_with(|| go_table::load(&self.elf))
            .as_ref()?;
        let function = table.find(svma)?;
        let frames = function.frames(svma, &mut |at, size| self.elf.loaded(at, size));
        let name = |name: &str| Name {
            raw: name.into(),
            display: name.into(),
        };
        let frame = |f: go_table::GoFrame<'_>| DwarfFrame {
            name: Some(name(&f.name)),
            file: f.file.map(|file| file.as_ref().into()),
            line: f.line,
        };
        Some(DwarfLookup {
            frames: frames.into_iter().map(frame).collect(),
            range: Some((function.start, function.end)),
        })
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
        // A C++ stub has the demangled name, too.
        let base = name.strip_suffix("@plt").unwrap_or(name);
        let display = format!("{}@plt", crate::demangle(base)).into();
        Some((Name { raw, display }, stub.start, stub.size))
    }

    fn why_unknown(&self, svma: u64) -> Reason {
        if !self.elf.is_loaded(svma) {
            return Reason::OutsideFile;
        }
        let symbols = self.symbols.as_ref();
        if let Some(error) = symbols.and_then(|s| s.error.clone()).or_else(|| self.dwarf_error()) {
            return Reason::Corrupt(error);
        }
        let sources = self.sources();
        if symbols.is_none_or(Symbols::is_empty) && !sources.dwarf && !sources.go_table {
            return Reason::NoSymbols;
        }
        Reason::NotInAnyFunction
    }
}
