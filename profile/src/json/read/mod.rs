//! The count tree in JSON back to a [`Profile`].
//!
//! Files may come from anywhere: nesting lives on the heap and is limited, memory is bounded by the size of the input,
//! and whatever is not a count tree is an error that names the place. A file of Dask itself, without our keys, is read
//! too.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::hash::RandomState;
use std::ops::{Deref, DerefMut};

use hashbrown::HashTable;
use serde_json::{Map, Value};

use self::instructions::instructions;
use super::lexer::{Lexer, Members};
use super::write::FORMAT_VERSION;
use crate::machine::Machine;
use crate::model::{
    FrameId, MergedRecording, Meta, ModuleMeta, Node, NodeId, Profile, Quality, StopSummary, TimelineSample,
};

mod frames;
mod instructions;
mod lags;
mod memory;
mod old_keys;
mod samples;
mod values;

/// Frames on top of each other; far more than any stack we record.
const MAX_DEPTH: usize = 100_000;

/// Maximum bytes of metadata of the recording; they take up to 70 times as much when read. Those of thousands of
/// threads and modules have a tenth.
const MAX_FACTS: usize = 4 << 20;

/// Why a file could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JsonError {
    /// Byte of the file where it was noticed.
    pub at: usize,
    /// What is wrong there.
    pub reason: String,
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not a profile: {} at byte {}", self.reason, self.at)
    }
}

impl std::error::Error for JsonError {}

/// Reads what [`write`](fn@super::write) wrote.
pub fn read(bytes: &[u8]) -> Result<Profile, JsonError> {
    let mut reader = JsonReader {
        lexer: Lexer::new(bytes)?,
        profile: Profile::default(),
        frames: HashTable::new(),
        hasher: RandomState::new(),
        columns: Default::default(),
        kept_samples: Vec::new(),
        values: Default::default(),
        samples: Default::default(),
        first_omitted: usize::MAX,
    };
    reader.tree()?;
    reader.space();
    if reader.at < reader.text.len() {
        return Err(reader.error("text after the end"));
    }
    if reader.samples.exist {
        reader.take_samples()?;
    } else {
        reader.take_timeline();
    }
    reader.take_values()?;
    reader.count_omitted();
    Ok(reader.profile)
}

/// A node whose closing brace has not been read yet.
struct Open<'a> {
    node: NodeId,
    identifier: Cow<'a, str>,
    description: Description<'a>,
    /// Inside its `children` object, rather than among its own keys.
    in_children: bool,
    /// The innermost object is not empty: a comma must follow.
    comma: bool,
}

/// What is read of a description.
#[derive(Default)]
struct Description<'a> {
    kind: Cow<'a, str>,
    name: Cow<'a, str>,
    qualname: Cow<'a, str>,
    filename: Cow<'a, str>,
    module: Cow<'a, str>,
    source: Cow<'a, str>,
    line: Cow<'a, str>,
    source_text: Cow<'a, str>,
    line_number: u32,
    source_line: u32,
}

/// Represents values in a column that are not integers.
const NO_NUMBER: u64 = u64::MAX;

struct JsonReader<'a> {
    lexer: Lexer<'a>,
    profile: Profile,
    /// Frames of the profile. Names are not trusted: the hasher resists collision attacks.
    frames: HashTable<FrameId>,
    hasher: RandomState,
    /// The timeline: time, pid, tid, node.
    columns: [Vec<u64>; 4],
    /// Rows of these columns that became samples of the profile.
    kept_samples: Vec<u32>,
    values: values::ReadValues,
    samples: samples::ReadSamples,
    /// First of the nodes that only the timeline has, not the tree.
    first_omitted: usize,
}

impl<'a> Deref for JsonReader<'a> {
    type Target = Lexer<'a>;

    fn deref(&self) -> &Lexer<'a> {
        &self.lexer
    }
}

impl DerefMut for JsonReader<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.lexer
    }
}

