//! A [`Profile`] as exporters want it: children in order, siblings of one identifier merged, broken indices left out.
//!
//! Nothing in here or in its users recurses: profiles may be tens of thousands of frames deep.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use rustc_hash::FxHashMap;

use crate::model::{Frame, FrameKind, Profile};

/// File name of every frame that is not Python code, as Dask expects it.
pub const LOW_LEVEL: &str = "<low-level>";

/// The name of a frame as its node shows it.
pub fn shown_name(frame: &Frame) -> Cow<'_, str> {
    match frame.kind {
        FrameKind::Truncated if !frame.name.starts_with("[truncated") => {
            Cow::Owned(format!("[truncated: {}]", frame.name))
        }
        // Only module and offset are known, so they are the name.
        FrameKind::Unknown => Cow::Owned(format!("{}{}", frame.name, unknown_place(&frame.module, frame.address))),
        _ => Cow::Borrowed(&frame.name),
    }
}

/// What follows the name of an unknown function.
pub fn unknown_place(module: &str, address: u64) -> String {
    match module {
        "" => format!(" (0x{address:x})"),
        module => format!(" ({module}+0x{address:x})"),
    }
}

/// Whether the frame is a process, a thread or the root, not code.
pub fn is_group(frame: &Frame) -> bool {
    matches!(frame.kind, FrameKind::Process | FrameKind::Thread)
}

/// A frame as text, not escaped. The line of a Python function is that of its definition.
pub fn frame_text(frame: &Frame) -> Cow<'_, str> {
    match frame.kind {
        FrameKind::Python => {
            let name = match frame.full_name() {
                "" => "[unnamed]",
                name => name,
            };
            match frame.first_line {
                0 => Cow::Owned(format!("{name} ({})", frame.filename)),
                line => Cow::Owned(format!("{name} ({}:{line})", frame.filename)),
            }
        }
        FrameKind::Native | FrameKind::Inlined if !frame.module.is_empty() => {
            let name = if frame.name.is_empty() {
                "[unnamed]"
            } else {
                &frame.name
            };
            Cow::Owned(format!("{name} ({})", frame.module))
        }
        FrameKind::Kernel => Cow::Owned(format!("{}_[k]", frame.name)),
        FrameKind::Task => Cow::Borrowed(frame.full_name()),
        _ => shown_name(frame),
    }
}

/// The same with another line of a Python function.
pub fn frame_text_at(frame: &Frame, line: u32) -> String {
    match frame.kind {
        FrameKind::Python => frame_text(&Frame {
            first_line: line,
            ..frame.clone()
        })
        .into_owned(),
        _ => frame_text(frame).into_owned(),
    }
}

/// Identifies the function among the children of a node, in this file and in others to merge it with.
pub fn identifier(frame: &Frame) -> String {
    let name = shown_name(frame);
    match frame.kind {
        // Two files may have functions of one name at one address.
        FrameKind::Native | FrameKind::Inlined => format!("{};{LOW_LEVEL};0x{:x}", frame_text(frame), frame.address),
        FrameKind::Root => "root".to_string(),
        FrameKind::Python => format!("{name};{};{}", frame.filename, frame.first_line),
        FrameKind::Process | FrameKind::Thread => format!("{name};;0"),
        _ => format!("{name};{LOW_LEVEL};0x{:x}", frame.address),
    }
}

/// A node of the view.
pub struct ViewNode<'a> {
    /// Index in [`View::items`]; the root is its own parent.
    pub parent: u32,
    /// Index in [`View::frames`]; `None` for the root.
    pub frame: Option<u32>,
    /// Index in [`View::identifiers`].
    pub identifier: u32,
    /// Samples here and below, as [`crate::model::Node::count`].
    pub count: u64,
    /// As [`crate::model::Node::lines`].
    pub lines: Cow<'a, BTreeMap<u32, u64>>,
    /// Line -> samples that ended here; unlike in a node, never left out.
    pub self_lines: Cow<'a, BTreeMap<u32, u64>>,
    /// As [`crate::model::Node::line_text`].
    pub line_text: &'a str,
    /// As [`crate::model::Node::first_seen_line`].
    pub first_seen_line: u32,
}

