//! Files mapped by processes: opened once, kept open, shared by all processes that map the same file.
//!
//! A file is opened when its mapping is seen, with the rights of sampling; its headers, and the tables that unwinding
//! asks for, are read then. Names and DWARF are read from the open file when all rights are given up (`privilege`).

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, OnceLock};

use object::read::elf::{ElfFile64, FileHeader, ProgramHeader};
use object::{LittleEndian, Object, ObjectSection, ObjectSymbol, ReadCache, SectionKind, SymbolKind, elf};
use rustc_hash::FxHashMap;

use super::content::{Content, Reader};
use super::host::{FileKey, Host};
use super::root::{Known, Root};
use super::sys;
use crate::code::{Section, Sections};
use crate::sample::{ModuleId, PAGE, Pid};

/// Longest section or symbol table that is read; the largest real ones are some 100 MB.
const MAX_SECTION: u64 = 1 << 30;
/// Loadable segments beyond this are not looked at.
const MAX_SEGMENTS: usize = 256;
const MAX_SYMBOLS: usize = 8 << 20;

/// A loadable, executable segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub offset: u64,
    pub svma: u64,
    pub size: u64,
}

/// How the paths of mappings begin that are not files but memory with a name (memfd_create(2), shmem_zero_setup in
/// mm/shmem.c, newseg in ipc/shm.c, hugetlb_file_setup in fs/hugetlbfs/inode.c, Linux 6.18).
const NO_FILES: &[&[u8]] = &[b"/memfd:", b"/dev/zero", b"/SYSV", b"/anon_hugepage", b"/dev/shm/"];

/// What a file was asked, apart from addresses on stacks: a tape keeps what the answers were made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// Symbols looked for and found.
    pub names: BTreeSet<String>,
    /// Pieces of the image that were read: svma and length.
    pub images: BTreeSet<(u64, usize)>,
    pub sections: BTreeSet<String>,
}

/// One file.
#[derive(Debug)]
pub struct Module {
    /// Path as the process sees it.
    pub path: Vec<u8>,
    pub content: Content,
    pub segments: Vec<Segment>,
    pub build_id: Vec<u8>,
    /// svma where a program or loader begins; libraries have none.
    pub entry: Option<u64>,
    /// Whether what is mapped of it is code of a file: it is an ELF file, or could be one.
    pub is_file: bool,
    /// Why it was not opened, where we know.
    pub refused: Option<String>,
    asked: Mutex<Asked>,
    /// The files around it, in the eyes of the first process that mapped it.
    pub root: OnceLock<Arc<Root>>,
}

type Elf<'a> = ElfFile64<'a, LittleEndian, &'a ReadCache<Reader>>;

impl Module {
    fn new(path: Vec<u8>, content: Content) -> Module {
        let mut m = Module {
            path,
            content,
            segments: Vec::new(),
            build_id: Vec::new(),
            entry: None,
            is_file: true,
            refused: None,
            asked: Mutex::default(),
            root: OnceLock::new(),
        };
        m.segments = m.elf(segments).unwrap_or_default();
        m.build_id = m
            .elf(|e| e.build_id().ok().flatten().unwrap_or_default().to_vec())
            .unwrap_or_default();
        m.build_id.truncate(64);
        m.entry = m.elf(|e| e.entry()).filter(|entry| *entry != 0);
        m.is_file = m.is_jitdump() || m.elf(|_| ()).is_some();
        if !m.is_file {
            m.content = Content::Missing; // there is nothing to read in it, and descriptors are few
        }
        m
    }

    /// A mapping whose file could not be opened.
    fn missing(path: Vec<u8>, refused: Option<String>) -> Module {
        let mut m = Module::new(path, Content::Missing);
        (m.is_file, m.refused) = (m.has_file_name(), refused);
        m
    }

    /// Whether its path is that of a file, and not of memory with a name.
    pub fn has_file_name(&self) -> bool {
        self.path.starts_with(b"/") && !NO_FILES.iter().any(|start| self.path.starts_with(start))
    }

    /// File name without its folder, for people.
    pub fn name(&self) -> String {
        let name = self.path.rsplit(|c| *c == b'/').next().unwrap_or(&self.path);
        let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
        String::from_utf8_lossy(name).into_owned()
    }

