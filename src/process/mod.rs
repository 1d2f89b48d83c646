//! Live processes: what is mapped where, their threads, their memory.
//!
//! Does not depend on capture backends or Python.

use std::sync::Arc;

use rustc_hash::FxHashSet;

use crate::code_map::CodeMap;
use crate::error::Result;
use crate::event::{MappedFile, Pid};
use crate::frame::ModuleId;

mod code_copies;
pub mod command;
pub mod file_content;
pub mod jit;
pub mod landmarks;
pub mod launch;
pub mod machine;
pub mod maps;
pub mod memory;
pub mod modules;
pub mod probes;
pub mod python_command;
pub mod rerun;
pub mod root;
pub mod smaps;
pub mod snapshot;
pub mod system;
pub mod thread_context;

use code_copies::CodeCopies;
use modules::{Modules, VDSO};
use root::Root;
use system::System;

/// Executable memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeRange {
    pub start: u64,
    pub end: u64,
    /// File and load bias; `None` for anonymous memory.
    pub file: Option<(ModuleId, u64)>,
}

/// Executable memory that is not code of an ELF file: adjacent mappings joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// avma of the first byte, and of the one after the last.
    pub start: u64,
    pub end: u64,
    /// The file that is mapped there, if it is of another kind (.NET's assemblies).
    pub file: Option<ModuleId>,
}

/// Mappings of one process, kept up to date by events.
#[derive(Debug)]
pub struct AddressSpace {
    pub pid: Pid,
    /// Sorted by address, not overlapping.
    code: Vec<CodeRange>,
    /// Changes whenever `code` does.
    pub generation: u64,
    /// avma just past the main thread's frames; 0 if unknown.
    pub stack_end: u64,
    /// Its file system as the process sees it.
    pub root: Option<Arc<Root>>,
    /// The jitdump files that it has mapped at some time.
    pub jitdumps: Vec<ModuleId>,
    /// Executable memory that is not code of an ELF file, in order of appearance.
    regions: Vec<Region>,
    /// Code in it that has its own unwind tables: start, end and module of the tables. Sorted, not overlapping.
    registered: Vec<(u64, u64, ModuleId)>,
    /// Anonymous memory in which a file's code may be.
    copies: CodeCopies,
    /// Files that it has mapped at some time: stacks that are still remembered may lead to them.
    files: FxHashSet<ModuleId>,
}

/// Typical maximum size of a program's arguments and environment, bytes.
const ARGUMENTS: u64 = 64 << 10;
/// Maximum number of jitdump files recorded per process.
const MAX_JITDUMPS: usize = 16;
/// Maximum number of ranges of executable memory of a process: as many mappings as the kernel allows by default
/// (DEFAULT_MAX_MAP_COUNT, include/linux/mm.h, Linux 6.18).
const MAX_RANGES: usize = 65_530;
/// Maximum number of regions of anonymous code that are distinguished per process.
const MAX_REGIONS: usize = 4096;

/// Code mappings below an address that are examined for the file which has the address in its data. Some programs have their
/// code in pieces.
const MAX_NEAREST: usize = 64;

/// Whether the path of a mapping may be that of a file. `//anon` is the name of anonymous memory in perf events.
pub fn is_file_path(path: &[u8]) -> bool {
    path.starts_with(b"/") && path != b"//anon"
}

