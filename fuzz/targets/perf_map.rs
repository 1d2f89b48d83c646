#![no_main]

use libfuzzer_sys::fuzz_target;
use symbolize::JitCode;

fuzz_target!(|map: &[u8]| {
    let code = JitCode::from_perf_map(map).expect("memory can be read");
    // Every number of the file as an address, and its neighbors.
    let text = String::from_utf8_lossy(map);
    let numbers = text
        .split_ascii_whitespace()
        .filter_map(|w| u64::from_str_radix(w.trim_start_matches("0x"), 16).ok());
    for at in numbers.chain([0, u64::MAX]).take(300) {
        for at in [at, at.wrapping_add(1), at.wrapping_sub(1)] {
            assert!(code.lookup(at).is_none_or(|s| s.start <= at && at - s.start < s.size));
        }
    }
});
