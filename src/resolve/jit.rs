//! Frames in JIT code, by the names that its generator publishes.

use std::collections::BTreeMap;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use symbolize::{JitCode, JitObject};

use super::naming::protocol::{FileFormat, NamedFrame};
use super::naming::{NamesRequest, NamingError};
use super::symbols::{Owner, named_frame, unnamed_frames};
use super::{NameCache, ResolveInput};
use crate::event::Pid;
use crate::frame::{CodeId, ModuleId, RawFrame};
use crate::process::Region;
use crate::process::file_content::{Content, ContentReader};
use crate::profile::model::{Frame, FrameKind, ModuleMeta};

/// Module of frames in JIT code.
const JIT: &str = "[jit]";
/// Maximum number of ancestors whose names are used.
const MAX_PARENTS: usize = 8;
/// Prefix of the names of CPython's perf trampolines (Python/perf_trampoline.c, v3.12.1).
const TRAMPOLINE: &str = "py::";

/// Sources of names for a process's JIT code.
pub struct JitSources {
    /// Its jitdump files.
    pub dumps: Vec<ModuleId>,
    /// Objects that it registered with debuggers, in order.
    pub objects: Vec<Arc<JitObject>>,
    /// Executable memory that is not code of an ELF file, in order of appearance.
    pub regions: Vec<Region>,
    /// The process it was forked from, whose names are still valid in it.
    pub parent: Option<Pid>,
}

/// Names addresses (avma) of JIT code of one process; `counts` is the number of frames at each.
pub(super) fn name_anonymous(
    input: &mut ResolveInput<'_>,
    names: &mut NameCache,
    pid: Pid,
    counts: &BTreeMap<u64, u64>,
) -> ModuleMeta {
    let raw = |avma: &u64| RawFrame::Anonymous { pid, avma: *avma };
    let is_named = |avma: &u64| names.named.contains_key(&raw(avma));
    if let Some(row) = names.anonymous.get(&pid).filter(|_| counts.keys().all(is_named)) {
        return ModuleMeta {
            frames: counts.values().sum(),
            unnamed: unnamed_frames(&names.unnamed, counts, raw),
            ..row.clone()
        };
    }
    let avmas: Vec<u64> = counts.keys().copied().collect();
    let (sources, mut missing) = jit_sources(input, pid, &avmas);
    let regions = (input.jit)(pid).map_or(Vec::new(), |jit| jit.regions);
    let mut python = None;
    let called = if writes_names(input, pid) {
        called_functions(input, pid)
    } else {
        FxHashMap::default()
    };
    let mut is_by_call = false;
    let mut used = vec![false; sources.len()];
    let mut groups = BTreeMap::new();
    for (avma, count) in counts {
        let symbol = sources.iter().enumerate().find_map(|(i, (_, code))| {
            let symbol = code.find(*avma)?;
            used[i] = true;
            Some(symbol)
        });
        names.unnamed.remove(&raw(avma));
        let (f, line) = match symbol {
            Some(s) => match s.raw.as_ref().filter(|raw| raw.starts_with(TRAMPOLINE)) {
                Some(trampoline) => {
                    let functions = python.get_or_insert_with(|| python_functions(input));
                    names.trampolines.insert(raw(avma), trampoline.clone());
                    functions.get(&**trampoline).cloned().unwrap_or_else(|| jit_frame(&s))
                }
                None => jit_frame(&s),
            },
            None if let Some(Some(code)) = called.get(avma) => {
                let c = input.codes.get(*code);
                is_by_call = true;
                names
                    .trampolines
                    .insert(raw(avma), trampoline_name(&c.qualname, &c.filename).into());
                (super::python_frame(c), c.first_line)
            }
            None => {
                names.unnamed.insert(raw(avma));
                let region = regions.iter().rposition(|r| (r.start..r.end).contains(avma));
                if let Some(region) = region {
                    *groups.entry(region).or_insert(0) += count;
                }
                let region = region.map(|i| (region_name(input, &regions, i), regions[i]));
                (unnamed_frame(input, pid, *avma, region), 0)
            }
        };
        let id = names.frames.id(f);
        names.named.insert(raw(avma), vec![(id, line)]);
    }
    let from: Vec<&str> = sources
        .iter()
        .zip(&used)
        .filter(|(_, used)| **used)
        .map(|((name, _), _)| &**name)
        .chain(is_by_call.then_some("the Python functions that trampolines call"))
        .collect();
    let unnamed = unnamed_frames(&names.unnamed, counts, raw);
    if unnamed == 0 {
        missing.clear();
    }
    missing.extend(groups.iter().filter_map(|(region, count)| {
        let Region { start, end, .. } = regions.get(*region)?;
        let (name, size) = (
            region_name(input, &regions, *region),
            end.saturating_sub(*start).div_ceil(1024),
        );
        Some(format!("{name}: {count} frames at {start:#x}+{size}K"))
    }));
    let row = ModuleMeta {
        path: format!("[anonymous code, process {pid}]"),
        build_id: String::new(),
        symbols_from: if from.is_empty() {
            "none: JIT code, in no file".into()
        } else {
            from.join(", ")
        },
        symbols_missing: missing.join("; "),
        frames: counts.values().sum(),
        unnamed,
        ..ModuleMeta::default()
    };
    names.anonymous.insert(pid, row.clone());
    row
}

