//! Raw tree to [`Profile`]: names each distinct frame once, in one pass, when sampling is over.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;

use rustc_hash::FxHashMap;
use symbolize::{Kernel, Symbol};

use crate::interp::code::CodeTable;
use crate::process::content::Content;
use crate::process::host::Host;
use crate::process::modules::Modules;
use crate::process::root::Root;
use crate::sample::{ModuleId, Pid, RawFrame, Tid};
use crate::tree::profile::{Frame, FrameId, FrameKind, Meta, ModuleMeta, Node, NodeId, Profile, Tick};
use crate::tree::raw::{RawTick, RawTree};

const LOW_LEVEL: &str = "<low-level>";
/// Source files that are opened.
const MAX_SOURCES: usize = 2000;
/// Bytes of one that are read.
const MAX_SOURCE: u64 = 8 << 20;

/// A frame and the line in it.
type Named = (FrameId, u32);

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
    pub threads: &'a BTreeMap<(Pid, Tid), String>,
    /// Interpreters, in words.
    pub pythons: &'a BTreeMap<Pid, String>,
    /// Start (svma) of the function around an svma, from the unwind tables.
    pub function_start: &'a mut dyn FnMut(ModuleId, u64) -> Option<u64>,
}

/// Names everything gathered. `meta` comes filled but for the modules and threads.
pub fn resolve(mut gathered: Gathered<'_>, start: u64, mut meta: Meta) -> Profile {
    let mut frames = Frames::default();
    frames.id(frame(FrameKind::Root, "root"));
    let inclusive = inclusive_counts(gathered.tree);
    let named = name_all(&mut gathered, &mut frames, &inclusive, &mut meta.modules);
    meta.threads = gathered
        .threads
        .iter()
        .map(|((pid, tid), name)| (*pid, *tid, name.clone()))
        .collect();
    if let Some(python) = gathered.pythons.values().next() {
        meta.python = python.clone();
    }

    let mut nodes = vec![node(0, 0)];
    let mut children: FxHashMap<(NodeId, FrameId), NodeId> = FxHashMap::default();
    let mut place: Vec<NodeId> = Vec::with_capacity(gathered.tree.nodes().len());
    for (i, (parent, raw, _)) in gathered.tree.nodes().iter().enumerate() {
        let Some(raw) = raw else {
            place.push(0);
            nodes[0].count = inclusive[i];
            continue;
        };
        let mut at = place[*parent as usize];
        for (frame, line) in &named[raw] {
            at = *children.entry((at, *frame)).or_insert_with(|| {
                nodes.push(Node {
                    first_seen_line: *line,
                    ..node(*frame, at)
                });
                nodes.len() as NodeId - 1
            });
            let n = &mut nodes[at as usize];
            n.count += inclusive[i];
            if *line > 0 {
                *n.lines.entry(*line).or_default() += inclusive[i];
                if n.first_seen_line == 0 {
                    n.first_seen_line = *line;
                }
            }
        }
        place.push(at);
    }
    let ticks = gathered.timeline.iter();
    let timeline = ticks
        .map(|t| Tick {
            time: t.time.saturating_sub(start),
            pid: t.pid,
            tid: t.tid,
            node: place[t.node as usize],
        })
        .collect();
    let mut profile = Profile {
        meta,
        frames: frames.all,
        nodes,
        timeline,
    };
    add_source_lines(&mut profile, gathered.opened);
    profile
}

