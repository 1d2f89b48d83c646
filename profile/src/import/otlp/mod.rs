//! OTLP profiles, decompressed.
//!
//! Types of samples are value types, in ns and bytes; a period is one, too, if it is the same for all samples. Samples of
//! several types that have the same stack, attributes and time are one. What nativeprof wrote about the recording is read
//! from attributes, see [`crate::otlp`].
//!
//! Source: `opentelemetry/proto/profiles/v1development/profiles.proto` of opentelemetry-proto 1.11.0.

mod contexts;
mod locations;
pub mod segment_names;
pub mod segments;
mod tables;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use self::contexts::{Context, Contexts, Process, small};
use self::locations::Locations;
use self::tables::{Table, Tables, decode, number_of};
use super::stacks::{MAX_VALUE_TYPES, Stacks};
use super::wire::{Field, Fields};
use super::{Damage, pprof};
use crate::labels::Labels;
use crate::model::{Meta, ModuleMeta, PlaceId, Profile, Quality};
use crate::otlp;
use crate::otlp::messages::{Any, InstrumentationScope, KeyValueList, Mapping, OtlpSample, OtlpValueType};
use crate::values::{Unit, Value, ValueType};

// Fields of `ProfilesData`.
const RESOURCES: u64 = 1;
const DICTIONARY: u64 = 2;
// Fields of `ResourceProfiles` and `ScopeProfiles`.
const HEAD: u64 = 1;
const CHILDREN: u64 = 2;
// Fields of `Profile`.
const SAMPLE_TYPE: u64 = 1;
const SAMPLES: u64 = 2;
const TIME: u64 = 3;
const DURATION: u64 = 4;
const PERIOD_TYPE: u64 = 5;
const PERIOD: u64 = 6;
const ATTRIBUTES: u64 = 11;

/// Whether it is a message with nothing but resources and a dictionary, whose first string is empty.
pub fn is(bytes: &[u8]) -> bool {
    let mut has_strings = false;
    for field in Fields(bytes) {
        match field {
            Ok((RESOURCES, Field::Bytes(_))) => {}
            Ok((DICTIONARY, Field::Bytes(dictionary))) => {
                let mut tables = Fields(dictionary);
                let string = tables.find(|table| !matches!(table, Ok((number, _)) if *number != Table::Strings as u64));
                has_strings |= string == Some(Ok((Table::Strings as u64, Field::Bytes(b""))));
            }
            _ => return false,
        }
    }
    has_strings
}

/// Reads such a file.
///
/// # Errors
/// It is malformed, has negative amounts, or exceeds a limit.
pub fn read(bytes: &[u8]) -> Result<Profile, Damage> {
    let tables = Tables::of(bytes)?;
    let (processes, profiles, version) = heads(bytes, &tables)?;
    let is_own = version.is_some();
    let types = Types::new(&profiles, is_own);
    let mut reader = OtlpReader {
        tables: &tables,
        start: profiles.iter().map(|head| head.start).min().unwrap_or(0),
        out: Stacks::new(&types.all)?,
        locations: Locations::new(is_own),
        contexts: Contexts::default(),
        identities: Vec::new(),
        known: HashMap::new(),
        rows: Vec::new(),
    };
    for (number, head) in (1..).zip(&profiles) {
        let of_type = types.find(head);
        reader
            .profile(head, &processes, of_type, types.all.len())
            .map_err(|damage| Damage::new(format!("profile {number}"), damage.reason))?;
    }
    let mut meta = recording(&profiles, &tables, is_own)?;
    meta.version = version.unwrap_or_default();
    if let [process] = &processes[..] {
        meta.pid = process.pid;
        meta.python.clone_from(&process.python);
    }
    meta.modules = modules(&tables)?;
    let mut profile = reader.finish(meta, types.all.len())?;
    if let Some(period) = types.period {
        profile.values.insert(1, period);
    }
    Ok(profile)
}

/// A `Profile` without its samples.
struct ProfileHead<'a> {
    /// Index of the process.
    process: usize,
    kind: ValueType,
    /// What values are multiplied with.
    scale: u64,
    period: Option<Value>,
    /// ns since the Unix epoch.
    start: u64,
    /// ns.
    duration: u64,
    attributes: Vec<i32>,
    bytes: &'a [u8],
}

