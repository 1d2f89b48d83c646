//! The finished, named profile: what exporters read.

use std::collections::BTreeMap;

use super::values::Value;

/// What a frame of the tree stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FrameKind {
    Root,
    Process,
    Thread,
    Python,
    Native,
    /// A function that the compiler inlined into the native frame around it.
    Inlined,
    Kernel,
    /// Where a stack is incomplete; the name says why.
    Cut,
    /// What the thread does instead of running: `[runnable]`, `[waiting: gil]`.
    State,
    /// An address without a name.
    Unknown,
}

/// A function (never a line: lines are counted in the node).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    pub kind: FrameKind,
    /// `co_name` (Python), demangled name (native), `name_[k]` is *not* applied here.
    pub name: String,
    /// Python: class-qualified name where CPython has one (>= 3.11), else empty.
    pub qualname: String,
    /// Python: `co_filename`. Native, kernel, cut: `<low-level>`. Process, thread: empty.
    pub filename: String,
    /// Python: `co_firstlineno`; else 0.
    pub first_line: u32,
    /// Native: start of the function as its file states it (svma); kernel: its address; else 0.
    pub address: u64,
    /// Native: file name of the module without its folder; kernel: `[kernel]` or `[module]`; else empty.
    pub module: String,
    /// Native: source file if known, else empty.
    pub source: String,
}

impl Frame {
    /// A frame of which the name is known. Neither Python code nor, unless `module` and `address` follow, native code.
    pub fn new(kind: FrameKind, name: impl Into<String>) -> Frame {
        let filename = match kind {
            FrameKind::Root | FrameKind::Process | FrameKind::Thread | FrameKind::Python => "",
            _ => "<low-level>",
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

    /// A Python function: `co_name`, `co_qualname` (or empty), `co_filename`, `co_firstlineno`.
    pub fn python(
        name: impl Into<String>,
        qualname: impl Into<String>,
        filename: impl Into<String>,
        first_line: u32,
    ) -> Frame {
        Frame {
            qualname: qualname.into(),
            filename: filename.into(),
            first_line,
            ..Frame::new(FrameKind::Python, name)
        }
    }

    /// A native function: its name, the file name of its module, and where it starts in there (svma).
    pub fn native(name: impl Into<String>, module: impl Into<String>, address: u64) -> Frame {
        Frame {
            module: module.into(),
            address,
            ..Frame::new(FrameKind::Native, name)
        }
    }
}

pub type FrameId = u32;
pub type NodeId = u32;

/// A place in the tree. Node 0 is the root; a parent always comes before its children.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub frame: FrameId,
    pub parent: NodeId,
    /// Samples (or calls, or what else [`Profile::values`] has first) here and below.
    pub count: u64,
    /// Line last executed or calling -> samples (inclusive, like `count`); Python: line of the file; native: source line.
    pub lines: BTreeMap<u32, u64>,
    /// The same of the samples that ended here; empty where all did, see [`Node::own_lines`].
    pub self_lines: BTreeMap<u32, u64>,
    /// Text of one such line for the description (first seen), if it could be read; may be empty.
    pub line_text: String,
    /// The first line seen at this place; 0 when unknown.
    pub first_seen_line: u32,
}

impl Node {
    /// A node without samples.
    pub fn new(frame: FrameId, parent: NodeId) -> Node {
        Node {
            frame,
            parent,
            count: 0,
            lines: BTreeMap::new(),
            self_lines: BTreeMap::new(),
            line_text: String::new(),
            first_seen_line: 0,
        }
    }

    /// Line -> samples of those that ended here; `own` is how many did.
    pub fn own_lines(&self, own: u64) -> &BTreeMap<u32, u64> {
        if own == self.count {
            &self.lines
        } else {
            &self.self_lines
        }
    }
}

/// A sample in the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tick {
    /// ns since the start of the profile.
    pub time: u64,
    pub pid: u32,
    pub tid: u32,
    pub node: NodeId,
}

pub type PlaceId = u32;

