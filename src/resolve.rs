//! Raw tree to [`Profile`]: names each distinct frame once, in one pass, when sampling is over.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use symbolize::Kernel;

use crate::interp::code::{Code, CodeTable};
use crate::process::host::Host;
use crate::process::modules::Modules;
use crate::process::root::Root;
use crate::sample::{ModuleId, Pid, RawFrame, Tid};
use crate::tree::places::Places;
use crate::tree::profile::{Frame, FrameId, FrameKind, Meta, ModuleMeta, Node, NodeId, PlaceId, Profile, Tick};
use crate::tree::raw::{RawNode, RawTick, RawTree};
use crate::tree::values::Value;

mod jit;
mod native;
mod perf_maps;
pub mod sources;
mod states;

pub use jit::JitPlaces;
use jit::{name_anonymous, trampoline_name};
pub use native::Owner;
use native::name_module;
pub use perf_maps::PerfMap;
use states::{Waits, time_values};

const LOW_LEVEL: &str = "<low-level>";
/// Source files that are opened.
const MAX_SOURCES: usize = 2000;

/// A frame and the line in it.
type Named = (FrameId, u32);

/// What was named so far, and the files that names come from. Kept, it makes naming again cost what is new only.
#[derive(Default)]
pub struct Names {
    frames: Frames,
    /// Each raw frame as the functions it stands for, outermost (not inlined) first.
    named: FxHashMap<RawFrame, Vec<Named>>,
    /// Those of them whose name is not known.
    unnamed: FxHashSet<RawFrame>,
    /// Those of them that CPython made to show a Python function to profilers, by the name that it gave them.
    trampolines: FxHashMap<RawFrame, Arc<str>>,
    files: FxHashMap<ModuleId, Result<symbolize::Module, String>>,
    /// Rows of code without a file, by process.
    anonymous: FxHashMap<Pid, ModuleMeta>,
    kernel: Option<Option<Kernel>>,
}

impl Names {
    /// Frames named so far.
    pub fn len(&self) -> usize {
        self.named.len()
    }

    pub fn is_empty(&self) -> bool {
        self.named.is_empty()
    }

    /// Forgets the frames; files stay open.
    pub fn clear(&mut self) {
        (self.frames, self.named, self.anonymous) = Default::default();
        (self.unnamed, self.trampolines) = Default::default();
    }
}

#[derive(Default)]
struct Frames {
    all: Vec<Frame>,
    ids: FxHashMap<Frame, FrameId>,
}

impl Frames {
    fn id(&mut self, f: Frame) -> FrameId {
        *self.ids.entry(f).or_insert_with_key(|f| {
            self.all.push(f.clone());
            self.all.len() as FrameId - 1
        })
    }
}

fn frame(kind: FrameKind, name: impl Into<String>) -> Frame {
    let filename = match kind {
        FrameKind::Root | FrameKind::Process | FrameKind::Thread => "",
        _ => LOW_LEVEL,
    };
    Frame {
        kind,
        name: name.into(),
        qualname: String::new(),
        filename: filename.into(),
        first_line: 0,
        address: 0,
        module: String::new(),
        source: String::new(),
    }
}

/// What naming reads besides the modules, opened while there are rights to (modules are open since they were mapped).
#[derive(Default)]
pub struct Opened {
    /// Where the first process finds its files; held since that process was first seen.
    pub root: Option<Root>,
    /// Python source files of that process by their paths; `None`: it could not be opened.
    pub sources: BTreeMap<String, Option<File>>,
    /// Text of `/proc/kallsyms`, if there are kernel frames.
    pub kernel: Option<String>,
    /// Perf maps of processes that have made code.
    pub perf_maps: BTreeMap<Pid, PerfMap>,
}

