//! Code that processes make while they run: what names and describes it is read while they live.
//!
//! Names come from perf maps, which are opened here and read at the end, and from objects registered with debuggers
//! (`process::jit`), which are copied here. These also bring unwind tables.

use std::hash::BuildHasher;
use std::sync::Arc;

use rustc_hash::{FxBuildHasher, FxHashMap, FxHashSet};
use symbolize::JitObject;

use super::{LOOK_AGAIN, Session};
use crate::process::host::{Host, MemoryOf};
use crate::process::jit::{DESCRIPTOR, Registered, registered};
use crate::process::memory::Memory;
use crate::process::modules::Modules;
use crate::process::{Process, is_file_path};
use crate::resolve::{JitPlaces, Owner};
use crate::sample::{Event, ModuleId, NativeFrame, Pid};
use crate::unwind::{Section, Sections, Unwinder};

use super::processes::Member;

/// Bytes of registered objects and of their unwind tables that are copied in all.
const MAX_BYTES: usize = 256 << 20;
/// Bytes of one object, and of one table.
const MAX_OBJECT: u64 = 16 << 20;
/// Bytes of an object's end that tell it from another one in its place.
const END: u64 = 1024;
/// Registered objects in all that are used.
const MAX_OBJECTS: usize = 1 << 16;
/// Least time between two looks at a list for each of its entries, ns of the samples' clock: some ten times what the
/// reading takes.
const LOOK_PER_ENTRY: u64 = 20_000;

/// What is known of the code that one process makes.
#[derive(Clone, Default)]
pub(super) struct Jit {
    /// When the next look may be, on the samples' clock.
    next: u64,
    /// Entries of its lists, as last seen.
    listed: FxHashMap<Registered, Listed>,
    /// All objects that were ever listed, in order.
    objects: Vec<Arc<JitObject>>,
}

/// What an entry of a list stands for.
#[derive(Clone, Default)]
struct Listed {
    /// Hash of the last bytes of the object, its section headers as a rule, which hold the addresses of its code: an entry that
    /// was freed may have been made again in the same place.
    end: u64,
    /// Ranges of the code and whose tables they have.
    ranges: Vec<(u64, u64, ModuleId)>,
}

/// What is shared by the processes of a session.
#[derive(Default)]
pub(super) struct JitShared {
    /// svma of the descriptor in each file, if it has one.
    descriptors: FxHashMap<ModuleId, Option<u64>>,
    bytes: usize,
    objects: usize,
}

impl JitShared {
    /// Makes frames in registered code what they are to everyone but the unwinder: in no file.
    pub(super) fn leave_out(&self, modules: &Modules, native: &mut [NativeFrame]) {
        if self.objects == 0 {
            return;
        }
        for f in native {
            if f.place.is_some_and(|(id, _)| !modules.get(id).is_file) {
                f.place = None;
            }
        }
    }

    /// Copies memory of a process, if that much is permitted.
    fn copy(&mut self, host: &dyn Host, pid: Pid, avma: u64, size: u64) -> Option<Vec<u8>> {
        let len = usize::try_from(size).ok().filter(|_| size <= MAX_OBJECT)?;
        let left = MAX_BYTES.checked_sub(self.bytes)?;
        if len > left {
            return None;
        }
        let mut bytes = vec![0; len];
        let got = host.read_memory(pid, avma, &mut bytes);
        self.bytes += got;
        (got == len).then_some(bytes)
    }

