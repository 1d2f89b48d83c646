//! The timeline with the lines of its stacks.

use std::borrow::Cow;

use rustc_hash::FxHashMap;

use super::super::lexer::Members;
use super::{Description, JsonError, JsonReader, NO_NUMBER};
use crate::labels::{LabelSet, Labels};
use crate::model::{FrameId, NO_PLACE, Node, NodeId, Place, PlaceId, TimelineSample};
use crate::places::Places;
use crate::sums::sum_upwards;
use crate::view::intern_identifiers;
use crate::waits::{Waits, Waker};

/// Minimum bytes of the file per omitted node; our own files have more.
const BYTES_PER_NODE: usize = 10;

/// A function of the stacks.
enum StackFunction {
    /// That of a node, by its place in the file.
    Node(u64),
    Frame(FrameId),
}

/// What was read of the samples; node numbers are valid only after the complete tree has been read.
#[derive(Default)]
pub(super) struct ReadSamples {
    threads: [Vec<u64>; 2],
    thread: Vec<u64>,
    time: Vec<u64>,
    stack: Vec<u64>,
    functions: Vec<StackFunction>,
    /// Function and line.
    frames: [Vec<u64>; 2],
    up: Vec<u64>,
    frame: Vec<u64>,
    waits: Waits,
    labels: Labels,
    omitted: u64,
    /// They are there, though there may be none.
    pub(super) exist: bool,
}

impl<'a> JsonReader<'a> {
    pub(super) fn samples(&mut self) -> Result<(), JsonError> {
        self.samples.exist = true;
        self.object(|reader, key| {
            match (key, reader.peek()) {
                ("thread", Some(b'[')) => reader.samples.thread = reader.column()?,
                ("time", Some(b'[')) => reader.samples.time = reader.column()?,
                ("stack", Some(b'[')) => reader.samples.stack = reader.column()?,
                ("omitted_nodes" | "left_out", _) => reader.samples.omitted = reader.integer()?.unwrap_or(0),
                ("threads", Some(b'{')) => reader.samples.threads = reader.pair(["pid", "tid"])?,
                ("values", Some(b'{')) => reader.sample_values()?,
                ("stacks", Some(b'{')) => reader.stacks()?,
                ("waits", Some(b'{')) => reader.waits()?,
                ("labels", Some(b'{')) => reader.labels()?,
                _ => reader.skip_value()?,
            }
            Ok(())
        })
    }

    fn stacks(&mut self) -> Result<(), JsonError> {
        self.object(|reader, key| {
            match (key, reader.peek()) {
                ("functions", Some(b'[')) => reader.functions()?,
                ("frames", Some(b'{')) => reader.samples.frames = reader.pair(["function", "line"])?,
                ("up", Some(b'[')) => reader.samples.up = reader.column()?,
                ("frame", Some(b'[')) => reader.samples.frame = reader.column()?,
                _ => reader.skip_value()?,
            }
            Ok(())
        })
    }

    fn waits(&mut self) -> Result<(), JsonError> {
        self.object(|reader, key| {
            match (key, reader.peek()) {
                ("length", Some(b'[')) => reader.samples.waits.lengths = reader.column()?,
                ("waker", Some(b'[')) => {
                    let number = |n: u64| u32::try_from(n).unwrap_or(0);
                    reader.samples.waits.wakers = reader.column()?.into_iter().map(number).collect();
                }
                ("holds_gil", Some(b'[')) => {
                    reader.samples.waits.holding = reader.column()?.into_iter().map(|n| n == 1).collect();
                }
                ("wakers", Some(b'[')) => reader.wakers()?,
                ("shares", Some(b'{')) => {
                    let mut columns: [Vec<u64>; 3] = Default::default();
                    reader.object(|reader, key| {
                        let at = ["sample", "waker", "time"].iter().position(|name| *name == key);
                        match (at, reader.peek()) {
                            (Some(at), Some(b'[')) => columns[at] = reader.column()?,
                            _ => reader.skip_value()?,
                        }
                        Ok(())
                    })?;
                    let [rows, wakers, times] = columns;
                    let number = |n: u64| u32::try_from(n).unwrap_or(0);
                    let shares = rows.into_iter().zip(wakers).zip(times);
                    let shares = shares.map(|((row, waker), time)| (number(row), number(waker), time));
                    reader.samples.waits.shares = shares.collect();
                    // In order, as they are searched.
                    reader.samples.waits.shares.sort_by_key(|(row, ..)| *row);
                }
                _ => reader.skip_value()?,
            }
            Ok(())
        })
    }

