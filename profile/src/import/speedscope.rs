//! speedscope's own JSON, with sampled and evented profiles.
//!
//! A file has several profiles, as a rule one for each thread, and all are read as one. Each unit is a value type. A
//! profile in a unit of time is in chronological order, so its stacks are samples with a time, in a thread of its name.
//! In files of ours the threads' profiles repeat the samples of the merged ones, which are read.
//!
//! Source: `file-format-schema.json` of speedscope 1.25.

use std::borrow::Cow;

use super::Damage;
use super::frames;
use super::stacks::{Stacks, amount};
use crate::export::collapsed::NO_STACK;
use crate::json::JsonError;
use crate::json::lexer::{Lexer, Members};
use crate::model::{FrameId, Meta, PlaceId, Profile};
use crate::values::{Unit, ValueType};

/// Maximum number of profiles in a file.
const MAX_PROFILES: usize = 1 << 16;

/// Names of profiles of our files that have all samples begin so.
const MERGED: &str = "all threads, merged";

/// Units, and what their amounts are multiplied with.
const UNITS: &[(&str, Unit, f64)] = &[
    ("nanoseconds", Unit::Nanoseconds, 1.0),
    ("microseconds", Unit::Nanoseconds, 1e3),
    ("milliseconds", Unit::Nanoseconds, 1e6),
    ("seconds", Unit::Nanoseconds, 1e9),
    ("bytes", Unit::Bytes, 1.0),
];

/// A profile: what it says of itself, and where its lists begin.
#[derive(Default)]
struct Part<'a> {
    name: Cow<'a, str>,
    unit: Cow<'a, str>,
    start: f64,
    end: f64,
    is_evented: bool,
    samples: Option<usize>,
    weights: Option<usize>,
    events: Option<usize>,
}

impl Part<'_> {
    fn unit(&self) -> (Unit, f64) {
        let known = UNITS.iter().find(|(name, ..)| *name == self.unit);
        known.map_or((Unit::Count, 1.0), |(_, unit, scale)| (*unit, *scale))
    }

    /// What it measures. Files of others do not say which time it is.
    fn value_type(&self) -> ValueType {
        let unit = self.unit().0;
        match (
            self.name.strip_prefix(MERGED).and_then(|rest| rest.strip_prefix(": ")),
            unit,
        ) {
            (Some(value), _) => ValueType::new(value, unit),
            (None, Unit::Count) => ValueType::SAMPLES,
            (None, Unit::Nanoseconds) => ValueType::new("time", unit),
            (None, Unit::Bytes) => ValueType::new("bytes", unit),
        }
    }
}

/// Reads such a file.
///
/// # Errors
/// It is damaged, or exceeds a limit.
pub fn read(bytes: &[u8]) -> Result<Profile, Damage> {
    let mut lexer = Lexer::new(bytes)?;
    let (mut parts, mut frames_at, mut exporter) = (Vec::new(), None, Cow::Borrowed(""));
    let mut members = Members::default();
    while let Some(key) = lexer.key(&mut members)? {
        match &*key {
            "profiles" => parts = read_parts(&mut lexer)?,
            "shared" => frames_at = find_frames(&mut lexer)?,
            "exporter" if lexer.peek() == Some(b'"') => exporter = lexer.string()?,
            _ => lexer.skip_value()?,
        }
    }
    let is_ours = exporter.starts_with("nativeprof") && parts.iter().any(|part| part.name.starts_with(MERGED));
    if is_ours {
        parts.retain(|part| part.name.starts_with(MERGED));
    }
    // That of counts first.
    parts.sort_by_key(|part| part.unit().0 != Unit::Count);
    let mut types: Vec<ValueType> = Vec::new();
    for part in &parts {
        let kind = part.value_type();
        if !types.contains(&kind) {
            types.push(kind);
        }
    }
    let mut reader = SpeedscopeReader {
        out: Stacks::new(&types)?,
        amounts: vec![0; types.len().max(1)],
        frames: Vec::new(),
        lexer,
        value: 0,
        scale: 1.0,
        thread: None,
    };
    if let Some(at) = frames_at {
        reader.read_frames(at)?;
    }
    let mut threads = Vec::new();
    for (number, part) in (1u32..).zip(&parts) {
        let kind = part.value_type();
        reader.value = types.iter().position(|known| *known == kind).unwrap_or(0);
        reader.scale = part.unit().1;
        let is_timed = kind.unit == Unit::Nanoseconds && !is_ours;
        reader.thread = is_timed.then_some((0, number));
        if is_timed {
            threads.push((0, number, part.name.to_string()));
        }
        let at = |damage: Damage| Damage::new(format!("profile {number}"), format!("{} {}", damage.reason, damage.at));
        if part.is_evented {
            reader.evented(part).map_err(at)?;
        } else {
            reader.sampled(part).map_err(at)?;
        }
    }
    Ok(reader.out.finish(Meta {
        threads,
        ..Meta::default()
    }))
}