/// A named function. Its address is left out, since it differs between runs and processes: profiles of several can be
/// merged.
fn jit_frame(s: &NamedFrame) -> (Frame, u32) {
    let f = Frame {
        address: 0,
        ..named_frame(s, JIT)
    };
    (f, s.line)
}

/// A function without a name: one frame for each function whose start the tables contain, otherwise one for each
/// region, which has this name.
fn unnamed_frame(input: &mut ResolveInput<'_>, pid: Pid, avma: u64, region: Option<(String, Region)>) -> Frame {
    let Some((mut name, region)) = region else {
        // No code at all: a jump through an invalid pointer.
        return Frame {
            address: avma,
            ..Frame::new(FrameKind::Unknown, "[unknown]")
        };
    };
    let function = (input.function_start)(Owner::Anonymous(pid), avma);
    let address = function.map_or(0, |function| function.saturating_sub(region.start));
    if function.is_some() {
        name.insert_str(name.len() - 1, &format!("+{address:#x}"));
    }
    Frame {
        address,
        module: region.file.map_or(JIT.into(), |id| input.modules.get(id).name()),
        ..Frame::new(FrameKind::Native, name)
    }
}

/// Regions of files are named after these, the others are numbered, since their addresses differ between runs.
fn region_name(input: &ResolveInput<'_>, regions: &[Region], i: usize) -> String {
    match regions[i].file {
        Some(id) => format!("[code in {}]", input.modules.get(id).name()),
        None => {
            let number = regions[..=i].iter().filter(|r| r.file.is_none()).count();
            format!("[anonymous code #{number}]")
        }
    }
}

/// Name of CPython's perf trampoline for a function.
pub(super) fn trampoline_name(qualname: &str, filename: &str) -> String {
    format!("{TRAMPOLINE}{qualname}:{filename}")
}

/// Python functions on the stacks by the names of their trampolines, each with its first line.
fn python_functions(input: &ResolveInput<'_>) -> FxHashMap<String, (Frame, u32)> {
    let mut found = FxHashMap::default();
    for (_, raw, _) in input.tree.nodes() {
        if let Some(RawFrame::Python { code, .. }) = raw {
            let c = input.codes.get(*code);
            let f = || (super::python_frame(c), c.first_line);
            found.entry(trampoline_name(&c.qualname, &c.filename)).or_insert_with(f);
        }
    }
    found
}

/// Whether the process, or one that it was forked from, writes a jitdump or a perf map.
fn writes_names(input: &ResolveInput<'_>, pid: Pid) -> bool {
    let maps = &input.open_files.perf_maps;
    ancestry(pid, input.jit)
        .any(|(pid, jit)| !jit.dumps.is_empty() || maps.get(&pid).is_some_and(|map| map.file.is_some()))
}

/// By the address in JIT code (avma) of a caller, the Python function whose frame it calls; `None` for several.
///
/// Only CPython's trampolines call the evaluation loop from JIT code, each for one function. CPython writes their names through a
/// buffer, the end of which is in no file while it runs, and never is if `os._exit` ends it, as in children of
/// `multiprocessing`.
fn called_functions(input: &ResolveInput<'_>, pid: Pid) -> FxHashMap<u64, Option<CodeId>> {
    let nodes = input.tree.nodes();
    let mut found = FxHashMap::default();
    for (parent, raw, _) in nodes {
        let (Some(RawFrame::Python { code, .. }), Some(RawFrame::Anonymous { pid: of, avma })) =
            (raw, &nodes[*parent as usize].1)
        else {
            continue;
        };
        if *of == pid {
            let known = found.entry(*avma).or_insert(Some(*code));
            *known = known.filter(|known| known == code);
        }
    }
    found
}

