//! The count tree in JSON back to a [`Profile`].
//!
//! Files may come from anywhere: nesting lives on the heap and is limited, memory is bounded by the size of the input,
//! and whatever is not a count tree is an error that names the place. A file of Dask itself, without our keys, is read
//! too.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use serde_json::{Map, Value};

use super::json::{FORMAT_VERSION, KINDS};
use super::view::{LOW_LEVEL, unknown_place};
use crate::tree::profile::{Frame, FrameId, FrameKind, Held, Meta, ModuleMeta, Node, NodeId, Profile, Quality, Tick};

/// Frames on top of each other; far more than any stack we record.
const MAX_DEPTH: usize = 100_000;

/// Why a file could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Byte of the file where it was noticed.
    pub at: usize,
    pub reason: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not a profile: {} at byte {}", self.reason, self.at)
    }
}

impl std::error::Error for Error {}

/// Reads what [`write`](super::json::write) wrote.
pub fn read(bytes: &[u8]) -> Result<Profile, Error> {
    let text = std::str::from_utf8(bytes).map_err(|e| Error {
        at: e.valid_up_to(),
        reason: "invalid UTF-8".into(),
    })?;
    let mut reader = Reader {
        text,
        at: 0,
        profile: Profile::default(),
        frames: HashMap::new(),
        timeline: Value::Null,
    };
    reader.tree()?;
    reader.space();
    if reader.at < text.len() {
        return Err(reader.error("text after the end"));
    }
    reader.take_timeline();
    Ok(reader.profile)
}

/// A node whose closing brace has not come yet.
struct Open {
    node: NodeId,
    identifier: String,
    description: Map<String, Value>,
    /// Inside its `children` object, rather than among its own keys.
    in_children: bool,
    /// Something came before in the innermost object: a comma has to follow.
    comma: bool,
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    profile: Profile,
    frames: HashMap<Frame, FrameId>,
    timeline: Value,
}

