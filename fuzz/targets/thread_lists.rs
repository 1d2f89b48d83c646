#![no_main]

use libfuzzer_sys::fuzz_target;
use nativeprof::interp::threads;
use nativeprof::layout::{Interpreter, Own, Tls};
use nativeprof_fuzz::{Bytes, Mirrors};

fuzz_target!(|data: &[u8]| {
    let mut b = Bytes(data);
    let python = Interpreter {
        layout: b.layout(),
        runtime: b.u64(),
        own: Own::Listed,
        tls: Tls::Glibc(0),
    };
    for (_, mut states) in threads::nested(&Mirrors(b.0), &python) {
        let all = states.len();
        states.sort_unstable();
        states.dedup();
        assert!(all > 0 && states.len() == all, "a state was listed twice");
    }
});