/// Names of JIT code: all of a file, or those at the addresses that were looked up.
enum JitNames {
    All(JitCode),
    Found(BTreeMap<u64, NamedFrame>),
}

impl JitNames {
    fn find(&self, avma: u64) -> Option<NamedFrame> {
        match self {
            JitNames::All(code) => named(code, avma),
            JitNames::Found(found) => found.get(&avma).cloned(),
        }
    }
}

/// The name at an address.
pub(super) fn named(code: &JitCode, avma: u64) -> Option<NamedFrame> {
    let symbol = code.lookup(avma)?;
    Some(NamedFrame {
        raw: Some(symbol.raw.clone()),
        ..symbol.into()
    })
}

/// A perf map or jitdump.
///
/// # Errors
/// Why it cannot be used.
pub(super) fn read(format: FileFormat, content: Content) -> Result<JitCode, String> {
    let content = ContentReader::new(content);
    match format {
        FileFormat::JitDump => JitCode::from_jitdump(content).map_err(|e| e.to_string()),
        _ => JitCode::from_perf_map(content).map_err(|e| e.to_string()),
    }
}

/// Names at addresses (avma), by the process that reads names if there is one. `id` as in [`NamesRequest`].
fn names_in(
    input: &mut ResolveInput<'_>,
    (format, id): (FileFormat, u32),
    content: &Content,
    avmas: &[u64],
) -> Result<JitNames, String> {
    let (Some(naming), Some(file)) = (input.naming.as_deref_mut(), content.file()) else {
        return read(format, content.clone()).map(JitNames::All);
    };
    let file = file.map_err(|e| e.to_string())?;
    let request = NamesRequest {
        format,
        id,
        file: &file,
        path: b"",
        open: &|_| None,
        fetch: None,
    };
    match naming.name(&request, avmas) {
        Ok(names) if !names.symbols_missing.is_empty() => Err(names.symbols_missing),
        Ok(names) => {
            let found = avmas.iter().zip(names.found);
            let found = found.filter_map(|(at, frames)| Some((*at, frames.into_iter().next()?)));
            Ok(JitNames::Found(found.collect()))
        }
        Err(NamingError::Failed(why)) => Err(why),
        Err(NamingError::NotStarted(_)) => {
            input.naming = None;
            read(format, content.clone()).map(JitNames::All)
        }
    }
}

/// What names JIT code of a process, best first, and what is missing.
fn jit_sources(input: &mut ResolveInput<'_>, pid: Pid, avmas: &[u64]) -> (Vec<(String, JitNames)>, Vec<String>) {
    let (mut sources, mut missing) = (Vec::new(), Vec::new());
    for (pid, jit) in ancestry(pid, input.jit) {
        for id in jit.dumps {
            let module = input.modules.get(id);
            let (name, content) = (module.path_text(), module.content.clone());
            match names_in(input, (FileFormat::JitDump, module.number), &content, avmas) {
                Ok(code) => sources.push((format!("jitdump {name}"), code)),
                Err(why) => missing.push(format!("{name}: {why}")),
            }
        }
        let objects = jit.objects.len();
        if objects > 0 {
            let mut code = JitCode::default();
            jit.objects.iter().for_each(|object| code.add_object(object));
            let name = format!(
                "{objects} object{} registered with the debugger interface",
                if objects == 1 { "" } else { "s" }
            );
            sources.push((name, JitNames::All(code)));
        }
        let Some(map) = input.open_files.perf_maps.get(&pid) else {
            continue;
        };
        let path = map.path.clone();
        match map.file.clone().map(Content::File) {
            None => missing.push(map.refused.clone().unwrap_or_else(|| format!("no {path}"))),
            Some(content) => match names_in(input, (FileFormat::PerfMap, pid), &content, avmas) {
                Ok(code) => sources.push((format!("perf map {path}"), code)),
                Err(why) => missing.push(format!("{path}: {why}")),
            },
        }
    }
    (sources, missing)
}

/// A process and those it was forked from, with the sources of names for their code.
fn ancestry(pid: Pid, jit: &dyn Fn(Pid) -> Option<JitSources>) -> impl Iterator<Item = (Pid, JitSources)> + use<'_> {
    let mut next = Some(pid);
    let step = move || {
        let pid = next.take()?;
        let sources = jit(pid)?;
        next = sources.parent;
        Some((pid, sources))
    };
    std::iter::from_fn(step).take(MAX_PARENTS)
}
