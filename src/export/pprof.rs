//! A profile in the format of pprof: gzip over a protocol buffer, two values a sample: `samples` (count) and `cpu`
//! (nanoseconds).
//!
//! A native function and what the compiler inlined into it are one location with several lines, as pprof has it.
//! Samples are told apart by the line at the end of the stack and, where the timeline tells, by labels `thread`, `tid`
//! and `pid`; pid and tid are also what `--tagroot` takes. An address is the start of the function in its file's own
//! address space; the mappings are files, without addresses.
//!
//! Source: `proto/profile.proto` of google/pprof. The messages are written by hand: a few fields of seven types, no
//! compiler of protocol buffers.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message;
use rustc_hash::FxHashMap;

use super::escape;
use super::stacks::{NONE, Stacks, Timeline, period};
use super::view::View;
use crate::tree::profile::{Frame, FrameKind, Profile};

#[derive(Clone, PartialEq, Message)]
struct Document {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<Sample>,
    #[prost(message, repeated, tag = "3")]
    mapping: Vec<Mapping>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "9")]
    time_nanos: i64,
    #[prost(int64, tag = "10")]
    duration_nanos: i64,
    #[prost(message, optional, tag = "11")]
    period_type: Option<ValueType>,
    #[prost(int64, tag = "12")]
    period: i64,
    #[prost(int64, repeated, tag = "13")]
    comment: Vec<i64>,
    #[prost(int64, tag = "14")]
    default_sample_type: i64,
}

#[derive(Clone, PartialEq, Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    r#type: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Sample {
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    label: Vec<Label>,
}

#[derive(Clone, PartialEq, Message)]
struct Label {
    #[prost(int64, tag = "1")]
    key: i64,
    #[prost(int64, tag = "2")]
    str: i64,
    #[prost(int64, tag = "3")]
    num: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Mapping {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "5")]
    filename: i64,
    #[prost(int64, tag = "6")]
    build_id: i64,
    #[prost(bool, tag = "7")]
    has_functions: bool,
    #[prost(bool, tag = "8")]
    has_filenames: bool,
    #[prost(bool, tag = "9")]
    has_line_numbers: bool,
    #[prost(bool, tag = "10")]
    has_inline_frames: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(uint64, tag = "2")]
    mapping_id: u64,
    #[prost(uint64, tag = "3")]
    address: u64,
    /// Innermost inlined function first.
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

#[derive(Clone, PartialEq, Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
    #[prost(int64, tag = "2")]
    line: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
    #[prost(int64, tag = "3")]
    system_name: i64,
    #[prost(int64, tag = "4")]
    filename: i64,
    #[prost(int64, tag = "5")]
    start_line: i64,
}

/// Writes the profile as pprof's protocol buffer.
pub fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let view = View::new(profile);
    let stacks = Stacks::new(&view);
    let document = Maker::new(profile, &stacks).make(profile, &view);
    let mut gz = GzEncoder::new(out, Compression::fast());
    gz.write_all(&document.encode_to_vec())?;
    gz.finish()?.flush()
}

struct Maker<'a> {
    stacks: &'a Stacks<'a>,
    document: Document,
    // Names come from the target: a hasher that cannot be made to collide.
    strings: HashMap<String, i64>,
    /// Mapping of each function, 0 for none.
    mappings: Vec<u64>,
    /// Function and line, the location of the function that this one was inlined into (or 0) -> location.
    locations: FxHashMap<(u32, u32, u64), u64>,
}

impl<'a> Maker<'a> {
    fn new(profile: &Profile, stacks: &'a Stacks<'a>) -> Self {
        let mut maker = Maker {
            stacks,
            document: Document::default(),
            strings: HashMap::new(),
            mappings: Vec::new(),
            locations: FxHashMap::default(),
        };
        maker.string(""); // the first one, by definition
        maker.add_functions(profile);
        maker
    }

    fn string(&mut self, text: &str) -> i64 {
        if let Some(known) = self.strings.get(text) {
            return *known;
        }
        let next = self.strings.len() as i64;
        self.document.string_table.push(text.to_string());
        self.strings.insert(text.to_string(), next);
        next
    }

    /// A name, which readers print as it is.
    fn name(&mut self, text: &str) -> i64 {
        self.string(&escape::line(text))
    }

