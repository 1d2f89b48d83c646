//! The profile as a Python developer wants to read it: stacks begin at the program's code, and between two functions
//! of programs and libraries there are no frames of the interpreter.
//!
//! Start-up is one row, [`START`] or [`THREAD_START`]; a running import is one row, [`IMPORT`], and so is a garbage
//! collection, [`GARBAGE_COLLECTION`]; glue folds into the function that called it. What is what: [`super::interpreter_frames`].

use rustc_hash::FxHashMap;

use super::category::{GARBAGE_COLLECTION, START, THREAD_START};
use super::fold::{Folding, is_container};
use super::interpreter_frames::{Role, Roles};
use super::model::{Frame, FrameKind, NodeId, Profile};

/// The row for the import system, above the `<module>` that is imported.
pub const IMPORT: &str = "[import]";

/// What is outward of a node of the profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Above {
    /// Nothing that runs a program.
    Nothing,
    /// The process's entry or a thread's first function: rows of their own, unless they lead to Python.
    Outer,
    /// Start-up rows.
    Start,
    Import,
    /// A garbage collection.
    Collection,
    /// Code of the program or of a library.
    Code,
    /// Not sound, and left out as everywhere.
    Lost,
}

/// The profile without frames of the interpreter's start-up and without call glue. All samples stay, with their amounts,
/// times and threads; only what is said of where they were changes.
pub fn without_interpreter_frames(profile: &Profile) -> Profile {
    with_targets(profile).0
}

/// The same, and by node of the profile the node of the new one that has its samples.
pub fn with_targets(profile: &Profile) -> (Profile, Vec<NodeId>) {
    let placings = placings(profile);
    let mut out = Folding::new(profile);
    let start = out.add_frame(Frame::new(FrameKind::Native, START));
    let thread_start = out.add_frame(Frame::new(FrameKind::Native, THREAD_START));
    let import = out.add_frame(Frame::python(IMPORT, "", "<frozen importlib>", 0));
    let collection = out.add_frame(Frame::new(FrameKind::Native, GARBAGE_COLLECTION));
    let frame_of = |row: &str| if row == START { start } else { thread_start };
    let mut outer: FxHashMap<usize, NodeId> = FxHashMap::default();
    // By node, the node of the new tree that its callees hang below.
    let mut base: Vec<NodeId> = Vec::with_capacity(profile.nodes.len());
    for (at, placing) in placings.iter().enumerate() {
        let parent = match (at, Folding::parent(profile, at)) {
            (1.., Some(parent)) if placing.now() != Above::Lost => parent,
            (0, _) => {
                out.keep(Folding::ROOT);
                base.push(Folding::ROOT);
                continue;
            }
            _ => {
                out.fold(super::fold::DROPPED);
                base.push(Folding::ROOT);
                continue;
            }
        };
        let (under, above) = (base[parent], placings[parent].now());
        let into = match placing {
            Placing::Keep(_) => {
                // Rows that turned out to lead to other code than Python's come back.
                let under = match above {
                    Above::Outer => outer_rows(&mut out, profile, parent, &placings, &base, &mut outer),
                    _ => under,
                };
                out.child(under, profile.nodes[at].frame)
            }
            Placing::Fold(_) => under,
            Placing::Import => out.child(under, import),
            Placing::Collection => out.child(under, collection),
            Placing::Start(_) if above == Above::Start => under,
            Placing::Start(row) | Placing::Outer(row) => out.child(under, frame_of(row)),
        };
        match placing {
            Placing::Keep(_) => out.keep(into),
            _ => out.fold(into),
        }
        // A start-up row for the few samples that end in an outer row; what it calls hangs where it does itself until
        // it is known what that is.
        base.push(if placing.now() == Above::Outer { under } else { into });
    }
    out.finish_with_targets()
}

/// How a node of a profile is shown without interpreter frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeDisplay {
    /// As a row of its own.
    Itself,
    /// As part of what calls it.
    Hidden,
    /// As this row, together with neighbors that are shown as the same one.
    Row(&'static str),
}

/// How each node is shown.
pub fn shown(profile: &Profile) -> Vec<NodeDisplay> {
    let of = |placing: &Placing| match placing {
        Placing::Keep(_) => NodeDisplay::Itself,
        Placing::Fold(_) => NodeDisplay::Hidden,
        Placing::Import => NodeDisplay::Row(IMPORT),
        Placing::Collection => NodeDisplay::Row(GARBAGE_COLLECTION),
        Placing::Start(row) | Placing::Outer(row) => NodeDisplay::Row(row),
    };
    placings(profile).iter().map(of).collect()
}

/// Where each node goes.
fn placings(profile: &Profile) -> Vec<Placing> {
    let roles = Roles::new(&profile.frames, &profile.meta.python);
    let of_frame: Vec<Role> = profile.frames.iter().map(|frame| roles.of(frame)).collect();
    let below = InwardNodes::new(profile, &of_frame);
    let mut placings: Vec<Placing> = Vec::with_capacity(profile.nodes.len());
    for (at, node) in profile.nodes.iter().enumerate() {
        let parent = Folding::parent(profile, at).filter(|parent| placings[*parent].now() != Above::Lost);
        placings.push(match (at, parent) {
            (0, _) => Placing::Keep(Above::Nothing),
            (_, None) => Placing::Fold(Above::Lost),
            (_, Some(parent)) => FoldedNode {
                profile,
                frame: &profile.frames[node.frame as usize],
                role: of_frame[node.frame as usize],
                at,
                parent,
                above: placings[parent].now(),
                below: &below,
            }
            .place(),
        });
    }
    placings
}

