//! Files mapped by processes: opened once, kept open, and shared by all processes that map the same file.
//!
//! A file is opened when its mapping is seen, with the privileges of sampling; its headers, and the tables that
//! unwinding needs, are read then. Names and DWARF are read from the open file after all privileges are dropped
//! (`privileges::phases`).

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock};

use object::read::elf::ElfFile64;
use object::{LittleEndian, Object, ObjectSection, ReadCache, elf};
use rustc_hash::{FxHashMap, FxHashSet};

use super::file_content::{Content, ContentReader, LayerFile};
use super::root::{OpenRoots, Root};
use super::system::{FileKey, System};
use crate::code_map::CodeSection;
use crate::escape;
use crate::event::{MappedFile, Pid};
use crate::frame::ModuleId;
use crate::sys;

mod sections;
mod segments;
mod symbol_table;

pub use sections::ModuleSections;
pub use segments::Segment;
use symbol_table::SymbolTable;

/// Maximum size of a section or symbol table, bytes; the largest real ones have about 100 MB.
const MAX_SECTION: u64 = 1 << 30;
/// Maximum number of loadable segments.
const MAX_SYMBOLS: usize = 8 << 20;
/// Entries of a dynamic section that are read.
const MAX_DYNAMIC: usize = 4096;

/// Path of the kernel's code that is mapped into each process, and the name of one that could not be read.
pub(super) const VDSO: &[u8] = b"[vdso]";
const UNREAD_VDSO: &[u8] = b"[vdso] (not read)";
/// Maximum size of it, bytes.
const MAX_VDSO: u64 = 1 << 20;

/// How the paths of mappings begin that are not files but named memory (memfd_create(2), shmem_zero_setup in
/// mm/shmem.c, newseg in ipc/shm.c, hugetlb_file_setup in fs/hugetlbfs/inode.c, Linux 6.18).
const NO_FILES: &[&[u8]] = &[b"/memfd:", b"/dev/zero", b"/SYSV", b"/anon_hugepage", b"/dev/shm/"];

/// What was read of a file, apart from addresses on stacks: a tape keeps the same parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileAccessLog {
    /// Symbols that were searched for and found.
    pub names: BTreeSet<String>,
    /// Ranges of the image that were read: svma and length.
    pub images: BTreeSet<(u64, usize)>,
    pub sections: BTreeSet<String>,
}

/// One file.
#[derive(Debug)]
pub struct Module {
    /// A number that no other file has, also after this one was closed.
    pub number: u32,
    /// Path as the process sees it.
    pub path: Vec<u8>,
    pub content: Content,
    pub segments: Vec<Segment>,
    /// svma of its variables: writable segments.
    data: Vec<Range<u64>>,
    pub build_id: Vec<u8>,
    /// svma of the entry point of a program or loader; libraries have none.
    pub entry: Option<u64>,
    /// Whether its mappings are code of a file: it is an ELF file, or could be one.
    pub is_file: bool,
    /// Why it was not opened, if known.
    pub refused: Option<String>,
    accesses: Mutex<FileAccessLog>,
    /// The file system around it, as seen by the first process that mapped it.
    pub root: OnceLock<Arc<Root>>,
}

type ModuleElf<'a> = ElfFile64<'a, LittleEndian, &'a ReadCache<ContentReader>>;

impl Module {
    fn new(path: Vec<u8>, content: Content) -> Module {
        let mut m = Module {
            number: 0,
            path,
            content,
            segments: Vec::new(),
            data: Vec::new(),
            build_id: Vec::new(),
            entry: None,
            is_file: true,
            refused: None,
            accesses: Mutex::default(),
            root: OnceLock::new(),
        };
        m.segments = m.elf(segments::executable).unwrap_or_default();
        m.data = m.elf(segments::writable).unwrap_or_default();
        m.build_id = m
            .elf(|e| e.build_id().ok().flatten().unwrap_or_default().to_vec())
            .unwrap_or_default();
        m.build_id.truncate(64);
        m.entry = m.elf(|e| e.entry()).filter(|entry| *entry != 0);
        m.is_file = m.is_jitdump() || m.elf(|_| ()).is_some();
        if !m.is_file {
            m.content = Content::Missing; // nothing in it is read, and descriptors are limited
        }
        m
    }

    /// A mapping whose file could not be opened.
    fn missing(path: Vec<u8>, refused: Option<String>) -> Module {
        let mut m = Module::new(path, Content::Missing);
        (m.is_file, m.refused) = (m.has_file_name(), refused);
        m
    }