impl AddressSpace {
    /// Reads the current mappings. Calls `new_module` for files that were not seen before.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    pub fn open(
        system: &dyn System,
        pid: Pid,
        modules: &mut Modules,
        new_module: &mut dyn FnMut(ModuleId),
    ) -> Result<AddressSpace> {
        let text = system.maps(pid)?;
        let mut p = AddressSpace {
            stack_end: system.stack_end(pid),
            root: modules.root(system, pid),
            ..AddressSpace::exited(pid)
        };
        for m in maps::parse(&text) {
            if m.executable {
                let known = modules.mapped(system, m.device, m.inode, &m.path);
                let opened = known
                    .map(|id| (id, false))
                    .or_else(|| p.open_file(system, m.start, m.end, &m.path, modules));
                p.map_opened(m.start, m.end, m.offset, &m.path, opened, modules, new_module);
            }
        }
        Ok(p)
    }

    /// Reads `stack_end` again for a stack that could not be unwound beyond a frame near it: if the process was opened
    /// during its `exec`, the kernel had not yet put its arguments there, or not even set it. True if it has changed.
    pub fn refresh_stack_end(&mut self, system: &dyn System, sp: u64) -> bool {
        if self.stack_end != 0 && !(1..=ARGUMENTS).contains(&sp.abs_diff(self.stack_end)) {
            return false;
        }
        let now = system.stack_end(self.pid);
        let other = now != 0 && now != self.stack_end;
        if other {
            self.stack_end = now;
        }
        other
    }

    /// A process that exited before it could be read.
    pub fn exited(pid: Pid) -> AddressSpace {
        AddressSpace {
            pid,
            code: Vec::new(),
            generation: 0,
            stack_end: 0,
            root: None,
            jitdumps: Vec::new(),
            regions: Vec::new(),
            registered: Vec::new(),
            copies: CodeCopies::default(),
            files: FxHashSet::default(),
        }
    }

    /// A child right after `fork`, with the same memory.
    pub fn clone_for_child(&self, pid: Pid) -> AddressSpace {
        AddressSpace {
            pid,
            code: self.code.clone(),
            generation: self.generation,
            stack_end: self.stack_end,
            root: self.root.clone(),
            jitdumps: self.jitdumps.clone(),
            regions: self.regions.clone(),
            registered: self.registered.clone(),
            copies: self.copies.clone(),
            files: self.files.clone(),
        }
    }

    /// Adds executable memory, replacing what was mapped there before.
    #[allow(clippy::too_many_arguments)] // one argument per field of the mmap event
    pub fn map(
        &mut self,
        system: &dyn System,
        start: u64,
        end: u64,
        offset: u64,
        path: &[u8],
        modules: &mut Modules,
        new_module: &mut dyn FnMut(ModuleId),
    ) {
        if start < end {
            let opened = self.open_file(system, start, end, path, modules);
            self.map_opened(start, end, offset, path, opened, modules, new_module);
        }
    }

    /// Adds executable memory that a process had mapped which has exited: nothing is opened for it.
    pub fn map_ended(&mut self, system: &dyn System, m: &MappedFile, modules: &mut Modules) {
        let is_file = is_file_path(&m.path) || m.path == VDSO;
        let opened = is_file.then(|| modules.of_ended(system, m)).flatten();
        if m.start < m.end && (opened.is_some() || m.path != VDSO) {
            self.map_opened(m.start, m.end, m.offset, &m.path, opened, modules, &mut |_| {});
        }
    }

    /// The file of a mapping, and whether it is new.
    fn open_file(
        &self,
        system: &dyn System,
        start: u64,
        end: u64,
        path: &[u8],
        modules: &mut Modules,
    ) -> Option<(ModuleId, bool)> {
        let is_file = is_file_path(path);
        let refused = is_file.then(|| modules.refused(self.files.len(), path)).flatten();
        if refused.is_some() {
            return refused;
        }
        (is_file || path == VDSO).then(|| modules.open(system, self.pid, start, end, path, self.root.as_deref()))
    }

    #[allow(clippy::too_many_arguments)] // as `map`
    fn map_opened(
        &mut self,
        start: u64,
        end: u64,
        offset: u64,
        path: &[u8],
        opened: Option<(ModuleId, bool)>,
        modules: &Modules,
        new_module: &mut dyn FnMut(ModuleId),
    ) {
        let before = self.file_for(start, end, modules);
        self.unmap(start, end);
        let mut file = None;
        self.files.extend(opened.map(|(id, _)| id));
        if let Some((id, new)) = opened.filter(|(id, _)| modules.get(*id).is_file) {
            if new {
                new_module(id);
            }
            let module = modules.get(id);
            if let Some(root) = &self.root {
                module.root.get_or_init(|| root.clone());
            }
            if module.is_jitdump() && !self.jitdumps.contains(&id) && self.jitdumps.len() < MAX_JITDUMPS {
                self.jitdumps.push(id);
            }
            // Without segments (an unreadable file), offsets replace addresses.
            let is_known = |bias| self.code.iter().any(|c| c.file == Some((id, bias)));
            let bias = module
                .bias(start, end, offset, is_known)
                .unwrap_or_else(|| start.wrapping_sub(offset));
            file = Some((id, bias));
        } else if path != b"[vsyscall]" {
            // [vsyscall] is the same in all processes, and seen only where mappings are read from a list.
            let other = opened.map(|(id, _)| id);
            let other = other.filter(|id| modules.get(*id).has_file_name());
            self.add_region(start, end, other);
            if let Some(before) = before.filter(|_| other.is_none()) {
                self.copies.add(start, end, before);
            }
        }
        let at = self.code.partition_point(|c| c.start < start);
        if self.code.len() < MAX_RANGES {
            self.code.insert(at, CodeRange { start, end, file });
        }
        self.generation += 1;
    }

    /// The file, and its load bias, whose code should be at these addresses: that of the mapping there, or of the one
    /// below.
    fn file_for(&self, start: u64, end: u64, modules: &Modules) -> Option<(ModuleId, u64)> {
        if let Some(file) = self.copies.file_for(start, end) {
            return Some(file);
        }
        let below = self.code.partition_point(|c| c.start <= start);
        let (id, bias) = self.code.get(below.checked_sub(1)?)?.file?;
        modules.get(id).has_code(bias, start, end).then_some((id, bias))
    }

    /// Whether some anonymous memory is not yet compared with the file whose code should be there.
    pub fn has_copies(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Compares anonymous memory with the file whose code should be there. What is the same belongs to the file.
    pub fn compare_copies(&mut self, system: &dyn System, modules: &Modules) {
        for copy in self.copies.compare(system, self.pid, modules) {
            for c in self
                .code
                .iter_mut()
                .filter(|c| copy.start <= c.start && c.end <= copy.end)
            {
                c.file = Some(copy.file);
            }
            self.regions.retain(|r| r.start < copy.start || copy.end < r.end);
            self.generation += 1;
        }
    }

    /// Adds a mapping of anonymous code. Adjacent or overlapping mappings form one region: programs that generate code
    /// change the protection of its pages piece by piece, and the kernel joins similar mappings.
    fn add_region(&mut self, start: u64, end: u64, file: Option<ModuleId>) {
        let full = self.regions.len() >= MAX_REGIONS;
        let touches = |r: &&mut Region| r.file == file && start <= r.end && r.start <= end;
        match self.regions.iter_mut().find(touches) {
            Some(region) => (region.start, region.end) = (region.start.min(start), region.end.max(end)),
            None if full => {}
            None => self.regions.push(Region { start, end, file }),
        }
    }

    /// Files that it has mapped at some time.
    pub fn files(&self) -> impl Iterator<Item = ModuleId> + '_ {
        self.files.iter().copied()
    }

    /// Whether there were so many ranges of executable memory that some may be missing.
    pub fn is_full(&self) -> bool {
        self.code.len() >= MAX_RANGES
    }

    /// Number of ranges of executable memory.
    pub fn ranges(&self) -> usize {
        self.code.len()
    }

    /// Forgets files that it has mapped no more, for when no stack is remembered. `text`, if given, is that of `/proc/PID/maps`:
    /// what is not in it is not mapped.
    pub fn forget_unmapped(&mut self, text: Option<&[u8]>) {
        if let Some(text) = text {
            let mut mapped: Vec<(u64, u64)> = Vec::new();
            for m in maps::parse(text).iter().filter(|m| m.executable) {
                match mapped.last_mut().filter(|(_, end)| *end == m.start) {
                    Some((_, end)) => *end = m.end,
                    None => mapped.push((m.start, m.end)),
                }
            }
            let is_mapped = |start: u64, end: u64| {
                let at = mapped.partition_point(|(_, mapped_end)| *mapped_end <= start);
                mapped.get(at).is_some_and(|(mapped_start, _)| *mapped_start < end)
            };
            self.code.retain(|c| is_mapped(c.start, c.end));
            self.regions.retain(|r| is_mapped(r.start, r.end));
            self.generation += 1;
        }
        let code = self.code.iter().filter_map(|c| Some(c.file?.0));
        let regions = self.regions.iter().filter_map(|r| r.file);
        let registered = self.registered.iter().map(|(_, _, id)| *id);
        let jitdumps = self.jitdumps.iter().copied();
        self.files = code.chain(regions).chain(registered).chain(jitdumps).collect();
    }

    /// Executable memory that is not part of an ELF file, in order of appearance.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Replaces the ranges of anonymous code that have their own unwind tables, with the modules of the tables. Ranges
    /// that overlap an earlier one are left out.
    pub fn set_registered(&mut self, mut ranges: Vec<(u64, u64, ModuleId)>) {
        ranges.retain(|(start, end, _)| start < end);
        ranges.sort_by_key(|r| r.0);
        ranges.dedup_by(|next, before| next.0 < before.1);
        self.files.extend(ranges.iter().map(|(_, _, id)| *id));
        self.registered = ranges;
        self.generation += 1;
    }

    fn registered_at(&self, avma: u64) -> Option<ModuleId> {
        let i = self.registered.partition_point(|r| r.1 <= avma);
        self.registered.get(i).filter(|r| r.0 <= avma).map(|r| r.2)
    }

    fn unmap(&mut self, start: u64, end: u64) {
        self.copies.remove(start, end);
        let first = self.code.partition_point(|c| c.end <= start);
        let overlapping = self.code[first..].iter().take_while(|c| c.start < end).count();
        let outside = self.code[first..first + overlapping].iter().flat_map(|c| {
            let below = CodeRange { end: start, ..*c };
            let above = CodeRange { start: end, ..*c };
            [(c.start < start).then_some(below), (c.end > end).then_some(above)]
        });
        let outside: Vec<CodeRange> = outside.flatten().collect();
        self.code.splice(first..first + overlapping, outside);
    }

    pub fn code(&self) -> &[CodeRange] {
        &self.code
    }

    /// The file, and svma, whose variables include this address. Files are mapped with their code below their data.
    pub fn data_at(&self, modules: &Modules, avma: u64) -> Option<(ModuleId, u64)> {
        let below = self.code.partition_point(|c| c.start <= avma);
        let nearest = self.code[..below].iter().rev().take(MAX_NEAREST).filter_map(|c| c.file);
        let mut places = nearest.map(|(id, bias)| (id, avma.wrapping_sub(bias)));
        places.find(|(id, svma)| modules.get(*id).has_variable(*svma))
    }

    /// End of the executable memory without a file at `avma`; `avma` itself if there is none.
    pub fn anonymous_code_end(&self, avma: u64) -> u64 {
        let code = self.code_at(avma).filter(|code| code.file.is_none());
        code.map_or(avma, |code| code.end)
    }

    fn code_at(&self, avma: u64) -> Option<&CodeRange> {
        let i = self.code.partition_point(|c| c.end <= avma);
        self.code.get(i).filter(|c| c.start <= avma)
    }
}