impl<'a> JsonReader<'a> {
    /// Reads an object; `each` receives a key and reads its value.
    fn object(&mut self, mut each: impl FnMut(&mut Self, &str) -> Result<(), JsonError>) -> Result<(), JsonError> {
        let mut members = Members::default();
        while let Some(key) = self.key(&mut members)? {
            each(self, &key)?;
        }
        Ok(())
    }

    /// Reads the complete tree; one iteration is one key of one node, or one closing brace.
    fn tree(&mut self) -> Result<(), JsonError> {
        self.expect_byte(b'{')?;
        let mut path = vec![self.open(0, Cow::Borrowed(""))?];
        // Any JSON object would be an empty profile.
        let mut missing = vec!["children", "count"];
        while let Some(top) = path.last_mut() {
            if self.peek() == Some(b'}') {
                self.at += 1;
                if top.in_children {
                    top.in_children = false;
                    top.comma = true;
                } else if let Some(done) = path.pop() {
                    self.close(done)?;
                }
                continue;
            }
            if std::mem::replace(&mut top.comma, true) {
                self.expect_byte(b',')?;
            }
            let key = self.string()?;
            self.expect_byte(b':')?;
            if top.in_children {
                self.expect_byte(b'{')?;
                let parent = top.node;
                if path.len() > MAX_DEPTH {
                    return Err(self.error("frames nested too deeply"));
                }
                path.push(self.open(parent, key)?);
                continue;
            }
            if top.node == 0 {
                missing.retain(|required| *required != key);
            }
            match &*key {
                "children" => {
                    self.expect_byte(b'{')?;
                    top.in_children = true;
                    top.comma = false;
                }
                "identifier" => top.identifier = self.string()?,
                "description" => top.description = self.description()?,
                "count" => {
                    let count = self.integer()?;
                    let count = count.ok_or_else(|| self.error("a count that is not an integer"))?;
                    self.profile.nodes[top.node as usize].count = count;
                }
                "values" => self.node_values(top.node)?,
                "lines" => self.profile.nodes[top.node as usize].lines = self.lines()?,
                "self_lines" => self.profile.nodes[top.node as usize].self_lines = self.lines()?,
                "nativeprof" if top.node == 0 => self.metadata()?,
                _ => self.skip_value()?,
            }
        }
        match missing.pop() {
            Some(key) => Err(self.error(&format!("`{key}` expected in the root object, which ends"))),
            None => Ok(()),
        }
    }

    fn open(&mut self, parent: NodeId, identifier: Cow<'a, str>) -> Result<Open<'a>, JsonError> {
        let node = NodeId::try_from(self.profile.nodes.len()).map_err(|_| self.error("too many nodes"))?;
        self.profile.nodes.push(Node::new(0, parent));
        Ok(Open {
            node,
            identifier,
            description: Description::default(),
            in_children: false,
            comma: false,
        })
    }

    fn close(&mut self, done: Open<'a>) -> Result<(), JsonError> {
        let (frame, line, text) = self.frame_of(&done.identifier, done.description, done.node == 0);
        let node = &mut self.profile.nodes[done.node as usize];
        node.first_seen_line = line;
        node.line_text = text.into_owned();
        node.frame = frame;
        Ok(())
    }

    fn description(&mut self) -> Result<Description<'a>, JsonError> {
        let mut read = Description::default();
        match self.peek() {
            Some(b'{') => {}
            // Very old profiles of Dask have text here.
            Some(b'"') => {
                read.name = self.string()?;
                return Ok(read);
            }
            _ => {
                self.value()?;
                return Err(self.error("a description that is not an object"));
            }
        }
        self.object(|reader, key| {
            let text = match key {
                "line_number" => {
                    read.line_number = number_or_zero(reader.integer()?);
                    return Ok(());
                }
                "source_line" => {
                    read.source_line = number_or_zero(reader.integer()?);
                    return Ok(());
                }
                "kind" => &mut read.kind,
                "name" => &mut read.name,
                "qualname" => &mut read.qualname,
                "filename" => &mut read.filename,
                "module" => &mut read.module,
                "source" => &mut read.source,
                "line" => &mut read.line,
                "source_text" => &mut read.source_text,
                _ => return reader.skip_value(),
            };
            if reader.peek() == Some(b'"') {
                *text = reader.string()?;
                return Ok(());
            }
            reader.skip_value()
        })?;
        Ok(read)
    }

