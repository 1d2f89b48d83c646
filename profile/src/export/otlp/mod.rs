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
mod stacks;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message;

use self::dictionary::Dictionary;
use self::stacks::StackTables;
use super::thread_tracks::{StackRows, Timeline, Track};
use crate::labels::LabelSetId;
use crate::model::{FrameKind, Profile};
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
    message(profile, resource).encode_to_vec()
}

fn message(profile: &Profile, resource: &[(&str, &str)]) -> ProfilesData {
    let view = View::new(profile);
    let entries = StacksByLine::new(profile, &view);
    let rows = StackRows::by_line(profile, &view, &entries);
    let timeline = Timeline::new(profile, &entries);
    let mut writer = OtlpWriter {
        profile,
        start: otlp::nanoseconds(profile.meta.start),
        stacks: StackTables::new(profile, &view, &rows),
        dictionary: Dictionary::default(),
        contexts: HashMap::new(),
        groups: groups(&view),
        rows: &rows,
    };
    let samples = writer.samples(&timeline);
    let profiles = writer.profiles(&samples);
    ProfilesData {
        resource_profiles: vec![ResourceProfiles {
            resource: Some(resource_of(profile, resource)),
            scope_profiles: vec![ScopeProfiles {
                scope: Some(InstrumentationScope {
                    name: otlp::SCOPE.into(),
                    version: profile.meta.version.clone(),
                }),
                profiles,
            }],
        }],
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

/// Index of the stack, and the context. Samples of one identity are one message.
type Identity = (i32, Context);

/// The samples of a profile.
struct Samples {
    /// Indices in the timeline, in chronological order.
    timed: BTreeMap<Identity, Vec<usize>>,
    /// Self amounts by value type of those without a time.
    untimed: BTreeMap<Identity, Vec<u64>>,
}

struct OtlpWriter<'a> {
    profile: &'a Profile,
    /// ns since the Unix epoch.
    start: u64,
    rows: &'a StackRows<'a>,
    stacks: StackTables<'a>,
    dictionary: Dictionary,
    /// By index of the thread's track, process and thread in the tree, and number of the set of labels.
    contexts: HashMap<(Option<usize>, Groups<'a>, LabelSetId), Context>,
    /// By item of the view.
    groups: Vec<Groups<'a>>,
}

impl<'a> OtlpWriter<'a> {
    fn samples(&mut self, timeline: &Timeline) -> Samples {
        let mut samples = Samples {
            timed: BTreeMap::new(),
            untimed: BTreeMap::new(),
        };
        for (at, track) in timeline.tracks.iter().enumerate() {
            for (_, row, sample) in &track.samples {
                let set = self.profile.labels.of_samples.get(*sample).copied().unwrap_or(0);
                let identity = self.identity(*row, Some((at, track)), set);
                samples.timed.entry(identity).or_default().push(*sample);
            }
        }
        for (row, amounts) in &timeline.untimed {
            let sums = samples.untimed.entry(self.identity(*row, None, 0)).or_default();
            sums.resize(amounts.len(), 0);
            for (sum, amount) in sums.iter_mut().zip(amounts) {
                *sum = sum.saturating_add(*amount);
            }
        }
        samples
    }

    fn identity(&mut self, row: u32, track: Option<(usize, &Track)>, set: LabelSetId) -> Identity {
        let stack = self.stacks.stack(&mut self.dictionary, row);
        let groups = self.groups[self.rows.item[row as usize] as usize];
        let key = (track.map(|(at, _)| at), groups, set);
        let context = match self.contexts.get(&key) {
            Some(known) => known.clone(),
            None => {
                let context = self.context(track.map(|(_, track)| track), groups, set);
                self.contexts.insert(key, context.clone());
                context
            }
        };
        (stack, context)
    }

    fn context(&mut self, track: Option<&Track>, (process, thread): Groups<'_>, set: LabelSetId) -> Context {
        let dictionary = &mut self.dictionary;
        let mut attributes = Vec::new();
        if let Some(Track { pid, tid, name, .. }) = track {
            attributes.push(dictionary.attribute(otlp::PID, u64::from(*pid)));
            attributes.push(dictionary.attribute(otlp::TID, u64::from(*tid)));
            if !name.is_empty() {
                attributes.push(dictionary.attribute(otlp::THREAD_NAME, name.as_str()));
            }
        }
        for (key, name) in [(otlp::PROCESS_FRAME, process), (otlp::THREAD_FRAME, thread)] {
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
                _ => AnyValue {
                    value: Some(Any::Array(ArrayValue {
                        values: values.into_iter().map(AnyValue::from).collect(),
                    })),
                },
            };
            attributes.push(dictionary.attribute(&key, value));
        }
        (attributes, link.map_or(0, |link| dictionary.link(link)))
    }

    fn profiles(&mut self, samples: &Samples) -> Vec<OtlpProfile> {
        let profile = self.profile;
        let types = profile.value_types();
        let is_timed = !samples.timed.is_empty();
        let is_rest = !samples.untimed.is_empty() || !is_timed;
        let last = profile.timeline.iter().map(|sample| sample.time).max();
        let duration = otlp::nanoseconds(profile.meta.duration);
        // The end is not within the profile, and sums of times stay in the format's range.
        let duration = last.map_or(duration, |last| duration.max(last.saturating_add(1)));
        let duration_nano = duration.min(u64::MAX - self.start);
        let attribute_indices = self.recording();
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

    /// Attributes of every profile: what is known of the recording.
    fn recording(&mut self) -> Vec<i32> {
        let meta = &self.profile.meta;
        let dictionary = &mut self.dictionary;
        let texts = otlp::TEXTS.iter().map(|fact| (fact.key, (fact.get)(meta)));
        let texts = texts.filter(|(_, text)| !text.is_empty());
        let mut attributes: Vec<i32> = texts.map(|(key, text)| dictionary.attribute(key, text)).collect();
        for fact in otlp::NUMBERS {
            let number = (fact.get)(meta);
            if number > 0 {
                attributes.push(dictionary.attribute_in(fact.key, number, fact.unit));
            }
        }
        if !meta.quality.reasons.is_empty() {
            let reasons = meta.quality.reasons.iter();
            let values = reasons.map(|(reason, samples)| key_value(reason, *samples)).collect();
            let value = AnyValue {
                value: Some(Any::List(KeyValueList { values })),
            };
            attributes.push(dictionary.attribute(otlp::REASONS, value));
        }
        attributes
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
    // The first one of a key counts.
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