/// The node of the new tree for the last one of a chain of outer rows; `made` has those that exist.
fn outer_rows(
    out: &mut Folding<'_>,
    profile: &Profile,
    last: usize,
    placings: &[Placing],
    base: &[NodeId],
    made: &mut FxHashMap<usize, NodeId>,
) -> NodeId {
    let (mut chain, mut at) = (Vec::new(), last);
    let mut under = loop {
        if let Some(known) = made.get(&at) {
            break *known;
        }
        chain.push(at);
        match Folding::parent(profile, at).filter(|parent| placings[*parent].now() == Above::Outer) {
            Some(parent) => at = parent,
            None => break base[at],
        }
    };
    for at in chain.into_iter().rev() {
        under = out.child(under, profile.nodes[at].frame);
        made.insert(at, under);
    }
    under
}

/// What lies inward of nodes.
struct InwardNodes {
    /// By node: a Python frame.
    python: Vec<bool>,
    /// By node: a start-up function, directly or behind other outer rows.
    start: Vec<bool>,
    /// By node: the start of a thread, before any other Python code.
    thread: Vec<bool>,
}

impl InwardNodes {
    fn new(profile: &Profile, roles: &[Role]) -> InwardNodes {
        let count = profile.nodes.len();
        let mut below = InwardNodes {
            python: vec![false; count],
            start: vec![false; count],
            thread: vec![false; count],
        };
        for at in (1..count).rev() {
            let Some(parent) = Folding::parent(profile, at) else {
                continue;
            };
            let frame = profile.nodes[at].frame as usize;
            let role = roles[frame];
            let is_python = profile.frames[frame].kind == FrameKind::Python;
            below.thread[at] |= role == Role::ThreadStart;
            below.thread[parent] |= below.thread[at] && (role == Role::ThreadStart || !is_python);
            below.python[parent] |= below.python[at] || is_python;
            let is_start = match role {
                Role::Start | Role::ThreadStart => true,
                Role::Nameless | Role::Interpreter | Role::Glue => below.python[at],
                Role::Outer => below.start[at],
                _ => false,
            };
            below.start[parent] |= is_start;
        }
        below
    }
}

/// Where a node goes in the new tree.
#[derive(Clone, Copy)]
enum Placing {
    Keep(Above),
    Fold(Above),
    /// A row that is not made unless something other than start-up needs it.
    Outer(&'static str),
    Start(&'static str),
    Import,
    Collection,
}

impl Placing {
    /// What the node is to those below it.
    fn now(self) -> Above {
        match self {
            Placing::Keep(now) | Placing::Fold(now) => now,
            Placing::Outer(_) => Above::Outer,
            Placing::Start(_) => Above::Start,
            Placing::Import => Above::Import,
            Placing::Collection => Above::Collection,
        }
    }
}

struct FoldedNode<'a> {
    profile: &'a Profile,
    frame: &'a Frame,
    role: Role,
    at: usize,
    parent: usize,
    above: Above,
    below: &'a InwardNodes,
}

impl FoldedNode<'_> {
    fn place(&self) -> Placing {
        let leads_to_python = self.below.python[self.at];
        let start = if self.below.thread[self.at] {
            THREAD_START
        } else {
            START
        };
        if is_container(self.frame) {
            return Placing::Keep(Above::Nothing);
        }
        match self.above {
            // What the interpreter does in it, up to the finalizers and callbacks that it calls.
            Above::Collection => match self.role {
                Role::Import => Placing::Import,
                Role::Outer | Role::Other => Placing::Keep(Above::Code),
                _ => Placing::Fold(Above::Collection),
            },
            _ if self.role == Role::Collection => Placing::Collection,
            Above::Nothing | Above::Outer | Above::Start => match self.role {
                Role::Outer if self.above != Above::Start => {
                    if self.below.start[self.at] {
                        Placing::Outer(start)
                    } else {
                        Placing::Keep(Above::Code)
                    }
                }
                Role::ThreadStart | Role::Start => Placing::Start(start),
                Role::Glue | Role::Nameless | Role::Interpreter if leads_to_python => Placing::Start(start),
                Role::Glue if self.above == Above::Start => Placing::Fold(Above::Start),
                Role::Import => Placing::Import,
                Role::Other if self.frame.kind == FrameKind::Truncated => Placing::Keep(Above::Nothing),
                _ => Placing::Keep(Above::Code),
            },
            Above::Import => match self.role {
                Role::Import | Role::Glue | Role::Start => Placing::Fold(Above::Import),
                Role::Nameless | Role::Interpreter if leads_to_python => Placing::Fold(Above::Import),
                _ => Placing::Keep(Above::Code),
            },
            Above::Code | Above::Lost => match self.role {
                Role::Glue | Role::Start => Placing::Fold(Above::Code),
                Role::Nameless if leads_to_python => Placing::Fold(Above::Code),
                Role::Import => Placing::Import,
                _ if self.is_implementation_of_caller() => Placing::Fold(Above::Code),
                _ => Placing::Keep(Above::Code),
            },
        }
    }

    /// Whether CPython's Argument Clinic made two functions of one: `list_sort` takes the arguments apart and calls
    /// `list_sort_impl`.
    fn is_implementation_of_caller(&self) -> bool {
        let caller = &self.profile.frames[self.profile.nodes[self.parent].frame as usize];
        let is_native = |frame: &Frame| matches!(frame.kind, FrameKind::Native | FrameKind::Inlined);
        is_native(self.frame)
            && is_native(caller)
            && caller.module == self.frame.module
            && self.frame.name.strip_suffix("_impl") == Some(&caller.name)
    }
}

#[cfg(test)]
mod tests;
