//! Shared by several backends.

pub mod block_cache;
pub mod jitter;
pub mod mapping_tracker;
pub mod perf_ring;
pub mod polled;
pub mod rng;
pub mod seen_code;
pub mod sideband;
pub mod stack_copy;
pub mod suspensions;
pub mod throttling;
