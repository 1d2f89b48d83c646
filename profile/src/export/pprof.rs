//! A profile in the format of pprof: gzip over a protocol buffer, with a sample type for each value type: `samples`
//! (count) and `cpu` (nanoseconds) of a recording, `alloc_space` (bytes) of one of allocations.
//!
//! Each frame has the line of its sample. A native function and what the compiler inlined into it are one location with
//! several lines, as pprof has it. Samples differ by their lines and, where the timeline has them, by labels `thread`,
//! `tid` and `pid`, and those of spans; `--tagroot` accepts pid and tid too. An address is the start of the function in
//! its file's own address space; the mappings are files, without addresses.
//!
//! Source: `proto/profile.proto` of google/pprof. The messages are written by hand: a few fields of seven types, no
//! compiler of protocol buffers.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message;
use rustc_hash::FxHashMap;

use super::thread_tracks::{NONE, StackRows, Timeline, Track};
use crate::escape;
use crate::labels::LabelSetId;
use crate::model::{Frame, FrameKind, Profile};
use crate::stacks_by_line::StacksByLine;
use crate::values::Amounts;
use crate::view::View;

#[derive(Clone, PartialEq, Message)]
struct Document {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<PprofValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<PprofSample>,
    #[prost(message, repeated, tag = "3")]
    mapping: Vec<PprofMapping>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<PprofFunction>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "9")]
    time_nanos: i64,
    #[prost(int64, tag = "10")]
    duration_nanos: i64,
    #[prost(message, optional, tag = "11")]
    period_type: Option<PprofValueType>,
    #[prost(int64, tag = "12")]
    period: i64,
    #[prost(int64, repeated, tag = "13")]
    comment: Vec<i64>,
    #[prost(int64, tag = "14")]
    default_sample_type: i64,
}

