//! Profiles with exact numbers of calls: of each function its calls, and of sampled ones its time with an interval.

use std::collections::HashMap;

use crate::cli::output::no_such_function;
use crate::cli::output::table::{Cell, plain};
use crate::cli::output::table_rows::{ReportRow, SampledTime};
use crate::error::Result;
use crate::profile::intervals;
use crate::profile::model::{Frame, FrameKind, Profile};
use crate::profile::stats::{FunctionId, Stats};
use crate::profile::values::{Unit, ValueType};
use crate::profile::views::ViewOptions;

/// What makes a function the same one in several views of a profile: its kind, name, file or module, and where it is in there.
#[derive(PartialEq, Eq, Hash)]
pub struct FunctionKey(FrameKind, String, String, u64);

impl FunctionKey {
    pub fn of(frame: &Frame) -> FunctionKey {
        let (place, at) = match frame.kind {
            FrameKind::Python => (&frame.filename, frame.first_line.into()),
            _ => (&frame.module, frame.address),
        };
        FunctionKey(frame.kind, frame.name.clone(), place.clone(), at)
    }
}

/// Whether a profile has exact calls, and samples of the time.
pub fn is_counted_and_sampled(profile: &Profile) -> bool {
    *profile.count_type() == ValueType::SAMPLES && profile.find_value(&ValueType::CALLS.name).is_some()
}

/// How often each function was called.
pub struct Calls(HashMap<FunctionKey, u64>);

impl Calls {
    /// `None` for profiles without calls, and where calls are what is shown. `view`: of what it keeps, all functions have their
    /// own calls, none those of functions that it folds into them.
    ///
    /// # Errors
    /// `Data` if there is no function to focus on.
    pub fn of(profile: &Profile, view: &ViewOptions) -> Result<Option<Calls>> {
        let Some(calls) = profile.find_value(&ValueType::CALLS.name).filter(|value| *value > 0) else {
            return Ok(None);
        };
        let unfolded = ViewOptions {
            focus: view.focus.clone(),
            ..ViewOptions::all()
        };
        let profile = unfolded.apply(profile.clone()).map_err(no_such_function)?;
        let mut stats = Stats::new(&profile);
        stats.select(profile.self_amounts(calls));
        let mut sums: HashMap<FunctionKey, u64> = HashMap::new();
        for (id, counts) in stats.functions().into_iter().enumerate() {
            let sum = sums.entry(FunctionKey::of(stats.frame(id as FunctionId))).or_default();
            *sum = sum.saturating_add(counts.self_count);
        }
        Ok(Some(Calls(sums)))
    }

    pub fn of_function(&self, frame: &Frame) -> u64 {
        self.0.get(&FunctionKey::of(frame)).copied().unwrap_or(0)
    }
}

/// The calls of a row; empty where they were not counted.
pub fn calls_cell(row: &ReportRow) -> Cell {
    let calls = row.calls.filter(|calls| *calls > 0);
    plain(calls.map_or(String::new(), |calls| calls.to_string()))
}

/// Times of the functions of a sampled profile, by their numbers.
pub struct SampledTimes {
    intervals: Vec<(f64, f64)>,
    /// Time of all samples, ns.
    time: u64,
    /// Time of a sample, ns.
    per_sample: f64,
}

impl SampledTimes {
    /// `None` if the profile does not show samples, or these have no time.
    pub fn of(profile: &Profile) -> Option<SampledTimes> {
        let time = profile.total_amount(profile.default_time()?);
        let samples = profile.nodes.first()?.count;
        if *profile.count_type() != ValueType::SAMPLES || samples == 0 {
            return None;
        }
        Some(SampledTimes {
            intervals: intervals::self_shares(profile),
            time,
            per_sample: time as f64 / samples as f64,
        })
    }

    /// Of one function, which has so many self samples.
    pub fn row(&self, function: FunctionId, self_count: u64) -> SampledTime {
        let (low, high) = self.intervals.get(function as usize).copied().unwrap_or((0.0, 1.0));
        let part = |share: f64| (share * self.time as f64).round() as u64;
        SampledTime {
            time: (self_count as f64 * self.per_sample).round() as u64,
            interval: (part(low), part(high)),
        }
    }
}

impl SampledTime {
    pub fn time(&self) -> Cell {
        plain(Unit::Nanoseconds.show(self.time))
    }

    pub fn interval(&self) -> Cell {
        let show = |time: u64| Unit::Nanoseconds.show(time);
        plain(format!("{} to {}", show(self.interval.0), show(self.interval.1)))
    }
}
