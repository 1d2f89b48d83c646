//! Frames in code that is in no file: what the programs that made it call it.

use std::collections::BTreeMap;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use symbolize::{JitCode, JitObject, Symbol};

use super::native::{Owner, symbol_frame, unnamed_frames};
use super::{Gathered, Names, frame};
use crate::process::Region;
use crate::process::content::{Content, Reader};
use crate::sample::{ModuleId, Pid, RawFrame};
use crate::tree::profile::{Frame, FrameKind, ModuleMeta};

/// Module of frames in code without a file.
const JIT: &str = "[jit]";
/// Forks in a row whose names are looked at.
const MAX_PARENTS: usize = 8;
/// How names of CPython's perf trampolines begin (Python/perf_trampoline.c, v3.12.1).
const TRAMPOLINE: &str = "py::";

/// What knows a process's code that is in no file.
pub struct JitPlaces {
    /// Its jitdump files.
    pub dumps: Vec<ModuleId>,
    /// What it registered with debuggers, in order.
    pub objects: Vec<Arc<JitObject>>,
    /// Executable memory that is no code of an ELF file, in order of appearance.
    pub regions: Vec<Region>,
    /// Whose memory it got when it was forked: its names hold too.
    pub parent: Option<Pid>,
}

/// Names addresses (avma) of code without a file of one process; `counts` are the frames at each.
pub(super) fn name_anonymous(
    gathered: &mut Gathered<'_>,
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
    let (sources, mut missing) = jit_sources(gathered, pid);
    let regions = (gathered.jit)(pid).map_or(Vec::new(), |places| places.regions);
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
                let functions = python.get_or_insert_with(|| python_functions(gathered));
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
                let region = region.map(|i| (region_name(gathered, &regions, i), regions[i]));
                (unnamed_frame(gathered, pid, *avma, region), 0)
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
            region_name(gathered, &regions, *region),
            end.saturating_sub(*start).div_ceil(1024),
        );
        Some(format!("{name}: {count} frames at {start:#x}+{size}K"))
    }));
    let row = ModuleMeta {
        path: format!("[code without a file, process {pid}]"),
        build_id: String::new(),
        names: if from.is_empty() {
            "none: no file has this code".into()
        } else {
            from.join(", ")
        },
        missing: missing.join("; "),
        frames: counts.values().sum(),
        unnamed,
        samples: 0,
    };
    names.anonymous.insert(pid, row.clone());
    row
}

/// A named function. Where it lies differs from run to run and from process to process, so its address is left out:
/// profiles of several can be merged.
fn jit_frame(s: &Symbol) -> (Frame, u32) {
    let f = Frame {
        address: 0,
        ..symbol_frame(s, JIT)
    };
    (f, s.line.unwrap_or(0))
}

/// A function without a name: one frame for each function whose start the tables tell, else one for each region, whose
/// name this is.
fn unnamed_frame(gathered: &mut Gathered<'_>, pid: Pid, avma: u64, region: Option<(String, Region)>) -> Frame {
    let Some((mut name, region)) = region else {
        // No code at all: a jump through a wild pointer.
        return Frame {
            address: avma,
            ..frame(FrameKind::Unknown, "[unknown]")
        };
    };
    let function = (gathered.function_start)(Owner::Anonymous(pid), avma);
    let address = function.map_or(0, |function| function.saturating_sub(region.start));
    if function.is_some() {
        name.insert_str(name.len() - 1, &format!("+{address:#x}"));
    }
    Frame {
        address,
        module: region.file.map_or(JIT.into(), |id| gathered.modules.get(id).name()),
        ..frame(FrameKind::Native, name)
    }
}

/// Regions are numbered, since their addresses differ from run to run, but for those of files.
fn region_name(gathered: &Gathered<'_>, regions: &[Region], i: usize) -> String {
    match regions[i].file {
        Some(id) => format!("[code in {}]", gathered.modules.get(id).name()),
        None => {
            let number = regions[..=i].iter().filter(|r| r.file.is_none()).count();
            format!("[anonymous code #{number}]")
        }
    }
}

/// How CPython's perf trampolines call a function.
pub(super) fn trampoline_name(qualname: &str, filename: &str) -> String {
    format!("{TRAMPOLINE}{qualname}:{filename}")
}

/// Python functions on the stacks by the names of their trampolines, each with its first line.
fn python_functions(gathered: &Gathered<'_>) -> FxHashMap<String, (Frame, u32)> {
    let mut found = FxHashMap::default();
    for (_, raw, _) in gathered.tree.nodes() {
        if let Some(RawFrame::Python { code, .. }) = raw {
            let c = gathered.codes.get(*code);
            let f = || (super::python_frame(c), c.first_line);
            found.entry(trampoline_name(&c.qualname, &c.filename)).or_insert_with(f);
        }
    }
    found
}

/// What names code of a process that is in no file, best first, and what is not there.
fn jit_sources(gathered: &Gathered<'_>, pid: Pid) -> (Vec<(String, JitCode)>, Vec<String>) {
    let (mut sources, mut missing) = (Vec::new(), Vec::new());
    for (pid, places) in family(pid, gathered.jit) {
        for id in places.dumps {
            let module = gathered.modules.get(id);
            let name = String::from_utf8_lossy(&module.path).into_owned();
            match JitCode::from_jitdump(Reader::new(module.content.clone())) {
                Ok(code) => sources.push((format!("jitdump {name}"), code)),
                Err(why) => missing.push(format!("{name}: {why}")),
            }
        }
        let objects = places.objects.len();
        if objects > 0 {
            let mut code = JitCode::default();
            places.objects.iter().for_each(|object| code.add_object(object));
            let name = format!(
                "{objects} object{} registered with debuggers",
                if objects == 1 { "" } else { "s" }
            );
            sources.push((name, code));
        }
        let Some(map) = gathered.opened.perf_maps.get(&pid) else {
            continue;
        };
        let path = &map.path;
        match &map.file {
            None => missing.push(map.refused.clone().unwrap_or_else(|| format!("no {path}"))),
            Some(file) => match JitCode::from_perf_map(Reader::new(Content::File(file.clone()))) {
                Ok(code) => sources.push((format!("perf map {path}"), code)),
                Err(why) => missing.push(format!("{path}: {why}")),
            },
        }
    }
    (sources, missing)
}

/// A process and those that it was forked from, with what names their code.
fn family(pid: Pid, jit: &dyn Fn(Pid) -> Option<JitPlaces>) -> impl Iterator<Item = (Pid, JitPlaces)> + use<'_> {
    let mut next = Some(pid);
    let step = move || {
        let pid = next.take()?;
        let places = jit(pid)?;
        next = places.parent;
        Some((pid, places))
    };
    std::iter::from_fn(step).take(MAX_PARENTS)
}