    /// Whether its path is that of a file, and not of named memory.
    pub fn has_file_name(&self) -> bool {
        self.path.starts_with(b"/") && !NO_FILES.iter().any(|start| self.path.starts_with(start))
    }

    /// File name without its directory, for display: as [`escape::name`] spells names.
    pub fn name(&self) -> String {
        let name = self.path.rsplit(|c| *c == b'/').next().unwrap_or(&self.path);
        let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
        escape::name_of_utf8(name)
    }

    /// Its path, spelled in the same way.
    pub fn path_text(&self) -> String {
        escape::name_of_utf8(&self.path)
    }

    /// Whether variables are at this svma.
    pub fn has_variable(&self, svma: u64) -> bool {
        self.data.iter().any(|data| data.contains(&svma))
    }

    /// Whether it is the jitdump file of some process: a writer maps it executable to make it visible to profilers, and
    /// calls it `jit-PID.dump` (jitdump specification of Linux).
    pub fn is_jitdump(&self) -> bool {
        let name = self.name();
        let pid = name.strip_prefix("jit-").and_then(|n| n.strip_suffix(".dump"));
        pid.is_some_and(|pid| !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit()))
    }

    /// Calls `f` with the parsed file; `None` if it is not a 64-bit little-endian ELF file.
    pub fn elf<R>(&self, f: impl FnOnce(&ModuleElf<'_>) -> R) -> Option<R> {
        let cache = ReadCache::new(ContentReader::new(self.content.clone()));
        let elf = ModuleElf::parse(&cache).ok()?;
        Some(f(&elf))
    }

    /// Names of the libraries that it needs (gABI, "Dynamic Section").
    pub fn libraries(&self) -> Vec<String> {
        self.dynamic_strings(|tag| tag == elf::DT_NEEDED)
    }

    /// Directories in which it wants them to be searched.
    pub fn library_paths(&self) -> Vec<String> {
        let lists = self.dynamic_strings(|tag| [elf::DT_RPATH, elf::DT_RUNPATH].contains(&tag));
        lists
            .iter()
            .flat_map(|list| list.split(':').map(String::from))
            .collect()
    }

    /// The loader that it names.
    pub fn loader(&self) -> Option<PathBuf> {
        let bytes = self.section_untracked(".interp")?.bytes;
        let path = bytes.split(|b| *b == 0).next()?;
        Some(PathBuf::from(OsStr::from_bytes(path)))
    }

    /// svma of its dynamic section.
    pub fn dynamic_section(&self) -> Option<u64> {
        self.elf(|e| {
            use object::read::elf::ProgramHeader;
            let endian = e.endian();
            let mut headers = e.elf_program_headers().iter();
            let header = headers.find(|header| header.p_type(endian) == elf::PT_DYNAMIC)?;
            Some(header.p_vaddr(endian))
        })
        .flatten()
    }

    /// svma of the pointer that the loader sets for debuggers, to its list of libraries (`DT_DEBUG`).
    pub fn loader_list(&self) -> Option<u64> {
        let at = self.elf(|e| {
            let table = e.elf_dynamic_table().ok()?;
            table
                .iter()
                .take(MAX_DYNAMIC)
                .position(|entry| entry.tag == elf::DT_DEBUG)
        })??;
        // (The value is the second word of an entry.)
        self.dynamic_section()?.checked_add(16 * at as u64 + 8)
    }

    fn dynamic_strings(&self, wanted: impl Fn(elf::DynamicTag) -> bool) -> Vec<String> {
        self.elf(|e| {
            let Ok(table) = e.elf_dynamic_table() else {
                return Vec::new();
            };
            let text = |d| Some(String::from_utf8_lossy(table.string(d).ok()?).into_owned());
            let all = table.iter().take(MAX_DYNAMIC).filter(|d| wanted(d.tag));
            all.filter_map(text).collect()
        })
        .unwrap_or_default()
    }

    /// What was read of this file so far.
    pub fn accesses(&self) -> FileAccessLog {
        self.accesses.lock().map(|a| a.clone()).unwrap_or_default()
    }

    fn track(&self, add: impl FnOnce(&mut FileAccessLog)) {
        if let Ok(mut accesses) = self.accesses.lock() {
            add(&mut accesses);
        }
    }

    /// Names, addresses and sizes of the dynamic and static symbols with these names.
    pub fn symbols_named(&self, wanted: &dyn Fn(&[u8]) -> bool) -> Vec<(String, u64, u64)> {
        let mut found = Vec::new();
        for table in [self.names(".dynsym", ".dynstr"), self.names(".symtab", ".strtab")] {
            found.extend(
                table
                    .iter()
                    .filter(|(name, _, _)| wanted(name))
                    .map(|(name, at, size)| (String::from_utf8_lossy(name).into_owned(), at, size)),
            );
        }
        found.sort();
        found.dedup();
        self.track(|accesses| accesses.names.extend(found.iter().map(|(name, ..)| name.clone())));
        found
    }

    /// svma of an exported symbol: one that the dynamic symbol table defines.
    pub fn exports(&self, wanted: &str) -> Option<u64> {
        self.track(|accesses| {
            accesses.names.insert(wanted.into());
        });
        self.names(".dynsym", ".dynstr").find(wanted.as_bytes())
    }

    /// svma of the symbol with this name, from either table.
    pub fn symbol(&self, wanted: &str) -> Option<u64> {
        let find = |table, strings| self.names(table, strings).find(wanted.as_bytes());
        let found = find(".dynsym", ".dynstr").or_else(|| find(".symtab", ".strtab"))?;
        self.track(|accesses| {
            accesses.names.insert(wanted.into());
        });
        Some(found)
    }

    /// A symbol table with its strings, read completely: reading name by name would cost a system call each.
    fn names(&self, table: &str, strings: &str) -> SymbolTable {
        SymbolTable {
            table: self.section_untracked(table).map_or(Vec::new(), |s| s.bytes),
            strings: self.section_untracked(strings).map_or(Vec::new(), |s| s.bytes),
        }
    }

    /// Bytes of the file's image at `svma`.
    pub fn read_image(&self, svma: u64, len: usize) -> Option<Vec<u8>> {
        self.track(|accesses| {
            accesses.images.insert((svma, len));
        });
        self.read_untracked(svma, len)
    }

    /// Like [`Module::read_image`], but not recorded: for what only a live process needs, so tapes do not keep it.
    pub fn read_untracked(&self, svma: u64, len: usize) -> Option<Vec<u8>> {
        self.elf(|e| {
            use object::ObjectSegment;
            let s = e
                .segments()
                .find(|s| svma >= s.address() && svma - s.address() < s.size())?;
            s.data_range(svma, len as u64).ok().flatten().map(<[u8]>::to_vec)
        })
        .flatten()
    }

    /// A complete section, decompressed.
    pub fn section(&self, name: &str) -> Option<CodeSection> {
        self.track(|accesses| {
            accesses.sections.insert(name.into());
        });
        self.section_untracked(name)
    }

    /// Like [`Module::section`], but not recorded: for what only a live process needs, so tapes do not keep it.
    pub fn section_untracked(&self, name: &str) -> Option<CodeSection> {
        let found = self.elf(|e| {
            let s = e.section_by_name(name)?;
            (s.size() <= MAX_SECTION).then_some(())?;
            let bytes = s.uncompressed_data().ok()?.into_owned();
            Some(CodeSection {
                svma: s.address(),
                bytes,
            })
        });
        found.flatten().or_else(|| self.segment_section(|s| s.name == name))
    }
}

