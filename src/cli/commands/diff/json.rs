//! The comparison as JSON.

use serde_json::{Value, json};

use super::gate::Verdict;
use super::text::Text;
use crate::cli::output::table_rows::ReportRow;
use crate::cli::output::{JSON_VERSION, row_filter};
use crate::profile::diff::{Change, Normalization, Question};

impl Text<'_> {
    /// The object that `--json` prints.
    pub fn json(&self, filters: &[row_filter::RowFilter], verdict: Option<&Verdict<'_>>) -> Value {
        let value = |change: &Change<'_>| {
            json!({
                "before": change.before,
                "after": change.after,
                "change": change.change(),
                "interval": change.interval.map(|(low, high)| [low, high]),
                "significant": change.is_significant(),
                "ranges": change.ranges.map(|ranges| ranges.map(|(lowest, highest)| [lowest, highest])),
                "makes_up": change.makes_up,
                "interpreter_internal": change.interpreter_internal,
                "samples": [change.samples.0, change.samples.1],
            })
        };
        let row = |(change, row): (&Change<'_>, ReportRow)| {
            let mut value = value(change);
            for key in ["id", "kind", "name", "place"] {
                if let Some(text) = row.json().get(key) {
                    value[key] = text.clone();
                }
            }
            value
        };
        let files = self.files.each_ref().map(|files| {
            let files = files.iter().map(|path| path.to_string_lossy().into_owned());
            files.collect::<Vec<_>>()
        });
        let (question, paired) = match self.found.question {
            Question::Recordings => ("recordings", false),
            Question::Runs { paired, .. } => ("runs", paired),
            Question::Numbers => ("numbers", false),
        };
        let mut rows = self.rows(filters);
        let shown = self.options.page.page().cut(&mut rows);
        let output = json!({
            "version": JSON_VERSION,
            "before": files[0].join(", "),
            "after": files[1].join(", "),
            "files": files,
            "question": question,
            "paired": paired,
            "value": self.sides[1].sum.count_type().key(),
            "samples": self.sides.map(|side| side.sum.total_amount(0)),
            "unit": match self.normalization {
                Normalization::Share => "fraction of all samples".into(),
                Normalization::Rate => format!("{} seconds per second", self.time()),
                Normalization::Time => format!("{} seconds", self.time()),
                Normalization::Number => "calls".into(),
            },
            "count": if self.self_count { "self" } else { "total" },
            "confidence": self.options.confidence / 100.0,
            "machines": self.machines,
            "limit": verdict.map(|verdict| verdict.limit.to_string()),
            "verdict": verdict.map(|verdict| verdict.gate.name()),
            "reasons": verdict.map_or_else(Vec::new, |verdict| verdict.lines().collect()),
            "tested": self.found.rows.iter().filter(|row| row.interval.is_some() || row.ranges.is_some()).count(),
            "significant": self.found.rows.iter().filter(|row| row.is_significant()).count(),
            "all": self.found.all.as_ref().map(value),
            "renamed": self.found.renamed.iter().map(|(old, new)| json!({"before": old, "after": new})).collect::<Vec<_>>(),
        });
        shown.with_rows(output, "rows", rows.into_iter().map(row).collect())
    }
}
