#![no_main]
//! Reads a profile file, and writes it in every format.

use libfuzzer_sys::fuzz_target;
use nativeprof::export::FORMATS;
use nativeprof::profile::json;

fuzz_target!(|text: &[u8]| {
    let Ok(profile) = json::read(text) else {
        return;
    };
    let mut again = Vec::new();
    json::write(&profile, &mut again).expect("memory takes everything");
    json::read(&again).expect("what was written can be read");
    for format in FORMATS {
        // A format may refuse a profile.
        let _ = (format.write)(&profile, &mut std::io::sink());
    }
});
