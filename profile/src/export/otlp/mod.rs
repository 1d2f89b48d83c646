//! A profile as OTLP profiles, the format of OpenTelemetry: gzip over the protocol buffer `ProfilesData`.
//!
//! There is a `Profile` for each value type, and another one for samples without a time if only some have one. A time
//! that is so much for each sample is the period of the samples. All refer to one dictionary. What the format does not
//! have is in attributes, see `profile/src/otlp/`.
//!
//! A native function and what the compiler inlined into it are one location with several lines. An address is the start
//! of the function in its file's own address space; the mappings are files, without addresses. An address without a
//! symbol is a location without lines.
//!
//! Names are not escaped: who shows them does so.
//!
//! Sources: `opentelemetry/proto/profiles/v1development/profiles.proto` of opentelemetry-proto 1.11.0, and the rules that
//! `profcheck` of open-telemetry/sig-profiling (August 2026) checks.

mod dictionary;
mod segment;
mod stacks;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message;

use self::dictionary::Dictionary;
use self::segment::{Facts, Segment};
pub use self::segment::{SegmentInfo, SegmentProcess};
use self::stacks::StackTables;
use super::thread_tracks::{StackRows, Timeline, Track};
use crate::labels::LabelSetId;
use crate::model::{FrameKind, Meta, Profile, Quality};
use crate::otlp;
use crate::otlp::messages::{
    Any, AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList, Link, OtlpProfile, OtlpSample,
    OtlpValueType, ProfilesData, Resource, ResourceProfiles, ScopeProfiles,
};
use crate::stacks_by_line::StacksByLine;
use crate::values::{Amounts, Value, ValueType};
use crate::view::View;

/// Writes the profile as OTLP profiles, gzip-compressed.
pub fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let mut gz = GzEncoder::new(out, Compression::fast());
    gz.write_all(&encode(profile, &[]))?;
    gz.finish()?.flush()
}

/// The message `ProfilesData`. `resource` has further attributes of what was profiled, such as `service.name`.
pub fn encode(profile: &Profile, resource: &[(&str, &str)]) -> Vec<u8> {
    message(profile, &Facts::One(resource)).encode_to_vec()
}

/// The message `ProfilesData` of a segment of a host, see [`SegmentInfo`]. A resource with neither processes nor samples is left
/// out. Samples without a process that is known are those of a resource without attributes.
pub fn encode_segment(profile: &Profile, info: &SegmentInfo) -> Vec<u8> {
    message(profile, &Facts::Segment(Segment::new(profile, info))).encode_to_vec()
}

fn message(profile: &Profile, facts: &Facts<'_>) -> ProfilesData {
    let view = View::new(profile);
    let entries = StacksByLine::new(profile, &view);
    let rows = StackRows::by_line(profile, &view, &entries);
    let timeline = Timeline::new(profile, &entries);
    let mut writer = OtlpWriter {
        profile,
        start: otlp::nanoseconds(profile.meta.start),
        facts,
        stacks: StackTables::new(profile, &view, &rows),
        dictionary: Dictionary::default(),
        contexts: HashMap::new(),
        groups: groups(&view),
        rows: &rows,
    };
    let samples = writer.samples(&timeline);
    let mut resource_profiles = Vec::new();
    for (at, samples) in samples.iter().enumerate() {
        let is_only = resource_profiles.is_empty() && at + 1 == facts.resources();
        if !is_only && samples.is_empty() && !facts.has_processes(at) {
            continue;
        }
        let profiles = writer.profiles(at, samples);
        resource_profiles.push(ResourceProfiles {
            resource: Some(facts.resource(profile, at)),
            scope_profiles: vec![ScopeProfiles {
                scope: Some(InstrumentationScope {
                    name: otlp::SCOPE.into(),
                    version: profile.meta.version.clone(),
                }),
                profiles,
            }],
        });
    }
    ProfilesData {
        resource_profiles,
        dictionary: Some(writer.dictionary.finish()),
    }
}

/// The process and the thread that an item of the view is below, as the names of their nodes.
type Groups<'a> = (Option<&'a str>, Option<&'a str>);

