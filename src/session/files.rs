//! Files of all processes and what has been read of them: unwind rules, code objects, interpreters, and what names them later.

use std::cell::{Cell, OnceCell};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::jit::JitShared;
use crate::cpython::code_object::CodeTable;
use crate::cpython::{self, Runtime};
use crate::cpython_layout::ThreadDescriptor;
use crate::event::Pid;
use crate::frame::{ModuleId, RawFrame};
use crate::process::modules::{ModuleSections, Modules};
use crate::process::probes::FileProbe;
use crate::process::system::System;
use crate::process::{AddressSpace, command, landmarks, probes};
use crate::resolve::OpenFiles;
use crate::unwind::Unwinder;

/// Python and C library parts of a file: searched once, since some files have very many symbols.
struct ModuleInfo {
    /// The interpreter in it.
    runtime: Option<Arc<Runtime>>,
    /// How the C library finds thread-specific values; not searched yet in most files.
    descriptor: OnceCell<Option<ThreadDescriptor>>,
    /// Where allocations are published; not searched where that is not wanted.
    probes: OnceCell<Vec<FileProbe>>,
}

/// The system, and what has been read from it for all processes together.
pub struct Files {
    pub(super) system: Rc<dyn System>,
    pub(super) modules: Modules,
    info: FxHashMap<ModuleId, ModuleInfo>,
    pub(super) unwinder: Unwinder,
    pub(super) codes: CodeTable,
    pub(super) jit: JitShared,
    /// Files that naming reads.
    pub(super) open: OpenFiles,
    usage: FileUsage,
    /// Probes for allocations whose arguments have forms that are not known.
    pub(super) unknown_probes: Cell<usize>,
}

/// Which files are still of use, as of the last searches for those that are not.
#[derive(Default)]
struct FileUsage {
    /// The search that found it in use last, or the first after it was opened.
    last_used: FxHashMap<ModuleId, u32>,
    searches: u32,
    /// Files so far at the last search.
    added: u32,
}

/// Files opened since the last search for unused ones from which on there is another one.
const FILES_PER_SEARCH: u32 = 256;
/// Unused files that stay open, and searches after which one does not: a program that runs again is not read again, but the file
/// system of a container that has ended is in use as long as its files are open.
const MAX_UNUSED: usize = 256;
const UNUSED_SEARCHES: u32 = 60;

impl Files {
    /// `is_of_host`: of many processes, of which each has a part of what is bounded.
    pub(super) fn new(system: Rc<dyn System>, is_of_host: bool) -> Files {
        let (codes, modules) = if is_of_host {
            (CodeTable::of_many_processes(), Modules::of_many_processes())
        } else {
            (CodeTable::default(), Modules::default())
        };
        Files {
            system,
            modules,
            info: FxHashMap::default(),
            unwinder: Unwinder::default(),
            codes,
            jit: JitShared::new(is_of_host),
            open: OpenFiles::default(),
            usage: FileUsage::default(),
            unknown_probes: Cell::new(0),
        }
    }