    fn add_functions(&mut self, profile: &Profile) {
        let rows = profile.meta.modules.iter();
        let files: HashMap<&str, (&str, &str)> = rows
            .rev()
            .map(|row| {
                (
                    row.path.rsplit('/').next().unwrap_or(""),
                    (row.path.as_str(), row.build_id.as_str()),
                )
            })
            .collect();
        let mut known: HashMap<&str, u64> = HashMap::new();
        for (at, function) in self.stacks.functions.iter().enumerate() {
            let (name, filename) = (self.name(&function.name), self.name(function.file));
            let id = at as u64 + 1;
            self.document.function.push(Function {
                id,
                name,
                // The same name again would be shortened as if it were C++: `<module>` to nothing.
                system_name: 0,
                filename,
                start_line: function.first_line.into(),
            });
            let module = function.frame.map_or("", |frame| frame.module.as_str());
            let mapping = match known.get(module) {
                _ if module.is_empty() => 0,
                Some(known) => *known,
                None => {
                    let (path, build_id) = files.get(module).copied().unwrap_or((module, ""));
                    let id = self.document.mapping.len() as u64 + 1;
                    let row = Mapping {
                        id,
                        filename: self.name(path),
                        build_id: self.name(build_id),
                        // So that no reader looks for more on its own machine.
                        has_functions: true,
                        has_filenames: true,
                        has_line_numbers: true,
                        has_inline_frames: true,
                    };
                    self.document.mapping.push(row);
                    known.insert(module, id);
                    id
                }
            };
            self.mappings.push(mapping);
        }
    }

    fn location(&mut self, function: u32, line: u32, outer: u64) -> u64 {
        let next = self.document.location.len() as u64 + 1;
        let id = *self.locations.entry((function, line, outer)).or_insert(next);
        if id == next {
            let mut lines = vec![Line {
                function_id: u64::from(function) + 1,
                line: line.into(),
            }];
            if let Some(outer) = (outer as usize).checked_sub(1) {
                lines.extend_from_slice(&self.document.location[outer].line);
            }
            self.document.location.push(Location {
                id,
                mapping_id: self.mappings[function as usize],
                address: self.stacks.functions[function as usize]
                    .frame
                    .map_or(0, |frame| frame.address),
                line: lines,
            });
        }
        id
    }

    fn make(mut self, profile: &Profile, view: &View<'_>) -> Document {
        let stacks = self.stacks;
        // By item: its location where it calls others, and whether its caller is a part of that.
        let mut at: Vec<(u64, bool)> = Vec::with_capacity(view.items.len());
        for (item, data) in view.items.iter().enumerate() {
            let caller = stacks.caller[item];
            let inlined = caller != NONE
                && is(view.frame(item as u32), &[FrameKind::Inlined])
                && is(view.frame(caller), &[FrameKind::Native, FrameKind::Inlined]);
            let outer = if inlined { at[caller as usize].0 } else { 0 };
            at.push((
                self.location(stacks.function[item], data.first_seen_line, outer),
                inlined,
            ));
        }
        let deeper = self.location(stacks.deeper(), 0, 0);
        let ns = period(profile).unwrap_or(0);
        let threads = threads(profile, view, stacks);
        let labels: Vec<Vec<Label>> = threads.names.iter().map(|name| self.labels(name)).collect();
        for (item, data) in (0u32..).zip(&view.items) {
            let own = stacks.own[item as usize];
            if own == 0 {
                continue;
            }
            let (path, is_deeper) = stacks.path(item);
            let mut ids = Vec::new();
            ids.extend(is_deeper.then_some(deeper));
            let mut part_of_last = false;
            for item in path {
                let (id, inlined) = at[item as usize];
                if !part_of_last {
                    ids.push(id);
                }
                part_of_last = inlined;
            }
            let whole = (threads.of_item[item as usize].as_slice(), &data.self_lines);
            for (thread, line, count) in shares(own, whole.0, whole.1) {
                let mut location_id = ids.clone();
                if let (Some(line), false) = (line, is_deeper) {
                    let (_, inlined) = at[item as usize];
                    let caller = stacks.caller[item as usize];
                    let outer = if inlined { at[caller as usize].0 } else { 0 };
                    location_id[0] = self.location(stacks.function[item as usize], line, outer);
                }
                let (count, cpu) = (limited(count), limited(count.saturating_mul(ns)));
                self.document.sample.push(Sample {
                    location_id,
                    value: vec![count, cpu],
                    label: thread.map_or(Vec::new(), |thread| labels[thread as usize].clone()),
                });
            }
        }
        self.add_facts(profile, ns);
        self.document
    }

    fn labels(&mut self, (pid, tid, name): &(u32, u32, String)) -> Vec<Label> {
        let mut labels = Vec::new();
        if !name.is_empty() {
            let (key, str) = (self.string("thread"), self.name(name));
            labels.push(Label { key, str, num: 0 });
        }
        for (key, number) in [("pid", pid), ("tid", tid)] {
            let (key, str) = (self.string(key), self.string(&number.to_string()));
            labels.push(Label { key, str, num: 0 });
        }
        labels
    }

