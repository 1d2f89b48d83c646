//! Native frames: their names from files and JIT compilers, and the table of where the names came from.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use symbolize::{Files, Kernel, Module, SymbolSources};

use super::naming::protocol::{FileFormat, ModuleNames, NamedFrame};
use super::naming::{NamesRequest, NamingError};
use super::{Fetch, NameCache, OpenFiles, ResolveInput, ResolvedFrame, variables};
use crate::arch;
use crate::counts::RawTree;
use crate::event::Pid;
use crate::frame::{ModuleId, RawFrame};
use crate::process::file_content::Content;
use crate::process::root::Root;
use crate::profile::model::{Frame, FrameKind, ModuleMeta};
use crate::unwind::{FunctionExtent, FunctionExtents, MAX_FUNCTION};

/// What a native frame belongs to: a row of the table of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Owner {
    File(ModuleId),
    Anonymous(Pid),
}

impl Owner {
    fn of(raw: &RawFrame) -> Option<Owner> {
        match *raw {
            RawFrame::Native { module, .. } => Some(Owner::File(module)),
            RawFrame::Anonymous { pid, .. } => Some(Owner::Anonymous(pid)),
            _ => None,
        }
    }
}

/// Samples with a frame of each owner anywhere on their stack.
pub(super) fn samples(tree: &RawTree, inclusive: &[u64]) -> FxHashMap<Owner, u64> {
    let mut out: FxHashMap<Owner, u64> = FxHashMap::default();
    // The set of owners on the path to a node, by index: there are few different sets.
    let mut sets: Vec<FxHashSet<Owner>> = vec![FxHashSet::default()];
    let mut with_owner: FxHashMap<(usize, Owner), usize> = FxHashMap::default();
    let mut set_of: Vec<usize> = Vec::with_capacity(inclusive.len());
    for ((parent, raw, _), count) in tree.nodes().iter().zip(inclusive) {
        let before = set_of.get(*parent as usize).copied().unwrap_or(0);
        let owner = raw.as_ref().and_then(Owner::of).filter(|o| !sets[before].contains(o));
        let set = owner.map_or(before, |owner| {
            *out.entry(owner).or_default() += count;
            *with_owner.entry((before, owner)).or_insert_with(|| {
                let mut set = sets[before].clone();
                set.insert(owner);
                sets.push(set);
                sets.len() - 1
            })
        });
        set_of.push(set);
    }
    out
}

/// Samples that ended at each instruction (svma) of each file. JIT code is in no file that could be disassembled later.
pub(super) fn instructions(tree: &RawTree) -> FxHashMap<Owner, BTreeMap<u64, u64>> {
    let mut out: FxHashMap<Owner, BTreeMap<u64, u64>> = FxHashMap::default();
    for (_, raw, self_count) in tree.nodes() {
        if let Some(RawFrame::Native { module, svma }) = raw
            && *self_count > 0
        {
            *out.entry(Owner::File(*module)).or_default().entry(*svma).or_default() += self_count;
        }
    }
    out
}

/// The file system around a module, and the source of missing debug files.
struct DebugFileContext {
    root: Option<Arc<Root>>,
    fetch: Option<Fetch>,
}

impl Files for DebugFileContext {
    fn open(&self, path: &Path) -> Option<File> {
        self.root.as_ref()?.open(path)
    }

    fn fetch(&self, build_id: &[u8]) -> Option<Result<File, String>> {
        Some((self.fetch.as_ref()?)(build_id))
    }
}

/// Path of a module without what the kernel adds when the file was deleted.
fn path(module: &crate::process::modules::Module) -> &[u8] {
    module.path.strip_suffix(b" (deleted)").unwrap_or(&module.path)
}