    /// Reads what a process maps now.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    pub(super) fn open_space(&mut self, pid: Pid) -> crate::error::Result<AddressSpace> {
        let mut new = Vec::new();
        let space = AddressSpace::open(&*self.system, pid, &mut self.modules, &mut |id| new.push(id))?;
        for id in new {
            self.add(id);
        }
        Ok(space)
    }

    /// Takes in a file that was mapped for the first time.
    pub(super) fn add(&mut self, id: ModuleId) {
        let module = self.modules.get(id);
        self.unwinder.add(id, Box::new(ModuleSections(module.clone())));
        let runtime = cpython::find_runtime(module);
        let mut landmarks = landmarks::find(module);
        landmarks.eval = runtime.as_ref().map_or(Vec::new(), |r| r.eval.clone());
        self.unwinder.add_landmarks(id, landmarks);
        let known = ModuleInfo {
            runtime: runtime.map(Arc::new),
            descriptor: OnceCell::new(),
            probes: OnceCell::new(),
        };
        self.info.insert(id, known);
    }

    /// Whether so many files were opened that unused ones are to be closed.
    pub(super) fn are_many_new(&self) -> bool {
        self.modules.added().wrapping_sub(self.usage.added) >= FILES_PER_SEARCH
    }

    /// Closes the files that are not `used`, but for those that were most recently, and drops what was read of them. Returns how
    /// many.
    pub(super) fn close_unused(&mut self, used: &FxHashSet<ModuleId>) -> usize {
        let FileUsage {
            last_used,
            searches,
            added,
        } = &mut self.usage;
        *searches = searches.wrapping_add(1);
        *added = self.modules.added();
        let mut unused = Vec::new();
        for id in self.modules.open_ones() {
            // New ones may be about to be mapped.
            let last = last_used.entry(id).or_insert(*searches);
            if used.contains(&id) {
                *last = *searches;
            } else {
                unused.push((*last, id));
            }
        }
        unused.sort_unstable();
        let many = unused.len().saturating_sub(MAX_UNUSED);
        let old = unused.partition_point(|(last, _)| searches.wrapping_sub(*last) > UNUSED_SEARCHES);
        let closed: FxHashSet<ModuleId> = unused.iter().take(many.max(old)).map(|(_, id)| *id).collect();
        if closed.is_empty() {
            return 0;
        }
        self.unwinder.remove(closed.iter().copied());
        for id in &closed {
            self.info.remove(id);
            last_used.remove(id);
        }
        self.jit.forget_files(&closed);
        self.modules.close(&closed);
        closed.len()
    }

    /// The interpreter in a file.
    pub(super) fn runtime(&self, id: ModuleId) -> Option<&Arc<Runtime>> {
        self.info.get(&id)?.runtime.as_ref()
    }

    /// How the C library in a file finds thread-specific values.
    pub(super) fn descriptor(&self, id: ModuleId) -> Option<ThreadDescriptor> {
        let info = self.info.get(&id)?;
        let search = || cpython::find_descriptor(self.modules.get(id));
        *info.descriptor.get_or_init(search)
    }

    /// Where the code of a file publishes allocations.
    pub(super) fn allocation_probes(&self, id: ModuleId) -> &[FileProbe] {
        let search = || {
            let (found, unknown) = probes::of_allocations(self.modules.get(id));
            self.unknown_probes.set(self.unknown_probes.get() + unknown);
            found
        };
        self.info.get(&id).map_or(&[], |info| info.probes.get_or_init(search))
    }

    /// Reads the files of an interpreter that a process is about to run. Later, it would run Python code before they are
    /// read, of which nothing would be known.
    pub(super) fn prepare(&mut self, pid: Pid, program: PathBuf) {
        let program = self.prepare_file(pid, program);
        let module = self.modules.get(program).clone();
        let names = module.libraries();
        let is_python = |name: &str| name.starts_with("libpython");
        if self.runtime(program).is_none() && !names.iter().any(|name| is_python(name)) {
            return;
        }
        // The C library holds the threads' variables.
        for name in names.iter().filter(|name| is_python(name) || name.starts_with("libc.")) {
            if let Some(path) = command::library(&module, name) {
                self.prepare_file(pid, path);
            }
        }
    }

    fn prepare_file(&mut self, pid: Pid, path: PathBuf) -> ModuleId {
        let (id, new) = self.modules.open(&*self.system, pid, 0, 0, &command::bytes(path), None);
        if new {
            self.add(id);
        }
        self.descriptor(id);
        id
    }

    /// Bytes of the names that a frame adds to the tree, if they are not in it yet.
    pub(super) fn name_bytes(&self, frame: &RawFrame) -> usize {
        match frame {
            RawFrame::Python { code, .. } => self.codes.get(*code).written_bytes(),
            _ => 0,
        }
    }
}