impl<'a> Reader<'a> {
    /// Reads the whole tree; one turn of the loop is one key of one node, or one closing brace.
    fn tree(&mut self) -> Result<(), Error> {
        self.expect(b'{')?;
        let mut path = vec![self.open(0, String::new())?];
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
                self.expect(b',')?;
            }
            let key = self.string()?;
            self.expect(b':')?;
            if top.in_children {
                self.expect(b'{')?;
                let parent = top.node;
                if path.len() > MAX_DEPTH {
                    return Err(self.error("frames nested too deeply"));
                }
                path.push(self.open(parent, key)?);
                continue;
            }
            match key.as_str() {
                "children" => {
                    self.expect(b'{')?;
                    top.in_children = true;
                    top.comma = false;
                }
                "identifier" => top.identifier = self.string()?,
                "description" => match self.value()? {
                    Value::Object(map) => top.description = map,
                    // Very old profiles of Dask have text here.
                    Value::String(name) => _ = top.description.insert("name".into(), name.into()),
                    _ => return Err(self.error("a description that is not an object")),
                },
                "count" => {
                    let count = self
                        .value()?
                        .as_u64()
                        .ok_or_else(|| self.error("a count that is no whole number"))?;
                    self.profile.nodes[top.node as usize].count = count;
                }
                "lines" => self.profile.nodes[top.node as usize].lines = lines(&self.value()?),
                "self_lines" => self.profile.nodes[top.node as usize].self_lines = lines(&self.value()?),
                "nativeprof" if top.node == 0 => {
                    let value = self.value()?;
                    self.take_meta(value)?;
                }
                _ => self.skip_value()?,
            }
        }
        Ok(())
    }

    fn open(&mut self, parent: NodeId, identifier: String) -> Result<Open, Error> {
        let node =
            NodeId::try_from(self.profile.nodes.len()).map_err(|_| self.error("more nodes than can be numbered"))?;
        let (lines, line_text) = (BTreeMap::new(), String::new());
        self.profile.nodes.push(Node {
            frame: 0,
            parent,
            count: 0,
            lines,
            self_lines: BTreeMap::new(),
            line_text,
            first_seen_line: 0,
        });
        Ok(Open {
            node,
            identifier,
            description: Map::new(),
            in_children: false,
            comma: false,
        })
    }

    fn close(&mut self, done: Open) -> Result<(), Error> {
        let mut description = done.description;
        let kind = description.get("kind").and_then(Value::as_str);
        let filename = description.get("filename").and_then(Value::as_str).unwrap_or("");
        let kind = match KINDS.iter().find(|(name, _)| Some(*name) == kind) {
            _ if done.node == 0 => FrameKind::Root,
            Some((_, kind)) => *kind,
            // A tree of Dask itself has native frames without any key of ours.
            None if filename == LOW_LEVEL && done.identifier.contains(";<low-level>;0x") => FrameKind::Native,
            None => FrameKind::Python,
        };
        let last = done.identifier.rsplit(';').next().unwrap_or("");
        let address = last
            .strip_prefix("0x")
            .and_then(|hex| u64::from_str_radix(hex, 16).ok())
            .unwrap_or(0);
        let mut frame = Frame {
            kind,
            name: take_string(&mut description, "name"),
            qualname: take_string(&mut description, "qualname"),
            filename: take_string(&mut description, "filename"),
            first_line: if kind == FrameKind::Python {
                last.parse().unwrap_or(0)
            } else {
                0
            },
            address: if kind == FrameKind::Python { 0 } else { address },
            module: take_string(&mut description, "module"),
            source: take_string(&mut description, "source"),
        };
        if kind == FrameKind::Unknown
            && let Some(name) = frame.name.strip_suffix(&unknown_place(&frame.module, address))
        {
            frame.name = name.to_string();
        }
        let (line, text) = if kind == FrameKind::Python {
            ("line_number", "line")
        } else {
            ("source_line", "source_text")
        };
        let node = &mut self.profile.nodes[done.node as usize];
        node.first_seen_line = number(description.get(line));
        node.line_text = take_string(&mut description, text);
        let next = self.profile.frames.len() as FrameId;
        node.frame = match self.frames.get(&frame) {
            Some(known) => *known,
            None => {
                self.profile.frames.push(frame.clone());
                self.frames.insert(frame, next);
                next
            }
        };
        Ok(())
    }

    fn take_meta(&mut self, value: Value) -> Result<(), Error> {
        let Value::Object(mut map) = value else {
            return Err(self.error("facts that are not an object"));
        };
        if map
            .get("format")
            .and_then(Value::as_u64)
            .is_some_and(|version| version > FORMAT_VERSION)
        {
            return Err(self.error("written by a newer nativeprof, whose files this one cannot read,"));
        }
        self.timeline = map.remove("timeline").unwrap_or_default();
        let quality = map.get("quality").cloned().unwrap_or_default();
        let count = |key: &str| number(quality.get(key));
        let held = map.get("held").map(|held| Held {
            median_us: number(held.get("median_us")),
            longest_us: number(held.get("longest_us")),
        });
        let reasons = quality.get("reasons").and_then(Value::as_object).into_iter().flatten();
        self.profile.meta = Meta {
            rate: number(map.get("rate")),
            start: map.get("start").and_then(Value::as_f64).unwrap_or(0.0),
            duration: map.get("duration").and_then(Value::as_f64).unwrap_or(0.0),
            own_cpu: map.get("own_cpu").and_then(Value::as_f64).unwrap_or(0.0),
            pid: number(map.get("pid")),
            held,
            quality: Quality {
                asked: count("asked"),
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
                names: take_string(module, "names"),
                missing: take_string(module, "missing"),
                frames: number(module.get("frames")),
                samples: number(module.get("samples")),
            }),
            threads: objects(map.remove("threads"), |thread| {
                (
                    number(thread.get("pid")),
                    number(thread.get("tid")),
                    take_string(thread, "name"),
                )
            }),
            version: take_string(&mut map, "version"),
            event: take_string(&mut map, "event"),
            backend: take_string(&mut map, "backend"),
            command: take_string(&mut map, "command"),
            python: take_string(&mut map, "python"),
        };
        Ok(())
    }

    /// Places in the file are node ids here, since nodes were numbered as they opened.
    fn take_timeline(&mut self) {
        let column = |key: &str| {
            self.timeline
                .get(key)
                .and_then(Value::as_array)
                .map_or(&[][..], |column| column)
        };
        let (times, pids, tids, nodes) = (column("time"), column("pid"), column("tid"), column("node"));
        let rows = times.iter().zip(pids).zip(tids).zip(nodes);
        let ticks = rows.filter_map(|(((time, pid), tid), node)| {
            let node = NodeId::try_from(node.as_u64()?).ok()?;
            let tick = Tick {
                time: time.as_u64()?,
                pid: number(Some(pid)),
                tid: number(Some(tid)),
                node,
            };
            ((node as usize) < self.profile.nodes.len()).then_some(tick)
        });
        self.profile.timeline = ticks.collect();
    }

    fn error(&self, reason: &str) -> Error {
        Error {
            at: self.at,
            reason: reason.to_string(),
        }
    }

    fn space(&mut self) {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest
            .iter()
            .take_while(|byte| matches!(byte, b' ' | b'\n' | b'\r' | b'\t'))
            .count();
    }

    fn peek(&mut self) -> Option<u8> {
        self.space();
        self.text.as_bytes().get(self.at).copied()
    }

    fn expect(&mut self, byte: u8) -> Result<(), Error> {
        if self.peek() != Some(byte) {
            return Err(self.error(&format!("`{}` expected", byte as char)));
        }
        self.at += 1;
        Ok(())
    }

    fn string(&mut self) -> Result<String, Error> {
        match self.value()? {
            Value::String(text) => Ok(text),
            _ => Err(self.error("text expected")),
        }
    }

    /// A whole value that is not part of the tree: its extent is found first, then the JSON crate (which limits its
    /// own depth) takes it.
    fn value(&mut self) -> Result<Value, Error> {
        self.space();
        let start = self.at;
        self.skip_value()?;
        serde_json::from_str(&self.text[start..self.at]).map_err(|error| Error {
            at: start,
            reason: format!("invalid JSON ({error})"),
        })
    }

    /// Steps over a value of any depth. Only brackets and strings are looked at.
    fn skip_value(&mut self) -> Result<(), Error> {
        let mut depth = 0usize;
        loop {
            match self.peek() {
                None => return Err(self.error("the file ends early")),
                Some(b'{' | b'[') => {
                    depth += 1;
                    self.at += 1;
                }
                Some(b'}' | b']') => {
                    depth = depth.checked_sub(1).ok_or_else(|| self.error("a value expected"))?;
                    self.at += 1;
                }
                Some(b'"') => self.skip_string()?,
                Some(b',' | b':') if depth > 0 => self.at += 1,
                Some(_) => {
                    let rest = &self.text.as_bytes()[self.at..];
                    let is_word = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.');
                    let length = rest.iter().take_while(|byte| is_word(byte)).count();
                    if length == 0 {
                        return Err(self.error("a value expected"));
                    }
                    self.at += length;
                }
            }
            if depth == 0 {
                return Ok(());
            }
        }
    }

    fn skip_string(&mut self) -> Result<(), Error> {
        let bytes = self.text.as_bytes();
        self.at += 1;
        loop {
            match bytes.get(self.at) {
                None => return Err(self.error("the file ends early")),
                Some(b'"') => break,
                Some(b'\\') => self.at += 2,
                Some(_) => self.at += 1,
            }
        }
        self.at += 1;
        Ok(())
    }
}

fn take_string(map: &mut Map<String, Value>, key: &str) -> String {
    match map.get_mut(key).map(Value::take) {
        Some(Value::String(text)) => text,
        _ => String::new(),
    }
}

/// The number if it is one and fits, else 0.
fn number<T: TryFrom<u64> + Default>(value: Option<&Value>) -> T {
    value
        .and_then(Value::as_u64)
        .and_then(|number| T::try_from(number).ok())
        .unwrap_or_default()
}

fn lines(value: &Value) -> BTreeMap<u32, u64> {
    let counts = value.as_object().into_iter().flatten();
    counts
        .filter_map(|(line, count)| Some((line.parse().ok()?, count.as_u64()?)))
        .collect()
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
