//! What is known of sending, as metrics of Prometheus.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::host::prometheus::MetricsText;

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
        let mut text = MetricsText::new("nativeprof_push_");
        text.one(
            "queue_segments",
            "gauge",
            "Segments that wait to be accepted.",
            self.queue_segments,
        );
        text.one(
            "queue_bytes",
            "gauge",
            "Bytes of these segments on the disk.",
            self.queue_bytes,
        );
        text.one(
            "queue_age_seconds",
            "gauge",
            "Time since the oldest of these segments was closed.",
            age.as_secs_f64(),
        );
        text.one(
            "retries_total",
            "counter",
            "Messages that had to be sent again.",
            self.retries,
        );
        text.one("segments_total", "counter", "Segments that were sent.", self.segments);
        text.one(
            "profiles_total",
            "counter",
            "Profiles that were accepted.",
            self.accepted_profiles,
        );
        text.one(
            "message_bytes_total",
            "counter",
            "Bytes of accepted messages before compression.",
            self.accepted_bytes,
        );
        text.one(
            "refused_profiles_total",
            "counter",
            "Profiles that the receiver refused.",
            self.refused_profiles,
        );
        text.one(
            "dropped_segments_total",
            "counter",
            "Segments that the history dropped before they were sent.",
            self.dropped_segments,
        );
        text.one(
            "damaged_segments_total",
            "counter",
            "Segments that could not be read.",
            self.damaged_segments,
        );
        text.one(
            "last_accepted_timestamp_seconds",
            "gauge",
            "When a message was accepted last; 0 if none was.",
            accepted.unwrap_or_default().as_secs_f64(),
        );
        let help = "Messages by the status of the answer, or by the kind of failure.";
        text.by("messages_total", "counter", help, "code", &self.messages);
        text.finish()
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
