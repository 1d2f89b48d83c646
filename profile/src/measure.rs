//! What a sample of a recording amounts to, and the value types that follow from it.

use super::model::Meta;
use super::values::{Value, ValueType};

/// What one sample amounts to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// One occurrence of an event that is no clock, such as a page fault.
    Event,
    /// One period of a clock, ns; 0: not known.
    Period(Clock, u64),
    /// A time of its own, running or waiting. It counts as so many periods of this length, ns.
    Time(u64),
    /// An amount of memory of its own. Samples are taken at so many bytes on average: a piece of `s` bytes with the probability
    /// 1 - exp(-s / interval), by which its amount is divided.
    Bytes(u64),
}

/// What a clock counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// The time that threads run.
    Cpu,
    /// The time that passes.
    Wall,
}

/// Names of events that are clocks, and of recordings without one: as in [`Meta::event`].
const CLOCKS: &[(&str, Clock)] = &[
    ("", Clock::Cpu),
    ("cpu-clock", Clock::Cpu),
    ("cpu-time", Clock::Cpu),
    ("task-clock", Clock::Cpu),
    ("cycles", Clock::Cpu),
    ("wall-clock", Clock::Wall),
];

impl Default for Measure {
    fn default() -> Measure {
        Measure::Period(Clock::Cpu, 0)
    }
}

impl Measure {
    /// One period of a clock that samples at `rate` Hz; a rate of 0 means unknown.
    pub fn period(clock: Clock, rate: u64) -> Measure {
        Measure::Period(clock, length(rate))
    }

    /// Times, counted in the periods of `rate` Hz.
    pub fn time(rate: u64) -> Measure {
        Measure::Time(length(rate).max(1))
    }

    /// The measure of a file that says only which event it samples, and at which rate in Hz.
    pub fn of_event(event: &str, rate: u64) -> Measure {
        let event = event.strip_suffix(GIL_HOLDERS).unwrap_or(event);
        match CLOCKS.iter().find(|(name, _)| *name == event) {
            Some((_, clock)) => Measure::period(*clock, rate),
            None => Measure::Event,
        }
    }

    /// Whether samples represent times of different lengths, and threads are sampled off the CPU, too.
    pub fn is_time(self) -> bool {
        matches!(self, Measure::Time(_))
    }

    /// Whether each sample is a period of CPU time.
    pub fn is_cpu_time(self) -> bool {
        matches!(self, Measure::Period(Clock::Cpu, _))
    }

    /// How many samples a part of a thread's time counts as; `None`: it does not count. `is_running`: it is time on the CPU;
    /// `time` in ns.
    #[inline]
    pub fn count(self, is_running: bool, time: u64) -> Option<u32> {
        match self {
            Measure::Event | Measure::Period(..) | Measure::Bytes(_) => is_running.then_some(1),
            Measure::Time(_) if time == 0 => None,
            Measure::Time(period) => Some(periods(time, period)),
        }
    }

    /// The same where the interval between samples of memory was doubled so many times.
    pub fn doubled(self, times: u32) -> Measure {
        match self {
            Measure::Bytes(interval) => Measure::Bytes(interval.saturating_mul(1 << times.min(63))),
            other => other,
        }
    }

    /// What a sampled piece of memory stands for, bytes: itself and those like it that were not sampled. 0 where memory is not
    /// measured.
    pub fn bytes(self, piece: u64) -> u64 {
        match self {
            Measure::Bytes(interval) if piece > 0 => {
                let size = piece as f64;
                (size / -(-size / interval.max(1) as f64).exp_m1()).round() as u64
            }
            _ => 0,
        }
    }

    /// The value types where each sample amounts to the same, with what it amounts to: samples, and the clock's time. A
    /// profile of times has columns instead.
    pub fn values(self) -> Vec<Value> {
        let time = match self {
            Measure::Period(Clock::Cpu, ns) if ns > 0 => Some(Value::per_count(ValueType::CPU, ns)),
            Measure::Period(Clock::Wall, ns) | Measure::Time(ns) if ns > 0 => {
                Some(Value::per_count(ValueType::WALL, ns))
            }
            Measure::Event | Measure::Period(..) | Measure::Time(_) | Measure::Bytes(_) => None,
        };
        let samples = Value::per_count(ValueType::SAMPLES, 1);
        std::iter::once(samples).chain(time).collect()
    }
}

/// Periods of so many ns in a time, rounded, at least one.
#[inline]
fn periods(time: u64, period: u64) -> u32 {
    let periods = time.saturating_add(period / 2) / period.max(1);
    u32::try_from(periods).unwrap_or(u32::MAX).max(1)
}

/// The period of a rate in Hz, ns; 0 if it is not known.
fn length(rate: u64) -> u64 {
    1_000_000_000u64.checked_div(rate).unwrap_or(0)
}

/// What follows the event's name in [`Meta::event`] if only threads that hold the GIL are sampled.
const GIL_HOLDERS: &str = " of GIL holders";

impl Meta {
    /// The event, without what [`event_name`] adds to it.
    pub fn event_alone(&self) -> &str {
        self.event.strip_suffix(GIL_HOLDERS).unwrap_or(&self.event)
    }

    /// Whether only threads were sampled that held the GIL.
    pub fn is_of_gil_holders(&self) -> bool {
        self.event.ends_with(GIL_HOLDERS)
    }
}

/// The name of an event in [`Meta::event`].
pub fn event_name(event: &str, gil_only: bool) -> String {
    if gil_only {
        format!("{event}{GIL_HOLDERS}")
    } else {
        event.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_time_count_as_periods() {
        let time = Measure::time(100);
        for (measure, is_running, ns, expected) in [
            (Measure::Event, true, 0, Some(1)),
            (Measure::Event, false, 5_000_000, None),
            (Measure::default(), true, 0, Some(1)),
            (time, true, 0, None),
            (time, false, 1, Some(1)),
            (time, false, 14_999_999, Some(1)),
            (time, true, 15_000_000, Some(2)),
            (time, true, u64::MAX, Some(u32::MAX)),
        ] {
            assert_eq!(measure.count(is_running, ns), expected, "{measure:?} {ns}");
        }
    }

    #[test]
    fn pieces_of_memory_stand_for_those_that_were_not_sampled() {
        let memory = Measure::Bytes(1 << 19);
        for (measure, piece, expected) in [
            (memory, 0, 0),
            (memory, 4096, 526_339), // nearly the interval
            (memory, 1 << 19, 829_411),
            (memory, 1 << 30, 1 << 30), // always sampled
            (Measure::Bytes(0), 4096, 4096),
            (Measure::Event, 4096, 0),
        ] {
            assert_eq!(measure.bytes(piece), expected, "{measure:?} {piece}");
        }
    }

    #[test]
    fn events_of_files_have_values() {
        let names = |event: &str, rate: u64| -> Vec<String> {
            let values = Measure::of_event(event, rate).values();
            values.iter().map(|value| value.kind.key()).collect()
        };
        for (event, rate, expected) in [
            ("cpu-clock", 100, &["samples", "cpu_ns"][..]),
            ("cpu-clock of GIL holders", 100, &["samples", "cpu_ns"]),
            ("", 99, &["samples", "cpu_ns"]),
            ("wall-clock", 100, &["samples", "wall_ns"]),
            ("page-faults", 100, &["samples"]),
            ("cycles", 0, &["samples"]),
        ] {
            assert_eq!(names(event, rate), expected, "{event}");
        }
    }
}