/// The tree of a profile, with children.
pub struct View<'a> {
    /// Parents before children, siblings by first appearance; the first one is the root.
    pub items: Vec<ViewNode<'a>>,
    /// The text of each identifier, see [`identifier`].
    pub identifiers: Vec<String>,
    /// The frames of the profile.
    pub frames: &'a [Frame],
    /// Frame of each identifier but the root's, the first one that has it.
    first_frames: Vec<u32>,
    /// Node of the profile -> item, `NONE` if it was left out.
    item_of: Vec<u32>,
    /// Children of item `i` are `children[starts[i]..starts[i + 1]]`.
    starts: Vec<u32>,
    children: Vec<u32>,
}

const NONE: u32 = u32::MAX;

impl<'a> View<'a> {
    /// The view of a profile.
    pub fn new(profile: &'a Profile) -> Self {
        let (identifiers, identifier_of, first_frames) = intern_identifiers(&profile.frames);
        let mut items: Vec<ViewNode<'a>> = Vec::with_capacity(profile.nodes.len().max(1));
        let mut item_of = Vec::with_capacity(profile.nodes.len());
        let self_counts = profile.self_counts();
        let mut known: FxHashMap<(u32, u32), u32> = FxHashMap::default();
        static NO_LINES: BTreeMap<u32, u64> = BTreeMap::new();
        items.push(ViewNode {
            parent: 0,
            frame: None,
            identifier: 0,
            count: profile.nodes.first().map_or(0, |root| root.count),
            lines: Cow::Borrowed(&NO_LINES),
            self_lines: Cow::Borrowed(&NO_LINES),
            line_text: "",
            first_seen_line: 0,
        });
        for (index, node) in profile.nodes.iter().enumerate() {
            if index == 0 {
                item_of.push(0);
                continue;
            }
            let parent = item_of.get(node.parent as usize).copied().unwrap_or(NONE);
            let frame = profile
                .frames
                .get(node.frame as usize)
                .filter(|frame| frame.kind != FrameKind::Root);
            if frame.is_none() || parent == NONE {
                item_of.push(NONE);
                continue;
            }
            let identifier = identifier_of[node.frame as usize];
            let item = *known.entry((parent, identifier)).or_insert_with(|| items.len() as u32);
            item_of.push(item);
            match items.get_mut(item as usize) {
                Some(item) => {
                    item.count = item.count.saturating_add(node.count);
                    add_lines(item.lines.to_mut(), &node.lines);
                    add_lines(item.self_lines.to_mut(), node.self_lines_of(self_counts[index]));
                }
                None => items.push(ViewNode {
                    parent,
                    frame: Some(node.frame),
                    identifier,
                    count: node.count,
                    lines: Cow::Borrowed(&node.lines),
                    self_lines: Cow::Borrowed(node.self_lines_of(self_counts[index])),
                    line_text: &node.line_text,
                    first_seen_line: node.first_seen_line,
                }),
            }
        }
        let (starts, children) = index_children(&items);
        View {
            items,
            identifiers,
            frames: &profile.frames,
            first_frames,
            item_of,
            starts,
            children,
        }
    }

    /// The children of an item, as indices in [`View::items`].
    ///
    /// # Panics
    /// If there is no such item.
    pub fn children(&self, item: u32) -> &[u32] {
        &self.children[self.starts[item as usize] as usize..self.starts[item as usize + 1] as usize]
    }

