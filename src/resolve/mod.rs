//! Turns the raw tree into a [`Profile`]: names each distinct frame once, in one pass, after sampling.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use symbolize::Kernel;

use crate::counts::{RawLag, RawMemory};
use crate::counts::{RawNode, RawTimelineSample, RawTree};
use crate::counts::{RawWaits, RawWaker};
use crate::cpython::code_object::{Code, CodeTable};
use crate::cpython::thread_names::both_names;
use crate::event::{Pid, Tid};
use crate::frame::{ModuleId, RawFrame};
use crate::process::modules::Modules;
use crate::process::system::System;
use crate::profile::labels::{LabelSet, Labels};
use crate::profile::measure::Measure;
use crate::profile::model::{
    Frame, FrameId, FrameKind, Meta, ModuleMeta, Node, NodeId, PlaceId, Profile, TimelineSample, limit_instructions,
};
use crate::profile::places::Places;
use crate::profile::sums::sum_upwards;

pub mod assembly;
mod futex_waits;
mod jit;
pub mod naming;
mod perf_maps;
mod source_files;
pub mod source_lines;
mod states;
mod symbols;
mod variables;

use futex_waits::FutexWaits;
pub use jit::JitSources;
use jit::{name_anonymous, trampoline_name};
use naming::NamingProcess;
pub use perf_maps::PerfMap;
pub use source_files::SourceFiles;
use states::{event_values, memory_values, time_values};
pub use symbols::Owner;
use symbols::{kernel_frame, name_module};
use variables::VariableText;

/// A frame and the line in it.
type ResolvedFrame = (FrameId, u32);

/// Names resolved so far, and the files that they come from. If kept, resolving again costs only what is new.
#[derive(Default)]
pub struct NameCache {
    frames: FrameTable,
    /// Each raw frame as the functions it represents, outermost (not inlined) first.
    named: FxHashMap<RawFrame, Vec<ResolvedFrame>>,
    /// Those of them without a name.
    unnamed: FxHashSet<RawFrame>,
    /// Those of them that are CPython's trampolines, which show a Python function to profilers, by their names.
    trampolines: FxHashMap<RawFrame, Arc<str>>,
    /// Files that are read in this process.
    files: FxHashMap<ModuleId, Result<symbolize::Module, String>>,
    /// Variables that threads waited for, by address (svma).
    variables: FxHashMap<(ModuleId, u64), VariableText>,
    /// Where the names of each file come from, and what was missing.
    sources: FxHashMap<ModuleId, (String, String)>,
    /// Rows of JIT code, by process.
    anonymous: FxHashMap<Pid, ModuleMeta>,
    kernel: Option<Option<Kernel>>,
}

impl NameCache {
    /// Number of frames named so far.
    pub fn len(&self) -> usize {
        self.named.len()
    }

    pub fn is_empty(&self) -> bool {
        self.named.is_empty()
    }

    /// Drops the names of frames that are not `kept`, and what belongs to closed files or names something only while its process
    /// or thread runs: those numbers are used again. Returns how many names of frames.
    pub fn retain(&mut self, kept: &dyn Fn(&RawFrame) -> bool, modules: &Modules) -> usize {
        let is_kept = |raw: &RawFrame| {
            let lasts = match raw {
                RawFrame::Native { module, .. } => !modules.is_closed(*module),
                RawFrame::Python { .. } | RawFrame::Kernel(_) | RawFrame::Truncated(_) => true,
                _ => false,
            };
            lasts && kept(raw)
        };
        let before = self.named.len();
        self.named.retain(|raw, _| is_kept(raw));
        self.unnamed.retain(is_kept);
        self.trampolines.retain(|raw, _| is_kept(raw));
        self.files.retain(|id, _| !modules.is_closed(*id));
        self.variables.retain(|(id, _), _| !modules.is_closed(*id));
        self.sources.retain(|id, _| !modules.is_closed(*id));
        self.anonymous.clear();
        let dropped = before - self.named.len();
        if dropped > 0 {
            self.frames = self
                .frames
                .of_those(self.named.values_mut().flatten().map(|(id, _)| id));
        }
        dropped
    }

    /// Number of different frames.
    pub fn frames(&self) -> usize {
        self.frames.all.len()
    }

    /// Drops the frames; files stay open.
    pub fn clear(&mut self) {
        (self.frames, self.named, self.anonymous) = Default::default();
        (self.unnamed, self.trampolines) = Default::default();
    }
}

#[derive(Default)]
struct FrameTable {
    all: Vec<Frame>,
    /// Names come from the target: a hasher that resists collision attacks.
    ids: HashMap<Frame, FrameId>,
}