fn groups<'a>(view: &View<'a>) -> Vec<Groups<'a>> {
    let mut groups: Vec<Groups<'a>> = Vec::with_capacity(view.items.len());
    for (at, item) in (0u32..).zip(&view.items) {
        let (process, thread) = groups.get(item.parent as usize).copied().unwrap_or_default();
        let name = |kind: FrameKind| {
            let frame = view.frame(at).filter(|frame| frame.kind == kind)?;
            Some(frame.name.as_str())
        };
        groups.push((name(FrameKind::Process).or(process), name(FrameKind::Thread).or(thread)));
    }
    groups
}

/// What of a sample besides its stack is part of its identity: the attributes, and the link.
type Context = (Vec<i32>, i32);

/// Index of the thread's track and of the process, process and thread in the tree, and number of the set of labels.
type ContextKey<'a> = (Option<(usize, u32)>, Groups<'a>, LabelSetId);

/// Index of the stack, and the context. Samples of one identity are one message.
type Identity = (i32, Context);

/// The samples of a resource.
#[derive(Default)]
struct Samples {
    /// Indices in the timeline, in chronological order.
    timed: BTreeMap<Identity, Vec<usize>>,
    /// Self amounts by value type of those without a time.
    untimed: BTreeMap<Identity, Vec<u64>>,
}

impl Samples {
    fn is_empty(&self) -> bool {
        self.timed.is_empty() && self.untimed.is_empty()
    }
}

struct OtlpWriter<'a> {
    profile: &'a Profile,
    /// ns since the Unix epoch.
    start: u64,
    facts: &'a Facts<'a>,
    rows: &'a StackRows<'a>,
    stacks: StackTables<'a>,
    dictionary: Dictionary,
    contexts: HashMap<ContextKey<'a>, Context>,
    /// By item of the view.
    groups: Vec<Groups<'a>>,
}

impl<'a> OtlpWriter<'a> {
    /// By resource.
    fn samples(&mut self, timeline: &Timeline) -> Vec<Samples> {
        let mut all: Vec<Samples> = (0..self.facts.resources()).map(|_| Samples::default()).collect();
        for (at, track) in timeline.tracks.iter().enumerate() {
            for (_, row, sample) in &track.samples {
                let set = self.profile.labels.of_samples.get(*sample).copied().unwrap_or(0);
                let process = self.facts.process_of(*sample);
                let identity = self.identity(*row, Some((at, process, track)), set);
                let timed = &mut all[self.facts.resource_of(process)].timed;
                timed.entry(identity).or_default().push(*sample);
            }
        }
        for (row, amounts) in &timeline.untimed {
            let identity = self.identity(*row, None, 0);
            let sums = all
                .last_mut()
                .map(|samples| samples.untimed.entry(identity).or_default());
            let sums = sums.expect("at least one resource");
            sums.resize(amounts.len(), 0);
            for (sum, amount) in sums.iter_mut().zip(amounts) {
                *sum = sum.saturating_add(*amount);
            }
        }
        all
    }

    /// The identity of a sample in a row, of a track and a process if it has a time.
    fn identity(&mut self, row: u32, track: Option<(usize, u32, &Track)>, set: LabelSetId) -> Identity {
        let stack = self.stacks.stack(&mut self.dictionary, row);
        let groups = self.groups[self.rows.item[row as usize] as usize];
        let key = (track.map(|(at, process, _)| (at, process)), groups, set);
        let context = match self.contexts.get(&key) {
            Some(known) => known.clone(),
            None => {
                let executable = track.and_then(|(_, process, _)| self.facts.executable(process));
                let track = track.map(|(_, _, track)| track);
                let context = self.context(track, executable, groups, set);
                self.contexts.insert(key, context.clone());
                context
            }
        };
        (stack, context)
    }