#[derive(Clone, PartialEq, Message)]
struct PprofValueType {
    #[prost(int64, tag = "1")]
    r#type: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Clone, PartialEq, Message)]
struct PprofSample {
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
struct PprofMapping {
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
    line: Vec<PprofLine>,
}

#[derive(Clone, PartialEq, Message)]
struct PprofLine {
    #[prost(uint64, tag = "1")]
    function_id: u64,
    #[prost(int64, tag = "2")]
    line: i64,
}

#[derive(Clone, PartialEq, Message)]
struct PprofFunction {
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
    let entries = StacksByLine::new(profile, &view);
    let stacks = StackRows::by_line(profile, &view, &entries);
    let document = ProfileBuilder::new(profile, &stacks).make(profile, &view, &entries);
    let mut gz = GzEncoder::new(out, Compression::fast());
    gz.write_all(&document.encode_to_vec())?;
    gz.finish()?.flush()
}

struct ProfileBuilder<'a> {
    stacks: &'a StackRows<'a>,
    document: Document,
    // Names come from the target: use a hasher that resists collision attacks.
    strings: HashMap<String, i64>,
    /// Mapping of each function, 0 for none.
    mappings: Vec<u64>,
    /// The first function with the name, file and line of each: an inlined function is one for each function around it, and for
    /// pprof all of them are the same.
    same: Vec<u32>,
    /// Function and line, the location of the function that this one was inlined into (or 0) -> location.
    locations: FxHashMap<(u32, u32, u64), u64>,
}

impl<'a> ProfileBuilder<'a> {
    fn new(profile: &Profile, stacks: &'a StackRows<'a>) -> Self {
        let mut builder = ProfileBuilder {
            stacks,
            document: Document::default(),
            strings: HashMap::new(),
            mappings: Vec::new(),
            same: Vec::new(),
            locations: FxHashMap::default(),
        };
        builder.string(""); // the first one, by definition
        builder.add_functions(profile);
        builder
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
        let mut first: FxHashMap<(i64, i64, u32), u32> = FxHashMap::default();
        for (at, function) in (0u32..).zip(&self.stacks.functions) {
            let (name, filename) = (self.name(&function.name), self.name(function.file));
            let same = *first.entry((name, filename, function.first_line)).or_insert(at);
            self.same.push(same);
            if same == at {
                self.document.function.push(PprofFunction {
                    id: u64::from(at) + 1,
                    name,
                    // The same name again would be shortened as if it were C++: `<module>` to nothing.
                    system_name: 0,
                    filename,
                    start_line: function.first_line.into(),
                });
            }
            let module = function.frame.map_or("", |frame| frame.module.as_str());
            let mapping = match known.get(module) {
                _ if module.is_empty() => 0,
                Some(known) => *known,
                None => {
                    let (path, build_id) = files.get(module).copied().unwrap_or((module, ""));
                    let id = self.document.mapping.len() as u64 + 1;
                    let row = PprofMapping {
                        id,
                        filename: self.name(path),
                        build_id: self.name(build_id),
                        // So that readers do not search for symbols on their own machine.
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
        let same = self.same[function as usize];
        // What is inlined is where the function around it is.
        let around = (outer as usize).checked_sub(1).map(|at| &self.document.location[at]);
        let (function, mapping_id, address) = match around {
            Some(around) => (same, around.mapping_id, around.address),
            None => (
                function,
                self.mappings[function as usize],
                self.stacks.functions[function as usize]
                    .frame
                    .map_or(0, |frame| frame.address),
            ),
        };
        let id = *self.locations.entry((function, line, outer)).or_insert(next);
        if id == next {
            let mut lines = vec![PprofLine {
                function_id: u64::from(same) + 1,
                line: line.into(),
            }];
            lines.extend(around.into_iter().flat_map(|around| around.line.clone()));
            self.document.location.push(Location {
                id,
                mapping_id,
                address,
                line: lines,
            });
        }
        id
    }

    fn make(mut self, profile: &Profile, view: &View<'_>, entries: &StacksByLine) -> Document {
        let stacks = self.stacks;
        // By row: its location, and whether its caller is a part of that.
        let mut at: Vec<(u64, bool)> = Vec::with_capacity(stacks.item.len());
        for (row, item) in stacks.item.iter().enumerate() {
            let caller = stacks.caller[row];
            let inlined = caller != NONE
                && is(view.frame(*item), &[FrameKind::Inlined])
                && is(
                    view.frame(stacks.item[caller as usize]),
                    &[FrameKind::Native, FrameKind::Inlined],
                );
            let outer = if inlined { at[caller as usize].0 } else { 0 };
            at.push((self.location(stacks.function[row], stacks.line[row], outer), inlined));
        }
        let deeper = self.location(stacks.deeper(), 0, 0);
        let timeline = Timeline::new(profile, entries);
        for ((row, thread, set), value) in sums(profile, &timeline) {
            let (path, is_deeper) = stacks.path(row);
            let mut location_id = Vec::new();
            location_id.extend(is_deeper.then_some(deeper));
            let mut part_of_last = false;
            for row in path {
                let (id, inlined) = at[row as usize];
                if !part_of_last {
                    location_id.push(id);
                }
                part_of_last = inlined;
            }
            let track = thread.map(|thread| &timeline.tracks[thread]);
            let mut label = track.map_or(Vec::new(), |track| self.labels(track));
            for (key, value) in profile.labels.sets.get(set as usize).into_iter().flatten() {
                let (key, str) = (self.name(key), self.name(value));
                label.push(Label { key, str, num: 0 });
            }
            self.document.sample.push(PprofSample {
                location_id,
                value: value.into_iter().map(limited).collect(),
                label,
            });
        }
        self.add_facts(profile);
        self.document
    }

    fn labels(&mut self, Track { pid, tid, name, .. }: &Track) -> Vec<Label> {
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

    fn add_facts(&mut self, profile: &Profile) {
        let meta = &profile.meta;
        let types = profile.value_types();
        let sample_type: Vec<PprofValueType> = types
            .iter()
            .map(|value| PprofValueType {
                r#type: self.string(value.kind.pprof_name()),
                unit: self.string(value.kind.unit.name()),
            })
            .collect();
        // A time is more informative than a count, and so are bytes.
        let shown = profile.default_time().unwrap_or_else(|| profile.default_value());
        let shown = sample_type[shown].r#type;
        let periods = types.iter().zip(&sample_type).skip(1);
        let period = periods.filter_map(|(value, kind)| match value.amounts {
            Amounts::PerCount(amount) => Some((kind.clone(), amount)),
            Amounts::Each { .. } => None,
        });
        let (period_type, period) = period
            .map(|(kind, amount)| (Some(kind), amount))
            .next()
            .unwrap_or_default();
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
            sample_type,
            time_nanos: (meta.start * 1e9) as i64,
            duration_nanos: (meta.duration * 1e9) as i64,
            period_type,
            period: limited(period),
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

/// Row of the stacks, index of the thread's track, and number of the set of labels.
type SampleKey = (u32, Option<usize>, LabelSetId);

/// Self amounts by value type, in the order of their keys.
fn sums(profile: &Profile, timeline: &Timeline) -> BTreeMap<SampleKey, Vec<u64>> {
    let values = profile.value_types().len();
    let mut sums: BTreeMap<SampleKey, Vec<u64>> = BTreeMap::new();
    let mut add = |key, amount: &dyn Fn(usize) -> u64| {
        let sum = sums.entry(key).or_insert_with(|| vec![0; values]);
        for (value, sum) in sum.iter_mut().enumerate() {
            *sum = sum.saturating_add(amount(value));
        }
    };
    for (thread, track) in timeline.tracks.iter().enumerate() {
        for (_, row, sample) in &track.samples {
            let set = profile.labels.of_samples.get(*sample).copied().unwrap_or(0);
            add((*row, Some(thread), set), &|value| {
                profile.sample_amount(value, *sample)
            });
        }
    }
    for (row, amounts) in &timeline.untimed {
        add((*row, None, 0), &|value| amounts[value]);
    }
    sums
}
