//! JIT code of processes: what names and describes it is read while they run.
//!
//! Names come from perf maps, which are opened here and read at the end, and from objects registered with debuggers
//! (`process::jit`), which are copied here. The latter also contain unwind tables.

use std::hash::BuildHasher;
use std::sync::Arc;

use rustc_hash::{FxBuildHasher, FxHashMap, FxHashSet};
use symbolize::JitObject;

use super::RESCAN_INTERVAL;
use super::files::Files;
use super::process::Process;
use crate::event::Pid;
use crate::frame::{ModuleId, NativeFrame};
use crate::process::AddressSpace;
use crate::process::jit::{DESCRIPTOR, Registered, registered};
use crate::process::memory::Memory;
use crate::process::modules::Modules;
use crate::process::system::{ProcessMemory, System};
use crate::resolve::JitSources;
use crate::unwind::{CodeSection, Sections};

/// Maximum total size of the copies of registered objects and their unwind tables, bytes.
const MAX_BYTES: usize = 256 << 20;
/// Maximum size of one object, and of one table, bytes.
const MAX_OBJECT: u64 = 16 << 20;
/// Bytes at an object's end that distinguish it from another one at the same address.
const END: u64 = 1024;
/// Maximum number of registered objects, over all processes.
const MAX_OBJECTS: usize = 1 << 16;
/// Part of both that one process of a host may have.
const SHARE: usize = 4;
/// Minimum time between two scans per entry of the lists, ns of the samples' clock: about ten times what reading an
/// entry takes.
const RESCAN_INTERVAL_PER_ENTRY: u64 = 20_000;

/// What is known of the JIT code of one process.
#[derive(Clone, Default)]
pub(super) struct Jit {
    /// Time of the next scan at the earliest, on the samples' clock.
    next: u64,
    /// Entries of its lists at the last scan.
    listed: FxHashMap<Registered, Listed>,
    /// All objects that were ever in the lists, in order, with the bytes that were copied for them.
    objects: Vec<(Arc<JitObject>, usize)>,
    /// Samples contain code of the process that is in no file.
    pub(super) is_sampled: bool,
}

impl Jit {
    /// Modules with the tables of listed code, also of code that overlaps other code.
    pub(super) fn modules(&self) -> impl Iterator<Item = ModuleId> + '_ {
        let ranges = self.listed.values().flat_map(|listed| &listed.ranges);
        ranges.map(|(_, _, id)| *id)
    }

    /// Forgets objects that are in the lists no more: no sample has their code.
    pub(super) fn forget_ended(&mut self) {
        let listed: FxHashSet<usize> = self.listed.values().filter_map(|listed| listed.object).collect();
        self.objects.retain(|(object, _)| listed.contains(&number_of(object)));
        self.is_sampled = false;
    }

    /// What names the code; `space` has the mappings of its process, which was forked from `parent`.
    pub(super) fn sources(&self, space: &AddressSpace, parent: Option<Pid>) -> JitSources {
        JitSources {
            dumps: space.jitdumps.clone(),
            objects: self.objects.iter().map(|(object, _)| object.clone()).collect(),
            regions: space.regions().to_vec(),
            parent,
        }
    }
}

/// The object of an entry of a list.
#[derive(Clone, Default)]
struct Listed {
    /// Hash of the last bytes of the object, usually its section headers, which contain the addresses of its code: an
    /// entry may have been freed and allocated again at the same address.
    end: u64,
    /// Ranges of the code, and the module with their tables.
    ranges: Vec<(u64, u64, ModuleId)>,
    /// As [`number_of`] the object, if it could be read.
    object: Option<usize>,
}

/// What tells an object from all others as long as it is kept.
fn number_of(object: &Arc<JitObject>) -> usize {
    Arc::as_ptr(object) as usize
}

/// State shared by the processes of a session.
#[derive(Default)]
pub(super) struct JitShared {
    /// svma of the descriptor in each file, if it has one.
    descriptors: FxHashMap<ModuleId, Option<u64>>,
    bytes: usize,
    objects: usize,
    /// The processes are of a whole host: each has a part.
    is_of_host: bool,
}

impl JitShared {
    pub(super) fn new(is_of_host: bool) -> JitShared {
        JitShared {
            is_of_host,
            ..JitShared::default()
        }
    }

    /// One process may have one in so many of the objects and bytes.
    fn share(&self) -> usize {
        if self.is_of_host { SHARE } else { 1 }
    }

