//! Words that options take, and those that shells complete.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};

use crate::capture::{EVENT_KINDS, EventKind, MODES, Mode};
use crate::export::FORMATS;

/// Accepts any text; shells complete these words.
#[derive(Clone)]
pub struct Offered(Vec<&'static str>);

impl TypedValueParser for Offered {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.0.iter().map(PossibleValue::new)))
    }
}

/// Names of modes.
pub fn modes() -> impl TypedValueParser<Value = Mode> {
    Offered(MODES.iter().map(|(name, _)| *name).collect()).try_map(|text| mode(&text))
}

/// Names of events.
pub fn event_kinds() -> impl TypedValueParser<Value = EventKind> {
    Offered(EVENT_KINDS.iter().map(|(name, _)| *name).collect()).try_map(|text| event_kind(&text))
}

/// Names of formats. An unknown one is refused with the output.
pub fn formats() -> Offered {
    Offered(FORMATS.iter().map(|format| format.name).collect())
}

/// Values that profiles often have; others are events.
pub fn values() -> Offered {
    Offered(vec![
        "samples",
        "cpu",
        "wall",
        "off_cpu",
        "await",
        "calls",
        "allocs",
        "alloc_bytes",
        "live_bytes",
        "live_allocs",
        "rss_bytes",
        "rss_peak_bytes",
        "rss_grown_bytes",
        "rss_returned_bytes",
        "peak_bytes",
        "leaked_bytes",
        "mapped_bytes",
    ])
}

/// Kinds of waits that profiles often have.
pub fn wait_kinds() -> Offered {
    Offered(vec![
        "gil",
        "lock",
        "condition",
        "futex",
        "sleep",
        "read",
        "write",
        "poll",
        "accept",
        "connect",
        "runnable",
    ])
}

fn mode(text: &str) -> Result<Mode, String> {
    let names: Vec<_> = MODES.iter().map(|(name, _)| *name).collect();
    let found = MODES.iter().find(|(name, _)| *name == text).map(|(_, mode)| *mode);
    found.ok_or_else(|| format!("expected one of {}", names.join(", ")))
}

fn event_kind(text: &str) -> Result<EventKind, String> {
    let names: Vec<_> = EVENT_KINDS.iter().map(|(name, _)| *name).collect();
    let found = EVENT_KINDS
        .iter()
        .find(|(name, _)| *name == text)
        .map(|(_, kind)| *kind);
    found.ok_or_else(|| format!("expected one of {}", names.join(", ")))
}