impl Opened {
    /// Opens what this tree's frames speak of. Nothing is read but the kernel's own table.
    pub fn open(&mut self, host: &dyn Host, codes: &CodeTable, tree: &RawTree) {
        let mut kernel = false;
        for (_, raw, _) in tree.nodes() {
            match raw {
                Some(RawFrame::Kernel(_)) => kernel = true,
                Some(RawFrame::Python { code, .. }) if self.sources.len() < MAX_SOURCES => {
                    let path = &codes.get(*code).filename;
                    if path.starts_with('/') && !self.sources.contains_key(path) {
                        let file = self.root.as_ref().and_then(|root| root.open(path));
                        self.sources.insert(path.clone(), file);
                    }
                }
                _ => {}
            }
        }
        if kernel && self.kernel.is_none() {
            self.kernel = host.kernel_symbols();
        }
    }
}

/// What is to be named, lent by the session that gathered it.
pub struct Gathered<'a> {
    pub opened: &'a Opened,
    pub modules: &'a Modules,
    pub codes: &'a CodeTable,
    pub tree: &'a RawTree,
    pub timeline: &'a [RawTick],
    /// Samples have a time of their own to represent.
    pub weighted: bool,
    pub threads: &'a BTreeMap<(Pid, Tid), String>,
    /// Interpreters, in words.
    pub pythons: &'a BTreeMap<Pid, String>,
    /// Start of the function around an address, by the unwind tables: svma in a file, avma in a process's own code.
    pub function_start: &'a mut dyn FnMut(Owner, u64) -> Option<u64>,
    /// What names code of a process that is in no file.
    pub jit: &'a dyn Fn(Pid) -> Option<JitPlaces>,
    /// Who is asked for debug information that is not on this machine.
    pub fetch: Option<Fetch>,
}

/// Debug information by build id; the reason if it is not to be had.
pub type Fetch = Arc<dyn Fn(&[u8]) -> Result<File, String> + Send + Sync>;

/// Names everything gathered. `meta` comes filled but for the modules and threads.
pub fn resolve(mut gathered: Gathered<'_>, start: u64, meta: Meta) -> Profile {
    let mut names = Names::default();
    let mut profile = profile(&mut names, &mut gathered, start, meta);
    profile.frames = names.frames.all;
    let opened = gathered.opened;
    sources::add(&mut profile, &mut |path| match opened.sources.get(path) {
        Some(file) => file.as_ref()?.try_clone().ok(),
        None => opened.root.as_ref()?.open(path),
    });
    profile
}

/// The same, again and again while more is gathered: names what is new. Source files are not read.
pub fn resolve_next(names: &mut Names, mut gathered: Gathered<'_>, start: u64, meta: Meta) -> Profile {
    let mut profile = profile(names, &mut gathered, start, meta);
    profile.frames.clone_from(&names.frames.all);
    profile
}

