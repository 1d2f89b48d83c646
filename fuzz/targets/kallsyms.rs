#![no_main]

use libfuzzer_sys::fuzz_target;
use symbolize::Kernel;

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let Ok(kernel) = Kernel::parse(&text) else {
        return;
    };
    let starts = text
        .lines()
        .filter_map(|l| u64::from_str_radix(l.split_ascii_whitespace().next()?, 16).ok());
    for at in starts.chain([0, u64::MAX]).take(200) {
        for at in [at, at.wrapping_add(1), at.wrapping_sub(1)] {
            assert!(kernel.lookup(at).is_none_or(|s| s.start <= at));
        }
    }
});
