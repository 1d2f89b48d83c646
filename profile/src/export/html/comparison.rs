//! What the page of a comparison has in addition to the stacks of both profiles.
//!
//! ```text
//! {"before", "after": names of the profiles, "amounts": what amounts are parts of,
//!  "question": what the intervals are about,
//!  "normalize": share|rate|time|number, "self": what "changes" are changes of, "confidence": percent,
//!  "changes": [function, before, after, low, high, significant, makesUp] of functions that were tested; low and high of
//!             numbers are null}
//! ```

use std::collections::HashMap;
use std::io::{self, Write};

use super::data::{list, short};
use crate::diff::{Change, Diff, Normalization};
use crate::escape::write_json;
use crate::model::Profile;
use crate::view::{View, identifier};

/// A comparison of two profiles, for the page.
pub struct Comparison<'a> {
    /// Both sides as one profile, see [`crate::diff::both`].
    pub both: &'a Profile,
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
            Normalization::Number => "number",
        };
        let Comparison {
            is_self, confidence, ..
        } = self;
        write!(
            out,
            "{{\"normalize\":\"{normalization}\",\"self\":{is_self},\"confidence\":{confidence}"
        )?;
        let question = self.found.question.to_string();
        let [before, after] = self.names;
        for (key, name) in [
            ("before", before),
            ("after", after),
            ("amounts", self.amounts),
            ("question", &question),
        ] {
            write!(out, ",\"{key}\":")?;
            write_json(&short(name), out)?;
        }
        let numbers: HashMap<&str, usize> = view.identifiers.iter().map(String::as_str).zip(0..).collect();
        let is_tested = |row: &&Change<'_>| row.interval.is_some() || row.ranges.is_some();
        let tested = self.found.rows.iter().filter(is_tested).filter_map(|row| {
            let function = *numbers.get(identifier(row.frame).as_str())?;
            Some((function, row))
        });
        list("changes", tested, out, |(function, row), out| {
            let (before, after) = (row.before, row.after);
            write!(out, "[{function},{before},{after},")?;
            match row.interval {
                Some((low, high)) => write!(out, "{low},{high}")?,
                None => write!(out, "null,null")?,
            }
            write!(out, ",{},{}]", row.is_significant(), row.makes_up)
        })?;
        out.write_all(b"}")
    }
}