    /// Where the descriptors of a process are (avma).
    fn descriptors(&mut self, process: &Process, symbol: impl Fn(ModuleId) -> Option<u64>) -> Vec<u64> {
        let files: FxHashSet<_> = process.code().iter().filter_map(|c| c.file).collect();
        let known = &mut self.descriptors;
        let all = files.into_iter().filter_map(|(id, bias)| {
            let svma = *known.entry(id).or_insert_with(|| symbol(id));
            Some(svma?.wrapping_add(bias))
        });
        let mut all: Vec<u64> = all.collect();
        // Mappings of one file have one bias, as a rule.
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// What the unwinder needs of a registered object, as it is in the process's memory.
struct Copied {
    /// Not all functions need have an entry in it: LLVM leaves out those that cannot throw.
    eh_frame: Option<Section>,
    code: Vec<Section>,
    functions: Vec<(u64, u64)>,
}

impl Sections for Copied {
    fn section(&mut self, name: &str) -> Option<Section> {
        self.eh_frame.take_if(|_| name == ".eh_frame")
    }

    fn functions(&mut self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.functions)
    }

    fn code(&mut self, svma: u64) -> Option<Section> {
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

impl Session {
    /// Opens the files that these events speak of, before anything slower is done: the processes may be about to end.
    pub fn open_files(&mut self, events: &[Event]) {
        self.modules.forget_ahead();
        for event in events {
            let Event::Mmap {
                pid, start, end, path, ..
            } = event
            else {
                continue;
            };
            let Some(m) = self.members.get(pid) else { continue };
            let root = m.process.root.as_deref();
            if is_file_path(path) {
                self.modules.open_ahead(&*self.host, *pid, *start, *end, path, root);
            } else if let Some(root) = root {
                self.opened.open_perf_map(*pid, root);
            }
        }
    }

    /// Looks at what names the code that a process has made, unless it was looked a short while before `time` (samples'
    /// clock).
    pub(super) fn look_at_made_code(&mut self, pid: Pid, time: Option<u64>) {
        let Some(m) = self.members.get_mut(&pid) else { return };
        if m.process.regions().is_empty() || time.is_some_and(|time| time < m.jit.next) {
            return;
        }
        if let Some(root) = &m.process.root {
            self.opened.open_perf_map(pid, root);
        }
        let modules = &self.modules;
        let symbol = |id: ModuleId| modules.get(id).symbol(DESCRIPTOR);
        let descriptors = self.jit.descriptors(&m.process, symbol);
        let memory = MemoryOf(&*self.host, pid);
        let entries: Vec<_> = descriptors.iter().flat_map(|at| registered(&memory, *at)).collect();
        let pause = LOOK_AGAIN.max(LOOK_PER_ENTRY * entries.len() as u64);
        m.jit.next = time.map_or(m.jit.next, |time| time.saturating_add(pause));
        let before = std::mem::take(&mut m.jit.listed);
        let mut changed = entries.is_empty() && !before.is_empty() && !self.host.threads(pid).is_empty();
        if entries.is_empty() && !changed {
            m.jit.listed = before; // it has ended, and its list with it
            return;
        }
        changed |= before.len() != entries.len();
        for entry in entries {
            let end = end_of(&memory, &entry);
            if let Some(listed) = before.get(&entry).filter(|listed| listed.end == end) {
                m.jit.listed.insert(entry, listed.clone());
                continue;
            }
            changed = true;
            let full = self.jit.objects >= MAX_OBJECTS;
            let bytes = (!full).then(|| self.jit.copy(&*self.host, pid, entry.object, entry.size));
            let listed = m
                .jit
                .listed
                .entry(entry)
                .insert_entry(Listed {
                    end,
                    ranges: Vec::new(),
                })
                .into_mut();
            let Some(object) = bytes.flatten().and_then(|bytes| JitObject::parse(bytes).ok()) else {
                continue;
            };
            let mut copy = |svma, size| {
                let bytes = self.jit.copy(&*self.host, pid, svma, size)?;
                Some(Section { svma, bytes })
            };
            let code = object.code.iter().map(|(start, end)| (*start, end - start));
            let copied = Copied {
                eh_frame: object.eh_frame.and_then(|(svma, size)| copy(svma, size)),
                code: code.filter_map(|(start, size)| copy(start, size)).collect(),
                functions: sorted(object.functions()),
            };
            self.jit.objects += 1;
            let id = self.modules.add_registered();
            self.unwinder.add(id, Box::new(copied));
            let code = object.code.iter();
            listed.ranges = code.map(|(start, end)| (*start, *end, id)).collect();
            m.jit.objects.push(Arc::new(object));
        }
        if changed {
            let ranges = m.jit.listed.values().flat_map(|listed| &listed.ranges);
            m.process.set_registered(ranges.copied().collect());
        }
    }

    /// The last look at the code made by processes that there are samples of, and by those that they were forked from.
    pub(super) fn look_at_all_made_code(&mut self) {
        let mut pids: FxHashSet<Pid> = self.unfiled.clone();
        for pid in &self.unfiled {
            let mut next = self.members.get(pid).and_then(|m| m.parent);
            while let Some(parent) = next.filter(|parent| pids.insert(*parent)) {
                next = self.members.get(&parent).and_then(|m| m.parent);
            }
        }
        for pid in pids {
            self.look_at_made_code(pid, None);
        }
    }
}

/// What names code of a process that is in no file.
pub(super) fn jit_places(members: &FxHashMap<Pid, Member>, pid: Pid) -> Option<JitPlaces> {
    let m = members.get(&pid)?;
    Some(JitPlaces {
        dumps: m.process.jitdumps.clone(),
        objects: m.jit.objects.clone(),
        regions: m.process.regions().to_vec(),
        parent: m.parent,
    })
}

/// Start of the function around an address of a file (svma) or of a process's own code (avma), by the unwind tables.
pub(super) fn function_start(
    unwinder: &mut Unwinder,
    members: &FxHashMap<Pid, Member>,
    owner: Owner,
    at: u64,
) -> Option<u64> {
    use crate::code::CodeMap;
    match owner {
        Owner::File(module) => unwinder.function_start(module, at),
        Owner::Anonymous(pid) => {
            let (module, bias) = members.get(&pid)?.process.find(at)?;
            let start = unwinder.function_start(module, at.wrapping_sub(bias))?;
            Some(start.wrapping_add(bias))
        }
    }
}
