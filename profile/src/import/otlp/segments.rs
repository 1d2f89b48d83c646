//! Segments of a host, added up to one profile.
//!
//! Sums are of any number of segments and stay small: samples are counted by stack and have no time. Rates may differ from
//! segment to segment, so a time is the sum of what each sample stood for in its own segment.

use std::collections::{BTreeMap, HashMap};

use super::contexts::Process;
use super::locations::Locations;
use super::tables::{Tables, decode, number_of};
use super::{ProfileHead, SAMPLES, amount, heads, recording, set_numbers, small};
use crate::import::Damage;
use crate::import::stacks::Stacks;
use crate::import::wire::{Field, Fields};
use crate::machine::Machine;
use crate::model::{Frame, FrameKind, Meta, Pid, PlaceId, Profile, Quality};
use crate::otlp;
use crate::otlp::messages::{Any, AnyValue, KeyValueList, OtlpSample};
use crate::values::{Amounts, Value, ValueType};

/// Which samples of segments are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// From this time on, ns since the Unix epoch.
    pub from: u64,
    /// Before this time, ns since the Unix epoch.
    pub to: u64,
    /// Of the container with this name, or whose identifier begins with this.
    pub container: Option<String>,
    /// Of the service with this name.
    pub service: Option<String>,
    /// Of processes whose executable has this name.
    pub comm: Option<String>,
    /// Of the process with this number.
    pub pid: Option<Pid>,
}

impl Default for Selection {
    /// All samples.
    fn default() -> Selection {
        Selection {
            from: 0,
            to: u64::MAX,
            container: None,
            service: None,
            comm: None,
            pid: None,
        }
    }
}

impl Selection {
    /// Whether samples of all processes are read.
    pub fn is_of_all(&self) -> bool {
        let texts = [&self.container, &self.service, &self.comm];
        self.pid.is_none() && texts.into_iter().all(Option::is_none)
    }

    fn has_resource(&self, resource: &Process) -> bool {
        let has = |key: &str, is: &dyn Fn(&str) -> bool| resource.labels.get(key).is_some_and(|value| is(value));
        let is_container = |text: &String| {
            let is_name = otlp::CONTAINER_NAMES.iter().any(|key| has(key, &|name| name == text));
            is_name || !text.is_empty() && has(otlp::CONTAINER_ID, &|id| id.starts_with(text.as_str()))
        };
        let is_service = |text: &String| has(otlp::SERVICE_NAME, &|name| name == text);
        self.service.as_ref().is_none_or(is_service) && self.container.as_ref().is_none_or(is_container)
    }

    fn has_process(&self, pid: u32, name: &str) -> bool {
        self.pid.is_none_or(|wanted| wanted == pid) && self.comm.as_ref().is_none_or(|wanted| wanted == name)
    }
}

/// A sum of segments.
pub struct Segments {
    selection: Selection,
    out: Stacks,
    /// By index in `out`; the count first.
    types: Vec<ValueType>,
    /// What all counts have stood for so far; `Err` if that differs.
    period: Option<Result<Value, ()>>,
    /// Of the segments so far; numbers that differ are unknown.
    meta: Option<Meta>,
    /// ns, of the segments, as far as they are selected.
    covered: u64,
    counts: BTreeMap<String, u64>,
}

impl Segments {
    /// The sum of none.
    pub fn new(selection: Selection) -> Segments {
        let types = vec![ValueType::SAMPLES];
        Segments {
            selection,
            out: Stacks::of_samples(),
            types,
            period: None,
            meta: None,
            covered: 0,
            counts: BTreeMap::new(),
        }
    }

