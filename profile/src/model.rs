//! The finished, named profile: what exporters read.

use std::collections::BTreeMap;

use super::labels::Labels;
use super::lags::Lag;
use super::machine::Machine;
use super::memory_over_time::MemoryOverTime;
use super::resident::ResidentMemory;
use super::values::Value;
use super::waits::Waits;

/// Number of a process.
pub type Pid = u32;
/// Number of a thread.
pub type Tid = u32;

/// Kind of a frame of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FrameKind {
    /// The root of the tree.
    Root,
    /// A process.
    Process,
    /// A thread.
    Thread,
    /// A Python function.
    Python,
    /// A native function.
    Native,
    /// A function that the compiler inlined into the native frame around it.
    Inlined,
    /// A function of the operating system's kernel.
    Kernel,
    /// Where a stack is incomplete; the name says why.
    Truncated,
    /// A task, above the frames of its coroutine: `[task: NAME]`.
    Task,
    /// A native thread that works for the code above it, whose thread is another one: `[worker thread NAME]`.
    Worker,
    /// State of a thread that is not running: `[runnable]`, `[waiting: gil]`.
    State,
    /// An address without a symbol.
    Unknown,
}

impl FrameKind {
    /// Whether it is code that is not Python's: native, inlined into native code, without a symbol, or the kernel's.
    pub fn is_native(self) -> bool {
        matches!(
            self,
            FrameKind::Native | FrameKind::Inlined | FrameKind::Kernel | FrameKind::Unknown
        )
    }
}

/// A function (never a line: lines are counted in the node).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// What the frame is.
    pub kind: FrameKind,
    /// `co_name` (Python), demangled name (native), `name_[k]` is *not* applied here.
    pub name: String,
    /// Python: class-qualified name where CPython has one (>= 3.11), else empty. Task that represents several
    /// ([`crate::task_groups`]): the name with their number.
    pub qualname: String,
    /// Python: `co_filename`. Native, kernel, truncated: `<low-level>`. Process, thread: empty.
    pub filename: String,
    /// Python: `co_firstlineno`; else 0.
    pub first_line: u32,
    /// Native: start of the function as its file states it (svma); kernel: its address; else 0.
    pub address: u64,
    /// Native: file name of the module without its directory; kernel: `[kernel]` or `[module]`; else empty.
    pub module: String,
    /// Native: source file if known, else empty.
    pub source: String,
}

impl Frame {
    /// A frame with its name only; [`Frame::python`] and [`Frame::native`] set what else these kinds have.
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

    /// The name that people read: the qualified one where there is one.
    pub fn full_name(&self) -> &str {
        match self.kind {
            FrameKind::Python | FrameKind::Task if !self.qualname.is_empty() => &self.qualname,
            _ => &self.name,
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

/// Index of a frame in [`Profile::frames`].
pub type FrameId = u32;
/// Index of a node in [`Profile::nodes`].
pub type NodeId = u32;

/// A node of the tree. Node 0 is the root; a parent always comes before its children.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The function of the node.
    pub frame: FrameId,
    /// The calling node; the root is its own parent.
    pub parent: NodeId,
    /// Samples (or calls, or what else [`Profile::values`] has first) here and below.
    pub count: u64,
    /// Line last executed or calling -> samples (inclusive, like `count`); Python: line of the file; native: source
    /// line.
    pub lines: BTreeMap<u32, u64>,
    /// The same for self samples; empty if all samples are, see [`Node::self_lines_of`].
    pub self_lines: BTreeMap<u32, u64>,
    /// Text of one such line for the description (first seen), if it could be read; may be empty.
    pub line_text: String,
    /// The first line seen of this node; 0 if unknown.
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

    /// Line -> self samples; `self_count` is the number of self samples.
    pub fn self_lines_of(&self, self_count: u64) -> &BTreeMap<u32, u64> {
        if self_count == self.count {
            &self.lines
        } else {
            &self.self_lines
        }
    }
}

/// A sample in the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimelineSample {
    /// ns since the start of the profile.
    pub time: u64,
    /// The process of the sample's thread.
    pub pid: u32,
    /// The thread that was sampled.
    pub tid: u32,
    /// The innermost node of the sample's stack.
    pub node: NodeId,
}

/// Index of a place in [`Profile::places`].
pub type PlaceId = u32;

/// Place of a sample whose lines are unknown, see [`Profile::sample_places`].
pub const NO_PLACE: PlaceId = PlaceId::MAX;

/// A line of a function on a particular stack: nodes are functions, places are lines. Place 0 is the root's; a parent
/// always comes before its children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The calling place, in the parent of `node`.
    pub parent: PlaceId,
    /// The function's node.
    pub node: NodeId,
    /// 0: unknown.
    pub line: u32,
}

