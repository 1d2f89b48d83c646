//! pprof's protocol buffer, decompressed.
//!
//! Sample types are value types, in ns and bytes; the first one that counts something is the count. Labels are not
//! read: a profile has those of samples with a time, and these have none.
//!
//! Source: `proto/profile.proto` of google/pprof.

use std::borrow::Cow;
use std::collections::HashMap;

use super::Damage;
use super::frames::{self, base_name};
use super::stacks::Stacks;
use super::wire::{Field, Fields, Malformed};
use crate::export::collapsed::NO_STACK;
use crate::model::{Frame, FrameId, FrameKind, Meta, PlaceId, Profile};
use crate::values::{Unit, ValueType};

// Fields of `Profile`.
const SAMPLE_TYPE: u64 = 1;
const SAMPLE: u64 = 2;
const MAPPING: u64 = 3;
const LOCATION: u64 = 4;
const FUNCTION: u64 = 5;
const STRING_TABLE: u64 = 6;
const TIME_NANOS: u64 = 9;
const DURATION_NANOS: u64 = 10;
/// The highest one.
const MAX_FIELD: u64 = 15;

impl From<Malformed> for Damage {
    fn from(_: Malformed) -> Damage {
        Damage::whole("a part of it is no protocol buffer; it is truncated or damaged")
    }
}

/// Whether it is a message with what every profile has: sample types, and strings of which the first one is empty.
pub fn is(bytes: &[u8]) -> bool {
    let first = |wanted: u64| {
        Fields(bytes)
            .map_while(Result::ok)
            .find(|(number, _)| *number == wanted)
    };
    let is_known = matches!(Fields(bytes).next(), Some(Ok((1..=MAX_FIELD, _))));
    is_known && first(SAMPLE_TYPE).is_some() && first(STRING_TABLE) == Some((STRING_TABLE, Field::Bytes(b"")))
}

/// Reads such a file.
///
/// # Errors
/// It is malformed, has negative amounts, or exceeds a limit.
pub fn read(bytes: &[u8]) -> Result<Profile, Damage> {
    let tables = PprofTables::read(bytes)?;
    let order = tables.order();
    let types: Vec<ValueType> = order
        .iter()
        .filter_map(|at| Some(tables.types.get(*at)?.0.clone()))
        .collect();
    let mut out = PprofReader {
        out: Stacks::new(&types)?,
        functions: HashMap::new(),
        places: HashMap::new(),
        tables: &tables,
    };
    let samples = Fields(bytes).filter_map(|field| match field {
        Ok((SAMPLE, sample)) => Some(sample.bytes()),
        _ => None,
    });
    for (number, sample) in (1..).zip(samples) {
        out.sample(sample, &order)
            .map_err(|damage| Damage::new(format!("sample {number}"), damage.reason))?;
    }
    let seconds = |ns: u64| (ns as i64).max(0) as f64 / 1e9;
    Ok(out.out.finish(Meta {
        start: seconds(tables.start),
        duration: seconds(tables.duration),
        ..Meta::default()
    }))
}

/// A location: its module, its address, and where its lines are.
struct Location {
    mapping: u64,
    address: u64,
    lines: std::ops::Range<usize>,
}

#[derive(Default)]
struct Function {
    name: u64,
    file: u64,
    first_line: u32,
}

#[derive(Default)]
struct PprofTables<'a> {
    strings: Vec<&'a [u8]>,
    /// Each with what its amounts are multiplied with.
    types: Vec<(ValueType, u64)>,
    /// By identifier, the string of the file's name.
    mappings: HashMap<u64, u64>,
    locations: HashMap<u64, Location>,
    /// (function, line) of all locations, innermost first.
    lines: Vec<(u64, u32)>,
    functions: HashMap<u64, Function>,
    start: u64,
    duration: u64,
}