impl FrameTable {
    /// A table of the frames with these numbers, which become those in it.
    fn of_those<'a>(&self, ids: impl Iterator<Item = &'a mut FrameId>) -> FrameTable {
        let mut table = FrameTable::default();
        table.id(Frame::new(FrameKind::Root, "root"));
        let mut new: FxHashMap<FrameId, FrameId> = FxHashMap::default();
        for id in ids {
            let frame = self.all.get(*id as usize);
            *id = *new
                .entry(*id)
                .or_insert_with(|| frame.map_or(0, |frame| table.id(frame.clone())));
        }
        table
    }

    fn id(&mut self, f: Frame) -> FrameId {
        *self.ids.entry(f).or_insert_with_key(|f| {
            self.all.push(f.clone());
            self.all.len() as FrameId - 1
        })
    }
}

/// What naming reads in addition to the modules, opened while privileges permit it (modules are open since they were mapped).
#[derive(Default)]
pub struct OpenFiles {
    /// Root directories of processes and source files.
    pub sources: SourceFiles,
    /// Text of `/proc/kallsyms`, if there are kernel frames.
    pub kernel: Option<String>,
    /// Perf maps of processes with JIT code.
    pub perf_maps: BTreeMap<Pid, PerfMap>,
}

impl OpenFiles {
    /// Opens the files that this tree's frames refer to. Nothing is read except the kernel's symbol table.
    pub fn open(&mut self, system: &dyn System, codes: &CodeTable, tree: &RawTree) {
        self.open_kernel(system, tree);
        // By node: the process that its stack belongs to, where stacks are grouped by process.
        let mut processes: Vec<Option<Pid>> = Vec::with_capacity(tree.nodes().len());
        for (parent, raw, _) in tree.nodes() {
            let above = processes.get(*parent as usize).copied().flatten();
            processes.push(match raw {
                Some(RawFrame::Process(pid)) => Some(*pid),
                _ => above,
            });
            if let Some(RawFrame::Python { code, .. }) = raw {
                self.sources.open_python(above, &codes.get(*code).filename);
            }
        }
    }

    /// Reads the kernel's symbol table if the tree has frames of it.
    pub fn open_kernel(&mut self, system: &dyn System, tree: &RawTree) {
        let is_kernel = |raw: &Option<RawFrame>| matches!(raw, Some(RawFrame::Kernel(_)));
        if self.kernel.is_none() && tree.nodes().iter().any(|(_, raw, _)| is_kernel(raw)) {
            self.kernel = system.kernel_symbols();
        }
    }
}

/// Input of symbolization, borrowed from the session.
pub struct ResolveInput<'a> {
    pub open_files: &'a OpenFiles,
    pub modules: &'a Modules,
    pub codes: &'a CodeTable,
    /// Names of tasks, by their number.
    pub task_names: &'a [String],
    /// Names of the other ends of sockets, by their number.
    pub socket_names: &'a [String],
    /// Futexes in the data of files, by their number: file and svma.
    pub futexes: &'a [(ModuleId, u64)],
    pub tree: &'a RawTree,
    pub timeline: &'a [RawTimelineSample],
    /// Sets of labels, by the numbers in the timeline.
    pub label_sets: &'a [LabelSet],
    pub measure: Measure,
    /// What is known of intervals off the CPU, with the threads that ended them.
    pub waits: Option<(&'a RawWaits, &'a [RawWaker])>,
    /// What samples of resident memory are of; empty where none is sampled.
    pub memory: &'a [RawMemory],
    /// What kept event loops for long.
    pub lags: &'a [RawLag],
    pub threads: &'a BTreeMap<(Pid, Tid), String>,
    /// Names that threads have in Python, as far as known.
    pub python_threads: &'a BTreeMap<(Pid, Tid), String>,
    /// Interpreters, as text.
    pub pythons: &'a BTreeMap<Pid, String>,
    /// Start of the function around an address, by the unwind tables: svma in a file, avma in a process's JIT code.
    pub function_start: &'a mut dyn FnMut(Owner, u64) -> Option<u64>,
    /// What names JIT code of a process.
    pub jit: &'a dyn Fn(Pid) -> Option<JitSources>,
    /// Downloads debug information that is not on this machine.
    pub fetch: Option<Fetch>,
    /// Reads the names in files. Without it, they are read in this process.
    pub naming: Option<&'a mut NamingProcess>,
}

/// Debug information by build id; the reason if it is not available.
pub type Fetch = Arc<dyn Fn(&[u8]) -> Result<File, String> + Send + Sync>;

/// Names all frames. `meta` is complete except for modules and threads.
pub fn resolve(mut input: ResolveInput<'_>, start: u64, meta: Meta) -> Profile {
    let mut names = NameCache::default();
    let mut profile = profile(&mut names, &mut input, start, meta);
    profile.frames = names.frames.all;
    let open_files = input.open_files;
    source_lines::add(&mut profile, &mut |path| open_files.sources.get(path));
    profile
}

