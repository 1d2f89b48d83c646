//! Segments of a host: the samples of many processes, grouped by the resource that each belongs to.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::{
    AnyValue, KeyValue, Meta, Profile, Quality, Resource, array, key_value, list, reasons, resource_of, unique,
};
use crate::otlp;

/// What a segment of a host has besides its profile. [`Meta::quality`] of that is of the whole segment, with samples that
/// belong to no process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SegmentInfo {
    /// By resource, the keys and values of its attributes, such as `service.name` and `container.id`.
    pub resources: Vec<Vec<(String, String)>>,
    /// The processes that were sampled, or that samples were lost of.
    pub processes: Vec<SegmentProcess>,
    /// By index in [`Profile::timeline`], the index of the sample's process in `processes`.
    pub process_of_sample: Vec<u32>,
    /// Further numbers of the whole segment by name, such as processes that could not be opened by reason. Those of several
    /// segments are added.
    pub counts: BTreeMap<String, u64>,
}

/// A process of a segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SegmentProcess {
    /// Its process ID; another process of the segment may have the same one.
    pub pid: u32,
    /// The name of its executable.
    pub name: String,
    /// Index in [`SegmentInfo::resources`].
    pub resource: u32,
    /// How complete its samples are.
    pub quality: Quality,
}

/// What is known of the resources of a message.
pub enum Facts<'a> {
    /// There is one, with further attributes.
    One(&'a [(&'a str, &'a str)]),
    /// There are those of a segment.
    Segment(Box<Segment<'a>>),
}

pub struct Segment<'a> {
    info: &'a SegmentInfo,
    /// By resource, its processes.
    processes: Vec<Vec<&'a SegmentProcess>>,
    /// What all resources have in common.
    meta: Meta,
}

impl<'a> Segment<'a> {
    pub fn new(profile: &Profile, info: &'a SegmentInfo) -> Box<Segment<'a>> {
        let mut processes = vec![Vec::new(); info.resources.len() + 1];
        for process in &info.processes {
            let at = (process.resource as usize).min(info.resources.len());
            processes[at].push(process);
        }
        let meta = &profile.meta;
        Box::new(Segment {
            info,
            processes,
            meta: Meta {
                rate: meta.rate,
                event: meta.event.clone(),
                backend: meta.backend.clone(),
                duration: meta.duration,
                machine: meta.machine.clone(),
                ..Meta::default()
            },
        })
    }
}

/// The process of a sample of which none is known.
const NO_PROCESS: u32 = u32::MAX;

impl<'a> Facts<'a> {
    /// The number of resources, at least 1. In a segment, the last one is that of samples without a known process.
    pub fn resources(&self) -> usize {
        match self {
            Facts::One(_) => 1,
            Facts::Segment(segment) => segment.processes.len(),
        }
    }

    /// The process of a sample of the timeline.
    pub fn process_of(&self, sample: usize) -> u32 {
        match self {
            Facts::One(_) => NO_PROCESS,
            Facts::Segment(segment) => segment
                .info
                .process_of_sample
                .get(sample)
                .copied()
                .unwrap_or(NO_PROCESS),
        }
    }

    /// The resource of a process.
    pub fn resource_of(&self, process: u32) -> usize {
        let last = self.resources() - 1;
        self.process(process)
            .map_or(last, |process| (process.resource as usize).min(last))
    }

    /// The name of a process's executable.
    pub fn executable(&self, process: u32) -> Option<&'a str> {
        let name = &*self.process(process)?.name;
        Some(name).filter(|name| !name.is_empty())
    }

    fn process(&self, process: u32) -> Option<&'a SegmentProcess> {
        match self {
            Facts::One(_) => None,
            Facts::Segment(segment) => segment.info.processes.get(process as usize),
        }
    }

    /// Whether processes of a resource are known.
    pub fn has_processes(&self, resource: usize) -> bool {
        matches!(self, Facts::Segment(segment) if !segment.processes[resource].is_empty())
    }

    /// The message of a resource.
    pub fn resource(&self, profile: &Profile, resource: usize) -> Resource {
        match self {
            Facts::One(more) => resource_of(profile, more),
            Facts::Segment(segment) => {
                let attributes = segment.info.resources.get(resource).into_iter().flatten();
                unique(attributes.map(|(key, value)| key_value(key, &**value)).collect())
            }
        }
    }

    /// What is known of the recording of a resource.
    pub fn meta<'b>(&self, profile: &'b Profile, resource: usize) -> Cow<'b, Meta> {
        match self {
            Facts::One(_) => Cow::Borrowed(&profile.meta),
            Facts::Segment(segment) => {
                let mut meta = segment.meta.clone();
                for process in &segment.processes[resource] {
                    meta.quality.add(&process.quality);
                }
                Cow::Owned(meta)
            }
        }
    }

    /// Attributes that only profiles in segments have.
    pub fn of_segment(&self, profile: &Profile, resource: usize) -> Vec<(&'static str, AnyValue)> {
        let Facts::Segment(segment) = self else {
            return Vec::new();
        };
        let mut whole = vec![key_value(otlp::SEGMENT_VERSION, otlp::NEXT_SEGMENT_VERSION - 1)];
        whole.extend(numbers(&profile.meta));
        let counts = &segment.info.counts;
        if !counts.is_empty() {
            let counts = counts.iter().map(|(name, number)| key_value(name, *number));
            whole.push(with_value(otlp::COUNTS, list(counts)));
        }
        let mut attributes = vec![(otlp::SEGMENT, list(whole.into_iter()))];
        let processes = &segment.processes[resource];
        if !processes.is_empty() {
            let processes = processes.iter().map(|process| {
                let mut facts = vec![key_value(otlp::PROCESS_PID, u64::from(process.pid))];
                facts.push(key_value(otlp::PROCESS_NAME, &*process.name));
                facts.extend(numbers(&Meta {
                    quality: process.quality.clone(),
                    ..Meta::default()
                }));
                list(facts.into_iter())
            });
            attributes.push((otlp::PROCESSES, array(processes)));
        }
        attributes
    }
}

/// The numbers and reasons of a recording that are not 0.
fn numbers(meta: &Meta) -> Vec<KeyValue> {
    let numbers = otlp::NUMBERS.iter().map(|fact| (fact.key, (fact.get)(meta)));
    let numbers = numbers.filter(|(_, number)| *number > 0);
    let mut numbers: Vec<KeyValue> = numbers.map(|(key, number)| key_value(key, number)).collect();
    if !meta.quality.reasons.is_empty() {
        numbers.push(with_value(otlp::REASONS, reasons(&meta.quality)));
    }
    numbers
}

fn with_value(key: &str, value: AnyValue) -> KeyValue {
    KeyValue {
        key: key.into(),
        value: Some(value),
        key_strindex: 0,
    }
}