/// Without frames: they are those of `names`.
fn profile(names: &mut Names, gathered: &mut Gathered<'_>, start: u64, mut meta: Meta) -> Profile {
    names.frames.id(frame(FrameKind::Root, "root"));
    let inclusive = inclusive_counts(gathered.tree);
    name_all(gathered, names, &inclusive, &mut meta.modules);
    let waits = gathered.weighted.then(|| Waits::new(&mut names.frames));
    let (named, frames) = (&names.named, &names.frames.all);
    meta.threads = gathered
        .threads
        .iter()
        .map(|((pid, tid), name)| (*pid, *tid, name.clone()))
        .collect();
    if let Some(python) = gathered.pythons.values().next() {
        meta.python = python.clone();
    }

    let mut nodes = vec![Node::new(0, 0)];
    let mut children: FxHashMap<(NodeId, FrameId), NodeId> = FxHashMap::default();
    let mut folded = Folded::new(gathered, &names.trampolines, &inclusive);
    let mut places = Places::default();
    // By raw node, where its stack ends.
    let mut ends: Vec<(NodeId, PlaceId)> = Vec::with_capacity(gathered.tree.nodes().len());
    for (i, (parent, raw, own)) in gathered.tree.nodes().iter().enumerate() {
        let Some(raw) = raw else {
            ends.push((0, 0));
            nodes[0].count = inclusive[i];
            continue;
        };
        let (mut at, mut place) = ends[*parent as usize];
        let mut count = inclusive[i];
        if let Some(trampoline) = folded.trampolines.get_mut(&(i as RawNode)) {
            trampoline.caller = (at, place);
            count = trampoline.left;
            if count == 0 {
                ends.push((at, place));
                continue;
            }
        } else if folded.functions.contains(&(i as RawNode)) {
            (at, place) = folded
                .trampolines
                .get(parent)
                .map_or((at, place), |trampoline| trampoline.caller);
        }
        for (frame, line) in &named[raw] {
            let frame = &waits
                .as_ref()
                .map_or(*frame, |w| w.refined(raw, frames, &nodes, at, *frame));
            at = *children.entry((at, *frame)).or_insert_with(|| {
                nodes.push(Node {
                    first_seen_line: *line,
                    ..Node::new(*frame, at)
                });
                nodes.len() as NodeId - 1
            });
            place = places.child(place, at, *line);
            let n = &mut nodes[at as usize];
            n.count += count;
            if *line > 0 {
                *n.lines.entry(*line).or_default() += count;
                if n.first_seen_line == 0 {
                    n.first_seen_line = *line;
                }
            }
        }
        if let Some((_, line)) = named[raw].last()
            && *line > 0
            && *own > 0
        {
            *nodes[at as usize].self_lines.entry(*line).or_default() += own;
        }
        ends.push((at, place));
    }
    for n in &mut nodes {
        if n.self_lines == n.lines {
            n.self_lines = BTreeMap::new();
        }
    }
    let values = match gathered.weighted {
        false => Value::of_sampling(&meta.event, meta.rate),
        true => time_values(gathered, &nodes, &ends),
    };
    let ticks = gathered.timeline.iter();
    let timeline = ticks
        .map(|t| Tick {
            time: t.time.saturating_sub(start),
            pid: t.pid,
            tid: t.tid,
            node: ends[t.node as usize].0,
        })
        .collect();
    let tick_places = gathered.timeline.iter().map(|t| ends[t.node as usize].1).collect();
    Profile {
        meta,
        frames: Vec::new(),
        nodes,
        timeline,
        excerpts: Vec::new(),
        places: places.all,
        tick_places,
        values,
    }
}

/// Trampolines of CPython, which stand around a Python function's own frame (`-X perf`), and what is left of them without
/// it: the function is shown once.
#[derive(Default)]
struct Folded {
    trampolines: FxHashMap<RawNode, Trampoline>,
    /// Python frames whose trampoline is left out.
    functions: FxHashSet<RawNode>,
}

struct Trampoline {
    name: Arc<str>,
    /// Samples that are not in the Python function's own frame: a call that is being entered or left.
    left: u64,
    /// The node that calls it, and its place.
    caller: (NodeId, PlaceId),
}

impl Folded {
    fn new(gathered: &Gathered<'_>, known: &FxHashMap<RawFrame, Arc<str>>, inclusive: &[u64]) -> Folded {
        let mut folded = Folded::default();
        if known.is_empty() {
            return folded;
        }
        for (i, ((parent, raw, _), count)) in (0..).zip(gathered.tree.nodes().iter().zip(inclusive)) {
            let Some(raw) = raw else { continue };
            if let Some(name) = known.get(raw) {
                let trampoline = Trampoline {
                    name: name.clone(),
                    left: *count,
                    caller: (0, 0),
                };
                folded.trampolines.insert(i, trampoline);
            } else if let RawFrame::Python { code, .. } = raw
                && let Some(trampoline) = folded.trampolines.get_mut(parent)
            {
                let c = gathered.codes.get(*code);
                if *trampoline.name == *trampoline_name(&c.qualname, &c.filename) {
                    trampoline.left = trampoline.left.saturating_sub(*count);
                    folded.functions.insert(i);
                }
            }
        }
        folded
    }
}

/// Samples at and below each raw node.
fn inclusive_counts(tree: &RawTree) -> Vec<u64> {
    let nodes = tree.nodes();
    let mut counts: Vec<u64> = nodes.iter().map(|n| n.2).collect();
    for i in (1..nodes.len()).rev() {
        counts[nodes[i].0 as usize] += counts[i];
    }
    counts
}