    fn context(
        &mut self,
        track: Option<&Track>,
        executable: Option<&str>,
        (process, thread): Groups<'_>,
        set: LabelSetId,
    ) -> Context {
        let dictionary = &mut self.dictionary;
        let mut attributes = Vec::new();
        if let Some(Track { pid, tid, name, .. }) = track {
            attributes.push(dictionary.attribute(otlp::PID, u64::from(*pid)));
            attributes.push(dictionary.attribute(otlp::TID, u64::from(*tid)));
            if !name.is_empty() {
                attributes.push(dictionary.attribute(otlp::THREAD_NAME, name.as_str()));
            }
        }
        let names = [
            (otlp::EXECUTABLE, executable),
            (otlp::PROCESS_FRAME, process),
            (otlp::THREAD_FRAME, thread),
        ];
        for (key, name) in names {
            attributes.extend(name.map(|name| dictionary.attribute(key, name)));
        }
        let labels = self.profile.labels.sets.get(set as usize);
        let labels = labels.map_or(&[][..], |set| set);
        let link = link(labels);
        // Keys of attributes are unique, those of nested spans are not.
        let mut by_key: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (key, value) in labels {
            if link.is_none() || ![otlp::TRACE_ID, otlp::SPAN_ID].contains(&key.as_str()) {
                by_key.entry(key).or_default().push(value);
            }
        }
        for (key, values) in by_key {
            let key = if otlp::is_reserved(key) {
                format!("{}{key}", otlp::LABEL_PREFIX)
            } else {
                key.into()
            };
            let value = match values[..] {
                [value] => value.into(),
                _ => array(values.into_iter().map(AnyValue::from)),
            };
            attributes.push(dictionary.attribute(&key, value));
        }
        (attributes, link.map_or(0, |link| dictionary.link(link)))
    }

    fn profiles(&mut self, resource: usize, samples: &Samples) -> Vec<OtlpProfile> {
        let profile = self.profile;
        let types = profile.value_types();
        let is_timed = !samples.timed.is_empty();
        let is_rest = !samples.untimed.is_empty() || !is_timed;
        let last = profile.timeline.iter().map(|sample| sample.time).max();
        let duration = otlp::nanoseconds(profile.meta.duration);
        // The end is not within the profile, and sums of times stay in the format's range.
        let duration = last.map_or(duration, |last| duration.max(last.saturating_add(1)));
        let duration_nano = duration.min(u64::MAX - self.start);
        let attribute_indices = self.recording(resource);
        let period = period(types, is_timed);
        let mut profiles = Vec::new();
        for (value, Value { kind, .. }) in types.iter().enumerate() {
            if value == 1 && period.is_some() {
                continue;
            }
            let (period_type, period) = match &period {
                Some((kind, period)) if value == 0 => (Some(self.dictionary.value_type(kind)), *period),
                _ => (None::<OtlpValueType>, 0),
            };
            let of = OtlpProfile {
                sample_type: Some(self.dictionary.value_type(kind)),
                samples: Vec::new(),
                time_unix_nano: self.start,
                duration_nano,
                period_type,
                period,
                attribute_indices: attribute_indices.clone(),
            };
            if is_timed {
                profiles.push(OtlpProfile {
                    samples: self.timed(value, samples, duration_nano),
                    ..of.clone()
                });
            }
            if is_rest {
                profiles.push(OtlpProfile {
                    samples: untimed(value, samples),
                    ..of
                });
            }
        }
        profiles
    }

    /// The samples with a time, each with its amount. Amounts of 0 are left out, unless they are the count's: that has
    /// all samples.
    fn timed(&self, value: usize, samples: &Samples, duration: u64) -> Vec<OtlpSample> {
        let profile = self.profile;
        let is_one_each =
            value == 0 && (profile.value_types().first()).is_some_and(|count| count.amounts == Amounts::PerCount(1));
        let latest = self.start.saturating_add(duration).saturating_sub(1);
        let mut messages = Vec::new();
        for ((stack_index, (attributes, link)), of) in &samples.timed {
            let mut message = OtlpSample {
                stack_index: *stack_index,
                attribute_indices: attributes.clone(),
                link_index: *link,
                ..OtlpSample::default()
            };
            for sample in of {
                let amount = profile.sample_amount(value, *sample);
                if value > 0 && amount == 0 {
                    continue;
                }
                if !is_one_each {
                    message.values.push(limited(amount));
                }
                let time = self.start.saturating_add(profile.timeline[*sample].time);
                message.timestamps_unix_nano.push(time.min(latest));
            }
            if !message.timestamps_unix_nano.is_empty() {
                messages.push(message);
            }
        }
        messages
    }