/// A file and its identity.
type OpenedFile = (Content, FileKey);

/// All files of all processes, by device and inode.
pub struct Modules {
    all: Vec<Arc<Module>>,
    /// Numbers of closed ones that are used again.
    free: Vec<ModuleId>,
    /// Files so far.
    added: u32,
    /// Stands for all that were closed.
    closed: Arc<Module>,
    by_file: FxHashMap<FileKey, ModuleId>,
    by_name: FxHashMap<Vec<u8>, ModuleId>,
    /// Files of images, which many containers see under one path, each by a device of its own; where files are of many processes.
    by_layer: Option<FxHashMap<(LayerFile, Vec<u8>), ModuleId>>,
    roots: OpenRoots,
    /// Files opened before their events are handled, by process, start and path.
    ahead: FxHashMap<(Pid, u64, Vec<u8>), Option<OpenedFile>>,
    /// Number of open files, and the maximum.
    open: usize,
    max_open: usize,
    /// Files that one process may have.
    max_of_one: usize,
}

/// Descriptors that are left for other things where few may be open.
const RESERVED: usize = 24;
/// Part of the open files that one process of a host may have.
const SHARE: usize = 4;

impl Default for Modules {
    fn default() -> Modules {
        Modules {
            all: Vec::new(),
            free: Vec::new(),
            added: 0,
            closed: Arc::new(Module::missing(Vec::new(), None)),
            by_file: FxHashMap::default(),
            by_name: FxHashMap::default(),
            by_layer: None,
            roots: OpenRoots::default(),
            ahead: FxHashMap::default(),
            open: 0,
            // The rest is for events, rings, root directories, perf maps and output files.
            max_open: (sys::files::file_limit() / 2).min(sys::files::free_descriptors().saturating_sub(RESERVED)),
            max_of_one: usize::MAX,
        }
    }
}

