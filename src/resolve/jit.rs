//! Frames in JIT code, by the names that its generator publishes.

use std::collections::BTreeMap;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use symbolize::{JitCode, JitObject, Symbol};

use super::symbols::{Owner, named_frame, unnamed_frames};
use super::{Names, ResolveInput};
use crate::event::Pid;
use crate::frame::{ModuleId, RawFrame};
use crate::profile::model::{Frame, FrameKind, ModuleMeta};
use crate::target::Region;
use crate::target::file_content::{Content, ContentReader};

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
    names: &mut Names,
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
    let (sources, mut missing) = jit_sources(input, pid);
    let regions = (input.jit)(pid).map_or(Vec::new(), |jit| jit.regions);
    let mut python = None;
    let mut used = vec![false; sources.len()];
    let mut groups = BTreeMap::new();
    for (avma, count) in counts {
        let symbol = sources.iter().enumerate().find_map(|(i, (_, code))| {
            let symbol = code.lookup(*avma)?;
            used[i] = true;
            Some(symbol)
        });
        names.unnamed.remove(&raw(avma));
        let (f, line) = match symbol {
            Some(s) if s.raw.starts_with(TRAMPOLINE) => {
                let functions = python.get_or_insert_with(|| python_functions(input));
                names.trampolines.insert(raw(avma), s.raw.clone());
                functions.get(&*s.raw).cloned().unwrap_or_else(|| jit_frame(&s))
            }
            Some(s) => jit_frame(&s),
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
            "none: this code is in no file".into()
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
fn jit_frame(s: &Symbol) -> (Frame, u32) {
    let f = Frame {
        address: 0,
        ..named_frame(&s.clone().into(), JIT)
    };
    (f, s.line.unwrap_or(0))
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

/// What names JIT code of a process, best first, and what is missing.
fn jit_sources(input: &ResolveInput<'_>, pid: Pid) -> (Vec<(String, JitCode)>, Vec<String>) {
    let (mut sources, mut missing) = (Vec::new(), Vec::new());
    for (pid, jit) in ancestry(pid, input.jit) {
        for id in jit.dumps {
            let module = input.modules.get(id);
            let name = String::from_utf8_lossy(&module.path).into_owned();
            match JitCode::from_jitdump(ContentReader::new(module.content.clone())) {
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
            sources.push((name, code));
        }
        let Some(map) = input.open_files.perf_maps.get(&pid) else {
            continue;
        };
        let path = &map.path;
        match &map.file {
            None => missing.push(map.refused.clone().unwrap_or_else(|| format!("no {path}"))),
            Some(file) => match JitCode::from_perf_map(ContentReader::new(Content::File(file.clone()))) {
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