    /// The frame of an item; `None` for the root.
    pub fn frame(&self, item: u32) -> Option<&'a Frame> {
        Some(&self.frames[self.items[item as usize].frame? as usize])
    }

    /// The function of an identifier; `None` for the root's.
    pub fn function(&self, identifier: u32) -> Option<&'a Frame> {
        Some(&self.frames[self.first_frame(identifier)? as usize])
    }

    /// The index of that function's frame.
    pub fn first_frame(&self, identifier: u32) -> Option<u32> {
        self.first_frames.get((identifier as usize).checked_sub(1)?).copied()
    }

    /// The item that a node of the profile became part of, if it was sound.
    pub fn item_of(&self, node: u32) -> Option<u32> {
        self.item_of.get(node as usize).copied().filter(|item| *item != NONE)
    }

    /// Samples that ended in each item, by its index.
    pub fn self_counts(&self) -> Vec<u64> {
        self.self_of(self.items.iter().map(|item| item.count).collect())
    }

    /// Inclusive amount of a value of the profile by item.
    pub fn amounts(&self, profile: &Profile, value: usize) -> Vec<u64> {
        let mut sums = vec![0u64; self.items.len()];
        for (item, amount) in self.item_of.iter().zip(profile.amounts(value)) {
            if let Some(sum) = sums.get_mut(*item as usize) {
                *sum = sum.saturating_add(amount);
            }
        }
        sums
    }

    /// Self amount of a value of the profile by item.
    pub fn self_amounts(&self, profile: &Profile, value: usize) -> Vec<u64> {
        self.self_of(self.amounts(profile, value))
    }

    fn self_of(&self, inclusive: Vec<u64>) -> Vec<u64> {
        let mut self_counts = inclusive.clone();
        for (item, amount) in self.items.iter().zip(inclusive).skip(1) {
            let parent = &mut self_counts[item.parent as usize];
            *parent = parent.saturating_sub(amount);
        }
        self_counts
    }

    /// Position of each item when the tree is written from the root down, depth first.
    pub fn preorder(&self) -> Vec<u32> {
        let mut position = vec![0; self.items.len()];
        let mut stack = vec![0u32];
        let mut next = 0;
        while let Some(item) = stack.pop() {
            position[item as usize] = next;
            next += 1;
            stack.extend(self.children(item).iter().rev());
        }
        position
    }
}

/// Adds samples by line.
pub fn add_lines(to: &mut BTreeMap<u32, u64>, more: &BTreeMap<u32, u64>) {
    for (line, count) in more {
        let sum = to.entry(*line).or_default();
        *sum = sum.saturating_add(*count);
    }
}

pub(crate) fn intern_identifiers(frames: &[Frame]) -> (Vec<String>, Vec<u32>, Vec<u32>) {
    let (mut identifiers, mut first_frames) = (vec!["root".to_string()], Vec::new());
    // Names come from the target: use a hasher that resists collision attacks.
    let mut known: HashMap<String, u32> = HashMap::new();
    let of_frame = frames
        .iter()
        .enumerate()
        .map(|(at, frame)| {
            let text = identifier(frame);
            *known.entry(text).or_insert_with_key(|text| {
                first_frames.push(at as u32);
                identifiers.push(text.clone());
                (identifiers.len() - 1) as u32
            })
        })
        .collect();
    (identifiers, of_frame, first_frames)
}