/// Of a sample whose lines are not known, see [`Profile::tick_places`].
pub const NO_PLACE: PlaceId = PlaceId::MAX;

/// A line of a function as a stack came to it: nodes are functions, places are lines. Place 0 is that of the root; a
/// parent always comes before its children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The place that called, in the parent of `node`.
    pub parent: PlaceId,
    pub node: NodeId,
    /// 0: not known.
    pub line: u32,
}

impl Place {
    pub const ROOT: Place = Place {
        parent: 0,
        node: 0,
        line: 0,
    };
}

/// How good the profile is. Every sample is in exactly one of exact, repaired, partial and lost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quality {
    /// CPU time of the target times the rate: samples that a perfect sampler would have taken.
    pub asked: u64,
    /// Samples in the tree.
    pub taken: u64,
    pub exact: u64,
    /// Complete, but code analysis or a search stood in for missing unwind information.
    pub repaired: u64,
    pub partial: u64,
    pub lost: u64,
    /// Reason -> samples, of the partial ones.
    pub reasons: BTreeMap<String, u64>,
}

/// How long threads of the target were held for one sample each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub median_us: u64,
    pub longest_us: u64,
}

/// One of the profiles that were put together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Part {
    /// What it was called, say its file's name.
    pub name: String,
    pub command: String,
    pub rate: u64,
    /// As in [`Meta`].
    pub start: f64,
    pub duration: f64,
    pub samples: u64,
}

/// Facts about a recording.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Meta {
    pub version: String,
    /// Samples per second of CPU time of each thread; 0 if not known, or not the same for all.
    pub rate: u64,
    pub event: String,
    pub backend: String,
    /// Seconds since the Unix epoch.
    pub start: f64,
    /// Seconds.
    pub duration: f64,
    pub command: String,
    pub pid: u32,
    pub python: String,
    /// `None` where the backend holds no threads.
    pub held: Option<Held>,
    pub quality: Quality,
    /// Our own CPU time, seconds.
    pub own_cpu: f64,
    /// Most samples first.
    pub modules: Vec<ModuleMeta>,
    /// (pid, tid) -> thread name.
    pub threads: Vec<(u32, u32, String)>,
    /// Where several profiles were put together: which.
    pub parts: Vec<Part>,
}

/// A row of the table of files: where the names of its functions came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModuleMeta {
    pub path: String,
    /// In hexadecimal; may be empty.
    pub build_id: String,
    /// Where its names came from, in words; begins with `none` if it has none.
    pub names: String,
    /// What would have given more, and was not there or did not fit; empty if nothing is known to be missing.
    pub missing: String,
    /// Frames in it, over all samples.
    pub frames: u64,
    /// Those of them whose function has no name.
    pub unnamed: u64,
    /// Samples with at least one frame in it.
    pub samples: u64,
}

/// Lines of a source file around those that samples were in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Excerpt {
    /// As [`Frame::filename`] or [`Frame::source`] has it.
    pub path: String,
    /// Number and text, in order.
    pub lines: Vec<(u32, String)>,
}

/// A finished profile.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Profile {
    pub meta: Meta,
    pub frames: Vec<Frame>,
    pub nodes: Vec<Node>,
    pub timeline: Vec<Tick>,
    /// Of files that were at hand; the formats that are made for other programs leave them out.
    pub excerpts: Vec<Excerpt>,
    /// Stacks by line, as far as they are known; empty if they are not.
    pub places: Vec<Place>,
    /// By index in the timeline, the place where the sample's stack ends, or [`NO_PLACE`]. Empty if no place is known.
    pub tick_places: Vec<PlaceId>,
    /// What is measured, that of the counts first. Empty means samples alone: read it through [`Profile::value_types`].
    pub values: Vec<Value>,
}

impl Profile {
    /// Samples that ended in each node, by its index. Nodes without a sound parent count for themselves alone.
    pub fn own_counts(&self) -> Vec<u64> {
        self.own_of(self.nodes.iter().map(|node| node.count).collect())
    }
}
