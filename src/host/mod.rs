//! Whole hosts, recorded for months: segments of a minute, a budget that is kept, labels of what was sampled, and the
//! recorder's own metrics and log.

pub mod budget;
pub mod labels;
pub mod logs;
pub mod metrics;
pub mod metrics_server;
pub mod prometheus;
pub mod recorder;
pub mod repetitions;
pub mod sd_notify;