    /// Adds the selected samples of a segment, the message `ProfilesData`. Nothing of a damaged one is counted.
    ///
    /// # Errors
    /// It is damaged, of a newer version, or exceeds a limit.
    pub fn add(&mut self, message: &[u8]) -> Result<(), Damage> {
        let tables = Tables::of(message)?;
        let (resources, profiles, version) = heads(message, &tables)?;
        let Some(version) = version else {
            return Err(Damage::whole("it is not a segment that nativeprof wrote"));
        };
        let mut meta = recording(&profiles, &tables, true)?;
        meta.version = version;
        let start = profiles.iter().map(|head| head.start).min().unwrap_or(0);
        let end = profiles
            .iter()
            .map(|head| head.start.saturating_add(head.duration))
            .max();
        let end = end.unwrap_or(start);
        let (from, to) = (start.max(self.selection.from), end.min(self.selection.to));
        if from >= to {
            return Ok(());
        }
        let is_whole = (from, to) == (start, end);
        let mut reader = SegmentReader {
            tables: &tables,
            is_whole,
            locations: Locations::new(true),
            bases: HashMap::new(),
            found: Vec::new(),
        };
        for head in &profiles {
            let resource = resources
                .get(head.process)
                .filter(|resource| self.selection.has_resource(resource));
            if let Some(resource) = resource {
                let of_type = self.of_type(&head.kind)?;
                reader.profile(head, resource, of_type, &self.selection, &mut self.out)?;
            }
        }
        let mut periods = Vec::new();
        for head in profiles.iter().filter(|head| head.kind == ValueType::SAMPLES) {
            let period = head.period.as_ref();
            let period = period.filter(|period| profiles.iter().all(|other| other.kind != period.kind));
            if let Some(period) = period {
                periods.push((self.of_type(&period.kind)?, period.clone()));
            }
        }
        let quality = match (is_whole, self.selection.is_of_all()) {
            (false, _) => Quality::default(),
            (true, true) => meta.quality.clone(),
            (true, false) => self.quality_of_selected(&profiles, &resources, &tables)?,
        };
        if is_whole && self.selection.is_of_all() {
            self.add_counts(counts(&profiles, &tables)?);
        }
        // Nothing fails from here on.
        let found = reader.found;
        self.commit(&found, &periods);
        meta.quality = quality;
        meta.start = otlp::seconds(from);
        self.covered = self.covered.saturating_add(to - from);
        self.add_meta(meta, is_whole);
        Ok(())
    }

    /// Adds the sum of other segments, which are later ones, with the same selection.
    ///
    /// # Errors
    /// Together they exceed a limit: this sum is not usable any more.
    pub fn add_all(&mut self, other: Segments) -> Result<(), Damage> {
        let columns = other.types.iter().map(|kind| self.of_type(kind));
        let columns = columns.collect::<Result<Vec<_>, _>>()?;
        self.out.add_all(&other.out, &columns)?;
        if let Some(period) = other.period {
            self.add_period(period);
        }
        if let Some(meta) = other.meta {
            self.add_meta(meta, true);
        }
        self.covered = self.covered.saturating_add(other.covered);
        self.add_counts(other.counts);
        Ok(())
    }

    fn add_counts(&mut self, counts: impl IntoIterator<Item = (String, u64)>) {
        for (name, number) in counts {
            let sum = self.counts.entry(name).or_default();
            *sum = sum.saturating_add(number);
        }
    }

    /// What all counts of some samples stand for.
    fn add_period(&mut self, period: Result<Value, ()>) {
        self.period = match self.period.take() {
            None => Some(period),
            Some(known) if known == period => Some(known),
            Some(_) => Some(Err(())),
        };
    }

    fn of_type(&mut self, kind: &ValueType) -> Result<usize, Damage> {
        if let Some(known) = self.types.iter().position(|known| known == kind) {
            return Ok(known);
        }
        self.out.value(kind.clone())?;
        self.types.push(kind.clone());
        Ok(self.types.len() - 1)
    }

    fn commit(&mut self, found: &[Found], periods: &[(usize, Value)]) {
        let mut amounts = vec![0; self.types.len()];
        let per_count = periods.first().map(|(at, value)| (*at, per_count(value)));
        for Found { place, of_type, amount } in found {
            amounts.fill(0);
            if let Some(of_kind) = amounts.get_mut(*of_type) {
                *of_kind = *amount;
            }
            if let (0, Some((at, period))) = (*of_type, per_count)
                && let Some(of_time) = amounts.get_mut(at)
            {
                *of_time = amount.saturating_mul(period);
            }
            self.out.add(*place, &amounts);
        }
        if found.iter().any(|found| found.of_type == 0) {
            let period = periods.first().map(|(_, value)| value.clone()).ok_or(());
            self.add_period(period);
        }
    }