/// The same for repeated calls with growing data: names what is new. Source files are not read.
pub fn resolve_incremental(names: &mut NameCache, mut input: ResolveInput<'_>, start: u64, meta: Meta) -> Profile {
    let mut profile = profile(names, &mut input, start, meta);
    profile.frames.clone_from(&names.frames.all);
    profile
}

/// Without frames: they are those of `names`.
fn profile(names: &mut NameCache, input: &mut ResolveInput<'_>, start: u64, mut meta: Meta) -> Profile {
    names.frames.id(Frame::new(FrameKind::Root, "root"));
    let inclusive = inclusive_counts(input.tree);
    name_all(input, names, &inclusive, &mut meta.modules);
    let variables = variables::texts(input, names);
    let waits = input
        .measure
        .is_time()
        .then(|| FutexWaits::new(&mut names.frames, &variables));
    let (named, frames) = (&names.named, &names.frames.all);
    meta.threads = input
        .threads
        .iter()
        .map(|(thread, name)| (thread.0, thread.1, names_of(input, thread, name)))
        .collect();
    if let Some(python) = input.pythons.values().next() {
        meta.python = python.clone();
    }

    let mut nodes = vec![Node::new(0, 0)];
    let mut children: FxHashMap<(NodeId, FrameId), NodeId> = FxHashMap::default();
    let mut folded = Folded::new(input, &names.trampolines, &inclusive);
    let mut places = Places::default();
    // By raw node: the end of its stack.
    let mut ends: Vec<(NodeId, PlaceId)> = Vec::with_capacity(input.tree.nodes().len());
    for (i, (parent, raw, self_count)) in input.tree.nodes().iter().enumerate() {
        let Some(raw) = raw else {
            ends.push((0, 0));
            nodes[0].count = inclusive[i];
            continue;
        };
        let (mut at, mut place) = ends[*parent as usize];
        let mut count = inclusive[i];
        // Stacks of wakers are not part of the tree.
        if count == 0 {
            ends.push((at, place));
            continue;
        }
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
            && *self_count > 0
        {
            *nodes[at as usize].self_lines.entry(*line).or_default() += self_count;
        }
        ends.push((at, place));
    }
    for n in &mut nodes {
        if n.self_lines == n.lines {
            n.self_lines = BTreeMap::new();
        }
    }
    let values = if input.measure.is_time() {
        time_values(input, &nodes, &ends)
    } else if matches!(input.measure, Measure::Bytes(_)) {
        memory_values(input, &nodes, &ends)
    } else if input.measure == Measure::Event {
        event_values(input, &nodes, &ends, meta.event_alone())
    } else {
        input.measure.values()
    };
    let samples = input.timeline.iter();
    let timeline = samples
        .map(|t| TimelineSample {
            time: t.time.saturating_sub(start),
            pid: t.pid,
            tid: t.tid,
            node: ends[t.node as usize].0,
        })
        .collect();
    let waits = input
        .waits
        .filter(|(raw, _)| raw.lengths.len() == input.timeline.len())
        .map(|(raw, wakers)| states::waits(raw, wakers, input.tree, named, frames))
        .unwrap_or_default();
    meta.lags = states::lags(input.lags, input.tree, named, frames, start);
    let of_samples = input.timeline.iter().map(|t| t.labels).collect();
    let labels = Labels::new(input.label_sets, of_samples);
    let sample_places = input.timeline.iter().map(|t| ends[t.node as usize].1).collect();
    Profile {
        meta,
        frames: Vec::new(),
        nodes,
        timeline,
        excerpts: Vec::new(),
        assembly: Vec::new(),
        places: places.all,
        sample_places,
        values,
        waits,
        labels,
    }
}

/// Trampolines of CPython, which surround a Python function's own frame (`-X perf`), and what remains of them without
/// it: the function is shown once.
#[derive(Default)]
struct Folded {
    trampolines: FxHashMap<RawNode, Trampoline>,
    /// Python frames whose trampoline is left out.
    functions: FxHashSet<RawNode>,
}

struct Trampoline {
    name: Arc<str>,
    /// Samples outside of the Python function's own frame: a call that is being entered or left.
    left: u64,
    /// The calling node, and its place.
    caller: (NodeId, PlaceId),
}

