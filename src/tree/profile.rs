//! The finished, named profile: what exporters read.

use std::collections::BTreeMap;

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

pub type FrameId = u32;
pub type NodeId = u32;

/// A place in the tree. Node 0 is the root; a parent always comes before its children.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub frame: FrameId,
    pub parent: NodeId,
    /// Samples here and below.
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
}

impl Profile {
    /// Samples that ended in each node, by its index. Nodes without a sound parent count for themselves alone.
    pub fn own_counts(&self) -> Vec<u64> {
        let mut own: Vec<u64> = self.nodes.iter().map(|node| node.count).collect();
        for (at, node) in self.nodes.iter().enumerate().skip(1) {
            if (node.parent as usize) < at {
                let parent = &mut own[node.parent as usize];
                *parent = parent.saturating_sub(node.count);
            }
        }
        own
    }
}
