#![no_main]
//! Reads a file of Python's pstats, and writes it as JSON and as pstats again.

use libfuzzer_sys::fuzz_target;
use nativeprof::export::by_name;
use nativeprof::profile::{json, pstats};

fuzz_target!(|bytes: &[u8]| {
    let Ok(profile) = pstats::read(bytes) else {
        return;
    };
    let mut out = Vec::new();
    json::write(&profile, &mut out).expect("memory takes everything");
    json::read(&out).expect("what was written can be read");
    let mut again = Vec::new();
    let format = by_name("pstats").expect("a format");
    (format.write)(&profile, &mut again).expect("memory takes everything");
    pstats::read(&again).expect("what was written can be read");
});