fn index_children(items: &[ViewNode<'_>]) -> (Vec<u32>, Vec<u32>) {
    let mut starts = vec![0u32; items.len() + 1];
    for item in items.iter().skip(1) {
        starts[item.parent as usize + 1] += 1;
    }
    for at in 1..starts.len() {
        starts[at] += starts[at - 1];
    }
    let mut free = starts.clone();
    let mut children = vec![0; items.len() - 1];
    for (index, item) in items.iter().enumerate().skip(1) {
        let at = &mut free[item.parent as usize];
        children[*at as usize] = index as u32;
        *at += 1;
    }
    (starts, children)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Node;

    fn native(name: &str, address: u64, source: &str) -> Frame {
        Frame {
            kind: FrameKind::Native,
            name: name.to_string(),
            qualname: String::new(),
            filename: LOW_LEVEL.to_string(),
            first_line: 0,
            address,
            module: "m.so".to_string(),
            source: source.to_string(),
        }
    }

    fn node(frame: u32, parent: u32, count: u64, line: u32) -> Node {
        let lines = BTreeMap::from([(line, count)]);
        Node {
            lines,
            count,
            first_seen_line: line,
            ..Node::new(frame, parent)
        }
    }

    #[test]
    fn texts_of_functions_at_a_line() {
        for (first_line, line, expected) in [
            (3, 7, "f (/srv/app.py:7)"),
            (30, 7, "f (/srv/app.py:7)"),
            (0, 7, "f (/srv/app.py:7)"),
            (3, 0, "f (/srv/app.py)"),
        ] {
            assert_eq!(
                frame_text_at(&Frame::python("f", "", "/srv/app.py", first_line), line),
                expected
            );
        }
    }

    #[test]
    fn identifiers_name_the_function() {
        let unnamed = Frame {
            kind: FrameKind::Unknown,
            ..native("[unknown]", 0x10, "")
        };
        let truncated = Frame {
            kind: FrameKind::Truncated,
            ..native("code object freed", 0, "")
        };
        let python = Frame {
            kind: FrameKind::Python,
            filename: "a;b.py".into(),
            first_line: 3,
            ..native("f", 0, "")
        };
        for (frame, expected) in [
            (native("f", 0x1a, ""), "f (m.so);<low-level>;0x1a"),
            (Frame::native("f", "", 0x1a), "f;<low-level>;0x1a"),
            (unnamed, "[unknown] (m.so+0x10);<low-level>;0x10"),
            (truncated, "[truncated: code object freed];<low-level>;0x0"),
            (python, "f;a;b.py;3"),
        ] {
            assert_eq!(identifier(&frame), expected);
        }
    }

    #[test]
    fn functions_of_one_name_in_two_files_stay_apart() {
        let frames = vec![
            Frame::native("run", "a.so", 0x1139),
            Frame::native("run", "b.so", 0x1139),
        ];
        let profile = Profile {
            frames,
            nodes: vec![node(0, 0, 3, 0), node(0, 0, 1, 0), node(1, 0, 2, 0)],
            ..Profile::default()
        };
        let view = View::new(&profile);
        let counts = view.children(0).iter().map(|item| view.items[*item as usize].count);
        assert_eq!(counts.collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn siblings_of_one_identifier_become_one() {
        let frames = vec![native("f", 1, "a.c"), native("f", 1, "b.c"), native("g", 2, "")];
        // Root, f (a.c) with g, g, f (b.c) with g.
        let nodes = vec![
            Node {
                lines: BTreeMap::new(),
                ..node(0, 0, 10, 0)
            },
            node(0, 0, 3, 7),
            node(2, 1, 1, 1),
            node(2, 0, 2, 1),
            node(1, 0, 4, 7),
            node(2, 4, 4, 2),
        ];
        let profile = Profile {
            frames,
            nodes,
            ..Profile::default()
        };
        let view = View::new(&profile);
        assert_eq!(
            view.items.iter().map(|item| item.count).collect::<Vec<_>>(),
            [10, 7, 5, 2]
        );
        assert_eq!(view.children(0), [1, 3]);
        assert_eq!(view.children(1), [2]);
        assert_eq!(*view.items[1].lines, BTreeMap::from([(7, 7)]));
        assert_eq!(*view.items[2].lines, BTreeMap::from([(1, 1), (2, 4)]));
        assert_eq!(
            (0..6).map(|node| view.item_of(node).unwrap()).collect::<Vec<_>>(),
            [0, 1, 2, 3, 1, 2]
        );
        assert_eq!(view.self_counts(), [1, 2, 5, 2]);
        assert_eq!(view.preorder(), [0, 1, 2, 3]);
        assert_eq!(view.item_of(99), None);
    }
}