    fn quality_of_selected(
        &self,
        profiles: &[ProfileHead<'_>],
        resources: &[Process],
        tables: &Tables<'_>,
    ) -> Result<Quality, Damage> {
        let mut quality = Quality::default();
        let mut last = None;
        for head in profiles {
            // Those of one resource have the same attributes.
            let resource = resources.get(head.process).filter(|_| last != Some(head.process));
            last = Some(head.process);
            if !resource.is_some_and(|resource| self.selection.has_resource(resource)) {
                continue;
            }
            let Some(Any::Array(processes)) = attribute(head, otlp::PROCESSES, tables)? else {
                continue;
            };
            for process in &processes.values {
                let Some(Any::List(facts)) = &process.value else {
                    continue;
                };
                let (mut pid, mut name, mut meta) = (0, String::new(), Meta::default());
                for fact in &facts.values {
                    match &*tables.key(fact)? {
                        otlp::PROCESS_PID => pid = small(number_of(fact.value.as_ref())),
                        otlp::PROCESS_NAME => name = tables.text_of(fact.value.as_ref())?.unwrap_or_default(),
                        _ => {}
                    }
                }
                if self.selection.has_process(pid, &name) {
                    set_numbers(&mut meta, facts, tables)?;
                    quality.add(&meta.quality);
                }
            }
        }
        Ok(quality)
    }

    fn add_meta(&mut self, meta: Meta, is_whole: bool) {
        let is_of_all = self.selection.is_of_all() && is_whole;
        let known = self.meta.get_or_insert_with(|| Meta {
            version: meta.version.clone(),
            rate: meta.rate,
            event: meta.event.clone(),
            backend: meta.backend.clone(),
            start: meta.start,
            machine: meta.machine.clone(),
            ..Meta::default()
        });
        known.machine = Machine::merged([&known.machine, &meta.machine].into_iter());
        known.start = known.start.min(meta.start);
        if known.rate != meta.rate {
            known.rate = 0;
        }
        for (known, here) in [(&mut known.event, &meta.event), (&mut known.backend, &meta.backend)] {
            if known != here {
                known.clear();
            }
        }
        known.quality.add(&meta.quality);
        if is_of_all {
            known.target_cpu += meta.target_cpu;
            known.profiler_cpu += meta.profiler_cpu;
            known.sampling_cpu += meta.sampling_cpu;
        }
    }

    /// The further numbers of segments that were read whole and of all processes, by name, added up.
    pub fn counts(&self) -> &BTreeMap<String, u64> {
        &self.counts
    }

    /// The profile. It begins with the first segment that has a selected time, and is as long as the selected times of
    /// all. Quality is that of segments that were read whole.
    pub fn finish(self) -> Profile {
        let mut meta = self.meta.unwrap_or_default();
        meta.duration = otlp::seconds(self.covered);
        let mut profile = self.out.finish(meta);
        if let Some(Ok(period)) = self.period
            && let Some(at) = self.types.iter().position(|kind| *kind == period.kind)
            && let Some(value) = profile.values.get_mut(at)
        {
            *value = period;
        }
        profile
    }
}

/// An amount of a segment.
struct Found {
    place: PlaceId,
    /// Index of the value type.
    of_type: usize,
    amount: u64,
}

struct SegmentReader<'a> {
    tables: &'a Tables<'a>,
    /// Whether the whole segment is in the time selected.
    is_whole: bool,
    locations: Locations,
    /// By resource and attributes of samples, the place that stacks are below; `None`: not selected.
    bases: HashMap<(usize, Vec<i32>), Option<PlaceId>>,
    found: Vec<Found>,
}

