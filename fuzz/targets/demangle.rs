#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(name) = std::str::from_utf8(data) {
        let shown = symbolize::demangle(name);
        assert!(!shown.is_empty() || name.is_empty());
        assert!(
            shown.len() <= (1 << 16) + name.len(),
            "{} bytes of {}",
            shown.len(),
            name.len()
        );
    }
});
