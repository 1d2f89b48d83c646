#![no_main]
//! Notes of probes (USDT) in files, and the places of their arguments.

use libfuzzer_sys::fuzz_target;
use nativeprof::event::probes::MAX_ARGUMENTS;
use nativeprof::process::probes::{self, Assembler};

fuzz_target!(|bytes: &[u8]| {
    let notes: Vec<_> = probes::notes(bytes).collect();
    assert!(notes.len() <= bytes.len() / 12);
    for text in notes.iter().map(|note| note.arguments).chain([bytes]) {
        for assembler in [Assembler::X86_64, Assembler::Aarch64] {
            let arguments = probes::arguments(text, assembler).unwrap_or_default();
            assert!(arguments.len() <= MAX_ARGUMENTS);
        }
    }
});