/// Numbers of files.
static NUMBERS: AtomicU32 = AtomicU32::new(0);

/// Maximum number of files opened before their events are handled, per batch of events.
const MAX_AHEAD: usize = 4096;

impl Modules {
    /// Files of many processes, of which each may have a part of those that are open.
    pub fn of_many_processes() -> Modules {
        let all = Modules::default();
        Modules {
            max_of_one: (all.max_open / SHARE).max(1),
            by_layer: Some(FxHashMap::default()),
            ..all
        }
    }

    /// Stands for a file of a process that has mapped `files` already, if it may have no more.
    pub fn refused(&mut self, files: usize, path: &[u8]) -> Option<(ModuleId, bool)> {
        let why = || format!("the limit of {} files of one process is reached", self.max_of_one);
        let why = (files >= self.max_of_one).then(why)?;
        Some(self.unread(path, Some(why)))
    }

    /// The file system of a process as it sees it; `None` if that is not available.
    pub fn root(&mut self, system: &dyn System, pid: Pid) -> Option<Arc<Root>> {
        let mut root = system.root(pid).filter(|root| !root.is_ours)?;
        root.share(&mut self.roots);
        Some(Arc::new(root))
    }

    pub fn get(&self, id: ModuleId) -> &Arc<Module> {
        &self.all[id.0 as usize]
    }