impl<'a> PprofTables<'a> {
    fn read(bytes: &'a [u8]) -> Result<PprofTables<'a>, Damage> {
        let mut tables = PprofTables::default();
        let mut types = Vec::new();
        for field in Fields(bytes) {
            match field? {
                (SAMPLE_TYPE, kind) => types.push(kind.bytes()),
                (MAPPING, mapping) => {
                    let [id, file] = numbers(mapping, [1, 5])?;
                    tables.mappings.insert(id, file);
                }
                (LOCATION, location) => tables.location(location.bytes())?,
                (FUNCTION, function) => {
                    let [id, name, file, line] = numbers(function, [1, 2, 4, 5])?;
                    let function = Function {
                        name,
                        file,
                        first_line: u32::try_from(line).unwrap_or(0),
                    };
                    tables.functions.insert(id, function);
                }
                (STRING_TABLE, text) => tables.strings.push(text.bytes()),
                (TIME_NANOS, time) => tables.start = time.number(),
                (DURATION_NANOS, time) => tables.duration = time.number(),
                _ => {}
            }
        }
        for kind in types {
            let [name, unit] = numbers(Field::Bytes(kind), [1, 2])?;
            let (name, (unit, scale)) = (tables.text(name), unit_of(&tables.text(unit)));
            tables.types.push((ValueType::new(name, unit), scale));
        }
        if tables.types.is_empty() {
            return Err(Damage::whole("it has no sample type"));
        }
        Ok(tables)
    }

    fn location(&mut self, bytes: &'a [u8]) -> Result<(), Damage> {
        let [id, mapping, address] = numbers(Field::Bytes(bytes), [1, 2, 3])?;
        let start = self.lines.len();
        for field in Fields(bytes) {
            if let (4, line) = field? {
                let [function, line] = numbers(line, [1, 2])?;
                self.lines.push((function, u32::try_from(line).unwrap_or(0)));
            }
        }
        let location = Location {
            mapping,
            address,
            lines: start..self.lines.len(),
        };
        self.locations.insert(id, location);
        Ok(())
    }

    fn text(&self, at: u64) -> Cow<'a, str> {
        let text = usize::try_from(at).ok().and_then(|at| self.strings.get(at));
        frames::text(text.copied().unwrap_or_default())
    }

    /// The sample types in the order of the profile: the count first.
    fn order(&self) -> Vec<usize> {
        let count = self.types.iter().position(|(kind, _)| kind.unit == Unit::Count);
        let first = count.unwrap_or(0);
        let rest = (0..self.types.len()).filter(|at| *at != first);
        std::iter::once(first).chain(rest).collect()
    }

    /// A function in the code of a location.
    fn frame(&self, function: &Function, location: &Location, is_inlined: bool) -> Frame {
        let (name, file) = (self.text(function.name), self.text(function.file));
        if let Some(frame) = frames::special(&name) {
            return frame;
        }
        if frames::is_python(&file) {
            return match function.first_line {
                0 => frames::python(&name, &file),
                line => frames::python_defined(&name, &file, line),
            };
        }
        let module = self.module(location);
        // Files that are no source are libraries.
        let (source, library) = if frames::is_source(&file) {
            (&*file, "")
        } else {
            ("", &*file)
        };
        let module = if module.is_empty() { library } else { &*module };
        let frame = frames::native(&name, source, module);
        match frame.kind {
            FrameKind::Native if is_inlined => Frame {
                kind: FrameKind::Inlined,
                ..frame
            },
            _ => frame,
        }
    }

    fn module(&self, location: &Location) -> String {
        let file = self.mappings.get(&location.mapping).map(|file| self.text(*file));
        base_name(file.as_deref().unwrap_or_default()).to_string()
    }

    /// Code without a name.
    fn unknown(&self, location: &Location) -> Frame {
        match &*self.module(location) {
            "" => Frame {
                address: location.address,
                ..Frame::new(FrameKind::Unknown, "[unknown]")
            },
            module => frames::native("[unknown]", "", module),
        }
    }
}