    fn add_facts(&mut self, profile: &Profile, ns: u64) {
        let meta = &profile.meta;
        let mut kind = |kind: &str, unit: &str| ValueType {
            r#type: self.string(kind),
            unit: self.string(unit),
        };
        let (samples, cpu) = (kind("samples", "count"), kind("cpu", "nanoseconds"));
        // Where the rate is not known all times are 0.
        let shown = if ns == 0 { &samples } else { &cpu };
        let (shown, period_type) = (shown.r#type, Some(cpu.clone()));
        let quality = format!(
            "stacks: exact {}, repaired {}, partial {}; lost {}",
            meta.quality.exact, meta.quality.repaired, meta.quality.partial, meta.quality.lost
        );
        let comments = [
            format!("nativeprof {}, {} {}", meta.version, meta.event, meta.backend),
            meta.command.clone(),
            meta.python.clone(),
            quality,
        ];
        let comment = comments
            .iter()
            .filter(|text| !text.is_empty())
            .map(|text| self.name(text))
            .collect();
        self.document = Document {
            sample_type: vec![samples, cpu],
            time_nanos: (meta.start * 1e9) as i64,
            duration_nanos: (meta.duration * 1e9) as i64,
            period_type,
            period: limited(ns),
            comment,
            default_sample_type: shown,
            ..std::mem::take(&mut self.document)
        };
    }
}

fn is(frame: Option<&Frame>, kinds: &[FrameKind]) -> bool {
    frame.is_some_and(|frame| kinds.contains(&frame.kind))
}

fn limited(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

struct Threads {
    names: Vec<(u32, u32, String)>,
    /// By item: (thread, samples).
    of_item: Vec<Vec<(u32, u64)>>,
}

fn threads(profile: &Profile, view: &View<'_>, stacks: &Stacks<'_>) -> Threads {
    let mut of_item: Vec<Vec<(u32, u64)>> = vec![Vec::new(); view.items.len()];
    let mut names = Vec::new();
    for (at, track) in (0u32..).zip(Timeline::new(profile, view, stacks).tracks) {
        for (_, item) in track.ticks {
            let here = &mut of_item[item as usize];
            match here.last_mut() {
                Some((last, count)) if *last == at => *count += 1,
                _ => here.push((at, 1)),
            }
        }
        names.push((track.pid, track.tid, track.name));
    }
    Threads { names, of_item }
}

/// The samples that ended in one place by thread and line, as far as that is known: of several threads and several
/// lines nobody knows which belong together.
fn shares(own: u64, threads: &[(u32, u64)], lines: &BTreeMap<u32, u64>) -> Vec<(Option<u32>, Option<u32>, u64)> {
    let mut left = own;
    let mut out = Vec::new();
    let mut take = |thread, line, count: u64| {
        let count = count.min(left);
        left -= count;
        if count > 0 {
            out.push((thread, line, count));
        }
    };
    if let [(thread, count)] = threads
        && *count == own
    {
        lines
            .iter()
            .for_each(|(line, count)| take(Some(*thread), Some(*line), *count));
        take(Some(*thread), None, u64::MAX);
    } else if threads.is_empty() {
        lines.iter().for_each(|(line, count)| take(None, Some(*line), *count));
        take(None, None, u64::MAX);
    } else {
        let only = lines
            .keys()
            .next()
            .copied()
            .filter(|_| lines.len() == 1 && lines.values().all(|n| *n == own));
        threads
            .iter()
            .for_each(|(thread, count)| take(Some(*thread), only, *count));
        take(None, only, u64::MAX);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_shared_out_as_far_as_is_known() {
        let lines = |lines: &[(u32, u64)]| lines.iter().copied().collect::<BTreeMap<_, _>>();
        for (own, threads, on, expected) in [
            (5, &[][..], &[][..], &[(None, None, 5)][..]),
            (
                5,
                &[],
                &[(7, 2), (9, 2)],
                &[(None, Some(7), 2), (None, Some(9), 2), (None, None, 1)],
            ),
            (
                5,
                &[(1, 5)],
                &[(7, 2), (9, 3)],
                &[(Some(1), Some(7), 2), (Some(1), Some(9), 3)],
            ),
            (
                5,
                &[(1, 2), (2, 3)],
                &[(7, 2), (9, 3)],
                &[(Some(1), None, 2), (Some(2), None, 3)],
            ),
            (5, &[(1, 2)], &[(7, 5)], &[(Some(1), Some(7), 2), (None, Some(7), 3)]),
            // Counts that do not add up.
            (3, &[(1, 3)], &[(7, 9), (9, 9)], &[(Some(1), Some(7), 3)]),
        ] {
            assert_eq!(shares(own, threads, &lines(on)), expected);
        }
    }
}