    /// Numbers in use, and of closed files.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Those that were not closed.
    pub fn open_ones(&self) -> impl Iterator<Item = ModuleId> + '_ {
        let all = (0..self.all.len()).map(|at| ModuleId(at as u32));
        all.filter(|id| !self.is_closed(*id))
    }

    /// How many of them were not opened, because of a limit.
    pub fn refusals(&self) -> usize {
        self.open_ones().filter(|id| self.get(*id).refused.is_some()).count()
    }

    /// How many there have been so far.
    pub fn added(&self) -> u32 {
        self.added
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Closes files that were opened for a batch of events and not needed.
    pub fn forget_ahead(&mut self) {
        self.ahead.clear();
    }

    /// Opens the file of a mapping whose event is about to be handled: the process may exit before that.
    pub fn open_ahead(
        &mut self,
        system: &dyn System,
        pid: Pid,
        start: u64,
        end: u64,
        path: &[u8],
        root: Option<&Root>,
    ) {
        let key = (pid, start, path.to_vec());
        let room = self.max_open.saturating_sub(self.open).min(MAX_AHEAD);
        if self.ahead.len() < room && !self.ahead.contains_key(&key) {
            self.ahead.insert(key, system.open(pid, start, end, path, root));
        }
    }

    /// The file of a mapping, by what the list of mappings says of it: without opening it once more.
    pub fn mapped(&self, system: &dyn System, device: (u32, u32), inode: u64, path: &[u8]) -> Option<ModuleId> {
        let id = self.by_file.get(&system.file_of(device, inode)?)?;
        self.checked(*id, path)
    }

    /// The file of a mapping of a process that has exited, and whether it is new: one that is known, or one that cannot be read.
    /// `None`: it is the kernel's code, which is not known.
    pub fn of_ended(&mut self, system: &dyn System, mapped: &MappedFile) -> Option<(ModuleId, bool)> {
        if mapped.path == VDSO {
            return self.by_name.get(VDSO).map(|id| (*id, false));
        }
        let known = self.mapped(system, mapped.device, mapped.inode, &mapped.path);
        Some(known.map_or_else(|| self.unread(&mapped.path, None), |id| (id, false)))
    }

    /// Stands for a file that is not read, and whether it is new; `why`: because of a limit.
    fn unread(&mut self, path: &[u8], why: Option<String>) -> (ModuleId, bool) {
        if let Some(id) = self.by_name.get(path) {
            return (*id, false);
        }
        let id = self.add(Module::missing(path.to_vec(), why));
        self.by_name.insert(path.to_vec(), id);
        (id, true)
    }

    /// The file mapped at `start..end` of a process, and whether it is new. `root` is that of the process, if known.
    pub fn open(
        &mut self,
        system: &dyn System,
        pid: Pid,
        start: u64,
        end: u64,
        path: &[u8],
        root: Option<&Root>,
    ) -> (ModuleId, bool) {
        if path == VDSO {
            return self.open_vdso(system, pid, start, end);
        }
        let ahead = self.ahead.remove(&(pid, start, path.to_vec()));
        match ahead.unwrap_or_else(|| system.open(pid, start, end, path, root)) {
            Some((content, key)) => {
                let known = self.by_file.get(&key);
                if let Some(id) = known.and_then(|id| self.checked(*id, path)) {
                    return (id, false);
                }
                let layer = self.by_layer.as_ref().and_then(|_| content.layer_file());
                let layer = layer.map(|file| (file, path.to_vec()));
                let seen = self.by_layer.as_ref().zip(layer.as_ref());
                if let Some(id) = seen.and_then(|(known, file)| known.get(file).copied()) {
                    self.by_file.insert(key, id);
                    return (id, false);
                }
                let module = if self.open < self.max_open {
                    Module::new(path.to_vec(), content)
                } else {
                    let why = format!("the limit of {} open files is reached (ulimit -n)", self.open);
                    Module::missing(path.to_vec(), Some(why))
                };
                self.open += usize::from(matches!(module.content, Content::File(_)));
                let layer = layer.filter(|_| module.refused.is_none());
                let id = self.add(module);
                self.by_file.insert(key, id);
                if let Some((known, file)) = self.by_layer.as_mut().zip(layer) {
                    known.insert(file, id);
                }
                (id, true)
            }
            None => self.unread(path, None),
        }
    }

    /// A known file. Of one that is not kept open the path decides, too: its number may belong to another one by now.
    fn checked(&self, id: ModuleId, path: &[u8]) -> Option<ModuleId> {
        let module = self.get(id);
        (!matches!(module.content, Content::Missing) || module.path == path).then_some(id)
    }

    /// The kernel's code in each process, which is the same in all.
    fn open_vdso(&mut self, system: &dyn System, pid: Pid, start: u64, end: u64) -> (ModuleId, bool) {
        if let Some(id) = self.by_name.get(VDSO) {
            return (*id, false);
        }
        let len = end.saturating_sub(start).min(MAX_VDSO) as usize;
        let mut bytes = vec![0; len];
        let got = system.read_memory(pid, start, &mut bytes);
        bytes.truncate(got);
        let mut module = Module::new(VDSO.to_vec(), Content::Bytes(Arc::new(bytes.into())));
        if !module.is_file || got < len {
            // One that has exited meanwhile, may not be read, or runs 32-bit code says nothing about the others.
            if let Some(id) = self.by_name.get(UNREAD_VDSO) {
                return (*id, false);
            }
            module = Module::missing(UNREAD_VDSO.to_vec(), None);
        }
        let name = module.path.clone();
        let id = self.add(module);
        self.by_name.insert(name, id);
        (id, true)
    }

    /// Closes files that nothing refers to any more, and forgets what was read of them. A file that is mapped again is
    /// opened again, by another number.
    pub fn close(&mut self, ids: &FxHashSet<ModuleId>) {
        for id in ids {
            let module = std::mem::replace(&mut self.all[id.0 as usize], self.closed.clone());
            self.open -= usize::from(matches!(module.content, Content::File(_)));
        }
        self.by_file.retain(|_, id| !ids.contains(id));
        self.by_name.retain(|_, id| !ids.contains(id));
        if let Some(known) = &mut self.by_layer {
            known.retain(|_, id| !ids.contains(id));
        }
    }

    /// Uses the numbers of closed files again: nothing knows them any more. Also drops the root directories of what is closed.
    pub fn reuse_closed(&mut self) {
        let all = (0..self.all.len()).map(|at| ModuleId(at as u32));
        self.free = all.filter(|id| self.is_closed(*id)).collect();
        self.roots.retain(|_, directory| Arc::strong_count(directory) > 1);
    }

    /// Whether a file was closed by [`Modules::close`].
    pub fn is_closed(&self, id: ModuleId) -> bool {
        Arc::ptr_eq(self.get(id), &self.closed)
    }

    /// Adds a module for code that a process registered with debuggers: it is in no file, but has its own unwind
    /// tables.
    pub fn add_registered(&mut self) -> ModuleId {
        self.add(Module {
            is_file: false,
            ..Module::missing(b"[registered code]".to_vec(), None)
        })
    }

    fn add(&mut self, module: Module) -> ModuleId {
        self.added = self.added.wrapping_add(1);
        let module = Arc::new(Module {
            number: NUMBERS.fetch_add(1, Relaxed),
            ..module
        });
        if let Some(id) = self.free.pop() {
            self.all[id.0 as usize] = module;
            return id;
        }
        self.all.push(module);
        ModuleId(self.all.len() as u32 - 1)
    }
}

#[cfg(test)]
mod tests;
