#![no_main]
//! Reads a file of OTLP profiles, and the same as a segment of a host.

use libfuzzer_sys::fuzz_target;
use nativeprof::profile::import::{SegmentNames, Segments, Selection};

fuzz_target!(|bytes: &[u8]| {
    nativeprof_fuzz::import("otlp", bytes);
    let mut segments = Segments::new(Selection::default());
    let _ = segments.add(bytes);
    segments.finish();
    let _ = SegmentNames::default().add(bytes);
});