struct PprofReader<'a> {
    out: Stacks,
    tables: &'a PprofTables<'a>,
    /// By function, mapping, and whether it is inlined.
    functions: HashMap<(u64, u64, bool), FrameId>,
    /// By place and location, the place of its innermost function: a location may have many.
    places: HashMap<(PlaceId, u64), PlaceId>,
}

impl PprofReader<'_> {
    fn sample(&mut self, bytes: &[u8], order: &[usize]) -> Result<(), Damage> {
        let (mut ids, mut values): (Vec<u64>, Vec<i64>) = (Vec::new(), Vec::new());
        for field in Fields(bytes) {
            match field? {
                (1, locations) => {
                    for id in locations.numbers() {
                        ids.push(id?);
                    }
                }
                (2, amounts) => {
                    for amount in amounts.numbers() {
                        values.push(amount? as i64);
                    }
                }
                _ => {}
            }
        }
        let mut place = Stacks::ROOT;
        for id in ids.iter().rev() {
            place = match self.places.get(&(place, *id)) {
                Some(known) => *known,
                None => {
                    let location = self.tables.locations.get(id);
                    let location = location.ok_or_else(|| Damage::whole(format!("location {id} does not exist")))?;
                    let inner = self.location(place, location)?;
                    self.places.insert((place, *id), inner);
                    inner
                }
            };
        }
        let mut amounts = Vec::with_capacity(order.len());
        for at in order {
            let scale = self.tables.types.get(*at).map_or(1, |(_, scale)| *scale);
            let value = u64::try_from(values.get(*at).copied().unwrap_or(0))
                .map_err(|_| Damage::whole("a negative amount, as in the difference of two profiles"))?;
            amounts.push(value.saturating_mul(scale));
        }
        self.out.add(place, &amounts);
        Ok(())
    }

    fn location(&mut self, mut place: PlaceId, location: &Location) -> Result<PlaceId, Damage> {
        let tables = self.tables;
        let lines = tables.lines.get(location.lines.clone()).unwrap_or_default();
        if lines.is_empty() {
            let frame = self.out.frame(tables.unknown(location));
            return self.out.place(place, frame, 0);
        }
        for (at, (id, line)) in lines.iter().rev().enumerate() {
            if tables
                .functions
                .get(id)
                .is_some_and(|function| tables.text(function.name) == NO_STACK)
            {
                continue;
            }
            let known = self.functions.get(&(*id, location.mapping, at > 0)).copied();
            let frame = match (known, tables.functions.get(id)) {
                (Some(known), _) => known,
                (None, Some(function)) => {
                    let frame = self.out.frame(tables.frame(function, location, at > 0));
                    self.functions.insert((*id, location.mapping, at > 0), frame);
                    frame
                }
                (None, None) => self.out.frame(tables.unknown(location)),
            };
            place = self.out.place(place, frame, *line)?;
        }
        Ok(place)
    }
}

/// The numbers of some fields of a message; 0 for those that it does not have.
fn numbers<const N: usize>(message: Field<'_>, fields: [u64; N]) -> Result<[u64; N], Malformed> {
    let mut numbers = [0; N];
    for field in Fields(message.bytes()) {
        let (field, value) = field?;
        if let Some(at) = fields.iter().position(|known| *known == field) {
            numbers[at] = value.number();
        }
    }
    Ok(numbers)
}

/// A unit of pprof's, and what its amounts are multiplied with.
pub fn unit_of(name: &str) -> (Unit, u64) {
    match name {
        "nanoseconds" | "ns" => (Unit::Nanoseconds, 1),
        "microseconds" | "us" => (Unit::Nanoseconds, 1_000),
        "milliseconds" | "ms" => (Unit::Nanoseconds, 1_000_000),
        "seconds" | "s" => (Unit::Nanoseconds, 1_000_000_000),
        "bytes" | "byte" => (Unit::Bytes, 1),
        "kilobytes" | "kb" => (Unit::Bytes, 1 << 10),
        "megabytes" | "mb" => (Unit::Bytes, 1 << 20),
        _ => (Unit::Count, 1),
    }
}