    fn labels(&mut self) -> Result<(), JsonError> {
        let (mut sets, mut of_samples) = (Vec::new(), Vec::new());
        self.object(|reader, key| {
            match (key, reader.peek()) {
                ("sets", Some(b'[')) => reader.list(|reader| {
                    let mut set: LabelSet = Vec::new();
                    reader.list(|reader| {
                        let mut pair = [String::new(), String::new()];
                        let mut at = 0;
                        reader.list(|reader| {
                            let text = reader.string()?.into_owned();
                            if let Some(place) = pair.get_mut(at) {
                                *place = text;
                            }
                            at += 1;
                            Ok(())
                        })?;
                        let [key, value] = pair;
                        set.push((key, value));
                        Ok(())
                    })?;
                    sets.push(set);
                    Ok(())
                })?,
                ("set", Some(b'[')) => of_samples = reader.column()?,
                _ => reader.skip_value()?,
            }
            Ok(())
        })?;
        // The first set is the empty one, whatever the file says.
        match sets.first_mut() {
            Some(first) => first.clear(),
            None => return Ok(()),
        }
        let known = sets.len() as u64;
        let number = |n: u64| if n < known { u32::try_from(n).unwrap_or(0) } else { 0 };
        self.samples.labels = Labels {
            sets,
            of_samples: of_samples.into_iter().map(number).collect(),
        };
        Ok(())
    }

    fn wakers(&mut self) -> Result<(), JsonError> {
        let mut wakers = Vec::new();
        self.list(|reader| {
            let mut waker = Waker::default();
            reader.object(|reader, key| {
                let number = |n: Option<u64>| n.and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
                match (key, reader.peek()) {
                    ("pid", _) => waker.pid = number(reader.integer()?),
                    ("tid", _) => waker.tid = number(reader.integer()?),
                    ("function", Some(b'"')) => waker.function = reader.string()?.into_owned(),
                    ("stack", Some(b'[')) => {
                        let stack = &mut waker.stack;
                        reader.list(|reader| {
                            stack.push(reader.string()?.into_owned());
                            Ok(())
                        })?;
                    }
                    _ => reader.skip_value()?,
                }
                Ok(())
            })?;
            wakers.push(waker);
            Ok(())
        })?;
        self.samples.waits.known = wakers;
        Ok(())
    }

    /// Goes through a list.
    fn list(&mut self, mut each: impl FnMut(&mut Self) -> Result<(), JsonError>) -> Result<(), JsonError> {
        let mut members = Members::default();
        while self.item(&mut members)? {
            each(self)?;
        }
        Ok(())
    }

    /// Two columns of an object.
    fn pair(&mut self, names: [&str; 2]) -> Result<[Vec<u64>; 2], JsonError> {
        let mut pair: [Vec<u64>; 2] = Default::default();
        self.object(|reader, key| {
            match (names.iter().position(|name| *name == key), reader.peek()) {
                (Some(at), Some(b'[')) => pair[at] = reader.column()?,
                _ => reader.skip_value()?,
            }
            Ok(())
        })?;
        Ok(pair)
    }

    fn functions(&mut self) -> Result<(), JsonError> {
        let (mut functions, mut members) = (Vec::new(), Members::default());
        while self.item(&mut members)? {
            if self.peek() != Some(b'{') {
                functions.push(StackFunction::Node(self.integer()?.unwrap_or(NO_NUMBER)));
                continue;
            }
            let (mut identifier, mut description) = (Cow::Borrowed(""), Description::default());
            self.object(|reader, key| {
                match key {
                    "identifier" => identifier = reader.string()?,
                    "description" => description = reader.description()?,
                    _ => reader.skip_value()?,
                }
                Ok(())
            })?;
            let (frame, ..) = self.frame_of(&identifier, description, false);
            functions.push(StackFunction::Frame(frame));
        }
        self.samples.functions = functions;
        Ok(())
    }

    /// Sets the timeline and places of the profile when all nodes have been read, and restores the omitted nodes.
    pub(super) fn take_samples(&mut self) -> Result<(), JsonError> {
        let read = std::mem::take(&mut self.samples);
        let in_file = self.profile.nodes.len();
        let node_of_row = self.take_rows(&read)?;
        let mut time = 0u64;
        for (row, (delta, stack)) in (0u32..).zip(read.time.iter().zip(&read.stack)) {
            time = time.saturating_add(*delta);
            let thread = read.thread.get(row as usize).map_or(0, |thread| *thread as usize);
            let number = |column: &[u64]| column.get(thread).and_then(|n| u32::try_from(*n).ok()).unwrap_or(0);
            let place = usize::try_from(*stack).ok().and_then(|stack| node_of_row.get(stack));
            let Some(place) = place.copied().filter(|place| *place != NO_PLACE && *delta != NO_NUMBER) else {
                continue;
            };
            self.profile.timeline.push(TimelineSample {
                time,
                pid: number(&read.threads[0]),
                tid: number(&read.threads[1]),
                node: self.profile.places[place as usize].node,
            });
            self.profile.sample_places.push(place);
            self.kept_samples.push(row);
        }
        let rows: Vec<(usize, usize)> = self.kept_samples.iter().map(|row| (0, *row as usize)).collect();
        self.profile.labels = Labels::merge(&[&read.labels], &rows);
        if !read.waits.is_empty() {
            self.profile.waits = Waits::merge(&[&read.waits], &rows, &|_, pid| pid);
        }
        self.first_omitted = in_file;
        Ok(())
    }