impl<'a> ProfileHead<'a> {
    fn read(bytes: &'a [u8], process: usize, tables: &Tables<'_>) -> Result<ProfileHead<'a>, Damage> {
        let (mut kind, mut period_kind) = (&[][..], None);
        let mut period = 0;
        let (mut start, mut duration) = (0, 0);
        let mut attributes = Vec::new();
        for field in Fields(bytes) {
            match field? {
                (SAMPLE_TYPE, field) => kind = field.bytes(),
                (TIME, time) => start = time.number(),
                (DURATION, time) => duration = time.number(),
                (PERIOD_TYPE, kind) => period_kind = Some(kind.bytes()),
                (PERIOD, number) => period = number.number(),
                (ATTRIBUTES, field) => {
                    for index in field.numbers() {
                        attributes.push(index? as i32);
                    }
                }
                _ => {}
            }
        }
        let (kind, scale) = value_type(kind, tables)?;
        let period = match period_kind {
            Some(bytes) if (1..=i64::MAX as u64).contains(&period) => {
                let (kind, scale) = value_type(bytes, tables)?;
                (!kind.name.is_empty()).then(|| Value::per_count(kind, period.saturating_mul(scale)))
            }
            _ => None,
        };
        Ok(ProfileHead {
            process,
            kind,
            scale,
            period,
            start,
            duration,
            attributes,
            bytes,
        })
    }
}

/// Resources, profiles, and the version of nativeprof if it made all of them.
type Heads<'a> = (Vec<Process>, Vec<ProfileHead<'a>>, Option<String>);

fn heads<'a>(bytes: &'a [u8], tables: &Tables<'_>) -> Result<Heads<'a>, Damage> {
    let (mut processes, mut profiles, mut versions) = (Vec::new(), Vec::new(), Vec::new());
    for resource in Fields(bytes) {
        let (RESOURCES, resource) = resource? else {
            continue;
        };
        let mut process = Process::default();
        for field in Fields(resource.bytes()) {
            match field? {
                (HEAD, resource) => process = Process::read(resource.bytes(), tables)?,
                (CHILDREN, scope) => {
                    let mut version = None;
                    for field in Fields(scope.bytes()) {
                        match field? {
                            (HEAD, scope) => {
                                let scope: InstrumentationScope = decode(scope.bytes())?;
                                version = Some(scope.version).filter(|_| scope.name == otlp::SCOPE);
                            }
                            (CHILDREN, profile) => {
                                profiles.push(ProfileHead::read(profile.bytes(), processes.len(), tables)?);
                            }
                            _ => {}
                        }
                    }
                    versions.push(version);
                }
                _ => {}
            }
        }
        processes.push(process);
    }
    let is_own = versions.iter().all(Option::is_some);
    let version = versions.into_iter().flatten().next().filter(|_| is_own);
    Ok((processes, profiles, version))
}

/// What is measured, and its unit as a factor.
fn value_type(bytes: &[u8], tables: &Tables<'_>) -> Result<(ValueType, u64), Damage> {
    let kind: OtlpValueType = decode(bytes)?;
    let (unit, scale) = pprof::unit_of(&tables.text(kind.unit_strindex)?);
    let name = tables.text(kind.type_strindex)?.into_owned();
    Ok((ValueType::new(name, unit), scale))
}

/// The value types of a file.
struct Types {
    /// The count first.
    all: Vec<ValueType>,
    /// What each count amounts to.
    period: Option<Value>,
}

impl Types {
    fn new(profiles: &[ProfileHead<'_>], is_own: bool) -> Types {
        let mut all: Vec<ValueType> = Vec::new();
        for head in profiles {
            if all.len() <= MAX_VALUE_TYPES && !all.contains(&head.kind) {
                all.push(head.kind.clone());
            }
        }
        // Others have the most important one first, not the count.
        if let Some(count) = all.iter().position(|kind| kind.unit == Unit::Count)
            && !is_own
        {
            all[..=count].rotate_right(1);
        }
        if all.is_empty() {
            all.push(ValueType::SAMPLES);
        }
        let mut periods = profiles
            .iter()
            .filter(|head| all.first() == Some(&head.kind))
            .map(|head| &head.period);
        let period = periods.next().cloned().flatten();
        let period = period.filter(|period| {
            periods.all(|other| other.as_ref() == Some(period)) && all.iter().all(|kind| *kind != period.kind)
        });
        Types { all, period }
    }

    fn find(&self, head: &ProfileHead<'_>) -> usize {
        self.all.iter().position(|kind| *kind == head.kind).unwrap_or(0)
    }
}

/// An amount of a sample with a time.
struct Row {
    /// ns since the start.
    time: u64,
    /// Index in [`OtlpReader::identities`].
    identity: u32,
    /// Index of the value type.
    of_type: u32,
    amount: u64,
}

struct OtlpReader<'a> {
    tables: &'a Tables<'a>,
    /// ns since the Unix epoch.
    start: u64,
    out: Stacks,
    locations: Locations,
    contexts: Contexts,
    /// Where samples ended, and what else makes them one.
    identities: Vec<(PlaceId, Context)>,
    known: HashMap<(PlaceId, Context), u32>,
    rows: Vec<Row>,
}