fn node(frame: FrameId, parent: NodeId) -> Node {
    Node {
        frame,
        parent,
        count: 0,
        lines: BTreeMap::new(),
        line_text: String::new(),
        first_seen_line: 0,
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

/// Each distinct raw frame as the functions it stands for, outermost (not inlined) first.
fn name_all(
    gathered: &mut Gathered<'_>,
    frames: &mut Frames,
    inclusive: &[u64],
    modules: &mut Vec<ModuleMeta>,
) -> FxHashMap<RawFrame, Vec<Named>> {
    let mut named = FxHashMap::default();
    let mut native: BTreeMap<ModuleId, BTreeMap<u64, u64>> = BTreeMap::new();
    let mut kernel = None;
    let raw: Vec<_> = gathered.tree.nodes().iter().map(|n| n.1).collect();
    for (raw, count) in raw.iter().zip(inclusive) {
        let Some(raw) = raw else { continue };
        if let RawFrame::Native { module, svma } = raw {
            *native.entry(*module).or_default().entry(*svma).or_default() += count;
            continue;
        }
        if named.contains_key(raw) {
            continue;
        }
        let (f, line) = match *raw {
            RawFrame::Process(pid) => (frame(FrameKind::Process, process_name(gathered, pid)), 0),
            RawFrame::Thread(tid) => (frame(FrameKind::Thread, thread_name(gathered, tid)), 0),
            RawFrame::Python { code, instr } => {
                let c = gathered.codes.get(code);
                let line = c.line(instr).unwrap_or(0);
                let f = Frame {
                    qualname: c.qualname.clone(),
                    filename: c.filename.clone(),
                    first_line: c.first_line,
                    ..frame(FrameKind::Python, c.name.clone())
                };
                (f, line)
            }
            RawFrame::Kernel(address) => (kernel_frame(&mut kernel, gathered.opened, address), 0),
            RawFrame::Anonymous { avma, .. } => (
                Frame {
                    address: avma,
                    ..frame(FrameKind::Unknown, "[unknown]")
                },
                0,
            ),
            RawFrame::Cut(why) => (frame(FrameKind::Cut, format!("[cut: {}]", why.reason())), 0),
            RawFrame::Native { .. } => continue,
        };
        let id = frames.id(f);
        named.insert(*raw, vec![(id, line)]);
    }
    for (id, svmas) in native {
        name_module(gathered, frames, id, &svmas, modules, &mut named);
    }
    named
}

fn name_module(
    gathered: &mut Gathered<'_>,
    frames: &mut Frames,
    id: ModuleId,
    svmas: &BTreeMap<u64, u64>,
    modules: &mut Vec<ModuleMeta>,
    named: &mut FxHashMap<RawFrame, Vec<Named>>,
) {
    let module = gathered.modules.get(id).clone();
    let name = module.name();
    let opened = match &module.content {
        Content::File(f) => f
            .try_clone()
            .map_err(|e| e.to_string())
            .and_then(|f| symbolize::Module::from_file(f).map_err(|e| e.to_string())),
        Content::Bytes(b) => symbolize::Module::from_bytes(b.to_vec()).map_err(|e| e.to_string()),
        Content::Missing => Err("the file could not be opened".into()),
    };
    let sorted: Vec<u64> = svmas.keys().copied().collect();
    let (found, sources) = match opened {
        Ok(mut m) => {
            let found = m.lookup_many(&sorted);
            (
                found.into_iter().map(Result::unwrap_or_default).collect(),
                sources_text(&m),
            )
        }
        Err(why) => (vec![Vec::new(); sorted.len()], format!("none: {why}")),
    };
    for (svma, symbols) in sorted.iter().zip(found) {
        let symbols: Vec<Symbol> = symbols;
        let mut stack: Vec<Named> = Vec::new();
        for s in symbols.iter().rev() {
            let kind = if s.inlined {
                FrameKind::Inlined
            } else {
                FrameKind::Native
            };
            let f = Frame {
                address: s.start,
                module: name.clone(),
                source: s.file.as_deref().unwrap_or("").to_string(),
                ..frame(kind, s.name.to_string())
            };
            stack.push((frames.id(f), s.line.unwrap_or(0)));
        }
        if stack.is_empty() {
            // Without a name the unwind tables still tell where the function starts.
            let address = (gathered.function_start)(id, *svma).unwrap_or(*svma);
            let f = Frame {
                address,
                module: name.clone(),
                ..frame(FrameKind::Unknown, "[unknown]")
            };
            stack.push((frames.id(f), 0));
        }
        named.insert(
            RawFrame::Native {
                module: id,
                svma: *svma,
            },
            stack,
        );
    }
    modules.push(ModuleMeta {
        path: String::from_utf8_lossy(&module.path).into_owned(),
        build_id: module.build_id.iter().map(|b| format!("{b:02x}")).collect(),
        names: sources,
        frames: svmas.values().sum(),
    });
}

/// Where names came from, in words.
fn sources_text(m: &symbolize::Module) -> String {
    let s = m.sources();
    let kinds = [
        (s.dwarf, "DWARF"),
        (s.symtab, "symbols"),
        (s.dynsym && !s.symtab, "exported symbols"),
    ];
    let mut text: Vec<_> = kinds
        .iter()
        .filter(|(has, _)| *has)
        .map(|(_, name)| name.to_string())
        .collect();
    text.extend(m.dwarf_error().map(|e| format!("DWARF unreadable: {e}")));
    if text.is_empty() {
        "none: no symbols in the file".into()
    } else {
        text.join(", ")
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

/// The text of the first line seen at each Python place, as Dask's tree has it.
fn add_source_lines(profile: &mut Profile, opened: &Opened) {
    let mut files: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (i, n) in profile.nodes.iter().enumerate() {
        let f = &profile.frames[n.frame as usize];
        if f.kind == FrameKind::Python && n.first_seen_line > 0 && f.filename.starts_with('/') {
            files.entry(&f.filename).or_default().push(i);
        }
    }
    let mut texts = Vec::new();
    for (path, wanted) in files {
        let mut text = Vec::new();
        let Some(Some(file)) = opened.sources.get(path) else {
            continue;
        };
        if file.take(MAX_SOURCE).read_to_end(&mut text).is_err() {
            continue;
        }
        let lines: Vec<_> = text.split(|c| *c == b'\n').collect();
        for i in wanted {
            let line = profile.nodes[i].first_seen_line as usize - 1;
            texts.extend(
                lines
                    .get(line)
                    .map(|text| (i, String::from_utf8_lossy(text).trim().to_string())),
            );
        }
    }
    for (i, text) in texts {
        profile.nodes[i].line_text = text;
    }
}
