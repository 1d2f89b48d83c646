#![no_main]

use libfuzzer_sys::fuzz_target;
use symbolize::JitCode;

fuzz_target!(|file: &[u8]| {
    let Ok(code) = JitCode::from_jitdump(std::io::Cursor::new(file)) else {
        return;
    };
    let words = file
        .chunks_exact(8)
        .map(|w| u64::from_le_bytes(w.try_into().expect("eight bytes")));
    for at in words.chain([0, u64::MAX]).take(300) {
        for at in [at, at.wrapping_add(1), at.wrapping_sub(1)] {
            let _ = code.lookup(at);
        }
    }
});