fn read_parts<'a>(lexer: &mut Lexer<'a>) -> Result<Vec<Part<'a>>, Damage> {
    let (mut parts, mut items) = (Vec::new(), Members::default());
    while lexer.item(&mut items)? {
        if parts.len() == MAX_PROFILES {
            return Err(Damage::whole(format!(
                "more than {MAX_PROFILES} profiles; that is the limit"
            )));
        }
        let (mut part, mut members) = (Part::default(), Members::default());
        while let Some(key) = lexer.key(&mut members)? {
            let next = lexer.peek();
            let here = (next == Some(b'[')).then_some(lexer.at);
            match &*key {
                "name" if next == Some(b'"') => part.name = lexer.string()?,
                "unit" if next == Some(b'"') => part.unit = lexer.string()?,
                "type" if next == Some(b'"') => part.is_evented = lexer.string()? == "evented",
                "startValue" => part.start = lexer.number()?.unwrap_or(0.0),
                "endValue" => part.end = lexer.number()?.unwrap_or(0.0),
                "samples" | "weights" | "events" => {
                    match &*key {
                        "samples" => part.samples = here,
                        "weights" => part.weights = here,
                        _ => part.events = here,
                    }
                    lexer.skip_value()?;
                }
                _ => lexer.skip_value()?,
            }
        }
        parts.push(part);
    }
    Ok(parts)
}

/// Where the list of frames begins.
fn find_frames(lexer: &mut Lexer<'_>) -> Result<Option<usize>, JsonError> {
    let (mut found, mut members) = (None, Members::default());
    while let Some(key) = lexer.key(&mut members)? {
        if key == "frames" && lexer.peek() == Some(b'[') {
            found = Some(lexer.at);
        }
        lexer.skip_value()?;
    }
    Ok(found)
}

struct SpeedscopeReader<'a> {
    out: Stacks,
    lexer: Lexer<'a>,
    /// By index in the file, the frame and its line; `None`: it says that there is no frame.
    frames: Vec<Option<(FrameId, u32)>>,
    /// Amounts by value type; all 0 between samples.
    amounts: Vec<u64>,
    /// Value type of the profile that is being read, what its amounts are multiplied with, and its thread if it has times.
    value: usize,
    scale: f64,
    thread: Option<(u32, u32)>,
}