    /// Line -> samples.
    fn lines(&mut self) -> Result<BTreeMap<u32, u64>, JsonError> {
        let mut lines = BTreeMap::new();
        if self.peek() != Some(b'{') {
            self.skip_value()?;
            return Ok(lines);
        }
        self.object(|reader, line| {
            if let (Ok(line), Some(count)) = (line.parse(), reader.integer()?) {
                lines.insert(line, count);
            }
            Ok(())
        })?;
        Ok(lines)
    }

    fn column(&mut self) -> Result<Vec<u64>, JsonError> {
        let (mut column, mut members) = (Vec::new(), Members::default());
        while self.item(&mut members)? {
            column.push(self.integer()?.unwrap_or(NO_NUMBER));
        }
        Ok(column)
    }

    /// What is ours at the root.
    fn metadata(&mut self) -> Result<(), JsonError> {
        if self.peek() != Some(b'{') {
            return Err(self.error("metadata that is not an object"));
        }
        let (mut facts, mut length) = (Map::new(), 0);
        self.object(|reader, key| {
            if key == "timeline" && reader.peek() == Some(b'{') {
                return reader.timeline();
            }
            if key == "samples" && reader.peek() == Some(b'{') {
                return reader.samples();
            }
            let start = reader.at;
            reader.skip_value()?;
            length += reader.at - start;
            if length > MAX_FACTS {
                return Err(reader.error("metadata that is too long"));
            }
            reader.at = start;
            facts.insert(key.to_string(), reader.value()?);
            Ok(())
        })?;
        self.take_meta(facts)
    }

    fn timeline(&mut self) -> Result<(), JsonError> {
        self.object(|reader, key| {
            let column = ["time", "pid", "tid", "node"].iter().position(|name| *name == key);
            match (column, reader.peek()) {
                (Some(column), Some(b'[')) => reader.columns[column] = reader.column()?,
                (_, Some(b'{')) if key == "values" => reader.sample_values()?,
                _ => reader.skip_value()?,
            }
            Ok(())
        })
    }

