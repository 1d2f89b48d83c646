#![no_main]
//! Reads a profile file, and writes it, and a part of its time, in every format.

use std::borrow::Cow;
use std::io::sink;

use libfuzzer_sys::fuzz_target;
use nativeprof::export::{FORMATS, cut};
use nativeprof::profile::json;

fuzz_target!(|text: &[u8]| {
    let Ok(profile) = json::read(text) else {
        return;
    };
    let mut again = Vec::new();
    json::write(&profile, &mut again).expect("memory takes everything");
    json::read(&again).expect("what was written can be read");
    let part = cut::by_time(&profile, profile.end() / 3, Some(profile.end() / 2));
    for format in FORMATS {
        // A format may refuse a profile.
        for profile in [&profile, &part] {
            let _ = (format.write)(profile, &mut sink());
            let _ = (format.write)(&format.with_value(Cow::Borrowed(profile), None), &mut sink());
        }
    }
});