    /// Attributes of the profiles of a resource: what is known of the recording.
    fn recording(&mut self, resource: usize) -> Vec<i32> {
        let meta = self.facts.meta(self.profile, resource);
        let dictionary = &mut self.dictionary;
        let texts = otlp::TEXTS.iter().map(|fact| (fact.key, (fact.get)(&meta)));
        let texts = texts.filter(|(_, text)| !text.is_empty());
        let mut attributes: Vec<i32> = texts.map(|(key, text)| dictionary.attribute(key, text)).collect();
        for fact in otlp::NUMBERS {
            let number = (fact.get)(&meta);
            if number > 0 {
                attributes.push(dictionary.attribute_in(fact.key, number, fact.unit));
            }
        }
        if !meta.quality.reasons.is_empty() {
            attributes.push(dictionary.attribute(otlp::REASONS, reasons(&meta.quality)));
        }
        for (key, value) in self.facts.of_segment(self.profile, resource) {
            attributes.push(dictionary.attribute(key, value));
        }
        attributes
    }
}

fn reasons(quality: &Quality) -> AnyValue {
    list(
        quality
            .reasons
            .iter()
            .map(|(reason, samples)| key_value(reason, *samples)),
    )
}

fn list(values: impl Iterator<Item = KeyValue>) -> AnyValue {
    AnyValue {
        value: Some(Any::List(KeyValueList {
            values: values.collect(),
        })),
    }
}

fn array(values: impl Iterator<Item = AnyValue>) -> AnyValue {
    AnyValue {
        value: Some(Any::Array(ArrayValue {
            values: values.collect(),
        })),
    }
}

/// The value type that is so much for each sample, and how much that is. Not if samples with a time count as several:
/// Pyroscope, for one, takes no samples with values and a period.
fn period(types: &[Value], is_timed: bool) -> Option<(ValueType, i64)> {
    let [count, time, ..] = types else {
        return None;
    };
    match time.amounts {
        Amounts::PerCount(period) if count.is_per_count() || !is_timed => Some((time.kind.clone(), limited(period))),
        _ => None,
    }
}

fn untimed(value: usize, samples: &Samples) -> Vec<OtlpSample> {
    let rows = samples.untimed.iter();
    let rows = rows.map(|(identity, amounts)| (identity, amounts.get(value).copied().unwrap_or(0)));
    rows.filter(|(_, amount)| *amount > 0)
        .map(|((stack_index, (attributes, link)), amount)| OtlpSample {
            stack_index: *stack_index,
            attribute_indices: attributes.clone(),
            link_index: *link,
            values: vec![limited(amount)],
            timestamps_unix_nano: Vec::new(),
        })
        .collect()
}

/// The link of a sample whose labels have one identifier of a trace and one of a span.
fn link(labels: &[(String, String)]) -> Option<Link> {
    let identifier = |key: &str, length: usize| {
        let mut of_key = labels.iter().filter(|(known, _)| known == key);
        let (_, hex) = of_key.next().filter(|_| of_key.next().is_none())?;
        otlp::identifier_of_hex(hex, length)
    };
    Some(Link {
        trace_id: identifier(otlp::TRACE_ID, otlp::TRACE_ID_LENGTH)?,
        span_id: identifier(otlp::SPAN_ID, otlp::SPAN_ID_LENGTH)?,
    })
}

fn resource_of(profile: &Profile, more: &[(&str, &str)]) -> Resource {
    let meta = &profile.meta;
    let mut attributes: Vec<KeyValue> = more.iter().map(|(key, value)| key_value(key, *value)).collect();
    if meta.pid > 0 {
        attributes.push(key_value(otlp::PID, u64::from(meta.pid)));
    }
    if !meta.python.is_empty() {
        attributes.push(key_value(otlp::RUNTIME_NAME, otlp::CPYTHON));
        attributes.push(key_value(otlp::RUNTIME_VERSION, meta.python.as_str()));
    }
    unique(attributes)
}

/// A resource with these attributes. The first one of a key counts.
fn unique(mut attributes: Vec<KeyValue>) -> Resource {
    let mut keys = BTreeSet::new();
    attributes.retain(|attribute| keys.insert(attribute.key.clone()));
    Resource { attributes }
}

fn key_value(key: &str, value: impl Into<AnyValue>) -> KeyValue {
    KeyValue {
        key: key.into(),
        value: Some(value.into()),
        key_strindex: 0,
    }
}

fn limited(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