impl Place {
    /// The place of the root, the first one of every profile that has places.
    pub const ROOT: Place = Place {
        parent: 0,
        node: 0,
        line: 0,
    };
}

/// Quality of the profile. Every sample is in exactly one of exact, repaired, partial and lost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quality {
    /// CPU time of the target times the rate: samples that a perfect sampler would have taken.
    pub expected: u64,
    /// Samples in the tree.
    pub taken: u64,
    /// Samples with a stack from unwind tables and the interpreter's frames alone.
    pub exact: u64,
    /// Complete, with code analysis or a stack scan where unwind information is missing.
    pub repaired: u64,
    /// Samples whose stack is incomplete.
    pub partial: u64,
    /// Samples that were due and are missing.
    pub lost: u64,
    /// Reason -> samples, of the partial ones.
    pub reasons: BTreeMap<String, u64>,
}

impl Quality {
    /// Adds the numbers of other samples.
    pub fn add(&mut self, other: &Quality) {
        for (sum, more) in [
            (&mut self.expected, other.expected),
            (&mut self.taken, other.taken),
            (&mut self.exact, other.exact),
            (&mut self.repaired, other.repaired),
            (&mut self.partial, other.partial),
            (&mut self.lost, other.lost),
        ] {
            *sum = sum.saturating_add(more);
        }
        for (reason, samples) in &other.reasons {
            let sum = self.reasons.entry(reason.clone()).or_default();
            *sum = sum.saturating_add(*samples);
        }
    }
}

/// How long threads of the target were stopped per sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StopSummary {
    /// The median, microseconds.
    pub median_us: u64,
    /// The longest stop, microseconds.
    pub max_us: u64,
}

/// One of the recordings of a merged profile.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MergedRecording {
    /// Its name, such as that of its file.
    pub name: String,
    /// As in [`Meta`].
    pub command: String,
    /// As in [`Meta`].
    pub rate: u64,
    /// As in [`Meta`].
    pub start: f64,
    /// As in [`Meta`], seconds.
    pub duration: f64,
    /// Samples in its tree; calls, or what else its first value type is.
    pub samples: u64,
}

/// Metadata of a recording.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Meta {
    /// The version of nativeprof that made the recording.
    pub version: String,
    /// Samples per second of CPU time of each thread; 0 if unknown, or not the same for all.
    pub rate: u64,
    /// The event that was sampled, such as `cpu-clock`; empty if the recording names none.
    pub event: String,
    /// The name of the capture backend, such as `ebpf` or `ptrace`.
    pub backend: String,
    /// Seconds since the Unix epoch.
    pub start: f64,
    /// Seconds.
    pub duration: f64,
    /// The command line of the target.
    pub command: String,
    /// The process ID of the target.
    pub pid: u32,
    /// The version of the target's Python; empty if there is none.
    pub python: String,
    /// What it was recorded on, as far as that is known.
    pub machine: Machine,
    /// `None` if the backend does not stop threads.
    pub stopped: Option<StopSummary>,
    /// How complete the samples are.
    pub quality: Quality,
    /// CPU time of the target while it was sampled, seconds; 0 if the backend does not measure it.
    pub target_cpu: f64,
    /// CPU time of nativeprof, seconds.
    pub profiler_cpu: f64,
    /// The part of it that was used while samples were taken, without startup, symbolization and output; 0: not known.
    pub sampling_cpu: f64,
    /// Most samples first.
    pub modules: Vec<ModuleMeta>,
    /// (pid, tid) -> thread name.
    pub threads: Vec<(u32, u32, String)>,
    /// In a merged profile: the merged recordings.
    pub merged_from: Vec<MergedRecording>,
    /// What kept event loops for long, in chronological order.
    pub lags: Vec<Lag>,
    /// Of recordings of resident memory: the accounts of processes, one for each program that a process ran.
    pub memory: Vec<ResidentMemory>,
    /// Of recordings of memory: how much there was when.
    pub memory_over_time: MemoryOverTime,
}

/// A row of the table of files: where its symbols came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModuleMeta {
    /// The path of the file.
    pub path: String,
    /// In hexadecimal; may be empty.
    pub build_id: String,
    /// Where its symbols came from, as text; begins with `none` if it has none.
    pub symbols_from: String,
    /// Symbol files that were not found or did not match; empty if none is known to be missing.
    pub symbols_missing: String,
    /// Frames in it, over all samples.
    pub frames: u64,
    /// Those of them without a symbol.
    pub unnamed: u64,
    /// Samples with at least one frame in it.
    pub samples: u64,
    /// Samples that ended in its native code, by the address of the instruction as the file states it (svma). At most
    /// [`MAX_INSTRUCTIONS`] in all files.
    pub instructions: BTreeMap<u64, u64>,
}