    /// Counts the objects again that processes still have; forked ones share some.
    pub(super) fn count<'a>(&mut self, processes: impl Iterator<Item = &'a Jit>) {
        let objects = processes.flat_map(|jit| &jit.objects);
        let all: FxHashMap<usize, usize> = objects.map(|(object, bytes)| (number_of(object), *bytes)).collect();
        (self.objects, self.bytes) = (all.len(), all.values().sum());
    }

    /// Number of objects.
    pub(super) fn len(&self) -> usize {
        self.objects
    }

    /// Drops what is known of files that are closed.
    pub(super) fn forget_files(&mut self, closed: &FxHashSet<ModuleId>) {
        self.descriptors.retain(|id, _| !closed.contains(id));
    }

    /// Marks frames in registered code as being in no file, as all stages except the unwinder expect.
    pub(super) fn skip(&self, modules: &Modules, native: &mut [NativeFrame]) {
        if self.objects == 0 {
            return;
        }
        for f in native {
            if f.location.is_some_and(|(id, _)| !modules.get(id).is_file) {
                f.location = None;
            }
        }
    }

    /// Copies memory of a process, within the limits.
    fn copy(&mut self, system: &dyn System, pid: Pid, avma: u64, size: u64) -> Option<Vec<u8>> {
        let len = usize::try_from(size).ok().filter(|_| size <= MAX_OBJECT)?;
        let left = MAX_BYTES.checked_sub(self.bytes)?;
        if len > left {
            return None;
        }
        let mut bytes = vec![0; len];
        let got = system.read_memory(pid, avma, &mut bytes);
        self.bytes += got;
        (got == len).then_some(bytes)
    }

    /// Addresses of the descriptors of a process (avma).
    fn descriptors(&mut self, process: &AddressSpace, symbol: impl Fn(ModuleId) -> Option<u64>) -> Vec<u64> {
        let files: FxHashSet<_> = process.code().iter().filter_map(|c| c.file).collect();
        let known = &mut self.descriptors;
        let all = files.into_iter().filter_map(|(id, bias)| {
            let svma = *known.entry(id).or_insert_with(|| symbol(id));
            Some(svma?.wrapping_add(bias))
        });
        let mut all: Vec<u64> = all.collect();
        // Mappings of one file usually have one bias.
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// Copies of what the unwinder needs of a registered object, from the process's memory.
struct JitCopy {
    /// Need not have an entry for every function: LLVM leaves out those that cannot throw.
    eh_frame: Option<CodeSection>,
    code: Vec<CodeSection>,
    functions: Vec<(u64, u64)>,
}

impl Sections for JitCopy {
    fn section(&mut self, name: &str) -> Option<CodeSection> {
        self.eh_frame.take_if(|_| name == ".eh_frame")
    }

    fn functions(&mut self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.functions)
    }

    fn code(&mut self, svma: u64) -> Option<CodeSection> {
        let found = self.code.iter().position(|s| s.contains(svma))?;
        Some(self.code.swap_remove(found))
    }
}

fn sorted(functions: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut all: Vec<_> = functions.collect();
    all.sort_unstable();
    all
}

fn end_of(memory: &dyn Memory, entry: &Registered) -> u64 {
    let len = entry.size.min(END);
    let mut end = vec![0; len as usize];
    let at = entry.object.checked_add(entry.size - len);
    if !at.is_some_and(|at| memory.read(at, &mut end)) {
        end.clear();
    }
    FxBuildHasher.hash_one(end)
}

impl Process {
    /// Scans for what names the JIT code, unless that was done shortly before `time` (samples' clock).
    pub(super) fn scan_jit_code(&mut self, files: &mut Files, time: Option<u64>) {
        let (pid, known) = (self.space.pid, &mut self.jit);
        if self.space.regions().is_empty() || time.is_some_and(|time| time < known.next) {
            return;
        }
        if let Some(root) = &self.space.root {
            files.open.open_perf_map(pid, root);
        }
        let modules = &files.modules;
        let symbol = |id: ModuleId| modules.get(id).symbol(DESCRIPTOR);
        let descriptors = files.jit.descriptors(&self.space, symbol);
        let system = files.system.clone();
        let memory = ProcessMemory(&*system, pid);
        let entries: Vec<_> = descriptors.iter().flat_map(|at| registered(&memory, *at)).collect();
        let pause = RESCAN_INTERVAL.max(RESCAN_INTERVAL_PER_ENTRY * entries.len() as u64);
        known.next = time.map_or(known.next, |time| time.saturating_add(pause));
        let before = std::mem::take(&mut known.listed);
        let mut changed = entries.is_empty() && !before.is_empty() && !system.threads(pid).is_empty();
        if entries.is_empty() && !changed {
            known.listed = before; // it has ended, and its list with it
            return;
        }
        changed |= before.len() != entries.len();
        let mut own_bytes: usize = known.objects.iter().map(|(_, bytes)| bytes).sum();
        for entry in entries {
            let end = end_of(&memory, &entry);
            if let Some(listed) = before.get(&entry).filter(|listed| listed.end == end) {
                known.listed.insert(entry, listed.clone());
                continue;
            }
            changed = true;
            let shared = &mut files.jit;
            let full = shared.objects >= MAX_OBJECTS || known.objects.len() >= MAX_OBJECTS / shared.share();
            let full = full || own_bytes >= MAX_BYTES / shared.share();
            let copied_before = shared.bytes;
            let bytes = (!full).then(|| shared.copy(&*system, pid, entry.object, entry.size));
            let listed = known
                .listed
                .entry(entry)
                .insert_entry(Listed {
                    end,
                    ..Listed::default()
                })
                .into_mut();
            let Some(object) = bytes.flatten().and_then(|bytes| JitObject::parse(bytes).ok()) else {
                continue;
            };
            let mut copy = |svma, size| {
                let bytes = shared.copy(&*system, pid, svma, size)?;
                Some(CodeSection { svma, bytes })
            };
            let code = object.code.iter().map(|(start, end)| (*start, end - start));
            let copied = JitCopy {
                eh_frame: object.eh_frame.and_then(|(svma, size)| copy(svma, size)),
                code: code.filter_map(|(start, size)| copy(start, size)).collect(),
                functions: sorted(object.functions()),
            };
            shared.objects += 1;
            let copied_bytes = shared.bytes - copied_before;
            own_bytes += copied_bytes;
            let id = files.modules.add_registered();
            files.unwinder.add(id, Box::new(copied));
            let code = object.code.iter();
            listed.ranges = code.map(|(start, end)| (*start, *end, id)).collect();
            let object = Arc::new(object);
            listed.object = Some(number_of(&object));
            known.objects.push((object, copied_bytes));
        }
        if changed {
            let ranges = known.listed.values().flat_map(|listed| &listed.ranges);
            self.space.set_registered(ranges.copied().collect());
        }
    }
}