impl OtlpReader<'_> {
    /// Adds the samples of a profile of the value type `of_type`; there are `types` in all.
    fn profile(
        &mut self,
        head: &ProfileHead<'_>,
        processes: &[Process],
        of_type: usize,
        types: usize,
    ) -> Result<(), Damage> {
        let samples = Fields(head.bytes).filter_map(|field| match field {
            Ok((SAMPLES, sample)) => Some(sample.bytes()),
            _ => None,
        });
        let unknown = Process::default();
        let process = processes.get(head.process).unwrap_or(&unknown);
        for (number, sample) in (1..).zip(samples) {
            let in_sample = |damage: Damage| Damage::whole(format!("sample {number}: {}", damage.reason));
            decode(sample)
                .and_then(|sample| self.sample(sample, head, (process, processes.len() > 1), of_type, types))
                .map_err(in_sample)?;
        }
        Ok(())
    }

    fn sample(
        &mut self,
        sample: OtlpSample,
        head: &ProfileHead<'_>,
        (process, by_process): (&Process, bool),
        of_type: usize,
        types: usize,
    ) -> Result<(), Damage> {
        let amounts: Result<Vec<u64>, Damage> = sample.values.iter().map(|value| amount(*value, head.scale)).collect();
        let (mut amounts, times) = (amounts?, &sample.timestamps_unix_nano);
        let key = (head.process, sample.attribute_indices, sample.link_index);
        let (tables, out) = (self.tables, &mut self.out);
        let context = self.contexts.find(key, process, by_process, tables, out)?;
        let place = self.locations.place(context.base, sample.stack_index, tables, out)?;
        if times.is_empty() {
            let mut of_types = vec![0; types];
            let sum = amounts.into_iter().fold(0u64, u64::saturating_add);
            if let Some(amount) = of_types.get_mut(of_type) {
                *amount = sum;
            }
            self.out.add(place, &of_types);
            return Ok(());
        }
        if amounts.is_empty() {
            amounts.resize(times.len(), head.scale);
        }
        if amounts.len() != times.len() {
            let (amounts, times) = (amounts.len(), times.len());
            return Err(Damage::whole(format!("{amounts} values at {times} times")));
        }
        let next = self.identities.len() as u32;
        let identity = *self.known.entry((place, context)).or_insert(next);
        if identity == next {
            self.identities.push((place, context));
        }
        let rows = times.iter().zip(amounts).map(|(time, amount)| Row {
            time: time.saturating_sub(self.start),
            identity,
            of_type: of_type as u32,
            amount,
        });
        self.rows.extend(rows);
        Ok(())
    }

    /// The profile. Amounts of one identity at one time are those of one sample.
    fn finish(mut self, meta: Meta, types: usize) -> Result<Profile, Damage> {
        self.rows.sort_by_key(|row| (row.time, row.identity, row.of_type));
        let mut labels = Vec::with_capacity(self.rows.len());
        for rows in self.rows.chunk_by(|a, b| (a.time, a.identity) == (b.time, b.identity)) {
            let [Row { time, identity, .. }, ..] = rows else {
                continue;
            };
            let Some((place, context)) = self.identities.get(*identity as usize).copied() else {
                continue;
            };
            // Several samples at once: the first amounts of all types are those of the first one.
            let mut of_types: Vec<&[Row]> = vec![&[]; types];
            for of_type in rows.chunk_by(|a, b| a.of_type == b.of_type) {
                let at = of_type.first().map_or(0, |row| row.of_type as usize);
                if let Some(rows) = of_types.get_mut(at) {
                    *rows = of_type;
                }
            }
            let samples = of_types.iter().map(|rows| rows.len()).max().unwrap_or(0);
            for sample in 0..samples {
                let amount = |rows: &&[Row]| rows.get(sample).map_or(0, |row| row.amount);
                let amounts: Vec<u64> = of_types.iter().map(amount).collect();
                self.out.sample(*time, context.thread, place, &amounts)?;
                labels.push(context.labels);
            }
        }
        let mut profile = self.out.finish(meta);
        profile.labels = Labels::new(&self.contexts.labels.all, labels);
        let threads = self.contexts.threads.into_iter();
        profile.meta.threads = threads.map(|((pid, tid), name)| (pid, tid, name)).collect();
        profile.meta.threads.sort_unstable();
        Ok(profile)
    }
}