/// Instructions of all files together whose samples are kept: some 300 KB of JSON.
pub const MAX_INSTRUCTIONS: usize = 1 << 15;

/// Drops the instructions with the fewest samples where there are too many.
pub fn limit_instructions(modules: &mut [ModuleMeta]) {
    if modules.iter().map(|row| row.instructions.len()).sum::<usize>() <= MAX_INSTRUCTIONS {
        return;
    }
    let all = modules.iter().enumerate();
    let all = all.flat_map(|(at, row)| {
        row.instructions
            .iter()
            .map(move |(address, samples)| (*samples, at, *address))
    });
    let mut all: Vec<(u64, usize, u64)> = all.collect();
    all.sort_unstable_by_key(|(samples, at, address)| (u64::MAX - samples, *at, *address));
    for (_, at, address) in all.drain(MAX_INSTRUCTIONS..) {
        modules[at].instructions.remove(&address);
    }
}

/// Lines of a source file: all, or those around lines that samples were in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceExcerpt {
    /// As [`Frame::filename`] or [`Frame::source`] has it.
    pub path: String,
    /// Lines of the file.
    pub length: u32,
    /// Number and text, in order; fewer, or none, where there was no room for more.
    pub lines: Vec<(u32, String)>,
}

/// An instruction of a native function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SampledInstruction {
    /// As its file states it (svma).
    pub address: u64,
    /// Bytes.
    pub length: u8,
    /// In the syntax of the GNU assembler.
    pub text: String,
    /// Samples that ended here.
    pub samples: u64,
    /// Source file and line, if known; of inlined code, those of the inlined function.
    pub source: Option<(String, u32)>,
}

/// Machine code of a native function, or parts of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assembly {
    /// As [`Frame::name`], [`Frame::module`] and [`Frame::address`].
    pub name: String,
    /// As [`Frame::module`].
    pub module: String,
    /// As [`Frame::address`].
    pub address: u64,
    /// Whether a build ID says that its file is the one that was recorded.
    pub is_checked: bool,
    /// By address.
    pub instructions: Vec<SampledInstruction>,
}

/// A finished profile.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Profile {
    /// What is known of the recording.
    pub meta: Meta,
    /// The frames that nodes refer to by index.
    pub frames: Vec<Frame>,
    /// The tree of calls; node 0 is the root, and a parent comes before its children.
    pub nodes: Vec<Node>,
    /// The samples one by one; may be empty.
    pub timeline: Vec<TimelineSample>,
    /// Of files that could be read; the formats of other programs omit them.
    pub excerpts: Vec<SourceExcerpt>,
    /// Of native functions that samples ended in, where a page is to show them; not saved.
    pub assembly: Vec<Assembly>,
    /// Stacks by line, as far as known; may be empty.
    pub places: Vec<Place>,
    /// By index in the timeline, the innermost place of the sample's stack, or [`NO_PLACE`]. Empty if no place is
    /// known.
    pub sample_places: Vec<PlaceId>,
    /// What is measured, that of the counts first. Empty means samples alone: read it through [`Profile::value_types`].
    pub values: Vec<Value>,
    /// Of profiles of off-CPU time, what is known of its intervals.
    pub waits: Waits,
    /// Of programs with spans, the labels of samples.
    pub labels: Labels,
}

impl Profile {
    /// Self samples of each node, by index. Nodes without a valid parent are roots.
    pub fn self_counts(&self) -> Vec<u64> {
        self.self_of(self.nodes.iter().map(|node| node.count).collect())
    }

    /// When the profile ends, ns since its start: after its duration, as far as that is known, or with its last sample.
    pub fn end(&self) -> u64 {
        let last = self.timeline.iter().map(|sample| sample.time).max();
        ((self.meta.duration * 1e9).round() as u64).max(last.unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_with_the_fewest_samples_are_dropped() {
        let row = |samples| ModuleMeta {
            instructions: (0..MAX_INSTRUCTIONS as u64).map(|address| (address, samples)).collect(),
            ..ModuleMeta::default()
        };
        let mut modules = [row(1), row(2)];
        modules[0].instructions.insert(7, 3);
        limit_instructions(&mut modules);
        assert_eq!(modules[0].instructions, BTreeMap::from([(7, 3)]));
        assert_eq!(modules[1].instructions.len(), MAX_INSTRUCTIONS - 1);
    }
}
