#![no_main]
//! Divides a file of OTLP profiles into messages: they go on, and each can be divided again.

use libfuzzer_sys::fuzz_target;
use nativeprof::profile::otlp_parts::{OtlpParts, PartEnd};

fuzz_target!(|bytes: &[u8]| {
    let Ok(file) = OtlpParts::new(bytes.to_vec()) else {
        return;
    };
    for (max, ends) in [(1, PartEnd::File), (300, PartEnd::Resource), (usize::MAX, PartEnd::File)] {
        let mut from = 0;
        while let Ok(Some(part)) = file.part(from, max, ends) {
            assert!(part.end > from);
            let again = OtlpParts::new(part.message).expect("a message");
            assert_eq!(again.samples(), part.end - from);
            assert!(again.part(0, usize::MAX, PartEnd::File).is_ok());
            from = part.end;
        }
    }
});
