#![no_main]

use libfuzzer_sys::fuzz_target;
use nativeprof::process::smaps::Smaps;

fuzz_target!(|text: &[u8]| {
    let smaps = Smaps::read(text).expect("bytes");
    assert!(smaps.areas.is_sorted_by(|a, b| a.end <= b.start));
    for area in &smaps.areas {
        assert!(area.start < area.end && smaps.name(area).len() <= text.len().max(32));
        assert_eq!(smaps.area_of(area.start), Some(area));
    }
});