impl CodeMap for AddressSpace {
    fn find(&self, avma: u64) -> Option<(ModuleId, u64)> {
        let code = self.code_at(avma)?;
        // Registered code is addressed by avma.
        code.file.or_else(|| Some((self.registered_at(avma)?, 0)))
    }

    fn is_code(&self, avma: u64) -> bool {
        self.code_at(avma).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapping_over_code_replaces_it() {
        let mut p = AddressSpace::exited(1);
        let (mut modules, mut new) = (Modules::default(), |_| {});
        let mut map =
            |p: &mut AddressSpace, start, end| p.map(&system::LiveSystem, start, end, 0, b"", &mut modules, &mut new);
        map(&mut p, 0x1000, 0x9000);
        map(&mut p, 0x3000, 0x5000);
        let ranges = |p: &AddressSpace| p.code().iter().map(|c| (c.start, c.end)).collect::<Vec<_>>();
        assert_eq!(ranges(&p), [(0x1000, 0x3000), (0x3000, 0x5000), (0x5000, 0x9000)]);
        map(&mut p, 0x2000, 0x6000);
        assert_eq!(ranges(&p), [(0x1000, 0x2000), (0x2000, 0x6000), (0x6000, 0x9000)]);
        assert!(p.is_code(0x8fff) && !p.is_code(0x9000) && !p.is_code(0xfff));
        map(&mut p, 0, 0x10000);
        assert_eq!(ranges(&p), [(0, 0x10000)]);
    }

    #[test]
    fn code_that_was_copied_to_anonymous_memory_keeps_its_file() {
        let system = system::LiveSystem;
        let pid = std::process::id();
        let text = system.maps(pid).expect("our own");
        let here = code_that_was_copied_to_anonymous_memory_keeps_its_file as *const () as u64;
        let code = maps::find(&text, here).expect("this code");
        assert!(code.end - code.start > 0x4000);
        let (start, end) = (code.start + 0x1000, code.end - 0x2000);
        let mut modules = Modules::default();
        let map = |p: &mut AddressSpace, modules: &mut Modules, start, end, path: &[u8]| {
            p.map(&system, start, end, code.offset, path, modules, &mut |_| {});
        };
        // As the program has it, and as it would be a page further.
        for (shift, expected) in [(0, true), (0x1000, false)] {
            let mut p = AddressSpace::exited(pid);
            map(&mut p, &mut modules, code.start + shift, code.end + shift, &code.path);
            let file = p.find(start);
            assert!(file.is_some());
            map(&mut p, &mut modules, start, end, b"//anon");
            map(&mut p, &mut modules, start, end, b"//anon"); // its protection changes
            assert!(p.has_copies() && p.is_code(start) && p.find(start).is_none());
            let before = p.generation;
            p.compare_copies(&system, &modules);
            let found = [start, end - 1].map(|at| p.find(at) == file);
            assert_eq!(found, [expected; 2], "shifted by {shift:#x}");
            assert_eq!((p.has_copies(), p.generation > before), (!expected, expected));
            assert_eq!(p.regions().len(), usize::from(!expected));
            map(&mut p, &mut modules, start, end, b"");
            assert_eq!(p.find(start), None);
        }
    }

    #[test]
    fn code_without_a_file_keeps_its_region() {
        let mut p = AddressSpace::exited(1);
        let (mut modules, mut new) = (Modules::default(), |_| {});
        let mut map = |p: &mut AddressSpace, start, end| {
            p.map(&system::LiveSystem, start, end, 0, b"//anon", &mut modules, &mut new)
        };
        map(&mut p, 0x9000, 0xa000);
        map(&mut p, 0x1000, 0x3000);
        // The same mapping again, one that continues it, and one around both.
        map(&mut p, 0x9000, 0xa000);
        map(&mut p, 0x3000, 0x4000);
        map(&mut p, 0x1000, 0x5000);
        let regions: Vec<_> = p.regions().iter().map(|r| (r.start, r.end, r.file)).collect();
        assert_eq!(regions, [(0x9000, 0xa000, None), (0x1000, 0x5000, None)]);

        // A file other than an ELF file is identified by its name; memory that looks like a file is not.
        let file = std::env::temp_dir().join(format!("nativeprof-region-{}.dll", std::process::id()));
        std::fs::write(&file, "MZ").expect("written");
        p.pid = std::process::id();
        let mut named = |path: &[u8], start| {
            p.map(
                &system::LiveSystem,
                start,
                start + 0x1000,
                0,
                path,
                &mut modules,
                &mut new,
            );
            let region = p.regions.last().copied();
            region.and_then(|r| Some((r.start, modules.get(r.file?).name())))
        };
        assert_eq!(named(b"/memfd:doublemapper (deleted)", 0x2_0000), None);
        let found = named(file.as_os_str().as_encoded_bytes(), 0x2_1000);
        let name = file.file_name().expect("a name").to_string_lossy().into_owned();
        assert_eq!(found, Some((0x2_1000, name)));
        std::fs::remove_file(file).expect("removed");

        let id = ModuleId(7);
        p.set_registered(vec![
            (0x2000, 0x2800, id),
            (0x2400, 0x3000, id),
            (0x1000, 0x1000, id),
            (0x7000, 0x7100, id),
        ]);
        for (at, expected) in [
            (0x1fff, None),
            (0x2000, Some((id, 0))),
            (0x27ff, Some((id, 0))),
            (0x2800, None),
            (0x7000, None), // nothing is mapped there
        ] {
            assert_eq!(p.find(at), expected, "{at:#x}");
        }
    }
}