impl SegmentReader<'_> {
    fn profile(
        &mut self,
        head: &ProfileHead<'_>,
        resource: &Process,
        of_type: usize,
        selection: &Selection,
        out: &mut Stacks,
    ) -> Result<(), Damage> {
        for field in Fields(head.bytes) {
            let (SAMPLES, Field::Bytes(sample)) = field? else {
                continue;
            };
            let sample: OtlpSample = decode(sample)?;
            let sum = self.amount(&sample, head.scale, selection)?;
            if sum == 0 {
                continue;
            }
            let key = (head.process, sample.attribute_indices);
            let base = match self.bases.get(&key) {
                Some(known) => *known,
                None => {
                    let base = self.base(&key.1, resource, selection, out)?;
                    self.bases.insert(key, base);
                    base
                }
            };
            if let Some(base) = base {
                let place = self.locations.place(base, sample.stack_index, self.tables, out)?;
                self.found.push(Found {
                    place,
                    of_type,
                    amount: sum,
                });
            }
        }
        Ok(())
    }

    /// What of a sample is in the time selected; samples without a time are if the whole segment is.
    fn amount(&self, sample: &OtlpSample, scale: u64, selection: &Selection) -> Result<u64, Damage> {
        let times = &sample.timestamps_unix_nano;
        let is_selected = |time: u64| self.is_whole || (selection.from..selection.to).contains(&time);
        if times.is_empty() && !self.is_whole {
            return Ok(0);
        }
        let mut sum = 0u64;
        if sample.values.is_empty() {
            let selected = times.iter().filter(|time| is_selected(**time)).count();
            return Ok(scale.saturating_mul(selected as u64));
        }
        for (at, value) in sample.values.iter().enumerate() {
            if times.get(at).is_none_or(|time| is_selected(*time)) {
                sum = sum.saturating_add(amount(*value, scale)?);
            }
        }
        Ok(sum)
    }

    /// The place of the service or program that a sample is of, if it is selected.
    fn base(
        &self,
        attributes: &[i32],
        resource: &Process,
        selection: &Selection,
        out: &mut Stacks,
    ) -> Result<Option<PlaceId>, Damage> {
        let (mut pid, mut executable) = (resource.pid, resource.executable.clone());
        for index in attributes {
            let (key, value) = self.tables.attribute(*index)?;
            match &*key {
                otlp::PID => pid = small(number_of(value.as_ref())),
                otlp::EXECUTABLE => executable = self.tables.text_of(value.as_ref())?.unwrap_or_default(),
                _ => {}
            }
        }
        if !selection.has_process(pid, &executable) {
            return Ok(None);
        }
        let name = match resource.labels.get(otlp::SERVICE_NAME) {
            Some(service) => service.clone(),
            None => executable,
        };
        if name.is_empty() {
            return Ok(Some(Stacks::ROOT));
        }
        self.tables.count(name.len())?;
        let frame = out.frame(Frame::new(FrameKind::Process, name));
        out.place(Stacks::ROOT, frame, 0).map(Some)
    }
}

/// How much each count stands for.
fn per_count(value: &Value) -> u64 {
    match value.amounts {
        Amounts::PerCount(amount) => amount,
        Amounts::Each { .. } => 0,
    }
}

/// An attribute of a profile.
pub(super) fn attribute(head: &ProfileHead<'_>, wanted: &str, tables: &Tables<'_>) -> Result<Option<Any>, Damage> {
    for index in &head.attributes {
        let (key, value) = tables.attribute(*index)?;
        if key == wanted {
            return Ok(value.and_then(|value| value.value));
        }
    }
    Ok(None)
}

/// The further numbers of a segment by name.
fn counts(profiles: &[ProfileHead<'_>], tables: &Tables<'_>) -> Result<Vec<(String, u64)>, Damage> {
    let mut counts = Vec::new();
    let first = profiles.first();
    let whole = first
        .map(|head| attribute(head, otlp::SEGMENT, tables))
        .transpose()?
        .flatten();
    let Some(Any::List(facts)) = whole else {
        return Ok(counts);
    };
    for fact in &facts.values {
        if let (
            otlp::COUNTS,
            Some(AnyValue {
                value: Some(Any::List(KeyValueList { values })),
            }),
        ) = (&*tables.key(fact)?, &fact.value)
        {
            for count in values {
                counts.push((
                    tables.key(count)?.into_owned(),
                    number_of(count.value.as_ref()).unwrap_or(0),
                ));
            }
        }
    }
    Ok(counts)
}

#[cfg(test)]
mod tests;