    /// Whether it is the jitdump file of some process: a writer maps it executable just to be noticed, and calls it
    /// `jit-PID.dump` (jitdump specification of Linux).
    pub fn is_jitdump(&self) -> bool {
        let name = self.name();
        let pid = name.strip_prefix("jit-").and_then(|n| n.strip_suffix(".dump"));
        pid.is_some_and(|pid| !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit()))
    }

    /// Runs `f` on the parsed file; `None` if this is no 64-bit little-endian ELF file.
    pub fn elf<R>(&self, f: impl FnOnce(&Elf<'_>) -> R) -> Option<R> {
        let cache = ReadCache::new(Reader::new(self.content.clone()));
        let elf = Elf::parse(&cache).ok()?;
        Some(f(&elf))
    }

    /// What this file was asked so far.
    pub fn asked(&self) -> Asked {
        self.asked.lock().map(|a| a.clone()).unwrap_or_default()
    }

    fn note(&self, note: impl FnOnce(&mut Asked)) {
        if let Ok(mut asked) = self.asked.lock() {
            note(&mut asked);
        }
    }

    /// Load bias of a mapping of this file: `avma - svma`.
    pub fn bias(&self, start: u64, offset: u64) -> Option<u64> {
        let floor = |x: u64| x & !(PAGE - 1);
        let s = self
            .segments
            .iter()
            .find(|s| floor(s.offset) <= offset && offset < s.offset.saturating_add(s.size.max(1)))?;
        Some(start.wrapping_sub(floor(s.svma).wrapping_add(offset - floor(s.offset))))
    }

    /// Address and size of the dynamic or, failing that, static symbols with these names.
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
        self.note(|asked| asked.names.extend(found.iter().map(|(name, ..)| name.clone())));
        found
    }

    /// Does the dynamic symbol table define this name?
    pub fn exports(&self, wanted: &str) -> Option<u64> {
        self.note(|asked| {
            asked.names.insert(wanted.into());
        });
        self.names(".dynsym", ".dynstr").find(wanted.as_bytes())
    }

    /// svma of the symbol with this name, of whichever table.
    pub fn symbol(&self, wanted: &str) -> Option<u64> {
        let find = |table, strings| self.names(table, strings).find(wanted.as_bytes());
        let found = find(".dynsym", ".dynstr").or_else(|| find(".symtab", ".strtab"))?;
        self.note(|asked| {
            asked.names.insert(wanted.into());
        });
        Some(found)
    }

    /// A symbol table with its strings, read whole: one name after the other would cost a read each.
    fn names(&self, table: &str, strings: &str) -> Names {
        Names {
            table: self.glance_section(table).map_or(Vec::new(), |s| s.bytes),
            strings: self.glance_section(strings).map_or(Vec::new(), |s| s.bytes),
        }
    }

    /// Bytes of the file's image at `svma`, as the file has them.
    pub fn read_image(&self, svma: u64, len: usize) -> Option<Vec<u8>> {
        self.note(|asked| {
            asked.images.insert((svma, len));
        });
        self.glance(svma, len)
    }

    /// The same for what only a live process needs: tapes do not keep it.
    pub fn glance(&self, svma: u64, len: usize) -> Option<Vec<u8>> {
        self.elf(|e| {
            use object::ObjectSegment;
            let s = e
                .segments()
                .find(|s| svma >= s.address() && svma - s.address() < s.size())?;
            s.data_range(svma, len as u64).ok().flatten().map(<[u8]>::to_vec)
        })
        .flatten()
    }

    /// A whole section, decompressed.
    pub fn section(&self, name: &str) -> Option<Section> {
        self.note(|asked| {
            asked.sections.insert(name.into());
        });
        self.glance_section(name)
    }

    /// The same for what only a live process needs: tapes do not keep it.
    pub fn glance_section(&self, name: &str) -> Option<Section> {
        self.elf(|e| {
            let s = e.section_by_name(name)?;
            (s.size() <= MAX_SECTION).then_some(())?;
            let bytes = s.uncompressed_data().ok()?.into_owned();
            Some(Section {
                svma: s.address(),
                bytes,
            })
        })
        .flatten()
    }
}

