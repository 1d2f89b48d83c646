//! Stacks of a file, within limits.

use super::Damage;
use crate::build::Builder;
use crate::model::{Frame, FrameId, Meta, PlaceId, Profile};
use crate::values::ValueType;

/// Maximum number of distinct stacks by line, those of callers included. They take some 200 bytes each.
pub const MAX_PLACES: usize = 4 << 20;
/// Maximum number of value types.
pub const MAX_VALUE_TYPES: usize = 32;
/// Maximum number of frames on top of each other.
pub const MAX_DEPTH: u32 = 100_000;
/// Maximum number of samples with a time.
pub const MAX_SAMPLES: usize = 16 << 20;

/// A [`Builder`] that refuses what exceeds the limits.
pub struct Stacks {
    builder: Builder,
    /// By place, frames on top of each other.
    depths: Vec<u32>,
    samples: usize,
    /// When the last sample was taken, ns.
    end: u64,
}

impl Stacks {
    pub const ROOT: PlaceId = Builder::ROOT_PLACE;

    /// Of these value types, that of the counts first.
    pub fn new(types: &[ValueType]) -> Result<Stacks, Damage> {
        if types.len() > MAX_VALUE_TYPES {
            return Err(Damage::whole(format!(
                "more than {MAX_VALUE_TYPES} units, events or types of samples; that is the limit"
            )));
        }
        Ok(Stacks {
            builder: Builder::new(types),
            depths: vec![0],
            samples: 0,
            end: 0,
        })
    }

    /// Of samples alone; [`Stacks::value`] adds further types.
    pub fn of_samples() -> Stacks {
        Stacks {
            builder: Builder::new(&[ValueType::SAMPLES]),
            depths: vec![0],
            samples: 0,
            end: 0,
        }
    }

    /// Adds a value type behind the others.
    pub fn value(&mut self, kind: ValueType) -> Result<(), Damage> {
        if self.builder.value(kind) >= MAX_VALUE_TYPES {
            return Err(Damage::whole(format!(
                "more than {MAX_VALUE_TYPES} units, events or types of samples; that is the limit"
            )));
        }
        Ok(())
    }

    /// The number of a function.
    pub fn frame(&mut self, frame: Frame) -> FrameId {
        self.builder.frame(frame)
    }

    /// The place of a frame at a line that was called from another place.
    pub fn place(&mut self, caller: PlaceId, frame: FrameId, line: u32) -> Result<PlaceId, Damage> {
        let depth = self.depths.get(caller as usize).map_or(1, |depth| depth + 1);
        if depth > MAX_DEPTH {
            return Err(Damage::whole(format!(
                "a stack of more than {MAX_DEPTH} frames; that is the limit"
            )));
        }
        let place = self.builder.place(caller, frame, line);
        if self.depths.len() < self.builder.places() {
            self.depths.push(depth);
        }
        if self.depths.len() > MAX_PLACES {
            return Err(Damage::whole(format!(
                "more than {MAX_PLACES} different stacks; that is the limit"
            )));
        }
        Ok(place)
    }

    /// Adds self amounts, one for each value type.
    pub fn add(&mut self, place: PlaceId, amounts: &[u64]) {
        self.builder.add_at_place(place, amounts);
    }

    /// The same of a sample with a time in ns since the start.
    pub fn sample(&mut self, time: u64, thread: (u32, u32), place: PlaceId, amounts: &[u64]) -> Result<(), Damage> {
        if self.samples == MAX_SAMPLES {
            return Err(Damage::whole(format!(
                "more than {MAX_SAMPLES} samples; that is the limit"
            )));
        }
        self.samples += 1;
        self.end = self.end.max(time);
        self.builder.sample_at_place(time, thread, place, amounts);
        Ok(())
    }

    /// Adds the amounts of others without a timeline. `columns`: by value type of those, the number of the type here.
    ///
    /// # Errors
    /// Together they exceed a limit.
    pub fn add_all(&mut self, other: &Stacks, columns: &[usize]) -> Result<(), Damage> {
        let frames = self.builder.frames_of(&other.builder);
        let mut places = Vec::with_capacity(other.builder.places());
        places.push(Stacks::ROOT);
        for (caller, frame, line) in other.builder.calls() {
            let place = self.place(places[caller as usize], frames[frame as usize], line)?;
            places.push(place);
        }
        self.builder.add_all(&other.builder, &places, columns);
        Ok(())
    }

    /// The profile. Without a duration it is as long as its samples.
    pub fn finish(self, mut meta: Meta) -> Profile {
        if meta.duration <= 0.0 {
            meta.duration = self.end as f64 / 1e9;
        }
        self.builder.finish(meta)
    }
}

/// A number of a file as an amount: rounded, and 0 if it is negative or none.
pub fn amount(number: f64) -> u64 {
    // Conversion saturates.
    number.round() as u64
}