/// The file with the names of a module, to be read in this process.
fn open(input: &ResolveInput<'_>, module: &crate::process::modules::Module) -> Result<Module, String> {
    let opened = match &module.content {
        Content::File(f) => f
            .try_clone()
            .map_err(|e| e.to_string())
            .and_then(|f| Module::from_file(f).map_err(|e| e.to_string())),
        Content::Bytes(b) => Module::from_bytes(b.to_vec()).map_err(|e| e.to_string()),
        Content::Missing => Err(refusal_reason(module)),
    };
    let context = DebugFileContext {
        root: module.root.get().cloned(),
        fetch: input.fetch.clone(),
    };
    opened.map(|m| m.with_files(PathBuf::from(OsStr::from_bytes(path(module))), Arc::new(context)))
}

/// Why a module without contents was not opened.
fn refusal_reason(module: &crate::process::modules::Module) -> String {
    let why = module.refused.as_deref();
    why.unwrap_or("the file could not be opened").to_string()
}

/// Names at addresses (svma) of a file, and where they come from: functions, or variables.
pub(super) fn look_up(file: &mut Result<Module, String>, format: FileFormat, svmas: &[u64]) -> ModuleNames {
    let module = match file {
        Ok(module) => module,
        Err(why) => return ModuleNames::none(svmas.len(), why),
    };
    let found = match (svmas, format) {
        ([], _) => Vec::new(),
        (_, FileFormat::ElfVariables) => variables::look_up(module, svmas),
        _ => functions(module, svmas),
    };
    let (symbols_from, symbols_missing) = source_text(module);
    ModuleNames {
        found,
        symbols_from,
        symbols_missing,
    }
}

fn functions(module: &mut Module, svmas: &[u64]) -> Vec<Vec<NamedFrame>> {
    let mut extents = FunctionExtents::default();
    let found = module.lookup_many(svmas);
    let sources = module.sources();
    let has_all = sources.symtab || sources.debugdata;
    let found = found.into_iter().zip(svmas);
    found
        .map(|(found, svma)| match found {
            Ok(found) if is_reached(module, *svma, has_all, &mut extents) => {
                found.into_iter().map(NamedFrame::from).collect()
            }
            _ => signal_return(module, *svma).into_iter().collect(),
        })
        .collect()
}

/// The code that signal handlers return to. No stripped file names it, but its instructions show it; glibc 2.36
/// (sysdeps/unix/sysv/linux/x86_64/libc_sigaction.c) and musl 1.2.3 (src/signal/x86_64/restore.s) call it the same.
fn signal_return(module: &mut Module, svma: u64) -> Option<NamedFrame> {
    const AROUND: u64 = 12;
    let first = svma.checked_sub(AROUND)?;
    // The section may end there.
    let code = (1..=AROUND)
        .rev()
        .find_map(|after| module.code(first, AROUND + after).ok())?;
    let start = arch::signal_return_start(&code, AROUND as usize)?;
    Some(NamedFrame {
        name: "__restore_rt".into(),
        raw: None,
        start: first + start as u64,
        file: None,
        line: 0,
        inlined: false,
    })
}

/// Can the function that has this address by the symbol tables be there? Of one without a size, only what its
/// instructions lead to: others without symbols may follow. Where those lead is not always to be seen; then it reaches
/// to the next symbol if all functions have symbols (`has_all`), and not only those that are exported.
fn is_reached(module: &mut Module, svma: u64, has_all: bool, extents: &mut FunctionExtents) -> bool {
    let Some((start, size)) = module.symbol_at(svma).filter(|f| !f.sized).map(|f| (f.start, f.size)) else {
        return true;
    };
    let code = || module.code(start, size.min(MAX_FUNCTION)).ok();
    let is_inside = |extent: FunctionExtent| svma - start < extent.reached || extent.is_open && has_all;
    extents.get(start, code).is_none_or(is_inside)
}

/// The names at addresses of a file, by the process without privileges if there is one.
pub(super) fn names_in(
    input: &mut ResolveInput<'_>,
    files: &mut FxHashMap<ModuleId, Result<Module, String>>,
    (id, format): (ModuleId, FileFormat),
    svmas: &[u64],
) -> ModuleNames {
    let module = input.modules.get(id).clone();
    look_up_outside(input, &module, format, svmas).unwrap_or_else(|| {
        let file = files.entry(id).or_insert_with(|| open(input, &module));
        look_up(file, format, svmas)
    })
}