impl Folded {
    fn new(input: &ResolveInput<'_>, known: &FxHashMap<RawFrame, Arc<str>>, inclusive: &[u64]) -> Folded {
        let mut folded = Folded::default();
        if known.is_empty() {
            return folded;
        }
        for (i, ((parent, raw, _), count)) in (0..).zip(input.tree.nodes().iter().zip(inclusive)) {
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
                let c = input.codes.get(*code);
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
    sum_upwards(&mut counts, |at| Some(nodes[at].0 as usize));
    counts
}

/// Names the raw frames that have no name yet.
fn name_all(input: &mut ResolveInput<'_>, names: &mut NameCache, inclusive: &[u64], modules: &mut Vec<ModuleMeta>) {
    let mut native: BTreeMap<Owner, BTreeMap<u64, u64>> = BTreeMap::new();
    let raw: Vec<_> = input.tree.nodes().iter().map(|n| n.1).collect();
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
            RawFrame::Process(pid) => (Frame::new(FrameKind::Process, process_name(input, pid)), 0),
            RawFrame::Thread(tid) => (Frame::new(FrameKind::Thread, thread_name(input, tid)), 0),
            RawFrame::Python { code, instr } => {
                let c = input.codes.get(code);
                (python_frame(c), c.line(instr).unwrap_or(0))
            }
            RawFrame::Kernel(address) => (kernel_frame(&mut names.kernel, input.open_files, address), 0),
            RawFrame::Task(id) => {
                let name = input.task_names.get(id.0 as usize).map_or("", |name| name);
                (Frame::new(FrameKind::Task, format!("[task: {name}]")), 0)
            }
            RawFrame::Worker(tid) => (Frame::new(FrameKind::Worker, worker_name(input, tid)), 0),
            RawFrame::Origin(origin) => (Frame::new(FrameKind::Native, origin.name()), 0),
            RawFrame::WokenBy(_, tid) => {
                let by = format!("[woken by: {}]", thread_name(input, tid));
                (Frame::new(FrameKind::State, by), 0)
            }
            RawFrame::Interrupt(kind) => {
                let by = format!("[woken by: {}]", kind.label());
                (Frame::new(FrameKind::State, by), 0)
            }
            RawFrame::State(state) => (Frame::new(FrameKind::State, state.label(input.socket_names)), 0),
            RawFrame::Awaiting(kind) => (Frame::new(FrameKind::State, kind.label()), 0),
            RawFrame::Truncated(why) => (
                Frame::new(FrameKind::Truncated, format!("[truncated: {}]", why.reason())),
                0,
            ),
            RawFrame::Native { .. } | RawFrame::Anonymous { .. } => continue,
        };
        let id = names.frames.id(f);
        names.named.insert(*raw, vec![(id, line)]);
    }
    let samples = symbols::samples(input.tree, inclusive);
    let mut instructions = symbols::instructions(input.tree);
    for (owner, addresses) in native {
        let row = match owner {
            Owner::File(id) => name_module(input, names, id, &addresses),
            Owner::Anonymous(pid) => name_anonymous(input, names, pid, &addresses),
        };
        modules.push(ModuleMeta {
            samples: samples.get(&owner).copied().unwrap_or(0),
            instructions: instructions.remove(&owner).unwrap_or_default(),
            ..row
        });
    }
    limit_instructions(modules);
    modules.sort_by(|a, b| (b.samples, &a.path).cmp(&(a.samples, &b.path)));
}

fn python_frame(c: &Code) -> Frame {
    Frame {
        qualname: c.qualname.clone(),
        filename: c.filename.clone(),
        first_line: c.first_line,
        ..Frame::new(FrameKind::Python, c.name.clone())
    }
}

fn process_name(input: &ResolveInput<'_>, pid: Pid) -> String {
    match input.threads.get(&(pid, pid)) {
        Some(name) if !name.is_empty() => format!("process {pid} ({name})"),
        _ => format!("process {pid}"),
    }
}

fn thread_name(input: &ResolveInput<'_>, tid: u32) -> String {
    match input.threads.iter().find(|((_, t), _)| *t == tid) {
        Some((thread, name)) => match names_of(input, thread, name) {
            names if names.is_empty() => format!("thread {tid}"),
            names => format!("thread {tid} ({names})"),
        },
        None => format!("thread {tid}"),
    }
}

/// Without the thread's number: what workers of one pool do for a function counts together.
fn worker_name(input: &ResolveInput<'_>, tid: u32) -> String {
    let thread = input.threads.iter().find(|((_, t), _)| *t == tid);
    match thread.map(|(thread, name)| names_of(input, thread, name)) {
        Some(name) if !name.is_empty() => format!("[worker thread {name}]"),
        _ => "[worker thread]".into(),
    }
}

/// A thread's name in Python, if it has one, and in the system.
fn names_of(input: &ResolveInput<'_>, thread: &(Pid, Tid), system: &str) -> String {
    match input.python_threads.get(thread) {
        Some(python) => both_names(python, system),
        None => system.to_string(),
    }
}