impl SpeedscopeReader<'_> {
    fn read_frames(&mut self, at: usize) -> Result<(), Damage> {
        self.lexer.at = at;
        let mut items = Members::default();
        while self.lexer.item(&mut items)? {
            let lexer = &mut self.lexer;
            let (mut name, mut file, mut line) = (Cow::Borrowed(""), Cow::Borrowed(""), 0);
            let mut members = Members::default();
            while let Some(key) = lexer.key(&mut members)? {
                let is_text = lexer.peek() == Some(b'"');
                match &*key {
                    "name" if is_text => name = lexer.string()?,
                    "file" if is_text => file = lexer.string()?,
                    "line" => line = lexer.number()?.map_or(0, |line| line as u32),
                    _ => lexer.skip_value()?,
                }
            }
            let frame = (name != NO_STACK).then(|| (self.out.frame(frames::in_file(&name, &file)), line));
            self.frames.push(frame);
        }
        Ok(())
    }

    fn place(&mut self, caller: PlaceId, frame: Option<f64>) -> Result<PlaceId, Damage> {
        let known = index(frame).and_then(|at| self.frames.get(at));
        match known.copied() {
            Some(Some((frame, line))) => self.out.place(caller, frame, line),
            Some(None) => Ok(caller),
            None => Err(Damage::whole("a frame that does not exist")),
        }
    }

    /// Adds an amount in the unit of the profile, that began at a time.
    fn add(&mut self, time: f64, place: PlaceId, number: f64) -> Result<(), Damage> {
        let (value, scale) = (self.value, self.scale);
        if let Some(to) = self.amounts.get_mut(value) {
            *to = amount(number * scale);
        }
        match self.thread {
            Some(thread) => self.out.sample(amount(time * scale), thread, place, &self.amounts)?,
            None => self.out.add(place, &self.amounts),
        }
        self.amounts.fill(0);
        Ok(())
    }

    /// Stacks, outermost frame first, each with a weight. Empty ones are times in which nothing ran.
    fn sampled(&mut self, part: &Part<'_>) -> Result<(), Damage> {
        let (Some(samples), Some(weights)) = (part.samples, part.weights) else {
            return Err(Damage::whole("no samples or no weights"));
        };
        let (mut places, mut items) = (Vec::new(), Members::default());
        self.lexer.at = samples;
        while self.lexer.item(&mut items)? {
            let (mut place, mut is_empty, mut frames) = (Stacks::ROOT, true, Members::default());
            while self.lexer.item(&mut frames)? {
                let frame = self.lexer.number()?;
                place = self.place(place, frame)?;
                is_empty = false;
            }
            places.push((!is_empty).then_some(place));
        }
        let (mut time, mut at, mut items) = (part.start, 0, Members::default());
        self.lexer.at = weights;
        while self.lexer.item(&mut items)? {
            let weight = self.lexer.number()?.unwrap_or(0.0);
            match places.get(at) {
                Some(Some(place)) => self.add(time - part.start, *place, weight)?,
                Some(None) => {}
                None => return Err(Damage::whole("more weights than samples")),
            }
            (time, at) = (time + weight, at + 1);
        }
        if at < places.len() {
            return Err(Damage::whole("fewer weights than samples"));
        }
        Ok(())
    }

    /// Frames that open and close.
    fn evented(&mut self, part: &Part<'_>) -> Result<(), Damage> {
        let Some(events) = part.events else {
            return Err(Damage::whole("no events"));
        };
        self.lexer.at = events;
        let mut before = part.start;
        let mut open: Vec<(usize, PlaceId)> = Vec::new();
        let mut items = Members::default();
        while self.lexer.item(&mut items)? {
            let (mut is_open, mut frame, mut at) = (false, None, before);
            let mut members = Members::default();
            while let Some(key) = self.lexer.key(&mut members)? {
                match &*key {
                    "type" if self.lexer.peek() == Some(b'"') => is_open = self.lexer.string()? == "O",
                    "frame" => frame = self.lexer.number()?,
                    "at" => at = self.lexer.number()?.unwrap_or(before),
                    _ => self.lexer.skip_value()?,
                }
            }
            if let Some((_, place)) = open.last()
                && at > before
            {
                self.add(before - part.start, *place, at - before)?;
            }
            before = at.max(before);
            let number = index(frame).ok_or_else(|| Damage::whole("an event without a frame"))?;
            if is_open {
                let caller = open.last().map_or(Stacks::ROOT, |(_, place)| *place);
                open.push((number, self.place(caller, frame)?));
            } else if open.pop().is_none_or(|(last, _)| last != number) {
                return Err(Damage::whole(format!(
                    "frame {number} closes, but is not the innermost one"
                )));
            }
        }
        if let Some((_, place)) = open.last()
            && part.end > before
        {
            self.add(before - part.start, *place, part.end - before)?;
        }
        Ok(())
    }
}

fn index(number: Option<f64>) -> Option<usize> {
    number.filter(|number| *number >= 0.0).map(|number| number as usize)
}