    /// Creates the places; returns the place of each row, the root's first.
    fn take_rows(&mut self, read: &ReadSamples) -> Result<Vec<PlaceId>, JsonError> {
        // Rows name functions by their identifiers, which several frames may share: a function that is called here and
        // inlined there.
        let (_, function_of, _) = intern_identifiers(&self.profile.frames);
        let function_of = |frame: FrameId| function_of.get(frame as usize).copied().unwrap_or(0);
        let nodes = &mut self.profile.nodes;
        let in_file = nodes.len();
        let mut children: FxHashMap<(NodeId, u32), NodeId> = FxHashMap::default();
        let mut texts: FxHashMap<(FrameId, u32), NodeId> = FxHashMap::default();
        if !read.up.is_empty() {
            for (at, node) in (0..).zip(nodes.iter()).skip(1) {
                children.entry((node.parent, function_of(node.frame))).or_insert(at);
                if !node.line_text.is_empty() {
                    texts.entry((node.frame, node.first_seen_line)).or_insert(at);
                }
            }
        }
        let most = if read.omitted > 0 {
            self.lexer.text.len() / BYTES_PER_NODE
        } else {
            0
        };
        let mut places = Places::default();
        let mut of_row = vec![0 as PlaceId];
        let mut path = vec![0 as PlaceId];
        for (up, frame) in read.up.iter().zip(&read.frame) {
            let depth = usize::try_from(*up).ok().and_then(|up| path.len().checked_sub(up));
            let Some(depth) = depth.filter(|depth| *depth > 0) else {
                return Err(self.error("samples whose stacks have no caller"));
            };
            path.truncate(depth);
            let at = usize::try_from(*frame).unwrap_or(usize::MAX);
            let number = |column: usize| read.frames[column].get(at).copied();
            let function = number(0).and_then(|n| read.functions.get(usize::try_from(n).ok()?));
            let frame = function.and_then(|function| match function {
                StackFunction::Frame(frame) => Some(*frame),
                StackFunction::Node(node) => nodes[..in_file]
                    .get(usize::try_from(*node).ok()?)
                    .map(|node| node.frame),
            });
            let line = number(1).and_then(|line| u32::try_from(line).ok()).unwrap_or(0);
            let parent = path[depth - 1];
            let mut place = NO_PLACE;
            if let (Some(frame), false) = (frame, parent == NO_PLACE) {
                let caller = places.all[parent as usize].node;
                let mut node = children.get(&(caller, function_of(frame))).copied();
                if node.is_none() && nodes.len() - in_file < most {
                    let text = texts
                        .get(&(frame, line))
                        .map(|node| nodes[*node as usize].line_text.clone());
                    let next = nodes.len() as NodeId;
                    nodes.push(Node {
                        first_seen_line: line,
                        line_text: text.unwrap_or_default(),
                        ..Node::new(frame, caller)
                    });
                    children.insert((caller, function_of(frame)), next);
                    node = Some(next);
                }
                place = node.map_or(NO_PLACE, |node| places.child(parent, node, line));
            }
            of_row.push(place);
            path.push(place);
        }
        self.profile.places = places.all;
        Ok(of_row)
    }

    /// Counts what was left out of the tree, from the timeline.
    pub(super) fn count_omitted(&mut self) {
        let first = self.first_omitted;
        let profile = &mut self.profile;
        if first >= profile.nodes.len() {
            return;
        }
        let mut ended = vec![0u64; profile.places.len()];
        for (sample, place) in profile.sample_places.iter().enumerate() {
            let sum = &mut ended[*place as usize];
            *sum = sum.saturating_add(profile.sample_amount(0, sample));
        }
        let mut inclusive = ended.clone();
        sum_upwards(&mut inclusive, |at| Some(profile.places[at].parent as usize));
        let places = profile.places.iter().copied().enumerate();
        let added: Vec<(usize, Place)> = places.filter(|(_, place)| place.node as usize >= first).collect();
        for (at, place) in &added {
            let node = &mut profile.nodes[place.node as usize];
            node.count = node.count.saturating_add(inclusive[*at]);
            if place.line > 0 && inclusive[*at] > 0 {
                *node.lines.entry(place.line).or_default() += inclusive[*at];
            }
        }
        let self_counts = profile.self_counts();
        for (at, place) in &added {
            let node = &mut profile.nodes[place.node as usize];
            if place.line > 0 && ended[*at] > 0 && self_counts[place.node as usize] != node.count {
                *node.self_lines.entry(place.line).or_default() += ended[*at];
            }
        }
    }

    /// Self amounts of the timeline, summed over all omitted nodes.
    pub(super) fn add_omitted(&self, column: &mut [u64], amount: &dyn Fn(usize) -> u64) {
        for (at, sample) in self.profile.timeline.iter().enumerate() {
            if sample.node as usize >= self.first_omitted {
                let sum = &mut column[sample.node as usize];
                *sum = sum.saturating_add(amount(at));
            }
        }
        let omitted = |node: usize| node >= self.first_omitted;
        sum_upwards(column, |at| {
            let parent = self.profile.nodes.get(at).map(|node| node.parent as usize);
            parent.filter(|parent| omitted(at) && omitted(*parent))
        });
    }
}