/// The names that a process without privileges finds; `None` if there is no such process.
fn look_up_outside(
    input: &mut ResolveInput<'_>,
    module: &crate::process::modules::Module,
    format: FileFormat,
    svmas: &[u64],
) -> Option<ModuleNames> {
    let naming = input.naming.as_deref_mut()?;
    let none = |why: &str| Some(ModuleNames::none(svmas.len(), why));
    let file = match module.content.file() {
        Some(Ok(file)) => file,
        Some(Err(why)) => return none(&why.to_string()),
        None => return none(&refusal_reason(module)),
    };
    let (root, fetch) = (module.root.get(), &input.fetch);
    let fetch = fetch.as_ref().map(|fetch| || fetch(&module.build_id));
    let request = NamesRequest {
        format,
        id: module.number,
        file: &file,
        path: path(module),
        open: &|path| root?.open(path),
        fetch: fetch.as_ref().map(|fetch| fetch as &dyn Fn() -> _),
    };
    match naming.name(&request, svmas) {
        Ok(names) => Some(names),
        Err(NamingError::Failed(why)) => none(&why),
        Err(NamingError::NotStarted(e)) if naming.is_needed => {
            none(&format!("the process that reads names cannot be started: {e}"))
        }
        Err(NamingError::NotStarted(_)) => {
            input.naming = None;
            None
        }
    }
}

/// Names addresses (svma) of one file; `counts` is the number of frames at each.
pub(super) fn name_module(
    input: &mut ResolveInput<'_>,
    names: &mut NameCache,
    id: ModuleId,
    counts: &BTreeMap<u64, u64>,
) -> ModuleMeta {
    let module = input.modules.get(id).clone();
    let name = module.name();
    let raw = |svma: &u64| RawFrame::Native {
        module: id,
        svma: *svma,
    };
    let sorted: Vec<u64> = counts
        .keys()
        .copied()
        .filter(|svma| !names.named.contains_key(&raw(svma)))
        .collect();
    let found = if sorted.is_empty() && names.sources.contains_key(&id) {
        Vec::new()
    } else {
        let looked_up = names_in(input, &mut names.files, (id, FileFormat::Elf), &sorted);
        let sources = (looked_up.symbols_from, looked_up.symbols_missing);
        names.sources.insert(id, sources);
        looked_up.found
    };
    let NameCache {
        frames, named, unnamed, ..
    } = names;
    for (svma, symbols) in sorted.iter().zip(found) {
        let mut stack: Vec<ResolvedFrame> = symbols
            .iter()
            .rev()
            .map(|s| (frames.id(named_frame(s, &name)), s.line))
            .collect();
        if stack.is_empty() {
            // Without a name, the unwind tables still contain the start of the function.
            unnamed.insert(raw(svma));
            let address = (input.function_start)(Owner::File(id), *svma).unwrap_or(*svma);
            let f = Frame {
                address,
                module: name.clone(),
                ..Frame::new(FrameKind::Unknown, "[unknown]")
            };
            stack.push((frames.id(f), 0));
        }
        named.insert(raw(svma), stack);
    }
    let (symbols_from, symbols_missing) = names.sources.get(&id).cloned().unwrap_or_default();
    ModuleMeta {
        path: module.path_text(),
        build_id: module.build_id.iter().map(|b| format!("{b:02x}")).collect(),
        symbols_from,
        symbols_missing,
        frames: counts.values().sum(),
        unnamed: unnamed_frames(&names.unnamed, counts, raw),
        ..ModuleMeta::default()
    }
}

/// Number of frames at addresses without a name.
pub(super) fn unnamed_frames(
    unnamed: &FxHashSet<RawFrame>,
    counts: &BTreeMap<u64, u64>,
    raw: impl Fn(&u64) -> RawFrame,
) -> u64 {
    let without = counts.iter().filter(|(at, _)| unnamed.contains(&raw(at)));
    without.map(|(_, count)| count).sum()
}

