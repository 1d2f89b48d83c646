#![no_main]

use libfuzzer_sys::fuzz_target;
use nativeprof::process::maps;

fuzz_target!(|text: &[u8]| {
    let mappings = maps::parse(text);
    assert!(mappings.len() <= text.len() / 8);
    assert!(mappings.iter().all(|m| m.start < m.end && m.path.len() <= text.len()));
});
