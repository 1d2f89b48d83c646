//! What is known of sending, as metrics of Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Counters since the start, and the state of the queue.
#[derive(Clone, Debug, Default)]
pub struct PushMetrics {
    /// Segments that the receiver has not accepted in whole, and their bytes on the disk.
    pub queue_segments: u64,
    pub queue_bytes: u64,
    /// When the oldest of them was closed.
    pub queue_oldest: Option<SystemTime>,
    /// Messages by the answer's code, or by the kind of failure.
    pub messages: BTreeMap<String, u64>,
    /// Messages that were to be sent again.
    pub retries: u64,
    /// Segments that were sent, in whole or without what was refused.
    pub segments: u64,
    pub accepted_profiles: u64,
    /// Before compression.
    pub accepted_bytes: u64,
    /// Profiles that the receiver refused, by messages and by partial success.
    pub refused_profiles: u64,
    /// Segments that the history dropped before they were sent.
    pub dropped_segments: u64,
    pub damaged_segments: u64,
    pub last_accepted: Option<SystemTime>,
}

impl PushMetrics {
    /// The metrics in the text format of Prometheus.
    pub fn text(&self, now: SystemTime) -> String {
        let age = self
            .queue_oldest
            .map_or(Duration::ZERO, |oldest| now.duration_since(oldest).unwrap_or_default());
        let accepted = self.last_accepted.and_then(|last| last.duration_since(UNIX_EPOCH).ok());
        let mut text = String::new();
        for (name, kind, help, value) in [
            (
                "queue_segments",
                "gauge",
                "Segments that wait to be accepted.",
                self.queue_segments as f64,
            ),
            (
                "queue_bytes",
                "gauge",
                "Bytes of these segments on the disk.",
                self.queue_bytes as f64,
            ),
            (
                "queue_age_seconds",
                "gauge",
                "Time since the oldest of these segments was closed.",
                age.as_secs_f64(),
            ),
            (
                "retries_total",
                "counter",
                "Messages that had to be sent again.",
                self.retries as f64,
            ),
            (
                "segments_total",
                "counter",
                "Segments that were sent.",
                self.segments as f64,
            ),
            (
                "profiles_total",
                "counter",
                "Profiles that were accepted.",
                self.accepted_profiles as f64,
            ),
            (
                "message_bytes_total",
                "counter",
                "Bytes of accepted messages before compression.",
                self.accepted_bytes as f64,
            ),
            (
                "refused_profiles_total",
                "counter",
                "Profiles that the receiver refused.",
                self.refused_profiles as f64,
            ),
            (
                "dropped_segments_total",
                "counter",
                "Segments that the history dropped before they were sent.",
                self.dropped_segments as f64,
            ),
            (
                "damaged_segments_total",
                "counter",
                "Segments that could not be read.",
                self.damaged_segments as f64,
            ),
            (
                "last_accepted_timestamp_seconds",
                "gauge",
                "When a message was accepted last; 0 if none was.",
                accepted.unwrap_or_default().as_secs_f64(),
            ),
        ] {
            let _ = writeln!(text, "# HELP nativeprof_push_{name} {help}");
            let _ = writeln!(text, "# TYPE nativeprof_push_{name} {kind}");
            let _ = writeln!(text, "nativeprof_push_{name} {value}");
        }
        text.push_str(
            "# HELP nativeprof_push_messages_total Messages by the status of the answer, or by the kind of failure.\n",
        );
        text.push_str("# TYPE nativeprof_push_messages_total counter\n");
        for (code, count) in &self.messages {
            let _ = writeln!(text, "nativeprof_push_messages_total{{code=\"{code}\"}} {count}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_text_with_types() {
        let metrics = PushMetrics {
            queue_oldest: Some(UNIX_EPOCH),
            messages: BTreeMap::from([("200".into(), 3), ("timeout".into(), 1)]),
            dropped_segments: 2,
            ..PushMetrics::default()
        };
        let text = metrics.text(UNIX_EPOCH + Duration::from_millis(1500));
        for line in [
            "nativeprof_push_queue_age_seconds 1.5",
            "nativeprof_push_dropped_segments_total 2",
            "nativeprof_push_messages_total{code=\"200\"} 3",
            "# TYPE nativeprof_push_messages_total counter",
            "nativeprof_push_messages_total{code=\"timeout\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}:\n{text}");
        }
    }
}