pub(super) fn named_frame(s: &NamedFrame, module: &str) -> Frame {
    let kind = if s.inlined {
        FrameKind::Inlined
    } else {
        FrameKind::Native
    };
    Frame {
        address: s.start,
        module: module.to_string(),
        source: s.file.as_deref().unwrap_or("").to_string(),
        ..Frame::new(kind, s.name.to_string())
    }
}

pub(super) fn kernel_frame(kernel: &mut Option<Option<Kernel>>, open_files: &OpenFiles, address: u64) -> Frame {
    let table = kernel.get_or_insert_with(|| Kernel::parse(open_files.kernel.as_ref()?).ok());
    match table.as_ref().and_then(|k| k.lookup(address)) {
        Some(s) => {
            let module = s.module.map_or("[kernel]".to_string(), |m| format!("[{m}]"));
            Frame {
                address: s.start,
                module,
                ..Frame::new(FrameKind::Kernel, s.name)
            }
        }
        None => Frame {
            address,
            module: "[kernel]".into(),
            ..Frame::new(FrameKind::Kernel, "[unknown]")
        },
    }
}

/// Where names came from, and what was missing, as text.
fn source_text(m: &Module) -> (String, String) {
    let s = m.sources();
    let mut kinds: Vec<String> = [
        (s.dwarf, "DWARF"),
        (s.symtab, "symbols"),
        (s.debugdata, ".gnu_debugdata"),
        (s.dynsym && !s.symtab && !s.debugdata, "exported symbols"),
        (s.go_table && !s.dwarf, "Go's function table"),
    ]
    .iter()
    .filter(|(has, _)| *has)
    .map(|(_, name)| name.to_string())
    .collect();
    if let Some(path) = &s.debug_file {
        kinds.push(format!("debug file {}", path.display()));
    }
    if s.fetched {
        kinds.push("debuginfod".into());
    }
    kinds.extend(
        s.supplementary
            .as_ref()
            .map(|path| format!("shared with {}", path.display())),
    );
    if s.split_units.0 > 0 {
        kinds.push(format!("{} split units", s.split_units.0));
    }
    kinds.extend(m.dwarf_error().map(|e| format!("DWARF unreadable: {e}")));
    let names = if kinds.is_empty() {
        "none: no symbols in the file".into()
    } else {
        kinds.join(", ")
    };
    (names, missing_text(&s))
}

/// What would have given more names; empty if nothing is known to be missing.
fn missing_text(s: &SymbolSources) -> String {
    let mut missing = Vec::new();
    if s.split_units.1 > 0 {
        missing.push(format!("{} split units", s.split_units.1));
    }
    if !s.dwarf || s.split_units.1 > 0 {
        // The first path is the one that packages use.
        missing.extend(s.searched.first().map(|path| format!("no {}", path.display())));
    }
    missing.extend(s.refused.iter().cloned());
    if s.cython_lines_missing {
        missing.push("no lines of .pyx files: build with -g and cythonize(..., emit_linenums=True)".into());
    }
    missing.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::sums::sum_upwards;

    #[test]
    fn samples_count_once_however_often_a_file_is_on_the_stack() {
        let mut tree = RawTree::default();
        let native = |module, svma| RawFrame::Native {
            module: ModuleId(module),
            svma,
        };
        let jit = RawFrame::Anonymous { pid: 7, avma: 1 };
        tree.add(&[native(0, 1), native(1, 1), native(0, 2), native(1, 2)], 1);
        tree.add(&[native(0, 1), native(1, 1)], 1);
        tree.add(&[native(0, 1)], 1);
        tree.add(&[native(0, 1), jit, jit, native(1, 1)], 1);
        let nodes = tree.nodes();
        let mut inclusive: Vec<u64> = nodes.iter().map(|n| n.2).collect();
        sum_upwards(&mut inclusive, |at| Some(nodes[at].0 as usize));
        let found = samples(&tree, &inclusive);
        let of = |owner| found.get(&owner).copied();
        assert_eq!(of(Owner::File(ModuleId(0))), Some(4));
        assert_eq!(of(Owner::File(ModuleId(1))), Some(3));
        assert_eq!(of(Owner::Anonymous(7)), Some(1));
    }
}