fn segments(e: &Elf<'_>) -> Vec<Segment> {
    let endian = e.endian();
    let header = e.elf_header();
    debug_assert!(header.is_type_64());
    e.elf_program_headers()
        .iter()
        .filter(|p| p.p_type(endian) == elf::PT_LOAD && p.p_flags(endian).0 & elf::PF_X.0 != 0)
        .take(MAX_SEGMENTS)
        .map(|p| Segment {
            offset: p.p_offset(endian),
            svma: p.p_vaddr(endian),
            size: p.p_filesz(endian),
        })
        .collect()
}

/// Bytes of a symbol table and of its strings.
struct Names {
    table: Vec<u8>,
    strings: Vec<u8>,
}

impl Names {
    /// Address of the symbol of this name. Compares without looking for the ends of other names: some files have
    /// hundreds of thousands.
    fn find(&self, wanted: &[u8]) -> Option<u64> {
        self.table.chunks_exact(24).take(MAX_SYMBOLS).find_map(|s| {
            let name = u32::from_le_bytes(s[..4].try_into().expect("four bytes"));
            let rest = self.strings.get(name as usize..)?.strip_prefix(wanted)?;
            let section = u16::from_le_bytes([s[6], s[7]]);
            (section != 0 && rest.first().is_none_or(|end| *end == 0))
                .then(|| u64::from_le_bytes(s[8..16].try_into().expect("eight bytes")))
        })
    }

    /// Name, address and size of each symbol that is defined here (`Elf64_Sym`, System V ABI, chapter 4).
    fn iter(&self) -> impl Iterator<Item = (&[u8], u64, u64)> {
        self.table.chunks_exact(24).take(MAX_SYMBOLS).filter_map(|s| {
            let word = |at: usize| u64::from_le_bytes(s[at..at + 8].try_into().expect("eight bytes"));
            let name = u32::from_le_bytes(s[..4].try_into().expect("four bytes"));
            let section = u16::from_le_bytes([s[6], s[7]]);
            let name = self.strings.get(name as usize..)?.split(|c| *c == 0).next()?;
            (section != 0).then_some((name, word(8), word(16)))
        })
    }
}

/// What the unwinder asks of a file.
pub struct ModuleSections(pub Arc<Module>);

impl Sections for ModuleSections {
    fn section(&mut self, name: &str) -> Option<Section> {
        self.0.section(name)
    }

    fn functions(&mut self) -> Vec<(u64, u64)> {
        self.0
            .elf(|e| {
                let code: Vec<_> = e
                    .sections()
                    .filter(|s| s.kind() == SectionKind::Text)
                    .map(|s| s.address()..s.address().saturating_add(s.size()))
                    .collect();
                let mut all: Vec<(u64, u64)> = e
                    .symbols()
                    .chain(e.dynamic_symbols())
                    .take(MAX_SYMBOLS)
                    // hand-written assembler often leaves the type out
                    .filter(|s| matches!(s.kind(), SymbolKind::Text | SymbolKind::Unknown) && s.is_definition())
                    .filter(|s| code.iter().any(|c| c.contains(&s.address())))
                    .map(|s| (s.address(), s.size()))
                    .collect();
                all.sort();
                // of several symbols at one address, the one with the largest size
                all.reverse();
                all.dedup_by_key(|s| s.0);
                all.reverse();
                all
            })
            .unwrap_or_default()
    }

    fn code(&mut self, svma: u64) -> Option<Section> {
        self.0
            .elf(|e| {
                let s = e
                    .sections()
                    .find(|s| s.kind() == SectionKind::Text && svma >= s.address() && svma - s.address() < s.size())?;
                (s.size() <= MAX_SECTION).then_some(())?;
                Some(Section {
                    svma: s.address(),
                    bytes: s.data().ok()?.to_vec(),
                })
            })
            .flatten()
    }
}

/// A file and what tells it apart.
type OpenedFile = (Content, FileKey);

