//! The recorder's own metrics.

use std::collections::BTreeMap;
use std::fmt::Display;

use super::prometheus::MetricsText;

/// Counters and gauges of a recording of a host. Counters start at 0 with the process.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct HostMetrics {
    /// Samples taken, by quality.
    pub samples: BTreeMap<String, u64>,
    /// Samples lost, by reason.
    pub samples_lost: BTreeMap<String, u64>,
    /// Processes with samples: one with samples in several segments counts in each.
    pub processes_seen: u64,
    /// Those of them that were opened.
    pub processes_opened: u64,
    /// Those of them that could not be opened, by reason.
    pub processes_refused: BTreeMap<String, u64>,
    /// What was dropped because it had not been used for long, or a table was nearly full, by kind: it is read again when needed.
    pub dropped: BTreeMap<String, u64>,
    /// Entries of the recorder's tables at the end of the last segment, by kind.
    pub table_entries: BTreeMap<String, u64>,
    /// Labels that were not found or not remembered, by reason.
    pub label_problems: BTreeMap<String, u64>,
    /// CPU time used so far, in seconds, by part: `sampler`, `naming`, `network`, `bpf`.
    pub cpu_seconds: BTreeMap<String, f64>,
    /// Memory in use now, in bytes, by part.
    pub memory_bytes: BTreeMap<String, u64>,
    /// Samples per second and CPU that are asked for now.
    pub rate_hertz: f64,
    /// Segments written to the history.
    pub segments_written: u64,
    /// Segments dropped from the history because of its limits.
    pub segments_dropped: u64,
    /// Size of the history now, in bytes.
    pub history_bytes: u64,
    /// Errors, by kind.
    pub errors: BTreeMap<String, u64>,
    /// Time since the start, in seconds.
    pub uptime_seconds: f64,
}

impl HostMetrics {
    /// The metrics as text. Each line ends with a line feed.
    pub fn text(&self) -> String {
        let mut out = MetricsText::new("nativeprof_");
        by(
            &mut out,
            "samples_total",
            "counter",
            "Samples taken.",
            "quality",
            &self.samples,
        );
        by(
            &mut out,
            "samples_lost_total",
            "counter",
            "Samples lost.",
            "reason",
            &self.samples_lost,
        );
        out.one(
            "processes_seen_total",
            "counter",
            "Processes with samples, counted in each segment.",
            self.processes_seen,
        );
        out.one(
            "processes_opened_total",
            "counter",
            "Processes with samples that were opened, counted in each segment.",
            self.processes_opened,
        );
        let refused = "Processes with samples that could not be opened, counted in each segment.";
        by(
            &mut out,
            "processes_refused_total",
            "counter",
            refused,
            "reason",
            &self.processes_refused,
        );
        let dropped = "What was dropped because it had not been used for long, or its table was nearly full.";
        by(&mut out, "dropped_total", "counter", dropped, "kind", &self.dropped);
        let entries = "Entries of the tables of the profiler, at the end of a segment.";
        by(&mut out, "table_entries", "gauge", entries, "kind", &self.table_entries);
        by(
            &mut out,
            "label_problems_total",
            "counter",
            "Labels of processes that were not found, or not remembered.",
            "reason",
            &self.label_problems,
        );
        by(
            &mut out,
            "cpu_seconds_total",
            "counter",
            "CPU time of the profiler.",
            "part",
            &self.cpu_seconds,
        );
        by(
            &mut out,
            "memory_bytes",
            "gauge",
            "Memory of the profiler.",
            "part",
            &self.memory_bytes,
        );
        out.one(
            "sampling_rate_hertz",
            "gauge",
            "Samples per second and CPU.",
            self.rate_hertz,
        );
        out.one(
            "segments_written_total",
            "counter",
            "Segments written.",
            self.segments_written,
        );
        let dropped = "Segments dropped because of the limits of the history.";
        out.one("segments_dropped_total", "counter", dropped, self.segments_dropped);
        out.one("history_bytes", "gauge", "Size of the history.", self.history_bytes);
        by(&mut out, "errors_total", "counter", "Errors.", "kind", &self.errors);
        out.one("uptime_seconds", "gauge", "Time since the start.", self.uptime_seconds);
        let build = BTreeMap::from([(env!("CARGO_PKG_VERSION").to_string(), 1)]);
        by(
            &mut out,
            "build_info",
            "gauge",
            "Version of the profiler.",
            "version",
            &build,
        );
        out.finish()
    }
}

/// The same as [`MetricsText::by`], left out where there are no values.
fn by<V: Display>(
    out: &mut MetricsText,
    name: &str,
    kind: &str,
    help: &str,
    label: &str,
    values: &BTreeMap<String, V>,
) {
    if !values.is_empty() {
        out.by(name, kind, help, label, values);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_names_units_and_escaped_labels() {
        let metrics = HostMetrics {
            samples: BTreeMap::from([("exact".to_string(), 5)]),
            errors: BTreeMap::from([("a\"b\\c\nd".to_string(), 1)]),
            cpu_seconds: BTreeMap::from([("bpf".to_string(), 0.25)]),
            ..HostMetrics::default()
        };
        let text = metrics.text();
        for line in [
            "# TYPE nativeprof_samples_total counter",
            "nativeprof_samples_total{quality=\"exact\"} 5",
            "nativeprof_errors_total{kind=\"a\\\"b\\\\c\\nd\"} 1",
            "nativeprof_cpu_seconds_total{part=\"bpf\"} 0.25",
            "nativeprof_segments_written_total 0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
        }
        assert!(
            !text.contains("samples_lost_total"),
            "a metric without values has no head"
        );
    }
}
