//! What the page of a comparison has in addition to the stacks of both profiles.
//!
//! ```text
//! {"before", "after": names of the profiles, "amounts": what amounts are parts of, "normalize": share|rate|time,
//!  "self": what "changes" are changes of, "confidence": percent,
//!  "sides": [{"total", "ofSample", "ofProcess"}] (see `profile::diff::Side`),
//!  "changes": [function, before, after, low, high, significant] of functions that were tested}
//! ```

use std::collections::HashMap;
use std::io::{self, Write};

use super::data::{list, short};
use crate::diff::{Both, Diff, Normalization};
use crate::escape::write_json;
use crate::view::{View, identifier};

/// A comparison of two profiles, for the page.
pub struct Comparison<'a> {
    /// Both profiles as one.
    pub both: &'a Both,
    /// The changes that were found.
    pub found: &'a Diff<'a>,
    /// Of the older and of the newer profile.
    pub names: [&'a str; 2],
    /// What the amounts in `found` are parts of: `all samples`.
    pub amounts: &'a str,
    /// How these amounts are normalized.
    pub normalization: Normalization,
    /// Whether `found` compares self samples, not total ones.
    pub is_self: bool,
    /// Of the intervals in `found`, percent.
    pub confidence: f64,
}

impl Comparison<'_> {
    /// Writes the JSON object; `view` is that of the profile in `both`.
    pub(super) fn write(&self, view: &View<'_>, out: &mut Vec<u8>) -> io::Result<()> {
        let normalization = match self.normalization {
            Normalization::Share => "share",
            Normalization::Rate => "rate",
            Normalization::Time => "time",
        };
        let Comparison {
            is_self, confidence, ..
        } = self;
        write!(
            out,
            "{{\"normalize\":\"{normalization}\",\"self\":{is_self},\"confidence\":{confidence}"
        )?;
        let [before, after] = self.names;
        for (key, name) in [("before", before), ("after", after), ("amounts", self.amounts)] {
            write!(out, ",\"{key}\":")?;
            write_json(&short(name), out)?;
        }
        list("sides", self.both.sides.iter(), out, |side, out| {
            let (total, sample, process) = (side.total, side.of_sample, side.of_process);
            write!(
                out,
                "{{\"total\":{total},\"ofSample\":{sample},\"ofProcess\":{process}}}"
            )
        })?;
        let numbers: HashMap<&str, usize> = view.identifiers.iter().map(String::as_str).zip(0..).collect();
        let tested = self.found.rows.iter().filter_map(|row| {
            let (low, high) = row.interval?;
            Some((*numbers.get(identifier(row.frame).as_str())?, row, low, high))
        });
        list("changes", tested, out, |(function, row, low, high), out| {
            let (before, after, sure) = (row.before, row.after, row.is_significant());
            write!(out, "[{function},{before},{after},{low},{high},{sure}]")
        })?;
        out.write_all(b"}")
    }
}