/// A value of a sample.
fn amount(value: i64, scale: u64) -> Result<u64, Damage> {
    let value =
        u64::try_from(value).map_err(|_| Damage::whole("a negative amount, as in the difference of two profiles"))?;
    Ok(value.saturating_mul(scale))
}

/// What is known of the recording: the time of all profiles, and what nativeprof wrote about it.
fn recording(profiles: &[ProfileHead<'_>], tables: &Tables<'_>, is_own: bool) -> Result<Meta, Damage> {
    let start = profiles.iter().map(|head| head.start).min().unwrap_or(0);
    let end = profiles
        .iter()
        .map(|head| head.start.saturating_add(head.duration))
        .max();
    let mut meta = Meta {
        start: otlp::seconds(start),
        duration: otlp::seconds(end.unwrap_or(0).saturating_sub(start)),
        ..Meta::default()
    };
    let Some(first) = profiles.first().filter(|_| is_own) else {
        return Ok(meta);
    };
    let mut of_segment = None;
    for attribute in &first.attributes {
        let (key, value) = tables.attribute(*attribute)?;
        if let Some(fact) = otlp::TEXTS.iter().find(|fact| fact.key == key) {
            (fact.set)(&mut meta, tables.text_of(value.as_ref())?.unwrap_or_default());
        } else if let Some(fact) = otlp::NUMBERS.iter().find(|fact| fact.key == key) {
            (fact.set)(&mut meta, number_of(value.as_ref()).unwrap_or(0));
        } else if let Some(Any::List(list)) = value.and_then(|value| value.value) {
            match &*key {
                otlp::REASONS => set_reasons(&mut meta, &list, tables)?,
                otlp::SEGMENT => of_segment = Some(list),
                _ => {}
            }
        }
    }
    // What is known of all resources, not of the first one.
    if let Some(list) = of_segment {
        meta.quality = Quality::default();
        set_numbers(&mut meta, &list, tables)?;
    }
    meta.machine = meta.machine.bounded();
    Ok(meta)
}

/// Sets the numbers that a list has, and the reasons.
fn set_numbers(meta: &mut Meta, list: &KeyValueList, tables: &Tables<'_>) -> Result<(), Damage> {
    for entry in &list.values {
        let key = tables.key(entry)?;
        let value = entry.value.as_ref();
        if let Some(fact) = otlp::NUMBERS.iter().find(|fact| fact.key == key) {
            (fact.set)(meta, number_of(value).unwrap_or(0));
        } else if let (otlp::REASONS, Some(Any::List(list))) = (&*key, value.and_then(|value| value.value.as_ref())) {
            set_reasons(meta, list, tables)?;
        } else if let (otlp::SEGMENT_VERSION, Some(version @ otlp::NEXT_SEGMENT_VERSION..)) = (&*key, number_of(value))
        {
            return Err(Damage::whole(format!(
                "it is of version {version} of the format, which is newer than this nativeprof"
            )));
        }
    }
    Ok(())
}

fn set_reasons(meta: &mut Meta, list: &KeyValueList, tables: &Tables<'_>) -> Result<(), Damage> {
    for reason in &list.values {
        let samples = number_of(reason.value.as_ref()).unwrap_or(0);
        meta.quality.reasons.insert(tables.key(reason)?.into_owned(), samples);
    }
    Ok(())
}

/// Files of which more is known than their path, with most samples first.
fn modules(tables: &Tables<'_>) -> Result<Vec<ModuleMeta>, Damage> {
    let mut modules = Vec::new();
    for index in 1..tables.len(Table::Mappings) {
        let mapping: Mapping = tables.entry(Table::Mappings, i32::try_from(index).unwrap_or(0))?;
        let mut row = ModuleMeta::default();
        for attribute in &mapping.attribute_indices {
            let (key, value) = tables.attribute(*attribute)?;
            let (text, number) = (tables.text_of(value.as_ref())?, number_of(value.as_ref()));
            match &*key {
                otlp::BUILD_ID => row.build_id = text.unwrap_or_default(),
                otlp::SYMBOLS_FROM => row.symbols_from = text.unwrap_or_default(),
                otlp::SYMBOLS_MISSING => row.symbols_missing = text.unwrap_or_default(),
                otlp::FRAMES => row.frames = number.unwrap_or(0),
                otlp::UNNAMED => row.unnamed = number.unwrap_or(0),
                otlp::SAMPLES => row.samples = number.unwrap_or(0),
                _ => {}
            }
        }
        if row != ModuleMeta::default() {
            row.path = tables.text(mapping.filename_strindex)?.into_owned();
            modules.push(row);
        }
    }
    modules.sort_by_key(|row| std::cmp::Reverse(row.samples));
    Ok(modules)
}