    fn take_meta(&mut self, mut map: Map<String, Value>) -> Result<(), JsonError> {
        if map
            .get("format")
            .and_then(Value::as_u64)
            .is_some_and(|version| version > FORMAT_VERSION)
        {
            return Err(self.error("file format of a newer nativeprof"));
        }
        old_keys::rename(&mut map);
        self.take_value_types(&mut map);
        let quality = map.get("quality").cloned().unwrap_or_default();
        let count = |key: &str| number(quality.get(key));
        let stopped = map.get("stopped").map(|stopped| StopSummary {
            median_us: number(stopped.get("median_us")),
            max_us: number(stopped.get("max_us")),
        });
        let reasons = quality.get("reasons").and_then(Value::as_object).into_iter().flatten();
        self.profile.meta = Meta {
            rate: number(map.get("rate")),
            start: map.get("start").and_then(Value::as_f64).unwrap_or(0.0),
            duration: map.get("duration").and_then(Value::as_f64).unwrap_or(0.0),
            profiler_cpu: map.get("profiler_cpu").and_then(Value::as_f64).unwrap_or(0.0),
            sampling_cpu: map.get("sampling_cpu").and_then(Value::as_f64).unwrap_or(0.0),
            target_cpu: map.get("target_cpu").and_then(Value::as_f64).unwrap_or(0.0),
            pid: number(map.get("pid")),
            stopped,
            quality: Quality {
                expected: count("expected"),
                taken: count("taken"),
                exact: count("exact"),
                repaired: count("repaired"),
                partial: count("partial"),
                lost: count("lost"),
                reasons: reasons
                    .map(|(reason, count)| (reason.clone(), number(Some(count))))
                    .collect(),
            },
            modules: objects(map.remove("modules"), |module| ModuleMeta {
                path: take_string(module, "path"),
                build_id: take_string(module, "build_id"),
                symbols_from: take_string(module, "symbols_from"),
                symbols_missing: take_string(module, "symbols_missing"),
                frames: number(module.get("frames")),
                unnamed: number(module.get("unnamed")),
                samples: number(module.get("samples")),
                instructions: instructions(module.get("instructions")),
            }),
            threads: objects(map.remove("threads"), |thread| {
                (
                    number(thread.get("pid")),
                    number(thread.get("tid")),
                    take_string(thread, "name"),
                )
            }),
            merged_from: objects(map.remove("merged_from"), |part| MergedRecording {
                name: take_string(part, "name"),
                command: take_string(part, "command"),
                rate: number(part.get("rate")),
                start: part.get("start").and_then(Value::as_f64).unwrap_or(0.0),
                duration: part.get("duration").and_then(Value::as_f64).unwrap_or(0.0),
                samples: number(part.get("samples")),
            }),
            lags: objects(map.remove("lags"), lags::read),
            memory: objects(map.remove("memory"), memory::read),
            memory_over_time: memory::read_over_time(map.remove("memory_over_time")),
            machine: machine(map.remove("machine")),
            version: take_string(&mut map, "version"),
            event: take_string(&mut map, "event"),
            backend: take_string(&mut map, "backend"),
            command: take_string(&mut map, "command"),
            python: take_string(&mut map, "python"),
        };
        Ok(())
    }

    /// Positions in the file are node ids here, since nodes were numbered as they opened.
    fn take_timeline(&mut self) {
        let [times, pids, tids, nodes] = &self.columns;
        let rows = times.iter().zip(pids).zip(tids).zip(nodes);
        let mut kept = Vec::new();
        let samples = (0u32..).zip(rows).filter_map(|(row, (((time, pid), tid), node))| {
            let sample = TimelineSample {
                time: *time,
                pid: u32::try_from(*pid).unwrap_or(0),
                tid: u32::try_from(*tid).unwrap_or(0),
                node: NodeId::try_from(*node).ok()?,
            };
            let sound = (sample.node as usize) < self.profile.nodes.len() && *time != NO_NUMBER;
            kept.extend(sound.then_some(row));
            sound.then_some(sample)
        });
        self.profile.timeline = samples.collect();
        self.kept_samples = kept;
    }
}

fn take_string(map: &mut Map<String, Value>, key: &str) -> String {
    match map.get_mut(key).map(Value::take) {
        Some(Value::String(text)) => text,
        _ => String::new(),
    }
}

fn number_or_zero<T: TryFrom<u64> + Default>(number: Option<u64>) -> T {
    number.and_then(|number| T::try_from(number).ok()).unwrap_or_default()
}

/// The number if it is one and fits, else 0.
fn number<T: TryFrom<u64> + Default>(value: Option<&Value>) -> T {
    number_or_zero(value.and_then(Value::as_u64))
}

fn objects<T>(value: Option<Value>, mut read: impl FnMut(&mut Map<String, Value>) -> T) -> Vec<T> {
    let Some(Value::Array(list)) = value else {
        return Vec::new();
    };
    let maps = list.into_iter().filter_map(|value| match value {
        Value::Object(mut map) => Some(read(&mut map)),
        _ => None,
    });
    maps.collect()
}
/// What is known of the machine; texts of any length are cut.
fn machine(value: Option<Value>) -> Machine {
    let Some(Value::Object(mut map)) = value else {
        return Machine::default();
    };
    let mut machine = Machine {
        cores: number(map.get("cores")),
        ..Machine::default()
    };
    for (key, text) in machine.texts() {
        *text = take_string(&mut map, key);
    }
    machine.bounded()
}