/// All files of all processes, by device and inode.
pub struct Modules {
    all: Vec<Arc<Module>>,
    by_file: FxHashMap<FileKey, ModuleId>,
    by_name: FxHashMap<Vec<u8>, ModuleId>,
    roots: Known,
    /// Files opened ahead of their events, by process, start and path.
    ahead: FxHashMap<(Pid, u64, Vec<u8>), Option<OpenedFile>>,
    /// Files that are open, and the most that may be.
    open: usize,
    max_open: usize,
}

impl Default for Modules {
    fn default() -> Modules {
        Modules {
            all: Vec::new(),
            by_file: FxHashMap::default(),
            by_name: FxHashMap::default(),
            roots: Known::default(),
            ahead: FxHashMap::default(),
            open: 0,
            // The rest is for events, rings, root directories, perf maps and what is written.
            max_open: sys::file_limit() / 2,
        }
    }
}

/// Files opened ahead of their events that are kept; those of one batch of events are.
const MAX_AHEAD: usize = 4096;

impl Modules {
    /// The files of a process as it sees them; `None` if that cannot be had.
    pub fn root(&mut self, host: &dyn Host, pid: Pid) -> Option<Arc<Root>> {
        let mut root = host.root(pid).filter(|root| !root.is_ours)?;
        root.share(&mut self.roots);
        Some(Arc::new(root))
    }

    pub fn get(&self, id: ModuleId) -> &Arc<Module> {
        &self.all[id.0 as usize]
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Closes what was opened for a batch of events and not needed.
    pub fn forget_ahead(&mut self) {
        self.ahead.clear();
    }

    /// Opens the file of a mapping whose event is about to be taken in: the process may end before that.
    pub fn open_ahead(&mut self, host: &dyn Host, pid: Pid, start: u64, end: u64, path: &[u8], root: Option<&Root>) {
        let key = (pid, start, path.to_vec());
        let room = self.max_open.saturating_sub(self.open).min(MAX_AHEAD);
        if self.ahead.len() < room && !self.ahead.contains_key(&key) {
            self.ahead.insert(key, host.open(pid, start, end, path, root));
        }
    }

    /// The file mapped at `start..end` of a process, and whether it is new. `root` is that of the process, if we know.
    pub fn open(
        &mut self,
        host: &dyn Host,
        pid: Pid,
        start: u64,
        end: u64,
        path: &[u8],
        root: Option<&Root>,
    ) -> (ModuleId, bool) {
        if path == b"[vdso]" {
            if let Some(id) = self.by_name.get(path) {
                return (*id, false);
            }
            let len = end.saturating_sub(start).min(1 << 20) as usize;
            let mut bytes = vec![0; len];
            let got = host.read_memory(pid, start, &mut bytes);
            bytes.truncate(got);
            let id = self.add(Module::new(path.to_vec(), Content::Bytes(Arc::new(bytes.into()))));
            self.by_name.insert(path.to_vec(), id);
            return (id, true);
        }
        let ahead = self.ahead.remove(&(pid, start, path.to_vec()));
        match ahead.unwrap_or_else(|| host.open(pid, start, end, path, root)) {
            Some((content, key)) => {
                if let Some(id) = self.by_file.get(&key) {
                    return (*id, false);
                }
                let module = if self.open < self.max_open {
                    Module::new(path.to_vec(), content)
                } else {
                    let why = format!(
                        "{} files are open already, the most that are kept (ulimit -n)",
                        self.open
                    );
                    Module::missing(path.to_vec(), Some(why))
                };
                self.open += usize::from(matches!(module.content, Content::File(_)));
                let id = self.add(module);
                self.by_file.insert(key, id);
                (id, true)
            }
            None => match self.by_name.get(path) {
                Some(id) => (*id, false),
                None => {
                    let id = self.add(Module::missing(path.to_vec(), None));
                    self.by_name.insert(path.to_vec(), id);
                    (id, true)
                }
            },
        }
    }

    /// A number for code that a process registered with debuggers: it is in no file, but has tables of its own.
    pub fn add_registered(&mut self) -> ModuleId {
        self.add(Module {
            is_file: false,
            ..Module::missing(b"[registered code]".to_vec(), None)
        })
    }

    fn add(&mut self, module: Module) -> ModuleId {
        self.all.push(Arc::new(module));
        ModuleId(self.all.len() as u32 - 1)
    }
}

#[cfg(test)]
mod tests;