/// Names the raw frames that have no name yet.
fn name_all(gathered: &mut Gathered<'_>, names: &mut Names, inclusive: &[u64], modules: &mut Vec<ModuleMeta>) {
    let mut native: BTreeMap<Owner, BTreeMap<u64, u64>> = BTreeMap::new();
    let raw: Vec<_> = gathered.tree.nodes().iter().map(|n| n.1).collect();
    for (raw, count) in raw.iter().zip(inclusive) {
        let Some(raw) = raw else { continue };
        let at = match *raw {
            RawFrame::Native { module, svma } => Some((Owner::File(module), svma)),
            RawFrame::Anonymous { pid, avma } => Some((Owner::Anonymous(pid), avma)),
            _ => None,
        };
        if let Some((owner, address)) = at {
            *native.entry(owner).or_default().entry(address).or_default() += count;
            continue;
        }
        if names.named.contains_key(raw) {
            continue;
        }
        let (f, line) = match *raw {
            RawFrame::Process(pid) => (frame(FrameKind::Process, process_name(gathered, pid)), 0),
            RawFrame::Thread(tid) => (frame(FrameKind::Thread, thread_name(gathered, tid)), 0),
            RawFrame::Python { code, instr } => {
                let c = gathered.codes.get(code);
                (python_frame(c), c.line(instr).unwrap_or(0))
            }
            RawFrame::Kernel(address) => (kernel_frame(&mut names.kernel, gathered.opened, address), 0),
            RawFrame::Origin(origin) => (frame(FrameKind::Native, origin.name()), 0),
            RawFrame::State(state) => (frame(FrameKind::State, state.label()), 0),
            RawFrame::Cut(why) => (frame(FrameKind::Cut, format!("[cut: {}]", why.reason())), 0),
            RawFrame::Native { .. } | RawFrame::Anonymous { .. } => continue,
        };
        let id = names.frames.id(f);
        names.named.insert(*raw, vec![(id, line)]);
    }
    let samples = native::samples(gathered.tree, inclusive);
    for (owner, addresses) in native {
        let row = match owner {
            Owner::File(id) => name_module(gathered, names, id, &addresses),
            Owner::Anonymous(pid) => name_anonymous(gathered, names, pid, &addresses),
        };
        modules.push(ModuleMeta {
            samples: samples.get(&owner).copied().unwrap_or(0),
            ..row
        });
    }
    modules.sort_by(|a, b| (b.samples, &a.path).cmp(&(a.samples, &b.path)));
}

fn python_frame(c: &Code) -> Frame {
    Frame {
        qualname: c.qualname.clone(),
        filename: c.filename.clone(),
        first_line: c.first_line,
        ..frame(FrameKind::Python, c.name.clone())
    }
}

fn process_name(gathered: &Gathered<'_>, pid: Pid) -> String {
    match gathered.threads.get(&(pid, pid)) {
        Some(name) if !name.is_empty() => format!("process {pid} ({name})"),
        _ => format!("process {pid}"),
    }
}

fn thread_name(gathered: &Gathered<'_>, tid: u32) -> String {
    match gathered.threads.iter().find(|((_, t), _)| *t == tid) {
        Some((_, name)) if !name.is_empty() => format!("thread {tid} ({name})"),
        _ => format!("thread {tid}"),
    }
}

fn kernel_frame(kernel: &mut Option<Option<Kernel>>, opened: &Opened, address: u64) -> Frame {
    let table = kernel.get_or_insert_with(|| Kernel::parse(opened.kernel.as_ref()?).ok());
    match table.as_ref().and_then(|k| k.lookup(address)) {
        Some(s) => {
            let module = s.module.map_or("[kernel]".to_string(), |m| format!("[{m}]"));
            Frame {
                address: s.start,
                module,
                ..frame(FrameKind::Kernel, s.name)
            }
        }
        None => Frame {
            address,
            module: "[kernel]".into(),
            ..frame(FrameKind::Kernel, "[unknown]")
        },
    }
}
